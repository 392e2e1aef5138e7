//! The Jobs that thresholds start, compactions and full snapshots in their place: the next one and the last
//! one.
//!
//! Pure. `threshold` decides whether a Job is due, and `jobs` builds it.

use super::threshold::{self, JobStart, NotDue};
use super::{Action, PlannedEvent, WATCH_DELAY};
use crate::controller::api::{EtcdBackupPolicy, LastCompaction, LastRun, RunState, TaskType};
use crate::controller::facts::Facts;
use crate::controller::facts::leases::LeaseFacts;
use crate::controller::facts::outcome::{self, JOB_DELETED};
use crate::controller::facts::threshold_jobs::{ThresholdJob, ThresholdStart, is_of_threshold};
use crate::controller::jobs::{self, Settings, WorkKind};
use crate::controller::names::is_owned;
use crate::controller::times::{later, sooner};
use crate::error::Result;
use chrono::{DateTime, SubsecRound, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;

/// What the status of a policy and its Jobs tell about compactions.
#[derive(Debug, Default)]
pub struct CompactionActivity {
    /// The last Job that a threshold started.
    pub last: Option<LastCompaction>,
    /// The name of an unfinished Job that a threshold or a compaction task started.
    running_job: Option<String>,
    /// The name of an unfinished Job that takes a full snapshot.
    running_full_snapshot: Option<String>,
    /// When to decide again even if no watch reports a change.
    pub again_at: Option<DateTime<Utc>>,
}

impl CompactionActivity {
    /// Collects what is known of the compactions of a policy.
    pub fn new(facts: &Facts, now: DateTime<Utc>) -> CompactionActivity {
        let Some(policy) = facts.policy.as_deref() else {
            return CompactionActivity::default();
        };
        let status = policy.status.as_ref();
        let in_status = status.and_then(|s| s.last_compaction.as_ref());
        let (newest, settles_at) = newest_job(policy, facts, now);
        let (unseen, unseen_until) = unseen_jobs(facts, in_status, now);
        let last = last_compaction(in_status, newest, &unseen, now);

        let mut running_job = None;
        let mut running_full_snapshot = None;
        for job in &facts.jobs {
            if outcome::is_finished(job) {
                continue;
            }
            if running_job.is_none() && is_compaction(job, policy) {
                running_job = Some(job.name_any());
            }
            if running_full_snapshot.is_none() && WorkKind::FullSnapshot.is_of(&**job) {
                running_full_snapshot = Some(job.name_any());
            }
        }
        CompactionActivity {
            last,
            running_job: running_job.or(unseen.into_iter().next()),
            running_full_snapshot,
            again_at: sooner(settles_at, unseen_until),
        }
    }

    /// Returns the Job to create, or why none is due.
    pub fn next_job(&self, facts: &Facts, now: DateTime<Utc>) -> Result<ThresholdStart, NotDue> {
        let Some(policy) = facts.policy.as_deref() else {
            return Err(NotDue::until_a_change("there is no policy"));
        };
        let inputs = threshold::Inputs {
            spec: &policy.spec.compaction,
            is_suspended: policy.spec.suspend,
            has_etcd: policy.spec.etcd.is_some(),
            facts: &facts.leases,
            last: self.last.as_ref(),
            running_job: self.running_job.as_deref(),
            recovered_at: facts.recovered_at,
            generation: policy.metadata.generation,
        };
        let start = threshold::decide(&inputs, now)?;
        if start.full_snapshot
            && let Some(job) = &self.running_full_snapshot
        {
            return Err(NotDue::until_a_change(format!(
                "{}; the Job {job} is already taking a full snapshot",
                start.reason
            )));
        }
        Ok(named_job(policy, start, &facts.leases))
    }
}

/// Returns the newest Job of a threshold with its result so far. If its Pods may still report more, the
/// result counts as running, and the time to decide again is returned too.
fn newest_job(
    policy: &EtcdBackupPolicy,
    facts: &Facts,
    now: DateTime<Utc>,
) -> (Option<(ThresholdJob, LastRun)>, Option<DateTime<Utc>>) {
    let mut newest: Option<(ThresholdJob, &Job)> = None;
    for job in &facts.jobs {
        if !is_threshold_job(job, policy) {
            continue;
        }
        if let Some(started) = ThresholdJob::read(job)
            && newest
                .as_ref()
                .is_none_or(|(other, _)| started.age() >= other.age())
        {
            newest = Some((started, &**job));
        }
    }
    let Some((started, job)) = newest else {
        return (None, None);
    };
    let run = facts.run(job);
    if outcome::is_settled(&run, now) {
        return (Some((started, run)), None);
    }
    let still_running = LastRun {
        start_time: run.start_time,
        ..LastRun::default()
    };
    (
        Some((started, still_running)),
        Some(outcome::settles_at(now)),
    )
}

/// Returns the names of the Jobs that may exist although no watch has reported them, and when to decide
/// again if none ever does.
fn unseen_jobs(
    facts: &Facts,
    in_status: Option<&LastCompaction>,
    now: DateTime<Utc>,
) -> (Vec<String>, Option<DateTime<Utc>>) {
    let mut unseen = facts.unconfirmed_jobs.clone();
    let mut again_at = (!unseen.is_empty()).then(|| later(now, WATCH_DELAY));
    if let Some(last) = in_status
        && last.run.state == RunState::Running
        && is_recent(last.run.start_time, now)
        && facts.job(&last.job_name).is_none()
    {
        unseen.push(last.job_name.clone());
        again_at = sooner(again_at, Some(later(now, WATCH_DELAY)));
    }
    (unseen, again_at)
}

/// Returns the last compaction by the policy's status and by the newest Job, whichever is later.
///
/// A compaction that runs by the status and has no Job has failed, unless its Job is among the `unseen` ones.
fn last_compaction(
    in_status: Option<&LastCompaction>,
    newest: Option<(ThresholdJob, LastRun)>,
    unseen: &[String],
    now: DateTime<Utc>,
) -> Option<LastCompaction> {
    let Some(old) = in_status else {
        return newest.map(|(job, run)| job.ran(run));
    };
    if let Some((job, run)) = newest {
        let is_same = job.name == old.job_name;
        let old_start = old.run.start_time.map(|t| t.trunc_subsecs(0));
        if is_same && outcome::is_more_complete(&old.run, &run) {
            // The status was written before the Pods were deleted.
            return Some(old.clone());
        }
        if is_same || job.created >= old_start {
            return Some(job.ran(run));
        }
    }
    let mut last = old.clone();
    if old.run.state == RunState::Running && !unseen.contains(&old.job_name) {
        last.failures = old.failures.saturating_add(1);
        last.run.state = RunState::Failed;
        last.run.reason = Some(JOB_DELETED.to_owned());
        last.run.message = Some("the Job was deleted before the controller saw its end".to_owned());
        last.run.completion_time = Some(now.trunc_subsecs(0));
    }
    Some(last)
}

fn is_threshold_job(job: &Job, policy: &EtcdBackupPolicy) -> bool {
    is_of_threshold(job) && is_owned(job, policy)
}

/// Whether a threshold started the Job, or the Job compacts for a task.
fn is_compaction(job: &Job, policy: &EtcdBackupPolicy) -> bool {
    is_threshold_job(job, policy) || jobs::is_of_task_type(job, TaskType::OnDemandCompaction)
}

/// Whether a Job was created so recently that the watch may not have reported it.
pub(super) fn is_recent(created: Option<DateTime<Utc>>, now: DateTime<Utc>) -> bool {
    created.is_some_and(|created| (now - created).abs() < WATCH_DELAY)
}

/// Names a Job that is due. The same revisions and the same attempt give the same name.
fn named_job(policy: &EtcdBackupPolicy, start: JobStart, facts: &LeaseFacts) -> ThresholdStart {
    let (full, delta) = facts.revisions().unwrap_or_default();
    let attempt = u32::try_from(start.attempt).unwrap_or_default();
    let job = ThresholdJob {
        name: jobs::compaction_job_name(policy, full, delta, attempt, start.full_snapshot),
        trigger: start.trigger.as_str().to_owned(),
        full_revision: full,
        delta_revision: delta,
        full_snapshot: start.full_snapshot,
        attempt: start.attempt,
        generation: policy.metadata.generation,
        created: None,
        finished: false,
    };
    ThresholdStart {
        job,
        reason: start.reason,
        revisions: start.revisions,
    }
}

/// Returns the action that creates the Job.
///
/// # Errors
/// `Internal` if the Job cannot be built.
pub fn create_job(
    policy: &EtcdBackupPolicy,
    start: ThresholdStart,
    settings: &Settings,
) -> Result<Action> {
    let job = jobs::compaction_job(
        policy,
        settings,
        &start.job.name,
        start.job.full_snapshot,
        start.job.annotations(&start.reason),
    )?;
    let (event_reason, content) = if start.job.full_snapshot {
        ("FullSnapshotStarted", "a full snapshot")
    } else {
        ("CompactionStarted", "a compaction")
    };
    let event = PlannedEvent {
        warning: false,
        reason: event_reason.to_owned(),
        action: "Compact",
        text: format!(
            "created the Job {} for {content}: {}",
            start.job.name, start.reason
        ),
    };
    Ok(Action::CreateJob {
        job: Box::new(job),
        revisions: Some(start.revisions),
        event,
    })
}

/// Returns the Event about the end of a Job, if `new` is the first status that has it.
pub fn end_event(
    old: Option<&LastCompaction>,
    new: Option<&LastCompaction>,
) -> Option<PlannedEvent> {
    let has_ended = |l: &LastCompaction| l.run.state != RunState::Running;
    let last = new.filter(|l| has_ended(l))?;
    if old.is_some_and(|o| o.job_name == last.job_name && has_ended(o)) {
        return None;
    }
    let succeeded = last.run.state == RunState::Succeeded;
    let job = &last.job_name;
    let (reason, text) = if succeeded {
        let up_to = up_to_revision(&last.run);
        (
            "CompactionSucceeded",
            format!("the Job {job} succeeded{up_to}"),
        )
    } else {
        let why = outcome::failure_text(&last.run);
        ("CompactionFailed", format!("the Job {job} failed: {why}"))
    };
    Some(PlannedEvent {
        warning: !succeeded,
        reason: reason.to_owned(),
        action: "Compact",
        text,
    })
}

/// Returns the words for the revision that a Job has reached; none if it is unknown.
pub fn up_to_revision(run: &LastRun) -> String {
    match run.revision {
        Some(revision) => format!(" up to revision {revision}"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests;
