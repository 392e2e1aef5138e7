//! What lies below one prefix of a store: which snapshots there are and what they hold, which state is asked for, and how
//! that state is opened.
//!
//! It does not fold a state into a database: `fold` does. Called by `fold` and by the operations. All functions block:
//! call them outside of async code.
//!
//! - `scan`, `contents`, `tags`: the names below the prefix, what the snapshots hold, which are excluded
//! - `identity`: which cluster's backup it is
//! - `plain_files`: a file, or a folder of files, instead of a prefix
//! - `restorable`: the ranges of revisions that can be restored
//! - `select`, `by_time`, `moment`: from a revision or a time to a base and deltas
//! - `open`: the selected full as a database file, the deltas as streams

pub(crate) mod by_time;
pub(crate) mod contents;
pub(crate) mod free_space;
pub mod identity;
mod moment;
pub mod open;
pub mod plain_files;
pub mod restorable;
pub mod scan;
pub mod select;
pub mod tags;

use crate::backup::Snapshot;
use crate::backup::trust::Trust;
use crate::base::limits::Limits;
use crate::base::printable;
use crate::base::temp::{self, TempFile};
use crate::error::{Error, Reason, Result};
use crate::store::{Keys, Store};
use std::path::PathBuf;

/// What every operation needs.
#[derive(Clone)]
pub struct Context {
    /// The store of the snapshots.
    pub store: Store,
    /// The directory for data that does not fit into memory. Files there have no names and vanish with the
    /// process. If `keys` are given, the files are encrypted.
    pub temp_dir: PathBuf,
    /// The number of threads that read, compress and upload, 1 or more. Results do not depend on it.
    pub threads: usize,
    /// The keys that decrypt snapshots, and the recipients for whom new ones are encrypted.
    pub keys: Keys,
    /// The rules for which snapshots may be inputs.
    pub trust: Trust,
    /// The sizes above which a snapshot is not read.
    pub limits: Limits,
}

impl Context {
    /// Returns the temporary directory. Its files are encrypted if keys are given.
    pub fn temp(&self) -> temp::Dir {
        temp::Dir::new(&self.temp_dir, self.keys.encrypts() || self.keys.decrypts())
    }

    /// Creates an unnamed file in the temporary directory.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn temp_file(&self) -> Result<TempFile> {
        self.temp().file()
    }

    /// Returns a function that puts the full name of a snapshot before the message of an error.
    pub fn at<'a>(&'a self, snapshot: &'a Snapshot) -> impl Fn(Error) -> Error + 'a {
        |e| match e.reason() {
            // The messages of these errors name the object themselves, or no object is at fault.
            Reason::Terminated
            | Reason::SnapshotVanished
            | Reason::StoreUnreachable
            | Reason::PermissionDenied
            | Reason::Unauthenticated
            | Reason::NoSnapshots
            | Reason::NoSpace
            | Reason::Io => e,
            _ => {
                let name = self.store.name(&snapshot.path);
                // The error may have got the name already when the snapshot was opened.
                match e.to_string().starts_with(&format!("{name}: ")) {
                    true => e,
                    false => e.at(name),
                }
            }
        }
    }
}

/// Logs a warning, and adds it to the warnings of a report.
pub(crate) fn warn(warnings: &mut Vec<String>, message: impl Into<String>) {
    let message = printable::message(message.into());
    tracing::warn!("{message}");
    warnings.push(message);
}
