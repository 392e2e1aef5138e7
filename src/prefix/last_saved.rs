//! Reads from the store which changes the last saved transactions made.
//!
//! A watch begins with them and compares them with those of the cluster, so that two histories are never spliced.
//! A new full is compared with them, too. This module does not talk to etcd. Called by `ops::snapshot`.

use crate::backup::{Kind, Snapshot};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::base::parallel::each;
use crate::bolt::Database;
use crate::error::Result;
use crate::etcd::feed::{
    KeyChange, Known, KnownSize, Likeness, MOST_KNOWN_CHANGES, PROOF, Position, Transaction,
};
use crate::mvcc::history::key_bucket;
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{Base, Change, KeyValue, RecordKey, Revision};
use crate::prefix::Context;
use crate::prefix::newcomers::came_from;
use std::collections::{HashMap, HashSet, VecDeque};

/// The most deltas that are read.
pub(crate) const MOST_DELTAS: usize = 8;
/// The most changes of a full that are compared.
const MOST_COMPARED_KEYS: usize = 100_000;

/// The snapshots at the end of a timeline.
pub(crate) struct End<'a> {
    /// The last saved revision.
    pub(crate) last: Revision,
    /// The newest snapshot that holds it.
    pub(crate) holder: &'a Snapshot,
    /// The last deltas that lead up to it without a gap, the oldest first; at most [`MOST_DELTAS`].
    pub(crate) deltas: &'a [Snapshot],
    /// The newest full.
    pub(crate) full: Option<&'a Snapshot>,
}

/// What the store holds at its end.
#[derive(Debug, Clone)]
pub(crate) struct LastSaved {
    /// The last transactions.
    pub(crate) known: Known,
    /// The changes that were saved last.
    changes: SavedChanges,
}

/// The changes that were saved last, as far as a compaction has left them.
#[derive(Debug, Clone, Default)]
struct SavedChanges {
    /// The first revision of which all are here that are left.
    first: i64,
    /// The revision up to which a compaction has removed some.
    compacted: i64,
    /// The revision of each, and its digest without the lease: snapshots of other tools have none.
    digests: HashSet<(i64, [u8; 32])>,
}

/// What is known of a new full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// It has the history that was saved last.
    Same,
    /// Nothing proves it, for this reason.
    Unknown(String),
    /// It has another history, for this reason, which left that of the store at a revision if it is known.
    Differs(String, Option<Revision>),
}

impl LastSaved {
    /// Compares a new full with what was saved last, up to the revision `last`. `known` are the full's last transactions.
    ///
    /// # Errors
    /// Fails with `CorruptSnapshot`, `Io`.
    pub(crate) fn compare<R: ReadAt>(
        &self,
        db: &Database<R>,
        base: &Base,
        known: &Known,
        last: Revision,
    ) -> Result<Comparison> {
        let likeness = self.known.compare(known);
        if likeness == Likeness::Same {
            return Ok(Comparison::Same);
        }
        let left_at = self.known.same_up_to(known).map(Revision);
        if let Some((at, why)) = self.changes.contradiction(db, base, last)? {
            return Ok(Comparison::Differs(why, left_at.filter(|left| left.0 < at)));
        }
        Ok(match likeness {
            Likeness::Differs => {
                let why =
                    format!("up to revision {last} the cluster holds other changes than the store");
                Comparison::Differs(why, left_at)
            }
            _ => Comparison::Unknown(format!(
                "of the changes up to revision {last}, which were saved last, too few are left to compare"
            )),
        })
    }
}

impl SavedChanges {
    /// Reads the last changes of a full up to `last`.
    fn of_full<R: ReadAt>(db: &Database<R>, base: &Base, last: Revision) -> Result<Self> {
        let (mut back, mut first) = (MOST_KNOWN_CHANGES as i64, last.0);
        let mut changes = VecDeque::new();
        // A compaction keeps the newest records of living keys, however old they are.
        while changes.len() < MOST_KNOWN_CHANGES && first > 0 {
            first = last.0.saturating_sub(back).max(0);
            back = back.saturating_mul(16);
            changes.clear();
            let mut cursor = db.cursor(&key_bucket(db)?);
            cursor.seek(&encode_revision(Revision(first), 0))?;
            while let Some(e) = cursor.next()? {
                let record = RecordKey::decode(e.key)?;
                if record.main > last {
                    break;
                }
                let change = change_of(record, &KeyValue::decode(e.value)?);
                changes.push_back((record.main.0, digest_without_lease(&change)));
                if changes.len() > MOST_COMPARED_KEYS {
                    // Only whole revisions can be compared.
                    first = changes.front().map_or(first, |(revision, _)| revision + 1);
                    while changes
                        .front()
                        .is_some_and(|(revision, _)| *revision < first)
                    {
                        changes.pop_front();
                    }
                }
            }
        }
        Ok(SavedChanges {
            first,
            compacted: base.compact_revision.0,
            digests: changes.into_iter().collect(),
        })
    }

    /// Adds later changes.
    fn append(&mut self, later: &Recent) {
        for (position, digests) in &later.transactions {
            let of_revision = digests.iter().map(|digest| (position.revision, *digest));
            self.digests.extend(of_revision);
        }
    }

    /// Returns a record of a full that cannot be there if the full has the history of these changes: at a revision that
    /// they cover, and none of them. What a compaction removes, or keeps in some versions of etcd, says nothing. Also
    /// returns its revision.
    fn contradiction<R: ReadAt>(
        &self,
        db: &Database<R>,
        base: &Base,
        last: Revision,
    ) -> Result<Option<(i64, String)>> {
        // Up to their compaction, these changes are the last ones of the keys that were there then; `None`: deleted.
        let mut newest: HashMap<Vec<u8>, Option<(i64, [u8; 32])>> = HashMap::new();
        let is_missing = |change: &(i64, [u8; 32])| !self.digests.contains(change);
        let describe = |at: i64, key: &[u8]| {
            let key = key.escape_ascii();
            let why = format!(
                "the cluster changed the key \"{key}\" at revision {at}, and the store has other changes of it"
            );
            Some((at, why))
        };
        let mut cursor = db.cursor(&key_bucket(db)?);
        cursor.seek(&encode_revision(Revision(self.first), 0))?;
        while let Some(e) = cursor.next()?
            && newest.len() < MOST_COMPARED_KEYS
        {
            let record = RecordKey::decode(e.key)?;
            if record.main > last {
                break;
            }
            let change = change_of(record, &KeyValue::decode(e.value)?);
            let digest = (record.main.0, digest_without_lease(&change));
            if record.main.0 <= self.compacted {
                newest.insert(change.key, (!record.tombstone).then_some(digest));
            } else if is_missing(&digest)
                && !(record.tombstone && record.main <= base.compact_revision)
            {
                return Ok(describe(record.main.0, &change.key));
            }
        }
        if newest.len() == MOST_COMPARED_KEYS {
            return Ok(None);
        }
        let mut puts = newest
            .iter()
            .filter_map(|(key, put)| Some((key, put.as_ref()?)));
        let contradiction = puts.find(|(_, put)| is_missing(put));
        Ok(contradiction.and_then(|(key, put)| describe(put.0, key)))
    }
}

fn digest_without_lease(change: &KeyChange) -> [u8; 32] {
    KeyChange {
        lease: 0,
        ..change.clone()
    }
    .digest()
}

/// Reads what the store holds at its end.
///
/// # Errors
/// Fails with the error of a snapshot that cannot be opened; with the store's errors, `Io` and `NoSpace`.
pub(crate) fn read(ctx: &Context, end: &End<'_>) -> Result<LastSaved> {
    let (holder, last) = (end.holder, end.last);
    let deltas = match holder.name.kind {
        Kind::Incr if end.deltas.is_empty() => std::slice::from_ref(holder),
        _ => end.deltas,
    };
    let Some((newest, before)) = deltas.split_last() else {
        return read_full(ctx, holder, last);
    };
    let mut recent = read_delta(ctx, newest, last)?;
    if !recent.is_enough() {
        let newest = std::mem::take(&mut recent);
        for earlier in each(MOST_DELTAS, before, |s| read_delta(ctx, s, last)) {
            recent.append(earlier?);
        }
        recent.append(newest);
    }
    // Deltas are folded onto the newest full. One that did not come from these deltas may be of another history.
    if holder.name.is_full() && !came_from(&holder.name, newest.name.created) {
        let of_full = read_full(ctx, holder, last)?;
        if recent.known(last).compare(&of_full.known) != Likeness::Same {
            return Ok(of_full);
        }
    }
    let mut changes = SavedChanges {
        first: recent.first_revision(),
        ..SavedChanges::default()
    };
    if !recent.known(last).can_prove()
        && let Some(full) = end.full
        && full.name.last >= Revision(changes.first).previous()
    {
        let until = Revision(changes.first).previous();
        let (db, base) = ctx.full(full)?;
        let at = ctx.at(full);
        let mut earlier = Recent::of_full(&db, &base, until).map_err(&at)?;
        changes = SavedChanges::of_full(&db, &base, until).map_err(at)?;
        earlier.append(recent);
        recent = earlier;
    }
    changes.append(&recent);
    Ok(LastSaved {
        known: recent.known(last),
        changes,
    })
}

/// Reads a full that holds the revision `last`.
fn read_full(ctx: &Context, full: &Snapshot, last: Revision) -> Result<LastSaved> {
    let (db, base) = ctx.full(full)?;
    let at = ctx.at(full);
    Ok(LastSaved {
        known: known_of_full(&db, &base, last).map_err(&at)?,
        changes: SavedChanges::of_full(&db, &base, last).map_err(at)?,
    })
}

/// Returns the last transactions of a full up to the revision `last`, as far as no compaction can have removed deletions
/// from them.
///
/// # Errors
/// Fails with `CorruptSnapshot`, `Io`.
pub(crate) fn known_of_full<R: ReadAt>(
    db: &Database<R>,
    base: &Base,
    last: Revision,
) -> Result<Known> {
    Ok(Recent::of_full(db, base, last)?.known(last))
}

/// The last transactions up to a number and size of changes, without the values.
#[derive(Default)]
struct Recent {
    /// Each with the digests of its changes without the leases.
    transactions: VecDeque<(Position, Vec<[u8; 32]>)>,
    size: KnownSize,
    /// The transaction that is not complete yet, and its size.
    partial: Transaction,
    bytes: u64,
}

impl Recent {
    fn of_full<R: ReadAt>(db: &Database<R>, base: &Base, last: Revision) -> Result<Self> {
        let first = last.0.saturating_sub(MOST_KNOWN_CHANGES as i64);
        let first = first.max(base.compact_revision.0.saturating_add(1));
        let mut recent = Recent::default();
        let mut cursor = db.cursor(&key_bucket(db)?);
        cursor.seek(&encode_revision(Revision(first), 0))?;
        while let Some(e) = cursor.next()? {
            let record = RecordKey::decode(e.key)?;
            if record.main > last {
                break;
            }
            let change = change_of(record, &KeyValue::decode(e.value)?);
            recent.change(record.main, change, db.limits())?;
        }
        recent.complete();
        Ok(recent)
    }

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
            let digests = transaction.changes.iter().map(digest_without_lease);
            self.push(Position::after(&transaction), digests.collect());
        }
    }

    /// Adds a transaction, and forgets the oldest ones that are too many.
    fn push(&mut self, position: Position, digests: Vec<[u8; 32]>) {
        let last = self.transactions.back();
        if last.is_some_and(|(last, _)| position.revision <= last.revision) {
            // Deltas may overlap.
            return;
        }
        self.size += position.fingerprint;
        self.transactions.push_back((position, digests));
        while self.size.is_too_large()
            && self.transactions.len() > PROOF
            && let Some((oldest, _)) = self.transactions.pop_front()
        {
            self.size -= oldest.fingerprint;
        }
    }

    fn append(&mut self, later: Recent) {
        for (position, digests) in later.transactions {
            self.push(position, digests);
        }
    }

    /// Whether no transaction before these is compared.
    fn is_enough(&self) -> bool {
        self.size.is_full() && self.transactions.len() >= PROOF
    }

    fn first_revision(&self) -> i64 {
        self.transactions.front().map_or(0, |(p, _)| p.revision)
    }

    /// Returns the transactions up to `last`; without one of that revision, that nothing is known.
    fn known(&self, last: Revision) -> Known {
        let mut known = Known::nothing_at(last.0);
        let newest = self.transactions.back().map(|(p, _)| p.revision);
        if newest == Some(last.0) {
            self.transactions.iter().for_each(|(p, _)| known.push(*p));
        }
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

/// Returns a record of a database as a change.
fn change_of(record: RecordKey, kv: &KeyValue<'_>) -> KeyChange {
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
