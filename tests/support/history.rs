//! Random histories made on a real etcd, in the form in which a backup holds them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{DateTime, SecondsFormat, Utc};
use etcd_client::{
    Client, DeleteOptions, Event, EventType, KvClient, LeaseGrantOptions, PutOptions, Txn, TxnOp,
    WatchOptions, WatchStream,
};
use fastrand::Rng;
use sha2::{Digest as _, Sha256};

use super::etcd::{Etcd, HashKv};

/// The longest time that the watch may lag behind the last change.
const WATCH_TIMEOUT: Duration = Duration::from_secs(120);

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
        let mut writer = Writer::new(etcd, seed, options.max_value).await;
        let before = (options.steps / 2).max(1);
        for _ in 0..before {
            writer.step().await;
        }
        let compacted_at = writer.choose_compaction();
        if let Some(revision) = compacted_at {
            etcd.compact(revision).await;
        }

        let mut recorder = Recorder::start(etcd).await;
        let full_revision = recorder.full_revision;
        for _ in 0..options.overrun {
            writer.step().await;
        }
        recorder.take_full(etcd).await;
        for _ in before + options.overrun..options.steps {
            writer.step().await;
        }
        writer.finish(full_revision + options.deltas as i64).await;
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
        assert_eq!(
            writer.live.len() as u64,
            etcd.live_keys_at(last_revision).await,
            "seed {seed}: the writer's own view of what is alive"
        );
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
    last_known: tokio::sync::watch::Sender<i64>,
    watch: tokio::task::JoinHandle<Vec<TimedEvent>>,
}

impl Recorder {
    /// Starts the watch after the newest revision, which becomes the full's name.
    pub async fn start(etcd: &Etcd) -> Self {
        let full_revision = etcd.revision().await;
        let (last_known, last) = tokio::sync::watch::channel(0);
        let watch = watch_from(etcd, full_revision + 1).await;
        Self {
            full: Vec::new(),
            full_revision,
            last_known,
            watch: tokio::spawn(collect(watch, last)),
        }
    }

    /// Takes the full snapshot. It also holds what was written since the start.
    pub async fn take_full(&mut self, etcd: &Etcd) {
        self.full = etcd.snapshot().await;
    }

    /// Cuts the changes up to a revision, or slightly beyond, into deltas.
    pub async fn finish(self, last_revision: i64, rng: &mut Rng, deltas: usize) -> Recording {
        assert!(!self.full.is_empty(), "no full snapshot was taken");
        self.last_known
            .send(last_revision)
            .expect("the watch goes on");
        let events = self.watch.await.expect("the watch ended well");
        Recording {
            deltas: cut(rng, &events, self.full_revision, deltas),
            full: self.full,
            full_revision: self.full_revision,
        }
    }
}

/// Appends the SHA-256 to the bytes.
pub fn with_checksum(bytes: &[u8]) -> Vec<u8> {
    [bytes, &Sha256::digest(bytes)[..]].concat()
}

/// Writes to etcd at random, and knows which keys are alive and under which lease.
struct Writer {
    kv: KvClient,
    client: Client,
    rng: Rng,
    max_value: usize,
    keys: Vec<Vec<u8>>,
    leases: Vec<i64>,
    live: BTreeMap<Vec<u8>, i64>,
    revision: i64,
    /// Revisions that left tombstones.
    deletions: Vec<i64>,
}

impl Writer {
    async fn new(etcd: &Etcd, seed: u64, max_value: usize) -> Self {
        let mut rng = Rng::with_seed(seed);
        let keys = key_set(&mut rng);
        Self {
            kv: etcd.kv().await,
            client: etcd.client().await,
            rng,
            max_value,
            keys,
            leases: Vec::new(),
            live: BTreeMap::new(),
            revision: etcd.revision().await,
            deletions: Vec::new(),
        }
    }

    /// Runs one operation. Some change nothing, such as deleting a key that does not exist.
    async fn step(&mut self) {
        match self.rng.u32(0..100) {
            0..50 => self.put().await,
            50..60 => {
                let key = self.any_key();
                self.delete(key.clone(), after(&key)).await;
            }
            60..64 => {
                let (start, end) = self.range();
                self.delete(start, end).await;
            }
            64..80 => {
                let count = if self.rng.u32(0..12) == 0 {
                    // More changes than one byte of the sub revision can count.
                    self.rng.usize(257..400)
                } else {
                    self.rng.usize(2..40)
                };
                self.txn(count).await;
            }
            80..90 => self.grant().await,
            90..94 => self.revoke().await,
            _ => self.rewrite().await,
        }
    }

    /// Ends the history: often with a range deletion, sometimes of all keys. More changes follow until there
    /// are `at_least` revisions.
    async fn finish(&mut self, at_least: i64) {
        while self.revision < at_least {
            self.put().await;
        }
        match self.rng.u32(0..8) {
            0 => self.delete(vec![0], Vec::new()).await,
            1..5 => {
                let (start, end) = self.range();
                self.delete(start, end).await;
            }
            _ => {}
        }
    }

    /// Chooses a revision to compact at, most often one with tombstones.
    fn choose_compaction(&mut self) -> Option<i64> {
        if self.revision < 2 || self.rng.u32(0..6) == 0 {
            return None;
        }
        if self.rng.bool()
            && let Some(revision) = self.rng.choice(&self.deletions)
        {
            return Some(*revision);
        }
        Some(self.rng.i64(2..=self.revision))
    }

    async fn put(&mut self) {
        let key = self.any_key();
        let value = self.value();
        let lease = self.any_lease();
        let options = PutOptions::new().with_lease(lease);
        let done = self.kv.put(key.clone(), value, Some(options)).await;
        self.live.insert(key, lease);
        self.moved_to(done.expect("a put").header());
    }

    /// Puts a key again: with its old value, its old lease, another lease, or none.
    async fn rewrite(&mut self) {
        let Some((key, lease)) = self.any_live() else {
            return;
        };
        let (value, options, lease) = match self.rng.u32(0..4) {
            0 => (self.value(), PutOptions::new().with_ignore_lease(), lease),
            1 => (self.value(), PutOptions::new(), 0),
            _ => {
                let lease = self.any_lease();
                let options = PutOptions::new().with_ignore_value().with_lease(lease);
                (Vec::new(), options, lease)
            }
        };
        let done = self.kv.put(key.clone(), value, Some(options)).await;
        self.live.insert(key, lease);
        self.moved_to(done.expect("a put of a live key").header());
    }

    async fn delete(&mut self, start: Vec<u8>, end: Vec<u8>) {
        let options = DeleteOptions::new().with_range(if end.is_empty() {
            // To the end of all keys.
            vec![0]
        } else {
            end.clone()
        });
        let done = self.kv.delete(start.clone(), Some(options)).await;
        let done = done.expect("a deletion");
        let gone = self.forget(&start, &end);
        assert_eq!(done.deleted(), gone as i64, "what was alive in the range");
        if gone > 0 {
            self.deletions.push(self.revision + 1);
        }
        self.moved_to(done.header());
    }

    async fn txn(&mut self, count: usize) {
        let mut ops = Vec::new();
        let mut deleted = 0;
        // etcd refuses a put into a range that the same transaction deletes.
        let range = (self.rng.u32(0..3) == 0).then(|| self.range());
        let mut used = BTreeSet::new();
        let mut puts = Vec::new();
        for _ in 0..count {
            let key = self.any_key();
            let hit = range
                .as_ref()
                .is_some_and(|(start, end)| &key >= start && (end.is_empty() || &key < end));
            if hit || !used.insert(key.clone()) {
                continue;
            }
            if self.rng.u32(0..4) == 0 {
                deleted += self.forget(&key, &after(&key));
                ops.push(TxnOp::delete(key, None));
            } else {
                let value = self.short_value();
                let lease = self.any_lease();
                let options = PutOptions::new().with_lease(lease);
                ops.push(TxnOp::put(key.clone(), value, Some(options)));
                puts.push((key, lease));
            }
        }
        if let Some((start, end)) = range {
            deleted += self.forget(&start, &end);
            let options = DeleteOptions::new().with_range(end);
            let at = self.rng.usize(..=ops.len());
            ops.insert(at, TxnOp::delete(start, Some(options)));
        }
        self.live.extend(puts);
        if deleted > 0 {
            self.deletions.push(self.revision + 1);
        }
        let done = self.kv.txn(Txn::new().and_then(ops)).await;
        self.moved_to(done.expect("a transaction").header());
    }

    async fn grant(&mut self) {
        // A lease that does not expire during the test, with an ID that no double can represent.
        let id = self.rng.i64(1..=i64::MAX);
        let options = LeaseGrantOptions::new().with_id(id);
        let done = self.client.lease_grant(100_000, Some(options)).await;
        self.leases.push(id);
        self.moved_to(done.expect("a lease").header());
    }

    /// Revokes a lease. Its keys are deleted in one revision.
    async fn revoke(&mut self) {
        if self.leases.is_empty() {
            return;
        }
        let id = self.leases.swap_remove(self.rng.usize(..self.leases.len()));
        let before = self.live.len();
        self.live.retain(|_, lease| *lease != id);
        if self.live.len() < before {
            self.deletions.push(self.revision + 1);
        }
        let done = self.client.lease_revoke(id).await;
        self.moved_to(done.expect("a lease's end").header());
    }

    fn moved_to(&mut self, header: Option<&etcd_client::ResponseHeader>) {
        let revision = header.expect("a header").revision();
        assert!(
            (self.revision..=self.revision + 1).contains(&revision),
            "somebody else writes to this etcd: revision {revision} after {}",
            self.revision
        );
        self.revision = revision;
    }

    /// Removes a range from the live keys and returns how many keys it had.
    fn forget(&mut self, start: &[u8], end: &[u8]) -> usize {
        let before = self.live.len();
        self.live
            .retain(|key, _| key.as_slice() < start || !end.is_empty() && key.as_slice() >= end);
        before - self.live.len()
    }

    /// Returns a key; half the time one of a few keys, which therefore change often.
    fn any_key(&mut self) -> Vec<u8> {
        let stride = if self.rng.bool() { 12 } else { 1 };
        let at = self.rng.usize(..self.keys.len() / stride) * stride;
        self.keys[at].clone()
    }

    fn any_live(&mut self) -> Option<(Vec<u8>, i64)> {
        let at = self.rng.usize(..self.live.len().max(1));
        let (key, lease) = self.live.iter().nth(at)?;
        Some((key.clone(), *lease))
    }

    /// Returns a lease, or most often none.
    fn any_lease(&mut self) -> i64 {
        if self.rng.u32(0..4) > 0 {
            return 0;
        }
        self.rng.choice(&self.leases).copied().unwrap_or(0)
    }

    /// Returns a range of up to a dozen known keys, without its end.
    fn range(&mut self) -> (Vec<u8>, Vec<u8>) {
        let start = self.rng.usize(..self.keys.len() - 1);
        let end = (start + self.rng.usize(1..=12)).min(self.keys.len() - 1);
        (self.keys[start].clone(), self.keys[end].clone())
    }

    fn value(&mut self) -> Vec<u8> {
        let length = match self.rng.u32(0..100) {
            0..3 => self.rng.usize(0..=self.max_value),
            3..20 => self.rng.usize(0..=self.max_value.min(8 << 10)),
            _ => return self.short_value(),
        };
        self.bytes(length)
    }

    fn short_value(&mut self) -> Vec<u8> {
        let length = match self.rng.u32(0..10) {
            0 => 0,
            _ => self.rng.usize(0..=self.max_value.min(200)),
        };
        self.bytes(length)
    }

    /// Returns noise or text: one compresses badly, the other well.
    fn bytes(&mut self, length: usize) -> Vec<u8> {
        if self.rng.bool() {
            let mut bytes = vec![0; length];
            self.rng.fill(&mut bytes);
            return bytes;
        }
        let text = r#"{"kind":"Pod","spec":"<b>&amp;</b>","unit":"µs ☃","n":"#;
        let text = format!("{text}{}}}", self.rng.u32(..)).into_bytes();
        text.into_iter().cycle().take(length).collect()
    }
}

/// Returns the keys that a history uses, sorted.
fn key_set(rng: &mut Rng) -> Vec<Vec<u8>> {
    // Includes the first and the last key that etcd accepts.
    let mut keys = BTreeSet::from([vec![0], vec![0, 0], vec![0xff], vec![0xff; 40]]);
    keys.extend(
        [
            "<a href=\"x\">&amp;</a>",
            "\u{2028}line\u{2029}separators",
            "schlüssel/ключ/鍵/🔑",
            "\"quoted\"\\\n\t\u{7f}",
        ]
        .map(|key| key.as_bytes().to_vec()),
    );
    keys.insert(b"long/".repeat(400));
    for n in 0..400 {
        let kind = ["pods", "leases", "configmaps", "events"][rng.usize(..4)];
        keys.insert(format!("/registry/{kind}/default/{n:03}").into_bytes());
    }
    for _ in 0..40 {
        let mut key = vec![0; rng.usize(1..30)];
        rng.fill(&mut key);
        keys.insert(key);
    }
    keys.into_iter().collect()
}

/// Returns the end of the range that holds only this key.
fn after(key: &[u8]) -> Vec<u8> {
    [key, &[0]].concat()
}

/// An event and the time at which it arrived.
type TimedEvent = (Event, DateTime<Utc>);

async fn watch_from(etcd: &Etcd, revision: i64) -> WatchStream {
    // Responses of any size are accepted, so no revision comes in fragments.
    let options = WatchOptions::new()
        .with_range(vec![0])
        .with_start_revision(revision);
    let mut watcher = etcd.watcher().await;
    watcher
        .watch(vec![0], Some(options))
        .await
        .expect("start a watch")
}

/// Collects events until the last revision is known and has arrived.
async fn collect(
    mut watch: WatchStream,
    mut last: tokio::sync::watch::Receiver<i64>,
) -> Vec<TimedEvent> {
    let mut seen: Vec<TimedEvent> = Vec::new();
    loop {
        let known = *last.borrow_and_update();
        let newest = seen.last().map_or(0, |(event, _)| revision_of(event));
        if known > 0 && newest >= known {
            return seen;
        }
        let message = tokio::select! {
            changed = last.changed(), if known == 0 => {
                changed.expect("the writer tells the last revision");
                continue;
            }
            message = tokio::time::timeout(WATCH_TIMEOUT, watch.message()) => message,
        };
        let answer = message
            .expect("the watch is silent")
            .expect("the watch's next answer")
            .expect("the watch goes on");
        assert!(!answer.canceled(), "canceled: {}", answer.cancel_reason());
        seen.extend(
            answer
                .events()
                .iter()
                .map(|event| (event.clone(), Utc::now())),
        );
    }
}

fn revision_of(event: &Event) -> i64 {
    event.kv().expect("an event's key").mod_revision()
}

/// Cuts between revisions, never within one. Each part gets at least one revision.
fn cut(rng: &mut Rng, events: &[TimedEvent], full_revision: i64, parts: usize) -> Vec<DeltaPart> {
    let revisions: Vec<&[TimedEvent]> = events
        .chunk_by(|a, b| revision_of(&a.0) == revision_of(&b.0))
        .collect();
    for (group, expected) in revisions.iter().zip(full_revision + 1..) {
        assert_eq!(revision_of(&group[0].0), expected, "a gap in the watch");
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
            start: revision_of(&part[0][0].0),
            last: revision_of(&part[part.len() - 1][0].0),
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
fn json<'a>(events: impl Iterator<Item = &'a TimedEvent>) -> Vec<u8> {
    let mut json = String::from("[");
    for (event, time) in events {
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
