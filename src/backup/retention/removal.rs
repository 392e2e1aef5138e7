//! The order in which snapshots are removed, and what a plan would lose.

use super::time_at;
use super::timeline_snapshots::TimelineSnapshots;
use crate::backup::catalog::Catalog;
use crate::backup::timeline::Timelines;
use crate::mvcc::Revision;
use chrono::{DateTime, Utc};
use std::collections::HashSet;

/// A plan would lower the newest restorable revision of a timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewestLost {
    /// The timeline's ID.
    pub timeline: String,
    /// The newest restorable revision before the plan, and when the snapshot that holds it was created.
    pub before: (Revision, DateTime<Utc>),
    /// The same after the plan; `None` if nothing can be restored any more.
    pub after: Option<(Revision, DateTime<Utc>)>,
}

/// Returns the loss if a plan lowers the newest restorable revision of the newest timeline. If no timeline is
/// the newest, every timeline is checked.
///
/// `stays` tells which snapshots the plan leaves.
pub fn newest_lost(
    catalog: &Catalog,
    timelines: &Timelines,
    stays: &dyn Fn(usize) -> bool,
) -> Option<NewestLost> {
    let newest = timelines.newest(catalog).ok();
    for timeline in &timelines.all {
        if newest.is_some_and(|newest| newest.id != timeline.id) {
            continue;
        }
        let snapshots = TimelineSnapshots::new(catalog, timeline);
        let Some(before) = newest_restorable(&snapshots, &|_| true) else {
            continue;
        };
        let after = newest_restorable(&snapshots, stays);
        if after.is_none_or(|after| after.0 < before.0) {
            return Some(NewestLost {
                timeline: timeline.id.clone(),
                before,
                after,
            });
        }
    }
    None
}

/// The newest revision that can be restored with the snapshots for which `has` is true, and when the snapshot
/// that holds it was created.
fn newest_restorable(
    snapshots: &TimelineSnapshots,
    has: &dyn Fn(usize) -> bool,
) -> Option<(Revision, DateTime<Utc>)> {
    let newest = snapshots.ranges(has).last()?.1;
    let bases = snapshots.bases.iter();
    let bases = bases.filter(|b| has(b.snapshot) && b.last == newest);
    let deltas = snapshots.deltas.iter();
    let deltas = deltas.filter(|d| has(d.snapshot) && d.last == newest);
    let created = bases.map(|b| b.created).chain(deltas.map(|d| d.created));
    Some((newest, time_at(created.min()?)))
}

/// Splits the snapshots of a plan (`goes`) into chains. Each chain is to be removed in its order, the newest
/// delta first and the full last: if the removal is interrupted, the rest of the chain has no gap.
pub fn removal_chains(catalog: &Catalog, goes: &HashSet<usize>) -> Vec<Vec<usize>> {
    let name = |i: usize| &catalog.snapshots[i].name;
    let folder = |i: usize| {
        let path = &catalog.snapshots[i].path;
        path.rsplit_once('/').map_or("", |p| p.0)
    };
    // A full that stays also ends the chain before it.
    let mut order: Vec<usize> = (0..catalog.snapshots.len())
        .filter(|i| goes.contains(i) || name(*i).is_full())
        .collect();
    order.sort_unstable_by_key(|&i| {
        let n = name(i);
        (folder(i), n.last, n.is_full(), n.created, i)
    });
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut last_folder = None;
    for i in order {
        if name(i).is_full() || last_folder != Some(folder(i)) {
            chains.push(Vec::new());
        }
        last_folder = Some(folder(i));
        if let Some(chain) = chains.last_mut().filter(|_| goes.contains(&i)) {
            chain.push(i);
        }
    }
    chains.retain(|c| !c.is_empty());
    for chain in &mut chains {
        chain.reverse();
    }
    chains
}
