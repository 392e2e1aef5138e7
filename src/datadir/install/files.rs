//! File operations of an installation, whose errors name the operation and the path.
//!
//! Called by `datadir::install`.

use crate::base::none_if_missing;
use crate::error::{Error, Reason, Result};
use rustix::fs::{CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The modes that etcd uses.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// The file name extension of WAL segments.
const SEGMENT_EXTENSION: &str = "wal";

/// Returns a function that turns an error of this operation into ours.
pub(super) fn io_error<'p>(operation: &'p str, path: &'p Path) -> impl Fn(io::Error) -> Error + 'p {
    move |e| {
        match e.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::BUSY | Errno::XDEV) => Reason::Configuration.error(format!(
            "{operation} {}: {e}; the data directory may be a mount point, but no file or directory in it may be one",
            path.display()
        )),
        _ => Error::io(format!("{operation} {}", path.display()), e),
    }
    }
}

/// Resolves the links of a path, as far as the path exists.
pub(super) fn resolve_links(path: &Path) -> PathBuf {
    for ancestor in path.ancestors() {
        if let (Ok(rest), Ok(real)) = (path.strip_prefix(ancestor), ancestor.canonicalize()) {
            return real.join(rest);
        }
    }
    path.to_owned()
}

/// An exclusive lock on a directory, until it is dropped.
#[derive(Debug)]
pub(super) struct DirectoryLock(File);

impl Drop for DirectoryLock {
    /// Closing the file is not enough: a child process that another thread has just forked holds a copy of it
    /// until it runs its program.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// # Errors
/// `TargetInUse` if another process holds the lock; `Io`, `PermissionDenied`.
pub(super) fn lock_directory(dir: &Path) -> Result<DirectoryLock> {
    let file = File::open(dir).map_err(io_error("open", dir))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            Err(Reason::TargetInUse
                .error(format!("another restore into {} is running", dir.display())))
        }
        // Some network file systems cannot lock directories. Without the lock only this check is missing.
        Err(_) | Ok(()) => Ok(DirectoryLock(file)),
    }
}

/// Creates a directory and its parents.
pub(super) fn create_directory(dir: &Path) -> Result<()> {
    let mut builder = DirBuilder::new();
    let builder = builder.recursive(true).mode(DIRECTORY_MODE);
    builder.create(dir).map_err(io_error("create", dir))
}

/// Writes and syncs a file.
pub(super) fn create_file(path: &Path, content: &[u8]) -> Result<()> {
    let write = || {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        let mut file = options.mode(FILE_MODE).open(path)?;
        file.write_all(content)?;
        file.sync_all()
    };
    write().map_err(io_error("write", path))
}

pub(super) fn remove_file_if_exists(path: &Path) -> Result<()> {
    use io::ErrorKind::{NotADirectory, NotFound};
    match fs::remove_file(path) {
        Err(e) if !matches!(e.kind(), NotFound | NotADirectory) => Err(io_error("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Syncs a directory, so that the names in it survive a crash.
///
/// # Errors
/// `Io`.
pub fn sync_directory(dir: &Path) -> Result<()> {
    let synced = File::open(dir).and_then(|d| d.sync_all());
    synced.map_err(io_error("sync", dir))
}

/// Renames a file or directory without replacing another one.
pub(super) fn rename(from: &Path, to: &Path) -> Result<()> {
    let result = match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Some file systems do not support flags.
        Err(Errno::INVAL | Errno::NOSYS) if !to.exists() => rustix::fs::rename(from, to),
        other => other,
    };
    result.map_err(|e| io_error("rename to", to)(e.into()))
}

/// Exchanges two directories in one step. Returns false if the file system does not support it.
pub(super) fn exchange(a: &Path, b: &Path) -> Result<bool> {
    match rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS) => Ok(false),
        Err(e) => Err(io_error("exchange", b)(e.into())),
    }
}

/// Whether there is any file below a directory, or instead of it.
pub(super) fn holds_files(dir: &Path) -> Result<bool> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Ok(true),
        entries => none_if_missing(entries).map_err(io_error("list", dir))?,
    };
    for entry in entries.into_iter().flatten() {
        let entry = entry.map_err(io_error("list", dir))?;
        let kind = entry
            .file_type()
            .map_err(io_error("inspect", &entry.path()))?;
        if !kind.is_dir() || holds_files(&entry.path())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the sorted names of the WAL segments in a directory.
pub(super) fn segments(dir: &Path) -> Result<Vec<String>> {
    let entries = none_if_missing(fs::read_dir(dir)).map_err(io_error("list", dir))?;
    let mut names = Vec::new();
    for entry in entries.into_iter().flatten() {
        let name = entry.map_err(io_error("list", dir))?.file_name();
        if Path::new(&name).extension() == Some(OsStr::new(SEGMENT_EXTENSION))
            && let Some(name) = name.to_str()
        {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}
