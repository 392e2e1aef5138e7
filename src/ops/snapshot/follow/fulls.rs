//! The fulls of a session: when one is due, how deltas lead up to it, and what happens if one fails.
//!
//! `ops::snapshot::full` takes the full itself. Called by [`super::session`].

use super::MissedFull;
use super::session::{CATCH_UP, Session};
use super::{FULL, new_back_offs};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::feed::{Ended, Known};
use crate::mvcc::Revision;
use crate::ops::snapshot::full::UnpublishedFull;
use crate::ops::snapshot::next::{Continuity, FullCause, FullReason};
use crate::telemetry::metrics::SnapshotKind;
use chrono::Utc;
use std::time::Instant;

/// Returns the error for a new full whose last changes cannot be read, so that no watch can continue after
/// it.
fn no_position_after_full() -> Error {
    Error::internal("the changes of a new full's last revision cannot be read")
}

impl Session<'_, '_> {
    /// Takes a full that no delta leads to, with retries until it is saved. Returns what a watch compares that
    /// continues after it.
    pub(super) fn take_full_until_saved(&mut self, cause: FullCause) -> Result<Known> {
        loop {
            let started = Instant::now();
            let new_full = self.saver.take_full();
            match new_full.and_then(|full| self.publish(full, cause.clone(), false)) {
                Ok(known) => return known.ok_or_else(no_position_after_full),
                Err(e) if e.reason() == Reason::Conflict => return Err(e),
                Err(e) => {
                    self.record_duration(started, false);
                    self.follower.wait_after(FULL, e)?;
                }
            }
            self.update_metrics();
            if self.follower.is_stopped() {
                return Err(Reason::Terminated
                    .error("ended by a signal before a full snapshot could be taken"));
            }
            if self.lock.is_lost() {
                self.lock.check()?;
            }
        }
    }

    /// Records in the metrics how long a full took.
    fn record_duration(&self, started: Instant, succeeded: bool) {
        let metrics = &self.follower.reporter.metrics;
        metrics.snapshot_took(SnapshotKind::Full, started.elapsed(), succeeded);
    }

    /// Publishes a full and schedules the next one. Returns what a watch compares that continues after it.
    fn publish(
        &mut self,
        new_full: UnpublishedFull,
        cause: FullCause,
        is_final: bool,
    ) -> Result<Option<Known>> {
        self.wait_for_lock()?;
        let started = new_full.started;
        let known = self.saver.publish_full(new_full, cause, is_final)?;
        if self.saver.summary().timeline_began {
            // The log of another history.
            self.follower.raft = None;
        }
        self.follower.back_offs = new_back_offs();
        self.full_retry_at = None;
        self.schedule_next_full(MissedFull::Skip);
        self.record_duration(started, true);
        self.report_proof();
        self.report_saved();
        Ok(known)
    }

    /// Sets when the next full is due.
    pub(super) fn schedule_next_full(&mut self, missed_full: MissedFull) {
        let Some(schedule) = &self.follower.options.full_schedule else {
            return;
        };
        let now = Utc::now();
        let missed = match (self.saver.newest_full(), missed_full) {
            (Some(full), MissedFull::CatchUp) => schedule.missed(full.created_at(), now),
            _ => None,
        };
        self.next_full = missed.or_else(|| schedule.next_after(now));
    }

    /// Returns the cause of a full that is due now.
    fn due_full(&mut self) -> Option<FullCause> {
        let now = Utc::now();
        if let Some(due) = self.next_full {
            if due <= now {
                let message = format!("a full snapshot was due at {}", due.to_rfc3339());
                return Some(FullCause::new(FullReason::Scheduled, message));
            }
            // A clock that was set back must not delay the next full.
            let schedule = self.follower.options.full_schedule.as_ref();
            let rescheduled = schedule.and_then(|s| s.next_after(now));
            self.next_full = rescheduled.map_or(Some(due), |at| Some(at.min(due)));
        }
        let last_saved = self.saver.last().unwrap_or_default();
        let current = Revision(self.watch_status().current).max(last_saved);
        let max_age = self.follower.options.max_full_age;
        self.saver.full_too_old(current, max_age)
    }

    /// Takes a full if one is due. After a failure, deltas continue and the full is retried later.
    pub(super) fn take_due_full(&mut self) -> Result<()> {
        if self.full_retry_at.is_some_and(|at| Instant::now() < at) {
            return Ok(());
        }
        let Some(cause) = self.due_full() else {
            return Ok(());
        };
        let started = Instant::now();
        let new_full = self.saver.take_full();
        match new_full.and_then(|full| self.publish_after_deltas(full, cause, false)) {
            Ok(None) => Ok(()),
            // The running watch may deliver another history than the full's: start a new one after the full.
            Ok(Some(known)) => {
                self.watch = None;
                let cluster = Cluster::observe(&self.follower.settings.connector)?;
                self.start_watch(&cluster, known)
            }
            Err(e)
                if e.reason() != Reason::Conflict
                    && self.follower.may_pass(&e)
                    && !self.lock.is_lost() =>
            {
                self.record_duration(started, false);
                let pause = self.follower.record_failure(FULL, &e);
                self.full_retry_at = Some(Instant::now() + pause);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Saves the deltas that lead up to a full, then publishes it.
    ///
    /// Returns `None` if the watch has passed through the full's last revision, so that it can continue.
    /// Otherwise returns what a watch compares that continues after the full; the outputs that the running watch
    /// still has must not be used.
    pub(super) fn publish_after_deltas(
        &mut self,
        new_full: UnpublishedFull,
        mut cause: FullCause,
        is_final: bool,
    ) -> Result<Option<Known>> {
        self.leave_differing_member()?;
        let full_revision = new_full.revision.0;
        let mut ended = self.catch_up(full_revision)?;
        self.save_delta()?;
        let position = self.reached.as_ref().map(Known::position);
        let of_full = new_full.known.as_ref().map(Known::position);
        let meets_full = position.is_some() && position == of_full;
        let reached = position.map_or(0, |r| r.revision);
        // The cluster was set back, and the watch has not noticed yet.
        if ended.is_none() && reached > full_revision {
            ended = Some(Ended::Behind {
                revision: full_revision,
            });
        } else if ended.is_none()
            && reached == full_revision
            && !meets_full
            && new_full.holds_last_changes()
        {
            ended = Some(Ended::Forked { same_up_to: None });
        }
        if let Some(ended) = ended {
            // The watch's remaining events precede the full. Save them: etcd may no longer have them.
            self.drain(CATCH_UP)?;
            self.save_delta()?;
            cause = self.saver.cause_of(ended);
        } else if !meets_full {
            cause = cause.uncompared();
        }
        if cause.continuity != Continuity::Proven {
            self.look_again()?;
        }
        let known = self.publish(new_full, cause, is_final)?;
        match meets_full {
            true => Ok(None),
            false => known.ok_or_else(no_position_after_full).map(Some),
        }
    }
}
