//! The follower that works on a prefix, for commands that only name it. Its lock is read, and not taken.
//!
//! A lock that is a Lease in Kubernetes is not seen.

use crate::base::printable;
use crate::base::time::utc;
use crate::error::Result;
use crate::ops::snapshot::follow::LOCK;
use crate::store::Store;
use crate::store::lock::Lock;
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use std::time::Duration;

/// The largest age of a renewal. A live follower renews every few seconds, but clocks may differ.
const MAX_AGE: TimeDelta = TimeDelta::minutes(1);

/// A follower that works on the prefix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LiveFollower {
    /// Its Pod or machine, and its process ID.
    pub holder: String,
    /// Since when it has saved nothing: the time of the newest snapshot. null if there is none.
    pub saved_nothing_since: Option<DateTime<Utc>>,
}

/// A follower that holds the lock of the prefix.
pub enum FoundFollower {
    /// It has renewed the lock just now.
    Live(LiveFollower),
    /// It has not, did not give the lock back, and nobody has saved since: it was killed, or its machine is gone.
    Dead(DeadFollower),
}

/// A follower that is dead and was not replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadFollower {
    /// Its Pod or machine, and its process ID.
    pub holder: String,
    /// When it last renewed the lock.
    pub renewed: DateTime<Utc>,
}

impl FoundFollower {
    /// Returns the follower that holds the lock in `store`. `newest` is when the newest snapshot was taken. A lock that
    /// cannot be read names nobody: this is a hint, and no protection.
    pub fn find(store: &Store, newest: Option<DateTime<Utc>>) -> Option<Self> {
        match Self::read(store, newest) {
            Ok(found) => found,
            Err(e) => {
                tracing::debug!("cannot tell whether a follower is live: {e}");
                None
            }
        }
    }

    fn read(store: &Store, newest: Option<DateTime<Utc>>) -> Result<Option<Self>> {
        let lock = Lock::new(store, LOCK, "", Duration::ZERO)?;
        let Some(record) = lock.read()? else {
            return Ok(None);
        };
        let renewed = record.renew_time;
        let holder = printable::line(&record.holder_identity).into_owned();
        if Utc::now() - renewed <= MAX_AGE {
            return Ok(Some(FoundFollower::Live(LiveFollower {
                holder,
                saved_nothing_since: newest,
            })));
        }
        // A snapshot that is later than the last renewal is that of a replacement. The follower itself may have saved one
        // shortly before it died.
        let was_replaced = newest.is_some_and(|newest| newest - renewed > MAX_AGE);
        Ok((!was_replaced).then_some(FoundFollower::Dead(DeadFollower { holder, renewed })))
    }
}

impl LiveFollower {
    /// Returns the follower as a text: `HOLDER, which has saved nothing since TIME`.
    pub fn text(&self) -> String {
        let since = self.saved_nothing_since.map(utc);
        let since = since.map(|t| format!(", which has saved nothing since {t}"));
        format!("{}{}", self.holder, since.unwrap_or_default())
    }
}
