//! The conditions of a policy: Ready, BackupReady, BackupVerified and CompactionHealthy.
//!
//! Pure: computes status, reason and message, and the time at which they change if nothing else happens.
//! Messages contain times and not ages: an age would change the message, and so write the status, all the
//! time. Called by `policy` and `plan`.

use super::compaction::up_to_revision;
use super::freshness::{self, Cadence, Freshness, RenewalTimes, last_renewal};
use crate::base::printable;
use crate::controller::api::{
    Condition, ConditionStatus, EtcdBackupPolicy, LastCompaction, LastRun, RunState,
};
use crate::controller::observe::leases::{LeaseFacts, SnapshotFact};
use crate::controller::observe::outcome;
use crate::controller::times::{rfc3339, sooner};
use ConditionStatus::{False, True, Unknown};
use chrono::{DateTime, Utc};
use kube::ResourceExt;

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

/// The last snapshot Jobs that have ended.
#[derive(Debug, Clone, Copy, Default)]
pub struct LastSnapshotRuns<'a> {
    /// The last full snapshot.
    pub full: Option<&'a LastRun>,
    /// The last delta snapshot.
    pub delta: Option<&'a LastRun>,
}

/// Assesses BackupReady: whether snapshots are taken on time.
///
/// - True while the Leases of both kinds are renewed on time.
/// - Unknown if a renewal is late, or there was none yet.
/// - False if a snapshot Job failed so that no retry can help, or if there was no renewal for three periods.
pub fn backup_ready(
    policy: &EtcdBackupPolicy,
    facts: &LeaseFacts,
    runs: &LastSnapshotRuns<'_>,
    seen: &RenewalTimes,
    now: DateTime<Utc>,
) -> Assessment {
    if policy.spec.suspend {
        return Assessment::new(
            Unknown,
            "Suspended",
            "the policy is suspended, so no snapshots are taken: set spec.suspend to false to resume",
        );
    }
    let renewal = |fact: Option<&SnapshotFact>, seen| last_renewal(fact?, seen, now);
    let full_renewal = renewal(facts.full.as_ref(), seen.full);
    let delta_renewal = renewal(facts.delta.as_ref(), seen.delta);
    let failed = permanent_failure("full", runs.full, full_renewal)
        .or_else(|| permanent_failure("delta", runs.delta, delta_renewal));
    if let Some(failed) = failed {
        return failed;
    }

    let mut stale_at = None;
    let (mut lost, mut late, mut none_yet) = (Vec::new(), Vec::new(), Vec::new());
    for freshness in freshness::assess(policy, facts, seen, now) {
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
    let assessment = if !lost.is_empty() {
        Assessment::new(False, "Stale", lost.join("; "))
    } else if !late.is_empty() {
        Assessment::new(Unknown, "Stale", late.join("; "))
    } else if !none_yet.is_empty() {
        Assessment::new(Unknown, "NoSnapshotYet", none_yet.join("; "))
    } else {
        Assessment::new(True, "SnapshotsInTime", "snapshots are taken on time")
    };
    assessment.until(stale_at)
}

/// Reports a failed snapshot Job that no retry can help, unless a later snapshot was saved.
fn permanent_failure(
    kind: &str,
    run: Option<&LastRun>,
    renewed: Option<DateTime<Utc>>,
) -> Option<Assessment> {
    let run = run.filter(|r| r.state == RunState::Failed && !outcome::is_worth_retrying(r))?;
    let ended = run.completion_time.or(run.start_time);
    let was_saved_later = renewed.is_some() && ended.is_some() && ended <= renewed;
    if was_saved_later {
        return None;
    }
    let message = format!(
        "the last {kind} snapshot failed, and no retry can help until the cause is removed: {}",
        outcome::failure_text(run)
    );
    Some(Assessment::new(False, "SnapshotFailed", message))
}

/// Assesses BackupVerified: whether the last verification is recent and found no damage.
pub fn backup_verified(
    policy: &EtcdBackupPolicy,
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
    let ended = last.filter(|l| l.state != RunState::Running);
    let Some((last, verified_at)) = ended.and_then(|l| Some((l, l.completion_time?.min(now))))
    else {
        let message = "no verification of the backup has ended yet";
        return Assessment::new(Unknown, "NeverVerified", message);
    };
    if last.state == RunState::Failed {
        return failed_verification(last);
    }
    let cadence = Cadence::parse(&verify.schedule, policy);
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

/// Assesses CompactionHealthy: whether the compactions that thresholds start succeed.
pub fn compaction_healthy(
    policy: &EtcdBackupPolicy,
    facts: &LeaseFacts,
    last: Option<&LastCompaction>,
    seen: &RenewalTimes,
    now: DateTime<Utc>,
) -> Assessment {
    if policy.spec.suspend {
        return Assessment::new(
            Unknown,
            "Suspended",
            "the policy is suspended, so nothing is compacted: set spec.suspend to false to resume",
        );
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
    for freshness in freshness::assess(policy, facts, seen, now) {
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
            ("Running", format!("the Job {} is running", last.job_name))
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
    let work = match last.full_snapshot {
        true => "full snapshot",
        false => "compaction",
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

/// Assesses CompactionHealthy if the API server refused to create the Job that is due.
pub fn job_refused(why: &str) -> Assessment {
    let message = format!("a compaction is due, but its Job cannot be created: {why}");
    Assessment::new(False, "JobRefused", message)
}

/// Why a policy is not Ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The reason of the condition, such as `SpecInvalid`, `NotAllowed` or `StorePrefixTaken`.
    pub reason: String,
    /// The message of the condition.
    pub message: String,
}

/// Assesses Ready: whether the controller carries out the policy.
pub fn ready(policy: &EtcdBackupPolicy, problem: Option<&Problem>) -> Assessment {
    if let Some(problem) = problem {
        return Assessment::new(False, &problem.reason, &problem.message);
    }
    match policy.spec.suspend {
        true => Assessment::new(
            True,
            "Suspended",
            "the policy is valid but suspended: only tasks run",
        ),
        false => Assessment::new(
            True,
            "InOrder",
            "the policy is valid, and its objects are in place",
        ),
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
