//! The end of every new snapshot: into the store and into a file to be verified, then its name.
//!
//! What is written it does not know. `compact` and `snapshot` call it.

use crate::bucket::SnapshotName;
use crate::bucket::catalog::V2;
use crate::error::{Error, Reason, Result};
use crate::job::Context;
use crate::store::{Published, Staged};
use crate::telemetry::progress::Step;
use std::fs::File;
use std::io::{self, BufWriter, Write};

/// Names that are tried when a name is taken: as many seconds after the first.
const NAMES_TRIED: i64 = 3600;

/// Where a new database goes: into a file to be verified, and on its way into the store.
pub(super) struct Both<W> {
    pub(super) file: BufWriter<File>,
    pub(super) stream: W,
    pub(super) step: Step,
}

impl<W: Write> Write for Both<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        self.file.write_all(b).map_err(|e| {
            Error::io(
                "write the new database to the temporary directory (choose another with --temp-dir)",
                e,
            )
        })?;
        self.stream.write_all(b)?;
        self.step.add(b.len() as u64);
        Ok(b.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Verifies a file while the upload is completed and read back; one after the other with one thread.
pub(super) fn side_by_side<V: Send, S>(
    threads: usize,
    verify: impl FnOnce() -> Result<V> + Send,
    stage: impl FnOnce() -> Result<S>,
) -> (Result<V>, Result<S>) {
    if threads <= 1 {
        return (verify(), stage());
    }
    std::thread::scope(|s| {
        let panicked = |_| Err(Error::internal("the verification panicked"));
        match std::thread::Builder::new().spawn_scoped(s, verify) {
            Ok(verified) => {
                let staged = stage();
                (verified.join().unwrap_or_else(panicked), staged)
            }
            Err(e) => {
                let what = "start a thread (give fewer with --threads)";
                (Err(Error::io(what, e)), stage())
            }
        }
    })
}

/// Gives a staged object the first free name from `name` on. Returns its size, or 0 where it was there
/// already.
///
/// # Errors
/// `TargetExists` where all names that are tried are taken; the store's.
pub(super) fn give_name(ctx: &Context, staged: &Staged, name: &mut SnapshotName) -> Result<u64> {
    let first = name.created;
    while name.created < first + NAMES_TRIED {
        match staged.publish(&format!("{V2}/{name}"))? {
            Published::Created => return Ok(staged.bytes()),
            Published::Identical => return Ok(0),
            Published::Taken => name.created += 1,
        }
    }
    name.created = first;
    Err(Error::new(
        Reason::TargetExists,
        format!(
            "{} and the {NAMES_TRIED} names after it are taken by other snapshots",
            ctx.store.name(&format!("{V2}/{name}"))
        ),
    ))
}
