//! Random access to bytes: a trait for files, `Vec<u8>` and temporary files (`temp::TempFile`).
//!
//! `bolt`, `mvcc` and `ops` read databases through it.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Bytes that can be read at any offset.
pub trait ReadAt {
    /// Fills `buf` with the bytes from `offset` on.
    ///
    /// # Errors
    /// `UnexpectedEof` if fewer than `buf.len()` bytes follow `offset`; errors of the operating
    /// system.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Returns the total size in bytes.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn size(&self) -> io::Result<u64>;
}

impl ReadAt for File {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buf, offset)
    }
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

impl ReadAt for Vec<u8> {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = start
            .checked_add(buf.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(self.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for Arc<T> {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        (**self).read_exact_at(buf, offset)
    }
    fn size(&self) -> io::Result<u64> {
        (**self).size()
    }
}

/// Reads the first bytes of a [`ReadAt`] in order.
pub struct Sequential<R> {
    from: R,
    at: u64,
    end: u64,
}

impl<R> Sequential<R> {
    /// Reads the first `bytes` bytes.
    pub fn new(from: R, bytes: u64) -> Self {
        Sequential {
            from,
            at: 0,
            end: bytes,
        }
    }
}

impl<R: ReadAt> Read for Sequential<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = (self.end - self.at).min(out.len() as u64) as usize;
        self.from.read_exact_at(&mut out[..n], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        (**self).read_exact_at(buf, offset)
    }
    fn size(&self) -> io::Result<u64> {
        (**self).size()
    }
}
