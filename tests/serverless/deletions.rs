//! What `deleted` finds must be what `history` shows, wherever it is recorded.

use crate::support::{copy_fixture, deltafold, succeed};
use serde_json::Value;
use std::fs;
use std::path::Path;

fn deleted_with(store: &Path, args: &[&str]) -> Value {
    let mut command = deltafold();
    command.args(["deleted", "--output", "json", "--store"]);
    succeed(command.arg(store).args(args))
}

fn deleted(store: &Path) -> Vec<Value> {
    let result = deleted_with(store, &["--since", "300"]);
    result["deleted"].as_array().unwrap().clone()
}

/// Without --since, and with one before the backup, all that the snapshots record is shown.
#[test]
fn the_whole_window_is_the_default() {
    let store = copy_fixture("kubernetes");
    let some = deleted(store.path());
    let all = deleted_with(store.path(), &[]);
    assert_eq!(all["from_revision"], 0);
    // Nothing was deleted before.
    assert_eq!(all["deleted"].as_array().unwrap(), &some);
    assert_eq!(all["warnings"], Value::Array(Vec::new()));
    let cut = deleted_with(store.path(), &["--since", "2020-01-01T00:00:00Z"]);
    assert_eq!(cut["deleted"], all["deleted"]);
    let warning = cut["warnings"][0].as_str().unwrap();
    assert!(
        warning.contains("before the oldest state of the backup"),
        "{warning}"
    );
}

/// The deltas are lost, and fulls without history are left: the key is in the first one and not in the second.
#[test]
fn a_deletion_that_nothing_records_is_dated_by_the_full_that_lacks_it() {
    let store = copy_fixture("etcd36-gzip");
    let recorded = deleted_with(store.path(), &["--since", "736"]);
    let recorded = recorded["deleted"].as_array().unwrap();
    let mut command = deltafold();
    command.args(["compact", "--output", "json", "--store"]);
    succeed(command.arg(store.path()));
    remove_deltas(store.path());
    for since in [&["--since", "736"][..], &["--since", "800"], &[]] {
        let result = deleted_with(store.path(), since);
        let found = result["deleted"].as_array().unwrap();
        for d in recorded.iter().filter(|d| d["recreated"] == false) {
            // What was created after the first full left no trace, and a full holds its own last change.
            let same = found.iter().find(|f| f["key"] == d["key"]);
            let Some(same) = same.filter(|d| d["revision"].is_null()) else {
                continue;
            };
            assert_eq!(same["time"], Value::Null);
            assert!(same["not_after"].as_str().unwrap() > d["time"].as_str().unwrap());
        }
        assert!(found.iter().any(|d| d["revision"].is_null()), "{result:#}");
    }
}

fn remove_deltas(store: &Path) {
    for entry in fs::read_dir(store.join("v2")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("Incr") {
            fs::remove_file(path).unwrap();
        }
    }
}

/// `gc` has removed the deltas, and the newest full holds their history.
#[test]
fn deletions_inside_fulls_are_found() {
    let store = copy_fixture("kubernetes");
    let in_deltas = deleted(store.path());
    assert!(in_deltas.len() > 2);
    let mut command = deltafold();
    command.args(["compact", "--keep-history", "all", "--output", "json"]);
    succeed(command.arg("--store").arg(store.path()));
    remove_deltas(store.path());
    let in_full = deleted(store.path());
    let all = deleted_with(store.path(), &[]);
    assert_eq!(all["deleted"].as_array().unwrap(), &in_full);
    // The next snapshot after each deletion tells a time.
    assert!(in_full.iter().all(|d| d["not_after"].is_string()));
    let without_times = |deleted: &[Value]| {
        let mut deleted = deleted.to_vec();
        for d in &mut deleted {
            d["time"] = Value::Null;
            d["not_after"] = Value::Null;
        }
        deleted
    };
    assert_eq!(without_times(&in_full), without_times(&in_deltas));
    for d in &in_full {
        let mut command = deltafold();
        command.args(["history", d["key"].as_str().unwrap(), "--output", "json"]);
        let history = succeed(command.arg("--store").arg(store.path()));
        let versions = history["versions"].as_array().unwrap();
        let shown = versions.iter().filter(|v| v["deleted"] == true);
        assert!(
            shown.map(|v| &v["revision"]).any(|r| *r == d["revision"]),
            "{d}"
        );
    }
}
