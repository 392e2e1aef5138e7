//! What is told of snapshots as they are saved, in metrics.

use super::Written;
use super::event_queue::Pulse;
use super::next::FullReason;
use crate::backup::chain::{self, KnownBases};
use crate::backup::timeline::Timeline;
use crate::backup::{Catalog, Kind, SnapshotName};
use crate::mvcc::Revision;
use crate::telemetry::metrics::{Metrics, RestorableWindow, SavedSnapshot};
use chrono::{DateTime, TimeDelta, Utc};
use std::time::{Duration, Instant};

/// Who is told.
#[derive(Clone, Default)]
pub struct Tell {
    pub(super) metrics: Metrics,
}

impl Tell {
    /// Tells these metrics.
    pub fn new(metrics: Metrics) -> Self {
        Tell { metrics }
    }

    /// How far a follower is: `saved` is the last revision in the store, `since` when the oldest event that
    /// is not came.
    pub(super) fn pulse(&self, pulse: &Pulse, saved: i64, since: Option<Instant>) {
        let ago = |d: Duration| {
            let ago = TimeDelta::from_std(d).unwrap_or(TimeDelta::MAX);
            Utc::now().checked_sub_signed(ago)
        };
        // Where nothing can be watched, what is missed began then, whatever it is.
        let down: Option<DateTime<Utc>> = pulse.down_for.and_then(ago);
        let oldest = since.map(|s| s.elapsed()).and_then(ago);
        let oldest = [oldest, down].into_iter().flatten().min();
        let unsaved = u64::try_from(pulse.current - saved).unwrap_or(0);
        self.metrics.unsaved(unsaved, oldest);
        self.metrics
            .buffered(pulse.buffered_bytes, pulse.spooled_bytes);
    }

    /// Snapshots that are in the store now.
    pub(super) fn saved(&self, written: &[Written], full: Option<FullReason>) {
        for w in written {
            let kind = w.kind();
            self.metrics.snapshot_saved(&SavedSnapshot {
                kind,
                at: Utc::now(),
                revision: w.name.last.0,
                stored_bytes: w.bytes,
                uncompressed_bytes: Some(w.uncompressed_bytes),
            });
            self.metrics.events_saved(w.events);
            self.metrics.etcd_read(w.uncompressed_bytes);
            self.metrics.store_written(w.bytes);
        }
        if let Some(reason) = full {
            self.metrics.full_saved(&format!("{reason:?}"));
        }
    }

    /// What can be restored, by names, of the history that ends with `last`.
    pub(super) fn restorable(&self, catalog: &Catalog, timeline: &Timeline, last: Revision) {
        let ranges = chain::restorable(catalog, timeline, &KnownBases::new());
        let Some(&(first, last)) = ranges.iter().find(|r| r.0 <= last && last <= r.1) else {
            return;
        };
        let names = timeline
            .members
            .iter()
            .map(|m| &catalog.snapshots[m.snapshot].name);
        let fulls = names.filter(|n| n.kind == Kind::Full && n.last >= first && n.last <= last);
        self.metrics.restorable(&RestorableWindow {
            first_revision: first.0,
            last_revision: last.0,
            first_time: fulls.map(SnapshotName::created_at).min(),
            last_time: Some(Utc::now()),
        });
    }
}
