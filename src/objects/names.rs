//! A search for objects and keys by words in their names.

use super::resource::Resource;

/// Words that are searched for, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameSearch(Vec<String>);

impl NameSearch {
    /// Reads words between spaces and slashes, such as `deploy checkout` or `configmap/shop/settings`.
    pub fn parse(text: &str) -> Self {
        let words = text.split(|c: char| c.is_whitespace() || c == '/');
        let words = words.filter(|word| !word.is_empty());
        NameSearch(words.map(str::to_lowercase).collect())
    }

    /// Returns how well a key is meant: 0 if the last word is its name, and more for Events than for all else; `None` if it lacks
    /// a word. A word may also be any name of its kind.
    pub fn rank(&self, kind: Option<&Resource>, key: &[u8]) -> Option<u8> {
        let path = String::from_utf8_lossy(key).to_lowercase();
        let is_kind = |word: &str| kind.is_some_and(|kind| kind.is_called(word));
        let has = |word: &String| path.contains(word.as_str()) || is_kind(word);
        if !self.0.iter().all(has) {
            return None;
        }
        let name = path.rsplit('/').next().unwrap_or_default();
        let last = self.0.last().map_or("", String::as_str);
        let is_event = kind.is_some_and(|kind| kind.kind == "Event");
        let of_name = match name.strip_prefix(last) {
            Some("") => 0,
            Some(_) => 1,
            None => 2,
        };
        Some(of_name + if is_event { 3 } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_mean_what_kubectl_writes() {
        let kind = Resource::built_in().find(|r| r.kind == "Deployment");
        let rank = |words: &str| {
            NameSearch::parse(words).rank(kind.as_ref(), b"/registry/deployments/shop/checkout")
        };
        for (words, expected) in [
            ("deploy checkout", Some(0)),
            ("Deployment/shop/Checkout", Some(0)),
            ("checkout", Some(0)),
            ("check", Some(1)),
            ("out", Some(2)),
            ("/registry/deployments/shop/checkout", Some(0)),
            ("configmap checkout", None),
            ("checkout2", None),
        ] {
            assert_eq!(rank(words), expected, "{words}");
        }
        assert_eq!(NameSearch::parse("a").rank(None, b"\xffa"), Some(2));
    }
}
