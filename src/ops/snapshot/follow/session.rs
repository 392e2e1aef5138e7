//! One session of a follower: watches from the last saved revision and saves deltas, while the lock is held.
//!
//! The session ends when the follower is stopped, the lock is lost, or on a failure; the follower then decides about a
//! retry.

use super::{BACK_OFF, Follower, MAX_LISTED, MissedFull, TICK, new_back_offs, view};
use crate::base::retry::{BackoffBuilder, backoff};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::feed::{Ended, Known, quorum_revision};
use crate::ops::snapshot::delta_builder::{EncodedTransaction, PendingDelta};
use crate::ops::snapshot::event_queue::{WatchOutput, WatchStatus, WatchThread};
use crate::ops::snapshot::next::{FullCause, FullReason};
use crate::ops::snapshot::saver::{Saver, SaverSummary};
use crate::store::lock::LockGuard;
use crate::telemetry::metrics::SnapshotKind;
use chrono::{DateTime, Utc};
use std::time::{Duration, Instant};

/// How long the end of a session takes outputs that the watch has delivered already.
const FINAL_DRAIN: Duration = Duration::from_secs(2);
/// How long the watch may take to reach the revision of a full, or of the end.
pub(super) const CATCH_UP: Duration = Duration::from_secs(20);
/// If a watch fails for longer, the pending delta is saved, and the delta Lease says so: members may restart one
/// after the other.
const WATCH_GRACE: Duration = Duration::from_secs(5);
/// If the temporary directory takes no events for longer, the session ends, so that another follower can have the
/// lock. What waits here is lost then, unless etcd still has it.
const HOLD_GRACE: Duration = Duration::from_secs(60);
/// How long a follower that is stopped waits for a lock that cannot be renewed.
const STOPPED_LOCK_WAIT: Duration = Duration::from_secs(10);
/// How often etcd is asked for its revision while nothing proves that it continues what was saved.
const CHANGE_PAUSE: Duration = Duration::from_secs(2);
/// The name of a failed delta in metrics and logs.
const DELTA: &str = "delta";

/// The state of a session.
pub(super) struct Session<'s, 'a> {
    pub(super) saver: Saver<'a>,
    pending: PendingDelta,
    pub(super) watch: Option<WatchThread>,
    /// Why there is no watch: see [`begin_with_full`](Self::begin_with_full).
    unproven: Option<FullCause>,
    /// The last transactions from the watch, or those at which it began.
    pub(super) reached: Option<Known>,
    /// When the first event arrived of the delta that is being saved.
    saving_since: Option<Instant>,
    /// When the next scheduled full is due.
    pub(super) next_full: Option<DateTime<Utc>>,
    /// The earliest time for the retry of a failed full.
    pub(super) full_retry_at: Option<Instant>,
    /// Reconnects of the running watch that are counted in the metrics.
    reconnects: u64,
    /// Failures of the running watch that are counted in the metrics.
    watch_failures: u64,
    /// Whether the store does not take the delta that is being saved.
    is_saving_failing: bool,
    pub(super) lock: &'s LockGuard,
    pub(super) follower: &'s mut Follower<'a>,
}

impl<'s, 'a> Session<'s, 'a> {
    /// Scans the store and prepares a session. Nothing is sent to etcd yet.
    pub(super) fn new(follower: &'s mut Follower<'a>, lock: &'s LockGuard) -> Result<Self> {
        let mut session = Session {
            saver: follower.open_saver()?,
            pending: PendingDelta::new(follower.ctx)?,
            watch: None,
            unproven: None,
            reached: None,
            saving_since: None,
            next_full: follower.options.full_schedule.as_ref().map(|_| Utc::now()),
            full_retry_at: None,
            reconnects: 0,
            watch_failures: 0,
            is_saving_failing: false,
            lock,
            follower,
        };
        session.schedule_next_full(MissedFull::CatchUp);
        Ok(session)
    }

    /// Runs the session until it ends.
    pub(super) fn run(&mut self) -> Result<()> {
        self.begin()?;
        self.follower.has_begun = true;
        // While the lock cannot be renewed, nothing is saved and events wait: no other follower can have it
        // yet.
        while !self.lock.is_lost() {
            if self.follower.is_stopped() {
                return self.finish();
            }
            self.follower.ctx.store.cancel().check()?;
            self.take_due_full()?;
            let output = match &self.watch {
                Some(watch) => watch.pop(self.poll_timeout()),
                None => None,
            };
            match output {
                Some(WatchOutput::Transaction(t)) => self.push(&t)?,
                Some(WatchOutput::Ended(ended)) => self.restart_with_full(ended)?,
                Some(WatchOutput::Failed(e)) => {
                    // etcd may be gone, or the endpoints may lead to another cluster: nobody else may have the
                    // pending events.
                    self.save_delta()?;
                    return Err(e);
                }
                // Save a due delta only when the queue is empty. After an outage every waiting event is
                // overdue, and each revision would become a delta of its own.
                None if self.watch.is_none() => self.wait_for_change()?,
                None if self.is_delta_due() => self.save_delta()?,
                None => {}
            }
            self.update_metrics();
            if let Err(e) = self.give_up_after_pause() {
                self.save_delta()?;
                return Err(e);
            }
        }
        // The new holder of the lock reads unsaved events from etcd itself.
        self.lock.check()
    }

    /// Starts the watch at the last saved revision, or after a new full if deltas cannot continue.
    fn begin(&mut self) -> Result<()> {
        let cluster = Cluster::observe(&self.follower.settings.connector)?;
        self.saver.claim(&cluster)?;
        self.follower.cluster = self.saver.recorded_cluster().cloned();
        let known = match self.saver.saved.full_needed(cluster.revision) {
            Some(cause) => Err(cause),
            None => self.saver.known(&cluster)?,
        };
        self.follower.reporter.metrics.lock_held(true);
        self.report_proof();
        self.update_metrics();
        match known {
            Ok(known) => self.start_watch(&cluster, known),
            Err(cause) => self.begin_with_full(cause),
        }
    }

    /// Takes a full and watches from there. If nothing proves that the cluster continues what was saved, and it stands at
    /// the last saved revision, this waits for a change.
    fn begin_with_full(&mut self, cause: FullCause) -> Result<()> {
        let connector = &self.follower.settings.connector;
        let current = quorum_revision(connector, &connector.options().endpoints)?;
        let Some(why) = self.saver.stands_still(&cause, current) else {
            self.unproven = None;
            return self.take_full_until_saved(&cause);
        };
        if self.unproven.replace(cause).is_none() {
            self.saver.stand_still(why);
        }
        Ok(())
    }

    /// Reports when a verification last proved that the fulls continue one another.
    pub(super) fn report_proof(&self) {
        let follower = &self.follower;
        if let Err(e) = follower.reporter.set_history_proven(&follower.ctx.store) {
            tracing::debug!("the record of the last verification cannot be read: {e}");
        }
    }

    /// Starts a watch after known transactions, in place of the running one.
    pub(super) fn start_watch(&mut self, cluster: &Cluster, known: Known) -> Result<()> {
        self.reached = Some(known.clone());
        // The cluster may be another one than at the last claim.
        self.saver.claim(cluster)?;
        self.follower.differing = self.saver.differing.clone();
        let feed = self.saver.feed(cluster, known).after(self.follower.raft);
        let follower = &self.follower;
        let cancel = follower.ctx.store.cancel();
        let bandwidth = follower.settings.bandwidth.clone();
        let bandwidth = bandwidth.map(|b| (b, cancel.clone()));
        let watch = WatchThread::start(follower.ctx, feed, bandwidth)
            .map_err(|e| Error::io("start a thread", e))?;
        self.watch = Some(watch);
        self.unproven = None;
        self.reconnects = 0;
        self.watch_failures = 0;
        Ok(())
    }

    /// Watches from the last collected revision again if the members that differ have changed: the watched
    /// member may be one of them.
    pub(super) fn leave_differing_member(&mut self) -> Result<()> {
        if self.watch.is_some()
            && self.saver.differing != self.follower.differing
            && let Some(known) = self.reached.clone()
        {
            if known.is_nothing() {
                // No other watch can prove that it goes on.
                self.watch = None;
                return Ok(());
            }
            let cluster = Cluster::observe(&self.follower.settings.connector)?;
            self.start_watch(&cluster, known)?;
        }
        Ok(())
    }

    /// Looks at what the store holds at its end now: a full that may begin another history is compared with it.
    pub(super) fn look_again(&mut self) -> Result<()> {
        self.report_saved();
        self.saver = self.saver.open_again()?;
        Ok(())
    }

    /// Saves what the ended watch has delivered, takes a full, and starts a watch after it.
    pub(super) fn restart_with_full(&mut self, ended: Ended) -> Result<()> {
        self.watch = None;
        self.save_delta()?;
        let cause = self.saver.cause_of(ended);
        self.look_again()?;
        self.begin_with_full(cause)
    }

    /// Waits for a while, and goes on with a full if the cluster has changed.
    fn wait_for_change(&mut self) -> Result<()> {
        self.follower.sleep(CHANGE_PAUSE)?;
        match self.unproven.clone() {
            Some(cause) => self.begin_with_full(cause),
            None => Err(Error::internal("a session without a watch")),
        }
    }

    /// Takes the transactions that the watch has delivered already, for at most `limit`.
    pub(super) fn drain(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline
            && let Some(watch) = &self.watch
            && let Some(output) = watch.pop(TICK)
        {
            match output {
                WatchOutput::Transaction(t) => self.push(&t)?,
                other => {
                    watch.put_back(other);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Takes transactions from the watch until the revision `goal`, for at most [`CATCH_UP`]. Deltas up to a
    /// full keep every revision restorable. Returns why the watch ended before the goal, if it did.
    pub(super) fn catch_up(&mut self, goal: i64) -> Result<Option<Ended>> {
        let deadline = Instant::now() + CATCH_UP;
        while self.last_collected() < goal && Instant::now() < deadline {
            let Some(watch) = &self.watch else {
                return Ok(None);
            };
            match watch.pop(TICK) {
                Some(WatchOutput::Transaction(t)) => self.push(&t)?,
                // The main loop handles the end or the failure of the watch.
                Some(other) => {
                    let ended = match other {
                        WatchOutput::Ended(ended) => Some(ended),
                        _ => None,
                    };
                    watch.put_back(other);
                    return Ok(ended);
                }
                None => self.follower.ctx.store.cancel().check()?,
            }
        }
        Ok(None)
    }

    /// Returns the last revision that is saved or in the pending delta.
    fn last_collected(&self) -> i64 {
        let saved = self.saver.saved.last.unwrap_or_default();
        self.pending.last().unwrap_or(saved).max(saved).0
    }

    /// Adds a transaction to the pending delta. Saves the delta first if it would become too large.
    fn push(&mut self, transaction: &EncodedTransaction) -> Result<()> {
        if let Some(reached) = &mut self.reached {
            reached.push(transaction.position());
        }
        // A full holds this revision already.
        let last = self.saver.saved.last;
        if last.is_some_and(|last| transaction.revision() <= last) {
            return Ok(());
        }
        let options = self.follower.options;
        let bytes = self.pending.bytes() + transaction.bytes();
        if !self.pending.is_empty() && bytes > options.pace.bytes() {
            self.save_delta()?;
        }
        self.pending.push(transaction)?;
        if self.pending.events() >= options.delta_events {
            self.save_delta()?;
        }
        Ok(())
    }

    /// Whether the pending delta has reached its age, or etcd is away: it may come back without these events.
    fn is_delta_due(&self) -> bool {
        let period = self.follower.options.pace.period();
        let arrived = self.pending.first_arrived();
        arrived.is_some_and(|at| at.elapsed() >= period || is_down(&self.watch_status()))
    }

    /// Returns how long the main loop may wait for the watch before a delta is due.
    fn poll_timeout(&self) -> Duration {
        let period = self.follower.options.pace.period();
        let arrived = self.pending.first_arrived();
        arrived.map_or(TICK, |at| period.saturating_sub(at.elapsed()).min(TICK))
    }

    /// Saves the pending delta, with retries until the store takes it. Meanwhile the watch fills its queue.
    pub(super) fn save_delta(&mut self) -> Result<()> {
        self.saving_since = self.pending.first_arrived();
        let ctx = self.follower.ctx;
        let Some(sealed) = self.until_written(|session| session.pending.seal(ctx))? else {
            return Ok(());
        };
        let encoding = self.saver.encoding();
        let packed = self.until_written(|_| sealed.pack(ctx, encoding))?;
        drop(sealed);
        loop {
            self.wait_for_lock()?;
            let started = Instant::now();
            let known = self.reached.as_ref();
            let known = known.ok_or_else(|| Error::internal("a delta without a watch"))?;
            match self.saver.save(&packed, known) {
                Ok(()) => {
                    self.saving_since = None;
                    self.is_saving_failing = false;
                    self.follower.back_offs = new_back_offs();
                    let metrics = &self.follower.reporter.metrics;
                    metrics.snapshot_took(SnapshotKind::Delta, started.elapsed(), true);
                    self.report_saved();
                    return Ok(());
                }
                // Others write here: the next session begins after what they have saved.
                Err(e) if matches!(e.reason(), Reason::TargetExists | Reason::Conflict) => {
                    return Err(e);
                }
                Err(e) if self.follower.is_stopped() => {
                    // The grace period of a terminating Pod is short: retry without long back-offs.
                    if !e.reason().is_retryable() {
                        return Err(e);
                    }
                    self.follower.reporter.metrics.failed(DELTA, e.reason());
                    self.follower.ctx.store.cancel().check()?;
                    std::thread::sleep(BACK_OFF.0);
                }
                Err(e) => {
                    self.is_saving_failing = true;
                    self.follower.wait_after(DELTA, e)?;
                    self.give_up_after_pause()?;
                }
            }
            self.update_metrics();
        }
    }

    /// Tries until the temporary directory takes what is written, at most for [`HOLD_GRACE`].
    fn until_written<T>(&mut self, mut write: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        let started = Instant::now();
        loop {
            match write(self) {
                Ok(written) => return Ok(written),
                Err(e) if self.follower.is_stopped() || started.elapsed() >= HOLD_GRACE => {
                    return Err(e);
                }
                Err(e) => self.follower.wait_after(DELTA, e)?,
            }
            self.update_metrics();
        }
    }

    /// Fails if the watch pauses for longer than [`HOLD_GRACE`] because the temporary directory takes no events.
    fn give_up_after_pause(&mut self) -> Result<()> {
        let paused = self.watch_status().paused;
        let Some(pause) = paused.filter(|pause| pause.since.elapsed() >= HOLD_GRACE) else {
            return Ok(());
        };
        // Long enough for another follower to take the lock.
        self.follower.back_offs = backoff(BACK_OFF.1, BACK_OFF.1, usize::MAX).build();
        Err(pause.reason.error(format!(
            "gave the lock up, for another follower: {}",
            pause.message
        )))
    }

    /// Waits while the lock cannot be renewed.
    ///
    /// # Errors
    /// Fails if the lock is lost; with `Terminated` if the follower is stopped and the lock does not come back.
    pub(super) fn wait_for_lock(&mut self) -> Result<()> {
        let started = Instant::now();
        while let Err(e) = self.lock.check() {
            if self.lock.is_lost() {
                return Err(e);
            }
            if self.follower.is_stopped() && started.elapsed() >= STOPPED_LOCK_WAIT {
                return Err(Reason::Terminated.error(format!("ended by a signal while {e}")));
            }
            self.follower
                .report_problem(Some((e.reason(), &e.to_string())));
            self.follower.reporter.metrics.lock_held(false);
            self.update_metrics();
            self.follower.ctx.store.cancel().check()?;
            std::thread::sleep(TICK);
        }
        self.follower.reporter.metrics.lock_held(true);
        Ok(())
    }

    /// Saves the last delta, and the final full if the options ask for it.
    fn finish(&mut self) -> Result<()> {
        // Nothing was saved while nothing proved that the cluster continues it; it may have changed since the last look.
        if let Some(cause) = self.unproven.clone() {
            self.begin_with_full(cause)?;
        }
        // Save the delivered events first: members that do not answer may use up the time that is left.
        self.drain(FINAL_DRAIN)?;
        self.save_delta()?;
        let connector = &self.follower.settings.connector;
        match quorum_revision(connector, &connector.options().endpoints) {
            Ok(goal) => drop(self.catch_up(goal)?),
            Err(e) => self.saver.warn(format!(
                "the last events may be missing: the cluster does not return its revision: {e}"
            )),
        }
        self.save_delta()?;
        if self.follower.options.is_final {
            let new_full = self.saver.take_full()?;
            let message = "the last snapshot of this cluster was asked for";
            let cause = FullCause::new(FullReason::Requested, message);
            self.publish_after_deltas(new_full, cause, true)?;
        }
        Ok(())
    }

    /// Returns the state of the running watch.
    pub(super) fn watch_status(&self) -> WatchStatus {
        self.watch
            .as_ref()
            .map(WatchThread::status)
            .unwrap_or_default()
    }

    /// Publishes the state of the watch as metrics.
    pub(super) fn update_metrics(&mut self) {
        let status = self.watch_status();
        while self.reconnects < status.reconnects {
            self.reconnects += 1;
            self.follower.reporter.metrics.reconnected();
        }
        if let Some(reason) = status.failure
            && status.failures > self.watch_failures
        {
            self.follower.reporter.metrics.failed("watch", reason);
            self.follower.outcome.failures += status.failures - self.watch_failures;
            self.watch_failures = status.failures;
        }
        self.follower.raft = status.raft.or(self.follower.raft);
        self.report_health(&status);
        let last_saved = self.saver.saved.last.map(|last| last.0);
        let oldest_unsaved = self.saving_since.or(self.pending.first_arrived());
        self.follower.live.set(|| {
            let oldest = oldest_unsaved.map(|at| at.elapsed());
            view::unsaved(
                last_saved.unwrap_or_default(),
                self.pending.events(),
                oldest,
            )
        });
        self.follower.reporter.metrics.spooled(status.waiting_bytes);
        match &self.watch {
            Some(_) => {
                // While the watch fails or pauses, unseen events may be as old as that.
                let down = status
                    .down_for
                    .and_then(|down| Instant::now().checked_sub(down));
                let paused = status.paused.as_ref().map(|pause| pause.since);
                let oldest = [oldest_unsaved, down, paused].into_iter().flatten().min();
                self.follower
                    .report_unsaved(Some(status.current), last_saved, oldest);
            }
            None => self.follower.look_at_unsaved(last_saved),
        }
    }

    /// Reports a watch that has failed for a while, or that everything works. A store that takes no delta is reported when
    /// the delta fails.
    fn report_health(&mut self, status: &WatchStatus) {
        if let Some(pause) = &status.paused {
            let problem = Some((pause.reason, pause.message.as_str()));
            self.follower.report_problem(problem);
            return;
        }
        match status.failure.filter(|_| is_down(status)) {
            Some(reason) => {
                let options = self.follower.settings.connector.options();
                let endpoints = options.endpoints.join(",");
                let why = format!("etcd does not deliver its events: check {endpoints}");
                self.follower.report_problem(Some((reason, &why)));
            }
            None if self.is_saving_failing || self.watch.is_none() => {}
            None => self.follower.report_problem(None),
        }
    }

    /// Adds what was saved to the metrics, the Leases and the outcome.
    pub(super) fn report_saved(&mut self) {
        if !self.saver.summary.snapshots.is_empty() {
            self.saver.report_progress(self.follower.reporter, true);
        }
        let SaverSummary {
            snapshots,
            timeline_began,
            hole,
            warnings,
            ..
        } = std::mem::take(&mut self.saver.summary);
        let all_warnings = &mut self.follower.clock.warnings;
        all_warnings.extend(warnings);
        keep_newest(all_warnings);
        let outcome = &mut self.follower.outcome;
        outcome.revision = self.saver.saved.last;
        outcome.timeline_began |= timeline_began;
        outcome.holes.extend(hole);
        keep_newest(&mut outcome.holes);
        self.follower
            .live
            .print(|| snapshots.iter().map(view::saved).collect());
        for snapshot in &snapshots {
            outcome.bytes_written += snapshot.bytes;
            outcome.events += snapshot.events;
            let (count, last) = match snapshot.kind() {
                SnapshotKind::Full => (&mut outcome.fulls, &mut outcome.last_full),
                SnapshotKind::Delta => (&mut outcome.deltas, &mut outcome.last_delta),
            };
            *count += 1;
            *last = Some(snapshot.name.to_string());
        }
    }
}

/// Whether a watch has failed for longer than members may take to restart.
fn is_down(status: &WatchStatus) -> bool {
    status.down_for.is_some_and(|down| down >= WATCH_GRACE)
}

/// Removes the oldest entries beyond [`MAX_LISTED`].
fn keep_newest<T>(entries: &mut Vec<T>) {
    entries.drain(..entries.len().saturating_sub(MAX_LISTED));
}
