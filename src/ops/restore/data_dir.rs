//! Restore into a member's data directory: lock it, inspect it, decide, write to staging, move into
//! place.
//!
//! Does not overwrite a member: with --if-needed it moves a faulty one aside.

use super::candidates::{Candidates, is_candidate_failure};
use super::needed::{self, Action, Decision, Depth, Inspection};
use super::output::WriteFailure;
use super::write::WrittenDatabase;
use super::{Member, Restoration, Restored, path_text, write};
use crate::base::opt::{DATA_DIR, IF_NEEDED, TAKE_OVER};
use crate::datadir::install::{Dir, InstallTarget, Leftover, LockedTarget, Staged};
use crate::datadir::membership::Cluster;
use crate::datadir::{self, snap, wal};
use crate::error::{Error, Reason, Result};
use crate::etcd::peers;
use crate::ops::report::Report;
use crate::prefix::Context;
use crate::prefix::identity;
use crate::prefix::open::State;
use crate::store::Store;
use chrono::Utc;
use std::path::Path;

impl Restoration<'_> {
    /// Restores into `dir`, if that is needed.
    pub(super) fn into_data_dir(mut self, dir: &Path) -> Result<Report<Restored>> {
        let place = &InstallTarget::new(dir, self.options.wal_dir.as_deref())?;
        let cluster = &self.options.membership.cluster()?;
        let if_needed = self.options.if_needed;
        refuse_target_in_use(place)?;
        let occupied = self.occupy(place)?;
        let has_member = place.is_taken()?;
        let inspection = match if_needed {
            None if has_member => return Err(holds_member(place)),
            None => Inspection::NotInspected,
            Some(depth) => needed::inspect(place, has_member, depth, &self.cancel)?,
        };
        let mut decision = inspection.decide();
        if decision.action == Action::Keep && if_needed == Some(Depth::Sanity) {
            return Ok(self.kept(place, decision, None));
        }
        let mut candidates = Candidates::open(self.backups, &self.options.request())?;
        if decision.action == Action::Keep {
            let is_only_member = cluster.members().len() == 1;
            decision = self.compare_with_backup(&inspection, is_only_member, &mut candidates)?;
            if decision.action == Action::Keep {
                return Ok(self.kept(place, decision, Some(candidates)));
            }
        }
        if if_needed.is_some() {
            tracing::info!(reason = decision.reason, "{}", decision.message);
            self.refuse_quorum(cluster, &decision)?;
        }
        place.require_empty_wal_dir()?;
        let (mut member, mut store) = (None, None);
        let (mut outcome, is_written) =
            self.try_candidates(candidates, decision, |restoration, source, ctx| {
                let cluster = match if_needed {
                    None => Cluster::clone(cluster),
                    Some(_) => restoration
                        .cluster_of(cluster, source)
                        .map_err(WriteFailure::Target)?,
                };
                let cluster = &*member.insert(cluster);
                store = source.base_snapshot().map(|_| ctx.store.clone());
                match &occupied {
                    None => Ok(None),
                    Some(occupied) => restoration
                        .stage_member(occupied, cluster, source, ctx)
                        .map(Some),
                }
            })?;
        if is_written && let Some(occupied) = occupied {
            put_in_place(place, occupied, has_member, &mut outcome)?;
        }
        // The cluster of a drill takes no snapshots.
        if let (Some(store), Some(cluster), false) = (&store, &member, self.is_drill)
            && let Some(warning) = other_cluster_warning(store, cluster)
        {
            self.clock.warn(warning);
        }
        outcome.member = member.as_ref().map(Member::of);
        outcome.data_dir = Some(path_text(place.dir()));
        outcome.wal_dir = place.own_wal_dir().map(path_text);
        if is_written {
            outcome.start_command = Some(self.start_command(&outcome));
        }
        Ok(self.clock.report(outcome))
    }

    /// Returns the command that starts etcd on the restored member.
    fn start_command(&self, outcome: &Restored) -> Vec<String> {
        let membership = self.options.membership.clone().complete();
        let mut command = vec!["etcd".to_owned()];
        command.extend(membership.etcd_flags());
        for (flag, dir) in [
            ("--data-dir", &outcome.data_dir),
            ("--wal-dir", &outcome.wal_dir),
        ] {
            if let Some(dir) = dir {
                command.extend([flag.to_owned(), dir.clone()]);
            }
        }
        command
    }

    /// Writes a member's files to staging.
    fn stage_member(
        &self,
        occupied: &LockedTarget,
        cluster: &Cluster,
        source: &State,
        ctx: &Context,
    ) -> Result<WrittenDatabase, WriteFailure> {
        let Staged { snap, wal } = occupied.stage().map_err(WriteFailure::Target)?;
        let rebuild = self.plan(source, ctx, Some(cluster))?;
        let written = write::database(ctx, &rebuild, &snap, "db")?;
        write_log(cluster, &snap, &wal).map_err(WriteFailure::Target)?;
        Ok(written)
    }

    /// Locks the directory, and completes or undoes an interrupted restore there. In a dry run it only
    /// warns of one.
    fn occupy(&mut self, place: &InstallTarget) -> Result<Option<LockedTarget>> {
        if self.options.dry_run {
            if place.has_leftover() {
                self.clock.warn(format!(
                    "a restore into {} was interrupted: the next restore completes or undoes it first",
                    place.dir().display()
                ));
            }
            return Ok(None);
        }
        let aside = format!("bad-{}", Utc::now().format("%Y%m%dT%H%M%SZ"));
        let occupied = place.lock(&aside)?;
        match occupied.leftover() {
            Leftover::Completed => {
                self.clock
                    .warn("an earlier restore was interrupted while it put its member in place: it was completed");
            }
            Leftover::Undone => {
                self.clock
                    .warn("an earlier restore was interrupted: it was undone");
            }
            Leftover::None => {}
        }
        Ok(Some(occupied))
    }

    /// Fails with `ClusterHasQuorum` if the other members still have a quorum without this one.
    fn refuse_quorum(&self, cluster: &Cluster, decision: &Decision) -> Result<()> {
        let (all, me) = (cluster.members(), cluster.me().id);
        let others: Vec<_> = all.iter().filter(|m| m.id != me).collect();
        match peers::find_quorum(&others, all.len(), &self.options.peers, &self.cancel)? {
            None => Ok(()),
            Some(quorum) => Err(Reason::ClusterHasQuorum.error(format!(
                "{}; but {quorum}: a restored member cannot join them. Remove this member from the running cluster and add it again as a new one (etcdctl member remove, etcdctl member add), with an empty data directory",
                decision.message
            ))),
        }
    }

    /// Returns the report of a restore that was not needed.
    fn kept(
        self,
        place: &InstallTarget,
        decision: Decision,
        candidates: Option<Candidates<'_>>,
    ) -> Report<Restored> {
        tracing::info!(reason = decision.reason, "{}", decision.message);
        let mut outcome = self.outcome(decision);
        outcome.candidates = candidates.map(|c| c.outcomes).unwrap_or_default();
        outcome.data_dir = Some(path_text(place.dir()));
        outcome.wal_dir = place.own_wal_dir().map(path_text);
        self.clock.ended(outcome, false, None)
    }

    /// Compares a sound member with the best backup that can be read. Keeps the member if none can be
    /// read.
    fn compare_with_backup(
        &mut self,
        inspection: &Inspection,
        is_only_member: bool,
        candidates: &mut Candidates<'_>,
    ) -> Result<Decision> {
        for i in candidates.ranked() {
            match inspection.compare(&candidates.all[i], is_only_member, &self.cancel) {
                Ok(decision) => return Ok(decision),
                Err(e) if is_candidate_failure(&e) => candidates.exclude(i, &e),
                Err(e) => return Err(e),
            }
        }
        let failure = candidates.none_left(None);
        // A sound member must start even if no backup can be reached.
        self.clock.warn(format!(
            "the member could not be compared with a backup: {failure}"
        ));
        Ok(inspection.decide())
    }

    /// Returns the cluster of a member that is restored because it needs it. Other members may not need
    /// a restore.
    ///
    /// A restored member's log is that of a new cluster. Together with members that were not restored,
    /// or were restored at another revision, and that have the same IDs, it would accept their entries
    /// as its own, and the data would differ unnoticed. So the IDs depend on the revision: members
    /// restored at different revisions refuse each other, and those restored at the same one form one
    /// cluster.
    fn cluster_of(&self, cluster: &Cluster, source: &State) -> Result<Cluster> {
        match cluster.members().len() {
            1 => Ok(cluster.clone()),
            _ => {
                let (restored, newest) = (source.revision, self.newest_revision(source)?);
                cluster.with_token(format!("{}@{restored}-{newest}", cluster.token()))
            }
        }
    }
}

/// Moves the staged member into place, and an old one aside.
fn put_in_place(
    place: &InstallTarget,
    occupied: LockedTarget,
    had_member: bool,
    outcome: &mut Restored,
) -> Result<()> {
    // An etcd may have been started during the restore, on the old data or without any.
    refuse_target_in_use(place)?;
    if !had_member && place.is_taken()? {
        return Err(holds_member(place));
    }
    place.require_empty_wal_dir()?;
    let mut done = |step| tracing::debug!(step, "putting the member in place");
    let kept = occupied.put_in_place(&mut done)?;
    outcome.kept_aside = kept.iter().map(|p| path_text(p)).collect();
    tracing::info!(
        data_dir = %place.dir().display(),
        revision = outcome.revision.unwrap_or_default().0,
        hash_kv = outcome.hash_kv,
        "restored a member"
    );
    Ok(())
}

impl Member {
    fn of(cluster: &Cluster) -> Self {
        Member {
            name: cluster.me().name.clone(),
            id: cluster.me().id.to_string(),
            cluster_id: cluster.id().to_string(),
            members: cluster.members().iter().map(|m| m.name.clone()).collect(),
        }
    }
}

/// Returns a warning if the backup is recorded as that of another cluster than the restored one.
fn other_cluster_warning(store: &Store, cluster: &Cluster) -> Option<String> {
    let recorded = match identity::read(store) {
        Ok(recorded) => recorded?,
        Err(e) => {
            return Some(format!(
                "the cluster that the backup belongs to is unknown: {e}"
            ));
        }
    };
    if recorded.is_of(cluster.id().0) {
        return None;
    }
    Some(format!(
        "{} is recorded as the backup of cluster {}, and the restored cluster's ID is {}: the restored cluster's first snapshot to this backup needs {TAKE_OVER}",
        store.url(),
        recorded.describe_cluster(),
        cluster.id()
    ))
}

fn refuse_target_in_use(place: &InstallTarget) -> Result<()> {
    let dir = place.dir().display();
    if datadir::in_use(&place.member(), &place.wal())? {
        Err(Reason::TargetInUse.error(format!("a running etcd uses {dir}: stop it first")))
    } else {
        Ok(())
    }
}

fn holds_member(place: &InstallTarget) -> Error {
    Reason::TargetExists.error(format!(
        "{} already holds a member, and restore never overwrites one: choose another {DATA_DIR}, or use {IF_NEEDED} to replace a faulty member",
        place.dir().display()
    ))
}

/// Writes the WAL and the `.snap` file, and verifies them by reading them back.
fn write_log(cluster: &Cluster, snap_dir: &Dir, wal_dir: &Dir) -> Result<()> {
    let snap_file = snap::write(snap_dir, cluster)?;
    wal::create(wal_dir, cluster)?;
    let log = wal::read(wal_dir.path())?;
    let snapshot = snap::read(&snap_file)?;
    let is_same = log.node_id == cluster.me().id
        && log.cluster_id == cluster.id()
        && log.last_index == cluster.index()
        && snapshot.index == cluster.index();
    if is_same {
        Ok(())
    } else {
        Err(Error::internal(
            "the WAL or the .snap file reads back differently from what was written",
        ))
    }
}
