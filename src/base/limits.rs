//! How much a snapshot may hold. Its bytes come from a bucket that others may write to, and a small object can
//! unpack to anything.
//!
//! It reads nothing; who reads a snapshot asks it.

use crate::error::{Error, Reason, Result};
use std::fmt;

/// The largest database, unless the user says otherwise. etcd's largest recommended quota is 8 GiB.
pub const DATABASE_BYTES: u64 = 16 << 30;
/// The largest key and value together, unless the user says otherwise. etcd takes requests of 1.5 MiB by default, and
/// warns if more than 10 MiB are allowed.
pub const VALUE_BYTES: u64 = 64 << 20;

/// An event for so many bytes of a database.
const DATABASE_PER_EVENT: u64 = 4096;

/// What stands around a key and a value: revisions and lease in a record; fields and time in an event.
const AROUND: u64 = 64 << 10;

/// The largest snapshot that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a database, and of a delta's JSON.
    pub database_bytes: u64,
    /// Bytes of a key and its value together.
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
    /// For what does not come from a bucket.
    pub const NONE: Limits = Limits {
        database_bytes: u64::MAX,
        value_bytes: u64::MAX,
    };

    /// Fails if a database has more bytes than are allowed.
    ///
    /// # Errors
    /// `TooLarge`.
    pub fn check_database(&self, bytes: u64) -> Result<()> {
        match bytes > self.database_bytes {
            true => Err(self.database_too_large(format!("its database has {bytes} bytes"))),
            false => Ok(()),
        }
    }

    /// `what` goes beyond what a database may have.
    pub(crate) fn database_too_large(&self, what: impl fmt::Display) -> Error {
        Reason::TooLarge.error(format!(
            "{what}, and no more than {} are allowed: raise --max-database-bytes if the snapshot is yours",
            Bytes(self.database_bytes)
        ))
    }

    /// An element of so many bytes is longer than is allowed.
    pub(crate) fn value_too_large(&self, what: impl fmt::Display) -> Error {
        Reason::TooLarge.error(format!(
            "{what}, and a key and its value may have no more than {}: raise --max-value-bytes if the snapshot is yours",
            Bytes(self.value_bytes)
        ))
    }

    /// The longest element of a database: a record has its revisions beside the key and the value.
    pub(crate) fn element_bytes(&self) -> u64 {
        self.value_bytes.saturating_add(AROUND)
    }

    /// The longest event in JSON, in which keys and values are base64.
    pub(crate) fn event_bytes(&self) -> usize {
        let bytes = (self.value_bytes / 3).saturating_mul(4);
        usize::try_from(bytes.saturating_add(AROUND)).unwrap_or(usize::MAX)
    }

    /// Events of one delta. Small events need few bytes of a database, so a low limit of bytes does not lower this.
    pub(crate) fn events(&self) -> u64 {
        (self.database_bytes / DATABASE_PER_EVENT).max(1 << 22)
    }

    /// A delta has more than [`events`](Self::events). A low limit has to grow by more than a little.
    pub(crate) fn too_many_events(&self) -> Error {
        let events = self.events();
        self.database_too_large(format!(
            "the delta has more than {events} events, which more than {} of a database allow",
            Bytes(events.saturating_mul(DATABASE_PER_EVENT))
        ))
    }

    /// Bytes of memory for the keys that all deltas of a chain touch.
    pub(crate) fn key_memory(&self) -> usize {
        usize::try_from(self.database_bytes / 4).unwrap_or(usize::MAX)
    }
}

/// A size, for people: in the largest unit that divides it.
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
    fn what_an_event_may_hold_fits_into_an_element() {
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
    fn a_low_limit_allows_as_many_events_as_the_usual_one() {
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
        let said = low.too_many_events().to_string();
        assert!(
            said.contains("4194304 events") && said.contains("more than 16 GiB of"),
            "{said}"
        );
    }

    #[test]
    fn the_message_says_how_much_is_allowed_and_which_flag_raises_it() {
        let limits = Limits::default();
        limits.check_database(16 << 30).unwrap();
        let e = limits.check_database((16 << 30) + 1).unwrap_err();
        assert_eq!(e.reason(), Reason::TooLarge);
        let said = e.to_string();
        assert!(said.contains("17179869185 bytes"), "{said}");
        assert!(said.contains("16 GiB") && said.contains("--max-database-bytes"));
        assert_eq!(Bytes(3 << 19).to_string(), "1536 KiB");
        assert_eq!(Bytes(1001).to_string(), "1001 bytes");
        Limits::NONE.check_database(u64::MAX).unwrap();
    }
}
