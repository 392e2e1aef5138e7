//! Decides whether a backup is healthy: a pure function of facts, options and the time.
//!
//! The decision reads nothing: the facts come from its caller.

use crate::base::duration::{self, parse_above_zero};
use crate::base::opt::{MAX_AGE, VERIFIED_WITHIN};
use crate::base::time::utc;
use crate::error::Reason;
use crate::mvcc::Revision;
use crate::ops::findings::Finding;
use crate::ops::live_follower::DeadFollower;
use crate::ops::snapshot::follow::LOCK;
use crate::ops::verify::record::{RecordLevel, RecordResult, VerificationRecord};
use crate::store::lock::lock_path;
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use std::time::Duration;

/// How far clocks may differ. A snapshot that is later than that is from the future.
const CLOCK_SKEW: TimeDelta = TimeDelta::minutes(5);
/// The allowed age of the newest snapshot if there are deltas, and if there are none: a daily full, and an
/// hour for it.
const MAX_AGE_WITH_DELTAS: Duration = Duration::from_secs(15 * 60);
const MAX_AGE_OF_FULLS: Duration = Duration::from_secs(25 * 3600);

/// What the verdict depends on beside the backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub struct Options {
    /// Report Stale (75) if the newest snapshot is older than this [default: 15m if there are deltas, otherwise
    /// 25h]
    ///
    /// An idle etcd has nothing to save, so its deltas may be rarer than that.
    #[arg(long, value_name = "DURATION", value_parser = parse_above_zero)]
    pub max_age: Option<Duration>,
    /// Report NotVerified (75) if no verification has succeeded for this time [default: only show the last one]
    ///
    /// Verifications of the level names do not count: they read no snapshot.
    #[arg(long, value_name = "DURATION", value_parser = parse_above_zero)]
    pub verified_within: Option<Duration>,
    /// For how long to report SetBack (75) after the cluster was set back; 0s: never
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration::parse)]
    pub set_back_age: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            max_age: None,
            verified_within: None,
            set_back_age: Duration::from_secs(24 * 3600),
        }
    }
}

/// The verdict in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Verdict {
    /// Nothing is wrong
    Healthy,
    /// The newest snapshot is too old, or the backup was not verified for too long
    Stale,
    /// The cluster was set back a short time ago
    SetBack,
    /// Snapshots are damaged or missing, or the last verification failed
    Damaged,
    /// There is nothing to restore
    Empty,
}

impl Verdict {
    /// Returns the word at the beginning of the text.
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::Healthy => "healthy",
            Verdict::Stale => "stale",
            Verdict::SetBack => "set back",
            Verdict::Damaged => "damaged",
            Verdict::Empty => "empty",
        }
    }
}

/// Revisions that are missing in the newest chain by the names of its snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PossibleGap {
    /// The last missing revision. A verification that read snapshots and reached it has found that a full
    /// holds these revisions beyond its name.
    pub(super) until: Revision,
    pub(super) message: String,
}

/// What is known of a backup.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts<'a> {
    /// Why nothing can be restored; `None` if something can.
    pub(super) empty: Option<Finding>,
    /// What is wrong without doubt, such as a gap.
    pub(super) damage: Vec<Finding>,
    pub(super) possible_gap: Option<PossibleGap>,
    /// When the newest snapshot was taken that is not from the future; `None` if there is none.
    pub(super) newest: Option<DateTime<Utc>>,
    pub(super) has_deltas: bool,
    pub(super) dead_follower: Option<DeadFollower>,
    /// The histories that were left, each with the time at which the next one began.
    pub(super) set_backs: Vec<(DateTime<Utc>, Finding)>,
    /// The last verification of each level. A time in the future counts as now.
    pub(super) records: &'a [VerificationRecord],
    /// Whether verifications can be recorded: not of plain snapshot files.
    pub(super) has_records: bool,
}

/// The verdict on a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Judgement {
    pub(super) verdict: Verdict,
    /// All that is wrong, the worst first.
    pub(super) findings: Vec<Finding>,
    /// The allowed age of the newest snapshot.
    pub(super) max_age: Duration,
}

/// Returns whether a time is later than clocks may differ.
pub(super) fn is_future(time: DateTime<Utc>, now: DateTime<Utc>) -> bool {
    time > now + CLOCK_SKEW
}

/// Decides whether a backup is healthy.
pub(super) fn decide(facts: &Facts, options: &Options, now: DateTime<Utc>) -> Judgement {
    let max_age = options.max_age.unwrap_or(if facts.has_deltas {
        MAX_AGE_WITH_DELTAS
    } else {
        MAX_AGE_OF_FULLS
    });
    let mut findings: Vec<Finding> = facts.empty.iter().chain(&facts.damage).cloned().collect();
    for failed in facts.records {
        if failed.result == RecordResult::Failed && !is_refuted(failed, facts.records, now) {
            findings.push(failure(failed));
        }
    }
    if let Some(gap) = &facts.possible_gap
        && !is_closed(gap, facts.records)
    {
        findings.push(Finding::error(Reason::RevisionGap, gap.message.clone()));
    }
    if facts.empty.is_none() {
        findings.extend(staleness(facts, max_age, now));
        findings.extend(death_of_follower(facts, now));
        findings.extend(lack_of_verification(facts, options, now));
    }
    let set_backs = facts.set_backs.iter();
    let recent = set_backs.filter(|(began, _)| age(*began, now) < options.set_back_age);
    findings.extend(recent.map(|(_, finding)| finding.clone()));
    // Nothing there is worse than damage, and damage is worse than age. The sort keeps the order of equals.
    findings.sort_by_key(|f| match verdict_of(f) {
        Verdict::Empty => 0,
        Verdict::Damaged => 1,
        Verdict::SetBack => 2,
        _ => 3,
    });
    let verdict = findings.first().map_or(Verdict::Healthy, verdict_of);
    Judgement {
        verdict,
        findings,
        max_age,
    }
}

/// The verdict on a backup with this finding alone.
fn verdict_of(finding: &Finding) -> Verdict {
    match finding.failure() {
        Some(Reason::NoSnapshots | Reason::OutOfRange) => Verdict::Empty,
        Some(Reason::SetBack) => Verdict::SetBack,
        Some(Reason::Stale | Reason::NotVerified) => Verdict::Stale,
        _ => Verdict::Damaged,
    }
}

/// Returns whether another record shows that what a verification found is no longer so: a later success that
/// is at least as deep and as wide.
fn is_refuted(
    failed: &VerificationRecord,
    records: &[VerificationRecord],
    now: DateTime<Utc>,
) -> bool {
    records.iter().any(|r| {
        r.result == RecordResult::Verified
            && r.time.min(now) > failed.time.min(now)
            && r.drill_succeeded != Some(false)
            && r.covers(failed)
    })
}

/// The finding of a verification that failed.
fn failure(record: &VerificationRecord) -> Finding {
    // Anybody may have written the record: the exit code must not be another one than that of damage.
    let reason = record.known_reason().filter(|r| r.exit_code() == 65);
    let reason = reason.unwrap_or(Reason::CorruptSnapshot);
    let kind = match record.level {
        RecordLevel::Cluster => "the comparison with the live etcd".to_owned(),
        level => format!("the verification (level {})", level.as_str()),
    };
    let recorded = record.reason.as_deref().unwrap_or("no reason recorded");
    let time = utc(record.time);
    Finding::error(
        reason,
        format!(
            "{kind} of {time} failed ({recorded}), and no later one of that depth has succeeded"
        ),
    )
}

/// Returns whether a verification has read the snapshots at the gap and found none.
fn is_closed(gap: &PossibleGap, records: &[VerificationRecord]) -> bool {
    records.iter().any(|r| {
        r.result == RecordResult::Verified
            && r.level >= RecordLevel::Checksums
            && r.revision >= Some(gap.until)
    })
}

/// Returns a finding if the newest snapshot is too old.
fn staleness(facts: &Facts, max_age: Duration, now: DateTime<Utc>) -> Option<Finding> {
    let Some(newest) = facts.newest else {
        let message = "all snapshots are from the future, so their age is unknown: set the clocks of this machine and of the one that takes the snapshots";
        return Some(Finding::error(Reason::Stale, message));
    };
    let age = age(newest, now);
    (age > max_age).then(|| {
        Finding::error(
            Reason::Stale,
            format!(
                "the newest snapshot is {} old, and {MAX_AGE} is {}",
                duration::whole(age),
                duration::whole(max_age)
            ),
        )
    })
}

/// Returns a finding if the follower is dead, however new the snapshots are: of an idle etcd they are old anyway.
fn death_of_follower(facts: &Facts, now: DateTime<Utc>) -> Option<Finding> {
    let DeadFollower { holder, renewed } = facts.dead_follower.as_ref()?;
    let age = duration::whole(age(*renewed, now));
    let lock = lock_path(LOCK);
    Some(Finding::error(
        Reason::Stale,
        format!(
            "the follower {holder} has not renewed its lock for {age}, so nobody saves the changes of etcd: start it again. If something else saves them now, delete {lock}"
        ),
    ))
}

/// Returns a finding if no verification that reads snapshots has succeeded in time.
fn lack_of_verification(facts: &Facts, options: &Options, now: DateTime<Utc>) -> Option<Finding> {
    let within = options.verified_within.filter(|_| facts.has_records)?;
    let is_good = |r: &&VerificationRecord| {
        r.result == RecordResult::Verified && r.level >= RecordLevel::Checksums
    };
    let last = facts.records.iter().filter(is_good).map(|r| r.time).max();
    let message = match last.map(|t| age(t, now)) {
        Some(age) if age <= within => return None,
        Some(age) => format!(
            "the last successful verification was {} ago",
            duration::whole(age)
        ),
        None => "no verification of the level checksums or deeper has succeeded".to_owned(),
    };
    Some(Finding::error(
        Reason::NotVerified,
        format!(
            "{message}, and {VERIFIED_WITHIN} is {}",
            duration::whole(within)
        ),
    ))
}

/// Returns how long ago a time was; zero if it is in the future.
pub(super) fn age(time: DateTime<Utc>, now: DateTime<Utc>) -> Duration {
    (now - time).to_std().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_800_000_000, 0).unwrap()
    }

    fn ago(minutes: i64) -> DateTime<Utc> {
        now() - TimeDelta::minutes(minutes)
    }

    fn fresh(records: &[VerificationRecord]) -> Facts<'_> {
        Facts {
            newest: Some(ago(10)),
            has_deltas: true,
            has_records: true,
            records,
            ..Facts::default()
        }
    }

    fn record(level: RecordLevel, minutes: i64) -> VerificationRecord {
        VerificationRecord {
            time: ago(minutes),
            revision: Some(Revision(100)),
            ..VerificationRecord::new(level)
        }
    }

    fn reasons(facts: &Facts, options: &Options) -> (Verdict, Vec<Reason>) {
        let judgement = decide(facts, options, now());
        let reasons = judgement
            .findings
            .iter()
            .filter_map(Finding::failure)
            .collect();
        (judgement.verdict, reasons)
    }

    fn of_records(records: &[VerificationRecord]) -> Verdict {
        decide(&fresh(records), &Options::default(), now()).verdict
    }

    #[test]
    fn the_newest_snapshot_may_be_15_minutes_old_with_deltas_and_25_hours_without() {
        let status = |minutes: i64, has_deltas, max_age: Option<u64>| {
            let facts = Facts {
                newest: Some(ago(minutes)),
                has_deltas,
                ..fresh(&[])
            };
            let options = Options {
                max_age: max_age.map(|m| Duration::from_secs(m * 60)),
                ..Options::default()
            };
            reasons(&facts, &options)
        };
        let healthy = (Verdict::Healthy, vec![]);
        let stale = (Verdict::Stale, vec![Reason::Stale]);
        assert_eq!(status(15, true, None), healthy);
        assert_eq!(status(16, true, None), stale);
        assert_eq!(status(25 * 60, false, None), healthy);
        assert_eq!(status(25 * 60 + 1, false, None), stale);
        assert_eq!(status(16, true, Some(16)), healthy);
        assert_eq!(status(17, true, Some(16)), stale);
        // A clock that is a little ahead.
        assert_eq!(status(-4, true, None), healthy);
    }

    #[test]
    fn a_dead_follower_is_found_however_new_the_snapshots_are() {
        let facts = Facts {
            dead_follower: Some(DeadFollower {
                holder: "host.1".to_owned(),
                renewed: ago(3),
            }),
            ..fresh(&[])
        };
        let options = Options {
            max_age: Some(Duration::from_secs(1_000_000)),
            ..Options::default()
        };
        let judgement = decide(&facts, &options, now());
        assert_eq!(judgement.verdict, Verdict::Stale);
        let message = &judgement.findings[0].message;
        assert!(
            message.contains("host.1 has not renewed its lock for 3m"),
            "{message}"
        );
    }

    #[test]
    fn snapshots_from_the_future_do_not_make_a_backup_fresh() {
        assert!(!is_future(ago(-5), now()));
        assert!(is_future(ago(-6), now()));
        let facts = Facts {
            newest: None,
            ..fresh(&[])
        };
        let (status, reasons) = reasons(&facts, &Options::default());
        assert_eq!((status, reasons), (Verdict::Stale, vec![Reason::Stale]));
    }

    #[test]
    fn the_worst_comes_first() {
        let failed = [record(RecordLevel::Fold, 10).failed(Reason::DrillFailed)];
        let mut facts = Facts {
            newest: Some(ago(10_000)),
            ..fresh(&failed)
        };
        let options = Options {
            verified_within: Some(Duration::from_secs(60)),
            ..Options::default()
        };
        let age = [Reason::Stale, Reason::NotVerified];
        let expected = [&[Reason::DrillFailed][..], &age].concat();
        assert_eq!(reasons(&facts, &options), (Verdict::Damaged, expected));
        facts.damage = vec![Finding::error(Reason::RevisionGap, "gap")];
        let expected = [&[Reason::RevisionGap, Reason::DrillFailed][..], &age].concat();
        assert_eq!(reasons(&facts, &options), (Verdict::Damaged, expected));
        // The age of nothing is of no interest.
        facts.empty = Some(Finding::error(Reason::NoSnapshots, "nothing"));
        let expected = vec![
            Reason::NoSnapshots,
            Reason::RevisionGap,
            Reason::DrillFailed,
        ];
        assert_eq!(reasons(&facts, &options), (Verdict::Empty, expected));
    }

    #[test]
    fn whatever_is_neither_age_nor_a_set_back_nor_emptiness_is_damage() {
        for &reason in Reason::ALL {
            let facts = Facts {
                damage: vec![Finding::error(reason, "it")],
                ..fresh(&[])
            };
            let expected = match reason {
                Reason::NoSnapshots | Reason::OutOfRange => Verdict::Empty,
                Reason::SetBack => Verdict::SetBack,
                Reason::Stale | Reason::NotVerified => Verdict::Stale,
                _ => Verdict::Damaged,
            };
            let decided = reasons(&facts, &Options::default());
            assert_eq!(decided, (expected, vec![reason]));
        }
    }

    #[test]
    fn a_failure_counts_until_a_later_success_of_that_depth_and_width() {
        use RecordLevel::*;
        let failed = |level, minutes| record(level, minutes).failed(Reason::CorruptSnapshot);
        assert_eq!(of_records(&[failed(Fold, 100)]), Verdict::Damaged);
        for (level, minutes, expected) in [
            (Checksums, 50, Verdict::Healthy),
            (Fold, 50, Verdict::Healthy),
            (Cluster, 50, Verdict::Healthy),
            (Names, 50, Verdict::Damaged),
            (Fold, 100, Verdict::Damaged),
            (Fold, 150, Verdict::Damaged),
            (Fold, -60, Verdict::Healthy),
        ] {
            let records = [failed(Checksums, 100), record(level, minutes)];
            assert_eq!(of_records(&records), expected, "{level:?} {minutes}");
        }
        // A time in the future counts as now, so no success of today is later.
        assert_eq!(
            of_records(&[failed(Checksums, -60), record(Fold, 0)]),
            Verdict::Damaged
        );
        // The newest chain alone does not refute a failure of all chains, nor a fold a failed drill.
        let wide = VerificationRecord {
            all_chains: true,
            ..failed(Checksums, 100)
        };
        let drilled = VerificationRecord {
            drill_succeeded: Some(false),
            ..failed(Fold, 100)
        };
        for failed in [wide, drilled] {
            let narrow = record(Cluster, 50);
            assert_eq!(
                of_records(&[failed.clone(), narrow.clone()]),
                Verdict::Damaged
            );
            let all = VerificationRecord {
                all_chains: true,
                drill_succeeded: Some(true),
                ..narrow
            };
            assert_eq!(of_records(&[failed, all]), Verdict::Healthy);
        }
    }

    #[test]
    fn a_forged_reason_does_not_change_the_exit_code() {
        for reason in ["Usage", "NoSnapshots", "x"] {
            let forged = VerificationRecord {
                reason: Some(reason.to_owned()),
                ..record(RecordLevel::Fold, 5).failed(Reason::CorruptSnapshot)
            };
            let judgement = decide(&fresh(&[forged]), &Options::default(), now());
            assert_eq!(judgement.findings[0].reason, "CorruptSnapshot");
            assert!(judgement.findings[0].message.contains(reason));
        }
    }

    #[test]
    fn only_verifications_that_read_snapshots_count() {
        use RecordLevel::*;
        let options = Options {
            verified_within: Some(Duration::from_secs(3600)),
            ..Options::default()
        };
        let verified = |records: &[VerificationRecord]| {
            let (status, reasons) = reasons(&fresh(records), &options);
            assert_eq!(status == Verdict::Stale, reasons == [Reason::NotVerified]);
            status == Verdict::Healthy
        };
        assert!(!verified(&[]));
        assert!(!verified(&[record(Names, 1)]));
        assert!(verified(&[record(Checksums, 60)]));
        assert!(!verified(&[record(Cluster, 61)]));
        assert!(verified(&[record(Fold, -6)]));
        assert!(verified(&[record(Names, 1), record(Cluster, 5)]));
        // Without the option, and of plain files, the age of a verification is only shown.
        assert_eq!(of_records(&[record(Fold, 1_000_000)]), Verdict::Healthy);
        let files = Facts {
            has_records: false,
            ..fresh(&[])
        };
        assert_eq!(reasons(&files, &options).0, Verdict::Healthy);
    }

    #[test]
    fn a_possible_gap_is_closed_by_a_verification_that_read_beyond_it() {
        use RecordLevel::*;
        let status = |records: &[VerificationRecord], until| {
            let facts = Facts {
                possible_gap: Some(PossibleGap {
                    until: Revision(until),
                    message: "gap".to_owned(),
                }),
                ..fresh(records)
            };
            reasons(&facts, &Options::default())
        };
        let gap = (Verdict::Damaged, vec![Reason::RevisionGap]);
        let healthy = (Verdict::Healthy, vec![]);
        assert_eq!(status(&[], 100), gap);
        assert_eq!(status(&[record(Names, 5)], 100), gap);
        assert_eq!(status(&[record(Checksums, 5)], 100), healthy);
        assert_eq!(status(&[record(Checksums, 5)], 101), gap);
    }
}
