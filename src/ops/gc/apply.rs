//! The removal of what a plan decided: chain by chain, of each the newest deltas first and the full
//! last, many chains at once.
//!
//! A batch takes many deltas of a chain, since one request deletes up to a thousand objects, but takes a full only when
//! all deltas of its chain are gone. Before each batch the lock is checked, and that what the plan rests on is
//! unchanged. A failure stops the rest of its chain, and nothing else.

use super::deletion::Deleter;
use super::plan::Plan;
use super::side_objects::{decide_upload, upload_path};
use super::{Decision, Kind, Object, Options, RemovalStatus, in_parallel};
use crate::backup::retention::removal_chains;
use crate::error::Result;
use crate::prefix::Context;
use crate::store::lock::LockGuard;
use chrono::{DateTime, Utc};
use std::collections::{HashSet, VecDeque};

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

/// Removes what the plan decided.
///
/// # Errors
/// Fails with errors that end the whole run: `Terminated`, `LockHeld`, `Conflict` if what the plan rests on has changed, or
/// the store's if the backup cannot be listed. `applied` holds the results so far.
pub(super) fn apply(
    ctx: &Context,
    now: DateTime<Utc>,
    plan: &Plan,
    lock: Option<&LockGuard>,
    applied: &mut Applied,
) -> Result<()> {
    let deleter = Deleter::new(ctx, now, &mut applied.warnings)?;
    let mut remover = Remover {
        ctx,
        plan,
        lock,
        objects: &mut applied.objects,
        deleter,
        removed: HashSet::new(),
    };
    let result = remover.remove();
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

/// Removes what a plan decided.
struct Remover<'a> {
    ctx: &'a Context,
    plan: &'a Plan,
    lock: Option<&'a LockGuard>,
    /// The objects of [`Applied`].
    objects: &'a mut Vec<Object>,
    deleter: Deleter<'a>,
    /// The paths of what is gone.
    removed: HashSet<String>,
}

/// The snapshots of a batch, by chain.
type Batch = Vec<ChainBatch>;

/// The snapshots of a chain that a batch removes, and the rest of the chain.
struct ChainBatch {
    next: Vec<usize>,
    rest: VecDeque<usize>,
}

impl Remover<'_> {
    fn remove(&mut self) -> Result<()> {
        self.remove_snapshots()?;
        self.delete_side_objects()?;
        self.abort_uploads()
    }

    /// Fails if this run must not go on: it was stopped, has lost its lock, or what the plan rests on has changed.
    fn check(&self) -> Result<()> {
        self.ctx.store.cancel().check()?;
        self.lock.map_or(Ok(()), LockGuard::check)?;
        self.plan.rests.check(self.ctx, &self.removed)
    }

    fn remove_snapshots(&mut self) -> Result<()> {
        let plan = self.plan;
        let removed: HashSet<usize> = (0..plan.why.len())
            .filter(|&i| !plan.why[i].keeps())
            .collect();
        // The snapshot that is removed next is at the front.
        let mut chains: VecDeque<VecDeque<usize>> = removal_chains(&plan.catalog, &removed)
            .into_iter()
            .map(VecDeque::from)
            .collect();
        // With versions, each object is deleted by itself, and a locked one stops its chain.
        let most_of_chain = if self.deleter.may_keep_versions {
            1
        } else {
            BATCH
        };
        let is_full = |i: usize| plan.catalog.snapshots[i].name.is_full();
        while !chains.is_empty() {
            self.check()?;
            let batch = next_batch(&mut chains, most_of_chain, is_full);
            let removals: Vec<usize> = batch.iter().flat_map(|b| b.next.iter().copied()).collect();
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
        Ok(())
    }

    /// Deletes objects, given by their index, and records the results.
    fn delete(&mut self, indexes: &[usize]) -> Result<()> {
        let path = |&i: &usize| self.objects[i].path.clone();
        let paths: Vec<String> = indexes.iter().map(path).collect();
        let results = self.deleter.delete(&paths)?;
        for (&i, result) in indexes.iter().zip(results) {
            let object = &mut self.objects[i];
            object.record(result);
            if object.is_gone() {
                self.removed.insert(object.path.clone());
            }
        }
        Ok(())
    }

    /// Deletes side objects. A note is deleted when the snapshots that it is about are gone.
    fn delete_side_objects(&mut self) -> Result<()> {
        let mut to_delete = Vec::new();
        // In `objects`, the side objects follow the snapshots.
        for (i, side) in (self.plan.why.len()..).zip(&self.plan.side_objects) {
            let is_gone = |&about: &usize| self.objects[about].is_gone();
            match side.snapshots.iter().all(is_gone) {
                _ if side.reason.keeps() => {}
                true => to_delete.push(i),
                false => self.objects[i].fate = Some(RemovalStatus::Waiting),
            }
        }
        to_delete
            .chunks(BATCH)
            .try_for_each(|batch| self.delete(batch))
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

/// Returns whether an object's result stops the rest of its chain.
fn stops_chain(status: Option<RemovalStatus>) -> bool {
    matches!(
        status,
        None | Some(RemovalStatus::Failed | RemovalStatus::Locked | RemovalStatus::Waiting)
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
