//! File operations on files that may be missing.

use std::io::{self, ErrorKind};

/// Turns the error "not found" into `None`.
///
/// # Errors
/// Every other error of the operation.
pub fn none_if_missing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}
