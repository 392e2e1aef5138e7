//! Human-readable text: results, keys and values.
//!
//! Control characters from a backup are escaped, so that they cannot control the terminal. Long lines are wrapped
//! at the terminal's width. All commands use it.

use super::render::{self, Blocks};
use super::size;
use super::terminal;
use crate::base::plural::{count, either};
use crate::base::printable::{line, lines};
use crate::base::shorten::{self, IN_JSON};
use crate::base::time::{self, Zone};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::key::ObjectKey;
use crate::objects::{Detail, EncryptionKeys, NotDecoded, Object, yaml};
use crate::ops::findings::Finding;
use crate::ops::options::Point;
use crate::ops::read::deleted::Deletion;
use crate::prefix::restorable::Restorable;
use chrono::{DateTime, Utc};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::sync::LazyLock;

/// A moment in the local time zone, such as `2026-11-20T14:00:00+01:00`: it can be given as a time again.
pub(super) fn local_time(time: DateTime<Utc>) -> String {
    static ZONE: LazyLock<Zone> = LazyLock::new(Zone::local);
    time::show(time, *ZONE)
}

/// Says at which moment a state is read, for commands whose standard output holds the state alone.
pub(super) fn log_time(point: &Point) {
    let Some(time) = point.time else {
        return;
    };
    let text = format!("as of {}", time::utc(time));
    if tracing::enabled!(tracing::Level::INFO) {
        tracing::info!("{text}");
    } else if tracing::enabled!(tracing::Level::WARN) {
        // Beside an answer there is no log: the line stands alone. If it cannot be written, the answer is still right.
        let _ = writeln!(std::io::stderr(), "{text}");
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

/// Adds findings. Of each reason, only the first ones are listed.
pub(super) fn add_findings(findings: &[Finding], text: &mut Blocks) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut shown = HashSet::new();
    for finding in findings {
        let (message, reason) = (&finding.message, finding.reason);
        if !shown.insert((reason, message, &finding.snapshots)) {
            continue;
        }
        let count = counts.entry(reason).or_default();
        *count += 1;
        if *count > shorten::WHOLE {
            continue;
        }
        let label = if finding.is_error() { "error" } else { "note" };
        text.field(label, format!("{message} [{reason}]"));
        // A message about one snapshot often names it.
        let paths = finding.snapshots.iter();
        let unnamed = paths.filter(|path| !message.contains(path.as_str()));
        text.list("", &unnamed.collect::<Vec<_>>());
        if let (true, Some(remedy)) = (finding.is_error(), &finding.remedy) {
            text.field("", format!("next: {remedy}"));
        }
    }
    for (reason, n) in counts {
        if n > shorten::WHOLE {
            let more = shorten::more(n - shorten::WHOLE, IN_JSON);
            text.field("", format!("[{reason}]: {more}"));
        }
    }
}

/// Adds the ranges that can be restored.
pub(super) fn add_ranges(label: &str, ranges: &[Restorable], text: &mut Blocks) {
    let mut lines = Vec::new();
    for r in ranges {
        let (from, to) = (local_time(r.first_time), local_time(r.last_time));
        lines.push(format!(
            "revisions {} on {}, {from} to {to}",
            r.revisions(),
            r.timeline
        ));
    }
    text.list(label, &lines);
}

/// The time of an event, which is RFC 3339 unless somebody else wrote it, as other texts show times.
pub(super) fn event_time(text: &str) -> String {
    match DateTime::parse_from_rfc3339(text) {
        Ok(at) => local_time(at.to_utc()),
        Err(_) => key(text.as_bytes()).into_owned(),
    }
}

/// When a key was deleted, as far as that is known.
pub(super) fn deletion_time(deletion: &Deletion) -> Option<String> {
    let by = |taken| format!("by {}", event_time(taken));
    let time = deletion.time.as_deref().map(event_time);
    time.or(deletion.not_after.as_deref().map(by))
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
///
/// # Errors
/// `Items` if a clean object is asked for, and kubectl would take it for a list.
pub(super) fn entry(
    kv: &KeyValue<'_>,
    keys: &EncryptionKeys,
    shown: Shown,
) -> Result<String, NotDecoded> {
    let mut text = format!("# {}\n", key(kv.key));
    let object_key = ObjectKey::from_key(kv.key, Some(kv.value));
    if let Some(o) = &object_key {
        text += &format!("# {}\n", object(o));
    }
    let lease = match kv.lease {
        0 => String::new(),
        lease => format!(", lease {lease:x}"),
    };
    text += &format!(
        "# revision {}, created at {}, version {}{lease}\n",
        kv.mod_revision, kv.create_revision, kv.version
    );
    let is_secret = object_key.is_some_and(|o| o.resource == "secrets");
    let detail = Detail::with_managers(shown.managers);
    let mut object = Object::of_record_with(kv, keys, detail);
    if shown.clean {
        object = object.and_then(Object::cleaned);
    }
    match object {
        Ok(mut object) => {
            if !shown.secrets {
                object.hide_secrets();
            }
            if object.unknown_fields > 0 {
                text += &format!("# {}\n", unknown_fields(&object));
            }
            text += &yaml::from_object(&object.json);
        }
        Err(NotDecoded::NoObject) if shown.secrets || !is_secret => {
            let value = value(kv.value);
            text += value.strip_suffix('\n').unwrap_or(&value);
            text.push('\n');
        }
        Err(NotDecoded::Items) => return Err(NotDecoded::Items),
        Err(e) => {
            let bytes = size(kv.value.len() as u64);
            let why = format!("# {e} ({bytes}): use --raw or --output json");
            text += &format!("{}\n", line(&why));
        }
    }
    Ok(text)
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
    let mut blocks = Blocks::default();
    blocks.items(DETAILS, &lines);
    render::to_text(&blocks, terminal::stdout_width())
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
        assert_eq!(shown.as_deref(), Ok(expected));
    }
}
