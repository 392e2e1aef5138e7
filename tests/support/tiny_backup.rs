//! A backup so small that a test can damage every byte of it, and compactions of it without starting the
//! deltafold program.

use super::bucket_store;
use super::history::{Compression, with_checksum};
use super::made_backups::{in_memory, objects_of};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use deltafold::base::TextValue;
use deltafold::bolt::{TreeBuilder, write_file};
use deltafold::mvcc::revision::encode_revision;
use deltafold::mvcc::{KeyValue, RecordKey, Revision};
use deltafold::ops::compact;
use deltafold::ops::compact::History;
use deltafold::ops::report::Report;
use deltafold::prefix::Context;
use deltafold::store::{Keys, exclude::ExcludeTags};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Seek, Write as _};
use std::ops::RangeInclusive;

/// The newest revision of the base. The base was compacted at revision 10 (COMPACTED).
pub const SMALL_BASE: i64 = 40;
/// The newest revision of the delta.
pub const SMALL_LAST: i64 = 48;
const COMPACTED: i64 = 10;

/// A base with three keys that change in turn.
pub fn small_database(page_size: usize) -> Vec<u8> {
    database(page_size, COMPACTED - 2..=SMALL_BASE, COMPACTED)
}

/// A database with the changes of these revisions. It has etcd's buckets; small ones are inline, and with small
/// pages `key` has a branch page.
pub fn database(page_size: usize, changes: RangeInclusive<i64>, compacted: i64) -> Vec<u8> {
    database_of(page_size, changes, compacted, change)
}

fn database_of(
    page_size: usize,
    changes: RangeInclusive<i64>,
    compacted: i64,
    change: impl Fn(i64) -> KeyValue<'static>,
) -> Vec<u8> {
    let file = tempfile::tempfile().expect("a temporary file");
    let file = write_file(file, page_size, "", |w| {
        let mut key = TreeBuilder::new(0);
        for main in changes.clone() {
            let rk = RecordKey {
                main: Revision(main),
                sub: 0,
                tombstone: false,
            };
            let (mut k, mut v) = (Vec::new(), Vec::new());
            rk.encode(&mut k);
            change(main).encode(&mut v);
            key.push(w, &k, &v)?;
        }
        let mut buckets = BTreeMap::new();
        buckets.insert("key", key);
        for name in ["alarm", "auth", "cluster", "lease", "members", "meta"] {
            buckets.insert(name, TreeBuilder::new(0));
        }
        let mut put = |bucket: &str, key: &[u8], value: &[u8]| {
            let tree = buckets.get_mut(bucket).expect("a bucket");
            tree.push(w, key, value)
        };
        put("cluster", b"clusterVersion", b"3.5.0")?;
        for name in [&b"finishedCompactRev"[..], b"scheduledCompactRev"] {
            put("meta", name, &encode_revision(Revision(compacted), 0))?;
        }
        let mut root = TreeBuilder::new(0);
        for (name, tree) in buckets {
            let value = tree.finish(w)?;
            root.push_bucket(w, name.as_bytes(), &value)?;
        }
        Ok(root)
    });
    let mut file = file.expect("write the database");
    let mut bytes = Vec::new();
    file.rewind()
        .and_then(|()| file.read_to_end(&mut bytes))
        .expect("read it back");
    bytes
}

/// Returns the change that revision `main` made. Three keys take turns; revisions 2, 3 and 4 create them.
pub fn change(main: i64) -> KeyValue<'static> {
    const KEYS: [&[u8]; 3] = [b"/registry/a", b"/registry/b", b"/registry/c"];
    KeyValue {
        key: KEYS[(main % 3) as usize],
        create_revision: Revision(2 + (main - 2) % 3),
        mod_revision: Revision(main),
        version: 1 + (main - 2) / 3,
        value: b"some value that is not long",
        lease: if main % 3 == 0 { 7 } else { 0 },
    }
}

/// The events after the base. The last one deletes a key.
pub fn small_events() -> Vec<Value> {
    let mut events = put_events(SMALL_BASE + 1..=SMALL_LAST);
    let last = events.last_mut().expect("an event");
    last["etcdEvent"] = json!({"type": 1, "kv": {
        "key": BASE64.encode(change(SMALL_LAST).key), "mod_revision": SMALL_LAST
    }});
    events
}

/// The [changes](change) as events of a delta, one per second.
pub fn put_events(changes: RangeInclusive<i64>) -> Vec<Value> {
    let event = |main: i64| {
        let kv = change(main);
        let time = format!("2026-11-21T02:30:{:02}Z", main % 60);
        json!({"etcdEvent": {"kv": {
            "key": BASE64.encode(kv.key), "create_revision": kv.create_revision,
            "mod_revision": main, "version": kv.version, "value": BASE64.encode(kv.value),
            "lease": kv.lease
        }}, "time": time})
    };
    changes.map(event).collect()
}

pub fn full_name(compression: Compression) -> String {
    format!(
        "v2/Full-00000000-{SMALL_BASE:08}-1795224681{}",
        compression.suffix()
    )
}

pub fn delta_name(compression: Compression) -> String {
    let suffix = compression.suffix();
    format!(
        "v2/Incr-{:08}-{SMALL_LAST:08}-1795224690{suffix}",
        SMALL_BASE + 1
    )
}

/// Encodes a payload as an object: with its SHA-256, then compressed.
pub fn object(payload: &[u8], compression: Compression) -> Vec<u8> {
    compression.pack(&with_checksum(payload))
}

/// The contents of objects by path.
pub type Objects = BTreeMap<String, Vec<u8>>;

/// The small base and its delta.
pub fn small_bucket(page_size: usize, compression: Compression) -> Objects {
    let delta = serde_json::to_vec(&small_events()).expect("JSON");
    Objects::from([
        (
            full_name(compression),
            object(&small_database(page_size), compression),
        ),
        (delta_name(compression), object(&delta, compression)),
    ])
}

/// Options of a compaction that keeps the whole history.
pub fn keep_all() -> compact::Options {
    compact::Options {
        history: History {
            keep_history: Some(TextValue::of("all")),
        },
        ..compact::Options::default()
    }
}

/// Runs compactions on objects in memory.
pub struct InProcess {
    runtime: tokio::runtime::Runtime,
}

impl InProcess {
    pub fn new() -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        InProcess { runtime }
    }

    /// Compacts. Returns the outcome and all objects.
    pub fn compact(
        &self,
        objects: &Objects,
    ) -> (deltafold::Result<Report<compact::Compacted>>, Objects) {
        self.compact_with(objects, Keys::default())
    }

    /// Like [`compact`](Self::compact), with encryption keys.
    pub fn compact_with(
        &self,
        objects: &Objects,
        keys: Keys,
    ) -> (deltafold::Result<Report<compact::Compacted>>, Objects) {
        let memory = in_memory(objects);
        let store = bucket_store(&self.runtime, memory.clone(), ExcludeTags::none());
        let context = Context {
            keys,
            ..super::context(store, 1)
        };
        let outcome = compact::run(&context, &keep_all());
        let after = self.runtime.block_on(objects_of(&memory));
        (outcome, after)
    }
}

/// Returns a plain snapshot of the revisions from 8 to `last`, as `etcdctl snapshot save` writes it.
pub fn plain_snapshot(last: i64) -> Vec<u8> {
    with_checksum(&database(4096, 8..=last, 10))
}

/// As [`plain_snapshot`], of a history that differs from revision `fork` on.
pub fn forked_snapshot(last: i64, fork: i64) -> Vec<u8> {
    let change = |main: i64| KeyValue {
        value: if main < fork {
            change(main).value
        } else {
            b"another value"
        },
        ..change(main)
    };
    with_checksum(&database_of(4096, 8..=last, 10, change))
}

/// As [`plain_snapshot`], of a cluster of Kubernetes whose namespace kube-system has this UID.
pub fn snapshot_of_cluster(last: i64, uid: &str) -> Vec<u8> {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-system", "uid": uid}});
    let namespace: &'static [u8] = Vec::leak(namespace.to_string().into_bytes());
    let change = |main: i64| match main {
        8 => KeyValue {
            key: b"/registry/namespaces/kube-system",
            create_revision: Revision(8),
            version: 1,
            value: namespace,
            ..change(8)
        },
        _ => change(main),
    };
    with_checksum(&database_of(4096, 8..=last, 10, change))
}

/// Returns a zip archive with one file.
pub fn zip(content: &[u8]) -> Vec<u8> {
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    archive.start_file("snapshot", options).unwrap();
    archive.write_all(content).unwrap();
    archive.finish().unwrap().into_inner()
}
