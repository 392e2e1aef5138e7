//! Human-readable text: results, keys and values.
//!
//! Control characters from a backup are escaped, so that they cannot control the terminal. Long lines are wrapped
//! at the terminal's width. All commands use it.

use super::size;
use super::terminal::{self, Style, marked, width_of};
use crate::base::plural::{count, either};
use crate::base::printable::{line, lines};
use crate::base::shell;
use crate::base::shorten::{self, IN_JSON};
use crate::base::time::{self, Zone};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::key::ObjectKey;
use crate::objects::{Detail, EncryptionKeys, NotDecoded, Object, yaml};
use crate::ops::options::Point;
use chrono::{DateTime, Utc};
use std::borrow::Cow;
use std::fmt::Display;
use std::sync::LazyLock;

/// A result as text: a headline, and below it indented lines with labels.
pub(super) struct Text {
    text: String,
    /// Width of a label in characters.
    width: usize,
    /// Lines are wrapped at this width in characters; `None`: lines are not wrapped.
    wrap_at: Option<usize>,
}

impl Text {
    pub(super) fn new() -> Self {
        Self::with_labels(9)
    }

    /// Creates a text with labels of up to `width` characters.
    pub(super) fn with_labels(width: usize) -> Self {
        Text {
            text: String::new(),
            width,
            wrap_at: terminal::stdout_width(),
        }
    }

    /// Sets the width at which lines are wrapped; `None`: lines are not wrapped.
    pub(super) fn wrapped_at(self, wrap_at: Option<usize>) -> Self {
        Text { wrap_at, ..self }
    }

    /// The width at which lines are wrapped.
    pub(super) fn wrap_at(&self) -> Option<usize> {
        self.wrap_at
    }

    /// Adds a line that is escaped already. If it is wrapped, the following lines are indented by `indent`.
    fn push(&mut self, escaped: &str, indent: usize) {
        match self.wrap_at {
            Some(width) => self.text += &terminal::wrap(escaped, width, indent),
            None => self.text += escaped,
        }
        self.text.push('\n');
    }

    /// Adds a line.
    pub(super) fn line(&mut self, text: impl Display) {
        let text = text.to_string();
        let indent = text.len() - text.trim_start_matches(' ').len();
        self.push(&line(&text), indent + 2);
    }

    /// Adds a line. If it is wrapped, the following lines are indented by `indent`.
    pub(super) fn hanging(&mut self, indent: usize, text: impl Display) {
        self.push(&line(&text.to_string()), indent);
    }

    /// Adds a line that begins with a verdict in a style.
    pub(super) fn verdict(&mut self, style: Style, verdict: impl Display, rest: impl Display) {
        let verdict = marked(style, &line(&verdict.to_string()));
        self.push(&(verdict + &line(&rest.to_string())), 2);
    }

    /// Adds a line with a label. Labels of errors and warnings are coloured.
    pub(super) fn field(&mut self, label: &str, text: impl Display) {
        let width = self.width;
        let padding = " ".repeat(width.saturating_sub(width_of(label)));
        let label = match style_of_label(label) {
            Some(style) => marked(style, label),
            None => label.to_owned(),
        };
        let text = line(&text.to_string()).into_owned();
        self.push(&format!("  {label}{padding} {text}"), width + 3);
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
        for item in shorten::lines(items, IN_JSON) {
            self.field(label, item);
        }
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

    /// Adds a table, whose columns are as wide as their widest cells. Its rows are never wrapped.
    pub(super) fn table(&mut self, header: &[&str], rows: &[Row]) {
        let header = header.iter().map(|&name| name.to_owned()).collect();
        let header = Row::new(header);
        let all: Vec<&Row> = std::iter::once(&header).chain(rows).collect();
        let mut widths = Widths::default();
        for row in &all {
            widths.add(&row.cells);
        }
        for row in all {
            let cells = widths.row(&row.cells, "  ");
            let cells = cells.as_str();
            match row.style {
                Some(style) => self.text += &marked(style, cells),
                None => self.text += cells,
            }
            self.text.push('\n');
        }
    }

    /// Adds a command, quoted for a shell. A long one continues on the next line, one flag a line.
    pub(super) fn command(&mut self, words: &[String]) {
        let mut parts: Vec<String> = Vec::new();
        for word in words {
            let quoted = shell::word(word).into_owned();
            // A flag begins a part, and its value follows it there.
            match parts.last_mut() {
                Some(part) if !word.starts_with("--") => part.extend([" ", &quoted]),
                _ => parts.push(quoted),
            }
        }
        let whole = format!("  {}", parts.join(" "));
        let is_narrow = self.wrap_at.is_some_and(|width| width_of(&whole) > width);
        let command = if is_narrow {
            format!("  {}", parts.join(" \\\n      "))
        } else {
            whole
        };
        self.text += &command;
        self.text.push('\n');
    }

    /// Adds complete lines as they are. The caller has escaped them.
    pub(super) fn block(&mut self, lines: &str) {
        self.text.push_str(lines);
    }

    /// Returns the text.
    pub(super) fn end(self) -> String {
        self.text
    }
}

/// A moment in the local time zone, such as `2026-11-20T14:00:00+01:00`: it can be given as a time again.
pub(super) fn local_time(time: DateTime<Utc>) -> String {
    static ZONE: LazyLock<Zone> = LazyLock::new(Zone::local);
    time::show(time, *ZONE)
}

/// Logs the moment at which a state is read, for commands whose standard output holds the state alone.
pub(super) fn log_time(point: &Point) {
    if let Some(time) = point.time {
        tracing::info!("as of {}", time::utc(time));
    }
}

/// The widest cell of a table, in characters: a longer one is cut.
pub(super) const WIDEST_CELL: usize = 1000;

/// The widths of a table's columns, in characters.
#[derive(Default)]
pub(super) struct Widths(Vec<usize>);

impl Widths {
    /// Makes the columns as wide as the cells of a row.
    pub(super) fn add(&mut self, row: &[String]) {
        self.0.resize(self.0.len().max(row.len()), 0);
        for (widest, cell) in self.0.iter_mut().zip(row) {
            let width = cell.chars().take(WIDEST_CELL).count();
            *widest = width.max(*widest);
        }
    }

    /// Returns a row as a line: each cell is padded to the width of its column, and the end of a cell that is too long
    /// is cut.
    pub(super) fn row(&self, row: &[String], between: &str) -> String {
        let mut text = String::new();
        for (nth, cell) in row.iter().enumerate() {
            let width = cell.chars().count();
            if width > WIDEST_CELL {
                text.extend(cell.chars().take(WIDEST_CELL - 1).chain(['…']));
            } else {
                text.push_str(cell);
            }
            let column = self.0.get(nth).copied().unwrap_or_default();
            text.extend(std::iter::repeat_n(' ', column.saturating_sub(width)));
            text.push_str(between);
        }
        text.truncate(text.trim_end().len());
        text
    }
}

/// A row of a table.
pub(super) struct Row {
    /// Cells on one line each, escaped.
    cells: Vec<String>,
    style: Option<Style>,
}

impl Row {
    pub(super) fn new(cells: Vec<String>) -> Self {
        let cells = cells.iter().map(|c| line(c).into_owned()).collect();
        Row { cells, style: None }
    }

    /// The row in a style.
    pub(super) fn styled(self, style: Style) -> Self {
        Row {
            style: Some(style),
            ..self
        }
    }
}

fn style_of_label(label: &str) -> Option<Style> {
    match label {
        "error" | "failed" => Some(Style::Bad),
        "warning" | "gap" | "failures" => Some(Style::Warning),
        _ => None,
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
    let live = count(live, "live key");
    Some(format!("{live}, {compacted}, HashKV {}", hash?))
}

/// The time of an event, which is RFC 3339 unless somebody else wrote it, as other texts show times.
pub(super) fn event_time(text: &str) -> String {
    match DateTime::parse_from_rfc3339(text) {
        Ok(at) => local_time(at.to_utc()),
        Err(_) => key(text.as_bytes()).into_owned(),
    }
}

/// A key on one line, with bytes escaped that are not text.
pub(super) fn key(key: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(key) {
        Ok(text) => line(text),
        Err(_) => Cow::Owned(key.escape_ascii().to_string()),
    }
}

/// Kind, namespace, name and API version of a Kubernetes object.
pub(super) fn object(o: &ObjectKey<'_>) -> String {
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

/// What is shown of an object.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Shown {
    /// The values of Secrets.
    pub(super) secrets: bool,
    /// `metadata.managedFields`.
    pub(super) managers: bool,
    /// Only what `kubectl apply` takes.
    pub(super) clean: bool,
}

/// A key with its revisions and its value: an object as YAML, other text as it is. The values of Secrets are hidden
/// unless `show_secrets` is set.
pub(super) fn entry(kv: &KeyValue<'_>, keys: &EncryptionKeys, shown: Shown) -> String {
    // The second half of a wrapped comment would be no comment.
    let mut text = Text::new().wrapped_at(None);
    text.line(format_args!("# {}", key(kv.key)));
    let object_key = ObjectKey::from_key(kv.key, Some(kv.value));
    if let Some(o) = &object_key {
        text.line(format_args!("# {}", object(o)));
    }
    let lease = match kv.lease {
        0 => String::new(),
        lease => format!(", lease {lease:x}"),
    };
    text.line(format_args!(
        "# revision {}, created at {}, version {}{lease}",
        kv.mod_revision, kv.create_revision, kv.version
    ));
    let is_secret = object_key.is_some_and(|o| o.resource == "secrets");
    let detail = Detail::with_managers(shown.managers);
    match Object::of_record_with(kv, keys, detail) {
        Ok(mut object) => {
            if shown.clean {
                object.clean();
            }
            if !shown.secrets {
                object.hide_secrets();
            }
            if object.unknown_fields > 0 {
                text.line(format_args!("# {}", unknown_fields(&object)));
            }
            text.block(&yaml::from_object(&object.json));
        }
        Err(NotDecoded::NoObject) if shown.secrets || !is_secret => {
            let value = value(kv.value);
            text.block(value.strip_suffix('\n').unwrap_or(&value));
            text.block("\n");
        }
        Err(e) => text.line(format_args!(
            "# {e} ({}): use --raw or --output json",
            size(kv.value.len() as u64)
        )),
    }
    text.end()
}

/// The indentation of what belongs to a version of an object.
const DETAILS: usize = 4;

/// Lines with the managers and the changed fields of a version of an object. The values of Secrets are hidden unless
/// `show_secrets` is set.
pub(super) fn changes(object: &Object, before: Option<&Object>, show_secrets: bool) -> String {
    let mut lines = Vec::new();
    let managers = object.managers_since(before);
    if !managers.is_empty() {
        lines.push(format!("by {}", managers.join(", ")));
    }
    let changes = before.map(|before| object.changes_since(before));
    for change in changes.unwrap_or_default() {
        let is_hidden = !show_secrets && object.is_secret_field(&change.path);
        lines.push(change.text(is_hidden));
    }
    let mut text = Text::new();
    for line in shorten::lines(&lines, IN_JSON) {
        text.hanging(DETAILS + 2, format_args!("{:DETAILS$}{line}", ""));
    }
    text.end()
}

/// A note about fields that an object has in the backup and that are not shown.
pub(super) fn unknown_fields(object: &Object) -> String {
    format!(
        "{} not shown: this program does not know {}. The bytes have all: --raw",
        count(object.unknown_fields, "field"),
        either(object.unknown_fields, "it", "them")
    )
}

/// A value that is no object of Kubernetes.
fn value(value: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(value) {
        Ok("") => Cow::Borrowed("# empty"),
        Ok(text) if !text.contains('\0') => match serde_json::from_str(text) {
            Ok(serde_json::Value::Object(object)) => Cow::Owned(yaml::from_object(&object)),
            _ => lines(text),
        },
        _ => Cow::Owned(format!(
            "# {} of binary data: use --raw or --output json",
            size(value.len() as u64)
        )),
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
    fn long_lines_are_wrapped_below_their_text_and_tables_are_not() {
        let mut text = Text::new().wrapped_at(Some(30));
        text.verdict(Style::Bad, "failed", ": one of the chains");
        text.field("error", "the deltas have a gap [RevisionGap]");
        text.table(
            &["NAME", "FLAGS"],
            &[Row::new(vec!["x".repeat(40), "a\u{fdd1}b".to_owned()])],
        );
        let shown = terminal::render(&text.end(), false);
        let table = format!(
            "NAME{}  FLAGS\n{}  a\\u{{fdd1}}b\n",
            " ".repeat(36),
            "x".repeat(40)
        );
        let expected = "failed: one of the chains\n  error     the deltas have a\n            gap [RevisionGap]\n";
        assert_eq!(shown, expected.to_owned() + &table);
    }

    /// Once, the width of a format string was exceeded, and nothing was printed.
    #[test]
    fn a_tenants_image_name_of_66_000_characters_is_cut() {
        let rows = ["é".repeat(66_000), "b".to_owned()].map(|cell| vec![cell, "x".to_owned()]);
        let mut widths = Widths::default();
        rows.iter().for_each(|row| widths.add(row));
        let shown = rows.map(|row| widths.row(&row, "  "));
        assert_eq!(shown[0].chars().count(), WIDEST_CELL + 3);
        assert!(shown[0].ends_with("é…  x"), "{}", shown[0]);
        assert_eq!(shown[1], format!("b{}  x", " ".repeat(WIDEST_CELL - 1)));
    }

    #[test]
    fn a_command_can_be_copied_into_a_shell() {
        let shown = |words: &[&str], width| {
            let words: Vec<String> = words.iter().map(|&w| w.to_owned()).collect();
            let mut text = Text::new().wrapped_at(width);
            text.command(&words);
            text.end()
        };
        let words = ["etcd", "--name", "it's", "--data-dir", "/a b/c$d"];
        let one_line = "  etcd --name 'it'\\''s' --data-dir '/a b/c$d'\n";
        assert_eq!(shown(&words, None), one_line);
        let lines = "  etcd \\\n      --name 'it'\\''s' \\\n      --data-dir '/a b/c$d'\n";
        assert_eq!(shown(&words, Some(40)), lines);
        assert_eq!(shown(&["etcd", ""], None), "  etcd ''\n");
    }

    #[test]
    fn values_are_shown_as_yaml_text_or_size() {
        assert_eq!(value(b"{\"b\":1,\"a\":[\"yes\"]}"), "a:\n- \"yes\"\nb: 1\n");
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
        let shown = entry(&kv, &EncryptionKeys::default(), Shown::default());
        let expected = "# /registry/widgets/a/b\n# widgets a/b\n# revision 0, created at 0, version 0, lease ff\nx\n";
        assert_eq!(shown, expected);
    }
}
