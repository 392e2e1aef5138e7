//! Revisions, and the keys of the `key` bucket, which consist of revisions.
//!
//! Source of the format: etcd's `server/storage/mvcc/revision.go`.

use crate::error::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A main revision of the store: it grows by one with every transaction that changes something.
/// A new etcd is at 1; 0 and below never hold a change. Range: 0 to `i64::MAX`.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(transparent)]
pub struct Revision(pub i64);

impl Revision {
    /// What etcd reports as the compacted revision of a store that was never compacted.
    pub const NONE: Revision = Revision(-1);

    /// Returns the revision after this one.
    pub fn next(self) -> Revision {
        Revision(self.0.saturating_add(1))
    }

    /// Returns the revision before this one.
    pub fn previous(self) -> Revision {
        Revision(self.0.saturating_sub(1))
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The size of a record's key in the `key` bucket, without the mark of a tombstone, in bytes.
pub const RECORD_KEY_SIZE: usize = 17;
const TOMBSTONE_MARK: u8 = b't';

/// The key of a record in the `key` bucket, which identifies a change in a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordKey {
    /// The revision of the transaction.
    pub main: Revision,
    /// The index of the change within the transaction, from 0.
    pub sub: u32,
    /// Whether the change deleted the key.
    pub tombstone: bool,
}

impl RecordKey {
    /// Appends the bytes: main (8 bytes, big endian), `_`, sub (8 bytes, big endian), and `t` if it is a
    /// tombstone.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&encode_revision(self.main, self.sub));
        if self.tombstone {
            out.push(TOMBSTONE_MARK);
        }
    }

    /// Decodes a key of the `key` bucket.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the length or the separators are wrong.
    pub fn decode(b: &[u8]) -> Result<Self> {
        let bad = || {
            Error::corrupt(format!(
                "a key of {} bytes in the bucket \"key\" is not a revision",
                b.len()
            ))
        };
        let tombstone = match b.len() {
            RECORD_KEY_SIZE => false,
            n if n == RECORD_KEY_SIZE + 1 && b[RECORD_KEY_SIZE] == TOMBSTONE_MARK => true,
            _ => return Err(bad()),
        };
        let (main, sub) = decode_revision(b).ok_or_else(bad)?;
        Ok(RecordKey {
            main,
            sub,
            tombstone,
        })
    }
}

/// Encodes a revision in 17 bytes, as in the keys of `key` and the values of `meta`.
pub fn encode_revision(main: Revision, sub: u32) -> [u8; RECORD_KEY_SIZE] {
    let mut b = [b'_'; RECORD_KEY_SIZE];
    b[..8].copy_from_slice(&main.0.to_be_bytes());
    b[9..].copy_from_slice(&u64::from(sub).to_be_bytes());
    b
}

/// Decodes a revision, as (main, sub), from the first 17 bytes of `b`. Returns `None` if they are invalid.
pub fn decode_revision(b: &[u8]) -> Option<(Revision, u32)> {
    let main = i64::from_be_bytes(b.get(..8)?.try_into().ok()?);
    let sub = u64::from_be_bytes(b.get(9..RECORD_KEY_SIZE)?.try_into().ok()?);
    if main < 0 || b[8] != b'_' {
        return None;
    }
    Some((Revision(main), u32::try_from(sub).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_keys_survive_encoding_and_sort_like_their_bytes() {
        let keys = [
            (0, 0, false),
            (1, 0, false),
            (1, 1, true),
            (2, 0, true),
            (1 << 40, 3, false),
        ];
        let mut last = Vec::new();
        for (main, sub, tombstone) in keys {
            let k = RecordKey {
                main: Revision(main),
                sub,
                tombstone,
            };
            let mut b = Vec::new();
            k.encode(&mut b);
            assert_eq!(b.len(), 17 + usize::from(tombstone));
            assert_eq!(RecordKey::decode(&b).unwrap(), k);
            assert!(b > last);
            last = b;
        }
        for bad in [&b"short"[..], &[0; 19], &[0xff; 17], &[0; 17]] {
            assert!(RecordKey::decode(bad).is_err());
        }
    }
}
