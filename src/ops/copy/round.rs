//! One round of a copy: transfers several snapshots at the same time in the order of the plan, and gives each its name
//! once a snapshot that it follows has its own.
//!
//! In an object store, the deltas of a large plan are named concurrently as soon as their full has its name. A failure
//! affects only the snapshots that depend on it, but a store that cannot be reached ends the round. `plan` has decided
//! what is copied. Called by `ops::copy::copier`.

use super::Options;
use super::notes::Notes;
use super::plan::{Decision, Plan, Planned, follows};
use super::transfer::{SMALL, Transferred, transfer};
use crate::backup::{Catalog, Snapshot};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::store::{Published, Store, Unnamed};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};

/// Small snapshots that are copied between folders at the same time, unless `--parallel` is 1, or
/// larger.
const SYNCED_AT_ONCE: usize = 8;
/// After this many consecutive failures that are not about the data, the store itself is in trouble.
const MOST_FAILURES: u32 = 3;
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

/// The progress of a round, which its workers share.
#[derive(Default)]
struct RoundState {
    /// The next snapshot to transfer, as an index in the order of copying. All other indexes are indexes in the plan.
    next: usize,
    /// The last revisions of usable snapshots in the target.
    there: BTreeSet<Revision>,
    /// Snapshots that are transferred or named.
    under_way: BTreeSet<usize>,
    /// Those of them that are being named. What each of them follows is in the target, or being named, too.
    naming: BTreeSet<usize>,
    /// Snapshots that have their names, but what they follow does not have its own yet.
    early: BTreeSet<usize>,
    /// Whether a name could not be given. From then on, a delta waits until what it follows has its name.
    is_in_sequence: bool,
    /// The number of large snapshots under way.
    large: usize,
    /// The results so far.
    results: BTreeMap<usize, CopyResult>,
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
    /// Carries out the plan. Returns the result of each snapshot that was to be copied, by index in the
    /// plan.
    ///
    /// # Errors
    /// Fails if the notes about a snapshot that the target already has cannot be copied.
    pub(super) fn run(&self) -> Result<BTreeMap<usize, CopyResult>> {
        let objects = &self.plan.objects;
        for p in objects.iter().filter(|p| p.decision == Decision::Keep) {
            self.copy_notes(p)?;
        }
        let order: Vec<usize> = (0..objects.len())
            .filter(|&i| objects[i].decision == Decision::Copy)
            .collect();
        let mut state = RoundState {
            there: self.plan.there.clone(),
            ..RoundState::default()
        };
        for &i in &order {
            let (_, snapshot) = self.planned(i);
            // A damaged snapshot is not fetched in every round.
            if let Some((bytes, e)) = self.damaged.get(&snapshot.path)
                && *bytes == snapshot.bytes
            {
                state.results.insert(i, CopyResult::Failed(e.again()));
            }
        }
        let state = (Mutex::new(state), Condvar::new());
        let workers = self.workers().clamp(1, order.len().max(1));
        std::thread::scope(|scope| {
            let work = || self.work(&order, &state);
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
        for i in order {
            state.results.entry(i).or_insert(CopyResult::NotTried);
        }
        Ok(state.results)
    }

    fn notes(&self) -> Notes<'_> {
        let (from, to) = (&self.from.store, &self.to.store);
        Notes { from, to }
    }

    /// Copies the notes about a full that the target already has.
    fn copy_notes(&self, planned: &Planned) -> Result<()> {
        let snapshot = &self.source.snapshots[planned.source];
        if !(snapshot.begins_timeline || snapshot.pinned) {
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
    fn work(&self, order: &[usize], shared: &(Mutex<RoundState>, Condvar)) {
        let (mutex, changed) = shared;
        let mut state = lock(mutex);
        loop {
            let Some(&i) = order.get(state.next).filter(|_| !state.has_ended) else {
                return;
            };
            if state.results.contains_key(&i) {
                state.next += 1;
                continue;
            }
            let is_large = self.is_large(i);
            if is_large && state.large >= self.options.parallel.max(1) {
                state = unpoisoned(changed.wait(state));
                continue;
            }
            state.next += 1;
            state.under_way.insert(i);
            state.large += usize::from(is_large);
            if self.readiness(&state, i) != Readiness::Never {
                drop(state);
                let transferred = guarded(|| self.transfer(i));
                state = lock(mutex);
                let result = match transferred {
                    Ok(transferred) => {
                        let (named, result) = self.name_in_order(state, shared, i, transferred);
                        state = named;
                        result
                    }
                    Err(e) => CopyResult::Failed(e),
                };
                self.set_result(&mut state, i, result);
            } else {
                self.set_result(&mut state, i, CopyResult::NoBase);
            }
            state.large -= usize::from(is_large);
            changed.notify_all();
        }
    }

    /// Waits until a snapshot may get its name, and gives it.
    fn name_in_order<'s>(
        &self,
        mut state: MutexGuard<'s, RoundState>,
        (mutex, changed): &'s (Mutex<RoundState>, Condvar),
        i: usize,
        transferred: Transferred,
    ) -> (MutexGuard<'s, RoundState>, CopyResult) {
        loop {
            if state.has_ended {
                return (state, CopyResult::NotTried);
            }
            // What is missing after a kill is never longer than the snapshots that are named at once.
            let first = state.naming.first().copied().unwrap_or(i);
            match self.readiness(&state, i) {
                Readiness::Now if i < first + self.workers() => break,
                Readiness::Now => state = unpoisoned(changed.wait(state)),
                Readiness::Later => state = unpoisoned(changed.wait(state)),
                Readiness::Never => return (state, CopyResult::NoBase),
            }
        }
        state.naming.insert(i);
        drop(state);
        // Those that follow may be named now, too.
        changed.notify_all();
        let named = guarded(|| Ok(self.name(i, transferred)));
        let mut state = lock(mutex);
        state.naming.remove(&i);
        state.is_in_sequence |= !matches!(&named, Ok(result) if result.is_in_target());
        (state, named.unwrap_or_else(CopyResult::Failed))
    }

    fn readiness(&self, state: &RoundState, i: usize) -> Readiness {
        let (planned, snapshot) = self.planned(i);
        let name = &snapshot.name;
        if name.is_full() || snapshot.excluded {
            return Readiness::Now;
        }
        // A delta needs the full of its backup: another history may have the same revisions.
        match planned.full.map(|full| state.results.get(&full)) {
            Some(Some(result)) if !result.is_in_target() => return Readiness::Never,
            Some(None) => return Readiness::Later,
            _ => {}
        }
        let bases = follows(name);
        let is_base = |j: &usize| *j < i && bases.contains(&self.planned(*j).1.name.last);
        let is_delta = |j: &&usize| !self.planned(**j).1.name.is_full();
        let is_concurrent =
            self.to.store.requests().is_some() && self.plan.is_large() && !state.is_in_sequence;
        let mut ahead = state.naming.iter().chain(&state.early).filter(is_delta);
        if state.there.range(bases.clone()).next().is_some() || is_concurrent && ahead.any(is_base)
        {
            Readiness::Now
        } else if state.under_way.iter().any(is_base) {
            Readiness::Later
        } else {
            Readiness::Never
        }
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
        let (_, snapshot) = self.planned(i);
        if result.is_in_target() && !snapshot.excluded {
            state.early.insert(i);
            // In the order of the plan, a base comes before what follows it.
            for i in std::mem::take(&mut state.early) {
                let name = &self.planned(i).1.name;
                if name.is_full() || state.there.range(follows(name)).next().is_some() {
                    state.there.insert(name.last);
                } else {
                    state.early.insert(i);
                }
            }
        }
        state.under_way.remove(&i);
        state.results.insert(i, result);
    }
}

/// Turns a panic into the failure of one snapshot: otherwise the other threads would wait for the dead
/// one.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::internal("the copy of a snapshot panicked")))
}
