//! What changed in a span, in the order of revisions.
//!
//! The versions of the span come key by key. A line is made of each, with what the version before tells, and the lines are
//! sorted again by revision. `cli` prints them; the page shows the same lines of its index.

use super::SORT_BUFFER_BYTES;
use super::deleted::{Owner, owner_in};
use super::diff::Omitted;
use super::span::{Begin, Existence, Known, Opened};
use super::stream::{KeyChange, KeyVersion, RECORD};
use super::versions::FoundVersion;
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::time::rfc3339;
use crate::error::{Error, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::resource::Resource;
use crate::objects::{EncryptionKeys, Object};
use crate::prefix::open::BackupLocation;
use crate::prefix::scan::Scan;
use crate::prefix::select::StateRequest;
use crate::prefix::set_aside::{Purpose, decide_again};
use chrono::{DateTime, Utc};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The most fields of a change that a line has.
const MOST_FIELDS: usize = 3;

/// What happened to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Happened {
    /// It was created.
    Created,
    /// It was put again, possibly with the same value.
    Changed,
    /// It was deleted.
    Deleted,
}

/// A change of a key, in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Summary {
    /// `created`, `changed` (put again, possibly with the same value) or `deleted`.
    pub change: Happened,
    /// Who wrote the version of an object: the managers whose entries in its managedFields are new.
    pub managers: Vec<String>,
    /// The first three fields of an object that differ from the version before, with their values. Those of a Secret are
    /// hidden.
    pub fields: Vec<String>,
    /// Number of further fields that differ.
    pub more_fields: usize,
    /// The owner of an object; null if it has none, or if it cannot be decoded.
    pub owner: Option<Owner>,
}

impl Summary {
    /// Summarizes a version that was put, if its object can be decoded. `before` is the object of the version before.
    pub fn of_put(
        kv: &KeyValue<'_>,
        object: Option<&Object>,
        before: Option<&Object>,
        show_secrets: bool,
    ) -> Self {
        let is_new = kv.create_revision == kv.mod_revision;
        let before = before.filter(|_| !is_new);
        let changes = object.zip(before);
        let changes = changes.map(|(object, before)| object.changes_since(before));
        let mut fields = changes.unwrap_or_default();
        let more_fields = fields.len().saturating_sub(MOST_FIELDS);
        fields.truncate(MOST_FIELDS);
        let is_hidden =
            |path: &str| !show_secrets && object.is_some_and(|o| o.is_secret_field(path));
        let managers = object.map(|object| object.managers_since(before));
        Summary {
            change: if is_new {
                Happened::Created
            } else {
                Happened::Changed
            },
            managers: managers.unwrap_or_default(),
            fields: fields.iter().map(|f| f.text(is_hidden(&f.path))).collect(),
            more_fields,
            owner: object.and_then(owner_in),
        }
    }

    /// Summarizes a deletion. `before` is the object that was deleted.
    pub fn of_deletion(before: Option<&Object>) -> Self {
        Summary {
            change: Happened::Deleted,
            managers: Vec::new(),
            fields: Vec::new(),
            more_fields: 0,
            owner: before.and_then(owner_in),
        }
    }
}

/// A change of a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Change {
    /// The revision of the change. If no snapshot records it, the one of the full that shows it.
    pub revision: Revision,
    /// When the snapshotter received the change (RFC 3339); null if only a full snapshot tells of it.
    pub time: Option<String>,
    /// When the first snapshot after the change was taken (RFC 3339); null if `time` is known, and if the snapshots tell no
    /// time.
    pub not_after: Option<String>,
    /// Whether a snapshot records the change. If not, a full that lacks the key tells that it was deleted.
    pub recorded: bool,
    /// What happened.
    #[serde(flatten)]
    pub summary: Summary,
    /// Of a deletion: the newest revision at which the key is known to have been there and not about to be deleted (a
    /// deletionTimestamp). null for other changes.
    pub before: Option<Revision>,
}

/// The history leaves another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Wall {
    /// The last revision that both have.
    pub after_revision: Revision,
    /// The ID of the timeline that begins here.
    pub timeline: String,
    /// The ID of the timeline that it leaves.
    pub left: String,
    /// When the snapshotter wrote that another history begins (RFC 3339); null if the snapshots alone tell it.
    pub time: Option<String>,
}

/// An item of a log.
#[derive(Debug, Serialize, Deserialize)]
pub enum Item {
    /// A change.
    Change(Change),
    /// The changes of these revisions are not all recorded.
    Missing(Revision, Revision),
    /// The history leaves another one.
    Wall(Wall),
}

/// Which changes are read.
pub struct Wanted<'a> {
    /// Where the span begins.
    pub begin: Begin,
    /// Where it ends.
    pub end: StateRequest,
    /// The prefixes of the API servers.
    pub prefixes: &'a EtcdPrefixes,
    /// Chooses the keys by the kinds of objects.
    pub range: &'a dyn Fn(&[Resource]) -> Result<KeyRange>,
    /// Whether changes with one of these records are wanted: the version before, and the new one.
    pub has_labels: &'a dyn Fn(&[KeyValue<'_>]) -> bool,
    /// What is wanted; empty for all.
    pub only: &'a [Happened],
    /// Whether changes of Events and Leases are left out: they happen all the time.
    pub omits_events_and_leases: bool,
    /// What opens encrypted objects.
    pub keys: &'a EncryptionKeys,
    /// Whether the values of Secrets are shown.
    pub show_secrets: bool,
}

/// The changes of a span, in the order of revisions.
pub struct Log {
    /// The revision after which the span begins; 0 for all that the backup holds.
    pub from: Revision,
    /// When it begins, if that is a time.
    pub since: Option<DateTime<Utc>>,
    /// Its last revision.
    pub to: Revision,
    /// The ID of the timeline; `None` for a plain snapshot file.
    pub timeline: Option<String>,
    /// The kinds of objects.
    pub resources: Vec<Resource>,
    /// Whether changes of Events or Leases were left out.
    pub has_omitted: bool,
    /// The last deleted key that is not there at the end and has no owner that makes it anew, and the newest revision at which
    /// it was there.
    pub lost: Option<(Vec<u8>, Revision)>,
    /// Warnings for the report.
    pub warnings: Vec<String>,
    lines: Sorted,
}

impl Log {
    /// Reads and sorts the changes of a span.
    ///
    /// # Errors
    /// Those of `range`; as `State::open` and `State::for_each_live`.
    pub fn read(backup: &BackupLocation, wanted: &Wanted<'_>) -> Result<Log> {
        decide_again([backup.context()], Purpose::Read, || {
            Self::try_read(backup, wanted)
        })
    }

    fn try_read(backup: &BackupLocation, wanted: &Wanted<'_>) -> Result<Log> {
        let (begin, end) = (wanted.begin, &wanted.end);
        let opened = Opened::open(backup, begin, end, wanted.prefixes, wanted.range)?;
        let has_omitted = AtomicBool::new(false);
        let omits = wanted.omits_events_and_leases;
        let sees = |version: &FoundVersion<'_>| {
            let value = version.kv.map(|kv| kv.value);
            let is_omitted = omits && Omitted::default().takes(version.key, value);
            if is_omitted && version.time.is_some() {
                has_omitted.store(true, Relaxed);
            }
            !is_omitted
        };
        let span = opened.span(backup);
        let (mut stream, known) = span.read(&opened.range, RECORD, &sees, false)?;
        let mut lines = Lines {
            wanted,
            known,
            sorter: Sorter::new(backup.context().temp(), SORT_BUFFER_BYTES),
            key: Vec::new(),
            before: None,
            deleted: None,
            lost: None,
            number: 0,
        };
        while let Some(version) = stream.next()? {
            backup.context().store.cancel().check()?;
            lines.add(&version)?;
        }
        lines.end_key();
        let coverage = &stream.coverage;
        for (first, last) in opened.missing(coverage) {
            lines.mark(first, &Item::Missing(first, last))?;
        }
        let (first, last) = (opened.revisions.0, opened.last(coverage));
        let walls = opened
            .scan
            .as_ref()
            .map(|scan| walls(scan, &opened.to.timeline));
        for wall in walls.into_iter().flatten() {
            let at = wall.after_revision.next();
            if first <= at && at <= last {
                lines.mark(at, &Item::Wall(wall))?;
            }
        }
        Ok(Log {
            from: opened.after(),
            since: opened.since,
            to: last,
            timeline: opened.to.timeline_id().map(str::to_owned),
            has_omitted: has_omitted.into_inner(),
            lost: lines.lost.map(|lost| (lost.key, lost.before)),
            lines: lines.sorter.finish()?,
            resources: opened.resources,
            warnings: opened.warnings,
        })
    }

    /// Returns the next item, and the key of a change; `None` at the end.
    ///
    /// # Errors
    /// `Io`.
    #[allow(clippy::should_implement_trait)] // the key borrows from the log, which an Iterator cannot express
    pub fn next(&mut self) -> Result<Option<(&[u8], Item)>> {
        if !self.lines.advance()? {
            return Ok(None);
        }
        let bad = || Error::internal("a line in the temporary directory cannot be read back");
        let (len, rest) = self.lines.current().1.split_first_chunk().ok_or_else(bad)?;
        let len = u32::from_be_bytes(*len) as usize;
        let (key, json) = rest.split_at_checked(len).ok_or_else(bad)?;
        let item = serde_json::from_slice(json).map_err(|_| bad())?;
        Ok(Some((key, item)))
    }
}

/// Returns where a timeline left others.
fn walls(scan: &Scan, timeline: &str) -> Vec<Wall> {
    let mut walls: Vec<Wall> = Vec::new();
    let mut id = timeline.to_owned();
    while let Ok(t) = scan.timelines.by_id(&id)
        && let Some((left, after)) = &t.left
        // No timeline leaves one that left it.
        && walls.len() < scan.timelines.all.len()
    {
        walls.push(Wall {
            after_revision: *after,
            timeline: std::mem::replace(&mut id, left.clone()),
            left: left.clone(),
            time: t.wall.as_ref().map(|wall| rfc3339(wall.at())),
        });
    }
    walls
}

/// Makes the lines, key by key.
struct Lines<'a> {
    wanted: &'a Wanted<'a>,
    known: Known,
    sorter: Sorter,
    key: Vec<u8>,
    /// The version of the key before the current one, unless it was deleted.
    before: Option<Before>,
    /// The last deletion of the key, if it is wanted.
    deleted: Option<Lost>,
    /// The last deletion of all keys that are not there at the end.
    lost: Option<Lost>,
    number: u64,
}

/// A version that the next one is compared with.
struct Before {
    revision: Revision,
    record: Vec<u8>,
    /// What is known of it; `None` if it was put before the span, and is not decoded yet.
    seen: Option<Seen>,
}

struct Seen {
    object: Option<Object>,
    existence: Existence,
}

struct Lost {
    key: Vec<u8>,
    revision: Revision,
    before: Revision,
    has_owner: bool,
}

impl Before {
    /// Decodes the version, if that is not done yet.
    fn see(self, keys: &EncryptionKeys) -> Result<(Vec<u8>, Seen)> {
        let seen = match self.seen {
            Some(seen) => seen,
            None => Seen::of(&KeyValue::decode(&self.record)?, self.revision, None, keys),
        };
        Ok((self.record, seen))
    }
}

impl Seen {
    fn of(
        kv: &KeyValue<'_>,
        revision: Revision,
        before: Option<Existence>,
        keys: &EncryptionKeys,
    ) -> Self {
        let object = Object::of_record(kv, keys).ok();
        let is_terminating = object.as_ref().is_some_and(Object::is_terminating);
        Seen {
            existence: Existence::put(before, revision, is_terminating),
            object,
        }
    }
}

impl Lines<'_> {
    fn add(&mut self, version: &KeyVersion<'_>) -> Result<()> {
        if self.key != version.key {
            self.end_key();
            self.key = version.key.to_vec();
        }
        let revision = version.revision;
        let (first, last) = self.known.span;
        let record = match version.change {
            KeyChange::Put(record) => Some(record),
            KeyChange::Deleted | KeyChange::DeletedUnrecorded(_) => None,
        };
        if revision < first {
            self.before = record.map(|record| Before {
                revision,
                record: record.to_vec(),
                seen: None,
            });
            return Ok(());
        }
        if revision > last {
            return Ok(());
        }
        let keys = self.wanted.keys;
        let before = self.before.take().map(|before| before.see(keys));
        let (old_record, old) = before.transpose()?.unzip();
        let old_kv = old_record.as_deref().map(KeyValue::decode).transpose()?;
        let new_kv = record.map(KeyValue::decode).transpose()?;
        let versions: Vec<KeyValue<'_>> = old_kv.into_iter().chain(new_kv).collect();
        let is_wanted = (self.wanted.has_labels)(&versions);
        let mut change = Change {
            revision,
            time: version.time.map(str::to_owned),
            not_after: None,
            recorded: !matches!(version.change, KeyChange::DeletedUnrecorded(_)),
            summary: Summary::of_deletion(old.as_ref().and_then(|old| old.object.as_ref())),
            before: None,
        };
        if change.time.is_none() {
            change.not_after = self.known.first_after(revision).map(rfc3339);
        }
        if let (Some(record), Some(kv)) = (record, new_kv) {
            let (old, existence) =
                old.map_or((None, None), |old| (old.object, Some(old.existence)));
            let new = Seen::of(&kv, revision, existence, keys);
            let secrets = self.wanted.show_secrets;
            change.summary = Summary::of_put(&kv, new.object.as_ref(), old.as_ref(), secrets);
            self.before = Some(Before {
                revision,
                record: record.to_vec(),
                seen: Some(new),
            });
        } else {
            let until = match version.change {
                KeyChange::DeletedUnrecorded(after) => self.known.until(after),
                KeyChange::Put(_) | KeyChange::Deleted => revision.previous(),
            };
            let existence = old.as_ref().map(|old| &old.existence);
            let before = self.known.before(existence, until);
            change.before = Some(before);
            self.deleted = is_wanted.then(|| Lost {
                key: self.key.clone(),
                revision,
                before,
                has_owner: change.summary.owner.is_some(),
            });
        }
        let only = self.wanted.only;
        if is_wanted && (only.is_empty() || only.contains(&change.summary.change)) {
            self.number += 1;
            let number = self.number;
            self.push(revision, number, &Item::Change(change))?;
        }
        Ok(())
    }

    /// Adds what stands before the changes of a revision.
    fn mark(&mut self, revision: Revision, item: &Item) -> Result<()> {
        self.key.clear();
        self.push(revision, 0, item)
    }

    fn push(&mut self, revision: Revision, number: u64, item: &Item) -> Result<()> {
        let mut place = revision.0.to_be_bytes().to_vec();
        place.extend(number.to_be_bytes());
        let mut record = (self.key.len() as u32).to_be_bytes().to_vec();
        record.extend_from_slice(&self.key);
        serde_json::to_writer(&mut record, item)
            .map_err(|e| Error::internal(format!("a line cannot be written: {e}")))?;
        self.sorter.push(&place, &record)
    }

    /// Ends the versions of the current key.
    fn end_key(&mut self) {
        let deleted = self.deleted.take();
        let is_back = self.before.take().is_some();
        let Some(deleted) = deleted.filter(|d| !is_back && !d.has_owner) else {
            return;
        };
        if self
            .lost
            .as_ref()
            .is_none_or(|lost| lost.revision <= deleted.revision)
        {
            self.lost = Some(deleted);
        }
    }
}
