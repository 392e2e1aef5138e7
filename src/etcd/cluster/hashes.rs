//! HashKV of the members, and which members agree.
//!
//! It repairs nothing.

use super::query::wait;
use super::{Cluster, Member, PAUSE};
use crate::error::{Reason, Result};
use crate::etcd::connect::{AttemptError, Connector, Streams};
use etcd_client::Error as EtcdError;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::time::Duration;

/// The timeout of HashKV, which reads the whole keyspace. Keep-alives detect a lost connection earlier.
const HASH_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// The HashKV of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hash {
    /// The hash.
    pub hash: u32,
    /// The member's compacted revision when the hash was computed; -1 if it never compacted. Only hashes with
    /// the same compacted revision can be compared.
    pub compact_revision: i64,
}

/// The HashKV of a member at a revision, or the error.
#[derive(Debug, Clone)]
pub struct MemberHash {
    /// The ID of the member.
    pub member: u64,
    /// The name of the member.
    pub name: String,
    /// The endpoint of the request.
    pub endpoint: Option<String>,
    /// The revision.
    pub revision: i64,
    /// The hash, if the request succeeded.
    pub hash: Option<Hash>,
    /// The error and its reason, which is `Conflict` if the revision was compacted.
    pub error: Option<(Reason, String)>,
}

/// The members that hold the same data, and those that do not. Learners are not included.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Agreement {
    /// The IDs of the members that hold the same data as most; empty if members differ and none of the
    /// versions has a majority.
    pub agree: Vec<u64>,
    /// The IDs of the members that hold other data.
    pub differ: Vec<u64>,
    /// The IDs of the members without a hash, or with a hash that cannot be compared.
    pub unknown: Vec<u64>,
}

/// Compares the hashes of all members at one revision. If hashes differ, only a hash with a majority of all
/// members is right.
pub fn compare(hashes: &[MemberHash]) -> Agreement {
    let mut groups: BTreeMap<(i64, u32), Vec<u64>> = BTreeMap::new();
    let mut agreement = Agreement::default();
    for h in hashes {
        match h.hash {
            Some(hash) => groups
                .entry((hash.compact_revision, hash.hash))
                .or_default()
                .push(h.member),
            None => agreement.unknown.push(h.member),
        }
    }
    let contested = |compact: i64| groups.keys().filter(|(c, _)| *c == compact).count() > 1;
    let is_right = |(key, members): &(&(i64, u32), &Vec<u64>)| {
        !contested(key.0) || members.len() * 2 > hashes.len()
    };
    let best = groups
        .iter()
        .filter(is_right)
        .max_by_key(|((compact, _), members)| (members.len(), *compact))
        .map(|(key, _)| *key);
    for (key, members) in &groups {
        let list = match best {
            Some(best) if best == *key => &mut agreement.agree,
            _ if contested(key.0) => &mut agreement.differ,
            _ => &mut agreement.unknown,
        };
        list.extend(members);
    }
    agreement
}

impl Cluster {
    /// Requests the HashKV of all voting members at one revision, at once.
    ///
    /// # Errors
    /// `Terminated`. Other errors are recorded with their member.
    pub fn hash_kv_all(&self, connector: &Connector, revision: i64) -> Result<Vec<MemberHash>> {
        let voters: Vec<&Member> = self.members.iter().filter(|m| !m.is_learner).collect();
        let requests = voters.iter().map(|m| hash_kv(connector, m, revision));
        let mut hashes = wait(connector, join_all(requests))?;
        let newest = hashes.iter().filter_map(|h| Some(h.hash?.compact_revision));
        let Some(newest) = newest.max() else {
            return Ok(hashes);
        };
        // Compacted revisions differ in two cases. A compaction happened between the requests: request again.
        // Or the compaction was at exactly this revision: then a member returns the hash from before it out
        // of memory, but not after a restart. In this case the hash at the newest revision (0) helps.
        for retry_revision in [revision, 0] {
            self.ask_again(connector, &mut hashes, revision, retry_revision, |h| {
                h.compact_revision < newest
            })?;
        }
        Ok(hashes)
    }

    /// Requests the HashKV again of members that have nothing newer than `revision`, as it is after a compaction at
    /// exactly this revision.
    ///
    /// # Errors
    /// `Terminated`.
    pub fn hash_kv_now(
        &self,
        connector: &Connector,
        hashes: &mut [MemberHash],
        revision: i64,
    ) -> Result<()> {
        self.ask_again(connector, hashes, revision, 0, |_| true)
    }

    /// Requests the HashKV again from the members whose hash satisfies `is_asked`. Keeps an answer only if it is of
    /// `revision`.
    fn ask_again(
        &self,
        connector: &Connector,
        hashes: &mut [MemberHash],
        revision: i64,
        retry_revision: i64,
        is_asked: impl Fn(Hash) -> bool,
    ) -> Result<()> {
        let voters = self.members.iter().filter(|m| !m.is_learner);
        for (member, hash) in voters.zip(hashes) {
            if hash.hash.is_some_and(&is_asked) {
                let second = wait(connector, hash_kv(connector, member, retry_revision))?;
                if second.revision == revision && second.hash.is_some() {
                    *hash = second;
                }
            }
        }
        Ok(())
    }
}

/// Requests the HashKV of one member. Revision 0 means its newest revision.
async fn hash_kv(connector: &Connector, member: &Member, revision: i64) -> MemberHash {
    let result = match &member.endpoint {
        Some(endpoint) => hash_kv_at(connector, endpoint, revision).await,
        None => Err(Reason::EtcdUnreachable.error(member.error_or("it does not respond"))),
    };
    let (hash, revision, error) = match result {
        Ok((hash, revision)) => (Some(hash), revision, None),
        Err(e) => (None, revision, Some((e.reason(), e.to_string()))),
    };
    MemberHash {
        member: member.id,
        name: member.name.clone(),
        endpoint: member.endpoint.clone(),
        revision,
        hash,
        error,
    }
}

/// Requests the HashKV at an endpoint. Returns it with its revision. If the member does not have that
/// revision yet, the request is repeated until `--command-timeout`.
async fn hash_kv_at(connector: &Connector, endpoint: &str, revision: i64) -> Result<(Hash, i64)> {
    let client = connector.connect(endpoint, Streams::Plain).await;
    let mut client = client.map_err(AttemptError::into_error)?;
    let until = tokio::time::Instant::now() + connector.options().command_timeout;
    loop {
        let request = async {
            let response = client.hash_kv(revision).await;
            // Only this text tells that the revision is yet to come.
            let too_early = matches!(&response, Err(EtcdError::GRpcStatus(s)) if s.message().contains("future revision"));
            Ok((response, too_early))
        };
        let (response, too_early) = connector
            .answer("HashKV", endpoint, HASH_TIMEOUT, request)
            .await
            .map_err(AttemptError::into_error)?;
        match response {
            Ok(response) => {
                let current = response.header().map_or(0, |h| h.revision());
                let hash = Hash {
                    hash: response.hash(),
                    compact_revision: response.compact_version(),
                };
                return Ok((hash, if revision == 0 { current } else { revision }));
            }
            Err(_) if too_early && tokio::time::Instant::now() < until => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(e) => return Err(connector.failure("HashKV", endpoint, e).into_error()),
        }
    }
}
