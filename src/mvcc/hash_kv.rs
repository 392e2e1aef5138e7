//! etcd's HashKV, computed by us: over a finished file, or along the way while one is folded.
//!
//! Source: etcd's `server/storage/mvcc/hash.go` and `kvstore.go`; the rule is in ARCHITECTURE.md.

use crate::base::ReadAt;
use crate::bolt::Database;
use crate::error::{Reason, Result};
use crate::mvcc::history::{Base, KEY_BUCKET, key_bucket};
use crate::mvcc::record::KeyValue;
use crate::mvcc::revision::{RecordKey, Revision, encode_revision};
use crc_fast::{CrcAlgorithm, Digest};
use hashbrown::HashMap;

/// Bytes of memory beside a key's own: up to 113 for the map's entry of 33 while the map grows, and what the allocator
/// adds to the key.
const AROUND_A_KEY: usize = 160;

/// The sum that etcd's HashKV would give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashKv {
    /// CRC-32C over the bucket's name and the counted records.
    pub hash: u32,
    /// What an etcd may give that compacted at this very revision and remembers the sum from then; `hash` if keys are
    /// alive.
    at_compaction: u32,
    /// The compacted revision it depends on; −1 if never compacted.
    pub compact_revision: Revision,
    /// Keys alive at the revision asked for.
    pub live_keys: u64,
    /// Records at or below the revision asked for, counted by the sum or not.
    pub records: u64,
}

impl HashKv {
    /// Whether an etcd with the same records may have answered `hash`.
    pub fn is(&self, hash: u32) -> bool {
        hash == self.hash || hash == self.at_compaction
    }
}

/// Sums records above the compacted revision apart from those before them.
#[derive(Debug)]
pub(crate) struct Tail {
    digest: Digest,
    records: u64,
}

impl Default for Tail {
    fn default() -> Self {
        Tail {
            digest: Digest::new(CrcAlgorithm::Crc32Iscsi),
            records: 0,
        }
    }
}

impl Tail {
    pub(crate) fn add(&mut self, key: &[u8], value: &[u8]) {
        self.records += 1;
        self.digest.update(key);
        self.digest.update(value);
    }
}

/// Sums records in order, whatever they come from.
#[derive(Debug)]
pub(crate) struct Hasher {
    compact: Revision,
    counted: Digest,
    /// Where no key is alive etcd's set of records to keep is empty, and then it skips none.
    all: Digest,
    records: u64,
}

impl Hasher {
    pub(crate) fn new(compact_revision: Revision) -> Self {
        let mut d = Digest::new(CrcAlgorithm::Crc32Iscsi);
        d.update(KEY_BUCKET);
        Hasher {
            compact: compact_revision,
            counted: d,
            all: d,
            records: 0,
        }
    }

    /// Adds the raw key and value of a record; `is_newest` matters at or below the compacted
    /// revision only: whether it is its key's newest.
    pub(crate) fn add(&mut self, rk: &RecordKey, key: &[u8], value: &[u8], is_newest: bool) {
        self.records += 1;
        // Older versions remove a tombstone at exactly the compacted revision, newer ones keep it:
        // so that both have the same hash it never counts.
        if rk.tombstone && rk.main == self.compact {
            return;
        }
        if rk.main > self.compact || (is_newest && !rk.tombstone) {
            self.counted.update(key);
            self.counted.update(value);
        }
        self.all.update(key);
        self.all.update(value);
    }

    /// Adds records that follow all others: above the compacted revision each counts.
    pub(crate) fn append(&mut self, tail: &Tail) {
        self.records += tail.records;
        self.counted.combine(&tail.digest);
        self.all.combine(&tail.digest);
    }

    pub(crate) fn finish(self, live_keys: u64) -> HashKv {
        let counted = self.counted.finalize() as u32;
        let hash = match live_keys {
            0 => self.all.finalize() as u32,
            _ => counted,
        };
        HashKv {
            hash,
            at_compaction: counted,
            compact_revision: self.compact,
            live_keys,
            records: self.records,
        }
    }
}

/// Whether a record that is its key's newest makes a live key. `etcdutl snapshot restore
/// --bump-revision` writes a record without a key, which no range over keys finds.
pub(crate) fn is_alive(rk: &RecordKey, key: &[u8]) -> bool {
    !rk.tombstone && !key.is_empty()
}

/// HashKV of a database file at `revision`, or at its newest where that is `None`.
///
/// Reads the history above the compacted revision first, then what is below; memory grows with the
/// keys that were changed in that history only. Keys alive are counted by how many came into
/// being and went.
///
/// # Errors
/// `OutOfRange` for a revision that the file does not hold; `CorruptSnapshot`; `Io`.
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

    // The newest record of every key that was changed above the compacted revision; one that came
    // into being there has none below. Where a compaction was not finished, of every key: it may
    // have several records below.
    let finished = base.compaction_finished;
    let mut newest: HashMap<Box<[u8]>, RecordKey> = HashMap::new();
    let mut key_bytes = 0;
    let mut live_keys = 0u64;
    let mut above = Tail::default();
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
                key_bytes += kv.key.len() + AROUND_A_KEY;
                if key_bytes > db.limits().key_memory() {
                    return Err(db.limits().database_too_large(format!(
                        "the keys that its history changes need more than {key_bytes} bytes of memory"
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
