//! Upgrade from 0.1 and downgrade: what runs continues and no backup is missed; leftovers of 0.1 are cleaned
//! up.
//!
//! The objects are those of `fixtures/frozen/0.1`, written to an API server as 0.1's controller wrote them,
//! with its field managers, annotations and finalizers.
//!
//! One file of more than 700 lines: all tests start from the same leftovers of 0.1.

use crate::support::controller::Controller;
use crate::support::fixtures_dir;
use crate::support::kube::{Api, Body, TOKEN, write_kubeconfig};
use crate::support::kubelet::{Kubelet, Plan, message};
use crate::support::manifests::{documents, kind};
use crate::support::namespace::{
    Kubernetes, PATIENCE, TestNamespace, condition_of, define, definitions, ended, label, moment,
    name, shown, until,
};
use crate::support::object_recorder::Running;
use crate::support::tools::forget_env;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

const POLICIES: &str = "etcdbackuppolicies";
const TASKS: &str = "etcdbackuptasks";
const NO_ELECTION: [&str; 2] = ["--leader-elect", "false"];
const IN_USE: &str = "deltafold.io/in-use";
/// Policies whose specs need flags today.
const PRIVILEGED: [&str; 2] = ["host", "rich"];
/// These flags.
const ALLOWED: [&str; 6] = [
    "--allow-host-path",
    "--allow-host-network",
    "--allow-service-account",
    "--allow-tolerations",
    "--allow-priority-class",
    "--allowed-image-prefix=registry.example",
];
/// A threshold's Job that runs while the controller is replaced.
const COMPACTION: &str = "rich-compact-9b6e66e9";
/// A task that runs while the controller is replaced.
const TASK: &str = "delta";

fn done() -> Plan {
    Plan::Exit(0, message("compact", 0, "", ""))
}

fn frozen(file: &str) -> String {
    let path = fixtures_dir().join("frozen/0.1").join(file);
    fs::read_to_string(path).expect("what is frozen")
}

/// Returns every object inside, at any depth.
fn objects(value: Value) -> Vec<Value> {
    match value {
        Value::Array(all) => all.into_iter().flat_map(objects).collect(),
        Value::Object(fields) if !fields.contains_key("kind") => {
            fields.into_iter().flat_map(|(_, v)| objects(v)).collect()
        }
        Value::Object(_) => vec![value],
        _ => Vec::new(),
    }
}

fn resource(kind: &str) -> &'static str {
    match kind {
        "CronJob" => "cronjobs",
        "Deployment" => "deployments",
        "Job" => "jobs",
        "Lease" => "leases",
        "Role" => "roles",
        "RoleBinding" => "rolebindings",
        "ServiceAccount" => "serviceaccounts",
        other => panic!("which resource is a {other}?"),
    }
}

/// Returns the revision in a snapshot Lease.
fn saved(lease: &str) -> Option<i64> {
    match lease {
        _ if lease.ends_with("-full-snap") => Some(100),
        _ if lease.ends_with("-delta-snap") => Some(200),
        _ => None,
    }
}

fn uid(object: &Value) -> &str {
    object["metadata"]["uid"].as_str().expect("a UID")
}

/// Adapts a policy of the fixtures to a real cluster, on which they never were: of two policies with one prefix
/// 0.1 ran only the older one, and no Pod has such a toleration.
fn possible(object: Value, policy: &str) -> Value {
    let mut text = object.to_string();
    if policy == "following" {
        text = text.replace("s3://backups/etcd-main", "s3://backups/following");
    }
    text = text.replace(r#""effect":"NoSchedule""#, r#""effect":"NoExecute""#);
    serde_json::from_str(&text).expect("JSON")
}

/// Returns the names of all fields of a schema.
fn fields(schema: &Value) -> String {
    let mut text = String::new();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        text += &format!("{name}({})", fields(field));
    }
    match schema.get("items") {
        Some(items) => text + &fields(items),
        None => text,
    }
}

/// Makes the API server serve these CRDs.
async fn serve(api: &Api, crds: &[Value]) {
    define(api, crds).await;
    let parts = |schema: &Value| ["spec", "status"].map(|p| fields(&schema["properties"][p]));
    let served = until(PATIENCE, async || {
        let there = api.get("/openapi/v3/apis/deltafold.io/v1alpha1").await?;
        let there = there["components"]["schemas"].as_object()?;
        let is_served = crds.iter().all(|crd| {
            let kind = crd["spec"]["names"]["kind"].as_str().expect("a kind");
            let wanted = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
            let mut of_kind = there.iter().filter(|(name, _)| name.ends_with(kind));
            of_kind.any(|(_, schema)| parts(schema) == parts(wanted))
        });
        // The storage is new, too.
        for resource in [POLICIES, TASKS] {
            let path = format!("/apis/deltafold.io/v1alpha1/{resource}");
            api.ask(Method::GET, &path, None).await.ok()?;
        }
        is_served.then_some(())
    });
    served.await.expect("the API server serves the CRDs");
}

/// Applies an object as a field manager of 0.1's controller did.
async fn apply_as(space: &TestNamespace, manager: &str, path: &str, object: &Value) {
    let path = format!("{path}?fieldManager={manager}&force=true&fieldValidation=Strict");
    let body = Some((Body::Apply, object));
    space.api.must(Method::PATCH, &path, body).await;
}

/// What 0.1 left in a namespace. Its controller is gone.
struct Left {
    /// Ends when this is dropped.
    _kubernetes: Kubernetes,
    space: TestNamespace,
    /// The policies as they were applied.
    policies: Vec<Value>,
    /// UIDs of CronJobs, followers and access, by resource and name.
    made: BTreeMap<(&'static str, String), String>,
    running_job: String,
}

impl Left {
    async fn by_0_1() -> Self {
        let kubernetes = Kubernetes::start().await;
        let api = kubernetes.server.api();
        serve(&api, &documents(&frozen("crds.yaml"))).await;
        let space = TestNamespace::on(&api, "backup").await;
        create_what_is_used(&space).await;
        let (policies, uids) = create_policies_and_task(&space).await;
        let mut left = Left {
            _kubernetes: kubernetes,
            running_job: format!("{TASK}-{}", &uids[TASK].1[..8]),
            space,
            policies,
            made: BTreeMap::new(),
        };
        left.create_what_is_made(&uids).await;
        left.create_status().await;
        left
    }

    /// Applies the new CRDs; the old controller is gone.
    async fn upgrade(&self) {
        serve(&self.space.api, &definitions()).await;
    }

    fn names_of(&self, resource: &str) -> Vec<String> {
        let of_it = self.made.keys().filter(|(r, _)| *r == resource);
        of_it.map(|(_, name)| name.clone()).collect()
    }

    async fn create_what_is_made(&mut self, uids: &BTreeMap<String, (String, String)>) {
        let mut text = frozen("jobs.json").replace(
            r#""namespace":"backup""#,
            &format!(r#""namespace":"{}""#, self.space.name),
        );
        for (then, now) in uids.values() {
            text = text.replace(then, now);
        }
        let (then, now) = &uids[TASK];
        text = text.replace(
            &format!("{TASK}-{}", &then[..8]),
            &format!("{TASK}-{}", &now[..8]),
        );
        for object in objects(serde_json::from_str(&text).expect("JSON")) {
            self.create_one(object).await;
        }
    }

    async fn create_one(&mut self, mut object: Value) {
        let policy = label(&object, "policy").expect("a policy").to_owned();
        object = possible(object, &policy);
        let (resource, name) = (resource(kind(&object)), name(&object).to_owned());
        match resource {
            // They were created, not applied. Jobs have renewed them since.
            "leases" => {
                self.space.create(resource, object).await;
                if let Some(revision) = saved(&name) {
                    let at = moment(0);
                    self.space.renew(&name, revision, &at, Value::Null).await;
                }
            }
            "jobs" => {
                // The fixture has Jobs of other moments, too: they have ended and are gone.
                if name == COMPACTION {
                    object["metadata"]["annotations"] = json!({
                        "deltafold.io/trigger": "EventsThreshold",
                        "deltafold.io/full-revision": "100",
                        "deltafold.io/delta-revision": "200",
                        "deltafold.io/attempt": "1",
                    });
                } else if name != self.running_job {
                    return;
                }
                self.space.create(resource, object).await;
            }
            _ => {
                let hash = json!("0123456789abcdef");
                object["metadata"]["annotations"]["deltafold.io/applied-hash"] = hash;
                let path = format!("{}/{name}", self.space.path(resource));
                apply_as(&self.space, "deltafold-policy", &path, &object).await;
                let there = self.space.must_get(resource, &name).await;
                self.made.insert((resource, name), uid(&there).to_owned());
            }
        }
    }

    async fn create_status(&self) {
        let all = documents(&frozen("resources/policies.yaml"));
        let rich = all.iter().find(|p| name(p) == "rich").expect("it");
        for policy in &self.policies {
            let mut status = match name(policy) {
                "rich" => rich["status"].clone(),
                _ => json!({"conditions": rich["status"]["conditions"]}),
            };
            status["observedGeneration"] = json!(1);
            let parts = status.as_object_mut().expect("an object");
            parts.remove("lastRestoration");
            parts.remove("lastCompaction");
            let conditions = status["conditions"].as_array_mut().expect("conditions");
            conditions.retain(|c| c["type"] != "CompactionHealthy");
            for condition in conditions {
                condition["observedGeneration"] = json!(1);
            }
            if name(policy) == "rich" {
                status["activeJobs"] = json!([self.running_job, COMPACTION]);
            }
            self.write_status(POLICIES, name(policy), "deltafold-policy", status)
                .await;
        }
        let compaction = json!({"lastCompaction": {
            "jobName": COMPACTION, "trigger": "EventsThreshold", "fullRevision": 100,
            "deltaRevision": 200, "fullSnapshot": false, "failures": 0,
            "startTime": chrono::Utc::now(), "state": "Running",
        }});
        self.write_status(POLICIES, "rich", "deltafold-compaction", compaction)
            .await;
        // The last runs of another policy have failed. Each part of a status had its own field manager.
        let parts = &rich["status"];
        let mut restoration = parts["lastVerification"].clone();
        restoration["revision"] = Value::Null;
        let conditions = parts["conditions"].as_array().expect("conditions").iter();
        let unhealthy = conditions.filter(|c| c["type"] == "CompactionHealthy");
        for (manager, status) in [
            (
                "deltafold-compaction",
                json!({
                    "lastCompaction": parts["lastCompaction"],
                    "conditions": unhealthy.collect::<Vec<_>>(),
                }),
            ),
            ("deltafold-task", json!({"lastRestoration": restoration})),
        ] {
            self.write_status(POLICIES, "plain", manager, status).await;
        }
        let tasks = documents(&frozen("resources/tasks.yaml"));
        let task = tasks.iter().find(|t| name(t) == TASK).expect("it");
        let mut status = task["status"].clone();
        status["initiatedAt"] = json!(chrono::Utc::now());
        status["jobName"] = self.running_job.clone().into();
        self.write_status(TASKS, TASK, "deltafold-task", status)
            .await;
    }

    async fn write_status(&self, resource: &str, name: &str, manager: &str, status: Value) {
        let there = self.space.must_get(resource, name).await;
        let object = json!({
            "apiVersion": there["apiVersion"], "kind": there["kind"],
            "metadata": {"name": name}, "status": status,
        });
        let path = format!("{}/{name}/status", self.space.path(resource));
        apply_as(&self.space, manager, &path, &object).await;
    }

    /// Waits until today's controller has the CronJobs and followers that it wants.
    async fn wait_until_taken_over(&self) {
        for resource in ["cronjobs", "deployments"] {
            for name in self.names_of(resource) {
                if PRIVILEGED.iter().any(|p| name.starts_with(p)) {
                    continue;
                }
                let wanted = "it is what today's controller makes";
                self.space
                    .wait_until(resource, &name, wanted, |o| image(o) == "deltafold:test")
                    .await;
            }
        }
        for policy in PRIVILEGED {
            self.space
                .wait_condition(policy, "NotAllowed", "True")
                .await;
        }
    }
}

fn image(object: &Value) -> &str {
    let spec = &object["spec"];
    let job = &spec["jobTemplate"]["spec"];
    let template = if job.is_null() { spec } else { job };
    let containers = &template["template"]["spec"]["containers"];
    containers[0]["image"].as_str().unwrap_or_default()
}

/// Creates the objects of the administrator.
async fn create_what_is_used(space: &TestNamespace) {
    for mut secret in documents(&frozen("resources/secrets.yaml")) {
        secret["metadata"]["namespace"] = space.name.clone().into();
        space.create("secrets", secret).await;
    }
    let account = json!({"metadata": {"name": "backups"}});
    space.create("serviceaccounts", account).await;
    let class = json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": {"name": "backups"}, "value": 1000,
    });
    let path = "/apis/scheduling.k8s.io/v1/priorityclasses/backups";
    let applied = space.api.apply(path, &class).await;
    applied.unwrap_or_else(|refused| panic!("the PriorityClass: {refused}"));
}

/// Creates the policies. Returns by name the UIDs of the fixtures and those of the API server.
async fn create_policies_and_task(
    space: &TestNamespace,
) -> (Vec<Value>, BTreeMap<String, (String, String)>) {
    let mut uids = BTreeMap::new();
    let mut policies = Vec::new();
    let tasks = documents(&frozen("resources/tasks.yaml")).into_iter();
    let all = documents(&frozen("resources/policies.yaml")).into_iter();
    let all = all.chain(tasks.filter(|task| name(task) == TASK));
    for object in all {
        let is_policy = kind(&object) == "EtcdBackupPolicy";
        let spec = match is_policy {
            true => possible(object["spec"].clone(), name(&object)),
            false => object["spec"].clone(),
        };
        let wanted = json!({"metadata": {"name": name(&object)}, "spec": spec});
        let resource = if is_policy { POLICIES } else { TASKS };
        let created = space.apply(resource, wanted.clone()).await;
        let both = (uid(&object).to_owned(), uid(&created).to_owned());
        uids.insert(name(&object).to_owned(), both);
        if is_policy {
            policies.push(wanted);
        }
    }
    (policies, uids)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ran_goes_on_and_no_backup_is_missed() {
    let left = Left::by_0_1().await;
    let space = &left.space;
    let running = Running::watch(space).await;
    let kubelet = Kubelet::start(space).await;
    kubelet.plan(&[], Plan::Hang);
    let ran = until(PATIENCE, async || {
        let pods = kubelet.ran(&[]);
        let of = |work: &str| pods.iter().any(|p| p.labels["deltafold.io/work"] == work);
        ["follow", "compaction", "task"]
            .into_iter()
            .all(of)
            .then_some(())
    });
    ran.await.expect("the Pods that 0.1 left");

    left.upgrade().await;
    let mut controller = Controller::start(space, &NO_ELECTION).await;
    left.wait_until_taken_over().await;
    for ((resource, name), uid_then) in &left.made {
        if ["cronjobs", "deployments"].contains(resource) {
            let now = space.must_get(resource, name).await;
            assert_eq!(uid(&now), uid_then, "{name} is another one");
        }
    }
    let policies = ["rich", "following", "host", "swift", "plain"];
    for policy in policies {
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
        space.wait_condition(policy, "Ready", "True").await;
    }
    // Running Jobs end, and their end is reported.
    for job in [COMPACTION, &left.running_job] {
        assert_eq!(ended(&space.must_get("jobs", job).await), None, "{job}");
    }
    kubelet.plan(&[("work", "compaction")], done());
    kubelet.plan(&[("work", "task")], done());
    space
        .wait_policy("rich", "its compaction is done", |p| {
            let last = &p["status"]["lastCompaction"];
            last["state"] == "Succeeded" && last["jobName"] == COMPACTION
        })
        .await;
    let task = space.wait_task(TASK, "Succeeded").await;
    assert_eq!(task["status"]["jobName"], left.running_job.as_str());
    // The next Job of each schedule runs.
    kubelet.plan(&[], done());
    for cron_job in left.names_of("cronjobs") {
        let job = space.fire(&cron_job).await;
        let job = space.wait_for_job(&job).await;
        assert_eq!(ended(&job), Some("Complete"), "{}", kubelet.logs());
    }
    for policy in policies {
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
    }

    // What is no longer allowed is refused when it is changed, or if the administrator enforces it.
    let changed = json!({"spec": {"retention": {"policy": "Limit", "limit": 3}}});
    space.patch(POLICIES, "host", changed).await;
    wait_refused(space, "host").await;
    space.wait_condition("rich", "NotAllowed", "True").await;
    assert_eq!(running.stopped("rich"), [""; 0]);
    controller.kill();
    let args = [&NO_ELECTION[..], &["--enforce-existing"]].concat();
    let _controller = Controller::start(space, &args).await;
    for policy in PRIVILEGED {
        wait_refused(space, policy).await;
        for cron_job in left.names_of("cronjobs") {
            if cron_job.starts_with(policy) {
                space
                    .wait_until("cronjobs", &cron_job, "it is suspended", |c| {
                        c["spec"]["suspend"] == true
                    })
                    .await;
            }
        }
    }
    for policy in ["following", "swift", "plain"] {
        space.wait_condition(policy, "Ready", "True").await;
        assert_eq!(running.stopped(policy), [""; 0], "{policy} was stopped");
    }
}

async fn wait_refused(space: &TestNamespace, policy: &str) {
    space
        .wait_policy(policy, "it is refused", |p| {
            condition_of(p, "Ready")
                .is_some_and(|c| c["status"] == "False" && c["reason"] == "NotAllowed")
        })
        .await;
}

/// 0.1's field managers own what 0.1 applied: nothing of it must stay in what is applied today.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_upgraded_equals_what_is_new() {
    let left = Left::by_0_1().await;
    left.upgrade().await;
    let fresh = TestNamespace::on(&left.space.api, "fresh").await;
    create_what_is_used(&fresh).await;
    for policy in &left.policies {
        if !PRIVILEGED.contains(&name(policy)) {
            fresh.apply(POLICIES, policy.clone()).await;
        }
    }
    let both = [&left.space, &fresh];
    let _controller = Controller::of_several(&both, &NO_ELECTION).await;
    left.wait_until_taken_over().await;
    for resource in ["cronjobs", "deployments"] {
        for name in left.names_of(resource) {
            if PRIVILEGED.iter().any(|p| name.starts_with(p)) {
                continue;
            }
            let new = fresh.wait_for(resource, &name).await;
            // Status and conditions may delay maintenance.
            let mut last = Value::Null;
            let is_same = until(PATIENCE, async || {
                last = left.space.must_get(resource, &name).await;
                let (mut upgraded, mut new) = (last["spec"].clone(), new["spec"].clone());
                for spec in [&mut upgraded, &mut new] {
                    spec["suspend"] = Value::Null;
                }
                (upgraded == new).then_some(())
            });
            assert!(
                is_same.await.is_some(),
                "{name}, upgraded:\n{}\nnew:\n{}",
                shown(&last["spec"]),
                shown(&new["spec"])
            );
        }
    }
}

/// The same for a status: after a failure with 0.1 and a success today, no reason is left.
#[tokio::test(flavor = "multi_thread")]
async fn what_0_1_told_is_not_told_of_what_is_new() {
    let left = Left::by_0_1().await;
    left.upgrade().await;
    let space = &left.space;
    let kubelet = Kubelet::start(space).await;
    kubelet.plan(&[], done());
    let _controller = Controller::start(space, &NO_ELECTION).await;
    left.wait_until_taken_over().await;
    let at = moment(0);
    space
        .renew("plain-delta-snap", 9_000_000, &at, Value::Null)
        .await;
    let restore = json!({
        "metadata": {"name": "again"},
        "spec": {
            "policy": "plain", "type": "Restore", "config": {"restore": {"claimName": "data"}},
        },
    });
    space.create(TASKS, restore).await;
    space.wait_task("again", "Succeeded").await;
    let is_done = |run: &Value| run["state"] == "Succeeded" && run["exitCode"] == 0;
    let policy = space
        .wait_policy("plain", "both are done", |p| {
            let status = &p["status"];
            is_done(&status["lastCompaction"]) && is_done(&status["lastRestoration"])
        })
        .await;
    for part in ["lastCompaction", "lastRestoration"] {
        let run = &policy["status"][part];
        for field in ["reason", "message"] {
            assert!(run[field].is_null(), "{part}: {run}");
        }
    }
    space
        .wait_condition("plain", "CompactionHealthy", "True")
        .await;
    let conditions = policy["status"]["conditions"].as_array().unwrap();
    let mut types: Vec<&str> = conditions
        .iter()
        .map(|c| c["type"].as_str().unwrap())
        .collect();
    types.sort();
    types.dedup();
    assert_eq!(types.len(), conditions.len());
}

/// Finalizers of Secrets and access for each policy, which nothing needs any more.
#[tokio::test(flavor = "multi_thread")]
async fn what_0_1_left_is_cleaned_up_once() {
    let left = Left::by_0_1().await;
    let space = &left.space;
    let mut theirs = json!({
        "metadata": {"name": "theirs", "finalizers": ["example.com/stays", IN_USE]},
    });
    theirs["stringData"] = json!({"a": "b"});
    space.create("secrets", theirs).await;
    left.upgrade().await;
    let _controller = Controller::start(space, &NO_ELECTION).await;
    left.wait_until_taken_over().await;
    let config = space.folder("cleanup").join("kubeconfig");
    write_kubeconfig(&config, space.api.url(), &space.name, TOKEN);
    for round in ["once", "again"] {
        let mut command = crate::support::deltafold();
        forget_env(&mut command, &["KUBE"]);
        let out = command.arg("cleanup").env("KUBECONFIG", &config).output();
        let out = out.expect("run the command");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{round}: {said}");
    }
    for secret in space.list("secrets", "").await {
        let finalizers = &secret["metadata"]["finalizers"];
        match name(&secret) {
            "theirs" => assert_eq!(finalizers, &json!(["example.com/stays"])),
            other => assert!(finalizers.is_null(), "{other}: {finalizers}"),
        }
    }
    for resource in ["roles", "rolebindings", "serviceaccounts"] {
        for name in left.names_of(resource) {
            let there = space.get(resource, &name).await;
            assert!(there.is_none(), "{name} of the {resource} is still there");
        }
    }
    // Objects that do not belong to 0.1's policies are not cleaned up.
    space.must_get("serviceaccounts", "backups").await;
    for resource in ["cronjobs", "deployments"] {
        for name in left.names_of(resource) {
            space.must_get(resource, &name).await;
        }
    }
}

/// A downgrade: 0.1's CRDs accept every object that today's controller has written, without losing any part of
/// a spec.
#[tokio::test(flavor = "multi_thread")]
async fn the_way_back_to_0_1() {
    let left = Left::by_0_1().await;
    let space = &left.space;
    left.upgrade().await;
    let mut controller = Controller::start(space, &NO_ELECTION).await;
    left.wait_until_taken_over().await;
    for policy in ["plain", "swift"] {
        space.wait_condition(policy, "Ready", "True").await;
    }
    assert_eq!(controller.stop(), Some(0), "{}", controller.tail());
    let all = async || {
        let mut all = space.list(POLICIES, "").await;
        all.extend(space.list(TASKS, "").await);
        all
    };
    let before = all().await;
    serve(&space.api, &documents(&frozen("crds.yaml"))).await;
    let mut lost = Vec::new();
    for (then, now) in before.iter().zip(all().await) {
        assert_eq!(then["spec"], now["spec"], "{}", name(then));
        differences("status", &then["status"], &now["status"], &mut lost);
        // Accepted unchanged.
        let resource = if kind(&now) == "EtcdBackupPolicy" {
            POLICIES
        } else {
            TASKS
        };
        let path = format!("{}/{}", space.path(resource), name(&now));
        for path in [path.clone(), format!("{path}/status")] {
            let written = space
                .api
                .ask(Method::PUT, &path, Some((Body::Json, &now)))
                .await;
            // Writing the same again succeeds, or conflicts with a later version.
            if let Err(refused) = written {
                assert_eq!(refused.code, 409, "{path}: {refused}");
            }
        }
    }
    lost.sort();
    lost.dedup();
    // docs/controller.md documents it.
    assert_eq!(lost, ["status.claims"]);
    // 0.1's controller overwrites what today's has written, except conditions that it does not know.
    for policy in &left.policies {
        space.apply(POLICIES, policy.clone()).await;
    }
    left.create_status().await;
    for policy in space.list(POLICIES, "").await {
        let conditions = policy["status"]["conditions"].as_array().unwrap();
        let types = conditions.iter().map(|c| c["type"].as_str().unwrap());
        let known = [
            "Ready",
            "BackupReady",
            "BackupVerified",
            "CompactionHealthy",
        ];
        let mut others = types.filter(|type_| !known.contains(type_));
        assert!(others.all(|type_| type_ == "NotAllowed"), "{policy}");
    }

    // And an upgrade again: what stayed is not believed.
    left.upgrade().await;
    let mut args = NO_ELECTION.to_vec();
    args.extend(ALLOWED);
    let _controller = Controller::start(space, &args).await;
    for policy in &left.policies {
        let wanted = "it is carried out, and all of it is allowed";
        space
            .wait_policy(name(policy), wanted, |p| {
                let is_true = |type_: &str| {
                    condition_of(p, type_).is_some_and(|condition| condition["status"] == "True")
                };
                !p["status"]["claims"].is_null() && is_true("Ready") && !is_true("NotAllowed")
            })
            .await;
    }
}

/// Collects what `then` has and `now` lacks.
fn differences(path: &str, then: &Value, now: &Value, lost: &mut Vec<String>) {
    if then == now {
        return;
    }
    match (then.as_object(), now.as_object()) {
        (Some(then), Some(now)) => {
            for (field, value) in then {
                let path = format!("{path}.{field}");
                differences(&path, value, now.get(field).unwrap_or(&Value::Null), lost);
            }
        }
        _ => lost.push(path.to_owned()),
    }
}
