//! Writes records of leases: etcd's protobuf `leasepb.Lease` in the bucket `lease`.
//!
//! Nothing here reads records. Source: etcd's `server/lease/leasepb/lease.proto` and `server/storage/schema/lease.go`.

use crate::base::protobuf::put_varint;
use std::time::Duration;

/// The name of the bucket.
pub const BUCKET: &[u8] = b"lease";
/// The size of a key in the bucket, in bytes.
pub const KEY_SIZE: usize = 8;

const ID: u64 = 1;
const TTL: u64 = 2;

/// Returns the key of a lease: its ID, big endian.
pub fn key(id: i64) -> [u8; KEY_SIZE] {
    id.to_be_bytes()
}

/// Returns the record of the lease with this key. The time to live begins when etcd starts. It is stored in
/// whole seconds: rounded down, but at least one.
pub fn record(key: [u8; KEY_SIZE], time_to_live: Duration) -> Vec<u8> {
    let seconds = i64::try_from(time_to_live.as_secs()).unwrap_or(i64::MAX);
    let mut out = Vec::new();
    put_varint(&mut out, ID, u64::from_be_bytes(key));
    put_varint(&mut out, TTL, seconds.max(1) as u64);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::protobuf::take_varint;

    #[test]
    fn a_record_is_as_etcd_writes_it() {
        // The bytes that etcd writes for a lease with the ID 0x1234 and a TTL of 300 s.
        let b = record(key(0x1234), Duration::from_secs(300));
        assert_eq!(b, [0x08, 0xb4, 0x24, 0x10, 0xac, 0x02]);
        let mut rest = &record(key(i64::MIN), Duration::ZERO)[1..];
        assert_eq!(take_varint(&mut rest), Some(i64::MIN as u64));
        assert_eq!(rest, [0x10, 1]);
    }
}
