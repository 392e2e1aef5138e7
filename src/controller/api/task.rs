//! EtcdBackupTask: something to be done once, now, for a policy.

use super::StoreSpec;
use crate::base::flag_values::yes_or_no;
use crate::base::{Span, TextValue};
use crate::ops::compact::History;
use crate::ops::copy::plan::CopyLimits;
use crate::ops::maintain::Upkeep;
use crate::ops::restore::SharedOptions;
use crate::ops::snapshot::Marks;
use crate::ops::verify::store::Thoroughness;
use chrono::{DateTime, Utc};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

/// A task is deleted so long after it has ended, if nothing else is said: a day.
pub const DEFAULT_TTL_SECONDS: i64 = 86_400;

/// Something to be done once, for a policy of the same namespace.
#[derive(Debug, Clone, PartialEq, CustomResource, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "deltafold.io",
    version = "v1alpha1",
    kind = "EtcdBackupTask",
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
    validation = Rule::new("size(self.metadata.name) <= 52").message("a task's name has no more than 52 characters: its Job is named after it")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self == oldSelf").message("a task's spec does not change: create another task"),
    validation = Rule::new("self.type != 'OnDemandSnapshot' || has(self.config) && has(self.config.onDemandSnapshot)").message("OnDemandSnapshot needs config.onDemandSnapshot"),
    validation = Rule::new("self.type != 'CopyBackups' || has(self.config) && has(self.config.copyBackups)").message("CopyBackups needs config.copyBackups"),
    validation = Rule::new("self.type != 'Restore' || has(self.config) && has(self.config.restore)").message("Restore needs config.restore"),
    validation = Rule::new("self.type != 'Maintenance' || has(self.config) && has(self.config.maintenance)").message("Maintenance needs config.maintenance"),
    validation = Rule::new("!has(self.config) || !has(self.config.onDemandSnapshot) || self.type == 'OnDemandSnapshot'").message("config.onDemandSnapshot is for the type OnDemandSnapshot"),
    validation = Rule::new("!has(self.config) || !has(self.config.onDemandCompaction) || self.type == 'OnDemandCompaction'").message("config.onDemandCompaction is for the type OnDemandCompaction"),
    validation = Rule::new("!has(self.config) || !has(self.config.copyBackups) || self.type == 'CopyBackups'").message("config.copyBackups is for the type CopyBackups"),
    validation = Rule::new("!has(self.config) || !has(self.config.restore) || self.type == 'Restore'").message("config.restore is for the type Restore"),
    validation = Rule::new("!has(self.config) || !has(self.config.verify) || self.type == 'Verify'").message("config.verify is for the type Verify"),
    validation = Rule::new("!has(self.config) || !has(self.config.maintenance) || self.type == 'Maintenance'").message("config.maintenance is for the type Maintenance")
)]
pub struct EtcdBackupTaskSpec {
    /// The policy whose etcd and store it is about
    #[schemars(length(min = 1, max = 253))]
    pub policy: String,
    /// What is to be done
    #[serde(rename = "type")]
    pub type_: TaskType,
    /// How: what belongs to the type
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<TaskConfig>,
    /// The task is deleted so long after it has ended [default: a day]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31_536_000))]
    pub ttl_seconds_after_finished: Option<i64>,
}

/// What is to be done.
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
    /// A snapshot of the live etcd
    OnDemandSnapshot,
    /// The deltas are folded into a new full snapshot
    OnDemandCompaction,
    /// The backup is copied to another store
    CopyBackups,
    /// A member's data directory is restored into a PersistentVolumeClaim
    Restore,
    /// The backup is verified
    Verify,
    /// The live etcd is compacted or defragmented
    Maintenance,
}

impl TaskType {
    /// As the API has it.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// How it is to be done: one of these, that of the type.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskConfig {
    /// Of OnDemandSnapshot
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_demand_snapshot: Option<OnDemandSnapshotConfig>,
    /// Of OnDemandCompaction
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_demand_compaction: Option<OnDemandCompactionConfig>,
    /// Of CopyBackups
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_backups: Option<CopyBackupsConfig>,
    /// Of Restore
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreConfig>,
    /// Of Verify
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyConfig>,
    /// Of Maintenance
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<MaintenanceConfig>,
}

/// A snapshot of the live etcd.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.type == 'full' || !has(self.final) || !self.final").message("only a full snapshot can be final"))]
pub struct OnDemandSnapshotConfig {
    /// The whole database, or what has changed since the last snapshot
    #[arg(long = "type", value_name = "TYPE", default_value = "full")]
    #[serde(rename = "type")]
    pub type_: SnapshotType,
    /// What it means
    #[command(flatten)]
    #[serde(flatten)]
    pub marks: Marks,
}

/// The kind of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotType {
    /// The whole database
    Full,
    /// The events since the last snapshot
    Delta,
}

/// A compaction.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct OnDemandCompactionConfig {
    /// What it keeps [default: the policy's]
    #[command(flatten)]
    #[serde(flatten)]
    pub history: History,
    /// Fold up to this revision [default: the newest]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub revision: Option<i64>,
}

/// A copy of the backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopyBackupsConfig {
    /// Where from [default: the policy's store]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_store: Option<StoreSpec>,
    /// Where to [default: the policy's store]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_store: Option<StoreSpec>,
    /// Which backups
    #[serde(flatten)]
    pub most: CopyLimits,
    /// Waits for the final full snapshot first
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_for_final_snapshot: Option<WaitForFinalSnapshot>,
}

/// Waiting for the final full snapshot.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WaitForFinalSnapshot {
    /// Whether it is waited for
    pub enabled: bool,
    /// For no longer than this [default: as long as it takes]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<TextValue<Span>>,
}

/// A member's data directory, restored into a volume.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[command(mut_args(|a| a.help_heading(None::<&str>)))]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!(has(self.revision) && has(self.time))").message("give either revision or time"))]
pub struct RestoreConfig {
    /// The PersistentVolumeClaim, of the same namespace
    #[arg(long = "claim", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: String,
    /// The data directory's path in the volume [default: default.etcd]
    #[arg(long, value_name = "PATH")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"))]
    pub sub_path: Option<String>,
    /// What is restored
    #[command(flatten)]
    #[serde(flatten)]
    pub wanted: SharedOptions,
    /// The user and group that own the restored files [default: 65532]
    #[arg(long, value_name = "UID", value_parser = clap::value_parser!(i64).range(0..=2_147_483_647))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2_147_483_647_i64))]
    pub run_as_user: Option<i64>,
}

/// A verification.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VerifyConfig {
    /// How thoroughly
    #[command(flatten)]
    #[serde(flatten)]
    pub depth: Thoroughness,
    /// Compare it with the live etcd, too
    #[arg(long, value_parser = yes_or_no)]
    #[serde(default)]
    pub against_cluster: bool,
}

/// Maintenance of the live etcd.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, KubeSchema)]
#[command(mut_arg("compact_keep", |a| a.required_unless_present("defrag")))]
#[x_kube(validation = Rule::new("has(self.compactKeep) || has(self.defrag)").message("give compactKeep, defrag, or both"))]
pub struct MaintenanceConfig {
    /// What is done
    #[command(flatten)]
    #[serde(flatten)]
    pub upkeep: Upkeep,
}

/// What the controller tells of a task.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdBackupTaskStatus {
    /// The generation of the spec that was acted on
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pending, InProgress, Succeeded, Failed or Rejected
    #[serde(default)]
    pub state: TaskState,
    /// When it was no longer Pending
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initiated_at: Option<DateTime<Utc>>,
    /// When it ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<DateTime<Utc>>,
    /// Its Job
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_name: Option<String>,
    /// What went wrong, the newest first
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_errors: Vec<TaskError>,
    /// What it is at
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_operation: Option<LastOperation>,
}

/// How a task is.
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
    /// It waits for its turn
    #[default]
    Pending,
    /// Its Job is there
    InProgress,
    /// It is done
    Succeeded,
    /// It was tried, and could not be done
    Failed,
    /// It was not tried: a pre-condition does not hold
    Rejected,
}

impl TaskState {
    /// Those in which nothing happens any more.
    pub const FINAL: [TaskState; 3] =
        [TaskState::Succeeded, TaskState::Failed, TaskState::Rejected];

    /// Whether nothing happens any more.
    pub fn is_final(self) -> bool {
        Self::FINAL.contains(&self)
    }

    /// As the API has it.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskError {
    /// A word for machines: a reason of docs/exit-codes.md, or of a rejection
    pub code: String,
    /// A sentence for people
    pub description: String,
    /// When
    pub observed_at: DateTime<Utc>,
}

/// What a task is at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastOperation {
    /// Admission or Job
    pub name: String,
    /// Pending, InProgress, Completed or Failed
    pub state: String,
    /// When it became so
    pub last_transition_time: DateTime<Utc>,
    /// For people
    pub reason: String,
}
