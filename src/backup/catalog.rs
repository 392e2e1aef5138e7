//! The catalog: the listing of a store prefix, sorted into snapshots, notes and foreign objects.
//!
//! It uses names alone and reads no object. It knows both layouts: `v2/<name>` and `v1/Backup-<unix seconds>/<name>`.

use crate::backup::name::SnapshotName;
use crate::mvcc::Revision;
use chrono::{DateTime, Utc};
use std::collections::HashSet;

/// The folder of the current layout.
pub const V2: &str = "v2";
/// The folder of the old layout, which is read and never written.
pub const V1: &str = "v1";
/// The folder of records that a full begins a timeline. Each record has the name of its full.
pub const TIMELINES: &str = "deltafold-timelines";
/// The folder of pins. Each pin has the name of its full, and `gc` keeps the chain of that full.
pub const PINS: &str = "deltafold-pins";
/// The folder of exclusion marks. Each mark has the name of the snapshot that it excludes, in `v2` or `v1`.
pub const EXCLUDED: &str = "deltafold-excluded";
/// The folders of snapshots.
pub const SNAPSHOTS: [&str; 2] = [V2, V1];
/// The folders of notes on snapshots. They are listed after the folders of snapshots: the record that a full
/// begins a timeline is written before the full, so a listed full is never without its record.
pub const NOTES: [&str; 3] = [TIMELINES, PINS, EXCLUDED];

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedObject {
    /// The path below the store's prefix, with `/` between folders.
    pub path: String,
    /// Size in the store, in bytes.
    pub bytes: u64,
}

/// A snapshot in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The parts of the name.
    pub name: SnapshotName,
    /// The path below the store's prefix.
    pub path: String,
    /// Size in the store, in bytes.
    pub bytes: u64,
    /// Whether the snapshot must not be used: it has the tag `x-etcd-snapshot-exclude=true` or an exclusion mark.
    pub excluded: bool,
    /// Whether the snapshot must not be used because it is not encrypted: see [`Trust`](super::trust::Trust).
    pub untrusted: bool,
    /// For a full: its snapshotter recorded that it begins another history than that of the snapshots before it.
    pub begins_timeline: bool,
    /// For a full: it has a pin, so it is kept with its chain whatever the retention policy is.
    pub pinned: bool,
}

/// Returns the path of the exclusion mark of the snapshot at a path.
pub fn mark_of(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    format!("{EXCLUDED}/{name}")
}

/// The record that another history begins with a full. What has its second or a later one in its name is behind
/// it, and belongs to no history that is older, whatever it holds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wall {
    /// Where it stands, in seconds since 1970: the time in the name of its full.
    pub second: i64,
    /// The revision in the name of its full.
    pub revision: Revision,
    /// The path of the record below the store's prefix.
    pub path: String,
}

impl Wall {
    fn of(record: &ListedObject) -> Option<Self> {
        let (TIMELINES, name) = record.path.split_once('/')? else {
            return None;
        };
        let name: SnapshotName = name.parse().ok()?;
        name.is_full().then(|| Wall {
            second: name.created,
            revision: name.last,
            path: record.path.clone(),
        })
    }

    /// Returns whether this is the record of a full. A copy may have another compression, or be encrypted.
    pub fn is_of(&self, full: &SnapshotName) -> bool {
        full.is_full() && (full.created, full.last) == (self.second, self.revision)
    }

    /// Returns the time at which it stands.
    pub fn at(&self) -> DateTime<Utc> {
        DateTime::from_timestamp(self.second, 0).unwrap_or_default()
    }

    /// Returns the first wall after a second. The walls are in order of time.
    pub fn first_after(walls: &[Wall], second: i64) -> Option<&Wall> {
        walls.get(walls.partition_point(|wall| wall.second <= second))
    }

    /// Returns the first time for a name that must lie before a wall, if there is one, and how many seconds from then on
    /// lie before it, of at most `tried`.
    pub fn names_before(wall: Option<&Wall>, created: i64, tried: i64) -> (i64, i64) {
        let Some(wall) = wall else {
            return (created, tried);
        };
        let first = created.min(wall.second - 1);
        (first, tried.min(wall.second - first))
    }

    /// Returns the ID of the timeline that begins here.
    pub fn timeline_id(&self) -> String {
        format!("r{}-{:08x}", self.revision, self.second)
    }
}

/// Everything below a prefix.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalog {
    /// The snapshots in order of creation. Within one second deltas come before fulls, and lower revisions
    /// first.
    pub snapshots: Vec<Snapshot>,
    /// The paths of objects that deltafold does not know and leaves alone.
    pub foreign: Vec<String>,
    /// The records of timelines, in order of time.
    pub walls: Vec<Wall>,
    /// The names of exclusion marks, also of those whose snapshot is not there (yet).
    pub marks: HashSet<String>,
}

impl Catalog {
    /// Sorts a listing. Tags are not known here: `excluded` is set by exclusion marks alone.
    pub fn from_listing(listing: Vec<ListedObject>) -> Self {
        let mut catalog = Catalog::default();
        let (notes, objects): (Vec<ListedObject>, Vec<ListedObject>) =
            listing.into_iter().partition(|o| note(&o.path).is_some());
        for object in objects {
            match snapshot_name(&object.path) {
                Some(name) => catalog.snapshots.push(Snapshot {
                    name,
                    path: object.path,
                    bytes: object.bytes,
                    excluded: false,
                    untrusted: false,
                    begins_timeline: false,
                    pinned: false,
                }),
                None => catalog.foreign.push(object.path),
            }
        }
        catalog.add_notes(&notes);
        catalog.foreign.sort();
        catalog.snapshots.sort_by(|a, b| {
            let order = |s: &Snapshot| {
                let full = s.name.is_full();
                (s.name.created, full, s.name.last, s.name.start)
            };
            order(a).cmp(&order(b)).then_with(|| a.path.cmp(&b.path))
        });
        catalog
    }

    /// A catalog of snapshots of one byte each in [`V2`].
    #[cfg(test)]
    pub(crate) fn of_names<S: AsRef<str>>(names: &[S]) -> Self {
        let listing = names.iter().map(|name| ListedObject {
            path: format!("{V2}/{}", name.as_ref()),
            bytes: 1,
        });
        Catalog::from_listing(listing.collect())
    }

    /// Applies the notes of a listing to the snapshots.
    pub fn add_notes(&mut self, notes: &[ListedObject]) {
        self.walls.extend(notes.iter().filter_map(Wall::of));
        self.walls.sort_unstable();
        let notes: HashSet<(&str, &str)> = notes.iter().filter_map(|o| note(&o.path)).collect();
        if notes.is_empty() {
            return;
        }
        let marks = notes.iter().filter(|(folder, _)| *folder == EXCLUDED);
        self.marks.extend(marks.map(|(_, name)| (*name).to_owned()));
        for s in &mut self.snapshots {
            let at = self.walls.partition_point(|w| w.second < s.name.created);
            let same_second = self.walls[at..].iter();
            let mut same_second = same_second.take_while(|w| w.second == s.name.created);
            s.begins_timeline = same_second.any(|w| w.is_of(&s.name));
            let name = s.name.to_string();
            s.pinned |= s.name.is_full() && notes.contains(&(PINS, name.as_str()));
            s.excluded |= self.marks.contains(&name);
        }
    }

    /// Returns the indexes of the snapshots that may be used, in order of creation.
    pub fn usable(&self) -> impl Iterator<Item = usize> + '_ {
        let is_usable = |s: &Snapshot| !s.excluded && !s.untrusted;
        (0..self.snapshots.len()).filter(move |&i| is_usable(&self.snapshots[i]))
    }

    /// Returns the foreign objects `<name>.exclude` beside a snapshot, which exclude nothing, each with the path at which
    /// it would.
    pub fn misplaced_marks(&self) -> impl Iterator<Item = (&str, String)> {
        self.foreign.iter().filter_map(|path| {
            let of = path.strip_suffix(".exclude")?;
            snapshot_name(of)?;
            Some((path.as_str(), mark_of(of)))
        })
    }

    /// Returns the usable snapshots between two walls each, in order of time, with the wall before them. Parts
    /// without a usable snapshot are left out.
    pub fn parts(&self) -> Vec<(Option<&Wall>, Vec<usize>)> {
        let mut parts: Vec<(Option<&Wall>, Vec<usize>)> = Vec::new();
        for i in self.usable() {
            let created = self.snapshots[i].name.created;
            let before = self.walls.partition_point(|w| w.second <= created);
            let wall = before.checked_sub(1).map(|w| &self.walls[w]);
            match parts.last_mut() {
                Some((last, snapshots)) if *last == wall => snapshots.push(i),
                _ => parts.push((wall, vec![i])),
            }
        }
        parts
    }

    /// Returns the newest revision in the name of a usable snapshot.
    pub fn latest_revision(&self) -> Option<Revision> {
        self.usable().map(|i| self.snapshots[i].name.last).max()
    }
}

/// The folder of a note, and the name of its snapshot; `None` if the path is not that of a note.
fn note(path: &str) -> Option<(&str, &str)> {
    path.split_once('/')
        .filter(|(folder, _)| NOTES.contains(folder))
}

/// Returns the name of the snapshot at `path`, in either layout; `None` if the path is not that of a
/// snapshot.
pub fn snapshot_name(path: &str) -> Option<SnapshotName> {
    let mut parts = path.split('/');
    let name = match (parts.next()?, parts.next()?, parts.next()) {
        (V2, name, None) => name,
        (V1, backup, Some(name)) => {
            let seconds = backup.strip_prefix("Backup-")?;
            if seconds.is_empty() || !seconds.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            name
        }
        _ => return None,
    };
    match parts.next() {
        None => name.parse().ok(),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_sorted_into_snapshots_marks_and_foreign_objects() {
        let paths = [
            "v2/Incr-00000011-00000020-200",
            "v2/Full-00000000-00000020-200",
            "v2/Full-00000000-00000010-100.gz",
            "v2/Full-00000000-00000020-200.exclude",
            "deltafold-excluded/Full-00000000-00000010-100.gz",
            "v1/Backup-50/Full-00000000-00000001-50",
            "v1/Backup-x/Full-00000000-00000001-50",
            "v1/Full-00000000-00000001-50",
            "v2/notes.txt",
            "v2/notes.exclude",
            "v2/sub/Full-00000000-00000010-100",
            "deltafold-timelines/Full-00000000-00000020-200",
            "deltafold-pins/Full-00000000-00000010-100.gz",
            "deltafold-pins/Incr-00000011-00000020-200",
        ];
        let listing = paths
            .map(|p| ListedObject {
                path: p.to_owned(),
                bytes: 1,
            })
            .to_vec();
        let c = Catalog::from_listing(listing);
        let order: Vec<_> = c
            .snapshots
            .iter()
            .map(|s| (s.path.as_str(), s.excluded))
            .collect();
        assert_eq!(
            order,
            [
                ("v1/Backup-50/Full-00000000-00000001-50", false),
                ("v2/Full-00000000-00000010-100.gz", true),
                ("v2/Incr-00000011-00000020-200", false),
                ("v2/Full-00000000-00000020-200", false),
            ]
        );
        assert_eq!(c.foreign.len(), 6);
        let misplaced: Vec<_> = c.misplaced_marks().map(|m| m.1).collect();
        assert_eq!(misplaced, ["deltafold-excluded/Full-00000000-00000020-200"]);
        let begins: Vec<_> = c.snapshots.iter().map(|s| s.begins_timeline).collect();
        assert_eq!(begins, [false, false, false, true]);
        let pinned: Vec<_> = c.snapshots.iter().map(|s| s.pinned).collect();
        assert_eq!(pinned, [false, true, false, false]);
        assert_eq!(c.latest_revision(), Some(Revision(20)));
        assert_eq!(c.usable().collect::<Vec<_>>(), [0, 2, 3]);
    }
}
