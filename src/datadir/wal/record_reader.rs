//! Reads the records of a write-ahead log, one at a time, through all segments, and checks their CRCs.
//!
//! It does not decode the data of records; [`super`], its only caller, does.

use super::segments::segments;
use super::{CRC, TornRecord, digest, sum};
use crate::base::protobuf::Value::{Bytes, Varint};
use crate::base::protobuf::take_field;
use crate::datadir::{corrupt, open_file};
use crate::error::{Error, Result};
use crc_fast::Digest;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The maximum size of a record. Records of etcd are as large as the largest request, 1.5 MiB by default.
const MAX_RECORD: u64 = 512 << 20;
/// The unit in which disks write. An interrupted write leaves some sectors zero.
const SECTOR: u64 = 512;

/// A record other than a CRC.
pub(super) struct Record<'a> {
    pub(super) kind: u64,
    pub(super) data: &'a [u8],
}

pub(super) struct RecordReader {
    /// The segments that are not open yet, newest first.
    unread_segments: Vec<PathBuf>,
    /// The current segment.
    path: PathBuf,
    file: Option<BufReader<File>>,
    size: u64,
    /// The offset after the last good record.
    offset: u64,
    crc: Digest,
    /// The bytes of the current record and its padding.
    frame: Vec<u8>,
    torn: Option<TornRecord>,
}

impl RecordReader {
    /// Opens the log in `dir`.
    ///
    /// # Errors
    /// `CorruptDataDir` if there is no segment, or one is missing between others; `Io`, `PermissionDenied`.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let segments = segments(dir)?;
        if segments.is_empty() {
            return Err(corrupt(format!(
                "{} has no segment of a write-ahead log",
                dir.display()
            )));
        }
        for w in segments.windows(2) {
            if w[0].0.checked_add(1) != Some(w[1].0) {
                return Err(corrupt(format!(
                    "{} follows {}: segments are missing",
                    w[1].1.display(),
                    w[0].1.display()
                )));
            }
        }
        Ok(RecordReader {
            unread_segments: segments.into_iter().rev().map(|s| s.1).collect(),
            path: dir.to_owned(),
            file: None,
            size: 0,
            offset: 0,
            crc: digest(0),
            frame: Vec::new(),
            torn: None,
        })
    }

    /// Returns the incomplete record at the end of the log, if there is one. Call it after the last record.
    pub(super) fn into_torn(self) -> Option<TornRecord> {
        self.torn
    }

    /// Returns the error for damage at the current position.
    pub(super) fn damaged(&self, finding: impl std::fmt::Display) -> Error {
        corrupt(format!(
            "{} at byte {}: {finding}",
            self.path.display(),
            self.offset
        ))
    }

    fn io(&self, e: std::io::Error) -> Error {
        Error::io(format!("read {}", self.path.display()), e)
    }

    /// Returns the next record that is not a CRC, or `None` at the end.
    ///
    /// # Errors
    /// `CorruptDataDir`; `Io`, `PermissionDenied`.
    pub(super) fn next(&mut self) -> Result<Option<Record<'_>>> {
        loop {
            let Some((record, padding)) = self.next_frame()? else {
                return Ok(None);
            };
            let Some((kind, crc, data)) = parse_record(&self.frame[..record]) else {
                return self.stop_if_torn("invalid record");
            };
            if kind == CRC {
                let previous = sum(&self.crc);
                // It is 0 before the first record, which may be in any segment: older ones may have been
                // removed.
                if previous != 0 && previous != crc {
                    return Err(self.damaged("the segment does not continue the segment before it"));
                }
                self.crc = digest(crc);
            } else {
                self.crc.update(&self.frame[data.clone()]);
                let computed = sum(&self.crc);
                if computed != crc {
                    return self.stop_if_torn(format!(
                        "the CRC-32C of a record is {computed:08x}, but the record says {crc:08x}"
                    ));
                }
            }
            self.offset += 8 + record as u64 + padding;
            if kind != CRC {
                return Ok(Some(Record {
                    kind,
                    data: &self.frame[data],
                }));
            }
        }
    }

    /// Reads the next record and its padding into `self.frame`. Returns their sizes, or `None` at the end.
    fn next_frame(&mut self) -> Result<Option<(usize, u64)>> {
        loop {
            let Some(file) = &mut self.file else {
                let Some(path) = self.unread_segments.pop() else {
                    return Ok(None);
                };
                self.path = path;
                let file = open_file(&self.path).map_err(|e| self.io(e))?;
                self.size = file.metadata().map_err(|e| self.io(e))?.len();
                self.offset = 0;
                self.file = Some(BufReader::with_capacity(1 << 16, file));
                continue;
            };
            let mut length = [0; 8];
            let n = read_full(file, &mut length).map_err(|e| self.io(e))?;
            let length = u64::from_le_bytes(length);
            // The end of the file, or of the written part of a preallocated file.
            if n == 0 || n == 8 && length == 0 {
                self.file = None;
                continue;
            }
            if n < 8 {
                return self.stop_at_torn_record("the length of a record is truncated");
            }
            let record = length & ((1 << 56) - 1);
            let padding = if length >> 63 == 1 {
                length >> 56 & 7
            } else {
                0
            };
            let left = self.size.saturating_sub(self.offset);
            // The sum cannot overflow: the record has at most 56 bits.
            if record + padding > left {
                return self.stop_at_torn_record("a record is longer than the rest of the file");
            }
            if record > MAX_RECORD {
                return Err(self.damaged(format!("a record of {record} bytes exceeds 512 MiB")));
            }
            self.frame.resize((record + padding) as usize, 0);
            let Some(file) = &mut self.file else {
                return Err(Error::internal("a segment was closed while it was read"));
            };
            let n = read_full(file, &mut self.frame).map_err(|e| self.io(e))?;
            if n < self.frame.len() {
                return self.stop_at_torn_record("a record is truncated");
            }
            return Ok(Some((record as usize, padding)));
        }
    }

    /// Whether the record was left by an interrupted write: it is in the last segment, and a sector of it is
    /// zero.
    fn is_torn(&self) -> bool {
        if !self.unread_segments.is_empty() {
            return false;
        }
        let mut rest = &self.frame[..];
        let mut at = self.offset + 8;
        while !rest.is_empty() {
            let n = ((SECTOR - at % SECTOR) as usize).min(rest.len());
            if rest[..n].iter().all(|&b| b == 0) {
                return true;
            }
            rest = &rest[n..];
            at += n as u64;
        }
        false
    }

    /// Ends the log if the record was left by an interrupted write; otherwise it is damaged.
    fn stop_if_torn<T>(&mut self, finding: impl std::fmt::Display) -> Result<Option<T>> {
        if self.is_torn() {
            self.stop_at_torn_record(finding)
        } else {
            Err(self.damaged(finding))
        }
    }

    /// Ends the log before an incomplete record. Like etcd, it does so only in the last segment, where etcd's
    /// `Repair` removes the record; in any other segment etcd refuses to start.
    fn stop_at_torn_record<T>(&mut self, finding: impl std::fmt::Display) -> Result<Option<T>> {
        if !self.unread_segments.is_empty() {
            return Err(self.damaged(finding));
        }
        self.file = None;
        self.torn = Some(TornRecord {
            path: self.path.clone(),
            offset: self.offset,
        });
        Ok(None)
    }
}

/// Fills `buf`, or the beginning of it if the source ends. Returns the number of bytes.
fn read_full(src: &mut impl Read, buf: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match src.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

/// Decodes a `walpb.Record`: type (1), crc (2), data (3). The data is returned as a range of `frame`.
fn parse_record(frame: &[u8]) -> Option<(u64, u32, Range<usize>)> {
    let mut b = frame;
    let (mut kind, mut crc, mut data) = (0, 0, 0..0);
    while !b.is_empty() {
        match take_field(&mut b)? {
            (1, Varint(n)) => kind = n,
            (2, Varint(n)) => crc = u32::try_from(n).ok()?,
            (3, Bytes(x)) => {
                let end = frame.len() - b.len();
                data = end - x.len()..end;
            }
            (0..=3, _) => return None,
            _ => {}
        }
    }
    Some((kind, crc, data))
}
