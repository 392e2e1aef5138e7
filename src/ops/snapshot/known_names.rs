//! The names in a store, kept from one delta to the next: a listing for each would cost more than the delta.
//!
//! What others do meanwhile (a compaction, `gc`) is seen by the next listing. Nothing that is saved depends on
//! it: a name is given on condition that it is free, whose backup it is is read before each snapshot, and
//! metrics and Leases are all that is told from these names.

use super::Written;
use crate::backup::catalog::{V1, V2};
use crate::backup::{Catalog, ListedObject};
use crate::error::Result;
use crate::ops::scan;
use crate::store::Store;

/// Names in one answer of a listing.
const PAGE: usize = 1000;
/// Snapshots to save for each request of a listing before the next one: a tenth of a request each.
const SAVED_A_REQUEST: usize = 10;

/// See the module.
#[derive(Default)]
pub(super) struct Names {
    /// As listed last, with what was saved since; `None` if a listing is due.
    listing: Option<Vec<ListedObject>>,
    saved: usize,
}

impl Names {
    /// They are listed again: something was not as expected.
    pub(super) fn forget(&mut self) {
        self.listing = None;
    }

    pub(super) fn add(&mut self, written: &Written) {
        let Some(listing) = &mut self.listing else {
            return;
        };
        self.saved += 1;
        listing.push(ListedObject {
            path: format!("{V2}/{}", written.name),
            bytes: written.bytes,
        });
        if is_due(self.saved, listing.len()) {
            self.listing = None;
        }
    }

    /// All of them, and whether they were listed just now.
    ///
    /// # Errors
    /// The store's.
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

/// Whether a store of so many objects is listed again.
fn is_due(saved: usize, objects: usize) -> bool {
    // Two folders are listed.
    let requests = objects / PAGE + 2;
    saved >= requests * SAVED_A_REQUEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_costs_a_tenth_of_a_request_a_delta() {
        for (objects, saved) in [(0, 20), (999, 20), (1000, 30), (26_000, 280)] {
            assert!(!is_due(saved - 1, objects), "{objects}");
            assert!(is_due(saved, objects), "{objects}");
        }
    }
}
