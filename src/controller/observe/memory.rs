//! What the controller remembers of its own writes until the watches confirm them.
//!
//! Without it a reconcile could act on an old object, because a watch may be seconds behind. Nothing here
//! must survive a restart: another replica plans from the API server alone. Called by `observe`.

use super::Tables;
use super::threshold_jobs::ThresholdStart;
use crate::controller::api::{
    EtcdBackupPolicy, EtcdBackupPolicyStatus, EtcdBackupTask, EtcdBackupTaskStatus, RunState,
};
use crate::controller::names::{Key, owner};
use crate::controller::times::{later, time_delta};
use chrono::{DateTime, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// A watch is expected to report a write within this time.
pub const WATCH_DELAY: TimeDelta = TimeDelta::seconds(10);
/// A created Job that no watch reports within this time counts as deleted.
pub const UNSEEN_JOB_LIFETIME: TimeDelta = TimeDelta::minutes(2);

/// The last status that this controller wrote to an object. It is used in place of the watched status until the
/// watch reports a version that is not in `replaced`.
#[derive(Debug, Clone)]
pub(super) struct WrittenStatus<S> {
    uid: Option<String>,
    /// The versions that this status replaces: the one that the watch had reported at the first write, and
    /// those that the controller's writes have made since.
    replaced: Vec<Option<String>>,
    status: S,
}

impl<S: Clone> WrittenStatus<S> {
    /// Records a write. `watched_version` is the version that the watch has reported, `written` the object
    /// that the API server returned.
    pub fn new<K: ResourceExt>(
        previous: Option<Self>,
        status: &S,
        watched_version: Option<String>,
        written: &K,
    ) -> Self {
        let uid = written.uid();
        let mut replaced = match previous {
            Some(p) if p.uid == uid && p.replaced.contains(&watched_version) => p.replaced,
            _ => vec![watched_version],
        };
        replaced.push(written.resource_version());
        WrittenStatus {
            uid,
            replaced,
            status: status.clone(),
        }
    }
}

/// Returns an object with the status that was written last. Forgets that status if the watch has reported a
/// newer version.
fn with_status<K: ResourceExt + Clone, S: Clone>(
    object: Arc<K>,
    written: &mut Option<WrittenStatus<S>>,
    set_status: impl FnOnce(&mut K, S),
) -> Arc<K> {
    let version = object.resource_version();
    written.take_if(|w| w.uid != object.uid() || !w.replaced.contains(&version));
    match written {
        None => object,
        Some(written) => {
            let mut object = (*object).clone();
            set_status(&mut object, written.status.clone());
            Arc::new(object)
        }
    }
}

/// The result of a server-side apply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppliedObject {
    /// The hash of the object that was applied.
    pub hash: String,
    /// The UID of the object.
    pub uid: Option<String>,
    /// The generation of the object after the write.
    pub generation: Option<i64>,
    /// The time of the write.
    pub at: DateTime<Utc>,
}

/// The failed reconciles of a policy since the last success.
#[derive(Debug, Clone, Copy)]
struct Failures {
    count: u32,
    /// The end of the current back-off.
    until: DateTime<Utc>,
}

/// The memory for one policy.
#[derive(Debug, Default)]
pub(super) struct PolicyMemory {
    pub status: Option<WrittenStatus<EtcdBackupPolicyStatus>>,
    /// By the name of the task.
    pub task_statuses: BTreeMap<String, WrittenStatus<EtcdBackupTaskStatus>>,
    /// Jobs that were created, by name, each with the time.
    pub created_jobs: BTreeMap<String, (Arc<Job>, DateTime<Utc>)>,
    /// By kind and name.
    pub applied: BTreeMap<(String, String), AppliedObject>,
    /// The threshold Job whose creation got no answer.
    pub unconfirmed_start: Option<ThresholdStart>,
    /// When something that Jobs depend on came back or was corrected.
    pub recovered_at: Option<DateTime<Utc>>,
    /// The spec's generation at the last reconcile; `None` unless the last compaction had failed then.
    generation_at_failure: Option<i64>,
    failures: Option<Failures>,
}

impl PolicyMemory {
    /// Returns the policy with the status that was written last.
    pub fn policy_with_status(&mut self, policy: Arc<EtcdBackupPolicy>) -> Arc<EtcdBackupPolicy> {
        with_status(policy, &mut self.status, |p, s| p.status = Some(s))
    }

    /// Returns the tasks with the statuses that were written last. Forgets those of other tasks.
    pub fn tasks_with_status(
        &mut self,
        tasks: Vec<Arc<EtcdBackupTask>>,
    ) -> Vec<Arc<EtcdBackupTask>> {
        let mut written = std::mem::take(&mut self.task_statuses);
        let mut observed = Vec::new();
        for task in tasks {
            let name = task.name_any();
            let mut last = written.remove(&name);
            observed.push(with_status(task, &mut last, |t, s| t.status = Some(s)));
            if let Some(last) = last {
                self.task_statuses.insert(name, last);
            }
        }
        observed
    }

    /// Forgets the threshold Job whose creation got no answer, if the policy does not want it any more.
    pub fn drop_unwanted_start(&mut self, policy: Option<&EtcdBackupPolicy>) {
        let is_unwanted =
            |start: &mut ThresholdStart| policy.is_none_or(|policy| !start.is_wanted_by(policy));
        self.unconfirmed_start.take_if(is_unwanted);
    }

    /// Returns the created Jobs that no watch has reported yet and that have one of these owners. Forgets
    /// those that a watch has reported, and those that it should have reported by now.
    pub fn unseen_jobs(
        &mut self,
        tables: &Tables,
        namespace: &str,
        owners: &BTreeSet<String>,
        now: DateTime<Utc>,
    ) -> Vec<Arc<Job>> {
        self.created_jobs.retain(|name, (_, created_at)| {
            let key = (namespace.to_owned(), name.clone());
            let is_seen = tables.jobs.get(&key).is_some();
            !is_seen && (now - *created_at).abs() < UNSEEN_JOB_LIFETIME
        });
        let jobs = self.created_jobs.values().map(|(job, _)| job);
        let own = jobs.filter(|job| owner(&***job).is_some_and(|uid| owners.contains(uid)));
        own.cloned().collect()
    }

    /// Forgets applied objects that the watches do not report after the delay: somebody has deleted them.
    pub fn drop_deleted(&mut self, tables: &Tables, policy: &Key, now: DateTime<Utc>) {
        self.applied.retain(|_, applied| {
            (now - applied.at).abs() < WATCH_DELAY || tables.has_object(policy, applied)
        });
    }

    /// Returns the earliest time at which this memory gives up waiting for a watch to report one of its writes.
    pub fn next_expiry(&self, tables: &Tables, policy: &Key) -> Option<DateTime<Utc>> {
        let jobs = self.created_jobs.values();
        let jobs = jobs.map(|(_, created_at)| later(*created_at, UNSEEN_JOB_LIFETIME));
        let applied = self.applied.values();
        let unseen = applied.filter(|applied| !tables.has_object(policy, applied));
        let applied = unseen.map(|applied| later(applied.at, WATCH_DELAY));
        jobs.chain(applied).min()
    }

    /// Returns the recorded time at which something that Jobs depend on last came back. If the spec has changed
    /// since the last compaction failed, first records `now`, because the change may be the correction.
    pub fn recovery(
        &mut self,
        policy: &EtcdBackupPolicy,
        now: DateTime<Utc>,
    ) -> Option<DateTime<Utc>> {
        let status = policy.status.as_ref();
        let last = status.and_then(|s| s.last_compaction.as_ref());
        let has_failed = last.is_some_and(|l| l.run.state == RunState::Failed);
        let generation = policy.metadata.generation.filter(|_| has_failed);
        let before = std::mem::replace(&mut self.generation_at_failure, generation);
        if before.is_some() && generation.is_some() && before != generation {
            self.recovered_at = Some(now);
        }
        self.recovered_at
    }

    /// Counts a failed reconcile, and returns its back-off. A failure during the back-off of an earlier one
    /// does not count: that reconcile ran early because something had changed.
    pub fn add_failure(
        &mut self,
        now: DateTime<Utc>,
        back_off: impl FnOnce(u32) -> Duration,
    ) -> Duration {
        let count = match self.failures {
            None => 1,
            Some(failures) if now < failures.until => failures.count,
            Some(failures) => failures.count.saturating_add(1),
        };
        let pause = back_off(count);
        let until = later(now, time_delta(pause));
        self.failures = Some(Failures { count, until });
        pause
    }

    pub fn forget_failures(&mut self) {
        self.failures = None;
    }
}
