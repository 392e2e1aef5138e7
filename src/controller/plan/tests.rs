//! Plans of what is observed, without any server.

use super::*;
use crate::controller::api::{
    Claimed, Condition, ConditionStatus, EtcdBackupPolicySpec, EtcdBackupTaskSpec, EtcdSpec,
    SnapshotSpec, StoreSpec, StoreVolume,
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
        enforce_existing: false,
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

/// One whose deltas cross the threshold.
fn crossed() -> Observed {
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

/// The plan if every turn is granted.
fn plan_of(observed: &Observed, options: &Options) -> Plan {
    let decided = decide(observed, options, at(60));
    let wanted = decided.wanted().into_iter();
    let turns = wanted.map(|w| (w.job, Answer::Granted)).collect();
    decided.plan(&turns)
}

/// The same once everything that was planned has been tried.
fn planned_again(observed: &mut Observed, options: &Options) -> Plan {
    let tried = plan_of(observed, options).actions.into_iter();
    observed
        .attempted
        .extend(tried.map(|action| AttemptedAction {
            action: action.what(),
            refusal: None,
        }));
    plan_of(observed, options)
}

fn what(plan: &Plan) -> Vec<String> {
    plan.actions.iter().map(Action::what).collect()
}

/// A condition's status and reason.
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
        what(&plan),
        [
            "create Lease p-full-snap",
            "create Lease p-delta-snap",
            "apply CronJob p-full"
        ]
    );
    let plan = planned_again(&mut observed, &options());
    assert_eq!(what(&plan), Vec::<String>::new());
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
    // The account of all namespaces is the controller's to make.
    let everywhere = Options {
        namespaces: Vec::new(),
        ..options()
    };
    observed.attempted.clear();
    let first = what(&plan_of(&observed, &everywhere)).swap_remove(0);
    assert_eq!(first, "make the ServiceAccount deltafold-jobs");
}

#[test]
fn what_is_not_allowed_is_not_begun_and_not_ended() {
    let mut new = observed(on_a_node(policy()));
    let plan = plan_of(&new, &options());
    assert_eq!(what(&plan), Vec::<String>::new());
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::False, "NotAllowed")
    );
    // That the same was looked at before makes it no better.
    let mut refused = on_a_node(policy());
    refused.status = plan.policy.map(|p| p.status);
    new.policy = Some(Arc::new(refused));
    assert_eq!(what(&plan_of(&new, &options())), Vec::<String>::new());

    // 0.1 carried it out.
    let mut before = on_a_node(policy());
    before.status = Some(EtcdBackupPolicyStatus {
        observed_generation: Some(1),
        conditions: vec![Condition {
            type_: "Ready".to_owned(),
            status: ConditionStatus::True,
            reason: "InOrder".to_owned(),
            message: String::new(),
            last_transition_time: at(0),
            observed_generation: Some(1),
        }],
        ..EtcdBackupPolicyStatus::default()
    });
    let mut goes_on = observed(before.clone());
    assert!(what(&plan_of(&goes_on, &options())).contains(&"apply CronJob p-full".to_owned()));
    let plan = planned_again(&mut goes_on, &options());
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );
    assert_eq!(
        condition(&plan, "NotAllowed"),
        is(ConditionStatus::True, "CarriedOutBefore")
    );
    let strict = Options {
        enforce_existing: true,
        ..options()
    };
    let mut changed = before.clone();
    changed.metadata.generation = Some(2);
    for (policy, options) in [(before, strict), (changed, options())] {
        let plan = plan_of(&observed(policy), &options);
        assert_eq!(what(&plan), Vec::<String>::new());
        assert_eq!(
            condition(&plan, "Ready"),
            is(ConditionStatus::False, "NotAllowed")
        );
    }
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
    assert_eq!(condition(&plan, "NotAllowed"), None);
}

#[test]
fn who_shares_a_place_is_warned_or_waits() {
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
    let mut second = crossed();
    second
        .claim_holders
        .push((Claimed::Store, "first".to_owned()));
    let plan = plan_of(&second, &options());
    let suspended = plan.actions.iter().any(
        |a| matches!(a, Action::Apply(desired, _) if desired.object["spec"]["suspend"] == true),
    );
    assert!(suspended, "{:?}", what(&plan));
    assert!(!what(&plan).iter().any(|w| w.starts_with("create Job")));
    let plan = planned_again(&mut second, &options());
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::False, "StorePrefixTaken")
    );
    let claims = plan.policy.unwrap().status.claims;
    assert_eq!(claims.len(), 1, "the Leases are its own: {claims:?}");
}

#[test]
fn a_crossed_threshold_waits_for_its_turn_and_goes_before_a_task() {
    let mut observed = crossed();
    observed.tasks = vec![task("fold", TaskType::OnDemandCompaction)];
    let usual = options();
    let decided = decide(&observed, &usual, at(60));
    let wanted = decided.wanted();
    assert_eq!(wanted.len(), 1, "{wanted:?}");
    let job = wanted[0].job.1.clone();
    assert!(job.starts_with("p-compact-"), "{job}");
    let waits = Answer::Wait {
        reason: "others are first".to_owned(),
        freeze: None,
    };
    let plan = decided.plan(&[(wanted[0].job.clone(), waits)].into());
    assert!(!what(&plan).contains(&creates(&job)));
    let plan = plan_of(&observed, &options());
    assert!(what(&plan).contains(&creates(&job)));
    let waits = &plan.tasks[0].status;
    assert_eq!(waits.state, TaskState::Pending);
    assert!(
        waits
            .last_operation
            .as_ref()
            .unwrap()
            .reason
            .starts_with("Queued")
    );

    // It is not taken: the condition tells, and it is not tried twice in one look.
    observed.attempted.push(AttemptedAction {
        action: creates(&job),
        refusal: Some(Refusal {
            reason: "JobRefused",
            message: "over the quota".to_owned(),
            is_final: false,
        }),
    });
    assert!(decide(&observed, &options(), at(60)).wanted().is_empty());
    let plan = plan_of(&observed, &options());
    assert_eq!(
        condition(&plan, "CompactionHealthy"),
        is(ConditionStatus::False, "JobRefused")
    );
    // The rest of the policy is in order.
    assert_eq!(
        condition(&plan, "Ready"),
        is(ConditionStatus::True, "InOrder")
    );
}

#[test]
fn a_task_has_its_reasons() {
    let mut observed = observed(policy());
    observed.tasks = vec![task("check", TaskType::Verify)];
    let wanted = decide(&observed, &options(), at(60)).wanted();
    assert_eq!(wanted[0].job.1, "check-uid-of-c");
    let job = creates(&wanted[0].job.1);
    assert!(what(&plan_of(&observed, &options())).contains(&job));
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
    // Without a policy it waits, and is refused later.
    observed.policy = None;
    observed.attempted.clear();
    let plan = plan_of(&observed, &options());
    assert!(plan.actions.is_empty() && plan.policy.is_none());
    assert_eq!(plan.tasks[0].status.state, TaskState::Rejected);
}
