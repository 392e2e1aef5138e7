//! Decisions on policies and tasks by named scenarios, without a server.

use super::*;
use crate::controller::api::{
    ConditionStatus, EtcdBackupPolicySpec, EtcdBackupTaskSpec, EtcdSpec, RetentionSpec,
    SnapshotSpec, StoreSpec, StoreVolume,
};
use crate::controller::facts::leases::LeaseFacts;
use crate::controller::facts::leases::tests::{at, druid};
use crate::controller::facts::outcome::tests::{failure, job as job_with, pod, time};
use crate::controller::facts::{Attempt, Neighbour};
use crate::controller::names::NamespacedName;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;

pub(super) fn options() -> Options {
    Options {
        settings: Settings::new("image"),
        namespaces: vec!["n".to_owned()],
        allowed: Allowed::default(),
        compactions: true,
        tasks: true,
    }
}

/// A policy with a schedule and a threshold of 100 events.
fn policy() -> EtcdBackupPolicy {
    let mut spec = EtcdBackupPolicySpec {
        etcd: Some(EtcdSpec {
            endpoints: vec!["http://etcd:2379".to_owned()],
            ..EtcdSpec::default()
        }),
        store: StoreSpec {
            url: "s3://bucket/p".to_owned(),
            ..StoreSpec::default()
        },
        snapshot: Some(SnapshotSpec {
            full_schedule: Some("0 0 * * *".to_owned()),
            ..SnapshotSpec::default()
        }),
        ..EtcdBackupPolicySpec::default()
    };
    spec.compaction.events_threshold = 100;
    let mut policy = EtcdBackupPolicy::new("p", spec);
    policy.metadata.namespace = Some("n".to_owned());
    policy.metadata.uid = Some("uid".to_owned());
    policy.metadata.generation = Some(1);
    policy.metadata.creation_timestamp = Some(time(0));
    policy
}

fn on_a_node(mut policy: EtcdBackupPolicy) -> EtcdBackupPolicy {
    policy.spec.store = StoreSpec {
        url: "file:///backup".to_owned(),
        volume: Some(StoreVolume {
            host_path: Some("/var/backup".to_owned()),
            ..StoreVolume::default()
        }),
        ..StoreSpec::default()
    };
    policy
}

/// Facts about a new policy.
fn facts(policy: EtcdBackupPolicy) -> Facts {
    Facts {
        key: NamespacedName::new("n", "p"),
        policy: Some(Arc::new(policy)),
        ..Facts::default()
    }
}

/// Facts about a policy whose objects exist and whose deltas reach the threshold.
fn with_threshold_reached() -> Facts {
    Facts {
        leases: LeaseFacts::read(
            Some(&druid("100", Some(at(50)))),
            Some(&druid("300", Some(at(50)))),
        ),
        existing_leases: ["p-full-snap".to_owned(), "p-delta-snap".to_owned()].into(),
        ..facts(policy())
    }
}

pub(super) fn task(name: &str, type_: TaskType) -> Arc<EtcdBackupTask> {
    let mut task = EtcdBackupTask::new(
        name,
        EtcdBackupTaskSpec {
            policy: "p".to_owned(),
            type_,
            config: None,
            args: Vec::new(),
            start_deadline: None,
            ttl_seconds_after_finished: None,
        },
    );
    task.metadata.namespace = Some("n".to_owned());
    task.metadata.uid = Some(format!("uid-of-{name}"));
    task.metadata.creation_timestamp = Some(time(0));
    Arc::new(task)
}

fn decide_at(facts: &Facts, options: &Options) -> Decision {
    decide(facts, options, at(60)).unwrap()
}

/// Returns the decision after all actions of the first one were done.
fn decided_again(facts: &mut Facts, options: &Options) -> Decision {
    for action in decide_at(facts, options).actions {
        facts.attempts.push(attempt(&action.description(), None));
    }
    decide_at(facts, options)
}

fn attempt(action: &str, refusal: Option<(&'static str, bool)>) -> Attempt {
    Attempt {
        action: action.to_owned(),
        refusal: refusal.map(|(reason, is_final)| Refusal {
            reason,
            message: "no".to_owned(),
            is_final,
        }),
    }
}

fn actions(decision: &Decision) -> Vec<String> {
    decision.actions.iter().map(Action::description).collect()
}

/// Returns the status and the reason of a condition.
fn condition(decision: &Decision, type_: &str) -> Option<(ConditionStatus, String)> {
    let status = &decision.policy.as_ref()?.status;
    let condition = status.condition(type_)?;
    Some((condition.status, condition.reason.clone()))
}

fn is(status: ConditionStatus, reason: &str) -> Option<(ConditionStatus, String)> {
    Some((status, reason.to_owned()))
}

#[test]
fn objects_come_before_the_status() {
    let mut new = facts(policy());
    assert_eq!(
        actions(&decide_at(&new, &options())),
        [
            "create Lease p-full-snap",
            "create Lease p-delta-snap",
            "apply CronJob p-full"
        ]
    );
    let decision = decided_again(&mut new, &options());
    assert_eq!(actions(&decision), Vec::<String>::new());
    assert_eq!(
        condition(&decision, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );
    // If the controller watches all namespaces, it makes the ServiceAccount of the Jobs.
    let everywhere = Options {
        namespaces: Vec::new(),
        ..options()
    };
    new.attempts.clear();
    let first = actions(&decide_at(&new, &everywhere)).swap_remove(0);
    assert_eq!(first, "make the ServiceAccount deltafold-jobs");
}

/// A scenario of what is due: facts, and the first Job or the reason of CompactionHealthy or of the first task.
struct Scenario {
    name: &'static str,
    facts: Facts,
    job: Option<&'static str>,
    compaction: &'static str,
    task: Option<&'static str>,
}

/// The name of the Job that the threshold of [`with_threshold_reached`] starts.
fn threshold_job_name() -> String {
    jobs::compaction_job_name(&policy(), 100, 300, 0, false)
}

#[test]
fn what_is_due_and_why() {
    let due = with_threshold_reached();
    let waits = |facts: &Facts, job: &str| {
        let mut facts = facts.clone();
        let refused = attempt(&create_job_description(job), Some((TOO_MANY_JOBS, false)));
        facts.attempts.push(refused);
        facts
    };
    let with_task = |facts: &Facts, type_| {
        let mut facts = facts.clone();
        facts.tasks = vec![task("t", type_)];
        facts
    };
    let with_job = |facts: &Facts, condition| {
        let mut facts = facts.clone();
        facts.jobs.push(Arc::new(threshold_job(condition)));
        facts
    };
    let suspended = {
        let mut facts = due.clone();
        let mut policy = policy();
        policy.spec.suspend = true;
        facts.policy = Some(Arc::new(policy));
        facts
    };
    let unconfirmed = Facts {
        unconfirmed_jobs: vec![threshold_job_name()],
        ..due.clone()
    };
    let scenarios = [
        Scenario {
            name: "nothing is due",
            facts: facts(policy()),
            job: None,
            compaction: "NoSnapshotYet",
            task: None,
        },
        Scenario {
            name: "a threshold is reached",
            facts: due.clone(),
            job: Some("p-compact-"),
            compaction: "NoneNeeded",
            task: None,
        },
        Scenario {
            name: "a threshold waits for a slot",
            facts: waits(&due, &threshold_job_name()),
            job: None,
            compaction: TOO_MANY_JOBS,
            task: None,
        },
        Scenario {
            name: "its Job runs",
            facts: with_job(&due, None),
            job: None,
            compaction: "Running",
            task: None,
        },
        Scenario {
            name: "its Job may exist: the request got no answer",
            facts: unconfirmed,
            job: None,
            compaction: "NoneNeeded",
            task: None,
        },
        Scenario {
            name: "its Job failed, and the Leases have not moved",
            facts: with_job(&due, Some(("Failed", "BackoffLimitExceeded", "too often"))),
            job: None,
            compaction: "BackoffLimitExceeded",
            task: None,
        },
        Scenario {
            name: "the policy is suspended",
            facts: suspended.clone(),
            job: None,
            compaction: "Suspended",
            task: None,
        },
        Scenario {
            name: "a task is the only work",
            facts: with_task(&facts(policy()), TaskType::Verify),
            job: Some("t-uid-of-t"),
            compaction: "NoSnapshotYet",
            task: None,
        },
        Scenario {
            name: "a task of a suspended policy runs",
            facts: with_task(&suspended, TaskType::Verify),
            job: Some("t-uid-of-t"),
            compaction: "Suspended",
            task: None,
        },
        Scenario {
            name: "a requested compaction waits for that of the threshold",
            facts: with_task(&due, TaskType::OnDemandCompaction),
            job: Some("p-compact-"),
            compaction: "NoneNeeded",
            task: Some(QUEUED),
        },
        Scenario {
            name: "a task waits for a slot",
            facts: waits(&with_task(&facts(policy()), TaskType::Verify), "t-uid-of-t"),
            job: None,
            compaction: "NoSnapshotYet",
            task: Some(TOO_MANY_JOBS),
        },
    ];
    for Scenario {
        name,
        facts,
        job,
        compaction,
        task,
    } in scenarios
    {
        let decision = decide_at(&facts, &options());
        let jobs = actions(&decision).into_iter();
        let created = jobs
            .filter_map(|a| a.strip_prefix("create Job ").map(str::to_owned))
            .next();
        let starts = |wanted: &str| created.as_ref().is_some_and(|job| job.starts_with(wanted));
        assert!(job.map_or(created.is_none(), starts), "{name}: {created:?}");
        let reason = condition(&decision, "CompactionHealthy").unwrap().1;
        assert_eq!(reason, compaction, "{name}");
        let progress = decision
            .tasks
            .first()
            .and_then(|t| t.status.last_operation.clone());
        let waiting = progress
            .as_ref()
            .and_then(|o| Some(o.reason.split_once(':')?.0));
        assert_eq!(waiting, task, "{name}");
        assert_eq!(
            decision.waits_for_slot,
            [Some(compaction), task].contains(&Some(TOO_MANY_JOBS)),
            "{name}"
        );
    }
}

/// Returns the Job that the threshold starts, with this condition.
fn threshold_job(condition: Option<(&str, &str, &str)>) -> Job {
    let started = compaction::CompactionActivity::default()
        .next_job(&with_threshold_reached(), at(60))
        .unwrap();
    let Action::CreateJob { job, .. } =
        compaction::create_job(&policy(), started, &options().settings).unwrap()
    else {
        panic!()
    };
    let mut job = *job;
    job.status = job_with(condition).status;
    job.metadata.creation_timestamp = Some(time(40));
    job.metadata.uid = Some("job".to_owned());
    job
}

#[test]
fn a_failed_run_of_a_schedule_is_told_once_and_remembered() {
    let mut facts = with_threshold_reached();
    let wanted = jobs::cron_jobs(&policy(), &options().settings, jobs::Postponed::default())
        .unwrap()
        .swap_remove(0);
    let mut cron_job = wanted.clone();
    cron_job.metadata.uid = Some("cron".to_owned());
    let mut job = job_with(Some(("Failed", "BackoffLimitExceeded", "too often")));
    job.metadata.name = Some("p-full-1".to_owned());
    job.metadata.uid = Some("job".to_owned());
    job.metadata.labels = cron_job.metadata.labels.clone();
    job.metadata.owner_references = Some(vec![jobs::owner(&cron_job)]);
    let mut failed = pod("a", 40, 74, &failure(74, "NoSpace"));
    failed.metadata.owner_references = Some(vec![jobs::owner(&job)]);
    facts.jobs = vec![Arc::new(job)];
    facts.pods = vec![Arc::new(failed)];
    facts.leases = LeaseFacts::default();
    let written = decided_again(&mut facts, &options()).policy.unwrap();
    let run = &written.status.last_runs["full"];
    assert_eq!(
        (run.job.as_str(), run.reason.as_deref()),
        ("p-full-1", Some("NoSpace"))
    );
    let ready = written.status.condition("BackupReady").unwrap();
    assert_eq!(
        (ready.status, ready.reason.as_str()),
        (ConditionStatus::False, "NoSpace")
    );
    assert_eq!(written.failures.len(), 1);
    assert!(
        written
            .events
            .iter()
            .any(|e| e.warning && e.reason == "JobFailed" && e.text.contains("NoSpace"))
    );
    // The Job was deleted. The status stays, and no Event is published again.
    let mut after = policy();
    after.status = Some(written.status.clone());
    facts.policy = Some(Arc::new(after));
    facts.jobs.clear();
    facts.pods.clear();
    assert!(decide_at(&facts, &options()).policy.is_none());
}

#[test]
fn a_policy_that_is_not_allowed_is_not_started() {
    let on_node = facts(on_a_node(policy()));
    let decision = decide_at(&on_node, &options());
    assert_eq!(actions(&decision), Vec::<String>::new());
    assert_eq!(
        condition(&decision, "Ready"),
        is(ConditionStatus::False, "NotAllowed")
    );
    let allowed = Options {
        allowed: Allowed {
            allow_host_path: true,
            ..Allowed::default()
        },
        ..options()
    };
    let decision = decided_again(&mut facts(on_a_node(policy())), &allowed);
    assert_eq!(
        condition(&decision, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );
}

#[test]
fn a_policy_with_a_thousand_problems_has_a_short_condition() {
    let mut wrong = policy();
    let option = |i| (format!("{i:01000}"), String::new());
    wrong.spec.store.options = (0..700).map(option).collect();
    let decision = decide_at(&facts(wrong), &options());
    assert_eq!(
        condition(&decision, "Ready"),
        is(ConditionStatus::False, "SpecInvalid")
    );
    for condition in decision.policy.unwrap().status.conditions {
        assert!(condition.message.len() <= 1024, "{condition:?}");
    }
}

#[test]
fn of_two_policies_on_one_store_both_are_warned_and_the_younger_removes_nothing() {
    let mut with_retention = policy();
    with_retention.spec.retention = Some(RetentionSpec {
        rules: Default::default(),
        schedule: "0 1 * * *".to_owned(),
        args: Vec::new(),
    });
    for is_older in [true, false] {
        let mut shared = facts(with_retention.clone());
        shared.same_store = Some(Neighbour {
            name: "other".to_owned(),
            is_older,
        });
        let suspended: Vec<String> = decide_at(&shared, &options())
            .actions
            .into_iter()
            .filter_map(|action| match action {
                Action::Apply(desired, _) if desired.object["spec"]["suspend"] == true => {
                    Some(desired.name)
                }
                _ => None,
            })
            .collect();
        assert_eq!(suspended, if is_older { vec!["p-gc"] } else { vec![] });
        let decision = decided_again(&mut shared, &options());
        assert_eq!(
            condition(&decision, "StoreShared"),
            is(ConditionStatus::True, "SameStore")
        );
        assert_eq!(
            condition(&decision, "Ready"),
            is(ConditionStatus::True, "InOrder")
        );
    }
}

#[test]
fn a_policy_warns_for_a_day_that_its_cluster_was_set_back() {
    for (hours, warns) in [(0, true), (23, true), (24, false)] {
        let mut facts = facts(policy());
        facts.leases.timeline_began = Some(at(60) - chrono::TimeDelta::hours(hours));
        let decision = decided_again(&mut facts, &options());
        let expected = is(ConditionStatus::True, "SetBack").filter(|_| warns);
        assert_eq!(condition(&decision, "SetBack"), expected, "{hours}");
    }
}

#[test]
fn a_refused_job_is_reported_and_makes_its_task_wait_or_end() {
    let mut due = with_threshold_reached();
    let job = create_job_description(&threshold_job_name());
    due.attempts
        .push(attempt(&job, Some(("JobRefused", false))));
    let decision = decide_at(&due, &options());
    assert!(!actions(&decision).contains(&job));
    assert_eq!(
        condition(&decision, "CompactionHealthy"),
        is(ConditionStatus::False, "JobRefused")
    );
    // The policy itself is Ready.
    assert_eq!(
        condition(&decision, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );

    let mut facts = facts(policy());
    facts.tasks = vec![task("check", TaskType::Verify)];
    for (is_final, state) in [(true, TaskState::Rejected), (false, TaskState::Pending)] {
        facts.attempts = vec![attempt(
            "create Job check-uid-of-c",
            Some(("JobRefused", is_final)),
        )];
        let status = decide_at(&facts, &options()).tasks.swap_remove(0).status;
        assert_eq!(status.state, state);
        let operation = status.last_operation.unwrap();
        assert!(operation.reason.starts_with("JobRefused"));
    }
    // Without its policy the task is rejected after a minute.
    facts.policy = None;
    facts.attempts.clear();
    let decision = decide_at(&facts, &options());
    assert!(decision.actions.is_empty() && decision.policy.is_none());
    assert_eq!(decision.tasks[0].status.state, TaskState::Rejected);
}

#[test]
fn a_pod_that_cannot_start_is_in_the_conditions() {
    let mut facts = with_threshold_reached();
    let job = threshold_job(None);
    let mut waits = Pod::default();
    waits.metadata.name = Some("waits".to_owned());
    waits.metadata.owner_references = Some(vec![jobs::owner(&job)]);
    facts.jobs = vec![Arc::new(job)];
    facts.pods = vec![Arc::new(waits)];
    let warning = "FailedMount: hostPath type check failed".to_owned();
    facts.warnings = [("waits".to_owned(), warning)].into();
    let decision = decided_again(&mut facts, &options());
    let status = decision.policy.unwrap().status;
    let healthy = status.condition("CompactionHealthy").unwrap();
    assert_eq!(healthy.reason, "PodNotStarted");
    assert!(
        healthy.message.contains("create the folder"),
        "{}",
        healthy.message
    );
}
