//! Side objects of a backup: notes, exclusion marks, temporary objects and incomplete uploads, and why each is
//! kept or deleted.
//!
//! `ops::gc::plan` and `ops::gc::apply` decide on them, `ops::gc::apply` deletes them.

use super::{Decision, Kind, Object};
use crate::base::opt;
use crate::prefix::side_objects::is_ours;
use crate::store::UnfinishedUpload;
use chrono::{DateTime, TimeDelta, Utc};
use std::borrow::Cow;

/// Why a note, an exclusion mark or a temporary object is kept or deleted.
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
    pub(super) fn describe(self) -> (&'static str, Cow<'static, str>) {
        let (name, text) = match self {
            SideReason::BelongsToSnapshot => {
                ("BelongsToSnapshot", "it belongs to a snapshot that is kept")
            }
            SideReason::Young => (
                "Young",
                "it belongs to no snapshot, but is not older than {staging-age}: the snapshot may still be uploaded",
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
        };
        (name, opt::fill(text))
    }
}

/// A side object: a note, an exclusion mark or a temporary object.
#[derive(Debug)]
pub(super) struct SideObject {
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) kind: Kind,
    pub(super) reason: SideReason,
    /// The indexes of the snapshots that it is about.
    pub(super) snapshots: Vec<usize>,
}

/// Returns an incomplete upload's path in the outcome.
pub(super) fn upload_path(u: &UnfinishedUpload) -> String {
    format!("{}?uploadId={}", u.path, u.id)
}

/// Decides on an incomplete upload: it is deleted if it is older than `age`. Returns `None` if it is not
/// deltafold's.
pub(super) fn decide_upload(
    u: &UnfinishedUpload,
    age: TimeDelta,
    now: DateTime<Utc>,
) -> Option<Object> {
    if !is_ours(&u.path) {
        return None;
    }
    let reason = if now - u.begun > age {
        SideReason::Abandoned
    } else {
        SideReason::InUse
    };
    let decision = Decision::from_keeps(reason.keeps());
    let path = upload_path(u);
    Some(Object::new(
        path,
        Kind::Upload,
        0,
        decision,
        reason.describe(),
    ))
}
