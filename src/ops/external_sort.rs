//! Puts records into the order of their keys: in memory up to a limit, then in sorted runs in unnamed
//! files of the temporary directory, which are merged. Memory does not grow with the records.
//!
//! It knows bytes alone. The jobs that read a backup call it: a state comes in the order of revisions.

use crate::base::temp::{Dir, TempFile};
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};

/// Runs of one size that are merged into a larger one; as many files, at most, for each size.
const FAN_IN: usize = 32;
/// Bytes of a file's buffer.
const BUFFER: usize = 64 << 10;

/// Takes records in any order.
#[derive(Debug)]
pub(super) struct Sorter {
    temp_dir: Dir,
    limit: usize,
    held: Held,
    /// Runs by size: those of each place are about [`FAN_IN`] times as long as those of the one
    /// before.
    runs: Vec<Vec<TempFile>>,
}

/// Records in memory: keys and records one behind the other.
#[derive(Debug, Default)]
pub(super) struct Held {
    bytes: Vec<u8>,
    at: Vec<Place>,
}

/// Where a record is in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    from: usize,
    key: usize,
    record: usize,
}

impl Held {
    fn key(&self, p: &Place) -> &[u8] {
        &self.bytes[p.from..p.from + p.key]
    }

    fn record(&self, p: &Place) -> &[u8] {
        &self.bytes[p.from + p.key..][..p.record]
    }

    fn sort(&mut self) {
        let bytes = &self.bytes;
        let key = |p: &Place| &bytes[p.from..p.from + p.key];
        // Of equal keys the first one in stays first: they lie in the order in which they came.
        self.at
            .sort_unstable_by(|a, b| key(a).cmp(key(b)).then(a.from.cmp(&b.from)));
    }

    fn memory(&self) -> usize {
        self.bytes.len() + self.at.len() * size_of::<Place>()
    }
}

impl Sorter {
    /// Holds up to `limit` bytes in memory, and one record.
    pub(super) fn new(temp_dir: Dir, limit: usize) -> Self {
        Sorter {
            temp_dir,
            limit,
            held: Held::default(),
            runs: Vec::new(),
        }
    }

    /// Adds a record. Records of equal keys come out in the order in which they came in.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub(super) fn push(&mut self, key: &[u8], record: &[u8]) -> Result<()> {
        if !self.held.at.is_empty() && self.held.memory() + key.len() + record.len() > self.limit {
            self.spill()?;
        }
        let held = &mut self.held;
        held.at.push(Place {
            from: held.bytes.len(),
            key: key.len(),
            record: record.len(),
        });
        held.bytes.extend_from_slice(key);
        held.bytes.extend_from_slice(record);
        Ok(())
    }

    fn spill(&mut self) -> Result<()> {
        self.held.sort();
        let mut run = RunWriter::new(&self.temp_dir)?;
        for p in &self.held.at {
            run.head(self.held.key(p), p.record)?;
            run.bytes(self.held.record(p))?;
        }
        self.held.at.clear();
        self.held.bytes.clear();
        // One long record must not keep its memory.
        self.held.bytes.shrink_to(self.limit);
        self.add(0, run.finish()?)
    }

    /// Adds a run, and merges where there are too many of its size.
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
            run.head(&merge.key, record)?;
            merge.copy_record(&mut buf, |b| run.bytes(b))?;
        }
        self.add(size + 1, run.finish()?)
    }

    /// Ends the input.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub(super) fn finish(mut self) -> Result<Sorted> {
        if self.runs.is_empty() {
            self.held.sort();
            let held = self.held;
            return Ok(Sorted::Held { held, next: 0 });
        }
        if !self.held.at.is_empty() {
            self.spill()?;
        }
        // The longest runs are the oldest.
        let runs = self.runs.into_iter().rev().flatten().collect();
        let (merge, record) = (Merge::new(runs)?, Vec::new());
        Ok(Sorted::Merged { merge, record })
    }
}

/// Gives records in the order of their keys.
#[derive(Debug)]
pub(super) enum Sorted {
    /// All fitted into memory.
    Held { held: Held, next: usize },
    /// They come from files.
    Merged { merge: Merge, record: Vec<u8> },
}

impl Sorted {
    /// Goes on to the next record; false at the end.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn advance(&mut self) -> Result<bool> {
        match self {
            Sorted::Held { held, next } => {
                let there = *next < held.at.len();
                *next += usize::from(there);
                Ok(there)
            }
            Sorted::Merged { merge, record } => {
                if !merge.advance()? {
                    return Ok(false);
                }
                // One long record must not keep its memory.
                record.clear();
                record.shrink_to(16 * BUFFER);
                record.resize(merge.record_len()?, 0);
                merge.read_record(record)?;
                Ok(true)
            }
        }
    }

    /// The key and the record that [`advance`](Self::advance) went on to; empty before it did.
    pub(super) fn current(&self) -> (&[u8], &[u8]) {
        match self {
            Sorted::Held { held, next } => {
                let place = next.checked_sub(1).and_then(|i| held.at.get(i));
                place.map_or((&[], &[]), |p| (held.key(p), held.record(p)))
            }
            Sorted::Merged { merge, record } => (&merge.key, record),
        }
    }
}

struct RunWriter(BufWriter<TempFile>);

impl RunWriter {
    fn new(temp_dir: &Dir) -> Result<Self> {
        let file = temp_dir.file()?;
        Ok(RunWriter(BufWriter::with_capacity(BUFFER, file)))
    }

    /// Lengths of the key (4 bytes) and the record (8 bytes), then the key.
    fn head(&mut self, key: &[u8], record: usize) -> Result<()> {
        let key_len = u32::try_from(key.len())
            .map_err(|_| Error::corrupt("a key is longer than etcd takes (4 GiB)"))?;
        self.bytes(&key_len.to_le_bytes())?;
        self.bytes(&(record as u64).to_le_bytes())?;
        self.bytes(key)
    }

    fn bytes(&mut self, b: &[u8]) -> Result<()> {
        self.0.write_all(b).map_err(unwritten)
    }

    fn finish(self) -> Result<TempFile> {
        let mut file = self.0.into_inner().map_err(|e| unwritten(e.into_error()))?;
        file.rewind().map_err(unread)?;
        Ok(file)
    }
}

fn unwritten(e: io::Error) -> Error {
    Error::io(
        "write records to the temporary directory (choose another with --temp-dir)",
        e,
    )
}

fn unread(e: io::Error) -> Error {
    Error::io("read records back from the temporary directory", e)
}

/// Merges runs. Of each it holds the next key alone: records may be long.
#[derive(Debug)]
pub(super) struct Merge {
    runs: Vec<Run>,
    /// The next keys. Of equal ones the run that is older comes first.
    ahead: BinaryHeap<Reverse<(Vec<u8>, usize)>>,
    key: Vec<u8>,
    /// The run that `key` is from, and whether its record was not read yet.
    current: Option<usize>,
}

#[derive(Debug)]
struct Run {
    file: BufReader<TempFile>,
    /// Bytes of the record that comes next in the file.
    record: u64,
}

impl Run {
    /// The next key; `None` at the end. The record before it must have been read.
    fn key(&mut self, mut key: Vec<u8>) -> Result<Option<Vec<u8>>> {
        if self.file.fill_buf().map_err(unread)?.is_empty() {
            return Ok(None);
        }
        let (mut len, mut record) = ([0; 4], [0; 8]);
        self.file.read_exact(&mut len).map_err(unread)?;
        self.file.read_exact(&mut record).map_err(unread)?;
        self.record = u64::from_le_bytes(record);
        key.resize(u32::from_le_bytes(len) as usize, 0);
        self.file.read_exact(&mut key).map_err(unread)?;
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
            let mut run = Run { file, record: 0 };
            if let Some(key) = run.key(Vec::new())? {
                merge.ahead.push(Reverse((key, i)));
            }
            merge.runs.push(run);
        }
        Ok(merge)
    }

    /// Goes on to the next key; false at the end. The record of the one before must have been read.
    fn advance(&mut self) -> Result<bool> {
        if let Some(i) = self.current.take() {
            let spare = std::mem::take(&mut self.key);
            if let Some(key) = self.runs[i].key(spare)? {
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

    fn run(&mut self) -> Result<&mut Run> {
        let current = self.current.map(|i| &mut self.runs[i]);
        current.ok_or_else(|| Error::internal("a record was read before its key"))
    }

    fn record_len(&mut self) -> Result<usize> {
        let len = self.run()?.record;
        usize::try_from(len).map_err(|_| unread(io::ErrorKind::InvalidData.into()))
    }

    fn read_record(&mut self, out: &mut [u8]) -> Result<()> {
        self.run()?.file.read_exact(out).map_err(unread)
    }

    fn copy_record(
        &mut self,
        buf: &mut [u8],
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut left = self.record_len()?;
        while left > 0 {
            let n = left.min(buf.len());
            self.read_record(&mut buf[..n])?;
            each(&buf[..n])?;
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
    fn what_goes_in_comes_out_in_order_whatever_the_limit() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        let dir = tempfile::tempdir().unwrap();
        // With the lowest limit each record is a run of its own, and runs are merged twice.
        for (records, limit) in [(0, 1), (1, 1), (2500, 1), (5000, 2000), (5000, 1 << 20)] {
            let mut expected: Vec<(Vec<u8>, Vec<u8>)> = (0..records)
                .map(|i: usize| {
                    let mut key = vec![0; rng.usize(..4)];
                    let mut record = vec![0; rng.usize(..60)];
                    rng.fill(&mut key);
                    rng.fill(&mut record);
                    // Equal keys are told apart by their records.
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
            // Stable, as the sorter is.
            expected.sort_by(|a, b| a.0.cmp(&b.0));
            let sorted = sorter.finish().unwrap();
            let in_files = matches!(sorted, Sorted::Merged { .. });
            assert_eq!(in_files, limit < 1 << 20 && records > 1, "limit {limit}");
            assert!(all(sorted) == expected, "limit {limit}");
        }
        // The files had no names.
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let mut sorter = Sorter::new(Dir::new("/nowhere/at/all", false), 1);
        sorter.push(b"a", b"1").unwrap();
        let e = sorter.push(b"b", b"2").unwrap_err();
        assert_eq!(e.reason(), Reason::Io);
        let said = e.to_string();
        assert!(
            said.contains("/nowhere/at/all") && said.contains("--temp-dir"),
            "{said}"
        );
    }
}
