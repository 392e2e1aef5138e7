//! Compares the members of a cluster by HashKV before data is read from them.

use super::{Cluster, MemberHash, compare};
use crate::error::{Reason, Result};
use crate::etcd::connect::Connector;
use serde::Serialize;

/// How often the members are asked for their hashes, if compactions between the answers make them
/// incomparable.
const HASH_ATTEMPTS: u32 = 3;
/// The largest database that is compared before deltas: each comparison makes all members read their keyspace.
const MAX_BYTES_FOR_DELTAS: u64 = 512 << 20;

/// One member's side of the comparison that precedes a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MemberComparison {
    /// The member's name.
    pub name: String,
    /// The member's ID, hexadecimal.
    pub id: String,
    /// The endpoint that was asked; null if none is known.
    pub endpoint: Option<String>,
    /// The member's HashKV at the revision of the comparison; null if the member returned none.
    pub hash_kv: Option<u32>,
    /// The revision up to which the member had compacted; -1 if it never had, null if it returned no HashKV.
    pub compact_revision: Option<i64>,
    /// Whether the member holds the same data as the majority; null if that is unknown.
    pub agrees: Option<bool>,
    /// Why the member returned no HashKV; null if it returned one.
    pub error: Option<String>,
    #[serde(skip)]
    member_id: u64,
}

impl MemberComparison {
    fn label(&self) -> String {
        match self.name.as_str() {
            "" => format!("member {}", self.id),
            name => format!("member {name} ({})", self.id),
        }
    }
}

/// A cluster, and the comparison of its members at its revision.
pub(crate) struct ComparedCluster {
    pub(crate) cluster: Cluster,
    pub(crate) comparisons: Vec<MemberComparison>,
    pub(crate) hashes: Vec<MemberHash>,
}

/// Whether the members are compared before deltas: there are several, and their databases are small enough.
pub(crate) fn is_worthwhile_for_deltas(cluster: &Cluster) -> bool {
    let voters = cluster.members.iter().filter(|m| !m.is_learner);
    let sizes = cluster.members.iter().filter_map(|m| m.status.as_ref());
    voters.count() > 1 && sizes.map(|s| s.db_size).max() <= Some(MAX_BYTES_FOR_DELTAS)
}

impl ComparedCluster {
    /// Compares the HashKVs of all members at the cluster's revision. HashKV covers all revisions since the
    /// last compaction, so also every change that a delta up to this revision saves.
    ///
    /// # Errors
    /// Fails with `MembersDiffer` if the members hold different data and no majority agrees.
    pub(crate) fn new(cluster: Cluster, connector: &Connector) -> Result<Self> {
        let mut attempt = 1;
        let (hashes, agreement) = loop {
            let hashes = cluster.hash_kv_all(connector, cluster.revision)?;
            let agreement = compare(&hashes);
            // A member that does not answer would not answer now either.
            let is_incomparable = |h: &MemberHash| {
                was_compacted(h) || h.hash.is_some() && agreement.unknown.contains(&h.member)
            };
            if !hashes.iter().any(is_incomparable) || attempt >= HASH_ATTEMPTS {
                break (hashes, agreement);
            }
            attempt += 1;
        };
        let comparisons: Vec<MemberComparison> = hashes
            .iter()
            .map(|h| MemberComparison {
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
            let mut shown = Vec::new();
            for c in &comparisons {
                shown.push(match c.hash_kv {
                    Some(hash) => format!("{} has {hash}", c.label()),
                    None => format!("{} returned none", c.label()),
                });
            }
            return Err(Reason::MembersDiffer.error(format!(
                "members hold different data at revision {} (HashKV: {}), and no majority agrees: find out which members are right, and remove the others from the cluster",
                cluster.revision,
                shown.join(", ")
            )));
        }
        Ok(ComparedCluster {
            cluster,
            comparisons,
            hashes,
        })
    }

    /// Returns the IDs of the members that hold other data than most.
    pub(crate) fn differing(&self) -> Vec<u64> {
        let differing = self.comparisons.iter().filter(|c| c.agrees == Some(false));
        differing.map(|c| c.member_id).collect()
    }

    /// Returns warnings about members that differ or could not be compared.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let errors = self.comparisons.iter().filter_map(|c| c.error.as_ref());
        // Without the right to request HashKV, all members refuse it alike.
        if errors.clone().count() == self.comparisons.len()
            && let Some(why) = errors.into_iter().next()
        {
            return vec![format!("the members could not be compared: {why}")];
        }
        let revision = self.cluster.revision;
        let warnings = self.comparisons.iter();
        warnings
            .filter_map(|c| member_warning(c, revision))
            .collect()
    }
}

/// Whether a member has compacted the revision of the comparison.
fn was_compacted(hash: &MemberHash) -> bool {
    let reason = hash.error.as_ref().map(|e| e.0);
    reason == Some(Reason::Conflict)
}

/// Returns a warning about a member that differs or could not be compared.
fn member_warning(c: &MemberComparison, revision: i64) -> Option<String> {
    let label = c.label();
    match (c.agrees, &c.error) {
        (Some(false), _) => Some(format!(
            "{label} holds other data than most members at revision {revision}: nothing is saved from it; remove it from the cluster and add it again empty"
        )),
        (None, Some(why)) => Some(format!(
            "{label} could not be compared with the others: {why}"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcd::cluster::{Member, MemberStatus};

    fn member(db_size: u64, is_learner: bool) -> Member {
        Member {
            is_learner,
            status: Some(MemberStatus {
                db_size,
                ..MemberStatus::default()
            }),
            ..Member::default()
        }
    }

    #[test]
    fn members_are_compared_before_deltas_if_there_are_several_and_none_is_large() {
        let is_worthwhile = |members: &[(u64, bool)]| {
            is_worthwhile_for_deltas(&Cluster {
                members: members.iter().map(|&(size, l)| member(size, l)).collect(),
                ..Cluster::default()
            })
        };
        let most = 512 << 20;
        assert!(is_worthwhile(&[(most, false), (1, false)]));
        assert!(!is_worthwhile(&[(most + 1, false), (1, false)]));
        assert!(!is_worthwhile(&[(1, false)]));
        assert!(!is_worthwhile(&[(1, false), (1, true)]));
    }
}
