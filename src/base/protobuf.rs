//! Reads and writes fields in protobuf's wire format, as far as etcd's records need it.
//!
//! It knows no message types; a caller that decodes a message must refuse field number 0. `mvcc` and
//! `datadir` call it. Source: <https://protobuf.dev/programming-guides/encoding/>.

const WIRE_VARINT: u64 = 0;
const WIRE_FIXED64: u64 = 1;
const WIRE_BYTES: u64 = 2;
const WIRE_FIXED32: u64 = 5;

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// An integer, an enum or a bool; a negative int64 is its two's complement.
    Varint(u64),
    /// Bytes, a string, a message or packed numbers.
    Bytes(&'a [u8]),
    /// A 64-bit or 32-bit number of fixed size. Its content is skipped: etcd's records have none.
    Fixed,
}

/// Appends `n` as a varint of 1 to 10 bytes.
#[inline]
pub fn write_varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Returns the size of `n` as a varint: 1 to 10 bytes.
#[inline]
pub fn varint_len(n: u64) -> usize {
    (64 - (n | 1).leading_zeros() as usize).div_ceil(7)
}

/// Appends an integer field, even if the value is 0.
#[inline]
pub fn put_varint(out: &mut Vec<u8>, field: u64, n: u64) {
    write_varint(out, field << 3 | WIRE_VARINT);
    write_varint(out, n);
}

/// Appends a bytes field, even if it is empty.
#[inline]
pub fn put_bytes(out: &mut Vec<u8>, field: u64, b: &[u8]) {
    put_bytes_head(out, field, b.len());
    out.extend_from_slice(b);
}

/// Encodes a message with these fields in this order. Zero and empty values are written; `Fixed` is not.
pub fn message<'a>(fields: impl IntoIterator<Item = (u64, Value<'a>)>) -> Vec<u8> {
    let mut out = Vec::new();
    for (field, value) in fields {
        match value {
            Value::Varint(n) => put_varint(&mut out, field, n),
            Value::Bytes(b) => put_bytes(&mut out, field, b),
            Value::Fixed => {}
        }
    }
    out
}

/// Appends the tag and the length of a bytes field. The caller appends the `len` bytes.
#[inline]
pub fn put_bytes_head(out: &mut Vec<u8>, field: u64, len: usize) {
    write_varint(out, field << 3 | WIRE_BYTES);
    write_varint(out, len as u64);
}

/// Takes the next field off `b` and returns its number and value. Returns `None` if the bytes are not
/// protobuf, or hold a group (deprecated, and unused by etcd).
#[inline]
pub fn take_field<'a>(b: &mut &'a [u8]) -> Option<(u64, Value<'a>)> {
    let tag = take_varint(b)?;
    let value = match tag & 7 {
        WIRE_VARINT => Value::Varint(take_varint(b)?),
        WIRE_BYTES => Value::Bytes(take_bytes(b)?),
        WIRE_FIXED64 => {
            *b = b.get(8..)?;
            Value::Fixed
        }
        WIRE_FIXED32 => {
            *b = b.get(4..)?;
            Value::Fixed
        }
        _ => return None,
    };
    Some((tag >> 3, value))
}

/// Takes a varint off `b`. Returns `None` if it does not end within 10 bytes.
#[inline]
pub fn take_varint(b: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for (i, &x) in b.iter().enumerate().take(10) {
        n |= u64::from(x & 0x7f) << (7 * i);
        if x < 0x80 {
            *b = &b[i + 1..];
            return Some(n);
        }
    }
    None
}

fn take_bytes<'a>(b: &mut &'a [u8]) -> Option<&'a [u8]> {
    let n = usize::try_from(take_varint(b)?).ok()?;
    let (bytes, rest) = b.split_at_checked(n)?;
    *b = rest;
    Some(bytes)
}
