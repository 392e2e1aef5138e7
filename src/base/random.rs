//! Random numbers for names and jitter; not for secrets.
//!
//! Called by `store` and `ops`.

use std::hash::{BuildHasher, RandomState};

/// Returns a number that differs between processes and calls.
pub fn random_word() -> u64 {
    RandomState::new().hash_one(())
}
