//! Upper limits for the content of snapshots.
//!
//! Others may be able to write to the store, and a small compressed object can unpack to any size. Every
//! reader of snapshots therefore checks these limits; this module itself reads nothing.

use crate::base::opt::{MAX_DATABASE_BYTES, MAX_VALUE_BYTES};
use crate::error::{Error, Reason, Result};
use std::fmt;

/// The default of `--max-database-bytes`. etcd's largest recommended quota is 8 GiB.
pub const DATABASE_BYTES: u64 = 16 << 30;
/// The default of `--max-value-bytes`. etcd accepts requests of 1.5 MiB by default, and warns if a larger
/// limit than 10 MiB is configured.
pub const VALUE_BYTES: u64 = 64 << 20;

/// A delta may have one event for each of these bytes of the largest database.
const DATABASE_BYTES_PER_EVENT: u64 = 4096;

/// An allowance for the fields around a key and its value: revisions and lease in a record, field names and
/// time in an event.
const ENVELOPE_BYTES: u64 = 64 << 10;

/// The largest database and the largest value that are read from a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The maximum size of a database, and of a delta's JSON.
    pub database_bytes: u64,
    /// The maximum size of a key and its value together.
    pub value_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            database_bytes: DATABASE_BYTES,
            value_bytes: VALUE_BYTES,
        }
    }
}

impl Limits {
    /// No limits, for databases that do not come from a store.
    pub const NONE: Limits = Limits {
        database_bytes: u64::MAX,
        value_bytes: u64::MAX,
    };

    /// Fails if a database of this size is not allowed.
    ///
    /// # Errors
    /// `TooLarge`.
    pub fn check_database(&self, bytes: u64) -> Result<()> {
        if bytes > self.database_bytes {
            Err(self.database_too_large(format!("the database has {bytes} bytes")))
        } else {
            Ok(())
        }
    }

    /// Returns the error for a database that is too large. `finding` says what was measured.
    pub(crate) fn database_too_large(&self, finding: impl fmt::Display) -> Error {
        Reason::TooLarge.error(format!(
            "{finding}, but the limit is {}: raise {MAX_DATABASE_BYTES} if you trust the snapshot",
            Bytes(self.database_bytes)
        ))
    }

    /// Returns the error for a key and value that are too large. `finding` says what was measured.
    pub(crate) fn value_too_large(&self, finding: impl fmt::Display) -> Error {
        Reason::TooLarge.error(format!(
            "{finding}, but the limit for a key and its value is {}: raise {MAX_VALUE_BYTES} if you trust the snapshot",
            Bytes(self.value_bytes)
        ))
    }

    /// The maximum size of a database element, which holds revisions beside the key and the value.
    pub(crate) fn element_bytes(&self) -> u64 {
        self.value_bytes.saturating_add(ENVELOPE_BYTES)
    }

    /// The maximum size of an event in JSON, which encodes keys and values in base64.
    pub(crate) fn event_bytes(&self) -> usize {
        let bytes = (self.value_bytes / 3).saturating_mul(4);
        usize::try_from(bytes.saturating_add(ENVELOPE_BYTES)).unwrap_or(usize::MAX)
    }

    /// The maximum number of events in a delta: at least 4,194,304, since small events need few bytes of a
    /// database.
    pub(crate) fn events(&self) -> u64 {
        (self.database_bytes / DATABASE_BYTES_PER_EVENT).max(1 << 22)
    }

    /// Returns the error for a delta with more than [`events`](Self::events) events. The message names the
    /// limit that would allow more: if `database_bytes` is low, raising it a little changes nothing.
    pub(crate) fn too_many_events(&self) -> Error {
        let events = self.events();
        self.database_too_large(format!(
            "the delta has more than {events} events, which takes a limit of more than {}",
            Bytes(events.saturating_mul(DATABASE_BYTES_PER_EVENT))
        ))
    }

    /// The maximum memory, in bytes, for the keys that the deltas of a chain change.
    pub(crate) fn key_memory(&self) -> usize {
        usize::try_from(self.database_bytes / 4).unwrap_or(usize::MAX)
    }
}

/// Formats a size in the largest unit that divides it without remainder.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if self.0 > 0 && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{} {unit}", self.0 >> shift);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_fits_into_an_event_fits_into_an_element() {
        for value_bytes in [0, 1, 1 << 20, VALUE_BYTES, u64::MAX] {
            let limits = Limits {
                value_bytes,
                ..Limits::default()
            };
            let put = limits.event_bytes() as u64 / 4 * 3;
            assert!(put >= value_bytes / 4 * 3);
            assert!(put < limits.element_bytes());
        }
    }

    #[test]
    fn a_low_byte_limit_does_not_lower_the_number_of_events() {
        let events = |database_bytes| {
            let limits = Limits {
                database_bytes,
                ..Limits::default()
            };
            limits.events()
        };
        assert_eq!(events(64 << 20), 1 << 22);
        assert_eq!(events(DATABASE_BYTES), 1 << 22);
        assert_eq!(events(64 << 30), 1 << 24);
        let low = Limits {
            database_bytes: 1 << 30,
            ..Limits::default()
        };
        let message = low.too_many_events().to_string();
        assert!(
            message.contains("4194304 events") && message.contains("more than 16 GiB,"),
            "{message}"
        );
    }

    #[test]
    fn the_error_names_the_limit_and_the_flag() {
        let limits = Limits::default();
        limits.check_database(16 << 30).unwrap();
        let e = limits.check_database((16 << 30) + 1).unwrap_err();
        assert_eq!(e.reason(), Reason::TooLarge);
        let message = e.to_string();
        assert!(message.contains("17179869185 bytes"), "{message}");
        assert!(message.contains("16 GiB") && message.contains("max-database-bytes"));
        assert_eq!(Bytes(3 << 19).to_string(), "1536 KiB");
        assert_eq!(Bytes(1001).to_string(), "1001 bytes");
        Limits::NONE.check_database(u64::MAX).unwrap();
    }
}
