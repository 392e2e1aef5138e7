//! Thresholds by snapshot Leases: no compaction too many, and none forgotten.
//!
//! The tests decide how Pods end. Leases of etcd-druid have no annotations.

use crate::support::controller::Controller;
use crate::support::kubelet::{Kubelet, Plan, done, message};
use crate::support::namespace::{
    NEVER, NO_ELECTION, POLICIES, TASKS, TestNamespace, condition_of, ended, label, moment, name,
    until,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Long enough for something forbidden to happen.
const SILENCE: Duration = Duration::from_secs(3);

/// Applies a policy that takes no snapshots itself: etcd-druid's sidecar does.
async fn policy(space: &TestNamespace, name: &str, compaction: Value) {
    let policy = json!({
        "metadata": {"name": name},
        "spec": {"store": {"url": format!("s3://bucket/{name}")}, "compaction": compaction},
    });
    space.apply(POLICIES, policy).await;
}

/// Applies a policy that can take a full snapshot, too.
async fn policy_with_etcd(space: &TestNamespace, name: &str, compaction: Value) {
    let policy = json!({
        "metadata": {"name": name},
        "spec": {
            "etcd": {"endpoints": [format!("http://etcd-{name}:2379")]},
            "store": {"url": format!("s3://bucket/{name}")},
            "snapshot": {"fullSchedule": NEVER, "deltaSchedule": NEVER},
            "compaction": compaction,
        },
    });
    space.apply(POLICIES, policy).await;
}

async fn delta(space: &TestNamespace, prefix: &str, revision: i64) {
    let name = format!("{prefix}-delta-snap");
    space.renew(&name, revision, &moment(0), Value::Null).await;
}

fn fails(code: i32, reason: &str) -> Plan {
    Plan::Exit(code, message("compact", code, reason, "the test says so"))
}

/// Makes the policy's next Job fail without retries by Kubernetes, which would take minutes. Returns its name.
async fn one_try(space: &TestNamespace, policy: &str) -> String {
    let jobs = space.wait_for_jobs(policy, "compaction", 1).await;
    let job = name(&jobs[0]).to_owned();
    let once = json!({"spec": {"backoffLimit": 0}});
    space.patch("jobs", &job, once).await;
    job
}

async fn wait_last(space: &TestNamespace, policy: &str, state: &str) -> Value {
    let wanted = format!("the last compaction is {state}");
    let found = space
        .wait_policy(policy, &wanted, |p| {
            p["status"]["lastCompaction"]["state"] == state
        })
        .await;
    found["status"]["lastCompaction"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_that_does_not_move_starts_no_second_job() {
    let space = TestNamespace::new("druid").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], Plan::Hang);
    // etcd-druid's Leases before the first snapshot.
    for kind in ["full", "delta"] {
        let lease = json!({
            "metadata": {
                "name": format!("etcd-main-{kind}-snap"),
                "labels": {"app.kubernetes.io/managed-by": "etcd-druid"},
            },
            "spec": {"holderIdentity": "0"},
        });
        space.create("leases", lease).await;
    }
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    let main = json!({
        "metadata": {"name": "main"},
        "spec": {
            "store": {"url": "s3://bucket/main"},
            "snapshot": {"leasePrefix": "etcd-main"},
            "compaction": {"eventsThreshold": 1000},
        },
    });
    space.apply(POLICIES, main).await;
    space.leases("etcd-main", 100, 1099).await;
    let counted = space
        .wait_policy("main", "it counts 999 events", |p| {
            p["status"]["snapshots"]["accumulatedDeltaEvents"] == 999
        })
        .await;
    let snapshots = &counted["status"]["snapshots"];
    assert_eq!(snapshots["lastFull"]["endRevision"], 100);
    assert_eq!(snapshots["lastFull"]["name"], Value::Null);
    assert_eq!(snapshots["lastDelta"]["endRevision"], 1099);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(space.jobs.ever().len(), 0);

    // One more event crosses it; no further Job starts while that one runs.
    delta(&space, "etcd-main", 1100).await;
    let jobs = space.wait_for_jobs("main", "compaction", 1).await;
    let args = jobs[0]["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
    assert!(
        args.contains(r#""compact""#) && args.contains(r#""etcd-main""#),
        "{args}"
    );
    delta(&space, "etcd-main", 5000).await;
    space
        .wait_policy("main", "it counts 4900 events", |p| {
            p["status"]["snapshots"]["accumulatedDeltaEvents"] == 4900
        })
        .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(space.jobs.ever().len(), 1);
    // What the Job does at its end.
    space.leases("etcd-main", 5000, 5000).await;
    kubelet.plan(&[], done());
    let last = wait_last(&space, "main", "Succeeded").await;
    assert_eq!(
        (&last["fullRevision"], &last["deltaRevision"]),
        (&100.into(), &1100.into())
    );
    assert_eq!(last["trigger"], "EventsThreshold");

    // A Job succeeds without a message while the Leases stay as they are: running it again would not help.
    delta(&space, "etcd-main", 6000).await;
    space.wait_until_ended("main", "compaction", 2).await;
    wait_last(&space, "main", "Succeeded").await;
    for _ in 0..3 {
        delta(&space, "etcd-main", 6000).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    controller.kill();
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    delta(&space, "etcd-main", 6000).await;
    tokio::time::sleep(SILENCE).await;
    assert_eq!(space.jobs_for("main", "compaction").len(), 2);
    delta(&space, "etcd-main", 6001).await;
    space.wait_for_jobs("main", "compaction", 3).await;

    // They still belong to etcd-druid.
    let lease = space.must_get("leases", "etcd-main-full-snap").await;
    assert_eq!(lease["metadata"]["ownerReferences"], Value::Null);
    assert_eq!(
        lease["metadata"]["labels"],
        json!({"app.kubernetes.io/managed-by": "etcd-druid"})
    );
}

/// A failure is reported with its code and reason. A Job is retried as soon as the service is back that was unreachable,
/// or after a pause. Unit tests have the rules: `decide/threshold` and `facts/outcome`.
#[tokio::test(flavor = "multi_thread")]
async fn failures_are_tried_again_or_not_by_their_code() {
    let space = TestNamespace::new("codes").await;
    let kubelet = Kubelet::start(&space).await;
    let controller = Controller::start(&space, &NO_ELECTION).await;
    let threshold = json!({"eventsThreshold": 100});
    let (gap, service, killed) = ("gap", "service", "killed");
    kubelet.plan(&[("policy", gap)], fails(65, "RevisionGap"));
    for policy_ in [service, killed] {
        kubelet.plan(&[("policy", policy_)], Plan::Hang);
    }
    let slice = |ready: bool| {
        json!({
            "metadata": {
                "name": "etcd-service-1",
                "labels": {"kubernetes.io/service-name": "etcd-service"},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}],
            "ports": [],
        })
    };
    space.apply("endpointslices", slice(false)).await;
    for policy_ in [gap, killed] {
        policy(&space, policy_, threshold.clone()).await;
    }
    policy_with_etcd(&space, service, threshold).await;
    let all = [gap, killed, service];
    for policy_ in all {
        space.leases(policy_, 100, 300).await;
    }

    let last = wait_last(&space, gap, "Failed").await;
    let told = (&last["exitCode"], &last["reason"], &last["failures"]);
    assert_eq!(told, (&65.into(), &"RevisionGap".into(), &1.into()));
    let condition = space
        .wait_condition(gap, "CompactionHealthy", "False")
        .await;
    assert_eq!(condition["reason"], "RevisionGap");
    let text = condition["message"].as_str().unwrap();
    assert!(text.contains("the test says so"), "{text}");

    one_try(&space, service).await;
    kubelet.plan(&[("policy", service)], fails(69, "EtcdUnreachable"));
    let last = wait_last(&space, service, "Failed").await;
    let told = (&last["exitCode"], &last["reason"]);
    assert_eq!(told, (&69.into(), &"EtcdUnreachable".into()));
    kubelet.plan(&[("policy", service)], done());
    one_try(&space, killed).await;
    let runs = async || (!kubelet.ran(&[("policy", killed)]).is_empty()).then_some(());
    space.wait("its Pod", runs).await;
    kubelet.kill(&[("policy", killed)]);
    let last = wait_last(&space, killed, "Failed").await;
    assert_eq!(last["exitCode"], 137);
    kubelet.plan(&[("policy", killed)], done());
    let failed = Instant::now();

    // None of them is retried at once.
    tokio::time::sleep(SILENCE).await;
    for policy_ in all {
        let jobs = space.jobs_for(policy_, "compaction");
        assert_eq!(jobs.len(), 1, "{policy_}: {:?}", controller.tail());
    }
    // A ready endpoint shows that etcd is back.
    space.apply("endpointslices", slice(true)).await;
    let jobs = space.wait_until_ended(service, "compaction", 2).await;
    assert_ne!(name(&jobs[0]), name(&jobs[1]));
    assert!(failed.elapsed() < Duration::from_secs(50));
    let last = wait_last(&space, service, "Succeeded").await;
    assert_eq!(last["failures"], 0);
    space
        .wait_condition(service, "CompactionHealthy", "True")
        .await;
    // Others need both: a changed status and the pause.
    kubelet.plan(&[("policy", gap)], done());
    delta(&space, gap, 301).await;
    delta(&space, killed, 301).await;
    tokio::time::sleep(SILENCE).await;
    for policy_ in [gap, killed] {
        assert_eq!(space.jobs_for(policy_, "compaction").len(), 1, "{policy_}");
    }

    // By themselves, after a minute.
    for policy_ in [gap, killed] {
        let again = until(Duration::from_secs(90), async || {
            (space.jobs_for(policy_, "compaction").len() == 2).then_some(())
        });
        again
            .await
            .unwrap_or_else(|| panic!("{policy_}: {}", controller.tail()));
        wait_last(&space, policy_, "Succeeded").await;
    }
    assert!(failed.elapsed() > Duration::from_secs(50));
}

#[tokio::test(flavor = "multi_thread")]
async fn too_late_or_too_much_makes_a_full_snapshot() {
    let space = TestNamespace::new("fulls").await;
    let kubelet = Kubelet::start(&space).await;
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    let late = json!({"eventsThreshold": 100, "activeDeadline": "2s"});
    let many = json!({"eventsThreshold": 100, "fullSnapshotThreshold": 5000});
    kubelet.plan(&[("policy", "late"), ("work", "compaction")], Plan::Hang);
    policy_with_etcd(&space, "late", late).await;
    policy_with_etcd(&space, "many", many).await;
    kubelet.plan(&[("work", "full-snapshot")], done());
    kubelet.plan(&[("policy", "many")], done());
    space.leases("late", 100, 300).await;
    space.leases("many", 100, 5100).await;

    let fulls = space.wait_for_jobs("many", "full-snapshot", 1).await;
    assert!(
        name(&fulls[0]).starts_with("many-fullsnap-"),
        "{}",
        name(&fulls[0])
    );
    let args = fulls[0]["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
    assert!(args.starts_with(r#"["snapshot","full""#), "{args}");
    let last = wait_last(&space, "many", "Succeeded").await;
    assert_eq!(last["trigger"], "FullSnapshotThreshold");
    assert_eq!(last["fullSnapshot"], true);
    assert_eq!(space.jobs_for("many", "compaction").len(), 0);

    let last = wait_last(&space, "late", "Failed").await;
    assert_eq!(last["reason"], "DeadlineExceeded", "{last}");
    delta(&space, "late", 301).await;
    let fulls = space.wait_until_ended("late", "full-snapshot", 1).await;
    assert_eq!(ended(&fulls[0]), Some("Complete"));
    let last = wait_last(&space, "late", "Succeeded").await;
    assert_eq!(
        (&last["trigger"], &last["fullSnapshot"]),
        (&"DeadlineExceeded".into(), &true.into())
    );
}

/// Leases are renewed by other machines, whose clocks may be wrong. Unit tests have the limits: `decide/threshold` and
/// `decide/conditions`.
#[tokio::test(flavor = "multi_thread")]
async fn ages_by_clocks_that_are_wrong() {
    let space = TestNamespace::new("ages").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    let by_age = json!({"eventsThreshold": 1_000_000, "ageThreshold": "1h"});
    for policy_ in ["soon", "future"] {
        policy(&space, policy_, by_age.clone()).await;
    }
    // So that the controller sees both Leases at its first look.
    for (policy_, full) in [("soon", -3595), ("future", 400_000_000)] {
        let name = format!("{policy_}-full-snap");
        space.renew(&name, 100, &moment(full), Value::Null).await;
        delta(&space, policy_, 101).await;
    }
    let last = wait_last(&space, "soon", "Succeeded").await;
    assert_eq!(last["trigger"], "AgeThreshold");
    tokio::time::sleep(SILENCE).await;
    assert_eq!(space.jobs_for("future", "compaction").len(), 0);

    // Whether snapshots are taken in time; the sidecar takes a delta every five minutes.
    policy(&space, "fresh", json!({})).await;
    for (full, delta, status, reason) in [
        (0, 0, "True", "SnapshotsInTime"),
        (0, -60 * 60, "False", "Stale"),
    ] {
        for (kind, seconds) in [("full", full), ("delta", delta)] {
            let name = format!("fresh-{kind}-snap");
            // The time at which the controller saw a change counts, too: from the second case on the revision
            // stays the same.
            space.renew(&name, 100, &moment(seconds), Value::Null).await;
        }
        controller.kill();
        controller = Controller::start(&space, &NO_ELECTION).await;
        let wanted = format!("BackupReady is {status} {reason} with {full}, {delta}");
        let found = space
            .wait_policy("fresh", &wanted, |p| {
                condition_of(p, "BackupReady")
                    .is_some_and(|c| c["status"] == status && c["reason"] == reason)
            })
            .await;
        let condition = condition_of(&found, "BackupReady").unwrap();
        assert!(condition["message"].as_str().unwrap().len() > 10);
    }
    // A time years ahead says nothing; an observed change does.
    for kind in ["full", "delta"] {
        let name = format!("fresh-{kind}-snap");
        space
            .renew(&name, 101, &moment(400_000_000), Value::Null)
            .await;
    }
    space.wait_condition("fresh", "BackupReady", "True").await;
    // A holder that is no revision belongs to somebody else.
    let foreign = json!({"spec": {"holderIdentity": "etcd-main-0"}});
    space.patch("leases", "fresh-full-snap", foreign).await;
    let found = space
        .wait_policy("fresh", "it is told whose the Lease is", |p| {
            condition_of(p, "BackupReady")
                .is_some_and(|c| c["message"].to_string().contains("etcd-main-0"))
        })
        .await;
    assert_ne!(
        condition_of(&found, "BackupReady").unwrap()["status"],
        "True"
    );
}

/// At most two Jobs run at once, and every policy gets its turn.
#[tokio::test(flavor = "multi_thread")]
async fn a_cap_is_kept_and_turns_are_fair() {
    let space = TestNamespace::new("cap").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], Plan::Hang);
    let args = ["--leader-elect", "false", "--max-jobs", "2"];
    let mut controller = Controller::start(&space, &args).await;
    let all = ["a", "b", "c", "d", "e"];
    for policy_ in all {
        policy(&space, policy_, json!({"eventsThreshold": 100})).await;
        space.leases(policy_, 100, 300).await;
    }
    let of_all = || {
        let jobs = space.jobs.ever().into_iter();
        jobs.filter(|j| label(j, "work") == Some("compaction"))
            .collect::<Vec<_>>()
    };
    let are_two = async || (of_all().len() == 2).then_some(());
    space.wait("two Jobs", are_two).await;
    tokio::time::sleep(SILENCE).await;
    assert_eq!(of_all().len(), 2);
    // Each Job that ends lets another one start.
    let mut went = Vec::new();
    for n in 3..=all.len() {
        let active = of_all();
        let first = active.iter().find(|j| ended(j).is_none()).unwrap();
        let of = label(first, "policy").unwrap().to_owned();
        space.leases(&of, 300, 300).await;
        kubelet.plan(&[("policy", &of)], done());
        went.push(of);
        let is_next = async || (of_all().len() == n).then_some(());
        space.wait("another Job", is_next).await;
    }
    assert_eq!(kubelet.most_at_once(&[("work", "compaction")]), 2);

    // More than allowed: a controller with a lower limit finds two.
    assert_eq!(of_all().iter().filter(|j| ended(j).is_none()).count(), 2);
    controller.kill();
    let args = ["--leader-elect", "false", "--max-jobs", "1"];
    let controller = Controller::start(&space, &args).await;
    policy(&space, "f", json!({"eventsThreshold": 100})).await;
    space.leases("f", 100, 300).await;
    let waits = |p: &Value| {
        let healthy = condition_of(p, "CompactionHealthy");
        healthy.is_some_and(|c| c["reason"] == "TooManyJobs")
    };
    space.wait_policy("f", "it waits for a slot", waits).await;
    let running: Vec<String> = of_all()
        .iter()
        .filter(|j| ended(j).is_none())
        .map(|j| label(j, "policy").unwrap().to_owned())
        .collect();
    space.leases(&running[0], 300, 300).await;
    kubelet.plan(&[("policy", &running[0])], done());
    wait_last(&space, &running[0], "Succeeded").await;
    tokio::time::sleep(SILENCE).await;
    assert_eq!(
        space.jobs_for("f", "compaction").len(),
        0,
        "{}",
        controller.tail()
    );
    space.leases(&running[1], 300, 300).await;
    kubelet.plan(&[("policy", &running[1])], done());
    space.wait_for_jobs("f", "compaction", 1).await;

    // Many tasks of one policy do not delay another policy, which has waited longer.
    for (name, level) in [("one", "names"), ("two", "checksums"), ("three", "fold")] {
        let task = json!({
            "metadata": {"name": name},
            "spec": {"policy": "a", "type": "Verify", "config": {"verify": {"level": level}}},
        });
        space.create(TASKS, task).await;
        // Their order is that of their creation times, which have whole seconds.
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    policy(&space, "g", json!({"eventsThreshold": 100})).await;
    space.leases("g", 100, 300).await;
    space
        .wait_policy("g", "it has been looked at", |p| {
            !p["status"]["snapshots"].is_null()
        })
        .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    space.leases("f", 300, 300).await;
    kubelet.plan(&[], done());
    for task in ["one", "two", "three"] {
        space.wait_task(task, "Succeeded").await;
    }
    wait_last(&space, "g", "Succeeded").await;
    let jobs = space.jobs.ever();
    let began = |what: &dyn Fn(&Value) -> bool| {
        let job = jobs.iter().find(|j| what(j)).expect("a Job");
        job["status"]["startTime"].as_str().unwrap().to_owned()
    };
    let of_g = began(&|j| label(j, "policy") == Some("g"));
    let of_three = began(&|j| label(j, "task") == Some("three"));
    assert!(of_g <= of_three, "{of_g} {of_three}");
    assert_eq!(kubelet.most_at_once(&[]), 2);
}
