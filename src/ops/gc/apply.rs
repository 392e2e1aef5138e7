//! Removing what goes: chain by chain, the newest deltas first and the full last, many chains at once.
//!
//! A batch takes many deltas of a chain, since a store deletes a thousand objects with one request. A full is
//! only taken when all deltas of its chain are gone. Before each batch the look is taken anew if it is old,
//! and only what that one removes, too, goes. What fails holds the rest of its chain back, and nothing else.

use super::plan::{BesideWhy, Eyes, Look};
use super::versions::{self, Hidden, Lockings};
use super::{
    Decision, Fate, Fated, Kind, LONGEST_NOTE, Object, Options, as_json, in_parallel, removal_note,
};
use crate::backup::Snapshot;
use crate::backup::retention::{RetentionReason, removal_chains};
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::store::lock::LockGuard;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet, VecDeque};

/// Objects that are removed before the next look.
const BATCH: usize = 1000;

/// What was done so far.
pub(super) struct Applied {
    /// First the snapshots in the catalog's order, then what is beside them.
    pub(super) objects: Vec<Object>,
    pub(super) warnings: Vec<String>,
}

/// The note on a removed snapshot.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RemovalNote {
    pub(super) removed_at: DateTime<Utc>,
    pub(super) reason: String,
}

/// What is decided, before anything is done.
pub(super) fn begin(ctx: &Context, options: &Options, look: &Look, now: DateTime<Utc>) -> Applied {
    let snapshots = look.catalog.snapshots.iter().enumerate().map(|(i, s)| {
        let (why, decision) = (look.why[i], look.decision(i, options));
        let told = (why.as_str(), why.text());
        Object::new(s.path.clone(), s.name.kind.into(), s.bytes, decision, told)
    });
    let beside = look.beside.iter().map(|b| {
        let decision = match b.why.keeps() {
            true => Decision::Keep,
            false => Decision::Delete,
        };
        Object::new(b.path.clone(), b.kind, b.bytes, decision, b.why.told())
    });
    let mut objects: Vec<Object> = snapshots.chain(beside).collect();
    let mut warnings = Vec::new();
    match ctx.store.uploads() {
        Ok(uploads) => {
            let uploads = uploads.iter();
            objects.extend(uploads.filter_map(|u| versions::upload(u, options, now)));
        }
        Err(e) => warnings.push(format!("unfinished uploads are left: {e}")),
    }
    Applied { objects, warnings }
}

/// For a dry run: what of all that would go is locked.
pub(super) fn tell_locked(
    ctx: &Context,
    options: &Options,
    now: DateTime<Utc>,
    applied: &mut Applied,
) -> Result<()> {
    let to_delete: HashSet<&str> = goes(&applied.objects, Decision::Delete).collect();
    let hidden = Hidden::list(ctx, options, now, &to_delete, &mut applied.warnings)?;
    let lockings = Lockings::new(ctx, now);
    // An unfinished upload is no object.
    let is_object = |o: &Object| o.decision != Decision::Keep && o.kind != Kind::Upload;
    let goes: Vec<usize> = (0..applied.objects.len())
        .filter(|&i| is_object(&applied.objects[i]))
        .collect();
    if hidden.may_keep_versions() {
        let found = in_parallel(&goes, |&i| {
            hidden.locked(&lockings, &applied.objects[i].path)
        });
        for (i, locked) in goes.into_iter().zip(found) {
            if let Some(until) = locked? {
                applied.objects[i].fate = Some(Fate::Locked);
                applied.objects[i].locked_until = until;
            }
        }
    }
    applied.objects.extend(hidden.objects());
    Ok(())
}

fn goes(objects: &[Object], decision: Decision) -> impl Iterator<Item = &str> {
    let goes = objects.iter().filter(move |o| o.decision == decision);
    goes.map(|o| o.path.as_str())
}

/// Removes what goes.
///
/// # Errors
/// What ends the whole run: `Terminated`, `LockHeld`; the store's where it cannot be looked at. `applied`
/// tells what was done.
pub(super) fn apply(
    ctx: &Context,
    options: &Options,
    eyes: &mut Eyes,
    first: &Look,
    held: Option<&LockGuard>,
    applied: &mut Applied,
) -> Result<()> {
    let result = try_apply(ctx, options, eyes, first, held, applied);
    if result.is_err() {
        refuse(applied);
    }
    result
}

/// What was not come to waits, whatever ended the run.
pub(super) fn refuse(applied: &mut Applied) {
    for o in &mut applied.objects {
        if o.decision != Decision::Keep && o.fate.is_none() {
            o.fate = Some(Fate::Waiting);
        }
    }
}

fn try_apply(
    ctx: &Context,
    options: &Options,
    eyes: &mut Eyes,
    first: &Look,
    held: Option<&LockGuard>,
    applied: &mut Applied,
) -> Result<()> {
    let now = eyes.now();
    let to_delete: HashSet<&str> = goes(&applied.objects, Decision::Delete).collect();
    let hidden = Hidden::list(ctx, options, now, &to_delete, &mut applied.warnings)?;
    let mut remover = Remover {
        ctx,
        options,
        first,
        objects: &mut applied.objects,
        hidden,
        lockings: Lockings::new(ctx, now),
    };
    let orphans = remover.snapshots(eyes, held)?;
    remover.beside(&orphans)?;
    remover.uploads()?;
    let purged = remover.hidden.purge(&remover.lockings)?;
    remover.objects.extend(purged);
    Ok(())
}

/// Removes what a look decided on.
struct Remover<'a> {
    ctx: &'a Context,
    options: &'a Options,
    first: &'a Look,
    /// As in [`Applied`].
    objects: &'a mut Vec<Object>,
    hidden: Hidden,
    lockings: Lockings<'a>,
}

/// Of each chain what is removed next, and what is left of it then.
type Batch = Vec<(Vec<usize>, VecDeque<usize>)>;

impl Remover<'_> {
    fn snapshot(&self, i: usize) -> &Snapshot {
        &self.first.catalog.snapshots[i]
    }

    /// Removes snapshots. Gives the paths beside them that belong to nothing, by the last look.
    fn snapshots(&mut self, eyes: &mut Eyes, held: Option<&LockGuard>) -> Result<HashSet<String>> {
        let first = self.first;
        let leaves: HashSet<usize> = (0..first.why.len())
            .filter(|&i| !first.why[i].keeps())
            .collect();
        // Each chain's next one is at its front.
        let mut chains: VecDeque<VecDeque<usize>> = removal_chains(&first.catalog, &leaves)
            .into_iter()
            .map(VecDeque::from)
            .collect();
        // A bucket with versions deletes one by one. If one of a chain is locked, nothing behind it goes.
        let most_of_chain = match self.hidden.may_keep_versions() {
            true => 1,
            false => BATCH,
        };
        let is_full = |i: usize| first.catalog.snapshots[i].name.is_full();
        let is_stale = |look: &Look| look.is_stale(self.options.look_again);
        let mut again: Option<Allowed> = None;
        while !chains.is_empty() {
            self.ctx.store.cancel().check()?;
            if let Some(held) = held {
                held.check()?;
            }
            if is_stale(again.as_ref().map_or(first, |a| &a.look)) {
                again = Some(Allowed::new(eyes.look()?));
            }
            let batch = next_batch(&mut chains, most_of_chain, is_full);
            let todo = self.still_to_do(&batch, again.as_ref());
            self.remove(&todo, eyes.now())?;
            for (next, rest) in batch {
                if next.iter().any(|&i| holds(self.objects[i].fate)) {
                    for i in next.into_iter().chain(rest) {
                        self.objects[i].fate.get_or_insert(Fate::Waiting);
                    }
                } else if !rest.is_empty() {
                    chains.push_back(rest);
                }
            }
        }
        // What belonged to nothing may belong to something by now.
        let last = again.as_ref().map_or(first, |a| &a.look);
        let any = first.beside.iter().any(|b| b.why == BesideWhy::Orphaned);
        Ok(match any && is_stale(last) {
            true => orphans(&eyes.look()?),
            false => orphans(last),
        })
    }

    /// What of a batch is decided as before; notes the fate of the rest.
    fn still_to_do(&mut self, batch: &Batch, again: Option<&Allowed>) -> Vec<Todo> {
        let mut todo = Vec::new();
        for (chain, (next, _)) in batch.iter().enumerate() {
            for &i in next {
                let decision = self.first.decision(i, self.options);
                let noted = match again {
                    None => Ok(self.snapshot(i).removal_noted),
                    Some(a) => a.noted(&self.snapshot(i).path, decision, self.options),
                };
                match noted {
                    Ok(noted) => todo.push(Todo {
                        i,
                        chain,
                        decision,
                        noted,
                    }),
                    Err(fate) => self.objects[i].fate = Some(fate),
                }
                if noted == Err(Fate::Changed) {
                    break;
                }
            }
        }
        todo
    }

    /// Removes a batch. What has no fate then waits for another of its chain.
    fn remove(&mut self, todo: &[Todo], now: DateTime<Utc>) -> Result<()> {
        let is_removal = |t: &&Todo| t.decision == Decision::Remove;
        let (exclude, delete): (Vec<&Todo>, Vec<&Todo>) = todo.iter().partition(is_removal);
        let excluded = in_parallel(&exclude, |t| self.exclude(t, now));
        let mut results: Vec<(&Todo, Fated)> = exclude.into_iter().zip(excluded).collect();
        let is_held = |(_, fated): &&(&Todo, Fated)| holds(fated.as_ref().ok().map(|f| f.0));
        let held = results.iter().filter(is_held);
        let mut held: HashSet<usize> = held.map(|(t, _)| t.chain).collect();

        let due = in_parallel(&delete, |t| self.is_due(t, now));
        let mut allowed = Vec::new();
        for (t, due) in delete.into_iter().zip(due) {
            match due {
                _ if held.contains(&t.chain) => {}
                Ok(true) => allowed.push(t),
                not_due => {
                    held.insert(t.chain);
                    results.push((t, not_due.map(|_| (Fate::Changed, None))));
                }
            }
        }
        let paths: Vec<String> = allowed
            .iter()
            .map(|t| self.snapshot(t.i).path.clone())
            .collect();
        let deleted = self.hidden.delete(&self.lockings, &paths)?;
        results.extend(allowed.into_iter().zip(deleted));
        let mut errors = results.iter().filter_map(|(_, fated)| fated.as_ref().err());
        if let Some(e) = errors.find(|e| e.reason() == Reason::Terminated) {
            return Err(e.again());
        }
        for (t, fated) in results {
            self.objects[t.i].ended(fated);
        }
        Ok(())
    }

    /// Excludes a snapshot, and notes that it was removed.
    fn exclude(&self, t: &Todo, now: DateTime<Utc>) -> Fated {
        let (store, s) = (&self.ctx.store, self.snapshot(t.i));
        // What is locked is meant to be used.
        if self.hidden.may_keep_versions()
            && let Some(until) = self.hidden.locked(&self.lockings, &s.path)?
        {
            return Ok((Fate::Locked, until));
        }
        let text = as_json(&RemovalNote {
            removed_at: now,
            reason: self.first.why[t.i].as_str().to_owned(),
        })?;
        let at = removal_note(&s.name);
        if t.noted {
            // It is of another time, and must not make the snapshot look as if it had been removed then.
            store.replace_small(&at, &text)?;
        }
        match store.set_excluded(&s.path, true) {
            Ok(()) => {}
            // The next run knows whether that is so.
            Err(e) if e.reason() == Reason::SnapshotVanished => return Ok((Fate::Changed, None)),
            Err(e) => return Err(e),
        }
        store.replace_small(&at, &text)?;
        Ok((Fate::Done, None))
    }

    /// Of what is to be purged: whether its note is there, and old enough by its own word. It may just have been brought
    /// back.
    fn is_due(&self, t: &Todo, now: DateTime<Utc>) -> Result<bool> {
        let purge_after = self.options.retention.purge_after;
        let is_purge = self.first.why[t.i] == RetentionReason::RemovedLongAgo;
        let Some(purge_after) = purge_after.filter(|_| is_purge) else {
            return Ok(true);
        };
        let note = removal_note(&self.snapshot(t.i).name);
        let Some(text) = self.ctx.store.read_small(&note, LONGEST_NOTE)? else {
            return Ok(false);
        };
        // One that cannot be read is as old as the store says, which was looked at.
        let said = serde_json::from_slice::<RemovalNote>(&text).ok();
        Ok(said.is_none_or(|n| now - n.removed_at >= purge_after))
    }

    /// Deletes what is beside the snapshots: notes when what they are about is gone.
    fn beside(&mut self, orphans: &HashSet<String>) -> Result<()> {
        let mut todo = Vec::new();
        let beside = (self.first.why.len()..).zip(&self.first.beside);
        for (at, b) in beside.filter(|(_, b)| !b.why.keeps()) {
            let mut of = b.of.iter().map(|&i| self.objects[i].fate);
            let fate = match b.why {
                BesideWhy::Orphaned if !orphans.contains(&b.path) => Fate::Changed,
                BesideWhy::Orphaned => Fate::Done,
                _ if of
                    .clone()
                    .all(|f| matches!(f, Some(Fate::Done | Fate::Hidden))) =>
                {
                    Fate::Done
                }
                _ if of.any(|f| f == Some(Fate::Changed)) => Fate::Changed,
                _ => Fate::Waiting,
            };
            match fate {
                Fate::Done => todo.push(at),
                fate => self.objects[at].fate = Some(fate),
            }
        }
        for batch in todo.chunks(BATCH) {
            let path = |&i: &usize| self.objects[i].path.clone();
            let paths: Vec<String> = batch.iter().map(path).collect();
            let deleted = self.hidden.delete(&self.lockings, &paths)?;
            for (&i, fated) in batch.iter().zip(deleted) {
                self.objects[i].ended(fated);
            }
        }
        Ok(())
    }

    /// Gives unfinished uploads up.
    fn uploads(&mut self) -> Result<()> {
        let goes = |o: &&mut Object| o.kind == Kind::Upload && o.decision == Decision::Delete;
        let mut goes = self.objects.iter_mut().filter(goes).peekable();
        if goes.peek().is_none() {
            return Ok(());
        }
        let store = &self.ctx.store;
        let unfinished = store.uploads()?;
        for o in goes {
            let of = unfinished.iter();
            let mut of = of.filter(|u| o.path == versions::upload_path(u));
            let given_up = of.try_for_each(|u| store.abort_upload(u));
            o.ended(given_up.map(|()| (Fate::Done, None)));
        }
        Ok(())
    }
}

fn orphans(look: &Look) -> HashSet<String> {
    let orphans = look.beside.iter().filter(|b| b.why == BesideWhy::Orphaned);
    orphans.map(|b| b.path.clone()).collect()
}

/// Whether what became of an object holds the rest of its chain back.
fn holds(fate: Option<Fate>) -> bool {
    matches!(
        fate,
        None | Some(Fate::Failed | Fate::Locked | Fate::Changed | Fate::Waiting)
    )
}

/// What is removed next: of each chain its next deltas, `most_of_chain` at most, or its full if no delta is left;
/// with what is left of the chain.
fn next_batch(
    chains: &mut VecDeque<VecDeque<usize>>,
    most_of_chain: usize,
    is_full: impl Fn(usize) -> bool,
) -> Batch {
    let mut batch = Vec::new();
    let mut room = BATCH;
    while room > 0
        && let Some(mut chain) = chains.pop_front()
    {
        let most = most_of_chain.min(room);
        let deltas = chain.iter().take_while(|&&i| !is_full(i)).count();
        // A full waits until its deltas are gone.
        let most = deltas.min(most).max(1).min(chain.len());
        let next: Vec<usize> = chain.drain(..most).collect();
        room -= next.len();
        batch.push((next, chain));
    }
    batch
}

/// A look by path.
struct Allowed {
    look: Look,
    at: HashMap<String, usize>,
}

impl Allowed {
    fn new(look: Look) -> Self {
        let paths = look.catalog.snapshots.iter().enumerate();
        let at = paths.map(|(i, s)| (s.path.clone(), i)).collect();
        Allowed { look, at }
    }

    /// Whether there is a note on a snapshot on which it is decided as before; its fate on another one.
    fn noted(&self, path: &str, decision: Decision, options: &Options) -> Result<bool, Fate> {
        // Somebody was faster.
        let &i = self.at.get(path).ok_or(Fate::Done)?;
        match self.look.decision(i, options) == decision {
            true => Ok(self.look.catalog.snapshots[i].removal_noted),
            false => Err(Fate::Changed),
        }
    }
}

struct Todo {
    i: usize,
    /// Its place in the batch: what fails holds back what is behind it in the same chain.
    chain: usize,
    decision: Decision,
    noted: bool,
}
