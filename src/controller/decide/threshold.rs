//! When a compaction starts: revisions, bytes or age since the last full snapshot reach a threshold.
//!
//! A pure decision from the snapshot Leases, the last attempt and the time, with its reason in words. Creates no Job.

use crate::backup::Kind;
use crate::controller::api::{CompactionSpec, LastCompaction, RunState};
use crate::controller::facts::leases::LeaseFacts;
use crate::controller::facts::outcome::{self, DEADLINE_EXCEEDED};
use crate::controller::times::{later, rfc3339, time_delta};
use chrono::{DateTime, TimeDelta, Utc};

/// The back-off after the first failure. It doubles with each further failure.
const FIRST_BACK_OFF: TimeDelta = TimeDelta::minutes(1);
const LONGEST_BACK_OFF: TimeDelta = TimeDelta::hours(1);

/// What starts a compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
pub enum Trigger {
    /// The number of revisions since the last full snapshot.
    EventsThreshold,
    /// The bytes of the deltas since the last full snapshot.
    SizeThreshold,
    /// The age of the last full snapshot.
    AgeThreshold,
    /// So many revisions that a full snapshot of the live etcd costs less than a compaction.
    FullSnapshotThreshold,
    /// An earlier compaction of the same chain exceeded its deadline.
    DeadlineExceeded,
}

impl Trigger {
    /// Returns the name that statuses and annotations have.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The facts that decide whether a Job starts.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The thresholds of the policy.
    pub spec: &'a CompactionSpec,
    /// Whether the policy is suspended.
    pub is_suspended: bool,
    /// Whether the policy names an etcd, so that a full snapshot is possible.
    pub has_etcd: bool,
    /// The contents of the snapshot Leases.
    pub facts: &'a LeaseFacts,
    /// The last compaction, or full snapshot in its place, that a threshold started.
    pub last: Option<&'a LastCompaction>,
    /// An unfinished Job of a threshold or of a compaction task.
    pub running_job: Option<&'a str>,
    /// When the etcd's Service became ready again.
    pub recovered_at: Option<DateTime<Utc>>,
    /// The generation of the spec. A change may be the correction of a failure's cause.
    pub generation: Option<i64>,
}

/// A Job that is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStart {
    /// The threshold that is reached.
    pub trigger: Trigger,
    /// Whether the Job takes a full snapshot of the live etcd instead of a compaction.
    pub full_snapshot: bool,
    /// Why the Job is due, for Events.
    pub reason: String,
    /// How many Jobs have failed in a row since the last full snapshot. Together with the revisions of the
    /// Leases it identifies the Job: the same values give the same name.
    pub attempt: i32,
    /// The revisions since the last full snapshot.
    pub revisions: i64,
}

/// Why no Job is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotDue {
    /// The reason, for the log.
    pub reason: String,
    /// When a Job may be due without any change; `None` if only a change can make one due.
    pub again_at: Option<DateTime<Utc>>,
}

impl NotDue {
    /// No Job is due before something changes.
    pub fn until_a_change(reason: impl Into<String>) -> NotDue {
        NotDue {
            reason: reason.into(),
            again_at: None,
        }
    }
}

/// The full snapshot that revisions, bytes and age are counted from.
struct BaseSnapshot {
    revision: i64,
    time: Option<DateTime<Utc>>,
    /// The bytes of the deltas after it, if known.
    delta_bytes: Option<i64>,
    description: String,
}

/// Decides whether a Job is due.
///
/// - While a Job runs, no other one starts.
/// - Two Jobs never start for the same revisions of the Leases, with one exception: if the first failed
///   because the store, etcd or Kubernetes did not respond, it is retried after 1, 2, 4 … 60 minutes. It is
///   retried at once if the Leases move or the cause of the failure ends.
/// - After any other failure the next Job waits for both: the Leases must move, and the back-off must end.
/// - A new full snapshot ends all back-offs.
pub fn decide(inputs: &Inputs<'_>, now: DateTime<Utc>) -> Result<JobStart, NotDue> {
    check_idle(inputs)?;
    let Inputs { facts, last, .. } = *inputs;
    let Some((full, newest)) = facts.revisions() else {
        let missing = match facts.full {
            None => "no full snapshot",
            Some(_) => "no delta snapshot",
        };
        return Err(NotDue::until_a_change(format!(
            "the snapshot Leases report {missing} yet"
        )));
    };
    let base = base_snapshot(facts, full, last);
    let revisions = (newest - base.revision).max(0);
    if revisions == 0 {
        return Err(NotDue::until_a_change(format!(
            "there are no revisions after {}",
            base.description
        )));
    }
    let (trigger, reached) = reached_threshold(inputs.spec, &base, revisions, now)?;

    let has_moved = last.is_none_or(|l| (l.full_revision, l.delta_revision) != (full, newest));
    let failed = last.filter(|l| l.run.state == RunState::Failed);
    if let Some(last) = last
        && failed.is_none()
        && !has_moved
    {
        return Err(NotDue::until_a_change(format!(
            "{reached}, but the Leases have not moved since the Job {} was started",
            last.job_name
        )));
    }
    // Failures before a new full snapshot do not count.
    let failed = failed.filter(|l| l.full_revision == full);
    if let Some(failed) = failed {
        check_retry(inputs, failed, has_moved, &reached, now)?;
    }
    let mut start = JobStart {
        trigger,
        full_snapshot: false,
        reason: reached,
        attempt: failed.map_or(0, |l| l.failures.max(1)),
        revisions,
    };
    let deadline_was_exceeded = failed.is_some_and(|l| {
        exceeded_deadline(l) || l.full_snapshot && l.trigger == Trigger::DeadlineExceeded.as_str()
    });
    if deadline_was_exceeded {
        let why = "the last compaction exceeded its deadline";
        start.replace_by_full_snapshot(Trigger::DeadlineExceeded, why, inputs.has_etcd);
    } else if trigger == Trigger::FullSnapshotThreshold {
        let why = "these are too many to compact";
        start.replace_by_full_snapshot(trigger, why, inputs.has_etcd);
    }
    Ok(start)
}

impl JobStart {
    /// Takes a full snapshot instead of a compaction, if the policy has an etcd.
    fn replace_by_full_snapshot(&mut self, trigger: Trigger, why: &str, has_etcd: bool) {
        let reached = &self.reason;
        if has_etcd {
            self.reason = format!("{reached}; {why}, so a full snapshot is taken instead");
            self.trigger = trigger;
            self.full_snapshot = true;
        } else {
            self.reason = format!(
                "{reached}; {why}, but a full snapshot needs etcd.endpoints, which the policy does not have, so a compaction is started all the same"
            );
        }
    }
}

/// Fails if the policy wants no compaction or a Job runs.
fn check_idle(inputs: &Inputs<'_>) -> Result<(), NotDue> {
    if inputs.is_suspended {
        return Err(NotDue::until_a_change("the policy is suspended"));
    }
    if !inputs.spec.enabled {
        return Err(NotDue::until_a_change("compaction is not enabled"));
    }
    let last = inputs.last.filter(|l| l.run.state == RunState::Running);
    let running_job = inputs.running_job.or(last.map(|l| l.job_name.as_str()));
    match running_job {
        Some(job) => Err(NotDue::until_a_change(format!("the Job {job} is running"))),
        None => Ok(()),
    }
}

/// Fails if the next attempt after a failed Job is not allowed yet.
fn check_retry(
    inputs: &Inputs<'_>,
    failed: &LastCompaction,
    has_moved: bool,
    reached: &str,
    now: DateTime<Utc>,
) -> Result<(), NotDue> {
    let job = &failed.job_name;
    let why = outcome::failure_text(&failed.run);
    let is_unreachable = outcome::is_unreachable(&failed.run);
    if !has_moved && !is_unreachable {
        return Err(NotDue::until_a_change(format!(
            "{reached}, but the Job {job} failed ({why}), and the Leases have not moved since it was started"
        )));
    }
    let skips_back_off = if is_unreachable {
        // The Leases moved, so what was unreachable responds again.
        has_moved
    } else {
        // A full snapshot replaces the compaction that exceeded its deadline: this is no retry of the same
        // work.
        inputs.has_etcd && exceeded_deadline(failed) && !failed.full_snapshot
    };
    if skips_back_off {
        return Ok(());
    }
    let is_corrected = failed.generation.is_some() && failed.generation != inputs.generation;
    if is_corrected {
        return Ok(());
    }
    let Some(retry_at) = retry_at(failed, inputs.recovered_at, now) else {
        return Ok(());
    };
    Err(NotDue {
        reason: format!(
            "{reached}, but the Job {job} failed ({why}); the next attempt is at {}",
            rfc3339(retry_at)
        ),
        again_at: Some(retry_at),
    })
}

fn exceeded_deadline(last: &LastCompaction) -> bool {
    last.run.reason.as_deref() == Some(DEADLINE_EXCEEDED)
}

/// Returns the newest full snapshot: that of the Leases, or a newer one that the last compaction made and no
/// Lease reports yet.
fn base_snapshot(facts: &LeaseFacts, full: i64, last: Option<&LastCompaction>) -> BaseSnapshot {
    if let Some(last) = last.filter(|l| is_result_valid(l, facts, full))
        && let Some(revision) = last.run.revision
        && revision > full.max(facts.annotated_base.unwrap_or(0))
    {
        return BaseSnapshot {
            revision,
            time: last.run.completion_time,
            // The Leases count from an older full snapshot.
            delta_bytes: None,
            description: format!(
                "the full snapshot at revision {revision} of the Job {}",
                last.job_name
            ),
        };
    }
    let base_of_deltas = facts.annotated_base.unwrap_or(0);
    let revision = full.max(base_of_deltas);
    let full_time = match &facts.full {
        Some(fact) if full >= base_of_deltas => fact.time.or(fact.renewed),
        // Only the delta Lease reports the newest full snapshot; it has its time if no delta came after it.
        _ => {
            let newest = facts.delta.as_ref();
            let newest_full = newest.filter(|d| d.kind == Some(Kind::Full));
            newest_full.and_then(|d| d.time)
        }
    };
    BaseSnapshot {
        revision,
        time: full_time,
        delta_bytes: facts.accumulated_bytes,
        description: format!("the full snapshot at revision {revision}"),
    }
}

/// Whether the full snapshot of the last compaction is still part of the history. It is not if the cluster
/// was restored to an older revision since.
fn is_result_valid(last: &LastCompaction, facts: &LeaseFacts, full: i64) -> bool {
    let newest = facts.delta.as_ref().map_or(0, |d| d.revision);
    let leases_went_back = full < last.full_revision || newest < last.delta_revision;
    // A full snapshot that was taken after the compaction and is at a lower revision.
    let result_revision = last.run.revision.unwrap_or(0);
    let ended = last.run.completion_time;
    let renewed = facts.full.as_ref().and_then(|f| f.renewed);
    let has_later_lower_full =
        ended.is_some() && full != last.full_revision && full < result_revision && renewed > ended;
    last.run.state == RunState::Succeeded && !leases_went_back && !has_later_lower_full
}

/// Returns the first threshold that is reached, and a sentence about it.
fn reached_threshold(
    spec: &CompactionSpec,
    base: &BaseSnapshot,
    revisions: i64,
    now: DateTime<Utc>,
) -> Result<(Trigger, String), NotDue> {
    let since = &base.description;
    if let Some(limit) = spec.full_snapshot_threshold
        && revisions >= limit
    {
        return Ok((
            Trigger::FullSnapshotThreshold,
            format!("{revisions} revisions since {since} reach fullSnapshotThreshold ({limit})"),
        ));
    }
    let limit = spec.events_threshold;
    if revisions >= limit {
        return Ok((
            Trigger::EventsThreshold,
            format!("{revisions} revisions since {since} reach eventsThreshold ({limit})"),
        ));
    }
    // The condition Ready reports a size or an age that cannot be parsed.
    let size_limit = spec.size_threshold.as_ref().and_then(|size| size.value());
    if let (Some(limit), Some(bytes)) = (size_limit, base.delta_bytes)
        && bytes.unsigned_abs() >= limit.0
    {
        let limit = limit.0;
        return Ok((
            Trigger::SizeThreshold,
            format!("{bytes} bytes of deltas since {since} reach sizeThreshold ({limit})"),
        ));
    }
    let none_reached = |again_at| NotDue {
        reason: format!("{revisions} revisions since {since} reach no threshold"),
        again_at,
    };
    let Some(age_threshold) = &spec.age_threshold else {
        return Err(none_reached(None));
    };
    let (Some(limit), Some(taken)) = (age_threshold.value(), base.time) else {
        return Err(none_reached(None));
    };
    // The clock of the machine that took the snapshot may be ahead.
    let taken = taken.min(now);
    let reached_at = later(taken, time_delta(limit.0));
    if reached_at > now {
        return Err(none_reached(Some(reached_at)));
    }
    Ok((
        Trigger::AgeThreshold,
        format!(
            "{since} was taken at {}, longer ago than ageThreshold ({}), and {revisions} revisions came after it",
            rfc3339(taken),
            age_threshold.as_str()
        ),
    ))
}

/// Returns when the back-off after a failure ends; `None` if it has ended.
fn retry_at(
    failed: &LastCompaction,
    recovered_at: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> Option<DateTime<Utc>> {
    let ended = failed.run.completion_time.or(failed.run.start_time)?;
    if recovered_at.is_some_and(|at| at > ended) {
        return None;
    }
    let pause = back_off(failed.failures);
    let retry_at = later(ended, pause);
    // An end far in the future comes from a wrong clock: do not wait for it.
    let is_plausible = ended <= later(now, pause);
    (retry_at > now && is_plausible).then_some(retry_at)
}

/// Returns the back-off after this many failures in a row.
fn back_off(failures: i32) -> TimeDelta {
    let doublings = failures.saturating_sub(1).clamp(0, 6);
    (FIRST_BACK_OFF * (1 << doublings)).min(LONGEST_BACK_OFF)
}

#[cfg(test)]
mod tests;
