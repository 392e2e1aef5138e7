//! Jobs that run once: after a crossed threshold, or for a task.
//!
//! It does not decide whether a Job is started.

use super::super::api::{EtcdBackupPolicy, EtcdBackupTask, SnapshotType, TaskConfig, TaskType};
use super::pod::PodBuilder;
use super::{
    LABEL_TASK, LABEL_TASK_TYPE, Settings, WorkKind, commands, duration, job_spec, labels,
    metadata, pod_labels, policy_name,
};
use crate::base::hash::short_hash;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long Kubernetes keeps a finished threshold Job, so that an operator can read its log: a day.
const TTL_SECONDS: i32 = 86_400;

/// Returns the name of a threshold's Job. The same policy, revisions and attempt give the same name, so that the API
/// server refuses a second Job for them.
pub fn compaction_job_name(
    policy: &EtcdBackupPolicy,
    full_revision: i64,
    delta_revision: i64,
    attempt: u32,
    full_snapshot_instead: bool,
) -> String {
    let uid = policy.metadata.uid.as_deref().unwrap_or_default();
    let hash = short_hash(
        format!("{uid}/{full_revision}/{delta_revision}/{attempt}"),
        4,
    );
    let command = match full_snapshot_instead {
        true => "fullsnap",
        false => "compact",
    };
    format!("{}-{command}-{hash}", policy_name(policy))
}

/// Returns the Job of a crossed threshold: a compaction, or a full snapshot instead, for which the policy
/// needs an etcd.
pub fn compaction_job(
    policy: &EtcdBackupPolicy,
    settings: &Settings,
    name: &str,
    full_snapshot_instead: bool,
    annotations: BTreeMap<String, String>,
) -> Job {
    let (work, pod, deadline) = match full_snapshot_instead {
        true => (
            WorkKind::FullSnapshot,
            commands::full_snapshot(policy, settings),
            settings.deadlines.full_snapshot,
        ),
        false => (
            WorkKind::Compaction,
            commands::compaction(policy, settings, None),
            duration(&policy.spec.compaction.active_deadline),
        ),
    };
    let labels = pod_labels(policy, labels(policy, work));
    let mut spec = job_spec(pod, deadline, labels.clone());
    spec.ttl_seconds_after_finished = Some(TTL_SECONDS);
    Job {
        metadata: ObjectMeta {
            annotations: (!annotations.is_empty()).then_some(annotations),
            ..metadata(policy, name, labels)
        },
        spec: Some(spec),
        status: None,
    }
}

/// Returns the name of a task's Job. It contains the start of the task's UID, so that a task that is deleted
/// and created again gets another Job.
pub fn task_job_name(task: &EtcdBackupTask) -> String {
    let name = task.metadata.name.as_deref().unwrap_or_default();
    let uid = task.metadata.uid.as_deref().unwrap_or_default();
    let uid_start: String = uid.chars().take(8).collect();
    format!("{name}-{uid_start}")
}

/// Returns the Job of a task. The task owns it, and Kubernetes deletes it with the task.
pub fn task_job(policy: &EtcdBackupPolicy, task: &EtcdBackupTask, settings: &Settings) -> Job {
    let default_config = TaskConfig::default();
    let config = task.spec.config.as_ref().unwrap_or(&default_config);
    let (pod, deadline) = task_pod(policy, task.spec.type_, config, settings);
    let name = task.metadata.name.clone().unwrap_or_default();
    let task_type = task.spec.type_.as_str().to_owned();
    let mut own_labels = labels(policy, WorkKind::Task);
    own_labels.insert(LABEL_TASK.to_owned(), name);
    own_labels.insert(LABEL_TASK_TYPE.to_owned(), task_type);
    let labels = pod_labels(policy, own_labels);
    Job {
        metadata: metadata(task, &task_job_name(task), labels.clone()),
        spec: Some(job_spec(pod, deadline, labels)),
        status: None,
    }
}

/// Returns the Pod of a task and its deadline.
fn task_pod<'a>(
    policy: &'a EtcdBackupPolicy,
    type_: TaskType,
    config: &'a TaskConfig,
    settings: &'a Settings,
) -> (PodBuilder<'a>, Duration) {
    let deadlines = &settings.deadlines;
    match type_ {
        TaskType::OnDemandSnapshot => {
            let config = config.on_demand_snapshot.as_ref();
            let is_delta = config.is_some_and(|c| c.type_ == SnapshotType::Delta);
            let mut marks = config.map(|c| c.marks.clone()).unwrap_or_default();
            // Only a full can be final.
            marks.is_final &= !is_delta;
            let (pod, deadline) = match is_delta {
                true => (
                    commands::delta_snapshot(policy, settings, true),
                    deadlines.delta_snapshot,
                ),
                false => (
                    commands::full_snapshot(policy, settings),
                    deadlines.full_snapshot,
                ),
            };
            (pod.options(&marks), deadline)
        }
        TaskType::OnDemandCompaction => {
            let config = config.on_demand_compaction.as_ref();
            let deadline = duration(&policy.spec.compaction.active_deadline);
            (commands::compaction(policy, settings, config), deadline)
        }
        TaskType::CopyBackups => commands::copy(policy, config.copy_backups.as_ref(), settings),
        TaskType::Restore => {
            let pod = commands::restoration(policy, config.restore.as_ref(), settings);
            (pod, deadlines.restoration)
        }
        TaskType::Verify => {
            let config = config.verify.as_ref();
            let level = config.and_then(|c| c.depth.level);
            let policy_level = policy.spec.verify.as_ref().map(|v| v.level);
            let level = level.or(policy_level).unwrap_or_default();
            let against_cluster =
                config.is_some_and(|c| c.against_cluster) && policy.spec.etcd.is_some();
            let pod = commands::verification(policy, settings, level, against_cluster, None);
            (pod, deadlines.verification)
        }
        TaskType::Maintenance => {
            let config = config.maintenance.clone().unwrap_or_default();
            let pod = commands::maintenance(policy, settings, &config.upkeep);
            (pod, deadlines.maintenance)
        }
        TaskType::GarbageCollection => {
            let config = config.garbage_collection.clone().unwrap_or_default();
            let pod = commands::garbage_collection(policy, settings, &config);
            // `problems` refuses the task of a policy without rules.
            let pod = pod.unwrap_or_else(|| PodBuilder::new(policy, settings, &["gc"]));
            (pod, deadlines.retention)
        }
    }
}
