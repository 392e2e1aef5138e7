//! Reports of operations: the outcome, and the fields that all reports have in common.
//!
//! An operation starts a [`ReportBuilder`], adds warnings to it, and ends it with its outcome. Nothing is
//! printed here: `cli` prints the report.

use crate::error::{Error, Reason};
use crate::telemetry::logs;
use crate::telemetry::memory::peak_memory_bytes;
use schemars::JsonSchema;
use serde::Serialize;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

/// The report of an operation. As JSON it is one object that has the outcome's fields and the fields below.
#[derive(Debug, JsonSchema, Serialize)]
pub struct Report<T> {
    /// The outcome of the operation.
    #[serde(flatten)]
    pub outcome: T,
    /// The duration of the operation, in seconds.
    pub seconds: f64,
    /// The peak resident memory in bytes. null if the system does not report it.
    pub peak_memory_bytes: Option<u64>,
    /// Warnings, as human-readable text.
    pub warnings: Vec<String>,
    /// The failure that the outcome describes, if there is one.
    #[serde(skip)]
    pub failure: Option<Error>,
}

impl<T> Deref for Report<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.outcome
    }
}

impl<T> DerefMut for Report<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.outcome
    }
}

/// The failure of an operation that can fail midway, as fields of its outcome. All fields are `None` if it did
/// not fail.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize)]
#[schemars(rename = "Failed")]
pub struct FailureFields {
    /// The exit code of the failure; null if the operation did not fail.
    pub code: Option<u8>,
    /// The reason of the failure, see exit-codes.md; null if the operation did not fail. If several snapshots
    /// failed for different reasons, this is the most urgent one: reasons that need a person come first, and
    /// damage comes before conflicts, conflicts before the rest.
    pub reason: Option<Reason>,
    /// The message of the failure; null if the operation did not fail.
    pub message: Option<String>,
}

impl From<&Option<Error>> for FailureFields {
    fn from(failure: &Option<Error>) -> Self {
        FailureFields {
            code: failure.as_ref().map(|e| e.reason().exit_code()),
            reason: failure.as_ref().map(Error::reason),
            message: failure.as_ref().map(Error::to_string),
        }
    }
}

/// Returns all values that a field with a reason can have, for its schema: `own`, and then every [`Reason`].
pub(super) fn reasons_and(own: &[&'static str]) -> Vec<&'static str> {
    let all = Reason::ALL.iter().map(|r| r.as_str());
    own.iter().copied().chain(all).collect()
}

/// Measures the duration of an operation, collects its warnings, and builds its report.
#[derive(Debug, Clone)]
pub struct ReportBuilder {
    started: Instant,
    /// The warnings of the report. [`warn`](Self::warn) adds one and logs it, too.
    pub warnings: Vec<String>,
}

impl ReportBuilder {
    /// Starts to measure the duration.
    pub fn start() -> Self {
        ReportBuilder {
            started: Instant::now(),
            warnings: Vec::new(),
        }
    }

    /// Logs a warning, and adds it to the report.
    pub fn warn(&mut self, message: impl Into<String>) {
        let message = message.into();
        logs::warn(&message);
        self.warnings.push(message);
    }

    /// Builds the report of an operation that did not fail.
    pub fn report<T>(self, outcome: T) -> Report<T> {
        self.report_with(outcome, None)
    }

    /// Builds the report of an operation that may have failed midway.
    pub fn report_with<T>(self, outcome: T, failure: Option<Error>) -> Report<T> {
        Report {
            outcome,
            seconds: self.started.elapsed().as_secs_f64(),
            peak_memory_bytes: peak_memory_bytes(),
            warnings: self.warnings,
            failure,
        }
    }
}
