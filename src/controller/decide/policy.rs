//! The status of a policy, its Events, and whether the policy can be carried out.
//!
//! Pure. Thresholds and tasks are planned elsewhere (`compaction`, `task`).

use super::conditions::{self, Assessment, Problem};
use super::runs::{self, NewestEnded};
use super::{Options, PlannedEvent, freshness};
use crate::controller::api::{
    Condition, ConditionStatus, EtcdBackupPolicy, EtcdBackupPolicyStatus, LastCompaction, LastRun,
    RestorableWindow, ScheduledRun, SnapshotStatus, SnapshotsStatus, TaskType,
};
use crate::controller::facts::leases::{LeaseFacts, SnapshotFact};
use crate::controller::facts::{Facts, Neighbour, outcome};
use crate::controller::jobs::{self, WorkKind};
use crate::controller::times::{created, rfc3339, sooner};
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use std::collections::BTreeMap;

const READY: &str = "Ready";
const BACKUP_READY: &str = "BackupReady";
const BACKUP_VERIFIED: &str = "BackupVerified";
const COMPACTION_HEALTHY: &str = "CompactionHealthy";
const STORE_SHARED: &str = "StoreShared";
const SET_BACK: &str = "SetBack";
/// For how long a policy warns that its cluster was set back; as long as `deltafold status` does.
const SET_BACK_AGE: TimeDelta = TimeDelta::days(1);
/// The reason, and the condition, of a policy that needs a flag of the controller which is not given.
pub const NOT_ALLOWED: &str = "NotAllowed";
/// The reason of a policy whose spec makes no sense, so that no Jobs can be built.
pub const INVALID: &str = "SpecInvalid";

/// Returns why the controller must not carry out a policy, if there is a reason.
pub fn impediment(policy: &EtcdBackupPolicy, options: &Options) -> Option<Problem> {
    let problem = |reason: &str, problems: Vec<String>| {
        (!problems.is_empty()).then(|| Problem {
            reason: reason.to_owned(),
            message: problems.join("; "),
        })
    };
    let not_allowed = || options.allowed.problems(policy, &options.settings);
    problem(INVALID, jobs::problems(policy))
        .or_else(|| problem(INVALID, jobs::args_problems(policy, &options.settings)))
        .or_else(|| problem(NOT_ALLOWED, not_allowed()))
}

/// Returns the condition that warns of a store or of snapshot Leases that another policy of the namespace has, too.
fn store_shared(policy: &EtcdBackupPolicy, facts: &Facts) -> Option<Assessment> {
    let retention = |other: &Neighbour| match (other.is_older, &policy.spec.retention) {
        (true, Some(_)) => {
            " The garbage collection of this policy, which is the younger one, is suspended until then."
        }
        _ => "",
    };
    if let Some(other) = &facts.same_store {
        return Some(Assessment::warning(
            "SameStore",
            format!(
                "the policy {} has the same store, {}: give each etcd a prefix of its own, or delete one of the two policies; if the stores are on different servers or accounts, set the endpoint or the account_name of each in store.options.{}",
                other.name,
                policy.spec.store.url,
                retention(other)
            ),
        ));
    }
    let other = facts.same_leases.as_ref()?;
    Some(Assessment::warning(
        "SameLeases",
        format!(
            "the policy {} has the same snapshot Leases, {}-…: give each policy a snapshot.leasePrefix of its own",
            other.name,
            jobs::lease_prefix(policy)
        ),
    ))
}

/// Returns the condition that warns for a day that the cluster was set back.
fn set_back(facts: &Facts, now: DateTime<Utc>) -> Option<Assessment> {
    let began = facts.leases.timeline_began?;
    let ends = began + SET_BACK_AGE;
    (began <= now && now < ends).then(|| {
        let message = format!(
            "another history of the cluster began by {}: it went on from an older revision, or from nothing. If nobody did that on purpose, `deltafold status` says how to restore what was there before",
            rfc3339(began)
        );
        Assessment {
            stale_at: Some(ends),
            ..Assessment::warning(SET_BACK, message)
        }
    })
}

/// The conditions of the backup itself, and the runs that they are assessed by.
#[derive(Debug)]
pub struct BackupHealth {
    /// The condition BackupReady.
    pub backup_ready: Assessment,
    verified: Assessment,
    last_runs: BTreeMap<String, ScheduledRun>,
    last_verification: Option<LastRun>,
    last_maintenance: Option<LastRun>,
    /// When to look again for the result of a Job.
    again_at: Option<DateTime<Utc>>,
}

impl BackupHealth {
    /// Assesses the backup of a policy.
    pub fn assess(policy: &EtcdBackupPolicy, facts: &Facts, now: DateTime<Utc>) -> BackupHealth {
        let status = policy.status.clone().unwrap_or_default();
        let (last_runs, again_at) = runs::last_runs(&status.last_runs, facts, now);
        let last = |in_status, work, task_type| {
            let (newest, settles_at) = last_run(facts, work, task_type, now);
            (latest_run(in_status, newest), settles_at)
        };
        let (last_verification, verification_at) = last(
            status.last_verification,
            WorkKind::Verification,
            TaskType::Verify,
        );
        let (last_maintenance, maintenance_at) = last(
            status.last_defragmentation,
            WorkKind::Maintenance,
            TaskType::Maintenance,
        );
        BackupHealth {
            backup_ready: conditions::backup_ready(policy, facts, &last_runs, now),
            verified: conditions::backup_verified(policy, facts, last_verification.as_ref(), now),
            last_runs,
            last_verification,
            last_maintenance,
            again_at: sooner(again_at, sooner(verification_at, maintenance_at)),
        }
    }

    /// Whether BackupReady is True.
    pub fn is_backed_up(&self) -> bool {
        self.backup_ready.status == ConditionStatus::True
    }
}

/// Returns the result of the newest Job that did this work and has ended, by a schedule or for a task; and when to look
/// again.
fn last_run(
    facts: &Facts,
    work: WorkKind,
    task_type: TaskType,
    now: DateTime<Utc>,
) -> (Option<LastRun>, Option<DateTime<Utc>>) {
    let does_work = |job: &Job| work.is_of(job) || jobs::is_of_task_type(job, task_type);
    let newest = NewestEnded::find(facts, does_work, now);
    (newest.job.map(|(_, run)| run), newest.again_at)
}

/// Returns the later one of two runs: that in the status, and that of the newest Job. If both are the same
/// run, returns the one that knows more about it.
fn latest_run(in_status: Option<LastRun>, newest: Option<LastRun>) -> Option<LastRun> {
    let (Some(old), Some(new)) = (&in_status, &newest) else {
        return newest.or(in_status);
    };
    let keeps_old = if old.start_time == new.start_time {
        outcome::is_more_complete(old, new)
    } else {
        // The Job of the run in the status may have been deleted, so that only older Jobs are left.
        old.start_time > new.start_time
    };
    if keeps_old { in_status } else { newest }
}

/// The decisions that the status of a policy depends on, in addition to the facts.
pub struct PolicyFindings<'f> {
    /// The conditions of the backup.
    pub health: &'f BackupHealth,
    /// Why the policy is not Ready.
    pub problem: Option<&'f Problem>,
    /// The last compaction and the condition CompactionHealthy; `None` if the controller starts no
    /// compactions.
    pub compaction: Option<(Option<LastCompaction>, &'f Assessment)>,
    /// The restore tasks that end with this decision.
    pub restorations: Vec<&'f LastRun>,
}

/// Returns the status of a policy, and when it changes if nothing else does.
pub fn status(
    policy: &EtcdBackupPolicy,
    facts: &Facts,
    findings: PolicyFindings<'_>,
    now: DateTime<Utc>,
) -> (EtcdBackupPolicyStatus, Option<DateTime<Utc>>) {
    let PolicyFindings {
        health,
        problem,
        compaction,
        restorations,
    } = findings;
    let old = policy.status.clone().unwrap_or_default();
    let ready = conditions::ready(policy, problem);
    let shared = store_shared(policy, facts);
    let mut assessed = vec![
        (READY, &ready),
        (BACKUP_READY, &health.backup_ready),
        (BACKUP_VERIFIED, &health.verified),
    ];
    if let Some((_, healthy)) = compaction {
        assessed.push((COMPACTION_HEALTHY, healthy));
    }
    if let Some(shared) = &shared {
        assessed.push((STORE_SHARED, shared));
    }
    let set_back = set_back(facts, now);
    if let Some(set_back) = &set_back {
        assessed.push((SET_BACK, set_back));
    }
    let stale_at = assessed.iter().filter_map(|(_, a)| a.stale_at).min();
    let generation = policy.metadata.generation;
    let mut conditions = conditions::merge(&old.conditions, &assessed, generation, now);
    if compaction.is_none() {
        let kept = old.conditions.iter();
        let kept = kept.filter(|c| c.type_ == COMPACTION_HEALTHY);
        conditions.extend(kept.cloned());
    }
    let status = EtcdBackupPolicyStatus {
        observed_generation: generation,
        changed_at: changed_at(policy, &old, now),
        conditions,
        snapshots: snapshots(&facts.leases),
        restorable_window: restorable_window(&facts.leases),
        last_runs: health.last_runs.clone(),
        last_verification: health.last_verification.clone(),
        last_defragmentation: health.last_maintenance.clone(),
        last_restoration: last_restoration(old.last_restoration, restorations),
        active_jobs: active_jobs(facts),
        last_compaction: match compaction {
            Some((last, _)) => last,
            None => old.last_compaction,
        },
    };
    (status, sooner(stale_at, health.again_at))
}

/// Returns when the controller first saw that the spec had changed to the current generation.
fn changed_at(
    policy: &EtcdBackupPolicy,
    old: &EtcdBackupPolicyStatus,
    now: DateTime<Utc>,
) -> Option<DateTime<Utc>> {
    if old.observed_generation == policy.metadata.generation {
        return old.changed_at;
    }
    old.observed_generation.map(|_| now.trunc_subsecs(0))
}

fn last_restoration(in_status: Option<LastRun>, ended: Vec<&LastRun>) -> Option<LastRun> {
    let mut last = in_status;
    for run in ended {
        let is_later = last
            .as_ref()
            .is_none_or(|l| l.completion_time <= run.completion_time);
        if is_later {
            last = Some(run.clone());
        }
    }
    last
}

fn active_jobs(facts: &Facts) -> Vec<String> {
    let jobs = facts.jobs.iter();
    let active = jobs.filter(|job| !outcome::is_finished(job));
    let mut names: Vec<String> = active.map(|job| job.name_any()).collect();
    names.sort();
    names
}

fn restorable_window(facts: &LeaseFacts) -> Option<RestorableWindow> {
    let (first_revision, last_revision) = facts.restorable?;
    let (first_time, last_time) = facts.restorable_times;
    Some(RestorableWindow {
        first_revision,
        last_revision,
        first_time,
        last_time,
    })
}

fn snapshots(facts: &LeaseFacts) -> Option<SnapshotsStatus> {
    let full = facts.full.as_ref()?;
    let snapshot_status = |fact: &SnapshotFact| SnapshotStatus {
        name: fact.name.clone(),
        start_revision: fact.start_revision,
        end_revision: fact.revision,
        time: fact.time,
        size: fact.bytes,
    };
    // The delta Lease reports the full snapshot if no delta came after it.
    let delta = facts.delta.as_ref();
    let delta = delta.filter(|d| d.revision > full.revision);
    Some(SnapshotsStatus {
        last_full: Some(snapshot_status(full)),
        last_delta: delta.map(snapshot_status),
        accumulated_delta_size: facts.accumulated_bytes,
        accumulated_delta_events: facts.accumulated_events,
    })
}

/// Returns the age of the newest full and delta snapshot in seconds. Before the first snapshot of an expected
/// kind it is the age of the policy. A kind without either is left out.
pub fn snapshot_ages(
    policy: &EtcdBackupPolicy,
    facts: &LeaseFacts,
    now: DateTime<Utc>,
) -> Vec<(&'static str, f64)> {
    let created = created(&policy.metadata);
    let [expects_full, expects_delta] = freshness::expects(policy);
    // A full snapshot counts as a delta until there is one.
    let full = facts.full.as_ref();
    let delta = facts.delta.as_ref().or(full.filter(|_| expects_delta));
    let mut ages = Vec::new();
    for (kind, fact, is_expected) in [
        ("full", full, expects_full),
        ("delta", delta, expects_delta),
    ] {
        let waits_for_first = is_expected && !policy.spec.suspend;
        let renewed = fact.and_then(|f| f.renewed);
        if let Some(since) = renewed.or(created.filter(|_| waits_for_first)) {
            let seconds = (now - since).num_milliseconds() as f64 / 1000.0;
            ages.push((kind, seconds.max(0.0)));
        }
    }
    ages
}

/// Returns the Events about conditions that have changed.
pub fn condition_events(old: &[Condition], new: &[Condition]) -> Vec<PlannedEvent> {
    let mut events = Vec::new();
    for condition in new {
        let before = old.iter().find(|c| c.type_ == condition.type_);
        if is_news(before, condition) {
            let is_bad =
                condition.status == ConditionStatus::False && condition.type_ != COMPACTION_HEALTHY;
            let is_warning = condition.type_ == STORE_SHARED;
            events.push(PlannedEvent {
                warning: is_bad || is_warning,
                reason: condition.reason.clone(),
                action: "Observe",
                text: format!(
                    "{} is {}: {}",
                    condition.type_,
                    condition.status.as_str(),
                    condition.message
                ),
            });
        }
    }
    events
}

/// Whether a condition has changed so that an Event should report it.
fn is_news(before: Option<&Condition>, condition: &Condition) -> bool {
    if condition.type_ == COMPACTION_HEALTHY {
        // The end of each compaction has an Event of its own.
        return before.is_some_and(|c| c.status != condition.status);
    }
    match before {
        None => condition.status != ConditionStatus::Unknown,
        Some(c) => c.status != condition.status || c.reason != condition.reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::RunState;
    use chrono::TimeDelta;

    #[test]
    fn the_result_of_a_run_outlives_its_pod_and_its_job() {
        let start = DateTime::UNIX_EPOCH;
        let run = |hours: i64, exit_code: Option<i32>| LastRun {
            state: RunState::Failed,
            start_time: Some(start + TimeDelta::hours(hours)),
            exit_code,
            ..LastRun::default()
        };
        let known = Some(run(2, Some(65)));
        // The Pod was deleted; the Job was deleted and an older one is left; no Job is left.
        for newest in [Some(run(2, None)), Some(run(1, Some(69))), None] {
            assert_eq!(latest_run(known.clone(), newest), known);
        }
        let newer = Some(run(3, None));
        assert_eq!(latest_run(known, newer.clone()), newer);
        assert_eq!(latest_run(None, newer.clone()), newer);
    }
}
