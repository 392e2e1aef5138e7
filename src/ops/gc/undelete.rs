//! The operation `undelete`: brings back snapshots that `gc` removed and has not purged.
//!
//! A named snapshot comes back even if somebody else excluded it; without names, only snapshots that
//! `gc` removed do. Called by `cli`.

use super::{Status, release, removal_note, take_lock};
use crate::backup::{Catalog, Snapshot};
use crate::error::{Error, Reason, Result};
use crate::ops::Context;
use crate::ops::report::{FailureFields, Report, ReportBuilder};
use crate::ops::scan::TAGS_UNREADABLE;
use crate::store::lock::LockGuard;
use schemars::JsonSchema;
use serde::Serialize;

/// The options of `undelete`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Names or paths of snapshots; with a full come the deltas after it that `gc` removed. Empty:
    /// everything that `gc` removed.
    pub names: Vec<String>,
}

/// A snapshot to bring back.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Restored {
    /// The path below the store's prefix.
    pub path: String,
    /// Whether it was brought back.
    pub done: bool,
    /// The error, if it was not.
    pub error: Option<String>,
}

/// The result of `undelete`. The fields are a contract: `docs/undelete-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// Whether anything was brought back.
    pub status: Status,
    /// The error, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// The snapshots to bring back, the oldest first.
    pub snapshots: Vec<Restored>,
}

/// Takes the lock of `gc`. If the store has no locks, adds a warning and returns `None`.
pub(super) fn keep_gc_away(ctx: &Context, warnings: &mut Vec<String>) -> Result<Option<LockGuard>> {
    let without_lock = "running without a lock: make sure that no gc runs at the same time";
    take_lock(&ctx.store, without_lock, warnings)
}

/// Returns the catalog of the backup, by names. Fails with `NoSnapshots` if it is empty.
pub(super) fn catalog(ctx: &Context) -> Result<Catalog> {
    let catalog = crate::ops::scan::by_names(ctx)?;
    match catalog.snapshots.is_empty() {
        true => Err(crate::ops::scan::no_snapshots_error(ctx, &catalog)),
        false => Ok(catalog),
    }
}

/// Returns whether a path is the snapshot that an argument names, by its path or its name.
pub(super) fn is_named(path: &str, name: &str) -> bool {
    let wanted = name.trim_start_matches('/');
    path == wanted || path.rsplit('/').next() == Some(wanted)
}

/// Returns the deltas between a full and the next one that `gc` removed: they are useless without the
/// full, and it is of little use without them.
fn removed_deltas(snapshots: &[Snapshot], full: usize) -> impl Iterator<Item = usize> {
    let full = &snapshots[full];
    let folder = |s: &'_ Snapshot| s.path.rsplit_once('/').map(|p| p.0.to_owned());
    let next_full = snapshots
        .iter()
        .filter(|s| s.name.is_full() && s.name.last > full.name.last)
        .map(|s| s.name.last)
        .min();
    let is_removed_delta = move |s: &Snapshot| {
        !s.name.is_full()
            && s.removal_noted
            && folder(s) == folder(full)
            && s.name.last > full.name.last
            && next_full.is_none_or(|next| s.name.start <= next)
    };
    (0..snapshots.len()).filter(move |&i| is_removed_delta(&snapshots[i]))
}

/// Brings snapshots back.
///
/// # Errors
/// Fails without having changed anything: with `NoSnapshots` if there is no snapshot of a given name,
/// `LockHeld`, or an error of the store. Later failures are in the report.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Outcome>> {
    let mut clock = ReportBuilder::start();
    let lock = keep_gc_away(ctx, &mut clock.warnings)?;
    let mut catalog = catalog(ctx)?;
    let mut chosen = choose(ctx, &catalog, &options.names)?;
    let paths: Vec<String> = chosen
        .iter()
        .map(|&i| catalog.snapshots[i].path.clone())
        .collect();
    let tagged = ctx.store.excluded_by_tag(&paths)?;
    for (&i, tagged) in chosen.iter().zip(tagged) {
        catalog.snapshots[i].excluded |= tagged;
    }
    if ctx.store.hides_tags() {
        clock.warnings.push(TAGS_UNREADABLE.to_owned());
    }
    let all = &catalog.snapshots;
    chosen.retain(|&i| all[i].excluded || all[i].removal_noted);
    // A full comes before its deltas: wherever the run stops, what is back has no gap.
    chosen.sort_by_key(|&i| (all[i].name.last, !all[i].name.is_full()));
    let mut snapshots = Vec::new();
    let mut ended = None;
    for &i in &chosen {
        let s = &all[i];
        if let Err(e) = ctx.store.cancel().check() {
            ended = Some(e);
        }
        let result = match &ended {
            Some(e) => Err(e.again()),
            None => bring_back(ctx, s),
        };
        snapshots.push(Restored {
            path: s.path.clone(),
            done: result.is_ok(),
            error: result.err().map(|e| e.to_string()),
        });
    }
    release(lock);
    let error = ended.or_else(|| partly_done(&snapshots));
    let outcome = Outcome {
        status: match (&error, snapshots.is_empty()) {
            (Some(_), _) => Status::Failed,
            (None, true) => Status::NothingToDo,
            (None, false) => Status::Succeeded,
        },
        error: FailureFields::from(&error),
        snapshots,
    };
    Ok(clock.report_with(outcome, error))
}

/// Returns the indexes of the snapshots to bring back, in order of creation.
fn choose(ctx: &Context, catalog: &Catalog, names: &[String]) -> Result<Vec<usize>> {
    let all = &catalog.snapshots;
    if names.is_empty() {
        return Ok((0..all.len()).filter(|&i| all[i].removal_noted).collect());
    }
    let mut chosen: Vec<usize> = Vec::new();
    for name in names {
        let named: Vec<usize> = (0..all.len())
            .filter(|&i| is_named(&all[i].path, name))
            .collect();
        if named.is_empty() {
            return Err(Reason::NoSnapshots.error(format!(
                "{} holds no snapshot {name}: see `deltafold list`; a purged snapshot cannot be brought back",
                ctx.store.url()
            )));
        }
        chosen.extend(&named);
        for i in named.into_iter().filter(|&i| all[i].name.is_full()) {
            chosen.extend(removed_deltas(all, i));
        }
    }
    chosen.sort_unstable();
    chosen.dedup();
    Ok(chosen)
}

/// Brings one snapshot back. The note goes first: without it, `gc` does not purge the snapshot even if
/// the rest fails.
fn bring_back(ctx: &Context, snapshot: &Snapshot) -> Result<()> {
    ctx.store.delete(&removal_note(&snapshot.name))?;
    ctx.store.set_excluded(&snapshot.path, false)
}

/// Returns the error of a run that could not bring back some of the snapshots.
fn partly_done(snapshots: &[Restored]) -> Option<Error> {
    let failed: Vec<&Restored> = snapshots.iter().filter(|s| !s.done).collect();
    let first = failed.first()?;
    Some(Reason::PartlyDone.error(format!(
        "{} of {} snapshots could not be brought back: {}; run again",
        failed.len(),
        snapshots.len(),
        first.error.as_deref().unwrap_or("no reason is known")
    )))
}
