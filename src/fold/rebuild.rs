//! Rebuild: writes a new database of the folded records and the other buckets of the base, and verifies the
//! new file.
//!
//! Where the bytes go is up to the caller.

use crate::base::ReadAt;
use crate::bolt::{Bucket, BucketValue, Database, Layout, PageBudget, TreeBuilder, Writer};
use crate::error::{Error, Reason, Result};
use crate::mvcc::history::{
    FINISHED_COMPACT, KEY_BUCKET, META_BUCKET, SCHEDULED_COMPACT, key_bucket, metadata_note,
};
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{
    Base, Fold, FoldedRecord, HashKv, KeyRange, KeyValue, RecordKey, Revision, hash_kv, lease,
};
use crate::prefix::Context;
use crate::prefix::open::state::State;
use crate::telemetry::progress::Step;
use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::time::Duration;

/// The entries of a bucket, in ascending order of their keys.
pub(crate) type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// How leases are treated in the new database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leases {
    /// Keys keep their lease IDs, and the records of leases are those of the base. If a lease has no record there, but the
    /// earlier lease of its key has, it gets one with the same time to live.
    AsRecorded,
    /// Keys keep their lease IDs. If a lease has no record in the base, it gets one with the time to live of its key's earlier
    /// lease. If that has none either, this is the time to live, so that the keys expire.
    Keep {
        /// The time to live from the start of etcd, in whole seconds.
        time_to_live: Duration,
    },
    /// Keys are detached from their leases, and all leases are removed.
    Drop,
}

/// The description of a new database.
pub(crate) struct Rebuild<'a> {
    pub(crate) source: &'a State,
    /// The compacted revision. If it is above the target of the source, it is the newest revision, too.
    pub(crate) compact: Revision,
    pub(crate) leases: Leases,
    /// Buckets that hold these entries instead of those of the base.
    pub(crate) replaced: BTreeMap<Vec<u8>, Entries>,
    /// Entries of the bucket `meta` that are set, or removed for `None`.
    pub(crate) meta: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

/// The result of writing a new database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rebuilt {
    pub(crate) hash: HashKv,
    /// The number of leases that got a record.
    pub(crate) leases_added: u64,
}

impl Rebuild<'_> {
    /// Returns the newest revision of the new database.
    pub(crate) fn revision(&self) -> Revision {
        self.source.revision.max(self.compact)
    }

    /// Computes the layout of the new database, from lengths alone.
    ///
    /// # Errors
    /// As [`Fold::finish`]; `Terminated`.
    pub(crate) fn measure(&self, ctx: &Context, fold: &mut Fold<'_>) -> Result<Layout> {
        let progress = Step::new("measure the new snapshot", None);
        let db = &self.source.db;
        let mut w = Writer::measuring(db.page_size())?;
        let (root, _) = self.build(ctx, &mut w, |w, tree, leases| {
            fold.measure(db, |r| {
                progress.add((r.key.len() + r.len) as u64);
                ctx.store.cancel().check()?;
                leases.note_record(r);
                tree.push_len(w, r.key, r.len)
            })
            .map_err(|e| self.at_base(ctx, e))
        })?;
        let layout = w.layout(root, &metadata_note(self.source.base.metadata_revision))?;
        check_size(ctx, layout.bytes())?;
        Ok(layout)
    }

    /// Writes a database whose layout [`measure`](Self::measure) has computed.
    ///
    /// # Errors
    /// As [`measure`](Self::measure); errors of `out`; `Internal`.
    pub(crate) fn write(
        &self,
        ctx: &Context,
        fold: Fold<'_>,
        layout: &Layout,
        out: &mut (dyn Write + Send),
    ) -> Result<Rebuilt> {
        let db = &self.source.db;
        let mut fold = Some(fold);
        let mut folded = None;
        let mut w = Writer::writing(layout, out)?;
        let (root, leases_added) = self.build(ctx, &mut w, |w, tree, leases| {
            let fold = fold.take().ok_or_else(|| {
                Error::corrupt(
                    "the snapshot has two buckets \"key\": use another copy or another snapshot",
                )
            })?;
            let finished = fold.finish(db, |r| {
                ctx.store.cancel().check()?;
                leases.note_record(r);
                tree.push(w, r.key, r.record)
            });
            folded = Some(finished.map_err(|e| self.at_base(ctx, e))?);
            Ok(())
        })?;
        w.finish(root, layout)?;
        let hash = folded.ok_or_else(|| Error::internal("the fold was not run"))?;
        Ok(Rebuilt { hash, leases_added })
    }

    /// Folds the source and writes the new database in one pass. Returns `None` if that is not possible,
    /// since a compaction above the base may drop records of deltas again. Otherwise it returns the layout,
    /// whose head the caller must still write at the beginning, and the number of events.
    ///
    /// # Errors
    /// As [`State::fold`] and [`write`](Self::write).
    pub(crate) fn stream(
        &self,
        ctx: &Context,
        out: &mut (dyn Write + Send),
    ) -> Result<Option<(Rebuilt, Layout, u64)>> {
        let source = self.source;
        if self.compact > source.base.revision {
            return Ok(None);
        }
        let has_no_deltas = source.deltas().next().is_none();
        let db = &source.db;
        let detach = self.leases == Leases::Drop;
        let mut folded = None;
        let mut w = Writer::streaming(db.page_size(), out)?;
        let (root, leases_added) = self.build(ctx, &mut w, |w, tree, leases| {
            if has_no_deltas {
                // The newest record of each key is known, so a plain fold needs one pass.
                let (fold, events) = source.fold(ctx, self.compact, KeyRange::All, detach)?;
                let hash = fold.finish(db, |r| {
                    ctx.store.cancel().check()?;
                    leases.note_record(r);
                    tree.push(w, r.key, r.record)
                });
                folded = Some((hash.map_err(|e| self.at_base(ctx, e))?, events));
                return Ok(());
            }
            let (fold, events) =
                source.fold_to(ctx, self.compact, KeyRange::All, detach, |fold| {
                    let streamed = fold.stream(db, |r| {
                        ctx.store.cancel().check()?;
                        check_size(ctx, w.bytes())?;
                        tree.push(w, r.key, r.record)
                    });
                    streamed.map_err(|e| self.at_base(ctx, e))
                })?;
            let hash = fold.finish_stream(db, |lease, before| leases.add(lease, before));
            folded = Some((hash.map_err(|e| self.at_base(ctx, e))?, events));
            Ok(())
        })?;
        let layout = w.layout(root, &metadata_note(source.base.metadata_revision))?;
        let (hash, events) = folded.ok_or_else(|| Error::internal("the fold was not run"))?;
        Ok(Some((Rebuilt { hash, leases_added }, layout, events)))
    }

    /// Puts the name of the base before an error about its data. Errors of the new file or its target are not
    /// about the base, and a contradiction between histories is about the deltas.
    fn at_base(&self, ctx: &Context, e: Error) -> Error {
        match e.reason() {
            Reason::HistoryMismatch => e,
            reason if reason.is_bad_data() => self.source.at_base(ctx)(e),
            _ => e,
        }
    }

    /// Builds the new database from the buckets of the base; `records` fills the bucket of records. Returns
    /// the number of leases that got a record, too.
    fn build(
        &self,
        ctx: &Context,
        w: &mut Writer<'_>,
        mut records: impl FnMut(&mut Writer<'_>, &mut TreeBuilder, &mut AttachedLeases) -> Result<()>,
    ) -> Result<(TreeBuilder, u64)> {
        let at_base = |e| self.at_base(ctx, e);
        let db = &self.source.db;
        let mut root = TreeBuilder::new(db.meta().sequence);
        let budget = db.page_budget();
        let mut leases = AttachedLeases::new(self.leases);
        let mut leases_added = 0;
        // Replaced buckets that the base does not have go between its own, in the order of names.
        let mut replaced_buckets = self.replaced.iter().peekable();
        let mut buckets = db.cursor_within(&db.root(), &budget);
        while let Some(e) = buckets.next().map_err(at_base)? {
            while let Some(bucket) = replaced_buckets.next_if(|(name, _)| name.as_slice() < e.key) {
                add_bucket(w, &mut root, bucket)?;
            }
            if !e.is_bucket() {
                root.push(w, e.key, e.value)?;
                continue;
            }
            let bucket = Bucket::decode(e.value).map_err(at_base)?;
            let replaced = replaced_buckets.next_if(|(name, _)| name.as_slice() == e.key);
            let value = match (e.key, replaced) {
                (_, Some((_, entries))) => write_bucket(w, bucket.sequence, entries)?,
                (KEY_BUCKET, _) => {
                    let mut tree = TreeBuilder::new(bucket.sequence);
                    records(w, &mut tree, &mut leases)?;
                    tree.finish(w)?
                }
                (META_BUCKET, _) => {
                    let mut entries = read_bucket(db, &bucket).map_err(at_base)?;
                    self.change_meta(&mut entries);
                    write_bucket(w, bucket.sequence, &entries)?
                }
                (lease::BUCKET, _) => {
                    let value;
                    (value, leases_added) = leases.write(w, db, &bucket).map_err(at_base)?;
                    value
                }
                _ => copy_bucket(db, &bucket, &budget, w, 0).map_err(at_base)?,
            };
            root.push_bucket(w, e.key, &value)?;
        }
        for bucket in replaced_buckets {
            add_bucket(w, &mut root, bucket)?;
        }
        Ok((root, leases_added))
    }

    /// Applies the changes to the entries of the bucket `meta`.
    fn change_meta(&self, entries: &mut Entries) {
        if self.compact != Revision::NONE {
            for key in [SCHEDULED_COMPACT, FINISHED_COMPACT] {
                entries.insert(key.to_vec(), encode_revision(self.compact, 0).to_vec());
            }
        }
        for (key, value) in &self.meta {
            match value {
                Some(value) => entries.insert(key.clone(), value.clone()),
                None => entries.remove(key),
            };
        }
    }

    /// Verifies the new file: reads every page, and compares the revisions and the HashKV with those of the
    /// fold.
    ///
    /// # Errors
    /// `Internal` if the file differs from what was written; `CorruptSnapshot`; `Io`.
    pub(crate) fn verify(&self, src: impl ReadAt, folded: &HashKv, layout: &Layout) -> Result<()> {
        let _progress = Step::new("verify the new snapshot", None);
        let db = Database::open(src)?;
        let base = Base::read(&db)?;
        let hash = read_every_page(&db)?;
        let bytes = db.into_inner().size();
        let bytes = bytes.map_err(|e| Error::io("read the new database", e))?;
        if base.revision != self.revision()
            || !base.compaction_finished
            || hash != *folded
            || bytes != layout.bytes()
        {
            check_compacted(&self.source.db)?;
            return Err(Error::internal(format!(
                "the new file differs from the fold: the file ends at revision {} with {hash:?}, the fold at {} with {folded:?}",
                base.revision,
                self.revision()
            )));
        }
        Ok(())
    }
}

/// The leases to which live keys are attached. They are collected while records are written.
struct AttachedLeases {
    treatment: Leases,
    /// The IDs, in the order of the keys of the bucket. To each belongs the earlier lease of its key: the ID in the base, or 0.
    ids: BTreeMap<[u8; lease::KEY_SIZE], i64>,
}

impl AttachedLeases {
    fn new(treatment: Leases) -> Self {
        AttachedLeases {
            treatment,
            ids: BTreeMap::new(),
        }
    }

    /// Notes the lease of a record, if the record is the newest of a live key.
    fn note_record(&mut self, r: &FoldedRecord<'_>) {
        if r.lease != 0 && r.is_newest && !r.rk.tombstone {
            self.add(r.lease, r.lease_before);
        }
    }

    fn add(&mut self, lease: i64, before: i64) {
        let is_wanted = match self.treatment {
            Leases::Keep { .. } => true,
            Leases::AsRecorded => before != 0,
            Leases::Drop => false,
        };
        if is_wanted {
            let known = self.ids.entry(lease::key(lease)).or_default();
            *known = if *known == 0 { before } else { *known };
        }
    }

    /// Writes the bucket of leases. Returns the number of added records, too.
    fn write<R: ReadAt>(
        &mut self,
        w: &mut Writer<'_>,
        db: &Database<R>,
        bucket: &Bucket,
    ) -> Result<(BucketValue, u64)> {
        let mut tree = TreeBuilder::new(bucket.sequence);
        let time_to_live = match self.treatment {
            Leases::Drop => return Ok((tree.finish(w)?, 0)),
            Leases::AsRecorded => None,
            Leases::Keep { time_to_live } => Some(time_to_live),
        };
        let ids = std::mem::take(&mut self.ids);
        let before: HashSet<i64> = ids.values().copied().collect();
        let known = lease::times_to_live(db, |id| before.contains(&id))?;
        let mut added = 0;
        let mut missing = ids.into_iter().peekable();
        let mut add =
            |w: &mut Writer<'_>, tree: &mut TreeBuilder, one: ([u8; lease::KEY_SIZE], i64)| {
                let (id, before) = one;
                let known = known.get(&before).copied();
                let Some(time_to_live) = known.or(time_to_live) else {
                    return Ok(());
                };
                added += 1;
                tree.push(w, &id, &lease::record(id, time_to_live))
            };
        let mut c = db.cursor(bucket);
        while let Some(e) = c.next()? {
            while let Some(one) = missing.next_if(|(id, _)| id.as_slice() < e.key) {
                add(w, &mut tree, one)?;
            }
            missing.next_if(|(id, _)| id.as_slice() == e.key);
            tree.push(w, e.key, e.value)?;
        }
        for one in missing {
            add(w, &mut tree, one)?;
        }
        Ok((tree.finish(w)?, added))
    }
}

/// Fails if the new database is larger than deltafold reads.
fn check_size(ctx: &Context, bytes: u64) -> Result<()> {
    if bytes > ctx.limits.database_bytes {
        let what = format!("the new database has {bytes} bytes");
        Err(ctx.limits.database_too_large(what))
    } else {
        Ok(())
    }
}

/// Adds a bucket that the base does not have.
fn add_bucket(
    w: &mut Writer<'_>,
    root: &mut TreeBuilder,
    (name, entries): (&Vec<u8>, &Entries),
) -> Result<()> {
    let value = write_bucket(w, 0, entries)?;
    root.push_bucket(w, name, &value)
}

fn write_bucket(w: &mut Writer<'_>, sequence: u64, entries: &Entries) -> Result<BucketValue> {
    let mut tree = TreeBuilder::new(sequence);
    for (key, value) in entries {
        tree.push(w, key, value)?;
    }
    tree.finish(w)
}

/// The most bytes of a bucket that is read into memory. The bucket `meta` of etcd has a few hundred.
const SMALL_BUCKET: usize = 1 << 20;

/// Reads all entries of a small bucket.
fn read_bucket<R: ReadAt>(db: &Database<R>, bucket: &Bucket) -> Result<Entries> {
    let mut entries = Entries::new();
    let mut bytes = 0;
    let mut c = db.cursor(bucket);
    while let Some(e) = c.next()? {
        bytes += e.key.len() + e.value.len();
        if bytes > SMALL_BUCKET {
            return Err(Error::corrupt(format!(
                "its bucket \"meta\" has more than {SMALL_BUCKET} bytes, which etcd never writes"
            )));
        }
        entries.insert(e.key.to_vec(), e.value.to_vec());
    }
    Ok(entries)
}

/// The bytes of keys that are held in memory to find a duplicate.
const MOST_KEYS: usize = 64 << 20;

/// Checks that the base holds one record for each key up to its compacted revision, as far as memory for
/// [`MOST_KEYS`] bytes of keys goes. The fold relies on it; this is checked only after a verification failed.
fn check_compacted<R: ReadAt>(db: &Database<R>) -> Result<()> {
    let base = Base::read(db)?;
    let mut keys = HashSet::new();
    let mut key_bytes = 0;
    let mut c = db.cursor(&key_bucket(db)?);
    while let Some(e) = c.next()? {
        let rk = RecordKey::decode(e.key)?;
        if rk.main > base.compact_revision || !base.compaction_finished || key_bytes > MOST_KEYS {
            break;
        }
        let key = KeyValue::decode(e.value)?.key;
        key_bytes += key.len();
        if !keys.insert(key.to_vec()) {
            return Err(Error::corrupt(format!(
                "the base claims to be compacted at revision {}, but holds two records of one key below it: use another base or exclude it",
                base.compact_revision
            )));
        }
    }
    Ok(())
}

/// The depth of nested buckets above which a file counts as damaged. etcd nests none.
const MAX_NESTING: usize = 16;

fn copy_bucket<R: ReadAt>(
    db: &Database<R>,
    bucket: &Bucket,
    budget: &PageBudget,
    writer: &mut Writer<'_>,
    depth: usize,
) -> Result<BucketValue> {
    check_depth(depth)?;
    let mut tree = TreeBuilder::new(bucket.sequence);
    let mut c = db.cursor_within(bucket, budget);
    while let Some(e) = c.next()? {
        if e.is_bucket() {
            let nested = copy_bucket(db, &Bucket::decode(e.value)?, budget, writer, depth + 1)?;
            tree.push_bucket(writer, e.key, &nested)?;
        } else {
            tree.push(writer, e.key, e.value)?;
        }
    }
    tree.finish(writer)
}

/// Reads every page of a database, and returns its HashKV.
///
/// # Errors
/// `CorruptSnapshot`, `Io`.
pub(crate) fn read_every_page<R: ReadAt>(db: &Database<R>) -> Result<HashKv> {
    let hash = hash_kv(db, None)?;
    // HashKV has read the whole bucket `key`.
    read_all(db, &db.root(), 0, |name| name != KEY_BUCKET)?;
    Ok(hash)
}

/// Fails if buckets are nested too deep.
fn check_depth(depth: usize) -> Result<()> {
    if depth > MAX_NESTING {
        Err(Error::corrupt(
            "buckets are nested more than 16 deep, which etcd never does",
        ))
    } else {
        Ok(())
    }
}

/// Reads every page of a bucket, and of the nested buckets for whose names `is_wanted` is true.
fn read_all<R: ReadAt>(
    db: &Database<R>,
    bucket: &Bucket,
    depth: usize,
    is_wanted: fn(&[u8]) -> bool,
) -> Result<()> {
    check_depth(depth)?;
    let mut c = db.cursor(bucket);
    while let Some(e) = c.next()? {
        if e.is_bucket() && is_wanted(e.key) {
            read_all(db, &Bucket::decode(e.value)?, depth + 1, |_| true)?;
        }
    }
    Ok(())
}
