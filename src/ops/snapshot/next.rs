//! What a bucket has saved, and what that means for the next snapshot. Pure functions of a scan.

use crate::backup::chain::{self, Choice};
use crate::backup::{Compression, Kind, Snapshot, SnapshotName};
use crate::base::duration;
use crate::error::{Error, Reason};
use crate::mvcc::Revision;
use crate::ops::scan::Scan;
use chrono::{DateTime, TimeDelta, Utc};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;

/// Why a full snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum FullReason {
    /// It was asked for.
    Requested,
    /// It is due by the schedule.
    Scheduled,
    /// The store holds no snapshot.
    EmptyBucket,
    /// The store holds deltas only.
    NoFull,
    /// The newest full is older than allowed.
    FullTooOld,
    /// The cluster holds other changes than the store at the last saved revision: another history.
    HistoryMismatch,
    /// The cluster has compacted revisions that are not saved, or the last saved one.
    Compacted,
    /// The cluster's newest revision is below the last saved one: another history.
    ClusterBehind,
    /// Revisions are missing before the last saved one, so that deltas behind it would be of no use.
    RevisionGap,
    /// What would tell which history is the newest cannot be read.
    CorruptSnapshot,
    /// It is larger than may be read.
    TooLarge,
    /// Two histories were written at the same time.
    InterleavedTimelines,
    /// What the store holds at the last saved revision cannot be told.
    Unverifiable,
    /// The newest snapshots are not encrypted, though keys are given: anybody may have made them.
    Untrusted,
}

/// Why a full is taken, and the same in words.
pub type Why = (FullReason, String);

impl FullReason {
    /// Of an error that a snapshot of the store gives.
    pub(super) fn of_bad_data(e: &Error) -> Why {
        let reason = match e.reason() {
            Reason::TooLarge => FullReason::TooLarge,
            _ => FullReason::CorruptSnapshot,
        };
        (reason, e.to_string())
    }
}

/// What a store has of the newest history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// The timeline's ID.
    pub timeline: String,
    /// The newest revision that is saved.
    pub last: Revision,
    /// The newest snapshot that holds it.
    pub holder: Snapshot,
    /// The newest full of the timeline.
    pub full: Option<SnapshotName>,
    /// Why deltas behind `last` would be of no use.
    pub broken: Option<Why>,
}

/// What any new snapshot has to mind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Newest {
    /// The latest time in a name, in seconds since 1970; a clock that was set back must not hide what is
    /// newer.
    pub created: i64,
    /// Whether a full has that time.
    pub is_full: bool,
    /// How the newest snapshot is compressed.
    pub compression: Compression,
}

/// Seconds between a full and another one that is taken for snapshots which are not trusted.
const SECONDS_BETWEEN: i64 = 3600;
/// Seconds that a clock may have been ahead. A name with a later time is nobody's, or forged.
const MOST_AHEAD: i64 = 366 * 86_400;

impl From<&SnapshotName> for Newest {
    fn from(name: &SnapshotName) -> Self {
        Newest {
            created: name.created,
            is_full: name.kind == Kind::Full,
            compression: name.compression,
        }
    }
}

impl Newest {
    /// Of a scan, those that are excluded too.
    pub fn read(scan: &Scan, now: DateTime<Utc>) -> Option<Self> {
        // Of one second fulls come last in the catalog. A forged name may be of any time.
        let is_known = |s: &&Snapshot| {
            let most_ahead = if s.untrusted { 0 } else { MOST_AHEAD };
            s.name.created - now.timestamp() <= most_ahead
        };
        let newest = scan.catalog.snapshots.iter().rev().find(is_known)?;
        Some(Newest::from(&newest.name))
    }
}

impl Saved {
    /// Reads a scan. `Err` says why a full is needed without looking any further.
    pub fn read(scan: &Scan, now: DateTime<Utc>) -> Result<Self, Why> {
        let catalog = &scan.catalog;
        // A full is newer than all but those whose names are of the future. One an hour, however many are put there.
        let is_behind_a_full = |&&i: &&usize| catalog.snapshots[i].name.created <= now.timestamp();
        let fulls = catalog.usable().map(|i| &catalog.snapshots[i].name);
        let newest = fulls
            .filter(|n| n.kind == Kind::Full)
            .map(|n| n.created)
            .max();
        let is_recent = newest.is_some_and(|created| now.timestamp() - created < SECONDS_BETWEEN);
        if !is_recent && let Some(&late) = scan.untrusted.refused.iter().find(is_behind_a_full) {
            return Err((
                FullReason::Untrusted,
                format!(
                    "{} is not encrypted, and keys are given: anybody may have made it",
                    catalog.snapshots[late].path
                ),
            ));
        }
        if let Some((_, e)) = scan.contents.unreadable.iter().next() {
            return Err(FullReason::of_bad_data(e));
        }
        let because = |e: Error| {
            let reason = match e.reason() {
                Reason::NoSnapshots => FullReason::NoFull,
                Reason::RevisionGap | Reason::OutOfRange => FullReason::RevisionGap,
                Reason::InterleavedTimelines => FullReason::InterleavedTimelines,
                _ => FullReason::Unverifiable,
            };
            (reason, e.to_string())
        };
        let timeline = scan.timelines.newest(catalog).map_err(because)?;
        let nothing = || {
            (
                FullReason::EmptyBucket,
                "no snapshot can be used".to_owned(),
            )
        };
        let last = timeline.last(catalog, &scan.contents).ok_or_else(nothing)?;
        let members = timeline.members.iter();
        let members = members.map(|m| (m, &catalog.snapshots[m.snapshot]));
        let full = members
            .clone()
            .filter(|(m, s)| s.name.kind == Kind::Full && m.until >= s.name.last)
            .map(|(_, s)| &s.name)
            .max_by_key(|n| (n.created, n.last));
        let reaches = |i: usize, s: &Snapshot| {
            let surveyed = scan.contents.surveys.get(&i).map(|s| s.last);
            s.name.last.max(surveyed.unwrap_or_default()) >= last
        };
        let holder = members
            .filter(|(m, s)| m.until >= last && s.name.start <= last && reaches(m.snapshot, s))
            .map(|(_, s)| s)
            // Where a history forked at that very revision, the newest tells how it goes on.
            .max_by_key(|s| (s.name.created, s.name.kind == Kind::Full))
            .ok_or_else(nothing)?;
        let known = scan.contents.known_bases();
        let broken = match chain::choose(catalog, timeline, None, &known) {
            Ok(Choice::Chosen(_)) => None,
            Ok(Choice::ReadFirst(i)) => Some((
                FullReason::RevisionGap,
                format!(
                    "by names, revisions are missing after {}",
                    catalog.snapshots[i].path
                ),
            )),
            Err(e) => Some(because(e)),
        };
        Ok(Saved {
            timeline: timeline.id.clone(),
            last,
            holder: holder.clone(),
            full: full.cloned(),
            broken,
        })
    }
}

/// What the cluster's newest revision and the store say about what to take; the watch may still tell
/// otherwise.
pub fn full_needed(saved: &Saved, current: i64) -> Option<Why> {
    if let Some(broken) = &saved.broken {
        return Some(broken.clone());
    }
    (current < saved.last.0).then(|| behind(saved.last, current))
}

/// The cluster is behind the store.
pub(super) fn behind(last: Revision, current: i64) -> Why {
    (
        FullReason::ClusterBehind,
        format!(
            "the cluster is at revision {current}, the store at {last}: it has another history"
        ),
    )
}

/// Whether the newest full is too old. Zero means never. Nothing is too old where nothing changed since.
pub fn is_full_too_old(
    full: Option<&SnapshotName>,
    current: Revision,
    now: DateTime<Utc>,
    max_age: Duration,
) -> Option<Why> {
    let full = full.filter(|f| f.last < current)?;
    let age = now - full.created_at();
    let max = TimeDelta::from_std(max_age).unwrap_or(TimeDelta::MAX);
    (!max_age.is_zero() && age >= max).then(|| {
        let age = duration::show(age.to_std().unwrap_or_default());
        let message = format!("the newest full, {full}, is {age} old");
        (FullReason::FullTooOld, message)
    })
}

/// The time in a new snapshot's name, in seconds since 1970: now, but never before what is newest. Of one
/// second deltas sort before fulls, so behind a full anything needs a later one; and a full, which may
/// begin a new timeline, has to be seen to come after all others.
pub fn name_time(kind: Kind, newest: Option<Newest>, now: DateTime<Utc>) -> i64 {
    let least = newest.map_or(0, |n| {
        n.created + i64::from(n.is_full || kind == Kind::Full)
    });
    now.timestamp().max(least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::Catalog;
    use crate::backup::trust::{self, Trust};

    fn full(name: &str) -> SnapshotName {
        name.parse().unwrap()
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    #[test]
    fn a_name_is_never_older_than_what_is_newest() {
        let newest = |created, is_full| {
            Some(Newest {
                created,
                is_full,
                compression: Compression::None,
            })
        };
        let delta = |newest, now| name_time(Kind::Incr, newest, at(now));
        assert_eq!(delta(None, 100), 100);
        assert_eq!(delta(newest(90, true), 100), 100);
        // Of one second: a delta may follow a delta, nothing may follow a full.
        assert_eq!(delta(newest(100, false), 100), 100);
        assert_eq!(delta(newest(100, true), 100), 101);
        assert_eq!(name_time(Kind::Full, newest(100, false), at(100)), 101);
        // The clock was set back.
        assert_eq!(delta(newest(500, false), 100), 500);
        assert_eq!(delta(newest(500, true), 100), 501);
    }

    fn scan_of(names: &[&str]) -> Scan {
        let trust = Trust {
            only_encrypted: true,
            ..Trust::default()
        };
        let mut catalog = Catalog::of_names(names);
        trust.mark(&mut catalog);
        let untrusted = trust::untrusted(&catalog, &trust);
        let mut scan = Scan::of_names(catalog).unwrap();
        scan.untrusted = untrusted;
        scan
    }

    #[test]
    fn a_full_is_taken_for_what_is_not_trusted_and_not_for_each_of_it() {
        let names = [
            "Full-00000000-00000010-1000.age",
            "Incr-00000011-00000020-2000",
        ];
        let why = |now| Saved::read(&scan_of(&names), at(now)).err().map(|e| e.0);
        let hour = SECONDS_BETWEEN;
        assert_eq!(why(2000), None);
        assert_eq!(why(1000 + hour - 1), None);
        assert_eq!(why(1000 + hour), Some(FullReason::Untrusted));
        // Of the future: a full would not be newer.
        assert_eq!(why(1999), None);
        let plain = ["Full-00000000-00000010-1000"];
        let why = Saved::read(&scan_of(&plain), at(1001)).err().unwrap();
        assert_eq!(why.0, FullReason::Untrusted);
    }

    #[test]
    fn forged_names_do_not_move_the_time_of_what_comes() {
        let newest =
            |names: &[&str], now| Newest::read(&scan_of(names), at(now)).map(|n| n.created);
        let names = [
            "Full-00000000-00000010-1000.age",
            "Full-00000000-00000011-8210266876799.age",
            "Full-00000000-00000012-5000",
        ];
        assert_eq!(newest(&names, 4000), Some(1000));
        assert_eq!(newest(&names, 5000), Some(5000));
        // A clock that was ahead for some days, and is right now.
        assert_eq!(newest(&names[..1], 500), Some(1000));
    }

    #[test]
    fn a_full_is_too_old_by_its_name_and_only_where_something_changed() {
        let f = full("Full-00000000-00000010-1000");
        let day = Duration::from_secs(86_400);
        let old = |current, now, max| is_full_too_old(Some(&f), Revision(current), at(now), max);
        assert!(old(11, 1000 + 86_399, day).is_none());
        assert!(old(11, 1000 + 86_400, day).unwrap().1.contains("1d old"));
        assert!(old(10, 1000 + 86_400, day).is_none());
        assert!(old(11, 1_000_000, Duration::ZERO).is_none());
        // The clock was behind when it was named, or is now.
        assert!(old(11, 0, day).is_none());
        assert!(is_full_too_old(None, Revision(11), at(0), day).is_none());
    }
}
