//! Stages a member beside where it shall be, and puts it in place: all of it or nothing, whenever the
//! process is killed.
//!
//! It moves files and does not know what is in them. `job::restore` calls it.
//!
//! ```text
//! DIR/member                            the member that etcd sees
//! DIR/.deltafold-restore/new/member     the one that is being written
//! DIR/.deltafold-restore/journal        written before anything is moved, deleted when all is
//! DIR/member.bad-<time>                 what was there before, kept aside
//! WAL-DIR/.deltafold-restore            only with a WAL directory of its own: the new segment
//! WAL-DIR/bad-<time>                    the segments that were there before
//! ```

use crate::error::{Error, Reason, Result};
use rustix::fs::{CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The folder of a member in its data directory.
pub const MEMBER: &str = "member";
/// Staging, in the data directory and in a WAL directory of its own.
pub const STAGING: &str = ".deltafold-restore";
const NEW: &str = "new";
const JOURNAL: &str = "journal";
/// In a member that was put in place and whose restore is not quite over.
const MARK: &str = ".deltafold-new";
/// As etcd creates its directories.
const DIRECTORY_MODE: u32 = 0o700;
/// The ending of WAL segments.
const SEGMENT: &str = "wal";

/// Where a member is, or shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    dir: PathBuf,
    wal_dir: Option<PathBuf>,
}

/// What stands in the journal.
#[derive(Debug, Serialize, Deserialize)]
struct Journal {
    /// The end of the names under which what was there before is kept.
    aside: String,
    /// The WAL directory, where it is one of its own, and the new segment's name in it.
    wal: Option<(PathBuf, String)>,
}

/// What was found of an earlier run that did not come to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// Nothing.
    None,
    /// It had put the new member in place: that was completed.
    Completed,
    /// It had not: what was there before is there again.
    Undone,
}

impl Place {
    /// The data directory `dir`, with its WAL in `wal_dir` or in the member.
    ///
    /// # Errors
    /// `Usage` for a WAL directory that lies in the member at another place than etcd's own.
    pub fn new(dir: &Path, wal_dir: Option<&Path>) -> Result<Self> {
        let absolute = |p: &Path| {
            let p = std::path::absolute(p);
            p.map_err(|e| Error::io("find the working directory", e))
        };
        let dir = absolute(dir)?;
        let member = dir.join(MEMBER);
        let wal_dir = wal_dir.map(absolute).transpose()?;
        let wal_dir = wal_dir.filter(|w| *w != member.join("wal"));
        if let Some(w) = &wal_dir
            && (w.starts_with(&member) || w.starts_with(dir.join(STAGING)) || *w == dir)
        {
            return Err(Error::new(
                Reason::Usage,
                format!(
                    "--wal-dir {} lies in what is put in place as a whole: leave it out, or name a directory outside of {}",
                    w.display(),
                    member.display()
                ),
            ));
        }
        Ok(Place { dir, wal_dir })
    }

    /// The data directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `DIR/member`.
    pub fn member(&self) -> PathBuf {
        self.dir.join(MEMBER)
    }

    /// Where the WAL is.
    pub fn wal(&self) -> PathBuf {
        let own = || self.member().join("wal");
        self.wal_dir.clone().unwrap_or_else(own)
    }

    /// The WAL directory, where it is one of its own.
    pub fn own_wal_dir(&self) -> Option<&Path> {
        self.wal_dir.as_deref()
    }

    /// The database.
    pub fn db(&self) -> PathBuf {
        self.member().join("snap").join("db")
    }

    /// Whether there is a member, or a part of one: any file of it.
    ///
    /// # Errors
    /// `Io`, `PermissionDenied`.
    pub fn is_taken(&self) -> Result<bool> {
        if holds_files(&self.member())? {
            return Ok(true);
        }
        match &self.wal_dir {
            Some(w) => Ok(!segments(w)?.is_empty()),
            None => Ok(false),
        }
    }

    /// Whether an earlier run did not come to its end; changes nothing.
    pub fn has_leftover(&self) -> bool {
        self.staging().exists()
    }

    fn staging(&self) -> PathBuf {
        self.dir.join(STAGING)
    }

    fn staged_member(&self) -> PathBuf {
        self.staging().join(NEW).join(MEMBER)
    }

    fn staged_wal(&self) -> Option<PathBuf> {
        self.wal_dir.as_ref().map(|w| w.join(STAGING))
    }

    fn kept_member(&self, aside: &str) -> PathBuf {
        self.dir.join(format!("{MEMBER}.{aside}"))
    }

    /// Takes the directory for this process, and completes or undoes what an earlier run has left.
    ///
    /// # Errors
    /// `TargetInUse` where another restore is at it; `Io`, `NoSpace`, `PermissionDenied`.
    pub fn occupy(&self) -> Result<Occupied> {
        let mut created = Vec::new();
        for dir in [Some(&self.dir), self.wal_dir.as_ref()]
            .into_iter()
            .flatten()
        {
            let mut missing = dir.as_path();
            let mut above = Vec::new();
            while !missing.exists() {
                above.push(missing.to_owned());
                match missing.parent() {
                    Some(p) => missing = p,
                    None => break,
                }
            }
            create_directory(dir)?;
            created.extend(above);
        }
        let lock = File::open(&self.dir).map_err(failed("open", &self.dir))?;
        // Some network file systems lock no directories: what is lost there is only this check.
        let locked = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
        if locked == Err(Errno::WOULDBLOCK) {
            return Err(Error::new(
                Reason::TargetInUse,
                format!("another restore into {} is running", self.dir.display()),
            ));
        }
        let mut occupied = Occupied {
            place: self.clone(),
            created,
            leftover: Leftover::None,
            _lock: lock,
        };
        occupied.leftover = occupied.settle()?;
        Ok(occupied)
    }
}

/// A place that this process has to itself. Dropping it removes what is staged.
#[derive(Debug)]
pub struct Occupied {
    place: Place,
    /// Directories that were made, the deepest first of each.
    created: Vec<PathBuf>,
    leftover: Leftover,
    _lock: File,
}

impl Occupied {
    /// What an earlier run had left.
    pub fn leftover(&self) -> Leftover {
        self.leftover
    }

    /// Makes the directories of a new member: the one for the database and `.snap`, and the WAL's.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn stage(&self) -> Result<(PathBuf, PathBuf)> {
        let member = self.place.staged_member();
        let snap = member.join("snap");
        let wal = self.place.staged_wal().unwrap_or(member.join("wal"));
        // What another candidate has left.
        self.clear(self.place.wal_dir.as_deref())?;
        create_directory(&snap)?;
        create_directory(&wal)?;
        Ok((snap, wal))
    }

    /// Puts what was staged in place of what is there, which is kept aside under names that end in
    /// `aside`; `done` hears of every step. Gives the names of what was kept. All files must have been
    /// synced.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`: what was there before is there then.
    pub fn put_in_place(
        self,
        aside: &str,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Vec<PathBuf>> {
        let placed = self.try_put_in_place(aside, done);
        if placed.is_err() {
            // The first error tells more. What cannot be undone now, the next run undoes.
            let _ = self.settle();
        }
        placed
    }

    fn try_put_in_place(
        &self,
        aside: &str,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Vec<PathBuf>> {
        let place = &self.place;
        let (staging, member) = (place.staging(), place.staged_member());
        create_file(&member.join(MARK), b"")?;
        let wal = place.staged_wal().unwrap_or(member.join("wal"));
        for dir in [&wal, &member.join("snap"), &member, &staging.join(NEW)] {
            sync_directory(dir)?;
        }
        let journal = Journal {
            aside: aside.to_owned(),
            wal: match &place.wal_dir {
                Some(w) => segments(&wal)?.pop().map(|segment| (w.clone(), segment)),
                None => None,
            },
        };
        let text = serde_json::to_vec(&journal)
            .map_err(|e| Error::internal(format!("a journal that is no JSON: {e}")))?;
        let unnamed = staging.join(format!("{JOURNAL}.tmp"));
        create_file(&unnamed, &text)?;
        done("wrote the journal's content");
        rename(&unnamed, &staging.join(JOURNAL))?;
        sync_directory(&staging)?;
        sync_directory(&place.dir)?;
        done("wrote the journal");

        let mut kept = Vec::new();
        if let Some((w, segment)) = &journal.wal {
            let old = segments(w)?;
            if !old.is_empty() {
                let aside = w.join(aside);
                create_directory(&aside)?;
                for name in &old {
                    done("next old segment");
                    rename(&w.join(name), &aside.join(name))?;
                }
                sync_directory(&aside)?;
                kept.push(aside);
            }
            done("put the old segments aside");
            rename(&wal.join(segment), &w.join(segment))?;
            sync_directory(w)?;
            done("put the new segment in place");
        }
        let target = place.member();
        if !target.exists() {
            rename(&member, &target)?;
        } else if !exchange(&member, &target)? {
            // Not every file system can exchange: for a moment there is no member.
            rename(&target, &place.kept_member(aside))?;
            sync_directory(&place.dir)?;
            done("put the old member aside");
            rename(&member, &target)?;
        }
        sync_directory(&place.dir)?;
        sync_directory(&staging.join(NEW))?;
        done("put the new member in place");
        kept.extend(self.complete(&journal, done)?);
        Ok(kept)
    }

    /// Completes what was begun once the new member is in place. Gives where the old one is kept.
    fn complete(
        &self,
        journal: &Journal,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Option<PathBuf>> {
        let place = &self.place;
        let (old, kept) = (place.staged_member(), place.kept_member(&journal.aside));
        if holds_files(&old)? {
            rename(&old, &kept)?;
            sync_directory(&place.dir)?;
            done("put the old member aside");
        }
        remove_file_if_there(&place.staging().join(JOURNAL))?;
        sync_directory(&place.staging())?;
        done("removed the journal");
        remove_file_if_there(&place.member().join(MARK))?;
        sync_directory(&place.member())?;
        done("removed the mark");
        self.clear(journal.wal.as_ref().map(|w| w.0.as_path()))?;
        Ok(kept.exists().then_some(kept))
    }

    /// Completes or undoes what an interrupted run has left.
    fn settle(&self) -> Result<Leftover> {
        let place = &self.place;
        let path = place.staging().join(JOURNAL);
        let wal_dir = place.wal_dir.as_deref();
        let journal = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let leftover = match (place.member().join(MARK).exists(), place.has_leftover()) {
                    (true, _) => Leftover::Completed,
                    (false, true) => Leftover::Undone,
                    (false, false) => Leftover::None,
                };
                remove_file_if_there(&place.member().join(MARK))?;
                self.clear(wal_dir)?;
                return Ok(leftover);
            }
            Err(e) => return Err(failed("read", &path)(e)),
        };
        let journal: Journal = serde_json::from_slice(&journal).map_err(|e| {
            Error::new(
                Reason::CorruptDataDir,
                format!(
                    "{} is no journal of a restore ({e}): look what is in {}, and remove it",
                    path.display(),
                    place.staging().display()
                ),
            )
        })?;
        if place.member().join(MARK).exists() {
            self.complete(&journal, &mut |_| ())?;
            return Ok(Leftover::Completed);
        }
        let kept = place.kept_member(&journal.aside);
        if !place.member().exists() && kept.exists() {
            rename(&kept, &place.member())?;
            sync_directory(&place.dir)?;
        }
        if let Some((w, segment)) = &journal.wal {
            let old = w.join(&journal.aside);
            // Once it has left staging, the segment of this name is the new one. It goes back there, so
            // that an undoing that is interrupted can be done again.
            let (staged, placed) = (w.join(STAGING).join(segment), w.join(segment));
            if !staged.exists() && placed.exists() {
                rename(&placed, &staged)?;
            }
            for name in segments(&old)? {
                rename(&old.join(&name), &w.join(&name))?;
            }
            sync_directory(w)?;
            if old.exists() {
                fs::remove_dir(&old).map_err(failed("remove", &old))?;
            }
        }
        remove_file_if_there(&path)?;
        sync_directory(&place.staging())?;
        self.clear(journal.wal.as_ref().map(|w| w.0.as_path()))?;
        Ok(Leftover::Undone)
    }

    /// Removes staging, unless its journal is there: then it holds what must not be lost.
    fn clear(&self, wal_dir: Option<&Path>) -> Result<()> {
        let staging = self.place.staging();
        if staging.join(JOURNAL).exists() {
            return Ok(());
        }
        let staged_wal = wal_dir.map(|w| w.join(STAGING));
        for dir in [Some(staging), staged_wal].into_iter().flatten() {
            match fs::remove_dir_all(&dir) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(failed("remove", &dir)(e));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        // The next run removes what stays.
        let _ = self.clear(self.place.wal_dir.as_deref());
        // Those that are not empty stay, as they should.
        for dir in &self.created {
            let _ = fs::remove_dir(dir);
        }
    }
}

fn failed<'p>(what: &'p str, path: &'p Path) -> impl Fn(io::Error) -> Error + 'p {
    move |e| match e.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::BUSY | Errno::XDEV) => Error::new(
            Reason::Configuration,
            format!(
                "{what} {}: {e}; the data directory may be a mount point, what is in it may not",
                path.display()
            ),
        ),
        _ => Error::io(format!("{what} {}", path.display()), e),
    }
}

/// Makes a directory and those above it, as etcd does.
fn create_directory(dir: &Path) -> Result<()> {
    let mut builder = DirBuilder::new();
    let builder = builder.recursive(true).mode(DIRECTORY_MODE);
    builder.create(dir).map_err(failed("create", dir))
}

fn create_file(path: &Path, content: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(content)?;
        file.sync_all()
    };
    write().map_err(failed("write", path))
}

fn remove_file_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Has the names in a directory survive a crash.
///
/// # Errors
/// `Io`.
pub fn sync_directory(dir: &Path) -> Result<()> {
    let synced = File::open(dir).and_then(|d| d.sync_all());
    synced.map_err(failed("sync", dir))
}

/// Renames without replacing anything.
fn rename(from: &Path, to: &Path) -> Result<()> {
    let renamed = rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE);
    let renamed = match renamed {
        // Some file systems know no flags.
        Err(Errno::INVAL | Errno::NOSYS) if !to.exists() => rustix::fs::rename(from, to),
        other => other,
    };
    renamed.map_err(|e| failed("rename to", to)(e.into()))
}

/// Exchanges two directories in one step; false where the file system cannot.
fn exchange(a: &Path, b: &Path) -> Result<bool> {
    match rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS) => Ok(false),
        Err(e) => Err(failed("exchange", b)(e.into())),
    }
}

/// Whether there is any file below a directory.
fn holds_files(dir: &Path) -> Result<bool> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        // Something else than a directory is there.
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Ok(true),
        Err(e) => return Err(failed("look into", dir)(e)),
    };
    for entry in entries {
        let entry = entry.map_err(failed("look into", dir))?;
        let kind = entry
            .file_type()
            .map_err(failed("look at", &entry.path()))?;
        if !kind.is_dir() || holds_files(&entry.path())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The names of the WAL segments in a directory, sorted.
fn segments(dir: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed("look into", dir)(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed("look into", dir))?.file_name();
        if Path::new(&name).extension() == Some(OsStr::new(SEGMENT))
            && let Some(name) = name.to_str()
        {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}
