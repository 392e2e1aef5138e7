//! The batch Job of deltas: from the last saved revision to the cluster's newest, then it ends.

use super::delta_builder::{Encoded, Pending};
use super::next::{Why, behind};
use super::saver::{Saver, nothing_saved};
use super::{Outcome, Taking, Tell};
use crate::backup::codec::CompressionChoice;
use crate::base::{byte_size, duration};
use crate::error::{Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::connect::Connector;
use crate::etcd::feed::{Ended, Feed, Next};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::report::{Clock, Report};
use crate::store::Bandwidth;
use crate::telemetry::metrics::SnapshotKind;
use chrono::Utc;
use std::time::{Duration, Instant};

/// A watch that is silent for so long is asked again.
const PATIENCE: Duration = Duration::from_secs(5);

/// How deltas are taken.
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

/// Saves what has changed since the last snapshot; or takes a full where that is not possible.
///
/// # Errors
/// Those of a way to etcd and to the store; `OtherCluster`, `MembersDiffer`; `Io`, `NoSpace`, `Terminated`. What
/// was saved until then stays.
pub fn delta(
    ctx: &Context,
    taking: &Taking,
    options: DeltaOptions,
    tell: &Tell,
) -> Result<Report<Outcome>> {
    let clock = Clock::start();
    ctx.store.clean_staging(Utc::now());
    let mut saver = Saver::open(ctx, taking)?;
    let cluster = Cluster::look(&taking.way)?;
    saver.claim(&cluster)?;
    let begun = Instant::now();
    let needed = match saver.full_needed(cluster.revision) {
        Some(why) => Ok(Some(why)),
        None => {
            let needed = catch_up(ctx, taking, &mut saver, &cluster, options);
            tell.metrics
                .snapshot_took(SnapshotKind::Delta, begun.elapsed(), needed.is_ok());
            needed
        }
    };
    let ended = needed.and_then(|needed| match needed {
        Some(why) => saver.full_now(why, false, tell),
        None => Ok(()),
    });
    // What was saved before a failure is told, too.
    saver.tell(tell, ended.is_ok());
    ended?;
    Ok(saver.told(clock))
}

/// The last saved revision, where the cluster holds there what the store holds; or why it does not. Nothing
/// is saved.
///
/// # Errors
/// Those of a way to etcd and to the store.
pub fn same_history(
    ctx: &Context,
    way: &Connector,
    cluster: &Cluster,
) -> Result<Result<Revision, String>> {
    let taking = Taking {
        way: way.clone(),
        compression: CompressionChoice::Same,
        bandwidth: None,
        leases: None,
        take_over: false,
    };
    let saver = Saver::look(ctx, &taking)?;
    let saved = match saver.saved() {
        None => return Ok(Err(nothing_saved().1)),
        Some(Err((_, why))) => return Ok(Err(why.clone())),
        Some(Ok(saved)) => saved,
    };
    // What is missing before it may be in etcd alone.
    if let Some((_, why)) = &saved.broken {
        return Ok(Err(why.clone()));
    }
    let position = match saver.position()? {
        Ok(position) => position,
        Err((_, why)) => return Ok(Err(why)),
    };
    Ok(match saver.feed(cluster, position).verify()? {
        None => Ok(saved.last),
        Some(ended) => Err(saver.because(ended).1),
    })
}

/// Why a full of this cluster begins another history than the store's newest, if it does: it is behind, or
/// holds other changes at the last saved revision. Where that cannot be told it is taken for the same.
///
/// # Errors
/// Those of a way to etcd and to the store.
pub(super) fn another_history(taking: &Taking, saver: &mut Saver<'_>) -> Result<Option<Why>> {
    let Some(Ok(saved)) = saver.saved() else {
        return Ok(None);
    };
    let last = saved.last;
    let cluster = Cluster::look(&taking.way)?;
    if cluster.revision < last.0 {
        return Ok(Some(behind(last, cluster.revision)));
    }
    let unknown = match saver.position() {
        Ok(Ok(position)) => {
            return Ok(match saver.feed(&cluster, position).verify()? {
                // What was compacted away tells nothing.
                None | Some(Ended::Compacted { .. }) => None,
                Some(ended) => Some(saver.because(ended)),
            });
        }
        Ok(Err((_, why))) => why,
        Err(e) if e.reason() == Reason::CannotDecrypt => e.to_string(),
        Err(e) => return Err(e),
    };
    saver.warn(format!(
        "whether the cluster has the store's history cannot be told: {unknown}"
    ));
    Ok(None)
}

/// Saves deltas up to the cluster's revision. Gives why a full has to be taken after all.
fn catch_up(
    ctx: &Context,
    taking: &Taking,
    saver: &mut Saver<'_>,
    cluster: &Cluster,
    options: DeltaOptions,
) -> Result<Option<Why>> {
    let position = match saver.position()? {
        Ok(position) => position,
        Err(why) => return Ok(Some(why)),
    };
    let mut gather = Gather {
        ctx,
        feed: saver.feed(cluster, position),
        pending: Pending::new(ctx)?,
        bandwidth: taking.bandwidth.clone(),
        max_bytes: options.max_bytes,
    };
    let ended = match gather.feed.verify()? {
        None => gather.up_to(saver, cluster.revision)?,
        ended => ended,
    };
    if let Some(ended) = ended {
        return Ok(Some(saver.because(ended)));
    }
    let now = gather.feed.position().revision;
    let Some(why) = saver.full_too_old(Revision(now), options.max_full_age) else {
        return Ok(None);
    };
    let taken = saver.take_full()?;
    // Up to the full every revision stays restorable, and the next delta begins behind it.
    if let Some(ended) = gather.up_to(saver, taken.revision.0)? {
        let (_, why) = saver.because(ended);
        saver.warn(format!("the deltas do not reach the new full: {why}"));
    }
    saver.publish_full(taken, why, false)?;
    Ok(None)
}

struct Gather<'a> {
    ctx: &'a Context,
    feed: Feed,
    pending: Pending,
    bandwidth: Option<Bandwidth>,
    max_bytes: u64,
}

impl Gather<'_> {
    /// Saves all up to `goal`, and what came by the time an error did.
    fn up_to(&mut self, saver: &mut Saver<'_>, goal: i64) -> Result<Option<Ended>> {
        let gathered = self.gather(saver, goal);
        match &gathered {
            // What is not saved is in etcd still.
            Err(e) if e.reason() == Reason::Terminated => {}
            _ => self.save(saver)?,
        }
        gathered
    }

    fn gather(&mut self, saver: &mut Saver<'_>, goal: i64) -> Result<Option<Ended>> {
        while self.feed.position().revision < goal {
            let transaction = match self.feed.next(PATIENCE)? {
                Next::Transaction(t) => t,
                Next::Idle | Next::Verified => continue,
                Next::Ended(ended) => return Ok(Some(ended)),
            };
            let encoded = Encoded::new(&transaction, self.feed.position(), Utc::now());
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
            Some(sealed) => saver.save(&sealed),
            None => Ok(()),
        }
    }
}
