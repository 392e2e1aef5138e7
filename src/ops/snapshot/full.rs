//! Takes a full snapshot from a member that holds the same data as the majority.
//!
//! The member's snapshot stream is compressed while it arrives, verified, and then uploaded: only then its revision is
//! known, and so its name. This module does not decide when a full is taken.

use super::next::NewestSnapshot;
use super::{NewSnapshot, SnapshotSettings};
use crate::backup::codec::Encoding;
use crate::backup::frame::FrameReader;
use crate::backup::{Kind, SnapshotName};
use crate::base::limits::Limits;
use crate::base::opt;
use crate::base::parallel::side_by_side;
use crate::base::{ReadAt, Tee};
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::{ComparedCluster, MemberHash};
use crate::etcd::feed::{Ended, Known, Likeness};
use crate::etcd::snapshot::SnapshotReader;
use crate::fold::publish::{PackedSnapshot, Packer};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::{Base, HashKv, Revision, hash_kv};
use crate::prefix::Context;
use crate::prefix::identity::ClusterFacts;
use crate::prefix::last_saved;
use crate::prefix::open::DatabaseFile;
use crate::telemetry::progress::Step;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

/// A full snapshot that is verified and packed, but not at the store yet.
pub(super) struct UnpublishedFull {
    pub(super) packed: PackedSnapshot,
    encoding: Encoding,
    /// When the snapshot was begun.
    pub(super) started: Instant,
    /// The revision that the snapshot holds.
    pub(super) revision: Revision,
    pub(super) base: Base,
    hash: HashKv,
    /// The last transactions, which a watch compares that continues after this full.
    pub(super) known: Known,
    /// The database that was received.
    pub(super) db: Database<DatabaseFile>,
    /// The endpoint of the member that the snapshot was taken from.
    pub(super) endpoint: String,
    /// The cluster that the snapshot was taken from.
    pub(super) cluster: ClusterFacts,
    /// Size of the database, in bytes.
    pub(super) payload_bytes: u64,
    pub(super) warnings: Vec<String>,
}

/// How long a watch may take to show that a full has its history.
pub(super) const CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);

/// What a proven watch says of a full that was taken meanwhile.
pub(super) enum Watched {
    /// Both have one history.
    Meets,
    /// Nothing proves that.
    Unknown,
    /// The full has another history.
    Ended(Ended),
}

impl UnpublishedFull {
    /// Compares this full with the last transactions of a watch. `confirms` tells whether the watch, not connected again,
    /// has shown the full's revision after the full's last byte.
    ///
    /// # Errors
    /// Those of `confirms`.
    pub(super) fn as_watched(
        &self,
        watched: &Known,
        confirms: impl FnOnce() -> Result<bool>,
    ) -> Result<Watched> {
        let revision = self.revision.0;
        if revision < watched.revision() {
            return Ok(Watched::Ended(Ended::Behind { revision }));
        }
        Ok(match watched.compare(&self.known) {
            Likeness::Same => Watched::Meets,
            Likeness::Differs => {
                let same_up_to = watched.same_up_to(&self.known);
                Watched::Ended(Ended::Forked { same_up_to })
            }
            Likeness::Unknown if confirms()? => Watched::Meets,
            Likeness::Unknown => Watched::Unknown,
        })
    }

    /// Returns the name of this full with the time `created`.
    pub(super) fn name(&self, ctx: &Context, created: i64, is_final: bool) -> SnapshotName {
        SnapshotName {
            kind: Kind::Full,
            start: Revision(0),
            last: self.revision,
            created,
            compression: self.encoding.compression,
            is_final,
            is_encrypted: ctx.keys.encrypts(),
        }
    }

    /// Writes the snapshot to the store under the first free one of `tried` names, which have the times from `created`
    /// on.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `TargetExists` if other objects have the names.
    pub(super) fn publish(
        &self,
        ctx: &Context,
        created: i64,
        is_final: bool,
        tried: i64,
    ) -> Result<NewSnapshot> {
        let mut name = self.name(ctx, created, is_final);
        self.packed.publish(ctx, &mut name, tried)?;
        tracing::info!(
            snapshot = %name,
            revision = self.revision.0,
            hash_kv = self.hash.hash,
            bytes = self.packed.bytes(),
            endpoint = self.endpoint,
            "saved a full snapshot"
        );
        Ok(self.saved(name))
    }

    /// Describes this full when it has its name.
    pub(super) fn saved(&self, name: SnapshotName) -> NewSnapshot {
        NewSnapshot {
            bytes: self.packed.bytes(),
            uncompressed_bytes: self.payload_bytes,
            events: 0,
            hash_kv: Some(self.hash.hash),
            compact_revision: Some(self.hash.compact_revision),
            live_keys: Some(self.hash.live_keys),
            name,
        }
    }
}

/// Takes a full snapshot from the best member, or from the next one if that fails.
///
/// # Errors
/// Fails with `EtcdUnreachable`, `NoQuorum`, and for wrong settings or credentials; with the store's errors; with
/// `Io`, `NoSpace`, `Terminated`.
pub(super) fn take(
    ctx: &Context,
    settings: &SnapshotSettings,
    newest: Option<NewestSnapshot>,
    compared: &ComparedCluster,
) -> Result<UnpublishedFull> {
    let started = Instant::now();
    let cluster = &compared.cluster;
    let newest = newest.map_or(super::DEFAULT_COMPRESSION, |n| n.compression);
    let encoding = settings.compression.resolve(newest);
    let mut failures: Vec<Error> = Vec::new();
    for member in cluster.choose(&compared.differing()) {
        let Some(endpoint) = &member.endpoint else {
            continue;
        };
        let member_hash = compared.hashes.iter().find(|h| h.member == member.id);
        match take_and_check(
            ctx,
            settings,
            endpoint,
            encoding,
            cluster.revision,
            member_hash,
        ) {
            Ok(mut new_full) => {
                new_full.started = started;
                new_full.cluster = ClusterFacts::from(cluster);
                return Ok(new_full);
            }
            Err(e) if another_member_may_succeed(&e) => {
                tracing::warn!(endpoint, "no snapshot from this member: {e}");
                failures.push(e);
            }
            Err(e) => return Err(e),
        }
    }
    let reason = failures.first().map(Error::reason);
    let messages: Vec<String> = failures.iter().map(Error::to_string).collect();
    Err(reason
        .unwrap_or(Reason::EtcdUnreachable)
        .error(if messages.is_empty() {
            "no healthy member to take a snapshot from".to_owned()
        } else {
            format!("no member gave a whole snapshot: {}", messages.join("; "))
        }))
}

/// Takes a snapshot from one member, and compares it with the HashKV that the member returned.
fn take_and_check(
    ctx: &Context,
    settings: &SnapshotSettings,
    endpoint: &str,
    encoding: Encoding,
    min_revision: i64,
    member_hash: Option<&MemberHash>,
) -> Result<UnpublishedFull> {
    let new_full = take_from(ctx, settings, endpoint, encoding, min_revision)?;
    check_hash(&new_full, member_hash)?;
    Ok(new_full)
}

/// Checks that the received database has the HashKV that the member returned before.
fn check_hash(new_full: &UnpublishedFull, member_hash: Option<&MemberHash>) -> Result<()> {
    let Some((revision, hash)) = member_hash.and_then(|h| Some((h.revision, h.hash?))) else {
        return Ok(());
    };
    let ours = if new_full.revision.0 == revision {
        new_full.hash
    } else {
        hash_kv(&new_full.db, Some(Revision(revision)))?
    };
    // Hashes of different compacted revisions are not comparable.
    if ours.compact_revision.0 != hash.compact_revision || ours.is(hash.hash) {
        return Ok(());
    }
    Err(Reason::MembersDiffer.error(format!(
        "the snapshot of {} has HashKV {} at revision {revision}, the members have {}",
        new_full.endpoint, ours.hash, hash.hash
    )))
}

/// Whether the failure is about one member, so that a snapshot of another member may succeed.
fn another_member_may_succeed(e: &Error) -> bool {
    matches!(
        e.reason(),
        Reason::EtcdUnreachable
            | Reason::NoQuorum
            | Reason::CorruptSnapshot
            | Reason::NameMismatch
            | Reason::MembersDiffer
            | Reason::Configuration
            | Reason::CertificateExpired
    )
}

/// Returns a warning if the database is larger than the limits for reading. The full is saved nevertheless.
fn too_large_to_read<R: ReadAt>(db: &Database<R>, limits: &Limits) -> Option<String> {
    let e = limits.check_database(db.meta().bytes()).err()?;
    let warning = format!(
        "this full cannot be restored, and each `snapshot delta` takes another full, until the limit is raised: {e}"
    );
    tracing::warn!("{warning}");
    Some(warning)
}

const WRITE_DATABASE: &str =
    "write the database to the temporary directory (choose another with {temp-dir})";

/// Returns the error for a snapshot stream that cannot be read.
fn read_error(endpoint: &str, e: io::Error) -> Error {
    let e = Error::io(format!("take a snapshot at {endpoint}"), e);
    match e.reason() {
        Reason::CorruptSnapshot => e.at(format!("the snapshot of {endpoint}")),
        _ => e,
    }
}

/// Takes a snapshot from one member.
///
/// # Errors
/// Fails with `NameMismatch` if the snapshot ends below `min_revision`: the member lags.
fn take_from(
    ctx: &Context,
    settings: &SnapshotSettings,
    endpoint: &str,
    encoding: Encoding,
    min_revision: i64,
) -> Result<UnpublishedFull> {
    let stream = SnapshotReader::open(&settings.connector, endpoint).map_err(|f| f.into_error())?;
    let stream: Box<dyn Read> = match &settings.bandwidth {
        Some(limit) => Box::new(limit.limit(stream, ctx.store.cancel())),
        None => Box::new(stream),
    };
    // etcd's stream has the format of a full's payload: the database, followed by its SHA-256.
    let mut payload = FrameReader::new(Tee {
        from: stream,
        to: Packer::to_file(ctx, encoding)?,
    });
    let step = Step::new(format!("save {endpoint}"), None);
    let mut file = ctx.temp_file()?;
    let mut buf = vec![0; 256 << 10];
    loop {
        let n = payload
            .read(&mut buf)
            .map_err(|e| read_error(endpoint, e))?;
        if n == 0 {
            break;
        }
        file.write_all(&buf[..n])
            .map_err(|e| Error::io(opt::fill(WRITE_DATABASE), e))?;
        step.add(n as u64);
    }
    let payload_bytes = payload.payload_bytes();
    let packer = payload.into_inner().to;
    let verify = || {
        let db = Database::open(ctx.database_file(file))?;
        let base = Base::read(&db)?;
        let hash = read_every_page(&db)?;
        Ok((db, base, hash))
    };
    // Two threads even if only one is allowed: both mostly wait for I/O.
    let (verified, packed) = side_by_side(ctx.threads.max(2), verify, || packer.packed());
    drop(step);
    let (db, base, hash) = verified.map_err(|e| e.at(format!("the snapshot of {endpoint}")))?;
    let packed = packed?;
    if base.revision.0 < min_revision {
        return Err(Reason::NameMismatch.error(format!(
            "the snapshot of {endpoint} ends at revision {}, but the cluster is already at {min_revision}: this member lags behind",
            base.revision
        )));
    }
    let known = last_saved::known_of_full(&db, &base, base.revision)?;
    Ok(UnpublishedFull {
        packed,
        encoding,
        started: Instant::now(),
        revision: base.revision,
        base,
        hash,
        known,
        endpoint: endpoint.to_owned(),
        cluster: ClusterFacts::default(),
        payload_bytes,
        warnings: too_large_to_read(&db, &ctx.limits).into_iter().collect(),
        db,
    })
}
