//! What is kept beside snapshots and goes with them: that a full begins a timeline, that it is pinned,
//! that a snapshot is excluded.
//!
//! Whoever sees a snapshot in the target must not see it without the first and the last of them.

use super::plan::Planned;
use crate::backup::Snapshot;
use crate::backup::catalog::{EXCLUDE_SUFFIX, PINS, TIMELINES};
use crate::error::{Reason, Result};
use crate::store::Store;

/// A note is a line for people.
const MOST_BYTES: u64 = 64 << 10;

/// Carries notes from store to store. All methods fail with the errors of both.
pub(super) struct Notes<'a> {
    pub(super) from: &'a Store,
    pub(super) to: &'a Store,
}

impl Notes<'_> {
    /// Writes what comes before a snapshot has its name.
    pub(super) fn before(&self, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
        if snapshot.begins_timeline {
            self.carry(TIMELINES, planned, snapshot)?;
        }
        if snapshot.excluded {
            self.create(&format!("{}{EXCLUDE_SUFFIX}", planned.path), b"")?;
        }
        Ok(())
    }

    /// Writes what comes once it has it.
    pub(super) fn after(&self, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
        if snapshot.excluded {
            // Other tools may know the store's own mark alone.
            self.to.set_excluded(&planned.path, true)?;
        }
        if snapshot.pinned {
            self.carry(PINS, planned, snapshot)?;
        }
        Ok(())
    }

    /// Of a full that the target has already: writes notes that it lacks.
    pub(super) fn keep(
        &self,
        planned: &Planned,
        snapshot: &Snapshot,
        there: &Snapshot,
    ) -> Result<()> {
        if snapshot.begins_timeline && !there.begins_timeline {
            self.carry(TIMELINES, planned, snapshot)?;
        }
        if snapshot.pinned && !there.pinned {
            self.carry(PINS, planned, snapshot)?;
        }
        Ok(())
    }

    fn carry(&self, folder: &str, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
        let note = format!("{folder}/{}", snapshot.name);
        let Some(text) = self.from.read_small(&note, MOST_BYTES)? else {
            // Another look tells whether it still counts.
            return Err(Reason::SnapshotVanished.error(format!(
                "{} was listed and is gone: it was deleted meanwhile; run again",
                self.from.name(&note)
            )));
        };
        self.create(&format!("{folder}/{}", planned.name), &text)
    }

    /// Writes a note, unless it is there.
    fn create(&self, path: &str, text: &[u8]) -> Result<()> {
        if !self.to.exists(path)? {
            self.to.create_small(path, text)?;
        }
        Ok(())
    }
}
