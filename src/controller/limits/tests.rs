//! The limits by examples, and with random Jobs.

use super::*;
use crate::controller::api::{EtcdBackupPolicy, EtcdBackupPolicySpec};
use crate::controller::facts::leases::tests::at;
use crate::controller::jobs::WorkKind;
use k8s_openapi::api::batch::v1::{JobCondition, JobStatus};

fn name(policy: &str) -> NamespacedName {
    let (namespace, name) = policy.split_once('/').unwrap_or(("n", policy));
    NamespacedName::new(namespace, name)
}

fn policy(policy: &str) -> EtcdBackupPolicy {
    let name = name(policy);
    let mut object = EtcdBackupPolicy::new(&name.name, EtcdBackupPolicySpec::default());
    object.metadata.namespace = Some(name.namespace);
    object.metadata.uid = Some(policy.to_owned());
    object
}

/// Returns the Job of a policy's threshold.
fn job(of: &str) -> Job {
    let policy = policy(of);
    let mut job = Job::default();
    job.metadata.name = Some(format!("{}-job", policy.name_any()));
    job.metadata.namespace = policy.namespace();
    job.metadata.labels = Some(jobs::labels(&policy, WorkKind::Compaction));
    job.metadata.owner_references = Some(vec![jobs::owner(&policy)]);
    job
}

fn restore(of: &str) -> Job {
    let mut job = job(of);
    let labels = job.metadata.labels.as_mut().unwrap();
    labels.insert(
        jobs::LABEL_TASK_TYPE.to_owned(),
        TaskType::Restore.as_str().to_owned(),
    );
    job
}

fn ended(mut job: Job) -> Job {
    job.status = Some(JobStatus {
        conditions: Some(vec![JobCondition {
            type_: "Complete".to_owned(),
            status: "True".to_owned(),
            ..JobCondition::default()
        }]),
        ..JobStatus::default()
    });
    job
}

/// The caches with these policies.
fn tables(policies: &[&str]) -> Tables {
    let mut tables = Tables::default();
    for of in policies {
        tables.policies.insert(name(of), Arc::new(policy(of)));
    }
    tables
}

fn show(tables: &mut Tables, job: Job) {
    tables.jobs.insert(NamespacedName::of(&job), Arc::new(job));
}

#[test]
fn a_job_counts_before_the_cache_shows_it_and_until_it_ends() {
    let mut tables = tables(&["a", "b", "c"]);
    let mut limits = Limits::new(2, 0);
    let take = |limits: &mut Limits, tables: &Tables, of: &str, s| {
        limits.take_slot(tables, &name(of), &job(of), at(s))
    };
    assert!(take(&mut limits, &tables, "a", 0).is_ok());
    // The same Job again takes no second slot.
    assert!(take(&mut limits, &tables, "a", 0).is_ok());
    assert!(take(&mut limits, &tables, "b", 1).is_ok());
    let why = take(&mut limits, &tables, "c", 2).unwrap_err();
    assert!(why.contains("at most 2 Jobs"), "{why}");
    // A Job whose creation got no response counts, and is looked for.
    assert_eq!(
        limits.unseen(&name("a")).1,
        [NamespacedName::new("n", "a-job")]
    );
    limits.answered(&NamespacedName::new("n", "a-job"), Some(job("a")));
    assert_eq!(limits.unseen(&name("a")).0.len(), 1);
    show(&mut tables, job("a"));
    limits.forget_seen(&tables, at(3));
    assert_eq!(limits.unseen(&name("a")), (vec![], vec![]));
    assert!(take(&mut limits, &tables, "c", 3).is_err());
    show(&mut tables, ended(job("a")));
    assert_eq!(limits.wake(&tables, at(4)), [name("c")]);
    assert!(take(&mut limits, &tables, "c", 4).is_ok());
    // One that certainly was not created gives its slot back; so does one that never appears.
    limits.answered(&NamespacedName::new("n", "c-job"), None);
    assert!(take(&mut limits, &tables, "c", 5).is_ok());
    limits.forget_seen(&tables, at(200));
    assert_eq!(limits.used(&tables).total, 0);
}

#[test]
fn a_free_slot_goes_to_the_policy_that_has_waited_longest() {
    let mut tables = tables(&["a", "b", "c", "d"]);
    let mut limits = Limits::new(1, 0);
    show(&mut tables, job("a"));
    for (s, of) in [(1, "b"), (2, "c"), (3, "d")] {
        assert!(
            limits
                .take_slot(&tables, &name(of), &job(of), at(s))
                .is_err()
        );
    }
    show(&mut tables, ended(job("a")));
    // A newcomer does not overtake.
    assert!(
        limits
            .take_slot(&tables, &name("d"), &job("d"), at(4))
            .is_err()
    );
    assert_eq!(limits.wake(&tables, at(5)), [name("b")]);
    assert!(limits.wake(&tables, at(6)).is_empty(), "it was woken");
    // One that does not ask any more blocks nobody.
    assert_eq!(limits.wake(&tables, at(36)), [name("c")]);
    limits.stop_waiting(&name("c"));
    assert_eq!(limits.wake(&tables, at(37)), [name("d")]);
    assert!(
        limits
            .take_slot(&tables, &name("d"), &job("d"), at(38))
            .is_ok()
    );
}

#[test]
fn restores_do_not_wait_and_do_not_count() {
    let mut tables = tables(&["a", "b"]);
    let mut limits = Limits::new(1, 0);
    show(&mut tables, job("a"));
    assert!(
        limits
            .take_slot(&tables, &name("b"), &restore("b"), at(0))
            .is_ok()
    );
    assert_eq!(limits.used(&tables).total, 1);
}

#[test]
fn no_namespace_outweighs_another() {
    let all = ["x/a", "x/b", "x/c", "y/d"];
    let mut tables = tables(&all);
    // Jobs by hand: without a right owner, and many of one policy.
    for i in 0..9 {
        let mut foreign = job("x/a");
        foreign.metadata.name = Some(format!("foreign-{i}"));
        foreign.metadata.owner_references = None;
        show(&mut tables, foreign);
        let mut own = job("x/a");
        own.metadata.name = Some(format!("own-{i}"));
        show(&mut tables, own);
    }
    let mut limits = Limits::new(4, 0);
    assert_eq!(limits.used(&tables).total, MAX_JOBS_OF_POLICY);
    let why = limits
        .take_slot(&tables, &name("x/b"), &job("x/b"), at(0))
        .unwrap_err();
    assert!(why.contains("of a namespace"), "{why}");
    assert!(
        limits
            .take_slot(&tables, &name("y/d"), &job("y/d"), at(1))
            .is_ok()
    );
    // If all policies are in one namespace, there is no limit for it.
    tables.policies.remove(&name("y/d"));
    assert!(
        limits
            .take_slot(&tables, &name("x/b"), &job("x/b"), at(2))
            .is_ok()
    );
}

#[test]
fn the_limits_hold_and_everybody_gets_a_slot() {
    let mut rng = fastrand::Rng::with_seed(crate::seed());
    for _ in 0..100 {
        let all: Vec<String> = (0..8)
            .map(|i| format!("{}/p{i}", ["x", "y"][i % 2]))
            .collect();
        let names: Vec<&str> = all.iter().map(String::as_str).collect();
        let mut tables = tables(&names);
        let max = rng.u32(1..5);
        let mut limits = Limits::new(max, 0);
        let mut done: BTreeSet<&str> = BTreeSet::new();
        let mut running: Vec<&str> = Vec::new();
        for second in 0..200 {
            let of = names[rng.usize(..names.len())];
            if done.contains(of) || running.contains(&of) {
                limits.stop_waiting(&name(of));
            } else if limits
                .take_slot(&tables, &name(of), &job(of), at(second))
                .is_ok()
            {
                running.push(of);
            }
            assert!(running.len() <= usize::try_from(max).unwrap());
            if !running.is_empty() && rng.u8(..3) == 0 {
                let of = running.swap_remove(rng.usize(..running.len()));
                show(&mut tables, ended(job(of)));
                done.insert(of);
            }
            limits.forget_seen(&tables, at(second));
            limits.wake(&tables, at(second));
        }
        assert!(done.len() >= 6, "{done:?}");
    }
}
