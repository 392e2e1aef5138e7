//! EtcdBackupPolicy: one etcd, one store prefix, and what is to be done there and when.

use super::{Condition, SecretRef, StoreSpec};
use crate::backup::Compression;
use crate::backup::trust::Plaintext;
use crate::base::{Size, Span, TextValue};
use crate::ops::compact::History;
use crate::ops::gc::Rules;
use crate::ops::maintain::Upkeep;
use crate::ops::snapshot::follow::Pace;
use crate::ops::verify::store::Level;
use chrono::{DateTime, Utc};
use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration};
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How an etcd is backed up: what runs when, what starts a compaction, what is kept.
#[derive(Debug, Clone, Default, PartialEq, CustomResource, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "deltafold.io",
    version = "v1alpha1",
    kind = "EtcdBackupPolicy",
    plural = "etcdbackuppolicies",
    shortname = "ebp",
    category = "deltafold",
    namespaced,
    status = "EtcdBackupPolicyStatus",
    derive = "Default",
    derive = "PartialEq",
    printcolumn(json_path = ".status.conditions[?(@.type==\"Ready\")].status", name = "Ready", type_ = "string"),
    printcolumn(json_path = ".status.conditions[?(@.type==\"BackupReady\")].status", name = "BackupReady", type_ = "string"),
    printcolumn(json_path = ".status.conditions[?(@.type==\"BackupVerified\")].status", name = "Verified", type_ = "string"),
    printcolumn(json_path = ".status.snapshots.lastFull.time", name = "LastFull", type_ = "date"),
    printcolumn(json_path = ".status.snapshots.lastDelta.time", name = "LastDelta", type_ = "date"),
    printcolumn(json_path = ".status.snapshots.accumulatedDeltaEvents", name = "Events", type_ = "integer"),
    printcolumn(json_path = ".status.restorableWindow.firstRevision", name = "RestorableFrom", type_ = "integer"),
    printcolumn(json_path = ".status.restorableWindow.lastRevision", name = "RestorableTo", type_ = "integer"),
    printcolumn(json_path = ".spec.suspend", name = "Suspended", type_ = "boolean", priority = 1),
    printcolumn(json_path = ".spec.store.url", name = "Store", type_ = "string", priority = 1),
    printcolumn(json_path = ".metadata.creationTimestamp", name = "Age", type_ = "date"),
    validation = Rule::new("size(self.metadata.name) <= 40").message("a policy's name has no more than 40 characters: Jobs are named after it")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.etcd) || !has(self.snapshot) || (!has(self.snapshot.fullSchedule) && !has(self.snapshot.deltaSchedule) && !has(self.snapshot.follow))").message("snapshots need etcd.endpoints"),
    validation = Rule::new("has(self.etcd) || !has(self.maintenance)").message("maintenance needs etcd.endpoints"),
    validation = Rule::new("has(self.etcd) || !has(self.verify) || !has(self.verify.againstCluster) || !self.verify.againstCluster").message("verify.againstCluster needs etcd.endpoints")
)]
pub struct EtcdBackupPolicySpec {
    /// The live etcd; without it nothing but the store is looked after, as beside etcd-druid's sidecar
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdSpec>,
    /// Where its backup is
    pub store: StoreSpec,
    /// age keys of an encrypted backup
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionSpec>,
    /// When snapshots are taken
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotSpec>,
    /// When the deltas are folded into a new full snapshot
    #[serde(default)]
    pub compaction: CompactionSpec,
    /// What is kept; without it nothing is removed
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<RetentionSpec>,
    /// When the backup is verified
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifySpec>,
    /// When the etcd is compacted and defragmented
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<MaintenanceSpec>,
    /// What Jobs look like
    #[serde(default)]
    pub job_template: JobTemplate,
    /// Nothing is started by schedule or threshold; tasks are done all the same
    #[serde(default)]
    pub suspend: bool,
}

/// A live etcd.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdSpec {
    /// Client URLs of its members
    #[schemars(length(min = 1, max = 32))]
    pub endpoints: Vec<String>,
    /// A Secret with ca.crt, and tls.crt and tls.key where etcd wants a client certificate
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_secret_ref: Option<SecretRef>,
    /// A Secret with username and password
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth_secret_ref: Option<SecretRef>,
}

/// Keys of an encrypted backup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EncryptionSpec {
    /// age recipients that new snapshots are encrypted to
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub recipients: Vec<String>,
    /// A Secret with the identity in `identity.txt`, to read the backup with
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_secret_ref: Option<SecretRef>,
    /// What is made of snapshots that are not encrypted
    #[serde(flatten)]
    pub plaintext: Plaintext,
}

/// When snapshots are taken.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.deltaSchedule) && has(self.follow))").message("give either deltaSchedule or follow")
)]
pub struct SnapshotSpec {
    /// When full snapshots are taken: a cron schedule
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    pub full_schedule: Option<String>,
    /// When delta snapshots are taken: a cron schedule
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    pub delta_schedule: Option<String>,
    /// A Pod that follows the etcd all the time instead
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow: Option<Pace>,
    /// The time zone of all schedules [default: Etc/UTC]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_zone: Option<String>,
    /// Of new snapshots [default: as the newest full]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// The prefix of the snapshot Leases: PREFIX-full-snap and PREFIX-delta-snap [default: the policy's name]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 200))]
    pub lease_prefix: Option<String>,
}

/// When deltas are folded into a new full snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CompactionSpec {
    /// Whether thresholds start compactions
    pub enabled: bool,
    /// Since the last full snapshot
    #[schemars(range(min = 1))]
    pub events_threshold: i64,
    /// Bytes of deltas in the store since the last full snapshot [default: no threshold]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_threshold: Option<TextValue<Size>>,
    /// Age of the last full snapshot, where there are deltas after it [default: no threshold]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_threshold: Option<TextValue<Span>>,
    /// So many events since the last full snapshot are not folded any more: a full snapshot is taken [default: no threshold]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub full_snapshot_threshold: Option<i64>,
    /// A compaction that takes longer is ended
    pub active_deadline: TextValue<Span>,
    /// What the new full snapshot keeps
    #[serde(flatten)]
    pub history: History,
    /// Of a compaction's container
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
}

impl Default for CompactionSpec {
    fn default() -> Self {
        CompactionSpec {
            enabled: true,
            events_threshold: 1_000_000,
            size_threshold: None,
            age_threshold: None,
            full_snapshot_threshold: None,
            active_deadline: TextValue::of("3h"),
            history: History::default(),
            resources: None,
        }
    }
}

/// What is kept of the backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RetentionSpec {
    /// What is kept, and how long
    #[serde(flatten)]
    pub rules: Rules,
    /// When garbage is collected [default: every six hours]
    #[serde(default = "collect_every_six_hours")]
    #[schemars(length(min = 1, max = 128))]
    pub schedule: String,
}

fn collect_every_six_hours() -> String {
    "23 */6 * * *".to_owned()
}

/// When the backup is verified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VerifySpec {
    /// When
    #[schemars(length(min = 1, max = 128))]
    pub schedule: String,
    /// How thoroughly
    #[serde(default)]
    pub level: Level,
    /// It is compared with the live etcd, too
    #[serde(default)]
    pub against_cluster: bool,
}

/// When the etcd is compacted and defragmented.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.compactKeep) || has(self.defrag)").message("give compactKeep, defrag, or both"))]
pub struct MaintenanceSpec {
    /// When
    #[schemars(length(min = 1, max = 128))]
    pub schedule: String,
    /// What is done
    #[serde(flatten)]
    pub upkeep: Upkeep,
}

/// What Jobs look like.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobTemplate {
    /// [default: the controller's --job-image]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// [default: Kubernetes']
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Of the container [default: limits of memory and ephemeral storage that a database of maxDatabaseSize fits into]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// It may get, create and patch the snapshot Leases [default: one that the controller makes]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// Nodes that have these labels
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that are put up with
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// The Pods' priority
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// On the Jobs and their Pods
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// How long a Pod's metrics are there after its work is done
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics_scrape_wait: Option<TextValue<Span>>,
    /// Pods share the node's network, as an etcd that listens there needs it
    #[serde(default)]
    pub host_network: bool,
    /// The size limit of the scratch volume [default: three times maxDatabaseSize]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch_size: Option<TextValue<Size>>,
    /// The largest database that Jobs read; a full snapshot of more is refused as TooLarge [default: 16Gi]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_database_size: Option<TextValue<Size>>,
    /// The largest key and value together that Jobs read [default: 64Mi]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_value_size: Option<TextValue<Size>>,
}

/// When images are pulled.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema, strum::Display,
)]
pub enum ImagePullPolicy {
    /// Each time
    Always,
    /// Where it is not there
    IfNotPresent,
    /// It is there
    Never,
}

/// What the controller tells of a policy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdBackupPolicyStatus {
    /// The generation of the spec that was acted on
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Ready, BackupReady, BackupVerified, CompactionHealthy; StoreShared and NotAllowed if they are so
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// The newest snapshots, and what came after the newest full
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<SnapshotsStatus>,
    /// What can be restored, as the last Job found it
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restorable_window: Option<RestorableWindow>,
    /// The last compaction that was started by a threshold
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_compaction: Option<LastCompaction>,
    /// The last verification that ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_verification: Option<LastRun>,
    /// The last restoration by a task that ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_restoration: Option<LastRun>,
    /// The last maintenance that ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_defragmentation: Option<LastRun>,
    /// Jobs that are not done
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub active_jobs: Vec<String>,
    /// What the policy has for itself within its namespace, since when
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<Claim>,
}

impl EtcdBackupPolicyStatus {
    /// A condition by its type, if it was told.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|c| c.type_ == type_)
    }
}

/// Something that only one policy of a namespace can have: who claimed it first has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    /// Store or Leases
    pub what: Claimed,
    /// The store's place, or the prefix of the Leases
    pub of: String,
    /// Since when
    pub since: DateTime<Utc>,
}

/// What can be claimed.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
    strum::IntoStaticStr,
)]
pub enum Claimed {
    /// Where the backup is
    Store,
    /// The snapshot Leases
    Leases,
}

/// What the snapshot Leases tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotsStatus {
    /// The newest full
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_full: Option<SnapshotStatus>,
    /// The newest delta after it
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_delta: Option<SnapshotStatus>,
    /// Bytes of the deltas after the newest full, in the store
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accumulated_delta_size: Option<i64>,
    /// Events in them
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accumulated_delta_events: Option<i64>,
}

/// One snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotStatus {
    /// Its name; not known of etcd-druid's Leases
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The first revision in it; 0 of a full
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_revision: Option<i64>,
    /// The last revision in it
    pub end_revision: i64,
    /// When it was made
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<DateTime<Utc>>,
    /// Bytes in the store
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
}

/// What can be restored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestorableWindow {
    /// The first revision
    pub first_revision: i64,
    /// The last revision
    pub last_revision: i64,
}

/// A compaction that was started by a threshold, or the full snapshot in its place.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastCompaction {
    /// Its Job
    pub job_name: String,
    /// Why: EventsThreshold, SizeThreshold, AgeThreshold, FullSnapshotThreshold, DeadlineExceeded
    pub trigger: String,
    /// The full snapshot's revision when it was started
    pub full_revision: i64,
    /// The newest delta's revision then
    pub delta_revision: i64,
    /// Whether a full snapshot of the live etcd was taken instead
    #[serde(default)]
    pub full_snapshot: bool,
    /// Jobs of it that have failed in a row
    #[serde(default)]
    pub failures: i32,
    /// When it was created, how it ended
    #[serde(flatten)]
    pub run: LastRun,
}

/// A Job of the past.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastRun {
    /// When it was created
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<DateTime<Utc>>,
    /// When it ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<DateTime<Utc>>,
    /// Running, Succeeded or Failed
    #[serde(default)]
    pub state: RunState,
    /// The reason of docs/exit-codes.md, or Kubernetes'
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The exit code
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// For people
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The newest revision that it dealt with
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
}

/// How a run is.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub enum RunState {
    /// It has not ended
    #[default]
    Running,
    /// It has done its work
    Succeeded,
    /// It has not
    Failed,
}
