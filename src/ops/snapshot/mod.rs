//! Snapshots of a live etcd: one full, the deltas since the last snapshot, or both continuously.
//!
//! This module does the I/O. [`next`] decides from a scan of the store which snapshot comes next. Nothing is written to
//! etcd, and nothing is deleted from the store.

mod delta;
mod delta_builder;
mod event_queue;
pub mod follow;
mod full;
mod metrics;
pub mod next;
mod save;
mod saved;
mod saver;

pub use delta::{DeltaOptions, delta};
pub use metrics::MetricsReporter;
pub use next::FullReason;
pub use save::save;

use crate::backup::codec::CompressionChoice;
use crate::backup::{Compression, Kind, SnapshotName};
use crate::error::Result;
use crate::etcd::cluster::{Cluster, MemberComparison};
use crate::etcd::connect::Connector;
use crate::kubernetes::SnapshotLeases;
use crate::mvcc::Revision;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::store::Bandwidth;
use crate::telemetry::metrics::SnapshotKind;
use delta::full_after_deltas;
use next::nothing_saved;
use saver::Saver;
use serde::Serialize;

/// The compression of the first snapshot in an empty store, unless the user chooses one.
const DEFAULT_COMPRESSION: Compression = Compression::Gzip;

/// The taking that all kinds of snapshots share.
#[derive(Clone)]
pub struct SnapshotSettings {
    /// Connects to the members of the cluster.
    pub connector: Connector,
    /// The compression of new snapshots. `Same` means that of the newest snapshot, or gzip if there is none.
    pub compression: CompressionChoice,
    /// The limit in bytes per second for reading from etcd.
    pub bandwidth: Option<Bandwidth>,
    /// The Leases in Kubernetes that publish how far the backup is.
    pub leases: Option<SnapshotLeases>,
    /// Record this cluster as the owner of the prefix, even if another cluster is recorded there.
    pub take_over: bool,
}

/// A snapshot that this operation has saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSnapshot {
    /// The snapshot's name.
    pub name: SnapshotName,
    /// Size in the store, in bytes.
    pub bytes: u64,
    /// Size of the uncompressed payload, in bytes.
    pub uncompressed_bytes: u64,
    /// Number of events; 0 for a full.
    pub events: u64,
    /// HashKV of a full; `None` for a delta.
    pub hash_kv: Option<u32>,
    /// The compacted revision of a full, −1 if the full holds all history; `None` for a delta.
    pub compact_revision: Option<Revision>,
    /// Number of live keys in a full; `None` for a delta.
    pub live_keys: Option<u64>,
}

impl NewSnapshot {
    fn kind(&self) -> SnapshotKind {
        match self.name.kind {
            Kind::Full => SnapshotKind::Full,
            Kind::Incr => SnapshotKind::Delta,
        }
    }
}

/// A saved snapshot in the report.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TakenSnapshot {
    /// The object's name without its folder; of `snapshot save` the path or URL.
    pub name: String,
    /// `Full`: a whole database. `Incr`: the events of a range of revisions.
    pub kind: Kind,
    /// The first revision of a delta; 0 for a full.
    pub start_revision: Revision,
    /// The last revision of a delta; the only revision of a full.
    pub last_revision: Revision,
    /// Size in the store, in bytes.
    pub bytes: u64,
    /// Size of the uncompressed database or events, in bytes.
    pub uncompressed_bytes: u64,
    /// Number of events in a delta; null for a full.
    pub events: Option<u64>,
    /// etcd's HashKV of a full at its last revision; null for a delta.
    pub hash_kv: Option<u32>,
    /// The compacted revision of a full, -1 if it holds all history; null for a delta.
    pub compact_revision: Option<Revision>,
    /// Number of live keys in a full; null for a delta.
    pub live_keys: Option<u64>,
}

impl From<&NewSnapshot> for TakenSnapshot {
    fn from(snapshot: &NewSnapshot) -> Self {
        let is_full = snapshot.name.kind == Kind::Full;
        TakenSnapshot {
            name: snapshot.name.to_string(),
            kind: snapshot.name.kind,
            start_revision: snapshot.name.start,
            last_revision: snapshot.name.last,
            bytes: snapshot.bytes,
            uncompressed_bytes: snapshot.uncompressed_bytes,
            events: (!is_full).then_some(snapshot.events),
            hash_kv: snapshot.hash_kv,
            compact_revision: snapshot.compact_revision,
            live_keys: snapshot.live_keys,
        }
    }
}

/// A range of revisions that cannot be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Hole {
    /// The first revision of the range.
    pub first_revision: Revision,
    /// The last revision of the range.
    pub last_revision: Revision,
}

/// The result of `snapshot full`, `snapshot delta` and `snapshot save`. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TakenSnapshots {
    /// The snapshots that were saved, in order.
    pub snapshots: Vec<TakenSnapshot>,
    /// The last saved revision.
    pub revision: Revision,
    /// Why a full was taken; null if none was. `Requested`: the user asked for it. `EmptyBucket`: the store
    /// held no snapshot. `NoFull`: it held deltas only. `FullTooOld`: the newest full was older than
    /// --max-full-age. `HistoryMismatch`: at the last saved revision the cluster holds other changes than the
    /// store. `Compacted`: etcd had compacted the revisions that the next delta needs. `ClusterBehind`: the
    /// cluster's newest revision is below the last saved one. `RevisionGap`, `CorruptSnapshot`,
    /// `InterleavedTimelines`, `Unverifiable`: more deltas after the stored snapshots would be useless, or it
    /// is unknown what the store holds at its last revision. `TooLarge`: the same; a higher
    /// --max-database-bytes or --max-value-bytes helps. `Scheduled`: only with `follow`.
    pub full_reason: Option<FullReason>,
    /// `full_reason` in words; the text may change.
    pub full_message: Option<String>,
    /// Whether a new timeline begins, because the cluster has another history than the store.
    pub timeline_began: bool,
    /// Whether it is proven that the cluster continues what was saved before; also true if nothing was. false if nothing
    /// proves it, and if the cluster has another history.
    pub proven: bool,
    /// The revisions between the last saved one and the new full, if etcd had compacted them: they can never
    /// be restored. null if there are none.
    pub hole: Option<Hole>,
    /// The endpoint of the member that the full was taken from; null if no full was taken.
    pub endpoint: Option<String>,
    /// The comparison of the members; empty if they were not compared.
    pub members: Vec<MemberComparison>,
    /// Number of events saved in deltas.
    pub events: u64,
    /// Bytes of databases and events that were saved, uncompressed.
    pub bytes_read: u64,
    /// Bytes written to the store.
    pub bytes_written: u64,
}

/// Takes a full snapshot. In a prefix with deltas, the changes since the last one are saved first. `is_final` marks it as the last one of a cluster that is given up.
///
/// # Errors
/// `OtherCluster` if the prefix is another cluster's backup; `MembersDiffer` if the members hold different
/// data and no majority agrees; the errors of etcd connections and of the store; `Io`, `NoSpace`,
/// `Terminated`.
pub fn full(
    ctx: &Context,
    settings: &SnapshotSettings,
    is_final: bool,
    reporter: &MetricsReporter,
) -> Result<Report<TakenSnapshots>> {
    let clock = ReportBuilder::start();
    let mut saver = Saver::open(ctx, settings)?;
    match &saver.saved.backup {
        None => saver.full_now(nothing_saved(), is_final, reporter)?,
        Some(_) => {
            let cluster = Cluster::observe(&settings.connector)?;
            saver.claim(&cluster)?;
            saver.compare_members(&cluster)?;
            full_after_deltas(ctx, settings, &mut saver, &cluster, is_final, reporter)?;
        }
    }
    saver.report_progress(reporter, false);
    Ok(saver.into_report(clock))
}

impl Saver<'_> {
    fn into_report(self, mut clock: ReportBuilder) -> Report<TakenSnapshots> {
        let summary = &self.summary;
        clock.warnings.clone_from(&summary.warnings);
        let saved = &summary.snapshots;
        let cause = summary.full_cause.as_ref();
        let body = TakenSnapshots {
            snapshots: saved.iter().map(TakenSnapshot::from).collect(),
            revision: self.saved.last.unwrap_or_default(),
            full_reason: cause.map(|c| c.reason),
            full_message: cause.map(|c| c.message.clone()),
            timeline_began: summary.timeline_began,
            proven: !summary.is_unproven,
            hole: summary.hole,
            endpoint: summary.endpoint.clone(),
            members: summary.members.clone(),
            events: saved.iter().map(|s| s.events).sum(),
            bytes_read: saved.iter().map(|s| s.uncompressed_bytes).sum(),
            bytes_written: saved.iter().map(|s| s.bytes).sum(),
        };
        clock.ended(body, !saved.is_empty(), None)
    }
}
