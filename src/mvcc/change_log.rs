//! A log of changes in the order of their revisions: in memory up to a limit, then in two temporary files,
//! one of records of fixed size and one of values.
//!
//! A change that the result no longer needs may be dropped from the log at any time. `fold`, the only caller,
//! decides which changes survive.

use super::keys::SlotId;
use crate::base::fixed_record;
use crate::base::limits::Limits;
use crate::base::opt::TEMP_DIR;
use crate::base::temp::{Dir, TempFile};
use crate::error::{Error, Result};
use crate::mvcc::revision::{RecordKey, Revision};
use std::io::{BufReader, BufWriter, Read, Seek, Write};

/// The size of a [`LoggedChange`] in its file, in bytes.
const RECORD_BYTES: usize = fixed_record::BYTES;
/// The minimum size of the files before they are rewritten without dropped changes.
const REWRITE_AT_LEAST: u64 = 256 << 20;
const BUFFER: usize = 256 << 10;

/// A change without its key, which the slot has, and without its value, which is stored separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LoggedChange {
    pub(super) rk: RecordKey,
    pub(super) slot: SlotId,
    pub(super) create_revision: Revision,
    pub(super) version: i64,
    pub(super) lease: i64,
    /// The size of the value in bytes.
    pub(super) len: usize,
}

impl LoggedChange {
    /// The bit of the length that marks a tombstone on disk.
    const TOMBSTONE: u64 = 1 << 63;

    fn encode(&self) -> [u8; RECORD_BYTES] {
        let tombstone_bit = if self.rk.tombstone {
            Self::TOMBSTONE
        } else {
            0
        };
        fixed_record::encode([
            self.rk.main.0 as u64,
            u64::from(self.rk.sub) | u64::from(self.slot.0) << 32,
            self.create_revision.0 as u64,
            self.version as u64,
            self.lease as u64,
            self.len as u64 | tombstone_bit,
        ])
    }

    fn decode(b: &[u8; RECORD_BYTES]) -> Self {
        let [main, sub_slot, create, version, lease, len] = fixed_record::decode(b);
        LoggedChange {
            rk: RecordKey {
                main: Revision(main as i64),
                sub: sub_slot as u32,
                tombstone: len & Self::TOMBSTONE != 0,
            },
            slot: SlotId((sub_slot >> 32) as u32),
            create_revision: Revision(create as i64),
            version: version as i64,
            lease: lease as i64,
            len: (len & !Self::TOMBSTONE) as usize,
        }
    }
}

#[derive(Debug)]
pub(super) struct ChangeLog {
    /// The changes in memory.
    changes: Vec<LoggedChange>,
    /// The values of `changes`, concatenated.
    values: Vec<u8>,
    /// The maximum number of bytes in memory.
    memory_limit: usize,
    temp_dir: Dir,
    spilled: Option<SpillFiles>,
    /// The size at which the files are rewritten without dropped changes.
    rewrite_at: u64,
    /// The limits of the database that the surviving changes become part of.
    limits: Limits,
}

/// The older part of a log, on disk.
#[derive(Debug)]
struct SpillFiles {
    changes: BufWriter<TempFile>,
    values: BufWriter<TempFile>,
    bytes: u64,
}

impl SpillFiles {
    fn append(&mut self, change: &LoggedChange, value: &[u8]) -> Result<()> {
        self.changes
            .write_all(&change.encode())
            .and_then(|()| self.values.write_all(value))
            .map_err(write_failed)?;
        self.bytes += (RECORD_BYTES + value.len()) as u64;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.changes
            .flush()
            .and_then(|()| self.values.flush())
            .map_err(write_failed)
    }
}

fn write_failed(e: std::io::Error) -> Error {
    Error::io(
        format!("write changes to the temporary directory (choose another with {TEMP_DIR})"),
        e,
    )
}

impl ChangeLog {
    /// Creates a log that holds up to `memory_limit` bytes in memory.
    pub(super) fn new(memory_limit: usize, temp_dir: Dir, limits: Limits) -> Self {
        ChangeLog {
            changes: Vec::new(),
            // Reserved at once, since growing would copy. The system provides memory only when it is used.
            values: Vec::with_capacity(memory_limit + memory_limit / 8),
            memory_limit,
            temp_dir,
            spilled: None,
            rewrite_at: REWRITE_AT_LEAST.min(limits.database_bytes),
            limits,
        }
    }

    /// Adds a change; `write` appends its value. If memory is full, changes that do not survive are dropped
    /// first. If more than half of the memory is still in use then, all changes in memory are spilled to the
    /// files.
    pub(super) fn append(
        &mut self,
        mut change: LoggedChange,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
        survives: impl Fn(&LoggedChange) -> bool,
    ) -> Result<()> {
        if self.memory() >= self.memory_limit {
            self.drop_from_memory(&survives);
            if self.memory() > self.memory_limit / 2 {
                self.spill(&survives)?;
            }
            // Free the memory of a long value.
            if self.values.capacity() > 2 * self.memory_limit {
                self.values
                    .shrink_to(self.memory_limit + self.memory_limit / 8);
            }
        }
        let value_at = self.values.len();
        write(&mut self.values)?;
        change.len = self.values.len() - value_at;
        self.changes.push(change);
        Ok(())
    }

    /// Returns the memory in use, in bytes.
    fn memory(&self) -> usize {
        self.values.len() + self.changes.len() * size_of::<LoggedChange>()
    }

    /// Drops the changes in memory that do not survive.
    fn drop_from_memory(&mut self, survives: &impl Fn(&LoggedChange) -> bool) {
        let (mut read_at, mut write_at) = (0, 0);
        let values = &mut self.values;
        self.changes.retain(|change| {
            let value = read_at..read_at + change.len;
            read_at = value.end;
            let stays = survives(change);
            if stays {
                values.copy_within(value, write_at);
                write_at += change.len;
            }
            stays
        });
        values.truncate(write_at);
    }

    /// Moves all changes in memory to the files.
    fn spill(&mut self, survives: &impl Fn(&LoggedChange) -> bool) -> Result<()> {
        let mut files = match self.spilled.take() {
            Some(files) => files,
            None => self.create_files()?,
        };
        let mut values = self.values.as_slice();
        for change in &self.changes {
            let (value, rest) = values.split_at(change.len);
            files.append(change, value)?;
            values = rest;
        }
        self.values.clear();
        self.changes.clear();
        if files.bytes >= self.rewrite_at {
            files = self.rewrite(files, survives)?;
        }
        self.spilled = Some(files);
        Ok(())
    }

    fn create_files(&self) -> Result<SpillFiles> {
        let create = || Ok(BufWriter::with_capacity(BUFFER, self.temp_dir.file()?));
        Ok(SpillFiles {
            changes: create()?,
            values: create()?,
            bytes: 0,
        })
    }

    /// Copies the surviving changes to new files, so that the files never exceed the surviving changes by
    /// more than a constant factor.
    fn rewrite(
        &mut self,
        mut old: SpillFiles,
        survives: &impl Fn(&LoggedChange) -> bool,
    ) -> Result<SpillFiles> {
        let mut new = self.create_files()?;
        old.flush()?;
        read_files(&mut old, true, survives, |change, value| {
            new.append(change, value)
        })?;
        if new.bytes > self.limits.database_bytes {
            return Err(self.limits.database_too_large(format!(
                "the changes of the deltas have {} bytes",
                new.bytes
            )));
        }
        self.rewrite_at = (2 * new.bytes).max(REWRITE_AT_LEAST) + new.bytes;
        Ok(new)
    }

    /// Calls `each` for every change that survives, in the order in which they were added. The value is empty
    /// if `with_values` is false.
    pub(super) fn for_each(
        &mut self,
        with_values: bool,
        survives: impl Fn(&LoggedChange) -> bool,
        mut each: impl FnMut(&LoggedChange, &[u8]) -> Result<()>,
    ) -> Result<()> {
        if let Some(files) = &mut self.spilled {
            files.flush()?;
            read_files(files, with_values, &survives, &mut each)?;
        }
        let mut values = self.values.as_slice();
        for change in &self.changes {
            let (value, rest) = values.split_at(change.len);
            if survives(change) {
                each(change, if with_values { value } else { &[] })?;
            }
            values = rest;
        }
        Ok(())
    }
}

/// Calls `each` for every change in the files that survives. The value is empty if `with_values` is false.
fn read_files(
    files: &mut SpillFiles,
    with_values: bool,
    survives: &impl Fn(&LoggedChange) -> bool,
    mut each: impl FnMut(&LoggedChange, &[u8]) -> Result<()>,
) -> Result<()> {
    /// A small buffer, so that most skipped values are not read.
    const VALUE_BUFFER: usize = 16 << 10;
    let io = |e| Error::io("read changes back from the temporary directory", e);
    let changes = files.changes.get_mut();
    changes.rewind().map_err(io)?;
    let count = changes.len() / RECORD_BYTES as u64;
    let mut changes = BufReader::with_capacity(BUFFER, changes);
    let values = files.values.get_mut();
    values.rewind().map_err(io)?;
    let mut values = BufReader::with_capacity(VALUE_BUFFER, values);
    let mut record = [0; RECORD_BYTES];
    let mut value = Vec::new();
    // Bytes of values to skip before the next value is read.
    let mut skipped = 0;
    for _ in 0..count {
        changes.read_exact(&mut record).map_err(io)?;
        let change = LoggedChange::decode(&record);
        value.clear();
        if !survives(&change) {
            skipped += change.len as i64;
            continue;
        }
        if with_values {
            if skipped > 0 {
                values.seek_relative(skipped).map_err(io)?;
                skipped = 0;
            }
            value.resize(change.len, 0);
            values.read_exact(&mut value).map_err(io)?;
        } else {
            skipped += change.len as i64;
        }
        each(&change, &value)?;
    }
    Ok(())
}
