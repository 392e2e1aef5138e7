//! Tenants of one controller: nobody can stop, delay, take over or read what belongs to another namespace.
//!
//! Each test is an attack by somebody who may write policies, tasks, Jobs and other objects in their own
//! namespace, or in a shared one. The tests decide how Pods end.

use crate::support::controller::Controller;
use crate::support::kubelet::{Kubelet, Plan, done};
use crate::support::namespace::{
    NEVER, NO_ELECTION, PATIENCE, POLICIES, TASKS, TestNamespace, condition_of, ended, label, until,
};
use crate::support::object_recorder::Running;
use crate::support::proxy::Proxy;
use serde_json::{Value, json};
use std::time::Duration;

/// Returns a policy with two CronJobs and a threshold of 100 events.
pub fn scheduled(name: &str, url: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {
            "etcd": {"endpoints": ["http://etcd:2379"]},
            "store": {"url": url},
            "snapshot": {"fullSchedule": NEVER, "deltaSchedule": NEVER},
            "compaction": {"eventsThreshold": 100},
        },
    })
}

/// Returns a policy with a follower, a CronJob and a threshold of 100 events.
pub fn following(name: &str, url: &str) -> Value {
    let mut policy = scheduled(name, url);
    policy["spec"]["snapshot"] = json!({"follow": {}});
    policy["spec"]["verify"] = json!({"schedule": NEVER});
    policy
}

/// Returns a policy that runs nothing but what a threshold or a task starts.
pub fn idle(name: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {
            "store": {"url": format!("s3://bucket/{name}")},
            "compaction": {"eventsThreshold": 100},
        },
    })
}

/// Waits, so that objects created from now on are younger: creation times have whole seconds.
async fn a_second_later() {
    tokio::time::sleep(Duration::from_millis(1100)).await;
}

pub async fn restore(space: &TestNamespace, name: &str, policy: &str) {
    let config = json!({"restore": {"claimName": format!("data-{name}")}});
    space.task(name, policy, "Restore", config).await;
}

async fn move_to(space: &TestNamespace, policy: &str, url: &str) {
    let patch = json!({"spec": {"store": {"url": url}}});
    space.patch(POLICIES, policy, patch).await;
}

fn is_true(policy: &Value, condition: &str) -> bool {
    condition_of(policy, condition).is_some_and(|c| c["status"] == "True")
}

/// Returns whether the controller has acted on the newest spec.
pub fn is_seen(policy: &Value) -> bool {
    policy["status"]["observedGeneration"] == policy["metadata"]["generation"]
}

/// Waits until a policy is not Ready for this reason. Returns the message.
pub async fn wait_not_ready(space: &TestNamespace, policy: &str, reason: &str) -> String {
    let wanted = format!("it is not Ready: {reason}");
    let found = space
        .wait_policy(policy, &wanted, |p| {
            is_seen(p)
                && condition_of(p, "Ready")
                    .is_some_and(|c| c["status"] == "False" && c["reason"] == reason)
        })
        .await;
    let message = &condition_of(&found, "Ready").unwrap()["message"];
    message.as_str().unwrap().to_owned()
}

pub async fn wait_ready(space: &TestNamespace, policy: &str) -> Value {
    space
        .wait_policy(policy, "it is Ready", |p| is_seen(p) && is_true(p, "Ready"))
        .await
}

/// Across namespaces, a policy that names the store of another one changes nothing for it and learns nothing: the store's
/// own identity and lock decide.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_policy_elsewhere_moves_to_the_same_store() {
    let theirs = TestNamespace::new("attackers").await;
    let ours = TestNamespace::new("victims").await;
    let running = Running::watch(&ours).await;
    let told = ours.record(POLICIES).await;
    let mut controller = Controller::of_several(&[&theirs, &ours], &NO_ELECTION).await;
    theirs
        .apply(POLICIES, scheduled("mallory", "s3://bucket/mallory"))
        .await;
    wait_ready(&theirs, "mallory").await;
    a_second_later().await;
    ours.apply(POLICIES, following("follows", "s3://bucket/follows"))
        .await;
    ours.apply(POLICIES, scheduled("alice", "s3://bucket/alice"))
        .await;
    for policy in ["follows", "alice"] {
        wait_ready(&ours, policy).await;
    }
    ours.wait_for("deployments", "follows-follow").await;

    for policy in ["alice", "follows"] {
        move_to(&theirs, "mallory", &format!("s3://bucket/{policy}/")).await;
        let moved = wait_ready(&theirs, "mallory").await;
        assert_eq!(condition_of(&moved, "StoreShared"), None);
        wait_ready(&ours, policy).await;
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
    }
    // A new controller decides the same, and thresholds still act.
    controller.kill();
    let _controller = Controller::of_several(&[&theirs, &ours], &NO_ELECTION).await;
    ours.leases("follows", 100, 300).await;
    ours.wait_for_jobs("follows", "compaction", 1).await;
    wait_ready(&ours, "follows").await;
    for policy in ["follows", "alice"] {
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
    }
    for version in told.all_versions() {
        let status = version["status"].to_string();
        assert!(!status.contains(&theirs.name), "{status}");
        assert!(!status.contains("mallory"), "{status}");
    }
}

/// Returns a Job that looks like one of ours and never ends; only its author can delete it.
pub fn forged(name: &str, policy: &str, work: &str, owner: Option<Value>) -> Value {
    json!({
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/managed-by": "deltafold",
                "app.kubernetes.io/name": "deltafold",
                "deltafold.io/policy": policy,
                "deltafold.io/work": work,
                "deltafold.io/task": name,
                "deltafold.io/task-type": "Restore",
            },
            "annotations": {"deltafold.io/trigger": "EventsThreshold"},
            "finalizers": ["example.com/stays"],
            "ownerReferences": owner.into_iter().collect::<Vec<_>>(),
        },
        "spec": {
            "suspend": true,
            "template": {"spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "any", "image": "any"}],
            }},
        },
    })
}

fn owner(kind: &str, name: &str, uid: &Value) -> Value {
    json!({
        "apiVersion": "deltafold.io/v1alpha1", "kind": kind, "name": name, "uid": uid,
        "controller": true, "blockOwnerDeletion": true,
    })
}

/// Asserts that a Restore and a threshold start, whatever runs elsewhere.
async fn starts_at_once(space: &TestNamespace) {
    restore(space, "urgent", "main").await;
    space.leases("main", 100, 300).await;
    space.wait_task("urgent", "InProgress").await;
    // A task and a compaction of the same policy may not run at the same time.
    space.leases("beside", 100, 300).await;
    space.wait_for_jobs("beside", "compaction", 1).await;
}

/// Jobs with our labels but without an owner, or with a forged one, do not count.
#[tokio::test(flavor = "multi_thread")]
async fn forged_jobs_hold_up_nobody() {
    let theirs = TestNamespace::new("forgers").await;
    let ours = TestNamespace::new("victims").await;
    let mut uid = Value::Null;
    for policy in ["main", "beside"] {
        let created = ours.apply(POLICIES, idle(policy)).await;
        uid = created["metadata"]["uid"].clone();
    }
    let nobodys = json!("0c0ffee0-f7b7-4f57-bfd5-22fc9ae2aa3c");
    for n in 0..25 {
        let work = if n % 2 == 0 { "compaction" } else { "task" };
        let owners = [
            None,
            Some(owner("EtcdBackupPolicy", "beside", &uid)),
            Some(owner("EtcdBackupTask", "made-up", &nobodys)),
        ];
        for (at, owner) in owners.into_iter().enumerate() {
            let name = format!("forged-{at}-{n}");
            theirs
                .create("jobs", forged(&name, "main", work, owner))
                .await;
        }
    }
    let _controller = Controller::of_several(&[&theirs, &ours], &NO_ELECTION).await;
    wait_ready(&ours, "main").await;
    starts_at_once(&ours).await;
}

/// The same if they are owned by a policy of the attacker.
#[tokio::test(flavor = "multi_thread")]
async fn forged_jobs_of_a_policy_hold_up_nobody_elsewhere() {
    let theirs = TestNamespace::new("forgers").await;
    let ours = TestNamespace::new("victims").await;
    let policy = theirs.apply(POLICIES, idle("own")).await;
    for policy in ["main", "beside"] {
        ours.apply(POLICIES, idle(policy)).await;
    }
    for n in 0..25 {
        let owner = owner("EtcdBackupPolicy", "own", &policy["metadata"]["uid"]);
        let job = forged(&format!("forged-{n}"), "own", "compaction", Some(owner));
        theirs.create("jobs", job).await;
    }
    let _controller = Controller::of_several(&[&theirs, &ours], &NO_ELECTION).await;
    wait_ready(&ours, "main").await;
    starts_at_once(&ours).await;
}

fn unfinished(space: &TestNamespace) -> Vec<Value> {
    let jobs = space.jobs.ever().into_iter();
    jobs.filter(|j| ended(j).is_none() && j["gone"] != true)
        .collect()
}

/// Ends Jobs of a namespace one by one until `done` holds. Returns whether it does.
async fn end_some(
    space: &TestNamespace,
    kubelet: &Kubelet,
    most: usize,
    has_come: impl Fn() -> bool,
) -> bool {
    for _ in 0..most {
        if has_come() {
            return true;
        }
        let before = space.jobs.ever().len();
        let Some(job) = unfinished(space).first().cloned() else {
            break;
        };
        let policy = label(&job, "policy").unwrap().to_owned();
        space.leases(&policy, 300, 300).await;
        kubelet.plan(&[("policy", &policy)], done());
        // Its slot belongs to another Job now.
        until(PATIENCE, async || {
            (has_come() || space.jobs.ever().len() > before).then_some(())
        })
        .await;
    }
    has_come()
}

/// One tenant has so many crossed thresholds that they could use up all job slots for a long time.
#[tokio::test(flavor = "multi_thread")]
async fn one_tenants_thresholds_do_not_use_up_all_jobs() {
    let busy = TestNamespace::new("busy").await;
    let ours = TestNamespace::new("victims").await;
    let kubelet = Kubelet::start(&busy).await;
    kubelet.plan(&[], Plan::Hang);
    let args = [&NO_ELECTION[..], &["--max-jobs", "4"]].concat();
    let _controller = Controller::of_several(&[&busy, &ours], &args).await;
    for n in 0..60 {
        let policy = format!("p{n}");
        busy.apply(POLICIES, idle(&policy)).await;
        busy.leases(&policy, 100, 300).await;
    }
    for policy in ["main", "beside"] {
        ours.apply(POLICIES, idle(policy)).await;
        wait_ready(&ours, policy).await;
    }
    for n in 0..60 {
        busy.wait_policy(&format!("p{n}"), "it has been looked at", |p| {
            !p["status"]["snapshots"].is_null()
        })
        .await;
    }
    let runs = async || (!unfinished(&busy).is_empty()).then_some(());
    busy.wait("a Job", runs).await;
    // A slot is reserved for a restore, even if all others are in use.
    restore(&ours, "urgent", "main").await;
    ours.wait_task("urgent", "InProgress").await;
    ours.leases("beside", 100, 300).await;
    let has_come = || !ours.jobs_for("beside", "compaction").is_empty();
    let came = end_some(&busy, &kubelet, 4, has_come).await;
    assert!(
        came,
        "{} Jobs of the busy tenant were made, and none of the other one's",
        busy.jobs.ever().len()
    );
    // It was not taken from the busy tenant: its Jobs get their turns, too.
    kubelet.plan(&[], done());
    let turns = until(2 * PATIENCE, async || {
        (busy.jobs.ever().len() >= 20).then_some(())
    });
    turns.await.expect("the busy one's Jobs");
}

/// The reserve for restores is shared, too.
#[tokio::test(flavor = "multi_thread")]
async fn one_tenants_restorations_do_not_use_up_the_reserve() {
    let busy = TestNamespace::new("busy").await;
    let ours = TestNamespace::new("victims").await;
    let kubelet = Kubelet::start(&busy).await;
    kubelet.plan(&[], Plan::Hang);
    let args = [&NO_ELECTION[..], &["--max-jobs", "4"]].concat();
    let _controller = Controller::of_several(&[&busy, &ours], &args).await;
    for n in 0..30 {
        let policy = format!("p{n}");
        busy.apply(POLICIES, idle(&policy)).await;
        restore(&busy, &format!("r{n}"), &policy).await;
    }
    ours.apply(POLICIES, idle("main")).await;
    wait_ready(&ours, "main").await;
    for n in 0..30 {
        busy.wait_until(TASKS, &format!("r{n}"), "it has been looked at", |t| {
            t["status"]["lastOperation"]["name"].is_string()
        })
        .await;
    }
    restore(&ours, "urgent", "main").await;
    let has_come = || !ours.jobs.ever().is_empty();
    let came = end_some(&busy, &kubelet, 4, has_come).await;
    assert!(
        came,
        "{} Jobs of the busy tenant were made, and none of the other one's",
        busy.jobs.ever().len()
    );
    ours.wait_task("urgent", "InProgress").await;
}

/// One tenant changes its policies all the time: others do not queue behind them.
#[tokio::test(flavor = "multi_thread")]
async fn changes_of_one_tenant_delay_nobody() {
    const MANY: usize = 300;
    let busy = TestNamespace::new("busy").await;
    let ours = TestNamespace::new("victims").await;
    let proxy = Proxy::start(busy.api.url());
    let controller = Controller::of_several_through(&proxy, &[&busy, &ours], &NO_ELECTION).await;
    ours.apply(POLICIES, idle("main")).await;
    ours.leases("main", 100, 100).await;
    for n in 0..MANY {
        busy.apply(POLICIES, idle(&format!("p{n}"))).await;
    }
    for n in 0..MANY {
        wait_ready(&busy, &format!("p{n}")).await;
    }
    wait_ready(&ours, "main").await;
    // Makes the controller slower than the tenant.
    proxy.delay(Duration::from_millis(20));
    let changes = (0..4).map(|worker| {
        let (api, path) = (busy.api.clone(), busy.path(POLICIES));
        tokio::spawn(async move {
            for round in 0.. {
                for n in (worker..MANY).step_by(4) {
                    let patch = json!({"spec": {"compaction": {"eventsThreshold": 1000 + round}}});
                    let _ = api.merge(&format!("{path}/p{n}"), &patch).await;
                }
            }
        })
    });
    let changes: Vec<_> = changes.collect();
    let of_busy = || {
        let calls = proxy.calls().into_iter();
        calls
            .filter(|c| c.works() && c.namespace == busy.name)
            .count()
    };
    // All of them are queued, more than once.
    proxy.take();
    let is_busy = until(2 * PATIENCE, async || (of_busy() >= MANY).then_some(()));
    assert!(is_busy.await.is_some(), "{}", controller.tail());
    proxy.take();
    ours.leases("main", 100, 300).await;
    ours.wait_for_jobs("main", "compaction", 1).await;
    let calls = proxy.calls();
    let created = calls
        .iter()
        .position(|c| c.verb == "create" && c.resource == "jobs" && c.namespace == ours.name);
    let before = calls[..created.expect("the Job")].iter();
    let before = before
        .filter(|c| c.works() && c.namespace == busy.name)
        .count();
    for task in changes {
        task.abort();
    }
    // Those under way when the Lease moved, and a few more.
    assert!(
        before < 60,
        "{before} writes for the busy tenant came first"
    );
}
