//! The rules of thresholds, by examples and with random Leases.

use super::*;
use crate::base::TextValue;
use crate::controller::api::LastRun;
use crate::controller::facts::leases::tests::{at, druid, ours};

const MINUTE: i64 = 60;

/// The inputs of a decision, owned.
#[derive(Clone)]
struct Case {
    spec: CompactionSpec,
    suspended: bool,
    has_etcd: bool,
    facts: LeaseFacts,
    last: Option<LastCompaction>,
    running_job: Option<String>,
    recovered_at: Option<DateTime<Utc>>,
}

impl Case {
    /// Leases like etcd-druid's at these revisions, and a threshold of 100 events.
    fn new(full: i64, newest: i64) -> Self {
        Case {
            spec: CompactionSpec {
                events_threshold: 100,
                ..CompactionSpec::default()
            },
            suspended: false,
            has_etcd: true,
            facts: facts(full, newest),
            last: None,
            running_job: None,
            recovered_at: None,
        }
    }

    fn decide(&self, seconds: i64) -> Result<JobStart, NotDue> {
        let inputs = Inputs {
            spec: &self.spec,
            is_suspended: self.suspended,
            has_etcd: self.has_etcd,
            facts: &self.facts,
            last: self.last.as_ref(),
            running_job: self.running_job.as_deref(),
            recovered_at: self.recovered_at,
            generation: None,
        };
        decide(&inputs, at(seconds))
    }

    /// Returns the trigger, whether a full snapshot is taken, and the attempt.
    fn starts(&self, seconds: i64) -> (Trigger, bool, i32) {
        match self.decide(seconds) {
            Ok(start) => (start.trigger, start.full_snapshot, start.attempt),
            Err(not_due) => panic!("{}", not_due.reason),
        }
    }

    /// Returns the reason and the time of the requeue, in seconds.
    fn waits(&self, seconds: i64) -> (String, Option<i64>) {
        match self.decide(seconds) {
            Err(NotDue { reason, again_at }) => {
                (reason, again_at.map(|t| (t - at(0)).num_seconds()))
            }
            Ok(start) => panic!("{}", start.reason),
        }
    }

    /// Sets the last Job: it was made for these revisions of the Leases, and ended at this second.
    fn ended(&mut self, revisions: (i64, i64), seconds: i64, run: LastRun) {
        let failed = run.state == RunState::Failed;
        self.last = Some(LastCompaction {
            job_name: "p-compact-1".to_owned(),
            trigger: "EventsThreshold".to_owned(),
            full_revision: revisions.0,
            delta_revision: revisions.1,
            full_snapshot: false,
            generation: None,
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

fn succeeded(revision: i64) -> LastRun {
    LastRun {
        state: RunState::Succeeded,
        revision: Some(revision),
        ..LastRun::default()
    }
}

#[test]
fn events_reach_their_threshold_exactly() {
    let case = Case::new(1000, 1099);
    let (reason, again_at) = case.waits(0);
    assert_eq!(
        reason,
        "99 revisions since the full snapshot at revision 1000 reach no threshold"
    );
    assert_eq!(again_at, None);
    let case = Case::new(1000, 1100);
    assert_eq!(case.starts(0), (Trigger::EventsThreshold, false, 0));
    for (case, says) in [
        (
            Case {
                suspended: true,
                ..case.clone()
            },
            "suspended",
        ),
        (
            Case {
                spec: CompactionSpec {
                    enabled: false,
                    ..case.spec.clone()
                },
                ..case.clone()
            },
            "not enabled",
        ),
        (
            Case {
                running_job: Some("j".to_owned()),
                ..case.clone()
            },
            "the Job j is running",
        ),
        (
            Case {
                facts: LeaseFacts::default(),
                ..case.clone()
            },
            "no full snapshot",
        ),
        (
            Case {
                facts: LeaseFacts::read(Some(&druid("5", None)), None),
                ..case.clone()
            },
            "no delta snapshot",
        ),
        (
            Case {
                facts: facts(1100, 1100),
                ..case.clone()
            },
            "there are no revisions after",
        ),
        (
            Case {
                facts: facts(1200, 1100),
                ..case.clone()
            },
            "there are no revisions after",
        ),
    ] {
        let (reason, again_at) = case.waits(0);
        assert!(reason.contains(says), "{reason}");
        assert_eq!(again_at, None);
    }
}

#[test]
fn bytes_and_age_reach_their_thresholds_exactly() {
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
    let mut case = Case::new(0, 0);
    case.facts = LeaseFacts::read(Some(&full), Some(&delta));
    case.spec.size_threshold = Some(TextValue::of("2Ki"));
    assert_eq!(case.starts(0), (Trigger::SizeThreshold, false, 0));
    case.spec.size_threshold = Some(TextValue::of("2049"));
    assert_eq!(case.waits(0).1, None);
    case.spec.age_threshold = Some(TextValue::of("1h"));
    assert_eq!(case.waits(0).1, Some(3600));
    assert_eq!(case.waits(3599).1, Some(3600));
    assert_eq!(case.starts(3600), (Trigger::AgeThreshold, false, 0));
    // The time of the full snapshot is ahead of the clock: it counts as now.
    assert_eq!(case.waits(-500).1, Some(3100));
    // Values that cannot be parsed are no thresholds.
    case.spec.size_threshold = Some(TextValue::of("much"));
    case.spec.age_threshold = Some(TextValue::of("old"));
    assert_eq!(case.waits(9999).1, None);
    // Without deltas after it, no full snapshot is too old.
    case.spec.age_threshold = Some(TextValue::of("1h"));
    case.facts = facts(1000, 1000);
    assert_eq!(case.waits(9999).1, None);
    // Leases of etcd-druid: the age counts from the renewal, and bytes are unknown.
    case.spec.size_threshold = Some(TextValue::of("1"));
    case.facts = facts(1000, 1001);
    assert_eq!(case.starts(3600), (Trigger::AgeThreshold, false, 0));
}

#[test]
fn a_full_lease_that_was_not_renewed_starts_no_second_job() {
    let mut case = Case::new(1000, 1200);
    case.spec.size_threshold = Some(TextValue::of("1"));
    case.spec.age_threshold = Some(TextValue::of("1h"));
    case.ended((1000, 1200), 100, succeeded(1200));
    assert_eq!(
        case.waits(200).0,
        "there are no revisions after the full snapshot at revision 1200 of the Job p-compact-1"
    );
    case.facts = facts(1000, 1250);
    assert_eq!(case.waits(200).1, Some(3700));
    assert_eq!(case.starts(3700).0, Trigger::AgeThreshold);
    case.spec.age_threshold = None;
    case.facts = facts(1000, 1300);
    assert_eq!(case.starts(200), (Trigger::EventsThreshold, false, 0));
    // A full snapshot in place of a compaction is ahead of the delta Lease.
    case.ended((1000, 1200), 100, succeeded(1290));
    case.facts = facts(1000, 1280);
    assert!(case.waits(200).0.contains("there are no revisions after"));
    case.facts = facts(1000, 1389);
    assert!(case.waits(200).0.contains("reach no threshold"));
    case.facts = facts(1000, 1390);
    assert_eq!(case.starts(200).0, Trigger::EventsThreshold);
}

#[test]
fn after_a_restore_to_an_older_revision_events_count_from_the_leases() {
    let mut case = Case::new(1000, 1200);
    case.ended((1000, 1200), 100, succeeded(1200));
    // Both Leases went back; one or both may have gone on since.
    for (full, newest, crosses) in [
        (900, 999, false),
        (900, 1000, true),
        (900, 1250, true),
        (1100, 1150, false),
    ] {
        case.facts = facts(full, newest);
        assert_eq!(case.decide(0).is_ok(), crosses, "{full} {newest}");
    }
    // A full snapshot was taken later, at a lower revision.
    case.facts = LeaseFacts::read(
        Some(&druid("1100", Some(at(500)))),
        Some(&druid("1210", Some(at(500)))),
    );
    assert_eq!(case.starts(600).0, Trigger::EventsThreshold);
    // The Lease of the lower full snapshot was renewed before the compaction ended.
    case.facts = LeaseFacts::read(
        Some(&druid("1100", Some(at(50)))),
        Some(&druid("1210", Some(at(500)))),
    );
    assert!(case.waits(600).0.contains("reach no threshold"));
}

#[test]
fn no_second_job_for_the_same_revisions_of_the_leases() {
    let mut case = Case::new(1000, 1200);
    case.ended((1000, 1200), 100, succeeded(1050));
    assert!(
        case.waits(9999)
            .0
            .contains("have not moved since the Job p-compact-1 was started")
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
        case.facts = facts(1000, 1200);
        case.ended((1000, 1200), 100, run.clone());
        case.recovered_at = Some(at(5000));
        let (reason, again_at) = case.waits(999_999);
        assert!(reason.contains("have not moved"), "{reason}");
        assert_eq!(again_at, None);
        // The Leases move: the retry comes after the back-off, or at once if there is a new full snapshot.
        case.recovered_at = None;
        case.facts = facts(1000, 1201);
        if run.reason.as_deref() != Some(DEADLINE_EXCEEDED) {
            assert_eq!(case.waits(110).1, Some(160), "{run:?}");
            case.recovered_at = Some(at(105));
            assert_eq!(case.starts(110).2, 1);
            case.recovered_at = None;
            assert_eq!(case.starts(160).2, 1);
        }
        case.facts = facts(1001, 1201);
        assert_eq!(
            case.starts(110),
            (Trigger::EventsThreshold, false, 0),
            "{run:?}"
        );
    }
}

#[test]
fn after_an_unreachable_store_a_job_is_retried_after_the_back_off_or_at_its_recovery() {
    let mut case = Case::new(1000, 1200);
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
        case.ended((1000, 1200), 100, failed(69, "StoreUnreachable"));
        case.last.as_mut().unwrap().failures = failures;
        let due = 100 + pause * MINUTE;
        let (reason, again_at) = case.waits(due - 1);
        assert_eq!(again_at, Some(due), "{failures}");
        assert!(reason.contains("StoreUnreachable"), "{reason}");
        assert_eq!(
            case.starts(due),
            (Trigger::EventsThreshold, false, failures)
        );
        // A Lease moves: the retry comes at once.
        let moved = Case {
            facts: facts(1000, 1201),
            ..case.clone()
        };
        assert_eq!(moved.starts(101).2, failures);
        // An endpoint becomes ready. This counts only if it happens after the failure.
        case.recovered_at = Some(at(99));
        assert_eq!(case.waits(101).1, Some(due));
        case.recovered_at = Some(at(101));
        assert_eq!(case.starts(101).2, failures);
        case.recovered_at = None;
    }
    // The reason suffices if the exit code is unknown.
    case.ended((1000, 1200), 100, failed(0, "KubernetesUnreachable"));
    assert_eq!(case.waits(101).1, Some(160));
    assert_eq!(case.starts(160).2, 1);
    // The end of the Job is a year ahead of the clock, then a little.
    case.ended((1000, 1200), 365 * 86_400, failed(69, "StoreUnreachable"));
    assert_eq!(case.starts(0).2, 1);
    case.ended((1000, 1200), 30, failed(69, "StoreUnreachable"));
    assert_eq!(case.waits(0).1, Some(90));
}

#[test]
fn a_full_snapshot_replaces_compactions_that_take_too_long() {
    let mut case = Case::new(1000, 1200);
    case.spec.full_snapshot_threshold = Some(200);
    assert_eq!(case.starts(0), (Trigger::FullSnapshotThreshold, true, 0));
    case.has_etcd = false;
    assert_eq!(case.starts(0), (Trigger::FullSnapshotThreshold, false, 0));
    let reason = case.decide(0).unwrap().reason;
    assert!(reason.contains("needs etcd.endpoints"), "{reason}");
    // After a deadline: at once when the Leases have moved.
    case.has_etcd = true;
    case.spec.full_snapshot_threshold = None;
    case.ended((1000, 1200), 100, failed(0, DEADLINE_EXCEEDED));
    case.facts = facts(1000, 1201);
    assert_eq!(case.starts(101), (Trigger::DeadlineExceeded, true, 1));
    case.has_etcd = false;
    assert_eq!(case.waits(101).1, Some(160));
    assert_eq!(case.starts(160), (Trigger::EventsThreshold, false, 1));
    // The full snapshot fails: it is retried after the back-off.
    case.has_etcd = true;
    for run in [failed(74, "NoSpace"), failed(0, DEADLINE_EXCEEDED)] {
        case.ended((1000, 1201), 200, run);
        let last = case.last.as_mut().unwrap();
        (last.full_snapshot, last.failures) = (true, 2);
        last.trigger = "DeadlineExceeded".to_owned();
        case.facts = facts(1000, 1202);
        assert_eq!(case.waits(201).1, Some(320));
        assert_eq!(case.starts(320), (Trigger::DeadlineExceeded, true, 2));
    }
    // It succeeded: the next Job is a compaction again.
    case.ended((1000, 1202), 400, succeeded(1300));
    case.facts = facts(1300, 1400);
    assert_eq!(case.starts(401), (Trigger::EventsThreshold, false, 0));
}

#[test]
fn no_job_starts_while_one_runs() {
    let mut case = Case::new(1000, 1200);
    case.ended((1000, 1200), 100, LastRun::default());
    case.facts = facts(1000, 2000);
    assert_eq!(
        case.waits(999_999),
        ("the Job p-compact-1 is running".to_owned(), None)
    );
}

#[test]
fn decisions_keep_the_rules_for_any_leases_and_any_last_job() {
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
        let revisions = (number(), number());
        let run_revision = number();
        let failures = number() as i32;
        let mut case = Case::new(1, 1);
        let time = |n: i64| DateTime::from_timestamp(n % 200_000_000_000, 0);
        case.facts = LeaseFacts::read(
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
        case.ended(revisions, rng.i64(-1_000_000_000..1_000_000_000), run);
        let last = case.last.as_mut().unwrap();
        last.failures = failures;
        last.full_snapshot = rng.bool();
        case.has_etcd = rng.bool();
        case.spec.age_threshold = Some(TextValue::of("1h")).filter(|_| rng.bool());
        case.spec.full_snapshot_threshold = Some(1).filter(|_| rng.bool());
        let has_moved = case.facts.revisions() != Some(revisions);
        match case.decide(0) {
            Ok(start) => {
                assert_ne!(state, RunState::Running);
                assert!(start.attempt >= 0 && start.revisions > 0);
                assert!(case.has_etcd || !start.full_snapshot);
                let last = case.last.as_ref().unwrap();
                assert!(has_moved || outcome::is_unreachable(&last.run), "{start:?}");
                // A retry at the same revisions has another name than the Job before it.
                assert!(has_moved || start.attempt > 0, "{start:?}");
            }
            Err(not_due) => {
                let again_at = not_due.again_at;
                assert!(again_at.is_none_or(|t| t > at(0)), "{not_due:?}");
            }
        }
    }
}
