//! `verify --endpoints`: a backup against the live etcd it was taken from is equal, different, or without a
//! common revision.

use crate::support::etcd::{Etcd, EtcdVersion};
use crate::support::etcd_cluster::{Cluster, Member};
use crate::support::history::{Compression, History, Recorder, Recording, with_checksum};
use crate::support::made_backups::alter;
use crate::support::recorded_etcd::with_etcd;
use crate::support::scratch;
use crate::support::{deltafold, run_json, seed};
use etcd_client::{DeleteOptions, LeaseGrantOptions, PutOptions};
use fastrand::Rng;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const T0: i64 = 1_790_000_000;
/// A value that occurs once in a database file.
const NEEDLE: &str = "a value that nothing else has: 7e0c";

/// Runs `deltafold verify`. Returns the exit code, the JSON and standard error.
fn verify(store: &Path, endpoints: &str, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.args(["verify", "--output", "json", "--log-format", "text"])
        .args(["--endpoints", endpoints, "--store"])
        .arg(store)
        .args(args);
    let (code, json, stderr) = run_json(&mut c);
    (code, json, stderr)
}

#[track_caller]
fn equal(store: &Path, endpoints: &str, args: &[&str]) -> Value {
    let (code, json, stderr) = verify(store, endpoints, args);
    assert_eq!(code, 0, "{json:#}\n{stderr}");
    assert_eq!(json["verdict"], "Equal");
    json
}

#[track_caller]
fn refused(store: &Path, endpoints: &str, args: &[&str], code: i32, reason: &str) -> String {
    let (got, json, stderr) = verify(store, endpoints, args);
    assert_eq!(got, code, "{json:#}\n{stderr}");
    assert_eq!(json["reason"], reason, "{json:#}");
    json["message"].as_str().unwrap().to_owned()
}

/// Writes, overwrites and deletes keys; some keys have a lease.
async fn write(etcd: &Etcd, tag: &str, n: usize) {
    let mut client = etcd.client().await;
    // The same in every cluster, so that histories with the same tag are equal.
    let id = tag
        .bytes()
        .fold(1, |id, b| id * 31 % 100_003 + i64::from(b));
    let options = LeaseGrantOptions::new().with_id(id);
    let lease = client.lease_grant(3600, Some(options)).await.unwrap().id();
    for i in 0..n {
        let key = format!("/app/{}", i % 17);
        let options = (i % 3 == 0).then(|| PutOptions::new().with_lease(lease));
        let value = format!("{tag} {i}");
        client.put(key, value, options).await.unwrap();
        if i % 7 == 0 {
            let options = DeleteOptions::new().with_prefix();
            let prefix = format!("/app/{}", i % 5);
            client.delete(prefix, Some(options)).await.unwrap();
        }
    }
}

/// Takes a full and deltas while keys are written.
async fn back_up(etcd: &Etcd, tag: &str, n: usize, deltas: usize) -> (Recording, i64) {
    let mut recorder = Recorder::start(etcd).await;
    recorder.take_full(etcd).await;
    write(etcd, tag, n).await;
    let last = etcd.revision().await;
    let mut rng = Rng::with_seed(7);
    (recorder.finish(last, &mut rng, deltas).await, last)
}

fn full_of(store: &Path, prefix: &str) -> Vec<PathBuf> {
    let names = fs::read_dir(store.join("v2")).unwrap();
    let mut names: Vec<PathBuf> = names.map(|e| e.unwrap().path()).collect();
    names.retain(|p| p.file_name().unwrap().to_str().unwrap().starts_with(prefix));
    names.sort();
    names
}

/// Returns result, reason and revision of the recorded comparison.
fn recorded(store: &Path) -> (Value, Value, Value) {
    let record = fs::read(store.join("deltafold-verified/cluster.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let field = |name: &str| record[name].clone();
    (field("result"), field("reason"), field("revision"))
}

async fn life_of_a_backup(version: EtcdVersion) {
    let dir = scratch::folder().unwrap();
    let store = dir.path().join("store");
    let etcd = Etcd::start(version, &dir.path().join("data"));
    write(&etcd, "before", 60).await;
    let (recording, last) = back_up(&etcd, "during", 120, 4).await;
    recording.write_bucket(&store, Compression::Gzip, T0);

    // Never compacted.
    let at = etcd.endpoint();
    let json = equal(&store, at, &[]);
    assert_eq!(json["compact_revision"], -1);
    assert_eq!(json["revision"], last);
    let want = etcd.hash_kv(last).await;
    assert_eq!(json["hash_kv"], want.hash);
    assert_eq!(json["live_keys"], etcd.live_keys_at(last).await);
    assert_eq!(json["deltas"].as_array().unwrap().len(), 4);
    assert_eq!(json["members"][0]["equal"], true);
    // At a revision inside a delta, and beyond the end.
    let within = (last - 20).to_string();
    equal(&store, at, &["--revision", &within]);
    let beyond = (last + 1).to_string();
    refused(&store, at, &["--revision", &beyond], 66, "NoCommonRevision");

    // The cluster continues and is compacted before, inside, and at the end of what is saved.
    write(&etcd, "after", 10).await;
    for compact in [recording.full_revision - 5, last - 30] {
        etcd.compact(compact).await;
        let json = equal(&store, at, &[]);
        assert_eq!(json["compact_revision"], compact, "{json:#}");
    }
    // A new full without history: the older one is folded again. Without the older one there is no common
    // revision.
    let mut c = deltafold();
    c.args(["compact", "--output", "json", "--store"])
        .arg(&store);
    assert_eq!(run_json(&mut c).0, 0);
    let json = equal(&store, at, &[]);
    assert_eq!(json["deltas"].as_array().unwrap().len(), 4);
    let kept = dir.path().join("kept");
    fs::create_dir(&kept).unwrap();
    let old = full_of(&store, "Full").remove(0);
    let kept_as = kept.join(old.file_name().unwrap());
    fs::rename(&old, &kept_as).unwrap();
    let said = refused(&store, at, &[], 66, "NoCommonRevision");
    assert!(said.contains("compacted later"), "{said}");

    // At exactly a compacted revision, etcd responds from memory with the earlier hash.
    etcd.compact(last).await;
    refused(&store, at, &[], 66, "NoCommonRevision");
    fs::rename(&kept_as, &old).unwrap();
    equal(&store, at, &[]);
    // And remembers it, wherever it compacts later.
    etcd.compact(last + 1).await;
    equal(&store, at, &[]);
    let before = (last - 1).to_string();
    let said = refused(&store, at, &["--revision", &before], 66, "NoCommonRevision");
    assert!(said.contains("compacted revision"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_until_compacted_away_3_5() {
    life_of_a_backup(EtcdVersion::V3_5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_until_compacted_away_3_6() {
    life_of_a_backup(EtcdVersion::V3_6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_until_compacted_away_3_7() {
    life_of_a_backup(EtcdVersion::V3_7).await;
}

/// An idle cluster is equal, too, although its newest revision is the compacted one.
#[tokio::test(flavor = "multi_thread")]
async fn equal_at_rest() {
    let dir = scratch::folder().unwrap();
    let store = dir.path().join("store");
    let etcd = Etcd::start(EtcdVersion::V3_6, &dir.path().join("data"));
    let history = History::record(&etcd, seed(), 80, 3).await;
    history.write_bucket(&store, Compression::Zstd, T0);
    let json = equal(&store, etcd.endpoint(), &[]);
    assert_eq!(json["revision"], history.last_revision);
    let mut c = deltafold();
    c.args(["compact", "--output", "json", "--store"])
        .arg(&store);
    assert_eq!(run_json(&mut c).0, 0);
    equal(&store, etcd.endpoint(), &[]);
}

/// The last change deleted all keys, and etcd compacted there: newer versions remember another hash than they
/// would compute without the compaction.
#[tokio::test(flavor = "multi_thread")]
async fn equal_with_nothing_alive() {
    for version in [EtcdVersion::V3_5, EtcdVersion::V3_6, EtcdVersion::V3_7] {
        let dir = scratch::folder().unwrap();
        let store = dir.path().join("store");
        let etcd = Etcd::start(version, &dir.path().join("data"));
        write(&etcd, "before", 30).await;
        etcd.compact(5).await;
        let mut recorder = Recorder::start(&etcd).await;
        recorder.take_full(&etcd).await;
        write(&etcd, "during", 30).await;
        let all = DeleteOptions::new().with_all_keys();
        etcd.client().await.delete("", Some(all)).await.unwrap();
        let last = etcd.revision().await;
        let recording = recorder.finish(last, &mut Rng::with_seed(7), 2).await;
        recording.write_bucket(&store, Compression::None, T0);

        let computed = equal(&store, etcd.endpoint(), &[]);
        assert_eq!(computed["live_keys"], 0);
        etcd.compact(last).await;
        let remembered = equal(&store, etcd.endpoint(), &[]);
        assert_eq!(remembered["hash_kv"], computed["hash_kv"], "{version}");
        assert_eq!(remembered["compact_revision"], 5, "{version}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_backup_and_another_cluster_differ() {
    let dir = scratch::folder().unwrap();
    let store = dir.path().join("store");
    let etcd = Etcd::start(EtcdVersion::V3_6, &dir.path().join("data"));
    write(&etcd, "before", 30).await;
    let (recording, last) = back_up(&etcd, "during", 40, 1).await;
    recording.write_bucket(&store, Compression::None, T0);
    let json = equal(&store, etcd.endpoint(), &["--no-record"]);
    assert_eq!(json["recorded"], Value::Null);
    assert!(!store.join("deltafold-verified").exists());
    let json = equal(&store, etcd.endpoint(), &[]);
    assert_eq!(json["recorded"], "deltafold-verified/cluster.json");
    assert_eq!(
        recorded(&store),
        ("Verified".into(), Value::Null, last.into())
    );

    // Another history of the same shape.
    let other = Etcd::start(EtcdVersion::V3_6, &dir.path().join("other"));
    write(&other, "before", 30).await;
    write(&other, "other", 40).await;
    assert_eq!(other.revision().await, last);
    let said = refused(&store, other.endpoint(), &[], 65, "BackupDiffers");
    let failed = ("Failed".into(), "BackupDiffers".into(), last.into());
    assert_eq!(recorded(&store), failed);
    let (ours, theirs) = (etcd.hash_kv(last).await, other.hash_kv(last).await);
    for hash in [ours.hash, theirs.hash] {
        assert!(said.contains(&hash.to_string()), "{said}");
    }
    // Up to the fork they are equal.
    let before = recording.full_revision.to_string();
    let json = equal(&store, other.endpoint(), &["--revision", &before]);
    // An earlier revision does not hide that the newest differs.
    assert_eq!(json["recorded"], Value::Null);
    assert_eq!(recorded(&store), failed);

    // A cluster that is behind the backup, for example after a restore.
    let behind = Etcd::start(EtcdVersion::V3_6, &dir.path().join("behind"));
    write(&behind, "before", 30).await;
    write(&behind, "other", 20).await;
    refused(&store, behind.endpoint(), &[], 65, "BackupDiffers");

    // Two members of different clusters are not one cluster.
    let both = format!("{},{}", etcd.endpoint(), other.endpoint());
    let said = refused(&store, &both, &[], 78, "Configuration");
    assert!(said.contains("different clusters"), "{said}");

    // Compacted beyond everything that is saved.
    write(&other, "more", 10).await;
    other.compact(last + 2).await;
    let said = refused(&store, other.endpoint(), &[], 66, "NoCommonRevision");
    assert!(said.contains("take one"), "{said}");
    // A comparison without a result is not recorded.
    assert_eq!(recorded(&store).0, "Failed");

    // One event of the backup is altered.
    let delta = full_of(&store, "Incr").remove(0);
    let events: Vec<Value> = serde_json::from_slice(&recording.deltas[0].json).unwrap();
    let altered = serde_json::to_vec(&alter(events, b"changed")).unwrap();
    fs::write(&delta, with_checksum(&altered)).unwrap();
    refused(&store, etcd.endpoint(), &[], 65, "BackupDiffers");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_member_is_asked() {
    let dir = scratch::folder().unwrap();
    let store = dir.path().join("store");
    let member = |n: &str| Member::new(n, dir.path().join(n));
    let members: Vec<Member> = ["a", "b", "c"].map(member).into();
    let mut cluster = Cluster::start(EtcdVersion::V3_5, &members, "verify");
    write(cluster.member(0), "before", 30).await;
    let mut client = cluster.member(0).client().await;
    client.put("/needle", NEEDLE, None).await.unwrap();
    cluster.member(0).compact(20).await;
    let (recording, _) = back_up(cluster.member(0), "during", 40, 2).await;
    recording.write_bucket(&store, Compression::Zlib, T0);

    // One endpoint is enough to find the others.
    let one = cluster.member(1).endpoint().to_owned();
    let json = equal(&store, &one, &[]);
    let names = |json: &Value, equal: Value| -> Vec<String> {
        let members = json["members"].as_array().unwrap().iter();
        let members = members.filter(|m| m["equal"] == equal);
        members
            .map(|m| m["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names(&json, Value::Bool(true)), ["a", "b", "c"]);

    // A damaged member is named; then it is gone; then there is no quorum; then nobody responds.
    cluster.kill(2);
    let db = members[2].data_dir.join("member/snap/db");
    let mut bytes = fs::read(&db).unwrap();
    let places: Vec<usize> = bytes
        .windows(NEEDLE.len())
        .enumerate()
        .filter(|(_, w)| *w == NEEDLE.as_bytes())
        .map(|(at, _)| at)
        .collect();
    for at in places {
        bytes[at] = b'A';
    }
    fs::write(&db, bytes).unwrap();
    cluster.start_again(2);
    let said = refused(&store, &one, &[], 65, "MembersDiffer");
    assert!(
        said.contains("c differs") && said.contains("a is equal"),
        "{said}"
    );

    cluster.kill(2);
    let json = equal(&store, &one, &[]);
    assert_eq!(names(&json, Value::Null), ["c"]);
    assert!(json["warnings"][0].as_str().unwrap().contains("member c"));
    cluster.kill(0);
    let said = refused(&store, &one, &[], 69, "NoQuorum");
    assert!(said.contains(&format!("b at {one} responds")), "{said}");
    cluster.kill(1);
    refused(&store, &one, &[], 69, "EtcdUnreachable");
}

/// A full that was taken after etcd was compacted at its newest revision does not hold the history of the hash that etcd
/// remembers from before.
#[test]
fn a_full_after_a_compaction_at_the_newest_revision() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put_many("/a/", 10, 10);
            world.put_many("/a/", 5, 20);
            let newest = world.delete("/a/00003");
            world.compact(newest);
            world.snapshot("full", &[]).succeeded();
            let store = world.folder().join("store");
            let json = equal(&store, &world.endpoints().join(","), &[]);
            assert_eq!(json["compact_revision"], newest, "{version}: {json:#}");
        });
    }
}
