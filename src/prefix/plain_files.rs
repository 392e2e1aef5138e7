//! Plain snapshot files: finds those of a folder or of a store, tells when each was taken, and chooses one.
//!
//! The folders are etcdctl's, k3s' (files) and kOps' (a sub-folder for each snapshot). Other files are ignored
//! and named. In a store, names tell what is a snapshot; of files the first bytes are read, too.

use crate::backup::SnapshotName;
use crate::backup::survey::Histories;
use crate::base::time::rfc3339;
use crate::base::{Cancel, shorten};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::prefix::open::plain_snapshot::looks_like_snapshot;
use crate::prefix::select::At;
use crate::prefix::{Context, warn};
use crate::store::open::local_folder;
use crate::store::{ObjectInfo, Store};
use chrono::{DateTime, NaiveDate, NaiveDateTime, TimeDelta, Utc};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// The most files and folders that are looked at.
const MOST_ENTRIES: usize = 10_000;
/// A time without a zone that is this close to the file's time may be local: the file's time is taken.
const MOST_ZONE: TimeDelta = TimeDelta::hours(15);
/// The most snapshots that are opened in search of a revision.
const MOST_READS: usize = 12;
/// The most nodes of one prefix. If there are more, that part of the names tells no nodes.
const MOST_NODES: usize = 16;
/// What k3s and RKE2 put before the name of the node.
const BEFORE_NODE: [&str; 2] = ["etcd-snapshot-", "on-demand-"];
/// Why most files are ignored.
const NO_SNAPSHOTS: &str = "these are no snapshots";
/// Suffixes of files that are still being written.
const UNFINISHED: [&str; 3] = [".part", ".tmp", ".partial"];
/// Endings of names that files of `etcdctl snapshot save` and `talosctl etcd snapshot` usually have.
const DB_SUFFIXES: [&str; 6] = [
    ".db",
    ".db.gz",
    ".db.zst",
    ".db.zip",
    ".db.age",
    ".snapshot",
];
/// Endings of the names of Talos' backup job. etcd's own .snap files have no time in their names.
const TALOS_SUFFIXES: [&str; 4] = [".snap", ".snap.zst", ".snap.age", ".snap.zst.age"];

/// Where the time of a snapshot is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TimeSource {
    /// The name of the file or of its folder
    Name,
    /// The time at which the file was last written
    File,
}

/// Where a plain snapshot is, or several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlainPlace {
    /// A file of this machine, or a folder.
    Path(PathBuf),
    /// An object of the context's store by its path below the prefix, or a folder. Empty: the prefix.
    Store(String),
}

impl PlainPlace {
    /// Returns the place that the prefix of the context's store is.
    pub(crate) fn of_prefix(ctx: &Context) -> Self {
        match local_folder(ctx.store.url()) {
            Some(dir) => PlainPlace::Path(dir),
            None => PlainPlace::Store(String::new()),
        }
    }

    /// Returns the path, or the URL, for messages.
    pub fn name(&self, ctx: &Context) -> String {
        match self {
            PlainPlace::Path(path) => path.display().to_string(),
            PlainPlace::Store(path) if path.is_empty() => ctx.store.url().to_owned(),
            PlainPlace::Store(path) => ctx.store.name(path),
        }
    }
}

/// A plain snapshot file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainFile {
    /// Where the file is.
    pub place: PlainPlace,
    /// The path below the folder or prefix; of a single file, its name.
    pub name: String,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// When the snapshot was taken.
    pub created: DateTime<Utc>,
    /// Where `created` is from.
    pub time_source: TimeSource,
    /// The node that took the snapshot, or what else the name has before its time: the files of several nodes may be
    /// those of several clusters.
    pub node: Option<String>,
}

impl PlainFile {
    fn new(place: PlainPlace, name: &str, bytes: u64, modified: DateTime<Utc>) -> Self {
        let (created, time_source) = time_of(name, modified);
        PlainFile {
            node: node_of(name),
            place,
            name: name.to_owned(),
            bytes,
            created,
            time_source,
        }
    }

    /// Whether the name tells a time, even one in an unknown zone. Other files were taken by hand.
    pub(crate) fn has_time_in_name(&self) -> bool {
        time_in(&self.name).is_some()
    }
}

/// The snapshots of a folder, or a single one.
#[derive(Debug, Clone)]
pub struct PlainFiles {
    /// Where they were looked for.
    pub place: PlainPlace,
    /// The snapshots, the oldest first. Never empty.
    pub files: Vec<PlainFile>,
    /// The files that are ignored, by the reason.
    ignored: BTreeMap<&'static str, Vec<String>>,
    /// What a store has besides, in hidden folders, too: path and bytes.
    others: Vec<(String, u64)>,
}

impl PlainFiles {
    /// Finds the snapshots at a place: a file, or the files of a folder and of the folders in it. Reads the
    /// first bytes of files of this machine whose names do not tell.
    ///
    /// # Errors
    /// `NoSnapshots` if there is no such file or folder, or no snapshot in it; `Usage` if the path is neither a
    /// file nor a folder, or if the folder holds too much; `Io`, `PermissionDenied`, `Terminated`; errors of the store.
    pub fn find(ctx: &Context, place: &PlainPlace) -> Result<PlainFiles> {
        match place {
            PlainPlace::Path(path) => Self::find_on_disk(path, ctx.store.cancel()),
            PlainPlace::Store(path) => Self::find_in_store(&ctx.store, path),
        }
    }

    fn at(place: PlainPlace) -> Self {
        PlainFiles {
            place,
            files: Vec::new(),
            ignored: BTreeMap::new(),
            others: Vec::new(),
        }
    }

    fn find_in_store(store: &Store, path: &str) -> Result<PlainFiles> {
        let mut found = Self::at(PlainPlace::Store(path.to_owned()));
        if !path.is_empty()
            && let Some(object) = store.info(path)?
        {
            found.files.push(plain_object(&object, path));
            return Ok(found);
        }
        let objects = store.objects(&[path])?;
        for object in &objects {
            let below = object.path.strip_prefix(path).unwrap_or(&object.path);
            let below = below.trim_start_matches('/');
            let file_name = below.rsplit('/').next().unwrap_or_default();
            let folder = below.rsplit_once('/').map(|(folder, _)| folder);
            let is_snapshot = if is_hidden(below) {
                false
            } else if folder.is_some_and(|f| !is_of_one_snapshot(f)) {
                continue;
            } else if object.is_odd {
                found.ignore(NO_SNAPSHOTS, below.to_owned());
                continue;
            } else {
                found.add(plain_object(object, below), file_name, || false)
            };
            if !is_snapshot {
                found.others.push((below.to_owned(), object.bytes));
            }
        }
        if found.files.is_empty() {
            return Err(Reason::NoSnapshots.error(format!(
                "{} holds no plain snapshots ({} other objects)",
                store.name(path),
                objects.len()
            )));
        }
        found.sort();
        Ok(found)
    }

    fn find_on_disk(path: &Path, cancel: &Cancel) -> Result<PlainFiles> {
        let shown = path.display();
        let meta = std::fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Reason::NoSnapshots.error(format!("there is no {shown}: check --snapshot"))
            }
            _ => Error::io(format!("open {shown}"), e),
        })?;
        let mut found = Self::at(PlainPlace::Path(path.to_owned()));
        if meta.is_file() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            found.files.push(plain_file(path, &name, &meta));
            return Ok(found);
        }
        if !meta.is_dir() {
            return Err(Reason::Usage.error(format!(
                "--snapshot {shown} is neither a file nor a folder: give a snapshot file, or a folder of such files"
            )));
        }
        let mut entries = 0;
        let folders = found.look_into(path, "", &mut entries, cancel)?;
        for (folder, name) in folders {
            found.look_into(&folder, &format!("{name}/"), &mut entries, cancel)?;
        }
        if found.files.is_empty() {
            let others = found.ignored.values().map(Vec::len).sum::<usize>();
            return Err(Reason::NoSnapshots.error(format!(
                "{shown} holds no plain snapshots ({others} other files): check --snapshot; give the folder that holds v2/ with --store"
            )));
        }
        found.sort();
        Ok(found)
    }

    /// Returns the snapshots that have names of snapshots, as in a store: a file that merely holds a database may be that of
    /// another program.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(crate) fn by_names(self, ctx: &Context) -> Result<PlainFiles> {
        match self.place {
            PlainPlace::Store(_) => Ok(self),
            PlainPlace::Path(_) => Self::find_in_store(&ctx.store, ""),
        }
    }

    fn sort(&mut self) {
        self.files
            .sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
        if self.nodes().len() > MOST_NODES {
            self.files.iter_mut().for_each(|f| f.node = None);
        }
    }

    /// Returns the nodes that took the snapshots.
    pub(crate) fn nodes(&self) -> BTreeSet<String> {
        self.files.iter().filter_map(|f| f.node.clone()).collect()
    }

    /// Leaves only the snapshots of one history: those of the node `timeline`, or else all, if the newest ones of all
    /// nodes agree.
    ///
    /// # Errors
    /// `NoSuchTimeline`; `InterleavedTimelines` if the contents do not agree; errors of opening.
    pub(crate) fn of_one_history(
        mut self,
        ctx: &Context,
        timeline: Option<&str>,
    ) -> Result<PlainFiles> {
        let nodes = self.nodes();
        let place = self.place.name(ctx);
        let names = || shorten::line(&nodes.iter().collect::<Vec<_>>(), ", ", shorten::IN_LIST);
        match timeline {
            Some(node) if nodes.contains(node) => {
                self.files.retain(|f| f.node.as_deref() == Some(node));
            }
            Some(other) if !nodes.is_empty() => {
                return Err(Reason::NoSuchTimeline.error(format!(
                    "{place} has no snapshots of a node {other}: choose one of {}",
                    names()
                )));
            }
            Some(_) => {
                return Err(Reason::Usage.error(format!(
                    "the plain snapshots of {place} do not tell nodes by their names: leave out --timeline"
                )));
            }
            None if nodes.len() > 1 => {
                let other = self.node_of_other_history(ctx, &nodes)?;
                if let Some((node, before)) = other {
                    return Err(Reason::InterleavedTimelines.error(format!(
                        "{place} has snapshots of several nodes, and those of {node} do not hold the history of {before}: choose a node with --timeline, one of {}",
                        names()
                    )));
                }
            }
            None => {}
        }
        Ok(self)
    }

    /// Compares the newest snapshots of the nodes, each with the one before, from the newest on. Returns the first node whose
    /// content does not agree, and the name of the snapshot that it was compared with.
    fn node_of_other_history(
        &self,
        ctx: &Context,
        nodes: &BTreeSet<String>,
    ) -> Result<Option<(String, String)>> {
        let mut histories = Histories::new(ctx.temp_file()?);
        let mut left = nodes.clone();
        let mut before: Option<&PlainFile> = None;
        for file in self.files.iter().rev() {
            let Some(node) = file.node.as_ref().filter(|node| left.contains(*node)) else {
                continue;
            };
            match ctx.plain(&file.place) {
                Ok(plain) => {
                    let agrees = histories.follows(&plain.db).map_err(|e| e.at(&file.name))?;
                    if let Some(before) = before.replace(file)
                        && !agrees
                    {
                        return Ok(Some((node.clone(), before.name.clone())));
                    }
                    left.remove(node);
                }
                // An older one of this node may be intact.
                Err(e) if is_fault_of_file(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }

    /// Returns what other tools wrote beside each snapshot of a store, by its name: paths and bytes.
    pub(crate) fn companions(&self) -> HashMap<&str, Vec<&(String, u64)>> {
        let mut by_snapshot: HashMap<String, Vec<&(String, u64)>> = HashMap::new();
        for other in &self.others {
            if let Some(snapshot) = companion_of(&other.0) {
                by_snapshot.entry(snapshot).or_default().push(other);
            }
        }
        let mut companions: HashMap<&str, Vec<&(String, u64)>> = HashMap::new();
        for file in &self.files {
            let folder = file.name.rsplit_once('/').map(|(folder, _)| folder);
            for key in folder.into_iter().chain([file.name.as_str()]) {
                let found = by_snapshot.get(key).into_iter().flatten();
                companions.entry(&file.name).or_default().extend(found);
            }
        }
        companions
    }

    /// Chooses the snapshot of a request: the newest, the newest one that is not later than a time, or the oldest one
    /// that reaches a revision. A revision is searched by halves, as if revisions grew. Returns the place of the
    /// snapshot, and the point in it that is meant.
    ///
    /// # Errors
    /// `OutOfRange` if no snapshot is so old, or none has the revision; errors of opening.
    pub(crate) fn choose(
        self,
        ctx: &Context,
        at: At,
        warnings: &mut Vec<String>,
    ) -> Result<(PlainPlace, At)> {
        let PlainFiles {
            place, mut files, ..
        } = self;
        let are_several = files.len() > 1;
        let chosen = match at {
            At::Newest => files.pop(),
            At::Time(time) => {
                let oldest = files.first().map(|f| f.created);
                files.retain(|f| f.created <= time);
                if files.is_empty() {
                    let oldest = oldest.map_or_else(String::new, rfc3339);
                    return Err(Reason::OutOfRange.error(format!(
                        "no snapshot of {} is so old: the oldest one is of {oldest}",
                        place.name(ctx)
                    )));
                }
                files.pop()
            }
            At::Revision(revision) => Some(Self::with_revision(ctx, &place, files, revision)?),
        };
        let chosen = chosen.ok_or_else(|| Error::internal("a folder without snapshots"))?;
        if are_several {
            let created = rfc3339(chosen.created);
            warn(warnings, format!("{} of {created} is read", chosen.name));
        }
        let at = match at {
            At::Time(_) => At::Newest,
            at => at,
        };
        Ok((chosen.place, at))
    }

    /// Returns the oldest snapshot that reaches a revision.
    fn with_revision(
        ctx: &Context,
        place: &PlainPlace,
        mut files: Vec<PlainFile>,
        revision: Revision,
    ) -> Result<PlainFile> {
        let (mut reaching, mut reads) = (None, 0);
        while !files.is_empty() {
            reads += 1;
            if reads > MOST_READS {
                return Err(Reason::TooLarge.error(format!(
                    "revision {revision} is not found in {MOST_READS} snapshots of {}: give a --time instead",
                    place.name(ctx)
                )));
            }
            let middle = files.len() / 2;
            match ctx.plain_unchecked(&files[middle].place) {
                Ok(plain) if plain.base.revision >= revision => {
                    files.truncate(middle + 1);
                    reaching = files.pop();
                }
                Ok(_) => drop(files.drain(..=middle)),
                // Another snapshot may have the revision.
                Err(e) if is_fault_of_file(&e) => drop(files.remove(middle)),
                Err(e) => return Err(e),
            }
        }
        reaching.ok_or_else(|| {
            Reason::OutOfRange.error(format!(
                "no snapshot of {} reaches revision {revision}",
                place.name(ctx)
            ))
        })
    }

    /// Adds the snapshots directly in a folder. Returns the folders in it.
    fn look_into(
        &mut self,
        folder: &Path,
        prefix: &str,
        entries: &mut usize,
        cancel: &Cancel,
    ) -> Result<Vec<(PathBuf, String)>> {
        let failed = |e| Error::io(format!("list {}", folder.display()), e);
        let listed = match std::fs::read_dir(folder) {
            Ok(listed) => listed,
            // One folder that other users own must not hide the snapshots beside it.
            Err(_) if !prefix.is_empty() => {
                self.ignore("a folder that cannot be read", prefix.to_owned());
                return Ok(Vec::new());
            }
            Err(e) => return Err(failed(e)),
        };
        let mut folders = Vec::new();
        for entry in listed {
            cancel.check()?;
            let entry = entry.map_err(failed)?;
            *entries += 1;
            if *entries > MOST_ENTRIES {
                return Err(Reason::Usage.error(format!(
                    "--snapshot {} holds more than {MOST_ENTRIES} files and folders: give the folder of the snapshots alone",
                    folder.display()
                )));
            }
            let file_name = entry.file_name().to_string_lossy().into_owned();
            let name = format!("{prefix}{file_name}");
            let Ok(meta) = std::fs::symlink_metadata(entry.path()) else {
                // It was deleted meanwhile.
                continue;
            };
            if meta.is_dir() {
                if !is_hidden(&name) && is_of_one_snapshot(&name) {
                    folders.push((entry.path(), name));
                }
            } else if meta.is_symlink() {
                self.ignore("symbolic links are not followed", name);
            } else if !meta.is_file() {
                self.ignore("these are not regular files", name);
            } else {
                let file = plain_file(&entry.path(), &name, &meta);
                self.add(file, &file_name, || looks_like_snapshot(&entry.path()));
            }
        }
        folders.sort();
        Ok(folders)
    }

    /// Adds a file if it is a snapshot by its name, or else by its content; otherwise it is ignored. Returns whether it is
    /// one.
    fn add(
        &mut self,
        file: PlainFile,
        file_name: &str,
        looks_like_one: impl FnOnce() -> bool,
    ) -> bool {
        if UNFINISHED.iter().any(|s| file_name.ends_with(s)) {
            self.ignore("by their names, these are still being written", file.name);
        } else if has_name_of_snapshot(file_name) || looks_like_one() {
            self.files.push(file);
            return true;
        } else {
            self.ignore(NO_SNAPSHOTS, file.name);
        }
        false
    }

    /// Whether there are snapshots with names of chains: then the place is the folder v2/.
    pub(crate) fn has_names_of_chains(&self) -> bool {
        let is_of_chain = |f: &PlainFile| f.name.parse::<SnapshotName>().is_ok();
        self.files.iter().any(is_of_chain)
    }

    fn ignore(&mut self, why: &'static str, name: String) {
        self.ignored.entry(why).or_default().push(name);
    }

    /// Returns the files that are ignored, by the reason.
    pub(crate) fn ignored(&self) -> &BTreeMap<&'static str, Vec<String>> {
        &self.ignored
    }
}

/// Describes a file; `name` is the path below the folder, which may tell its time.
fn plain_file(path: &Path, name: &str, meta: &std::fs::Metadata) -> PlainFile {
    let modified = meta.modified().map_or(DateTime::UNIX_EPOCH, DateTime::from);
    PlainFile::new(
        PlainPlace::Path(path.to_owned()),
        name,
        meta.len(),
        modified,
    )
}

/// Describes an object; `name` is the path below the folder, which may tell its time.
fn plain_object(object: &ObjectInfo, name: &str) -> PlainFile {
    let place = PlainPlace::Store(object.path.clone());
    PlainFile::new(place, name, object.bytes, object.modified)
}

/// Whether a folder has a time in its name, as those of kOps. Others may be those of several clusters.
pub(crate) fn is_of_one_snapshot(folder: &str) -> bool {
    let is_date = |text: &[u8]| {
        let digits = |of: &[u8]| of.iter().all(u8::is_ascii_digit);
        digits(&text[..4]) && text[4] == b'-' && digits(&text[5..7])
    };
    !folder.contains('/')
        && (time_in(folder).is_some() || folder.as_bytes().windows(7).any(is_date))
}

/// Returns the node in a name: what is before the time, without what k3s puts there.
fn node_of(name: &str) -> Option<String> {
    let file_name = name.rsplit('/').next().unwrap_or(name);
    let (_, _, at) = time_in(file_name)?;
    let mut node = &file_name[..at];
    for before in BEFORE_NODE {
        node = node.strip_prefix(before).unwrap_or(node);
    }
    let node = node.trim_matches(['-', '_', '.']);
    let is_chain = file_name.parse::<SnapshotName>().is_ok();
    (!node.is_empty() && !is_chain).then(|| node.to_owned())
}

/// Returns the snapshot to which another file belongs, by its path: the name of the snapshot, or of its folder.
/// k3s writes `.metadata/NAME`, kOps files in the folder of the snapshot, and OpenShift an archive of the same time.
fn companion_of(path: &str) -> Option<String> {
    if let Some(name) = path.strip_prefix(".metadata/") {
        return Some(name.to_owned());
    }
    if let Some((folder, _)) = path.rsplit_once('/') {
        return is_of_one_snapshot(folder).then(|| folder.to_owned());
    }
    let time = path.strip_prefix("static_kuberesources_")?;
    let time = time.strip_suffix(".tar.gz")?;
    Some(format!("snapshot_{time}.db"))
}

/// Whether a file is in a hidden folder: k3s has files of the same names in `.metadata`.
pub(crate) fn is_hidden(path: &str) -> bool {
    path.split('/').any(|part| part.starts_with('.'))
}

/// Returns whether a path below a prefix is that of a plain snapshot, by its name.
pub(crate) fn tells_plain_layout(path: &str) -> bool {
    match path.split_once('/') {
        None => has_name_of_snapshot(path) && path.parse::<SnapshotName>().is_err(),
        Some((folder, name)) => is_of_one_snapshot(folder) && has_name_of_snapshot(name),
    }
}

/// Returns whether a file is a snapshot by its name, even if its bytes are damaged.
pub(crate) fn has_name_of_snapshot(name: &str) -> bool {
    if let Ok(of_chain) = name.parse::<SnapshotName>() {
        return of_chain.is_full();
    }
    name.starts_with("etcd-snapshot-")
        || name.ends_with("etcd.backup")
        || name.ends_with("etcd.backup.gz")
        || DB_SUFFIXES.iter().any(|s| name.ends_with(s))
        || is_of_k3s_or_talos(name)
}

/// Whether a name is one of `k3s etcd-snapshot save --name`, which ends in Unix seconds, or of Talos' backup job.
fn is_of_k3s_or_talos(name: &str) -> bool {
    let stem = name.strip_suffix(".zip").unwrap_or(name);
    time_in(name).is_some_and(|(_, has_zone, at)| {
        let is_last = has_zone && stem.len() == at + 10 && stem[..at].ends_with('-');
        is_last || TALOS_SUFFIXES.iter().any(|s| name.ends_with(s))
    })
}

/// Returns when a snapshot was taken: by its path below the folder, or else by the time of the file.
fn time_of(name: &str, modified: DateTime<Utc>) -> (DateTime<Utc>, TimeSource) {
    match time_in(name) {
        Some((time, has_zone, _)) if has_zone || (time - modified).abs() > MOST_ZONE => {
            (time, TimeSource::Name)
        }
        _ => (modified, TimeSource::File),
    }
}

/// Returns the last time in a path, in UTC; whether its zone is known; and the index at which it begins. Unix seconds and
/// times with a `Z` have a known zone.
fn time_in(name: &str) -> Option<(DateTime<Utc>, bool, usize)> {
    // A run of digits and the characters within dates: `2026-11-20T14:00:05Z-000001`.
    let mut found = None;
    let bytes = name.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let is_start = bytes[at].is_ascii_digit() && (at == 0 || !bytes[at - 1].is_ascii_digit());
        if is_start && let Some((time, has_zone)) = time_at(&bytes[at..]) {
            found = Some((time, has_zone, at));
            // A time has more digits than begin here.
            at += 10;
        } else {
            at += 1;
        }
    }
    found
}

/// Parses the time at the start of a text.
fn time_at(text: &[u8]) -> Option<(DateTime<Utc>, bool)> {
    let digits = text.iter().take_while(|b| b.is_ascii_digit()).count();
    if digits == 10 {
        let seconds = std::str::from_utf8(&text[..10]).ok()?.parse().ok()?;
        let is_recent = |t: &DateTime<Utc>| t.timestamp() >= 1_000_000_000;
        return Some((
            DateTime::from_timestamp(seconds, 0).filter(is_recent)?,
            true,
        ));
    }
    let (mut numbers, mut rest) = (Vec::new(), text);
    for (nth, width) in [4, 2, 2, 2, 2, 2].into_iter().enumerate() {
        if nth > 0
            && matches!(
                rest.first(),
                Some(b'-' | b'_' | b':' | b'.' | b'T' | b't' | b' ')
            )
        {
            rest = &rest[1..];
        }
        let number = rest.get(..width)?;
        if !number.iter().all(u8::is_ascii_digit) {
            return None;
        }
        numbers.push(std::str::from_utf8(number).ok()?.parse::<u32>().ok()?);
        rest = &rest[width..];
    }
    let [year, month, day, hour, minute, second] = numbers[..] else {
        return None;
    };
    if rest.first().is_some_and(u8::is_ascii_digit) || !(2001..=2999).contains(&year) {
        return None;
    }
    let date = NaiveDate::from_ymd_opt(year as i32, month, day)?;
    let time: NaiveDateTime = date.and_hms_opt(hour, minute, second)?;
    Some((time.and_utc(), rest.first() == Some(&b'Z')))
}

/// Returns whether an error is about this file alone, so that others can be read nevertheless.
pub(crate) fn is_fault_of_file(e: &Error) -> bool {
    let is_refused = matches!(
        e.reason(),
        Reason::CannotDecrypt | Reason::PermissionDenied | Reason::NoSnapshots | Reason::Usage
    );
    e.reason().is_bad_data() || is_refused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_the_names_that_tools_write() {
        for (name, expected) in [
            (
                "etcd-snapshot-server-1-1763600405",
                Some(("2025-11-20T01:00:05Z", true)),
            ),
            (
                "on-demand-node1-1763600405.zip",
                Some(("2025-11-20T01:00:05Z", true)),
            ),
            (
                "2026-11-20T14:00:05Z-000001/etcd.backup.gz",
                Some(("2026-11-20T14:00:05Z", true)),
            ),
            (
                "snapshot_2026-11-20_140005.db",
                Some(("2026-11-20T14:00:05Z", false)),
            ),
            (
                "snapshot-20261120140005.db",
                Some(("2026-11-20T14:00:05Z", false)),
            ),
            ("20261120-140005.db", Some(("2026-11-20T14:00:05Z", false))),
            (
                "2026-11-20/1763600405.db",
                Some(("2025-11-20T01:00:05Z", true)),
            ),
            (
                "Full-00000000-00000746-1795224681.gz",
                Some(("2026-11-21T01:31:21Z", true)),
            ),
            ("snapshot.db", None),
            ("snapshot-2026-11-20.db", None),
            ("0000000001.db", None),
            ("20269920140005.db", None),
            ("202611201400051.db", None),
        ] {
            let found = time_in(name).map(|(t, zone, _)| (t.to_rfc3339(), zone));
            let expected = expected.map(|(t, zone)| (t.replace('Z', "+00:00"), zone));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn names_tell_nodes_and_what_is_a_snapshot() {
        for (name, node) in [
            ("etcd-snapshot-server-1-1763600405", Some("server-1")),
            ("on-demand-server-1-1763600405.zip", Some("server-1")),
            (
                "pre-upgrade-server-1-1763600405",
                Some("pre-upgrade-server-1"),
            ),
            ("prod-2026-11-20T14:00:05Z.snap.age", Some("prod")),
            ("2026-11-20T14:00:05Z-000001/etcd.backup.gz", None),
            ("snapshot.db", None),
            ("Full-00000000-00000746-1795224681.gz", None),
        ] {
            assert_eq!(node_of(name).as_deref(), node, "{name}");
        }
        for name in [
            "pre-upgrade-server-1-1763600405.zip",
            "prod-2026-11-20T14:00:05Z.snap",
            "x.db",
        ] {
            assert!(has_name_of_snapshot(name), "{name}");
        }
        for name in [
            "0000000000000002-0000000000013882.snap",
            "Incr-00000001-00000002-1795224681",
            "app-1763600405.log",
            "notes",
        ] {
            assert!(!has_name_of_snapshot(name), "{name}");
        }
    }

    #[test]
    fn what_is_beside_a_snapshot_belongs_to_it() {
        for (path, snapshot) in [
            (".metadata/etcd-snapshot-a-1", Some("etcd-snapshot-a-1")),
            (
                "2026-11-20T14:00:05Z-1/_etcd_backup.meta",
                Some("2026-11-20T14:00:05Z-1"),
            ),
            (
                "static_kuberesources_2026-11-20_140005.tar.gz",
                Some("snapshot_2026-11-20_140005.db"),
            ),
            ("others/notes", None),
            ("notes", None),
        ] {
            assert_eq!(companion_of(path).as_deref(), snapshot, "{path}");
        }
    }

    #[test]
    fn a_local_time_near_the_time_of_the_file_is_not_trusted() {
        let file: DateTime<Utc> = "2026-11-20T12:00:00Z".parse().unwrap();
        let source = |name: &str| time_of(name, file).1;
        assert_eq!(source("snapshot_2026-11-20_140005.db"), TimeSource::File);
        assert_eq!(source("snapshot_2026-11-18_140005.db"), TimeSource::Name);
        assert_eq!(
            source("2026-11-20T14:00:05Z-1/etcd.backup"),
            TimeSource::Name
        );
        assert_eq!(source("snapshot.db"), TimeSource::File);
    }
}
