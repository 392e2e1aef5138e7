//! Restore: a state of a backup becomes a member's data directory, or a plain snapshot file.
//!
//! look at the target → choose a backup → fold → stage, sync, verify → put in place. No etcd runs.

mod candidates;
mod needed;
mod options;

pub use candidates::{Backup, Fate, Told};
pub use needed::{Action, Decision, Depth};
pub use options::{KeepOrDrop, Membership, Options, Wanted};

use crate::base::Cancel;
use crate::bolt::Layout;
use crate::bucket::frame::{FrameReader, FrameWriter};
use crate::bucket::name::ENCRYPTED;
use crate::datadir::membership::Cluster;
use crate::datadir::place::{Leftover, Occupied, Place};
use crate::datadir::{self, place, snap, wal};
use crate::error::{Error, Reason, Result};
use crate::etcd::peers;
use crate::job::rebuild::{Leases, Rebuild, Rebuilt};
use crate::job::source::Source;
use crate::job::tags::without_excluded;
use crate::job::{Context, identity, space};
use crate::mvcc::{Fold, KeyRange, Revision};
use crate::store::{Sealed, Store};
use crate::telemetry::memory::peak_memory_bytes;
use crate::telemetry::progress::Step;
use crate::temp::TempFile;
use candidates::{Candidates, Opened, excludes};
use chrono::Utc;
use options::To;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::mpsc::{self, SyncSender};
use std::time::Instant;

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Status {
    /// It was restored (or would be, in a dry run).
    Succeeded,
    /// The member that is there is in order.
    NotNeeded,
}

/// The member that was written.
#[derive(Debug, Clone, Serialize)]
pub struct Member {
    /// Its name.
    pub name: String,
    /// Its ID, hexadecimal as etcd prints it.
    pub id: String,
    /// The cluster's ID, hexadecimal.
    pub cluster_id: String,
    /// All members' names, in the order of their IDs.
    pub members: Vec<String>,
}

/// What was done. The fields are a contract: `docs/restore-result.schema.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Whether it was needed, and why.
    pub decision: Decision,
    /// The data directory.
    pub data_dir: Option<String>,
    /// The WAL directory, where it is one of its own.
    pub wal_dir: Option<String>,
    /// The plain snapshot file.
    pub snapshot_file: Option<String>,
    /// Where what was there before is kept.
    pub kept_aside: Vec<String>,
    /// The member; `None` where a plain snapshot file was written, or nothing.
    pub member: Option<Member>,
    /// Every backup that was looked at, in the order in which they were named.
    pub candidates: Vec<Told>,
    /// The full that was restored from.
    pub base: Option<String>,
    /// The deltas folded into it, in order.
    pub deltas: Vec<String>,
    /// Events of the deltas that were folded.
    pub events: Option<u64>,
    /// The timeline's ID.
    pub timeline: Option<String>,
    /// The revision of the backup that was restored.
    pub restored_revision: Option<Revision>,
    /// The newest revision of what was written: `restored_revision`, raised by the bump.
    pub revision: Option<Revision>,
    /// Its compacted revision; −1 where it holds all history.
    pub compact_revision: Option<Revision>,
    /// Keys alive.
    pub live_keys: Option<u64>,
    /// etcd's HashKV at `revision`.
    pub hash_kv: Option<u32>,
    /// Users, roles, alarms and recorded leases are as of this revision.
    pub metadata_revision: Option<Revision>,
    /// Leases that no snapshot recorded and that got a record.
    pub leases_added: Option<u64>,
    /// Bytes read from the stores.
    pub bytes_read: u64,
    /// Size of the database that was written.
    pub database_bytes: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// The most memory that was resident at once.
    pub peak_memory_bytes: Option<u64>,
    /// Whether only a plan was made.
    pub dry_run: bool,
    /// What an operator should know.
    pub warnings: Vec<String>,
}

/// Restores the best of some backups; one or more.
///
/// # Errors
/// Any reason but `KeyNotFound`. The target is as it was then, or the next run makes it so.
pub fn run(backups: &[Backup], options: &Options, cancel: &Cancel) -> Result<Outcome> {
    if backups.is_empty() {
        return Err(Error::new(
            Reason::Usage,
            "there is nothing to restore from: give --store or --snapshot",
        ));
    }
    without_excluded(|| {
        let run = Run::new(backups, options, cancel);
        match options.to()? {
            To::DataDir { place, cluster } => run.into_data_dir(&place, &cluster),
            To::File(path) => run.into_file(&path),
        }
    })
}

/// Restores into a data directory that is removed again, once an etcd was tried on it.
///
/// # Errors
/// As [`run`].
pub(super) fn run_for_drill(backup: Backup, options: &Options, cancel: &Cancel) -> Result<Outcome> {
    let backups = [backup];
    without_excluded(|| {
        let mut run = Run::new(&backups, options, cancel);
        run.is_drill = true;
        match options.to()? {
            To::DataDir { place, cluster } => run.into_data_dir(&place, &cluster),
            To::File(_) => Err(Error::internal("a drill without a data directory")),
        }
    })
}

struct Run<'a> {
    backups: &'a [Backup],
    options: &'a Options,
    cancel: Cancel,
    started: Instant,
    warnings: Vec<String>,
    is_drill: bool,
}

/// A failure of one candidate, after which another is tried, or one of the target.
enum Failed {
    Candidate(Error),
    Target(Error),
}

/// A warning where the backup is recorded as that of a cluster of another ID than the restored one has.
fn says_other_cluster(store: &Store, cluster: &Cluster) -> Option<String> {
    let recorded = match identity::read(store) {
        Ok(recorded) => recorded?,
        Err(e) => return Some(format!("whose backup it is cannot be told: {e}")),
    };
    (!recorded.is_of(cluster.id().0)).then(|| {
        format!(
            "{} is recorded as the backup of cluster {}, and the restored cluster's ID is {}: its next snapshot there needs --take-over",
            store.url(),
            recorded.cluster(),
            cluster.id()
        )
    })
}

/// What a fold came to.
struct Written {
    rebuilt: Rebuilt,
    events: u64,
    revision: Revision,
    bytes: u64,
}

impl<'a> Run<'a> {
    fn new(backups: &'a [Backup], options: &'a Options, cancel: &Cancel) -> Self {
        Run {
            backups,
            options,
            cancel: cancel.clone(),
            started: Instant::now(),
            warnings: Vec::new(),
            is_drill: false,
        }
    }

    fn warn(&mut self, message: String) {
        tracing::warn!("{message}");
        self.warnings.push(message);
    }

    fn into_data_dir(mut self, place: &Place, cluster: &Cluster) -> Result<Outcome> {
        let if_needed = self.options.wanted.if_needed;
        refuse_in_use(place)?;
        let occupied = match self.options.dry_run {
            true => {
                if place.has_leftover() {
                    self.warn(format!(
                        "a restore into {} was interrupted: the next one completes or undoes it first",
                        place.dir().display()
                    ));
                }
                None
            }
            false => Some(place.occupy()?),
        };
        match occupied.as_ref().map(Occupied::leftover) {
            Some(Leftover::Completed) => {
                self.warn(
                    "an earlier restore was interrupted at its very end: it was completed".into(),
                );
            }
            Some(Leftover::Undone) => {
                self.warn("an earlier restore was interrupted: it was undone".into());
            }
            Some(Leftover::None) | None => {}
        }
        let taken = place.is_taken()?;
        let found = match if_needed {
            None if taken => return Err(holds_member(place)),
            None => needed::Found::asked(),
            Some(depth) => needed::look(place, taken, depth, &self.cancel)?,
        };
        let mut decision = found.decide();
        if decision.action == Action::Keep && if_needed == Some(Depth::Sanity) {
            return Ok(self.kept(place, decision, None));
        }
        let mut candidates =
            Candidates::open(self.backups, &self.options.request(), if_needed.is_some())?;
        if decision.action == Action::Keep {
            let alone = cluster.members().len() == 1;
            decision = self.compare_with_backup(&found, alone, &mut candidates)?;
            if decision.action == Action::Keep {
                return Ok(self.kept(place, decision, Some(candidates)));
            }
        }
        if if_needed.is_some() {
            tracing::info!(reason = decision.reason, "{}", decision.message);
            let others: Vec<_> = cluster
                .members()
                .iter()
                .filter(|m| m.id != cluster.me().id)
                .collect();
            let peers = &self.options.peers;
            let decided = peers::look(&others, cluster.members().len(), peers, &self.cancel)?;
            if let Some(why) = decided {
                return Err(Error::new(
                    Reason::ClusterHasQuorum,
                    format!(
                        "{}; but {why}: a restored member would not fit to it. Remove this member from the running cluster and add it again as a new one (etcdctl member remove, etcdctl member add), with an empty data directory",
                        decision.message
                    ),
                ));
            }
        }
        let (mut member, mut store) = (None, None);
        let (mut outcome, chosen) =
            self.try_candidates(candidates, decision, |run, source, ctx| {
                let cluster = match if_needed {
                    None => Cluster::clone(cluster),
                    Some(_) => run.cluster_of(cluster, source).map_err(Failed::Target)?,
                };
                let cluster = &*member.insert(cluster);
                store = source.base_snapshot().map(|_| ctx.store.clone());
                let Some(occupied) = &occupied else {
                    return Ok(None);
                };
                let (snap_dir, wal_dir) = occupied.stage().map_err(Failed::Target)?;
                let written = run.write_database(source, ctx, cluster, &snap_dir.join("db"))?;
                write_log(cluster, &snap_dir, &wal_dir).map_err(Failed::Target)?;
                Ok(Some(written))
            })?;
        if chosen && let Some(occupied) = occupied {
            // It took its time: an etcd may have been started meanwhile, on what was there or on nothing.
            refuse_in_use(place)?;
            if !taken && place.is_taken()? {
                return Err(holds_member(place));
            }
            let aside = format!("bad-{}", Utc::now().format("%Y%m%dT%H%M%SZ"));
            let mut done = |step| tracing::debug!(step, "putting the member in place");
            let kept = occupied.put_in_place(&aside, &mut done)?;
            outcome.kept_aside = kept.iter().map(|p| shown(p)).collect();
            tracing::info!(
                data_dir = %place.dir().display(),
                revision = outcome.revision.unwrap_or_default().0,
                hash_kv = outcome.hash_kv,
                "restored a member"
            );
        }
        // A drill's cluster saves nothing.
        if let (Some(store), Some(cluster), false) = (&store, &member, self.is_drill) {
            let warning = says_other_cluster(store, cluster);
            outcome
                .warnings
                .extend(warning.inspect(|w| tracing::warn!("{w}")));
        }
        outcome.member = member.map(|cluster| Member {
            name: cluster.me().name.clone(),
            id: cluster.me().id.to_string(),
            cluster_id: cluster.id().to_string(),
            members: cluster.members().iter().map(|m| m.name.clone()).collect(),
        });
        outcome.data_dir = Some(shown(place.dir()));
        outcome.wal_dir = place.own_wal_dir().map(shown);
        outcome.seconds = self.started.elapsed().as_secs_f64();
        Ok(outcome)
    }

    /// The outcome where what is there stays.
    fn kept(
        mut self,
        place: &Place,
        decision: Decision,
        candidates: Option<Candidates<'_>>,
    ) -> Outcome {
        tracing::info!(reason = decision.reason, "{}", decision.message);
        let mut outcome = self.outcome(decision);
        outcome.status = Status::NotNeeded;
        outcome.candidates = candidates.map(|c| c.told).unwrap_or_default();
        outcome.data_dir = Some(shown(place.dir()));
        outcome.wal_dir = place.own_wal_dir().map(shown);
        outcome
    }

    /// Compares a member that is in order by itself with the best backup that can be read.
    fn compare_with_backup(
        &mut self,
        found: &needed::Found,
        alone: bool,
        candidates: &mut Candidates<'_>,
    ) -> Result<Decision> {
        let why = match candidates.compare() {
            Ok(warnings) => {
                warnings.into_iter().for_each(|w| self.warn(w));
                for i in candidates.ranked() {
                    match found.compare(&candidates.all[i], alone, &self.cancel) {
                        Ok(decision) => return Ok(decision),
                        Err(e) if excludes(&e) => candidates.exclude(i, &e),
                        Err(e) => return Err(e),
                    }
                }
                candidates.none_left(None)
            }
            Err(e) if excludes(&e) => e,
            Err(e) => return Err(e),
        };
        // A member that is in order must not wait for a backup.
        self.warn(format!(
            "the member could not be compared with a backup: {why}"
        ));
        Ok(found.decide())
    }

    fn into_file(mut self, path: &Path) -> Result<Outcome> {
        if path.symlink_metadata().is_ok() {
            return Err(exists(path));
        }
        let parent = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        if !parent.is_dir() {
            return Err(Error::new(
                Reason::Usage,
                format!(
                    "--to-snapshot: the folder {} is not there",
                    parent.display()
                ),
            ));
        }
        self.check_encryption(path)?;
        let candidates = Candidates::open(self.backups, &self.options.request(), false)?;
        let decision = needed::Found::asked().decide();
        let mut file = None;
        let (mut outcome, _) = self.try_candidates(candidates, decision, |run, source, ctx| {
            if run.options.dry_run {
                return Ok(None);
            }
            let unnamed = Unnamed::new(parent).map_err(Failed::Target)?;
            let written = match ctx.keys.encrypts() {
                true => run.write_encrypted(source, ctx, &unnamed, parent)?,
                false => run.write_snapshot(source, ctx, &unnamed, parent)?,
            };
            file = Some(unnamed);
            Ok(Some(written))
        })?;
        if let Some(file) = file {
            file.name(path)?;
            place::sync_directory(parent)?;
        }
        outcome.snapshot_file = Some(shown(path));
        outcome.seconds = self.started.elapsed().as_secs_f64();
        Ok(outcome)
    }

    /// Whether a file is to be encrypted, its name and the recipients must say alike: nobody shall take the one
    /// for the other.
    fn check_encryption(&self, path: &Path) -> Result<()> {
        let mut contexts = self.backups.iter().filter_map(|b| b.context().ok());
        let encrypts = contexts.any(|ctx| ctx.keys.encrypts());
        let is_named_so = path
            .as_os_str()
            .as_encoded_bytes()
            .ends_with(ENCRYPTED.as_bytes());
        match (is_named_so, encrypts) {
            (true, false) => Err(Error::new(
                Reason::Configuration,
                format!(
                    "--to-snapshot {}: what is named so is encrypted: say with --age-recipient for whom",
                    path.display()
                ),
            )),
            (false, true) => Err(Error::new(
                Reason::Usage,
                format!(
                    "--to-snapshot {}: age recipients are given, and a snapshot that is encrypted has a name that ends in {ENCRYPTED}: name it so, or leave the recipients out for a plain one",
                    path.display()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Tries the candidates, the best first, until one is written. Says whether one was, too: in a dry
    /// run none is.
    fn try_candidates(
        &mut self,
        mut candidates: Candidates<'_>,
        decision: Decision,
        mut write: impl FnMut(&mut Self, &Source, &Context) -> Result<Option<Written>, Failed>,
    ) -> Result<(Outcome, bool)> {
        let mut first = None;
        loop {
            // Again when one has failed: another is the first then.
            for warning in candidates.compare()? {
                self.warn(warning);
            }
            let Some(&i) = candidates.ranked().first() else {
                return Err(candidates.none_left(first));
            };
            let Ok(Opened { ctx, source, .. }) = &candidates.all[i].opened else {
                return Err(Error::internal("a candidate is ranked that was not opened"));
            };
            let written = write(self, source, ctx);
            let failed = matches!(written, Err(Failed::Target(_)));
            // What is wrong with a damaged file is its damage.
            let written = match source.prove() {
                Err(e) if !failed => Err(Failed::Candidate(e)),
                _ => written,
            };
            let written = match written {
                Ok(written) => written,
                Err(Failed::Candidate(e)) if excludes(&e) => {
                    candidates.exclude(i, &e);
                    first.get_or_insert(e);
                    continue;
                }
                Err(Failed::Candidate(e) | Failed::Target(e)) => return Err(e),
            };
            self.warnings.extend(source.warnings.iter().cloned());
            if self.options.dry_run {
                self.warnings.extend(source.tags_warning());
            }
            if holds_alarm(source).map_err(source.at_base(ctx))? {
                self.warn("the base has an alarm raised (etcd had no space left, or found data that differed), and so has what is restored: etcd says that it is not healthy and may refuse to write until `etcdctl alarm disarm`".into());
            }
            let mut outcome = self.outcome(decision);
            outcome.base = Some(source.base_name());
            outcome.deltas = source.deltas().map(|s| s.name.to_string()).collect();
            outcome.timeline = Some(source.timeline.clone());
            outcome.restored_revision = Some(source.target);
            outcome.metadata_revision = Some(source.base.metadata_revision);
            outcome.revision = Some(self.newest_revision(source)?);
            if let Some(w) = &written {
                outcome.events = Some(w.events);
                outcome.revision = Some(w.revision);
                outcome.compact_revision = Some(w.rebuilt.hash.compact_revision);
                outcome.live_keys = Some(w.rebuilt.hash.live_keys);
                outcome.hash_kv = Some(w.rebuilt.hash.hash);
                outcome.leases_added = Some(w.rebuilt.leases_added);
                outcome.database_bytes = w.bytes;
            }
            candidates.told[i].status = Fate::Chosen;
            outcome.candidates = candidates.told;
            return Ok((outcome, written.is_some()));
        }
    }

    fn outcome(&mut self, decision: Decision) -> Outcome {
        let read = self.backups.iter().map(|b| match b {
            Backup::Store(ctx) | Backup::File(ctx, _) => ctx.store.bytes_read(),
            Backup::Closed { .. } => 0,
        });
        Outcome {
            status: Status::Succeeded,
            decision,
            data_dir: None,
            wal_dir: None,
            snapshot_file: None,
            kept_aside: Vec::new(),
            member: None,
            candidates: Vec::new(),
            base: None,
            deltas: Vec::new(),
            events: None,
            timeline: None,
            restored_revision: None,
            revision: None,
            compact_revision: None,
            live_keys: None,
            hash_kv: None,
            metadata_revision: None,
            leases_added: None,
            bytes_read: read.sum(),
            database_bytes: 0,
            seconds: self.started.elapsed().as_secs_f64(),
            peak_memory_bytes: peak_memory_bytes(),
            dry_run: self.options.dry_run,
            warnings: std::mem::take(&mut self.warnings),
        }
    }

    /// The newest revision of the result.
    fn newest_revision(&self, source: &Source) -> Result<Revision> {
        let bump = self.options.wanted.bump_revision.unwrap_or_default();
        match source.target.0.checked_add(bump) {
            // The highest revision is no revision for a next transaction.
            Some(r) if r < i64::MAX / 2 => Ok(Revision(r)),
            _ => Err(Error::new(
                Reason::Usage,
                format!(
                    "--bump-revision {bump} would leave hardly a revision above {} for new transactions",
                    source.target
                ),
            )),
        }
    }

    /// The cluster of a member that is restored where it is needed, beside others that may not need it.
    ///
    /// The log of a restored member is that with which a cluster of the same IDs once began: together with
    /// members that were not restored, or at another revision, it would take their entries for what
    /// follows its own data, and nobody would notice. With IDs that depend on the revision such members
    /// refuse each other, and those restored at the same one are one cluster.
    fn cluster_of(&self, cluster: &Cluster, source: &Source) -> Result<Cluster> {
        match cluster.members().len() {
            1 => Ok(cluster.clone()),
            _ => {
                let (restored, newest) = (source.target, self.newest_revision(source)?);
                cluster.with_token(format!("{}@{restored}-{newest}", cluster.token()))
            }
        }
    }

    /// What the new database shall be.
    fn plan<'s>(
        &self,
        source: &'s Source,
        ctx: &Context,
        cluster: Option<&Cluster>,
    ) -> Result<Rebuild<'s>> {
        let mut rebuild = Rebuild {
            source,
            compact: match self.options.wanted.bump_revision {
                Some(_) => self.newest_revision(source)?,
                None => source.compact_revision(ctx, self.options.keep_history)?,
            },
            leases: self.options.leases(),
            replaced: BTreeMap::new(),
            meta: BTreeMap::new(),
        };
        if let Some(cluster) = cluster {
            for name in [&b"members"[..], b"members_removed"] {
                if let Some(entries) = cluster.bucket(name) {
                    let entries = entries.into_iter().collect();
                    rebuild.replaced.insert(name.to_vec(), entries);
                }
            }
            let meta = cluster.meta_entries().into_iter();
            rebuild.meta = meta.map(|(k, v)| (k.to_vec(), Some(v))).collect();
        }
        Ok(rebuild)
    }

    /// Folds a plan's source. Gives the layout and the number of events, too.
    fn fold(&self, rebuild: &Rebuild<'_>, ctx: &Context) -> Result<(Fold<'static>, Layout, u64)> {
        let detach = rebuild.leases == Leases::Drop;
        let source = rebuild.source;
        let (mut fold, events) = source.fold(ctx, rebuild.compact, KeyRange::All, detach)?;
        let layout = rebuild.measure(ctx, &mut fold)?;
        Ok((fold, layout, events))
    }

    /// Writes a member's database.
    fn write_database(
        &self,
        source: &Source,
        ctx: &Context,
        cluster: &Cluster,
        path: &Path,
    ) -> Result<Written, Failed> {
        let rebuild = self.plan(source, ctx, Some(cluster));
        let rebuild = rebuild.map_err(Failed::Candidate)?;
        let dir = path.parent().unwrap_or(path);
        let what = format!("write {}", path.display());
        let failed = |e| Failed::Target(Error::io(&what, e));
        let file = create(path).map_err(failed)?;
        let written = sync_along(&file, &what, |grown| {
            let mut out = Counted::new(&file, &what);
            out.grown = Some(grown);
            let streamed = rebuild.stream(ctx, &mut out);
            let (rebuilt, layout, events) = match streamed.map_err(|e| out.whose(e))? {
                Some((rebuilt, layout, events)) => {
                    out.flush().map_err(failed)?;
                    let head = std::os::unix::fs::FileExt::write_all_at(&file, &layout.head(), 0);
                    head.map_err(failed)?;
                    (rebuilt, layout, events)
                }
                None => {
                    let folded = self.fold(&rebuild, ctx).map_err(Failed::Candidate)?;
                    let (fold, layout, events) = folded;
                    space::check(dir, layout.bytes(), "the new database")
                        .map_err(Failed::Target)?;
                    let rebuilt = rebuild.write(ctx, fold, &layout, &mut out);
                    let rebuilt = rebuilt.map_err(|e| out.whose(e))?;
                    out.flush().map_err(failed)?;
                    (rebuilt, layout, events)
                }
            };
            drop(out);
            let again = File::open(path).and_then(TempFile::plain);
            let again = again.map_err(failed)?;
            let verified = sync_beside(&file, &what, || {
                rebuild.verify(ctx.spool(again), &rebuilt.hash, &layout)
            });
            verified.map_err(of_whom)?;
            Ok((rebuilt, layout, events))
        });
        let (rebuilt, layout, events) = written?;
        Ok(Written {
            rebuilt,
            events,
            revision: rebuild.revision(),
            bytes: layout.bytes(),
        })
    }

    /// Writes a plain snapshot: the database, and its SHA-256.
    fn write_snapshot(
        &self,
        source: &Source,
        ctx: &Context,
        file: &Unnamed,
        dir: &Path,
    ) -> Result<Written, Failed> {
        let rebuild = self.plan(source, ctx, None).map_err(Failed::Candidate)?;
        let (fold, layout, events) = self.fold(&rebuild, ctx).map_err(Failed::Candidate)?;
        space::check(dir, layout.bytes(), "the new snapshot").map_err(Failed::Target)?;
        let what = format!("write a snapshot to {}", dir.display());
        let failed = |e| Failed::Target(Error::io(&what, e));
        let mut out = FrameWriter::new(Counted::new(&file.file, &what));
        let written = rebuild.write(ctx, fold, &layout, &mut out);
        let mut out = out.finish().map_err(failed)?;
        let rebuilt = written.map_err(|e| out.whose(e))?;
        out.flush().map_err(failed)?;
        drop(out);
        let again = || file.file.try_clone().map_err(|e| Error::io(&what, e));
        let verified = sync_beside(&file.file, &what, || {
            let whole = Head {
                file: again()?,
                bytes: layout.bytes(),
            };
            rebuild.verify(whole, &rebuilt.hash, &layout)?;
            check_frame(again()?, &self.cancel)
        });
        verified.map_err(of_whom)?;
        Ok(Written {
            rebuilt,
            events,
            revision: rebuild.revision(),
            bytes: layout.bytes(),
        })
    }

    /// As [`write_snapshot`](Self::write_snapshot), encrypted. To be verified it is in the temporary directory, too,
    /// in a sealed file: nobody but the recipients can read the other.
    fn write_encrypted(
        &self,
        source: &Source,
        ctx: &Context,
        file: &Unnamed,
        dir: &Path,
    ) -> Result<Written, Failed> {
        let rebuild = self.plan(source, ctx, None).map_err(Failed::Candidate)?;
        let (fold, layout, events) = self.fold(&rebuild, ctx).map_err(Failed::Candidate)?;
        for dir in [dir, &ctx.temp_dir] {
            space::check(dir, layout.bytes(), "the new snapshot").map_err(Failed::Target)?;
        }
        let what = format!("write a snapshot to {}", dir.display());
        let failed = |e| Failed::Target(Error::io(&what, e));
        let out = Summed {
            inner: Counted::new(&file.file, &what),
            sum: Sha256::new(),
        };
        let sealed = ctx.keys.encrypt(out).map_err(Failed::Target)?;
        let plain = ctx.temp_file().map_err(Failed::Target)?;
        let mut both = Tee(
            BufWriter::with_capacity(256 << 10, plain),
            FrameWriter::new(sealed),
        );
        let written = rebuild.write(ctx, fold, &layout, &mut both);
        let Tee(plain, framed) = both;
        let out = framed.finish().and_then(Sealed::finish).map_err(failed)?;
        let Summed {
            inner: mut out,
            sum,
        } = out;
        let rebuilt = written.map_err(|e| out.whose(e))?;
        out.flush().map_err(failed)?;
        drop(out);
        let plain = plain.into_inner().map_err(|e| failed(e.into_error()))?;
        let verified = sync_beside(&file.file, &what, || {
            rebuild.verify(ctx.spool(plain), &rebuilt.hash, &layout)?;
            let again = file.file.try_clone().map_err(|e| Error::io(&what, e))?;
            check_sum(again, sum, &self.cancel)
        });
        verified.map_err(of_whom)?;
        Ok(Written {
            rebuilt,
            events,
            revision: rebuild.revision(),
            bytes: layout.bytes(),
        })
    }
}

/// Writes to both.
struct Tee<A, B>(A, B);

impl<A: Write, B: Write> Write for Tee<A, B> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        self.0.write_all(b)?;
        self.1.write_all(b)?;
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()?;
        self.1.flush()
    }
}

/// Sums up what is written.
struct Summed<W> {
    inner: W,
    sum: Sha256,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(b)?;
        self.sum.update(&b[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Reads a file back and compares its sum.
fn check_sum(mut file: File, written: Sha256, cancel: &Cancel) -> Result<()> {
    use std::io::Seek;
    let io = |e| Error::io("read the snapshot back", e);
    file.rewind().map_err(io)?;
    let mut sum = Sha256::new();
    let mut buf = vec![0; 256 << 10];
    loop {
        cancel.check()?;
        match file.read(&mut buf).map_err(io)? {
            0 => break,
            n => sum.update(&buf[..n]),
        }
    }
    match sum.finalize() == written.finalize() {
        true => Ok(()),
        false => Err(Error::new(
            Reason::Io,
            "the snapshot reads back differently from what was written: check the disk",
        )),
    }
}

/// Where what was written does not add up: a full that contradicts itself is the candidate's fault.
fn of_whom(e: Error) -> Failed {
    match e.reason().is_bad_data() {
        true => Failed::Candidate(e),
        false => Failed::Target(e),
    }
}

/// A path as it can be told; not every one is text.
fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Whether an alarm is raised in the full: it keeps etcd from writing wherever it is restored.
fn holds_alarm(source: &Source) -> Result<bool> {
    match source.db.bucket(b"alarm")? {
        Some(alarms) => Ok(source.db.cursor(&alarms).next()?.is_some()),
        None => Ok(false),
    }
}

fn refuse_in_use(place: &Place) -> Result<()> {
    if datadir::in_use(&place.member(), &place.wal())? {
        return Err(Error::new(
            Reason::TargetInUse,
            format!(
                "a running etcd uses {}: stop it first",
                place.dir().display()
            ),
        ));
    }
    Ok(())
}

fn holds_member(place: &Place) -> Error {
    Error::new(
        Reason::TargetExists,
        format!(
            "{} holds a member already, which is never overwritten: choose another --data-dir, or have it looked at and replaced with --if-needed",
            place.dir().display()
        ),
    )
}

fn exists(path: &Path) -> Error {
    Error::new(
        Reason::TargetExists,
        format!(
            "{} is there already and is never overwritten",
            path.display()
        ),
    )
}

/// A file of etcd's: nobody else may read it.
fn create(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path)
}

/// Writes the WAL and the `.snap`, and reads them back.
fn write_log(cluster: &Cluster, snap_dir: &Path, wal_dir: &Path) -> Result<()> {
    let snap_file = snap::write(snap_dir, cluster)?;
    wal::create(wal_dir, cluster)?;
    let log = wal::read(wal_dir)?;
    let snapshot = snap::read(&snap_file)?;
    let same = log.node_id == cluster.me().id
        && log.cluster_id == cluster.id()
        && log.last_index == cluster.index()
        && snapshot.index == cluster.index();
    match same {
        true => Ok(()),
        false => Err(Error::internal("the WAL or .snap is not what was written")),
    }
}

/// Syncs a file while something else reads it.
fn sync_beside(file: &File, what: &str, read: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    std::thread::scope(|s| {
        let sync = || file.sync_all().map_err(|e| Error::io(what, e));
        let synced = std::thread::Builder::new().spawn_scoped(s, sync);
        let read = read();
        match synced {
            Ok(thread) => thread
                .join()
                .unwrap_or_else(|_| Err(Error::internal("syncing panicked")))?,
            // The system has no thread left.
            Err(_) => sync()?,
        }
        read
    })
}

/// Bytes after which a file that grows is synced once more.
const SYNC_EVERY: u64 = 32 << 20;

/// Syncs a file while it is written, so that little is left to sync in the end. `write` gets what asks for it;
/// it must sync the file itself when it has written all.
fn sync_along<T>(
    file: &File,
    what: &str,
    write: impl FnOnce(SyncSender<()>) -> Result<T, Failed>,
) -> Result<T, Failed> {
    std::thread::scope(|s| {
        let (grown, growths) = mpsc::sync_channel(1);
        let sync = move || growths.iter().try_for_each(|()| file.sync_data());
        // If the system has no thread left, nobody listens.
        let synced = std::thread::Builder::new().spawn_scoped(s, sync);
        let written = write(grown);
        let synced = synced.map_or(Ok(()), |thread| {
            let synced = thread.join();
            let synced = synced.map(|synced| synced.map_err(|e| Error::io(what, e)));
            synced.unwrap_or_else(|_| Err(Error::internal("syncing panicked")))
        });
        match (written, synced) {
            (Err(Failed::Target(e)), _) => Err(Failed::Target(e)),
            // The system tells this once: a later sync may succeed for all that.
            (_, Err(e)) => Err(Failed::Target(e)),
            (written, Ok(())) => written,
        }
    })
}

/// Reads a framed file to its end, where its hash is checked.
fn check_frame(file: File, cancel: &Cancel) -> Result<()> {
    use std::io::Seek;
    let mut file = file;
    let io = |e| Error::io("read the snapshot back", e);
    file.rewind().map_err(io)?;
    let mut frame = FrameReader::new(file);
    let mut buf = vec![0; 256 << 10];
    while frame.read(&mut buf).map_err(io)? > 0 {
        cancel.check()?;
    }
    Ok(())
}

/// The beginning of a file.
struct Head {
    file: File,
    bytes: u64,
}

impl crate::base::ReadAt for Head {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        crate::base::ReadAt::read_exact_at(&self.file, buf, offset)
    }
    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
}

/// Writes to a target: counts what is written, and knows whether that failed.
struct Counted<'a> {
    inner: BufWriter<&'a File>,
    step: Step,
    what: &'a str,
    failed: bool,
    /// Asks for a sync of what was written; see [`sync_along`].
    grown: Option<SyncSender<()>>,
    unsynced: u64,
}

impl<'a> Counted<'a> {
    fn new(file: &'a File, what: &'a str) -> Self {
        Counted {
            inner: BufWriter::with_capacity(1 << 20, file),
            step: Step::new(what, None),
            what,
            failed: false,
            grown: None,
            unsynced: 0,
        }
    }

    /// Whether an error is the target's, or that of what was to be written.
    fn whose(&self, e: Error) -> Failed {
        match self.failed {
            true => Failed::Target(e),
            false => Failed::Candidate(e),
        }
    }

    fn note<T>(&mut self, written: io::Result<T>) -> io::Result<T> {
        written.map_err(|e| {
            self.failed = true;
            Error::io(self.what, e).into()
        })
    }
}

impl Write for Counted<'_> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let written = self.inner.write_all(b);
        self.note(written)?;
        self.step.add(b.len() as u64);
        self.unsynced += b.len() as u64;
        if self.unsynced >= SYNC_EVERY
            && let Some(grown) = &self.grown
        {
            // If the last sync still runs, the next one takes more.
            let _ = grown.try_send(());
            self.unsynced = 0;
        }
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.inner.flush();
        self.note(flushed)
    }
}

/// A file without a name, in the directory where it shall get one; it vanishes with the process.
struct Unnamed {
    file: File,
    /// Where the file system has no files without names.
    hidden: Option<tempfile::TempPath>,
}

impl Unnamed {
    fn new(dir: &Path) -> Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        if let Ok(fd) = rustix::fs::openat(CWD, dir, flags, Mode::RUSR | Mode::WUSR) {
            return Ok(Unnamed {
                file: File::from(fd),
                hidden: None,
            });
        }
        let mut builder = tempfile::Builder::new();
        let file = builder.prefix(".deltafold-").tempfile_in(dir);
        let file = file.map_err(|e| Error::io(format!("create a file in {}", dir.display()), e))?;
        let (file, hidden) = file.into_parts();
        Ok(Unnamed {
            file,
            hidden: Some(hidden),
        })
    }

    /// Gives it its name, which must be free.
    fn name(self, path: &Path) -> Result<()> {
        let named = match self.hidden {
            Some(hidden) => hidden.persist_noclobber(path).map_err(|e| e.error),
            None => {
                let this = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                rustix::fs::linkat(CWD, this, CWD, path, AtFlags::SYMLINK_FOLLOW)
                    .map_err(io::Error::from)
            }
        };
        named.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => exists(path),
            _ => Error::io(format!("name {}", path.display()), e),
        })
    }
}
