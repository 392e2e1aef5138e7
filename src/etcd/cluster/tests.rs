//! Tests of the observation of a cluster, without any server.

use super::query::{EndpointObservation, assemble, most_helpful};
use super::*;
use crate::error::Result;

fn hash(member: u64, said: Option<(u32, i64)>) -> MemberHash {
    MemberHash {
        member,
        name: format!("m{member}"),
        endpoint: None,
        revision: 9,
        hash: said.map(|(hash, compact_revision)| Hash {
            hash,
            compact_revision,
        }),
        error: None,
    }
}

fn compared(said: &[Option<(u32, i64)>]) -> [Vec<u64>; 3] {
    let hashes: Vec<MemberHash> = (1..).zip(said).map(|(id, &s)| hash(id, s)).collect();
    let a = compare(&hashes);
    [a.agree, a.differ, a.unknown]
}

#[test]
fn a_majority_of_all_is_right() {
    let (a, b, c) = (Some((1, 5)), Some((2, 5)), Some((3, 5)));
    assert_eq!(compared(&[a, a, a]), [vec![1, 2, 3], vec![], vec![]]);
    assert_eq!(compared(&[a, b, a]), [vec![1, 3], vec![2], vec![]]);
    // Without a majority, nothing is right.
    assert_eq!(compared(&[a, b]), [vec![], vec![1, 2], vec![]]);
    assert_eq!(compared(&[a, b, None]), [vec![], vec![1, 2], vec![3]]);
    assert_eq!(compared(&[a, b, c]), [vec![], vec![1, 2, 3], vec![]]);
    // A single hash is right if no other one contradicts it.
    assert_eq!(compared(&[a, None, None]), [vec![1], vec![], vec![2, 3]]);
    assert_eq!(compared(&[None]), [vec![], vec![], vec![1]]);
    assert_eq!(compare(&[]), Agreement::default());
}

#[test]
fn hashes_from_before_and_after_a_compaction_are_not_compared() {
    let (old, new, other) = (Some((1, 5)), Some((2, 7)), Some((3, 7)));
    assert_eq!(compared(&[old, new, new]), [vec![2, 3], vec![], vec![1]]);
    assert_eq!(compared(&[old, new]), [vec![2], vec![], vec![1]]);
    assert_eq!(compared(&[old, new, other]), [vec![1], vec![2, 3], vec![]]);
}

fn member(id: u64, applied: u64) -> Member {
    Member {
        id,
        name: format!("m{id}"),
        endpoint: Some(format!("http://m{id}:2379")),
        started: true,
        reads: true,
        status: Some(MemberStatus {
            raft_applied_index: applied,
            leader: 1,
            ..MemberStatus::default()
        }),
        ..Member::default()
    }
}

fn cluster(members: Vec<Member>) -> Cluster {
    let mut cluster = Cluster {
        members,
        ..Cluster::default()
    };
    for m in &mut cluster.members {
        m.is_leader = m.id == 1;
    }
    cluster
}

fn ids(members: &[&Member]) -> Vec<u64> {
    members.iter().map(|m| m.id).collect()
}

#[test]
fn a_follower_that_is_up_to_date_comes_first() {
    let c = cluster(vec![
        member(1, 9000),
        member(2, 8999),
        member(3, 10),
        member(4, 9000),
    ]);
    assert_eq!(ids(&c.choose(&[])), [2, 4, 1, 3]);
    assert_eq!(ids(&c.choose(&[4, 1])), [2, 3]);
    let mut c = c;
    c.members[1].is_learner = true;
    c.members[0].reads = false;
    c.members[3].status = None;
    assert_eq!(ids(&c.choose(&[])), [3]);
}

#[test]
fn a_member_with_a_nospace_alarm_is_healthy_and_one_with_other_errors_is_not() {
    let mut c = cluster(vec![member(1, 5), member(2, 5)]);
    let raise = |c: &mut Cluster, error: &str| {
        for m in &mut c.members {
            let status = m.status.as_mut().unwrap();
            status.errors = vec![error.to_owned()];
        }
        c.alarms = parse_alarm(error).into_iter().collect();
    };
    raise(&mut c, "memberID:1 alarm:NOSPACE ");
    assert_eq!(c.alarms[0].kind, AlarmKind::NoSpace);
    assert!(c.members.iter().all(|m| c.unhealthy_reason(m).is_none()));
    // All members report the alarm, but it affects only one.
    raise(&mut c, "memberID:2  alarm: CORRUPT");
    assert_eq!(ids(&c.choose(&[])), [1]);
    raise(&mut c, "alarm:CORRUPT ");
    assert!(c.choose(&[]).is_empty());
    raise(&mut c, "etcdserver: no leader");
    assert!(
        c.unhealthy_reason(&c.members[0])
            .unwrap()
            .contains("no leader")
    );
    raise(&mut c, "memberID:2 alarm:7");
    assert!(
        c.unhealthy_reason(&c.members[1])
            .unwrap()
            .contains("alarm:7")
    );
    assert!(c.unhealthy_reason(&c.members[0]).is_none());
}

fn observation(member_id: u64, cluster_id: u64, read: Result<Option<i64>>) -> EndpointObservation {
    EndpointObservation {
        endpoint: format!("http://m{member_id}:2379"),
        member_id,
        cluster_id,
        status: MemberStatus {
            raft_term: member_id,
            leader: member_id,
            revision: 40,
            ..MemberStatus::default()
        },
        members: Vec::new(),
        read,
    }
}

#[test]
fn the_error_without_a_quorum_names_the_responding_members() {
    let members = || vec![member(1, 5), member(2, 5), member(3, 5)];
    let cut_off = || Err(Reason::NoQuorum.error("read at m2: no answer"));
    let e = assemble(members(), &[observation(2, 7, cut_off())]).unwrap_err();
    assert_eq!(e.reason(), Reason::NoQuorum);
    assert!(
        e.to_string().contains("m2 at http://m2:2379 responds"),
        "{e}"
    );
    // One successful read is enough, and the highest term decides about the leader.
    let observations = [
        observation(2, 7, Ok(Some(41))),
        observation(3, 7, cut_off()),
    ];
    let c = assemble(members(), &observations).unwrap();
    assert_eq!(
        (c.cluster_id, c.revision, c.members[2].is_leader),
        (7, 41, true)
    );
    let e = assemble(
        members(),
        &[observation(1, 7, Ok(None)), observation(2, 8, Ok(None))],
    );
    assert_eq!(e.unwrap_err().reason(), Reason::Configuration);
}

#[test]
fn the_most_helpful_reason_is_chosen() {
    let chosen = |reasons: &[Reason]| {
        let errors = reasons.iter().map(|&r| r.error(r.as_str())).collect();
        most_helpful(errors).reason()
    };
    use Reason::{CertificateExpired, Configuration, EtcdUnreachable, Unauthenticated};
    assert_eq!(
        chosen(&[EtcdUnreachable, Configuration, CertificateExpired]),
        CertificateExpired
    );
    assert_eq!(chosen(&[EtcdUnreachable, Unauthenticated]), Unauthenticated);
    assert_eq!(chosen(&[EtcdUnreachable, EtcdUnreachable]), EtcdUnreachable);
}
