//! The removal of what a plan decided: chain by chain, of each the newest deltas first and the full
//! last, many chains at once.
//!
//! A batch takes many deltas of a chain, since one request deletes up to a thousand objects, but takes
//! a full only when all deltas of its chain are gone. Before each batch the plan is made anew if it is
//! old, and only objects that both plans remove are removed. A failure stops the rest of its chain, and
//! nothing else. Called by `ops::gc`.

use super::deletion::Deleter;
use super::plan::{Plan, Planner};
use super::side_objects::{SideObject, SideReason, decide_upload, upload_path};
use super::{Decision, Kind, Object, Options, RemovalStatus, in_parallel};
use crate::backup::Snapshot;
use crate::backup::retention::removal_chains;
use crate::error::Result;
use crate::prefix::Context;
use crate::store::lock::LockGuard;
use chrono::{DateTime, Utc};
use std::collections::{HashMap, HashSet, VecDeque};

/// The most objects in a batch.
const BATCH: usize = 1000;

/// The objects with their results so far.
pub(super) struct Applied {
    /// The snapshots in the catalog's order, then all other objects.
    pub(super) objects: Vec<Object>,
    pub(super) warnings: Vec<String>,
}

/// Returns all objects with their decisions, before anything is done.
pub(super) fn decided_objects(
    ctx: &Context,
    options: &Options,
    plan: &Plan,
    now: DateTime<Utc>,
) -> Applied {
    let mut objects = Vec::new();
    for (i, s) in plan.catalog.snapshots.iter().enumerate() {
        let (why, decision) = (plan.why[i], plan.decision(i));
        let reason = (why.as_str(), why.text());
        let (path, kind) = (s.path.clone(), s.name.kind.into());
        objects.push(Object::new(path, kind, s.bytes, decision, reason));
    }
    for side in &plan.side_objects {
        let decision = Decision::from_keeps(side.reason.keeps());
        let reason = side.reason.describe();
        let path = side.path.clone();
        objects.push(Object::new(path, side.kind, side.bytes, decision, reason));
    }
    let mut warnings = Vec::new();
    match ctx.store.uploads() {
        Ok(uploads) => {
            let uploads = uploads.iter();
            objects.extend(uploads.filter_map(|u| decide_upload(u, options.staging_age, now)));
        }
        Err(e) => warnings.push(format!("incomplete uploads are not cleaned up: {e}")),
    }
    Applied { objects, warnings }
}

/// Marks the objects that would be deleted but are locked, for a dry run.
pub(super) fn mark_locked(ctx: &Context, now: DateTime<Utc>, applied: &mut Applied) -> Result<()> {
    let deleter = Deleter::new(ctx, now, &mut applied.warnings)?;
    if !deleter.may_keep_versions {
        return Ok(());
    }
    // An incomplete upload is not an object.
    let is_deleted = |o: &&mut Object| o.decision == Decision::Delete && o.kind != Kind::Upload;
    let mut deleted: Vec<&mut Object> = applied.objects.iter_mut().filter(is_deleted).collect();
    let locked = in_parallel(&deleted, |object| deleter.locked(&object.path));
    for (object, locked) in deleted.iter_mut().zip(locked) {
        if let Some(until) = locked? {
            object.fate = Some(RemovalStatus::Locked);
            object.locked_until = until;
        }
    }
    Ok(())
}

/// Removes what the plan decided, as far as later plans agree.
///
/// # Errors
/// Fails with errors that end the whole run: `Terminated`, `LockHeld`, or the store's if the backup
/// cannot be listed. `applied` holds the results so far.
pub(super) fn apply(
    ctx: &Context,
    options: &Options,
    planner: &mut Planner,
    first: &Plan,
    lock: Option<&LockGuard>,
    applied: &mut Applied,
) -> Result<()> {
    let result = try_apply(ctx, options, planner, first, lock, applied);
    if result.is_err() {
        mark_waiting(applied);
    }
    result
}

/// Marks all objects that have no result as waiting.
pub(super) fn mark_waiting(applied: &mut Applied) {
    for o in &mut applied.objects {
        if o.decision != Decision::Keep && o.fate.is_none() {
            o.fate = Some(RemovalStatus::Waiting);
        }
    }
}

fn try_apply(
    ctx: &Context,
    options: &Options,
    planner: &mut Planner,
    first: &Plan,
    lock: Option<&LockGuard>,
    applied: &mut Applied,
) -> Result<()> {
    let now = planner.now();
    let mut remover = Remover {
        ctx,
        options,
        first,
        objects: &mut applied.objects,
        deleter: Deleter::new(ctx, now, &mut applied.warnings)?,
    };
    let orphans = remover.remove_snapshots(planner, lock)?;
    remover.delete_side_objects(&orphans)?;
    remover.abort_uploads()
}

/// Removes what the first plan decided.
struct Remover<'a> {
    ctx: &'a Context,
    options: &'a Options,
    first: &'a Plan,
    /// The objects of [`Applied`].
    objects: &'a mut Vec<Object>,
    deleter: Deleter<'a>,
}

/// The snapshots of a batch, by chain.
type Batch = Vec<ChainBatch>;

/// The snapshots of a chain that a batch removes, and the rest of the chain.
struct ChainBatch {
    next: Vec<usize>,
    rest: VecDeque<usize>,
}

impl Remover<'_> {
    fn snapshot(&self, i: usize) -> &Snapshot {
        &self.first.catalog.snapshots[i]
    }

    /// Removes snapshots. Returns the paths of the side objects that, by the latest plan, belong to no
    /// snapshot.
    fn remove_snapshots(
        &mut self,
        planner: &mut Planner,
        lock: Option<&LockGuard>,
    ) -> Result<HashSet<String>> {
        let first = self.first;
        let removed: HashSet<usize> = (0..first.why.len())
            .filter(|&i| !first.why[i].keeps())
            .collect();
        // The snapshot that is removed next is at the front.
        let mut chains: VecDeque<VecDeque<usize>> = removal_chains(&first.catalog, &removed)
            .into_iter()
            .map(VecDeque::from)
            .collect();
        // With versions, each object is deleted by itself, and a locked one stops its chain.
        let most_of_chain = match self.deleter.may_keep_versions {
            true => 1,
            false => BATCH,
        };
        let is_full = |i: usize| first.catalog.snapshots[i].name.is_full();
        let is_stale = |plan: &Plan| plan.is_stale(self.options.look_again);
        let mut later: Option<LaterPlan> = None;
        while !chains.is_empty() {
            self.ctx.store.cancel().check()?;
            if let Some(lock) = lock {
                lock.check()?;
            }
            if is_stale(later.as_ref().map_or(first, |l| &l.plan)) {
                later = Some(LaterPlan::new(planner.plan()?));
            }
            let batch = next_batch(&mut chains, most_of_chain, is_full);
            let removals = self.still_removed(&batch, later.as_ref());
            self.delete(&removals)?;
            for ChainBatch { next, rest } in batch {
                if next.iter().any(|&i| stops_chain(self.objects[i].fate)) {
                    for i in next.into_iter().chain(rest) {
                        self.objects[i].fate.get_or_insert(RemovalStatus::Waiting);
                    }
                } else if !rest.is_empty() {
                    chains.push_back(rest);
                }
            }
        }
        // A snapshot may have been uploaded for a side object that had none.
        let latest = later.as_ref().map_or(first, |l| &l.plan);
        let has_orphans = first
            .side_objects
            .iter()
            .any(|s| s.reason == SideReason::Orphaned);
        Ok(match has_orphans && is_stale(latest) {
            true => orphans(&planner.plan()?),
            false => orphans(latest),
        })
    }

    /// Returns the snapshots of a batch that the latest plan still removes. Records the result of the
    /// others.
    fn still_removed(&mut self, batch: &Batch, later: Option<&LaterPlan>) -> Vec<usize> {
        let mut removals = Vec::new();
        for ChainBatch { next, .. } in batch {
            for &i in next {
                match later.and_then(|later| later.other_status(&self.snapshot(i).path)) {
                    None => removals.push(i),
                    Some(status) => self.objects[i].fate = Some(status),
                }
                if self.objects[i].fate == Some(RemovalStatus::Changed) {
                    break;
                }
            }
        }
        removals
    }

    /// Deletes objects, given by their index, and records the results.
    fn delete(&mut self, indexes: &[usize]) -> Result<()> {
        let path = |&i: &usize| self.objects[i].path.clone();
        let paths: Vec<String> = indexes.iter().map(path).collect();
        let results = self.deleter.delete(&paths)?;
        for (&i, result) in indexes.iter().zip(results) {
            self.objects[i].record(result);
        }
        Ok(())
    }

    /// Deletes side objects. A note is deleted when the snapshots that it is about are gone.
    fn delete_side_objects(&mut self, orphans: &HashSet<String>) -> Result<()> {
        let mut to_delete = Vec::new();
        // In `objects`, the side objects follow the snapshots.
        for (i, side) in (self.first.why.len()..).zip(&self.first.side_objects) {
            if side.reason.keeps() {
                continue;
            }
            match self.side_object_status(side, orphans) {
                RemovalStatus::Done => to_delete.push(i),
                status => self.objects[i].fate = Some(status),
            }
        }
        to_delete
            .chunks(BATCH)
            .try_for_each(|batch| self.delete(batch))
    }

    /// Returns `Done` if a side object may be deleted now, or why it may not.
    fn side_object_status(&self, side: &SideObject, orphans: &HashSet<String>) -> RemovalStatus {
        if side.reason == SideReason::Orphaned {
            return match orphans.contains(&side.path) {
                true => RemovalStatus::Done,
                false => RemovalStatus::Changed,
            };
        }
        let mut about = side.snapshots.iter().map(|&i| &self.objects[i]);
        if about.clone().all(Object::is_gone) {
            RemovalStatus::Done
        } else if about.any(|o| o.fate == Some(RemovalStatus::Changed)) {
            RemovalStatus::Changed
        } else {
            RemovalStatus::Waiting
        }
    }

    /// Aborts incomplete uploads.
    fn abort_uploads(&mut self) -> Result<()> {
        let is_aborted = |o: &&mut Object| o.kind == Kind::Upload && o.decision == Decision::Delete;
        let mut aborted = self.objects.iter_mut().filter(is_aborted).peekable();
        if aborted.peek().is_none() {
            return Ok(());
        }
        let store = &self.ctx.store;
        let uploads = store.uploads()?;
        for object in aborted {
            let mut of_object = uploads.iter().filter(|u| object.path == upload_path(u));
            let result = of_object.try_for_each(|u| store.abort_upload(u));
            object.record(result.map(|()| (RemovalStatus::Done, None)));
        }
        Ok(())
    }
}

/// Returns the paths of the side objects that belong to no snapshot.
fn orphans(plan: &Plan) -> HashSet<String> {
    let side_objects = plan.side_objects.iter();
    let orphans = side_objects.filter(|s| s.reason == SideReason::Orphaned);
    orphans.map(|s| s.path.clone()).collect()
}

/// Returns whether an object's result stops the rest of its chain.
fn stops_chain(status: Option<RemovalStatus>) -> bool {
    matches!(
        status,
        None | Some(
            RemovalStatus::Failed
                | RemovalStatus::Locked
                | RemovalStatus::Changed
                | RemovalStatus::Waiting
        )
    )
}

/// Takes the next batch from the chains: of each chain up to `most_of_chain` deltas, or its full if no
/// delta is left.
fn next_batch(
    chains: &mut VecDeque<VecDeque<usize>>,
    most_of_chain: usize,
    is_full: impl Fn(usize) -> bool,
) -> Batch {
    let mut batch = Vec::new();
    let mut left = BATCH;
    while left > 0
        && let Some(mut chain) = chains.pop_front()
    {
        let most = most_of_chain.min(left);
        let deltas = chain.iter().take_while(|&&i| !is_full(i)).count();
        // A full waits until its deltas are gone.
        let most = deltas.min(most).max(1).min(chain.len());
        let next: Vec<usize> = chain.drain(..most).collect();
        left -= next.len();
        batch.push(ChainBatch { next, rest: chain });
    }
    batch
}

/// A later plan, searchable by path.
struct LaterPlan {
    plan: Plan,
    index: HashMap<String, usize>,
}

impl LaterPlan {
    fn new(plan: Plan) -> Self {
        let snapshots = plan.catalog.snapshots.iter().enumerate();
        let index = snapshots.map(|(i, s)| (s.path.clone(), i)).collect();
        LaterPlan { plan, index }
    }

    /// Returns the result of a snapshot that this plan does not remove.
    fn other_status(&self, path: &str) -> Option<RemovalStatus> {
        match self.index.get(path) {
            // Another run has deleted it.
            None => Some(RemovalStatus::Done),
            Some(&i) if self.plan.why[i].keeps() => Some(RemovalStatus::Changed),
            Some(_) => None,
        }
    }
}
