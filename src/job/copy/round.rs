//! Carries out a plan once: several snapshots are transferred at the same time, and each is named when
//! something that it follows has its name.
//!
//! What is to be done `plan` has decided. A failure ends what follows from it, and nothing else; a store
//! that is away ends the round. `super` calls it.

use super::plan::{Decision, Need, Plan, Planned};
use super::transfer::{SMALL, Transferred, transfer};
use super::{Options, notes};
use crate::bucket::{Catalog, Kind, Snapshot};
use crate::error::{Error, Reason, Result};
use crate::job::Context;
use crate::store::{Published, Store};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Transferred snapshots that wait for their names, at most; more if more are under way.
const MOST_WAITING: usize = 16;
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
    /// By index in the plan; under way is what is in none of the three.
    waiting: BTreeMap<usize, Transferred>,
    naming: BTreeSet<usize>,
    /// Those that take much memory, from their beginning until they are done.
    large: BTreeSet<usize>,
    done: BTreeMap<usize, Done>,
    failures: u32,
    /// The round ends.
    ended: bool,
}

impl Round<'_> {
    /// Carries the plan out. Gives what became of all that was to be copied, by index in the plan, and
    /// what went wrong beside it.
    ///
    /// # Errors
    /// `Terminated`; those of notes on snapshots that the target has already.
    pub(super) fn run(&self) -> Result<BTreeMap<usize, Done>> {
        let objects = &self.plan.objects;
        for p in objects.iter().filter(|p| p.decision == Decision::Keep) {
            notes::keep(self, p)?;
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
                let again = Error::new(e.reason(), e.to_string());
                state.done.insert(i, Done::Failed(again));
            }
        }
        let state = (Mutex::new(state), Condvar::new());
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
        let mut state = state.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.from.store.cancel().check()?;
        for i in order {
            state.done.entry(i).or_insert(Done::NotTried);
        }
        Ok(state.done)
    }

    /// How many snapshots are under way at once. Small ones wait most of the time, for a slow store.
    fn workers(&self) -> usize {
        let stores = [&self.from.store, &self.to.store];
        let requests = stores.into_iter().filter_map(Store::requests).max();
        requests.unwrap_or(0).max(self.options.parallel)
    }

    /// Whether one may begin beside those that are under way.
    fn has_room(&self, state: &State, i: usize) -> bool {
        let (_, snapshot) = self.planned(i);
        snapshot.bytes < SMALL || state.large.len() < self.options.parallel.max(1)
    }

    fn work(&self, order: &[usize], shared: &(Mutex<State>, Condvar)) {
        let (mutex, changed) = shared;
        let lock = || mutex.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state: MutexGuard<'_, State> = lock();
        loop {
            self.settle_lost(&mut state);
            if state.done.len() == order.len() || state.ended {
                changed.notify_all();
                return;
            }
            if let Some((i, transferred)) = self.take_ready(&mut state) {
                drop(state);
                let done = guarded(|| Ok(self.name(i, &transferred))).unwrap_or_else(Done::Failed);
                drop(transferred);
                state = lock();
                state.naming.remove(&i);
                self.note(&mut state, i, done);
            } else if let Some(&i) = order.get(state.next)
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
                if self.planned(i).1.bytes >= SMALL {
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
            } else {
                state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            changed.notify_all();
        }
    }

    fn planned(&self, i: usize) -> (&Planned, &Snapshot) {
        let planned = &self.plan.objects[i];
        (planned, &self.source.snapshots[planned.source])
    }

    /// Settles those that wait and can never be named. What one follows is before it in the plan, so a whole
    /// chain goes at once: nobody would come back for its end.
    fn settle_lost(&self, state: &mut State) {
        let waiting: Vec<usize> = state.waiting.keys().copied().collect();
        for i in waiting {
            if self.is_lost(state, i) {
                state.waiting.remove(&i);
                state.large.remove(&i);
                state.done.insert(i, Done::NoBase);
            }
        }
    }

    /// Takes one that can be named now.
    fn take_ready(&self, state: &mut State) -> Option<(usize, Transferred)> {
        let ready = state.waiting.keys().copied().find(|&i| {
            let needs = &self.plan.objects[i].needs;
            needs.is_empty() || needs.iter().any(|n| self.is_there(state, n))
        })?;
        state.naming.insert(ready);
        Some((ready, state.waiting.remove(&ready)?))
    }

    fn is_there(&self, state: &State, need: &Need) -> bool {
        match need {
            Need::InTarget => true,
            Need::Planned(i) => state.done.get(i).is_some_and(Done::is_there),
        }
    }

    /// Whether nothing that it follows can be in the target any more.
    fn is_lost(&self, state: &State, i: usize) -> bool {
        let needs = &self.plan.objects[i].needs;
        let is_settled = |n: &Need| match n {
            Need::InTarget => false,
            Need::Planned(i) => state.done.get(i).is_some_and(|d| !d.is_there()),
        };
        !needs.is_empty() && needs.iter().all(is_settled)
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
            notes::before(self, planned, snapshot)?;
            let published = transferred.staged.publish(&planned.path)?;
            if published != Published::Taken {
                notes::after(self, planned, snapshot)?;
            }
            Ok(published)
        };
        match named() {
            Ok(Published::Created) => {
                tracing::info!(
                    snapshot = %planned.name,
                    bytes = transferred.staged.bytes(),
                    "copied a snapshot"
                );
                Done::Copied(transferred.staged.bytes(), transferred.checked)
            }
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
            _ => state.failures = 0,
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

/// Whether a full's notes are of interest.
pub(super) fn is_full(snapshot: &Snapshot) -> bool {
    snapshot.name.kind == Kind::Full
}
