//! Removing what goes: chain by chain, the newest deltas first and the full last, many chains at once.
//!
//! A batch takes many deltas of a chain, since a store deletes a thousand objects with one request. A full is
//! only taken when all deltas of its chain are gone. Before each batch the look is taken anew if it is old,
//! and only what that one removes, too, goes. What fails holds the rest of its chain back, and nothing else.

use super::hidden::{Hidden, Lockings};
use super::look::{Action, BesideKind, BesideWhy, Eyes, Look};
use super::{Decision, Fate, Kind, LONGEST_NOTE, Object, Options, in_parallel, removal_note};
use crate::bucket::retention::{Why, removal_chains};
use crate::bucket::{self};
use crate::error::{Error, Reason, Result};
use crate::job::Context;
use crate::store::lock::Held;
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
    let snapshots = look
        .catalog
        .snapshots
        .iter()
        .enumerate()
        .map(|(i, s)| Object {
            path: s.path.clone(),
            kind: match s.name.kind {
                bucket::Kind::Full => Kind::Full,
                bucket::Kind::Incr => Kind::Incr,
            },
            bytes: s.bytes,
            decision: look.action(i, options).into(),
            reason: look.why[i].as_str(),
            explanation: look.why[i].text(),
            fate: None,
            locked_until: None,
            error: None,
        });
    let beside = look.beside.iter().map(|b| Object {
        path: b.path.clone(),
        kind: match b.kind {
            BesideKind::Note => Kind::Note,
            BesideKind::Mark => Kind::Mark,
            BesideKind::Staging => Kind::Staging,
        },
        bytes: b.bytes,
        decision: match b.why.keeps() {
            true => Decision::Keep,
            false => Decision::Delete,
        },
        reason: b.why.told().0,
        explanation: b.why.told().1.into(),
        fate: None,
        locked_until: None,
        error: None,
    });
    let mut objects: Vec<Object> = snapshots.chain(beside).collect();
    let mut warnings = Vec::new();
    match ctx.store.uploads() {
        Ok(uploads) => {
            for u in uploads {
                if let Some(object) = super::hidden::upload(&u, options, now) {
                    objects.push(object);
                }
            }
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
    held: Option<&Held>,
    applied: &mut Applied,
) -> Result<()> {
    let result = snapshots(ctx, options, eyes, first, held, applied);
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

fn snapshots(
    ctx: &Context,
    options: &Options,
    eyes: &mut Eyes,
    first: &Look,
    held: Option<&Held>,
    applied: &mut Applied,
) -> Result<()> {
    let n = first.catalog.snapshots.len();
    let leaves: HashSet<usize> = (0..n).filter(|&i| !first.why[i].keeps()).collect();
    let to_delete: HashSet<&str> = goes(&applied.objects, Decision::Delete).collect();
    let now = eyes.now();
    let mut hidden = Hidden::list(ctx, options, now, &to_delete, &mut applied.warnings)?;
    drop(to_delete);
    let lockings = Lockings::new(ctx, now);

    // Each chain's next one is at its front.
    let mut chains: VecDeque<VecDeque<usize>> = removal_chains(&first.catalog, &leaves)
        .into_iter()
        .map(VecDeque::from)
        .collect();
    let mut again: Option<Allowed> = None;
    // A bucket with versions deletes one by one. If one of a chain is locked, nothing behind it goes.
    let most_of_chain = match hidden.may_keep_versions() {
        true => 1,
        false => BATCH,
    };
    let is_full = |i: usize| first.catalog.snapshots[i].name.is_full();
    while !chains.is_empty() {
        ctx.store.cancel().check()?;
        if let Some(held) = held {
            held.check()?;
        }
        let last = again.as_ref().map_or(first, |a| &a.look);
        if last.is_stale(options.look_again) {
            again = Some(Allowed::new(eyes.look()?));
        }
        let batch = next_batch(&mut chains, most_of_chain, is_full);
        let mut todo = Vec::new();
        for (chain, (next, _)) in batch.iter().enumerate() {
            for &i in next {
                let action = first.action(i, options);
                let path = &first.catalog.snapshots[i].path;
                let seen = match &again {
                    None => Seen::Same(first.catalog.snapshots[i].removal_noted),
                    Some(a) => a.seen(path, action, options),
                };
                match seen {
                    Seen::Same(noted) => todo.push(Todo {
                        i,
                        chain,
                        action,
                        noted,
                    }),
                    // Somebody was faster.
                    Seen::Gone => applied.objects[i].fate = Some(Fate::Done),
                    Seen::Changed => {
                        applied.objects[i].fate = Some(Fate::Changed);
                        break;
                    }
                }
            }
        }
        let now = eyes.now();
        for (i, fate) in remove(ctx, options, first, now, &todo, &mut hidden, &lockings)? {
            let object = &mut applied.objects[i];
            match fate {
                Ok((fate, until)) => {
                    object.fate = Some(fate);
                    object.locked_until = until;
                }
                Err(e) => {
                    object.fate = Some(Fate::Failed);
                    object.error = Some(e.to_string());
                }
            }
        }
        for (next, rest) in batch {
            let is_held = next.iter().any(|&i| holds(applied.objects[i].fate));
            if is_held {
                for i in next.into_iter().chain(rest) {
                    applied.objects[i].fate.get_or_insert(Fate::Waiting);
                }
            } else if !rest.is_empty() {
                chains.push_back(rest);
            }
        }
    }
    // What belonged to nothing may belong to something by now.
    let last = again.as_ref().map_or(first, |a| &a.look);
    let still = match last.is_stale(options.look_again) {
        true if first.beside.iter().any(|b| b.why == BesideWhy::Orphaned) => {
            Some(orphans(&eyes.look()?))
        }
        _ => again.as_ref().map(|a| orphans(&a.look)),
    };
    beside(ctx, first, still, n, applied, &mut hidden, &lockings)?;
    versions(ctx, applied, &hidden, &lockings)
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
) -> Vec<(Vec<usize>, VecDeque<usize>)> {
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

enum Seen {
    /// It is decided as before; whether there is a note on it.
    Same(bool),
    Gone,
    Changed,
}

impl Allowed {
    fn new(look: Look) -> Self {
        let paths = look.catalog.snapshots.iter().enumerate();
        let at = paths.map(|(i, s)| (s.path.clone(), i)).collect();
        Allowed { look, at }
    }

    fn seen(&self, path: &str, action: Action, options: &Options) -> Seen {
        let Some(&i) = self.at.get(path) else {
            return Seen::Gone;
        };
        match self.look.action(i, options) == action {
            true => Seen::Same(self.look.catalog.snapshots[i].removal_noted),
            false => Seen::Changed,
        }
    }
}

struct Todo {
    i: usize,
    /// Its place in the batch: what fails holds back what is behind it in the same chain.
    chain: usize,
    action: Action,
    noted: bool,
}

type Fated = Result<(Fate, Option<DateTime<Utc>>)>;

/// Removes a batch. What has no result waits for another of its chain.
fn remove(
    ctx: &Context,
    options: &Options,
    first: &Look,
    now: DateTime<Utc>,
    todo: &[Todo],
    hidden: &mut Hidden,
    lockings: &Lockings,
) -> Result<Vec<(usize, Fated)>> {
    let snapshot = |t: &Todo| &first.catalog.snapshots[t.i];
    // What is purged may just have been brought back, and its note tells.
    let purge_after = options.retention.purge_after;
    let is_purge = |t: &Todo| first.why[t.i] == Why::RemovedLongAgo && purge_after.is_some();
    let (exclude, delete): (Vec<&Todo>, Vec<&Todo>) =
        todo.iter().partition(|t| t.action == Action::Remove);
    let mut results: Vec<(usize, Fated)> = Vec::new();
    let excluded = in_parallel(&exclude, |t| {
        let s = snapshot(t);
        // What is locked is meant to be used.
        if hidden.may_keep_versions()
            && let Some(until) = hidden.locked(lockings, &s.path)?
        {
            return Ok((Fate::Locked, until));
        }
        let why = first.why[t.i].as_str();
        exclude_one(ctx, &s.path, &s.name.to_string(), why, t.noted, now)
    });
    let mut held = HashSet::new();
    for (t, fated) in exclude.iter().zip(excluded) {
        if holds(fated.as_ref().ok().map(|f| f.0)) {
            held.insert(t.chain);
        }
        results.push((t.i, fated));
    }

    let purge: Vec<&Todo> = delete.iter().copied().filter(|t| is_purge(t)).collect();
    let due = in_parallel(&purge, |t| {
        let note = removal_note(&snapshot(t).name.to_string());
        is_due(ctx, &note, now, purge_after.unwrap_or_default())
    });
    let mut due: HashMap<usize, Result<bool>> = purge.iter().map(|t| t.i).zip(due).collect();
    let mut allowed = Vec::new();
    for t in delete {
        if held.contains(&t.chain) {
            continue;
        }
        match due.remove(&t.i) {
            None | Some(Ok(true)) => allowed.push(t),
            Some(Ok(false)) => {
                held.insert(t.chain);
                results.push((t.i, Ok((Fate::Changed, None))));
            }
            Some(Err(e)) => {
                held.insert(t.chain);
                results.push((t.i, Err(e)));
            }
        }
    }
    let delete = allowed;
    let paths: Vec<String> = delete.iter().map(|t| snapshot(t).path.clone()).collect();
    let deleted = hidden.delete(ctx, lockings, &paths)?;
    results.extend(delete.iter().map(|t| t.i).zip(deleted));
    for (_, result) in &results {
        if let Err(e) = result
            && e.reason() == Reason::Terminated
        {
            return Err(e.again());
        }
    }
    Ok(results)
}

/// Excludes a snapshot, and notes that it was removed.
fn exclude_one(
    ctx: &Context,
    path: &str,
    name: &str,
    why: &str,
    noted: bool,
    now: DateTime<Utc>,
) -> Fated {
    let note = RemovalNote {
        removed_at: now,
        reason: why.to_owned(),
    };
    let text = serde_json::to_vec(&note)
        .map_err(|e| Error::internal(format!("a note that is no JSON: {e}")))?;
    let at = removal_note(name);
    if noted {
        // It is of another time, and must not make the snapshot look as if it had been removed then.
        ctx.store.replace_small(&at, &text)?;
    }
    match ctx.store.set_excluded(path, true) {
        Ok(()) => {}
        // The next run knows whether that is so.
        Err(e) if e.reason() == Reason::SnapshotVanished => return Ok((Fate::Changed, None)),
        Err(e) => return Err(e),
    }
    ctx.store.replace_small(&at, &text)?;
    Ok((Fate::Done, None))
}

/// Whether the note is there, and old enough by its own word.
fn is_due(
    ctx: &Context,
    note: &str,
    now: DateTime<Utc>,
    purge_after: chrono::TimeDelta,
) -> Result<bool> {
    let Some(text) = ctx.store.read_small(note, LONGEST_NOTE)? else {
        return Ok(false);
    };
    // One that cannot be read is as old as the store says, which was looked at.
    let said = serde_json::from_slice::<RemovalNote>(&text).ok();
    Ok(said.is_none_or(|n| now - n.removed_at >= purge_after))
}

fn orphans(look: &Look) -> HashSet<String> {
    let orphans = look.beside.iter().filter(|b| b.why == BesideWhy::Orphaned);
    orphans.map(|b| b.path.clone()).collect()
}

/// Deletes what is beside the snapshots: notes when what they are about is gone.
fn beside(
    ctx: &Context,
    first: &Look,
    still: Option<HashSet<String>>,
    n: usize,
    applied: &mut Applied,
    hidden: &mut Hidden,
    lockings: &Lockings,
) -> Result<()> {
    let mut todo = Vec::new();
    for (at, b) in first.beside.iter().enumerate().filter(|b| !b.1.why.keeps()) {
        let fates = || b.of.iter().map(|&i| applied.objects[i].fate);
        let goes = match b.why {
            BesideWhy::Orphaned => match still.as_ref().is_none_or(|s| s.contains(&b.path)) {
                true => Ok(()),
                false => Err(Fate::Changed),
            },
            _ if fates().all(|f| matches!(f, Some(Fate::Done | Fate::Hidden))) => Ok(()),
            _ if fates().any(|f| f == Some(Fate::Changed)) => Err(Fate::Changed),
            _ => Err(Fate::Waiting),
        };
        match goes {
            Ok(()) => todo.push(n + at),
            Err(fate) => applied.objects[n + at].fate = Some(fate),
        }
    }
    for batch in todo.chunks(BATCH) {
        let paths: Vec<String> = batch
            .iter()
            .map(|&i| applied.objects[i].path.clone())
            .collect();
        let deleted = hidden.delete(ctx, lockings, &paths)?;
        for (&i, result) in batch.iter().zip(deleted) {
            match result {
                Ok((fate, until)) => {
                    applied.objects[i].fate = Some(fate);
                    applied.objects[i].locked_until = until;
                }
                Err(e) => {
                    applied.objects[i].fate = Some(Fate::Failed);
                    applied.objects[i].error = Some(e.to_string());
                }
            }
        }
    }
    Ok(())
}

/// Gives unfinished uploads up, and purges what earlier deletions have hidden.
fn versions(
    ctx: &Context,
    applied: &mut Applied,
    hidden: &Hidden,
    lockings: &Lockings,
) -> Result<()> {
    let uploads: Vec<usize> = (0..applied.objects.len())
        .filter(|&i| {
            let o = &applied.objects[i];
            o.kind == Kind::Upload && o.decision == Decision::Delete
        })
        .collect();
    if !uploads.is_empty() {
        let unfinished = ctx.store.uploads()?;
        for i in uploads {
            let of: Vec<_> = unfinished
                .iter()
                .filter(|u| applied.objects[i].path == super::hidden::upload_path(u))
                .collect();
            let given_up: Result<Vec<()>> =
                of.into_iter().map(|u| ctx.store.abort_upload(u)).collect();
            let o = &mut applied.objects[i];
            match given_up {
                Ok(_) => o.fate = Some(Fate::Done),
                Err(e) => {
                    o.fate = Some(Fate::Failed);
                    o.error = Some(e.to_string());
                }
            }
        }
    }
    applied.objects.extend(hidden.purge(ctx, lockings)?);
    Ok(())
}
