//! Select: chooses the timeline, the full and the deltas that lead to the requested state.
//!
//! The choice uses a scan and the fulls that were read; nothing is read here. `open` selects
//! again if the content of a full goes beyond its name.

use crate::backup::catalog::{EXCLUDED, Wall};
use crate::backup::chain::{self, Chain, Choice, KnownBases};
use crate::backup::timeline::Timeline;
use crate::backup::{Catalog, Snapshot};
use crate::base::opt::TIMELINE;
use crate::base::time::Day;
use crate::base::time::rfc3339;
use crate::base::{flag_values, shorten};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Base, Revision};
use crate::prefix::scan::{Scan, TAGS_UNREADABLE};
use crate::prefix::set_aside;
use crate::prefix::{Context, timeline_records};
use chrono::{DateTime, Utc};
use std::collections::BTreeSet;

/// A point in a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum At {
    /// The newest revision.
    #[default]
    Newest,
    /// This revision.
    Revision(Revision),
    /// The last event at or before this time.
    Time(DateTime<Utc>),
}

impl At {
    /// Parses a revision or a time at which a span begins: `yesterday` is its midnight.
    ///
    /// # Errors
    /// A message that says what is wrong.
    pub fn since(s: &str) -> Result<Self, String> {
        Self::parse(s, Day::Begin)
    }

    /// Parses a revision or a time at which a span ends: `yesterday` is the midnight after it.
    ///
    /// # Errors
    /// As [`since`](Self::since).
    pub fn until(s: &str) -> Result<Self, String> {
        Self::parse(s, Day::End)
    }

    fn parse(s: &str, day: Day) -> Result<Self, String> {
        match s.parse() {
            Ok(r) if r > 0 => Ok(At::Revision(Revision(r))),
            Ok(r) => Err(format!("{r} is not a revision: revisions begin at 1")),
            Err(_) => flag_values::time_of_day(s, day)
                .map(At::Time)
                .map_err(|e| format!("neither a revision nor a time: {e}")),
        }
    }
}

/// The request for a state of a backup.
#[derive(Debug, Clone, Default)]
pub struct StateRequest {
    /// The point in the history.
    pub at: At,
    /// The ID of the timeline; `None` for the newest one.
    pub timeline: Option<String>,
    /// Whether a time after the newest snapshot means the newest state. Otherwise it is refused.
    pub or_newest: bool,
    /// Whether a point at which snapshots are missing means the newest known state before it. Otherwise it is refused.
    pub or_before: bool,
}

/// A delta, and the part of its revisions that is used.
#[derive(Debug, Clone)]
pub(crate) struct DeltaSlice {
    pub(crate) snapshot: Snapshot,
    /// Revisions above this one are used.
    pub(crate) after: Revision,
    /// Revisions up to this one are used.
    pub(crate) until: Revision,
}

impl DeltaSlice {
    /// Returns whether events of this revision are used.
    pub(crate) fn contains(&self, revision: Revision) -> bool {
        self.after < revision && revision <= self.until
    }
}

/// Chooses the timeline of a request: that of an ID, the one that was live at the requested time, or the newest one. It is
/// returned without damaged snapshots.
///
/// # Errors
/// `NoSuchTimeline`; `InterleavedTimelines`; `Untrusted`; the error of a damaged snapshot if the newest
/// timeline is not known without it.
pub(crate) fn timeline_of<'a>(
    ctx: &Context,
    scan: &'a Scan,
    request: &StateRequest,
) -> Result<&'a Timeline> {
    scan.refuse_untrusted(ctx)?;
    let wanted = request.timeline.as_deref();
    // Doubtful snapshots were read. A damaged one may be the one that shows a fork, or the newest.
    let mut unreadable = scan.contents.unreadable.iter();
    if let Some((_, e)) = unreadable.find(|(i, _)| scan.is_doubtful(**i))
        && wanted.is_none()
    {
        return Err(e.reason().error(format!(
            "{e}; without this snapshot the newest timeline is unknown: exclude the snapshot, or choose a {TIMELINE} that `deltafold list --deep` shows"
        )));
    }
    let catalog = &scan.catalog;
    let timeline = match (wanted, request.at) {
        (Some(id), _) => scan.timelines.by_id(id),
        // A time is a time of the world: the history that was live then answers.
        (None, At::Time(time)) => {
            let second = last_wall_before(ctx, catalog, time)?;
            scan.timelines.newest_at(catalog, second)
        }
        (None, _) => scan.timelines.newest(catalog),
    };
    let timeline = timeline.map_err(|e| scan.explain_untrusted(ctx, e))?;
    Ok(scan.intact(timeline))
}

/// Returns a time in seconds since 1970 after the walls that had been written at `time`, and before all others. The name of
/// a record may be later than that: it is behind all names, and a clock may have been ahead.
fn last_wall_before(ctx: &Context, catalog: &Catalog, time: DateTime<Utc>) -> Result<i64> {
    let mut second = time.timestamp();
    while let Some(wall) = Wall::first_after(&catalog.walls, second) {
        let record = timeline_records::read(&ctx.store, wall)?.ok();
        let written = record.and_then(|record| record.written_at());
        if written.is_none_or(|written| written > time) {
            break;
        }
        second = wall.second;
    }
    Ok(second)
}

/// Chooses a timeline as [`timeline_of`] does, and returns it with warnings.
///
/// # Errors
/// As [`timeline_of`].
pub(crate) fn choose_timeline<'a>(
    ctx: &Context,
    scan: &'a Scan,
    request: &StateRequest,
) -> Result<(&'a Timeline, Vec<String>)> {
    scan.refuse_untrusted(ctx)?;
    let mut warnings = Vec::new();
    warn_about_scan(ctx, scan, &mut warnings);
    let timeline = timeline_of(ctx, scan, request)?;
    let catalog = &scan.catalog;
    if request.timeline.is_none() {
        for wall in scan.timelines.without_full(catalog) {
            let message = format!(
                "{} says that another history begins, and no full snapshot of it was saved: snapshots from {} on are not used; {TIMELINE} {} reads across it",
                wall.path,
                rfc3339(wall.at()),
                timeline.id
            );
            ctx.marks.warn(&mut warnings, message);
        }
        if let Some(message) = other_timelines(scan, timeline, request.at) {
            ctx.marks.warn(&mut warnings, message);
        }
    }
    Ok((timeline, warnings))
}

/// Returns a warning if there are timelines besides the chosen one: which, and since when they differ.
fn other_timelines(scan: &Scan, chosen: &Timeline, target: At) -> Option<String> {
    let all = &scan.timelines.all;
    if all.len() == 1 {
        return None;
    }
    let since = match (chosen.forked_at(), &chosen.wall) {
        (Some(revision), _) => format!("it differs from revision {revision} on"),
        (None, Some(wall)) => format!("it began by {}", rfc3339(wall.at())),
        (None, None) => "the first one".to_owned(),
    };
    let role = match target {
        At::Time(_) => "the one of that time",
        _ => "the newest one",
    };
    let also = match target {
        At::Revision(revision) => {
            let others = timelines_with(scan, revision, chosen);
            if others.is_empty() {
                String::new()
            } else {
                format!(
                    "; other states of revision {revision}: {TIMELINE} {}",
                    others.join(&format!(", {TIMELINE} "))
                )
            }
        }
        _ => String::new(),
    };
    Some(format!(
        "the snapshots belong to {} timelines that fork; {role}, {}, is used ({since}){also}",
        all.len(),
        chosen.id
    ))
}

/// Returns the IDs of the timelines besides `except` that can restore a revision, by names and by what was read.
pub(crate) fn timelines_with(scan: &Scan, revision: Revision, except: &Timeline) -> Vec<String> {
    let known = scan.contents.known_bases();
    let has = |t: &&Timeline| {
        let ranges = chain::restorable(&scan.catalog, t, &known);
        t.id != except.id && ranges.iter().any(|r| (r.0..=r.1).contains(&revision))
    };
    let with = scan.timelines.all.iter().filter(has);
    with.map(|t| t.id.clone()).collect()
}

fn warn_about_scan(ctx: &Context, scan: &Scan, warnings: &mut Vec<String>) {
    if ctx.store.tags_refused() {
        ctx.marks.warn(warnings, TAGS_UNREADABLE);
    }
    let catalog = &scan.catalog;
    let misplaced: Vec<&str> = catalog.misplaced_marks().map(|(path, _)| path).collect();
    if !misplaced.is_empty() {
        let message = format!(
            "these objects exclude nothing, since a mark has its place in {EXCLUDED}/: {}",
            shorten::line(&misplaced, ", ", shorten::IN_LIST)
        );
        ctx.marks.warn(warnings, message);
    }
    if !catalog.foreign.is_empty() {
        let foreign = shorten::line(&catalog.foreign, ", ", shorten::IN_LIST);
        let message = format!("ignored, since their names are not those of snapshots: {foreign}");
        ctx.marks.warn(warnings, message);
    }
    if let Some(message) = scan.untrusted_warning() {
        ctx.marks.warn(warnings, message);
    }
    if let Some(message) = scan.timelines.warning() {
        ctx.marks.warn(warnings, message);
    }
    // These are logged when the operation has succeeded without them.
    let set_aside: BTreeSet<String> = scan
        .damaged
        .values()
        .filter_map(set_aside::warning)
        .collect();
    warnings.extend(set_aside);
    for (&i, e) in &scan.contents.unreadable {
        let message = format!("{} is ignored: {e}", catalog.snapshots[i].path);
        ctx.marks.warn(warnings, message);
    }
}

/// Chooses the chain that leads to `target`: see [`chain::choose_with_history`].
///
/// # Errors
/// As [`chain::choose_with_history`]. If a gap may be due to snapshots that could not be read, the error
/// names these.
pub(crate) fn choose_chain(
    scan: &Scan,
    timeline: &Timeline,
    target: Option<Revision>,
    history: Revision,
    known: &KnownBases,
) -> Result<Choice> {
    let choice = chain::choose_with_history(&scan.catalog, timeline, target, history, known);
    choice.map_err(|e| {
        let unreadable: Vec<&Error> = scan.contents.unreadable.values().collect();
        if e.reason() != Reason::RevisionGap || unreadable.is_empty() {
            return e;
        }
        let unread = shorten::line(&unreadable, "; ", "");
        e.reason()
            .error(format!("{e}; these snapshots could not be read: {unread}"))
    })
}

/// The full that must be opened for a choice.
pub(crate) fn full_of(choice: &Choice) -> usize {
    match choice {
        Choice::ReadFirst(full) => *full,
        Choice::Chosen(chain) => chain.base,
    }
}

/// Returns a warning about excluded snapshots that are newer than a chain.
pub(crate) fn newer_excluded_warning(catalog: &Catalog, chain: &Chain) -> Option<String> {
    let newer = |s: &&Snapshot| s.excluded && s.name.last > chain.target;
    let newer = catalog.snapshots.iter().filter(newer);
    let newer: Vec<&str> = newer.map(|s| s.path.as_str()).collect();
    (!newer.is_empty()).then(|| {
        format!(
            "excluded, although newer than revision {}: {}",
            chain.target,
            shorten::line(&newer, ", ", shorten::IN_LIST)
        )
    })
}

/// Returns the deltas of a chain, each with the revisions that no snapshot before it holds. `base` is what
/// the full of the chain holds.
pub(crate) fn delta_slices(catalog: &Catalog, chain: &Chain, base: &Base) -> Vec<DeltaSlice> {
    let mut after = base.revision;
    let mut slices = Vec::with_capacity(chain.deltas.len());
    for link in &chain.deltas {
        slices.push(DeltaSlice {
            snapshot: catalog.snapshots[link.snapshot].clone(),
            after,
            until: link.until.min(chain.target),
        });
        after = after.max(link.until);
    }
    slices
}

/// Returns all deltas of a timeline that add a revision, in order, across gaps.
pub(crate) fn all_delta_slices(catalog: &Catalog, timeline: &Timeline) -> Vec<DeltaSlice> {
    let links = chain::all_links(catalog, timeline);
    let slices = links.iter().map(|link| DeltaSlice {
        snapshot: catalog.snapshots[link.snapshot].clone(),
        after: Revision::NONE,
        until: link.until,
    });
    slices.collect()
}
