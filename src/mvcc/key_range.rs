//! Which keys are meant: all, one, or those with a prefix.
//!
//! It compares bytes and reads nothing. `fold` and whoever reads a backup use it.

/// A set of keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum KeyRange {
    /// Every key.
    #[default]
    All,
    /// This key.
    Key(Vec<u8>),
    /// The keys that begin so.
    Prefix(Vec<u8>),
}

impl KeyRange {
    /// Whether `key` is one of them.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            KeyRange::All => true,
            KeyRange::Key(one) => key == one,
            KeyRange::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_holds_what_it_says() {
        let prefix = KeyRange::Prefix(b"/a/".to_vec());
        assert!(prefix.contains(b"/a/") && prefix.contains(b"/a/b"));
        assert!(!prefix.contains(b"/a") && !prefix.contains(b"/b/"));
        let key = KeyRange::Key(b"/a".to_vec());
        assert!(key.contains(b"/a") && !key.contains(b"/a/"));
        assert!(KeyRange::All.contains(b""));
    }
}
