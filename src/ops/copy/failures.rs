//! The failures of a copy: which of them a follower survives, and which one is reported.
//!
//! Pure.

use crate::error::{Error, Reason};

/// Returns the error for a snapshot whose name already belongs to a different object in the target.
pub(super) fn conflict(name: &str) -> Error {
    Reason::TargetExists.error(format!(
        "the target already has a different object {name}: find out which of the two is wrong, and delete that one"
    ))
}

/// Returns whether a follower continues after a failure.
pub(super) fn is_recoverable(e: &Error) -> bool {
    let concerns_one_snapshot = e.reason().is_bad_data() || e.reason() == Reason::TargetExists;
    e.reason().is_retryable() || concerns_one_snapshot || e.reason() == Reason::NoSnapshots
}

/// Returns one error for all failures: the one that most needs a person's attention. `is_partly_done`:
/// some snapshots are in the target.
pub(super) fn summarize(failures: Vec<Error>, is_partly_done: bool) -> Option<Error> {
    let count = failures.len();
    let urgency = |e: &Error| match e.reason() {
        r if r.is_bad_data() => 0,
        Reason::TargetExists => 1,
        r if !r.is_retryable() => 2,
        _ => 3,
    };
    let first = failures.into_iter().min_by_key(urgency)?;
    let reason = match first.reason() {
        r if r.is_retryable() && is_partly_done => Reason::PartlyDone,
        r => r,
    };
    let message = match count {
        1 => first.to_string(),
        _ => format!("{first}; {count} failures in all"),
    };
    Some(reason.error(message))
}
