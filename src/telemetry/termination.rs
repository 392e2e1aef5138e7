//! The termination message: a summary of a command's result in JSON, which Kubernetes stores in the status of
//! the Pod.
//!
//! `cli` writes it, and `controller` reads it. It never exceeds the limit of Kubernetes: only what fits is
//! added.

use crate::error::Error;
use chrono::{DateTime, SubsecRound, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// The maximum size of the message in bytes. Kubernetes truncates messages above 4096 bytes, which breaks the
/// JSON.
const MAX_BYTES: usize = 4095;
/// The maximum size of the error message in JSON, in bytes.
const MAX_MESSAGE: usize = 1024;
/// The maximum size of the status and of the command in JSON, in bytes.
const MAX_NAME: usize = 64;
/// The end of a text that was cut.
const ELLIPSIS: char = '…';

/// How a command ended. The fields are a contract.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Message {
    /// The command, such as `compact` or `snapshot full`. null if the command line does not begin with one.
    pub command: Option<String>,
    /// `Succeeded`, `NothingToDo` or `Failed`.
    #[cfg_attr(test, schemars(extend("enum" = ["Succeeded", "NothingToDo", "Failed"])))]
    pub status: String,
    /// The process's exit code; see exit-codes.md.
    pub code: u8,
    /// Why it failed: a stable name; see exit-codes.md. null if it did not.
    pub reason: Option<String>,
    /// Whether the same command can succeed later without anyone mending anything. null if it did not fail.
    pub retry: Option<bool>,
    /// What failed, where, and what to do; cut if it is long. For people: it may change. null if it did not fail.
    pub message: Option<String>,
    /// Wall-clock time of the whole run, in seconds.
    #[serde(default)]
    #[cfg_attr(test, schemars(range(min = 0.0)))]
    pub seconds: f64,
    /// When the command ended.
    #[cfg_attr(test, schemars(with = "DateTime<Utc>"))]
    pub finished_at: Option<DateTime<Utc>>,
    /// The object that `--output json` prints, of the command's own schema, as much of it as fits: long texts are cut and
    /// end with `…`, and of a long list an object tells how many elements it has (`count`), how many of each `severity`
    /// or `decision` (`counts`), the first ones (`first`) and the last (`last`). What is longest is left out first. null
    /// if the command came to none, and of `get`, `history`, `diff`, `export` and `completions`.
    pub result: Option<Map<String, Value>>,
}

impl Message {
    /// Creates the message of a command that took `took` and ended at `at`.
    pub fn new(
        command: Option<&str>,
        failure: Option<&Error>,
        outcome: Option<&Map<String, Value>>,
        took: Duration,
        at: DateTime<Utc>,
    ) -> Self {
        let reason = failure.map(Error::reason);
        let outcome_status = outcome.and_then(|o| o.get("status")?.as_str());
        let status = match reason {
            Some(_) => "Failed",
            None => outcome_status.unwrap_or("Succeeded"),
        };
        let mut message = Message {
            command: command.map(|c| cut_text(c, MAX_NAME)),
            status: cut_text(status, MAX_NAME),
            code: reason.map_or(0, |r| r.exit_code()),
            reason: reason.map(|r| r.to_string()),
            retry: reason.map(|r| r.is_retryable()),
            message: failure.map(|e| cut_text(&e.to_string(), MAX_MESSAGE)),
            seconds: (took.as_secs_f64() * 1000.0).round() / 1000.0,
            finished_at: Some(at.trunc_subsecs(0)),
            result: None,
        };
        let room = MAX_BYTES - length(&message) + "null".len();
        message.result = outcome.map(|o| summary(o, room));
        message
    }

    /// Returns the newest revision in the result.
    pub fn revision(&self) -> Option<i64> {
        let result = self.result.as_ref()?;
        let nested = |object: &str, field: &str| result.get(object)?.get(field);
        let fields = [
            result.get("revision"),
            nested("newest", "last_revision"),
            nested("compact", "revision"),
        ];
        fields.into_iter().flatten().find_map(positive_number)
    }

    /// Returns the name of the newest snapshot in the result.
    pub fn snapshot(&self) -> Option<&str> {
        let result = self.result.as_ref()?;
        let last = result.get("snapshots").and_then(|list| match list {
            Value::Array(all) => all.last(),
            cut => cut.get("last"),
        });
        let names = [
            result.get("snapshot"),
            last.and_then(|last| last.get("name")),
        ];
        names.into_iter().flatten().find_map(Value::as_str)
    }
}

/// Returns a positive number. Some results have a revision as text, so that no reader rounds it.
fn positive_number(value: &Value) -> Option<i64> {
    let number = value.as_i64().or_else(|| value.as_str()?.parse().ok());
    number.filter(|&n| n > 0)
}

/// How much of each field a summary contains.
struct DetailLevel {
    /// The maximum size of a text in JSON, in bytes.
    text: usize,
    /// The maximum length of a list that is not shortened.
    whole: usize,
    /// The number of first elements of a shortened list, which also has its last element.
    first: usize,
}

/// The levels, from the shortest summary to the most detailed.
#[rustfmt::skip]
const DETAIL_LEVELS: [DetailLevel; 3] = [
    DetailLevel { text: 80, whole: 0, first: 0 },
    DetailLevel { text: 160, whole: 3, first: 3 },
    DetailLevel { text: 512, whole: 16, first: 3 },
];

/// Summarizes an outcome in at most `room` bytes of JSON. Every field is first added with little detail, the
/// shortest field first; then more detail is added as long as it fits.
fn summary(outcome: &Map<String, Value>, room: usize) -> Map<String, Value> {
    let mut summary = Map::new();
    let mut left = room.saturating_sub("{}".len());
    for (nth, level) in DETAIL_LEVELS.iter().enumerate() {
        let mut fields: Vec<(usize, &String, Value)> = Vec::new();
        for (name, value) in outcome {
            let value = cut(value, level);
            fields.push((length(&value), name, value));
        }
        fields.sort_by_key(|f| f.0);
        for (new_length, name, value) in fields {
            let added = match summary.get(name).map(length) {
                Some(old_length) => new_length.saturating_sub(old_length),
                // The name, a colon and a comma.
                None if nth == 0 => new_length + length(name) + 2,
                None => continue,
            };
            if added <= left {
                left -= added;
                summary.insert(name.clone(), value);
            }
        }
    }
    summary
}

/// Returns the size of a value in JSON, in bytes.
fn length(value: &impl Serialize) -> usize {
    serde_json::to_string(value).map_or(usize::MAX, |text| text.len())
}

/// Shortens the texts and lists of a value.
fn cut(value: &Value, level: &DetailLevel) -> Value {
    match value {
        Value::String(text) => cut_text(text, level.text).into(),
        Value::Array(items) => cut_list(items, level),
        Value::Object(fields) => {
            let fields = fields.iter();
            Value::Object(fields.map(|(k, v)| (k.clone(), cut(v, level))).collect())
        }
        other => other.clone(),
    }
}

/// Replaces a long list by an object with its length, the numbers of some field values, and its first and
/// last elements.
fn cut_list(items: &[Value], level: &DetailLevel) -> Value {
    let all = |items: &[Value]| -> Value { items.iter().map(|item| cut(item, level)).collect() };
    if items.len() <= level.whole || items.is_empty() {
        return all(items);
    }
    let mut list = json!({ "count": items.len() });
    for field in ["severity", "decision"] {
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        for kind in items.iter().filter_map(|i| i.get(field)?.as_str()) {
            *counts.entry(kind).or_default() += 1;
        }
        if !counts.is_empty() {
            list["counts"][field] = json!(counts);
        }
    }
    if level.first > 0 {
        list["first"] = all(&items[..level.first]);
        // In a list of snapshots, the last one is the newest.
        list["last"] = items.last().map(|last| cut(last, level)).into();
    }
    list
}

/// Cuts a text to at most `most` bytes in JSON, without its quotes. A text that was cut ends with
/// [`ELLIPSIS`].
fn cut_text(text: &str, most: usize) -> String {
    let mut length = 0;
    let mut end = 0;
    for (at, c) in text.char_indices() {
        length += bytes_in_json(c);
        if length > most {
            let mut cut = text[..end].to_owned();
            cut.push(ELLIPSIS);
            return cut;
        }
        if length + ELLIPSIS.len_utf8() <= most {
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

    fn ended(failure: Option<&Error>, outcome: Option<&Value>) -> String {
        let took = Duration::from_micros(1_234_567);
        let at = DateTime::from_timestamp(1_790_000_000, 999).unwrap();
        let outcome = outcome.and_then(Value::as_object);
        let message = Message::new(Some("snapshot delta"), failure, outcome, took, at);
        serde_json::to_string(&message).unwrap()
    }

    /// Returns the message of a success, and checks its size.
    fn message_of(outcome: &Value) -> Value {
        let text = ended(None, Some(outcome));
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
    fn a_message_contains_the_failure_and_the_whole_of_a_small_outcome() {
        let text = ended(None, None);
        let expected = r#"{"command":"snapshot delta","status":"Succeeded","code":0,"reason":null,"retry":null,"message":null,"seconds":1.235,"finished_at":"2026-09-21T14:13:20Z","result":null}"#;
        assert_eq!(text, expected);
        let outcome =
            json!({"status": "NothingToDo", "a": [1, {"b": [], "c": null}], "d": {"e": 1.5}});
        let message = message_of(&outcome);
        assert_eq!(message["status"], "NothingToDo");
        assert_eq!(message["result"], outcome);
        for (reason, code, retry) in [
            (Reason::RevisionGap, 65, false),
            (Reason::StoreUnreachable, 69, true),
            (Reason::Terminated, 143, false),
        ] {
            let failure = reason.error("no\n".repeat(5000));
            // A command can fail after its outcome is complete, for example if it cannot be printed.
            let text = ended(Some(&failure), Some(&json!({"status": "Succeeded"})));
            assert!(text.len() < 4096);
            let message: Value = serde_json::from_str(&text).unwrap();
            let summary = [&message["status"], &message["reason"], &message["code"]];
            assert_eq!(
                summary,
                [&json!("Failed"), &json!(reason.as_str()), &json!(code)]
            );
            assert_eq!(message["retry"], retry);
            let text = message["message"].as_str().unwrap();
            assert!(
                text.starts_with("no\nno\n") && text.ends_with('…'),
                "{text}"
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
        let result = &message_of(&outcome)["result"];
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
        let result = &message_of(&outcome)["result"];
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
            "status": "Succeeded", "code": 0, "verdict": "Verified", "level": "fold", "snapshots": 4000, "snapshots_read": 4000,
            "findings": many(4000, finding), "restorable": many(50, range), "newest": newest,
            "chains": many(50, |i| json!({"base": "b".repeat(50), "deltas": i, "hash_kv": i})),
            "bytes_read": 77,
        });
        let message = message_of(&outcome);
        assert_eq!(message["result"]["verdict"], "Verified");
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
        let result = &message_of(&gc)["result"];
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
        let result = &message_of(&restore)["result"];
        for field in ["restored_revision", "revision", "hash_kv", "database_bytes"] {
            assert_eq!(result[field], restore[field], "{field}");
        }

        let copy = json!({
            "status": "Succeeded", "from": "s3://a/b", "to": "gs://c/d", "backups": 9, "copied": 7000, "failed": 0,
            "objects": many(8000, object), "bytes_written": 5, "warnings": warnings(900),
        });
        let result = &message_of(&copy)["result"];
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
            "status": "Succeeded", "alarms_cleared": ["etcd-main-0"],
            "members": many(5, member), "warnings": warnings(3000),
        });
        let result = &message_of(&maintain)["result"];
        assert_eq!(result["alarms_cleared"], maintain["alarms_cleared"]);
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
    fn the_message_of_a_random_outcome_is_small_and_valid() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..crate::rounds(15, 100) {
            let outcome = json!({ "field": random(&mut rng, 3), "other": random(&mut rng, 3) });
            let text = random(&mut rng, 0).to_string().repeat(50);
            let failure = Error::internal(text);
            for failure in [None, Some(&failure)] {
                let text = ended(failure, Some(&outcome));
                assert!(text.len() < 4096, "{}: {outcome}", text.len());
                let message: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(message["command"], "snapshot delta");
            }
            for most in [4, 5, 17, 100, 1000] {
                let summary = summary(outcome.as_object().unwrap(), most);
                assert!(length(&summary) <= most, "{most}: {summary:?}");
            }
        }
    }
}
