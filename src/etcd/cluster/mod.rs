//! The members of a live etcd: their status, which of them are healthy, their hashes, and their maintenance.
//!
//! All members are queried at once. The caller decides what follows from their responses.

mod compared;
mod hashes;
mod maintenance;
mod query;

pub use compared::MemberComparison;
pub(crate) use compared::{ComparedCluster, is_worthwhile_for_deltas};
pub use hashes::{Agreement, Hash, MemberHash, compare};

use crate::base::printable;
use crate::error::{Error, Reason};
use query::parse_alarm;
use std::fmt;
use std::time::Duration;

/// The pause between attempts that an election, or a member slightly behind, can refuse.
const PAUSE: Duration = Duration::from_millis(200);
/// The maximum lag of a member that counts as up to date, in log entries: some entries are always in flight.
const CLOSE_ENTRIES: u64 = 1000;

/// The status of a member, in its own words.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemberStatus {
    /// The version of etcd.
    pub version: String,
    /// The size of the database file in bytes.
    pub db_size: u64,
    /// How many bytes of the database hold data.
    pub db_size_in_use: u64,
    /// The quota of the database in bytes. Versions before 3.6 do not report it.
    pub db_size_quota: Option<u64>,
    /// The index of the newest log entry.
    pub raft_index: u64,
    /// The index of the newest log entry that was applied.
    pub raft_applied_index: u64,
    /// The current raft term.
    pub raft_term: u64,
    /// The ID of the leader, or 0 if the member knows none.
    pub leader: u64,
    /// Errors: alarms of any member, or a missing leader.
    pub errors: Vec<String>,
    /// The newest revision.
    pub revision: i64,
}

/// A member of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Member {
    /// The ID.
    pub id: u64,
    /// The name; empty if the member was never started.
    pub name: String,
    /// An endpoint at which the member responds.
    pub endpoint: Option<String>,
    /// The client URLs that the member advertises.
    pub client_urls: Vec<String>,
    /// Whether the member is a learner, without a vote.
    pub is_learner: bool,
    /// Whether the member is the leader.
    pub is_leader: bool,
    /// Whether the member was started since it was added.
    pub started: bool,
    /// The status; `None` if the member does not respond.
    pub status: Option<MemberStatus>,
    /// Whether a linearizable read, which needs a quorum, succeeded. Learners do not serve such reads.
    pub reads: bool,
    /// The error of the connection or of the read.
    pub error: Option<String>,
}

impl Member {
    /// Returns the ID as etcdctl prints it.
    pub fn hex_id(&self) -> String {
        format!("{:x}", self.id)
    }

    /// Returns the recorded error, or `otherwise` if there is none.
    fn error_or(&self, otherwise: &str) -> String {
        self.error.clone().unwrap_or_else(|| otherwise.to_owned())
    }
}

/// Formats the name, or the ID of a member without a name.
impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "member {:x}", self.id),
            name => f.write_str(&printable::line(name)),
        }
    }
}

/// The kind of an alarm.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum AlarmKind {
    /// The quota is used up. etcd refuses writes until the alarm is disarmed.
    NoSpace,
    /// The data of a member differs from that of the others.
    Corrupt,
    /// Another alarm, in the words of the server.
    Other(String),
}

/// A raised alarm.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alarm {
    /// The ID of the affected member, or 0 if the alarm does not name one.
    pub member: u64,
    /// The kind.
    pub kind: AlarmKind,
}

/// An observation of a cluster at one moment.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// The ID of the cluster.
    pub cluster_id: u64,
    /// The members, sorted by name.
    pub members: Vec<Member>,
    /// The newest revision that a quorum has.
    pub revision: i64,
    /// The raised alarms.
    pub alarms: Vec<Alarm>,
}

impl Cluster {
    /// Returns the ID as etcdctl prints it.
    pub fn hex_id(&self) -> String {
        format!("{:x}", self.cluster_id)
    }

    /// Returns the member with this ID.
    pub fn member(&self, id: u64) -> Option<&Member> {
        self.members.iter().find(|m| m.id == id)
    }

    /// Returns why a member is not healthy, or `None` if it is healthy. NOSPACE alarms and alarms of other
    /// members do not count.
    pub fn unhealthy_reason(&self, member: &Member) -> Option<String> {
        if !member.started {
            return Some("it was never started".to_owned());
        }
        let Some(status) = &member.status else {
            return Some(member.error_or("it does not respond"));
        };
        let affects_member = |alarm: &&Alarm| {
            alarm.kind != AlarmKind::NoSpace && (alarm.member == member.id || alarm.member == 0)
        };
        if let Some(alarm) = self.alarms.iter().find(affects_member) {
            return Some(match &alarm.kind {
                AlarmKind::Other(text) => format!("an alarm is raised: {text}"),
                _ => "the alarm CORRUPT is raised".to_owned(),
            });
        }
        if let Some(error) = status.errors.iter().find(|e| parse_alarm(e).is_none()) {
            return Some(error.clone());
        }
        if status.leader == 0 {
            return Some("it has no leader".to_owned());
        }
        let partitioned = "linearizable reads fail: it is cut off from the others, or far behind";
        (!member.reads && !member.is_learner).then(|| member.error_or(partitioned))
    }

    /// Returns how many log entries a member is behind the most advanced one.
    pub fn behind(&self, member: &Member) -> u64 {
        let applied = |m: &Member| m.status.as_ref().map_or(0, |s| s.raft_applied_index);
        let farthest = self.members.iter().map(applied).max().unwrap_or(0);
        farthest.saturating_sub(applied(member))
    }

    /// Whether a member is at most 1000 log entries behind.
    pub fn is_close(&self, member: &Member) -> bool {
        self.behind(member) <= CLOSE_ENTRIES
    }

    /// Returns the members that data can be read from, the best one first: healthy voting members whose ID is
    /// not in `excluded`. Members that are up to date precede those that lag, and followers precede the
    /// leader.
    pub fn choose(&self, excluded: &[u64]) -> Vec<&Member> {
        let mut chosen = Vec::new();
        for member in &self.members {
            let obstacle = match excluded.contains(&member.id) {
                true => Some("it is excluded".to_owned()),
                false if member.is_learner => Some("it is a learner".to_owned()),
                false => self.unhealthy_reason(member),
            };
            match obstacle {
                None => chosen.push(member),
                Some(why) => tracing::info!(member = %member, why, "a member is not used"),
            }
        }
        chosen.sort_by_key(|m| (!self.is_close(m), m.is_leader));
        for (at, m) in chosen.iter().enumerate() {
            tracing::debug!(
                member = %m,
                place = at + 1,
                leader = m.is_leader,
                entries_behind = self.behind(m),
                "a member can be used"
            );
        }
        chosen
    }

    fn no_healthy_member(&self) -> Error {
        let unhealthy: Vec<String> = self
            .members
            .iter()
            .filter_map(|m| Some(format!("{m}: {}", self.unhealthy_reason(m)?)))
            .collect();
        Reason::EtcdUnreachable.error(format!("no member is healthy: {}", unhealthy.join("; ")))
    }
}

#[cfg(test)]
mod tests;
