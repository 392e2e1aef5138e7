//! A policy: whether it is carried out, and its status as things are.
//!
//! Pure. Thresholds and tasks have rooms of their own (`compaction`, `task`). `plan` calls it.

use super::conditions::{self, Judgement, Problem};
use super::{Note, Options};
use crate::controller::api::{
    Claim, Claimed, Condition, ConditionStatus, EtcdBackupPolicy, EtcdBackupPolicyStatus,
    LastCompaction, LastRun, RestorableWindow, SnapshotStatus, SnapshotsStatus, TaskType,
};
use crate::controller::jobs::{self, WorkKind};
use crate::controller::names::label;
use crate::controller::observe::leases::{LeaseFacts, SnapshotFact};
use crate::controller::observe::{Observed, claim, claimed_value, outcome};
use crate::controller::times::utc;
use chrono::{DateTime, SubsecRound, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;

const READY: &str = "Ready";
const BACKUP_READY: &str = "BackupReady";
const COMPACTION_HEALTHY: &str = "CompactionHealthy";
const STORE_SHARED: &str = "StoreShared";
/// What the controller's flags do not allow.
pub const NOT_ALLOWED: &str = "NotAllowed";
/// What no Job could be made of.
const INVALID: &str = "SpecInvalid";
const PREFIX_TAKEN: &str = "StorePrefixTaken";
const LEASES_TAKEN: &str = "LeasePrefixTaken";

/// The later one of two looks at the last run of some work; of two at the same run the one that tells more.
fn later_run(before: Option<LastRun>, now: Option<LastRun>) -> Option<LastRun> {
    match (before, now) {
        (Some(before), Some(now)) => {
            let is_same = before.start_time == now.start_time;
            let stays = match is_same {
                true => outcome::is_more_complete(&before, &now),
                // Its Job may have been deleted, and only older ones be left.
                false => before.start_time > now.start_time,
            };
            Some(if stays { before } else { now })
        }
        (before, now) => now.or(before),
    }
}

/// What keeps a policy from being acted on at all.
pub fn impediment(
    policy: &EtcdBackupPolicy,
    observed: &Observed,
    options: &Options,
) -> Option<Problem> {
    let problem = |reason: &str, message: String| Problem {
        reason: reason.to_owned(),
        message,
    };
    let problems = jobs::problems(policy);
    if !problems.is_empty() {
        return Some(problem(INVALID, problems.join("; ")));
    }
    let not_allowed = options.allowed.problems(policy, &options.settings);
    if !not_allowed.is_empty() && (options.enforce_existing || !was_carried_out(policy)) {
        return Some(problem(NOT_ALLOWED, not_allowed.join("; ")));
    }
    let (what, holder) = observed.claim_holders.first()?;
    Some(match what {
        Claimed::Store => problem(
            PREFIX_TAKEN,
            format!(
                "policy {holder} has the same store, {}, and had it first: give each etcd a prefix of its own, or delete one of the two; where they are different servers or accounts, let store.options tell the endpoint or the account_name of each",
                policy.spec.store.url
            ),
        ),
        Claimed::Leases => problem(
            LEASES_TAKEN,
            format!(
                "policy {holder} has the same snapshot Leases, {}-…, and had them first: give each a snapshot.leasePrefix of its own",
                jobs::lease_prefix(policy)
            ),
        ),
    })
}

/// Whether what was right once goes on as it was: a slip of the pen must not end the backups.
pub fn leaves_all_as_it_is(problem: &Problem) -> bool {
    problem.reason == INVALID || problem.reason == NOT_ALLOWED
}

/// Whether this very spec was carried out before: by a controller that allowed it.
fn was_carried_out(policy: &EtcdBackupPolicy) -> bool {
    let Some(status) = &policy.status else {
        return false;
    };
    let is_true = |c: Option<&Condition>| c.is_some_and(|c| c.status == ConditionStatus::True);
    let was_refused = status
        .condition(READY)
        .is_some_and(|c| c.reason == NOT_ALLOWED);
    status.observed_generation == policy.metadata.generation
        && !was_refused
        && (is_true(status.condition(READY)) || is_true(status.condition(NOT_ALLOWED)))
}

/// What else is to be known of a policy, true or not there.
fn warnings(
    policy: &EtcdBackupPolicy,
    observed: &Observed,
    options: &Options,
    problem: Option<&Problem>,
) -> Vec<(&'static str, Judgement)> {
    let mut warnings = Vec::new();
    if observed.is_shared {
        let said = "a policy of another namespace has its backup in the same place, by its URL: give each etcd a prefix of its own; Jobs of the one whose cluster the store does not belong to end with OtherCluster";
        warnings.push((STORE_SHARED, Judgement::warning("SamePlace", said)));
    }
    let not_allowed = options.allowed.problems(policy, &options.settings);
    let is_refused = problem.is_some_and(|p| p.reason == NOT_ALLOWED);
    if !not_allowed.is_empty() && !is_refused && was_carried_out(policy) {
        let said = format!(
            "it goes on as before, and will be refused once it is changed: {}",
            not_allowed.join("; ")
        );
        warnings.push((NOT_ALLOWED, Judgement::warning("CarriedOutBefore", said)));
    }
    warnings
}

/// The conditions that snapshots and verifications tell, and what they are judged by.
#[derive(Debug)]
pub struct Health {
    /// Whether snapshots are taken in time.
    pub backup_ready: Judgement,
    verified: Judgement,
    last_verification: Option<LastRun>,
    last_maintenance: Option<LastRun>,
}

impl Health {
    /// How the backup of a policy is.
    pub fn of(policy: &EtcdBackupPolicy, observed: &Observed, now: DateTime<Utc>) -> Health {
        let old = policy.status.as_ref();
        let last = |work, task| last_run(observed, work, task);
        let verification = last(WorkKind::Verification, Some(TaskType::Verify));
        let before = old.and_then(|s| s.last_verification.clone());
        let last_verification = later_run(before, verification);
        let maintenance = last(WorkKind::Maintenance, Some(TaskType::Maintenance));
        let before = old.and_then(|s| s.last_defragmentation.clone());
        let (full, delta) = (
            last(WorkKind::FullSnapshot, None),
            last(WorkKind::DeltaSnapshot, None),
        );
        let runs = conditions::SnapshotRuns {
            full: full.as_ref(),
            delta: delta.as_ref(),
        };
        let facts = &observed.facts;
        Health {
            backup_ready: conditions::backup_ready(policy, facts, &runs, &seen(observed), now),
            verified: conditions::backup_verified(policy, last_verification.as_ref(), now),
            last_verification,
            last_maintenance: later_run(before, maintenance),
        }
    }

    /// Whether BackupReady is True.
    pub fn is_backed_up(&self) -> bool {
        self.backup_ready.status == ConditionStatus::True
    }
}

/// When the Leases were seen to be renewed.
pub fn seen(observed: &Observed) -> conditions::Seen {
    let [full, delta] = observed.lease_renewals;
    conditions::Seen { full, delta }
}

/// The newest Job of some work that has ended, by schedule or for a task.
fn last_run(observed: &Observed, work: WorkKind, task: Option<TaskType>) -> Option<LastRun> {
    let is_it = |job: &Job| {
        label(job, jobs::LABEL_WORK) == Some(work.as_str())
            || task.is_some_and(|t| label(job, jobs::LABEL_TASK_TYPE) == Some(t.as_str()))
    };
    let jobs = observed.jobs.iter();
    let ended = jobs.filter(|job| is_it(job) && outcome::is_finished(job));
    let job = ended.max_by_key(|job| (job.creation_timestamp().map(|t| t.0), job.name_any()))?;
    Some(outcome::last_run(job, &observed.pods_of(job)))
}

/// What was found out about a policy.
pub struct Findings<'f> {
    /// How its backup is.
    pub health: Health,
    /// What keeps it from being carried out.
    pub problem: Option<&'f Problem>,
    /// Its last compaction, and how compactions are, if thresholds are looked at.
    pub compaction: Option<(Option<LastCompaction>, &'f Judgement)>,
    /// Restorations by tasks that end now.
    pub restorations: Vec<&'f LastRun>,
}

/// The status of a policy, and until when that holds if nothing else changes.
pub fn status(
    policy: &EtcdBackupPolicy,
    observed: &Observed,
    options: &Options,
    findings: Findings<'_>,
    now: DateTime<Utc>,
) -> (EtcdBackupPolicyStatus, Option<DateTime<Utc>>) {
    let Findings {
        health,
        problem,
        compaction,
        restorations,
    } = findings;
    let old = policy.status.clone().unwrap_or_default();
    let ready = conditions::ready(policy, problem);
    let warnings = warnings(policy, observed, options, problem);
    let mut judged = vec![
        (READY, &ready),
        (BACKUP_READY, &health.backup_ready),
        ("BackupVerified", &health.verified),
    ];
    judged.extend(
        compaction
            .iter()
            .map(|(_, healthy)| (COMPACTION_HEALTHY, *healthy)),
    );
    judged.extend(warnings.iter().map(|(type_, judged)| (*type_, judged)));
    let stale_at = judged.iter().filter_map(|(_, j)| j.stale_at).min();
    let generation = policy.metadata.generation;
    let mut conditions = conditions::merge(&old.conditions, &judged, generation, now);
    if compaction.is_none() {
        let kept = old
            .conditions
            .iter()
            .filter(|c| c.type_ == COMPACTION_HEALTHY);
        conditions.extend(kept.cloned());
    }
    let before = old.last_restoration.clone();
    let status = EtcdBackupPolicyStatus {
        observed_generation: generation,
        conditions,
        snapshots: snapshots(&observed.facts),
        restorable_window: observed
            .facts
            .restorable
            .map(|(first_revision, last_revision)| RestorableWindow {
                first_revision,
                last_revision,
            }),
        last_verification: health.last_verification,
        last_defragmentation: health.last_maintenance,
        last_restoration: restorations.into_iter().fold(before, |before, run| {
            let is_later = before
                .as_ref()
                .is_none_or(|b| b.completion_time <= run.completion_time);
            if is_later { Some(run.clone()) } else { before }
        }),
        active_jobs: active_jobs(observed),
        claims: claims(policy, observed, problem, now),
        last_compaction: match compaction {
            Some((last, _)) => last,
            None => old.last_compaction,
        },
    };
    (status, stale_at)
}

fn active_jobs(observed: &Observed) -> Vec<String> {
    let active = observed
        .jobs
        .iter()
        .filter(|job| !outcome::is_finished(job));
    let mut names: Vec<String> = active.map(|job| job.name_any()).collect();
    names.sort();
    names
}

/// What the policy has for itself: what it had, and what nobody else has.
fn claims(
    policy: &EtcdBackupPolicy,
    observed: &Observed,
    problem: Option<&Problem>,
    now: DateTime<Utc>,
) -> Vec<Claim> {
    let may_claim = problem.is_none_or(|p| !leaves_all_as_it_is(p));
    let all = [Claimed::Store, Claimed::Leases]
        .into_iter()
        .filter_map(|what| {
            let has_holder = observed
                .claim_holders
                .iter()
                .any(|(taken, _)| *taken == what);
            let new = || Claim {
                what,
                of: claimed_value(policy, what),
                since: now.trunc_subsecs(0),
            };
            let may_claim = may_claim && !has_holder;
            claim(policy, what).or_else(|| may_claim.then(new))
        });
    all.collect()
}

fn snapshots(facts: &LeaseFacts) -> Option<SnapshotsStatus> {
    let full = facts.full.as_ref()?;
    let shown = |s: &SnapshotFact| SnapshotStatus {
        name: s.name.clone(),
        start_revision: s.start_revision,
        end_revision: s.revision,
        time: s.time,
        size: s.bytes,
    };
    Some(SnapshotsStatus {
        last_full: Some(shown(full)),
        // Where nothing came after the full, the other Lease tells of the same.
        last_delta: facts
            .delta
            .as_ref()
            .filter(|d| d.revision > full.revision)
            .map(shown),
        accumulated_delta_size: facts.accumulated_bytes,
        accumulated_delta_events: facts.accumulated_events,
    })
}

/// How long ago the newest snapshots were saved, in seconds, by kind.
pub fn snapshot_ages(
    policy: &EtcdBackupPolicy,
    facts: &LeaseFacts,
    now: DateTime<Utc>,
) -> Vec<(&'static str, f64)> {
    let age = |renewed: Option<DateTime<Utc>>| {
        renewed.map(|t| ((now - t).num_milliseconds() as f64 / 1000.0).max(0.0))
    };
    // Where there never was one, since there is somebody to take it.
    let created = policy.metadata.creation_timestamp.as_ref().map(utc);
    let [wants_full, wants_delta] = conditions::expects(policy);
    let since = |renewed: Option<DateTime<Utc>>, wanted: bool| {
        renewed.or(created.filter(|_| wanted && !policy.spec.suspend))
    };
    let full = since(facts.full.as_ref().and_then(|s| s.renewed), wants_full);
    // A full covers what the first deltas would.
    let first = facts.full.as_ref().filter(|_| wants_delta);
    let newest = facts.delta.as_ref().or(first);
    let delta = since(newest.and_then(|s| s.renewed), wants_delta);
    [("full", age(full)), ("delta", age(delta))]
        .into_iter()
        .filter_map(|(kind, age)| Some((kind, age?)))
        .collect()
}

/// What is told of conditions that have become others, once they are in the status.
pub fn notes(old: &[Condition], new: &[Condition]) -> Vec<Note> {
    let changed = new.iter().filter_map(|condition| {
        let before = old.iter().find(|c| c.type_ == condition.type_);
        // Of compactions each end is told, and whether they have become healthy again.
        let is_new = match condition.type_ == COMPACTION_HEALTHY {
            true => before.is_some_and(|c| c.status != condition.status),
            false => {
                before.is_none_or(|c| c.status != condition.status || c.reason != condition.reason)
            }
        };
        let is_first = before.is_none() && condition.status == ConditionStatus::Unknown;
        (is_new && !is_first).then(|| Note {
            warning: condition.status == ConditionStatus::False
                && condition.type_ != COMPACTION_HEALTHY
                || [STORE_SHARED, NOT_ALLOWED].contains(&condition.type_.as_str()),
            reason: condition.reason.clone(),
            action: "Observe",
            text: format!(
                "{} is {}: {}",
                condition.type_,
                condition.status.as_str(),
                condition.message
            ),
        })
    });
    changed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::RunState;
    use chrono::TimeDelta;

    #[test]
    fn what_was_known_of_a_run_stays_known() {
        let start = DateTime::UNIX_EPOCH;
        let run = |hours: i64, exit_code: Option<i32>| LastRun {
            state: RunState::Failed,
            start_time: Some(start + TimeDelta::hours(hours)),
            exit_code,
            ..LastRun::default()
        };
        let known = Some(run(2, Some(65)));
        // Its Pod is gone; its Job is gone and an older one is left; there is none.
        for now in [Some(run(2, None)), Some(run(1, Some(69))), None] {
            assert_eq!(later_run(known.clone(), now), known);
        }
        let newer = Some(run(3, None));
        assert_eq!(later_run(known, newer.clone()), newer);
        assert_eq!(later_run(None, newer.clone()), newer);
    }
}
