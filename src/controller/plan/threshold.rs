//! When the deltas are folded: events, bytes or age since the last full cross a threshold.
//!
//! A pure decision on the Leases, the last attempt and now, with its reason in words. It starts nothing:
//! `compaction` does, and asks it again whenever something has changed.

use crate::backup::Kind;
use crate::controller::api::{CompactionSpec, LastCompaction, RunState};
use crate::controller::observe::leases::LeaseFacts;
use crate::controller::observe::outcome::{self, DEADLINE_EXCEEDED};
use crate::controller::times::{delta, later, shown};
use chrono::{DateTime, TimeDelta, Utc};

/// After the first failure; twice as long after each further one.
const FIRST_BACK_OFF: TimeDelta = TimeDelta::minutes(1);
/// No longer than this.
const LONGEST_BACK_OFF: TimeDelta = TimeDelta::hours(1);

/// What starts a compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
pub enum Trigger {
    /// Revisions since the last full.
    EventsThreshold,
    /// Bytes of deltas since the last full.
    SizeThreshold,
    /// The age of the last full.
    AgeThreshold,
    /// So many revisions that they are not folded any more.
    FullSnapshotThreshold,
    /// A compaction before took too long.
    DeadlineExceeded,
}

impl Trigger {
    /// As the API has it.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// What else is known of a policy at this moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Backoff {
    /// A Job of a threshold, or of a compaction task, that has not ended.
    pub running: Option<String>,
    /// When something that Jobs depend on was last seen to come back or to be mended: an endpoint that became
    /// ready, a policy that was changed.
    pub recovered_at: Option<DateTime<Utc>>,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Nothing, until something changes.
    Nothing {
        /// Why.
        reason: String,
        /// When time alone can change that.
        look_again: Option<DateTime<Utc>>,
    },
    /// A Job.
    Start {
        /// What crossed.
        trigger: Trigger,
        /// A full snapshot of the live etcd instead of a compaction.
        full_snapshot: bool,
        /// Why.
        reason: String,
        /// How many Jobs since the last full have failed in a row before this one. The same status and the same
        /// attempt are the same Job.
        attempt: i32,
        /// Revisions since the last full.
        events: i64,
    },
}

/// The full that events, bytes and age are counted from.
struct Base {
    revision: i64,
    time: Option<DateTime<Utc>>,
    bytes: Option<i64>,
    what: String,
}

/// What crossed a threshold, or when the age can.
enum Crossing {
    Crossed(Trigger, String),
    Not(String, Option<DateTime<Utc>>),
}

/// Whether a Job is to be started, and which.
///
/// Never while one runs, and never again on a status of the Leases that has not moved since the last attempt:
/// but for one that failed because something did not answer. That one is tried again after 1, 2, 4 minutes and so on
/// up to an hour, and at once when the status moves or what it depends on comes back. After other failures both are
/// needed, a status that has moved and that pause, unless there is a new full.
pub fn decide(
    spec: &CompactionSpec,
    suspended: bool,
    has_etcd: bool,
    facts: &LeaseFacts,
    last: Option<&LastCompaction>,
    waiting: &Backoff,
    now: DateTime<Utc>,
) -> Decision {
    let nothing = |reason: String| Decision::Nothing {
        reason,
        look_again: None,
    };
    if suspended {
        return nothing("the policy is suspended".to_owned());
    }
    if !spec.enabled {
        return nothing("compaction is not enabled".to_owned());
    }
    if let Some(job) = &waiting.running {
        return nothing(format!("the Job {job} runs"));
    }
    if let Some(last) = last.filter(|l| l.run.state == RunState::Running) {
        return nothing(format!("the Job {} runs", last.job_name));
    }
    let Some((full, newest)) = facts.revisions() else {
        let missing = match facts.full {
            None => "no full snapshot",
            Some(_) => "no delta snapshot",
        };
        return nothing(format!("the Leases tell of {missing} yet"));
    };
    let base = base(facts, full, last);
    let events = (newest - base.revision).max(0);
    if events == 0 {
        return nothing(format!("nothing has come after {}", base.what));
    }
    let (trigger, crossed) = match crossing(spec, &base, events, now) {
        Crossing::Crossed(trigger, crossed) => (trigger, crossed),
        Crossing::Not(reason, look_again) => return Decision::Nothing { reason, look_again },
    };
    let same = last.filter(|l| (l.full_revision, l.delta_revision) == (full, newest));
    let failed = last.filter(|l| l.run.state == RunState::Failed);
    if let Some(last) = same.filter(|_| failed.is_none()) {
        return nothing(format!(
            "{crossed}, but the Leases have not moved since {} was started",
            last.job_name
        ));
    }
    // A new full makes another beginning.
    let failed = failed.filter(|l| l.full_revision == full);
    let attempt = failed.map_or(0, |l| l.failures.max(1));
    let late = |l: &LastCompaction| l.run.reason.as_deref() == Some(DEADLINE_EXCEEDED);
    let was_late = failed.is_some_and(|l| {
        late(l) || l.full_snapshot && l.trigger == Trigger::DeadlineExceeded.as_str()
    });
    // A full snapshot in its place is another thing to try: no pause is needed before it.
    let other_way = has_etcd && failed.is_some_and(|l| late(l) && !l.full_snapshot);
    if let Some(last) = failed {
        let unreachable = outcome::is_unreachable(&last.run);
        let has_moved = same.is_none();
        let why = outcome::failure_text(&last.run);
        let job = &last.job_name;
        if !has_moved && !unreachable {
            return nothing(format!(
                "{crossed}, but {job} failed ({why}), and the Leases have not moved since it was started"
            ));
        }
        let waits = match unreachable {
            true => !has_moved,
            false => !other_way,
        };
        if let Some(due) = due(last, waiting, now).filter(|_| waits) {
            return Decision::Nothing {
                reason: format!(
                    "{crossed}, but {job} failed ({why}): the next attempt is at {}",
                    shown(due)
                ),
                look_again: Some(due),
            };
        }
    }
    let too_late = match was_late {
        true => "a compaction before was ended by its deadline",
        false => "too many to be folded",
    };
    let wants_full = was_late || trigger == Trigger::FullSnapshotThreshold;
    let (trigger, reason) = match (wants_full, has_etcd) {
        (false, _) => (trigger, crossed),
        (true, true) => {
            let trigger = match was_late {
                true => Trigger::DeadlineExceeded,
                false => trigger,
            };
            (
                trigger,
                format!("{crossed}; {too_late}: a full snapshot is taken instead"),
            )
        }
        (true, false) => (
            trigger,
            format!(
                "{crossed}; {too_late}, and the policy has no etcd to take a full snapshot of: they are folded all the same"
            ),
        ),
    };
    Decision::Start {
        trigger,
        full_snapshot: wants_full && has_etcd,
        reason,
        attempt,
        events,
    }
}

/// Which full to count from: that of the Leases, or what the last compaction made of it where no Lease tells so.
fn base(facts: &LeaseFacts, full: i64, last: Option<&LastCompaction>) -> Base {
    let told = facts.annotated_base.unwrap_or(0);
    let by_lease = match &facts.full {
        Some(fact) if full >= told => Base {
            revision: full,
            time: fact.time.or(fact.renewed),
            bytes: facts.accumulated_bytes,
            what: format!("the full snapshot at revision {full}"),
        },
        _ => Base {
            revision: full.max(told),
            time: facts
                .delta
                .as_ref()
                .filter(|d| d.kind == Some(Kind::Full))
                .and_then(|d| d.time),
            bytes: facts.accumulated_bytes,
            what: format!("the full snapshot at revision {}", full.max(told)),
        },
    };
    let reached = last.filter(|l| counts(l, facts, full)).and_then(|l| {
        let revision = l.run.revision?;
        Some((revision, l)).filter(|_| revision > by_lease.revision)
    });
    match reached {
        None => by_lease,
        Some((revision, last)) => Base {
            revision,
            time: last.run.completion_time,
            // Those of the Leases count from an older full.
            bytes: None,
            what: format!(
                "the full snapshot at revision {revision} that {} made",
                last.job_name
            ),
        },
    }
}

/// Whether what the last compaction reached still counts: not where the cluster was set back since.
fn counts(last: &LastCompaction, facts: &LeaseFacts, full: i64) -> bool {
    let newest = facts.delta.as_ref().map_or(0, |d| d.revision);
    let reached = last.run.revision.unwrap_or(0);
    let went_back = full < last.full_revision || newest < last.delta_revision;
    // A full that was made later, and is at less.
    let ended = last.run.completion_time;
    let renewed = facts.full.as_ref().and_then(|f| f.renewed);
    let began_anew = full != last.full_revision && full < reached && renewed > ended;
    last.run.state == RunState::Succeeded && !went_back && !(ended.is_some() && began_anew)
}

fn crossing(spec: &CompactionSpec, base: &Base, events: i64, now: DateTime<Utc>) -> Crossing {
    let since = &base.what;
    if let Some(limit) = spec
        .full_snapshot_threshold
        .filter(|&limit| events >= limit)
    {
        return Crossing::Crossed(
            Trigger::FullSnapshotThreshold,
            format!("{events} events since {since} reach fullSnapshotThreshold, {limit}"),
        );
    }
    if events >= spec.events_threshold {
        let limit = spec.events_threshold;
        return Crossing::Crossed(
            Trigger::EventsThreshold,
            format!("{events} events since {since} reach eventsThreshold, {limit}"),
        );
    }
    // What cannot be read is told by the policy's condition.
    let limit = spec
        .size_threshold
        .as_ref()
        .and_then(|size| Some(size.value()?.0));
    if let (Some(limit), Some(bytes)) = (limit, base.bytes)
        && bytes.unsigned_abs() >= limit
    {
        return Crossing::Crossed(
            Trigger::SizeThreshold,
            format!("{bytes} bytes of deltas since {since} reach sizeThreshold, {limit}"),
        );
    }
    let few = format!("{events} events since {since} cross no threshold");
    let text = spec.age_threshold.as_ref();
    let limit = text.and_then(|age| Some(delta(age.value()?.0)));
    let (Some(text), Some(limit), Some(made)) = (text, limit, base.time) else {
        return Crossing::Not(few, None);
    };
    // Another machine's clock may be ahead.
    let made = made.min(now);
    let crosses_at = later(made, limit);
    if crosses_at > now {
        return Crossing::Not(few, Some(crosses_at));
    }
    Crossing::Crossed(
        Trigger::AgeThreshold,
        format!(
            "{since} is of {}, and so older than ageThreshold, {}, with {events} events after it",
            shown(made),
            text.as_str()
        ),
    )
}

/// When the next attempt is due after failures; `None` where it is.
fn due(last: &LastCompaction, waiting: &Backoff, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
    let ended = last.run.completion_time.or(last.run.start_time)?;
    if waiting.recovered_at.is_some_and(|at| at > ended) {
        return None;
    }
    let pause = back_off(last.failures);
    let due = later(ended, pause);
    // A clock that was far ahead then must not hold it up until that time comes.
    let plausible = ended <= later(now, pause);
    (due > now && plausible).then_some(due)
}

/// How long to wait after so many failures in a row.
fn back_off(failures: i32) -> TimeDelta {
    let doublings = failures.saturating_sub(1).clamp(0, 6);
    (FIRST_BACK_OFF * (1 << doublings)).min(LONGEST_BACK_OFF)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::TextValue;
    use crate::controller::api::LastRun;
    use crate::controller::observe::leases::tests::{at, druid, ours};

    const MINUTE: i64 = 60;

    /// A world in which thresholds are looked at.
    #[derive(Clone)]
    struct World {
        spec: CompactionSpec,
        suspended: bool,
        has_etcd: bool,
        facts: LeaseFacts,
        last: Option<LastCompaction>,
        waiting: Backoff,
    }

    impl World {
        /// Leases as etcd-druid's, with a threshold of 100 events.
        fn new(full: i64, newest: i64) -> Self {
            World {
                spec: CompactionSpec {
                    events_threshold: 100,
                    ..CompactionSpec::default()
                },
                suspended: false,
                has_etcd: true,
                facts: facts(full, newest),
                last: None,
                waiting: Backoff::default(),
            }
        }

        fn decide(&self, seconds: i64) -> Decision {
            decide(
                &self.spec,
                self.suspended,
                self.has_etcd,
                &self.facts,
                self.last.as_ref(),
                &self.waiting,
                at(seconds),
            )
        }

        /// The trigger, whether a full snapshot is taken, and the attempt.
        fn starts(&self, seconds: i64) -> (Trigger, bool, i32) {
            match self.decide(seconds) {
                Decision::Start {
                    trigger,
                    full_snapshot,
                    attempt,
                    ..
                } => (trigger, full_snapshot, attempt),
                Decision::Nothing { reason, .. } => panic!("{reason}"),
            }
        }

        /// The reason and the time to look again, in seconds.
        fn waits(&self, seconds: i64) -> (String, Option<i64>) {
            match self.decide(seconds) {
                Decision::Nothing { reason, look_again } => {
                    (reason, look_again.map(|t| (t - at(0)).num_seconds()))
                }
                Decision::Start { reason, .. } => panic!("{reason}"),
            }
        }

        /// The last attempt was on this status, and ended at this second.
        fn ended(&mut self, status: (i64, i64), seconds: i64, run: LastRun) {
            let failed = run.state == RunState::Failed;
            self.last = Some(LastCompaction {
                job_name: "p-compact-1".to_owned(),
                trigger: "EventsThreshold".to_owned(),
                full_revision: status.0,
                delta_revision: status.1,
                full_snapshot: false,
                failures: i32::from(failed),
                run: LastRun {
                    start_time: Some(at(seconds - 10)),
                    completion_time: Some(at(seconds)),
                    ..run
                },
            });
        }
    }

    fn facts(full: i64, newest: i64) -> LeaseFacts {
        LeaseFacts::read(
            Some(&druid(&full.to_string(), Some(at(0)))),
            Some(&druid(&newest.to_string(), Some(at(0)))),
        )
    }

    fn failed(code: i32, reason: &str) -> LastRun {
        LastRun {
            state: RunState::Failed,
            exit_code: Some(code).filter(|c| *c != 0),
            reason: Some(reason.to_owned()),
            ..LastRun::default()
        }
    }

    fn reached(revision: i64) -> LastRun {
        LastRun {
            state: RunState::Succeeded,
            revision: Some(revision),
            ..LastRun::default()
        }
    }

    #[test]
    fn events_cross_their_threshold_exactly() {
        let w = World::new(1000, 1099);
        let (reason, again) = w.waits(0);
        assert_eq!(
            reason,
            "99 events since the full snapshot at revision 1000 cross no threshold"
        );
        assert_eq!(again, None);
        let w = World::new(1000, 1100);
        assert_eq!(w.starts(0), (Trigger::EventsThreshold, false, 0));
        for (w, says) in [
            (
                World {
                    suspended: true,
                    ..w.clone()
                },
                "suspended",
            ),
            (
                World {
                    spec: CompactionSpec {
                        enabled: false,
                        ..w.spec.clone()
                    },
                    ..w.clone()
                },
                "not enabled",
            ),
            (
                World {
                    waiting: Backoff {
                        running: Some("j".to_owned()),
                        ..Backoff::default()
                    },
                    ..w.clone()
                },
                "the Job j runs",
            ),
            (
                World {
                    facts: LeaseFacts::default(),
                    ..w.clone()
                },
                "no full snapshot",
            ),
            (
                World {
                    facts: LeaseFacts::read(Some(&druid("5", None)), None),
                    ..w.clone()
                },
                "no delta snapshot",
            ),
            (
                World {
                    facts: facts(1100, 1100),
                    ..w.clone()
                },
                "nothing has come after",
            ),
            (
                World {
                    facts: facts(1200, 1100),
                    ..w.clone()
                },
                "nothing has come after",
            ),
        ] {
            let (reason, again) = w.waits(0);
            assert!(reason.contains(says), "{reason}");
            assert_eq!(again, None);
        }
    }

    #[test]
    fn bytes_and_age_cross_theirs() {
        let name = ("last-snapshot-name", "Full-00000000-00001000-1790000000");
        let full = ours("1000", at(0), &[name]);
        let delta = ours(
            "1010",
            at(0),
            &[
                ("last-snapshot-name", "Incr-00001001-00001010-1790000060"),
                ("accumulated-delta-events", "10"),
                ("accumulated-delta-bytes", "2048"),
            ],
        );
        let mut w = World::new(0, 0);
        w.facts = LeaseFacts::read(Some(&full), Some(&delta));
        w.spec.size_threshold = Some(TextValue::of("2Ki"));
        assert_eq!(w.starts(0), (Trigger::SizeThreshold, false, 0));
        w.spec.size_threshold = Some(TextValue::of("2049"));
        assert_eq!(w.waits(0).1, None);
        w.spec.age_threshold = Some(TextValue::of("1h"));
        assert_eq!(w.waits(0).1, Some(3600));
        assert_eq!(w.waits(3599).1, Some(3600));
        assert_eq!(w.starts(3600), (Trigger::AgeThreshold, false, 0));
        // The full's time is ahead of the clock: it counts as now.
        assert_eq!(w.waits(-500).1, Some(3100));
        // What cannot be read crosses nothing.
        w.spec.size_threshold = Some(TextValue::of("much"));
        w.spec.age_threshold = Some(TextValue::of("old"));
        assert_eq!(w.waits(9999).1, None);
        // Without deltas after it, no full is too old.
        w.spec.age_threshold = Some(TextValue::of("1h"));
        w.facts = facts(1000, 1000);
        assert_eq!(w.waits(9999).1, None);
        // etcd-druid's: the age by the renewal, no bytes.
        w.spec.size_threshold = Some(TextValue::of("1"));
        w.facts = facts(1000, 1001);
        assert_eq!(w.starts(3600), (Trigger::AgeThreshold, false, 0));
    }

    #[test]
    fn a_full_lease_that_was_not_renewed_gives_no_second_job() {
        let mut w = World::new(1000, 1200);
        w.spec.size_threshold = Some(TextValue::of("1"));
        w.spec.age_threshold = Some(TextValue::of("1h"));
        w.ended((1000, 1200), 100, reached(1200));
        assert_eq!(
            w.waits(200).0,
            "nothing has come after the full snapshot at revision 1200 that p-compact-1 made"
        );
        w.facts = facts(1000, 1250);
        assert_eq!(w.waits(200).1, Some(3700));
        assert_eq!(w.starts(3700).0, Trigger::AgeThreshold);
        w.spec.age_threshold = None;
        w.facts = facts(1000, 1300);
        assert_eq!(w.starts(200), (Trigger::EventsThreshold, false, 0));
        // A full snapshot in its place is ahead of the delta Lease.
        w.ended((1000, 1200), 100, reached(1290));
        w.facts = facts(1000, 1280);
        assert!(w.waits(200).0.contains("nothing has come after"));
        w.facts = facts(1000, 1389);
        assert!(w.waits(200).0.contains("cross no threshold"));
        w.facts = facts(1000, 1390);
        assert_eq!(w.starts(200).0, Trigger::EventsThreshold);
    }

    #[test]
    fn a_cluster_that_was_set_back_counts_from_where_it_is() {
        let mut w = World::new(1000, 1200);
        w.ended((1000, 1200), 100, reached(1200));
        // Both Leases went back, and on again.
        for (full, newest, crosses) in [
            (900, 999, false),
            (900, 1000, true),
            (900, 1250, true),
            (1100, 1150, false),
        ] {
            w.facts = facts(full, newest);
            assert_eq!(
                matches!(w.decide(0), Decision::Start { .. }),
                crosses,
                "{full} {newest}"
            );
        }
        // A later full that is at less.
        w.facts = LeaseFacts::read(
            Some(&druid("1100", Some(at(500)))),
            Some(&druid("1210", Some(at(500)))),
        );
        assert_eq!(w.starts(600).0, Trigger::EventsThreshold);
        // One that was begun before the compaction ended.
        w.facts = LeaseFacts::read(
            Some(&druid("1100", Some(at(50)))),
            Some(&druid("1210", Some(at(500)))),
        );
        assert!(w.waits(600).0.contains("cross no threshold"));
    }

    #[test]
    fn a_status_that_has_not_moved_is_not_tried_again() {
        let mut w = World::new(1000, 1200);
        w.ended((1000, 1200), 100, reached(1050));
        assert!(
            w.waits(9999)
                .0
                .contains("have not moved since p-compact-1 was started")
        );
        for run in [
            failed(65, "CorruptSnapshot"),
            failed(74, "NoSpace"),
            failed(75, "LockHeld"),
            failed(137, "OOMKilled"),
            failed(0, "Evicted"),
            failed(0, DEADLINE_EXCEEDED),
            failed(0, outcome::JOB_DELETED),
        ] {
            w.facts = facts(1000, 1200);
            w.ended((1000, 1200), 100, run.clone());
            w.waiting.recovered_at = Some(at(5000));
            let (reason, again) = w.waits(999_999);
            assert!(reason.contains("have not moved"), "{reason}");
            assert_eq!(again, None);
            // It moves: after the pause, or at once where there is a new full.
            w.waiting.recovered_at = None;
            w.facts = facts(1000, 1201);
            if run.reason.as_deref() != Some(DEADLINE_EXCEEDED) {
                assert_eq!(w.waits(110).1, Some(160), "{run:?}");
                w.waiting.recovered_at = Some(at(105));
                assert_eq!(w.starts(110).2, 1);
                w.waiting.recovered_at = None;
                assert_eq!(w.starts(160).2, 1);
            }
            w.facts = facts(1001, 1201);
            assert_eq!(
                w.starts(110),
                (Trigger::EventsThreshold, false, 0),
                "{run:?}"
            );
        }
    }

    #[test]
    fn what_did_not_answer_is_tried_again_later_and_at_once_when_it_is_back() {
        let mut w = World::new(1000, 1200);
        for (failures, pause) in [
            (1, 1),
            (2, 2),
            (3, 4),
            (4, 8),
            (5, 16),
            (6, 32),
            (7, 60),
            (8, 60),
            (i32::MAX, 60),
        ] {
            w.ended((1000, 1200), 100, failed(69, "StoreUnreachable"));
            w.last.as_mut().unwrap().failures = failures;
            let due = 100 + pause * MINUTE;
            let (reason, again) = w.waits(due - 1);
            assert_eq!(again, Some(due), "{failures}");
            assert!(reason.contains("StoreUnreachable"), "{reason}");
            assert_eq!(w.starts(due), (Trigger::EventsThreshold, false, failures));
            // A Lease moves.
            let moved = World {
                facts: facts(1000, 1201),
                ..w.clone()
            };
            assert_eq!(moved.starts(101).2, failures);
            // An endpoint becomes ready; that it was so before the Job failed tells nothing.
            w.waiting.recovered_at = Some(at(99));
            assert_eq!(w.waits(101).1, Some(due));
            w.waiting.recovered_at = Some(at(101));
            assert_eq!(w.starts(101).2, failures);
            w.waiting.recovered_at = None;
        }
        // Also of a Pod whose code is not known.
        w.ended((1000, 1200), 100, failed(0, "KubernetesUnreachable"));
        assert_eq!(w.waits(101).1, Some(160));
        assert_eq!(w.starts(160).2, 1);
        // A clock that was a year ahead, or is a little behind.
        w.ended((1000, 1200), 365 * 86_400, failed(69, "StoreUnreachable"));
        assert_eq!(w.starts(0).2, 1);
        w.ended((1000, 1200), 30, failed(69, "StoreUnreachable"));
        assert_eq!(w.waits(0).1, Some(90));
    }

    #[test]
    fn a_full_snapshot_is_taken_instead_where_folding_took_too_long_or_would() {
        let mut w = World::new(1000, 1200);
        w.spec.full_snapshot_threshold = Some(200);
        assert_eq!(w.starts(0), (Trigger::FullSnapshotThreshold, true, 0));
        w.has_etcd = false;
        assert_eq!(w.starts(0), (Trigger::FullSnapshotThreshold, false, 0));
        let Decision::Start { reason, .. } = w.decide(0) else {
            unreachable!()
        };
        assert!(reason.contains("has no etcd"), "{reason}");
        // After a deadline: at once, when the status has moved.
        w.has_etcd = true;
        w.spec.full_snapshot_threshold = None;
        w.ended((1000, 1200), 100, failed(0, DEADLINE_EXCEEDED));
        w.facts = facts(1000, 1201);
        assert_eq!(w.starts(101), (Trigger::DeadlineExceeded, true, 1));
        w.has_etcd = false;
        assert_eq!(w.waits(101).1, Some(160));
        assert_eq!(w.starts(160), (Trigger::EventsThreshold, false, 1));
        // The full snapshot fails: it is tried again, after the pause.
        w.has_etcd = true;
        for run in [failed(74, "NoSpace"), failed(0, DEADLINE_EXCEEDED)] {
            w.ended((1000, 1201), 200, run);
            let last = w.last.as_mut().unwrap();
            (last.full_snapshot, last.failures) = (true, 2);
            last.trigger = "DeadlineExceeded".to_owned();
            w.facts = facts(1000, 1202);
            assert_eq!(w.waits(201).1, Some(320));
            assert_eq!(w.starts(320), (Trigger::DeadlineExceeded, true, 2));
        }
        // It succeeded: the next crossing is a compaction's again.
        w.ended((1000, 1202), 400, reached(1300));
        w.facts = facts(1300, 1400);
        assert_eq!(w.starts(401), (Trigger::EventsThreshold, false, 0));
    }

    #[test]
    fn a_job_that_runs_is_waited_for() {
        let mut w = World::new(1000, 1200);
        w.ended((1000, 1200), 100, LastRun::default());
        w.facts = facts(1000, 2000);
        assert_eq!(
            w.waits(999_999),
            ("the Job p-compact-1 runs".to_owned(), None)
        );
    }

    #[test]
    fn any_lease_and_any_past_gives_a_decision_that_holds_the_rules() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        let odd = [
            i64::MIN,
            -1,
            0,
            1,
            5,
            1000,
            1100,
            1200,
            i64::MAX - 1,
            i64::MAX,
        ];
        for _ in 0..20_000 {
            let mut number = || odd[rng.usize(..odd.len())];
            let holders = [number(), number()];
            let status = (number(), number());
            let run_revision = number();
            let failures = number() as i32;
            let mut w = World::new(1, 1);
            let time = |n: i64| DateTime::from_timestamp(n % 200_000_000_000, 0);
            w.facts = LeaseFacts::read(
                Some(&druid(&holders[0].to_string(), time(number() / 1000))),
                Some(&druid(&holders[1].to_string(), None)),
            );
            let states = [RunState::Running, RunState::Succeeded, RunState::Failed];
            let state = states[rng.usize(..3)];
            let run = LastRun {
                state,
                exit_code: [None, Some(65), Some(69), Some(74)][rng.usize(..4)],
                revision: Some(run_revision).filter(|_| rng.bool()),
                reason: Some(DEADLINE_EXCEEDED.to_owned()).filter(|_| rng.bool()),
                ..LastRun::default()
            };
            w.ended(status, rng.i64(-1_000_000_000..1_000_000_000), run);
            let last = w.last.as_mut().unwrap();
            last.failures = failures;
            last.full_snapshot = rng.bool();
            w.has_etcd = rng.bool();
            w.spec.age_threshold = Some(TextValue::of("1h")).filter(|_| rng.bool());
            w.spec.full_snapshot_threshold = Some(1).filter(|_| rng.bool());
            let decision = w.decide(0);
            let same = w.facts.revisions() == Some(status);
            if let Decision::Start {
                attempt,
                full_snapshot,
                events,
                ..
            } = &decision
            {
                assert_ne!(state, RunState::Running);
                assert!(*attempt >= 0 && *events > 0);
                assert!(w.has_etcd || !full_snapshot);
                let last = w.last.as_ref().unwrap();
                assert!(!same || outcome::is_unreachable(&last.run), "{decision:?}");
                // Another name than the one before it.
                assert!(!same || *attempt > 0, "{decision:?}");
            }
            if let Decision::Nothing {
                look_again: Some(again),
                ..
            } = &decision
            {
                assert!(*again > at(0), "{decision:?}");
            }
        }
    }
}
