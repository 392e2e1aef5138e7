//! Adds snapshots to the newest timeline of a store.
//!
//! [`super::saved`] knows what is saved. The saver does not decide when a snapshot is due.

use super::delta_builder::PackedDelta;
use super::full::{self, UnpublishedFull};
use super::next::{self, Continuity, FullCause, FullReason, NewestSnapshot, name_time};
use super::saved::Saved;
use super::{DEFAULT_COMPRESSION, Hole, MetricsReporter, NewSnapshot, SnapshotSettings};
use crate::backup::catalog::{TIMELINES, Wall};
use crate::backup::codec::Encoding;
use crate::backup::timeline::{NamesOnly, Timelines};
use crate::backup::{Kind, Snapshot, SnapshotName};
use crate::base::opt::{ENDPOINTS, STORE, TAKE_OVER};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::{Cluster, ComparedCluster, MemberComparison};
use crate::etcd::feed::{Ended, Feed, Known};
use crate::fold::publish::{NAMES_TRIED, refuse_plaintext};
use crate::kubernetes::{Behind, LeaseState};
use crate::mvcc::Revision;
use crate::ops::snapshot_leases::{self, News};
use crate::prefix::Context;
use crate::prefix::identity::{self, ClusterFacts};
use crate::prefix::last_saved::Comparison;
use crate::prefix::timeline_records::{CURE, Leaves, TimelineRecord};
use crate::telemetry::metrics::SnapshotKind;
use chrono::Utc;
use std::time::{Duration, Instant};

/// The number of records that are tried: if the name of one is taken, that of a second later is next.
const RECORDS_TRIED: i64 = 10;

/// How a new full stands to what was saved.
enum Standing {
    /// It continues it.
    Proven,
    /// Nothing proves that, for this reason, but it is above the last saved revision: nothing is folded across it.
    Above(String),
    /// It has another history, or nothing else keeps it apart.
    Other {
        recorded: FullReason,
        left_at: Option<Revision>,
        why: String,
    },
}

/// What a saver has done since it was opened, or since the last report.
#[derive(Default)]
pub(super) struct SaverSummary {
    pub(super) snapshots: Vec<NewSnapshot>,
    pub(super) full_cause: Option<FullCause>,
    pub(super) timeline_began: bool,
    /// Whether nothing proves that the cluster continues what was saved before, or whether it has another history.
    pub(super) is_unproven: bool,
    pub(super) hole: Option<Hole>,
    pub(super) endpoint: Option<String>,
    pub(super) members: Vec<MemberComparison>,
    pub(super) warnings: Vec<String>,
}

/// Saves snapshots into one store.
pub(super) struct Saver<'a> {
    ctx: &'a Context,
    settings: &'a SnapshotSettings,
    pub(super) saved: Saved<'a>,
    /// The cluster whose snapshots are saved, or were by an earlier saver of this process; `None` until it is
    /// known.
    pub(super) cluster: Option<ClusterFacts>,
    /// Whether the prefix records the cluster. If nothing proves that the snapshots are of this cluster, it is recorded
    /// after the first full.
    is_recorded: bool,
    /// Whether a warning says that the record of the cluster cannot be read.
    is_unreadable_told: bool,
    /// The comparison of the members for the next full.
    compared: Option<ComparedCluster>,
    /// The IDs of the members that differed at the last comparison. Nothing is read from them.
    pub(super) differing: Vec<u64>,
    pub(super) summary: SaverSummary,
}

impl<'a> Saver<'a> {
    /// Scans the store in order to save into it.
    ///
    /// # Errors
    /// Fails as [`Saved::look`], and with `Configuration` if an identity is given and no recipient.
    pub(super) fn open(ctx: &'a Context, settings: &'a SnapshotSettings) -> Result<Self> {
        refuse_plaintext(ctx)?;
        Ok(Self::new(ctx, settings, Saved::open(ctx)?))
    }

    /// Scans the store without the intention to save.
    ///
    /// # Errors
    /// Fails as [`Saved::look`].
    pub(super) fn look(ctx: &'a Context, settings: &'a SnapshotSettings) -> Result<Self> {
        Ok(Self::new(ctx, settings, Saved::look(ctx)?))
    }

    fn new(ctx: &'a Context, settings: &'a SnapshotSettings, mut saved: Saved<'a>) -> Self {
        let warnings = std::mem::take(&mut saved.warnings);
        Saver {
            ctx,
            settings,
            saved,
            cluster: None,
            is_recorded: true,
            is_unreadable_told: false,
            compared: None,
            differing: Vec::new(),
            summary: SaverSummary {
                warnings,
                ..SaverSummary::default()
            },
        }
    }

    /// Updates the metrics and the Leases. `deltas_are_current` says that the deltas reach the cluster's
    /// newest revision.
    pub(super) fn report_progress(&mut self, reporter: &MetricsReporter, deltas_are_current: bool) {
        let full_reason = self.summary.full_cause.as_ref().map(|c| c.reason);
        reporter.count_saved(&self.summary.snapshots, full_reason);
        if self.summary.timeline_began
            && let Some(full) = &self.saved.full
        {
            reporter.metrics.timeline_began(full.created_at());
        }
        if self.summary.snapshots.is_empty() && self.settings.leases.is_none() {
            return;
        }
        let mut reported = self.report_names(reporter, deltas_are_current);
        if matches!(reported, Ok(Err(Behind))) {
            // Another writer, such as a compaction, has saved a snapshot since the last listing.
            self.saved.forget_names();
            reported = self.report_names(reporter, deltas_are_current);
        }
        if let Err(e) = reported {
            self.warn(format!("cannot report how far the backup is: {e}"));
        }
    }

    /// Updates the metrics and the Leases by the names in the store.
    fn report_names(
        &mut self,
        reporter: &MetricsReporter,
        deltas_are_current: bool,
    ) -> Result<Result<(), Behind>> {
        let (mut catalog, is_fresh) = self.saved.names()?;
        // Names alone cannot tell timelines apart: leave out everything before this one.
        let start = self.saved.timeline_start.unwrap_or(i64::MIN);
        catalog.snapshots.retain(|s| s.name.created >= start);
        let timelines = Timelines::build(&catalog, &NamesOnly)?;
        let timeline = timelines.newest(&catalog)?;
        if let Some(last) = self.saved.last {
            reporter.set_restorable(&catalog, timeline, last);
        }
        let Some(leases) = &self.settings.leases else {
            return Ok(Ok(()));
        };
        let news = News {
            full: self.summary.full_cause.is_some(),
            deltas: deltas_are_current,
            timeline: self.summary.timeline_began,
        };
        let state = LeaseState {
            may_be_old: !is_fresh,
            ..snapshot_leases::state(&catalog, timeline, news)
        };
        let updated = snapshot_leases::update(self.ctx, leases, &state);
        Ok(updated.map(|warnings| self.summary.warnings.extend(warnings)))
    }

    /// Logs a warning and adds it to the summary.
    pub(super) fn warn(&mut self, message: String) {
        tracing::warn!("{message}");
        self.summary.warnings.push(message);
    }

    /// Compares the members for the deltas and the full of this run.
    ///
    /// # Errors
    /// Fails as [`ComparedCluster::new`].
    pub(super) fn compare_members(&mut self, cluster: &Cluster) -> Result<()> {
        self.compared = Some(self.compare(cluster)?);
        Ok(())
    }

    /// Compares the members. Nothing is read from those that differ from now on.
    fn compare(&mut self, cluster: &Cluster) -> Result<ComparedCluster> {
        let compared = ComparedCluster::new(cluster.clone(), &self.settings.connector)?;
        for warning in compared.warnings() {
            self.warn(warning);
        }
        self.summary.members.clone_from(&compared.comparisons);
        self.differing = compared.differing();
        Ok(compared)
    }

    /// Returns a watch of the cluster from known transactions on. It uses the best members first, or the given
    /// endpoints if no member is known.
    pub(super) fn feed(&self, cluster: &Cluster, known: Known) -> Feed {
        let connector = &self.settings.connector;
        let members = cluster.choose(&self.differing).into_iter();
        let mut endpoints: Vec<String> = members.filter_map(|m| m.endpoint.clone()).collect();
        if endpoints.is_empty() && self.differing.is_empty() {
            endpoints.clone_from(&connector.options().endpoints);
        }
        Feed::new(connector.clone(), endpoints, known).of_cluster(cluster.cluster_id)
    }

    /// Returns the cause for a full after a watch that ended at the last saved revision.
    pub(super) fn cause_of(&self, ended: Ended) -> FullCause {
        let last = self.saved.last.unwrap_or_default();
        match ended {
            Ended::Compacted { compact_revision } => FullCause::new(
                FullReason::Compacted,
                format!(
                    "the cluster has compacted up to revision {compact_revision}, the store ends at {last}"
                ),
            ),
            Ended::Unproven => FullCause::new(
                FullReason::Unverifiable,
                format!(
                    "etcd or the store holds too few of the changes up to revision {last} to compare them"
                ),
            ),
            Ended::Forked { same_up_to } => {
                let after = match same_up_to {
                    Some(revision) => format!("from revision {} on", revision + 1),
                    None => format!("up to revision {last}"),
                };
                let message = format!(
                    "{after} the cluster holds other changes than the store: it has another history"
                );
                FullCause {
                    continuity: Continuity::Broken(same_up_to.map(Revision)),
                    ..FullCause::new(FullReason::HistoryMismatch, message)
                }
            }
            Ended::SetBack { same_up_to } => FullCause {
                continuity: Continuity::Broken(same_up_to.map(Revision)),
                ..FullCause::new(
                    FullReason::HistoryMismatch,
                    "the raft log of the cluster is shorter than before: it was restored from a snapshot",
                )
            },
            Ended::Behind { revision } => next::cluster_behind(last, revision),
        }
    }

    /// Returns the encoding of the next delta.
    pub(super) fn encoding(&self) -> Encoding {
        let newest = self.saved.newest;
        let newest = newest.map_or(DEFAULT_COMPRESSION, |n| n.compression);
        self.settings.compression.resolve(newest)
    }

    /// Returns the last saved transactions, which a watch compares. The inner error is the cause for a full.
    pub(super) fn known(&mut self, cluster: &Cluster) -> Result<Result<Known, FullCause>> {
        let known = match self.saved.known()? {
            Ok(known) => known,
            Err(cause) => return Ok(Err(cause)),
        };
        let last = Revision(known.revision());
        Ok(match () {
            () if cluster.revision < last.0 => Err(next::cluster_behind(last, cluster.revision)),
            () if known.is_nothing() => Err(self.cause_of(Ended::Unproven)),
            () => Ok(known),
        })
    }

    /// Returns a watch that continues what was saved last, and is proven to. The inner error is the cause for a full.
    pub(super) fn watch_from_last(&mut self, cluster: &Cluster) -> Result<Result<Feed, FullCause>> {
        let known = match self.known(cluster)? {
            Ok(known) => known,
            Err(cause) => return Ok(Err(cause)),
        };
        let mut feed = self.feed(cluster, known);
        Ok(match feed.verify()? {
            None => Ok(feed),
            Some(ended) => Err(self.cause_of(ended)),
        })
    }

    /// Returns why nothing can be saved now: nothing proves that the cluster continues what was saved, and it stands at
    /// the last saved revision. The next change tells more.
    pub(super) fn stands_still(&self, cause: &FullCause, current: i64) -> Option<String> {
        let is_open = matches!(
            cause.reason,
            FullReason::Compacted | FullReason::Unverifiable
        );
        let Some(Ok(backup)) = &self.saved.backup else {
            return None;
        };
        (is_open && backup.broken.is_none() && self.saved.last == Some(Revision(current))).then(|| {
            format!(
                "{}, so it is not proven that the cluster continues what was saved, and it stands at the last saved revision: nothing is saved until it changes. {CURE}",
                cause.message
            )
        })
    }

    /// Says that nothing is saved, and why.
    pub(super) fn stand_still(&mut self, why: String) {
        self.summary.is_unproven = true;
        self.warn(why);
    }

    /// Records the cluster as the owner of the prefix, or checks that it is. If the prefix holds snapshots and
    /// records no cluster, compares histories first; if nothing proves one, the cluster is recorded after its first full.
    ///
    /// # Errors
    /// Fails as [`identity::claim`], and with `OtherCluster` if the cluster has another history than the
    /// snapshots.
    pub(super) fn claim(&mut self, cluster: &Cluster) -> Result<()> {
        let (ctx, take_over) = (self.ctx, self.settings.take_over);
        let facts = ClusterFacts::from(cluster);
        self.is_recorded = identity::claim(ctx, &facts, take_over, || {
            Ok(take_over || self.is_same_cluster(cluster)?)
        })?;
        self.cluster = Some(facts);
        Ok(())
    }

    /// Returns whether the snapshots are proven to be of this cluster, before the first write to a prefix that records
    /// none. Writes nothing.
    ///
    /// # Errors
    /// Fails with `OtherCluster` if the cluster has another history than the snapshots, and with the errors of
    /// [`watch_from_last`](Self::watch_from_last).
    pub(super) fn is_same_cluster(&mut self, cluster: &Cluster) -> Result<bool> {
        if self.saved.backup.is_none() {
            return Ok(true);
        }
        let cause = match self.watch_from_last(cluster) {
            Ok(Ok(_)) => return Ok(true),
            Ok(Err(cause)) => cause,
            Err(e) if e.reason().is_unreadable() => FullCause::from_bad_data(&e),
            Err(e) => return Err(e),
        };
        let store = &self.ctx.store;
        let last = self.saved.last;
        let is_behind = last.is_some_and(|last| cluster.revision < last.0);
        let differs = is_behind || matches!(cause.continuity, Continuity::Broken(_));
        // A backup that runs already must not end because its record was deleted.
        if self.has_saved_of(cluster) {
            let history = if differs {
                format!(
                    ", and the history of this cluster differs: {}",
                    cause.message
                )
            } else {
                String::new()
            };
            self.warn(format!(
                "{} records no cluster any more{history}. This follower goes on, since it has saved this cluster's history there; another snapshotter would need {TAKE_OVER}",
                store.url()
            ));
            return Ok(true);
        }
        if differs {
            let facts = ClusterFacts::from(cluster);
            let difference = &cause.message;
            Err(identity::other_history_error(store, &facts, difference))
        } else {
            Ok(false)
        }
    }

    /// Returns the cluster whose snapshots are saved, once it is recorded.
    pub(super) fn recorded_cluster(&self) -> Option<&ClusterFacts> {
        self.cluster.as_ref().filter(|_| self.is_recorded)
    }

    /// Scans the store again for the same cluster.
    pub(super) fn open_again(&self) -> Result<Self> {
        Ok(Saver {
            cluster: self.cluster.clone(),
            is_recorded: self.is_recorded,
            is_unreadable_told: self.is_unreadable_told,
            differing: self.differing.clone(),
            ..Self::open(self.ctx, self.settings)?
        })
    }

    /// Whether this process was already allowed to save snapshots of the cluster.
    fn has_saved_of(&self, cluster: &Cluster) -> bool {
        let known = self.recorded_cluster();
        known.is_some_and(|known| known.cluster_id == cluster.cluster_id)
    }

    /// Checks that no other cluster has taken over the prefix since [`claim`](Self::claim). A snapshot takes
    /// long enough for that, and a follower even more so.
    fn check_still_ours(&mut self) -> Result<()> {
        let Some(facts) = &self.cluster else {
            return Err(Error::internal("a snapshot of an unknown cluster"));
        };
        match identity::check(&self.ctx.store, facts) {
            Err(e) if e.reason() == Reason::Configuration => {
                if !std::mem::replace(&mut self.is_unreadable_told, true) {
                    self.warn(format!("{e}. This snapshotter goes on"));
                }
                Ok(())
            }
            checked => checked.map(drop),
        }
    }

    /// Observes the cluster for a full, and compares its members. Claims the prefix again, because a follower
    /// runs for long.
    fn observe_for_full(&mut self) -> Result<ComparedCluster> {
        let cluster = Cluster::observe(&self.settings.connector)?;
        if self.is_recorded {
            self.claim(&cluster)?;
        }
        self.compare(&cluster)
    }

    /// Takes a full without publishing it. Uses the comparison of this run if there is one.
    ///
    /// # Errors
    /// Fails as [`identity::claim`], [`ComparedCluster::new`] and [`full::take`].
    pub(super) fn take_full(&mut self) -> Result<UnpublishedFull> {
        let compared = match self.compared.take() {
            Some(compared) => compared,
            None => self.observe_for_full()?,
        };
        let new_full = full::take(self.ctx, self.settings, self.saved.newest, &compared)?;
        if self.saved.backup.is_none() && self.saved.last.is_none() {
            // A slip in --store would begin a new backup silently.
            tracing::warn!(
                "{} holds no snapshots, so a new backup begins there",
                self.ctx.store.url()
            );
        }
        self.cluster = Some(new_full.cluster.clone());
        self.summary.endpoint = Some(new_full.endpoint.clone());
        let warnings = new_full.warnings.iter().cloned();
        self.summary.warnings.extend(warnings);
        Ok(new_full)
    }

    /// Publishes a full, and then records its cluster if the prefix records none. Returns the full's last transactions,
    /// which a watch compares that continues after it.
    ///
    /// A full that is not proven to continue what was saved last begins another history, or is behind a hole.
    ///
    /// # Errors
    /// Fails with the store's errors, with `TargetExists`, and with `OtherCluster` if another cluster has
    /// taken over the prefix, or if the prefix records none and holds another history; with `Conflict` if another
    /// snapshotter has begun another history meanwhile.
    pub(super) fn publish_full(
        &mut self,
        new_full: UnpublishedFull,
        cause: FullCause,
        is_final: bool,
    ) -> Result<Known> {
        let known = new_full.known.clone();
        tracing::info!(reason = ?cause.reason, "a full snapshot: {}", cause.message);
        if cause.reason == FullReason::TooLarge {
            self.warn(cause.message.clone());
        }
        self.check_still_ours()?;
        let last = self.saved.last;
        let standing = self.standing(&new_full, &cause)?;
        let (snapshot, newer) = match &standing {
            Standing::Other { why, .. } if !self.is_recorded && !self.settings.take_over => {
                let facts = &new_full.cluster;
                return Err(identity::other_history_error(&self.ctx.store, facts, why));
            }
            Standing::Other {
                recorded, left_at, ..
            } => {
                let snapshot = self.begin_timeline(&new_full, *recorded, *left_at, is_final)?;
                self.saved.timeline_start = Some(snapshot.name.created);
                (snapshot, self.saved.newer_wall()?)
            }
            Standing::Proven | Standing::Above(_) => {
                let created = name_time(Kind::Full, self.saved.newest, Utc::now());
                let newer = self.saved.newer_wall()?;
                let (created, tried) = Wall::names_before(newer.as_ref(), created, NAMES_TRIED);
                let snapshot = new_full.publish(self.ctx, created, is_final, tried)?;
                let newer = self.saved.look_again(&snapshot.name, &known)?;
                (snapshot, newer)
            }
        };
        if let (Standing::Above(_), Some(last)) = (&standing, last) {
            self.saved.look_for_deltas(&snapshot.name, last)?;
        }
        self.report_standing(
            standing,
            &snapshot.name,
            new_full.base.first_revision(),
            last,
        );
        self.summary.full_cause = Some(cause);
        self.saved.forget_names();
        self.record(snapshot);
        self.record_cluster(&new_full.cluster)?;
        self.end_at(newer)?;
        Ok(known)
    }

    /// Finds how a new full stands to what was saved.
    fn standing(&mut self, new_full: &UnpublishedFull, cause: &FullCause) -> Result<Standing> {
        let other = |recorded, left_at, why| {
            Ok(Standing::Other {
                recorded,
                left_at,
                why,
            })
        };
        match cause.continuity {
            Continuity::Proven => return Ok(Standing::Proven),
            Continuity::Broken(left_at) => {
                let left_at = match left_at {
                    None => self.saved.last_common(new_full)?,
                    known => known,
                };
                return other(cause.reason, left_at, cause.message.clone());
            }
            Continuity::Unknown => {}
        }
        let Some(last) = self.saved.last else {
            return Ok(Standing::Above(cause.message.clone()));
        };
        if new_full.revision < last {
            let behind = next::cluster_behind(last, new_full.revision.0);
            let left_at = self.saved.last_common(new_full)?;
            return other(behind.reason, left_at, behind.message);
        }
        let why = match self.saved.compare(new_full)? {
            Comparison::Same => return Ok(Standing::Proven),
            Comparison::Differs(why, left_at) => {
                return other(FullReason::HistoryMismatch, left_at, why);
            }
            Comparison::Unknown(why) => why,
        };
        if new_full.revision > last {
            Ok(Standing::Above(why))
        } else {
            other(cause.reason.if_unproven(), None, why)
        }
    }

    /// Reports how a full stands to what was saved up to `last`. `first` is the first revision that it holds.
    fn report_standing(
        &mut self,
        standing: Standing,
        full: &SnapshotName,
        first: Revision,
        last: Option<Revision>,
    ) {
        if let Standing::Other { recorded, why, .. } = &standing {
            self.summary.is_unproven = true;
            self.summary.timeline_began = true;
            let advice = match recorded {
                FullReason::Unproven => {
                    "it is not proven that it continues what was saved before".to_owned()
                }
                _ => format!("if nobody has set the cluster back, check {ENDPOINTS} and {STORE}"),
            };
            self.warn(format!(
                "{why}; a new timeline begins with {full}: {advice}"
            ));
            return;
        }
        if let Standing::Above(why) = &standing {
            self.summary.is_unproven = true;
            self.warn(format!(
                "{why}; so it is not proven that {full} continues what was saved before, and nothing is folded across it. {CURE}"
            ));
        }
        if let Some(last) = last.filter(|last| first > last.next()) {
            let (lost, until) = (last.next(), first.previous());
            self.summary.hole = Some(Hole {
                first_revision: lost,
                last_revision: until,
            });
            self.warn(format!(
                "revisions {lost} to {until} are lost: etcd had compacted them before they were saved"
            ));
        }
    }

    /// Records the cluster of a full if nothing proved before the full that the snapshots are of this cluster.
    fn record_cluster(&mut self, facts: &ClusterFacts) -> Result<()> {
        if self.is_recorded {
            return Ok(());
        }
        self.is_recorded = identity::claim(self.ctx, facts, self.settings.take_over, || Ok(true))?;
        self.warn(format!(
            "{} held snapshots and recorded no cluster, and nothing proves that they are of this cluster, which is recorded as theirs now",
            self.ctx.store.url()
        ));
        Ok(())
    }

    /// Publishes a full that begins another history, with the record that says so before it.
    fn begin_timeline(
        &mut self,
        full: &UnpublishedFull,
        cause: FullReason,
        left_at: Option<Revision>,
        is_final: bool,
    ) -> Result<NewSnapshot> {
        let leaves = match (&self.saved.backup, left_at) {
            (Some(Ok(backup)), Some(revision)) => Leaves::At {
                history: backup.timeline.clone(),
                revision,
            },
            _ => Leaves::UNKNOWN,
        };
        let mut tries = 0..RECORDS_TRIED;
        loop {
            let second = self.write_record(full, cause, leaves.clone(), is_final)?;
            match full.publish(self.ctx, second, is_final, 1) {
                // Another writer was faster. The record is of the name, so it is written again for the next one.
                Err(e) if e.reason() == Reason::TargetExists && tries.next().is_some() => {}
                published => return published,
            }
        }
    }

    /// Writes the record that a full begins another history. Returns the time for the name of the full.
    fn write_record(
        &mut self,
        full: &UnpublishedFull,
        cause: FullReason,
        leaves: Leaves,
        is_final: bool,
    ) -> Result<i64> {
        let now = Utc::now();
        let record = TimelineRecord::new(leaves, cause.into(), now);
        let mut second = name_time(Kind::Full, self.saved.newest, now);
        let mut catalog = self.saved.names_now()?;
        for _ in 0..RECORDS_TRIED {
            // The wall stands behind all that others have saved meanwhile.
            if let Some(newest) = NewestSnapshot::read(&catalog, now) {
                // In a copy of this store, a compaction may have the second after the newest snapshot.
                second = second.max(newest.created + 2);
            }
            let name = full.name(self.ctx, second, is_final);
            if !record.write(&self.ctx.store, &name)? {
                second += 1;
                continue;
            }
            let path = format!("{TIMELINES}/{name}");
            self.saved.seen.add(path.clone());
            // A writer that named a snapshot before the record was there may not have seen it.
            let known = std::mem::replace(&mut catalog, self.saved.names_now()?);
            let is_late = |s: &Snapshot| {
                s.name.created >= second && !known.snapshots.iter().any(|k| k.path == s.path)
            };
            let is_rival =
                |w: &Wall| w.second >= second && w.path != path && !known.walls.contains(w);
            if !catalog.snapshots.iter().any(is_late) && !catalog.walls.iter().any(is_rival) {
                return Ok(second);
            }
        }
        Err(Reason::TargetExists.error(format!(
            "the names of {RECORDS_TRIED} records in {TIMELINES}/ are taken: check who writes to {}",
            self.ctx.store.url()
        )))
    }

    /// Ends the session if another history has begun: what was held has a name before it.
    fn end_at(&mut self, newer: Option<Wall>) -> Result<()> {
        match newer {
            None => Ok(()),
            Some(wall) => Err(Reason::Conflict.error(format!(
                "{} says that another history begins: what was read before is saved before it; look at the store again",
                wall.path
            ))),
        }
    }

    /// Takes a full and publishes it.
    ///
    /// # Errors
    /// Fails as [`take_full`](Self::take_full) and [`publish_full`](Self::publish_full).
    pub(super) fn full_now(
        &mut self,
        cause: FullCause,
        is_final: bool,
        reporter: &MetricsReporter,
    ) -> Result<()> {
        let started = Instant::now();
        let new_full = self.take_full();
        let result = new_full.and_then(|new_full| self.publish_full(new_full, cause, is_final));
        reporter
            .metrics
            .snapshot_took(SnapshotKind::Full, started.elapsed(), result.is_ok());
        result.map(drop)
    }

    /// Saves a delta. Can be retried after an error. `known` are the last transactions that the watch has sent.
    ///
    /// # Errors
    /// Fails with the store's errors, with `OtherCluster` if another cluster has taken over the prefix, and
    /// with `Terminated`; with `Conflict` if another history has begun meanwhile.
    pub(super) fn save(&mut self, delta: &PackedDelta, known: &Known) -> Result<()> {
        self.check_still_ours()?;
        let newer = self.saved.newer_wall()?;
        let saved = delta.save(self.ctx, self.saved.newest, newer.as_ref());
        if !saved.as_ref().is_ok_and(|s| s.was_name_free) {
            // Another writer may be at work in this store.
            self.saved.forget_names();
        }
        let snapshot = saved?.snapshot;
        let newer = self.saved.look_again(&snapshot.name, known)?;
        self.record(snapshot);
        self.end_at(newer)
    }

    fn record(&mut self, snapshot: NewSnapshot) {
        self.saved.add(&snapshot.name, snapshot.bytes);
        self.summary.snapshots.push(snapshot);
    }

    /// Returns a cause for a full, with deltas up to it, if the newest one is too old.
    pub(super) fn full_too_old(&self, current: Revision, max_age: Duration) -> Option<FullCause> {
        next::full_too_old(self.saved.full.as_ref(), current, Utc::now(), max_age)
    }
}
