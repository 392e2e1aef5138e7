//! What a store holds at its last saved revision, so that a watch can be compared with it.

use super::next::{FullReason, Saved, Why};
use crate::backup::{Kind, Snapshot};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::bolt::Database;
use crate::error::{Reason, Result};
use crate::etcd::feed::{KeyChange, Position, Transaction};
use crate::mvcc::history::key_bucket;
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{Base, Change, KeyValue, RecordKey, Revision};
use crate::ops::Context;

/// The position behind the last saved revision; or why a full is needed, if the snapshots do not tell it any more.
///
/// # Errors
/// The store's; `Io`, `NoSpace`.
pub(super) fn position(ctx: &Context, saved: &Saved) -> Result<Result<Position, Why>> {
    match changes(ctx, saved) {
        Ok(changes) => Ok(Ok(behind(saved.last, changes))),
        Err(e) if e.reason() == Reason::OutOfRange => {
            Ok(Err((FullReason::Unverifiable, e.to_string())))
        }
        Err(e) if e.reason().is_bad_data() => Ok(Err(FullReason::of_bad_data(&e))),
        Err(e) => Err(e),
    }
}

/// The position behind a revision that changed this.
pub(super) fn behind(revision: Revision, changes: Vec<KeyChange>) -> Position {
    Position::after(&Transaction {
        revision: revision.0,
        changes,
    })
}

fn changes(ctx: &Context, saved: &Saved) -> Result<Vec<KeyChange>> {
    match saved.holder.name.kind {
        Kind::Incr => of_delta(ctx, &saved.holder, saved.last),
        Kind::Full => {
            let (db, base) = ctx.full(&saved.holder)?;
            of_full(&db, &base, saved.last).map_err(ctx.at(&saved.holder))
        }
    }
}

fn of_delta(ctx: &Context, snapshot: &Snapshot, revision: Revision) -> Result<Vec<KeyChange>> {
    let at = ctx.at(snapshot);
    let mut delta = ctx.delta(snapshot)?;
    let mut changes = Vec::new();
    let mut bytes = 0;
    // To the end: only there its hash is checked.
    while let Some(e) = delta.next().map_err(&at)? {
        if e.main == revision {
            let change = change(&e.change).map_err(&at)?;
            bytes += bytes_of(&change);
            check(&ctx.limits, bytes).map_err(&at)?;
            changes.push(change);
        }
    }
    Ok(changes)
}

/// What a full holds at a revision.
///
/// # Errors
/// `OutOfRange` where it was compacted beyond; `CorruptSnapshot`, `Io`.
pub(super) fn of_full<R: ReadAt>(
    db: &Database<R>,
    base: &Base,
    revision: Revision,
) -> Result<Vec<KeyChange>> {
    if base.compact_revision > revision {
        return Err(Reason::OutOfRange.error(format!(
            "it was compacted at revision {}: what revision {revision} changed is not known any more",
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
        let change = change(&match rk.tombstone {
            true => Change::Delete { key: kv.key },
            false => Change::Put(kv),
        })?;
        bytes += bytes_of(&change);
        check(db.limits(), bytes)?;
        changes.push(change);
    }
    Ok(changes)
}

/// What a change takes of a transaction. A request of a few bytes deletes any number of keys: these count less.
fn bytes_of(change: &KeyChange) -> u64 {
    match change.delete {
        true => change.key.len() as u64 / 4 + 1,
        false => (change.key.len() + change.value.len()) as u64,
    }
}

/// A transaction was one request of etcd's, as a value is: the same limit holds.
fn check(limits: &Limits, bytes: u64) -> Result<()> {
    match bytes > limits.element_bytes() {
        true => Err(limits.value_too_large(format!("one transaction has {bytes} bytes"))),
        false => Ok(()),
    }
}

fn change(change: &Change<'_>) -> Result<KeyChange> {
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
