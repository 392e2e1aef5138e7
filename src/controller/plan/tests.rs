//! Plans of observed policies and tasks, without a server.

use super::*;
use crate::controller::api::{
    Claimed, ConditionStatus, EtcdBackupPolicySpec, EtcdBackupTaskSpec, EtcdSpec, SnapshotSpec,
    StoreSpec, StoreVolume,
};
use crate::controller::observe::Refusal;
use crate::controller::observe::leases::LeaseFacts;
use crate::controller::observe::leases::tests::{at, druid};
use crate::controller::observe::outcome::tests::time;

fn options() -> Options {
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

fn observed(policy: EtcdBackupPolicy) -> Observed {
    Observed {
        key: ("n".to_owned(), "p".to_owned()),
        policy: Some(Arc::new(policy)),
        ..Observed::default()
    }
}

/// A policy whose deltas reach the threshold.
fn with_threshold_reached() -> Observed {
    Observed {
        facts: LeaseFacts::read(
            Some(&druid("100", Some(at(50)))),
            Some(&druid("300", Some(at(50)))),
        ),
        leases: ["p-full-snap".to_owned(), "p-delta-snap".to_owned()].into(),
        ..observed(policy())
    }
}

fn task(name: &str, type_: TaskType) -> Arc<EtcdBackupTask> {
    let mut task = EtcdBackupTask::new(
        name,
        EtcdBackupTaskSpec {
            policy: "p".to_owned(),
            type_,
            config: None,
            ttl_seconds_after_finished: None,
        },
    );
    task.metadata.namespace = Some("n".to_owned());
    task.metadata.uid = Some(format!("uid-of-{name}"));
    task.metadata.creation_timestamp = Some(time(0));
    Arc::new(task)
}

/// Returns the plan if every slot is granted.
fn plan_of(observed: &Observed, options: &Options) -> Plan {
    let decisions = decide(observed, options, at(60));
    let requests = decisions.slot_requests().into_iter();
    let slots = requests.map(|r| (r.job, SlotDecision::Granted)).collect();
    decisions.plan(&slots)
}

/// Returns the plan after all actions of the first one were tried.
fn planned_again(observed: &mut Observed, options: &Options) -> Plan {
    let tried = plan_of(observed, options).actions.into_iter();
    observed
        .attempted
        .extend(tried.map(|action| AttemptedAction {
            action: action.description(),
            refusal: None,
        }));
    plan_of(observed, options)
}

fn actions(plan: &Plan) -> Vec<String> {
    plan.actions.iter().map(Action::description).collect()
}

/// Returns the status and the reason of a condition.
fn condition(plan: &Plan, type_: &str) -> Option<(ConditionStatus, String)> {
    let status = &plan.policy.as_ref()?.status;
    let condition = status.conditions.iter().find(|c| c.type_ == type_)?;
    Some((condition.status, condition.reason.clone()))
}

fn is(status: ConditionStatus, reason: &str) -> Option<(ConditionStatus, String)> {
    Some((status, reason.to_owned()))
}

#[test]
fn objects_come_before_the_status() {
    let mut observed = observed(policy());
    let plan = plan_of(&observed, &options());
    assert_eq!(
        actions(&plan),
        [
            "create Lease p-full-snap",
            "create Lease p-delta-snap",
            "apply CronJob p-full"
        ]
    );
    let plan = planned_again(&mut observed, &options());
    assert_eq!(actions(&plan), Vec::<String>::new());
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );
    let claims = &plan.policy.unwrap().status.claims;
    let claimed: Vec<(Claimed, &str)> = claims.iter().map(|c| (c.what, c.of.as_str())).collect();
    assert_eq!(
        claimed,
        [(Claimed::Store, "S3://bucket/p"), (Claimed::Leases, "p")]
    );
    // If the controller watches all namespaces, it makes the ServiceAccount of the Jobs.
    let everywhere = Options {
        namespaces: Vec::new(),
        ..options()
    };
    observed.attempted.clear();
    let first = actions(&plan_of(&observed, &everywhere)).swap_remove(0);
    assert_eq!(first, "make the ServiceAccount deltafold-jobs");
}

#[test]
fn a_policy_that_is_not_allowed_is_not_started() {
    let mut new = observed(on_a_node(policy()));
    let plan = plan_of(&new, &options());
    assert_eq!(actions(&plan), Vec::<String>::new());
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::False, "NotAllowed")
    );
    // A second reconciliation refuses it as well.
    let mut refused = on_a_node(policy());
    refused.status = plan.policy.map(|p| p.status);
    new.policy = Some(Arc::new(refused));
    assert_eq!(actions(&plan_of(&new, &options())), Vec::<String>::new());

    let allowed = Options {
        allowed: Allowed {
            allow_host_path: true,
            ..Allowed::default()
        },
        ..options()
    };
    let mut fine = observed(on_a_node(policy()));
    let plan = planned_again(&mut fine, &allowed);
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );
}

#[test]
fn a_policy_with_a_thousand_problems_has_a_short_condition() {
    let mut wrong = policy();
    let option = |i| (format!("{i:01000}"), String::new());
    wrong.spec.store.options = (0..700).map(option).collect();
    let plan = plan_of(&observed(wrong), &options());
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::False, "SpecInvalid")
    );
    for condition in plan.policy.unwrap().status.conditions {
        assert!(condition.message.len() <= 1024, "{condition:?}");
    }
}

#[test]
fn a_policy_with_a_shared_store_is_warned_or_waits() {
    let mut shared = observed(policy());
    shared.is_shared = true;
    let plan = planned_again(&mut shared, &options());
    assert_eq!(
        condition(&plan, "StoreShared"),
        is(ConditionStatus::True, "SamePlace")
    );
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );
    let mut second = with_threshold_reached();
    second
        .claim_holders
        .push((Claimed::Store, "first".to_owned()));
    let plan = plan_of(&second, &options());
    let suspended = plan.actions.iter().any(
        |a| matches!(a, Action::Apply(desired, _) if desired.object["spec"]["suspend"] == true),
    );
    assert!(suspended, "{:?}", actions(&plan));
    assert!(!actions(&plan).iter().any(|w| w.starts_with("create Job")));
    let plan = planned_again(&mut second, &options());
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::False, "StorePrefixTaken")
    );
    let claims = plan.policy.unwrap().status.claims;
    assert_eq!(claims.len(), 1, "the Leases are its own: {claims:?}");
}

#[test]
fn a_threshold_waits_for_a_slot_and_goes_before_a_task() {
    let mut observed = with_threshold_reached();
    observed.tasks = vec![task("fold", TaskType::OnDemandCompaction)];
    let usual = options();
    let decisions = decide(&observed, &usual, at(60));
    let requests = decisions.slot_requests();
    assert_eq!(requests.len(), 1, "{requests:?}");
    let job = requests[0].job.clone();
    assert!(job.1.starts_with("p-compact-"), "{job:?}");
    let created = create_job_description(&job.1);
    let wait = SlotDecision::Wait {
        reason: "others are first".to_owned(),
        freeze: None,
    };
    let plan = decisions.plan(&[(job, wait)].into());
    assert!(!actions(&plan).contains(&created));
    let plan = plan_of(&observed, &options());
    assert!(actions(&plan).contains(&created));
    let status = &plan.tasks[0].status;
    assert_eq!(status.state, TaskState::Pending);
    let operation = status.last_operation.as_ref().unwrap();
    assert!(operation.reason.starts_with("Queued"));

    // The Job is refused: the condition reports it, and the reconciliation does not try again.
    observed.attempted.push(AttemptedAction {
        action: created,
        refusal: Some(Refusal {
            reason: "JobRefused",
            message: "over the quota".to_owned(),
            is_final: false,
        }),
    });
    let decisions = decide(&observed, &usual, at(60));
    assert!(decisions.slot_requests().is_empty());
    let plan = plan_of(&observed, &options());
    assert_eq!(
        condition(&plan, "CompactionHealthy"),
        is(ConditionStatus::False, "JobRefused")
    );
    // The policy itself is Ready.
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );
}

#[test]
fn a_refused_job_makes_its_task_wait_or_end() {
    let mut observed = observed(policy());
    observed.tasks = vec![task("check", TaskType::Verify)];
    let usual = options();
    let requests = decide(&observed, &usual, at(60)).slot_requests();
    assert_eq!(requests[0].job.1, "check-uid-of-c");
    let job = create_job_description(&requests[0].job.1);
    assert!(actions(&plan_of(&observed, &options())).contains(&job));
    for (is_final, state, word) in [
        (true, TaskState::Rejected, "JobRefused"),
        (false, TaskState::Pending, "JobRefused"),
    ] {
        observed.attempted = vec![AttemptedAction {
            action: job.clone(),
            refusal: Some(Refusal {
                reason: "JobRefused",
                message: "no".to_owned(),
                is_final,
            }),
        }];
        let plan = plan_of(&observed, &options());
        let status = &plan.tasks[0].status;
        assert_eq!(status.state, state);
        assert!(
            status
                .last_operation
                .as_ref()
                .unwrap()
                .reason
                .starts_with(word)
        );
    }
    // Without its policy the task is rejected after a minute.
    observed.policy = None;
    observed.attempted.clear();
    let plan = plan_of(&observed, &options());
    assert!(plan.actions.is_empty() && plan.policy.is_none());
    assert_eq!(plan.tasks[0].status.state, TaskState::Rejected);
}
