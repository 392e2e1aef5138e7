//! Hexadecimal digits, and short hashes that name things.

use sha2::{Digest, Sha256};

/// Two lower-case digits a byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The first `bytes` bytes of the SHA-256 of `of`, 32 at most, in hexadecimal digits.
pub fn short_hash(of: impl AsRef<[u8]>, bytes: usize) -> String {
    hex(&Sha256::digest(of)[..bytes])
}
