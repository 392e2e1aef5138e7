//! What changed in a span, in the order of revisions.
//!
//! The versions of the span come key by key. A line is made of each, with what the version before tells, and the lines are
//! sorted again by revision. `cli` prints them; the page shows the same lines of its index.

use super::SORT_BUFFER_BYTES;
use super::deleted::{Owner, owner_in};
use super::span::{Begin, Existence, Known, Opened};
use super::stream::{KeyChange, KeyVersion, RECORD};
use super::versions::{FoundVersion, Wall};
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::parallel;
use crate::base::time::rfc3339;
use crate::error::{Error, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::{EtcdPrefixes, ObjectKey};
use crate::objects::resource::{KeyNames, Resource, changes_all_the_time};
use crate::objects::{Detail, EncryptionKeys, Object};
use crate::prefix::open::BackupLocation;
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
        let is_new = kv.is_new();
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
    /// The time at which the snapshotter received the change (RFC 3339); null if no delta records it.
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
    pub range: &'a (dyn Fn(&[Resource]) -> Result<KeyRange> + Sync),
    /// Whether changes with one of these records are wanted: the version before, and the new one.
    pub has_labels: &'a (dyn Fn(&[KeyValue<'_>]) -> bool + Sync),
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
        let mut opened = Opened::open(backup, begin, end, wanted.prefixes, wanted.range)?;
        let has_omitted = AtomicBool::new(false);
        let sees = |version: &FoundVersion<'_>| {
            let value = version.kv.map(|kv| kv.value);
            let object = || ObjectKey::from_key(version.key, value);
            let is_omitted = wanted.omits_events_and_leases
                && object().is_some_and(|o| changes_all_the_time(o.resource));
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
            threads: backup.context().threads,
            batch: Vec::new(),
            batch_bytes: 0,
            sorter: Sorter::new(backup.context().temp(), SORT_BUFFER_BYTES),
            key: Vec::new(),
            before: None,
            existence: None,
            deleted: None,
            lost: None,
            number: 0,
            built_in: KeyNames::new(Resource::built_in(), wanted.prefixes),
            unnamed: None,
        };
        while let Some(version) = stream.next()? {
            backup.context().store.cancel().check()?;
            lines.add(&version)?;
        }
        lines.end_batch()?;
        let exists = lines.existence.is_some();
        lines.end_key(exists);
        let unnamed = lines.unnamed.take();
        opened.name(backup, wanted.prefixes, unnamed.iter().map(|key| &key[..]))?;
        let coverage = &stream.coverage;
        for (first, last) in opened.missing(coverage) {
            lines.mark(first, &Item::Missing(first, last))?;
        }
        let (first, last) = (opened.revisions.0, opened.last(coverage));
        for wall in &coverage.walls {
            let at = wall.after_revision.next();
            if first <= at && at <= last {
                lines.mark(at, &Item::Wall(wall.clone()))?;
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

/// The versions that are decoded at once, on several threads: their number, those of a thread, and their bytes but for the
/// last one.
const BATCH: usize = 2000;
const CHUNK: usize = 100;
const BATCH_BYTES: usize = 8 << 20;

/// Makes the lines. Versions come key by key, those of a key in order.
struct Lines<'a> {
    wanted: &'a Wanted<'a>,
    known: Known,
    threads: usize,
    batch: Vec<Version>,
    batch_bytes: usize,
    sorter: Sorter,
    /// The key of the current line.
    key: Vec<u8>,
    /// The last version of the batch before. The first one of the batch is compared with it.
    before: Option<Version>,
    /// Whether the key is there after the version before.
    existence: Option<Existence>,
    /// The last deletion of the key, if it is wanted.
    deleted: Option<Lost>,
    /// The last deletion of all keys that are not there at the end.
    lost: Option<Lost>,
    number: u64,
    built_in: KeyNames,
    /// A key whose kind is none of Kubernetes' own.
    unnamed: Option<Vec<u8>>,
}

/// A version of a key.
struct Version {
    key: Vec<u8>,
    revision: Revision,
    time: Option<String>,
    /// The record that was put.
    record: Option<Vec<u8>>,
    /// Of a deletion that no snapshot records: the newest revision at which the key was there.
    unrecorded_after: Option<Revision>,
}

impl Version {
    fn kv(&self) -> Result<Option<KeyValue<'_>>> {
        self.record.as_deref().map(KeyValue::decode).transpose()
    }
}

struct Lost {
    key: Vec<u8>,
    revision: Revision,
    before: Revision,
    has_owner: bool,
}

impl Lines<'_> {
    fn add(&mut self, version: &KeyVersion<'_>) -> Result<()> {
        let (record, unrecorded_after) = match version.change {
            KeyChange::Put(record) => (Some(record.to_vec()), None),
            KeyChange::Deleted => (None, None),
            KeyChange::DeletedUnrecorded(after) => (None, Some(after)),
        };
        self.batch_bytes += version.key.len() + record.as_ref().map_or(0, Vec::len);
        self.batch.push(Version {
            key: version.key.to_vec(),
            revision: version.revision,
            time: version.time.map(str::to_owned),
            record,
            unrecorded_after,
        });
        if self.batch.len() >= BATCH || self.batch_bytes >= BATCH_BYTES {
            self.end_batch()?;
        }
        Ok(())
    }

    fn end_batch(&mut self) -> Result<()> {
        let mut batch: Vec<Version> = self.before.take().into_iter().collect();
        let first = batch.len();
        batch.append(&mut self.batch);
        self.batch_bytes = 0;
        let starts: Vec<usize> = (first..batch.len()).step_by(CHUNK).collect();
        let told = parallel::each(self.threads, &starts, |&start| {
            tell(&batch, start, &self.known, self.wanted)
        });
        let told = told.into_iter().flatten();
        for (version, (change, is_terminating)) in batch[first..].iter().zip(told) {
            if self.key != version.key {
                let exists = self.existence.take().is_some();
                self.end_key(exists);
                self.key.clone_from(&version.key);
            }
            if version.revision > self.known.span.1 {
                continue;
            }
            let existed = self.existence.take();
            if version.record.is_some() {
                let put = Existence::put(existed, version.revision, is_terminating);
                self.existence = Some(put);
                self.deleted = None;
                self.push_wanted(change?)?;
            } else {
                self.push_deletion(version, existed.as_ref(), change?)?;
            }
        }
        self.before = batch.pop();
        Ok(())
    }

    fn push_wanted(&mut self, change: Told) -> Result<()> {
        let only = self.wanted.only;
        match change {
            Some((change, true)) if only.is_empty() || only.contains(&change.summary.change) => {
                self.number += 1;
                if self.unnamed.is_none() && self.built_in.lacks(&self.key, self.wanted.prefixes) {
                    self.unnamed = Some(self.key.clone());
                }
                self.push(change.revision, self.number, &Item::Change(change))
            }
            _ => Ok(()),
        }
    }

    fn push_deletion(
        &mut self,
        version: &Version,
        existed: Option<&Existence>,
        change: Told,
    ) -> Result<()> {
        let Some((mut change, is_wanted)) = change else {
            return Ok(());
        };
        let until = match version.unrecorded_after {
            Some(after) => self.known.until(after),
            None => version.revision.previous(),
        };
        let before = self.known.before(existed, until);
        change.before = Some(before);
        self.deleted = is_wanted.then(|| Lost {
            key: self.key.clone(),
            revision: version.revision,
            before,
            has_owner: change.summary.owner.is_some(),
        });
        self.push_wanted(Some((change, is_wanted)))
    }

    /// Ends the versions of the current key.
    fn end_key(&mut self, exists: bool) {
        let deleted = self.deleted.take().filter(|d| !exists && !d.has_owner);
        let is_later = |lost: &Lost| {
            deleted
                .as_ref()
                .is_some_and(|d| lost.revision <= d.revision)
        };
        if self.lost.as_ref().is_none_or(is_later) {
            self.lost = deleted;
        }
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
}

/// The change of a version, and whether its labels are wanted. A deletion lacks its `before` yet. `None`: the version is
/// outside of the span.
type Told = Option<(Change, bool)>;

/// Returns the changes of a chunk of versions, in their order, each with whether the object is about to be deleted.
fn tell(
    batch: &[Version],
    start: usize,
    known: &Known,
    wanted: &Wanted<'_>,
) -> Vec<(Result<Told>, bool)> {
    let decode = |nth: usize| {
        let version = &batch[nth];
        // What existed before the span counts only for what changes it.
        let first = known.span.0;
        let changes_it = |next: &Version| next.key == version.key && next.revision >= first;
        if version.revision < first && !batch.get(nth + 1).is_none_or(changes_it) {
            return None;
        }
        let kv = KeyValue::decode(version.record.as_ref()?).ok()?;
        Object::of_record_with(&kv, wanted.keys, Detail::ManagersAlone).ok()
    };
    let mut old_object = start.checked_sub(1).and_then(decode);
    let versions = start..batch.len().min(start + CHUNK);
    let told = versions.map(|nth| {
        let version = &batch[nth];
        let object = decode(nth);
        let old = nth.checked_sub(1).map(|last| &batch[last]);
        let old = old.filter(|old| old.key == version.key);
        let old = old.map(|old| (old, old_object.as_ref()));
        let told = known
            .contains(version.revision)
            .then(|| change(version, object.as_ref(), old, known, wanted))
            .transpose();
        let is_terminating = object.as_ref().is_some_and(Object::is_terminating);
        old_object = object;
        (told, is_terminating)
    });
    told.collect()
}

/// Returns the change of a version, without the revision before a deletion, and whether it is wanted.
fn change(
    version: &Version,
    object: Option<&Object>,
    old: Option<(&Version, Option<&Object>)>,
    known: &Known,
    wanted: &Wanted<'_>,
) -> Result<(Change, bool)> {
    let new_kv = version.kv()?;
    let old_kv = old.map(|(old, _)| old.kv()).transpose()?.flatten();
    let old_object = old.and_then(|(_, object)| object);
    let versions: Vec<KeyValue<'_>> = old_kv.into_iter().chain(new_kv).collect();
    let not_after = || known.first_after(version.revision).map(rfc3339);
    let change = Change {
        revision: version.revision,
        time: version.time.clone(),
        not_after: version.time.is_none().then(not_after).flatten(),
        recorded: version.unrecorded_after.is_none(),
        summary: match &new_kv {
            Some(kv) => Summary::of_put(kv, object, old_object, wanted.show_secrets),
            None => Summary::of_deletion(old_object),
        },
        before: None,
    };
    Ok((change, (wanted.has_labels)(&versions)))
}
