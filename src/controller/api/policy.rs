//! EtcdBackupPolicy: the backup of one etcd in one store, and its schedules.
//!
//! It has only types; `controller::decide` decides what they mean.

use super::{Condition, SecretRef, StoreSpec};
use crate::backup::Compression;
use crate::base::{Size, Span, TextValue};
use crate::ops::compact::History;
use crate::ops::gc::Rules;
use crate::ops::maintain::Upkeep;
use crate::ops::snapshot::follow::Pace;
use crate::ops::verify::store::Level;
use chrono::{DateTime, Utc};
use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration};
use kube::core::Rule;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// The rule of a cron schedule: `@daily` and the like, or five or more fields. What it cannot express makes the policy
/// not Ready.
fn schedule_rule() -> Rule {
    let rule = r"self.matches('^(@[a-z]+|[0-9A-Za-z*/,?-]+( +[0-9A-Za-z*/,?#-]+){4,6})$')";
    Rule::new(rule).message("give a cron schedule of five fields, such as 0 3 * * *, or @daily")
}

/// The backup of an etcd: schedules, compaction thresholds and retention.
#[derive(Debug, Clone, Default, PartialEq, CustomResource, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "deltafold.io",
    version = "v1alpha1",
    kind = "EtcdBackupPolicy",
    doc = "An EtcdBackupPolicy describes the backup of an etcd in a store: schedules, compaction thresholds and retention.",
    plural = "etcdbackuppolicies",
    shortname = "ebp",
    category = "deltafold",
    namespaced,
    status = "EtcdBackupPolicyStatus",
    derive = "Default",
    derive = "PartialEq",
    printcolumn(json_path = ".status.conditions[?(@.type==\"Ready\")].status", name = "Ready", type_ = "string"),
    printcolumn(json_path = ".status.conditions[?(@.type==\"BackupReady\")].status", name = "BackupReady", type_ = "string"),
    printcolumn(json_path = ".status.conditions[?(@.type==\"BackupReady\")].reason", name = "Reason", type_ = "string"),
    printcolumn(json_path = ".status.conditions[?(@.type==\"BackupVerified\")].status", name = "Verified", type_ = "string"),
    printcolumn(json_path = ".status.snapshots.lastFull.time", name = "LastFull", type_ = "date"),
    printcolumn(json_path = ".status.snapshots.lastDelta.time", name = "LastDelta", type_ = "date"),
    printcolumn(json_path = ".status.snapshots.accumulatedDeltaEvents", name = "Revisions", type_ = "integer"),
    printcolumn(json_path = ".status.restorableWindow.firstTime", name = "RestorableFrom", type_ = "string"),
    printcolumn(json_path = ".status.restorableWindow.lastTime", name = "RestorableTo", type_ = "string"),
    printcolumn(json_path = ".status.restorableWindow.firstRevision", name = "FirstRevision", type_ = "integer", priority = 1),
    printcolumn(json_path = ".status.restorableWindow.lastRevision", name = "LastRevision", type_ = "integer", priority = 1),
    printcolumn(json_path = ".spec.suspend", name = "Suspended", type_ = "boolean", priority = 1),
    printcolumn(json_path = ".spec.store.url", name = "Store", type_ = "string", priority = 1),
    printcolumn(json_path = ".metadata.creationTimestamp", name = "Age", type_ = "date"),
    validation = Rule::new("size(self.metadata.name) <= 40").message("a policy's name must have at most 40 characters, because Jobs are named after it")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.etcd) || !has(self.snapshot) || (!has(self.snapshot.fullSchedule) && !has(self.snapshot.deltaSchedule) && !has(self.snapshot.follow))").message("snapshots need etcd.endpoints"),
    validation = Rule::new("has(self.etcd) || !has(self.maintenance)").message("maintenance needs etcd.endpoints"),
    validation = Rule::new("has(self.etcd) || !has(self.verify) || !has(self.verify.againstCluster) || !self.verify.againstCluster").message("verify.againstCluster needs etcd.endpoints")
)]
pub struct EtcdBackupPolicySpec {
    /// Live etcd to back up. Without it, the policy only maintains the store, for example next to
    /// etcd-druid's sidecar
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdSpec>,
    /// Store that holds the backup
    pub store: StoreSpec,
    /// age keys of the backup
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionSpec>,
    /// Schedules of snapshots
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotSpec>,
    /// Thresholds for folding the deltas into a new full snapshot
    #[serde(default)]
    pub compaction: CompactionSpec,
    /// Rules for removing old snapshots. Without it, nothing is removed
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<RetentionSpec>,
    /// Schedule of verifications of the backup
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifySpec>,
    /// Schedule of defragmentations of the live etcd
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<MaintenanceSpec>,
    /// Settings of the Jobs and their Pods
    #[serde(default)]
    pub job_template: JobTemplate,
    /// Stop starting Jobs by schedule and threshold. Tasks still run
    #[serde(default)]
    pub suspend: bool,
}

/// A live etcd.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(r"self.endpoints.all(e, e.matches(r'^https?://[^\s,]+$'))").message("give each member an endpoint of its own, as a URL such as https://etcd-0.etcd:2379"),
    validation = Rule::new("!has(self.tlsSecretRef) || self.endpoints.all(e, e.startsWith('https://'))").message("an endpoint is without TLS, but tlsSecretRef is set: use https, or remove tlsSecretRef")
)]
pub struct EtcdSpec {
    /// Client URLs of the members
    #[schemars(length(min = 1, max = 32))]
    pub endpoints: Vec<String>,
    /// Secret with ca.crt, and with tls.crt and tls.key if etcd requires a client certificate
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_secret_ref: Option<SecretRef>,
    /// Secret with the username and password of an etcd user
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth_secret_ref: Option<SecretRef>,
}

/// The age keys of a backup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EncryptionSpec {
    /// age recipients (age1…) for which new snapshots are encrypted
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub recipients: Vec<String>,
    /// Secret with the age identity in `identity.txt`, which decrypts the backup
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_secret_ref: Option<SecretRef>,
}

/// The schedules of snapshots.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.deltaSchedule) && has(self.follow))").message("give either deltaSchedule or follow")
)]
pub struct SnapshotSpec {
    /// Cron schedule of full snapshots
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = schedule_rule())]
    pub full_schedule: Option<String>,
    /// Cron schedule of delta snapshots
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = schedule_rule())]
    pub delta_schedule: Option<String>,
    /// Run a Pod that takes delta snapshots continuously, instead of deltaSchedule
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow: Option<Pace>,
    /// Time zone of all schedules of the policy, by its IANA name [default: Etc/UTC]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_zone: Option<String>,
    /// Compression of new snapshots [default: that of the newest full]; gzip is written for zlib and lzw
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// Prefix of the snapshot Leases PREFIX-full-snap and PREFIX-delta-snap [default: the policy's name]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 200))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[-a-z0-9])?$')").message("cannot begin the name of a Lease"))]
    pub lease_prefix: Option<String>,
    /// Further options of `deltafold snapshot`, as on the command line
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub args: Vec<String>,
}

/// The thresholds that start a compaction: the deltas are folded into a new full snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CompactionSpec {
    /// Start compactions by threshold
    pub enabled: bool,
    /// Start a compaction at this number of revisions since the last full snapshot. etcd-druid calls them events
    #[schemars(range(min = 1))]
    pub events_threshold: i64,
    /// Start a compaction at this size of the deltas in the store since the last full snapshot [default: no
    /// threshold]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_threshold: Option<TextValue<Size>>,
    /// Start a compaction at this age of the last full snapshot, if there are deltas after it [default: no
    /// threshold]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_threshold: Option<TextValue<Span>>,
    /// Take a full snapshot of the live etcd, instead of a compaction, at this number of revisions since the
    /// last full snapshot [default: no threshold]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub full_snapshot_threshold: Option<i64>,
    /// Stop a compaction that takes longer
    pub active_deadline: TextValue<Span>,
    /// History that the new full snapshot keeps
    #[serde(flatten)]
    pub history: History,
    /// Resources of a compaction's container [default: those of jobTemplate]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// Further options of `deltafold compact`, as on the command line
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub args: Vec<String>,
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
            args: Vec::new(),
        }
    }
}

/// The rules for removing old snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RetentionSpec {
    /// Rules
    #[serde(flatten)]
    pub rules: Rules,
    /// Cron schedule for removing old snapshots [default: every six hours]
    #[serde(default = "collect_every_six_hours")]
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = schedule_rule())]
    pub schedule: String,
    /// Further options of `deltafold gc`, as on the command line
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub args: Vec<String>,
}

fn collect_every_six_hours() -> String {
    "23 */6 * * *".to_owned()
}

/// The verification of the backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VerifySpec {
    /// Cron schedule
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = schedule_rule())]
    pub schedule: String,
    /// How thoroughly the backup is verified
    #[serde(default)]
    pub level: Level,
    /// Also compare the backup with the live etcd
    #[serde(default)]
    pub against_cluster: bool,
    /// Also restore the backup and start an etcd on the result; the level is then fold
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drill: Option<DrillSpec>,
    /// Further options of `deltafold verify`, as on the command line
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub args: Vec<String>,
}

/// The restore drill of each verification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrillSpec {
    /// Image with the etcd to start, at /usr/local/bin/etcd, such as registry.k8s.io/etcd:3.6.5-0
    #[schemars(length(min = 1, max = 512))]
    pub etcd_image: String,
}

/// The maintenance of the live etcd.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MaintenanceSpec {
    /// Cron schedule
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = schedule_rule())]
    pub schedule: String,
    /// The work to do
    #[serde(flatten)]
    pub upkeep: Upkeep,
    /// Further options of `deltafold maintain`, as on the command line
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub args: Vec<String>,
}

/// Settings of the Jobs and their Pods.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobTemplate {
    /// Image of the Jobs [default: that of the controller's --job-image]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// When Kubernetes pulls the image [default: as Kubernetes decides by the image's tag]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Resources of the container [default: limits of memory and ephemeral storage that suffice for
    /// maxDatabaseSize]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// ServiceAccount of the Pods; it must have get, create and patch on the snapshot Leases [default: a
    /// ServiceAccount that the controller creates]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// Run Pods only on nodes with these labels
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Tolerations of the Pods
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// PriorityClass of the Pods
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Additional labels of the Jobs and their Pods
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Keep a Pod running for this time after its work has ended, so that its metrics can be scraped
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics_scrape_wait: Option<TextValue<Span>>,
    /// Use the network of the node, for an etcd that listens only there
    #[serde(default)]
    pub host_network: bool,
    /// Size limit of the volume for temporary files [default: three times maxDatabaseSize]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch_size: Option<TextValue<Size>>,
    /// Largest database, uncompressed, that Jobs read; larger full snapshots are refused (TooLarge) [default:
    /// 16Gi]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_database_size: Option<TextValue<Size>>,
    /// Largest key and value together that Jobs read [default: 64Mi]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_value_size: Option<TextValue<Size>>,
}

/// When Kubernetes pulls images.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema, strum::Display,
)]
pub enum ImagePullPolicy {
    /// Each time a container starts
    Always,
    /// If the node does not have the image
    IfNotPresent,
    /// The node must have the image
    Never,
}

/// The observed state of a policy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdBackupPolicyStatus {
    /// Generation of the spec that the controller has processed
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the controller first saw a change of the spec to that generation
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_at: Option<DateTime<Utc>>,
    /// Conditions: Ready, BackupReady, BackupVerified and CompactionHealthy; StoreShared and SetBack only if true
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// Newest snapshots, and the size of the deltas since the newest full
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<SnapshotsStatus>,
    /// Revisions and times that can be restored, as the last Job reported
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restorable_window: Option<RestorableWindow>,
    /// Last runs of the CronJobs that have ended: full, delta, gc, verify and maintain
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub last_runs: BTreeMap<String, ScheduledRun>,
    /// Last compaction started by a threshold
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_compaction: Option<LastCompaction>,
    /// Last verification that has ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_verification: Option<LastRun>,
    /// Last restore by a task that has ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_restoration: Option<LastRun>,
    /// Last maintenance (defragmentation of the live etcd) that has ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_defragmentation: Option<LastRun>,
    /// Names of the Jobs that have not ended
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub active_jobs: Vec<String>,
}

impl EtcdBackupPolicyStatus {
    /// Returns the condition of this type, if it is set.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|c| c.type_ == type_)
    }
}

/// A run of a CronJob that has ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScheduledRun {
    /// Name of the Job
    pub job: String,
    /// When the Job was created
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<DateTime<Utc>>,
    /// When the Job ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<DateTime<Utc>>,
    /// Result: Succeeded or Failed
    pub result: RunState,
    /// Reason for a failure: one of docs/exit-codes.md, or one of Kubernetes
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Human-readable description of a failure
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Name of the newest snapshot that the Job saved
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Newest revision that the Job processed
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
}

/// The newest snapshots, as the snapshot Leases record them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotsStatus {
    /// Newest full snapshot
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_full: Option<SnapshotStatus>,
    /// Newest delta snapshot after the newest full
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_delta: Option<SnapshotStatus>,
    /// Size of the deltas after the newest full, in bytes in the store
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accumulated_delta_size: Option<i64>,
    /// Number of revisions in the deltas after the newest full. etcd-druid calls them events
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accumulated_delta_events: Option<i64>,
}

/// A snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotStatus {
    /// Name of the snapshot; etcd-druid's Leases do not record it
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// First revision in the snapshot; 0 for a full
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_revision: Option<i64>,
    /// Last revision in the snapshot
    pub end_revision: i64,
    /// When the snapshot was taken
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<DateTime<Utc>>,
    /// Size in bytes in the store
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
}

/// What can be restored, by revision and by time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestorableWindow {
    /// First revision that can be restored
    pub first_revision: i64,
    /// Last revision that can be restored
    pub last_revision: i64,
    /// When the oldest full snapshot of the window was taken
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_time: Option<DateTime<Utc>>,
    /// When the last revision was saved
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_time: Option<DateTime<Utc>>,
}

/// A compaction that a threshold started, or the full snapshot taken instead of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastCompaction {
    /// Name of the Job
    pub job_name: String,
    /// Why it was started: EventsThreshold, SizeThreshold, AgeThreshold, FullSnapshotThreshold or
    /// DeadlineExceeded
    pub trigger: String,
    /// Revision of the newest full when it was started
    pub full_revision: i64,
    /// Revision of the newest delta when it was started
    pub delta_revision: i64,
    /// Whether the Job took a full snapshot of the live etcd instead of a compaction
    #[serde(default)]
    pub full_snapshot: bool,
    /// Generation of the spec when it was started
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// Number of Jobs that have failed in a row
    #[serde(default)]
    pub failures: i32,
    /// Start and result of the Job
    #[serde(flatten)]
    pub run: LastRun,
}

/// A Job, and its result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastRun {
    /// When the Job was created
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<DateTime<Utc>>,
    /// When the Job ended
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<DateTime<Utc>>,
    /// State: Running, Succeeded or Failed
    #[serde(default)]
    pub state: RunState,
    /// Reason for a failure: one of docs/exit-codes.md, or one of Kubernetes
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Exit code of the Job's container
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Human-readable result
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Newest revision that the Job processed
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
    /// Name of the newest snapshot that the Job saved
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
}

impl LastRun {
    /// Returns how long the Job took; `None` if it has not ended.
    pub fn duration(&self) -> Option<Duration> {
        let (end, start) = self.completion_time.zip(self.start_time)?;
        (end - start).to_std().ok()
    }
}

/// The state of a Job.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub enum RunState {
    /// The Job has not ended
    #[default]
    Running,
    /// The Job succeeded
    Succeeded,
    /// The Job failed
    Failed,
}
