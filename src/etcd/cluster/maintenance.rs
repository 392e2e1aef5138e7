//! Maintenance of the members: compaction, defragmentation, and disarming of alarms.
//!
//! The caller decides what is done. Called by `ops::maintain`.

use super::{Cluster, Member};
use crate::error::{Reason, Result};
use crate::etcd::connect::{AttemptError, Connector, Streams};
use etcd_client::{AlarmAction, AlarmOptions, AlarmType, CompactionOptions, GetOptions};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::Duration;

/// The timeout of a physical compaction, which pauses after every thousand revisions, and of a
/// defragmentation, which writes a whole database: around 10 s for each GiB.
const MAINTENANCE_TIMEOUT: Duration = Duration::from_secs(60 * 60);

/// The result of a compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompactionResult {
    /// The history up to the revision is removed, also from the database of the member that did the request.
    Done,
    /// The history had been compacted before.
    Already,
}

impl Cluster {
    /// Finds the compacted revision of the cluster by a binary search for the oldest revision that can be
    /// read: only HashKV, which reads the whole keyspace, reports it directly. Returns `None` if the cluster
    /// never compacted, or at revision 1.
    ///
    /// # Errors
    /// `PermissionDenied`, `Unauthenticated`, `EtcdUnreachable`, `Terminated`.
    pub fn compacted_revision(&self, connector: &Connector) -> Result<Option<i64>> {
        let chosen = self.choose(&[]);
        let member = chosen.first().ok_or_else(|| self.no_healthy_member())?;
        let endpoint = member
            .endpoint
            .as_deref()
            .ok_or_else(|| self.no_healthy_member())?;
        let client = connector
            .dial(endpoint, Streams::Plain)
            .map_err(AttemptError::into_error)?;
        // Revisions up to `compacted` cannot be read, and revisions from `readable` on can.
        let (mut compacted, mut readable) = (0, self.revision);
        while compacted + 1 < readable {
            let middle = compacted + (readable - compacted) / 2;
            let options = GetOptions::new()
                .with_count_only()
                .with_serializable()
                .with_revision(middle);
            let mut kv = client.kv_client();
            match connector.ask("read", endpoint, kv.get(vec![0], Some(options))) {
                Ok(_) => readable = middle,
                Err(AttemptError::Final(e)) if e.reason() == Reason::Conflict => compacted = middle,
                Err(other) => return Err(other.into_error()),
            }
        }
        Ok((readable > 1).then_some(readable))
    }

    /// Compacts the history up to a revision, and waits until it is removed from the database of the member
    /// that does the request.
    ///
    /// # Errors
    /// `Configuration` if the revision does not exist yet; `PermissionDenied`; the error of the last member
    /// that was tried; `Terminated`.
    pub fn compact(&self, connector: &Connector, revision: i64) -> Result<CompactionResult> {
        let is_retry = Cell::new(false);
        self.try_members(connector, async |endpoint| {
            let was_requested = is_retry.replace(true);
            match compact_at(connector, endpoint, revision).await {
                // After a retry, the compaction may be our own: the response of the first member may be lost.
                Err(AttemptError::Final(e)) if e.reason() == Reason::Conflict => {
                    Ok(match was_requested {
                        true => CompactionResult::Done,
                        false => CompactionResult::Already,
                    })
                }
                result => result.map(|()| CompactionResult::Done),
            }
        })
    }

    /// Makes a request at healthy members in turn, the best one first, until it succeeds or fails finally.
    fn try_members<T>(
        &self,
        connector: &Connector,
        request: impl AsyncFn(&str) -> Result<T, AttemptError>,
    ) -> Result<T> {
        let mut last_error = None;
        for member in self.choose(&[]) {
            let Some(endpoint) = member.endpoint.as_deref() else {
                continue;
            };
            match connector.wait(request(endpoint)).and_then(|result| result) {
                Ok(response) => return Ok(response),
                Err(AttemptError::TryAgain(e)) => last_error = Some(e),
                Err(other) => return Err(other.into_error()),
            }
        }
        Err(last_error.unwrap_or_else(|| self.no_healthy_member()))
    }

    /// Waits until every reachable voting member has removed the history up to `revision` from its database.
    ///
    /// Each member does so by itself, later than the member that did the request. A repeated request for the
    /// same compaction is refused as already done, but only after that work (etcd's `compactBarrier`).
    ///
    /// # Errors
    /// `Terminated`. A member that does not respond is skipped; its reported sizes may then still shrink.
    pub fn await_compaction(&self, connector: &Connector, revision: i64) -> Result<()> {
        let voters = self.members.iter().filter(|m| !m.is_learner);
        for endpoint in voters.filter_map(|m| m.endpoint.as_deref()) {
            let result = connector.wait(compact_at(connector, endpoint, revision));
            match result.map_err(AttemptError::into_error)? {
                Ok(()) => {}
                Err(AttemptError::Final(e)) if e.reason() == Reason::Conflict => {}
                Err(other) => {
                    let why = other.into_error();
                    tracing::debug!(endpoint, %why, "cannot wait for the compaction of a member");
                }
            }
        }
        Ok(())
    }

    /// Defragments one member, which serves no requests meanwhile.
    ///
    /// # Errors
    /// `EtcdUnreachable`, `PermissionDenied`, `Unauthenticated`; `Terminated`, after which the member
    /// continues to defragment.
    pub fn defragment(&self, connector: &Connector, member: &Member) -> Result<()> {
        let endpoint = member
            .endpoint
            .as_deref()
            .ok_or_else(|| self.no_healthy_member())?;
        let request = async {
            let mut client = connector.connect(endpoint, Streams::Plain).await?;
            let response = client.defragment();
            connector
                .answer("defragment", endpoint, MAINTENANCE_TIMEOUT, response)
                .await
        };
        connector
            .wait(request)
            .and_then(|result| result)
            .map(drop)
            .map_err(AttemptError::into_error)
    }

    /// Disarms the NOSPACE alarms. Returns the IDs of their members.
    ///
    /// # Errors
    /// `NoQuorum`, `PermissionDenied`; the error of the last member that was tried; `Terminated`.
    pub fn disarm_no_space(&self, connector: &Connector) -> Result<Vec<u64>> {
        self.try_members(connector, async |endpoint| {
            disarm(connector, endpoint).await
        })
    }
}

/// Requests a compaction at one member, and waits until it has removed the history.
async fn compact_at(
    connector: &Connector,
    endpoint: &str,
    revision: i64,
) -> Result<(), AttemptError> {
    let mut client = connector.connect(endpoint, Streams::Plain).await?;
    let options = Some(CompactionOptions::new().with_physical());
    let response = client.compact(revision, options);
    connector
        .answer("compact", endpoint, MAINTENANCE_TIMEOUT, response)
        .await
        .map(drop)
}

/// Disarms the NOSPACE alarms of all members by requests to one member.
async fn disarm(connector: &Connector, endpoint: &str) -> Result<Vec<u64>, AttemptError> {
    let mut client = connector.connect(endpoint, Streams::Plain).await?;
    let timeout = connector.options().command_timeout;
    let list = client.alarm(AlarmAction::Get, AlarmType::None, None);
    let raised = connector
        .answer("list alarms", endpoint, timeout, list)
        .await?;
    // Compare numbers, because the library may not know all kinds of alarms.
    let members: BTreeSet<u64> = raised
        .0
        .alarms
        .iter()
        .filter(|a| a.alarm == AlarmType::Nospace as i32)
        .map(|a| a.member_id)
        .collect();
    for &member in &members {
        let mut options = AlarmOptions::new();
        options.with_member(member);
        let response = client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options));
        connector
            .answer("disarm an alarm", endpoint, timeout, response)
            .await?;
    }
    Ok(members.into_iter().collect())
}
