//! The fold: a full snapshot and the changes after it become the records of a new one.
//!
//! Changes come in revision order: first the base's own history above its compacted revision, then
//! the events of the deltas. For each key touched one slot is kept (`keys`); what may have to be
//! written waits in the change log (`log`). At the end the base's records and the log are walked in
//! order and every record that etcd's compaction would keep is handed to the caller. A [`Part`]
//! folds changes whose turn has not come: several deltas are read at once. It reads no deltas and
//! writes no file; `ops` calls it.
//!
//! On the way it checks that the changes continue one another and the base: etcd counts versions,
//! so a delta of another history is found out by its counting.

use super::keys::{Keys, Slot, SlotId, State};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::base::temp;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::change_log::{ChangeLog, Entry};
use crate::mvcc::hash_kv::{HashKv, Hasher, Tail, is_alive};
use crate::mvcc::history::{Base, key_bucket};
use crate::mvcc::key_range::KeyRange;
use crate::mvcc::record::KeyValue;
use crate::mvcc::revision::{RecordKey, Revision, encode_revision};
use base64_simd::STANDARD;

/// What a fold shall make.
#[derive(Debug, Clone)]
pub struct FoldOptions {
    /// The newest revision of the result.
    pub target: Revision,
    /// The compacted revision of the result: −1, or from the base's own on. Above `target` it is the
    /// result's newest revision, too.
    pub compact: Revision,
    /// Whose records are folded; of all others the result holds none.
    pub keys: KeyRange,
    /// Whether the result's keys are attached to no lease.
    pub detach_leases: bool,
    /// What the base says of itself.
    pub base: Base,
    /// Where changes go that do not fit into memory.
    pub temp_dir: temp::Dir,
    /// How many bytes of changes are held in memory before they go there.
    pub buffer_bytes: usize,
    /// How large the database may be that they make.
    pub limits: Limits,
}

/// A change of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// The key has this record now; `mod_revision` is the change's own.
    Put(KeyValue<'a>),
    /// As `Put`, with the value still in base64 (the standard alphabet, with padding).
    PutBase64(KeyValue<'a>),
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
            Change::Put(kv) | Change::PutBase64(kv) => kv.key,
            Change::Delete { key } => key,
        }
    }

    /// Bytes of the value, decoded.
    ///
    /// # Errors
    /// `CorruptSnapshot` where it is no base64.
    fn value_len(&self, main: Revision) -> Result<usize> {
        match self {
            Change::Put(kv) => Ok(kv.value.len()),
            Change::PutBase64(kv) => {
                let len = STANDARD.decoded_length(kv.value);
                len.map_err(|e| no_base64(main, &e))
            }
            Change::Delete { .. } => Ok(0),
        }
    }

    /// Appends the value, decoded; nothing for a deletion. `main` is for the message.
    ///
    /// # Errors
    /// `CorruptSnapshot` where it is no base64.
    pub fn append_value(&self, main: Revision, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Change::Put(kv) => out.extend_from_slice(kv.value),
            // The decoder is as fast as a copy would be.
            Change::PutBase64(kv) => STANDARD
                .decode_append(kv.value, out)
                .map_err(|e| no_base64(main, &e))?,
            Change::Delete { .. } => {}
        }
        Ok(())
    }
}

fn no_base64(main: Revision, e: &base64_simd::Error) -> Error {
    Error::corrupt(format!(
        "the value of an event at revision {main} is no base64: {e}"
    ))
}

/// The changes of a stretch of history: a slot for each key, and what may have to be written.
struct Changes<'s> {
    keys: Keys,
    to: To<'s>,
    last: Option<(Revision, u32)>,
}

/// Where records of changes go.
enum To<'s> {
    /// They wait: a later one may replace them.
    Log(Box<ChangeLog>),
    /// None is replaced: they go where the result goes.
    Stream(Box<Stream<'s>>),
}

type Sink<'s> = Box<dyn FnMut(&Kept<'_>) -> Result<()> + Send + 's>;

/// Hands records on as they come.
struct Stream<'s> {
    sink: Sink<'s>,
    tail: Tail,
    /// The lease of each key's newest change, by slot; 0 where there is none.
    leases: Vec<i64>,
    raw_key: Vec<u8>,
    record: Vec<u8>,
}

impl Stream<'_> {
    /// `write` appends the value, of `value_len` bytes.
    fn put(
        &mut self,
        keys: &Keys,
        entry: &Entry,
        value_len: usize,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        self.raw_key.clear();
        entry.rk.encode(&mut self.raw_key);
        self.record.clear();
        let kv = entry.record(keys.key(entry.slot), &[]);
        kv.encode_with(&mut self.record, value_len, write)?;
        let slot = entry.slot.0 as usize;
        if self.leases.len() <= slot {
            self.leases.resize(slot + 1, 0);
        }
        self.leases[slot] = entry.lease;
        self.tail.add(&self.raw_key, &self.record);
        (self.sink)(&Kept {
            rk: entry.rk,
            key: &self.raw_key,
            len: self.record.len(),
            record: &self.record,
            // Nobody knows yet.
            is_newest: false,
            lease: entry.lease,
        })
    }
}

impl Entry {
    /// The record, given its key and value.
    fn record<'a>(&self, key: &'a [u8], value: &'a [u8]) -> KeyValue<'a> {
        match self.rk.tombstone {
            true => KeyValue::tombstone(key),
            false => KeyValue {
                key,
                create_revision: self.create_revision,
                mod_revision: self.rk.main,
                version: self.version,
                value,
                lease: self.lease,
            },
        }
    }
}

impl Changes<'_> {
    fn new(options: &FoldOptions, buffer_bytes: usize) -> Self {
        Changes {
            keys: Keys::default(),
            to: To::Log(Box::new(ChangeLog::new(
                buffer_bytes,
                options.temp_dir.clone(),
                options.limits,
            ))),
            last: None,
        }
    }

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
        let mut entry = Entry {
            rk,
            slot: SlotId(0),
            create_revision: Revision(0),
            version: 0,
            lease: 0,
            len: 0,
        };
        if let Change::Put(kv) | Change::PutBase64(kv) = change {
            let born_now = kv.create_revision == rk.main;
            if kv.mod_revision != rk.main
                || kv.create_revision > rk.main
                || kv.create_revision.0 < 1
                || kv.version < 1
                || (kv.version == 1) != born_now
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
            entry.create_revision = kv.create_revision;
            entry.version = kv.version;
            if !options.detach_leases {
                entry.lease = kv.lease;
            }
        }
        entry.slot = self.note(options, rk, change.key(), state_after(change))?;
        let (keys, compact) = (&self.keys, options.compact);
        let write = |out: &mut Vec<u8>| change.append_value(main, out);
        match &mut self.to {
            To::Stream(stream) => stream.put(keys, &entry, change.value_len(main)?, write)?,
            To::Log(log) => {
                let live = |e: &Entry| Slot::keeps(Some(keys.at(e.slot)), compact, &e.rk);
                log.append(entry, write, live)?;
            }
        }
        Ok(true)
    }

    fn note(
        &mut self,
        options: &FoldOptions,
        rk: RecordKey,
        key: &[u8],
        state: State,
    ) -> Result<SlotId> {
        if self.last.is_some_and(|last| (rk.main, rk.sub) <= last) {
            return Err(Error::internal(format!(
                "change {}_{} was folded out of order",
                rk.main, rk.sub
            )));
        }
        self.last = Some((rk.main, rk.sub));
        let id = self.slot(options, key, state, (rk.main, rk.sub))?;
        let slot = self.keys.at_mut(id);
        slot.newest = state;
        if rk.main > options.compact {
            slot.touched_after = true;
        } else {
            slot.keep(rk.main, rk.sub);
        }
        Ok(id)
    }

    /// The slot of a key whose next change is `first`, at (main, sub): a new one, or one that the change follows.
    fn slot(
        &mut self,
        options: &FoldOptions,
        key: &[u8],
        first: State,
        at: (Revision, u32),
    ) -> Result<SlotId> {
        if let Some(id) = self.keys.find(key) {
            let newest = self.keys.at(id).newest;
            // A record without a key is etcdutl's, which writes one each time it bumps the revision.
            return match key.is_empty() || first.follows(newest) {
                true => Ok(id),
                false => Err(mismatch(key, at.0, first, newest)),
            };
        }
        let most = options.limits.key_memory();
        if self.keys.memory() > most {
            return Err(options.limits.database_too_large(format!(
                "the keys that change need more than {most} bytes of memory, a quarter of a database"
            )));
        }
        self.keys.insert(key, first, at).ok_or_else(|| {
            Reason::Configuration
                .error("the deltas touch more keys than one run can fold (4 billion)")
        })
    }

    /// Takes over the changes that follow.
    fn absorb(&mut self, options: &FoldOptions, part: Changes<'_>) -> Result<()> {
        let Changes {
            keys,
            to: To::Log(mut log),
            last,
        } = part
        else {
            return Err(Error::internal("a part that does not wait"));
        };
        let mut ids = Vec::with_capacity(keys.len());
        for (key, theirs) in keys.iter() {
            let id = self.slot(options, key, theirs.first, theirs.noted_from())?;
            let slot = self.keys.at_mut(id);
            slot.newest = theirs.newest;
            slot.touched_after |= theirs.touched_after;
            if let Some((main, sub)) = theirs.kept() {
                slot.keep(main, sub);
            }
            ids.push(id);
        }
        drop(keys);
        let (keys, compact) = (&self.keys, options.compact);
        let live = |e: &Entry| Slot::keeps(Some(keys.at(e.slot)), compact, &e.rk);
        let here = |e: &Entry| Entry {
            slot: ids[e.slot.0 as usize],
            ..*e
        };
        let still_live = |e: &Entry| live(&here(e));
        let to = &mut self.to;
        log.for_each(true, still_live, |e, value| {
            let write = |out: &mut Vec<u8>| {
                out.extend_from_slice(value);
                Ok(())
            };
            match to {
                To::Stream(stream) => stream.put(keys, &here(e), value.len(), write),
                To::Log(log) => log.append(here(e), write, live),
            }
        })?;
        self.last = last.or(self.last);
        Ok(())
    }
}

/// A fold under way; `'s` is the life of where it streams its records, if it does.
pub struct Fold<'s> {
    options: FoldOptions,
    changes: Changes<'s>,
}

/// Changes that follow others which have not been folded yet.
pub struct Part {
    options: FoldOptions,
    changes: Changes<'static>,
}

impl Part {
    /// Starts a part of the fold that `options` describe; up to `buffer_bytes` of changes are held
    /// in memory.
    pub fn new(options: FoldOptions, buffer_bytes: usize) -> Self {
        Part {
            changes: Changes::new(&options, buffer_bytes),
            options,
        }
    }

    /// As [`Fold::apply`].
    ///
    /// # Errors
    /// As [`Fold::apply`].
    pub fn apply(&mut self, main: Revision, sub: u32, change: &Change<'_>) -> Result<bool> {
        self.changes.apply(&self.options, main, sub, change)
    }

    /// Bytes of memory that its keys take.
    pub fn key_memory(&self) -> usize {
        self.changes.keys.memory()
    }
}

impl<'s> Fold<'s> {
    /// Starts a fold with the base's own history, read from its database.
    ///
    /// # Errors
    /// `OutOfRange` where the base was compacted past the target; `CorruptSnapshot`; `Io`.
    pub fn new<R: ReadAt>(options: FoldOptions, db: &Database<R>) -> Result<Self> {
        let base = &options.base;
        if options.target < base.first_revision() {
            return Err(Reason::OutOfRange.error(format!(
                "the base was compacted at revision {}: the state at revision {} is gone from it",
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
            // A key that comes into being and is not changed again needs no slot: its only record
            // is its newest, as if the base had been compacted.
            let born = !rk.tombstone && kv.version == 1 && kv.create_revision == rk.main;
            if !born || changes.keys.find(kv.key).is_some() {
                changes.note(&options, rk, kv.key, state_of(&rk, kv))?;
            }
        }
        Ok(Fold { options, changes })
    }

    /// Adds an event of a delta. Revisions that the base holds, and those past the target, are
    /// passed over. Says whether it was taken.
    ///
    /// # Errors
    /// `HistoryMismatch` where it cannot follow what came before; `CorruptSnapshot` where it
    /// contradicts itself; `Io`, `NoSpace`.
    pub fn apply(&mut self, main: Revision, sub: u32, change: &Change<'_>) -> Result<bool> {
        self.changes.apply(&self.options, main, sub, change)
    }

    /// Adds a part whose changes follow those that were added before.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn absorb(&mut self, part: Part) -> Result<()> {
        self.changes.absorb(&self.options, part.changes)
    }

    /// Whether no change that is added from now on can drop out of the result again: then it can be
    /// streamed.
    pub fn can_stream(&self) -> bool {
        self.options.compact <= self.options.base.revision
    }

    /// Hands the base's records that stay to `sink`, and from then on every change as it is added: in
    /// order, each once, with nothing written in between. [`Kept::is_newest`] is not known then.
    /// [`finish_stream`](Self::finish_stream) ends it.
    ///
    /// # Errors
    /// `Internal` where it cannot be streamed; what `sink` returns; `CorruptSnapshot`, `Io`.
    pub fn stream<'t, R: ReadAt>(
        mut self,
        db: &Database<R>,
        mut sink: impl FnMut(&Kept<'_>) -> Result<()> + Send + 't,
    ) -> Result<Fold<'t>> {
        if !self.can_stream() {
            return Err(Error::internal("a fold that may drop changes was streamed"));
        }
        self.walk(db, true, &mut sink)?;
        let stream = Stream {
            sink: Box::new(sink),
            tail: Tail::default(),
            leases: Vec::new(),
            raw_key: Vec::new(),
            record: Vec::new(),
        };
        Ok(Fold {
            options: self.options,
            changes: Changes {
                keys: self.changes.keys,
                to: To::Stream(Box::new(stream)),
                last: self.changes.last,
            },
        })
    }

    /// Ends a stream: checks that the changes continue the base, and gives HashKV of all that was
    /// handed on. `attached` hears of the lease of every live key that has one.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn finish_stream<R: ReadAt>(
        mut self,
        db: &Database<R>,
        mut attached: impl FnMut(i64),
    ) -> Result<HashKv> {
        let mut hasher = Hasher::new(self.options.compact);
        let live_keys = self.walk(db, true, |r| {
            hasher.add(&r.rk, r.key, r.record, r.is_newest);
            if r.is_newest && !r.rk.tombstone && r.lease != 0 {
                attached(r.lease);
            }
            Ok(())
        })?;
        if let To::Stream(stream) = &self.changes.to {
            hasher.append(&stream.tail);
            let leases = stream.leases.iter().filter(|&&lease| lease != 0);
            leases.for_each(|&lease| attached(lease));
        }
        Ok(hasher.finish(live_keys))
    }

    /// Hands every record of the result to `each`, in order, with its length and without its bytes.
    /// [`finish`](Self::finish) can follow.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn measure<R: ReadAt>(
        &mut self,
        db: &Database<R>,
        each: impl FnMut(&Kept<'_>) -> Result<()>,
    ) -> Result<()> {
        self.walk(db, false, each).map(|_| ())
    }

    /// Hands every record of the result to `each`, in order, and gives HashKV of them at the newest
    /// revision.
    ///
    /// # Errors
    /// `HistoryMismatch` where the changes do not continue the base; `CorruptSnapshot`; what `each`
    /// returns; `Io`.
    pub fn finish<R: ReadAt>(
        mut self,
        db: &Database<R>,
        mut each: impl FnMut(&Kept<'_>) -> Result<()>,
    ) -> Result<HashKv> {
        let mut hasher = Hasher::new(self.options.compact);
        let live_keys = self.walk(db, true, |r| {
            hasher.add(&r.rk, r.key, r.record, r.is_newest);
            each(r)
        })?;
        Ok(hasher.finish(live_keys))
    }

    /// Walks the records of the result; of a stream, those of the base. Gives the number of live keys.
    fn walk<R: ReadAt>(
        &mut self,
        db: &Database<R>,
        with_records: bool,
        mut each: impl FnMut(&Kept<'_>) -> Result<()>,
    ) -> Result<u64> {
        let options = &self.options;
        let (target, compact, base) = (options.target, options.compact, options.base);
        let Changes { keys, to, .. } = &mut self.changes;
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
            let state = state_of(&rk, kv);
            let id = keys.find(kv.key);
            match id.map(|id| keys.at_mut(id)) {
                None => live_keys += u64::from(is_alive(&rk, kv.key)),
                // The changes that were noted continue this record, or what a tombstone leaves.
                Some(slot) if (rk.main, rk.sub) < slot.noted_from() => {
                    slot.alive_in_base = !rk.tombstone;
                    if base.compaction_finished && slot.alive_in_base && !slot.first.follows(state)
                    {
                        return Err(mismatch(kv.key, base.revision.next(), slot.first, state));
                    }
                }
                Some(_) => {}
            }
            let slot = id.map(|id| keys.at(id));
            if !Slot::keeps(slot, compact, &rk) {
                continue;
            }
            let mut kept = Kept {
                rk,
                key: e.key,
                len: e.value.len(),
                record: e.value,
                is_newest: slot.is_none_or(|s| is_newest(s, compact, &rk, state)),
                lease: kv.lease,
            };
            if options.detach_leases && kv.lease != 0 {
                (kv.lease, kept.lease) = (0, 0);
                record.clear();
                kv.encode(&mut record);
                (kept.len, kept.record) = (record.len(), &record);
            }
            each(&kept)?;
        }
        // Its pages may be as long as the longest value.
        drop(c);
        for (key, slot) in keys.iter() {
            if base.compaction_finished && !slot.alive_in_base && !slot.first.follows(State::Gone) {
                return Err(mismatch(key, base.revision.next(), slot.first, State::Gone));
            }
            live_keys += u64::from(slot.newest != State::Gone && !key.is_empty());
        }

        let To::Log(log) = to else {
            return Ok(live_keys);
        };
        let mut raw_key = Vec::new();
        let keys = &*keys;
        let live = |e: &Entry| Slot::keeps(Some(keys.at(e.slot)), compact, &e.rk);
        log.for_each(with_records, live, |e, value| {
            raw_key.clear();
            e.rk.encode(&mut raw_key);
            let kv = e.record(keys.key(e.slot), value);
            record.clear();
            let len = match with_records {
                false => kv.encoded_len(e.len),
                true => {
                    kv.encode(&mut record);
                    record.len()
                }
            };
            each(&Kept {
                rk: e.rk,
                key: &raw_key,
                len,
                record: &record,
                is_newest: is_newest(keys.at(e.slot), compact, &e.rk, state_of(&e.rk, kv)),
                lease: e.lease,
            })
        })?;
        Ok(live_keys)
    }
}

/// A record of the result.
#[derive(Debug, Clone, Copy)]
pub struct Kept<'a> {
    /// Its revision.
    pub rk: RecordKey,
    /// Its key in the bucket `key`.
    pub key: &'a [u8],
    /// Bytes of the record.
    pub len: usize,
    /// The record, a [`KeyValue`]; not to be looked at while measuring.
    pub record: &'a [u8],
    /// Whether it is its key's newest; of a tombstone above the compacted revision, whether the key is
    /// gone in the end.
    pub is_newest: bool,
    /// The lease that it attaches its key to, or 0.
    pub lease: i64,
}

/// Whether a record that is kept is its key's newest: at or below the compacted revision only one is
/// kept, above it the versions tell.
fn is_newest(slot: &Slot, compact: Revision, rk: &RecordKey, state: State) -> bool {
    match rk.main <= compact {
        true => !slot.touched_after,
        false => slot.newest == state,
    }
}

/// The first revision of the base that counts as history: below it each key has one record.
/// `None` where the base's compaction was not finished, so that all of it is history.
fn history_from(options: &FoldOptions) -> Option<Revision> {
    let base = &options.base;
    base.compaction_finished
        .then(|| base.compact_revision.next().max(Revision(0)))
}

/// What a change says of its key.
fn state_after(change: &Change<'_>) -> State {
    match change {
        Change::Put(kv) | Change::PutBase64(kv) => State::Alive {
            create: kv.create_revision,
            version: kv.version,
        },
        Change::Delete { .. } => State::Gone,
    }
}

/// What a record of the base says of its key.
fn state_of(rk: &RecordKey, kv: KeyValue<'_>) -> State {
    match rk.tombstone {
        true => State::Gone,
        false => state_after(&Change::Put(kv)),
    }
}

/// A key as it may be shown: printable, and not longer than a line.
pub(crate) fn show_key(key: &[u8]) -> String {
    const LONGEST: usize = 80;
    let shown = key[..key.len().min(LONGEST)].escape_ascii();
    let more = if key.len() > LONGEST { "…" } else { "" };
    format!("\"{shown}{more}\"")
}

fn mismatch(key: &[u8], at: Revision, state: State, before: State) -> Error {
    let says = |state, gone: &str, alive: &str| match state {
        State::Gone => gone.to_owned(),
        State::Alive { create, version } => {
            format!("{alive} version {version}, created at revision {create}")
        }
    };
    let was = says(before, "it did not exist", "it was at");
    let is = says(state, "deletes it", "makes it");
    Reason::HistoryMismatch.error(format!(
        "the deltas do not continue the history before them: of key {}, {was}, and the next change (at revision {at} or after) {is}; \
         the snapshots come from two histories: see `deltafold list --deep`, and choose one with --timeline",
        show_key(key)
    ))
}
