//! A set of keys: all, one, or those with a prefix.
//!
//! `fold` and the operations that read, restore or compare keys use it.

use std::collections::BTreeSet;

/// A set of keys, compared byte by byte.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum KeyRange {
    /// Every key.
    #[default]
    All,
    /// One key.
    Key(Vec<u8>),
    /// These keys.
    Keys(BTreeSet<Vec<u8>>),
    /// All keys that begin with these bytes.
    Prefix(Vec<u8>),
}

impl KeyRange {
    /// Whether `key` belongs to the set.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            KeyRange::All => true,
            KeyRange::Key(only) => key == only,
            KeyRange::Keys(keys) => keys.contains(key),
            KeyRange::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_contains_its_keys_only() {
        let prefix = KeyRange::Prefix(b"/a/".to_vec());
        assert!(prefix.contains(b"/a/") && prefix.contains(b"/a/b"));
        assert!(!prefix.contains(b"/a") && !prefix.contains(b"/b/"));
        let key = KeyRange::Key(b"/a".to_vec());
        assert!(key.contains(b"/a") && !key.contains(b"/a/"));
        let keys = KeyRange::Keys([b"/a".to_vec(), b"/c".to_vec()].into());
        assert!(keys.contains(b"/a") && keys.contains(b"/c"));
        assert!(!keys.contains(b"/b") && !keys.contains(b"/a/"));
        assert!(KeyRange::All.contains(b""));
    }
}
