//! The controller's own metrics.
//!
//! It counts what it is told; ages are computed when somebody looks. `cli::controller` serves them.

use super::api::{TaskState, TaskType};
use super::names::owner;
use super::observe::World;
use super::observe::{outcome, threshold_jobs};
use super::plan;
use crate::base::lock;
use crate::error::Error;
use crate::telemetry::endpoint::Exposition;
use chrono::Utc;
use kube::ResourceExt;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
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
/// From a trivial Job to the default deadline of a compaction.
const DURATIONS: [f64; 10] = [
    2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 10_800.0,
];

type Labels<const N: usize> = [(&'static str, String); N];

fn durations() -> Histogram {
    Histogram::new(DURATIONS)
}

type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// What is shown at `/metrics`. Clones are the same metrics.
#[derive(Clone)]
pub struct ControllerMetrics {
    registry: Arc<Registry>,
    shown: Arc<Mutex<Weak<World>>>,
    leader: Gauge,
    compactions: Family<Labels<1>, Counter>,
    compaction_seconds: Histograms<1>,
    delta_events: Family<Labels<2>, Gauge>,
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

/// What the caches tell at the time of the scrape: how old the newest snapshots are, how policies are, which Jobs run.
#[derive(Debug)]
struct Seen(Arc<Mutex<Weak<World>>>);

impl Collector for Seen {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let shown = lock(&self.0);
        let Some(world) = shown.upgrade() else {
            return Ok(());
        };
        drop(shown);
        let gauge = MetricType::Gauge;
        let policies = world.policies();
        let mut metric = encoder.encode_descriptor(
            "seconds_since_last_snapshot",
            "How long ago the newest snapshot of a kind was saved, by its Lease; before the first one, how old the policy is",
            None,
            gauge,
        )?;
        for policy in &policies {
            let namespace = policy.namespace().unwrap_or_default();
            for (kind, seconds) in plan::snapshot_ages(policy, &world.facts(policy), Utc::now()) {
                let labels = [
                    ("namespace", namespace.clone()),
                    ("policy", policy.name_any()),
                    ("kind", kind.to_owned()),
                ];
                ConstGauge::new(seconds).encode(metric.encode_family(&labels)?)?;
            }
        }
        let mut metric = encoder.encode_descriptor(
            "policy_condition",
            "1 for what each condition of a policy is, and why",
            None,
            gauge,
        )?;
        for policy in &policies {
            let conditions = policy.status.iter().flat_map(|s| &s.conditions);
            for condition in conditions {
                let labels = [
                    ("namespace", policy.namespace().unwrap_or_default()),
                    ("policy", policy.name_any()),
                    ("type", condition.type_.clone()),
                    ("status", condition.status.as_str().to_owned()),
                    ("reason", condition.reason.clone()),
                ];
                ConstGauge::new(1).encode(metric.encode_family(&labels)?)?;
            }
        }
        let mut running: BTreeMap<String, i64> = BTreeMap::new();
        for policy in &policies {
            running
                .entry(policy.namespace().unwrap_or_default())
                .or_default();
        }
        let uids: BTreeSet<String> = policies.iter().filter_map(|p| p.uid()).collect();
        for job in world.jobs() {
            let is_own = owner(&*job).is_some_and(|uid| uids.contains(uid));
            if is_own && threshold_jobs::is_of_threshold(&job) && !outcome::is_finished(&job) {
                *running
                    .entry(job.namespace().unwrap_or_default())
                    .or_default() += 1;
            }
        }
        let mut metric = encoder.encode_descriptor(
            "compaction_jobs_current",
            "Compaction Jobs started by a threshold that run now",
            None,
            gauge,
        )?;
        for (namespace, count) in running {
            let labels = [("namespace", namespace)];
            ConstGauge::new(count).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

impl ControllerMetrics {
    /// Metrics of which nothing is known yet.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The program that is running", version);
        let leader = Gauge::default();
        registry.register(
            "leader",
            "1 where this replica is the leader",
            leader.clone(),
        );
        let compactions = Family::default();
        registry.register(
            "compaction_jobs",
            "Compaction Jobs started by a threshold that have ended",
            compactions.clone(),
        );
        let compaction_seconds: Histograms<1> = Family::new_with_constructor(durations);
        registry.register_with_unit(
            "compaction_job_duration",
            "How long compaction Jobs took",
            Unit::Seconds,
            compaction_seconds.clone(),
        );
        let delta_events = Family::default();
        registry.register(
            "compaction_num_delta_events",
            "Events that the last compaction Job of a policy was started for",
            delta_events.clone(),
        );
        let tasks = Family::default();
        registry.register("tasks", "Tasks that have ended", tasks.clone());
        let task_seconds: Histograms<4> = Family::new_with_constructor(durations);
        registry.register_with_unit(
            "task_duration",
            "How long tasks took, from the start of their Job",
            Unit::Seconds,
            task_seconds.clone(),
        );
        let errors = Family::default();
        registry.register(
            "reconcile_errors",
            "Reconciliations that failed and are tried again",
            errors.clone(),
        );
        let shown = Arc::new(Mutex::new(Weak::new()));
        registry.register_collector(Box::new(Seen(shown.clone())));
        ControllerMetrics {
            registry: Arc::new(registry),
            shown,
            leader,
            compactions,
            compaction_seconds,
            delta_events,
            tasks,
            task_seconds,
            errors,
        }
    }

    /// As OpenMetrics text, for the endpoint.
    pub fn exposition(&self) -> Exposition {
        let registry = self.registry.clone();
        Arc::new(move || {
            let mut text = String::new();
            text::encode(&mut text, &registry)
                .map_err(|_| Error::internal("metrics that cannot be written down"))?;
            Ok(text)
        })
    }

    /// Whose caches are shown.
    pub(super) fn show(&self, world: &Arc<World>) {
        *lock(&self.shown) = Arc::downgrade(world);
    }

    pub(super) fn set_leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    pub(super) fn reconcile_failed(&self, controller: &str) {
        let labels = [("controller", controller.to_owned())];
        self.errors.get_or_create(&labels).inc();
    }

    /// A compaction Job was started, for so many events.
    pub fn compaction_started(&self, namespace: &str, policy: &str, events: u64) {
        let labels = [
            ("namespace", namespace.to_owned()),
            ("policy", policy.to_owned()),
        ];
        let events = i64::try_from(events).unwrap_or(i64::MAX);
        self.delta_events.get_or_create(&labels).set(events);
    }

    /// A policy is gone, and its tasks: nothing is shown of it any more.
    pub fn forget(&self, namespace: &str, policy: &str) {
        let labels = [
            ("namespace", namespace.to_owned()),
            ("policy", policy.to_owned()),
        ];
        self.delta_events.remove(&labels);
        for type_ in TaskType::VARIANTS {
            for state in TaskState::FINAL {
                let labels = of_tasks(namespace, policy, *type_, state);
                self.tasks.remove(&labels);
                self.task_seconds.remove(&labels);
            }
        }
    }

    /// A compaction Job has ended.
    pub fn compaction_ended(&self, succeeded: bool, took: Duration) {
        let labels = [("succeeded", succeeded.to_string())];
        self.compactions.get_or_create(&labels).inc();
        let seconds = self.compaction_seconds.get_or_create(&labels);
        seconds.observe(took.as_secs_f64());
    }

    /// A task has ended; `took` where it had a Job.
    pub fn task_ended(
        &self,
        namespace: &str,
        policy: &str,
        type_: TaskType,
        state: TaskState,
        took: Option<Duration>,
    ) {
        let labels = of_tasks(namespace, policy, type_, state);
        self.tasks.get_or_create(&labels).inc();
        if let Some(took) = took {
            let seconds = self.task_seconds.get_or_create(&labels);
            seconds.observe(took.as_secs_f64());
        }
    }
}

fn of_tasks(namespace: &str, policy: &str, type_: TaskType, state: TaskState) -> Labels<4> {
    [
        ("type", type_.as_str().to_owned()),
        ("state", state.as_str().to_owned()),
        ("policy", policy.to_owned()),
        ("namespace", namespace.to_owned()),
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
        metrics.compaction_started("a", "b", 7);
        metrics.compaction_ended(false, Duration::from_secs(3));
        metrics.task_ended("a", "b", TaskType::Verify, TaskState::Failed, None);
        let text = metrics.exposition()().unwrap();
        for line in [
            "deltafold_leader 1",
            "deltafold_reconcile_errors_total{controller=\"task\"} 1",
            "deltafold_compaction_num_delta_events{namespace=\"a\",policy=\"b\"} 7",
            "deltafold_compaction_jobs_total{succeeded=\"false\"} 1",
            "deltafold_compaction_job_duration_seconds_count{succeeded=\"false\"} 1",
            "deltafold_tasks_total{type=\"Verify\",state=\"Failed\",policy=\"b\",namespace=\"a\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
