//! Locking that ignores poisoning.
//!
//! Every statement leaves the protected data consistent, so a thread that panicked while it held the mutex
//! left nothing half done.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks the mutex, poisoned or not.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// Returns the guard of a lock or of a wait, poisoned or not.
pub fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
