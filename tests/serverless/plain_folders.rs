//! `list`, `verify` and `status` of plain snapshot files: single ones, and folders as etcdctl, k3s and kOps leave
//! them.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::support::history::Compression;
use crate::support::tiny_backup::{
    SMALL_BASE, object, plain_snapshot, put_events, small_database, zip,
};
use crate::support::{copy_fixture, deltafold, fixtures_dir, run_json, scratch, succeed};
use chrono::Utc;
use serde_json::{Value, json};

/// Runs a command with --snapshot. Returns the exit code and the JSON.
fn run(command: &str, path: &Path, args: &[&str]) -> (i32, Value) {
    let mut c = deltafold();
    c.args([command, "--output", "json", "--snapshot"])
        .arg(path);
    let (code, json, stderr) = run_json(c.args(args));
    eprintln!("{stderr}");
    (code, json)
}

/// Returns the names of the files in a result.
fn names(json: &Value) -> Vec<&str> {
    let files = json["files"].as_array().unwrap().iter();
    files.map(|f| f["name"].as_str().unwrap()).collect()
}

#[test]
fn a_single_file() {
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("any name");
    fs::write(&file, plain_snapshot(50)).unwrap();
    let (code, list) = run("list", &file, &[]);
    assert_eq!((code, names(&list)), (0, vec!["any name"]));
    assert_eq!(list["files"][0]["revision"], 50);
    assert_eq!(list["files"][0]["time_source"], "file");
    assert_eq!(list["files"][0]["has_checksum"], true);
    let (code, verified) = run("verify", &file, &[]);
    assert_eq!((code, &verified["status"]), (0, &"Verified".into()));
    assert!(verified["files"][0]["hash_kv"].is_u64(), "{verified:#}");
    let (code, status) = run("status", &file, &[]);
    assert_eq!(
        (code, &status["latest_revision"]),
        (0, &50.into()),
        "{status:#}"
    );
    assert_eq!(status["max_age_seconds"], 90_000.0);

    // A copy of member/snap/db has no checksum.
    fs::write(&file, small_database(4096)).unwrap();
    let (code, verified) = run("verify", &file, &[]);
    assert_eq!(
        (code, &verified["files"][0]["has_checksum"]),
        (0, &false.into())
    );
    assert!(
        verified["warnings"][0]
            .as_str()
            .unwrap()
            .contains("SHA-256")
    );

    let old = SystemTime::now() - Duration::from_secs(26 * 3600);
    File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_modified(old)
        .unwrap();
    let (code, status) = run("status", &file, &["--verified-within", "1h"]);
    assert_eq!(
        (code, &status["reason"]),
        (75, &"Stale".into()),
        "{status:#}"
    );
    assert!(
        status["warnings"][0]
            .as_str()
            .unwrap()
            .contains("--verified-within")
    );
}

#[test]
fn folders_of_k3s_and_kops() {
    let folder = scratch::folder().unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let now = Utc::now();
    let k3s = format!("etcd-snapshot-node-1-{}", now.timestamp() - 7200);
    let k3s_zip = format!("on-demand-node-1-{}.zip", now.timestamp() - 3600);
    let hour_old = now - chrono::TimeDelta::minutes(30);
    let kops = format!("{}-000001", hour_old.format("%Y-%m-%dT%H:%M:%SZ"));
    put(&k3s, &plain_snapshot(41));
    put(&k3s_zip, &zip(&plain_snapshot(42)));
    let gzip = Compression::Gzip.pack(&plain_snapshot(43));
    put(&format!("{kops}/etcd.backup.gz"), &gzip);
    // What is no snapshot.
    put(&format!("{kops}/_etcd_backup.meta"), b"{}");
    put("kube_resources.tar.gz", &Compression::Gzip.pack(b"tar"));
    put("notes.zip", &zip(b"notes"));
    put("token", b"secret");
    put("snapshot.db.part", &plain_snapshot(44)[..5000]);
    put("deep/er/snapshot.db", &plain_snapshot(45));
    let events = serde_json::to_vec(&put_events(41..=41)).unwrap();
    put("delta.gz", &object(&events, Compression::Gzip));
    symlink("token", folder.path().join("link")).unwrap();
    let fifo = folder.path().join("fifo");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );

    let kops_name = format!("{kops}/etcd.backup.gz");
    let all = vec![k3s.as_str(), k3s_zip.as_str(), kops_name.as_str()];
    let (code, list) = run("list", folder.path(), &[]);
    assert_eq!((code, names(&list)), (0, all.clone()));
    let of_files = |field: &str| -> Vec<Value> {
        let files = list["files"].as_array().unwrap().iter();
        files.map(|f| f[field].clone()).collect()
    };
    assert_eq!(of_files("revision"), [41, 42, 43]);
    assert_eq!(of_files("compression"), ["none", "zip", "gzip"]);
    assert_eq!(of_files("time_source"), ["name", "name", "name"]);
    let problems = list["problems"].to_string();
    let meta = format!("{kops}/_etcd_backup.meta");
    for name in [
        &meta,
        "kube_resources.tar.gz",
        "notes.zip",
        "token",
        "snapshot.db.part",
        "delta.gz",
        "link",
        "fifo",
    ] {
        assert!(
            problems.contains(&format!("{name:?}")),
            "{name}: {problems}"
        );
    }

    let (code, newest) = run("verify", folder.path(), &[]);
    assert_eq!((code, names(&newest)), (0, vec![kops_name.as_str()]));
    let (code, verified) = run(
        "verify",
        folder.path(),
        &["--all-chains", "--level", "names"],
    );
    assert_eq!((code, names(&verified)), (0, all.clone()));
    assert_eq!(verified["files"][0]["hash_kv"], Value::Null);
    let (code, status) = run("status", folder.path(), &[]);
    assert_eq!(
        (code, &status["status"]),
        (0, &"Healthy".into()),
        "{status:#}"
    );
    assert_eq!(status["newest"]["path"], kops_name);
    assert_eq!(status["newest"]["revision"], 43);
    assert_eq!(status["size"]["fulls"], 3);

    // Damage of an old file is found by --all-chains, that of the newest by status.
    let mut damaged = plain_snapshot(41);
    damaged[6000] ^= 1;
    put(&k3s, &damaged);
    assert_eq!(run("verify", folder.path(), &[]).0, 0);
    let (code, verified) = run("verify", folder.path(), &["--all-chains"]);
    assert_eq!((code, &verified["reason"]), (65, &"CorruptSnapshot".into()));
    assert_eq!(verified["findings"][0]["snapshots"], json!([k3s]));
    assert_eq!(names(&verified), all);
    put(&kops_name, &gzip[..gzip.len() / 2]);
    let (code, status) = run("status", folder.path(), &[]);
    assert_eq!(
        (code, &status["status"]),
        (65, &"Damaged".into()),
        "{status:#}"
    );
    assert_eq!(run("list", folder.path(), &[]).0, 0);
}

#[test]
fn huge_and_strange_files_are_damaged_and_hang_nothing() {
    let folder = scratch::folder().unwrap();
    let huge = File::create(folder.path().join("huge.db")).unwrap();
    huge.set_len(1 << 42).unwrap();
    let mut head = small_database(4096);
    head.truncate(8192);
    let mut bolt = File::create(folder.path().join("etcd-snapshot-n-1763600405")).unwrap();
    bolt.write_all(&head).unwrap();
    bolt.set_len(1 << 42).unwrap();
    fs::write(folder.path().join("empty.db"), "").unwrap();
    let (code, list) = run("list", folder.path(), &[]);
    assert_eq!((code, names(&list).len()), (0, 3));
    for file in list["files"].as_array().unwrap() {
        assert_eq!(file["readable"], false, "{file:#}");
    }
    assert_eq!(run("verify", folder.path(), &["--all-chains"]).0, 65);
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let folder = scratch::folder().unwrap();
    let path = folder.path();
    let missing = path.join("missing");
    for command in ["list", "verify", "status"] {
        assert_eq!(run(command, &missing, &[]).0, 66, "{command}");
        assert_eq!(run(command, path, &[]).0, 66, "{command}");
    }
    fs::write(path.join("snapshot.db"), plain_snapshot(SMALL_BASE)).unwrap();
    for args in [
        &["--endpoints", "http://127.0.0.1:1"][..],
        &["--etcd-binary", "/bin/true"],
        &["--timeline", "main"],
        &["--revision", "40"],
    ] {
        let (code, json) = run("verify", path, args);
        assert_eq!((code, &json["reason"]), (64, &"Usage".into()), "{json}");
        let message = json["message"].as_str().unwrap();
        assert!(message.contains(args[0]), "{message}");
    }
    assert_eq!(run("list", path, &["--deep"]).0, 0);
    // --store excludes --snapshot, and the variable of one gives way to the flag of the other.
    let mut c = deltafold();
    let both = c.args(["status", "--store", "x", "--snapshot"]).arg(path);
    assert_eq!(both.output().unwrap().status.code(), Some(64));
    let mut c = deltafold();
    c.args(["status", "--output", "json", "--snapshot"])
        .arg(path);
    succeed(c.env("DELTAFOLD_STORE", "/nowhere"));
    // Nothing is written, no record either.
    assert_eq!(run("verify", path, &[]).0, 0);
    assert_eq!(fs::read_dir(path).unwrap().count(), 1);
}

/// Writes a plain snapshot file of the real cluster at a revision.
fn write_file(file: &Path, revision: &str, args: &[&str]) {
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--revision", revision]);
    c.arg("--store").arg(fixtures_dir().join("kubernetes"));
    c.args(args).arg("--to-snapshot").arg(file);
    assert_eq!(run_json(&mut c).0, 0);
}

/// The newest file was compacted: a file in between knows when the object was deleted.
#[test]
fn a_deletion_is_found_in_any_file() {
    let folder = scratch::folder().unwrap();
    for (name, revision, args) in [
        ("etcd-2026-11-21-020000.db", "560", &[][..]),
        ("etcd-2026-11-21-030000.db", "610", &[]),
        (
            "etcd-2026-11-21-040000.db",
            "628",
            &["--keep-history", "latest"],
        ),
    ] {
        write_file(&folder.path().join(name), revision, args);
    }
    for args in [&[][..], &["--since", "560"]] {
        let (code, result) = run("deleted", folder.path(), args);
        assert_eq!(code, 0, "{result:#}");
        let deleted = result["deleted"].as_array().unwrap();
        let named = |d: &&Value| d["object"] == "configmap/shop/cm-3";
        let found = deleted.iter().find(named).unwrap();
        assert_eq!(found["revision"], 598, "{args:?}: {found:#}");
        // The first file after it has the time.
        assert_eq!(found["not_after"], "2026-11-21T03:00:00Z", "{found:#}");
    }
}

/// Two files that share no store, as two nights of etcdctl.
#[test]
fn two_files_are_compared() {
    let store = copy_fixture("kubernetes");
    let folder = scratch::folder().unwrap();
    let file = |revision: &str| {
        let file = folder.path().join(format!("{revision}.db"));
        write_file(&file, revision, &[]);
        file
    };
    let (old, new) = (file("300"), file("628"));
    let diff = |args: &[&OsStr]| {
        let mut c = deltafold();
        c.args(["diff", "--prefix", "", "--output", "json"])
            .args(args);
        let json = succeed(&mut c);
        let keys = |c: &Value| (c["change"].clone(), c["key"].clone());
        let changes: Vec<_> = json["changes"]
            .as_array()
            .unwrap()
            .iter()
            .map(keys)
            .collect();
        (json["from_revision"].clone(), changes)
    };
    let of_files = diff(&[
        "--from-snapshot".as_ref(),
        old.as_ref(),
        "--snapshot".as_ref(),
        new.as_ref(),
    ]);
    let of_store = diff(&[
        "--from".as_ref(),
        "300".as_ref(),
        "--store".as_ref(),
        store.path().as_ref(),
    ]);
    assert!(of_store.1.len() > 50, "{of_store:?}");
    assert_eq!(of_files, of_store);
}
