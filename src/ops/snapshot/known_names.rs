//! A cache of the names in the store. Listing the store for each delta would cost more than the delta itself.
//!
//! The cache misses what others do (a compaction, `gc`) until the next listing. No snapshot depends on it:
//! publishing fails if a name is taken, and the owner of the prefix is read before each snapshot. Only
//! metrics and Leases are computed from the cached names. Called by [`super::saver`].

use super::NewSnapshot;
use crate::backup::catalog::{V1, V2};
use crate::backup::{Catalog, ListedObject};
use crate::error::Result;
use crate::ops::scan;
use crate::store::Store;

/// Names in one response of a listing.
const NAMES_PER_REQUEST: usize = 1000;
/// The cost of listings: one list request for this many saved snapshots.
const SNAPSHOTS_PER_LIST_REQUEST: usize = 10;

/// The cached names.
#[derive(Default)]
pub(super) struct KnownNames {
    /// The last listing and the snapshots saved since; `None` if a listing is due.
    listing: Option<Vec<ListedObject>>,
    /// Number of snapshots saved since the last listing.
    saved: usize,
}

impl KnownNames {
    /// Drops the cache, so that the next call lists the store. For use after a sign that others write there.
    pub(super) fn forget(&mut self) {
        self.listing = None;
    }

    /// Adds a snapshot that was saved just now.
    pub(super) fn add(&mut self, snapshot: &NewSnapshot) {
        let Some(listing) = &mut self.listing else {
            return;
        };
        self.saved += 1;
        listing.push(ListedObject {
            path: format!("{V2}/{}", snapshot.name),
            bytes: snapshot.bytes,
        });
        if is_due(self.saved, listing.len()) {
            self.listing = None;
        }
    }

    /// Returns the catalog of all names, and whether the store was listed just now.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub(super) fn catalog(&mut self, store: &Store) -> Result<(Catalog, bool)> {
        if let Some(listing) = &self.listing {
            return Ok((Catalog::from_listing(listing.clone()), false));
        }
        let listing = scan::list_folders(store, &[V2, V1])?;
        self.saved = 0;
        Ok((
            Catalog::from_listing(self.listing.insert(listing).clone()),
            true,
        ))
    }
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
}
