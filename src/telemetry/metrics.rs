//! What is counted and measured, for Prometheus: names, labels and units are in `docs/metrics.md`.
//!
//! Whatever was not told yet is not exposed: a job that saves nothing has no last snapshot. Label values come
//! from small sets, or are names of members; never keys, values, URLs or anything from a message.

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

/// What all names begin with.
const PREFIX: &str = "deltafold";

/// Seconds, from a delta of a few events to a full of many gigabytes.
const DURATIONS: [f64; 12] = [
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
];

type Labels<const N: usize> = [(&'static str, String); N];
type Int = Gauge;
type Float = Gauge<f64, AtomicU64>;

/// A metric that is exposed once it is known.
#[derive(Debug, Default)]
struct Known<M>(Arc<OnceLock<M>>);

impl<M> Clone for Known<M> {
    fn clone(&self) -> Self {
        Known(Arc::clone(&self.0))
    }
}

impl<M: Default> Known<M> {
    fn get(&self) -> &M {
        self.0.get_or_init(M::default)
    }
}

impl<M: EncodeMetric + TypedMetric> EncodeMetric for Known<M> {
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

/// How long something lasts already, at the time of the scrape.
#[derive(Debug, Clone, Default)]
struct Age(Arc<Mutex<Option<Since>>>);

/// `None` where nothing lasts. Told by the wall clock, measured by one that does not jump.
type Since = Option<(DateTime<Utc>, Instant, Duration)>;

impl Age {
    fn set(&self, since: Option<DateTime<Utc>>) {
        let mut age = lock(&self.0);
        let before = age.flatten();
        *age = Some(since.map(|since| match before {
            Some(same) if same.0 == since => same,
            _ => {
                let old = (Utc::now() - since).to_std().unwrap_or_default();
                (since, Instant::now(), old)
            }
        }));
    }
}

impl EncodeMetric for Age {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        let age = *lock(&self.0);
        let seconds = age
            .flatten()
            .map_or(0.0, |(_, told, old)| (told.elapsed() + old).as_secs_f64());
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

/// The label `kind`.
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

/// A snapshot that was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedSnapshot {
    /// Full or delta.
    pub kind: SnapshotKind,
    /// When.
    pub at: DateTime<Utc>,
    /// The newest revision in it.
    pub revision: i64,
    /// Its size in the store, in bytes.
    pub stored_bytes: u64,
    /// Its size before it was compressed, in bytes, where that is known.
    pub uncompressed_bytes: Option<u64>,
}

/// What can be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The first revision.
    pub first_revision: i64,
    /// The last one.
    pub last_revision: i64,
    /// When the first one was, where that is known.
    pub first_time: Option<DateTime<Utc>>,
    /// When the last one was, where that is known.
    pub last_time: Option<DateTime<Utc>>,
}

/// What a compaction has folded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Folded {
    /// Deltas.
    pub deltas: u64,
    /// Events in them.
    pub events: u64,
    /// Bytes read from the store.
    pub read_bytes: u64,
    /// The new snapshot's bytes in the store; 0 where none was written.
    pub written_bytes: u64,
}

/// What a verification has found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verified {
    /// Findings by their reason, those that make it fail and those that do not.
    pub findings: Vec<(&'static str, u64)>,
    /// Of these, those that make it fail.
    pub errors: u64,
    /// Snapshots read.
    pub snapshots: u64,
    /// Bytes read from the store.
    pub read_bytes: u64,
    /// When the newest snapshot was made, and how long ago that is.
    pub newest: Option<(DateTime<Utc>, f64)>,
    /// Whether the drills succeeded, and how long they took; `None` where there was none.
    pub drill: Option<(bool, Duration)>,
}

/// Declares the metrics that are alike: the field, its type, its unit, its name, and what it tells.
macro_rules! metrics {
    ($($field:ident: $type:ty = $unit:ident($name:literal, $help:literal);)*) => {
        /// All metrics of a process. Clones are the same metrics.
        #[derive(Debug, Clone)]
        pub struct Metrics {
            registry: Arc<Registry>,
            names: Arc<[String]>,
            /// Locked by `job_ended` and by `encode`. So a text that tells the end of a job tells its failure and
            /// duration, too.
            whole: Arc<Mutex<()>>,
            durations: Durations,
            $($field: $type,)*
        }

        impl Metrics {
            fn register(mut r: Register, durations: Durations) -> Self {
                Metrics {
                    durations,
                    $($field: r.$unit($name, $help),)*
                    names: r.names.into(),
                    whole: Arc::default(),
                    registry: Arc::new(r.registry),
                }
            }
        }
    };
}

metrics! {
    last_time: Family<Labels<1>, Float> = seconds("last_snapshot_timestamp", "When the last snapshot was saved, in unix time");
    last_revision: Family<Labels<1>, Int> = plain("last_snapshot_revision", "The newest revision in the last snapshot");
    last_stored: Family<Labels<1>, Int> = bytes("last_snapshot_stored", "The last snapshot's size in the store");
    last_uncompressed: Family<Labels<1>, Int> = bytes("last_snapshot_uncompressed", "The last snapshot's size before it was compressed");
    saved_events: Known<Counter> = plain("saved_events", "Events saved in delta snapshots");
    etcd_read: Known<Counter> = bytes("etcd_read", "Read from etcd: snapshots and events");
    store_read: Known<Counter> = bytes("store_read", "Read from the store");
    store_written: Known<Counter> = bytes("store_written", "Written to the store");
    failures: Family<Labels<3>, Counter> = plain("failures", "Failures, also those that were overcome, by the reason and exit code of docs/exit-codes.md");
    unsaved_revisions: Known<Int> = plain("unsaved_revisions", "Revisions of etcd that are in no snapshot yet");
    unsaved_for: Age = seconds("unsaved_age", "How long the oldest change has been waiting that is in no snapshot yet, or that may be in none: the recovery point objective");
    buffer: Known<Int> = bytes("buffer", "Events in memory that are in no snapshot yet");
    spool: Known<Int> = bytes("spool", "Events in the temporary directory that wait for the store");
    first_restorable: Known<Int> = plain("restorable_first_revision", "The first revision that can be restored without a gap up to the last one");
    last_restorable: Known<Int> = plain("restorable_last_revision", "The last revision that can be restored");
    first_restorable_time: Known<Float> = seconds("restorable_first_timestamp", "When the first restorable revision was, in unix time");
    last_restorable_time: Known<Float> = seconds("restorable_last_timestamp", "When the last restorable revision was, in unix time");
    lock_held: Known<Int> = plain("lock_held", "1 where this process has the lock and saves, 0 where it waits for it");
    reconnects: Known<Counter> = plain("etcd_reconnects", "Times that etcd was asked anew after a connection or a watch had ended");
    fulls: Family<Labels<1>, Counter> = plain("full_snapshots", "Full snapshots that were saved, by why one was due");
    job_seconds: Family<Labels<1>, Float> = seconds("job_duration", "How long the last run of a job took");
    job_succeeded: Family<Labels<1>, Int> = plain("job_succeeded", "1 where the last run of a job succeeded, 0 where it failed");
    job_ended: Family<Labels<1>, Float> = seconds("job_last_run_timestamp", "When the last run of a job ended, in unix time");
    folded_deltas: Known<Int> = plain("compact_deltas", "Delta snapshots that the last compaction folded");
    folded_events: Known<Int> = plain("compact_events", "Events that the last compaction folded");
    compact_read: Known<Int> = bytes("compact_read", "Read from the store by the last compaction");
    compact_written: Known<Int> = bytes("compact_written", "The snapshot's size that the last compaction wrote, 0 where none was due");
    defragmented: Family<Labels<1>, Counter> = bytes("defragmented", "Given back by defragmentations of a member's database");
    copied: Family<Labels<1>, Counter> = plain("copied_snapshots", "Snapshots copied to another store");
    not_copied: Known<Int> = plain("copy_failed_snapshots", "Snapshots that are wanted in the other store and could not be copied, as of the last listing");
    in_step: Known<Float> = seconds("copy_complete_timestamp", "When the other store was last seen to have all that is wanted, in unix time");
    verify_errors: Known<Int> = plain("verify_errors", "Findings that made the last verification fail, 0 where it succeeded");
    verify_findings: Family<Labels<1>, Int> = plain("verify_findings", "Findings of the last verification, by the reason of docs/verify-result.schema.json");
    verify_snapshots: Known<Int> = plain("verify_snapshots", "Snapshots that the last verification read");
    verify_read: Known<Int> = bytes("verify_read", "Read from the store by the last verification");
    verify_newest: Known<Float> = seconds("verify_newest_snapshot_timestamp", "When the newest snapshot was made, by its name, in unix time");
    verify_newest_age: Known<Float> = seconds("verify_newest_snapshot_age", "How old the newest snapshot was at the last verification");
    drill_succeeded: Known<Int> = plain("verify_drill_succeeded", "1 where the last restore drill succeeded, 0 where it failed");
    drill_seconds: Known<Float> = seconds("verify_drill_duration", "How long the last restore drill took");
}

type Durations = Family<Labels<2>, Histogram, fn() -> Histogram>;

/// Registers metrics, and remembers their names as the exposition has them in `# TYPE`.
struct Register {
    registry: Registry,
    names: Vec<String>,
}

impl Register {
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

/// A size as a gauge has it.
fn int(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Unix time in seconds.
fn unix(t: DateTime<Utc>) -> f64 {
    t.timestamp_millis() as f64 / 1000.0
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Metrics of which nothing is known yet but the version.
    pub fn new() -> Self {
        let mut r = Register {
            registry: Registry::with_prefix(PREFIX),
            names: vec![format!("{PREFIX}_build")],
        };
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        r.registry
            .register("build", "The program that is running", version);
        let durations = Family::new_with_constructor((|| Histogram::new(DURATIONS)) as fn() -> _);
        let durations = r.add(
            "snapshot_duration",
            Some(Unit::Seconds),
            "How long it took to save a snapshot, or until that failed",
            durations,
        );
        Self::register(r, durations)
    }

    /// The names of all there are, whether known or not, as `# TYPE` has them.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The exposition: OpenMetrics 1.0 text.
    ///
    /// # Errors
    /// `Internal`.
    pub fn encode(&self) -> Result<String, Error> {
        let mut text = String::new();
        let _whole = lock(&self.whole);
        encode(&mut text, &self.registry)
            .map_err(|_| Error::internal("metrics that cannot be written down"))?;
        Ok(text)
    }

    /// The same as Prometheus' text of version 0.0.4, which is what node exporter reads from files: counters and
    /// infos are named as their samples, and there are no units.
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
            if let Some(helped) = line.strip_prefix("# HELP ") {
                help = helped.split_once(' ');
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
                if let Some((_, said)) = help.take() {
                    text += &format!("# HELP {name}{suffix} {said}\n");
                }
                text += &format!("# TYPE {name}{suffix} {kind}\n");
                continue;
            }
            text += line;
            text.push('\n');
        }
        Ok(text)
    }

    /// A snapshot is in the store.
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

    /// Saving a snapshot took so long, and succeeded or not.
    pub fn snapshot_took(&self, kind: SnapshotKind, took: Duration, succeeded: bool) {
        let [kind] = kind.labels();
        let labels = [kind, ("succeeded", succeeded.to_string())];
        self.durations
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// So many more events are in delta snapshots.
    pub fn events_saved(&self, n: u64) {
        self.saved_events.get().inc_by(n);
    }

    /// So many more bytes came from etcd.
    pub fn etcd_read(&self, bytes: u64) {
        self.etcd_read.get().inc_by(bytes);
    }

    /// So many more bytes came from the store.
    pub fn store_read(&self, bytes: u64) {
        self.store_read.get().inc_by(bytes);
    }

    /// So many more bytes went to the store.
    pub fn store_written(&self, bytes: u64) {
        self.store_written.get().inc_by(bytes);
    }

    /// Something failed, for good or to be tried again. `operation` is a word of a small set, such as the
    /// command or `watch`, `upload`, `lock`.
    pub fn failed(&self, operation: &'static str, reason: Reason) {
        let labels = [
            ("operation", operation.to_owned()),
            ("reason", reason.as_str().to_owned()),
            ("code", reason.exit_code().to_string()),
        ];
        self.failures.get_or_create(&labels).inc();
    }

    /// So many revisions of etcd are in no snapshot. `since` is when the oldest change among them was seen;
    /// where etcd does not answer, when it last did: what it has done since then is in none either. `None`
    /// where all is saved.
    pub fn unsaved(&self, revisions: u64, since: Option<DateTime<Utc>>) {
        self.unsaved_revisions.get().set(int(revisions));
        self.unsaved_for.set(since);
    }

    /// Bytes of events in memory.
    pub fn buffered(&self, in_memory: u64, on_disk: u64) {
        self.buffer.get().set(int(in_memory));
        self.spool.get().set(int(on_disk));
    }

    /// What can be restored.
    pub fn restorable(&self, window: &Window) {
        self.first_restorable.get().set(window.first_revision);
        self.last_restorable.get().set(window.last_revision);
        if let Some(t) = window.first_time {
            self.first_restorable_time.get().set(unix(t));
        }
        if let Some(t) = window.last_time {
            self.last_restorable_time.get().set(unix(t));
        }
    }

    /// Whether this process has the lock.
    pub fn lock_held(&self, held: bool) {
        self.lock_held.get().set(held.into());
    }

    /// etcd was asked anew after a connection or a watch had ended.
    pub fn reconnected(&self) {
        self.reconnects.get().inc();
    }

    /// A full was saved; `reason` is why it was due, in CamelCase.
    pub fn full_saved(&self, reason: &str) {
        self.fulls
            .get_or_create(&[("reason", reason.to_owned())])
            .inc();
    }

    /// A run of a job ended now, after so long; `failure` is why it failed.
    pub fn job_ended(&self, job: &'static str, took: Duration, failure: Option<Reason>) {
        let labels = [("job", job.to_owned())];
        let _whole = lock(&self.whole);
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

    /// A compaction is done.
    pub fn compacted(&self, folded: &Folded) {
        self.folded_deltas.get().set(int(folded.deltas));
        self.folded_events.get().set(int(folded.events));
        self.compact_read.get().set(int(folded.read_bytes));
        self.compact_written.get().set(int(folded.written_bytes));
    }

    /// A snapshot was copied to another store.
    pub fn copied(&self, kind: SnapshotKind) {
        self.copied.get_or_create(&kind.labels()).inc();
    }

    /// So many snapshots that are wanted in the other store could not be copied.
    pub fn to_copy(&self, snapshots: u64) {
        self.not_copied.get().set(int(snapshots));
    }

    /// The other store has all that is wanted.
    pub fn in_step(&self) {
        self.in_step.get().set(unix(Utc::now()));
    }

    /// A verification has ended.
    pub fn verified(&self, verified: &Verified) {
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

    /// A member's database has so many bytes less.
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
    fn what_is_not_known_is_not_exposed() {
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
    fn the_end_of_a_job_is_exposed_whole() {
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
    fn the_age_of_what_is_not_saved_grows_by_itself() {
        const AGE: &str = "deltafold_unsaved_age_seconds";
        let m = Metrics::new();
        assert_eq!(value(&m, AGE), None);
        let since = Utc::now() - chrono::Duration::hours(1);
        m.unsaved(5, Some(since));
        let first = value(&m, AGE).unwrap();
        assert!(first >= 3600.0, "{first}");
        std::thread::sleep(Duration::from_millis(2));
        m.unsaved(6, Some(since));
        assert!(value(&m, AGE).unwrap() > first);
        m.unsaved(0, None);
        assert_eq!(value(&m, AGE), Some(0.0));
        // A clock that was set back makes nothing negative.
        m.unsaved(1, Some(Utc::now() + chrono::Duration::hours(1)));
        let ahead = value(&m, AGE).unwrap();
        assert!((0.0..3600.0).contains(&ahead), "{ahead}");
    }
}
