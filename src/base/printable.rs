//! Makes untrusted text safe to print: names of objects, keys, messages of servers.
//!
//! Control characters and characters that change the writing direction are escaped, so that the text can
//! neither control the terminal nor forge a line. The noncharacters U+FDD0 to U+FDEF are escaped, too: `cli` marks
//! styles with them. Raw output (`get --raw`) is not escaped. Messages are cut to 1 KiB.

use std::borrow::Cow;
use std::io::{self, Write};

/// The longest message, in bytes. A server may refuse with megabytes of text.
const LONGEST_MESSAGE: usize = 1024;
/// How many bytes at the end of a message stay, which say what to do.
const END_OF_MESSAGE: usize = 256;

/// Whether a character controls the terminal, changes the writing direction, or marks a style.
pub(crate) fn is_unsafe(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fdd0}'..='\u{fdef}')
        || c.is_control()
}

/// Escapes the unsafe characters of a text, except those for which `allowed` is true.
pub(crate) fn escape_unsafe(text: &str, allowed: fn(char) -> bool) -> Cow<'_, str> {
    replace_unsafe(text, allowed, |out, c| out.extend(c.escape_default()))
}

/// Replaces the unsafe characters of a text, except those for which `allowed` is true, with what `escape` appends.
fn replace_unsafe(
    text: &str,
    allowed: fn(char) -> bool,
    escape: fn(&mut String, char),
) -> Cow<'_, str> {
    let escaped = |c: char| is_unsafe(c) && !allowed(c);
    if !text.chars().any(escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if escaped(c) {
            escape(&mut out, c)
        } else {
            out.push(c)
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

/// Cuts out the middle of a message that is longer than 1 KiB.
pub(crate) fn message(text: String) -> String {
    if text.len() <= LONGEST_MESSAGE {
        return text;
    }
    let begin = text.floor_char_boundary(LONGEST_MESSAGE - END_OF_MESSAGE - '…'.len_utf8());
    let end = text.ceil_char_boundary(text.len() - END_OF_MESSAGE);
    format!("{}…{}", &text[..begin], &text[end..])
}

/// Escapes the unsafe characters of JSON, which are all in its strings. A parser reads the same values.
pub(crate) fn json(text: &str) -> Cow<'_, str> {
    // No unsafe character needs more than 16 bits.
    let escape = |out: &mut String, c| *out += &format!("\\u{:04x}", u32::from(c));
    replace_unsafe(text, |c| c == '\n', escape)
}

/// A writer of JSON that [escapes](json) it. Serializers never end a write within a character.
pub(crate) struct SafeJson<W>(pub W);

impl<W: Write> Write for SafeJson<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = std::str::from_utf8(bytes).map_err(io::Error::other)?;
        self.0.write_all(json(text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
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

    #[test]
    fn json_is_escaped_and_reads_as_before() {
        let hostile = "a\u{1b}\u{9b}31m\n\u{7f}\u{202e}\u{2066}ü 語";
        let raw = serde_json::to_string_pretty(&[hostile]).unwrap();
        let mut written = Vec::new();
        serde_json::to_writer_pretty(SafeJson(&mut written), &[hostile]).unwrap();
        let escaped = "[\n  \"a\\u001b\\u009b31m\\n\\u007f\\u202e\\u2066ü 語\"\n]";
        assert_eq!(json(&raw), escaped);
        assert_eq!(written, escaped.as_bytes());
        let read: [String; 1] = serde_json::from_str(escaped).unwrap();
        assert_eq!(read, [hostile]);
    }

    #[test]
    fn a_message_has_at_most_1_kib() {
        let long = |n: usize| format!("cannot read x: {}: look", "ü".repeat(n));
        assert_eq!(message(long(500)), long(500));
        let cut = message(long(1 << 20));
        assert!((1000..=1024).contains(&cut.len()), "{}", cut.len());
        assert!(
            cut.starts_with("cannot read x: ü") && cut.ends_with("ü: look"),
            "{cut}"
        );
    }
}
