//! Random numbers for names and jitter, and random bytes for secrets.

use crate::error::{Error, Result};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::hash::{BuildHasher, RandomState};

/// Returns a number that differs between processes and calls. It is no secret.
pub fn random_word() -> u64 {
    RandomState::new().hash_one(())
}

/// Returns bytes that nobody can guess, for keys and tokens.
///
/// # Errors
/// `Io`.
pub fn secret_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        match getrandom(&mut bytes[have..], GetRandomFlags::empty()) {
            Ok(n) => have += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(Error::io("get random bytes", e.into())),
        }
    }
    Ok(bytes)
}
