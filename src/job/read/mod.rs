//! Reads a backup: its keys as of a revision, what changed between two, and one key's history.
//!
//! It restores nothing and writes nothing but what does not fit into memory. `cli` calls it, and
//! prints what it gives, record by record: nothing here is as large as a state.

pub mod diff;
pub mod entry;
pub mod history;
pub mod kubernetes;

use crate::error::{Error, Reason, Result};
use crate::job::Context;
use crate::job::sorter::{Sorted, Sorter};
use crate::job::source::Source;
use crate::mvcc::{KeyRange, KeyValue};

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

/// Hands one key's newest record to `each`.
///
/// # Errors
/// `KeyNotFound`; as [`Source::for_each_live`].
pub fn get(
    ctx: &Context,
    source: &Source,
    key: &[u8],
    mut each: impl FnMut(&KeyValue<'_>) -> Result<()>,
) -> Result<()> {
    // What comes after it may still fail: it is handed on when all was read.
    let mut found = Vec::new();
    source.for_each_live(ctx, KeyRange::Key(key.to_vec()), |kv| {
        kv.encode(&mut found);
        Ok(())
    })?;
    if found.is_empty() {
        return Err(Error::new(
            Reason::KeyNotFound,
            format!(
                "there is no key \"{}\" at revision {}: `deltafold history` tells when it was there, `deltafold get --prefix` which keys are",
                key.escape_ascii(),
                source.target
            ),
        ));
    }
    each(&KeyValue::decode(&found)?)
}
