//! Reports of operations: a status, a body, and the fields that all reports have in common.
//!
//! An operation starts a [`ReportBuilder`], adds warnings to it, and ends it with its body. Nothing is
//! printed here: `cli` prints the report.

use crate::error::{Error, Reason};
use crate::telemetry::logs;
use crate::telemetry::memory::peak_memory_bytes;
use serde::{Serialize, Serializer};
use std::ops::{Deref, DerefMut};
use std::time::Instant;

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Status {
    /// Something was done; in a dry run, it would be.
    Succeeded,
    /// Nothing had to be done.
    NothingToDo,
    /// It failed; the other fields tell what was done before.
    Failed,
}

/// The report of an operation. As JSON it is one object that has the body's fields and the fields below.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report<B> {
    /// How the operation ended.
    pub status: Status,
    /// The failure, if there is one.
    #[serde(flatten, serialize_with = "failure_fields")]
    #[cfg_attr(test, schemars(with = "FailureFields"))]
    pub failure: Option<Error>,
    /// What the operation found and did.
    #[serde(flatten)]
    pub body: B,
    /// The duration of the operation, in seconds.
    pub seconds: f64,
    /// The peak resident memory in bytes. null if the system does not report it.
    pub peak_memory_bytes: Option<u64>,
    /// Warnings, as human-readable text.
    pub warnings: Vec<String>,
}

impl<B> Report<B> {
    /// Returns the reason of the failure, if there is one.
    pub fn reason(&self) -> Option<Reason> {
        self.failure.as_ref().map(Error::reason)
    }
}

impl<B> Deref for Report<B> {
    type Target = B;

    fn deref(&self) -> &B {
        &self.body
    }
}

impl<B> DerefMut for Report<B> {
    fn deref_mut(&mut self) -> &mut B {
        &mut self.body
    }
}

/// The failure of an operation, as fields of its report.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct FailureFields {
    /// The process's exit code; 0 if the operation did not fail.
    code: u8,
    /// The reason of the failure, see exit-codes.md; null if the operation did not fail. If several snapshots
    /// failed for different reasons, this is the most urgent one: reasons that need a person come first, and
    /// damage comes before conflicts, conflicts before the rest.
    reason: Option<Reason>,
    /// The message of the failure. Human-readable: the text may change. null if the operation did not fail.
    message: Option<String>,
}

fn failure_fields<S: Serializer>(
    failure: &Option<Error>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let fields = FailureFields {
        code: failure.as_ref().map_or(0, |e| e.reason().exit_code()),
        reason: failure.as_ref().map(Error::reason),
        message: failure.as_ref().map(Error::to_string),
    };
    fields.serialize(serializer)
}

/// Returns all values that a field with a reason can have, for its schema: `own`, and then every [`Reason`].
#[cfg(test)]
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

    /// Builds the report of an operation that did something.
    pub fn report<B>(self, body: B) -> Report<B> {
        self.ended(body, true, None)
    }

    /// Builds the report of an operation that may have done nothing, or failed midway.
    pub fn ended<B>(self, body: B, did_something: bool, failure: Option<Error>) -> Report<B> {
        Report {
            status: match (&failure, did_something) {
                (Some(_), _) => Status::Failed,
                (None, true) => Status::Succeeded,
                (None, false) => Status::NothingToDo,
            },
            failure,
            body,
            seconds: self.started.elapsed().as_secs_f64(),
            peak_memory_bytes: peak_memory_bytes(),
            warnings: self.warnings,
        }
    }
}
