//! `snapshot delta`: saves the changes from the last saved revision to the cluster's newest one, then ends.
//!
//! A full is taken instead if deltas cannot continue.

use super::delta_builder::{EncodedTransaction, PendingDelta};
use super::full::{CONFIRM_TIMEOUT, Watched};
use super::next::{Continuity, FullCause, FullReason};
use super::saver::Saver;
use super::{MetricsReporter, SnapshotSettings, TakenSnapshots};
use crate::base::{byte_size, duration};
use crate::error::{Reason, Result};
use crate::etcd::cluster::{Cluster, is_worthwhile_for_deltas};
use crate::etcd::feed::{Ended, Feed, Next};
use crate::mvcc::Revision;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::store::Bandwidth;
use crate::telemetry::metrics::SnapshotKind;
use chrono::Utc;
use std::time::{Duration, Instant};

/// The longest wait for the next transaction of the watch.
const WATCH_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum size of the events in one delta before a full that was asked for.
const MAX_DELTA_BYTES: u64 = 64 << 20;

/// The options of `snapshot delta`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct DeltaOptions {
    /// Maximum size of the events in one delta; a transaction is never split
    #[arg(
        long = "max-delta-bytes",
        value_name = "SIZE",
        default_value = "64MiB",
        value_parser = byte_size::parse
    )]
    pub max_bytes: u64,
    /// Take a full instead if the newest one is older than this; 0s: never
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration::parse)]
    pub max_full_age: Duration,
}

/// Saves the changes since the last snapshot, or takes a full if deltas cannot continue.
///
/// # Errors
/// Fails with the errors of etcd connections and of the store; with `OtherCluster`, `MembersDiffer`; with
/// `Io`, `NoSpace`, `Terminated`. Snapshots that were saved before the failure stay.
pub fn delta(
    ctx: &Context,
    settings: &SnapshotSettings,
    options: DeltaOptions,
    reporter: &MetricsReporter,
) -> Result<Report<TakenSnapshots>> {
    let clock = ReportBuilder::start();
    let mut saver = Saver::open(ctx, settings)?;
    let cluster = Cluster::observe(&settings.connector)?;
    saver.claim(&cluster)?;
    let started = Instant::now();
    let full_cause = match saver.saved.full_needed(cluster.revision) {
        Some(cause) => Ok(Some(cause)),
        None => {
            if is_worthwhile_for_deltas(&cluster) {
                saver.compare_members(&cluster)?;
            }
            let full_cause = catch_up(ctx, settings, &mut saver, &cluster, options);
            reporter.metrics.snapshot_took(
                SnapshotKind::Delta,
                started.elapsed(),
                full_cause.is_ok(),
            );
            full_cause
        }
    };
    let result = full_cause.and_then(|cause| match cause {
        Some(cause) => match saver.stands_still(&cause, cluster.revision) {
            Some(why) => {
                saver.stand_still(why);
                Ok(())
            }
            None => saver.full_now(cause, false, reporter),
        },
        None => Ok(()),
    });
    // Snapshots that were saved before a failure are reported, too.
    saver.report_progress(reporter, result.is_ok());
    result?;
    Ok(saver.into_report(clock))
}

/// Takes a full for `snapshot full`. In a prefix with deltas, the changes since the last one are saved first, so
/// that every revision stays restorable.
///
/// # Errors
/// As [`delta`].
pub(super) fn full_after_deltas(
    ctx: &Context,
    settings: &SnapshotSettings,
    saver: &mut Saver<'_>,
    cluster: &Cluster,
    is_final: bool,
    reporter: &MetricsReporter,
) -> Result<()> {
    let asked_for = FullCause::new(FullReason::Requested, "a full snapshot was asked for");
    let feed = match saver.watch_from_last(cluster) {
        Ok(Ok(feed)) => feed,
        Ok(Err(cause)) => {
            let cause = match cause.continuity {
                Continuity::Broken(_) => cause,
                _ => asked_for.uncompared(),
            };
            return saver.full_now(cause, is_final, reporter);
        }
        Err(e) if e.reason() == Reason::CannotDecrypt => {
            saver.warn(format!(
                "cannot check whether the cluster has the store's history: {e}"
            ));
            return saver.full_now(asked_for.uncompared(), is_final, reporter);
        }
        Err(e) => return Err(e),
    };
    let mut collector = DeltaCollector::new(ctx, settings, feed, MAX_DELTA_BYTES)?;
    let started = Instant::now();
    let continues = saver.saved.full_needed(cluster.revision).is_none();
    let with_deltas =
        continues && matches!(&saver.saved.backup, Some(Ok(backup)) if backup.has_deltas);
    let saved = collector.save_full(saver, asked_for, is_final, with_deltas);
    let metrics = &reporter.metrics;
    metrics.snapshot_took(SnapshotKind::Full, started.elapsed(), saved.is_ok());
    saved
}

/// Saves deltas up to the cluster's revision, and a full if the newest one is too old. Returns a cause if
/// deltas cannot continue, so that a full has to be taken instead.
fn catch_up(
    ctx: &Context,
    settings: &SnapshotSettings,
    saver: &mut Saver<'_>,
    cluster: &Cluster,
    options: DeltaOptions,
) -> Result<Option<FullCause>> {
    let feed = match saver.watch_from_last(cluster)? {
        Ok(feed) => feed,
        Err(cause) => return Ok(Some(cause)),
    };
    let mut collector = DeltaCollector::new(ctx, settings, feed, options.max_bytes)?;
    if let Some(ended) = collector.save_up_to(saver, cluster.revision)? {
        return Ok(Some(saver.cause_of(ended)));
    }
    let reached = collector.feed.known().revision();
    let Some(full_cause) = saver.full_too_old(Revision(reached), options.max_full_age) else {
        return Ok(None);
    };
    collector.save_full(saver, full_cause, false, true)?;
    Ok(None)
}

/// Collects the transactions of a watch into deltas and saves them.
struct DeltaCollector<'a> {
    ctx: &'a Context,
    feed: Feed,
    pending: PendingDelta,
    bandwidth: Option<Bandwidth>,
    max_bytes: u64,
}

impl<'a> DeltaCollector<'a> {
    fn new(
        ctx: &'a Context,
        settings: &SnapshotSettings,
        feed: Feed,
        max_bytes: u64,
    ) -> Result<Self> {
        Ok(DeltaCollector {
            ctx,
            feed,
            pending: PendingDelta::new(ctx)?,
            bandwidth: settings.bandwidth.clone(),
            max_bytes,
        })
    }

    /// Takes a full. `with_deltas` saves the changes up to it before it gets its name, which keeps every revision
    /// restorable.
    fn save_full(
        &mut self,
        saver: &mut Saver<'_>,
        cause: FullCause,
        is_final: bool,
        with_deltas: bool,
    ) -> Result<()> {
        let new_full = saver.take_full()?;
        let revision = new_full.revision.0;
        let ended = if with_deltas {
            self.save_up_to(saver, revision)?
        } else {
            None
        };
        let watched = self.feed.known().clone();
        let watched = match ended {
            Some(ended) => Watched::Ended(ended),
            None => {
                new_full.as_watched(&watched, || self.feed.confirms(revision, CONFIRM_TIMEOUT))?
            }
        };
        let cause = match watched {
            Watched::Meets => cause,
            Watched::Unknown => cause.uncompared(),
            Watched::Ended(ended) => match saver.cause_of(ended) {
                why if why.continuity != Continuity::Unknown => why,
                why => {
                    saver.warn(format!(
                        "the deltas do not reach the new full: {}",
                        why.message
                    ));
                    cause.uncompared()
                }
            },
        };
        saver.publish_full(new_full, cause, is_final).map(drop)
    }

    /// Saves all transactions up to the revision `goal`. After an error, saves those that arrived before it.
    /// Returns why the watch ended early.
    fn save_up_to(&mut self, saver: &mut Saver<'_>, goal: i64) -> Result<Option<Ended>> {
        let collected = self.collect(saver, goal);
        match &collected {
            // No time is left. The next delta reads the rest from etcd again.
            Err(e) if e.reason() == Reason::Terminated => {}
            _ => self.save(saver)?,
        }
        collected
    }

    fn collect(&mut self, saver: &mut Saver<'_>, goal: i64) -> Result<Option<Ended>> {
        while self.feed.known().revision() < goal {
            let (transaction, position) = match self.feed.next(WATCH_TIMEOUT)? {
                Next::Transaction(t, position) => (t, position),
                Next::Idle | Next::Verified => continue,
                Next::Ended(ended) => return Ok(Some(ended)),
            };
            let encoded = EncodedTransaction::new(&transaction, position, Utc::now());
            if let Some(limit) = &self.bandwidth {
                limit.take(encoded.bytes(), self.ctx.store.cancel())?;
            }
            let is_full = self.pending.bytes() + encoded.bytes() > self.max_bytes;
            if is_full && !self.pending.is_empty() {
                self.save(saver)?;
            }
            self.pending.push(&encoded)?;
        }
        Ok(None)
    }

    fn save(&mut self, saver: &mut Saver<'_>) -> Result<()> {
        match self.pending.seal(self.ctx)? {
            Some(sealed) => {
                let packed = sealed.pack(self.ctx, saver.encoding())?;
                saver.save(&packed, self.feed.known())
            }
            None => Ok(()),
        }
    }
}
