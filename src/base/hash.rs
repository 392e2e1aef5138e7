//! Hexadecimal digits, and short hashes for names of objects.

use sha2::{Digest, Sha256};

/// Formats bytes as lower-case hexadecimal digits, two for each byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Returns the first `bytes` bytes (at most 32) of the SHA-256 of `data`, in hexadecimal digits.
pub fn short_hash(data: impl AsRef<[u8]>, bytes: usize) -> String {
    hex(&Sha256::digest(data)[..bytes])
}
