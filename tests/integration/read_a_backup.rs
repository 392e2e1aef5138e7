//! `get`, `history`, `diff` and `export` report what etcd itself has at the same revisions, and fail properly
//! on what does not exist.

use crate::support::etcd::Etcd;
use crate::support::history::{Compression, Recorder};
use crate::support::made_backups::{BASE, Bucket, LAST, T0, fixture_events, revision};
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use crate::support::{copy_fixture, deltafold, rounds, run_json, seed};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use etcd_client::{EventType, GetOptions, Txn, TxnOp, WatchOptions};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Stdio;

/// A version of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kv {
    create: i64,
    modified: i64,
    version: i64,
    lease: i64,
    value: Vec<u8>,
}

type State = BTreeMap<Vec<u8>, Kv>;

/// Returns `key` or `key_base64`, `value` or `value_base64`: exactly one of the two is there.
fn bytes(object: &Value, name: &str) -> Vec<u8> {
    let base64 = &object[format!("{name}_base64")];
    match (object[name].as_str(), base64.as_str()) {
        (Some(text), None) => text.as_bytes().to_vec(),
        (None, Some(base64)) => {
            let bytes = BASE64.decode(base64).unwrap();
            assert!(std::str::from_utf8(&bytes).is_err(), "{object}");
            bytes
        }
        _ => panic!("{name}: {object}"),
    }
}

fn kv(record: &Value) -> Kv {
    let number = |name: &str| record[name].as_i64().unwrap();
    Kv {
        create: number("create_revision"),
        modified: number("mod_revision"),
        version: number("version"),
        lease: number("lease"),
        value: bytes(record, "value"),
    }
}

fn state(keys: &[Value]) -> State {
    let listed: Vec<Vec<u8>> = keys.iter().map(|k| bytes(k, "key")).collect();
    assert!(listed.is_sorted(), "keys come in order");
    let state: State = keys.iter().map(|k| (bytes(k, "key"), kv(k))).collect();
    assert_eq!(state.len(), keys.len());
    state
}

/// Runs a command that must succeed and returns its JSON.
fn json(command: &str, source: [&OsStr; 2], args: &[&OsStr]) -> Value {
    let mut c = deltafold();
    c.args([command, "--output", "json"])
        .args(source)
        .args(args);
    let (code, json, stderr) = run_json(&mut c);
    assert_eq!(code, 0, "{command} {args:?}: {stderr}");
    assert_eq!(json["status"], "Succeeded");
    json
}

fn os(s: &str) -> &OsStr {
    OsStr::new(s)
}

/// Returns the lines of an export.
fn export(source: [&OsStr; 2], args: &[&OsStr]) -> Vec<Value> {
    let out = deltafold()
        .arg("export")
        .args(source)
        .args(args)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{stderr}");
    let lines = out.stdout.lines();
    lines
        .map(|l| serde_json::from_str(&l.unwrap()).unwrap())
        .collect()
}

/// Returns etcd's own state at a revision.
async fn etcds_state(etcd: &Etcd, revision: i64) -> State {
    let all = GetOptions::new()
        .with_range(vec![0])
        .with_revision(revision);
    let got = etcd.kv().await.get(vec![0], Some(all)).await.unwrap();
    let kvs = got.kvs().iter().map(|kv| {
        let of = Kv {
            create: kv.create_revision(),
            modified: kv.mod_revision(),
            version: kv.version(),
            lease: kv.lease(),
            value: kv.value().to_vec(),
        };
        (kv.key().to_vec(), of)
    });
    kvs.collect()
}

/// Returns the changes of every key from a revision on, in order; `None` for a deletion.
async fn etcds_history(etcd: &Etcd, from: i64) -> BTreeMap<Vec<u8>, Vec<(i64, Option<Kv>)>> {
    let last = etcd.revision().await;
    let options = WatchOptions::new()
        .with_range(vec![0])
        .with_start_revision(from);
    let mut watch = etcd.watcher().await;
    let mut watch = watch.watch(vec![0], Some(options)).await.unwrap();
    let mut all: BTreeMap<Vec<u8>, Vec<_>> = BTreeMap::new();
    let mut seen = from - 1;
    while seen < last {
        let answer = watch.message().await.unwrap().unwrap();
        assert!(!answer.canceled(), "{}", answer.cancel_reason());
        for event in answer.events() {
            let kv = event.kv().unwrap();
            seen = kv.mod_revision();
            let put = event.event_type() == EventType::Put;
            let version = put.then(|| Kv {
                create: kv.create_revision(),
                modified: seen,
                version: kv.version(),
                lease: kv.lease(),
                value: kv.value().to_vec(),
            });
            let versions = all.entry(kv.key().to_vec()).or_default();
            versions.push((seen, version));
        }
    }
    all
}

/// Puts, deletes and transactions on a few keys, so that many keys are deleted and created again.
async fn change(etcd: &Etcd, rng: &mut fastrand::Rng, steps: usize) {
    let mut keys: Vec<Vec<u8>> = [
        &b"plain"[..],
        b"/registry/configmaps/default/a",
        "schlüssel/鍵".as_bytes(),
        b"\x01control\x1b[2J",
        b"\xff\xfe",
        b"\xff",
        b"/binary/\x80",
    ]
    .map(<[u8]>::to_vec)
    .to_vec();
    keys.extend((0..20).map(|i| format!("/registry/pods/default/{i}").into_bytes()));
    let mut client = etcd.kv().await;
    let value = |rng: &mut fastrand::Rng| -> Vec<u8> {
        match rng.u32(..5) {
            0 => Vec::new(),
            1 => (0..rng.usize(1..3000)).map(|_| rng.u8(..)).collect(),
            2 => format!("{{\"kind\":\"Pod\",\"n\":{}}}", rng.u32(..)).into_bytes(),
            _ => format!("text {}", rng.u32(..)).into_bytes(),
        }
    };
    for _ in 0..steps {
        let key = rng.choice(&keys).unwrap().clone();
        match rng.u32(..10) {
            0..6 => drop(client.put(key, value(rng), None).await.unwrap()),
            6..9 => drop(client.delete(key, None).await.unwrap()),
            _ => {
                let mut ops = Vec::new();
                for key in &keys {
                    match rng.u32(..3) {
                        0 => ops.push(TxnOp::put(key.clone(), value(rng), None)),
                        1 => ops.push(TxnOp::delete(key.clone(), None)),
                        _ => {}
                    }
                }
                client.txn(Txn::new().and_then(ops)).await.unwrap();
            }
        }
    }
    client.put("plain", "the last one", None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_is_what_etcd_has() {
    let seed = seed();
    for version in EtcdVersion::ALL {
        let mut rng = fastrand::Rng::with_seed(seed);
        let folder = scratch::folder().unwrap();
        let etcd = Etcd::start(version, &folder.path().join("data"));
        change(&etcd, &mut rng, 60).await;
        // The last change is a put: versions of etcd differ in tombstones at exactly this revision.
        let compacted = etcd.revision().await;
        change(&etcd, &mut rng, 60).await;
        etcd.compact(compacted).await;
        let mut recorder = Recorder::start(&etcd).await;
        change(&etcd, &mut rng, 10).await;
        recorder.take_full(&etcd).await;
        change(&etcd, &mut rng, 120).await;
        let last = etcd.revision().await;
        let recording = recorder.finish(last, &mut rng, 4).await;
        let store = folder.path().join("bucket");
        let names = recording.write_bucket(&store, Compression::Gzip, T0);
        assert_eq!(names.len(), 5);
        let plain = folder.path().join("snapshot.db");
        fs::write(&plain, etcd.snapshot().await).unwrap();
        let bucket = [os("--store"), store.as_os_str()];
        let file = [os("--snapshot"), plain.as_os_str()];
        let what = format!("seed {seed}, etcd {version}");

        let mut states = BTreeMap::new();
        let some = std::iter::repeat_with(|| rng.i64(compacted..=last)).take(rounds(2, 4));
        for at in some.chain([compacted, last]).collect::<Vec<_>>() {
            let expected = etcds_state(&etcd, at).await;
            let revision = at.to_string();
            let at_revision = [os("--revision"), os(&revision)];
            for source in [bucket, file] {
                let args = [&at_revision[..], &[os("--prefix"), os("")]].concat();
                let got = json("get", source, &args);
                assert_eq!(got["revision"], at, "{what}");
                assert_eq!(got["timeline"].is_null(), source == file, "{what}");
                let keys = got["keys"].as_array().unwrap();
                assert!(state(keys) == expected, "{what}: {source:?} at {at}");
                assert_eq!(&export(source, &at_revision), keys, "{what}");
            }
            // One by one, for a part of the keys.
            let plain_keys = expected.iter().filter(|(k, _)| !k.contains(&0));
            for (key, kv_expected) in plain_keys.take(rounds(10, 1000)) {
                if rng.bool() {
                    continue;
                }
                let args = [&at_revision[..], &[OsStr::from_bytes(key)]].concat();
                let got = json("get", bucket, &args);
                let keys = got["keys"].as_array().unwrap();
                assert_eq!(
                    state(keys),
                    State::from([(key.clone(), kv_expected.clone())])
                );
                let mut c = deltafold();
                c.args(["get", "--raw"]).args(bucket).args(args);
                assert!(c.output().unwrap().stdout == kv_expected.value, "{what}");
            }
            let args = [&at_revision[..], &[os("--prefix"), os("/registry/")]].concat();
            let got = json("get", bucket, &args);
            let part = expected
                .iter()
                .filter(|(k, _)| k.starts_with(b"/registry/"));
            let part: State = part.map(|(k, v)| (k.clone(), v.clone())).collect();
            assert_eq!(state(got["keys"].as_array().unwrap()), part, "{what}");
            states.insert(at, expected);
        }

        for (from, old) in &states {
            let (to, new) = states.iter().nth(rng.usize(..states.len())).unwrap();
            check_diff(
                rng.choice([bucket, file]).unwrap(),
                (*from, old),
                (*to, new),
            );
        }

        let mut expected = etcds_history(&etcd, compacted + 1).await;
        for (key, kv) in &states[&compacted] {
            let versions = expected.entry(key.clone()).or_default();
            versions.insert(0, (kv.modified, Some(kv.clone())));
        }
        for (key, versions) in expected.iter().take(rounds(20, 1000)) {
            for source in [bucket, file] {
                let got = json("history", source, &[OsStr::from_bytes(key)]);
                assert_eq!(&bytes(&got, "key"), key);
                assert_eq!(got["revision"], last);
                assert_eq!(
                    got["missing"],
                    serde_json::json!([{"first_revision": 1, "last_revision": compacted}])
                );
                let found = got["versions"].as_array().unwrap();
                let told: Vec<(i64, Option<Kv>)> = found
                    .iter()
                    .map(|v| {
                        assert_eq!(v["deleted"].as_bool().unwrap(), v["record"].is_null());
                        let record = &v["record"];
                        let kv = (!record.is_null()).then(|| kv(record));
                        (v["revision"].as_i64().unwrap(), kv)
                    })
                    .collect();
                assert!(&told == versions, "{what}: {}", key.escape_ascii());
                for v in found {
                    let from_delta = v["revision"].as_i64() > Some(recording.full_revision);
                    let timed = source == bucket && from_delta;
                    assert_eq!(v["time"].is_string(), timed, "{what}: {v}");
                }
            }
        }
    }
}

/// Asserts that `diff` reports the changes between two states of etcd.
fn check_diff(source: [&OsStr; 2], (from, old): (i64, &State), (to, new): (i64, &State)) {
    let (from_text, to_text) = (from.to_string(), to.to_string());
    let args = ["--from", &from_text, "--to", &to_text].map(OsStr::new);
    let got = json("diff", source, &args);
    assert_eq!(
        (&got["from_revision"], &got["to_revision"]),
        (&from.into(), &to.into())
    );
    let mut keys: Vec<&Vec<u8>> = old.keys().chain(new.keys()).collect();
    keys.sort();
    keys.dedup();
    let expected: Vec<(&Vec<u8>, Option<&Kv>, Option<&Kv>)> = keys
        .into_iter()
        .map(|k| (k, old.get(k), new.get(k)))
        .filter(|(_, old, new)| old != new)
        .collect();
    let changes = got["changes"].as_array().unwrap();
    assert_eq!(changes.len(), expected.len(), "{from} to {to}");
    for (change, (key, old, new)) in changes.iter().zip(expected) {
        assert_eq!(&bytes(change, "key"), key);
        let side = |name: &str| (!change[name].is_null()).then(|| kv(&change[name]));
        assert_eq!((side("old").as_ref(), side("new").as_ref()), (old, new));
        let kind = match (old, new) {
            (None, _) => "added",
            (_, None) => "deleted",
            _ => "changed",
        };
        assert_eq!(change["change"], kind);
    }
}

fn store(path: &Path) -> [&OsStr; 2] {
    [os("--store"), path.as_os_str()]
}

#[test]
fn kubernetes_objects_are_told_by_kind() {
    let bucket = copy_fixture("kubernetes");
    let all = export(store(bucket.path()), &[]);
    assert_eq!(all.len(), 337);
    let told = |key: &str| {
        let entry = all.iter().find(|e| e["key"] == key);
        entry.unwrap_or_else(|| panic!("{key}"))["kubernetes"].clone()
    };
    let is = |api_version, kind, group, resource, namespace: Option<&str>, name| {
        serde_json::json!({"api_version": api_version, "kind": kind, "group": group,
            "resource": resource, "namespace": namespace, "name": name})
    };
    assert_eq!(
        told("/registry/namespaces/kube-system"),
        is("v1", "Namespace", "", "namespaces", None, "kube-system")
    );
    assert_eq!(
        told("/registry/services/specs/default/kubernetes"),
        is(
            "v1",
            "Service",
            "",
            "services",
            Some("default"),
            "kubernetes"
        )
    );
    assert_eq!(
        told("/registry/clusterroles/cluster-admin"),
        is(
            "rbac.authorization.k8s.io/v1",
            "ClusterRole",
            "rbac.authorization.k8s.io",
            "clusterroles",
            None,
            "cluster-admin"
        )
    );
    // Every object with a kind is stored under that kind's path.
    for e in all.iter().filter(|e| e["kubernetes"]["kind"].is_string()) {
        let object = &e["kubernetes"];
        let key = e["key"].as_str().unwrap();
        let name = object["name"].as_str().unwrap();
        assert!(key.ends_with(name), "{e}");
        if let Some(namespace) = object["namespace"].as_str() {
            assert!(key.ends_with(&format!("/{namespace}/{name}")), "{key}");
        }
    }
    // As text: every object is decoded.
    let mut c = deltafold();
    c.args(["get", "--prefix", "/registry/"])
        .args(store(bucket.path()));
    let text = String::from_utf8(c.output().unwrap().stdout).unwrap();
    assert!(
        text.contains("# Namespace kube-system (v1)\n"),
        "{text:.2000}"
    );
    assert!(text.contains("\nkind: Namespace\n"), "{text:.2000}");
    assert!(!text.contains("not decoded") && !text.contains("binary data"));
    assert!(text.contains("\n---\n# /registry/"));
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
}

#[test]
fn a_custom_resource_is_shown_as_yaml() {
    let b = Bucket::with_base();
    let value = r#"{"kind":"Widget","apiVersion":"example.com/v1","spec":{"size":3,"on":"yes","evil":"\u001b[2J"}}"#;
    let key = "/registry/example.com/widgets/default/a";
    let revision = BASE + 1;
    let event = serde_json::json!({"etcdEvent": {"kv": {"key": BASE64.encode(key),
        "create_revision": revision, "mod_revision": revision, "version": 1,
        "value": BASE64.encode(value), "lease": 255}}, "time": "2026-11-21T03:00:00Z"});
    b.delta_of(revision, revision, 6, &[event]);
    let out = deltafold()
        .args(["get", key])
        .args(store(b.path()))
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(
        text,
        format!(
            "# {key}\n# Widget default/a (example.com/v1)\n# revision 747, created at 747, version 1, lease ff\n\
             apiVersion: example.com/v1\nkind: Widget\nspec:\n  evil: \"\\u001b[2J\"\n  \"on\": \"yes\"\n  size: 3\n"
        )
    );
    let out = deltafold()
        .args(["get", "--raw", key])
        .args(store(b.path()))
        .output()
        .unwrap();
    assert_eq!(out.stdout, value.as_bytes());
}

/// Returns the key of the fixture that changes most often after the base, with its changes.
fn busiest() -> (Vec<u8>, Vec<i64>) {
    let mut changes: BTreeMap<Vec<u8>, Vec<i64>> = BTreeMap::new();
    for e in fixture_events() {
        let key = e["etcdEvent"]["kv"]["key"].as_str().unwrap();
        let key = BASE64.decode(key).unwrap();
        if !key.contains(&0) {
            changes.entry(key).or_default().push(revision(&e));
        }
    }
    changes.into_iter().max_by_key(|c| c.1.len()).unwrap()
}

fn history(b: &Bucket, key: &[u8], args: &[&OsStr]) -> Value {
    let args = [args, &[OsStr::from_bytes(key)]].concat();
    json("history", store(b.path()), &args)
}

fn missing(history: &Value) -> Vec<(i64, i64)> {
    let ranges = history["missing"].as_array().unwrap().iter();
    let number = |r: &Value, n: &str| r[n].as_i64().unwrap();
    ranges
        .map(|r| (number(r, "first_revision"), number(r, "last_revision")))
        .collect()
}

fn revisions(history: &Value) -> Vec<i64> {
    let versions = history["versions"].as_array().unwrap().iter();
    versions.map(|v| v["revision"].as_i64().unwrap()).collect()
}

#[test]
fn history_names_what_is_not_known() {
    let (key, changes) = busiest();
    let whole = Bucket::with_base();
    whole.delta(BASE + 1, LAST, 6);
    let complete = history(&whole, &key, &[]);
    let mut before = missing(&complete);
    assert_eq!(before.len(), 1, "the base was compacted");
    let all = revisions(&complete);
    assert!(all.ends_with(&changes), "{all:?} {changes:?}");

    // A gap, with a second stream that holds a part of it and repeats.
    let gap = Bucket::with_base();
    gap.delta(BASE + 1, 1200, 6);
    gap.delta(1100, 1300, 7);
    gap.delta(1601, LAST, 9);
    let told = history(&gap, &key, &[]);
    before.push((1301, 1600));
    assert_eq!(missing(&told), before);
    let kept = |r: &&i64| !(1301..=1600).contains(*r);
    let expected: Vec<i64> = all.iter().filter(kept).copied().collect();
    assert_eq!(revisions(&told), expected);
    let text = deltafold()
        .args([os("history"), OsStr::from_bytes(&key)])
        .args(store(gap.path()))
        .output()
        .unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    let last = text.lines().last().unwrap();
    assert!(
        last.starts_with("not every change is recorded for revisions 1 to "),
        "{last}"
    );
    assert!(last.ends_with(", 1301 to 1600"), "{last}");
    assert_eq!(text.lines().count(), expected.len() + 2);

    // A full after the gap that still has the history closes it; one that was compacted closes it down to its
    // compacted revision.
    let result = whole.compact(&["--keep-history", "all", "--revision", "1700"]);
    let full = format!("v2/{}", result["snapshot"].as_str().unwrap());
    gap.put(&full, &fs::read(whole.path().join(&full)).unwrap());
    let told = history(&gap, &key, &[]);
    before.pop();
    assert_eq!(
        (missing(&told), revisions(&told)),
        (before.clone(), all.clone())
    );
    fs::remove_file(gap.path().join(&full)).unwrap();
    fs::remove_file(whole.path().join(&full)).unwrap();
    let result = whole.compact(&["--keep-history", "300", "--revision", "1700"]);
    let full = format!("v2/{}", result["snapshot"].as_str().unwrap());
    gap.put(&full, &fs::read(whole.path().join(&full)).unwrap());
    let told = history(&gap, &key, &[]);
    before.push((1301, 1400));
    assert_eq!(missing(&told), before);
    assert!(revisions(&told).len() >= expected.len());

    // In the gap only a full knows the state.
    let c = |args: &[&str]| gap.run("get", &[args, &["--prefix", ""]].concat());
    let (code, result, _) = c(&["--revision", "1350"]);
    assert_eq!((code, result["reason"].as_str()), (65, Some("RevisionGap")));
    assert_eq!(c(&["--revision", "1450"]).0, 0);
}

#[test]
fn each_timeline_has_its_own_past() {
    let (key, changes) = busiest();
    let b = Bucket::with_base();
    b.delta(BASE + 1, LAST, 6);
    let fork = changes[changes.len() / 2];
    b.altered_delta(fork, LAST, 100);
    let ours = history(&b, &key, &[]);
    let id = ours["timeline"].as_str().unwrap();
    assert!(id.starts_with(&format!("r{fork}-")), "{id}");
    assert_eq!(ours["warnings"].as_array().unwrap().len(), 1);
    let main = history(&b, &key, &[os("--timeline"), os("main")]);
    assert_eq!(revisions(&ours), revisions(&main));
    for (a, b) in ours["versions"]
        .as_array()
        .unwrap()
        .iter()
        .zip(main["versions"].as_array().unwrap())
    {
        let forked = a["revision"].as_i64().unwrap() >= fork && !a["record"].is_null();
        assert_eq!(a["record"] != b["record"], forked, "{a} {b}");
    }
    // The same for states, at the end and before the fork.
    let at = |timeline: &str, revision: i64| {
        let revision = revision.to_string();
        let args = ["--timeline", timeline, "--revision", &revision].map(OsStr::new);
        let args = [&args[..], &[OsStr::from_bytes(&key)]].concat();
        let mut c = deltafold();
        c.args(["get", "--output", "result"])
            .args(store(b.path()))
            .args(args);
        run_json(&mut c).1["keys"].clone()
    };
    assert_eq!(at("main", fork - 1), at(id, fork - 1));
    assert_ne!(at("main", fork), at(id, fork));
}

#[test]
fn what_is_not_there_is_told() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, LAST, 6);
    let refuses = |command: &str, args: &[&str], code: i32, reason: &str| {
        let (got, json, stderr) = b.run(command, args);
        let told = json["reason"].as_str().unwrap_or_default();
        assert_eq!((got, told), (code, reason), "{command} {args:?}: {stderr}");
        json["message"].as_str().unwrap().to_owned()
    };
    let message = refuses("get", &["no\u{1b}such"], 66, "KeyNotFound");
    assert!(
        message.contains(r#""no\x1bsuch" at revision 2252"#),
        "{message}"
    );
    refuses("history", &["no-such"], 66, "KeyNotFound");
    refuses("get", &["k", "--revision", "9999"], 66, "OutOfRange");
    refuses("get", &["k", "--revision", "1"], 66, "OutOfRange");
    refuses(
        "export",
        &["--time", "2020-01-01T00:00:00Z"],
        66,
        "OutOfRange",
    );
    refuses("diff", &["--from", "800", "--to", "9999"], 66, "OutOfRange");
    refuses(
        "history",
        &["k", "--timeline", "r1-00000000"],
        66,
        "NoSuchTimeline",
    );
    for (command, args) in [
        ("get", &[][..]),
        ("get", &["k", "--prefix", "p"]),
        ("get", &["k", "--raw"]),
        ("get", &["k", "--revision", "0"]),
        ("get", &["k", "--snapshot", "/dev/null"]),
        ("diff", &[]),
        ("diff", &["--from", "0"]),
        ("diff", &["--from", "noon"]),
        ("history", &[]),
        ("history", &["k", "--revision", "5"]),
        ("export", &["k", "--prefix", "p"]),
    ] {
        refuses(command, args, 64, "Usage");
    }
    // A result without keys is no failure.
    for (command, list) in [("get", "keys"), ("diff", "changes")] {
        let args = match command {
            "get" => &["--prefix", "no-such"][..],
            _ => &["--from", "800", "--to", "800"],
        };
        let json = b.succeeds(command, args);
        assert_eq!(json[list], serde_json::json!([]));
    }
    // A plain file has neither times nor timelines.
    let base = fs::read(b.path().join(format!("v2/Full-00000000-{BASE:08}-{T0}.gz"))).unwrap();
    b.put("plain.db.gz", &base);
    let file = b.path().join("plain.db.gz");
    for args in [
        &["get", "k", "--time", "2026-11-21T03:00:00Z"][..],
        &["get", "k", "--timeline", "main"],
        &["history", "k", "--timeline", "main"],
        &["diff", "--from", "2026-11-21T03:00:00Z"],
    ] {
        let mut c = deltafold();
        c.args(args)
            .args(["--output", "json", "--snapshot"])
            .arg(&file);
        let (code, json, stderr) = run_json(&mut c);
        assert_eq!(
            (code, json["reason"].as_str()),
            (64, Some("Usage")),
            "{args:?}: {stderr}"
        );
    }
}

#[test]
fn damage_is_found_before_anything_is_printed() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1500, 6);
    let name = b.delta(1501, LAST, 7);
    let path = b.path().join("v2").join(&name);
    let mut packed = fs::read(&path).unwrap();
    let at = packed.len() / 2;
    packed[at] ^= 0x10;
    fs::write(&path, packed).unwrap();
    let last = LAST.to_string();
    for args in [
        &["get", "--prefix", "", "--revision", &last][..],
        &["get", "k", "--revision", &last],
        &["diff", "--from", "800", "--to", &last],
        &["export", "--revision", &last],
    ] {
        let (code, json, stderr) = b.run(args[0], &args[1..]);
        let told = (code, json["reason"].as_str(), json["status"].as_str());
        assert_eq!(
            told,
            (65, Some("CorruptSnapshot"), Some("Failed")),
            "{args:?}"
        );
        assert!(stderr.contains(&name), "{stderr}");
    }
    // The newest state is the one before the damage, without anything of the damaged delta.
    let (_, before, _) = b.run("get", &["--prefix", "", "--revision", "1500"]);
    let (code, result, stderr) = b.run("get", &["--prefix", ""]);
    assert_eq!((code, &result["revision"]), (0, &1500.into()), "{stderr}");
    assert_eq!(result["keys"], before["keys"]);
    assert!(stderr.contains(&name), "{stderr}");
    // Before the damage everything works.
    let (code, result, stderr) = b.run("get", &["--prefix", "", "--revision", "1400"]);
    assert_eq!(
        (code, result["status"].as_str()),
        (0, Some("Succeeded")),
        "{stderr}"
    );
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let bucket = copy_fixture("kubernetes");
    for args in [
        &["export"][..],
        &["get", "--prefix", ""],
        &["get", "--prefix", "", "--output", "result"],
        &["diff", "--from", "275", "--output", "json"],
    ] {
        let mut c = deltafold();
        c.args(args).args(store(bucket.path()));
        let mut child = c
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        drop(out);
        let mut said = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{args:?}: {said}");
        assert!(
            !line.is_empty() && !said.contains("error"),
            "{args:?}: {said}"
        );
    }
}

#[test]
fn an_output_that_breaks_midway_is_told() {
    let bucket = copy_fixture("kubernetes");
    for args in [
        &["export"][..],
        &["get", "--prefix", "", "--output", "result"],
    ] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let mut c = deltafold();
        c.args(args).args(store(bucket.path()));
        assert_eq!(
            c.stdout(full).status().unwrap().code(),
            Some(74),
            "{args:?}"
        );
    }
}

/// A signal during output: the JSON object is closed and says that it is incomplete.
#[test]
fn a_result_that_a_signal_breaks_off_says_so() {
    use rustix::process::{Pid, Signal, kill_process};
    let bucket = copy_fixture("kubernetes");
    let breaks = |args: &[&str]| {
        let mut c = deltafold();
        c.args(args).args(store(bucket.path()));
        let mut child = c.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::with_capacity(10, child.stdout.take().unwrap());
        let mut text = String::new();
        out.read_line(&mut text).unwrap();
        // It waits for its reader, with most of the output still to come.
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300));
        out.read_to_string(&mut text).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(143), "{args:?}");
        text
    };
    let text = breaks(&["get", "--prefix", "", "--output", "result"]);
    let result: Value = serde_json::from_str(&text).unwrap();
    let told = (&result["status"], &result["reason"], &result["code"]);
    assert_eq!(told, (&"Failed".into(), &"Terminated".into(), &143.into()));
    let printed = result["keys"].as_array().unwrap().len();
    assert!((1..337).contains(&printed), "{printed}");
    // For lines, the last line says so.
    let text = breaks(&["export", "--output", "json"]);
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last["reason"], "Terminated");
    let text = breaks(&["export"]);
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert!(last["key"].is_string(), "{last}");
}

/// The output has the same bytes with one thread and with several.
#[test]
fn threads_do_not_change_what_is_printed() {
    let bucket = copy_fixture("etcd35-zlib");
    let print = |threads: &str| {
        let mut c = deltafold();
        c.args(["export", "--threads", threads])
            .args(store(bucket.path()));
        c.output().unwrap().stdout
    };
    let one = print("1");
    assert!(one.len() > 100_000 && print("5") == one);
}

/// A key that is not UTF-8 on a wrong command line must not cause a panic.
#[test]
fn a_wrong_command_line_with_a_key_that_is_no_text() {
    let key = OsStr::from_bytes(b"\xff");
    let mut c = deltafold();
    c.args(["get", "--output", "result"]).arg(key);
    let (code, json, stderr) = run_json(&mut c);
    assert_eq!((code, &json["reason"]), (64, &"Usage".into()), "{stderr}");
}
