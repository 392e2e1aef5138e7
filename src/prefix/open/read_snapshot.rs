//! Reads snapshots of a store: fetches them ahead, decrypts and decompresses them, and checks their frames.
//!
//! Several snapshots are read in a given order, on one or several threads. Their contents are not
//! interpreted.

use super::ahead::ThreadedReader;
use super::database_file::DatabaseFile;
use crate::backup::delta::DeltaReader;
use crate::backup::frame::FrameReader;
use crate::backup::{Compression, Snapshot, codec};
use crate::base::lock;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Base;
use crate::prefix::{Context, free_space};
use crate::store::{ListedSnapshot, ReadAhead};
use crate::telemetry::progress::Step;
use std::io::Read;
use std::sync::Mutex;

/// The uncompressed payload of a snapshot.
pub type Payload = FrameReader<Box<dyn Read + Send>>;

/// Reads snapshots in a given order. Several threads may use it, but each snapshot is read once.
pub(crate) struct SnapshotReader<'a> {
    ctx: &'a Context,
    snapshots: Vec<&'a Snapshot>,
    ahead: ReadAhead,
    progress: Step,
    /// Held by the thread that reads a delta with a long event.
    long_events: Mutex<()>,
}

impl From<&Snapshot> for ListedSnapshot {
    fn from(s: &Snapshot) -> Self {
        ListedSnapshot {
            path: s.path.clone(),
            bytes: s.bytes,
            is_excluded: s.excluded,
        }
    }
}

impl<'a> SnapshotReader<'a> {
    /// Creates a reader. No transfer begins yet.
    pub(crate) fn new(ctx: &'a Context, snapshots: impl IntoIterator<Item = &'a Snapshot>) -> Self {
        let snapshots: Vec<_> = snapshots.into_iter().collect();
        let bytes = snapshots.iter().map(|s| s.bytes);
        let bytes = bytes.fold(0, u64::saturating_add);
        let description = match snapshots.as_slice() {
            [only] => format!("read {}", only.name.label()),
            all => format!("read {} snapshots", all.len()),
        };
        let objects = snapshots.iter().map(|&s| ListedSnapshot::from(s));
        SnapshotReader {
            ctx,
            ahead: ReadAhead::new(&ctx.store, objects),
            progress: Step::new(description, Some(bytes)),
            long_events: Mutex::new(()),
            snapshots,
        }
    }

    /// Reads the same snapshots with transfers that have begun.
    pub(crate) fn with_begun(mut self, ahead: Option<ReadAhead>) -> Self {
        self.ahead = ahead.unwrap_or(self.ahead);
        self
    }

    /// Returns the snapshot at a position of the order.
    pub(crate) fn snapshot(&self, nth: usize) -> &'a Snapshot {
        self.snapshots[nth]
    }

    /// As [`Context::payload`].
    pub(crate) fn payload(&self, nth: usize) -> Result<Payload> {
        /// The least size in bytes for which a separate thread pays off.
        const WORTH_A_THREAD: u64 = 256 << 10;
        let (ctx, snapshot) = (self.ctx, self.snapshots[nth]);
        let name = &snapshot.name;
        let object = self.progress.reader(self.ahead.take(nth));
        let opened: Box<dyn Read + Send> = if name.is_encrypted {
            Box::new(ctx.keys.decrypt(object).map_err(ctx.at(snapshot))?)
        } else {
            Box::new(object)
        };
        let plain = codec::decoder_of(name.compression, opened, snapshot.bytes)
            .map_err(|e| ctx.at(snapshot)(Error::io("read", e)))?;
        // Reading a plain snapshot takes no time beside its hash.
        let is_plain = name.compression == Compression::None && !name.is_encrypted;
        let needs_thread = ctx.threads > 1 && !is_plain && snapshot.bytes >= WORTH_A_THREAD;
        let plain = if needs_thread {
            Box::new(ThreadedReader::new(plain)?)
        } else {
            plain
        };
        Ok(FrameReader::new(plain).within(ctx.limits))
    }

    /// As [`Context::delta`].
    pub(crate) fn delta<'l>(&self, nth: usize) -> Result<DeltaReader<'l, Payload>> {
        let payload = self.payload(nth)?;
        let delta = DeltaReader::new(payload, &self.snapshots[nth].name);
        Ok(delta.within(self.ctx.limits))
    }

    /// As [`Context::delta`]. If several deltas are read at once, only one of them holds a long event in
    /// memory.
    pub(crate) fn delta_in_turn(&self, nth: usize) -> Result<DeltaReader<'_, Payload>> {
        let mut guard = None;
        Ok(self.delta(nth)?.before_long_event(move || {
            guard.get_or_insert_with(|| lock(&self.long_events));
            Ok(())
        }))
    }

    /// As [`Context::full`]: copies a full to a temporary file, and opens it.
    pub(crate) fn full(&self, nth: usize) -> Result<(Database<DatabaseFile>, Base)> {
        let (ctx, snapshot) = (self.ctx, self.snapshots[nth]);
        let at = ctx.at(snapshot);
        // A snapshot is no smaller when it is decompressed.
        free_space::check(&ctx.temp_dir, snapshot.bytes, &snapshot.path)?;
        let payload = self.payload(nth)?;
        let read_error = |e| at(Error::io("read", e));
        let file = ctx.copy_database(payload, 0, &snapshot.path, read_error, |_| ())?;
        let db = Database::open_within(ctx.database_file(file), ctx.limits).map_err(&at)?;
        let base = Base::read(&db).map_err(&at)?;
        if base.revision < snapshot.name.last {
            return Err(at(Reason::NameMismatch.error(format!(
                "its name promises revision {}, but it ends at {}",
                snapshot.name.last, base.revision
            ))));
        }
        Ok((db, base))
    }
}
