//! Tests of the plans, on clusters without a server.

use super::lock::lock_file;
use super::*;
use crate::etcd::cluster::{Alarm, AlarmKind, Member, MemberStatus};

const MIB: u64 = 1 << 20;

/// A cluster of members with these sizes and sizes in use, in MiB. The first member is the leader.
fn cluster(sizes: &[(u64, u64)]) -> Cluster {
    let member = |(id, &(size, in_use)): (u64, &(u64, u64))| Member {
        id,
        name: format!("m{id}"),
        endpoint: Some(format!("http://m{id}:2379")),
        started: true,
        reads: true,
        is_leader: id == 1,
        status: Some(MemberStatus {
            db_size: size * MIB,
            db_size_in_use: in_use * MIB,
            leader: 1,
            ..MemberStatus::default()
        }),
        ..Member::default()
    };
    Cluster {
        members: (1..).zip(sizes).map(member).collect(),
        ..Cluster::default()
    }
}

fn planned(c: &Cluster, defrag: Defrag, quota: Option<u64>) -> Vec<u64> {
    plan_defragmentation(c, defrag, quota)
        .iter()
        .filter(|p| p.decision == Decision::Defragment)
        .map(|p| p.member)
        .collect()
}

#[test]
fn databases_that_waste_too_much_are_defragmented_the_leader_last() {
    let c = cluster(&[(100, 40), (100, 40), (100, 60)]);
    let half = Defrag::Fraction(0.5);
    assert_eq!(planned(&c, half, None), [2, 1]);
    assert_eq!(planned(&c, Defrag::Always, None), [2, 3, 1]);
    assert_eq!(planned(&c, Defrag::Fraction(0.61), None), [0; 0]);
    // Nothing is wasted, so a defragmentation would free nothing.
    let full = cluster(&[(100, 100)]);
    assert_eq!(planned(&full, Defrag::Fraction(0.0), None), [0; 0]);
}

#[test]
fn a_quota_that_is_nearly_used_up_counts() {
    let c = cluster(&[(100, 90)]);
    let half = Defrag::Fraction(0.5);
    assert_eq!(planned(&c, half, Some(125 * MIB)), [0; 0]);
    assert_eq!(planned(&c, half, Some(123 * MIB)), [1]);
    // The quota that the member reports counts, unless the flag overrides it.
    let mut says = c.clone();
    says.members[0].status.as_mut().unwrap().db_size_quota = Some(110 * MIB);
    assert_eq!(planned(&says, half, None), [1]);
    assert_eq!(planned(&says, half, Some(1000 * MIB)), [0; 0]);
    // The waste is below 1 %.
    let tight = cluster(&[(1000, 991)]);
    assert_eq!(planned(&tight, half, Some(1000 * MIB)), [0; 0]);
}

fn no_space(c: &mut Cluster, member: u64) {
    c.alarms.push(Alarm {
        member,
        kind: AlarmKind::NoSpace,
    });
}

#[test]
fn a_no_space_alarm_causes_a_defragmentation_and_makes_no_member_unhealthy() {
    let mut c = cluster(&[(100, 90), (100, 90)]);
    no_space(&mut c, 2);
    assert_eq!(planned(&c, Defrag::Fraction(0.5), None), [2]);
    assert!(unfit_members(&c).is_empty());
    c.alarms[0].kind = AlarmKind::Corrupt;
    assert_eq!(unfit_members(&c)[0].0, "m2");
    assert_eq!(planned(&c, Defrag::Fraction(0.5), None), [0; 0]);
}

#[test]
fn an_alarm_stays_until_there_is_space() {
    let mut c = cluster(&[(100, 90), (50, 50)]);
    no_space(&mut c, 1);
    assert!(
        no_space_remains(&c, Some(100 * MIB), &[])
            .unwrap()
            .contains("m1")
    );
    assert!(no_space_remains(&c, Some(104 * MIB), &[]).is_some());
    assert_eq!(no_space_remains(&c, Some(106 * MIB), &[]), None);
    // The quota is unknown: a smaller database is enough.
    assert!(no_space_remains(&c, None, &[]).unwrap().contains("quota"));
    assert!(no_space_remains(&c, None, &[2]).is_some());
    assert_eq!(no_space_remains(&c, None, &[1]), None);
}

#[test]
fn members_that_lag_or_do_not_answer_are_unfit() {
    let mut c = cluster(&[(1, 1), (1, 1)]);
    c.members[0].status.as_mut().unwrap().raft_applied_index = 100_000;
    c.members[1].status.as_mut().unwrap().raft_applied_index = 99_900;
    assert!(unfit_members(&c).is_empty());
    c.members[1].status.as_mut().unwrap().raft_applied_index = 90_000;
    assert!(unfit_members(&c)[0].1.contains("10000 entries"));
    c.members[1].status = None;
    assert_eq!(unfit_members(&c)[0].0, "m2");
    c.members[1].is_learner = true;
    assert!(unfit_members(&c).is_empty());
}

#[test]
fn limits_of_the_waste_are_parsed() {
    assert_eq!("always".parse(), Ok(Defrag::Always));
    assert_eq!("0.5".parse(), Ok(Defrag::Fraction(0.5)));
    for bad in ["50", "-0.1", "NaN", "often", ""] {
        assert!(bad.parse::<Defrag>().is_err(), "{bad}");
    }
}

#[test]
fn a_second_run_on_this_machine_is_refused() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("lock");
    let first = lock_file(&path).unwrap();
    let second = lock_file(&path).err().unwrap();
    assert_eq!(second.reason(), Reason::LockHeld);
    drop(first);
    lock_file(&path).unwrap();
}
