//! Kubernetes objects of a policy and its tasks: CronJobs, follower, Jobs, Leases and ServiceAccount.
//!
//! Pure functions of a policy, a task and the [`Settings`]. They never read a Secret: they use only its name,
//! and the Job reports what the Secret lacks. `decide` decides when an object is needed, `write` writes it.
//! `table` maps work to a Pod, `pod` builds Pods, and `build` the objects around them.

mod allowed;
mod args;
mod build;
pub(crate) mod flags;
mod leases;
mod pod;
mod problems;
mod store_url;
mod table;
#[cfg(test)]
mod tests;

pub use allowed::Allowed;
pub use args::{args_problems, task_args_problem};
pub use build::{
    Postponed, compaction_job, compaction_job_name, cron_jobs, follower, task_job, task_job_name,
};
pub use leases::{lease_names, lease_prefix, leases, lock_leases};
pub use problems::{needs_etcd, problems, task_problems};
pub use store_url::store_location;

use super::api::{EtcdBackupPolicy, TaskType};
use super::names::label;
use crate::base::{Span, TextValue};
use crate::error::Reason;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The label for the name of the application, as Kubernetes recommends.
pub const LABEL_NAME: &str = "app.kubernetes.io/name";
/// The label for the program that manages an object.
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// The value of [`LABEL_NAME`] and [`LABEL_MANAGED_BY`].
pub const NAME: &str = "deltafold";
/// The label for the name of the policy.
pub const LABEL_POLICY: &str = "deltafold.io/policy";
/// The label for the kind of work, see [`WorkKind::as_str`].
pub const LABEL_WORK: &str = "deltafold.io/work";
/// The label for the name of the task, on Jobs of tasks.
pub const LABEL_TASK: &str = "deltafold.io/task";
/// The label for the type of the task, on Jobs of tasks.
pub const LABEL_TASK_TYPE: &str = "deltafold.io/task-type";
/// The main container. Its exit code and termination message are the Job's result.
pub const CONTAINER: &str = "deltafold";
/// The init container that verifies the backup before the main container compares it with the live etcd.
pub const CONTAINER_BEFORE: &str = "deltafold-backup";
/// The init containers that copy deltafold itself and then the etcd of a restore drill.
pub const COPY_CONTAINERS: [&str; 2] = ["deltafold-program", "deltafold-etcd"];
/// The file in which a container leaves its termination message.
pub const TERMINATION_LOG: &str = "/dev/termination-log";
/// The name of the Jobs' ServiceAccount in each namespace, of its RoleBinding, and of the ClusterRole bound
/// by it.
pub const JOBS_ACCOUNT: &str = "deltafold-jobs";
/// The end of the name of the Lease for full snapshots; the Lease prefix comes before it.
pub const FULL_LEASE_SUFFIX: &str = "-full-snap";
/// The end of the name of the Lease for deltas; the Lease prefix comes before it.
pub const DELTA_LEASE_SUFFIX: &str = "-delta-snap";

/// The user and group of Pods and of restored data directories, unless a restore task names another user.
const DEFAULT_USER: i64 = 65_532;

/// The controller's settings for all Jobs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The image of Jobs, unless the policy names one
    pub image: String,
    /// The image pull policy: Always, IfNotPresent or Never; `None` for Kubernetes' default
    pub image_pull_policy: Option<String>,
    /// The deadlines of Jobs
    pub deadlines: Deadlines,
    /// Fails with a sentence if the program of the Jobs refuses these arguments. By default all are accepted: the
    /// controller is below the command line
    pub check_command: fn(&[String]) -> Result<(), String>,
}

impl Settings {
    /// Returns the default settings with this image.
    pub fn new(image: impl Into<String>) -> Self {
        Settings {
            image: image.into(),
            image_pull_policy: None,
            deadlines: Deadlines::default(),
            check_command: |_| Ok(()),
        }
    }
}

/// How long a Job may run, retries included, before Kubernetes ends it. The defaults are far above the usual
/// durations. The deadline of a compaction is in its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// A full snapshot
    pub full_snapshot: Duration,
    /// A delta snapshot
    pub delta_snapshot: Duration,
    /// A garbage collection
    pub retention: Duration,
    /// A verification
    pub verification: Duration,
    /// A maintenance of the live etcd
    pub maintenance: Duration,
    /// A restore
    pub restoration: Duration,
    /// A copy, without the time that it waits for a final snapshot
    pub copy: Duration,
    /// How long a copy waits for a final snapshot, unless its task sets a timeout
    pub final_snapshot: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        const HOUR: Duration = Duration::from_secs(3600);
        Deadlines {
            full_snapshot: 3 * HOUR,
            delta_snapshot: HOUR,
            retention: 2 * HOUR,
            verification: 6 * HOUR,
            maintenance: 3 * HOUR,
            restoration: 6 * HOUR,
            copy: 24 * HOUR,
            final_snapshot: 7 * 24 * HOUR,
        }
    }
}

/// What an object does for a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum WorkKind {
    /// A full snapshot, by schedule or instead of a compaction
    FullSnapshot,
    /// A delta snapshot by schedule
    DeltaSnapshot,
    /// The follower, which saves deltas continuously
    Follow,
    /// A compaction after a crossed threshold
    Compaction,
    /// A garbage collection by schedule
    Retention,
    /// A verification by schedule
    Verification,
    /// A defragmentation of the live etcd by schedule
    Maintenance,
    /// A task
    Task,
}

impl WorkKind {
    /// The work of the CronJobs.
    pub const SCHEDULED: [WorkKind; 5] = [
        WorkKind::FullSnapshot,
        WorkKind::DeltaSnapshot,
        WorkKind::Retention,
        WorkKind::Verification,
        WorkKind::Maintenance,
    ];

    /// Returns the end of the names of objects that do this work, and its name in `status.lastRuns`.
    pub fn short_name(self) -> &'static str {
        match self {
            WorkKind::FullSnapshot => "full",
            WorkKind::DeltaSnapshot => "delta",
            WorkKind::Retention => "gc",
            WorkKind::Verification => "verify",
            WorkKind::Maintenance => "maintain",
            other => other.as_str(),
        }
    }

    /// Returns whether an object does this work, by its label.
    pub fn is_of<K: Resource>(self, object: &K) -> bool {
        label(object, LABEL_WORK) == Some(self.as_str())
    }

    /// Returns the value of the label [`LABEL_WORK`].
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Returns whether a Job is that of a task of this type, by its label.
pub fn is_of_task_type(job: &Job, type_: TaskType) -> bool {
    label(job, LABEL_TASK_TYPE) == Some(type_.as_str())
}

/// Returns the name of a policy.
pub fn policy_name(policy: &EtcdBackupPolicy) -> &str {
    policy.metadata.name.as_deref().unwrap_or_default()
}

/// Returns the labels of an object that does this work for a policy.
pub fn labels(policy: &EtcdBackupPolicy, work: WorkKind) -> BTreeMap<String, String> {
    let mut labels = policy_labels(policy);
    labels.insert(LABEL_WORK.to_owned(), work.as_str().to_owned());
    labels
}

fn policy_labels(policy: &EtcdBackupPolicy) -> BTreeMap<String, String> {
    let mut labels = common_labels();
    labels.insert(LABEL_POLICY.to_owned(), policy_name(policy).to_owned());
    labels
}

fn common_labels() -> BTreeMap<String, String> {
    let labels = [(LABEL_NAME, NAME), (LABEL_MANAGED_BY, NAME)];
    labels.map(|(k, v)| (k.to_owned(), v.to_owned())).into()
}

/// Returns a reference to an owner. Kubernetes deletes the objects that have it after the owner.
pub fn owner<K: Resource<DynamicType = ()>>(object: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: object.meta().name.clone().unwrap_or_default(),
        uid: object.meta().uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

fn metadata<K: Resource<DynamicType = ()>>(
    owner_: &K,
    name: &str,
    labels: BTreeMap<String, String>,
) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: owner_.meta().namespace.clone(),
        labels: Some(labels),
        owner_references: Some(vec![owner(owner_)]),
        ..ObjectMeta::default()
    }
}

/// Returns the exit codes that a retry cannot mend. The code of a process that was ended by a signal is not
/// one.
pub fn final_exit_codes() -> Vec<i32> {
    let is_final = |r: &&Reason| !r.is_retryable() && **r != Reason::Terminated;
    let final_reasons = Reason::ALL.iter().filter(is_final);
    let codes: BTreeSet<i32> = final_reasons.map(|r| i32::from(r.exit_code())).collect();
    codes.into_iter().collect()
}

/// Returns the value of a duration field, or zero if it is invalid: [`problems`] reports it, and the
/// controller creates nothing for the policy until it is corrected.
fn duration(field: &TextValue<Span>) -> Duration {
    field.value().unwrap_or_default().0
}

/// Returns the time zone of all schedules of a policy.
fn time_zone(policy: &EtcdBackupPolicy) -> &str {
    let snapshot = policy.spec.snapshot.as_ref();
    snapshot
        .and_then(|s| s.time_zone.as_deref())
        .unwrap_or("Etc/UTC")
}

/// Returns the name of the ServiceAccount of a policy's Pods.
pub fn service_account_name(policy: &EtcdBackupPolicy) -> String {
    let name = policy.spec.job_template.service_account_name.clone();
    name.unwrap_or_else(|| JOBS_ACCOUNT.to_owned())
}

/// Returns the ServiceAccount of the Jobs in a namespace, and the RoleBinding that lets it renew Leases
/// there. They serve all policies that name no ServiceAccount of their own, and no policy owns them.
pub fn account(namespace: &str) -> (ServiceAccount, RoleBinding) {
    let metadata = ObjectMeta {
        name: Some(JOBS_ACCOUNT.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(common_labels()),
        ..ObjectMeta::default()
    };
    let account = ServiceAccount {
        metadata: metadata.clone(),
        // A Pod that needs the token mounts it by its own spec.
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    };
    let binding = RoleBinding {
        metadata,
        role_ref: RoleRef {
            api_group: Some("rbac.authorization.k8s.io".to_owned()),
            kind: "ClusterRole".to_owned(),
            name: JOBS_ACCOUNT.to_owned(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name: JOBS_ACCOUNT.to_owned(),
            namespace: Some(namespace.to_owned()),
            api_group: None,
        }]),
    };
    (account, binding)
}
