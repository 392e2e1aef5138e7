//! What every sub-reconciler has: the caches, the queues, and the only ways to write.
//!
//! It decides nothing about backups. Reading is free (caches); a write is refused where this replica leads no
//! more. Who calls it: the sub-reconcilers and `watch`.

use super::ControllerMetrics;
use super::admission::Admission;
use super::api::{EtcdBackupPolicy, EtcdBackupTask};
use super::jobs::{Allowed, Settings};
use crate::base::causes::causes;
use crate::base::hash::short_hash;
use crate::base::lock;
use chrono::{DateTime, Utc};
use futures::channel::mpsc::UnboundedSender;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy};
use kube::core::{NamespaceResourceScope, PartialObjectMeta};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What an object was made from: whether it is as it should be is told without comparing what the API
/// server has filled in.
const HASH: &str = "deltafold.io/applied-hash";
/// The first pause after a failure, and the longest.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// After somebody else wrote at the same time.
const CONFLICT_RETRY: Duration = Duration::from_millis(100);
/// For one answer of the API.
const PATIENCE: Duration = Duration::from_secs(30);

/// How the controller was started.
#[derive(Debug, Clone)]
pub struct Options {
    /// The namespaces that are looked after; empty for all.
    pub namespaces: Vec<String>,
    /// The Lease of the leader, by namespace and name; `None` where there is no other replica.
    pub leader_lease: Option<(String, String)>,
    /// Of this replica.
    pub identity: String,
    /// Policies that are looked after at once.
    pub policy_workers: u16,
    /// Policies whose thresholds are looked at at once; 0 turns thresholds off.
    pub compaction_workers: u16,
    /// Tasks that are looked at at once; 0 turns tasks off.
    pub task_workers: u16,
    /// Jobs of thresholds and tasks that there may be at once, over all policies; 0 for no limit.
    pub max_jobs: u32,
    /// Of these, in one namespace; 0: the controller chooses.
    pub max_jobs_per_namespace: u32,
    /// What policies and tasks may ask for.
    pub allowed: Allowed,
    /// Whether what ran before and is not allowed is stopped, too.
    pub enforce_existing: bool,
    /// Of the Jobs.
    pub settings: Settings,
}

/// What the watches have told.
pub struct Caches {
    /// All policies.
    pub policies: Store<EtcdBackupPolicy>,
    /// All tasks.
    pub tasks: Store<EtcdBackupTask>,
    /// Jobs of ours, those of CronJobs too.
    pub jobs: Store<Job>,
    /// CronJobs of ours.
    pub cron_jobs: Store<CronJob>,
    /// Followers.
    pub deployments: Store<Deployment>,
    /// Pods of our Jobs; of their specs nothing is kept.
    pub pods: Store<Pod>,
    /// Leases that are named as snapshot Leases are.
    pub leases: Store<Lease>,
    /// Secrets, without what is in them.
    pub secrets: Store<PartialObjectMeta<Secret>>,
    /// Where Services have their Pods.
    pub slices: Store<EndpointSlice>,
}

/// The other ends of the caches.
pub(super) struct Writers {
    pub policies: reflector::store::Writer<EtcdBackupPolicy>,
    pub tasks: reflector::store::Writer<EtcdBackupTask>,
    pub jobs: reflector::store::Writer<Job>,
    pub cron_jobs: reflector::store::Writer<CronJob>,
    pub deployments: reflector::store::Writer<Deployment>,
    pub pods: reflector::store::Writer<Pod>,
    pub leases: reflector::store::Writer<Lease>,
    pub secrets: reflector::store::Writer<PartialObjectMeta<Secret>>,
    pub slices: reflector::store::Writer<EndpointSlice>,
}

impl Caches {
    pub(super) fn new() -> (Self, Writers) {
        let policies = reflector::store();
        let tasks = reflector::store();
        let jobs = reflector::store();
        let cron_jobs = reflector::store();
        let deployments = reflector::store();
        let pods = reflector::store();
        let leases = reflector::store();
        let secrets = reflector::store();
        let slices = reflector::store();
        let caches = Caches {
            policies: policies.0,
            tasks: tasks.0,
            jobs: jobs.0,
            cron_jobs: cron_jobs.0,
            deployments: deployments.0,
            pods: pods.0,
            leases: leases.0,
            secrets: secrets.0,
            slices: slices.0,
        };
        let writers = Writers {
            policies: policies.1,
            tasks: tasks.1,
            jobs: jobs.1,
            cron_jobs: cron_jobs.1,
            deployments: deployments.1,
            pods: pods.1,
            leases: leases.1,
            secrets: secrets.1,
            slices: slices.1,
        };
        (caches, writers)
    }

    /// Waits until everything was listed once. Decisions on half of it would be wrong ones.
    pub(super) async fn wait_until_ready(&self) {
        // Writers live as long as the watches do; without these all ends anyway.
        let _ = tokio::join!(
            self.policies.wait_until_ready(),
            self.tasks.wait_until_ready(),
            self.jobs.wait_until_ready(),
            self.cron_jobs.wait_until_ready(),
            self.deployments.wait_until_ready(),
            self.pods.wait_until_ready(),
            self.leases.wait_until_ready(),
            self.secrets.wait_until_ready(),
            self.slices.wait_until_ready(),
        );
    }

    /// A policy by namespace and name.
    pub fn policy(&self, namespace: &str, name: &str) -> Option<Arc<EtcdBackupPolicy>> {
        self.policies.get(&ObjectRef::new(name).within(namespace))
    }

    /// A snapshot Lease.
    pub fn lease(&self, namespace: &str, name: &str) -> Option<Arc<Lease>> {
        self.leases.get(&ObjectRef::new(name).within(namespace))
    }

    /// The Jobs of a policy, by our labels.
    pub fn jobs_of(&self, namespace: &str, policy: &str) -> Vec<Arc<Job>> {
        self.jobs.state_filter(|job| {
            job.metadata.namespace.as_deref() == Some(namespace)
                && label(job, super::jobs::LABEL_POLICY) == Some(policy)
        })
    }

    /// The Pods of a Job.
    pub fn pods_of(&self, job: &Job) -> Vec<Arc<Pod>> {
        let uid = job.metadata.uid.as_deref();
        self.pods.state_filter(|pod| {
            let owners = pod.metadata.owner_references.iter().flatten();
            uid.is_some() && owners.map(|o| Some(o.uid.as_str())).any(|o| o == uid)
        })
    }

    /// The tasks of a policy.
    pub fn tasks_of(&self, namespace: &str, policy: &str) -> Vec<Arc<EtcdBackupTask>> {
        self.tasks.state_filter(|task| {
            task.metadata.namespace.as_deref() == Some(namespace) && task.spec.policy == policy
        })
    }
}

/// A label of an object.
pub(super) fn label<'a, K: Resource>(object: &'a K, name: &str) -> Option<&'a str> {
    let labels = object.meta().labels.as_ref()?;
    labels.get(name).map(String::as_str)
}

/// Who is to look at what.
pub(super) struct Queues {
    pub policies: UnboundedSender<ObjectRef<EtcdBackupPolicy>>,
    pub compactions: UnboundedSender<ObjectRef<EtcdBackupPolicy>>,
    pub tasks: UnboundedSender<ObjectRef<EtcdBackupTask>>,
    pub secrets: UnboundedSender<ObjectRef<PartialObjectMeta<Secret>>>,
}

/// Why a reconciliation did not come to its end. It is tried again, with fresh state.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The API refused, or did not answer.
    #[error("cannot {what}: {said}")]
    Api {
        /// What was asked.
        what: String,
        /// What it said.
        said: String,
        /// The HTTP status, where there was an answer.
        code: Option<u16>,
    },
    /// Another replica may lead by now: nothing was written.
    #[error("this replica leads no more")]
    NotLeading,
    /// An object that cannot be written as it should be.
    #[error("{0}")]
    Object(String),
}

impl Failure {
    /// The object is not taken as it is: by its fields, a quota, a webhook or a right.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Failure::Api {
                code: Some(400 | 403 | 422),
                ..
            }
        )
    }

    /// Whether the same object would be taken at no other time.
    pub fn is_invalid(&self) -> bool {
        matches!(
            self,
            Failure::Api {
                code: Some(422),
                ..
            }
        )
    }

    /// Somebody else wrote meanwhile.
    pub fn is_conflict(&self) -> bool {
        matches!(
            self,
            Failure::Api {
                code: Some(409),
                ..
            }
        )
    }
}

/// What became of a request, which is not waited for without end.
enum Answer<T> {
    Done(T),
    Refused(Box<kube::core::Status>),
}

async fn answer<T>(
    what: &str,
    asked: impl Future<Output = Result<T, kube::Error>>,
) -> Result<Answer<T>, Failure> {
    let failure = |said: String| Failure::Api {
        what: what.to_owned(),
        said,
        code: None,
    };
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(done)) => Ok(Answer::Done(done)),
        Ok(Err(kube::Error::Api(status))) => Ok(Answer::Refused(status)),
        Ok(Err(e)) => Err(failure(causes(&e))),
        Err(_) => Err(failure(format!(
            "no answer within {} s",
            PATIENCE.as_secs()
        ))),
    }
}

fn refused(what: &str, status: &kube::core::Status) -> Failure {
    Failure::Api {
        what: what.to_owned(),
        said: status.message.clone(),
        code: Some(status.code),
    }
}

impl<T> Answer<T> {
    fn or_fail(self, what: &str) -> Result<T, Failure> {
        match self {
            Answer::Done(done) => Ok(done),
            Answer::Refused(status) => Err(refused(what, &status)),
        }
    }
}

/// A sub-reconciler's object: reconciler, namespace, name.
pub(super) type Key = (&'static str, String, String);

/// What was written last, so that one's own writes are known from others'.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Applied {
    hash: String,
    uid: Option<String>,
    generation: Option<i64>,
}

/// The version of a Secret, and the keys it had then.
type KnownKeys = (Option<String>, BTreeSet<String>);

/// What every sub-reconciler has.
pub struct Context {
    client: kube::Client,
    /// How the controller was started.
    pub options: Options,
    /// What the watches have told.
    pub caches: Caches,
    /// What is shown at `/metrics`.
    pub metrics: ControllerMetrics,
    pub(super) queues: Queues,
    recorder: Recorder,
    leads: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    failures: Mutex<HashMap<Key, u32>>,
    applied: Mutex<HashMap<(String, String, String), Applied>>,
    seen: Mutex<HashMap<(String, String), Seen>>,
    recovered: Mutex<HashMap<(String, String), DateTime<Utc>>>,
    /// What a failed policy's Jobs depend on, as it was at the last look.
    dependencies: Mutex<HashMap<(String, String), String>>,
    /// What people and metrics were told of last, where the status that tells so may not have come back yet.
    told: Mutex<HashMap<(String, String), String>>,
    admission: Mutex<Admission>,
    /// The keys of Secrets, by UID and version.
    secret_keys: Mutex<HashMap<String, KnownKeys>>,
}

/// What was seen of a Lease, by this controller's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    pub holder: Option<String>,
    pub renewed: Option<String>,
    pub annotations: Option<BTreeMap<String, String>>,
    /// When it was seen to change; `None` as long as it has been as it was found.
    pub changed: Option<DateTime<Utc>>,
}

impl Context {
    pub(super) fn new(
        client: kube::Client,
        options: Options,
        caches: Caches,
        queues: Queues,
        metrics: ControllerMetrics,
        leads: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    ) -> Self {
        let cap = usize::try_from(options.max_jobs).unwrap_or(usize::MAX);
        let admission = Admission::new(cap);
        let reporter = Reporter {
            controller: "deltafold".to_owned(),
            instance: Some(options.identity.clone()),
        };
        Context {
            recorder: Recorder::new(client.clone(), reporter),
            client,
            options,
            caches,
            metrics,
            queues,
            leads,
            failures: Mutex::default(),
            applied: Mutex::default(),
            seen: Mutex::default(),
            recovered: Mutex::default(),
            dependencies: Mutex::default(),
            told: Mutex::default(),
            admission: Mutex::new(admission),
            secret_keys: Mutex::default(),
        }
    }

    /// What time it is.
    pub fn now(&self) -> DateTime<Utc> {
        Utc::now()
    }

    pub(super) fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Has a policy looked at: its CronJobs and status.
    pub fn look_at_policy(&self, policy: ObjectRef<EtcdBackupPolicy>) {
        // Without a receiver all has ended.
        let _ = self.queues.policies.unbounded_send(policy);
    }

    /// Has a policy's thresholds looked at.
    pub fn look_at_thresholds(&self, policy: ObjectRef<EtcdBackupPolicy>) {
        if self.options.compaction_workers > 0 {
            let _ = self.queues.compactions.unbounded_send(policy);
        }
    }

    /// Has a task looked at.
    pub fn look_at_task(&self, task: ObjectRef<EtcdBackupTask>) {
        if self.options.task_workers > 0 {
            let _ = self.queues.tasks.unbounded_send(task);
        }
    }

    /// Has a Secret looked at.
    pub(super) fn look_at_secret(&self, secret: ObjectRef<PartialObjectMeta<Secret>>) {
        let _ = self.queues.secrets.unbounded_send(secret);
    }

    /// Remembers how a Lease is; says whether it moved.
    pub(super) fn saw_lease(&self, lease: &Lease) -> bool {
        let key = (lease.namespace().unwrap_or_default(), lease.name_any());
        let spec = lease.spec.as_ref();
        let holder = spec.and_then(|s| s.holder_identity.clone());
        let renewed = spec
            .and_then(|s| s.renew_time.as_ref())
            .map(|t| t.0.to_string());
        let annotations = lease.metadata.annotations.clone();
        let mut seen = lock(&self.seen);
        let changed = match seen.get(&key) {
            None => None,
            Some(before) if before.holder == holder && before.renewed == renewed => {
                if before.annotations == annotations {
                    return false;
                }
                // What has accumulated is told anew: that is no sign of life.
                before.changed
            }
            Some(_) => Some(self.now()),
        };
        let now = Seen {
            holder,
            renewed,
            annotations,
            changed,
        };
        seen.insert(key, now);
        true
    }

    /// A Lease is gone.
    pub(super) fn forget_lease(&self, namespace: &str, name: &str) {
        lock(&self.seen).remove(&(namespace.to_owned(), name.to_owned()));
    }

    /// When a Lease was seen to change, by this controller's own clock; `None` where it has not since the
    /// controller looks. Another machine's clock may be wrong: this one cannot.
    pub fn lease_changed_at(&self, namespace: &str, name: &str) -> Option<DateTime<Utc>> {
        let key = (namespace.to_owned(), name.to_owned());
        lock(&self.seen).get(&key)?.changed
    }

    /// Notes that what a policy depends on is there again.
    pub(super) fn note_recovery(&self, policy: &ObjectRef<EtcdBackupPolicy>) {
        let key = (
            policy.namespace.clone().unwrap_or_default(),
            policy.name.clone(),
        );
        lock(&self.recovered).insert(key, self.now());
    }

    /// What came back has had its attempt.
    pub(super) fn forget_recovery(&self, policy: &(String, String)) {
        lock(&self.recovered).remove(policy);
    }

    /// Who may make a Job of a threshold or a task. Hold it for no longer than it takes to ask.
    pub fn admission(&self) -> MutexGuard<'_, Admission> {
        lock(&self.admission)
    }

    /// When an endpoint of a policy's etcd was seen to become ready.
    pub fn recovered_at(&self, namespace: &str, policy: &str) -> Option<DateTime<Utc>> {
        let key = (namespace.to_owned(), policy.to_owned());
        lock(&self.recovered).get(&key).copied()
    }

    /// Compares what a policy's Jobs depend on with the last look; where somebody has changed it, that is a recovery.
    pub(super) fn saw_dependencies(
        &self,
        policy: &ObjectRef<EtcdBackupPolicy>,
        dependencies: Option<String>,
    ) {
        let namespace = policy.namespace.clone().unwrap_or_default();
        let key = (namespace, policy.name.clone());
        let before = match dependencies.clone() {
            None => lock(&self.dependencies).remove(&key),
            Some(now) => lock(&self.dependencies).insert(key, now),
        };
        if before.is_some() && dependencies.is_some() && before != dependencies {
            self.note_recovery(policy);
        }
    }

    /// Whether the end of something is told for the first time by this controller.
    pub(super) fn tells_once(&self, object: (String, String), what: &str) -> bool {
        lock(&self.told).insert(object, what.to_owned()).as_deref() != Some(what)
    }

    /// The status tells it now.
    pub(super) fn forget_told(&self, object: &(String, String)) {
        lock(&self.told).remove(object);
    }

    pub(super) fn succeeded(&self, key: &Key) {
        lock(&self.failures).remove(key);
    }

    /// How long to wait before an object is looked at again.
    pub(super) fn retry_after(&self, key: &Key, e: &Failure) -> Duration {
        let mut failures = lock(&self.failures);
        let count = failures.entry(key.clone()).or_insert(0);
        *count = count.saturating_add(1);
        if e.is_conflict() && *count <= 3 {
            return CONFLICT_RETRY;
        }
        let doublings = (*count - 1).min(6);
        (FIRST_RETRY * 2_u32.pow(doublings)).min(LONGEST_RETRY)
    }

    fn may_write(&self) -> Result<(), Failure> {
        match &self.leads {
            Some(leads) if !leads() => Err(Failure::NotLeading),
            _ => Ok(()),
        }
    }

    fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Has an object be as it should be, by server-side apply; says whether that took a write. `cached` is the
    /// object as a watch has told it; where nothing watches its kind, it is written once by each controller.
    ///
    /// # Errors
    /// `Api`, `NotLeading`, `Object`.
    pub async fn apply<K>(
        &self,
        manager: &str,
        desired: &K,
        cached: Option<&K>,
        watched: bool,
    ) -> Result<bool, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let namespace = desired.namespace().unwrap_or_default();
        let name = desired.name_any();
        let what = format!("apply {kind} {namespace}/{name}");
        let mut object = json_of(desired)?;
        object["apiVersion"] = K::api_version(&K::DynamicType::default()).into();
        object["kind"] = kind.clone().into();
        let hash = hash(&object);
        object["metadata"]["annotations"][HASH] = hash.clone().into();
        let key = (kind, namespace.clone(), name.clone());
        let before = lock(&self.applied).get(&key).cloned();
        let is_so = match (cached, &before) {
            (None, Some(before)) if !watched => before.hash == hash,
            (None, _) => false,
            (Some(there), before) => {
                let says = there.annotations().get(HASH).map(String::as_str);
                says == Some(hash.as_str())
                    && match before {
                        // Somebody else has changed what we wrote where its generation is another one.
                        Some(b) => {
                            b.uid != there.uid()
                                || b.generation.is_none()
                                || there.meta().generation <= b.generation
                        }
                        // Nobody may have looked meanwhile.
                        None => holds(&json_of(there)?, &object),
                    }
            }
        };
        if is_so {
            if let (None, Some(there)) = (before, cached) {
                let applied = Applied {
                    hash,
                    uid: there.uid(),
                    generation: there.meta().generation,
                };
                lock(&self.applied).insert(key, applied);
            }
            return Ok(false);
        }
        self.may_write()?;
        let params = PatchParams::apply(manager).force();
        let api = self.api::<K>(&namespace);
        let patch = Patch::Apply(&object);
        let written = answer(&what, api.patch(&name, &params, &patch)).await?;
        let written = written.or_fail(&what)?;
        let applied = Applied {
            hash,
            uid: written.uid(),
            generation: written.meta().generation,
        };
        lock(&self.applied).insert(key, applied);
        tracing::info!("did {what}");
        Ok(true)
    }

    /// Creates an object; says whether it was not there before.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub async fn create<K>(&self, object: &K) -> Result<bool, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        self.create_new(object).await.map(|made| made.is_some())
    }

    /// Creates an object, and gives it as it was made; `None` where there was one of that name before.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub async fn create_new<K>(&self, object: &K) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        self.may_write()?;
        let namespace = object.namespace().unwrap_or_default();
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let what = format!("create {kind} {namespace}/{}", object.name_any());
        let api = self.api::<K>(&namespace);
        let params = PostParams::default();
        match answer(&what, api.create(&params, object)).await? {
            Answer::Done(made) => {
                tracing::info!("did {what}");
                Ok(Some(made))
            }
            Answer::Refused(status) if status.is_already_exists() => Ok(None),
            Answer::Refused(status) => Err(refused(&what, &status)),
        }
    }

    /// Creates what nothing watches, once by each controller.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub async fn create_once<K>(&self, object: &K) -> Result<(), Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let namespace = object.namespace().unwrap_or_default();
        let key = (kind, namespace, object.name_any());
        let applied = Applied {
            hash: hash(&json_of(object)?),
            uid: None,
            generation: None,
        };
        if lock(&self.applied).get(&key) == Some(&applied) {
            return Ok(());
        }
        self.create(object).await?;
        lock(&self.applied).insert(key, applied);
        Ok(())
    }

    /// What nothing watches was seen to go: it is created again.
    pub(super) fn forget_created(&self, kind: &str, namespace: &str, name: &str) {
        let key = (kind.to_owned(), namespace.to_owned(), name.to_owned());
        lock(&self.applied).remove(&key);
    }

    /// Changes a part of an object, and leaves the rest of it.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub async fn merge<K>(&self, manager: &str, object: &K, patch: &Value) -> Result<(), Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        self.may_write()?;
        let namespace = object.namespace().unwrap_or_default();
        let name = object.name_any();
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let what = format!("change {kind} {namespace}/{name}");
        let params = PatchParams {
            field_manager: Some(manager.to_owned()),
            ..PatchParams::default()
        };
        let api = self.api::<K>(&namespace);
        let written = answer(&what, api.patch(&name, &params, &Patch::Merge(patch))).await?;
        written.or_fail(&what)?;
        tracing::info!("did {what}");
        Ok(())
    }

    /// Deletes an object, what it owns after it. That it is gone, or another one by that name, is no failure.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub async fn delete<K>(&self, object: &K) -> Result<(), Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        self.may_write()?;
        let namespace = object.namespace().unwrap_or_default();
        let name = object.name_any();
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let what = format!("delete {kind} {namespace}/{name}");
        let params = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Background),
            preconditions: Some(Preconditions {
                uid: object.uid(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        let api = self.api::<K>(&namespace);
        match answer(&what, api.delete(&name, &params)).await? {
            Answer::Done(_) => {
                tracing::info!("did {what}");
                Ok(())
            }
            Answer::Refused(status) if status.code == 404 || status.code == 409 => Ok(()),
            Answer::Refused(status) => Err(refused(&what, &status)),
        }
    }

    /// Writes a part of an object's status by server-side apply: `manager` owns what is in it, and no longer
    /// what it has left out. Whoever calls it has seen that the status is not so yet.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub async fn apply_status<K>(
        &self,
        manager: &str,
        object: &K,
        status: &Value,
    ) -> Result<(), Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        self.may_write()?;
        let namespace = object.namespace().unwrap_or_default();
        let name = object.name_any();
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let what = format!("write the status of {kind} {namespace}/{name}");
        let patch = json!({
            "apiVersion": K::api_version(&K::DynamicType::default()),
            "kind": kind,
            // One that was deleted and made again is another one.
            "metadata": {"name": name, "uid": object.uid()},
            "status": status,
        });
        let params = PatchParams::apply(manager).force();
        let api = self.api::<K>(&namespace);
        let patch = Patch::Apply(&patch);
        let written = answer(&what, api.patch_status(&name, &params, &patch)).await?;
        written.or_fail(&what).map(drop)
    }

    /// Merges a patch into an object's metadata.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub(super) async fn patch_metadata<K>(
        &self,
        namespace: &str,
        name: &str,
        metadata: Value,
    ) -> Result<(), Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        self.may_write()?;
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let what = format!("write the metadata of {kind} {namespace}/{name}");
        let patch = json!({ "metadata": metadata });
        let api = self.api::<K>(namespace);
        let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let written = answer(&what, api.patch_metadata(name, &params, &patch)).await?;
        written.or_fail(&what).map(drop)
    }

    /// The keys of a Secret; `None` where it is not there. It is asked of the API once for each of its
    /// versions: values are in no cache.
    ///
    /// # Errors
    /// `Api`.
    pub async fn secret_keys(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<BTreeSet<String>>, Failure> {
        let key = ObjectRef::<PartialObjectMeta<Secret>>::new(name).within(namespace);
        let Some(there) = self.caches.secrets.get(&key) else {
            return Ok(None);
        };
        let uid = there.uid().unwrap_or_default();
        let version = there.resource_version();
        if let Some((known, keys)) = lock(&self.secret_keys).get(&uid)
            && *known == version
        {
            return Ok(Some(keys.clone()));
        }
        let what = format!("read Secret {namespace}/{name}");
        let api = self.api::<Secret>(namespace);
        let secret = answer(&what, api.get_opt(name)).await?;
        let Some(secret) = secret.or_fail(&what)? else {
            return Ok(None);
        };
        let known = secret.resource_version();
        let keys: BTreeSet<String> = secret.data.unwrap_or_default().into_keys().collect();
        lock(&self.secret_keys).insert(uid, (known, keys.clone()));
        Ok(Some(keys))
    }

    /// Tells people what was decided about an object, and why: an Event, which may get lost, and a log line.
    pub async fn tell<K>(&self, object: &K, warning: bool, reason: &str, action: &str, note: &str)
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        let reference = object.object_ref(&K::DynamicType::default());
        let namespace = reference.namespace.as_deref().unwrap_or_default();
        let name = reference.name.as_deref().unwrap_or_default();
        let kind = reference.kind.as_deref().unwrap_or_default();
        match warning {
            true => tracing::warn!(kind, namespace, name, reason, "{note}"),
            false => tracing::info!(kind, namespace, name, reason, "{note}"),
        }
        let event = Event {
            type_: match warning {
                true => EventType::Warning,
                false => EventType::Normal,
            },
            reason: reason.to_owned(),
            note: Some(short(note)),
            action: action.to_owned(),
            secondary: None,
        };
        if self.may_write().is_err() {
            return;
        }
        let published = self.recorder.publish(&event, &reference);
        let why = match tokio::time::timeout(PATIENCE, published).await {
            Ok(Ok(())) => return,
            Ok(Err(e)) => causes(&e),
            Err(_) => format!("no answer within {} s", PATIENCE.as_secs()),
        };
        tracing::warn!(namespace, name, "an Event could not be written: {why}");
    }
}

/// As long as the API takes it for a note.
fn short(note: &str) -> String {
    const LONGEST: usize = 1000;
    match note.char_indices().nth(LONGEST) {
        None => note.to_owned(),
        Some((at, _)) => format!("{}…", &note[..at]),
    }
}

fn json_of<K: Serialize>(object: &K) -> Result<Value, Failure> {
    serde_json::to_value(object).map_err(|e| Failure::Object(format!("an object is no JSON: {e}")))
}

/// Whether all that is wanted stands in what is there, which may have more: defaults, others' fields.
fn holds(there: &Value, wanted: &Value) -> bool {
    match (there, wanted) {
        (Value::Object(there), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| {
            let nothing = wanted.is_null();
            there.get(key).map_or(nothing, |there| holds(there, wanted))
        }),
        (Value::Array(there), Value::Array(wanted)) => {
            there.len() == wanted.len() && there.iter().zip(wanted).all(|(t, w)| holds(t, w))
        }
        (there, wanted) => there == wanted,
    }
}

/// Of an object's JSON, whose keys serde_json keeps in order.
fn hash(object: &Value) -> String {
    short_hash(object.to_string(), 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_may_be_there_than_is_wanted_but_nothing_else() {
        let wanted = json!({"a": 1, "b": [{"c": 2}], "d": {"e": null}});
        let there = json!({"a": 1, "b": [{"c": 2, "x": 3}], "d": {}, "y": 4});
        assert!(holds(&there, &wanted));
        for (at, other) in [
            ("/a", json!(2)),
            ("/b", json!([])),
            ("/b/0/c", json!("2")),
            ("/d", json!({"e": 1})),
        ] {
            let mut changed = there.clone();
            *changed.pointer_mut(at).unwrap() = other;
            assert!(!holds(&changed, &wanted), "{at}");
        }
    }
}
