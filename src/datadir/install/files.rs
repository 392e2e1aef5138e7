//! File operations of an installation, whose errors name the operation and the path.
//!
//! Called by `datadir::install`.

use crate::base::none_if_missing;
use crate::error::{Error, Reason, Result};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
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

/// An open directory. Somebody else may own it, so names in it are used relative to its descriptor, and no link
/// is followed.
#[derive(Debug)]
pub struct Dir {
    file: File,
    /// For messages.
    path: PathBuf,
    is_locked: bool,
}

impl Drop for Dir {
    /// Closing the file does not always end its lock: a child process that another thread has just forked holds a
    /// copy of it until it runs its program.
    fn drop(&mut self) {
        if self.is_locked {
            let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        }
    }
}

impl Dir {
    /// Opens a directory that the user named, so its path may have links.
    pub(super) fn open_if_exists(path: &Path) -> Result<Option<Self>> {
        let file = none_if_missing(File::open(path)).map_err(io_error("open", path))?;
        Ok(file.map(|file| Dir {
            file,
            path: path.to_owned(),
            is_locked: false,
        }))
    }

    /// Opens a directory that the user named, and takes an exclusive lock on it until it is dropped.
    ///
    /// # Errors
    /// `TargetInUse` if another process holds the lock; `Io`, `PermissionDenied`.
    pub(super) fn lock(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(io_error("open", path))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(Reason::TargetInUse.error(format!(
                "another restore into {} is running",
                path.display()
            ))),
            // Some network file systems cannot lock directories. Without the lock only this check is missing.
            Err(_) | Ok(()) => Ok(Dir {
                file,
                path: path.to_owned(),
                is_locked: true,
            }),
        }
    }

    /// Returns the path by which the directory was reached.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of a name in this directory that stays valid if somebody replaces a directory above.
    pub fn at(&self, name: &str) -> PathBuf {
        Path::new("/proc/self/fd")
            .join(self.file.as_raw_fd().to_string())
            .join(name)
    }

    /// Puts the directory's own path into an error that has the one of [`at`](Self::at).
    pub fn explain(&self, e: Error) -> Error {
        let path = self.path.join("");
        e.with(&self.at("").to_string_lossy(), &path.to_string_lossy())
    }

    fn error(&self, action: &str, name: &str, e: impl Into<io::Error>) -> Error {
        io_error(action, &self.path.join(name))(e.into())
    }

    /// Opens a directory in this one, if it exists.
    ///
    /// # Errors
    /// `PermissionDenied` if it is a link, belongs to another user, or others can write to it; `Io`.
    pub(super) fn own(&self, name: &str) -> Result<Option<Self>> {
        let path = self.path.join(name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let refused = |why: String| {
            Reason::PermissionDenied.error(format!(
                "{} {why}, so it is not what a restore of this user left: look who made it, then remove it",
                path.display()
            ))
        };
        let fd = match rustix::fs::openat(&self.file, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(refused("is no directory".to_owned())),
            fd => fd.map_err(|e| self.error("open", name, e))?,
        };
        let stat = rustix::fs::fstat(&fd).map_err(|e| self.error("inspect", name, e))?;
        let us = rustix::process::geteuid().as_raw();
        if stat.st_uid != us {
            return Err(refused(format!(
                "belongs to user {}, not {us}",
                stat.st_uid
            )));
        }
        if stat.st_mode & 0o022 != 0 {
            return Err(refused("can be written to by others".to_owned()));
        }
        Ok(Some(Dir {
            file: fd.into(),
            path,
            is_locked: false,
        }))
    }

    /// Like [`own`](Self::own), of a directory that must exist.
    pub(super) fn need_own(&self, name: &str) -> Result<Self> {
        let missing = || self.error("open", name, io::ErrorKind::NotFound);
        self.own(name)?.ok_or_else(missing)
    }

    /// Creates a directory in this one, unless we have one of this name.
    pub(super) fn make(&self, name: &str) -> Result<Self> {
        match rustix::fs::mkdirat(&self.file, name, Mode::from_raw_mode(DIRECTORY_MODE)) {
            Ok(()) | Err(Errno::EXIST) => self.need_own(name),
            Err(e) => Err(self.error("create", name, e)),
        }
    }

    /// Writes and syncs a file in a directory of ours.
    pub(super) fn create(&self, name: &str, content: &[u8]) -> Result<()> {
        let write = || {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true);
            let mut file = options.mode(FILE_MODE).open(self.at(name))?;
            file.write_all(content)?;
            file.sync_all()
        };
        write().map_err(|e| self.error("write", name, e))
    }

    /// Returns the content of a file in a directory of ours, if there is one.
    pub(super) fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        none_if_missing(fs::read(self.at(name))).map_err(|e| self.error("read", name, e))
    }

    /// Whether there is anything of this name.
    pub(super) fn exists(&self, name: &str) -> Result<bool> {
        match rustix::fs::statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(self.error("inspect", name, e)),
        }
    }

    /// Moves a file or directory without replacing another one.
    pub(super) fn rename(&self, name: &str, to: &Dir, new: &str) -> Result<()> {
        let (from, into) = (&self.file, &to.file);
        let renamed = match rustix::fs::renameat_with(from, name, into, new, RenameFlags::NOREPLACE)
        {
            // Some file systems do not support flags.
            Err(Errno::INVAL | Errno::NOSYS) if !to.exists(new)? => {
                rustix::fs::renameat(from, name, into, new)
            }
            other => other,
        };
        renamed.map_err(|e| to.error("rename to", new, e))
    }

    pub(super) fn remove(&self, name: &str) -> Result<()> {
        let removed = rustix::fs::unlinkat(&self.file, name, AtFlags::empty());
        removed.map_err(|e| self.error("remove", name, e))
    }

    /// Removes a directory with all that is in it, if it exists.
    pub(super) fn remove_all(&self, name: &str) -> Result<()> {
        let removed = none_if_missing(fs::remove_dir_all(self.at(name)));
        removed.map(drop).map_err(|e| self.error("remove", name, e))
    }

    /// Syncs the directory, so that the names in it survive a crash.
    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|e| self.error("sync", "", e))
    }
}

/// Creates a directory and its parents.
pub(super) fn create_directory(dir: &Path) -> Result<()> {
    let mut builder = DirBuilder::new();
    let builder = builder.recursive(true).mode(DIRECTORY_MODE);
    builder.create(dir).map_err(io_error("create", dir))
}

/// Syncs a directory, so that the names in it survive a crash.
///
/// # Errors
/// `Io`.
pub fn sync_directory(dir: &Path) -> Result<()> {
    let synced = File::open(dir).and_then(|d| d.sync_all());
    synced.map_err(io_error("sync", dir))
}

/// Whether there is any file below a directory of this name, or instead of it.
pub(super) fn holds_files(dir: &Dir, name: &str) -> Result<bool> {
    fn search(path: &Path) -> io::Result<bool> {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if !entry.file_type()?.is_dir() || search(&entry.path())? {
                return Ok(true);
            }
        }
        Ok(false)
    }
    let path = dir.at(name);
    let there = none_if_missing(path.symlink_metadata()).and_then(|found| match found {
        None => Ok(false),
        Some(found) => Ok(!found.is_dir() || search(&path)?),
    });
    there.map_err(|e| dir.error("look into", name, e))
}

/// Returns the sorted names of the WAL segments in a directory.
pub(super) fn segments(dir: &Dir) -> Result<Vec<String>> {
    let list = || -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(dir.at(""))? {
            let name = entry?.file_name();
            if Path::new(&name).extension() == Some(OsStr::new(SEGMENT_EXTENSION))
                && let Some(name) = name.to_str()
            {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    };
    list().map_err(|e| dir.error("list", "", e))
}
