//! Reading stops at damage and shows what stands before it; restoring goes around it if other snapshots lead to the
//! same revision.

use crate::support::explore::Page;
use crate::support::history::with_checksum;
use crate::support::tiny_backup::small_database;
use crate::support::{copy_fixture, deltafold, run_json, scratch};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The last revision of the backup, and the revision before its newest delta.
const LAST: i64 = 628;
const BEFORE: i64 = 616;
/// The key of an object that exists all the time.
const KEY: &str = "/registry/namespaces/default";

fn run(args: &[&str], store: &Path) -> (i32, Value, String) {
    let mut command = deltafold();
    command.args(args).arg("--store").arg(store);
    run_json(command.args(["--output", "json"]))
}

/// Returns the snapshot whose name begins so.
fn snapshot(store: &Path, begin: &str) -> PathBuf {
    let entries = fs::read_dir(store.join("v2")).unwrap();
    let paths = entries.map(|e| e.unwrap().path());
    let named = |p: &PathBuf| p.file_name().unwrap().to_str().unwrap().starts_with(begin);
    paths.filter(named).min().unwrap()
}

/// Cuts the SHA-256 off a snapshot: its content is whole, and nothing proves it.
fn damage(path: &Path) {
    let mut plain = Vec::new();
    let packed = fs::read(path).unwrap();
    GzDecoder::new(&packed[..]).read_to_end(&mut plain).unwrap();
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(&plain[..plain.len() - 32]).unwrap();
    fs::write(path, packed.finish().unwrap()).unwrap();
}

fn restored(store: &Path, more: &[&str]) -> (i32, Value, String) {
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("restored.db");
    let args = [&["restore", "--to-snapshot", file.to_str().unwrap()], more].concat();
    run(&args, store)
}

fn warnings(result: &Value) -> String {
    result["warnings"].to_string()
}

fn backup() -> TempDir {
    copy_fixture("kubernetes")
}

/// The newest full lacks its SHA-256; the full before it and the deltas lead to the same revision.
#[test]
fn restoring_goes_around_a_damaged_full() {
    let store = backup();
    let whole = restored(store.path(), &[]).1;
    let (code, compacted, stderr) = run(&["compact"], store.path());
    assert_eq!(code, 0, "{stderr}");
    damage(&snapshot(store.path(), "Full-00000000-00000628"));

    let (code, result, stderr) = restored(store.path(), &[]);
    assert_eq!(code, 0, "{stderr}");
    let of = |result: &Value| {
        (
            result["restored_revision"].clone(),
            result["hash_kv"].clone(),
        )
    };
    assert_eq!(of(&result), of(&whole));
    assert!(
        warnings(&result).contains("damaged, and not used"),
        "{result}"
    );

    let data_dir = scratch::folder().unwrap();
    let data_dir = data_dir.path().join("member");
    let into = [
        "restore",
        "--if-needed",
        "full",
        "--data-dir",
        data_dir.to_str().unwrap(),
    ];
    let (code, result, stderr) = run(&into, store.path());
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(of(&result), of(&whole));

    // A new full takes the place of the damaged one, beside it.
    let (code, again, stderr) = run(&["compact"], store.path());
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(again["hash_kv"], compacted["hash_kv"]);
    assert_ne!(again["snapshot"], compacted["snapshot"]);
    assert!(
        warnings(&again).contains("damaged, and not used"),
        "{again}"
    );
    let (code, result, stderr) = restored(store.path(), &[]);
    assert_eq!(
        (code, &result["warnings"]),
        (0, &Value::Array(vec![])),
        "{stderr}"
    );
}

/// A full behind a damaged delta holds the history of its revisions.
#[test]
fn restoring_goes_around_a_damaged_delta() {
    let store = backup();
    let (code, _, stderr) = run(&["compact", "--keep-history", "all"], store.path());
    assert_eq!(code, 0, "{stderr}");
    let whole = restored(store.path(), &["--revision", "620"]).1;
    damage(&snapshot(store.path(), "Incr-00000446"));
    let (code, result, stderr) = restored(store.path(), &["--revision", "620"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(result["hash_kv"], whole["hash_kv"]);
    assert_ne!(result["base"], whole["base"]);
    assert!(
        warnings(&result).contains("damaged, and not used"),
        "{result}"
    );
}

#[test]
fn if_nothing_leads_around_damage_the_newest_restorable_revision_is_named() {
    let store = backup();
    damage(&snapshot(store.path(), "Incr-00000446"));
    for command in ["restore", "compact"] {
        let (code, result, _) = match command {
            "restore" => restored(store.path(), &[]),
            command => run(&[command], store.path()),
        };
        assert_eq!(
            (code, result["reason"].as_str()),
            (65, Some("CorruptSnapshot"))
        );
        let message = result["message"].as_str().unwrap();
        assert!(message.contains("Incr-00000446-00000505"), "{message}");
        assert!(message.ends_with("give --revision 445"), "{message}");
    }
    let (code, result, stderr) = restored(store.path(), &["--revision", "445"]);
    assert_eq!(
        (code, &result["restored_revision"]),
        (0, &445.into()),
        "{stderr}"
    );
}

/// One damaged delta hides nothing that stands before it.
#[test]
fn reading_shows_what_stands_before_damage() {
    let store = backup();
    let whole = run(&["get", KEY, "--revision", "616"], store.path()).1;
    let deleted = |store: &Path| {
        let args = ["deleted", "--since", "2026-11-21T02:30:40Z"];
        let (code, result, stderr) = run(&args, store);
        assert_eq!(code, 0, "{stderr}");
        result
    };
    let all_deleted = deleted(store.path())["deleted"].as_array().unwrap().len();
    damage(&snapshot(store.path(), "Incr-00000617"));
    let stopped = |result: &Value| {
        let said = warnings(result);
        assert!(said.contains("Incr-00000617-00000628"), "{said}");
        let stop = format!("read up to revision {BEFORE} instead of {LAST}");
        assert!(said.contains(&stop), "{said}");
    };
    let (code, result, stderr) = run(&["get", KEY], store.path());
    assert_eq!((code, &result["revision"]), (0, &BEFORE.into()), "{stderr}");
    assert_eq!(result["keys"], whole["keys"]);
    stopped(&result);

    let (code, result, stderr) = run(&["diff", "--from", "300"], store.path());
    assert_eq!(
        (code, &result["to_revision"]),
        (0, &BEFORE.into()),
        "{stderr}"
    );
    stopped(&result);

    let shown = deleted(store.path());
    stopped(&shown);
    let shown = shown["deleted"].as_array().unwrap().len();
    assert!(
        0 < shown && shown <= all_deleted,
        "{shown} of {all_deleted}"
    );

    let (code, result, stderr) = run(&["history", KEY], store.path());
    assert_eq!(code, 0, "{stderr}");
    assert!(!result["versions"].as_array().unwrap().is_empty());
    assert!(
        warnings(&result).contains("Incr-00000617-00000628"),
        "{result}"
    );

    let mut export = deltafold();
    let export = export
        .args(["export", "--store"])
        .arg(store.path())
        .output();
    let export = export.unwrap();
    assert_eq!(export.status.code(), Some(0));
    assert!(!export.stdout.is_empty());

    // A revision that is asked for is not replaced by another one.
    let (code, result, _) = run(&["get", KEY, "--revision", "620"], store.path());
    assert_eq!(
        (code, result["reason"].as_str()),
        (65, Some("CorruptSnapshot"))
    );
    let message = result["message"].as_str().unwrap();
    assert!(message.contains("give --revision 616"), "{message}");

    let page = Page::start(store.path());
    let backup = page.get("backup", &[]);
    assert_eq!(backup["phase"], "ready", "{backup}");
    assert_eq!(backup["window"]["last_revision"], BEFORE);
    let damaged = backup["window"]["damaged"].as_array().unwrap();
    assert_eq!(damaged.len(), 1, "{damaged:?}");
    assert_eq!(damaged[0]["last_revision"], LAST);
}

/// As a damaged etcd would save it: the SHA-256 is right, and the records contradict each other.
#[test]
fn verify_finds_in_a_plain_file_what_restore_refuses() {
    let mut database = small_database(4096);
    let key = b"/registry/b";
    let at = database.windows(key.len()).rposition(|w| w == key);
    database[at.unwrap() + key.len() - 1] = b'x';
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("plain.db");
    fs::write(&file, with_checksum(&database)).unwrap();
    let data_dir = folder.path().join("member");
    let data_dir = data_dir.to_str().unwrap();
    for args in [
        &["verify", "--level", "fold"][..],
        &["restore", "--data-dir", data_dir],
    ] {
        let mut command = deltafold();
        command.args(args).arg("--snapshot").arg(&file);
        let (code, result, stderr) = run_json(command.args(["--output", "json"]));
        assert_eq!(
            (code, result["reason"].as_str()),
            (65, Some("CorruptSnapshot")),
            "{stderr}"
        );
        let message = result["message"].as_str().unwrap();
        assert!(message.contains("contradict each other"), "{message}");
        assert!(message.contains("/registry/x"), "{message}");
        assert!(!message.contains("timeline"), "{message}");
    }
}
