//! Restores that users of etcd-backup-restore ask for, served by real etcds: transactions larger than etcd
//! accepts, a full that holds more than its name says, and overlapping streams of deltas.

use crate::support::etcd::{Etcd, EtcdOptions};
use crate::support::history::{Compression, Recorder};
use crate::support::made_backups::{BASE, Bucket, LAST};
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use crate::support::{expected, restore};
use etcd_client::{Txn, TxnOp};
use fastrand::Rng;
use serde_json::Value;
use std::path::Path;

const T0: i64 = 1_790_000_000;
/// etcd accepts requests up to this size by default.
const USUAL_LIMIT: u64 = 1_572_864;

fn restored(store: &Path, data_dir: &Path, args: &[&str]) -> Value {
    let (code, json, stderr) = restore(store, data_dir, args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    assert_eq!(json["status"], "Succeeded", "{json}");
    json
}

/// A transaction and a value of more than 2 MiB each, restored into etcds that would not accept them.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_larger_than_an_etcd_takes() {
    for version in EtcdVersion::ALL {
        let folder = scratch::folder().unwrap();
        let source = Etcd::start(version, &folder.path().join("source"));
        let mut client = source.client().await;
        client.put("before", "full", None).await.unwrap();
        let mut recorder = Recorder::start(&source).await;
        recorder.take_full(&source).await;
        let puts = (0..120).map(|n| TxnOp::put(format!("/many/{n:03}"), vec![n; 30 << 10], None));
        let puts: Vec<TxnOp> = puts.collect();
        client.txn(Txn::new().and_then(puts)).await.unwrap();
        let inside = source.revision().await;
        client.put("/large", vec![7; 3 << 20], None).await.unwrap();
        let last = source.revision().await;
        let hashes = [source.hash_kv(inside).await, source.hash_kv(last).await];
        let recording = recorder.finish(last, &mut Rng::with_seed(1), 1).await;
        drop(source);
        let store = folder.path().join("store");
        recording.write_bucket(&store, Compression::Gzip, T0);

        for (revision, hash, live) in [(inside, hashes[0], 121), (last, hashes[1], 122)] {
            let data_dir = folder.path().join(revision.to_string());
            let result = restored(&store, &data_dir, &["--revision", &revision.to_string()]);
            assert_eq!(result["hash_kv"], hash.hash, "etcd {version}");
            assert_eq!(result["live_keys"], live, "etcd {version}");
            let options = EtcdOptions {
                max_request_bytes: USUAL_LIMIT,
                ..EtcdOptions::default()
            };
            let etcd = Etcd::start_with(version, &data_dir, &options);
            assert_eq!(etcd.revision().await, revision, "etcd {version}");
            assert_eq!(etcd.hash_kv(revision).await.hash, hash.hash, "{version}");
            let mut client = etcd.client().await;
            let got = client.get("/many/119", None).await.unwrap();
            assert_eq!(got.kvs()[0].value(), vec![119; 30 << 10], "{version}");
            client
                .put("/large", vec![8; 2 << 20], None)
                .await
                .unwrap_err();
            client.put("after", "the restore", None).await.unwrap();
        }
    }
}

/// Restores the newest state without history. Asserts that every version of etcd agrees with the source.
async fn is_the_fixture(b: &Bucket, what: &str) {
    let want = expected("etcd35-gzip").compacted_at_last_revision;
    for version in EtcdVersion::ALL {
        let folder = scratch::folder().unwrap();
        let data_dir = folder.path().join("data");
        let result = restored(b.path(), &data_dir, &["--keep-history", "latest"]);
        assert_eq!(result["restored_revision"], LAST, "{what}");
        assert_eq!(result["hash_kv"], want.hash, "{what}");
        let etcd = Etcd::start(version, &data_dir);
        assert_eq!(etcd.revision().await, LAST, "{what} in etcd {version}");
        let hash = etcd.hash_kv(LAST).await.hash;
        assert_eq!(hash, want.hash, "{what} in etcd {version}");
        let live = etcd.live_keys_at(LAST).await;
        assert_eq!(live, want.live_keys, "{what} in etcd {version}");
    }
}

/// A full under the name of an earlier revision, as a race with the snapshotter leaves it.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_past_its_name_and_the_first_deltas_end() {
    let whole = Bucket::with_base();
    whole.delta(BASE + 1, LAST, 6);
    let made = whole.compact(&["--revision", "1450"]);
    let full = std::fs::read(
        whole
            .path()
            .join("v2")
            .join(made["snapshot"].as_str().unwrap()),
    );
    let b = Bucket::with_base();
    let after = crate::support::made_backups::T0 + 5;
    let name = format!("Full-00000000-00001400-{after}.gz");
    b.put(&format!("v2/{name}"), &full.unwrap());
    b.delta(1401, 1440, 6);
    b.delta(1441, LAST, 7);
    is_the_fixture(&b, "a full past its name").await;
    let folder = scratch::folder().unwrap();
    let result = restored(b.path(), &folder.path().join("data"), &["--dry-run"]);
    assert_eq!(result["base"], name);
}

/// One stream ends early, the other has a hole: only together they cover everything.
#[tokio::test(flavor = "multi_thread")]
async fn streams_that_overlap() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1000, 5);
    b.delta(900, 1300, 6);
    b.delta(1100, 1200, 7);
    b.delta(1250, 1800, 8);
    b.delta(1250, 1800, 9);
    b.delta(1700, LAST, 10);
    is_the_fixture(&b, "streams that overlap").await;
}
