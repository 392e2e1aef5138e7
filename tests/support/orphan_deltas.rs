//! Finds orphan deltas in a listing: deltas that no full leads to.

use deltafold::backup::{Catalog, Kind, ListedObject};
use std::collections::HashSet;

/// Returns the paths of usable deltas that no chain reaches, judged by names.
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

/// Returns the paths of usable deltas that have no full before them, even if deltas are missing in between.
pub fn without_full(catalog: &Catalog) -> Vec<String> {
    let usable = || catalog.snapshots.iter().filter(|s| !s.excluded);
    let fulls: Vec<_> = usable().filter(|s| s.name.kind == Kind::Full).collect();
    let deltas = usable().filter(|s| s.name.kind == Kind::Incr);
    let lost = deltas.filter(|d| !fulls.iter().any(|f| f.name.last < d.name.last));
    lost.map(|d| d.path.clone()).collect()
}

/// Builds a catalog from paths.
pub fn catalog<'p>(paths: impl IntoIterator<Item = &'p String>) -> Catalog {
    let listing = paths.into_iter().map(|path| ListedObject {
        path: path.clone(),
        bytes: 1,
    });
    Catalog::from_listing(listing.collect())
}
