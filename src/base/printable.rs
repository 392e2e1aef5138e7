//! Makes untrusted text safe to print: names of objects, keys, messages of servers.
//!
//! Control characters and characters that change the writing direction are escaped, so that the text can
//! neither control the terminal nor forge a line. The noncharacters U+FDD0 to U+FDEF are escaped, too: `cli` marks
//! styles with them. JSON output escapes by itself, and raw output (`get --raw`)
//! is not escaped.

use std::borrow::Cow;

/// Whether a character controls the terminal, changes the writing direction, or marks a style.
fn is_unsafe(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fdd0}'..='\u{fdef}')
        || c.is_control()
}

/// Escapes the unsafe characters of a text, except those for which `allowed` is true.
pub(crate) fn escape_unsafe(text: &str, allowed: fn(char) -> bool) -> Cow<'_, str> {
    let escaped = |c: char| is_unsafe(c) && !allowed(c);
    if !text.chars().any(escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match escaped(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Escapes a text for one line: line feeds and tabs, too.
pub(crate) fn line(text: &str) -> Cow<'_, str> {
    escape_unsafe(text, |_| false)
}

/// Escapes a text of several lines: line feeds and tabs stay.
pub(crate) fn lines(text: &str) -> Cow<'_, str> {
    escape_unsafe(text, |c| matches!(c, '\n' | '\t'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_characters_are_escaped() {
        let hostile = "a\u{1b}[2J\u{9b}31m\r\n\t\u{7f}\0\u{85}\u{202e}\u{2066}\u{200f}ü 語";
        let shown =
            "a\\u{1b}[2J\\u{9b}31m\\r\\n\\t\\u{7f}\\u{0}\\u{85}\\u{202e}\\u{2066}\\u{200f}ü 語";
        assert_eq!(line(hostile), shown);
        assert_eq!(lines("a\n\tb\r\u{1b}"), "a\n\tb\\r\\u{1b}");
        assert!(matches!(line("plain ü"), Cow::Borrowed(_)));
    }
}
