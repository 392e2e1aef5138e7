//! Leases after a restore: deltas do not record them, but their keys must expire all the same.

use crate::support::etcd::Etcd;
use crate::support::history::{Compression, Recorder};
use crate::support::tools::EtcdVersion;
use crate::support::{deltafold, restore, scratch, succeed};
use etcd_client::{Client, PutOptions};
use fastrand::Rng;
use std::time::{Duration, Instant};

const T0: i64 = 1_790_000_000;
/// The longest wait for a lease of a few seconds to expire. Generous: the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

async fn put(client: &mut Client, key: &str, lease: i64) {
    let options = PutOptions::new().with_lease(lease);
    client.put(key, "value", Some(options)).await.unwrap();
}

/// Returns the lease of a key, or `None` if the key does not exist.
async fn lease_of(client: &mut Client, key: &str) -> Option<i64> {
    let got = client.get(key, None).await.unwrap();
    got.kvs().first().map(|kv| kv.lease())
}

/// Returns the granted time to live of a lease, or 0 if there is no such lease.
async fn granted(client: &mut Client, lease: i64) -> i64 {
    let told = client.lease_time_to_live(lease, None).await.unwrap();
    told.granted_ttl()
}

async fn of_etcd(version: EtcdVersion) {
    let folder = scratch::folder().unwrap();
    let source = Etcd::start(version, &folder.path().join("source"));
    let mut client = source.client().await;
    let recorded = client.lease_grant(700, None).await.unwrap().id();
    put(&mut client, "recorded", recorded).await;
    // As the API servers do, which take a new lease each time.
    put(&mut client, "renewed", recorded).await;
    let mut recorder = Recorder::start(&source).await;
    recorder.take_full(&source).await;
    let late = client.lease_grant(900, None).await.unwrap().id();
    put(&mut client, "late", late).await;
    put(&mut client, "late too", late).await;
    let renewed = client.lease_grant(15, None).await.unwrap().id();
    put(&mut client, "renewed", renewed).await;
    let left = client.lease_grant(900, None).await.unwrap().id();
    put(&mut client, "left", left).await;
    put(&mut client, "left", 0).await;
    let last = source.revision().await;
    let hash = source.hash_kv(last).await.hash;
    let recording = recorder.finish(last, &mut Rng::with_seed(1), 2).await;
    drop(source);
    let store = folder.path().join("store");
    recording.write_bucket(&store, Compression::Gzip, T0);

    for history in ["all", "latest"] {
        let what = format!("etcd {version} with history {history}");
        let data_dir = folder.path().join(format!("keep-{history}"));
        let args = ["--keep-history", history, "--lease-ttl", "5s"];
        let (code, json, stderr) = restore(&store, &data_dir, &args);
        assert_eq!(code, 0, "{what}: {stderr}");
        assert_eq!(json["leases_added"], 2, "{what}");
        if history == "all" {
            assert_eq!(json["hash_kv"], hash, "{what}");
        }
        let etcd = Etcd::start(version, &data_dir);
        let mut client = etcd.client().await;
        assert_eq!(granted(&mut client, recorded).await, 700, "{what}");
        assert_eq!(granted(&mut client, left).await, 0, "{what}");
        // What the key's lease had in the full.
        assert_eq!(granted(&mut client, renewed).await, 700, "{what}");
        assert_eq!(lease_of(&mut client, "left").await, Some(0), "{what}");
        let started = Instant::now();
        while lease_of(&mut client, "late").await.is_some() {
            assert!(started.elapsed() < PATIENCE, "{what}: it stays");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // Together, as in the transaction that ends a lease.
        assert_eq!(lease_of(&mut client, "late too").await, None, "{what}");
        let stays = lease_of(&mut client, "recorded").await;
        assert_eq!(stays, Some(recorded), "{what}");

        let data_dir = folder.path().join(format!("drop-{history}"));
        let args = ["--keep-history", history, "--leases", "drop"];
        let (code, json, stderr) = restore(&store, &data_dir, &args);
        assert_eq!(code, 0, "{what}: {stderr}");
        assert_eq!(json["leases_added"], 0, "{what}");
        let etcd = Etcd::start(version, &data_dir);
        let mut client = etcd.client().await;
        for key in ["recorded", "renewed", "late", "late too", "left"] {
            assert_eq!(lease_of(&mut client, key).await, Some(0), "{what}: {key}");
        }
        let leases = client.leases().await.unwrap();
        assert_eq!(leases.leases().len(), 0, "{what}");
        let told = etcd.hash_kv(last).await.hash;
        assert_eq!(json["hash_kv"], told, "{what}");
    }

    // A full of deltafold knows as much of leases as the one that it was made of.
    let mut compact = deltafold();
    compact.args(["compact", "--output", "json", "--store"]);
    succeed(compact.arg(&store));
    let data_dir = folder.path().join("compacted");
    let (code, _, stderr) = restore(&store, &data_dir, &[]);
    assert_eq!(code, 0, "{stderr}");
    let etcd = Etcd::start(version, &data_dir);
    let mut client = etcd.client().await;
    assert_eq!(granted(&mut client, renewed).await, 700);
    assert_eq!(granted(&mut client, late).await, 3600);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_late_leases_expire_3_5() {
    of_etcd(EtcdVersion::V3_5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_late_leases_expire_3_6() {
    of_etcd(EtcdVersion::V3_6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_late_leases_expire_3_7() {
    of_etcd(EtcdVersion::V3_7).await;
}
