//! Keeping a cluster lean: history compacted, databases defragmented, alarms for want of space disarmed.
//!
//! look at the cluster → compact no more than is saved → defragment one member at a time, the leader last,
//! while all are well → disarm what has room again. What is done is decided by [`plan_compaction`] and
//! [`plan_defragmentation`], which are pure.

use crate::base::text_value::Notation;
use crate::base::{TextValue, duration};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::{AlarmKind, Cluster, Compacted, Member};
use crate::etcd::connect::Connector;
use crate::kubernetes::{self, lease};
use crate::ops::Context;
use crate::ops::fold::{by_time::revision_at, select::choose_timeline};
use crate::ops::report::{Clock, Failed, Report};
use crate::ops::scan::{Depth, scan_asking};
use crate::ops::snapshot::same_history;
use crate::ops::tags::{Ask, without_excluded};
use crate::store::lock::{self, Lock, LockGuard, Wait};
use crate::telemetry::progress::Step;
use chrono::{DateTime, TimeDelta, Utc};
use clap::Args;
use rustix::fs::{FlockOperation, flock};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// A database that uses more of its quota is defragmented before the fraction asked for is wasted.
const QUOTA_PERCENT: u64 = 80;
/// But not for less than such a part of it.
const WORTHWHILE: u64 = 100;
/// A database that uses less of its quota has room.
const ROOM_PERCENT: u64 = 95;
/// For a member to be well again after its defragmentation, and for all to be before the first.
const RETURN_PATIENCE: Duration = Duration::from_secs(5 * 60);
/// Between looks at a cluster that is waited for.
const PAUSE: Duration = Duration::from_millis(500);
/// For members to remove from their databases what was compacted: each does so by itself.
const SETTLE_PATIENCE: Duration = Duration::from_secs(60);
/// They are done when so many looks have shown no change.
const QUIET_LOOKS: u32 = 3;
/// A run that is dead for so long blocks no other.
const LOCK_DURATION: Duration = Duration::from_secs(15);

/// How much history etcd keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// So many revisions.
    Revisions(u64),
    /// What happened within this time, by the bucket's events.
    Age(Duration),
}

impl FromStr for Keep {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if let Ok(n) = s.parse() {
            return Ok(Keep::Revisions(n));
        }
        duration::parse(s).map(Keep::Age).map_err(|_| {
            "give a number of revisions (1000) or a duration (90s, 30m, 1h30m, 7d)".to_owned()
        })
    }
}

impl Notation for Keep {
    const PATTERN: &'static str = "^([0-9]+|([0-9]+(ms|s|m|h|d|w))+)$";
}

/// When a database is worth to be defragmented.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Defrag {
    /// Whatever it wastes.
    Always,
    /// Where such a part of it is wasted, from 0 to 1.
    Fraction(f64),
}

impl FromStr for Defrag {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.parse::<f64>() {
            _ if s == "always" => Ok(Defrag::Always),
            Ok(f) if (0.0..=1.0).contains(&f) => Ok(Defrag::Fraction(f)),
            _ => Err("give \"always\", or the wasted fraction from 0 to 1, such as 0.5".to_owned()),
        }
    }
}

impl Notation for Defrag {
    const PATTERN: &'static str = "^(always|0(\\.[0-9]+)?|1(\\.0+)?)$";
}

/// What keeps an etcd lean.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Upkeep {
    /// Compact the history, and keep this much of it: a number of revisions, or with a store a duration such as
    /// 90s, 1h30m or 7d
    #[arg(long, value_name = "HISTORY")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compact_keep: Option<TextValue<Keep>>,
    /// Defragment members that waste at least this fraction of their database (0 to 1), or `always`
    #[arg(long, value_name = "FRACTION")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defrag: Option<TextValue<Defrag>>,
}

impl Upkeep {
    fn keep(&self) -> Option<Keep> {
        self.compact_keep.as_ref()?.value()
    }

    fn defrag(&self) -> Option<Defrag> {
        self.defrag.as_ref()?.value()
    }
}

/// What to do.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Compact history, defragment, or both.
    pub upkeep: Upkeep,
    /// The members' quota, where they do not say: servers before 3.6 do not.
    pub quota: Option<u64>,
    /// Only say what would be done.
    pub dry_run: bool,
    /// Where the lock is without a store and without a Lease.
    pub temp_dir: PathBuf,
    /// The Lease of Kubernetes that is the lock.
    pub lock_lease: Option<LockLease>,
}

/// A Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockLease {
    /// Its name.
    pub name: String,
    /// Its namespace; that of the kubeconfig or the Pod where `None`.
    pub namespace: Option<String>,
}

/// How it ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// Something was done (or would be, in a dry run).
    Succeeded,
    /// Nothing had to be.
    #[default]
    NothingToDo,
    /// It failed midway: the rest tells how far it came.
    Failed,
}

/// What was done. The fields are a contract: `docs/maintain-result.schema.json`.
#[derive(Debug, Clone, Default, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Why, if it failed.
    #[serde(flatten)]
    pub error: Failed,
    /// Whether only a plan was made.
    pub dry_run: bool,
    /// The compaction; null if none was asked for, or if it failed before it was planned.
    pub compact: Option<CompactOutcome>,
    /// The members, in the order in which they are defragmented: the leader is last. Empty if it failed
    /// before that was planned.
    pub members: Vec<MemberOutcome>,
    /// The names of the members whose alarm for want of space (NOSPACE) was disarmed.
    pub alarms_cleared: Vec<String>,
    /// The newest revision that the store holds of this cluster. null without a store, without
    /// --compact-keep, or if the store holds none.
    pub last_saved_revision: Option<i64>,
}

/// What became of the compaction.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct CompactOutcome {
    /// The history to keep, as it was asked for: a number of revisions, or seconds followed by `s`.
    pub requested: String,
    /// The revision compacted at (in a dry run: that would be). null if nothing is to be compacted.
    pub revision: Option<i64>,
    /// What the cluster had compacted at before; null if it never had.
    pub previous_revision: Option<i64>,
    /// Why this revision, or none. For people: it may change.
    pub reason: String,
    /// Whether it was done.
    pub done: bool,
}

/// What became of a member.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct MemberOutcome {
    /// Its name; empty if it was never started.
    pub name: String,
    /// Its ID, hexadecimal, as etcdctl shows it.
    pub id: String,
    /// Where it answers; null if it answers nowhere.
    pub endpoint: Option<String>,
    /// Whether it was the leader when the plan was made.
    pub leader: bool,
    /// Bytes of its database when the plan was made; null if it does not answer.
    pub db_size_before: Option<u64>,
    /// Bytes of it that held data; null if it does not answer.
    pub db_size_in_use_before: Option<u64>,
    /// Bytes of its database after its defragmentation; null if there was none.
    pub db_size_after: Option<u64>,
    /// `Defragment`: it was, or is to be. `Leave`: it is left as it is.
    pub decision: Decision,
    /// Why. For people: it may change.
    pub reason: String,
    /// Whether it was defragmented.
    pub done: bool,
    /// How long it took, until all members were well again; null if it was not done.
    pub seconds: Option<f64>,
}

impl MemberOutcome {
    /// Before anything is done.
    fn of(member: &Member, plan: &Plan) -> Self {
        let status = member.status.as_ref();
        MemberOutcome {
            name: member.name.clone(),
            id: member.hex_id(),
            endpoint: member.endpoint.clone(),
            leader: member.is_leader,
            db_size_before: status.map(|s| s.db_size),
            db_size_in_use_before: status.map(|s| s.db_size_in_use),
            db_size_after: None,
            decision: plan.decision,
            reason: plan.reason.clone(),
            done: false,
            seconds: None,
        }
    }
}

/// What is done with a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Decision {
    /// It is defragmented.
    Defragment,
    /// It is left as it is.
    Leave,
}

/// What the store has of the cluster's history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Saved {
    /// There is no store to be minded.
    NoStore,
    /// Nothing that could be relied on: why.
    Nothing(String),
    /// All up to this revision.
    UpTo(i64),
}

/// What a compaction is decided by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// The cluster's newest revision.
    pub current: i64,
    /// What it compacted at.
    pub compacted: Option<i64>,
    /// What is saved.
    pub saved: Saved,
    /// The newest revision that is too old for [`Keep::Age`], by the bucket's events, if any is.
    pub too_old: Option<i64>,
}

/// The revision to compact at, if any, and why.
pub fn plan_compaction(keep: Keep, history: &History) -> (Option<i64>, String) {
    let wish = match keep {
        Keep::Revisions(n) => {
            let n = i64::try_from(n).unwrap_or(i64::MAX);
            let wish = history.current.saturating_sub(n);
            (wish >= 1).then_some(wish)
        }
        Keep::Age(_) => history.too_old,
    };
    let Some(wish) = wish else {
        return (None, "all history there is shall be kept".to_owned());
    };
    // The events of the last saved revision must stay: by them the next delta finds out that it
    // continues the very same history. Of a revision compacted at, deletions may be gone.
    let (revision, reason) = match &history.saved {
        Saved::Nothing(why) => {
            return (
                None,
                format!("nothing may be compacted that is not saved: {why}"),
            );
        }
        Saved::UpTo(last) if wish >= *last => (
            last - 1,
            format!(
                "before revision {last}, the last that is saved; revision {wish} was asked for"
            ),
        ),
        _ => (
            wish,
            format!("history up to revision {wish} is not to be kept"),
        ),
    };
    match history.compacted {
        _ if revision < 1 => (None, format!("{reason}: that leaves nothing to compact")),
        Some(at) if at >= revision => (
            None,
            format!("{reason}: it is compacted at revision {at} already"),
        ),
        _ => (Some(revision), reason),
    }
}

/// What is to be done with a member, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The member's ID.
    pub member: u64,
    /// What.
    pub decision: Decision,
    /// Why.
    pub reason: String,
}

/// What is to be defragmented: all members, the leader last. `quota` counts where it is given.
pub fn plan_defragmentation(
    cluster: &Cluster,
    defrag: Option<Defrag>,
    quota: Option<u64>,
) -> Vec<Plan> {
    let mut members: Vec<&Member> = cluster.members.iter().collect();
    members.sort_by_key(|m| m.is_leader);
    let plan = |m: &Member| plan_member(cluster, m, defrag, quota);
    members.into_iter().map(plan).collect()
}

fn plan_member(
    cluster: &Cluster,
    member: &Member,
    defrag: Option<Defrag>,
    quota: Option<u64>,
) -> Plan {
    let plan = |decision, reason| Plan {
        member: member.id,
        decision,
        reason,
    };
    let leave = |why| plan(Decision::Leave, why);
    let go = |why| plan(Decision::Defragment, why);
    let Some(defrag) = defrag else {
        return leave("no defragmentation was asked for".to_owned());
    };
    let Some(status) = &member.status else {
        return leave("it does not answer".to_owned());
    };
    if member.is_learner {
        return leave("it is a learner".to_owned());
    }
    let size = status.db_size;
    let wasted = size.saturating_sub(status.db_size_in_use);
    let fraction = wasted as f64 / size.max(1) as f64;
    let waste = format!(
        "{wasted} of {size} bytes ({:.0} %) are wasted",
        fraction * 100.0
    );
    let quota = quota.or(status.db_size_quota);
    let used = quota.map(|q| size.saturating_mul(100) / q.max(1));
    match defrag {
        Defrag::Always => go("always was asked for".to_owned()),
        Defrag::Fraction(f) if wasted > 0 && fraction >= f => {
            go(format!("{waste}, {:.0} % or more are not to be", f * 100.0))
        }
        _ if wasted > 0 && wants_space(cluster, member) => go(format!(
            "its alarm for want of space is raised, and {waste}"
        )),
        _ if used.is_some_and(|u| u > QUOTA_PERCENT)
            && wasted.saturating_mul(WORTHWHILE) >= size
            && wasted > 0 =>
        {
            go(format!(
                "it uses {} % of its quota, more than {QUOTA_PERCENT} %, and {waste}",
                used.unwrap_or(0)
            ))
        }
        Defrag::Fraction(f) => leave(format!("{waste}, less than {:.0} %", f * 100.0)),
    }
}

/// Whether an alarm for want of space is about a member.
fn wants_space(cluster: &Cluster, member: &Member) -> bool {
    let about = |id: u64| id == member.id || id == 0;
    let mut alarms = cluster.alarms.iter();
    alarms.any(|a| a.kind == AlarmKind::NoSpace && about(a.member))
}

/// The members that are not well enough for another to stop serving for a while, and why.
pub fn unwell(cluster: &Cluster) -> Vec<(String, String)> {
    let ill = cluster.members.iter().filter_map(|m| {
        let why = cluster.illness(m).or_else(|| {
            (!cluster.is_close(m))
                .then(|| format!("it is {} entries of the log behind", cluster.behind(m)))
        })?;
        Some((m.to_string(), why))
    });
    ill.collect()
}

/// Why the alarm for want of space stays; `None` where there is room again. `shrunk` are the databases
/// that were made smaller: without a known quota that has to do.
pub fn wants_room(cluster: &Cluster, quota: Option<u64>, shrunk: &[u64]) -> Option<String> {
    for m in &cluster.members {
        let Some(status) = &m.status else { continue };
        match quota.or(status.db_size_quota) {
            // etcd raises it as soon as the next request does not fit.
            Some(quota) if status.db_size > quota / 100 * ROOM_PERCENT => {
                return Some(format!(
                    "the database of {m} has {} bytes, more than {ROOM_PERCENT} % of its quota of {quota}",
                    status.db_size
                ));
            }
            Some(_) => {}
            None if !wants_space(cluster, m) || shrunk.contains(&m.id) => {}
            None => {
                return Some(format!(
                    "{m} does not say its quota, and its database was not made smaller: give --quota-backend-bytes as etcd has it"
                ));
            }
        }
    }
    None
}

/// Maintains a cluster. With a store nothing is compacted that it does not hold.
///
/// # Errors
/// Where nothing was done: those of a live cluster that does not answer, and of the store; `LockHeld`;
/// `Usage` for a duration without a store.
pub fn run(way: &Connector, store: Option<&Context>, options: &Options) -> Result<Report<Outcome>> {
    if store.is_none() && matches!(options.upkeep.keep(), Some(Keep::Age(_))) {
        return Err(Reason::Usage.error("--compact-keep with a duration needs --store: only the times of saved events tell which revision is that old"));
    }
    if options.upkeep == Upkeep::default() {
        return Err(
            Reason::Usage.error("there is nothing to do: give --compact-keep, --defrag, or both")
        );
    }
    let clock = Clock::start();
    let cluster = Cluster::look(way)?;
    // Who only looks is in nobody's way.
    let guard = match options.dry_run {
        true => Guard::None,
        false => take_lock(way, store, options, &cluster)?,
    };
    let mut run = Run {
        way,
        store,
        options,
        guard,
        shrunk: Vec::new(),
        clock,
        outcome: Outcome {
            dry_run: options.dry_run,
            ..Outcome::default()
        },
    };
    let error = run.run(cluster).err();
    let mut outcome = run.outcome;
    if error.is_some() {
        outcome.status = Status::Failed;
    } else if outcome.did_something() {
        outcome.status = Status::Succeeded;
    }
    outcome.error = Failed::from(&error);
    Ok(run.clock.ended(outcome, error))
}

impl Outcome {
    /// Or would have, in a dry run.
    fn did_something(&self) -> bool {
        let mut members = self.members.iter();
        self.compacts()
            || members.any(|m| m.decision == Decision::Defragment)
            || !self.alarms_cleared.is_empty()
    }

    fn compacts(&self) -> bool {
        self.compact.as_ref().is_some_and(|c| c.revision.is_some())
    }
}

fn pause(way: &Connector) -> Result<()> {
    let pause = async { tokio::time::sleep(PAUSE).await };
    way.wait(pause)
        .map_err(crate::etcd::connect::Failed::into_error)
}

struct Run<'a> {
    way: &'a Connector,
    store: Option<&'a Context>,
    options: &'a Options,
    guard: Guard,
    /// IDs of members whose databases were made smaller.
    shrunk: Vec<u64>,
    clock: Clock,
    outcome: Outcome,
}

impl Run<'_> {
    fn run(&mut self, mut cluster: Cluster) -> Result<()> {
        if let Some(keep) = self.options.upkeep.keep()
            && self.compact(keep, &cluster)?
        {
            cluster = self.settle()?;
        }
        cluster = self.defragment(cluster)?;
        self.disarm(&cluster)
    }

    /// Says whether history was compacted.
    fn compact(&mut self, keep: Keep, cluster: &Cluster) -> Result<bool> {
        let requested = match keep {
            Keep::Revisions(n) => n.to_string(),
            Keep::Age(age) => format!("{}s", age.as_secs_f64()),
        };
        let (saved, too_old) = match self.store {
            None => (Saved::NoStore, None),
            Some(ctx) => self.saved(ctx, keep, cluster)?,
        };
        let history = History {
            current: cluster.revision,
            compacted: cluster.compacted_revision(self.way)?,
            saved,
            too_old,
        };
        let (revision, reason) = plan_compaction(keep, &history);
        tracing::info!(
            revision,
            reason,
            current = history.current,
            compacted = history.compacted,
            dry_run = self.options.dry_run,
            "planned the compaction"
        );
        if let (Saved::Nothing(_), None) = (&history.saved, revision) {
            self.clock.warn(reason.clone());
        }
        let outcome = self.outcome.compact.insert(CompactOutcome {
            requested,
            revision,
            previous_revision: history.compacted,
            reason,
            done: false,
        });
        let Some(revision) = revision.filter(|_| !self.options.dry_run) else {
            return Ok(false);
        };
        self.guard.check()?;
        let step = Step::new(format!("compact at {revision}"), None);
        // In two steps: what one frees a member counts as free only after its next commit, and where nobody
        // writes that is the second one's. It must not be the same commit, of which there is one in 100 ms.
        if revision - 1 > history.compacted.unwrap_or(0) {
            cluster.compact(self.way, revision - 1)?;
            cluster.await_compaction(self.way, revision - 1)?;
            pause(self.way)?;
        }
        let compacted = cluster.compact(self.way, revision)?;
        cluster.await_compaction(self.way, revision)?;
        drop(step);
        outcome.done = true;
        if compacted == Compacted::Already {
            outcome.reason = format!("{}; etcd itself was faster", outcome.reason);
        }
        tracing::info!(revision, "compacted");
        Ok(true)
    }

    /// What the store holds of this very history, and the newest revision that is too old.
    fn saved(
        &mut self,
        ctx: &Context,
        keep: Keep,
        cluster: &Cluster,
    ) -> Result<(Saved, Option<i64>)> {
        let last = match same_history(ctx, self.way, cluster)? {
            Err(why) => return Ok((Saved::Nothing(why), None)),
            Ok(last) => last.0,
        };
        self.outcome.last_saved_revision = Some(last);
        let time = match keep {
            Keep::Revisions(_) => None,
            Keep::Age(age) => {
                let age = TimeDelta::from_std(age).unwrap_or(TimeDelta::MAX);
                Utc::now().checked_sub_signed(age)
            }
        };
        let Some(time) = time else {
            return Ok((Saved::UpTo(last), None));
        };
        let (too_old, warnings) = without_excluded(|| newest_at(ctx, time))?;
        self.clock.warnings.extend(warnings);
        Ok((Saved::UpTo(last), too_old))
    }

    /// Waits until no member removes compacted records any more: what they waste shows only then.
    fn settle(&self) -> Result<Cluster> {
        let until = Instant::now() + SETTLE_PATIENCE;
        let size = |m: &Member| Some((m.id, m.status.as_ref()?.db_size_in_use));
        let (mut before, mut quiet) = (BTreeMap::new(), 0);
        loop {
            pause(self.way)?;
            let cluster = Cluster::look(self.way)?;
            let now: BTreeMap<u64, u64> = cluster.members.iter().filter_map(size).collect();
            // Clients that write may well add to them.
            let falls = |(id, size): (&u64, &u64)| before.get(id).is_none_or(|b| size < b);
            quiet = match now.iter().any(falls) {
                true => 0,
                false => quiet + 1,
            };
            if quiet >= QUIET_LOOKS || Instant::now() > until {
                return Ok(cluster);
            }
            before = now;
        }
    }

    /// Defragments what is worth it, one member at a time. Gives the cluster as it is then.
    fn defragment(&mut self, mut cluster: Cluster) -> Result<Cluster> {
        let plans =
            plan_defragmentation(&cluster, self.options.upkeep.defrag(), self.options.quota);
        for plan in &plans {
            let Some(m) = cluster.member(plan.member) else {
                continue;
            };
            tracing::info!(
                member = %m,
                leader = m.is_leader,
                decision = ?plan.decision,
                reason = plan.reason,
                "planned for a member"
            );
            self.outcome.members.push(MemberOutcome::of(m, plan));
        }
        let wanted = plans.iter().filter(|p| p.decision == Decision::Defragment);
        let mut wanted: Vec<u64> = wanted.map(|p| p.member).collect();
        let ill = cluster.members.iter();
        let ill = ill.filter_map(|m| Some(format!("{m}: {}", cluster.illness(m)?)));
        let ill = ill.collect::<Vec<_>>().join("; ");
        if !ill.is_empty() {
            if wanted.is_empty() {
                self.clock.warn(format!("not healthy: {ill}"));
                return Ok(cluster);
            }
            return Err(Reason::MemberUnhealthy.error(format!(
                "nothing is defragmented, for that needs every other member: {ill}: mend that first"
            )));
        }
        if self.options.dry_run {
            if !wanted.is_empty() && self.outcome.compacts() {
                self.clock
                    .warn("sizes are from before the compaction, which frees more".to_owned());
            }
            return Ok(cluster);
        }
        while !wanted.is_empty() {
            // A lag may pass; and who leads may have changed.
            cluster = self.wait_until_well(None)?;
            let leads = |id: &u64| cluster.member(*id).is_some_and(|m| m.is_leader);
            let next = wanted.iter().position(|id| !leads(id)).unwrap_or(0);
            let id = wanted.remove(next);
            cluster = self.defragment_one(&cluster, id)?;
        }
        Ok(cluster)
    }

    /// Defragments a member, and waits until all are well.
    fn defragment_one(&mut self, cluster: &Cluster, id: u64) -> Result<Cluster> {
        let Some(member) = cluster.member(id) else {
            self.clock
                .warn(format!("member {id:x} was removed meanwhile"));
            return Ok(cluster.clone());
        };
        self.guard.check()?;
        let started = Instant::now();
        let step = Step::new(format!("defragment {member}"), None);
        tracing::info!(member = %member, leader = member.is_leader, "defragmenting");
        let ended = cluster.defragment(self.way, member);
        drop(step);
        ended.map_err(|e| e.at(member))?;
        let hex = format!("{id:x}");
        let at = self.outcome.members.iter().position(|m| m.id == hex);
        if let Some(at) = at {
            self.outcome.members[at].done = true;
        }
        let after = self.wait_until_well(Some(member))?;
        let size = after
            .member(id)
            .and_then(|m| Some(m.status.as_ref()?.db_size));
        let before = member.status.as_ref().map(|s| s.db_size);
        if size < before {
            self.shrunk.push(id);
        }
        let seconds = started.elapsed().as_secs_f64();
        if let Some(at) = at {
            self.outcome.members[at].db_size_after = size;
            self.outcome.members[at].seconds = Some(seconds);
        }
        tracing::info!(member = %member, before, after = size, seconds, "defragmented");
        Ok(after)
    }

    /// Waits until every member is healthy and has caught up; `after` was defragmented last.
    fn wait_until_well(&self, after: Option<&Member>) -> Result<Cluster> {
        let until = Instant::now() + RETURN_PATIENCE;
        loop {
            let said = match Cluster::look(self.way) {
                Ok(cluster) => {
                    let unwell = unwell(&cluster);
                    if unwell.is_empty() {
                        return Ok(cluster);
                    }
                    let said = unwell.iter().map(|(who, why)| format!("{who}: {why}"));
                    said.collect::<Vec<_>>().join("; ")
                }
                // The one that stopped serving may be missing for a quorum.
                Err(e) if e.reason().is_retryable() => e.to_string(),
                Err(e) => return Err(e),
            };
            if Instant::now() > until {
                let when = match after {
                    Some(member) => format!("after the defragmentation of {member}"),
                    None => "before the next defragmentation".to_owned(),
                };
                return Err(Reason::MemberUnhealthy.error(format!(
                    "{when} not all members were well within {} s: {said}",
                    RETURN_PATIENCE.as_secs()
                )));
            }
            tracing::debug!("waiting for members: {said}");
            pause(self.way)?;
        }
    }

    /// Disarms the alarm for want of space where there is room.
    fn disarm(&mut self, cluster: &Cluster) -> Result<()> {
        let is_raised = cluster.members.iter().any(|m| wants_space(cluster, m));
        if !is_raised || self.options.dry_run {
            return Ok(());
        }
        if let Some(why) = wants_room(cluster, self.options.quota, &self.shrunk) {
            let advice = match self.options.upkeep.defrag() {
                None => ": --defrag gives room that was freed back",
                Some(_) => "",
            };
            self.clock.warn(format!(
                "the alarm for want of space stays raised: {why}{advice}"
            ));
            return Ok(());
        }
        self.guard.check()?;
        let disarmed = cluster.disarm_no_space(self.way)?;
        let name = |id: &u64| {
            let member = cluster.member(*id);
            member.map_or_else(|| format!("member {id:x}"), Member::to_string)
        };
        self.outcome.alarms_cleared = disarmed.iter().map(name).collect();
        tracing::info!(
            members = self.outcome.alarms_cleared.join(", "),
            "disarmed the alarm for want of space"
        );
        Ok(())
    }
}

/// Keeps a second run away, until it is dropped.
enum Guard {
    /// Nothing is changed.
    None,
    /// A lock on a file of this machine, which the system gives back with the process.
    File { _file: File },
    /// An expiring lock, of the store or a Lease.
    Held(LockGuard),
}

impl Guard {
    /// Fails where another run may have begun.
    fn check(&self) -> Result<()> {
        match self {
            Guard::None | Guard::File { .. } => Ok(()),
            Guard::Held(held) => held.check(),
        }
    }
}

/// Takes the lock of a cluster: a Lease where one is named, else in the store, or, without one, on this
/// machine.
fn take_lock(
    way: &Connector,
    store: Option<&Context>,
    options: &Options,
    cluster: &Cluster,
) -> Result<Guard> {
    let name = format!("maintain-{}", cluster.hex_id());
    let identity = lock::identity();
    let mut lock = match (&options.lock_lease, store) {
        (Some(LockLease { name, namespace }), _) => {
            let (handle, cancel) = (way.handle().clone(), way.cancel().clone());
            let client = kubernetes::Client::connect(namespace.as_deref(), handle, cancel)?;
            lease::lock(&client, name, &identity, LOCK_DURATION)
        }
        (None, Some(ctx)) => Lock::new(&ctx.store, &name, &identity, LOCK_DURATION)?,
        (None, None) => {
            return lock_file(&options.temp_dir.join(format!("deltafold-{name}.lock")));
        }
    };
    lock.acquire(Wait::UntilSeenDead).map(Guard::Held)
}

fn lock_file(path: &Path) -> Result<Guard> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        // What others put there under this name is not followed.
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::io(format!("open the lock {}", path.display()), e))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Guard::File { _file: file }),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Reason::LockHeld.error(format!(
            "another run maintains this cluster (it has the lock {}): nothing is wrong, run again later",
            path.display()
        ))),
        Err(e) => Err(Error::io(format!("lock {}", path.display()), e.into())),
    }
}

/// The newest saved revision that is not younger than `time`; `None` if all are.
fn newest_at(ctx: &Context, time: DateTime<Utc>) -> Result<(Option<i64>, Vec<String>)> {
    let scan = scan_asking(ctx, Depth::Doubtful, Ask::Chain)?;
    let (timeline, mut warnings) = choose_timeline(ctx, &scan, None)?;
    match revision_at(ctx, &scan, timeline, time) {
        Ok((revision, more)) => {
            warnings.extend(more);
            Ok((Some(revision.0), warnings))
        }
        Err(e) if e.reason() == Reason::OutOfRange => Ok((None, warnings)),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcd::cluster::{Alarm, Status as MemberStatus};

    fn history(saved: Saved) -> History {
        History {
            current: 1000,
            compacted: Some(100),
            saved,
            too_old: None,
        }
    }

    #[test]
    fn nothing_is_compacted_that_is_not_saved() {
        let plan = |keep, h: &History| plan_compaction(Keep::Revisions(keep), h).0;
        let free = history(Saved::NoStore);
        assert_eq!(plan(300, &free), Some(700));
        assert_eq!(plan(0, &free), Some(1000));
        // Compacted already, or no such history.
        assert_eq!(plan(900, &free), None);
        assert_eq!(plan(899, &free), Some(101));
        assert_eq!(plan(u64::MAX, &free), None);
        let saved = history(Saved::UpTo(600));
        assert_eq!(plan(300, &saved), Some(599));
        assert_eq!(plan(400, &saved), Some(599));
        assert_eq!(plan(401, &saved), Some(599));
        assert_eq!(plan(402, &saved), Some(598));
        assert_eq!(plan(0, &history(Saved::UpTo(101))), None);
        assert_eq!(plan(0, &history(Saved::UpTo(1))), None);
        let nothing = history(Saved::Nothing("the store holds no snapshot".to_owned()));
        let (revision, why) = plan_compaction(Keep::Revisions(0), &nothing);
        assert_eq!(revision, None);
        assert!(why.contains("no snapshot"), "{why}");
        let age = Keep::Age(Duration::from_secs(1));
        assert_eq!(plan_compaction(age, &saved).0, None);
        let old = History {
            too_old: Some(400),
            ..saved
        };
        assert_eq!(plan_compaction(age, &old).0, Some(400));
    }

    const MIB: u64 = 1 << 20;

    /// The first one leads; sizes are in MiB.
    fn cluster(sizes: &[(u64, u64)]) -> Cluster {
        let member = |(id, &(size, in_use)): (u64, &(u64, u64))| Member {
            id,
            name: format!("m{id}"),
            endpoint: Some(format!("http://m{id}:2379")),
            started: true,
            reads: true,
            is_leader: id == 1,
            status: Some(MemberStatus {
                db_size: size * MIB,
                db_size_in_use: in_use * MIB,
                leader: 1,
                ..MemberStatus::default()
            }),
            ..Member::default()
        };
        Cluster {
            members: (1..).zip(sizes).map(member).collect(),
            ..Cluster::default()
        }
    }

    fn wanted(c: &Cluster, defrag: Option<Defrag>, quota: Option<u64>) -> Vec<u64> {
        plan_defragmentation(c, defrag, quota)
            .iter()
            .filter(|p| p.decision == Decision::Defragment)
            .map(|p| p.member)
            .collect()
    }

    #[test]
    fn what_wastes_too_much_is_defragmented_the_leader_last() {
        let c = cluster(&[(100, 40), (100, 40), (100, 60)]);
        let half = Some(Defrag::Fraction(0.5));
        assert_eq!(wanted(&c, half, None), [2, 1]);
        assert_eq!(wanted(&c, Some(Defrag::Always), None), [2, 3, 1]);
        assert_eq!(wanted(&c, None, None), [0; 0]);
        assert_eq!(wanted(&c, Some(Defrag::Fraction(0.61)), None), [0; 0]);
        // Nothing is wasted: there is nothing to be won, whatever the fraction.
        let full = cluster(&[(100, 100)]);
        assert_eq!(wanted(&full, Some(Defrag::Fraction(0.0)), None), [0; 0]);
    }

    #[test]
    fn a_quota_that_is_nearly_used_up_counts() {
        let c = cluster(&[(100, 90)]);
        let half = Some(Defrag::Fraction(0.5));
        assert_eq!(wanted(&c, half, Some(125 * MIB)), [0; 0]);
        assert_eq!(wanted(&c, half, Some(123 * MIB)), [1]);
        assert_eq!(wanted(&c, None, Some(100 * MIB)), [0; 0]);
        // What the member itself says, unless the flag says otherwise.
        let mut says = c.clone();
        says.members[0].status.as_mut().unwrap().db_size_quota = Some(110 * MIB);
        assert_eq!(wanted(&says, half, None), [1]);
        assert_eq!(wanted(&says, half, Some(1000 * MIB)), [0; 0]);
        // Too little to be won.
        let tight = cluster(&[(1000, 991)]);
        assert_eq!(wanted(&tight, half, Some(1000 * MIB)), [0; 0]);
    }

    fn no_space(c: &mut Cluster, member: u64) {
        c.alarms.push(Alarm {
            member,
            kind: AlarmKind::NoSpace,
        });
    }

    #[test]
    fn want_of_space_makes_a_defragmentation_wanted_and_nobody_ill() {
        let mut c = cluster(&[(100, 90), (100, 90)]);
        no_space(&mut c, 2);
        assert_eq!(wanted(&c, Some(Defrag::Fraction(0.5)), None), [2]);
        assert!(unwell(&c).is_empty());
        c.alarms[0].kind = AlarmKind::Corrupt;
        assert_eq!(unwell(&c)[0].0, "m2");
        assert_eq!(wanted(&c, Some(Defrag::Fraction(0.5)), None), [0; 0]);
    }

    #[test]
    fn an_alarm_stays_until_there_is_room() {
        let mut c = cluster(&[(100, 90), (50, 50)]);
        no_space(&mut c, 1);
        assert!(wants_room(&c, Some(100 * MIB), &[]).unwrap().contains("m1"));
        assert!(wants_room(&c, Some(104 * MIB), &[]).is_some());
        assert_eq!(wants_room(&c, Some(106 * MIB), &[]), None);
        // Nobody says the quota: what was won has to do.
        assert!(wants_room(&c, None, &[]).unwrap().contains("--quota"));
        assert!(wants_room(&c, None, &[2]).is_some());
        assert_eq!(wants_room(&c, None, &[1]), None);
    }

    #[test]
    fn who_lags_or_does_not_answer_is_not_well() {
        let mut c = cluster(&[(1, 1), (1, 1)]);
        c.members[0].status.as_mut().unwrap().raft_applied_index = 100_000;
        c.members[1].status.as_mut().unwrap().raft_applied_index = 99_900;
        assert!(unwell(&c).is_empty());
        c.members[1].status.as_mut().unwrap().raft_applied_index = 90_000;
        assert!(unwell(&c)[0].1.contains("10000 entries"));
        c.members[1].status = None;
        assert_eq!(unwell(&c)[0].0, "m2");
    }

    #[test]
    fn flags_are_understood() {
        assert_eq!("1000".parse(), Ok(Keep::Revisions(1000)));
        assert_eq!("1h".parse(), Ok(Keep::Age(Duration::from_secs(3600))));
        assert!("-1".parse::<Keep>().is_err() && "soon".parse::<Keep>().is_err());
        assert_eq!("always".parse(), Ok(Defrag::Always));
        assert_eq!("0.5".parse(), Ok(Defrag::Fraction(0.5)));
        for bad in ["50", "-0.1", "NaN", "often", ""] {
            assert!(bad.parse::<Defrag>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_second_run_on_this_machine_is_refused() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("lock");
        let first = lock_file(&path).unwrap();
        let second = lock_file(&path).err().unwrap();
        assert_eq!(second.reason(), Reason::LockHeld);
        drop(first);
        lock_file(&path).unwrap();
    }
}
