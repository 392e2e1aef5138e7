//! The limits on the number of unfinished Jobs of thresholds and tasks.
//!
//! A Job is counted and its slot is taken under one mutex. A Job that was just created counts until the cache shows
//! it, and so does one whose creation got no response. A slot that comes free goes to the policy that has waited
//! longest. Restores do not wait, and do not count.

use super::api::TaskType;
use super::cluster::{Group, Tables};
use super::facts::outcome;
use super::facts::threshold_jobs::{is_of_task, is_of_threshold};
use super::jobs;
use super::names::{NamespacedName, label, owner};
use chrono::{DateTime, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// A created Job that the watch does not report within this time counts as deleted.
const UNSEEN_LIFETIME: TimeDelta = TimeDelta::minutes(2);
/// A policy that was woken and has not asked again after this time has no use for the slot.
const WAKE_LASTS: TimeDelta = TimeDelta::seconds(30);
/// The most Jobs of a policy that count: one of a threshold and one of a task. The controller never creates more.
const MAX_JOBS_OF_POLICY: usize = 2;

/// A Job that this controller has begun to create.
#[derive(Debug, Clone)]
struct Started {
    policy: NamespacedName,
    counts: bool,
    at: DateTime<Utc>,
    /// The Job, once the API server has confirmed it.
    job: Option<Arc<Job>>,
}

/// A policy that waits for a slot.
#[derive(Debug, Clone)]
struct Waiter {
    since: DateTime<Utc>,
    woken_at: Option<DateTime<Utc>>,
}

/// The limits, the Jobs that the caches do not show yet, and the policies that wait.
#[derive(Debug, Default)]
pub struct Limits {
    /// The limit over all policies; 0 for none.
    max_jobs: usize,
    /// The limit for each namespace; 0 for half of `max_jobs`, if several namespaces have policies.
    max_jobs_per_namespace: usize,
    started: HashMap<NamespacedName, Started>,
    waiters: HashMap<NamespacedName, Waiter>,
}

/// The Jobs that count, by namespace.
#[derive(Debug, Default)]
struct Used {
    by_namespace: BTreeMap<String, usize>,
    total: usize,
    per_namespace: usize,
}

impl Used {
    fn has_room(&self, namespace: &str, max_jobs: usize) -> bool {
        let own = self
            .by_namespace
            .get(namespace)
            .copied()
            .unwrap_or_default();
        (max_jobs == 0 || self.total < max_jobs) && own < self.per_namespace
    }

    /// Counts Jobs of a namespace, which never count for more than its limit.
    fn add(&mut self, namespace: &str, jobs: usize) {
        let own = self.by_namespace.entry(namespace.to_owned()).or_default();
        let more = jobs.min(self.per_namespace.saturating_sub(*own));
        *own += more;
        self.total += more;
    }
}

impl Limits {
    /// Returns limits without Jobs. 0 for `max_jobs` is no limit, for `max_jobs_per_namespace` half of `max_jobs`.
    pub fn new(max_jobs: u32, max_jobs_per_namespace: u32) -> Self {
        let limit = |n| usize::try_from(n).unwrap_or(usize::MAX);
        Limits {
            max_jobs: limit(max_jobs),
            max_jobs_per_namespace: limit(max_jobs_per_namespace),
            ..Limits::default()
        }
    }

    /// Takes a slot for a Job that is about to be created, or returns why the policy has to wait. The reason has no
    /// current numbers: they would change the status each time.
    pub fn take_slot(
        &mut self,
        tables: &Tables,
        policy: &NamespacedName,
        job: &Job,
        now: DateTime<Utc>,
    ) -> Result<(), String> {
        let name = NamespacedName::of(job);
        let counts = counts(job);
        if counts && !self.started.contains_key(&name) {
            let waiter = self.waiters.entry(policy.clone()).or_insert(Waiter {
                since: now,
                woken_at: None,
            });
            waiter.woken_at = None;
            let used = self.used(tables);
            let next = self.next_waiters(&used, now);
            if !next.contains(policy) {
                return Err(self.reason_to_wait(&used, &policy.namespace));
            }
            self.waiters.remove(policy);
        }
        let started = Started {
            policy: policy.clone(),
            counts,
            at: now,
            job: None,
        };
        self.started.insert(name, started);
        Ok(())
    }

    /// Records the answer to the request to create a Job: the Job, or `None` if it certainly was not created.
    pub fn answered(&mut self, name: &NamespacedName, job: Option<Job>) {
        match job {
            None => _ = self.started.remove(name),
            Some(job) => {
                if let Some(started) = self.started.get_mut(name) {
                    started.job = Some(Arc::new(job));
                }
            }
        }
    }

    /// Forgets Jobs that the cache shows, and those that it should show by now.
    pub fn forget_seen(&mut self, tables: &Tables, now: DateTime<Utc>) {
        self.started.retain(|name, started| {
            tables.jobs.get(name).is_none() && (now - started.at).abs() < UNSEEN_LIFETIME
        });
    }

    /// Returns the Jobs of a policy that this controller has begun to create and no cache shows: those that the API
    /// server has confirmed, and the names of the others.
    pub fn unseen(&self, policy: &NamespacedName) -> (Vec<Arc<Job>>, Vec<NamespacedName>) {
        let (mut confirmed, mut unconfirmed) = (Vec::new(), Vec::new());
        for (name, started) in &self.started {
            if started.policy == *policy {
                match &started.job {
                    Some(job) => confirmed.push(job.clone()),
                    None => unconfirmed.push(name.clone()),
                }
            }
        }
        (confirmed, unconfirmed)
    }

    /// Forgets that a policy waits for a slot.
    pub fn stop_waiting(&mut self, policy: &NamespacedName) {
        self.waiters.remove(policy);
    }

    /// Returns the waiting policies that may have a slot now, so that they ask again. A policy is woken only once for
    /// each time that it asked.
    pub fn wake(&mut self, tables: &Tables, now: DateTime<Utc>) -> Vec<NamespacedName> {
        if self.waiters.is_empty() {
            return Vec::new();
        }
        let mut woken = Vec::new();
        for policy in self.next_waiters(&self.used(tables), now) {
            if let Some(waiter) = self.waiters.get_mut(&policy)
                && waiter.woken_at.is_none()
            {
                waiter.woken_at = Some(now);
                woken.push(policy);
            }
        }
        woken
    }

    /// Returns the waiting policies that may have a slot now, the one that has waited longest first.
    fn next_waiters(&self, used: &Used, now: DateTime<Utc>) -> Vec<NamespacedName> {
        let is_awake = |waiter: &Waiter| {
            waiter
                .woken_at
                .is_none_or(|at| (now - at).abs() < WAKE_LASTS)
        };
        let waiters = self.waiters.iter().filter(|(_, waiter)| is_awake(waiter));
        let mut waiters: Vec<(DateTime<Utc>, &NamespacedName)> = waiters
            .map(|(policy, waiter)| (waiter.since, policy))
            .collect();
        waiters.sort();
        let mut used = Used {
            by_namespace: used.by_namespace.clone(),
            ..*used
        };
        let mut next = Vec::new();
        for (_, policy) in waiters {
            if used.has_room(&policy.namespace, self.max_jobs) {
                used.add(&policy.namespace, 1);
                next.push(policy.clone());
            }
        }
        next
    }

    /// Counts the unfinished Jobs. Jobs that no policy or task owns do not count, and a policy or namespace never counts
    /// for more than its limit, whatever Jobs somebody else creates there.
    fn used(&self, tables: &Tables) -> Used {
        let mut used = Used {
            per_namespace: self.limit_per_namespace(tables),
            ..Used::default()
        };
        let mut by_policy: BTreeMap<NamespacedName, usize> = BTreeMap::new();
        for job in tables.jobs.in_group(&Group::Unfinished) {
            if counts(job)
                && let Some(policy) = owning_policy(tables, job)
            {
                *by_policy.entry(policy).or_default() += 1;
            }
        }
        for (name, started) in &self.started {
            if started.counts && tables.jobs.get(name).is_none() {
                *by_policy.entry(started.policy.clone()).or_default() += 1;
            }
        }
        for (policy, jobs) in by_policy {
            used.add(&policy.namespace, jobs.min(MAX_JOBS_OF_POLICY));
        }
        used
    }

    fn limit_per_namespace(&self, tables: &Tables) -> usize {
        if self.max_jobs_per_namespace > 0 {
            return self.max_jobs_per_namespace;
        }
        let mut namespaces = tables.policies.all().map(|(name, _)| &name.namespace);
        let first = namespaces.next();
        if self.max_jobs == 0 || namespaces.all(|namespace| Some(namespace) == first) {
            return usize::MAX;
        }
        self.max_jobs.div_ceil(2)
    }

    fn reason_to_wait(&self, used: &Used, namespace: &str) -> String {
        let own = used
            .by_namespace
            .get(namespace)
            .copied()
            .unwrap_or_default();
        let limit = used.per_namespace;
        if own >= limit {
            format!(
                "at most {limit} Jobs of a namespace may run at once: this one starts when another one of the namespace has ended"
            )
        } else {
            let limit = self.max_jobs;
            format!(
                "at most {limit} Jobs may run at once: this one waits until one of them has ended"
            )
        }
    }
}

/// Returns whether a Job counts for the limits. A Job that a user has suspended has no Pods, and may never end.
fn counts(job: &Job) -> bool {
    let is_restore = jobs::is_of_task_type(job, TaskType::Restore);
    (is_of_threshold(job) || is_of_task(job)) && !outcome::is_suspended(job) && !is_restore
}

/// Returns the policy of a Job, if the policy or one of its tasks owns the Job.
fn owning_policy(tables: &Tables, job: &Job) -> Option<NamespacedName> {
    let namespace = job.namespace()?;
    let policy = NamespacedName::new(&namespace, label(job, jobs::LABEL_POLICY)?);
    let owner = owner(job)?;
    let task = label(job, jobs::LABEL_TASK).map(|task| NamespacedName::new(&namespace, task));
    let task = task.and_then(|task| tables.tasks.get(&task)?.uid());
    let owners: BTreeSet<String> = tables
        .policies
        .get(&policy)
        .and_then(|policy| policy.uid())
        .into_iter()
        .chain(task)
        .collect();
    owners.contains(owner).then_some(policy)
}

#[cfg(test)]
mod tests;
