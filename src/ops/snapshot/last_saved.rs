//! Reads from the store which changes the last saved revision made.
//!
//! A watch begins at that revision and compares its changes with these, so that two histories are never
//! spliced. This module does not talk to etcd. Called by [`super::saver`] and [`super::full`].

use super::next::{BackupState, FullCause, FullReason};
use crate::backup::{Kind, Snapshot};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::bolt::Database;
use crate::error::{Reason, Result};
use crate::etcd::feed::{KeyChange, Position, Transaction};
use crate::mvcc::history::key_bucket;
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{Base, Change, KeyValue, RecordKey, Revision};
use crate::prefix::Context;

/// Returns the position after the last saved revision, or why a full is needed if the snapshots no longer
/// hold what that revision changed.
///
/// # Errors
/// Fails with the store's errors, `Io` and `NoSpace`.
pub(super) fn position(ctx: &Context, backup: &BackupState) -> Result<Result<Position, FullCause>> {
    match changes(ctx, backup) {
        Ok(changes) => Ok(Ok(position_after(backup.last, changes))),
        Err(e) if e.reason() == Reason::OutOfRange => {
            Ok(Err(FullCause::new(FullReason::Unverifiable, e.to_string())))
        }
        Err(e) if e.reason().is_bad_data() => Ok(Err(FullCause::from_bad_data(&e))),
        Err(e) => Err(e),
    }
}

/// Returns the position after a revision that made these changes.
pub(super) fn position_after(revision: Revision, changes: Vec<KeyChange>) -> Position {
    Position::after(&Transaction {
        revision: revision.0,
        changes,
    })
}

fn changes(ctx: &Context, backup: &BackupState) -> Result<Vec<KeyChange>> {
    let holder = &backup.holder;
    match holder.name.kind {
        Kind::Incr => changes_in_delta(ctx, holder, backup.last),
        Kind::Full => {
            let (db, base) = ctx.full(holder)?;
            changes_in_full(&db, &base, backup.last).map_err(ctx.at(holder))
        }
    }
}

fn changes_in_delta(
    ctx: &Context,
    snapshot: &Snapshot,
    revision: Revision,
) -> Result<Vec<KeyChange>> {
    let at = ctx.at(snapshot);
    let mut delta = ctx.delta(snapshot)?;
    let mut changes = Vec::new();
    let mut bytes = 0;
    // Reads to the end, because the delta's hash is checked there.
    while let Some(e) = delta.next().map_err(&at)? {
        if e.main == revision {
            let change = to_key_change(&e.change).map_err(&at)?;
            bytes += counted_bytes(&change);
            check_transaction(&ctx.limits, bytes).map_err(&at)?;
            changes.push(change);
        }
    }
    Ok(changes)
}

/// Returns the changes that a revision made, as a full holds them.
///
/// # Errors
/// Fails with `OutOfRange` if the full was compacted after that revision; with `CorruptSnapshot`, `Io`.
pub(super) fn changes_in_full<R: ReadAt>(
    db: &Database<R>,
    base: &Base,
    revision: Revision,
) -> Result<Vec<KeyChange>> {
    if base.compact_revision > revision {
        return Err(Reason::OutOfRange.error(format!(
            "the full snapshot was compacted at revision {}, so it no longer holds what revision {revision} changed",
            base.compact_revision
        )));
    }
    let mut changes = Vec::new();
    let mut bytes = 0;
    let mut cursor = db.cursor(&key_bucket(db)?);
    cursor.seek(&encode_revision(revision, 0))?;
    while let Some(e) = cursor.next()? {
        let rk = RecordKey::decode(e.key)?;
        if rk.main != revision {
            break;
        }
        let kv = KeyValue::decode(e.value)?;
        let change = to_key_change(&match rk.tombstone {
            true => Change::Delete { key: kv.key },
            false => Change::Put(kv),
        })?;
        bytes += counted_bytes(&change);
        check_transaction(db.limits(), bytes)?;
        changes.push(change);
    }
    Ok(changes)
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

fn to_key_change(change: &Change<'_>) -> Result<KeyChange> {
    let (Change::Put(kv) | Change::PutBase64(kv)) = change else {
        return Ok(KeyChange {
            delete: true,
            key: change.key().to_vec(),
            ..KeyChange::default()
        });
    };
    let mut value = Vec::new();
    change.append_value(kv.mod_revision, &mut value)?;
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
