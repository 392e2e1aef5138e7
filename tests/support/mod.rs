//! What the tests share: real servers and tools, recorded and random histories, proxies, runs of the program.

// Each test program uses only a part of this.
#![allow(dead_code)]

pub mod chart;
pub mod cluster_namespace;
pub mod conformance;
pub mod controller;
pub mod disk;
pub mod etcd;
pub mod etcd_cluster;
pub mod explore;
pub mod fake_s3;
pub mod faults;
pub mod follower;
pub mod fuzz_hostile;
pub mod fuzz_targets;
pub mod gc_history;
pub mod gcs;
pub mod golden;
pub mod held_connection;
pub mod history;
pub mod hooked_store;
pub mod keys;
pub mod killed;
pub mod kube;
pub mod kubelet;
pub mod lock_suite;
pub mod made_backups;
pub mod manifests;
pub mod member;
pub mod minio;
pub mod mounted_secret;
pub mod namespace;
pub mod object_recorder;
pub mod orphan_deltas;
pub mod pages;
pub mod place;
pub mod process;
pub mod proxy;
pub mod random;
pub mod random_load;
pub mod recorded_etcd;
pub mod reference;
pub mod restorable;
pub mod s3;
pub mod schema;
pub mod scratch;
pub mod set_back;
pub mod terminal;
pub mod tiny_backup;
pub mod tools;
pub mod truth;
pub mod versitygw;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

use deltafold::prefix::Context;
use deltafold::store::Store;
use deltafold::store::exclude::ExcludeTags;
use object_store::ObjectStore;
use object_store::path::Path as ObjectPath;
use serde::Deserialize;
use tempfile::TempDir;
use tokio::runtime::Runtime;

// Not every test program uses these re-exports.
#[allow(unused_imports)]
pub use random::{rounds, seed};
use tools::EtcdVersion;

/// The content of `fixtures/NAME.expected.json`: what the recorded etcd reported about itself.
#[derive(Clone, Debug, Deserialize)]
pub struct Expected {
    pub etcd_version: String,
    pub compression: String,
    pub last_revision: i64,
    pub hash_kv: Vec<ExpectedHash>,
    pub compacted_at_last_revision: ExpectedCompacted,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub struct ExpectedHash {
    pub revision: i64,
    pub compact_revision: i64,
    pub hash: u32,
    pub live_keys: u64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub struct ExpectedCompacted {
    pub compact_revision: i64,
    pub hash: u32,
    pub live_keys: u64,
}

pub fn fixtures_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Returns the names of the fixtures, sorted.
pub fn fixture_names() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(fixtures_dir())
        .expect("the fixtures")
        .map(|entry| entry.expect("a fixture").file_name())
        .filter_map(|name| {
            name.to_str()?
                .strip_suffix(".expected.json")
                .map(str::to_owned)
        })
        .collect();
    names.sort();
    assert!(!names.is_empty(), "no fixtures");
    names
}

pub fn expected(name: &str) -> Expected {
    let path = fixtures_dir().join(format!("{name}.expected.json"));
    let bytes = fs::read(&path).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|err| panic!("{}: {err}", path.display()))
}

/// Copies a fixture to a temporary folder, which can be used as a store: it contains `v2`.
pub fn copy_fixture(name: &str) -> TempDir {
    let copy = scratch::folder_named("fixture-").expect("a folder for the fixture");
    copy_dir(&fixtures_dir().join(name), copy.path());
    copy
}

/// Copies a folder and everything in it. `to` may exist.
pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("create a folder");
    for entry in fs::read_dir(from).unwrap_or_else(|err| panic!("{}: {err}", from.display())) {
        let from = entry.expect("a folder's entry").path();
        let to = to.join(from.file_name().expect("a name"));
        if from.is_dir() {
            copy_dir(&from, &to);
        } else {
            // Copy the content only: a fixture may be read-only.
            fs::write(&to, fs::read(&from).expect("read a fixture")).expect("write a fixture");
        }
    }
}

/// Whether tests write the files that are generated from the program, instead of comparing them: `tests/generate`.
pub fn writes_generated() -> bool {
    std::env::var_os("DELTAFOLD_TEST_WRITE").is_some()
}

/// If set, this program is tested. A benchmark uses it to compare two programs.
pub static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// The program that is tested: the one that `DELTAFOLD_TEST_PROGRAM` names, or the one that cargo built for the
/// tests. `.ci/run` names the release build, which users run.
pub fn program() -> &'static Path {
    PROGRAM.get_or_init(|| {
        let named = std::env::var_os("DELTAFOLD_TEST_PROGRAM");
        named.map_or_else(|| env!("CARGO_BIN_EXE_deltafold").into(), PathBuf::from)
    })
}

/// Returns a command that runs deltafold without the caller's environment variables for settings and
/// credentials.
pub fn deltafold() -> Command {
    let mut command = Command::new(program());
    tools::forget_env(
        &mut command,
        &[
            "DELTAFOLD_",
            "ETCDCTL_",
            "AWS_",
            "GOOGLE_",
            "AZURE_",
            "OS_",
            "ST_",
            "OPENSTACK_",
            "ALICLOUD_",
            "ALIBABA_",
        ],
    );
    // The terminal of the tests must not decide how results look.
    for variable in ["COLUMNS", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "CI"] {
        command.env_remove(variable);
    }
    command.env("TMPDIR", scratch::place()).env("TZ", "UTC");
    command.stdin(Stdio::null());
    command
}

/// Returns what an operation needs, without keys.
pub fn context(store: Store, threads: usize) -> Context {
    Context {
        store,
        temp_dir: scratch::place(),
        threads,
        keys: Default::default(),
        trust: Default::default(),
        limits: Default::default(),
        marks: Default::default(),
    }
}

/// Returns the whole of an object store as a bucket of the program.
pub fn bucket_store(rt: &Runtime, inner: impl ObjectStore, tags: ExcludeTags) -> Store {
    let (path, url) = (ObjectPath::default(), "test://bucket".to_owned());
    Store::new(Arc::new(inner), path, url, tags, rt.handle().clone())
}

/// Returns a builder for an HTTP client that uses no proxy.
pub fn http_client() -> reqwest::ClientBuilder {
    deltafold::base::tls::ensure_provider();
    reqwest::Client::builder().no_proxy()
}

/// Makes every `s3://` URL unreachable for a command.
pub fn without_servers(command: &mut Command) -> &mut Command {
    command
        .env("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_REGION", "nowhere")
        .env("AWS_ACCESS_KEY_ID", "nobody")
        .env("AWS_SECRET_ACCESS_KEY", "nothing")
}

/// Runs `deltafold restore` into a data directory. Returns the exit code, the JSON and standard error.
pub fn restore(store: &Path, data_dir: &Path, args: &[&str]) -> (i32, serde_json::Value, String) {
    let mut command = deltafold();
    command
        .args(["restore", "--output", "json", "--store"])
        .arg(store)
        .arg("--data-dir")
        .arg(data_dir)
        .args(args);
    run_json(&mut command)
}

/// Returns the etcd versions that can start on a database that the version `source` wrote. The list was found
/// by trying them on etcd's own snapshots.
pub fn that_start_on(source: &str) -> &'static [EtcdVersion] {
    match source {
        s if s.starts_with("3.7.") => &[EtcdVersion::V3_7, EtcdVersion::V3_5],
        _ => &EtcdVersion::ALL,
    }
}

/// Runs a command that must succeed. Returns the JSON on standard output.
#[track_caller]
pub fn succeed(command: &mut Command) -> serde_json::Value {
    let (code, json, stderr) = run_json(command);
    assert_eq!(code, 0, "{command:?}: {json:#}\n{stderr}");
    json
}

/// Runs a command to its end. Returns the exit code, the JSON on standard output (null if there is none) and
/// standard error. The JSON of every deltafold must match the command's schema. The JSON of `get` is its result.
pub fn run_json(command: &mut Command) -> (i32, serde_json::Value, String) {
    let args: Vec<_> = command.get_args().collect();
    let asks_for_json = args.contains(&"--output=json".as_ref())
        || args.windows(2).any(|pair| pair == ["--output", "json"]);
    if asks_for_json && args.first().is_some_and(|first| *first == "get") {
        command.args(["--output", "result"]);
    }
    let output = command.output().expect("run the command");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let code = output
        .status
        .code()
        .unwrap_or_else(|| panic!("{:?} ended with {}\n{stderr}", command, output.status));
    let stdout = output.stdout.trim_ascii();
    let json = if stdout.is_empty() {
        serde_json::Value::Null
    } else {
        serde_json::from_slice(stdout).unwrap_or_else(|err| {
            panic!(
                "not JSON ({err}) from {command:?}:\n{}\n{stderr}",
                String::from_utf8_lossy(stdout)
            )
        })
    };
    schema::check_result(command, &json);
    (code, json, stderr)
}
