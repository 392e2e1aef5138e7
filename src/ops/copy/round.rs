//! One round of a copy: transfers several snapshots at the same time, and gives them their names in the order of the
//! plan.
//!
//! Blocking work runs on threads of the runtime, and one loop has all decisions. In an object store, the names of a
//! large plan are given concurrently: one after the other would take hours. A failure affects only the snapshots that
//! depend on it, but a store that cannot be reached ends the round. `plan` has decided what is copied.

use super::notes::Notes;
use super::plan::{Decision, Plan, Planned, is_based};
use super::transfer::{Transferred, has_same_content, transfer};
use super::{Listings, Options};
use crate::backup::Snapshot;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::prefix::Context;
use crate::store::{Published, Store};
use crate::telemetry::memory::give_back_free_pages;
use futures::StreamExt;
use futures::stream::FuturesOrdered;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Small snapshots that are copied between folders at the same time, unless `--parallel` is 1, or
/// larger.
const SYNCED_AT_ONCE: usize = 8;
/// The most snapshots that are copied at the same time. The runtime has 512 threads for blocking work, and needs some
/// to look up the addresses of stores.
const MOST_AT_ONCE: usize = 256;
/// A round that copies more snapshots is large.
const FEW: usize = 32;
/// After this many consecutive failures that are not about the data, the store itself is in trouble.
const MOST_FAILURES: u32 = 3;
/// After so many snapshots, free pages go back to the system: glibc rarely reuses the aligned blocks that gunzip takes.
const MANY: usize = 512;
/// Smaller snapshots take little memory.
const SMALL: u64 = 1 << 20;

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

/// A round: what is copied, and from where to where. Snapshots are meant by their index in the plan.
pub(super) struct Round {
    pub(super) from: Context,
    pub(super) to: Context,
    pub(super) options: Options,
    /// What both stores held before the round.
    pub(super) listings: Listings,
    pub(super) plan: Plan,
}

impl Round {
    /// Carries out the plan. `damaged` has the snapshots that earlier rounds found damaged: size and error by path in
    /// the source. Returns the result of each snapshot that was to be copied, by index in the plan; `None` for the
    /// others.
    ///
    /// # Errors
    /// Fails if the notes cannot be copied that the target needs before any snapshot, or about a snapshot that it
    /// already has.
    pub(super) fn run(
        self: &Arc<Self>,
        damaged: &HashMap<String, (u64, Error)>,
    ) -> Result<Vec<Option<CopyResult>>> {
        self.notes().copy_missing(&self.listings, &self.plan)?;
        let mut progress = Progress::new(self);
        // A damaged snapshot is not fetched in every round.
        for i in self.plan.copies() {
            let (_, snapshot) = self.planned(i);
            if let Some((bytes, e)) = damaged.get(&snapshot.path)
                && *bytes == snapshot.bytes
            {
                progress.results[i] = Some(CopyResult::Failed(e.again()));
            }
        }
        let copy = self.copy_all(&mut progress);
        self.to.store.handle().block_on(copy);
        Ok(progress.results)
    }

    /// Copies what has no result yet.
    async fn copy_all(self: &Arc<Self>, progress: &mut Progress<'_>) {
        let copies = self.plan.copies();
        let at_once = self.at_once();
        let is_concurrent = self.to.store.requests().is_some() && copies.len() > FEW;
        // A kill leaves a gap among these names at most.
        let named_at_once = if is_concurrent { at_once } else { 1 };
        let mut waiting = copies.into_iter().peekable();
        let mut transfers = FuturesOrdered::new();
        let mut names = FuturesOrdered::new();
        loop {
            while transfers.len() + names.len() < at_once
                && let Some(i) = waiting.next_if(|&i| progress.has_room(i))
            {
                if progress.begin(i) {
                    transfers.push_back(self.on_thread(i, move |round| round.transfer(i)));
                }
            }
            tokio::select! {
                biased;
                Some((i, named)) = names.next() => progress.record_named(i, named),
                Some((i, transferred)) = transfers.next() => match transferred {
                    Ok(transferred) => {
                        while (names.len() >= named_at_once || progress.is_full_under_way(i))
                            && let Some((named, result)) = names.next().await
                        {
                            progress.record_named(named, result);
                        }
                        let refusal = progress.refusal(i);
                        // A refused upload is removed by the thread, too.
                        names.push_back(self.on_thread(i, move |round| match refusal {
                            Some(refusal) => Ok(refusal),
                            None => round.name(i, transferred),
                        }));
                    }
                    Err(e) => progress.record(i, CopyResult::Failed(e)),
                },
                else => break,
            }
        }
        for i in waiting {
            progress.results[i].get_or_insert(CopyResult::NotTried);
        }
    }

    /// Starts blocking work about a snapshot. A panic is the failure of this snapshot.
    fn on_thread<T: Send + 'static>(
        self: &Arc<Self>,
        i: usize,
        work: impl FnOnce(&Round) -> Result<T> + Send + 'static,
    ) -> impl Future<Output = (usize, Result<T>)> {
        let round = Arc::clone(self);
        let task = self.to.store.handle().spawn_blocking(move || work(&round));
        async move {
            let panicked = |_| Err(Error::internal("the copy of a snapshot panicked"));
            (i, task.await.unwrap_or_else(panicked))
        }
    }

    fn notes(&self) -> Notes<'_> {
        let (from, to) = (&self.from.store, &self.to.store);
        Notes { from, to }
    }

    /// Returns how many snapshots are copied at the same time. Small ones spend most of their time
    /// waiting: for a slow store, or for a disk that syncs several files as fast as one.
    fn at_once(&self) -> usize {
        let stores = [&self.from.store, &self.to.store];
        let requests = stores.into_iter().filter_map(Store::requests).max();
        let synced = match self.options.parallel {
            0 | 1 => 1,
            _ => SYNCED_AT_ONCE,
        };
        let at_once = requests.unwrap_or(synced).max(self.options.parallel);
        at_once.clamp(1, MOST_AT_ONCE)
    }

    fn planned(&self, i: usize) -> (&Planned, &Snapshot) {
        let planned = &self.plan.objects[i];
        (planned, &self.listings.source.snapshots[planned.source])
    }

    fn transfer(&self, i: usize) -> Result<Transferred> {
        if (i + 1).is_multiple_of(MANY) {
            give_back_free_pages();
        }
        let (planned, snapshot) = self.planned(i);
        let encryption = self.options.selection.encryption;
        transfer(&self.from, &self.to, encryption, snapshot, planned)
    }

    /// Gives a transferred snapshot its name, copies its notes, and returns the result.
    fn name(&self, i: usize, transferred: Transferred) -> Result<CopyResult> {
        let (planned, snapshot) = self.planned(i);
        let Transferred { object, is_checked } = transferred;
        let bytes = object.bytes();
        self.notes().before(planned, snapshot)?;
        let result = match object.complete()? {
            Published::Created => CopyResult::Copied { bytes, is_checked },
            Published::Identical => CopyResult::AlreadyThere,
            Published::Taken => {
                let encryption = self.options.selection.encryption;
                if !has_same_content(&self.from, &self.to, encryption, snapshot, planned)? {
                    let name = self.to.store.name(&planned.path);
                    return Err(super::failures::conflict(&name));
                }
                CopyResult::AlreadyThere
            }
        };
        self.notes().after(planned, snapshot)?;
        Ok(result)
    }
}

/// The results of a round so far, and what follows from them.
struct Progress<'a> {
    round: &'a Round,
    results: Vec<Option<CopyResult>>,
    /// The end of the snapshots that were begun.
    begun: usize,
    /// The last revisions of usable snapshots that are copied, or will be if nothing under way fails.
    expected: BTreeSet<Revision>,
    /// The large snapshots under way.
    large: BTreeSet<usize>,
    /// Consecutive failures that are not about the data.
    failures: u32,
    /// Whether the round ends early.
    has_ended: bool,
}

impl<'a> Progress<'a> {
    fn new(round: &'a Round) -> Self {
        Progress {
            round,
            results: round.plan.objects.iter().map(|_| None).collect(),
            begun: 0,
            expected: BTreeSet::new(),
            large: BTreeSet::new(),
            failures: 0,
            has_ended: false,
        }
    }

    fn is_large(&self, i: usize) -> bool {
        self.round.planned(i).1.bytes >= SMALL
    }

    /// Returns whether another snapshot may be begun beside those under way.
    fn has_room(&self, i: usize) -> bool {
        let parallel = self.round.options.parallel.max(1);
        !self.has_ended && (self.large.len() < parallel || !self.is_large(i))
    }

    /// Begins a snapshot. Returns whether it is to be transferred.
    fn begin(&mut self, i: usize) -> bool {
        self.begun = i + 1;
        if self.results[i].is_some() {
            return false;
        }
        if let Some(refusal) = self.refusal(i) {
            self.record(i, refusal);
            return false;
        }
        self.expect(i);
        if self.is_large(i) {
            self.large.insert(i);
        }
        true
    }

    /// Adds a snapshot to the expected ones, unless it has failed or has no base.
    fn expect(&mut self, i: usize) {
        let (planned, snapshot) = self.round.planned(i);
        let result = self.results[i].as_ref();
        if planned.decision == Decision::Copy
            && !snapshot.excluded
            && result.is_none_or(CopyResult::is_in_target)
            && self.has_base(i)
        {
            self.expected.insert(snapshot.name.last);
        }
    }

    /// Returns whether the full of a delta has no result yet.
    fn is_full_under_way(&self, i: usize) -> bool {
        let full = self.round.plan.objects[i].full;
        full.is_some_and(|full| self.results[full].is_none())
    }

    /// Returns whether the target has what a snapshot follows, or will have it if nothing under way fails.
    fn has_base(&self, i: usize) -> bool {
        let (planned, snapshot) = self.round.planned(i);
        if snapshot.name.is_full() || snapshot.excluded {
            return true;
        }
        // A delta needs the full of its backup: another history may have the same revisions.
        let full = planned.full.and_then(|full| self.results[full].as_ref());
        full.is_none_or(CopyResult::is_in_target)
            && [&self.round.plan.there, &self.expected]
                .into_iter()
                .any(|there| is_based(&snapshot.name, there))
    }

    /// Returns the result of a snapshot that must not be copied now.
    fn refusal(&self, i: usize) -> Option<CopyResult> {
        if self.has_ended {
            return Some(CopyResult::NotTried);
        }
        (!self.has_base(i)).then_some(CopyResult::NoBase)
    }

    fn record_named(&mut self, i: usize, named: Result<CopyResult>) {
        self.record(i, named.unwrap_or_else(CopyResult::Failed));
    }

    /// Records the result of a snapshot, and whether the round has to end.
    fn record(&mut self, i: usize, result: CopyResult) {
        let (planned, snapshot) = self.round.planned(i);
        match &result {
            CopyResult::Failed(e) => {
                if e.reason() != Reason::Terminated && !e.is_of_excluded() {
                    tracing::warn!(
                        snapshot = %snapshot.name,
                        reason = e.reason().as_str(),
                        "a snapshot was not copied: {e}"
                    );
                }
                let concerns_data = e.reason().is_bad_data()
                    || matches!(e.reason(), Reason::SnapshotVanished | Reason::TargetExists);
                self.failures += u32::from(!concerns_data);
                let ends_round = matches!(
                    e.reason(),
                    Reason::Terminated | Reason::NoSpace | Reason::Unauthenticated
                );
                self.has_ended |= ends_round || self.failures >= MOST_FAILURES;
            }
            CopyResult::Copied { bytes, .. } => {
                self.failures = 0;
                tracing::info!(snapshot = %planned.name, bytes, "copied a snapshot");
            }
            _ => self.failures = 0,
        }
        self.large.remove(&i);
        let is_in_target = result.is_in_target();
        self.results[i] = Some(result);
        if !is_in_target {
            self.expect_again(snapshot.name.last);
        }
    }

    /// Finds out anew what is expected from a revision on: something failed there.
    fn expect_again(&mut self, revision: Revision) {
        self.expected.split_off(&revision);
        let objects = &self.round.plan.objects;
        let first = objects.partition_point(|p| p.name.last < revision);
        for i in first..self.begun {
            self.expect(i);
        }
    }
}
