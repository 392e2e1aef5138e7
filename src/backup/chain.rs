//! The chain: which full and which deltas after it lead to a revision.
//!
//! A pure function of the catalog, a timeline and what is known of the fulls' true revisions. Any
//! set of deltas that covers every revision will do: streams of two snapshotters may overlap.

use crate::backup::catalog::Catalog;
use crate::backup::timeline::{Member, Timeline};
use crate::base::shorten;
use crate::error::{Reason, Result};
use crate::mvcc::{Base, Revision};
use std::collections::HashMap;

/// What was read from fulls, by index in the catalog.
pub type KnownBases = HashMap<usize, Base>;

/// A full and the deltas to fold into it, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Index of the full.
    pub base: usize,
    /// The deltas.
    pub deltas: Vec<Link>,
    /// The revision it leads to.
    pub target: Revision,
}

impl Chain {
    /// Its deltas and its full, as indexes.
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
    /// Its events up to here are this timeline's.
    pub until: Revision,
}

/// What choosing a chain came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// A chain.
    Found(Chain),
    /// It depends on what this full holds beyond its name: read it, then choose again.
    Look(usize),
}

/// Revisions from the first to the last, both included.
pub type Range = (Revision, Revision);

/// Chooses the chain with the newest base that leads to `target`, or to the newest revision that
/// any snapshot of the timeline names.
///
/// # Errors
/// `NoSnapshots` without a full; `OutOfRange` where the target is outside of what is covered;
/// `RevisionGap`, with the missing revisions, where deltas are missing on the way.
pub fn choose(
    catalog: &Catalog,
    timeline: &Timeline,
    target: Option<Revision>,
    known: &KnownBases,
) -> Result<Choice> {
    choose_with_history(catalog, timeline, target, Revision(i64::MAX), known)
}

/// As [`choose`], with a base that holds all history above `history`: one that was compacted past it
/// will not do, and the next older one is tried.
///
/// # Errors
/// As [`choose`]; `OutOfRange` too where every full was compacted past `history`.
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
    let end_of = |m: &Member| holds(catalog, known, m.snapshot).min(m.until);
    let newest = timeline.members.iter().map(end_of).max();
    let newest = newest.unwrap_or_default();
    let goal = target.unwrap_or(newest);
    let name = |i: usize| &catalog.snapshots[i].name;
    let deltas = Deltas::of(catalog, timeline);
    let mut gap = None;
    for &base in bases.iter().filter(|&&b| name(b).last <= goal) {
        // What it holds beyond its name may have been compacted past the goal.
        let is_gone = |b: &Base| b.first_revision() > goal || b.compact_revision > history;
        if known.get(&base).is_some_and(is_gone) {
            continue;
        }
        let at = holds(catalog, known, base);
        if deltas.end(at) >= goal {
            return Ok(Choice::Found(Chain {
                base,
                deltas: deltas.walk(at, goal),
                target: goal,
            }));
        }
        // What the full holds beyond its name may reach over the gap, or past all names: then only
        // the newest full can, and the others need not be read.
        if !known.contains_key(&base) && (goal <= newest || base == bases[0]) {
            return Ok(Choice::Look(base));
        }
        gap.get_or_insert(at);
    }
    // A full that ends after the goal may still hold its history.
    for &base in bases.iter().rev().filter(|&&b| name(b).last > goal) {
        match known.get(&base) {
            None => return Ok(Choice::Look(base)),
            Some(b) if b.first_revision() <= goal && b.compact_revision <= history => {
                return Ok(Choice::Found(Chain {
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
            "the snapshots between revision {from} and {goal} have a gap: missing are {}; take a full snapshot, or use --revision up to {}",
            show_ranges(&deltas.missing(from, goal)),
            deltas.end(from)
        )));
    }
    Err(Reason::OutOfRange.error(format!(
        "revision {goal} is not covered on timeline {}; covered are {}",
        timeline.id,
        show_ranges(&restorable(catalog, timeline, known))
    )))
}

/// The newest revision of a snapshot, by its content if that was read, else by its name.
fn holds(catalog: &Catalog, known: &KnownBases, i: usize) -> Revision {
    let named = catalog.snapshots[i].name.last;
    known.get(&i).map_or(named, |b| b.revision.max(named))
}

/// The fulls of a timeline that can be a base: those that end before it forks off. Newest first.
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

/// The deltas of a timeline, sorted once.
struct Deltas {
    /// Where they start, in order.
    starts: Vec<Revision>,
    /// For each of `starts`: of the deltas that start there or before, the one that reaches farthest. Of
    /// equals it is the one created last.
    farthest: Vec<Link>,
    /// For each of `farthest`: how far it and the deltas after it lead.
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

    /// The delta that leads on from `at`, as its place in `farthest`.
    fn next(&self, at: Revision) -> Option<usize> {
        let started = self.starts.partition_point(|&start| start <= at.next());
        let last = started.checked_sub(1)?;
        (self.farthest[last].until > at).then_some(last)
    }

    /// How far deltas lead from `at`.
    fn end(&self, at: Revision) -> Revision {
        self.next(at).map_or(at, |i| self.ends[i])
    }

    /// The deltas that lead from `at` to `goal`, or as far as they lead: each time the one that reaches
    /// farthest.
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

    /// Where the first delta starts that starts after `at`.
    fn first_start_after(&self, at: Revision) -> Option<Revision> {
        let started = self.starts.partition_point(|&start| start <= at);
        self.starts.get(started).copied()
    }

    /// The revisions above `from` up to `goal` that no delta holds.
    fn missing(&self, from: Revision, goal: Revision) -> Vec<Range> {
        let (mut holes, mut at) = (Vec::new(), from);
        while at < goal {
            let reached = self.end(at);
            if reached >= goal {
                break;
            }
            let next = self.first_start_after(reached.next());
            let last = next.map_or(goal, |start| start.previous().min(goal));
            holes.push((reached.next(), last));
            at = last;
        }
        holes
    }
}

/// All deltas of a timeline that add a revision, in order, across gaps.
pub fn all_links(catalog: &Catalog, timeline: &Timeline) -> Vec<Link> {
    let deltas = Deltas::of(catalog, timeline);
    let (mut links, mut reached) = (Vec::new(), Revision::NONE);
    while let Some(start) = deltas.first_start_after(reached) {
        let from = reached.max(start.previous());
        links.extend(deltas.walk(from, Revision(i64::MAX)));
        // Of a delta whose events here end before it starts nothing counts.
        reached = deltas.end(from).max(start);
    }
    links
}

/// The revisions above `from` up to `goal` that no delta holds.
pub fn missing(
    catalog: &Catalog,
    timeline: &Timeline,
    from: Revision,
    goal: Revision,
) -> Vec<Range> {
    Deltas::of(catalog, timeline).missing(from, goal)
}

/// The revisions of a timeline that can be restored, by what is known of it.
pub fn restorable(catalog: &Catalog, timeline: &Timeline, known: &KnownBases) -> Vec<Range> {
    let deltas = Deltas::of(catalog, timeline);
    let mut ranges: Vec<Range> = Vec::new();
    for base in bases(catalog, timeline).into_iter().rev() {
        let at = holds(catalog, known, base);
        // It may have been compacted past its name.
        let mut first = known.get(&base).map_or(at, Base::first_revision);
        // From within a range deltas lead to where the range ends.
        let mut last = match ranges.last() {
            Some(r) if at <= r.1 => r.1,
            _ => deltas.end(at),
        };
        // One that holds much history may close the holes between several.
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
pub struct Span {
    /// Index of the full.
    pub base: usize,
    /// The deltas that lead on from it, in order.
    pub deltas: Vec<Link>,
    /// How far they lead.
    pub reached: Revision,
    /// Index of the next full, and the revision that it holds.
    pub next: Option<(usize, Revision)>,
    /// The revisions behind `reached` that are missing although deltas after them are there.
    pub missing: Vec<Range>,
}

/// Every chain of a timeline: each full with the deltas after it up to the next full, the oldest first.
pub fn spans(catalog: &Catalog, timeline: &Timeline, known: &KnownBases) -> Vec<Span> {
    let created = |i: usize| catalog.snapshots[i].name.created;
    let bases = bases(catalog, timeline).into_iter();
    let bases = bases.map(|i| (holds(catalog, known, i), created(i), i));
    let mut bases: Vec<(Revision, i64, usize)> = bases.collect();
    bases.sort_unstable();
    let last_of = |m: &Member| catalog.snapshots[m.snapshot].name.last.min(m.until);
    let end = timeline.members.iter().map(last_of).max();
    let all = Deltas::of(catalog, timeline);
    let mut spans = Vec::new();
    for (n, &(at, _, base)) in bases.iter().enumerate() {
        let next = bases.get(n + 1).map(|&(holds, _, i)| (i, holds));
        let goal = next.map_or(Revision(i64::MAX), |n| n.1);
        let deltas = all.walk(at, goal);
        let reached = deltas.last().map_or(at, |link| link.until);
        // Up to the end of what is there: that nothing follows is no gap.
        let until = goal.min(end.unwrap_or(reached).max(reached));
        let mut missing = all.missing(reached, until);
        let has_delta_behind = |hole: &Range| {
            let next = all.first_start_after(hole.1);
            next.is_some_and(|start| start <= until)
        };
        missing.retain(has_delta_behind);
        spans.push(Span {
            base,
            deltas,
            reached,
            next,
            missing,
        });
    }
    spans
}

/// The deltas of a timeline that no full leads to: all fulls hold only what comes after them.
pub fn without_base(catalog: &Catalog, timeline: &Timeline, known: &KnownBases) -> Vec<usize> {
    // A full with history holds what those before it told.
    let first_of = |i: usize| {
        let named = catalog.snapshots[i].name.last;
        let first = known.get(&i).map(Base::first_revision);
        first.map_or(named, |first| first.min(named))
    };
    let bases = bases(catalog, timeline).into_iter();
    let first = bases.map(first_of).min();
    let is_before = |m: &&Member| {
        let name = &catalog.snapshots[m.snapshot].name;
        let last = name.last.min(m.until);
        let lost = |first: Revision| name.start < first && last <= first;
        !name.is_full() && first.is_none_or(lost)
    };
    timeline
        .members
        .iter()
        .filter(is_before)
        .map(|m| m.snapshot)
        .collect()
}

/// Ranges as text: `5 to 9, 12`. Of many, only some are shown.
pub fn show_ranges(ranges: &[Range]) -> String {
    let show = |&(a, b): &Range| match a == b {
        true => a.to_string(),
        false => format!("{a} to {b}"),
    };
    let shown: Vec<String> = ranges.iter().map(show).collect();
    shorten::line(&shown, ", ", "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::timeline::{NamesOnly, Timelines};

    fn bucket(names: &[&str]) -> (Catalog, Timeline) {
        let catalog = Catalog::of_names(names);
        let timeline = Timelines::build(&catalog, &NamesOnly)
            .unwrap()
            .all
            .remove(0);
        (catalog, timeline)
    }

    fn chosen(b: &(Catalog, Timeline), target: Option<i64>, known: &KnownBases) -> Vec<String> {
        match choose(&b.0, &b.1, target.map(Revision), known).unwrap() {
            Choice::Found(c) => std::iter::once(c.base)
                .chain(c.deltas.iter().map(|l| l.snapshot))
                .map(|i| b.0.snapshots[i].name.to_string())
                .collect(),
            Choice::Look(i) => vec![format!("look {}", b.0.snapshots[i].name)],
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
    fn a_full_that_was_compacted_too_far_is_passed_over() {
        let b = bucket(&[
            "Full-00000000-00000010-1790000000",
            "Incr-00000011-00000020-1790000001",
            "Full-00000000-00000020-1790000002",
            "Incr-00000021-00000030-1790000003",
        ]);
        let at = |history: i64, known: &KnownBases| {
            choose_with_history(&b.0, &b.1, Some(Revision(30)), Revision(history), known)
        };
        let base_of = |choice| match choice {
            Ok(Choice::Found(chain)) => Some(chain.base),
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

    /// A bucket of overlapping deltas, with gaps and forks.
    fn random_bucket(rng: &mut fastrand::Rng) -> (Catalog, Timeline) {
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
        let (catalog, mut timeline) = bucket(&names);
        for member in &mut timeline.members {
            if rng.u8(..6) == 0 {
                member.until = Revision(rng.i64(1..60));
            }
        }
        (catalog, timeline)
    }

    /// The delta that leads on from `at`, found by looking at all of them.
    fn next_of_all(b: &(Catalog, Timeline), at: Revision) -> Option<Link> {
        let name = |m: &Member| &b.0.snapshots[m.snapshot].name;
        let deltas = b.1.members.iter().filter(|m| !name(m).is_full());
        let leading = deltas.filter(|m| name(m).start <= at.next());
        let last = |m: &&Member| name(m).last.min(m.until);
        let best = leading.max_by_key(|m| (last(m), name(m).created, m.snapshot));
        best.filter(|m| last(m) > at).map(|m| Link {
            snapshot: m.snapshot,
            until: last(&m),
        })
    }

    #[test]
    fn one_sweep_finds_what_looking_at_all_deltas_for_each_revision_finds() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for _ in 0..crate::rounds(1_000, 50_000) {
            let b = random_bucket(&mut rng);
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

            // Across gaps, revision by revision.
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
            let all = |ranges: &[Range]| -> Vec<i64> {
                ranges.iter().flat_map(|r| r.0.0..=r.1.0).collect()
            };
            let holes = missing(&b.0, &b.1, from, goal);
            let expected: Vec<i64> = lacks(from.0, goal.0).collect();
            assert_eq!(all(&holes), expected, "{from} {goal} {b:?}");

            let ends = |m: &Member| b.0.snapshots[m.snapshot].name.last.min(m.until);
            let end = b.1.members.iter().map(ends).max().unwrap();
            for span in spans(&b.0, &b.1, &KnownBases::new()) {
                let until = end.max(span.reached);
                let until = span.next.map_or(until, |next| next.1.min(until));
                let starts = |m: &Member| {
                    Some(&b.0.snapshots[m.snapshot].name)
                        .filter(|n| !n.is_full() && n.start <= until)
                        .map(|n| n.start.0)
                };
                // Revisions are missing up to the last delta that starts before the next full's end.
                let last = b.1.members.iter().filter_map(starts).max().unwrap_or(0);
                let expected: Vec<i64> = lacks(span.reached.0, last - 1).collect();
                assert_eq!(all(&span.missing), expected, "{span:?} {b:?}");
            }
        }
    }

    #[test]
    fn overlapping_streams_are_crossed() {
        let b = bucket(&[
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
        let b = bucket(&[
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
        let b = bucket(&[
            "Full-00000000-00000010-100",
            "Incr-00000011-00000030-110",
            "Full-00000000-00000005-115",
        ]);
        assert_eq!(chosen(&b, None, &KnownBases::new()).len(), 2);
    }

    #[test]
    fn a_gap_names_what_is_missing_unless_the_full_reaches_over_it() {
        let b = bucket(&[
            "Full-00000000-00000010-100",
            "Incr-00000013-00000020-110",
            "Incr-00000025-00000030-120",
        ]);
        let none = KnownBases::new();
        assert_eq!(
            chosen(&b, Some(20), &none),
            ["look Full-00000000-00000010-100"]
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
    fn a_full_serves_its_own_history() {
        let b = bucket(&["Full-00000000-00000020-100", "Full-00000000-00000030-110"]);
        let none = KnownBases::new();
        assert_eq!(
            chosen(&b, Some(15), &none),
            ["look Full-00000000-00000020-100"]
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
        // Compacted past its name; and with history that closes a hole.
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
        let b = bucket(&["Incr-00000013-00000020-110"]);
        let e = choose(&b.0, &b.1, None, &KnownBases::new()).unwrap_err();
        assert_eq!(e.reason(), Reason::NoSnapshots);
    }
}
