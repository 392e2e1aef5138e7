//! The NOSPACE alarm: whether it can be disarmed, and disarming it.
//!
//! etcd raises the alarm when a database reaches its quota, and then refuses writes until the alarm is disarmed.

use super::Maintenance;
use crate::base::opt::QUOTA_BACKEND_BYTES;
use crate::error::Result;
use crate::etcd::cluster::{AlarmKind, Cluster, Member};

/// The alarm can be disarmed if each database uses at most this part of its quota.
const MAX_QUOTA_PERCENT: u64 = 95;

/// Whether a NOSPACE alarm about this member is raised.
pub(super) fn has_no_space_alarm(cluster: &Cluster, member: &Member) -> bool {
    // An alarm of member 0 is about the whole cluster.
    let is_about = |id: u64| id == member.id || id == 0;
    let mut alarms = cluster.alarms.iter();
    alarms.any(|a| a.kind == AlarmKind::NoSpace && is_about(a.member))
}

/// Returns why the NOSPACE alarm must stay raised; `None` if all members have space again.
///
/// `quota` overrides the quotas that the members report, in bytes. `shrunk` are the IDs of the members whose
/// databases became smaller: if a member's quota is unknown, that is taken as space enough.
pub fn no_space_remains(cluster: &Cluster, quota: Option<u64>, shrunk: &[u64]) -> Option<String> {
    for member in &cluster.members {
        let Some(status) = &member.status else {
            continue;
        };
        match quota.or(status.db_size_quota) {
            // etcd would raise the alarm again at the next request that does not fit.
            Some(quota) if status.db_size > quota / 100 * MAX_QUOTA_PERCENT => {
                return Some(format!(
                    "the database of {member} has {} bytes, more than {MAX_QUOTA_PERCENT} % of its quota of {quota}",
                    status.db_size
                ));
            }
            Some(_) => {}
            None if !has_no_space_alarm(cluster, member) || shrunk.contains(&member.id) => {}
            None => {
                return Some(format!(
                    "{member} does not report its quota, and its database has not become smaller: give etcd's value as {QUOTA_BACKEND_BYTES}"
                ));
            }
        }
    }
    None
}

impl Maintenance<'_> {
    /// Disarms the NOSPACE alarm if there is space again; warns if there is not.
    pub(super) fn disarm(&mut self, cluster: &Cluster) -> Result<()> {
        let mut members = cluster.members.iter();
        let is_raised = members.any(|m| has_no_space_alarm(cluster, m));
        if !is_raised || self.options.dry_run {
            return Ok(());
        }
        if let Some(why) = no_space_remains(cluster, self.options.quota, &self.shrunk) {
            self.clock
                .warn(format!("the NOSPACE alarm stays raised: {why}"));
            return Ok(());
        }
        self.lock.check()?;
        for id in cluster.disarm_no_space(self.connector)? {
            let member = cluster.member(id);
            let name = member.map_or_else(|| format!("member {id:x}"), Member::to_string);
            self.outcome.alarms_cleared.push(name);
        }
        tracing::info!(
            members = self.outcome.alarms_cleared.join(", "),
            "disarmed the NOSPACE alarm"
        );
        Ok(())
    }
}
