//! Writes records of leases: etcd's protobuf `leasepb.Lease` in the bucket `lease`.
//!
//! Source: etcd's `server/lease/leasepb/lease.proto` and `server/storage/schema/lease.go`.

use crate::base::ReadAt;
use crate::base::protobuf::{Value, put_varint, take_field};
use crate::bolt::Database;
use crate::error::Result;
use std::collections::HashMap;
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

/// Returns how long the leases of a database live that are wanted. Records without that are left out.
///
/// # Errors
/// `CorruptSnapshot`, `Io`.
pub fn times_to_live<R: ReadAt>(
    db: &Database<R>,
    is_wanted: impl Fn(i64) -> bool,
) -> Result<HashMap<i64, Duration>> {
    let mut all = HashMap::new();
    let Some(bucket) = db.bucket(BUCKET)? else {
        return Ok(all);
    };
    let mut c = db.cursor(&bucket);
    while let Some(e) = c.next()? {
        let id = <[u8; KEY_SIZE]>::try_from(e.key).map(i64::from_be_bytes);
        if let (Ok(id), Some(time)) = (id, time_to_live(e.value))
            && is_wanted(id)
        {
            all.insert(id, time);
        }
    }
    Ok(all)
}

/// Returns the time to live of a record; `None` if it has none.
fn time_to_live(mut record: &[u8]) -> Option<Duration> {
    loop {
        match take_field(&mut record)? {
            (TTL, Value::Varint(seconds)) => {
                // A negative number is damage.
                let seconds = i64::try_from(seconds).ok().filter(|s| *s > 0)?;
                return Some(Duration::from_secs(seconds.unsigned_abs()));
            }
            _ => continue,
        }
    }
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
        assert_eq!(time_to_live(&b), Some(Duration::from_secs(300)));
        assert_eq!(time_to_live(&b[..3]), None);
        let mut rest = &record(key(i64::MIN), Duration::ZERO)[1..];
        assert_eq!(take_varint(&mut rest), Some(i64::MIN as u64));
        assert_eq!(rest, [0x10, 1]);
    }
}
