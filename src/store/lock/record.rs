//! The record of a lock: who holds it and for how long. And the trait for where a record is kept.
//!
//! `store::lock::object` and `kubernetes::lease` keep records.

use super::LONGEST_DURATION;
use crate::error::{Reason, Result};
use async_trait::async_trait;
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long a lock lasts if its record is unreadable or names no duration.
pub(super) const UNKNOWN_DURATION: Duration = Duration::from_secs(60);

/// The record of a lock: the fields of a Kubernetes Lease, and a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LockRecord {
    /// The holder, for display. Empty if nobody holds the lock.
    pub holder_identity: String,
    /// When the holder took the lock, by the holder's clock. For display only.
    pub acquire_time: DateTime<Utc>,
    /// When the holder last renewed, by the holder's clock. Never compared with another clock; it only
    /// differs each time.
    pub renew_time: DateTime<Utc>,
    /// Seconds without a renewal, by the waiting process's clock, after which that process may take the lock.
    pub lease_duration_seconds: u32,
    /// How often the lock went to another holder.
    #[serde(default)]
    pub lease_transitions: u32,
    /// Tells apart holders that have the same identity.
    pub token: String,
}

impl LockRecord {
    /// Returns the record for unreadable text. Its unknown holder counts as alive while the text keeps
    /// changing.
    pub(crate) fn unknown(text: &str) -> Self {
        LockRecord {
            holder_identity: "somebody unknown (its record cannot be understood)".to_owned(),
            acquire_time: DateTime::UNIX_EPOCH,
            renew_time: DateTime::UNIX_EPOCH,
            lease_duration_seconds: UNKNOWN_DURATION.as_secs() as u32,
            lease_transitions: 0,
            token: text.to_owned(),
        }
    }

    pub(super) fn is_released(&self) -> bool {
        self.holder_identity.is_empty()
    }

    pub(super) fn duration(&self) -> Duration {
        match self.lease_duration_seconds {
            // A Lease may have no duration.
            0 => UNKNOWN_DURATION,
            seconds => Duration::from_secs(seconds.into()).min(LONGEST_DURATION),
        }
    }

    /// Returns the record that gives the lock back. `wall` is the time now by the wall clock.
    pub(super) fn released(&self, wall: DateTime<Utc>) -> LockRecord {
        LockRecord {
            holder_identity: String::new(),
            token: String::new(),
            renew_time: after(wall, self.renew_time),
            // Kubernetes does not accept 0.
            lease_duration_seconds: 1,
            ..self.clone()
        }
    }
}

/// Returns `wall`, or the smallest later time that differs from `earlier` if the wall clock did not advance.
pub(super) fn after(wall: DateTime<Utc>, earlier: DateTime<Utc>) -> DateTime<Utc> {
    let next = earlier.checked_add_signed(TimeDelta::microseconds(1));
    next.map_or(wall, |next| wall.max(next)).trunc_subsecs(6)
}

/// The version of a record that was read: the object's ETag or content, or its version, generation or
/// resourceVersion. An update names it, so that no other version is replaced.
pub use object_store::UpdateVersion as RecordVersion;

/// The result of a conditional write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConditionalWrite {
    /// The record was written.
    Done,
    /// The record did not match the condition. Nothing was written.
    Refused,
}

/// The place where the record of one lock is kept.
#[async_trait]
pub trait LockStore: Send + Sync {
    /// Returns the lock's name, for messages.
    fn name(&self) -> String;
    /// Returns the record and its version, or `None` if there is no record.
    async fn read(&self) -> Result<Option<(LockRecord, RecordVersion)>>;
    /// Writes the record if there is none.
    async fn create(&self, record: &LockRecord) -> Result<ConditionalWrite>;
    /// Replaces the record if it still has this version.
    async fn update(
        &self,
        record: &LockRecord,
        version: &RecordVersion,
    ) -> Result<ConditionalWrite>;
    /// Returns the reason of the error if a request was not answered in time.
    fn unanswered(&self) -> Reason;
}
