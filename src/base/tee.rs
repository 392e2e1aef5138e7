//! A reader that also writes down what it reads.

use std::io::{self, Read, Write};

/// Reads from one stream, and writes everything to another.
pub(crate) struct Tee<R, W> {
    pub from: R,
    pub to: W,
}

impl<R: Read, W: Write> Read for Tee<R, W> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(out)?;
        self.to.write_all(&out[..n])?;
        Ok(n)
    }
}
