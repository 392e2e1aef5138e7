//! A lock that this process holds, and the thread that renews it.
//!
//! Created by `store::lock`; operations hold it.

use super::protocol::{Claimant, Clock, Renewal, give_back, renew};
use super::record::LockStore;
use super::{Lock, RENEWALS_PER_DURATION, patience, wait_for};
use crate::base::{Cancel, lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::Handle;

/// After a failed renewal, the pause before the next attempt is the usual pause divided by this.
const RETRY_DIVISOR: u32 = 4;
/// Time limit for giving the lock back.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);

/// A lock that this process holds. A thread renews it. Dropping the guard gives the lock back.
///
/// The thread goes on through outages: if the record is still this holder's after an outage, nobody else held
/// the lock meanwhile.
pub struct LockGuard {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    store: Arc<dyn LockStore>,
    claimant: Claimant,
    clock: Arc<dyn Clock>,
    handle: Handle,
    /// Ends the requests of the thread.
    stop: Cancel,
    state: Mutex<GuardState>,
    stopped: Condvar,
}

struct GuardState {
    /// The lock lasts from here.
    since: Duration,
    /// Why the lock is lost.
    lost: Option<String>,
    stop: bool,
}

impl LockGuard {
    pub(super) fn new(lock: &Lock, claimant: Claimant, since: Duration) -> Result<Self> {
        let shared = Arc::new(Shared {
            store: lock.store.clone(),
            claimant,
            clock: lock.clock.clone(),
            handle: lock.handle.clone(),
            stop: Cancel::default(),
            state: Mutex::new(GuardState {
                since,
                lost: None,
                stop: false,
            }),
            stopped: Condvar::new(),
        });
        // From here on, a drop gives the lock back.
        let mut guard = LockGuard {
            shared: shared.clone(),
            thread: None,
        };
        let thread = std::thread::Builder::new()
            .name("lock".to_owned())
            .spawn(move || shared.keep_renewing())
            .map_err(|e| Error::io("start the thread that renews a lock", e))?;
        guard.thread = Some(thread);
        Ok(guard)
    }

    /// Returns the lock's name, for messages.
    pub fn name(&self) -> String {
        self.shared.store.name()
    }

    /// Returns whether no other process can hold the lock, by this process's clock. Can become true again
    /// after an outage.
    pub fn is_held(&self) -> bool {
        self.shared.is_held()
    }

    /// Returns [`is_held`](Self::is_held) as a function that outlives the guard; false once the lock is given
    /// back.
    pub fn watch(&self) -> Box<dyn Fn() -> bool + Send + Sync> {
        let shared = self.shared.clone();
        Box::new(move || shared.is_held())
    }

    /// Returns whether another process has taken the lock or may have: then it does not come back.
    pub fn is_lost(&self) -> bool {
        self.shared.state().lost.is_some()
    }

    /// Fails if the lock is not [held](Self::is_held), and says why.
    ///
    /// # Errors
    /// `LockHeld`.
    pub fn check(&self) -> Result<()> {
        if self.is_held() {
            return Ok(());
        }
        let late = "it could not be renewed in time, so another process may have it";
        let state = self.shared.state();
        Err(self
            .shared
            .lost_error(state.lost.as_deref().unwrap_or(late)))
    }

    /// Renews the lock now.
    ///
    /// # Errors
    /// Fails with `LockHeld` if the lock is lost, and with the errors of the [`LockStore`].
    pub fn renew(&self) -> Result<()> {
        self.shared.renew()
    }

    /// Gives the lock back, so that others need not wait.
    ///
    /// # Errors
    /// Fails with the errors of the [`LockStore`]; then others have to wait until the lock has expired.
    pub fn release(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.shared.state().stop, true) {
            return Ok(());
        }
        self.shared.stopped.notify_all();
        self.shared.stop.cancel();
        // If the thread panicked, it has renewed nothing since: ignore it.
        let _ = self.thread.take().map(JoinHandle::join);
        if self.shared.state().lost.is_some() {
            return Ok(());
        }
        // Clean up whatever ended the operation, so do not listen to its cancellation.
        let never = Cancel::default();
        let s = &self.shared;
        let release = give_back(&*s.store, &s.claimant, s.clock.as_ref());
        wait_for(&s.handle, &never, &*s.store, RELEASE_PATIENCE, release)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            tracing::warn!(
                lock = self.name(),
                "cannot give the lock back, others wait until it expires: {e}"
            );
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, GuardState> {
        lock(&self.state)
    }

    fn is_held(&self) -> bool {
        let state = self.state();
        let end = state.since + self.claimant.duration;
        state.lost.is_none() && !state.stop && self.clock.now() < end
    }

    fn lost_error(&self, why: &str) -> Error {
        Reason::LockHeld.error(format!("the lock {} was lost: {why}", self.store.name()))
    }

    fn renew(&self) -> Result<()> {
        let renewal = renew(&*self.store, &self.claimant, self.clock.as_ref());
        let patience = patience(self.claimant.duration);
        match wait_for(&self.handle, &self.stop, &*self.store, patience, renewal)? {
            Renewal::Since(since) => {
                let mut state = self.state();
                state.since = state.since.max(since);
                Ok(())
            }
            Renewal::Lost(why) => {
                let lost = self.lost_error(&why);
                self.state().lost = Some(why);
                Err(lost)
            }
        }
    }

    /// The body of the thread: renews the lock until it is given back or lost.
    fn keep_renewing(&self) {
        let usual = self.claimant.duration / RENEWALS_PER_DURATION;
        let mut pause = usual;
        loop {
            let state = self.state();
            let waited = unpoisoned(self.stopped.wait_timeout_while(state, pause, |s| !s.stop));
            let (stop, lost) = (waited.0.stop, waited.0.lost.is_some());
            drop(waited);
            if stop || lost {
                return;
            }
            pause = match self.renew() {
                Ok(()) => usual,
                Err(e) if e.reason() == Reason::LockHeld => {
                    tracing::error!("{e}");
                    return;
                }
                Err(e) => {
                    if !self.stop.is_cancelled() {
                        tracing::warn!(lock = self.store.name(), "cannot renew the lock: {e}");
                    }
                    usual / RETRY_DIVISOR
                }
            };
        }
    }
}
