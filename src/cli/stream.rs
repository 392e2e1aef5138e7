//! Results that are printed as they come about, for they may be larger than memory.
//!
//! A result that has begun is always ended: where the command fails on the way, `fail` in `cli` ends it
//! with the failure (`end_with`). The commands that read a backup call it.

use super::Ended;
use crate::error::{Error, Result};
use serde::Serialize;
use std::io::{BufWriter, ErrorKind, Stdout, Write};
use std::sync::atomic::{AtomicU8, Ordering};

/// Nothing was printed.
const NOTHING: u8 = 0;
/// A list stands open, in an object.
const LIST: u8 = 1;
/// Each line is an object.
const LINES: u8 = 2;

/// What standard output holds; a panic must not hide it from whoever ends it.
static BEGUN: AtomicU8 = AtomicU8::new(NOTHING);

/// Standard output.
pub(super) struct Stream {
    out: BufWriter<Stdout>,
    /// Whoever read has seen enough.
    closed: bool,
    items: u64,
}

impl Stream {
    pub(super) fn new() -> Self {
        Stream {
            out: BufWriter::with_capacity(64 << 10, std::io::stdout()),
            closed: false,
            items: 0,
        }
    }

    /// Writes bytes as they are.
    ///
    /// # Errors
    /// `Io`; also where nobody reads any more, which [`end`](Self::end) forgives.
    pub(super) fn write(&mut self, b: &[u8]) -> Result<()> {
        self.out.write_all(b).map_err(|e| self.failed(e))
    }

    fn failed(&mut self, e: std::io::Error) -> Error {
        self.closed |= e.kind() == ErrorKind::BrokenPipe;
        Error::io("write to standard output", e)
    }

    /// Begins an object with the fields of `head` and an open list.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn begin_list(&mut self, head: &impl Serialize, list: &str) -> Result<()> {
        let head = json(head)?;
        let fields = head.trim_end_matches('}');
        BEGUN.store(LIST, Ordering::Relaxed);
        self.write(format!("{fields},\"{list}\":[").as_bytes())
    }

    /// Adds an element to the list.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn item(&mut self, item: &impl Serialize) -> Result<()> {
        self.write(if self.items == 0 { b"\n" } else { b",\n" })?;
        self.items += 1;
        self.json(item)
    }

    /// Writes JSON as it comes about: a long value would be several times as long in memory.
    fn json(&mut self, item: &impl Serialize) -> Result<()> {
        serde_json::to_writer(&mut self.out, item).map_err(|e| match e.is_io() {
            true => self.failed(e.into()),
            false => no_json(&e),
        })
    }

    /// Ends the list and its object.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn end_list(&mut self) -> Result<()> {
        self.write(b"\n],\"status\":\"Succeeded\"}\n")?;
        self.flush()?;
        BEGUN.store(NOTHING, Ordering::Relaxed);
        Ok(())
    }

    /// From here on each line is an object, also the one of a failure.
    pub(super) fn begin_lines(&mut self) {
        BEGUN.store(LINES, Ordering::Relaxed);
    }

    /// Adds a line.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn line(&mut self, item: &impl Serialize) -> Result<()> {
        self.json(item)?;
        self.write(b"\n")
    }

    fn flush(&mut self) -> Result<()> {
        self.out.flush().map_err(|e| self.failed(e))
    }

    /// Ends the output of a command. That nobody reads it any more is no failure.
    ///
    /// # Errors
    /// Those of `result`, and as [`write`](Self::write).
    pub(super) fn end(mut self, result: Result<()>) -> Ended {
        let (result, flushed) = match self.closed {
            // The failure is the closed pipe itself.
            true => (Ok(()), Ok(())),
            // What was written before a failure is still wanted.
            false => (result, self.flush()),
        };
        if self.closed {
            // The buffer's rest has nowhere to go.
            let _ = self.out.into_parts();
            return result.map(|()| None);
        }
        result.and(flushed).map(|()| None)
    }
}

/// Prints a failure: as an object, or as the end of what has begun.
pub(super) fn end_with(failure: &impl Serialize) -> Result<()> {
    let text = match BEGUN.load(Ordering::Relaxed) {
        LIST => "\n],".to_owned() + json(failure)?.trim_start_matches('{'),
        LINES => json(failure)?,
        _ => return super::print_json(failure),
    };
    super::print(&(text + "\n"))
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| no_json(&e))
}

fn no_json(e: &serde_json::Error) -> Error {
    Error::internal(format!("an outcome that is no JSON: {e}"))
}
