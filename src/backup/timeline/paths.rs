//! Joins timelines across walls. A history that left another one shares the revisions up to that point with it.
//!
//! The point is known if contents were read. By names, timelines behind a wall share nothing with those before it.

use super::{Evidence, MOST_TIMELINES, Timeline, TimelineMember};
use crate::backup::catalog::Catalog;
use crate::backup::survey::Comparison;
use crate::backup::timeline::builder::cut_below;
use crate::error::Result;
use crate::mvcc::Revision;

/// Shares with each timeline behind a wall what it has in common with those before the wall.
///
/// # Errors
/// Fails with the errors of `evidence`.
pub(super) fn join(catalog: &Catalog, evidence: &dyn Evidence, all: &mut [Timeline]) -> Result<()> {
    for part in 1..all.len() {
        if all[part].wall == all[part - 1].wall {
            continue;
        }
        let Some((parent, left_at)) = parent(catalog, evidence, &all[..part], &all[part])? else {
            continue;
        };
        let parent = all[parent].clone();
        all[part].left = Some((parent.id.clone(), left_at.previous()));
        // A timeline of the same part that shares nothing with its first one shares nothing with the parent.
        let root = all[part].lineage.first().map(|fork| fork.0);
        for t in &mut all[part..] {
            if t.lineage.first().map(|fork| fork.0) == root {
                share(catalog, evidence, &parent, left_at, t);
            }
        }
    }
    Ok(())
}

/// Returns the timeline among `before` that `t` has left, and its first own revision: by what its oldest full that
/// was read has in common with their snapshots. Of several, the one that it has left last.
fn parent(
    catalog: &Catalog,
    evidence: &dyn Evidence,
    before: &[Timeline],
    t: &Timeline,
) -> Result<Option<(usize, Revision)>> {
    let is_read = |&i: &usize| catalog.snapshots[i].name.is_full() && evidence.has_content(i);
    let Some(full) = t.own().find(is_read) else {
        return Ok(None);
    };
    let mut found: Option<(usize, Revision)> = None;
    // A writer of the store can forge any number of timelines.
    let newest = before.len().saturating_sub(MOST_TIMELINES);
    for (nth, earlier) in before.iter().enumerate().skip(newest) {
        let mut compared = Comparison::default();
        let read = earlier.members.iter();
        for m in read.filter(|m| evidence.has_content(m.snapshot)) {
            let c = evidence.compare(m.snapshot, full)?;
            compared.add(c, m.until);
        }
        // Beyond the newest change that both hold, nothing is known to be the same.
        if let Some(left_at) = compared.common().map(Revision::next)
            && found.is_none_or(|f| f.1 < left_at)
        {
            found = Some((nth, left_at));
        }
    }
    Ok(found)
}

/// Shares with `t` what `parent` holds below `left_at`.
fn share(
    catalog: &Catalog,
    evidence: &dyn Evidence,
    parent: &Timeline,
    left_at: Revision,
    t: &mut Timeline,
) {
    // A branch between the walls may have left before its full was taken.
    let below = t.lineage.iter().skip(1).map(|fork| fork.1).chain([left_at]);
    let below = below.min().unwrap_or(left_at);
    let mut members = Vec::new();
    for m in &parent.members {
        let mut shared = TimelineMember {
            own: false,
            extends: false,
            ..*m
        };
        if cut_below(catalog, evidence, &mut shared, below) {
            members.push(shared);
        }
    }
    members.append(&mut t.members);
    members.sort_by_key(|m| m.snapshot);
    t.members = members;
    let mut lineage = parent.lineage.clone();
    lineage.retain(|fork| fork.1 < below);
    if let Some(own) = t.lineage.first_mut() {
        own.1 = left_at;
    }
    lineage.append(&mut t.lineage);
    t.lineage = lineage;
}
