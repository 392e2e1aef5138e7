//! `restore --if-needed` keeps sound members, and backups that differ in harmless ways are not reported as
//! inconsistent.

use crate::support::etcd::{Etcd, EtcdOptions, EtcdVersion};
use crate::support::history::Compression;
use crate::support::made_backups::{Bucket, FIXTURE, LAST};
use crate::support::member::files;
use crate::support::scratch;
use crate::support::tiny_backup::{object, small_database};
use crate::support::{copy_fixture, deltafold, restore, succeed};
use deltafold::bolt::{TreeBuilder, write_file};
use deltafold::mvcc::revision::encode_revision;
use deltafold::mvcc::{KeyValue, RecordKey, Revision};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Seek as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

fn restored(store: &Path, data: &Path, args: &[&str]) -> Value {
    let (code, json, stderr) = restore(store, data, args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    json
}

#[track_caller]
fn decides(json: &Value, action: &str, reason: &str, says: &str) {
    let decision = &json["decision"];
    let got = (decision["action"].as_str(), decision["reason"].as_str());
    assert_eq!(got, (Some(action), Some(reason)), "{decision}");
    let message = decision["message"].as_str().unwrap_or_default();
    assert!(message.contains(says), "{message}");
}

/// Its records differ from the backup's, but nothing is wrong with it.
#[test]
fn a_member_without_leases_is_no_damaged_one() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    let dropped = restored(store.path(), &data, &["--leases", "drop"]);
    let other = folder.path().join("other");
    let kept = restored(store.path(), &other, &[]);
    assert_ne!(dropped["hash_kv"], kept["hash_kv"]);
    for history in ["all", "latest"] {
        let member = files(&data);
        let args = ["--if-needed", "full", "--keep-history", history];
        let json = restored(store.path(), &data, &args);
        decides(&json, "Keep", "MemberSound", "except for leases");
        assert!(files(&data) == member);
    }
}

/// The member was down while the backup went on. The other members will send it what it lacks; a restored
/// member would not fit their log.
#[test]
fn one_of_three_that_lags_is_not_restored() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    // Nobody listens there, as when all members start at once.
    let all = "a=http://127.0.0.1:1,b=http://127.0.0.1:2,c=http://127.0.0.1:3";
    let me = [
        "--name",
        "a",
        "--initial-cluster",
        all,
        "--initial-advertise-peer-urls",
        "http://127.0.0.1:1",
    ];
    restored(
        store.path(),
        &data,
        &[&me[..], &["--revision", "1499"]].concat(),
    );
    let member = files(&data);
    let args = [&me[..], &["--if-needed", "full"]].concat();
    let json = restored(store.path(), &data, &args);
    decides(&json, "Keep", "MemberSound", "before the backup's 2252");
    assert!(files(&data) == member);
    // A damaged member is restored all the same.
    fs::remove_file(data.join("member/snap/db")).unwrap();
    let json = restored(store.path(), &data, &args);
    decides(&json, "Restore", "DatabaseMissing", "");
}

/// A member whose leader has just sent a whole database that is not in place yet.
fn with_sent_database(store: &Path, data: &Path) -> PathBuf {
    restored(store, data, &[]);
    let snap = data.join("member/snap");
    let sent = snap.join("0000000000000001.snap.db");
    fs::rename(snap.join("db"), &sent).unwrap();
    // In its place, an older database.
    fs::write(snap.join("db"), small_database(4096)).unwrap();
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_a_leader_has_sent_is_the_members() {
    let store = copy_fixture(FIXTURE);
    for version in EtcdVersion::ALL {
        let folder = scratch::folder().unwrap();
        let data = folder.path().join("data");
        with_sent_database(store.path(), &data);
        for look in ["sanity", "full"] {
            let json = restored(store.path(), &data, &["--if-needed", look]);
            decides(&json, "Keep", "MemberSound", "2252");
        }
        // etcd itself confirms it.
        let etcd = Etcd::start(version, &data);
        assert_eq!(etcd.revision().await, LAST, "{version}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_older_than_its_snap_file() {
    let store = copy_fixture(FIXTURE);
    let version = EtcdVersion::V3_6;
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    fs::remove_file(with_sent_database(store.path(), &data)).unwrap();
    Etcd::try_start_with(version, &data, &EtcdOptions::default()).unwrap_err();
    let json = restored(store.path(), &data, &["--if-needed", "sanity"]);
    decides(&json, "Restore", "SnapshotFileMissing", ".snap.db");
    let etcd = Etcd::start(version, &data);
    assert_eq!(etcd.revision().await, LAST);
}

/// A plain file has no timelines and is compared all the same.
#[test]
fn a_plain_snapshot_tells_whether_a_restore_is_needed() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let (data, plain) = (folder.path().join("data"), folder.path().join("plain.db"));
    let run = |target: &str, path: &Path, args: &[&str]| {
        let mut c = deltafold();
        c.args(["restore", "--output", "json", target]).arg(path);
        succeed(c.args(args))
    };
    let store = store.path().to_str().unwrap();
    run("--to-snapshot", &plain, &["--store", store]);
    let plain = plain.to_str().unwrap();
    run("--data-dir", &data, &["--snapshot", plain]);
    let args = ["--snapshot", plain, "--if-needed", "full"];
    let json = run("--data-dir", &data, &args);
    decides(
        &json,
        "Keep",
        "MemberSound",
        "agrees with the backup at 2252",
    );
    fs::remove_dir_all(data.join("member/wal")).unwrap();
    let json = run("--data-dir", &data, &args);
    decides(&json, "Restore", "WalMissing", "");
}

/// An alarm in the restored database stops writes to the new etcd, so the restore warns of it.
#[test]
fn an_alarm_in_the_base_is_told() {
    let folder = scratch::folder().unwrap();
    let alarms = [&b""[..], &[0x08, 0x7b, 0x10, 0x01]];
    for alarm in alarms {
        let store = Bucket::of(&BTreeMap::from([(
            "v2/Full-00000000-00000005-1795224681".to_owned(),
            object(&base_with(true, alarm), Compression::None),
        )]));
        let data = folder.path().join(format!("data-{}", alarm.len()));
        let json = restored(store.path(), &data, &[]);
        let warnings = json["warnings"].to_string();
        let told = warnings.contains("alarm disarm");
        assert_eq!(told, !alarm.is_empty(), "{warnings}");
    }
}

/// `member` is a relative symbolic link, which would point elsewhere if it were moved to the staging directory.
#[test]
fn a_member_behind_a_link_is_kept_aside() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    restored(store.path(), &data, &[]);
    fs::rename(data.join("member"), folder.path().join("elsewhere")).unwrap();
    symlink("../elsewhere", data.join("member")).unwrap();
    let json = restored(store.path(), &data, &["--if-needed", "full"]);
    decides(&json, "Keep", "MemberSound", "");
    fs::remove_dir_all(folder.path().join("elsewhere/wal")).unwrap();
    let damaged = files(&folder.path().join("elsewhere"));
    let json = restored(store.path(), &data, &["--if-needed", "sanity"]);
    decides(&json, "Restore", "WalMissing", "");
    let kept = PathBuf::from(json["kept_aside"][0].as_str().expect("what was kept"));
    assert!(files(&kept) == damaged);
    assert!(!data.join("member").is_symlink());
}

/// A database compacted at a revision that deletes a key. Depending on its version, etcd keeps that tombstone
/// or not.
fn base(with_tombstone: bool) -> Vec<u8> {
    base_with(with_tombstone, b"")
}

fn base_with(with_tombstone: bool, raised: &[u8]) -> Vec<u8> {
    let file = tempfile::tempfile().unwrap();
    let written = write_file(file, 4096, "", |w| {
        let mut key = TreeBuilder::new(0);
        for main in [2, 4, 5] {
            let rk = RecordKey {
                main: Revision(main),
                sub: 0,
                tombstone: main == 4,
            };
            if rk.tombstone && !with_tombstone {
                continue;
            }
            let kv = match rk.tombstone {
                true => KeyValue::tombstone(b"b"),
                false => KeyValue {
                    key: b"a",
                    create_revision: Revision(2),
                    mod_revision: rk.main,
                    version: if main == 2 { 1 } else { 2 },
                    value: b"some value",
                    lease: 0,
                },
            };
            let (mut k, mut v) = (Vec::new(), Vec::new());
            rk.encode(&mut k);
            kv.encode(&mut v);
            key.push(w, &k, &v)?;
        }
        let mut meta = TreeBuilder::new(0);
        for name in [&b"finishedCompactRev"[..], b"scheduledCompactRev"] {
            meta.push(w, name, &encode_revision(Revision(4), 0))?;
        }
        let mut alarm = TreeBuilder::new(0);
        if !raised.is_empty() {
            alarm.push(w, raised, b"")?;
        }
        let mut root = TreeBuilder::new(0);
        for (name, tree) in BTreeMap::from([("alarm", alarm), ("key", key), ("meta", meta)]) {
            let value = tree.finish(w)?;
            root.push_bucket(w, name.as_bytes(), &value)?;
        }
        Ok(root)
    });
    let mut file = written.unwrap();
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_tombstone_at_the_compacted_revision_is_no_disagreement() {
    let folder = scratch::folder().unwrap();
    let stores = [true, false].map(|with_tombstone| {
        let full = object(&base(with_tombstone), Compression::None);
        // Created a second apart, so that they are not copies of each other.
        let name = format!(
            "v2/Full-00000000-00000005-{}",
            1_795_224_681 + i64::from(with_tombstone)
        );
        Bucket::of(&BTreeMap::from([(name, full)]))
    });
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--data-dir"])
        .arg(folder.path().join("data"));
    stores.iter().for_each(|s| {
        c.arg("--store").arg(s.path());
    });
    let json = succeed(&mut c);
    assert_eq!(json["live_keys"], 1);
}
