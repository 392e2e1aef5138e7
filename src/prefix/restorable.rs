//! What can be restored from a backup, by revision and by time.
//!
//! A full holds its history down to its compacted revision, which its name does not tell. So the fulls on which a
//! range begins are read, within limits.

use crate::backup::Catalog;
use crate::backup::chain::{self, KnownBases};
use crate::backup::timeline::Timeline;
use crate::base::limits::Limits;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::prefix::Context;
use crate::prefix::contents::Contents;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet};

/// At most this many fulls are read to learn their compacted revisions, the newest first.
const MAX_FULLS: usize = 8;
/// The size of these fulls in the store, all together.
const MAX_STORED_BYTES: u64 = 64 << 20;
/// The size of one of these fulls without compression.
const MAX_DATABASE_BYTES: u64 = 1 << 30;

/// A range of revisions that can be restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Restorable {
    /// The timeline's ID.
    pub timeline: String,
    /// The oldest revision.
    pub first_revision: Revision,
    /// Whether there may be older ones: the full on which the range begins is large and was not read, so its
    /// history is not known. `list --deep` reads it.
    pub may_begin_earlier: bool,
    /// The newest revision.
    pub last_revision: Revision,
    /// The oldest time: when the oldest full of the range was taken, by its name.
    pub first_time: DateTime<Utc>,
    /// The newest time, when the last revision was saved: the creation time, by its name, of the first snapshot
    /// that reaches it. If that is a delta that was read, the time of its newest event.
    pub last_time: DateTime<Utc>,
}

impl Restorable {
    /// Returns the revisions as text: `275 to 628`.
    pub fn revisions(&self) -> String {
        let earlier = if self.may_begin_earlier {
            " or earlier"
        } else {
            ""
        };
        format!("{}{earlier} to {}", self.first_revision, self.last_revision)
    }
}

/// What fulls hold, as far as they were read.
#[derive(Default)]
pub(crate) struct Bases {
    pub(crate) known: KnownBases,
    /// The errors of fulls that are damaged, or that the store does not hand out.
    pub(crate) damaged: BTreeMap<usize, Error>,
    /// Fulls that are too large or could not be read.
    unread: Vec<usize>,
}

impl Bases {
    /// Begins with what is known of fulls.
    pub(crate) fn new(known: KnownBases) -> Self {
        Bases {
            known,
            ..Bases::default()
        }
    }

    /// Reads the fulls on which a range of the timelines begins, as far as the limits allow.
    ///
    /// # Errors
    /// `Terminated`; one that sets a full aside if a tag excludes it. A full that cannot be read is left out: only its name
    /// counts.
    pub(crate) fn read<'t>(
        mut self,
        ctx: &Context,
        catalog: &Catalog,
        timelines: impl IntoIterator<Item = &'t Timeline>,
    ) -> Result<Self> {
        let ctx = Context {
            limits: Limits {
                database_bytes: ctx.limits.database_bytes.min(MAX_DATABASE_BYTES),
                ..ctx.limits
            },
            ..ctx.clone()
        };
        let (mut tries, mut bytes) = (MAX_FULLS, MAX_STORED_BYTES);
        for timeline in timelines {
            while tries > 0
                && let Some(full) = self.next_to_read(catalog, timeline)
            {
                tries -= 1;
                let snapshot = &catalog.snapshots[full];
                if snapshot.bytes > bytes {
                    self.unread.push(full);
                    continue;
                }
                bytes -= snapshot.bytes;
                match ctx.full(snapshot) {
                    Ok((_, base)) => {
                        self.known.insert(full, base);
                    }
                    Err(e) if e.reason() == Reason::Terminated || e.is_of_excluded() => {
                        return Err(e);
                    }
                    Err(e) => {
                        self.unread.push(full);
                        // Its own limits are small, and names need no key.
                        let is_fault =
                            !matches!(e.reason(), Reason::TooLarge | Reason::CannotDecrypt);
                        if is_fault && e.reason().is_of_one_object() {
                            self.damaged.insert(full, e);
                        }
                    }
                }
            }
        }
        Ok(self)
    }

    /// The newest full on which a range begins and which is neither known nor left out.
    fn next_to_read(&self, catalog: &Catalog, timeline: &Timeline) -> Option<usize> {
        let ranges = chain::restorable(catalog, timeline, &self.known);
        let begins: HashSet<Revision> = ranges.iter().map(|r| r.0).collect();
        let mut unknown = self.unknown(catalog, timeline);
        let next = unknown.find(|(at, i)| begins.contains(at) && !self.unread.contains(i));
        next.map(|(_, i)| i)
    }

    /// The fulls of a timeline whose history is not known, each with the revision of its name, the newest first.
    fn unknown<'c>(
        &'c self,
        catalog: &'c Catalog,
        timeline: &Timeline,
    ) -> impl Iterator<Item = (Revision, usize)> + 'c {
        let fulls = chain::bases(catalog, timeline).into_iter();
        fulls
            .filter(|i| !self.known.contains_key(i))
            .map(|i| (catalog.snapshots[i].name.last, i))
    }

    /// Returns the ranges of a timeline, in ascending order, with their times.
    pub(crate) fn restorable(
        &self,
        catalog: &Catalog,
        contents: &Contents,
        timeline: &Timeline,
    ) -> Vec<Restorable> {
        let mut fulls: Vec<(Revision, DateTime<Utc>)> = Vec::new();
        // The first and the last revision of each member, and the time of its last revision.
        let mut members: Vec<(Revision, Revision, DateTime<Utc>)> = Vec::new();
        for m in &timeline.members {
            let name = &catalog.snapshots[m.snapshot].name;
            let survey = contents.surveys.get(&m.snapshot);
            if name.is_full() && name.last <= m.until {
                fulls.push((name.last, name.created_at()));
            }
            let last = survey.map_or(name.last, |s| s.last.max(name.last));
            let last = last.min(m.until);
            let time = survey.and_then(|s| s.last_time);
            members.push((name.start, last, time.unwrap_or(name.created_at())));
        }
        fulls.sort_unstable();
        members.sort_unstable();
        let unknown: HashSet<Revision> = self.unknown(catalog, timeline).map(|u| u.0).collect();
        let mut members = members.into_iter().peekable();
        // The members that begin in this range or before it, by their times.
        let mut begun: BinaryHeap<Reverse<(DateTime<Utc>, Revision)>> = BinaryHeap::new();
        let mut restorable = Vec::new();
        for (first, last) in chain::restorable(catalog, timeline, &self.known) {
            let in_range = &fulls[fulls.partition_point(|f| f.0 < first)..];
            let in_range = &in_range[..in_range.partition_point(|f| f.0 <= last)];
            let first_time = in_range.iter().map(|f| f.1).min().unwrap_or_default();
            while let Some((_, last_of_member, time)) = members.next_if(|m| m.0 <= last) {
                begun.push(Reverse((time, last_of_member)));
            }
            while begun.peek().is_some_and(|b| b.0.1 < last) {
                begun.pop();
            }
            let last_time = begun.peek().map_or(first_time, |b| b.0.0);
            restorable.push(Restorable {
                timeline: timeline.id.clone(),
                first_revision: first,
                may_begin_earlier: unknown.contains(&first),
                last_revision: last,
                first_time,
                last_time: last_time.max(first_time),
            });
        }
        restorable
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup;
    use crate::prefix::scan::Scan;

    /// A scan by names of a random backup with gaps.
    fn random_scan(rng: &mut fastrand::Rng) -> Scan {
        let mut listing = Vec::new();
        for at in 0..rng.usize(1..30) {
            let last = rng.i64(1..60);
            let name = match rng.u8(..3) {
                0 => format!("Full-00000000-{last:08}"),
                _ => format!("Incr-{:08}-{last:08}", (last - rng.i64(0..6)).max(1)),
            };
            let path = format!("v2/{name}-{}", 100 + at as i64 * rng.i64(1..5));
            listing.push(backup::ListedObject { path, bytes: 1 });
        }
        Scan::of_names(Catalog::from_listing(listing)).unwrap()
    }

    #[test]
    fn the_times_of_a_range_are_those_of_the_snapshots_at_its_ends() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let mut several = 0;
        for round in 0..crate::rounds(300, 3000) {
            let scan = random_scan(&mut rng);
            let timeline = &scan.timelines.all[0];
            let ranges = Bases::default().restorable(&scan.catalog, &Contents::default(), timeline);
            several += usize::from(ranges.len() > 1);
            for r in ranges {
                let (first, last) = (r.first_revision, r.last_revision);
                let names = || scan.catalog.snapshots.iter().map(|s| &s.name);
                let fulls = names().filter(|n| n.is_full() && (first..=last).contains(&n.last));
                let first_time = fulls.map(|n| n.created_at()).min().unwrap();
                let at_end = names().filter(|n| n.start <= last && last <= n.last);
                let last_time = at_end.map(|n| n.created_at()).min().unwrap();
                let times = (first_time, last_time.max(first_time));
                assert_eq!((r.first_time, r.last_time), times, "round {round}");
            }
        }
        assert!(several > 0);
    }
}
