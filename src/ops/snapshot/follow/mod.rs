//! `snapshot follow`: saves deltas and fulls continuously, until it is stopped.
//!
//! A thread watches etcd and fills a queue ([`super::event_queue`]); this thread empties the queue and saves. Failures
//! that may pass are retried, and only wrong settings and another cluster end the follower. Events that were not saved
//! are read from etcd again; if etcd has compacted them, a full is taken.
//!
//! [`session`] runs while the lock is held; [`fulls`] adds the fulls of a session; [`unsaved`] knows what is not saved.

mod fulls;
mod session;
mod unsaved;
mod view;

use super::event_queue::WARNING_INTERVAL;
use super::metrics::MetricsReporter;
use super::saver::Saver;
use super::{Hole, SnapshotSettings};
use crate::backup::timeline::{NamesOnly, Timelines};
use crate::base::flag_values::yes_or_no;
use crate::base::retry::{BackoffBuilder, Pauses, backoff};
use crate::base::{Cancel, Size, Span, TextValue, duration, printable};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::feed::{RaftProgress, quorum_revision};
use crate::mvcc::Revision;
use crate::ops::report::{Report, ReportBuilder};
use crate::ops::schedule::Schedule;
use crate::prefix::Context;
use crate::prefix::identity::{self, ClusterFacts};
use crate::prefix::scan;
use crate::store::lock::{Attempt, Lock, LockGuard};
use crate::telemetry::live::LiveLine;
use chrono::{TimeDelta, Utc};
use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use session::Session;
use std::time::{Duration, Instant};
use unsaved::Unsaved;

/// When a delta is saved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pace {
    /// Save a delta when its oldest event has this age
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_period: Option<TextValue<Span>>,
    /// Save a delta earlier if its events reach this size. A transaction is never split over two deltas
    #[arg(long, value_name = "SIZE", default_value = "10MiB")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_bytes: Option<TextValue<Size>>,
}

impl Pace {
    /// Returns the age of a delta's first event at which the delta is saved.
    pub fn period(&self) -> Duration {
        const DEFAULT: Duration = Duration::from_secs(5 * 60);
        let given = self.delta_period.as_ref().and_then(TextValue::value);
        given.map_or(DEFAULT, |span| span.0)
    }

    /// Returns the largest size of a delta in bytes, unless a single transaction is larger.
    fn bytes(&self) -> u64 {
        const DEFAULT: u64 = 10 << 20;
        let given = self.delta_bytes.as_ref().and_then(TextValue::value);
        given.map_or(DEFAULT, |size| size.0)
    }
}

/// The options of `snapshot follow`.
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
    /// When stopped, save a full marked as final: the last snapshot of a cluster that is shut down
    #[arg(long = "final", value_parser = yes_or_no)]
    pub is_final: bool,
}

/// The result of `snapshot follow`. The fields are a contract.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Followed {
    /// Number of fulls saved.
    pub fulls: u64,
    /// Number of deltas saved.
    pub deltas: u64,
    /// Number of events saved in deltas.
    pub events: u64,
    /// Bytes written to the store.
    pub bytes_written: u64,
    /// The last saved revision; null if the store holds none.
    pub revision: Option<Revision>,
    /// The name of the last full that was saved; null if none was.
    pub last_full: Option<String>,
    /// The name of the last delta that was saved; null if none was.
    pub last_delta: Option<String>,
    /// Whether a new timeline began, because the cluster had another history than the store.
    pub timeline_began: bool,
    /// The ranges of revisions that can never be restored, because etcd had compacted them; at most the last
    /// 100.
    pub holes: Vec<Hole>,
    /// Number of failures that were retried.
    pub failures: u64,
}

/// The name of the followers' lock in the store.
pub const LOCK: &str = "follow";
/// The largest number of warnings, and of holes, in an outcome. The newest ones are kept.
const MAX_LISTED: usize = 100;
/// The first and the longest back-off after a failure. The longest one bounds the delay after an outage of
/// the store.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// How often the loops check for signals and due snapshots, at least.
const TICK: Duration = Duration::from_millis(250);
/// The pause after a failed attempt to annotate the delta Lease.
const PROBLEM_REPORT_PAUSE: Duration = Duration::from_secs(30);
/// How often a follower without a watch asks etcd for its revision, and one that waits for the lock lists the store.
const LOOK_PAUSE: Duration = Duration::from_secs(30);
/// The name of a failed full in metrics and logs.
const FULL: &str = "full";
/// The name of a failed session in metrics and logs.
const FOLLOW: &str = "follow";

/// Follows a cluster until `stop` is set, then saves the events that arrived until then.
///
/// # Errors
/// Fails only if no retry can help: with `OtherCluster`; for settings that were wrong from the start; with
/// `Terminated` if the context is cancelled; and if events are unsaved when it is stopped.
pub fn follow(
    ctx: &Context,
    settings: &SnapshotSettings,
    options: &FollowOptions,
    lock: &mut Lock,
    reporter: &MetricsReporter,
    stop: &Cancel,
) -> Result<Report<Followed>> {
    let clock = ReportBuilder::start();
    let mut follower = Follower {
        ctx,
        settings,
        options,
        reporter,
        stop,
        clock,
        outcome: Followed::default(),
        cluster: None,
        differing: Vec::new(),
        raft: None,
        has_begun: false,
        back_offs: new_back_offs(),
        live: LiveLine::begin(),
        unsaved: Unsaved::new(Utc::now()),
        next_look: Instant::now(),
        last_warning: None,
        reported_problem: None,
        next_problem_report: Instant::now(),
    };
    follower.refuse_other_cluster()?;
    let plan = || view::plan(ctx.store.url(), options, Utc::now());
    follower.live.print(plan);
    while !follower.is_stopped() {
        let result = match follower.acquire(lock) {
            Ok(None) => break,
            Ok(Some(guard)) => {
                let result = follower.run_session(&guard);
                reporter.metrics.lock_held(false);
                result
            }
            Err(e) => Err(e),
        };
        if let Err(e) = result {
            let last = e.reason().error(e.to_string());
            follower.look_at_unsaved(follower.unsaved.last_saved);
            follower.wait_after(FOLLOW, e)?;
            // The holder of the lock saves the remaining events, but takes no final full.
            let others_save = last.reason() == Reason::LockHeld && !options.is_final;
            // The follower is stopped, events are unsaved, and there is no retry.
            if follower.is_stopped() && !others_save {
                return Err(last);
            }
        }
    }
    Ok(follower.clock.report(follower.outcome))
}

/// Returns the back-offs for failures in a row.
fn new_back_offs() -> Pauses {
    backoff(BACK_OFF.0, BACK_OFF.1, usize::MAX).build()
}

/// State and options that outlive a session.
struct Follower<'a> {
    ctx: &'a Context,
    settings: &'a SnapshotSettings,
    options: &'a FollowOptions,
    reporter: &'a MetricsReporter,
    stop: &'a Cancel,
    clock: ReportBuilder,
    outcome: Followed,
    /// The cluster that the sessions so far were allowed to save.
    cluster: Option<ClusterFacts>,
    /// The IDs of the members that differed at the last comparison, which precedes each full.
    differing: Vec<u64>,
    /// How far the raft log of the cluster was when a watch was last connected.
    raft: Option<RaftProgress>,
    /// Whether a session has read the store and watched etcd, so that the settings are right.
    has_begun: bool,
    /// The back-offs of the coming failures; restarted after each success.
    back_offs: Pauses,
    /// What a person at a terminal sees.
    live: LiveLine,
    /// The changes that are not saved.
    unsaved: Unsaved,
    /// When to look for unsaved changes again without a watch.
    next_look: Instant,
    /// The last failure that was logged as a warning, and when.
    last_warning: Option<(&'static str, Reason, Instant)>,
    /// Why nothing is saved, as the delta Lease says; the outer `None` means that it is unknown.
    reported_problem: Option<Option<Reason>>,
    /// When to try again to annotate the Lease.
    next_problem_report: Instant,
}

impl<'a> Follower<'a> {
    fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Fails at once if the prefix is another cluster's backup, before the lock is written or waited for. A
    /// prefix that records no cluster is compared by its snapshots. All other failures of etcd and of the store
    /// are ignored here: the session meets and retries them.
    fn refuse_other_cluster(&self) -> Result<()> {
        if self.settings.take_over {
            return Ok(());
        }
        let check = |cluster: Cluster| {
            match identity::check(&self.ctx.store, &ClusterFacts::from(&cluster)) {
                Ok(false) => {}
                // The session replaces what cannot be read.
                Err(e) if e.reason() == Reason::Configuration => {}
                checked => return checked.map(drop),
            }
            let mut saver = Saver::look(self.ctx, self.settings)?;
            saver.is_same_cluster(&cluster).map(drop)
        };
        match Cluster::observe(&self.settings.connector).and_then(check) {
            Err(e) if e.reason() == Reason::OtherCluster => Err(e),
            _ => Ok(()),
        }
    }

    /// Whether a failure may pass. Clocks are set, credentials and certificates renewed, permissions and mounts
    /// restored; a damaged answer of a member may be right the next time.
    fn may_pass(&self, e: &Error) -> bool {
        match e.reason() {
            Reason::Usage | Reason::OtherCluster | Reason::ObjectLocked | Reason::Terminated => {
                false
            }
            Reason::Configuration | Reason::CannotDecrypt | Reason::NoSnapshots => self.has_begun,
            _ => true,
        }
    }

    /// Records a failure and waits before the retry. Returns the failure if no retry can help.
    fn wait_after(&mut self, operation: &'static str, e: Error) -> Result<()> {
        let may_retry = match operation {
            // The next session looks at the new cluster and takes the prefix over.
            FOLLOW if e.reason() == Reason::OtherCluster => self.settings.take_over,
            _ => self.may_pass(&e),
        };
        if !may_retry {
            self.reporter.metrics.failed(operation, e.reason());
            return Err(e);
        }
        self.report_problem(Some((e.reason(), &e.to_string())));
        let pause = self.record_failure(operation, &e);
        self.sleep(pause)
    }

    /// Writes into the delta Lease why nothing is saved, or with `None` that the follower works, if that has changed.
    fn report_problem(&mut self, problem: Option<(Reason, &str)>) {
        let reason = problem.map(|(reason, _)| reason);
        let Some(leases) = &self.settings.leases else {
            return;
        };
        if self.reported_problem == Some(reason) || Instant::now() < self.next_problem_report {
            return;
        }
        let text =
            problem.map(|(reason, why)| printable::message(format!("{}: {why}", reason.as_str())));
        let store = &self.ctx.store;
        match leases.set_follower_problem(text.as_deref(), store.handle(), store.cancel()) {
            Ok(()) => self.reported_problem = Some(reason),
            Err(e) => {
                tracing::warn!("the delta Lease was not annotated: {e}");
                self.next_problem_report = Instant::now() + PROBLEM_REPORT_PAUSE;
            }
        }
    }

    /// Records a failure, and returns the time until the retry.
    fn record_failure(&mut self, operation: &'static str, e: &Error) -> Duration {
        self.reporter.metrics.failed(operation, e.reason());
        self.outcome.failures += 1;
        let pause = self.back_offs.next().unwrap_or(BACK_OFF.1);
        let is_logged = self.last_warning.is_some_and(|(of, reason, at)| {
            (of, reason) == (operation, e.reason()) && at.elapsed() < WARNING_INTERVAL
        });
        if !is_logged {
            self.last_warning = Some((operation, e.reason(), Instant::now()));
            tracing::warn!(
                operation,
                reason = e.reason().as_str(),
                again_in_seconds = pause.as_secs_f64(),
                "{e}"
            );
        }
        pause
    }

    /// Waits for `pause`, or until the follower is stopped.
    fn sleep(&self, pause: Duration) -> Result<()> {
        let until = Instant::now() + pause;
        while Instant::now() < until && !self.is_stopped() {
            self.ctx.store.cancel().check()?;
            std::thread::sleep(TICK.min(until.saturating_duration_since(Instant::now())));
        }
        Ok(())
    }

    /// Waits for the lock. Returns `None` if the follower is stopped first.
    fn acquire(&mut self, lock: &mut Lock) -> Result<Option<LockGuard>> {
        let mut is_logged = false;
        while !self.is_stopped() {
            match lock.try_acquire()? {
                Attempt::Acquired(guard) => return Ok(Some(guard)),
                Attempt::HeldBy(holder) => {
                    if !is_logged {
                        tracing::info!(
                            holder = holder.identity,
                            lock = lock.name(),
                            "another follower holds the lock: waiting"
                        );
                        is_logged = true;
                    }
                    let holder = &holder.identity;
                    self.live
                        .set(|| format!("another follower holds the lock: waiting for {holder}"));
                    self.reporter.metrics.lock_held(false);
                    self.look_at_other_follower();
                    self.sleep(Duration::from_secs(1))?;
                }
            }
        }
        Ok(None)
    }

    /// Reports the changes that are not saved. `current` is the newest revision of etcd, if it answers; `oldest_here` is
    /// when the oldest change arrived that waits in this process.
    fn report_unsaved(
        &mut self,
        current: Option<i64>,
        last_saved: Option<i64>,
        oldest_here: Option<Instant>,
    ) {
        let now = Utc::now();
        let oldest_here = oldest_here.and_then(|at| {
            let age = TimeDelta::from_std(at.elapsed()).unwrap_or(TimeDelta::MAX);
            now.checked_sub_signed(age)
        });
        let (revisions, since) = self.unsaved.observe(current, last_saved, oldest_here, now);
        self.reporter.metrics.unsaved(revisions, since);
    }

    /// Reports, from time to time, the changes that are not saved while no watch runs.
    fn look_at_unsaved(&mut self, last_saved: Option<i64>) {
        if Instant::now() < self.next_look {
            return;
        }
        let connector = &self.settings.connector;
        let current = quorum_revision(connector, &connector.options().endpoints).ok();
        self.report_unsaved(current, last_saved, None);
        self.next_look = Instant::now() + LOOK_PAUSE;
    }

    /// Reports, from time to time, the changes that another follower has not saved.
    fn look_at_other_follower(&mut self) {
        if Instant::now() < self.next_look {
            return;
        }
        let last_saved = last_saved_by_names(self.ctx);
        self.look_at_unsaved(last_saved.unwrap_or(self.unsaved.last_saved));
    }

    /// Scans the store to save into it what the sessions so far were allowed to save.
    fn open_saver(&self) -> Result<Saver<'a>> {
        let mut saver = Saver::open(self.ctx, self.settings)?;
        saver.cluster.clone_from(&self.cluster);
        saver.differing.clone_from(&self.differing);
        Ok(saver)
    }

    /// Follows the cluster while the lock is held, starting at the last saved revision.
    fn run_session(&mut self, lock: &LockGuard) -> Result<()> {
        let mut session = Session::new(self, lock)?;
        let result = session.run();
        session.report_saved();
        if result
            .as_ref()
            .is_err_and(|e| e.reason() == Reason::Conflict)
        {
            // Another snapshotter has recorded a new history, which may have a new log.
            self.raft = None;
        }
        result
    }
}

/// Returns the last revision of the newest timeline by names; `None` if there is none.
///
/// # Errors
/// Fails with the store's errors, and with `InterleavedTimelines`.
fn last_saved_by_names(ctx: &Context) -> Result<Option<i64>> {
    let mut catalog = scan::by_names(&ctx.store)?;
    ctx.trust.mark(&mut catalog);
    let timelines = Timelines::build(&catalog, &NamesOnly)?;
    let last = timelines.newest(&catalog)?.last(&catalog, &NamesOnly);
    Ok(last.map(|last| last.0))
}

/// What to do about a scheduled full that was missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MissedFull {
    /// Take the full at once.
    CatchUp,
    /// Wait for the next scheduled time.
    Skip,
}
