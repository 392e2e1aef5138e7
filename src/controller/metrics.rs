//! Metrics of the controller.
//!
//! Counters are incremented by the loop in `controller`; ages, conditions and running Jobs are computed from
//! the caches at each scrape. It does not serve them: `cli::controller` does.

use super::api::{EtcdBackupPolicy, EtcdBackupTask, TaskState, TaskType};
use super::cluster::{Cluster, Group, Tables};
use super::decide::{self, FailedRun};
use super::facts::threshold_jobs;
use super::names::{NamespacedName, owner};
use crate::base::lock;
use crate::controller::facts::leases::LeaseFacts;
use crate::error::Error;
use crate::telemetry::endpoint::Exposition;
use chrono::Utc;
use kube::ResourceExt;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use strum::VariantArray;

const PREFIX: &str = "deltafold";
/// The buckets of the histograms, in seconds: from a trivial Job to the default deadline of a compaction.
const DURATIONS: [f64; 10] = [
    2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 10_800.0,
];

type Labels<const N: usize> = [(&'static str, String); N];

fn durations() -> Histogram {
    Histogram::new(DURATIONS)
}

/// The number of failed Jobs by policy, kind and reason.
type FailureCounts = BTreeMap<(NamespacedName, String, String), u64>;

#[derive(Debug, Clone, Default)]
struct JobFailures(Arc<Mutex<FailureCounts>>);

impl Collector for JobFailures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = lock(&self.0);
        let samples = counts.iter().map(|((policy, kind, reason), count)| {
            let [namespace, name] = policy_labels(policy);
            let kind = ("kind", kind.clone());
            let labels = [namespace, name, kind, ("reason", reason.clone())];
            (labels, ConstCounter::new(*count))
        });
        let help = "Failed scheduled Jobs of a policy";
        encode_samples(
            &mut encoder,
            MetricType::Counter,
            "job_failures",
            help,
            samples,
        )
    }
}

/// Encodes a metric with these labels and values.
fn encode_samples<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    type_: MetricType,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (Labels<N>, impl EncodeMetric)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, type_)?;
    for (labels, value) in samples {
        value.encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// The metrics of a controller. Clones share them.
#[derive(Clone)]
pub struct ControllerMetrics {
    registry: Arc<Registry>,
    /// The caches to compute metrics from, once there are any.
    cluster: SharedCluster,
    leader: Gauge,
    compactions: Family<Labels<1>, Counter>,
    compaction_seconds: Histograms<1>,
    delta_events: Family<Labels<2>, Gauge>,
    job_failures: JobFailures,
    tasks: Family<Labels<4>, Counter>,
    task_seconds: Histograms<4>,
    errors: Family<Labels<1>, Counter>,
}

impl fmt::Debug for ControllerMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControllerMetrics")
    }
}

impl Default for ControllerMetrics {
    fn default() -> Self {
        Self::new()
    }
}

type SharedCluster = Arc<Mutex<Weak<Cluster>>>;

/// The metrics that are computed from the caches at each scrape.
#[derive(Debug)]
struct CacheCollector(SharedCluster);

impl Collector for CacheCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let cluster = lock(&self.0).upgrade();
        let Some(cluster) = cluster else {
            return Ok(());
        };
        let tables = cluster.tables();
        let policies: Vec<_> = tables.policies.all().map(|(_, p)| p.clone()).collect();
        encode_samples(
            &mut encoder,
            MetricType::Gauge,
            "seconds_since_last_snapshot",
            "Time since the newest snapshot of a kind was saved, by its Lease; before the first one, the age of the policy",
            policies
                .iter()
                .flat_map(|policy| snapshot_ages(&tables, policy)),
        )?;
        encode_samples(
            &mut encoder,
            MetricType::Gauge,
            "policy_condition",
            "1 for the current status and reason of each condition of a policy",
            policies.iter().flat_map(|policy| conditions(policy)),
        )?;
        encode_samples(
            &mut encoder,
            MetricType::Gauge,
            "compaction_jobs_current",
            "Running compaction Jobs that were started by a threshold",
            running_jobs(&tables, &policies),
        )
    }
}

fn snapshot_ages(
    tables: &Tables,
    policy: &EtcdBackupPolicy,
) -> impl Iterator<Item = (Labels<3>, ConstGauge<f64>)> {
    let [namespace, name] = policy_labels(&NamespacedName::of(policy));
    let ages = decide::snapshot_ages(policy, &LeaseFacts::of(tables, policy), Utc::now());
    ages.into_iter().map(move |(kind, seconds)| {
        let labels = [namespace.clone(), name.clone(), ("kind", kind.to_owned())];
        (labels, ConstGauge::new(seconds))
    })
}

fn conditions(policy: &EtcdBackupPolicy) -> impl Iterator<Item = (Labels<5>, ConstGauge<i64>)> {
    let [namespace, name] = policy_labels(&NamespacedName::of(policy));
    let conditions = policy.status.iter().flat_map(|s| &s.conditions);
    conditions.map(move |condition| {
        let labels = [
            namespace.clone(),
            name.clone(),
            ("type", condition.type_.clone()),
            ("status", condition.status.as_str().to_owned()),
            ("reason", condition.reason.clone()),
        ];
        (labels, ConstGauge::new(1))
    })
}

/// Returns the number of running threshold Jobs of each namespace that has policies.
fn running_jobs(
    tables: &Tables,
    policies: &[Arc<EtcdBackupPolicy>],
) -> impl Iterator<Item = (Labels<1>, ConstGauge<i64>)> {
    let mut running: BTreeMap<String, i64> = BTreeMap::new();
    for policy in policies {
        running
            .entry(NamespacedName::of(&**policy).namespace)
            .or_default();
    }
    let uids: BTreeSet<String> = policies.iter().filter_map(|p| p.uid()).collect();
    for job in tables.jobs.in_group(&Group::Unfinished) {
        let is_own = owner(&**job).is_some_and(|uid| uids.contains(uid));
        if is_own && threshold_jobs::is_of_threshold(job) {
            *running
                .entry(NamespacedName::of(&**job).namespace)
                .or_default() += 1;
        }
    }
    let running = running.into_iter();
    running.map(|(namespace, count)| ([("namespace", namespace)], ConstGauge::new(count)))
}

impl ControllerMetrics {
    /// Returns new metrics, all zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The version of the program", version);
        let leader = Gauge::default();
        registry.register("leader", "1 if this replica is the leader", leader.clone());
        let compactions = Family::default();
        registry.register(
            "compaction_jobs",
            "Finished compaction Jobs that were started by a threshold",
            compactions.clone(),
        );
        let compaction_seconds: Histograms<1> = Family::new_with_constructor(durations);
        registry.register_with_unit(
            "compaction_job_duration",
            "The duration of compaction Jobs",
            Unit::Seconds,
            compaction_seconds.clone(),
        );
        let delta_events = Family::default();
        registry.register(
            "compaction_num_delta_events",
            "Revisions since the last full when the last compaction Job of a policy was started",
            delta_events.clone(),
        );
        let job_failures = JobFailures::default();
        registry.register_collector(Box::new(job_failures.clone()));
        let tasks = Family::default();
        registry.register("tasks", "Finished tasks", tasks.clone());
        let task_seconds: Histograms<4> = Family::new_with_constructor(durations);
        registry.register_with_unit(
            "task_duration",
            "The duration of tasks, from the start of their Job",
            Unit::Seconds,
            task_seconds.clone(),
        );
        let errors = Family::default();
        registry.register(
            "reconcile_errors",
            "Failed reconciles, each of which is retried",
            errors.clone(),
        );
        let cluster = Arc::new(Mutex::new(Weak::new()));
        registry.register_collector(Box::new(CacheCollector(cluster.clone())));
        ControllerMetrics {
            registry: Arc::new(registry),
            cluster,
            leader,
            compactions,
            compaction_seconds,
            delta_events,
            job_failures,
            tasks,
            task_seconds,
            errors,
        }
    }

    /// Returns a function that renders the metrics as OpenMetrics text.
    pub fn exposition(&self) -> Exposition {
        let registry = self.registry.clone();
        Arc::new(move || {
            let mut text = String::new();
            text::encode(&mut text, &registry)
                .map_err(|_| Error::internal("the metrics cannot be encoded"))?;
            Ok(text)
        })
    }

    /// Sets the caches to compute metrics from.
    pub(super) fn show(&self, cluster: &Arc<Cluster>) {
        *lock(&self.cluster) = Arc::downgrade(cluster);
    }

    pub(super) fn set_leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    pub(super) fn reconcile_failed(&self, controller: &str) {
        let labels = [("controller", controller.to_owned())];
        self.errors.get_or_create(&labels).inc();
    }

    /// Records the start of a threshold's Job: the number of revisions since the last full.
    pub fn compaction_started(&self, policy: &NamespacedName, revisions: i64) {
        self.delta_events
            .get_or_create(&policy_labels(policy))
            .set(revisions);
    }

    /// Counts a scheduled Job that has failed.
    pub fn job_failed(&self, policy: &NamespacedName, failure: &FailedRun) {
        let (kind, reason) = (failure.kind.clone(), failure.reason.clone());
        let mut counts = lock(&self.job_failures.0);
        *counts.entry((policy.clone(), kind, reason)).or_default() += 1;
    }

    /// Removes the metrics of a policy that is gone.
    pub fn forget(&self, policy: &NamespacedName) {
        self.delta_events.remove(&policy_labels(policy));
        lock(&self.job_failures.0).retain(|(of, _, _), _| of != policy);
        for type_ in TaskType::VARIANTS {
            for state in TaskState::FINAL {
                let labels = task_labels(policy, *type_, state);
                self.tasks.remove(&labels);
                self.task_seconds.remove(&labels);
            }
        }
    }

    /// Counts a compaction Job that has ended, and its duration.
    pub fn compaction_ended(&self, succeeded: bool, took: Duration) {
        let labels = [("succeeded", succeeded.to_string())];
        self.compactions.get_or_create(&labels).inc();
        let seconds = self.compaction_seconds.get_or_create(&labels);
        seconds.observe(took.as_secs_f64());
    }

    /// Counts a task that has ended. `took` is the duration of its Job, if it had one.
    pub fn task_ended(&self, task: &EtcdBackupTask, state: TaskState, took: Option<Duration>) {
        let policy = NamespacedName::new(task.namespace().unwrap_or_default(), &task.spec.policy);
        let labels = task_labels(&policy, task.spec.type_, state);
        self.tasks.get_or_create(&labels).inc();
        if let Some(took) = took {
            let seconds = self.task_seconds.get_or_create(&labels);
            seconds.observe(took.as_secs_f64());
        }
    }
}

fn policy_labels(policy: &NamespacedName) -> Labels<2> {
    [
        ("namespace", policy.namespace.clone()),
        ("policy", policy.name.clone()),
    ]
}

fn task_labels(policy: &NamespacedName, type_: TaskType, state: TaskState) -> Labels<4> {
    [
        ("type", type_.as_str().to_owned()),
        ("state", state.as_str().to_owned()),
        ("policy", policy.name.clone()),
        ("namespace", policy.namespace.clone()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_those_of_the_alerts() {
        let metrics = ControllerMetrics::new();
        metrics.set_leader(true);
        metrics.reconcile_failed("task");
        let policy = NamespacedName::new("a", "b");
        metrics.compaction_started(&policy, 7);
        metrics.compaction_ended(false, Duration::from_secs(3));
        let failure = FailedRun {
            kind: "full".to_owned(),
            reason: "NoSpace".to_owned(),
            text: String::new(),
        };
        metrics.job_failed(&policy, &failure);
        let labels = task_labels(&policy, TaskType::Verify, TaskState::Failed);
        metrics.tasks.get_or_create(&labels).inc();
        let text = metrics.exposition()().unwrap();
        for line in [
            "deltafold_leader 1",
            "deltafold_reconcile_errors_total{controller=\"task\"} 1",
            "deltafold_compaction_num_delta_events{namespace=\"a\",policy=\"b\"} 7",
            "deltafold_job_failures_total{namespace=\"a\",policy=\"b\",kind=\"full\",reason=\"NoSpace\"} 1",
            "deltafold_compaction_jobs_total{succeeded=\"false\"} 1",
            "deltafold_compaction_job_duration_seconds_count{succeeded=\"false\"} 1",
            "deltafold_tasks_total{type=\"Verify\",state=\"Failed\",policy=\"b\",namespace=\"a\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
