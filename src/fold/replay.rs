//! Replay: applies the deltas of a [`State`] to a fold, on one or several threads.
//!
//! The earliest delta in progress holds the fold. Later deltas collect their events in parts, and add these
//! to the fold when their turn comes. So the result, or the error, does not depend on the number of threads.

use crate::base::{lock, unpoisoned};
use crate::error::{Error, Result};
use crate::mvcc::{
    Change, Fold, FoldOptions, HashKv, KeepHistory, KeyRange, KeyValue, PartialFold, RecordKey,
    Revision, hash_kv,
};
use crate::prefix::Context;
use crate::prefix::by_time;
use crate::prefix::open::read_snapshot::SnapshotReader;
use crate::prefix::open::state::State;
use crate::prefix::select::DeltaSlice;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// The bytes of changes that a fold holds in memory before it writes them to the temporary directory.
const CHANGE_BUFFER_BYTES: usize = 16 << 20;
/// The bytes of changes that a part holds in memory. An upload uses the same memory later.
const PART_BUFFER_BYTES: usize = 4 << 20;
/// The bytes of keys that all parts together hold in memory. A part that exceeds its share waits for its
/// turn.
const PARTS_KEY_BYTES: usize = 12 << 20;

impl State {
    /// Folds the records of some keys. Returns the fold and the number of events that were applied.
    ///
    /// # Errors
    /// Errors of a damaged delta or of one from another history; errors of the store; `Io`, `NoSpace`,
    /// `Terminated`.
    pub fn fold(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
    ) -> Result<(Fold<'static>, u64)> {
        self.fold_to(ctx, compact, keys, detach_leases, Ok)
    }

    /// Folds as [`fold`](Self::fold) does. `to` prepares the fold before the first event, for example to
    /// stream its result.
    ///
    /// # Errors
    /// As [`fold`](Self::fold); errors of `to`.
    pub(crate) fn fold_to<'f>(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
        to: impl FnOnce(Fold<'static>) -> Result<Fold<'f>>,
    ) -> Result<(Fold<'f>, u64)> {
        let options = self.fold_options(ctx, compact, keys, detach_leases);
        let fold = to(self.fold_of_base(ctx, options.clone())?)?;
        let slices = self.delta_slices();
        let reader = SnapshotReader::new(ctx, slices.iter().map(|s| &s.snapshot));
        let reader = reader.with_begun(lock(&self.begun).take());
        replay(ctx, slices, reader, &options, fold)
    }

    fn fold_options(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
    ) -> FoldOptions {
        FoldOptions {
            target: self.revision,
            compact,
            keys,
            detach_leases,
            base: self.base,
            temp_dir: ctx.temp(),
            buffer_bytes: CHANGE_BUFFER_BYTES,
            limits: ctx.limits,
        }
    }

    fn fold_of_base(&self, ctx: &Context, options: FoldOptions) -> Result<Fold<'static>> {
        Fold::new(options, &self.db).map_err(self.at_base(ctx))
    }

    /// Returns the compacted revision of a new snapshot that keeps this much history.
    ///
    /// # Errors
    /// As [`fold`](Self::fold), since for a duration deltas are read.
    pub fn compact_revision(&self, ctx: &Context, keep: KeepHistory) -> Result<Revision> {
        let created = self.base_snapshot().map(|s| s.name.created_at());
        // The events in the base have no times, but they are older than the base.
        let base = created.map(|created| (created, self.base.revision));
        let cutoff = match keep {
            KeepHistory::Age(age) => {
                by_time::newest_older_than(ctx, self.delta_slices(), base, age)?
            }
            _ => None,
        };
        Ok(keep.compact_revision(&self.base, self.revision, cutoff))
    }

    /// Computes the HashKV of the state as if it was compacted at a revision. Returns the number of applied
    /// events, too.
    ///
    /// # Errors
    /// As [`fold`](Self::fold).
    pub(crate) fn hash(
        &self,
        ctx: &Context,
        compact: Revision,
        detach_leases: bool,
    ) -> Result<(HashKv, u64)> {
        let (fold, events) = self.fold(ctx, compact, KeyRange::All, detach_leases)?;
        let hash = fold.finish(&self.db, |_| ctx.store.cancel().check());
        Ok((hash.map_err(self.at_base(ctx))?, events))
    }

    /// Computes the HashKV of the full itself.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`.
    pub fn hash_of_base(&self, ctx: &Context) -> Result<HashKv> {
        hash_kv(&self.db, None).map_err(self.at_base(ctx))
    }

    /// Calls `each` for every live key of a range, in the order of the newest revisions of the keys.
    ///
    /// # Errors
    /// As [`fold`](Self::fold); errors of `each`.
    pub fn for_each_live(
        &self,
        ctx: &Context,
        keys: KeyRange,
        mut each: impl FnMut(&KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        self.for_each_live_version(ctx, keys, |_, kv| each(kv))
    }

    /// As [`for_each_live`](Self::for_each_live), with the revisions and their numbers within transactions.
    pub(crate) fn for_each_live_version(
        &self,
        ctx: &Context,
        keys: KeyRange,
        each: impl FnMut(RecordKey, &KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        let (fold, _) = self.fold(ctx, self.revision, keys, false)?;
        self.visit_live(ctx, fold, each)
    }

    /// As [`for_each_live`](Self::for_each_live), for keys that no delta changes.
    pub(crate) fn for_each_live_in_base(
        &self,
        ctx: &Context,
        keys: KeyRange,
        mut each: impl FnMut(&KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        let options = self.fold_options(ctx, self.revision, keys, false);
        self.visit_live(ctx, self.fold_of_base(ctx, options)?, |_, kv| each(kv))
    }

    /// Calls `each` for the live keys of a fold.
    fn visit_live(
        &self,
        ctx: &Context,
        fold: Fold<'_>,
        mut each: impl FnMut(RecordKey, &KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        fold.finish(&self.db, |r| {
            ctx.store.cancel().check()?;
            if r.rk.tombstone {
                return Ok(());
            }
            match KeyValue::decode(r.record)? {
                // etcdutl marks a bumped revision with an empty key.
                kv if kv.key.is_empty() => Ok(()),
                kv => each(r.rk, &kv),
            }
        })?;
        Ok(())
    }
}

/// Applies the deltas in order. Returns the fold and the number of events that were applied.
///
/// # Errors
/// The error of the first delta that fails: `CorruptSnapshot`, `NameMismatch`, `HistoryMismatch`; errors of
/// the store; `Io`, `NoSpace`, `Terminated`.
fn replay<'a, 'f>(
    ctx: &'a Context,
    slices: &'a [DeltaSlice],
    reader: SnapshotReader<'a>,
    options: &'a FoldOptions,
    fold: Fold<'f>,
) -> Result<(Fold<'f>, u64)> {
    let threads = ctx.threads.clamp(1, slices.len().max(1));
    let replay = ParallelReplay {
        ctx,
        slices,
        options,
        threads,
        begun: AtomicUsize::new(0),
        events: AtomicU64::new(0),
        reader,
        turn: Mutex::new(FoldTurn {
            next: 0,
            fold: Some(fold),
            failed: None,
        }),
        turn_changed: Condvar::new(),
        failed_at: AtomicUsize::new(usize::MAX),
    };
    std::thread::scope(|s| {
        for _ in 1..threads {
            // If the system has no threads left, fewer of them work.
            let _ = std::thread::Builder::new().spawn_scoped(s, || replay.work());
        }
        replay.work();
    });
    let turn = unpoisoned(replay.turn.into_inner());
    match (turn.failed, turn.fold) {
        (Some((_, e)), _) => Err(e),
        (None, Some(fold)) => Ok((fold, replay.events.into_inner())),
        (None, None) => Err(Error::internal("the fold was lost")),
    }
}

/// A replay on several threads.
struct ParallelReplay<'a, 'f> {
    ctx: &'a Context,
    slices: &'a [DeltaSlice],
    options: &'a FoldOptions,
    threads: usize,
    /// The number of slices that threads have begun.
    begun: AtomicUsize,
    /// The number of events that were applied.
    events: AtomicU64,
    reader: SnapshotReader<'a>,
    turn: Mutex<FoldTurn<'f>>,
    /// Notified when `turn` changes.
    turn_changed: Condvar,
    /// The first slice that failed; later slices need not be finished.
    failed_at: AtomicUsize,
}

/// Which slice may have the fold.
struct FoldTurn<'f> {
    /// The index of the slice that may take the fold.
    next: usize,
    /// The fold; `None` while a slice has taken it.
    fold: Option<Fold<'f>>,
    /// The first slice that failed, and its error.
    failed: Option<(usize, Error)>,
}

/// Where the events of a slice go.
enum EventSink<'f> {
    Whole(Box<Fold<'f>>),
    Part(Box<PartialFold>),
}

impl<'f> EventSink<'f> {
    fn apply(&mut self, main: Revision, sub: u32, change: &Change<'_>) -> Result<bool> {
        match self {
            EventSink::Whole(fold) => fold.apply(main, sub, change),
            EventSink::Part(part) => part.apply(main, sub, change),
        }
    }

    /// Adds the events of a part to the fold. A fold that was taken already stays as it is.
    fn join(self, mut fold: Fold<'f>) -> Result<Fold<'f>> {
        if let EventSink::Part(part) = self {
            fold.absorb(*part)?;
        }
        Ok(fold)
    }
}

impl<'f> ParallelReplay<'_, 'f> {
    /// The body of a thread: replays slices until none is left or one has failed.
    fn work(&self) {
        loop {
            let i = self.begun.fetch_add(1, Ordering::Relaxed);
            if i >= self.slices.len() || i > self.failed_at.load(Ordering::Relaxed) {
                return;
            }
            // If the replay panics, the guard ends the waiting of the other threads.
            let guard = FailOnPanic(self, i);
            if let Err(e) = self.replay_slice(i) {
                self.fail(i, e);
            }
            std::mem::forget(guard);
        }
    }

    /// Records that a slice failed, and wakes the waiting threads.
    fn fail(&self, i: usize, e: Error) {
        let mut turn = lock(&self.turn);
        if turn.failed.as_ref().is_none_or(|(first, _)| i < *first) {
            turn.failed = Some((i, e));
            self.failed_at.fetch_min(i, Ordering::Relaxed);
        }
        self.turn_changed.notify_all();
    }

    /// Returns whether a slice before this one has failed.
    fn has_earlier_failure(&self, i: usize) -> bool {
        self.failed_at.load(Ordering::Relaxed) < i
    }

    /// Takes the fold, if it is the turn of this slice.
    fn take_fold(&self, i: usize) -> Option<Fold<'f>> {
        let mut turn = lock(&self.turn);
        (turn.next == i).then(|| turn.fold.take())?
    }

    /// Waits for the fold and takes it; `None` if a slice before this one has failed.
    fn wait_for_fold(&self, i: usize) -> Result<Option<Fold<'f>>> {
        self.wait_for_turn(i)?;
        Ok(self.take_fold(i))
    }

    /// Waits until this slice may take the fold, or a slice before it has failed.
    fn wait_for_turn(&self, i: usize) -> Result<()> {
        /// The interval at which cancellation is checked.
        const CHECK_INTERVAL: Duration = Duration::from_millis(50);
        let mut turn = lock(&self.turn);
        while turn.next != i && !self.has_earlier_failure(i) {
            self.ctx.store.cancel().check()?;
            turn = unpoisoned(self.turn_changed.wait_timeout(turn, CHECK_INTERVAL)).0;
        }
        Ok(())
    }

    /// Passes the fold on to the next slice.
    fn pass_on(&self, i: usize, fold: Fold<'f>) {
        let mut turn = lock(&self.turn);
        turn.next = i + 1;
        turn.fold = Some(fold);
        self.turn_changed.notify_all();
    }

    fn replay_slice(&self, i: usize) -> Result<()> {
        let slice = &self.slices[i];
        let at = self.ctx.at(&slice.snapshot);
        let delta = self.reader.delta(i)?;
        // Only the earliest delta in progress may hold a long event in memory.
        let mut delta = delta.before_long_event(|| self.wait_for_turn(i));
        let mut sink = match self.take_fold(i) {
            Some(fold) => EventSink::Whole(Box::new(fold)),
            None => {
                let part = PartialFold::new(self.options.clone(), PART_BUFFER_BYTES);
                EventSink::Part(Box::new(part))
            }
        };
        let (mut events, mut key_bytes) = (0, 0);
        let mut events_read = 0u32;
        loop {
            let applied = match delta.next() {
                Ok(None) => break,
                Ok(Some(e)) if !slice.contains(e.main) => Ok(false),
                Ok(Some(e)) => sink.apply(e.main, e.sub, &e.change),
                Err(e) => Err(e),
            };
            match applied {
                Ok(was_applied) => events += u64::from(was_applied),
                Err(e) => {
                    let e = delta.explain(e);
                    return Err(at(self.first_error(i, sink, e, delta.is_damaged())?));
                }
            }
            events_read = events_read.wrapping_add(1);
            if !events_read.is_multiple_of(256) && !delta.holds_long_event() {
                continue;
            }
            if self.has_earlier_failure(i) {
                return Ok(());
            }
            if let EventSink::Part(part) = &sink {
                key_bytes = part.key_memory().max(key_bytes);
                let fold = if key_bytes > PARTS_KEY_BYTES / self.threads {
                    self.wait_for_fold(i)?
                } else {
                    self.take_fold(i)
                };
                if let Some(fold) = fold {
                    let joined = sink.join(fold).map_err(|e| at(delta.explain(e)))?;
                    sink = EventSink::Whole(Box::new(joined));
                }
            }
        }
        let fold = match sink {
            EventSink::Whole(fold) => *fold,
            part => match self.wait_for_fold(i)? {
                Some(fold) => part.join(fold).map_err(&at)?,
                None => return Ok(()),
            },
        };
        self.events.fetch_add(events, Ordering::Relaxed);
        self.pass_on(i, fold);
        Ok(())
    }

    /// Returns the error that a replay on one thread would have returned if a part failed with `e`: events
    /// before `e` may contradict the fold. Damaged bytes explain both.
    fn first_error(&self, i: usize, sink: EventSink<'f>, e: Error, damaged: bool) -> Result<Error> {
        if damaged || !e.reason().is_bad_data() || matches!(sink, EventSink::Whole(_)) {
            return Ok(e);
        }
        match self.wait_for_fold(i)? {
            Some(fold) => Ok(sink.join(fold).err().unwrap_or(e)),
            // The error of the earlier slice is returned in the end.
            None => Ok(e),
        }
    }
}

/// Fails a slice if its thread panics, so that other threads do not wait for it.
struct FailOnPanic<'r, 'a, 'f>(&'r ParallelReplay<'a, 'f>, usize);

impl Drop for FailOnPanic<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.fail(self.1, Error::internal("a thread panicked"));
    }
}
