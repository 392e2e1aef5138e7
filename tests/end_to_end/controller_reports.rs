//! Reports to users: scheduled Jobs that fail, and Pods that cannot start.

use super::controller_tasks::policy;
use crate::support::controller::Controller;
use crate::support::kubelet::{Kubelet, Plan, message};
use crate::support::namespace::{NO_ELECTION, POLICIES, TASKS, TestNamespace, condition_of, until};
use crate::support::proxy::{Call, Effect, Proxy, Timing};
use serde_json::{Value, json};
use std::time::Duration;

async fn ready_policy(space: &TestNamespace, name: &str) {
    policy(space, name).await;
    space.wait_condition(name, "Ready", "True").await;
}

/// Creates a Job of a CronJob, as `kubectl create job --from` does.
async fn run(space: &TestNamespace, cron: &str, job: &str) {
    let cron_job = space.must_get("cronjobs", cron).await;
    let template = &cron_job["spec"]["jobTemplate"];
    let mut spec = template["spec"].clone();
    spec["backoffLimit"] = json!(0);
    let created = json!({
        "metadata": {
            "name": job,
            "labels": template["metadata"]["labels"],
            "ownerReferences": [{
                "apiVersion": "batch/v1", "kind": "CronJob", "name": cron,
                "uid": cron_job["metadata"]["uid"], "controller": true,
            }],
        },
        "spec": spec,
    });
    space.create("jobs", created).await;
}

/// A scheduled snapshot fails after its retries, and the next one succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_scheduled_job_leaves_a_trace() {
    let space = TestNamespace::new("traces").await;
    let kubelet = Kubelet::start(&space).await;
    let controller = Controller::start(&space, &NO_ELECTION).await;
    ready_policy(&space, "main").await;
    space.leases("main", 100, 100).await;
    space.wait_condition("main", "BackupReady", "True").await;
    // Lease times have whole seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let said = message("snapshot full", 74, "NoSpace", "the disk is full");
    kubelet.plan(&[("work", "full-snapshot")], Plan::Exit(74, said));
    run(&space, "main-full", "main-full-1").await;
    let failed = space.wait_condition("main", "BackupReady", "False").await;
    assert_eq!(failed["reason"], "NoSpace", "{failed}");
    let text = failed["message"].as_str().unwrap();
    assert!(
        text.contains("main-full-1") && text.contains("the disk is full"),
        "{text}"
    );
    let policy = space.must_get(POLICIES, "main").await;
    let last = &policy["status"]["lastRuns"]["full"];
    assert_eq!(
        (&last["result"], &last["reason"]),
        (&"Failed".into(), &"NoSpace".into())
    );
    assert!(
        last["started"].is_string() && last["ended"].is_string(),
        "{last}"
    );
    space.wait_for_event("main", "JobFailed").await;
    let series = format!(
        r#"deltafold_job_failures_total{{namespace="{}",policy="main",kind="full",reason="NoSpace"}}"#,
        space.name
    );
    assert_eq!(controller.metric(&series), 1.0);

    // Kubernetes shows when it was.
    let events = space.list("events", "").await;
    assert!(
        events.iter().all(|e| e["lastTimestamp"].is_string()),
        "{events:?}"
    );

    let snapshot = json!({
        "command": "snapshot full", "status": "Succeeded", "code": 0, "reason": null, "retry": null,
        "message": null, "seconds": 1, "finished_at": "2026-11-20T12:00:00Z",
        "result": {"revision": 120, "snapshots": [{"name": "Full-00000000-00000120-1790000000"}]},
    });
    kubelet.plan(
        &[("work", "full-snapshot")],
        Plan::Exit(0, snapshot.to_string()),
    );
    run(&space, "main-full", "main-full-2").await;
    space
        .wait_policy("main", "it knows the new full", |p| {
            p["status"]["lastRuns"]["full"]["snapshot"] == "Full-00000000-00000120-1790000000"
        })
        .await;
    space.wait_condition("main", "BackupReady", "True").await;
    assert_eq!(controller.metric(&series), 1.0);
}

async fn forbid_pods(space: &TestNamespace) {
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}});
    space.create("resourcequotas", quota).await;
}

async fn verify_within(space: &TestNamespace, start_deadline: &str) {
    let task = json!({
        "metadata": {"name": "check"},
        "spec": {"policy": "main", "type": "Verify", "startDeadline": start_deadline},
    });
    space.create(TASKS, task).await;
}

/// Kubernetes' Warnings say why a Pod does not start; that they cannot be read delays nothing.
#[tokio::test(flavor = "multi_thread")]
async fn warnings_that_cannot_be_read_stop_nothing() {
    let space = TestNamespace::new("warnings").await;
    let _kubelet = Kubelet::start(&space).await;
    forbid_pods(&space).await;
    let proxy = Proxy::start(space.api.url());
    let reads = |call: &Call| call.verb == "list" && call.resource == "events";
    let refused = Effect::Answer(500, "InternalError");
    proxy.inject(reads, 0, usize::MAX, Timing::Before, refused);
    let _controller = Controller::through(&proxy, &space, &NO_ELECTION).await;
    ready_policy(&space, "main").await;
    verify_within(&space, "15s").await;
    let failed = space.wait_task("check", "Failed").await;
    assert_eq!(failed["status"]["lastErrors"][0]["code"], "PodNotStarted");
    assert!(proxy.look(|calls| calls.iter().any(reads)));
}

/// A quota refuses the Pods of a namespace: Kubernetes says it about the Job alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_start_is_told_with_the_remedy() {
    let space = TestNamespace::new("starts").await;
    let _kubelet = Kubelet::start(&space).await;
    forbid_pods(&space).await;
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    ready_policy(&space, "main").await;
    verify_within(&space, "25s").await;
    run(&space, "main-full", "main-full-1").await;
    let reason = |task: &Value| {
        let reason = task["status"]["lastOperation"]["reason"].as_str();
        reason.unwrap_or_default().to_owned()
    };
    let told = until(Duration::from_secs(30), async || {
        let task = space.must_get(TASKS, "check").await;
        Some(reason(&task)).filter(|text| text.contains("quota"))
    });
    let told = told.await.expect("the task says why");
    assert!(told.contains("raise the ResourceQuota"), "{told}");
    let found = space
        .wait_policy("main", "its condition says why", |p| {
            condition_of(p, "BackupReady").is_some_and(|c| c["reason"] == "PodNotStarted")
        })
        .await;
    let text = condition_of(&found, "BackupReady").unwrap()["message"].to_string();
    assert!(
        text.contains("main-full-1") && text.contains("ResourceQuota"),
        "{text}"
    );
    // The tasks behind it go on.
    let failed = space.wait_task("check", "Failed").await;
    assert_eq!(failed["status"]["lastErrors"][0]["code"], "PodNotStarted");
    let job = failed["status"]["jobName"].as_str().unwrap();
    space.wait_until_gone("jobs", job).await;
}
