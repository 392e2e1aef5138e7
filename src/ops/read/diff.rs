//! What changed between two states, key by key.
//!
//! Both are sorted first and then walked side by side. `cli` calls it.

use super::Keys;
use crate::error::Result;
use crate::mvcc::{KeyRange, KeyValue};
use crate::ops::Context;
use crate::ops::fold::Source;
use std::cmp::Ordering;

/// Two states, side by side.
#[derive(Debug)]
pub struct Diff {
    old: Side,
    new: Side,
    /// Where the walk stands: which side has the lower key. `None` before the first.
    at: Option<Ordering>,
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

/// A key that is not the same in both states; on one side it may not be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed<'a> {
    /// In the first state.
    pub old: Option<KeyValue<'a>>,
    /// In the second.
    pub new: Option<KeyValue<'a>>,
}

impl Diff {
    /// Reads both states.
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
            at: None,
        })
    }

    /// The next key that differs, in the order of the keys' bytes; `None` at the end. A key that was
    /// put again counts as changed, with the same value too.
    ///
    /// # Errors
    /// `Io`, `CorruptSnapshot`.
    #[allow(clippy::should_implement_trait)] // it lends: an Iterator cannot
    pub fn next(&mut self) -> Result<Option<Changed<'_>>> {
        loop {
            let at = self.at;
            if at.is_none_or(Ordering::is_le) {
                self.old.advance()?;
            }
            if at.is_none_or(Ordering::is_ge) {
                self.new.advance()?;
            }
            let order = match (self.old.ended, self.new.ended) {
                (true, true) => return Ok(None),
                (true, false) => Ordering::Greater,
                (false, true) => Ordering::Less,
                (false, false) => self.old.keys.key().cmp(self.new.keys.key()),
            };
            self.at = Some(order);
            // Records of one history are the same where their revisions are; of two they may differ.
            if order.is_ne() || self.old.keys.0.current() != self.new.keys.0.current() {
                break;
            }
        }
        let order = self.at.unwrap_or(Ordering::Equal);
        Ok(Some(Changed {
            old: current(&self.old, order.is_le())?,
            new: current(&self.new, order.is_ge())?,
        }))
    }
}

fn current(side: &Side, there: bool) -> Result<Option<KeyValue<'_>>> {
    match there {
        true => side.keys.current().map(Some),
        false => Ok(None),
    }
}
