//! The format of a prefix stays: `fixtures/prefix` has prefixes with every kind of note and lock, and what the
//! commands said and did with them.

use crate::support::gc_history::NEWEST_FULL;
use crate::support::scratch;
use crate::support::{copy_dir, deltafold, fixtures_dir, run_json};
use deltafold::store::lock::{Attempt, Lock};
use serde_json::{Map, Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Fields that differ from run to run, and sentences, which may change.
const NOT_KEPT: [&str; 13] = [
    "bytes_written",
    "data_dir",
    "etag",
    "explanation",
    "message",
    "modified",
    "now",
    "peak_memory_bytes",
    "seconds",
    "snapshot_age_seconds",
    "snapshot_file",
    "snapshot_url",
    "warnings",
];

fn prefixes() -> PathBuf {
    fixtures_dir().join("prefix")
}

/// A copy of a prefix.
struct Prefix {
    folder: TempDir,
    identity: Option<PathBuf>,
}

impl Prefix {
    fn of(name: &str) -> Self {
        let prefixes = prefixes();
        let folder = scratch::folder_named("prefix-").unwrap();
        copy_dir(&prefixes.join(name), &folder.path().join("store"));
        let identity = folder.path().join("identity.txt");
        fs::copy(prefixes.join("identity.txt"), &identity).unwrap();
        fs::set_permissions(&identity, fs::Permissions::from_mode(0o600)).unwrap();
        let identity = (name == "encrypted").then_some(identity);
        Prefix { folder, identity }
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// Runs a command. Returns the exit code and the stable part of the result.
    fn run(&self, args: &[&str]) -> Value {
        let mut command = deltafold();
        command.args(args).args(["--output", "json", "--store"]);
        command.arg(self.store());
        if let Some(file) = &self.identity {
            command.arg("--age-identity").arg(file);
        }
        let (code, mut result, stderr) = run_json(&mut command);
        assert!(!result.is_null(), "{args:?}: {stderr}");
        let place = self.folder.path().to_str().unwrap();
        keep(&mut result, place);
        json!({"code": code, "result": result})
    }

    /// Returns the paths of all files.
    fn files(&self) -> Vec<String> {
        fn walk(at: &Path, root: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(at).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => walk(&path, root, found),
                    false => found.push(path.strip_prefix(root).unwrap().display().to_string()),
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.store(), &self.store(), &mut found);
        found.sort();
        found
    }
}

fn keep(value: &mut Value, place: &str) {
    match value {
        Value::Object(o) => {
            o.retain(|name, _| !NOT_KEPT.contains(&name.as_str()));
            o.values_mut().for_each(|v| keep(v, place));
        }
        Value::Array(all) => all.iter_mut().for_each(|v| keep(v, place)),
        Value::String(text) => *text = text.replace(place, ""),
        _ => {}
    }
}

/// Keeps one full with its deltas, and no leftovers.
fn collect() -> Vec<&'static str> {
    [&["gc"], &NEWEST_FULL[..], &["--staging-age", "0s"]].concat()
}

/// Commands that change nothing, by the names of their outcomes.
const READING: [(&str, &[&str]); 4] = [
    ("list", &["list"]),
    ("list, deep", &["list", "--deep"]),
    ("verify", &["verify", "--level", "fold", "--all-chains"]),
    ("get", &["get", "--prefix", ""]),
];

fn decided(name: &str) -> Value {
    let mut told = Map::new();
    let prefix = Prefix::of(name);
    for (what, args) in READING {
        told.insert(what.to_owned(), prefix.run(args));
    }
    told.insert("gc".to_owned(), prefix.run(&collect()));
    let file = prefix.folder.path().join("restored.db");
    let restore = ["restore", "--to-snapshot", file.to_str().unwrap()];
    told.insert("restore".to_owned(), prefix.run(&restore));

    // Each command runs on its own copy; then compare what is left.
    let mut changing: Vec<(&str, Vec<&str>)> = vec![
        ("compact", vec!["compact"]),
        ("gc, applied", [&collect()[..], &["--apply"]].concat()),
    ];
    let pins = prefix.files();
    let pinned = pins.iter().find_map(|f| f.strip_prefix("deltafold-pins/"));
    if let Some(pinned) = pinned {
        changing.push(("pin again", vec!["pin", pinned]));
        changing.push(("unpin", vec!["pin", "--unpin", pinned]));
    }
    for (what, args) in changing {
        let prefix = Prefix::of(name);
        let mut outcome = prefix.run(&args);
        outcome["files"] = json!(prefix.files());
        told.insert(what.to_owned(), outcome);
    }
    told.into()
}

#[test]
fn what_is_in_them_and_what_goes() {
    for name in ["plain", "encrypted", "v1"] {
        let now = decided(name);
        let file = prefixes().join(format!("{name}.json"));
        if std::env::var_os("DELTAFOLD_TEST_WRITE").is_some() {
            let text = serde_json::to_string_pretty(&now).unwrap();
            fs::write(&file, text + "\n").unwrap();
        }
        let before: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        for (what, before) in before.as_object().unwrap() {
            assert_eq!(&now[what], before, "{name}: {what}");
        }
    }
}

/// The lock of a killed holder stays until it expires; a released lock is free.
#[test]
fn locks() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let prefix = Prefix::of("plain");
    let url = prefix.store().display().to_string();
    let store = deltafold::store::open(&url, &[], runtime.handle().clone()).unwrap();
    let attempt = |name| {
        let lock = Lock::new(&store, name, "me", Duration::from_secs(30));
        lock.unwrap().try_acquire().unwrap()
    };
    let Attempt::HeldBy(holder) = attempt("follow") else {
        panic!("the follower's lock is taken at once");
    };
    let identity = &holder.identity;
    assert!(identity.starts_with("etcd-0."), "{identity}");
    assert!(matches!(attempt("gc"), Attempt::Acquired(_)));
}
