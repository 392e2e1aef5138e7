//! Adds snapshots to the newest timeline of a store, and keeps track of what is saved.
//!
//! The saver does not decide when a snapshot is due. Called by `snapshot full`, `snapshot delta` and
//! `snapshot follow`.

use super::compared::ComparedCluster;
use super::delta_builder::PackedDelta;
use super::first_write::{self, Verdict};
use super::full::{self, UnpublishedFull};
use super::known_names::{KnownNames, Names};
use super::last_saved::{self, LastSaved};
use super::next::{
    self, BackupState, Continuity, FullCause, FullReason, NewestSnapshot, name_time,
};
use super::recent_keys::Compared;
use super::{
    DEFAULT_COMPRESSION, Hole, MemberComparison, MetricsReporter, NewSnapshot, SnapshotSettings,
};
use crate::backup::catalog::{TIMELINES, V2, Wall};
use crate::backup::codec::Encoding;
use crate::backup::timeline::{NamesOnly, Timelines};
use crate::backup::{Catalog, Kind, Snapshot, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::feed::{Ended, Feed, Known};
use crate::fold::publish::{NAMES_TRIED, refuse_plaintext};
use crate::kubernetes::{Behind, LeaseState};
use crate::mvcc::Revision;
use crate::ops::snapshot_leases::{self, News};
use crate::prefix::Context;
use crate::prefix::identity::{self, ClusterFacts};
use crate::prefix::newcomers::{Newcomers, Seen, withdraw};
use crate::prefix::scan::{self, Depth, Scan, has_plain_snapshots, scan_with_tags};
use crate::prefix::tags::TagScope;
use crate::prefix::timeline_records::{self, Leaves, TimelineRecord};
use crate::telemetry::metrics::SnapshotKind;
use chrono::Utc;
use std::time::{Duration, Instant};

/// The most snapshots that are set aside one after the other. Each takes a request or two.
const MOST_SCANS: usize = 1000;
/// The number of records that are tried: if the name of one is taken, that of a second later is next.
const RECORDS_TRIED: i64 = 10;

/// Returns the cause of the first full in an empty store.
pub(super) fn nothing_saved() -> FullCause {
    FullCause::new(FullReason::EmptyBucket, "the store holds no snapshot")
}

/// Why a full is not proven to continue what was saved.
enum Unproven {
    /// Nothing could be compared.
    Unknown(String),
    /// The cluster has another history.
    Contradicted(String),
}

/// What a saver has done since it was opened, or since [`Saver::take_summary`].
#[derive(Default)]
pub(super) struct SaverSummary {
    pub(super) snapshots: Vec<NewSnapshot>,
    pub(super) full_cause: Option<FullCause>,
    pub(super) timeline_began: bool,
    pub(super) hole: Option<Hole>,
    pub(super) endpoint: Option<String>,
    pub(super) members: Vec<MemberComparison>,
    pub(super) warnings: Vec<String>,
}

/// Saves snapshots into one store.
pub(super) struct Saver<'a> {
    ctx: &'a Context,
    settings: &'a SnapshotSettings,
    /// What the store held when the saver was opened; `None` if it was empty.
    backup: Option<Result<BackupState, FullCause>>,
    /// The newest snapshot, from which the next name follows.
    newest: Option<NewestSnapshot>,
    /// The last saved revision.
    last: Option<Revision>,
    /// The newest full of the timeline.
    full: Option<SnapshotName>,
    /// When the timeline began, in seconds since 1970; `None` if no other timeline precedes it.
    timeline_start: Option<i64>,
    names: KnownNames,
    /// What the store held at its end, or why a full is needed; `None` if it was not read.
    last_saved: Option<Result<LastSaved, FullCause>>,
    /// The records of timelines and the fulls that this session knows.
    seen: Seen,
    /// The cluster whose snapshots are saved, or were by an earlier saver of this process; `None` until it is
    /// known.
    cluster: Option<ClusterFacts>,
    /// The comparison of the members for the next full.
    compared: Option<ComparedCluster>,
    /// The IDs of the members that differed at the last comparison. Nothing is read from them.
    differing: Vec<u64>,
    summary: SaverSummary,
}

impl<'a> Saver<'a> {
    /// Scans the store in order to save into it.
    ///
    /// # Errors
    /// Fails as [`look`](Self::look), and with `Configuration` if an identity is given and no recipient.
    pub(super) fn open(ctx: &'a Context, settings: &'a SnapshotSettings) -> Result<Self> {
        refuse_plaintext(ctx)?;
        let (mut saver, scan) = Self::scan(ctx, settings)?;
        if let Some(scan) = scan {
            saver.set_aside_damage(scan)?;
        }
        Ok(saver)
    }

    /// Scans the store without the intention to save.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `NoSnapshots` if the store holds plain snapshots, or those of a chain
    /// directly instead of in v2/: then its URL is wrong.
    pub(super) fn look(ctx: &'a Context, settings: &'a SnapshotSettings) -> Result<Self> {
        Ok(Self::scan(ctx, settings)?.0)
    }

    fn scan(ctx: &'a Context, settings: &'a SnapshotSettings) -> Result<(Self, Option<Scan>)> {
        ctx.damage.begin_ignoring();
        let mut saver = Saver {
            ctx,
            settings,
            backup: None,
            newest: None,
            last: None,
            full: None,
            timeline_start: None,
            names: KnownNames::default(),
            last_saved: None,
            seen: Seen::default(),
            cluster: None,
            compared: None,
            differing: Vec::new(),
            summary: SaverSummary::default(),
        };
        let scan = match scan_with_tags(ctx, Depth::Doubtful, TagScope::Chain) {
            Ok(scan) => scan,
            Err(e) if e.reason() == Reason::NoSnapshots => {
                let paths = ctx.store.first_paths()?;
                let is_elsewhere = paths
                    .iter()
                    .any(|p| !p.contains('/') && p.parse::<SnapshotName>().is_ok());
                if is_elsewhere || has_plain_snapshots(&paths) {
                    return Err(e);
                }
                for record in timeline_records::list(&ctx.store)? {
                    saver.seen.add(record.path);
                }
                return Ok((saver, None));
            }
            Err(e) => return Err(e),
        };
        let scan = saver.without_unreadable(scan)?;
        saver.begin_at(&scan);
        if let Some(warning) = scan.untrusted_warning() {
            saver.warn(warning);
        }
        Ok((saver, Some(scan)))
    }

    /// Scans again as long as names leave a doubt and a snapshot cannot be opened that would tell: what cannot be
    /// opened counts for nothing.
    fn without_unreadable(&mut self, mut scan: Scan) -> Result<Scan> {
        for _ in 0..MOST_SCANS {
            let mut is_new = false;
            for e in scan.contents.unreadable.values() {
                is_new |= self.set_aside(e);
            }
            if !is_new {
                break;
            }
            scan = scan.again(self.ctx)?;
        }
        Ok(scan)
    }

    /// Sets a snapshot aside that cannot be opened. Returns whether that is new.
    fn set_aside(&mut self, e: &Error) -> bool {
        let name = e.set_aside();
        let is_new = name.is_some_and(|name| self.ctx.damage.add(name, e));
        if is_new {
            self.warn(format!("{e}: this snapshot counts for nothing"));
        }
        is_new
    }

    /// Reads what the store holds at its end. Without a snapshot that cannot be opened, it ends elsewhere.
    fn set_aside_damage(&mut self, mut scan: Scan) -> Result<()> {
        for _ in 0..MOST_SCANS {
            let Some(Ok(backup)) = &self.backup else {
                break;
            };
            let read = || last_saved::read(self.ctx, backup);
            // A transient fault of the store is no damage of the object.
            let last_saved = match read() {
                Err(e) if e.reason().is_bad_data() => read(),
                last_saved => last_saved,
            };
            match last_saved {
                Ok(last_saved) => {
                    self.last_saved = Some(last_saved);
                    break;
                }
                // Nothing could be opened: fulls go by names, and deltas fail.
                Err(e) if e.reason() == Reason::CannotDecrypt && !self.ctx.keys.decrypts() => break,
                Err(e) if self.set_aside(&e) => {
                    scan = self.without_unreadable(scan.again(self.ctx)?)?;
                    self.begin_at(&scan);
                }
                Err(e) if e.set_aside().is_some() => break,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Begins at what a scan has found.
    fn begin_at(&mut self, scan: &Scan) {
        let now = Utc::now();
        self.newest = NewestSnapshot::read(&scan.catalog, now);
        self.seen = Seen::of(&scan.catalog);
        (self.full, self.timeline_start) = (None, None);
        let backup = BackupState::read(scan, now);
        match &backup {
            Ok(backup) => {
                self.last = Some(backup.last);
                self.full.clone_from(&backup.full);
                let timeline = scan.timelines.newest(&scan.catalog);
                self.timeline_start = timeline.ok().and_then(|t| t.began(&scan.catalog));
            }
            // The store has snapshots, but no delta can continue them.
            Err(_) => self.last = scan.catalog.latest_revision(),
        }
        self.backup = Some(backup);
    }

    /// Returns what the store held when it was scanned: `None` if it was empty, `Err` if a full is needed
    /// whatever the cluster holds.
    pub(super) fn backup(&self) -> Option<&Result<BackupState, FullCause>> {
        self.backup.as_ref()
    }

    /// Returns the last saved revision.
    pub(super) fn last(&self) -> Option<Revision> {
        self.last
    }

    /// Whether the newest timeline has deltas.
    pub(super) fn has_deltas(&self) -> bool {
        matches!(&self.backup, Some(Ok(backup)) if backup.has_deltas)
    }

    /// Returns the newest full.
    pub(super) fn newest_full(&self) -> Option<&SnapshotName> {
        self.full.as_ref()
    }

    /// Returns what was done so far.
    pub(super) fn summary(&self) -> &SaverSummary {
        &self.summary
    }

    /// Returns what was done so far and begins a new summary. A follower reports after each snapshot.
    pub(super) fn take_summary(&mut self) -> SaverSummary {
        std::mem::take(&mut self.summary)
    }

    /// Updates the metrics and the Leases. `deltas_are_current` says that the deltas reach the cluster's
    /// newest revision.
    pub(super) fn report_progress(&mut self, reporter: &MetricsReporter, deltas_are_current: bool) {
        let full_reason = self.summary.full_cause.as_ref().map(|c| c.reason);
        reporter.count_saved(&self.summary.snapshots, full_reason);
        if let Some(full) = self.full.as_ref().filter(|_| self.summary.timeline_began) {
            reporter.metrics.timeline_began(full.created_at());
        }
        if self.summary.snapshots.is_empty() && self.settings.leases.is_none() {
            return;
        }
        if let Err(e) = self.report_known_names(reporter, deltas_are_current) {
            self.warn(format!("cannot report how far the backup is: {e}"));
        }
    }

    /// Updates the metrics and the Leases from the cached names. Lists the store if the cache is too old.
    fn report_known_names(
        &mut self,
        reporter: &MetricsReporter,
        deltas_are_current: bool,
    ) -> Result<()> {
        if self.try_report(reporter, deltas_are_current)? == Err(Behind) {
            // Another writer, such as a compaction, has saved a snapshot since the last listing.
            self.names.forget();
            let _ = self.try_report(reporter, deltas_are_current)?;
        }
        Ok(())
    }

    fn try_report(
        &mut self,
        reporter: &MetricsReporter,
        deltas_are_current: bool,
    ) -> Result<Result<(), Behind>> {
        let Names {
            mut catalog,
            is_fresh,
            overlap,
        } = self.names.names(&self.ctx.store)?;
        if let Some((own, other)) = overlap {
            self.warn(format!(
                "another snapshotter writes to {}: its delta {other} has revisions {} to {}, and this one has saved {} to {} as {own}: stop one of the two",
                self.ctx.store.url(), other.start, other.last, own.start, own.last
            ));
        }
        self.mark_untrusted(&mut catalog);
        // Names alone cannot tell timelines apart: leave out everything before this one.
        let start = self.timeline_start.unwrap_or(i64::MIN);
        catalog.snapshots.retain(|s| s.name.created >= start);
        let timelines = Timelines::build(&catalog, &NamesOnly)?;
        let timeline = timelines.newest(&catalog)?;
        if let Some(last) = self.last {
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

    /// Marks the snapshots that count for nothing.
    fn mark_untrusted(&self, catalog: &mut Catalog) {
        self.ctx.trust.mark(catalog);
        self.ctx.damage.mark(&self.ctx.store, catalog);
    }

    /// Logs a warning and adds it to the summary.
    pub(super) fn warn(&mut self, message: String) {
        tracing::warn!("{message}");
        self.summary.warnings.push(message);
    }

    /// Returns why a full has to be taken before any delta, for a cluster at revision `current`.
    pub(super) fn full_needed(&self, current: i64) -> Option<FullCause> {
        match &self.backup {
            None => Some(nothing_saved()),
            Some(Err(cause)) => Some(cause.clone()),
            Some(Ok(backup)) => next::full_needed(backup, current),
        }
    }

    /// Returns what the store holds at its end, or why a full is needed.
    ///
    /// # Errors
    /// Fails as [`last_saved::read`].
    fn last_saved(&mut self) -> Result<Result<&LastSaved, FullCause>> {
        let last_saved = match (self.last_saved.take(), &self.backup) {
            (Some(last_saved), _) => last_saved,
            (None, Some(Ok(backup))) => match last_saved::read(self.ctx, backup) {
                Err(e) if e.reason().is_bad_data() => Err(FullCause::from_bad_data(&e)),
                last_saved => last_saved?,
            },
            (None, Some(Err(cause))) => Err(cause.clone()),
            (None, None) => return Err(Error::internal("a delta needs a snapshot before it")),
        };
        let last_saved = self.last_saved.insert(last_saved);
        Ok(last_saved.as_ref().map_err(FullCause::clone))
    }

    /// Returns the last saved transactions, after which deltas continue, or why a full is needed. If a compaction left
    /// none of them, the keys of the cluster must prove that it continues.
    ///
    /// # Errors
    /// Fails as [`last_saved::read`], and with the errors of etcd connections.
    pub(super) fn known(&mut self, cluster: &Cluster) -> Result<Result<Known, FullCause>> {
        let known = match self.last_saved()? {
            Ok(last_saved) => last_saved.known.clone(),
            Err(cause) => return Ok(Err(cause)),
        };
        let last = known.position().revision;
        // Revision 1 is the same in each etcd.
        if known.position().has_changes() || last <= 1 || cluster.revision < last {
            return Ok(Ok(known));
        }
        Ok(match self.compare_keys(cluster)? {
            Compared::Same => Ok(known),
            _ => Err(FullCause::new(
                FullReason::Unverifiable,
                format!(
                    "the snapshots were compacted, so they no longer hold what revision {last} changed"
                ),
            )),
        })
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

    /// Returns the IDs of the members that differed at the last comparison.
    pub(super) fn differing(&self) -> &[u64] {
        &self.differing
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
        let last = self.last.unwrap_or_default();
        match ended {
            Ended::Compacted { compact_revision } => FullCause::new(
                FullReason::Compacted,
                format!(
                    "the cluster has compacted up to revision {compact_revision}, the store ends at {last}"
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
        let newest = self.newest.map_or(DEFAULT_COMPRESSION, |n| n.compression);
        self.settings.compression.resolve(newest)
    }

    /// Records the cluster as the owner of the prefix, or checks that it is. If the prefix holds snapshots and
    /// records no cluster, compares histories first.
    ///
    /// # Errors
    /// Fails as [`identity::claim`], and with `OtherCluster` if the cluster has another history than the
    /// snapshots.
    pub(super) fn claim(&mut self, cluster: &Cluster) -> Result<()> {
        let (ctx, take_over) = (self.ctx, self.settings.take_over);
        let facts = ClusterFacts::from(cluster);
        identity::claim(ctx, &facts, take_over, || match take_over {
            true => Ok(()),
            false => self.check_first_write(cluster),
        })?;
        self.cluster = Some(facts);
        Ok(())
    }

    /// Compares histories before the first write to a prefix that records no cluster. Writes nothing.
    ///
    /// # Errors
    /// Fails with `OtherCluster` if the cluster has another history than the snapshots, and as
    /// [`first_write::compare`].
    pub(super) fn check_first_write(&mut self, cluster: &Cluster) -> Result<()> {
        let Some(backup) = self.backup.clone() else {
            return Ok(());
        };
        let store = &self.ctx.store;
        let verdict = match self.last {
            Some(last) => {
                let last_changes = || self.compare_last_changes(cluster);
                first_write::compare(&backup, last, cluster, last_changes)?
            }
            None => Verdict::Unknown("no snapshot can be used".to_owned()),
        };
        let verdict = match verdict {
            Verdict::Compacted => match self.compare_keys(cluster)? {
                Compared::Same | Compared::Possible => Verdict::Same,
                Compared::Differs(difference) => Verdict::Differs(difference),
                Compared::Nothing => Verdict::Unknown(
                    "etcd has compacted what was saved last, and has none of the keys that were changed last"
                        .to_owned(),
                ),
            },
            verdict => verdict,
        };
        match verdict {
            Verdict::Same | Verdict::Compacted => {}
            Verdict::Unknown(why) => self.warn(format!(
                "{} holds snapshots and records no cluster, and whether they are of this cluster is unknown: {why}. This cluster is recorded as theirs",
                store.url()
            )),
            // A backup that runs already must not end because its record was deleted.
            Verdict::Differs(difference) if self.has_saved_of(cluster) => self.warn(format!(
                "{} records no cluster any more, and the history of this cluster differs: {difference}. This follower goes on, since it has saved this cluster's history there; another snapshotter would need --take-over",
                store.url()
            )),
            Verdict::Differs(difference) => {
                let facts = ClusterFacts::from(cluster);
                return Err(identity::other_history_error(store, &facts, &difference));
            }
        }
        Ok(())
    }

    /// Compares the last saved keys with those of the cluster.
    fn compare_keys(&mut self, cluster: &Cluster) -> Result<Compared> {
        let last = self.last.unwrap_or_default().0;
        let keys = match &self.last_saved {
            Some(Ok(last_saved)) => &last_saved.keys,
            _ => return Ok(Compared::Nothing),
        };
        first_write::compare_keys(keys, last, &self.settings.connector, cluster)
    }

    /// Compares the last saved changes. Returns `None` if etcd has compacted that revision, or if
    /// the store holds no change of it any more.
    fn compare_last_changes(&mut self, cluster: &Cluster) -> Result<Option<Verdict>> {
        let known = match self.last_saved()? {
            Ok(last) if last.known.position().has_changes() => last.known.clone(),
            Ok(_) => return Ok(None),
            Err(cause) => return Ok(Some(Verdict::Unknown(cause.message))),
        };
        Ok(match self.feed(cluster, known).verify()? {
            None => Some(Verdict::Same),
            Some(Ended::Compacted { .. }) => None,
            Some(ended) => Some(Verdict::Differs(self.cause_of(ended).message)),
        })
    }

    /// Returns the cluster whose snapshots are saved, once it is known.
    pub(super) fn cluster(&self) -> Option<&ClusterFacts> {
        self.cluster.as_ref()
    }

    /// Tells the saver for which cluster an earlier saver of this process was allowed to save, and which
    /// members differed at its last comparison.
    pub(super) fn continue_for(&mut self, cluster: Option<ClusterFacts>, differing: Vec<u64>) {
        self.cluster = cluster;
        self.differing = differing;
    }

    /// Whether this process was already allowed to save snapshots of the cluster.
    fn has_saved_of(&self, cluster: &Cluster) -> bool {
        let known = self.cluster.as_ref();
        known.is_some_and(|known| known.cluster_id == cluster.cluster_id)
    }

    /// Checks that no other cluster has taken over the prefix since [`claim`](Self::claim). A snapshot takes
    /// long enough for that, and a follower even more so.
    fn check_still_ours(&self) -> Result<()> {
        match &self.cluster {
            Some(facts) => identity::check(&self.ctx.store, facts).map(drop),
            None => Err(Error::internal("a snapshot of an unknown cluster")),
        }
    }

    /// Observes the cluster for a full, and compares its members. Claims the prefix again, because a follower
    /// runs for long.
    fn observe_for_full(&mut self) -> Result<ComparedCluster> {
        let (ctx, take_over) = (self.ctx, self.settings.take_over);
        let cluster = Cluster::observe(&self.settings.connector)?;
        identity::claim(ctx, &ClusterFacts::from(&cluster), take_over, || {
            // The saver has claimed a prefix with snapshots already, so a running follower's record was deleted.
            if self.newest.is_some() && !take_over {
                tracing::warn!(
                    "{} records no cluster any more: this snapshotter goes on and records its cluster again. If the cluster has replaced another one, another snapshotter would need --take-over",
                    ctx.store.url()
                );
            }
            Ok(())
        })?;
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
        let new_full = full::take(self.ctx, self.settings, self.newest, &compared)?;
        if self.backup.is_none() && self.last.is_none() {
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

    /// Publishes a full. Returns what a watch compares that continues after it, if the changes of its last revision
    /// can be read.
    ///
    /// A full that is not proven to continue what was saved last begins another history.
    ///
    /// # Errors
    /// Fails with the store's errors, with `TargetExists`, and with `OtherCluster` if another cluster has
    /// taken over the prefix; with `Conflict` if another snapshotter has begun another history meanwhile.
    pub(super) fn publish_full(
        &mut self,
        new_full: UnpublishedFull,
        cause: FullCause,
        is_final: bool,
    ) -> Result<Option<Known>> {
        let revision = new_full.revision;
        let first = new_full.first_revision();
        let known = new_full.known.clone();
        tracing::info!(reason = ?cause.reason, "a full snapshot: {}", cause.message);
        if cause.reason == FullReason::TooLarge {
            self.warn(cause.message.clone());
        }
        self.check_still_ours()?;
        // What the record says; the report says why a full was needed at all.
        let mut recorded = cause.reason;
        let (broken, why) = match cause.continuity {
            Continuity::Proven => (None, String::new()),
            Continuity::Broken(left_at) => (Some(left_at), cause.message.clone()),
            Continuity::Unknown => match self.prove_by_keys(&new_full)? {
                Ok(()) => (None, String::new()),
                Err(Unproven::Unknown(why)) => (Some(None), why),
                Err(Unproven::Contradicted(why)) => {
                    recorded = FullReason::HistoryMismatch;
                    (Some(None), why)
                }
            },
        };
        let snapshot = match broken {
            Some(left_at) => self.begin_timeline(&new_full, recorded, left_at, is_final)?,
            None => {
                let created = name_time(Kind::Full, self.newest, Utc::now());
                let newer = self.newer_wall()?;
                let (created, tried) = Wall::names_before(newer.as_ref(), created, NAMES_TRIED);
                new_full.publish(self.ctx, created, is_final, tried)?
            }
        };
        let begins_timeline = broken.is_some();
        let newer = match begins_timeline {
            true => self.newer_wall()?,
            false => self.look_again(&snapshot.name, known.as_ref())?,
        };
        self.summary.timeline_began |= begins_timeline;
        if begins_timeline {
            self.timeline_start = Some(snapshot.name.created);
            self.warn(format!(
                "{why}; a new timeline begins with {}: if nobody has set the cluster back, check --endpoints and --store",
                snapshot.name
            ));
        } else if let Some(last) = self.last.filter(|last| first > last.next()) {
            let (lost, until) = (last.next(), first.previous());
            self.summary.hole = Some(Hole {
                first_revision: lost,
                last_revision: until,
            });
            self.warn(format!(
                "revisions {lost} to {until} are lost: etcd had compacted them before they were saved"
            ));
        }
        self.summary.full_cause = Some(cause);
        if let Some(Ok(backup)) = &mut self.backup {
            backup.untrusted = None;
        }
        self.last = Some(revision);
        self.full = Some(snapshot.name.clone());
        self.names.forget();
        self.record(snapshot);
        self.end_at(newer)?;
        Ok(known)
    }

    /// Compares the keys that were saved last with those of a new full. The inner error says why it is not proven
    /// that the full continues what was saved.
    fn prove_by_keys(&mut self, new_full: &UnpublishedFull) -> Result<Result<(), Unproven>> {
        let last = match &self.backup {
            None => return Ok(Ok(())),
            Some(Ok(backup)) => backup.last,
            Some(Err(cause)) => {
                return Ok(Err(Unproven::Unknown(format!(
                    "what was saved last cannot be compared: {}",
                    cause.message
                ))));
            }
        };
        let keys = match self.last_saved() {
            Ok(Ok(last_saved)) => last_saved.keys.as_slice(),
            Ok(Err(cause)) => return Ok(Err(Unproven::Unknown(cause.message))),
            // Who can only encrypt takes fulls alone: a warning says that their history was not compared.
            Err(e) if e.reason() == Reason::CannotDecrypt => return Ok(Ok(())),
            Err(e) => return Err(e),
        };
        Ok(match new_full.compare_keys(keys, last)? {
            Compared::Same => Ok(()),
            Compared::Differs(why) => Err(Unproven::Contradicted(why)),
            Compared::Nothing | Compared::Possible => Err(Unproven::Unknown(format!(
                "the cluster has compacted revision {last}, and none of the changes that were saved last is left, so whether it has the history of the store is unknown"
            ))),
        })
    }

    /// Returns the last revision that is the same in the last saved changes and in those of a full, if it is known.
    fn last_common(&mut self, full: &UnpublishedFull) -> Result<Option<Revision>> {
        if !matches!(self.backup, Some(Ok(_))) {
            return Ok(None);
        }
        let saved = match self.last_saved() {
            Ok(Ok(saved)) => &saved.known,
            Ok(Err(_)) => return Ok(None),
            Err(e) if e.reason() == Reason::CannotDecrypt => return Ok(None),
            Err(e) => return Err(e),
        };
        let common = full
            .known
            .as_ref()
            .and_then(|known| saved.same_up_to(known));
        Ok(common.map(Revision))
    }

    /// Publishes a full that begins another history, with the record that says so before it.
    fn begin_timeline(
        &mut self,
        full: &UnpublishedFull,
        cause: FullReason,
        left_at: Option<Revision>,
        is_final: bool,
    ) -> Result<NewSnapshot> {
        let history = match &self.backup {
            Some(Ok(backup)) => Some(backup.timeline.clone()),
            _ => None,
        };
        let left_at = match left_at {
            Some(left_at) => Some(left_at),
            None => self.last_common(full)?,
        };
        let leaves = match (history, left_at) {
            (Some(history), Some(revision)) => Leaves::At { history, revision },
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
        let mut second = name_time(Kind::Full, self.newest, now);
        let mut catalog = self.names_now()?;
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
            self.seen.add(path.clone());
            // A writer that named a snapshot before the record was there may not have seen it.
            let known = std::mem::replace(&mut catalog, self.names_now()?);
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

    /// Lists the names in the store.
    fn names_now(&self) -> Result<Catalog> {
        let mut catalog = scan::by_names(&self.ctx.store)?;
        self.mark_untrusted(&mut catalog);
        Ok(catalog)
    }

    /// Returns the oldest record of a timeline that this session does not know and that is later than all that it knows:
    /// what it names belongs before it.
    fn newer_wall(&self) -> Result<Option<Wall>> {
        let mut records = self.seen.new_records(&self.ctx.store)?.into_iter();
        let newest = self.newest.map_or(i64::MIN, |newest| newest.created);
        let now = Utc::now();
        Ok(records.find(|wall| wall.second > newest && next::is_plausible(wall, now)))
    }

    /// Lists the records and the fulls again after a snapshot got its name, and excludes the snapshot if it is behind a
    /// record or a full of another history. `known` are the last transactions of the history that was saved. Returns a
    /// record that is later than the snapshot.
    ///
    /// # Errors
    /// `Conflict` if the snapshot was excluded; the errors of the store.
    fn look_again(&mut self, own: &SnapshotName, known: Option<&Known>) -> Result<Option<Wall>> {
        let path = format!("{V2}/{own}");
        self.seen.add(path.clone());
        let Newcomers { records, fulls } = self.seen.look(&self.ctx.store)?;
        if let Some(record) = records.iter().find(|record| record.second <= own.created) {
            let why = format!("{} was written", record.path);
            return Err(withdraw(self.ctx, &path, &why));
        }
        let record = records.into_iter().next();
        for full in fulls {
            // What is behind the record is separated from this snapshot.
            if record
                .as_ref()
                .is_some_and(|record| record.second <= full.name.created)
            {
                continue;
            }
            if !self.is_of_this_history(&full, known)? {
                let why = format!("{} of another history was saved", full.path);
                return Err(withdraw(self.ctx, &path, &why));
            }
            self.seen.add(full.path);
        }
        Ok(record)
    }

    /// Returns whether a full that somebody else has saved is proven to be of the history that this session saves.
    fn is_of_this_history(&self, full: &Snapshot, known: Option<&Known>) -> Result<bool> {
        let name = &full.name;
        if self
            .timeline_start
            .is_some_and(|start| name.created < start)
        {
            return Ok(true);
        }
        let newest = self.newest.map_or(i64::MIN, |newest| newest.created);
        if Some(name.last) <= self.last && next::came_from(name, newest) {
            return Ok(true);
        }
        let theirs = self
            .ctx
            .full(full)
            .and_then(|(db, base)| last_saved::known_of_full(&db, &base, name.last));
        match theirs {
            Ok(theirs) => Ok(known.is_some_and(|known| known.is_proven_by(&theirs))),
            // Compacted at its end: nothing can be compared.
            Err(e) if e.reason() == Reason::OutOfRange => Ok(false),
            // No state rests on what cannot be opened.
            Err(e) if e.reason().is_unreadable() => Ok(true),
            Err(e) => Err(e),
        }
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
        let newer = self.newer_wall()?;
        let saved = delta.save(self.ctx, self.newest, newer.as_ref());
        if !saved.as_ref().is_ok_and(|s| s.was_name_free) {
            // Another writer may be at work in this store.
            self.names.forget();
        }
        let snapshot = saved?.snapshot;
        let newer = self.look_again(&snapshot.name, Some(known))?;
        self.last = Some(delta.last());
        self.record(snapshot);
        self.end_at(newer)
    }

    fn record(&mut self, snapshot: NewSnapshot) {
        self.newest = Some(NewestSnapshot::from(&snapshot.name));
        self.names.add(&snapshot);
        self.summary.snapshots.push(snapshot);
    }

    /// Returns a cause for a full, with deltas up to it, if untrusted snapshots demand one or if the newest one is too
    /// old.
    pub(super) fn full_too_old(&self, current: Revision, max_age: Duration) -> Option<FullCause> {
        if let Some(Ok(backup)) = &self.backup
            && let Some(cause) = &backup.untrusted
        {
            return Some(FullCause {
                // Who asks has compared the cluster with the last saved changes.
                continuity: Continuity::Proven,
                ..cause.clone()
            });
        }
        next::full_too_old(self.full.as_ref(), current, Utc::now(), max_age)
    }
}
