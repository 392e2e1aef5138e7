//! Whether the newest snapshots of a policy are as recent as the policy expects.
//!
//! Pure: reads the contents of the snapshot Leases and the policy. Sets no condition: `conditions` does.

use crate::controller::api::{ConditionStatus, EtcdBackupPolicy};
use crate::controller::facts::leases::{LeaseFacts, SnapshotFact};
use crate::controller::times::{created, later, rfc3339, time_delta};
use crate::ops::schedule::Schedule;
use chrono::{DateTime, TimeDelta, Utc};
use kube::ResourceExt;

/// How often etcd-druid's sidecar takes snapshots by default. Expected if the policy itself takes none.
const SIDECAR_FULL_PERIOD: TimeDelta = TimeDelta::hours(24);
const SIDECAR_DELTA_PERIOD: TimeDelta = TimeDelta::minutes(5);
/// The shortest grace period: Pods take time to start.
const MIN_GRACE: TimeDelta = TimeDelta::minutes(2);
/// After this many periods without a snapshot something is broken.
const LOST_AFTER_PERIODS: i32 = 3;
/// A renewal that is further in the future than this comes from a wrong clock, and is ignored.
const MAX_CLOCK_SKEW: TimeDelta = TimeDelta::hours(1);
/// The default of a policy's `timeZone`.
const DEFAULT_TIME_ZONE: &str = "Etc/UTC";

/// How recent the newest snapshot of a kind is. The time, if any, is when this changes without a new
/// snapshot. The text describes the problem.
pub enum Freshness {
    /// The newest snapshot is recent enough.
    Fresh(Option<DateTime<Utc>>),
    /// There was no snapshot yet, which is normal for a new policy.
    NoneYet(String, Option<DateTime<Utc>>),
    /// There was never a snapshot, although several were due.
    Never(String),
    /// The newest snapshot is too old; the next one may only be late.
    Late(String, Option<DateTime<Utc>>),
    /// The newest snapshot is so old that something must be broken.
    Lost(String),
}

/// How often a snapshot or a verification is expected.
pub enum Cadence {
    /// By a schedule.
    Schedule(Schedule),
    /// With a fixed period.
    Period(TimeDelta),
}

impl Cadence {
    /// Parses a schedule in the time zone of the policy. `None` if it is invalid, which the condition Ready
    /// reports.
    pub fn parse(schedule: &str, policy: &EtcdBackupPolicy) -> Option<Cadence> {
        let snapshot = policy.spec.snapshot.as_ref();
        let time_zone = snapshot.and_then(|s| s.time_zone.as_deref());
        let schedule = Schedule::parse(schedule, time_zone.unwrap_or(DEFAULT_TIME_ZONE)).ok()?;
        Some(Cadence::Schedule(schedule))
    }

    /// Returns when the `nth` event after the one at `from` is overdue: it is late by more than half a
    /// period, and by more than two minutes. `None` if the schedule has no such event.
    ///
    /// The period of a schedule is the shorter one of those before and after the next event. So the grace
    /// period of Monday's snapshot is half a day, not half a weekend.
    pub fn overdue(&self, from: DateTime<Utc>, nth: i32) -> Option<DateTime<Utc>> {
        let (period, expected) = match self {
            Cadence::Period(period) => (*period, from),
            Cadence::Schedule(schedule) => {
                let next = schedule.next_after(from)?;
                let mut expected = next;
                for _ in 1..nth {
                    expected = schedule.next_after(expected)?;
                }
                let previous = schedule.missed(DateTime::UNIX_EPOCH, from);
                let period_before = previous.map(|previous| next - previous);
                let period_after = schedule.next_after(next).map(|after| after - next);
                let periods = period_before.into_iter().chain(period_after);
                (periods.min()?, expected)
            }
        };
        let periods = period.checked_mul(nth).unwrap_or(TimeDelta::MAX);
        let grace = (period / 2).max(MIN_GRACE);
        Some(later(later(from, periods).max(expected), grace))
    }
}

/// Describes a period, such as `every 5 min`.
fn every(period: TimeDelta) -> String {
    let seconds = period.num_seconds();
    if seconds >= 3600 && seconds % 3600 == 0 {
        format!("every {} h", seconds / 3600)
    } else if seconds % 60 == 0 {
        format!("every {} min", seconds / 60)
    } else {
        format!("every {seconds} s")
    }
}

/// The snapshots of one kind that somebody is expected to take.
struct ExpectedSnapshots {
    /// `full` or `delta`.
    kind: &'static str,
    /// `None` if one snapshot is enough, or if the schedule is invalid.
    cadence: Option<Cadence>,
    /// The cadence in words.
    cadence_text: String,
    /// What a user should do if snapshots are missing.
    advice: String,
}

impl ExpectedSnapshots {
    fn scheduled(
        kind: &'static str,
        schedule: &str,
        policy: &EtcdBackupPolicy,
        advice: String,
    ) -> ExpectedSnapshots {
        let cadence = Cadence::parse(schedule, policy);
        let cadence_text = match cadence {
            Some(_) => format!("by the schedule \"{schedule}\""),
            None => String::new(),
        };
        ExpectedSnapshots {
            kind,
            cadence,
            cadence_text,
            advice,
        }
    }

    fn periodic(kind: &'static str, period: TimeDelta, advice: String) -> ExpectedSnapshots {
        ExpectedSnapshots {
            kind,
            cadence: Some(Cadence::Period(period)),
            cadence_text: every(period),
            advice,
        }
    }

    fn overdue(&self, from: DateTime<Utc>, nth: i32) -> Option<DateTime<Utc>> {
        self.cadence.as_ref()?.overdue(from, nth)
    }
}

/// Returns the full and the delta snapshots that are expected; `None` for a kind that nobody takes.
fn expected(policy: &EtcdBackupPolicy) -> [Option<ExpectedSnapshots>; 2] {
    let snapshot = policy.spec.snapshot.as_ref();
    let full_schedule = snapshot.and_then(|s| s.full_schedule.as_deref());
    let delta_schedule = snapshot.and_then(|s| s.delta_schedule.as_deref());
    let follow = snapshot.and_then(|s| s.follow.as_ref());
    if full_schedule.is_none() && delta_schedule.is_none() && follow.is_none() {
        let advice = "check the sidecar that takes snapshots";
        let periods = [
            ("full", SIDECAR_FULL_PERIOD),
            ("delta", SIDECAR_DELTA_PERIOD),
        ];
        return periods.map(|(kind, period)| {
            Some(ExpectedSnapshots::periodic(kind, period, advice.to_owned()))
        });
    }
    let name = policy.name_any();
    let check_follower = format!("check the Deployment {name}-follow");
    let check_cron_job = |kind| format!("check the Jobs of the CronJob {name}-{kind}");
    let full = match (full_schedule, follow) {
        // The follower takes the full snapshots, too.
        (Some(schedule), Some(_)) => {
            ExpectedSnapshots::scheduled("full", schedule, policy, check_follower.clone())
        }
        (Some(schedule), None) => {
            ExpectedSnapshots::scheduled("full", schedule, policy, check_cron_job("full"))
        }
        // The first full snapshot is enough: compactions make the others.
        (None, _) => ExpectedSnapshots {
            kind: "full",
            cadence: None,
            cadence_text: String::new(),
            advice: "create a task OnDemandSnapshot".to_owned(),
        },
    };
    let delta = match (delta_schedule, follow) {
        (_, Some(follow)) => {
            let period = time_delta(follow.period());
            Some(ExpectedSnapshots::periodic("delta", period, check_follower))
        }
        (Some(schedule), None) => {
            let advice = check_cron_job("delta");
            Some(ExpectedSnapshots::scheduled(
                "delta", schedule, policy, advice,
            ))
        }
        (None, None) => None,
    };
    [Some(full), delta]
}

/// Whether full snapshots, and whether delta snapshots, are expected.
pub fn expects(policy: &EtcdBackupPolicy) -> [bool; 2] {
    expected(policy).map(|e| e.is_some())
}

/// Returns when a Lease was last renewed: the later one of its own time and of the time at which this
/// controller saw the renewal. A time in the future counts as now; far in the future it is ignored.
pub fn last_renewal(fact: &SnapshotFact, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
    let is_plausible = |time: &DateTime<Utc>| *time <= later(now, MAX_CLOCK_SKEW);
    let by_renewal = fact.renewed.filter(is_plausible);
    let reported = by_renewal.or(fact.time.filter(is_plausible));
    reported.max(fact.renewal_seen).map(|t| t.min(now))
}

/// Assesses the snapshots of both kinds; leaves out a kind that nobody takes.
pub fn assess(policy: &EtcdBackupPolicy, facts: &LeaseFacts, now: DateTime<Utc>) -> Vec<Freshness> {
    let full = facts.full.as_ref();
    let full_renewal = full.and_then(|fact| last_renewal(fact, now));
    let delta = facts.delta.as_ref();
    let delta_renewal = delta.and_then(|fact| last_renewal(fact, now));
    let created = created(&policy.metadata);
    let spec_changed = fresh_spec(policy, now);
    let [expected_full, expected_delta] = expected(policy);

    let mut kinds = Vec::new();
    if let Some(expected) = expected_full {
        kinds.push(SnapshotKind {
            expected,
            fact: full,
            foreign_holder: facts.foreign_full_holder.as_deref(),
            renewed: full_renewal,
            spec_changed,
            policy_created: created,
        });
    }
    if let Some(expected) = expected_delta {
        // Before the first delta, the full snapshot counts for both kinds. Later it does not: a compaction
        // makes a full snapshot of deltas that exist already, and adds no newer events.
        let is_before_first = delta.is_none() && facts.foreign_delta_holder.is_none();
        kinds.push(SnapshotKind {
            expected,
            fact: delta.or(full.filter(|_| is_before_first)),
            foreign_holder: facts.foreign_delta_holder.as_deref(),
            renewed: delta_renewal.or(full_renewal.filter(|_| is_before_first)),
            spec_changed,
            policy_created: created,
        });
    }
    kinds.iter().map(|kind| kind.freshness(now)).collect()
}

/// Returns when the spec was last changed, if the snapshots were on time then: the next one is expected by the new
/// schedule, counted from the change.
fn fresh_spec(policy: &EtcdBackupPolicy, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
    let status = policy.status.as_ref()?;
    let ready = status.condition("BackupReady")?;
    if ready.status != ConditionStatus::True {
        return None;
    }
    if status.observed_generation == policy.metadata.generation {
        status.changed_at.filter(|&at| at <= now)
    } else {
        Some(now)
    }
}

/// The snapshots of one kind: the expected ones, and the newest one that exists.
struct SnapshotKind<'a> {
    expected: ExpectedSnapshots,
    fact: Option<&'a SnapshotFact>,
    /// The holder of the Lease, if it is not a revision.
    foreign_holder: Option<&'a str>,
    renewed: Option<DateTime<Utc>>,
    /// When the schedule may have become shorter.
    spec_changed: Option<DateTime<Utc>>,
    policy_created: Option<DateTime<Utc>>,
}

impl SnapshotKind<'_> {
    fn freshness(&self, now: DateTime<Utc>) -> Freshness {
        let Some(renewed) = self.renewed else {
            return self.without_snapshot(now);
        };
        let since = self.spec_changed.max(Some(renewed)).unwrap_or(renewed);
        let late_at = self.expected.overdue(since, 1);
        let Some(late_since) = late_at.filter(|&at| at <= now) else {
            return Freshness::Fresh(late_at);
        };
        let kind = self.expected.kind;
        let snapshot = match self.fact {
            Some(fact) => match &fact.name {
                Some(name) => format!("{name} (revision {})", fact.revision),
                None => format!("of revision {}", fact.revision),
            },
            None => "unknown by name".to_owned(),
        };
        let text = format!(
            "the newest {kind} snapshot is {snapshot}; its Lease was last renewed at {}. Snapshots are due {}, and the next one has been overdue since {}: {}",
            rfc3339(renewed),
            self.expected.cadence_text,
            rfc3339(late_since),
            self.expected.advice
        );
        match self.expected.overdue(since, LOST_AFTER_PERIODS) {
            Some(lost_at) if lost_at <= now => Freshness::Lost(text),
            lost_at => Freshness::Late(text, lost_at),
        }
    }

    fn without_snapshot(&self, now: DateTime<Utc>) -> Freshness {
        let kind = self.expected.kind;
        let (problem, advice) = match (self.fact, self.foreign_holder) {
            (Some(fact), _) => (
                format!(
                    "when the {kind} snapshot up to revision {} was taken is unknown: the time in its Lease is in the future",
                    fact.revision
                ),
                Some("check the clock of the machine that takes snapshots"),
            ),
            (None, Some(holder)) => (
                format!(
                    "the Lease of {kind} snapshots is held by \"{holder}\", which is not a revision"
                ),
                Some("check snapshot.leasePrefix"),
            ),
            (None, None) => (format!("there is no {kind} snapshot yet"), None),
        };
        let since = self.policy_created.map(|created| created.min(now));
        let lost_at = since.and_then(|since| self.expected.overdue(since, LOST_AFTER_PERIODS));
        if lost_at.is_some_and(|at| at <= now) {
            return Freshness::Never(format!(
                "{problem}, although one is due {}: {}",
                self.expected.cadence_text,
                advice.unwrap_or(&self.expected.advice)
            ));
        }
        let text = match advice {
            Some(advice) => format!("{problem}: {advice}"),
            None => problem,
        };
        Freshness::NoneYet(text, lost_at)
    }
}
