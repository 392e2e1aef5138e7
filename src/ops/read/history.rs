//! Reads the history of a key: every version that a snapshot of a timeline still holds, and the Event objects about it.

use super::stream::{Collector, KeyChange, KeyVersion, RECORD, VersionStream};
use super::versions::{self, Collect, FoundVersion};
use crate::backup::chain::{self, RevisionRange};
use crate::base::{lock, unpoisoned};
use crate::error::{Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
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
    versions: VersionStream,
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
    /// The revision of the change; if the change is not recorded, the one by which it happened.
    pub revision: Revision,
    /// When the snapshotter received the change, in RFC 3339; `None` if only a full holds it.
    pub time: Option<&'a str>,
    /// The record; `None` if the key was deleted.
    pub kv: Option<KeyValue<'a>>,
    /// Whether a snapshot records the change. If not, the versions around it tell that the key was deleted.
    pub is_recorded: bool,
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
        let range = KeyRange::Key(key.to_vec());
        let collector = HistoryCollector {
            versions: Collector::new(backup.context().temp(), &range, RECORD),
            events_of: events,
            events: Mutex::default(),
        };
        let coverage = versions::read(backup, timeline, &collector)?;
        let events = unpoisoned(collector.events.into_inner());
        let versions = collector.versions.finish(coverage)?;
        let coverage = &versions.coverage;
        let missing = coverage.missing();
        if versions.is_empty() {
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
            events: events.0.into_values().collect(),
            timeline: coverage.timeline.clone(),
            revision: coverage.newest,
            missing,
            warnings: coverage.warnings.clone(),
            versions,
        })
    }

    /// Returns the next version, oldest first; `None` at the end.
    ///
    /// # Errors
    /// `Io`.
    #[allow(clippy::should_implement_trait)] // the version borrows from the history, which an Iterator cannot express
    pub fn next(&mut self) -> Result<Option<Version<'_>>> {
        let Some(KeyVersion {
            revision,
            time,
            change,
            ..
        }) = self.versions.next()?
        else {
            return Ok(None);
        };
        let kv = match change {
            KeyChange::Put(record) => Some(KeyValue::decode(record)?),
            KeyChange::Deleted | KeyChange::DeletedUnrecorded(_) => None,
        };
        Ok(Some(Version {
            revision,
            time,
            kv,
            is_recorded: !matches!(change, KeyChange::DeletedUnrecorded(_)),
        }))
    }
}

/// Collects the versions of a key, and the Events about its object.
struct HistoryCollector<'k> {
    versions: Collector<'k>,
    events_of: Option<&'k EventsOf<'k>>,
    events: Mutex<Events>,
}

/// The newest versions of Event objects, by revision and number within the transaction.
#[derive(Default)]
struct Events(BTreeMap<(Revision, u32), DatedEvent>);

impl Collect for HistoryCollector<'_> {
    fn wants(&self, key: &[u8]) -> bool {
        self.versions.wants(key) || self.events_of.is_some_and(|events| events.contains(key))
    }

    fn begin_full(&self, states: RevisionRange) {
        self.versions.begin_full(states);
    }

    fn add(&self, version: FoundVersion<'_>) -> Result<()> {
        if self.versions.wants(version.key) {
            return self.versions.add(version);
        }
        let note = version.kv.zip(self.events_of);
        if let Some(note) = note.and_then(|(kv, events)| events.note(kv)) {
            lock(&self.events).add(version.revision, version.time, note);
        }
        Ok(())
    }
}

impl Events {
    /// Adds a version. Of too many, the oldest is dropped.
    fn add(&mut self, revision: (Revision, u32), time: Option<&str>, note: EventNote) {
        let event = self.0.entry(revision).or_insert(DatedEvent {
            revision: revision.0,
            time: None,
            note,
        });
        // A full and a delta may hold the same version, and only the delta has its time.
        if event.time.is_none() {
            event.time = time.map(str::to_owned);
        }
        if self.0.len() > MAX_EVENTS {
            self.0.pop_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_events_are_kept_in_whatever_order_they_are_found() {
        let mut found = Events::default();
        let note = EventNote {
            r#type: "Normal".to_owned(),
            reason: "Pulled".to_owned(),
            message: String::new(),
            count: 1,
        };
        let newest = MAX_EVENTS as i64 + 2;
        for revision in [2, newest].into_iter().chain(1..newest) {
            found.add((Revision(revision), 0), None, note.clone());
        }
        // The same version in a delta.
        let time = "2026-11-21T02:30:00Z";
        found.add((Revision(newest), 0), Some(time), note);
        let events: Vec<_> = found.0.into_values().collect();
        assert!(events.iter().map(|e| e.revision.0).eq(3..=newest));
        assert_eq!(events.last().unwrap().time.as_deref(), Some(time));
    }
}
