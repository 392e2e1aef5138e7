//! `apply` on real etcds: it writes exactly what differs, and nothing that changed meanwhile.

use crate::support::etcd::{self, Etcd, EtcdOptions, EtcdVersion};
use crate::support::process::{Process, free_port};
use crate::support::recorded_etcd::with_etcd;
use crate::support::schema::Schema;
use crate::support::scratch;
use crate::support::{deltafold, run_json, tools};
use deltafold::base::Cancel;
use deltafold::etcd::client::Client;
use deltafold::etcd::connect::Endpoints;
use deltafold::etcd::diff::BackupKey;
use deltafold::mvcc::{KeyRange, Revision};
use deltafold::ops::apply::{
    AppliedState, Difference, MAX_REQUEST_BYTES, MAX_TXN_OPS, Options, run,
};
use deltafold::ops::report::{Report, Status};
use deltafold::{Error, Reason};
use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, PutOptions, Txn, TxnOp};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

type Keys = BTreeMap<Vec<u8>, Vec<u8>>;

/// An etcd with its default limits, and a folder.
struct Here {
    dir: TempDir,
    etcd: Etcd,
}

impl Here {
    fn new(version: EtcdVersion) -> Self {
        Self::with_limits(version, MAX_REQUEST_BYTES as u64, MAX_TXN_OPS as u32)
    }

    fn with_limits(version: EtcdVersion, max_request_bytes: u64, max_txn_ops: u32) -> Self {
        let dir = scratch::folder().unwrap();
        let options = EtcdOptions {
            max_request_bytes,
            max_txn_ops,
            ..EtcdOptions::default()
        };
        let etcd = Etcd::start_with(version, &dir.path().join("data"), &options);
        Here { dir, etcd }
    }

    async fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) {
        self.etcd.kv().await.put(key, value, None).await.unwrap();
    }

    async fn delete_prefix(&self, prefix: &str) {
        let options = DeleteOptions::new().with_prefix();
        let mut kv = self.etcd.kv().await;
        kv.delete(prefix, Some(options)).await.unwrap();
    }

    async fn keys(&self) -> Keys {
        let options = GetOptions::new().with_all_keys();
        let mut kv = self.etcd.kv().await;
        let mut got = kv.get(vec![0], Some(options)).await.unwrap();
        let kvs = got.take_kvs().into_iter();
        kvs.map(etcd_client::KeyValue::into_key_value).collect()
    }

    async fn snapshot(&self) -> PathBuf {
        let path = self.dir.path().join("snapshot.db");
        std::fs::write(&path, self.etcd.snapshot().await).unwrap();
        path
    }

    /// Runs `deltafold apply` of a snapshot file to this etcd. Returns the exit code, the JSON and standard
    /// error.
    fn apply(&self, snapshot: &Path, prefix: &str, args: &[&str]) -> (i32, Value, String) {
        let mut c = deltafold();
        c.args(["apply", "--output", "json", "--log-format", "text"])
            .args(["--prefix", prefix, "--endpoints", self.etcd.endpoint()])
            .arg("--snapshot")
            .arg(snapshot)
            .args(args)
            // A busy machine may take longer than the default.
            .env("DELTAFOLD_COMMAND_TIMEOUT", "60s");
        let (code, json, stderr) = run_json(&mut c);
        assert_valid(&json);
        (code, json, stderr)
    }

    /// Runs the operation itself, on keys of the test.
    async fn run(
        &self,
        options: Options,
        wanted: Vec<(&'static str, Vec<u8>)>,
        mut tell: impl FnMut(&Difference, &Cancel) + Send + 'static,
    ) -> (Report<AppliedState>, Option<Error>) {
        let endpoint = self.etcd.endpoint().to_owned();
        let handle = tokio::runtime::Handle::current();
        let blocking = move || {
            let cancel = Cancel::default();
            let client = Client::connect(endpoints(&endpoint), handle, cancel.clone()).unwrap();
            let mut report = run(
                &client,
                &cancel,
                &options,
                |each| {
                    wanted.iter().try_for_each(|(key, value)| {
                        let (key, lease) = (key.as_bytes(), 0);
                        each(BackupKey { key, value, lease })
                    })
                },
                &mut |d| {
                    tell(d, &cancel);
                    Ok(())
                },
                |_| Ok("advice".to_owned()),
            );
            assert_valid(&serde_json::to_value(&report).unwrap());
            let error = report.failure.take();
            (report, error)
        };
        tokio::task::spawn_blocking(blocking).await.unwrap()
    }
}

fn endpoints(endpoint: &str) -> Endpoints {
    etcd::without_tls(vec![endpoint.to_owned()])
}

fn options(prefix: &str) -> Options {
    Options {
        keys: KeyRange::Prefix(prefix.into()),
        parts: Vec::new(),
        revision: Revision(1),
        execute: true,
        delete_extra: false,
        only_missing: false,
        raw_kubernetes: false,
        leases: HashMap::new(),
        max_txn_ops: MAX_TXN_OPS,
        max_request_bytes: MAX_REQUEST_BYTES,
    }
}

fn assert_valid(result: &Value) {
    Schema::of("apply").check(result);
}

/// Written past the API server, an object that was about to be deleted goes on with that.
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_kubernetes_need_a_flag() {
    let here = Here::new(EtcdVersion::V3_6);
    here.put("/app/a", "as it was").await;
    let widget = r#"{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"w"}}"#;
    here.put("/registry/example.com/widgets/shop/w", widget)
        .await;
    let snapshot = here.snapshot().await;
    here.delete_prefix("/").await;
    for args in [&[][..], &["--execute"]] {
        let (code, refused, _) = here.apply(&snapshot, "", args);
        assert_eq!((code, &refused["reason"]), (64, &"Usage".into()));
        let message = refused["message"].as_str().unwrap();
        for part in [
            "deltafold recover widgets.example.com/shop/w",
            "--raw-kubernetes",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
    let (code, done, _) = here.apply(&snapshot, "/registry/", &["--raw-kubernetes", "--execute"]);
    assert_eq!((code, &done["put"]), (0, &1.into()), "{done:#}");
    // What is as it was is no danger, and a key that the backup lacks is.
    let (code, same, _) = here.apply(&snapshot, "/registry/", &[]);
    assert_eq!(
        (code, &same["status"]),
        (0, &"NothingToDo".into()),
        "{same:#}"
    );
    here.put("/registry/configmaps/shop/new", "{}").await;
    let (code, _, _) = here.apply(&snapshot, "/registry/", &["--delete-extra", "--execute"]);
    assert_eq!((code, here.keys().await.len()), (64, 2));
}

/// `--prefix …/cm-1 --delete-extra` also deleted `cm-10`.
#[tokio::test(flavor = "multi_thread")]
async fn one_key_comes_back_and_keys_that_begin_like_it_stay() {
    let here = Here::new(EtcdVersion::V3_6);
    here.put("/cm/cm-1", "as it was").await;
    here.put("/cm/gone", "as it was").await;
    let snapshot = here.snapshot().await;
    here.put("/cm/cm-1", "changed").await;
    here.put("/cm/cm-10", "new").await;
    here.put("/cm/extra", "new").await;
    here.delete_prefix("/cm/gone").await;
    let live = here.keys().await;

    // The prefix matches both keys, and says so before anything is written.
    let (code, dry, _) = here.apply(&snapshot, "/cm/cm-1", &["--delete-extra"]);
    assert_eq!((code, &dry["to_delete"]), (0, &1.into()), "{dry:#}");
    let warning = dry["warnings"][0].as_str().unwrap();
    for part in [
        "would delete",
        "/cm/cm-10",
        "--exact-key /cm/cm-1",
        "--prefix /cm/cm-1/",
    ] {
        assert!(warning.contains(part), "{warning}");
    }
    let (_, dry, _) = here.apply(&snapshot, "/cm/", &["--delete-extra"]);
    assert_eq!(
        (&dry["to_delete"], &dry["warnings"]),
        (&2.into(), &Value::Array(vec![]))
    );
    assert_eq!(here.keys().await, live);

    let exact = |keys: &[&str], args: &[&str]| {
        let mut c = deltafold();
        c.args([
            "apply",
            "--output",
            "json",
            "--endpoints",
            here.etcd.endpoint(),
        ])
        .arg("--snapshot")
        .arg(&snapshot)
        .args(keys.iter().flat_map(|key| ["--exact-key", key]))
        .args(args)
        .env("DELTAFOLD_COMMAND_TIMEOUT", "60s");
        let (code, json, _) = run_json(&mut c);
        assert_valid(&json);
        (code, json)
    };
    // Any order, one key twice, one only in etcd, one nowhere.
    let keys = [
        "/cm/gone",
        "/cm/cm-1",
        "/cm/extra",
        "/cm/cm-1",
        "/cm/nowhere",
    ];
    let (code, done) = exact(&keys, &["--delete-extra", "--execute"]);
    for (field, n) in [
        ("to_create", 1),
        ("to_update", 1),
        ("to_delete", 1),
        ("put", 2),
        ("deleted", 1),
    ] {
        assert_eq!(done[field], n, "{field}: {done:#}");
    }
    // What exists is written; what exists nowhere is an error.
    assert_eq!((code, &done["reason"]), (66, &"KeyNotFound".into()));
    let message = done["message"].as_str().unwrap();
    assert!(message.contains("/cm/nowhere"), "{message}");
    assert!(message.contains("no deletion of it"), "{message}");
    let wanted = [
        ("/cm/cm-1", "as it was"),
        ("/cm/cm-10", "new"),
        ("/cm/gone", "as it was"),
    ];
    let wanted = wanted.map(|(key, value)| (key.into(), value.into()));
    assert_eq!(here.keys().await, Keys::from(wanted));
    // A live key that the backup does not have stays without --delete-extra.
    let (_, kept) = exact(&["/cm/cm-10"], &["--execute"]);
    assert_eq!(
        (&kept["left_alone"], &kept["deleted"]),
        (&1.into(), &0.into())
    );
}

/// One namespace is deleted, another one changed; both come back from a snapshot.
async fn a_part_comes_back(version: EtcdVersion) {
    let here = Here::new(version);
    let mut client = here.etcd.client().await;
    let lease = client.lease_grant(3600, None).await.unwrap().id();
    for i in 0..300 {
        here.put(format!("/ns/gone/{i:03}"), format!("value {i}"))
            .await;
    }
    let leased = PutOptions::new().with_lease(lease);
    client
        .put("/ns/gone/leased", "l", Some(leased))
        .await
        .unwrap();
    here.put(b"/ns/gone/\xff\x00".to_vec(), vec![0, 255]).await;
    for key in ["a", "b", "c"] {
        here.put(format!("/ns/kept/{key}"), "as it was").await;
    }
    here.put("/other", "1").await;
    let before = here.keys().await;
    let snapshot = here.snapshot().await;
    let revision = here.etcd.revision().await;

    here.delete_prefix("/ns/gone/").await;
    here.put("/ns/kept/b", "changed").await;
    here.put("/ns/kept/extra", "x").await;
    here.put("/other", "2").await;
    let live = here.keys().await;
    let live_revision = here.etcd.revision().await;

    // Without --execute nothing is written.
    let (code, dry, _) = here.apply(&snapshot, "/ns/", &[]);
    assert_eq!(code, 0, "{dry:#}");
    assert_eq!(
        (&dry["status"], &dry["dry_run"]),
        (&"Succeeded".into(), &true.into())
    );
    assert_eq!(dry["revision"], revision);
    assert_eq!(dry["live_revision"], live_revision);
    for (field, n) in [
        ("to_create", 302),
        ("to_update", 1),
        ("to_delete", 0),
        ("left_alone", 1),
        ("unchanged", 2),
        ("put", 0),
        ("leases_detached", 0),
    ] {
        assert_eq!(dry[field], n, "{field}");
    }
    let differences = dry["differences"].as_array().unwrap();
    assert_eq!(differences.len(), 304);
    assert_eq!(differences[0]["key"], "/ns/gone/000");
    assert_eq!(differences[301]["key_base64"], "L25zL2dvbmUv/wA=");
    assert_eq!(differences[302]["change"], "update");
    assert_eq!(differences[303]["change"], "leave");
    assert_eq!(here.etcd.revision().await, live_revision);
    assert_eq!(here.keys().await, live);

    // With --execute it writes the differences and nothing else, in few transactions.
    let (code, done, stderr) = here.apply(&snapshot, "/ns/", &["--execute"]);
    assert_eq!(code, 0, "{done:#}\n{stderr}");
    assert_eq!((&done["put"], &done["deleted"]), (&303.into(), &0.into()));
    assert_eq!(done["transactions"], 3);
    assert_eq!(done["first_revision"], live_revision + 1);
    assert_eq!(done["last_revision"], live_revision + 3);
    assert_eq!(here.etcd.revision().await, live_revision + 3);
    let mut expected = before.clone();
    expected.insert(b"/other".to_vec(), b"2".to_vec());
    expected.insert(b"/ns/kept/extra".to_vec(), b"x".to_vec());
    assert_eq!(here.keys().await, expected);
    let got = client.get("/ns/gone/leased", None).await.unwrap();
    let granted = got.kvs()[0].lease();
    let told = client.lease_time_to_live(granted, None).await.unwrap();
    assert_eq!((told.granted_ttl(), granted == lease), (3600, false));

    // A second run finds nothing to do.
    let (code, again, _) = here.apply(&snapshot, "/ns/", &["--execute"]);
    assert_eq!((code, &again["status"]), (0, &"NothingToDo".into()));
    assert_eq!(here.etcd.revision().await, live_revision + 3);

    // The whole prefix, including deletions.
    let exactly = ["--execute", "--delete-extra"];
    let (code, refused, _) = here.apply(&snapshot, "", &exactly);
    let refused = (code, &refused["reason"]);
    assert_eq!(refused, (64, &"Usage".into()), "a variable that is not set");
    assert_eq!(here.etcd.revision().await, live_revision + 3);
    let (code, exact, _) = here.apply(&snapshot, "/", &exactly);
    assert_eq!(code, 0, "{exact:#}");
    assert_eq!((&exact["put"], &exact["deleted"]), (&1.into(), &1.into()));
    assert_eq!(here.keys().await, before);

    // An older state, whose history the snapshot still has.
    let args = ["--execute", "--delete-extra", "--revision", "11"];
    let (code, older, _) = here.apply(&snapshot, "/ns/gone/", &args);
    assert_eq!(code, 0, "{older:#}");
    assert_eq!((&older["put"], &older["deleted"]), (&0.into(), &292.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_comes_back_to_etcd_3_5() {
    a_part_comes_back(EtcdVersion::V3_5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_comes_back_to_etcd_3_6() {
    a_part_comes_back(EtcdVersion::V3_6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_comes_back_to_etcd_3_7() {
    a_part_comes_back(EtcdVersion::V3_7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_text_shows_the_difference() {
    let here = Here::new(EtcdVersion::V3_6);
    here.put("/a/gone", "12345").await;
    here.put("/a/same", "x").await;
    here.put("/a/other", "x").await;
    let snapshot = here.snapshot().await;
    here.delete_prefix("/a/gone").await;
    here.put("/a/other", "yy").await;
    here.put("/a/zz\n", "").await;
    let mut c = deltafold();
    c.args([
        "apply",
        "--prefix",
        "/a/",
        "--endpoints",
        here.etcd.endpoint(),
    ]);
    let out = c.arg("--snapshot").arg(&snapshot).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success());
    let begin = "+ /a/gone (5 bytes)\n~ /a/other (1 byte, now 2)\n? /a/zz\\n\nwould put 2 keys and delete 0; --execute does it\n";
    assert!(text.starts_with(begin), "{text}");
    let mut c = deltafold();
    c.args([
        "apply",
        "--exact-key",
        "/nowhere",
        "--execute",
        "--endpoints",
    ]);
    let c = c.arg(here.etcd.endpoint()).arg("--snapshot").arg(&snapshot);
    let text = String::from_utf8(c.output().unwrap().stdout).unwrap();
    assert!(text.starts_with("nothing was written\n"), "{text}");
}

/// Keys that change between comparison and write stay as they are; all others are written.
async fn nothing_that_changed_is_overwritten(version: EtcdVersion) {
    let here = Here::new(version);
    for key in ["/k/b", "/k/c", "/k/d", "/k/e"] {
        here.put(key, "old").await;
    }
    let wanted = ["/k/a", "/k/b", "/k/c", "/k/d", "/k/f", "/k/g"];
    let wanted = wanted.map(|k| (k, b"new".to_vec())).to_vec();
    let handle = tokio::runtime::Handle::current();
    let mut kv = here.etcd.kv().await;
    let mut options = options("/k/");
    options.delete_extra = true;
    // Meanwhile one key is created, one changed, one deleted, one extra key changed, and one gets the desired
    // value.
    let meddle = move |d: &Difference, _: &Cancel| {
        if d.key.key.as_deref() != Some("/k/g") {
            return;
        }
        handle.block_on(async {
            kv.put("/k/a", "mine", None).await.unwrap();
            kv.put("/k/b", "mine", None).await.unwrap();
            kv.delete("/k/c", None).await.unwrap();
            kv.put("/k/e", "mine", None).await.unwrap();
            kv.put("/k/f", "new", None).await.unwrap();
        });
    };
    let (outcome, error) = here.run(options.clone(), wanted.clone(), meddle).await;
    let error = error.unwrap();
    assert_eq!(error.reason(), Reason::Conflict, "{error}");
    assert_eq!(outcome.status, Status::Failed);
    assert_eq!((outcome.put, outcome.deleted, outcome.conflicts), (2, 0, 4));
    assert_eq!(outcome.unchanged, 1);
    let skipped: Vec<_> = outcome
        .skipped
        .iter()
        .map(|s| s.key.key.as_deref().unwrap())
        .collect();
    assert_eq!(skipped, ["/k/a", "/k/b", "/k/c", "/k/e"]);
    assert!(outcome.skipped.iter().all(|s| s.cause == Reason::Conflict));
    let expected = [
        ("/k/a", "mine"),
        ("/k/b", "mine"),
        ("/k/d", "new"),
        ("/k/e", "mine"),
        ("/k/f", "new"),
        ("/k/g", "new"),
    ];
    let expected: Keys = expected.map(|(k, v)| (k.into(), v.into())).into();
    assert_eq!(here.keys().await, expected);
    // A new run compares with the new state.
    let (outcome, error) = here.run(options, wanted, |_, _| {}).await;
    assert!(error.is_none());
    assert_eq!((outcome.put, outcome.deleted), (3, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_changed_is_overwritten_3_5() {
    nothing_that_changed_is_overwritten(EtcdVersion::V3_5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_changed_is_overwritten_3_6() {
    nothing_that_changed_is_overwritten(EtcdVersion::V3_6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_changed_is_overwritten_3_7() {
    nothing_that_changed_is_overwritten(EtcdVersion::V3_7).await;
}

/// Values near the limit are written, one above it is named; all others are written.
#[tokio::test(flavor = "multi_thread")]
async fn values_near_the_limit() {
    for version in EtcdVersion::ALL {
        let here = Here::new(version);
        // etcd's limit applies to the request: this is the largest value that etcd's own client can put with a
        // guard.
        let near = vec![7; MAX_REQUEST_BYTES - 200];
        let over = vec![7; MAX_REQUEST_BYTES + 1];
        let wanted = vec![
            ("/v/a", vec![1; 700 << 10]),
            ("/v/b", vec![2; 700 << 10]),
            ("/v/c", vec![3; 700 << 10]),
            ("/v/near", near.clone()),
            ("/v/over", over.clone()),
            ("/v/small", vec![5]),
        ];
        let (outcome, error) = here.run(options("/v/"), wanted.clone(), |_, _| {}).await;
        let error = error.unwrap();
        assert_eq!(error.reason(), Reason::Configuration, "{version} {error}");
        assert_eq!((outcome.put, outcome.too_large), (5, 1), "{version}");
        assert_eq!(outcome.transactions, 4, "{version}");
        assert_eq!(outcome.skipped[0].key.key.as_deref(), Some("/v/over"));
        let keys = here.keys().await;
        assert_eq!(keys.len(), 5);
        assert_eq!(keys[&b"/v/near"[..]], near);
        // Keys that already match need no room in a request, however large pages get.
        let again = wanted.into_iter().filter(|w| w.0 != "/v/over").collect();
        let (outcome, _) = here.run(options("/v/"), again, |_, _| {}).await;
        assert_eq!(
            (outcome.status, outcome.unchanged),
            (Status::NothingToDo, 5)
        );
    }
}

/// The server's limits are lower than the flags say. Pages grow while values are small; the large values after
/// them must not come all at once.
#[tokio::test(flavor = "multi_thread")]
async fn large_values_after_many_small_ones() {
    let here = Here::new(EtcdVersion::V3_6);
    for i in 0..400 {
        here.put(format!("/app/a{i:03}"), "x").await;
    }
    let snapshot = here.snapshot().await;
    for i in 0..200 {
        here.put(format!("/app/b{i:03}"), vec![b'y'; 1 << 20]).await;
    }
    let (code, json, stderr) = here.apply(&snapshot, "/app/", &[]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(
        (&json["unchanged"], &json["left_alone"]),
        (&400.into(), &200.into())
    );
    let peak = json["peak_memory_bytes"].as_u64().unwrap();
    assert!(peak < 96 << 20, "{peak} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_lower_limits() {
    let here = Here::with_limits(EtcdVersion::V3_6, 64 << 10, 5);
    let names: Vec<&'static str> = (0..20).map(|i| &*format!("/k/{i:02}").leak()).collect();
    let wanted: Vec<_> = names.iter().map(|&k| (k, vec![1; 5 << 10])).collect();
    let (outcome, error) = here.run(options("/k/"), wanted, |_, _| {}).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!((outcome.put, outcome.transactions), (20, 20));
}

/// A put keeps the lease of the live key and creates none.
#[tokio::test(flavor = "multi_thread")]
async fn a_live_key_keeps_its_lease() {
    let here = Here::new(EtcdVersion::V3_6);
    let mut client = here.etcd.client().await;
    let lease = client.lease_grant(3600, None).await.unwrap().id();
    let leased = PutOptions::new().with_lease(lease);
    client.put("/k/a", "old", Some(leased)).await.unwrap();
    let wanted = vec![("/k/a", b"new".to_vec()), ("/k/b", b"new".to_vec())];
    let (outcome, error) = here.run(options("/k/"), wanted, |_, _| {}).await;
    assert!(error.is_none() && outcome.put == 2);
    for (key, expected) in [("/k/a", lease), ("/k/b", 0)] {
        let got = client.get(key, None).await.unwrap();
        assert_eq!(
            (got.kvs()[0].value(), got.kvs()[0].lease()),
            (&b"new"[..], expected)
        );
    }
}

/// The report has what was written before the signal.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_in_the_middle() {
    let here = Here::new(EtcdVersion::V3_6);
    let names: Vec<&'static str> = (0..50).map(|i| &*format!("/k/{i:02}").leak()).collect();
    let wanted: Vec<_> = names.iter().map(|&k| (k, vec![1])).collect();
    let mut options = options("/k/");
    options.max_txn_ops = 10;
    let (outcome, error) = here
        .run(options, wanted, |d, cancel| {
            if d.key.key.as_deref() == Some("/k/25") {
                cancel.cancel();
            }
        })
        .await;
    assert_eq!(error.unwrap().reason(), Reason::Terminated);
    assert_eq!(outcome.status, Status::Failed);
    assert_eq!((outcome.put, outcome.transactions), (20, 2));
    assert_eq!(here.keys().await.len(), 20);
}

/// etcd compacts the revision that is being read.
#[tokio::test(flavor = "multi_thread")]
async fn a_compaction_in_the_middle() {
    let here = Here::new(EtcdVersion::V3_6);
    for i in 0..100 {
        here.put(format!("/k/{i:02}"), "old").await;
    }
    let handle = tokio::runtime::Handle::current();
    let mut kv = here.etcd.kv().await;
    let mut done = false;
    let wanted = vec![("/k/00", b"new".to_vec()), ("/k/99", b"new".to_vec())];
    let (outcome, error) = here
        .run(options("/k/"), wanted, move |_, _| {
            if !std::mem::replace(&mut done, true) {
                handle.block_on(async {
                    let put = kv.put("/elsewhere", "", None).await.unwrap();
                    let now = put.header().unwrap().revision();
                    kv.compact(now, None).await.unwrap();
                });
            }
        })
        .await;
    assert_eq!(error.unwrap().reason(), Reason::Conflict);
    assert_eq!(outcome.status, Status::Failed);
}

#[tokio::test(flavor = "multi_thread")]
async fn users_and_passwords() {
    for version in EtcdVersion::ALL {
        let here = Here::new(version);
        here.put("/a/x", "1").await;
        here.put("/b/x", "1").await;
        let snapshot = here.snapshot().await;
        let mut client = here.etcd.client().await;
        client.put("/a/x", "2", None).await.unwrap();
        // A user does no harm if the server requires none.
        let user = ["--user", "root:hidden"];
        let (code, json, _) = here.apply(&snapshot, "/a/", &user);
        assert_eq!((code, &json["to_update"]), (0, &1.into()), "{json:#}");
        client.role_add("root").await.unwrap();
        client.role_add("half").await.unwrap();
        let granted = etcd_client::Permission::read_write("/a/").with_prefix();
        client.role_grant_permission("half", granted).await.unwrap();
        for (name, role) in [("root", "root"), ("half", "half")] {
            client.user_add(name, "hidden", None).await.unwrap();
            client.user_grant_role(name, role).await.unwrap();
        }
        client.auth_enable().await.unwrap();
        for (args, reason) in [
            (&[][..], "Unauthenticated"),
            (&["--user", "root:wrong-one"], "Unauthenticated"),
            (
                &["--user", "nobody", "--password", "hidden"],
                "Unauthenticated",
            ),
        ] {
            let (code, json, stderr) = here.apply(&snapshot, "/a/", args);
            assert_eq!(
                (code, &json["reason"]),
                (77, &reason.into()),
                "{version} {json:#}"
            );
            let all = format!("{json}{stderr}");
            assert!(
                !all.contains("hidden") && !all.contains("wrong-one"),
                "{all}"
            );
            assert!(all.contains("--user"), "{all}");
        }
        let half = ["--user", "half", "--password", "hidden", "--execute"];
        let (code, json, _) = here.apply(&snapshot, "/b/", &half);
        assert_eq!(
            (code, &json["reason"]),
            (77, &"PermissionDenied".into()),
            "{json:#}"
        );
        let (code, json, _) = here.apply(&snapshot, "/a/", &half);
        assert_eq!((code, &json["put"]), (0, &1.into()), "{version} {json:#}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_does_not_answer() {
    let here = Here::new(EtcdVersion::V3_6);
    here.put("/a/x", "1").await;
    let snapshot = here.snapshot().await;
    let apply = |endpoints: &str, args: &[&str]| {
        let mut c = deltafold();
        c.args([
            "apply",
            "--output",
            "json",
            "--log-format",
            "text",
            "--prefix",
            "/a/",
        ])
        .args(["--dial-timeout", "1s", "--command-timeout", "1s"])
        .args(["--endpoints", endpoints, "--snapshot"])
        .arg(&snapshot)
        .args(args);
        let (code, json, stderr) = run_json(&mut c);
        assert_valid(&json);
        (
            code,
            json["reason"].as_str().unwrap_or_default().to_owned(),
            format!("{json}{stderr}"),
        )
    };
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let (code, reason, said) = apply(&nobody, &[]);
    assert_eq!((code, reason.as_str()), (69, "EtcdUnreachable"), "{said}");
    assert!(said.contains(&nobody), "{said}");
    // A listener that never responds.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    let (code, reason, said) = apply(&silent, &[]);
    assert_eq!((code, reason.as_str()), (69, "EtcdUnreachable"), "{said}");
    // The next endpoint is tried.
    let (code, _, said) = apply(&format!("{nobody}, {}", here.etcd.endpoint()), &[]);
    assert_eq!(code, 0, "{said}");
    // TLS on an endpoint without TLS.
    let tls = here.etcd.endpoint().replace("http:", "https:");
    let (code, _, said) = apply(&tls, &[]);
    assert!([69, 78].contains(&code), "{said}");
    for (args, expected) in [
        (&["--cacert", "/nowhere.crt"][..], 64),
        (&["--cert", "/nowhere.crt"], 64),
        (&["--user", "root"], 64),
        (&["--max-txn-ops", "0"], 64),
    ] {
        let mut c = deltafold();
        c.args([
            "apply",
            "--prefix",
            "/a/",
            "--endpoints",
            here.etcd.endpoint(),
            "--snapshot",
        ]);
        let out = c.arg(&snapshot).args(args).output().unwrap();
        assert_eq!(out.status.code(), Some(expected), "{args:?}");
    }
    let (code, reason, said) = apply(&tls, &["--cacert", "/nowhere.crt"]);
    assert_eq!((code, reason.as_str()), (78, "Configuration"), "{said}");
}

/// An etcd that requires TLS and a client certificate.
#[tokio::test(flavor = "multi_thread")]
async fn certificates() {
    let here = Here::new(EtcdVersion::V3_6);
    here.put("/a/x", "1").await;
    let snapshot = here.snapshot().await;
    let certs = scratch::folder().unwrap();
    tools::write_certs(certs.path());
    let file = |name: &str| certs.path().join(name).display().to_string();
    let (ca, cert, key) = (file("ca.crt"), file("node.crt"), file("node.key"));
    let url = format!("https://127.0.0.1:{}", free_port());
    let peer = format!("http://127.0.0.1:{}", free_port());
    let program = tools::etcd(EtcdVersion::V3_6);
    let mut c = etcd::command(&program, &certs.path().join("data"), &url, &peer);
    c.args(["--initial-cluster", &format!("default={peer}")])
        .args(["--trusted-ca-file", &ca])
        .args(["--cert-file", &cert])
        .args(["--key-file", &key])
        .arg("--client-cert-auth");
    let log = certs.path().join("log");
    let mut etcd = Process::spawn(&mut c, &log).unwrap();
    let serves =
        || std::fs::read_to_string(&log).is_ok_and(|l| l.contains("serving client traffic"));
    etcd.wait_until(Duration::from_secs(60), serves).unwrap();
    let apply = |url: &str, args: &[&str]| {
        let mut c = deltafold();
        c.args([
            "apply",
            "--output",
            "json",
            "--log-format",
            "text",
            "--prefix",
            "/a/",
        ])
        .args(["--execute", "--endpoints", url, "--snapshot"])
        .arg(&snapshot)
        .args(args);
        let (code, json, stderr) = run_json(&mut c);
        assert_valid(&json);
        (code, format!("{json}{stderr}"))
    };
    for (url, args) in [
        (&url, &[][..]),
        (&url, &["--cacert", &ca]),
        (&url, &["--cert", &cert, "--key", &key]),
        // Files that are neither a certificate nor a key.
        (&url, &["--cacert", &log.display().to_string()]),
        (&url, &["--cacert", &ca, "--cert", &ca, "--key", &cert]),
    ] {
        let (code, said) = apply(url, args);
        // If a client certificate is missing, etcd closes the connection, and its reason may be lost.
        let hangs_up = args.len() == 2 && args[1] == ca;
        assert!(code == 78 || hangs_up && code == 69, "{args:?} {said}");
        assert!(said.contains("--cacert"), "{args:?} {said}");
    }
    let all = ["--cacert", &ca, "--cert", &cert, "--key", &key];
    let (code, said) = apply(&url, &all);
    assert!(code == 0 && said.contains("\"put\":1"), "{said}");
    // Without a scheme, the certificate files imply TLS.
    let (code, said) = apply(url.strip_prefix("https://").unwrap(), &all);
    assert!(code == 0 && said.contains("NothingToDo"), "{said}");
    // http on an endpoint that requires TLS.
    let (code, said) = apply(&url.replace("https:", "http:"), &[]);
    assert!([69, 78].contains(&code), "{said}");
}

/// How etcd treats a guard together with the lease option, as `apply` relies on it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_guard_means() {
    for version in EtcdVersion::ALL {
        let here = Here::new(version);
        let mut kv = here.etcd.kv().await;
        let guarded = |seen| {
            let guard = Compare::mod_revision("/k", CompareOp::Equal, seen);
            Txn::new()
                .when([guard])
                .and_then([TxnOp::put("/k", "v", None)])
        };
        assert!(!kv.txn(guarded(1)).await.unwrap().succeeded());
        let first = kv.txn(guarded(0)).await.unwrap();
        assert!(first.succeeded());
        assert!(!kv.txn(guarded(0)).await.unwrap().succeeded());
        let seen = first.header().unwrap().revision();
        kv.delete("/k", None).await.unwrap();
        assert!(
            !kv.txn(guarded(seen)).await.unwrap().succeeded(),
            "{version}"
        );
        assert!(kv.txn(guarded(0)).await.unwrap().succeeded());
    }
}

/// What was deleted before the newest snapshot is not "nothing to do": the state before the deletion has it.
/// 500 keys were deleted in two transactions: a person wants exactly these, and no newer value set back.
#[test]
fn what_was_deleted_in_a_span_comes_back_and_nothing_newer_is_set_back() {
    with_etcd(EtcdVersion::V3_6, |world| {
        for key in ["/a/1", "/a/2", "/b/1", "/kept"] {
            world.put(key, "as it was");
        }
        world.snapshot("full", &[]).succeeded();
        world.delete("/a/1");
        let begin = world.revision();
        world.put("/kept", "newer");
        world.put("/a/2", "changed before");
        world.delete("/a/2");
        world.delete("/b/1");
        world.snapshot("delta", &[]).succeeded();
        world.put("/b/1", "new");
        let apply = |args: &[&str]| {
            let mut c = deltafold();
            c.args(["apply", "--output", "json", "--store", &world.prefix.url]);
            c.args(["--endpoints", &world.endpoints().join(",")]);
            let since = begin.to_string();
            c.args(["--deleted", "--since", &since]).args(args);
            let (code, json, _) = run_json(&mut c);
            assert_valid(&json);
            assert_eq!(code, 0, "{json:#}");
            json
        };
        let dry = apply(&[]);
        assert_eq!(
            (&dry["to_create"], &dry["left_alone"]),
            (&1.into(), &1.into())
        );
        let transactions = dry["deleted_in"].as_array().unwrap();
        assert_eq!(transactions.len(), 2, "{dry:#}");
        assert_eq!(transactions[0]["keys"], 1);
        let done = apply(&["--execute"]);
        assert_eq!((&done["put"], &done["to_update"]), (&1.into(), &0.into()));
        for (key, value) in [
            ("/a/2", Some("changed before")),
            ("/b/1", Some("new")),
            ("/kept", Some("newer")),
            ("/a/1", None),
        ] {
            let got = world.wait(async { world.etcd.kv().await.get(key, None).await });
            let got = got.unwrap();
            let live = got.kvs().first().map(|kv| kv.value().to_vec());
            assert_eq!(live.as_deref(), value.map(str::as_bytes), "{key}");
        }
        let again = apply(&["--execute", "--prefix", "/a/"]);
        assert_eq!(again["status"], "NothingToDo", "{again:#}");
    });
}

#[test]
fn keys_that_the_newest_state_lacks_are_an_error_with_the_way_to_them() {
    with_etcd(EtcdVersion::V3_6, |world| {
        for key in ["/ns/a", "/ns/b", "/kept/c"] {
            world.put(key, "value");
        }
        world.snapshot("full", &[]).succeeded();
        world.delete("/ns/a");
        world.delete("/ns/b");
        let deleted = world.revision();
        world.snapshot("delta", &[]).succeeded();
        let apply = |args: &[&str]| {
            let mut c = deltafold();
            c.args(["apply", "--output", "json", "--store", &world.prefix.url]);
            c.args(["--endpoints", &world.endpoints().join(",")])
                .args(args);
            let (code, json, _) = run_json(&mut c);
            assert_valid(&json);
            (code, json)
        };
        for what in [["--exact-key", "/ns/b"], ["--prefix", "/ns/"]] {
            let (code, json) = apply(&what);
            assert_eq!((code, &json["reason"]), (66, &"KeyNotFound".into()));
            let message = json["message"].as_str().unwrap();
            for part in [
                format!("deleted at revision {deleted} (20"),
                format!("--revision {}", deleted - 1),
            ] {
                assert!(message.contains(&part), "{message}");
            }
        }
        let before = (deleted - 1).to_string();
        let (code, json) = apply(&["--prefix", "/ns/", "--revision", &before]);
        // At that revision /ns/a was deleted already.
        assert_eq!((code, &json["to_create"]), (0, &1.into()), "{json:#}");
        // Several prefixes: each must have a key.
        let two = [
            "--prefix",
            "/kept/",
            "--prefix",
            "/ns/",
            "--revision",
            &before,
        ];
        let (code, json) = apply(&two);
        assert_eq!((code, &json["unchanged"]), (0, &1.into()), "{json:#}");
        let (code, json) = apply(&["--prefix", "/kept/", "--prefix", "/nowhere/"]);
        assert_eq!(code, 66, "{json:#}");
        let message = json["message"].as_str().unwrap();
        assert!(message.contains("check the name"), "{message}");
    });
}
