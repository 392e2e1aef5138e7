//! What a listing shows that nobody could use: deltas without what they follow.

use deltafold::backup::{Catalog, Kind, ListedObject};
use std::collections::HashSet;

/// The paths of usable deltas behind which no full leads, by names alone.
pub fn baseless(catalog: &Catalog) -> Vec<String> {
    let usable: Vec<_> = catalog.snapshots.iter().filter(|s| !s.excluded).collect();
    let mut has_base = HashSet::new();
    loop {
        let before = has_base.len();
        for (i, s) in usable.iter().enumerate() {
            let follows = |(j, p): (usize, &&&deltafold::backup::Snapshot)| {
                has_base.contains(&j)
                    && p.name.last.0 >= s.name.start.0 - 1
                    && p.name.last < s.name.last
            };
            if s.name.kind == Kind::Full || usable.iter().enumerate().any(|(j, p)| follows((j, &p)))
            {
                has_base.insert(i);
            }
        }
        if has_base.len() == before {
            break;
        }
    }
    let without = (0..usable.len()).filter(|i| !has_base.contains(i));
    without.map(|i| usable[i].path.clone()).collect()
}

/// The paths of usable deltas that follow no full at all, whatever is between.
pub fn without_full(catalog: &Catalog) -> Vec<String> {
    let usable = || catalog.snapshots.iter().filter(|s| !s.excluded);
    let fulls: Vec<_> = usable().filter(|s| s.name.kind == Kind::Full).collect();
    let deltas = usable().filter(|s| s.name.kind == Kind::Incr);
    let lost = deltas.filter(|d| !fulls.iter().any(|f| f.name.last < d.name.last));
    lost.map(|d| d.path.clone()).collect()
}

/// As a store lists it.
pub fn catalog<'p>(paths: impl IntoIterator<Item = &'p String>) -> Catalog {
    let listing = paths.into_iter().map(|path| ListedObject {
        path: path.clone(),
        bytes: 1,
    });
    Catalog::from_listing(listing.collect())
}
