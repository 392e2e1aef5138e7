//! The snapshots that retention keeps so far, and why.

use super::reason::RetentionReason;
use super::timeline_snapshots::TimelineSnapshots;
use crate::mvcc::Revision;
use std::collections::BTreeSet;

/// The snapshots that are kept so far: for each the reason of the first rule that keeps it.
pub(super) struct KeepReasons {
    pub(super) reasons: Vec<Option<RetentionReason>>,
    /// Fulls that make other snapshots superfluous.
    pub(super) rests_on: BTreeSet<usize>,
}

impl KeepReasons {
    pub(super) fn keep(&mut self, i: usize, reason: RetentionReason) {
        self.reasons[i].get_or_insert(reason);
    }

    pub(super) fn has(&self, i: usize) -> bool {
        self.reasons[i].is_some()
    }

    /// Keeps the deltas after a pinned full of this revision, up to the next full.
    pub(super) fn keep_pinned_chain(&mut self, snapshots: &TimelineSnapshots, full: Revision) {
        for delta in snapshots.deltas_after(full) {
            self.keep(delta, RetentionReason::Pinned);
        }
        self.rests_on
            .extend(snapshots.full_above(full).map(|b| b.snapshot));
    }

    /// Keeps everything that is needed to restore `goal` and all revisions above it.
    pub(super) fn keep_from(
        &mut self,
        snapshots: &TimelineSnapshots,
        goal: Revision,
        reason: RetentionReason,
    ) {
        let oldest_base = snapshots.oldest_base_needed(goal);
        for base in &snapshots.bases {
            // Several bases of one revision differ only by content, so all of them are kept.
            if base.last >= goal || base.last == oldest_base {
                self.keep(base.snapshot, reason);
            }
            if base.last == oldest_base {
                self.rests_on.insert(base.snapshot);
            }
        }
        let nearest = snapshots.bases.iter().rev().find(|b| b.last <= goal);
        let nearest = nearest.map(|b| b.last);
        for base in snapshots.bases.iter().filter(|b| Some(b.last) == nearest) {
            self.keep(base.snapshot, reason);
            self.rests_on.insert(base.snapshot);
        }
        for d in snapshots.deltas.iter().filter(|d| d.last > oldest_base) {
            self.keep(d.snapshot, reason);
        }
    }
}
