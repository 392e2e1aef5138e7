//! Objects of somebody else that have one of our names, labels or owners are neither taken over nor counted.

use super::tenants::{following, forged, idle, is_seen, scheduled, wait_not_ready, wait_ready};
use crate::support::controller::Controller;
use crate::support::kubelet::{Kubelet, done};
use crate::support::manifests::{documents, read};
use crate::support::namespace::{
    Kubernetes, NEVER, NO_ELECTION, PATIENCE, POLICIES, TASKS, TestNamespace, condition_of, moment,
    name, shown, until,
};
use crate::support::proxy::Proxy;
use serde_json::{Value, json};

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
pub struct Theirs<'s> {
    space: &'s TestNamespace,
    resource: &'static str,
    object: Value,
}

impl<'s> Theirs<'s> {
    pub async fn create(space: &'s TestNamespace, resource: &'static str, object: Value) -> Self {
        Theirs {
            space,
            resource,
            object: space.create(resource, object).await,
        }
    }

    /// Asserts that nothing was changed, and that we have not written to it.
    pub async fn is_untouched(&self) {
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
    pub async fn delete(&self) {
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
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    // The name of a task's Job is known as soon as the task exists.
    space.apply(POLICIES, idle("tasks")).await;
    wait_ready(&space, "tasks").await;
    controller.kill();
    let of_task = space.task("check", "tasks", "Verify", Value::Null).await;
    let uid = of_task["metadata"]["uid"].as_str().unwrap();
    let of_task = format!("check-{}", &uid[..8]);
    // That of a threshold's Job when its policy exists.
    let main = space.apply(POLICIES, idle("main")).await;
    let main = serde_json::from_value(main).unwrap();
    let compaction = deltafold::controller::jobs::compaction_job_name(&main, 100, 300, 0, false);

    let mut all = Vec::new();
    for (name, policy, work) in [
        (&compaction, "main", "compaction"),
        (&of_task, "tasks", "task"),
    ] {
        let mut job = forged(name, policy, work, None);
        job["metadata"]["finalizers"] = Value::Null;
        all.push(Theirs::create(&space, "jobs", job).await);
    }
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    space.leases("main", 100, 300).await;
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
    let proxy = Proxy::start(api.url());
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
