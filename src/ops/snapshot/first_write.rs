//! Compares histories before the first write into a prefix that holds snapshots and records no cluster.
//!
//! Without a recorded identity, only the snapshots tell whose backup the prefix is. A cluster is refused if it
//! provably has another history, or is behind the snapshots: it may be an empty one at the wrong prefix, and
//! one that was set back can say so with `--take-over`. If nothing can be compared, the write goes on with a
//! warning: otherwise, the prefix of another tool whose etcd was compacted could not be adopted. Called by
//! [`super::saver`].

use super::next::{BackupState, FullCause, cluster_behind};
use super::recent_keys::{self, Compared, LiveKey, SavedKey};
use crate::error::Result;
use crate::etcd::cluster::Cluster;
use crate::etcd::connect::Connector;
use crate::mvcc::Revision;

/// The number of keys that are requested from etcd, one by one.
const MOST_KEYS: usize = 64;

/// The result of the comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Where both could be compared, the cluster has the history of the store.
    Same,
    /// The cluster has another history, or is behind the store; with the difference in words.
    Differs(String),
    /// etcd has compacted the last saved revision, so only keys can be compared.
    Compacted,
    /// Nothing could be compared, for this reason.
    Unknown(String),
}

/// Compares the cluster with what the store held when the saver was opened.
///
/// `last_changes` compares the last saved changes; it returns `None` if etcd has compacted them.
///
/// # Errors
/// Fails with the errors of etcd connections and of the store.
pub(super) fn compare(
    backup: &Result<BackupState, FullCause>,
    last: Revision,
    cluster: &Cluster,
    last_changes: impl FnOnce() -> Result<Option<Verdict>>,
) -> Result<Verdict> {
    if cluster.revision < last.0 {
        let cause = cluster_behind(last, cluster.revision);
        return Ok(Verdict::Differs(cause.message));
    }
    if let Err(cause) = backup {
        return Ok(Verdict::Unknown(cause.message.clone()));
    }
    match last_changes() {
        Ok(verdict) => Ok(verdict.unwrap_or(Verdict::Compacted)),
        Err(e) if e.reason().is_unreadable() => Ok(Verdict::Unknown(e.to_string())),
        Err(e) => Err(e),
    }
}

/// Compares the keys that were saved last with those of the cluster.
///
/// # Errors
/// Fails with the errors of etcd connections.
pub(super) fn compare_keys(
    saved: &[SavedKey],
    last: i64,
    connector: &Connector,
    cluster: &Cluster,
) -> Result<Compared> {
    let saved = &saved[..saved.len().min(MOST_KEYS)];
    let keys: Vec<Vec<u8>> = saved.iter().map(|s| s.key.clone()).collect();
    let live = cluster.key_revisions(connector, &keys)?.into_iter();
    let live = live.map(|live| {
        Some(LiveKey {
            revisions: live?,
            digest: None,
        })
    });
    Ok(recent_keys::compare(saved, live, last))
}
