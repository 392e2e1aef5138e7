//! Reads ahead on a separate thread, so that a snapshot is read or decompressed while its content is used.
//!
//! The bytes are not changed.

use crate::base::opt::THREADS;
use crate::error::{Error, Result};
use std::io::{self, Read};
use std::sync::mpsc;

/// The size of a buffer, in bytes.
const BUFFER: usize = 256 << 10;
/// The number of buffers.
const BUFFERS: usize = 4;

/// A reader that is filled by a thread.
pub(super) struct ThreadedReader {
    /// Filled buffers, then an error or an empty buffer at the end.
    filled: mpsc::Receiver<io::Result<Vec<u8>>>,
    /// Buffers to fill again.
    empty: mpsc::Sender<Vec<u8>>,
    current: Vec<u8>,
    /// The position in `current`.
    at: usize,
    ended: bool,
}

impl ThreadedReader {
    /// Starts the thread. After the reader is dropped, the thread ends with its next buffer.
    ///
    /// # Errors
    /// `Io` if the system has no threads left.
    pub(super) fn new(inner: impl Read + Send + 'static) -> Result<Self> {
        let (fill, filled) = mpsc::sync_channel(BUFFERS);
        let (empty, to_fill) = mpsc::channel::<Vec<u8>>();
        for _ in 0..BUFFERS {
            // The send cannot fail: `to_fill` still exists.
            let _ = empty.send(Vec::new());
        }
        std::thread::Builder::new()
            .spawn(move || fill_buffers(inner, &to_fill, &fill))
            .map_err(|e| Error::io(format!("start a thread (give fewer with {THREADS})"), e))?;
        Ok(ThreadedReader {
            filled,
            empty,
            current: Vec::new(),
            at: 0,
            ended: false,
        })
    }
}

/// The body of the thread: fills buffers until the end of `inner`, an error, or the end of the reader.
fn fill_buffers(
    mut inner: impl Read,
    to_fill: &mpsc::Receiver<Vec<u8>>,
    filled: &mpsc::SyncSender<io::Result<Vec<u8>>>,
) {
    while let Ok(mut buffer) = to_fill.recv() {
        buffer.resize(BUFFER, 0);
        let mut n = 0;
        let error = loop {
            match inner.read(&mut buffer[n..]) {
                Ok(0) => break None,
                Ok(more) => n += more,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break Some(e),
            }
            if n == BUFFER {
                break None;
            }
        };
        let is_last = n < BUFFER;
        buffer.truncate(n);
        if n > 0 && filled.send(Ok(buffer)).is_err() {
            return;
        }
        if is_last {
            // An empty buffer marks the end. A thread that panics sends none.
            let _ = filled.send(error.map_or(Ok(Vec::new()), Err));
            return;
        }
    }
}

impl Read for ThreadedReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.current.len() && !self.ended {
            let next = self
                .filled
                .recv()
                .map_err(|_| io::Error::other("the thread that reads ahead has ended"))??;
            self.ended = next.is_empty();
            let used = std::mem::replace(&mut self.current, next);
            self.at = 0;
            // The send fails if the thread has ended.
            let _ = self.empty.send(used);
        }
        let n = out.len().min(self.current.len() - self.at);
        out[..n].copy_from_slice(&self.current[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Failing(usize);
    impl Read for Failing {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            if self.0 == 0 {
                return Err(io::Error::other("torn"));
            }
            let n = self.0.min(out.len()).min(70_000);
            out[..n].fill(7);
            self.0 -= n;
            Ok(n)
        }
    }

    #[test]
    fn all_bytes_come_in_order_and_an_error_comes_last() {
        for len in [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 9 * BUFFER + 5] {
            let data: Vec<u8> = (0..len).map(|i| (i / 3) as u8).collect();
            let mut out = Vec::new();
            let inner = io::Cursor::new(data.clone());
            ThreadedReader::new(inner)
                .unwrap()
                .read_to_end(&mut out)
                .unwrap();
            assert!(out == data, "{len}");
            out.clear();
            let mut failing = ThreadedReader::new(Failing(len)).unwrap();
            let e = failing.read_to_end(&mut out).unwrap_err();
            assert_eq!((e.to_string(), out.len()), ("torn".to_owned(), len));
        }
    }
}
