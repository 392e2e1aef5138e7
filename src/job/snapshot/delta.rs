//! The batch Job of deltas: from the last saved revision to the cluster's newest, then it ends.

use super::known;
use super::pending::{Encoded, Pending};
use super::saved::{FullReason, behind};
use super::saver::Saver;
use super::{Outcome, Taking, Tell};
use crate::bucket::codec::CompressionChoice;
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::connect::Connector;
use crate::etcd::feed::{Ended, Feed, Next};
use crate::job::Context;
use crate::job::report::{Clock, Report};
use crate::mvcc::Revision;
use crate::store::Bandwidth;
use crate::telemetry::metrics::SnapshotKind;
use chrono::Utc;
use std::time::{Duration, Instant};

/// A watch that is silent for so long is asked again.
const PATIENCE: Duration = Duration::from_secs(5);

/// How deltas are taken.
#[derive(Debug, Clone, Copy)]
pub struct DeltaOptions {
    /// The most bytes of events in one delta; a transaction is never split.
    pub max_bytes: u64,
    /// A full is taken, too, where the newest is older than this; zero: never.
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
    let endpoints = endpoints(&cluster, &taking.way);
    let begun = Instant::now();
    let needed = match saver.full_needed(cluster.revision) {
        Some(why) => Ok(Some(why)),
        None => {
            let needed = catch_up(ctx, taking, &mut saver, endpoints, &cluster, options);
            tell.took(SnapshotKind::Delta, begun.elapsed(), needed.is_ok());
            needed
        }
    };
    let ended = needed.and_then(|needed| match needed {
        Some(why) => {
            let begun = Instant::now();
            let ended = saver
                .take_full()
                .and_then(|taken| saver.publish_full(taken, why, false));
            tell.took(SnapshotKind::Full, begun.elapsed(), ended.is_ok());
            ended.map(drop)
        }
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
        None => return Ok(Err("the store holds no snapshot".to_owned())),
        Some(Err((_, why))) => return Ok(Err(why.clone())),
        // What is missing before it may be in etcd alone.
        Some(Ok(saved)) => match &saved.broken {
            Some((_, why)) => return Ok(Err(why.clone())),
            None => saved,
        },
    };
    let position = match known::position(ctx, saved) {
        Ok(position) => position,
        Err(e) => {
            return match known::full_instead(&e) {
                Some((_, why)) => Ok(Err(why)),
                None => Err(e),
            };
        }
    };
    let mut feed =
        Feed::new(way.clone(), endpoints(cluster, way), position).of_cluster(cluster.cluster_id);
    Ok(match feed.verify()? {
        None => Ok(saved.last),
        Some(ended) => Err(saver.because(ended).1),
    })
}

/// Why a full of this cluster begins another history than the store's newest, if it does: it is behind, or
/// holds other changes at the last saved revision. Where that cannot be told it is taken for the same.
///
/// # Errors
/// Those of a way to etcd and to the store.
pub(super) fn another_history(
    ctx: &Context,
    taking: &Taking,
    saver: &mut Saver<'_>,
) -> Result<Option<(FullReason, String)>> {
    let Some(Ok(saved)) = saver.saved().cloned() else {
        return Ok(None);
    };
    let cluster = Cluster::look(&taking.way)?;
    if cluster.revision < saved.last.0 {
        return Ok(Some(behind(saved.last, cluster.revision)));
    }
    let position = match known::position(ctx, &saved) {
        Ok(position) => position,
        Err(e) if e.reason() == Reason::CannotDecrypt || known::full_instead(&e).is_some() => {
            saver.warn(format!(
                "whether the cluster has the store's history cannot be told: {e}"
            ));
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    let endpoints = endpoints(&cluster, &taking.way);
    let mut feed =
        Feed::new(taking.way.clone(), endpoints, position).of_cluster(cluster.cluster_id);
    Ok(match feed.verify()? {
        // What was compacted away tells nothing.
        None | Some(Ended::Compacted { .. }) => None,
        Some(ended) => Some(saver.because(ended)),
    })
}

/// Where to watch: at the members in the order in which they are to be taken; else where it was said.
pub(super) fn endpoints(cluster: &Cluster, way: &Connector) -> Vec<String> {
    let chosen = cluster.choose(&[]);
    let chosen: Vec<String> = chosen.iter().filter_map(|m| m.endpoint.clone()).collect();
    match chosen.is_empty() {
        true => way.options().endpoints.clone(),
        false => chosen,
    }
}

/// Saves deltas up to the cluster's revision. Gives why a full has to be taken after all.
fn catch_up(
    ctx: &Context,
    taking: &Taking,
    saver: &mut Saver<'_>,
    endpoints: Vec<String>,
    cluster: &Cluster,
    options: DeltaOptions,
) -> Result<Option<(FullReason, String)>> {
    let Some(Ok(saved)) = saver.saved() else {
        return Err(Error::internal("deltas without anything before them"));
    };
    let position = match known::position(ctx, saved) {
        Ok(position) => position,
        Err(e) => {
            return match known::full_instead(&e) {
                Some(why) => Ok(Some(why)),
                None => Err(e),
            };
        }
    };
    let mut gather = Gather {
        ctx,
        feed: Feed::new(taking.way.clone(), endpoints, position).of_cluster(cluster.cluster_id),
        pending: Pending::new(ctx)?,
        bandwidth: taking.bandwidth.clone(),
        max_bytes: options.max_bytes,
    };
    if let Some(ended) = gather.feed.verify()? {
        return Ok(Some(saver.because(ended)));
    }
    if let Some(ended) = gather.up_to(saver, cluster.revision)? {
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
        let next = Pending::new(self.ctx)?;
        match std::mem::replace(&mut self.pending, next).seal()? {
            Some(sealed) => saver.save(&sealed),
            None => Ok(()),
        }
    }
}
