//! The defragmentation of members whose databases waste space: which ones, in which order, one at a time.
//!
//! [`plan_defragmentation`] decides and is pure. A member serves no requests while it is defragmented, so all others
//! must be healthy.

use super::alarms::has_no_space_alarm;
use super::{Maintenance, pause};
use crate::base::text_value::Notation;
use crate::error::{Reason, Result};
use crate::etcd::cluster::{Cluster, Member};
use crate::telemetry::progress::Step;
use serde::Serialize;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// A database that uses more of its quota is nearly full. It is defragmented even if it wastes less than the
/// limit.
const FULL_QUOTA_PERCENT: u64 = 80;
/// A nearly full database is not worth defragmenting if it wastes less.
const MIN_WASTE_PERCENT: u64 = 1;
/// How long all members may take to become healthy, before and after each defragmentation.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// When a database is worth defragmenting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Defrag {
    /// Always, even if nothing is wasted.
    Always,
    /// If at least this fraction of the database is wasted, from 0 to 1.
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

/// A member in the report.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MaintainedMember {
    /// The member's name; empty if the member was never started.
    pub name: String,
    /// The member's ID, hexadecimal, as etcdctl shows it.
    pub id: String,
    /// The endpoint at which the member answers; null if there is none.
    pub endpoint: Option<String>,
    /// Whether the member was the leader when the plan was made.
    pub leader: bool,
    /// Size of the member's database when the plan was made, in bytes; null if the member does not answer.
    pub db_size_before: Option<u64>,
    /// Bytes of the database that held data when the plan was made; null if the member does not answer.
    pub db_size_in_use_before: Option<u64>,
    /// Size of the database after the defragmentation, in bytes; null if there was none.
    pub db_size_after: Option<u64>,
    /// `Defragment`: the member was, or is to be, defragmented. `Leave`: it is left as it is.
    pub decision: Decision,
    /// The reason of the decision. Human-readable: the text may change.
    pub reason: String,
    /// Whether the member was defragmented.
    pub done: bool,
    /// Seconds until all members were healthy again; null if the defragmentation was not done.
    pub seconds: Option<f64>,
}

impl MaintainedMember {
    /// Returns the outcome of a member before anything is done.
    fn planned(member: &Member, plan: &DefragPlan) -> Self {
        let status = member.status.as_ref();
        MaintainedMember {
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

/// Whether a member is defragmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Decision {
    /// The member is defragmented.
    Defragment,
    /// The member is left as it is.
    Leave,
}

/// The decision about one member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefragPlan {
    /// The member's ID.
    pub member: u64,
    /// Whether the member is defragmented.
    pub decision: Decision,
    /// The reason of the decision.
    pub reason: String,
}

/// Decides for each member whether it is defragmented. Returns the members in the order of defragmentation,
/// the leader last. `quota` overrides the quotas that the members report, in bytes.
pub fn plan_defragmentation(
    cluster: &Cluster,
    defrag: Defrag,
    quota: Option<u64>,
) -> Vec<DefragPlan> {
    let mut members: Vec<&Member> = cluster.members.iter().collect();
    members.sort_by_key(|m| m.is_leader);
    let mut plans = Vec::new();
    for member in members {
        let (decision, reason) = plan_member(cluster, member, defrag, quota);
        plans.push(DefragPlan {
            member: member.id,
            decision,
            reason,
        });
    }
    plans
}

fn plan_member(
    cluster: &Cluster,
    member: &Member,
    defrag: Defrag,
    quota: Option<u64>,
) -> (Decision, String) {
    let leave = |why: &str| (Decision::Leave, why.to_owned());
    let defragment = |why| (Decision::Defragment, why);
    if member.is_learner {
        return leave("the member is a learner");
    }
    let Some(status) = &member.status else {
        return leave("the member does not answer");
    };
    let size = status.db_size;
    let wasted = size.saturating_sub(status.db_size_in_use);
    let fraction = wasted as f64 / size.max(1) as f64;
    let waste = format!(
        "{wasted} of {size} bytes ({:.0} %) are wasted",
        fraction * 100.0
    );
    let min_fraction = match defrag {
        Defrag::Always => {
            return defragment("a defragmentation was asked for whatever the waste".to_owned());
        }
        Defrag::Fraction(f) => f,
    };
    let limit = format!("the limit of {:.0} %", min_fraction * 100.0);
    if wasted == 0 {
        return leave(&format!("{waste}, less than {limit}"));
    }
    if fraction >= min_fraction {
        return defragment(format!("{waste}, which reaches {limit}"));
    }
    if has_no_space_alarm(cluster, member) {
        return defragment(format!("its NOSPACE alarm is raised, and {waste}"));
    }
    let quota = quota.or(status.db_size_quota);
    let used_percent = quota.map_or(0, |q| size.saturating_mul(100) / q.max(1));
    let is_worthwhile = wasted.saturating_mul(100) >= size.saturating_mul(MIN_WASTE_PERCENT);
    if used_percent > FULL_QUOTA_PERCENT && is_worthwhile {
        return defragment(format!(
            "it uses {used_percent} % of its quota, more than {FULL_QUOTA_PERCENT} %, and {waste}"
        ));
    }
    leave(&format!("{waste}, less than {limit}"))
}

/// Returns the voting members that are not healthy or lag too far for another member to stop serving, and why.
pub fn unfit_members(cluster: &Cluster) -> Vec<(String, String)> {
    let mut unfit = Vec::new();
    for member in cluster.members.iter().filter(|m| !m.is_learner) {
        if let Some(why) = cluster.unhealthy_reason(member) {
            unfit.push((member.to_string(), why));
        } else if !cluster.is_close(member) {
            let why = format!("its log is {} entries behind", cluster.behind(member));
            unfit.push((member.to_string(), why));
        }
    }
    unfit
}

/// Returns the voting members that are not healthy, and why, in words; empty if all are healthy.
fn describe_unhealthy(cluster: &Cluster) -> String {
    let mut unhealthy = Vec::new();
    for member in cluster.members.iter().filter(|m| !m.is_learner) {
        if let Some(why) = cluster.unhealthy_reason(member) {
            unhealthy.push(format!("{member}: {why}"));
        }
    }
    unhealthy.join("; ")
}

impl Maintenance<'_> {
    /// Plans the defragmentation and does it, except in a dry run. Returns the cluster as it is afterwards.
    pub(super) fn defragment(&mut self, mut cluster: Cluster) -> Result<Cluster> {
        let mut pending = self.plan_members(&cluster);
        let unhealthy = describe_unhealthy(&cluster);
        if !unhealthy.is_empty() {
            if pending.is_empty() {
                self.clock.warn(format!("not healthy: {unhealthy}"));
                return Ok(cluster);
            }
            return Err(Reason::MemberUnhealthy.error(format!(
                "nothing was defragmented, because these members are not healthy: {unhealthy}; repair them first"
            )));
        }
        if self.options.dry_run {
            return Ok(cluster);
        }
        while !pending.is_empty() {
            // A member may lag for a moment, and the leader may have changed.
            cluster = self.wait_until_healthy(None)?;
            let is_leader = |id: &u64| cluster.member(*id).is_some_and(|m| m.is_leader);
            let next = pending.iter().position(|id| !is_leader(id)).unwrap_or(0);
            let id = pending.remove(next);
            cluster = self.defragment_one(&cluster, id)?;
        }
        Ok(cluster)
    }

    /// Adds the plan of each member to the outcome. Returns the IDs of those to defragment.
    fn plan_members(&mut self, cluster: &Cluster) -> Vec<u64> {
        let mut pending = Vec::new();
        for plan in plan_defragmentation(cluster, self.defrag, self.options.quota) {
            if plan.decision == Decision::Defragment {
                pending.push(plan.member);
            }
            let Some(member) = cluster.member(plan.member) else {
                continue;
            };
            tracing::info!(
                member = %member,
                leader = member.is_leader,
                decision = ?plan.decision,
                reason = plan.reason,
                "planned for a member"
            );
            let outcome = MaintainedMember::planned(member, &plan);
            self.outcome.members.push(outcome);
        }
        pending
    }

    /// Defragments a member, and waits until all members are healthy.
    fn defragment_one(&mut self, cluster: &Cluster, id: u64) -> Result<Cluster> {
        let Some(member) = cluster.member(id) else {
            self.clock.warn(format!(
                "member {id:x} is not defragmented: it was removed from the cluster"
            ));
            return Ok(cluster.clone());
        };
        self.lock.check()?;
        let started = Instant::now();
        let step = Step::new(format!("defragment {member}"), None);
        tracing::info!(member = %member, leader = member.is_leader, "defragmenting");
        let result = cluster.defragment(self.connector, member);
        drop(step);
        result.map_err(|e| e.at(member))?;
        if let Some(outcome) = self.member_outcome(id) {
            outcome.done = true;
        }
        let cluster_after = self.wait_until_healthy(Some(member))?;
        let status_after = cluster_after.member(id).and_then(|m| m.status.as_ref());
        let after = status_after.map(|s| s.db_size);
        let before = member.status.as_ref().map(|s| s.db_size);
        if after < before {
            self.shrunk.push(id);
        }
        let seconds = started.elapsed().as_secs_f64();
        if let Some(outcome) = self.member_outcome(id) {
            outcome.db_size_after = after;
            outcome.seconds = Some(seconds);
        }
        tracing::info!(member = %member, before, after, seconds, "defragmented");
        Ok(cluster_after)
    }

    fn member_outcome(&mut self, id: u64) -> Option<&mut MaintainedMember> {
        let hex_id = format!("{id:x}");
        self.outcome.members.iter_mut().find(|m| m.id == hex_id)
    }

    /// Waits until every member is healthy and has caught up. `defragmented` is the member that was
    /// defragmented last.
    fn wait_until_healthy(&self, defragmented: Option<&Member>) -> Result<Cluster> {
        let deadline = Instant::now() + HEALTH_TIMEOUT;
        loop {
            let problem = match Cluster::observe(self.connector) {
                Ok(cluster) => {
                    let unfit = unfit_members(&cluster);
                    if unfit.is_empty() {
                        return Ok(cluster);
                    }
                    let described = unfit.iter().map(|(name, why)| format!("{name}: {why}"));
                    described.collect::<Vec<_>>().join("; ")
                }
                // The quorum may need the member that does not serve yet.
                Err(e) if e.reason().is_retryable() => e.to_string(),
                Err(e) => return Err(e),
            };
            if Instant::now() > deadline {
                let when = match defragmented {
                    Some(member) => format!("after the defragmentation of {member}"),
                    None => "before the next defragmentation".to_owned(),
                };
                return Err(Reason::MemberUnhealthy.error(format!(
                    "not all members were healthy within {} s {when}: {problem}",
                    HEALTH_TIMEOUT.as_secs()
                )));
            }
            tracing::debug!("waiting for members: {problem}");
            pause(self.connector)?;
        }
    }
}
