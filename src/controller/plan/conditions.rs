//! The conditions of a policy: Ready, BackupReady, BackupVerified, CompactionHealthy.
//!
//! Pure: what is known and now become a status, a reason, a sentence, and the time at which that is no longer
//! so. No sentence holds an age: it would be another one at every look. `policy` and `compaction` write them.

use crate::controller::api::{
    Condition, ConditionStatus, EtcdBackupPolicy, LastCompaction, LastRun, RunState,
};
use crate::controller::observe::leases::{LeaseFacts, SnapshotFact};
use crate::controller::observe::outcome;
use crate::controller::times::{delta as span, later, shown, sooner};
use crate::ops::schedule::Schedule;
use chrono::{DateTime, TimeDelta, Utc};
use kube::ResourceExt;

/// How often etcd-druid's sidecar takes snapshots, if it was told nothing else: where the policy takes none itself.
const SIDECAR_FULL: TimeDelta = TimeDelta::hours(24);
const SIDECAR_DELTA: TimeDelta = TimeDelta::minutes(5);
/// Whatever the period: Pods take time to start.
const LEAST_GRACE: TimeDelta = TimeDelta::minutes(2);
/// After so many periods without news something is broken.
const LOST_AFTER: i32 = 3;
/// A renewal that is farther ahead than this tells nothing: that clock is wrong.
const WRONG_CLOCK: TimeDelta = TimeDelta::hours(1);
/// The default of a policy's `timeZone`.
const UTC_ZONE: &str = "Etc/UTC";

/// How a condition is, and until when that holds if nothing else changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// True, False or Unknown.
    pub status: ConditionStatus,
    /// A word for machines.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
    /// When time alone makes another one of it.
    pub stale_at: Option<DateTime<Utc>>,
}

impl Judgement {
    fn new(status: ConditionStatus, reason: &str, message: impl Into<String>) -> Self {
        Judgement {
            status,
            reason: reason.to_owned(),
            message: message.into(),
            stale_at: None,
        }
    }

    /// Something to be known that holds nothing up.
    pub fn warning(reason: &str, message: impl Into<String>) -> Self {
        Judgement::new(ConditionStatus::True, reason, message)
    }

    fn until(self, stale_at: Option<DateTime<Utc>>) -> Self {
        Judgement { stale_at, ..self }
    }
}

/// When this controller saw the Leases change, by its own clock; `None` of one that has not since it looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    /// The full Lease.
    pub full: Option<DateTime<Utc>>,
    /// The delta Lease.
    pub delta: Option<DateTime<Utc>>,
}

/// The last snapshot Jobs that have ended.
#[derive(Debug, Clone, Copy, Default)]
pub struct SnapshotRuns<'a> {
    /// Of full snapshots.
    pub full: Option<&'a LastRun>,
    /// Of delta snapshots.
    pub delta: Option<&'a LastRun>,
}

/// How often something is to happen.
enum Rhythm {
    At(Schedule),
    Every(TimeDelta),
}

impl Rhythm {
    fn parse(schedule: &str, policy: &EtcdBackupPolicy) -> Option<Rhythm> {
        let snapshot = policy.spec.snapshot.as_ref();
        let zone = snapshot.and_then(|s| s.time_zone.as_deref());
        // What cannot be read is told by Ready.
        let schedule = Schedule::parse(schedule, zone.unwrap_or(UTC_ZONE)).ok()?;
        Some(Rhythm::At(schedule))
    }

    /// After what happened at `from`, when is the `nth` one after it overdue? Half a period of grace, at least two
    /// minutes. A schedule's period is the shorter one of those around the next time, so that Monday's snapshot is
    /// not waited for as long as a weekend lasts. `None` where it is not to happen again.
    fn overdue(&self, from: DateTime<Utc>, nth: i32) -> Option<DateTime<Utc>> {
        let (period, expected) = match self {
            Rhythm::Every(period) => (*period, from),
            Rhythm::At(schedule) => {
                let next = schedule.next_after(from)?;
                let mut expected = next;
                for _ in 1..nth {
                    expected = schedule.next_after(expected)?;
                }
                let before = schedule.missed(DateTime::UNIX_EPOCH, from);
                let around = [
                    before.map(|b| next - b),
                    schedule.next_after(next).map(|n| n - next),
                ];
                (around.into_iter().flatten().min()?, expected)
            }
        };
        let after = period.checked_mul(nth).unwrap_or(TimeDelta::MAX);
        let grace = (period / 2).max(LEAST_GRACE);
        Some(later(later(from, after).max(expected), grace))
    }

    fn in_words(&self, schedule: Option<&str>) -> String {
        match (self, schedule) {
            (Rhythm::Every(period), _) => match (period.num_hours(), period.num_seconds()) {
                (hours, seconds) if hours > 0 && seconds == hours * 3600 => {
                    format!("every {hours} h")
                }
                (_, seconds) if seconds % 60 == 0 => format!("every {} min", seconds / 60),
                (_, seconds) => format!("every {seconds} s"),
            },
            (Rhythm::At(_), schedule) => {
                format!("by the schedule \"{}\"", schedule.unwrap_or_default())
            }
        }
    }
}

/// What is expected of one kind of snapshots.
struct Expected {
    kind: &'static str,
    rhythm: Option<Rhythm>,
    in_words: String,
    look_at: String,
}

/// Who is to take snapshots of each kind, and how often. `None` of a kind that nobody is to take.
fn expected(policy: &EtcdBackupPolicy) -> [Option<Expected>; 2] {
    let name = policy.name_any();
    let snapshot = policy.spec.snapshot.as_ref();
    let full_schedule = snapshot.and_then(|s| s.full_schedule.as_deref());
    let delta_schedule = snapshot.and_then(|s| s.delta_schedule.as_deref());
    let follow = snapshot.and_then(|s| s.follow.as_ref());
    let make = |kind, rhythm: Option<Rhythm>, schedule: Option<&str>, look_at: String| {
        let in_words = rhythm.as_ref().map(|r| r.in_words(schedule));
        Some(Expected {
            kind,
            in_words: in_words.unwrap_or_default(),
            rhythm,
            look_at,
        })
    };
    if full_schedule.is_none() && delta_schedule.is_none() && follow.is_none() {
        let sidecar = "look at the sidecar that takes snapshots";
        return [
            make(
                "full",
                Some(Rhythm::Every(SIDECAR_FULL)),
                None,
                sidecar.to_owned(),
            ),
            make(
                "delta",
                Some(Rhythm::Every(SIDECAR_DELTA)),
                None,
                sidecar.to_owned(),
            ),
        ];
    }
    let cron_job = |kind| format!("look at the Jobs of the CronJob {name}-{kind}");
    let follower = || format!("look at the Deployment {name}-follow");
    let full = match full_schedule {
        Some(s) => make(
            "full",
            Rhythm::parse(s, policy),
            full_schedule,
            // It takes the fulls, too.
            follow.map_or_else(|| cron_job("full"), |_| follower()),
        ),
        // The first one is all that is needed: compactions make the others.
        None => make(
            "full",
            None,
            None,
            "take one with a task OnDemandSnapshot".to_owned(),
        ),
    };
    let delta = match (delta_schedule, follow) {
        (Some(s), None) => make(
            "delta",
            Rhythm::parse(s, policy),
            delta_schedule,
            cron_job("delta"),
        ),
        (_, Some(follow)) => {
            let period = span(follow.period());
            make("delta", Some(Rhythm::Every(period)), None, follower())
        }
        (None, None) => None,
    };
    [full, delta]
}

/// Whether anybody is to take full snapshots, and deltas.
pub fn expects(policy: &EtcdBackupPolicy) -> [bool; 2] {
    expected(policy).map(|e| e.is_some())
}

/// How one kind of snapshots is.
enum News {
    /// Until then all is well.
    Fresh(Option<DateTime<Utc>>),
    /// There was none yet; until then that is nothing special.
    NeverYet(String, Option<DateTime<Utc>>),
    /// There was none for too long.
    Never(String),
    /// The last one is too old; until then it may only be late.
    Late(String, Option<DateTime<Utc>>),
    /// It is so old that something is broken.
    Lost(String),
}

/// When a Lease was last renewed, as far as clocks can be trusted: at its own time, or when this controller saw it.
fn renewed(
    fact: &SnapshotFact,
    seen: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> Option<DateTime<Utc>> {
    let told = fact.renewed.filter(|&t| t <= later(now, WRONG_CLOCK));
    let told = told.or(fact.time.filter(|&t| t <= later(now, WRONG_CLOCK)));
    told.max(seen).map(|t| t.min(now))
}

fn news(
    expected: &Expected,
    fact: Option<&SnapshotFact>,
    foreign: Option<&str>,
    last: Option<DateTime<Utc>>,
    since: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> News {
    let kind = expected.kind;
    let overdue = |from, nth| {
        let rhythm = expected.rhythm.as_ref()?;
        rhythm.overdue(from, nth)
    };
    let Some(last) = last else {
        let said = match (fact, foreign) {
            (Some(fact), _) => format!(
                "no time at which the {kind} snapshot up to revision {} was saved can be told: its Lease's is in the future",
                fact.revision
            ),
            (None, Some(holder)) => format!(
                "the Lease of {kind} snapshots is held by \"{holder}\", which is no revision: check snapshot.leasePrefix"
            ),
            (None, None) => format!("there is no {kind} snapshot yet"),
        };
        return match since.and_then(|since| overdue(since.min(now), LOST_AFTER)) {
            Some(lost_at) if lost_at <= now => News::Never(format!(
                "{said}, though one is due {}: {}",
                expected.in_words, expected.look_at
            )),
            lost_at => News::NeverYet(said, lost_at),
        };
    };
    let late_at = overdue(last, 1);
    let Some(late) = late_at.filter(|&at| at <= now) else {
        return News::Fresh(late_at);
    };
    let name = fact.map(|f| match &f.name {
        Some(name) => format!("{name} (revision {})", f.revision),
        None => format!("that of revision {}", f.revision),
    });
    let said = format!(
        "the newest {kind} snapshot, {}, was confirmed last at {}; one is due {} and was overdue at {}: {}",
        name.as_deref().unwrap_or("whose name is not known"),
        shown(last),
        expected.in_words,
        shown(late),
        expected.look_at
    );
    match overdue(last, LOST_AFTER) {
        Some(lost_at) if lost_at <= now => News::Lost(said),
        lost_at => News::Late(said, lost_at),
    }
}

/// Both kinds; of one that nobody takes there is nothing.
fn all_news(
    policy: &EtcdBackupPolicy,
    facts: &LeaseFacts,
    seen: &Seen,
    now: DateTime<Utc>,
) -> Vec<News> {
    let created = policy.metadata.creation_timestamp.as_ref();
    let since = created.map(crate::controller::times::utc);
    let full_at = facts.full.as_ref().and_then(|f| renewed(f, seen.full, now));
    let of_delta = facts
        .delta
        .as_ref()
        .and_then(|f| renewed(f, seen.delta, now));
    // A full covers what deltas would: but only the first, since compactions make fulls of what was saved.
    let never = facts.delta.is_none() && facts.foreign_delta_holder.is_none();
    let delta_at = of_delta.or(full_at.filter(|_| never));
    let [full, delta] = expected(policy);
    let full = full.map(|e| {
        let foreign = facts.foreign_full_holder.as_deref();
        news(&e, facts.full.as_ref(), foreign, full_at, since, now)
    });
    let delta = delta.map(|e| {
        let foreign = facts.foreign_delta_holder.as_deref();
        let fact = facts
            .delta
            .as_ref()
            .or(facts.full.as_ref().filter(|_| never));
        news(&e, fact, foreign, delta_at, since, now)
    });
    full.into_iter().chain(delta).collect()
}

/// Whether snapshots are taken in time.
///
/// True while both Leases are renewed by their schedules; Unknown where there is no news in time, or never was any;
/// False where a snapshot Job failed and no retry can help, or nothing came for three periods.
pub fn backup_ready(
    policy: &EtcdBackupPolicy,
    facts: &LeaseFacts,
    runs: &SnapshotRuns<'_>,
    seen: &Seen,
    now: DateTime<Utc>,
) -> Judgement {
    use ConditionStatus::{False, True, Unknown};
    if policy.spec.suspend {
        return Judgement::new(
            Unknown,
            "Suspended",
            "the policy is suspended: no snapshots are taken",
        );
    }
    let renewed = |fact: Option<&SnapshotFact>, seen| fact.and_then(|f| renewed(f, seen, now));
    for (kind, run, at) in [
        ("full", runs.full, renewed(facts.full.as_ref(), seen.full)),
        (
            "delta",
            runs.delta,
            renewed(facts.delta.as_ref(), seen.delta),
        ),
    ] {
        let failed = run.filter(|r| r.state == RunState::Failed && !outcome::is_worth_retrying(r));
        let Some(run) = failed else { continue };
        // A snapshot that was saved after it is the newer news.
        let ended = run.completion_time.or(run.start_time);
        if at.is_none() || ended.is_none() || ended > at {
            let said = format!(
                "the last {kind} snapshot failed, and the next one will, too, if nothing is mended: {}",
                outcome::failure_text(run)
            );
            return Judgement::new(False, "SnapshotFailed", said);
        }
    }
    let mut stale_at = None;
    let (mut lost, mut late, mut never) = (Vec::new(), Vec::new(), Vec::new());
    for news in all_news(policy, facts, seen, now) {
        let until = match news {
            News::Fresh(until) => until,
            News::NeverYet(said, until) => {
                never.push(said);
                until
            }
            News::Late(said, until) => {
                late.push(said);
                until
            }
            News::Never(said) | News::Lost(said) => {
                lost.push(said);
                None
            }
        };
        stale_at = sooner(stale_at, until);
    }
    let judged = if !lost.is_empty() {
        Judgement::new(False, "Stale", lost.join("; "))
    } else if !late.is_empty() {
        Judgement::new(Unknown, "Stale", late.join("; "))
    } else if !never.is_empty() {
        Judgement::new(Unknown, "NoSnapshotYet", never.join("; "))
    } else {
        Judgement::new(True, "SnapshotsInTime", "snapshots are taken in time")
    };
    judged.until(stale_at)
}

/// Whether the backup was verified in time, and was sound.
pub fn backup_verified(
    policy: &EtcdBackupPolicy,
    last: Option<&LastRun>,
    now: DateTime<Utc>,
) -> Judgement {
    use ConditionStatus::{False, True, Unknown};
    let Some(verify) = &policy.spec.verify else {
        return Judgement::new(
            Unknown,
            "NotConfigured",
            "the policy has no verify: nothing verifies the backup",
        );
    };
    let ended = last.filter(|l| l.state != RunState::Running);
    let Some((last, at)) = ended.and_then(|l| Some((l, l.completion_time?.min(now)))) else {
        return Judgement::new(Unknown, "NeverVerified", "the backup was not verified yet");
    };
    let rhythm = Rhythm::parse(&verify.schedule, policy);
    let stale_at = rhythm.and_then(|r| r.overdue(at, 2));
    if last.state == RunState::Failed {
        let why = outcome::failure_text(last);
        let reason = last.reason.as_deref().unwrap_or("VerificationFailed");
        // Only that data is wrong tells of the backup.
        return match last.exit_code == Some(65) {
            true => Judgement::new(
                False,
                reason,
                format!("the last verification found the backup wrong: {why}"),
            ),
            false => Judgement::new(
                Unknown,
                reason,
                format!("the last verification came to no result: {why}"),
            ),
        };
    }
    if let Some(stale) = stale_at.filter(|&stale| stale <= now) {
        let said = format!(
            "the backup was verified last at {}, and two verifications were overdue at {}: look at the Jobs of the CronJob {}-verify",
            shown(at),
            shown(stale),
            policy.name_any()
        );
        return Judgement::new(Unknown, "VerificationStale", said);
    }
    let what = last
        .revision
        .map(|r| format!(" up to revision {r}"))
        .unwrap_or_default();
    let said = format!("the backup{what} was verified at {}", shown(at));
    Judgement::new(True, "Verified", said).until(stale_at)
}

/// Whether the compactions that thresholds start do their work.
pub fn compaction_healthy(
    policy: &EtcdBackupPolicy,
    facts: &LeaseFacts,
    last: Option<&LastCompaction>,
    seen: &Seen,
    now: DateTime<Utc>,
) -> Judgement {
    use ConditionStatus::{False, True, Unknown};
    if policy.spec.suspend {
        return Judgement::new(
            Unknown,
            "Suspended",
            "the policy is suspended: nothing is compacted",
        );
    }
    if !policy.spec.compaction.enabled {
        return Judgement::new(Unknown, "NotConfigured", "compaction is not enabled");
    }
    // What failed has failed, however old the Leases are.
    if let Some(last) = last {
        let what = match last.full_snapshot {
            true => "full snapshot",
            false => "compaction",
        };
        let times = match last.failures {
            ..=1 => String::new(),
            n => format!(", {n} in a row"),
        };
        match last.run.state {
            RunState::Failed => {
                let reason = last.run.reason.as_deref().unwrap_or("CompactionFailed");
                let why = outcome::failure_text(&last.run);
                let said = format!("the {what} {} failed{times}: {why}", last.job_name);
                return Judgement::new(False, reason, said);
            }
            RunState::Running if last.failures > 0 => {
                let said = format!(
                    "the {what} {} runs after {} that failed in a row",
                    last.job_name, last.failures
                );
                return Judgement::new(False, "Retrying", said);
            }
            RunState::Running | RunState::Succeeded => {}
        }
    }
    let mut stale_at = None;
    for news in all_news(policy, facts, seen, now) {
        match news {
            News::Fresh(until) => stale_at = sooner(stale_at, until),
            News::NeverYet(said, _) | News::Never(said) => {
                let said = format!("whether a threshold is crossed cannot be told: {said}");
                return Judgement::new(Unknown, "NoSnapshotYet", said);
            }
            News::Late(said, _) | News::Lost(said) => {
                let said = format!("whether a threshold is crossed cannot be told: {said}");
                return Judgement::new(Unknown, "Stale", said);
            }
        }
    }
    let judged = match last {
        None => Judgement::new(
            True,
            "NoneNeeded",
            "no threshold has started a compaction yet",
        ),
        Some(last) if last.run.state == RunState::Running => {
            Judgement::new(True, "Running", format!("the Job {} runs", last.job_name))
        }
        Some(last) => {
            let to = last
                .run
                .revision
                .map(|r| format!(" up to revision {r}"))
                .unwrap_or_default();
            Judgement::new(True, "Succeeded", format!("{} is done{to}", last.job_name))
        }
    };
    judged.until(stale_at)
}

/// Whether compactions do their work, where a Job was not taken.
pub fn job_refused(why: &str) -> Judgement {
    let said = format!("a compaction is due, and Kubernetes does not take its Job: {why}");
    Judgement::new(ConditionStatus::False, "JobRefused", said)
}

/// Something that keeps a policy from being carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// A word for machines, such as `SpecInvalid`, `NotAllowed` or `StorePrefixTaken`.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
}

/// Whether a policy is carried out.
pub fn ready(policy: &EtcdBackupPolicy, problem: Option<&Problem>) -> Judgement {
    use ConditionStatus::{False, True};
    if let Some(problem) = problem {
        return Judgement::new(False, &problem.reason, &problem.message);
    }
    match policy.spec.suspend {
        true => Judgement::new(
            True,
            "Suspended",
            "the policy is in order, and suspended: only tasks are done",
        ),
        false => Judgement::new(True, "InOrder", "the policy is carried out"),
    }
}

/// The conditions to write: those that were judged, with the time of the old ones where their status is the same.
/// Conditions that were not judged are other writers', and not in it.
pub fn merge(
    old: &[Condition],
    new: &[(&str, &Judgement)],
    generation: Option<i64>,
    now: DateTime<Utc>,
) -> Vec<Condition> {
    let conditions = new.iter().map(|(type_, judged)| {
        let before = old
            .iter()
            .find(|c| c.type_ == *type_ && c.status == judged.status);
        Condition {
            type_: (*type_).to_owned(),
            status: judged.status,
            reason: judged.reason.clone(),
            message: judged.message.clone(),
            last_transition_time: before.map_or(whole_seconds(now), |c| c.last_transition_time),
            observed_generation: generation,
        }
    });
    conditions.collect()
}

/// As Kubernetes writes times: what was read back is what was written.
fn whole_seconds(time: DateTime<Utc>) -> DateTime<Utc> {
    DateTime::from_timestamp(time.timestamp(), 0).unwrap_or(time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::TextValue;
    use crate::controller::api::{EtcdBackupPolicySpec, EtcdSpec, SnapshotSpec, VerifySpec};
    use crate::controller::observe::leases::tests::druid;
    use crate::controller::observe::outcome::tests::time;
    use crate::ops::snapshot::follow::Pace;
    use crate::ops::verify::store::Level;
    use ConditionStatus::{False, True, Unknown};

    fn at(t: &str) -> DateTime<Utc> {
        format!("2026-11-{t}Z").parse().unwrap()
    }

    /// Fulls at midnight of weekdays, deltas every five minutes.
    fn policy() -> EtcdBackupPolicy {
        let mut policy = EtcdBackupPolicy::new(
            "main",
            EtcdBackupPolicySpec {
                etcd: Some(EtcdSpec::default()),
                snapshot: Some(SnapshotSpec {
                    full_schedule: Some("0 0 * * 1-5".to_owned()),
                    delta_schedule: Some("*/5 * * * *".to_owned()),
                    ..SnapshotSpec::default()
                }),
                ..EtcdBackupPolicySpec::default()
            },
        );
        policy.metadata.creation_timestamp = Some(time(0));
        policy
    }

    fn facts(full: Option<&str>, delta: Option<&str>) -> LeaseFacts {
        let full = full.map(|t| druid("100", Some(at(t))));
        let delta = delta.map(|t| druid("200", Some(at(t))));
        LeaseFacts::read(full.as_ref(), delta.as_ref())
    }

    fn judged(policy: &EtcdBackupPolicy, facts: &LeaseFacts, now: &str) -> Judgement {
        backup_ready(
            policy,
            facts,
            &SnapshotRuns::default(),
            &Seen::default(),
            at(now),
        )
    }

    #[test]
    fn snapshots_are_in_time_late_or_lost() {
        let p = policy();
        // 2026-11-20 is a Friday.
        let f = facts(Some("20T00:07:00"), Some("20T10:00:03"));
        let j = judged(&p, &f, "20T10:01:00");
        assert_eq!((j.status, j.reason.as_str()), (True, "SnapshotsInTime"));
        assert_eq!(j.stale_at, Some(at("20T10:07:33")));
        assert_eq!(judged(&p, &f, "20T10:07:32").status, True);
        let j = judged(&p, &f, "20T10:07:33");
        assert_eq!((j.status, j.reason.as_str()), (Unknown, "Stale"));
        assert!(
            j.message.contains("revision 200") && j.message.contains("CronJob main-delta"),
            "{}",
            j.message
        );
        assert!(
            j.message.contains("every") || j.message.contains("*/5"),
            "{}",
            j.message
        );
        assert_eq!(j.stale_at, Some(at("20T10:17:33")));
        // No age in the words: they are the same until something changes.
        assert_eq!(judged(&p, &f, "20T10:17:32").message, j.message);
        let j = judged(&p, &f, "20T10:17:33");
        assert_eq!((j.status, j.reason.as_str()), (False, "Stale"));
        // The full: Monday's is the next one, with half a day of grace, not half a weekend's.
        let f = facts(Some("20T00:07:00"), Some("23T11:59:00"));
        assert_eq!(judged(&p, &f, "23T11:59:30").status, True);
        let f = facts(Some("20T00:07:00"), Some("23T12:00:00"));
        let j = judged(&p, &f, "23T12:00:01");
        assert_eq!(j.status, Unknown);
        assert!(j.message.contains("CronJob main-full"), "{}", j.message);
    }

    #[test]
    fn there_may_be_none_yet() {
        let mut p = policy();
        p.metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            "2026-11-20T10:00:00Z".parse().unwrap(),
        ));
        let none = LeaseFacts::default();
        let j = judged(&p, &none, "20T10:00:10");
        assert_eq!((j.status, j.reason.as_str()), (Unknown, "NoSnapshotYet"));
        assert_eq!(j.stale_at, Some(at("20T10:17:30")));
        let j = judged(&p, &none, "20T10:17:30");
        assert_eq!((j.status, j.reason.as_str()), (False, "Stale"));
        // The first full counts for both, for one period of deltas.
        let f = facts(Some("20T10:01:00"), None);
        assert_eq!(judged(&p, &f, "20T10:08:29").status, True);
        assert_eq!(judged(&p, &f, "20T10:08:30").status, Unknown);
        // A Lease that is another's.
        let f = LeaseFacts::read(Some(&druid("etcd-main-0", None)), None);
        let j = judged(&p, &f, "20T10:00:10");
        assert!(j.message.contains("etcd-main-0"), "{}", j.message);
        p.spec.suspend = true;
        let j = judged(&p, &none, "23T10:00:00");
        assert_eq!((j.status, j.reason.as_str()), (Unknown, "Suspended"));
    }

    #[test]
    fn who_takes_them_decides_how_often() {
        let mut p = policy();
        // A sidecar.
        p.spec.snapshot = None;
        let f = facts(Some("20T00:00:00"), Some("20T10:00:00"));
        let j = judged(&p, &f, "20T10:00:00");
        assert_eq!((j.status, j.stale_at), (True, Some(at("20T10:07:30"))));
        let f = facts(Some("20T00:00:00"), Some("21T12:00:00"));
        let j = judged(&p, &f, "21T12:00:00");
        assert_eq!(j.status, Unknown);
        assert!(
            j.message.contains("every 24 h") && j.message.contains("sidecar"),
            "{}",
            j.message
        );
        // A follower, without a schedule of fulls: one is enough.
        p.spec.snapshot = Some(SnapshotSpec {
            follow: Some(Pace {
                delta_period: Some(TextValue::of("20s")),
                delta_bytes: None,
            }),
            ..SnapshotSpec::default()
        });
        let f = facts(Some("01T00:00:00"), Some("20T10:00:00"));
        let j = judged(&p, &f, "20T10:00:00");
        assert_eq!((j.status, j.stale_at), (True, Some(at("20T10:02:20"))));
        let j = judged(&p, &f, "20T10:02:20");
        assert!(
            j.message.contains("every 20 s") && j.message.contains("main-follow"),
            "{}",
            j.message
        );
        // Fulls alone.
        p.spec.snapshot = Some(SnapshotSpec {
            full_schedule: Some("@daily".to_owned()),
            ..SnapshotSpec::default()
        });
        let j = judged(&p, &facts(Some("20T00:05:00"), None), "20T10:00:00");
        assert_eq!((j.status, j.stale_at), (True, Some(at("21T12:05:00"))));
        // A schedule that cannot be read: Ready tells it.
        p.spec.snapshot = Some(SnapshotSpec {
            full_schedule: Some("often".to_owned()),
            ..SnapshotSpec::default()
        });
        let j = judged(&p, &facts(Some("20T00:05:00"), None), "20T10:00:00");
        assert_eq!((j.status, j.stale_at), (True, None));
    }

    #[test]
    fn clocks_that_are_wrong_do_no_harm() {
        let p = policy();
        let seen = |full: Option<&str>, delta: Option<&str>| Seen {
            full: full.map(at),
            delta: delta.map(at),
        };
        let judged = |f: &LeaseFacts, s: &Seen, now: &str| {
            backup_ready(&p, f, &SnapshotRuns::default(), s, at(now)).status
        };
        // Behind by hours: seen to change just now.
        let f = facts(Some("20T00:05:00"), Some("20T07:00:00"));
        assert_eq!(judged(&f, &Seen::default(), "20T10:00:00"), False);
        assert_eq!(
            judged(&f, &seen(None, Some("20T09:59:00")), "20T10:00:00"),
            True
        );
        assert_eq!(
            judged(&f, &seen(None, Some("20T09:59:00")), "20T10:06:30"),
            Unknown
        );
        // A little ahead counts as now.
        let f = facts(Some("20T00:05:00"), Some("20T10:30:00"));
        assert_eq!(judged(&f, &Seen::default(), "20T10:00:00"), True);
        // Far ahead tells nothing, until it is seen to change.
        let f = facts(Some("20T00:05:00"), Some("29T10:00:00"));
        assert_ne!(judged(&f, &Seen::default(), "20T10:00:00"), True);
        assert_eq!(
            judged(&f, &seen(None, Some("20T09:59:00")), "20T10:00:00"),
            True
        );
        assert_eq!(
            judged(&f, &seen(None, Some("20T09:59:00")), "20T10:06:30"),
            Unknown
        );
        // This controller's own clock was ahead.
        let f = facts(Some("20T00:05:00"), Some("20T09:59:00"));
        assert_eq!(
            judged(&f, &seen(None, Some("29T00:00:00")), "20T10:00:00"),
            True
        );
    }

    #[test]
    fn a_failure_that_no_retry_mends_makes_it_false_until_a_snapshot_is_saved() {
        let p = policy();
        let f = facts(Some("20T00:05:00"), Some("20T10:00:00"));
        let run = |code: i32, reason: &str, t: &str| LastRun {
            state: RunState::Failed,
            exit_code: Some(code),
            reason: Some(reason.to_owned()),
            completion_time: Some(at(t)),
            ..LastRun::default()
        };
        let judged = |full: &LastRun, delta: &LastRun| {
            let runs = SnapshotRuns {
                full: Some(full),
                delta: Some(delta),
            };
            backup_ready(&p, &f, &runs, &Seen::default(), at("20T10:01:00"))
        };
        let fine = LastRun {
            state: RunState::Succeeded,
            ..LastRun::default()
        };
        let j = judged(&fine, &run(77, "Unauthenticated", "20T10:00:30"));
        assert_eq!((j.status, j.reason.as_str()), (False, "SnapshotFailed"));
        assert!(
            j.message.contains("delta") && j.message.contains("77, Unauthenticated"),
            "{}",
            j.message
        );
        assert_eq!(
            judged(&run(65, "OtherCluster", "20T00:06:00"), &fine).status,
            False
        );
        assert_eq!(
            judged(&run(65, "OtherCluster", "20T00:04:00"), &fine).status,
            True
        );
        assert_eq!(
            judged(&fine, &run(69, "StoreUnreachable", "20T10:00:30")).status,
            True
        );
    }

    #[test]
    fn a_verification_is_sound_wrong_without_a_result_or_too_old() {
        let mut p = policy();
        let judged = |p: &EtcdBackupPolicy, run: Option<&LastRun>, now: &str| {
            let j = backup_verified(p, run, at(now));
            (j.status, j.reason, j.stale_at)
        };
        assert_eq!(judged(&p, None, "20T10:00:00").1, "NotConfigured");
        p.spec.verify = Some(VerifySpec {
            schedule: "0 3 * * *".to_owned(),
            level: Level::default(),
            against_cluster: false,
        });
        assert_eq!(judged(&p, None, "20T10:00:00").1, "NeverVerified");
        let mut run = LastRun {
            state: RunState::Succeeded,
            completion_time: Some(at("20T03:10:00")),
            revision: Some(7),
            ..LastRun::default()
        };
        let stale = at("22T15:10:00");
        assert_eq!(
            judged(&p, Some(&run), "20T10:00:00"),
            (True, "Verified".to_owned(), Some(stale))
        );
        assert_eq!(judged(&p, Some(&run), "22T15:10:00").1, "VerificationStale");
        run.state = RunState::Failed;
        run.reason = Some("CorruptSnapshot".to_owned());
        run.exit_code = Some(65);
        assert_eq!(judged(&p, Some(&run), "29T10:00:00").0, False);
        run.reason = Some("StoreUnreachable".to_owned());
        run.exit_code = Some(69);
        assert_eq!(
            judged(&p, Some(&run), "20T10:00:00"),
            (Unknown, "StoreUnreachable".to_owned(), None)
        );
        run.state = RunState::Running;
        assert_eq!(judged(&p, Some(&run), "20T10:00:00").1, "NeverVerified");
    }

    #[test]
    fn compactions_are_healthy_as_the_last_one_was() {
        let mut p = policy();
        let f = facts(Some("20T00:05:00"), Some("20T10:00:00"));
        let judged = |p: &EtcdBackupPolicy, f: &LeaseFacts, last: Option<&LastCompaction>| {
            let j = compaction_healthy(p, f, last, &Seen::default(), at("20T10:01:00"));
            (j.status, j.reason)
        };
        assert_eq!(judged(&p, &f, None), (True, "NoneNeeded".to_owned()));
        assert_eq!(judged(&p, &LeaseFacts::default(), None).0, Unknown);
        let old = facts(Some("20T00:05:00"), Some("20T09:00:00"));
        assert_eq!(judged(&p, &old, None), (Unknown, "Stale".to_owned()));
        let mut last = LastCompaction {
            job_name: "main-compact-1".to_owned(),
            ..LastCompaction::default()
        };
        assert_eq!(judged(&p, &f, Some(&last)), (True, "Running".to_owned()));
        last.run.state = RunState::Succeeded;
        assert_eq!(judged(&p, &f, Some(&last)), (True, "Succeeded".to_owned()));
        last.run.state = RunState::Failed;
        last.run.reason = Some("NoSpace".to_owned());
        last.failures = 2;
        assert_eq!(judged(&p, &f, Some(&last)), (False, "NoSpace".to_owned()));
        assert_eq!(judged(&p, &old, Some(&last)), (False, "NoSpace".to_owned()));
        last.run.state = RunState::Running;
        assert_eq!(judged(&p, &f, Some(&last)), (False, "Retrying".to_owned()));
        p.spec.compaction.enabled = false;
        assert_eq!(judged(&p, &f, None).1, "NotConfigured");
    }

    #[test]
    fn the_time_of_a_condition_changes_with_its_status_alone() {
        let p = policy();
        let problem = |reason: &str| Problem {
            reason: reason.to_owned(),
            message: "no Secret s".to_owned(),
        };
        let good = ready(&p, None);
        let bad = ready(&p, Some(&problem("NotAllowed")));
        assert_eq!((bad.status, bad.reason.as_str()), (False, "NotAllowed"));
        assert_eq!(bad.message, "no Secret s");
        let first = merge(
            &[],
            &[("Ready", &bad), ("BackupReady", &good)],
            Some(1),
            at("20T10:00:00.5"),
        );
        assert_eq!(first[0].last_transition_time, at("20T10:00:00"));
        let worse = ready(&p, Some(&problem("StorePrefixTaken")));
        let second = merge(&first, &[("Ready", &worse)], Some(2), at("20T11:00:00"));
        assert_eq!(second.len(), 1);
        assert_eq!(second[0].last_transition_time, at("20T10:00:00"));
        assert_eq!(
            (second[0].reason.as_str(), second[0].observed_generation),
            ("StorePrefixTaken", Some(2))
        );
        let third = merge(&second, &[("Ready", &good)], Some(2), at("20T12:00:00"));
        assert_eq!(third[0].last_transition_time, at("20T12:00:00"));
    }

    #[test]
    fn whatever_the_times_a_judgement_holds_until_its_end() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        let schedules = [
            "*/5 * * * *",
            "0 0 * * 1-5",
            "30 2 * * *",
            "0 8,9 * * *",
            "0 0 1 1 *",
            "*/7 * * * *",
        ];
        for _ in 0..300 {
            let mut p = policy();
            let snapshot = p.spec.snapshot.as_mut().unwrap();
            snapshot.full_schedule = Some(schedules[rng.usize(..schedules.len())].to_owned());
            snapshot.delta_schedule = Some(schedules[rng.usize(..schedules.len())].to_owned());
            snapshot.time_zone = Some("Europe/Berlin".to_owned());
            let base = at("20T10:00:00");
            let some =
                |rng: &mut fastrand::Rng| base + TimeDelta::seconds(rng.i64(-200_000..20_000));
            let full = druid("100", Some(some(&mut rng)));
            let delta = druid("200", Some(some(&mut rng)));
            let f = LeaseFacts::read(Some(&full), Some(&delta).filter(|_| rng.bool()));
            let seen = Seen {
                full: Some(some(&mut rng)).filter(|_| rng.bool()),
                delta: Some(some(&mut rng)).filter(|_| rng.bool()),
            };
            let now = base + TimeDelta::seconds(rng.i64(0..100_000));
            let judge = |now| backup_ready(&p, &f, &SnapshotRuns::default(), &seen, now);
            let j = judge(now);
            let Some(stale_at) = j.stale_at else { continue };
            assert!(stale_at > now, "{j:?}");
            let between = now + (stale_at - now) / 2;
            // Times that were ahead of the clock count as now, and last longer for it.
            let ahead = [f.full.as_ref(), f.delta.as_ref()].into_iter().flatten();
            let ahead = ahead
                .filter_map(|s| s.renewed)
                .chain(seen.full)
                .chain(seen.delta)
                .any(|t| t > now);
            if !ahead {
                assert_eq!(judge(between), j, "{j:?}");
                assert_ne!(judge(stale_at), j);
            }
        }
    }
}
