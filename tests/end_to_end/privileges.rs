//! Privileges of policies and tasks (host paths, root, images, Secrets) need a flag of the controller, which itself reads no Secret.

use super::foreign_objects::Theirs;
use super::tenants::{idle, is_seen, scheduled, wait_not_ready, wait_ready};
use crate::support::controller::Controller;
use crate::support::kube::Api;
use crate::support::kubelet::{Kubelet, Plan, done};
use crate::support::namespace::{
    NO_ELECTION, PATIENCE, POLICIES, TASKS, TestNamespace, shown, until,
};
use crate::support::object_recorder::Running;
use crate::support::proxy::Proxy;
use reqwest::Method;
use serde_json::{Value, json};

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
    space.task(&root, "fine", "Restore", as_root).await;
    let to_host = json!({"copyBackups": {"targetStore": {
        "url": "/srv/copies", "volume": {"hostPath": "/srv/copies"},
    }}});
    space.task(&copy, "fine", "CopyBackups", to_host).await;
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
        space.leases(policy, 100, 300).await;
    }
    space.apply(POLICIES, idle("fine")).await;
    wait_ready(&space, "fine").await;
    for (policy, _, flags) in privileges() {
        space
            .wait_policy(policy, "it has been acted on", is_seen)
            .await;
        let made = space
            .names("cronjobs", &format!("deltafold.io/policy={policy}"))
            .await;
        assert_eq!(made, [""; 0], "{policy}");
        let message = wait_not_ready(&space, policy, "NotAllowed").await;
        assert!(message.contains(flags[0]), "{policy}: {message}");
        space
            .task(
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
    // Options that are no fields are read as the Job would read them.
    let mut object = scheduled("args", "s3://bucket/args");
    object["spec"]["retention"] = json!({"args": ["--keep-hourly=many"]});
    space.apply(POLICIES, object).await;
    let message = wait_not_ready(&space, "args", "SpecInvalid").await;
    let expected = "spec.retention.args: invalid value 'many' for '--keep-hourly <N>'";
    assert!(message.contains(expected), "{message}");
    let spec = json!({"policy": "fine", "type": "Verify", "args": ["--store=s3://other"]});
    space
        .apply(
            TASKS,
            json!({"metadata": {"name": "other-store"}, "spec": spec}),
        )
        .await;
    let rejected = space.wait_task("other-store", "Rejected").await;
    assert_eq!(rejected["status"]["lastErrors"][0]["code"], "SpecInvalid");
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

    // Without the flags, what ran is stopped. A task is refused.
    controller.kill();
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    for task in privileged_tasks(&space, 2).await {
        let rejected = space.wait_task(&task, "Rejected").await;
        assert_eq!(rejected["status"]["lastErrors"][0]["code"], "NotAllowed");
    }
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
    space.task("copy", policy, "CopyBackups", config).await;
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
    let proxy = Proxy::start(space.api.url());
    let _controller = Controller::through(&proxy, &space, &NO_ELECTION).await;
    space.apply(POLICIES, with_secrets("main")).await;
    wait_ready(&space, "main").await;
    space.leases("main", 100, 300).await;
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
    space.leases("without", 100, 300).await;
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
    space.leases("follows", 100, 300).await;
    space.wait_for_jobs("follows", "compaction", 1).await;
    let run = async || (kubelet.ran(&[]).len() >= 3).then_some(());
    space
        .wait("the Pods of a follower, a task and a compaction", run)
        .await;
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
