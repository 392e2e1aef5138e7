//! Reads from the store which changes the last saved transactions made.
//!
//! A watch begins with them and compares them with those of the cluster, so that two histories are never spliced. A new
//! full is compared with them, too. This module does not talk to etcd.

use crate::backup::{Kind, Snapshot};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::base::parallel::each;
use crate::bolt::Database;
use crate::error::Result;
use crate::etcd::feed::{KeyChange, Known, Likeness, MOST_KNOWN_CHANGES, Position, Transaction};
use crate::mvcc::history::key_bucket;
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{Base, Change, KeyValue, RecordKey, Revision};
use crate::prefix::Context;
use crate::prefix::newcomers::came_from;
use std::collections::{HashMap, HashSet, VecDeque};

/// The most deltas that are read.
pub(crate) const MOST_DELTAS: usize = 8;
/// The most changes of a full that are compared.
const MOST_COMPARED: usize = 100_000;

/// The revision of a change, and its digest without the lease: snapshots of other tools have none.
type Changed = (i64, [u8; 32]);

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
    /// From this revision on, all changes are here that a compaction has left.
    first: i64,
    /// The revision up to which a compaction has removed some.
    compacted: i64,
    digests: HashSet<Changed>,
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
            for change in changes_of(db, Revision(first), last)? {
                let (record, change) = change?;
                changes.push_back((record.main.0, change.digest_without_lease()));
                if changes.len() > MOST_COMPARED {
                    // Only whole revisions can be compared.
                    first = changes.front().map_or(first, |(revision, _)| revision + 1);
                    forget_before(&mut changes, first);
                }
            }
        }
        Ok(SavedChanges {
            first,
            compacted: base.compact_revision.0,
            digests: changes.into_iter().collect(),
        })
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
        let mut newest: HashMap<Vec<u8>, Option<Changed>> = HashMap::new();
        let is_missing = |change: &Changed| !self.digests.contains(change);
        let describe = |at: i64, key: &[u8]| {
            let key = key.escape_ascii();
            let why = format!(
                "the cluster changed the key \"{key}\" at revision {at}, and the store has other changes of it"
            );
            Some((at, why))
        };
        for change in changes_of(db, Revision(self.first), last)? {
            let (record, change) = change?;
            let digest = (record.main.0, change.digest_without_lease());
            if record.main.0 <= self.compacted {
                newest.insert(change.key, (!record.tombstone).then_some(digest));
            } else if is_missing(&digest)
                && !(record.tombstone && record.main <= base.compact_revision)
            {
                return Ok(describe(record.main.0, &change.key));
            }
            if newest.len() == MOST_COMPARED {
                return Ok(None);
            }
        }
        let mut puts = newest
            .iter()
            .filter_map(|(key, put)| Some((key, put.as_ref()?)));
        let contradiction = puts.find(|(_, put)| is_missing(put));
        Ok(contradiction.and_then(|(key, put)| describe(put.0, key)))
    }
}

/// Returns the records of a full with revisions from `first` to `last`, in order, each with its change.
fn changes_of<R: ReadAt>(
    db: &Database<R>,
    first: Revision,
    last: Revision,
) -> Result<impl Iterator<Item = Result<(RecordKey, KeyChange)>>> {
    let mut cursor = db.cursor(&key_bucket(db)?);
    cursor.seek(&encode_revision(first, 0))?;
    let mut next = move || {
        let Some(e) = cursor.next()? else {
            return Ok(None);
        };
        let record = RecordKey::decode(e.key)?;
        if record.main > last {
            return Ok(None);
        }
        let kv = KeyValue::decode(e.value)?;
        let change = if record.tombstone {
            deletion(kv.key)
        } else {
            put(&kv, kv.value.to_vec())
        };
        Ok(Some((record, change)))
    };
    Ok(std::iter::from_fn(move || next().transpose()))
}

/// Forgets the changes of revisions before `first`.
fn forget_before(changes: &mut VecDeque<Changed>, first: i64) {
    while changes
        .front()
        .is_some_and(|(revision, _)| *revision < first)
    {
        changes.pop_front();
    }
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
    if !recent.known.is_enough() {
        let newest = std::mem::take(&mut recent);
        for earlier in each(MOST_DELTAS, before, |s| read_delta(ctx, s, last)) {
            recent.append(earlier?);
        }
        recent.append(newest);
    }
    // Deltas are folded onto the newest full. One that did not come from these deltas may be of another history.
    if holder.name.is_full() && !came_from(&holder.name, newest.name.created) {
        let of_full = read_full(ctx, holder, last)?;
        if recent.up_to(last).compare(&of_full.known) != Likeness::Same {
            return Ok(of_full);
        }
    }
    let mut changes = SavedChanges {
        first: recent
            .changes
            .front()
            .map_or(last.0 + 1, |(first, _)| *first),
        ..SavedChanges::default()
    };
    if !recent.up_to(last).can_prove()
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
    changes.digests.extend(&recent.changes);
    Ok(LastSaved {
        known: recent.up_to(last),
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
    Ok(Recent::of_full(db, base, last)?.up_to(last))
}

/// The last transactions, without the values.
struct Recent {
    known: Known,
    /// Their changes.
    changes: VecDeque<Changed>,
    /// The transaction that is not complete yet, and its size.
    partial: Transaction,
    bytes: u64,
}

impl Default for Recent {
    fn default() -> Self {
        Recent {
            known: Known::nothing_at(0),
            changes: VecDeque::new(),
            partial: Transaction::default(),
            bytes: 0,
        }
    }
}

impl Recent {
    fn of_full<R: ReadAt>(db: &Database<R>, base: &Base, last: Revision) -> Result<Self> {
        let first = last.0.saturating_sub(MOST_KNOWN_CHANGES as i64);
        let first = first.max(base.compact_revision.0.saturating_add(1));
        let mut recent = Recent::default();
        for change in changes_of(db, Revision(first), last)? {
            let (record, change) = change?;
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
            self.known.push(Position::after(&transaction));
            let changes = transaction.changes.iter();
            let changes = changes.map(|c| (transaction.revision, c.digest_without_lease()));
            self.changes.extend(changes);
            forget_before(&mut self.changes, self.known.first_revision());
        }
    }

    /// Adds what is later of a delta that may overlap.
    fn append(&mut self, later: Recent) {
        let reached = self.known.revision();
        for position in later.known.positions() {
            if position.revision > reached {
                self.known.push(*position);
            }
        }
        let changes = later.changes.into_iter();
        self.changes
            .extend(changes.filter(|(revision, _)| *revision > reached));
        forget_before(&mut self.changes, self.known.first_revision());
    }

    /// Returns the transactions up to `last`; without one of that revision, that nothing is known.
    fn up_to(&self, last: Revision) -> Known {
        if self.known.revision() == last.0 {
            self.known.clone()
        } else {
            Known::nothing_at(last.0)
        }
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
    if change.delete {
        change.key.len() as u64 / 4 + 1
    } else {
        (change.key.len() + change.value.len()) as u64
    }
}

/// Applies the limit of a value to a transaction: both arrive in one request to etcd.
fn check_transaction(limits: &Limits, bytes: u64) -> Result<()> {
    if bytes > limits.element_bytes() {
        Err(limits.value_too_large(format!("one transaction has {bytes} bytes")))
    } else {
        Ok(())
    }
}

fn to_key_change(revision: Revision, change: &Change<'_>) -> Result<KeyChange> {
    let (Change::Put(kv) | Change::PutBase64(kv)) = change else {
        return Ok(deletion(change.key()));
    };
    let mut value = Vec::new();
    change.append_value(revision, &mut value)?;
    Ok(put(kv, value))
}

fn deletion(key: &[u8]) -> KeyChange {
    KeyChange {
        delete: true,
        key: key.to_vec(),
        ..KeyChange::default()
    }
}

fn put(kv: &KeyValue<'_>, value: Vec<u8>) -> KeyChange {
    KeyChange {
        delete: false,
        key: kv.key.to_vec(),
        create_revision: kv.create_revision.0,
        mod_revision: kv.mod_revision.0,
        version: kv.version,
        value,
        lease: kv.lease,
    }
}
