//! Files of the repository, and Kubernetes objects.

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
