//! The record of a change of a key: etcd's protobuf `mvccpb.KeyValue`.
//!
//! The encoder writes the same bytes as etcd (fields in the order of their numbers, zero fields omitted),
//! because HashKV covers these bytes. Source: etcd's `api/mvccpb/kv.proto`.

use crate::base::protobuf::{Value, put_bytes, put_bytes_head, put_varint, take_field, varint_len};
use crate::error::{Error, Result};
use crate::mvcc::Revision;

/// One version of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyValue<'a> {
    /// The key; never empty.
    pub key: &'a [u8],
    /// The revision in which the key was created; 0 in a tombstone.
    pub create_revision: Revision,
    /// The revision of this version; 0 in a tombstone.
    pub mod_revision: Revision,
    /// The number of changes since the key was created, including that one: 1 or more; 0 in a tombstone.
    pub version: i64,
    /// The value; may be empty.
    pub value: &'a [u8],
    /// The ID of the lease that the key is attached to, or 0.
    pub lease: i64,
}

const KEY: u64 = 1;
const CREATE_REVISION: u64 = 2;
const MOD_REVISION: u64 = 3;
const VERSION: u64 = 4;
const VALUE: u64 = 5;
const LEASE: u64 = 6;

impl<'a> KeyValue<'a> {
    /// Whether this version created the key.
    pub fn is_new(&self) -> bool {
        self.create_revision == self.mod_revision
    }

    /// Creates the record of a deletion, which has only a key.
    pub fn tombstone(key: &'a [u8]) -> Self {
        KeyValue {
            key,
            ..KeyValue::default()
        }
    }

    /// Appends the protobuf bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.encode_before(out, self.value.len());
        out.extend_from_slice(self.value);
        put_number(out, LEASE, self.lease);
    }

    /// Appends the protobuf bytes with another value, of `value_len` bytes, which `write` appends.
    ///
    /// # Errors
    /// The error of `write`; `Internal` if it appends another number of bytes.
    pub fn encode_with(
        &self,
        out: &mut Vec<u8>,
        value_len: usize,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        self.encode_before(out, value_len);
        let value_at = out.len();
        write(out)?;
        let written = out.len() - value_at;
        if written != value_len {
            return Err(Error::internal(format!(
                "a value has {written} bytes instead of {value_len}"
            )));
        }
        put_number(out, LEASE, self.lease);
        Ok(())
    }

    /// Appends everything before the bytes of the value.
    fn encode_before(&self, out: &mut Vec<u8>, value_len: usize) {
        out.reserve(self.key.len() + value_len + 64);
        put_data(out, KEY, self.key);
        put_number(out, CREATE_REVISION, self.create_revision.0);
        put_number(out, MOD_REVISION, self.mod_revision.0);
        put_number(out, VERSION, self.version);
        if value_len > 0 {
            put_bytes_head(out, VALUE, value_len);
        }
    }

    /// Returns the number of bytes that [`encode`](Self::encode) would append if the value had `value_len`
    /// bytes.
    pub fn encoded_len(&self, value_len: usize) -> usize {
        let bytes = |n: usize| match n {
            0 => 0,
            n => 1 + varint_len(n as u64) + n,
        };
        let varint = |n: i64| match n {
            0 => 0,
            n => 1 + varint_len(n as u64),
        };
        bytes(self.key.len())
            + varint(self.create_revision.0)
            + varint(self.mod_revision.0)
            + varint(self.version)
            + bytes(value_len)
            + varint(self.lease)
    }

    /// Decodes the protobuf bytes, and skips unknown fields.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the bytes are not a `mvccpb.KeyValue`.
    pub fn decode(b: &'a [u8]) -> Result<Self> {
        Self::parse(b).ok_or_else(|| {
            Error::corrupt("a record in the bucket \"key\" is not a valid mvccpb.KeyValue")
        })
    }

    fn parse(mut b: &'a [u8]) -> Option<Self> {
        let mut kv = KeyValue::default();
        while !b.is_empty() {
            match take_field(&mut b)? {
                (KEY, Value::Bytes(x)) => kv.key = x,
                (VALUE, Value::Bytes(x)) => kv.value = x,
                (CREATE_REVISION, Value::Varint(n)) => kv.create_revision = Revision(n as i64),
                (MOD_REVISION, Value::Varint(n)) => kv.mod_revision = Revision(n as i64),
                (VERSION, Value::Varint(n)) => kv.version = n as i64,
                (LEASE, Value::Varint(n)) => kv.lease = n as i64,
                (KEY..=LEASE, _) | (0, _) => return None,
                _ => {}
            }
        }
        Some(kv)
    }
}

/// Appends a number field; like etcd, it omits a zero.
fn put_number(out: &mut Vec<u8>, field: u64, n: i64) {
    if n != 0 {
        put_varint(out, field, n as u64);
    }
}

/// Appends a bytes field; like etcd, it omits an empty one.
fn put_data(out: &mut Vec<u8>, field: u64, b: &[u8]) {
    if !b.is_empty() {
        put_bytes(out, field, b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_encoding_and_invalid_bytes_are_refused() {
        let kv = KeyValue {
            key: b"/registry/pods/a",
            create_revision: Revision(300),
            mod_revision: Revision(1 << 40),
            version: 2,
            value: b"",
            lease: i64::MIN + 5,
        };
        let mut b = Vec::new();
        kv.encode(&mut b);
        assert_eq!(KeyValue::decode(&b).unwrap(), kv);
        assert_eq!(kv.encoded_len(0), b.len());
        for len in [1, 127, 128, 20_000] {
            let value = vec![7; len];
            let mut b = Vec::new();
            KeyValue {
                value: &value,
                ..kv
            }
            .encode(&mut b);
            assert_eq!(kv.encoded_len(len), b.len());
        }
        // etcd writes a tombstone of "a" as 0a 01 61.
        let mut t = Vec::new();
        KeyValue::tombstone(b"a").encode(&mut t);
        assert_eq!(t, b"\x0a\x01a");
        for cut in 1..b.len() {
            if let Ok(short) = KeyValue::decode(&b[..cut]) {
                assert_ne!(short, kv);
            }
        }
        assert!(KeyValue::decode(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f").is_err());
    }
}
