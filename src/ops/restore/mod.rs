//! Restore: a state of a backup becomes a member's data directory, or a plain snapshot file.
//!
//! look at the target → choose a backup → fold → stage, sync, verify → put in place. No etcd runs.

mod candidates;
mod data_dir;
mod file;
mod needed;
mod options;
mod output;
mod write;

pub use crate::ops::fold::open::BackupLocation;
pub use candidates::{Fate, Told};
pub use needed::{Action, Decision, Depth};
pub use options::{KeepOrDrop, Membership, Options, Wanted};

use crate::base::Cancel;
use crate::datadir::membership::Cluster;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::fold::Source;
use crate::ops::fold::rebuild::Rebuild;
use crate::ops::report::{Report, ReportBuilder};
use crate::ops::tags::without_excluded;
use candidates::{Candidates, Opened, excludes};
use output::Failed;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use write::Written;

/// How it ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// It was restored (or would be, in a dry run).
    #[default]
    Succeeded,
    /// The member that is there is in order.
    NotNeeded,
}

/// The member that was written.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Member {
    /// Its name.
    pub name: String,
    /// Its ID, hexadecimal as etcd prints it.
    pub id: String,
    /// The cluster's ID, hexadecimal. The same for all members that are restored with the same
    /// --initial-cluster and --initial-cluster-token.
    pub cluster_id: String,
    /// The names of all members, in the order of their IDs.
    pub members: Vec<String>,
}

/// What was done. The fields are a contract: `docs/restore-result.schema.json`.
#[derive(Debug, Clone, Default, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// What was decided, and why.
    pub decision: Decision,
    /// The data directory, as an absolute path. null if a plain snapshot file was asked for.
    pub data_dir: Option<String>,
    /// The WAL directory, as an absolute path, if it is one of its own; else null.
    pub wal_dir: Option<String>,
    /// The plain snapshot file, as --to-snapshot names it. null if a data directory was asked for.
    pub snapshot_file: Option<String>,
    /// Where what was there before is kept: the old member's folder, and the folder of the old WAL segments
    /// if they have a directory of their own. Empty if nothing was there.
    pub kept_aside: Vec<String>,
    /// The member that was written (in a dry run: would be). null if none is.
    pub member: Option<Member>,
    /// Every backup that was looked at, in the order in which they were named. Empty if none had to be:
    /// `--if-needed sanity`, and the member stays.
    pub candidates: Vec<Told>,
    /// The full snapshot that was restored from: its name without its folder, or, with --snapshot, the file
    /// as it was named. null if nothing is restored.
    pub base: Option<String>,
    /// The names, without their folders, of the delta snapshots that were folded into it, in order.
    pub deltas: Vec<String>,
    /// How many events of the deltas were folded; those that the base holds already are not counted. null if
    /// nothing was written.
    pub events: Option<u64>,
    /// The ID of the timeline that was restored; `main` of a plain snapshot file. null if nothing is
    /// restored.
    pub timeline: Option<String>,
    /// The revision of the backup that was restored. null if nothing is.
    pub restored_revision: Option<Revision>,
    /// The newest revision of what was written: `restored_revision`, raised by --bump-revision. null if
    /// nothing is restored.
    pub revision: Option<Revision>,
    /// The compacted revision of what was written: states before it cannot be read. -1 if it holds all
    /// history. null if nothing was written.
    pub compact_revision: Option<Revision>,
    /// How many keys are alive at `revision`. null if nothing was written.
    pub live_keys: Option<u64>,
    /// etcd's HashKV at `revision`: what `etcdctl endpoint hashkv` says of an etcd that serves it, before
    /// anything is written to it. null if nothing was written.
    pub hash_kv: Option<u32>,
    /// Users, roles, alarms and the records of leases are as of this revision, since deltas hold only keys.
    /// null if nothing is restored.
    pub metadata_revision: Option<Revision>,
    /// How many leases got a record, with --lease-ttl: keys are attached to them, and the base has none. null
    /// if nothing was written.
    pub leases_added: Option<u64>,
    /// Bytes read from the stores. A plain snapshot file is not counted.
    pub bytes_read: u64,
    /// Size of the database that was written, in bytes, without the SHA-256 behind it in a snapshot file; 0
    /// if nothing was written.
    pub database_bytes: u64,
    /// Whether it was only said what would be done.
    pub dry_run: bool,
}

/// Restores the best of some backups; one or more.
///
/// # Errors
/// Any reason but `KeyNotFound`. The target is as it was then, or the next run makes it so.
pub fn run(
    backups: &[BackupLocation],
    options: &Options,
    cancel: &Cancel,
) -> Result<Report<Outcome>> {
    if backups.is_empty() {
        return Err(
            Reason::Usage.error("there is nothing to restore from: give --store or --snapshot")
        );
    }
    restore(backups, options, cancel, false)
}

/// Restores into a data directory that is removed again, once an etcd was tried on it.
///
/// # Errors
/// As [`run`].
pub(super) fn run_for_drill(
    backup: BackupLocation,
    options: &Options,
    cancel: &Cancel,
) -> Result<Report<Outcome>> {
    restore(&[backup], options, cancel, true)
}

fn restore(
    backups: &[BackupLocation],
    options: &Options,
    cancel: &Cancel,
    is_drill: bool,
) -> Result<Report<Outcome>> {
    without_excluded(|| {
        let run = Run {
            backups,
            options,
            cancel: cancel.clone(),
            clock: ReportBuilder::start(),
            is_drill,
        };
        match (&options.data_dir, &options.to_snapshot) {
            (Some(dir), _) => run.into_data_dir(dir),
            (None, Some(file)) => run.into_file(file),
            (None, None) => Err(Reason::Usage.error("give --data-dir or --to-snapshot")),
        }
    })
}

struct Run<'a> {
    backups: &'a [BackupLocation],
    options: &'a Options,
    cancel: Cancel,
    clock: ReportBuilder,
    is_drill: bool,
}

impl Run<'_> {
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
                self.clock.warn(warning);
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
            let written = match source.wait_for_hash() {
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
            self.clock.warnings.extend(source.warnings.iter().cloned());
            if self.options.dry_run {
                self.clock.warnings.extend(source.tags_warning());
            }
            if holds_alarm(source).map_err(source.at_base(ctx))? {
                self.clock.warn("the base has an alarm raised (etcd had no space left, or found data that differed), and so has what is restored: etcd says that it is not healthy and may refuse to write until `etcdctl alarm disarm`");
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

    fn outcome(&self, decision: Decision) -> Outcome {
        let read = self.backups.iter().map(|b| match b {
            BackupLocation::Store(ctx) | BackupLocation::File(ctx, _) => ctx.store.bytes_read(),
            BackupLocation::Closed { .. } => 0,
        });
        Outcome {
            decision,
            bytes_read: read.sum(),
            dry_run: self.options.dry_run,
            ..Outcome::default()
        }
    }

    /// The newest revision of the result.
    fn newest_revision(&self, source: &Source) -> Result<Revision> {
        let bump = self.options.wanted.bump_revision.unwrap_or_default();
        match source.target.0.checked_add(bump) {
            // The highest revision is no revision for a next transaction.
            Some(r) if r < i64::MAX / 2 => Ok(Revision(r)),
            _ => Err(Reason::Usage.error(format!(
                "--bump-revision {bump} would leave hardly a revision above {} for new transactions",
                source.target
            ))),
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
