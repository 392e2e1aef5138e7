//! Installs a restored member: stages its files in the data directory, then moves them to their final place, even
//! if the process is killed meanwhile.
//!
//! An existing member and the staged one are exchanged in one rename. So a kill leaves the old member or the new one,
//! and the next restore tidies up. This module moves files and does not read them.
//!
//! With a WAL directory of its own, no single rename puts both in place. The order is then: the old member is moved
//! aside, the new segment gets its place in the empty WAL directory, and the member comes last. So etcd never sees a
//! member with another member's WAL.
//!
//! The data directory may belong to another user, often etcd's. So what lies below a staging folder is believed
//! only if that folder is ours, and every step is relative to an open directory, without following links.
//!
//! ```text
//! DIR/member                       the member that etcd uses
//! DIR/.deltafold-restore/member    the staged member; after the exchange, the previous one
//! DIR/member.bad-<time>            the previous member, kept aside
//! WAL-DIR/.deltafold-restore       with --wal-dir only: the staged segment
//! ```

mod files;

pub use files::{Dir, sync_directory};

use crate::base::opt::WAL_DIR;
use crate::base::shell;
use crate::error::{Error, Reason, Result};
use files::{create_directory, resolve_links};
use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of a member in its data directory.
pub const MEMBER: &str = "member";
/// The staging folder, in the data directory and in the directory of `--wal-dir`.
pub const STAGING: &str = ".deltafold-restore";
/// An empty file in a staged member, until it is in place. It tells a staged member from a previous one.
const UNFINISHED: &str = ".deltafold-unfinished";
/// Folders of a staged member.
const SNAP: &str = "snap";
const WAL: &str = "wal";
/// What a new file system has in its root.
const LOST_AND_FOUND: &str = "lost+found";

/// The data directory and the WAL directory of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallTarget {
    dir: PathBuf,
    wal_dir: Option<PathBuf>,
}

/// What was done about an earlier restore that was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// No restore was interrupted.
    None,
    /// The new member was in place; the previous one was moved to its name.
    Completed,
    /// The new member was not in place; the staged files were removed.
    Undone,
}

impl InstallTarget {
    /// Creates the target for the data directory `dir`, with the WAL in `wal_dir` or in the member.
    ///
    /// # Errors
    /// `Usage` if `wal_dir` is in a directory that the restore moves, unless it is etcd's own (`member/wal`).
    pub fn new(dir: &Path, wal_dir: Option<&Path>) -> Result<Self> {
        let absolute = |p: &Path| {
            let p = std::path::absolute(p);
            p.map_err(|e| Error::io("find the working directory", e))
        };
        let dir = absolute(dir)?;
        let member = dir.join(MEMBER);
        let wal_dir = wal_dir.map(absolute).transpose()?;
        // Without a slash at the end.
        let wal_dir: Option<PathBuf> = wal_dir.map(|w| w.components().collect());
        let (real_dir, real_member) = (resolve_links(&dir), resolve_links(&member));
        let is_own_wal =
            |w: &Path| w == member.join("wal") || resolve_links(w) == real_member.join("wal");
        let wal_dir = wal_dir.filter(|w| !is_own_wal(w));
        // Both the path as given and the path without links matter: a restore moves the first, and the files
        // are in the second.
        let is_moved = |w: &Path| {
            let is_in = |dir: &Path, member: &Path| {
                w.starts_with(member) || w.starts_with(dir.join(STAGING)) || w == dir
            };
            is_in(&dir, &member) || is_in(&real_dir, &real_member)
        };
        if let Some(w) = &wal_dir
            && (is_moved(w) || is_moved(&resolve_links(w)))
        {
            return Err(Reason::Usage.error(format!(
                "{WAL_DIR} {} is in a directory that the restore replaces as a whole: omit the flag, or name a directory outside of {}",
                w.display(),
                member.display()
            )));
        }
        Ok(InstallTarget { dir, wal_dir })
    }

    /// Returns the data directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns `DIR/member`.
    pub fn member(&self) -> PathBuf {
        self.dir.join(MEMBER)
    }

    /// Returns the directory of the WAL.
    pub fn wal(&self) -> PathBuf {
        let in_member = || self.member().join("wal");
        self.wal_dir.clone().unwrap_or_else(in_member)
    }

    /// Returns the WAL directory if it is not in the member.
    pub fn own_wal_dir(&self) -> Option<&Path> {
        self.wal_dir.as_deref()
    }

    /// Returns the path of the database.
    pub fn db(&self) -> PathBuf {
        self.member().join("snap").join("db")
    }

    /// Whether the data directory holds a member or any file of one.
    ///
    /// # Errors
    /// `Io`, `PermissionDenied`.
    pub fn is_taken(&self) -> Result<bool> {
        match Dir::open_if_exists(&self.dir)? {
            Some(dir) => dir.holds_files(MEMBER),
            None => Ok(false),
        }
    }

    /// Fails if the WAL directory is not in the member and holds anything: a restore never mixes two logs.
    ///
    /// # Errors
    /// `TargetExists`; `Io`, `PermissionDenied`.
    pub fn require_empty_wal_dir(&self) -> Result<()> {
        let opened = self.own_wal_dir().map(Dir::open_if_exists).transpose()?;
        let Some(wal) = opened.flatten() else {
            return Ok(());
        };
        let names = wal.names()?;
        let is_allowed = |name: &String| [STAGING, LOST_AND_FOUND].contains(&name.as_str());
        let Some(name) = names.iter().find(|name| !is_allowed(name)) else {
            return Ok(());
        };
        let path = wal.path().display().to_string();
        Err(Reason::TargetExists.error(format!(
            "{WAL_DIR} {path} is not empty (it holds {name}), and restore never mixes two logs: stop etcd, move the directory away (mv {} {}), then run restore again; if it is a mount point, move its files",
            shell::word(&path),
            shell::word(&format!("{path}.old")),
        )))
    }

    /// Whether an earlier restore was interrupted. Nothing is changed.
    pub fn has_leftover(&self) -> bool {
        self.staging().symlink_metadata().is_ok()
    }

    fn staging(&self) -> PathBuf {
        self.dir.join(STAGING)
    }

    /// Locks the directories for this process, and completes or undoes an interrupted restore. A previous member is
    /// kept under a name that ends in `aside` (`bad-<time>`), or in `aside` and a number if such a name exists.
    ///
    /// # Errors
    /// `TargetInUse` if another restore holds a lock; `PermissionDenied` if a staging folder belongs to another
    /// user; `Io`, `NoSpace`.
    pub fn lock(&self, aside: &str) -> Result<LockedTarget> {
        self.lock_with(aside, &mut |_| ())
    }

    /// `done` is called after every step.
    fn lock_with(&self, aside: &str, done: &mut dyn FnMut(&'static str)) -> Result<LockedTarget> {
        let mut created = CreatedDirectories(Vec::new());
        let mut open = |path: &PathBuf| {
            let missing = path.ancestors().take_while(|d| !d.exists());
            created.0.extend(missing.map(Path::to_owned));
            create_directory(path)?;
            Dir::open(path)?.lock()
        };
        let dir = open(&self.dir)?;
        let wal = self.wal_dir.as_ref().map(open).transpose()?;
        let mut locked = LockedTarget {
            leftover: Leftover::None,
            aside: aside.to_owned(),
            _created: created,
            wal,
            dir,
        };
        locked.leftover = locked.recover(done)?;
        Ok(locked)
    }
}

/// Directories that this process created. Those that are empty in the end are removed.
#[derive(Debug)]
struct CreatedDirectories(Vec<PathBuf>);

impl Drop for CreatedDirectories {
    fn drop(&mut self) {
        self.0.sort_by_key(|dir| Reverse(dir.components().count()));
        for dir in &self.0 {
            // It fails for directories that are not empty, which stay.
            let _ = fs::remove_dir(dir);
        }
    }
}

/// A target that no other restore can use. Dropping it removes the staged files.
#[derive(Debug)]
pub struct LockedTarget {
    leftover: Leftover,
    /// The suffix of the names of previous members.
    aside: String,
    // Fields are dropped in this order: the locks last.
    _created: CreatedDirectories,
    /// The directory of `--wal-dir`.
    wal: Option<Dir>,
    dir: Dir,
}

/// The staging directories of a new member.
#[derive(Debug)]
pub struct Staged {
    /// For the database and the `.snap` file.
    pub snap: Dir,
    /// For the first segment of the WAL.
    pub wal: Dir,
}

impl LockedTarget {
    /// Returns what [`InstallTarget::lock`] did about an interrupted restore.
    pub fn leftover(&self) -> Leftover {
        self.leftover
    }

    /// Creates the staging directories of a new member.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn stage(&self) -> Result<Staged> {
        // Another candidate may have left files.
        self.clear()?;
        let member = self.dir.make(STAGING)?.make(MEMBER)?;
        member.create(UNFINISHED)?;
        Ok(Staged {
            snap: member.make(SNAP)?,
            wal: match &self.wal {
                Some(wal) => wal.make(STAGING)?,
                None => member.make(WAL)?,
            },
        })
    }

    /// Moves the staged files to their final place. The caller must have synced them, and the WAL directory must be
    /// empty if it is not in the member.
    ///
    /// Returns the path of the previous member if there was one. `done` is called after every step.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`. The previous files are then in their place again; or, if the error
    /// says so, the next restore completes this one.
    pub fn put_in_place(self, done: &mut dyn FnMut(&'static str)) -> Result<Option<PathBuf>> {
        let staging = self.dir.need_own(STAGING)?;
        let member = staging.need_own(MEMBER)?;
        let wal = match &self.wal {
            Some(wal) => wal.need_own(STAGING)?,
            None => member.need_own(WAL)?,
        };
        for dir in [&wal, &member.need_own(SNAP)?, &member] {
            dir.sync()?;
        }
        let has_previous = self.dir.holds_files(MEMBER)?;
        // A mark in it would make a previous member seem a staged one.
        self.dir.remove_in(MEMBER, UNFINISHED)?;
        // Some file systems cannot exchange.
        let is_exchanged = has_previous
            && self.wal.is_none()
            && staging.exchange(MEMBER, &self.dir, MEMBER).is_ok();
        let kept = if is_exchanged {
            done("exchanged the members");
            let kept = self.keep_exchanged(&staging, done);
            Some(kept.map_err(|e| {
                let message = format!("{e}; the new member is in place: the next restore moves the previous one from {} to its name", staging.path().display());
                Error::new(e.reason(), message)
            })?)
        } else {
            self.move_in(&staging, &wal, has_previous, done)?
        };
        self.finish(done)?;
        Ok(kept.map(|name| self.dir.path().join(name)))
    }

    /// Moves the previous member from the staging folder to its name, which is returned.
    fn keep_exchanged(&self, staging: &Dir, done: &mut dyn FnMut(&'static str)) -> Result<String> {
        for dir in [&self.dir, staging] {
            dir.sync()?;
        }
        let kept = self.keep_aside(staging)?;
        self.dir.sync()?;
        done("put the exchanged member aside");
        Ok(kept)
    }

    /// Moves the member in a directory to an unused name in the data directory, which is returned. Another restore
    /// may have used `aside` in the same second.
    fn keep_aside(&self, from: &Dir) -> Result<String> {
        let mut name = format!("{MEMBER}.{}", self.aside);
        let mut n = 1;
        while self.dir.exists(&name)? {
            n += 1;
            name = format!("{MEMBER}.{}-{n}", self.aside);
        }
        from.rename(MEMBER, &self.dir, &name)?;
        Ok(name)
    }

    /// Moves the previous member aside, the staged segment to the WAL directory, and then the staged member to its
    /// place. Returns the name of the previous member. If a step fails, the earlier ones are undone.
    fn move_in(
        &self,
        staging: &Dir,
        staged_wal: &Dir,
        has_previous: bool,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Option<String>> {
        let mut kept = None;
        if has_previous {
            kept = Some(self.keep_aside(&self.dir)?);
            done("put the old member aside");
        } else {
            self.dir.remove_all(MEMBER)?;
        }
        let mut placed = Vec::new();
        let moved = self.place(staging, staged_wal, &mut placed, done);
        if let Err(e) = moved {
            // If this fails too, the first error matters more.
            if let Some(wal) = &self.wal {
                for name in placed {
                    let _ = wal.rename(&name, staged_wal, &name);
                }
            }
            if let Some(kept) = &kept {
                let _ = self.dir.rename(kept, &self.dir, MEMBER);
            }
            return Err(e);
        }
        Ok(kept)
    }

    /// Moves the staged segment and then the staged member to their place. Adds the segment to `placed`.
    fn place(
        &self,
        staging: &Dir,
        staged_wal: &Dir,
        placed: &mut Vec<String>,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<()> {
        if let Some(wal) = &self.wal {
            // Even after a power failure, no old member has the new segment, and no new member lacks it.
            self.dir.sync()?;
            for segment in staged_wal.names()? {
                staged_wal.rename(&segment, wal, &segment)?;
                placed.push(segment);
            }
            wal.sync()?;
            done("put the new segment in place");
        }
        staging.rename(MEMBER, &self.dir, MEMBER)?;
        done("put the new member in place");
        Ok(())
    }

    /// Marks the member as finished, and removes what was staged. Returns whether it was unfinished.
    fn finish(&self, done: &mut dyn FnMut(&'static str)) -> Result<bool> {
        let was_unfinished = self.dir.remove_in(MEMBER, UNFINISHED)?;
        self.dir.sync()?;
        done("finished the member");
        self.clear()?;
        done("removed what was staged");
        Ok(was_unfinished)
    }

    /// Whether a staging folder holds the previous member, after an exchange.
    fn holds_previous(staging: &Dir) -> Result<bool> {
        Ok(staging.holds_files(MEMBER)? && !staging.holds_in(MEMBER, UNFINISHED)?)
    }

    /// Completes or undoes an interrupted restore. `done` is called after every step.
    fn recover(&self, done: &mut dyn FnMut(&'static str)) -> Result<Leftover> {
        if let Some(wal) = &self.wal {
            wal.own(STAGING)?;
        }
        let Some(staging) = self.dir.own(STAGING)? else {
            self.clear()?;
            return Ok(Leftover::None);
        };
        let mut leftover = Leftover::None;
        if Self::holds_previous(&staging)? {
            self.keep_exchanged(&staging, done)?;
            leftover = Leftover::Completed;
        } else if staging.exists(MEMBER)? {
            leftover = Leftover::Undone;
        }
        if self.finish(done)? {
            leftover = Leftover::Completed;
        }
        Ok(leftover)
    }

    /// Removes the staging folders, unless one holds a previous member.
    fn clear(&self) -> Result<()> {
        let staging = self.dir.own(STAGING)?;
        if let Some(staging) = &staging
            && Self::holds_previous(staging)?
        {
            return Ok(());
        }
        // That of the data directory goes last: without it, a restore would seem to be tidied up.
        if let Some(wal) = &self.wal
            && wal.own(STAGING)?.is_some()
        {
            wal.remove_all(STAGING)?;
        }
        if let Some(staging) = staging {
            // The mark goes last: without it, what is left would seem to be a previous member.
            if let Some(member) = staging.own(MEMBER)? {
                member.remove_all(SNAP)?;
                member.remove_all(WAL)?;
            }
            self.dir.remove_all(STAGING)?;
        }
        Ok(())
    }
}

impl Drop for LockedTarget {
    fn drop(&mut self) {
        // If it fails, the next restore removes the staged files.
        let _ = self.clear();
    }
}

#[cfg(test)]
mod tests;
