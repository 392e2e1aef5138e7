//! The operations, one file or folder each: options → run → report.
//!
//! An operation does the input and output around the decisions of `backup` and `mvcc`. It does not parse
//! arguments or print. Called by `cli`, and by programs that use deltafold as a library. All functions block:
//! call them outside of async code.

pub mod apply;
pub mod compact;
mod contents;
pub mod copy;
mod external_sort;
pub mod fold;
mod free_space;
pub mod gc;
pub mod identity;
pub mod list;
pub mod live_follower;
pub mod maintain;
pub mod options;
mod parallel;
pub mod plain_files;
pub mod read;
pub mod report;
pub mod restorable;
pub mod restore;
pub mod scan;
pub mod schedule;
pub mod snapshot;
pub mod snapshot_leases;
pub mod status;
pub mod store_check;
pub mod tags;
pub mod verify;

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
fn warn(warnings: &mut Vec<String>, message: impl Into<String>) {
    let message = printable::message(message.into());
    tracing::warn!("{message}");
    warnings.push(message);
}
