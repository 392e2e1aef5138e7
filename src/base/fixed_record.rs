//! Records of six 64-bit numbers, little endian: what our files in the temporary directory are made of.

/// Bytes of a record.
pub const BYTES: usize = 48;

/// The bytes of a record.
pub fn encode(words: [u64; 6]) -> [u8; BYTES] {
    let mut b = [0; BYTES];
    let (to, _) = b.as_chunks_mut::<8>();
    for (to, word) in to.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    b
}

/// Reads a record.
pub fn decode(b: &[u8; BYTES]) -> [u64; 6] {
    let (words, _) = b.as_chunks::<8>();
    std::array::from_fn(|i| u64::from_le_bytes(words[i]))
}
