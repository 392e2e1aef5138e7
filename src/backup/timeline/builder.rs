//! Builds timelines: places one snapshot after the other on the timeline that it fits best.
//!
//! Called by [`Timelines::build`](super::Timelines::build).

use super::{Evidence, MAIN, Timeline, TimelineMember, divergence, last_of, lower_of};
use crate::backup::catalog::Catalog;
use crate::backup::intervals::Intervals;
use crate::backup::name::Kind;
use crate::backup::survey::{Comparison, Continuity};
use crate::error::{Error, Result};
use crate::mvcc::Revision;

/// How a snapshot goes on a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Placement {
    /// It joins.
    Join,
    /// It joins, and shows that the timeline forked off earlier than was known: at this revision.
    JoinForkedAt(Revision),
    /// It forks off at this revision.
    Fork(Revision),
    /// It begins a timeline that, as far as is known, shares nothing with the others.
    Begin,
}

/// How well a snapshot fits a timeline. The greatest is the best; the fields are in order of importance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Fit {
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
}

pub(super) struct Builder<'a> {
    catalog: &'a Catalog,
    evidence: &'a dyn Evidence,
    pub(super) timelines: Vec<GrowingTimeline>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(catalog: &'a Catalog, evidence: &'a dyn Evidence) -> Self {
        let starts = catalog.snapshots.iter().map(|s| match s.name.kind {
            Kind::Full => s.name.last,
            Kind::Incr => s.name.start,
        });
        let main = GrowingTimeline {
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
            timelines: vec![main],
        }
    }

    pub(super) fn finish(self) -> Vec<Timeline> {
        self.timelines.into_iter().map(|t| t.timeline).collect()
    }

    fn last_of(&self, snapshot: usize) -> Revision {
        last_of(self.catalog, self.evidence, snapshot)
    }

    /// Places the next snapshot: it joins the timeline that it fits best, or forks off it.
    pub(super) fn place(&mut self, snapshot: usize) -> Result<()> {
        let compared = self.evidence.compared(snapshot);
        let mut conflicts = Vec::with_capacity(self.timelines.len());
        let mut best = None;
        for t in 0..self.timelines.len() {
            let (fit, placement) = self.fit(t, snapshot, &compared)?;
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
        Ok(())
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
        let growing = &mut self.timelines[t];
        growing.last = growing.last.max(Some(last));
        if m.until.0 == i64::MAX {
            growing.activity = growing.activity.max(Some((created, m.snapshot)));
        }
        growing.followed.set(m.snapshot, last);
    }

    /// Finds the facts about all members of timeline `t` anew, after some were cut or taken away.
    fn note_all_members(&mut self, t: usize) {
        let growing = &mut self.timelines[t];
        (growing.last, growing.activity) = (None, None);
        growing.followed.clear();
        for i in 0..growing.timeline.members.len() {
            let member = self.timelines[t].timeline.members[i];
            self.note_member(t, &member);
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
        let (catalog, evidence) = (self.catalog, self.evidence);
        let members = &mut self.timelines[t].timeline.members;
        members.retain_mut(|m| m.own || cut_below(catalog, evidence, m, fork));
        self.note_all_members(t);
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
    fn fit(
        &self,
        t: usize,
        snapshot: usize,
        compared: &[(usize, Comparison)],
    ) -> Result<(Fit, Placement)> {
        let growing = &self.timelines[t];
        let timeline = &growing.timeline;
        // The comparison with the timeline's own members, and with those that it shares.
        let (mut own, mut shared) = (Comparison::default(), Comparison::default());
        for &(other, c) in compared {
            let Some(m) = timeline.member(other) else {
                continue;
            };
            let with = if m.own { &mut own } else { &mut shared };
            with.conflict = lower_of(with.conflict, c.conflict.filter(|&r| r <= m.until));
            with.agreed = with.agreed.max(c.agreed.map(|r| r.min(m.until)));
        }
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
        let begins = self.catalog.snapshots[snapshot].begins_timeline
            && self.evidence.last(snapshot).is_some()
            && !timeline.members.is_empty();
        let placement = match (conflict, forked_at) {
            (Some(r), _) => Placement::Fork(r),
            // The snapshotter saw another history when it took this full. The content need not show it: a
            // compacted full holds no change that could disagree.
            (None, _) if begins => Placement::Begin,
            (None, Some(r)) => Placement::JoinForkedAt(r),
            (None, None) => Placement::Join,
        };
        let agreed = own.agreed.max(shared.agreed);
        // With one timeline there is no choice to make.
        let (connected, confirmed) = match self.timelines.len() {
            1 => (true, false),
            _ => self.follows(t, snapshot)?,
        };
        let start = self.catalog.snapshots[snapshot].name.start;
        let fit = Fit {
            agreed: agreed.map(|a| conflict.map_or(a, |c| a.min(c.previous()))),
            connected,
            joins: conflict.is_none() && !begins,
            confirmed,
            adjacent: growing.last == Some(start.previous()),
            activity: growing.activity,
            timeline: t,
        };
        Ok((fit, placement))
    }

    /// Returns two facts: whether a delta may follow timeline `t`, which holds the revision before it and
    /// does not contradict it; and whether the versions of keys show that it follows. A full always may.
    fn follows(&self, t: usize, snapshot: usize) -> Result<(bool, bool)> {
        let name = &self.catalog.snapshots[snapshot].name;
        if name.is_full() {
            return Ok((true, false));
        }
        let before = name.start.previous();
        let mut holders = self.timelines[t].followed.holding(before);
        if !self.evidence.was_read(snapshot) {
            return Ok((holders.next().is_some(), false));
        }
        let mut holders: Vec<usize> = holders.collect();
        holders.sort_unstable();
        let (mut connected, mut confirmed) = (false, false);
        // The newest holders first: these decide most often.
        for &holder in holders.iter().rev() {
            match self.evidence.continuity(holder, before, snapshot)? {
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
        let mut members = parent.timeline.members.clone();
        members.retain_mut(|m| {
            m.own = false;
            cut_below(self.catalog, self.evidence, m, fork)
        });
        members.push(TimelineMember::own(snapshot, true));
        let mut lineage = parent.timeline.lineage.clone();
        lineage.retain(|f| f.1 <= fork);
        lineage.push((self.timelines.len(), fork));
        let mut id = format!(
            "r{named_at}-{}",
            self.evidence.fingerprint(snapshot, named_at)?
        );
        // Two timelines may have the same fingerprint there and differ elsewhere.
        let numbered = format!("{id}-");
        let ids = self.timelines.iter().map(|t| &t.timeline.id);
        match ids
            .filter(|i| **i == id || i.starts_with(&numbered))
            .count()
        {
            0 => {}
            n => id = format!("{numbered}{}", n + 1),
        }
        let new = GrowingTimeline {
            timeline: Timeline {
                id,
                members,
                lineage,
            },
            last: None,
            activity: None,
            followed: parent.followed.clone(),
        };
        let t = self.timelines.len();
        self.timelines.push(new);
        self.note_all_members(t);
        Ok(t)
    }
}

/// Cuts a member to its revisions below `fork`. Returns false if it has none there.
fn cut_below(
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
