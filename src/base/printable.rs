//! Text from elsewhere, as people are shown it: names of objects, keys, messages of servers.
//!
//! Nothing of it steers the terminal or forges a line: control characters and those that change the direction of
//! writing are spelled out. JSON has escapes of its own, and what is asked for raw stays raw.

use std::borrow::Cow;

/// Characters that change what a terminal does, or in which direction it writes.
fn steers(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        || c.is_control()
}

/// Text with its control characters spelled out, but for those that `allowed` lets through.
pub(crate) fn harmless(text: &str, allowed: fn(char) -> bool) -> Cow<'_, str> {
    let bad = |c: char| steers(c) && !allowed(c);
    if !text.chars().any(bad) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match bad(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Text that has one line.
pub(crate) fn line(text: &str) -> Cow<'_, str> {
    harmless(text, |_| false)
}

/// Text that has lines and columns of its own.
pub(crate) fn lines(text: &str) -> Cow<'_, str> {
    harmless(text, |c| matches!(c, '\n' | '\t'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_steers_gets_through() {
        let hostile = "a\u{1b}[2J\u{9b}31m\r\n\t\u{7f}\0\u{85}\u{202e}\u{2066}\u{200f}ü 語";
        let shown =
            "a\\u{1b}[2J\\u{9b}31m\\r\\n\\t\\u{7f}\\u{0}\\u{85}\\u{202e}\\u{2066}\\u{200f}ü 語";
        assert_eq!(line(hostile), shown);
        assert_eq!(lines("a\n\tb\r\u{1b}"), "a\n\tb\\r\\u{1b}");
        assert!(matches!(line("plain ü"), Cow::Borrowed(_)));
    }
}
