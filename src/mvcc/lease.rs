//! The records of leases: etcd's protobuf `leasepb.Lease` in the bucket `lease`.
//!
//! Only what a restore writes: it reads none. Source: etcd's `server/lease/leasepb/lease.proto` and
//! `server/storage/schema/lease.go`.

use crate::base::protobuf::put_varint;
use std::time::Duration;

/// The bucket of leases.
pub const BUCKET: &[u8] = b"lease";
/// Bytes of a lease's key.
pub const KEY_SIZE: usize = 8;

const ID: u64 = 1;
const TTL: u64 = 2;

/// The key of a lease: its ID, big endian.
pub fn key(id: i64) -> [u8; KEY_SIZE] {
    id.to_be_bytes()
}

/// The record of a lease that lives so long (in whole seconds, at least one) from when etcd starts.
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
        // etcd's own bytes of a lease with the ID 0x1234 and a TTL of 300 s begin so.
        let b = record(key(0x1234), Duration::from_secs(300));
        assert_eq!(b, [0x08, 0xb4, 0x24, 0x10, 0xac, 0x02]);
        let mut rest = &record(key(i64::MIN), Duration::ZERO)[1..];
        assert_eq!(take_varint(&mut rest), Some(i64::MIN as u64));
        assert_eq!(rest, [0x10, 1]);
    }
}
