//! Encodes records of six 64-bit integers, little endian.
//!
//! `mvcc::change_log` and `backup::survey` store such records in temporary files.

/// The size of a record in bytes.
pub const BYTES: usize = 48;

/// Encodes a record.
pub fn encode(words: [u64; 6]) -> [u8; BYTES] {
    let mut record = [0; BYTES];
    let (chunks, _) = record.as_chunks_mut::<8>();
    for (chunk, word) in chunks.iter_mut().zip(words) {
        *chunk = word.to_le_bytes();
    }
    record
}

/// Decodes a record.
pub fn decode(b: &[u8; BYTES]) -> [u64; 6] {
    let (words, _) = b.as_chunks::<8>();
    std::array::from_fn(|i| u64::from_le_bytes(words[i]))
}
