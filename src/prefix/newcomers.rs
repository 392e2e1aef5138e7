//! Write, then look: what others have written since a writer looked at a prefix.
//!
//! A writer looks before it gives a snapshot its name, and again afterwards. So of two at the same time at least one
//! sees the other. The records of timelines and the fulls tell all that matters: two small listings.

use crate::backup::catalog::{ListedObject, Snapshot, V2, Wall, mark_of};
use crate::backup::{Catalog, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::prefix::{Context, timeline_records};
use crate::store::Store;
use std::collections::HashSet;

/// The beginning of the names of fulls.
const FULLS: &str = "Full-";

/// The longest time in seconds between the last delta of a run and its full.
const SECONDS_OF_A_RUN: i64 = 5;

/// The records and the snapshots that a writer knows, by their paths.
#[derive(Debug, Default)]
pub(crate) struct KnownNames(HashSet<String>);

/// What a writer did not know.
#[derive(Debug, Default)]
pub(crate) struct Newcomers {
    /// In order of time.
    pub(crate) records: Vec<Wall>,
    /// In order of time.
    pub(crate) fulls: Vec<Snapshot>,
}

impl KnownNames {
    /// Knows what is in a catalog.
    pub(crate) fn of(catalog: &Catalog) -> Self {
        let snapshots = catalog.snapshots.iter().map(|s| s.path.clone());
        let records = catalog.walls.iter().map(|w| w.path.clone());
        KnownNames(snapshots.chain(records).collect())
    }

    pub(crate) fn has(&self, path: &str) -> bool {
        self.0.contains(path)
    }

    pub(crate) fn add(&mut self, path: String) {
        self.0.insert(path);
    }

    /// Lists the records that are not known, in order of time.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub(crate) fn new_records(&self, store: &Store) -> Result<Vec<Wall>> {
        let mut records = timeline_records::list(store)?;
        records.retain(|record| !self.0.contains(&record.path));
        Ok(records)
    }

    /// Lists the records and the fulls that are not known.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub(crate) fn look(&self, store: &Store) -> Result<Newcomers> {
        let records = self.new_records(store)?;
        let listed = store.objects_beginning(V2, FULLS)?.into_iter();
        let listed = listed.map(|object| ListedObject {
            path: object.path,
            bytes: object.bytes,
        });
        let mut fulls = Catalog::from_listing(listed.collect()).snapshots;
        fulls.retain(|full| !full.excluded && !self.0.contains(&full.path));
        Ok(Newcomers { records, fulls })
    }
}

/// Returns whether a full came from the snapshots up to this second, by its name: the result of a compaction has the next
/// second, and the full of a run that saved the deltas up to it has one of the next. A cluster is not set back so quickly.
pub(crate) fn came_from(full: &SnapshotName, newest: i64) -> bool {
    full.created <= newest.saturating_add(SECONDS_OF_A_RUN)
}

/// Excludes a snapshot that is on the wrong side of another history, and returns the error that says so.
pub(crate) fn withdraw(ctx: &Context, path: &str, why: &str) -> Error {
    match ctx.store.exclude(path, &mark_of(path)) {
        Ok(()) => Reason::Conflict.error(format!(
            "{path} got its name while {why}: it is excluded; run again"
        )),
        Err(e) => e.reason().error(format!(
            "{path} got its name while {why}, and it must be excluded: {e}"
        )),
    }
}
