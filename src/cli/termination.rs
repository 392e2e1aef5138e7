//! The termination message: how a command ended, as one small JSON object in a file.
//!
//! `telemetry::termination` says what stands in it. It never changes how a command ends.
//! `main` in `cli` begins and ends it, and `print_outcome` hands it every outcome.

use crate::base::lock;
use crate::error::Error;
use crate::telemetry::termination::Message;
use chrono::Utc;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

/// What a command that runs has come to; a panic must not hide it from whoever ends it.
static OUTCOME: Mutex<Kept> = Mutex::new(Kept {
    wanted: false,
    outcome: None,
});

struct Kept {
    wanted: bool,
    outcome: Option<Map<String, Value>>,
}

fn kept() -> MutexGuard<'static, Kept> {
    lock(&OUTCOME)
}

/// Keeps an outcome for the message, if one is asked for.
pub(super) fn keep(outcome: &impl Serialize) {
    let mut kept = kept();
    if kept.wanted {
        // One that is no JSON fails where it is printed.
        kept.outcome = match serde_json::to_value(outcome) {
            Ok(Value::Object(outcome)) => Some(outcome),
            _ => None,
        };
    }
}

/// The message of a command that runs.
pub(super) struct Termination {
    file: Option<PathBuf>,
    command: Option<String>,
    started: Instant,
}

impl Termination {
    /// Of a command that begins. What an earlier run left in the file is gone from now on: where nothing can
    /// be said at the end, nothing is said.
    pub(super) fn begin(file: Option<PathBuf>, command: Option<String>, started: Instant) -> Self {
        kept().wanted = file.is_some();
        if let Some(file) = &file {
            // That it cannot be written is told at the end.
            let _ = open(OpenOptions::new().truncate(true), file);
        }
        Termination {
            file,
            command,
            started,
        }
    }

    /// Writes it, if it is asked for.
    ///
    /// # Errors
    /// Why it was not written, in words.
    pub(super) fn end(&self, failure: Option<&Error>) -> Result<(), String> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let message = Message::new(
            self.command.as_deref(),
            failure,
            kept().outcome.as_ref(),
            self.started.elapsed(),
            Utc::now(),
        );
        let text = serde_json::to_string(&message).unwrap_or_default();
        write(file, &text).map_err(|e| {
            format!(
                "the termination message was not written: {}: {e}",
                file.display()
            )
        })
    }
}

fn open(options: &mut OpenOptions, file: &Path) -> std::io::Result<std::fs::File> {
    // A pipe without a reader must not hold the process.
    options
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .mode(0o600)
        .open(file)
}

/// In place: in a Pod it is a mount, under which nothing can be renamed.
fn write(file: &Path, text: &str) -> std::io::Result<()> {
    let mut out = open(OpenOptions::new().create(true).truncate(true), file)?;
    out.write_all(text.as_bytes()).inspect_err(|_| {
        // A part of it would be no JSON.
        let _ = out.set_len(0);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_written_is_left_empty() {
        let folder = tempfile::TempDir::new().unwrap();
        let file = folder.path().join("message");
        write(&file, "a long one").unwrap();
        write(&file, "short").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "short");
        assert!(write(folder.path(), "x").is_err());
        assert!(write(&folder.path().join("no/folder"), "x").is_err());
    }
}
