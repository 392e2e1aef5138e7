//! What can be restored, as `gc` and `verify` tell it.

use crate::backup::chain::Range;
use crate::backup::timeline::Timeline;
use crate::mvcc::Revision;
use schemars::JsonSchema;
use serde::Serialize;

/// Revisions that can be restored.
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
    /// Of a timeline's ranges.
    pub(super) fn of(timeline: &Timeline, ranges: Vec<Range>) -> impl Iterator<Item = Self> {
        ranges.into_iter().map(|(first, last)| Restorable {
            timeline: timeline.id.clone(),
            first_revision: first,
            last_revision: last,
        })
    }
}
