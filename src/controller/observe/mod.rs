//! What is known: the watches' tables, what this controller remembers, and of both one [`Observed`] a policy.
//!
//! Reading it asks nobody. It decides nothing. The watches fill it; the loop in `controller` has it observed for
//! each policy that is looked at, and `apply` notes here what it has written.

mod claims;
mod filters;
pub mod leases;
pub mod outcome;
mod table;
pub mod threshold_jobs;
mod watch;
mod workloads;

pub use claims::{claim, wanted};
pub use filters::lease_prefix;
pub use watch::watch_all;
pub use workloads::Made;

use super::api::{
    Claimed, EtcdBackupPolicy, EtcdBackupPolicyStatus, EtcdBackupTask, EtcdBackupTaskStatus,
};
use super::jobs;
use super::names::{Key, is_owned, key};
use super::times::{later, time_delta};
use super::work_queue::WorkQueue;
use crate::base::lock;
use chrono::{DateTime, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt;
use leases::LeaseFacts;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use table::{Table, by_name};
use threshold_jobs::Start;

/// A watch may tell of what was written so much later.
pub const WATCH_LAGS: TimeDelta = TimeDelta::seconds(10);
/// A Job that was made and that no watch has told of for so long is gone.
pub const JOB_COMES: TimeDelta = TimeDelta::minutes(2);

/// What the watches have told.
#[derive(Debug)]
pub struct Tables {
    policies: Table<EtcdBackupPolicy>,
    tasks: Table<EtcdBackupTask>,
    jobs: Table<Job>,
    cron_jobs: Table<Made>,
    followers: Table<Made>,
    pods: Table<Pod>,
    leases: Table<Lease>,
    slices: Table<EndpointSlice>,
    /// When a Lease was seen to be renewed, by this controller's clock: another machine's may be wrong.
    renewed: HashMap<Key, DateTime<Utc>>,
}

impl Default for Tables {
    fn default() -> Self {
        let made = |made: &Made| workloads::group(made).map_or_else(Vec::new, by_name);
        Tables {
            policies: Table::new(claims::groups),
            tasks: Table::new(|task| by_name(filters::policy_of_task(task))),
            jobs: Table::new(|job| filters::policy_of(job).map_or_else(Vec::new, by_name)),
            cron_jobs: Table::new(made),
            followers: Table::new(made),
            pods: Table::new(|pod| filters::policy_of(pod).map_or_else(Vec::new, by_name)),
            leases: Table::new(|_| Vec::new()),
            slices: Table::new(|slice| filters::service_of(slice).map_or_else(Vec::new, by_name)),
            renewed: HashMap::new(),
        }
    }
}

/// What this controller wrote last into the status of an object, as long as the watch has not told of it.
#[derive(Debug, Clone)]
struct Written<S> {
    uid: Option<String>,
    /// The version that the watch told of when it was written first, and those that our writes have made.
    over: Vec<Option<String>>,
    status: S,
}

impl<S: Clone> Written<S> {
    /// Written once more: the object is of this version then.
    fn write<K: ResourceExt>(
        last: Option<Self>,
        status: &S,
        told: Option<String>,
        written: &K,
    ) -> Self {
        let uid = written.uid();
        let last = last.filter(|last| last.uid == uid && last.over.contains(&told));
        let mut over = last.map_or_else(|| vec![told], |last| last.over);
        over.push(written.resource_version());
        Written {
            uid,
            over,
            status: status.clone(),
        }
    }
}

/// What was written of a made object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Of what it was made.
    pub hash: String,
    /// Its UID.
    pub uid: Option<String>,
    /// Its generation after that.
    pub generation: Option<i64>,
    /// When.
    pub at: DateTime<Utc>,
}

/// What this controller remembers of a policy beyond what the API server tells. Another controller does without it.
#[derive(Debug, Default)]
struct Memory {
    status: Option<Written<EtcdBackupPolicyStatus>>,
    tasks: BTreeMap<String, Written<EtcdBackupTaskStatus>>,
    /// Jobs that were created, and when.
    made: BTreeMap<String, (Arc<Job>, DateTime<Utc>)>,
    /// By kind and name.
    applied: BTreeMap<(String, String), Applied>,
    unanswered: Option<Start>,
    recovered_at: Option<DateTime<Utc>>,
    /// The generation of the spec while the last compaction is a failed one.
    failed_with: Option<i64>,
    /// How often in a row looks have failed, and until when it is waited for the next one.
    failures: Option<(u32, DateTime<Utc>)>,
}

/// Something that was tried in one look, so that it is not tried twice in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// What: as [`Action::description`](super::plan::Action::description) names it.
    pub what: String,
    /// Why Kubernetes does not take it, or somebody else has it; `None` if it is done, or may be done later.
    pub refusal: Option<Refusal>,
}

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// For machines.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// Whether it would be taken at no other time.
    pub is_final: bool,
}

/// What is known of all.
#[derive(Debug, Default)]
pub struct World {
    tables: Mutex<Tables>,
    memory: Mutex<HashMap<Key, Memory>>,
    /// Namespaces in which the Jobs' service account is there.
    accounts: Mutex<BTreeSet<String>>,
    /// Named namespaces of which not everything has been listed: their policies are not looked at.
    unlisted: Mutex<BTreeSet<String>>,
    /// Who is to be looked at.
    pub work: WorkQueue,
}

/// All that is known of one policy and its tasks at one moment.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// The policy's namespace and name; it may not be there.
    pub key: Key,
    /// The policy, unless it is being deleted. Its status is as this controller wrote it last.
    pub policy: Option<Arc<EtcdBackupPolicy>>,
    /// Whoever names it as their policy.
    pub tasks: Vec<Arc<EtcdBackupTask>>,
    /// Jobs that belong to the policy, its CronJobs or its tasks.
    pub jobs: Vec<Arc<Job>>,
    /// Pods with the policy's label.
    pub pods: Vec<Arc<Pod>>,
    /// The CronJobs with its label.
    pub cron_jobs: Vec<Arc<Made>>,
    /// The followers with its label.
    pub followers: Vec<Arc<Made>>,
    /// What was written of both, by kind and name.
    pub applied: BTreeMap<(String, String), Applied>,
    /// What the snapshot Leases tell.
    pub facts: LeaseFacts,
    /// When they were seen to be renewed: that of fulls, and that of deltas.
    pub renewed: [Option<DateTime<Utc>>; 2],
    /// Leases of the policy that are there, by name.
    pub leases: BTreeSet<String>,
    /// Whether the Jobs' service account is known to be there.
    pub has_account: bool,
    /// Who has the place of the backup, and the snapshot Leases, if it is not this policy.
    pub holders: Vec<(Claimed, String)>,
    /// Whether a policy of another namespace has the same place for its backup.
    pub is_shared: bool,
    /// The threshold's Job that may have been created: nobody answered.
    pub unanswered: Option<Start>,
    /// When something that Jobs depend on was seen to come back or to be mended.
    pub recovered_at: Option<DateTime<Utc>>,
    /// What was tried in this look.
    pub tried: Vec<Tried>,
    /// When what was written and no watch has told of counts as gone.
    pub look_again: Option<DateTime<Utc>>,
}

impl Observed {
    /// The Pods of a Job.
    pub fn pods_of(&self, job: &Job) -> Vec<&Pod> {
        let pods = self.pods.iter().map(|pod| &**pod);
        pods.filter(|pod| is_owned(*pod, job)).collect()
    }

    /// The Job of this name.
    pub fn job(&self, name: &str) -> Option<&Arc<Job>> {
        self.jobs.iter().find(|job| job.name_any() == name)
    }
}

impl World {
    /// Nothing is known yet; so many workers look at policies.
    pub fn new(workers: usize) -> Self {
        World {
            work: WorkQueue::new(workers),
            ..World::default()
        }
    }

    /// All that is known of a policy.
    pub fn observe(&self, this: &Key, tried: &[Tried], now: DateTime<Utc>) -> Observed {
        let tables = lock(&self.tables);
        let mut memory = lock(&self.memory);
        let policy = tables.policies.get(this).cloned();
        let tasks = tables.tasks.of(this);
        if policy.is_none() && tasks.is_empty() {
            memory.remove(this);
            // The namespace may be made again, without it.
            lock(&self.accounts).remove(&this.0);
            return Observed {
                key: this.clone(),
                tried: tried.to_vec(),
                ..Observed::default()
            };
        }
        let memory = memory.entry(this.clone()).or_default();
        let policy = policy.filter(|p| p.metadata.deletion_timestamp.is_none());
        let policy = policy.map(|p| with_status(p, &mut memory.status, |p, s| p.status = Some(s)));
        let mut written = std::mem::take(&mut memory.tasks);
        let tasks = tasks.into_iter().map(|task| {
            let name = task.name_any();
            let mut last = written.remove(&name);
            let task = with_status(task, &mut last, |t, s| t.status = Some(s));
            memory.tasks.extend(last.map(|last| (name, last)));
            task
        });
        let tasks: Vec<Arc<EtcdBackupTask>> = tasks.collect();
        let is_unwanted = |start: &mut Start| {
            policy
                .as_ref()
                .is_none_or(|policy| !start.is_wanted_by(policy))
        };
        memory.unanswered.take_if(is_unwanted);
        let jobs = own_jobs(&tables, this, policy.as_deref(), &tasks, memory, now);
        memory.applied.retain(|_, applied| {
            // One that somebody has deleted is not remembered as written.
            (now - applied.at).abs() < WATCH_LAGS || tables.is_made(this, applied)
        });
        let mut observed = Observed {
            key: this.clone(),
            tasks,
            jobs,
            pods: tables.pods.of(this),
            cron_jobs: tables.cron_jobs.of(this),
            followers: tables.followers.of(this),
            applied: memory.applied.clone(),
            has_account: lock(&self.accounts).contains(&this.0),
            unanswered: memory.unanswered.clone(),
            tried: tried.to_vec(),
            look_again: memory.look_again(&tables, this),
            ..Observed::default()
        };
        if let Some(policy) = &policy {
            tables.look_at_leases(policy, &mut observed);
            tables.look_at_rivals(policy, &mut observed);
            observed.recovered_at = memory.look_for_recovery(policy, now);
        }
        observed.policy = policy;
        observed
    }

    /// Whether all of a namespace is known.
    pub fn is_listed(&self, namespace: &str) -> bool {
        !lock(&self.unlisted).contains(namespace)
    }

    /// All policies that are there, or that tasks name.
    pub fn all(&self) -> BTreeSet<Key> {
        let tables = lock(&self.tables);
        let policies = tables.policies.all().map(|(key, _)| key.clone());
        let of_tasks = tables.tasks.all().map(|(_, t)| filters::policy_of_task(t));
        policies.chain(of_tasks).collect()
    }

    /// All policies, for what is told of each.
    pub fn policies(&self) -> Vec<Arc<EtcdBackupPolicy>> {
        let tables = lock(&self.tables);
        tables.policies.all().map(|(_, p)| p.clone()).collect()
    }

    /// All Jobs of ours, for what is told of them.
    pub fn jobs(&self) -> Vec<Arc<Job>> {
        let tables = lock(&self.tables);
        tables.jobs.all().map(|(_, j)| j.clone()).collect()
    }

    /// What the snapshot Leases of a policy tell.
    pub fn facts(&self, policy: &EtcdBackupPolicy) -> LeaseFacts {
        lock(&self.tables).facts(policy)
    }

    fn remember<T>(&self, this: &Key, note: impl FnOnce(&mut Memory) -> T) -> T {
        note(lock(&self.memory).entry(this.clone()).or_default())
    }

    /// The status of a policy was written, which is `policy` now.
    pub fn wrote_status(&self, policy: &EtcdBackupPolicy, status: &EtcdBackupPolicyStatus) {
        let this = key(policy);
        let told = lock(&self.tables).policies.get(&this).cloned();
        let told = told.and_then(|p| p.resource_version());
        self.remember(&this, |memory| {
            memory.status = Some(Written::write(memory.status.take(), status, told, policy));
        });
    }

    /// The status of a task was written, which is `task` now.
    pub fn wrote_task(&self, task: &EtcdBackupTask, status: &EtcdBackupTaskStatus) {
        let told = lock(&self.tables).tasks.get(&key(task)).cloned();
        let told = told.and_then(|t| t.resource_version());
        self.remember(&filters::policy_of_task(task), |memory| {
            let last = memory.tasks.remove(&task.name_any());
            let written = Written::write(last, status, told, task);
            memory.tasks.insert(task.name_any(), written);
        });
    }

    /// A CronJob or follower was written.
    pub fn applied(&self, this: &Key, kind_and_name: (String, String), applied: Applied) {
        self.remember(this, |memory| memory.applied.insert(kind_and_name, applied));
    }

    /// A Job is there.
    pub fn made(&self, this: &Key, job: Job, now: DateTime<Utc>) {
        let made = (job.name_any(), (Arc::new(job), now));
        self.remember(this, |memory| memory.made.extend([made]));
    }

    /// A threshold's Job is about to be created: until there is an answer it may be there or not.
    pub fn unanswered(&self, this: &Key, start: Option<Start>) {
        self.remember(this, |memory| memory.unanswered = start);
    }

    /// What came back has had its attempt: clocks may differ, and none may come without end.
    pub fn forget_recovery(&self, this: &Key) {
        self.remember(this, |memory| memory.recovered_at = None);
    }

    /// The Jobs' service account of a namespace is there.
    pub fn has_account(&self, namespace: &str) {
        lock(&self.accounts).insert(namespace.to_owned());
    }

    /// A look at a policy has succeeded.
    pub fn succeeded(&self, this: &Key) {
        if let Some(memory) = lock(&self.memory).get_mut(this) {
            memory.failures = None;
        }
    }

    /// A look at a policy has failed; gives how long to wait, by how often in a row it has. What fails before that time is
    /// over, because something has changed, makes it no longer.
    pub fn failed(
        &self,
        this: &Key,
        now: DateTime<Utc>,
        pause: impl FnOnce(u32) -> Duration,
    ) -> Duration {
        let mut memory = lock(&self.memory);
        // Of one that is gone nothing is remembered.
        let Some(memory) = memory.get_mut(this) else {
            return pause(1);
        };
        let count = match memory.failures {
            None => 1,
            Some((count, until)) if now < until => count,
            Some((count, _)) => count.saturating_add(1),
        };
        let pause = pause(count);
        memory.failures = Some((count, later(now, time_delta(pause))));
        pause
    }
}

/// An object with the status that was written last, until the watch has told of another version.
fn with_status<K: ResourceExt + Clone, S: Clone>(
    object: Arc<K>,
    written: &mut Option<Written<S>>,
    put: impl FnOnce(&mut K, S),
) -> Arc<K> {
    let version = object.resource_version();
    written.take_if(|w| w.uid != object.uid() || !w.over.contains(&version));
    match written {
        None => object,
        Some(last) => {
            let mut object = (*object).clone();
            put(&mut object, last.status.clone());
            Arc::new(object)
        }
    }
}

/// The Jobs that count: those of the policy itself, of its CronJobs and of its tasks, by their owner. Labels alone
/// make none: anybody can put them on.
fn own_jobs(
    tables: &Tables,
    this: &Key,
    policy: Option<&EtcdBackupPolicy>,
    tasks: &[Arc<EtcdBackupTask>],
    memory: &mut Memory,
    now: DateTime<Utc>,
) -> Vec<Arc<Job>> {
    let cron_jobs = tables.cron_jobs.of(this);
    let mut owners: BTreeSet<String> = tasks.iter().filter_map(|t| t.uid()).collect();
    if let Some(uid) = policy.and_then(|p| p.uid()) {
        let own = cron_jobs.iter().filter(|c| c.owner.as_ref() == Some(&uid));
        owners.extend(own.filter_map(|c| c.uid.clone()));
        owners.insert(uid);
    }
    let is_own = |job: &Job| super::names::owner(job).is_some_and(|o| owners.contains(o));
    let mut jobs = tables.jobs.of(this);
    jobs.retain(|job| is_own(job));
    memory.made.retain(|name, (_, at)| {
        let is_told = tables.jobs.get(&(this.0.clone(), name.clone())).is_some();
        !is_told && (now - *at).abs() < JOB_COMES
    });
    let made = memory.made.values().map(|(job, _)| job.clone());
    jobs.extend(made.filter(|job| is_own(job)));
    jobs
}

impl Tables {
    /// Whether what was written is among what is there.
    fn is_made(&self, this: &Key, applied: &Applied) -> bool {
        let made = [&self.cron_jobs, &self.followers];
        let mut made = made.into_iter().flat_map(|table| table.of(this));
        made.any(|m| m.uid == applied.uid)
    }

    fn facts(&self, policy: &EtcdBackupPolicy) -> LeaseFacts {
        let namespace = policy.namespace().unwrap_or_default();
        let (full, delta) = jobs::lease_names(policy);
        let lease = |name| self.leases.get(&(namespace.clone(), name)).map(|l| &**l);
        LeaseFacts::read(lease(full), lease(delta))
    }

    fn look_at_leases(&self, policy: &EtcdBackupPolicy, observed: &mut Observed) {
        observed.facts = self.facts(policy);
        let namespace = &observed.key.0;
        let (full, delta) = jobs::lease_names(policy);
        let of = |name: &String| (namespace.clone(), name.clone());
        observed.renewed = [&full, &delta].map(|name| self.renewed.get(&of(name)).copied());
        let locks = jobs::lock_leases(policy).into_iter();
        let names = locks.filter_map(|l| l.metadata.name).chain([full, delta]);
        let there = names.filter(|name| self.leases.get(&of(name)).is_some());
        observed.leases = there.collect();
    }

    fn look_at_rivals(&self, policy: &EtcdBackupPolicy, observed: &mut Observed) {
        for what in [Claimed::Store, Claimed::Leases] {
            let first = self.policies.members(&claims::rivals(policy, what)).next();
            if let Some(first) = first.filter(|first| **first != observed.key) {
                observed.holders.push((what, first.1.clone()));
            }
        }
        let everywhere = claims::everywhere(policy);
        let mut everywhere = self.policies.members(&everywhere);
        let (first, last) = (everywhere.next(), everywhere.next_back());
        let others = first.into_iter().chain(last);
        observed.is_shared = others.into_iter().any(|other| other.0 != observed.key.0);
    }
}

impl Memory {
    /// When what was written and no watch has told of counts as gone.
    fn look_again(&self, tables: &Tables, this: &Key) -> Option<DateTime<Utc>> {
        let made = self.made.values().map(|(_, at)| later(*at, JOB_COMES));
        let untold = self.applied.values().filter(|a| !tables.is_made(this, a));
        made.chain(untold.map(|a| later(a.at, WATCH_LAGS))).min()
    }

    /// When something came back. A spec that was changed after a failure may be what was missing.
    fn look_for_recovery(
        &mut self,
        policy: &EtcdBackupPolicy,
        now: DateTime<Utc>,
    ) -> Option<DateTime<Utc>> {
        let last = policy
            .status
            .as_ref()
            .and_then(|s| s.last_compaction.as_ref());
        let has_failed = last.is_some_and(|l| l.run.state == super::api::RunState::Failed);
        let generation = policy.metadata.generation.filter(|_| has_failed);
        let before = std::mem::replace(&mut self.failed_with, generation);
        if before.is_some() && generation.is_some() && before != generation {
            self.recovered_at = Some(now);
        }
        self.recovered_at
    }
}
