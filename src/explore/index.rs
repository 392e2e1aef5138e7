//! The index of a backup: every version of every key that the snapshots of a timeline hold.
//!
//! Keys, revisions and times are in memory, 24 bytes for a version. The records are in an unnamed file of the temporary
//! directory, which is always sealed, because it holds Secrets. A state at a revision is found by a binary search in the
//! versions of each key. Called by `views`.

use super::kinds::{self, Kind, KindId, Kinds};
use crate::backup::chain::RevisionRange;
use crate::base::temp::{self, TempFile};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::resource::{KeyNames, Resource};
use crate::ops::read::versions::{Collect, Coverage, FoundVersion};
use crate::prefix::Context;
use chrono::{DateTime, Utc};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
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
    /// Whether nothing records the deletion: the key is missing in a full that follows a gap.
    pub(super) is_inferred: bool,
}

impl Version {
    /// Whether the key was deleted.
    pub(super) fn is_deletion(&self) -> bool {
        self.length == 0
    }

    /// A version with a record of one byte.
    #[cfg(test)]
    pub(super) fn of_revision(revision: i64) -> Self {
        Version {
            revision: Revision(revision),
            offset: 0,
            length: 1,
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
    /// The ranges of revisions after the oldest state whose changes no snapshot holds completely.
    pub(super) missing: Vec<RevisionRange>,
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
        use crate::base::ReadAt;
        let mut record = vec![0; version.length as usize];
        let read = self.records.read_exact_at(&mut record, version.offset);
        read.map_err(|e| Error::io("read the index in the temporary directory", e))?;
        Ok(record)
    }

    /// Returns the moments of states that can be shown: deltas older than the oldest full have earlier ones.
    pub(super) fn moments(&self) -> &[Moment] {
        let begin = self.moments.partition_point(|m| m.revision < self.first);
        &self.moments[begin..]
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

/// Collects the versions of all keys.
pub(super) struct Builder(Mutex<Found>);

struct Found {
    ids: HashMap<Box<[u8]>, u32>,
    entries: Vec<Entry>,
    fulls: Vec<FoundFull>,
    times: BTreeMap<Revision, DateTime<Utc>>,
    records: TempFile,
    buffer: Vec<u8>,
}

struct Entry {
    key: u32,
    version: Version,
    /// Whether it is of a delta, with a time. It comes before the same version in a full.
    is_of_delta: bool,
}

/// A full that was read.
struct FoundFull {
    /// The revision at and below which it has only the newest version of each key.
    compacted: Revision,
    /// The keys that it holds there, by their numbers.
    keys: Vec<bool>,
}

impl Builder {
    /// Returns a builder that writes to the temporary directory.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub(super) fn new(ctx: &Context) -> Result<Self> {
        Ok(Builder(Mutex::new(Found {
            ids: HashMap::new(),
            entries: Vec::new(),
            fulls: Vec::new(),
            times: BTreeMap::new(),
            records: temp::Dir::new(&ctx.temp_dir, true).file()?,
            buffer: Vec::new(),
        })))
    }

    /// Ends the reading and returns the index. `prefix` is that of the API server.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn finish(self, coverage: Coverage, prefix: &str) -> Result<Index> {
        let mut found = unpoisoned(self.0.into_inner());
        found.flush()?;
        found.fulls.sort_by_key(|full| full.compacted);
        let first = found.fulls.first().map(|full| full.compacted);
        // The times of changes come first.
        for (revision, time) in &coverage.moments {
            found.times.entry(*revision).or_insert(*time);
        }
        let mut latest = DateTime::<Utc>::MIN_UTC;
        let moments = found.times.into_iter().map(|(revision, time)| {
            latest = latest.max(time);
            Moment {
                revision,
                time,
                latest,
            }
        });
        let moments = moments.collect();
        let mut names: Vec<(Box<[u8]>, u32)> = found.ids.into_iter().collect();
        names.sort_unstable();
        let mut place = vec![0; names.len()];
        for (at, (_, id)) in (0_u32..).zip(&names) {
            place[*id as usize] = at;
        }
        let mut entries = found.entries;
        entries.sort_unstable_by_key(|e| {
            let version = &e.version;
            (
                place[e.key as usize],
                version.revision,
                !e.is_of_delta,
                version.offset,
            )
        });
        entries.dedup_by_key(|e| (e.key, e.version.revision));
        let first = first.unwrap_or(Revision(1)).max(Revision(1));
        let mut missing = coverage.missing();
        missing.retain(|range| range.1 > first);
        let mut index = Index {
            keys: Vec::with_capacity(names.len()),
            versions: Vec::with_capacity(entries.len()),
            moments,
            kinds: Kinds::default(),
            first,
            coverage,
            missing,
            records: found.records,
        };
        let mut rest = entries.as_slice();
        for (bytes, id) in names {
            let size = rest.iter().take_while(|e| e.key == id).count();
            let (of_key, others) = rest.split_at(size);
            rest = others;
            let begin = index.versions.len() as u32;
            add_versions(&mut index.versions, id, of_key, &found.fulls);
            index.keys.push(Key {
                bytes,
                kind: None,
                namespace: 0..0,
                name: 0..0,
                versions: begin..index.versions.len() as u32,
            });
        }
        drop(entries);
        index.name_objects(prefix)?;
        Ok(index)
    }
}

impl Index {
    /// Finds out which keys are objects of Kubernetes.
    fn name_objects(&mut self, prefix: &str) -> Result<()> {
        let mut keys = std::mem::take(&mut self.keys);
        let mut custom = Vec::new();
        for key in keys
            .iter()
            .filter(|key| kinds::is_definition(&key.bytes, prefix))
        {
            // A definition that was deleted still names the objects before its deletion.
            let newest = self.versions(key).iter().rfind(|v| !v.is_deletion());
            if let Some(version) = newest {
                let record = self.record(version)?;
                custom.extend(kinds::defined(KeyValue::decode(&record)?.value));
            }
        }
        let names = KeyNames::new(Resource::built_in().chain(custom), prefix);
        for key in &mut keys {
            if let Some(named) = self.kinds.name(&names, &key.bytes) {
                (key.kind, key.namespace, key.name) =
                    (Some(named.kind), named.namespace, named.name);
            }
        }
        self.keys = keys;
        Ok(())
    }
}

impl Collect for Builder {
    fn wants(&self, _: &[u8]) -> bool {
        true
    }

    fn begin_full(&self, compacted: Revision) {
        lock(&self.0).fulls.push(FoundFull {
            compacted,
            keys: Vec::new(),
        });
    }

    fn add(&self, found: FoundVersion<'_>) -> Result<()> {
        let mut record = Vec::new();
        if let Some(kv) = found.kv {
            kv.encode(&mut record);
        }
        lock(&self.0).add(&found, &record)
    }
}

impl Found {
    fn add(&mut self, found: &FoundVersion<'_>, record: &[u8]) -> Result<()> {
        if self.entries.len() >= MAX_VERSIONS {
            return Err(Reason::TooLarge.error(format!(
                "the backup has more than {MAX_VERSIONS} versions of keys: look at one of them with `deltafold history`, or copy a part of the backup with `deltafold copy` and explore that"
            )));
        }
        let key = match self.ids.get(found.key) {
            Some(id) => *id,
            None => {
                let id = self.ids.len() as u32;
                self.ids.insert(found.key.into(), id);
                id
            }
        };
        let revision = found.revision.0;
        match found.time {
            Some((_, time)) => _ = self.times.entry(revision).or_insert(time),
            None => {
                if let Some(full) = self.fulls.last_mut().filter(|f| revision <= f.compacted) {
                    let size = full.keys.len().max(key as usize + 1);
                    full.keys.resize(size, false);
                    full.keys[key as usize] = true;
                }
            }
        }
        let offset = self.records.len() + self.buffer.len() as u64;
        self.buffer.extend_from_slice(record);
        if self.buffer.len() >= BUFFER {
            self.flush()?;
        }
        self.entries.push(Entry {
            key,
            is_of_delta: found.time.is_some(),
            version: Version {
                revision,
                offset,
                length: u32::try_from(record.len())
                    .map_err(|_| Error::corrupt("a record is longer than 4 GiB"))?,
                is_inferred: false,
            },
        });
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let written = self.records.write_all(&self.buffer);
        written.map_err(|e| Error::io("write the index to the temporary directory", e))?;
        self.buffer.clear();
        Ok(())
    }
}

/// Adds the versions of a key, and the deletions that no snapshot records: a full holds every key that exists at its
/// compacted revision, so a key that it lacks was deleted before, in a gap. The fulls are in the order of these revisions.
fn add_versions(versions: &mut Vec<Version>, id: u32, of_key: &[Entry], fulls: &[FoundFull]) {
    let begin = versions.len();
    let mut rest = of_key;
    for FoundFull { compacted, keys } in fulls {
        let (before, after) =
            rest.split_at(rest.partition_point(|e| e.version.revision <= *compacted));
        versions.extend(before.iter().map(|e| e.version));
        rest = after;
        let newest = versions[begin..].last();
        let exists = newest.is_some_and(|v| !v.is_deletion() && v.revision < *compacted);
        if exists && keys.get(id as usize) != Some(&true) {
            versions.push(Version {
                revision: *compacted,
                offset: 0,
                length: 0,
                is_inferred: true,
            });
        }
    }
    versions.extend(rest.iter().map(|e| e.version));
}
