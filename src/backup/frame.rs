//! The frame of a snapshot: the payload, then the 32 bytes of its SHA-256.
//!
//! The payload is not compressed or parsed here.

use crate::base::limits::Limits;
use crate::error::Error;
use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};

/// The size of the hash after the payload, in bytes.
pub const HASH_SIZE: usize = 32;
/// The number of bytes that are read at first: most deltas are small.
const FIRST_CHUNK: usize = 16 << 10;
/// The number of bytes that are read at once, at most.
const CHUNK: usize = 256 << 10;

/// Reads the payload, and checks its hash at the end.
///
/// The payload is returned before it is known to be intact: the caller must not act on it before `read` has
/// returned 0.
pub struct FrameReader<R> {
    inner: R,
    hash: Sha256,
    /// `buf[at..end]` was read and not yet returned. Its last 32 bytes may be the hash.
    buf: Vec<u8>,
    at: usize,
    end: usize,
    payload_bytes: u64,
    limits: Limits,
    state: ReadState,
}

#[derive(PartialEq)]
enum ReadState {
    Reading,
    Verified,
    Failed,
}

impl<R: Read> FrameReader<R> {
    /// Reads a frame from uncompressed bytes.
    pub fn new(inner: R) -> Self {
        FrameReader {
            inner,
            hash: Sha256::new(),
            buf: vec![0; FIRST_CHUNK + HASH_SIZE],
            at: 0,
            end: 0,
            payload_bytes: 0,
            limits: Limits::NONE,
            state: ReadState::Reading,
        }
    }

    /// Fails if the payload is larger than a database may be: a small compressed object can unpack to any
    /// size.
    pub fn within(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Returns the number of payload bytes that were read so far.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Returns the inner reader.
    pub fn into_inner(self) -> R {
        self.inner
    }

    fn fill(&mut self) -> io::Result<()> {
        self.buf.copy_within(self.at..self.end, 0);
        let was_full = self.end == self.buf.len();
        self.end -= self.at;
        self.at = 0;
        if was_full && self.buf.len() < CHUNK {
            self.buf.resize(CHUNK + HASH_SIZE, 0);
        }
        while self.end <= HASH_SIZE {
            match self.inner.read(&mut self.buf[self.end..]) {
                Ok(0) => return self.verify(),
                Ok(n) => self.end += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn verify(&mut self) -> io::Result<()> {
        self.state = ReadState::Failed;
        let hash = &self.buf[self.at..self.end];
        if hash.len() < HASH_SIZE {
            return Err(Error::corrupt(format!(
                "it is cut short: its {} bytes are too few for the SHA-256 at its end",
                hash.len()
            ))
            .into());
        }
        if self.hash.finalize_reset().as_slice() != hash {
            return Err(Error::corrupt(
                "its SHA-256 does not match: the object is damaged or cut short",
            )
            .into());
        }
        self.state = ReadState::Verified;
        Ok(())
    }
}

impl<R: Read> Read for FrameReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self.state {
            ReadState::Verified => return Ok(0),
            ReadState::Failed => return Err(io::Error::other("read after a failed frame")),
            ReadState::Reading => {}
        }
        if out.is_empty() {
            return Ok(0);
        }
        if self.end - self.at <= HASH_SIZE {
            self.fill()?;
            if self.state == ReadState::Verified {
                return Ok(0);
            }
        }
        let ready = &self.buf[self.at..self.end - HASH_SIZE];
        let n = ready.len().min(out.len());
        if self.payload_bytes + n as u64 > self.limits.database_bytes {
            self.state = ReadState::Failed;
            let most = self.limits.database_bytes;
            let what = format!("the object unpacks to more than {most} bytes");
            return Err(self.limits.database_too_large(what).into());
        }
        out[..n].copy_from_slice(&ready[..n]);
        self.hash.update(&out[..n]);
        self.at += n;
        self.payload_bytes += n as u64;
        Ok(n)
    }
}

/// Writes a payload, and appends its hash.
pub struct FrameWriter<W> {
    inner: W,
    hash: Sha256,
}

impl<W: Write> FrameWriter<W> {
    /// Creates a writer of a frame to `inner`.
    pub fn new(inner: W) -> Self {
        FrameWriter {
            inner,
            hash: Sha256::new(),
        }
    }

    /// Appends the hash and returns `inner`.
    ///
    /// # Errors
    /// Errors of `inner`.
    pub fn finish(mut self) -> io::Result<W> {
        self.inner.write_all(self.hash.finalize().as_slice())?;
        Ok(self.inner)
    }
}

impl<W: Write> Write for FrameWriter<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(b)?;
        self.hash.update(&b[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads one byte at a time, so that every boundary is tested.
    struct OneByteReader<'a>(&'a [u8]);
    impl Read for OneByteReader<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.0.read(&mut out[..1.min(self.0.len())])
        }
    }

    #[test]
    fn an_endless_frame_is_refused() {
        let limits = Limits {
            database_bytes: 1 << 20,
            ..Limits::default()
        };
        let mut endless = FrameReader::new(io::repeat(7)).within(limits);
        let mut out = Vec::new();
        let e = Error::io("read", endless.read_to_end(&mut out).unwrap_err());
        assert_eq!(e.reason(), crate::error::Reason::TooLarge, "{e}");
        assert!(out.len() <= 1 << 20);
        assert!(endless.read(&mut [0; 8]).is_err());
    }

    #[test]
    fn every_cut_and_every_flipped_bit_is_detected() {
        for len in [0, 1, 31, 32, 33, 100] {
            let payload: Vec<u8> = (0..len as u8).collect();
            let mut w = FrameWriter::new(Vec::new());
            w.write_all(&payload).unwrap();
            let framed = w.finish().unwrap();
            let read = |b: &[u8]| {
                let mut out = Vec::new();
                FrameReader::new(OneByteReader(b))
                    .read_to_end(&mut out)
                    .map(|_| out)
            };
            assert_eq!(read(&framed).unwrap(), payload);
            for cut in 0..framed.len() {
                assert!(read(&framed[..cut]).is_err());
            }
            for i in 0..framed.len() {
                let mut flipped = framed.clone();
                flipped[i] ^= 1;
                assert!(read(&flipped).is_err());
            }
        }
    }
}
