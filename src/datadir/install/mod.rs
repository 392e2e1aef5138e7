//! Installs a restored member: stages its files in the data directory, then moves them to their final place,
//! completely or not at all, even if the process is killed.
//!
//! If a restore is interrupted, the next one completes or undoes it, by the journal. This module moves files
//! and does not read them. Called by `ops::restore`.
//!
//! ```text
//! DIR/member                            the member that etcd uses
//! DIR/.deltafold-restore/new/member     the staged member
//! DIR/.deltafold-restore/wal-dir        with --wal-dir only: the path of that directory
//! DIR/.deltafold-restore/journal        written before the first move, deleted after the last one
//! DIR/member.bad-<time>                 the previous member, kept aside
//! WAL-DIR/.deltafold-restore            with --wal-dir only: the staged segment
//! WAL-DIR/bad-<time>                    with --wal-dir only: the previous segments, kept aside
//! ```

mod files;

pub use files::sync_directory;

use crate::base::none_if_missing;
use crate::error::{Error, Reason, Result};
use files::{
    DirectoryLock, create_directory, create_file, exchange, holds_files, io_error, lock_directory,
    remove_file_if_exists, rename, resolve_links, segments,
};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The folder of a member in its data directory.
pub const MEMBER: &str = "member";
/// The staging folder, in the data directory and in the directory of `--wal-dir`.
pub const STAGING: &str = ".deltafold-restore";
const NEW: &str = "new";
const JOURNAL: &str = "journal";
/// The file with the path of the WAL directory, by which the next restore finds the segment that is staged
/// there.
const WAL_DIR: &str = "wal-dir";
/// A marker in a member that is in its final place, until the restore is complete.
const MARK: &str = ".deltafold-new";

/// The data directory and the WAL directory of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallTarget {
    dir: PathBuf,
    wal_dir: Option<PathBuf>,
}

/// The content of the journal.
#[derive(Debug, Serialize, Deserialize)]
struct Journal {
    /// The suffix of the names under which the previous files are kept.
    aside: String,
    /// The directory of `--wal-dir`, and the name of the new segment in it.
    wal: Option<(PathBuf, String)>,
}

/// What was done about an earlier restore that was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// No restore was interrupted.
    None,
    /// The new member was in its final place; the restore was completed.
    Completed,
    /// The new member was not in its final place; the restore was undone.
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
        if holds_files(&self.member())? {
            return Ok(true);
        }
        let segments = self.wal_dir.as_deref().map(segments).transpose()?;
        Ok(segments.is_some_and(|s| !s.is_empty()))
    }

    /// Whether an earlier restore was interrupted. Nothing is changed.
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

    /// Locks the directories for this process, and completes or undoes an interrupted restore.
    ///
    /// # Errors
    /// `TargetInUse` if another restore holds a lock; `CorruptDataDir` if the journal is damaged;
    /// `Configuration` if the WAL directory of the interrupted restore is missing; `Io`, `NoSpace`,
    /// `PermissionDenied`.
    pub fn lock(&self) -> Result<LockedTarget> {
        self.lock_with(&mut |_| ())
    }

    /// `done` is called after every step.
    fn lock_with(&self, done: &mut dyn FnMut(&'static str)) -> Result<LockedTarget> {
        let mut created = CreatedDirectories(Vec::new());
        let mut locks = Vec::new();
        for dir in [Some(&self.dir), self.wal_dir.as_ref()]
            .into_iter()
            .flatten()
        {
            let missing = dir.ancestors().take_while(|d| !d.exists());
            created.0.extend(missing.map(Path::to_owned));
            create_directory(dir)?;
            locks.push(lock_directory(dir)?);
        }
        let mut locked = LockedTarget {
            target: self.clone(),
            leftover: Leftover::None,
            _created: created,
            _locks: locks,
        };
        locked.leftover = locked.recover(done)?;
        Ok(locked)
    }

    /// Returns an unused suffix for kept files: `aside`, or that with a number. Another restore may have used
    /// `aside` in the same second.
    fn free_name(&self, aside: &str) -> String {
        let exists = |path: PathBuf| path.symlink_metadata().is_ok();
        let mut name = aside.to_owned();
        let mut n = 1;
        while exists(self.kept_member(&name))
            || self.wal_dir.as_ref().is_some_and(|w| exists(w.join(&name)))
        {
            n += 1;
            name = format!("{aside}-{n}");
        }
        name
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
    target: InstallTarget,
    leftover: Leftover,
    // Fields are dropped in this order: the locks last.
    _created: CreatedDirectories,
    _locks: Vec<DirectoryLock>,
}

impl LockedTarget {
    /// Returns what [`InstallTarget::lock`] did about an interrupted restore.
    pub fn leftover(&self) -> Leftover {
        self.leftover
    }

    /// Creates the staging directories of a new member: one for the database and the `.snap` file, and one
    /// for the WAL.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn stage(&self) -> Result<(PathBuf, PathBuf)> {
        let member = self.target.staged_member();
        let snap = member.join("snap");
        let wal = self.target.staged_wal().unwrap_or(member.join("wal"));
        // Another candidate may have left files.
        self.clear()?;
        create_directory(&snap)?;
        if let Some(w) = &self.target.wal_dir {
            let wal_dir_file = self.target.staging().join(WAL_DIR);
            create_file(&wal_dir_file, w.as_os_str().as_bytes())?;
        }
        create_directory(&wal)?;
        Ok((snap, wal))
    }

    /// Moves the staged files to their final place. The caller must have synced them.
    ///
    /// Previous files are kept under names that end in `aside`, or in `aside` and a number if such names
    /// exist. Returns these names. `done` is called after every step.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`. The previous files are then in their place again.
    pub fn put_in_place(
        self,
        aside: &str,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Vec<PathBuf>> {
        let aside = self.target.free_name(aside);
        let result = self.try_put_in_place(&aside, done);
        if result.is_err() {
            // If this fails too, the first error matters more, and the next restore undoes the rest.
            let _ = self.recover(&mut |_| ());
        }
        result
    }

    fn try_put_in_place(
        &self,
        aside: &str,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Vec<PathBuf>> {
        let target = &self.target;
        let (staging, member) = (target.staging(), target.staged_member());
        create_file(&member.join(MARK), b"")?;
        let wal = target.staged_wal().unwrap_or(member.join("wal"));
        for dir in [&wal, &member.join("snap"), &member, &staging.join(NEW)] {
            sync_directory(dir)?;
        }
        let journal = Journal {
            aside: aside.to_owned(),
            wal: match &target.wal_dir {
                Some(w) => segments(&wal)?.pop().map(|segment| (w.clone(), segment)),
                None => None,
            },
        };
        let text = serde_json::to_vec(&journal)
            .map_err(|e| Error::internal(format!("encode the journal: {e}")))?;
        let temporary = staging.join(format!("{JOURNAL}.tmp"));
        create_file(&temporary, &text)?;
        done("wrote the journal's content");
        rename(&temporary, &staging.join(JOURNAL))?;
        sync_directory(&staging)?;
        sync_directory(&target.dir)?;
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
        let final_member = target.member();
        if !final_member.exists() {
            rename(&member, &final_member)?;
        } else if !exchange(&member, &final_member)? {
            // The file system cannot exchange two directories: for a moment there is no member.
            rename(&final_member, &target.kept_member(aside))?;
            sync_directory(&target.dir)?;
            done("put the old member aside");
            rename(&member, &final_member)?;
        }
        sync_directory(&target.dir)?;
        sync_directory(&staging.join(NEW))?;
        done("put the new member in place");
        kept.extend(self.complete(&journal, done)?);
        Ok(kept)
    }

    /// Completes a restore whose new member is in its final place. Returns the path of the kept previous
    /// member.
    fn complete(
        &self,
        journal: &Journal,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Option<PathBuf>> {
        let target = &self.target;
        let (old, kept) = (target.staged_member(), target.kept_member(&journal.aside));
        // A relative link to the old member may be dangling in the staging folder.
        if old.is_symlink() || holds_files(&old)? {
            rename(&old, &kept)?;
            sync_directory(&target.dir)?;
            done("put the old member aside");
        }
        remove_file_if_exists(&target.staging().join(JOURNAL))?;
        sync_directory(&target.staging())?;
        done("removed the journal");
        self.clear()?;
        done("removed what was staged");
        // The marker is removed last: `recover` uses it to tell a complete restore from one to undo.
        remove_file_if_exists(&target.member().join(MARK))?;
        sync_directory(&target.member())?;
        done("removed the mark");
        Ok(kept.symlink_metadata().is_ok().then_some(kept))
    }

    /// Completes or undoes an interrupted restore. `done` is called after every step.
    fn recover(&self, done: &mut dyn FnMut(&'static str)) -> Result<Leftover> {
        let target = &self.target;
        let path = target.staging().join(JOURNAL);
        let journal = none_if_missing(fs::read(&path)).map_err(io_error("read", &path))?;
        let Some(journal) = journal else {
            let leftover = match (target.member().join(MARK).exists(), target.has_leftover()) {
                (true, _) => Leftover::Completed,
                (false, true) => Leftover::Undone,
                (false, false) => Leftover::None,
            };
            self.clear()?;
            done("removed what was staged");
            remove_file_if_exists(&target.member().join(MARK))?;
            return Ok(leftover);
        };
        let journal: Journal = serde_json::from_slice(&journal).map_err(|e| {
            Reason::CorruptDataDir.error(format!(
                "the journal {} of an interrupted restore is damaged ({e}): save the files that you need from {}, then remove that folder",
                path.display(),
                target.staging().display()
            ))
        })?;
        if target.member().join(MARK).exists() {
            self.complete(&journal, done)?;
            return Ok(Leftover::Completed);
        }
        self.undo(&journal, done)?;
        remove_file_if_exists(&path)?;
        sync_directory(&target.staging())?;
        done("removed the journal");
        self.clear()?;
        Ok(Leftover::Undone)
    }

    /// Moves the files of an interrupted restore back. It can be interrupted and repeated itself.
    fn undo(&self, journal: &Journal, done: &mut dyn FnMut(&'static str)) -> Result<()> {
        let target = &self.target;
        let kept = target.kept_member(&journal.aside);
        if !target.member().exists() && kept.exists() {
            rename(&kept, &target.member())?;
            sync_directory(&target.dir)?;
            done("put the old member back");
        }
        if let Some((w, segment)) = &journal.wal {
            let old = w.join(&journal.aside);
            // If staging does not hold the new segment, the segment of that name in the WAL directory is the
            // new one. It is moved back to staging, so that the undo can be repeated.
            let (staged, placed) = (w.join(STAGING).join(segment), w.join(segment));
            match (staged.exists(), placed.exists()) {
                (true, _) => {}
                (false, true) => rename(&placed, &staged)?,
                (false, false) => {
                    return Err(Reason::Configuration.error(format!(
                        "an interrupted restore had staged a WAL segment in {}, which is missing now: mount that directory; or save the files that you need from it and from {}, then remove {}",
                        w.display(),
                        target.dir.display(),
                        target.staging().display()
                    )));
                }
            }
            done("took the new segment back");
            for name in segments(&old)? {
                rename(&old.join(&name), &w.join(&name))?;
                done("put an old segment back");
            }
            sync_directory(w)?;
            if old.exists() {
                fs::remove_dir(&old).map_err(io_error("remove", &old))?;
            }
            done("removed the folder of the old segments");
        }
        Ok(())
    }

    /// Removes the staging folders, unless there is a journal: then they hold files that are still needed.
    fn clear(&self) -> Result<()> {
        let staging = self.target.staging();
        if staging.join(JOURNAL).exists() {
            return Ok(());
        }
        let wal_dir_file = staging.join(WAL_DIR);
        let recorded_path =
            none_if_missing(fs::read(&wal_dir_file)).map_err(io_error("read", &wal_dir_file))?;
        let recorded_staging =
            recorded_path.map(|path| PathBuf::from(OsString::from_vec(path)).join(STAGING));
        // The folder with the recorded path is removed last.
        for dir in [recorded_staging, self.target.staged_wal(), Some(staging)]
            .into_iter()
            .flatten()
        {
            none_if_missing(fs::remove_dir_all(&dir)).map_err(io_error("remove", &dir))?;
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
