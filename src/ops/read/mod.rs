//! Reads a backup: the keys at a revision, the changes between two revisions, and the history of a key.
//!
//! Nothing is restored, and only temporary files are written. Results are given record by record, so that no
//! state has to fit into memory. Called by `cli`, which prints the records.

mod deletions;
pub mod diff;
pub mod history;
pub mod json;

use crate::backup::delta::{DeltaReader, Event};
use crate::error::{Reason, Result};
use crate::mvcc::{Change, KeyRange, KeyValue};
use crate::ops::Context;
use crate::ops::external_sort::{Sorted, Sorter};
use crate::ops::fold::Source;
use crate::ops::fold::open::Payload;
use crate::ops::fold::open::SnapshotReader;
use crate::ops::fold::select::DeltaSlice;
use crate::ops::parallel::find_first;
pub use deletions::{Deletion, deletion_advice};

/// The bytes of records that are held in memory while they are sorted.
const SORT_BUFFER_BYTES: usize = 16 << 20;

/// The live keys of a state, sorted by their bytes.
#[derive(Debug)]
pub struct Keys(Sorted);

impl Keys {
    /// Reads and sorts the keys of a range.
    ///
    /// # Errors
    /// As [`Source::for_each_live`].
    pub fn read(ctx: &Context, source: &Source, range: KeyRange) -> Result<Keys> {
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

    /// Returns the key alone.
    fn key(&self) -> &[u8] {
        self.0.current().0
    }
}

/// Calls `each` with the newest record of a key. Deltas are read from the newest one back, until one changes
/// the key.
///
/// # Errors
/// `KeyNotFound`; as [`Source::for_each_live`].
pub fn get(
    ctx: &Context,
    source: &Source,
    key: &[u8],
    mut each: impl FnMut(&KeyValue<'_>) -> Result<()>,
) -> Result<()> {
    let slices = source.delta_slices();
    let reader = SnapshotReader::new(ctx, slices.iter().rev().map(|s| &s.snapshot));
    let newest_change = |nth: usize| {
        let slice = &slices[slices.len() - 1 - nth];
        newest_change_in(ctx, reader.delta_in_turn(nth)?, slice, key)
    };
    let changed =
        source.read_some_deltas(ctx, || find_first(ctx.threads, slices.len(), newest_change))?;
    let is_in_base = changed.is_none();
    let mut record = changed.unwrap_or_default();
    let mut begins_others = false;
    if is_in_base {
        // Reading on may still fail, so `each` is called after everything was read.
        source.for_each_live_in_base(ctx, KeyRange::Prefix(key.to_vec()), |kv| {
            match kv.key == key {
                true => kv.encode(&mut record),
                false => begins_others = true,
            }
            Ok(())
        })?;
    }
    if record.is_empty() {
        let (key, revision) = (key.escape_ascii(), source.target);
        let advice = match begins_others {
            true => format!("for the keys that begin so give --prefix {key}"),
            false => "see `deltafold history` for when it existed, or `deltafold get --prefix` for the keys that exist".to_owned(),
        };
        return Err(Reason::KeyNotFound.error(format!(
            "there is no key \"{key}\" at revision {revision}: {advice}"
        )));
    }
    each(&KeyValue::decode(&record)?)
}

/// Returns the newest record of `key` in a delta, which is empty if the key was deleted; `None` if the delta does
/// not change the key.
fn newest_change_in(
    ctx: &Context,
    delta: DeltaReader<'_, Payload>,
    slice: &DeltaSlice,
    key: &[u8],
) -> Result<Option<Vec<u8>>> {
    let mut newest: Option<Vec<u8>> = None;
    for_each_change(ctx, delta, slice, key, |_, kv| {
        let record = newest.get_or_insert_default();
        record.clear();
        if let Some(kv) = kv {
            kv.encode(record);
        }
        Ok(())
    })?;
    Ok(newest)
}

/// Calls `each` for every change of `key` in a delta, with the record of a put or `None` for a deletion.
fn for_each_change(
    ctx: &Context,
    mut delta: DeltaReader<'_, Payload>,
    slice: &DeltaSlice,
    key: &[u8],
    mut each: impl FnMut(&Event<'_>, Option<&KeyValue<'_>>) -> Result<()>,
) -> Result<()> {
    let at = ctx.at(&slice.snapshot);
    let mut value = Vec::new();
    while let Some(e) = delta.next().map_err(&at)? {
        if !slice.contains(e.main) || e.change.key() != key {
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
            each(&e, kv.as_ref())
        };
        if let Err(e) = decode_change() {
            return Err(at(delta.explain(e)));
        }
    }
    Ok(())
}
