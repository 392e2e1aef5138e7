//! A cache of the names in the store. Listing the store for each delta would cost more than the delta itself.
//!
//! The cache misses what others do (a compaction, `gc`) until the next listing. No snapshot depends on it:
//! publishing fails if a name is taken, and the owner of the prefix is read before each snapshot. Only
//! metrics and Leases are computed from the cached names. A listing also shows whether another snapshotter
//! writes here. Called by [`super::saver`].

use super::NewSnapshot;
use crate::backup::catalog::{V1, V2};
use crate::backup::{Catalog, Kind, ListedObject, SnapshotName};
use crate::error::Result;
use crate::prefix::scan;
use crate::store::Store;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Names in one response of a listing.
const NAMES_PER_REQUEST: usize = 1000;
/// The cost of listings: one list request for this many saved snapshots.
const SNAPSHOTS_PER_LIST_REQUEST: usize = 10;
/// A snapshot that is saved later than this after a listing causes the next one: with rare deltas, another
/// snapshotter would otherwise go unnoticed for hours.
const MAX_AGE: Duration = Duration::from_secs(10 * 60);

/// The cached names.
#[derive(Default)]
pub(super) struct KnownNames {
    /// The last listing and the snapshots saved since; empty before the first one.
    listing: Vec<ListedObject>,
    /// When the store was listed; `None` if a listing is due.
    listed: Option<Instant>,
    /// Number of snapshots saved since the last listing.
    saved: usize,
    /// The deltas that this process has saved since the last listing, and the one before.
    own: Vec<SnapshotName>,
}

/// The names in the store.
pub(super) struct Names {
    pub(super) catalog: Catalog,
    /// Whether the store was listed just now.
    pub(super) is_fresh: bool,
    /// A delta of this process, and a delta that another snapshotter has written since the last listing, if both
    /// hold the same revisions.
    pub(super) overlap: Option<(SnapshotName, SnapshotName)>,
}

impl KnownNames {
    /// Makes the next call list the store. For use after a sign that others write there.
    pub(super) fn forget(&mut self) {
        self.listed = None;
    }

    /// Adds a snapshot that was saved just now.
    pub(super) fn add(&mut self, snapshot: &NewSnapshot) {
        let name = &snapshot.name;
        if name.kind == Kind::Incr {
            // A cluster that was set back: the deltas after this revision are of the history that was left.
            self.own.retain(|own| own.last < name.start);
            self.own.push(name.clone());
        }
        if self.listing.is_empty() {
            return;
        }
        self.saved += 1;
        self.listing.push(ListedObject {
            path: format!("{V2}/{name}"),
            bytes: snapshot.bytes,
        });
        if is_due(self.saved, self.listing.len()) {
            self.listed = None;
        }
    }

    /// Returns all names.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub(super) fn names(&mut self, store: &Store) -> Result<Names> {
        if self.listed.is_some_and(|at| at.elapsed() < MAX_AGE) {
            return Ok(Names {
                catalog: Catalog::from_listing(self.listing.clone()),
                is_fresh: false,
                overlap: None,
            });
        }
        let listing = scan::list_folders(store, &[V2, V1])?;
        let before = std::mem::replace(&mut self.listing, listing);
        self.listed = Some(Instant::now());
        self.saved = 0;
        let catalog = Catalog::from_listing(self.listing.clone());
        // What the first listing shows was there when this process began.
        let overlap = match before.is_empty() {
            true => None,
            false => overlap(&self.own, &before, &catalog),
        };
        self.own.drain(..self.own.len().saturating_sub(1));
        Ok(Names {
            catalog,
            is_fresh: true,
            overlap,
        })
    }
}

/// Returns the newest delta that was not there `before` and repeats revisions of an `own` one, after the own
/// one.
fn overlap(
    own: &[SnapshotName],
    before: &[ListedObject],
    now: &Catalog,
) -> Option<(SnapshotName, SnapshotName)> {
    let known: HashSet<&str> = before.iter().map(|o| o.path.as_str()).collect();
    for snapshot in now.snapshots.iter().rev() {
        let name = &snapshot.name;
        let is_new = name.kind == Kind::Incr
            && !known.contains(snapshot.path.as_str())
            && !own.contains(name);
        let repeats = |own: &&SnapshotName| own.start <= name.last && name.start <= own.last;
        if is_new && let Some(own) = own.iter().rev().find(repeats) {
            return Some((own.clone(), name.clone()));
        }
    }
    None
}

/// Whether a store with this many objects is due for a listing, after `saved` new snapshots.
fn is_due(saved: usize, objects: usize) -> bool {
    // Two folders are listed, each with at least one request.
    let requests = objects / NAMES_PER_REQUEST + 2;
    saved >= requests * SNAPSHOTS_PER_LIST_REQUEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_costs_a_tenth_of_a_request_per_delta() {
        for (objects, saved) in [(0, 20), (999, 20), (1000, 30), (26_000, 280)] {
            assert!(!is_due(saved - 1, objects), "{objects}");
            assert!(is_due(saved, objects), "{objects}");
        }
    }

    #[test]
    fn a_new_delta_of_somebody_else_that_repeats_revisions_is_an_overlap() {
        let name = |n: &str| -> SnapshotName { n.parse().unwrap() };
        let object = |n: &str| ListedObject {
            path: format!("{V2}/{n}"),
            bytes: 1,
        };
        let (own, older) = ("Incr-00000011-00000020-30", "Incr-00000005-00000012-20");
        let found = |other: &str| {
            let now = Catalog::from_listing([own, older, other].map(object).into());
            let found = overlap(&[name(own)], &[object(own), object(older)], &now);
            found.map(|(_, other)| other)
        };
        for repeats in ["Incr-00000011-00000020-31", "Incr-00000020-00000025-40"] {
            assert_eq!(found(repeats), Some(name(repeats)));
        }
        let others = ["Incr-00000021-00000025-40", "Full-00000000-00000015-40"];
        for other in others.into_iter().chain([own, older]) {
            assert_eq!(found(other), None, "{other}");
        }
    }
}
