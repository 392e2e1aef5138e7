//! The data directory of an etcd member, except its database, as `etcdutl snapshot restore` writes it.
//!
//! [`membership`], [`wal`] and [`snap`] write the member's files and read those of any member, and check
//! every byte they read. [`install`] moves a complete member to its final place. None of them writes the
//! database.

pub mod install;
pub mod membership;
pub mod snap;
pub mod wal;

pub use membership::{Cluster, ClusterId, Member, MemberId};

use crate::error::{Error, Reason, Result};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;

/// The raft term that a restored member starts with.
const TERM: u64 = 1;

/// The path of the database in `member/`.
pub const DATABASE: &str = "snap/db";

fn corrupt(message: impl Into<String>) -> Error {
    Reason::CorruptDataDir.error(message)
}

/// Opens a file of a member for reading. The member may belong to another user than the process, so no link is
/// followed in place of the file, and opening a pipe does not wait for a writer. (The folder may be a link.)
///
/// # Errors
/// Errors of the operating system; `PermissionDenied` if it is no regular file.
pub fn open_file(path: &Path) -> io::Result<File> {
    let refused = || {
        io::Error::new(
            ErrorKind::PermissionDenied,
            "it is a link, a pipe or something else that is no regular file: look who made it, then remove it",
        )
    };
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file: File = match rustix::fs::open(path, flags, Mode::empty()) {
        // A link; a socket.
        Err(Errno::LOOP | Errno::NXIO) => return Err(refused()),
        fd => fd?.into(),
    };
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(refused())
    }
}

/// Whether a running etcd uses the member in `member_dir` (the folder with `snap/db`) with its WAL in
/// `wal_dir`. Missing files are not in use.
///
/// The function tries to lock the files without waiting, and unlocks them at once. etcd holds
/// open-file-description locks on its segments (since Linux 3.15; flock on other systems), and bbolt holds an
/// flock on the database. An etcd that tries to lock a segment in the same microseconds fails to start.
///
/// # Errors
/// `Io` or `PermissionDenied` if a file cannot be opened, or its file system does not support locks.
pub fn in_use(member_dir: &Path, wal_dir: &Path) -> Result<bool> {
    if is_flocked(&member_dir.join(DATABASE))? {
        return Ok(true);
    }
    for path in wal::segment_paths(wal_dir)? {
        let is_locked = if cfg!(target_os = "linux") {
            is_record_locked(&path)?
        } else {
            is_flocked(&path)?
        };
        if is_locked {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Tries a shared flock, which conflicts with bbolt's exclusive one. (A bbolt that meets ours waits and
/// retries.)
fn is_flocked(path: &Path) -> Result<bool> {
    probe(path, |f| {
        rustix::fs::flock(f, FlockOperation::NonBlockingLockShared)?;
        rustix::fs::flock(f, FlockOperation::Unlock)
    })
}

/// Tries a shared POSIX lock on the whole file, which conflicts with an open-file-description lock of any
/// process. `F_GETLK` would not take a lock at all, but rustix does not report owners of such locks.
fn is_record_locked(path: &Path) -> Result<bool> {
    probe(path, |f| {
        rustix::fs::fcntl_lock(f, FlockOperation::NonBlockingLockShared)?;
        rustix::fs::fcntl_lock(f, FlockOperation::NonBlockingUnlock)
    })
}

/// Whether the file is locked: `lock` takes and releases a lock on it.
fn probe(path: &Path, lock: impl Fn(&File) -> rustix::io::Result<()>) -> Result<bool> {
    let file = match open_file(path) {
        Ok(file) => file,
        // The file or its folder is missing.
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(false);
        }
        Err(e) => return Err(Error::io(format!("open {}", path.display()), e)),
    };
    match lock(&file) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => Ok(true),
        Err(e) => Err(Error::io(
            format!("test whether {} is locked", path.display()),
            e.into(),
        )),
    }
}
