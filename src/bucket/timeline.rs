//! Timelines: which snapshots tell one history, and which history is the newest.
//!
//! After a restore to an older revision a prefix holds two histories with the same revision
//! numbers. Names alone do not tell them apart; contents do: two snapshots that both hold a
//! revision agree on it, or they belong to two timelines. Contents are only needed where names
//! leave doubt ([`doubtful`]). All here is a pure function of the catalog and the [`Evidence`].

use crate::bucket::catalog::Catalog;
use crate::bucket::name::Kind;
use crate::bucket::survey::{Comparison, Continuity};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;

/// The ID of the timeline that the oldest snapshot is on.
pub const MAIN: &str = "main";

/// What contents say; indexes are those of the catalog.
pub trait Evidence {
    /// Where two snapshots agree and disagree; nothing where either was not surveyed.
    ///
    /// # Errors
    /// `Io`.
    fn compare(&self, a: usize, b: usize) -> Result<Comparison>;
    /// Whether `after`'s events follow the state that `before` has at `until`.
    ///
    /// # Errors
    /// `Io`.
    fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity>;
    /// A short name for what a snapshot holds at a revision.
    ///
    /// # Errors
    /// `Io`.
    fn fingerprint(&self, snapshot: usize, revision: Revision) -> Result<String>;
    /// The newest revision that a snapshot really holds, where it is known.
    fn last(&self, snapshot: usize) -> Option<Revision>;
    /// Whether the snapshot was found to be unreadable, so that it cannot be placed.
    fn is_unreadable(&self, snapshot: usize) -> bool;
    /// Whether anything was read of the snapshot; if not, it agrees with all and disagrees with none.
    fn speaks_of(&self, _snapshot: usize) -> bool {
        true
    }
}

/// No contents were read: names are believed.
pub struct NamesOnly;

impl Evidence for NamesOnly {
    fn compare(&self, _: usize, _: usize) -> Result<Comparison> {
        Ok(Comparison::default())
    }
    fn continuity(&self, _: usize, _: Revision, _: usize) -> Result<Continuity> {
        Ok(Continuity::Unknown)
    }
    fn fingerprint(&self, _: usize, _: Revision) -> Result<String> {
        Ok(String::new())
    }
    fn last(&self, _: usize) -> Option<Revision> {
        None
    }
    fn is_unreadable(&self, _: usize) -> bool {
        false
    }
    fn speaks_of(&self, _: usize) -> bool {
        false
    }
}

/// A snapshot on a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Index in the catalog.
    pub snapshot: usize,
    /// Up to here it tells this timeline's history; `i64::MAX` where all of it does.
    pub until: Revision,
    /// Whether it was the first to hold its newest revision here. One that only repeats (a
    /// compacted full, a second stream) is no sign of a cluster at work.
    extends: bool,
    /// Whether it was placed on this timeline, and is not shared from another.
    own: bool,
}

/// Where a snapshot would go on a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// It joins.
    Join,
    /// It joins, and shows that the timeline forked off earlier than was known: at this revision.
    JoinForkedAt(Revision),
    /// It forks off at this revision.
    Fork(Revision),
    /// It begins a history of which nothing else is known to be shared.
    Begin,
}

/// One history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// [`MAIN`], or `r<first own revision>-<fingerprint of what it holds there>`; a second one of that
    /// name ends with `-2`. It stays the same as long as the snapshots that show the fork are there.
    pub id: String,
    /// In order of creation.
    pub members: Vec<Member>,
    /// The forks on the way from the first timeline: (which fork, its first own revision).
    lineage: Vec<(usize, Revision)>,
}

impl Timeline {
    /// The newest revision a member's name, or content where known, reaches.
    pub fn last(&self, catalog: &Catalog, evidence: &dyn Evidence) -> Option<Revision> {
        let of = |m: &Member| m.until.min(last_of(catalog, evidence, m.snapshot));
        self.members.iter().map(of).max()
    }

    /// When the first of its own snapshots was taken, if it branched off; in seconds since 1970.
    pub fn began(&self, catalog: &Catalog) -> Option<i64> {
        let own = self.members.iter().filter(|m| m.own);
        let created = own.map(|m| catalog.snapshots[m.snapshot].name.created);
        self.lineage.last().and(created.min())
    }

    /// The first revision that is this timeline's own, if it branched off.
    pub fn forked_at(&self) -> Option<Revision> {
        self.lineage.last().map(|f| f.1)
    }
}

fn last_of(catalog: &Catalog, evidence: &dyn Evidence, i: usize) -> Revision {
    let named = catalog.snapshots[i].name.last;
    evidence.last(i).map_or(named, |l| l.max(named))
}

/// The snapshots whose contents are needed to tell the timelines, by names alone.
///
/// In order of creation a single snapshotter's revisions only grow. A full with everything older
/// below it and everything newer above it is a clean cut: what lies between two cuts can be judged
/// by itself, and is in doubt only where its revisions do not grow.
pub fn doubtful(catalog: &Catalog) -> Vec<usize> {
    let order: Vec<usize> = catalog.usable().collect();
    let name = |i: usize| &catalog.snapshots[i].name;
    // The highest revision before, and the lowest that is told, after each place.
    let mut above = vec![Revision(i64::MAX); order.len() + 1];
    for (at, &i) in order.iter().enumerate().rev() {
        let told_from = match name(i).kind {
            Kind::Full => name(i).last,
            // A delta's first revision must be above the cut, a full may repeat it.
            Kind::Incr => name(i).start.previous(),
        };
        above[at] = above[at + 1].min(told_from);
    }
    let mut doubts = Vec::new();
    let mut segment = Vec::new();
    let mut grows = true;
    let mut highest = Revision(-1);
    for (at, &i) in order.iter().enumerate() {
        let n = name(i);
        grows &= match n.kind {
            // One that begins a history is told from those before it whatever its revision.
            Kind::Full => n.last >= highest && !catalog.snapshots[i].begins_timeline,
            Kind::Incr => n.start > highest,
        };
        highest = highest.max(n.last);
        segment.push(i);
        let is_cut = n.kind == Kind::Full && n.last >= highest && above[at + 1] >= n.last;
        if is_cut || at + 1 == order.len() {
            if !grows {
                doubts.append(&mut segment);
                doubts.dedup();
            }
            segment = if is_cut { vec![i] } else { Vec::new() };
            grows = true;
        }
    }
    doubts
}

/// All timelines of a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timelines {
    /// In order of their first own snapshot.
    pub all: Vec<Timeline>,
}

/// How well a snapshot fits a timeline; the greatest is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Fit {
    /// The newest revision of which both hold the same change: what tells most.
    agreed: Option<Revision>,
    /// The timeline holds the revision before a delta's first, and nothing speaks against the delta
    /// following it.
    connected: bool,
    /// They never disagree: the snapshot joins, else it forks off.
    joins: bool,
    /// The versions of keys show that the delta follows.
    confirmed: bool,
    /// The delta begins where the timeline ends.
    adjacent: bool,
    /// When the timeline was last written to.
    activity: Option<(i64, usize)>,
    timeline: usize,
}

impl Timelines {
    /// Sorts the catalog's usable snapshots into timelines, in order of creation: each goes where it
    /// fits best, and joins that timeline or forks off it.
    ///
    /// # Errors
    /// What `evidence` returns.
    pub fn build(catalog: &Catalog, evidence: &dyn Evidence) -> Result<Self> {
        let mut all = vec![Timeline {
            id: MAIN.to_owned(),
            members: Vec::new(),
            lineage: Vec::new(),
        }];
        // The end of the only timeline, as long as there is one: most prefixes have no other.
        let mut end = None;
        for x in catalog.usable() {
            if evidence.is_unreadable(x) {
                continue;
            }
            if let ([only], false) = (all.as_mut_slice(), evidence.speaks_of(x)) {
                let last = last_of(catalog, evidence, x);
                only.members.push(Member {
                    snapshot: x,
                    until: Revision(i64::MAX),
                    extends: end.is_none_or(|e| last > e),
                    own: true,
                });
                end = end.max(Some(last));
                continue;
            }
            end = end.max(Some(last_of(catalog, evidence, x)));
            let mut conflicts = Vec::with_capacity(all.len());
            let mut best = None;
            for t in 0..all.len() {
                let (fit, place) = Self::fit(catalog, evidence, &all, t, x)?;
                conflicts.push(match place {
                    Place::Fork(r) => Some(r),
                    Place::Begin => Some(Revision(1)),
                    _ => None,
                });
                best = best.max(Some((fit, place)));
            }
            let (fit, place) = best.ok_or_else(|| Error::internal("no timeline to choose from"))?;
            let mut chosen = fit.timeline;
            match place {
                Place::Fork(fork) => {
                    let new = Self::fork(catalog, evidence, &all, chosen, fork, fork, x)?;
                    all.push(new);
                    chosen = all.len() - 1;
                }
                Place::Begin => {
                    let last = last_of(catalog, evidence, x);
                    let new = Self::fork(catalog, evidence, &all, chosen, Revision(1), last, x)?;
                    all.push(new);
                    chosen = all.len() - 1;
                }
                Place::JoinForkedAt(fork) => {
                    Self::lower_fork(catalog, evidence, &mut all, chosen, fork);
                    Self::join(catalog, evidence, &mut all[chosen], x);
                }
                Place::Join => Self::join(catalog, evidence, &mut all[chosen], x),
            }
            Self::share(catalog, evidence, &mut all, chosen, &conflicts, x);
        }
        Ok(Timelines { all })
    }

    fn join(catalog: &Catalog, evidence: &dyn Evidence, timeline: &mut Timeline, x: usize) {
        let last = timeline.last(catalog, evidence);
        timeline.members.push(Member {
            snapshot: x,
            until: Revision(i64::MAX),
            extends: last.is_none_or(|l| last_of(catalog, evidence, x) > l),
            own: true,
        });
    }

    /// Takes back what timeline `t` shares from `fork` on: its own history begins there.
    fn lower_fork(
        catalog: &Catalog,
        evidence: &dyn Evidence,
        all: &mut [Timeline],
        t: usize,
        fork: Revision,
    ) {
        all[t]
            .members
            .retain_mut(|m| m.own || share_below(catalog, evidence, m, fork));
        let Some(&(which, _)) = all[t].lineage.last() else {
            return;
        };
        for timeline in all {
            for f in timeline.lineage.iter_mut().filter(|f| f.0 == which) {
                f.1 = f.1.min(fork);
            }
        }
    }

    /// How well `x` fits timeline `t`, and how it would go there.
    fn fit(
        catalog: &Catalog,
        evidence: &dyn Evidence,
        all: &[Timeline],
        t: usize,
        x: usize,
    ) -> Result<(Fit, Place)> {
        // With what was placed here, and with what is shared.
        let (mut own, mut shared) = (Comparison::default(), Comparison::default());
        let speaks = evidence.speaks_of(x);
        for m in all[t].members.iter().filter(|_| speaks) {
            let c = evidence.compare(m.snapshot, x)?;
            let with = if m.own { &mut own } else { &mut shared };
            if let Some(r) = c.conflict.filter(|&r| r <= m.until) {
                with.conflict = Some(with.conflict.map_or(r, |first| first.min(r)));
            }
            with.agreed = with.agreed.max(c.agreed.map(|r| r.min(m.until)));
        }
        // It agrees with the timeline's own history later than it disagrees with what is shared:
        // less is shared than was thought.
        let forked_at = shared.conflict.filter(|&r| {
            own.agreed >= Some(r)
                && own.conflict.is_none_or(|c| c > r)
                && all[t].forked_at().is_some_and(|fork| r < fork)
        });
        let conflict = match (own.conflict, shared.conflict) {
            (c, _) if forked_at.is_some() => c,
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let is_read = evidence.last(x).is_some();
        let begins = catalog.snapshots[x].begins_timeline && is_read && !all[t].members.is_empty();
        let place = match (conflict, forked_at) {
            (Some(r), _) => Place::Fork(r),
            // Whoever took it saw that the cluster went on otherwise, which its content need not show: what is
            // compacted cannot disagree.
            (None, _) if begins => Place::Begin,
            (None, Some(r)) => Place::JoinForkedAt(r),
            (None, None) => Place::Join,
        };
        let agreed = own.agreed.max(shared.agreed);
        let name = &catalog.snapshots[x].name;
        let before = name.start.previous();
        let mut connected = name.kind == Kind::Full;
        let mut confirmed = false;
        if name.kind == Kind::Incr {
            // Whoever holds the revision before it was most likely written last.
            for m in all[t].members.iter().rev() {
                let p = &catalog.snapshots[m.snapshot].name;
                let ends = m.until.min(last_of(catalog, evidence, m.snapshot));
                let holds = match p.kind {
                    Kind::Full => p.last <= m.until && p.last <= before && before <= ends,
                    Kind::Incr => p.start <= before && before <= ends,
                };
                if !holds {
                    continue;
                }
                match evidence.continuity(m.snapshot, before, x)? {
                    Continuity::Contradicted => {
                        connected = false;
                        break;
                    }
                    Continuity::Confirmed => (connected, confirmed) = (true, true),
                    Continuity::Unknown => connected = true,
                }
                if !speaks {
                    break;
                }
            }
        }
        let fit = Fit {
            agreed: agreed.map(|a| conflict.map_or(a, |c| a.min(c.previous()))),
            connected,
            joins: conflict.is_none() && !begins,
            confirmed,
            adjacent: all[t].last(catalog, evidence) == Some(before),
            activity: activity(catalog, &all[t]),
            timeline: t,
        };
        Ok((fit, place))
    }

    /// What lies below a fork belongs to both branches: gives `x`, which is on timeline `on`, to the
    /// others as far as they share it.
    fn share(
        catalog: &Catalog,
        evidence: &dyn Evidence,
        all: &mut [Timeline],
        on: usize,
        conflicts: &[Option<Revision>],
        x: usize,
    ) {
        let name = &catalog.snapshots[x].name;
        let last = last_of(catalog, evidence, x);
        for t in (0..all.len()).filter(|&t| t != on) {
            let Some(mut fork) = divergence(&all[t], &all[on]) else {
                continue;
            };
            if let Some(Some(c)) = conflicts.get(t) {
                fork = fork.min(*c);
            }
            let until = if last < fork {
                Revision(i64::MAX)
            } else if name.kind == Kind::Incr && name.start < fork {
                fork.previous()
            } else {
                continue;
            };
            all[t].members.push(Member {
                snapshot: x,
                until,
                extends: false,
                own: false,
            });
        }
    }

    /// A new timeline for `x`, branching off `parent` at its first own revision, `fork`; named for what `x`
    /// holds at `told`.
    fn fork(
        catalog: &Catalog,
        evidence: &dyn Evidence,
        all: &[Timeline],
        parent: usize,
        fork: Revision,
        told: Revision,
        x: usize,
    ) -> Result<Timeline> {
        let mut members = all[parent].members.clone();
        members.retain_mut(|m| {
            m.own = false;
            share_below(catalog, evidence, m, fork)
        });
        members.push(Member {
            snapshot: x,
            until: Revision(i64::MAX),
            extends: true,
            own: true,
        });
        let mut lineage = all[parent].lineage.clone();
        lineage.retain(|f| f.1 <= fork);
        lineage.push((all.len(), fork));
        let mut id = format!("r{told}-{}", evidence.fingerprint(x, told)?);
        // Histories that are the same there may differ elsewhere.
        let more = format!("{id}-");
        let twins = all.iter().filter(|t| t.id == id || t.id.starts_with(&more));
        match twins.count() {
            0 => {}
            n => id = format!("{more}{}", n + 1),
        }
        Ok(Timeline {
            id,
            members,
            lineage,
        })
    }

    /// The timeline with this ID.
    ///
    /// # Errors
    /// `NoSuchTimeline`.
    pub fn by_id(&self, id: &str) -> Result<&Timeline> {
        self.all.iter().find(|t| t.id == id).ok_or_else(|| {
            let ids: Vec<&str> = self.all.iter().map(|t| t.id.as_str()).collect();
            Error::new(
                Reason::NoSuchTimeline,
                format!(
                    "there is no timeline \"{id}\"; there are: {}",
                    ids.join(", ")
                ),
            )
        })
    }

    /// The newest timeline: since its fork from each other one, all of its snapshots were created
    /// after all of the other's.
    ///
    /// # Errors
    /// `InterleavedTimelines` where none is the newest.
    pub fn newest(&self, catalog: &Catalog) -> Result<&Timeline> {
        let mut at_odds = None;
        for t in &self.all {
            let rival = self
                .all
                .iter()
                .find(|u| u.id != t.id && !was_written_after(catalog, t, u));
            match rival {
                None => return Ok(t),
                // Two that interleave say more than two of a circle, in which each was written after
                // the next.
                Some(u) if at_odds.is_none() || !was_written_after(catalog, u, t) => {
                    at_odds = Some((t, u));
                }
                Some(_) => {}
            }
        }
        let (t, u) = at_odds.ok_or_else(|| Error::internal("no timeline to choose from"))?;
        let names = |a: &Timeline, b: &Timeline| {
            let own: Vec<String> = own_members(catalog, a, b)
                .map(|i| catalog.snapshots[i].path.clone())
                .collect();
            own.join(", ")
        };
        Err(Error::new(
            Reason::InterleavedTimelines,
            format!(
                "two clusters write to this prefix: from revision {} on, timeline {} ({}) and timeline {} ({}) differ, and no history was written wholly after all others; \
                 stop one of the writers, see `deltafold list --deep`, and choose with --timeline",
                divergence(t, u).unwrap_or_default(),
                t.id,
                names(t, u),
                u.id,
                names(u, t)
            ),
        ))
    }
}

/// Cuts a member to what it tells below `fork`; false where that is nothing.
fn share_below(catalog: &Catalog, evidence: &dyn Evidence, m: &mut Member, fork: Revision) -> bool {
    let name = &catalog.snapshots[m.snapshot].name;
    m.until = m.until.min(fork.previous());
    match name.kind {
        // Only a full that ends before the fork is a base there.
        Kind::Full => last_of(catalog, evidence, m.snapshot) < fork,
        Kind::Incr => name.start < fork,
    }
}

/// The first revision at which two timelines differ.
fn divergence(a: &Timeline, b: &Timeline) -> Option<Revision> {
    let same = a
        .lineage
        .iter()
        .zip(&b.lineage)
        .take_while(|(x, y)| x == y)
        .count();
    let next = |t: &Timeline| t.lineage.get(same).map(|f| f.1);
    match (next(a), next(b)) {
        (Some(x), Some(y)) => Some(x.min(y)),
        (x, y) => x.or(y),
    }
}

/// When a timeline was last written to.
fn activity(catalog: &Catalog, t: &Timeline) -> Option<(i64, usize)> {
    t.members
        .iter()
        .filter(|m| m.until.0 == i64::MAX)
        .map(|m| (catalog.snapshots[m.snapshot].name.created, m.snapshot))
        .max()
}

/// The snapshots that show a cluster at work on `a` and not on `b`.
fn own_members<'a>(
    catalog: &'a Catalog,
    a: &'a Timeline,
    b: &'a Timeline,
) -> impl Iterator<Item = usize> + 'a {
    let fork = divergence(a, b).unwrap_or(Revision(i64::MAX));
    a.members
        .iter()
        .filter(move |m| {
            m.extends && m.until.0 == i64::MAX && catalog.snapshots[m.snapshot].name.last >= fork
        })
        .map(|m| m.snapshot)
}

fn was_written_after(catalog: &Catalog, a: &Timeline, b: &Timeline) -> bool {
    let created = |i: usize| catalog.snapshots[i].name.created;
    let first = own_members(catalog, a, b).map(created).min();
    let last = own_members(catalog, b, a).map(created).max();
    match (first, last) {
        (Some(first), Some(last)) => first > last,
        // Nothing was ever written on the other branch since the fork.
        (_, None) => true,
        (None, Some(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::catalog::Listed;
    use std::collections::HashMap;

    /// A bucket told in letters: name, and for each revision a letter that stands for its content.
    struct Told {
        catalog: Catalog,
        content: Vec<HashMap<i64, char>>,
    }

    impl Told {
        /// `(name, first revision of `letters`, letters)`.
        fn new(told: &[(&str, i64, &str)]) -> Self {
            let listing = told
                .iter()
                .map(|(name, ..)| Listed {
                    path: format!("v2/{name}"),
                    bytes: 1,
                })
                .collect();
            let catalog = Catalog::from_listing(listing);
            let content = catalog
                .snapshots
                .iter()
                .map(|s| {
                    let t = told
                        .iter()
                        .find(|t| format!("v2/{}", t.0) == s.path)
                        .unwrap();
                    t.2.chars()
                        .enumerate()
                        .map(|(i, c)| (t.1 + i as i64, c))
                        .collect()
                })
                .collect();
            Told { catalog, content }
        }

        fn newest(&self) -> Result<String> {
            let t = Timelines::build(&self.catalog, self)?;
            Ok(t.newest(&self.catalog)?.id.clone())
        }
    }

    impl Evidence for Told {
        fn compare(&self, a: usize, b: usize) -> Result<Comparison> {
            let both = self.content[a]
                .iter()
                .filter_map(|(r, c)| Some((Revision(*r), self.content[b].get(r)? == c)));
            let conflict = both.clone().filter(|x| !x.1).map(|x| x.0).min();
            let agreed = both
                .filter(|x| x.1 && conflict.is_none_or(|c| x.0 < c))
                .map(|x| x.0)
                .max();
            Ok(Comparison { conflict, agreed })
        }
        fn continuity(&self, _: usize, _: Revision, _: usize) -> Result<Continuity> {
            Ok(Continuity::Unknown)
        }
        fn fingerprint(&self, s: usize, r: Revision) -> Result<String> {
            Ok(self.content[s]
                .get(&r.0)
                .map(char::to_string)
                .unwrap_or_default())
        }
        fn last(&self, _: usize) -> Option<Revision> {
            None
        }
        fn is_unreadable(&self, _: usize) -> bool {
            false
        }
    }

    fn names(told: &Told, which: &[usize]) -> Vec<String> {
        which
            .iter()
            .map(|&i| told.catalog.snapshots[i].name.to_string())
            .collect()
    }

    #[test]
    fn growing_revisions_need_no_contents() {
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000020-110", 11, ""),
            ("Full-00000000-00000020-111", 20, "a"),
            ("Full-00000000-00000020-112", 20, "a"),
            ("Incr-00000021-00000022-120", 21, ""),
        ]);
        assert!(doubtful(&t.catalog).is_empty());
        assert_eq!(t.newest().unwrap(), "main");
    }

    #[test]
    fn only_the_part_that_does_not_grow_is_doubtful() {
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000020-110", 11, ""),
            ("Full-00000000-00000020-111", 20, "a"),
            ("Incr-00000021-00000030-120", 21, ""),
            ("Incr-00000025-00000040-130", 25, ""),
            ("Full-00000000-00000040-140", 40, "a"),
            ("Incr-00000041-00000042-150", 41, ""),
        ]);
        assert_eq!(
            names(&t, &doubtful(&t.catalog)),
            [
                "Full-00000000-00000020-111",
                "Incr-00000021-00000030-120",
                "Incr-00000025-00000040-130",
                "Full-00000000-00000040-140"
            ]
        );
    }

    #[test]
    fn a_restore_to_an_older_revision_makes_the_later_branch_the_newest() {
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000014-110", 11, "aaaa"),
            ("Incr-00000015-00000018-120", 15, "aaaa"),
            ("Incr-00000013-00000015-130", 13, "bbb"),
            ("Incr-00000016-00000017-140", 16, "bb"),
        ]);
        assert_eq!(doubtful(&t.catalog).len(), 5);
        assert_eq!(t.newest().unwrap(), "r13-b");
        let all = Timelines::build(&t.catalog, &t).unwrap();
        let b = all.by_id("r13-b").unwrap();
        assert_eq!(b.last(&t.catalog, &t), Some(Revision(17)));
        assert_eq!(b.forked_at(), Some(Revision(13)));
        // The old delta counts up to the fork.
        assert_eq!(
            b.members
                .iter()
                .map(|m| m.until.0.min(99))
                .collect::<Vec<_>>(),
            [12, 12, 99, 99]
        );
        assert!(all.by_id("main").is_ok());
        assert_eq!(all.by_id("x").unwrap_err().reason(), Reason::NoSuchTimeline);
    }

    #[test]
    fn two_writers_at_once_are_refused() {
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000014-110", 11, "aaaa"),
            ("Incr-00000011-00000014-115", 11, "bbbb"),
            ("Incr-00000015-00000018-120", 15, "aaaa"),
            ("Incr-00000015-00000018-125", 15, "bbbb"),
        ]);
        let e = t.newest().unwrap_err();
        assert_eq!(e.reason(), Reason::InterleavedTimelines);
        assert!(e.to_string().contains("from revision 11 on"), "{e}");
    }

    #[test]
    fn streams_that_agree_are_one_timeline() {
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000014-110", 11, "aaaa"),
            ("Incr-00000011-00000012-111", 11, "aa"),
            ("Incr-00000013-00000018-120", 13, "aaaaaa"),
            ("Incr-00000015-00000018-125", 15, "aaaa"),
        ]);
        assert_eq!(Timelines::build(&t.catalog, &t).unwrap().all.len(), 1);
    }

    #[test]
    fn a_late_compacted_full_of_the_old_branch_does_not_count_as_a_writer() {
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000014-110", 11, "aaaa"),
            ("Incr-00000013-00000015-130", 13, "bbb"),
            ("Full-00000000-00000014-140", 14, "a"),
            ("Incr-00000016-00000016-150", 16, "b"),
        ]);
        assert_eq!(t.newest().unwrap(), "r13-b");
    }

    #[test]
    fn three_restores_in_a_row_have_a_newest() {
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000020-110", 11, "aaaaaaaaaa"),
            ("Incr-00000015-00000018-120", 15, "bbbb"),
            ("Incr-00000012-00000013-130", 12, "cc"),
            ("Incr-00000013-00000019-140", 13, "ddddddd"),
        ]);
        assert_eq!(t.newest().unwrap(), "r13-d");
        let ids: Vec<_> = Timelines::build(&t.catalog, &t)
            .unwrap()
            .all
            .iter()
            .map(|t| t.id.clone())
            .collect();
        assert_eq!(ids, ["main", "r15-b", "r12-c", "r13-d"]);
    }

    #[test]
    fn a_restore_past_the_end_of_the_first_branch_forks_off_the_second() {
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000014-110", 11, "aaaa"),
            ("Incr-00000013-00000020-120", 13, "bbbbbbbb"),
            ("Incr-00000018-00000022-130", 18, "ccccc"),
        ]);
        assert_eq!(t.newest().unwrap(), "r18-c");
        let all = Timelines::build(&t.catalog, &t).unwrap();
        let c = all.by_id("r18-c").unwrap();
        let until: Vec<_> = c.members.iter().map(|m| m.until.0.min(99)).collect();
        assert_eq!(until, [12, 12, 17, 99]);
    }

    #[test]
    fn a_late_full_goes_where_its_newest_change_is_known() {
        // Nothing that it still holds speaks against the newer, shorter branch.
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000020-110", 11, "aaaaaaaaaa"),
            ("Incr-00000013-00000014-120", 13, "bb"),
            ("Full-00000000-00000020-130", 20, "a"),
            ("Incr-00000015-00000016-140", 15, "bb"),
        ]);
        let all = Timelines::build(&t.catalog, &t).unwrap();
        let newest = all.newest(&t.catalog).unwrap();
        assert_eq!(newest.id, "r13-b");
        assert_eq!(newest.last(&t.catalog, &t), Some(Revision(16)));
    }

    #[test]
    fn what_lies_below_a_fork_is_shared_both_ways() {
        // The branch that was listed first has a hole, which the other one's delta fills.
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000013-00000014-105", 13, "bb"),
            ("Incr-00000011-00000016-106", 11, "aaaaaa"),
        ]);
        let all = Timelines::build(&t.catalog, &t).unwrap();
        let main = all.by_id(MAIN).unwrap();
        let until: Vec<_> = main.members.iter().map(|m| m.until.0.min(99)).collect();
        assert_eq!(until, [99, 99, 12]);
    }

    #[test]
    fn a_fork_that_was_seen_late_is_moved_to_where_it_was() {
        // The new branch's first snapshot is compacted: it shows the fork only at its end.
        let t = Told::new(&[
            ("Full-00000000-00000010-100", 10, "a"),
            ("Incr-00000011-00000020-110", 11, "aaaaaaaaaa"),
            ("Full-00000000-00000018-120", 18, "b"),
            ("Incr-00000014-00000019-130", 14, "bbbbbb"),
        ]);
        let all = Timelines::build(&t.catalog, &t).unwrap();
        assert_eq!(all.all.len(), 2);
        let b = all.newest(&t.catalog).unwrap();
        assert_eq!(
            (b.id.as_str(), b.forked_at()),
            ("r18-b", Some(Revision(14)))
        );
        let until: Vec<_> = b.members.iter().map(|m| m.until.0.min(99)).collect();
        assert_eq!(until, [13, 13, 99, 99]);
    }
}
