//! Finds what was deleted in a span of a timeline, also if it was created in it, and when a key was deleted.
//!
//! The changes of the span are read once, beside what existed before it, which tells what a deletion that no snapshot
//! records took away.

use super::stream::{Collector, KeyChange, KeyVersion, VersionStream};
use super::versions::{Coverage, known_before, read_between};
use super::{check_size, kinds};
use crate::backup::chain::RevisionRange;
use crate::base::opt::SINCE;
use crate::base::time::{rfc3339, utc};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::reference::KindsOf;
use crate::objects::resource::{KeyNames, Resource};
use crate::objects::{Detail, EncryptionKeys, NotDecoded, Object};
use crate::prefix::open::{BackupLocation, State};
use crate::prefix::scan::Scan;
use crate::prefix::select::{At, StateRequest};
use crate::prefix::set_aside::{Purpose, decide_again};
use crate::prefix::warn;
use chrono::{DateTime, Utc};
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
    /// Reads the deletions of the keys of a range, which `range` chooses by the kinds of objects, after the point `from`, or
    /// all that the backup holds. `prefixes` are those of the API servers. With `count_events`, Events are only counted.
    ///
    /// # Errors
    /// `TooLarge` if there are more than a million; those of `range`; as [`State::open`] and [`State::for_each_live`].
    pub fn read(
        backup: &BackupLocation,
        from: Option<&StateRequest>,
        to: &StateRequest,
        prefixes: &EtcdPrefixes,
        range: impl Fn(&[Resource]) -> Result<KeyRange>,
        objects: &ObjectsRead<'_>,
        count_events: bool,
    ) -> Result<Self> {
        decide_again([backup.context()], Purpose::Read, || {
            Self::try_read(backup, from, to, prefixes, &range, objects, count_events)
        })
    }

    fn try_read(
        backup: &BackupLocation,
        from: Option<&StateRequest>,
        to_request: &StateRequest,
        prefixes: &EtcdPrefixes,
        range: &dyn Fn(&[Resource]) -> Result<KeyRange>,
        objects: &ObjectsRead<'_>,
        count_events: bool,
    ) -> Result<Self> {
        let ctx = backup.context();
        let (to, scan) = backup.open_with_scan(to_request)?;
        let mut warnings = to.warnings.clone();
        let is_later = |at: At| matches!(at, At::Revision(r) if r > to.revision);
        let from = match from.map(|request| (request, backup.open(request))) {
            None => None,
            Some((_, Ok(from))) => Some(from),
            Some((request, Err(e)))
                if e.reason() == Reason::OutOfRange && !is_later(request.at) =>
            {
                let cut = format!(
                    "{SINCE} is before the oldest state of the backup: all deletions that the backup holds are shown"
                );
                warn(&mut warnings, cut);
                None
            }
            Some((_, Err(e))) => return Err(e),
        };
        let mut resources: Vec<Resource> = Resource::built_in().collect();
        for state in from.iter().chain([&to]) {
            let custom = kinds(backup, state, KindsOf::State, prefixes)?.into_iter();
            let new: Vec<Resource> = custom.filter(|r| !resources.contains(r)).collect();
            resources.extend(new);
        }
        let range = match range(&resources) {
            // Of a kind that neither state has.
            Err(e) if e.reason() == Reason::KeyNotFound => {
                resources.extend(kinds(backup, &to, KindsOf::AllTimes, prefixes)?);
                range(&resources)?
            }
            range => range?,
        };
        let after = from.as_ref().map_or(Revision(0), |from| from.asked);
        let last = match to_request.at {
            // Snapshots after a gap record deletions although they lead to no state.
            At::Newest => Revision(i64::MAX),
            At::Revision(_) | At::Time(_) => to.asked,
        };
        let span = Span {
            backup,
            scan: scan.as_ref(),
            state: &to,
            from: from.as_ref(),
            revisions: (after.next(), last),
        };
        let mut found = span.read(&range, Some(objects), false)?;
        let (mut deleted, mut events, mut bytes) = (Vec::new(), 0, 0);
        let names = KeyNames::new(Resource::built_in().filter(is_event), prefixes);
        while let Some(key) = found.next()? {
            ctx.store.cancel().check()?;
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
        let coverage = &found.stream.coverage;
        let first = coverage.first_state().unwrap_or_default().max(after);
        let last = last.min(coverage.newest.max(to.revision));
        Ok(Deleted {
            from: after,
            to: last,
            timeline: to.timeline_id().map(str::to_owned),
            missing: coverage.missing_in((first.next(), last)),
            state: to,
            resources,
            keys: deleted,
            events,
            warnings,
        })
    }
}

fn is_event(resource: &Resource) -> bool {
    resource.kind == "Event"
}

/// A span of a timeline.
pub(crate) struct Span<'a> {
    /// The backup.
    pub(crate) backup: &'a BackupLocation,
    /// The snapshots of a store; `None` for a plain snapshot file.
    pub(crate) scan: Option<&'a Scan>,
    /// A state of the timeline.
    pub(crate) state: &'a State,
    /// The state before the span, if what existed then counts although nothing in the span changes it.
    pub(crate) from: Option<&'a State>,
    /// The first revision and the last one.
    pub(crate) revisions: RevisionRange,
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
        self.read(range, objects, true)
    }

    fn read(
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
        let ctx = self.backup.context();
        let collector = Collector::new(ctx.temp(), range, &digest);
        if let Some(from) = self.from {
            collector.add_state(ctx, from)?;
        }
        // What happened between that state and the span tells what existed when it began.
        let before = self
            .from
            .map_or(self.revisions.0, |from| from.revision.next());
        let read = (self.revisions.0.min(before), self.revisions.1);
        let coverage = read_between(self.backup, self.scan, self.state, read, &collector);
        let coverage = match coverage {
            Err(e) if is_tolerant && e.reason() != Reason::Terminated => {
                tracing::warn!("not every deletion can be dated: {e}");
                Coverage::default()
            }
            coverage => coverage?,
        };
        Ok(DeletedKeys {
            known: Known {
                span: self.revisions,
                unknown: coverage.unknown_in(read),
                moments: coverage.moments.clone(),
            },
            stream: collector.finish(coverage)?,
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

/// What is known of the span.
#[derive(Debug)]
struct Known {
    span: RevisionRange,
    /// The revisions whose states are unknown.
    unknown: Vec<RevisionRange>,
    /// The last revisions of snapshots, and when these were taken.
    moments: Vec<(Revision, DateTime<Utc>)>,
}

/// What happened to a key so far.
#[derive(Debug)]
struct Life {
    key: Vec<u8>,
    exists: Option<Existing>,
    deleted: Option<DeletedKey>,
}

#[derive(Debug)]
struct Existing {
    /// The revision at which it was put without a deletionTimestamp, if that is known.
    put: Revision,
    seen: Seen,
    /// The revision since which it has a deletionTimestamp.
    terminating: Option<Revision>,
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
        let existed = self.exists.take();
        let revision = version.revision;
        let (recorded, last) = match version.change {
            KeyChange::Put(digest) => {
                let mut seen = Seen::decode(digest)?;
                let since = existed.as_ref().and_then(|e| e.terminating);
                let since = since.unwrap_or(revision);
                let mut before = existed.filter(|_| seen.is_terminating);
                if let Some(before) = &mut before {
                    seen.record = std::mem::take(&mut before.seen.record);
                }
                self.exists = Some(Existing {
                    put: before.map_or(revision, |e| e.put),
                    terminating: seen.is_terminating.then_some(since),
                    seen,
                });
                return Ok(());
            }
            KeyChange::Deleted => (Some(revision), revision.previous()),
            KeyChange::DeletedUnrecorded(after) => (None, known.until(after)),
        };
        if revision < known.span.0 {
            return Ok(());
        }
        let put = existed.as_ref().map_or(last, |e| e.put);
        let terminating = existed.as_ref().and_then(|e| e.terminating);
        let before = terminating.map_or(last, Revision::previous);
        let seen = existed.map(|e| e.seen).unwrap_or_default();
        let first_after = || known.first_after(revision).map(rfc3339);
        self.deleted = Some(DeletedKey {
            key: self.key.clone(),
            deletion: Deletion {
                revision: recorded,
                time: version.time.map(str::to_owned),
                not_after: version.time.is_none().then(first_after).flatten(),
            },
            before: known_before(&known.unknown, before, put),
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

impl Known {
    /// Returns the newest revision at which a key is known to be unchanged since a revision: deletions are recorded but in
    /// gaps.
    fn until(&self, since: Revision) -> Revision {
        let gap = self.unknown.iter().find(|gap| gap.1 > since);
        gap.map_or(since, |gap| gap.0.previous().max(since))
    }

    /// Returns when the first snapshot was taken that reaches a revision.
    fn first_after(&self, revision: Revision) -> Option<DateTime<Utc>> {
        let after = self.moments.iter().filter(|(last, _)| *last >= revision);
        after.map(|(_, taken)| *taken).min()
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

fn owner_in(object: &Object) -> Option<Owner> {
    let owner = object.owners().into_iter().next()?;
    Some(Owner {
        kind: owner.kind,
        name: owner.name,
    })
}
