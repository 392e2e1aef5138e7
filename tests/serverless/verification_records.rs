//! Verification records: `verify` writes them, nothing stumbles over them, and no store and no attacker turns
//! them into a failure.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::support::fake_s3::{Dialect, FakeS3};
use crate::support::history::Compression;
use crate::support::proxy::Proxy;
use crate::support::s3::S3;
use crate::support::tiny_backup::{SMALL_BASE, object, small_database};
use crate::support::{copy_fixture, deltafold, run_json, scratch};
use serde_json::{Value, json};
use tempfile::TempDir;

const FOLDER: &str = "deltafold-verified";

fn run(command: &str, store: &Path, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.args([command, "--output", "json", "--store"]).arg(store);
    run_json(c.args(args))
}

fn record_path(store: &TempDir, level: &str) -> PathBuf {
    store.path().join(FOLDER).join(format!("{level}.json"))
}

fn record(store: &TempDir, level: &str) -> Value {
    serde_json::from_slice(&fs::read(record_path(store, level)).unwrap()).unwrap()
}

#[test]
fn each_level_has_one_record_which_the_next_run_replaces() {
    let store = copy_fixture("kubernetes");
    for level in ["names", "checksums", "fold"] {
        let (code, outcome, _) = run("verify", store.path(), &["--level", level]);
        assert_eq!(code, 0, "{outcome}");
        let path = format!("{FOLDER}/{level}.json");
        assert_eq!(outcome["recorded"], path);
        let record = record(&store, level);
        assert_eq!(record["level"], level);
        assert_eq!(record["result"], "Verified");
        assert_eq!(record["reason"], Value::Null);
        assert_eq!(record["timeline"], "main");
        assert_eq!(record["revision"], 628);
        assert_eq!(record["allChains"], false);
        assert_eq!(record["hashKv"].is_u64(), level == "fold", "{record}");
        assert_eq!(record["programVersion"], env!("CARGO_PKG_VERSION"));
    }
    assert_eq!(fs::read_dir(store.path().join(FOLDER)).unwrap().count(), 3);

    // A failure is recorded, too, and the other levels keep theirs.
    let v2 = fs::read_dir(store.path().join("v2")).unwrap();
    let mut snapshots: Vec<PathBuf> = v2.map(|e| e.unwrap().path()).collect();
    snapshots.sort();
    fs::write(snapshots.last().unwrap(), "damaged").unwrap();
    let args = ["--level", "fold", "--all-chains"];
    let (code, outcome, _) = run("verify", store.path(), &args);
    assert_eq!(code, 65, "{outcome}");
    let failed = record(&store, "fold");
    assert_eq!(failed["result"], "Failed");
    assert_eq!(failed["reason"], "CorruptSnapshot");
    assert_eq!(failed["allChains"], true);
    assert!(failed["revision"].as_i64() < Some(628), "{failed}");
    assert_eq!(record(&store, "checksums")["result"], "Verified");
}

#[test]
fn without_a_record_nothing_is_written() {
    let store = copy_fixture("kubernetes");
    let (code, outcome, _) = run("verify", store.path(), &["--no-record"]);
    assert_eq!((code, &outcome["recorded"]), (0, &Value::Null));
    let mut c = deltafold();
    c.args(["verify", "--output", "json", "--store"])
        .arg(store.path());
    let (code, outcome, _) = run_json(c.env("DELTAFOLD_NO_RECORD", "true"));
    assert_eq!((code, &outcome["recorded"]), (0, &Value::Null));
    let names = fs::read_dir(store.path()).unwrap();
    let names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["v2"]);
}

/// Asserts that a verification succeeded, without a record and with a warning.
#[track_caller]
fn is_only_warned((code, outcome, stderr): (i32, Value, String)) {
    assert_eq!(
        (code, &outcome["verdict"]),
        (0, &"Verified".into()),
        "{stderr}"
    );
    assert_eq!(outcome["recorded"], Value::Null);
    let warnings = outcome["warnings"].to_string();
    assert!(warnings.contains("--no-record"), "{warnings}");
}

#[test]
fn a_store_that_refuses_the_write_is_a_warning() {
    // A file where the folder should be, or a link to somewhere else.
    let store = copy_fixture("kubernetes");
    fs::write(store.path().join(FOLDER), "").unwrap();
    is_only_warned(run("verify", store.path(), &[]));
    fs::remove_file(store.path().join(FOLDER)).unwrap();
    let elsewhere = scratch::folder().unwrap();
    symlink(elsewhere.path(), store.path().join(FOLDER)).unwrap();
    is_only_warned(run("verify", store.path(), &[]));
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);

    // Credentials that may only read.
    let server = FakeS3::start(Dialect::default());
    let full = format!("b/p/v2/Full-00000000-{SMALL_BASE:08}-1795224681");
    server.seed([(full, object(&small_database(4096), Compression::None))]);
    let proxy = Proxy::start(server.s3().endpoint());
    proxy.deny(|call| call.method != "GET");
    let reader = S3::new(&proxy.url());
    let mut c = deltafold();
    c.args(["verify", "--output", "json", "--store", "s3://b/p"]);
    is_only_warned(run_json(c.envs(reader.env())));
    assert_eq!(server.objects().len(), 1);
    let mut c = deltafold();
    c.args(["verify", "--output", "json", "--store", "s3://b/p"]);
    let (code, outcome, stderr) = run_json(c.envs(server.s3().env()));
    assert_eq!(
        (code, &outcome["recorded"]),
        (0, &format!("{FOLDER}/checksums.json").into()),
        "{stderr}"
    );
}

#[test]
fn whatever_stands_where_a_record_should_be_is_ignored_and_named() {
    let store = copy_fixture("kubernetes");
    let long = ["--max-age", "36500d", "--verified-within", "1h"];
    assert_eq!(run("verify", store.path(), &["--level", "fold"]).0, 0);
    assert_eq!(run("status", store.path(), &long).0, 0);
    let good = fs::read_to_string(record_path(&store, "fold")).unwrap();
    let year = chrono::Utc::now().format("\"time\": \"%Y-").to_string();
    assert!(good.contains(&year));
    let huge = format!("{good}{}", " ".repeat(100_000));
    for (what, content) in [
        ("empty", String::new()),
        ("not JSON", "\u{1b}[2Jrubbish".to_owned()),
        ("huge", huge),
        ("another level's", good.replace("\"fold\"", "\"names\"")),
        (
            "a later version's",
            good.replace("\"formatVersion\": 1", "\"formatVersion\": 9"),
        ),
    ] {
        fs::write(record_path(&store, "fold"), content).unwrap();
        let (code, outcome, stderr) = run("status", store.path(), &long);
        assert_eq!(
            (code, &outcome["reason"]),
            (75, &"NotVerified".into()),
            "{what}: {stderr}"
        );
        let problem = outcome["problems"].as_array().unwrap().iter();
        let problem = problem.clone().find(|p| p["reason"] == "RecordUnreadable");
        assert_eq!(
            problem.unwrap()["snapshots"],
            json!([format!("{FOLDER}/fold.json")]),
            "{what}"
        );
    }
    // One from the future counts as now.
    fs::write(
        record_path(&store, "fold"),
        good.replace(&year, "\"time\": \"2999-"),
    )
    .unwrap();
    let (code, outcome, _) = run("status", store.path(), &long);
    assert_eq!(code, 0, "{outcome:#}");
    assert!(outcome["verifications"][0]["age_seconds"].as_f64() < Some(0.0));

    // What is no file neither hangs nor fails anything.
    let fifo = record_path(&store, "checksums");
    let made = std::process::Command::new("mkfifo")
        .arg(&fifo)
        .status()
        .unwrap();
    assert!(made.success());
    fs::create_dir(record_path(&store, "names")).unwrap();
    symlink("/etc/passwd", record_path(&store, "cluster")).unwrap();
    fs::remove_file(record_path(&store, "fold")).unwrap();
    let (code, outcome, stderr) = run("status", store.path(), &long);
    assert_eq!(code, 75, "{outcome:#} {stderr}");
    assert!(!outcome.to_string().contains("root:"), "{outcome:#}");
    assert_eq!(run("verify", store.path(), &["--level", "fold"]).0, 0);
    assert_eq!(run("status", store.path(), &long).0, 0);
}

#[test]
fn records_disturb_no_other_command() {
    let store = copy_fixture("kubernetes");
    assert_eq!(run("verify", store.path(), &["--level", "fold"]).0, 0);
    let before = fs::read(record_path(&store, "fold")).unwrap();
    let (code, listed, _) = run("list", store.path(), &["--deep"]);
    assert_eq!((code, &listed["problems"]), (0, &json!([])));
    let (code, verified, _) = run("verify", store.path(), &["--no-record"]);
    assert_eq!((code, &verified["findings"]), (0, &json!([])));
    let collect = ["--policy", "limit", "--limit", "1"];
    let collect = [&collect[..], &["--staging-age", "0s", "--apply"]].concat();
    let (code, collected, _) = run("gc", store.path(), &collect);
    assert_eq!(code, 0, "{collected:#}");
    assert!(!collected.to_string().contains(FOLDER), "{collected:#}");
    assert_eq!(fs::read(record_path(&store, "fold")).unwrap(), before);
}
