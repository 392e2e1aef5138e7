//! One round of a copy: transfers several snapshots at the same time in the order of the plan, and gives each its name
//! once a snapshot that it follows has its own.
//!
//! In an object store, the deltas of a large plan are named concurrently as soon as their full has its name: one after
//! the other would take hours, and a run that is killed in the middle is followed by another one anyway. A failure
//! affects only the snapshots that depend on it, but a store that cannot be reached ends the round. `plan` has decided
//! what is copied. Called by `ops::copy::copier`.

use super::Options;
use super::notes::Notes;
use super::plan::{Decision, Plan, Planned, follows, is_based};
use super::transfer::{Transferred, transfer};
use crate::backup::{Catalog, Snapshot};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::prefix::Context;
use crate::store::{Published, Store, Unnamed};
use crate::telemetry::memory::give_back_free_pages;
use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};

/// Small snapshots that are copied between folders at the same time, unless `--parallel` is 1, or
/// larger.
const SYNCED_AT_ONCE: usize = 8;
/// A round that copies more snapshots is large.
const FEW: usize = 32;
/// After this many consecutive failures that are not about the data, the store itself is in trouble.
const MOST_FAILURES: u32 = 3;
/// After so many snapshots, free pages go back to the system: glibc rarely reuses the aligned blocks that gunzip takes.
const MANY: usize = 512;
/// Smaller snapshots take little memory.
const SMALL: u64 = 1 << 20;
/// Smaller snapshots are compressed by one thread.
const LARGE: u64 = 64 << 20;

/// The result of copying a snapshot.
#[derive(Debug)]
pub(super) enum CopyResult {
    /// It was copied to the target.
    Copied {
        /// Bytes written to the target.
        bytes: u64,
        /// Whether its content was checked.
        is_checked: bool,
    },
    /// Another process has copied it to the target during the round.
    AlreadyThere,
    /// No snapshot that it follows could be copied.
    NoBase,
    /// Copying it failed.
    Failed(Error),
    /// The round ended before it was copied.
    NotTried,
}

impl CopyResult {
    fn is_in_target(&self) -> bool {
        matches!(self, CopyResult::Copied { .. } | CopyResult::AlreadyThere)
    }
}

/// A round: what is copied, and from where to where.
pub(super) struct Round<'a> {
    pub(super) from: &'a Context,
    pub(super) to: &'a Context,
    pub(super) options: &'a Options,
    pub(super) source: &'a Catalog,
    pub(super) plan: &'a Plan,
    /// What the target held before the round.
    pub(super) target: &'a Catalog,
    /// Snapshots that earlier rounds found damaged: size and error by path in the source.
    pub(super) damaged: &'a HashMap<String, (u64, Error)>,
}

/// The progress of a round, which its workers share. Snapshots are meant by their index in the plan, or by their place
/// among those that are copied.
#[derive(Default)]
struct RoundState {
    /// The indexes of the snapshots that are copied, in their order.
    copies: Vec<usize>,
    /// The place of the next snapshot to transfer.
    next: usize,
    /// The place of the first snapshot that has no result.
    done: usize,
    /// The last revisions of usable snapshots in the target: of those that it had, and of those before `done` that have
    /// what they follow.
    there: BTreeSet<Revision>,
    /// The indexes of snapshots that are being named.
    naming: BTreeSet<usize>,
    /// How many snapshots may be named at the same time. What is missing after a kill is never longer.
    named_at_once: usize,
    /// The number of large snapshots under way.
    large: usize,
    /// The results so far, by index.
    results: Vec<Option<CopyResult>>,
    /// Consecutive failures that are not about the data.
    failures: u32,
    /// Whether the round ends early.
    has_ended: bool,
}

/// Whether a snapshot may get its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readiness {
    Now,
    /// When a snapshot that it follows has its name.
    Later,
    /// No snapshot that it follows could be copied.
    Never,
}

impl Round<'_> {
    /// Carries out the plan. Returns the result of each snapshot that was to be copied, by index in the plan; `None` for
    /// the others.
    ///
    /// # Errors
    /// Fails if the notes about a snapshot that the target already has cannot be copied.
    pub(super) fn run(&self) -> Result<Vec<Option<CopyResult>>> {
        let objects = &self.plan.objects;
        for p in objects.iter().filter(|p| p.decision == Decision::Keep) {
            self.copy_notes(p)?;
        }
        let copies = self.plan.copies();
        let workers = self.workers().clamp(1, copies.len().max(1));
        let is_concurrent = self.to.store.requests().is_some() && copies.len() > FEW;
        let mut state = RoundState {
            there: self.plan.there.clone(),
            copies,
            results: objects.iter().map(|_| None).collect(),
            named_at_once: if is_concurrent { workers } else { 1 },
            ..RoundState::default()
        };
        // A damaged snapshot is not fetched in every round.
        for &i in &state.copies {
            let (_, snapshot) = self.planned(i);
            if let Some((bytes, e)) = self.damaged.get(&snapshot.path)
                && *bytes == snapshot.bytes
            {
                state.results[i] = Some(CopyResult::Failed(e.again()));
            }
        }
        self.settle(&mut state);
        let state = (Mutex::new(state), Condvar::new());
        std::thread::scope(|scope| {
            let work = || self.work(&state);
            for n in 0..workers {
                let worker = std::thread::Builder::new().spawn_scoped(scope, work);
                // If no further thread can be started, the others do the work.
                if worker.is_err() {
                    if n == 0 {
                        work();
                    }
                    break;
                }
            }
        });
        let mut state = unpoisoned(state.0.into_inner());
        for &i in &state.copies {
            state.results[i].get_or_insert(CopyResult::NotTried);
        }
        Ok(state.results)
    }

    pub(super) fn notes(&self) -> Notes<'_> {
        let (from, to) = (&self.from.store, &self.to.store);
        Notes { from, to }
    }

    /// Copies the notes about a full that the target already has.
    fn copy_notes(&self, planned: &Planned) -> Result<()> {
        let snapshot = &self.source.snapshots[planned.source];
        if !snapshot.pinned {
            return Ok(());
        }
        let mut in_target = self.target.snapshots.iter();
        match in_target.find(|t| t.path == planned.path) {
            Some(in_target) => self.notes().add_missing(planned, snapshot, in_target),
            None => Ok(()),
        }
    }

    /// Returns how many snapshots are copied at the same time. Small ones spend most of their time
    /// waiting: for a slow store, or for a disk that syncs several files as fast as one.
    fn workers(&self) -> usize {
        let stores = [&self.from.store, &self.to.store];
        let requests = stores.into_iter().filter_map(Store::requests).max();
        let synced = match self.options.parallel {
            0 | 1 => 1,
            _ => SYNCED_AT_ONCE,
        };
        requests.unwrap_or(synced).max(self.options.parallel)
    }

    /// Returns whether a snapshot takes much memory.
    fn is_large(&self, i: usize) -> bool {
        self.planned(i).1.bytes >= SMALL
    }

    /// Copies one snapshot after the other until the round ends.
    fn work(&self, shared: &(Mutex<RoundState>, Condvar)) {
        let (mutex, changed) = shared;
        let mut state = lock(mutex);
        while let Some(&i) = state.copies.get(state.next).filter(|_| !state.has_ended) {
            let place = state.next;
            let is_large = self.is_large(i);
            if state.results[i].is_some() {
                state.next += 1;
                continue;
            }
            if is_large && state.large >= self.options.parallel.max(1) {
                state = unpoisoned(changed.wait(state));
                continue;
            }
            state.next += 1;
            state.large += usize::from(is_large);
            let mut result = CopyResult::NoBase;
            if self.readiness(&state, place) != Readiness::Never {
                drop(state);
                if (place + 1).is_multiple_of(MANY) {
                    give_back_free_pages();
                }
                let transferred = guarded(|| self.transfer(i));
                state = lock(mutex);
                match transferred {
                    Ok(transferred) => {
                        (state, result) = self.name_in_turn(state, shared, place, transferred);
                    }
                    Err(e) => result = CopyResult::Failed(e),
                }
            }
            self.set_result(&mut state, i, result);
            state.large -= usize::from(is_large);
            changed.notify_all();
        }
    }

    /// Waits until a snapshot may get its name, and gives it.
    fn name_in_turn<'s>(
        &self,
        mut state: MutexGuard<'s, RoundState>,
        (mutex, changed): &'s (Mutex<RoundState>, Condvar),
        place: usize,
        transferred: Transferred,
    ) -> (MutexGuard<'s, RoundState>, CopyResult) {
        loop {
            if state.has_ended {
                return (state, CopyResult::NotTried);
            }
            match self.readiness(&state, place) {
                Readiness::Now => break,
                Readiness::Later => state = unpoisoned(changed.wait(state)),
                Readiness::Never => return (state, CopyResult::NoBase),
            }
        }
        let i = state.copies[place];
        state.naming.insert(i);
        drop(state);
        // Those that follow may be named now, too.
        changed.notify_all();
        let named = guarded(|| Ok(self.name(i, transferred)));
        let mut state = lock(mutex);
        state.naming.remove(&i);
        let result = named.unwrap_or_else(CopyResult::Failed);
        if !result.is_in_target() {
            // Snapshots may have been named that follow this one. What follows those must see it.
            state.named_at_once = 1;
        }
        (state, result)
    }

    fn readiness(&self, state: &RoundState, place: usize) -> Readiness {
        match self.base_readiness(state, place) {
            Readiness::Now if place >= state.done + state.named_at_once => Readiness::Later,
            readiness => readiness,
        }
    }

    /// Tells whether what a snapshot follows has its name.
    fn base_readiness(&self, state: &RoundState, place: usize) -> Readiness {
        let (planned, snapshot) = self.planned(state.copies[place]);
        if snapshot.name.is_full() || snapshot.excluded {
            return Readiness::Now;
        }
        // A delta needs the full of its backup: another history may have the same revisions.
        match planned.full.map(|full| &state.results[full]) {
            Some(Some(result)) if !result.is_in_target() => return Readiness::Never,
            Some(None) => return Readiness::Later,
            _ => {}
        }
        if is_based(&snapshot.name, &state.there) {
            return Readiness::Now;
        }
        let bases = follows(&snapshot.name);
        let mut readiness = Readiness::Never;
        for i in &state.copies[state.done..place] {
            let (_, base) = self.planned(*i);
            if base.excluded || !bases.contains(&base.name.last) {
                continue;
            }
            match &state.results[*i] {
                Some(result) if result.is_in_target() => return Readiness::Now,
                None if state.naming.contains(i) => return Readiness::Now,
                None => readiness = Readiness::Later,
                Some(_) => {}
            }
        }
        readiness
    }

    fn planned(&self, i: usize) -> (&Planned, &Snapshot) {
        let planned = &self.plan.objects[i];
        (planned, &self.source.snapshots[planned.source])
    }

    fn transfer(&self, i: usize) -> Result<Transferred> {
        let (planned, snapshot) = self.planned(i);
        let threads = match snapshot.bytes < LARGE {
            true => 1,
            false => self.to.threads,
        };
        let form = &self.options.selection.form;
        transfer(self.from, self.to, form, snapshot, planned, threads)
    }

    /// Gives a transferred snapshot its name, and returns the result.
    fn name(&self, i: usize, transferred: Transferred) -> CopyResult {
        let (planned, snapshot) = self.planned(i);
        let Transferred { object, is_checked } = transferred;
        let bytes = object.bytes();
        match self.publish(planned, snapshot, object) {
            Ok(Published::Created) => CopyResult::Copied { bytes, is_checked },
            Ok(Published::Identical) => CopyResult::AlreadyThere,
            // Encrypting the same content twice gives different bytes.
            Ok(Published::Taken) if planned.name.is_encrypted && !self.is_verbatim(snapshot) => {
                CopyResult::AlreadyThere
            }
            Ok(Published::Taken) => CopyResult::Failed(super::failures::conflict(
                &self.to.store.name(&planned.path),
            )),
            Err(e) => CopyResult::Failed(e),
        }
    }

    /// Gives a snapshot its name, and copies its notes.
    fn publish(
        &self,
        planned: &Planned,
        snapshot: &Snapshot,
        object: Unnamed,
    ) -> Result<Published> {
        self.notes().before(planned, snapshot)?;
        let published = object.complete()?;
        if published != Published::Taken {
            self.notes().after(planned, snapshot)?;
        }
        Ok(published)
    }

    fn is_verbatim(&self, snapshot: &Snapshot) -> bool {
        self.options.selection.form.is_verbatim(&snapshot.name)
    }

    /// Records the result of a snapshot, and whether the round has to end.
    fn set_result(&self, state: &mut RoundState, i: usize, result: CopyResult) {
        match &result {
            CopyResult::Failed(e) => {
                let (_, snapshot) = self.planned(i);
                if e.reason() != Reason::Terminated {
                    tracing::warn!(
                        snapshot = %snapshot.name,
                        reason = e.reason().as_str(),
                        "a snapshot was not copied: {e}"
                    );
                }
                let concerns_data = e.reason().is_bad_data()
                    || matches!(e.reason(), Reason::SnapshotVanished | Reason::TargetExists);
                state.failures += u32::from(!concerns_data);
                let ends_round = matches!(
                    e.reason(),
                    Reason::Terminated | Reason::NoSpace | Reason::Unauthenticated
                );
                state.has_ended |= ends_round || state.failures >= MOST_FAILURES;
            }
            CopyResult::Copied { bytes, .. } => {
                state.failures = 0;
                tracing::info!(snapshot = %self.planned(i).0.name, bytes, "copied a snapshot");
            }
            _ => state.failures = 0,
        }
        state.results[i] = Some(result);
        self.settle(state);
    }

    /// Goes past the snapshots that have results. A base comes before what follows it.
    fn settle(&self, state: &mut RoundState) {
        while let Some(&i) = state.copies.get(state.done)
            && let Some(result) = &state.results[i]
        {
            let (_, Snapshot { name, excluded, .. }) = self.planned(i);
            if result.is_in_target() && !excluded && is_based(name, &state.there) {
                state.there.insert(name.last);
            }
            state.done += 1;
        }
    }
}

/// Turns a panic into the failure of one snapshot: otherwise the other threads would wait for the dead
/// one.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::internal("the copy of a snapshot panicked")))
}
