//! Publishes the progress of snapshots as metrics.
//!
//! It does not read etcd, and of the store the records of verifications alone.

use super::NewSnapshot;
use super::event_queue::WatchStatus;
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
use chrono::{DateTime, TimeDelta, Utc};
use std::time::{Duration, Instant};

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

    /// Publishes how far a follower is. `last_saved` is the last revision in the store; `oldest_unsaved` is
    /// when the oldest unsaved event arrived.
    pub(super) fn set_watch_status(
        &self,
        status: &WatchStatus,
        last_saved: i64,
        oldest_unsaved: Option<Instant>,
    ) {
        let unsaved_since = oldest_unsaved.and_then(|at| time_before_now(at.elapsed()));
        // While the watch is down, unseen events may be as old as the outage.
        let down_since = status.down_for.and_then(time_before_now);
        let oldest = [unsaved_since, down_since].into_iter().flatten().min();
        let unsaved = u64::try_from(status.current - last_saved).unwrap_or(0);
        self.metrics.unsaved(unsaved, oldest);
        self.metrics.spooled(status.waiting_bytes);
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

/// Returns the time that was this long ago; `None` if it is out of range.
fn time_before_now(ago: Duration) -> Option<DateTime<Utc>> {
    let ago = TimeDelta::from_std(ago).unwrap_or(TimeDelta::MAX);
    Utc::now().checked_sub_signed(ago)
}
