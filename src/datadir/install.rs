//! Stages a member beside where it shall be, and puts it in place: all of it or nothing, whenever the
//! process is killed.
//!
//! It moves files and does not know what is in them. `ops::restore` calls it.
//!
//! ```text
//! DIR/member                            the member that etcd sees
//! DIR/.deltafold-restore/new/member     the one that is being written
//! DIR/.deltafold-restore/wal-dir        only with a WAL directory of its own: where that is
//! DIR/.deltafold-restore/journal        written before anything is moved, deleted when all is
//! DIR/member.bad-<time>                 what was there before, kept aside
//! WAL-DIR/.deltafold-restore            only with a WAL directory of its own: the new segment
//! WAL-DIR/bad-<time>                    the segments that were there before
//! ```

use crate::base::none_if_missing;
use crate::error::{Error, Reason, Result};
use rustix::fs::{CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The folder of a member in its data directory.
pub const MEMBER: &str = "member";
/// Staging, in the data directory and in a WAL directory of its own.
pub const STAGING: &str = ".deltafold-restore";
const NEW: &str = "new";
const JOURNAL: &str = "journal";
/// Holds the path of the WAL directory, so that the next run finds what is staged there.
const WAL_DIR: &str = "wal-dir";
/// In a member that was put in place and whose restore is not quite over.
const MARK: &str = ".deltafold-new";
/// As etcd creates its directories.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
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
        let (real_dir, real_member) = (real(&dir), real(&member));
        let wal_dir =
            wal_dir.filter(|w| *w != member.join("wal") && real(w) != real_member.join("wal"));
        // Both as it is written and as links lead: what is put in place takes the one with it, and the
        // other is where the files are.
        let is_moved = |w: &Path| {
            let lies_in = |dir: &Path, member: &Path| {
                w.starts_with(member) || w.starts_with(dir.join(STAGING)) || w == dir
            };
            lies_in(&dir, &member) || lies_in(&real_dir, &real_member)
        };
        if let Some(w) = &wal_dir
            && (is_moved(w) || is_moved(&real(w)))
        {
            return Err(Reason::Usage.error(format!(
                "--wal-dir {} lies in what is put in place as a whole: leave it out, or name a directory outside of {}",
                w.display(),
                member.display()
            )));
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
        let segments = self.wal_dir.as_deref().map(segments).transpose()?;
        Ok(segments.is_some_and(|s| !s.is_empty()))
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

    /// Takes the directories for this process, and completes or undoes what an earlier run has left.
    ///
    /// # Errors
    /// `TargetInUse` where another restore is at it; `Io`, `NoSpace`, `PermissionDenied`.
    pub fn occupy(&self) -> Result<Occupied> {
        self.occupy_with(&mut |_| ())
    }

    /// `done` hears of every step.
    fn occupy_with(&self, done: &mut dyn FnMut(&'static str)) -> Result<Occupied> {
        let mut created = Created(Vec::new());
        let mut locks = Vec::new();
        for dir in [Some(&self.dir), self.wal_dir.as_ref()]
            .into_iter()
            .flatten()
        {
            let missing = dir.ancestors().take_while(|d| !d.exists());
            created.0.extend(missing.map(Path::to_owned));
            create_directory(dir)?;
            locks.push(lock(dir)?);
        }
        let mut occupied = Occupied {
            place: self.clone(),
            leftover: Leftover::None,
            _created: created,
            _locks: locks,
        };
        occupied.leftover = occupied.settle(done)?;
        Ok(occupied)
    }

    /// A name for what is kept that nothing has yet: an earlier restore may have been in the same second.
    fn free_name(&self, aside: &str) -> String {
        let is_there = |path: PathBuf| path.symlink_metadata().is_ok();
        let mut name = aside.to_owned();
        let mut n = 1;
        while is_there(self.kept_member(&name))
            || self
                .wal_dir
                .as_ref()
                .is_some_and(|w| is_there(w.join(&name)))
        {
            n += 1;
            name = format!("{aside}-{n}");
        }
        name
    }
}

fn lock(dir: &Path) -> Result<File> {
    let file = File::open(dir).map_err(failed("open", dir))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            Err(Reason::TargetInUse
                .error(format!("another restore into {} is running", dir.display())))
        }
        // Some network file systems lock no directories: what is lost there is only this check.
        Err(_) | Ok(()) => Ok(file),
    }
}

/// Directories that were made; those that are empty in the end go again.
#[derive(Debug)]
struct Created(Vec<PathBuf>);

impl Drop for Created {
    fn drop(&mut self) {
        self.0.sort_by_key(|dir| Reverse(dir.components().count()));
        for dir in &self.0 {
            // Those that are not empty stay, as they should.
            let _ = fs::remove_dir(dir);
        }
    }
}

/// A place that this process has to itself. Dropping it removes what is staged.
#[derive(Debug)]
pub struct Occupied {
    place: Place,
    leftover: Leftover,
    // In this order they are dropped.
    _created: Created,
    _locks: Vec<File>,
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
        self.clear()?;
        create_directory(&snap)?;
        if let Some(w) = &self.place.wal_dir {
            let note = self.place.staging().join(WAL_DIR);
            create_file(&note, w.as_os_str().as_bytes())?;
        }
        create_directory(&wal)?;
        Ok((snap, wal))
    }

    /// Puts what was staged in place of what is there, which is kept aside under names that end in
    /// `aside`, or in that and a number where there are such names; `done` hears of every step. Gives the
    /// names of what was kept. All files must have been synced.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`: what was there before is there then.
    pub fn put_in_place(
        self,
        aside: &str,
        done: &mut dyn FnMut(&'static str),
    ) -> Result<Vec<PathBuf>> {
        let aside = self.place.free_name(aside);
        let placed = self.try_put_in_place(&aside, done);
        if placed.is_err() {
            // The first error tells more. What cannot be undone now, the next run undoes.
            let _ = self.settle(&mut |_| ());
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
        // A link may lead nowhere from here, and to the old member from where it was.
        if old.is_symlink() || holds_files(&old)? {
            rename(&old, &kept)?;
            sync_directory(&place.dir)?;
            done("put the old member aside");
        }
        remove_file_if_there(&place.staging().join(JOURNAL))?;
        sync_directory(&place.staging())?;
        done("removed the journal");
        self.clear()?;
        done("removed what was staged");
        // Last, so that it tells a restore that was completed from one that was undone.
        remove_file_if_there(&place.member().join(MARK))?;
        sync_directory(&place.member())?;
        done("removed the mark");
        Ok(kept.symlink_metadata().is_ok().then_some(kept))
    }

    /// Completes or undoes what an interrupted run has left; `done` hears of every step.
    fn settle(&self, done: &mut dyn FnMut(&'static str)) -> Result<Leftover> {
        let place = &self.place;
        let path = place.staging().join(JOURNAL);
        let journal = none_if_missing(fs::read(&path)).map_err(failed("read", &path))?;
        let Some(journal) = journal else {
            let leftover = match (place.member().join(MARK).exists(), place.has_leftover()) {
                (true, _) => Leftover::Completed,
                (false, true) => Leftover::Undone,
                (false, false) => Leftover::None,
            };
            self.clear()?;
            done("removed what was staged");
            remove_file_if_there(&place.member().join(MARK))?;
            return Ok(leftover);
        };
        let journal: Journal = serde_json::from_slice(&journal).map_err(|e| {
            Reason::CorruptDataDir.error(format!(
                "{} is no journal of a restore ({e}): look what is in {}, and remove it",
                path.display(),
                place.staging().display()
            ))
        })?;
        if place.member().join(MARK).exists() {
            self.complete(&journal, done)?;
            return Ok(Leftover::Completed);
        }
        let kept = place.kept_member(&journal.aside);
        if !place.member().exists() && kept.exists() {
            rename(&kept, &place.member())?;
            sync_directory(&place.dir)?;
            done("put the old member back");
        }
        if let Some((w, segment)) = &journal.wal {
            let old = w.join(&journal.aside);
            // Once it has left staging, the segment of this name is the new one. It goes back there, so
            // that an undoing that is interrupted can be done again.
            let (staged, placed) = (w.join(STAGING).join(segment), w.join(segment));
            match (staged.exists(), placed.exists()) {
                (true, _) => {}
                (false, true) => rename(&placed, &staged)?,
                (false, false) => {
                    return Err(Reason::Configuration.error(format!(
                        "an interrupted restore had staged a WAL segment in {}, which is not there now: mount that directory; or look what is in it and in {}, and remove {}",
                        w.display(),
                        place.dir.display(),
                        place.staging().display()
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
                fs::remove_dir(&old).map_err(failed("remove", &old))?;
            }
            done("removed the folder of the old segments");
        }
        remove_file_if_there(&path)?;
        sync_directory(&place.staging())?;
        done("removed the journal");
        self.clear()?;
        Ok(Leftover::Undone)
    }

    /// Removes staging, unless its journal is there: then it holds what must not be lost.
    fn clear(&self) -> Result<()> {
        let staging = self.place.staging();
        if staging.join(JOURNAL).exists() {
            return Ok(());
        }
        let note = staging.join(WAL_DIR);
        let noted = none_if_missing(fs::read(&note)).map_err(failed("read", &note))?;
        let noted = noted.map(|path| PathBuf::from(OsString::from_vec(path)).join(STAGING));
        // The one with the note goes last.
        for dir in [noted, self.place.staged_wal(), Some(staging)]
            .into_iter()
            .flatten()
        {
            none_if_missing(fs::remove_dir_all(&dir)).map_err(failed("remove", &dir))?;
        }
        Ok(())
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        // The next run removes what stays.
        let _ = self.clear();
    }
}

fn failed<'p>(what: &'p str, path: &'p Path) -> impl Fn(io::Error) -> Error + 'p {
    move |e| match e.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::BUSY | Errno::XDEV) => Reason::Configuration.error(format!(
            "{what} {}: {e}; the data directory may be a mount point, what is in it may not",
            path.display()
        )),
        _ => Error::io(format!("{what} {}", path.display()), e),
    }
}

/// Where links lead, as far as a path is there.
fn real(path: &Path) -> PathBuf {
    let found = path.ancestors().find_map(|above| {
        let rest = path.strip_prefix(above).ok()?;
        Some(above.canonicalize().ok()?.join(rest))
    });
    found.unwrap_or_else(|| path.to_owned())
}

/// Makes a directory and those above it, as etcd does.
fn create_directory(dir: &Path) -> Result<()> {
    let mut builder = DirBuilder::new();
    let builder = builder.recursive(true).mode(DIRECTORY_MODE);
    builder.create(dir).map_err(failed("create", dir))
}

fn create_file(path: &Path, content: &[u8]) -> Result<()> {
    let write = || {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        let mut file = options.mode(FILE_MODE).open(path)?;
        file.write_all(content)?;
        file.sync_all()
    };
    write().map_err(failed("write", path))
}

fn remove_file_if_there(path: &Path) -> Result<()> {
    use io::ErrorKind::{NotADirectory, NotFound};
    match fs::remove_file(path) {
        Err(e) if !matches!(e.kind(), NotFound | NotADirectory) => Err(failed("remove", path)(e)),
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
        // Something else than a directory is there.
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Ok(true),
        entries => none_if_missing(entries).map_err(failed("look into", dir))?,
    };
    for entry in entries.into_iter().flatten() {
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
    let entries = none_if_missing(fs::read_dir(dir)).map_err(failed("look into", dir))?;
    let mut names = Vec::new();
    for entry in entries.into_iter().flatten() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    const ASIDE: &str = "bad-x";
    const SEGMENT_0: &str = "0000000000000000-0000000000000000.wal";

    /// All below a folder: the bytes of files; `None` for a folder.
    type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

    fn tree(root: &Path) -> Tree {
        let mut all = Tree::new();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let content = (!path.is_dir()).then(|| fs::read(&path).unwrap());
                let below = path.strip_prefix(root).unwrap().to_owned();
                if content.is_none() {
                    folders.push(path);
                }
                all.insert(below, content);
            }
        }
        all
    }

    fn lay_out(root: &Path, tree: &Tree) {
        for entry in fs::read_dir(root).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => fs::remove_dir_all(path).unwrap(),
                false => fs::remove_file(path).unwrap(),
            }
        }
        for (path, content) in tree {
            match content {
                None => fs::create_dir_all(root.join(path)).unwrap(),
                Some(content) => {
                    fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
                    fs::write(root.join(path), content).unwrap();
                }
            }
        }
    }

    fn files(tree: &Tree) -> Tree {
        let files = tree.iter().filter(|(_, content)| content.is_some());
        files.map(|(p, c)| (p.clone(), c.clone())).collect()
    }

    fn folders(tree: &Tree) -> BTreeSet<PathBuf> {
        let folders = tree.iter().filter(|(_, content)| content.is_none());
        folders.map(|(p, _)| p.clone()).collect()
    }

    /// What is there before a restore: files, and folders where a name ends in `/`.
    struct Case {
        name: &'static str,
        wal_dir: bool,
        there: &'static [&'static str],
    }

    const CASES: [Case; 9] = [
        Case {
            name: "nothing",
            wal_dir: false,
            there: &[],
        },
        Case {
            name: "an empty mount point",
            wal_dir: false,
            there: &["data/lost+found/", "data/.snapshot"],
        },
        Case {
            name: "empty folders of a member",
            wal_dir: false,
            there: &["data/member/snap/", "data/member/wal/"],
        },
        Case {
            name: "a member, and what an earlier restore kept",
            wal_dir: false,
            there: &[
                "data/lost+found/",
                "data/notes.txt",
                "data/member.bad-x/snap/db",
                "data/member/snap/db",
                "data/member/snap/0000000000000001-0000000000000001.snap",
                "data/member/wal/0000000000000000-0000000000000000.wal",
                "data/member/wal/0.tmp",
            ],
        },
        Case {
            name: "nothing, with a WAL directory",
            wal_dir: true,
            there: &[],
        },
        Case {
            name: "a member without a WAL, with a WAL directory",
            wal_dir: true,
            there: &["data/member/snap/db", "wal/lost+found/", "wal/notes.txt"],
        },
        Case {
            name: "a member and several segments, one of them with the new one's name",
            wal_dir: true,
            there: &[
                "data/member/snap/db",
                "data/notes.txt",
                "wal/0000000000000000-0000000000000000.wal",
                "wal/0000000000000001-0000000000000009.wal",
                "wal/0000000000000002-0000000000000023.wal",
                "wal/0.tmp",
                "wal/lost+found/",
            ],
        },
        Case {
            name: "segments, and none of the new one's name",
            wal_dir: true,
            there: &[
                "data/",
                "wal/0000000000000005-0000000000000009.wal",
                "wal/0000000000000006-0000000000000023.wal",
            ],
        },
        Case {
            name: "a member and segments, and what an earlier restore kept in both places",
            wal_dir: true,
            there: &[
                "data/member/snap/db",
                "data/member.bad-x-2/snap/db",
                "wal/bad-x/0000000000000000-0000000000000000.wal",
                "wal/0000000000000000-0000000000000000.wal",
            ],
        },
    ];

    struct Bench {
        root: tempfile::TempDir,
        place: Place,
        old: Tree,
        /// The files once the restore is done.
        new: Tree,
    }

    impl Bench {
        fn new(case: &Case) -> Self {
            let root = tempfile::tempdir().unwrap();
            let there = case.there.iter().map(|name| match name.strip_suffix('/') {
                Some(folder) => (PathBuf::from(folder), None),
                None => (
                    PathBuf::from(name),
                    Some(format!("old {name}").into_bytes()),
                ),
            });
            lay_out(root.path(), &there.collect());
            let old = tree(root.path());
            let wal_dir = case.wal_dir.then(|| root.path().join("wal"));
            let place = Place::new(&root.path().join("data"), wal_dir.as_deref()).unwrap();
            let aside = place.free_name(ASIDE);
            // By names alone, so that the code is not judged by itself.
            let moved = |path: &PathBuf| {
                let text = path.to_str().unwrap();
                let segment = text.strip_prefix("wal/").filter(|s| s.ends_with(".wal"));
                if let Some(rest) = text.strip_prefix("data/member/") {
                    PathBuf::from(format!("data/member.{aside}/{rest}"))
                } else if let Some(segment) = segment.filter(|s| !s.contains('/')) {
                    PathBuf::from(format!("wal/{aside}/{segment}"))
                } else {
                    path.clone()
                }
            };
            let kept = files(&old);
            let mut new: Tree = kept.iter().map(|(p, c)| (moved(p), c.clone())).collect();
            assert_eq!(new.len(), kept.len());
            for (path, content) in new_files(case.wal_dir) {
                assert!(new.insert(path.into(), Some(content.into())).is_none());
            }
            Bench {
                root,
                place,
                old,
                new,
            }
        }

        fn stage(&self) -> Occupied {
            let occupied = self.place.occupy().unwrap();
            let (snap, wal) = occupied.stage().unwrap();
            fs::write(snap.join("db"), "new db").unwrap();
            fs::write(snap.join("1.snap"), "new snap").unwrap();
            fs::write(wal.join(SEGMENT_0), "new segment").unwrap();
            occupied
        }

        fn now(&self) -> Tree {
            tree(self.root.path())
        }

        /// Puts the new member in place; what a kill after each step would leave.
        fn kills(&self) -> Vec<(&'static str, Tree)> {
            let occupied = self.stage();
            let mut kills = vec![("staged", self.now())];
            let mut done = |step| kills.push((step, self.now()));
            occupied.put_in_place(ASIDE, &mut done).unwrap();
            assert_eq!(files(&self.now()), self.new);
            kills
        }

        /// Runs again where a killed run has left this; whether the new state came of it.
        fn recovers(&self, place: &Place, left: &Tree, what: &str) -> bool {
            lay_out(self.root.path(), left);
            let occupied = place.occupy().unwrap_or_else(|e| panic!("{what}: {e}"));
            let leftover = occupied.leftover();
            drop(occupied);
            let found = self.now();
            let is_new = files(&found) == self.new;
            let is_old = files(&found) == files(&self.old);
            assert!(is_new || is_old, "{what}: a mix: {:?}", found.keys());
            assert!(
                is_new == (leftover == Leftover::Completed) || leftover == Leftover::None,
                "{what}: {leftover:?}"
            );
            let debris = |p: &&PathBuf| p.to_string_lossy().contains(".deltafold");
            assert_eq!(found.keys().find(debris), None, "{what}");
            if is_old {
                let (before, now) = (folders(&self.old), folders(&found));
                assert!(now.is_superset(&before), "{what}: {now:?}");
                let more: Vec<_> = now.difference(&before).collect();
                let roots = [Path::new("data"), Path::new("wal")];
                // The killed run may have made them, and this one does not know that.
                assert!(
                    more.iter().all(|p| roots.contains(&p.as_path())),
                    "{more:?}"
                );
            }
            let again = place.occupy().unwrap();
            assert_eq!(again.leftover(), Leftover::None, "{what}");
            drop(again);
            assert_eq!(self.now(), found, "{what}: a second time changed it");
            is_new
        }
    }

    fn new_files(wal_dir: bool) -> [(String, &'static str); 3] {
        let wal = if wal_dir { "wal" } else { "data/member/wal" };
        [
            ("data/member/snap/db".to_owned(), "new db"),
            ("data/member/snap/1.snap".to_owned(), "new snap"),
            (format!("{wal}/{SEGMENT_0}"), "new segment"),
        ]
    }

    #[test]
    fn a_kill_after_any_step_leaves_what_the_next_run_completes_or_undoes() {
        for case in &CASES {
            let bench = Bench::new(case);
            let mut became_new = Vec::new();
            for (step, left) in bench.kills() {
                let what = format!("{}, killed after: {step}", case.name);
                became_new.push(bench.recovers(&bench.place, &left, &what));
            }
            // Up to some step it is the old state, from then on the new one.
            assert!(became_new.is_sorted(), "{}: {became_new:?}", case.name);
            assert!(became_new.contains(&false), "{}", case.name);
            assert!(became_new.contains(&true), "{}", case.name);
        }
    }

    #[test]
    fn a_kill_while_the_next_run_completes_or_undoes_is_no_worse() {
        for case in &CASES {
            let bench = Bench::new(case);
            for (step, left) in bench.kills() {
                let what = format!("{}, killed after: {step}", case.name);
                let is_new = bench.recovers(&bench.place, &left, &what);
                lay_out(bench.root.path(), &left);
                let mut kills = Vec::new();
                let mut done = |step| kills.push((step, bench.now()));
                drop(bench.place.occupy_with(&mut done).unwrap());
                assert!(!kills.is_empty(), "{what}");
                for (step, left) in kills {
                    let what = format!("{what}, again after: {step}");
                    assert_eq!(bench.recovers(&bench.place, &left, &what), is_new, "{what}");
                }
            }
        }
    }

    /// For a moment there is no member then; the renames are done by hand here, since file systems that
    /// cannot exchange are rare.
    #[test]
    fn a_kill_where_the_file_system_cannot_exchange() {
        for case in CASES
            .iter()
            .filter(|c| c.there.contains(&"data/member/snap/db"))
        {
            let bench = Bench::new(case);
            let kills = bench.kills();
            // The last step before the exchange.
            let at = kills
                .iter()
                .position(|k| k.0 == "put the new member in place");
            let (_, before) = &kills[at.unwrap() - 1];
            lay_out(bench.root.path(), before);
            let kept = bench.place.kept_member(&{
                let journal = fs::read(bench.place.staging().join(JOURNAL)).unwrap();
                serde_json::from_slice::<Journal>(&journal).unwrap().aside
            });
            rename(&bench.place.member(), &kept).unwrap();
            let left = bench.now();
            let what = format!("{}, no member", case.name);
            assert!(!bench.recovers(&bench.place, &left, &what));
            lay_out(bench.root.path(), &left);
            let mut undoing = Vec::new();
            let mut done = |step| undoing.push((step, bench.now()));
            drop(bench.place.occupy_with(&mut done).unwrap());
            assert_eq!(undoing[0].0, "put the old member back");
            for (step, left) in undoing {
                let what = format!("{what}, again after: {step}");
                assert!(!bench.recovers(&bench.place, &left, &what));
            }
            lay_out(bench.root.path(), &left);
            rename(&bench.place.staged_member(), &bench.place.member()).unwrap();
            let left = bench.now();
            assert!(bench.recovers(&bench.place, &left, case.name));
        }
    }

    #[test]
    fn what_was_begun_with_another_wal_directory_is_settled_there() {
        for case in CASES.iter().filter(|c| c.wal_dir) {
            let bench = Bench::new(case);
            let dir = bench.place.dir().to_owned();
            let elsewhere = bench.root.path().join("data/other-wal");
            for (step, left) in bench.kills() {
                for other in [None, Some(elsewhere.as_path())] {
                    let place = Place::new(&dir, other).unwrap();
                    let what = format!("{}, killed after: {step}, then {other:?}", case.name);
                    bench.recovers(&place, &left, &what);
                }
            }
        }
    }

    #[test]
    fn a_wal_directory_that_is_gone_is_not_taken_for_undone() {
        let bench = Bench::new(&CASES[6]);
        let kills = bench.kills();
        let half = kills.iter().find(|k| k.0 == "put the new segment in place");
        lay_out(bench.root.path(), &half.unwrap().1);
        let wal = bench.root.path().join("wal");
        let unmounted = bench.root.path().join("unmounted");
        fs::rename(&wal, &unmounted).unwrap();
        fs::create_dir(&wal).unwrap();
        for place in [
            bench.place.clone(),
            Place::new(bench.place.dir(), None).unwrap(),
        ] {
            let e = place.occupy().unwrap_err();
            assert_eq!(e.reason(), Reason::Configuration, "{e}");
            assert!(e.to_string().contains("mount"), "{e}");
        }
        fs::remove_dir(&wal).unwrap();
        fs::rename(&unmounted, &wal).unwrap();
        let left = bench.now();
        assert!(!bench.recovers(&bench.place, &left, "mounted again"));
    }

    #[test]
    fn a_run_that_fails_or_gives_up_leaves_nothing() {
        for case in &CASES {
            let bench = Bench::new(case);
            drop(bench.stage());
            assert_eq!(bench.now(), bench.old, "{}", case.name);
            // Something has taken the new member's place in staging: the last rename fails.
            let occupied = bench.stage();
            fs::remove_dir_all(bench.place.staged_member().join("snap")).unwrap();
            occupied.put_in_place(ASIDE, &mut |_| ()).unwrap_err();
            assert_eq!(bench.now(), bench.old, "{}", case.name);
        }
        // A step in the middle fails, after the old segments were moved.
        let bench = Bench::new(&CASES[6]);
        let occupied = bench.stage();
        let staged = bench.place.staged_member();
        let hidden = bench.root.path().join("hidden");
        let mut done = |step: &'static str| {
            if step == "put the new segment in place" {
                fs::rename(&staged, &hidden).unwrap();
            }
        };
        let e = occupied.put_in_place(ASIDE, &mut done).unwrap_err();
        assert_eq!(e.reason(), Reason::Io, "{e}");
        fs::remove_dir_all(&hidden).unwrap();
        assert_eq!(bench.now(), bench.old);
    }

    #[test]
    fn two_at_once_do_not_meet() {
        let bench = Bench::new(&CASES[6]);
        let occupied = bench.stage();
        let staged = bench.now();
        // The same directory, and another one that shares the WAL directory.
        let wal = bench.root.path().join("wal");
        for (dir, wal_dir) in [
            ("data", None),
            ("data", Some(wal.as_path())),
            ("other/one", Some(&wal)),
        ] {
            let place = Place::new(&bench.root.path().join(dir), wal_dir).unwrap();
            let e = place.occupy().unwrap_err();
            assert_eq!(e.reason(), Reason::TargetInUse, "{dir}: {e}");
            assert_eq!(bench.now(), staged, "{dir}");
        }
        occupied.put_in_place(ASIDE, &mut |_| ()).unwrap();
        assert_eq!(files(&bench.now()), bench.new);
    }

    #[test]
    fn a_wal_directory_within_what_is_moved_is_refused_however_it_is_written() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("data/member/wal")).unwrap();
        fs::create_dir_all(at("disk")).unwrap();
        std::os::unix::fs::symlink(at("data/member"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("data"), at("data-link")).unwrap();
        let place = |wal: &str| Place::new(&at("data"), Some(&at(wal)));
        for own in ["data/member/wal", "data/../data/member/wal", "link/wal"] {
            assert_eq!(place(own).unwrap().own_wal_dir(), None, "{own}");
        }
        for refused in [
            "data",
            "data/member",
            "data/member/other",
            "data/.deltafold-restore/x",
            "data-link",
            "link/other",
            "data/../data/member/snap/wal",
        ] {
            let e = place(refused).unwrap_err();
            assert_eq!(e.reason(), Reason::Usage, "{refused}");
        }
        for other in ["disk", "disk/new/wal", "data/wal"] {
            let place = place(other).unwrap();
            assert_eq!(place.own_wal_dir(), Some(at(other).as_path()), "{other}");
        }
        // Where etcd's own place for it is a link, the directory that it leads to may be named.
        fs::remove_dir(at("data/member/wal")).unwrap();
        std::os::unix::fs::symlink(at("disk"), at("data/member/wal")).unwrap();
        assert_eq!(
            place("disk").unwrap().own_wal_dir(),
            Some(at("disk").as_path())
        );
        assert_eq!(place("data/member/wal").unwrap().own_wal_dir(), None);
    }

    #[test]
    fn damage_to_the_journal_is_told_and_touches_nothing() {
        let bench = Bench::new(&CASES[3]);
        let kills = bench.kills();
        let (_, left) = kills.iter().find(|k| k.0 == "wrote the journal").unwrap();
        lay_out(bench.root.path(), left);
        fs::write(bench.place.staging().join(JOURNAL), "{").unwrap();
        let before = bench.now();
        let e = bench.place.occupy().unwrap_err();
        assert_eq!(e.reason(), Reason::CorruptDataDir, "{e}");
        assert_eq!(bench.now(), before);
    }
}
