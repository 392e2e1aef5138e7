//! The controller's view of the cluster: watch caches and its own recent writes, one [`Observed`] per policy.
//!
//! Reading it sends no request, and it decides nothing. `watch` fills it, the loop in `controller` asks for
//! the observation of each policy that it reconciles, and `apply` records its writes here.

mod claims;
mod filters;
pub mod leases;
mod memory;
pub mod outcome;
mod table;
pub mod threshold_jobs;
mod watch;
mod workloads;

pub use claims::{claim, claimed_value};
pub use filters::lease_prefix;
pub use memory::{AppliedObject, UNSEEN_JOB_LIFETIME, WATCH_DELAY};
pub use watch::watch_all;
pub use workloads::PackedObject;

use super::api::{
    Claimed, EtcdBackupPolicy, EtcdBackupPolicyStatus, EtcdBackupTask, EtcdBackupTaskStatus,
};
use super::jobs;
use super::names::{Key, is_owned, key, owner};
use super::work_queue::WorkQueue;
use crate::base::lock;
use chrono::{DateTime, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt;
use leases::LeaseFacts;
use memory::{PolicyMemory, WrittenStatus};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use table::{Table, one_group};
use threshold_jobs::ThresholdStart;

/// The watch caches.
#[derive(Debug)]
pub struct Tables {
    policies: Table<EtcdBackupPolicy>,
    tasks: Table<EtcdBackupTask>,
    jobs: Table<Job>,
    cron_jobs: Table<PackedObject>,
    followers: Table<PackedObject>,
    pods: Table<Pod>,
    leases: Table<Lease>,
    slices: Table<EndpointSlice>,
    /// When the watch reported the last renewal of a Lease. The time in the Lease may come from a wrong
    /// clock.
    renewed: HashMap<Key, DateTime<Utc>>,
}

impl Default for Tables {
    fn default() -> Self {
        let by_policy =
            |object: &PackedObject| workloads::policy_of(object).map_or_else(Vec::new, one_group);
        Tables {
            policies: Table::new(claims::groups),
            tasks: Table::new(|task| one_group(filters::policy_of_task(task))),
            jobs: Table::new(|job| filters::policy_of(job).map_or_else(Vec::new, one_group)),
            cron_jobs: Table::new(by_policy),
            followers: Table::new(by_policy),
            pods: Table::new(|pod| filters::policy_of(pod).map_or_else(Vec::new, one_group)),
            leases: Table::new(|_| Vec::new()),
            slices: Table::new(|slice| filters::service_of(slice).map_or_else(Vec::new, one_group)),
            renewed: HashMap::new(),
        }
    }
}

/// An action that was attempted in this reconcile, so that it is not attempted again in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttemptedAction {
    /// The action, as [`Action::description`](super::plan::Action::description) names it.
    pub action: String,
    /// Why it was refused; `None` if it was done, or may succeed later.
    pub refusal: Option<Refusal>,
}

/// Why an action was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason of a condition.
    pub reason: &'static str,
    /// The message of a condition.
    pub message: String,
    /// Whether the same action would always be refused.
    pub is_final: bool,
}

/// All that the controller knows, shared by the watches and the workers.
#[derive(Debug, Default)]
pub struct ClusterState {
    tables: Mutex<Tables>,
    memory: Mutex<HashMap<Key, PolicyMemory>>,
    /// Namespaces in which the Jobs' ServiceAccount exists.
    accounts: Mutex<BTreeSet<String>>,
    /// Named namespaces whose first lists are not complete. Their policies are not reconciled.
    unlisted: Mutex<BTreeSet<String>>,
    /// The queue of policies to reconcile.
    pub work: WorkQueue,
}

/// All that is known of one policy and its tasks at one moment.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// The policy's namespace and name. The policy may not exist.
    pub key: Key,
    /// The policy with the status that this controller wrote last; `None` if it does not exist or is being
    /// deleted.
    pub policy: Option<Arc<EtcdBackupPolicy>>,
    /// The tasks that name the policy.
    pub tasks: Vec<Arc<EtcdBackupTask>>,
    /// The Jobs of the policy, its CronJobs or its tasks.
    pub jobs: Vec<Arc<Job>>,
    /// The Pods with the policy's label.
    pub pods: Vec<Arc<Pod>>,
    /// The CronJobs with the policy's label.
    pub cron_jobs: Vec<Arc<PackedObject>>,
    /// The followers with the policy's label.
    pub followers: Vec<Arc<PackedObject>>,
    /// The last write of each CronJob and follower, by kind and name.
    pub applied: BTreeMap<(String, String), AppliedObject>,
    /// The contents of the snapshot Leases.
    pub facts: LeaseFacts,
    /// When the watch reported the last renewal of the full Lease, and of the delta Lease.
    pub lease_renewals: [Option<DateTime<Utc>>; 2],
    /// The names of the policy's Leases that exist.
    pub leases: BTreeSet<String>,
    /// Whether the Jobs' ServiceAccount is known to exist.
    pub has_account: bool,
    /// The other policies that hold a claim on the location or on the snapshot Leases, by name.
    pub claim_holders: Vec<(Claimed, String)>,
    /// Whether a policy of another namespace has the same location.
    pub is_shared: bool,
    /// The threshold Job whose creation got no answer: it may exist.
    pub unconfirmed_start: Option<ThresholdStart>,
    /// When something that Jobs depend on came back or was corrected.
    pub recovered_at: Option<DateTime<Utc>>,
    /// The actions that were attempted in this reconcile.
    pub attempted: Vec<AttemptedAction>,
    /// When a write that no watch has reported counts as lost.
    pub requeue_at: Option<DateTime<Utc>>,
}

impl Observed {
    /// Returns the Pods of a Job.
    pub fn pods_of(&self, job: &Job) -> Vec<&Pod> {
        let pods = self.pods.iter().map(|pod| &**pod);
        pods.filter(|pod| is_owned(*pod, job)).collect()
    }

    /// Returns the Job of this name.
    pub fn job(&self, name: &str) -> Option<&Arc<Job>> {
        self.jobs.iter().find(|job| job.name_any() == name)
    }
}

impl ClusterState {
    /// Returns an empty state, with a queue for this number of workers.
    pub fn new(workers: usize) -> Self {
        ClusterState {
            work: WorkQueue::new(workers),
            ..ClusterState::default()
        }
    }

    /// Returns all that is known of a policy.
    pub fn observe(
        &self,
        policy_key: &Key,
        attempted: &[AttemptedAction],
        now: DateTime<Utc>,
    ) -> Observed {
        let tables = lock(&self.tables);
        let mut memory = lock(&self.memory);
        let mut observed = Observed {
            key: policy_key.clone(),
            attempted: attempted.to_vec(),
            ..Observed::default()
        };
        let policy = tables.policies.get(policy_key).cloned();
        let tasks = tables.tasks.in_group(policy_key);
        if policy.is_none() && tasks.is_empty() {
            memory.remove(policy_key);
            // The namespace may be deleted and created again without the ServiceAccount.
            lock(&self.accounts).remove(&policy_key.0);
            return observed;
        }
        let memory = memory.entry(policy_key.clone()).or_default();
        let policy = policy.filter(|p| p.metadata.deletion_timestamp.is_none());
        let policy = policy.map(|p| memory.policy_with_status(p));
        observed.tasks = memory.tasks_with_status(tasks);
        memory.drop_unwanted_start(policy.as_deref());
        memory.drop_deleted(&tables, policy_key, now);
        let owners = tables.job_owners(policy_key, policy.as_deref(), &observed.tasks);
        observed.jobs = tables.jobs_of(policy_key, &owners);
        let unseen = memory.unseen_jobs(&tables, &policy_key.0, &owners, now);
        observed.jobs.extend(unseen);
        observed.pods = tables.pods.in_group(policy_key);
        observed.cron_jobs = tables.cron_jobs.in_group(policy_key);
        observed.followers = tables.followers.in_group(policy_key);
        observed.applied = memory.applied.clone();
        observed.has_account = lock(&self.accounts).contains(&policy_key.0);
        observed.unconfirmed_start = memory.unconfirmed_start.clone();
        observed.requeue_at = memory.next_expiry(&tables, policy_key);
        if let Some(policy) = &policy {
            tables.observe_leases(policy, &mut observed);
            tables.observe_contenders(policy, &mut observed);
            observed.recovered_at = memory.recovery(policy, now);
        }
        observed.policy = policy;
        observed
    }

    /// Returns whether the lists of a namespace are complete.
    pub fn is_listed(&self, namespace: &str) -> bool {
        !lock(&self.unlisted).contains(namespace)
    }

    /// Returns the keys of all policies that exist or that a task names.
    pub fn policy_keys(&self) -> BTreeSet<Key> {
        let tables = lock(&self.tables);
        let policies = tables.policies.all().map(|(key, _)| key.clone());
        let of_tasks = tables.tasks.all().map(|(_, t)| filters::policy_of_task(t));
        policies.chain(of_tasks).collect()
    }

    /// Returns all policies.
    pub fn policies(&self) -> Vec<Arc<EtcdBackupPolicy>> {
        let tables = lock(&self.tables);
        tables.policies.all().map(|(_, p)| p.clone()).collect()
    }

    /// Returns all Jobs that deltafold manages.
    pub fn jobs(&self) -> Vec<Arc<Job>> {
        let tables = lock(&self.tables);
        tables.jobs.all().map(|(_, j)| j.clone()).collect()
    }

    /// Returns the contents of a policy's snapshot Leases.
    pub fn facts(&self, policy: &EtcdBackupPolicy) -> LeaseFacts {
        lock(&self.tables).facts(policy)
    }

    fn remember<T>(&self, policy: &Key, record: impl FnOnce(&mut PolicyMemory) -> T) -> T {
        record(lock(&self.memory).entry(policy.clone()).or_default())
    }

    /// Records that this status was written. `policy` is the answer of the API server.
    pub fn policy_status_written(
        &self,
        policy: &EtcdBackupPolicy,
        status: &EtcdBackupPolicyStatus,
    ) {
        let policy_key = key(policy);
        let watched = lock(&self.tables).policies.get(&policy_key).cloned();
        let version = watched.and_then(|p| p.resource_version());
        self.remember(&policy_key, |memory| {
            let previous = memory.status.take();
            memory.status = Some(WrittenStatus::new(previous, status, version, policy));
        });
    }

    /// Records that this status was written. `task` is the answer of the API server.
    pub fn task_status_written(&self, task: &EtcdBackupTask, status: &EtcdBackupTaskStatus) {
        let watched = lock(&self.tables).tasks.get(&key(task)).cloned();
        let version = watched.and_then(|t| t.resource_version());
        self.remember(&filters::policy_of_task(task), |memory| {
            let previous = memory.task_statuses.remove(&task.name_any());
            let written = WrittenStatus::new(previous, status, version, task);
            memory.task_statuses.insert(task.name_any(), written);
        });
    }

    /// Records that a CronJob or follower was applied.
    pub fn object_applied(
        &self,
        policy: &Key,
        kind_and_name: (String, String),
        applied: AppliedObject,
    ) {
        self.remember(policy, |memory| {
            memory.applied.insert(kind_and_name, applied)
        });
    }

    /// Records that a Job exists. The watch may not report it yet.
    pub fn job_created(&self, policy: &Key, job: Job, now: DateTime<Utc>) {
        let created = (job.name_any(), (Arc::new(job), now));
        self.remember(policy, |memory| memory.created_jobs.extend([created]));
    }

    /// Records that a threshold Job is about to be created, or with `None` that the request was answered. In
    /// between the Job may or may not exist.
    pub fn set_unconfirmed_start(&self, policy: &Key, start: Option<ThresholdStart>) {
        self.remember(policy, |memory| memory.unconfirmed_start = start);
    }

    /// Records that something came back that the policy's Jobs depend on.
    fn recovered(&self, policy: &Key, now: DateTime<Utc>) {
        self.remember(policy, |memory| memory.recovered_at = Some(now));
    }

    /// Consumes the recovery signal, because a Job was created after it. Otherwise clock skew could make a
    /// policy retry forever.
    pub fn forget_recovery(&self, policy: &Key) {
        self.remember(policy, |memory| memory.recovered_at = None);
    }

    /// Records that the Jobs' ServiceAccount of a namespace exists.
    pub fn has_account(&self, namespace: &str) {
        lock(&self.accounts).insert(namespace.to_owned());
    }

    /// Records a successful reconcile.
    pub fn reconcile_succeeded(&self, policy: &Key) {
        if let Some(memory) = lock(&self.memory).get_mut(policy) {
            memory.forget_failures();
        }
    }

    /// Records a failed reconcile and returns the back-off before the next one. `back_off` gets the number of
    /// failures in a row.
    pub fn reconcile_failed(
        &self,
        policy: &Key,
        now: DateTime<Utc>,
        back_off: impl FnOnce(u32) -> Duration,
    ) -> Duration {
        match lock(&self.memory).get_mut(policy) {
            Some(memory) => memory.add_failure(now, back_off),
            // The policy is gone, and the memory with it.
            None => back_off(1),
        }
    }
}

impl Tables {
    /// Returns the UIDs of the owners whose Jobs count: the policy, its CronJobs and its tasks. The labels of
    /// a Job do not count, because anyone can set them.
    fn job_owners(
        &self,
        policy_key: &Key,
        policy: Option<&EtcdBackupPolicy>,
        tasks: &[Arc<EtcdBackupTask>],
    ) -> BTreeSet<String> {
        let mut owners: BTreeSet<String> = tasks.iter().filter_map(|t| t.uid()).collect();
        if let Some(uid) = policy.and_then(|p| p.uid()) {
            for cron_job in self.cron_jobs.in_group(policy_key) {
                if cron_job.owner.as_ref() == Some(&uid) {
                    owners.extend(cron_job.uid.clone());
                }
            }
            owners.insert(uid);
        }
        owners
    }

    fn jobs_of(&self, policy: &Key, owners: &BTreeSet<String>) -> Vec<Arc<Job>> {
        let mut jobs = self.jobs.in_group(policy);
        jobs.retain(|job| owner(&**job).is_some_and(|uid| owners.contains(uid)));
        jobs
    }

    /// Returns whether an applied object is in the tables.
    fn has_object(&self, policy: &Key, applied: &AppliedObject) -> bool {
        let tables = [&self.cron_jobs, &self.followers];
        let mut objects = tables.into_iter().flat_map(|table| table.in_group(policy));
        objects.any(|object| object.uid == applied.uid)
    }

    fn facts(&self, policy: &EtcdBackupPolicy) -> LeaseFacts {
        let namespace = policy.namespace().unwrap_or_default();
        let (full, delta) = jobs::lease_names(policy);
        let lease = |name| self.leases.get(&(namespace.clone(), name)).map(|l| &**l);
        LeaseFacts::read(lease(full), lease(delta))
    }

    fn observe_leases(&self, policy: &EtcdBackupPolicy, observed: &mut Observed) {
        observed.facts = self.facts(policy);
        let namespace = &observed.key.0;
        let (full, delta) = jobs::lease_names(policy);
        let lease_key = |name: &String| (namespace.clone(), name.clone());
        observed.lease_renewals =
            [&full, &delta].map(|name| self.renewed.get(&lease_key(name)).copied());
        let locks = jobs::lock_leases(policy).into_iter();
        let names = locks.filter_map(|l| l.metadata.name).chain([full, delta]);
        let existing = names.filter(|name| self.leases.get(&lease_key(name)).is_some());
        observed.leases = existing.collect();
    }

    fn observe_contenders(&self, policy: &EtcdBackupPolicy, observed: &mut Observed) {
        for what in [Claimed::Store, Claimed::Leases] {
            let contenders = claims::contenders(policy, what);
            let holder = self.policies.members(&contenders).next();
            if let Some(holder) = holder.filter(|holder| **holder != observed.key) {
                observed.claim_holders.push((what, holder.1.clone()));
            }
        }
        // The group is sorted by namespace: if all are of one namespace, the first and the last are.
        let same_location = claims::same_location(policy);
        let mut same_location = self.policies.members(&same_location);
        let (first, last) = (same_location.next(), same_location.next_back());
        let mut ends = first.into_iter().chain(last);
        observed.is_shared = ends.any(|other| other.0 != observed.key.0);
    }
}
