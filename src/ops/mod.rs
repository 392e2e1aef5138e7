//! One file for each thing a Job does: options → run → report.
//!
//! Here stands the I/O around the decisions of `backup` and `mvcc`. `cli` calls it; a program that
//! uses deltafold as a library can as well. Everything blocks: call it outside of async code.

pub mod apply;
pub mod compact;
pub mod copy;
mod external_sort;
pub mod fold;
mod free_space;
pub mod gc;
pub mod identity;
pub mod list;
pub mod maintain;
pub mod object_lock;
pub mod options;
mod parallel;
pub mod read;
pub mod report;
pub mod restorable;
pub mod restore;
pub mod scan;
pub mod schedule;
pub mod snapshot;
pub mod snapshot_leases;
pub mod store_check;
pub mod tags;
pub mod verify;

use crate::backup::Snapshot;
use crate::backup::trust::Trust;
use crate::base::limits::Limits;
use crate::base::temp::{self, TempFile};
use crate::error::{Error, Reason, Result};
use crate::store::{Keys, Store};
use std::path::PathBuf;

/// What every Job needs.
#[derive(Clone)]
pub struct Context {
    /// Where the snapshots are.
    pub store: Store,
    /// For what does not fit into memory; files there have no names and vanish with the process. Where `keys`
    /// are given they are sealed.
    pub temp_dir: PathBuf,
    /// Threads that read, compress and upload; 1 or more. Results do not depend on it.
    pub threads: usize,
    /// What opens encrypted snapshots, and for whom new ones are encrypted.
    pub keys: Keys,
    /// Which snapshots may be inputs.
    pub trust: Trust,
    /// The largest snapshot that is read.
    pub limits: Limits,
}

impl Context {
    /// The temporary directory, and whether its files are sealed.
    pub fn temp(&self) -> temp::Dir {
        temp::Dir::new(&self.temp_dir, self.keys.encrypts() || self.keys.decrypts())
    }

    /// An unnamed file in the temporary directory.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn temp_file(&self) -> Result<TempFile> {
        self.temp().file()
    }

    /// Puts the snapshot's full name before an error's message.
    pub fn at<'a>(&'a self, snapshot: &'a Snapshot) -> impl Fn(Error) -> Error + 'a {
        |e| match e.reason() {
            // These name the place themselves, or have none.
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
                // What opens it and what reads on may both say so.
                match e.to_string().starts_with(&format!("{name}: ")) {
                    true => e,
                    false => e.at(name),
                }
            }
        }
    }
}

/// Logs what an operator should know, and adds it to the warnings of a result.
fn warn(warnings: &mut Vec<String>, message: impl Into<String>) {
    let message = message.into();
    tracing::warn!("{message}");
    warnings.push(message);
}
