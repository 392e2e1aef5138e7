//! Reads from the store which changes the last saved transactions made.
//!
//! A watch begins with them and compares them with those of the cluster, so that two histories are never spliced.
//! If etcd has compacted them, their keys are compared with a new full. This module does not talk to etcd.

use super::next::{self, BackupState, FullCause, FullReason};
use super::recent_keys::{RecentKeys, SavedKey, change_of, recent_keys_of_full};
use crate::backup::{Kind, Snapshot};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::base::parallel::each;
use crate::bolt::Database;
use crate::error::{Reason, Result};
use crate::etcd::feed::{
    Fingerprint, KeyChange, Known, KnownSize, MOST_KNOWN_CHANGES, Position, Transaction,
};
use crate::mvcc::history::key_bucket;
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{Base, Change, KeyValue, RecordKey, Revision};
use crate::prefix::Context;
use std::collections::VecDeque;

/// The most deltas that are read.
pub(super) const MOST_DELTAS: usize = 8;

/// What the store holds at its end.
#[derive(Debug, Clone)]
pub(super) struct LastSaved {
    /// The last transactions.
    pub(super) known: Known,
    /// The keys that were changed last.
    pub(super) keys: Vec<SavedKey>,
}

/// Returns what the store holds at its end, or why a full is needed if the snapshots no longer hold it.
///
/// # Errors
/// Fails with the error of a snapshot that cannot be opened; with the store's errors, `Io` and `NoSpace`.
pub(super) fn read(ctx: &Context, backup: &BackupState) -> Result<Result<LastSaved, FullCause>> {
    match read_newest(ctx, backup) {
        Ok(last_saved) => Ok(Ok(last_saved)),
        Err(e) if e.reason() == Reason::OutOfRange => {
            Ok(Err(FullCause::new(FullReason::Unverifiable, e.to_string())))
        }
        Err(e) => Err(e),
    }
}

fn read_newest(ctx: &Context, backup: &BackupState) -> Result<LastSaved> {
    let (holder, last) = (&backup.holder, backup.last);
    let mut recent = Recent::default();
    match (backup.last_deltas.split_last(), holder.name.kind) {
        (Some((newest, before)), _) => {
            let newest = read_delta(ctx, newest, last)?;
            if !newest.size.is_enough() {
                for earlier in each(MOST_DELTAS, before, |s| read_delta(ctx, s, last)) {
                    recent.append(earlier?);
                }
            }
            recent.append(newest);
        }
        (None, Kind::Incr) => recent = read_delta(ctx, holder, last)?,
        (None, Kind::Full) => return read_full(ctx, holder, last),
    }
    // Deltas are folded onto the newest full. One that did not come from these deltas may be of another history.
    if let Some(newest) = backup.last_deltas.last()
        && holder.name.is_full()
        && !next::came_from(&holder.name, newest.name.created)
    {
        let of_full = read_full(ctx, holder, last)?;
        if !recent.known(last).is_proven_by(&of_full.known) {
            return Ok(of_full);
        }
    }
    let mut keys = RecentKeys::default();
    for (position, changes) in &recent.transactions {
        for change in changes {
            keys.add(position.revision, change.clone());
        }
    }
    Ok(LastSaved {
        known: recent.known(last),
        keys: keys.into_sample(),
    })
}

/// Reads a full that holds the revision `last`.
fn read_full(ctx: &Context, full: &Snapshot, last: Revision) -> Result<LastSaved> {
    let (db, base) = ctx.full(full)?;
    let at = ctx.at(full);
    Ok(LastSaved {
        known: known_of_full(&db, &base, last).map_err(&at)?,
        keys: recent_keys_of_full(&db, last).map_err(at)?,
    })
}

/// The last transactions up to a number and size of changes, without the values.
#[derive(Default)]
struct Recent {
    transactions: VecDeque<(Position, Vec<SavedKey>)>,
    size: KnownSize,
    /// The transaction that is not complete yet, and its size.
    partial: Transaction,
    bytes: u64,
}

impl Recent {
    /// Adds the next change of a transaction, or of the next one.
    fn change(&mut self, revision: Revision, change: KeyChange, limits: &Limits) -> Result<()> {
        if revision.0 != self.partial.revision {
            self.complete();
            self.partial.revision = revision.0;
        }
        self.bytes += counted_bytes(&change);
        check_transaction(limits, self.bytes)?;
        self.partial.changes.push(change);
        Ok(())
    }

    fn complete(&mut self) {
        let transaction = std::mem::take(&mut self.partial);
        self.bytes = 0;
        if !transaction.changes.is_empty() {
            let revision = transaction.revision;
            let changes = transaction.changes.iter();
            let keys: Vec<SavedKey> = changes.map(|c| SavedKey::of(revision, c)).collect();
            let digests = keys.iter().map(|key| key.digest);
            let fingerprint = Fingerprint::of(transaction.bytes(), digests);
            let position = Position {
                revision,
                fingerprint,
            };
            self.push(position, keys);
        }
    }

    /// Adds a transaction, and forgets the oldest ones that are too many.
    fn push(&mut self, position: Position, keys: Vec<SavedKey>) {
        let last = self.transactions.back();
        if last.is_some_and(|(last, _)| position.revision <= last.revision) {
            // Deltas may overlap.
            return;
        }
        self.size += position.fingerprint;
        self.transactions.push_back((position, keys));
        while self.size.is_too_large()
            && self.transactions.len() > 1
            && let Some((oldest, _)) = self.transactions.pop_front()
        {
            self.size -= oldest.fingerprint;
        }
    }

    fn append(&mut self, later: Recent) {
        for (position, keys) in later.transactions {
            self.push(position, keys);
        }
    }

    /// Returns the transactions up to `last`; without one of that revision, that nothing is known.
    fn known(&self, last: Revision) -> Known {
        let mut positions = self.transactions.iter().map(|(position, _)| *position);
        let reaches = self.transactions.back();
        let reaches = reaches.is_some_and(|(newest, _)| newest.revision == last.0);
        let nothing = Position::after(&Transaction {
            revision: last.0,
            changes: Vec::new(),
        });
        let first = positions.next().filter(|_| reaches);
        let mut known = Known::new(first.unwrap_or(nothing));
        positions
            .filter(|_| reaches)
            .for_each(|position| known.push(position));
        known
    }
}

/// Reads a delta up to the revision `last`. Reads to the end, because the delta's hash is checked there.
fn read_delta(ctx: &Context, snapshot: &Snapshot, last: Revision) -> Result<Recent> {
    let at = ctx.at(snapshot);
    let mut delta = ctx.delta(snapshot)?;
    let mut recent = Recent::default();
    while let Some(e) = delta.next().map_err(&at)? {
        if e.main <= last {
            let change = to_key_change(e.main, &e.change).map_err(&at)?;
            recent.change(e.main, change, &ctx.limits).map_err(&at)?;
        }
    }
    recent.complete();
    Ok(recent)
}

/// Returns what a watch can compare with a full: the last transactions, as far as no compaction has removed
/// deletions from them, and at least that of the revision `last`.
///
/// # Errors
/// Fails with `OutOfRange` if the full was compacted after that revision; with `CorruptSnapshot`, `Io`.
pub(super) fn known_of_full<R: ReadAt>(
    db: &Database<R>,
    base: &Base,
    last: Revision,
) -> Result<Known> {
    if base.compact_revision > last {
        return Err(Reason::OutOfRange.error(format!(
            "the full snapshot was compacted at revision {}, so it no longer holds what revision {last} changed",
            base.compact_revision
        )));
    }
    let first = last.0.saturating_sub(MOST_KNOWN_CHANGES as i64);
    let first = first.max(base.compact_revision.0.saturating_add(1));
    let mut recent = Recent::default();
    let mut cursor = db.cursor(&key_bucket(db)?);
    cursor.seek(&encode_revision(Revision(first.min(last.0)), 0))?;
    while let Some(e) = cursor.next()? {
        let record = RecordKey::decode(e.key)?;
        if record.main > last {
            break;
        }
        // Some versions of etcd keep deletions at the compacted revision.
        if record.tombstone && record.main == base.compact_revision {
            continue;
        }
        let change = change_of(record, &KeyValue::decode(e.value)?);
        recent.change(record.main, change, db.limits())?;
    }
    recent.complete();
    let known = recent.known(last);
    Ok(match base.compact_revision == last {
        true => known.without_deletions(),
        false => known,
    })
}

/// Returns the bytes of a change that count toward the limit of a transaction. A deletion counts less,
/// because a request of a few bytes can delete any number of keys.
fn counted_bytes(change: &KeyChange) -> u64 {
    match change.delete {
        true => change.key.len() as u64 / 4 + 1,
        false => (change.key.len() + change.value.len()) as u64,
    }
}

/// Applies the limit of a value to a transaction: both arrive in one request to etcd.
fn check_transaction(limits: &Limits, bytes: u64) -> Result<()> {
    match bytes > limits.element_bytes() {
        true => Err(limits.value_too_large(format!("one transaction has {bytes} bytes"))),
        false => Ok(()),
    }
}

fn to_key_change(revision: Revision, change: &Change<'_>) -> Result<KeyChange> {
    let (Change::Put(kv) | Change::PutBase64(kv)) = change else {
        return Ok(KeyChange {
            delete: true,
            key: change.key().to_vec(),
            ..KeyChange::default()
        });
    };
    let mut value = Vec::new();
    change.append_value(revision, &mut value)?;
    Ok(KeyChange {
        delete: false,
        key: kv.key.to_vec(),
        create_revision: kv.create_revision.0,
        mod_revision: kv.mod_revision.0,
        version: kv.version,
        value,
        lease: kv.lease,
    })
}
