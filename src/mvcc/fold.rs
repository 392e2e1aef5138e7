//! The fold: a full snapshot and the changes after it become the records of a new one.
//!
//! Changes come in revision order: first the base's own history above its compacted revision, then
//! the events of the deltas. For each key touched one [`Slot`] is kept; what may have to be written
//! waits in the change log. At the end the base's records and the log are walked in order and every
//! record that etcd's compaction would keep is handed to the caller. It reads no deltas and writes
//! no file; `job::compact` calls it.
//!
//! On the way it checks that the changes continue one another and the base: etcd counts versions,
//! so a delta of another history is found out by its counting.

use crate::bolt::{Database, ReadAt};
use crate::error::{Error, Reason, Result};
use crate::mvcc::hash_kv::{HashKv, Hasher, is_alive};
use crate::mvcc::history::{Base, key_bucket};
use crate::mvcc::log::ChangeLog;
use crate::mvcc::record::KeyValue;
use crate::mvcc::revision::{RecordKey, Revision, encode_revision};
use hashbrown::HashMap;
use std::path::PathBuf;

/// What a fold shall make.
#[derive(Debug, Clone)]
pub struct FoldOptions {
    /// The newest revision of the result.
    pub target: Revision,
    /// The compacted revision of the result: −1, or from the base's own to `target`.
    pub compact: Revision,
    /// What the base says of itself.
    pub base: Base,
    /// Where changes go that do not fit into memory.
    pub temp_dir: PathBuf,
    /// How many bytes of changes are held in memory before they go there.
    pub buffer_bytes: usize,
}

/// A change of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// The key has this record now; `mod_revision` is the change's own.
    Put(KeyValue<'a>),
    /// The key is gone.
    Delete {
        /// Which.
        key: &'a [u8],
    },
}

impl Change<'_> {
    /// The key that changed.
    pub fn key(&self) -> &[u8] {
        match self {
            Change::Put(kv) => kv.key,
            Change::Delete { key } => key,
        }
    }
}

/// What is remembered of a key that was touched above the base's compacted revision.
#[derive(Debug)]
struct Slot {
    /// Its newest change at or below the new compacted revision: only that one is kept of those.
    kept: Option<RecordKey>,
    newest: State,
    /// What the first change said, to be compared with the base's record.
    first: State,
    /// Changed above the new compacted revision too: its kept record is not its newest.
    touched_after: bool,
    alive_in_base: bool,
}

/// What a change says of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Alive { create: Revision, version: i64 },
    Gone,
}

impl State {
    fn of(change: &Change<'_>) -> State {
        match change {
            Change::Put(kv) => State::Alive {
                create: kv.create_revision,
                version: kv.version,
            },
            Change::Delete { .. } => State::Gone,
        }
    }

    /// Whether a change to `self` can follow `before` (`Gone`: the key did not exist).
    fn follows(self, before: State) -> bool {
        match (before, self) {
            (State::Gone, State::Gone) => false,
            (State::Gone, State::Alive { version, .. }) => version == 1,
            (State::Alive { .. }, State::Gone) => true,
            (
                State::Alive { create, version },
                State::Alive {
                    create: c,
                    version: v,
                },
            ) => c == create && v == version.wrapping_add(1),
        }
    }
}

/// A fold under way.
#[derive(Debug)]
pub struct Fold {
    options: FoldOptions,
    slots: HashMap<Box<[u8]>, Slot>,
    log: ChangeLog,
    last: Option<(Revision, u32)>,
}

impl Fold {
    /// Starts a fold with the base's own history, read from its database.
    ///
    /// # Errors
    /// `OutOfRange` where the base was compacted past the target; `CorruptSnapshot`; `Io`.
    pub fn new<R: ReadAt>(options: FoldOptions, db: &Database<R>) -> Result<Self> {
        let base = &options.base;
        if options.target < base.first_revision() {
            return Err(Error::new(
                Reason::OutOfRange,
                format!(
                    "the base was compacted at revision {}: the state at revision {} is gone from it",
                    base.compact_revision, options.target
                ),
            ));
        }
        let log = ChangeLog::new(options.buffer_bytes, &options.temp_dir);
        let mut fold = Fold {
            slots: HashMap::new(),
            log,
            last: None,
            options,
        };
        let mut c = db.cursor(&key_bucket(db)?);
        if let Some(from) = fold.history_from() {
            c.seek(&encode_revision(from, 0))?;
        }
        while let Some(e) = c.next()? {
            let rk = RecordKey::decode(e.key)?;
            if rk.main > fold.options.target {
                break;
            }
            let kv = KeyValue::decode(e.value)?;
            let change = if rk.tombstone {
                Change::Delete { key: kv.key }
            } else {
                Change::Put(kv)
            };
            fold.note(rk, &change)?;
        }
        Ok(fold)
    }

    /// The first revision of the base that counts as history: below it each key has one record.
    /// `None` where the base's compaction was not finished, so that all of it is history.
    fn history_from(&self) -> Option<Revision> {
        let base = &self.options.base;
        base.compaction_finished
            .then(|| base.compact_revision.next().max(Revision(0)))
    }

    /// Adds an event of a delta. Revisions that the base holds, and those past the target, are
    /// passed over. Says whether it was taken.
    ///
    /// # Errors
    /// `HistoryMismatch` where it cannot follow what came before; `Io`, `NoSpace`.
    pub fn apply(&mut self, main: Revision, sub: u32, change: &Change<'_>) -> Result<bool> {
        if main <= self.options.base.revision || main > self.options.target {
            return Ok(false);
        }
        let tombstone = matches!(change, Change::Delete { .. });
        let rk = RecordKey {
            main,
            sub,
            tombstone,
        };
        let key = change.key();
        if let Change::Put(kv) = change {
            let born_now = kv.create_revision == rk.main;
            if kv.mod_revision != rk.main
                || kv.create_revision > rk.main
                || kv.create_revision.0 < 1
                || kv.version < 1
                || (kv.version == 1) != born_now
            {
                return Err(Error::corrupt(format!(
                    "the record of key {} at revision {} contradicts itself (create_revision {}, mod_revision {}, version {})",
                    show_key(key),
                    rk.main,
                    kv.create_revision,
                    kv.mod_revision,
                    kv.version
                )));
            }
        }
        self.note(rk, change)?;
        let (slots, compact) = (&self.slots, self.options.compact);
        self.log.append(
            rk,
            |out| match change {
                Change::Put(kv) => kv.encode(out),
                Change::Delete { key } => KeyValue::tombstone(key).encode(out),
            },
            |rk, record| Ok(is_kept(slots, compact, rk, KeyValue::decode(record)?.key)),
        )?;
        Ok(true)
    }

    fn note(&mut self, rk: RecordKey, change: &Change<'_>) -> Result<()> {
        if self.last.is_some_and(|last| (rk.main, rk.sub) <= last) {
            return Err(Error::internal(format!(
                "change {}_{} was folded out of order",
                rk.main, rk.sub
            )));
        }
        self.last = Some((rk.main, rk.sub));
        let key = change.key();
        let state = State::of(change);
        let after = rk.main > self.options.compact;
        if let Some(slot) = self.slots.get_mut(key) {
            if !state.follows(slot.newest) {
                return Err(mismatch(key, rk.main, state, slot.newest));
            }
            slot.newest = state;
            slot.touched_after |= after;
            if !after {
                slot.kept = Some(rk);
            }
        } else {
            let slot = Slot {
                kept: (!after).then_some(rk),
                newest: state,
                first: state,
                touched_after: after,
                alive_in_base: false,
            };
            self.slots.insert(key.into(), slot);
        }
        Ok(())
    }

    /// Hands every record of the result to `each`, as raw key and value in order, and gives HashKV
    /// of them at the target revision.
    ///
    /// # Errors
    /// `HistoryMismatch` where the changes do not continue the base; `CorruptSnapshot`; what `each`
    /// returns; `Io`.
    pub fn finish<R: ReadAt>(
        self,
        db: &Database<R>,
        mut each: impl FnMut(&[u8], &[u8]) -> Result<()>,
    ) -> Result<HashKv> {
        let history_from = self.history_from();
        let FoldOptions {
            target,
            compact,
            base,
            ..
        } = self.options;
        let mut slots = self.slots;
        let mut live_keys = 0;
        let mut hasher = Hasher::new(compact);

        let mut c = db.cursor(&key_bucket(db)?);
        while let Some(e) = c.next()? {
            let rk = RecordKey::decode(e.key)?;
            if rk.main > target {
                break;
            }
            let kv = KeyValue::decode(e.value)?;
            let slot = slots.get_mut(kv.key);
            if history_from.is_some_and(|from| rk.main < from) {
                let state = if rk.tombstone {
                    State::Gone
                } else {
                    State::of(&Change::Put(kv))
                };
                match slot {
                    None => live_keys += u64::from(is_alive(&rk, kv.key)),
                    Some(slot) => {
                        if !slot.first.follows(state) {
                            return Err(mismatch(kv.key, base.revision.next(), slot.first, state));
                        }
                        slot.alive_in_base = !rk.tombstone;
                    }
                }
            }
            if is_kept(&slots, compact, &rk, kv.key) {
                hasher.add(&rk, e.key, e.value, is_newest(&slots, kv.key));
                each(e.key, e.value)?;
            }
        }
        if base.compaction_finished {
            for (key, slot) in &slots {
                if !slot.alive_in_base && !slot.first.follows(State::Gone) {
                    return Err(mismatch(key, base.revision.next(), slot.first, State::Gone));
                }
            }
        }
        live_keys += slots
            .iter()
            .filter(|(key, s)| s.newest != State::Gone && !key.is_empty())
            .count() as u64;

        let mut raw_key = Vec::new();
        self.log.drain(|rk, record| {
            let key = KeyValue::decode(record)?.key;
            if !is_kept(&slots, compact, &rk, key) {
                return Ok(());
            }
            raw_key.clear();
            rk.encode(&mut raw_key);
            hasher.add(&rk, &raw_key, record, is_newest(&slots, key));
            each(&raw_key, record)
        })?;
        Ok(hasher.finish(live_keys))
    }
}

/// etcd's compaction: above the compacted revision everything stays; of what is at or below it each
/// key's newest record, and a tombstone only at exactly the compacted revision.
fn is_kept(
    slots: &HashMap<Box<[u8]>, Slot>,
    compact: Revision,
    rk: &RecordKey,
    key: &[u8],
) -> bool {
    if rk.main > compact {
        return true;
    }
    if rk.tombstone && rk.main != compact {
        return false;
    }
    let slot = slots.get(key);
    slot.is_none_or(|s| s.kept.is_none_or(|kept| kept == *rk))
}

/// Whether the record that is kept of a key at or below the compacted revision is its newest.
fn is_newest(slots: &HashMap<Box<[u8]>, Slot>, key: &[u8]) -> bool {
    slots.get(key).is_none_or(|s| !s.touched_after)
}

/// A key as it may be shown: printable, and not longer than a line.
pub(crate) fn show_key(key: &[u8]) -> String {
    const LONGEST: usize = 80;
    let shown = key[..key.len().min(LONGEST)].escape_ascii();
    let more = if key.len() > LONGEST { "…" } else { "" };
    format!("\"{shown}{more}\"")
}

fn mismatch(key: &[u8], at: Revision, state: State, before: State) -> Error {
    let was = match before {
        State::Gone => "it did not exist".to_owned(),
        State::Alive { create, version } => {
            format!("it was at version {version}, created at revision {create}")
        }
    };
    let is = match state {
        State::Gone => "deletes it".to_owned(),
        State::Alive { create, version } => {
            format!("makes it version {version}, created at revision {create}")
        }
    };
    Error::new(
        Reason::HistoryMismatch,
        format!(
            "the deltas do not continue the history before them: of key {}, {was}, and the next change (at revision {at} or after) {is}; \
             the snapshots come from two histories: see `deltafold list --deep`, and choose one with --timeline",
            show_key(key)
        ),
    )
}
