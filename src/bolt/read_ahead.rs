//! Reads ahead of a cursor, so that pages in file order need one read for many of them.
//!
//! It checks nothing; [`super::reader`] is its only caller.

use crate::base::ReadAt;
use std::io;

/// The maximum number of bytes that are read ahead at once.
const MAX_READ: usize = 256 << 10;

/// A buffer with the part of the file after the page that the cursor read last.
///
/// A read that continues the previous one fills the buffer with twice as many bytes as the cursor used of it
/// before. So the total read is at most about three times the requested bytes, in whatever order the pages
/// lie. A read elsewhere, such as of a branch page between leaves, leaves the buffer as it is.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    buf: Vec<u8>,
    /// The offset of `buf` in the file.
    start: u64,
    /// How many bytes of `buf` the cursor has read.
    used: usize,
    /// The end of the last read that bypassed `buf`.
    last_end: u64,
    /// The end of the database in the file: nothing is read ahead past it.
    limit: u64,
}

impl ReadAhead {
    /// Creates an empty buffer for a database of `limit` bytes.
    pub(super) fn new(limit: u64) -> Self {
        ReadAhead {
            limit,
            ..ReadAhead::default()
        }
    }

    /// Fills `out` with the bytes from `offset` on.
    pub(super) fn read(
        &mut self,
        src: &impl ReadAt,
        out: &mut [u8],
        offset: u64,
    ) -> io::Result<()> {
        let end = self.start + self.buf.len() as u64;
        if (self.start..end).contains(&offset) {
            let buffered = &self.buf[(offset - self.start) as usize..];
            let (from_buf, from_file) = out.split_at_mut(out.len().min(buffered.len()));
            from_buf.copy_from_slice(&buffered[..from_buf.len()]);
            self.used += from_buf.len();
            return if from_file.is_empty() {
                Ok(())
            } else {
                self.read_from_file(src, from_file, end)
            };
        }
        self.read_from_file(src, out, offset)
    }

    /// Fills `out` with the bytes from `offset` on, which are not in `buf`.
    fn read_from_file(&mut self, src: &impl ReadAt, out: &mut [u8], offset: u64) -> io::Result<()> {
        let sequential = if !self.buf.is_empty() && offset == self.start + self.buf.len() as u64 {
            self.used.max(out.len())
        } else if offset == self.last_end {
            out.len()
        } else {
            0
        };
        let most = sequential.saturating_mul(2).min(MAX_READ) as u64;
        let len = self.limit.saturating_sub(offset).min(most) as usize;
        if len > out.len() {
            if self.buf.capacity() < len {
                self.buf.clear();
                self.buf.reserve_exact(len);
            }
            self.buf.resize(len, 0);
            self.start = offset;
            self.used = out.len();
            if src.read_exact_at(&mut self.buf, offset).is_ok() {
                out.copy_from_slice(&self.buf[..out.len()]);
                return Ok(());
            }
            // The unreadable byte may be in a page that nobody requested: read only the requested bytes.
            self.buf.clear();
        }
        src.read_exact_at(out, offset)?;
        self.last_end = offset + out.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A file that counts reads and bytes, and fails to read the byte at `bad`.
    struct Counting {
        bytes: Vec<u8>,
        bad: Option<u64>,
        reads: Cell<u64>,
        bytes_read: Cell<usize>,
    }

    impl ReadAt for Counting {
        fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            self.reads.set(self.reads.get() + 1);
            self.bytes_read.set(self.bytes_read.get() + buf.len());
            let range = offset..offset + buf.len() as u64;
            if self.bad.is_some_and(|bad| range.contains(&bad)) {
                return Err(io::ErrorKind::Other.into());
            }
            self.bytes.read_exact_at(buf, offset)
        }
        fn size(&self) -> io::Result<u64> {
            self.bytes.size()
        }
    }

    const PAGE: usize = 1024;

    fn file(pages: usize) -> Counting {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let mut bytes = vec![0; pages * PAGE];
        rng.fill(&mut bytes);
        Counting {
            bytes,
            bad: None,
            reads: Cell::new(0),
            bytes_read: Cell::new(0),
        }
    }

    /// Reads pages as (first page, number of pages) and compares each with the file. Returns the number of
    /// requested bytes.
    fn walk(src: &Counting, order: impl IntoIterator<Item = (usize, usize)>) -> usize {
        let mut ahead = ReadAhead::new(src.bytes.len() as u64);
        let mut requested = 0;
        for (page, pages) in order {
            let mut out = vec![0; pages * PAGE];
            let at = page * PAGE;
            ahead.read(src, &mut out, at as u64).unwrap();
            assert!(out == src.bytes[at..at + out.len()], "page {page}");
            assert!(ahead.buf.capacity() <= MAX_READ);
            requested += out.len();
        }
        requested
    }

    #[test]
    fn reading_pages_in_any_order_reads_at_most_three_times_their_bytes() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for _ in 0..crate::rounds(30, 300) {
            let src = file(1500);
            let mut order = Vec::new();
            while order.len() < 2000 {
                let (from, step) = (rng.usize(..1400), rng.usize(1..5));
                let size = rng.usize(1..4);
                let run = (from..1500 - size).step_by(step * size);
                order.extend(run.take(rng.usize(1..300)).map(|page| (page, size)));
            }
            let requested = walk(&src, order);
            assert!(
                src.bytes_read.get() <= 3 * requested,
                "{}",
                src.bytes_read.get()
            );
        }
        // The worst case: each run of pages ends when the buffer was just filled.
        let src = file(1 << 14);
        let (mut page, mut order) = (0, Vec::new());
        while page < 1 << 13 {
            order.extend((page..page + 40).map(|page| (page, 1)));
            page += 256;
        }
        let requested = walk(&src, order);
        assert!(
            src.bytes_read.get() <= 3 * requested,
            "{}",
            src.bytes_read.get()
        );
    }

    #[test]
    fn sequential_pages_need_few_reads() {
        let src = file(20_000);
        // After every 100 leaves a branch page elsewhere is read.
        let leaves = (0..10_000).flat_map(|i| {
            let branch = (i % 100 == 0).then_some((19_000 - i / 100 * 7, 1));
            branch.into_iter().chain([(i, 1)])
        });
        let requested = walk(&src, leaves);
        assert!(src.reads.get() < 170, "{} reads", src.reads.get());
        assert!(src.bytes_read.get() < requested + MAX_READ);
    }

    #[test]
    fn an_unreadable_page_fails_only_reads_that_request_it() {
        let mut src = file(300);
        src.bad = Some(200 * PAGE as u64);
        walk(&src, (0..200).chain(201..300).map(|page| (page, 1)));
        let mut ahead = ReadAhead::new(src.bytes.len() as u64);
        let mut out = vec![0; PAGE];
        for page in 0..300 {
            let read = ahead.read(&src, &mut out, (page * PAGE) as u64);
            assert_eq!(read.is_ok(), page != 200, "page {page}");
        }
    }
}
