//! Takes a full snapshot: from a member that holds what most hold, by its own snapshot stream, which is
//! verified, compressed and uploaded as it comes. Its name waits until the end: only then it is known which
//! revision it holds.

use super::last_saved;
use super::next::{Newest, name_time};
use super::{Compared, Taking, Written};
use crate::backup::catalog::TIMELINES;
use crate::backup::codec::Encoding;
use crate::backup::frame::FrameReader;
use crate::backup::{Kind, SnapshotName};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::{Cluster, MemberHash, compare};
use crate::etcd::feed::Position;
use crate::etcd::snapshot::SnapshotReader;
use crate::mvcc::{Base, HashKv, Revision, hash_kv};
use crate::ops::Context;
use crate::ops::fold::open::Spool;
use crate::ops::fold::publish::{Packed, Packer, give_name};
use crate::ops::fold::rebuild::read_every_page;
use crate::ops::identity::{self, ClusterFacts};
use crate::ops::parallel::side_by_side;
use crate::telemetry::progress::Step;
use chrono::Utc;
use std::io::{self, Read, Write};
use std::time::Instant;

/// Looks at the members' hashes again where compactions came in between.
const HASH_TRIES: u32 = 3;

/// A full snapshot that is verified and uploaded, and waits for its name.
pub(super) struct Taken {
    packed: Packed,
    encoding: Encoding,
    /// When it was begun.
    pub(super) started: Instant,
    /// The revision it holds.
    pub(super) revision: Revision,
    base: Base,
    hash: HashKv,
    /// What comes behind it.
    pub(super) position: Option<Position>,
    /// Where it was taken from.
    pub(super) endpoint: String,
    /// The cluster that it is of.
    pub(super) cluster: ClusterFacts,
    /// What the members said of themselves.
    pub(super) members: Vec<Compared>,
    /// Bytes of the database.
    pub(super) payload_bytes: u64,
    pub(super) warnings: Vec<String>,
}

impl Taken {
    /// The oldest revision that it tells.
    pub(super) fn first_revision(&self) -> Revision {
        self.base.first_revision()
    }

    /// Whether it tells all that its last revision changed: a compaction at it may have removed deletions.
    pub(super) fn tells_its_end(&self) -> bool {
        self.base.compact_revision < self.revision
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// The store's; `TargetExists`.
    pub(super) fn publish(
        self,
        ctx: &Context,
        newest: Option<Newest>,
        is_final: bool,
        begins_timeline: bool,
    ) -> Result<Written> {
        let mut name = SnapshotName {
            kind: Kind::Full,
            start: Revision(0),
            last: self.revision,
            created: name_time(Kind::Full, newest, Utc::now()),
            compression: self.encoding.compression,
            is_final,
            is_encrypted: ctx.keys.encrypts(),
        };
        // Noted first: nobody shall see the full without it.
        if begins_timeline {
            note_timeline(ctx, &name)?;
        }
        let noted = name.created;
        give_name(ctx, &self.packed, &mut name)?;
        if begins_timeline && name.created != noted {
            note_timeline(ctx, &name)?;
        }
        tracing::info!(
            snapshot = %name,
            revision = self.revision.0,
            hash_kv = self.hash.hash,
            bytes = self.packed.bytes(),
            endpoint = self.endpoint,
            "saved a full snapshot"
        );
        Ok(Written {
            bytes: self.packed.bytes(),
            uncompressed_bytes: self.payload_bytes,
            events: 0,
            hash_kv: Some(self.hash.hash),
            compact_revision: Some(self.hash.compact_revision),
            live_keys: Some(self.hash.live_keys),
            name,
        })
    }
}

/// Notes in the store that a full begins a timeline. Its content need not show it: what the others have
/// compacted cannot disagree.
fn note_timeline(ctx: &Context, name: &SnapshotName) -> Result<()> {
    let text = "this full snapshot begins another history than the snapshots before it\n";
    ctx.store
        .create_small(&format!("{TIMELINES}/{name}"), text.as_bytes())?;
    Ok(())
}

/// Takes a full snapshot from the best member there is, and from the next one where that fails.
///
/// # Errors
/// `OtherCluster` where the prefix is another cluster's; `MembersDiffer` where members differ and no majority
/// tells which is right; `EtcdUnreachable`,
/// `NoQuorum`; those of wrong settings and credentials; the store's; `Io`, `NoSpace`, `Terminated`.
pub(super) fn take(ctx: &Context, taking: &Taking, newest: Option<Newest>) -> Result<Taken> {
    let started = Instant::now();
    let cluster = Cluster::observe(&taking.way)?;
    let facts = ClusterFacts::from(&cluster);
    identity::claim(ctx, &facts, taking.take_over)?;
    let (compared, hashes) = compare_members(&cluster, taking)?;
    let differ = compared.iter().filter(|c| c.agrees == Some(false));
    let differ: Vec<u64> = differ.map(|c| c.member_id).collect();
    let warnings = compared.iter().filter_map(|c| warning(c, cluster.revision));
    let warnings: Vec<String> = warnings.collect();
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    let newest = newest.map_or(super::DEFAULT_COMPRESSION, |n| n.compression);
    let encoding = taking.compression.resolve(newest);
    let mut failures: Vec<Error> = Vec::new();
    for member in cluster.choose(&differ) {
        let Some(endpoint) = &member.endpoint else {
            continue;
        };
        let agreed = hashes.iter().find(|h| h.member == member.id);
        let taken = take_from(ctx, taking, endpoint, encoding, cluster.revision)
            .and_then(|(taken, db)| check_hash(&taken, &db, agreed).map(|()| taken));
        match taken {
            Ok(mut taken) => {
                taken.started = started;
                taken.cluster = facts;
                taken.members = compared;
                taken.warnings.extend(warnings);
                return Ok(taken);
            }
            // Another member mends what is wrong with this one.
            Err(e) if is_the_members(&e) => {
                tracing::warn!(endpoint, "no snapshot from this member: {e}");
                failures.push(e);
            }
            Err(e) => return Err(e),
        }
    }
    let reason = failures.first().map(Error::reason);
    let said: Vec<String> = failures.iter().map(Error::to_string).collect();
    Err(reason
        .unwrap_or(Reason::EtcdUnreachable)
        .error(match said.is_empty() {
            true => "no healthy member to take a snapshot from".to_owned(),
            false => format!("no member gave a whole snapshot: {}", said.join("; ")),
        }))
}

/// What an operator should know of a member.
fn warning(c: &Compared, revision: i64) -> Option<String> {
    let label = c.label();
    match (c.agrees, &c.error) {
        (Some(false), _) => Some(format!(
            "{label} holds other data than most members at revision {revision}: nothing is taken from it; remove it from the cluster and add it again empty"
        )),
        (None, Some(why)) => Some(format!(
            "{label} could not be compared with the others: {why}"
        )),
        _ => None,
    }
}

/// What came over the wire is what the member answers for.
fn check_hash(taken: &Taken, db: &Database<Spool>, agreed: Option<&MemberHash>) -> Result<()> {
    let Some((revision, hash)) = agreed.and_then(|h| Some((h.revision, h.hash?))) else {
        return Ok(());
    };
    let ours = match taken.revision.0 == revision {
        true => taken.hash,
        false => hash_kv(db, Some(Revision(revision)))?,
    };
    if ours.compact_revision.0 != hash.compact_revision || ours.is(hash.hash) {
        return Ok(());
    }
    Err(Reason::MembersDiffer.error(format!(
        "the snapshot of {} has HashKV {} at revision {revision}, the members have {}",
        taken.endpoint, ours.hash, hash.hash
    )))
}

/// Whether another member may do better.
fn is_the_members(e: &Error) -> bool {
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

/// Has all members tell their HashKV at one revision.
fn compare_members(cluster: &Cluster, taking: &Taking) -> Result<(Vec<Compared>, Vec<MemberHash>)> {
    let mut tries = 1;
    let (hashes, agreement) = loop {
        let hashes = cluster.hash_kv_all(&taking.way, cluster.revision)?;
        let agreement = compare(&hashes);
        let was_compacted = |h: &MemberHash| {
            let reason = h.error.as_ref().map(|e| e.0);
            reason == Some(Reason::Conflict)
        };
        let is_told = agreement.unknown.is_empty() && !hashes.iter().any(was_compacted);
        if is_told || tries >= HASH_TRIES {
            break (hashes, agreement);
        }
        tries += 1;
    };
    let compared: Vec<Compared> = hashes
        .iter()
        .map(|h| Compared {
            name: h.name.clone(),
            id: format!("{:x}", h.member),
            endpoint: h.endpoint.clone(),
            hash_kv: h.hash.map(|h| h.hash),
            compact_revision: h.hash.map(|h| h.compact_revision),
            agrees: match () {
                () if agreement.agree.contains(&h.member) => Some(true),
                () if agreement.differ.contains(&h.member) => Some(false),
                () => None,
            },
            error: h.error.as_ref().map(|(_, why)| why.clone()),
            member_id: h.member,
        })
        .collect();
    if agreement.agree.is_empty() && !agreement.differ.is_empty() {
        let shown: Vec<String> = compared
            .iter()
            .map(|c| match c.hash_kv {
                Some(hash) => format!("{} has {hash}", c.label()),
                None => format!("{} did not tell", c.label()),
            })
            .collect();
        return Err(Reason::MembersDiffer.error(format!(
            "members hold different data at revision {} (HashKV: {}), and no majority tells which is right: find out, and remove the others from the cluster",
            cluster.revision,
            shown.join(", ")
        )));
    }
    Ok((compared, hashes))
}

/// Passes on what is read, and has it packed on the way.
struct Tee {
    inner: Box<dyn Read>,
    packer: Packer,
}

impl Read for Tee {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.packer.write_all(&out[..n])?;
        Ok(n)
    }
}

/// A full is saved however large it is; who reads it must know.
fn too_large_to_read<R: ReadAt>(db: &Database<R>, limits: &Limits) -> Option<String> {
    let e = limits.check_database(db.meta().bytes()).err()?;
    let warning = format!(
        "this full cannot be restored, and each run of snapshot delta takes a full, until more is allowed: {e}"
    );
    tracing::warn!("{warning}");
    Some(warning)
}

/// Takes a snapshot from one member; it must reach `least`.
fn take_from(
    ctx: &Context,
    taking: &Taking,
    endpoint: &str,
    encoding: Encoding,
    least: i64,
) -> Result<(Taken, Database<Spool>)> {
    let stream = SnapshotReader::open(&taking.way, endpoint).map_err(|f| f.into_error())?;
    let stream: Box<dyn Read> = match &taking.bandwidth {
        Some(limit) => Box::new(limit.limit(stream, ctx.store.cancel())),
        None => Box::new(stream),
    };
    // What etcd sends is what a full is: the database, and its SHA-256 behind it.
    let mut payload = FrameReader::new(Tee {
        inner: stream,
        packer: Packer::new(ctx, "Full", encoding)?,
    });
    let step = Step::new(format!("save {endpoint}"), None);
    let mut file = ctx.temp_file()?;
    let mut buf = vec![0; 256 << 10];
    loop {
        let n = payload.read(&mut buf).map_err(|e| {
            let e = Error::io(format!("take a snapshot at {endpoint}"), e);
            match e.reason() {
                Reason::CorruptSnapshot => e.at(format!("the snapshot of {endpoint}")),
                _ => e,
            }
        })?;
        if n == 0 {
            break;
        }
        file.write_all(&buf[..n]).map_err(|e| {
            let what =
                "write the database to the temporary directory (choose another with --temp-dir)";
            Error::io(what, e)
        })?;
        step.add(n as u64);
    }
    let payload_bytes = payload.payload_bytes();
    let packer = payload.into_inner().packer;
    let verify = || {
        let db = Database::open(ctx.spool(file))?;
        let base = Base::read(&db)?;
        let hash = read_every_page(&db)?;
        Ok((db, base, hash))
    };
    // Both wait more than they work.
    let (verified, packed) = side_by_side(ctx.threads.max(2), verify, || packer.finish());
    drop(step);
    let (db, base, hash) = verified.map_err(|e| e.at(format!("the snapshot of {endpoint}")))?;
    let packed = packed?;
    if base.revision.0 < least {
        return Err(Reason::NameMismatch.error(format!(
            "the snapshot of {endpoint} ends at revision {}, the cluster is at {least}: the member lags",
            base.revision
        )));
    }
    let last = last_saved::of_full(&db, &base, base.revision).ok();
    let position = last.map(|changes| last_saved::behind(base.revision, changes));
    let taken = Taken {
        packed,
        encoding,
        started: Instant::now(),
        revision: base.revision,
        base,
        hash,
        position,
        endpoint: endpoint.to_owned(),
        cluster: ClusterFacts::default(),
        members: Vec::new(),
        payload_bytes,
        warnings: too_large_to_read(&db, &ctx.limits).into_iter().collect(),
    };
    Ok((taken, db))
}
