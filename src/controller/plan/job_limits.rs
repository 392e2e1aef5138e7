//! The limits on the number of unfinished Jobs of thresholds and tasks, and the order in which Jobs get
//! slots.
//!
//! No I/O, and the time is an argument. All state is in memory: it is rebuilt from the Jobs of each policy,
//! so a new controller knows as much as the one before it. Called by the reconciliation in `controller`
//! before it plans.

use crate::controller::names::Key;
use chrono::{DateTime, TimeDelta, Utc};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// A granted Job that the watch has not reported after this time was never created.
const GRANT_LASTS: TimeDelta = TimeDelta::minutes(2);
/// A requester that was called and has not asked again after this time has no use for the slot.
const CALL_LASTS: TimeDelta = TimeDelta::minutes(1);
/// The most Jobs of a policy that count: one of a threshold and one of a task. The controller never creates
/// more.
const MAX_JOBS_OF_POLICY: usize = 2;

/// The policy or task that needs a Job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Requester {
    /// A policy that has reached a threshold.
    Policy(Key),
    /// A task.
    Task {
        /// The task.
        task: Key,
        /// The policy of the task. The order of slots is by policy.
        policy: Key,
    },
}

impl Requester {
    /// Returns the policy whose reconciliation creates the Job.
    pub fn policy(&self) -> &Key {
        match self {
            Requester::Policy(policy) | Requester::Task { policy, .. } => policy,
        }
    }

    fn namespace(&self) -> &str {
        &self.policy().0
    }
}

/// A request for a job slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotRequest {
    /// The policy or task that needs the Job.
    pub requester: Requester,
    /// The namespace and name of the Job.
    pub job: Key,
    /// Whether the Job restores. Restores go first and have slots of their own.
    pub is_restore: bool,
}

/// A Job of a threshold or a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CountedJob {
    /// The namespace and name of the Job.
    pub job: Key,
    /// Whether the Job has ended, so that it needs no slot.
    pub finished: bool,
    /// Whether the Job restores.
    pub is_restore: bool,
    /// When the Job was created.
    pub created: Option<DateTime<Utc>>,
}

/// The numbers of a freeze: more Jobs run than the limit allows, because it was lowered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Freeze {
    /// How many Jobs run.
    pub active: usize,
    /// How many may run.
    pub cap: usize,
    /// New Jobs start when this many run, or fewer.
    pub until: usize,
}

/// The decision on a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SlotDecision {
    /// The Job may be created now. It counts from now on.
    Granted,
    /// The Job must wait. [`JobLimiter::call_next`] returns its policy when a slot is free.
    Wait {
        /// Why, for the task's status.
        reason: String,
        /// The freeze, if no Event has reported it yet.
        freeze: Option<Freeze>,
    },
}

#[derive(Debug, Clone)]
struct Waiter {
    requester: Requester,
    is_restore: bool,
    /// The number of the first request: waiters of one policy go in this order.
    sequence: u64,
    called_at: Option<DateTime<Utc>>,
}

impl Waiter {
    /// Whether the waiter was called and has not asked again for too long.
    fn has_missed_call(&self, now: DateTime<Utc>) -> bool {
        self.called_at
            .is_some_and(|at| now - at >= CALL_LASTS || at > now)
    }
}

/// A slot for a Job that is about to be created.
#[derive(Debug, Clone)]
struct Grant {
    requester: Requester,
    is_restore: bool,
    granted_at: DateTime<Utc>,
}

impl Grant {
    fn is_valid(&self, now: DateTime<Utc>) -> bool {
        (now - self.granted_at).abs() < GRANT_LASTS
    }
}

/// A number of unfinished or granted Jobs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct JobCount {
    ordinary: usize,
    restores: usize,
}

impl JobCount {
    fn one(is_restore: bool) -> JobCount {
        JobCount {
            ordinary: usize::from(!is_restore),
            restores: usize::from(is_restore),
        }
    }

    fn total(self) -> usize {
        self.ordinary + self.restores
    }

    fn add(&mut self, more: JobCount) {
        self.ordinary += more.ordinary;
        self.restores += more.restores;
    }
}

/// The limits, the Jobs that count, and the requesters that wait for a slot.
///
/// - Restores go first. Then the namespace with the fewest Jobs is next; in it the policy whose last grant is
///   the longest ago; and of one policy the oldest request.
/// - If several namespaces have policies, each may use half of the slots, and no namespace counts for more,
///   whatever Jobs somebody else creates there.
/// - Restores have additional slots: a tenth of the limit, at least one.
/// - A freeze begins if more Jobs run than the limit allows, for example because it was lowered. Then only
///   restores are granted, until no more than nine tenths of the limit run and at least one slot is free. The
///   distance keeps the limiter from freezing again with each Job.
#[derive(Debug, Default)]
pub struct JobLimiter {
    /// The limit over all policies; 0 for none.
    cap: usize,
    /// The limit for each namespace; 0 for half of `cap`, if several namespaces have policies.
    namespace_cap: usize,
    /// The unfinished Jobs of each policy, and whether each is a restore.
    running: HashMap<Key, BTreeMap<Key, bool>>,
    policies_by_namespace: BTreeMap<String, usize>,
    /// The unfinished and the granted Jobs of each namespace.
    used: BTreeMap<String, JobCount>,
    /// The grants whose Jobs the watch has not reported yet, by Job.
    grants: BTreeMap<Key, Grant>,
    /// The waiters by namespace and policy.
    waiters: BTreeMap<String, BTreeMap<Key, Vec<Waiter>>>,
    /// When each policy was granted a Job last. The sequence number orders grants of the same second.
    last_grants: BTreeMap<Key, (DateTime<Utc>, u64)>,
    sequence: u64,
    is_frozen: bool,
    is_freeze_reported: bool,
}

impl JobLimiter {
    /// Creates a limiter. For `cap` 0 is no limit; for `namespace_cap` it is half of `cap`.
    pub fn new(cap: usize, namespace_cap: usize) -> Self {
        JobLimiter {
            cap,
            namespace_cap,
            ..JobLimiter::default()
        }
    }

    /// Replaces the known Jobs of a policy.
    pub fn set_jobs(&mut self, policy: &Key, jobs: &[CountedJob], now: DateTime<Utc>) {
        for job in jobs {
            if let Some(grant) = self.grants.remove(&job.job) {
                self.subtract_used(grant.requester.namespace(), JobCount::one(grant.is_restore));
            }
            if let Some(created) = job.created {
                let last = self.last_grants.entry(policy.clone()).or_default();
                *last = (*last).max((created.min(now), 0));
            }
        }
        let running: BTreeMap<Key, bool> = jobs
            .iter()
            .filter(|j| !j.finished)
            .map(|j| (j.job.clone(), j.is_restore))
            .collect();
        self.add_used(&policy.0, count_of_policy(&running));
        match self.running.insert(policy.clone(), running) {
            Some(before) => self.subtract_used(&policy.0, count_of_policy(&before)),
            None => {
                *self
                    .policies_by_namespace
                    .entry(policy.0.clone())
                    .or_default() += 1;
            }
        }
        self.update(now);
    }

    /// Forgets a policy that was deleted together with its tasks.
    pub fn forget_policy(&mut self, policy: &Key, now: DateTime<Utc>) {
        self.set_jobs(policy, &[], now);
        self.running.remove(policy);
        self.last_grants.remove(policy);
        self.retain_waiters(policy, |_| false);
        if let Some(policies) = self.policies_by_namespace.get_mut(&policy.0) {
            *policies -= 1;
            if *policies == 0 {
                self.policies_by_namespace.remove(&policy.0);
            }
        }
    }

    /// Decides on all requests of a policy, by Job. Forgets waiters of the policy that are not among them.
    pub fn request(
        &mut self,
        policy: &Key,
        requests: &[SlotRequest],
        now: DateTime<Utc>,
    ) -> BTreeMap<Key, SlotDecision> {
        self.retain_waiters(policy, |waiter| {
            requests.iter().any(|r| r.requester == *waiter)
        });
        let mut decisions = BTreeMap::new();
        for request in requests {
            decisions.insert(request.job.clone(), self.request_one(request, now));
        }
        decisions
    }

    fn request_one(&mut self, request: &SlotRequest, now: DateTime<Utc>) -> SlotDecision {
        let requester = &request.requester;
        let policy = requester.policy();
        let running = self.running.get(policy);
        let is_counted = running.is_some_and(|jobs| jobs.contains_key(&request.job))
            || self.grants.contains_key(&request.job);
        if is_counted {
            self.retain_waiters(policy, |waiter| waiter != requester);
            return SlotDecision::Granted;
        }
        self.add_waiter(request);
        if self.next_requesters(now).contains(requester) {
            self.retain_waiters(policy, |waiter| waiter != requester);
            self.grant(request, now);
            return SlotDecision::Granted;
        }
        let freeze = (self.is_frozen && !self.is_freeze_reported).then(|| Freeze {
            active: self.used_in_all().total(),
            cap: self.cap,
            until: self.thaws_at(),
        });
        self.is_freeze_reported |= freeze.is_some();
        SlotDecision::Wait {
            reason: self.reason_to_wait(requester.namespace()),
            freeze,
        }
    }

    fn add_waiter(&mut self, request: &SlotRequest) {
        self.sequence += 1;
        let requester = &request.requester;
        let policy = requester.policy();
        let by_policy = self.waiters.entry(policy.0.clone()).or_default();
        let waiters = by_policy.entry(policy.clone()).or_default();
        match waiters.iter_mut().find(|w| w.requester == *requester) {
            Some(waiter) => waiter.called_at = None,
            None => waiters.push(Waiter {
                requester: requester.clone(),
                is_restore: request.is_restore,
                sequence: self.sequence,
                called_at: None,
            }),
        }
    }

    fn grant(&mut self, request: &SlotRequest, now: DateTime<Utc>) {
        self.sequence += 1;
        let requester = &request.requester;
        self.last_grants
            .insert(requester.policy().clone(), (now, self.sequence));
        self.add_used(requester.namespace(), JobCount::one(request.is_restore));
        let grant = Grant {
            requester: requester.clone(),
            is_restore: request.is_restore,
            granted_at: now,
        };
        self.grants.insert(request.job.clone(), grant);
    }

    /// Returns why a requester waits. Contains no current numbers: they would change the task's status each
    /// time.
    fn reason_to_wait(&self, namespace: &str) -> String {
        let cap = self.cap;
        let namespace_cap = self.namespace_cap();
        if self.is_frozen {
            let left = or_fewer(self.thaws_at());
            format!("more than {cap} Jobs are running: new ones start when {left} left")
        } else if self.used_in(namespace) >= namespace_cap {
            format!(
                "at most {namespace_cap} Jobs of a namespace may run at once: this one starts when another one of the namespace has ended"
            )
        } else {
            format!("at most {cap} Jobs may run at once: this one waits for its turn")
        }
    }

    /// Takes back the grant of a Job that could not be created.
    pub fn release(&mut self, job: &Key, now: DateTime<Utc>) {
        if let Some(grant) = self.grants.remove(job) {
            self.subtract_used(grant.requester.namespace(), JobCount::one(grant.is_restore));
            self.update(now);
        }
    }

    /// Returns the policies whose waiters may have a slot now, so that they request again. A waiter is called
    /// only once for each request.
    pub fn call_next(&mut self, now: DateTime<Utc>) -> Vec<Key> {
        if self.waiters.is_empty() {
            return Vec::new();
        }
        self.update(now);
        let mut called = Vec::new();
        for requester in self.next_requesters(now) {
            let policy = requester.policy();
            let by_policy = self.waiters.get_mut(&policy.0);
            let waiters = by_policy.and_then(|w| w.get_mut(policy));
            let mut waiters = waiters.into_iter().flatten();
            if let Some(waiter) = waiters.find(|w| w.requester == requester)
                && waiter.called_at.is_none()
            {
                waiter.called_at = Some(now);
                called.push(policy.clone());
            }
        }
        called
    }

    /// Keeps those waiters of a policy for which `is_kept` returns true.
    fn retain_waiters(&mut self, policy: &Key, is_kept: impl Fn(&Requester) -> bool) {
        let Some(by_policy) = self.waiters.get_mut(&policy.0) else {
            return;
        };
        if let Some(waiters) = by_policy.get_mut(policy) {
            waiters.retain(|w| is_kept(&w.requester));
            if waiters.is_empty() {
                by_policy.remove(policy);
            }
        }
        if by_policy.is_empty() {
            self.waiters.remove(&policy.0);
        }
    }

    fn add_used(&mut self, namespace: &str, more: JobCount) {
        let used = self.used.entry(namespace.to_owned()).or_default();
        used.add(more);
    }

    fn subtract_used(&mut self, namespace: &str, less: JobCount) {
        if let Some(used) = self.used.get_mut(namespace) {
            used.ordinary -= less.ordinary;
            used.restores -= less.restores;
            if *used == JobCount::default() {
                self.used.remove(namespace);
            }
        }
    }

    fn used_in(&self, namespace: &str) -> usize {
        self.used.get(namespace).map_or(0, |used| used.total())
    }

    /// Counts the Jobs of all namespaces, of none more than it may have.
    fn used_in_all(&self) -> JobCount {
        let namespace_cap = self.namespace_cap();
        let mut total = JobCount::default();
        for used in self.used.values() {
            let ordinary = used.ordinary.min(namespace_cap);
            total.ordinary += ordinary;
            let restores = (namespace_cap - ordinary).max(self.restores_beyond_namespace_cap());
            total.restores += used.restores.min(restores);
        }
        total
    }

    /// Drops expired grants, and begins or ends a freeze.
    fn update(&mut self, now: DateTime<Utc>) {
        let expired: Vec<(Key, Grant)> = self
            .grants
            .extract_if(.., |_, grant| !grant.is_valid(now))
            .collect();
        for (_, grant) in expired {
            self.subtract_used(grant.requester.namespace(), JobCount::one(grant.is_restore));
        }
        if self.cap == 0 {
            return;
        }
        let ordinary = self.used_in_all().ordinary;
        if ordinary > self.cap {
            self.is_frozen = true;
        } else if self.is_frozen && ordinary <= self.thaws_at() {
            self.is_frozen = false;
            self.is_freeze_reported = false;
        }
    }

    /// The number of Jobs at which a freeze ends.
    fn thaws_at(&self) -> usize {
        self.cap - (self.cap / 10).max(1)
    }

    /// The number of slots beyond the cap that only restores may use.
    fn restore_slots(&self) -> usize {
        (self.cap / 10).max(1)
    }

    /// The number of restores that may run in a namespace that has used up its own limit.
    fn restores_beyond_namespace_cap(&self) -> usize {
        self.restore_slots().div_ceil(2)
    }

    /// The limit for each namespace.
    fn namespace_cap(&self) -> usize {
        let namespaces = self.policies_by_namespace.len();
        match self.namespace_cap {
            0 if namespaces <= 1 || self.cap == 0 => usize::MAX,
            0 => self.cap.div_ceil(2),
            namespace_cap => namespace_cap,
        }
    }

    /// Whether a slot is free, if `more` Jobs are about to start.
    fn has_free_slot(&self, is_restore: bool, more: usize) -> bool {
        let used = self.used_in_all();
        match (self.cap, is_restore) {
            (0, _) => true,
            (cap, true) => {
                let ordinary = used.ordinary.min(cap);
                ordinary + used.restores + more < cap + self.restore_slots()
            }
            (cap, false) => !self.is_frozen && used.total() + more < cap,
        }
    }

    /// Returns the number of Jobs of a namespace, with `more` that are about to start; `None` if it may have
    /// no more.
    fn jobs_if_below_cap(
        &self,
        namespace: &str,
        is_restore: bool,
        more: JobCount,
    ) -> Option<usize> {
        let mut used = self.used.get(namespace).copied().unwrap_or_default();
        used.add(more);
        let has_restore_slot = is_restore && used.restores < self.restores_beyond_namespace_cap();
        (used.total() < self.namespace_cap() || has_restore_slot).then_some(used.total())
    }

    /// Returns the waiters that may have a slot now, in order.
    fn next_requesters(&self, now: DateTime<Utc>) -> Vec<Requester> {
        let mut next = Vec::new();
        let mut about_to_start: BTreeMap<&str, JobCount> = BTreeMap::new();
        for is_restore in [true, false] {
            if !self.has_free_slot(is_restore, next.len()) {
                continue;
            }
            let mut queues = self.queues(is_restore, now);
            while self.has_free_slot(is_restore, next.len()) {
                // Next is the namespace with the fewest Jobs. If several have as few, the order of their
                // first waiters decides.
                let mut first = None;
                for (namespace, queue) in &queues {
                    let more = about_to_start.get(namespace).copied().unwrap_or_default();
                    if let Some(jobs) = self.jobs_if_below_cap(namespace, is_restore, more)
                        && let Some(waiter) = queue.last()
                    {
                        let order = (jobs, self.order(waiter));
                        if first.is_none_or(|(least, _)| order < least) {
                            first = Some((order, *namespace));
                        }
                    }
                }
                let Some((_, namespace)) = first else {
                    break;
                };
                let queue = queues.get_mut(namespace);
                let waiter = queue.and_then(Vec::pop);
                next.extend(waiter.map(|w| w.requester.clone()));
                let more = about_to_start.entry(namespace).or_default();
                more.add(JobCount::one(is_restore));
            }
        }
        next
    }

    /// Returns the waiters of each namespace that is below its limit, the next one last.
    fn queues(&self, is_restore: bool, now: DateTime<Utc>) -> BTreeMap<&str, Vec<&Waiter>> {
        let mut queues = BTreeMap::new();
        for (namespace, by_policy) in &self.waiters {
            let jobs = self.jobs_if_below_cap(namespace, is_restore, JobCount::default());
            if jobs.is_none() {
                continue;
            }
            let mut queue: Vec<&Waiter> = by_policy
                .values()
                .flatten()
                .filter(|w| w.is_restore == is_restore && !w.has_missed_call(now))
                .collect();
            queue.sort_by_key(|w| Reverse(self.order(w)));
            queues.insert(namespace.as_str(), queue);
        }
        queues
    }

    /// The order of waiters: by the last grant of the policy, then by the first request.
    fn order(&self, waiter: &Waiter) -> (Option<(DateTime<Utc>, u64)>, u64) {
        let last_grant = self.last_grants.get(waiter.requester.policy()).copied();
        (last_grant, waiter.sequence)
    }
}

/// Describes a number of Jobs at which a freeze ends: `3 or fewer are`.
pub(super) fn or_fewer(jobs: usize) -> String {
    match jobs {
        0 => "none is".to_owned(),
        _ => format!("{jobs} or fewer are"),
    }
}

/// Counts the Jobs of a policy, up to those that the controller itself creates.
fn count_of_policy(running: &BTreeMap<Key, bool>) -> JobCount {
    let restores = running.values().filter(|is_restore| **is_restore).count();
    let restores = restores.min(1);
    JobCount {
        ordinary: (running.len() - restores).min(MAX_JOBS_OF_POLICY - restores),
        restores,
    }
}

#[cfg(test)]
mod tests;
