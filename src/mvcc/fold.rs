//! The fold: merges a full snapshot (the base) and the changes after it into the records of a new full.
//!
//! Changes are added in the order of their revisions: first the base's own history above its compacted
//! revision, then the events of the deltas. Each changed key gets a slot in a table (`keys`), and its changes
//! wait in a log (`change_log`), because later changes may replace them. At the end, [`Fold::finish`] walks
//! the records of the base and the log in order, and passes every record that etcd's compaction would keep to
//! the caller. A [`PartialFold`] prepares changes on another thread before the changes that precede them are
//! folded.
//!
//! The fold checks that the changes continue each other and the base. etcd numbers the versions of a key, so
//! the numbers reveal a delta of another history.
//!
//! It reads no deltas and writes no files. `fold` calls it.

use super::change::{Change, state_after_record};
use super::keys::{KeyState, Keys, Slot, SlotId};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::base::opt::{REVISION, TIMELINE};
use crate::base::temp;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::change_log::{ChangeLog, LoggedChange};
use crate::mvcc::hash_kv::{HashKv, Hasher, HistoryHasher, is_alive};
use crate::mvcc::history::{Base, key_bucket};
use crate::mvcc::key_range::KeyRange;
use crate::mvcc::record::KeyValue;
use crate::mvcc::revision::{RecordKey, Revision, encode_revision};
use std::collections::HashMap;

/// The options of a fold.
#[derive(Debug, Clone)]
pub struct FoldOptions {
    /// The newest revision of the result. Later changes are ignored.
    pub target: Revision,
    /// The compacted revision of the result: −1, or the base's own or higher. If it is above `target`, it is
    /// also the newest revision of the result.
    pub compact: Revision,
    /// The keys of the result; records of other keys are dropped.
    pub keys: KeyRange,
    /// Whether all keys are detached from their leases.
    pub detach_leases: bool,
    /// The revisions of the base.
    pub base: Base,
    /// The directory for changes that do not fit into memory.
    pub temp_dir: temp::Dir,
    /// The maximum size of changes in memory, in bytes.
    pub buffer_bytes: usize,
    /// The limits of the result.
    pub limits: Limits,
}

/// The changes of a range of revisions: the table of keys, and the records of the changes.
struct Changes<'s> {
    keys: Keys,
    records: RecordSink<'s>,
    /// The last change, as (main, sub).
    last: Option<(Revision, u32)>,
}

/// The destination of records.
enum RecordSink<'s> {
    /// Records wait in a log: a later change may replace them.
    Log(Box<ChangeLog>),
    /// Records go straight to the result: no later change can replace them.
    Stream(Box<RecordStream<'s>>),
}

type RecordCallback<'s> = Box<dyn FnMut(&FoldedRecord<'_>) -> Result<()> + Send + 's>;

/// Passes records on as they are added.
struct RecordStream<'s> {
    callback: RecordCallback<'s>,
    hasher: HistoryHasher,
    /// The lease after each key's newest change, by slot; 0 if there is none.
    leases: Vec<i64>,
    /// Buffers to reuse.
    raw_key: Vec<u8>,
    record: Vec<u8>,
}

impl RecordStream<'_> {
    /// Passes on the record of a change. `write` appends the value, of `value_len` bytes.
    fn add(
        &mut self,
        keys: &Keys,
        change: &LoggedChange,
        value_len: usize,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        self.raw_key.clear();
        change.rk.encode(&mut self.raw_key);
        self.record.clear();
        let kv = change.record(keys.key(change.slot), &[]);
        kv.encode_with(&mut self.record, value_len, write)?;
        let slot = change.slot.0 as usize;
        if self.leases.len() <= slot {
            self.leases.resize(slot + 1, 0);
        }
        self.leases[slot] = change.lease;
        self.hasher.add(&self.raw_key, &self.record);
        (self.callback)(&FoldedRecord {
            rk: change.rk,
            key: &self.raw_key,
            len: self.record.len(),
            record: &self.record,
            // A later change of the key may follow.
            is_newest: false,
            lease: change.lease,
            lease_before: 0,
        })
    }
}

impl LoggedChange {
    /// Returns the record of the change with this key and value.
    fn record<'a>(&self, key: &'a [u8], value: &'a [u8]) -> KeyValue<'a> {
        if self.rk.tombstone {
            KeyValue::tombstone(key)
        } else {
            KeyValue {
                key,
                create_revision: self.create_revision,
                mod_revision: self.rk.main,
                version: self.version,
                value,
                lease: self.lease,
            }
        }
    }
}

impl Changes<'_> {
    fn new(options: &FoldOptions, buffer_bytes: usize) -> Self {
        Changes {
            keys: Keys::default(),
            records: RecordSink::Log(Box::new(ChangeLog::new(
                buffer_bytes,
                options.temp_dir.clone(),
                options.limits,
            ))),
            last: None,
        }
    }

    /// Adds a change: see [`Fold::apply`].
    fn apply(
        &mut self,
        options: &FoldOptions,
        main: Revision,
        sub: u32,
        change: &Change<'_>,
    ) -> Result<bool> {
        if main <= options.base.revision
            || main > options.target
            || !options.keys.contains(change.key())
        {
            return Ok(false);
        }
        let tombstone = matches!(change, Change::Delete { .. });
        let rk = RecordKey {
            main,
            sub,
            tombstone,
        };
        let mut logged = LoggedChange {
            rk,
            slot: SlotId(0),
            create_revision: Revision(0),
            version: 0,
            lease: 0,
            len: 0,
        };
        if let Change::Put(kv) | Change::PutBase64(kv) = change {
            let created_now = kv.create_revision == rk.main;
            if kv.mod_revision != rk.main
                || kv.create_revision > rk.main
                || kv.create_revision.0 < 1
                || kv.version < 1
                || (kv.version == 1) != created_now
            {
                return Err(Error::corrupt(format!(
                    "the record of key {} at revision {} contradicts itself (create_revision {}, mod_revision {}, version {})",
                    show_key(kv.key),
                    rk.main,
                    kv.create_revision,
                    kv.mod_revision,
                    kv.version
                )));
            }
            logged.create_revision = kv.create_revision;
            logged.version = kv.version;
            if !options.detach_leases {
                logged.lease = kv.lease;
            }
        }
        logged.slot = self.update_slot(options, rk, change.key(), change.state_after())?;
        let (keys, compact) = (&self.keys, options.compact);
        let write = |out: &mut Vec<u8>| change.append_value(main, out);
        match &mut self.records {
            RecordSink::Stream(stream) => {
                stream.add(keys, &logged, change.value_len(main)?, write)?;
            }
            RecordSink::Log(log) => {
                let survives = |c: &LoggedChange| survives(keys, compact, c);
                log.append(logged, write, survives)?;
            }
        }
        Ok(true)
    }

    /// Updates the slot of a key with its next change, which leaves it in `state`.
    fn update_slot(
        &mut self,
        options: &FoldOptions,
        rk: RecordKey,
        key: &[u8],
        state: KeyState,
    ) -> Result<SlotId> {
        if self.last.is_some_and(|last| (rk.main, rk.sub) <= last) {
            return Err(Error::internal(format!(
                "change {}_{} was folded out of order",
                rk.main, rk.sub
            )));
        }
        self.last = Some((rk.main, rk.sub));
        let id = self.find_or_add_slot(options, key, state, (rk.main, rk.sub))?;
        let slot = self.keys.at_mut(id);
        slot.newest = state;
        if rk.main > options.compact {
            slot.changed_after_compact = true;
        } else {
            slot.set_kept(rk.main, rk.sub);
        }
        Ok(id)
    }

    /// Finds the slot of a key whose next change is at `change` (main, sub) and leaves it in `state`, or adds
    /// a slot. Fails if the change cannot follow the key's newest state.
    fn find_or_add_slot(
        &mut self,
        options: &FoldOptions,
        key: &[u8],
        state: KeyState,
        change: (Revision, u32),
    ) -> Result<SlotId> {
        if let Some(id) = self.keys.find(key) {
            let newest = self.keys.at(id).newest;
            // etcdutl writes a record without a key each time it bumps the revision; these have no versions.
            return if key.is_empty() || state.follows(newest) {
                Ok(id)
            } else {
                Err(mismatch(options, key, change.0, state, newest))
            };
        }
        let most = options.limits.key_memory();
        if self.keys.memory() > most {
            return Err(options.limits.database_too_large(format!(
                "the changed keys need more than {most} bytes of memory, a quarter of the largest database"
            )));
        }
        self.keys.insert(key, state, change).ok_or_else(|| {
            Reason::Configuration.error(
                format!("the deltas change more keys than one fold can hold (4 billion): compact fewer deltas at once, \
                 with a lower {REVISION}"),
            )
        })
    }

    /// Adds all changes of a partial fold, which follow the changes so far.
    fn absorb(&mut self, options: &FoldOptions, part: Changes<'_>) -> Result<()> {
        let Changes {
            keys: part_keys,
            records: RecordSink::Log(mut part_log),
            last,
        } = part
        else {
            return Err(Error::internal("a partial fold has no log"));
        };
        let mut slot_ids = Vec::with_capacity(part_keys.len());
        for (key, part_slot) in part_keys.iter() {
            let id =
                self.find_or_add_slot(options, key, part_slot.first, part_slot.first_change())?;
            let slot = self.keys.at_mut(id);
            slot.newest = part_slot.newest;
            slot.changed_after_compact |= part_slot.changed_after_compact;
            if let Some((main, sub)) = part_slot.kept() {
                slot.set_kept(main, sub);
            }
            slot_ids.push(id);
        }
        drop(part_keys);
        let (keys, compact) = (&self.keys, options.compact);
        let with_our_slot = |c: &LoggedChange| LoggedChange {
            slot: slot_ids[c.slot.0 as usize],
            ..*c
        };
        let records = &mut self.records;
        part_log.for_each(
            true,
            |c| survives(keys, compact, &with_our_slot(c)),
            |c, value| {
                let change = with_our_slot(c);
                let write = |out: &mut Vec<u8>| {
                    out.extend_from_slice(value);
                    Ok(())
                };
                match records {
                    RecordSink::Stream(stream) => stream.add(keys, &change, value.len(), write),
                    RecordSink::Log(log) => {
                        log.append(change, write, |c| survives(keys, compact, c))
                    }
                }
            },
        )?;
        self.last = last.or(self.last);
        Ok(())
    }
}

/// Whether a compaction at `compact` keeps a change, as far as later changes are known.
fn survives(keys: &Keys, compact: Revision, change: &LoggedChange) -> bool {
    Slot::survives(Some(keys.at(change.slot)), compact, &change.rk)
}

/// A fold in progress. `'s` is the lifetime of the callback that a streaming fold passes its records to.
pub struct Fold<'s> {
    options: FoldOptions,
    changes: Changes<'s>,
    /// The leases that changed keys had in the base, by slot: a key's new lease lives as long as its old one.
    leases_before: HashMap<SlotId, i64>,
}

/// A fold of changes that follow others which are not folded yet; see [`Fold::absorb`].
pub struct PartialFold {
    options: FoldOptions,
    changes: Changes<'static>,
}

impl PartialFold {
    /// Starts a part of the fold with these options. It holds up to `buffer_bytes` of changes in memory.
    pub fn new(options: FoldOptions, buffer_bytes: usize) -> Self {
        PartialFold {
            changes: Changes::new(&options, buffer_bytes),
            options,
        }
    }

    /// Adds a change: see [`Fold::apply`].
    ///
    /// # Errors
    /// As [`Fold::apply`].
    pub fn apply(&mut self, main: Revision, sub: u32, change: &Change<'_>) -> Result<bool> {
        self.changes.apply(&self.options, main, sub, change)
    }

    /// Returns the memory that the keys need, in bytes.
    pub fn key_memory(&self) -> usize {
        self.changes.keys.memory()
    }
}

impl<'s> Fold<'s> {
    /// Starts a fold: reads the base's own history from its database `db`.
    ///
    /// # Errors
    /// `OutOfRange` if the base was compacted at a revision after the target; `CorruptSnapshot`; `TooLarge`;
    /// `Io`.
    pub fn new<R: ReadAt>(options: FoldOptions, db: &Database<R>) -> Result<Self> {
        let base = &options.base;
        if options.target < base.first_revision() {
            return Err(Reason::OutOfRange.error(format!(
                "the base was compacted at revision {} and no longer holds the state at revision {}: choose a later revision",
                base.compact_revision, options.target
            )));
        }
        let mut changes = Changes::new(&options, options.buffer_bytes);
        let mut c = db.cursor(&key_bucket(db)?);
        if let Some(from) = history_from(&options) {
            c.seek(&encode_revision(from, 0))?;
        }
        while let Some(e) = c.next()? {
            let rk = RecordKey::decode(e.key)?;
            if rk.main > options.target {
                break;
            }
            let kv = KeyValue::decode(e.value)?;
            if !options.keys.contains(kv.key) {
                continue;
            }
            // A key that is created and not changed again needs no slot: its only record is its newest, as
            // below the compacted revision.
            let created = !rk.tombstone && kv.version == 1 && kv.create_revision == rk.main;
            if !created || changes.keys.find(kv.key).is_some() {
                changes.update_slot(&options, rk, kv.key, state_after_record(&rk, kv))?;
            }
        }
        Ok(Fold {
            options,
            changes,
            leases_before: HashMap::new(),
        })
    }

    /// Adds an event of a delta. Returns false if it was ignored: its revision is in the base or after the
    /// target, or its key is not wanted.
    ///
    /// # Errors
    /// `HistoryMismatch` if the event cannot follow the earlier changes of its key; `CorruptSnapshot` if its
    /// fields contradict each other; `TooLarge`; `Io`, `NoSpace`.
    pub fn apply(&mut self, main: Revision, sub: u32, change: &Change<'_>) -> Result<bool> {
        self.changes.apply(&self.options, main, sub, change)
    }

    /// Adds a partial fold whose changes follow all changes so far.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn absorb(&mut self, part: PartialFold) -> Result<()> {
        self.changes.absorb(&self.options, part.changes)
    }

    /// Whether every change that is added from now on stays in the result, so that [`stream`](Self::stream)
    /// is possible.
    pub fn can_stream(&self) -> bool {
        self.options.compact <= self.options.base.revision
    }

    /// Passes the kept records of the base to `callback` now, and every change from now on when it is added:
    /// each record once, in order, without a log. [`FoldedRecord::is_newest`] is unknown in a stream.
    /// [`finish_stream`](Self::finish_stream) ends it.
    ///
    /// # Errors
    /// `Internal` if [`can_stream`](Self::can_stream) is false; the errors of `callback`; `CorruptSnapshot`,
    /// `Io`.
    pub fn stream<'t, R: ReadAt>(
        mut self,
        db: &Database<R>,
        mut callback: impl FnMut(&FoldedRecord<'_>) -> Result<()> + Send + 't,
    ) -> Result<Fold<'t>> {
        if !self.can_stream() {
            return Err(Error::internal("a fold was streamed that can drop changes"));
        }
        self.walk(db, true, &mut callback)?;
        let stream = RecordStream {
            callback: Box::new(callback),
            hasher: HistoryHasher::default(),
            leases: Vec::new(),
            raw_key: Vec::new(),
            record: Vec::new(),
        };
        Ok(Fold {
            options: self.options,
            changes: Changes {
                keys: self.changes.keys,
                records: RecordSink::Stream(Box::new(stream)),
                last: self.changes.last,
            },
            leases_before: self.leases_before,
        })
    }

    /// Ends a stream: checks that the changes continue the base, and returns the HashKV of all records.
    /// `on_lease` is called with the lease of every live key that is attached to one.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn finish_stream<R: ReadAt>(
        mut self,
        db: &Database<R>,
        mut on_lease: impl FnMut(i64, i64),
    ) -> Result<HashKv> {
        let mut hasher = Hasher::new(self.options.compact);
        let live_keys = self.walk(db, true, |r| {
            hasher.add(&r.rk, r.key, r.record, r.is_newest);
            if r.is_newest && !r.rk.tombstone && r.lease != 0 {
                on_lease(r.lease, 0);
            }
            Ok(())
        })?;
        if let RecordSink::Stream(stream) = &self.changes.records {
            hasher.append(&stream.hasher);
            for (slot, &lease) in (0..).zip(&stream.leases) {
                if lease != 0 {
                    let before = self.leases_before.get(&SlotId(slot));
                    on_lease(lease, before.copied().unwrap_or(0));
                }
            }
        }
        Ok(hasher.finish(live_keys))
    }

    /// Calls `each` for every record of the result, in order, with its size but without its bytes.
    /// [`finish`](Self::finish) can follow.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn measure<R: ReadAt>(
        &mut self,
        db: &Database<R>,
        each: impl FnMut(&FoldedRecord<'_>) -> Result<()>,
    ) -> Result<()> {
        self.walk(db, false, each).map(|_| ())
    }

    /// Calls `each` for every record of the result, in order, and returns the HashKV at the newest revision.
    ///
    /// # Errors
    /// `HistoryMismatch` if the changes do not continue the base; `CorruptSnapshot`; the errors of `each`;
    /// `Io`.
    pub fn finish<R: ReadAt>(
        mut self,
        db: &Database<R>,
        mut each: impl FnMut(&FoldedRecord<'_>) -> Result<()>,
    ) -> Result<HashKv> {
        let mut hasher = Hasher::new(self.options.compact);
        let live_keys = self.walk(db, true, |r| {
            hasher.add(&r.rk, r.key, r.record, r.is_newest);
            each(r)
        })?;
        Ok(hasher.finish(live_keys))
    }

    /// Calls `each` for every record of the result; in a stream, only for those of the base. Returns the
    /// number of live keys.
    fn walk<R: ReadAt>(
        &mut self,
        db: &Database<R>,
        with_records: bool,
        mut each: impl FnMut(&FoldedRecord<'_>) -> Result<()>,
    ) -> Result<u64> {
        let options = &self.options;
        let (target, compact, base) = (options.target, options.compact, options.base);
        let Changes { keys, records, .. } = &mut self.changes;
        let mut live_keys = 0;
        let mut record = Vec::new();

        let mut c = db.cursor(&key_bucket(db)?);
        while let Some(e) = c.next()? {
            let rk = RecordKey::decode(e.key)?;
            if rk.main > target {
                break;
            }
            let mut kv = KeyValue::decode(e.value)?;
            if !options.keys.contains(kv.key) {
                continue;
            }
            let state = state_after_record(&rk, kv);
            let id = keys.find(kv.key);
            match id.map(|id| keys.at_mut(id)) {
                None => live_keys += u64::from(is_alive(&rk, kv.key)),
                // The changes in the slot follow this record.
                Some(slot) if (rk.main, rk.sub) < slot.first_change() => {
                    slot.alive_in_base = !rk.tombstone;
                    if let (Some(id), true) = (id, kv.lease != 0) {
                        self.leases_before.insert(id, kv.lease);
                    }
                    if base.compaction_finished && slot.alive_in_base && !slot.first.follows(state)
                    {
                        let at = slot.first_change().0;
                        return Err(mismatch(options, kv.key, at, slot.first, state));
                    }
                }
                Some(_) => {}
            }
            let slot = id.map(|id| keys.at(id));
            if !Slot::survives(slot, compact, &rk) {
                continue;
            }
            let mut folded = FoldedRecord {
                rk,
                key: e.key,
                len: e.value.len(),
                record: e.value,
                is_newest: slot.is_none_or(|s| is_newest(s, compact, &rk, state)),
                lease: kv.lease,
                lease_before: 0,
            };
            if options.detach_leases && kv.lease != 0 {
                (kv.lease, folded.lease) = (0, 0);
                record.clear();
                kv.encode(&mut record);
                (folded.len, folded.record) = (record.len(), &record);
            }
            each(&folded)?;
        }
        // Free the pages of the cursor, which may be as large as the largest value.
        drop(c);
        for (key, slot) in keys.iter() {
            if base.compaction_finished
                && !slot.alive_in_base
                && !slot.first.follows(KeyState::Gone)
            {
                let at = slot.first_change().0;
                return Err(mismatch(options, key, at, slot.first, KeyState::Gone));
            }
            live_keys += u64::from(slot.newest != KeyState::Gone && !key.is_empty());
        }

        if let RecordSink::Log(log) = records {
            let before = &self.leases_before;
            log_records(log, keys, compact, with_records, before, each)?;
        }
        Ok(live_keys)
    }
}

/// Calls `each` for every record of the log that stays in the result, without its bytes if `with_records` is
/// false.
fn log_records(
    log: &mut ChangeLog,
    keys: &Keys,
    compact: Revision,
    with_records: bool,
    leases_before: &HashMap<SlotId, i64>,
    mut each: impl FnMut(&FoldedRecord<'_>) -> Result<()>,
) -> Result<()> {
    let (mut raw_key, mut record) = (Vec::new(), Vec::new());
    log.for_each(
        with_records,
        |c| survives(keys, compact, c),
        |c, value| {
            raw_key.clear();
            c.rk.encode(&mut raw_key);
            let kv = c.record(keys.key(c.slot), value);
            record.clear();
            let len = if with_records {
                kv.encode(&mut record);
                record.len()
            } else {
                kv.encoded_len(c.len)
            };
            let state = state_after_record(&c.rk, kv);
            each(&FoldedRecord {
                rk: c.rk,
                key: &raw_key,
                len,
                record: &record,
                is_newest: is_newest(keys.at(c.slot), compact, &c.rk, state),
                lease: c.lease,
                lease_before: leases_before.get(&c.slot).copied().unwrap_or(0),
            })
        },
    )
}

/// A record of the result.
#[derive(Debug, Clone, Copy)]
pub struct FoldedRecord<'a> {
    /// The decoded key of the record.
    pub rk: RecordKey,
    /// The raw key of the record in the bucket `key`.
    pub key: &'a [u8],
    /// The size of the record in bytes.
    pub len: usize,
    /// The record, an encoded [`KeyValue`]; undefined while measuring.
    pub record: &'a [u8],
    /// Whether it is the newest record of its key. A tombstone above the compacted revision counts as the
    /// newest if the key is deleted in the end.
    pub is_newest: bool,
    /// The lease that the record attaches its key to, or 0.
    pub lease: i64,
    /// The lease that the key had in the base, if a change followed; 0 if none, or while streaming.
    pub lease_before: i64,
}

/// Whether a record of the result is its key's newest. At or below the compacted revision a key has only one
/// such record; above it, the version identifies the record.
fn is_newest(slot: &Slot, compact: Revision, rk: &RecordKey, state: KeyState) -> bool {
    if rk.main <= compact {
        !slot.changed_after_compact
    } else {
        slot.newest == state
    }
}

/// Returns the first revision of the base's history: below it, each key has one record. Returns `None` if a
/// compaction of the base was not finished, so that all its records are history.
fn history_from(options: &FoldOptions) -> Option<Revision> {
    let base = &options.base;
    base.compaction_finished
        .then(|| base.compact_revision.next().max(Revision(0)))
}

/// Formats a key for a message: quoted, escaped, and cut after 80 bytes.
pub(crate) fn show_key(key: &[u8]) -> String {
    const LONGEST: usize = 80;
    let shown = key[..key.len().min(LONGEST)].escape_ascii();
    let more = if key.len() > LONGEST { "…" } else { "" };
    format!("\"{shown}{more}\"")
}

/// Returns the error for a change to `state` (at revision `at` or after) that cannot follow the state
/// `before`.
fn mismatch(
    options: &FoldOptions,
    key: &[u8],
    at: Revision,
    state: KeyState,
    before: KeyState,
) -> Error {
    let describe = |state, gone: &str, alive: &str| match state {
        KeyState::Gone => gone.to_owned(),
        KeyState::Alive { create, version } => {
            format!("{alive} version {version}, created at revision {create}")
        }
    };
    let was = describe(before, "did not exist", "was at");
    let becomes = describe(state, "deletes it", "sets it to");
    if options.target <= options.base.revision {
        return Error::corrupt(format!(
            "its records contradict each other: key {} {was}, and the change at revision {at} {becomes}; use another copy or another snapshot",
            show_key(key)
        ));
    }
    Reason::HistoryMismatch.error(format!(
        "the deltas do not continue the history before them: key {} {was}, and the next change (at revision {at} or after) {becomes}; \
         the snapshots come from two histories: see `deltafold list --deep`, and choose one with {TIMELINE}",
        show_key(key)
    ))
}
