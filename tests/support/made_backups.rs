//! Backups made from the events of the fixtures: deltas cut anew, altered, or renamed.

use super::history::{Compression, with_checksum};
use super::scratch;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use deltafold::backup::catalog::mark_of;
use futures::{FutureExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt as _};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The fixture that most tests start from: gzip, base at revision 746, deltas to 1499 and 2252.
pub const FIXTURE: &str = "etcd35-gzip";
pub const BASE: i64 = 746;
pub const LAST: i64 = 2252;
/// When the base was created, in Unix seconds.
pub const T0: i64 = 1_795_224_681;

/// Returns every event of the fixture's deltas, in order.
pub fn fixture_events() -> Vec<Value> {
    let mut paths: Vec<PathBuf> = fs::read_dir(super::fixtures_dir().join(FIXTURE).join("v2"))
        .expect("the fixture")
        .map(|e| e.expect("an entry").path())
        .filter(|p| p.to_string_lossy().contains("/Incr-"))
        .collect();
    paths.sort();
    let mut events = Vec::new();
    for path in paths {
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(fs::File::open(path).expect("a delta"))
            .read_to_end(&mut plain)
            .expect("gzip");
        plain.truncate(plain.len() - 32);
        let part: Vec<Value> = serde_json::from_slice(&plain).expect("JSON");
        events.extend(part);
    }
    events
}

pub fn revision(event: &Value) -> i64 {
    event["etcdEvent"]["kv"]["mod_revision"]
        .as_i64()
        .expect("a revision")
}

/// Contents of objects by path.
pub type Objects = BTreeMap<String, Vec<u8>>;

/// Returns every file below a folder. Skips files that a running job removes meanwhile.
pub fn objects_in(root: &Path) -> Objects {
    let mut all = Objects::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(e) if e.kind() == ErrorKind::NotFound && folder != root => continue,
            entries => entries.expect("a folder"),
        };
        for entry in entries {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let bytes = match fs::read(&path) {
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                bytes => bytes.expect("an object"),
            };
            let below = path.strip_prefix(root).expect("a path below");
            let below = below.to_str().expect("a plain name").to_owned();
            all.insert(below, bytes);
        }
    }
    all
}

/// Returns every object of a store.
pub async fn objects_of(store: &impl ObjectStore) -> Objects {
    let mut all = Objects::new();
    let listed: Vec<_> = store.list(None).try_collect().await.expect("a listing");
    for object in listed {
        let got = store.get(&object.location).await.expect("an object");
        let bytes = got.bytes().await.expect("its bytes").to_vec();
        all.insert(object.location.to_string(), bytes);
    }
    all
}

/// Returns a store in memory with these objects.
pub fn in_memory(objects: &Objects) -> Arc<InMemory> {
    let store = InMemory::new();
    for (path, bytes) in objects {
        let path = ObjectPath::from(path.as_str());
        let put = store.put(&path, bytes.clone().into());
        let put = put.now_or_never().expect("memory does not wait");
        put.expect("to memory");
    }
    Arc::new(store)
}

/// Returns the paths, in order.
pub fn paths(objects: &Objects) -> Vec<&str> {
    objects.keys().map(String::as_str).collect()
}

/// A store in a local folder.
pub struct Bucket {
    folder: tempfile::TempDir,
    pub events: Vec<Value>,
}

impl Bucket {
    /// A store that holds the fixture's base and nothing else.
    pub fn with_base() -> Self {
        let bucket = Bucket {
            folder: scratch::folder_named("bucket-").expect("a folder"),
            events: fixture_events(),
        };
        let name = format!("Full-00000000-{BASE:08}-{T0}.gz");
        let base = super::fixtures_dir().join(FIXTURE).join("v2").join(&name);
        bucket.put(&format!("v2/{name}"), &fs::read(base).expect("the base"));
        bucket
    }

    /// A store that holds exactly these objects.
    pub fn of(objects: &Objects) -> Self {
        let bucket = Bucket {
            folder: scratch::folder_named("bucket-").expect("a folder"),
            events: Vec::new(),
        };
        for (path, bytes) in objects {
            bucket.put(path, bytes);
        }
        bucket
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn put(&self, path: &str, bytes: &[u8]) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("create the folder");
        fs::write(path, bytes).expect("write an object");
    }

    /// Returns the fixture's events from revision `start` to `last`.
    pub fn events(&self, start: i64, last: i64) -> Vec<Value> {
        let within = |e: &&Value| (start..=last).contains(&revision(e));
        self.events.iter().filter(within).cloned().collect()
    }

    /// Writes a delta of the fixture's own events, created `after` seconds after the base.
    pub fn delta(&self, start: i64, last: i64, after: i64) -> String {
        self.delta_of(start, last, after, &self.events(start, last))
    }

    /// Writes a delta of the fixture's events with other values: a different history.
    pub fn altered_delta(&self, start: i64, last: i64, after: i64) -> String {
        self.delta_of(
            start,
            last,
            after,
            &alter(self.events(start, last), b"another history"),
        )
    }

    /// Writes a delta of any events.
    pub fn delta_of(&self, start: i64, last: i64, after: i64, events: &[Value]) -> String {
        let name = format!("Incr-{start:08}-{last:08}-{}.gz", T0 + after);
        let json = serde_json::to_vec(events).expect("JSON");
        let packed = Compression::Gzip.pack(&with_checksum(&json));
        self.put(&format!("v2/{name}"), &packed);
        name
    }

    /// Writes a delta after the fixture's last one that puts keys of half a megabyte of noise, so that the
    /// result is uploaded in parts. Returns the last revision.
    pub fn noise_delta(&self, keys: i64) -> i64 {
        let mut rng = fastrand::Rng::with_seed(7);
        let events: Vec<Value> = (1..=keys)
            .map(|i| {
                let mut value = vec![0; 500_000];
                rng.fill(&mut value);
                let revision = LAST + i;
                serde_json::json!({"etcdEvent": {"kv": {
                    "key": BASE64.encode(format!("noise/{i}")), "create_revision": revision,
                    "mod_revision": revision, "version": 1, "value": BASE64.encode(value),
                }}, "time": "2026-11-21T00:00:00Z"})
            })
            .collect();
        self.delta_of(LAST + 1, LAST + keys, 12, &events);
        LAST + keys
    }

    /// Returns the names below `v2/`, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.path().join("v2"))
            .expect("v2")
            .map(|e| {
                e.expect("an entry")
                    .file_name()
                    .into_string()
                    .expect("a name")
            })
            .collect();
        names.sort();
        names
    }

    /// Returns every object.
    pub fn objects(&self) -> Objects {
        objects_in(self.path())
    }

    /// Runs a command on the store and returns the exit code, the JSON and standard error.
    pub fn run(&self, command: &str, args: &[&str]) -> (i32, Value, String) {
        let mut c = super::deltafold();
        c.args([command, "--output", "json", "--store"])
            .arg(self.path())
            .args(args)
            // Purge at once unless the test asks for something else.
            .env("DELTAFOLD_PURGE_AFTER", "0s");
        super::run_json(&mut c)
    }

    /// Runs a command that must succeed. Returns the JSON.
    #[track_caller]
    pub fn succeeds(&self, command: &str, args: &[&str]) -> Value {
        let (code, json, stderr) = self.run(command, args);
        assert_eq!(code, 0, "{command} {args:?}: {stderr}");
        json
    }

    #[track_caller]
    pub fn compact(&self, args: &[&str]) -> Value {
        self.succeeds("compact", args)
    }

    /// Compacts and asserts that it fails with this code and reason and writes nothing. Returns the message.
    pub fn refuses(&self, args: &[&str], code: i32, reason: &str) -> String {
        let before = self.names();
        let (got, json, stderr) = self.run("compact", args);
        assert_eq!(
            (got, json["reason"].as_str()),
            (code, Some(reason)),
            "{args:?}: {stderr}"
        );
        assert_eq!(
            (json["status"].as_str(), json["code"].as_i64()),
            (Some("Failed"), Some(code.into()))
        );
        assert_eq!(self.names(), before, "{args:?}");
        json["message"].as_str().expect("a message").to_owned()
    }

    pub fn list(&self, args: &[&str]) -> Value {
        let (code, json, stderr) = self.run("list", args);
        assert_eq!(code, 0, "{stderr}");
        json
    }
}

/// A store with both layouts, notes, exclusion markers and foreign objects.
pub fn mixed() -> Bucket {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, 1499, 6);
    bucket.delta(1500, LAST, 9);
    let noise = |n: u8| Compression::Gzip.pack(&with_checksum(&[n; 100]));
    bucket.put("v1/Backup-500/Full-00000000-00000050-500.gz", &noise(1));
    bucket.put("v1/Backup-500/Incr-00000051-00000060-501.gz", &noise(2));
    bucket.put("v2/Incr-00000070-00000080-502.gz", &noise(3));
    let excluded = format!("v2/Full-00000000-00001000-{}.gz", T0 + 7);
    bucket.put(&excluded, &noise(4));
    bucket.put(&mark_of(&excluded), b"");
    bucket.put(
        &format!("deltafold-pins/Full-00000000-{BASE:08}-{T0}.gz"),
        b"{}",
    );
    bucket.put(
        &format!("deltafold-timelines/Full-00000000-{BASE:08}-{T0}.gz"),
        b"begins\n",
    );
    bucket.put("v2/README", b"not ours");
    bucket
}

/// Appends `with` to every value.
pub fn alter(mut events: Vec<Value>, with: &[u8]) -> Vec<Value> {
    for e in &mut events {
        if e["etcdEvent"]["type"].as_i64() == Some(1) {
            continue;
        }
        let kv = &mut e["etcdEvent"]["kv"];
        let old = BASE64
            .decode(kv["value"].as_str().unwrap_or_default())
            .expect("base64");
        kv["value"] = BASE64.encode([&old, with].concat()).into();
    }
    events
}
