//! Reads ahead on a thread of its own, so that decompressing and what is done with the result go
//! on side by side.

use crate::error::{Error, Result};
use std::io::{self, Read};
use std::sync::mpsc;

/// Bytes of a buffer; there are four.
const BUFFER: usize = 256 << 10;
const BUFFERS: usize = 4;

/// Gives what another reader gives.
pub(super) struct Ahead {
    full: mpsc::Receiver<io::Result<Vec<u8>>>,
    empty: mpsc::Sender<Vec<u8>>,
    current: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Ahead {
    /// Starts to read. Dropping this ends the thread with its next buffer.
    ///
    /// # Errors
    /// `Io` where the system has no thread left.
    pub(super) fn new(mut inner: impl Read + Send + 'static) -> Result<Self> {
        let (give, full) = mpsc::sync_channel(BUFFERS);
        let (empty, take) = mpsc::channel::<Vec<u8>>();
        for _ in 0..BUFFERS {
            // The other end is at hand.
            let _ = empty.send(Vec::new());
        }
        let read = move || {
            while let Ok(mut buffer) = take.recv() {
                buffer.resize(BUFFER, 0);
                let mut n = 0;
                let failed = loop {
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
                let last = n < BUFFER;
                buffer.truncate(n);
                if n > 0 && give.send(Ok(buffer)).is_err() {
                    return;
                }
                if last {
                    // An empty buffer marks the end: a thread that panics leaves none.
                    let _ = give.send(failed.map_or(Ok(Vec::new()), Err));
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .spawn(read)
            .map_err(|e| Error::io("start a thread (give fewer with --threads)", e))?;
        Ok(Ahead {
            full,
            empty,
            current: Vec::new(),
            at: 0,
            ended: false,
        })
    }
}

impl Read for Ahead {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.current.len() && !self.ended {
            let next = self
                .full
                .recv()
                .map_err(|_| io::Error::other("the thread that decompresses has ended"))??;
            self.ended = next.is_empty();
            let used = std::mem::replace(&mut self.current, next);
            self.at = 0;
            // The thread may have ended already.
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
    fn all_is_given_in_order_and_an_error_comes_last() {
        for len in [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 9 * BUFFER + 5] {
            let data: Vec<u8> = (0..len).map(|i| (i / 3) as u8).collect();
            let mut out = Vec::new();
            let inner = io::Cursor::new(data.clone());
            Ahead::new(inner).unwrap().read_to_end(&mut out).unwrap();
            assert!(out == data, "{len}");
            out.clear();
            let mut failing = Ahead::new(Failing(len)).unwrap();
            let e = failing.read_to_end(&mut out).unwrap_err();
            assert_eq!((e.to_string(), out.len()), ("torn".to_owned(), len));
        }
    }
}
