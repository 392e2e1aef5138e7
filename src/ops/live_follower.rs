//! The follower that works on a prefix, for commands that only name it. Its lock is read, and not taken.
//!
//! Called by `ops::status` and `ops::restore`. A lock that is a Lease in Kubernetes is not seen.

use crate::base::printable;
use crate::base::time::utc;
use crate::ops::snapshot::follow::LOCK;
use crate::store::Store;
use crate::store::lock::Lock;
use chrono::{DateTime, TimeDelta, Utc};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;

/// The largest age of a renewal. A live follower renews every few seconds, but clocks may differ.
const MAX_AGE: TimeDelta = TimeDelta::minutes(1);

/// A follower that works on the prefix.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct LiveFollower {
    /// Its Pod or machine, and its process ID.
    pub holder: String,
    /// Since when it has saved nothing: the time of the newest snapshot. null if there is none.
    pub saved_nothing_since: Option<DateTime<Utc>>,
}

impl LiveFollower {
    /// Returns the follower that holds the lock in `store`, if it has renewed it just now. `newest` is when the
    /// newest snapshot was taken. A lock that cannot be read names nobody: this is a hint, and no protection.
    pub fn find(store: &Store, newest: Option<DateTime<Utc>>) -> Option<Self> {
        let lock = Lock::new(store, LOCK, "", Duration::ZERO).ok()?;
        let record = match lock.read() {
            Ok(record) => record?,
            Err(e) => {
                tracing::debug!("cannot tell whether a follower is live: {e}");
                return None;
            }
        };
        (Utc::now() - record.renew_time <= MAX_AGE).then(|| LiveFollower {
            holder: printable::line(&record.holder_identity).into_owned(),
            saved_nothing_since: newest,
        })
    }

    /// Returns the follower as a text: `HOLDER, which has saved nothing since TIME`.
    pub fn text(&self) -> String {
        let since = self.saved_nothing_since.map(utc);
        let since = since.map(|t| format!(", which has saved nothing since {t}"));
        format!("{}{}", self.holder, since.unwrap_or_default())
    }
}
