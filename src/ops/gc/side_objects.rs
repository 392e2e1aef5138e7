//! Side objects of a backup: notes, exclusion markers and staging objects, and why each is kept or deleted.
//!
//! `ops::gc::plan` decides on them, `ops::gc::apply` deletes them.

use super::Kind;

/// Why a note, marker or staging object is kept or deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SideReason {
    BelongsToSnapshot,
    Young,
    InUse,
    BelongsToRemoved,
    Orphaned,
    Abandoned,
}

impl SideReason {
    pub(super) fn keeps(self) -> bool {
        matches!(
            self,
            SideReason::BelongsToSnapshot | SideReason::Young | SideReason::InUse
        )
    }

    /// Returns the reason's name, and a text.
    pub(super) fn describe(self) -> (&'static str, &'static str) {
        match self {
            SideReason::BelongsToSnapshot => {
                ("BelongsToSnapshot", "it belongs to a snapshot that is kept")
            }
            SideReason::Young => (
                "Young",
                "it belongs to no snapshot, but is not older than --staging-age: the snapshot may still be uploaded",
            ),
            SideReason::InUse => ("InUse", "it belongs to an upload that may still be running"),
            SideReason::BelongsToRemoved => (
                "BelongsToRemoved",
                "it belongs to a snapshot that is removed",
            ),
            SideReason::Orphaned => ("Orphaned", "it belongs to no snapshot"),
            SideReason::Abandoned => (
                "Abandoned",
                "it belongs to an upload that was not completed",
            ),
        }
    }
}

/// A side object: a note, an exclusion marker or a staging object.
#[derive(Debug)]
pub(super) struct SideObject {
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) kind: Kind,
    pub(super) reason: SideReason,
    /// The indexes of the snapshots that it is about.
    pub(super) snapshots: Vec<usize>,
}
