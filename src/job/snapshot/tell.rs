//! What is told of snapshots as they are saved, in metrics.

use super::Written;
use super::queue::Pulse;
use super::saved::FullReason;
use crate::error::Reason;
use crate::job::Context;
use crate::job::list;
use crate::mvcc::Revision;
use crate::telemetry::metrics::{Metrics, SavedSnapshot, SnapshotKind, Window};
use chrono::{DateTime, TimeDelta, Utc};
use std::time::{Duration, Instant};

/// Who is told.
#[derive(Clone, Default)]
pub struct Tell {
    metrics: Metrics,
}

impl Tell {
    /// Tells these metrics.
    pub fn new(metrics: Metrics) -> Self {
        Tell { metrics }
    }

    pub(super) fn lock_held(&self, held: bool) {
        self.metrics.lock_held(held);
    }

    pub(super) fn failed(&self, operation: &'static str, reason: Reason) {
        self.metrics.failed(operation, reason);
    }

    pub(super) fn took(&self, kind: SnapshotKind, time: Duration, succeeded: bool) {
        self.metrics.snapshot_took(kind, time, succeeded);
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
        self.metrics.buffered(pulse.buffered_bytes);
    }

    pub(super) fn reconnected(&self) {
        self.metrics.reconnected();
    }

    /// Snapshots that are in the store now.
    pub(super) fn saved(&self, ctx: &Context, written: &[Written], full: Option<FullReason>) {
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
        if let Some(last) = written.iter().map(|w| w.name.last).max() {
            self.restorable(ctx, last);
        }
    }

    /// What can be restored, by names, of the history that ends with `last`.
    fn restorable(&self, ctx: &Context, last: Revision) {
        let listed = match list::run(ctx, list::Options { deep: false }) {
            Ok(listed) => listed,
            Err(e) => {
                tracing::warn!("what can be restored cannot be told: {e}");
                return;
            }
        };
        let range = listed
            .restorable
            .iter()
            .rev()
            .find(|r| r.first_revision <= last && r.last_revision >= last);
        if let Some(r) = range {
            self.metrics.restorable(&Window {
                first_revision: r.first_revision.0,
                last_revision: r.last_revision.0,
                first_time: Some(r.first_time),
                last_time: Some(r.last_time),
            });
        }
    }
}
