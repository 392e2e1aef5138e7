//! A plain snapshot file that is read in place, without a copy.
//!
//! Other processes may change the file meanwhile. So each block has a checksum: the first read notes it, and
//! every later read must find the same: what is read is what was hashed. The format is not known here.

use super::ahead::ThreadedReader;
use crate::backup::frame::HASH_SIZE;
use crate::base::read_all::for_each_piece;
use crate::base::{Cancel, ReadAt, Sequential};
use crate::error::{Error, Result};
use crate::telemetry::progress::Step;
use crc_fast::{CrcAlgorithm, Digest};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The size of a block in bytes, unless the file has too many of them.
const MIN_BLOCK: u64 = 4 << 10;
/// The most blocks of a file. A larger file has larger blocks.
const MAX_BLOCKS: u64 = 1 << 19;

/// Hashes all bytes of a stream but the last 32, and holds those.
#[derive(Default)]
pub(super) struct TrailingHash {
    hash: Sha256,
    /// The last bytes so far, which are not hashed yet.
    last: Vec<u8>,
}

impl TrailingHash {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        let still_last = HASH_SIZE.saturating_sub(bytes.len());
        let to_hash = self.last.len().saturating_sub(still_last);
        self.hash.update(&self.last[..to_hash]);
        self.last.drain(..to_hash);
        let (hashed, last) = bytes.split_at(bytes.len().saturating_sub(HASH_SIZE));
        self.hash.update(hashed);
        self.last.extend_from_slice(last);
    }

    /// Checks that the last 32 bytes are the hash of those before them.
    pub(super) fn check(self) -> Result<()> {
        if self.hash.finalize().as_slice() == self.last {
            Ok(())
        } else {
            Err(Error::corrupt(
                "its SHA-256 does not match: the file is damaged; use another copy or another snapshot",
            ))
        }
    }
}

/// A file that is read in place.
#[derive(Debug)]
pub(super) struct InPlaceFile {
    file: File,
    bytes: u64,
    /// The size of a block in bytes, a power of two.
    block: u64,
    /// The checksum of each block that was read; 0 for the others.
    checksums: Vec<AtomicU64>,
}

/// The bit that marks a noted checksum.
const NOTED: u64 = 1 << 32;

impl InPlaceFile {
    /// Creates a reader of `file`, which has `bytes` bytes.
    pub(super) fn new(file: File, bytes: u64) -> Self {
        let block = bytes
            .div_ceil(MAX_BLOCKS)
            .next_power_of_two()
            .max(MIN_BLOCK);
        let blocks = bytes.div_ceil(block);
        InPlaceFile {
            file,
            bytes,
            block,
            checksums: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Reads whole blocks, and checks them against their checksums. Only the last block of the file may be
    /// shorter.
    fn read_blocks(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let read = FileExt::read_exact_at(&self.file, buf, offset);
        read.map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => changed_error().into(),
            _ => e,
        })?;
        let checksums = &self.checksums[(offset / self.block) as usize..];
        for (block, checksum) in buf.chunks(self.block as usize).zip(checksums) {
            let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
            digest.update(block);
            let found = NOTED | digest.finalize();
            let noted = checksum.compare_exchange(0, found, Ordering::Relaxed, Ordering::Relaxed);
            if noted.is_err_and(|noted| noted != found) {
                return Err(changed_error().into());
            }
        }
        Ok(())
    }

    /// Hashes the file, and compares the hash with the one at its end.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the hash does not match, or if the file was changed; `Io`, `Terminated`.
    pub(super) fn check(self: &Arc<Self>, cancel: &Cancel, progress: &Step) -> Result<()> {
        let mut hash = TrailingHash::default();
        let ahead = ThreadedReader::new(Sequential::new(self.clone(), self.bytes))?;
        let failed = |e| Error::io("read the snapshot", e);
        for_each_piece(ahead, cancel, failed, |piece| {
            hash.update(piece);
            progress.add(piece.len() as u64);
            Ok(())
        })?;
        hash.check()
    }
}

fn changed_error() -> Error {
    Error::corrupt(
        "it was changed while it was read: wait until nothing writes to it, or give a copy",
    )
}

impl ReadAt for InPlaceFile {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset
            .checked_add(buf.len() as u64)
            .filter(|&end| end <= self.bytes)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        let from = offset - offset % self.block;
        let to = end.next_multiple_of(self.block).min(self.bytes);
        if (from, to) == (offset, end) {
            return self.read_blocks(buf, offset);
        }
        let mut blocks = vec![0; (to - from) as usize];
        self.read_blocks(&mut blocks, from)?;
        buf.copy_from_slice(&blocks[(offset - from) as usize..][..buf.len()]);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Reason;
    use std::io::Write;

    /// A file of random bytes, followed by their hash.
    fn file(bytes: usize) -> (File, Vec<u8>) {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let mut all = vec![0; bytes];
        rng.fill(&mut all);
        let hash = Sha256::digest(&all);
        all.extend_from_slice(&hash);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&all).unwrap();
        (file, all)
    }

    fn check(file: &Arc<InPlaceFile>) -> Result<()> {
        file.check(&Cancel::default(), &Step::new("hash", None))
    }

    #[test]
    fn any_part_can_be_read_and_the_hash_is_checked() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let chunk = 256 << 10;
        for bytes in [0, 4096, chunk - 16, chunk, chunk + 5, 3 * chunk] {
            let (file, all) = file(bytes);
            let open = |file: &File| {
                Arc::new(InPlaceFile::new(
                    file.try_clone().unwrap(),
                    all.len() as u64,
                ))
            };
            let in_place = open(&file);
            for _ in 0..50 {
                let from = rng.usize(..=all.len());
                let mut out = vec![0; rng.usize(..=all.len() - from)];
                ReadAt::read_exact_at(&in_place, &mut out, from as u64).unwrap();
                assert!(out == all[from..from + out.len()]);
            }
            let mut out = [0; 2];
            for past in [all.len() as u64 - 1, all.len() as u64, u64::MAX] {
                ReadAt::read_exact_at(&in_place, &mut out, past).unwrap_err();
            }
            check(&in_place).unwrap();
            let at = rng.usize(..all.len());
            file.write_all_at(&[!all[at]], at as u64).unwrap();
            let e = check(&open(&file)).unwrap_err();
            assert!(e.to_string().contains("SHA-256"), "{e}");
        }
    }

    #[test]
    fn the_last_32_bytes_are_not_hashed_whatever_the_pieces_are() {
        let payload: Vec<u8> = (0..200).collect();
        let mut all = payload.clone();
        all.extend_from_slice(&Sha256::digest(&payload));
        for piece in [1, 7, 31, 32, 33, 64, 200, 500] {
            let mut trailing_hash = TrailingHash::default();
            all.chunks(piece).for_each(|c| trailing_hash.update(c));
            assert!(trailing_hash.check().is_ok(), "{piece}");
            let mut trailing_hash = TrailingHash::default();
            all[1..].chunks(piece).for_each(|c| trailing_hash.update(c));
            assert!(trailing_hash.check().is_err(), "{piece}");
        }
    }

    #[test]
    fn a_change_between_two_reads_is_detected() {
        let (file, all) = file(100_000);
        let mut page = [0; 4096];
        for reader_first in [true, false] {
            let in_place = Arc::new(InPlaceFile::new(
                file.try_clone().unwrap(),
                all.len() as u64,
            ));
            file.write_all_at(&all, 0).unwrap();
            let mut read = || {
                let read = ReadAt::read_exact_at(&in_place, &mut page, 8192);
                read.map_err(|e| Error::io("read", e))
            };
            if reader_first {
                read().unwrap()
            } else {
                check(&in_place).unwrap()
            }
            file.write_all_at(&[!all[9000]], 9000).unwrap();
            let e = if reader_first {
                check(&in_place).unwrap_err()
            } else {
                read().unwrap_err()
            };
            assert_eq!(e.reason(), Reason::CorruptSnapshot, "{e}");
            assert!(e.to_string().contains("changed"), "{e}");
        }
        let in_place = Arc::new(InPlaceFile::new(
            file.try_clone().unwrap(),
            all.len() as u64,
        ));
        file.set_len(50_000).unwrap();
        assert!(
            check(&in_place)
                .unwrap_err()
                .to_string()
                .contains("changed")
        );
    }

    #[test]
    fn a_large_file_has_few_checksums() {
        let in_place = InPlaceFile::new(tempfile::tempfile().unwrap(), 100 << 30);
        assert!(in_place.checksums.len() as u64 <= MAX_BLOCKS);
        assert_eq!(in_place.block, 256 << 10);
    }
}
