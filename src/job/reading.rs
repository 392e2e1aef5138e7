//! Several snapshots that are read one after the other, in a known order: their transfers begin ahead.

use crate::base::hash::hex;
use crate::base::lock;
use crate::bolt::Database;
use crate::bucket::Snapshot;
use crate::bucket::delta::DeltaReader;
use crate::error::Result;
use crate::job::{Context, Payload, Spool};
use crate::mvcc::Base;
use crate::store::{ObjectReader, ReadAhead};
use crate::telemetry::progress::Step;
use sha2::{Digest, Sha256};
use std::io::{self, Read};
use std::sync::{Arc, Mutex};

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
pub(super) struct Reading<'a> {
    ctx: &'a Context,
    snapshots: Vec<&'a Snapshot>,
    ahead: ReadAhead,
    step: Step,
    /// Held by the one of several threads that reads a delta with a long event.
    long_events: Mutex<()>,
}

impl<'a> Reading<'a> {
    /// Begins no transfer yet.
    pub(super) fn new(ctx: &'a Context, snapshots: impl IntoIterator<Item = &'a Snapshot>) -> Self {
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
    pub(super) fn snapshot(&self, nth: usize) -> &'a Snapshot {
        self.snapshots[nth]
    }

    /// As [`Context::payload`].
    pub(super) fn payload(&self, nth: usize) -> Result<Payload> {
        let object = self.ahead.take(nth);
        self.ctx
            .payload_from(object, self.snapshots[nth], &self.step)
    }

    /// As [`Context::delta`].
    pub(super) fn delta<'l>(&self, nth: usize) -> Result<DeltaReader<'l, Payload>> {
        let payload = self.payload(nth)?;
        let delta = DeltaReader::new(payload, &self.snapshots[nth].name);
        Ok(delta.within(self.ctx.limits))
    }

    /// As [`Context::delta`]. Of several that are read at once, one alone holds long events.
    pub(super) fn delta_in_turn(&self, nth: usize) -> Result<DeltaReader<'_, Payload>> {
        let mut alone = None;
        Ok(self.delta(nth)?.with_leave(move || {
            alone.get_or_insert_with(|| lock(&self.long_events));
            Ok(())
        }))
    }

    /// As [`full`](Self::full); gives the SHA-256 of the object, too.
    pub(super) fn full_with_hash(&self, nth: usize) -> Result<(Database<Spool>, Base, String)> {
        let hash = Arc::new(Mutex::new(Sha256::new()));
        let object = Hashed {
            object: self.ahead.take(nth),
            hash: Arc::clone(&hash),
        };
        let snapshot = self.snapshots[nth];
        // What is read to its end was read whole: bytes behind it are an error.
        let (db, base) = self.ctx.full_from(snapshot, || {
            self.ctx.payload_from(object, snapshot, &self.step)
        })?;
        let hash = lock(&hash).clone().finalize();
        Ok((db, base, hex(&hash)))
    }

    /// As [`Context::full`].
    pub(super) fn full(&self, nth: usize) -> Result<(Database<Spool>, Base)> {
        self.ctx
            .full_from(self.snapshots[nth], || self.payload(nth))
    }
}
