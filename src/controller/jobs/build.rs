//! The objects that run the work of a policy: CronJobs, the follower's Deployment, and the Jobs of thresholds and tasks.
//!
//! Decides neither whether an object is applied nor whether a Job is started.

use super::super::api::{EtcdBackupPolicy, EtcdBackupTask};
use super::pod::PodBuilder;
use super::table::Table;
use super::{
    LABEL_NAME, LABEL_POLICY, LABEL_TASK, LABEL_TASK_TYPE, LABEL_WORK, Settings, WorkKind, labels,
    metadata, policy_name, time_zone,
};
use crate::base::hash::short_hash;
use crate::error::Result;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy};
use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, Job, JobSpec, JobTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::{Resource, ResourceExt};
use std::collections::BTreeMap;

/// How often Kubernetes retries a Job after failures that a retry can mend.
const BACKOFF_LIMIT: i32 = 4;
/// A scheduled Job that cannot start within this time is skipped. Nothing is lost: the next one does the same
/// work.
const STARTING_DEADLINE_SECONDS: i64 = 3600;
/// How long Kubernetes keeps a finished threshold Job, so that an operator can read its log: a day.
const TTL_SECONDS: i32 = 86_400;

/// The CronJobs that are suspended although the policy is not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Postponed {
    /// The maintenance.
    pub maintenance: bool,
    /// The garbage collection.
    pub retention: bool,
}

/// Returns the labels of the policy's Job template with `own`, which take precedence.
fn pod_labels(
    policy: &EtcdBackupPolicy,
    own: BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut labels = policy.spec.job_template.labels.clone();
    labels.extend(own);
    labels
}

fn job_spec(pod: PodBuilder<'_>, labels: BTreeMap<String, String>) -> Result<JobSpec> {
    Ok(JobSpec {
        active_deadline_seconds: Some(pod.deadline_seconds()),
        backoff_limit: Some(BACKOFF_LIMIT),
        pod_failure_policy: Some(pod.failure_policy()),
        template: pod.template(labels)?,
        ..JobSpec::default()
    })
}

/// Returns a CronJob for each schedule of a policy.
///
/// # Errors
/// `Internal` if options cannot be written as flags.
pub fn cron_jobs(
    policy: &EtcdBackupPolicy,
    settings: &Settings,
    postponed: Postponed,
) -> Result<Vec<CronJob>> {
    let mut cron_jobs = Vec::new();
    for scheduled in Table::new(policy, settings).scheduled() {
        let work = scheduled.work;
        let is_postponed = match work {
            WorkKind::Maintenance => postponed.maintenance,
            WorkKind::Retention => postponed.retention,
            _ => false,
        };
        let name = format!("{}-{}", policy_name(policy), work.short_name());
        let labels = labels(policy, work);
        let pod_labels = pod_labels(policy, labels.clone());
        cron_jobs.push(CronJob {
            metadata: metadata(policy, &name, labels),
            spec: CronJobSpec {
                schedule: scheduled.schedule.to_owned(),
                time_zone: Some(time_zone(policy).to_owned()),
                concurrency_policy: Some("Forbid".to_owned()),
                starting_deadline_seconds: Some(STARTING_DEADLINE_SECONDS),
                suspend: Some(policy.spec.suspend || is_postponed),
                successful_jobs_history_limit: Some(1),
                failed_jobs_history_limit: Some(3),
                job_template: JobTemplateSpec {
                    metadata: Some(ObjectMeta {
                        labels: Some(pod_labels.clone()),
                        ..ObjectMeta::default()
                    }),
                    spec: Some(job_spec(scheduled.pod, pod_labels)?),
                },
            },
            status: None,
        });
    }
    Ok(cron_jobs)
}

/// Returns the Deployment that follows the etcd, or `None` if the policy has no `snapshot.follow` or no etcd.
/// It has no replica while the policy is suspended.
///
/// # Errors
/// `Internal` if options cannot be written as flags.
pub fn follower(policy: &EtcdBackupPolicy, settings: &Settings) -> Result<Option<Deployment>> {
    let Some(pod) = Table::new(policy, settings).follower() else {
        return Ok(None);
    };
    let work = WorkKind::Follow;
    let labels = labels(policy, work);
    let mut selector = labels.clone();
    selector.retain(|key, _| [LABEL_NAME, LABEL_POLICY, LABEL_WORK].contains(&key.as_str()));
    let name = format!("{}-{}", policy_name(policy), work.short_name());
    Ok(Some(Deployment {
        metadata: metadata(policy, &name, labels.clone()),
        spec: DeploymentSpec {
            replicas: Some(i32::from(!policy.spec.suspend)),
            selector: LabelSelector {
                match_labels: Some(selector),
                match_expressions: None,
            },
            strategy: Some(DeploymentStrategy {
                type_: Some("Recreate".to_owned()),
                rolling_update: None,
            }),
            template: pod.template(pod_labels(policy, labels))?,
            ..DeploymentSpec::default()
        },
        status: None,
    }))
}

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
    let command = if full_snapshot_instead {
        "fullsnap"
    } else {
        "compact"
    };
    format!("{}-{command}-{hash}", policy_name(policy))
}

/// Returns the Job of a crossed threshold: a compaction, or a full snapshot instead, for which the policy
/// needs an etcd.
///
/// # Errors
/// `Internal` if options cannot be written as flags.
pub fn compaction_job(
    policy: &EtcdBackupPolicy,
    settings: &Settings,
    name: &str,
    full_snapshot_instead: bool,
    annotations: BTreeMap<String, String>,
) -> Result<Job> {
    let table = Table::new(policy, settings);
    let (work, pod) = if full_snapshot_instead {
        (WorkKind::FullSnapshot, table.full_snapshot())
    } else {
        (WorkKind::Compaction, table.compaction(None))
    };
    let mut job = job(policy, policy, name, labels(policy, work), pod)?;
    job.metadata.annotations = (!annotations.is_empty()).then_some(annotations);
    if let Some(spec) = &mut job.spec {
        spec.ttl_seconds_after_finished = Some(TTL_SECONDS);
    }
    Ok(job)
}

/// Returns the name of a task's Job. It contains the start of the task's UID, so that a task that is deleted
/// and created again gets another Job.
pub fn task_job_name(task: &EtcdBackupTask) -> String {
    let uid = task.metadata.uid.as_deref().unwrap_or_default();
    let uid_start: String = uid.chars().take(8).collect();
    format!("{}-{uid_start}", task.name_any())
}

/// Returns the Job of a task. The task owns it, and Kubernetes deletes it with the task.
///
/// # Errors
/// `Internal` if options cannot be written as flags.
pub fn task_job(
    policy: &EtcdBackupPolicy,
    task: &EtcdBackupTask,
    settings: &Settings,
) -> Result<Job> {
    let type_ = task.spec.type_;
    let pod = Table::new(policy, settings).task(task);
    let mut labels = labels(policy, WorkKind::Task);
    labels.insert(LABEL_TASK.to_owned(), task.name_any());
    labels.insert(LABEL_TASK_TYPE.to_owned(), type_.as_str().to_owned());
    job(policy, task, &task_job_name(task), labels, pod)
}

fn job<O: Resource<DynamicType = ()>>(
    policy: &EtcdBackupPolicy,
    owner: &O,
    name: &str,
    labels: BTreeMap<String, String>,
    pod: PodBuilder<'_>,
) -> Result<Job> {
    let labels = pod_labels(policy, labels);
    Ok(Job {
        metadata: metadata(owner, name, labels.clone()),
        spec: Some(job_spec(pod, labels)?),
        status: None,
    })
}
