//! The last runs of the CronJobs: what ran when, and how it ended.
//!
//! Pure. Runs of tasks and of thresholds are reported elsewhere.

use super::PlannedEvent;
use crate::controller::api::{EtcdBackupPolicyStatus, LastRun, RunState, ScheduledRun};
use crate::controller::facts::{Facts, outcome};
use crate::controller::jobs::WorkKind;
use crate::controller::times::created;
use chrono::{DateTime, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use std::collections::BTreeMap;

/// A Job that failed, for an Event and a metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedRun {
    /// The kind of the work, as in `status.lastRuns`.
    pub kind: String,
    /// The reason of the failure.
    pub reason: String,
    /// A sentence about it.
    pub text: String,
}

impl FailedRun {
    /// Returns the Event about the failure.
    pub fn event(&self) -> PlannedEvent {
        PlannedEvent {
            warning: true,
            reason: "JobFailed".to_owned(),
            action: "Observe",
            text: self.text.clone(),
        }
    }
}

/// The newest Job of some work that has ended.
#[derive(Debug, Default)]
pub struct NewestEnded<'f> {
    /// The Job and its result.
    pub job: Option<(&'f Job, LastRun)>,
    /// When to look again: the Pods of a Job that has ended may still report more. Its result does not count yet.
    pub again_at: Option<DateTime<Utc>>,
}

impl NewestEnded<'_> {
    /// Finds the newest of these Jobs.
    pub fn find(
        facts: &Facts,
        counts: impl Fn(&Job) -> bool,
        now: DateTime<Utc>,
    ) -> NewestEnded<'_> {
        let mut newest = NewestEnded::default();
        let age = |job: &Job| (created(&job.metadata), job.name_any());
        for job in &facts.jobs {
            if !counts(job) || !outcome::is_finished(job) {
                continue;
            }
            let run = facts.run(job);
            if !outcome::is_settled(&run, now) {
                newest.again_at = Some(outcome::settles_at(now));
            } else if newest
                .job
                .as_ref()
                .is_none_or(|(other, _)| age(job) > age(other))
            {
                newest.job = Some((&**job, run));
            }
        }
        newest
    }
}

/// Returns the last run of each CronJob: that of the newest Job, or that in the status, whichever is later; and when to
/// look again.
pub fn last_runs(
    in_status: &BTreeMap<String, ScheduledRun>,
    facts: &Facts,
    now: DateTime<Utc>,
) -> (BTreeMap<String, ScheduledRun>, Option<DateTime<Utc>>) {
    let mut runs = in_status.clone();
    let mut again_at = None;
    for work in WorkKind::SCHEDULED {
        // A threshold's full has the same label; no CronJob owns it.
        let is_of_schedule = |job: &Job| {
            let mut owners = job.owner_references().iter();
            work.is_of(job) && owners.any(|owner| owner.kind == "CronJob")
        };
        let newest = NewestEnded::find(facts, is_of_schedule, now);
        again_at = again_at.max(newest.again_at);
        let Some((job, run)) = newest.job else {
            continue;
        };
        let new = scheduled_run(job, run);
        let kind = work.short_name();
        let keeps_old = runs.get(kind).is_some_and(|old| {
            // The Job of the run in the status may have been deleted, so that only older Jobs are left; and its Pod may
            // be gone, with the details.
            old.started > new.started || (old.started == new.started && old.job == new.job)
        });
        if !keeps_old {
            runs.insert(kind.to_owned(), new);
        }
    }
    (runs, again_at)
}

fn scheduled_run(job: &Job, run: LastRun) -> ScheduledRun {
    let message = match run.state {
        RunState::Failed => Some(outcome::failure_text(&run)),
        _ => None,
    };
    ScheduledRun {
        job: job.name_any(),
        started: run.start_time,
        ended: run.completion_time,
        result: run.state,
        reason: run
            .reason
            .or_else(|| outcome::reason_of_code(run.exit_code?)),
        message,
        snapshot: run.snapshot,
        revision: run.revision,
    }
}

/// Returns the failures that the new status is the first to have.
pub fn new_failures(old: &EtcdBackupPolicyStatus, new: &EtcdBackupPolicyStatus) -> Vec<FailedRun> {
    let mut failures = Vec::new();
    for (kind, run) in &new.last_runs {
        let is_new = old
            .last_runs
            .get(kind)
            .is_none_or(|before| before.job != run.job);
        if is_new && run.result == RunState::Failed {
            let why = run.message.clone().unwrap_or_default();
            failures.push(FailedRun {
                kind: kind.clone(),
                reason: run.reason.clone().unwrap_or_else(|| "Failed".to_owned()),
                text: format!("the Job {} ({kind}) failed: {why}", run.job),
            });
        }
    }
    failures
}
