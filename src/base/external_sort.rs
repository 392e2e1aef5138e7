//! Sorts records by their keys with limited memory.
//!
//! Records are sorted in memory up to a limit. Beyond it, sorted runs are written to unnamed files of the temporary
//! directory and merged at the end. Keys and records are plain bytes here.

use crate::base::opt::TEMP_DIR;
use crate::base::temp::{Dir, TempFile};
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};

/// The number of runs of one size that are merged into a larger one. It limits the open files for each size.
const FAN_IN: usize = 32;
/// The size of the buffer of a file, in bytes.
const BUFFER: usize = 64 << 10;

/// Accepts records in any order.
#[derive(Debug)]
pub(crate) struct Sorter {
    temp_dir: Dir,
    limit: usize,
    in_memory: MemoryRecords,
    /// The runs by size: each entry holds runs that are about [`FAN_IN`] times as long as those of the entry
    /// before.
    runs: Vec<Vec<TempFile>>,
}

/// Records in memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryRecords {
    /// The keys and records, one after the other.
    bytes: Vec<u8>,
    spans: Vec<RecordSpan>,
}

/// Where a record is in memory: its key at `from`, and the record after the key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordSpan {
    from: usize,
    key_len: usize,
    record_len: usize,
}

impl MemoryRecords {
    fn key(&self, p: &RecordSpan) -> &[u8] {
        &self.bytes[p.from..p.from + p.key_len]
    }

    fn record(&self, p: &RecordSpan) -> &[u8] {
        &self.bytes[p.from + p.key_len..][..p.record_len]
    }

    fn sort(&mut self) {
        let bytes = &self.bytes;
        let key = |p: &RecordSpan| &bytes[p.from..p.from + p.key_len];
        // Equal keys stay in the order in which they were added, which is the order of `from`.
        self.spans
            .sort_unstable_by(|a, b| key(a).cmp(key(b)).then(a.from.cmp(&b.from)));
    }

    fn memory(&self) -> usize {
        self.bytes.len() + self.spans.len() * size_of::<RecordSpan>()
    }
}

impl Sorter {
    /// Creates a sorter that holds up to `limit` bytes, and at least one record, in memory.
    pub(crate) fn new(temp_dir: Dir, limit: usize) -> Self {
        Sorter {
            temp_dir,
            limit,
            in_memory: MemoryRecords::default(),
            runs: Vec::new(),
        }
    }

    /// Adds a record. Records with equal keys stay in the order in which they are added.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub(crate) fn push(&mut self, key: &[u8], record: &[u8]) -> Result<()> {
        if !self.in_memory.spans.is_empty()
            && self.in_memory.memory() + key.len() + record.len() > self.limit
        {
            self.spill()?;
        }
        let records = &mut self.in_memory;
        records.spans.push(RecordSpan {
            from: records.bytes.len(),
            key_len: key.len(),
            record_len: record.len(),
        });
        records.bytes.extend_from_slice(key);
        records.bytes.extend_from_slice(record);
        Ok(())
    }

    /// Takes the records of another sorter.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub(crate) fn absorb(&mut self, mut other: Sorter) -> Result<()> {
        other.spill()?;
        let runs = other.runs.into_iter().enumerate();
        let mut runs = runs.flat_map(|(size, runs)| runs.into_iter().map(move |run| (size, run)));
        runs.try_for_each(|(size, run)| self.add(size, run))
    }

    /// Writes the records in memory as a run.
    fn spill(&mut self) -> Result<()> {
        self.in_memory.sort();
        let mut run = RunWriter::new(&self.temp_dir)?;
        for p in &self.in_memory.spans {
            run.write_key(self.in_memory.key(p), p.record_len)?;
            run.write(self.in_memory.record(p))?;
        }
        self.in_memory.spans.clear();
        self.in_memory.bytes.clear();
        // Release the memory of a long record.
        self.in_memory.bytes.shrink_to(self.limit);
        self.add(0, run.finish()?)
    }

    /// Adds a run, and merges all runs of its size if there are too many.
    fn add(&mut self, size: usize, run: TempFile) -> Result<()> {
        if self.runs.len() == size {
            self.runs.push(Vec::new());
        }
        self.runs[size].push(run);
        if self.runs[size].len() < FAN_IN {
            return Ok(());
        }
        let mut merge = Merge::new(std::mem::take(&mut self.runs[size]))?;
        let mut run = RunWriter::new(&self.temp_dir)?;
        let mut buf = vec![0; BUFFER];
        while merge.advance()? {
            let record = merge.record_len()?;
            run.write_key(&merge.key, record)?;
            merge.copy_record(&mut buf, |b| run.write(b))?;
        }
        self.add(size + 1, run.finish()?)
    }

    /// Ends the input and returns the sorted records.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub(crate) fn finish(mut self) -> Result<Sorted> {
        if self.runs.is_empty() {
            self.in_memory.sort();
            return Ok(Sorted::InMemory {
                records: self.in_memory,
                next: 0,
            });
        }
        if !self.in_memory.spans.is_empty() {
            self.spill()?;
        }
        // The longest runs are the oldest, and older records come first.
        let runs = self.runs.into_iter().rev().flatten().collect();
        let (merge, record) = (Merge::new(runs)?, Vec::new());
        Ok(Sorted::Merged { merge, record })
    }
}

/// Records in the order of their keys.
#[derive(Debug)]
pub(crate) enum Sorted {
    /// All records are in memory.
    InMemory { records: MemoryRecords, next: usize },
    /// The records are read from files.
    Merged { merge: Merge, record: Vec<u8> },
}

impl Sorted {
    /// Moves to the next record. Returns false at the end.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn advance(&mut self) -> Result<bool> {
        match self {
            Sorted::InMemory { records, next } => {
                let has_next = *next < records.spans.len();
                *next += usize::from(has_next);
                Ok(has_next)
            }
            Sorted::Merged { merge, record } => {
                if !merge.advance()? {
                    return Ok(false);
                }
                // Release the memory of a long record.
                record.clear();
                record.shrink_to(16 * BUFFER);
                record.resize(merge.record_len()?, 0);
                merge.read_record(record)?;
                Ok(true)
            }
        }
    }

    /// Returns the key and the record to which [`advance`](Self::advance) moved; both are empty before the
    /// first.
    pub(crate) fn current(&self) -> (&[u8], &[u8]) {
        match self {
            Sorted::InMemory { records, next } => {
                let span = next.checked_sub(1).and_then(|i| records.spans.get(i));
                span.map_or((&[], &[]), |p| (records.key(p), records.record(p)))
            }
            Sorted::Merged { merge, record } => (&merge.key, record),
        }
    }
}

/// Writes a run: for each record the lengths of the key (4 bytes) and the record (8 bytes), the key, and the
/// record.
struct RunWriter(BufWriter<TempFile>);

impl RunWriter {
    fn new(temp_dir: &Dir) -> Result<Self> {
        let file = temp_dir.file()?;
        Ok(RunWriter(BufWriter::with_capacity(BUFFER, file)))
    }

    /// Writes the lengths and the key. The record must be written next.
    fn write_key(&mut self, key: &[u8], record_len: usize) -> Result<()> {
        let key_len = u32::try_from(key.len())
            .map_err(|_| Error::corrupt("a key is longer than 4 GiB, which etcd does not allow"))?;
        self.write(&key_len.to_le_bytes())?;
        self.write(&(record_len as u64).to_le_bytes())?;
        self.write(key)
    }

    fn write(&mut self, b: &[u8]) -> Result<()> {
        self.0.write_all(b).map_err(write_error)
    }

    fn finish(self) -> Result<TempFile> {
        let mut file = self
            .0
            .into_inner()
            .map_err(|e| write_error(e.into_error()))?;
        file.rewind().map_err(read_error)?;
        Ok(file)
    }
}

fn write_error(e: io::Error) -> Error {
    Error::io(
        format!("write records to the temporary directory (choose another with {TEMP_DIR})"),
        e,
    )
}

fn read_error(e: io::Error) -> Error {
    Error::io("read records back from the temporary directory", e)
}

/// Merges runs. It holds the next key of each run, and no record, since records may be long.
#[derive(Debug)]
pub(crate) struct Merge {
    runs: Vec<RunReader>,
    /// The next keys, each with its run. Among equal keys the older run comes first.
    ahead: BinaryHeap<Reverse<(Vec<u8>, usize)>>,
    key: Vec<u8>,
    /// The run that `key` is from.
    current: Option<usize>,
}

#[derive(Debug)]
struct RunReader {
    file: BufReader<TempFile>,
    /// The length of the record that comes next in the file.
    record_len: u64,
}

impl RunReader {
    /// Reads the next key; `None` at the end. The record before it must have been read.
    fn read_key(&mut self, mut key: Vec<u8>) -> Result<Option<Vec<u8>>> {
        if self.file.fill_buf().map_err(read_error)?.is_empty() {
            return Ok(None);
        }
        let (mut len, mut record) = ([0; 4], [0; 8]);
        self.file.read_exact(&mut len).map_err(read_error)?;
        self.file.read_exact(&mut record).map_err(read_error)?;
        self.record_len = u64::from_le_bytes(record);
        key.resize(u32::from_le_bytes(len) as usize, 0);
        self.file.read_exact(&mut key).map_err(read_error)?;
        Ok(Some(key))
    }
}

impl Merge {
    fn new(files: Vec<TempFile>) -> Result<Self> {
        let mut merge = Merge {
            runs: Vec::with_capacity(files.len()),
            ahead: BinaryHeap::with_capacity(files.len()),
            key: Vec::new(),
            current: None,
        };
        for (i, file) in files.into_iter().enumerate() {
            let file = BufReader::with_capacity(BUFFER, file);
            let mut run = RunReader {
                file,
                record_len: 0,
            };
            if let Some(key) = run.read_key(Vec::new())? {
                merge.ahead.push(Reverse((key, i)));
            }
            merge.runs.push(run);
        }
        Ok(merge)
    }

    /// Moves to the next key. Returns false at the end. The record of the key before it must have been read.
    fn advance(&mut self) -> Result<bool> {
        if let Some(i) = self.current.take() {
            let spare = std::mem::take(&mut self.key);
            if let Some(key) = self.runs[i].read_key(spare)? {
                self.ahead.push(Reverse((key, i)));
            }
        }
        let Some(Reverse((key, i))) = self.ahead.pop() else {
            self.key.clear();
            return Ok(false);
        };
        (self.key, self.current) = (key, Some(i));
        Ok(true)
    }

    fn run(&mut self) -> Result<&mut RunReader> {
        let current = self.current.map(|i| &mut self.runs[i]);
        current.ok_or_else(|| Error::internal("a record was read before its key"))
    }

    fn record_len(&mut self) -> Result<usize> {
        let len = self.run()?.record_len;
        usize::try_from(len).map_err(|_| read_error(io::ErrorKind::InvalidData.into()))
    }

    fn read_record(&mut self, out: &mut [u8]) -> Result<()> {
        self.run()?.file.read_exact(out).map_err(read_error)
    }

    fn copy_record(
        &mut self,
        buf: &mut [u8],
        mut write: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut left = self.record_len()?;
        while left > 0 {
            let n = left.min(buf.len());
            self.read_record(&mut buf[..n])?;
            write(&buf[..n])?;
            left -= n;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Reason;

    fn all(mut sorted: Sorted) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut out = Vec::new();
        while sorted.advance().unwrap() {
            let (key, record) = sorted.current();
            out.push((key.to_vec(), record.to_vec()));
        }
        assert!(!sorted.advance().unwrap());
        out
    }

    #[test]
    fn records_come_out_in_order_whatever_the_limit_is() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        let dir = tempfile::tempdir().unwrap();
        // With the lowest limit each record is a run of its own, so runs are merged twice.
        for (records, limit) in [(0, 1), (1, 1), (2500, 1), (5000, 2000), (5000, 1 << 20)] {
            let mut expected: Vec<(Vec<u8>, Vec<u8>)> = (0..records)
                .map(|i: usize| {
                    let mut key = vec![0; rng.usize(..4)];
                    let mut record = vec![0; rng.usize(..60)];
                    rng.fill(&mut key);
                    rng.fill(&mut record);
                    // The records of equal keys differ.
                    record.extend_from_slice(&i.to_le_bytes());
                    (key, record)
                })
                .collect();
            if let Some(one) = expected.get_mut(1000) {
                one.1 = vec![7; 300_000];
            }
            let mut sorter = Sorter::new(Dir::new(dir.path(), limit == 2000), limit);
            for (key, record) in &expected {
                sorter.push(key, record).unwrap();
                let files = sorter.runs.iter().map(Vec::len);
                assert!(files.max() < Some(FAN_IN));
            }
            // This sort is stable, as the sorter is.
            expected.sort_by(|a, b| a.0.cmp(&b.0));
            let sorted = sorter.finish().unwrap();
            let in_files = matches!(sorted, Sorted::Merged { .. });
            assert_eq!(in_files, limit < 1 << 20 && records > 1, "limit {limit}");
            assert!(all(sorted) == expected, "limit {limit}");
        }
        // The files have no names.
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_missing_temporary_directory_is_named() {
        let mut sorter = Sorter::new(Dir::new("/nowhere/at/all", false), 1);
        sorter.push(b"a", b"1").unwrap();
        let e = sorter.push(b"b", b"2").unwrap_err();
        assert_eq!(e.reason(), Reason::Io);
        let message = e.to_string();
        assert!(
            message.contains("/nowhere/at/all") && message.contains("temp-dir"),
            "{message}"
        );
    }
}
