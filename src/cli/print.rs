//! Printing: a command's result on standard output, and its failure on standard error.
//!
//! Results that may be larger than memory go through `stream` instead. All commands call it.

use super::render::{self, Render};
use super::stream::{self, print, print_json};
use super::terminal::{self, Style};
use super::{Ended, Output, termination};
use crate::base::printable;
use crate::error::{Error, Reason};
use crate::ops::report::Report;
use crate::telemetry::logs;
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;

/// Prints a report in the requested format, keeps it for the termination message, and returns the failure in it.
pub(super) fn print_report<B: Render>(output: Output, report: Report<B>) -> Ended {
    logs::warn_of_others(&report.warnings);
    termination::keep(&report);
    match output {
        Output::Json => print_json(&report)?,
        Output::Text => {
            let text = render::to_text(&B::blocks(&report), terminal::stdout_width());
            print(&terminal::render(&text, terminal::stdout_has_colour()))?;
        }
    }
    Ok(report.failure)
}

/// The JSON object of a failure. The fields are a contract.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("oneOf" = super::schema_tests::codes())))]
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

/// The result of a command that failed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
