//! Finds when keys were deleted between two states of a timeline.
//!
//! Deltas record deletions with their times, and fulls the deletions that are not compacted. They are sorted by key, on
//! disk if there are many.

use super::SORT_BUFFER_BYTES;
use super::versions::read_between;
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::opt::{REVISION, TIME};
use crate::base::time::utc;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, Revision};
use crate::prefix::Context;
use crate::prefix::open::State;
use crate::prefix::scan::Scan;
use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;
use std::fmt;
use std::sync::Mutex;

/// The deletion of a key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Deletion {
    /// The revision of the deletion; null if no snapshot records it, because deltas are missing or a full is
    /// compacted.
    pub revision: Option<Revision>,
    /// When the deletion was recorded in a delta (RFC 3339); null if no delta records it.
    pub time: Option<String>,
    /// When the first full snapshot without the key was taken (RFC 3339). null if `time` is known, and for a
    /// plain snapshot file.
    pub not_after: Option<String>,
}

/// The deletions between two states, sorted by key.
#[derive(Debug)]
pub(super) struct Deletions {
    sorted: Sorted,
    ended: bool,
    /// The time of the full in which a deletion without a time is seen.
    not_after: Option<String>,
}

impl Deletions {
    /// Reads the deletions of the keys of `range` after the revision `after`. `new` is the later state. Damage of
    /// a snapshot that the state does not need is logged, and its deletions have no time.
    ///
    /// # Errors
    /// `Terminated`, `Io`, `NoSpace`.
    pub(super) fn read(
        ctx: &Context,
        scan: Option<&Scan>,
        new: &State,
        after: Revision,
        range: &KeyRange,
    ) -> Result<Deletions> {
        let between = (after.next(), new.revision);
        let sorter = Mutex::new(Sorter::new(ctx.temp(), SORT_BUFFER_BYTES));
        tolerate(read_between(ctx, scan, new, between, range, |version| {
            if version.kv.is_some() {
                return Ok(());
            }
            let time = version.time.map_or("", |(text, _)| text);
            lock(&sorter).push(version.key, &encode(version.revision.0, time))
        }))?;
        // If the second state is the earlier one, the key was created after it.
        let is_later = new.revision > after;
        let taken = new.base_snapshot().filter(|_| is_later);
        let taken = taken.map(|s| s.name.created_at());
        let mut deletions = Deletions {
            sorted: unpoisoned(sorter.into_inner()).finish()?,
            ended: false,
            not_after: taken.map(|t: DateTime<Utc>| t.to_rfc3339_opts(SecondsFormat::Secs, true)),
        };
        deletions.advance()?;
        Ok(deletions)
    }

    /// Returns the newest of these deletions.
    ///
    /// # Errors
    /// `Io`.
    fn newest(&mut self) -> Result<Option<LastDeletion>> {
        let mut newest: Option<((Revision, String), Vec<u8>)> = None;
        while !self.ended {
            let (key, deletion) = self.sorted.current();
            let deletion = decode(deletion)?;
            if newest.as_ref().is_none_or(|(last, _)| *last < deletion) {
                newest = Some((deletion, key.to_vec()));
            }
            self.advance()?;
        }
        Ok(newest.map(|((revision, time), key)| {
            let time = DateTime::parse_from_rfc3339(&time).ok();
            LastDeletion {
                key,
                revision,
                time: time.map(|t| t.to_utc()),
            }
        }))
    }

    fn advance(&mut self) -> Result<()> {
        self.ended = self.ended || !self.sorted.advance()?;
        Ok(())
    }

    /// Returns the last deletion of `key`. Keys must be asked for in ascending order.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn last_of(&mut self, key: &[u8]) -> Result<Deletion> {
        while !self.ended && self.sorted.current().0 < key {
            self.advance()?;
        }
        let mut last: Option<(Revision, String)> = None;
        while !self.ended && self.sorted.current().0 == key {
            let found = decode(self.sorted.current().1)?;
            // A delta and a full may record the same deletion, and only the delta has its time.
            if last.as_ref().is_none_or(|l| *l < found) {
                last = Some(found);
            }
            self.advance()?;
        }
        let (revision, time) = last.unzip();
        let time = time.filter(|t| !t.is_empty());
        Ok(Deletion {
            revision,
            not_after: self.not_after.clone().filter(|_| time.is_none()),
            time,
        })
    }
}

/// The advice for a key that does not exist and was not deleted.
pub const NO_DELETION: &str = "the backup records no deletion of it, either: check the name";

/// The last deletion of several keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastDeletion {
    /// The key that was deleted.
    pub key: Vec<u8>,
    /// The revision of the deletion.
    pub revision: Revision,
    /// When it was recorded in a delta; `None` if only a full holds it.
    pub time: Option<DateTime<Utc>>,
}

/// Such as "deleted at revision 42 (2026-11-20T14:00:00Z)".
impl fmt::Display for LastDeletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "deleted at revision {}", self.revision)?;
        match self.time {
            Some(time) => write!(f, " ({})", utc(time)),
            None => Ok(()),
        }
    }
}

/// Returns the last deletion of keys that a state does not have.
///
/// # Errors
/// `Terminated`, `Io`, `NoSpace`.
pub(crate) fn last_deletion(
    ctx: &Context,
    scan: Option<&Scan>,
    state: &State,
    range: &KeyRange,
) -> Result<Option<LastDeletion>> {
    Deletions::read(ctx, scan, state, Revision::NONE, range)?.newest()
}

/// Returns advice for keys that a state does not have: when they were deleted, and how to get the state before.
///
/// # Errors
/// `Terminated`, `Io`, `NoSpace`.
pub fn deletion_advice(
    ctx: &Context,
    scan: Option<&Scan>,
    state: &State,
    range: &KeyRange,
) -> Result<String> {
    let Some(deletion) = last_deletion(ctx, scan, state, range)? else {
        return Ok(NO_DELETION.to_owned());
    };
    let before = deletion.revision.previous();
    Ok(format!(
        "{deletion}: give an earlier {TIME}, or {REVISION} {before}"
    ))
}

/// Logs the damage of a snapshot. Returns all other errors.
fn tolerate(read: Result<()>) -> Result<()> {
    match read {
        Err(e) if e.reason() == Reason::Terminated => Err(e),
        Err(e) => {
            tracing::warn!("not every deletion can be dated: {e}");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Encodes a deletion: its revision (8 bytes) and its time, which may be empty.
fn encode(revision: Revision, time: &str) -> Vec<u8> {
    let mut record = revision.0.to_be_bytes().to_vec();
    record.extend_from_slice(time.as_bytes());
    record
}

fn decode(record: &[u8]) -> Result<(Revision, String)> {
    let bad = || Error::internal("a deletion in the temporary directory cannot be read back");
    let (revision, time) = record.split_first_chunk().ok_or_else(bad)?;
    let time = std::str::from_utf8(time).map_err(|_| bad())?;
    Ok((Revision(i64::from_be_bytes(*revision)), time.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::temp::Dir;

    #[test]
    fn the_last_deletion_counts_and_the_time_of_a_delta_wins() {
        let dir = Dir::new(std::env::temp_dir(), false);
        let mut sorter = Sorter::new(dir, 64);
        for (key, revision, time) in [
            ("b", 7, "2026-11-21T02:30:00Z"),
            ("a", 5, ""),
            ("b", 9, ""),
            ("ab", 3, "2026-11-21T02:29:00Z"),
            ("b", 9, "2026-11-21T02:31:00Z"),
        ] {
            let record = encode(Revision(revision), time);
            sorter.push(key.as_bytes(), &record).unwrap();
        }
        let mut deletions = Deletions {
            sorted: sorter.finish().unwrap(),
            ended: false,
            not_after: Some("2026-11-22T00:00:00Z".to_owned()),
        };
        deletions.advance().unwrap();
        let mut of = |key: &str| {
            let d = deletions.last_of(key.as_bytes()).unwrap();
            (d.revision.map(|r| r.0), d.time, d.not_after)
        };
        let text = |t: &str| Some(t.to_owned());
        let full = text("2026-11-22T00:00:00Z");
        assert_eq!(of("a"), (Some(5), None, full.clone()));
        assert_eq!(of("aa"), (None, None, full.clone()));
        assert_eq!(of("b"), (Some(9), text("2026-11-21T02:31:00Z"), None));
        assert_eq!(of("c"), (None, None, full));
    }
}
