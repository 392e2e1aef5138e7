//! The Prometheus metrics of the commands. `docs/metrics.md` lists names, labels and units.
//!
//! A metric is exposed only after it was set: a command that saves nothing has no last snapshot. Label values
//! come from small sets, or are names of members; they are never keys, values, URLs or parts of messages.
//! `endpoint` and `textfile` publish the metrics; `ops` and `cli` set them.
//! `cli` and `ops` record values; `telemetry::endpoint` and `telemetry::textfile` expose them.

use crate::base::lock;
use crate::error::{Error, Reason};
use chrono::{DateTime, Utc};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry, Unit};
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The prefix of all names.
const PREFIX: &str = "deltafold";

/// The histogram buckets in seconds, from a delta of a few events to a full of many gigabytes.
const DURATIONS: [f64; 12] = [
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
];

type Labels<const N: usize> = [(&'static str, String); N];
type Int = Gauge;
type Float = Gauge<f64, AtomicU64>;

/// A metric that is exposed after it was first used.
#[derive(Debug, Default)]
struct OnceKnown<M>(Arc<OnceLock<M>>);

impl<M> Clone for OnceKnown<M> {
    fn clone(&self) -> Self {
        OnceKnown(Arc::clone(&self.0))
    }
}

impl<M: Default> OnceKnown<M> {
    fn get(&self) -> &M {
        self.0.get_or_init(M::default)
    }
}

impl<M: EncodeMetric + TypedMetric> EncodeMetric for OnceKnown<M> {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        self.0.get().map_or(Ok(()), |m| m.encode(encoder))
    }

    fn metric_type(&self) -> MetricType {
        M::TYPE
    }

    fn is_empty(&self) -> bool {
        self.0.get().is_none()
    }
}

/// The age of something at the time of the scrape. It is exposed after it was first set.
#[derive(Debug, Clone, Default)]
struct Age(Arc<Mutex<Option<Since>>>);

/// The beginning by the wall clock, the time when it was set, and the age at that time. The age grows by the
/// monotonic clock, which does not jump. `None` if there is nothing that ages.
type Since = Option<(DateTime<Utc>, Instant, Duration)>;

impl Age {
    fn set(&self, since: Option<DateTime<Utc>>) {
        let mut age = lock(&self.0);
        let before = age.flatten();
        *age = Some(since.map(|since| match before {
            Some(same) if same.0 == since => same,
            _ => {
                let age_now = (Utc::now() - since).to_std().unwrap_or_default();
                (since, Instant::now(), age_now)
            }
        }));
    }
}

impl EncodeMetric for Age {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        let age = *lock(&self.0);
        let seconds = age.flatten().map_or(0.0, |(_, set_at, age)| {
            (set_at.elapsed() + age).as_secs_f64()
        });
        ConstGauge::new(seconds).encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }

    fn is_empty(&self) -> bool {
        let age = lock(&self.0);
        age.is_none()
    }
}

/// The value of the label `kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotKind {
    /// A full snapshot.
    Full,
    /// A delta snapshot.
    Delta,
}

impl SnapshotKind {
    fn labels(self) -> Labels<1> {
        let name = match self {
            SnapshotKind::Full => "full",
            SnapshotKind::Delta => "delta",
        };
        [("kind", name.to_owned())]
    }
}

/// A saved snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedSnapshot {
    /// The kind.
    pub kind: SnapshotKind,
    /// The time when it was saved.
    pub at: DateTime<Utc>,
    /// The newest revision in the snapshot.
    pub revision: i64,
    /// The size in the store, in bytes.
    pub stored_bytes: u64,
    /// The size before the compression in bytes, if known.
    pub uncompressed_bytes: Option<u64>,
}

/// The range of revisions that can be restored without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestorableWindow {
    /// The first revision.
    pub first_revision: i64,
    /// The last revision.
    pub last_revision: i64,
    /// The time of the first revision, if known.
    pub first_time: Option<DateTime<Utc>>,
    /// The time of the last revision, if known.
    pub last_time: Option<DateTime<Utc>>,
}

/// The figures of a compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompactionFigures {
    /// The number of folded deltas.
    pub deltas: u64,
    /// The number of events in these deltas.
    pub events: u64,
    /// The number of bytes read from the store.
    pub read_bytes: u64,
    /// The size of the new snapshot in the store in bytes, or 0 if none was written.
    pub written_bytes: u64,
}

/// The figures of a verification.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VerificationFigures {
    /// The number of findings for each reason, including those that do not fail the verification.
    pub findings: Vec<(&'static str, u64)>,
    /// The number of findings that fail the verification.
    pub errors: u64,
    /// The number of snapshots read.
    pub snapshots: u64,
    /// The number of bytes read from the store.
    pub read_bytes: u64,
    /// The time of the newest snapshot, and its age in seconds.
    pub newest: Option<(DateTime<Utc>, f64)>,
    /// Whether the restore drills succeeded, and how long they took; `None` if there was none.
    pub drill: Option<(bool, Duration)>,
}

/// Declares metrics: the field, its type, its unit, its name, and its help text.
macro_rules! metrics {
    ($($field:ident: $type:ty = $unit:ident($name:literal, $help:literal);)*) => {
        /// The metrics of a process. Clones share them.
        #[derive(Debug, Clone)]
        pub struct Metrics {
            registry: Arc<Registry>,
            names: Arc<[String]>,
            /// Held by `job_ended` and `encode`, so that an exposition never contains only a part of a job's
            /// end.
            job_end: Arc<Mutex<()>>,
            durations: Durations,
            $($field: $type,)*
        }

        impl Metrics {
            fn register(mut r: Registrar, durations: Durations) -> Self {
                Metrics {
                    durations,
                    $($field: r.$unit($name, $help),)*
                    names: r.names.into(),
                    job_end: Arc::default(),
                    registry: Arc::new(r.registry),
                }
            }
        }
    };
}

metrics! {
    last_time: Family<Labels<1>, Float> = seconds("last_snapshot_timestamp", "Unix time of the last snapshot");
    last_revision: Family<Labels<1>, Int> = plain("last_snapshot_revision", "Newest revision in the last snapshot");
    last_stored: Family<Labels<1>, Int> = bytes("last_snapshot_stored", "Size of the last snapshot in the store");
    last_uncompressed: Family<Labels<1>, Int> = bytes("last_snapshot_uncompressed", "Size of the last snapshot before compression");
    saved_events: OnceKnown<Counter> = plain("saved_events", "Events saved in delta snapshots");
    etcd_read: OnceKnown<Counter> = bytes("etcd_read", "Bytes of snapshots and events read from etcd");
    store_read: OnceKnown<Counter> = bytes("store_read", "Bytes read from the store");
    store_written: OnceKnown<Counter> = bytes("store_written", "Bytes written to the store");
    failures: Family<Labels<3>, Counter> = plain("failures", "Failures, including those that a retry resolved, by the reason and exit code of docs/exit-codes.md");
    unsaved_revisions: OnceKnown<Int> = plain("unsaved_revisions", "Revisions of etcd that are not in any snapshot yet, also while the follower waits for the lock or the store refuses it");
    unsaved_for: Age = seconds("unsaved_age", "Age of the oldest change that is not known to be in a snapshot: the current recovery point");
    spool: OnceKnown<Int> = bytes("spool", "Size of the events in the temporary directory that wait for the store");
    first_restorable: OnceKnown<Int> = plain("restorable_first_revision", "First revision of the newest range that can be restored without a gap");
    last_restorable: OnceKnown<Int> = plain("restorable_last_revision", "Last revision that can be restored");
    first_restorable_time: OnceKnown<Float> = seconds("restorable_first_timestamp", "Unix time of the first restorable revision");
    last_restorable_time: OnceKnown<Float> = seconds("restorable_last_timestamp", "Unix time of the last restorable revision");
    timeline_began: OnceKnown<Float> = seconds("timeline_began_timestamp", "Unix time of the full with which another history began, because the cluster was set back");
    history_proven: OnceKnown<Float> = seconds("history_proven_timestamp", "Unix time of the last verification that compared each full with the chain before it, and found them equal");
    lock_held: OnceKnown<Int> = plain("lock_held", "1 if this process holds the lock and saves snapshots, 0 if it waits for the lock");
    reconnects: OnceKnown<Counter> = plain("etcd_reconnects", "Reconnections to etcd after a connection or a watch ended");
    fulls: Family<Labels<1>, Counter> = plain("full_snapshots", "Saved full snapshots, by the reason for taking them");
    job_seconds: Family<Labels<1>, Float> = seconds("job_duration", "Duration of the last run of a command");
    job_succeeded: Family<Labels<1>, Int> = plain("job_succeeded", "1 if the last run of a command succeeded, 0 if it failed");
    job_ended: Family<Labels<1>, Float> = seconds("job_last_run_timestamp", "Unix time of the end of the last run of a command");
    folded_deltas: OnceKnown<Int> = plain("compact_deltas", "Delta snapshots folded by the last compaction");
    folded_events: OnceKnown<Int> = plain("compact_events", "Events folded by the last compaction");
    compact_read: OnceKnown<Int> = bytes("compact_read", "Bytes read from the store by the last compaction");
    compact_written: OnceKnown<Int> = bytes("compact_written", "Size of the snapshot written by the last compaction, 0 if none was due");
    defragmented: Family<Labels<1>, Counter> = bytes("defragmented", "Bytes freed by defragmenting the database of a member");
    copied: Family<Labels<1>, Counter> = plain("copied_snapshots", "Snapshots copied to another store");
    not_copied: OnceKnown<Int> = plain("copy_failed_snapshots", "Snapshots that should be in the other store but could not be copied, as of the last listing");
    in_step: OnceKnown<Float> = seconds("copy_complete_timestamp", "Unix time when the other store was last known to be complete");
    verify_errors: OnceKnown<Int> = plain("verify_errors", "Findings that made the last verification fail, 0 if it succeeded");
    verify_findings: Family<Labels<1>, Int> = plain("verify_findings", "Findings of the last verification, by their reason");
    verify_snapshots: OnceKnown<Int> = plain("verify_snapshots", "Snapshots read by the last verification");
    verify_read: OnceKnown<Int> = bytes("verify_read", "Bytes read from the store by the last verification");
    verify_newest: OnceKnown<Float> = seconds("verify_newest_snapshot_timestamp", "Unix time of the newest snapshot, by its name");
    verify_newest_age: OnceKnown<Float> = seconds("verify_newest_snapshot_age", "Age of the newest snapshot at the last verification");
    drill_succeeded: OnceKnown<Int> = plain("verify_drill_succeeded", "1 if the last restore drill succeeded, 0 if it failed");
    drill_seconds: OnceKnown<Float> = seconds("verify_drill_duration", "Duration of the last restore drill");
}

type Durations = Family<Labels<2>, Histogram, fn() -> Histogram>;

/// Registers metrics, and collects their names as in the `# TYPE` lines of the exposition.
struct Registrar {
    registry: Registry,
    names: Vec<String>,
}

impl Registrar {
    fn add<M: Metric + Clone>(&mut self, name: &str, unit: Option<Unit>, help: &str, m: M) -> M {
        let unit_name = unit.as_ref().map(|u| format!("_{}", u.as_str()));
        let unit_name = unit_name.unwrap_or_default();
        self.names.push(format!("{PREFIX}_{name}{unit_name}"));
        match unit {
            Some(unit) => self
                .registry
                .register_with_unit(name, help, unit, m.clone()),
            None => self.registry.register(name, help, m.clone()),
        }
        m
    }

    fn plain<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.add(name, None, help, M::default())
    }

    fn bytes<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.add(name, Some(Unit::Bytes), help, M::default())
    }

    fn seconds<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.add(name, Some(Unit::Seconds), help, M::default())
    }
}

/// Converts a size to the type of a gauge.
fn int(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Converts a time to Unix time in seconds.
fn unix(t: DateTime<Utc>) -> f64 {
    t.timestamp_millis() as f64 / 1000.0
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Creates metrics. Only the version is set.
    pub fn new() -> Self {
        let mut r = Registrar {
            registry: Registry::with_prefix(PREFIX),
            names: vec![format!("{PREFIX}_build")],
        };
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        r.registry
            .register("build", "Version of the running program", version);
        let durations = Family::new_with_constructor((|| Histogram::new(DURATIONS)) as fn() -> _);
        let durations = r.add(
            "snapshot_duration",
            Some(Unit::Seconds),
            "Time to save a snapshot, or until that failed",
            durations,
        );
        Self::register(r, durations)
    }

    /// Returns the names of all metrics, exposed or not, as in the `# TYPE` lines.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the exposition as OpenMetrics 1.0 text.
    ///
    /// # Errors
    /// `Internal`.
    pub fn encode(&self) -> Result<String, Error> {
        let mut text = String::new();
        let _guard = lock(&self.job_end);
        encode(&mut text, &self.registry)
            .map_err(|_| Error::internal("cannot encode the metrics"))?;
        Ok(text)
    }

    /// Returns the exposition as Prometheus text of version 0.0.4, which node exporter reads from files. In
    /// that format counters and infos have the names of their samples, and there are no units.
    ///
    /// # Errors
    /// `Internal`.
    pub fn encode_text(&self) -> Result<String, Error> {
        let open = self.encode()?;
        let mut text = String::with_capacity(open.len());
        let mut help = None;
        for line in open.lines() {
            if line == "# EOF" || line.starts_with("# UNIT ") {
                continue;
            }
            if let Some(rest) = line.strip_prefix("# HELP ") {
                help = rest.split_once(' ');
                continue;
            }
            if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|l| l.split_once(' '))
            {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    _ => ("", kind),
                };
                if let Some((_, help)) = help.take() {
                    text += &format!("# HELP {name}{suffix} {help}\n");
                }
                text += &format!("# TYPE {name}{suffix} {kind}\n");
                continue;
            }
            text += line;
            text.push('\n');
        }
        Ok(text)
    }

    /// Records a snapshot in the store.
    pub fn snapshot_saved(&self, saved: &SavedSnapshot) {
        let labels = saved.kind.labels();
        self.last_time.get_or_create(&labels).set(unix(saved.at));
        self.last_revision
            .get_or_create(&labels)
            .set(saved.revision);
        self.last_stored
            .get_or_create(&labels)
            .set(int(saved.stored_bytes));
        if let Some(bytes) = saved.uncompressed_bytes {
            self.last_uncompressed
                .get_or_create(&labels)
                .set(int(bytes));
        }
    }

    /// Records how long it took to save a snapshot, and whether that succeeded.
    pub fn snapshot_took(&self, kind: SnapshotKind, took: Duration, succeeded: bool) {
        let [kind] = kind.labels();
        let labels = [kind, ("succeeded", succeeded.to_string())];
        self.durations
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// Adds `n` events that were saved in delta snapshots.
    pub fn events_saved(&self, n: u64) {
        self.saved_events.get().inc_by(n);
    }

    /// Adds bytes that were read from etcd.
    pub fn etcd_read(&self, bytes: u64) {
        self.etcd_read.get().inc_by(bytes);
    }

    /// Adds bytes that were read from the store.
    pub fn store_read(&self, bytes: u64) {
        self.store_read.get().inc_by(bytes);
    }

    /// Adds bytes that were written to the store.
    pub fn store_written(&self, bytes: u64) {
        self.store_written.get().inc_by(bytes);
    }

    /// Counts a failure, final or to be retried. `operation` is a word of a small set, such as the command,
    /// `watch`, `upload` or `lock`.
    pub fn failed(&self, operation: &'static str, reason: Reason) {
        let labels = [
            ("operation", operation.to_owned()),
            ("reason", reason.as_str().to_owned()),
            ("code", reason.exit_code().to_string()),
        ];
        self.failures.get_or_create(&labels).inc();
    }

    /// Sets the number of revisions that are not in any snapshot (`None` if it is unknown: the last one stays), and the
    /// time of the oldest of these changes (`None` if all changes are saved). If etcd does not respond, that is the time
    /// of its last response: later changes may be unsaved.
    pub fn unsaved(&self, revisions: Option<u64>, since: Option<DateTime<Utc>>) {
        if let Some(revisions) = revisions {
            self.unsaved_revisions.get().set(int(revisions));
        }
        self.unsaved_for.set(since);
    }

    /// Sets the size of the events that wait in the temporary directory, in bytes.
    pub fn spooled(&self, bytes: u64) {
        self.spool.get().set(int(bytes));
    }

    /// Sets the range that can be restored.
    pub fn restorable(&self, window: &RestorableWindow) {
        self.first_restorable.get().set(window.first_revision);
        self.last_restorable.get().set(window.last_revision);
        if let Some(t) = window.first_time {
            self.first_restorable_time.get().set(unix(t));
        }
        if let Some(t) = window.last_time {
            self.last_restorable_time.get().set(unix(t));
        }
    }

    /// Sets whether this process holds the lock.
    pub fn lock_held(&self, held: bool) {
        self.lock_held.get().set(held.into());
    }

    /// Counts a reconnection to etcd after a connection or a watch ended.
    pub fn reconnected(&self) {
        self.reconnects.get().inc();
    }

    /// Counts a saved full. `reason` is why it was taken, in CamelCase.
    pub fn full_saved(&self, reason: &str) {
        self.fulls
            .get_or_create(&[("reason", reason.to_owned())])
            .inc();
    }

    /// Records the end of a run of a command now, its duration, and the reason of its failure if it failed.
    pub fn job_ended(&self, job: &'static str, took: Duration, failure: Option<Reason>) {
        let labels = [("job", job.to_owned())];
        let _guard = lock(&self.job_end);
        self.job_seconds
            .get_or_create(&labels)
            .set(took.as_secs_f64());
        self.job_succeeded
            .get_or_create(&labels)
            .set(failure.is_none().into());
        self.job_ended.get_or_create(&labels).set(unix(Utc::now()));
        if let Some(reason) = failure {
            self.failed(job, reason);
        }
    }

    /// Records a compaction.
    pub fn compacted(&self, folded: &CompactionFigures) {
        self.folded_deltas.get().set(int(folded.deltas));
        self.folded_events.get().set(int(folded.events));
        self.compact_read.get().set(int(folded.read_bytes));
        self.compact_written.get().set(int(folded.written_bytes));
    }

    /// Counts a snapshot that was copied to another store.
    pub fn copied(&self, kind: SnapshotKind) {
        self.copied.get_or_create(&kind.labels()).inc();
    }

    /// Sets the number of snapshots that could not be copied to the other store.
    pub fn to_copy(&self, snapshots: u64) {
        self.not_copied.get().set(int(snapshots));
    }

    /// Records that the other store is complete now.
    pub fn in_step(&self) {
        self.in_step.get().set(unix(Utc::now()));
    }

    /// Records a verification.
    pub fn verified(&self, verified: &VerificationFigures) {
        self.verify_errors.get().set(int(verified.errors));
        for (reason, n) in &verified.findings {
            self.verify_findings
                .get_or_create(&[("reason", (*reason).to_owned())])
                .set(int(*n));
        }
        self.verify_snapshots.get().set(int(verified.snapshots));
        self.verify_read.get().set(int(verified.read_bytes));
        if let Some((made, age)) = verified.newest {
            self.verify_newest.get().set(unix(made));
            self.verify_newest_age.get().set(age);
        }
        if let Some((succeeded, took)) = verified.drill {
            self.drill_succeeded.get().set(succeeded.into());
            self.drill_seconds.get().set(took.as_secs_f64());
        }
    }

    /// Sets when another history began.
    pub fn timeline_began(&self, at: DateTime<Utc>) {
        self.timeline_began.get().set(unix(at));
    }

    /// Sets when a verification last proved that the fulls continue the chains before them.
    pub fn history_proven(&self, at: DateTime<Utc>) {
        self.history_proven.get().set(unix(at));
    }

    /// Adds bytes by which a defragmentation reduced the database of a member.
    pub fn defragmented(&self, member: &str, bytes: u64) {
        self.defragmented
            .get_or_create(&[("member", member.to_owned())])
            .inc_by(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(m: &Metrics, name: &str) -> Option<f64> {
        let text = m.encode().unwrap();
        let line = text
            .lines()
            .find(|l| l.split([' ', '{']).next() == Some(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    #[test]
    fn metrics_that_were_not_set_are_not_exposed() {
        let m = Metrics::new();
        let text = m.encode().unwrap();
        let samples: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            samples,
            [format!("deltafold_build_info{{version=\"{version}\"}} 1")]
        );
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn the_end_of_a_job_is_exposed_completely_or_not_at_all() {
        for _ in 0..200 {
            let m = Metrics::new();
            let job = m.clone();
            let job = std::thread::spawn(move || {
                job.job_ended("compact", Duration::from_secs(1), Some(Reason::NoSnapshots));
            });
            let mut text = String::new();
            while !text.contains("deltafold_job_succeeded{") {
                text = m.encode().unwrap();
            }
            for part in [
                "failures_total",
                "job_duration_seconds",
                "job_last_run_timestamp_seconds",
            ] {
                assert!(text.contains(&format!("deltafold_{part}{{")), "{text}");
            }
            job.join().unwrap();
        }
    }

    #[test]
    fn the_age_of_unsaved_changes_grows_between_updates() {
        const AGE: &str = "deltafold_unsaved_age_seconds";
        let m = Metrics::new();
        assert_eq!(value(&m, AGE), None);
        let since = Utc::now() - chrono::Duration::hours(1);
        m.unsaved(Some(5), Some(since));
        let first = value(&m, AGE).unwrap();
        assert!(first >= 3600.0, "{first}");
        std::thread::sleep(Duration::from_millis(2));
        m.unsaved(Some(6), Some(since));
        assert!(value(&m, AGE).unwrap() > first);
        m.unsaved(Some(0), None);
        assert_eq!(value(&m, AGE), Some(0.0));
        // A clock that was set back does not make the age negative.
        m.unsaved(Some(1), Some(Utc::now() + chrono::Duration::hours(1)));
        let ahead = value(&m, AGE).unwrap();
        assert!((0.0..3600.0).contains(&ahead), "{ahead}");
    }
}
