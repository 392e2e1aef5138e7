//! A change of one key, as a delta or a database has it, and the state that it leaves the key in.
//!
//! `backup::delta` and `ops` produce changes; `fold` and `ops::snapshot` consume them.

use super::keys::KeyState;
use crate::error::{Error, Result};
use crate::mvcc::record::KeyValue;
use crate::mvcc::revision::{RecordKey, Revision};
use base64_simd::STANDARD;

/// A change of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// A put, with the key's new record. Its `mod_revision` is the revision of the change.
    Put(KeyValue<'a>),
    /// A put whose record has its value still in base64 (standard alphabet, with padding).
    PutBase64(KeyValue<'a>),
    /// A deletion.
    Delete {
        /// The deleted key.
        key: &'a [u8],
    },
}

impl Change<'_> {
    /// Returns the changed key.
    pub fn key(&self) -> &[u8] {
        match self {
            Change::Put(kv) | Change::PutBase64(kv) => kv.key,
            Change::Delete { key } => key,
        }
    }

    /// Returns the size of the decoded value in bytes. `revision` is that of the change, for the message.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the value is not valid base64.
    pub(super) fn value_len(&self, revision: Revision) -> Result<usize> {
        match self {
            Change::Put(kv) => Ok(kv.value.len()),
            Change::PutBase64(kv) => STANDARD
                .decoded_length(kv.value)
                .map_err(|e| not_base64(revision, &e)),
            Change::Delete { .. } => Ok(0),
        }
    }

    /// Returns the state of the key after the change.
    pub(super) fn state_after(&self) -> KeyState {
        match self {
            Change::Put(kv) | Change::PutBase64(kv) => KeyState::Alive {
                create: kv.create_revision,
                version: kv.version,
            },
            Change::Delete { .. } => KeyState::Gone,
        }
    }

    /// Appends the decoded value, or nothing for a deletion. `main` is the revision of the change, for the
    /// message.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the value is not valid base64.
    pub fn append_value(&self, main: Revision, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Change::Put(kv) => out.extend_from_slice(kv.value),
            // The decoder is as fast as a copy.
            Change::PutBase64(kv) => STANDARD
                .decode_append(kv.value, out)
                .map_err(|e| not_base64(main, &e))?,
            Change::Delete { .. } => {}
        }
        Ok(())
    }
}

fn not_base64(revision: Revision, e: &base64_simd::Error) -> Error {
    Error::corrupt(format!(
        "the value of an event at revision {revision} is not valid base64: {e}"
    ))
}

/// Returns the state of a key after a change that is recorded in a database.
pub(super) fn state_after_record(rk: &RecordKey, kv: KeyValue<'_>) -> KeyState {
    if rk.tombstone {
        KeyState::Gone
    } else {
        Change::Put(kv).state_after()
    }
}
