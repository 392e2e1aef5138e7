//! The fulls of a session: when one is due, how deltas lead up to it, and what happens if one fails.
//!
//! `ops::snapshot::full` takes the full itself.

use super::session::{CATCH_UP, Session};
use super::{FULL, MissedFull, new_back_offs};
use crate::error::{Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::feed::{Ended, Known};
use crate::mvcc::Revision;
use crate::ops::snapshot::full::{CONFIRM_TIMEOUT, UnpublishedFull, Watched};
use crate::ops::snapshot::next::{Continuity, FullCause, FullReason};
use crate::telemetry::metrics::SnapshotKind;
use chrono::Utc;
use std::time::Instant;

impl Session<'_, '_> {
    /// Takes a full that no delta leads to, with retries until it is saved, and watches from there.
    pub(super) fn take_full_until_saved(&mut self, cause: &FullCause) -> Result<()> {
        loop {
            let started = Instant::now();
            match self.try_first_full(cause) {
                Ok(Some(known)) if known.can_prove() => return self.watch_from(known),
                Ok(Some(_)) => return Ok(()),
                Ok(None) => continue,
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

    /// Takes a full that no delta leads to. Returns what a watch compares that continues after it; a watch runs already if
    /// that is too little. `None`: another full is to be taken.
    fn try_first_full(&mut self, cause: &FullCause) -> Result<Option<Known>> {
        let new_full = self.saver.take_full()?;
        let revision = new_full.revision.0;
        // A watch that begins later can compare enough with most fulls. Otherwise one that runs meanwhile must show its
        // revision.
        if !new_full.known.can_prove() {
            match self.watch.take() {
                None => {
                    self.watch_from(Known::nothing_at(revision))?;
                    return Ok(None);
                }
                Some(watch) if watch.confirms(revision, CONFIRM_TIMEOUT) => {
                    self.watch = Some(watch);
                }
                Some(_) => {
                    return Err(Reason::EtcdUnreachable
                        .error("the watch ended while a full snapshot was taken"));
                }
            }
        }
        self.publish(new_full, cause.clone(), false).map(Some)
    }

    /// Begins a watch after known transactions, in place of the running one.
    fn watch_from(&mut self, known: Known) -> Result<()> {
        self.watch = None;
        let cluster = Cluster::observe(&self.follower.settings.connector)?;
        self.start_watch(&cluster, known)
    }

    /// Records in the metrics how long a full took.
    fn record_duration(&self, started: Instant, succeeded: bool) {
        let metrics = &self.follower.reporter.metrics;
        metrics.snapshot_took(SnapshotKind::Full, started.elapsed(), succeeded);
    }

    /// Publishes a full and schedules the next one. Returns its last transactions.
    fn publish(
        &mut self,
        new_full: UnpublishedFull,
        cause: FullCause,
        is_final: bool,
    ) -> Result<Known> {
        self.wait_for_lock()?;
        let started = new_full.started;
        let known = self.saver.publish_full(new_full, cause, is_final)?;
        if self.saver.summary.timeline_began {
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
        let missed = match (&self.saver.saved.full, missed_full) {
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
        // Nothing proves that the cluster continues what was saved, and it has not changed.
        self.watch.as_ref()?;
        let last_saved = self.saver.saved.last.unwrap_or_default();
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
            Ok(Some(known)) if known.is_nothing() => self.restart_with_full(Ended::Unproven),
            Ok(Some(known)) => self.watch_from(known),
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
    /// Returns `None` if the watch shows that it has the full's history, so that it can continue. Otherwise returns what a
    /// watch compares that continues after the full; the outputs that the running watch still has must not be used.
    pub(super) fn publish_after_deltas(
        &mut self,
        new_full: UnpublishedFull,
        cause: FullCause,
        is_final: bool,
    ) -> Result<Option<Known>> {
        self.leave_differing_member()?;
        let revision = new_full.revision.0;
        let watched = match self.catch_up(revision)? {
            Some(ended) => Watched::Ended(ended),
            None => {
                self.save_delta()?;
                match (&self.watch, &self.reached) {
                    (Some(watch), Some(reached)) => new_full
                        .as_watched(reached, || Ok(watch.confirms(revision, CONFIRM_TIMEOUT)))?,
                    _ => Watched::Unknown,
                }
            }
        };
        let meets = matches!(watched, Watched::Meets);
        let cause = match watched {
            Watched::Meets => cause,
            Watched::Unknown => cause.uncompared(),
            Watched::Ended(ended) => {
                // The watch's remaining events precede the full. Save them: etcd may no longer have them.
                self.drain(CATCH_UP)?;
                self.save_delta()?;
                self.saver.cause_of(ended)
            }
        };
        if cause.continuity != Continuity::Proven {
            self.look_again()?;
        }
        let known = self.publish(new_full, cause, is_final)?;
        Ok((!meets).then_some(known))
    }
}
