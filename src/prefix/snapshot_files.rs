//! Plain snapshot files: those of a folder, and the one that a path or a pattern names.
//!
//! The series is the user's word: `*` in a pattern stands for the time of a name. Nothing else is concluded from names. The
//! newest file of a series is compared with an older one by contents.

use crate::backup::file_name::{
    KOPS, NameTime, is_hidden, is_other_file, newest_pattern, time_in, time_of_file,
};
use crate::backup::survey::{Histories, Sequel};
use crate::base::opt::{SNAPSHOT, STORE};
use crate::base::time::rfc3339;
use crate::base::{shell, shorten};
use crate::error::{Error, Reason, Result};
use crate::prefix::open::{FilePlace, PlainSnapshot};
use crate::prefix::{Context, warn};
use crate::store::open::{holds_backup, local_folder};
use chrono::{DateTime, TimeDelta, Utc};
use std::fs;
use std::path::{Path, PathBuf};

/// Files that were taken at the same time are not compared: servers of one cluster save at once.
const APART: TimeDelta = TimeDelta::minutes(5);

/// A plain snapshot file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Where it is.
    pub place: FilePlace,
    /// The path below the folder.
    pub name: String,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// When the snapshot was taken, by its name.
    pub time: Option<NameTime>,
}

/// A plain snapshot that was opened, to be read as a backup.
#[derive(Clone)]
pub struct OpenFile {
    /// The path or the URL.
    pub name: String,
    /// When the snapshot was taken, by its name.
    pub created: Option<DateTime<Utc>>,
    /// The time by which the file was chosen from a series.
    pub until: Option<DateTime<Utc>>,
    /// The snapshot.
    pub snapshot: PlainSnapshot,
    /// Warnings for the report.
    pub warnings: Vec<String>,
}

/// A pattern that names a series of files: `FOLDER/BEFORE*AFTER`, or `FOLDER/*/etcd.backup.gz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    /// The path or the URL of the folder.
    pub folder: String,
    before: String,
    after: String,
    is_of_kops: bool,
}

impl Pattern {
    /// Parses a pattern; `None` if the text has no `*`.
    ///
    /// # Errors
    /// `Usage` if a `*` stands elsewhere.
    pub fn parse(text: &str) -> Result<Option<Pattern>> {
        let Some((before, after)) = text.split_once('*') else {
            return Ok(None);
        };
        let (folder, before) = match before.rsplit_once('/') {
            Some(("", before)) => ("/", before),
            Some((folder, before)) => (folder, before),
            None => (".", before),
        };
        let kops = after.strip_prefix('/').filter(|_| before.is_empty());
        let is_of_kops = kops.is_some_and(|name| KOPS.contains(&name));
        if after.contains('*') || after.contains('/') && !is_of_kops || folder.ends_with(":/") {
            return Err(Reason::Usage.error(format!(
                "{text}: one * stands in the last part of the path, such as etcd-snapshot-server1-*, or for the folder before {}",
                KOPS[0]
            )));
        }
        Ok(Some(Pattern {
            folder: folder.to_owned(),
            before: before.to_owned(),
            after: after.to_owned(),
            is_of_kops,
        }))
    }

    /// Returns whether the path of a file below the folder is of the series.
    fn matches(&self, path: &str) -> bool {
        let middle = path.strip_prefix(self.before.as_str());
        let middle = middle.and_then(|rest| rest.strip_suffix(self.after.as_str()));
        let is_whole = middle.is_some_and(|middle| !middle.is_empty() && !middle.contains('/'));
        // If the pattern itself has such an ending, opening the file says what it is.
        let is_other = is_other_file(path) && !is_other_file(&self.after);
        is_whole && !is_other && (!is_hidden(path) || self.before.starts_with('.'))
    }

    fn text(&self) -> String {
        format!(
            "{}/{}*{}",
            self.folder.trim_end_matches('/'),
            self.before,
            self.after
        )
    }
}

/// Lists the files in the folder of the context's store, and kOps' files one folder below. Links are not followed.
///
/// # Errors
/// `Io`, `PermissionDenied`; errors of the store.
pub fn list(ctx: &Context) -> Result<Vec<SnapshotFile>> {
    let mut files = Vec::new();
    let mut add = |place, name: String, bytes| {
        files.push(SnapshotFile {
            place,
            time: time_in(&name),
            name,
            bytes,
        });
    };
    match local_folder(ctx.store.url()) {
        Some(folder) => {
            let failed = |e| Error::io(format!("list {}", folder.display()), e);
            for entry in fs::read_dir(&folder).map_err(failed)? {
                ctx.store.cancel().check()?;
                let entry = entry.map_err(failed)?;
                let name = entry.file_name().to_string_lossy().into_owned();
                let in_folder =
                    KOPS.map(|kops| (entry.path().join(kops), format!("{name}/{kops}")));
                for (path, name) in [(entry.path(), name)].into_iter().chain(in_folder) {
                    // A link of its own is none of the files, and a file may be gone meanwhile.
                    if let Some(meta) = fs::symlink_metadata(&path)
                        .ok()
                        .filter(fs::Metadata::is_file)
                    {
                        add(FilePlace::Path(path), name, meta.len());
                    }
                }
            }
        }
        None => {
            for object in ctx.store.objects(&[""])? {
                let is_direct = match object.path.split_once('/') {
                    None => true,
                    Some((_, name)) => KOPS.contains(&name),
                };
                if is_direct && !object.is_odd {
                    add(
                        FilePlace::Object(object.path.clone()),
                        object.path,
                        object.bytes,
                    );
                }
            }
        }
    }
    files.sort_by(|a, b| {
        let key = |f: &SnapshotFile| f.time.as_ref().map(|time| time.at);
        (key(a), &a.name).cmp(&(key(b), &b.name))
    });
    Ok(files)
}

/// The files of a series.
#[derive(Debug)]
pub struct Series {
    /// The files with their times, the oldest first.
    pub files: Vec<(SnapshotFile, NameTime)>,
    /// The files that are left out because they are in the future.
    pub future: Vec<SnapshotFile>,
}

/// Returns the files of a series. The context's store is the folder of the pattern. `is_future` tells which times have not
/// come.
///
/// # Errors
/// `NoSnapshots` if there is none; `Usage` if names tell no time, so that there is no order; those of [`list`].
pub fn series(
    ctx: &Context,
    pattern: &Pattern,
    is_future: impl Fn(&NameTime) -> bool,
) -> Result<Series> {
    let mut files = list(ctx)?;
    files.retain(|file| pattern.matches(&file.name));
    let text = pattern.text();
    if files.is_empty() {
        return Err(Reason::NoSnapshots.error(format!(
            "no file is named like {text}: `deltafold list --store {}` shows what is there",
            shell::word(&pattern.folder)
        )));
    }
    let mut of_time = Vec::with_capacity(files.len());
    let (mut without, mut future) = (Vec::new(), Vec::new());
    for file in files {
        match file.time.clone() {
            None => without.push(file.name),
            Some(time) if is_future(&time) => future.push(file),
            Some(time) => of_time.push((file, time)),
        }
    }
    if !without.is_empty() {
        return Err(Reason::Usage.error(format!(
            "the names of these files like {text} tell no time, so nothing says which is the newest: {}; name the file that you mean",
            shorten::line(&without, ", ", shorten::IN_LIST)
        )));
    }
    Ok(Series {
        files: of_time,
        future,
    })
}

/// Opens a file that was named, also by a link.
///
/// # Errors
/// As [`Context::plain`].
pub fn open_named(ctx: &Context, place: &FilePlace) -> Result<OpenFile> {
    let is_link = |path: &Path| fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink());
    let followed = match place {
        FilePlace::Path(path) if is_link(path) => path.canonicalize().ok(),
        _ => None,
    };
    let snapshot = ctx.plain(&followed.map_or_else(|| place.clone(), FilePlace::Path))?;
    Ok(opened(snapshot, place.name(ctx), Vec::new()))
}

fn opened(snapshot: PlainSnapshot, name: String, mut warnings: Vec<String>) -> OpenFile {
    if let Some(warning) = snapshot.warning(&name) {
        warn(&mut warnings, warning);
    }
    OpenFile {
        created: time_of_file(&name).map(|time| time.at),
        name,
        until: None,
        snapshot,
        warnings,
    }
}

/// Opens the newest file of a series, or the newest one that is not later than `until`, and compares it with an older one.
///
/// # Errors
/// As [`series`]; `OutOfRange` if no file is so old; `HistoryMismatch` if it is not of the history of the older one;
/// `Untrusted` if none is encrypted and one must be; as [`Context::plain`], with the file before it.
pub fn open_newest(
    ctx: &Context,
    pattern: &Pattern,
    until: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> Result<OpenFile> {
    let mut warnings = Vec::new();
    let Series { mut files, future } = series(ctx, pattern, |time| time.is_future(now))?;
    let future: Vec<&str> = future.iter().map(|file| file.name.as_str()).collect();
    if !future.is_empty() {
        let names = shorten::line(&future, ", ", shorten::IN_LIST);
        warn(
            &mut warnings,
            format!("left out, since they are in the future by their names: {names}"),
        );
    }
    let Some((_, oldest)) = files.first() else {
        return Err(Reason::NoSnapshots.error(format!(
            "all files like {} are in the future by their names: check the clocks",
            pattern.text()
        )));
    };
    let oldest = rfc3339(oldest.at);
    files.retain(|(_, time)| until.is_none_or(|until| time.at <= until));
    if files.is_empty() {
        return Err(Reason::OutOfRange.error(format!(
            "no file like {} is so old: the oldest one is of {oldest}",
            pattern.text()
        )));
    }
    let mut left_out = None;
    while let Some((file, time)) = files.pop() {
        let name = file.place.name(ctx);
        let snapshot = match ctx.plain(&file.place) {
            Err(e) if e.reason() == Reason::Untrusted => {
                warn(&mut warnings, format!("left out: {e}"));
                left_out.get_or_insert(e);
                continue;
            }
            Err(e) if e.reason().is_unreadable() => {
                let before = files.last().map_or_else(String::new, |(before, _)| {
                    let before = before.place.name(ctx);
                    format!(
                        "; the one before it is read with {SNAPSHOT} {}",
                        shell::word(&before)
                    )
                });
                return Err(e.reworded(format!("{e}{before}")));
            }
            snapshot => snapshot?,
        };
        let zone = if time.has_zone {
            ""
        } else {
            " (its name tells no zone: UTC)"
        };
        warn(
            &mut warnings,
            format!("{name} of {} is read{zone}", rfc3339(time.at)),
        );
        compare(ctx, &snapshot, &name, time.at, &files, &mut warnings)?;
        return Ok(OpenFile {
            until,
            ..opened(snapshot, name, warnings)
        });
    }
    Err(left_out.unwrap_or_else(|| Error::internal("a series without files")))
}

/// Compares a snapshot by contents with the newest one of `older` that is not of the same minutes and can be opened.
fn compare(
    ctx: &Context,
    snapshot: &PlainSnapshot,
    name: &str,
    at: DateTime<Utc>,
    older: &[(SnapshotFile, NameTime)],
    warnings: &mut Vec<String>,
) -> Result<()> {
    for (file, time) in older.iter().rev() {
        if time.at + APART > at {
            continue;
        }
        let other = file.place.name(ctx);
        let before = match ctx.plain(&file.place) {
            Err(e) if e.reason().is_of_one_object() => {
                warn(warnings, format!("not compared with {other}: {e}"));
                continue;
            }
            before => before?,
        };
        let mut histories = Histories::new(ctx.temp())?;
        histories.next(&before.db).map_err(|e| e.at(&other))?;
        let why = match histories.next(&snapshot.db).map_err(|e| e.at(name))? {
            None | Some(Sequel::Continues) => return Ok(()),
            Some(Sequel::NothingInCommon) => {
                let message = format!(
                    "{name} has no change in common with {other}: nothing proves that both are of one cluster"
                );
                warn(warnings, message);
                return Ok(());
            }
            Some(Sequel::SetBack(why)) => why,
            Some(Sequel::OtherCluster(uid, before)) => {
                format!("the UID of kube-system is {uid} instead of {before}")
            }
        };
        return Err(Reason::HistoryMismatch.error(format!(
            "{name} does not hold the history of {other}: {why}; nothing was done. Give the file that you mean, without *"
        )));
    }
    Ok(())
}

/// Returns the error for the folder that is the context's store, if it was given as a snapshot file with this flag; `None` if
/// there is nothing in it.
///
/// # Errors
/// As [`list`].
pub fn folder_error(ctx: &Context, flag: &str) -> Result<Option<Error>> {
    let folder = ctx.store.url().trim_end_matches('/');
    let local = local_folder(folder);
    let files = list(ctx)?;
    let message = if local.as_ref().is_some_and(|path| holds_backup(path)) {
        format!("{folder} holds fulls and deltas: give it with {STORE}")
    } else if let Some(db) = local.and_then(|path| database_below(&path, 2)) {
        format!(
            "{folder} has the data directory of an etcd: its database is {}, give that file. Stop that etcd first if it runs",
            db.display()
        )
    } else if let Some(pattern) = newest_pattern(files.iter().map(|file| file.name.as_str())) {
        let pattern = format!("{folder}/{pattern}");
        let pattern = shell::word(&pattern);
        format!("{folder} is a folder: {flag} {pattern} means the newest file of that series")
    } else if files.is_empty() {
        return Ok(None);
    } else {
        format!("{folder} is a folder, and none of its files has the name of a snapshot: name one")
    };
    Ok(Some(Reason::NoSnapshots.error(message)))
}

/// Finds `member/snap/db` in a folder or in the folders down to this depth.
fn database_below(folder: &Path, depth: usize) -> Option<PathBuf> {
    /// The most entries of a folder that are looked at.
    const MOST: usize = 1000;
    let db = folder.join("member/snap/db");
    if db.is_file() {
        return Some(db);
    }
    let below = depth.checked_sub(1)?;
    let entries = fs::read_dir(folder).ok()?.flatten().take(MOST);
    let mut folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.find_map(|entry| database_below(&entry.path(), below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_files_of_one_folder() {
        for (pattern, folder, matching, others) in [
            (
                "s3://b/k3s/etcd-snapshot-server1-*",
                "s3://b/k3s",
                &["etcd-snapshot-server1-1763600405"][..],
                &[
                    "etcd-snapshot-server10-1",
                    "x/etcd-snapshot-server1-1",
                    "etcd-snapshot-server1-",
                ][..],
            ),
            (
                "s3://b/main/*/etcd.backup.gz",
                "s3://b/main",
                &["2026-11-20T14:00:05Z-000001/etcd.backup.gz"],
                &[
                    "etcd.backup.gz",
                    "a/b/etcd.backup.gz",
                    "a/etcd.backup.gz.tmp",
                ],
            ),
            ("f/*", "f", &["x"], &[".x", "x.tar.gz", "x.db.tmp"]),
            (
                "snapshot_*.db",
                ".",
                &["snapshot_1.db"],
                &["snapshot_1.tar.gz"],
            ),
            ("/*.db", "/", &["x.db"], &["x"]),
        ] {
            let parsed = Pattern::parse(pattern).unwrap().unwrap();
            assert_eq!(parsed.folder, folder);
            for path in matching {
                assert!(parsed.matches(path), "{pattern} {path}");
            }
            for path in others {
                assert!(!parsed.matches(path), "{pattern} {path}");
            }
        }
        assert_eq!(Pattern::parse("s3://b/x.db").unwrap(), None);
        for wrong in [
            "a/*/x.db",
            "*/*/etcd.backup.gz",
            "a-*-*.db",
            "s3://*",
            "a*/etcd.backup.gz",
        ] {
            assert_eq!(
                Pattern::parse(wrong).unwrap_err().reason(),
                Reason::Usage,
                "{wrong}"
            );
        }
    }
}
