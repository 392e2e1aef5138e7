//! Tenants of one controller: nobody can stop, delay, take over or read what belongs to another namespace.
//!
//! Each test is an attack by somebody who may write policies, tasks, Jobs and other objects in their own
//! namespace, or in a shared one. The tests decide how Pods end.

use crate::support::controller::Controller;
use crate::support::faulty_proxy::Proxy;
use crate::support::kube::Api;
use crate::support::kubelet::{Kubelet, Plan, message};
use crate::support::manifests::{documents, read};
use crate::support::namespace::{
    Kubernetes, PATIENCE, Running, TestNamespace, condition_of, ended, label, moment, name, shown,
    until,
};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;

/// A schedule that never fires during a test.
const NEVER: &str = "0 0 1 1 *";
const NO_ELECTION: [&str; 2] = ["--leader-elect", "false"];
const POLICIES: &str = "etcdbackuppolicies";
const TASKS: &str = "etcdbackuptasks";

fn done() -> Plan {
    Plan::Exit(0, message("compact", 0, "", ""))
}

/// Returns a policy with two CronJobs and a threshold of 100 events.
fn scheduled(name: &str, url: &str) -> Value {
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
fn following(name: &str, url: &str) -> Value {
    let mut policy = scheduled(name, url);
    policy["spec"]["snapshot"] = json!({"follow": {}});
    policy["spec"]["verify"] = json!({"schedule": NEVER});
    policy
}

/// Returns a policy that runs nothing but what a threshold or a task starts.
fn idle(name: &str) -> Value {
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

async fn leases(space: &TestNamespace, prefix: &str, full: i64, delta: i64) {
    for (kind, revision) in [("full", full), ("delta", delta)] {
        let name = format!("{prefix}-{kind}-snap");
        space.renew(&name, revision, &moment(0), Value::Null).await;
    }
}

async fn task(
    space: &TestNamespace,
    name: &str,
    policy: &str,
    type_: &str,
    config: Value,
) -> Value {
    let mut spec = json!({"policy": policy, "type": type_});
    if !config.is_null() {
        spec["config"] = config;
    }
    let task = json!({"metadata": {"name": name}, "spec": spec});
    space.create(TASKS, task).await
}

async fn restore(space: &TestNamespace, name: &str, policy: &str) {
    let config = json!({"restore": {"claimName": format!("data-{name}")}});
    task(space, name, policy, "Restore", config).await;
}

async fn move_to(space: &TestNamespace, policy: &str, url: &str) {
    let patch = json!({"spec": {"store": {"url": url}}});
    space.patch(POLICIES, policy, patch).await;
}

fn is_true(policy: &Value, condition: &str) -> bool {
    condition_of(policy, condition).is_some_and(|c| c["status"] == "True")
}

/// Returns whether the controller has acted on the newest spec.
fn is_seen(policy: &Value) -> bool {
    policy["status"]["observedGeneration"] == policy["metadata"]["generation"]
}

/// Waits until a policy is not Ready for this reason. Returns the message.
async fn wait_not_ready(space: &TestNamespace, policy: &str, reason: &str) -> String {
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

async fn wait_ready(space: &TestNamespace, policy: &str) -> Value {
    space
        .wait_policy(policy, "it is Ready", |p| is_seen(p) && is_true(p, "Ready"))
        .await
}

/// The age of a policy does not matter across namespaces.
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
        until(PATIENCE, async || {
            let shared = is_true(&ours.must_get(POLICIES, policy).await, "StoreShared")
                && is_true(&theirs.must_get(POLICIES, "mallory").await, "StoreShared");
            (shared || !running.stopped(policy).is_empty()).then_some(())
        })
        .await;
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
        ours.wait_condition(policy, "StoreShared", "True").await;
        theirs
            .wait_condition("mallory", "StoreShared", "True")
            .await;
        wait_ready(&ours, policy).await;
        // Both get a warning, and the other one is not stopped either: Jobs check the identity of the prefix.
        wait_ready(&theirs, "mallory").await;
    }
    // A new controller decides the same, and thresholds still act.
    controller.kill();
    let _controller = Controller::of_several(&[&theirs, &ours], &NO_ELECTION).await;
    leases(&ours, "follows", 100, 300).await;
    ours.wait_for_jobs("follows", "compaction", 1).await;
    wait_ready(&ours, "follows").await;

    move_to(&theirs, "mallory", "s3://bucket/mallory").await;
    for (space, policy) in [(&theirs, "mallory"), (&ours, "follows"), (&ours, "alice")] {
        space
            .wait_policy(policy, "it shares its store with nobody", |p| {
                is_seen(p) && !is_true(p, "StoreShared")
            })
            .await;
    }
    for policy in ["follows", "alice"] {
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
    }
    for version in told.all_versions() {
        let status = version["status"].to_string();
        assert!(!status.contains(&theirs.name), "{status}");
        assert!(!status.contains("mallory"), "{status}");
    }
}

/// Within a namespace, the policy that claimed a URL first has it, whatever their ages.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_policy_moves_to_the_store_of_one_that_runs() {
    let space = TestNamespace::new("claims").await;
    let running = Running::watch(&space).await;
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    let older = [("older-store", "a"), ("older-leases", "b")];
    for (policy, prefix) in older {
        space
            .apply(
                POLICIES,
                scheduled(policy, &format!("s3://bucket/{prefix}")),
            )
            .await;
        wait_ready(&space, policy).await;
    }
    a_second_later().await;
    for policy in ["store", "leases-of"] {
        let url = format!("s3://bucket/{policy}");
        space.apply(POLICIES, following(policy, &url)).await;
        wait_ready(&space, policy).await;
    }

    move_to(&space, "older-store", "s3://bucket/store/").await;
    // The other one moves while no controller runs.
    controller.kill();
    let lease_prefix = json!({"spec": {"snapshot": {"leasePrefix": "leases-of"}}});
    space.patch(POLICIES, "older-leases", lease_prefix).await;
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    let taken = [
        ("older-store", "StorePrefixTaken", "store"),
        ("older-leases", "LeasePrefixTaken", "leases-of"),
    ];
    for round in ["at first", "after a restart"] {
        for (policy, reason, first) in taken {
            until(PATIENCE, async || {
                let refused = space.must_get(POLICIES, policy).await;
                let ready = condition_of(&refused, "Ready").cloned();
                let is_refused = ready.is_some_and(|r| r["reason"] == reason);
                (is_refused || !running.stopped(first).is_empty()).then_some(())
            })
            .await;
            assert_eq!(running.stopped(first), [""; 0], "{first} stopped {round}");
            let message = wait_not_ready(&space, policy, reason).await;
            assert!(message.contains(first), "{message}");
            // Nothing of the refused policy runs.
            let of_it = format!("deltafold.io/policy={policy}");
            for cron in space.list("cronjobs", &of_it).await {
                let runs = format!("{} stands still", name(&cron));
                space
                    .wait_until("cronjobs", name(&cron), &runs, |c| {
                        c["spec"]["suspend"] == true
                    })
                    .await;
            }
            wait_ready(&space, first).await;
        }
        controller.kill();
        controller = Controller::start(&space, &NO_ELECTION).await;
        // When it has acted on a later change, it has looked at all of them.
        for (policy, ..) in taken {
            let touched = json!({"spec": {"verify": {"schedule": NEVER, "level":
                if round == "at first" { "names" } else { "fold" }}}});
            space.patch(POLICIES, policy, touched).await;
        }
    }
    for (policy, reason, first) in taken {
        wait_not_ready(&space, policy, reason).await;
        wait_ready(&space, first).await;
        assert_eq!(running.stopped(first), [""; 0], "{first} was stopped");
    }
    leases(&space, "store", 100, 300).await;
    space.wait_for_jobs("store", "compaction", 1).await;
    assert_eq!(space.jobs_for("older-store", "compaction").len(), 0);

    // When those are deleted, the others get it.
    for (policy, _, first) in taken {
        space.delete(POLICIES, first).await;
        wait_ready(&space, policy).await;
        let full = format!("{policy}-full");
        space
            .wait_until("cronjobs", &full, "it goes", |c| {
                c["spec"]["suspend"] == false
            })
            .await;
    }
}

/// Returns a Job that looks like one of ours and never ends; only its author can delete it.
fn forged(name: &str, policy: &str, work: &str, owner: Option<Value>) -> Value {
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
    leases(space, "main", 100, 300).await;
    space.wait_task("urgent", "InProgress").await;
    // A task and a compaction of the same policy may not run at the same time.
    leases(space, "beside", 100, 300).await;
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
        leases(space, &policy, 300, 300).await;
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
        leases(&busy, &policy, 100, 300).await;
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
    until(PATIENCE, async || {
        (!unfinished(&busy).is_empty()).then_some(())
    })
    .await
    .expect("a Job");
    // A slot is reserved for a restore, even if all others are in use.
    restore(&ours, "urgent", "main").await;
    ours.wait_task("urgent", "InProgress").await;
    leases(&ours, "beside", 100, 300).await;
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

/// Returns an object without what Kubernetes' own controllers write.
fn essence(object: &Value) -> Value {
    let mut object = object.clone();
    let fields = object.as_object_mut().expect("an object");
    fields.remove("status");
    let metadata = object["metadata"].as_object_mut().expect("metadata");
    for field in ["managedFields", "resourceVersion"] {
        metadata.remove(field);
    }
    // Written by the Deployment controller.
    if let Some(annotations) = metadata.get_mut("annotations") {
        let annotations = annotations.as_object_mut().expect("annotations");
        annotations.remove("deployment.kubernetes.io/revision");
        if annotations.is_empty() {
            metadata.remove("annotations");
        }
    }
    object
}

/// An object of somebody else, with a name that we would use.
struct Theirs<'s> {
    space: &'s TestNamespace,
    resource: &'static str,
    object: Value,
}

impl<'s> Theirs<'s> {
    async fn create(space: &'s TestNamespace, resource: &'static str, object: Value) -> Self {
        Theirs {
            space,
            resource,
            object: space.create(resource, object).await,
        }
    }

    /// Asserts that nothing was changed, and that we have not written to it.
    async fn is_untouched(&self) {
        let name = name(&self.object);
        let now = self.space.must_get(self.resource, name).await;
        assert_eq!(
            shown(&essence(&now)),
            shown(&essence(&self.object)),
            "{name} of the {} was changed",
            self.resource
        );
        let writers = now["metadata"]["managedFields"].to_string();
        assert!(!writers.contains("\"deltafold"), "{name}: {writers}");
    }

    /// Deletes it and waits until it is gone. By then ours may have its name.
    async fn delete(&self) {
        let name = name(&self.object);
        self.space.delete(self.resource, name).await;
        let uid = &self.object["metadata"]["uid"];
        let gone = until(PATIENCE, async || {
            let there = self.space.get(self.resource, name).await;
            there
                .is_none_or(|there| there["metadata"]["uid"] != *uid)
                .then_some(())
        });
        assert!(gone.await.is_some(), "{name} is still there");
    }
}

fn pod_template() -> Value {
    json!({
        "metadata": {"labels": {"app": "theirs"}},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "any", "image": "any"}],
        },
    })
}

/// An object of somebody else has one of our names.
#[tokio::test(flavor = "multi_thread")]
async fn objects_of_somebody_else_are_not_taken_over() {
    let space = TestNamespace::new("squatted").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let cron = json!({
        "metadata": {"name": "main-full", "labels": {"app": "theirs"}},
        "spec": {"schedule": NEVER, "jobTemplate": {"spec": {"template": pod_template()}}},
    });
    let cron = Theirs::create(&space, "cronjobs", cron).await;
    let mut always = pod_template();
    always["spec"]["restartPolicy"] = json!("Always");
    let deployment = json!({
        "metadata": {"name": "tail-follow"},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": {"app": "theirs"}}, "template": always,
        },
    });
    let deployment = Theirs::create(&space, "deployments", deployment).await;
    // Our labels do not make it ours.
    let labelled = json!({
        "metadata": {"name": "labelled-full", "labels": {
            "app.kubernetes.io/managed-by": "deltafold",
            "app.kubernetes.io/name": "deltafold",
            "deltafold.io/policy": "labelled",
            "deltafold.io/work": "full-snapshot",
        }},
        "spec": {"schedule": NEVER, "jobTemplate": {"spec": {"template": pod_template()}}},
    });
    let labelled = Theirs::create(&space, "cronjobs", labelled).await;
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    for policy in ["main", "labelled"] {
        let url = format!("s3://bucket/{policy}");
        space.apply(POLICIES, scheduled(policy, &url)).await;
    }
    space
        .apply(POLICIES, following("tail", "s3://bucket/tail"))
        .await;
    let taken = [
        (&cron, "main", "CronJob"),
        (&labelled, "labelled", "CronJob"),
        (&deployment, "tail", "Deployment"),
    ];
    for (theirs, policy, kind) in taken {
        let object = name(&theirs.object);
        // It would become Ready, too, if it were taken over.
        space
            .wait_policy(policy, "it has been acted on", |p| {
                is_seen(p) && condition_of(p, "Ready").is_some()
            })
            .await;
        theirs.is_untouched().await;
        let message = wait_not_ready(&space, policy, "NameTaken").await;
        assert!(
            message.contains(kind) && message.contains(object),
            "{message}"
        );
    }
    for (theirs, policy, kind) in taken {
        theirs.is_untouched().await;
        theirs.delete().await;
        wait_ready(&space, policy).await;
        let resource = if kind == "CronJob" {
            "cronjobs"
        } else {
            "deployments"
        };
        let ours = space.wait_for(resource, name(&theirs.object)).await;
        assert_eq!(ours["metadata"]["ownerReferences"][0]["name"], policy);
    }
    // Deleting the policy deletes nothing of somebody else's.
    let again = json!({
        "metadata": {"name": "other-verify"},
        "spec": {"schedule": NEVER, "jobTemplate": {"spec": {"template": pod_template()}}},
    });
    let again = Theirs::create(&space, "cronjobs", again).await;
    space
        .apply(POLICIES, scheduled("other", "s3://bucket/other"))
        .await;
    wait_ready(&space, "other").await;
    let verify = json!({"spec": {"verify": {"schedule": NEVER}}});
    space.patch(POLICIES, "other", verify).await;
    wait_not_ready(&space, "other", "NameTaken").await;
    let verify = json!({"spec": {"verify": null}});
    space.patch(POLICIES, "other", verify).await;
    wait_ready(&space, "other").await;
    space.delete(POLICIES, "other").await;
    space.wait_until_gone("cronjobs", "other-full").await;
    again.is_untouched().await;
}

/// Snapshot Leases may belong to etcd-druid: they are read, and stay as they are.
#[tokio::test(flavor = "multi_thread")]
async fn snapshot_leases_of_somebody_else_are_used_as_they_are() {
    let space = TestNamespace::new("druid").await;
    let mut all = Vec::new();
    for (kind, revision) in [("full", "100"), ("delta", "300")] {
        let lease = json!({
            "metadata": {
                "name": format!("etcd-main-{kind}-snap"), "labels": {"app": "etcd-druid"},
            },
            "spec": {"holderIdentity": revision, "renewTime": moment(0)},
        });
        all.push(Theirs::create(&space, "leases", lease).await);
    }
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    let mut policy = idle("main");
    policy["spec"]["snapshot"] = json!({"leasePrefix": "etcd-main"});
    space.apply(POLICIES, policy).await;
    wait_ready(&space, "main").await;
    space.wait_for_jobs("main", "compaction", 1).await;
    for lease in &all {
        lease.is_untouched().await;
    }
    space.delete(POLICIES, "main").await;
    space.wait_until_gone(POLICIES, "main").await;
    for lease in &all {
        lease.is_untouched().await;
    }
}

/// The names of Jobs are predictable.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_somebody_else_are_not_taken_for_ours() {
    let space = TestNamespace::new("squatted").await;
    let elsewhere = TestNamespace::new("foresight").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let mut controller = Controller::of_several(&[&space, &elsewhere], &NO_ELECTION).await;
    let mut of_same_name = idle("main");
    of_same_name["spec"]["store"]["url"] = json!("s3://bucket/elsewhere");
    elsewhere.apply(POLICIES, of_same_name).await;
    leases(&elsewhere, "main", 100, 300).await;
    let job = elsewhere.wait_for_jobs("main", "compaction", 1).await;
    let compaction = name(&job[0]).to_owned();
    // The name of a task's Job is known as soon as the task exists.
    space.apply(POLICIES, idle("tasks")).await;
    wait_ready(&space, "tasks").await;
    controller.kill();
    let of_task = task(&space, "check", "tasks", "Verify", Value::Null).await;
    let uid = of_task["metadata"]["uid"].as_str().unwrap();
    let of_task = format!("check-{}", &uid[..8]);

    let mut all = Vec::new();
    for (name, policy, work) in [
        (&compaction, "main", "compaction"),
        (&of_task, "tasks", "task"),
    ] {
        let mut job = forged(name, policy, work, None);
        job["metadata"]["finalizers"] = Value::Null;
        all.push(Theirs::create(&space, "jobs", job).await);
    }
    let _controller = Controller::of_several(&[&space, &elsewhere], &NO_ELECTION).await;
    space.apply(POLICIES, idle("main")).await;
    leases(&space, "main", 100, 300).await;
    space
        .wait_policy("main", "it tells whose the Job is", |p| {
            condition_of(p, "CompactionHealthy").is_some_and(|c| {
                c["status"] == "False" && c["message"].to_string().contains(&compaction)
            })
        })
        .await;
    space
        .wait_until(TASKS, "check", "it tells whose the Job is", |t| {
            let status = t["status"].to_string();
            status.contains("NameTaken") && status.contains(&of_task)
        })
        .await;
    for job in &all {
        job.is_untouched().await;
        job.delete().await;
    }
    // What was refused is retried, each time a little later, but within a minute.
    let heals = until(3 * PATIENCE, async || {
        let policy = space.must_get(POLICIES, "main").await;
        let task = space.must_get(TASKS, "check").await;
        let is_compacted = policy["status"]["lastCompaction"]["state"] == "Succeeded";
        (is_compacted && task["status"]["state"] == "Succeeded").then_some(())
    });
    assert!(heals.await.is_some(), "{:?}", kubelet.ran(&[]));
}

/// If the Jobs' account or its binding belongs to somebody else, no Job runs with these rights.
#[tokio::test(flavor = "multi_thread")]
async fn the_account_of_jobs_is_somebody_elses() {
    let kubernetes = Kubernetes::start().await;
    let api = kubernetes.server.api();
    let with_account = TestNamespace::on(&api, "account").await;
    let with_binding = TestNamespace::on(&api, "binding").await;
    let fine = TestNamespace::on(&api, "fine").await;
    // In an installation for all namespaces, none has these beforehand.
    for space in [&with_account, &with_binding, &fine] {
        space.delete("serviceaccounts", "deltafold-jobs").await;
        space.delete("rolebindings", "deltafold-jobs").await;
    }
    let account = json!({"metadata": {"name": "deltafold-jobs"}});
    let account = Theirs::create(&with_account, "serviceaccounts", account).await;
    let binding = json!({
        "metadata": {"name": "deltafold-jobs"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "theirs", "namespace": with_binding.name}],
    });
    let binding = Theirs::create(&with_binding, "rolebindings", binding).await;
    let proxy = Proxy::start(api.url()).await;
    let _controller = Controller::of_all(&proxy, &fine, &NO_ELECTION).await;
    for space in [&with_account, &with_binding, &fine] {
        let url = format!("s3://bucket/{}", space.name);
        space.apply(POLICIES, scheduled("main", &url)).await;
    }
    // Created for the first policy of a namespace.
    wait_ready(&fine, "main").await;
    fine.must_get("serviceaccounts", "deltafold-jobs").await;
    let made = fine.must_get("rolebindings", "deltafold-jobs").await;
    assert_eq!(made["roleRef"]["kind"], "ClusterRole");
    assert_eq!(made["roleRef"]["name"], "deltafold-jobs");
    for (theirs, kind) in [(&account, "ServiceAccount"), (&binding, "RoleBinding")] {
        let message = wait_not_ready(theirs.space, "main", "NameTaken").await;
        assert!(
            message.contains(kind) && message.contains("deltafold-jobs"),
            "{message}"
        );
        theirs.is_untouched().await;
        theirs.delete().await;
        wait_ready(theirs.space, "main").await;
    }
}

/// A policy with this name used to overwrite the Role that jobs/rbac.yaml ships.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_named_as_the_shipped_role() {
    let space = TestNamespace::new("named").await;
    let mut all = Vec::new();
    for (kind, resource) in [
        ("ServiceAccount", "serviceaccounts"),
        ("Role", "roles"),
        ("RoleBinding", "rolebindings"),
    ] {
        for mut object in documents(&read("jobs/rbac.yaml")) {
            if object["kind"] == kind {
                object["metadata"]["name"] = json!("deltafold-leases");
                all.push(Theirs::create(&space, resource, object).await);
            }
        }
    }
    assert_eq!(all.len(), 3);
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    space
        .apply(POLICIES, scheduled("leases", "s3://bucket/leases"))
        .await;
    wait_ready(&space, "leases").await;
    for theirs in &all {
        theirs.is_untouched().await;
    }
}

/// Returns what is refused by default, and the flag that allows it.
fn privileges() -> [(&'static str, Value, &'static [&'static str]); 6] {
    let template = |template: Value| json!({"jobTemplate": template});
    [
        (
            "host-path",
            json!({"store": {"url": "/srv/backups", "volume": {"hostPath": "/srv/backups"}}}),
            &["--allow-host-path"],
        ),
        (
            "host-network",
            template(json!({"hostNetwork": true})),
            &["--allow-host-network"],
        ),
        (
            "image",
            template(json!({"image": "registry.example/team/deltafold:1"})),
            &["--allowed-image-prefix", "registry.example/team/"],
        ),
        (
            "account",
            template(json!({"serviceAccountName": "cluster-admin"})),
            &["--allow-service-account"],
        ),
        (
            "tolerations",
            template(json!({"tolerations": [{"operator": "Exists"}]})),
            &["--allow-tolerations"],
        ),
        (
            "priority",
            template(json!({"priorityClassName": "system-node-critical"})),
            &["--allow-priority-class"],
        ),
    ]
}

async fn privileged_tasks(space: &TestNamespace, round: usize) -> [String; 2] {
    let (root, copy) = (format!("root-{round}"), format!("copy-{round}"));
    let as_root = json!({"restore": {"claimName": "data", "runAsUser": 0}});
    task(space, &root, "fine", "Restore", as_root).await;
    let to_host = json!({"copyBackups": {"targetStore": {
        "url": "/srv/copies", "volume": {"hostPath": "/srv/copies"},
    }}});
    task(space, &copy, "fine", "CopyBackups", to_host).await;
    [root, copy]
}

/// A user who may write policies must not get the node: each privilege needs a flag of the controller.
#[tokio::test(flavor = "multi_thread")]
async fn privileges_need_a_flag() {
    let space = TestNamespace::new("privileges").await;
    let running = Running::watch(&space).await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    for (policy, spec, _) in privileges() {
        let mut object = scheduled(policy, &format!("s3://bucket/{policy}"));
        for (part, value) in spec.as_object().unwrap() {
            object["spec"][part] = value.clone();
        }
        space.apply(POLICIES, object).await;
        leases(&space, policy, 100, 300).await;
    }
    space.apply(POLICIES, idle("fine")).await;
    wait_ready(&space, "fine").await;
    for (policy, _, flags) in privileges() {
        until(PATIENCE, async || {
            let there = space.must_get(POLICIES, policy).await;
            is_seen(&there).then_some(())
        })
        .await
        .expect("it has been acted on");
        let made = space
            .names("cronjobs", &format!("deltafold.io/policy={policy}"))
            .await;
        assert_eq!(made, [""; 0], "{policy}");
        let message = wait_not_ready(&space, policy, "NotAllowed").await;
        assert!(message.contains(flags[0]), "{policy}: {message}");
        task(
            &space,
            policy,
            policy,
            "Verify",
            json!({"verify": {"level": "names"}}),
        )
        .await;
    }
    for task in privileged_tasks(&space, 0).await {
        let rejected = space.wait_task(&task, "Rejected").await;
        assert_eq!(rejected["status"]["lastErrors"][0]["code"], "NotAllowed");
    }
    assert_eq!(space.jobs.ever().len(), 0, "a Job was made");
    assert_eq!(running.cron_jobs.ever().len(), 0, "a CronJob was made");

    // One flag after the other. What was refused is refused by the next controller, too: it never ran.
    let mut args = NO_ELECTION.to_vec();
    for (at, (allowed, _, flags)) in privileges().into_iter().enumerate() {
        args.extend(flags);
        controller.kill();
        controller = Controller::start(&space, &args).await;
        wait_ready(&space, allowed).await;
        space
            .wait_for_some("cronjobs", &format!("deltafold.io/policy={allowed}"), 2)
            .await;
        for (policy, ..) in privileges().into_iter().skip(at + 1) {
            wait_not_ready(&space, policy, "NotAllowed").await;
            let made = space
                .names("cronjobs", &format!("deltafold.io/policy={policy}"))
                .await;
            assert_eq!(made, [""; 0], "{policy}");
        }
    }
    controller.kill();
    args.push("--allow-root");
    let mut controller = Controller::start(&space, &args).await;
    for task in privileged_tasks(&space, 1).await {
        space.wait_task(&task, "Succeeded").await;
    }
    // The prefix of the image counts, and every image is checked.
    for (policy, image) in [
        ("near", "registry.example/team-of-others/deltafold:1"),
        (
            "elsewhere",
            "evil.example/registry.example/team/deltafold:1",
        ),
    ] {
        let mut object = scheduled(policy, &format!("s3://bucket/{policy}"));
        object["spec"]["jobTemplate"] = json!({"image": image});
        space.apply(POLICIES, object).await;
        wait_not_ready(&space, policy, "NotAllowed").await;
    }

    // Without the flags, what ran continues until it is changed.
    controller.kill();
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    for (policy, ..) in privileges() {
        space.wait_condition(policy, "NotAllowed", "True").await;
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
    }
    let changed = json!({"spec": {"compaction": {"eventsThreshold": 99}}});
    space.patch(POLICIES, "host-path", changed).await;
    wait_not_ready(&space, "host-path", "NotAllowed").await;
    for (policy, ..) in privileges().into_iter().skip(1) {
        space.wait_condition(policy, "NotAllowed", "True").await;
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
    }
    // A task is new.
    let [root, copy] = privileged_tasks(&space, 2).await;
    for task in [root, copy] {
        let rejected = space.wait_task(&task, "Rejected").await;
        assert_eq!(rejected["status"]["lastErrors"][0]["code"], "NotAllowed");
    }
    controller.kill();
    let args = [&NO_ELECTION[..], &["--enforce-existing"]].concat();
    let _controller = Controller::start(&space, &args).await;
    for (policy, ..) in privileges() {
        wait_not_ready(&space, policy, "NotAllowed").await;
        for kind in ["full", "delta"] {
            let cron = format!("{policy}-{kind}");
            let is_stopped = until(PATIENCE, async || {
                let there = space.get("cronjobs", &cron).await;
                there
                    .is_none_or(|c| c["spec"]["suspend"] == true)
                    .then_some(())
            });
            assert!(is_stopped.await.is_some(), "{cron} goes on");
        }
    }
}

fn secret(name: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "stringData": {
            "accessKeyID": "a", "secretAccessKey": "b", "region": "c", "username": "d",
            "password": "e", "ca.crt": "f", "tls.crt": "g", "tls.key": "h", "identity.txt": "i",
        },
    })
}

const SECRETS: [&str; 5] = ["store", "tls", "auth", "age", "target"];

/// Returns a policy that uses Secrets for everything.
fn with_secrets(name: &str) -> Value {
    let mut policy = scheduled(name, &format!("s3://bucket/{name}"));
    let spec = &mut policy["spec"];
    spec["store"]["secretRef"] = json!({"name": "store"});
    spec["etcd"] = json!({
        "endpoints": ["https://etcd:2379"],
        "tlsSecretRef": {"name": "tls"},
        "authSecretRef": {"name": "auth"},
    });
    spec["encryption"] = json!({"identitySecretRef": {"name": "age"}});
    policy
}

async fn copy(space: &TestNamespace, policy: &str) {
    let config = json!({"copyBackups": {"targetStore": {
        "url": "s3://elsewhere/x", "secretRef": {"name": "target"},
    }}});
    task(space, "copy", policy, "CopyBackups", config).await;
}

/// The controller's token opens no Secret, and no Secret has a finalizer of the controller.
#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_not_the_controllers_business() {
    let space = TestNamespace::new("secrets").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let mut all = Vec::new();
    for name in SECRETS {
        all.push(Theirs::create(&space, "secrets", secret(name)).await);
    }
    let proxy = Proxy::start(space.api.url()).await;
    let _controller = Controller::through(&proxy, &space, &NO_ELECTION).await;
    space.apply(POLICIES, with_secrets("main")).await;
    wait_ready(&space, "main").await;
    leases(&space, "main", 100, 300).await;
    space
        .wait_policy("main", "it is compacted", |p| {
            p["status"]["lastCompaction"]["state"] == "Succeeded"
        })
        .await;
    copy(&space, "main").await;
    space.wait_task("copy", "Succeeded").await;
    for secret in &all {
        secret.is_untouched().await;
    }
    // A missing Secret is reported by the Job.
    for secret in &all {
        secret.delete().await;
    }
    let mut without = with_secrets("without");
    without["spec"]["store"]["secretRef"] = json!({"name": "missing"});
    space.apply(POLICIES, without).await;
    wait_ready(&space, "without").await;
    leases(&space, "without", 100, 300).await;
    space.wait_until_ended("without", "compaction", 1).await;
    for call in proxy.calls() {
        let asked = call.resource.split('/').next() == Some("secrets");
        assert!(!asked, "{} {} {}", call.verb, call.resource, call.name);
    }
    let own = Api::new(space.api.url(), &space.controllers_token().await);
    let path = space.path("secrets");
    for path in [path.clone(), format!("{path}/store")] {
        let refused = own.ask(Method::GET, &path, None).await.unwrap_err();
        assert_eq!(refused.code, 403, "{path}");
    }
}

/// A namespace can be deleted without the controller.
#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_goes_while_the_controller_is_down() {
    let space = TestNamespace::new("goes").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], Plan::Hang);
    for name in SECRETS {
        space.create("secrets", secret(name)).await;
    }
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    space.apply(POLICIES, with_secrets("main")).await;
    let mut follows = with_secrets("follows");
    follows["spec"]["snapshot"] = json!({"follow": {}});
    space.apply(POLICIES, follows).await;
    for policy in ["main", "follows"] {
        wait_ready(&space, policy).await;
    }
    copy(&space, "main").await;
    space.wait_task("copy", "InProgress").await;
    leases(&space, "follows", 100, 300).await;
    space.wait_for_jobs("follows", "compaction", 1).await;
    until(PATIENCE, async || {
        (kubelet.ran(&[]).len() >= 3).then_some(())
    })
    .await
    .expect("the Pods of a follower, a task and a compaction");
    controller.kill();
    let path = format!("/api/v1/namespaces/{}", space.name);
    space.api.delete(&path).await;
    let mut last = Value::Null;
    let gone = until(PATIENCE, async || match space.api.get(&path).await {
        None => Some(()),
        Some(there) => {
            last = there;
            None
        }
    });
    let is_gone = gone.await.is_some();
    assert!(is_gone, "it is still there:\n{}", shown(&last["status"]));
}

/// One tenant changes its policies all the time: others do not queue behind them.
#[tokio::test(flavor = "multi_thread")]
async fn changes_of_one_tenant_delay_nobody() {
    const MANY: usize = 300;
    let busy = TestNamespace::new("busy").await;
    let ours = TestNamespace::new("victims").await;
    let proxy = Proxy::start(busy.api.url()).await;
    let controller = Controller::of_several_through(&proxy, &[&busy, &ours], &NO_ELECTION).await;
    ours.apply(POLICIES, idle("main")).await;
    leases(&ours, "main", 100, 100).await;
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
    proxy.forget();
    let is_busy = until(2 * PATIENCE, async || (of_busy() >= MANY).then_some(()));
    assert!(is_busy.await.is_some(), "{}", controller.tail());
    proxy.forget();
    leases(&ours, "main", 100, 300).await;
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
