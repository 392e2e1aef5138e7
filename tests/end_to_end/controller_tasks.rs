//! Tasks: each is done once, in order, or refused with a reason.
//!
//! The tests decide how Pods end.

use crate::support::controller::Controller;
use crate::support::kubelet::{Kubelet, Plan, done, message};
use crate::support::namespace::{
    NEVER, NO_ELECTION, PATIENCE, POLICIES, TASKS, TestNamespace, ended, until,
};
use crate::support::proxy::{Effect, Proxy, Timing};
use serde_json::{Value, json};
use std::time::Duration;

const SILENCE: Duration = Duration::from_secs(2);

pub async fn policy(space: &TestNamespace, name: &str) {
    let policy = json!({
        "metadata": {"name": name},
        "spec": {
            "etcd": {"endpoints": ["http://etcd:2379"]},
            "store": {"url": format!("s3://bucket/{name}")},
            "snapshot": {"fullSchedule": NEVER, "deltaSchedule": NEVER},
        },
    });
    space.apply(POLICIES, policy).await;
}

async fn verify(space: &TestNamespace, name: &str, policy: &str, level: &str) {
    let config = json!({"verify": {"level": level}});
    space.task(name, policy, "Verify", config).await;
}

fn of(task: &str) -> [(&str, &str); 1] {
    [("task", task)]
}

fn errors(task: &Value) -> Vec<&str> {
    let errors = task["status"]["lastErrors"].as_array();
    let errors = errors.into_iter().flatten();
    errors.map(|e| e["code"].as_str().unwrap()).collect()
}

fn operation(task: &Value) -> String {
    let operation = &task["status"]["lastOperation"];
    format!(
        "{} {} {}",
        operation["name"], operation["state"], operation["reason"]
    )
}

async fn wait_operation(space: &TestNamespace, name: &str, text: &str) -> Value {
    space
        .wait_until(
            TASKS,
            name,
            &format!("its operation tells of {text}"),
            |t| operation(t).contains(text),
        )
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn one_after_the_other_and_no_duplicates() {
    let space = TestNamespace::new("order").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], Plan::Hang);
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    for name in ["main", "other"] {
        policy(&space, name).await;
    }
    verify(&space, "a", "main", "names").await;
    verify(&space, "b", "main", "fold").await;
    space
        .task("c", "main", "OnDemandCompaction", Value::Null)
        .await;
    verify(&space, "x", "other", "names").await;
    let first = space.wait_task("a", "InProgress").await;
    assert!(
        first["status"]["jobName"]
            .as_str()
            .unwrap()
            .starts_with("a-")
    );
    // Tasks of another policy do not wait for it.
    space.wait_task("x", "InProgress").await;
    for waits in ["b", "c"] {
        let task = wait_operation(&space, waits, "Queued").await;
        assert_eq!(task["status"]["state"], "Pending");
        assert_eq!(task["status"]["initiatedAt"], Value::Null);
    }
    // A task equals a waiting one.
    verify(&space, "b-again", "main", "fold").await;
    let task = space.wait_task("b-again", "Rejected").await;
    assert_eq!(errors(&task), ["DuplicateTask"]);
    tokio::time::sleep(SILENCE).await;
    assert_eq!(space.jobs.ever().len(), 2);

    // A new controller knows the order, too.
    controller.kill();
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    for (ends, begins) in [("a", Some("b")), ("b", Some("c")), ("c", None)] {
        kubelet.plan(&of(ends), done());
        space.wait_task(ends, "Succeeded").await;
        if let Some(begins) = begins {
            space.wait_task(begins, "InProgress").await;
        }
    }
    kubelet.plan(&of("x"), done());
    space.wait_task("x", "Succeeded").await;
    assert_eq!(kubelet.most_at_once(&[("policy", "main")]), 1);
    assert_eq!(space.jobs.ever().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_end_has_its_reason() {
    let space = TestNamespace::new("ends").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let controller = Controller::start(&space, &NO_ELECTION).await;
    // A task for a policy that appears later.
    verify(&space, "early", "later", "names").await;
    wait_operation(&space, "early", "PolicyNotFound").await;
    policy(&space, "later").await;
    space.wait_task("early", "Succeeded").await;

    // A failure that no retry can fix ends the task at once, with the reason.
    policy(&space, "gap").await;
    let said = message("verify", 65, "RevisionGap", "revisions 5 to 9 are missing");
    kubelet.plan(&of("gap"), Plan::Exit(65, said));
    verify(&space, "gap", "gap", "names").await;
    let failed = space.wait_task("gap", "Failed").await;
    assert_eq!(errors(&failed), ["RevisionGap"]);
    let error = &failed["status"]["lastErrors"][0];
    assert_eq!(error["description"], "revisions 5 to 9 are missing");
    assert!(error["observedAt"].is_string());
    assert!(
        operation(&failed).contains("Failed"),
        "{}",
        operation(&failed)
    );
    let event = until(PATIENCE, async || {
        let events = space.events("gap").await;
        events.into_iter().find(|(_, m)| m.contains("RevisionGap"))
    });
    event
        .await
        .unwrap_or_else(|| panic!("no Event: {}", controller.tail()));

    // A failure that a retry can fix is retried, and its errors are reported.
    policy(&space, "slow").await;
    let said = message("verify", 69, "StoreUnreachable", "no answer");
    kubelet.plan(&of("slow"), Plan::Exit(69, said));
    verify(&space, "slow", "slow", "names").await;
    let running = space
        .wait_until(TASKS, "slow", "it has failed once", |t| {
            !errors(t).is_empty()
        })
        .await;
    assert_eq!(running["status"]["state"], "InProgress");
    assert_eq!(errors(&running), ["StoreUnreachable"]);
    kubelet.plan(&of("slow"), done());

    // Without a quorum no snapshot is retried: that is a person's decision.
    policy(&space, "quorum").await;
    let said = message(
        "snapshot full",
        69,
        "NoQuorum",
        "one of three members answers",
    );
    kubelet.plan(&of("quorum"), Plan::Exit(69, said));
    let full = json!({"onDemandSnapshot": {"type": "full"}});
    space
        .task("quorum", "quorum", "OnDemandSnapshot", full)
        .await;
    let rejected = space.wait_task("quorum", "Rejected").await;
    assert_eq!(errors(&rejected), ["NoQuorum"]);
    let job = rejected["status"]["jobName"].as_str().unwrap();
    space.wait_until_gone("jobs", job).await;
    assert_eq!(kubelet.ran(&of("quorum")).len(), 1);

    // Maintenance waits for an up-to-date backup: a change of the Leases lets it begin.
    policy(&space, "bare").await;
    let defrag = json!({"maintenance": {"defrag": "always"}});
    space.task("tidy", "bare", "Maintenance", defrag).await;
    wait_operation(&space, "tidy", "MaintenancePostponed").await;
    space.leases("bare", 100, 100).await;
    space.wait_task("tidy", "Succeeded").await;

    let slow = space.wait_task("slow", "Succeeded").await;
    assert_eq!(errors(&slow), Vec::<&str>::new());
    assert_eq!(kubelet.ran(&of("slow")).len(), 2);

    // Metrics report it, too.
    let series = r#"deltafold_tasks_total{type="Verify",state="Failed",policy="gap","#;
    let (_, metrics) = controller.asked("/metrics").unwrap();
    assert!(
        metrics
            .lines()
            .any(|l| l.starts_with("deltafold_tasks_total{")
                && l.contains(r#"policy="gap""#)
                && l.contains(r#"state="Failed""#)
                && l.ends_with(" 1")),
        "{series}: {metrics}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_deleted_stops() {
    let space = TestNamespace::new("deleted").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    for name in ["main", "gone"] {
        policy(&space, name).await;
    }
    // The task and its Job are deleted a second after its end.
    let short = json!({
        "metadata": {"name": "short"},
        "spec": {"policy": "main", "type": "Verify", "ttlSecondsAfterFinished": 1},
    });
    space.create(TASKS, short).await;
    space.wait_until_gone(TASKS, "short").await;
    let job = &space.jobs.ever()[0];
    assert_eq!(ended(job), Some("Complete"));
    space
        .wait_until_gone("jobs", crate::support::namespace::name(job))
        .await;

    // A task that is deleted while it runs.
    for name in ["stops", "runs"] {
        kubelet.plan(&of(name), Plan::Hang);
    }
    verify(&space, "stops", "main", "names").await;
    verify(&space, "waits", "main", "fold").await;
    let task = space.wait_task("stops", "InProgress").await;
    let job = task["status"]["jobName"].as_str().unwrap();
    let runs = async || (!kubelet.ran(&of("stops")).is_empty()).then_some(());
    space.wait("its Pod", runs).await;
    space.delete(TASKS, "stops").await;
    space.wait_until_gone("jobs", job).await;
    space.wait_task("waits", "Succeeded").await;
    let stopped = &kubelet.ran(&of("stops"))[0];
    assert_eq!(stopped.ended.map(|(_, code)| code), Some(143));
    let behind = &kubelet.ran(&of("waits"))[0];
    assert!(
        behind.began >= stopped.ended.unwrap().0,
        "they ran at one time"
    );

    // A task whose policy is deleted while it runs.
    verify(&space, "runs", "gone", "names").await;
    space.wait_task("runs", "InProgress").await;
    space.delete(POLICIES, "gone").await;
    let failed = space.wait_task("runs", "Failed").await;
    assert_eq!(errors(&failed), ["PolicyDeleted"]);
    let job = failed["status"]["jobName"].as_str().unwrap();
    space.wait_until_gone("jobs", job).await;
}

/// A Job that Kubernetes refuses is reported and delays nobody.
#[tokio::test(flavor = "multi_thread")]
async fn what_stands_in_the_way_of_a_job() {
    let space = TestNamespace::new("way").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let proxy = Proxy::start(space.api.url());
    let _controller = Controller::through(&proxy, &space, &NO_ELECTION).await;
    policy(&space, "main").await;

    // Refused forever, and refused for now.
    let creates = |name: &'static str| {
        move |call: &crate::support::proxy::Call| {
            let job = call.json()["metadata"]["name"].as_str().map(str::to_owned);
            call.verb == "create" && job.is_some_and(|job| job.starts_with(name))
        }
    };
    let invalid = Effect::Answer(422, "Invalid");
    proxy.inject(creates("invalid"), 0, 1, Timing::Before, invalid);
    let denied = Effect::Answer(403, "Forbidden");
    proxy.inject(creates("denied"), 0, usize::MAX, Timing::Before, denied);
    verify(&space, "invalid", "main", "names").await;
    let rejected = space.wait_task("invalid", "Rejected").await;
    assert_eq!(errors(&rejected), ["JobRefused"]);
    verify(&space, "denied", "main", "names").await;
    wait_operation(&space, "denied", "JobRefused").await;
    proxy.clear_faults();
    // It would be retried within a minute; any change of the task is sooner.
    let touched = json!({"metadata": {"annotations": {"touched": "yes"}}});
    space.patch(TASKS, "denied", touched).await;
    space.wait_task("denied", "Succeeded").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_turned_off_is_not_done() {
    let space = TestNamespace::new("off").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let args = [
        "--leader-elect",
        "false",
        "--task-workers",
        "0",
        "--compaction-workers",
        "0",
    ];
    let mut controller = Controller::start(&space, &args).await;
    policy(&space, "main").await;
    space.wait_condition("main", "Ready", "True").await;
    verify(&space, "check", "main", "names").await;
    space.leases("main", 100, 9_000_000).await;
    space.wait_condition("main", "BackupReady", "True").await;
    tokio::time::sleep(SILENCE).await;
    assert_eq!(space.jobs.ever().len(), 0);
    let task = space.must_get(TASKS, "check").await;
    assert!(
        task["status"].is_null() || task["status"]["state"] == "Pending",
        "{task}"
    );
    controller.kill();
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    space.wait_task("check", "Succeeded").await;
    space.wait_for_jobs("main", "compaction", 1).await;
}
