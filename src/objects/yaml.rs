//! Writes JSON as YAML that kubectl reads as the same value.
//!
//! Strings that YAML 1.1 takes for something else, such as `yes` and `1_0`, are quoted, and so are strings with
//! characters that control a terminal. Quoted strings are JSON strings, which are YAML too. A crate for YAML 1.2
//! quotes neither. `cli` calls it.

use crate::base::printable::{is_unsafe, json};
use serde_json::{Map, Value};
use std::fmt::Write;

/// The longest key that is written before a colon, in bytes. YAML 1.2 permits 1,024 characters; a longer key follows a
/// question mark.
const LONGEST_SIMPLE_KEY: usize = 1000;

/// Returns the fields of an object as YAML, one or more lines each, in their order.
pub fn from_object(object: &Map<String, Value>) -> String {
    let mut out = String::new();
    if object.is_empty() {
        out.push_str("{}\n");
    }
    write_map(&mut out, object, 0);
    out
}

/// Returns a list item with an object as YAML.
pub fn from_item(object: &Map<String, Value>) -> String {
    let mut out = String::new();
    write_item(&mut out, object, 0);
    out
}

fn write_map(out: &mut String, map: &Map<String, Value>, indent: usize) {
    for (nth, (key, value)) in map.iter().enumerate() {
        // The first field of a list's element follows its dash.
        if nth > 0 || !out.ends_with("- ") {
            write_indent(out, indent);
        }
        let begin = out.len();
        write_string(out, key);
        if out.len() - begin > LONGEST_SIMPLE_KEY {
            out.insert_str(begin, "? ");
            out.push('\n');
            write_indent(out, indent);
        }
        out.push(':');
        write_value(out, value, indent);
    }
}

/// Writes a value after its key.
fn write_value(out: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            out.push('\n');
            write_map(out, map, indent + 2);
        }
        Value::Array(list) if !list.is_empty() => {
            out.push('\n');
            for element in list {
                write_element(out, element, indent);
            }
        }
        Value::String(text) if is_block(text) => write_block(out, text, indent + 2),
        other => {
            out.push(' ');
            write_scalar(out, other);
        }
    }
}

/// Writes an element of a list.
fn write_element(out: &mut String, element: &Value, indent: usize) {
    match element {
        Value::Object(map) if !map.is_empty() => write_item(out, map, indent),
        Value::Array(list) if !list.is_empty() => {
            write_indent(out, indent);
            out.push_str("-\n");
            for element in list {
                write_element(out, element, indent + 2);
            }
        }
        Value::String(text) if is_block(text) => {
            write_indent(out, indent);
            out.push('-');
            write_block(out, text, indent + 2);
        }
        other => {
            write_indent(out, indent);
            out.push_str("- ");
            write_scalar(out, other);
        }
    }
}

fn write_item(out: &mut String, map: &Map<String, Value>, indent: usize) {
    write_indent(out, indent);
    out.push_str("- ");
    if map.is_empty() {
        out.push_str("{}\n");
    }
    write_map(out, map, indent + 2);
}

fn write_scalar(out: &mut String, value: &Value) {
    match value {
        Value::String(text) => write_string(out, text),
        // Empty lists and objects, numbers, booleans and null.
        other => drop(write!(out, "{other}")),
    }
    out.push('\n');
}

fn write_string(out: &mut String, text: &str) {
    if is_plain(text) {
        out.push_str(text);
    } else {
        let quoted = Value::from(text).to_string();
        for c in json(&quoted).chars() {
            match c {
                c if is_printable(c) => out.push(c),
                c => drop(write!(out, "\\u{:04x}", u32::from(c))),
            }
        }
    }
}

/// Whether YAML takes a character as it is. YAML 1.2, production `c-printable`; a byte order mark within a text is
/// refused by some parsers.
fn is_printable(c: char) -> bool {
    !is_unsafe(c) && !matches!(c, '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

/// Whether a text of several lines can be a literal block, which shows every line as it is.
fn is_block(text: &str) -> bool {
    text.trim_end_matches('\n').contains('\n')
        && !text.starts_with([' ', '\t', '\n'])
        && text
            .chars()
            .all(|c| matches!(c, '\n' | '\t') || is_printable(c))
}

fn write_block(out: &mut String, text: &str, indent: usize) {
    // The number of line ends is kept.
    out.push_str(match text.strip_suffix('\n') {
        None => " |-\n",
        Some(rest) if rest.ends_with('\n') => " |+\n",
        Some(_) => " |\n",
    });
    for line in text.strip_suffix('\n').unwrap_or(text).split('\n') {
        if !line.is_empty() {
            write_indent(out, indent);
            out.push_str(line);
        }
        out.push('\n');
    }
}

fn write_indent(out: &mut String, indent: usize) {
    out.extend(std::iter::repeat_n(' ', indent));
}

/// Whether every YAML parser reads an unquoted text as this string.
fn is_plain(text: &str) -> bool {
    const WORDS: [&str; 11] = [
        "y", "yes", "on", "n", "no", "off", "true", "false", "null", "~", ".inf",
    ];
    let may_begin_number = |c: char| c.is_ascii_digit() || "+-.".contains(c);
    let is_number = text.starts_with(may_begin_number)
        && text.contains(|c: char| c.is_ascii_digit())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_+.:-".contains(c));
    let is_word = WORDS.iter().any(|word| word.eq_ignore_ascii_case(text));
    let begins_plain = text.starts_with(|c: char| c.is_alphanumeric() || "/._(+".contains(c));
    let ends_plain = !text.ends_with([' ', ':']);
    begins_plain
        && ends_plain
        && !is_number
        && !is_word
        && !text.contains(": ")
        && !text.contains(" #")
        && text.chars().all(is_printable)
        && !text.starts_with("...")
        && !is_nan(text)
}

/// Whether a YAML parser reads the text as NaN, as infinity or as a merge key.
fn is_nan(text: &str) -> bool {
    [".nan", "+.inf", "-.inf", "<<"]
        .iter()
        .any(|word| word.eq_ignore_ascii_case(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns random text that likes what YAML takes for something else.
    fn text(rng: &mut fastrand::Rng) -> String {
        const PIECES: [&str; 43] = [
            "a",
            "yes",
            "1",
            "_0",
            ":",
            " ",
            "#",
            "-",
            "\n",
            "\n\n",
            "\t",
            "'",
            "\"",
            "\\",
            "{",
            "}",
            "[",
            "]",
            ",",
            "&",
            "*",
            "!",
            "|",
            ">",
            "%",
            "@",
            "`",
            "?",
            "~",
            ".",
            "0x1",
            "é",
            "\u{202e}",
            "\u{85}",
            "\u{1b}",
            "\r",
            "\u{feff}",
            "null",
            "=",
            "<<",
            "\u{fffe}",
            "\u{ffff}",
            "\u{1ffff}",
        ];
        let pieces = (0..rng.usize(..6)).map(|_| PIECES[rng.usize(..PIECES.len())]);
        let text: String = pieces.collect();
        match rng.u8(..20) {
            // Longer than what a parser looks at for a colon.
            0 => text + &"k".repeat(1100),
            _ => text,
        }
    }

    fn value(rng: &mut fastrand::Rng, depth: usize) -> Value {
        match rng.u8(..if depth < 4 { 8 } else { 5 }) {
            0 => Value::Null,
            1 => rng.bool().into(),
            2 => rng.i64(..).into(),
            3 | 4 => text(rng).into(),
            5 => (0..rng.usize(..4)).map(|_| value(rng, depth + 1)).collect(),
            _ => Value::Object(object(rng, depth + 1)),
        }
    }

    fn object(rng: &mut fastrand::Rng, depth: usize) -> Map<String, Value> {
        (0..rng.usize(..4))
            .map(|_| (text(rng), value(rng, depth)))
            .collect()
    }

    #[test]
    fn whatever_is_written_is_read_back() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..20_000 {
            let object = object(&mut rng, 0);
            let yaml = from_object(&object);
            let read: Value = yaml_serde::from_str(&yaml)
                .unwrap_or_else(|e| panic!("{e} in\n{yaml}\nfrom {object:?}"));
            assert_eq!(read, Value::Object(object), "\n{yaml}");
            assert!(
                !yaml.chars().any(|c| !"\n\t".contains(c) && is_unsafe(c)),
                "{yaml:?}"
            );
        }
    }

    #[test]
    fn strings_are_quoted_only_if_they_must_be() {
        let object = json!({
            "annotations": {"a/b": "x: y", "on": "12:30", "version": "1.10", "flag": "No", "now": "now"},
            "args": ["--v=2", "-", "a b", "", ["x"], {}],
            "data": {"app.conf": "a = 1\n  b\n", "last": "a\n\nb", "left": "a\nb\n\n"},
            "image": "registry.k8s.io/pause:3.10",
            "items": [{"name": "a", "ports": [{"port": 80}]}],
            "time": "2026-11-20T12:00:00Z",
        });
        let expected = r#"annotations:
  a/b: "x: y"
  flag: "No"
  now: now
  "on": "12:30"
  version: "1.10"
args:
- "--v=2"
- "-"
- a b
- ""
-
  - x
- {}
data:
  app.conf: |
    a = 1
      b
  last: |-
    a

    b
  left: |+
    a
    b

image: registry.k8s.io/pause:3.10
items:
- name: a
  ports:
  - port: 80
time: "2026-11-20T12:00:00Z"
"#;
        assert_eq!(from_object(object.as_object().unwrap()), expected);
    }
}
