//! The conditions of a policy: Ready, BackupReady, BackupVerified and CompactionHealthy.
//!
//! Pure: computes status, reason and message, and the time at which they change if nothing else happens.
//! Messages contain times and not ages: an age would change the message, and so write the status, all the
//! time.

use super::TOO_MANY_JOBS;
use super::compaction::up_to_revision;
use super::freshness::{self, Cadence, Freshness, last_renewal};
use crate::base::printable;
use crate::controller::api::{
    Condition, ConditionStatus, EtcdBackupPolicy, LastCompaction, LastRun, RunState, ScheduledRun,
};
use crate::controller::facts::leases::{LeaseFacts, SnapshotFact};
use crate::controller::facts::{Facts, Refusal, outcome, start};
use crate::controller::jobs::WorkKind;
use crate::controller::times::{created, later, rfc3339, sooner};
use ConditionStatus::{False, True, Unknown};
use chrono::{DateTime, TimeDelta, Utc};
use kube::ResourceExt;
use std::collections::BTreeMap;

/// The reason of a condition if the Pod of a Job has not started.
const NOT_STARTED: &str = "PodNotStarted";
/// A condition reports a Pod that has not started after this time: a node may be added for it meanwhile.
const START_GRACE: TimeDelta = TimeDelta::seconds(20);
/// The exit code of a verification that found wrong data.
const EXIT_WRONG_DATA: i32 = 65;

/// The assessed value of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assessment {
    /// The status of the condition.
    pub status: ConditionStatus,
    /// The reason: one word, for programs.
    pub reason: String,
    /// The message: a sentence, for users.
    pub message: String,
    /// When to assess again even if nothing has changed.
    pub stale_at: Option<DateTime<Utc>>,
}

impl Assessment {
    fn new(status: ConditionStatus, reason: &str, message: impl Into<String>) -> Self {
        Assessment {
            status,
            reason: reason.to_owned(),
            message: printable::message(message.into()),
            stale_at: None,
        }
    }

    /// The value of a condition that warns: True, and absent if there is nothing to warn of.
    pub fn warning(reason: &str, message: impl Into<String>) -> Self {
        Assessment::new(True, reason, message)
    }

    fn until(self, stale_at: Option<DateTime<Utc>>) -> Self {
        Assessment { stale_at, ..self }
    }
}

/// Assesses BackupReady: whether snapshots are taken on time.
///
/// - True while the Leases of both kinds are renewed on time.
/// - Unknown if a renewal is late, or there was none yet, or the Pod that takes snapshots cannot start.
/// - False if the last snapshot Job failed, the follower reports a problem, or there was no renewal for three periods.
pub fn backup_ready(
    policy: &EtcdBackupPolicy,
    facts: &Facts,
    last_runs: &BTreeMap<String, ScheduledRun>,
    now: DateTime<Utc>,
) -> Assessment {
    if policy.spec.suspend {
        return suspended("no snapshots are taken");
    }
    let leases = &facts.leases;
    let failed = failed_snapshot("full", last_runs, leases.full.as_ref(), now)
        .or_else(|| failed_snapshot("delta", last_runs, leases.delta.as_ref(), now))
        .or_else(|| follower_problem(policy, leases));
    if let Some(failed) = failed {
        return failed;
    }
    let kinds = [
        WorkKind::FullSnapshot,
        WorkKind::DeltaSnapshot,
        WorkKind::Follow,
    ];
    let (not_started, again_at) = not_started(facts, &kinds, now);
    let mut stale_at = None;
    let (mut lost, mut late, mut none_yet) = (Vec::new(), Vec::new(), Vec::new());
    for freshness in freshness::assess(policy, leases, now) {
        let until = match freshness {
            Freshness::Fresh(until) => until,
            Freshness::NoneYet(text, until) => {
                none_yet.push(text);
                until
            }
            Freshness::Late(text, until) => {
                late.push(text);
                until
            }
            Freshness::Never(text) | Freshness::Lost(text) => {
                lost.push(text);
                None
            }
        };
        stale_at = sooner(stale_at, until);
    }
    let assessment = if let Some(not_started) = not_started {
        let status = if lost.is_empty() { Unknown } else { False };
        Assessment::new(status, NOT_STARTED, not_started)
    } else if !lost.is_empty() {
        Assessment::new(False, "Stale", lost.join("; "))
    } else if !late.is_empty() {
        Assessment::new(Unknown, "Stale", late.join("; "))
    } else if !none_yet.is_empty() {
        Assessment::new(Unknown, "NoSnapshotYet", none_yet.join("; "))
    } else {
        Assessment::new(True, "SnapshotsInTime", "snapshots are taken on time")
    };
    assessment.until(sooner(stale_at, again_at))
}

/// Reports the last scheduled snapshot if it failed, unless a later snapshot was saved.
fn failed_snapshot(
    kind: &str,
    last_runs: &BTreeMap<String, ScheduledRun>,
    saved: Option<&SnapshotFact>,
    now: DateTime<Utc>,
) -> Option<Assessment> {
    let run = last_runs
        .get(kind)
        .filter(|r| r.result == RunState::Failed)?;
    let renewed = saved.and_then(|fact| last_renewal(fact, now));
    let ended = run.ended.or(run.started);
    if renewed.is_some() && ended.is_some() && ended <= renewed {
        return None;
    }
    let reason = run.reason.as_deref().unwrap_or("SnapshotFailed");
    let why = run.message.as_deref().unwrap_or(reason);
    let message = format!(
        "the last {kind} snapshot, the Job {}, failed: {why}",
        run.job
    );
    Some(Assessment::new(False, reason, message))
}

/// Reports what the follower says about itself in the delta Lease.
fn follower_problem(policy: &EtcdBackupPolicy, leases: &LeaseFacts) -> Option<Assessment> {
    policy.spec.snapshot.as_ref()?.follow.as_ref()?;
    let problem = leases.follower_problem.as_deref()?;
    let (reason, why) = problem.split_once(": ")?;
    let message = format!(
        "the follower {}-follow saves nothing: {why}",
        policy.name_any()
    );
    Some(Assessment::new(False, reason, message))
}

/// Returns why the Pods of Jobs, or of the follower, that do this work have not started; and when to look again.
fn not_started(
    facts: &Facts,
    kinds: &[WorkKind],
    now: DateTime<Utc>,
) -> (Option<String>, Option<DateTime<Utc>>) {
    let mut waiting = Vec::new();
    for job in &facts.jobs {
        let does_work = kinds.iter().any(|kind| kind.is_of(&**job));
        if !does_work || outcome::is_finished(job) {
            continue;
        }
        if let Some(why) = facts.run(job).message {
            waiting.push((format!("the Job {}: {why}", job.name_any()), &job.metadata));
        }
    }
    if kinds.contains(&WorkKind::Follow) {
        for pod in facts.follower_pods() {
            if let Some(why) = start::why_pod_not_started(pod, &facts.warnings) {
                waiting.push((format!("the follower: {why}"), &pod.metadata));
            }
        }
    }
    let mut again_at = None;
    for (why, metadata) in waiting {
        let created = created(metadata);
        let counts_at = later(created.unwrap_or(now), START_GRACE);
        if counts_at <= now {
            return (Some(why), None);
        }
        again_at = sooner(again_at, Some(counts_at));
    }
    (None, again_at)
}

/// Assesses BackupVerified: whether the last verification is recent and found no damage.
pub fn backup_verified(
    policy: &EtcdBackupPolicy,
    facts: &Facts,
    last: Option<&LastRun>,
    now: DateTime<Utc>,
) -> Assessment {
    let Some(verify) = &policy.spec.verify else {
        return Assessment::new(
            Unknown,
            "NotConfigured",
            "the policy has no spec.verify, so nothing verifies the backup: add a schedule there",
        );
    };
    let (not_started, again_at) = not_started(facts, &[WorkKind::Verification], now);
    if let Some(not_started) = not_started {
        return Assessment::new(Unknown, NOT_STARTED, not_started);
    }
    let verified = assess_verification(policy, &verify.schedule, last, now);
    let stale_at = sooner(verified.stale_at, again_at);
    verified.until(stale_at)
}

fn assess_verification(
    policy: &EtcdBackupPolicy,
    schedule: &str,
    last: Option<&LastRun>,
    now: DateTime<Utc>,
) -> Assessment {
    let ended = last.filter(|l| l.state != RunState::Running);
    let Some((last, verified_at)) = ended.and_then(|l| Some((l, l.completion_time?.min(now))))
    else {
        let message = "no verification of the backup has ended yet";
        return Assessment::new(Unknown, "NeverVerified", message);
    };
    if last.state == RunState::Failed {
        return failed_verification(last);
    }
    let cadence = Cadence::parse(schedule, policy);
    let stale_at = cadence.and_then(|c| c.overdue(verified_at, 2));
    if let Some(stale_since) = stale_at.filter(|&at| at <= now) {
        let message = format!(
            "the backup was last verified at {}. Two verifications have been missed since then, the second one by {}: check the Jobs of the CronJob {}-verify",
            rfc3339(verified_at),
            rfc3339(stale_since),
            policy.name_any()
        );
        return Assessment::new(Unknown, "VerificationStale", message);
    }
    let message = format!(
        "the backup was verified{} at {}",
        up_to_revision(last),
        rfc3339(verified_at)
    );
    Assessment::new(True, "Verified", message).until(stale_at)
}

fn failed_verification(last: &LastRun) -> Assessment {
    let why = outcome::failure_text(last);
    let reason = last.reason.as_deref().unwrap_or("VerificationFailed");
    if last.exit_code == Some(EXIT_WRONG_DATA) {
        let message = format!("the last verification found damage in the backup: {why}");
        Assessment::new(False, reason, message)
    } else {
        let message = format!("the last verification ended without a result: {why}");
        Assessment::new(Unknown, reason, message)
    }
}

/// Returns the assessment of a policy that is suspended, with what is not done then.
fn suspended(what: &str) -> Assessment {
    let message =
        format!("the policy is suspended, so {what}: set spec.suspend to false to resume");
    Assessment::new(Unknown, "Suspended", message)
}

/// Assesses CompactionHealthy: whether the compactions that thresholds start succeed.
pub fn compaction_healthy(
    policy: &EtcdBackupPolicy,
    facts: &LeaseFacts,
    last: Option<&LastCompaction>,
    now: DateTime<Utc>,
) -> Assessment {
    if policy.spec.suspend {
        return suspended("nothing is compacted");
    }
    if !policy.spec.compaction.enabled {
        return Assessment::new(
            Unknown,
            "NotConfigured",
            "compaction is not enabled in spec.compaction",
        );
    }
    // A failure counts even if the Leases are old.
    if let Some(failed) = last.and_then(failed_compaction) {
        return failed;
    }
    let mut stale_at = None;
    for freshness in freshness::assess(policy, facts, now) {
        let (reason, text) = match freshness {
            Freshness::Fresh(until) => {
                stale_at = sooner(stale_at, until);
                continue;
            }
            Freshness::NoneYet(text, _) | Freshness::Never(text) => ("NoSnapshotYet", text),
            Freshness::Late(text, _) | Freshness::Lost(text) => ("Stale", text),
        };
        let message = format!("it is unknown whether a compaction is due: {text}");
        return Assessment::new(Unknown, reason, message);
    }
    let (reason, message) = match last {
        None => ("NoneNeeded", "no threshold has been reached yet".to_owned()),
        Some(last) if last.run.state == RunState::Running => {
            let job = &last.job_name;
            match &last.run.message {
                Some(why) => (NOT_STARTED, format!("the Job {job}: {why}")),
                None => ("Running", format!("the Job {job} is running")),
            }
        }
        Some(last) => {
            let up_to = up_to_revision(&last.run);
            let message = format!("the Job {} succeeded{up_to}", last.job_name);
            ("Succeeded", message)
        }
    };
    Assessment::new(True, reason, message).until(stale_at)
}

/// Reports a compaction that failed, or that runs again after a failure.
fn failed_compaction(last: &LastCompaction) -> Option<Assessment> {
    let work = if last.full_snapshot {
        "full snapshot"
    } else {
        "compaction"
    };
    let (job, failures) = (&last.job_name, last.failures);
    match last.run.state {
        RunState::Failed => {
            let reason = last.run.reason.as_deref().unwrap_or("CompactionFailed");
            let why = outcome::failure_text(&last.run);
            let in_a_row = match failures {
                ..=1 => String::new(),
                _ => format!(" ({failures} failures in a row)"),
            };
            let message = format!("the {work} Job {job} failed{in_a_row}: {why}");
            Some(Assessment::new(False, reason, message))
        }
        RunState::Running if failures > 0 => {
            let in_a_row = match failures {
                1 => "a failure".to_owned(),
                _ => format!("{failures} failures in a row"),
            };
            let message = format!("the {work} Job {job} is running after {in_a_row}");
            Some(Assessment::new(False, "Retrying", message))
        }
        RunState::Running | RunState::Succeeded => None,
    }
}

/// Assesses CompactionHealthy if the Job that is due was refused, by the API server or by the limits.
pub fn compaction_refused(refusal: &Refusal) -> Assessment {
    let why = &refusal.message;
    if refusal.reason == TOO_MANY_JOBS {
        return Assessment::new(True, TOO_MANY_JOBS, format!("a compaction is due: {why}"));
    }
    let message = format!("a compaction is due, but its Job cannot be created: {why}");
    Assessment::new(False, "JobRefused", message)
}

/// Why a policy is not Ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The reason of the condition, such as `SpecInvalid` or `NotAllowed`.
    pub reason: String,
    /// The message of the condition.
    pub message: String,
}

/// Assesses Ready: whether the controller carries out the policy.
pub fn ready(policy: &EtcdBackupPolicy, problem: Option<&Problem>) -> Assessment {
    if let Some(problem) = problem {
        return Assessment::new(False, &problem.reason, &problem.message);
    }
    if policy.spec.suspend {
        Assessment::new(
            True,
            "Suspended",
            "the policy is valid but suspended: only tasks run",
        )
    } else {
        Assessment::new(
            True,
            "InOrder",
            "the policy is valid, and its objects are in place",
        )
    }
}

/// Returns the assessed conditions for the status. A condition keeps its transition time as long as its
/// status stays the same. Old conditions that were not assessed are left out.
pub fn merge(
    old: &[Condition],
    assessed: &[(&str, &Assessment)],
    generation: Option<i64>,
    now: DateTime<Utc>,
) -> Vec<Condition> {
    let mut conditions = Vec::new();
    for (type_, assessment) in assessed {
        let unchanged = old
            .iter()
            .find(|c| c.type_ == *type_ && c.status == assessment.status);
        conditions.push(Condition {
            type_: (*type_).to_owned(),
            status: assessment.status,
            reason: assessment.reason.clone(),
            message: assessment.message.clone(),
            last_transition_time: unchanged.map_or(whole_seconds(now), |c| c.last_transition_time),
            observed_generation: generation,
        });
    }
    conditions
}

/// Cuts off fractions of a second, as Kubernetes does. Otherwise the API server would return a different
/// status than the controller has written.
fn whole_seconds(time: DateTime<Utc>) -> DateTime<Utc> {
    DateTime::from_timestamp(time.timestamp(), 0).unwrap_or(time)
}

#[cfg(test)]
mod tests;
