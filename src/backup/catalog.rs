//! A listing of a store prefix, sorted into snapshots, marks and foreign objects.
//!
//! It decides from names alone. Both layouts are read: `v2/<name>` and `v1/Backup-<unix>/<name>`.

use crate::backup::name::SnapshotName;
use crate::mvcc::Revision;
use std::collections::HashSet;

/// The folder of the layout that is written.
pub const V2: &str = "v2";
/// The folder of the old layout, which is only read.
pub const V1: &str = "v1";
/// The folder of notes on fulls that begin a timeline: `<name of the full>`.
pub const TIMELINES: &str = "deltafold-timelines";
/// The folder of pins: `<name of the full>`. A chain whose full has one is kept, whatever the policy.
pub const PINS: &str = "deltafold-pins";
/// The folder of notes on what `gc` excluded, to be purged later: `<name of the snapshot>`.
pub const REMOVED: &str = "deltafold-removed";
/// The folders of snapshots.
pub const SNAPSHOTS: [&str; 2] = [V2, V1];
/// The folders of notes on snapshots. They are listed after these: a note on the beginning of a timeline is written
/// before its full, which must not be seen without it.
pub const NOTES: [&str; 3] = [TIMELINES, PINS, REMOVED];
/// `<name>.exclude` beside a snapshot excludes it where the store has no tags.
pub const EXCLUDE_SUFFIX: &str = ".exclude";

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Below the store's prefix, with `/` between folders.
    pub path: String,
    /// Size in the store.
    pub bytes: u64,
}

/// A snapshot in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// What its name says.
    pub name: SnapshotName,
    /// Below the store's prefix.
    pub path: String,
    /// Size in the store.
    pub bytes: u64,
    /// Tagged `x-etcd-snapshot-exclude=true`, or marked so: not to be used.
    pub excluded: bool,
    /// It may be anybody's ([`Trust`](super::trust::Trust)): not to be used.
    pub untrusted: bool,
    /// Of a full: noted by who took it as the first of another history than what was saved before.
    pub begins_timeline: bool,
    /// Of a full: kept with its chain, whatever the policy.
    pub pinned: bool,
    /// Noted as removed by `gc`; it counts only where the snapshot is excluded, too.
    pub removal_noted: bool,
}

/// All that a prefix holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalog {
    /// In order of creation; of one second deltas come before fulls, lower revisions first.
    pub snapshots: Vec<Snapshot>,
    /// Objects that are none of ours and left alone.
    pub foreign: Vec<String>,
}

impl Catalog {
    /// Sorts a listing.
    pub fn from_listing(listing: Vec<Listed>) -> Self {
        let mut catalog = Catalog::default();
        let mut marks = HashSet::new();
        let (notes, objects): (Vec<Listed>, Vec<Listed>) =
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
                    removal_noted: false,
                }),
                None => match object.path.strip_suffix(EXCLUDE_SUFFIX) {
                    Some(path) if snapshot_name(path).is_some() => {
                        marks.insert(path.to_owned());
                    }
                    _ => catalog.foreign.push(object.path),
                },
            }
        }
        for s in &mut catalog.snapshots {
            s.excluded = marks.contains(&s.path);
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

    /// Of these names in [`V2`], a byte each.
    #[cfg(test)]
    pub(crate) fn of_names<S: AsRef<str>>(names: &[S]) -> Self {
        let listing = names.iter().map(|name| Listed {
            path: format!("{V2}/{}", name.as_ref()),
            bytes: 1,
        });
        Catalog::from_listing(listing.collect())
    }

    /// Takes in what the folders of notes hold.
    pub fn add_notes(&mut self, notes: &[Listed]) {
        let notes: HashSet<(&str, &str)> = notes.iter().filter_map(|o| note(&o.path)).collect();
        if notes.is_empty() {
            return;
        }
        for s in &mut self.snapshots {
            let (full, name) = (s.name.is_full(), s.name.to_string());
            let is_in = |folder| notes.contains(&(folder, name.as_str()));
            s.begins_timeline |= full && is_in(TIMELINES);
            s.pinned |= full && is_in(PINS);
            s.removal_noted |= is_in(REMOVED);
        }
    }

    /// The snapshots that may be used, as indexes, in order of creation.
    pub fn usable(&self) -> impl Iterator<Item = usize> + '_ {
        let is_usable = |s: &Snapshot| !s.excluded && !s.untrusted;
        (0..self.snapshots.len()).filter(move |&i| is_usable(&self.snapshots[i]))
    }

    /// The newest revision that a usable snapshot's name promises.
    pub fn latest_revision(&self) -> Option<Revision> {
        self.usable().map(|i| self.snapshots[i].name.last).max()
    }
}

/// The folder of a note, and the name of the snapshot that it is on.
fn note(path: &str) -> Option<(&str, &str)> {
    path.split_once('/')
        .filter(|(folder, _)| NOTES.contains(folder))
}

/// The name of the snapshot at `path`, in either layout.
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
    fn a_listing_is_sorted_into_snapshots_marks_and_strangers() {
        let paths = [
            "v2/Incr-00000011-00000020-200",
            "v2/Full-00000000-00000020-200",
            "v2/Full-00000000-00000010-100.gz",
            "v2/Full-00000000-00000010-100.gz.exclude",
            "v1/Backup-50/Full-00000000-00000001-50",
            "v1/Backup-x/Full-00000000-00000001-50",
            "v1/Full-00000000-00000001-50",
            "v2/notes.txt",
            "v2/notes.exclude",
            "v2/sub/Full-00000000-00000010-100",
            "deltafold-timelines/Full-00000000-00000020-200",
            "deltafold-pins/Full-00000000-00000010-100.gz",
            "deltafold-pins/Incr-00000011-00000020-200",
            "deltafold-removed/Incr-00000011-00000020-200",
        ];
        let listing = paths
            .map(|p| Listed {
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
        assert_eq!(c.foreign.len(), 5);
        let begins: Vec<_> = c.snapshots.iter().map(|s| s.begins_timeline).collect();
        assert_eq!(begins, [false, false, false, true]);
        let notes: Vec<_> = c
            .snapshots
            .iter()
            .map(|s| (s.pinned, s.removal_noted))
            .collect();
        let none = (false, false);
        assert_eq!(notes, [none, (true, false), (false, true), none]);
        assert_eq!(c.latest_revision(), Some(Revision(20)));
        assert_eq!(c.usable().collect::<Vec<_>>(), [0, 2, 3]);
    }
}
