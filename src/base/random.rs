//! A random number that keeps nothing secret.

use std::hash::{BuildHasher, RandomState};

/// A word that differs between processes and calls.
pub fn random_word() -> u64 {
    RandomState::new().hash_one(())
}
