//! `maintain` on real etcds: which members are defragmented and when, and alarms.

use crate::support::etcd::{Etcd, EtcdOptions, EtcdVersion, START_TIMEOUT, url};
use crate::support::etcd_cluster::{Cluster, Member, initial_cluster};
use crate::support::process::free_port;
use crate::support::scratch;
use crate::support::{deltafold, run_json};
use deltafold::store::lock::{Lock, Wait};
use etcd_client::{CompactionOptions, MemberAddOptions};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// The quota of etcds whose space is to be used up.
const QUOTA: u64 = 24 << 20;

fn command(endpoints: &str, temp_dir: &Path, args: &[&str]) -> Command {
    let mut c = deltafold();
    c.args(["maintain", "--output", "json", "--log-format", "text"])
        .args(["--endpoints", endpoints, "--temp-dir"])
        .arg(temp_dir)
        .args(args);
    c
}

/// Runs `deltafold maintain`. Returns the exit code and the JSON.
#[track_caller]
fn maintain(endpoints: &str, temp_dir: &Path, args: &[&str]) -> (i32, Value) {
    let (code, json, stderr) = run_json(&mut command(endpoints, temp_dir, args));
    println!("{stderr}");
    (code, json)
}

#[track_caller]
fn succeeds(endpoints: &str, temp_dir: &Path, args: &[&str]) -> Value {
    let (code, json) = maintain(endpoints, temp_dir, args);
    assert_eq!(code, 0, "{json:#}");
    json
}

#[track_caller]
fn refused(endpoints: &str, temp_dir: &Path, args: &[&str], code: i32, reason: &str) -> Value {
    let (got, json) = maintain(endpoints, temp_dir, args);
    assert_eq!(
        (got, json["reason"].as_str()),
        (code, Some(reason)),
        "{json:#}"
    );
    json
}

/// Overwrites one key, so that a compaction can free everything but its last value.
async fn overwrite(etcd: &Etcd, bytes: usize) {
    let value = vec![b'x'; MIB / 2];
    let mut kv = etcd.kv().await;
    for _ in 0..bytes.div_ceil(value.len()) {
        kv.put("/wasted", value.as_slice(), None).await.unwrap();
    }
    // The database grows with the next commit.
    tokio::time::sleep(Duration::from_millis(500)).await;
}

async fn db_size(etcd: &Etcd) -> i64 {
    etcd.client().await.status().await.unwrap().db_size()
}

/// Compacts the history, and waits until every member wastes more than half of its database.
async fn compact(members: &[&Etcd]) {
    let revision = members[0].revision().await;
    // A member counts freed pages as free only after its next commit. If no client writes, only the second
    // compaction causes that commit.
    for at in [revision - 1, revision] {
        for member in members {
            // Members compact on their own. After the first one, etcd refuses the request, but only when the
            // member has finished.
            let options = CompactionOptions::new().with_physical();
            let result = member.client().await.compact(at, Some(options)).await;
            if let Err(e) = result {
                assert!(e.to_string().contains("compacted"), "{e}");
            }
        }
        // Members commit every 100 ms.
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let started = Instant::now();
    for member in members {
        loop {
            let status = member.client().await.status().await.unwrap();
            if status.raft_used_db_size() < status.db_size() / 2 {
                break;
            }
            assert!(started.elapsed() < START_TIMEOUT, "{status:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Overwrites one key, and compacts the history.
async fn waste(etcd: &Etcd, bytes: usize) {
    overwrite(etcd, bytes).await;
    compact(&[etcd]).await;
}

fn three(dir: &Path, version: EtcdVersion, options: &EtcdOptions) -> Cluster {
    let members: Vec<Member> = ["a", "b", "c"].map(|n| Member::new(n, dir.join(n))).into();
    Cluster::start_with(version, &members, "maintain", options)
}

/// Returns when defragmentation began, according to the member's log.
fn defragmented_at(etcd: &Etcd) -> Option<String> {
    let log = etcd.log();
    let line = log.lines().find(|l| l.contains("defragmenting"))?;
    let line: Value = serde_json::from_str(line).unwrap();
    Some(line["ts"].as_str().unwrap().to_owned())
}

async fn life_of_a_member(version: EtcdVersion) {
    let dir = scratch::folder().unwrap();
    let etcd = Etcd::start(version, &dir.path().join("data"));
    let at = etcd.endpoint().to_owned();
    overwrite(&etcd, 8 * MIB).await;
    let size = db_size(&etcd).await;

    // A dry run.
    let json = succeeds(&at, dir.path(), &["--defrag", "always", "--dry-run"]);
    assert_eq!(json["dry_run"], true);
    assert_eq!(json["members"][0]["decision"], "Defragment");
    assert_eq!(db_size(&etcd).await, size);
    assert_eq!(defragmented_at(&etcd), None);

    // Nothing is wasted yet.
    let json = succeeds(&at, dir.path(), &["--defrag", "0.5"]);
    assert_eq!(json["status"], "NothingToDo", "{json:#}");

    compact(&[&etcd]).await;
    let json = succeeds(&at, dir.path(), &["--defrag", "0.5"]);
    assert_eq!(json["status"], "Succeeded");
    let member = &json["members"][0];
    assert_eq!(member["done"], true, "{json:#}");
    assert!(member["db_size_after"].as_i64().unwrap() < size / 2);
    assert!(db_size(&etcd).await < size / 2);

    // A second run has nothing to do.
    let json = succeeds(&at, dir.path(), &["--defrag", "0.5"]);
    assert_eq!(json["status"], "NothingToDo", "{json:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn defragmented_3_5() {
    life_of_a_member(EtcdVersion::V3_5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn defragmented_3_6() {
    life_of_a_member(EtcdVersion::V3_6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn defragmented_3_7() {
    life_of_a_member(EtcdVersion::V3_7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_member_at_a_time_and_the_leader_last() {
    let dir = scratch::folder().unwrap();
    let cluster = three(dir.path(), EtcdVersion::V3_6, &EtcdOptions::default());
    overwrite(cluster.member(0), 12 * MIB).await;
    compact(&cluster.running().collect::<Vec<_>>()).await;
    let one = cluster.member(0).endpoint();
    let json = succeeds(one, dir.path(), &["--defrag", "0.5"]);
    let members = json["members"].as_array().unwrap();
    let leaders: Vec<bool> = members
        .iter()
        .map(|m| m["leader"].as_bool().unwrap())
        .collect();
    assert_eq!(leaders, [false, false, true], "{json:#}");
    // One after the other, according to their own logs.
    let mut told = Vec::new();
    for m in members {
        assert_eq!(m["done"], true, "{json:#}");
        let (before, after) = (&m["db_size_before"], &m["db_size_after"]);
        assert!(
            after.as_u64().unwrap() < before.as_u64().unwrap() / 2,
            "{json:#}"
        );
        let etcd = cluster
            .running()
            .find(|e| Some(e.endpoint()) == m["endpoint"].as_str());
        told.push(defragmented_at(etcd.unwrap()).unwrap());
    }
    assert!(told.is_sorted(), "{told:?}");
    let revision = cluster.member(0).revision().await;
    let mut hashes = Vec::new();
    for etcd in cluster.running() {
        hashes.push(etcd.hash_kv(revision).await);
    }
    assert!(hashes.iter().all(|h| *h == hashes[0]), "{hashes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_defragmented_while_a_member_is_down() {
    let dir = scratch::folder().unwrap();
    let mut cluster = three(dir.path(), EtcdVersion::V3_5, &EtcdOptions::default());
    waste(cluster.member(0), 4 * MIB).await;
    cluster.kill(2);
    cluster.member(0).put_when_led("/more", "of it").await;
    let one = cluster.member(0).endpoint().to_owned();
    for more in [&["--dry-run"][..], &[]] {
        let args = [&["--defrag", "always"], more].concat();
        let json = refused(&one, dir.path(), &args, 75, "MemberUnhealthy");
        assert!(
            json["message"].as_str().unwrap().contains("c: "),
            "{json:#}"
        );
        assert!(
            json["members"]
                .as_array()
                .unwrap()
                .iter()
                .all(|m| m["done"] == false)
        );
    }
    for etcd in cluster.running() {
        assert_eq!(defragmented_at(etcd), None);
    }
    // Without anything to defragment it is only reported.
    let json = succeeds(&one, dir.path(), &["--defrag", "1"]);
    assert!(
        json["warnings"][0].as_str().unwrap().contains("c: "),
        "{json:#}"
    );
    cluster.start_again(2);
    let json = succeeds(&one, dir.path(), &["--defrag", "always"]);
    assert!(
        json["members"]
            .as_array()
            .unwrap()
            .iter()
            .all(|m| m["done"] == true)
    );

    cluster.kill(1);
    cluster.kill(2);
    let args = ["--defrag", "always"];
    let json = refused(&one, dir.path(), &args, 69, "NoQuorum");
    assert!(
        json["message"].as_str().unwrap().contains("a at "),
        "{json:#}"
    );
}

/// Whether the learner was never started, is among the endpoints, or is the only one.
#[tokio::test(flavor = "multi_thread")]
async fn a_learner_is_left_out() {
    for version in EtcdVersion::ALL {
        let dir = scratch::folder().unwrap();
        let voter = Member::new("a", dir.path().join("a"));
        let cluster = Cluster::start(version, std::slice::from_ref(&voter), "learner");
        waste(cluster.member(0), 4 * MIB).await;
        let ports = (free_port(), free_port());
        let learner = MemberAddOptions::new().with_is_learner();
        let mut client = cluster.member(0).client().await;
        let added = client.member_add([url(ports.1)], Some(learner)).await;
        added.unwrap();
        let at_voter = cluster.endpoints()[0].clone();
        let left_out = |endpoints: &str| {
            let mut command = command(endpoints, dir.path(), &["--defrag", "always"]);
            let (code, json, log) = run_json(&mut command);
            assert_eq!((code, &json["warnings"]), (0, &json!([])), "{json:#}");
            assert!(!log.contains("WARN"), "{log}");
            for member in json["members"].as_array().unwrap() {
                let is_voter = member["name"] == "a";
                assert_eq!(member["done"], is_voter, "{version}: {json:#}");
                let reason = member["reason"].as_str().unwrap();
                assert_ne!(reason == "the member is a learner", is_voter, "{json:#}");
            }
        };
        left_out(&at_voter);
        let members = format!("{},b={}", initial_cluster(&[voter]), url(ports.1));
        let options = EtcdOptions {
            name: "b".to_owned(),
            ports: Some(ports),
            initial_cluster: Some(members),
            args: ["--initial-cluster-state", "existing"]
                .map(Into::into)
                .to_vec(),
            ..EtcdOptions::default()
        };
        let learner = Etcd::spawn(version, &dir.path().join("b"), &options).unwrap();
        let started = Instant::now();
        while !learner.log().contains("serving client traffic") {
            assert!(started.elapsed() < START_TIMEOUT, "{}", learner.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for (n, endpoints) in [
            at_voter.clone(),
            format!("{at_voter},{}", learner.endpoint()),
            format!("{},{at_voter}", learner.endpoint()),
        ]
        .into_iter()
        .enumerate()
        {
            left_out(&endpoints);
            // etcd stands at the revision that it has compacted: a second full in one store could prove nothing.
            let store = dir.path().join(format!("store-{n}"));
            let json = snapshot("full", &endpoints, &store);
            assert_eq!(json["warnings"], json!([]), "{version}: {json:#}");
            assert_eq!(json["endpoint"], at_voter);
        }
        assert_eq!(defragmented_at(&learner), None);
        let alone = learner.endpoint();
        let json = refused(alone, dir.path(), &["--defrag", "0"], 78, "Configuration");
        let message = json["message"].as_str().unwrap();
        let says_what_to_do = message.contains("is a learner") && message.contains("voting member");
        assert!(says_what_to_do, "{version}: {message}");
    }
}

/// Writes until the space is used up.
async fn use_up(etcd: &Etcd) {
    let value = vec![b'x'; MIB / 2];
    let mut kv = etcd.kv().await;
    for _ in 0..1000 {
        if let Err(e) = kv.put("/wasted", value.as_slice(), None).await {
            assert!(e.to_string().contains("space exceeded"), "{e}");
            return;
        }
    }
    panic!("there is always room");
}

fn small() -> EtcdOptions {
    EtcdOptions {
        quota_backend_bytes: QUOTA,
        ..EtcdOptions::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_for_want_of_space_goes_when_there_is_room() {
    for version in EtcdVersion::ALL {
        let dir = scratch::folder().unwrap();
        let etcd = Etcd::start_with(version, &dir.path().join("data"), &small());
        let at = etcd.endpoint();
        use_up(&etcd).await;
        // Before a compaction there is little to free, so the database stays larger than this quota.
        let quota = (QUOTA / 2).to_string();
        let args = ["--defrag", "1", "--quota-backend-bytes", &quota];
        let json = succeeds(at, dir.path(), &args);
        assert_eq!(json["alarms_cleared"], json!([]), "{version}: {json:#}");
        let warning = json["warnings"][0].as_str().unwrap();
        assert!(warning.contains("alarm stays raised"), "{json:#}");
        compact(&[&etcd]).await;
        // Much less than that is wasted, and the alarm is disarmed all the same.
        let json = succeeds(at, dir.path(), &["--defrag", "1"]);
        assert_eq!(json["alarms_cleared"][0], "default", "{version}: {json:#}");
        let reason = json["members"][0]["reason"].as_str().unwrap();
        assert!(reason.contains("NOSPACE"), "{reason}");
        etcd.kv().await.put("/again", "room", None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_without_space_is_written_to_again() {
    let dir = scratch::folder().unwrap();
    let cluster = three(dir.path(), EtcdVersion::V3_5, &small());
    use_up(cluster.member(1)).await;
    compact(&cluster.running().collect::<Vec<_>>()).await;
    // 3.5 does not report its quota.
    let quota = QUOTA.to_string();
    let args = ["--defrag", "1", "--quota-backend-bytes", &quota];
    let json = succeeds(cluster.member(0).endpoint(), dir.path(), &args);
    assert!(
        !json["alarms_cleared"].as_array().unwrap().is_empty(),
        "{json:#}"
    );
    assert!(
        json["members"]
            .as_array()
            .unwrap()
            .iter()
            .all(|m| m["done"] == true),
        "{json:#}"
    );
    cluster
        .member(2)
        .kv()
        .await
        .put("/again", "room", None)
        .await
        .unwrap();
}

/// Runs `deltafold snapshot` and returns its JSON.
#[track_caller]
fn snapshot(kind: &str, endpoints: &str, store: &Path) -> Value {
    let mut c = deltafold();
    c.args([
        "snapshot",
        kind,
        "--output",
        "json",
        "--endpoints",
        endpoints,
    ])
    .arg("--store")
    .arg(store);
    let (code, json, stderr) = run_json(&mut c);
    assert_eq!(code, 0, "{json:#}\n{stderr}");
    json
}

#[tokio::test(flavor = "multi_thread")]
async fn two_runs_never_overlap() {
    let dir = scratch::folder().unwrap();
    let store = dir.path().join("store");
    fs::create_dir(&store).unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_7, &dir.path().join("data"));
    let at = etcd.endpoint();
    waste(&etcd, 4 * MIB).await;
    let args = ["--defrag", "always"];
    // The first run shows the name in the folder.
    succeeds(at, dir.path(), &args);
    let lock = fs::read_dir(dir.path()).unwrap();
    let mut lock = lock.map(|e| e.unwrap().path());
    let lock = lock
        .find(|p| p.extension().is_some_and(|e| e == "lock"))
        .unwrap();
    let file = File::open(&lock).unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    refused(at, dir.path(), &args, 75, "LockHeld");
    // A dry run is not stopped by the lock.
    succeeds(at, dir.path(), &[&args[..], &["--dry-run"]].concat());
    drop(file);
    succeeds(at, dir.path(), &args);

    // With a store, the lock is in the store and works across machines.
    snapshot("full", at, &store);
    let name = lock.file_stem().unwrap().to_str().unwrap();
    let name = name.strip_prefix("deltafold-").unwrap().to_owned();
    let url = store.to_str().unwrap().to_owned();
    let handle = tokio::runtime::Handle::current();
    let take = move || {
        let store = deltafold::store::open(&url, &[], handle).unwrap();
        let mut lock = Lock::new(&store, &name, "somebody", Duration::from_secs(3)).unwrap();
        lock.acquire(Wait::UntilSeenDead).unwrap()
    };
    let held = tokio::task::spawn_blocking(take).await.unwrap();
    let with_store = [&args[..], &["--store", store.to_str().unwrap()]].concat();
    let json = refused(at, dir.path(), &with_store, 75, "LockHeld");
    assert!(
        json["message"].as_str().unwrap().contains("somebody"),
        "{json:#}"
    );
    tokio::task::spawn_blocking(move || held.release().unwrap())
        .await
        .unwrap();
    succeeds(at, dir.path(), &with_store);
}
