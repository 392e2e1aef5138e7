//! Mutexes whose poison is ignored: what they hold is whole after each statement, so a thread that panicked left
//! nothing half done.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// What a lock or a wait gave, poisoned or not.
pub fn unpoisoned<T>(locked: LockResult<T>) -> T {
    locked.unwrap_or_else(PoisonError::into_inner)
}
