//! What runs by itself for a policy: its CronJobs, and the Deployment that follows the etcd.
//!
//! It does not decide whether they are applied.

use super::super::api::{EtcdBackupPolicy, GarbageCollectionConfig};
use super::pod::PodBuilder;
use super::{
    LABEL_NAME, LABEL_POLICY, LABEL_WORK, Settings, WorkKind, commands, job_spec, labels, metadata,
    pod_labels, policy_name, time_zone,
};
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy};
use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, JobTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use std::time::Duration;

/// A scheduled Job that cannot start within this time is skipped. Nothing is lost: the next one does the same
/// work.
const STARTING_DEADLINE_SECONDS: i64 = 3600;

/// The parts in which the CronJobs of a policy differ.
struct Scheduled<'a> {
    work: WorkKind,
    schedule: &'a str,
    deadline: Duration,
    pod: PodBuilder<'a>,
}

/// The CronJobs that are suspended although the policy is not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Postponed {
    /// The maintenance.
    pub maintenance: bool,
    /// The garbage collection.
    pub retention: bool,
}

/// Returns a CronJob for each schedule of a policy. With a follower there is none for snapshots, because the
/// follower takes both kinds itself.
pub fn cron_jobs(
    policy: &EtcdBackupPolicy,
    settings: &Settings,
    postponed: Postponed,
) -> Vec<CronJob> {
    let to_cron_job = |scheduled: Scheduled<'_>| {
        let is_postponed = match scheduled.work {
            WorkKind::Maintenance => postponed.maintenance,
            WorkKind::Retention => postponed.retention,
            _ => false,
        };
        cron_job(policy, scheduled, policy.spec.suspend || is_postponed)
    };
    let scheduled = scheduled(policy, settings);
    scheduled.into_iter().map(to_cron_job).collect()
}

fn scheduled<'a>(policy: &'a EtcdBackupPolicy, settings: &'a Settings) -> Vec<Scheduled<'a>> {
    let spec = &policy.spec;
    let deadlines = &settings.deadlines;
    let has_etcd = spec.etcd.is_some();
    let mut all = Vec::new();
    let snapshot = spec.snapshot.as_ref();
    if let Some(snapshot) = snapshot.filter(|s| has_etcd && s.follow.is_none()) {
        if let Some(schedule) = &snapshot.full_schedule {
            all.push(Scheduled {
                work: WorkKind::FullSnapshot,
                schedule,
                deadline: deadlines.full_snapshot,
                pod: commands::full_snapshot(policy, settings),
            });
        }
        if let Some(schedule) = &snapshot.delta_schedule {
            let fulls_are_scheduled = snapshot.full_schedule.is_some();
            all.push(Scheduled {
                work: WorkKind::DeltaSnapshot,
                schedule,
                deadline: deadlines.delta_snapshot,
                pod: commands::delta_snapshot(policy, settings, fulls_are_scheduled),
            });
        }
    }
    let garbage_collection =
        commands::garbage_collection(policy, settings, &GarbageCollectionConfig::default());
    if let (Some(retention), Some(pod)) = (&spec.retention, garbage_collection) {
        all.push(Scheduled {
            work: WorkKind::Retention,
            schedule: &retention.schedule,
            deadline: deadlines.retention,
            pod,
        });
    }
    if let Some(verify) = &spec.verify {
        let against_cluster = verify.against_cluster && has_etcd;
        all.push(Scheduled {
            work: WorkKind::Verification,
            schedule: &verify.schedule,
            deadline: deadlines.verification,
            pod: commands::verification(
                policy,
                settings,
                verify.level,
                against_cluster,
                verify.drill.as_ref(),
            ),
        });
    }
    if let Some(maintenance) = spec.maintenance.as_ref().filter(|_| has_etcd) {
        all.push(Scheduled {
            work: WorkKind::Maintenance,
            schedule: &maintenance.schedule,
            deadline: deadlines.maintenance,
            pod: commands::maintenance(policy, settings, &maintenance.upkeep),
        });
    }
    all
}

fn cron_job(policy: &EtcdBackupPolicy, scheduled: Scheduled<'_>, suspend: bool) -> CronJob {
    let labels = labels(policy, scheduled.work);
    let pod_labels = pod_labels(policy, labels.clone());
    let name = format!(
        "{}-{}",
        policy_name(policy),
        scheduled.work.schedule_suffix()
    );
    CronJob {
        metadata: metadata(policy, &name, labels),
        spec: CronJobSpec {
            schedule: scheduled.schedule.to_owned(),
            time_zone: Some(time_zone(policy).to_owned()),
            concurrency_policy: Some("Forbid".to_owned()),
            starting_deadline_seconds: Some(STARTING_DEADLINE_SECONDS),
            suspend: Some(suspend),
            successful_jobs_history_limit: Some(1),
            failed_jobs_history_limit: Some(3),
            job_template: JobTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(pod_labels.clone()),
                    ..ObjectMeta::default()
                }),
                spec: Some(job_spec(scheduled.pod, scheduled.deadline, pod_labels)),
            },
        },
        status: None,
    }
}

/// Returns the Deployment that follows the etcd, or `None` if the policy has no `snapshot.follow` or no etcd.
/// It has no replica while the policy is suspended.
pub fn follower(policy: &EtcdBackupPolicy, settings: &Settings) -> Option<Deployment> {
    policy.spec.etcd.as_ref()?;
    let pod = commands::follow(policy, settings)?;
    let labels = labels(policy, WorkKind::Follow);
    let selector = [LABEL_NAME, LABEL_POLICY, LABEL_WORK];
    let selector = selector
        .iter()
        .filter_map(|key| Some(((*key).to_owned(), labels.get(*key)?.clone())));
    let name = format!("{}-follow", policy_name(policy));
    Some(Deployment {
        metadata: metadata(policy, &name, labels.clone()),
        spec: DeploymentSpec {
            replicas: Some(i32::from(!policy.spec.suspend)),
            selector: LabelSelector {
                match_labels: Some(selector.collect()),
                match_expressions: None,
            },
            strategy: Some(DeploymentStrategy {
                type_: Some("Recreate".to_owned()),
                rolling_update: None,
            }),
            template: pod.template(pod_labels(policy, labels)),
            ..DeploymentSpec::default()
        },
        status: None,
    })
}
