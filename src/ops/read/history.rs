//! Reads the history of a key: every version that a snapshot of a timeline still holds.
//!
//! `versions` reads the snapshots; here the versions are sorted.

use super::SORT_BUFFER_BYTES;
use super::versions::{self, Collect, FoundVersion};
use crate::backup::chain::{self, RevisionRange};
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::changes::EventNote;
use crate::objects::{EncryptionKeys, Object};
use crate::prefix::open::BackupLocation;
use crate::prefix::set_aside::{Purpose, decide_again};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The largest number of versions of Event objects about the object that are kept: the newest.
const MAX_EVENTS: usize = 10_000;

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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
        decide_again([backup.context()], Purpose::Read, || {
            Self::try_read(backup, timeline, key, events)
        })
    }

    fn try_read(
        backup: &BackupLocation,
        timeline: Option<&str>,
        key: &[u8],
        events: Option<&EventsOf<'_>>,
    ) -> Result<History> {
        let found = VersionsOfKey {
            sorter: Sorter::new(backup.context().temp(), SORT_BUFFER_BYTES),
            found_any: false,
            events: BTreeMap::new(),
        };
        let collector = VersionCollector {
            key,
            events_of: events,
            found: Mutex::new(found),
        };
        let coverage = versions::read(backup, timeline, &collector)?;
        let found = unpoisoned(collector.found.into_inner());
        let missing = coverage.missing();
        if !found.found_any {
            let mut message = format!(
                "no snapshot holds a version of key \"{}\" up to revision {}",
                key.escape_ascii(),
                coverage.newest
            );
            if !missing.is_empty() {
                message += &format!(
                    "; the changes of revisions {} are not all known",
                    chain::show_ranges(&missing)
                );
            }
            return Err(Reason::KeyNotFound.error(message));
        }
        Ok(History {
            events: found.events.into_values().collect(),
            timeline: coverage.timeline,
            revision: coverage.newest,
            missing,
            warnings: coverage.warnings,
            versions: found.sorter.finish()?,
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

/// Collects the versions of a key, and the Events about its object.
struct VersionCollector<'k> {
    key: &'k [u8],
    events_of: Option<&'k EventsOf<'k>>,
    found: Mutex<VersionsOfKey>,
}

struct VersionsOfKey {
    sorter: Sorter,
    found_any: bool,
    /// By revision and number within the transaction.
    events: BTreeMap<(Revision, u32), DatedEvent>,
}

impl Collect for VersionCollector<'_> {
    fn wants(&self, key: &[u8]) -> bool {
        key == self.key || self.events_of.is_some_and(|events| events.contains(key))
    }

    /// If several deltas hold a version, the one with the lowest `nth` counts.
    fn add(&self, version: FoundVersion<'_>) -> Result<()> {
        let revision = version.revision;
        let time = version.time.map(|(text, _)| text);
        if version.key != self.key {
            let note = version.kv.zip(self.events_of);
            if let Some(note) = note.and_then(|(kv, events)| events.note(kv)) {
                lock(&self.found).add_event(revision, time, note);
            }
            return Ok(());
        }
        let mut record = Vec::new();
        encode(time, version.kv, &mut record)?;
        let key = encode_sort_key(revision, time.is_some(), version.nth);
        let mut found = lock(&self.found);
        found.found_any = true;
        found.sorter.push(&key, &record)
    }
}

impl VersionsOfKey {
    /// Adds a version of an Event object. Of too many, the oldest is dropped.
    fn add_event(&mut self, revision: (Revision, u32), time: Option<&str>, note: EventNote) {
        let event = self.events.entry(revision).or_insert(DatedEvent {
            revision: revision.0,
            time: None,
            note,
        });
        // A full and a delta may hold the same version, and only the delta has its time.
        if event.time.is_none() {
            event.time = time.map(str::to_owned);
        }
        if self.events.len() > MAX_EVENTS {
            self.events.pop_first();
        }
    }
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

    #[test]
    fn the_newest_events_are_kept_in_whatever_order_they_are_found() {
        let mut found = VersionsOfKey {
            sorter: Sorter::new(std::env::temp_dir().into(), SORT_BUFFER_BYTES),
            found_any: false,
            events: BTreeMap::new(),
        };
        let note = EventNote {
            r#type: "Normal".to_owned(),
            reason: "Pulled".to_owned(),
            message: String::new(),
            count: 1,
        };
        let newest = MAX_EVENTS as i64 + 2;
        for revision in [2, newest].into_iter().chain(1..newest) {
            found.add_event((Revision(revision), 0), None, note.clone());
        }
        // The same version in a delta.
        let time = "2026-11-21T02:30:00Z";
        found.add_event((Revision(newest), 0), Some(time), note);
        let events: Vec<_> = found.events.into_values().collect();
        assert!(events.iter().map(|e| e.revision.0).eq(3..=newest));
        assert_eq!(events.last().unwrap().time.as_deref(), Some(time));
    }
}
