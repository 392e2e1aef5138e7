//! Snapshots of a live etcd: fulls, deltas, and both for as long as it lives.
//!
//! Here stands the I/O; [`saved`] decides. `cli` calls it.

mod delta;
mod delta_builder;
mod event_queue;
pub mod follow;
mod full;
mod known_names;
mod last_saved;
mod metrics;
pub mod next;
mod saver;

pub use delta::{DeltaOptions, delta, same_history};
pub use metrics::Tell;
pub use next::FullReason;

use crate::backup::codec::CompressionChoice;
use crate::backup::{Compression, Kind, SnapshotName};
use crate::base::flag_values::yes_or_no;
use crate::error::Result;
use crate::etcd::connect::Connector;
use crate::kubernetes::SnapshotLeases;
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::report::{Clock, Report};
use crate::store::Bandwidth;
use crate::telemetry::metrics::SnapshotKind;
use clap::Args;
use saver::{Saver, nothing_saved};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where no snapshot shows what is wanted.
const DEFAULT_COMPRESSION: Compression = Compression::Gzip;

/// Where snapshots are taken, and how.
#[derive(Clone)]
pub struct Taking {
    /// The way to the members.
    pub way: Connector,
    /// How new snapshots are compressed; the same as the newest, or gzip.
    pub compression: CompressionChoice,
    /// The most bytes a second that are read from etcd.
    pub bandwidth: Option<Bandwidth>,
    /// Leases in Kubernetes that tell how far the backup is.
    pub leases: Option<SnapshotLeases>,
    /// The prefix may have been another cluster's: this one has taken over.
    pub take_over: bool,
}

/// What a task says of the snapshot that it takes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Marks {
    /// Mark the snapshot as final: the last one of a cluster that is shut down
    #[arg(long = "final", value_parser = yes_or_no)]
    #[serde(default, rename = "final")]
    pub is_final: bool,
    /// Continue the backup of another cluster that this cluster has replaced, for example after a restore with
    /// another token
    #[arg(long, value_parser = yes_or_no)]
    #[serde(default)]
    pub take_over: bool,
}

/// What a member said of itself.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Compared {
    /// Its name.
    pub name: String,
    /// Its ID, hexadecimal.
    pub id: String,
    /// Where it was asked; null if nothing is known.
    pub endpoint: Option<String>,
    /// Its HashKV at the revision at which all were compared; null if it did not tell.
    pub hash_kv: Option<u32>,
    /// The revision that it had compacted at, -1 if it never was; null if it did not tell.
    pub compact_revision: Option<i64>,
    /// Whether it holds what most members hold. null if that cannot be told.
    pub agrees: Option<bool>,
    /// Why it did not tell.
    pub error: Option<String>,
    #[serde(skip)]
    member_id: u64,
}

impl Compared {
    fn label(&self) -> String {
        match self.name.as_str() {
            "" => format!("member {}", self.id),
            name => format!("member {name} ({})", self.id),
        }
    }
}

/// A snapshot that was saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Its name.
    pub name: SnapshotName,
    /// Size in the store.
    pub bytes: u64,
    /// Size of its payload.
    pub uncompressed_bytes: u64,
    /// Events of a delta.
    pub events: u64,
    /// HashKV of a full.
    pub hash_kv: Option<u32>,
    /// The compacted revision of a full; −1 where it holds all history.
    pub compact_revision: Option<Revision>,
    /// Keys alive in a full.
    pub live_keys: Option<u64>,
}

impl Written {
    fn kind(&self) -> SnapshotKind {
        match self.name.kind {
            Kind::Full => SnapshotKind::Full,
            Kind::Incr => SnapshotKind::Delta,
        }
    }
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// Something was saved.
    Succeeded,
    /// Nothing has changed since the last snapshot.
    NothingToDo,
}

/// A snapshot in an outcome.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Listed {
    /// The object's name without its folder.
    pub name: String,
    /// `Full`: a whole database. `Incr`: the events of a range of revisions.
    pub kind: Kind,
    /// The first revision of a delta; 0 for a full.
    pub start_revision: Revision,
    /// The last revision; of a full exactly the one that it holds.
    pub last_revision: Revision,
    /// Size in the store, in bytes.
    pub bytes: u64,
    /// Size of what is compressed, in bytes: the database, or the events.
    pub uncompressed_bytes: u64,
    /// Events of a delta; null for a full.
    pub events: Option<u64>,
    /// etcd's HashKV of a full at its last revision; null for a delta.
    pub hash_kv: Option<u32>,
    /// The compacted revision of a full, -1 if it holds all history; null for a delta.
    pub compact_revision: Option<Revision>,
    /// Keys alive in a full; null for a delta.
    pub live_keys: Option<u64>,
}

impl From<&Written> for Listed {
    fn from(w: &Written) -> Self {
        let is_full = w.name.kind == Kind::Full;
        Listed {
            name: w.name.to_string(),
            kind: w.name.kind,
            start_revision: w.name.start,
            last_revision: w.name.last,
            bytes: w.bytes,
            uncompressed_bytes: w.uncompressed_bytes,
            events: (!is_full).then_some(w.events),
            hash_kv: w.hash_kv,
            compact_revision: w.compact_revision,
            live_keys: w.live_keys,
        }
    }
}

/// Revisions that cannot be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Hole {
    /// The first one.
    pub first_revision: Revision,
    /// The last one.
    pub last_revision: Revision,
}

/// What was done. The fields are a contract: `docs/snapshot-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// What was saved, in order.
    pub snapshots: Vec<Listed>,
    /// The last revision that is saved now.
    pub revision: Revision,
    /// Why a full was taken; null if none was. `Requested`: it was asked for. `EmptyBucket`: the store held
    /// no snapshot. `NoFull`: it held deltas only. `FullTooOld`: the newest was older than --max-full-age.
    /// `HistoryMismatch`: at the last saved revision the cluster holds other changes than the store.
    /// `Compacted`: the cluster has compacted what would come next. `ClusterBehind`: the cluster's newest
    /// revision is below the last saved one. `RevisionGap`, `CorruptSnapshot`, `InterleavedTimelines`,
    /// `Unverifiable`: deltas behind what the store holds would be of no use, or it cannot be told what it
    /// holds at its last revision. `TooLarge`: the same, and a higher --max-database-bytes or
    /// --max-value-bytes mends it. `Untrusted`: the newest snapshots are not encrypted, though keys are
    /// given. `Scheduled`: only `follow`.
    pub full_reason: Option<FullReason>,
    /// The same in words; it may change.
    pub message: Option<String>,
    /// Whether the cluster has another history than the store, so that a new timeline begins.
    pub timeline_began: bool,
    /// Revisions between the last saved one and the new full that can never be restored, since etcd had
    /// compacted them. null if there are none.
    pub hole: Option<Hole>,
    /// The member that a full was taken from; null if none was.
    pub endpoint: Option<String>,
    /// The members' comparison before a full; empty if none was taken.
    pub members: Vec<Compared>,
    /// Events saved in deltas.
    pub events: u64,
    /// Bytes of databases and events that were saved, uncompressed.
    pub bytes_read: u64,
    /// Bytes written to the store.
    pub bytes_written: u64,
}

/// Takes a full snapshot. `is_final` marks it as the last one of a cluster that is given up.
///
/// # Errors
/// `OtherCluster`, `MembersDiffer`; those of a way to etcd and to the store; `Io`, `NoSpace`, `Terminated`.
pub fn full(
    ctx: &Context,
    taking: &Taking,
    is_final: bool,
    tell: &Tell,
) -> Result<Report<Outcome>> {
    let clock = Clock::start();
    ctx.store.clean_staging(chrono::Utc::now());
    let mut saver = Saver::open(ctx, taking)?;
    let why = match saver.saved() {
        None => Some(nothing_saved()),
        Some(_) => delta::another_history(taking, &mut saver)?,
    };
    let asked = || {
        let message = "a full snapshot was asked for".to_owned();
        (FullReason::Requested, message)
    };
    saver.full_now(why.unwrap_or_else(asked), is_final, tell)?;
    saver.tell(tell, false);
    Ok(saver.told(clock))
}

impl Saver<'_> {
    fn told(&self, mut clock: Clock) -> Report<Outcome> {
        let report = self.report();
        clock.warnings.clone_from(&report.warnings);
        let written = &report.written;
        clock.report(Outcome {
            status: match written.is_empty() {
                true => Status::NothingToDo,
                false => Status::Succeeded,
            },
            snapshots: written.iter().map(Listed::from).collect(),
            revision: self.last().unwrap_or_default(),
            full_reason: report.full.as_ref().map(|f| f.0),
            message: report.full.as_ref().map(|f| f.1.clone()),
            timeline_began: report.timeline_began,
            hole: report.hole,
            endpoint: report.endpoint.clone(),
            members: report.members.clone(),
            events: written.iter().map(|w| w.events).sum(),
            bytes_read: written.iter().map(|w| w.uncompressed_bytes).sum(),
            bytes_written: written.iter().map(|w| w.bytes).sum(),
        })
    }
}
