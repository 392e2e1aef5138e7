//! How a process takes, renews and gives back a lock: reads of the record and conditional writes.
//!
//! Does not wait, retry or start threads: `Lock` and `LockGuard` do. The clock is an argument, so the tests
//! run thousands of schedules.

use super::LONGEST_DURATION;
use super::record::{ConditionalWrite, LockRecord, LockStore, after};
use crate::base::random::random_word;
use crate::error::{Reason, Result};
use crate::store::errors::no_conditions;
use chrono::{DateTime, SubsecRound, Utc};
use std::time::{Duration, Instant};

/// A monotonic clock and a wall clock.
pub(super) trait Clock: Send + Sync {
    /// Time since an arbitrary moment; never goes back.
    fn now(&self) -> Duration;
    /// The time of day, which may be wrong. It is only written into records.
    fn wall(&self) -> DateTime<Utc>;
}

pub(super) struct SystemClock(pub(super) Instant);

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
    fn wall(&self) -> DateTime<Utc> {
        Utc::now()
    }
}

/// A process that wants the lock or holds it.
#[derive(Debug, Clone)]
pub(super) struct Claimant {
    pub(super) identity: String,
    token: String,
    pub(super) duration: Duration,
}

impl Claimant {
    pub(super) fn new(identity: &str, duration: Duration) -> Self {
        // A record has whole seconds.
        let seconds = duration.min(LONGEST_DURATION).as_secs_f64().ceil().max(1.0);
        Claimant {
            identity: identity.to_owned(),
            token: format!("{:016x}", random_word()),
            duration: Duration::from_secs_f64(seconds),
        }
    }

    fn owns(&self, record: &LockRecord) -> bool {
        record.holder_identity == self.identity && record.token == self.token
    }

    /// Returns the record with which this claimant takes or renews the lock; `before` is the record now.
    fn record(&self, before: Option<&LockRecord>, wall: DateTime<Utc>) -> LockRecord {
        let own = before.filter(|b| self.owns(b));
        let transitions = before.map_or(0, |b| b.lease_transitions);
        LockRecord {
            holder_identity: self.identity.clone(),
            acquire_time: own.map_or(wall.trunc_subsecs(6), |b| b.acquire_time),
            renew_time: own.map_or(wall.trunc_subsecs(6), |b| after(wall, b.renew_time)),
            lease_duration_seconds: self.duration.as_secs() as u32,
            lease_transitions: match (own, before) {
                (None, Some(_)) => transitions.saturating_add(1),
                _ => transitions,
            },
            token: self.token.clone(),
        }
    }
}

/// The last record of another holder that a waiting process read, and when it read this record first, by its
/// own clock.
#[derive(Debug, Default)]
pub(super) struct HolderObserver(Option<(LockRecord, Duration)>);

impl HolderObserver {
    /// Returns the holder of the lock, given the record as it was read at `now`. Returns `None` if the lock
    /// can be taken: nobody holds it, or the record did not change for as long as the lock lasts.
    fn observe(
        &mut self,
        record: Option<&LockRecord>,
        claimant: &Claimant,
        now: Duration,
    ) -> Option<Holder> {
        let Some(record) = record.filter(|r| !r.is_released()) else {
            self.0 = None;
            return None;
        };
        // An earlier attempt took the lock, and its response was lost.
        if claimant.owns(record) {
            return None;
        }
        let (renewed, unchanged) = match &self.0 {
            Some((seen, since)) if seen == record => (false, now.saturating_sub(*since)),
            before => {
                let renewed = before.is_some();
                self.0 = Some((record.clone(), now));
                (renewed, Duration::ZERO)
            }
        };
        (unchanged < record.duration()).then(|| Holder {
            identity: record.holder_identity.clone(),
            since: record.acquire_time,
            renewed,
            unchanged,
        })
    }
}

/// The result of one attempt to take a lock.
#[derive(Debug)]
pub(super) enum Acquisition {
    /// The claimant holds the lock from this moment on.
    Since(Duration),
    HeldBy(Holder),
}

/// The result of a renewal.
#[derive(Debug)]
pub(super) enum Renewal {
    /// The lock lasts from this moment on.
    Since(Duration),
    /// The lock is gone, for this reason.
    Lost(String),
}

/// Takes the lock if it can be taken.
pub(super) async fn attempt(
    store: &dyn LockStore,
    claimant: &Claimant,
    observer: &mut HolderObserver,
    clock: &dyn Clock,
) -> Result<Acquisition> {
    let seen = store.read().await?;
    let before = seen.as_ref().map(|(record, _)| record);
    if let Some(holder) = observer.observe(before, claimant, clock.now()) {
        return Ok(Acquisition::HeldBy(holder));
    }
    // The lock lasts from before the write: no other process can have read the record earlier.
    let began = clock.now();
    let record = claimant.record(before, clock.wall());
    let written = match &seen {
        None => store.create(&record).await,
        Some((_, version)) => store.update(&record, version).await,
    };
    let written = match written {
        Err(e) if matches!(e.reason(), Reason::Configuration | Reason::ObjectLocked) => {
            return Err(e);
        }
        written => written,
    };
    // A store may accept a condition and ignore it, and a response may be lost. So read the record back.
    match (written, store.read().await?) {
        (_, Some((now, _))) if now == record => Ok(Acquisition::Since(began)),
        (Err(e), _) => Err(e),
        // No process deletes a record.
        (Ok(_), None) if seen.is_none() => Err(no_conditions(format!(
            "cannot take the lock {}: the store says that the object exists, and it does not",
            store.name()
        ))),
        (Ok(_), other) => {
            let other = other.as_ref().map(|(record, _)| record);
            let holder = observer.observe(other, claimant, clock.now());
            // Another process was faster. It may have given the lock back by now.
            Ok(Acquisition::HeldBy(holder.unwrap_or_else(|| Holder {
                identity: "a process that has just given it back".to_owned(),
                since: clock.wall(),
                renewed: false,
                unchanged: Duration::ZERO,
            })))
        }
    }
}

/// Renews the lock if the claimant still holds it.
pub(super) async fn renew(
    store: &dyn LockStore,
    claimant: &Claimant,
    clock: &dyn Clock,
) -> Result<Renewal> {
    /// An earlier renewal whose response was lost may take effect between the read and the write.
    const ATTEMPTS: u32 = 3;
    for _ in 0..ATTEMPTS {
        let (before, version) = match store.read().await? {
            Some((record, version)) if claimant.owns(&record) => (record, version),
            Some((other, _)) => {
                return Ok(Renewal::Lost(if other.is_released() {
                    "it was given back".to_owned()
                } else {
                    format!("{} has it now", other.holder_identity)
                }));
            }
            None => return Ok(Renewal::Lost("its record is gone".to_owned())),
        };
        let began = clock.now();
        let record = claimant.record(Some(&before), clock.wall());
        if store.update(&record, &version).await? == ConditionalWrite::Done {
            return Ok(Renewal::Since(began));
        }
    }
    Err(Reason::Conflict.error(format!(
        "cannot renew the lock {}: its record changes all the time",
        store.name()
    )))
}

/// Gives the lock back if the claimant still holds it.
pub(super) async fn give_back(
    store: &dyn LockStore,
    claimant: &Claimant,
    clock: &dyn Clock,
) -> Result<()> {
    if let Some((record, version)) = store.read().await?
        && claimant.owns(&record)
    {
        store
            .update(&record.released(clock.wall()), &version)
            .await?;
    }
    Ok(())
}

/// The holder of a lock, as a waiting process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The holder's identity.
    pub identity: String,
    /// When the holder took the lock, by the holder's clock.
    pub since: DateTime<Utc>,
    /// The record changed since this process read it first: the holder is alive.
    pub renewed: bool,
    /// How long the record has not changed, by this process's clock.
    pub unchanged: Duration,
}
