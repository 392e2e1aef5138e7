//! A mutex whose holder panicked is taken all the same: the panic itself ends the run.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
