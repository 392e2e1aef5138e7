//! One round of a copy: transfers several snapshots at the same time, and gives each its name once a
//! snapshot that it follows has its own.
//!
//! In an object store, the deltas of a large plan are named concurrently as soon as their full has its
//! name: they are begun in order, a few at once. In a folder, one sync makes many names durable. A
//! failure affects only the snapshots that depend on it, but a store that cannot be reached ends the
//! round. `plan` has decided what is copied. Called by `ops::copy::copier`.

use super::Options;
use super::notes::Notes;
use super::plan::{Decision, Need, Plan, Planned};
use super::transfer::{SMALL, Transferred, transfer};
use crate::backup::{Catalog, Snapshot};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::ops::Context;
use crate::store::{Published, Store};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};

/// The most transferred snapshots that wait for their names; more if more are under way.
const MOST_WAITING: usize = 16;
/// Small snapshots that are copied between folders at the same time, unless `--parallel` is 1, or
/// larger.
const SYNCED_AT_ONCE: usize = 8;
/// The most names in a folder that one sync makes durable.
const MOST_NAMED: usize = 128;
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
    /// The next snapshot to transfer, as an index in the order of copying.
    next: usize,
    /// Transferred snapshots that wait for their names. All indexes from here on are indexes in the
    /// plan.
    waiting: BTreeMap<usize, Transferred>,
    /// Snapshots that are being named.
    naming: BTreeSet<usize>,
    /// Snapshots with names in a folder that was not synced since, and their results once it is.
    named: BTreeMap<usize, CopyResult>,
    /// Whether a worker is syncing the folder.
    is_syncing: bool,
    /// Large snapshots under way, from the start of their transfer until they have a result.
    large: BTreeSet<usize>,
    /// The results so far.
    results: BTreeMap<usize, CopyResult>,
    /// Snapshots that are in the target before what they follow: that is still being named, or follows
    /// something that is.
    unsettled: BTreeSet<usize>,
    /// Snapshots in the target, or being named, whose predecessors could not be copied.
    broken: BTreeSet<usize>,
    /// Consecutive failures that are not about the data.
    failures: u32,
    /// Whether the round ends early.
    has_ended: bool,
}

impl RoundState {
    /// Returns whether a snapshot is in the target, with nothing known to be missing before it.
    fn is_sound(&self, i: usize) -> bool {
        self.results.get(&i).is_some_and(CopyResult::is_in_target) && !self.broken.contains(&i)
    }
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
        let mut state = RoundState::default();
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
        let _kept_folder = self.to.store.keep_staging_folder();
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

    /// Returns whether memory allows a snapshot to be begun while others are under way.
    fn has_room(&self, state: &RoundState, i: usize) -> bool {
        !self.is_large(i) || state.large.len() < self.options.parallel.max(1)
    }

    /// Returns whether a snapshot takes much memory.
    fn is_large(&self, i: usize) -> bool {
        self.planned(i).1.bytes >= SMALL
    }

    /// Works until the round ends: names what can be named, transfers what comes next, and syncs the
    /// folder.
    fn work(&self, order: &[usize], shared: &(Mutex<RoundState>, Condvar)) {
        let (mutex, changed) = shared;
        let lock = || lock(mutex);
        let mut state: MutexGuard<'_, RoundState> = lock();
        loop {
            self.settle(&mut state);
            let ends = state.has_ended || state.results.len() == order.len();
            if ends && state.named.is_empty() {
                changed.notify_all();
                return;
            }
            let may_sync = !state.is_syncing && !state.named.is_empty();
            if may_sync && (ends || state.named.len() >= MOST_NAMED) {
                state = self.sync(state, lock);
            } else if !ends && let Some((i, transferred)) = self.take_ready(&mut state) {
                drop(state);
                let result =
                    guarded(|| Ok(self.name(i, &transferred))).unwrap_or_else(CopyResult::Failed);
                drop(transferred);
                state = lock();
                state.naming.remove(&i);
                let is_folder = self.to.store.requests().is_none();
                if is_folder && result.is_in_target() {
                    state.named.insert(i, result);
                } else {
                    self.set_result(&mut state, i, result);
                }
            } else if !ends
                && let Some(&i) = order.get(state.next)
                && state.waiting.len() < MOST_WAITING.max(self.workers())
                && self.has_room(&state, i)
            {
                state.next += 1;
                if state.results.contains_key(&i) {
                    continue;
                }
                if self.is_lost(&state, i) {
                    state.results.insert(i, CopyResult::NoBase);
                    continue;
                }
                if self.is_large(i) {
                    state.large.insert(i);
                }
                drop(state);
                let transferred = guarded(|| self.transfer(i));
                state = lock();
                match transferred {
                    Ok(t) => {
                        state.waiting.insert(i, t);
                    }
                    Err(e) => self.set_result(&mut state, i, CopyResult::Failed(e)),
                }
            } else if may_sync {
                state = self.sync(state, lock);
            } else {
                state = unpoisoned(changed.wait(state));
                continue;
            }
            changed.notify_all();
        }
    }

    /// Makes the names durable that were given so far. Only then are the snapshots reported as copied.
    fn sync<'s>(
        &self,
        mut state: MutexGuard<'s, RoundState>,
        lock: impl Fn() -> MutexGuard<'s, RoundState>,
    ) -> MutexGuard<'s, RoundState> {
        let batch: Vec<usize> = state.named.keys().copied().collect();
        state.is_syncing = true;
        drop(state);
        let paths = batch.iter().map(|&i| self.plan.objects[i].path.as_str());
        let synced = guarded(|| self.to.store.sync_names(paths));
        let mut state = lock();
        state.is_syncing = false;
        for i in batch {
            let Some(named) = state.named.remove(&i) else {
                continue;
            };
            let result = match &synced {
                Ok(()) => named,
                Err(e) => CopyResult::Failed(e.again()),
            };
            self.set_result(&mut state, i, result);
        }
        state
    }

    fn planned(&self, i: usize) -> (&Planned, &Snapshot) {
        let planned = &self.plan.objects[i];
        (planned, &self.source.snapshots[planned.source])
    }

    /// Gives a result to waiting snapshots that can never be named, and updates `unsettled` and
    /// `broken`. A plan has each snapshot after those that it follows, so one pass settles whole
    /// chains.
    fn settle(&self, state: &mut RoundState) {
        let unsettled: Vec<usize> = state.unsettled.union(&state.naming).copied().collect();
        for i in unsettled {
            let needs = &self.plan.objects[i].needs;
            if needs.is_empty() || needs.iter().any(|n| is_met(state, n)) {
                state.unsettled.remove(&i);
            } else if !needs.iter().any(|n| may_be_met(state, n)) {
                state.unsettled.remove(&i);
                state.broken.insert(i);
            }
        }
        let waiting: Vec<usize> = state.waiting.keys().copied().collect();
        for i in waiting {
            if self.is_lost(state, i) {
                state.waiting.remove(&i);
                state.large.remove(&i);
                state.results.insert(i, CopyResult::NoBase);
            }
        }
    }

    /// Takes the first snapshot of the plan that can be named now.
    fn take_ready(&self, state: &mut RoundState) -> Option<(usize, Transferred)> {
        let is_concurrent = self.to.store.requests().is_some() && self.plan.is_large();
        // If the run is killed, at most this many names lack the one before them.
        let is_limit_reached = state.naming.len() + state.unsettled.len() >= self.workers();
        let may_name_after = |i: usize, need: &Need| match need {
            Need::InTarget => !(is_concurrent && is_limit_reached),
            Need::Planned(j) if is_concurrent => {
                !is_limit_reached && (state.is_sound(*j) || self.is_delta_being_named(state, *j))
            }
            Need::Planned(j) => state.is_sound(*j) || self.is_named_beside(state, *j, i),
        };
        let mut waiting = state.waiting.keys().copied();
        let ready = waiting.find(|&i| {
            let needs = &self.plan.objects[i].needs;
            needs.is_empty() || needs.iter().any(|n| may_name_after(i, n))
        })?;
        state.naming.insert(ready);
        Some((ready, state.waiting.remove(&ready)?))
    }

    /// Returns whether a delta is being named. If it is, its full is in the target: the name of a delta
    /// is begun only after that of a full that is there, or of a delta for which this holds.
    fn is_delta_being_named(&self, state: &RoundState, i: usize) -> bool {
        let is_being_named = state.naming.contains(&i) && !state.broken.contains(&i);
        is_being_named && !self.planned(i).1.name.is_full()
    }

    /// Returns whether a snapshot has a name in the same folder as `other`. Folders keep the order of
    /// names, so the name of `other` cannot become durable without it.
    fn is_named_beside(&self, state: &RoundState, i: usize, other: usize) -> bool {
        let folder = |i: usize| self.plan.objects[i].path.rsplit_once('/').map(|(f, _)| f);
        state.named.contains_key(&i) && folder(i) == folder(other)
    }

    /// Returns whether none of the snapshots that this one follows can come to the target any more.
    fn is_lost(&self, state: &RoundState, i: usize) -> bool {
        let needs = &self.plan.objects[i].needs;
        let is_lost = |n: &Need| match n {
            Need::InTarget => false,
            Need::Planned(j) => state.results.contains_key(j) && !state.is_sound(*j),
        };
        !needs.is_empty() && needs.iter().all(is_lost)
    }

    fn transfer(&self, i: usize) -> Result<Transferred> {
        let (planned, snapshot) = self.planned(i);
        let threads = match snapshot.bytes < LARGE {
            true => 1,
            false => self.to.threads,
        };
        let form = &self.options.selection.form;
        transfer(self.from, self.to, form, snapshot, &planned.name, threads)
    }

    /// Publishes a transferred snapshot, and returns the result.
    fn name(&self, i: usize, transferred: &Transferred) -> CopyResult {
        let (planned, snapshot) = self.planned(i);
        match self.publish(planned, snapshot, transferred) {
            Ok(Published::Created) => CopyResult::Copied {
                bytes: transferred.staged.bytes(),
                is_checked: transferred.is_checked,
            },
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
        transferred: &Transferred,
    ) -> Result<Published> {
        self.notes().before(planned, snapshot)?;
        let published = transferred.staged.name(&planned.path)?;
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
        if result.is_in_target() && !self.plan.objects[i].needs.is_empty() {
            state.unsettled.insert(i);
        }
        state.large.remove(&i);
        state.results.insert(i, result);
    }
}

/// Returns whether a snapshot with this need has all that it needs in the target.
fn is_met(state: &RoundState, need: &Need) -> bool {
    match need {
        Need::InTarget => true,
        Need::Planned(i) => state.is_sound(*i) && !state.unsettled.contains(i),
    }
}

/// Returns whether the need of a snapshot that is named already is met, or may still be.
fn may_be_met(state: &RoundState, need: &Need) -> bool {
    match need {
        Need::InTarget => true,
        Need::Planned(i) => {
            let is_under_way = state.naming.contains(i) || state.named.contains_key(i);
            state.is_sound(*i) || is_under_way && !state.broken.contains(i)
        }
    }
}

/// Turns a panic into the failure of one snapshot: otherwise the other threads would wait for the dead
/// one.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::internal("the copy of a snapshot panicked")))
}
