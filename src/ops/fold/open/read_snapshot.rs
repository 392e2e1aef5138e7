//! Snapshots of a store as they are read: fetched ahead, decrypted, decompressed, their frames checked.
//!
//! Several are read in a known order, by one thread or by more.

use super::ahead::Ahead;
use super::database_file::Spool;
use crate::backup::delta::DeltaReader;
use crate::backup::frame::FrameReader;
use crate::backup::{Compression, Snapshot, codec};
use crate::base::hash::hex;
use crate::base::lock;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Base;
use crate::ops::{Context, free_space};
use crate::store::{ObjectReader, ReadAhead};
use crate::telemetry::progress::Step;
use sha2::{Digest, Sha256};
use std::io::{self, Read};
use std::sync::{Arc, Mutex};

/// A snapshot's uncompressed payload.
pub type Payload = FrameReader<Box<dyn Read + Send>>;

impl Context {
    /// Starts to read a snapshot's payload.
    ///
    /// # Errors
    /// `CorruptSnapshot`; the rest comes while reading.
    pub fn payload(&self, snapshot: &Snapshot) -> Result<Payload> {
        Reading::new(self, [snapshot]).payload(0)
    }

    /// Starts to read a delta.
    ///
    /// # Errors
    /// As [`payload`](Self::payload).
    pub fn delta(&self, snapshot: &Snapshot) -> Result<DeltaReader<'static, Payload>> {
        Reading::new(self, [snapshot]).delta(0)
    }

    /// Fetches a full into an unnamed temporary file, checks it and opens it.
    ///
    /// # Errors
    /// `CorruptSnapshot`; `TooLarge`; `NameMismatch` if it holds less than its name promises; the store's;
    /// `Io`, `NoSpace`.
    pub fn full(&self, snapshot: &Snapshot) -> Result<(Database<Spool>, Base)> {
        Reading::new(self, [snapshot]).full(0)
    }
}

/// An object that is hashed as it is read.
struct Hashed {
    object: ObjectReader,
    hash: Arc<Mutex<Sha256>>,
}

impl Read for Hashed {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.object.read(out)?;
        lock(&self.hash).update(&out[..n]);
        Ok(n)
    }
}

/// Snapshots to read; several threads may take from them, each snapshot once.
pub(crate) struct Reading<'a> {
    ctx: &'a Context,
    snapshots: Vec<&'a Snapshot>,
    ahead: ReadAhead,
    step: Step,
    /// Held by the one of several threads that reads a delta with a long event.
    long_events: Mutex<()>,
}

impl<'a> Reading<'a> {
    /// Begins no transfer yet.
    pub(crate) fn new(ctx: &'a Context, snapshots: impl IntoIterator<Item = &'a Snapshot>) -> Self {
        let snapshots: Vec<_> = snapshots.into_iter().collect();
        let bytes = snapshots.iter().map(|s| s.bytes);
        let bytes = bytes.fold(0, u64::saturating_add);
        let what = match snapshots.as_slice() {
            [only] => format!("read {}", only.name),
            all => format!("read {} snapshots", all.len()),
        };
        let objects = snapshots.iter().map(|s| (s.path.clone(), s.bytes));
        Reading {
            ctx,
            ahead: ReadAhead::new(&ctx.store, objects),
            step: Step::new(what, Some(bytes)),
            long_events: Mutex::new(()),
            snapshots,
        }
    }

    /// The snapshot at that place in the order.
    pub(crate) fn snapshot(&self, nth: usize) -> &'a Snapshot {
        self.snapshots[nth]
    }

    /// As [`Context::payload`].
    pub(crate) fn payload(&self, nth: usize) -> Result<Payload> {
        self.payload_of(nth, self.ahead.take(nth))
    }

    /// The payload of a snapshot whose transfer has begun.
    fn payload_of(&self, nth: usize, object: impl Read + Send + 'static) -> Result<Payload> {
        /// A thread of its own is not worth while for less.
        const WORTH_A_THREAD: u64 = 256 << 10;
        let (ctx, snapshot) = (self.ctx, self.snapshots[nth]);
        let name = &snapshot.name;
        let object = self.step.reader(object);
        let opened: Box<dyn Read + Send> = match name.is_encrypted {
            true => Box::new(ctx.keys.decrypt(object).map_err(ctx.at(snapshot))?),
            false => Box::new(object),
        };
        let plain = codec::decoder_of(name.compression, opened, snapshot.bytes)
            .map_err(|e| ctx.at(snapshot)(Error::io("read", e)))?;
        // What is not compressed comes as fast as it can be hashed.
        let is_plain = name.compression == Compression::None && !name.is_encrypted;
        let ahead = ctx.threads > 1 && !is_plain && snapshot.bytes >= WORTH_A_THREAD;
        let plain = match ahead {
            true => Box::new(Ahead::new(plain)?),
            false => plain,
        };
        Ok(FrameReader::new(plain).within(ctx.limits))
    }

    /// As [`Context::delta`].
    pub(crate) fn delta<'l>(&self, nth: usize) -> Result<DeltaReader<'l, Payload>> {
        let payload = self.payload(nth)?;
        let delta = DeltaReader::new(payload, &self.snapshots[nth].name);
        Ok(delta.within(self.ctx.limits))
    }

    /// As [`Context::delta`]. Of several that are read at once, one alone holds long events.
    pub(crate) fn delta_in_turn(&self, nth: usize) -> Result<DeltaReader<'_, Payload>> {
        let mut alone = None;
        Ok(self.delta(nth)?.with_leave(move || {
            alone.get_or_insert_with(|| lock(&self.long_events));
            Ok(())
        }))
    }

    /// As [`Context::full`].
    pub(crate) fn full(&self, nth: usize) -> Result<(Database<Spool>, Base)> {
        self.full_of(nth, |object| object)
    }

    /// As [`full`](Self::full); gives the SHA-256 of the object, too.
    pub(crate) fn full_with_hash(&self, nth: usize) -> Result<(Database<Spool>, Base, String)> {
        let hash = Arc::new(Mutex::new(Sha256::new()));
        // What is read to its end was read whole: bytes behind it are an error.
        let (db, base) = self.full_of(nth, |object| Hashed {
            object,
            hash: Arc::clone(&hash),
        })?;
        let hash = lock(&hash).clone().finalize();
        Ok((db, base, hex(&hash)))
    }

    /// Copies a full into a file, and opens it.
    fn full_of<R: Read + Send + 'static>(
        &self,
        nth: usize,
        through: impl FnOnce(ObjectReader) -> R,
    ) -> Result<(Database<Spool>, Base)> {
        let (ctx, snapshot) = (self.ctx, self.snapshots[nth]);
        let at = ctx.at(snapshot);
        // Nothing is smaller decompressed.
        free_space::check(&ctx.temp_dir, snapshot.bytes, &snapshot.path)?;
        let payload = self.payload_of(nth, through(self.ahead.take(nth)))?;
        let read_error = |e| at(Error::io("read", e));
        let file = ctx.copy_database(payload, 0, &snapshot.path, read_error, |_| ())?;
        let db = Database::open_within(ctx.spool(file), ctx.limits).map_err(&at)?;
        let base = Base::read(&db).map_err(&at)?;
        if base.revision < snapshot.name.last {
            return Err(at(Reason::NameMismatch.error(format!(
                "its name promises revision {}, it ends at {}",
                snapshot.name.last, base.revision
            ))));
        }
        Ok((db, base))
    }
}
