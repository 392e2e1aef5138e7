//! Publishes the progress of snapshots as metrics.
//!
//! It does not read etcd, and of the store the records of verifications alone.

use super::NewSnapshot;
use super::next::FullReason;
use crate::backup::Catalog;
use crate::backup::timeline::Timeline;
use crate::error::Result;
use crate::mvcc::Revision;
use crate::ops::verify::record::{self, RecordLevel, RecordResult};
use crate::prefix::contents::Contents;
use crate::prefix::restorable::{Bases, Restorable};
use crate::store::Store;
use crate::telemetry::metrics::{Metrics, RestorableWindow, SavedSnapshot};
use chrono::Utc;

/// Updates the metrics of snapshots.
#[derive(Clone, Default)]
pub struct MetricsReporter {
    pub(super) metrics: Metrics,
}

impl MetricsReporter {
    /// Returns a reporter that updates `metrics`.
    pub fn new(metrics: Metrics) -> Self {
        MetricsReporter { metrics }
    }

    /// Counts snapshots that were saved.
    pub(super) fn count_saved(&self, snapshots: &[NewSnapshot], full: Option<FullReason>) {
        for snapshot in snapshots {
            self.metrics.snapshot_saved(&SavedSnapshot {
                kind: snapshot.kind(),
                at: Utc::now(),
                revision: snapshot.name.last.0,
                stored_bytes: snapshot.bytes,
                uncompressed_bytes: Some(snapshot.uncompressed_bytes),
            });
            self.metrics.events_saved(snapshot.events);
            self.metrics.etcd_read(snapshot.uncompressed_bytes);
            self.metrics.store_written(snapshot.bytes);
        }
        if let Some(reason) = full {
            self.metrics.full_saved(&format!("{reason:?}"));
        }
    }

    /// Publishes when a verification last compared each full with the chain before it.
    pub(super) fn set_history_proven(&self, store: &Store) -> Result<()> {
        if let Ok(Some(record)) = record::read(store, RecordLevel::Fold)?
            && record.result == RecordResult::Verified
            && record.all_chains
        {
            self.metrics.history_proven(record.time);
        }
        Ok(())
    }

    /// Publishes the restorable range, by names, that contains the revision `last`.
    pub(super) fn set_restorable(&self, catalog: &Catalog, timeline: &Timeline, last: Revision) {
        let ranges = Bases::default().restorable(catalog, &Contents::default(), timeline);
        let holds = |r: &&Restorable| r.first_revision <= last && last <= r.last_revision;
        let Some(range) = ranges.iter().find(holds) else {
            return;
        };
        self.metrics.restorable(&RestorableWindow {
            first_revision: range.first_revision.0,
            last_revision: range.last_revision.0,
            first_time: Some(range.first_time),
            last_time: Some(Utc::now()),
        });
    }
}
