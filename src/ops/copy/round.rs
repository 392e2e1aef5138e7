//! Carries out a plan once: several snapshots are transferred at the same time, and each is named when
//! something that it follows has its name.
//!
//! In an object store, deltas of a large plan are named side by side as soon as their full is there: their names are
//! begun in order, a few at once. In a folder one sync makes many names last.
//!
//! What is to be done `plan` has decided. A failure ends what follows from it, and nothing else; a store
//! that is away ends the round. `super` calls it.

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

/// Transferred snapshots that wait for their names, at most; more if more are under way.
const MOST_WAITING: usize = 16;
/// Small snapshots under way at once between folders, unless `--parallel` is one, or more than this.
const SYNCED_AT_ONCE: usize = 8;
/// Names in a folder that one sync makes last, at most.
const MOST_NAMED: usize = 128;
/// So many failures one after the other that are not of the data: the store itself is in trouble.
const MOST_FAILURES: u32 = 3;
/// A snapshot of fewer bytes is compressed by one thread.
const LARGE: u64 = 64 << 20;

/// What became of a snapshot that was to be copied.
#[derive(Debug)]
pub(super) enum Done {
    /// It is in the target now; bytes written, and whether its content was checked.
    Copied(u64, bool),
    /// Somebody else has put it there meanwhile.
    There,
    /// What it follows could not be copied.
    NoBase,
    /// It failed.
    Failed(Error),
    /// The round ended before.
    NotTried,
}

impl Done {
    fn is_there(&self) -> bool {
        matches!(self, Done::Copied(..) | Done::There)
    }
}

/// A round's means.
pub(super) struct Round<'a> {
    pub(super) from: &'a Context,
    pub(super) to: &'a Context,
    pub(super) options: &'a Options,
    pub(super) source: &'a Catalog,
    pub(super) plan: &'a Plan,
    /// What the target has already.
    pub(super) target: &'a Catalog,
    /// What was found to be damaged before: the sizes by path.
    pub(super) damaged: &'a HashMap<String, (u64, Error)>,
}

#[derive(Default)]
struct State {
    /// The next to begin: an index in `order`.
    next: usize,
    /// By index in the plan; under way is what is in none of these.
    waiting: BTreeMap<usize, Transferred>,
    naming: BTreeSet<usize>,
    /// They have names in a folder that was not synced since; what becomes of them when it is.
    named: BTreeMap<usize, Done>,
    /// Somebody syncs that folder.
    is_syncing: bool,
    /// Those that take much memory, from their beginning until they are done.
    large: BTreeSet<usize>,
    done: BTreeMap<usize, Done>,
    /// Of those that are there: what they follow is still being named, or such a one leads to it.
    open: BTreeSet<usize>,
    /// Of those that are there or being named: what they follow could not be copied.
    broken: BTreeSet<usize>,
    failures: u32,
    /// The round ends.
    ended: bool,
}

impl State {
    /// Whether it is in the target, and nothing is known to be missing before it.
    fn is_sound(&self, i: usize) -> bool {
        self.done.get(&i).is_some_and(Done::is_there) && !self.broken.contains(&i)
    }
}

impl Round<'_> {
    /// Carries the plan out. Gives what became of all that was to be copied, by index in the plan, and
    /// what went wrong beside it.
    ///
    /// # Errors
    /// Those of notes on snapshots that the target has already.
    pub(super) fn run(&self) -> Result<BTreeMap<usize, Done>> {
        let objects = &self.plan.objects;
        for p in objects.iter().filter(|p| p.decision == Decision::Keep) {
            self.keep(p)?;
        }
        let order: Vec<usize> = (0..objects.len())
            .filter(|&i| objects[i].decision == Decision::Copy)
            .collect();
        let mut state = State::default();
        for &i in &order {
            let (_, snapshot) = self.planned(i);
            // It is not fetched again and again.
            if let Some((bytes, e)) = self.damaged.get(&snapshot.path)
                && *bytes == snapshot.bytes
            {
                let again = e.again();
                state.done.insert(i, Done::Failed(again));
            }
        }
        let state = (Mutex::new(state), Condvar::new());
        let _kept = self.to.store.keep_staging_folder();
        let workers = self.workers().clamp(1, order.len().max(1));
        std::thread::scope(|scope| {
            let work = || self.work(&order, &state);
            for n in 0..workers {
                let worker = std::thread::Builder::new().spawn_scoped(scope, work);
                // If the system has no thread left, fewer do it.
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
            state.done.entry(i).or_insert(Done::NotTried);
        }
        Ok(state.done)
    }

    fn notes(&self) -> Notes<'_> {
        let (from, to) = (&self.from.store, &self.to.store);
        Notes { from, to }
    }

    /// Carries the notes on a full that the target has already.
    fn keep(&self, planned: &Planned) -> Result<()> {
        let snapshot = &self.source.snapshots[planned.source];
        if !(snapshot.begins_timeline || snapshot.pinned) {
            return Ok(());
        }
        let mut there = self.target.snapshots.iter();
        match there.find(|t| t.path == planned.path) {
            Some(there) => self.notes().keep(planned, snapshot, there),
            None => Ok(()),
        }
    }

    /// How many snapshots are under way at once. Small ones wait most of the time: for a slow store, or for a disk that
    /// syncs several files as fast as one.
    fn workers(&self) -> usize {
        let stores = [&self.from.store, &self.to.store];
        let requests = stores.into_iter().filter_map(Store::requests).max();
        let synced = match self.options.parallel {
            0 | 1 => 1,
            _ => SYNCED_AT_ONCE,
        };
        requests.unwrap_or(synced).max(self.options.parallel)
    }

    /// Whether one may begin beside those that are under way.
    fn has_room(&self, state: &State, i: usize) -> bool {
        !self.is_large(i) || state.large.len() < self.options.parallel.max(1)
    }

    /// Whether one takes much memory.
    fn is_large(&self, i: usize) -> bool {
        self.planned(i).1.bytes >= SMALL
    }

    fn work(&self, order: &[usize], shared: &(Mutex<State>, Condvar)) {
        let (mutex, changed) = shared;
        let lock = || lock(mutex);
        let mut state: MutexGuard<'_, State> = lock();
        loop {
            self.settle(&mut state);
            let ends = state.ended || state.done.len() == order.len();
            if ends && state.named.is_empty() {
                changed.notify_all();
                return;
            }
            let may_sync = !state.is_syncing && !state.named.is_empty();
            if may_sync && (ends || state.named.len() >= MOST_NAMED) {
                state = self.sync(state, lock);
            } else if !ends && let Some((i, transferred)) = self.take_ready(&mut state) {
                drop(state);
                let done = guarded(|| Ok(self.name(i, &transferred))).unwrap_or_else(Done::Failed);
                drop(transferred);
                state = lock();
                state.naming.remove(&i);
                match self.to.store.requests() {
                    None if done.is_there() => drop(state.named.insert(i, done)),
                    _ => self.note(&mut state, i, done),
                }
            } else if !ends
                && let Some(&i) = order.get(state.next)
                && state.waiting.len() < MOST_WAITING.max(self.workers())
                && self.has_room(&state, i)
            {
                state.next += 1;
                if state.done.contains_key(&i) {
                    continue;
                }
                if self.is_lost(&state, i) {
                    state.done.insert(i, Done::NoBase);
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
                    Err(e) => self.note(&mut state, i, Done::Failed(e)),
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

    /// Makes the names last that were given until now: only then are they said to be copied.
    fn sync<'s>(
        &self,
        mut state: MutexGuard<'s, State>,
        lock: impl Fn() -> MutexGuard<'s, State>,
    ) -> MutexGuard<'s, State> {
        let batch: Vec<usize> = state.named.keys().copied().collect();
        state.is_syncing = true;
        drop(state);
        let paths = batch.iter().map(|&i| self.plan.objects[i].path.as_str());
        let synced = guarded(|| self.to.store.sync_names(paths));
        let mut state = lock();
        state.is_syncing = false;
        for i in batch {
            let Some(done) = state.named.remove(&i) else {
                continue;
            };
            let done = match &synced {
                Ok(()) => done,
                Err(e) => Done::Failed(e.again()),
            };
            self.note(&mut state, i, done);
        }
        state
    }

    fn planned(&self, i: usize) -> (&Planned, &Snapshot) {
        let planned = &self.plan.objects[i];
        (planned, &self.source.snapshots[planned.source])
    }

    /// Settles those that wait and can never be named, and those that are there, or being named, before what they follow.
    /// What one follows is before it in the plan, so a whole chain goes at once: nobody would come back for its end.
    fn settle(&self, state: &mut State) {
        let unsettled: Vec<usize> = state.open.union(&state.naming).copied().collect();
        for i in unsettled {
            let needs = &self.plan.objects[i].needs;
            let holds = |n: &Need| match n {
                Need::InTarget => true,
                Need::Planned(j) => state.is_sound(*j) && !state.open.contains(j),
            };
            let may_come = |n: &Need| match n {
                Need::InTarget => true,
                Need::Planned(j) => {
                    let is_under_way = state.naming.contains(j) || state.named.contains_key(j);
                    state.is_sound(*j) || is_under_way && !state.broken.contains(j)
                }
            };
            if needs.is_empty() || needs.iter().any(holds) {
                state.open.remove(&i);
            } else if !needs.iter().any(may_come) {
                state.open.remove(&i);
                state.broken.insert(i);
            }
        }
        let waiting: Vec<usize> = state.waiting.keys().copied().collect();
        for i in waiting {
            if self.is_lost(state, i) {
                state.waiting.remove(&i);
                state.large.remove(&i);
                state.done.insert(i, Done::NoBase);
            }
        }
    }

    /// Takes one that can be named now: the first in the plan.
    fn take_ready(&self, state: &mut State) -> Option<(usize, Transferred)> {
        // A run that is killed leaves a gap among so many names at most.
        let is_full = state.naming.len() + state.open.len() >= self.workers();
        let side_by_side = self.to.store.requests().is_some() && self.plan.is_large();
        let ready = state.waiting.keys().copied().find(|&i| {
            let needs = &self.plan.objects[i].needs;
            let may_follow = |n: &Need| match n {
                Need::InTarget => !(side_by_side && is_full),
                Need::Planned(j) if side_by_side => {
                    !is_full && (state.is_sound(*j) || self.is_delta_being_named(state, *j))
                }
                Need::Planned(j) => state.is_sound(*j) || self.is_named_beside(state, *j, i),
            };
            needs.is_empty() || needs.iter().any(may_follow)
        })?;
        state.naming.insert(ready);
        Some((ready, state.waiting.remove(&ready)?))
    }

    /// Whether a delta is being named. Its full is in the target then: the name of a delta is begun behind that of a full
    /// that is there, or behind that of a delta for which this holds.
    fn is_delta_being_named(&self, state: &State, i: usize) -> bool {
        let holds = state.naming.contains(&i) && !state.broken.contains(&i);
        holds && !self.planned(i).1.name.is_full()
    }

    /// Whether it has a name in the same folder as another one, whose name then cannot last without it: a folder keeps the
    /// order of its names.
    fn is_named_beside(&self, state: &State, i: usize, other: usize) -> bool {
        let folder = |i: usize| self.plan.objects[i].path.rsplit_once('/').map(|(f, _)| f);
        state.named.contains_key(&i) && folder(i) == folder(other)
    }

    /// Whether nothing that it follows can be in the target any more.
    fn is_lost(&self, state: &State, i: usize) -> bool {
        let needs = &self.plan.objects[i].needs;
        let is_lost = |n: &Need| match n {
            Need::InTarget => false,
            Need::Planned(j) => state.done.contains_key(j) && !state.is_sound(*j),
        };
        !needs.is_empty() && needs.iter().all(is_lost)
    }

    fn transfer(&self, i: usize) -> Result<Transferred> {
        let (planned, snapshot) = self.planned(i);
        let threads = match snapshot.bytes < LARGE {
            true => 1,
            false => self.to.threads,
        };
        let form = &self.options.wanted.form;
        transfer(self.from, self.to, form, snapshot, &planned.name, threads)
    }

    fn name(&self, i: usize, transferred: &Transferred) -> Done {
        let (planned, snapshot) = self.planned(i);
        let named = || {
            self.notes().before(planned, snapshot)?;
            let published = transferred.staged.name(&planned.path)?;
            if published != Published::Taken {
                self.notes().after(planned, snapshot)?;
            }
            Ok(published)
        };
        match named() {
            Ok(Published::Created) => Done::Copied(transferred.staged.bytes(), transferred.checked),
            Ok(Published::Identical) => Done::There,
            // Encrypted twice, the same content has other bytes.
            Ok(Published::Taken) if planned.name.is_encrypted && !self.is_verbatim(snapshot) => {
                Done::There
            }
            Ok(Published::Taken) => {
                Done::Failed(super::conflict(&self.to.store.name(&planned.path)))
            }
            Err(e) => Done::Failed(e),
        }
    }

    fn is_verbatim(&self, snapshot: &Snapshot) -> bool {
        self.options.wanted.form.is_verbatim(&snapshot.name)
    }

    fn note(&self, state: &mut State, i: usize, done: Done) {
        match &done {
            Done::Failed(e) => {
                let (_, snapshot) = self.planned(i);
                if e.reason() != Reason::Terminated {
                    tracing::warn!(
                        snapshot = %snapshot.name,
                        reason = e.reason().as_str(),
                        "not copied: {e}"
                    );
                }
                let of_the_data = e.reason().is_bad_data()
                    || matches!(e.reason(), Reason::SnapshotVanished | Reason::TargetExists);
                state.failures += u32::from(!of_the_data);
                let ends_all = matches!(
                    e.reason(),
                    Reason::Terminated | Reason::NoSpace | Reason::Unauthenticated
                );
                state.ended |= ends_all || state.failures >= MOST_FAILURES;
            }
            Done::Copied(bytes, _) => {
                state.failures = 0;
                tracing::info!(snapshot = %self.planned(i).0.name, bytes, "copied a snapshot");
            }
            _ => state.failures = 0,
        }
        if done.is_there() && !self.plan.objects[i].needs.is_empty() {
            state.open.insert(i);
        }
        state.large.remove(&i);
        state.done.insert(i, done);
    }
}

/// Makes a panic a failure of one snapshot: the other threads would wait for the one that died.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::internal("the copy of a snapshot panicked")))
}
