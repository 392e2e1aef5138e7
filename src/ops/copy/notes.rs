//! The notes that are copied with snapshots: that a full begins a timeline, that it is pinned, that a
//! snapshot is excluded.
//!
//! If a reader sees a snapshot in the target, it must also see the walls before it, and whether it is excluded.

use super::Listings;
use super::plan::{Decision, Plan, Planned};
use crate::backup::Snapshot;
use crate::backup::catalog::{PINS, Wall, mark_of};
use crate::error::{Reason, Result};
use crate::store::Store;
use std::collections::HashSet;

/// The largest note that is copied, in bytes.
const MOST_BYTES: u64 = 64 << 10;

/// Copies notes from store to store. All methods fail with the errors of both.
pub(super) struct Notes<'a> {
    pub(super) from: &'a Store,
    pub(super) to: &'a Store,
}

impl Notes<'_> {
    /// Copies what the target lacks before any snapshot is copied: records of timelines, and the pins of fulls that it
    /// already has.
    pub(super) fn copy_missing(&self, listings: &Listings, plan: &Plan) -> Result<()> {
        let Listings { source, target } = listings;
        let place = |wall: &Wall| (wall.second, wall.revision);
        let in_target: HashSet<_> = target.walls.iter().map(place).collect();
        for wall in source
            .walls
            .iter()
            .filter(|w| !in_target.contains(&place(w)))
        {
            // If it was deleted meanwhile, no snapshot before it is left.
            if let Some(record) = self.from.read_small(&wall.path, MOST_BYTES)? {
                self.create(&wall.path, &record)?;
            }
        }
        for planned in &plan.objects {
            let snapshot = &source.snapshots[planned.source];
            let lacks_pin = |t: &Snapshot| t.path == planned.path && !t.pinned;
            if planned.decision == Decision::Keep
                && snapshot.pinned
                && target.snapshots.iter().any(lacks_pin)
            {
                self.copy(PINS, planned, snapshot)?;
            }
        }
        Ok(())
    }

    /// Writes the notes that must exist before a snapshot has its name.
    pub(super) fn before(&self, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
        if snapshot.excluded {
            self.create(&mark_of(&planned.path), b"")?;
        }
        Ok(())
    }

    /// Writes the notes that follow when a snapshot has its name.
    pub(super) fn after(&self, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
        if snapshot.excluded {
            // Other tools may know only the store's tag.
            self.to.exclude(&planned.path, &mark_of(&planned.path))?;
        }
        if snapshot.pinned {
            self.copy(PINS, planned, snapshot)?;
        }
        Ok(())
    }

    /// Copies the note about a snapshot in this folder.
    fn copy(&self, folder: &str, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
        let note = format!("{folder}/{}", snapshot.name);
        let Some(text) = self.from.read_small(&note, MOST_BYTES)? else {
            // Another listing shows whether the note still counts.
            return Err(Reason::SnapshotVanished.error(format!(
                "{} was deleted during the run: run again",
                self.from.name(&note)
            )));
        };
        self.create(&format!("{folder}/{}", planned.name), &text)
    }

    /// Writes a note, unless it exists.
    fn create(&self, path: &str, text: &[u8]) -> Result<()> {
        if !self.to.exists(path)? {
            self.to.create_small(path, text)?;
        }
        Ok(())
    }
}
