//! All that is known of one policy and its tasks at one moment: the only input of a decision, beside options and time.
//!
//! Reading the caches sends no request. Decides nothing.

pub mod leases;
pub mod outcome;
pub mod start;
pub mod threshold_jobs;

use super::api::{EtcdBackupPolicy, EtcdBackupTask, LastRun, RunState};
use super::cluster::{Group, Tables, Workload};
use super::jobs::{self, WorkKind};
use super::names::{NamespacedName, is_owned, owner};
use super::times::created;
use chrono::{DateTime, Utc};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use leases::LeaseFacts;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// An action that was attempted in this reconciliation, so that it is not attempted again in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The action, as [`Action::description`](super::decide::Action::description) names it.
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

/// Another policy of the namespace with the same store or the same snapshot Leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// The name of the other policy.
    pub name: String,
    /// Whether the other policy is older.
    pub is_older: bool,
}

/// All that is known of one policy and its tasks.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The policy's namespace and name. The policy may not exist.
    pub key: NamespacedName,
    /// The policy; `None` if it does not exist or is being deleted.
    pub policy: Option<Arc<EtcdBackupPolicy>>,
    /// The tasks that name the policy.
    pub tasks: Vec<Arc<EtcdBackupTask>>,
    /// The Jobs of the policy, its CronJobs or its tasks.
    pub jobs: Vec<Arc<Job>>,
    /// The names of Jobs that may exist although nobody has seen them: the request to create them got no response.
    pub unconfirmed_jobs: Vec<String>,
    /// The Pods with the policy's label.
    pub pods: Vec<Arc<Pod>>,
    /// The CronJobs with the policy's label.
    pub cron_jobs: Vec<Arc<Workload<CronJob>>>,
    /// The followers with the policy's label.
    pub followers: Vec<Arc<Workload<Deployment>>>,
    /// The contents of the snapshot Leases.
    pub leases: LeaseFacts,
    /// The names of the policy's Leases that exist.
    pub existing_leases: BTreeSet<String>,
    /// Whether the Jobs' ServiceAccount is known to exist.
    pub has_account: bool,
    /// The oldest other policy of the namespace with the same store.
    pub same_store: Option<Neighbour>,
    /// The oldest other policy of the namespace with the same snapshot Leases.
    pub same_leases: Option<Neighbour>,
    /// When the etcd's Service became ready again.
    pub recovered_at: Option<DateTime<Utc>>,
    /// The newest Warning of Kubernetes about a Job or a Pod that has not started, by its name.
    pub warnings: BTreeMap<String, String>,
    /// The actions that were attempted in this reconciliation.
    pub attempts: Vec<Attempt>,
}

impl Facts {
    /// Reads what the caches say about a policy. `unseen` are Jobs that were created and that no cache shows yet.
    pub fn read(tables: &Tables, key: &NamespacedName, unseen: Vec<Arc<Job>>) -> Facts {
        let group = Group::Policy(key.clone());
        let policy = tables.policies.get(key).cloned();
        let policy = policy.filter(|p| p.metadata.deletion_timestamp.is_none());
        let mut facts = Facts {
            key: key.clone(),
            tasks: tables.tasks.in_group(&group).cloned().collect(),
            pods: tables.pods.in_group(&group).cloned().collect(),
            cron_jobs: tables.cron_jobs.in_group(&group).cloned().collect(),
            followers: tables.followers.in_group(&group).cloned().collect(),
            policy,
            ..Facts::default()
        };
        let owners = facts.job_owners();
        let unseen = unseen.iter().filter(|job| {
            let name = NamespacedName::of(&***job);
            tables.jobs.get(&name).is_none()
        });
        let jobs = tables.jobs.in_group(&group).chain(unseen);
        let own_jobs = jobs.filter(|job| owner(&***job).is_some_and(|uid| owners.contains(uid)));
        facts.jobs = own_jobs.cloned().collect();
        if let Some(policy) = facts.policy.clone() {
            facts.read_policy(tables, &policy);
        }
        facts
    }

    /// Returns the UIDs of the owners whose Jobs count: the policy, its CronJobs and its tasks. The labels of a Job
    /// do not count, because anyone can set them.
    fn job_owners(&self) -> BTreeSet<String> {
        let mut owners: BTreeSet<String> = self.tasks.iter().filter_map(|t| t.uid()).collect();
        if let Some(uid) = self.policy.as_ref().and_then(|p| p.uid()) {
            let cron_jobs = self.cron_jobs.iter();
            let own = cron_jobs.filter(|cron_job| cron_job.is_owned_by(Some(&uid)));
            owners.extend(own.filter_map(|cron_job| cron_job.uid().map(str::to_owned)));
            owners.insert(uid);
        }
        owners
    }

    fn read_policy(&mut self, tables: &Tables, policy: &EtcdBackupPolicy) {
        self.leases = LeaseFacts::of(tables, policy);
        let (full, delta) = jobs::lease_names(policy);
        let locks = jobs::lock_leases(policy).into_iter();
        for name in locks.map(|lease| lease.name_any()).chain([full, delta]) {
            if tables.leases.get(&self.in_namespace(&name)).is_some() {
                self.existing_leases.insert(name);
            }
        }
        let location = jobs::store_location(&policy.spec.store);
        self.same_store = neighbour(tables, policy, Group::Store(self.in_namespace(&location)));
        let prefix = jobs::lease_prefix(policy);
        self.same_leases = neighbour(tables, policy, Group::Leases(self.in_namespace(prefix)));
        for group in tables.policies.groups_of(policy) {
            if matches!(group, Group::Service(_)) {
                let slices = tables.slices.in_group(&group);
                let recovered_at = slices.filter_map(|slice| slice.recovered_at).max();
                self.recovered_at = self.recovered_at.max(recovered_at);
            }
        }
    }

    fn in_namespace(&self, name: &str) -> NamespacedName {
        NamespacedName::new(&self.key.namespace, name)
    }

    /// Returns the Pods of a Job.
    pub fn pods_of(&self, job: &Job) -> Vec<&Pod> {
        let pods = self.pods.iter().map(|pod| &**pod);
        pods.filter(|pod| is_owned(*pod, job)).collect()
    }

    /// Returns the Pods of the follower.
    pub fn follower_pods(&self) -> impl Iterator<Item = &Pod> {
        let pods = self.pods.iter().map(|pod| &**pod);
        pods.filter(|pod| WorkKind::Follow.is_of(*pod))
    }

    /// Returns the Job of this name.
    pub fn job(&self, name: &str) -> Option<&Arc<Job>> {
        self.jobs.iter().find(|job| job.name_any() == name)
    }

    /// Returns the state of a Job, or its result. If its Pod has not started, the message says why.
    pub fn run(&self, job: &Job) -> LastRun {
        let pods = self.pods_of(job);
        let mut run = outcome::last_run(job, &pods);
        if run.state == RunState::Running {
            run.message = start::why_not_started(job, &pods, &self.warnings);
        }
        run
    }

    /// Returns the earlier attempt at an action in this reconciliation.
    pub fn attempt(&self, description: &str) -> Option<&Attempt> {
        self.attempts.iter().find(|a| a.action == description)
    }
}

/// Returns the oldest other policy of a group.
fn neighbour(tables: &Tables, policy: &EtcdBackupPolicy, group: Group) -> Option<Neighbour> {
    let age = |policy: &EtcdBackupPolicy| {
        let created = created(&policy.metadata);
        (created, policy.name_any())
    };
    let mut oldest: Option<&EtcdBackupPolicy> = None;
    for other in tables.policies.in_group(&group) {
        let counts =
            other.name_any() != policy.name_any() && other.metadata.deletion_timestamp.is_none();
        if counts && oldest.is_none_or(|oldest| age(other) < age(oldest)) {
            oldest = Some(other);
        }
    }
    let oldest = oldest?;
    Some(Neighbour {
        name: oldest.name_any(),
        is_older: age(oldest) < age(policy),
    })
}
