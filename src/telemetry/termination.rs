//! The termination message: how a command ended, as its Pod's status keeps it.
//!
//! `cli` writes it and the controller reads it. Its size is bounded by how it is made: nothing is added that does not fit.

use crate::error::Error;
use chrono::{DateTime, SubsecRound, Utc};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Kubernetes cuts a message of more than 4096 bytes, and what is cut is no JSON.
const MOST: usize = 4095;
/// Of those, for the failure in words.
const MOST_WORDS: usize = 1024;
/// Of those, for the status and for the command.
const MOST_NAME: usize = 64;
/// Stands where text was cut.
const CUT: char = '…';

/// How a command ended. The fields are a contract: `docs/termination-message.schema.json`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Message {
    /// The command, such as `compact` or `snapshot full`. null if the command line does not begin with one.
    pub command: Option<String>,
    /// `Failed`, or what the outcome has: `Succeeded`, `NothingToDo`, `NotNeeded` (`restore --if-needed`), `Verified`
    /// or `Equal` (`verify`).
    #[schemars(extend("enum" = ["Succeeded", "NothingToDo", "NotNeeded", "Verified", "Equal", "Failed"]))]
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
    #[schemars(range(min = 0.0))]
    pub seconds: f64,
    /// When the command ended.
    #[schemars(with = "DateTime<Utc>")]
    pub finished_at: Option<DateTime<Utc>>,
    /// The object that `--output json` prints, of the command's own schema, as much of it as fits: long texts are cut and
    /// end with `…`, and of a long list an object tells how many elements it has (`count`), how many of each `severity`
    /// or `decision` (`counts`), the first ones (`first`) and the last (`last`). What is longest is left out first. null
    /// if the command came to none, and of `get`, `history`, `diff`, `export` and `completions`.
    pub result: Option<Map<String, Value>>,
}

impl Message {
    /// Of a command that took so long, at its end.
    pub fn new(
        command: Option<&str>,
        failure: Option<&Error>,
        outcome: Option<&Map<String, Value>>,
        took: Duration,
        at: DateTime<Utc>,
    ) -> Self {
        let reason = failure.map(Error::reason);
        let said = outcome.and_then(|o| o.get("status")?.as_str());
        let status = match reason {
            Some(_) => "Failed",
            None => said.unwrap_or("Succeeded"),
        };
        let mut message = Message {
            command: command.map(|c| cut_text(c, MOST_NAME)),
            status: cut_text(status, MOST_NAME),
            code: reason.map_or(0, |r| r.exit_code()),
            reason: reason.map(|r| r.to_string()),
            retry: reason.map(|r| r.is_retryable()),
            message: failure.map(|e| cut_text(&e.to_string(), MOST_WORDS)),
            seconds: (took.as_secs_f64() * 1000.0).round() / 1000.0,
            finished_at: Some(at.trunc_subsecs(0)),
            result: None,
        };
        let room = MOST - length(&message) + "null".len();
        message.result = outcome.map(|o| summary(o, room));
        message
    }

    /// The newest revision that the command dealt with.
    pub fn revision(&self) -> Option<i64> {
        let result = self.result.as_ref()?;
        let revision = |number: &Value| {
            // Some results have a revision as text, so that no reader rounds it.
            let number = number.as_i64().or_else(|| number.as_str()?.parse().ok());
            number.filter(|&n| n > 0)
        };
        let of = |part: &str, field: &str| result.get(part)?.get(field).and_then(revision);
        let own = result.get("revision").and_then(revision);
        own.or_else(|| of("newest", "last_revision"))
            .or_else(|| of("compact", "revision"))
    }
}

/// How much of a field is told.
struct Measure {
    /// Bytes of a text, as they stand in JSON.
    text: usize,
    /// A list of up to so many elements stays a list.
    whole: usize,
    /// Of a longer one so many elements are told, and the last one.
    first: usize,
}

/// From little to much.
#[rustfmt::skip]
const MEASURES: [Measure; 3] = [
    Measure { text: 80, whole: 0, first: 0 },
    Measure { text: 160, whole: 3, first: 3 },
    Measure { text: 512, whole: 16, first: 3 },
];

/// What is told of an outcome in `room` bytes of JSON: first little of each field, the shortest first, then more of it.
fn summary(outcome: &Map<String, Value>, room: usize) -> Map<String, Value> {
    let mut told = Map::new();
    let mut left = room.saturating_sub("{}".len());
    for (nth, measure) in MEASURES.iter().enumerate() {
        let cut = outcome
            .iter()
            .map(|(name, value)| (name, cut(value, measure)));
        let mut fields: Vec<(usize, &String, Value)> = cut
            .map(|(name, value)| (length(&value), name, value))
            .collect();
        fields.sort_by_key(|f| f.0);
        for (length_now, name, value) in fields {
            let before = told.get(name).map(length);
            let more = match before {
                Some(before) => length_now.saturating_sub(before),
                // `"name":` and a comma.
                None if nth == 0 => length_now + length(name) + 2,
                None => continue,
            };
            if more <= left {
                left -= more;
                told.insert(name.clone(), value);
            }
        }
    }
    told
}

/// Bytes as JSON.
fn length(value: &impl Serialize) -> usize {
    serde_json::to_string(value).map_or(usize::MAX, |text| text.len())
}

fn cut(value: &Value, measure: &Measure) -> Value {
    match value {
        Value::String(text) => cut_text(text, measure.text).into(),
        Value::Array(items) => cut_list(items, measure),
        Value::Object(fields) => {
            let fields = fields.iter();
            Value::Object(fields.map(|(k, v)| (k.clone(), cut(v, measure))).collect())
        }
        plain => plain.clone(),
    }
}

fn cut_list(items: &[Value], measure: &Measure) -> Value {
    let all = |items: &[Value]| -> Value { items.iter().map(|item| cut(item, measure)).collect() };
    if items.len() <= measure.whole || items.is_empty() {
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
    if measure.first > 0 {
        list["first"] = all(&items[..measure.first]);
        // Of snapshots that is the newest.
        list["last"] = items.last().map(|last| cut(last, measure)).into();
    }
    list
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

    fn ended(failure: Option<&Error>, outcome: Option<&Value>) -> String {
        let took = Duration::from_micros(1_234_567);
        let at = DateTime::from_timestamp(1_790_000_000, 999).unwrap();
        let outcome = outcome.and_then(Value::as_object);
        let message = Message::new(Some("snapshot delta"), failure, outcome, took, at);
        serde_json::to_string(&message).unwrap()
    }

    /// The message, which is none but a small one.
    fn of(outcome: &Value) -> Value {
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
    fn a_failure_is_told_and_a_small_outcome_is_whole() {
        let text = ended(None, None);
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
            let failure = reason.error("no\n".repeat(5000));
            // As where it could not be printed.
            let text = ended(Some(&failure), Some(&json!({"status": "Succeeded"})));
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
                let told = summary(outcome.as_object().unwrap(), most);
                assert!(length(&told) <= most, "{most}: {told:?}");
            }
        }
    }
}
