//! The termination message: the result of a command as a small JSON object in a file (--termination-log).
//!
//! `telemetry::termination` defines the object. A failure to write it does not change the exit code.
//! `cli::main` calls `begin` and `end`; `print_report` calls `keep` with the report.

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

/// The outcome of the running command. It is static, so that it is still known after a panic.
static OUTCOME: Mutex<KeptOutcome> = Mutex::new(KeptOutcome {
    is_wanted: false,
    outcome: None,
});

struct KeptOutcome {
    /// Whether a message will be written.
    is_wanted: bool,
    outcome: Option<Map<String, Value>>,
}

fn kept() -> MutexGuard<'static, KeptOutcome> {
    lock(&OUTCOME)
}

/// Keeps the outcome for the message, if one will be written.
pub(super) fn keep(outcome: &impl Serialize) {
    let mut kept = kept();
    if kept.is_wanted {
        // An outcome that is no JSON object is left out. If it cannot be JSON at all, printing it reports the
        // error.
        kept.outcome = match serde_json::to_value(outcome) {
            Ok(Value::Object(outcome)) => Some(outcome),
            _ => None,
        };
    }
}

/// The termination message of the running command.
pub(super) struct Termination {
    file: Option<PathBuf>,
    command: Option<String>,
    started: Instant,
}

impl Termination {
    /// Begins the message, and empties the file: an old message must not remain if the process is killed.
    pub(super) fn begin(file: Option<PathBuf>, command: Option<String>, started: Instant) -> Self {
        kept().is_wanted = file.is_some();
        if let Some(file) = &file {
            // Ignore the error here: `end` reports it.
            let _ = open(OpenOptions::new().truncate(true), file);
        }
        Termination {
            file,
            command,
            started,
        }
    }

    /// Writes the message, if --termination-log is given.
    ///
    /// # Errors
    /// A message that says why the file could not be written.
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
        let text = serde_json::to_string(&message).map_err(std::io::Error::from);
        text.and_then(|text| write(file, &text)).map_err(|e| {
            format!(
                "cannot write the termination message to {}: {e}",
                file.display()
            )
        })
    }
}

fn open(options: &mut OpenOptions, file: &Path) -> std::io::Result<std::fs::File> {
    // If the file is a named pipe, do not wait until somebody reads it.
    options
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .mode(0o600)
        .open(file)
}

/// Overwrites the file in place. In a Pod the file itself is a mount, so it cannot be replaced by a rename.
fn write(file: &Path, text: &str) -> std::io::Result<()> {
    let mut out = open(OpenOptions::new().create(true).truncate(true), file)?;
    out.write_all(text.as_bytes()).inspect_err(|_| {
        // Part of the message would not be valid JSON.
        let _ = out.set_len(0);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_whole_message_or_an_error_is_returned() {
        let folder = tempfile::TempDir::new().unwrap();
        let file = folder.path().join("message");
        write(&file, "a long one").unwrap();
        write(&file, "short").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "short");
        assert!(write(folder.path(), "x").is_err());
        assert!(write(&folder.path().join("no/folder"), "x").is_err());
    }
}
