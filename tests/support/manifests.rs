//! The output of `deltafold manifests`, and the files of the repository that it is compared with.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Returns the path of a file of the repository.
pub fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

pub fn read(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Returns what the program prints. Fails if it writes to standard error.
pub fn printed(args: &[&str]) -> String {
    let out = super::deltafold().arg("manifests").args(args).output();
    let out = out.expect("run the command");
    let said = String::from_utf8(out.stderr).expect("UTF-8");
    assert!(out.status.success() && said.is_empty(), "{args:?}: {said}");
    String::from_utf8(out.stdout).expect("UTF-8")
}

/// Returns the documents of a YAML text.
pub fn documents(text: &str) -> Vec<Value> {
    let documents = text.split("\n---\n").map(yaml_serde::from_str);
    let documents = documents.map(|d: Result<Value, _>| d.expect("YAML"));
    documents.filter(|d| !d.is_null()).collect()
}

pub fn kind(object: &Value) -> &str {
    object["kind"].as_str().expect("a kind")
}

pub fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().expect("a name")
}
