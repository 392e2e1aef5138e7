//! Maintenance of the members: defragmentation, and disarming of alarms.
//!
//! The caller decides what is done.

use super::{Cluster, Member};
use crate::error::Result;
use crate::etcd::connect::{AttemptError, Connector, Streams};
use etcd_client::{AlarmAction, AlarmOptions, AlarmType};
use std::collections::BTreeSet;
use std::time::Duration;

/// The timeout of a defragmentation, which writes a whole database: around 10 s for each GiB.
const DEFRAGMENTATION_TIMEOUT: Duration = Duration::from_secs(60 * 60);

impl Cluster {
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
                .answer("defragment", endpoint, DEFRAGMENTATION_TIMEOUT, response)
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
