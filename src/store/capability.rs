//! What is tried once by each process, and work on a store that goes on beside other work.

use super::Store;
use crate::base::lock;
use crate::error::Result;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{Builder, JoinHandle};

/// A fact about a store that is found out by trying. Who asks while it is tried waits for the answer.
#[derive(Clone, Default)]
pub(super) struct Capability(Arc<Inner>);

#[derive(Default)]
struct Inner {
    known: OnceLock<bool>,
    trying: Mutex<()>,
}

impl Capability {
    /// The answer, if it is known.
    pub(super) fn known(&self) -> Option<bool> {
        self.0.known.get().copied()
    }

    /// The answer. If trying fails, the next one who asks tries again.
    ///
    /// # Errors
    /// Those of `attempt`.
    pub(super) fn find_out(&self, attempt: impl FnOnce() -> Result<bool>) -> Result<bool> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let _trying = lock(&self.0.trying);
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let found = attempt()?;
        Ok(*self.0.known.get_or_init(|| found))
    }
}

/// Work beside other work. Dropping this waits for its end.
#[must_use]
pub struct BackgroundTask(Option<JoinHandle<()>>);

impl Drop for BackgroundTask {
    fn drop(&mut self) {
        if let Some(work) = self.0.take() {
            // Nothing depends on it.
            let _ = work.join();
        }
    }
}

impl Store {
    /// Does `work` on a thread of its own, since it mostly waits for the store; at once in a local folder, where nothing
    /// waits. It may be left undone, if the system has no thread left: nothing may depend on it.
    pub fn in_background(&self, work: impl FnOnce(&Store) + Send + 'static) -> BackgroundTask {
        if self.local_root.is_some() {
            work(self);
            return BackgroundTask(None);
        }
        let store = self.clone();
        let begun = Builder::new().spawn(move || work(&store));
        BackgroundTask(begun.ok())
    }

    /// Finds out what naming a new object will depend on, beside other work: the naming need not wait for it then.
    pub fn prepare_naming(&self) -> [BackgroundTask; 2] {
        [
            self.in_background(|store| {
                // It fails again where it matters.
                let _ = store.ignores_conditions();
            }),
            self.in_background(|store| {
                let _ = store.puts_at_once();
            }),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_fact_is_tried_once_by_all_who_ask_at_the_same_time() {
        let (tried, tries) = (Capability::default(), AtomicUsize::new(0));
        assert!(
            tried
                .find_out(|| Err(Error::internal("no answer")))
                .is_err()
        );
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    let found = tried.find_out(|| {
                        tries.fetch_add(1, Ordering::Relaxed);
                        Ok(true)
                    });
                    assert!(found.unwrap());
                });
            }
        });
        assert_eq!(tries.into_inner(), 1);
    }
}
