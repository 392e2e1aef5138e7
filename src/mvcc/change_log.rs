//! The changes that are still worth writing, in revision order: in memory up to a limit, then in
//! two unnamed files of the temporary directory (one of entries, one of values).
//!
//! It does not know which changes are live: `fold`, its only caller, tells.

use super::keys::SlotId;
use crate::base::fixed_record;
use crate::base::limits::Limits;
use crate::base::temp::{Dir, TempFile};
use crate::error::{Error, Result};
use crate::mvcc::revision::{RecordKey, Revision};
use std::io::{BufReader, BufWriter, Read, Seek, Write};

/// Bytes of an [`Entry`] on disk.
const ENTRY: usize = fixed_record::BYTES;
/// A spilled file is not worth rewriting before it is this large.
const THIN_AT_LEAST: u64 = 256 << 20;
const BUFFER: usize = 256 << 10;

/// A change; its value stands apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) rk: RecordKey,
    pub(super) slot: SlotId,
    pub(super) create_revision: Revision,
    pub(super) version: i64,
    pub(super) lease: i64,
    /// Bytes of the value.
    pub(super) len: usize,
}

impl Entry {
    const TOMBSTONE: u64 = 1 << 63;

    fn encode(&self) -> [u8; ENTRY] {
        let mark = match self.rk.tombstone {
            true => Self::TOMBSTONE,
            false => 0,
        };
        fixed_record::encode([
            self.rk.main.0 as u64,
            u64::from(self.rk.sub) | u64::from(self.slot.0) << 32,
            self.create_revision.0 as u64,
            self.version as u64,
            self.lease as u64,
            self.len as u64 | mark,
        ])
    }

    fn decode(b: &[u8; ENTRY]) -> Self {
        let [main, sub_slot, create, version, lease, len] = fixed_record::decode(b);
        Entry {
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
    entries: Vec<Entry>,
    /// The values of `entries`, one after the other.
    values: Vec<u8>,
    limit: usize,
    temp_dir: Dir,
    spilled: Option<Spilled>,
    /// The files are thinned out when they reach this size.
    thin_at: u64,
    /// What is live is part of a database.
    limits: Limits,
}

#[derive(Debug)]
struct Spilled {
    entries: BufWriter<TempFile>,
    values: BufWriter<TempFile>,
    bytes: u64,
}

impl Spilled {
    fn append(&mut self, entry: &Entry, value: &[u8]) -> Result<()> {
        self.entries
            .write_all(&entry.encode())
            .and_then(|()| self.values.write_all(value))
            .map_err(failed)?;
        self.bytes += (ENTRY + value.len()) as u64;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.entries
            .flush()
            .and_then(|()| self.values.flush())
            .map_err(failed)
    }
}

fn failed(e: std::io::Error) -> Error {
    Error::io(
        "write changes to the temporary directory (choose another with --temp-dir)",
        e,
    )
}

impl ChangeLog {
    /// Holds up to `limit` bytes in memory.
    pub(super) fn new(limit: usize, temp_dir: Dir, limits: Limits) -> Self {
        ChangeLog {
            entries: Vec::new(),
            // All at once: growing would copy. What is not used costs no memory.
            values: Vec::with_capacity(limit + limit / 8),
            limit,
            temp_dir,
            spilled: None,
            thin_at: THIN_AT_LEAST.min(limits.database_bytes),
            limits,
        }
    }

    /// Adds a change; `write` appends the value. When memory is full, what `live` no longer wants
    /// is dropped, and what remains goes to the files if it is more than half.
    pub(super) fn append(
        &mut self,
        mut entry: Entry,
        write: impl FnOnce(&mut Vec<u8>) -> Result<()>,
        live: impl Fn(&Entry) -> bool,
    ) -> Result<()> {
        if self.values.len() + self.entries.len() * size_of::<Entry>() >= self.limit {
            self.collect(&live);
            if self.values.len() + self.entries.len() * size_of::<Entry>() > self.limit / 2 {
                self.spill(&live)?;
            }
            // One long value must not keep its memory.
            if self.values.capacity() > 2 * self.limit {
                self.values.shrink_to(self.limit + self.limit / 8);
            }
        }
        let at = self.values.len();
        write(&mut self.values)?;
        entry.len = self.values.len() - at;
        self.entries.push(entry);
        Ok(())
    }

    /// Drops from memory what is no longer live.
    fn collect(&mut self, live: &impl Fn(&Entry) -> bool) {
        let (mut from, mut to) = (0, 0);
        let values = &mut self.values;
        self.entries.retain(|e| {
            let this = from..from + e.len;
            from = this.end;
            let stays = live(e);
            if stays {
                values.copy_within(this, to);
                to += e.len;
            }
            stays
        });
        values.truncate(to);
    }

    fn spill(&mut self, live: &impl Fn(&Entry) -> bool) -> Result<()> {
        let mut spilled = match self.spilled.take() {
            Some(s) => s,
            None => self.files()?,
        };
        let mut rest = self.values.as_slice();
        for e in &self.entries {
            let (value, tail) = rest.split_at(e.len);
            spilled.append(e, value)?;
            rest = tail;
        }
        self.values.clear();
        self.entries.clear();
        if spilled.bytes >= self.thin_at {
            spilled = self.thin(spilled, live)?;
        }
        self.spilled = Some(spilled);
        Ok(())
    }

    fn files(&self) -> Result<Spilled> {
        let new = || Ok(BufWriter::with_capacity(BUFFER, self.temp_dir.file()?));
        Ok(Spilled {
            entries: new()?,
            values: new()?,
            bytes: 0,
        })
    }

    /// Rewrites the files without what is no longer live, so that they stay within a constant times
    /// the live changes.
    fn thin(&mut self, mut old: Spilled, live: &impl Fn(&Entry) -> bool) -> Result<Spilled> {
        let mut new = self.files()?;
        old.flush()?;
        read_files(
            &mut old,
            |e| live(e).then_some(true),
            |e, value| new.append(e, value),
        )?;
        if new.bytes > self.limits.database_bytes {
            return Err(self
                .limits
                .database_too_large(format!("the deltas put {} bytes", new.bytes)));
        }
        self.thin_at = (2 * new.bytes).max(THIN_AT_LEAST) + new.bytes;
        Ok(new)
    }

    /// Gives the changes that are `live`, in the order in which they were added; without values where
    /// these are not wanted.
    pub(super) fn for_each(
        &mut self,
        with_values: bool,
        live: impl Fn(&Entry) -> bool,
        mut each: impl FnMut(&Entry, &[u8]) -> Result<()>,
    ) -> Result<()> {
        if let Some(spilled) = &mut self.spilled {
            spilled.flush()?;
            read_files(spilled, |e| live(e).then_some(with_values), &mut each)?;
        }
        let mut rest = self.values.as_slice();
        for e in &self.entries {
            let (value, tail) = rest.split_at(e.len);
            if live(e) {
                each(e, if with_values { value } else { &[] })?;
            }
            rest = tail;
        }
        Ok(())
    }
}

/// Reads the files from their beginning. `wanted` says of an entry
/// whether it is, and if so whether with its value.
fn read_files(
    files: &mut Spilled,
    wanted: impl Fn(&Entry) -> Option<bool>,
    mut each: impl FnMut(&Entry, &[u8]) -> Result<()>,
) -> Result<()> {
    /// Small, so that values that are not wanted are mostly not read.
    const VALUES: usize = 16 << 10;
    let io = |e| Error::io("read changes back from the temporary directory", e);
    let mut count = {
        let file = files.entries.get_mut();
        file.rewind().map_err(io)?;
        file.len() / ENTRY as u64
    };
    let values = files.values.get_mut();
    values.rewind().map_err(io)?;
    let mut entries = BufReader::with_capacity(BUFFER, files.entries.get_mut());
    let mut values = BufReader::with_capacity(VALUES, values);
    let mut head = [0; ENTRY];
    let mut value = Vec::new();
    let mut passed = 0;
    while count > 0 {
        count -= 1;
        entries.read_exact(&mut head).map_err(io)?;
        let e = Entry::decode(&head);
        value.clear();
        match wanted(&e) {
            None => passed += e.len as i64,
            Some(false) => {
                passed += e.len as i64;
                each(&e, &value)?;
            }
            Some(true) => {
                if passed > 0 {
                    values.seek_relative(passed).map_err(io)?;
                    passed = 0;
                }
                value.resize(e.len, 0);
                values.read_exact(&mut value).map_err(io)?;
                each(&e, &value)?;
            }
        }
    }
    Ok(())
}
