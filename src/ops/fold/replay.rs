//! Replay: the deltas of a [`Source`] go into a fold, one after the other with one thread, several at once
//! with more.
//!
//! The first delta that is under way holds the fold; those after it fold into parts of their own,
//! and hand these over when their turn comes. Their results, and the error if there is one, are
//! those of one thread.

use super::by_time;
use super::open::read_snapshot::Reading;
use super::open::source::Source;
use super::select::Step;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Result};
use crate::mvcc::{
    Change, Fold, FoldOptions, HashKv, KeepHistory, KeyRange, KeyValue, PartialFold, Revision,
    hash_kv,
};
use crate::ops::Context;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Changes that a fold holds in memory before they go to the temporary directory.
const CHANGE_BUFFER_BYTES: usize = 16 << 20;
/// Changes that a part holds in memory: what an upload's part takes later.
const PART_BUFFER_BYTES: usize = 4 << 20;
/// Keys that all parts together hold in memory; one that has more waits for its turn.
const PARTS_KEY_BYTES: usize = 12 << 20;

impl Source {
    /// Folds the records of some keys. Gives the number of events that were taken, too.
    ///
    /// # Errors
    /// Those of a damaged or foreign delta; the store's; `Io`, `NoSpace`, `Terminated`.
    pub fn fold(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
    ) -> Result<(Fold<'static>, u64)> {
        self.fold_to(ctx, compact, keys, detach_leases, Ok)
    }

    /// As [`fold`](Self::fold); `to` says where the changes go before they come.
    ///
    /// # Errors
    /// As [`fold`](Self::fold); what `to` returns.
    pub(super) fn fold_to<'f>(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
        to: impl FnOnce(Fold<'static>) -> Result<Fold<'f>>,
    ) -> Result<(Fold<'f>, u64)> {
        let options = self.fold_options(ctx, compact, keys, detach_leases);
        let fold = to(self.fold_of_base(ctx, options.clone())?)?;
        self.read_deltas(ctx, || replay(ctx, self.steps(), &options, fold))
    }

    fn fold_options(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
    ) -> FoldOptions {
        FoldOptions {
            target: self.target,
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

    /// The compacted revision of a result that keeps so much history.
    ///
    /// # Errors
    /// As [`fold`](Self::fold): for a duration the deltas are read.
    pub fn compact_revision(&self, ctx: &Context, keep: KeepHistory) -> Result<Revision> {
        let made = self.base_snapshot().map(|s| s.name.created_at());
        // The base's events have no times, but they are older than the base.
        let base = made.map(|made| (made, self.base.revision));
        let cutoff = match keep {
            KeepHistory::Age(age) => {
                self.read_some_deltas(ctx, || by_time::too_old(ctx, self.steps(), base, age))?
            }
            _ => None,
        };
        Ok(keep.compact_revision(&self.base, self.target, cutoff))
    }

    /// HashKV of the state as if compacted at a revision. Gives the number of events that were taken, too.
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

    /// HashKV of the full itself.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`.
    pub fn hash_of_base(&self, ctx: &Context) -> Result<HashKv> {
        hash_kv(&self.db, None).map_err(self.at_base(ctx))
    }

    /// Hands every one of `keys` that is alive to `each`, in the order of their newest revisions.
    ///
    /// # Errors
    /// As [`fold`](Self::fold); what `each` returns.
    pub fn for_each_live(
        &self,
        ctx: &Context,
        keys: KeyRange,
        each: impl FnMut(&KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        let (fold, _) = self.fold(ctx, self.target, keys, false)?;
        self.hand_on(ctx, fold, each)
    }

    /// As [`for_each_live`](Self::for_each_live), as if no delta changed one of `keys`.
    pub(crate) fn for_each_live_in_base(
        &self,
        ctx: &Context,
        keys: KeyRange,
        each: impl FnMut(&KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        let options = self.fold_options(ctx, self.target, keys, false);
        self.hand_on(ctx, self.fold_of_base(ctx, options)?, each)
    }

    fn hand_on(
        &self,
        ctx: &Context,
        fold: Fold<'_>,
        mut each: impl FnMut(&KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        fold.finish(&self.db, |r| {
            ctx.store.cancel().check()?;
            if r.rk.tombstone {
                return Ok(());
            }
            match KeyValue::decode(r.record)? {
                // etcdutl's mark of a bumped revision is no key.
                kv if kv.key.is_empty() => Ok(()),
                kv => each(&kv),
            }
        })?;
        Ok(())
    }
}

/// Applies the deltas in order. Gives the fold back, and the number of events it took.
///
/// # Errors
/// Those of the first delta that has one: `CorruptSnapshot`, `NameMismatch`, `HistoryMismatch`; the
/// store's; `Io`, `NoSpace`, `Terminated`.
fn replay<'f>(
    ctx: &Context,
    steps: &[Step],
    options: &FoldOptions,
    fold: Fold<'f>,
) -> Result<(Fold<'f>, u64)> {
    let threads = ctx.threads.clamp(1, steps.len().max(1));
    let run = Run {
        ctx,
        steps,
        options,
        threads,
        taken: AtomicUsize::new(0),
        events: AtomicU64::new(0),
        reading: Reading::new(ctx, steps.iter().map(|s| &s.snapshot)),
        turn: Mutex::new(Turn {
            next: 0,
            fold: Some(fold),
            failed: None,
        }),
        passed: Condvar::new(),
        stop_at: AtomicUsize::new(usize::MAX),
    };
    std::thread::scope(|s| {
        for _ in 1..threads {
            // If the system has no thread left, fewer do it.
            let _ = std::thread::Builder::new().spawn_scoped(s, || run.work());
        }
        run.work();
    });
    let turn = unpoisoned(run.turn.into_inner());
    match (turn.failed, turn.fold) {
        (Some((_, e)), _) => Err(e),
        (None, Some(fold)) => Ok((fold, run.events.into_inner())),
        (None, None) => Err(Error::internal("the fold was lost")),
    }
}

struct Run<'a, 'f> {
    ctx: &'a Context,
    steps: &'a [Step],
    options: &'a FoldOptions,
    threads: usize,
    /// Steps that a thread has taken.
    taken: AtomicUsize,
    events: AtomicU64,
    reading: Reading<'a>,
    turn: Mutex<Turn<'f>>,
    passed: Condvar,
    /// Steps from this one on are not worth going on with.
    stop_at: AtomicUsize,
}

struct Turn<'f> {
    /// The step that may have the fold.
    next: usize,
    fold: Option<Fold<'f>>,
    /// The first step that failed.
    failed: Option<(usize, Error)>,
}

/// Where a step's events go.
enum Taker<'f> {
    Whole(Box<Fold<'f>>),
    Part(Box<PartialFold>),
}

impl<'f> Taker<'f> {
    fn apply(&mut self, main: Revision, sub: u32, change: &Change<'_>) -> Result<bool> {
        match self {
            Taker::Whole(fold) => fold.apply(main, sub, change),
            Taker::Part(part) => part.apply(main, sub, change),
        }
    }

    /// Hands what a part took over to the fold whose turn it is.
    fn join(self, mut fold: Fold<'f>) -> Result<Fold<'f>> {
        if let Taker::Part(part) = self {
            fold.absorb(*part)?;
        }
        Ok(fold)
    }
}

impl<'f> Run<'_, 'f> {
    fn work(&self) {
        loop {
            let i = self.taken.fetch_add(1, Ordering::Relaxed);
            if i >= self.steps.len() || i > self.stop_at.load(Ordering::Relaxed) {
                return;
            }
            // The waiting threads are told of the panic, and then it goes on.
            let guard = Panicked(self, i);
            if let Err(e) = self.step(i) {
                self.fail(i, e);
            }
            std::mem::forget(guard);
        }
    }

    fn fail(&self, i: usize, e: Error) {
        let mut turn = lock(&self.turn);
        if turn.failed.as_ref().is_none_or(|(first, _)| i < *first) {
            turn.failed = Some((i, e));
            self.stop_at.fetch_min(i, Ordering::Relaxed);
        }
        self.passed.notify_all();
    }

    /// Whether a step before this one has failed.
    fn is_in_vain(&self, i: usize) -> bool {
        self.stop_at.load(Ordering::Relaxed) < i
    }

    /// The fold, if it is this step's turn.
    fn take(&self, i: usize) -> Option<Fold<'f>> {
        let mut turn = lock(&self.turn);
        (turn.next == i).then(|| turn.fold.take())?
    }

    /// Waits for the fold; `None` if a step before this one has failed.
    fn wait(&self, i: usize) -> Result<Option<Fold<'f>>> {
        self.wait_for_turn(i)?;
        Ok(self.take(i))
    }

    /// Waits until this step may have the fold, or a step before it has failed.
    fn wait_for_turn(&self, i: usize) -> Result<()> {
        /// How long a signal may go unnoticed.
        const LOOK: Duration = Duration::from_millis(50);
        let mut turn = lock(&self.turn);
        while turn.next != i && !self.is_in_vain(i) {
            self.ctx.store.cancel().check()?;
            turn = unpoisoned(self.passed.wait_timeout(turn, LOOK)).0;
        }
        Ok(())
    }

    fn pass(&self, i: usize, fold: Fold<'f>) {
        let mut turn = lock(&self.turn);
        turn.next = i + 1;
        turn.fold = Some(fold);
        self.passed.notify_all();
    }

    fn step(&self, i: usize) -> Result<()> {
        let step = &self.steps[i];
        let at = self.ctx.at(&step.snapshot);
        let delta = self.reading.delta(i)?;
        // Only the earliest delta under way may hold a long event.
        let mut delta = delta.with_leave(|| self.wait_for_turn(i));
        let mut taker = match self.take(i) {
            Some(fold) => Taker::Whole(Box::new(fold)),
            None => {
                let part = PartialFold::new(self.options.clone(), PART_BUFFER_BYTES);
                Taker::Part(Box::new(part))
            }
        };
        let (mut events, mut key_bytes) = (0, 0);
        let mut n = 0u32;
        loop {
            let applied = match delta.next() {
                Ok(None) => break,
                Ok(Some(e)) if e.main <= step.after || e.main > step.until => Ok(false),
                Ok(Some(e)) => taker.apply(e.main, e.sub, &e.change),
                Err(e) => Err(e),
            };
            match applied {
                Ok(taken) => events += u64::from(taken),
                Err(e) => {
                    let e = delta.explain(e);
                    return Err(at(self.first_error(i, taker, e, delta.is_damaged())?));
                }
            }
            n = n.wrapping_add(1);
            if !n.is_multiple_of(256) && !delta.is_long() {
                continue;
            }
            if self.is_in_vain(i) {
                return Ok(());
            }
            if let Taker::Part(part) = &taker {
                key_bytes = part.key_memory().max(key_bytes);
                let whole = match key_bytes > PARTS_KEY_BYTES / self.threads {
                    true => self.wait(i)?,
                    false => self.take(i),
                };
                if let Some(fold) = whole {
                    let joined = taker.join(fold).map_err(|e| at(delta.explain(e)))?;
                    taker = Taker::Whole(Box::new(joined));
                }
            }
        }
        let fold = match taker {
            Taker::Whole(fold) => *fold,
            part => match self.wait(i)? {
                Some(fold) => part.join(fold).map_err(&at)?,
                None => return Ok(()),
            },
        };
        self.events.fetch_add(events, Ordering::Relaxed);
        self.pass(i, fold);
        Ok(())
    }

    /// What one thread would have said where a part failed with `e`: what came before `e` may
    /// contradict the fold. Damaged bytes explain both.
    fn first_error(&self, i: usize, taker: Taker<'f>, e: Error, damaged: bool) -> Result<Error> {
        if damaged || !e.reason().is_bad_data() || matches!(taker, Taker::Whole(_)) {
            return Ok(e);
        }
        match self.wait(i)? {
            Some(fold) => Ok(taker.join(fold).err().unwrap_or(e)),
            // It is told already what failed first.
            None => Ok(e),
        }
    }
}

/// Ends the waiting of other threads when one panics.
struct Panicked<'r, 'a, 'f>(&'r Run<'a, 'f>, usize);

impl Drop for Panicked<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.fail(self.1, Error::internal("a thread panicked"));
    }
}
