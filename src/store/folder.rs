//! Files below a local folder, without following symbolic links, and with the mode that the user gives.
//!
//! Other users may write to the folder, and may put a link there between two calls. So no path is checked first and
//! opened later: the kernel resolves each path below the root's descriptor and refuses links (`openat2`). A name is
//! given or removed relative to the descriptor of its folder. The kernel does not follow a link in the last part of
//! such a path. The root itself and the folders above it may be links. Mounts below the root are followed.

use super::staging::{STAGING, temporary_path};
use super::{ObjectInfo, listing};
use crate::base::none_if_missing;
use crate::base::opt::FILE_MODE;
use crate::error::{Error, Result};
use chrono::{DateTime, Utc};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, fchmod, fstat,
    fsync, linkat, mkdirat, open, openat, openat2, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Appended to the path of a symbolic link in a listing. So no link has the name of a snapshot.
pub(super) const LINK: &str = " (a symbolic link)";
/// Appended to the path of an unreadable folder below a listed one. It does not fail the listing, and nothing
/// in it counts.
const UNREADABLE: &str = " (a folder that cannot be read)";
/// How long another process may keep a lease of a file that is to be opened: the kernel's own
/// `lease-break-time`.
const LEASE_BREAKS: Duration = Duration::from_secs(45);
const LEASE_PAUSE: Duration = Duration::from_millis(50);
/// The most levels of folders below a listed one. The old layout has one.
pub(super) const DEEPEST: usize = 4;

/// The mode of new files. New folders also have an execute bit for each read bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMode {
    bits: u32,
    /// Whether the user gave the mode. The default mode may fail on a file system without modes.
    is_asked: bool,
}

/// Only the owner may read what a database holds.
impl Default for FileMode {
    fn default() -> Self {
        FileMode {
            bits: 0o600,
            is_asked: false,
        }
    }
}

impl FromStr for FileMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_octal = !text.is_empty() && text.bytes().all(|b| matches!(b, b'0'..=b'7'));
        let bits = match u32::from_str_radix(text, 8) {
            Ok(bits) if is_octal && bits <= 0o7777 => bits,
            _ => return Err("give an octal mode, such as 0640".to_owned()),
        };
        match bits {
            _ if bits & 0o600 != 0o600 => {
                Err("the owner must read and write: give 0600, 0640 or 0660".to_owned())
            }
            _ if bits & 0o7111 != 0 => {
                Err("files take no execute, setuid, setgid or sticky bit".to_owned())
            }
            _ if bits & 0o002 != 0 => Err("everybody could write to the files".to_owned()),
            _ => Ok(FileMode {
                bits,
                is_asked: true,
            }),
        }
    }
}

impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.bits)
    }
}

impl FileMode {
    fn folder_bits(self) -> u32 {
        self.bits | (self.bits & 0o444) >> 2
    }

    /// Sets the mode of a new file or folder, if the umask took some bits away.
    fn apply(self, new: BorrowedFd<'_>, wanted: u32) -> io::Result<()> {
        let mode = fstat(new)?.st_mode;
        if mode & 0o777 == wanted {
            return Ok(());
        }
        // A folder inherits setgid: keep it.
        let kept = mode & 0o2000;
        match fchmod(new, Mode::from_raw_mode(wanted | kept)) {
            Err(Errno::PERM | Errno::NOTSUP | Errno::NOSYS) if !self.is_asked => Ok(()),
            done => Ok(done?),
        }
    }

    /// Creates one folder. Returns false if something has its name.
    fn make(self, at: BorrowedFd<'_>, name: impl rustix::path::Arg + Copy) -> io::Result<bool> {
        let wanted = self.folder_bits();
        match mkdirat(at, name, Mode::from_raw_mode(wanted)) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
        match openat(at, name, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(made) => self.apply(made.as_fd(), wanted).map(|()| true),
            // Another process has removed the folder.
            Err(Errno::NOENT) => Ok(true),
            Err(e) => Err(e.into()),
        }
    }

    /// Creates the folder of a store.
    pub(super) fn make_root(self, path: &Path) -> io::Result<()> {
        if self.make(CWD, path)? {
            Ok(())
        } else {
            Err(ErrorKind::AlreadyExists.into())
        }
    }
}

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);
/// A folder that is only a step of a path.
const FOLDER_PATH: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Opening must not block if the file is a pipe.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// A local folder, and the mode of new files in it. Paths below it have `/` between their parts.
#[derive(Debug, Clone)]
pub struct Folder {
    root: Arc<Path>,
    mode: FileMode,
    /// So far, the file system gave names only if they were free.
    keeps_names: Arc<AtomicBool>,
}

/// With the default mode.
impl From<PathBuf> for Folder {
    fn from(root: PathBuf) -> Self {
        Folder::new(root, FileMode::default())
    }
}

/// A file, folder or link in a folder.
struct FolderEntry {
    name: String,
    stat: Stat,
}

/// Returns the error for a symbolic link in a path.
fn refused() -> io::Error {
    io::Error::new(
        ErrorKind::PermissionDenied,
        "a symbolic link is in the way, and links below the folder of a store are not followed: replace the link by its target, or mount the target there",
    )
}

fn io_error(e: Errno) -> io::Error {
    match e {
        Errno::LOOP => refused(),
        e => e.into(),
    }
}

/// Splits a path into its folder and its name there.
pub(super) fn split(below: &str) -> (&str, &str) {
    below.rsplit_once('/').unwrap_or(("", below))
}

pub(super) fn modified(stat: &Stat) -> DateTime<Utc> {
    DateTime::from_timestamp(stat.st_mtime, stat.st_mtime_nsec as u32).unwrap_or_default()
}

impl Folder {
    /// Returns an existing folder.
    pub fn new(root: PathBuf, mode: FileMode) -> Self {
        Folder {
            root: root.into(),
            mode,
            keeps_names: Arc::new(AtomicBool::new(true)),
        }
    }

    /// Returns a path for messages.
    pub(super) fn shown(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    /// Opens the root, each time anew: it may be mounted again while the process runs.
    fn root(&self) -> io::Result<OwnedFd> {
        Ok(open(&*self.root, FOLDER_PATH, Mode::empty())?)
    }

    fn open(&self, below: &str, flags: OFlags, mode: u32) -> io::Result<OwnedFd> {
        let root = self.root()?;
        if below.is_empty() {
            return Ok(openat(root, ".", flags, Mode::empty())?);
        }
        let mode = Mode::from_raw_mode(mode);
        past_leases(|| open_below(root.as_fd(), below, flags, mode))
    }

    /// Opens the folder of a path. Returns it and the name there.
    fn open_parent<'p>(&self, below: &'p str) -> io::Result<(OwnedFd, &'p str)> {
        let (folder, name) = split(below);
        if matches!(name, "" | "." | "..") {
            return Err(ErrorKind::InvalidInput.into());
        }
        Ok((self.open(folder, FOLDER_PATH, 0)?, name))
    }

    /// Opens a file for reading. Refuses everything that is not a regular file.
    pub(super) fn read(&self, below: &str) -> io::Result<(File, Stat)> {
        let file = self.open(below, READ, 0)?;
        let stat = fstat(&file)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok((file.into(), stat)),
            FileType::Directory => Err(ErrorKind::NotFound.into()),
            _ => Err(io::Error::new(
                ErrorKind::PermissionDenied,
                "it is not a regular file",
            )),
        }
    }

    /// Opens an existing file for locking.
    pub(super) fn write(&self, below: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(self.open(below, flags, 0)?.into())
    }

    /// Creates a file.
    pub(super) fn create(&self, below: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let wanted = self.mode.bits;
        let file = self.open(below, flags, wanted)?;
        let applied = self.mode.apply(file.as_fd(), wanted);
        applied.inspect_err(|_| {
            // Remove the empty file. The first error is the one to report.
            let _ = self.remove(below);
        })?;
        Ok(file.into())
    }

    /// Creates the missing folders of a path, and syncs their names.
    pub(super) fn make(&self, below: &str) -> io::Result<()> {
        let mut at = open(&*self.root, FOLDER, Mode::empty())?;
        for part in below.split('/').filter(|part| !part.is_empty()) {
            if self.mode.make(at.as_fd(), part)? {
                fsync(&at)?;
            }
            at = open_below(at.as_fd(), part, FOLDER, Mode::empty())?;
        }
        Ok(())
    }

    /// Renames a file, and replaces the one that has the name.
    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let ((from, old), (to, new)) = (self.open_parent(from)?, self.open_parent(to)?);
        Ok(renameat(&from, old, &to, new)?)
    }

    /// Renames a file if the new name is free. Returns false if another file has the name. If the file system has no
    /// such call, the file gets a second name and loses the first. If it has no second names either, an empty file takes the
    /// name, and is replaced: a process that is killed in between leaves it.
    pub(super) fn rename_if_free(&self, from: &str, to: &str) -> io::Result<bool> {
        let ((from, old), (to, new)) = (self.open_parent(from)?, self.open_parent(to)?);
        let renamed = match renameat_with(&from, old, &to, new, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                match linkat(&from, old, &to, new, AtFlags::empty()) {
                    Err(Errno::PERM | Errno::NOSYS | Errno::NOTSUP) => {
                        self.keeps_names.store(false, Ordering::Relaxed);
                        take_name(&to, new).and_then(|()| {
                            renameat(&from, old, &to, new).inspect_err(|_| {
                                let _ = unlinkat(&to, new, AtFlags::empty());
                            })
                        })
                    }
                    linked => linked.and_then(|()| unlinkat(&from, old, AtFlags::empty())),
                }
            }
            renamed => renamed,
        };
        match renamed {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns whether the file system gives a file a name only if it is free. Where it does not, such as on a mounted bucket,
    /// it is no place for locks either.
    pub(super) fn keeps_names(&self) -> io::Result<bool> {
        let [from, to] = ["from", "to"].map(temporary_path);
        self.make(STAGING)?;
        self.create(&from)?;
        self.rename_if_free(&from, &to)
            .inspect_err(|_| drop(self.remove(&from)))?;
        self.remove(&to)?;
        Ok(self.keeps_names.load(Ordering::Relaxed))
    }

    /// Deletes a file by its listed name; the object_store crate cannot delete a name with a `#`. Succeeds if
    /// the file does not exist.
    ///
    /// # Errors
    /// Fails with the file system's errors.
    pub(super) fn delete(&self, below: &str) -> Result<()> {
        let failed = |e| Error::io(format!("delete {}", self.shown(below).display()), e);
        none_if_missing(self.remove(below)).map_err(failed)?;
        Ok(())
    }

    /// Removes a file, or a link itself.
    pub(super) fn remove(&self, below: &str) -> io::Result<()> {
        let (at, name) = self.open_parent(below)?;
        Ok(unlinkat(&at, name, AtFlags::empty())?)
    }

    /// Syncs a folder: the names in it survive a power loss.
    pub(super) fn sync(&self, below: &str) -> io::Result<()> {
        Ok(fsync(self.open(below, FOLDER, 0)?)?)
    }

    /// Lists the files in a folder and in the folders below it, and links under another name. Returns nothing
    /// if the folder does not exist.
    ///
    /// # Errors
    /// Fails with `Io` or `PermissionDenied`.
    pub(super) fn list(&self, below: &str, depth: usize) -> Result<Vec<ObjectInfo>> {
        let failed = |e| self.list_error(below, e);
        let mut objects = Vec::new();
        if let Some(at) = none_if_missing(self.open(below, FOLDER, 0)).map_err(failed)? {
            list_in(at, below, depth.min(DEEPEST), &mut objects).map_err(failed)?;
        }
        Ok(objects)
    }

    fn list_error(&self, below: &str, e: io::Error) -> Error {
        let is_denied = e.raw_os_error() == Some(Errno::ACCESS.raw_os_error());
        let e = if is_denied {
            let text = format!("{e}: if another user made the folder, both need {FILE_MODE}");
            io::Error::new(e.kind(), text)
        } else {
            e
        };
        Error::io(format!("list {}", self.shown(below).display()), e)
    }
}

/// Opens a file on which another process (Samba, an NFS server) may hold a lease. The kernel asks that process
/// to give the lease up, and a non-blocking open fails meanwhile.
fn past_leases<T>(open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let begun = Instant::now();
    loop {
        match open() {
            Err(e) if e.kind() == ErrorKind::WouldBlock && begun.elapsed() < LEASE_BREAKS => {
                std::thread::sleep(LEASE_PAUSE);
            }
            opened => return opened,
        }
    }
}

/// Opens a path below a folder. No part of it may be a link.
fn open_below(at: BorrowedFd<'_>, below: &str, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
    if below.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match openat2(at, below, flags, mode, resolve) {
        // Linux before 5.6, and sandboxes, do not know the call or its flags.
        Err(Errno::NOSYS | Errno::PERM | Errno::INVAL | Errno::TOOBIG) => {
            open_part_by_part(at, below, flags, mode)
        }
        opened => opened.map_err(io_error),
    }
}

/// Does the same with one call for each part of the path.
fn open_part_by_part(
    at: BorrowedFd<'_>,
    below: &str,
    flags: OFlags,
    mode: Mode,
) -> io::Result<OwnedFd> {
    let mut current: Option<OwnedFd> = None;
    let (folder, name) = split(below);
    let folders = folder.split('/').filter(|f| !f.is_empty());
    for (part, flags) in folders.map(|f| (f, FOLDER_PATH)).chain([(name, flags)]) {
        let from = current.as_ref().map_or(at, AsFd::as_fd);
        let opened = openat(from, part, flags | OFlags::NOFOLLOW, mode);
        current = Some(match opened {
            // The part is a link, and must be a folder.
            Err(Errno::NOTDIR) if is_link(from, part) => return Err(refused()),
            opened => opened.map_err(io_error)?,
        });
    }
    current.ok_or_else(|| ErrorKind::InvalidInput.into())
}

/// Creates an empty file, if the name is free.
fn take_name(at: &OwnedFd, name: &str) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::RUSR | Mode::WUSR).map(drop)
}

fn is_link(at: BorrowedFd<'_>, name: &str) -> bool {
    let stat = statat(at, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Symlink)
}

/// Returns the entries of a folder, without those that vanish meanwhile.
fn entries(at: &OwnedFd) -> io::Result<Vec<FolderEntry>> {
    let mut all = Vec::new();
    for entry in Dir::read_from(at)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        match statat(at, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => {
                let name = name.to_string_lossy().into_owned();
                all.push(FolderEntry { name, stat });
            }
            // The folder may not be searched. That must not look like an empty folder.
            Err(Errno::ACCESS) => return Err(Errno::ACCESS.into()),
            Err(_) => {}
        }
    }
    Ok(all)
}

fn list_in(
    at: OwnedFd,
    below: &str,
    depth: usize,
    objects: &mut Vec<ObjectInfo>,
) -> io::Result<()> {
    for FolderEntry { name, stat } in entries(&at)? {
        let mut path = match below {
            "" => name.clone(),
            below => format!("{below}/{name}"),
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        let mut suffix = (kind == FileType::Symlink).then_some(LINK);
        if kind == FileType::Directory && depth > 0 {
            // List folders of every name: a foreign one does no harm.
            match openat(&at, &*name, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
                Ok(folder) => match list_in(folder, &path, depth - 1, objects) {
                    Err(e) if e.kind() == ErrorKind::PermissionDenied => suffix = Some(UNREADABLE),
                    listed => listed?,
                },
                Err(Errno::ACCESS) => suffix = Some(UNREADABLE),
                Err(Errno::LOOP | Errno::NOTDIR) => suffix = Some(LINK),
                Err(Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
        match suffix {
            Some(suffix) => path.push_str(suffix),
            None if kind != FileType::RegularFile => continue,
            None => {}
        }
        objects.push(ObjectInfo {
            is_odd: suffix.is_some() || listing::is_odd(&path),
            path,
            bytes: stat.st_size as u64,
            modified: modified(&stat),
            // A user who may write can set the time of the last write, but not that of the last change.
            etag: Some(format!(
                "{:x}-{:x}.{:x}",
                stat.st_ino, stat.st_ctime, stat.st_ctime_nsec
            )),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_mode_gives_the_owner_all_and_nobody_execution() {
        for (text, folder_bits) in [
            ("0600", 0o700),
            ("640", 0o750),
            ("0660", 0o770),
            ("0644", 0o755),
        ] {
            let mode: FileMode = text.parse().unwrap();
            assert_eq!(mode.folder_bits(), folder_bits, "{text}");
        }
        for text in [
            "",
            "0",
            "0400",
            "0200",
            "0755",
            "0610",
            "4600",
            "2660",
            "1600",
            "0666",
            "0602",
            "+600",
            "0o600",
            "0680",
            "600600",
            "rw-------",
        ] {
            assert!(text.parse::<FileMode>().is_err(), "{text}");
        }
    }

    /// A folder with links to a secret beside it.
    fn folder_with_links() -> (tempfile::TempDir, Folder) {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        fs::create_dir_all(at("root/v2")).unwrap();
        fs::create_dir(at("secret")).unwrap();
        fs::write(at("secret/file"), "secret").unwrap();
        symlink(at("secret/file"), at("root/v2/file")).unwrap();
        symlink(at("secret"), at("root/linked")).unwrap();
        symlink("v2", at("root/within")).unwrap();
        let folder = Folder::from(at("root"));
        (dir, folder)
    }

    #[test]
    fn no_link_is_followed_by_either_way_of_opening() {
        let (_dir, folder) = folder_with_links();
        let root = folder.root().unwrap();
        for path in ["v2/file", "linked/file", "within/x", "linked"] {
            for open in [open_below, open_part_by_part] {
                for flags in [READ, FOLDER, FOLDER_PATH, READ | OFlags::CREATE] {
                    let mode = Mode::from_raw_mode(if flags.contains(OFlags::CREATE) {
                        0o600
                    } else {
                        0
                    });
                    let e = open(root.as_fd(), path, flags, mode).unwrap_err();
                    let shown = format!("{path} {flags:?}: {e}");
                    assert_eq!(e.kind(), ErrorKind::PermissionDenied, "{shown}");
                    assert!(e.to_string().contains("symbolic link"), "{shown}");
                }
            }
        }
        for path in [
            "",
            "/etc/passwd",
            "../secret/file",
            "v2/../../secret/file",
            "v2//file",
            ".",
        ] {
            let e = open_below(root.as_fd(), path, READ, Mode::empty()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidInput, "{path}");
        }
    }

    #[test]
    fn writes_renames_and_removals_stay_below_the_root() {
        let (dir, folder) = folder_with_links();
        let secret = dir.path().join("secret");
        fs::write(folder.shown("v2/new"), "new").unwrap();
        for result in [
            folder.create("linked/x").map(|_| ()),
            folder.make("linked/x"),
            folder.rename("v2/new", "linked/file"),
            folder.rename("linked/file", "v2/stolen"),
            folder.rename_if_free("v2/new", "linked/x").map(|_| ()),
            folder.remove("linked/file"),
            folder.sync("linked"),
            folder
                .list("linked", 1)
                .map(|_| ())
                .map_err(io::Error::other),
        ] {
            result.unwrap_err();
        }
        // A link itself may be replaced and removed.
        folder.rename("v2/new", "v2/file").unwrap();
        folder.remove("linked").unwrap();
        let names: Vec<_> = fs::read_dir(&secret).unwrap().collect();
        assert_eq!(names.len(), 1);
        assert_eq!(fs::read(secret.join("file")).unwrap(), b"secret");
        assert_eq!(fs::read(folder.shown("v2/file")).unwrap(), b"new");
    }

    #[test]
    fn links_and_pipes_are_no_objects() {
        let (_dir, folder) = folder_with_links();
        let pipe = folder.shown("v2/pipe");
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let mut listed: Vec<_> = folder.list("", DEEPEST).unwrap();
        listed.sort_by(|a, b| a.path.cmp(&b.path));
        let paths: Vec<_> = listed.iter().map(|o| &*o.path).collect();
        let linked = ["linked", "v2/file", "within"].map(|name| format!("{name}{LINK}"));
        assert_eq!(paths, linked);
        assert_eq!(
            folder.read("v2/pipe").unwrap_err().kind(),
            ErrorKind::PermissionDenied
        );
        folder.write("v2/pipe").unwrap_err();
    }

    #[test]
    fn a_lease_of_another_process_is_waited_for() {
        let attempts = std::cell::Cell::new(0);
        let opened = past_leases(|| {
            attempts.set(attempts.get() + 1);
            match attempts.get() {
                4 => Ok(()),
                _ => Err(io::Error::from(Errno::AGAIN)),
            }
        });
        opened.unwrap();
        assert_eq!(attempts.get(), 4);
        past_leases::<()>(|| Err(Errno::NOENT.into())).unwrap_err();
    }

    #[test]
    fn new_files_have_the_given_mode_and_old_ones_keep_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let set = |path: &str, mode| {
            fs::set_permissions(dir.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
        };
        fs::create_dir(dir.path().join("old")).unwrap();
        set("old", 0o2755);
        let shared = Folder::new(dir.path().to_owned(), "0660".parse().unwrap());
        shared.make("old/new").unwrap();
        let mut file = shared.create("old/new/file").unwrap();
        file.write_all(b"x").unwrap();
        let mode = |path: &str| {
            let meta = fs::metadata(dir.path().join(path)).unwrap();
            meta.permissions().mode() & 0o7777
        };
        assert_eq!(mode("old"), 0o2755);
        // setgid is inherited: a shared folder keeps its group.
        assert_eq!(mode("old/new"), 0o2770);
        assert_eq!(mode("old/new/file"), 0o660);
        assert!(shared.create("old/new/file").is_err());
        let own = Folder::from(dir.path().to_owned());
        own.create("file").unwrap();
        own.make("folder").unwrap();
        assert_eq!((mode("file"), mode("folder")), (0o600, 0o700));
    }
}
