//! The follower: deltas and fulls for as long as the cluster lives.
//!
//! A thread watches ([`super::queue`]), this one saves. Whatever goes wrong with the members, the store or the
//! lock is waited out; what was not saved is asked of etcd again, and where etcd has it no more, a full is
//! taken.

use super::delta_builder::{Encoded, Pending};
use super::event_queue::{Item, Pulse, Room, Tail};
use super::full::Taken;
use super::metrics::Tell;
use super::next::{FullReason, Why};
use super::saver::{Report as Saved, Saver};
use super::{Hole, Taking};
use crate::base::flag_values::yes_or_no;
use crate::base::retry::{BackoffBuilder, Pauses, backoff};
use crate::base::{Cancel, Size, Span, TextValue, byte_size, duration};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::feed::{Ended, Position, quorum_revision};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::identity::{self, ClusterFacts};
use crate::ops::report::{Clock, Report};
use crate::ops::schedule::Schedule;
use crate::store::lock::{Attempt, Lock, LockGuard};
use crate::telemetry::metrics::SnapshotKind;
use chrono::{DateTime, Utc};
use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// How often deltas are saved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pace {
    /// Save a delta when its oldest event has this age
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_period: Option<TextValue<Span>>,
    /// Save a delta earlier if its events have this size; a transaction is never split
    #[arg(long, value_name = "SIZE", default_value = "10MiB")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_bytes: Option<TextValue<Size>>,
}

impl Pace {
    /// When a delta's first event is old enough.
    pub fn period(&self) -> Duration {
        const USUAL: Duration = Duration::from_secs(5 * 60);
        let given = self.delta_period.as_ref().and_then(TextValue::value);
        given.map_or(USUAL, |span| span.0)
    }

    fn bytes(&self) -> u64 {
        const USUAL: u64 = 10 << 20;
        let given = self.delta_bytes.as_ref().and_then(TextValue::value);
        given.map_or(USUAL, |size| size.0)
    }
}

/// How a cluster is followed.
#[derive(Debug, Clone, Args)]
pub struct FollowOptions {
    /// When a delta is saved.
    #[command(flatten)]
    pub pace: Pace,
    /// Save a delta earlier if it has this many events
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub delta_events: u64,
    /// When fulls are taken.
    #[arg(skip)]
    pub full_schedule: Option<Schedule>,
    /// Take an additional full if the newest one is older than this; 0s: never
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    pub max_full_age: Duration,
    /// During an outage of the store, keep up to this size of events in memory
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = byte_size::parse)]
    pub buffer_bytes: u64,
    /// Then keep up to this size of events in the temporary directory; all others wait in etcd
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = byte_size::parse)]
    pub spool_bytes: u64,
    /// When stopped, save a full marked as final: the last snapshot of a cluster that is shut down
    #[arg(long = "final", value_parser = yes_or_no)]
    pub is_final: bool,
}

/// How it ended: what fails is waited out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// It was told to end, and all was saved.
    #[default]
    Succeeded,
}

/// What was done. The fields are a contract: `docs/follow-result.schema.json`.
#[derive(Debug, Clone, Default, JsonSchema, Serialize)]
pub struct Outcome {
    /// Always `Succeeded`.
    pub status: Status,
    /// Fulls saved.
    pub fulls: u64,
    /// Deltas saved.
    pub deltas: u64,
    /// Events saved in deltas.
    pub events: u64,
    /// Bytes written to the store.
    pub bytes_written: u64,
    /// The last revision that is saved; null if nothing is.
    pub revision: Option<Revision>,
    /// The name of the last full that it saved.
    pub last_full: Option<String>,
    /// The name of the last delta that it saved.
    pub last_delta: Option<String>,
    /// Whether the cluster was seen to have another history than the store.
    pub timeline_began: bool,
    /// Revisions that can never be restored, since etcd had compacted them; the last 100 ranges.
    pub holes: Vec<Hole>,
    /// What failed and was tried again, in times.
    pub failures: u64,
}

/// Warnings and holes that an outcome has at most.
const LISTED: usize = 100;
/// Pauses before what failed is tried again: the first, and the longest. So much is lost at most when a store
/// is back after an outage.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// The loop looks at its switches and clocks at least this often.
const TICK: Duration = Duration::from_millis(250);
/// At the end it takes for so long what has come already.
const AT_HAND: Duration = Duration::from_secs(2);
/// What a failure to take a full is called in metrics.
const FULL: &str = "full";
/// And one to which a session came.
const FOLLOW: &str = "follow";
/// For so long the watch may take to come as far as a full, or as the end.
const CATCH_UP: Duration = Duration::from_secs(20);

/// Follows a cluster until `stop` is set; then saves what came until then.
///
/// # Errors
/// What no retry mends: `OtherCluster`, wrong settings, credentials and permissions; `Terminated` where the context's own
/// switch ends it.
pub fn follow(
    ctx: &Context,
    taking: &Taking,
    options: &FollowOptions,
    lock: &mut Lock,
    tell: &Tell,
    stop: &Cancel,
) -> Result<Report<Outcome>> {
    let clock = Clock::start();
    let mut follower = Follower {
        ctx,
        taking,
        options,
        tell,
        stop,
        clock,
        outcome: Outcome::default(),
        pauses: pauses(),
    };
    follower.refuse_other_cluster()?;
    while !follower.is_stopped() {
        let ended = match follower.wait_for(lock) {
            Ok(None) => break,
            Ok(Some(held)) => {
                let ended = follower.session(&held);
                tell.metrics.lock_held(false);
                ended
            }
            Err(e) => Err(e),
        };
        if let Err(e) = ended {
            let last = e.reason().error(e.to_string());
            follower.failed(FOLLOW, e)?;
            // Whoever has the lock saves the rest, but marks nothing as the end.
            let others_do = last.reason() == Reason::LockHeld && !options.is_final;
            // Not all is saved, and nobody tries again.
            if follower.is_stopped() && !others_do {
                return Err(last);
            }
        }
    }
    Ok(follower.clock.report(follower.outcome))
}

/// The pauses after failures in a row.
fn pauses() -> Pauses {
    backoff(PAUSES.0, PAUSES.1, usize::MAX).build()
}

/// Whether it is worth to take a full again: what a member sent that is damaged, or lags, another time may be
/// right; and deltas must not end for it.
fn is_mendable_full(e: &Error) -> bool {
    is_mendable(e) || e.reason().is_bad_data()
}

/// Whether it is worth to go on after a failure.
fn is_mendable(e: &Error) -> bool {
    e.reason().is_retryable() || e.reason() == Reason::MembersDiffer
}

fn untold_end() -> Error {
    Error::internal("a new full does not tell its own end")
}

struct Follower<'a> {
    ctx: &'a Context,
    taking: &'a Taking,
    options: &'a FollowOptions,
    tell: &'a Tell,
    stop: &'a Cancel,
    clock: Clock,
    outcome: Outcome,
    pauses: Pauses,
}

impl Follower<'_> {
    fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Fails at once where the prefix is another cluster's, before the lock is written or waited for. Whatever
    /// else is wrong with etcd or the store is met, and waited out, later.
    fn refuse_other_cluster(&self) -> Result<()> {
        if self.taking.take_over {
            return Ok(());
        }
        let checked = Cluster::look(&self.taking.way)
            .and_then(|cluster| identity::check(&self.ctx.store, &ClusterFacts::from(&cluster)));
        match checked {
            Err(e) if e.reason() == Reason::OtherCluster => Err(e),
            _ => Ok(()),
        }
    }

    /// Notes a failure and waits; gives it back where no retry mends it.
    fn failed(&mut self, operation: &'static str, e: Error) -> Result<()> {
        let mendable = match operation {
            FULL => is_mendable_full(&e),
            // The next session looks who it is, and takes over.
            FOLLOW if e.reason() == Reason::OtherCluster => self.taking.take_over,
            _ => is_mendable(&e),
        };
        if !mendable {
            self.tell.metrics.failed(operation, e.reason());
            return Err(e);
        }
        let pause = self.note(operation, &e);
        self.sleep(pause)
    }

    /// Notes a failure. Gives the time after which to try again.
    fn note(&mut self, operation: &'static str, e: &Error) -> Duration {
        self.tell.metrics.failed(operation, e.reason());
        self.outcome.failures += 1;
        let pause = self.pauses.next().unwrap_or(PAUSES.1);
        tracing::warn!(
            operation,
            reason = e.reason().as_str(),
            again_in_seconds = pause.as_secs_f64(),
            "{e}"
        );
        pause
    }

    /// Waits, unless it is stopped.
    fn sleep(&self, pause: Duration) -> Result<()> {
        let until = Instant::now() + pause;
        while Instant::now() < until && !self.is_stopped() {
            self.ctx.store.cancel().check()?;
            std::thread::sleep(TICK.min(until.saturating_duration_since(Instant::now())));
        }
        Ok(())
    }

    /// Waits until it is the only one; `None` where it is stopped first.
    fn wait_for(&mut self, lock: &mut Lock) -> Result<Option<LockGuard>> {
        let mut said = false;
        while !self.is_stopped() {
            match lock.try_acquire()? {
                Attempt::Acquired(held) => return Ok(Some(held)),
                Attempt::HeldBy(holder) => {
                    if !said {
                        tracing::info!(
                            holder = holder.identity,
                            lock = lock.name(),
                            "another follower is at work: waiting"
                        );
                        said = true;
                    }
                    self.tell.metrics.lock_held(false);
                    self.sleep(Duration::from_secs(1))?;
                }
            }
        }
        Ok(None)
    }

    /// Follows as long as the lock is held, from what the store has.
    fn session(&mut self, held: &LockGuard) -> Result<()> {
        self.ctx.store.clean_staging(Utc::now());
        let mut session = Session {
            saver: Saver::open(self.ctx, self.taking)?,
            pending: Pending::new(self.ctx)?,
            tail: None,
            reached: None,
            unsaved_since: None,
            next_full: self.options.full_schedule.as_ref().map(|_| Utc::now()),
            full_after: None,
            reconnects: 0,
            watch_failures: 0,
            held,
            follower: self,
        };
        session.schedule_next_full(true);
        let ended = session.run();
        session.report();
        ended
    }
}

struct Session<'s, 'a> {
    saver: Saver<'a>,
    pending: Pending,
    tail: Option<Tail>,
    /// What the watch gave last, and before that where it began.
    reached: Option<Position>,
    /// When the first event came of a delta that the store has not taken yet.
    unsaved_since: Option<Instant>,
    /// When the next full is due.
    next_full: Option<DateTime<Utc>>,
    /// A full that failed is not tried again before.
    full_after: Option<Instant>,
    /// Of the watch that runs.
    reconnects: u64,
    watch_failures: u64,
    held: &'s LockGuard,
    follower: &'s mut Follower<'a>,
}

impl Session<'_, '_> {
    fn run(&mut self) -> Result<()> {
        self.begin()?;
        // While the lock cannot be renewed nothing is saved, and what comes waits: nobody else may have it.
        while !self.held.is_lost() {
            if self.follower.is_stopped() {
                return self.finish();
            }
            self.follower.ctx.store.cancel().check()?;
            self.take_due_full()?;
            let item = self.tail.as_ref().and_then(|t| t.pop(self.patience()));
            match item {
                Some(Item::Transaction(t)) => self.push(&t)?,
                Some(Item::Ended(ended)) => self.begin_anew(ended)?,
                Some(Item::Failed(e)) => {
                    // What came before is of the cluster that it was, which may be gone.
                    if e.reason() == Reason::OtherCluster {
                        self.flush()?;
                    }
                    return Err(e);
                }
                // Nothing more waits. After an outage all that waited is overdue: saved as it came, each revision
                // would be a delta of its own.
                None if self.is_delta_due() => self.flush()?,
                None => {}
            }
            self.told();
        }
        // What is not saved, whoever has the lock now asks of etcd itself.
        self.held.check()
    }

    /// Begins to watch behind what the store has, or behind a full.
    fn begin(&mut self) -> Result<()> {
        let cluster = Cluster::look(&self.follower.taking.way)?;
        self.saver.claim(&cluster)?;
        let found = match self.saver.full_needed(cluster.revision) {
            Some(why) => Err(why),
            None => self.saver.position()?,
        };
        self.follower.tell.metrics.lock_held(true);
        self.told();
        let position = match found {
            Ok(position) => position,
            Err(why) => self.full_without_deltas(why)?,
        };
        self.watch(&cluster, position)
    }

    fn watch(&mut self, cluster: &Cluster, position: Position) -> Result<()> {
        self.reached = Some(position);
        // It may have been looked at since the last claim, and be another one.
        self.saver.claim(cluster)?;
        let feed = self.saver.feed(cluster, position);
        let room = Room {
            memory: self.follower.options.buffer_bytes,
            spool: self.follower.options.spool_bytes,
            dir: self.follower.ctx.temp(),
        };
        let bandwidth = self.follower.taking.bandwidth.clone();
        let bandwidth = bandwidth.map(|b| (b, self.follower.ctx.store.cancel().clone()));
        let tail =
            Tail::start(feed, room, bandwidth).map_err(|e| Error::io("start a thread", e))?;
        self.tail = Some(tail);
        self.reconnects = 0;
        self.watch_failures = 0;
        Ok(())
    }

    /// The watch does not go on: what came is saved, and a full begins anew.
    fn begin_anew(&mut self, ended: Ended) -> Result<()> {
        self.tail = None;
        self.flush()?;
        let why = self.saver.because(ended);
        let position = self.full_without_deltas(why)?;
        let cluster = Cluster::look(&self.follower.taking.way)?;
        self.watch(&cluster, position)
    }

    /// Takes a full that nothing leads to; tries until it is there.
    fn full_without_deltas(&mut self, why: Why) -> Result<Position> {
        loop {
            let started = Instant::now();
            let taken = self.saver.take_full();
            match taken.and_then(|t| self.publish(t, why.clone(), false)) {
                Ok(position) => return position.ok_or_else(untold_end),
                Err(e) => {
                    self.full_failed(started);
                    self.follower.failed(FULL, e)?;
                }
            }
            if self.follower.is_stopped() {
                return Err(Reason::Terminated
                    .error("ended by a signal before a full snapshot could be taken"));
            }
            if self.held.is_lost() {
                self.held.check()?;
            }
        }
    }

    fn full_failed(&self, started: Instant) {
        let took = started.elapsed();
        self.follower
            .tell
            .metrics
            .snapshot_took(SnapshotKind::Full, took, false);
    }

    fn publish(&mut self, taken: Taken, why: Why, is_final: bool) -> Result<Option<Position>> {
        self.wait_for_lock()?;
        let started = taken.started;
        let position = self.saver.publish_full(taken, why, is_final)?;
        self.follower.pauses = pauses();
        self.full_after = None;
        self.schedule_next_full(false);
        let took = started.elapsed();
        self.follower
            .tell
            .metrics
            .snapshot_took(SnapshotKind::Full, took, true);
        self.report();
        Ok(position)
    }

    /// When the next full is due; with `catch_up` at once where one was missed.
    fn schedule_next_full(&mut self, catch_up: bool) {
        let Some(schedule) = &self.follower.options.full_schedule else {
            return;
        };
        let now = Utc::now();
        let last = self.saver.newest_full().map(|f| f.created_at());
        let missed = last
            .filter(|_| catch_up)
            .and_then(|l| schedule.missed(l, now));
        self.next_full = missed.or_else(|| schedule.next_after(now));
    }

    fn full_due(&mut self) -> Option<Why> {
        let now = Utc::now();
        if let Some(due) = self.next_full {
            if due <= now {
                let message = format!("a full snapshot was due at {}", due.to_rfc3339());
                return Some((FullReason::Scheduled, message));
            }
            // A clock that was set back must not put it off.
            let schedule = self.follower.options.full_schedule.as_ref();
            let again = schedule.and_then(|s| s.next_after(now));
            self.next_full = again.map_or(Some(due), |a| Some(a.min(due)));
        }
        let current = Revision(self.pulse().current).max(self.saver.last().unwrap_or_default());
        let max_age = self.follower.options.max_full_age;
        self.saver.full_too_old(current, max_age)
    }

    fn take_due_full(&mut self) -> Result<()> {
        if self.full_after.is_some_and(|at| Instant::now() < at) {
            return Ok(());
        }
        let Some(why) = self.full_due() else {
            return Ok(());
        };
        let started = Instant::now();
        let taken = self.saver.take_full();
        match taken.and_then(|taken| self.add_full(taken, why, false)) {
            Ok(None) => Ok(()),
            // What the watch would give next may be of another history than the full.
            Ok(Some(position)) => {
                self.tail = None;
                let cluster = Cluster::look(&self.follower.taking.way)?;
                self.watch(&cluster, position)
            }
            // The deltas go on meanwhile.
            Err(e) if is_mendable_full(&e) && !self.held.is_lost() => {
                self.full_failed(started);
                let pause = self.follower.note(FULL, &e);
                self.full_after = Some(Instant::now() + pause);
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Gives a full its name behind the deltas that lead to it. Gives the position behind the full where the
    /// watch was not seen to come by it: then deltas go on from there, and what the watch has still is not to
    /// be used.
    fn add_full(&mut self, taken: Taken, mut why: Why, is_final: bool) -> Result<Option<Position>> {
        let revision = taken.revision.0;
        let mut ended = self.catch_up(revision)?;
        self.flush()?;
        let comes_by = self.reached.is_some() && self.reached == taken.position;
        let at = self.reached.map_or(0, |r| r.revision);
        // The cluster was set back, and the watch does not know yet.
        if ended.is_none() && at > revision {
            ended = Some(Ended::Behind { revision });
        } else if ended.is_none() && at == revision && !comes_by && taken.tells_its_end() {
            ended = Some(Ended::Forked);
        }
        if let Some(ended) = ended {
            // What the watch has still belongs before the full, and etcd may not have it any more.
            self.drain(CATCH_UP)?;
            self.flush()?;
            why = self.saver.because(ended);
        }
        let position = self.publish(taken, why, is_final)?;
        match comes_by {
            true => Ok(None),
            false => position.ok_or_else(untold_end).map(Some),
        }
    }

    /// Takes what the watch has, where it takes no longer.
    fn drain(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline
            && let Some(tail) = &self.tail
            && let Some(item) = tail.pop(TICK)
        {
            match item {
                Item::Transaction(t) => self.push(&t)?,
                other => {
                    tail.put_back(other);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Takes what comes up to `goal`, where it comes soon: up to a full every revision stays restorable,
    /// and the next delta begins behind it. Gives why the watch does not go on, where it is so.
    fn catch_up(&mut self, goal: i64) -> Result<Option<Ended>> {
        let deadline = Instant::now() + CATCH_UP;
        while self.position_of_deltas() < goal && Instant::now() < deadline {
            let Some(tail) = &self.tail else {
                return Ok(None);
            };
            match tail.pop(TICK) {
                Some(Item::Transaction(t)) => self.push(&t)?,
                // It is told again when the loop asks.
                Some(other) => {
                    let ended = match other {
                        Item::Ended(ended) => Some(ended),
                        _ => None,
                    };
                    tail.put_back(other);
                    return Ok(ended);
                }
                None => self.follower.ctx.store.cancel().check()?,
            }
        }
        Ok(None)
    }

    /// The last revision that is saved or waits in the delta.
    fn position_of_deltas(&self) -> i64 {
        let saved = self.saver.last().unwrap_or_default();
        self.pending.last().unwrap_or(saved).max(saved).0
    }

    fn push(&mut self, t: &Encoded) -> Result<()> {
        self.reached = Some(t.position());
        // What a full holds already needs no delta.
        if self.saver.last().is_some_and(|last| t.revision() <= last) {
            return Ok(());
        }
        let options = self.follower.options;
        if !self.pending.is_empty() && self.pending.bytes() + t.bytes() > options.pace.bytes() {
            self.flush()?;
        }
        self.pending.push(t)?;
        if self.pending.events() >= options.delta_events {
            self.flush()?;
        }
        Ok(())
    }

    fn is_delta_due(&self) -> bool {
        let period = self.follower.options.pace.period();
        self.pending.since().is_some_and(|s| s.elapsed() >= period)
    }

    fn patience(&self) -> Duration {
        let period = self.follower.options.pace.period();
        let since = self.pending.since();
        since.map_or(TICK, |s| period.saturating_sub(s.elapsed()).min(TICK))
    }

    /// Saves the delta; tries until the store takes it. Meanwhile the watch fills its queue.
    fn flush(&mut self) -> Result<()> {
        self.unsaved_since = self.pending.since();
        let Some(sealed) = self.pending.seal(self.follower.ctx)? else {
            return Ok(());
        };
        loop {
            self.wait_for_lock()?;
            let started = Instant::now();
            match self.saver.save(&sealed) {
                Ok(()) => {
                    self.unsaved_since = None;
                    self.follower.pauses = pauses();
                    let took = started.elapsed();
                    self.follower
                        .tell
                        .metrics
                        .snapshot_took(SnapshotKind::Delta, took, true);
                    self.report();
                    return Ok(());
                }
                Err(e) if self.follower.is_stopped() => {
                    // The grace of a Pod that ends is short: it is tried on, without long pauses.
                    if !is_mendable(&e) {
                        return Err(e);
                    }
                    self.follower.tell.metrics.failed("delta", e.reason());
                    self.follower.ctx.store.cancel().check()?;
                    std::thread::sleep(PAUSES.0);
                }
                Err(e) => self.follower.failed("delta", e)?,
            }
            self.told();
        }
    }

    /// Waits while the lock cannot be renewed.
    fn wait_for_lock(&self) -> Result<()> {
        while !self.held.is_held() {
            if self.held.is_lost() {
                return self.held.check();
            }
            self.follower.tell.metrics.lock_held(false);
            self.follower.ctx.store.cancel().check()?;
            std::thread::sleep(TICK);
        }
        self.follower.tell.metrics.lock_held(true);
        Ok(())
    }

    /// The last delta, and the final full if there shall be one.
    fn finish(&mut self) -> Result<()> {
        // First what is at hand: members that do not answer may use up the time that is left.
        self.drain(AT_HAND)?;
        self.flush()?;
        let way = &self.follower.taking.way;
        match quorum_revision(way, &way.options().endpoints) {
            Ok(goal) => drop(self.catch_up(goal)?),
            Err(e) => self.saver.warn(format!(
                "how far the cluster has come cannot be asked at the end: {e}"
            )),
        }
        self.flush()?;
        if self.follower.options.is_final {
            let taken = self.saver.take_full()?;
            let why = "the last snapshot of this cluster was asked for".to_owned();
            self.add_full(taken, (FullReason::Requested, why), true)?;
        }
        Ok(())
    }

    fn pulse(&self) -> Pulse {
        self.tail.as_ref().map(Tail::pulse).unwrap_or_default()
    }

    /// Tells how far it is.
    fn told(&mut self) {
        let pulse = self.pulse();
        while self.reconnects < pulse.reconnects {
            self.reconnects += 1;
            self.follower.tell.metrics.reconnected();
        }
        if let Some(reason) = pulse
            .failure
            .filter(|_| pulse.failures > self.watch_failures)
        {
            self.follower.tell.metrics.failed("watch", reason);
            self.follower.outcome.failures += pulse.failures - self.watch_failures;
            self.watch_failures = pulse.failures;
        }
        let saved = self.saver.last().unwrap_or_default().0;
        self.follower
            .tell
            .pulse(&pulse, saved, self.unsaved_since.or(self.pending.since()));
    }

    /// Tells what was saved.
    fn report(&mut self) {
        if !self.saver.report().written.is_empty() {
            self.saver.tell(self.follower.tell, true);
        }
        let Saved {
            written,
            timeline_began,
            hole,
            warnings,
            ..
        } = self.saver.take_report();
        let outcome = &mut self.follower.outcome;
        outcome.revision = self.saver.last();
        outcome.timeline_began |= timeline_began;
        outcome.holes.extend(hole);
        keep_last(&mut outcome.holes);
        let told = &mut self.follower.clock.warnings;
        told.extend(warnings);
        keep_last(told);
        for w in &written {
            outcome.bytes_written += w.bytes;
            outcome.events += w.events;
            let (count, last) = match w.kind() {
                SnapshotKind::Full => (&mut outcome.fulls, &mut outcome.last_full),
                SnapshotKind::Delta => (&mut outcome.deltas, &mut outcome.last_delta),
            };
            *count += 1;
            *last = Some(w.name.to_string());
        }
    }
}

fn keep_last<T>(listed: &mut Vec<T>) {
    listed.drain(..listed.len().saturating_sub(LISTED));
}
