//! The cancellation flag of an operation.
//!
//! `cli` sets it on SIGTERM or SIGINT. Every loop over data checks it, and every wait ends with it.

use crate::error::{Error, Reason, Result};
use tokio::sync::watch;

/// A flag that is set once to end an operation early. Clones share the flag.
#[derive(Debug, Clone)]
pub struct Cancel(watch::Sender<bool>);

impl Default for Cancel {
    fn default() -> Self {
        Cancel(watch::Sender::new(false))
    }
}

impl Cancel {
    /// Sets the flag: every check fails and every wait ends from now on.
    pub fn cancel(&self) {
        self.0.send_replace(true);
    }

    /// Fails if the flag is set.
    ///
    /// # Errors
    /// `Terminated`.
    pub fn check(&self) -> Result<()> {
        if *self.0.borrow() {
            return Err(Self::terminated());
        }
        Ok(())
    }

    /// Whether the flag is set.
    pub fn is_cancelled(&self) -> bool {
        *self.0.borrow()
    }

    fn terminated() -> Error {
        Reason::Terminated.error("ended by a signal")
    }

    /// Waits for `f` or for the cancellation, whichever comes first. A set flag wins.
    ///
    /// # Errors
    /// `Terminated` if cancelled first.
    pub(crate) async fn or<F: Future>(&self, f: F) -> Result<F::Output> {
        let mut cancelled = self.0.subscribe();
        tokio::select! {
            biased;
            // `self` keeps the sender alive, so this ends only when the flag is set.
            _ = cancelled.wait_for(|&c| c) => Err(Self::terminated()),
            done = f => Ok(done),
        }
    }
}
