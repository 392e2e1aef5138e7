//! Standard output: text, JSON, and streamed results, which are printed piece by piece because they may be larger
//! than memory.
//!
//! If a command fails after it has begun to print, `fail` in `cli::print` completes the output with the
//! failure ([`end_with`]), so that JSON stays valid. `get`, `history`, `diff` and `export` use it.

use super::Ended;
use crate::base::printable::{self, SafeJson};
use crate::error::{Error, Result};
use serde::Serialize;
use std::io::{BufWriter, ErrorKind, Stdout, Write};
use std::sync::atomic::{AtomicU8, Ordering};

/// Which JSON has been begun on standard output and not completed. A static, because `fail` needs it even after
/// a panic.
static OPEN: AtomicU8 = AtomicU8::new(Open::Nothing as u8);

/// JSON that is begun on standard output, and not completed.
#[repr(u8)]
enum Open {
    /// Nothing.
    Nothing,
    /// An object with a list as its last field.
    List,
    /// JSON lines: one object in each line.
    Lines,
}

impl Open {
    fn set(self) {
        OPEN.store(self as u8, Ordering::Relaxed);
    }

    fn is(self) -> bool {
        OPEN.load(Ordering::Relaxed) == self as u8
    }
}

/// Standard output, buffered.
pub(super) struct Stream {
    out: BufWriter<Stdout>,
    /// The reader has closed the pipe.
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

    /// Writes bytes.
    ///
    /// # Errors
    /// `Io`, also if the reader has closed the pipe; [`end`](Self::end) ignores the latter.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| self.failed(e))
    }

    fn failed(&mut self, e: std::io::Error) -> Error {
        self.closed |= e.kind() == ErrorKind::BrokenPipe;
        Error::io("write to standard output", e)
    }

    /// Begins an object with the fields of `head`, and then an open list named `list`.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn begin_list(&mut self, head: &impl Serialize, list: &str) -> Result<()> {
        let begin = begin_list(&to_json(head)?, list);
        self.items = 0;
        Open::List.set();
        self.write(begin.as_bytes())
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

    /// Serializes directly into the output buffer. A string with the JSON of a long value would take several
    /// times its size in memory.
    fn json(&mut self, item: &impl Serialize) -> Result<()> {
        serde_json::to_writer(SafeJson(&mut self.out), item).map_err(|e| {
            if e.is_io() {
                self.failed(e.into())
            } else {
                json_error(&e)
            }
        })
    }

    /// Ends the list and its object.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn end_list(&mut self) -> Result<()> {
        self.end_list_with(&serde_json::Map::new())
    }

    /// Ends the list with more fields after it, and its object.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn end_list_with(&mut self, fields: &impl Serialize) -> Result<()> {
        let end = list_end(&to_json(fields)?);
        self.write(end.as_bytes())?;
        self.flush()?;
        Open::Nothing.set();
        Ok(())
    }

    /// Begins JSON lines. From now on, a failure is printed as one more line.
    pub(super) fn begin_lines(&mut self) {
        Open::Lines.set();
    }

    /// Adds an object as a line.
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

    /// Ends the output of a command with its result. A closed pipe is not a failure.
    ///
    /// # Errors
    /// That of `result`; otherwise as [`write`](Self::write).
    pub(super) fn end(mut self, result: Result<()>) -> Ended {
        if self.closed {
            // The failure in `result` is the closed pipe itself.
            self.discard();
            return Ok(None);
        }
        // Print what was written before a failure, too.
        let flushed = self.flush();
        if self.closed {
            self.discard();
            return result.map(|()| None);
        }
        result.and(flushed).map(|()| None)
    }

    /// Discards the buffer, which could only be written to a closed pipe.
    fn discard(self) {
        let _ = self.out.into_parts();
    }
}

/// Returns the JSON object `head` without its closing brace, followed by `"list":[`. `list` is the name of the
/// field.
fn begin_list(head: &str, list: &str) -> String {
    let fields = head.strip_suffix('}').unwrap_or(head);
    let separator = match fields {
        "{" => "",
        _ => ",",
    };
    format!("{fields}{separator}\"{list}\":[")
}

/// Returns the end of a list and of its object, with these fields in between.
fn list_end(fields: &str) -> String {
    let fields = fields.strip_prefix('{').unwrap_or(fields);
    let fields = fields.strip_suffix('}').unwrap_or(fields);
    let separator = if fields.is_empty() { "" } else { "," };
    format!("\n]{separator}{fields},\"status\":\"Succeeded\"}}\n")
}

/// Prints text on standard output. A reader that has closed the pipe is not an error.
pub(super) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::io("write to standard output", e)),
    }
}

/// Prints a value as indented JSON.
pub(super) fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::internal(format!("a result cannot be written as JSON: {e}")))?;
    print(&(printable::json(&text) + "\n"))
}

/// Prints a failure so that the output stays valid JSON: as the last fields of an open object, as a line, or as
/// an object of its own.
pub(super) fn end_with(failure: &impl Serialize) -> Result<()> {
    if Open::List.is() {
        let failure = to_json(failure)?;
        let fields = failure.strip_prefix('{').unwrap_or(&failure);
        return print(&format!("\n],{fields}\n"));
    }
    if Open::Lines.is() {
        return print(&(to_json(failure)? + "\n"));
    }
    print_json(failure)
}

fn to_json(value: &impl Serialize) -> Result<String> {
    let text = serde_json::to_string(value).map_err(|e| json_error(&e))?;
    Ok(printable::json(&text).into_owned())
}

fn json_error(e: &serde_json::Error) -> Error {
    Error::internal(format!("a result cannot be written as JSON: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_head_may_end_with_an_object() {
        for head in [
            json!({"revision": 1}),
            json!({"revision": 1, "object": {"name": {"key": "a}"}}}),
            json!({}),
        ] {
            let text = begin_list(&to_json(&head).unwrap(), "keys") + "]}";
            let mut expected = head.clone();
            expected["keys"] = json!([]);
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
        }
    }
}
