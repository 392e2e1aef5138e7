//! A lock that expires: its holder renews it, and a waiting process takes it over from a dead holder.
//!
//! Decides when a lock may be taken and when it is lost. Does not know where the record of a lock is kept:
//! that is a [`LockStore`], an object here or a Lease in `kubernetes::lease`. No process compares its clock
//! with another's.
//!
//! - `record`: the record, and the trait for where it is kept
//! - `protocol`: how a process takes, renews and gives back a lock
//! - `guard`: a lock that is held, and the thread that renews it
//! - `object`: records in a store

mod guard;
mod object;
mod protocol;
mod record;
#[cfg(test)]
mod tests;

pub use guard::LockGuard;
pub use object::{LOCKS, lock_path};
pub use protocol::Holder;
pub use record::{ConditionalWrite, LockRecord, LockStore, RecordVersion};

use crate::base::Cancel;
use crate::error::{Reason, Result};
use protocol::{Acquisition, Claimant, Clock, HolderObserver, SystemClock, attempt};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Renewals in the time that a lock lasts.
const RENEWALS_PER_DURATION: u32 = 3;
/// The longest time that a lock lasts without a renewal, and so the longest wait for a dead holder.
pub const LONGEST_DURATION: Duration = Duration::from_secs(3600);

/// The result of one attempt to take a lock.
pub enum Attempt {
    /// This process holds the lock.
    Acquired(LockGuard),
    /// Another process holds it.
    HeldBy(Holder),
}

/// How long to wait for a lock that another process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Until the lock is free.
    Forever,
    /// Until the holder proves to be alive (then give up) or dead (then take the lock).
    UntilSeenDead,
}

/// A lock that this process wants. Its calls block: do not make them on an async thread.
pub struct Lock {
    store: Arc<dyn LockStore>,
    claimant: Claimant,
    observer: HolderObserver,
    clock: Arc<dyn Clock>,
    handle: Handle,
    cancel: Cancel,
}

impl Lock {
    /// Returns the lock whose record is kept in `store`. The holder counts as dead if it did not renew for
    /// `duration`, which is rounded up to whole seconds and is an hour at most.
    pub fn on(
        store: Arc<dyn LockStore>,
        identity: &str,
        duration: Duration,
        handle: Handle,
        cancel: Cancel,
    ) -> Self {
        Lock {
            store,
            claimant: Claimant::new(identity, duration),
            observer: HolderObserver::default(),
            clock: Arc::new(SystemClock(Instant::now())),
            handle,
            cancel,
        }
    }

    /// Returns the lock's name, for messages.
    pub fn name(&self) -> String {
        self.store.name()
    }

    /// Attempts once to take the lock. If another process holds it, only further attempts show whether that
    /// one is alive.
    ///
    /// # Errors
    /// Fails with the errors of the [`LockStore`], with `Configuration` if it has no conditional writes, and
    /// with `Terminated`.
    pub fn try_acquire(&mut self) -> Result<Attempt> {
        let (store, clock) = (&*self.store, &*self.clock);
        let acquisition = attempt(store, &self.claimant, &mut self.observer, clock);
        let patience = patience(self.claimant.duration);
        match wait_for(&self.handle, &self.cancel, store, patience, acquisition)? {
            Acquisition::Since(since) => {
                // A later attempt of the same process must not count as the owner of this lock.
                let next = Claimant::new(&self.claimant.identity, self.claimant.duration);
                let claimant = std::mem::replace(&mut self.claimant, next);
                self.observer = HolderObserver::default();
                tracing::info!(lock = self.name(), "took the lock");
                LockGuard::new(self, claimant, since).map(Attempt::Acquired)
            }
            Acquisition::HeldBy(holder) => Ok(Attempt::HeldBy(holder)),
        }
    }

    /// Returns the record if a process holds the lock, be it alive or dead. One request.
    ///
    /// # Errors
    /// Fails with the errors of the [`LockStore`], and with `Terminated`.
    pub fn read(&self) -> Result<Option<LockRecord>> {
        let patience = patience(self.claimant.duration);
        let reading = self.store.read();
        let record = wait_for(&self.handle, &self.cancel, &*self.store, patience, reading)?;
        Ok(record.map(|r| r.0).filter(|r| !r.is_released()))
    }

    /// Waits for the lock, at most as long as `wait` says.
    ///
    /// # Errors
    /// Fails with `LockHeld` if the holder is alive and `wait` is [`Wait::UntilSeenDead`], with `Terminated`,
    /// and with the errors of the [`LockStore`] if the first attempt fails or if a retry cannot help.
    pub fn acquire(&mut self, wait: Wait) -> Result<LockGuard> {
        let pause =
            (self.claimant.duration / 6).clamp(Duration::from_millis(50), Duration::from_secs(2));
        let mut has_waited = false;
        loop {
            match self.try_acquire() {
                Ok(Attempt::Acquired(guard)) => return Ok(guard),
                Ok(Attempt::HeldBy(holder)) => {
                    if wait == Wait::UntilSeenDead && holder.renewed {
                        return Err(Reason::LockHeld.error(format!(
                            "{} has held the lock {} since {} and is alive: nothing is wrong, run again later",
                            holder.identity,
                            self.name(),
                            holder.since.format("%Y-%m-%dT%H:%M:%SZ"),
                        )));
                    }
                    if !has_waited {
                        tracing::info!(
                            lock = self.name(),
                            holder = holder.identity,
                            "waiting for the lock"
                        );
                    }
                }
                // A process that waits forever also waits for the end of an outage.
                Err(e) if has_waited && wait == Wait::Forever && e.reason().is_retryable() => {
                    tracing::warn!(lock = self.name(), "cannot read the lock, retrying: {e}");
                }
                Err(e) => return Err(e),
            }
            has_waited = true;
            self.handle
                .block_on(self.cancel.or(async { tokio::time::sleep(pause).await }))?;
        }
    }
}

/// Returns the time limit for all requests of one attempt: several attempts fit into the time that the lock
/// lasts.
fn patience(duration: Duration) -> Duration {
    (duration / RENEWALS_PER_DURATION).clamp(Duration::from_secs(2), Duration::from_secs(15))
}

/// Waits for some requests to `store`. Fails if the responses take longer than `patience`.
fn wait_for<T>(
    handle: &Handle,
    cancel: &Cancel,
    store: &dyn LockStore,
    patience: Duration,
    requests: impl Future<Output = Result<T>>,
) -> Result<T> {
    let limited = async { tokio::time::timeout(patience, requests).await };
    match handle.block_on(cancel.or(limited))? {
        Ok(result) => result,
        Err(_) => Err(store.unanswered().error(format!(
            "the lock {}: no answer within {} s",
            store.name(),
            patience.as_secs_f64()
        ))),
    }
}

/// Returns a name for this process as a holder: its Pod's or machine's name, and its process ID.
pub fn identity() -> String {
    let pod = std::env::var("POD_NAME").or_else(|_| std::env::var("HOSTNAME"));
    let host = pod.ok().filter(|h| !h.is_empty()).or_else(|| {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        Some(name.trim().to_owned())
    });
    format!(
        "{}.{}",
        host.unwrap_or_else(|| "unknown".to_owned()),
        std::process::id()
    )
}
