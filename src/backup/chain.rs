//! Chains: chooses the full and the deltas after it that lead to a revision.
//!
//! These are pure functions of the catalog, a timeline and the revisions in fulls that were read. Deltas may overlap,
//! as those of two snapshotters do: any deltas will do that together cover every revision.

use crate::backup::catalog::Catalog;
use crate::backup::timeline::{Timeline, TimelineMember};
use crate::base::opt::REVISION;
use crate::base::shorten;
use crate::error::{Reason, Result};
use crate::mvcc::{Base, Revision};
use std::collections::HashMap;

/// The revisions of fulls that were read, by index in the catalog.
pub type KnownBases = HashMap<usize, Base>;

/// A full and the deltas to fold into it, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The index of the full in the catalog.
    pub base: usize,
    /// The deltas.
    pub deltas: Vec<Link>,
    /// The revision that the chain leads to.
    pub target: Revision,
}

impl Chain {
    /// Returns the indexes of the deltas and then of the full.
    pub fn snapshots(&self) -> impl Iterator<Item = usize> + '_ {
        let deltas = self.deltas.iter().map(|l| l.snapshot);
        deltas.chain([self.base])
    }
}

/// A delta of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Index in the catalog.
    pub snapshot: usize,
    /// The last revision of the delta that belongs to the timeline.
    pub until: Revision,
}

/// The result of choosing a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// This chain.
    Chosen(Chain),
    /// The choice depends on the content of this full, which may go beyond its name: read it and choose
    /// again.
    ReadFirst(usize),
}

/// The revisions from the first to the last one, both included.
pub type RevisionRange = (Revision, Revision);

/// Chooses the chain with the newest base that leads to `target`; without a target, to the newest revision of
/// the timeline.
///
/// # Errors
/// `NoSnapshots` if there is no full; `OutOfRange` if no snapshot covers the target; `RevisionGap`, with the
/// missing revisions, if deltas are missing on the way.
pub fn choose(
    catalog: &Catalog,
    timeline: &Timeline,
    target: Option<Revision>,
    known: &KnownBases,
) -> Result<Choice> {
    choose_with_history(catalog, timeline, target, Revision(i64::MAX), known)
}

/// Chooses a chain as [`choose`] does, with a base that holds the whole history above `history`. A full that
/// was compacted past it is skipped.
///
/// # Errors
/// As [`choose`]; `OutOfRange` also if every full was compacted past `history`.
pub fn choose_with_history(
    catalog: &Catalog,
    timeline: &Timeline,
    target: Option<Revision>,
    history: Revision,
    known: &KnownBases,
) -> Result<Choice> {
    let bases = bases(catalog, timeline);
    if bases.is_empty() {
        return Err(
            Reason::NoSnapshots.error("there is no full snapshot to start from: take one first")
        );
    }
    let end_of = |m: &TimelineMember| newest_in(catalog, known, m.snapshot).min(m.until);
    let newest = timeline.members.iter().map(end_of).max();
    let newest = newest.unwrap_or_default();
    let goal = target.unwrap_or(newest);
    let name = |i: usize| &catalog.snapshots[i].name;
    let deltas = Deltas::of(catalog, timeline);
    let mut gap = None;
    for &base in bases.iter().filter(|&&b| name(b).last <= goal) {
        // A full that goes beyond its name may have been compacted past the goal.
        let lacks_history = |b: &Base| b.first_revision() > goal || b.compact_revision > history;
        if known.get(&base).is_some_and(lacks_history) {
            continue;
        }
        let at = newest_in(catalog, known, base);
        if deltas.end(at) >= goal {
            return Ok(Choice::Chosen(Chain {
                base,
                deltas: deltas.walk(at, goal),
                target: goal,
            }));
        }
        // The content of this full may go beyond its name and close the gap. Only the newest full can go
        // beyond the newest revision of all names, so for that goal the others need not be read.
        if !known.contains_key(&base) && (goal <= newest || base == bases[0]) {
            return Ok(Choice::ReadFirst(base));
        }
        gap.get_or_insert(at);
    }
    // A full that ends after the goal may still hold the goal in its history.
    for &base in bases.iter().rev().filter(|&&b| name(b).last > goal) {
        match known.get(&base) {
            None => return Ok(Choice::ReadFirst(base)),
            Some(b) if b.first_revision() <= goal && b.compact_revision <= history => {
                return Ok(Choice::Chosen(Chain {
                    base,
                    deltas: Vec::new(),
                    target: goal,
                }));
            }
            Some(_) => {}
        }
    }
    if let Some(from) = gap.filter(|_| goal <= newest) {
        return Err(Reason::RevisionGap.error(format!(
            "the snapshots between revision {from} and {goal} have a gap: missing are {}; take a full snapshot, or choose a {REVISION} up to {}",
            show_ranges(&deltas.missing(from, goal)),
            deltas.end(from)
        )));
    }
    Err(Reason::OutOfRange.error(format!(
        "no snapshot of timeline {} covers revision {goal}: choose a {REVISION} among those covered ({})",
        timeline.id,
        show_ranges(&restorable(catalog, timeline, known))
    )))
}

/// The newest revision of a snapshot: by its content if it was read, otherwise by its name.
fn newest_in(catalog: &Catalog, known: &KnownBases, i: usize) -> Revision {
    let named = catalog.snapshots[i].name.last;
    known.get(&i).map_or(named, |b| b.revision.max(named))
}

/// Returns the fulls of a timeline that can be a base, newest first. A full that ends above a later fork
/// cannot.
pub fn bases(catalog: &Catalog, timeline: &Timeline) -> Vec<usize> {
    let mut bases: Vec<usize> = timeline
        .members
        .iter()
        .map(|m| (m, &catalog.snapshots[m.snapshot].name))
        .filter(|(m, n)| n.is_full() && n.last <= m.until)
        .map(|(m, _)| m.snapshot)
        .collect();
    bases.sort_by_key(|&i| {
        let n = &catalog.snapshots[i].name;
        std::cmp::Reverse((n.last, n.created, i))
    });
    bases
}

/// The deltas of a timeline, sorted for searches.
struct Deltas {
    /// The first revisions in ascending order.
    starts: Vec<Revision>,
    /// For each of `starts`, the delta that reaches farthest among those that start there or before; if
    /// several reach equally far, the one that was created last.
    farthest: Vec<Link>,
    /// For each of `farthest`, the last revision to which it and the deltas after it lead.
    ends: Vec<Revision>,
}

impl Deltas {
    fn of(catalog: &Catalog, timeline: &Timeline) -> Self {
        let mut all: Vec<(Revision, Revision, i64, usize)> = timeline
            .members
            .iter()
            .map(|m| (m, &catalog.snapshots[m.snapshot].name))
            .filter(|(_, n)| !n.is_full())
            .map(|(m, n)| (n.start, n.last.min(m.until), n.created, m.snapshot))
            .collect();
        all.sort_unstable();
        let starts = all.iter().map(|d| d.0).collect();
        let mut best: Option<(Revision, i64, usize)> = None;
        let farthest = all.into_iter().map(|(_, last, created, snapshot)| {
            let delta = (last, created, snapshot);
            let (until, _, snapshot) = *best.insert(best.map_or(delta, |b| b.max(delta)));
            Link { snapshot, until }
        });
        let farthest: Vec<Link> = farthest.collect();
        let mut deltas = Deltas {
            starts,
            ends: farthest.iter().map(|link| link.until).collect(),
            farthest,
        };
        for i in (0..deltas.ends.len()).rev() {
            deltas.ends[i] = deltas.end(deltas.farthest[i].until);
        }
        deltas
    }

    /// Returns the delta that leads on from `at`, as its index in `farthest`.
    fn next(&self, at: Revision) -> Option<usize> {
        let started = self.starts.partition_point(|&start| start <= at.next());
        let last = started.checked_sub(1)?;
        (self.farthest[last].until > at).then_some(last)
    }

    /// Returns the last revision to which deltas lead from `at`.
    fn end(&self, at: Revision) -> Revision {
        self.next(at).map_or(at, |i| self.ends[i])
    }

    /// Returns the deltas that lead from `at` to `goal`, or as far as deltas lead. Each is the one that
    /// reaches farthest.
    fn walk(&self, at: Revision, goal: Revision) -> Vec<Link> {
        let (mut links, mut reached) = (Vec::new(), at);
        while reached < goal
            && let Some(i) = self.next(reached)
        {
            links.push(self.farthest[i]);
            reached = self.farthest[i].until;
        }
        links
    }

    /// Returns the first revision of the next delta that starts after `at`.
    fn first_start_after(&self, at: Revision) -> Option<Revision> {
        let started = self.starts.partition_point(|&start| start <= at);
        self.starts.get(started).copied()
    }

    /// Returns the revisions above `from` up to `goal` that no delta holds.
    fn missing(&self, from: Revision, goal: Revision) -> Vec<RevisionRange> {
        let (mut gaps, mut at) = (Vec::new(), from);
        while at < goal {
            let reached = self.end(at);
            if reached >= goal {
                break;
            }
            let next = self.first_start_after(reached.next());
            let last = next.map_or(goal, |start| start.previous().min(goal));
            gaps.push((reached.next(), last));
            at = last;
        }
        gaps
    }
}

/// Returns all deltas of a timeline that add a revision, in order, across gaps.
pub fn all_links(catalog: &Catalog, timeline: &Timeline) -> Vec<Link> {
    let deltas = Deltas::of(catalog, timeline);
    let (mut links, mut reached) = (Vec::new(), Revision::NONE);
    while let Some(start) = deltas.first_start_after(reached) {
        let from = reached.max(start.previous());
        links.extend(deltas.walk(from, Revision(i64::MAX)));
        // A delta whose part on this timeline is empty must not stop the loop.
        reached = deltas.end(from).max(start);
    }
    links
}

/// Returns the revisions above `from` up to `goal` that no delta holds.
pub fn missing(
    catalog: &Catalog,
    timeline: &Timeline,
    from: Revision,
    goal: Revision,
) -> Vec<RevisionRange> {
    Deltas::of(catalog, timeline).missing(from, goal)
}

/// Returns the revisions of a timeline that can be restored, in ascending order.
pub fn restorable(
    catalog: &Catalog,
    timeline: &Timeline,
    known: &KnownBases,
) -> Vec<RevisionRange> {
    let deltas = Deltas::of(catalog, timeline);
    let mut ranges: Vec<RevisionRange> = Vec::new();
    for base in bases(catalog, timeline).into_iter().rev() {
        let at = newest_in(catalog, known, base);
        // The full may have been compacted past the revision of its name.
        let mut first = known.get(&base).map_or(at, Base::first_revision);
        // From a revision within the last range, deltas lead to the end of that range.
        let mut last = match ranges.last() {
            Some(r) if at <= r.1 => r.1,
            _ => deltas.end(at),
        };
        // A full with a long history may close the gaps between several ranges.
        while let Some(r) = ranges.pop_if(|r| first <= r.1.next()) {
            first = first.min(r.0);
            last = last.max(r.1);
        }
        ranges.push((first, last));
    }
    ranges
}

/// A full of a timeline, and the deltas after it up to the next full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainSpan {
    /// The index of the full in the catalog.
    pub base: usize,
    /// The deltas that lead on from it, in order.
    pub deltas: Vec<Link>,
    /// The last revision to which they lead.
    pub reached: Revision,
    /// The index of the next full, and its newest revision.
    pub next: Option<(usize, Revision)>,
    /// The revisions above `reached` that are missing although later deltas exist.
    pub missing: Vec<RevisionRange>,
}

/// Returns each full of a timeline with the deltas after it up to the next full, the oldest first.
pub fn spans(catalog: &Catalog, timeline: &Timeline, known: &KnownBases) -> Vec<ChainSpan> {
    let created = |i: usize| catalog.snapshots[i].name.created;
    let bases = bases(catalog, timeline).into_iter();
    let bases = bases.map(|i| (newest_in(catalog, known, i), created(i), i));
    let mut bases: Vec<(Revision, i64, usize)> = bases.collect();
    bases.sort_unstable();
    let last_of = |m: &TimelineMember| catalog.snapshots[m.snapshot].name.last.min(m.until);
    let end = timeline.members.iter().map(last_of).max();
    let all = Deltas::of(catalog, timeline);
    let mut spans = Vec::new();
    for (n, &(at, _, base)) in bases.iter().enumerate() {
        let next = bases.get(n + 1).map(|&(holds, _, i)| (i, holds));
        let goal = next.map_or(Revision(i64::MAX), |n| n.1);
        let deltas = all.walk(at, goal);
        let reached = deltas.last().map_or(at, |link| link.until);
        // The end of the timeline is no gap.
        let until = goal.min(end.unwrap_or(reached).max(reached));
        let mut missing = all.missing(reached, until);
        let has_later_delta = |gap: &RevisionRange| {
            let next = all.first_start_after(gap.1);
            next.is_some_and(|start| start <= until)
        };
        missing.retain(has_later_delta);
        spans.push(ChainSpan {
            base,
            deltas,
            reached,
            next,
            missing,
        });
    }
    spans
}

/// Returns the deltas of a timeline to which no full leads, since all fulls are newer.
pub fn without_base(catalog: &Catalog, timeline: &Timeline, known: &KnownBases) -> Vec<usize> {
    // A full with history covers the deltas before it.
    let first_of = |i: usize| {
        let named = catalog.snapshots[i].name.last;
        let first = known.get(&i).map(Base::first_revision);
        first.map_or(named, |first| first.min(named))
    };
    let bases = bases(catalog, timeline).into_iter();
    let first = bases.map(first_of).min();
    let has_no_base = |m: &&TimelineMember| {
        let name = &catalog.snapshots[m.snapshot].name;
        let last = name.last.min(m.until);
        let is_below = |first: Revision| name.start < first && last <= first;
        !name.is_full() && first.is_none_or(is_below)
    };
    timeline
        .members
        .iter()
        .filter(has_no_base)
        .map(|m| m.snapshot)
        .collect()
}

/// Returns ranges as text: `5 to 9, 12`. If there are many, only some are shown.
pub fn show_ranges(ranges: &[RevisionRange]) -> String {
    let show = |&(a, b): &RevisionRange| {
        if a == b {
            a.to_string()
        } else {
            format!("{a} to {b}")
        }
    };
    let shown: Vec<String> = ranges.iter().map(show).collect();
    shorten::line(&shown, ", ", "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::timeline::{NamesOnly, Timelines};

    fn backup(names: &[&str]) -> (Catalog, Timeline) {
        let catalog = Catalog::of_names(names);
        let timeline = Timelines::build(&catalog, &NamesOnly)
            .unwrap()
            .all
            .remove(0);
        (catalog, timeline)
    }

    fn chosen(b: &(Catalog, Timeline), target: Option<i64>, known: &KnownBases) -> Vec<String> {
        match choose(&b.0, &b.1, target.map(Revision), known).unwrap() {
            Choice::Chosen(c) => std::iter::once(c.base)
                .chain(c.deltas.iter().map(|l| l.snapshot))
                .map(|i| b.0.snapshots[i].name.to_string())
                .collect(),
            Choice::ReadFirst(i) => vec![format!("read {}", b.0.snapshots[i].name)],
        }
    }

    fn base(revision: i64, compact: i64) -> Base {
        Base {
            revision: Revision(revision),
            compact_revision: Revision(compact),
            compaction_finished: true,
            metadata_revision: Revision(revision),
        }
    }

    #[test]
    fn a_full_that_was_compacted_too_far_is_skipped() {
        let b = backup(&[
            "Full-00000000-00000010-1790000000",
            "Incr-00000011-00000020-1790000001",
            "Full-00000000-00000020-1790000002",
            "Incr-00000021-00000030-1790000003",
        ]);
        let at = |history: i64, known: &KnownBases| {
            choose_with_history(&b.0, &b.1, Some(Revision(30)), Revision(history), known)
        };
        let base_of = |choice| match choice {
            Ok(Choice::Chosen(chain)) => Some(chain.base),
            _ => None,
        };
        // Index 2 is the newer full.
        let mut known = KnownBases::from([(2, base(20, 20))]);
        assert_eq!(base_of(at(20, &known)), Some(2));
        assert_eq!(base_of(at(19, &known)), Some(0));
        known.insert(0, base(10, 5));
        assert_eq!(base_of(at(5, &known)), Some(0));
        let e = at(4, &known).unwrap_err();
        assert_eq!(e.reason(), Reason::OutOfRange);
        assert_eq!(base_of(choose(&b.0, &b.1, None, &known)), Some(2));
    }

    /// A random backup of overlapping deltas, with gaps and forks.
    fn random_backup(rng: &mut fastrand::Rng) -> (Catalog, Timeline) {
        let (mut names, mut at) = (Vec::new(), 0);
        for _ in 0..rng.usize(1..25) {
            at += rng.i64(0..8);
            let last = at + rng.i64(0..10);
            let created = 100 + at + rng.i64(0..3);
            names.push(match rng.u8(..5) {
                0 => format!("Full-00000000-{last:08}-{created}"),
                _ => format!("Incr-{:08}-{:08}-{created}", at + 1, last + 1),
            });
        }
        names.sort();
        names.dedup();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (catalog, mut timeline) = backup(&names);
        for member in &mut timeline.members {
            if rng.u8(..6) == 0 {
                member.until = Revision(rng.i64(1..60));
            }
        }
        (catalog, timeline)
    }

    /// The delta that leads on from `at`, found by a scan of all deltas.
    fn next_of_all(b: &(Catalog, Timeline), at: Revision) -> Option<Link> {
        let name = |m: &TimelineMember| &b.0.snapshots[m.snapshot].name;
        let deltas = b.1.members.iter().filter(|m| !name(m).is_full());
        let leading = deltas.filter(|m| name(m).start <= at.next());
        let last = |m: &&TimelineMember| name(m).last.min(m.until);
        let best = leading.max_by_key(|m| (last(m), name(m).created, m.snapshot));
        best.filter(|m| last(m) > at).map(|m| Link {
            snapshot: m.snapshot,
            until: last(&m),
        })
    }

    #[test]
    fn searches_find_what_a_scan_of_all_deltas_finds() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for _ in 0..crate::rounds(1_000, 50_000) {
            let b = random_backup(&mut rng);
            let deltas = Deltas::of(&b.0, &b.1);
            let end = 200;
            let (from, goal) = (Revision(rng.i64(0..end)), Revision(rng.i64(0..end)));
            let (mut links, mut at) = (Vec::new(), from);
            while at < goal
                && let Some(link) = next_of_all(&b, at)
            {
                at = link.until;
                links.push(link);
            }
            assert_eq!(deltas.walk(from, goal), links, "{from} {goal} {b:?}");
            let mut farthest = from;
            while let Some(link) = next_of_all(&b, farthest) {
                farthest = link.until;
            }
            assert_eq!(deltas.end(from), farthest, "{from} {b:?}");

            // All links across gaps, found revision by revision.
            let (mut links, mut at) = (Vec::new(), Revision(-1));
            while at < Revision(end) {
                match next_of_all(&b, at) {
                    Some(link) => {
                        at = link.until;
                        links.push(link);
                    }
                    None => at = at.next(),
                }
            }
            assert_eq!(all_links(&b.0, &b.1), links, "{b:?}");
            let holds = |r: i64| {
                let r = Revision(r);
                b.1.members.iter().any(|m| {
                    let n = &b.0.snapshots[m.snapshot].name;
                    !n.is_full() && n.start <= r && r <= n.last.min(m.until)
                })
            };
            let lacks = |from: i64, goal: i64| (from + 1..=goal).filter(|&r| !holds(r));
            let all = |ranges: &[RevisionRange]| -> Vec<i64> {
                ranges.iter().flat_map(|r| r.0.0..=r.1.0).collect()
            };
            let holes = missing(&b.0, &b.1, from, goal);
            let expected: Vec<i64> = lacks(from.0, goal.0).collect();
            assert_eq!(all(&holes), expected, "{from} {goal} {b:?}");

            let ends = |m: &TimelineMember| b.0.snapshots[m.snapshot].name.last.min(m.until);
            let end = b.1.members.iter().map(ends).max().unwrap();
            for span in spans(&b.0, &b.1, &KnownBases::new()) {
                let until = end.max(span.reached);
                let until = span.next.map_or(until, |next| next.1.min(until));
                let starts = |m: &TimelineMember| {
                    Some(&b.0.snapshots[m.snapshot].name)
                        .filter(|n| !n.is_full() && n.start <= until)
                        .map(|n| n.start.0)
                };
                // A gap counts only before the last delta that starts up to the next full.
                let last = b.1.members.iter().filter_map(starts).max().unwrap_or(0);
                let expected: Vec<i64> = lacks(span.reached.0, last - 1).collect();
                assert_eq!(all(&span.missing), expected, "{span:?} {b:?}");
            }
        }
    }

    #[test]
    fn a_chain_may_cross_between_overlapping_streams() {
        let b = backup(&[
            "Full-00000000-00000010-100",
            "Incr-00000011-00000020-110",
            "Incr-00000015-00000025-111",
            "Incr-00000021-00000024-120",
            "Incr-00000026-00000030-130",
        ]);
        assert_eq!(
            chosen(&b, None, &KnownBases::new()),
            [
                "Full-00000000-00000010-100",
                "Incr-00000011-00000020-110",
                "Incr-00000015-00000025-111",
                "Incr-00000026-00000030-130"
            ]
        );
        assert_eq!(chosen(&b, Some(12), &KnownBases::new()).len(), 2);
        assert_eq!(
            chosen(&b, Some(10), &KnownBases::new()),
            ["Full-00000000-00000010-100"]
        );
    }

    #[test]
    fn an_older_base_leads_around_a_gap() {
        let b = backup(&[
            "Full-00000000-00000010-100",
            "Incr-00000011-00000025-110",
            "Full-00000000-00000020-115",
            "Incr-00000026-00000030-120",
        ]);
        let known = KnownBases::from([(2, base(20, 20))]);
        assert_eq!(
            chosen(&b, None, &known),
            [
                "Full-00000000-00000020-115",
                "Incr-00000011-00000025-110",
                "Incr-00000026-00000030-120"
            ]
        );
        let b = backup(&[
            "Full-00000000-00000010-100",
            "Incr-00000011-00000030-110",
            "Full-00000000-00000005-115",
        ]);
        assert_eq!(chosen(&b, None, &KnownBases::new()).len(), 2);
    }

    #[test]
    fn a_gap_names_the_missing_revisions_unless_the_full_reaches_over_it() {
        let b = backup(&[
            "Full-00000000-00000010-100",
            "Incr-00000013-00000020-110",
            "Incr-00000025-00000030-120",
        ]);
        let none = KnownBases::new();
        assert_eq!(
            chosen(&b, Some(20), &none),
            ["read Full-00000000-00000010-100"]
        );
        assert_eq!(
            chosen(&b, Some(20), &KnownBases::from([(0, base(12, 5))])).len(),
            2
        );
        let known = KnownBases::from([(0, base(10, 5))]);
        let e = choose(&b.0, &b.1, None, &known).unwrap_err();
        assert_eq!(e.reason(), Reason::RevisionGap);
        assert!(
            e.to_string().contains("missing are 11 to 12, 21 to 24;"),
            "{e}"
        );
        assert_eq!(
            missing(&b.0, &b.1, Revision(10), Revision(30)),
            [(Revision(11), Revision(12)), (Revision(21), Revision(24))]
        );
        assert_eq!(
            restorable(&b.0, &b.1, &known),
            [(Revision(5), Revision(10))]
        );
    }

    #[test]
    fn a_full_covers_its_own_history() {
        let b = backup(&["Full-00000000-00000020-100", "Full-00000000-00000030-110"]);
        let none = KnownBases::new();
        assert_eq!(
            chosen(&b, Some(15), &none),
            ["read Full-00000000-00000020-100"]
        );
        let known = KnownBases::from([(0, base(20, 12)), (1, base(30, 30))]);
        assert_eq!(chosen(&b, Some(15), &known), ["Full-00000000-00000020-100"]);
        for out in [5, 31] {
            let e = choose(&b.0, &b.1, Some(Revision(out)), &known).unwrap_err();
            assert_eq!(e.reason(), Reason::OutOfRange, "{out}: {e}");
        }
        assert_eq!(
            restorable(&b.0, &b.1, &known),
            [(Revision(12), Revision(20)), (Revision(30), Revision(30))]
        );
        // A full that was compacted past its name, and one whose history closes a gap.
        let past = KnownBases::from([(0, base(25, 24)), (1, base(30, 30))]);
        assert_eq!(
            restorable(&b.0, &b.1, &past),
            [(Revision(24), Revision(25)), (Revision(30), Revision(30))]
        );
        let closing = KnownBases::from([(0, base(20, 12)), (1, base(30, 10))]);
        assert_eq!(
            restorable(&b.0, &b.1, &closing),
            [(Revision(10), Revision(30))]
        );
    }

    #[test]
    fn without_a_full_there_is_nothing_to_start_from() {
        let b = backup(&["Incr-00000013-00000020-110"]);
        let e = choose(&b.0, &b.1, None, &KnownBases::new()).unwrap_err();
        assert_eq!(e.reason(), Reason::NoSnapshots);
    }
}
