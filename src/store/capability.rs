//! Facts about a store that are found out by one test, and tasks on a store in the background.
//!
//! Called by `store` and `store::publish`.

use super::Store;
use crate::base::lock;
use crate::error::Result;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{Builder, JoinHandle};

/// A fact about a store that each process tests once. Callers that ask during the test wait for its result.
#[derive(Clone, Default)]
pub(super) struct Capability(Arc<Inner>);

#[derive(Default)]
struct Inner {
    known: OnceLock<bool>,
    trying: Mutex<()>,
}

impl Capability {
    /// Returns the fact, if it is known.
    pub(super) fn known(&self) -> Option<bool> {
        self.0.known.get().copied()
    }

    /// Returns the fact, and tests it if it is unknown. If the test fails, the next caller tests again.
    ///
    /// # Errors
    /// Fails with the errors of `test`.
    pub(super) fn find_out(&self, test: impl FnOnce() -> Result<bool>) -> Result<bool> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let _trying = lock(&self.0.trying);
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let result = test()?;
        Ok(*self.0.known.get_or_init(|| result))
    }
}

/// A task that runs beside other work. Dropping this waits for its end.
#[must_use]
pub struct BackgroundTask(Option<JoinHandle<()>>);

impl Drop for BackgroundTask {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // The task is only an optimization, so ignore its panic.
            let _ = thread.join();
        }
    }
}

impl Store {
    /// Runs `work` on a thread of its own, since it mostly waits for the store. In a local folder nothing
    /// waits, so it runs at once. If the system has no thread left, `work` does not run: nothing may depend
    /// on it.
    pub fn in_background(&self, work: impl FnOnce(&Store) + Send + 'static) -> BackgroundTask {
        if self.local_root.is_some() {
            work(self);
            return BackgroundTask(None);
        }
        let store = self.clone();
        let thread = Builder::new().spawn(move || work(&store));
        BackgroundTask(thread.ok())
    }

    /// Tests in the background what giving a name depends on, so that the naming need not wait for the tests.
    pub fn prepare_naming(&self) -> [BackgroundTask; 2] {
        [
            self.in_background(|store| {
                // An error is reported when the result is needed.
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
    fn a_fact_is_tested_once_by_concurrent_callers() {
        let (capability, tests) = (Capability::default(), AtomicUsize::new(0));
        let failed = capability.find_out(|| Err(Error::internal("no answer")));
        assert!(failed.is_err());
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    let result = capability.find_out(|| {
                        tests.fetch_add(1, Ordering::Relaxed);
                        Ok(true)
                    });
                    assert!(result.unwrap());
                });
            }
        });
        assert_eq!(tests.into_inner(), 1);
    }
}
