//! The database of a full as a stream of the length that its meta pages give.
//!
//! The meta pages come first and give the length of the database. So a caller knows the length before it stores the
//! stream, and a small object cannot unpack to more. No other page is checked.

use crate::base::limits::Limits;
use crate::bolt::page::Meta;
use crate::bolt::{METAS_END, newest_meta};
use crate::error::Error;
use std::io::{self, Read};

/// Reads a database, and fails if it is longer or shorter than its meta pages say.
pub struct FullReader<R> {
    /// The meta pages, which were read already, and the rest of the stream.
    inner: io::Chain<io::Cursor<Vec<u8>>, R>,
    meta: Meta,
    /// Bytes that may follow the pages in use.
    tail: u64,
    bytes_read: u64,
}

impl<R: Read> FullReader<R> {
    /// Reads the meta pages. Up to `tail` bytes may follow the pages in use.
    ///
    /// # Errors
    /// `CorruptSnapshot` if no meta page is valid; `TooLarge` if the database exceeds `limits`; errors of
    /// `inner`.
    pub fn open(mut inner: R, limits: &Limits, tail: u64) -> io::Result<Self> {
        let mut metas = Vec::new();
        inner
            .by_ref()
            .take(METAS_END as u64)
            .read_to_end(&mut metas)?;
        let meta = newest_meta(&metas)?;
        limits.check_database(meta.bytes())?;
        Ok(FullReader {
            inner: io::Cursor::new(metas).chain(inner),
            meta,
            tail,
            bytes_read: 0,
        })
    }

    /// Returns the size of the pages in use by the newest meta page, in bytes.
    pub fn promised(&self) -> u64 {
        self.meta.bytes()
    }
}

impl<R: Read> Read for FullReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.bytes_read += n as u64;
        let promised = self.promised();
        let longest = promised.saturating_add(self.tail);
        if self.bytes_read > longest || (n == 0 && !out.is_empty() && self.bytes_read < promised) {
            let (what, read) = match n {
                0 => ("it is cut short", format!("{} were read", self.bytes_read)),
                _ => ("it does not end", format!("more than {longest} were read")),
            };
            return Err(Error::corrupt(format!(
                "{what}: its meta pages promise {} pages of {} bytes, {promised} bytes in total, but {read}; use another copy or another snapshot",
                self.meta.high_water, self.meta.page_size
            ))
            .into());
        }
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bolt::{TreeBuilder, write_file};
    use crate::error::{Reason, Result};
    use std::io::Seek;

    const PAGE: usize = 4096;

    fn database() -> Vec<u8> {
        let file = tempfile::tempfile().unwrap();
        let mut file = write_file(file, PAGE, "", |w| {
            let mut root = TreeBuilder::new(0);
            for i in 0..100u8 {
                root.push(w, &[i], &[i; 1000])?;
            }
            Ok(root)
        })
        .unwrap();
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        bytes
    }

    fn read(stream: impl Read, limits: &Limits, tail: u64) -> (u64, Result<()>) {
        let mut full = match FullReader::open(stream, limits, tail) {
            Ok(full) => full,
            Err(e) => return (0, Err(Error::io("read", e))),
        };
        let (mut all, mut piece) = (0, [0; 10_000]);
        loop {
            match full.read(&mut piece) {
                Ok(0) => return (all, Ok(())),
                Ok(n) => all += n as u64,
                Err(e) => return (all, Err(Error::io("read", e))),
            }
        }
    }

    #[test]
    fn a_database_must_be_as_long_as_its_meta_pages_say() {
        let (db, limits) = (database(), Limits::default());
        let bytes = db.len() as u64;
        let (n, done) = read(db.as_slice(), &limits, 0);
        done.unwrap();
        assert_eq!(n, bytes);
        // Longer, without end, and shorter.
        for (extra, tail, fits) in [(1, 0, false), (32, 32, true), (33, 32, false)] {
            let stream = db.as_slice().chain(io::repeat(0).take(extra));
            let (_, done) = read(stream, &limits, tail);
            assert_eq!(done.is_ok(), fits, "{extra} {tail}");
        }
        let (n, done) = read(db.as_slice().chain(io::repeat(0)), &limits, 0);
        let e = done.unwrap_err();
        assert_eq!(e.reason(), Reason::CorruptSnapshot);
        assert!(e.to_string().contains(&format!("{bytes} bytes")), "{e}");
        assert!(n <= bytes);
        for cut in [0, 79, PAGE, PAGE + 80, db.len() - 1] {
            let (_, done) = read(&db[..cut], &limits, 0);
            assert_eq!(done.unwrap_err().reason(), Reason::CorruptSnapshot, "{cut}");
        }
    }

    #[test]
    fn a_database_that_is_too_large_is_refused_by_its_meta_pages() {
        let db = database();
        let limits = Limits {
            database_bytes: db.len() as u64 - 1,
            ..Limits::default()
        };
        let (n, done) = read(db.as_slice(), &limits, 0);
        assert_eq!((n, done.unwrap_err().reason()), (0, Reason::TooLarge));
    }
}
