//! Finds when keys were deleted between two states of a timeline.
//!
//! Deltas record deletions with their times, and fulls the deletions that are not compacted. Both are read once,
//! and sorted by key on disk if there are many. Called by [`super::diff`], for the first deleted key.

use super::SORT_BUFFER_BYTES;
use crate::backup::chain::RevisionRange;
use crate::backup::delta::Event;
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::lock;
use crate::base::parallel::find_first;
use crate::base::time::utc;
use crate::error::{Error, Reason, Result};
use crate::mvcc::history::key_bucket;
use crate::mvcc::{Change, KeyRange, KeyValue, RecordKey, Revision};
use crate::prefix::Context;
use crate::prefix::open::SnapshotReader;
use crate::prefix::open::Source;
use crate::prefix::scan::Scan;
use crate::prefix::select::{self, DeltaSlice};
use chrono::{DateTime, SecondsFormat, Utc};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Mutex;

/// The deletion of a key.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize)]
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
        new: &Source,
        after: Revision,
        range: &KeyRange,
    ) -> Result<Deletions> {
        let between = (after.next(), new.target);
        let mut sorter = Sorter::new(ctx.temp(), SORT_BUFFER_BYTES);
        if let Some(scan) = scan {
            let slices = slices(scan, new, between)?;
            let read = read_deltas(ctx, &slices, range, between, &mut sorter);
            tolerate(read)?;
        }
        tolerate(read_base(ctx, new, range, after, &mut sorter))?;
        // If the second state is the earlier one, the key was created after it.
        let is_later = new.target > after;
        let taken = new.base_snapshot().filter(|_| is_later);
        let taken = taken.map(|s| s.name.created_at());
        let mut deletions = Deletions {
            sorted: sorter.finish()?,
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
    fn newest(&mut self) -> Result<Option<(Revision, String)>> {
        let mut newest = None;
        while !self.ended {
            newest = newest.max(Some(decode(self.sorted.current().1)?));
            self.advance()?;
        }
        Ok(newest)
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

/// Returns advice for keys that a state does not have: when they were deleted, and how to get the state before.
///
/// # Errors
/// `Terminated`, `Io`, `NoSpace`.
pub fn deletion_advice(
    ctx: &Context,
    scan: Option<&Scan>,
    state: &Source,
    range: &KeyRange,
) -> Result<String> {
    let mut deletions = Deletions::read(ctx, scan, state, Revision::NONE, range)?;
    let Some((revision, time)) = deletions.newest()? else {
        return Ok("the backup records no deletion of it, either: check the name".to_owned());
    };
    let time = DateTime::parse_from_rfc3339(&time).ok();
    let time = time.map(|t| format!(" ({})", utc(t.with_timezone(&Utc))));
    Ok(format!(
        "deleted at revision {revision}{}: give an earlier --time, or --revision {}",
        time.unwrap_or_default(),
        revision.previous()
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

/// The deltas of the timeline of `new` that may hold changes within `between`.
pub(super) fn slices(scan: &Scan, new: &Source, between: RevisionRange) -> Result<Vec<DeltaSlice>> {
    let timeline = scan.intact(scan.timelines.by_id(&new.timeline)?);
    let mut slices = select::all_delta_slices(&scan.catalog, timeline);
    slices.retain(|slice| {
        let name = &slice.snapshot.name;
        name.last >= between.0 && name.start <= between.1
    });
    Ok(slices)
}

/// Sorts the deletions that deltas record.
fn read_deltas(
    ctx: &Context,
    slices: &[DeltaSlice],
    range: &KeyRange,
    between: RevisionRange,
    sorter: &mut Sorter,
) -> Result<()> {
    let sorter = Mutex::new(sorter);
    for_each_change_within(ctx, slices, range, between, |e, at| match e.change {
        Change::Delete { key } => {
            e.instant().map_err(at)?;
            lock(&sorter).push(key, &encode(e.main, e.time))
        }
        _ => Ok(()),
    })
}

/// Calls `each` for the changes of the keys of `range` within `between`, with what adds the snapshot to an error. The
/// deltas are read on several threads.
///
/// # Errors
/// Those of damaged deltas and of `each`; errors of the store; `Terminated`, `Io`.
pub(super) fn for_each_change_within(
    ctx: &Context,
    slices: &[DeltaSlice],
    range: &KeyRange,
    between: RevisionRange,
    each: impl Fn(&Event<'_>, &dyn Fn(Error) -> Error) -> Result<()> + Sync,
) -> Result<()> {
    let reader = SnapshotReader::new(ctx, slices.iter().map(|s| &s.snapshot));
    find_first(ctx.threads, slices.len(), |nth| {
        let slice = &slices[nth];
        let at = ctx.at(&slice.snapshot);
        let mut delta = reader.delta_in_turn(nth)?;
        while let Some(e) = delta.next().map_err(&at)? {
            let is_within = between.0 <= e.main && e.main <= between.1 && slice.contains(e.main);
            if is_within && range.contains(e.change.key()) {
                each(&e, &at)?;
            }
        }
        Ok(None::<()>)
    })?;
    Ok(())
}

/// Reads the deletions that the full of a state records.
fn read_base(
    ctx: &Context,
    new: &Source,
    range: &KeyRange,
    after: Revision,
    sorter: &mut Sorter,
) -> Result<()> {
    if new.base.revision <= after {
        return Ok(());
    }
    let mut first = Vec::new();
    let record = RecordKey {
        main: after.next(),
        sub: 0,
        tombstone: false,
    };
    record.encode(&mut first);
    let mut cursor = new.db.cursor(&key_bucket(&new.db)?);
    cursor.seek(&first)?;
    while let Some(entry) = cursor.next()? {
        let record = RecordKey::decode(entry.key)?;
        if record.main > new.target {
            break;
        }
        ctx.store.cancel().check()?;
        if record.tombstone {
            let kv = KeyValue::decode(entry.value)?;
            if range.contains(kv.key) {
                sorter.push(kv.key, &encode(record.main, ""))?;
            }
        }
    }
    Ok(())
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
