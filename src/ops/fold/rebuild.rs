//! Lays a new database out: the folded records, and the other buckets of the full they came from,
//! with what has to change in them; and reads a new file as a stranger would.
//!
//! It does not know where the bytes go. `compact` and `restore` call it.

use super::open::source::Source;
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
use crate::ops::Context;
use crate::telemetry::progress::Step;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::Write;
use std::time::Duration;

/// Entries of a bucket, in ascending order of their keys.
pub(crate) type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// What becomes of leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leases {
    /// Keys keep their lease IDs, and the records of leases are the full's.
    AsRecorded,
    /// Keys keep their lease IDs; a lease that the full has no record of gets one with this time to
    /// live, so that its keys still expire.
    Keep {
        /// Counted from when etcd starts; whole seconds.
        time_to_live: Duration,
    },
    /// No key is attached to a lease, and no lease is left.
    Drop,
}

/// What the new database shall be.
pub(crate) struct Rebuild<'a> {
    pub(crate) source: &'a Source,
    /// The compacted revision; above the source's target it is the newest revision, too.
    pub(crate) compact: Revision,
    pub(crate) leases: Leases,
    /// Buckets that hold these entries and none of the full's.
    pub(crate) replaced: BTreeMap<Vec<u8>, Entries>,
    /// Entries of `meta` that are set, or removed where `None`.
    pub(crate) meta: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rebuilt {
    pub(crate) hash: HashKv,
    /// Leases that got a record.
    pub(crate) leases_added: u64,
}

impl Rebuild<'_> {
    /// The newest revision of the new database.
    pub(crate) fn revision(&self) -> Revision {
        self.source.target.max(self.compact)
    }

    /// Finds out where everything will be, by lengths alone.
    ///
    /// # Errors
    /// As [`Fold::finish`]; `Terminated`.
    pub(crate) fn measure(&self, ctx: &Context, fold: &mut Fold<'_>) -> Result<Layout> {
        let step = Step::new("measure the new snapshot", None);
        let db = &self.source.db;
        let mut w = Writer::measuring(db.page_size())?;
        let (root, _) = self.build(ctx, &mut w, |w, tree, leases| {
            fold.measure(db, |r| {
                step.add((r.key.len() + r.len) as u64);
                ctx.store.cancel().check()?;
                leases.note(r);
                tree.push_len(w, r.key, r.len)
            })
            .map_err(|e| self.at_base(ctx, e))
        })?;
        let layout = w.layout(root, &metadata_note(self.source.base.metadata_revision))?;
        check_size(ctx, layout.bytes())?;
        Ok(layout)
    }

    /// Writes what was measured.
    ///
    /// # Errors
    /// As [`measure`](Self::measure); what `out` returns; `Internal`.
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
            let fold = fold
                .take()
                .ok_or_else(|| Error::corrupt("the snapshot has two buckets \"key\""))?;
            let finished = fold.finish(db, |r| {
                ctx.store.cancel().check()?;
                leases.note(r);
                tree.push(w, r.key, r.record)
            });
            folded = Some(finished.map_err(|e| self.at_base(ctx, e))?);
            Ok(())
        })?;
        w.finish(root, layout)?;
        let hash = folded.ok_or_else(|| Error::internal("the fold was not run"))?;
        Ok(Rebuilt { hash, leases_added })
    }

    /// Folds the source and writes what comes of it at once, where nothing that the deltas hold drops out
    /// again; `None` where it may. The head of the layout is still to be written at the beginning.
    /// Gives the number of events, too.
    ///
    /// # Errors
    /// As [`Source::fold`] and [`write`](Self::write).
    pub(crate) fn stream(
        &self,
        ctx: &Context,
        out: &mut (dyn Write + Send),
    ) -> Result<Option<(Rebuilt, Layout, u64)>> {
        let source = self.source;
        if self.compact > source.base.revision {
            return Ok(None);
        }
        let is_alone = source.deltas().next().is_none();
        let db = &source.db;
        let detach = self.leases == Leases::Drop;
        let mut folded = None;
        let mut w = Writer::streaming(db.page_size(), out)?;
        let (root, leases_added) = self.build(ctx, &mut w, |w, tree, leases| {
            if is_alone {
                // Nothing follows: what is each key's newest record is known, and one pass does for all.
                let (fold, events) = source.fold(ctx, self.compact, KeyRange::All, detach)?;
                let hash = fold.finish(db, |r| {
                    ctx.store.cancel().check()?;
                    leases.note(r);
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
            let hash = fold.finish_stream(db, |lease| leases.add(lease));
            folded = Some((hash.map_err(|e| self.at_base(ctx, e))?, events));
            Ok(())
        })?;
        let layout = w.layout(root, &metadata_note(source.base.metadata_revision))?;
        let (hash, events) = folded.ok_or_else(|| Error::internal("the fold was not run"))?;
        Ok(Some((Rebuilt { hash, leases_added }, layout, events)))
    }

    /// Puts the full's name before what is wrong with it. What is wrong with the new file, or with where
    /// it goes, is not the full's fault; and a contradiction between histories is the deltas'.
    fn at_base(&self, ctx: &Context, e: Error) -> Error {
        match e.reason() {
            Reason::HistoryMismatch => e,
            reason if reason.is_bad_data() => self.source.at_base(ctx)(e),
            _ => e,
        }
    }

    /// Builds the new database out of the full's buckets; `records` fills the one of records. Gives the
    /// number of leases that got a record, too.
    fn build(
        &self,
        ctx: &Context,
        w: &mut Writer<'_>,
        mut records: impl FnMut(&mut Writer<'_>, &mut TreeBuilder, &mut Attached) -> Result<()>,
    ) -> Result<(TreeBuilder, u64)> {
        let at_base = |e| self.at_base(ctx, e);
        let db = &self.source.db;
        let mut root = TreeBuilder::new(db.meta().sequence);
        let budget = db.page_budget();
        let mut attached = Attached::new(self.leases);
        let mut leases_added = 0;
        // Buckets that the full does not have stand between its own.
        let add = |w: &mut Writer<'_>, root: &mut TreeBuilder, (name, entries): (&Vec<u8>, _)| {
            let value = write_bucket(w, 0, entries)?;
            root.push_bucket(w, name, &value)
        };
        let mut missing = self.replaced.iter().peekable();
        let mut buckets = db.cursor_within(&db.root(), &budget);
        while let Some(e) = buckets.next().map_err(at_base)? {
            while let Some(bucket) = missing.next_if(|(name, _)| name.as_slice() < e.key) {
                add(w, &mut root, bucket)?;
            }
            if !e.is_bucket() {
                root.push(w, e.key, e.value)?;
                continue;
            }
            let bucket = Bucket::decode(e.value).map_err(at_base)?;
            let replaced = missing.next_if(|(name, _)| name.as_slice() == e.key);
            let value = match (e.key, replaced) {
                (_, Some((_, entries))) => write_bucket(w, bucket.sequence, entries)?,
                (KEY_BUCKET, _) => {
                    let mut tree = TreeBuilder::new(bucket.sequence);
                    records(w, &mut tree, &mut attached)?;
                    tree.finish(w)?
                }
                (META_BUCKET, _) => {
                    let mut entries = read_bucket(db, &bucket).map_err(at_base)?;
                    self.change_meta(&mut entries);
                    write_bucket(w, bucket.sequence, &entries)?
                }
                (lease::BUCKET, _) => {
                    let value;
                    (value, leases_added) = attached.write(w, db, &bucket).map_err(at_base)?;
                    value
                }
                _ => copy_bucket(db, &bucket, &budget, w, 0).map_err(at_base)?,
            };
            root.push_bucket(w, e.key, &value)?;
        }
        for bucket in missing {
            add(w, &mut root, bucket)?;
        }
        Ok((root, leases_added))
    }

    /// The full's `meta` with what has to change in it.
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

    /// Reads the new file as a stranger would: every page, its revisions, and HashKV.
    ///
    /// # Errors
    /// `Internal` where it is not what was written; `CorruptSnapshot`; `Io`.
    pub(crate) fn verify(&self, src: impl ReadAt, written: &HashKv, layout: &Layout) -> Result<()> {
        let _step = Step::new("verify the new snapshot", None);
        let db = Database::open(src)?;
        let base = Base::read(&db)?;
        let hash = read_every_page(&db)?;
        let bytes = db.into_inner().size();
        let bytes = bytes.map_err(|e| Error::io("read the new database", e))?;
        if base.revision != self.revision()
            || !base.compaction_finished
            || hash != *written
            || bytes != layout.bytes()
        {
            check_compacted(&self.source.db)?;
            return Err(Error::internal(format!(
                "the new file is not what was folded: it ends at revision {} with {hash:?}, folded were {} and {written:?}",
                base.revision,
                self.revision()
            )));
        }
        Ok(())
    }
}

/// The leases that keys are attached to, as the records go by.
struct Attached {
    wanted: Leases,
    /// By ID, in the order of the bucket's keys.
    ids: BTreeSet<[u8; lease::KEY_SIZE]>,
}

impl Attached {
    fn new(wanted: Leases) -> Self {
        Attached {
            wanted,
            ids: BTreeSet::new(),
        }
    }

    fn note(&mut self, r: &FoldedRecord<'_>) {
        if r.lease != 0 && r.is_newest && !r.rk.tombstone {
            self.add(r.lease);
        }
    }

    fn add(&mut self, lease: i64) {
        if matches!(self.wanted, Leases::Keep { .. }) {
            self.ids.insert(lease::key(lease));
        }
    }

    /// Writes the bucket of leases. Gives the number of those that were added, too.
    fn write<R: ReadAt>(
        &mut self,
        w: &mut Writer<'_>,
        db: &Database<R>,
        bucket: &Bucket,
    ) -> Result<(BucketValue, u64)> {
        let mut tree = TreeBuilder::new(bucket.sequence);
        let time_to_live = match self.wanted {
            Leases::Drop => return Ok((tree.finish(w)?, 0)),
            // No ID was noted.
            Leases::AsRecorded => Duration::ZERO,
            Leases::Keep { time_to_live } => time_to_live,
        };
        let mut added = 0;
        let mut unknown = std::mem::take(&mut self.ids).into_iter().peekable();
        let mut add = |w: &mut Writer<'_>, tree: &mut TreeBuilder, id: [u8; lease::KEY_SIZE]| {
            added += 1;
            tree.push(w, &id, &lease::record(id, time_to_live))
        };
        let mut c = db.cursor(bucket);
        while let Some(e) = c.next()? {
            while let Some(id) = unknown.next_if(|id| id.as_slice() < e.key) {
                add(w, &mut tree, id)?;
            }
            unknown.next_if(|id| id.as_slice() == e.key);
            tree.push(w, e.key, e.value)?;
        }
        for id in unknown {
            add(w, &mut tree, id)?;
        }
        Ok((tree.finish(w)?, added))
    }
}

/// A database that is larger could not be read again.
fn check_size(ctx: &Context, bytes: u64) -> Result<()> {
    match bytes > ctx.limits.database_bytes {
        true => {
            let what = format!("the new database has {bytes} bytes");
            Err(ctx.limits.database_too_large(what))
        }
        false => Ok(()),
    }
}

fn write_bucket(w: &mut Writer<'_>, sequence: u64, entries: &Entries) -> Result<BucketValue> {
    let mut tree = TreeBuilder::new(sequence);
    for (key, value) in entries {
        tree.push(w, key, value)?;
    }
    tree.finish(w)
}

/// Bytes that a small bucket may have. etcd's `meta` has some hundred.
const SMALL_BUCKET: usize = 1 << 20;

/// All entries of a small bucket.
fn read_bucket<R: ReadAt>(db: &Database<R>, bucket: &Bucket) -> Result<Entries> {
    let mut entries = Entries::new();
    let mut bytes = 0;
    let mut c = db.cursor(bucket);
    while let Some(e) = c.next()? {
        bytes += e.key.len() + e.value.len();
        if bytes > SMALL_BUCKET {
            return Err(Error::corrupt(format!(
                "its bucket \"meta\" has more than {SMALL_BUCKET} bytes, which etcd's never has"
            )));
        }
        entries.insert(e.key.to_vec(), e.value.to_vec());
    }
    Ok(entries)
}

/// Bytes of keys that are held to find one that is there twice.
const MOST_KEYS: usize = 64 << 20;

/// A base that says it is compacted holds one record a key up to there. The fold relies on that;
/// whether it is so is only looked at when something does not add up.
///
/// It holds no more than the first [`MOST_KEYS`] bytes of keys.
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
                "the base says that it was compacted at revision {}, and holds a key twice below",
                base.compact_revision
            )));
        }
    }
    Ok(())
}

/// Nesting of buckets beyond which a file is damaged; etcd nests none.
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

/// Reads every page of a database; gives its HashKV.
///
/// # Errors
/// `CorruptSnapshot`, `Io`.
pub(crate) fn read_every_page<R: ReadAt>(db: &Database<R>) -> Result<HashKv> {
    let hash = hash_kv(db, None)?;
    // HashKV has read all of the `key` bucket.
    read_all(db, &db.root(), 0, |name| name != KEY_BUCKET)?;
    Ok(hash)
}

/// Fails if buckets are nested deeper than etcd nests them, which is not at all.
fn check_depth(depth: usize) -> Result<()> {
    match depth > MAX_NESTING {
        true => Err(Error::corrupt("buckets are nested without end")),
        false => Ok(()),
    }
}

/// Reads every page of a bucket, and of those in it that `wanted` names.
fn read_all<R: ReadAt>(
    db: &Database<R>,
    bucket: &Bucket,
    depth: usize,
    wanted: fn(&[u8]) -> bool,
) -> Result<()> {
    check_depth(depth)?;
    let mut c = db.cursor(bucket);
    while let Some(e) = c.next()? {
        if e.is_bucket() && wanted(e.key) {
            read_all(db, &Bucket::decode(e.value)?, depth + 1, |_| true)?;
        }
    }
    Ok(())
}
