//! Builds the timelines between two walls: places one snapshot after the other on the timeline that it fits best.

use super::{
    Evidence, MOST_TIMELINES, Timeline, TimelineMember, Timelines, divergence, last_of, lower_of,
};
use crate::backup::catalog::Catalog;
use crate::backup::intervals::Intervals;
use crate::backup::name::Kind;
use crate::backup::survey::{Comparison, Continuity, Held};
use crate::error::{Error, Result};
use crate::mvcc::Revision;
use std::collections::{HashMap, HashSet};

/// The most snapshots of a timeline that a delta is checked against: those that begin last before it.
const MOST_HOLDERS: usize = 16;

/// How a snapshot goes on a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Placement {
    /// It joins.
    Join,
    /// It joins, and shows that the timeline forked off earlier than was known: at this revision.
    JoinForkedAt(Revision),
    /// It forks off at this revision.
    Fork(Revision),
    /// It begins a timeline that, as far as is known, shares nothing with the others: its first revisions agree
    /// with another history, and the later ones do not.
    Begin,
}

/// How well a snapshot fits a timeline. The greatest is the best; the fields are in order of importance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Fit {
    /// A delta follows the timeline, and nothing in it disagrees. Else a change that two histories happen to share
    /// would count more than the full that the delta follows.
    is_next: bool,
    /// The newest revision that is the same in both.
    agreed: Option<Revision>,
    /// The timeline holds the revision before the delta's first one, and nothing contradicts that the delta
    /// follows.
    connected: bool,
    /// They never disagree, so the snapshot joins and does not fork off.
    joins: bool,
    /// The versions of keys show that the delta follows.
    confirmed: bool,
    /// The delta begins right after the end of the timeline.
    adjacent: bool,
    /// When the newest member that was not cut at a fork was created, and its index in the catalog.
    activity: Option<(i64, usize)>,
    timeline: usize,
}

/// A timeline under construction, with facts about all of its members that are needed again and again.
pub(super) struct GrowingTimeline {
    pub(super) timeline: Timeline,
    /// The newest revision of all members.
    pub(super) last: Option<Revision>,
    /// When the newest member that was not cut at a fork was created, and its index in the catalog.
    pub(super) activity: Option<(i64, usize)>,
    /// For each member, the range of revisions that it holds. A delta that begins right after one of them may
    /// follow it.
    pub(super) followed: Intervals,
    /// For each member that can be compared, the range of its content.
    held: Intervals,
}

/// What is known of the snapshot that is being placed and others: timelines share members.
#[derive(Default)]
struct Known {
    comparisons: HashMap<usize, Comparison>,
    continuities: HashMap<usize, Continuity>,
}

pub(super) struct Builder<'a> {
    catalog: &'a Catalog,
    evidence: &'a dyn Evidence,
    /// The first snapshot between the two walls. Intervals are numbered from it.
    first: usize,
    /// For each snapshot between the walls, what [`Evidence::held`] returns.
    held: Vec<Option<Held>>,
    pub(super) timelines: Vec<GrowingTimeline>,
    /// The number of the last fork.
    forks: usize,
    left_out: Vec<usize>,
}

impl<'a> Builder<'a> {
    /// Begins with the snapshots between two walls, in order.
    pub(super) fn new(
        catalog: &'a Catalog,
        evidence: &'a dyn Evidence,
        root: Timeline,
        part: &[usize],
    ) -> Self {
        let first_of_part = part.first().copied().unwrap_or_default();
        let all = first_of_part..part.last().map_or(first_of_part, |last| last + 1);
        let starts = catalog.snapshots[all.clone()].iter();
        let starts = starts.map(|s| match s.name.kind {
            Kind::Full => s.name.last,
            Kind::Incr => s.name.start,
        });
        let held: Vec<Option<Held>> = all.map(|i| evidence.held(i)).collect();
        let first = |h: &Option<Held>| h.map_or(Revision(0), |h| h.first);
        let forks = root.lineage.last().map_or(0, |fork| fork.0);
        let root = GrowingTimeline {
            timeline: root,
            last: None,
            activity: None,
            followed: Intervals::new(starts),
            held: Intervals::new(held.iter().map(first)),
        };
        Builder {
            catalog,
            evidence,
            first: first_of_part,
            held,
            timelines: vec![root],
            forks,
            left_out: Vec::new(),
        }
    }

    /// Adds the timelines to those of the parts before.
    pub(super) fn finish(self, all: &mut Timelines) {
        for growing in self.timelines {
            let mut timeline = growing.timeline;
            timeline.id = free_id(timeline.id, all.all.iter());
            all.all.push(timeline);
        }
        all.left_out.extend(self.left_out);
    }

    fn last_of(&self, snapshot: usize) -> Revision {
        last_of(self.catalog, self.evidence, snapshot)
    }

    /// Places the next snapshot: it joins the timeline that it fits best, or forks off it.
    pub(super) fn place(&mut self, snapshot: usize) -> Result<()> {
        let mut known = Known::default();
        let mut conflicts = Vec::with_capacity(self.timelines.len());
        let mut best = None;
        for t in 0..self.timelines.len() {
            let (fit, placement) = self.fit(t, snapshot, &mut known)?;
            conflicts.push(match placement {
                Placement::Fork(r) => Some(r),
                Placement::Begin => Some(Revision(1)),
                Placement::Join | Placement::JoinForkedAt(_) => None,
            });
            best = best.max(Some((fit, placement)));
        }
        let (fit, placement) = best.ok_or_else(|| Error::internal("no timeline to choose from"))?;
        let t = fit.timeline;
        if let Placement::JoinForkedAt(fork) = placement {
            self.lower_fork(t, fork);
        }
        let chosen = match placement {
            Placement::Fork(fork) => self.fork(t, fork, fork, snapshot)?,
            Placement::Begin => self.fork(t, Revision(1), self.last_of(snapshot), snapshot)?,
            Placement::Join | Placement::JoinForkedAt(_) => {
                self.join(t, snapshot);
                t
            }
        };
        self.share(chosen, &conflicts, snapshot);
        if self.timelines.len() > MOST_TIMELINES {
            self.leave_one_out();
        }
        Ok(())
    }

    /// Takes a timeline away: one without a readable full of its own if there is one, and among these the one
    /// that was written to least recently. The first timeline stays.
    fn leave_one_out(&mut self) {
        let value = |&t: &usize| {
            self.timelines[t]
                .timeline
                .value(self.catalog, self.evidence)
        };
        if let Some(t) = (1..self.timelines.len()).min_by_key(value) {
            let removed = self.timelines.remove(t).timeline;
            self.left_out.extend(removed.own());
        }
    }

    /// Appends a member to timeline `t`.
    fn push(&mut self, t: usize, member: TimelineMember) {
        self.timelines[t].timeline.members.push(member);
        self.note_member(t, &member);
    }

    /// Updates the facts about the members of timeline `t` by one of them.
    fn note_member(&mut self, t: usize, m: &TimelineMember) {
        let created = self.catalog.snapshots[m.snapshot].name.created;
        let last = m.until.min(self.last_of(m.snapshot));
        let interval = m.snapshot - self.first;
        let growing = &mut self.timelines[t];
        growing.last = growing.last.max(Some(last));
        if m.until.0 == i64::MAX {
            growing.activity = growing.activity.max(Some((created, m.snapshot)));
        }
        growing.followed.set(interval, last);
        if let Some(held) = self.held[interval] {
            growing.held.set(interval, held.last.min(m.until));
        }
    }

    /// Cuts the members of timeline `t` for which `is_cut` is true to their revisions below `fork`, and finds
    /// the facts about its members anew.
    fn cut_members(&mut self, t: usize, fork: Revision, is_cut: impl Fn(&TimelineMember) -> bool) {
        let growing = &mut self.timelines[t];
        (growing.last, growing.activity) = (None, None);
        for mut m in std::mem::take(&mut growing.timeline.members) {
            if is_cut(&m) && !cut_below(self.catalog, self.evidence, &mut m, fork) {
                let interval = m.snapshot - self.first;
                let growing = &mut self.timelines[t];
                growing.followed.remove(interval);
                growing.held.remove(interval);
            } else {
                self.push(t, m);
            }
        }
    }

    fn join(&mut self, t: usize, snapshot: usize) {
        let last = self.timelines[t].last;
        let extends = last.is_none_or(|last| self.last_of(snapshot) > last);
        self.push(t, TimelineMember::own(snapshot, extends));
    }

    /// Lowers the fork of timeline `t`: its own history begins at `fork`, and it shares nothing from there
    /// on.
    fn lower_fork(&mut self, t: usize, fork: Revision) {
        self.cut_members(t, fork, |m| !m.own);
        let Some(&(number, _)) = self.timelines[t].timeline.lineage.last() else {
            return;
        };
        for growing in &mut self.timelines {
            for (other, revision) in &mut growing.timeline.lineage {
                if *other == number {
                    *revision = (*revision).min(fork);
                }
            }
        }
    }

    /// Returns how well a snapshot fits timeline `t`, and how it would go there.
    fn fit(&self, t: usize, snapshot: usize, known: &mut Known) -> Result<(Fit, Placement)> {
        let growing = &self.timelines[t];
        let timeline = &growing.timeline;
        let (own, shared) = self.compare(t, snapshot, known)?;
        // If the snapshot conflicts with the shared history at a revision, and agrees with the timeline's own
        // history there or later, the timeline forked off earlier than was known.
        let forked_at = shared.conflict.filter(|&r| {
            own.agreed >= Some(r)
                && own.conflict.is_none_or(|c| c > r)
                && timeline.forked_at().is_some_and(|fork| r < fork)
        });
        let conflict = match forked_at {
            Some(_) => own.conflict,
            None => lower_of(own.conflict, shared.conflict),
        };
        let together = Comparison {
            conflict,
            agreed: own.agreed.max(shared.agreed),
        };
        let name = &self.catalog.snapshots[snapshot].name;
        let placement = match (conflict, forked_at) {
            (Some(_), _) if !name.is_full() && together.agreed >= Some(name.start) => {
                Placement::Begin
            }
            (Some(r), _) => Placement::Fork(r),
            (None, Some(r)) => Placement::JoinForkedAt(r),
            (None, None) => Placement::Join,
        };
        // With one timeline there is no choice to make.
        let (connected, confirmed) = match self.timelines.len() {
            1 => (true, false),
            _ => self.follows(t, snapshot, known)?,
        };
        let fit = Fit {
            is_next: !name.is_full() && connected && conflict.is_none(),
            agreed: together.common(),
            connected,
            joins: conflict.is_none(),
            confirmed,
            adjacent: growing.last == Some(name.start.previous()),
            activity: growing.activity,
            timeline: t,
        };
        Ok((fit, placement))
    }

    /// Compares a snapshot with timeline `t`: with its own members, and with those that it shares.
    ///
    /// The members of a timeline do not contradict each other, so of those that hold every change of a range
    /// only as many are compared as cover it.
    fn compare(
        &self,
        t: usize,
        snapshot: usize,
        known: &mut Known,
    ) -> Result<(Comparison, Comparison)> {
        let mut compared = (Comparison::default(), Comparison::default());
        let Some(held) = self.held[snapshot - self.first] else {
            return Ok(compared);
        };
        let growing = &self.timelines[t];
        let (mut own, mut shared) = (Vec::new(), Vec::new());
        for other in growing.held.meeting(held.first, held.last) {
            let member = growing.timeline.member(self.first + other);
            if let (Some(m), Some(h)) = (member, self.held[other]) {
                if m.own { &mut own } else { &mut shared }.push((h, m));
            }
        }
        for (result, members) in [(&mut compared.0, own), (&mut compared.1, shared)] {
            for m in cover(held, members) {
                let c = match known.comparisons.get(&m.snapshot) {
                    Some(&c) => c,
                    None => self.evidence.compare(m.snapshot, snapshot)?,
                };
                known.comparisons.insert(m.snapshot, c);
                result.add(c, m.until);
            }
        }
        Ok(compared)
    }

    /// Returns two facts: whether a delta may follow timeline `t`, which holds the revision before it and
    /// does not contradict it; and whether the versions of keys show that it follows. A full always may.
    fn follows(&self, t: usize, snapshot: usize, known: &mut Known) -> Result<(bool, bool)> {
        let name = &self.catalog.snapshots[snapshot].name;
        if name.is_full() {
            return Ok((true, false));
        }
        let before = name.start.previous();
        let first = self.first;
        let holders = self.timelines[t].followed.holding(before);
        let mut holders = holders.map(|interval| first + interval);
        if !self.evidence.was_read(snapshot) {
            return Ok((holders.next().is_some(), false));
        }
        let mut holders: Vec<usize> = holders.take(MOST_HOLDERS).collect();
        holders.sort_unstable();
        let (mut connected, mut confirmed) = (false, false);
        // The newest holders first: these decide most often.
        for &holder in holders.iter().rev() {
            let continuity = match known.continuities.get(&holder) {
                Some(&continuity) => continuity,
                None => self.evidence.continuity(holder, before, snapshot)?,
            };
            known.continuities.insert(holder, continuity);
            match continuity {
                Continuity::Contradicted => return Ok((false, confirmed)),
                Continuity::Confirmed => (connected, confirmed) = (true, true),
                Continuity::Unknown => connected = true,
            }
        }
        Ok((connected, confirmed))
    }

    /// Shares a snapshot on timeline `on` with the other timelines: what lies below a fork belongs to both
    /// branches.
    fn share(&mut self, on: usize, conflicts: &[Option<Revision>], snapshot: usize) {
        let name = &self.catalog.snapshots[snapshot].name;
        let last = self.last_of(snapshot);
        for t in (0..self.timelines.len()).filter(|&t| t != on) {
            let fork = divergence(&self.timelines[t].timeline, &self.timelines[on].timeline);
            let Some(mut fork) = fork else {
                continue;
            };
            if let Some(Some(conflict)) = conflicts.get(t) {
                fork = fork.min(*conflict);
            }
            let until = if last < fork {
                Revision(i64::MAX)
            } else if !name.is_full() && name.start < fork {
                fork.previous()
            } else {
                continue;
            };
            let member = TimelineMember {
                snapshot,
                until,
                extends: false,
                own: false,
            };
            self.push(t, member);
        }
    }

    /// Adds a timeline for a snapshot, which branches off `parent` at its first own revision, `fork`. The ID
    /// is made from what the snapshot holds at `named_at`. Returns the index of the new timeline.
    fn fork(
        &mut self,
        parent: usize,
        fork: Revision,
        named_at: Revision,
        snapshot: usize,
    ) -> Result<usize> {
        let parent = &self.timelines[parent];
        let members = parent.timeline.members.iter();
        let members = members.map(|m| TimelineMember { own: false, ..*m });
        let mut lineage = parent.timeline.lineage.clone();
        // Of a parent that forked off there or later, nothing of its own is shared.
        lineage.retain(|f| f.1 < fork);
        self.forks += 1;
        lineage.push((self.forks, fork));
        let first_id = format!(
            "r{named_at}-{}",
            self.evidence.fingerprint(snapshot, named_at)?
        );
        // Two timelines may have the same fingerprint there and differ elsewhere.
        let id = free_id(first_id, self.timelines.iter().map(|t| &t.timeline));
        let new = GrowingTimeline {
            timeline: Timeline {
                id,
                wall: parent.timeline.wall.clone(),
                left: (fork > Revision(1)).then(|| (parent.timeline.id.clone(), fork.previous())),
                members: members.collect(),
                lineage,
            },
            last: None,
            activity: None,
            followed: parent.followed.clone(),
            held: parent.held.clone(),
        };
        let t = self.timelines.len();
        self.timelines.push(new);
        self.cut_members(t, fork, |_| true);
        self.push(t, TimelineMember::own(snapshot, true));
        Ok(t)
    }
}

/// Returns an ID that no timeline has: `id`, or with `-2` and so on appended.
fn free_id<'t>(id: String, timelines: impl Iterator<Item = &'t Timeline>) -> String {
    let taken: HashSet<&str> = timelines.map(|t| t.id.as_str()).collect();
    let numbered = (2..).map(|n| format!("{id}-{n}"));
    let mut ids = std::iter::once(id.clone()).chain(numbered);
    ids.find(|id| !taken.contains(id.as_str())).unwrap_or(id)
}

/// Returns the members to compare with a snapshot: few that cover its revisions, each reaching farthest, and
/// every one of which a compaction left only a part there.
fn cover(snapshot: Held, members: Vec<(Held, &TimelineMember)>) -> Vec<&TimelineMember> {
    let (whole, mut chosen): (Vec<_>, Vec<_>) = members
        .into_iter()
        .partition(|(h, _)| h.first == h.complete_from || h.complete_from <= snapshot.first);
    let mut whole: Vec<_> = whole
        .into_iter()
        .map(|(h, m)| (h.first, h.last.min(m.until), m))
        .collect();
    whole.sort_unstable_by_key(|&(first, ..)| first);
    let mut chosen: Vec<&TimelineMember> = chosen.drain(..).map(|(_, m)| m).collect();
    let mut whole = whole.into_iter().peekable();
    let (mut at, mut farthest) = (snapshot.first, None);
    while at <= snapshot.last {
        while let Some(next) = whole.next_if(|w| w.0 <= at) {
            let reaches = (next.1, next.2.snapshot);
            if farthest.is_none_or(|(f, _)| f < reaches) {
                farthest = Some((reaches, next.2));
            }
        }
        match (farthest, whole.peek()) {
            (Some(((last, _), m)), _) if last >= at => {
                chosen.push(m);
                at = last.next();
            }
            (_, Some(next)) => at = next.0,
            (_, None) => break,
        }
    }
    chosen
}

/// Cuts a member to its revisions below `fork`. Returns false if it has none there.
pub(super) fn cut_below(
    catalog: &Catalog,
    evidence: &dyn Evidence,
    m: &mut TimelineMember,
    fork: Revision,
) -> bool {
    let name = &catalog.snapshots[m.snapshot].name;
    m.until = m.until.min(fork.previous());
    match name.kind {
        // A full that ends after the fork is no base below it.
        Kind::Full => last_of(catalog, evidence, m.snapshot) < fork,
        Kind::Incr => name.start < fork,
    }
}
