//! Writes the only segment of a restored member's write-ahead log.

use super::segments::segment_name;
use super::{CRC, ENTRY, EntryKind, METADATA, SNAPSHOT, STATE, digest, sum};
use crate::base::protobuf::Value::{Bytes, Varint};
use crate::base::protobuf::message;
use crate::datadir::install::Dir;
use crate::datadir::{Cluster, TERM};
use crate::error::Result;
use crc_fast::Digest;
use std::path::PathBuf;

/// The size of a segment, in bytes. etcd begins a new segment when this size is reached.
pub(super) const SEGMENT_SIZE: u64 = 64_000_000;

/// Writes the segment into `dir`, and syncs both.
///
/// The file has the size of etcd's segments, 64 MB, but is sparse: etcd allocates the disk space when it
/// opens it.
///
/// # Errors
/// `TargetExists`; `Io`, `NoSpace`, `PermissionDenied`.
pub fn create(dir: &Dir, cluster: &Cluster) -> Result<PathBuf> {
    dir.write(&segment_name(0, 0), &encode(cluster), SEGMENT_SIZE)
}

/// Encodes the segment: CRC, metadata, an empty snapshot, a configuration change for each member (sorted by
/// ID, from index 1), the hard state with a vote for the first member, and the snapshot of the `.snap` file.
/// The bytes equal those of etcdutl 3.5 and 3.6; 3.7 omits two zero fields (the ID of the change, and
/// `auto_leave`).
pub fn encode(cluster: &Cluster) -> Vec<u8> {
    let mut log = Encoder {
        crc: digest(0),
        out: Vec::new(),
    };
    log.record(CRC, None);
    log.record(METADATA, Some(&cluster.metadata()));
    log.record(SNAPSHOT, Some(&snapshot(0, 0, None)));
    for (m, index) in cluster.members().iter().zip(1..) {
        let entry = [EntryKind::CONF_CHANGE, TERM, index];
        log.record(ENTRY, Some(&numbers(entry, Some(&m.conf_change()))));
    }
    let state = [TERM, cluster.members()[0].id.0, cluster.index()];
    log.record(STATE, Some(&numbers(state, None)));
    let conf_state = cluster.conf_state();
    let last = snapshot(cluster.index(), TERM, Some(&conf_state));
    log.record(SNAPSHOT, Some(&last));
    log.out
}

/// Encodes a `walpb.Snapshot`: index (1), term (2), conf_state (3).
pub(super) fn snapshot(index: u64, term: u64, conf_state: Option<&[u8]>) -> Vec<u8> {
    numbers([index, term], conf_state)
}

/// Encodes a message with integers from field 1 on, and bytes in the next field.
pub(super) fn numbers<const N: usize>(numbers: [u64; N], bytes: Option<&[u8]>) -> Vec<u8> {
    let numbers = (1..).zip(numbers.map(Varint));
    let bytes = bytes.map(|b| (N as u64 + 1, Bytes(b)));
    message(numbers.chain(bytes))
}

/// A log in memory, with the running CRC of its records.
pub(super) struct Encoder {
    pub(super) crc: Digest,
    pub(super) out: Vec<u8>,
}

impl Encoder {
    /// Appends a frame: length and padding, `walpb.Record`, zeros up to a multiple of 8.
    pub(super) fn record(&mut self, kind: u64, data: Option<&[u8]>) {
        self.crc.update(data.unwrap_or_default());
        let record = numbers([kind, u64::from(sum(&self.crc))], data);
        let padding = record.len().next_multiple_of(8) - record.len();
        let mut length = record.len() as u64;
        if padding > 0 {
            length |= (0x80 | padding as u64) << 56;
        }
        self.out.extend_from_slice(&length.to_le_bytes());
        self.out.extend_from_slice(&record);
        self.out.resize(self.out.len() + padding, 0);
    }
}
