//! Reads the history of a key: every version that a snapshot of a timeline still holds.
//!
//! All deltas and the oldest full are read, and if deltas are missing, the fulls after the gap. Versions are
//! not checked against each other. Called by `cli`.

use super::{SORT_BUFFER_BYTES, for_each_change};
use crate::backup::chain::{self, KnownBases, RevisionRange};
use crate::base::ReadAt;
use crate::base::lock;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::history::key_bucket;
use crate::mvcc::{Base, KeyValue, RecordKey, Revision};
use crate::objects::changes::EventNote;
use crate::objects::{EncryptionKeys, Object};
use crate::ops::Context;
use crate::ops::external_sort::{Sorted, Sorter};
use crate::ops::fold::open::{BackupLocation, SnapshotReader};
use crate::ops::fold::select::DeltaSlice;
use crate::ops::fold::{Request, Source, select};
use crate::ops::parallel::find_first;
use crate::ops::scan::{Depth, scan};
use crate::ops::tags::{unless_excluded, without_excluded};
use schemars::JsonSchema;
use serde::Serialize;
use std::path::Path;
use std::sync::Mutex;

/// The largest number of versions of Event objects that are collected.
const MAX_EVENTS: usize = 10_000;
/// What a change in a delta is about: the key, or an Event object.
const KEY: usize = 0;
const EVENT: usize = 1;

/// The history of a key.
#[derive(Debug)]
pub struct History {
    /// The ID of the timeline; `None` for a plain snapshot file.
    pub timeline: Option<String>,
    /// The newest revision that was read.
    pub revision: Revision,
    /// The revisions up to `revision` whose changes no snapshot holds completely. Versions may be missing
    /// there.
    pub missing: Vec<RevisionRange>,
    /// Warnings for the report.
    pub warnings: Vec<String>,
    /// What Event objects say of the object, in the order of their revisions.
    pub events: Vec<DatedEvent>,
    versions: Sorted,
    /// The version that was returned last.
    last: Option<(Revision, u32)>,
}

/// The Event objects that are about an object.
#[derive(Debug)]
pub struct EventsOf<'a> {
    /// What the keys of the Event objects begin with.
    pub prefix: String,
    /// The kind of the object.
    pub kind: &'a str,
    /// The name of the object.
    pub name: &'a str,
    /// What opens Event objects that an API server has encrypted.
    pub keys: &'a EncryptionKeys,
}

impl EventsOf<'_> {
    /// Returns what a record says of the object; `None` if it is not an Event about it.
    fn note(&self, kv: &KeyValue<'_>) -> Option<EventNote> {
        if !self.contains(kv.key) {
            return None;
        }
        let event = Object::of_record(kv, self.keys).ok()?;
        EventNote::about(&event, self.kind, self.name)
    }

    fn contains(&self, key: &[u8]) -> bool {
        key.starts_with(self.prefix.as_bytes())
    }
}

/// A version of an Event object.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct DatedEvent {
    /// The revision of the version.
    pub revision: Revision,
    /// When it was recorded in a delta (RFC 3339); null if only a full snapshot holds it.
    pub time: Option<String>,
    /// What it says.
    #[serde(flatten)]
    pub note: EventNote,
}

/// A version of the key, or its deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version<'a> {
    /// The revision of the change.
    pub revision: Revision,
    /// When the snapshotter received the change, in RFC 3339; `None` if only a full holds it.
    pub time: Option<&'a str>,
    /// The record; `None` if the key was deleted.
    pub kv: Option<KeyValue<'a>>,
}

impl History {
    /// Collects the versions of `key` on the timeline with this ID, or on the newest one, and the Event objects that are
    /// asked for.
    ///
    /// # Errors
    /// `KeyNotFound` if there is no version; `NoSnapshots`, `NoSuchTimeline`, `InterleavedTimelines`; errors
    /// of damaged snapshots; errors of the store; `Io`, `NoSpace`, `Terminated`.
    pub fn read(
        backup: &BackupLocation,
        timeline: Option<&str>,
        key: &[u8],
        events: Option<&EventsOf<'_>>,
    ) -> Result<History> {
        without_excluded(|| Self::try_read(backup, timeline, key, events))
    }

    fn try_read(
        backup: &BackupLocation,
        timeline: Option<&str>,
        key: &[u8],
        events: Option<&EventsOf<'_>>,
    ) -> Result<History> {
        let ctx = backup.context()?;
        let mut collector = VersionCollector {
            key,
            events_of: events,
            events: Vec::new(),
            sorter: Sorter::new(ctx.temp(), SORT_BUFFER_BYTES),
            found_any: false,
            covered: Vec::new(),
            newest: Revision(1),
        };
        let (timeline, warnings) = match backup {
            BackupLocation::File(_, path) => (None, collector.read_file(ctx, path, timeline)?),
            _ => {
                let (id, warnings) = collector.read_store(ctx, timeline)?;
                (Some(id), warnings)
            }
        };
        let missing = uncovered(&collector.covered, collector.newest);
        if !collector.found_any {
            let mut message = format!(
                "no snapshot holds a version of key \"{}\" up to revision {}",
                key.escape_ascii(),
                collector.newest
            );
            if !missing.is_empty() {
                message += &format!(
                    "; the changes of revisions {} are not all known",
                    chain::show_ranges(&missing)
                );
            }
            return Err(Reason::KeyNotFound.error(message));
        }
        let mut events = collector.events;
        events.sort_by_key(|event| event.revision);
        // A full and a delta may hold the same version, and the delta has its time.
        events.dedup_by(|later, first| {
            let is_same = later.revision == first.revision && later.note == first.note;
            if is_same && first.time.is_none() {
                first.time = later.time.take();
            }
            is_same
        });
        Ok(History {
            events,
            timeline,
            revision: collector.newest,
            missing,
            warnings,
            versions: collector.sorter.finish()?,
            last: None,
        })
    }

    /// Returns the next version, oldest first; `None` at the end.
    ///
    /// # Errors
    /// `Io`.
    #[allow(clippy::should_implement_trait)] // the version borrows from the history, which an Iterator cannot express
    pub fn next(&mut self) -> Result<Option<Version<'_>>> {
        loop {
            if !self.versions.advance()? {
                return Ok(None);
            }
            let current = Some(decode_sort_key(self.versions.current().0)?);
            // Several snapshots may hold a version. The one of a delta comes first, since it has a time.
            if current != self.last {
                self.last = current;
                break;
            }
        }
        let (sort_key, record) = self.versions.current();
        decode(decode_sort_key(sort_key)?.0, record).map(Some)
    }
}

/// Collects the versions of a key from snapshots.
struct VersionCollector<'k> {
    key: &'k [u8],
    events_of: Option<&'k EventsOf<'k>>,
    events: Vec<DatedEvent>,
    sorter: Sorter,
    found_any: bool,
    /// The revisions whose changes are all known.
    covered: Vec<RevisionRange>,
    /// The newest revision of all snapshots.
    newest: Revision,
}

impl VersionCollector<'_> {
    /// Reads a plain snapshot file. Returns warnings.
    fn read_file(
        &mut self,
        ctx: &Context,
        path: &Path,
        timeline: Option<&str>,
    ) -> Result<Vec<String>> {
        let request = Request {
            timeline: timeline.map(str::to_owned),
            ..Request::default()
        };
        let source = Source::open_file(ctx, path, &request)?;
        self.read_full(ctx, &source.db, &source.base, Revision(i64::MAX))
            .map_err(source.at_base(ctx))?;
        Ok(source.warnings)
    }

    /// Reads the snapshots of a store. Returns the ID of the timeline, and warnings.
    fn read_store(
        &mut self,
        ctx: &Context,
        timeline: Option<&str>,
    ) -> Result<(String, Vec<String>)> {
        let scan = scan(ctx, Depth::Doubtful)?;
        let (timeline, warnings) = select::choose_timeline(ctx, &scan, timeline)?;
        let snapshots = &scan.catalog.snapshots;
        let slices = select::all_delta_slices(&scan.catalog, timeline);
        let paths = slices.iter().map(|s| s.snapshot.path.as_str());
        unless_excluded(ctx, paths.filter(|_| scan.tags_unread > 0), || {
            self.read_deltas(ctx, &slices)
        })?;
        let mut fulls = chain::bases(&scan.catalog, timeline);
        fulls.reverse();
        let named: Vec<(usize, Revision)> = fulls
            .into_iter()
            .map(|i| (i, snapshots[i].name.last))
            .collect();
        for &(_, last) in &named {
            self.newest = self.newest.max(last);
        }
        let mut read = KnownBases::new();
        while let Some(i) = full_to_read(&named, &read, &uncovered(&self.covered, self.newest)) {
            scan.refuse_excluded(ctx, [i])?;
            let (db, base) = ctx.full(&snapshots[i])?;
            let until = timeline.members.iter().find(|m| m.snapshot == i);
            let until = until.map_or(Revision(i64::MAX), |m| m.until);
            self.read_full(ctx, &db, &base, until)
                .map_err(ctx.at(&snapshots[i]))?;
            read.insert(i, base);
        }
        if named.is_empty() && self.covered.is_empty() {
            let nothing = Reason::NoSnapshots.error("there is no usable snapshot: take one first");
            return Err(scan.explain_untrusted(ctx, nothing));
        }
        Ok((timeline.id.clone(), warnings))
    }

    /// Adds a version from a snapshot. If several deltas hold a version, the one with the lowest `nth`
    /// counts.
    fn add_version(
        &mut self,
        version: (Revision, u32),
        nth: usize,
        time: Option<&str>,
        kv: Option<&KeyValue<'_>>,
    ) -> Result<()> {
        self.found_any = true;
        let mut record = Vec::new();
        encode(time, kv, &mut record)?;
        self.sorter
            .push(&encode_sort_key(version, time.is_some(), nth), &record)
    }

    /// Adds a version of an Event object.
    fn add_event(&mut self, revision: Revision, time: Option<&str>, note: EventNote) {
        if self.events.len() < MAX_EVENTS {
            self.events.push(DatedEvent {
                revision,
                time: time.map(str::to_owned),
                note,
            });
        }
    }

    /// Reads a full up to the revision `until`.
    fn read_full<R: ReadAt>(
        &mut self,
        ctx: &Context,
        db: &Database<R>,
        base: &Base,
        until: Revision,
    ) -> Result<()> {
        let last = base.revision.min(until);
        let mut c = db.cursor(&key_bucket(db)?);
        while let Some(e) = c.next()? {
            let rk = RecordKey::decode(e.key)?;
            if rk.main > last {
                break;
            }
            ctx.store.cancel().check()?;
            let kv = KeyValue::decode(e.value)?;
            if kv.key == self.key {
                let put = (!rk.tombstone).then_some(&kv);
                self.add_version((rk.main, rk.sub), 0, None, put)?;
            } else if let Some(note) = self.events_of.and_then(|events| events.note(&kv)) {
                self.add_event(rk.main, None, note);
            }
        }
        // At and below the compacted revision only the newest version of each key is left.
        let first = Revision(base.compact_revision.0.max(0)).next();
        if first <= last {
            self.covered.push((first, last));
        }
        self.newest = self.newest.max(last);
        Ok(())
    }

    /// Reads deltas, on several threads.
    fn read_deltas(&mut self, ctx: &Context, slices: &[DeltaSlice]) -> Result<()> {
        let reader = SnapshotReader::new(ctx, slices.iter().map(|s| &s.snapshot));
        let (key, events_of) = (self.key, self.events_of);
        let nth_of = |changed: &[u8]| {
            if changed == key {
                return Some(KEY);
            }
            events_of
                .is_some_and(|events| events.contains(changed))
                .then_some(EVENT)
        };
        let collector = Mutex::new(&mut *self);
        find_first(ctx.threads, slices.len(), |nth| {
            let delta = reader.delta_in_turn(nth)?;
            for_each_change(ctx, delta, &slices[nth], nth_of, |what, e, kv| {
                e.instant()?;
                if what == EVENT {
                    let note = kv.zip(events_of).and_then(|(kv, events)| events.note(kv));
                    if let Some(note) = note {
                        lock(&collector).add_event(e.main, Some(e.time), note);
                    }
                    return Ok(());
                }
                let mut collector = lock(&collector);
                collector.add_version((e.main, e.sub), nth, Some(e.time), kv)
            })?;
            Ok(None::<()>)
        })?;
        for slice in slices {
            let name = &slice.snapshot.name;
            let last = name.last.min(slice.until);
            self.covered.push((name.start, last));
            self.newest = self.newest.max(last);
        }
        Ok(())
    }
}

/// Returns the full to read next: the oldest one, and then for each gap after its end, the fulls that end in
/// the gap or after it, until the gap is closed. Versions that the oldest full lost by compaction are not
/// searched.
///
/// `fulls` are indexes with the last revision of the name, oldest first. `read` are the fulls that were read.
fn full_to_read(
    fulls: &[(usize, Revision)],
    read: &KnownBases,
    gaps: &[RevisionRange],
) -> Option<usize> {
    let (oldest, _) = fulls.first()?;
    let Some(base) = read.get(oldest) else {
        return Some(*oldest);
    };
    let mut gaps = gaps.iter().filter(|gap| gap.1 > base.revision);
    gaps.find_map(|gap| {
        let mut reaching = fulls.iter().filter(|f| f.1 >= gap.0);
        let unread = reaching.find(|f| !read.contains_key(&f.0));
        unread.map(|f| f.0)
    })
}

/// Returns the revisions from 1 to `newest` that no range covers.
fn uncovered(covered: &[RevisionRange], newest: Revision) -> Vec<RevisionRange> {
    let mut covered = covered.to_vec();
    covered.sort_unstable();
    let mut gaps = Vec::new();
    let mut next = Revision(1);
    for (first, last) in covered {
        if first > next {
            gaps.push((next, first.previous()));
        }
        next = next.max(last.next());
    }
    if next <= newest {
        gaps.push((next, newest));
    }
    gaps
}

/// Encodes the key by which versions are sorted: the revision (8 bytes), the number within the transaction
/// (4), 0 for a delta and 1 for a full, so that deltas come first (1), and the position of the snapshot (8).
fn encode_sort_key((main, sub): (Revision, u32), has_time: bool, nth: usize) -> [u8; 21] {
    let mut b = [0; 21];
    b[..8].copy_from_slice(&main.0.to_be_bytes());
    b[8..12].copy_from_slice(&sub.to_be_bytes());
    b[12] = u8::from(!has_time);
    b[13..].copy_from_slice(&(nth as u64).to_be_bytes());
    b
}

/// Decodes the revision, and the number within the transaction.
fn decode_sort_key(b: &[u8]) -> Result<(Revision, u32)> {
    let main = b.get(..8).and_then(|b| b.try_into().ok());
    let sub = b.get(8..12).and_then(|b| b.try_into().ok());
    match (main, sub) {
        (Some(main), Some(sub)) => {
            Ok((Revision(i64::from_be_bytes(main)), u32::from_be_bytes(sub)))
        }
        _ => Err(Error::internal(
            "a version in the temporary directory has no sort key",
        )),
    }
}

/// Encodes a version: the length of the time (1 byte), the time, and the record, which is empty for a
/// deletion.
fn encode(time: Option<&str>, kv: Option<&KeyValue<'_>>, out: &mut Vec<u8>) -> Result<()> {
    let time = time.unwrap_or_default();
    let len = u8::try_from(time.len())
        .map_err(|_| Error::corrupt("the time of an event is longer than 255 bytes"))?;
    out.push(len);
    out.extend_from_slice(time.as_bytes());
    if let Some(kv) = kv {
        kv.encode(out);
    }
    Ok(())
}

fn decode(revision: Revision, b: &[u8]) -> Result<Version<'_>> {
    let bad = || Error::internal("a version in the temporary directory cannot be read back");
    let (&len, rest) = b.split_first().ok_or_else(bad)?;
    let (time, record) = rest.split_at_checked(len.into()).ok_or_else(bad)?;
    let time = std::str::from_utf8(time).map_err(|_| bad())?;
    Ok(Version {
        revision,
        time: (!time.is_empty()).then_some(time),
        kv: match record {
            [] => None,
            record => Some(KeyValue::decode(record)?),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(r: &[(i64, i64)]) -> Vec<RevisionRange> {
        r.iter().map(|&(a, b)| (Revision(a), Revision(b))).collect()
    }

    #[test]
    fn gaps_are_what_no_range_covers() {
        for (covered, newest, gaps) in [
            (&[][..], 5, &[(1, 5)][..]),
            (&[(1, 5)], 5, &[]),
            (&[(3, 4), (8, 9), (2, 6)], 12, &[(1, 1), (7, 7), (10, 12)]),
            (&[(5, 9), (1, 4)], 9, &[]),
        ] {
            let actual = uncovered(&ranges(covered), Revision(newest));
            assert_eq!(actual, ranges(gaps), "{covered:?}");
        }
    }

    #[test]
    fn fulls_are_read_if_deltas_are_missing() {
        let base = |revision: i64, compact_revision: i64| Base {
            revision: Revision(revision),
            compact_revision: Revision(compact_revision),
            compaction_finished: true,
            metadata_revision: Revision(revision),
        };
        let fulls = [(7, Revision(10)), (3, Revision(20)), (5, Revision(40))];
        let mut read = KnownBases::new();
        let next = |read: &KnownBases, gaps| full_to_read(&fulls, read, &ranges(gaps));
        assert_eq!(next(&read, &[(1, 10)]), Some(7));
        read.insert(7, base(10, 4));
        // Changes below the compacted revision of the oldest full stay unknown.
        assert_eq!(next(&read, &[(1, 4)]), None);
        // Only a full that ends after the beginning of the gap can close it.
        assert_eq!(next(&read, &[(1, 4), (25, 30)]), Some(5));
        assert_eq!(next(&read, &[(15, 30)]), Some(3));
        read.insert(3, base(20, 18));
        assert_eq!(next(&read, &[(15, 18), (21, 30)]), Some(5));
        read.insert(5, base(40, 40));
        assert_eq!(next(&read, &[(15, 18), (21, 30)]), None);
        assert_eq!(full_to_read(&[], &KnownBases::new(), &[]), None);
    }

    #[test]
    fn versions_are_decoded_as_they_were_encoded() {
        let kv = KeyValue {
            key: b"k",
            create_revision: Revision(3),
            mod_revision: Revision(5),
            version: 2,
            value: b"",
            lease: 9,
        };
        for (time, kv) in [(None, Some(kv)), (Some("2026-11-21T02:30:00Z"), None)] {
            let mut b = Vec::new();
            encode(time, kv.as_ref(), &mut b).unwrap();
            let decoded = decode(Revision(5), &b).unwrap();
            assert_eq!((decoded.time, decoded.kv), (time, kv));
        }
        let version = (Revision(258), 7);
        let first = encode_sort_key(version, true, 256);
        assert_eq!(decode_sort_key(&first).unwrap(), version);
        assert!(first < encode_sort_key(version, true, 257));
        assert!(encode_sort_key(version, true, 257) < encode_sort_key(version, false, 0));
    }
}
