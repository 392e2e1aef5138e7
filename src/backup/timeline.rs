//! Timelines: which snapshots tell one history, and which history is the newest.
//!
//! After a restore to an older revision a prefix holds two histories with the same revision
//! numbers. Names alone do not tell them apart; contents do: two snapshots that both hold a
//! revision agree on it, or they belong to two timelines. Contents are only needed where names
//! leave doubt ([`doubtful`]). All here is a pure function of the catalog and the [`Evidence`].

use crate::backup::catalog::Catalog;
use crate::backup::intervals::Intervals;
use crate::backup::name::Kind;
use crate::backup::survey::{Comparison, Continuity};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;

/// The ID of the timeline that the oldest snapshot is on.
pub const MAIN: &str = "main";

/// What contents say; indexes are those of the catalog. Of what was not read nothing is said.
pub trait Evidence {
    /// Where a snapshot agrees and disagrees with others: with all that come before it in the catalog and
    /// share a revision with it, if both were surveyed.
    fn compared(&self, _snapshot: usize) -> Vec<(usize, Comparison)> {
        Vec::new()
    }
    /// Whether `after`'s events follow the state that `before` has at `until`.
    ///
    /// # Errors
    /// `Io`.
    fn continuity(&self, _before: usize, _until: Revision, _after: usize) -> Result<Continuity> {
        Ok(Continuity::Unknown)
    }
    /// A short name for what a snapshot holds at a revision.
    ///
    /// # Errors
    /// `Io`.
    fn fingerprint(&self, _snapshot: usize, _revision: Revision) -> Result<String> {
        Ok(String::new())
    }
    /// The newest revision that a snapshot really holds, where it is known.
    fn last(&self, _snapshot: usize) -> Option<Revision> {
        None
    }
    /// Whether the snapshot was found to be unreadable, so that it cannot be placed.
    fn is_unreadable(&self, _snapshot: usize) -> bool {
        false
    }
    /// Whether anything was read of the snapshot; if not, it agrees with all, disagrees with none, and follows
    /// whatever its name says.
    fn speaks_of(&self, _snapshot: usize) -> bool {
        true
    }
}

/// No contents were read: names are believed.
pub struct NamesOnly;

impl Evidence for NamesOnly {
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

impl Member {
    fn own(snapshot: usize, extends: bool) -> Self {
        Member {
            snapshot,
            until: Revision(i64::MAX),
            extends,
            own: true,
        }
    }
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
    /// In the catalog's order, which is that of creation.
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

    /// A snapshot's place on it.
    pub fn member(&self, snapshot: usize) -> Option<&Member> {
        let at = self.members.binary_search_by_key(&snapshot, |m| m.snapshot);
        at.ok().map(|at| &self.members[at])
    }

    /// When the first of its own snapshots was taken, if it branched off; in seconds since 1970.
    pub fn began(&self, catalog: &Catalog) -> Option<i64> {
        let own = self.members.iter().filter(|m| m.own);
        let created = own.map(|m| catalog.snapshots[m.snapshot].name.created);
        self.lineage.last().and(created.min())
    }

    /// The first and the last of its own snapshots.
    pub fn own_ends(&self) -> Vec<usize> {
        let mut own = self.members.iter().filter(|m| m.own).map(|m| m.snapshot);
        let first = own.next();
        first.into_iter().chain(own.next_back()).collect()
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
        let is_cut = n.is_full() && n.last >= highest && above[at + 1] >= n.last;
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

/// A timeline, and what is asked of all its members again and again.
struct Line {
    timeline: Timeline,
    /// The newest revision that it reaches.
    last: Option<Revision>,
    /// When it was last written to.
    activity: Option<(i64, usize)>,
    /// By snapshot, the revisions after which a delta follows it here.
    followed: Intervals,
}

/// Sorts snapshots into timelines, one after the other.
struct Builder<'a> {
    catalog: &'a Catalog,
    evidence: &'a dyn Evidence,
    lines: Vec<Line>,
}

impl<'a> Builder<'a> {
    fn new(catalog: &'a Catalog, evidence: &'a dyn Evidence) -> Self {
        let starts = catalog.snapshots.iter().map(|s| match s.name.kind {
            Kind::Full => s.name.last,
            Kind::Incr => s.name.start,
        });
        let main = Line {
            timeline: Timeline {
                id: MAIN.to_owned(),
                members: Vec::new(),
                lineage: Vec::new(),
            },
            last: None,
            activity: None,
            followed: Intervals::new(starts),
        };
        Builder {
            catalog,
            evidence,
            lines: vec![main],
        }
    }

    fn last_of(&self, x: usize) -> Revision {
        last_of(self.catalog, self.evidence, x)
    }

    /// Places the next snapshot: it goes where it fits best, and joins that timeline or forks off it.
    fn place(&mut self, x: usize) -> Result<()> {
        let compared = self.evidence.compared(x);
        let mut conflicts = Vec::with_capacity(self.lines.len());
        let mut best = None;
        for t in 0..self.lines.len() {
            let (fit, place) = self.fit(t, x, &compared)?;
            conflicts.push(match place {
                Place::Fork(r) => Some(r),
                Place::Begin => Some(Revision(1)),
                _ => None,
            });
            best = best.max(Some((fit, place)));
        }
        let (fit, place) = best.ok_or_else(|| Error::internal("no timeline to choose from"))?;
        let t = fit.timeline;
        if let Place::JoinForkedAt(fork) = place {
            self.lower_fork(t, fork);
        }
        let chosen = match place {
            Place::Fork(fork) => self.fork(t, fork, fork, x)?,
            Place::Begin => self.fork(t, Revision(1), self.last_of(x), x)?,
            Place::Join | Place::JoinForkedAt(_) => {
                self.join(t, x);
                t
            }
        };
        self.share(chosen, &conflicts, x);
        Ok(())
    }

    /// Puts a snapshot on a timeline, as its last.
    fn push(&mut self, t: usize, member: Member) {
        self.lines[t].timeline.members.push(member);
        self.count_in(t, &member);
    }

    /// Takes a member into what is known of all members.
    fn count_in(&mut self, t: usize, m: &Member) {
        let created = self.catalog.snapshots[m.snapshot].name.created;
        let ends = m.until.min(self.last_of(m.snapshot));
        let line = &mut self.lines[t];
        line.last = line.last.max(Some(ends));
        if m.until.0 == i64::MAX {
            line.activity = line.activity.max(Some((created, m.snapshot)));
        }
        line.followed.set(m.snapshot, ends);
    }

    /// Counts all members anew, after some were cut or taken away.
    fn recount(&mut self, t: usize) {
        let line = &mut self.lines[t];
        (line.last, line.activity) = (None, None);
        line.followed.clear();
        for at in 0..line.timeline.members.len() {
            let m = self.lines[t].timeline.members[at];
            self.count_in(t, &m);
        }
    }

    fn join(&mut self, t: usize, x: usize) {
        let last = self.lines[t].last;
        let extends = last.is_none_or(|l| self.last_of(x) > l);
        self.push(t, Member::own(x, extends));
    }

    /// Takes back what timeline `t` shares from `fork` on: its own history begins there.
    fn lower_fork(&mut self, t: usize, fork: Revision) {
        let (catalog, evidence) = (self.catalog, self.evidence);
        let members = &mut self.lines[t].timeline.members;
        members.retain_mut(|m| m.own || share_below(catalog, evidence, m, fork));
        self.recount(t);
        let Some(&(which, _)) = self.lines[t].timeline.lineage.last() else {
            return;
        };
        for line in &mut self.lines {
            let forks = line.timeline.lineage.iter_mut();
            for f in forks.filter(|f| f.0 == which) {
                f.1 = f.1.min(fork);
            }
        }
    }

    /// How well `x` fits timeline `t`, and how it would go there.
    fn fit(&self, t: usize, x: usize, compared: &[(usize, Comparison)]) -> Result<(Fit, Place)> {
        let line = &self.lines[t];
        // With what was placed here, and with what is shared.
        let (mut own, mut shared) = (Comparison::default(), Comparison::default());
        for &(other, c) in compared {
            let Some(m) = line.timeline.member(other) else {
                continue;
            };
            let with = if m.own { &mut own } else { &mut shared };
            with.conflict = first_of(with.conflict, c.conflict.filter(|&r| r <= m.until));
            with.agreed = with.agreed.max(c.agreed.map(|r| r.min(m.until)));
        }
        // It agrees with the timeline's own history later than it disagrees with what is shared:
        // less is shared than was thought.
        let forked_at = shared.conflict.filter(|&r| {
            own.agreed >= Some(r)
                && own.conflict.is_none_or(|c| c > r)
                && line.timeline.forked_at().is_some_and(|fork| r < fork)
        });
        let conflict = match forked_at {
            Some(_) => own.conflict,
            None => first_of(own.conflict, shared.conflict),
        };
        let is_read = self.evidence.last(x).is_some();
        let begins = self.catalog.snapshots[x].begins_timeline
            && is_read
            && !line.timeline.members.is_empty();
        let place = match (conflict, forked_at) {
            (Some(r), _) => Place::Fork(r),
            // Whoever took it saw that the cluster went on otherwise, which its content need not show: what is
            // compacted cannot disagree.
            (None, _) if begins => Place::Begin,
            (None, Some(r)) => Place::JoinForkedAt(r),
            (None, None) => Place::Join,
        };
        let agreed = own.agreed.max(shared.agreed);
        // If there is one timeline, there is nothing to choose from.
        let (connected, confirmed) = match self.lines.len() {
            1 => (true, false),
            _ => self.follows(t, x)?,
        };
        let fit = Fit {
            agreed: agreed.map(|a| conflict.map_or(a, |c| a.min(c.previous()))),
            connected,
            joins: conflict.is_none() && !begins,
            confirmed,
            adjacent: line.last == Some(self.catalog.snapshots[x].name.start.previous()),
            activity: line.activity,
            timeline: t,
        };
        Ok((fit, place))
    }

    /// Whether timeline `t` holds the revision before `x` and nothing speaks against `x` following it, and
    /// whether the versions of keys show that it does.
    fn follows(&self, t: usize, x: usize) -> Result<(bool, bool)> {
        let name = &self.catalog.snapshots[x].name;
        if name.is_full() {
            return Ok((true, false));
        }
        let before = name.start.previous();
        let mut holders = self.lines[t].followed.holding(before);
        if !self.evidence.speaks_of(x) {
            return Ok((holders.next().is_some(), false));
        }
        // Whoever holds the revision before it was most likely written last.
        let mut holders: Vec<usize> = holders.collect();
        holders.sort_unstable();
        let (mut connected, mut confirmed) = (false, false);
        for &holder in holders.iter().rev() {
            match self.evidence.continuity(holder, before, x)? {
                Continuity::Contradicted => return Ok((false, confirmed)),
                Continuity::Confirmed => (connected, confirmed) = (true, true),
                Continuity::Unknown => connected = true,
            }
        }
        Ok((connected, confirmed))
    }

    /// What lies below a fork belongs to both branches: gives `x`, which is on timeline `on`, to the
    /// others as far as they share it.
    fn share(&mut self, on: usize, conflicts: &[Option<Revision>], x: usize) {
        let name = &self.catalog.snapshots[x].name;
        let last = self.last_of(x);
        for t in (0..self.lines.len()).filter(|&t| t != on) {
            let between = divergence(&self.lines[t].timeline, &self.lines[on].timeline);
            let Some(mut fork) = between else {
                continue;
            };
            if let Some(Some(c)) = conflicts.get(t) {
                fork = fork.min(*c);
            }
            let until = if last < fork {
                Revision(i64::MAX)
            } else if !name.is_full() && name.start < fork {
                fork.previous()
            } else {
                continue;
            };
            let member = Member {
                snapshot: x,
                until,
                extends: false,
                own: false,
            };
            self.push(t, member);
        }
    }

    /// Adds a timeline for `x`, branching off `parent` at its first own revision, `fork`; named for what `x`
    /// holds at `told`.
    fn fork(&mut self, parent: usize, fork: Revision, told: Revision, x: usize) -> Result<usize> {
        let line = &self.lines[parent];
        let mut members = line.timeline.members.clone();
        members.retain_mut(|m| {
            m.own = false;
            share_below(self.catalog, self.evidence, m, fork)
        });
        members.push(Member::own(x, true));
        let mut lineage = line.timeline.lineage.clone();
        lineage.retain(|f| f.1 <= fork);
        lineage.push((self.lines.len(), fork));
        let mut id = format!("r{told}-{}", self.evidence.fingerprint(x, told)?);
        // Histories that are the same there may differ elsewhere.
        let more = format!("{id}-");
        let ids = self.lines.iter().map(|l| &l.timeline.id);
        match ids.filter(|i| **i == id || i.starts_with(&more)).count() {
            0 => {}
            n => id = format!("{more}{}", n + 1),
        }
        let new = Line {
            timeline: Timeline {
                id,
                members,
                lineage,
            },
            last: None,
            activity: None,
            followed: line.followed.clone(),
        };
        let t = self.lines.len();
        self.lines.push(new);
        self.recount(t);
        Ok(t)
    }
}

impl Timelines {
    /// Sorts the catalog's usable snapshots into timelines, in order of creation.
    ///
    /// # Errors
    /// What `evidence` returns.
    pub fn build(catalog: &Catalog, evidence: &dyn Evidence) -> Result<Self> {
        let mut builder = Builder::new(catalog, evidence);
        for x in catalog.usable().filter(|&x| !evidence.is_unreadable(x)) {
            builder.place(x)?;
        }
        let all = builder.lines.into_iter().map(|l| l.timeline).collect();
        Ok(Timelines { all })
    }

    /// The timeline with this ID.
    ///
    /// # Errors
    /// `NoSuchTimeline`.
    pub fn by_id(&self, id: &str) -> Result<&Timeline> {
        self.all.iter().find(|t| t.id == id).ok_or_else(|| {
            let ids: Vec<&str> = self.all.iter().map(|t| t.id.as_str()).collect();
            Reason::NoSuchTimeline.error(format!(
                "there is no timeline \"{id}\"; there are: {}",
                ids.join(", ")
            ))
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
        Err(Reason::InterleavedTimelines.error(format!(
            "two clusters write to this prefix: from revision {} on, timeline {} ({}) and timeline {} ({}) differ, and no history was written wholly after all others; \
             stop one of the writers, see `deltafold list --deep`, and choose with --timeline",
            divergence(t, u).unwrap_or_default(),
            t.id,
            names(t, u),
            u.id,
            names(u, t)
        )))
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
    let both = a.lineage.iter().zip(&b.lineage);
    let same = both.take_while(|(x, y)| x == y).count();
    let next = |t: &Timeline| t.lineage.get(same).map(|f| f.1);
    first_of(next(a), next(b))
}

/// The first of two revisions, of which none, one or both are there.
fn first_of(a: Option<Revision>, b: Option<Revision>) -> Option<Revision> {
    [a, b].into_iter().flatten().min()
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
    // Nothing is before something: so it counts as after, if nothing was ever written on the other branch since the fork.
    last.is_none() || first > last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::catalog::TIMELINES;
    use std::cell::Cell;
    use std::collections::HashMap;

    /// A bucket told in letters: name, and for each revision a letter that stands for its content.
    struct Told {
        catalog: Catalog,
        content: Vec<HashMap<i64, char>>,
        /// By index, what was not read although it is in doubt, and what cannot be read.
        unread: Vec<bool>,
        unreadable: Vec<bool>,
        /// By index, what the versions of keys say of it and of another one: by their sum.
        continuity: Vec<Continuity>,
        asked: Cell<usize>,
    }

    impl Told {
        /// `(name, first revision of `letters`, letters)`.
        fn new(told: &[(&str, i64, &str)]) -> Self {
            let names: Vec<&str> = told.iter().map(|(name, ..)| *name).collect();
            let catalog = Catalog::of_names(&names);
            let content: Vec<HashMap<i64, char>> = catalog
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
            Told {
                unread: vec![false; content.len()],
                unreadable: vec![false; content.len()],
                continuity: vec![Continuity::Unknown],
                asked: Cell::new(0),
                catalog,
                content,
            }
        }

        /// Histories that fork off one another, and snapshots of any part of them, some of which nobody can read.
        fn random(rng: &mut fastrand::Rng) -> Self {
            let mut histories: Vec<String> = Vec::new();
            for letter in 'a'..=rng.char('a'..='d') {
                let parent = histories.get(rng.usize(..histories.len().max(1)));
                let mut letters = parent.cloned().unwrap_or_default();
                letters.truncate(rng.usize(..40));
                letters.extend(std::iter::repeat_n(letter, 40 - letters.len()));
                histories.push(letters);
            }
            let mut told: Vec<(String, i64, &str)> = Vec::new();
            let mut notes = Vec::new();
            let mut created = 100;
            for _ in 0..rng.usize(..24) {
                created += rng.i64(0..3);
                let history = rng.choice(&histories).expect("there is one");
                let last = rng.usize(1..=30);
                let first = last - rng.usize(..last.min(12));
                match rng.u8(..4) {
                    0 => {
                        // Running clusters save more than they say.
                        let holds = last + rng.usize(..3);
                        let name = format!("Full-00000000-{last:08}-{created}");
                        if rng.u8(..6) == 0 {
                            notes.push(format!("{TIMELINES}/{name}"));
                        }
                        told.push((name, first as i64, &history[first..=holds]));
                    }
                    _ => told.push((
                        format!("Incr-{first:08}-{last:08}-{created}"),
                        first as i64,
                        &history[first..=last],
                    )),
                }
            }
            told.sort();
            told.dedup_by(|a, b| a.0 == b.0);
            let told: Vec<_> = told.iter().map(|t| (t.0.as_str(), t.1, t.2)).collect();
            let mut told = Told::new(&told);
            for s in &mut told.catalog.snapshots {
                s.begins_timeline = notes.iter().any(|n| n.ends_with(&s.name.to_string()));
                s.excluded = rng.u8(..12) == 0;
            }
            told.unread.fill_with(|| rng.u8(..6) == 0);
            told.unreadable.fill_with(|| rng.u8(..12) == 0);
            let all = [
                Continuity::Contradicted,
                Continuity::Unknown,
                Continuity::Confirmed,
            ];
            told.continuity = (0..7).map(|_| all[rng.usize(..3)]).collect();
            told
        }

        fn newest(&self) -> Result<String> {
            let t = Timelines::build(&self.catalog, self)?;
            Ok(t.newest(&self.catalog)?.id.clone())
        }
    }

    impl Told {
        fn compare(&self, a: usize, b: usize) -> Comparison {
            let both = self.content[a]
                .iter()
                .filter_map(|(r, c)| Some((Revision(*r), self.content[b].get(r)? == c)));
            let conflict = both.clone().filter(|x| !x.1).map(|x| x.0).min();
            let agreed = both
                .filter(|x| x.1 && conflict.is_none_or(|c| x.0 < c))
                .map(|x| x.0)
                .max();
            Comparison { conflict, agreed }
        }
    }

    impl Evidence for Told {
        fn compared(&self, x: usize) -> Vec<(usize, Comparison)> {
            let read = (0..x).filter(|&i| self.speaks_of(i) && self.speaks_of(x));
            read.map(|other| (other, self.compare(other, x))).collect()
        }
        fn continuity(&self, before: usize, _: Revision, after: usize) -> Result<Continuity> {
            self.asked.update(|n| n + 1);
            Ok(match self.speaks_of(before) && self.speaks_of(after) {
                true => self.continuity[(before + after) % self.continuity.len()],
                false => Continuity::Unknown,
            })
        }
        fn fingerprint(&self, s: usize, r: Revision) -> Result<String> {
            Ok(self.content[s]
                .get(&r.0)
                .map(char::to_string)
                .unwrap_or_default())
        }
        fn last(&self, s: usize) -> Option<Revision> {
            let last = self.content[s].keys().max();
            last.copied().map(Revision).filter(|_| self.speaks_of(s))
        }
        fn is_unreadable(&self, s: usize) -> bool {
            self.unreadable[s]
        }
        fn speaks_of(&self, s: usize) -> bool {
            !self.unread[s] && !self.unreadable[s]
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

    #[test]
    fn what_is_known_of_a_timeline_is_what_all_its_members_tell() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let mut forked = 0;
        for round in 0..crate::rounds(300, 3000) {
            let told = Told::random(&mut rng);
            let (catalog, names) = (&told.catalog, &told.catalog.snapshots);
            let mut builder = Builder::new(catalog, &told);
            for x in catalog.usable().filter(|&x| !told.is_unreadable(x)) {
                builder.place(x).unwrap();
                for line in &builder.lines {
                    let (t, members) = (&line.timeline, &line.timeline.members);
                    assert_eq!(line.last, t.last(catalog, &told), "round {round}: {t:?}");
                    let whole = members.iter().filter(|m| m.until.0 == i64::MAX);
                    let written = whole.map(|m| (names[m.snapshot].name.created, m.snapshot));
                    assert_eq!(line.activity, written.max(), "round {round}: {t:?}");
                    for x in 0..names.len() {
                        let found = members.iter().find(|m| m.snapshot == x);
                        assert_eq!(t.member(x), found, "round {round}: {t:?}");
                    }
                    for r in (-1..40).map(Revision) {
                        let holds = |m: &&Member| {
                            let n = &names[m.snapshot].name;
                            let ends = m.until.min(last_of(catalog, &told, m.snapshot));
                            let begins = match n.kind {
                                Kind::Full => n.last <= m.until && n.last <= r,
                                Kind::Incr => n.start <= r,
                            };
                            begins && r <= ends
                        };
                        let holders = members.iter().filter(holds).map(|m| m.snapshot);
                        let mut found: Vec<usize> = line.followed.holding(r).collect();
                        found.sort_unstable();
                        assert!(found.into_iter().eq(holders), "round {round}, {r}: {t:?}");
                    }
                }
            }
            forked += usize::from(builder.lines.len() > 1);
        }
        assert!(forked > 0);
    }

    /// Two streams of the same events since a fork: a delta is only asked about those that it follows.
    #[test]
    fn questions_grow_with_the_snapshots_and_not_with_their_square() {
        let letters = "a".repeat(10);
        let mut told = vec![
            ("Full-00000000-00000010-100".to_owned(), 10, "a"),
            ("Full-00000000-00000010-101".to_owned(), 10, "b"),
        ];
        for n in 1..=500 {
            let (one, two) = (n * 10 + 1, n * 10 + 6);
            let name = |first: i64, at: i64| format!("Incr-{first:08}-{:08}-{at}", first + 9);
            told.push((name(one, 100 + n * 10), one, letters.as_str()));
            told.push((name(two, 105 + n * 10), two, letters.as_str()));
        }
        let told: Vec<_> = told.iter().map(|t| (t.0.as_str(), t.1, t.2)).collect();
        let told = Told::new(&told);
        assert_eq!(Timelines::build(&told.catalog, &told).unwrap().all.len(), 2);
        let (asked, all) = (told.asked.get(), told.content.len());
        assert!((all..4 * all).contains(&asked), "{asked} for {all}");
    }
}
