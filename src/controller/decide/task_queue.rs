//! The queue of a policy's tasks: which one may start, which ones wait, and which ones are rejected.
//!
//! Pure, over all tasks of a policy. First in, first out; but a task that waits for something else than its
//! turn does not block the tasks behind it, because one of them may be what it waits for.

use super::Options;
use super::policy::INVALID;
use crate::controller::api::{EtcdBackupPolicy, EtcdBackupTask, TaskConfig, TaskState, TaskType};
use crate::controller::facts::outcome::PodOutcome;
use crate::controller::jobs;
use crate::controller::times::{created, later, rfc3339};
use crate::error::{Error, Reason, Result};
use chrono::{DateTime, TimeDelta, Utc};
use kube::ResourceExt;
use std::collections::BTreeMap;

/// The reason of a task that waits for another task or a compaction of its policy.
pub const QUEUED: &str = "Queued";
/// How long a task waits for its policy to exist: both may be applied at once, in any order.
const POLICY_GRACE: TimeDelta = TimeDelta::minutes(1);

/// Why a task ends without a result of its Job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskRefusal {
    /// One word, for programs, such as `DuplicateTask` or `InvalidConfig`.
    pub code: &'static str,
    /// A sentence, for users.
    pub message: String,
}

/// The decision on a task that is Pending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// The task is the next one of its policy.
    Start,
    /// The task stays Pending.
    Wait {
        /// `PolicyNotFound`, `Queued` or `MaintenancePostponed`.
        reason: &'static str,
        /// A sentence, for users.
        message: String,
        /// When to decide again even if nothing has changed.
        again_at: Option<DateTime<Utc>>,
    },
    /// The task is Rejected.
    Reject(TaskRefusal),
}

/// What the admission depends on beside the tasks.
pub struct AdmissionContext<'a> {
    /// The policy of the tasks, if it exists.
    pub policy: Option<&'a EtcdBackupPolicy>,
    /// The message of the condition BackupReady, unless that is True.
    pub backup_not_ready: Option<&'a str>,
    /// What tasks may ask for, and how their arguments are checked.
    pub options: &'a Options,
}

/// Decides on all Pending tasks of a policy, by name.
///
/// # Errors
/// `Internal` if the configuration of a task cannot be written as JSON.
pub fn admit(
    tasks: &[impl AsRef<EtcdBackupTask>],
    context: &AdmissionContext<'_>,
    now: DateTime<Utc>,
) -> Result<BTreeMap<String, Admission>> {
    let mut open: Vec<&EtcdBackupTask> = tasks.iter().map(AsRef::as_ref).collect();
    open.retain(|task| is_open(task));
    open.sort_by_key(|task| queue_order(task));
    let mut admissions = BTreeMap::new();
    let mut queue = Queue::default();
    for task in open {
        let work = work(task)?;
        if state(task) != TaskState::Pending {
            queue.push(task, work, true);
            continue;
        }
        let admission = admit_one(task, &work, context, &queue, now);
        let blocks_others = match &admission {
            Admission::Reject(_) => None,
            Admission::Wait { reason, .. } => Some(*reason == QUEUED),
            Admission::Start => Some(true),
        };
        if let Some(blocks_others) = blocks_others {
            queue.push(task, work, blocks_others);
        }
        admissions.insert(task.name_any(), admission);
    }
    Ok(admissions)
}

/// The tasks in front of the one that is decided on.
#[derive(Default)]
struct Queue<'t> {
    /// The last task that blocks those behind it.
    last: Option<&'t EtcdBackupTask>,
    /// The first task that does each work.
    by_work: BTreeMap<String, &'t EtcdBackupTask>,
}

impl<'t> Queue<'t> {
    fn push(&mut self, task: &'t EtcdBackupTask, work: String, blocks_others: bool) {
        if blocks_others {
            self.last = Some(task);
        }
        if task.metadata.deletion_timestamp.is_none() {
            self.by_work.entry(work).or_insert(task);
        }
    }
}

fn admit_one(
    task: &EtcdBackupTask,
    work: &str,
    context: &AdmissionContext<'_>,
    queue: &Queue<'_>,
    now: DateTime<Utc>,
) -> Admission {
    let Some(policy) = context.policy else {
        return without_policy(task, now);
    };
    if let Some(refusal) = permanent_refusal(task, policy, context) {
        return Admission::Reject(refusal);
    }
    if let Some(duplicate) = queue.by_work.get(work) {
        let name = duplicate.name_any();
        let message = match state(duplicate) {
            TaskState::InProgress => format!("the task {name} does the same and is running"),
            _ => format!("the task {name} does the same and is waiting"),
        };
        return Admission::Reject(TaskRefusal {
            code: "DuplicateTask",
            message,
        });
    }
    if task.spec.type_ == TaskType::Maintenance
        && let Some(why) = context.backup_not_ready
    {
        return Admission::Wait {
            reason: "MaintenancePostponed",
            message: format!("maintenance waits until BackupReady is True: {why}"),
            again_at: None,
        };
    }
    // The message names only the task in front: with a number it would change whenever a task ends.
    let Some(in_front) = queue.last else {
        return Admission::Start;
    };
    let name = in_front.name_any();
    Admission::Wait {
        reason: QUEUED,
        message: match state(in_front) {
            TaskState::InProgress => format!("the task {name} is running"),
            _ => format!("the task {name} goes first"),
        },
        again_at: None,
    }
}

fn without_policy(task: &EtcdBackupTask, now: DateTime<Utc>) -> Admission {
    let policy = &task.spec.policy;
    let problem = format!("there is no EtcdBackupPolicy {policy} in this namespace");
    let created = created(&task.metadata);
    let grace_ends = created.map(|created| later(created, POLICY_GRACE));
    match grace_ends.filter(|&at| at > now) {
        Some(grace_ends) => Admission::Wait {
            reason: "PolicyNotFound",
            message: format!(
                "{problem}: the task waits for it until {}",
                rfc3339(grace_ends)
            ),
            again_at: Some(grace_ends),
        },
        None => Admission::Reject(TaskRefusal {
            code: "PolicyNotFound",
            message: format!("{problem}: create the policy first, and then a new task"),
        }),
    }
}

/// Returns why a task can never run for this policy.
fn permanent_refusal(
    task: &EtcdBackupTask,
    policy: &EtcdBackupPolicy,
    context: &AdmissionContext<'_>,
) -> Option<TaskRefusal> {
    if jobs::needs_etcd(task) && policy.spec.etcd.is_none() {
        return Some(TaskRefusal {
            code: "EtcdMissing",
            message: format!(
                "{} needs a live etcd, but the policy {} has no etcd.endpoints",
                task.spec.type_.as_str(),
                policy.name_any()
            ),
        });
    }
    let problems = jobs::task_problems(policy, task);
    if !problems.is_empty() {
        return Some(TaskRefusal {
            code: "InvalidConfig",
            message: problems.join("; "),
        });
    }
    if let Some(message) = jobs::task_args_problem(policy, task, &context.options.settings) {
        return Some(TaskRefusal {
            code: INVALID,
            message,
        });
    }
    let not_allowed = context.options.allowed.task_problems(task);
    (!not_allowed.is_empty()).then(|| TaskRefusal {
        code: "NotAllowed",
        message: not_allowed.join("; "),
    })
}

fn state(task: &EtcdBackupTask) -> TaskState {
    task.status.as_ref().map(|s| s.state).unwrap_or_default()
}

/// Whether a task runs or waits. A task that was deleted before it began does neither.
fn is_open(task: &EtcdBackupTask) -> bool {
    match state(task) {
        TaskState::InProgress => true,
        TaskState::Pending => task.metadata.deletion_timestamp.is_none(),
        _ => false,
    }
}

/// The order of tasks: those that run first, then by age, then by name.
fn queue_order(task: &EtcdBackupTask) -> (bool, Option<DateTime<Utc>>, String) {
    let created = created(&task.metadata);
    (
        state(task) != TaskState::InProgress,
        created,
        task.name_any(),
    )
}

/// Returns the work of a task as a text: tasks of one policy with the same text are duplicates.
fn work(task: &EtcdBackupTask) -> Result<String> {
    let config = serde_json::to_string(&config_with_defaults(task)).map_err(|e| {
        let name = task.name_any();
        Error::internal(format!("the task {name} cannot be written as JSON: {e}"))
    })?;
    let args = task.spec.args.join(" ");
    Ok(format!("{} {config} {args}", task.spec.type_.as_str()))
}

/// Returns the configuration that belongs to a task's type, with its defaults filled in.
fn config_with_defaults(task: &EtcdBackupTask) -> TaskConfig {
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
        TaskType::GarbageCollection => {
            config.garbage_collection = Some(given.garbage_collection.unwrap_or_default());
        }
    }
    config
}

/// Returns why a task is Rejected after its first Pod: the etcd has no quorum. The controller cannot check
/// this before, because it has no credentials for the etcd.
pub fn failed_precondition(type_: TaskType, first: &PodOutcome) -> Option<TaskRefusal> {
    let needs_quorum = matches!(type_, TaskType::OnDemandSnapshot | TaskType::Maintenance);
    let has_no_quorum = first.ended && first.reason.as_deref() == Some(Reason::NoQuorum.as_str());
    if !needs_quorum || !has_no_quorum {
        return None;
    }
    let message = first.message.clone();
    Some(TaskRefusal {
        code: Reason::NoQuorum.as_str(),
        message: message.unwrap_or_else(|| "the etcd has no quorum".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::options;
    use super::*;
    use crate::base::TextValue;
    use crate::controller::api::{
        CopyBackupsConfig, EtcdBackupPolicySpec, EtcdBackupTaskSpec, EtcdBackupTaskStatus,
        EtcdSpec, MaintenanceConfig, OnDemandCompactionConfig, OnDemandSnapshotConfig,
        SnapshotType, StoreSpec, VerifyConfig,
    };
    use crate::controller::facts::leases::tests::at;
    use crate::controller::facts::outcome::tests::time;
    use crate::ops::copy::plan::CopyLimits;
    use crate::ops::maintain::Upkeep;
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
                args: Vec::new(),
                start_deadline: None,
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
                is_final: false,
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
                    defrag: TextValue::of("always"),
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

    /// Returns the admission of each task: `Start`, its reason or its code; nothing for a task that is not
    /// Pending.
    fn admissions_of(tasks: &[EtcdBackupTask], late: Option<&str>) -> Vec<&'static str> {
        let shared: Vec<Arc<EtcdBackupTask>> = tasks.iter().cloned().map(Arc::new).collect();
        let policy = policy();
        let context = AdmissionContext {
            policy: Some(&policy),
            backup_not_ready: late,
            options: &options(),
        };
        let admissions = admit(&shared, &context, at(100)).unwrap();
        let words = tasks.iter().map(|t| match admissions.get(&t.name_any()) {
            None => "",
            Some(Admission::Start) => "Start",
            Some(Admission::Wait { reason, .. }) => reason,
            Some(Admission::Reject(refusal)) => refusal.code,
        });
        words.collect()
    }

    fn admission(
        task: &EtcdBackupTask,
        policy: Option<&EtcdBackupPolicy>,
        seconds: i64,
    ) -> Admission {
        let context = AdmissionContext {
            policy,
            backup_not_ready: None,
            options: &options(),
        };
        let shared = [Arc::new(task.clone())];
        let mut admissions = admit(&shared, &context, at(seconds)).unwrap();
        admissions.remove(&task.name_any()).unwrap()
    }

    #[test]
    fn first_in_first_out() {
        let mut tasks = vec![
            snapshot("b", 1, SnapshotType::Full),
            task("a", 1, TaskType::OnDemandCompaction),
            task("c", 0, TaskType::Verify),
        ];
        assert_eq!(admissions_of(&tasks, None), ["Queued", "Queued", "Start"]);
        tasks[2] = is(tasks[2].clone(), TaskState::Succeeded);
        assert_eq!(admissions_of(&tasks[..2], None), ["Queued", "Start"]);
        // A task that runs is before all others, whatever its age.
        tasks[0] = is(tasks[0].clone(), TaskState::InProgress);
        let admissions = admissions_of(&tasks, None);
        assert_eq!(admissions[1], "Queued");
        // A task that is being deleted blocks the others as long as it runs.
        tasks[0].metadata.deletion_timestamp = Some(time(50));
        assert_eq!(admissions_of(&tasks, None)[1], "Queued");
        tasks[0] = is(tasks[0].clone(), TaskState::Pending);
        assert_eq!(admissions_of(&tasks, None)[1], "Start");
    }

    #[test]
    fn a_duplicate_is_rejected() {
        let mut tasks = vec![
            snapshot("a", 0, SnapshotType::Full),
            snapshot("b", 1, SnapshotType::Full),
            snapshot("c", 1, SnapshotType::Delta),
            task("d", 2, TaskType::OnDemandCompaction),
            task("e", 3, TaskType::OnDemandCompaction),
            task("f", 4, TaskType::Verify),
        ];
        // The defaults, given explicitly.
        tasks[4].spec.config = Some(TaskConfig {
            on_demand_compaction: Some(OnDemandCompactionConfig::default()),
            ..TaskConfig::default()
        });
        tasks[4].spec.ttl_seconds_after_finished = Some(5);
        let admissions = admissions_of(&tasks, None);
        assert_eq!(
            admissions,
            [
                "Start",
                "DuplicateTask",
                "Queued",
                "Queued",
                "DuplicateTask",
                "Queued"
            ]
        );
        // A rejected task makes no duplicates, and neither does one that has ended.
        tasks[0] = is(tasks[0].clone(), TaskState::Succeeded);
        assert_eq!(admissions_of(&tasks, None)[1], "Start");
        tasks[0] = is(tasks[0].clone(), TaskState::InProgress);
        tasks[1] = is(tasks[1].clone(), TaskState::Rejected);
        tasks.push(snapshot("g", 9, SnapshotType::Full));
        assert_eq!(admissions_of(&tasks, None)[6], "DuplicateTask");
        // A running task that is being deleted makes no duplicates.
        tasks[0].metadata.deletion_timestamp = Some(time(50));
        assert_eq!(admissions_of(&tasks, None)[6], "Queued");
    }

    #[test]
    fn a_postponed_task_blocks_no_others() {
        let late = Some("late");
        let tasks = [
            maintenance("a", 0),
            snapshot("b", 1, SnapshotType::Full),
            task("c", 2, TaskType::Verify),
        ];
        assert_eq!(
            admissions_of(&tasks, late),
            ["MaintenancePostponed", "Start", "Queued"]
        );
        assert_eq!(admissions_of(&tasks, None), ["Start", "Queued", "Queued"]);
        // A second one is a duplicate even while the first is postponed.
        let tasks = [maintenance("a", 0), maintenance("b", 1)];
        assert_eq!(
            admissions_of(&tasks, late),
            ["MaintenancePostponed", "DuplicateTask"]
        );
    }

    #[test]
    fn a_task_waits_a_minute_for_its_policy() {
        let t = task("a", 100, TaskType::Verify);
        let Admission::Wait {
            reason, again_at, ..
        } = admission(&t, None, 159)
        else {
            panic!()
        };
        assert_eq!((reason, again_at), ("PolicyNotFound", Some(at(160))));
        let rejected = admission(&t, None, 160);
        assert!(
            matches!(&rejected, Admission::Reject(r) if r.code == "PolicyNotFound"),
            "{rejected:?}"
        );
        assert_eq!(admission(&t, Some(&policy()), 160), Admission::Start);
    }

    #[test]
    fn a_task_that_its_policy_cannot_do_is_rejected() {
        let mut p = policy();
        p.spec.etcd = None;
        let code = |t: &EtcdBackupTask| match admission(t, Some(&p), 0) {
            Admission::Reject(refusal) => refusal.code,
            _ => "Start",
        };
        assert_eq!(code(&snapshot("a", 0, SnapshotType::Delta)), "EtcdMissing");
        assert_eq!(code(&maintenance("a", 0)), "EtcdMissing");
        assert_eq!(code(&task("a", 0, TaskType::OnDemandCompaction)), "Start");
        let mut verify = task("a", 0, TaskType::Verify);
        assert_eq!(code(&verify), "Start");
        verify.spec.config = Some(TaskConfig {
            verify: Some(VerifyConfig {
                against_cluster: true,
                ..VerifyConfig::default()
            }),
            ..TaskConfig::default()
        });
        assert_eq!(code(&verify), "EtcdMissing");
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
            (store("s3://b/q"), None, "Start"),
            (None, store("s3://b/q"), "Start"),
            (store("s3://x/y"), store("s3://b/q"), "Start"),
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
            assert_eq!(code(&copy), expected, "{source:?} {target:?}");
        }
    }

    #[test]
    fn a_task_that_needs_a_quorum_is_rejected_without_one() {
        let first = PodOutcome {
            ended: true,
            exit_code: Some(69),
            reason: Some("NoQuorum".to_owned()),
            message: Some("1 of 3 members answers".to_owned()),
            ..PodOutcome::default()
        };
        for &type_ in TaskType::VARIANTS {
            let needs = matches!(type_, TaskType::OnDemandSnapshot | TaskType::Maintenance);
            let refusal = failed_precondition(type_, &first);
            assert_eq!(refusal.is_some(), needs, "{type_:?}");
            let mut other = first.clone();
            other.reason = Some("EtcdUnreachable".to_owned());
            assert_eq!(failed_precondition(type_, &other), None);
        }
    }

    #[test]
    fn one_task_runs_at_a_time_and_all_of_them_run() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..300 {
            let mut tasks = Vec::new();
            for i in 0..rng.usize(1..9) {
                let (name, created) = (format!("t{i}"), rng.i64(0..4));
                tasks.push(match rng.u8(..4) {
                    0 => snapshot(&name, created, SnapshotType::Full),
                    1 => snapshot(&name, created, SnapshotType::Delta),
                    2 => maintenance(&name, created),
                    _ => task(&name, created, TaskType::VARIANTS[rng.usize(..6)]),
                });
            }
            let mut ended = Vec::new();
            for round in 0..100 {
                let late = Some("late").filter(|_| round < 5 && rng.bool());
                let admissions = admissions_of(&tasks, late);
                let runs = tasks
                    .iter()
                    .filter(|t| state(t) == TaskState::InProgress)
                    .count();
                let go: Vec<usize> = (0..tasks.len())
                    .filter(|&i| state(&tasks[i]) == TaskState::Pending && admissions[i] == "Start")
                    .collect();
                assert!(go.len() + runs <= 1, "{admissions:?}");
                // Any task may be the next one to change.
                let i = rng.usize(..tasks.len());
                let next = match (state(&tasks[i]), admissions[i]) {
                    (TaskState::Pending, "Start") => TaskState::InProgress,
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
