//! A record of a real etcd, made by an independent watch: every change with its time. If the watch began at the first
//! revision, also the state at any revision, and the HashKV that etcd would give for it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use crc_fast::{CrcAlgorithm, checksum, checksum_combine};
use deltafold::mvcc::{KeyValue, RecordKey, Revision};
use etcd_client::{Client, ConnectOptions, Error, Event, EventType, WatchOptions};
use tokio::task::JoinHandle;

use super::etcd::Etcd;

const CRC: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;
/// The longest time that the watch may lag behind.
const PATIENCE: Duration = Duration::from_secs(120);

/// An event and the time at which it arrived.
pub type TimedEvent = (Event, DateTime<Utc>);

#[derive(Clone, Debug)]
struct RecordedChange {
    revision: i64,
    sub: u32,
    event: Arc<TimedEvent>,
    /// Place, checksum and length of the record on disk; `None` for a deletion.
    record: Option<Record>,
}

impl RecordedChange {
    fn key(&self) -> &[u8] {
        self.event.0.kv().expect("an event's key").key()
    }
}

/// A record's place, checksum and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    rk: RecordKey,
    crc: u64,
    length: u64,
}

impl Record {
    fn of(rk: RecordKey, raw: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(raw.len() + 18);
        rk.encode(&mut bytes);
        bytes.extend_from_slice(raw);
        Self {
            rk,
            crc: checksum(CRC, &bytes),
            length: bytes.len() as u64,
        }
    }
}

/// The state of an etcd that is compacted at a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub hash: u32,
    pub live_keys: u64,
}

/// A watch that records an etcd as long as it lives.
pub struct Truth {
    /// The revision before the first one of the record.
    before: i64,
    seen: Arc<Mutex<Vec<RecordedChange>>>,
    watch: JoinHandle<()>,
}

impl Truth {
    /// Starts the record. Call it inside a runtime, on an etcd that was never compacted.
    pub fn start(endpoints: &[String]) -> Self {
        Self::watch(0, endpoints, ConnectOptions::new(), Vec::new())
    }

    /// Starts a record of what follows a revision.
    pub fn after(revision: i64, etcd: &Etcd) -> Self {
        let endpoints = [etcd.endpoint().to_owned()];
        Self::watch(revision, &endpoints, etcd.connect_options(), Vec::new())
    }

    /// Starts the record of the same etcd after it was set back to a revision: the changes up to there, and
    /// what follows.
    pub fn forked_at(&self, revision: i64, endpoints: &[String]) -> Self {
        let mut seen = self.seen().clone();
        seen.retain(|s| s.revision <= revision);
        Self::watch(0, endpoints, ConnectOptions::new(), seen)
    }

    fn watch(
        before: i64,
        endpoints: &[String],
        options: ConnectOptions,
        seen: Vec<RecordedChange>,
    ) -> Self {
        let seen = Arc::new(Mutex::new(seen));
        let options = options
            .with_connect_timeout(Duration::from_secs(1))
            .with_require_leader(true)
            .with_keep_alive(Duration::from_secs(5), Duration::from_secs(3));
        let watch = keep_watching(before, endpoints.to_vec(), options, Arc::clone(&seen));
        Self {
            before,
            seen,
            watch: tokio::spawn(watch),
        }
    }

    /// Ends the watch: later changes belong to another history.
    pub fn end(&self) {
        self.watch.abort();
    }

    fn seen(&self) -> MutexGuard<'_, Vec<RecordedChange>> {
        self.seen.lock().expect("the watch did not panic")
    }

    /// Returns the newest recorded revision; 1 if nobody has written.
    pub fn revision(&self) -> i64 {
        let newest = self.seen().last().map(|s| s.revision);
        newest.unwrap_or(self.before.max(1))
    }

    /// Returns all recorded events.
    pub fn timed_events(&self) -> Vec<Arc<TimedEvent>> {
        self.seen().iter().map(|s| Arc::clone(&s.event)).collect()
    }

    /// Returns the number of recorded events.
    pub fn events(&self) -> usize {
        self.seen().len()
    }

    pub fn wait_for(&self, revision: i64) {
        let started = Instant::now();
        while self.revision() < revision {
            assert!(started.elapsed() < PATIENCE, "the watch is silent");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits like [`wait_for`](Self::wait_for), without blocking a thread.
    pub async fn has_seen(&self, revision: i64) {
        let started = Instant::now();
        while self.revision() < revision {
            assert!(started.elapsed() < PATIENCE, "the watch is silent");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Returns the states at these revisions, which must all have been recorded.
    pub fn at(&self, revisions: &BTreeSet<i64>) -> BTreeMap<i64, State> {
        let seen = self.seen();
        let mut states = BTreeMap::new();
        let mut newest: HashMap<&[u8], Record> = HashMap::new();
        let mut alive: BTreeMap<(i64, u32), Record> = BTreeMap::new();
        let mut changes = seen.iter().peekable();
        for &revision in revisions {
            let until = seen.last().map_or(1, |s| s.revision);
            assert!(revision <= until, "revision {revision} was not seen yet");
            while let Some(s) = changes.next_if(|s| s.revision <= revision) {
                if let Some(old) = newest.remove(s.key()) {
                    alive.remove(&(old.rk.main.0, old.rk.sub));
                }
                if let Some(record) = s.record {
                    newest.insert(s.key(), record);
                    alive.insert((s.revision, s.sub), record);
                }
            }
            let mut hash = checksum(CRC, b"key");
            for record in alive.values() {
                hash = checksum_combine(CRC, hash, record.crc, record.length);
            }
            let state = State {
                hash: u32::try_from(hash).expect("a CRC of 32 bits"),
                live_keys: alive.len() as u64,
            };
            states.insert(revision, state);
        }
        states
    }

    /// Returns the first keys whose records differ from those alive at a revision.
    pub fn differences(&self, revision: i64, ours: &[(RecordKey, Vec<u8>)]) -> Vec<String> {
        let seen = self.seen();
        let mut wanted: BTreeMap<&[u8], Record> = BTreeMap::new();
        for s in seen.iter().take_while(|s| s.revision <= revision) {
            match s.record {
                Some(record) => _ = wanted.insert(s.key(), record),
                None => _ = wanted.remove(s.key()),
            }
        }
        let mut told = Vec::new();
        for (rk, raw) in ours {
            let kv = KeyValue::decode(raw).expect("a record");
            let key = String::from_utf8_lossy(kv.key).into_owned();
            let got = Record::of(*rk, raw);
            match wanted.remove(kv.key) {
                Some(record) if record == got => {}
                Some(record) => told.push(format!("{key}: {got:?}, the source had {record:?}")),
                None => told.push(format!("{key}: {got:?}, the source had none")),
            }
        }
        let missing = wanted.iter();
        told.extend(
            missing.map(|(k, r)| format!("{}: {r:?} is missing", String::from_utf8_lossy(k))),
        );
        told.truncate(20);
        told
    }

    /// Asserts that etcd agrees: compacts it at its newest revision and compares. Nobody else may write.
    pub async fn is_that_of(&self, etcd: &Etcd) {
        let revision = etcd.revision().await;
        self.has_seen(revision).await;
        etcd.compact(revision).await;
        let said = etcd.hash_kv(revision).await;
        let here = self.at(&BTreeSet::from([revision]))[&revision];
        let theirs = State {
            hash: said.hash,
            live_keys: etcd.live_keys_at(revision).await,
        };
        assert_eq!(said.compact_revision, revision);
        assert_eq!(here, theirs, "what the test itself saw, at {revision}");
    }
}

impl Drop for Truth {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

/// Continues at another member whenever one fails.
async fn keep_watching(
    before: i64,
    endpoints: Vec<String>,
    options: ConnectOptions,
    seen: Arc<Mutex<Vec<RecordedChange>>>,
) {
    for endpoint in endpoints.iter().cycle() {
        // It returns only after a failure.
        let _ = watch_one(before, endpoint, options.clone(), &seen).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn watch_one(
    before: i64,
    endpoint: &str,
    options: ConnectOptions,
    seen: &Mutex<Vec<RecordedChange>>,
) -> Result<(), Error> {
    let client = Client::connect([endpoint], Some(options)).await?;
    let mut watcher = client.watch_client().max_decoding_message_size(usize::MAX);
    let last = || {
        let seen = seen.lock().expect("nobody panicked");
        seen.last().map_or(before, |s| s.revision)
    };
    let options = WatchOptions::new()
        .with_range(vec![0])
        .with_start_revision(last() + 1);
    let mut stream = watcher.watch(vec![0], Some(options)).await?;
    while let Some(answer) = stream.message().await? {
        let compacted = answer.compact_revision();
        assert_eq!(
            compacted, 0,
            "the test compacted what its watch had not seen"
        );
        if answer.canceled() {
            return Ok(());
        }
        let mut revision = last();
        let mut new: Vec<RecordedChange> = Vec::new();
        let mut raw = Vec::new();
        for event in answer.events() {
            let kv = event.kv().expect("an event's key");
            let main = kv.mod_revision();
            assert!(
                main >= revision,
                "the watch goes back: {main} after {revision}"
            );
            let sub = match new.last() {
                Some(s) if s.revision == main => s.sub + 1,
                _ => {
                    assert_eq!(main, revision.max(1) + 1, "a gap in the watch");
                    revision = main;
                    0
                }
            };
            let record = (event.event_type() == EventType::Put).then(|| {
                raw.clear();
                let kv = KeyValue {
                    key: kv.key(),
                    create_revision: Revision(kv.create_revision()),
                    mod_revision: Revision(main),
                    version: kv.version(),
                    value: kv.value(),
                    lease: kv.lease(),
                };
                kv.encode(&mut raw);
                let main = Revision(main);
                let tombstone = false;
                Record::of(
                    RecordKey {
                        main,
                        sub,
                        tombstone,
                    },
                    &raw,
                )
            });
            new.push(RecordedChange {
                revision: main,
                sub,
                event: Arc::new((event.clone(), Utc::now())),
                record,
            });
        }
        seen.lock().expect("nobody panicked").extend(new);
    }
    Ok(())
}
