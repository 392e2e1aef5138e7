//! A namespace for one test, mostly on a Kubernetes that all tests of a program share.
//!
//! etcd, the API server and Kubernetes' own controllers start once per program, with our CRDs. Most tests of
//! the controller start with `TestNamespace::new`. Some have an API server of their own (`Alone`), some a cluster
//! with nodes (`cluster_namespace`).

use super::chart;
use super::etcd::{Etcd, EtcdVersion};
use super::kube::{Api, Apiserver, Body, ControllerManager, Refused, collection};
pub use super::manifests::name;
use super::manifests::{documents, kind, read};
use super::object_recorder::Recorder;
use super::process::free_port;
use super::scratch;
use reqwest::Method;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest wait for something that takes a second or two on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A schedule that never fires during a test.
pub const NEVER: &str = "0 0 1 1 *";
pub const POLICIES: &str = "etcdbackuppolicies";
pub const TASKS: &str = "etcdbackuptasks";
/// The arguments of a controller that starts at once.
pub const NO_ELECTION: [&str; 2] = ["--leader-elect", "false"];

/// The service account of the controller.
const ACCOUNT: &str = "deltafold-controller";

/// etcd, an API server and Kubernetes' own controllers.
#[derive(Debug)]
pub struct Kubernetes {
    pub controllers: ControllerManager,
    pub server: Apiserver,
    pub etcd: Etcd,
    // Declared after the processes, so removed after them.
    pub folder: TempDir,
}

impl Kubernetes {
    /// Starts one for a single test.
    pub async fn start() -> Self {
        let folder = scratch::folder_named("kubernetes-").expect("a folder for Kubernetes");
        let within = |name: &str| {
            tempfile::Builder::new()
                .prefix(name)
                .tempdir_in(folder.path())
                .expect("a folder within")
        };
        let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("etcd"));
        let server = Apiserver::start_in(within("apiserver-"), free_port(), &etcd).await;
        install(&server.api()).await;
        let controllers = ControllerManager::start_in(within("controllers-"), &server);
        Self {
            controllers,
            server,
            etcd,
            folder,
        }
    }

    /// Returns the shared one, which ends with the program.
    pub fn shared() -> &'static Kubernetes {
        static SHARED: OnceLock<(Kubernetes, Child)> = OnceLock::new();
        let (kubernetes, _) = SHARED.get_or_init(|| {
            // In a runtime of its own: the first caller may be inside another one.
            let start = || {
                let runtime = tokio::runtime::Runtime::new().expect("a runtime");
                runtime.block_on(Kubernetes::start())
            };
            let kubernetes = std::thread::spawn(start).join().expect("a Kubernetes");
            let guard = guard(&kubernetes);
            (kubernetes, guard)
        });
        kubernetes
    }
}

/// Statics are never dropped. So a helper process ends the servers when its standard input closes, however the
/// program ended.
fn guard(kubernetes: &Kubernetes) -> Child {
    let ids = [
        kubernetes.controllers.id(),
        kubernetes.server.id(),
        kubernetes.etcd.id(),
    ];
    Command::new("sh")
        .arg("-c")
        .arg(r#"read -r _; folder=$1; shift; kill -KILL "$@"; sleep 0.2; rm -rf -- "$folder""#)
        .arg("guard")
        .arg(kubernetes.folder.path())
        .args(ids.map(|id| id.to_string()))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("start the guard")
}

/// Applies a CRD and waits until the API server serves it.
async fn define(api: &Api, crd: &Value) {
    let path = format!("{}/{}", collection(crd, ""), name(crd));
    let applied = api.apply(&path, crd).await;
    applied.unwrap_or_else(|err| panic!("{}: {err}", name(crd)));
    let (group, version) = (&crd["spec"]["group"], &crd["spec"]["versions"][0]["name"]);
    let [group, version] = [group, version].map(|text| text.as_str().expect("a text"));
    let plural = &crd["spec"]["names"]["plural"].as_str().expect("a plural");
    let objects = format!("/apis/{group}/{version}/{plural}");
    let mut there = Value::Null;
    let served = until(PATIENCE, async || {
        there = api.get(&path).await?;
        let holds =
            |type_: &str| condition_of(&there, type_).is_some_and(|c| c["status"] == "True");
        assert!(!holds("NonStructuralSchema"), "{}", shown(&there["status"]));
        let is_known = holds("Established") && holds("NamesAccepted");
        (is_known && api.ask(Method::GET, &objects, None).await.is_ok()).then_some(())
    });
    assert!(
        served.await.is_some(),
        "{plural}: {}",
        shown(&there["status"])
    );
}

/// Applies the CRDs and the controller's roles.
async fn install(api: &Api) {
    for crd in chart::crds() {
        define(api, &crd).await;
    }
    for role in roles("ClusterRole") {
        let path = format!("{}/{}", collection(&role, ""), name(&role));
        let applied = api.apply(&path, &role).await;
        applied.unwrap_or_else(|err| panic!("the role {}: {err}", name(&role)));
    }
}

/// An API server of a test's own, without CRDs and controllers, and a namespace on it.
#[derive(Debug)]
pub struct Alone {
    pub server: Apiserver,
    pub etcd: Etcd,
    pub space: TestNamespace,
    // Declared after the processes, so removed after them.
    pub folder: TempDir,
}

impl Alone {
    pub async fn start() -> Self {
        let folder = scratch::folder().expect("a folder for the servers");
        let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("etcd"));
        let server = Apiserver::start(&etcd).await;
        Self {
            space: TestNamespace::named(&server.api(), "backup").await,
            server,
            etcd,
            folder,
        }
    }
}

/// Returns roles of jobs/install.yaml: the controller has exactly these rights.
fn roles(kind: &str) -> Vec<Value> {
    let mut roles = documents(&read("jobs/install.yaml"));
    roles.retain(|d| d["kind"] == kind);
    assert!(!roles.is_empty(), "no {kind}");
    roles
}

/// Returns the apiVersion and the kind of a resource.
pub fn kind_of(resource: &str) -> (&'static str, &'static str) {
    match resource {
        "configmaps" => ("v1", "ConfigMap"),
        "cronjobs" => ("batch/v1", "CronJob"),
        "deployments" => ("apps/v1", "Deployment"),
        "endpointslices" => ("discovery.k8s.io/v1", "EndpointSlice"),
        "etcdbackuppolicies" => ("deltafold.io/v1alpha1", "EtcdBackupPolicy"),
        "etcdbackuptasks" => ("deltafold.io/v1alpha1", "EtcdBackupTask"),
        "events" => ("v1", "Event"),
        "jobs" => ("batch/v1", "Job"),
        "leases" => ("coordination.k8s.io/v1", "Lease"),
        "persistentvolumeclaims" => ("v1", "PersistentVolumeClaim"),
        "pods" => ("v1", "Pod"),
        "rolebindings" => ("rbac.authorization.k8s.io/v1", "RoleBinding"),
        "resourcequotas" => ("v1", "ResourceQuota"),
        "roles" => ("rbac.authorization.k8s.io/v1", "Role"),
        "secrets" => ("v1", "Secret"),
        "serviceaccounts" => ("v1", "ServiceAccount"),
        "services" => ("v1", "Service"),
        "statefulsets" => ("apps/v1", "StatefulSet"),
        other => panic!("which API has {other}?"),
    }
}

/// A namespace, seen by an administrator.
#[derive(Debug)]
pub struct TestNamespace {
    pub api: Api,
    pub name: String,
    /// Every Job that ever existed in the namespace, from this object's creation on.
    pub jobs: Recorder,
    /// The longest wait for anything.
    pub patience: Duration,
    /// A folder for the files of the test.
    pub folder: TempDir,
}

impl TestNamespace {
    /// Creates a namespace on the shared Kubernetes.
    pub async fn new(name: &str) -> Self {
        Self::on(&Kubernetes::shared().server.api(), name).await
    }

    /// Creates a namespace, with the rights of a controller and of Jobs.
    pub async fn on(api: &Api, name: &str) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let space = Self::named(api, &format!("{name}-{number}")).await;
        space.give_rights().await;
        // Pods need it; Kubernetes' controllers create it.
        space.wait_for("serviceaccounts", "default").await;
        space
    }

    /// Creates a namespace of exactly this name, with nothing in it.
    pub async fn named(api: &Api, name: &str) -> Self {
        let object = json!({"metadata": {"name": name}});
        let body = Some((Body::Json, &object));
        api.must(Method::POST, "/api/v1/namespaces", body).await;
        Self::existing(api, name).await
    }

    /// Returns a namespace that exists.
    pub async fn existing(api: &Api, name: &str) -> Self {
        Self {
            jobs: Recorder::start(api, name, "jobs").await,
            api: api.clone(),
            patience: PATIENCE,
            folder: scratch::folder_named("space-").expect("a folder for the test"),
            name: name.to_owned(),
        }
    }

    pub async fn give_rights(&self) {
        let account = json!({
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT},
        });
        self.create("serviceaccounts", account).await;
        let binding = json!({
            "metadata": {"name": format!("{ACCOUNT}-{}", self.name)},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ACCOUNT,
            },
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": self.name}],
        });
        let path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        self.api
            .must(Method::POST, path, Some((Body::Json, &binding)))
            .await;
        // The Lease for leader election is in the controller's own namespace.
        for role in roles("Role") {
            let name = &role["metadata"]["name"];
            self.create(
                "roles",
                json!({"metadata": {"name": name}, "rules": role["rules"]}),
            )
            .await;
            let binding = json!({
                "metadata": {"name": name},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": self.name}],
            });
            self.create("rolebindings", binding).await;
        }
        // What the chart has for each namespace that the controller watches.
        let jobs = json!({"name": "deltafold-jobs"});
        self.create("serviceaccounts", json!({"metadata": jobs}))
            .await;
        let binding = json!({
            "metadata": jobs,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "deltafold-jobs"},
            "subjects": [{"kind": "ServiceAccount", "name": "deltafold-jobs", "namespace": self.name}],
        });
        self.create("rolebindings", binding).await;
    }

    /// Returns the controller's token.
    pub async fn controllers_token(&self) -> String {
        self.token_of(ACCOUNT).await
    }

    /// Returns a token of a service account.
    pub async fn token_of(&self, account: &str) -> String {
        let token = self.api.token(&self.name, account).await;
        token.unwrap_or_else(|err| panic!("the token of {account}: {err}"))
    }

    /// Returns a folder of the test, which is created.
    pub fn folder(&self, name: &str) -> PathBuf {
        let folder = self.folder.path().join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    /// Watches a resource of the namespace from now on and keeps every version.
    pub async fn record(&self, resource: &str) -> Recorder {
        Recorder::start(&self.api, &self.name, resource).await
    }

    /// Returns the API path of a resource.
    pub fn path(&self, resource: &str) -> String {
        let (version, kind) = kind_of(resource);
        collection(&json!({"apiVersion": version, "kind": kind}), &self.name)
    }

    pub fn path_of(&self, resource: &str, name: &str) -> String {
        format!("{}/{name}", self.path(resource))
    }

    pub async fn get(&self, resource: &str, name: &str) -> Option<Value> {
        self.api.get(&self.path_of(resource, name)).await
    }

    /// Returns an object that must exist.
    pub async fn must_get(&self, resource: &str, name: &str) -> Value {
        let found = self.get(resource, name).await;
        found.unwrap_or_else(|| panic!("no {name} among the {resource} of {}", self.name))
    }

    /// Returns the objects with these labels (`a=b,c=d`), sorted by name.
    pub async fn list(&self, resource: &str, labels: &str) -> Vec<Value> {
        let labels = labels.replace('=', "%3D").replace(',', "%2C");
        let path = format!("{}?labelSelector={labels}", self.path(resource));
        let list = self.api.must(Method::GET, &path, None).await;
        list["items"].as_array().expect("the items").clone()
    }

    /// Returns the names of the objects with these labels.
    pub async fn names(&self, resource: &str, labels: &str) -> Vec<String> {
        let all = self.list(resource, labels).await;
        all.iter().map(|o| name(o).to_owned()).collect()
    }

    pub async fn create(&self, resource: &str, object: Value) -> Value {
        let created = self.try_create(resource, object).await;
        created.unwrap_or_else(|err| panic!("create one of the {resource}: {err}"))
    }

    pub async fn try_create(&self, resource: &str, mut object: Value) -> Result<Value, Refused> {
        let (version, kind) = kind_of(resource);
        object["apiVersion"] = version.into();
        object["kind"] = kind.into();
        let path = format!("{}?fieldValidation=Strict", self.path(resource));
        self.api
            .ask(Method::POST, &path, Some((Body::Json, &object)))
            .await
    }

    /// Applies an object as `kubectl apply --server-side` does.
    pub async fn apply(&self, resource: &str, mut object: Value) -> Value {
        let (version, kind) = kind_of(resource);
        object["apiVersion"] = version.into();
        object["kind"] = kind.into();
        let path = self.path_of(resource, name(&object));
        let applied = self.api.apply(&path, &object).await;
        applied.unwrap_or_else(|err| panic!("apply {path}: {err}"))
    }

    /// Applies an object of any kind, with its own namespace if it names one.
    pub async fn apply_object(&self, object: &Value) -> Result<Value, Refused> {
        self.api.apply(&self.path_to(object), object).await
    }

    /// Applies objects of any kind. CRDs are served when it returns.
    pub async fn apply_all(&self, objects: &[Value]) {
        for object in objects {
            match kind(object) {
                "CustomResourceDefinition" => define(&self.api, object).await,
                kind => {
                    let applied = self.apply_object(object).await;
                    applied.unwrap_or_else(|err| panic!("{kind} {}: {err}", name(object)));
                }
            }
        }
    }

    /// Returns the API path of an object of any kind.
    pub fn path_to(&self, object: &Value) -> String {
        format!("{}/{}", collection(object, &self.name), name(object))
    }

    /// Replaces an object. Fails if its resourceVersion is old.
    pub async fn replace(&self, resource: &str, object: &Value) -> Result<Value, Refused> {
        let path = self.path_of(resource, name(object));
        self.api
            .ask(Method::PUT, &path, Some((Body::Json, object)))
            .await
    }

    /// Sends a merge patch.
    pub async fn patch(&self, resource: &str, name: &str, patch: Value) -> Value {
        let path = self.path_of(resource, name);
        let patched = self.api.merge(&path, &patch).await;
        patched.unwrap_or_else(|err| panic!("patch {path}: {err}"))
    }

    pub async fn delete(&self, resource: &str, name: &str) {
        let path = self.path_of(resource, name);
        self.api
            .delete(&format!("{path}?propagationPolicy=Background"))
            .await;
    }

    /// Waits until an object exists.
    pub async fn wait_for(&self, resource: &str, name: &str) -> Value {
        self.wait_until(resource, name, "it is there", |_| true)
            .await
    }

    /// Waits until an object exists and satisfies a condition.
    pub async fn wait_until(
        &self,
        resource: &str,
        name: &str,
        wanted: &str,
        is_so: impl Fn(&Value) -> bool,
    ) -> Value {
        let path = self.path_of(resource, name);
        let mut last = Ok(Value::Null);
        let found = until(self.patience, async || {
            // The API server may be down for a while.
            last = self.api.ask(Method::GET, &path, None).await;
            last.clone().ok().filter(&is_so)
        });
        match found.await {
            Some(found) => found,
            None => panic!(
                "{name} of the {resource} in {}: never that {wanted}; now:\n{}",
                self.name,
                last.map_or_else(|err| err.to_string(), |last| shown(&last))
            ),
        }
    }

    /// Waits until an object is gone.
    pub async fn wait_until_gone(&self, resource: &str, name: &str) {
        let gone = until(self.patience, async || {
            match self.get(resource, name).await {
                None => Some(()),
                Some(_) => None,
            }
        });
        assert!(
            gone.await.is_some(),
            "{name} of the {resource} in {} is still there",
            self.name
        );
    }

    /// Waits until exactly `count` objects have these labels.
    pub async fn wait_for_some(&self, resource: &str, labels: &str, count: usize) -> Vec<Value> {
        let mut last = Vec::new();
        let found = until(self.patience, async || {
            last = self.list(resource, labels).await;
            (last.len() == count).then(|| last.clone())
        });
        match found.await {
            Some(found) => found,
            None => panic!(
                "{} and not {count} {resource} with {labels} in {}: {:?}",
                last.len(),
                self.name,
                last.iter().map(name).collect::<Vec<_>>()
            ),
        }
    }

    /// Creates a Job as `kubectl create job --from=cronjob/…` does. Returns its name.
    pub async fn fire(&self, cron_job: &str) -> String {
        static NUMBER: AtomicUsize = AtomicUsize::new(1);
        let cron = self.must_get("cronjobs", cron_job).await;
        let template = &cron["spec"]["jobTemplate"];
        let mut metadata = template["metadata"].clone();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{cron_job}-{number}");
        metadata["name"] = name.clone().into();
        metadata["annotations"]["cronjob.kubernetes.io/instantiate"] = "manual".into();
        metadata["ownerReferences"] = json!([{
            "apiVersion": "batch/v1",
            "kind": "CronJob",
            "name": cron_job,
            "uid": cron["metadata"]["uid"],
            "controller": true,
        }]);
        let job = json!({"metadata": metadata, "spec": template["spec"]});
        self.create("jobs", job).await;
        name
    }

    /// Waits until a Job has ended and returns it.
    pub async fn wait_for_job(&self, name: &str) -> Value {
        self.wait_until("jobs", name, "it has ended", |job| ended(job).is_some())
            .await
    }

    /// Returns the last version of every Job that a policy ever had for a kind of work.
    pub fn jobs_for(&self, policy: &str, work: &str) -> Vec<Value> {
        let all = self.jobs.ever().into_iter();
        all.filter(|job| label(job, "policy") == Some(policy) && label(job, "work") == Some(work))
            .collect()
    }

    /// Waits until a policy has had `count` Jobs for a kind of work.
    pub async fn wait_for_jobs(&self, policy: &str, work: &str, count: usize) -> Vec<Value> {
        let found = until(self.patience, async || {
            let jobs = self.jobs_for(policy, work);
            (jobs.len() >= count).then_some(jobs)
        });
        match found.await {
            Some(found) => found,
            None => panic!(
                "never {count} Jobs for {work} of {policy} in {}; all Jobs: {:?}; the policy:\n{}",
                self.name,
                self.jobs.ever().iter().map(name).collect::<Vec<_>>(),
                shown(
                    &self
                        .get("etcdbackuppolicies", policy)
                        .await
                        .unwrap_or_default()
                )
            ),
        }
    }

    /// Waits until `count` Jobs of a policy have ended.
    pub async fn wait_until_ended(&self, policy: &str, work: &str, count: usize) -> Vec<Value> {
        let found = until(self.patience, async || {
            let jobs = self.jobs_for(policy, work);
            let done = jobs.into_iter().filter(|j| ended(j).is_some());
            let done: Vec<Value> = done.collect();
            (done.len() >= count).then_some(done)
        });
        let found = found.await;
        found.unwrap_or_else(|| {
            panic!(
                "never {count} Jobs for {work} of {policy} in {} have ended",
                self.name
            )
        })
    }

    /// Returns reason and message of the Events about an object.
    pub async fn events(&self, about: &str) -> Vec<(String, String)> {
        let all = self.list("events", "").await;
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        all.iter()
            .filter(|e| e["involvedObject"]["name"] == about)
            .map(|e| (text(&e["reason"]), text(&e["message"])))
            .collect()
    }

    /// Waits for an Event about an object and returns its message.
    pub async fn wait_for_event(&self, about: &str, reason: &str) -> String {
        let found = until(self.patience, async || {
            let events = self.events(about).await;
            let found = events.into_iter().find(|(r, _)| r == reason);
            found.map(|(_, message)| message)
        });
        match found.await {
            Some(message) => message,
            None => panic!(
                "no Event {reason} about {about}, only {:?}",
                self.events(about).await
            ),
        }
    }

    /// Waits until a policy satisfies a condition.
    pub async fn wait_policy(
        &self,
        name: &str,
        wanted: &str,
        is_so: impl Fn(&Value) -> bool,
    ) -> Value {
        self.wait_until("etcdbackuppolicies", name, wanted, is_so)
            .await
    }

    /// Waits until a status condition of a policy has this status.
    pub async fn wait_condition(&self, policy: &str, condition: &str, status: &str) -> Value {
        let wanted = format!("{condition} is {status}");
        let found = self
            .wait_policy(policy, &wanted, |p| {
                condition_of(p, condition).is_some_and(|c| c["status"] == status)
            })
            .await;
        condition_of(&found, condition).expect("it").clone()
    }

    /// Creates a task.
    pub async fn task(&self, name: &str, policy: &str, type_: &str, config: Value) -> Value {
        let mut spec = json!({"policy": policy, "type": type_});
        if !config.is_null() {
            spec["config"] = config;
        }
        let task = json!({"metadata": {"name": name}, "spec": spec});
        self.create(TASKS, task).await
    }

    /// Waits until a task has this state. Fails at once if it ends in another one.
    pub async fn wait_task(&self, name: &str, state: &str) -> Value {
        let wanted = format!("it is {state}");
        let is_so = |task: &Value| task["status"]["state"] == state || has_ended(task);
        let task = self.wait_until(TASKS, name, &wanted, is_so).await;
        assert_eq!(task["status"]["state"], state, "{}", shown(&task));
        task
    }

    /// Waits until there is a result.
    pub async fn wait<T>(&self, what: &str, ask: impl AsyncFnMut() -> Option<T>) -> T {
        let found = until(self.patience, ask).await;
        found.unwrap_or_else(|| panic!("{}: not in time: {what}", self.name))
    }

    /// Renews both Leases of a prefix as etcd-druid's sidecar does.
    pub async fn leases(&self, prefix: &str, full: i64, delta: i64) {
        for (kind, revision) in [("full", full), ("delta", delta)] {
            let name = format!("{prefix}-{kind}-snap");
            self.renew(&name, revision, &moment(0), Value::Null).await;
        }
    }

    /// Renews a Lease as etcd-druid's sidecar or one of our Jobs does. Creates it if it does not exist.
    pub async fn renew(&self, name: &str, revision: i64, at: &str, annotations: Value) {
        let mut lease = json!({
            "metadata": {"name": name},
            "spec": {"holderIdentity": revision.to_string(), "renewTime": at},
        });
        if !annotations.is_null() {
            lease["metadata"]["annotations"] = annotations;
        }
        // The controller may create it at the same moment.
        match self.try_create("leases", lease.clone()).await {
            Err(err) if err.code == 409 => {
                self.patch("leases", name, lease).await;
            }
            created => drop(created.unwrap_or_else(|err| panic!("renew the Lease {name}: {err}"))),
        }
    }
}

/// Returns one of our labels.
pub fn label<'o>(object: &'o Value, name: &str) -> Option<&'o str> {
    object["metadata"]["labels"][format!("deltafold.io/{name}")].as_str()
}

/// Returns one of our annotations.
pub fn annotation<'o>(object: &'o Value, name: &str) -> Option<&'o str> {
    object["metadata"]["annotations"][format!("deltafold.io/{name}")].as_str()
}

/// Returns `Complete` or `Failed` if the Job has that condition.
pub fn ended(job: &Value) -> Option<&str> {
    let conditions = job["status"]["conditions"].as_array()?.iter();
    let mut true_ones = conditions.filter(|c| c["status"] == "True");
    true_ones.find_map(|c| {
        c["type"]
            .as_str()
            .filter(|t| ["Complete", "Failed"].contains(t))
    })
}

/// Returns whether a task has ended.
pub fn has_ended(task: &Value) -> bool {
    let state = task["status"]["state"].as_str().unwrap_or_default();
    ["Succeeded", "Failed", "Rejected"].contains(&state)
}

/// Returns a condition of an object.
pub fn condition_of<'o>(object: &'o Value, type_: &str) -> Option<&'o Value> {
    let conditions = object["status"]["conditions"].as_array()?;
    conditions.iter().find(|c| c["type"] == type_)
}

/// Prints an object without the fields that the API server maintains.
pub fn shown(object: &Value) -> String {
    let mut object = object.clone();
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    serde_json::to_string_pretty(&object).expect("JSON")
}

/// Returns the time `seconds` from now in the format of Leases.
pub fn moment(seconds: i64) -> String {
    let at = chrono::Utc::now() + chrono::TimeDelta::seconds(seconds);
    at.to_rfc3339_opts(chrono::SecondsFormat::Micros, true)
}

/// Polls until there is a result. Fails after `patience`.
pub async fn until<T>(patience: Duration, mut ask: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return Some(answer);
        }
        if started.elapsed() > patience {
            return None;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
