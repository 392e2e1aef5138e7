//! Human-readable text: results, keys and values.
//!
//! Control characters from a backup are escaped, so that they cannot control the terminal. All commands use
//! it.

use super::size;
use crate::base::printable::{escape_unsafe, line, lines};
use crate::base::shorten::{self, IN_JSON};
use crate::mvcc::{KeyValue, Revision};
use crate::ops::read::kubernetes::Object;
use std::borrow::Cow;
use std::fmt::Display;

/// A result as text: a headline, and below it indented lines with labels.
pub(super) struct Text {
    text: String,
    /// Width of a label in characters.
    width: usize,
}

impl Text {
    pub(super) fn new() -> Self {
        Self::with_labels(9)
    }

    /// Creates a text with labels of up to `width` characters.
    pub(super) fn with_labels(width: usize) -> Self {
        let text = String::new();
        Text { text, width }
    }

    /// Adds a line.
    pub(super) fn line(&mut self, text: impl Display) {
        self.text.extend([&line(&text.to_string()), "\n"]);
    }

    /// Adds a line with a label.
    pub(super) fn field(&mut self, label: &str, text: impl Display) {
        let width = self.width;
        self.line(format_args!("  {label:width$} {text}"));
    }

    /// Adds a line with a label, if there is a text.
    pub(super) fn maybe(&mut self, label: &str, text: Option<impl Display>) {
        if let Some(text) = text {
            self.field(label, text);
        }
    }

    /// Adds a line `prefix` + item for each item; a long list is shortened.
    pub(super) fn items<T: Display>(&mut self, prefix: &str, items: &[T]) {
        for item in shorten::lines(items, IN_JSON) {
            self.line(format_args!("{prefix}{item}"));
        }
    }

    /// Adds a line with a label for each item; a long list is shortened.
    pub(super) fn list<T: Display>(&mut self, label: &str, items: &[T]) {
        let width = self.width;
        self.items(&format!("  {label:width$} "), items);
    }

    /// Adds a line with a label for each text.
    pub(super) fn each<T: Display>(&mut self, label: &str, texts: impl IntoIterator<Item = T>) {
        for text in texts {
            self.field(label, text);
        }
    }

    /// Adds the names of the base snapshot and of the folded deltas.
    pub(super) fn from(&mut self, base: &str, deltas: &[String]) {
        self.field("from", base);
        self.list("", deltas);
    }

    /// Adds complete lines.
    pub(super) fn block(&mut self, lines: &str) {
        self.text.push_str(lines);
    }

    /// Returns the text.
    pub(super) fn end(self) -> String {
        self.text
    }
}

/// The compacted revision of a database, in words.
pub(super) fn compacted(at: Revision) -> String {
    match at {
        Revision::NONE => "never compacted".to_owned(),
        at => format!("compacted at {at}"),
    }
}

/// The content of a new database, in words; `None` if it is not known.
pub(super) fn holds(
    live_keys: Option<u64>,
    compact: Option<Revision>,
    hash: Option<u32>,
) -> Option<String> {
    let (live, compacted) = (live_keys?, compacted(compact?));
    Some(format!("{live} live keys, {compacted}, HashKV {}", hash?))
}

/// A key on one line, with bytes escaped that are not text.
pub(super) fn key(key: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(key) {
        Ok(text) => line(text),
        Err(_) => Cow::Owned(key.escape_ascii().to_string()),
    }
}

/// Kind, namespace, name and API version of a Kubernetes object.
pub(super) fn object(o: &Object<'_>) -> String {
    let kind = o.kind.as_deref().unwrap_or(o.resource);
    let namespace = o.namespace.map(|n| format!("{n}/")).unwrap_or_default();
    let version = o.api_version.as_ref().map(|v| format!(" ({v})"));
    let text = format!(
        "{kind} {namespace}{}{}",
        o.name,
        version.unwrap_or_default()
    );
    line(&text).into_owned()
}

/// A key with its revisions and its value; a JSON object is shown as YAML.
pub(super) fn entry(kv: &KeyValue<'_>) -> String {
    let mut text = Text::new();
    text.line(format_args!("# {}", key(kv.key)));
    if let Some(o) = Object::from_key(kv.key, Some(kv.value)) {
        text.line(format_args!("# {}", object(&o)));
    }
    let lease = match kv.lease {
        0 => String::new(),
        lease => format!(", lease {lease:x}"),
    };
    text.line(format_args!(
        "# revision {}, created at {}, version {}{lease}",
        kv.mod_revision, kv.create_revision, kv.version
    ));
    let value = value(kv.value);
    text.block(value.strip_suffix('\n').unwrap_or(&value));
    text.block("\n");
    text.end()
}

fn value(value: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(value) {
        Ok("") => Cow::Borrowed("# empty"),
        Ok(text) if !text.contains('\0') => match yaml(text) {
            Some(yaml) => Cow::Owned(yaml),
            None => lines(text),
        },
        _ => Cow::Owned(format!(
            "# {} of binary data: use --raw or --output json",
            size(value.len() as u64)
        )),
    }
}

/// Marks a string that must be quoted, until it is quoted.
const QUOTE: char = '\u{e000}';

/// A JSON object as YAML, with its fields in the same order; `None` if the text is not a JSON object.
fn yaml(text: &str) -> Option<String> {
    if !text.trim_start().starts_with('{') || text.contains(QUOTE) {
        return None;
    }
    let mut value: yaml_serde::Value = serde_json::from_str(text).ok()?;
    mark_ambiguous(&mut value);
    let marked = yaml_serde::to_string(&value).ok()?;
    let mut parts = marked.split(QUOTE);
    let mut yaml = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c| !is_word_char(c)).unwrap_or(part.len());
        yaml.extend(["\"", &part[..end], "\"", &part[end..]]);
    }
    Some(escape_unsafe(&yaml, |c| c == '\n').into_owned())
}

fn is_word_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_+.-".contains(c)
}

/// Whether a YAML 1.1 parser, such as kubectl's, would not read an unquoted string as a string.
fn is_ambiguous(s: &str) -> bool {
    const WORDS: [&str; 10] = [
        "y", "yes", "on", "n", "no", "off", "true", "false", "null", ".inf",
    ];
    let is_number = s.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c))
        && s.contains(|c: char| c.is_ascii_digit());
    s.chars().all(is_word_char) && (is_number || WORDS.contains(&s.to_ascii_lowercase().as_str()))
}

/// Puts [`QUOTE`] before each ambiguous string.
fn mark_ambiguous(value: &mut yaml_serde::Value) {
    use yaml_serde::Value;
    match value {
        Value::String(s) if is_ambiguous(s) => s.insert(0, QUOTE),
        Value::Sequence(items) => items.iter_mut().for_each(mark_ambiguous),
        Value::Mapping(fields) => {
            for (mut name, mut value) in std::mem::take(fields) {
                mark_ambiguous(&mut name);
                mark_ambiguous(&mut value);
                fields.insert(name, value);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(key(b"a\x1b[2Jb\nc\x7f"), "a\\u{1b}[2Jb\\nc\\u{7f}");
        assert_eq!(key(b"\xff\x1b"), "\\xff\\x1b");
        assert_eq!(key("schlüssel/鍵".as_bytes()), "schlüssel/鍵");
        assert_eq!(
            value(b"one\n\ttwo\r\x1b]0;x\x07"),
            "one\n\ttwo\\r\\u{1b}]0;x\\u{7}"
        );
        assert_eq!(value("a\u{202e}b\u{9b}".as_bytes()), "a\\u{202e}b\\u{9b}");
        let shown = value(br#"{"b":"\u001b[2J","a":[1,"\u202e"]}"#);
        assert!(
            !shown.chars().any(|c| c.is_control() && c != '\n'),
            "{shown}"
        );
    }

    #[test]
    fn values_are_shown_as_yaml_text_or_size() {
        assert_eq!(
            value(b"{\"b\":1,\"a\":{\"x\":[\"yes\",null]}}"),
            "b: 1\na:\n  x:\n  - \"yes\"\n  - null\n"
        );
        let shown =
            value(br#"{"on":"1_0","v":["1.10","-","0x1f","No","now",".","12:30","","a b"]}"#);
        let expected = "\"on\": \"1_0\"\nv:\n- \"1.10\"\n- '-'\n- \"0x1f\"\n- \"No\"\n- now\n- .\n- 12:30\n- ''\n- a b\n";
        assert_eq!(shown, expected);
        assert_eq!(value(b"{\"b\":1"), "{\"b\":1");
        assert_eq!(value(b"[1]"), "[1]");
        assert_eq!(value(b""), "# empty");
        assert!(value(b"k8s\0\xff").contains("5 B of binary data"));
        let kv = KeyValue {
            key: b"/registry/widgets/a/b",
            lease: 255,
            value: b"x",
            ..KeyValue::default()
        };
        let shown = entry(&kv);
        let expected = "# /registry/widgets/a/b\n# widgets a/b\n# revision 0, created at 0, version 0, lease ff\nx\n";
        assert_eq!(shown, expected);
    }
}
