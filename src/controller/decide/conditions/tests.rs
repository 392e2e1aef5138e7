//! Conditions and the freshness of snapshots, by examples and at random times.

use super::*;
use crate::base::TextValue;
use crate::controller::api::{EtcdBackupPolicySpec, EtcdSpec, SnapshotSpec, VerifySpec};
use crate::controller::facts::leases::tests::druid;
use crate::controller::facts::outcome::tests::time;
use crate::ops::snapshot::follow::Pace;
use crate::ops::verify::store::Level;
use chrono::TimeDelta;

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

fn with_leases(leases: &LeaseFacts) -> Facts {
    Facts {
        leases: leases.clone(),
        ..Facts::default()
    }
}

fn assess(policy: &EtcdBackupPolicy, leases: &LeaseFacts, now: &str) -> Assessment {
    backup_ready(policy, &with_leases(leases), &BTreeMap::new(), at(now))
}

#[test]
fn snapshots_are_on_time_late_or_lost() {
    let p = policy();
    // 2026-11-20 is a Friday.
    let f = facts(Some("20T00:07:00"), Some("20T10:00:03"));
    let ready = assess(&p, &f, "20T10:01:00");
    assert_eq!(
        (ready.status, ready.reason.as_str()),
        (True, "SnapshotsInTime")
    );
    assert_eq!(ready.stale_at, Some(at("20T10:07:33")));
    assert_eq!(assess(&p, &f, "20T10:07:32").status, True);
    let ready = assess(&p, &f, "20T10:07:33");
    assert_eq!((ready.status, ready.reason.as_str()), (Unknown, "Stale"));
    assert!(
        ready.message.contains("revision 200") && ready.message.contains("CronJob main-delta"),
        "{}",
        ready.message
    );
    assert!(
        ready.message.contains("every") || ready.message.contains("*/5"),
        "{}",
        ready.message
    );
    assert_eq!(ready.stale_at, Some(at("20T10:17:33")));
    // The message has no age: it stays the same until something changes.
    assert_eq!(assess(&p, &f, "20T10:17:32").message, ready.message);
    let ready = assess(&p, &f, "20T10:17:33");
    assert_eq!((ready.status, ready.reason.as_str()), (False, "Stale"));
    // The next full snapshot is Monday's, with a grace period of half a day and not of half a weekend.
    let f = facts(Some("20T00:07:00"), Some("23T11:59:00"));
    assert_eq!(assess(&p, &f, "23T11:59:30").status, True);
    let f = facts(Some("20T00:07:00"), Some("23T12:00:00"));
    let ready = assess(&p, &f, "23T12:00:01");
    assert_eq!(ready.status, Unknown);
    assert!(
        ready.message.contains("CronJob main-full"),
        "{}",
        ready.message
    );
}

#[test]
fn a_new_policy_has_no_snapshot_yet() {
    let mut p = policy();
    p.metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
        "2026-11-20T10:00:00Z".parse().unwrap(),
    ));
    let none = LeaseFacts::default();
    let ready = assess(&p, &none, "20T10:00:10");
    assert_eq!(
        (ready.status, ready.reason.as_str()),
        (Unknown, "NoSnapshotYet")
    );
    assert_eq!(ready.stale_at, Some(at("20T10:17:30")));
    let ready = assess(&p, &none, "20T10:17:30");
    assert_eq!((ready.status, ready.reason.as_str()), (False, "Stale"));
    // The first full snapshot counts for both kinds, for one period of deltas.
    let f = facts(Some("20T10:01:00"), None);
    assert_eq!(assess(&p, &f, "20T10:08:29").status, True);
    assert_eq!(assess(&p, &f, "20T10:08:30").status, Unknown);
    // Somebody else uses the Lease.
    let f = LeaseFacts::read(Some(&druid("etcd-main-0", None)), None);
    let ready = assess(&p, &f, "20T10:00:10");
    assert!(ready.message.contains("etcd-main-0"), "{}", ready.message);
    p.spec.suspend = true;
    let ready = assess(&p, &none, "23T10:00:00");
    assert_eq!(
        (ready.status, ready.reason.as_str()),
        (Unknown, "Suspended")
    );
}

#[test]
fn the_cadence_depends_on_what_takes_the_snapshots() {
    let mut p = policy();
    // A sidecar.
    p.spec.snapshot = None;
    let f = facts(Some("20T00:00:00"), Some("20T10:00:00"));
    let ready = assess(&p, &f, "20T10:00:00");
    assert_eq!(
        (ready.status, ready.stale_at),
        (True, Some(at("20T10:07:30")))
    );
    let f = facts(Some("20T00:00:00"), Some("21T12:00:00"));
    let ready = assess(&p, &f, "21T12:00:00");
    assert_eq!(ready.status, Unknown);
    assert!(
        ready.message.contains("every 24 h") && ready.message.contains("sidecar"),
        "{}",
        ready.message
    );
    // A follower without a schedule of full snapshots: one is enough.
    p.spec.snapshot = Some(SnapshotSpec {
        follow: Some(Pace {
            delta_period: Some(TextValue::of("20s")),
            delta_bytes: None,
        }),
        ..SnapshotSpec::default()
    });
    let f = facts(Some("01T00:00:00"), Some("20T10:00:00"));
    let ready = assess(&p, &f, "20T10:00:00");
    assert_eq!(
        (ready.status, ready.stale_at),
        (True, Some(at("20T10:02:20")))
    );
    let ready = assess(&p, &f, "20T10:02:20");
    assert!(
        ready.message.contains("every 20 s") && ready.message.contains("main-follow"),
        "{}",
        ready.message
    );
    // Full snapshots alone.
    p.spec.snapshot = Some(SnapshotSpec {
        full_schedule: Some("@daily".to_owned()),
        ..SnapshotSpec::default()
    });
    let ready = assess(&p, &facts(Some("20T00:05:00"), None), "20T10:00:00");
    assert_eq!(
        (ready.status, ready.stale_at),
        (True, Some(at("21T12:05:00")))
    );
    // An invalid schedule, which the condition Ready reports.
    p.spec.snapshot = Some(SnapshotSpec {
        full_schedule: Some("often".to_owned()),
        ..SnapshotSpec::default()
    });
    let ready = assess(&p, &facts(Some("20T00:05:00"), None), "20T10:00:00");
    assert_eq!((ready.status, ready.stale_at), (True, None));
}

#[test]
fn wrong_clocks_do_not_make_a_backup_stale_or_fresh() {
    let p = policy();
    let assess = |f: &LeaseFacts, delta_seen: Option<&str>, now: &str| {
        let mut leases = f.clone();
        leases.delta.as_mut().unwrap().renewal_seen = delta_seen.map(at);
        assess(&p, &leases, now).status
    };
    // The writer's clock is behind by hours; the controller saw the renewal.
    let f = facts(Some("20T00:05:00"), Some("20T07:00:00"));
    assert_eq!(assess(&f, None, "20T10:00:00"), False);
    assert_eq!(assess(&f, Some("20T09:59:00"), "20T10:00:00"), True);
    assert_eq!(assess(&f, Some("20T09:59:00"), "20T10:06:30"), Unknown);
    // A time a little ahead counts as now.
    let f = facts(Some("20T00:05:00"), Some("20T10:30:00"));
    assert_eq!(assess(&f, None, "20T10:00:00"), True);
    // A time far ahead is ignored; only the renewal that the controller saw counts.
    let f = facts(Some("20T00:05:00"), Some("29T10:00:00"));
    assert_ne!(assess(&f, None, "20T10:00:00"), True);
    assert_eq!(assess(&f, Some("20T09:59:00"), "20T10:00:00"), True);
    assert_eq!(assess(&f, Some("20T09:59:00"), "20T10:06:30"), Unknown);
    // The controller's own clock was ahead.
    let f = facts(Some("20T00:05:00"), Some("20T09:59:00"));
    assert_eq!(assess(&f, Some("29T00:00:00"), "20T10:00:00"), True);
}

#[test]
fn a_failed_snapshot_counts_until_one_is_saved() {
    let p = policy();
    let leases = facts(Some("20T00:05:00"), Some("20T10:00:00"));
    let run = |result: RunState, reason: &str, t: &str| ScheduledRun {
        job: "main-full-1".to_owned(),
        result,
        reason: Some(reason.to_owned()),
        message: Some(format!("exit code 1, {reason}: it is so")),
        ended: Some(at(t)),
        ..ScheduledRun::default()
    };
    let assess = |kind: &str, run: ScheduledRun| {
        let runs = [(kind.to_owned(), run)].into();
        backup_ready(&p, &with_leases(&leases), &runs, at("20T10:01:00"))
    };
    let ready = assess(
        "delta",
        run(RunState::Failed, "EtcdUnreachable", "20T10:00:30"),
    );
    assert_eq!(
        (ready.status, ready.reason.as_str()),
        (False, "EtcdUnreachable")
    );
    assert!(
        ready.message.contains("delta") && ready.message.contains("it is so"),
        "{}",
        ready.message
    );
    let full = |state, t| assess("full", run(state, "NoSpace", t)).status;
    assert_eq!(full(RunState::Failed, "20T00:06:00"), False);
    assert_eq!(full(RunState::Failed, "20T00:04:00"), True);
    assert_eq!(full(RunState::Succeeded, "20T00:06:00"), True);
}

#[test]
fn a_follower_reports_its_own_problem_at_once() {
    let mut p = policy();
    let mut leases = facts(Some("20T00:05:00"), Some("20T10:00:00"));
    leases.follower_problem = Some("EtcdUnreachable: no member answers".to_owned());
    // It is an old one: the policy has no follower any more.
    assert_eq!(assess(&p, &leases, "20T10:01:00").status, True);
    p.spec.snapshot.as_mut().unwrap().follow = Some(Pace {
        delta_period: None,
        delta_bytes: None,
    });
    let ready = assess(&p, &leases, "20T10:01:00");
    assert_eq!(
        (ready.status, ready.reason.as_str()),
        (False, "EtcdUnreachable")
    );
    assert!(
        ready.message.contains("main-follow") && ready.message.contains("no member"),
        "{}",
        ready.message
    );
}

#[test]
fn a_shorter_schedule_makes_no_fresh_backup_late() {
    let mut p = policy();
    let leases = facts(Some("20T00:05:00"), Some("20T10:00:00"));
    let condition = |status, t| Condition {
        type_: "BackupReady".to_owned(),
        status,
        reason: String::new(),
        message: String::new(),
        last_transition_time: at(t),
        observed_generation: Some(1),
    };
    p.metadata.generation = Some(2);
    let mut status = crate::controller::api::EtcdBackupPolicyStatus {
        observed_generation: Some(1),
        changed_at: Some(at("20T08:00:00")),
        conditions: vec![condition(True, "20T09:00:00")],
        ..Default::default()
    };
    p.status = Some(status.clone());
    assert_eq!(
        assess(&p, &leases, "20T10:30:00").status,
        True,
        "just changed"
    );
    status.observed_generation = Some(2);
    status.changed_at = Some(at("20T10:30:00"));
    p.status = Some(status.clone());
    assert_eq!(assess(&p, &leases, "20T10:31:00").status, True);
    assert_eq!(assess(&p, &leases, "20T10:40:00").status, Unknown);
    // A late backup stays late whatever is changed.
    status.conditions = vec![condition(Unknown, "20T09:00:00")];
    p.status = Some(status);
    assert_ne!(assess(&p, &leases, "20T10:31:00").status, True);
}

#[test]
fn a_verification_finds_nothing_or_damage_or_fails_or_is_too_old() {
    let mut p = policy();
    let assess = |p: &EtcdBackupPolicy, run: Option<&LastRun>, now: &str| {
        let verified = backup_verified(p, &Facts::default(), run, at(now));
        (verified.status, verified.reason, verified.stale_at)
    };
    assert_eq!(assess(&p, None, "20T10:00:00").1, "NotConfigured");
    p.spec.verify = Some(VerifySpec {
        schedule: "0 3 * * *".to_owned(),
        level: Level::default(),
        against_cluster: false,
        drill: None,
        args: Vec::new(),
    });
    assert_eq!(assess(&p, None, "20T10:00:00").1, "NeverVerified");
    let mut run = LastRun {
        state: RunState::Succeeded,
        completion_time: Some(at("20T03:10:00")),
        revision: Some(7),
        ..LastRun::default()
    };
    let stale = at("22T15:10:00");
    assert_eq!(
        assess(&p, Some(&run), "20T10:00:00"),
        (True, "Verified".to_owned(), Some(stale))
    );
    assert_eq!(assess(&p, Some(&run), "22T15:10:00").1, "VerificationStale");
    run.state = RunState::Failed;
    run.reason = Some("CorruptSnapshot".to_owned());
    run.exit_code = Some(65);
    assert_eq!(assess(&p, Some(&run), "29T10:00:00").0, False);
    run.reason = Some("StoreUnreachable".to_owned());
    run.exit_code = Some(69);
    assert_eq!(
        assess(&p, Some(&run), "20T10:00:00"),
        (Unknown, "StoreUnreachable".to_owned(), None)
    );
    run.state = RunState::Running;
    assert_eq!(assess(&p, Some(&run), "20T10:00:00").1, "NeverVerified");
}

#[test]
fn compactions_are_as_healthy_as_the_last_one() {
    let mut p = policy();
    let f = facts(Some("20T00:05:00"), Some("20T10:00:00"));
    let assess = |p: &EtcdBackupPolicy, f: &LeaseFacts, last: Option<&LastCompaction>| {
        let healthy = compaction_healthy(p, f, last, at("20T10:01:00"));
        (healthy.status, healthy.reason)
    };
    assert_eq!(assess(&p, &f, None), (True, "NoneNeeded".to_owned()));
    assert_eq!(assess(&p, &LeaseFacts::default(), None).0, Unknown);
    let old = facts(Some("20T00:05:00"), Some("20T09:00:00"));
    assert_eq!(assess(&p, &old, None), (Unknown, "Stale".to_owned()));
    let mut last = LastCompaction {
        job_name: "main-compact-1".to_owned(),
        ..LastCompaction::default()
    };
    assert_eq!(assess(&p, &f, Some(&last)), (True, "Running".to_owned()));
    last.run.state = RunState::Succeeded;
    assert_eq!(assess(&p, &f, Some(&last)), (True, "Succeeded".to_owned()));
    last.run.state = RunState::Failed;
    last.run.reason = Some("NoSpace".to_owned());
    last.failures = 2;
    assert_eq!(assess(&p, &f, Some(&last)), (False, "NoSpace".to_owned()));
    assert_eq!(assess(&p, &old, Some(&last)), (False, "NoSpace".to_owned()));
    last.run.state = RunState::Running;
    assert_eq!(assess(&p, &f, Some(&last)), (False, "Retrying".to_owned()));
    p.spec.compaction.enabled = false;
    assert_eq!(assess(&p, &f, None).1, "NotConfigured");
}

#[test]
fn the_transition_time_changes_only_with_the_status() {
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
    let worse = ready(&p, Some(&problem("SpecInvalid")));
    let second = merge(&first, &[("Ready", &worse)], Some(2), at("20T11:00:00"));
    assert_eq!(second.len(), 1);
    assert_eq!(second[0].last_transition_time, at("20T10:00:00"));
    assert_eq!(
        (second[0].reason.as_str(), second[0].observed_generation),
        ("SpecInvalid", Some(2))
    );
    let third = merge(&second, &[("Ready", &good)], Some(2), at("20T12:00:00"));
    assert_eq!(third[0].last_transition_time, at("20T12:00:00"));
}

#[test]
fn an_assessment_holds_until_it_is_stale() {
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
        let some = |rng: &mut fastrand::Rng| base + TimeDelta::seconds(rng.i64(-200_000..20_000));
        let full = druid("100", Some(some(&mut rng)));
        let delta = druid("200", Some(some(&mut rng)));
        let mut f = LeaseFacts::read(Some(&full), Some(&delta).filter(|_| rng.bool()));
        for fact in [&mut f.full, &mut f.delta].into_iter().flatten() {
            fact.renewal_seen = Some(some(&mut rng)).filter(|_| rng.bool());
        }
        let now = base + TimeDelta::seconds(rng.i64(0..100_000));
        let assess_at = |now| backup_ready(&p, &with_leases(&f), &BTreeMap::new(), now);
        let ready = assess_at(now);
        let Some(stale_at) = ready.stale_at else {
            continue;
        };
        assert!(stale_at > now, "{ready:?}");
        let between = now + (stale_at - now) / 2;
        // Times ahead of the clock count as now, and so last longer.
        let ahead = [f.full.as_ref(), f.delta.as_ref()].into_iter().flatten();
        let ahead = ahead
            .flat_map(|s| s.renewed.into_iter().chain(s.renewal_seen))
            .any(|t| t > now);
        if !ahead {
            assert_eq!(assess_at(between), ready, "{ready:?}");
            assert_ne!(assess_at(stale_at), ready);
        }
    }
}
