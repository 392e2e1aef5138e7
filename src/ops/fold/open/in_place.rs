//! A plain snapshot file that is read where it lies, without a copy.
//!
//! Others may write to it meanwhile. So each block has a sum: the first reader notes it, and each later reader must
//! find the same. Once the hash of the whole file is right, all that was ever read of it is what was hashed. `plain`
//! opens it; nothing else knows where a database lies.

use crate::backup::frame::HASH_SIZE;
use crate::base::{Cancel, ReadAt, lock};
use crate::error::{Error, Reason, Result};
use crate::telemetry::progress::Step;
use crc_fast::{CrcAlgorithm, Digest};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

/// Blocks of a file are no smaller, and there are no more of them: then they are larger.
const MIN_BLOCK: u64 = 4 << 10;
const MAX_BLOCKS: u64 = 1 << 19;
/// Bytes that are hashed at once: as many as a block, or a multiple.
const CHUNK: u64 = 256 << 10;

/// The file.
#[derive(Debug)]
pub(super) struct InPlace {
    file: File,
    bytes: u64,
    /// Bytes of a block: a power of two.
    block: u64,
    /// The sum of each block that was read.
    sums: Vec<AtomicU64>,
}

/// Marks a sum that was noted.
const NOTED: u64 = 1 << 32;

impl InPlace {
    /// `bytes` is the size of the file.
    pub(super) fn new(file: File, bytes: u64) -> Self {
        let block = bytes
            .div_ceil(MAX_BLOCKS)
            .next_power_of_two()
            .max(MIN_BLOCK);
        let blocks = bytes.div_ceil(block);
        InPlace {
            file,
            bytes,
            block,
            sums: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Reads whole blocks; only the last one of the file may be shorter.
    fn read_blocks(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let read = FileExt::read_exact_at(&self.file, buf, offset);
        read.map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => changed().into(),
            _ => e,
        })?;
        let sums = &self.sums[(offset / self.block) as usize..];
        for (block, sum) in buf.chunks(self.block as usize).zip(sums) {
            let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
            digest.update(block);
            let found = NOTED | digest.finalize();
            let noted = sum.compare_exchange(0, found, Ordering::Relaxed, Ordering::Relaxed);
            if noted.is_err_and(|noted| noted != found) {
                return Err(changed().into());
            }
        }
        Ok(())
    }

    /// Hashes the file, and compares with what stands at its end. Ends early when nobody reads it any more.
    fn prove(this: &Weak<Self>, cancel: &Cancel, step: &Step) -> Result<()> {
        let mut hash = Sha256::new();
        let mut buf = Vec::new();
        let mut at = 0;
        let mut expected = Vec::new();
        while let Some(this) = this.upgrade() {
            let n = (this.bytes - at).min(CHUNK.max(this.block));
            if n == 0 {
                return check_hash(hash, &expected);
            }
            cancel.check()?;
            buf.resize(n as usize, 0);
            this.read_blocks(&mut buf, at)
                .map_err(|e| Error::io("read the snapshot", e))?;
            // The hash itself may lie across two chunks.
            let end = this.bytes.saturating_sub(HASH_SIZE as u64);
            let (hashed, last) = buf.split_at(end.saturating_sub(at).min(n) as usize);
            hash.update(hashed);
            expected.extend_from_slice(last);
            at += n;
            step.add(n);
        }
        Err(Error::internal("a file was hashed that nobody reads"))
    }
}

/// Puts the file's name before what is wrong with it, once.
pub(super) fn at(path: &Path, e: Error) -> Error {
    let name = path.display().to_string();
    match e.reason() {
        Reason::CorruptSnapshot | Reason::TooLarge | Reason::CannotDecrypt
            if !e.to_string().starts_with(&format!("{name}: ")) =>
        {
            e.at(name)
        }
        _ => e,
    }
}

/// Compares the hash of a database with what stands behind it.
pub(super) fn check_hash(hash: Sha256, expected: &[u8]) -> Result<()> {
    match hash.finalize().as_slice() == expected {
        true => Ok(()),
        false => Err(Error::corrupt(
            "its SHA-256 does not match: the file is damaged; use another copy or another snapshot",
        )),
    }
}

fn changed() -> Error {
    Error::corrupt(
        "it was changed while it was read: wait until nothing writes to it, or give a copy",
    )
}

impl ReadAt for InPlace {
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

/// Whether the hash at the end of a file is right; found out on a thread of its own.
#[derive(Debug)]
pub(super) struct Proof(Mutex<State>);

#[derive(Debug)]
enum State {
    Running(JoinHandle<Result<()>>),
    Known(Result<()>),
}

impl Proof {
    /// Starts to hash the file.
    pub(super) fn start(file: &Arc<InPlace>, path: &Path, cancel: Cancel, step: Step) -> Self {
        let (file, path) = (Arc::downgrade(file), path.to_owned());
        let hash =
            Arc::new(move || InPlace::prove(&file, &cancel, &step).map_err(|e| at(&path, e)));
        let on_thread = hash.clone();
        let thread = std::thread::Builder::new().spawn(move || on_thread());
        Proof(Mutex::new(match thread {
            Ok(thread) => State::Running(thread),
            // The system has no thread left.
            Err(_) => State::Known(hash()),
        }))
    }

    /// Nothing is to be hashed.
    pub(super) fn known() -> Self {
        Proof(Mutex::new(State::Known(Ok(()))))
    }

    /// Waits for it.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the hash is wrong, or the file was changed; `Io`, `Terminated`.
    pub(super) fn wait(&self) -> Result<()> {
        let mut state = lock(&self.0);
        let now = std::mem::replace(&mut *state, State::Known(Ok(())));
        let known = match now {
            State::Known(known) => known,
            State::Running(thread) => thread
                .join()
                .unwrap_or_else(|_| Err(Error::internal("hashing panicked"))),
        };
        let told = known.as_ref().map_err(Error::again).copied();
        *state = State::Known(known);
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A file of random bytes with their hash behind them.
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

    fn proof(of: &Arc<InPlace>) -> Result<()> {
        let proof = Proof::start(
            of,
            Path::new("x"),
            Cancel::default(),
            Step::new("hash", None),
        );
        let first = proof.wait();
        let again = proof.wait();
        assert_eq!(first.is_ok(), again.is_ok());
        first
    }

    #[test]
    fn any_part_is_read_as_it_lies_and_the_hash_is_compared() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let chunk = CHUNK as usize;
        for bytes in [0, 4096, chunk - 16, chunk, chunk + 5, 3 * chunk] {
            let (file, all) = file(bytes);
            let open =
                |file: &File| Arc::new(InPlace::new(file.try_clone().unwrap(), all.len() as u64));
            let of = open(&file);
            for _ in 0..50 {
                let from = rng.usize(..=all.len());
                let mut out = vec![0; rng.usize(..=all.len() - from)];
                ReadAt::read_exact_at(&*of, &mut out, from as u64).unwrap();
                assert!(out == all[from..from + out.len()]);
            }
            let mut out = [0; 2];
            for past in [all.len() as u64 - 1, all.len() as u64, u64::MAX] {
                ReadAt::read_exact_at(&*of, &mut out, past).unwrap_err();
            }
            proof(&of).unwrap();
            let at = rng.usize(..all.len());
            file.write_all_at(&[!all[at]], at as u64).unwrap();
            let e = proof(&open(&file)).unwrap_err();
            assert!(e.to_string().contains("SHA-256"), "{e}");
        }
    }

    #[test]
    fn a_change_between_two_readings_is_found_whoever_comes_second() {
        let (file, all) = file(100_000);
        let mut page = [0; 4096];
        for reader_first in [true, false] {
            let of = Arc::new(InPlace::new(file.try_clone().unwrap(), all.len() as u64));
            file.write_all_at(&all, 0).unwrap();
            let mut read = || {
                let read = ReadAt::read_exact_at(&*of, &mut page, 8192);
                read.map_err(|e| Error::io("read", e))
            };
            match reader_first {
                true => read().unwrap(),
                false => proof(&of).unwrap(),
            }
            file.write_all_at(&[!all[9000]], 9000).unwrap();
            let e = match reader_first {
                true => proof(&of).unwrap_err(),
                false => read().unwrap_err(),
            };
            assert_eq!(e.reason(), Reason::CorruptSnapshot, "{e}");
            assert!(e.to_string().contains("changed"), "{e}");
        }
        let of = Arc::new(InPlace::new(file.try_clone().unwrap(), all.len() as u64));
        file.set_len(50_000).unwrap();
        assert!(proof(&of).unwrap_err().to_string().contains("changed"));
    }

    #[test]
    fn a_large_file_has_few_sums() {
        let of = InPlace::new(tempfile::tempfile().unwrap(), 100 << 30);
        assert!(of.sums.len() as u64 <= MAX_BLOCKS);
        assert_eq!(of.block, 256 << 10);
    }
}
