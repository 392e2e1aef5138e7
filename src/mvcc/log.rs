//! The changes that are still worth writing, in revision order: in memory up to a limit, then in
//! an unnamed file of the temporary directory.
//!
//! It does not know which changes are live: `fold`, its only caller, tells.

use crate::error::{Error, Result};
use crate::mvcc::revision::{RecordKey, Revision};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// main 8, sub 4, tombstone 4, record length 8.
const HEADER: usize = 24;

#[derive(Debug)]
pub(super) struct ChangeLog {
    memory: Vec<u8>,
    limit: usize,
    temp_dir: PathBuf,
    spilled: Option<File>,
    spilled_bytes: u64,
    /// The spilled file is thinned out when it reaches this size.
    thin_at: u64,
}

struct Header {
    key: RecordKey,
    len: usize,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut b = [0; HEADER];
        b[..8].copy_from_slice(&self.key.main.0.to_le_bytes());
        b[8..12].copy_from_slice(&self.key.sub.to_le_bytes());
        b[12] = u8::from(self.key.tombstone);
        b[16..].copy_from_slice(&(self.len as u64).to_le_bytes());
        b
    }

    fn decode(b: &[u8; HEADER]) -> Self {
        let mut eight = [0; 8];
        eight.copy_from_slice(&b[..8]);
        let main = Revision(i64::from_le_bytes(eight));
        eight.copy_from_slice(&b[16..]);
        let len = u64::from_le_bytes(eight) as usize;
        let mut four = [0; 4];
        four.copy_from_slice(&b[8..12]);
        Header {
            key: RecordKey {
                main,
                sub: u32::from_le_bytes(four),
                tombstone: b[12] != 0,
            },
            len,
        }
    }
}

impl ChangeLog {
    /// Holds up to `limit` bytes in memory.
    pub(super) fn new(limit: usize, temp_dir: &Path) -> Self {
        ChangeLog {
            memory: Vec::new(),
            limit,
            temp_dir: temp_dir.to_owned(),
            spilled: None,
            spilled_bytes: 0,
            thin_at: 4 * limit as u64,
        }
    }

    fn error(e: std::io::Error) -> Error {
        Error::io("write changes to the temporary directory", e)
    }

    /// Adds a change; `write` appends the record. When memory is full, what `live` no longer wants
    /// is dropped, and what remains goes to the file if it is more than half.
    pub(super) fn append(
        &mut self,
        key: RecordKey,
        write: impl FnOnce(&mut Vec<u8>),
        live: impl Fn(&RecordKey, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        if self.memory.len() >= self.limit {
            self.collect(&live)?;
            if self.memory.len() > self.limit / 2 {
                self.spill()?;
                if self.spilled_bytes >= self.thin_at {
                    self.thin(&live)?;
                }
            }
        }
        let at = self.memory.len();
        self.memory.extend_from_slice(&[0; HEADER]);
        write(&mut self.memory);
        let len = self.memory.len() - at - HEADER;
        self.memory[at..at + HEADER].copy_from_slice(&Header { key, len }.encode());
        Ok(())
    }

    /// Drops from memory what is no longer live.
    fn collect(&mut self, live: &impl Fn(&RecordKey, &[u8]) -> Result<bool>) -> Result<()> {
        let (mut from, mut to) = (0, 0);
        while let Some(head) = self.memory[from..].first_chunk::<HEADER>() {
            let h = Header::decode(head);
            let end = from + HEADER + h.len;
            if live(&h.key, &self.memory[from + HEADER..end])? {
                self.memory.copy_within(from..end, to);
                to += end - from;
            }
            from = end;
        }
        self.memory.truncate(to);
        Ok(())
    }

    fn spill(&mut self) -> Result<()> {
        let mut file = match self.spilled.take() {
            Some(f) => f,
            None => self.temp_file()?,
        };
        file.write_all(&self.memory).map_err(Self::error)?;
        self.spilled = Some(file);
        self.spilled_bytes += self.memory.len() as u64;
        self.memory.clear();
        Ok(())
    }

    fn temp_file(&self) -> Result<File> {
        tempfile::tempfile_in(&self.temp_dir).map_err(|e| {
            Error::io(
                format!(
                    "create a file in the temporary directory {}",
                    self.temp_dir.display()
                ),
                e,
            )
        })
    }

    /// Rewrites the file without what is no longer live, so that it stays within a constant times
    /// the live changes.
    fn thin(&mut self, live: &impl Fn(&RecordKey, &[u8]) -> Result<bool>) -> Result<()> {
        let Some(old) = self.spilled.take() else {
            return Ok(());
        };
        let mut new = BufWriter::with_capacity(1 << 20, self.temp_file()?);
        let mut bytes = 0u64;
        read_file(old, |key, record| {
            if live(&key, record)? {
                let len = record.len();
                new.write_all(&Header { key, len }.encode())
                    .and_then(|()| new.write_all(record))
                    .map_err(Self::error)?;
                bytes += (HEADER + len) as u64;
            }
            Ok(())
        })?;
        self.spilled = Some(new.into_inner().map_err(|e| Self::error(e.into_error()))?);
        self.spilled_bytes = bytes;
        self.thin_at = 2 * bytes + 4 * self.limit as u64;
        Ok(())
    }

    /// Gives every change back, in the order in which they were added.
    pub(super) fn drain(
        mut self,
        mut each: impl FnMut(RecordKey, &[u8]) -> Result<()>,
    ) -> Result<()> {
        if let Some(file) = self.spilled.take() {
            read_file(file, &mut each)?;
        }
        let mut rest = self.memory.as_slice();
        while let Some((head, tail)) = rest.split_first_chunk::<HEADER>() {
            let h = Header::decode(head);
            let (record, tail) = tail.split_at(h.len);
            each(h.key, record)?;
            rest = tail;
        }
        Ok(())
    }
}

fn read_file(mut file: File, mut each: impl FnMut(RecordKey, &[u8]) -> Result<()>) -> Result<()> {
    let io = |e| Error::io("read changes back from the temporary directory", e);
    file.rewind().map_err(io)?;
    let mut r = BufReader::with_capacity(1 << 20, file);
    let mut head = [0; HEADER];
    let mut record = Vec::new();
    loop {
        match r.read_exact(&mut head) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(e) => return Err(io(e)),
        }
        let h = Header::decode(&head);
        record.resize(h.len, 0);
        r.read_exact(&mut record).map_err(io)?;
        each(h.key, &record)?;
    }
}
