//! EtcdBackupTask: one-off work for a policy.
//!
//! It has only types, which are also the arguments of `deltafold task create`; `controller::decide` runs the
//! tasks.

use super::StoreSpec;
use crate::base::flag_values::yes_or_no;
use crate::base::{Span, TextValue};
use crate::ops::compact::History;
use crate::ops::copy::plan::CopyLimits;
use crate::ops::maintain::Upkeep;
use crate::ops::options::Point;
use crate::ops::restore::Membership;
use crate::ops::verify::store::Thoroughness;
use chrono::{DateTime, Utc};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

/// By default, a task is deleted this many seconds after it has ended: a day.
pub const DEFAULT_TTL_SECONDS: i64 = 86_400;

/// One-off work for a policy of the same namespace, such as a snapshot, a restore or a verification.
#[derive(Debug, Clone, PartialEq, CustomResource, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "deltafold.io",
    version = "v1alpha1",
    kind = "EtcdBackupTask",
    doc = "An EtcdBackupTask is one-off work for a policy, such as a snapshot, a restore or a verification.",
    plural = "etcdbackuptasks",
    shortname = "ebt",
    category = "deltafold",
    namespaced,
    status = "EtcdBackupTaskStatus",
    derive = "PartialEq",
    printcolumn(json_path = ".spec.policy", name = "Policy", type_ = "string"),
    printcolumn(json_path = ".spec.type", name = "Type", type_ = "string"),
    printcolumn(json_path = ".status.state", name = "State", type_ = "string"),
    printcolumn(json_path = ".status.lastErrors[0].code", name = "Error", type_ = "string"),
    printcolumn(json_path = ".metadata.creationTimestamp", name = "Age", type_ = "date"),
    validation = Rule::new("size(self.metadata.name) <= 52").message("a task's name must have at most 52 characters, because its Job is named after it")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self == oldSelf").message("a task's spec cannot be changed: create a new task"),
    validation = Rule::new("self.type != 'OnDemandSnapshot' || has(self.config) && has(self.config.onDemandSnapshot)").message("OnDemandSnapshot needs config.onDemandSnapshot"),
    validation = Rule::new("self.type != 'CopyBackups' || has(self.config) && has(self.config.copyBackups)").message("CopyBackups needs config.copyBackups"),
    validation = Rule::new("self.type != 'Restore' || has(self.config) && has(self.config.restore)").message("Restore needs config.restore"),
    validation = Rule::new("self.type != 'Maintenance' || has(self.config) && has(self.config.maintenance)").message("Maintenance needs config.maintenance"),
    validation = Rule::new("!has(self.config) || !has(self.config.garbageCollection) || self.type == 'GarbageCollection'").message("config.garbageCollection is for the type GarbageCollection"),
    validation = Rule::new("!has(self.config) || !has(self.config.onDemandSnapshot) || self.type == 'OnDemandSnapshot'").message("config.onDemandSnapshot is for the type OnDemandSnapshot"),
    validation = Rule::new("!has(self.config) || !has(self.config.onDemandCompaction) || self.type == 'OnDemandCompaction'").message("config.onDemandCompaction is for the type OnDemandCompaction"),
    validation = Rule::new("!has(self.config) || !has(self.config.copyBackups) || self.type == 'CopyBackups'").message("config.copyBackups is for the type CopyBackups"),
    validation = Rule::new("!has(self.config) || !has(self.config.restore) || self.type == 'Restore'").message("config.restore is for the type Restore"),
    validation = Rule::new("!has(self.config) || !has(self.config.verify) || self.type == 'Verify'").message("config.verify is for the type Verify"),
    validation = Rule::new("!has(self.config) || !has(self.config.maintenance) || self.type == 'Maintenance'").message("config.maintenance is for the type Maintenance")
)]
pub struct EtcdBackupTaskSpec {
    /// Name of the EtcdBackupPolicy to run the task for
    #[schemars(length(min = 1, max = 253))]
    pub policy: String,
    /// Type of the task
    #[serde(rename = "type")]
    pub type_: TaskType,
    /// Configuration of the task. Only the field for the type may be set
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<TaskConfig>,
    /// Further options of the command that the Job runs, as on the command line, instead of the args of the policy
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub args: Vec<String>,
    /// Fail if no Pod of the task has started after this time [default: 10m]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_deadline: Option<TextValue<Span>>,
    /// Delete the task this many seconds after it has ended [default: 86400, a day]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31_536_000))]
    pub ttl_seconds_after_finished: Option<i64>,
}

/// The type of a task.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    IntoStaticStr,
    VariantArray,
)]
pub enum TaskType {
    /// Take a snapshot of the live etcd
    OnDemandSnapshot,
    /// Fold the deltas into a new full snapshot
    OnDemandCompaction,
    /// Copy the backup to another store
    CopyBackups,
    /// Restore a member's data directory into a PersistentVolumeClaim
    Restore,
    /// Verify the backup
    Verify,
    /// Compact or defragment the live etcd
    Maintenance,
    /// Remove old snapshots by the policy's rules
    GarbageCollection,
}

impl TaskType {
    /// The name that the API uses.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The configuration of a task: only the field for its type may be set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskConfig {
    /// Configuration of an OnDemandSnapshot
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_demand_snapshot: Option<OnDemandSnapshotConfig>,
    /// Configuration of an OnDemandCompaction
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_demand_compaction: Option<OnDemandCompactionConfig>,
    /// Configuration of CopyBackups
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_backups: Option<CopyBackupsConfig>,
    /// Configuration of a Restore
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreConfig>,
    /// Configuration of a Verify
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyConfig>,
    /// Configuration of a Maintenance
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<MaintenanceConfig>,
    /// Configuration of a GarbageCollection
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub garbage_collection: Option<GarbageCollectionConfig>,
}

/// A snapshot of the live etcd.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.type == 'full' || !has(self.final) || !self.final").message("only a full snapshot can be final"))]
pub struct OnDemandSnapshotConfig {
    /// Kind of the snapshot
    #[arg(long = "type", value_name = "TYPE", default_value = "full")]
    #[serde(rename = "type")]
    pub type_: SnapshotType,
    /// Mark the snapshot as final: the last one of a cluster that is shut down
    #[arg(long = "final", value_parser = yes_or_no)]
    #[serde(default, rename = "final")]
    pub is_final: bool,
}

/// The kind of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotType {
    /// The whole database
    Full,
    /// The changes since the last snapshot
    Delta,
}

/// A compaction: the deltas are folded into a new full snapshot.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct OnDemandCompactionConfig {
    /// History to keep [default: that of the policy]
    #[command(flatten)]
    #[serde(flatten)]
    pub history: History,
    /// Fold up to this revision [default: the newest revision]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub revision: Option<i64>,
}

/// A copy of the backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.sourceStore) || has(self.targetStore)").message("give sourceStore, targetStore, or both"))]
pub struct CopyBackupsConfig {
    /// Store to copy from [default: the policy's store]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_store: Option<StoreSpec>,
    /// Store to copy to [default: the policy's store]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_store: Option<StoreSpec>,
    /// The backups to copy
    #[serde(flatten)]
    pub most: CopyLimits,
    /// Wait until the newest full snapshot of the source is final, then copy
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_for_final_snapshot: Option<WaitForFinalSnapshot>,
}

/// Whether and how long a copy waits for the final full snapshot.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WaitForFinalSnapshot {
    /// Wait for the final full snapshot
    pub enabled: bool,
    /// Copy after this time even without a final snapshot [default: wait without limit]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<TextValue<Span>>,
}

/// A restore of a member's data directory into a volume.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[command(mut_args(|a| a.help_heading(None::<&str>)))]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.revision) && has(self.time))").message("give either revision or time"),
    validation = Rule::new("!has(self.subPath) || !self.subPath.split('/').exists(p, p == '.' || p == '..')").message("subPath must be below the root of the volume, without . and ..")
)]
pub struct RestoreConfig {
    /// Name of the PersistentVolumeClaim, in the same namespace
    #[arg(long = "claim", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: String,
    /// Path of the data directory in the volume [default: default.etcd]
    #[arg(long, value_name = "PATH")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"))]
    pub sub_path: Option<String>,
    /// The state to restore
    #[command(flatten)]
    #[serde(flatten)]
    pub point: Point,
    /// The member to restore
    #[command(flatten)]
    #[serde(flatten)]
    pub membership: Membership,
    /// ID of the user and group that own the restored files [default: 65532]
    #[arg(long, value_name = "UID", value_parser = clap::value_parser!(i64).range(0..=2_147_483_647))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2_147_483_647_i64))]
    pub run_as_user: Option<i64>,
}

/// A verification of the backup.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VerifyConfig {
    /// How thoroughly the backup is verified
    #[command(flatten)]
    #[serde(flatten)]
    pub depth: Thoroughness,
    /// Also compare the backup with the live etcd
    #[arg(long, value_parser = yes_or_no)]
    #[serde(default)]
    pub against_cluster: bool,
}

/// Maintenance of the live etcd.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
pub struct MaintenanceConfig {
    /// The work to do
    #[command(flatten)]
    #[serde(flatten)]
    pub upkeep: Upkeep,
}

/// A garbage collection by the retention rules of the policy.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GarbageCollectionConfig {
    /// Remove old snapshots even if much less can be restored afterwards
    #[arg(long, value_parser = yes_or_no)]
    #[serde(default)]
    pub allow_shrink: bool,
}

/// The observed state of a task.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdBackupTaskStatus {
    /// Generation of the spec that the controller has processed
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// State: Pending, InProgress, Succeeded, Failed or Rejected
    #[serde(default)]
    pub state: TaskState,
    /// When the task left the state Pending
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initiated_at: Option<DateTime<Utc>>,
    /// When the task ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<DateTime<Utc>>,
    /// Name of the task's Job
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_name: Option<String>,
    /// Errors of the task, the newest first
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_errors: Vec<TaskError>,
    /// What the task is doing or waiting for
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_operation: Option<LastOperation>,
}

/// The state of a task.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    IntoStaticStr,
)]
pub enum TaskState {
    /// The task waits for other tasks or for a job slot
    #[default]
    Pending,
    /// The task's Job exists
    InProgress,
    /// The Job succeeded
    Succeeded,
    /// The Job failed
    Failed,
    /// The task was not started, because a precondition does not hold
    Rejected,
}

impl TaskState {
    /// The states of a task that has ended.
    pub const FINAL: [TaskState; 3] =
        [TaskState::Succeeded, TaskState::Failed, TaskState::Rejected];

    /// Whether the task has ended.
    pub fn is_final(self) -> bool {
        Self::FINAL.contains(&self)
    }

    /// The name that the API uses.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// An error of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskError {
    /// Machine-readable reason: one of docs/exit-codes.md, one of Kubernetes, or the reason for a rejection
    pub code: String,
    /// Human-readable description
    pub description: String,
    /// When the controller observed the error
    pub observed_at: DateTime<Utc>,
}

/// What a task is doing or waiting for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastOperation {
    /// Step of the task: Admission or Job
    pub name: String,
    /// State of the step: Pending, InProgress, Completed or Failed
    pub state: String,
    /// When the state last changed
    pub last_transition_time: DateTime<Utc>,
    /// Human-readable description
    pub reason: String,
}
