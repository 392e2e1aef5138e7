//! The snapshots of one timeline in order, and which revisions they can restore.
//!
//! Each snapshot is cut to the revisions that belong to the timeline.

use super::{Facts, Uncounted};
use crate::backup::catalog::Catalog;
use crate::backup::chain::RevisionRange;
use crate::backup::name::Kind;
use crate::backup::timeline::{Timeline, Timelines};
use crate::mvcc::Revision;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

/// The snapshots of a timeline.
pub(super) struct TimelineSnapshots {
    /// The fulls that can be a base, in ascending order.
    pub(super) bases: Vec<BaseFull>,
    /// The uncounted fulls, in ascending order. Each may turn out to be a base of any timeline.
    pub(super) uncounted: Vec<BaseFull>,
    /// The deltas, in the order of their first revisions.
    pub(super) deltas: Vec<Delta>,
    /// For each of `deltas`, the highest last revision among that delta and all deltas before it.
    reach: Vec<Revision>,
}

/// A full that can be a base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BaseFull {
    pub(super) last: Revision,
    /// Seconds since 1970.
    pub(super) created: i64,
    /// Index in the catalog.
    pub(super) snapshot: usize,
}

/// A delta, cut to the revisions that belong to the timeline.
#[derive(Debug, Clone, Copy)]
pub(super) struct Delta {
    pub(super) start: Revision,
    pub(super) last: Revision,
    /// Seconds since 1970.
    pub(super) created: i64,
    /// Index in the catalog.
    pub(super) snapshot: usize,
}

impl TimelineSnapshots {
    pub(super) fn new(catalog: &Catalog, timeline: &Timeline) -> Self {
        let members = timeline.members.iter();
        Self::of(catalog, members.map(|m| (m.snapshot, m.until)))
    }

    /// Moves the uncounted fulls out of `bases`.
    pub(super) fn without(
        mut self,
        catalog: &Catalog,
        uncounted: &BTreeMap<usize, Uncounted>,
    ) -> Self {
        if uncounted.is_empty() {
            return self;
        }
        self.bases.retain(|b| !uncounted.contains_key(&b.snapshot));
        self.uncounted = uncounted.keys().map(|&i| base_full(catalog, i)).collect();
        self.uncounted.sort_unstable();
        self
    }

    /// The usable fulls and the excluded deltas. Excluded deltas are on no timeline; a chain of them
    /// ends at the next usable full.
    pub(super) fn of_excluded_deltas(catalog: &Catalog) -> Self {
        let is_member = |&i: &usize| {
            let s = &catalog.snapshots[i];
            s.excluded != s.name.is_full()
        };
        let members = (0..catalog.snapshots.len()).filter(is_member);
        Self::of(catalog, members.map(|i| (i, Revision(i64::MAX))))
    }

    /// Sorts snapshots. Each one counts up to a revision.
    fn of(catalog: &Catalog, members: impl Iterator<Item = (usize, Revision)>) -> Self {
        let (mut bases, mut deltas) = (Vec::new(), Vec::new());
        for (snapshot, until) in members {
            let n = &catalog.snapshots[snapshot].name;
            match n.kind {
                Kind::Full if n.last <= until => bases.push(base_full(catalog, snapshot)),
                Kind::Full => {}
                Kind::Incr => deltas.push(Delta {
                    start: n.start,
                    last: n.last.min(until),
                    created: n.created,
                    snapshot,
                }),
            }
        }
        bases.sort_unstable();
        deltas.sort_unstable_by_key(|d| (d.start, d.last, d.snapshot));
        let mut farthest = Revision(i64::MIN);
        let mut reach = Vec::with_capacity(deltas.len());
        for delta in &deltas {
            farthest = farthest.max(delta.last);
            reach.push(farthest);
        }
        TimelineSnapshots {
            bases,
            uncounted: Vec::new(),
            deltas,
            reach,
        }
    }

    /// The newest full whose time is not in the future.
    pub(super) fn newest_full(&self, facts: &Facts) -> Option<&BaseFull> {
        let mut newest_first = self.bases.iter().rev();
        newest_first.find(|b| !facts.is_future(b.snapshot))
    }

    /// The first full above a revision.
    pub(super) fn full_above(&self, revision: Revision) -> Option<&BaseFull> {
        let above = self.bases.partition_point(|b| b.last <= revision);
        self.bases.get(above)
    }

    /// The deltas that follow a full of this revision, up to the next full.
    pub(super) fn deltas_after(&self, full: Revision) -> impl Iterator<Item = usize> {
        let end = self.full_above(full).map_or(Revision(i64::MAX), |b| b.last);
        let first = self.reach.partition_point(|&reach| reach <= full);
        let deltas = self.deltas[first..].iter();
        let deltas = deltas.take_while(move |d| d.start <= end);
        deltas.filter(move |d| d.last > full).map(|d| d.snapshot)
    }

    /// The oldest revision from which deltas lead to `goal`; `goal` itself if no delta does.
    pub(super) fn oldest_start_to(&self, goal: Revision) -> Revision {
        let mut by_end: Vec<&Delta> = self.deltas.iter().collect();
        by_end.sort_unstable_by_key(|d| Reverse(d.last));
        let mut from = goal;
        for d in by_end {
            if d.last < from {
                break;
            }
            from = from.min(d.start.previous());
        }
        from
    }

    /// The revision of the oldest base that is needed to restore `goal` and everything above it.
    pub(super) fn oldest_base_needed(&self, goal: Revision) -> Revision {
        // By names this base leads to the goal without a gap.
        let leading = self.newest_base_between(self.oldest_start_to(goal), goal);
        // The content of the newest base before the goal may go beyond its name, and close a gap.
        let nearest = self.newest_base_between(Revision(i64::MIN), goal);
        match (leading, nearest) {
            (Some(a), Some(b)) => a.min(b),
            (a, b) => a.or(b).unwrap_or(goal),
        }
    }

    /// The revision of the newest base from `from` to `goal`; if there is none, that of the oldest uncounted
    /// full there, since any of these may be the base.
    fn newest_base_between(&self, from: Revision, goal: Revision) -> Option<Revision> {
        let is_between = |b: &&BaseFull| from <= b.last && b.last <= goal;
        let base = self.bases.iter().rev().find(is_between);
        let base = base.or_else(|| self.uncounted.iter().find(is_between));
        base.map(|b| b.last)
    }

    /// The revisions that can be restored with the snapshots for which `has` is true.
    pub(super) fn ranges(&self, has: &dyn Fn(usize) -> bool) -> Vec<RevisionRange> {
        self.ranges_from(&self.bases, has)
    }

    /// As [`ranges`](Self::ranges), with these bases, which are in ascending order.
    pub(super) fn ranges_from(
        &self,
        bases: &[BaseFull],
        has: &dyn Fn(usize) -> bool,
    ) -> Vec<RevisionRange> {
        let mut ranges: Vec<RevisionRange> = Vec::new();
        let mut deltas = self.deltas.iter().filter(|d| has(d.snapshot)).peekable();
        let mut farthest = Revision(-1);
        for base in bases.iter().filter(|b| has(b.snapshot)) {
            let mut reached = ranges.last().map_or(base.last, |r| r.1.max(base.last));
            loop {
                while let Some(d) = deltas.next_if(|d| d.start <= reached.next()) {
                    farthest = farthest.max(d.last);
                }
                if farthest <= reached {
                    break;
                }
                reached = farthest;
            }
            match ranges.last_mut() {
                Some(r) if base.last <= r.1.next() => r.1 = reached,
                _ => ranges.push((base.last, reached)),
            }
        }
        ranges
    }
}

fn base_full(catalog: &Catalog, i: usize) -> BaseFull {
    let name = &catalog.snapshots[i].name;
    BaseFull {
        last: name.last,
        created: name.created,
        snapshot: i,
    }
}

/// Returns the chain of a full, in the catalog's order: the full, and the deltas after it up to the next
/// full, on each of its timelines. Excluded deltas of the chain are included, since they are needed to bring
/// the chain back.
pub fn chain_of(catalog: &Catalog, timelines: &Timelines, full: usize) -> Vec<usize> {
    let last = catalog.snapshots[full].name.last;
    let excluded = TimelineSnapshots::of_excluded_deltas(catalog);
    let mut chain: HashSet<usize> = excluded.deltas_after(last).collect();
    chain.insert(full);
    for t in &timelines.all {
        let snapshots = TimelineSnapshots::new(catalog, t);
        if snapshots.bases.iter().any(|b| b.snapshot == full) {
            chain.extend(snapshots.deltas_after(last));
        }
    }
    let mut chain: Vec<usize> = chain.into_iter().collect();
    chain.sort_unstable();
    chain
}
