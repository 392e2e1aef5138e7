//! One line of snapshots in a store: what is saved, and how the next one is added to it.

use super::delta_builder::Sealed;
use super::full::{self, Taken};
use super::known_names::Names;
use super::last_saved;
use super::next::{self, FullReason, Newest, Saved, Why};
use super::{Compared, DEFAULT_COMPRESSION, Hole, Taking, Tell, Written};
use crate::backup::SnapshotName;
use crate::backup::codec::Encoding;
use crate::backup::timeline::{NamesOnly, Timelines};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::feed::{Ended, Feed, Position};
use crate::kubernetes::{Behind, LeaseState};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::fold::publish::refuse_plaintext;
use crate::ops::identity::{self, ClusterFacts};
use crate::ops::scan::{Depth, scan_with_tags};
use crate::ops::snapshot_leases::{self, News};
use crate::ops::tags::TagScope;
use crate::telemetry::metrics::SnapshotKind;
use chrono::Utc;
use std::time::{Duration, Instant};

/// The reason of a first full.
pub(super) fn nothing_saved() -> Why {
    (
        FullReason::EmptyBucket,
        "the store holds no snapshot".to_owned(),
    )
}

/// What has been done so far.
#[derive(Default)]
pub(super) struct Report {
    pub(super) written: Vec<Written>,
    pub(super) full: Option<Why>,
    pub(super) timeline_began: bool,
    pub(super) hole: Option<Hole>,
    pub(super) endpoint: Option<String>,
    pub(super) members: Vec<Compared>,
    pub(super) warnings: Vec<String>,
}

/// See the module.
pub(super) struct Saver<'a> {
    ctx: &'a Context,
    taking: &'a Taking,
    /// As the store was found; `None` where it was empty.
    found: Option<Result<Saved, Why>>,
    newest: Option<Newest>,
    last: Option<Revision>,
    full: Option<SnapshotName>,
    /// When the line began, where other histories are before it; in seconds since 1970.
    line_from: Option<i64>,
    names: Names,
    /// Whose snapshots they are, since it was looked at.
    cluster: Option<ClusterFacts>,
    report: Report,
}

impl<'a> Saver<'a> {
    /// Looks at the store, in order to add to it.
    ///
    /// # Errors
    /// As [`look`](Self::look); `Configuration` where the newest snapshot is encrypted, and new ones would
    /// not be.
    pub(super) fn open(ctx: &'a Context, taking: &'a Taking) -> Result<Self> {
        let (saver, newest) = Self::find(ctx, taking)?;
        refuse_plaintext(ctx, newest.as_ref())?;
        Ok(saver)
    }

    /// Looks at the store.
    ///
    /// # Errors
    /// The store's; `NoSnapshots` where it holds snapshots directly, so that the URL is wrong.
    pub(super) fn look(ctx: &'a Context, taking: &'a Taking) -> Result<Self> {
        Ok(Self::find(ctx, taking)?.0)
    }

    /// Gives the name of the newest snapshot that is not excluded, too.
    fn find(ctx: &'a Context, taking: &'a Taking) -> Result<(Self, Option<SnapshotName>)> {
        let mut saver = Saver {
            ctx,
            taking,
            found: None,
            newest: None,
            last: None,
            full: None,
            line_from: None,
            names: Names::default(),
            cluster: None,
            report: Report::default(),
        };
        let scan = match scan_with_tags(ctx, Depth::Doubtful, TagScope::Chain) {
            Ok(scan) => scan,
            Err(e) if e.reason() == Reason::NoSnapshots => {
                let names = ctx.store.list_directly()?;
                let misplaced = names.iter().any(|n| n.parse::<SnapshotName>().is_ok());
                return if misplaced { Err(e) } else { Ok((saver, None)) };
            }
            Err(e) => return Err(e),
        };
        let now = Utc::now();
        saver.newest = Newest::read(&scan, now);
        let found = Saved::read(&scan, now);
        if let Some(warning) = scan.untrusted_warning() {
            saver.warn(warning);
        }
        match &found {
            Ok(saved) => {
                saver.last = Some(saved.last);
                saver.full.clone_from(&saved.full);
                let timeline = scan.timelines.newest(&scan.catalog);
                saver.line_from = timeline.ok().and_then(|t| t.began(&scan.catalog));
            }
            // Something is there, though it is of no use.
            Err(_) => saver.last = scan.catalog.latest_revision(),
        }
        saver.found = Some(found);
        let newest = scan.catalog.usable().last();
        let newest = newest.map(|i| scan.catalog.snapshots[i].name.clone());
        Ok((saver, newest))
    }

    /// What the store held; `None` where it was empty.
    pub(super) fn saved(&self) -> Option<&Result<Saved, Why>> {
        self.found.as_ref()
    }

    /// The last revision that is saved.
    pub(super) fn last(&self) -> Option<Revision> {
        self.last
    }

    /// The newest full.
    pub(super) fn newest_full(&self) -> Option<&SnapshotName> {
        self.full.as_ref()
    }

    pub(super) fn report(&self) -> &Report {
        &self.report
    }

    /// Forgets what was reported: a follower reports each snapshot as it is saved.
    pub(super) fn take_report(&mut self) -> Report {
        std::mem::take(&mut self.report)
    }

    /// Tells of what was saved; `deltas`: up to the cluster's newest revision.
    pub(super) fn tell(&mut self, tell: &Tell, deltas: bool) {
        let full = self.report.full.as_ref().map(|f| f.0);
        tell.saved(&self.report.written, full);
        if self.report.written.is_empty() && self.taking.leases.is_none() {
            return;
        }
        if let Err(e) = self.tell_by_names(tell, deltas) {
            self.warn(format!("how far the backup is cannot be told: {e}"));
        }
    }

    /// What the names in the store tell.
    fn tell_by_names(&mut self, tell: &Tell, deltas: bool) -> Result<()> {
        if self.tell_by(tell, deltas)? == Err(Behind) {
            // Somebody else has saved something since the store was listed, such as a compaction.
            self.names.forget();
            let _ = self.tell_by(tell, deltas)?;
        }
        Ok(())
    }

    fn tell_by(&mut self, tell: &Tell, deltas: bool) -> Result<Result<(), Behind>> {
        let (mut catalog, is_new) = self.names.catalog(&self.ctx.store)?;
        self.ctx.trust.mark(&mut catalog);
        // Names alone do not tell histories apart.
        let from = self.line_from.unwrap_or(i64::MIN);
        catalog.snapshots.retain(|s| s.name.created >= from);
        let timelines = Timelines::build(&catalog, &NamesOnly)?;
        let timeline = timelines.newest(&catalog)?;
        if let Some(last) = self.last {
            tell.restorable(&catalog, timeline, last);
        }
        let Some(leases) = &self.taking.leases else {
            return Ok(Ok(()));
        };
        let news = News {
            full: self.report.full.is_some(),
            deltas,
            timeline: self.report.timeline_began,
        };
        let state = LeaseState {
            may_be_old: !is_new,
            ..snapshot_leases::state(&catalog, timeline, news)
        };
        let told = snapshot_leases::bring(self.ctx, leases, &state);
        Ok(told.map(|warnings| self.report.warnings.extend(warnings)))
    }

    pub(super) fn warn(&mut self, message: String) {
        tracing::warn!("{message}");
        self.report.warnings.push(message);
    }

    /// Why a full has to be taken before any delta, where the cluster is at revision `current`.
    pub(super) fn full_needed(&self, current: i64) -> Option<Why> {
        match &self.found {
            None => Some(nothing_saved()),
            Some(Err(why)) => Some(why.clone()),
            Some(Ok(saved)) => next::full_needed(saved, current),
        }
    }

    /// Where deltas go on, or why a full is needed.
    ///
    /// # Errors
    /// Those of [`last_saved::position`].
    pub(super) fn position(&self) -> Result<Result<Position, Why>> {
        match &self.found {
            Some(Ok(saved)) => last_saved::position(self.ctx, saved),
            _ => Err(Error::internal("deltas without anything before them")),
        }
    }

    /// A watch of the cluster from a position on: at the members in the order in which they are to be taken; else where
    /// it was said.
    pub(super) fn feed(&self, cluster: &Cluster, position: Position) -> Feed {
        let way = &self.taking.way;
        let chosen = cluster.choose(&[]).into_iter();
        let mut endpoints: Vec<String> = chosen.filter_map(|m| m.endpoint.clone()).collect();
        if endpoints.is_empty() {
            endpoints.clone_from(&way.options().endpoints);
        }
        Feed::new(way.clone(), endpoints, position).of_cluster(cluster.cluster_id)
    }

    /// Why there is no going on from the last saved revision.
    pub(super) fn because(&self, ended: Ended) -> Why {
        let last = self.last.unwrap_or_default();
        match ended {
            Ended::Compacted { compact_revision } => {
                let why = format!(
                    "the cluster has compacted up to revision {compact_revision}, the store ends at {last}"
                );
                (FullReason::Compacted, why)
            }
            Ended::Forked => {
                let why = format!(
                    "at revision {last} the cluster holds other changes than the store: it has another history"
                );
                (FullReason::HistoryMismatch, why)
            }
            Ended::Behind { revision } => next::behind(last, revision),
        }
    }

    /// How a delta is compressed.
    pub(super) fn encoding(&self) -> Encoding {
        let newest = self.newest.map_or(DEFAULT_COMPRESSION, |n| n.compression);
        self.taking.compression.resolve(newest)
    }

    /// Sees to it that the prefix is this cluster's.
    ///
    /// # Errors
    /// Those of [`identity::claim`].
    pub(super) fn claim(&mut self, cluster: &Cluster) -> Result<()> {
        let facts = ClusterFacts::from(cluster);
        identity::claim(self.ctx, &facts, self.taking.take_over)?;
        self.cluster = Some(facts);
        Ok(())
    }

    /// Whether another cluster has taken the prefix over since: a snapshot takes its time, a follower lives long.
    fn check_still_ours(&self) -> Result<()> {
        match &self.cluster {
            Some(facts) => identity::check(&self.ctx.store, facts),
            None => Err(Error::internal(
                "a snapshot of a cluster that was not looked at",
            )),
        }
    }

    /// Takes a full, which then waits for its name.
    ///
    /// # Errors
    /// Those of [`full::take`].
    pub(super) fn take_full(&mut self) -> Result<Taken> {
        let taken = full::take(self.ctx, self.taking, self.newest)?;
        self.cluster = Some(taken.cluster.clone());
        self.report.endpoint = Some(taken.endpoint.clone());
        self.report.members.clone_from(&taken.members);
        self.report.warnings.extend(taken.warnings.iter().cloned());
        Ok(taken)
    }

    /// Gives a full its name. Gives the position behind it, where that is known.
    ///
    /// # Errors
    /// The store's; `TargetExists`; `OtherCluster` where another one has taken over since.
    pub(super) fn publish_full(
        &mut self,
        taken: Taken,
        why: Why,
        is_final: bool,
    ) -> Result<Option<Position>> {
        let (revision, first, position) = (taken.revision, taken.first_revision(), taken.position);
        let forked = matches!(
            why.0,
            FullReason::HistoryMismatch | FullReason::ClusterBehind
        );
        tracing::info!(reason = ?why.0, "a full snapshot: {}", why.1);
        if why.0 == FullReason::TooLarge {
            self.warn(why.1.clone());
        }
        self.check_still_ours()?;
        let written = taken.publish(self.ctx, self.newest, is_final, forked)?;
        self.report.timeline_began |= forked;
        if forked {
            self.line_from = Some(written.name.created);
            self.warn(format!(
                "{}; a new timeline begins with {}: if nobody has set the cluster back, check --endpoints and --store",
                why.1, written.name
            ));
        } else if let Some(last) = self.last.filter(|last| first > last.next()) {
            let (lost, until) = (last.next(), first.previous());
            self.report.hole = Some(Hole {
                first_revision: lost,
                last_revision: until,
            });
            self.warn(format!(
                "revisions {lost} to {until} are lost: etcd had compacted them before they were saved"
            ));
        }
        self.report.full = Some(why);
        self.last = Some(revision);
        self.full = Some(written.name.clone());
        self.names.forget();
        self.wrote(written);
        Ok(position)
    }

    /// Takes a full and gives it its name.
    ///
    /// # Errors
    /// Those of [`take_full`](Self::take_full) and [`publish_full`](Self::publish_full).
    pub(super) fn full_now(&mut self, why: Why, is_final: bool, tell: &Tell) -> Result<()> {
        let started = Instant::now();
        let taken = self.take_full();
        let ended = taken.and_then(|taken| self.publish_full(taken, why, is_final));
        tell.metrics
            .snapshot_took(SnapshotKind::Full, started.elapsed(), ended.is_ok());
        ended.map(drop)
    }

    /// Saves a delta; it can be tried again after an error.
    ///
    /// # Errors
    /// The store's; `OtherCluster` where another one has taken over since; `Io`, `Terminated`.
    pub(super) fn save(&mut self, sealed: &Sealed) -> Result<()> {
        self.check_still_ours()?;
        let saved = sealed.save(self.ctx, self.encoding(), self.newest);
        if !saved.as_ref().is_ok_and(|s| s.was_free) {
            // Somebody else may be at work here.
            self.names.forget();
        }
        let written = saved?.written;
        self.last = Some(sealed.last);
        self.wrote(written);
        Ok(())
    }

    fn wrote(&mut self, written: Written) {
        self.newest = Some(Newest::from(&written.name));
        self.names.add(&written);
        self.report.written.push(written);
    }

    /// Why a full is taken although deltas would do: the newest one is too old.
    pub(super) fn full_too_old(&self, current: Revision, max_age: Duration) -> Option<Why> {
        next::is_full_too_old(self.full.as_ref(), current, Utc::now(), max_age)
    }
}
