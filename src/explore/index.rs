//! The index of a backup: every version of every key that the snapshots of a timeline hold.
//!
//! Keys, revisions and times are in memory, 24 bytes for a version. The records are in an unnamed file of the temporary
//! directory, which is always sealed, because it holds Secrets. A state at a revision is found by a binary search in
//! the versions of each key.

use super::kinds::{self, Kind, KindId, Kinds};
use crate::backup::chain::RevisionRange;
use crate::base::temp::{self, TempFile};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
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

    /// Returns the range of unknown states that a revision is in.
    pub(super) fn unknown_at(&self, revision: Revision) -> Option<RevisionRange> {
        let within = |range: &&RevisionRange| range.0 <= revision && revision <= range.1;
        self.unknown.iter().find(within).copied()
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

/// Collects the versions of all keys.
pub(super) struct Builder(Mutex<CollectedVersions>);

struct CollectedVersions {
    ids: HashMap<Box<[u8]>, u32>,
    entries: Vec<Entry>,
    /// For each full in the order of reading, the revision at and below which it has only the newest version of each key.
    fulls: Vec<Revision>,
    /// The last version of each key in a full.
    last: Vec<InFull>,
    absences: Vec<Absence>,
    times: BTreeMap<Revision, DateTime<Utc>>,
    records: TempFile,
    buffer: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Entry {
    key: u32,
    version: Version,
    /// Whether it is of a delta, with a time. It comes before the same version in a full.
    is_of_delta: bool,
}

/// The last version of a key that was found in a full.
#[derive(Clone, Copy, Default)]
struct InFull {
    revision: Revision,
    /// The number of fulls up to the last one that holds the key at its compacted revision.
    fulls: u32,
}

/// Fulls that lack a key at their compacted revisions, between two that hold it. All absences take the memory of what
/// changed, and not that of all keys in all fulls.
struct Absence {
    key: u32,
    /// The positions of the fulls.
    fulls: Range<u32>,
}

impl Builder {
    /// Returns a builder that writes to the temporary directory.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub(super) fn new(ctx: &Context) -> Result<Self> {
        let records = temp::Dir::new(&ctx.temp_dir, true).file()?;
        Ok(Builder(Mutex::new(CollectedVersions::new(records))))
    }

    /// Ends the reading and returns the index. `prefix` is that of the API server.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn finish(self, coverage: Coverage, prefixes: &EtcdPrefixes) -> Result<Index> {
        let mut found = unpoisoned(self.0.into_inner());
        found.flush()?;
        let absences = Absences::of(&mut found);
        let first = absences.compacted.first().copied();
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
        let mut unknown = coverage.unknown();
        unknown.retain(|range| range.1 > first);
        let mut index = Index {
            keys: Vec::with_capacity(names.len()),
            versions: Vec::with_capacity(entries.len()),
            moments,
            kinds: Kinds::default(),
            first,
            coverage,
            unknown,
            records: found.records,
        };
        let mut rest = entries.as_slice();
        for (bytes, id) in names {
            let size = rest.iter().take_while(|e| e.key == id).count();
            let (of_key, others) = rest.split_at(size);
            rest = others;
            let begin = index.versions.len() as u32;
            absences.add_versions(&mut index.versions, id, of_key);
            index.keys.push(Key {
                bytes,
                kind: None,
                namespace: 0..0,
                name: 0..0,
                versions: begin..index.versions.len() as u32,
            });
        }
        drop(entries);
        index.name_objects(prefixes)?;
        Ok(index)
    }
}

impl Index {
    /// Finds out which keys are objects of Kubernetes.
    fn name_objects(&mut self, prefixes: &EtcdPrefixes) -> Result<()> {
        let mut keys = std::mem::take(&mut self.keys);
        let mut custom = Vec::new();
        for key in keys
            .iter()
            .filter(|key| kinds::is_definition(&key.bytes, prefixes))
        {
            // A definition that was deleted still names the objects before its deletion.
            let newest = self.versions(key).iter().rfind(|v| !v.is_deletion());
            if let Some(version) = newest {
                let record = self.record(version)?;
                custom.extend(kinds::defined(KeyValue::decode(&record)?.value));
            }
        }
        let names = KeyNames::new(Resource::built_in().chain(custom), prefixes);
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
        lock(&self.0).fulls.push(compacted);
    }

    fn add(&self, found: FoundVersion<'_>) -> Result<()> {
        let mut record = Vec::new();
        if let Some(kv) = found.kv {
            kv.encode(&mut record);
        }
        lock(&self.0).add(&found, &record)
    }
}

impl CollectedVersions {
    fn new(records: TempFile) -> Self {
        CollectedVersions {
            ids: HashMap::new(),
            entries: Vec::new(),
            fulls: Vec::new(),
            last: Vec::new(),
            absences: Vec::new(),
            times: BTreeMap::new(),
            records,
            buffer: Vec::new(),
        }
    }

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
                self.last.push(InFull::default());
                id
            }
        };
        let revision = found.revision.0;
        match found.time {
            Some((_, time)) => _ = self.times.entry(revision).or_insert(time),
            None => {
                let (last, fulls) = (&mut self.last[key as usize], self.fulls.len() as u32);
                if self.fulls.last().is_some_and(|c| revision <= *c) && last.fulls < fulls {
                    if last.fulls + 1 < fulls {
                        self.absences.push(Absence {
                            key,
                            fulls: last.fulls..fulls - 1,
                        });
                    }
                    last.fulls = fulls;
                }
                // Most keys do not change from one full to the next.
                if std::mem::replace(&mut last.revision, revision) == revision {
                    return Ok(());
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

/// The absences of all keys.
struct Absences {
    /// The compacted revisions of the fulls, in ascending order.
    compacted: Vec<Revision>,
    /// The place of each full in this order; empty if they were read in it.
    places: Vec<u32>,
    /// In the order of the keys' numbers.
    all: Vec<Absence>,
}

impl Absences {
    /// Takes the absences of a finished reading.
    fn of(found: &mut CollectedVersions) -> Self {
        let mut all = std::mem::take(&mut found.absences);
        let fulls = found.fulls.len() as u32;
        for (key, last) in (0..).zip(&found.last) {
            if last.fulls < fulls {
                all.push(Absence {
                    key,
                    fulls: last.fulls..fulls,
                });
            }
        }
        all.sort_unstable_by_key(|a| (a.key, a.fulls.start));
        let mut compacted = std::mem::take(&mut found.fulls);
        let mut places = Vec::new();
        if !compacted.is_sorted() {
            let mut order: Vec<u32> = (0..fulls).collect();
            order.sort_by_key(|&full| compacted[full as usize]);
            places.resize(order.len(), 0);
            for (place, &full) in (0..).zip(&order) {
                places[full as usize] = place;
            }
            compacted.sort_unstable();
        }
        Absences {
            compacted,
            places,
            all,
        }
    }

    /// Returns the ranges of fulls that lack a key, in the order of their compacted revisions.
    fn of_key(&self, key: u32) -> Vec<Range<u32>> {
        let begin = self.all.partition_point(|a| a.key < key);
        let of_key = self.all[begin..].iter().take_while(|a| a.key == key);
        let ranges = of_key.map(|a| a.fulls.clone());
        if self.places.is_empty() {
            return ranges.collect();
        }
        let mut places: Vec<u32> = ranges
            .flatten()
            .map(|full| self.places[full as usize])
            .collect();
        places.sort_unstable();
        places.into_iter().map(|place| place..place + 1).collect()
    }

    /// Adds the versions of a key, and the deletions that no snapshot records: a full holds every key that exists at its
    /// compacted revision, so a key that it lacks was deleted before, in a gap.
    fn add_versions(&self, versions: &mut Vec<Version>, key: u32, of_key: &[Entry]) {
        let absent = self.of_key(key);
        let mut absent = absent
            .iter()
            .map(|range| &self.compacted[range.start as usize..range.end as usize])
            .peekable();
        for (nth, entry) in of_key.iter().enumerate() {
            let version = entry.version;
            versions.push(version);
            let is_before = |c: &Revision| *c <= version.revision;
            while absent
                .next_if(|fulls| fulls.last().is_some_and(is_before))
                .is_some()
            {}
            let Some(fulls) = absent.peek().filter(|_| !version.is_deletion()) else {
                continue;
            };
            let next = of_key.get(nth + 1).map(|next| next.version.revision);
            let lacking = fulls.get(fulls.partition_point(is_before)).copied();
            if let Some(compacted) = lacking.filter(|c| next.is_none_or(|next| *c < next)) {
                versions.push(Version {
                    revision: compacted,
                    offset: 0,
                    length: 0,
                    is_inferred: true,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The versions of keys by what changed: a writer can make thousands of fulls that hold or lack a million keys.
    #[test]
    fn fulls_that_repeat_the_keys_take_no_memory() {
        let records = temp::Dir::new(std::env::temp_dir(), false).file();
        let mut found = CollectedVersions::new(records.unwrap());
        let kv = KeyValue::default();
        let time = ("", DateTime::UNIX_EPOCH);
        let add = |found: &mut CollectedVersions, key: u32, revision: i64, in_delta: bool| {
            let version = FoundVersion {
                key: &key.to_be_bytes(),
                revision: (Revision(revision), 0),
                time: in_delta.then_some(time),
                nth: 0,
                kv: Some(&kv),
            };
            found.add(&version, b"record").unwrap();
        };
        // Keys 0 to 99 are in all fulls, 100 to 199 in those from 200 to 299, and 200 to 299 in a delta alone.
        for key in 200..300 {
            add(&mut found, key, 7, true);
        }
        // Not in the order of reading.
        for nth in 0..1000 {
            found.fulls.push(Revision(1000 + (nth ^ 1)));
            for key in 0..200 {
                if key < 100 || (200..300).contains(&nth) {
                    add(&mut found, key, 5, false);
                }
            }
        }
        assert_eq!((found.entries.len(), found.absences.len()), (300, 100));
        let absences = Absences::of(&mut found);
        assert_eq!(absences.all.len(), 300);
        let versions = |key| {
            let of_key: Vec<Entry> = (found
                .entries
                .iter()
                .filter(|e| e.key == found.ids[&u32::to_be_bytes(key)[..]]))
            .copied()
            .collect();
            let mut versions = Vec::new();
            let id = found.ids[&u32::to_be_bytes(key)[..]];
            absences.add_versions(&mut versions, id, &of_key);
            let seen = versions.iter().map(|v| (v.revision.0, v.is_inferred));
            seen.collect::<Vec<_>>()
        };
        assert_eq!(versions(0), [(5, false)]);
        // The first full that lacks the key is the one with the lowest compacted revision.
        assert_eq!(versions(100), [(5, false), (1000, true)]);
        assert_eq!(versions(200), [(7, false), (1000, true)]);
    }
}
