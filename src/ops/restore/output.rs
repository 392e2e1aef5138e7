//! Output files of a restore: they are synced while they grow.

use crate::base::parallel::side_by_side;
use crate::error::{Error, Result};
use crate::telemetry::progress::Step;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::sync::mpsc::{self, SyncSender};

/// A failure to write: of the candidate, after which another is tried, or of the target.
pub(super) enum WriteFailure {
    Candidate(Error),
    Target(Error),
}

/// Errors are the candidate's unless converted explicitly.
impl From<Error> for WriteFailure {
    fn from(e: Error) -> Self {
        WriteFailure::Candidate(e)
    }
}

/// Bytes after which a growing file is synced again.
const SYNC_EVERY: u64 = 32 << 20;

/// A writer to the target that counts bytes and remembers whether the target failed.
pub(super) struct Output<'a> {
    inner: BufWriter<&'a File>,
    step: Step,
    action: &'a str,
    has_failed: bool,
    /// Requests a sync of the bytes so far; see [`sync_along`].
    sync_requests: Option<SyncSender<()>>,
    unsynced: u64,
}

impl<'a> Output<'a> {
    /// `action` is what an error message names, such as "write FILE".
    pub(super) fn new(
        file: &'a File,
        action: &'a str,
        sync_requests: Option<SyncSender<()>>,
    ) -> Self {
        Output {
            inner: BufWriter::with_capacity(1 << 20, file),
            step: Step::new(action, None),
            action,
            has_failed: false,
            sync_requests,
            unsynced: 0,
        }
    }

    /// Classifies an error of a write through this output: the target's, or that of the source of the
    /// bytes.
    pub(super) fn classify(&self, e: Error) -> WriteFailure {
        if self.has_failed {
            WriteFailure::Target(e)
        } else {
            WriteFailure::Candidate(e)
        }
    }

    fn check<T>(&mut self, written: io::Result<T>) -> io::Result<T> {
        written.map_err(|e| {
            self.has_failed = true;
            Error::io(self.action, e).into()
        })
    }
}

impl Write for Output<'_> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let written = self.inner.write_all(b);
        self.check(written)?;
        self.step.add(b.len() as u64);
        self.unsynced += b.len() as u64;
        if self.unsynced >= SYNC_EVERY
            && let Some(sync_requests) = &self.sync_requests
        {
            // If the previous sync still runs, the next one includes these bytes.
            let _ = sync_requests.try_send(());
            self.unsynced = 0;
        }
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.inner.flush();
        self.check(flushed)
    }
}

/// Syncs a file, while `read` reads it at the same time.
pub(super) fn sync_beside(
    file: &File,
    action: &str,
    read: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let sync = || file.sync_all().map_err(|e| Error::io(action, e));
    let (synced, read) = side_by_side(2, sync, read);
    synced.and(read)
}

/// Syncs a file while it is written, so that the final sync is short. `write` gets the channel that
/// requests a sync, and must sync the file itself at the end.
pub(super) fn sync_along<T>(
    file: &File,
    action: &str,
    write: impl FnOnce(SyncSender<()>) -> Result<T, WriteFailure>,
) -> Result<T, WriteFailure> {
    std::thread::scope(|s| {
        let (sync_requests, requests) = mpsc::sync_channel(1);
        let sync = move || requests.iter().try_for_each(|()| file.sync_data());
        // If no thread can be started, the requests go nowhere, and the final sync does all.
        let synced = std::thread::Builder::new().spawn_scoped(s, sync);
        let written = write(sync_requests);
        let synced = synced.map_or(Ok(()), |thread| match thread.join() {
            Ok(synced) => synced.map_err(|e| Error::io(action, e)),
            Err(_) => Err(Error::internal("the sync of a file panicked")),
        });
        match (written, synced) {
            (Err(WriteFailure::Target(e)), _) => Err(WriteFailure::Target(e)),
            // The system reports a failed sync only once: a later sync may succeed although bytes are
            // lost.
            (_, Err(e)) => Err(WriteFailure::Target(e)),
            (written, Ok(())) => written,
        }
    })
}
