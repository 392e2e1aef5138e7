//! Files that need not be there.

use std::io::{self, ErrorKind};

/// What an operation gave; `None` if the file or the folder is not there.
///
/// # Errors
/// The operation's other ones.
pub fn none_if_missing<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        done => done.map(Some),
    }
}
