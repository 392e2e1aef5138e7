//! A member's data directory beside its database: written as `etcdutl snapshot restore` leaves it.
//!
//! [`membership`], [`wal`] and [`snap`] write and read their files and trust nothing they read.
//! They neither write the database nor know chains; [`place`] puts all of it in place. `ops` calls them.

pub mod install;
pub mod membership;
pub mod snap;
pub mod wal;

pub use membership::{Cluster, ClusterId, Member, MemberId};

use crate::error::{Error, Reason, Result};
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The raft term that a restored member starts with.
const TERM: u64 = 1;

/// The database within `member/`.
pub const DATABASE: &str = "snap/db";

fn corrupt(message: impl Into<String>) -> Error {
    Reason::CorruptDataDir.error(message)
}

/// Whether a running etcd holds the member in `member_dir` (the folder with `snap/db`) with its WAL
/// in `wal_dir`. Files that are not there are held by nobody.
///
/// It tries for the locks and lets go of them at once; nothing waits. etcd holds open-file-description
/// locks on its segments (since Linux 3.15; flock elsewhere) and bbolt an flock on the database. A
/// server that starts in the very microseconds in which a segment is tried would refuse to.
///
/// # Errors
/// `Io` or `PermissionDenied` where a file cannot be opened, or its file system knows no locks.
pub fn in_use(member_dir: &Path, wal_dir: &Path) -> Result<bool> {
    if is_flocked(&member_dir.join(DATABASE))? {
        return Ok(true);
    }
    for path in wal::segment_paths(wal_dir)? {
        let held = if cfg!(target_os = "linux") {
            is_record_locked(&path)?
        } else {
            is_flocked(&path)?
        };
        if held {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A shared flock: it conflicts with bbolt's exclusive one, which for its part waits and tries again.
fn is_flocked(path: &Path) -> Result<bool> {
    probe(path, |f| {
        rustix::fs::flock(f, FlockOperation::NonBlockingLockShared)?;
        rustix::fs::flock(f, FlockOperation::Unlock)
    })
}

/// A shared POSIX lock on the whole file: it conflicts with an OFD lock of any process. Asking without
/// taking it (`F_GETLK`) would be gentler, but rustix cannot tell the owner of an OFD lock.
fn is_record_locked(path: &Path) -> Result<bool> {
    probe(path, |f| {
        rustix::fs::fcntl_lock(f, FlockOperation::NonBlockingLockShared)?;
        rustix::fs::fcntl_lock(f, FlockOperation::NonBlockingUnlock)
    })
}

fn probe(path: &Path, lock: impl Fn(&File) -> rustix::io::Result<()>) -> Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        // Not there, or its folder is none.
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(false);
        }
        Err(e) => return Err(Error::io(format!("open {}", path.display()), e)),
    };
    match lock(&file) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => Ok(true),
        Err(e) => Err(Error::io(
            format!("try the lock of {}", path.display()),
            e.into(),
        )),
    }
}

/// Writes a new file of mode 0600, at least `len` bytes long (zeros behind `bytes`, without taking
/// room for them), and syncs it and its folder.
fn write_new(dir: &Path, name: &str, bytes: &[u8], len: u64) -> Result<PathBuf> {
    let path = dir.join(name);
    let failed = |e: std::io::Error| match e.kind() {
        ErrorKind::AlreadyExists => {
            Reason::TargetExists.error(format!("{} exists already", path.display()))
        }
        _ => Error::io(format!("write {}", path.display()), e),
    };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    if len > bytes.len() as u64 {
        file.set_len(len).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    install::sync_directory(dir)?;
    Ok(path)
}
