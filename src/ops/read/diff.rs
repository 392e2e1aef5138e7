//! Compares two states key by key.
//!
//! Both states are sorted by key and then read in parallel, so neither has to fit into memory. Values are not
//! interpreted. Called by `cli`.

use super::Keys;
use crate::error::Result;
use crate::mvcc::{KeyRange, KeyValue};
use crate::ops::Context;
use crate::ops::fold::Source;
use std::cmp::Ordering;

/// A comparison of two states.
#[derive(Debug)]
pub struct Diff {
    old: Side,
    new: Side,
    /// How the current keys of both sides compare: `Less` if the old one is lower. `None` before the first
    /// key.
    order: Option<Ordering>,
}

#[derive(Debug)]
struct Side {
    keys: Keys,
    ended: bool,
}

impl Side {
    fn advance(&mut self) -> Result<()> {
        self.ended = self.ended || !self.keys.advance()?;
        Ok(())
    }
}

/// A key that differs between the states. At least one of the records is present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyDifference<'a> {
    /// The record in the first state, if the key exists there.
    pub old: Option<KeyValue<'a>>,
    /// The record in the second state, if the key exists there.
    pub new: Option<KeyValue<'a>>,
}

impl Diff {
    /// Reads and sorts a range of keys of both states.
    ///
    /// # Errors
    /// As [`Source::for_each_live`].
    pub fn read(ctx: &Context, old: &Source, new: &Source, range: &KeyRange) -> Result<Diff> {
        let side = |source| {
            Ok(Side {
                keys: Keys::read(ctx, source, range.clone())?,
                ended: false,
            })
        };
        Ok(Diff {
            old: side(old)?,
            new: side(new)?,
            order: None,
        })
    }

    /// Returns the next key that differs, in the order of the bytes of keys; `None` at the end. A key that
    /// was put again differs even if its value is the same.
    ///
    /// # Errors
    /// `Io`, `CorruptSnapshot`.
    #[allow(clippy::should_implement_trait)] // the keys borrow from the comparison, which an Iterator cannot express
    pub fn next(&mut self) -> Result<Option<KeyDifference<'_>>> {
        loop {
            let previous = self.order;
            if previous.is_none_or(Ordering::is_le) {
                self.old.advance()?;
            }
            if previous.is_none_or(Ordering::is_ge) {
                self.new.advance()?;
            }
            let order = match (self.old.ended, self.new.ended) {
                (true, true) => return Ok(None),
                (true, false) => Ordering::Greater,
                (false, true) => Ordering::Less,
                (false, false) => self.old.keys.key().cmp(self.new.keys.key()),
            };
            self.order = Some(order);
            // Compare whole records: in two histories, records of the same revision may differ.
            if order.is_ne() || self.old.keys.0.current() != self.new.keys.0.current() {
                break;
            }
        }
        let order = self.order.unwrap_or(Ordering::Equal);
        Ok(Some(KeyDifference {
            old: current(&self.old, order.is_le())?,
            new: current(&self.new, order.is_ge())?,
        }))
    }
}

/// The current record of a side, if it has the key.
fn current(side: &Side, has_key: bool) -> Result<Option<KeyValue<'_>>> {
    match has_key {
        true => side.keys.current().map(Some),
        false => Ok(None),
    }
}
