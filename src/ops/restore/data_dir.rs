//! Restore into a member's data directory: occupy → look and decide → write → put in place.

use super::candidates::{Candidates, excludes};
use super::needed::{self, Action, Decision, Depth, Found};
use super::output::Failed;
use super::{Member, Outcome, Run, Status, shown, write};
use crate::datadir::install::{InstallTarget, Leftover, LockedTarget};
use crate::datadir::membership::Cluster;
use crate::datadir::{self, snap, wal};
use crate::error::{Error, Reason, Result};
use crate::etcd::peers;
use crate::ops::fold::Source;
use crate::ops::identity;
use crate::ops::report::Report;
use crate::store::Store;
use chrono::Utc;
use std::path::Path;

impl Run<'_> {
    pub(super) fn into_data_dir(mut self, dir: &Path) -> Result<Report<Outcome>> {
        let place = &InstallTarget::new(dir, self.options.wal_dir.as_deref())?;
        let cluster = &self.options.wanted.membership.cluster()?;
        let if_needed = self.options.wanted.if_needed;
        refuse_in_use(place)?;
        let occupied = self.occupy(place)?;
        let taken = place.is_taken()?;
        let found = match if_needed {
            None if taken => return Err(holds_member(place)),
            None => Found::Asked,
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
            self.refuse_quorum(cluster, &decision)?;
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
                let rebuild = run.plan(source, ctx, Some(cluster))?;
                let written = write::database(ctx, &rebuild, &snap_dir.join("db"))?;
                write_log(cluster, &snap_dir, &wal_dir).map_err(Failed::Target)?;
                Ok(Some(written))
            })?;
        if chosen && let Some(occupied) = occupied {
            put_in_place(place, occupied, taken, &mut outcome)?;
        }
        // A drill's cluster saves nothing.
        if let (Some(store), Some(cluster), false) = (&store, &member, self.is_drill) {
            let warning = says_other_cluster(store, cluster);
            warning.into_iter().for_each(|w| self.clock.warn(w));
        }
        outcome.member = member.as_ref().map(Member::of);
        outcome.data_dir = Some(shown(place.dir()));
        outcome.wal_dir = place.own_wal_dir().map(shown);
        Ok(self.clock.report(outcome))
    }

    /// Takes the directory, if it is to be written, and tells what an interrupted restore had left there.
    fn occupy(&mut self, place: &InstallTarget) -> Result<Option<LockedTarget>> {
        if self.options.dry_run {
            if place.has_leftover() {
                self.clock.warn(format!(
                    "a restore into {} was interrupted: the next one completes or undoes it first",
                    place.dir().display()
                ));
            }
            return Ok(None);
        }
        let occupied = place.lock()?;
        match occupied.leftover() {
            Leftover::Completed => {
                self.clock
                    .warn("an earlier restore was interrupted at its very end: it was completed");
            }
            Leftover::Undone => {
                self.clock
                    .warn("an earlier restore was interrupted: it was undone");
            }
            Leftover::None => {}
        }
        Ok(Some(occupied))
    }

    /// Fails if the other members go on without this one.
    fn refuse_quorum(&self, cluster: &Cluster, decision: &Decision) -> Result<()> {
        let (all, me) = (cluster.members(), cluster.me().id);
        let others: Vec<_> = all.iter().filter(|m| m.id != me).collect();
        match peers::find_quorum(&others, all.len(), &self.options.peers, &self.cancel)? {
            None => Ok(()),
            Some(why) => Err(Reason::ClusterHasQuorum.error(format!(
                "{}; but {why}: a restored member would not fit to it. Remove this member from the running cluster and add it again as a new one (etcdctl member remove, etcdctl member add), with an empty data directory",
                decision.message
            ))),
        }
    }

    /// The outcome where what is there stays.
    fn kept(
        self,
        place: &InstallTarget,
        decision: Decision,
        candidates: Option<Candidates<'_>>,
    ) -> Report<Outcome> {
        tracing::info!(reason = decision.reason, "{}", decision.message);
        let mut outcome = self.outcome(decision);
        outcome.status = Status::NotNeeded;
        outcome.candidates = candidates.map(|c| c.told).unwrap_or_default();
        outcome.data_dir = Some(shown(place.dir()));
        outcome.wal_dir = place.own_wal_dir().map(shown);
        self.clock.report(outcome)
    }

    /// Compares a member that is in order by itself with the best backup that can be read.
    fn compare_with_backup(
        &mut self,
        found: &Found,
        alone: bool,
        candidates: &mut Candidates<'_>,
    ) -> Result<Decision> {
        let why = match candidates.compare() {
            Ok(warnings) => {
                warnings.into_iter().for_each(|w| self.clock.warn(w));
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
        self.clock.warn(format!(
            "the member could not be compared with a backup: {why}"
        ));
        Ok(found.decide())
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
}

/// Puts what was staged in the place of what is there.
fn put_in_place(
    place: &InstallTarget,
    occupied: LockedTarget,
    taken: bool,
    outcome: &mut Outcome,
) -> Result<()> {
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

fn refuse_in_use(place: &InstallTarget) -> Result<()> {
    let dir = place.dir().display();
    match datadir::in_use(&place.member(), &place.wal())? {
        true => Err(Reason::TargetInUse.error(format!("a running etcd uses {dir}: stop it first"))),
        false => Ok(()),
    }
}

fn holds_member(place: &InstallTarget) -> Error {
    Reason::TargetExists.error(format!(
        "{} holds a member already, which is never overwritten: choose another --data-dir, or have it looked at and replaced with --if-needed",
        place.dir().display()
    ))
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
