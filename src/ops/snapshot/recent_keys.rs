//! The keys that the newest snapshots changed last, compared with those of a cluster.
//!
//! If etcd has compacted the last saved revision, its changes cannot be compared any more. The keys that were changed
//! last can: their creation, and what has not changed since.

use crate::base::ReadAt;
use crate::bolt::Database;
use crate::error::Result;
use crate::etcd::cluster::KeyRevisions;
use crate::etcd::feed::KeyChange;
use crate::mvcc::history::key_bucket;
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{KeyValue, RecordKey, Revision};
use std::collections::HashMap;

/// The number of keys that are compared.
pub(super) const SAMPLE: usize = 1000;
/// The number of keys that are collected before the oldest ones are dropped.
const COLLECTED: usize = 4 * SAMPLE;

/// A key as the store has it at the last saved revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SavedKey {
    pub(super) key: Vec<u8>,
    /// `None` for a deleted key.
    pub(super) revisions: Option<KeyRevisions>,
    /// The digest of the last change.
    pub(super) digest: [u8; 32],
}

/// A key of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LiveKey {
    pub(super) revisions: KeyRevisions,
    /// The digest of the last change; `None` if the value was not read.
    pub(super) digest: Option<[u8; 32]>,
}

/// What a key of the store and the same key of a cluster show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyComparison {
    /// The cluster deleted the key, or created it after the last saved revision.
    Nothing,
    /// The cluster has changed the key since. Another history may have the same creation.
    Possible,
    /// Both have the same last change.
    Same,
    /// They cannot be of one history.
    Differs,
}

impl SavedKey {
    pub(super) fn of(revision: i64, change: &KeyChange) -> Self {
        SavedKey {
            key: change.key.clone(),
            revisions: (!change.delete).then_some(KeyRevisions {
                create: change.create_revision,
                modified: revision,
                version: change.version,
            }),
            digest: change.digest(),
        }
    }

    /// Compares this key with that of a cluster; `None` stands for a key that does not exist.
    fn compare(&self, live: Option<LiveKey>, last: i64) -> KeyComparison {
        let Some(live) = live.filter(|live| live.revisions.create <= last) else {
            return KeyComparison::Nothing;
        };
        // Since its creation the key of the cluster was never deleted, so it existed at `last`.
        let Some(saved) = self.revisions else {
            return KeyComparison::Differs;
        };
        let is_unchanged = live.revisions.modified <= last;
        let is_possible = match is_unchanged {
            true => {
                saved == live.revisions && live.digest.is_none_or(|digest| digest == self.digest)
            }
            false => {
                saved.create == live.revisions.create && saved.version < live.revisions.version
            }
        };
        match (is_possible, is_unchanged) {
            (false, _) => KeyComparison::Differs,
            (true, true) => KeyComparison::Same,
            (true, false) => KeyComparison::Possible,
        }
    }
}

/// The newest change of each key, with its revision.
#[derive(Default)]
pub(super) struct RecentKeys(HashMap<Vec<u8>, (i64, SavedKey)>);

impl RecentKeys {
    pub(super) fn add(&mut self, revision: i64, key: SavedKey) {
        self.0.insert(key.key.clone(), (revision, key));
        if self.0.len() > COLLECTED {
            self.keep_newest();
        }
    }

    /// Drops the keys that were changed first.
    fn keep_newest(&mut self) {
        let mut changed: Vec<i64> = self.0.values().map(|v| v.0).collect();
        changed.sort_unstable_by(|a, b| b.cmp(a));
        if let Some(&oldest) = changed.get(SAMPLE - 1) {
            self.0.retain(|_, v| v.0 >= oldest);
        }
    }

    /// Returns the keys that were changed last, the newest first.
    pub(super) fn into_sample(mut self) -> Vec<SavedKey> {
        self.keep_newest();
        let mut keys: Vec<(i64, SavedKey)> = self.0.into_values().collect();
        keys.sort_unstable_by_key(|(revision, _)| std::cmp::Reverse(*revision));
        keys.truncate(SAMPLE);
        keys.into_iter().map(|(_, key)| key).collect()
    }
}

/// Returns a record of a database as a change.
pub(super) fn change_of(record: RecordKey, kv: &KeyValue<'_>) -> KeyChange {
    match record.tombstone {
        true => KeyChange {
            delete: true,
            key: kv.key.to_vec(),
            ..KeyChange::default()
        },
        false => KeyChange {
            delete: false,
            key: kv.key.to_vec(),
            create_revision: kv.create_revision.0,
            mod_revision: kv.mod_revision.0,
            version: kv.version,
            value: kv.value.to_vec(),
            lease: kv.lease,
        },
    }
}

/// Reads the records of a full back from `last`, until there are enough keys.
///
/// # Errors
/// Fails with `CorruptSnapshot`, `Io`.
pub(super) fn recent_keys_of_full<R: ReadAt>(
    db: &Database<R>,
    last: Revision,
) -> Result<Vec<SavedKey>> {
    let mut revisions_back = 1000;
    loop {
        let first = Revision(last.0.saturating_sub(revisions_back).max(0));
        let mut keys = RecentKeys::default();
        let mut cursor = db.cursor(&key_bucket(db)?);
        cursor.seek(&encode_revision(first, 0))?;
        while let Some(e) = cursor.next()? {
            let record = RecordKey::decode(e.key)?;
            if record.main > last {
                break;
            }
            let change = change_of(record, &KeyValue::decode(e.value)?);
            keys.add(record.main.0, SavedKey::of(record.main.0, &change));
        }
        // A compaction keeps the newest records of living keys, however old they are.
        if keys.0.len() >= SAMPLE || first <= Revision(0) {
            return Ok(keys.into_sample());
        }
        revisions_back = revisions_back.saturating_mul(16);
    }
}

/// The result of a comparison of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Compared {
    /// No key could be compared.
    Nothing,
    /// The keys that could be compared can be of one history, and none proves it.
    Possible,
    /// The newest key that was not changed since is the same, and the others can be of one history.
    Same,
    /// This key is of another history.
    Differs(String),
}

/// Compares saved keys, the newest first, with those of a cluster in the same order.
///
/// Old keys are the same in two histories that parted later. So a key that is the same proves something only if all
/// newer ones were changed since: a key that the cluster lacks may be of another history.
pub(super) fn compare(
    saved: &[SavedKey],
    live: impl Iterator<Item = Option<LiveKey>>,
    last: i64,
) -> Compared {
    let mut compared = Compared::Nothing;
    // Whether all newer keys were changed since.
    let mut is_open = true;
    for (saved, live) in saved.iter().zip(live) {
        match saved.compare(live, last) {
            // A deleted key is not there in either.
            KeyComparison::Nothing => is_open &= saved.revisions.is_none(),
            KeyComparison::Same if is_open => compared = Compared::Same,
            KeyComparison::Same | KeyComparison::Possible => {
                if compared == Compared::Nothing {
                    compared = Compared::Possible;
                }
            }
            KeyComparison::Differs => {
                let describe = |r: Option<KeyRevisions>| match r {
                    Some(r) => format!("version {}, created at revision {}", r.version, r.create),
                    None => "deleted".to_owned(),
                };
                return Compared::Differs(format!(
                    "the key \"{}\" is {} in the store at revision {last}, and {} in the cluster",
                    saved.key.escape_ascii(),
                    describe(saved.revisions),
                    describe(live.map(|live| live.revisions))
                ));
            }
        }
    }
    compared
}

/// Compares saved keys with those of a new full: each with its newest record up to `last`, or the first one after it.
///
/// # Errors
/// Fails with `CorruptSnapshot`, `Io`.
pub(super) fn compare_with_full<R: ReadAt>(
    saved: &[SavedKey],
    db: &Database<R>,
    last: i64,
) -> Result<Compared> {
    let nth: HashMap<&[u8], usize> = saved
        .iter()
        .enumerate()
        .map(|(nth, s)| (s.key.as_slice(), nth))
        .collect();
    // The record, and whether it is a deletion.
    let mut found: Vec<Option<(LiveKey, bool)>> = vec![None; saved.len()];
    let mut cursor = db.cursor(&key_bucket(db)?);
    while let Some(e) = cursor.next()? {
        let record = RecordKey::decode(e.key)?;
        let kv = KeyValue::decode(e.value)?;
        let Some(&nth) = nth.get(kv.key) else {
            continue;
        };
        // Records are in order of revisions.
        if record.main.0 > last && found[nth].is_some() {
            continue;
        }
        let change = change_of(record, &kv);
        let live = LiveKey {
            revisions: KeyRevisions {
                create: change.create_revision,
                modified: record.main.0,
                version: change.version,
            },
            digest: Some(change.digest()),
        };
        found[nth] = Some((live, record.tombstone));
    }
    let live = found.into_iter().map(|found| {
        let (live, is_deleted) = found?;
        (!is_deleted).then_some(live)
    });
    Ok(compare(saved, live, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(create: i64, modified: i64, version: i64) -> Option<KeyRevisions> {
        Some(KeyRevisions {
            create,
            modified,
            version,
        })
    }

    #[test]
    fn a_key_tells_histories_apart_if_it_existed_at_the_last_saved_revision() {
        let last = 100;
        use KeyComparison::{Differs, Nothing, Possible, Same};
        for (saved, live, expected) in [
            // Unchanged since the snapshot: all must be equal.
            (key(10, 90, 3), key(10, 90, 3), Same),
            (key(10, 90, 3), key(10, 91, 3), Differs),
            (key(10, 90, 3), key(10, 90, 4), Differs),
            (key(10, 90, 3), key(10, 100, 4), Differs),
            // Changed since the snapshot: the creation must be equal, and the version greater.
            (key(10, 90, 3), key(10, 101, 4), Possible),
            (key(10, 90, 3), key(10, 101, 3), Differs),
            (key(10, 90, 3), key(11, 101, 4), Differs),
            // It cannot have existed without a break if it was deleted in the store.
            (None, key(10, 90, 3), Differs),
            (None, key(10, 101, 3), Differs),
            // Created or deleted since: it tells nothing.
            (key(10, 90, 3), key(101, 101, 1), Nothing),
            (None, key(101, 101, 1), Nothing),
            (key(10, 90, 3), None, Nothing),
            (None, None, Nothing),
        ] {
            let saved = SavedKey {
                key: b"k".to_vec(),
                revisions: saved,
                digest: [0; 32],
            };
            let live = live.map(|revisions| LiveKey {
                revisions,
                digest: None,
            });
            assert_eq!(saved.compare(live, last), expected, "{saved:?} {live:?}");
        }
        let saved = SavedKey {
            key: b"k".to_vec(),
            revisions: key(10, 90, 3),
            digest: [0; 32],
        };
        for (digest, expected) in [([0; 32], Same), ([1; 32], Differs)] {
            let live = LiveKey {
                revisions: saved.revisions.unwrap(),
                digest: Some(digest),
            };
            assert_eq!(saved.compare(Some(live), last), expected);
        }
    }

    #[test]
    fn an_old_key_proves_nothing_if_the_cluster_lacks_a_newer_one() {
        let saved = [key(50, 99, 2), key(60, 90, 1), key(10, 20, 1)];
        let saved = saved.map(|revisions| SavedKey {
            key: b"k".to_vec(),
            revisions,
            digest: [0; 32],
        });
        let same = key(60, 90, 1);
        let changed = key(50, 120, 3);
        for (live, expected) in [
            ([changed, same, None], Compared::Same),
            ([changed, None, key(10, 20, 1)], Compared::Possible),
            ([None, same, key(10, 20, 1)], Compared::Possible),
            ([changed, key(60, 120, 2), key(10, 20, 1)], Compared::Same),
            ([None, None, None], Compared::Nothing),
        ] {
            let keys = live.map(|live| {
                live.map(|revisions| LiveKey {
                    revisions,
                    digest: None,
                })
            });
            assert_eq!(compare(&saved, keys.into_iter(), 100), expected, "{live:?}");
        }
        let differs = [changed, key(61, 120, 2), None].map(|live| {
            live.map(|revisions| LiveKey {
                revisions,
                digest: None,
            })
        });
        let compared = compare(&saved, differs.into_iter(), 100);
        assert!(matches!(compared, Compared::Differs(_)), "{compared:?}");
    }

    #[test]
    fn the_sample_has_the_newest_change_of_the_keys_changed_last() {
        let mut keys = RecentKeys::default();
        let n = 5 * COLLECTED as i64;
        for main in 1..=n {
            // Every second revision changes one and the same key.
            let name = match main % 2 {
                0 => "same".to_owned(),
                _ => format!("key-{main}"),
            };
            let change = KeyChange {
                key: name.into_bytes(),
                create_revision: 1,
                version: main,
                ..KeyChange::default()
            };
            keys.add(main, SavedKey::of(main, &change));
        }
        let deletion = KeyChange {
            delete: true,
            key: b"key-1".to_vec(),
            ..KeyChange::default()
        };
        keys.add(n + 1, SavedKey::of(n + 1, &deletion));
        let sample: HashMap<_, _> = keys
            .into_sample()
            .into_iter()
            .map(|s| (s.key, s.revisions))
            .collect();
        assert_eq!(sample.len(), SAMPLE);
        assert_eq!(sample[&b"same"[..]], key(1, n, n));
        assert_eq!(sample[&b"key-1"[..]], None);
        let oldest = sample.values().flatten().map(|r| r.modified).min();
        assert!(oldest.unwrap() > n - 2 * SAMPLE as i64 - 2, "{oldest:?}");
    }
}
