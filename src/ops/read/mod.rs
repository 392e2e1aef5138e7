//! Reads a backup: its keys as of a revision, what changed between two, and one key's history.
//!
//! It restores nothing and writes nothing but what does not fit into memory. `cli` calls it, and
//! prints what it gives, record by record: nothing here is as large as a state.

pub mod diff;
pub mod history;
pub mod json;
pub mod kubernetes;

use crate::backup::delta::{DeltaReader, Event};
use crate::error::{Reason, Result};
use crate::mvcc::{Change, KeyRange, KeyValue};
use crate::ops::Context;
use crate::ops::external_sort::{Sorted, Sorter};
use crate::ops::fold::Source;
use crate::ops::fold::open::Payload;
use crate::ops::fold::open::Reading;
use crate::ops::fold::select::Step;
use crate::ops::parallel::first;

/// Bytes of records that are held in memory until they are in order.
const SORT_BUFFER_BYTES: usize = 16 << 20;

/// The live keys of a state, in the order of their bytes.
#[derive(Debug)]
pub struct Keys(Sorted);

impl Keys {
    /// Reads and sorts all keys of a range.
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

    /// Goes on to the next key; false at the end.
    ///
    /// # Errors
    /// `Io`.
    pub fn advance(&mut self) -> Result<bool> {
        self.0.advance()
    }

    /// The key that [`advance`](Self::advance) went on to.
    ///
    /// # Errors
    /// `CorruptSnapshot`.
    pub fn current(&self) -> Result<KeyValue<'_>> {
        KeyValue::decode(self.0.current().1)
    }

    /// The key alone.
    fn key(&self) -> &[u8] {
        self.0.current().0
    }
}

/// Hands one key's newest record to `each`. Deltas are read from the newest on, until one changes the key.
///
/// # Errors
/// `KeyNotFound`; as [`Source::for_each_live`].
pub fn get(
    ctx: &Context,
    source: &Source,
    key: &[u8],
    mut each: impl FnMut(&KeyValue<'_>) -> Result<()>,
) -> Result<()> {
    let steps = source.steps();
    // An empty record is that of a key that was deleted.
    let reading = Reading::new(ctx, steps.iter().rev().map(|s| &s.snapshot));
    let newest_change = |nth: usize| {
        let step = &steps[steps.len() - 1 - nth];
        let mut newest: Option<Vec<u8>> = None;
        versions(ctx, reading.delta_in_turn(nth)?, step, key, |_, kv| {
            let record = newest.get_or_insert_default();
            record.clear();
            if let Some(kv) = kv {
                kv.encode(record);
            }
            Ok(())
        })?;
        Ok(newest)
    };
    let changed =
        source.read_some_deltas(ctx, || first(ctx.threads, steps.len(), newest_change))?;
    let unchanged = changed.is_none();
    let mut found = changed.unwrap_or_default();
    if unchanged {
        // What comes after it may still fail: it is handed on when all was read.
        source.for_each_live_in_base(ctx, KeyRange::Key(key.to_vec()), |kv| {
            kv.encode(&mut found);
            Ok(())
        })?;
    }
    if found.is_empty() {
        return Err(Reason::KeyNotFound.error(format!(
            "there is no key \"{}\" at revision {}: `deltafold history` tells when it was there, `deltafold get --prefix` which keys are",
            key.escape_ascii(),
            source.target
        )));
    }
    each(&KeyValue::decode(&found)?)
}

/// Hands every change of `key` in a delta to `push`, with the record of a put.
fn versions(
    ctx: &Context,
    mut delta: DeltaReader<'_, Payload>,
    step: &Step,
    key: &[u8],
    mut push: impl FnMut(&Event<'_>, Option<&KeyValue<'_>>) -> Result<()>,
) -> Result<()> {
    let at = ctx.at(&step.snapshot);
    let mut value = Vec::new();
    while let Some(e) = delta.next().map_err(&at)? {
        if e.main <= step.after || e.main > step.until || e.change.key() != key {
            continue;
        }
        value.clear();
        let mut take = || {
            e.change.append_value(e.main, &mut value)?;
            let kv = match e.change {
                Change::Put(kv) | Change::PutBase64(kv) => Some(KeyValue {
                    value: &value,
                    ..kv
                }),
                Change::Delete { .. } => None,
            };
            push(&e, kv.as_ref())
        };
        if let Err(e) = take() {
            return Err(at(delta.explain(e)));
        }
    }
    Ok(())
}
