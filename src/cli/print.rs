//! Printing: a command's result on standard output, and its failure on standard error.
//!
//! Results that may be larger than memory go through `stream` instead. All commands call it.

use super::stream::{self, print, print_json};
use super::terminal::{self, Style};
use super::{Ended, Output, termination};
use crate::base::printable;
use crate::error::{Error, Reason};
use crate::ops::report::Report;
use crate::telemetry::logs;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

/// Prints a command's outcome in the requested format, and keeps it for the termination message.
pub(super) fn print_outcome<T: Serialize>(
    output: Output,
    outcome: &T,
    to_text: impl FnOnce(&T) -> String,
) -> Ended {
    termination::keep(outcome);
    match output {
        Output::Json => print_json(outcome)?,
        Output::Text => {
            let in_colour = terminal::stdout_has_colour();
            print(&terminal::render(&to_text(outcome), in_colour))?;
        }
    }
    Ok(None)
}

/// Prints the report of an operation like [`print_outcome`], and returns the failure that it contains.
pub(super) fn print_report<T: Serialize>(
    output: Output,
    mut report: Report<T>,
    to_text: impl FnOnce(&Report<T>) -> String,
) -> Ended {
    let failure = report.failure.take();
    logs::warn_of_others(&report.warnings);
    print_outcome(output, &report, to_text)?;
    Ok(failure)
}

/// The JSON object of a failure. The fields are a contract.
#[derive(JsonSchema, Serialize)]
#[schemars(extend("oneOf" = codes()))]
pub(super) struct Failure {
    /// The result of the command.
    status: FailedStatus,
    /// The process's exit code; see exit-codes.md.
    code: u8,
    /// The reason for the failure: a stable name; see exit-codes.md.
    reason: Reason,
    /// What failed, where, and what to do. Human-readable: the wording may change.
    message: String,
}

/// Returns one schema for each exit code: that code, with any of its reasons.
pub(super) fn codes() -> Value {
    let mut reasons: BTreeMap<u8, Vec<&str>> = BTreeMap::new();
    for reason in Reason::ALL {
        let of_code = reasons.entry(reason.exit_code()).or_default();
        of_code.push(reason.as_str());
    }
    let pairs = reasons.iter().map(|(code, reasons)| {
        json!({"properties": {"code": {"const": code}, "reason": {"enum": reasons}}})
    });
    pairs.collect()
}

/// The result of a command that failed.
#[derive(JsonSchema, Serialize)]
enum FailedStatus {
    /// The command failed; the process ends with the code in `code`.
    Failed,
}

impl Failure {
    pub(super) fn new(reason: Reason, message: String) -> Self {
        Failure {
            status: FailedStatus::Failed,
            code: reason.exit_code(),
            reason,
            message,
        }
    }
}

/// Prints a failure, and returns its exit code: as a line on standard error if `on_stderr`, and as an object
/// on standard output if the output is JSON.
pub(super) fn fail(e: &Error, output: Output, on_stderr: bool) -> ExitCode {
    let code = e.reason().exit_code();
    if on_stderr {
        let label = terminal::marked(Style::Bad, "error:");
        let message = printable::line(&e.to_string()).into_owned();
        let line = format!("{label} {message} [{}]", e.reason());
        let line = match terminal::stderr_width() {
            Some(width) => terminal::wrap(&line, width, 2),
            None => line,
        };
        let line = terminal::render(&line, terminal::stderr_has_colour());
        // Ignore a failure: the exit code still reports the error.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
    if output == Output::Json {
        let failure = Failure::new(e.reason(), e.to_string());
        // Ignore a failure: there is no other place to report it.
        let _ = stream::end_with(&failure);
    }
    ExitCode::from(code)
}

/// A size in bytes with a unit, such as "1.20 MiB".
pub(super) fn size(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}
