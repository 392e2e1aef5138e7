//! Plain snapshot files, read and written like etcd's own tools do, and leases in them: real etcds of three
//! versions start on the results.

use crate::support::etcd::{Etcd, EtcdVersion, bbolt_check, etcdutl_status};
use crate::support::history::{Compression, Recorder, Recording};
use crate::support::made_backups::{BASE, Bucket, FIXTURE, LAST};
use crate::support::member::{files, hash_of, stamps};
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, expected, restore, run_json};
use etcd_client::{LeaseGrantOptions, PutOptions};
use fastrand::Rng;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const T0: i64 = 1_790_000_000;

fn to_snapshot(store: &Path, file: &Path, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--store"])
        .arg(store);
    c.arg("--to-snapshot").arg(file).args(args);
    run_json(&mut c)
}

fn from_snapshot(file: &Path, data: &Path, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--snapshot"])
        .arg(file);
    c.arg("--data-dir").arg(data).args(args);
    run_json(&mut c)
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdutl_restores_what_is_written() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let e = expected(FIXTURE);
    let inside = e.hash_kv[3];
    let newest = e.hash_kv.iter().find(|row| row.revision == LAST).unwrap();
    let last = e.compacted_at_last_revision;
    let at = inside.revision.to_string();
    let cases: [(&str, &[&str], i64, u32, u64); 3] = [
        ("all.db", &[], LAST, newest.hash, newest.live_keys),
        (
            "latest.db",
            &["--keep-history", "latest"],
            LAST,
            last.hash,
            last.live_keys,
        ),
        (
            "inside.db",
            &["--revision", &at],
            inside.revision,
            inside.hash,
            inside.live_keys,
        ),
    ];
    for (name, args, revision, hash, live) in cases {
        let file = folder.path().join(name);
        let (code, json, stderr) = to_snapshot(store.path(), &file, args);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(json["hash_kv"], hash, "{name}");
        assert_eq!(json["member"], Value::Null, "{name}");
        bbolt_check(&file).unwrap();
        for version in EtcdVersion::ALL {
            let status = etcdutl_status(version, &file);
            assert_eq!(
                status["revision"], revision,
                "{name}, etcdutl {version}: {status}"
            );
            let etcd = Etcd::restore_and_start(version, &file);
            assert_eq!(etcd.revision().await, revision, "{name}, {version}");
            assert_eq!(etcd.hash_kv(revision).await.hash, hash, "{name}, {version}");
            assert_eq!(etcd.live_keys_at(revision).await, live, "{name}, {version}");
        }
        // deltafold accepts it, too.
        let data = folder.path().join(format!("data-{name}"));
        let (code, json, stderr) = from_snapshot(&file, &data, &[]);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(
            (json["hash_kv"].as_u64(), hash_of(&data).ok()),
            (Some(hash.into()), Some(hash))
        );
    }
}

#[test]
fn a_file_that_is_there_is_never_overwritten() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("plain.db");
    let beside = folder.path().join("link.db");
    let nowhere = folder.path().join("dangling.db");
    fs::write(&file, "somebody's").unwrap();
    std::os::unix::fs::symlink(&file, &beside).unwrap();
    std::os::unix::fs::symlink(folder.path().join("missing"), &nowhere).unwrap();
    let is_there = folder.path().join("folder");
    fs::create_dir(&is_there).unwrap();
    let before = stamps(folder.path());
    for path in [&file, &beside, &nowhere, &is_there] {
        for args in [&[][..], &["--dry-run"]] {
            let (code, json, stderr) = to_snapshot(store.path(), path, args);
            assert_eq!(
                (code, &json["reason"]),
                (73, &"TargetExists".into()),
                "{stderr}"
            );
            assert_eq!(stamps(folder.path()), before, "{}", path.display());
        }
    }
    let other = folder.path().join("other.db");
    let (code, _, stderr) = to_snapshot(store.path(), &other, &["--dry-run"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(stamps(folder.path()), before);
    // If anything fails, the name stays free.
    let bucket = Bucket::with_base();
    let delta = bucket.delta(BASE + 1, LAST, 6);
    crate::support::member::flip(&bucket.path().join("v2").join(delta), 5000);
    let (code, json, stderr) = to_snapshot(bucket.path(), &other, &[]);
    assert_eq!(
        (code, &json["reason"]),
        (65, &"CorruptSnapshot".into()),
        "{stderr}"
    );
    assert_eq!(stamps(folder.path()), before);
}

/// A database that etcd streamed, whole or at a revision that it still holds.
#[tokio::test(flavor = "multi_thread")]
async fn a_plain_snapshot_of_a_real_etcd_is_restored() {
    for version in EtcdVersion::ALL {
        let folder = scratch::folder().unwrap();
        let source = Etcd::start(version, &folder.path().join("source"));
        let mut client = source.client().await;
        for n in 0..40 {
            let key = format!("key/{}", n % 7);
            client.put(key, n.to_string(), None).await.unwrap();
        }
        let last = source.revision().await;
        let inside = last - 11;
        let rows = [last, inside];
        let mut hashes = Vec::new();
        for at in rows {
            hashes.push((source.hash_kv(at).await, source.live_keys_at(at).await));
        }
        let file = folder.path().join("plain.db");
        fs::write(&file, source.snapshot().await).unwrap();
        drop(source);
        for (at, (hash, live)) in rows.into_iter().zip(hashes) {
            let data = folder.path().join(format!("at-{at}"));
            let (code, json, stderr) =
                from_snapshot(&file, &data, &["--revision", &at.to_string()]);
            assert_eq!(code, 0, "{stderr}");
            assert_eq!(json["hash_kv"], hash.hash, "{version} at {at}");
            let etcd = Etcd::start(version, &data);
            assert_eq!(etcd.revision().await, at, "{version}");
            assert_eq!(etcd.hash_kv(at).await, hash, "{version}");
            assert_eq!(etcd.live_keys_at(at).await, live, "{version}");
        }
        let data = folder.path().join("none");
        for (args, code, reason) in [
            (["--revision", "9999"], 66, "OutOfRange"),
            (["--time", "2026-11-21T00:00:00Z"], 64, "Usage"),
        ] {
            let (got, json, stderr) = from_snapshot(&file, &data, &args);
            assert_eq!(
                (got, json["reason"].as_str()),
                (code, Some(reason)),
                "{stderr}"
            );
            assert!(!data.exists());
        }
        crate::support::member::flip(&file, fs::metadata(&file).unwrap().len() / 2);
        let (code, json, stderr) = from_snapshot(&file, &data, &[]);
        assert_eq!(
            (code, &json["reason"]),
            (65, &"CorruptSnapshot".into()),
            "{stderr}"
        );
        assert!(!data.exists());
    }
}

const RECORDED: i64 = 11;
const UNRECORDED: i64 = 22;

/// Returns a backup whose full records one lease, and whose delta attaches keys to that lease and to another
/// one.
async fn with_leases(source: &Etcd) -> (Recording, i64) {
    let mut client = source.client().await;
    let grant = |id| LeaseGrantOptions::new().with_id(id);
    let on = |id| Some(PutOptions::new().with_lease(id));
    client
        .lease_grant(5000, Some(grant(RECORDED)))
        .await
        .unwrap();
    client
        .put("recorded/before", "1", on(RECORDED))
        .await
        .unwrap();
    client.put("free", "1", None).await.unwrap();
    let mut recorder = Recorder::start(source).await;
    recorder.take_full(source).await;
    client
        .lease_grant(6000, Some(grant(UNRECORDED)))
        .await
        .unwrap();
    client
        .put("recorded/after", "2", on(RECORDED))
        .await
        .unwrap();
    client.put("unrecorded", "2", on(UNRECORDED)).await.unwrap();
    let last = source.revision().await;
    (recorder.finish(last, &mut Rng::with_seed(1), 1).await, last)
}

async fn leases(etcd: &Etcd) -> Vec<i64> {
    let listed = etcd.client().await.leases().await.unwrap();
    let mut ids: Vec<i64> = listed.leases().iter().map(|lease| lease.id()).collect();
    ids.sort_unstable();
    ids
}

async fn keys(etcd: &Etcd) -> Vec<String> {
    let all = etcd_client::GetOptions::new().with_all_keys();
    let got = etcd.client().await.get("", Some(all)).await.unwrap();
    let keys = got.kvs().iter().map(|kv| kv.key_str().unwrap().to_owned());
    keys.collect()
}

const ALL_KEYS: [&str; 4] = ["free", "recorded/after", "recorded/before", "unrecorded"];

#[tokio::test(flavor = "multi_thread")]
async fn leases_live_on_expire_or_are_dropped() {
    for version in EtcdVersion::ALL {
        let folder = scratch::folder().unwrap();
        let source = Etcd::start(version, &folder.path().join("source"));
        let (recording, last) = with_leases(&source).await;
        let hash = source.hash_kv(last).await.hash;
        drop(source);
        let store = folder.path().join("store");
        recording.write_bucket(&store, Compression::Zstd, T0);

        // A lease that no snapshot recorded lives as long as the flag says.
        let data = folder.path().join("kept");
        let (code, json, stderr) = restore(&store, &data, &["--lease-ttl", "1h"]);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(
            (&json["hash_kv"], &json["leases_added"]),
            (&hash.into(), &1.into())
        );
        let etcd = Etcd::start(version, &data);
        assert_eq!(leases(&etcd).await, [RECORDED, UNRECORDED], "{version}");
        let mut client = etcd.client().await;
        for (id, ttl, of) in [
            (RECORDED, 5000, &ALL_KEYS[1..3]),
            (UNRECORDED, 3600, &ALL_KEYS[3..]),
        ] {
            let options = etcd_client::LeaseTimeToLiveOptions::new().with_keys();
            let lease = client.lease_time_to_live(id, Some(options)).await.unwrap();
            assert_eq!(lease.granted_ttl(), ttl, "{version}: {id}");
            assert!(lease.ttl() > 0 && lease.ttl() <= ttl, "{version}: {id}");
            let mut attached: Vec<_> = lease.keys().iter().map(|k| k.to_vec()).collect();
            attached.sort();
            let of: Vec<_> = of.iter().map(|k| k.as_bytes().to_vec()).collect();
            assert_eq!(attached, of, "{version}: {id}");
        }
        assert_eq!(keys(&etcd).await, ALL_KEYS, "{version}");
        drop(etcd);

        // A short lifetime: its key expires, the others stay.
        let data = folder.path().join("short");
        let (code, _, stderr) = restore(&store, &data, &["--lease-ttl", "2s"]);
        assert_eq!(code, 0, "{stderr}");
        let etcd = Etcd::start(version, &data);
        let started = Instant::now();
        while keys(&etcd).await != ALL_KEYS[..3] {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "{version}: it does not expire"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(leases(&etcd).await, [RECORDED], "{version}");
        drop(etcd);

        let data = folder.path().join("dropped");
        let (code, json, stderr) = restore(&store, &data, &["--leases", "drop"]);
        assert_eq!(code, 0, "{stderr}");
        // HashKV includes the lease.
        assert_ne!(json["hash_kv"], hash, "{version}");
        assert_eq!(json["hash_kv"], hash_of(&data).unwrap(), "{version}");
        let etcd = Etcd::start(version, &data);
        assert_eq!(etcd.hash_kv(last).await.hash, json["hash_kv"], "{version}");
        assert_eq!(leases(&etcd).await, [0; 0], "{version}");
        assert_eq!(keys(&etcd).await, ALL_KEYS, "{version}");
        drop(etcd);

        // A plain file keeps leases like a data directory.
        let file = folder.path().join("plain.db");
        let (code, json, stderr) = to_snapshot(&store, &file, &[]);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(
            (&json["hash_kv"], &json["leases_added"]),
            (&hash.into(), &1.into())
        );
        let etcd = Etcd::restore_and_start(version, &file);
        assert_eq!(leases(&etcd).await, [RECORDED, UNRECORDED], "{version}");
        assert_eq!(files(&store).len(), 2);
    }
}

/// The amount of history that is kept does not change the state.
#[tokio::test(flavor = "multi_thread")]
async fn history_is_kept_as_far_as_was_asked_for() {
    let store = copy_fixture(FIXTURE);
    let e = expected(FIXTURE);
    let live = e.compacted_at_last_revision.live_keys;
    // The revision where the full was compacted.
    let base = e.hash_kv[0].compact_revision;
    let cases: [(&str, i64); 5] = [
        ("all", base),
        ("latest", LAST),
        ("100", LAST - 100),
        ("1000000", base),
        ("1000000h", base),
    ];
    for (keep, compacted_at) in cases {
        let folder = scratch::folder().unwrap();
        let data = folder.path().join("data");
        let (code, json, stderr) = restore(store.path(), &data, &["--keep-history", keep]);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(json["compact_revision"], compacted_at, "{keep}");
        assert_eq!(json["live_keys"], live, "{keep}");
        let etcd = Etcd::start(EtcdVersion::V3_6, &data);
        let hash = etcd.hash_kv(LAST).await;
        assert_eq!(hash.hash, json["hash_kv"], "{keep}");
        assert_eq!(hash.compact_revision, compacted_at, "{keep}");
        // What was kept can be read.
        let oldest = (compacted_at + 1).min(LAST);
        assert!(etcd.live_keys_at(oldest).await > 0, "{keep}");
    }
}

/// In a Pod the store's variable is set for every command.
#[test]
fn a_flag_wins_over_the_variable_of_one_that_it_excludes() {
    let store = copy_fixture("kubernetes");
    let folder = scratch::folder().unwrap();
    let (file, data) = (folder.path().join("plain.db"), folder.path().join("data"));
    let run = |args: &[&str]| {
        let mut command = deltafold();
        command.args(["restore", "--output", "json"]).args(args);
        command.env("DELTAFOLD_STORE", store.path());
        command.env("DELTAFOLD_DATA_DIR", &data);
        run_json(&mut command)
    };
    let plain = file.to_str().unwrap();
    let (code, json, stderr) = run(&["--to-snapshot", plain]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(json["snapshot_file"], plain);
    assert!(!data.exists());
    let (code, json, stderr) = run(&["--snapshot", plain]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(json["candidates"][0]["store"], plain);
    assert_eq!(json["data_dir"], data.to_str().unwrap());
    // Two flags contradict each other.
    let (code, _, stderr) = run(&["--snapshot", plain, "--store", plain]);
    assert_eq!(code, 64, "{stderr}");
}
