//! A set of keys: all, some, or those with a prefix.
//!
//! `fold` and the operations that read, restore or compare keys use it.

use std::collections::BTreeSet;
use std::ops::Bound;

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
    /// All keys that begin with one of these, as [`KeyRange::prefixes`] returns them.
    Prefixes(BTreeSet<Vec<u8>>),
    /// The keys of a namespace: `ROOT/KIND/NAMESPACE/NAME` or `ROOT/GROUP/KIND/NAMESPACE/NAME`, as API servers have them. In
    /// keys of three parts below the root, a first part with a dot is a group, and its kind has no namespace.
    Namespace {
        /// The roots, without slashes at their ends.
        roots: BTreeSet<Vec<u8>>,
        /// The namespace.
        name: Vec<u8>,
        /// Whether the key of the namespace itself belongs to it, too.
        itself: bool,
    },
}

impl KeyRange {
    /// The keys that begin with one of these prefixes. A prefix that begins with another one is left out.
    pub fn prefixes(prefixes: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let all: BTreeSet<Vec<u8>> = prefixes.into_iter().collect();
        let mut kept: BTreeSet<Vec<u8>> = BTreeSet::new();
        for prefix in all {
            // In ascending order, the prefix of a prefix comes before it.
            if !kept.last().is_some_and(|before| prefix.starts_with(before)) {
                kept.insert(prefix);
            }
        }
        KeyRange::Prefixes(kept)
    }

    /// Adds the key of the namespace itself to those of a namespace.
    pub fn with_its_namespace(mut self) -> Self {
        if let KeyRange::Namespace { itself, .. } = &mut self {
            *itself = true;
        }
        self
    }

    /// Returns the last key or prefix; `None` for every key.
    pub fn last(&self) -> Option<&[u8]> {
        match self {
            KeyRange::All => None,
            KeyRange::Key(one) | KeyRange::Prefix(one) => Some(one),
            KeyRange::Keys(all) | KeyRange::Prefixes(all) => all.last().map(Vec::as_slice),
            KeyRange::Namespace { roots, .. } => roots.last().map(Vec::as_slice),
        }
    }

    /// Whether `key` belongs to the set.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            KeyRange::All => true,
            KeyRange::Key(only) => key == only,
            KeyRange::Keys(keys) => keys.contains(key),
            KeyRange::Prefix(prefix) => key.starts_with(prefix),
            // No prefix begins another one, so only the last one up to the key may begin it.
            KeyRange::Prefixes(all) => {
                let mut up_to_key = all.range::<[u8], _>((Bound::Unbounded, Bound::Included(key)));
                let last = up_to_key.next_back();
                last.is_some_and(|prefix| key.starts_with(prefix))
            }
            KeyRange::Namespace {
                roots,
                name,
                itself,
            } => {
                let below = |root: &Vec<u8>| key.strip_prefix(&root[..])?.strip_prefix(b"/");
                let parts = roots
                    .iter()
                    .find_map(below)
                    .map(|path| path.split(|b| *b == b'/'));
                let parts: Vec<&[u8]> = parts.into_iter().flatten().collect();
                match *parts {
                    [kind, namespace, _] => namespace == name && !kind.contains(&b'.'),
                    [_, _, namespace, _] => namespace == name,
                    [kind, namespace] => *itself && kind == b"namespaces" && namespace == name,
                    _ => false,
                }
            }
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
        let prefixes = ["/b/", "/a/b", "/a/", "/b/c/"].map(|p| p.as_bytes().to_vec());
        let prefixes = KeyRange::prefixes(prefixes);
        let kept = BTreeSet::from([b"/a/".to_vec(), b"/b/".to_vec()]);
        assert_eq!(prefixes, KeyRange::Prefixes(kept));
        assert!(prefixes.contains(b"/a/bc") && prefixes.contains(b"/b/"));
        assert!(!prefixes.contains(b"/ab"));
        let namespace = KeyRange::Namespace {
            roots: [b"/registry".to_vec()].into(),
            name: b"shop".to_vec(),
            itself: false,
        };
        for key in [
            "pods/shop/a",
            "services/specs/shop/a",
            "example.com/widgets/shop/a",
        ] {
            assert!(
                namespace.contains(format!("/registry/{key}").as_bytes()),
                "{key}"
            );
        }
        for key in [
            "pods/shop",
            "pods/shops/a",
            "example.com/shop/a",
            "namespaces/shop",
            "a/b/c/shop/d",
            "shop/a/b",
        ] {
            assert!(
                !namespace.contains(format!("/registry/{key}").as_bytes()),
                "{key}"
            );
        }
        assert!(!namespace.contains(b"/other/pods/shop/a"));
    }
}
