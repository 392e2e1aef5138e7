//! Random histories made on a real etcd, in the form in which a backup holds them.

use super::random_load::Writer;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{DateTime, SecondsFormat, Utc};
use etcd_client::EventType;
use fastrand::Rng;
use sha2::{Digest as _, Sha256};

use super::etcd::{Etcd, HashKv};
use super::truth::{TimedEvent, Truth};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zlib,
    Lzw,
    Zstd,
}

impl Compression {
    pub const ALL: [Self; 5] = [Self::None, Self::Gzip, Self::Zlib, Self::Lzw, Self::Zstd];

    pub fn suffix(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Gzip => ".gz",
            Self::Zlib => ".zlib",
            Self::Lzw => ".Z",
            Self::Zstd => ".zst",
        }
    }

    pub fn pack(self, plain: &[u8]) -> Vec<u8> {
        let level = flate2::Compression::fast();
        let packed = match self {
            Self::None => Ok(plain.to_vec()),
            Self::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
                encoder.write_all(plain).and_then(|()| encoder.finish())
            }
            Self::Zlib => {
                let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), level);
                encoder.write_all(plain).and_then(|()| encoder.finish())
            }
            Self::Lzw => Ok(weezl::encode::Encoder::new(weezl::BitOrder::Lsb, 8)
                .encode(plain)
                .expect("LZW takes any byte")),
            Self::Zstd => zstd::encode_all(plain, 1),
        };
        packed.expect("compress in memory")
    }
}

/// How to record a history.
#[derive(Clone, Copy, Debug)]
pub struct HistoryOptions {
    /// The number of operations. Half of them come before the full snapshot.
    pub steps: usize,
    /// The number of deltas that the second half is cut into.
    pub deltas: usize,
    /// Operations that the full holds beyond the revision in its name.
    pub overrun: usize,
    /// The longest value, in bytes.
    pub max_value: usize,
}

impl HistoryOptions {
    /// Options for history number `n` of a series. The number of deltas differs, and every other full holds
    /// more than its name says.
    pub fn nth(n: usize) -> Self {
        Self {
            steps: 300,
            deltas: 1 + n,
            overrun: 40 * (n % 2),
            ..Self::default()
        }
    }
}

impl Default for HistoryOptions {
    fn default() -> Self {
        Self {
            steps: 400,
            deltas: 3,
            overrun: 0,
            max_value: 300 << 10,
        }
    }
}

/// The payload of a delta, without compression and checksum.
#[derive(Clone, Debug)]
pub struct DeltaPart {
    pub start: i64,
    pub last: i64,
    pub json: Vec<u8>,
}

/// A backup, and what the etcd it came from reported.
#[derive(Clone, Debug)]
pub struct History {
    /// The database and its SHA-256.
    pub full: Vec<u8>,
    /// The revision in the full's name.
    pub full_revision: i64,
    pub deltas: Vec<DeltaPart>,
    /// HashKV and live keys at revisions from the full's on, before the last compaction.
    pub hash_kv: Vec<(i64, HashKv, u64)>,
    /// HashKV and live keys after a compaction at the last revision.
    pub compacted: (HashKv, u64),
    pub last_revision: i64,
}

impl History {
    /// Makes a history on an etcd without other writers. The same seed makes the same changes.
    pub async fn record(etcd: &Etcd, seed: u64, steps: usize, deltas: usize) -> Self {
        let options = HistoryOptions {
            steps,
            deltas,
            ..HistoryOptions::default()
        };
        Self::record_with(etcd, seed, &options).await
    }

    pub async fn record_with(etcd: &Etcd, seed: u64, options: &HistoryOptions) -> Self {
        let mut writer = Writer::alone(etcd, seed, options.max_value).await;
        let before = (options.steps / 2).max(1);
        for _ in 0..before {
            writer.must_step().await;
        }
        let compacted_at = writer.choose_compaction();
        if let Some(revision) = compacted_at {
            etcd.compact(revision).await;
        }

        let mut recorder = Recorder::start(etcd).await;
        let full_revision = recorder.full_revision;
        for _ in 0..options.overrun {
            writer.must_step().await;
        }
        recorder.take_full(etcd).await;
        for _ in before + options.overrun..options.steps {
            writer.must_step().await;
        }
        let at_least = full_revision + options.deltas as i64;
        writer.finish(at_least).await.expect("the last changes");
        let last_revision = writer.revision;
        let recording = recorder
            .finish(last_revision, &mut writer.rng, options.deltas)
            .await;
        let Recording { full, deltas, .. } = recording;
        assert_eq!(
            deltas.last().expect("a delta").last,
            last_revision,
            "seed {seed}"
        );

        let mut hash_kv = Vec::new();
        for revision in revisions_to_ask(&mut writer.rng, full_revision, &deltas) {
            // At a revision where it was compacted, etcd returns the hash from before.
            if Some(revision) == compacted_at {
                continue;
            }
            let hash = etcd.hash_kv(revision).await;
            hash_kv.push((revision, hash, etcd.live_keys_at(revision).await));
        }
        etcd.compact(last_revision).await;
        let compacted = etcd.hash_kv(last_revision).await;
        assert_eq!(compacted.compact_revision, last_revision, "seed {seed}");
        Self {
            full,
            full_revision,
            deltas,
            hash_kv,
            compacted: (compacted, etcd.live_keys_at(last_revision).await),
            last_revision,
        }
    }

    /// Writes `<dir>/v2/…`. The full is created at `t0_unix`, each delta a second after the one before. Returns
    /// the names in that order.
    pub fn write_bucket(&self, dir: &Path, compression: Compression, t0_unix: i64) -> Vec<String> {
        let parts = (&self.full[..], self.full_revision, &self.deltas[..]);
        write_bucket(parts, dir, compression, t0_unix)
    }
}

/// What a backup tool would have saved of an etcd with other writers.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The database and its SHA-256.
    pub full: Vec<u8>,
    /// The revision in the full's name.
    pub full_revision: i64,
    pub deltas: Vec<DeltaPart>,
}

impl Recording {
    /// Like `History::write_bucket`.
    pub fn write_bucket(&self, dir: &Path, compression: Compression, t0_unix: i64) -> Vec<String> {
        let parts = (&self.full[..], self.full_revision, &self.deltas[..]);
        write_bucket(parts, dir, compression, t0_unix)
    }
}

fn write_bucket(
    (full, full_revision, deltas): (&[u8], i64, &[DeltaPart]),
    dir: &Path,
    compression: Compression,
    t0_unix: i64,
) -> Vec<String> {
    let suffix = compression.suffix();
    let name = format!("Full-{:08}-{full_revision:08}-{t0_unix}{suffix}", 0);
    let mut objects = vec![(name, compression.pack(full))];
    for (delta, unix) in deltas.iter().zip(t0_unix + 1..) {
        let name = format!("Incr-{:08}-{:08}-{unix}{suffix}", delta.start, delta.last);
        objects.push((name, compression.pack(&with_checksum(&delta.json))));
    }
    let folder = dir.join("v2");
    fs::create_dir_all(&folder).expect("create the bucket's folder");
    for (name, bytes) in &objects {
        fs::write(folder.join(name), bytes).expect("write an object");
    }
    objects.into_iter().map(|(name, _)| name).collect()
}

/// Records an etcd as a backup tool does, with a full snapshot and a watch.
pub struct Recorder {
    full: Vec<u8>,
    full_revision: i64,
    truth: Truth,
}

impl Recorder {
    /// Starts the watch after the newest revision, which becomes the full's name.
    pub async fn start(etcd: &Etcd) -> Self {
        let full_revision = etcd.revision().await;
        Self {
            full: Vec::new(),
            full_revision,
            truth: Truth::after(full_revision, etcd),
        }
    }

    /// Takes the full snapshot. It also holds what was written since the start.
    pub async fn take_full(&mut self, etcd: &Etcd) {
        self.full = etcd.snapshot().await;
    }

    /// Cuts the changes up to a revision, or slightly beyond, into deltas.
    pub async fn finish(self, last_revision: i64, rng: &mut Rng, deltas: usize) -> Recording {
        assert!(!self.full.is_empty(), "no full snapshot was taken");
        self.truth.has_seen(last_revision).await;
        Recording {
            deltas: cut(rng, &self.truth.timed_events(), self.full_revision, deltas),
            full: self.full,
            full_revision: self.full_revision,
        }
    }
}

/// Appends the SHA-256 to the bytes.
pub fn with_checksum(bytes: &[u8]) -> Vec<u8> {
    [bytes, &Sha256::digest(bytes)[..]].concat()
}

fn revision_of((event, _): &TimedEvent) -> i64 {
    event.kv().expect("an event's key").mod_revision()
}

/// Cuts between revisions, never within one. Each part gets at least one revision.
fn cut(
    rng: &mut Rng,
    events: &[Arc<TimedEvent>],
    full_revision: i64,
    parts: usize,
) -> Vec<DeltaPart> {
    let is_same = |a: &Arc<TimedEvent>, b: &Arc<TimedEvent>| revision_of(a) == revision_of(b);
    let revisions: Vec<&[Arc<TimedEvent>]> = events.chunk_by(is_same).collect();
    for (group, expected) in revisions.iter().zip(full_revision + 1..) {
        assert_eq!(revision_of(&group[0]), expected, "a gap in the watch");
    }
    let mut ends = BTreeSet::from([revisions.len()]);
    while ends.len() < parts {
        ends.insert(rng.usize(1..revisions.len()));
    }
    let mut deltas = Vec::new();
    let mut start = 0;
    for end in ends {
        let part = &revisions[start..end];
        deltas.push(DeltaPart {
            start: revision_of(&part[0][0]),
            last: revision_of(&part[part.len() - 1][0]),
            json: json(part.iter().copied().flatten()),
        });
        start = end;
    }
    deltas
}

/// Returns the full's revision, the last revision of each delta, and one inside each of the first deltas.
fn revisions_to_ask(rng: &mut Rng, full_revision: i64, deltas: &[DeltaPart]) -> BTreeSet<i64> {
    let mut revisions = BTreeSet::from([full_revision]);
    revisions.extend(deltas.last().map(|delta| delta.last));
    for delta in deltas.iter().take(8) {
        revisions.extend([delta.last, rng.i64(delta.start..=delta.last)]);
    }
    revisions
}

/// Encodes events as Go's encoding/json does. No string in them needs an escape.
fn json<'a>(events: impl Iterator<Item = &'a Arc<TimedEvent>>) -> Vec<u8> {
    let mut json = String::from("[");
    for (event, time) in events.map(|e| &**e) {
        if json.len() > 1 {
            json.push(',');
        }
        json.push_str(r#"{"etcdEvent":{"#);
        if event.event_type() == EventType::Delete {
            json.push_str(r#""type":1,"#);
        }
        let kv = event.kv().expect("an event's key");
        json.push_str(&format!(r#""kv":{{"key":"{}""#, BASE64.encode(kv.key())));
        let number = |json: &mut String, name: &str, value: i64| {
            if value != 0 {
                json.push_str(&format!(r#","{name}":{value}"#));
            }
        };
        number(&mut json, "create_revision", kv.create_revision());
        number(&mut json, "mod_revision", kv.mod_revision());
        number(&mut json, "version", kv.version());
        if !kv.value().is_empty() {
            json.push_str(&format!(r#","value":"{}""#, BASE64.encode(kv.value())));
        }
        number(&mut json, "lease", kv.lease());
        json.push_str(&format!(r#"}}}},"time":"{}"}}"#, rfc3339_nano(time)));
    }
    json.push(']');
    json.into_bytes()
}

/// Formats a time as Go's time.RFC3339Nano: with as many digits of the second as needed.
fn rfc3339_nano(time: &DateTime<Utc>) -> String {
    let text = time.to_rfc3339_opts(SecondsFormat::Nanos, true);
    let digits = text.trim_end_matches('Z').trim_end_matches('0');
    format!("{}Z", digits.trim_end_matches('.'))
}
