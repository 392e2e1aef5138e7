//! The termination message: how a command ended, as one small JSON object in a file.
//!
//! What it says is a pure function of the failure and the outcome; it never changes how a command ends.
//! `main` in `cli` begins and ends it, and `print_outcome` hands it every outcome.

use crate::base::lock;
use crate::error::Error;
use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Kubernetes cuts a message of more than 4096 bytes, and what is cut is no JSON.
const MOST: usize = 4095;
/// Of those, for the failure in words.
const MOST_WORDS: usize = 1024;
/// Stands where text was cut.
const CUT: char = '…';

/// What a command that runs has come to; a panic must not hide it from whoever ends it.
static OUTCOME: Mutex<Kept> = Mutex::new(Kept {
    wanted: false,
    outcome: None,
});

struct Kept {
    wanted: bool,
    outcome: Option<Value>,
}

fn kept() -> MutexGuard<'static, Kept> {
    lock(&OUTCOME)
}

/// Keeps an outcome for the message, if one is asked for.
pub(super) fn keep(outcome: &impl Serialize) {
    let mut kept = kept();
    if kept.wanted {
        // One that is no JSON fails where it is printed.
        kept.outcome = serde_json::to_value(outcome).ok();
    }
}

/// The message of a command that runs.
pub(super) struct Termination {
    file: Option<PathBuf>,
    command: Option<String>,
    started: Instant,
}

impl Termination {
    /// Of a command that begins. What an earlier run left in the file is gone from now on: where nothing can
    /// be said at the end, nothing is said.
    pub(super) fn begin(file: Option<PathBuf>, command: Option<String>, started: Instant) -> Self {
        kept().wanted = file.is_some();
        if let Some(file) = &file {
            // That it cannot be written is told at the end.
            let _ = open(OpenOptions::new().truncate(true), file);
        }
        Termination {
            file,
            command,
            started,
        }
    }

    /// Writes it, if it is asked for.
    ///
    /// # Errors
    /// Why it was not written, in words.
    pub(super) fn end(&self, failure: Option<&Error>) -> Result<(), String> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let ended = Ended {
            command: self.command.as_deref(),
            failure,
            took: self.started.elapsed(),
            at: Utc::now(),
        };
        let text = ended.message(kept().outcome.as_ref());
        write(file, &text).map_err(|e| {
            format!(
                "the termination message was not written: {}: {e}",
                file.display()
            )
        })
    }
}

fn open(options: &mut OpenOptions, file: &Path) -> std::io::Result<std::fs::File> {
    // A pipe without a reader must not hold the process.
    options
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .mode(0o600)
        .open(file)
}

/// In place: in a Pod it is a mount, under which nothing can be renamed.
fn write(file: &Path, text: &str) -> std::io::Result<()> {
    let mut out = open(OpenOptions::new().create(true).truncate(true), file)?;
    out.write_all(text.as_bytes()).inspect_err(|_| {
        // A part of it would be no JSON.
        let _ = out.set_len(0);
    })
}

/// How a command ended.
struct Ended<'a> {
    command: Option<&'a str>,
    failure: Option<&'a Error>,
    took: Duration,
    at: DateTime<Utc>,
}

/// The fields are a contract: `docs/termination-message.schema.json`.
#[derive(Serialize)]
struct Message<'a> {
    command: Option<&'a str>,
    status: String,
    code: u8,
    reason: Option<&'static str>,
    retry: Option<bool>,
    message: Option<String>,
    seconds: f64,
    finished_at: String,
    result: Option<Value>,
}

impl Ended<'_> {
    /// One JSON object of at most [`MOST`] bytes, whatever the outcome is.
    fn message(&self, outcome: Option<&Value>) -> String {
        let reason = self.failure.map(Error::reason);
        let said = outcome
            .and_then(|o| o.get("status"))
            .and_then(Value::as_str);
        let status = match reason {
            Some(_) => "Failed",
            None => said.unwrap_or("Succeeded"),
        };
        let mut message = Message {
            command: self.command,
            status: cut_text(status, 64),
            code: reason.map_or(0, |r| r.exit_code()),
            reason: reason.map(|r| r.as_str()),
            retry: reason.map(|r| r.is_retryable()),
            message: self.failure.map(|e| cut_text(&e.to_string(), MOST_WORDS)),
            seconds: (self.took.as_secs_f64() * 1000.0).round() / 1000.0,
            finished_at: self.at.to_rfc3339_opts(SecondsFormat::Secs, true),
            result: None,
        };
        let room = MOST.saturating_sub(length(&message)) + "null".len();
        message.result = outcome.map(|o| reduce(o, room));
        serde_json::to_string(&message).unwrap_or_default()
    }
}

/// How much of an outcome is left.
struct Measure {
    /// Bytes of a text, as they stand in JSON.
    text: usize,
    /// A list of up to so many elements stays a list.
    whole: usize,
    /// Of a longer one so many elements are told, and the last one.
    first: usize,
    /// Objects within objects.
    depth: usize,
}

/// From much to little.
#[rustfmt::skip]
const MEASURES: [Measure; 9] = [
    Measure { text: 512, whole: 16, first: 3, depth: 4 },
    Measure { text: 256, whole: 8, first: 3, depth: 4 },
    Measure { text: 160, whole: 4, first: 3, depth: 4 },
    Measure { text: 120, whole: 3, first: 2, depth: 3 },
    Measure { text: 120, whole: 1, first: 1, depth: 3 },
    Measure { text: 120, whole: 0, first: 0, depth: 3 },
    Measure { text: 80, whole: 0, first: 0, depth: 3 },
    Measure { text: 80, whole: 0, first: 0, depth: 2 },
    Measure { text: 80, whole: 0, first: 0, depth: 1 },
];

/// Of a long list of objects it is told how many there are of each of these.
const COUNTED: [&str; 2] = ["severity", "decision"];
/// Unless there are more.
const MOST_KINDS: usize = 12;
/// Of an object, more fields are left out.
const MOST_FIELDS: usize = 64;

/// The most that is told of an outcome in `most` bytes of JSON, of which there are at least four.
fn reduce(outcome: &Value, most: usize) -> Value {
    let mut least = Value::Null;
    for measure in &MEASURES {
        let reduced = cut(outcome, measure, 0).unwrap_or_default();
        if length(&reduced) <= most {
            return reduced;
        }
        least = reduced;
    }
    // What is shortest stays: numbers, yes and no.
    while let Some(fields) = least.as_object_mut() {
        let longest = fields.iter().max_by_key(|(k, v)| k.len() + length(v));
        let Some(longest) = longest.map(|(k, _)| k.clone()) else {
            break;
        };
        fields.remove(&longest);
        if length(&least) <= most {
            return least;
        }
    }
    Value::Null
}

/// Bytes as JSON.
fn length(value: &impl Serialize) -> usize {
    serde_json::to_string(value).map_or(usize::MAX, |text| text.len())
}

/// Nothing of an object that is too deep.
fn cut(value: &Value, measure: &Measure, depth: usize) -> Option<Value> {
    match value {
        Value::String(text) => Some(Value::String(cut_text(text, measure.text))),
        Value::Array(items) => Some(cut_list(items, measure, depth)),
        Value::Object(_) if depth >= measure.depth => None,
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(k, _)| k.len() <= measure.text);
            let fields = fields.filter_map(|(k, v)| Some((k.clone(), cut(v, measure, depth + 1)?)));
            Some(Value::Object(fields.take(MOST_FIELDS).collect()))
        }
        plain => Some(plain.clone()),
    }
}

fn cut_list(items: &[Value], measure: &Measure, depth: usize) -> Value {
    let cut_all = |items: &[Value]| -> Option<Vec<Value>> {
        items.iter().map(|item| cut(item, measure, depth)).collect()
    };
    if items.len() <= measure.whole || items.is_empty() {
        // All of them, or their number.
        if let Some(all) = cut_all(items) {
            return Value::Array(all);
        }
    }
    let mut fields = Map::new();
    fields.insert("count".to_owned(), items.len().into());
    let counts = counts(items, measure);
    if !counts.is_empty() {
        fields.insert("counts".to_owned(), Value::Object(counts));
    }
    let first = &items[..measure.first.min(items.len())];
    if let Some(first) = cut_all(first).filter(|first| !first.is_empty()) {
        fields.insert("first".to_owned(), Value::Array(first));
        // Of snapshots that is the newest.
        let last = items.last().and_then(|last| cut(last, measure, depth));
        fields.extend(last.map(|last| ("last".to_owned(), last)));
    }
    Value::Object(fields)
}

/// How many of the objects there are of each kind.
fn counts(items: &[Value], measure: &Measure) -> Map<String, Value> {
    let mut counts = Map::new();
    for field in COUNTED {
        let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
        for kind in items.iter().filter_map(|i| i.get(field)?.as_str()) {
            *kinds.entry(kind).or_default() += 1;
            if kinds.len() > MOST_KINDS || kind.len() > measure.text {
                kinds.clear();
                break;
            }
        }
        if !kinds.is_empty() {
            let kinds = kinds.into_iter().map(|(k, n)| (k.to_owned(), n.into()));
            counts.insert(field.to_owned(), Value::Object(kinds.collect()));
        }
    }
    counts
}

/// Text that takes up to `most` bytes in JSON, the quotes left out; what is cut ends with [`CUT`].
fn cut_text(text: &str, most: usize) -> String {
    let mut length = 0;
    let mut end = 0;
    for (at, c) in text.char_indices() {
        length += bytes_in_json(c);
        if length > most {
            let mut cut = text[..end].to_owned();
            cut.push(CUT);
            return cut;
        }
        if length + CUT.len_utf8() <= most {
            end = at + c.len_utf8();
        }
    }
    text.to_owned()
}

fn bytes_in_json(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        c if c < ' ' => "\\u0000".len(),
        c => c.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Reason;
    use serde_json::json;

    fn ended(failure: Option<&Error>) -> Ended<'_> {
        Ended {
            command: Some("snapshot delta"),
            failure,
            took: Duration::from_micros(1_234_567),
            at: DateTime::from_timestamp(1_790_000_000, 999).unwrap(),
        }
    }

    /// The message, which is none but a small one.
    fn of(outcome: &Value) -> Value {
        let text = ended(None).message(Some(outcome));
        assert!(text.len() < 4096, "{}", text.len());
        assert!(!text.contains('\n'), "{text}");
        serde_json::from_str(&text).unwrap()
    }

    fn many(n: usize, item: impl Fn(usize) -> Value) -> Value {
        (0..n).map(item).collect()
    }

    fn warnings(n: usize) -> Value {
        many(n, |i| {
            json!(format!("{i}: a \"warning\" of many \u{1}ö words; ").repeat(40))
        })
    }

    #[test]
    fn a_failure_is_told_and_a_small_outcome_is_whole() {
        let text = ended(None).message(None);
        let expected = r#"{"command":"snapshot delta","status":"Succeeded","code":0,"reason":null,"retry":null,"message":null,"seconds":1.235,"finished_at":"2026-09-21T14:13:20Z","result":null}"#;
        assert_eq!(text, expected);
        let outcome =
            json!({"status": "NothingToDo", "a": [1, {"b": [], "c": null}], "d": {"e": 1.5}});
        let message = of(&outcome);
        assert_eq!(message["status"], "NothingToDo");
        assert_eq!(message["result"], outcome);
        for (reason, code, retry) in [
            (Reason::RevisionGap, 65, false),
            (Reason::StoreUnreachable, 69, true),
            (Reason::Terminated, 143, false),
        ] {
            let failure = Error::new(reason, "no\n".repeat(5000));
            // As where it could not be printed.
            let text = ended(Some(&failure)).message(Some(&json!({"status": "Succeeded"})));
            assert!(text.len() < 4096);
            let message: Value = serde_json::from_str(&text).unwrap();
            let told = [&message["status"], &message["reason"], &message["code"]];
            assert_eq!(
                told,
                [&json!("Failed"), &json!(reason.as_str()), &json!(code)]
            );
            assert_eq!(message["retry"], retry);
            let said = message["message"].as_str().unwrap();
            assert!(
                said.starts_with("no\nno\n") && said.ends_with('…'),
                "{said}"
            );
            assert_eq!(message["result"]["status"], "Succeeded");
        }
    }

    #[test]
    fn text_is_cut_between_characters_and_by_its_length_in_json() {
        assert_eq!(cut_text("abcdef", 6), "abcdef");
        assert_eq!(cut_text("abcdefg", 6), "abc…");
        assert_eq!(cut_text("äöüß", 8), "äöüß");
        assert_eq!(cut_text("äöüßä", 8), "äö…");
        assert_eq!(cut_text("\"\"\"\"", 8), "\"\"\"\"");
        assert_eq!(cut_text("\"\"\"\"\"", 8), "\"\"…");
        assert_eq!(cut_text("\u{1}\u{1}\u{1}", 17), "\u{1}\u{1}…");
        assert_eq!(cut_text("𝄞𝄞", 7), "𝄞…");
        for c in (0..=0x2100).filter_map(char::from_u32) {
            let text = c.to_string();
            assert_eq!(length(&text) - 2, bytes_in_json(c), "{c:?}");
        }
    }

    #[test]
    fn numbers_of_a_compaction_survive_thousands_of_warnings() {
        let name = "Full-00000000-2000000000-1795224704.gz.final.age";
        let outcome = json!({
            "status": "Succeeded", "snapshot": name, "base": name,
            "deltas": many(5000, |i| json!(format!("Incr-{i:08}-{i:08}-1795224704.gz"))),
            "events": 1_000_000, "revision": 2_000_000_000, "hash_kv": u32::MAX,
            "bytes_read": 1_u64 << 40, "bytes_written": 1_u64 << 33, "seconds": 12.5,
            "dry_run": false, "warnings": warnings(4000),
        });
        let result = &of(&outcome)["result"];
        for field in [
            "status",
            "snapshot",
            "base",
            "events",
            "revision",
            "hash_kv",
            "bytes_read",
            "bytes_written",
            "seconds",
            "dry_run",
        ] {
            assert_eq!(result[field], outcome[field], "{field}");
        }
        assert_eq!(result["warnings"]["count"], 4000);
        assert_eq!(result["warnings"]["first"].as_array().unwrap().len(), 3);
        assert_eq!(result["deltas"]["count"], 5000);
        assert_eq!(result["deltas"]["last"], outcome["deltas"][4999]);
    }

    #[test]
    fn numbers_of_a_snapshot_survive_many_of_them() {
        let listed = |i: usize| {
            json!({
                "name": format!("Incr-{i:08}-{i:08}-1795224704.gz"), "kind": "Incr",
                "start_revision": i, "last_revision": i, "bytes": 1000 + i, "uncompressed_bytes": 4000,
                "events": 7, "hash_kv": null, "compact_revision": null, "live_keys": null,
            })
        };
        let outcome = json!({
            "status": "Succeeded", "snapshots": many(300, listed), "revision": 299, "full_reason": null,
            "endpoint": "https://10.0.0.1:2379", "events": 2100, "bytes_written": 300_000,
            "members": many(5, |i| json!({"name": format!("etcd-{i}"), "agrees": true, "hash_kv": 1})),
            "warnings": warnings(2000),
        });
        let result = &of(&outcome)["result"];
        assert_eq!(result["revision"], 299);
        assert_eq!(result["bytes_written"], 300_000);
        assert_eq!(result["snapshots"]["count"], 300);
        assert_eq!(result["snapshots"]["last"], listed(299));
        assert_eq!(result["warnings"]["count"], 2000);
    }

    #[test]
    fn numbers_of_a_verification_survive_many_findings() {
        let finding = |i: usize| {
            let severity = if i.is_multiple_of(4) { "error" } else { "note" };
            json!({
                "severity": severity, "reason": "RevisionGap", "timeline": "Full-00000000-00000746-1795224704",
                "snapshots": many(i % 40, |n| json!(format!("v2/Incr-{n:08}-{n:08}-1795224704"))),
                "message": "revisions are missing ".repeat(60),
            })
        };
        let range = |i: usize| json!({"timeline": "Full-00000000-00000746-1795224704", "first_revision": i, "last_revision": i + 5});
        let newest = json!({
            "timeline": "Full-00000000-00000746-1795224704", "first_revision": 746, "last_revision": 2255,
            "last_time": "2026-11-20T12:00:00Z", "snapshot_age_seconds": 12.5,
        });
        let outcome = json!({
            "status": "Verified", "code": 0, "level": "fold", "snapshots": 4000, "snapshots_read": 4000,
            "findings": many(4000, finding), "restorable": many(50, range), "newest": newest,
            "chains": many(50, |i| json!({"base": "b".repeat(50), "deltas": i, "hash_kv": i})),
            "bytes_read": 77,
        });
        let message = of(&outcome);
        assert_eq!(message["status"], "Verified");
        let result = &message["result"];
        assert_eq!(result["findings"]["count"], 4000);
        let by_severity = &result["findings"]["counts"]["severity"];
        assert_eq!(*by_severity, json!({"error": 1000, "note": 3000}));
        assert_eq!(result["restorable"]["count"], 50);
        assert_eq!(result["newest"], newest);
    }

    #[test]
    fn numbers_of_gc_restore_copy_and_maintain_survive() {
        let object = |i: usize| {
            json!({
                "path": format!("v2/Incr-{i:08}-{i:08}-1795224704"), "bytes": i,
                "decision": if i < 9 { "Keep" } else { "Delete" }, "reason": "OutOfWindow",
                "explanation": "it is older than the window ".repeat(9), "done": true,
            })
        };
        let total = |n: u64| json!({"objects": n, "bytes": n * 1000});
        let totals = json!({"kept": total(9), "removed": total(0), "deleted": total(9991), "left": total(0)});
        let gc = json!({
            "status": "Succeeded", "objects": many(10_000, object), "totals": totals, "freed_bytes": 9_991_000,
            "restorable_before": many(30, |i| json!({"timeline": "t", "first_revision": i, "last_revision": i})),
            "warnings": warnings(5000),
        });
        let result = &of(&gc)["result"];
        assert_eq!(result["totals"], totals);
        assert_eq!(result["freed_bytes"], 9_991_000);
        let decided = &result["objects"]["counts"]["decision"];
        assert_eq!(*decided, json!({"Delete": 9991, "Keep": 9}));

        let restore = json!({
            "status": "Succeeded", "decision": {"restore": true, "reasons": warnings(40)},
            "candidates": many(20, |i| json!({"store": "s".repeat(300), "revision": i})),
            "deltas": many(900, |i| json!(i.to_string())), "restored_revision": 2255, "revision": 3000,
            "hash_kv": 7, "database_bytes": 1_u64 << 33, "warnings": warnings(900),
        });
        let result = &of(&restore)["result"];
        for field in ["restored_revision", "revision", "hash_kv", "database_bytes"] {
            assert_eq!(result[field], restore[field], "{field}");
        }

        let copy = json!({
            "status": "Succeeded", "from": "s3://a/b", "to": "gs://c/d", "backups": 9, "copied": 7000, "failed": 0,
            "objects": many(8000, object), "bytes_written": 5, "warnings": warnings(900),
        });
        let result = &of(&copy)["result"];
        for field in ["from", "to", "copied", "failed", "bytes_written"] {
            assert_eq!(result[field], copy[field], "{field}");
        }

        let member = |i: usize| {
            json!({
                "name": format!("etcd-main-{i}"), "id": "8e9e05c52164694d", "endpoint": format!("https://10.0.0.{i}:2379"),
                "leader": i == 0, "db_size_before": 1000 + i, "db_size_in_use_before": 500, "db_size_after": 600 + i,
                "decision": "Defragment", "reason": "half of it is free", "done": true, "seconds": 1.5,
            })
        };
        let maintain = json!({
            "status": "Succeeded", "compact": {"requested": "1h", "revision": 5, "done": true},
            "members": many(5, member), "warnings": warnings(3000),
        });
        let result = &of(&maintain)["result"];
        assert_eq!(result["compact"], maintain["compact"]);
        let members = &result["members"];
        let first = members.get("first").unwrap_or(members);
        assert!(first.as_array().unwrap().len() >= 3, "{members}");
        for (i, m) in first.as_array().unwrap().iter().enumerate() {
            assert_eq!(m["db_size_before"], 1000 + i);
            assert_eq!(m["db_size_after"], 600 + i);
        }
    }

    fn random(rng: &mut fastrand::Rng, depth: usize) -> Value {
        let text = |rng: &mut fastrand::Rng| -> String {
            const CHARS: [char; 9] = ['a', '"', '\\', '\n', '\u{0}', '\u{7f}', 'ä', '…', '𝄞'];
            let n = 1 << rng.u32(0..11);
            (0..rng.usize(0..n))
                .map(|_| CHARS[rng.usize(0..9)])
                .collect()
        };
        match rng.u8(0..10) {
            0 => Value::Null,
            1 => rng.bool().into(),
            2 => rng.u64(..).into(),
            3 => rng.f64().into(),
            4 | 5 => text(rng).into(),
            6 | 7 if depth > 0 => (0..rng.usize(0..25))
                .map(|_| random(rng, depth - 1))
                .collect(),
            _ if depth > 0 => {
                let fields = 0..rng.usize(0..80);
                let fields = fields.map(|i| (format!("{i}{}", &text(rng)), random(rng, depth - 1)));
                Value::Object(fields.collect())
            }
            _ => rng.i64(..).into(),
        }
    }

    #[test]
    fn whatever_the_outcome_is_the_message_is_small_and_parses() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..crate::rounds(15, 100) {
            let outcome = random(&mut rng, 3);
            let text = random(&mut rng, 0).to_string().repeat(50);
            let failure = Error::internal(text);
            for failure in [None, Some(&failure)] {
                let text = ended(failure).message(Some(&outcome));
                assert!(text.len() < 4096, "{}: {outcome}", text.len());
                let message: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(message["command"], "snapshot delta");
            }
            for most in [4, 5, 17, 100, 1000] {
                let reduced = reduce(&outcome, most);
                assert!(length(&reduced) <= most, "{most}: {reduced}");
            }
        }
    }

    #[test]
    fn what_cannot_be_written_is_left_empty() {
        let folder = tempfile::TempDir::new().unwrap();
        let file = folder.path().join("message");
        write(&file, "a long one").unwrap();
        write(&file, "short").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "short");
        assert!(write(folder.path(), "x").is_err());
        assert!(write(&folder.path().join("no/folder"), "x").is_err());
    }
}
