//! The revisions that can be restored, as a field of reports.
//!
//! Nothing is computed here. Called by `gc` and `verify`.

use crate::backup::chain::RevisionRange;
use crate::backup::timeline::Timeline;
use crate::mvcc::Revision;
use schemars::JsonSchema;
use serde::Serialize;

/// A range of revisions that can be restored.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Restorable {
    /// The timeline's ID.
    pub timeline: String,
    /// The oldest revision.
    pub first_revision: Revision,
    /// The newest revision.
    pub last_revision: Revision,
}

impl Restorable {
    /// Returns the ranges of a timeline as fields of a report.
    pub(super) fn of(
        timeline: &Timeline,
        ranges: Vec<RevisionRange>,
    ) -> impl Iterator<Item = Self> {
        ranges.into_iter().map(|(first, last)| Restorable {
            timeline: timeline.id.clone(),
            first_revision: first,
            last_revision: last,
        })
    }
}
