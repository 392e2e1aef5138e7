//! Saves a plain snapshot of a live etcd, as `etcdctl snapshot save` writes it, but of a member that agrees with the
//! others, and checked.

use super::{FullReason, SnapshotSettings, TakenSnapshot, TakenSnapshots, full};
use crate::backup::Compression;
use crate::backup::codec::CompressionChoice;
use crate::error::{Error, Result};
use crate::etcd::cluster::{Cluster, ComparedCluster};
use crate::fold::publish::HashingWriter;
use crate::ops::plain_target::{PlainTarget, Unnamed};
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use sha2::{Digest, Sha256};

/// Saves a plain snapshot. The store of the context is not used.
///
/// # Errors
/// `TargetExists`, `MembersDiffer`; errors of etcd connections, and of the store of the target; `Io`, `NoSpace`,
/// `Terminated`.
pub fn save(
    ctx: &Context,
    settings: &SnapshotSettings,
    target: &PlainTarget,
) -> Result<Report<TakenSnapshots>> {
    let mut clock = ReportBuilder::start();
    target.check(ctx.keys.encrypts())?;
    let cluster = Cluster::observe(&settings.connector)?;
    let compared = ComparedCluster::new(cluster, &settings.connector)?;
    let settings = SnapshotSettings {
        compression: CompressionChoice::Chosen(Compression::None.into()),
        ..settings.clone()
    };
    let taken = full::take(ctx, &settings, None, &compared)?;
    let unnamed = Unnamed::new(target.directory(&ctx.temp_dir))?;
    let failed = |e| Error::io(format!("write {}", target.name()), e);
    let mut hashing = HashingWriter {
        inner: &unnamed.file,
        hash: Some(Sha256::new()),
    };
    taken.packed.write_to(ctx, &mut hashing)?;
    unnamed.file.sync_all().map_err(failed)?;
    unnamed.check_sum(hashing.hash.unwrap_or_default(), ctx.store.cancel())?;
    target.publish(unnamed, ctx.store.cancel())?;
    let saved = TakenSnapshot {
        name: target.name(),
        ..TakenSnapshot::from(&taken.saved(taken.name(ctx, 0, false)))
    };
    clock.warnings.extend(compared.warnings());
    clock.warnings.extend(taken.warnings.iter().cloned());
    Ok(clock.report(TakenSnapshots {
        revision: taken.revision,
        full_reason: Some(FullReason::Requested),
        full_message: None,
        timeline_began: false,
        proven: true,
        hole: None,
        endpoint: Some(taken.endpoint.clone()),
        members: compared.comparisons,
        events: 0,
        bytes_read: saved.uncompressed_bytes,
        bytes_written: saved.bytes,
        snapshots: vec![saved],
    }))
}
