//! What a policy and its tasks become: CronJobs, a follower, Jobs, and what these need (Leases, an account).
//!
//! Pure: an object is made of a policy, a task and the settings. Of Secrets only names are known: a Job says itself
//! what one lacks. When something is made and who writes it, the reconcilers know; what a Pod looks like is in `pod`.

mod allowed;
pub(super) mod flags;
mod pod;
mod problems;
mod store_url;
#[cfg(test)]
mod tests;

pub use allowed::{Allowed, Validation};
pub use problems::{problems, task_problems};
pub use store_url::plain_url;

use super::api::{
    EtcdBackupPolicy, EtcdBackupTask, OnDemandCompactionConfig, RestoreConfig, SnapshotType,
    TaskConfig, TaskType,
};
use crate::base::hash::short_hash;
use crate::base::{Span, TextValue};
use crate::error::Reason;
use crate::ops::compact::History;
use crate::ops::maintain::Upkeep;
use crate::ops::restore;
use crate::ops::verify::store::{Level, Thoroughness};
use crate::store::open::Family;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy};
use k8s_openapi::api::batch::v1::{
    CronJob, CronJobSpec, Job, JobSpec, JobTemplateSpec, PodFailurePolicy,
    PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyOnPodConditionsPattern,
    PodFailurePolicyRule,
};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use kube::Resource;
use pod::{Pod, Side};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Whose an object is, as Kubernetes recommends.
pub const LABEL_NAME: &str = "app.kubernetes.io/name";
/// What looks after an object.
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// The value of both.
pub const NAME: &str = "deltafold";
/// The policy that an object was made for.
pub const LABEL_POLICY: &str = "deltafold.io/policy";
/// What is done, by [`Work::as_str`].
pub const LABEL_WORK: &str = "deltafold.io/work";
/// The task that a Job was made for.
pub const LABEL_TASK: &str = "deltafold.io/task";
/// That task's type.
pub const LABEL_TASK_TYPE: &str = "deltafold.io/task-type";
/// The container that does the work, and whose exit code and termination message count.
pub const CONTAINER: &str = "deltafold";
/// The container before it where a backup is verified and then compared with the live etcd.
pub const CONTAINER_BEFORE: &str = "deltafold-backup";
/// Where a Job's container leaves its termination message.
pub const TERMINATION_LOG: &str = "/dev/termination-log";
/// The service account of Jobs in each namespace, the RoleBinding that gives it its rights, and the ClusterRole that
/// has them.
pub const ACCOUNT: &str = "deltafold-jobs";
/// Behind a prefix, the Lease that tells of full snapshots.
pub const FULL_LEASE_SUFFIX: &str = "-full-snap";
/// Behind a prefix, the Lease that tells of deltas.
pub const DELTA_LEASE_SUFFIX: &str = "-delta-snap";

/// A Job tries again as often, after failures that a retry can mend.
const BACKOFF_LIMIT: i32 = 4;
/// A run that could not start for so long is left out: the next one does as much.
const STARTING_DEADLINE_SECONDS: i64 = 3600;
/// Kubernetes counts deadlines in nanoseconds, of which 64 bits hold 292 years.
const LONGEST_DEADLINE: Duration = Duration::from_secs(100 * 365 * 86_400);
/// A threshold's Job is there so long after its end, for people to look at.
const TTL_SECONDS: i32 = 86_400;
/// More than `snapshot follow`'s --shutdown-timeout: the last delta is saved after SIGTERM.
const FOLLOWER_GRACE_SECONDS: i64 = 30;
/// Where a restoration's claim is mounted.
const DATA_VOLUME: &str = "/restore";
/// Whose a restored data directory is where nothing is said, and who runs all else.
const USER: i64 = 65_532;

/// What the controller was started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The image of Jobs whose policy names none
    pub image: String,
    /// When it is pulled: Always, IfNotPresent or Never; Kubernetes decides if `None`
    pub image_pull_policy: Option<String>,
    /// How long Jobs may take
    pub deadlines: Deadlines,
}

impl Settings {
    /// With this image, and all else as usual.
    pub fn new(image: impl Into<String>) -> Self {
        Settings {
            image: image.into(),
            image_pull_policy: None,
            deadlines: Deadlines::default(),
        }
    }
}

/// How long a Job may take, its retries included, before Kubernetes ends it: far longer than it should. A compaction's
/// is the policy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// A full snapshot
    pub full_snapshot: Duration,
    /// A delta snapshot
    pub delta_snapshot: Duration,
    /// Garbage collection
    pub retention: Duration,
    /// A verification
    pub verification: Duration,
    /// A maintenance of the live etcd
    pub maintenance: Duration,
    /// A restoration
    pub restoration: Duration,
    /// A copy, beside the time for which it waits for a final snapshot
    pub copy: Duration,
    /// How long a copy waits for a final snapshot if its task says nothing
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

/// What is done for a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Work {
    /// A full snapshot by schedule, or in place of a compaction
    FullSnapshot,
    /// A delta snapshot by schedule
    DeltaSnapshot,
    /// Deltas all the time
    Follow,
    /// The deltas become a full snapshot
    Compaction,
    /// Garbage collection
    Retention,
    /// A verification by schedule
    Verification,
    /// Compaction and defragmentation of the live etcd by schedule
    Maintenance,
    /// What a task wants
    Task,
}

impl Work {
    /// The value of the label [`LABEL_WORK`].
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A policy's name.
pub fn name_of(policy: &EtcdBackupPolicy) -> &str {
    policy.metadata.name.as_deref().unwrap_or_default()
}

/// The labels of what is made for a policy.
pub fn labels(policy: &EtcdBackupPolicy, work: Work) -> BTreeMap<String, String> {
    let mut labels = labels_of_all(policy);
    labels.insert(LABEL_WORK.to_owned(), work.as_str().to_owned());
    labels
}

fn labels_of_all(policy: &EtcdBackupPolicy) -> BTreeMap<String, String> {
    let mut labels = labels_of_ours();
    labels.insert(LABEL_POLICY.to_owned(), name_of(policy).to_owned());
    labels
}

fn labels_of_ours() -> BTreeMap<String, String> {
    let own = [(LABEL_NAME, NAME), (LABEL_MANAGED_BY, NAME)];
    own.map(|(k, v)| (k.to_owned(), v.to_owned())).into()
}

/// Those of the policy's template and ours, which win.
fn labels_of_pods(
    policy: &EtcdBackupPolicy,
    ours: BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut labels = policy.spec.job_template.labels.clone();
    labels.extend(ours);
    labels
}

/// The reference that has Kubernetes delete what belongs to an object that is gone.
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

/// Exit codes that a retry cannot mend. A process that a signal ended is not judged by its code.
pub fn final_exit_codes() -> Vec<i32> {
    let wrong = Reason::ALL
        .iter()
        .filter(|r| !r.is_retryable() && **r != Reason::Terminated);
    let codes: BTreeSet<i32> = wrong.map(|r| i32::from(r.exit_code())).collect();
    codes.into_iter().collect()
}

/// As docs/exit-codes.md has it.
fn pod_failure_policy(containers: &[&str]) -> PodFailurePolicy {
    let fail = containers.iter().map(|name| PodFailurePolicyRule {
        action: "FailJob".to_owned(),
        on_exit_codes: Some(PodFailurePolicyOnExitCodesRequirement {
            container_name: Some((*name).to_owned()),
            operator: "In".to_owned(),
            values: final_exit_codes(),
        }),
        on_pod_conditions: None,
    });
    let ignore = PodFailurePolicyRule {
        action: "Ignore".to_owned(),
        on_exit_codes: None,
        on_pod_conditions: Some(vec![PodFailurePolicyOnPodConditionsPattern {
            status: Some("True".to_owned()),
            type_: "DisruptionTarget".to_owned(),
        }]),
    };
    PodFailurePolicy {
        rules: fail.chain([ignore]).collect(),
    }
}

fn seconds(d: Duration) -> i64 {
    let seconds = d.clamp(Duration::from_secs(1), LONGEST_DEADLINE).as_secs();
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

fn job_spec(pod: Pod<'_>, deadline: Duration, labels: BTreeMap<String, String>) -> JobSpec {
    let containers: &[&str] = match pod.has_container_before() {
        true => &[CONTAINER, CONTAINER_BEFORE],
        false => &[CONTAINER],
    };
    JobSpec {
        active_deadline_seconds: Some(seconds(deadline)),
        backoff_limit: Some(BACKOFF_LIMIT),
        pod_failure_policy: Some(pod_failure_policy(containers)),
        template: pod.template(labels),
        ..JobSpec::default()
    }
}

/// A duration of the API. What cannot be read is told by [`problems`]; until it is mended, nothing is made.
fn duration(given: &TextValue<Span>) -> Duration {
    given.value().unwrap_or_default().0
}

/// The time zone of all schedules.
fn time_zone(policy: &EtcdBackupPolicy) -> &str {
    let snapshot = policy.spec.snapshot.as_ref();
    snapshot
        .and_then(|s| s.time_zone.as_deref())
        .unwrap_or("Etc/UTC")
}

fn full_snapshot<'a>(policy: &'a EtcdBackupPolicy, settings: &'a Settings) -> Pod<'a> {
    Pod::new(policy, settings, &["snapshot", "full"])
        .store(false)
        .live()
        .recipients()
        .compression()
        .snapshot_leases()
        .metrics()
}

fn delta_snapshot<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    fulls_have_a_schedule: bool,
) -> Pod<'a> {
    let pod = Pod::new(policy, settings, &["snapshot", "delta"])
        .store(false)
        .live()
        .recipients()
        .compression()
        .snapshot_leases()
        .metrics();
    match fulls_have_a_schedule {
        // A weekly full is not to become a daily one.
        true => pod.flag("--max-full-age", "0s"),
        false => pod,
    }
}

fn compaction<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    wanted: Option<&OnDemandCompactionConfig>,
) -> Pod<'a> {
    let compaction = &policy.spec.compaction;
    let wanted = wanted.cloned().unwrap_or_default();
    let keep_history = wanted.history.keep_history;
    let keep_history = keep_history.or_else(|| compaction.history.keep_history.clone());
    Pod::new(policy, settings, &["compact"])
        .store(false)
        .recipients()
        .compression()
        .snapshot_leases()
        .metrics()
        .resources(compaction.resources.as_ref())
        .options(&OnDemandCompactionConfig {
            history: History { keep_history },
            ..wanted
        })
}

fn verification<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    level: Level,
    against_cluster: bool,
) -> Pod<'a> {
    let of_backup = || {
        Pod::new(policy, settings, &["verify"])
            .store(true)
            .options(&Thoroughness { level: Some(level) })
    };
    match against_cluster {
        false => of_backup().metrics(),
        // The comparison looks at one state alone, and takes no level: the backup by itself comes first.
        true => Pod::new(policy, settings, &["verify"])
            .store(true)
            .live()
            .metrics()
            .after(of_backup()),
    }
}

fn maintenance<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    upkeep: &Upkeep,
) -> Pod<'a> {
    // Nothing is compacted that is not saved in the store, and the lock that keeps a second run away is there.
    Pod::new(policy, settings, &["maintain"])
        .store(false)
        .recipients()
        .live()
        .lock("maintain")
        .metrics()
        .options(upkeep)
}

fn retention<'a>(policy: &'a EtcdBackupPolicy, settings: &'a Settings) -> Option<Pod<'a>> {
    let retention = policy.spec.retention.as_ref()?;
    let pod = Pod::new(policy, settings, &["gc"])
        .store(false)
        .recipients()
        .metrics()
        .options(&retention.rules)
        .switch("--apply");
    Some(pod)
}

/// The CronJobs of a policy: what its schedules name. A follower takes fulls itself, so that beside it there is none
/// for them.
pub fn cron_jobs(
    policy: &EtcdBackupPolicy,
    settings: &Settings,
    postpone_maintenance: bool,
) -> Vec<CronJob> {
    let spec = &policy.spec;
    let deadlines = &settings.deadlines;
    let mut jobs = Vec::new();
    let mut add = |work, suffix: &str, schedule: &str, deadline, pod| {
        let postponed = work == Work::Maintenance && postpone_maintenance;
        let suspend = spec.suspend || postponed;
        jobs.push(cron_job(
            policy, work, suffix, schedule, suspend, deadline, pod,
        ));
    };
    if let (Some(snapshot), Some(_)) = (&spec.snapshot, &spec.etcd) {
        if let (Some(schedule), None) = (&snapshot.full_schedule, &snapshot.follow) {
            let pod = full_snapshot(policy, settings);
            let deadline = deadlines.full_snapshot;
            add(Work::FullSnapshot, "full", schedule, deadline, pod);
        }
        if let (Some(schedule), None) = (&snapshot.delta_schedule, &snapshot.follow) {
            let has_fulls = snapshot.full_schedule.is_some();
            let pod = delta_snapshot(policy, settings, has_fulls);
            let deadline = deadlines.delta_snapshot;
            add(Work::DeltaSnapshot, "delta", schedule, deadline, pod);
        }
    }
    if let (Some(wanted), Some(pod)) = (&spec.retention, retention(policy, settings)) {
        let deadline = deadlines.retention;
        add(Work::Retention, "gc", &wanted.schedule, deadline, pod);
    }
    if let Some(wanted) = &spec.verify {
        let against = wanted.against_cluster && spec.etcd.is_some();
        let pod = verification(policy, settings, wanted.level, against);
        let deadline = deadlines.verification;
        add(
            Work::Verification,
            "verify",
            &wanted.schedule,
            deadline,
            pod,
        );
    }
    if let (Some(wanted), Some(_)) = (&spec.maintenance, &spec.etcd) {
        let pod = maintenance(policy, settings, &wanted.upkeep);
        let deadline = deadlines.maintenance;
        add(
            Work::Maintenance,
            "maintain",
            &wanted.schedule,
            deadline,
            pod,
        );
    }
    jobs
}

fn cron_job(
    policy: &EtcdBackupPolicy,
    work: Work,
    suffix: &str,
    schedule: &str,
    suspend: bool,
    deadline: Duration,
    pod: Pod<'_>,
) -> CronJob {
    let of_jobs = labels_of_pods(policy, labels(policy, work));
    let name = format!("{}-{suffix}", name_of(policy));
    CronJob {
        metadata: metadata(policy, &name, labels(policy, work)),
        spec: CronJobSpec {
            schedule: schedule.to_owned(),
            time_zone: Some(time_zone(policy).to_owned()),
            concurrency_policy: Some("Forbid".to_owned()),
            starting_deadline_seconds: Some(STARTING_DEADLINE_SECONDS),
            suspend: Some(suspend),
            successful_jobs_history_limit: Some(1),
            failed_jobs_history_limit: Some(3),
            job_template: JobTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(of_jobs.clone()),
                    ..ObjectMeta::default()
                }),
                spec: Some(job_spec(pod, deadline, of_jobs)),
            },
        },
        status: None,
    }
}

/// The Deployment that follows the etcd, where the policy wants one. Suspended it has no replica.
pub fn follower(policy: &EtcdBackupPolicy, settings: &Settings) -> Option<Deployment> {
    let snapshot = policy.spec.snapshot.as_ref()?;
    let wanted = snapshot.follow.as_ref()?;
    policy.spec.etcd.as_ref()?;
    let mut pod = Pod::new(policy, settings, &["snapshot", "follow"])
        .store(false)
        .live()
        .recipients()
        .compression()
        .snapshot_leases()
        .lock("follow")
        .spool()
        .following(FOLLOWER_GRACE_SECONDS)
        .options(wanted);
    if let Some(schedule) = &snapshot.full_schedule {
        pod = pod.flag("--full-schedule", schedule);
    }
    pod = pod.flag("--time-zone", time_zone(policy));
    let ours = labels(policy, Work::Follow);
    let selector = [LABEL_NAME, LABEL_POLICY, LABEL_WORK];
    let selector = selector
        .iter()
        .filter_map(|key| Some(((*key).to_owned(), ours.get(*key)?.clone())));
    let name = format!("{}-follow", name_of(policy));
    Some(Deployment {
        metadata: metadata(policy, &name, ours.clone()),
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
            template: pod.template(labels_of_pods(policy, ours)),
            ..DeploymentSpec::default()
        },
        status: None,
    })
}

/// The service account of a policy's Pods.
pub fn service_account_name(policy: &EtcdBackupPolicy) -> String {
    let given = policy.spec.job_template.service_account_name.clone();
    given.unwrap_or_else(|| ACCOUNT.to_owned())
}

/// The service account of all Jobs in a namespace, for policies that name none of their own, and the RoleBinding that
/// lets it renew Leases there. No policy owns them.
pub fn account(namespace: &str) -> (ServiceAccount, RoleBinding) {
    let metadata = ObjectMeta {
        name: Some(ACCOUNT.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(labels_of_ours()),
        ..ObjectMeta::default()
    };
    let account = ServiceAccount {
        metadata: metadata.clone(),
        // A Pod that needs the token says so.
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    };
    let binding = RoleBinding {
        metadata,
        role_ref: RoleRef {
            api_group: Some("rbac.authorization.k8s.io".to_owned()),
            kind: "ClusterRole".to_owned(),
            name: ACCOUNT.to_owned(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name: ACCOUNT.to_owned(),
            namespace: Some(namespace.to_owned()),
            api_group: None,
        }]),
    };
    (account, binding)
}

/// What the names of the snapshot Leases begin with.
pub fn lease_prefix(policy: &EtcdBackupPolicy) -> &str {
    let snapshot = policy.spec.snapshot.as_ref();
    snapshot
        .and_then(|s| s.lease_prefix.as_deref())
        .unwrap_or_else(|| name_of(policy))
}

/// The names of the snapshot Leases: that of fulls, and that of deltas.
pub fn lease_names(policy: &EtcdBackupPolicy) -> (String, String) {
    let prefix = lease_prefix(policy);
    (
        format!("{prefix}{FULL_LEASE_SUFFIX}"),
        format!("{prefix}{DELTA_LEASE_SUFFIX}"),
    )
}

/// The snapshot Leases, empty: for the case that they are not there. They outlive nothing: etcd-druid's, which are
/// there already, are left as they are.
pub fn leases(policy: &EtcdBackupPolicy) -> [Lease; 2] {
    let (full, delta) = lease_names(policy);
    [full, delta].map(|name| empty_lease(policy, &name))
}

/// Leases that are locks, empty: for stores that cannot keep a lock themselves. Everywhere else there are none.
pub fn lock_leases(policy: &EtcdBackupPolicy) -> Vec<Lease> {
    let of = |what: &str| empty_lease(policy, &lock_lease_name(policy, what));
    let spec = &policy.spec;
    match locks_are_leases(policy) && spec.etcd.is_some() {
        true => vec![of("follow"), of("maintain")],
        false => Vec::new(),
    }
}

/// Whether the store cannot keep a lock.
fn locks_are_leases(policy: &EtcdBackupPolicy) -> bool {
    Family::of(&policy.spec.store.url).is_some_and(|family| !family.keeps_locks())
}

fn lock_lease_name(policy: &EtcdBackupPolicy, what: &str) -> String {
    format!("{}-{what}-lock", name_of(policy))
}

fn empty_lease(policy: &EtcdBackupPolicy, name: &str) -> Lease {
    Lease {
        metadata: metadata(policy, name, labels_of_all(policy)),
        spec: Some(LeaseSpec::default()),
    }
}

/// The name of a threshold's Job. The same state gives the same name, so that a second one is refused.
pub fn compaction_job_name(
    policy: &EtcdBackupPolicy,
    full_revision: i64,
    delta_revision: i64,
    attempt: u32,
    full_snapshot_instead: bool,
) -> String {
    let state = format!("{full_revision}/{delta_revision}/{attempt}");
    let hash = short_hash(state, 4);
    let what = match full_snapshot_instead {
        true => "fullsnap",
        false => "compact",
    };
    format!("{}-{what}-{hash}", name_of(policy))
}

/// The Job of a crossed threshold: a compaction, or a full snapshot in its place (for which the policy needs an etcd).
pub fn compaction_job(
    policy: &EtcdBackupPolicy,
    settings: &Settings,
    name: &str,
    full_snapshot_instead: bool,
    annotations: BTreeMap<String, String>,
) -> Job {
    let (work, pod, deadline) = match full_snapshot_instead {
        true => (
            Work::FullSnapshot,
            full_snapshot(policy, settings),
            settings.deadlines.full_snapshot,
        ),
        false => (
            Work::Compaction,
            compaction(policy, settings, None),
            duration(&policy.spec.compaction.active_deadline),
        ),
    };
    let labels = labels_of_pods(policy, labels(policy, work));
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

/// The name of a task's Job.
pub fn task_job_name(task: &EtcdBackupTask) -> String {
    let name = task.metadata.name.as_deref().unwrap_or_default();
    let uid: String = task.metadata.uid.iter().flat_map(|u| u.chars()).collect();
    let uid: String = uid.chars().take(8).collect();
    format!("{name}-{uid}")
}

/// The Job of a task of a policy. It belongs to the task alone, and is deleted with it.
pub fn task_job(policy: &EtcdBackupPolicy, task: &EtcdBackupTask, settings: &Settings) -> Job {
    let none = TaskConfig::default();
    let config = task.spec.config.as_ref().unwrap_or(&none);
    let (pod, deadline) = task_pod(policy, task.spec.type_, config, settings);
    let mut ours = labels(policy, Work::Task);
    let name = task.metadata.name.clone().unwrap_or_default();
    ours.insert(LABEL_TASK.to_owned(), name);
    let type_ = task.spec.type_.as_str().to_owned();
    ours.insert(LABEL_TASK_TYPE.to_owned(), type_);
    let labels = labels_of_pods(policy, ours);
    Job {
        metadata: metadata(task, &task_job_name(task), labels.clone()),
        spec: Some(job_spec(pod, deadline, labels)),
        status: None,
    }
}

fn task_pod<'a>(
    policy: &'a EtcdBackupPolicy,
    type_: TaskType,
    config: &'a TaskConfig,
    settings: &'a Settings,
) -> (Pod<'a>, Duration) {
    let deadlines = &settings.deadlines;
    match type_ {
        TaskType::OnDemandSnapshot => {
            let wanted = config.on_demand_snapshot.as_ref();
            let is_delta = wanted.is_some_and(|c| c.type_ == SnapshotType::Delta);
            let mut marks = wanted.map(|c| c.marks.clone()).unwrap_or_default();
            marks.is_final &= !is_delta;
            let (pod, deadline) = match is_delta {
                true => (
                    delta_snapshot(policy, settings, true),
                    deadlines.delta_snapshot,
                ),
                false => (full_snapshot(policy, settings), deadlines.full_snapshot),
            };
            (pod.options(&marks), deadline)
        }
        TaskType::OnDemandCompaction => {
            let wanted = config.on_demand_compaction.as_ref();
            let deadline = duration(&policy.spec.compaction.active_deadline);
            (compaction(policy, settings, wanted), deadline)
        }
        TaskType::CopyBackups => copy(policy, config, settings),
        TaskType::Restore => {
            let pod = restoration(policy, config.restore.as_ref(), settings);
            (pod, deadlines.restoration)
        }
        TaskType::Verify => {
            let wanted = config.verify.as_ref();
            let of_policy = policy.spec.verify.as_ref().map(|v| v.level);
            let level = wanted.and_then(|c| c.depth.level).or(of_policy);
            let against = wanted.is_some_and(|c| c.against_cluster) && policy.spec.etcd.is_some();
            let level = level.unwrap_or_default();
            (
                verification(policy, settings, level, against),
                deadlines.verification,
            )
        }
        TaskType::Maintenance => {
            let wanted = config.maintenance.clone().unwrap_or_default();
            (
                maintenance(policy, settings, &wanted.upkeep),
                deadlines.maintenance,
            )
        }
    }
}

/// From one store to the other.
fn copy<'a>(
    policy: &'a EtcdBackupPolicy,
    config: &'a TaskConfig,
    settings: &'a Settings,
) -> (Pod<'a>, Duration) {
    let wanted = config.copy_backups.as_ref();
    let source = wanted.and_then(|c| c.source_store.as_ref());
    let target = wanted.and_then(|c| c.target_store.as_ref());
    let mut pod = Pod::new(policy, settings, &["copy"])
        .side(Side::Source, source.unwrap_or(&policy.spec.store))
        .side(Side::Target, target.unwrap_or(&policy.spec.store))
        .identities()
        .metrics();
    // What comes into the policy's own store is encrypted as the rest of it; what leaves it stays as it is.
    if target.is_none() {
        pod = pod.recipients();
    }
    if let Some(wanted) = wanted {
        pod = pod.options(&wanted.most);
    }
    let deadlines = &settings.deadlines;
    let waits = wanted.and_then(|c| c.wait_for_final_snapshot.as_ref());
    let Some(waits) = waits.filter(|w| w.enabled) else {
        return (pod, deadlines.copy);
    };
    pod = pod.switch("--wait-for-final");
    let timeout = match &waits.timeout {
        None => deadlines.final_snapshot,
        Some(timeout) => {
            pod = pod.duration("--wait-timeout", timeout);
            duration(timeout)
        }
    };
    (pod, deadlines.copy.saturating_add(timeout))
}

fn restoration<'a>(
    policy: &'a EtcdBackupPolicy,
    wanted: Option<&'a RestoreConfig>,
    settings: &'a Settings,
) -> Pod<'a> {
    let pod = Pod::new(policy, settings, &["restore"]).store(true);
    let Some(wanted) = wanted else { return pod };
    let path = wanted.sub_path.as_deref().unwrap_or("default.etcd");
    pod.claim(&wanted.claim_name, DATA_VOLUME)
        .user(wanted.run_as_user.unwrap_or(USER))
        .flag("--data-dir", &format!("{DATA_VOLUME}/{path}"))
        .options(&restore::SharedOptions {
            membership: wanted.wanted.membership.clone().complete(),
            ..wanted.wanted.clone()
        })
}
