//! `deltafold log` tells what the deltas record, and `search` finds names.

use crate::support::made_backups::{BASE, Bucket, LAST, fixture_events, revision};
use crate::support::{copy_fixture, deltafold, fixtures_dir};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Runs a command on a store, and returns its standard output.
fn told(store: &Path, args: &[&str]) -> String {
    let mut command = deltafold();
    let out = command
        .args(args)
        .arg("--store")
        .arg(store)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{args:?}: {stderr}");
    String::from_utf8(out.stdout).unwrap()
}

fn lines(store: &Path, args: &[&str]) -> Vec<Value> {
    let text = told(store, &[&["log", "-o", "json"], args].concat());
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    lines.collect()
}

fn bytes_of(line: &Value) -> Vec<u8> {
    match line["key"].as_str() {
        Some(key) => key.as_bytes().to_vec(),
        None => STANDARD
            .decode(line["key_base64"].as_str().unwrap())
            .unwrap(),
    }
}

/// Revision, key, and what happened: of each line that is a change.
fn changes(lines: &[Value]) -> BTreeSet<(i64, Vec<u8>, String)> {
    let changes = lines.iter().filter(|line| line["change"].is_string());
    let change = |line: &Value| {
        let what = line["change"].as_str().unwrap().to_owned();
        (line["revision"].as_i64().unwrap(), bytes_of(line), what)
    };
    changes.map(change).collect()
}

/// What the events of the fixture's deltas say.
fn recorded() -> BTreeSet<(i64, Vec<u8>, String)> {
    let event = |event: &Value| {
        let kv = &event["etcdEvent"]["kv"];
        let what = match (&event["etcdEvent"]["type"], kv["version"].as_i64()) {
            (kind, _) if *kind == 1 || *kind == "DELETE" => "deleted",
            (_, Some(1)) => "created",
            _ => "changed",
        };
        let key = STANDARD.decode(kv["key"].as_str().unwrap()).unwrap();
        (revision(event), key, what.to_owned())
    };
    fixture_events().iter().map(event).collect()
}

/// Every change is one line, in the order of revisions, whatever the keys are.
#[test]
fn each_recorded_change_is_a_line() {
    let store = fixtures_dir().join("etcd35-gzip");
    let since = BASE.to_string();
    let all = lines(&store, &["--since", &since, "--prefix", ""]);
    assert_eq!(changes(&all), recorded());
    let revisions: Vec<i64> = all
        .iter()
        .map(|l| l["revision"].as_i64().unwrap())
        .collect();
    assert!(revisions.is_sorted());
    let only = |what: &str| {
        let lines = lines(&store, &["--since", &since, "--prefix", "", "--only", what]);
        changes(&lines)
    };
    for what in ["created", "changed", "deleted"] {
        let mut expected = recorded();
        expected.retain(|(_, _, happened)| happened == what);
        assert!(!expected.is_empty());
        assert_eq!(only(what), expected, "{what}");
    }
    let together = lines(
        &store,
        &["--since", &since, "--prefix", "", "--by-transaction"],
    );
    let parts = together
        .iter()
        .flat_map(|t| t["changes"].as_array().unwrap().clone());
    let parts: Vec<Value> = parts.collect();
    assert_eq!(changes(&parts), recorded());
    assert!(
        together
            .iter()
            .any(|t| t["changes"].as_array().unwrap().len() > 1)
    );
    // A span in the middle knows what was there before it.
    let middle = lines(
        &store,
        &["--since", "1000", "--until", "1200", "--prefix", ""],
    );
    let mut expected = recorded();
    expected.retain(|(revision, ..)| (1001..=1200).contains(revision));
    assert_eq!(changes(&middle), expected);
}

/// A lost delta is a line, and what it deleted stands at the full that lacks it.
#[test]
fn holes_are_lines() {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, 1499, 10);
    let mut compact = deltafold();
    bucket.delta(1500, LAST, 20);
    compact
        .args(["compact", "--keep-history", "latest", "--store"])
        .arg(bucket.path());
    assert!(compact.output().unwrap().status.success());
    let lost = fs::read_dir(bucket.path().join("v2")).unwrap();
    for entry in lost.map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("Incr-00001500") {
            fs::remove_file(entry).unwrap();
        }
    }
    let all = lines(bucket.path(), &["--since", "1400", "--prefix", ""]);
    let holes: Vec<&Value> = all
        .iter()
        .filter_map(|line| line.get("missing"))
        .filter(|m| m.is_object())
        .collect();
    assert_eq!(holes.len(), 1, "{holes:?}");
    assert_eq!(holes[0]["first_revision"], 1500);
    let recorded = recorded();
    let mut unrecorded = 0;
    for line in all.iter().filter(|line| line["recorded"] == false) {
        let (key, by) = (bytes_of(line), line["revision"].as_i64().unwrap());
        let before = line["before"].as_i64().unwrap();
        let deleted = recorded.iter().filter(|r| r.1 == key && r.2 == "deleted");
        assert!(
            deleted.map(|r| r.0).any(|at| before < at && at <= by),
            "{line}"
        );
        // The key can be read at the revision that the line names.
        let at = before.to_string();
        if let Some(key) = line["key"].as_str().filter(|key| key.starts_with('/')) {
            told(bucket.path(), &["get", key, "--revision", &at]);
        }
        unrecorded += 1;
    }
    assert!(unrecorded > 0);
    let text = told(bucket.path(), &["log", "--since", "1400", "--prefix", ""]);
    assert!(
        text.contains("not every change is recorded for revisions 1500 to"),
        "{text}"
    );
    assert!(
        text.contains("deleted by then, which is not recorded"),
        "{text}"
    );
}

/// The text of a real cluster: the default span is said, fields and managers, and the command at the end.
#[test]
fn the_text_says_what_happened_and_how_to_bring_it_back() {
    let store = copy_fixture("kubernetes");
    let text = told(store.path(), &["log", "cm", "-n", "shop"]);
    assert!(
        text.starts_with("Changes of all that the backup holds, up to revision 628\n"),
        "{text}"
    );
    let text = told(store.path(), &["log", "--since", "2026-11-21T02:31:00Z"]);
    assert!(
        text.starts_with("Changes since 2026-11-21T02:31:00Z up to revision 628\n"),
        "{text}"
    );
    assert!(
        text.contains("changes of Events and Leases are left out"),
        "{text}"
    );
    let line = text.lines().find(|line| line.contains(" 450 ")).unwrap();
    let parts: Vec<&str> = line
        .split("   ")
        .map(str::trim)
        .filter(|p| !p.is_empty())
        .collect();
    let expected = [
        "2026-11-21T02:31:06Z",
        "450",
        "shop",
        "configmap/cm-1",
        "changed by kubectl-annotate: + metadata.annotations: {\"round\":\"1\"}",
    ];
    assert_eq!(parts, expected);
    let (_, command) = text.split_once("To bring one back:\n").unwrap();
    let words: Vec<&str> = command.split_whitespace().collect();
    assert_eq!(
        words[1..5],
        ["recover", "configmap/shop/cm-3", "--revision", "597"]
    );
    let mut recover = deltafold();
    let shown = recover
        .args(&words[1..])
        .args(["-o", "yaml"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("name: cm-3"));
    // Names, labels, and no more than three fields.
    let labelled = lines(store.path(), &["-l", "app=web-1", "--since", "275"]);
    assert!(!labelled.is_empty());
    assert!(
        labelled
            .iter()
            .all(|line| line["object"].as_str().unwrap().contains("web-1"))
    );
    let pods = lines(store.path(), &["pods", "--since", "275"]);
    assert!(
        pods.iter()
            .all(|line| line["fields"].as_array().unwrap().len() <= 3)
    );
    assert!(
        pods.iter()
            .any(|line| line["more_fields"].as_i64() > Some(0))
    );
    assert!(
        pods.iter()
            .any(|line| line["owner"]["kind"] == "ReplicaSet")
    );
    let secrets = told(store.path(), &["log", "secrets", "-A"]);
    assert!(!secrets.contains("ZXhhbXBsZQ=="), "{secrets}");
}

/// The default span is a day before the end, whenever the backup is read.
#[test]
fn the_last_day_is_the_default() {
    let store = copy_fixture("kubernetes");
    // Two days later, nothing but a full.
    let mut compact = deltafold();
    compact.args(["compact", "--store"]).arg(store.path());
    assert!(compact.output().unwrap().status.success());
    let v2 = store.path().join("v2");
    let fulls = fs::read_dir(&v2).unwrap().map(|e| e.unwrap().path());
    let newest = fulls
        .filter(|p| p.to_str().unwrap().contains("/Full-"))
        .max()
        .unwrap();
    let name = newest.file_name().unwrap().to_str().unwrap().to_owned();
    let seconds: i64 = name.split(['-', '.']).nth(3).unwrap().parse().unwrap();
    let later = name.replace(&seconds.to_string(), &(seconds + 172_800).to_string());
    fs::rename(&newest, v2.join(later)).unwrap();
    let text = told(store.path(), &["log"]);
    assert!(
        text.contains("(24 hours; --since gives another begin)"),
        "{text}"
    );
    assert!(text.contains("nothing was changed"), "{text}");
}

#[test]
fn names_are_found_at_all_times() {
    let store = fixtures_dir().join("kubernetes");
    let found = |words: &[&str]| -> Value {
        let args = [&["search"], words, &["-o", "json"]].concat();
        serde_json::from_str(&told(&store, &args)).unwrap()
    };
    for words in [&["deploy", "web-3"][..], &["Deployment/shop/web-3"]] {
        let first = &found(words)["found"][0];
        assert_eq!(first["object"], "deployment/shop/web-3", "{words:?}");
        assert_eq!(
            (&first["deleted"], &first["revision"]),
            (&Value::Bool(true), &590.into())
        );
    }
    let all = found(&["web-1"]);
    let all: Vec<&str> = all["found"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f["object"].as_str().unwrap())
        .collect();
    // Exact names first, Events last.
    assert_eq!(all[0], "deployment/shop/web-1");
    let first_event = all
        .iter()
        .position(|name| name.starts_with("event/"))
        .unwrap();
    assert!(
        all[first_event..]
            .iter()
            .all(|name| name.starts_with("event/"))
    );
    assert_eq!(found(&["no-such-thing"])["found"], Value::Array(Vec::new()));
    assert!(told(&store, &["search", "cm-3"]).contains("deleted"));
}
