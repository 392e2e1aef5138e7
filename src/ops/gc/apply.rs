//! The removal of what a plan decided: chain by chain, of each the newest deltas first and the full
//! last, many chains at once.
//!
//! A batch takes many deltas of a chain, since one request deletes up to a thousand objects, but takes
//! a full only when all deltas of its chain are gone. Before each batch the plan is made anew if it is
//! old, and only objects that both plans remove are removed. A failure stops the rest of its chain, and
//! nothing else. Called by `ops::gc`.

use super::plan::{Plan, Planner};
use super::side_objects::{SideObject, SideReason};
use super::versions::{self, LockReader, VersionedBucket};
use super::{
    Decision, Kind, LONGEST_NOTE, Object, Options, RemovalResult, RemovalStatus, as_json,
    in_parallel, removal_note,
};
use crate::backup::Snapshot;
use crate::backup::retention::{RetentionReason, removal_chains};
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::store::lock::LockGuard;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet, VecDeque};

/// The most objects in a batch.
const BATCH: usize = 1000;

/// The objects with their results so far.
pub(super) struct Applied {
    /// The snapshots in the catalog's order, then all other objects.
    pub(super) objects: Vec<Object>,
    pub(super) warnings: Vec<String>,
}

/// The content of a removal note.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RemovalNote {
    pub(super) removed_at: DateTime<Utc>,
    pub(super) reason: String,
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
        let (why, decision) = (plan.why[i], plan.decision(i, options));
        let reason = (why.as_str(), why.text());
        let (path, kind) = (s.path.clone(), s.name.kind.into());
        objects.push(Object::new(path, kind, s.bytes, decision, reason));
    }
    for side in &plan.side_objects {
        let decision = match side.reason.keeps() {
            true => Decision::Keep,
            false => Decision::Delete,
        };
        let reason = side.reason.describe();
        let path = side.path.clone();
        objects.push(Object::new(path, side.kind, side.bytes, decision, reason));
    }
    let mut warnings = Vec::new();
    match ctx.store.uploads() {
        Ok(uploads) => {
            let uploads = uploads.iter();
            objects.extend(uploads.filter_map(|u| versions::decide_upload(u, options, now)));
        }
        Err(e) => warnings.push(format!("incomplete uploads are not cleaned up: {e}")),
    }
    Applied { objects, warnings }
}

/// Marks the objects that would be removed but are locked, for a dry run.
pub(super) fn mark_locked(
    ctx: &Context,
    options: &Options,
    now: DateTime<Utc>,
    applied: &mut Applied,
) -> Result<()> {
    let to_delete: HashSet<&str> = paths_to(Decision::Delete, &applied.objects).collect();
    let bucket = VersionedBucket::list(ctx, options, now, &to_delete, &mut applied.warnings)?;
    let locks = LockReader::new(ctx, now);
    // An incomplete upload is not an object.
    let is_removed = |o: &Object| o.decision != Decision::Keep && o.kind != Kind::Upload;
    let removed: Vec<usize> = (0..applied.objects.len())
        .filter(|&i| is_removed(&applied.objects[i]))
        .collect();
    if bucket.may_keep_versions() {
        let results = in_parallel(&removed, |&i| {
            bucket.locked(&locks, &applied.objects[i].path)
        });
        for (i, locked) in removed.into_iter().zip(results) {
            if let Some(until) = locked? {
                applied.objects[i].fate = Some(RemovalStatus::Locked);
                applied.objects[i].locked_until = until;
            }
        }
    }
    applied.objects.extend(bucket.old_versions());
    Ok(())
}

/// Returns the paths of the objects with this decision.
fn paths_to(decision: Decision, objects: &[Object]) -> impl Iterator<Item = &str> {
    let objects = objects.iter().filter(move |o| o.decision == decision);
    objects.map(|o| o.path.as_str())
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
    let to_delete: HashSet<&str> = paths_to(Decision::Delete, &applied.objects).collect();
    let bucket = VersionedBucket::list(ctx, options, now, &to_delete, &mut applied.warnings)?;
    let mut remover = Remover {
        ctx,
        options,
        first,
        objects: &mut applied.objects,
        bucket,
        locks: LockReader::new(ctx, now),
    };
    let orphans = remover.remove_snapshots(planner, lock)?;
    remover.delete_side_objects(&orphans)?;
    remover.abort_uploads()?;
    let purged = remover.bucket.purge(&remover.locks)?;
    remover.objects.extend(purged);
    Ok(())
}

/// Removes what the first plan decided.
struct Remover<'a> {
    ctx: &'a Context,
    options: &'a Options,
    first: &'a Plan,
    /// The objects of [`Applied`].
    objects: &'a mut Vec<Object>,
    bucket: VersionedBucket,
    locks: LockReader<'a>,
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
        let most_of_chain = match self.bucket.may_keep_versions() {
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
            self.remove(&removals, planner.now())?;
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
    fn still_removed(&mut self, batch: &Batch, later: Option<&LaterPlan>) -> Vec<Removal> {
        let mut removals = Vec::new();
        for (chain, ChainBatch { next, .. }) in batch.iter().enumerate() {
            for &i in next {
                let decision = self.first.decision(i, self.options);
                let has_note = match later {
                    None => Ok(self.snapshot(i).removal_noted),
                    Some(later) => later.has_note(&self.snapshot(i).path, decision, self.options),
                };
                match has_note {
                    Ok(has_note) => removals.push(Removal {
                        i,
                        chain,
                        decision,
                        has_note,
                    }),
                    Err(status) => self.objects[i].fate = Some(status),
                }
                if has_note == Err(RemovalStatus::Changed) {
                    break;
                }
            }
        }
        removals
    }

    /// Removes a batch. A snapshot without a result afterwards waits for another one of its chain.
    fn remove(&mut self, removals: &[Removal], now: DateTime<Utc>) -> Result<()> {
        let is_exclusion = |r: &&Removal| r.decision == Decision::Remove;
        let (exclude, delete): (Vec<&Removal>, Vec<&Removal>) =
            removals.iter().partition(is_exclusion);
        let mut results: Vec<(&Removal, RemovalResult)> = Vec::new();
        let mut stopped_chains: HashSet<usize> = HashSet::new();
        let excluded = in_parallel(&exclude, |r| self.exclude(r, now));
        for (removal, result) in exclude.into_iter().zip(excluded) {
            if stops_chain(result.as_ref().ok().map(|(status, _)| *status)) {
                stopped_chains.insert(removal.chain);
            }
            results.push((removal, result));
        }

        let due = in_parallel(&delete, |r| self.is_due(r, now));
        let mut to_delete = Vec::new();
        for (removal, due) in delete.into_iter().zip(due) {
            match due {
                _ if stopped_chains.contains(&removal.chain) => {}
                Ok(true) => to_delete.push(removal),
                not_due => {
                    stopped_chains.insert(removal.chain);
                    results.push((removal, not_due.map(|_| (RemovalStatus::Changed, None))));
                }
            }
        }
        let paths: Vec<String> = to_delete
            .iter()
            .map(|r| self.snapshot(r.i).path.clone())
            .collect();
        let deleted = self.bucket.delete(&self.locks, &paths)?;
        results.extend(to_delete.into_iter().zip(deleted));
        let mut errors = results
            .iter()
            .filter_map(|(_, result)| result.as_ref().err());
        if let Some(e) = errors.find(|e| e.reason() == Reason::Terminated) {
            return Err(e.again());
        }
        for (removal, result) in results {
            self.objects[removal.i].record(result);
        }
        Ok(())
    }

    /// Excludes a snapshot, and writes its removal note.
    fn exclude(&self, removal: &Removal, now: DateTime<Utc>) -> RemovalResult {
        let (store, s) = (&self.ctx.store, self.snapshot(removal.i));
        // A locked snapshot is meant to be used.
        if self.bucket.may_keep_versions()
            && let Some(until) = self.bucket.locked(&self.locks, &s.path)?
        {
            return Ok((RemovalStatus::Locked, until));
        }
        let text = as_json(&RemovalNote {
            removed_at: now,
            reason: self.first.why[removal.i].as_str().to_owned(),
        })?;
        let note = removal_note(&s.name);
        if removal.has_note {
            // The note is from an earlier removal, and must not make this one look as old.
            store.replace_small(&note, &text)?;
        }
        match store.set_excluded(&s.path, true) {
            Ok(()) => {}
            // The next run finds out whether it is gone.
            Err(e) if e.reason() == Reason::SnapshotVanished => {
                return Ok((RemovalStatus::Changed, None));
            }
            Err(e) => return Err(e),
        }
        store.replace_small(&note, &text)?;
        Ok((RemovalStatus::Done, None))
    }

    /// Returns whether a snapshot may be deleted: if it is to be purged, its removal note must still
    /// exist and be old enough by its own date. The snapshot may just have been brought back.
    fn is_due(&self, removal: &Removal, now: DateTime<Utc>) -> Result<bool> {
        let is_purge = self.first.why[removal.i] == RetentionReason::RemovedLongAgo;
        let Some(purge_after) = self.options.retention.purge_after else {
            return Ok(true);
        };
        if !is_purge {
            return Ok(true);
        }
        let note = removal_note(&self.snapshot(removal.i).name);
        let Some(text) = self.ctx.store.read_small(&note, LONGEST_NOTE)? else {
            return Ok(false);
        };
        // If the note cannot be parsed, its modification time counts, which the plan has checked.
        Ok(match serde_json::from_slice::<RemovalNote>(&text) {
            Ok(note) => now - note.removed_at >= purge_after,
            Err(_) => true,
        })
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
        for batch in to_delete.chunks(BATCH) {
            let path = |&i: &usize| self.objects[i].path.clone();
            let paths: Vec<String> = batch.iter().map(path).collect();
            let deleted = self.bucket.delete(&self.locks, &paths)?;
            for (&i, result) in batch.iter().zip(deleted) {
                self.objects[i].record(result);
            }
        }
        Ok(())
    }

    /// Returns `Done` if a side object may be deleted now, or why it may not.
    fn side_object_status(&self, side: &SideObject, orphans: &HashSet<String>) -> RemovalStatus {
        if side.reason == SideReason::Orphaned {
            return match orphans.contains(&side.path) {
                true => RemovalStatus::Done,
                false => RemovalStatus::Changed,
            };
        }
        let mut statuses = side.snapshots.iter().map(|&i| self.objects[i].fate);
        let is_gone = |status| matches!(status, Some(RemovalStatus::Done | RemovalStatus::Hidden));
        if statuses.clone().all(is_gone) {
            RemovalStatus::Done
        } else if statuses.any(|s| s == Some(RemovalStatus::Changed)) {
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
            let mut of_object = uploads
                .iter()
                .filter(|u| object.path == versions::upload_path(u));
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

    /// Returns whether a snapshot has a removal note, if this plan decides the same about it; otherwise
    /// its result.
    fn has_note(
        &self,
        path: &str,
        decision: Decision,
        options: &Options,
    ) -> Result<bool, RemovalStatus> {
        // Another run has deleted it.
        let &i = self.index.get(path).ok_or(RemovalStatus::Done)?;
        match self.plan.decision(i, options) == decision {
            true => Ok(self.plan.catalog.snapshots[i].removal_noted),
            false => Err(RemovalStatus::Changed),
        }
    }
}

/// A snapshot to remove.
struct Removal {
    /// Its index in the first plan's catalog.
    i: usize,
    /// The index of its chain in the batch: a failure stops the rest of the chain.
    chain: usize,
    decision: Decision,
    /// Whether it has a removal note.
    has_note: bool,
}
