//! The rules of tasks: which one is next, which wait, and which are refused.
//!
//! Pure, over all tasks of a policy. First in, first out; but one whose pre-condition does not hold yet holds nobody
//! up, since what it waits for may be behind it. `task` calls it.

use crate::controller::api::{EtcdBackupPolicy, EtcdBackupTask, TaskConfig, TaskState, TaskType};
use crate::controller::jobs;
use crate::controller::observe::outcome::PodOutcome;
use crate::controller::times::{later, shown, utc};
use crate::error::Reason;
use chrono::{DateTime, TimeDelta, Utc};
use kube::ResourceExt;
use std::collections::BTreeMap;

/// It waits for another task of its policy.
pub const QUEUED: &str = "Queued";
/// A task may be there before its policy is, where both are applied at once.
const POLICY_GRACE: TimeDelta = TimeDelta::minutes(1);

/// Why a task is refused, or has failed without a Job's doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// For machines: `PolicyNotFound`, `DuplicateTask`, `EtcdMissing`, `InvalidConfig`, `NotAllowed`, `NoQuorum`.
    pub code: &'static str,
    /// For people.
    pub message: String,
}

/// What becomes of a task that is Pending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is its turn.
    Go,
    /// It stays Pending.
    Wait {
        /// For machines: `PolicyNotFound`, `Queued`, `MaintenancePostponed`.
        reason: &'static str,
        /// For people.
        message: String,
        /// When time alone changes that.
        look_again: Option<DateTime<Utc>>,
    },
    /// It is Rejected.
    Reject(Refusal),
}

/// What waits for its pre-condition, and for which.
type Held = Option<(&'static str, String)>;

/// What is known of a policy beside its tasks.
pub struct Surroundings<'a> {
    /// The policy, if it is there.
    pub policy: Option<&'a EtcdBackupPolicy>,
    /// Why the snapshots are not in time, where BackupReady is not True: the condition's message.
    pub backup_not_ready: Option<&'a str>,
    /// What a task asks for and is not allowed.
    pub not_allowed: &'a dyn Fn(&EtcdBackupTask) -> Vec<String>,
}

/// What becomes of the tasks of a policy that are Pending, by name.
pub fn judge(
    all: &[impl AsRef<EtcdBackupTask>],
    surroundings: &Surroundings<'_>,
    now: DateTime<Utc>,
) -> BTreeMap<String, Verdict> {
    let mut open: Vec<&EtcdBackupTask> = all.iter().map(AsRef::as_ref).collect();
    open.retain(|task| is_open(task));
    open.sort_by_key(|task| order(task));
    let mut verdicts = BTreeMap::new();
    let mut twins: BTreeMap<String, &EtcdBackupTask> = BTreeMap::new();
    // Who is right before the next one, of those that do not have to wait for something else.
    let mut ahead: Option<&EtcdBackupTask> = None;
    for task in open {
        let verdict = match state(task) {
            TaskState::Pending => Some(verdict(task, surroundings, &twins, ahead, now)),
            _ => None,
        };
        let waits_elsewhere =
            matches!(&verdict, Some(Verdict::Wait { reason, .. }) if *reason != QUEUED);
        if !waits_elsewhere && !matches!(verdict, Some(Verdict::Reject(_))) {
            ahead = Some(task);
        }
        if task.metadata.deletion_timestamp.is_none()
            && !matches!(verdict, Some(Verdict::Reject(_)))
        {
            twins.entry(work(task)).or_insert(task);
        }
        verdicts.extend(verdict.map(|verdict| (task.name_any(), verdict)));
    }
    verdicts
}

fn verdict(
    task: &EtcdBackupTask,
    surroundings: &Surroundings<'_>,
    twins: &BTreeMap<String, &EtcdBackupTask>,
    ahead: Option<&EtcdBackupTask>,
    now: DateTime<Utc>,
) -> Verdict {
    let Some(policy) = surroundings.policy else {
        return no_policy(task, now);
    };
    if let Some(refusal) = refusal(task, policy, surroundings) {
        return Verdict::Reject(refusal);
    }
    if let Some(twin) = twins.get(&work(task)) {
        let how = match state(twin) {
            TaskState::InProgress => "runs",
            _ => "waits",
        };
        return Verdict::Reject(Refusal {
            code: "DuplicateTask",
            message: format!("the task {} is the same, and {how}", twin.name_any()),
        });
    }
    if let Some((reason, message)) = held(task, surroundings) {
        return Verdict::Wait {
            reason,
            message,
            look_again: None,
        };
    }
    // It names the one before it alone: a message that counted would be another one whenever a task ends.
    let Some(ahead) = ahead else {
        return Verdict::Go;
    };
    Verdict::Wait {
        reason: QUEUED,
        message: match state(ahead) {
            TaskState::InProgress => format!("the task {} runs", ahead.name_any()),
            _ => format!("the task {} is before it", ahead.name_any()),
        },
        look_again: None,
    }
}

fn no_policy(task: &EtcdBackupTask, now: DateTime<Utc>) -> Verdict {
    let message = format!(
        "there is no EtcdBackupPolicy {} in this namespace",
        task.spec.policy
    );
    let created = task.metadata.creation_timestamp.as_ref().map(utc);
    let until = created.map(|created| later(created, POLICY_GRACE));
    match until.filter(|&until| until > now) {
        Some(until) => Verdict::Wait {
            reason: "PolicyNotFound",
            message: format!("{message}: it is waited for until {}", shown(until)),
            look_again: Some(until),
        },
        None => Verdict::Reject(Refusal {
            code: "PolicyNotFound",
            message,
        }),
    }
}

/// What a task can never do for this policy.
fn refusal(
    task: &EtcdBackupTask,
    policy: &EtcdBackupPolicy,
    surroundings: &Surroundings<'_>,
) -> Option<Refusal> {
    let config = task.spec.config.as_ref();
    let live = match task.spec.type_ {
        TaskType::OnDemandSnapshot | TaskType::Maintenance => true,
        TaskType::Verify => config
            .and_then(|c| c.verify.as_ref())
            .is_some_and(|v| v.against_cluster),
        TaskType::OnDemandCompaction | TaskType::CopyBackups | TaskType::Restore => false,
    };
    if live && policy.spec.etcd.is_none() {
        return Some(Refusal {
            code: "EtcdMissing",
            message: format!(
                "the policy {} has no etcd.endpoints, and {} needs a live etcd",
                policy.name_any(),
                task.spec.type_.as_str()
            ),
        });
    }
    let problems = jobs::task_problems(policy, task);
    if !problems.is_empty() {
        return Some(Refusal {
            code: "InvalidConfig",
            message: problems.join("; "),
        });
    }
    let not_allowed = (surroundings.not_allowed)(task);
    (!not_allowed.is_empty()).then(|| Refusal {
        code: "NotAllowed",
        message: not_allowed.join("; "),
    })
}

/// Why a task has to wait, whoever is before it.
fn held(task: &EtcdBackupTask, surroundings: &Surroundings<'_>) -> Held {
    let why = surroundings.backup_not_ready?;
    (task.spec.type_ == TaskType::Maintenance).then(|| {
        let message = format!("maintenance is postponed while BackupReady is not True: {why}");
        ("MaintenancePostponed", message)
    })
}

fn state(task: &EtcdBackupTask) -> TaskState {
    task.status.as_ref().map(|s| s.state).unwrap_or_default()
}

/// Whether it runs or waits. One that was deleted before it began is gone.
fn is_open(task: &EtcdBackupTask) -> bool {
    match state(task) {
        TaskState::InProgress => true,
        TaskState::Pending => task.metadata.deletion_timestamp.is_none(),
        _ => false,
    }
}

/// Those that run come first, then by age, then by name.
fn order(task: &EtcdBackupTask) -> (bool, Option<DateTime<Utc>>, String) {
    let created = task.metadata.creation_timestamp.as_ref().map(utc);
    (
        state(task) != TaskState::InProgress,
        created,
        task.name_any(),
    )
}

/// What a task does, as one text: two of one policy with the same do the same.
fn work(task: &EtcdBackupTask) -> String {
    let config = serde_json::to_string(&config(task)).unwrap_or_default();
    format!("{} {config}", task.spec.type_.as_str())
}

/// The configuration of a task; what is not given is as its defaults are.
fn config(task: &EtcdBackupTask) -> TaskConfig {
    let given = task.spec.config.clone().unwrap_or_default();
    let mut config = TaskConfig::default();
    match task.spec.type_ {
        TaskType::OnDemandSnapshot => config.on_demand_snapshot = given.on_demand_snapshot,
        TaskType::OnDemandCompaction => {
            config.on_demand_compaction = Some(given.on_demand_compaction.unwrap_or_default());
        }
        TaskType::CopyBackups => config.copy_backups = given.copy_backups,
        TaskType::Restore => config.restore = given.restore,
        TaskType::Verify => config.verify = Some(given.verify.unwrap_or_default()),
        TaskType::Maintenance => config.maintenance = given.maintenance,
    }
    config
}

/// Whether what the first Pod of a task's Job found is a pre-condition that does not hold: the Job has the
/// credentials to look whether there is a quorum, the controller has not.
pub fn rejected_by(type_: TaskType, first: &PodOutcome) -> Option<Refusal> {
    let needs_quorum = matches!(type_, TaskType::OnDemandSnapshot | TaskType::Maintenance);
    let none = first.ended && first.reason.as_deref() == Some(Reason::NoQuorum.as_str());
    (needs_quorum && none).then(|| Refusal {
        code: Reason::NoQuorum.as_str(),
        message: first
            .message
            .clone()
            .unwrap_or_else(|| "the etcd has no quorum".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::TextValue;
    use crate::controller::api::{
        CopyBackupsConfig, EtcdBackupPolicySpec, EtcdBackupTaskSpec, EtcdBackupTaskStatus,
        EtcdSpec, MaintenanceConfig, OnDemandCompactionConfig, OnDemandSnapshotConfig,
        SnapshotType, StoreSpec, VerifyConfig,
    };
    use crate::controller::observe::leases::tests::at;
    use crate::controller::observe::outcome::tests::time;
    use crate::ops::copy::plan::CopyLimits;
    use crate::ops::maintain::Upkeep;
    use crate::ops::snapshot::Marks;
    use std::sync::Arc;
    use strum::VariantArray;

    fn policy() -> EtcdBackupPolicy {
        EtcdBackupPolicy::new(
            "main",
            EtcdBackupPolicySpec {
                etcd: Some(EtcdSpec::default()),
                store: StoreSpec {
                    url: "s3://b/p".to_owned(),
                    ..StoreSpec::default()
                },
                ..EtcdBackupPolicySpec::default()
            },
        )
    }

    fn task(name: &str, created: i64, type_: TaskType) -> EtcdBackupTask {
        let mut task = EtcdBackupTask::new(
            name,
            EtcdBackupTaskSpec {
                policy: "main".to_owned(),
                type_,
                config: None,
                ttl_seconds_after_finished: None,
            },
        );
        task.metadata.creation_timestamp = Some(time(created));
        task
    }

    fn snapshot(name: &str, created: i64, type_: SnapshotType) -> EtcdBackupTask {
        let mut task = task(name, created, TaskType::OnDemandSnapshot);
        task.spec.config = Some(TaskConfig {
            on_demand_snapshot: Some(OnDemandSnapshotConfig {
                type_,
                marks: Marks::default(),
            }),
            ..TaskConfig::default()
        });
        task
    }

    fn maintenance(name: &str, created: i64) -> EtcdBackupTask {
        let mut task = task(name, created, TaskType::Maintenance);
        task.spec.config = Some(TaskConfig {
            maintenance: Some(MaintenanceConfig {
                upkeep: Upkeep {
                    compact_keep: None,
                    defrag: Some(TextValue::of("always")),
                },
            }),
            ..TaskConfig::default()
        });
        task
    }

    fn is(mut task: EtcdBackupTask, state: TaskState) -> EtcdBackupTask {
        task.status = Some(EtcdBackupTaskStatus {
            state,
            ..EtcdBackupTaskStatus::default()
        });
        task
    }

    /// What becomes of each: `Go`, or the word for machines; of those that do not wait nothing.
    fn all(tasks: &[EtcdBackupTask], late: Option<&str>) -> Vec<&'static str> {
        let shared: Vec<Arc<EtcdBackupTask>> = tasks.iter().cloned().map(Arc::new).collect();
        let policy = policy();
        let surroundings = Surroundings {
            policy: Some(&policy),
            backup_not_ready: late,
            not_allowed: &|_| Vec::new(),
        };
        let verdicts = judge(&shared, &surroundings, at(100));
        let judged = tasks.iter().map(|t| match verdicts.get(&t.name_any()) {
            None => "",
            Some(Verdict::Go) => "Go",
            Some(Verdict::Wait { reason, .. }) => reason,
            Some(Verdict::Reject(refusal)) => refusal.code,
        });
        judged.collect()
    }

    fn judged(task: &EtcdBackupTask, policy: Option<&EtcdBackupPolicy>, seconds: i64) -> Verdict {
        let surroundings = Surroundings {
            policy,
            backup_not_ready: None,
            not_allowed: &|_| Vec::new(),
        };
        let shared = [Arc::new(task.clone())];
        let mut verdicts = judge(&shared, &surroundings, at(seconds));
        verdicts.remove(&task.name_any()).unwrap()
    }

    #[test]
    fn first_in_first_out() {
        let mut tasks = vec![
            snapshot("b", 1, SnapshotType::Full),
            task("a", 1, TaskType::OnDemandCompaction),
            task("c", 0, TaskType::Verify),
        ];
        assert_eq!(all(&tasks, None), ["Queued", "Queued", "Go"]);
        tasks[2] = is(tasks[2].clone(), TaskState::Succeeded);
        assert_eq!(all(&tasks[..2], None), ["Queued", "Go"]);
        // One that runs is before all others, whatever its age.
        tasks[0] = is(tasks[0].clone(), TaskState::InProgress);
        let judged = all(&tasks, None);
        assert_eq!(judged[1], "Queued");
        // One that is being deleted: it holds others up as long as it runs.
        tasks[0].metadata.deletion_timestamp = Some(time(50));
        assert_eq!(all(&tasks, None)[1], "Queued");
        tasks[0] = is(tasks[0].clone(), TaskState::Pending);
        assert_eq!(all(&tasks, None)[1], "Go");
    }

    #[test]
    fn the_same_again_is_refused() {
        let mut tasks = vec![
            snapshot("a", 0, SnapshotType::Full),
            snapshot("b", 1, SnapshotType::Full),
            snapshot("c", 1, SnapshotType::Delta),
            task("d", 2, TaskType::OnDemandCompaction),
            task("e", 3, TaskType::OnDemandCompaction),
            task("f", 4, TaskType::Verify),
        ];
        // Given as the defaults are.
        tasks[4].spec.config = Some(TaskConfig {
            on_demand_compaction: Some(OnDemandCompactionConfig::default()),
            ..TaskConfig::default()
        });
        tasks[4].spec.ttl_seconds_after_finished = Some(5);
        let judged = all(&tasks, None);
        assert_eq!(
            judged,
            [
                "Go",
                "DuplicateTask",
                "Queued",
                "Queued",
                "DuplicateTask",
                "Queued"
            ]
        );
        // What was refused makes no duplicates; what has ended neither.
        tasks[0] = is(tasks[0].clone(), TaskState::Succeeded);
        assert_eq!(all(&tasks, None)[1], "Go");
        tasks[0] = is(tasks[0].clone(), TaskState::InProgress);
        tasks[1] = is(tasks[1].clone(), TaskState::Rejected);
        tasks.push(snapshot("g", 9, SnapshotType::Full));
        assert_eq!(all(&tasks, None)[6], "DuplicateTask");
        // One that is being deleted.
        tasks[0].metadata.deletion_timestamp = Some(time(50));
        assert_eq!(all(&tasks, None)[6], "Queued");
    }

    #[test]
    fn who_has_to_wait_holds_nobody_up() {
        let late = Some("late");
        let tasks = [
            maintenance("a", 0),
            snapshot("b", 1, SnapshotType::Full),
            task("c", 2, TaskType::Verify),
        ];
        assert_eq!(all(&tasks, late), ["MaintenancePostponed", "Go", "Queued"]);
        assert_eq!(all(&tasks, None), ["Go", "Queued", "Queued"]);
        // It waits, and another one like it is a duplicate all the same.
        let tasks = [maintenance("a", 0), maintenance("b", 1)];
        assert_eq!(all(&tasks, late), ["MaintenancePostponed", "DuplicateTask"]);
    }

    #[test]
    fn without_its_policy_a_task_waits_a_minute() {
        let t = task("a", 100, TaskType::Verify);
        let Verdict::Wait {
            reason, look_again, ..
        } = judged(&t, None, 159)
        else {
            panic!()
        };
        assert_eq!((reason, look_again), ("PolicyNotFound", Some(at(160))));
        let rejected = judged(&t, None, 160);
        assert!(
            matches!(&rejected, Verdict::Reject(r) if r.code == "PolicyNotFound"),
            "{rejected:?}"
        );
        assert_eq!(judged(&t, Some(&policy()), 160), Verdict::Go);
    }

    #[test]
    fn what_a_policy_cannot_do_is_refused() {
        let mut p = policy();
        p.spec.etcd = None;
        let judged = |t: &EtcdBackupTask| match judged(t, Some(&p), 0) {
            Verdict::Reject(refusal) => refusal.code,
            _ => "Go",
        };
        assert_eq!(
            judged(&snapshot("a", 0, SnapshotType::Delta)),
            "EtcdMissing"
        );
        assert_eq!(judged(&maintenance("a", 0)), "EtcdMissing");
        assert_eq!(judged(&task("a", 0, TaskType::OnDemandCompaction)), "Go");
        let mut verify = task("a", 0, TaskType::Verify);
        assert_eq!(judged(&verify), "Go");
        verify.spec.config = Some(TaskConfig {
            verify: Some(VerifyConfig {
                against_cluster: true,
                ..VerifyConfig::default()
            }),
            ..TaskConfig::default()
        });
        assert_eq!(judged(&verify), "EtcdMissing");
        let store = |url: &str| {
            Some(StoreSpec {
                url: url.to_owned(),
                ..StoreSpec::default()
            })
        };
        for (source, target, expected) in [
            (None, None, "InvalidConfig"),
            (None, store("s3://b/p"), "InvalidConfig"),
            (store("s3://x/y"), store("s3://x/y"), "InvalidConfig"),
            (store("s3://b/p/"), None, "InvalidConfig"),
            (store("s3://b/q"), None, "Go"),
            (None, store("s3://b/q"), "Go"),
            (store("s3://x/y"), store("s3://b/q"), "Go"),
        ] {
            let mut copy = task("a", 0, TaskType::CopyBackups);
            copy.spec.config = Some(TaskConfig {
                copy_backups: Some(CopyBackupsConfig {
                    source_store: source.clone(),
                    target_store: target.clone(),
                    most: CopyLimits::default(),
                    wait_for_final_snapshot: None,
                }),
                ..TaskConfig::default()
            });
            assert_eq!(judged(&copy), expected, "{source:?} {target:?}");
        }
    }

    #[test]
    fn no_quorum_refuses_what_needs_one() {
        let first = PodOutcome {
            ended: true,
            exit_code: Some(69),
            reason: Some("NoQuorum".to_owned()),
            message: Some("1 of 3 members answers".to_owned()),
            ..PodOutcome::default()
        };
        for &type_ in TaskType::VARIANTS {
            let needs = matches!(type_, TaskType::OnDemandSnapshot | TaskType::Maintenance);
            let refusal = rejected_by(type_, &first);
            assert_eq!(refusal.is_some(), needs, "{type_:?}");
            let mut other = first.clone();
            other.reason = Some("EtcdUnreachable".to_owned());
            assert_eq!(rejected_by(type_, &other), None);
        }
    }

    #[test]
    fn exactly_one_is_next_and_all_get_there() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..300 {
            let mut tasks: Vec<EtcdBackupTask> = (0..rng.usize(1..9))
                .map(|i| {
                    let (name, created) = (format!("t{i}"), rng.i64(0..4));
                    match rng.u8(..4) {
                        0 => snapshot(&name, created, SnapshotType::Full),
                        1 => snapshot(&name, created, SnapshotType::Delta),
                        2 => maintenance(&name, created),
                        _ => task(&name, created, TaskType::VARIANTS[rng.usize(..6)]),
                    }
                })
                .collect();
            let mut ended = Vec::new();
            for round in 0..100 {
                let late = Some("late").filter(|_| round < 5 && rng.bool());
                let judged = all(&tasks, late);
                let runs = tasks
                    .iter()
                    .filter(|t| state(t) == TaskState::InProgress)
                    .count();
                let go: Vec<usize> = (0..tasks.len())
                    .filter(|&i| state(&tasks[i]) == TaskState::Pending && judged[i] == "Go")
                    .collect();
                assert!(go.len() + runs <= 1, "{judged:?}");
                // Each reconciles in its own time.
                let i = rng.usize(..tasks.len());
                let next = match (state(&tasks[i]), judged[i]) {
                    (TaskState::Pending, "Go") => TaskState::InProgress,
                    (TaskState::Pending, "DuplicateTask" | "InvalidConfig") => TaskState::Rejected,
                    (TaskState::InProgress, _) => {
                        ended.push(tasks[i].name_any());
                        TaskState::Succeeded
                    }
                    (other, _) => other,
                };
                tasks[i] = is(tasks[i].clone(), next);
            }
            assert!(!ended.is_empty() || tasks.iter().all(|t| state(t) == TaskState::Rejected));
        }
    }
}
