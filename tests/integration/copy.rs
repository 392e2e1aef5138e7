//! Copies of whole backups: byte for byte, recompressed, with other keys, waiting for a snapshot, followed.

use crate::support::history::{Compression, with_checksum};
use crate::support::made_backups::{BASE, Bucket, LAST, Objects, T0, mixed, objects_in, paths};
use crate::support::orphan_deltas::{baseless, catalog};
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, expected, fixture_names, fixtures_dir, run_json};
use age::secrecy::ExposeSecret;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn command(from: &Path, to: &Path, args: &[&str]) -> Command {
    let mut c = deltafold();
    c.args(["copy", "--output", "json", "--from"])
        .arg(from)
        .arg("--to")
        .arg(to)
        .args(args);
    c
}

fn copy(from: &Path, to: &Path, args: &[&str]) -> (i32, Value, String) {
    run_json(&mut command(from, to, args))
}

/// Copies and asserts success.
fn copies(from: &Path, to: &Path, args: &[&str]) -> Value {
    let (code, json, stderr) = copy(from, to, args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    json
}

/// Copies. Returns the exit code and the reason for the failure.
fn refused(from: &Path, to: &Path, args: &[&str]) -> (i32, String) {
    let (code, json, _) = copy(from, to, args);
    (code, json["reason"].as_str().unwrap_or_default().to_owned())
}

/// Compacts a copy of a store. Returns the revision and the HashKV of the result.
fn hash_of(store: &Path, args: &[&str]) -> (Value, Value) {
    let copy = Bucket::of(&objects_in(store));
    let done = copy.compact(args);
    (done["revision"].clone(), done["hash_kv"].clone())
}

#[test]
fn every_fixture_byte_for_byte() {
    for name in fixture_names() {
        let target = scratch::folder().unwrap();
        let from = fixtures_dir().join(&name);
        let source = objects_in(&from);
        let done = copies(&from, target.path(), &[]);
        let snapshots = source.keys().filter(|p| p.starts_with("v2/")).count();
        assert_eq!(done["copied"], snapshots, "{name}");
        assert_eq!(objects_in(target.path()), source, "{name}");
        let etcd = expected(&name).compacted_at_last_revision;
        assert_eq!(hash_of(target.path(), &[]).1, etcd.hash, "{name}");
        // There is nothing left to do.
        let again = copies(&from, target.path(), &[]);
        assert_eq!(
            (&again["status"], &again["kept"], &again["bytes_read"]),
            (&"NothingToDo".into(), &snapshots.into(), &0.into()),
            "{name}"
        );
    }
}

#[test]
fn both_layouts_notes_and_marks() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    let source = bucket.objects();
    let done = copies(bucket.path(), target.path(), &[]);
    let of = |done: &Value, what: &str| -> BTreeSet<String> {
        let objects = done["objects"].as_array().unwrap().iter();
        let objects = objects.filter(|o| o["decision"] == *what);
        objects
            .map(|o| o["path"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(of(&done, "Skipped").len(), 2, "{done:#}");
    let mut expected = source.clone();
    expected.retain(|p, _| {
        !p.ends_with("README") && !p.contains("-00001000-") && !p.contains("Incr-00000070")
    });
    assert_eq!(paths(&objects_in(target.path())), paths(&expected));
    assert!(objects_in(target.path()) == expected);
    assert_eq!(done["warnings"].as_array().unwrap().len(), 2, "{done:#}");

    // Excluded snapshots are copied with their markers, so that nobody uses them in the target.
    let done = copies(bucket.path(), target.path(), &["--include-excluded"]);
    assert_eq!(done["copied"], 1);
    let mut expected = source;
    expected.retain(|p, _| !p.ends_with("README") && !p.contains("Incr-00000070"));
    assert_eq!(paths(&objects_in(target.path())), paths(&expected));

    // A pin that was added to the source later is copied, too.
    bucket.put("deltafold-pins/Full-00000000-00000050-500.gz", b"{}");
    let again = copies(bucket.path(), target.path(), &[]);
    assert_eq!(again["status"], "NothingToDo");
    assert!(
        target
            .path()
            .join("deltafold-pins/Full-00000000-00000050-500.gz")
            .exists()
    );
}

#[test]
fn a_dry_run_tells_and_writes_nothing() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    bucket.put(
        "deltafold-identity.json",
        br#"{"clusterId": "a", "recordedAt": "2026-11-21T00:00:00Z"}"#,
    );
    let told = copies(bucket.path(), target.path(), &["--dry-run"]);
    assert_eq!(objects_in(target.path()), Objects::new());
    let done = copies(bucket.path(), target.path(), &[]);
    for field in ["copied", "skipped", "objects", "backups", "backups_wanted"] {
        let sorted = |v: &Value| {
            let mut objects: Vec<String> = match v.as_array() {
                Some(all) => all.iter().map(Value::to_string).collect(),
                None => vec![v.to_string()],
            };
            objects.sort();
            objects
        };
        assert_eq!(sorted(&told[field]), sorted(&done[field]), "{field}");
    }
}

#[test]
fn the_newest_backups_alone() {
    let (bucket, target) = (Bucket::with_base(), scratch::folder().unwrap());
    bucket.delta(BASE + 1, 1499, 6);
    let folded = bucket.compact(&[]);
    bucket.delta(1500, LAST, 9);
    let done = copies(bucket.path(), target.path(), &["--max-backups", "1"]);
    assert_eq!(
        (&done["backups"], &done["backups_wanted"]),
        (&2.into(), &1.into())
    );
    let got = objects_in(target.path());
    let full = format!("v2/{}", folded["snapshot"].as_str().unwrap());
    let delta = format!("v2/Incr-00001500-{LAST:08}-{}.gz", T0 + 9);
    assert_eq!(paths(&got), [&full, &delta]);
    assert_eq!(
        hash_of(target.path(), &[]),
        hash_of(bucket.path(), &[]),
        "the newest state is that of the source"
    );
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    copies(bucket.path(), target.path(), &["--max-backups", "1"]);
    let got = objects_in(target.path());
    assert!(
        !got.keys().any(|p| p.starts_with("v1/")),
        "{:?}",
        got.keys()
    );
    // The full from the fixture is of 2026, the other one is dated 1970: 18000 days lie between.
    let target = scratch::folder().unwrap();
    let days = "18000";
    copies(bucket.path(), target.path(), &["--max-backup-age", days]);
    assert_eq!(paths(&objects_in(target.path())), paths(&got));
}

#[test]
fn what_is_refused_before_anything_is_written() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    let (from, to) = (bucket.path(), target.path());
    assert_eq!(refused(from, from, &[]), (64, "Usage".into()));
    let slash = from.join("");
    assert_eq!(refused(from, &slash, &[]), (64, "Usage".into()));
    assert_eq!(refused(to, from, &[]), (66, "NoSnapshots".into()));
    assert_eq!(
        refused(&to.join("missing"), from, &[]),
        (66, "NoSnapshots".into())
    );
    assert_eq!(
        refused(from, to, &["--to-option", "x"]),
        (64, "Usage".into())
    );
    assert_eq!(
        refused(from, to, &["--interval", "0s"]),
        (64, "Usage".into())
    );
    assert_eq!(
        refused(from, to, &["--from-option", "region=x"]),
        (78, "Configuration".into())
    );
    assert_eq!(
        refused(from, to, &["--follow", "--dry-run"]),
        (64, "Usage".into())
    );
    assert_eq!(objects_in(to), Objects::new());
}

#[test]
fn another_clusters_target_is_refused_unless_told() {
    const IDENTITY: &str = "deltafold-identity.json";
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    bucket.put(IDENTITY, br#"{"clusterId": "cafe"}"#);
    let theirs = br#"{"clusterId": "beef"}"#;
    fs::write(target.path().join(IDENTITY), theirs).unwrap();
    let (code, json, _) = copy(bucket.path(), target.path(), &[]);
    assert_eq!((code, &json["reason"]), (65, &"OtherCluster".into()));
    assert_eq!(objects_in(target.path()).len(), 1);
    for dry_run in [&["--dry-run"][..], &["--dry-run", "--take-over"]] {
        let (code, _, stderr) = copy(bucket.path(), target.path(), dry_run);
        assert_eq!(code, if dry_run.len() == 1 { 65 } else { 0 }, "{stderr}");
    }
    assert_eq!(fs::read(target.path().join(IDENTITY)).unwrap(), theirs);
    copies(bucket.path(), target.path(), &["--take-over"]);
    let now = fs::read(target.path().join(IDENTITY)).unwrap();
    let now: Value = serde_json::from_slice(&now).unwrap();
    assert_eq!(now["clusterId"], "cafe");
    assert_eq!(now["formerClusterIds"], serde_json::json!(["beef"]));
}

/// Whoever can write to the source can write there whose successor it is.
#[test]
fn a_source_that_calls_itself_the_successor_of_the_targets_cluster_is_refused() {
    const IDENTITY: &str = "deltafold-identity.json";
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    bucket.put(
        IDENTITY,
        br#"{"clusterId": "cafe", "formerClusterIds": ["beef"], "more": "unchecked"}"#,
    );
    let theirs = br#"{"clusterId": "beef"}"#;
    fs::write(target.path().join(IDENTITY), theirs).unwrap();
    assert_eq!(
        refused(bucket.path(), target.path(), &[]),
        (65, "OtherCluster".into())
    );
    assert_eq!(fs::read(target.path().join(IDENTITY)).unwrap(), theirs);

    // What is written is what was checked.
    let empty = scratch::folder().unwrap();
    for (to, args) in [(&target, &["--take-over"][..]), (&empty, &[])] {
        copies(bucket.path(), to.path(), args);
        let now = fs::read(to.path().join(IDENTITY)).unwrap();
        let now: Value = serde_json::from_slice(&now).unwrap();
        assert_eq!(now["clusterId"], "cafe");
        assert_eq!(now["formerClusterIds"], serde_json::json!(["beef"]));
        assert_eq!(now["more"], Value::Null);
    }
}

/// Without an identity object, copying into another cluster's backup is refused if the two overlap in time.
#[test]
fn two_backups_are_not_mixed_where_no_identity_tells() {
    let target = scratch::folder().unwrap();
    let (theirs, ours) = (
        fixtures_dir().join("kubernetes"),
        fixtures_dir().join("etcd36-gzip"),
    );
    copies(&theirs, target.path(), &[]);
    let before = objects_in(target.path());
    assert_eq!(
        refused(&ours, target.path(), &[]),
        (65, "OtherCluster".into())
    );
    assert_eq!(objects_in(target.path()), before);
    assert_eq!(copies(&ours, target.path(), &["--take-over"])["failed"], 0);
    // A backup that ended before the source began may be the source's own past.
    let target = scratch::folder().unwrap();
    copies(&ours, target.path(), &[]);
    copies(&theirs, target.path(), &[]);
}

#[test]
fn typing_errors_are_no_stores_and_no_answers() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    let (from, to) = (bucket.path(), target.path());
    assert_eq!(refused(from, &to.join("v2"), &[]), (64, "Usage".into()));
    let scheme = std::path::Path::new("s3:bucket");
    assert_eq!(refused(from, scheme, &[]), (64, "Usage".into()));
    for (value, code) in [("maybe", 64), ("true", 0), ("", 0)] {
        let mut command = command(from, to, &["--dry-run"]);
        let done = command.env("DELTAFOLD_TAKE_OVER", value).output().unwrap();
        assert_eq!(done.status.code(), Some(code), "{value}");
    }
}

#[test]
fn a_conflict_is_told_and_the_rest_goes_on() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    let taken = format!("v2/Full-00000000-{BASE:08}-{T0}.gz");
    fs::create_dir(target.path().join("v2")).unwrap();
    fs::write(target.path().join(&taken), b"another's").unwrap();
    let (code, json, stderr) = copy(bucket.path(), target.path(), &[]);
    assert_eq!(
        (code, &json["reason"]),
        (73, &"TargetExists".into()),
        "{stderr}"
    );
    assert_eq!(
        (&json["failed"], &json["copied"]),
        (&1.into(), &2.into()),
        "{json:#}"
    );
    let got = objects_in(target.path());
    assert_eq!(got[&taken], b"another's");
    assert!(
        !got.keys().any(|p| p.contains("Incr-0000074")),
        "{:?}",
        got.keys()
    );
}

#[test]
fn a_damaged_delta_stays_behind_and_so_does_what_follows() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    let first = bucket
        .path()
        .join(format!("v2/Incr-{:08}-00001499-{}.gz", BASE + 1, T0 + 6));
    let mut bytes = fs::read(&first).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 4;
    fs::write(&first, bytes).unwrap();
    let (code, json, stderr) = copy(bucket.path(), target.path(), &[]);
    assert_eq!(
        (code, &json["reason"]),
        (65, &"CorruptSnapshot".into()),
        "{stderr}"
    );
    let why: Vec<&Value> = json["objects"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|o| o["reason"] == "BaseNotCopied")
        .map(|o| &o["path"])
        .collect();
    assert_eq!(why, [&format!("v2/Incr-00001500-{LAST:08}-{}.gz", T0 + 9)]);
    let got = objects_in(target.path());
    assert_eq!(baseless(&catalog(got.keys())), [""; 0]);
}

/// Like `hash_of`, for encrypted backups.
fn hash_with(store: &Path, (identity, recipient): (&str, &str)) -> Value {
    hash_of(
        store,
        &["--age-identity", identity, "--age-recipient", recipient],
    )
    .1
}

/// Returns a key pair: the identity's file, and the recipient.
fn key(folder: &Path, name: &str) -> (String, String) {
    let identity = age::x25519::Identity::generate();
    let file = folder.join(name);
    fs::write(&file, identity.to_string().expose_secret()).unwrap();
    let file = file.to_str().unwrap().to_owned();
    (file, identity.to_public().to_string())
}

#[test]
fn keys_are_given_changed_and_taken_away() {
    let keys = scratch::folder().unwrap();
    let (old, old_recipient) = key(keys.path(), "old");
    let (new, new_recipient) = key(keys.path(), "new");
    let source = copy_fixture("etcd35-gzip");
    let hash = expected("etcd35-gzip").compacted_at_last_revision.hash;
    let folders: Vec<TempDir> = (0..5).map(|_| scratch::folder().unwrap()).collect();
    let at = |i: usize| folders[i].path();

    copies(source.path(), at(0), &["--age-recipient", &old_recipient]);
    let encrypted = objects_in(at(0));
    for (path, bytes) in &encrypted {
        assert!(path.ends_with(".gz.age"), "{path}");
        assert!(bytes.starts_with(b"age-encryption.org/v1"), "{path}");
    }
    assert_eq!(hash_with(at(0), (&old, &old_recipient)), hash);

    // A forgotten recipient flag must not put plain text beside encrypted snapshots.
    let last = paths(&encrypted).pop().unwrap().to_owned();
    fs::remove_file(at(0).join(&last)).unwrap();
    assert_eq!(
        refused(source.path(), at(0), &[]),
        (78, "Configuration".into())
    );
    assert_eq!(objects_in(at(0)).len(), encrypted.len() - 1);
    fs::write(at(0).join(&last), &encrypted[&last]).unwrap();
    copies(source.path(), at(0), &[]);

    // Copied byte for byte: unchecked without a key, checked with one.
    let blind = copies(at(0), at(1), &[]);
    assert_eq!(blind["unchecked"], encrypted.len());
    assert!(objects_in(at(1)) == encrypted);
    fs::remove_dir_all(at(1).join("v2")).unwrap();
    let seeing = copies(at(0), at(1), &["--age-identity", &old]);
    assert_eq!(seeing["unchecked"], 0);
    assert!(objects_in(at(1)) == encrypted);
    // A key that does not fit counts as no key.
    fs::remove_dir_all(at(1).join("v2")).unwrap();
    let wrong = copies(at(0), at(1), &["--age-identity", &new]);
    assert_eq!(wrong["unchecked"], encrypted.len());

    // With new keys the old ones open nothing any more.
    let rotate = ["--age-identity", &old, "--age-recipient", &new_recipient];
    copies(at(0), at(2), &rotate);
    assert_eq!(paths(&objects_in(at(2))), paths(&encrypted));
    assert_eq!(hash_with(at(2), (&new, &new_recipient)), hash);
    let (code, json, _) = Bucket::of(&objects_in(at(2))).run("compact", &["--age-identity", &old]);
    assert_eq!((code, &json["reason"]), (77, &"CannotDecrypt".into()));
    let again = copies(at(0), at(2), &rotate);
    assert_eq!(again["status"], "NothingToDo");

    // Plain text only on request.
    let none = |args: &[&str]| refused(at(0), at(4), args);
    assert_eq!(none(&["--decrypt"]), (77, "CannotDecrypt".into()));
    let recipient = ["--age-recipient", new_recipient.as_str()];
    assert_eq!(none(&recipient), (77, "CannotDecrypt".into()));
    assert_eq!(objects_in(at(4)), Objects::new());
    copies(at(0), at(4), &["--decrypt", "--age-identity", &old]);
    assert!(objects_in(at(4)) == objects_in(source.path()));

    // Damage inside an encrypted snapshot is found, too.
    let path = encrypted.keys().next().unwrap();
    let mut bytes = encrypted[path].clone();
    let end = bytes.len() - 20;
    bytes[end] ^= 1;
    fs::write(at(0).join(path), bytes).unwrap();
    fs::remove_dir_all(at(1).join("v2")).unwrap();
    let (code, json, _) = copy(at(0), at(1), &["--age-identity", &old]);
    assert_eq!((code, &json["reason"]), (65, &"CorruptSnapshot".into()));
}

fn spawn(from: &Path, to: &Path, args: &[&str]) -> Child {
    let mut c = command(from, to, args);
    c.stdout(Stdio::piped()).stderr(Stdio::piped());
    c.spawn().unwrap()
}

fn ended(child: Child) -> (i32, Value, String) {
    let out = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    let json = serde_json::from_slice(&out.stdout).unwrap_or(Value::Null);
    (out.status.code().unwrap_or(-1), json, stderr)
}

#[track_caller]
fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is() {
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "{what} did not come"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_final_snapshot_is_waited_for() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    // An older final snapshot does not end the wait.
    let noise = Compression::Gzip.pack(&with_checksum(b"final"));
    bucket.put("v2/Full-00000000-00000060-600.gz.final", &noise);
    let waiting = ["--wait-for-final", "--interval", "20ms"];
    let mut child = spawn(bucket.path(), target.path(), &waiting);
    std::thread::sleep(Duration::from_millis(700));
    assert!(child.try_wait().unwrap().is_none(), "it did not wait");
    assert_eq!(objects_in(target.path()), Objects::new());
    let last = format!("v2/Full-00000000-{LAST:08}-{}.gz.final", T0 + 100);
    bucket.put(&last, &noise);
    let (code, json, stderr) = ended(child);
    assert_eq!(
        (code, &json["final_snapshot"]),
        (0, &last.as_str().into()),
        "{stderr}"
    );
    assert!(json["waited_seconds"].as_f64().unwrap() > 0.0);
    assert!(objects_in(target.path()).contains_key(&last));
}

#[test]
fn a_final_snapshot_that_does_not_come_is_not_waited_for_for_ever() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    let limit = ["--wait-for-final", "--wait-timeout", "300ms"];
    let done = copies(bucket.path(), target.path(), &limit);
    assert_eq!(done["final_snapshot"], Value::Null);
    assert!(done["waited_seconds"].as_f64().unwrap() >= 0.3);
    assert!(objects_in(target.path()).len() > 5);
    // An empty source may still be filled.
    let empty = scratch::folder().unwrap();
    let (code, _, _) = copy(empty.path(), target.path(), &limit);
    assert_eq!(code, 66);
    // Without a time-out the wait does not end.
    let mut child = spawn(
        bucket.path(),
        empty.path(),
        &["--wait-for-final", "--wait-timeout", "0s"],
    );
    std::thread::sleep(Duration::from_millis(700));
    assert!(child.try_wait().unwrap().is_none(), "it did not wait");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let (code, json, _) = ended(child);
    assert_eq!((code, &json["reason"]), (143, &"Terminated".into()));
}

#[test]
fn a_second_store_is_kept_in_step() {
    let bucket = Bucket::with_base();
    let target = scratch::folder().unwrap();
    let empty = scratch::folder().unwrap();
    let child = spawn(
        empty.path(),
        target.path(),
        &["--follow", "--interval", "20ms"],
    );
    // The source of a follower may be empty at first and disappear for a while.
    let put = |from: &Path| {
        for (path, bytes) in objects_in(from) {
            let to = empty.path().join(&path);
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            let part = to.with_file_name("part");
            fs::write(&part, bytes).unwrap();
            fs::rename(part, to).unwrap();
        }
    };
    let same = || objects_in(target.path()) == bucket.objects();
    put(bucket.path());
    wait_until("the base", same);
    bucket.delta(BASE + 1, 1499, 6);
    put(bucket.path());
    wait_until("a delta", same);
    let away = empty.path().with_extension("away");
    fs::rename(empty.path(), &away).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    fs::rename(&away, empty.path()).unwrap();
    bucket.delta(1500, LAST, 9);
    put(bucket.path());
    wait_until("another", same);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let (code, json, stderr) = ended(child);
    assert_eq!((code, &json["copied"]), (0, &3.into()), "{stderr}");
    assert_eq!(json["failed"], 0, "{stderr}");
}

#[test]
fn a_damaged_snapshot_does_not_end_a_follower() {
    let (bucket, target) = (mixed(), scratch::folder().unwrap());
    let damaged = "v1/Backup-500/Full-00000000-00000050-500.gz";
    bucket.put(damaged, b"nothing");
    let child = spawn(
        bucket.path(),
        target.path(),
        &["--follow", "--interval", "20ms"],
    );
    let there = |path: &str| target.path().join(path).exists();
    let last = format!("v2/Incr-00001500-{LAST:08}-{}.gz", T0 + 9);
    wait_until("the rest", || there(&last));
    let noise = Compression::Gzip.pack(&with_checksum(b"later"));
    let later = format!("v2/Incr-{:08}-{:08}-{}.gz", LAST + 1, LAST + 2, T0 + 99);
    bucket.put(&later, &noise);
    wait_until("what comes later", || there(&later));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let (code, json, stderr) = ended(child);
    assert_eq!((code, &json["failed"]), (0, &1.into()), "{stderr}");
    assert_eq!(json["objects"][0]["path"], damaged);
    assert!(!there(damaged));
}
