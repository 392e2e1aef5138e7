//! Decides from a scan of the store which snapshot comes next: a delta, or a full and why.
//!
//! Pure functions without I/O: a scan, the cluster's revision and the current time are arguments.

use crate::backup::catalog::Wall;
use crate::backup::chain::{self, Choice};
use crate::backup::timeline::Timeline;
use crate::backup::{Catalog, Compression, Kind, Snapshot, SnapshotName};
use crate::base::duration;
use crate::error::{Error, Reason};
use crate::mvcc::Revision;
use crate::prefix::last_saved::{End, MOST_DELTAS};
use crate::prefix::scan::Scan;
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use std::time::Duration;

/// Why a full snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum FullReason {
    /// The user asked for a full.
    Requested,
    /// A full is due by the schedule.
    Scheduled,
    /// The store holds no snapshot.
    EmptyBucket,
    /// The store holds deltas only.
    NoFull,
    /// The newest full is older than allowed.
    FullTooOld,
    /// The cluster holds other changes than the store at the last saved revision: another history.
    HistoryMismatch,
    /// The cluster has compacted the last saved revision, or revisions after it.
    Compacted,
    /// The cluster's newest revision is below the last saved one: another history.
    ClusterBehind,
    /// Revisions before the last saved one are missing, so further deltas would be useless.
    RevisionGap,
    /// A snapshot that is needed to find the newest timeline cannot be read.
    CorruptSnapshot,
    /// A snapshot is larger than the limits for reading allow.
    TooLarge,
    /// Two histories were written at the same time.
    InterleavedTimelines,
    /// It is unknown what the store holds at the last saved revision.
    Unverifiable,
    /// The cause in the record of a full whose history nothing proves, at a revision that the store has already.
    Unproven,
}

/// Why a full is taken, as a reason and in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FullCause {
    /// The stable reason.
    pub reason: FullReason,
    /// The reason in words; the text may change.
    pub message: String,
    /// Whether the cluster continues the history that was saved last.
    pub continuity: Continuity,
}

/// What is known of the cluster and the history that was saved last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continuity {
    /// A watch has compared the last saved changes: the cluster continues it.
    Proven,
    /// Nothing was compared.
    Unknown,
    /// The cluster has another history. Both have the changes up to this revision, if that is known.
    Broken(Option<Revision>),
}

impl FullReason {
    /// What a record says of a full whose history nothing proves.
    pub(super) fn if_unproven(self) -> Self {
        match self {
            FullReason::Requested
            | FullReason::Scheduled
            | FullReason::FullTooOld
            | FullReason::Compacted
            | FullReason::Unverifiable => FullReason::Unproven,
            cause => cause,
        }
    }
}

/// Returns the cause of the first full in an empty store.
pub(super) fn nothing_saved() -> FullCause {
    FullCause::new(FullReason::EmptyBucket, "the store holds no snapshot")
}

/// Returns the cause of a full if no snapshot in the store counts.
fn nothing_counts() -> FullCause {
    FullCause::new(FullReason::EmptyBucket, "no snapshot counts")
}

impl FullCause {
    pub(super) fn new(reason: FullReason, message: impl Into<String>) -> Self {
        let continuity = match reason {
            // There is nothing to continue, or deltas led up to this full.
            FullReason::EmptyBucket
            | FullReason::Requested
            | FullReason::Scheduled
            | FullReason::FullTooOld => Continuity::Proven,
            FullReason::HistoryMismatch | FullReason::ClusterBehind => Continuity::Broken(None),
            _ => Continuity::Unknown,
        };
        FullCause {
            reason,
            message: message.into(),
            continuity,
        }
    }

    /// The same cause, if nothing was compared.
    pub(super) fn uncompared(self) -> Self {
        FullCause {
            continuity: Continuity::Unknown,
            ..self
        }
    }

    /// Returns the cause for a snapshot of the store that cannot be read.
    pub(super) fn from_bad_data(e: &Error) -> Self {
        let reason = match e.reason() {
            Reason::TooLarge => FullReason::TooLarge,
            _ => FullReason::CorruptSnapshot,
        };
        FullCause::new(reason, e.to_string())
    }

    /// Returns the cause for timelines or chains that no delta can continue.
    fn from_broken_history(e: Error) -> Self {
        let reason = match e.reason() {
            Reason::NoSnapshots => FullReason::NoFull,
            Reason::RevisionGap | Reason::OutOfRange => FullReason::RevisionGap,
            Reason::InterleavedTimelines => FullReason::InterleavedTimelines,
            _ => FullReason::Unverifiable,
        };
        FullCause::new(reason, e.to_string())
    }
}

/// The end of the newest timeline in the store: the point at which deltas continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupState {
    /// The timeline's ID.
    pub timeline: String,
    /// The last saved revision.
    pub last: Revision,
    /// The newest snapshot that holds the last saved revision.
    pub holder: Snapshot,
    /// The last deltas that lead up to it without a gap, the oldest first.
    pub last_deltas: Vec<Snapshot>,
    /// Whether the timeline has deltas.
    pub has_deltas: bool,
    /// The newest full of the timeline.
    pub full: Option<Snapshot>,
    /// Why deltas after `last` would be useless; `None` if they can be restored.
    pub broken: Option<FullCause>,
}

/// The newest snapshot, as far as the name of the next one depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewestSnapshot {
    /// The latest time in a name, in seconds since 1970. The next name is not older, even if the clock was
    /// set back.
    pub created: i64,
    /// Whether a full has that time.
    pub is_full: bool,
    /// The compression of the newest snapshot.
    pub compression: Compression,
}

/// The largest plausible clock error. A name with a time farther in the future is ignored as forged.
const MAX_SECONDS_AHEAD: i64 = 366 * 86_400;

impl From<&SnapshotName> for NewestSnapshot {
    fn from(name: &SnapshotName) -> Self {
        NewestSnapshot {
            created: name.created,
            is_full: name.kind == Kind::Full,
            compression: name.compression,
        }
    }
}

impl NewestSnapshot {
    /// Returns the newest snapshot or record, including excluded snapshots. Ignores names with a forged time.
    pub fn read(catalog: &Catalog, now: DateTime<Utc>) -> Option<Self> {
        let is_plausible = |s: &&Snapshot| {
            let max_ahead = if s.untrusted { 0 } else { MAX_SECONDS_AHEAD };
            s.name.created - now.timestamp() <= max_ahead
        };
        // The catalog sorts by time; within one second fulls come last.
        let newest = catalog.snapshots.iter().rev().find(is_plausible)?;
        let mut newest = NewestSnapshot::from(&newest.name);
        if let Some(wall) = newest_wall(&catalog.walls, now)
            && wall.second >= newest.created
        {
            (newest.created, newest.is_full) = (wall.second, true);
        }
        Some(newest)
    }
}

/// Returns the newest record with a plausible time.
pub(super) fn newest_wall(walls: &[Wall], now: DateTime<Utc>) -> Option<&Wall> {
    walls.iter().rev().find(|wall| is_plausible(wall, now))
}

/// Returns whether a record's time is not too far in the future.
pub(super) fn is_plausible(wall: &Wall, now: DateTime<Utc>) -> bool {
    wall.second - now.timestamp() <= MAX_SECONDS_AHEAD
}

impl BackupState {
    /// Returns the snapshots that hold the last saved changes.
    pub(super) fn end(&self) -> End<'_> {
        End {
            last: self.last,
            holder: &self.holder,
            deltas: &self.last_deltas,
            full: self.full.as_ref(),
        }
    }

    /// Finds the end of the newest timeline.
    ///
    /// # Errors
    /// Why a full is needed, whatever the cluster holds.
    pub fn read(scan: &Scan, now: DateTime<Utc>) -> Result<Self, FullCause> {
        let catalog = &scan.catalog;
        if catalog.usable().next().is_none() {
            let damaged = scan.damaged.values().next();
            let damaged = damaged.map(FullCause::from_bad_data);
            let unread = scan.untrusted_warning();
            let unread = unread.map(|message| FullCause::new(FullReason::CorruptSnapshot, message));
            return Err(damaged.or(unread).unwrap_or_else(nothing_counts));
        }
        if let Some((_, e)) = scan.contents.unreadable.iter().next() {
            return Err(FullCause::from_bad_data(e));
        }
        if let Some(wall) = newest_wall(&catalog.walls, now)
            && !has_full_behind(scan, wall)
        {
            let message = format!(
                "{} says that another history begins, and its full was not saved",
                wall.path
            );
            return Err(FullCause {
                continuity: Continuity::Broken(None),
                ..FullCause::new(FullReason::NoFull, message)
            });
        }
        let timeline = scan
            .timelines
            .newest(catalog)
            .map_err(FullCause::from_broken_history)?;
        let last = timeline
            .last(catalog, &scan.contents)
            .ok_or_else(nothing_counts)?;
        let holder = newest_holder(scan, timeline, last).ok_or_else(nothing_counts)?;
        let known = scan.contents.known_bases();
        let broken = match chain::choose(catalog, timeline, None, &known) {
            Ok(Choice::Chosen(_)) => None,
            Ok(Choice::ReadFirst(i)) => Some(FullCause::new(
                FullReason::RevisionGap,
                format!(
                    "by names, revisions are missing after {}",
                    catalog.snapshots[i].path
                ),
            )),
            Err(e) => Some(FullCause::from_broken_history(e)),
        };
        Ok(BackupState {
            timeline: timeline.id.clone(),
            last,
            holder: holder.clone(),
            last_deltas: last_deltas(scan, timeline, last),
            has_deltas: timeline
                .members
                .iter()
                .any(|m| !catalog.snapshots[m.snapshot].name.is_full()),
            full: newest_full(scan, timeline).cloned(),
            broken,
        })
    }
}

/// Returns whether a usable full has the second of a wall or a later one.
fn has_full_behind(scan: &Scan, wall: &Wall) -> bool {
    let mut is_first = true;
    for i in scan.catalog.usable() {
        let name = &scan.catalog.snapshots[i].name;
        if name.created < wall.second {
            is_first = false;
        } else if name.is_full() {
            return true;
        }
    }
    // Without a snapshot before it, the wall separates nothing.
    is_first
}

/// Returns the last deltas that lead up to the revision `last` without a gap, the oldest first.
fn last_deltas(scan: &Scan, timeline: &Timeline, last: Revision) -> Vec<Snapshot> {
    let mut deltas = Vec::new();
    let mut reaches = last;
    for link in chain::all_links(&scan.catalog, timeline).iter().rev() {
        let snapshot = &scan.catalog.snapshots[link.snapshot];
        if deltas.len() == MOST_DELTAS || link.until < reaches {
            break;
        }
        reaches = snapshot.name.start.previous();
        deltas.push(snapshot.clone());
    }
    deltas.reverse();
    deltas
}

/// Returns the newest full of a timeline.
fn newest_full<'a>(scan: &'a Scan, timeline: &Timeline) -> Option<&'a Snapshot> {
    let members = timeline.members.iter();
    let on_timeline = members.map(|m| (&scan.catalog.snapshots[m.snapshot], m.until));
    let fulls = on_timeline.filter(|(s, until)| s.name.is_full() && *until >= s.name.last);
    fulls
        .map(|(full, _)| full)
        .max_by_key(|s| (s.name.created, s.name.last))
}

/// Returns the newest snapshot of a timeline that holds the revision `last`.
fn newest_holder<'a>(scan: &'a Scan, timeline: &Timeline, last: Revision) -> Option<&'a Snapshot> {
    let mut holders = Vec::new();
    for member in &timeline.members {
        let snapshot = &scan.catalog.snapshots[member.snapshot];
        let surveyed = scan.contents.surveys.get(&member.snapshot).map(|s| s.last);
        let end = snapshot.name.last.max(surveyed.unwrap_or_default());
        if member.until >= last && snapshot.name.start <= last && end >= last {
            holders.push(snapshot);
        }
    }
    // If the history forked at that very revision, the newest snapshot tells how it continues.
    holders
        .into_iter()
        .max_by_key(|s| (s.name.created, s.name.kind == Kind::Full))
}

/// Returns why a full has to be taken before any delta, for a cluster at revision `current`.
///
/// `None` does not guarantee that deltas continue: the watch may still find another history or a compaction.
pub fn full_needed(backup: &BackupState, current: i64) -> Option<FullCause> {
    if let Some(broken) = &backup.broken {
        return Some(broken.clone());
    }
    (current < backup.last.0).then(|| cluster_behind(backup.last, current))
}

/// Returns the cause for a cluster at revision `current` that is behind the last saved revision.
pub(super) fn cluster_behind(last: Revision, current: i64) -> FullCause {
    let message = format!(
        "the cluster is at revision {current}, the store at {last}: it has another history"
    );
    FullCause::new(FullReason::ClusterBehind, message)
}

/// Returns a cause if the newest full is at least `max_age` old and the cluster has changed since. A
/// `max_age` of zero means that no full is too old.
pub fn full_too_old(
    full: Option<&SnapshotName>,
    current: Revision,
    now: DateTime<Utc>,
    max_age: Duration,
) -> Option<FullCause> {
    let full = full.filter(|f| f.last < current)?;
    let age = now - full.created_at();
    let max = TimeDelta::from_std(max_age).unwrap_or(TimeDelta::MAX);
    if max_age.is_zero() || age < max {
        return None;
    }
    let age = duration::whole(age.to_std().unwrap_or_default());
    let message = format!("the newest full, {full}, is {age} old");
    Some(FullCause::new(FullReason::FullTooOld, message))
}

/// Returns the time for a new snapshot's name, in seconds since 1970: now, but never before the newest
/// snapshot.
///
/// Within one second deltas sort before fulls, so anything after a full needs a later second. A full may
/// begin a new timeline and must sort after all other snapshots, so it always needs a later second.
pub fn name_time(kind: Kind, newest: Option<NewestSnapshot>, now: DateTime<Utc>) -> i64 {
    let earliest = newest.map_or(0, |n| {
        n.created + i64::from(n.is_full || kind == Kind::Full)
    });
    now.timestamp().max(earliest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::trust::Trust;

    fn full(name: &str) -> SnapshotName {
        name.parse().unwrap()
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    #[test]
    fn a_new_name_is_never_older_than_the_newest_snapshot() {
        let newest = |created, is_full| {
            Some(NewestSnapshot {
                created,
                is_full,
                compression: Compression::None,
            })
        };
        let delta = |newest, now| name_time(Kind::Incr, newest, at(now));
        assert_eq!(delta(None, 100), 100);
        assert_eq!(delta(newest(90, true), 100), 100);
        // Within one second a delta may follow a delta, but nothing may follow a full.
        assert_eq!(delta(newest(100, false), 100), 100);
        assert_eq!(delta(newest(100, true), 100), 101);
        assert_eq!(name_time(Kind::Full, newest(100, false), at(100)), 101);
        // The clock was set back.
        assert_eq!(delta(newest(500, false), 100), 500);
        assert_eq!(delta(newest(500, true), 100), 501);
    }

    fn scan_of(names: &[&str]) -> Scan {
        let mut catalog = Catalog::of_names(names);
        Trust::OnlyEncrypted.mark(&mut catalog);
        Scan::of_names(catalog).unwrap()
    }

    #[test]
    fn forged_names_do_not_move_the_time_of_new_names() {
        let newest = |names: &[&str], now| {
            NewestSnapshot::read(&scan_of(names).catalog, at(now)).map(|n| n.created)
        };
        let names = [
            "Full-00000000-00000010-1000.age",
            "Full-00000000-00000011-8210266876799.age",
            "Full-00000000-00000012-5000",
        ];
        assert_eq!(newest(&names, 4000), Some(1000));
        assert_eq!(newest(&names, 5000), Some(5000));
        // The clock was ahead for some days and has been corrected.
        assert_eq!(newest(&names[..1], 500), Some(1000));
    }

    #[test]
    fn a_full_is_too_old_by_its_name_and_only_if_something_changed() {
        let f = full("Full-00000000-00000010-1000");
        let day = Duration::from_secs(86_400);
        let old = |current, now, max| full_too_old(Some(&f), Revision(current), at(now), max);
        assert!(old(11, 1000 + 86_399, day).is_none());
        assert!(
            old(11, 1000 + 86_400, day)
                .unwrap()
                .message
                .contains("1d old")
        );
        assert!(old(10, 1000 + 86_400, day).is_none());
        assert!(old(11, 1_000_000, Duration::ZERO).is_none());
        // The clock is behind the time in the name.
        assert!(old(11, 0, day).is_none());
        assert!(full_too_old(None, Revision(11), at(0), day).is_none());
    }
}
