//! Installs a restored member: stages its files in the data directory, then moves them to their final place, even
//! if the process is killed meanwhile.
//!
//! Before the journal is written, nothing but staged files exists: the next restore removes them. From then on
//! only moves are left, and the next restore completes them. This module moves files and does not read them.
//! Called by `ops::restore`.
//!
//! The data directory may belong to another user, often etcd's. So what lies below a staging folder is believed
//! only if that folder is ours, and every step is relative to an open directory, without following links.
//!
//! ```text
//! DIR/member                       the member that etcd uses
//! DIR/.deltafold-restore/member    the staged member
//! DIR/.deltafold-restore/journal   written before the first move, deleted after the last one
//! DIR/member.bad-<time>            the previous member, kept aside
//! WAL-DIR/.deltafold-restore       with --wal-dir only: the staged segment
//! WAL-DIR/bad-<time>               with --wal-dir only: the previous segments, kept aside
//! ```

mod files;

pub use files::{Dir, sync_directory};

use crate::error::{Error, Reason, Result};
use files::{create_directory, holds_files, resolve_links, segments};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of a member in its data directory.
pub const MEMBER: &str = "member";
/// The staging folder, in the data directory and in the directory of `--wal-dir`.
pub const STAGING: &str = ".deltafold-restore";
const JOURNAL: &str = "journal";

/// The data directory and the WAL directory of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallTarget {
    dir: PathBuf,
    wal_dir: Option<PathBuf>,
}

/// The content of the journal.
#[derive(Debug, Serialize, Deserialize)]
struct Journal {
    /// The suffix of the names under which the previous files are kept: `bad-<time>`.
    aside: String,
    /// The directory of `--wal-dir`, and the name of the new segment in it.
    wal: Option<(PathBuf, String)>,
}

impl Journal {
    /// Whether its names have the form in which a restore writes them, so that none leads out of a directory.
    fn is_sound(&self) -> bool {
        let is_of = |text: &str, set: &str| text.chars().all(|c| set.contains(c));
        let aside = self.aside.strip_prefix("bad-");
        let segment = self.wal.as_ref().map(|(_, name)| name.strip_suffix(".wal"));
        aside.is_some_and(|time| is_of(time, "0123456789TZ-"))
            && segment.is_none_or(|name| name.is_some_and(|n| is_of(n, "0123456789abcdef-")))
    }
}

/// What was done about an earlier restore that was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// No restore was interrupted.
    None,
    /// The moves had begun; they were completed.
    Completed,
    /// The moves had not begun; the staged files were removed.
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
                "--wal-dir {} is in a directory that the restore replaces as a whole: omit the flag, or name a directory outside of {}",
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

    /// Whether the target holds a member or any file of one.
    ///
    /// # Errors
    /// `Io`, `PermissionDenied`.
    pub fn is_taken(&self) -> Result<bool> {
        let open = |dir: &Path| Dir::open_if_exists(dir);
        if let Some(dir) = open(&self.dir)?
            && holds_files(&dir, MEMBER)?
        {
            return Ok(true);
        }
        let wal = self.wal_dir.as_deref().map(open).transpose()?.flatten();
        let segments = wal.as_ref().map(segments).transpose()?;
        Ok(segments.is_some_and(|s| !s.is_empty()))
    }

    /// Whether an earlier restore was interrupted. Nothing is changed.
    pub fn has_leftover(&self) -> bool {
        self.staging().symlink_metadata().is_ok()
    }

    fn staging(&self) -> PathBuf {
        self.dir.join(STAGING)
    }

    /// Locks the directories for this process, and completes or undoes an interrupted restore.
    ///
    /// # Errors
    /// `TargetInUse` if another restore holds a lock; `PermissionDenied` if a staging folder belongs to another
    /// user; `CorruptDataDir` if the journal is damaged; `Configuration` if the WAL directory of the interrupted
    /// restore is missing or another one; `Io`, `NoSpace`.
    pub fn lock(&self) -> Result<LockedTarget> {
        self.lock_with(&mut |_| ())
    }

    /// `done` is called after every step.
    fn lock_with(&self, done: &mut dyn FnMut(&'static str)) -> Result<LockedTarget> {
        let mut created = CreatedDirectories(Vec::new());
        let mut open = |path: &PathBuf| {
            let missing = path.ancestors().take_while(|d| !d.exists());
            created.0.extend(missing.map(Path::to_owned));
            create_directory(path)?;
            Dir::lock(path)
        };
        let dir = open(&self.dir)?;
        let wal = self.wal_dir.as_ref().map(open).transpose()?;
        let mut locked = LockedTarget {
            leftover: Leftover::None,
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
        Ok(Staged {
            snap: member.make("snap")?,
            wal: match &self.wal {
                Some(wal) => wal.make(STAGING)?,
                None => member.make("wal")?,
            },
        })
    }

    /// Moves the staged files to their final place. The caller must have synced them.
    ///
    /// Previous files are kept under names that end in `aside` (`bad-<time>`), or in `aside` and a number if
    /// such names exist. Returns their paths. `done` is called after every step.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`. The previous files are then in their place again; or, if the error
    /// says so, the next restore completes this one.
    pub fn put_in_place(
        self,
        aside: &str,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Vec<PathBuf>> {
        let staging = self.dir.need_own(STAGING)?;
        let member = staging.need_own(MEMBER)?;
        let wal = match &self.wal {
            Some(wal) => wal.need_own(STAGING)?,
            None => member.need_own("wal")?,
        };
        for dir in [&wal, &member.need_own("snap")?, &member] {
            dir.sync()?;
        }
        let segment = match &self.wal {
            Some(dir) => segments(&wal)?.pop().map(|name| (dir.path().into(), name)),
            None => None,
        };
        let journal = Journal {
            aside: self.free_name(aside)?,
            wal: segment,
        };
        let text = serde_json::to_vec(&journal)
            .map_err(|e| Error::internal(format!("encode the journal: {e}")))?;
        staging.create("journal.tmp", &text)?;
        done("wrote the journal's content");
        staging.rename("journal.tmp", &staging, JOURNAL)?;
        staging.sync()?;
        self.dir.sync()?;
        done("wrote the journal");
        match self.finish(&staging, &journal, done) {
            Err(e) if staging.exists(MEMBER)? => {
                // If this fails too, the first error matters more, and the next restore completes the moves.
                let _ = self.give_up(&staging, &journal);
                Err(e)
            }
            Err(e) => Err(Error::new(
                e.reason(),
                format!(
                    "{e}; the new member is in place, its WAL is not: the next restore into these directories completes it"
                ),
            )),
            Ok(kept) => Ok(kept),
        }
    }

    /// Returns an unused suffix for kept files: `aside`, or that with a number. Another restore may have used
    /// `aside` in the same second.
    fn free_name(&self, aside: &str) -> Result<String> {
        let mut name = aside.to_owned();
        let mut n = 1;
        loop {
            let in_wal_dir = self.wal.as_ref().map(|w| w.exists(&name)).transpose()?;
            if !self.dir.exists(&kept_member(&name))? && in_wal_dir != Some(true) {
                return Ok(name);
            }
            n += 1;
            name = format!("{aside}-{n}");
        }
    }

    /// Makes the moves of a journal that are not made yet, and removes what was staged. It can be interrupted
    /// and repeated. Returns the paths of the kept files.
    fn finish(
        &self,
        staging: &Dir,
        journal: &Journal,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Vec<PathBuf>> {
        let dir = &self.dir;
        let wal = self.staged_wal(staging, journal)?;
        let mut kept = Vec::new();
        let kept_member = kept_member(&journal.aside);
        if staging.exists(MEMBER)? {
            if holds_files(dir, MEMBER)? {
                dir.rename(MEMBER, dir, &kept_member)?;
                done("put the old member aside");
            } else {
                dir.remove_all(MEMBER)?;
            }
            staging.rename(MEMBER, dir, MEMBER)?;
            dir.sync()?;
            staging.sync()?;
            done("put the new member in place");
        }
        if let Some((wal, staged, segment)) = &wal {
            if let Some(staged) = staged {
                let old = segments(wal)?;
                if !old.is_empty() {
                    let aside = wal.make(&journal.aside)?;
                    for name in &old {
                        done("next old segment");
                        wal.rename(name, &aside, name)?;
                    }
                    aside.sync()?;
                }
                done("put the old segments aside");
                staged.rename(segment, wal, segment)?;
                wal.sync()?;
                done("put the new segment in place");
            }
            if wal.exists(&journal.aside)? {
                kept.push(wal.path().join(&journal.aside));
            }
        }
        if dir.exists(&kept_member)? {
            kept.push(dir.path().join(kept_member));
        }
        staging.remove(JOURNAL)?;
        staging.sync()?;
        done("removed the journal");
        self.clear()?;
        done("removed what was staged");
        Ok(kept)
    }

    /// Returns the WAL directory of a journal that has one, its staging folder if that still holds the new
    /// segment, and the name of that segment.
    fn staged_wal<'s>(
        &'s self,
        staging: &Dir,
        journal: &'s Journal,
    ) -> Result<Option<(&'s Dir, Option<Dir>, &'s str)>> {
        let Some((path, segment)) = &journal.wal else {
            return Ok(None);
        };
        let refused = |what: &str, todo: &str| {
            Reason::Configuration.error(format!(
                "an interrupted restore used --wal-dir {}{what}: {todo}; or save the files that you need from it and from {}, then remove {}",
                path.display(),
                self.dir.path().display(),
                staging.path().display()
            ))
        };
        let Some(wal) = self.wal.as_ref().filter(|wal| wal.path() == path) else {
            return Err(refused("", "run restore with that flag"));
        };
        let staged = match wal.own(STAGING)? {
            Some(staged) if staged.exists(segment)? => Some(staged),
            _ => None,
        };
        // The segment is put in place after the member.
        let is_placed = !staging.exists(MEMBER)? && wal.exists(segment)?;
        match staged.is_some() || is_placed {
            true => Ok(Some((wal, staged, segment))),
            false => Err(refused(
                ", and its segment is missing now",
                "mount that directory",
            )),
        }
    }

    /// Puts the old member back, after a failure before the new one was in place.
    fn give_up(&self, staging: &Dir, journal: &Journal) -> Result<()> {
        let kept = kept_member(&journal.aside);
        if !self.dir.exists(MEMBER)? && self.dir.exists(&kept)? {
            self.dir.rename(&kept, &self.dir, MEMBER)?;
            self.dir.sync()?;
        }
        staging.remove(JOURNAL)
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
        let Some(text) = staging.read(JOURNAL)? else {
            // Without a member the last restore was killed at its very begin or end.
            let leftover = match staging.exists(MEMBER)? {
                true => Leftover::Undone,
                false => Leftover::None,
            };
            self.clear()?;
            done("removed what was staged");
            return Ok(leftover);
        };
        let journal: Option<Journal> = serde_json::from_slice(&text).ok();
        let journal = journal.filter(Journal::is_sound).ok_or_else(|| {
            Reason::CorruptDataDir.error(format!(
                "the journal of an interrupted restore is damaged: save the files that you need from {}, then remove that folder",
                staging.path().display()
            ))
        })?;
        self.finish(&staging, &journal, done)?;
        Ok(Leftover::Completed)
    }

    /// Removes the staging folders, unless there is a journal: then they hold files that are still needed.
    fn clear(&self) -> Result<()> {
        if let Some(staging) = self.dir.own(STAGING)?
            && staging.exists(JOURNAL)?
        {
            return Ok(());
        }
        for dir in self.wal.iter().chain([&self.dir]) {
            if dir.own(STAGING)?.is_some() {
                dir.remove_all(STAGING)?;
            }
        }
        Ok(())
    }
}

fn kept_member(aside: &str) -> String {
    format!("{MEMBER}.{aside}")
}

impl Drop for LockedTarget {
    fn drop(&mut self) {
        // If it fails, the next restore removes the staged files.
        let _ = self.clear();
    }
}

#[cfg(test)]
mod tests;
