//! Bringing back what `gc` removed and has not purged yet.
//!
//! A snapshot that is named comes back whoever excluded it; all of them only where `gc` did. `cli` calls it.

use super::{Status, release, removal_note, take_lock};
use crate::backup::{Catalog, Snapshot};
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::ops::report::{FailureFields, Report, ReportBuilder};
use crate::ops::scan::TAGS_UNREADABLE;
use crate::store::lock::LockGuard;
use schemars::JsonSchema;
use serde::Serialize;

/// What to bring back.
#[derive(Debug, Clone)]
pub struct Options {
    /// Names or paths of snapshots; a full brings the deltas behind it along that `gc` removed. Empty:
    /// everything that `gc` removed.
    pub names: Vec<String>,
}

/// A snapshot that is to come back.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Restored {
    /// Below the store's prefix.
    pub path: String,
    /// Whether it is back.
    pub done: bool,
    /// Why not.
    pub error: Option<String>,
}

/// What was done. The fields are a contract: `docs/undelete-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Why, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// What was to come back, the oldest first.
    pub snapshots: Vec<Restored>,
}

/// Keeps `gc` away, as far as the store can.
pub(super) fn keep_gc_away(ctx: &Context, warnings: &mut Vec<String>) -> Result<Option<LockGuard>> {
    let without = "without a lock: make sure that no gc runs at the same time";
    take_lock(&ctx.store, without, warnings)
}

/// What the prefix holds, by names.
pub(super) fn catalog(ctx: &Context) -> Result<Catalog> {
    let catalog = crate::ops::scan::by_names(ctx)?;
    match catalog.snapshots.is_empty() {
        true => Err(crate::ops::scan::no_snapshots_error(ctx, &catalog)),
        false => Ok(catalog),
    }
}

/// Whether a snapshot is the one that a flag names.
pub(super) fn is_named(path: &str, name: &str) -> bool {
    let wanted = name.trim_start_matches('/');
    path == wanted || path.rsplit('/').next() == Some(wanted)
}

/// The deltas that `gc` removed behind a full: they are of no use without it, and it is of little use without them.
fn removed_behind(all: &[Snapshot], full: usize) -> impl Iterator<Item = usize> {
    let full = &all[full];
    let folder = |s: &'_ Snapshot| s.path.rsplit_once('/').map(|p| p.0.to_owned());
    let newer = |s: &&Snapshot| s.name.last > full.name.last;
    let fulls = all.iter().filter(newer).filter(|s| s.name.is_full());
    let next = fulls.map(|s| s.name.last).min();
    (0..all.len()).filter(move |&i| {
        let d = &all[i];
        !d.name.is_full()
            && d.removal_noted
            && folder(d) == folder(full)
            && d.name.last > full.name.last
            && next.is_none_or(|n| d.name.start <= n)
    })
}

/// Brings snapshots back.
///
/// # Errors
/// Where nothing was done: `NoSnapshots` where a name is nobody's; the store's; `LockHeld`.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Outcome>> {
    let mut clock = ReportBuilder::start();
    let held = keep_gc_away(ctx, &mut clock.warnings)?;
    let mut catalog = catalog(ctx)?;
    let all = &catalog.snapshots;
    let mut wanted: Vec<usize> = Vec::new();
    for name in &options.names {
        let named: Vec<usize> = (0..all.len())
            .filter(|&i| is_named(&all[i].path, name))
            .collect();
        if named.is_empty() {
            return Err(Reason::NoSnapshots.error(format!(
                "{} holds no snapshot {name}: see `deltafold list`; what was purged cannot be brought back",
                ctx.store.url()
            )));
        }
        wanted.extend(&named);
        for i in named.into_iter().filter(|&i| all[i].name.is_full()) {
            wanted.extend(removed_behind(all, i));
        }
    }
    if options.names.is_empty() {
        wanted = (0..all.len()).filter(|&i| all[i].removal_noted).collect();
    }
    wanted.sort_unstable();
    wanted.dedup();
    let paths: Vec<String> = wanted.iter().map(|&i| all[i].path.clone()).collect();
    let tagged = ctx.store.excluded_by_tag(&paths)?;
    for (&i, tagged) in wanted.iter().zip(tagged) {
        catalog.snapshots[i].excluded |= tagged;
    }
    if ctx.store.hides_tags() {
        clock.warnings.push(TAGS_UNREADABLE.to_owned());
    }
    let all = &catalog.snapshots;
    wanted.retain(|&i| all[i].excluded || all[i].removal_noted);
    // The full first, then what stands on it: stopped anywhere, what is back has no hole.
    wanted.sort_by_key(|&i| (all[i].name.last, !all[i].name.is_full()));
    let mut snapshots = Vec::new();
    let mut ended = None;
    for &i in &wanted {
        let s = &all[i];
        if let Err(e) = ctx.store.cancel().check() {
            ended = Some(e);
        }
        let result = match &ended {
            Some(e) => Err(e.again()),
            // Without the note it is not purged, whatever comes next.
            None => {
                let deleted = ctx.store.delete(&removal_note(&s.name));
                deleted.and_then(|()| ctx.store.set_excluded(&s.path, false))
            }
        };
        snapshots.push(Restored {
            path: s.path.clone(),
            done: result.is_ok(),
            error: result.err().map(|e| e.to_string()),
        });
    }
    release(held);
    let failed: Vec<&Restored> = snapshots.iter().filter(|s| !s.done).collect();
    let error = ended.or_else(|| {
        let first = failed.first()?;
        Some(Reason::PartlyDone.error(format!(
            "{} of {} snapshots could not be brought back: {}; run again",
            failed.len(),
            snapshots.len(),
            first.error.as_deref().unwrap_or("no reason is known")
        )))
    });
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
