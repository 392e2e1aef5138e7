//! The report: what an operation came to, and what all operations tell alike.
//!
//! Operations start a [`Clock`] and end it with their outcome; `cli` prints the report. Nothing is decided here.

use crate::error::{Error, Reason};
use crate::telemetry::memory::peak_memory_bytes;
use schemars::JsonSchema;
use serde::Serialize;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

/// What an operation came to. As JSON one object: the outcome's fields beside these.
#[derive(Debug, JsonSchema, Serialize)]
pub struct Report<T> {
    /// The operation's own part.
    #[serde(flatten)]
    pub outcome: T,
    /// Wall-clock time of the run, in seconds.
    pub seconds: f64,
    /// The most memory that was resident at once, in bytes. null if the system does not tell.
    pub peak_memory_bytes: Option<u64>,
    /// What an operator should know: sentences for people.
    pub warnings: Vec<String>,
    /// The failure that the outcome tells of.
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

/// The failure in the outcome of an operation that can fail midway; all `None` if it did not.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Failed {
    /// The exit code, if it failed; else null.
    pub code: Option<u8>,
    /// Why it failed, see exit-codes.md; else null. Where several snapshots failed for different reasons:
    /// what needs a hand first, damage before conflicts before the rest.
    pub reason: Option<Reason>,
    /// Why it failed, in words; else null.
    pub message: Option<String>,
}

impl From<&Option<Error>> for Failed {
    fn from(failure: &Option<Error>) -> Self {
        Failed {
            code: failure.as_ref().map(|e| e.reason().exit_code()),
            reason: failure.as_ref().map(Error::reason),
            message: failure.as_ref().map(Error::to_string),
        }
    }
}

/// For a schema: the reasons of failures, and some of an operation's own.
pub(super) fn reasons_and(own: &[&'static str]) -> Vec<&'static str> {
    let all = Reason::ALL.iter().map(|r| r.as_str());
    own.iter().copied().chain(all).collect()
}

/// Times an operation and collects its warnings.
#[derive(Debug, Clone)]
pub struct Clock {
    started: Instant,
    /// What the report will tell; [`warn`](Self::warn) logs it, too.
    pub warnings: Vec<String>,
}

impl Clock {
    /// Starts now.
    pub fn start() -> Self {
        Clock {
            started: Instant::now(),
            warnings: Vec::new(),
        }
    }

    /// Logs a warning and keeps it for the report.
    pub fn warn(&mut self, message: impl Into<String>) {
        let message = message.into();
        tracing::warn!("{message}");
        self.warnings.push(message);
    }

    /// The report of an operation that did not fail.
    pub fn report<T>(self, outcome: T) -> Report<T> {
        self.ended(outcome, None)
    }

    /// The report of an operation that may have failed midway.
    pub fn ended<T>(self, outcome: T, failure: Option<Error>) -> Report<T> {
        Report {
            outcome,
            seconds: self.started.elapsed().as_secs_f64(),
            peak_memory_bytes: peak_memory_bytes(),
            warnings: self.warnings,
            failure,
        }
    }
}
