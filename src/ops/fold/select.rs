//! Select: the timeline, the full and the deltas that lead to the state that is asked for.
//!
//! Decides by a scan and by what is known of fulls. `open` opens what is selected, and asks again if a full holds more
//! than its name says.

use crate::backup::chain::{self, Chain, Choice, KnownBases};
use crate::backup::timeline::Timeline;
use crate::backup::{Catalog, Snapshot};
use crate::base::shorten;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Base, Revision};
use crate::ops::scan::{Scan, TAGS_UNREADABLE};
use crate::ops::tags::{Ask, deciding_of};
use crate::ops::{Context, warn};
use chrono::{DateTime, Utc};

/// A point of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Target {
    /// The newest revision there is.
    #[default]
    Newest,
    /// A revision.
    Revision(Revision),
    /// The last event whose time is not after this.
    Time(DateTime<Utc>),
}

/// Which state is wanted.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// As of when.
    pub target: Target,
    /// The timeline's ID; the newest where `None`.
    pub timeline: Option<String>,
}

/// A delta and the revisions that are taken of it.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) snapshot: Snapshot,
    /// Later than this one.
    pub(crate) after: Revision,
    /// And not later than this one.
    pub(crate) until: Revision,
}

/// Selects the timeline of that ID, or the newest if `None`. Gives what an operator should know, too.
///
/// # Errors
/// `NoSuchTimeline`, `InterleavedTimelines`; that of a damaged snapshot without which the histories
/// cannot be told apart.
pub(crate) fn choose_timeline<'a>(
    ctx: &Context,
    scan: &'a Scan,
    wanted: Option<&str>,
) -> Result<(&'a Timeline, Vec<String>)> {
    scan.refuse_untrusted(ctx)?;
    let mut warnings = Vec::new();
    warn_about_scan(ctx, scan, &mut warnings);
    // If names leave doubt, a damaged snapshot may be the very one that tells the histories apart, or the newest.
    if let Some(e) = scan.contents.unreadable.values().next()
        && wanted.is_none()
    {
        return Err(e.reason().error(format!(
            "{e}; the histories cannot be told apart without it: exclude it, or choose with --timeline after `deltafold list --deep`"
        )));
    }
    let timeline = match wanted {
        Some(id) => scan.timelines.by_id(id),
        None => scan.timelines.newest(&scan.catalog),
    };
    let timeline = timeline.map_err(|e| scan.explain_untrusted(ctx, e))?;
    if scan.timelines.all.len() > 1 && wanted.is_none() {
        let message = format!(
            "the snapshots tell {} histories that fork; the newest, timeline {}, was taken (it has its own history from revision {} on)",
            scan.timelines.all.len(),
            timeline.id,
            timeline.forked_at().unwrap_or(Revision(1))
        );
        warn(&mut warnings, message);
    }
    Ok((timeline, warnings))
}

fn warn_about_scan(ctx: &Context, scan: &Scan, warnings: &mut Vec<String>) {
    if ctx.store.hides_tags() {
        warn(warnings, TAGS_UNREADABLE);
    }
    let catalog = &scan.catalog;
    if !catalog.foreign.is_empty() {
        let foreign = shorten::line(&catalog.foreign, ", ", shorten::IN_LIST);
        let message = format!("left alone, for their names are not those of snapshots: {foreign}");
        warn(warnings, message);
    }
    if let Some(message) = scan.untrusted_warning() {
        warn(warnings, message);
    }
    for (&i, e) in &scan.contents.unreadable {
        let message = format!("{} is not used: {e}", catalog.snapshots[i].path);
        warn(warnings, message);
    }
}

/// The chain that leads to `target`, or the full whose content decides: as [`chain::choose_with_history`].
///
/// # Errors
/// Those of [`chain::choose_with_history`]. A gap may be there because a snapshot could not be read: the error says so.
pub(super) fn choose_chain(
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
        let not_used = shorten::line(&unreadable, "; ", "");
        e.reason().error(format!("{e}; not used were: {not_used}"))
    })
}

/// The full that a choice needs open.
pub(super) fn full_of(choice: &Choice) -> usize {
    match choice {
        Choice::Look(full) => *full,
        Choice::Found(chain) => chain.base,
    }
}

/// The snapshots whose tags must be known before a choice is carried out.
pub(super) fn rests_on(choice: &Choice) -> Vec<usize> {
    match choice {
        Choice::Look(full) => vec![*full],
        Choice::Found(chain) => deciding_of(chain, Ask::Newest).collect(),
    }
}

/// What is to be said of excluded snapshots that are newer than all that is selected.
pub(super) fn left_out(catalog: &Catalog, chain: &Chain) -> Option<String> {
    let newer = |s: &&Snapshot| s.excluded && s.name.last > chain.target;
    let newer = catalog.snapshots.iter().filter(newer);
    let newer: Vec<&str> = newer.map(|s| s.path.as_str()).collect();
    (!newer.is_empty()).then(|| {
        format!(
            "excluded, though newer than revision {}: {}",
            chain.target,
            shorten::line(&newer, ", ", shorten::IN_LIST)
        )
    })
}

/// The deltas of a chain on a full, each with the revisions that no snapshot before it holds.
pub(super) fn steps(catalog: &Catalog, chain: &Chain, base: &Base) -> Vec<Step> {
    let mut done = base.revision;
    let step = |link: &chain::Link| {
        let after = done;
        done = done.max(link.until);
        Step {
            snapshot: catalog.snapshots[link.snapshot].clone(),
            after,
            until: link.until.min(chain.target),
        }
    };
    chain.deltas.iter().map(step).collect()
}

/// All deltas of a timeline that add a revision, in order, across gaps.
pub(crate) fn all_steps(catalog: &Catalog, timeline: &Timeline) -> Vec<Step> {
    let links = chain::all_links(catalog, timeline);
    let steps = links.iter().map(|link| Step {
        snapshot: catalog.snapshots[link.snapshot].clone(),
        after: Revision::NONE,
        until: link.until,
    });
    steps.collect()
}
