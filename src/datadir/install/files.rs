//! File operations of an installation, whose errors name the operation and the path.

use crate::error::{Error, Reason, Result};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, RenameFlags, mkdirat, open, openat, renameat,
    renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::CString;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The modes that etcd uses.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// Opens a directory, and nothing else.
const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);
/// The most levels of directories that are searched or removed. A member has two.
const MAX_LEVELS: u32 = 32;

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
    ///
    /// # Errors
    /// `Io`, `PermissionDenied`.
    pub fn open(path: &Path) -> Result<Self> {
        let missing = || io_error("open", path)(Errno::NOENT.into());
        Self::open_if_exists(path)?.ok_or_else(missing)
    }

    /// Like [`open`](Self::open), of a directory that may be missing.
    pub(super) fn open_if_exists(path: &Path) -> Result<Option<Self>> {
        let fd = match open(path, DIRECTORY, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            fd => fd.map_err(|e| io_error("open", path)(e.into()))?,
        };
        Ok(Some(Dir {
            file: fd.into(),
            path: path.to_owned(),
            is_locked: false,
        }))
    }

    /// Takes an exclusive lock on the directory until it is dropped.
    ///
    /// # Errors
    /// `TargetInUse` if another process holds the lock.
    pub(super) fn lock(mut self) -> Result<Self> {
        match rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(Reason::TargetInUse.error(format!(
                "another restore into {} is running",
                self.path.display()
            ))),
            // Some network file systems cannot lock directories. Without the lock only this check is missing.
            Err(_) | Ok(()) => {
                self.is_locked = true;
                Ok(self)
            }
        }
    }

    /// Returns the path by which the directory was reached, for messages and for reading.
    pub fn path(&self) -> &Path {
        &self.path
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
        let refused = |why: String| {
            Reason::PermissionDenied.error(format!(
                "{} {why}, so it is not what a restore of this user left: look who made it, then remove it",
                path.display()
            ))
        };
        let fd = match open_directory(self.file.as_fd(), name) {
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
        match mkdirat(&self.file, name, Mode::from_raw_mode(DIRECTORY_MODE)) {
            Ok(()) | Err(Errno::EXIST) => self.need_own(name),
            Err(e) => Err(self.error("create", name, e)),
        }
    }

    /// Creates a file that only its owner can read, as etcd does.
    ///
    /// # Errors
    /// `TargetExists`; `Io`, `NoSpace`, `PermissionDenied`.
    pub fn create(&self, name: &str) -> Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        match openat(&self.file, name, flags, Mode::from_raw_mode(FILE_MODE)) {
            Ok(fd) => Ok(fd.into()),
            Err(Errno::EXIST) => {
                let path = self.path.join(name);
                Err(Reason::TargetExists.error(format!("{} already exists", path.display())))
            }
            Err(e) => Err(self.error("write", name, e)),
        }
    }

    /// Writes a new file, and syncs it and the directory. Returns its path. If `len` is larger than the content, the
    /// file is extended to that size in bytes without allocating disk space.
    ///
    /// # Errors
    /// `TargetExists`; `Io`, `NoSpace`, `PermissionDenied`.
    pub fn write(&self, name: &str, content: &[u8], len: u64) -> Result<PathBuf> {
        let mut file = self.create(name)?;
        let mut write = || {
            file.write_all(content)?;
            if len > content.len() as u64 {
                file.set_len(len)?;
            }
            file.sync_all()
        };
        write().map_err(|e| self.error("write", name, e))?;
        self.sync()?;
        Ok(self.path.join(name))
    }

    /// Whether there is anything of this name.
    pub(super) fn exists(&self, name: &str) -> Result<bool> {
        match statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(self.error("inspect", name, e)),
        }
    }

    /// Moves a file or directory without replacing another one.
    pub(super) fn rename(&self, name: &str, to: &Dir, new: &str) -> Result<()> {
        let (from, into) = (&self.file, &to.file);
        let renamed = match renameat_with(from, name, into, new, RenameFlags::NOREPLACE) {
            // Some file systems do not support flags.
            Err(Errno::INVAL | Errno::NOSYS) if !to.exists(new)? => renameat(from, name, into, new),
            other => other,
        };
        renamed.map_err(|e| to.error("rename to", new, e))
    }

    /// Exchanges two directories or files in one step.
    pub(super) fn exchange(&self, name: &str, with: &Dir, other: &str) -> io::Result<()> {
        let (from, into) = (&self.file, &with.file);
        Ok(renameat_with(
            from,
            name,
            into,
            other,
            RenameFlags::EXCHANGE,
        )?)
    }

    /// Removes a file from a directory in this one. Returns whether it was there.
    pub(super) fn remove_in(&self, directory: &str, name: &str) -> Result<bool> {
        let removed = open_directory(self.file.as_fd(), directory)
            .and_then(|at| unlinkat(at, name, AtFlags::empty()));
        match removed {
            Ok(()) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
            Err(e) => Err(self.error("remove a file in", directory, e)),
        }
    }

    /// Whether there is anything of this name in a directory in this one.
    pub(super) fn holds_in(&self, directory: &str, name: &str) -> Result<bool> {
        let found = open_directory(self.file.as_fd(), directory)
            .and_then(|at| statat(at, name, AtFlags::SYMLINK_NOFOLLOW));
        match found {
            Ok(_) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
            Err(e) => Err(self.error("inspect", directory, e)),
        }
    }

    /// Removes a directory with all that is in it, if it exists.
    pub(super) fn remove_all(&self, name: &str) -> Result<()> {
        let name = &c_string(name)?;
        match remove_tree(self.file.as_fd(), name, MAX_LEVELS) {
            Ok(()) => Ok(()),
            Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(self.error("remove", &name.to_string_lossy(), e)),
        }
    }

    /// Returns the names in the directory.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        let names = names(self.file.as_fd()).map_err(|e| self.error("list", "", e))?;
        let text = |name: CString| name.to_string_lossy().into_owned();
        Ok(names.into_iter().map(text).collect())
    }

    /// Whether a directory of this name holds a file at any depth. What is no directory counts as a file.
    pub(super) fn holds_files(&self, name: &str) -> Result<bool> {
        let held = holds_files(self.file.as_fd(), &c_string(name)?, MAX_LEVELS);
        held.map_err(|e| self.error("look into", name, e))
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

fn c_string(name: &str) -> Result<CString> {
    CString::new(name).map_err(|e| Error::internal(format!("a name of a file: {e}")))
}

/// Opens a directory in another one, without following a link.
fn open_directory(at: BorrowedFd<'_>, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    openat(at, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())
}

fn names(at: BorrowedFd<'_>) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(at)? {
        let name = entry?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    Ok(names)
}

fn holds_files(at: BorrowedFd<'_>, name: &CString, levels: u32) -> Result<bool, Errno> {
    let directory = match open_directory(at, name) {
        Ok(directory) if levels > 0 => directory,
        Err(Errno::NOENT) => return Ok(false),
        // Whatever is deeper than any member is kept like a file.
        Ok(_) | Err(Errno::NOTDIR | Errno::LOOP) => return Ok(true),
        Err(e) => return Err(e),
    };
    for name in names(directory.as_fd())? {
        if holds_files(directory.as_fd(), &name, levels - 1)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn remove_tree(at: BorrowedFd<'_>, name: &CString, levels: u32) -> Result<(), Errno> {
    let directory = match open_directory(at, name) {
        Err(Errno::NOTDIR | Errno::LOOP) => return unlinkat(at, name, AtFlags::empty()),
        directory => directory?,
    };
    if levels > 0 {
        for name in names(directory.as_fd())? {
            remove_tree(directory.as_fd(), &name, levels - 1)?;
        }
    }
    unlinkat(at, name, AtFlags::REMOVEDIR)
}
