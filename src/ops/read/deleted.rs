//! Finds what was deleted in a span of a timeline, also if it was created in it, and when a key was deleted.
//!
//! `span` reads the changes of the span, beside what existed before it.

use super::check_size;
use super::span::{Begin, Existence, Known, Opened, Span};
use super::stream::{KeyChange, KeyVersion, VersionStream};
use crate::backup::chain::RevisionRange;
use crate::base::time::{rfc3339, utc};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::resource::{KeyNames, Resource};
use crate::objects::{Detail, EncryptionKeys, NotDecoded, Object};
use crate::prefix::open::{BackupLocation, State};
use crate::prefix::scan::Scan;
use crate::prefix::select::StateRequest;
use crate::prefix::set_aside::{Purpose, decide_again};
use chrono::DateTime;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;

/// The largest number of deletions that are held in memory.
const MAX_DELETED: usize = 1_000_000;

/// The deletion of a key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Deletion {
    /// The revision of the deletion; null if no snapshot records it, because deltas are missing or a full is compacted.
    pub revision: Option<Revision>,
    /// When the deletion was recorded in a delta (RFC 3339); null if no delta records it.
    pub time: Option<String>,
    /// When the first snapshot after the deletion was taken (RFC 3339). null if `time` is known, and if the snapshots tell no
    /// time.
    pub not_after: Option<String>,
}

/// Such as "deleted at revision 42 (2026-11-20T14:00:00Z)".
impl fmt::Display for Deletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("deleted")?;
        if let Some(revision) = self.revision {
            write!(f, " at revision {revision}")?;
        }
        let parsed = |time: &String| DateTime::parse_from_rfc3339(time).ok();
        if let Some(time) = self.time.as_ref().and_then(parsed) {
            write!(f, " ({})", utc(time.to_utc()))?;
        } else if let Some(taken) = self.not_after.as_ref().and_then(parsed) {
            write!(f, " by {}", utc(taken.to_utc()))?;
        }
        Ok(())
    }
}

/// A key that was deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeletedKey {
    /// The key.
    pub key: Vec<u8>,
    /// The last deletion in the span.
    pub deletion: Deletion,
    /// The newest revision at which it is known to have been there and not about to be deleted: a namespace empties while it
    /// is.
    pub before: Revision,
    /// The owner of the object, if it had one.
    pub owner: Option<Owner>,
    /// Whether the object had the labels that are asked for; `None` if it is encrypted.
    pub has_labels: Option<bool>,
    /// Whether the key exists again at the end of the span.
    pub is_recreated: bool,
    /// Its record as it was before, if records are read; empty if no snapshot holds it.
    pub record: Vec<u8>,
}

/// The owner of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Owner {
    /// The kind, such as `ReplicaSet`.
    pub kind: String,
    /// The name.
    pub name: String,
}

/// What is read of objects.
pub struct ObjectsRead<'a> {
    /// What opens those that API servers have encrypted.
    pub keys: &'a EncryptionKeys,
    /// Whether an object has the labels that are asked for.
    pub labels: &'a (dyn Fn(&Map<String, Value>) -> bool + Sync),
    /// Whether the records themselves are kept.
    pub records: bool,
}

/// The deletions of a span, in the order of their revisions; those without one come first.
pub struct Deleted {
    /// The revision of the first point; 0 if all that the backup holds was read.
    pub from: Revision,
    /// The revision of the second point.
    pub to: Revision,
    /// The ID of the timeline; `None` for a plain snapshot file.
    pub timeline: Option<String>,
    /// The revisions of the span whose changes no snapshot holds completely.
    pub missing: Vec<RevisionRange>,
    /// The kinds of objects: Kubernetes' own, and those that the states define.
    pub resources: Vec<Resource>,
    /// The keys.
    pub keys: Vec<DeletedKey>,
    /// Number of deleted Events that are not among the keys.
    pub events: u64,
    /// The state at the second point.
    pub state: State,
    /// Warnings for the report.
    pub warnings: Vec<String>,
}

impl Deleted {
    /// Reads the deletions of the keys of a range, which `range` chooses by the kinds of objects. `prefixes` are those of the
    /// API servers. With `count_events`, Events are only counted.
    ///
    /// # Errors
    /// `TooLarge` if there are more than a million; those of `range`; as [`State::open`] and [`State::for_each_live`].
    pub fn read(
        backup: &BackupLocation,
        begin: Begin,
        end: &StateRequest,
        prefixes: &EtcdPrefixes,
        range: impl Fn(&[Resource]) -> Result<KeyRange>,
        objects: &ObjectsRead<'_>,
        count_events: bool,
    ) -> Result<Self> {
        decide_again([backup.context()], Purpose::Read, || {
            Self::try_read(backup, begin, end, prefixes, &range, objects, count_events)
        })
    }

    fn try_read(
        backup: &BackupLocation,
        begin: Begin,
        end: &StateRequest,
        prefixes: &EtcdPrefixes,
        range: &dyn Fn(&[Resource]) -> Result<KeyRange>,
        objects: &ObjectsRead<'_>,
        count_events: bool,
    ) -> Result<Self> {
        let mut opened = Opened::open(backup, begin, end, prefixes, range)?;
        let mut found = opened
            .span(backup)
            .deletions(&opened.range, Some(objects), false)?;
        let (mut deleted, mut events, mut bytes) = (Vec::new(), 0, 0);
        let names = KeyNames::new(Resource::built_in().filter(is_event), prefixes);
        while let Some(key) = found.next()? {
            backup.context().store.cancel().check()?;
            // There may be millions of them.
            if count_events && names.object(&key.key).is_some() {
                events += 1;
                continue;
            }
            bytes += key.record.len();
            check_size(bytes)?;
            deleted.push(key);
            if deleted.len() > MAX_DELETED {
                return Err(Reason::TooLarge.error(format!(
                    "more than {MAX_DELETED} keys were deleted: give a shorter time, a kind or a namespace"
                )));
            }
        }
        deleted.sort_by_key(|d| d.deletion.revision);
        opened.name(backup, prefixes, deleted.iter().map(|d| &d.key[..]))?;
        let coverage = &found.stream.coverage;
        Ok(Deleted {
            from: opened.after(),
            to: opened.last(coverage),
            timeline: opened.to.timeline_id().map(str::to_owned),
            missing: opened.missing(coverage),
            state: opened.to,
            resources: opened.resources,
            keys: deleted,
            events,
            warnings: opened.warnings,
        })
    }
}

fn is_event(resource: &Resource) -> bool {
    resource.kind == "Event"
}

impl Span<'_> {
    /// Returns when keys of a range were deleted, as far as that is known: damage of a snapshot that the state does not need is
    /// logged. Owners and labels are read of `objects`.
    ///
    /// # Errors
    /// `Terminated`, `Io`, `NoSpace`.
    pub(crate) fn dates(
        &self,
        range: &KeyRange,
        objects: Option<&ObjectsRead<'_>>,
    ) -> Result<DeletedKeys> {
        self.deletions(range, objects, true)
    }

    fn deletions(
        &self,
        range: &KeyRange,
        objects: Option<&ObjectsRead<'_>>,
        is_tolerant: bool,
    ) -> Result<DeletedKeys> {
        let digest = |kv: &KeyValue<'_>, out: &mut Vec<u8>| match objects {
            Some(objects) => {
                serde_json::to_writer(&mut *out, &Seen::of(kv, objects)).map_err(|e| {
                    Error::internal(format!("an object's digest cannot be written: {e}"))
                })?;
                if objects.records {
                    kv.encode(out);
                }
                Ok(())
            }
            None => Ok(()),
        };
        let (stream, known) = self.read(range, &digest, &|_| true, is_tolerant)?;
        Ok(DeletedKeys {
            known,
            stream,
            current: None,
            waiting: None,
        })
    }
}

/// What is kept of an object.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Seen {
    owner: Option<Owner>,
    has_labels: Option<bool>,
    /// Whether it has a deletionTimestamp.
    is_terminating: bool,
    /// The record, if it is kept: it follows what is JSON.
    #[serde(skip)]
    record: Vec<u8>,
}

impl Seen {
    fn decode(digest: &[u8]) -> Result<Self> {
        let mut json = serde_json::Deserializer::from_slice(digest).into_iter::<Seen>();
        let Some(seen) = json.next() else {
            return Ok(Seen::default());
        };
        let mut seen = seen
            .map_err(|e| Error::internal(format!("an object's digest cannot be read back: {e}")))?;
        seen.record = digest[json.byte_offset()..].to_vec();
        Ok(seen)
    }

    fn of(kv: &KeyValue<'_>, objects: &ObjectsRead<'_>) -> Self {
        match Object::of_record_with(kv, objects.keys, Detail::WithoutManagers) {
            Ok(object) => Seen {
                owner: owner_in(&object),
                has_labels: Some((objects.labels)(&object.json)),
                is_terminating: object.is_terminating(),
                record: Vec::new(),
            },
            Err(e) => Seen {
                has_labels: (!matches!(e, NotDecoded::Encrypted { .. })).then_some(false),
                ..Seen::default()
            },
        }
    }
}

/// The keys of a range that were deleted in a span, in the order of their bytes.
#[derive(Debug)]
pub(crate) struct DeletedKeys {
    stream: VersionStream,
    known: Known,
    /// The key whose versions are read.
    current: Option<Life>,
    /// The key that [`of`](Self::of) will compare next.
    waiting: Option<DeletedKey>,
}

/// What happened to a key so far.
#[derive(Debug)]
struct Life {
    key: Vec<u8>,
    exists: Option<(Existence, Seen)>,
    deleted: Option<DeletedKey>,
}

impl DeletedKeys {
    /// Returns the next key; `None` at the end.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn next(&mut self) -> Result<Option<DeletedKey>> {
        loop {
            let Some(version) = self.stream.next()? else {
                return Ok(self.current.take().and_then(Life::end));
            };
            let mut ended = None;
            let life = match &mut self.current {
                Some(life) if life.key == version.key => life,
                current => {
                    ended = current.take();
                    current.insert(Life {
                        key: version.key.to_vec(),
                        exists: None,
                        deleted: None,
                    })
                }
            };
            if version.revision <= self.known.span.1 {
                life.add(&version, &self.known)?;
            }
            if let Some(deleted) = ended.and_then(Life::end) {
                return Ok(Some(deleted));
            }
        }
    }

    /// Returns the deletion of a key. Keys must be asked for in ascending order.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn of(&mut self, key: &[u8]) -> Result<Option<DeletedKey>> {
        loop {
            if self.waiting.is_none() {
                self.waiting = self.next()?;
            }
            match &self.waiting {
                Some(deleted) if deleted.key.as_slice() < key => self.waiting = None,
                Some(deleted) if deleted.key == key => return Ok(self.waiting.take()),
                _ => return Ok(None),
            }
        }
    }

    /// Returns the key that was deleted last.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn last(&mut self) -> Result<Option<DeletedKey>> {
        let mut last: Option<DeletedKey> = None;
        while let Some(deleted) = self.next()? {
            let is_later = |last: &DeletedKey| last.deletion.revision < deleted.deletion.revision;
            if last.as_ref().is_none_or(is_later) {
                last = Some(deleted);
            }
        }
        Ok(last)
    }
}

impl Life {
    fn add(&mut self, version: &KeyVersion<'_>, known: &Known) -> Result<()> {
        let (existed, seen) = self.exists.take().unzip();
        let revision = version.revision;
        let (recorded, last) = match version.change {
            KeyChange::Put(digest) => {
                let mut now = Seen::decode(digest)?;
                if now.is_terminating
                    && let Some(before) = seen
                {
                    now.record = before.record;
                }
                let existence = Existence::put(existed, revision, now.is_terminating);
                self.exists = Some((existence, now));
                return Ok(());
            }
            KeyChange::Deleted => (Some(revision), revision.previous()),
            KeyChange::DeletedUnrecorded(after) => (None, known.until(after)),
        };
        if revision < known.span.0 {
            return Ok(());
        }
        let seen = seen.unwrap_or_default();
        let first_after = || known.first_after(revision).map(rfc3339);
        self.deleted = Some(DeletedKey {
            key: self.key.clone(),
            deletion: Deletion {
                revision: recorded,
                time: version.time.map(str::to_owned),
                not_after: version.time.is_none().then(first_after).flatten(),
            },
            before: known.before(existed.as_ref(), last),
            owner: seen.owner,
            has_labels: seen.has_labels,
            is_recreated: false,
            record: seen.record,
        });
        Ok(())
    }

    fn end(self) -> Option<DeletedKey> {
        let is_recreated = self.exists.is_some();
        let deleted = self.deleted?;
        Some(DeletedKey {
            is_recreated,
            ..deleted
        })
    }
}

/// The advice for a key that does not exist and was not deleted.
pub const NO_DELETION: &str = "the backup records no deletion of it, either: check the name";

/// Returns the last deletion of keys that a state does not have. `keys` open what API servers have encrypted.
///
/// # Errors
/// `Terminated`, `Io`, `NoSpace`.
pub(crate) fn last_deletion(
    backup: &BackupLocation,
    scan: Option<&Scan>,
    state: &State,
    range: &KeyRange,
    keys: &EncryptionKeys,
) -> Result<Option<DeletedKey>> {
    let span = Span {
        backup,
        scan,
        state,
        from: None,
        revisions: (Revision(1), state.revision),
    };
    let labels = &|_: &Map<String, Value>| true;
    let objects = ObjectsRead {
        keys,
        labels,
        records: false,
    };
    span.dates(range, Some(&objects))?.last()
}

/// Returns the owner of an object: the controller, or the first one.
pub(crate) fn owner_of(kv: &KeyValue<'_>, keys: &EncryptionKeys) -> Option<Owner> {
    owner_in(&Object::of_record_with(kv, keys, Detail::WithoutManagers).ok()?)
}

pub(super) fn owner_in(object: &Object) -> Option<Owner> {
    let owner = object.owners().into_iter().next()?;
    Some(Owner {
        kind: owner.kind,
        name: owner.name,
    })
}
