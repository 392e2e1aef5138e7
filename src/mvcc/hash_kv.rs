//! Computes etcd's HashKV: over a database file, or during a fold.
//!
//! docs/design/format.md describes the rules; their source is etcd's `server/storage/mvcc/hash.go` and `kvstore.go`.

use crate::base::ReadAt;
use crate::bolt::Database;
use crate::error::{Reason, Result};
use crate::mvcc::history::{Base, KEY_BUCKET, key_bucket};
use crate::mvcc::record::KeyValue;
use crate::mvcc::revision::{RecordKey, Revision, encode_revision};
use crc_fast::{CrcAlgorithm, Digest};
use hashbrown::HashMap;

/// The memory for a key of the map beside the key's own bytes: up to 113 bytes for the map's entry of 33
/// bytes while the map grows, and the overhead of the allocator.
const KEY_OVERHEAD: usize = 160;

/// The HashKV of a database at a revision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashKv {
    /// The CRC-32C over the bucket's name and the hashed records.
    pub hash: u32,
    /// The hash that an etcd may return if it compacted at exactly this revision and remembers the hash from
    /// then. It differs from `hash` only if no key is alive.
    at_compaction: u32,
    /// The compacted revision on which the hash depends; −1 if never compacted.
    pub compact_revision: Revision,
    /// The number of keys that are alive at the requested revision.
    pub live_keys: u64,
    /// The number of records at or below the requested revision, hashed or not.
    pub records: u64,
}

impl HashKv {
    /// Whether an etcd with the same records can return `hash`.
    pub fn is(&self, hash: u32) -> bool {
        hash == self.hash || hash == self.at_compaction
    }
}

/// Hashes records above the compacted revision before the records below them are known; see
/// [`Hasher::append`].
#[derive(Debug)]
pub(crate) struct HistoryHasher {
    digest: Digest,
    records: u64,
}

impl Default for HistoryHasher {
    fn default() -> Self {
        HistoryHasher {
            digest: Digest::new(CrcAlgorithm::Crc32Iscsi),
            records: 0,
        }
    }
}

impl HistoryHasher {
    /// Adds the raw key and value of a record.
    pub(crate) fn add(&mut self, key: &[u8], value: &[u8]) {
        self.records += 1;
        self.digest.update(key);
        self.digest.update(value);
    }
}

/// Hashes records in the order of their keys.
#[derive(Debug)]
pub(crate) struct Hasher {
    compact: Revision,
    /// The hash without the records that a compaction would remove.
    compacted: Digest,
    /// The hash of all records. It is etcd's result if no key is alive: its set of records to keep is empty
    /// then, and etcd skips no record.
    all: Digest,
    records: u64,
}

impl Hasher {
    pub(crate) fn new(compact_revision: Revision) -> Self {
        let mut d = Digest::new(CrcAlgorithm::Crc32Iscsi);
        d.update(KEY_BUCKET);
        Hasher {
            compact: compact_revision,
            compacted: d,
            all: d,
            records: 0,
        }
    }

    /// Adds the raw key and value of a record. `is_newest` says whether it is its key's newest; it matters
    /// only at or below the compacted revision.
    pub(crate) fn add(&mut self, rk: &RecordKey, key: &[u8], value: &[u8], is_newest: bool) {
        self.records += 1;
        // Older versions of etcd remove a tombstone at exactly the compacted revision, and newer ones keep
        // it. It is never hashed, so that both get the same hash.
        if rk.tombstone && rk.main == self.compact {
            return;
        }
        if rk.main > self.compact || (is_newest && !rk.tombstone) {
            self.compacted.update(key);
            self.compacted.update(value);
        }
        self.all.update(key);
        self.all.update(value);
    }

    /// Adds the records above the compacted revision, after all records at or below it.
    pub(crate) fn append(&mut self, history: &HistoryHasher) {
        self.records += history.records;
        self.compacted.combine(&history.digest);
        self.all.combine(&history.digest);
    }

    pub(crate) fn finish(self, live_keys: u64) -> HashKv {
        let compacted = self.compacted.finalize() as u32;
        let hash = match live_keys {
            0 => self.all.finalize() as u32,
            _ => compacted,
        };
        HashKv {
            hash,
            at_compaction: compacted,
            compact_revision: self.compact,
            live_keys,
            records: self.records,
        }
    }
}

/// Whether a key is alive whose newest record this is. A record without a key does not count: `etcdutl
/// snapshot restore --bump-revision` writes one, and no range request finds it.
pub(crate) fn is_alive(rk: &RecordKey, key: &[u8]) -> bool {
    !rk.tombstone && !key.is_empty()
}

/// Computes the HashKV of a database file at `revision`, or at its newest revision if that is `None`.
///
/// It reads the history above the compacted revision first, then the records below. Only the keys that were
/// changed in that history need memory. The number of live keys is computed from creations and deletions.
///
/// # Errors
/// `OutOfRange` if the file does not hold the revision; `TooLarge` if the keys need too much memory;
/// `CorruptSnapshot`; `Io`.
pub fn hash_kv<R: ReadAt>(db: &Database<R>, revision: Option<Revision>) -> Result<HashKv> {
    let base = Base::read(db)?;
    let at = revision.unwrap_or(base.revision);
    if at < base.compact_revision || at > base.revision {
        return Err(Reason::OutOfRange.error(format!(
            "the snapshot holds revisions {} to {}, not {at}",
            base.first_revision(),
            base.revision
        )));
    }
    let bucket = key_bucket(db)?;
    let compact = base.compact_revision;

    // The newest record of every key that was changed above the compacted revision, except keys that were
    // created there: they have no records below. After an unfinished compaction it is the newest record of
    // every key, because a key may have several records below.
    let finished = base.compaction_finished;
    let mut newest: HashMap<Box<[u8]>, RecordKey> = HashMap::new();
    let mut key_bytes = 0;
    let mut live_keys = 0u64;
    let mut above = HistoryHasher::default();
    let mut c = db.cursor(&bucket);
    if finished {
        c.seek(&encode_revision(compact.next().max(Revision(0)), 0))?;
    }
    while let Some(e) = c.next()? {
        let rk = RecordKey::decode(e.key)?;
        if rk.main > at {
            break;
        }
        if rk.main > compact {
            above.add(e.key, e.value);
        }
        let kv = KeyValue::decode(e.value)?;
        if finished && !rk.tombstone && kv.version == 1 {
            live_keys = live_keys.wrapping_add(u64::from(is_alive(&rk, kv.key)));
            continue;
        }
        if finished && rk.tombstone {
            live_keys = live_keys.wrapping_sub(1);
        }
        match newest.get_mut(kv.key) {
            Some(n) => *n = rk,
            None => {
                key_bytes += kv.key.len() + KEY_OVERHEAD;
                if key_bytes > db.limits().key_memory() {
                    return Err(db.limits().database_too_large(format!(
                        "the keys that its history changes need {key_bytes} bytes of memory or more"
                    )));
                }
                newest.insert(kv.key.into(), rk);
            }
        }
    }
    if !finished {
        live_keys = newest.iter().filter(|(key, rk)| is_alive(rk, key)).count() as u64;
    }

    let mut hasher = Hasher::new(compact);
    let mut c = db.cursor(&bucket);
    while let Some(e) = c.next()? {
        let rk = RecordKey::decode(e.key)?;
        if rk.main > compact {
            break;
        }
        let key = KeyValue::decode(e.value)?.key;
        if finished {
            live_keys = live_keys.wrapping_add(u64::from(is_alive(&rk, key)));
        }
        let is_newest = newest.get(key).is_none_or(|n| *n == rk);
        hasher.add(&rk, e.key, e.value, is_newest);
    }
    hasher.append(&above);
    Ok(hasher.finish(live_keys))
}
