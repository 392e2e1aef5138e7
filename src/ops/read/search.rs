//! Finds keys by words in their names, at all times.

use super::kinds::FoundKinds;
use super::stream::{Collector, KeyChange};
use super::versions::{self, Collect, FoundVersion};
use crate::backup::chain::RevisionRange;
use crate::error::{Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::names::NameSearch;
use crate::objects::resource::{KeyNames, Resource};
use crate::prefix::open::BackupLocation;
use crate::prefix::set_aside::{Purpose, decide_again};

/// The most keys that are found.
const MAX_FOUND: usize = 100_000;

/// A key that was found.
#[derive(Debug)]
pub struct FoundKey {
    /// The key.
    pub key: Vec<u8>,
    /// The revision of its newest change; if that is a deletion which no snapshot records, the one by which it happened.
    pub revision: Revision,
    /// The time at which the snapshotter received the change (RFC 3339); `None` if no delta records it.
    pub time: Option<String>,
    /// Whether it was deleted.
    pub is_deleted: bool,
}

/// What was found: exact names first, what exists before what was deleted, and Events last.
pub struct FoundNames {
    /// The ID of the timeline; `None` for a plain snapshot file.
    pub timeline: Option<String>,
    /// The newest revision that was read.
    pub revision: Revision,
    /// The kinds of objects.
    pub resources: Vec<Resource>,
    /// The keys.
    pub keys: Vec<FoundKey>,
    /// Warnings for the report.
    pub warnings: Vec<String>,
}

impl FoundNames {
    /// Searches all versions of a timeline.
    ///
    /// # Errors
    /// `TooLarge` if there are more than 100,000 keys; as [`versions::read`].
    pub fn read(
        backup: &BackupLocation,
        timeline: Option<&str>,
        prefixes: &EtcdPrefixes,
        words: &NameSearch,
    ) -> Result<Self> {
        decide_again([backup.context()], Purpose::Read, || {
            Self::try_read(backup, timeline, prefixes, words)
        })
    }

    fn try_read(
        backup: &BackupLocation,
        timeline: Option<&str>,
        prefixes: &EtcdPrefixes,
        words: &NameSearch,
    ) -> Result<Self> {
        let nothing = |_: &KeyValue<'_>, _: &mut Vec<u8>| Ok(());
        let matching = Matching {
            inner: Collector::new(backup.context().temp(), &KeyRange::All, &nothing),
            built_in: KeyNames::new(Resource::built_in(), prefixes),
            kinds: FoundKinds::new(prefixes),
            words,
        };
        let coverage = versions::read(backup, timeline, &matching)?;
        let Matching { inner, kinds, .. } = matching;
        let mut stream = inner.finish(coverage)?;
        let mut keys: Vec<FoundKey> = Vec::new();
        while let Some(version) = stream.next()? {
            if keys.last().is_none_or(|last| last.key != version.key) {
                if keys.len() >= MAX_FOUND {
                    return Err(Reason::TooLarge.error(format!(
                        "more than {MAX_FOUND} names have these words: give more of them"
                    )));
                }
                keys.push(FoundKey {
                    key: version.key.to_vec(),
                    revision: Revision(0),
                    time: None,
                    is_deleted: false,
                });
            }
            if let Some(found) = keys.last_mut() {
                found.revision = version.revision;
                found.time = version.time.map(str::to_owned);
                found.is_deleted = !matches!(version.change, KeyChange::Put(_));
            }
        }
        let resources: Vec<Resource> = Resource::built_in().chain(kinds.finish()).collect();
        let names = KeyNames::new(resources.clone(), prefixes);
        keys.sort_by_cached_key(|found| {
            let kind = names.object(&found.key).map(|object| object.resource);
            (words.rank(kind, &found.key), found.is_deleted)
        });
        Ok(FoundNames {
            timeline: stream.coverage.timeline.clone(),
            revision: stream.coverage.newest,
            warnings: stream.coverage.warnings.clone(),
            resources,
            keys,
        })
    }
}

/// Collects the versions of keys that have the words.
struct Matching<'a> {
    inner: Collector<'a>,
    built_in: KeyNames,
    kinds: FoundKinds<'a>,
    words: &'a NameSearch,
}

impl Matching<'_> {
    fn is_meant(&self, key: &[u8]) -> bool {
        let kind = self.built_in.object(key).map(|object| object.resource);
        self.words.rank(kind, key).is_some()
    }
}

impl Collect for Matching<'_> {
    fn wants(&self, key: &[u8]) -> bool {
        self.kinds.is_definition(key) || self.is_meant(key)
    }

    fn begin_full(&self, states: RevisionRange) {
        self.inner.begin_full(states);
    }

    fn add(&self, version: FoundVersion<'_>) -> Result<()> {
        self.kinds.see(version.key, version.revision.0, version.kv);
        if self.kinds.is_definition(version.key) && !self.is_meant(version.key) {
            return Ok(());
        }
        self.inner.add(version)
    }
}
