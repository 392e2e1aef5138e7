//! What `deleted` finds must be what `history` shows, wherever it is recorded.

use crate::support::{copy_fixture, deltafold, succeed};
use serde_json::Value;
use std::fs;
use std::path::Path;

fn deleted(store: &Path) -> Vec<Value> {
    let mut command = deltafold();
    command.args(["deleted", "--since", "300", "--output", "json", "--store"]);
    let result = succeed(command.arg(store));
    result["deleted"].as_array().unwrap().clone()
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
    for entry in fs::read_dir(store.path().join("v2")).unwrap() {
        let path = entry.unwrap().path();
        if path
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("Incr")
        {
            fs::remove_file(path).unwrap();
        }
    }
    let in_full = deleted(store.path());
    let without_times = |deleted: &[Value]| {
        let mut deleted = deleted.to_vec();
        for d in &mut deleted {
            d["time"] = Value::Null;
        }
        deleted
    };
    assert_eq!(in_full, without_times(&in_deltas));
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
