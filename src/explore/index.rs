//! The index of a backup: every version of every key that the snapshots of a timeline hold.
//!
//! Keys, revisions and times are in memory, 24 bytes for a version. The records are in an unnamed file of the temporary
//! directory, which is always sealed, because it holds Secrets. A state at a revision is found by a binary search in
//! the versions of each key.

use super::kinds::{Kind, KindId, Kinds};
use crate::backup::chain::RevisionRange;
use crate::base::temp::{self, TempFile};
use crate::base::{ReadAt, lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::resource::{KeyNames, Resource};
use crate::ops::read::kinds::FoundKinds;
use crate::ops::read::stream::{KeyChange, VersionStream};
use crate::ops::read::versions::{self, Coverage};
use crate::prefix::open::BackupLocation;
use chrono::{DateTime, Utc};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::sync::Mutex;

/// The most versions of an index: 240 MB of memory, and more while it is made.
const MAX_VERSIONS: usize = 10_000_000;
/// Records are written to the file in pieces of this size, in bytes.
const BUFFER: usize = 1 << 20;

/// A version of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version {
    /// The revision of the change.
    pub(super) revision: Revision,
    /// Where its record is in the file.
    offset: u64,
    /// The length of the record; 0 for a deletion.
    length: u32,
    /// Whether it created the key.
    pub(super) is_creation: bool,
    /// Whether nothing records the deletion: the key is missing in a full that follows a gap.
    pub(super) is_inferred: bool,
}

impl Version {
    /// Whether the key was deleted.
    pub(super) fn is_deletion(&self) -> bool {
        self.length == 0
    }

    fn record(&self, records: &TempFile) -> Result<Vec<u8>> {
        let mut record = vec![0; self.length as usize];
        let read = records.read_exact_at(&mut record, self.offset);
        read.map_err(|e| Error::io("read the index in the temporary directory", e))?;
        Ok(record)
    }

    /// A version with a record of one byte.
    #[cfg(test)]
    pub(super) fn of_revision(revision: i64) -> Self {
        Version {
            revision: Revision(revision),
            offset: 0,
            length: 1,
            is_creation: false,
            is_inferred: false,
        }
    }
}

/// A key with the places of its versions.
#[derive(Debug)]
pub(super) struct Key {
    /// The bytes of the key.
    pub(super) bytes: Box<[u8]>,
    /// Its kind; `None` if it is no object of Kubernetes.
    pub(super) kind: Option<KindId>,
    /// Where the namespace is in the key; empty if there is none.
    namespace: Range<u32>,
    /// Where the name is in the key: at its end. All of the key if it is no object.
    name: Range<u32>,
    versions: Range<u32>,
}

impl Key {
    fn part(&self, range: &Range<u32>) -> &str {
        let part = self.bytes.get(range.start as usize..range.end as usize);
        std::str::from_utf8(part.unwrap_or_default()).unwrap_or_default()
    }

    /// The namespace of the object; empty if it has none.
    pub(super) fn namespace(&self) -> &str {
        self.part(&self.namespace)
    }

    /// The name of the object; empty if it is none.
    pub(super) fn name(&self) -> &str {
        self.part(&self.name)
    }
}

/// A revision whose time is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment {
    /// The revision.
    pub(super) revision: Revision,
    /// When the snapshotter received the change, or took the snapshot that ends with it.
    pub(super) time: DateTime<Utc>,
    /// The latest time up to this revision. Clocks go back.
    latest: DateTime<Utc>,
}

/// The index.
#[derive(Debug)]
pub(super) struct Index {
    /// In the order of their bytes.
    pub(super) keys: Vec<Key>,
    /// By key, and then by revision.
    versions: Vec<Version>,
    /// In the order of their revisions.
    moments: Vec<Moment>,
    /// The kinds of the objects.
    pub(super) kinds: Kinds,
    /// The oldest revision whose state is known.
    pub(super) first: Revision,
    /// What was read.
    pub(super) coverage: Coverage,
    /// The ranges of revisions after the oldest state whose states are unknown: from a missing change to the next full.
    pub(super) unknown: Vec<RevisionRange>,
    records: TempFile,
}

impl Index {
    /// Returns the kind of a key's object; `None` if it is none.
    pub(super) fn kind(&self, key: &Key) -> Option<&Kind> {
        self.kinds.get(key.kind?)
    }

    /// Returns the versions of a key, oldest first.
    pub(super) fn versions(&self, key: &Key) -> &[Version] {
        let range = key.versions.start as usize..key.versions.end as usize;
        self.versions.get(range).unwrap_or_default()
    }

    /// Returns the version of a key at a revision; `None` if it does not exist then.
    pub(super) fn at(&self, key: &Key, revision: Revision) -> Option<&Version> {
        let versions = self.versions(key);
        let newer = versions.partition_point(|v| v.revision <= revision);
        let newest = versions.get(newer.checked_sub(1)?)?;
        (!newest.is_deletion()).then_some(newest)
    }

    /// Returns the keys that exist at a revision, each with its version.
    pub(super) fn state(&self, revision: Revision) -> impl Iterator<Item = (&Key, &Version)> {
        let keys = self.keys.iter();
        keys.filter_map(move |key| Some((key, self.at(key, revision)?)))
    }

    /// Returns the key with these bytes.
    pub(super) fn key(&self, bytes: &[u8]) -> Option<&Key> {
        let at = self.keys.binary_search_by(|key| (*key.bytes).cmp(bytes));
        self.keys.get(at.ok()?)
    }

    /// Reads the record of a version. Returns nothing for a deletion.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn record(&self, version: &Version) -> Result<Vec<u8>> {
        version.record(&self.records)
    }

    /// Returns the moments of states that can be shown: deltas older than the oldest full have earlier ones.
    pub(super) fn moments(&self) -> &[Moment] {
        let begin = self.moments.partition_point(|m| m.revision < self.first);
        &self.moments[begin..]
    }

    /// Returns the range of unknown states that a revision is in.
    pub(super) fn unknown_at(&self, revision: Revision) -> Option<RevisionRange> {
        versions::unknown_at(&self.unknown, revision)
    }

    /// Returns the newest revision whose state is known.
    pub(super) fn newest(&self) -> Revision {
        let newest = self.coverage.newest.max(self.first);
        self.unknown_at(newest)
            .map_or(newest, |(first, _)| first.previous())
    }

    /// Returns the time of a revision, if it is known.
    pub(super) fn time_of(&self, revision: Revision) -> Option<DateTime<Utc>> {
        let at = self.moments.binary_search_by_key(&revision, |m| m.revision);
        Some(self.moments.get(at.ok()?)?.time)
    }

    /// Returns the newest revision before the first one that is later than `time`, as `--time` does.
    pub(super) fn revision_at(&self, time: DateTime<Utc>) -> Revision {
        let later = self.moments.partition_point(|m| m.latest <= time);
        let moment = later.checked_sub(1).and_then(|at| self.moments.get(at));
        moment.map_or(self.first, |m| m.revision.max(self.first))
    }
}

impl Index {
    /// Makes the index of all versions on the timeline with this ID, or on the newest one. `prefixes` are those of the API
    /// servers.
    ///
    /// # Errors
    /// `TooLarge` if there are more than ten million versions; as [`VersionStream::by_key`].
    pub(super) fn read(
        backup: &BackupLocation,
        timeline: Option<&str>,
        prefixes: &EtcdPrefixes,
    ) -> Result<Self> {
        let ctx = backup.context();
        let file = temp::Dir::new(&ctx.temp_dir, true).file()?;
        let records = Mutex::new(Records {
            file: BufWriter::with_capacity(BUFFER, file),
            length: 0,
        });
        // Only the places of records are sorted.
        let digest = |kv: &KeyValue<'_>, out: &mut Vec<u8>| {
            let begin = out.len();
            kv.encode(out);
            let (offset, length) = lock(&records).push(&out[begin..])?;
            out.truncate(begin);
            out.extend(offset.to_be_bytes());
            out.extend(length.to_be_bytes());
            out.push(u8::from(kv.is_new()));
            Ok(())
        };
        let mut stream = VersionStream::by_key(backup, timeline, &KeyRange::All, &digest)?;
        let records = unpoisoned(records.into_inner()).finish()?;
        let (mut keys, mut versions): (Vec<Key>, Vec<Version>) = (Vec::new(), Vec::new());
        let mut times: Vec<(Revision, DateTime<Utc>)> = Vec::new();
        let found_kinds = FoundKinds::new(prefixes);
        while let Some(found) = stream.next()? {
            ctx.store.cancel().check()?;
            if versions.len() >= MAX_VERSIONS {
                return Err(Reason::TooLarge.error(format!(
                    "the backup has more than {MAX_VERSIONS} versions of keys: look at one of them with `deltafold history`, or copy a part of the backup with `deltafold copy` and explore that"
                )));
            }
            let time = found.time.map(DateTime::parse_from_rfc3339);
            if let Some(Ok(time)) = time {
                times.push((found.revision, time.to_utc()));
            }
            let place = versions.len() as u32;
            let is_same = keys.last().is_some_and(|key| *key.bytes == *found.key);
            if !is_same {
                keys.push(Key {
                    bytes: found.key.into(),
                    kind: None,
                    namespace: 0..0,
                    name: 0..0,
                    versions: place..place,
                });
            } else if versions
                .last()
                .is_some_and(|v| v.revision == found.revision)
            {
                // A transaction that deletes the key and puts it again.
                versions.pop();
            }
            let (offset, length, is_creation) = match found.change {
                KeyChange::Put(place) => place_of(place)?,
                KeyChange::Deleted | KeyChange::DeletedUnrecorded(_) => (0, 0, false),
            };
            let version = Version {
                revision: found.revision,
                offset,
                length,
                is_creation,
                is_inferred: matches!(found.change, KeyChange::DeletedUnrecorded(_)),
            };
            let is_definition = found_kinds.is_definition(found.key);
            if is_definition && !version.is_deletion() {
                let record = version.record(&records)?;
                let kv = KeyValue::decode(&record)?;
                found_kinds.see(found.key, found.revision, Some(&kv));
            } else if is_definition || !is_same {
                found_kinds.see(found.key, found.revision, None);
            }
            versions.push(version);
            if let Some(key) = keys.last_mut() {
                key.versions.end = versions.len() as u32;
            }
        }
        // The times of changes come first.
        times.extend(&stream.coverage.moments);
        times.sort_by_key(|(revision, _)| *revision);
        times.dedup_by_key(|(revision, _)| *revision);
        let mut latest = DateTime::<Utc>::MIN_UTC;
        let moments = times.into_iter().map(|(revision, time)| {
            latest = latest.max(time);
            Moment {
                revision,
                time,
                latest,
            }
        });
        let moments = moments.collect();
        let coverage = stream.coverage;
        let first = coverage
            .first_state()
            .unwrap_or(Revision(1))
            .max(Revision(1));
        let mut unknown = coverage.unknown();
        unknown.retain(|range| range.1 > first);
        let mut kinds = Kinds::default();
        let names = KeyNames::new(Resource::built_in().chain(found_kinds.finish()), prefixes);
        for key in &mut keys {
            if let Some(named) = kinds.name(&names, &key.bytes) {
                (key.kind, key.namespace, key.name) =
                    (Some(named.kind), named.namespace, named.name);
            }
        }
        Ok(Index {
            keys,
            versions,
            moments,
            kinds,
            first,
            coverage,
            unknown,
            records,
        })
    }
}

/// The file of the records.
struct Records {
    file: BufWriter<TempFile>,
    length: u64,
}

impl Records {
    /// Adds a record, and returns its place and its length.
    fn push(&mut self, record: &[u8]) -> Result<(u64, u32)> {
        let length = u32::try_from(record.len())
            .map_err(|_| Error::corrupt("a record is longer than 4 GiB"))?;
        self.file.write_all(record).map_err(not_written)?;
        let offset = self.length;
        self.length += u64::from(length);
        Ok((offset, length))
    }

    fn finish(self) -> Result<TempFile> {
        self.file
            .into_inner()
            .map_err(|e| not_written(e.into_error()))
    }
}

/// Decodes a record's place, its length, and whether it created its key.
fn place_of(place: &[u8]) -> Result<(u64, u32, bool)> {
    let bad = || Error::internal("a record in the temporary directory has no place");
    let (offset, length) = place.split_first_chunk().ok_or_else(bad)?;
    let (length, rest) = length.split_first_chunk().ok_or_else(bad)?;
    let is_creation = rest == [1];
    Ok((
        u64::from_be_bytes(*offset),
        u32::from_be_bytes(*length),
        is_creation,
    ))
}

fn not_written(e: io::Error) -> Error {
    Error::io("write the index to the temporary directory", e)
}
