//! Timelines: which snapshots tell one history, and which history is the newest.
//!
//! A restore to an older revision forks the history: the prefix then holds two histories with the same
//! revision numbers. A record of the snapshotter is a wall between the two: see [`Wall`]. Between two walls,
//! snapshots of other tools may fork, too. There names do not tell histories apart, contents do: two snapshots
//! that both hold a revision either agree on it or belong to two timelines. Contents are needed only for
//! [`doubtful`] snapshots.
//!
//! Everything here is a pure function of the catalog and the [`Evidence`]. `prefix::scan` reads the contents.

mod builder;
mod paths;

#[cfg(test)]
mod tests;

use crate::backup::catalog::{Catalog, Wall};
use crate::backup::name::Kind;
use crate::backup::survey::{Comparison, Continuity, Held};
use crate::base::opt::TIMELINE;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use builder::Builder;

/// The ID of the timeline of the oldest snapshot.
pub const MAIN: &str = "main";
/// The most timelines that are told apart. A writer of the store can forge a history with a few bytes, and each
/// one costs time and memory for every snapshot.
pub const MOST_TIMELINES: usize = 100;

/// The numbers of forks of one part: those of another part are greater or smaller.
const FORKS_OF_A_PART: usize = 1 << 32;

/// Returns the deltas among `snapshots` that repeat revisions, by their first revision, each behind the delta whose
/// revisions it repeats.
pub fn overlaps(catalog: &Catalog, snapshots: impl Iterator<Item = usize>) -> Vec<(usize, usize)> {
    let name = |i: usize| &catalog.snapshots[i].name;
    let mut deltas: Vec<usize> = snapshots.filter(|&i| !name(i).is_full()).collect();
    deltas.sort_by_key(|&i| (name(i).start, name(i).last, i));
    let mut overlaps = Vec::new();
    let mut reached: Option<usize> = None;
    for delta in deltas {
        if let Some(before) = reached {
            if name(delta).start <= name(before).last {
                overlaps.push((before, delta));
            }
            if name(delta).last <= name(before).last {
                continue;
            }
        }
        reached = Some(delta);
    }
    overlaps
}

/// What the contents of snapshots show. Snapshots are given by their index in the catalog. Of a snapshot that
/// was not read, nothing is known.
pub trait Evidence {
    /// Returns the revisions that a snapshot holds, if it can be compared with others between the same walls.
    fn held(&self, _snapshot: usize) -> Option<Held> {
        None
    }
    /// Returns whether a snapshot was read, so that it can be compared across a wall.
    fn has_content(&self, _snapshot: usize) -> bool {
        false
    }
    /// Compares two snapshots that can be compared.
    ///
    /// # Errors
    /// `Io`, `Terminated`.
    fn compare(&self, _a: usize, _b: usize) -> Result<Comparison> {
        Ok(Comparison::default())
    }
    /// Returns whether the events of `after` follow the state that `before` has at `until`.
    ///
    /// # Errors
    /// `Io`, `Terminated`.
    fn continuity(&self, _before: usize, _until: Revision, _after: usize) -> Result<Continuity> {
        Ok(Continuity::Unknown)
    }
    /// Returns a short name for what a snapshot holds at a revision.
    ///
    /// # Errors
    /// `Io`.
    fn fingerprint(&self, _snapshot: usize, _revision: Revision) -> Result<String> {
        Ok(String::new())
    }
    /// Returns the newest revision in the content of a snapshot, if it was read.
    fn last(&self, _snapshot: usize) -> Option<Revision> {
        None
    }
    /// Returns whether reading the snapshot failed. Such a snapshot is placed on no timeline.
    fn is_unreadable(&self, _snapshot: usize) -> bool {
        false
    }
    /// Returns whether the snapshot was read. A snapshot that was not read agrees with all others and follows
    /// everything that its name allows.
    fn was_read(&self, _snapshot: usize) -> bool {
        true
    }
}

/// The evidence if no content was read: names are believed.
pub struct NamesOnly;

impl Evidence for NamesOnly {
    fn was_read(&self, _: usize) -> bool {
        false
    }
}

/// A snapshot on a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimelineMember {
    /// Index in the catalog.
    pub snapshot: usize,
    /// The last revision of the snapshot that belongs to this timeline; `i64::MAX` if all of it does.
    pub until: Revision,
    /// Whether it was the first snapshot to hold its newest revision here. A snapshot that only repeats
    /// revisions (a compacted full, a second stream) is no sign of a cluster at work.
    extends: bool,
    /// Whether it was placed on this timeline; otherwise it is shared from another one.
    own: bool,
}

impl TimelineMember {
    fn own(snapshot: usize, extends: bool) -> Self {
        TimelineMember {
            snapshot,
            until: Revision(i64::MAX),
            extends,
            own: true,
        }
    }
}

/// One history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// [`MAIN`], `r<revision>-<time>` of the record with which it begins, or `r<first own revision>-<fingerprint of
    /// the state there>`. If that name is taken, `-2` and so on is appended. The ID stays the same as long as the
    /// record and the snapshots that show the fork exist.
    pub id: String,
    /// The wall before it; `None` if there is none.
    pub wall: Option<Wall>,
    /// The ID of the timeline that it left, and the last revision that both have, if that is known.
    pub left: Option<(String, Revision)>,
    /// The snapshots of the timeline in the catalog's order, which is that of creation.
    pub members: Vec<TimelineMember>,
    /// The forks between the first timeline and this one: the number of the fork, and its first own revision.
    lineage: Vec<(usize, Revision)>,
}

impl Timeline {
    /// Returns the first timeline behind a wall. With its snapshots it shares nothing with those before.
    fn root(nth: usize, wall: Option<&Wall>) -> Self {
        let (id, lineage) = match wall.filter(|_| nth > 0) {
            Some(wall) => (
                wall.timeline_id(),
                vec![(nth * FORKS_OF_A_PART, Revision(1))],
            ),
            None => (MAIN.to_owned(), Vec::new()),
        };
        Timeline {
            id,
            wall: wall.cloned(),
            left: None,
            members: Vec::new(),
            lineage,
        }
    }

    /// Returns the snapshots that were placed here and are not shared from another timeline, in order.
    fn own(&self) -> impl DoubleEndedIterator<Item = usize> + Clone + '_ {
        let own = self.members.iter().filter(|m| m.own);
        own.map(|m| m.snapshot)
    }

    /// How much it is worth to be told apart, if there are too many timelines.
    fn value(&self, catalog: &Catalog, evidence: &dyn Evidence) -> (bool, Option<usize>) {
        let is_full = |i: usize| catalog.snapshots[i].name.is_full() && evidence.was_read(i);
        (self.own().any(is_full), self.own().next_back())
    }

    /// Returns the newest revision of all members: by content if it was read, otherwise by name.
    pub fn last(&self, catalog: &Catalog, evidence: &dyn Evidence) -> Option<Revision> {
        let last = |m: &TimelineMember| m.until.min(last_of(catalog, evidence, m.snapshot));
        self.members.iter().map(last).max()
    }

    /// Returns a snapshot as a member of this timeline, if it is one.
    pub fn member(&self, snapshot: usize) -> Option<&TimelineMember> {
        let found = self.members.binary_search_by_key(&snapshot, |m| m.snapshot);
        found.ok().map(|i| &self.members[i])
    }

    /// Returns the timeline with those of its snapshots for which `stays` is true.
    pub fn part(&self, stays: impl Fn(usize) -> bool) -> Timeline {
        let mut part = self.clone();
        part.members.retain(|m| stays(m.snapshot));
        part
    }

    /// Returns when the first own snapshot was created, in seconds since 1970; `None` for a timeline that did
    /// not fork off another one.
    pub fn began(&self, catalog: &Catalog) -> Option<i64> {
        let created = self.own().map(|i| catalog.snapshots[i].name.created);
        self.lineage.last().and(created.min())
    }

    /// Returns the first and the last own snapshot.
    pub fn own_ends(&self) -> Vec<usize> {
        let mut own = self.own();
        let first = own.next();
        first.into_iter().chain(own.next_back()).collect()
    }

    /// Returns the first own revision; `None` for a timeline that did not fork off another one, or if that
    /// revision is not known.
    pub fn forked_at(&self) -> Option<Revision> {
        let fork = self.lineage.last().map(|fork| fork.1);
        fork.filter(|&fork| fork > Revision(1))
    }

    /// Returns whether it holds a full that can be its base.
    fn has_full(&self, catalog: &Catalog) -> bool {
        self.own().any(|i| catalog.snapshots[i].name.is_full())
    }
}

/// The newest revision of a snapshot, by its name or its content, whichever is newer.
fn last_of(catalog: &Catalog, evidence: &dyn Evidence, i: usize) -> Revision {
    let by_name = catalog.snapshots[i].name.last;
    evidence.last(i).map_or(by_name, |last| last.max(by_name))
}

/// Returns the snapshots whose contents are needed to tell timelines apart. Only names are used.
///
/// The revisions of a single snapshotter only grow in order of creation. A full is a clean cut if all
/// snapshots before it end at or below it and all later ones begin at or above it. The snapshots between two
/// cuts are judged by themselves, and are doubtful if their revisions do not grow.
///
/// Nothing crosses a wall, so the snapshots between two walls are judged by themselves, too.
pub fn doubtful(catalog: &Catalog) -> Vec<usize> {
    let parts = catalog.parts().into_iter();
    parts
        .flat_map(|(_, part)| doubtful_in(catalog, &part))
        .collect()
}

fn doubtful_in(catalog: &Catalog, order: &[usize]) -> Vec<usize> {
    let name = |i: usize| &catalog.snapshots[i].name;
    // For each position in `order`: the lowest revision that a snapshot from there on allows for a cut before
    // it.
    let mut lowest_after = vec![Revision(i64::MAX); order.len() + 1];
    for (position, &i) in order.iter().enumerate().rev() {
        let highest_cut = match name(i).kind {
            // A full may repeat the revision of the cut. The first revision of a delta must be above it.
            Kind::Full => name(i).last,
            Kind::Incr => name(i).start.previous(),
        };
        lowest_after[position] = lowest_after[position + 1].min(highest_cut);
    }
    let mut doubtful = Vec::new();
    let mut segment = Vec::new();
    let mut grows = true;
    let mut highest = Revision(-1);
    for (position, &i) in order.iter().enumerate() {
        let n = name(i);
        grows &= match n.kind {
            Kind::Full => n.last >= highest,
            Kind::Incr => n.start > highest,
        };
        highest = highest.max(n.last);
        segment.push(i);
        let is_cut = n.is_full() && n.last >= highest && lowest_after[position + 1] >= n.last;
        if is_cut || position + 1 == order.len() {
            if !grows {
                doubtful.append(&mut segment);
                doubtful.dedup();
            }
            segment = if is_cut { vec![i] } else { Vec::new() };
            grows = true;
        }
    }
    doubtful
}

/// All timelines of a prefix.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timelines {
    /// The timelines, in order of their first own snapshot. Contents tell apart those without a record, which are at most
    /// [`MOST_TIMELINES`]: first those with a readable full of their own, then those with the newest snapshots.
    pub all: Vec<Timeline>,
    /// The own snapshots of timelines beyond that number. They are on no timeline, and `gc` keeps them.
    pub left_out: Vec<usize>,
}

impl Timelines {
    /// Sorts the usable snapshots of a catalog into timelines, in order of creation.
    ///
    /// # Errors
    /// Fails with the errors of `evidence`.
    pub fn build(catalog: &Catalog, evidence: &dyn Evidence) -> Result<Self> {
        let mut parts = catalog.parts();
        let mut timelines = Timelines::default();
        if parts.is_empty() {
            parts.push((None, Vec::new()));
        }
        for (nth, (wall, part)) in parts.into_iter().enumerate() {
            let root = Timeline::root(nth, wall);
            let mut builder = Builder::new(catalog, evidence, root, &part);
            for snapshot in part {
                if !evidence.is_unreadable(snapshot) {
                    builder.place(snapshot)?;
                }
            }
            builder.finish(&mut timelines);
        }
        timelines.leave_out(catalog, evidence);
        paths::join(catalog, evidence, &mut timelines.all)?;
        Ok(timelines)
    }

    /// Leaves timelines out that only contents tell apart, until there are not too many of them: those without a readable
    /// full of their own first, and among these the ones that were written to least recently. Those of the newest part
    /// go last.
    fn leave_out(&mut self, catalog: &Catalog, evidence: &dyn Evidence) {
        let last_wall = self.all.last().and_then(|t| t.wall.clone());
        let told_apart = (1..self.all.len()).filter(|&t| self.all[t].wall == self.all[t - 1].wall);
        let mut least_first: Vec<usize> = told_apart.collect();
        least_first.sort_by_cached_key(|&t| {
            let t = &self.all[t];
            (t.wall == last_wall, t.value(catalog, evidence))
        });
        least_first.truncate(least_first.len().saturating_sub(MOST_TIMELINES));
        // From the back, so that the other indexes stay right.
        least_first.sort_unstable();
        for t in least_first.into_iter().rev() {
            let removed = self.all.remove(t);
            self.left_out.extend(removed.own());
        }
        self.left_out.sort_unstable();
    }

    /// Returns a warning if there are more timelines than can be told apart.
    pub fn warning(&self) -> Option<String> {
        (!self.left_out.is_empty()).then(|| {
            format!(
                "more than {MOST_TIMELINES} histories contradict each other, so {} snapshots are on no timeline, and gc keeps them: somebody may write forged snapshots to this store",
                self.left_out.len()
            )
        })
    }

    /// Returns the timeline with this ID.
    ///
    /// # Errors
    /// `NoSuchTimeline`.
    pub fn by_id(&self, id: &str) -> Result<&Timeline> {
        self.all.iter().find(|t| t.id == id).ok_or_else(|| {
            let ids: Vec<&str> = self.all.iter().map(|t| t.id.as_str()).collect();
            Reason::NoSuchTimeline.error(format!(
                "there is no timeline \"{id}\"; choose one of: {}",
                ids.join(", ")
            ))
        })
    }

    /// Returns the newest timeline: behind the newest wall that has a full behind it. Of several timelines there,
    /// all snapshots of the newest since its fork from each other were created after all of the other's.
    ///
    /// # Errors
    /// `InterleavedTimelines` if no timeline is the newest.
    pub fn newest(&self, catalog: &Catalog) -> Result<&Timeline> {
        self.newest_at(catalog, i64::MAX)
    }

    /// Returns the timeline that was the newest at a time, in seconds since 1970, by the walls around the time.
    ///
    /// # Errors
    /// As [`newest`](Self::newest).
    pub fn newest_at(&self, catalog: &Catalog, second: i64) -> Result<&Timeline> {
        let begun = |t: &&Timeline| t.wall.as_ref().is_none_or(|w| w.second <= second);
        let begun: Vec<&Timeline> = self.all.iter().filter(begun).collect();
        let with_full = begun.iter().rev().find(|t| t.has_full(catalog));
        // A time before all walls is that of the first timeline.
        let wall = match with_full.or(begun.last()).copied().or(self.all.first()) {
            Some(t) => &t.wall,
            None => return Err(Error::internal("no timeline to choose from")),
        };
        let part = || self.all.iter().filter(|t| t.wall == *wall);
        let mut interleaved = None;
        for t in part() {
            let mut others = part().filter(|u| u.id != t.id);
            match others.find(|u| !was_written_after(catalog, t, u)) {
                None => return Ok(t),
                // For the error, prefer two timelines that interleave to two of a circle in which each was
                // written after the next one.
                Some(u) if interleaved.is_none() || !was_written_after(catalog, u, t) => {
                    interleaved = Some((t, u));
                }
                Some(_) => {}
            }
        }
        let (t, u) = interleaved.ok_or_else(|| Error::internal("no timeline to choose from"))?;
        Err(interleaved_error(catalog, t, u))
    }

    /// Returns the walls behind which there are snapshots and no full, newer than the newest timeline: a
    /// snapshotter ended before it gave its full a name, or somebody forged the record.
    pub fn without_full(&self, catalog: &Catalog) -> Vec<&Wall> {
        let with_full = self.all.iter().rposition(|t| t.has_full(catalog));
        let newer = &self.all[with_full.map_or(0, |t| t + 1)..];
        newer.iter().filter_map(|t| t.wall.as_ref()).collect()
    }
}

fn interleaved_error(catalog: &Catalog, t: &Timeline, u: &Timeline) -> Error {
    let paths = |a: &Timeline, b: &Timeline| {
        let own = own_members(catalog, a, b);
        let paths: Vec<&str> = own.map(|i| catalog.snapshots[i].path.as_str()).collect();
        paths.join(", ")
    };
    Reason::InterleavedTimelines.error(format!(
        "two clusters write to this prefix: from revision {} on, timeline {} ({}) and timeline {} ({}) differ, and no timeline was written wholly after all others; \
         stop one of the writers, see `deltafold list --deep`, and choose with {TIMELINE}",
        divergence(t, u).unwrap_or_default(),
        t.id,
        paths(t, u),
        u.id,
        paths(u, t)
    ))
}

/// The first revision at which two timelines differ.
fn divergence(a: &Timeline, b: &Timeline) -> Option<Revision> {
    let forks = a.lineage.iter().zip(&b.lineage);
    let common = forks.take_while(|(x, y)| x == y).count();
    let next_fork = |t: &Timeline| t.lineage.get(common).map(|fork| fork.1);
    lower_of(next_fork(a), next_fork(b))
}

/// Returns the lower of two revisions; either may be absent.
fn lower_of(a: Option<Revision>, b: Option<Revision>) -> Option<Revision> {
    [a, b].into_iter().flatten().min()
}

/// The snapshots that show a cluster at work on `a` and not on `b`.
fn own_members<'a>(
    catalog: &'a Catalog,
    a: &'a Timeline,
    b: &'a Timeline,
) -> impl Iterator<Item = usize> + 'a {
    let fork = divergence(a, b).unwrap_or(Revision(i64::MAX));
    let is_own = move |m: &&TimelineMember| {
        m.extends && m.until.0 == i64::MAX && catalog.snapshots[m.snapshot].name.last >= fork
    };
    a.members.iter().filter(is_own).map(|m| m.snapshot)
}

/// Whether all own snapshots of `a` were created after all own snapshots of `b`; true if `b` has none since
/// the fork.
fn was_written_after(catalog: &Catalog, a: &Timeline, b: &Timeline) -> bool {
    let created = |i: usize| catalog.snapshots[i].name.created;
    let first = own_members(catalog, a, b).map(created).min();
    let last = own_members(catalog, b, a).map(created).max();
    last.is_none() || first > last
}
