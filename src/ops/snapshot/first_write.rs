//! Compares histories before the first write into a prefix that holds snapshots and records no cluster.
//!
//! Without a recorded identity, only the snapshots tell whose backup the prefix is. A cluster is refused if it
//! provably has another history, or is behind the snapshots: it may be an empty one at the wrong prefix, and
//! one that was set back can say so with `--take-over`. If nothing can be compared, the write goes on with a
//! warning: otherwise, the prefix of another tool whose etcd was compacted could not be adopted. Called by
//! [`super::saver`].

use super::next::{BackupState, FullCause, cluster_behind};
use crate::backup::Kind;
use crate::base::ReadAt;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::{Cluster, KeyRevisions};
use crate::etcd::connect::Connector;
use crate::mvcc::history::key_bucket;
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{Change, KeyValue, RecordKey, Revision};
use crate::prefix::Context;
use std::collections::HashMap;

/// The number of keys that are compared if the last saved revision is compacted in etcd.
const SAMPLE: usize = 64;
/// The number of keys that are collected before the oldest ones are dropped.
const COLLECTED: usize = 16 * SAMPLE;

/// The result of the comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Where both could be compared, the cluster has the history of the store.
    Same,
    /// The cluster has another history, or is behind the store; with the difference in words.
    Differs(String),
    /// Nothing could be compared, for this reason.
    Unknown(String),
}

/// Compares the cluster with what the store held when the saver was opened.
///
/// The changes of the last saved revision are compared. If etcd has compacted that revision, the creation of
/// the keys that the store changed last is compared. `last_changes` compares the changes; it returns `None` if they
/// cannot be compared.
///
/// # Errors
/// Fails with the errors of etcd connections and of the store.
pub(super) fn compare(
    ctx: &Context,
    backup: &Result<BackupState, FullCause>,
    last: Revision,
    connector: &Connector,
    cluster: &Cluster,
    last_changes: impl FnOnce() -> Result<Option<Verdict>>,
) -> Result<Verdict> {
    if cluster.revision < last.0 {
        let cause = cluster_behind(last, cluster.revision);
        return Ok(Verdict::Differs(cause.message));
    }
    let backup = match backup {
        Ok(backup) => backup,
        Err(cause) => return Ok(Verdict::Unknown(cause.message.clone())),
    };
    let compared = last_changes().and_then(|verdict| match verdict {
        Some(verdict) => Ok(verdict),
        None => compare_sample(ctx, backup, connector, cluster),
    });
    match compared {
        Err(e) if cannot_be_read(&e) => Ok(Verdict::Unknown(e.to_string())),
        compared => compared,
    }
}

/// Whether the failure means that the snapshot cannot be read, today and tomorrow.
fn cannot_be_read(e: &Error) -> bool {
    e.reason() == Reason::CannotDecrypt || e.reason().is_bad_data()
}

/// Compares the keys that the newest snapshot changed last with those of the cluster.
fn compare_sample(
    ctx: &Context,
    backup: &BackupState,
    connector: &Connector,
    cluster: &Cluster,
) -> Result<Verdict> {
    let sample = recent_keys(ctx, backup)?;
    let (keys, saved): (Vec<_>, Vec<_>) = sample.into_iter().unzip();
    let live = cluster.key_revisions(connector, &keys)?;
    let mut is_compared = false;
    for ((key, saved), live) in keys.iter().zip(saved).zip(live) {
        match is_same_key(saved, live, backup.last.0) {
            Some(true) => is_compared = true,
            Some(false) => {
                let describe = |r: Option<KeyRevisions>| match r {
                    Some(r) => format!("created at revision {}", r.create),
                    None => "deleted".to_owned(),
                };
                return Ok(Verdict::Differs(format!(
                    "the key \"{}\" is {} in the store at revision {}, and {} in the cluster",
                    key.escape_ascii(),
                    describe(saved),
                    backup.last,
                    describe(live)
                )));
            }
            None => {}
        }
    }
    Ok(match is_compared {
        true => Verdict::Same,
        false => Verdict::Unknown(format!(
            "etcd has compacted revision {}, at which the store ends, and has none of the keys that the store changed last",
            backup.last
        )),
    })
}

/// Returns whether a key at revision `last` of the store and the same key of the cluster now can be of one
/// history. `None` stands for a key that does not exist; the result is `None` if the cluster deleted the key, or
/// created it after `last`.
fn is_same_key(saved: Option<KeyRevisions>, live: Option<KeyRevisions>, last: i64) -> Option<bool> {
    let live = live.filter(|live| live.create <= last)?;
    // Since its creation the key of the cluster was never deleted, so it existed at `last`.
    Some(saved.is_some_and(|saved| match live.modified <= last {
        true => saved == live,
        false => saved.create == live.create,
    }))
}

/// The newest change of each key, with the revision of the change; a deleted key has no revisions.
#[derive(Default)]
struct RecentKeys(HashMap<Vec<u8>, (Revision, Option<KeyRevisions>)>);

impl RecentKeys {
    fn add(&mut self, revision: Revision, change: &Change<'_>) {
        let revisions = match change {
            Change::Put(kv) | Change::PutBase64(kv) => Some(KeyRevisions {
                create: kv.create_revision.0,
                modified: revision.0,
                version: kv.version,
            }),
            Change::Delete { .. } => None,
        };
        self.0.insert(change.key().to_vec(), (revision, revisions));
        if self.0.len() > COLLECTED {
            self.keep_newest();
        }
    }

    /// Drops the keys that were changed first.
    fn keep_newest(&mut self) {
        let mut changed: Vec<Revision> = self.0.values().map(|v| v.0).collect();
        changed.sort_unstable_by(|a, b| b.cmp(a));
        if let Some(&oldest) = changed.get(SAMPLE - 1) {
            self.0.retain(|_, v| v.0 >= oldest);
        }
    }

    /// Returns the keys that were changed last.
    fn into_sample(mut self) -> Vec<(Vec<u8>, Option<KeyRevisions>)> {
        self.keep_newest();
        let keys = self.0.into_iter().map(|(key, (_, r))| (key, r));
        keys.take(SAMPLE).collect()
    }
}

/// Returns the keys that the newest snapshot changed last.
fn recent_keys(
    ctx: &Context,
    backup: &BackupState,
) -> Result<Vec<(Vec<u8>, Option<KeyRevisions>)>> {
    let holder = &backup.holder;
    let at = ctx.at(holder);
    if holder.name.kind == Kind::Full {
        let (db, _) = ctx.full(holder)?;
        return recent_keys_of_full(&db, backup.last).map_err(at);
    }
    let mut keys = RecentKeys::default();
    let mut delta = ctx.delta(holder)?;
    while let Some(e) = delta.next().map_err(&at)? {
        if e.main <= backup.last {
            keys.add(e.main, &e.change);
        }
    }
    Ok(keys.into_sample())
}

/// Reads the records of a full back from `last`, until there are enough keys.
fn recent_keys_of_full<R: ReadAt>(
    db: &Database<R>,
    last: Revision,
) -> Result<Vec<(Vec<u8>, Option<KeyRevisions>)>> {
    // A compaction keeps the newest records of living keys, however old they are.
    let oldest = Revision(0);
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
            let kv = KeyValue::decode(e.value)?;
            keys.add(
                record.main,
                &match record.tombstone {
                    true => Change::Delete { key: kv.key },
                    false => Change::Put(kv),
                },
            );
        }
        if keys.0.len() >= SAMPLE || first <= oldest {
            return Ok(keys.into_sample());
        }
        revisions_back = revisions_back.saturating_mul(16);
    }
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
        for (saved, live, expected) in [
            // Unchanged since the snapshot: all must be equal.
            (key(10, 90, 3), key(10, 90, 3), Some(true)),
            (key(10, 90, 3), key(10, 91, 3), Some(false)),
            (key(10, 90, 3), key(10, 90, 4), Some(false)),
            (key(10, 90, 3), key(10, 100, 4), Some(false)),
            // Changed since the snapshot: the creation must be equal.
            (key(10, 90, 3), key(10, 101, 4), Some(true)),
            (key(10, 90, 3), key(11, 101, 4), Some(false)),
            // It cannot have existed without a break if it was deleted in the store.
            (None, key(10, 90, 3), Some(false)),
            (None, key(10, 101, 3), Some(false)),
            // Created or deleted since: it tells nothing.
            (key(10, 90, 3), key(101, 101, 1), None),
            (None, key(101, 101, 1), None),
            (key(10, 90, 3), None, None),
            (None, None, None),
        ] {
            assert_eq!(
                is_same_key(saved, live, last),
                expected,
                "{saved:?} {live:?}"
            );
        }
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
            keys.add(
                Revision(main),
                &Change::Put(KeyValue {
                    key: name.as_bytes(),
                    create_revision: Revision(1),
                    mod_revision: Revision(main),
                    version: main,
                    value: b"",
                    lease: 0,
                }),
            );
        }
        keys.add(Revision(n + 1), &Change::Delete { key: b"key-1" });
        let sample: HashMap<_, _> = keys.into_sample().into_iter().collect();
        assert_eq!(sample.len(), SAMPLE);
        assert_eq!(sample[&b"same"[..]], key(1, n, n));
        assert_eq!(sample[&b"key-1"[..]], None);
        let oldest = sample.values().flatten().map(|r| r.modified).min();
        assert!(oldest.unwrap() > n - 2 * SAMPLE as i64 - 2, "{oldest:?}");
    }
}
