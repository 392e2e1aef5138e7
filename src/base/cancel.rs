//! The switch that ends a run early. Everything that loops or waits looks at it; `cli` sets it on a signal.

use crate::error::{Error, Reason, Result};
use tokio::sync::watch;

/// Set once to end a run early; every loop over data looks at it, every wait ends with it.
#[derive(Debug, Clone)]
pub struct Cancel(watch::Sender<bool>);

impl Default for Cancel {
    fn default() -> Self {
        Cancel(watch::Sender::new(false))
    }
}

impl Cancel {
    /// Asks everything that looks or waits to stop.
    pub fn cancel(&self) {
        self.0.send_replace(true);
    }

    /// Fails once cancelled.
    ///
    /// # Errors
    /// `Terminated`.
    pub fn check(&self) -> Result<()> {
        if *self.0.borrow() {
            return Err(Self::terminated());
        }
        Ok(())
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        *self.0.borrow()
    }

    fn terminated() -> Error {
        Reason::Terminated.error("ended by a signal")
    }

    /// Waits for `f`, unless cancelled first.
    ///
    /// # Errors
    /// `Terminated`.
    pub(crate) async fn or<F: Future>(&self, f: F) -> Result<F::Output> {
        let mut cancelled = self.0.subscribe();
        tokio::select! {
            biased;
            // The sender lives as long as `self`: this ends with a true or not at all.
            _ = cancelled.wait_for(|&c| c) => Err(Self::terminated()),
            done = f => Ok(done),
        }
    }
}
