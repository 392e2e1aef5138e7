//! Compares two states key by key.
//!
//! Both states are sorted by key and then read in parallel, so neither has to fit into memory. Values are not
//! interpreted. When a key was deleted is looked up for the first deleted key, since it takes another pass. Called
//! by `cli`.

use super::Keys;
use super::deleted::{DeletedKeys, Deletion};
use super::span::Span;
use crate::base::time::rfc3339;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::ObjectKey;
use crate::objects::resource::changes_all_the_time;
use crate::prefix::open::BackupLocation;
use crate::prefix::open::State;
use crate::prefix::scan::Scan;
use crate::prefix::select::StateRequest;
use crate::prefix::set_aside::{Purpose, decide_again};
use serde::Serialize;
use std::cmp::Ordering;

/// A comparison of two states.
pub struct Diff<'c> {
    backup: &'c BackupLocation,
    /// The first state.
    pub from: State,
    /// The second state.
    pub to: State,
    range: KeyRange,
    /// The snapshots of the store; `None` for a plain snapshot file.
    scan: Option<Scan>,
    old: Side,
    new: Side,
    /// How the current keys of both sides compare: `Less` if the old one is lower. `None` before the first
    /// key.
    order: Option<Ordering>,
    /// Read when the first key is found that was deleted.
    deletions: Option<DeletedKeys>,
    /// Whether a state has a key.
    has_keys: bool,
    /// Whether changes of Events and Leases are only counted: they happen all the time.
    pub omits_events_and_leases: bool,
    /// What was counted so far.
    pub omitted: Omitted,
}

/// The changes that are not listed: those of Events and Leases, unless names or a prefix say what is compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Omitted {
    /// Number of changed Events.
    pub events: u64,
    /// Number of changed Leases, and of those that API servers have of themselves.
    pub leases: u64,
}

impl Omitted {
    /// Counts a change if it is omitted.
    fn takes(&mut self, kv: &KeyValue<'_>) -> bool {
        match ObjectKey::from_key(kv.key, Some(kv.value)).map(|o| o.resource) {
            Some("events") => self.events += 1,
            Some(other) if changes_all_the_time(other) => self.leases += 1,
            _ => return false,
        }
        true
    }
}

/// The keys of a state, which are walked.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) keys: Keys,
    pub(super) ended: bool,
}

impl Side {
    pub(super) fn advance(&mut self) -> Result<()> {
        self.ended = self.ended || !self.keys.advance()?;
        Ok(())
    }
}

/// A key that differs between the states. At least one of the records is present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyDifference<'a> {
    /// The record in the first state, if the key exists there.
    pub old: Option<KeyValue<'a>>,
    /// The record in the second state, if the key exists there.
    pub new: Option<KeyValue<'a>>,
    /// When the key was deleted; `None` if the second state has it.
    pub deletion: Option<Deletion>,
}

impl<'c> Diff<'c> {
    /// Reads and sorts a range of keys of two states, which `range` chooses by one of them. The first state is of the
    /// backup `first`, or of `backup`, too.
    ///
    /// # Errors
    /// Those of `range`; as [`State::open`] and [`State::for_each_live`].
    pub fn read(
        backup: &'c BackupLocation,
        first: Option<&BackupLocation>,
        [from, to]: [&StateRequest; 2],
        range: &impl Fn(&BackupLocation, &State) -> Result<KeyRange>,
    ) -> Result<Self> {
        let mut contexts = vec![backup.context()];
        if let Some(first) = first {
            contexts.push(first.context());
        }
        decide_again(contexts, Purpose::Read, || {
            Self::try_read(backup, first, [from, to], range)
        })
    }

    fn try_read(
        backup: &'c BackupLocation,
        first: Option<&BackupLocation>,
        [from, to]: [&StateRequest; 2],
        range: &dyn Fn(&BackupLocation, &State) -> Result<KeyRange>,
    ) -> Result<Self> {
        let first = first.unwrap_or(backup);
        let (from, _) = first.open_with_scan(from)?;
        let (to, scan) = backup.open_with_scan(to)?;
        // A kind may be defined in one of the states alone.
        let range = match range(backup, &to) {
            Err(e) if e.reason() == Reason::KeyNotFound => range(first, &from)?,
            range => range?,
        };
        let side = |backup: &BackupLocation, state: &State| {
            let keys = Keys::read(backup.context(), state, range.clone())?;
            Ok::<_, Error>(Side { keys, ended: false })
        };
        Ok(Diff {
            backup,
            old: side(first, &from)?,
            new: side(backup, &to)?,
            from,
            to,
            range,
            scan,
            order: None,
            deletions: None,
            has_keys: false,
            omits_events_and_leases: false,
            omitted: Omitted::default(),
        })
    }

    /// Whether a key of the range exists in a state. It is known when [`next`](Self::next) has returned the end.
    pub fn has_keys(&self) -> bool {
        self.has_keys
    }

    /// The revisions of both states.
    pub fn revisions(&self) -> (Revision, Revision) {
        (self.from.revision, self.to.revision)
    }

    /// Returns when the current key, which only the first state has, was deleted.
    fn deletion(&mut self) -> Result<Deletion> {
        let deletions = match &mut self.deletions {
            Some(deletions) => deletions,
            None => {
                let span = Span {
                    backup: self.backup,
                    scan: self.scan.as_ref(),
                    state: &self.to,
                    from: None,
                    revisions: (self.from.revision.next(), self.to.revision),
                };
                self.deletions.insert(span.dates(&self.range, None)?)
            }
        };
        let deleted = deletions.of(self.old.keys.key())?;
        // If the second state is the earlier one, the key was created after it.
        let full = self.to.base_snapshot();
        let full = full.filter(|_| self.to.revision > self.from.revision);
        Ok(deleted.map(|d| d.deletion).unwrap_or_else(|| Deletion {
            not_after: full.map(|full| rfc3339(full.name.created_at())),
            ..Deletion::default()
        }))
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
            self.has_keys = true;
            // Compare whole records: in two histories, records of the same revision may differ.
            if order.is_eq() && self.old.keys.0.current() == self.new.keys.0.current() {
                continue;
            }
            let side = if order.is_le() { &self.old } else { &self.new };
            if !self.omits_events_and_leases || !self.omitted.takes(&side.keys.current()?) {
                break;
            }
        }
        let order = self.order.unwrap_or(Ordering::Equal);
        let deletion = match order {
            Ordering::Less => Some(self.deletion()?),
            Ordering::Equal | Ordering::Greater => None,
        };
        Ok(Some(KeyDifference {
            deletion,
            old: current(&self.old, order.is_le())?,
            new: current(&self.new, order.is_ge())?,
        }))
    }
}

/// The current record of a side, if it has the key.
fn current(side: &Side, has_key: bool) -> Result<Option<KeyValue<'_>>> {
    if has_key {
        side.keys.current().map(Some)
    } else {
        Ok(None)
    }
}
