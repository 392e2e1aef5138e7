//! Numbers with their nouns: `1 key`, `2 keys`.
//!
//! All nouns that are counted here take an s. Texts and messages of all rooms use it.

use std::fmt::Display;

/// Formats a number with its noun, which is given in the singular.
pub(crate) fn count<N: Copy + Display>(n: N, noun: &str) -> String {
    let n = n.to_string();
    match n.as_str() {
        "1" => format!("1 {noun}"),
        _ => format!("{n} {noun}s"),
    }
}

/// Returns `one` if the number is 1, otherwise `many`: for verbs.
pub(crate) fn either<'a, N: Copy + Display>(n: N, one: &'a str, many: &'a str) -> &'a str {
    match n.to_string().as_str() {
        "1" => one,
        _ => many,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_is_singular() {
        assert_eq!(count(0, "key"), "0 keys");
        assert_eq!(count(1u64, "live key"), "1 live key");
        assert_eq!(count(21usize, "delta"), "21 deltas");
        assert_eq!(
            (either(1, "is", "are"), either(0, "is", "are")),
            ("is", "are")
        );
    }
}
