//! The operation `restore`: writes a state of a backup as the data directory of an etcd member, or as a
//! plain snapshot file.
//!
//! Steps: inspect the target, choose one of the backups, fold it, write to staging, sync, verify, move into place. No
//! etcd runs, and the backup is not changed.

mod candidates;
mod data_dir;
mod file;
mod needed;
mod options;
mod output;
mod write;

pub use crate::prefix::open::BackupLocation;
pub use candidates::{CandidateFate, CandidateStatus};
pub use needed::{Action, Decision, Depth};
pub use options::{KeepOrDrop, Membership, Options};

use crate::base::Cancel;
use crate::base::opt::{
    BUMP_REVISION, DATA_DIR, MARK_COMPACTED, QUOTA_BACKEND_BYTES, SNAPSHOT, STORE, TO_SNAPSHOT,
};
use crate::datadir::membership::Cluster;
use crate::error::{Error, Reason, Result};
use crate::fold::rebuild::Rebuild;
use crate::mvcc::Revision;
use crate::ops::live_follower::FoundFollower;
pub use crate::ops::plain_target::PlainTarget;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::open::State;
use crate::prefix::set_aside::{Purpose, decide_again, refuse_excluded_deltas};
use candidates::{Candidates, OpenedBackup, is_candidate_failure};
use chrono::{DateTime, Utc};
use output::WriteFailure;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use write::WrittenDatabase;

/// The member that a restore writes.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Member {
    /// The member's name.
    pub name: String,
    /// The member's ID, hexadecimal as etcd prints it.
    pub id: String,
    /// The cluster's ID, hexadecimal. All members that are restored with the same --initial-cluster and
    /// --initial-cluster-token have the same.
    pub cluster_id: String,
    /// The names of all members, in the order of their IDs.
    pub members: Vec<String>,
}

/// The result of a restore. The fields are a contract.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Restored {
    /// Whether to restore or to keep the existing member, and why.
    pub decision: Decision,
    /// The data directory, as an absolute path. null if a plain snapshot file is written.
    pub data_dir: Option<String>,
    /// The WAL directory, as an absolute path, if it is outside the data directory; else null.
    pub wal_dir: Option<String>,
    /// The plain snapshot file, as given with --to-snapshot, or its URL. null if a data directory is restored.
    pub snapshot_file: Option<String>,
    /// Where the previous member is kept: its folder, and the folder of its WAL segments if they have a
    /// directory of their own. Empty if there was no member.
    pub kept_aside: Vec<String>,
    /// The member that was written (in a dry run: would be). null if no member is written.
    pub member: Option<Member>,
    /// The command that starts etcd on the restored data directory, and its arguments. etcd serves clients at
    /// http://localhost:2379 unless flags for clients are added. null if no data directory was written.
    pub start_command: Option<Vec<String>>,
    /// Every backup that was opened, in the order in which the command names them. Empty if none had to
    /// be opened: with `--if-needed sanity`, when the member is kept.
    pub candidates: Vec<CandidateFate>,
    /// The base: the name of the full snapshot without its folder, or with --snapshot the file as
    /// given. null if nothing is restored.
    pub base: Option<String>,
    /// The names, without their folders, of the delta snapshots that were folded into the base, in
    /// order.
    pub deltas: Vec<String>,
    /// How many events of the deltas were folded. Events that the base already holds are not counted.
    /// null if nothing was written.
    pub events: Option<u64>,
    /// The ID of the restored timeline; `main` for a plain snapshot file. null if nothing is restored.
    pub timeline: Option<String>,
    /// The revision of the backup that is restored. null if nothing is restored.
    pub restored_revision: Option<Revision>,
    /// The newest revision of the written database: `restored_revision`, raised by --bump-revision.
    /// null if nothing is restored.
    pub revision: Option<Revision>,
    /// The moment that was asked for; null if none was.
    pub as_of: Option<DateTime<Utc>>,
    /// The compacted revision of the written database: older states cannot be read. -1 if it holds all
    /// history. null if nothing was written.
    pub compact_revision: Option<Revision>,
    /// How many keys are alive at `revision`. null if nothing was written.
    pub live_keys: Option<u64>,
    /// etcd's HashKV at `revision`: what `etcdctl endpoint hashkv` prints for an etcd that serves the
    /// database, before anything is written to it. null if nothing was written.
    pub hash_kv: Option<u32>,
    /// Users, roles, alarms and leases are restored as they were at this revision: deltas hold only keys. null
    /// if nothing is restored.
    pub metadata_revision: Option<Revision>,
    /// How many lease records were added, see --lease-ttl: keys are attached to these leases and the
    /// base has no record of them. null if nothing was written.
    pub leases_added: Option<u64>,
    /// Bytes read from the stores. A plain snapshot file is not counted.
    pub bytes_read: u64,
    /// Size of the written database, in bytes, without the SHA-256 that follows it in a snapshot file;
    /// 0 if nothing was written.
    pub database_bytes: u64,
    /// Whether this was a dry run: nothing was written.
    pub dry_run: bool,
}

/// A backup that may be restored. If a store cannot be opened, the operation may use another one.
pub struct NamedBackup {
    /// The URL or the path.
    pub name: String,
    /// The backup, or the error of opening it.
    pub location: Result<BackupLocation>,
}

impl From<BackupLocation> for NamedBackup {
    fn from(location: BackupLocation) -> Self {
        NamedBackup {
            name: location.name(),
            location: Ok(location),
        }
    }
}

impl NamedBackup {
    fn context(&self) -> Option<&Context> {
        self.location.as_ref().ok().map(BackupLocation::context)
    }
}

/// Restores from the best of the backups into `to_snapshot`, or else the data directory of the options. Fails with `Usage`
/// if there is none.
///
/// # Errors
/// Fails with any reason except `KeyNotFound`. After a failure the target is unchanged, or the next run
/// undoes or completes the change.
pub fn run(
    backups: &[NamedBackup],
    options: &Options,
    to_snapshot: Option<&PlainTarget>,
    cancel: &Cancel,
) -> Result<Report<Restored>> {
    if backups.is_empty() {
        return Err(Reason::Usage.error(format!(
            "there is no backup to restore from: give {STORE} or {SNAPSHOT}"
        )));
    }
    // Variables of the command line set one without the other.
    if options.bump_revision.is_some() != options.mark_compacted {
        return Err(Reason::Usage.error(format!(
            "{BUMP_REVISION} and {MARK_COMPACTED} belong together: give both or neither"
        )));
    }
    restore(backups, options, to_snapshot, cancel, false)
}

/// Restores into a temporary data directory, on which `verify` then starts an etcd.
///
/// # Errors
/// As [`run`].
pub(super) fn run_for_drill(
    backup: BackupLocation,
    options: &Options,
    cancel: &Cancel,
) -> Result<Report<Restored>> {
    restore(&[backup.into()], options, None, cancel, true)
}

fn restore(
    backups: &[NamedBackup],
    options: &Options,
    to_snapshot: Option<&PlainTarget>,
    cancel: &Cancel,
    is_drill: bool,
) -> Result<Report<Restored>> {
    let restore = || {
        let restoration = Restoration {
            backups,
            options,
            to_snapshot,
            cancel: cancel.clone(),
            clock: ReportBuilder::start(),
            is_drill,
        };
        restoration.run()
    };
    let purpose = if is_drill {
        // It is there to find damage.
        Purpose::Verify
    } else {
        Purpose::Restore
    };
    decide_again(
        backups.iter().filter_map(NamedBackup::context),
        purpose,
        restore,
    )
}

/// A restore under way.
struct Restoration<'a> {
    backups: &'a [NamedBackup],
    options: &'a Options,
    to_snapshot: Option<&'a PlainTarget>,
    cancel: Cancel,
    clock: ReportBuilder,
    is_drill: bool,
}

impl Restoration<'_> {
    fn run(self) -> Result<Report<Restored>> {
        match (&self.options.data_dir, self.to_snapshot) {
            (Some(dir), _) => self.into_data_dir(dir),
            (None, Some(target)) => self.into_file(target),
            (None, None) => Err(Reason::Usage.error(format!("give {DATA_DIR} or {TO_SNAPSHOT}"))),
        }
    }

    /// Writes the first candidate, in order of rank, that can be read. Returns the outcome, and whether
    /// anything was written: a dry run writes nothing.
    fn try_candidates(
        &mut self,
        mut candidates: Candidates<'_>,
        decision: Decision,
        mut write: impl FnMut(
            &mut Self,
            &State,
            &Context,
        ) -> Result<Option<WrittenDatabase>, WriteFailure>,
    ) -> Result<(Restored, bool)> {
        let mut first_failure = None;
        loop {
            let Some(&i) = candidates.ranked().first() else {
                return Err(candidates.none_left(first_failure));
            };
            let Ok(OpenedBackup { ctx, source, .. }) = &candidates.all[i].opened else {
                return Err(Error::internal("a candidate is ranked that was not opened"));
            };
            let written = match write(self, source, ctx) {
                Ok(written) => written,
                Err(WriteFailure::Candidate(e)) if is_candidate_failure(&e) => {
                    candidates.exclude(i, &e);
                    first_failure.get_or_insert(e);
                    continue;
                }
                Err(WriteFailure::Candidate(e) | WriteFailure::Target(e)) => return Err(e),
            };
            self.add_warnings(source, ctx)?;
            let mut outcome = self.outcome_from(source, decision, written.as_ref())?;
            candidates.outcomes[i].status = CandidateStatus::Chosen;
            outcome.candidates = candidates.outcomes;
            return Ok((outcome, written.is_some()));
        }
    }

    /// Adds the warnings about the source that is restored.
    fn add_warnings(&mut self, source: &State, ctx: &Context) -> Result<()> {
        self.clock.warnings.extend(source.warnings.iter().cloned());
        if self.options.dry_run {
            refuse_excluded_deltas(ctx, source.deltas())?;
        }
        if let Some(warning) = self.unsaved_warning(source, ctx) {
            self.clock.warn(warning);
        }
        if holds_alarm(source).map_err(source.at_base(ctx))? {
            self.clock.warn(format!("the base holds an alarm (NOSPACE or CORRUPT), and so does the restored database: etcd refuses writes until it is disarmed. Start etcd with enough {QUOTA_BACKEND_BYTES}, then run `etcdctl alarm list` and `etcdctl alarm disarm`"));
        }
        Ok(())
    }

    /// Names a follower that may still hold changes after the newest state.
    fn unsaved_warning(&self, source: &State, ctx: &Context) -> Option<String> {
        let point = &self.options.point;
        let is_newest = point.revision.is_none() && point.time.is_none();
        if self.is_drill || !is_newest || source.base_snapshot().is_none() {
            return None;
        }
        let newest = source.inputs().map(|s| s.name.created_at()).max();
        let FoundFollower::Live(follower) = FoundFollower::find(&ctx.store, newest)? else {
            return None;
        };
        Some(format!(
            "{} is followed by {}: if it holds later changes, they are not restored. To save them first, stop it with SIGTERM and restore again",
            ctx.store.url(),
            follower.text()
        ))
    }

    /// Returns the outcome of a restore from `source`; in a dry run nothing is `written`.
    fn outcome_from(
        &self,
        source: &State,
        decision: Decision,
        written: Option<&WrittenDatabase>,
    ) -> Result<Restored> {
        let mut outcome = self.outcome(decision);
        outcome.base = Some(source.base_name());
        outcome.deltas = source.deltas().map(|s| s.name.to_string()).collect();
        outcome.timeline = Some(source.timeline.clone());
        outcome.restored_revision = Some(source.revision);
        outcome.metadata_revision = Some(source.base.metadata_revision);
        outcome.revision = Some(self.newest_revision(source)?);
        if let Some(w) = written {
            outcome.events = Some(w.events);
            outcome.revision = Some(w.revision);
            outcome.compact_revision = Some(w.rebuilt.hash.compact_revision);
            outcome.live_keys = Some(w.rebuilt.hash.live_keys);
            outcome.hash_kv = Some(w.rebuilt.hash.hash);
            outcome.leases_added = Some(w.rebuilt.leases_added);
            outcome.database_bytes = w.bytes;
        }
        Ok(outcome)
    }

    /// Returns an outcome without a restored state: the decision, and what was read.
    fn outcome(&self, decision: Decision) -> Restored {
        let contexts = self.backups.iter().filter_map(NamedBackup::context);
        let bytes_read = contexts.map(|ctx| ctx.store.bytes_read());
        Restored {
            decision,
            bytes_read: bytes_read.sum(),
            as_of: self.options.point.time,
            dry_run: self.options.dry_run,
            ..Restored::default()
        }
    }

    /// Returns the newest revision of the restored database.
    fn newest_revision(&self, source: &State) -> Result<Revision> {
        let bump = self.options.bump_revision.unwrap_or_default();
        match source.revision.0.checked_add(bump) {
            // Leave room for the revisions of later transactions.
            Some(r) if r < i64::MAX / 2 => Ok(Revision(r)),
            _ => Err(Reason::Usage.error(format!(
                "{BUMP_REVISION} {bump} above revision {} leaves too few revisions for new transactions: choose a smaller one",
                source.revision
            ))),
        }
    }

    /// Returns the plan of the new database: what it is folded from, and what is replaced in it.
    fn plan<'s>(
        &self,
        source: &'s State,
        ctx: &Context,
        cluster: Option<&Cluster>,
    ) -> Result<Rebuild<'s>> {
        let mut rebuild = Rebuild {
            source,
            compact: match self.options.bump_revision {
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
}

/// Returns a path as text for a report; bytes that are not UTF-8 are replaced.
fn path_text(path: &Path) -> String {
    path.display().to_string()
}

/// Returns whether the base has an alarm raised, which keeps etcd from writing after a restore.
fn holds_alarm(source: &State) -> Result<bool> {
    match source.db.bucket(b"alarm")? {
        Some(alarms) => Ok(source.db.cursor(&alarms).next()?.is_some()),
        None => Ok(false),
    }
}
