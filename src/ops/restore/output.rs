//! Files that a restore writes: their names come last, their bytes are synced early.

use crate::error::{Error, Reason, Result};
use crate::ops::parallel::side_by_side;
use crate::telemetry::progress::Step;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::mpsc::{self, SyncSender};

/// A failure of one candidate, after which another is tried, or one of the target.
pub(super) enum Failed {
    Candidate(Error),
    Target(Error),
}

/// Where nothing else is said, it is the candidate's.
impl From<Error> for Failed {
    fn from(e: Error) -> Self {
        Failed::Candidate(e)
    }
}

/// Bytes after which a file that grows is synced once more.
const SYNC_EVERY: u64 = 32 << 20;

/// Writes to a target: counts what is written, and knows whether that failed.
pub(super) struct Output<'a> {
    inner: BufWriter<&'a File>,
    step: Step,
    what: &'a str,
    failed: bool,
    /// Asks for a sync of what was written; see [`sync_along`].
    grown: Option<SyncSender<()>>,
    unsynced: u64,
}

impl<'a> Output<'a> {
    pub(super) fn new(file: &'a File, what: &'a str, grown: Option<SyncSender<()>>) -> Self {
        Output {
            inner: BufWriter::with_capacity(1 << 20, file),
            step: Step::new(what, None),
            what,
            failed: false,
            grown,
            unsynced: 0,
        }
    }

    /// Whether an error is the target's, or that of what was to be written.
    pub(super) fn whose(&self, e: Error) -> Failed {
        match self.failed {
            true => Failed::Target(e),
            false => Failed::Candidate(e),
        }
    }

    fn note<T>(&mut self, written: io::Result<T>) -> io::Result<T> {
        written.map_err(|e| {
            self.failed = true;
            Error::io(self.what, e).into()
        })
    }
}

impl Write for Output<'_> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let written = self.inner.write_all(b);
        self.note(written)?;
        self.step.add(b.len() as u64);
        self.unsynced += b.len() as u64;
        if self.unsynced >= SYNC_EVERY
            && let Some(grown) = &self.grown
        {
            // If the last sync still runs, the next one takes more.
            let _ = grown.try_send(());
            self.unsynced = 0;
        }
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.inner.flush();
        self.note(flushed)
    }
}

/// Syncs a file while something else reads it.
pub(super) fn sync_beside(
    file: &File,
    what: &str,
    read: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let sync = || file.sync_all().map_err(|e| Error::io(what, e));
    let (synced, read) = side_by_side(2, sync, read);
    synced.and(read)
}

/// Syncs a file while it is written, so that little is left to sync in the end. `write` gets what asks for it;
/// it must sync the file itself when it has written all.
pub(super) fn sync_along<T>(
    file: &File,
    what: &str,
    write: impl FnOnce(SyncSender<()>) -> Result<T, Failed>,
) -> Result<T, Failed> {
    std::thread::scope(|s| {
        let (grown, growths) = mpsc::sync_channel(1);
        let sync = move || growths.iter().try_for_each(|()| file.sync_data());
        // If the system has no thread left, nobody listens.
        let synced = std::thread::Builder::new().spawn_scoped(s, sync);
        let written = write(grown);
        let synced = synced.map_or(Ok(()), |thread| match thread.join() {
            Ok(synced) => synced.map_err(|e| Error::io(what, e)),
            Err(_) => Err(Error::internal("syncing panicked")),
        });
        match (written, synced) {
            (Err(Failed::Target(e)), _) => Err(Failed::Target(e)),
            // The system tells this once: a later sync may succeed for all that.
            (_, Err(e)) => Err(Failed::Target(e)),
            (written, Ok(())) => written,
        }
    })
}

/// Creates a file of etcd's: nobody else may read it.
pub(super) fn create(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path)
}

/// A file without a name, in the directory where it shall get one; it vanishes with the process.
pub(super) struct Unnamed {
    pub(super) file: File,
    /// If the file system has no files without names.
    hidden: Option<tempfile::TempPath>,
}

impl Unnamed {
    pub(super) fn new(dir: &Path) -> Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        if let Ok(fd) = rustix::fs::openat(CWD, dir, flags, Mode::RUSR | Mode::WUSR) {
            let file = File::from(fd);
            return Ok(Unnamed { file, hidden: None });
        }
        let file = tempfile::Builder::new()
            .prefix(".deltafold-")
            .tempfile_in(dir)
            .map_err(|e| Error::io(format!("create a file in {}", dir.display()), e))?;
        let (file, hidden) = file.into_parts();
        let hidden = Some(hidden);
        Ok(Unnamed { file, hidden })
    }

    /// Gives it its name, which must be free.
    pub(super) fn name(self, path: &Path) -> Result<()> {
        let named = match self.hidden {
            Some(hidden) => hidden.persist_noclobber(path).map_err(|e| e.error),
            None => {
                let this = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                rustix::fs::linkat(CWD, this, CWD, path, AtFlags::SYMLINK_FOLLOW)
                    .map_err(io::Error::from)
            }
        };
        named.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => exists(path),
            _ => Error::io(format!("name {}", path.display()), e),
        })
    }
}

/// The error if a file's name is taken.
pub(super) fn exists(path: &Path) -> Error {
    Reason::TargetExists.error(format!(
        "{} is there already and is never overwritten",
        path.display()
    ))
}
