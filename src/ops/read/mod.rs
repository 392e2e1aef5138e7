//! Reads a backup: the keys at a revision, the changes between two revisions, and the history of a key.
//!
//! Nothing is restored, and only temporary files are written. Results are given record by record, so that no state has
//! to fit into memory.

pub mod deleted;
pub mod diff;
pub mod history;
pub mod json;
pub(crate) mod kinds;
pub mod log;
pub mod search;
pub mod span;
pub(crate) mod stream;
pub mod versions;

use crate::backup::delta::{DeltaReader, Event};
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::parallel::{self, find_first};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Change, KeyRange, KeyValue, Revision};
use crate::prefix::Context;
use crate::prefix::open::Payload;
use crate::prefix::open::SnapshotReader;
use crate::prefix::open::State;
use crate::prefix::select::DeltaSlice;
pub use kinds::kinds;
use std::sync::Mutex;

/// The bytes of records that are held in memory while they are sorted.
const SORT_BUFFER_BYTES: usize = 16 << 20;

/// The records that are worked on at once: their number and their bytes, except for the last one.
const BATCH: usize = 1000;
const BATCH_BYTES: usize = 4 << 20;

/// The most bytes of records that are held in memory.
const MAX_HELD_BYTES: usize = 256 << 20;

/// Refuses more records than can be held in memory.
pub(crate) fn check_size(bytes: usize) -> Result<()> {
    if bytes <= MAX_HELD_BYTES {
        return Ok(());
    }
    Err(Reason::TooLarge.error(format!(
        "these are objects of more than {} MiB: give one namespace or kind after the other",
        MAX_HELD_BYTES >> 20
    )))
}

/// The live keys of a state, sorted by their bytes.
#[derive(Debug)]
pub struct Keys(Sorted);

impl Keys {
    /// Reads and sorts the keys of a range.
    ///
    /// # Errors
    /// As [`State::for_each_live`].
    pub fn read(ctx: &Context, source: &State, range: KeyRange) -> Result<Keys> {
        let mut sorter = Sorter::new(ctx.temp(), SORT_BUFFER_BYTES);
        let mut record = Vec::new();
        source.for_each_live(ctx, range, |kv| {
            record.clear();
            kv.encode(&mut record);
            sorter.push(kv.key, &record)
        })?;
        Ok(Keys(sorter.finish()?))
    }

    /// Moves to the next key. Returns false at the end.
    ///
    /// # Errors
    /// `Io`.
    pub fn advance(&mut self) -> Result<bool> {
        self.0.advance()
    }

    /// Returns the record of the key to which [`advance`](Self::advance) moved.
    ///
    /// # Errors
    /// `CorruptSnapshot`.
    pub fn current(&self) -> Result<KeyValue<'_>> {
        KeyValue::decode(self.0.current().1)
    }

    /// Calls `work` for the remaining keys, on several threads, and `each` with the results in the order of the keys.
    ///
    /// # Errors
    /// `Io`, `CorruptSnapshot`, `Terminated`, and those of `each`.
    pub fn map<R: Send>(
        &mut self,
        ctx: &Context,
        work: impl Fn(&KeyValue<'_>) -> R + Sync,
        mut each: impl FnMut(R) -> Result<()>,
    ) -> Result<()> {
        loop {
            ctx.store.cancel().check()?;
            let mut records: Vec<Vec<u8>> = Vec::new();
            let mut bytes = 0;
            while records.len() < BATCH && bytes < BATCH_BYTES && self.advance()? {
                let record = self.0.current().1;
                bytes += record.len();
                records.push(record.to_vec());
            }
            if records.is_empty() {
                return Ok(());
            }
            let work = |record: &Vec<u8>| Ok(work(&KeyValue::decode(record)?));
            let results: Vec<Result<R>> = parallel::each(ctx.threads, &records, work);
            results.into_iter().try_for_each(|result| each(result?))?;
        }
    }

    /// Returns the key alone.
    fn key(&self) -> &[u8] {
        self.0.current().0
    }
}

/// Calls `each` with the newest record of the first of these keys that exists. Deltas are read from the newest one
/// back: of one key, until one changes it; of several, all, unless one has the first key.
///
/// # Errors
/// Those of `each`; as [`State::for_each_live`].
pub fn get(
    ctx: &Context,
    source: &State,
    keys: &[Vec<u8>],
    mut each: impl FnMut(&KeyValue<'_>) -> Result<()>,
) -> Result<Got> {
    let slices = source.delta_slices();
    let reader = SnapshotReader::new(ctx, slices.iter().rev().map(|s| &s.snapshot));
    // The newest change of each key, with the place of its delta.
    let newest: Mutex<Vec<Option<(usize, Record)>>> = Mutex::new(vec![None; keys.len()]);
    let read_delta = |nth: usize| {
        let slice = &slices[slices.len() - 1 - nth];
        let changes = newest_changes_in(ctx, reader.delta_in_turn(nth)?, slice, keys)?;
        let is_decided = match changes.first() {
            Some(Some(first)) => !first.is_empty() || keys.len() == 1,
            _ => false,
        };
        for (newest, change) in lock(&newest).iter_mut().zip(changes) {
            if let Some(change) = change
                && newest.as_ref().is_none_or(|(before, _)| nth < *before)
            {
                *newest = Some((nth, change));
            }
        }
        Ok(is_decided.then_some(()))
    };
    find_first(ctx.threads, slices.len(), read_delta)?;
    let newest = unpoisoned(newest.into_inner());
    let mut records: Vec<Option<Record>> = newest
        .into_iter()
        .map(|change| change.map(|(_, record)| record))
        .collect();
    let mut begins_others = false;
    if records
        .first()
        .is_some_and(|first| first.as_ref().is_none_or(Vec::is_empty))
    {
        // Reading on may still fail, so `each` is called after everything was read.
        let range = KeyRange::prefixes(keys.to_vec());
        source.for_each_live_in_base(ctx, range, |kv| {
            match keys.iter().position(|key| kv.key == key) {
                None => begins_others |= keys.first().is_some_and(|k| kv.key.starts_with(k)),
                Some(nth) if records[nth].is_none() => {
                    kv.encode(records[nth].get_or_insert_default());
                }
                Some(_) => {}
            }
            Ok(())
        })?;
    }
    if let Some(record) = records.iter().flatten().find(|record| !record.is_empty()) {
        each(&KeyValue::decode(record)?)?;
        return Ok(Got::Record);
    }
    Ok(if begins_others {
        Got::Beginning
    } else {
        Got::Nothing
    })
}

/// The result of [`get`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Got {
    /// A key exists.
    Record,
    /// No key exists.
    Nothing,
    /// No key exists, and the first one begins others.
    Beginning,
}

/// Returns the error that no such key exists.
pub fn not_found<'k>(keys: impl IntoIterator<Item = &'k Vec<u8>>, revision: Revision) -> Error {
    let keys: Vec<String> = keys
        .into_iter()
        .map(|key| format!("\"{}\"", key.escape_ascii()))
        .collect();
    let keys = keys.join(" nor ");
    Reason::KeyNotFound.error(format!("there is no key {keys} at revision {revision}"))
}

/// An encoded record; empty for a deletion.
type Record = Vec<u8>;

/// Returns the newest change of each key in a delta; `None` if the delta does not change the key.
fn newest_changes_in(
    ctx: &Context,
    delta: DeltaReader<'_, Payload>,
    slice: &DeltaSlice,
    keys: &[Vec<u8>],
) -> Result<Vec<Option<Record>>> {
    let mut newest: Vec<Option<Record>> = vec![None; keys.len()];
    let nth_of = |key: &[u8]| keys.iter().position(|k| k == key);
    for_each_change(ctx, delta, slice, nth_of, |nth, _, kv| {
        let record = newest[nth].get_or_insert_default();
        record.clear();
        if let Some(kv) = kv {
            kv.encode(record);
        }
        Ok(())
    })?;
    Ok(newest)
}

/// Calls `each` for every change in a delta of a key for which `nth_of` returns an index, with that index, and the record
/// of a put or `None` for a deletion.
fn for_each_change(
    ctx: &Context,
    mut delta: DeltaReader<'_, Payload>,
    slice: &DeltaSlice,
    nth_of: impl Fn(&[u8]) -> Option<usize>,
    mut each: impl FnMut(usize, &Event<'_>, Option<&KeyValue<'_>>) -> Result<()>,
) -> Result<()> {
    let at = ctx.at(&slice.snapshot);
    let mut value = Vec::new();
    while let Some(e) = delta.next().map_err(&at)? {
        let Some(nth) = nth_of(e.change.key()) else {
            continue;
        };
        if !slice.contains(e.main) {
            continue;
        }
        value.clear();
        let mut decode_change = || {
            e.change.append_value(e.main, &mut value)?;
            let kv = match e.change {
                Change::Put(kv) | Change::PutBase64(kv) => Some(KeyValue {
                    value: &value,
                    ..kv
                }),
                Change::Delete { .. } => None,
            };
            each(nth, &e, kv.as_ref())
        };
        if let Err(e) = decode_change() {
            return Err(at(delta.explain(e)));
        }
    }
    Ok(())
}
