//! Decides which snapshots the retention policy keeps, and gives the reason for each snapshot.
//!
//! These are pure functions of the catalog, its timelines, the options and the current time: they read and delete
//! nothing.
//!
//! Anybody who can write to the store can forge a name. So a decision lists the fulls that it rests on.
//! `ops::gc` reads these fulls, and decides again without those whose content does not match their name.

mod decide;
mod kept;
mod periods;
mod reason;
mod removal;
mod timeline_snapshots;

#[cfg(test)]
mod tests;

pub use decide::{RetentionDecision, decide};
pub use periods::Periods;
pub use reason::RetentionReason;
pub use removal::{NewestLost, newest_lost, removal_chains};
pub use timeline_snapshots::chain_of;

use crate::backup::catalog::Catalog;
use crate::backup::name::SnapshotName;
use crate::backup::timeline::Timelines;
use chrono::{DateTime, TimeDelta, Utc};
use std::collections::BTreeMap;
use timeline_snapshots::TimelineSnapshots;

/// The rule by which fulls are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Keeps the newest full of each calendar period, on each timeline.
    Exponential(Periods),
    /// Keeps this many of the newest fulls.
    Limit(u32),
}

/// The retention policy.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The rule for fulls.
    pub policy: Policy,
    /// How long a delta is kept after a newer full has superseded it. `None`: with `Exponential` such deltas
    /// go at once, with `Limit` they stay as long as the fulls around them.
    pub delta_retention: Option<TimeDelta>,
    /// Every revision that can be restored and was current within this time before now stays restorable.
    pub restorable_window: Option<TimeDelta>,
}

/// The facts about a backup from which [`decide`] decides. Snapshots are given by their index in the catalog.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    /// The snapshots.
    pub catalog: &'a Catalog,
    /// Their timelines. Contents have settled the cases that names leave open.
    pub timelines: &'a Timelines,
    /// The snapshots whose names do not tell which timeline they belong to.
    pub doubtful: &'a [usize],
    /// Tells whether a doubtful snapshot could not be read.
    pub is_unreadable: &'a dyn Fn(usize) -> bool,
    /// Fulls that are kept and otherwise ignored.
    pub uncounted: &'a BTreeMap<usize, Uncounted>,
    /// The current time: the earlier one if the clocks of this machine and of the store differ.
    pub now: DateTime<Utc>,
}

/// Why a full is not counted. An uncounted full is no base, supersedes nothing, and takes no place in the
/// policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uncounted {
    /// The content is damaged, or does not match the name.
    Damaged,
    /// The content was not read.
    NotRead,
}

impl<'a> Facts<'a> {
    fn name(&self, i: usize) -> &'a SnapshotName {
        &self.catalog.snapshots[i].name
    }

    /// Returns whether the snapshot's name has a time after now.
    fn is_future(&self, i: usize) -> bool {
        self.name(i).created > self.now.timestamp()
    }

    fn is_counted_full(&self, i: usize) -> bool {
        self.name(i).is_full() && !self.uncounted.contains_key(&i)
    }

    /// The snapshots of each timeline, in the order of `timelines`.
    fn by_timeline(&self) -> Vec<TimelineSnapshots> {
        let snapshots_of =
            |t| TimelineSnapshots::new(self.catalog, t).without(self.catalog, self.uncounted);
        self.timelines.all.iter().map(snapshots_of).collect()
    }
}

/// The time of a number of seconds since 1970.
fn time_at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(seconds, 0).unwrap_or_default()
}
