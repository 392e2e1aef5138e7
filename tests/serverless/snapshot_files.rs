//! Plain snapshot files by `--snapshot`: one that is named, the newest of a series, what a folder of them tells, and their
//! import without an etcd.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::history::Compression;
use crate::support::keys::{Key, sealed_for};
use crate::support::tiny_backup::{
    forked_snapshot, object, plain_snapshot, put_events, small_database, snapshot_of_cluster, zip,
};
use crate::support::{copy_fixture, deltafold, fixtures_dir, run_json, scratch, succeed};
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder of snapshot files.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Folder(scratch::folder().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Runs a command on files of this folder. Returns the exit code and the JSON.
    fn run(&self, command: &str, pattern: &str, args: &[&str]) -> (i32, Value) {
        run(command, "--snapshot", &self.text(pattern), args)
    }

    fn succeeds(&self, command: &str, pattern: &str, args: &[&str]) -> Value {
        let (code, json) = self.run(command, pattern, args);
        assert_eq!(code, 0, "{command} {pattern}: {json:#}");
        json
    }

    /// The revision that `get` reads.
    fn revision(&self, pattern: &str, args: &[&str]) -> i64 {
        let args = [&["/registry/a"], args].concat();
        let got = self.succeeds("get", pattern, &args);
        got["revision"].as_i64().unwrap()
    }

    /// Asserts that `get` fails, with these words in its message.
    fn refuses(&self, pattern: &str, args: &[&str], code: i32, reason: &str, words: &[&str]) {
        let args = [&["/registry/a"], args].concat();
        let refused = self.run("get", pattern, &args);
        is_refused(refused, code, reason, words);
    }

    /// Imports a series into `to` of this folder.
    fn import(&self, pattern: &str, to: &str, args: &[&str]) -> (i32, Value) {
        let to = self.text(to);
        let args = [&["--to", &to], args].concat();
        run("copy", "--from-snapshots", &self.text(pattern), &args)
    }
}

fn run(command: &str, flag: &str, path: &str, args: &[&str]) -> (i32, Value) {
    let mut c = deltafold();
    c.args([command, "--output", "json", flag, path]).args(args);
    let (code, json, stderr) = run_json(&mut c);
    eprintln!("{command} {path} {args:?}: {code} {stderr}");
    (code, json)
}

fn is_refused((code, json): (i32, Value), expected: i32, reason: &str, words: &[&str]) {
    assert_eq!(
        (code, &json["reason"]),
        (expected, &json!(reason)),
        "{json:#}"
    );
    let message = json["message"].as_str().unwrap();
    for word in words {
        assert!(message.contains(word), "{word}: {message}");
    }
}

/// Asserts how many files were copied, kept, skipped and failed.
fn counts(imported: &Value) -> [i64; 4] {
    ["copied", "kept", "skipped", "failed"].map(|field| imported[field].as_i64().unwrap())
}

/// The times of the last nights, from the oldest one on.
fn nights(n: i64) -> Vec<DateTime<Utc>> {
    let night = |nth| Utc::now() - TimeDelta::days(n - nth) + TimeDelta::hours(12);
    (0..n).map(night).collect()
}

#[test]
fn a_file_that_is_named_is_taken_whatever_its_name_is() {
    let folder = Folder::new();
    folder.put("any name", &plain_snapshot(50));
    assert_eq!(folder.revision("any name", &[]), 50);
    assert_eq!(folder.revision("any name", &["--revision", "45"]), 45);
    folder.refuses("any name", &["--revision", "51"], 66, "OutOfRange", &["50"]);
    folder.refuses(
        "any name",
        &["--time", "1 day ago"],
        64,
        "Usage",
        &["no times"],
    );
    folder.refuses(
        "any name",
        &["--timeline", "main"],
        64,
        "Usage",
        &["no timelines"],
    );
    let verified = folder.succeeds("verify", "any name", &[]);
    assert_eq!(verified["verdict"], "Verified");
    assert_eq!(
        (&verified["revision"], &verified["has_checksum"]),
        (&json!(50), &json!(true))
    );
    assert!(verified["hash_kv"].is_u64(), "{verified:#}");
    let folded = folder.succeeds("verify", "any name", &["--level", "fold"]);
    assert_eq!(folded["hash_kv"], verified["hash_kv"]);
    let late = folder.run("verify", "any name", &["--max-age", "1h"]);
    is_refused(late, 64, "Usage", &["tells no time"]);
    // Without its hash, it is a copy of member/snap/db.
    folder.put("db", &small_database(4096));
    let verified = folder.succeeds("verify", "db", &[]);
    assert_eq!(verified["has_checksum"], false);
    assert!(
        verified["warnings"][0]
            .as_str()
            .unwrap()
            .contains("SHA-256")
    );
    // A link is the user's word, too.
    symlink("any name", folder.path("link")).unwrap();
    assert_eq!(folder.revision("link", &[]), 50);
    folder.refuses("missing", &[], 66, "NoSnapshots", &["missing"]);
    for args in [
        &["--endpoints", "http://127.0.0.1:1"][..],
        &["--timeline", "main"],
        &["--revision", "40"],
        &["--all-chains"],
    ] {
        let refused = folder.run("verify", "any name", args);
        is_refused(refused, 64, "Usage", &[args[0]]);
    }
    // Nothing is written beside it.
    assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), 3);
}

#[test]
fn the_newest_of_a_series_is_that_of_the_time_in_its_name() {
    for form in [
        "db-%F_%H-%M",
        "etcd-%F.db",
        "snapshot-%Y%m%d%H%M.db",
        "etcd-snapshot-a-%s",
        "%FT%TZ-000001/etcd.backup.gz",
        "s_%F_%H%M%S.db",
    ] {
        let folder = Folder::new();
        let nights = nights(3);
        // Those of the files tell nothing: they were copied.
        for (night, last) in nights.iter().zip([41, 42, 43]).rev() {
            let name = night.format(form).to_string();
            let content = plain_snapshot(last);
            let content = match form.ends_with(".gz") {
                true => Compression::Gzip.pack(&content),
                false => content,
            };
            folder.put(&name, &content);
        }
        let pattern = if form.contains('/') {
            "*/etcd.backup.gz"
        } else {
            "*"
        };
        assert_eq!(folder.revision(pattern, &[]), 43, "{form}");
        let between = nights[1] + TimeDelta::hours(11);
        let revision = folder.revision(pattern, &["--time", &between.to_rfc3339()]);
        // A date is its last second.
        assert!(
            revision == 42 || form == "etcd-%F.db" && revision == 41,
            "{form}: {revision}"
        );
        let early = ["--time", "2020-01-01T00:00:00Z"];
        folder.refuses(pattern, &early, 66, "OutOfRange", &["the oldest one"]);
        let warnings = folder.succeeds("get", pattern, &["/registry/a"])["warnings"].to_string();
        let has_zone = form.contains("%s") || form.contains('Z');
        assert_eq!(warnings.contains("no zone: UTC"), !has_zone, "{warnings}");
        // Two times have two files.
        let from = nights[1].to_rfc3339();
        let diff = folder.succeeds("diff", pattern, &["--from", &from]);
        assert_eq!(diff["to_revision"], 43);
        let age = folder.succeeds("verify", pattern, &["--max-age", "26h"]);
        assert!(age["age_seconds"].as_f64().unwrap() < 86_400.0, "{age:#}");
    }
}

#[test]
fn what_has_no_order_or_no_end_is_refused() {
    let folder = Folder::new();
    folder.put("a.db", &plain_snapshot(41));
    folder.put("b.db", &plain_snapshot(42));
    folder.refuses("*.db", &[], 64, "Usage", &["a.db", "b.db", "no time"]);
    folder.refuses("c-*", &[], 66, "NoSnapshots", &["c-*", "list"]);
    folder.refuses("no/c-*", &[], 66, "NoSnapshots", &["no file or folder"]);
    folder.refuses("*/b.db", &[], 64, "Usage", &["last part"]);
    let future = (Utc::now() + TimeDelta::days(400))
        .format("c-%F.db")
        .to_string();
    folder.put(&future, &plain_snapshot(50));
    folder.refuses("c-*", &[], 66, "NoSnapshots", &["in the future"]);
    folder.put(
        &Utc::now().format("c-%F.db").to_string(),
        &plain_snapshot(43),
    );
    let got = folder.succeeds("get", "c-*", &["/registry/a"]);
    assert_eq!(got["revision"], 43);
    assert!(got["warnings"].to_string().contains(&future), "{got:#}");
}

#[test]
fn a_damaged_newest_file_is_told_with_the_one_before() {
    let folder = Folder::new();
    let at = Utc::now().timestamp();
    let name = |hour: i64| format!("etcd-snapshot-a-{}", at - hour * 3600);
    folder.put(&name(2), &plain_snapshot(41));
    let mut damaged = plain_snapshot(42);
    damaged[6000] ^= 1;
    folder.put(&name(1), &damaged);
    folder.refuses(
        "etcd-*",
        &[],
        65,
        "CorruptSnapshot",
        &["SHA-256", &format!("--snapshot {}", folder.text(&name(2)))],
    );
    let failed = folder.run("verify", "etcd-*", &["--max-age", "26h"]);
    is_refused(failed, 65, "CorruptSnapshot", &[&name(1)]);
    // It hides no other in a listing.
    let (code, list) = run(
        "list",
        "--store",
        folder.0.path().to_str().unwrap(),
        &["--deep"],
    );
    assert_eq!(code, 0);
    let files = list["files"].as_array().unwrap();
    let readable: Vec<&Value> = files.iter().map(|f| &f["readable"]).collect();
    assert_eq!(readable, [&json!(true), &json!(false)], "{list:#}");
    assert_eq!(
        (&files[0]["revision"], &files[0]["live_keys"]),
        (&json!(41), &json!(3))
    );
    // An old newest file is stale.
    fs::remove_file(folder.path(&name(1))).unwrap();
    let stale = folder.run("verify", "etcd-*", &["--max-age", "1h"]);
    assert_eq!(stale.1["revision"], 41, "{:#}", stale.1);
    is_refused(stale, 75, "Stale", &["2h"]);
}

#[test]
fn the_file_of_a_pattern_is_compared_with_an_older_one() {
    let at = Utc::now().timestamp();
    let with = |older: &[u8], newest: &[u8], apart: i64| {
        let folder = Folder::new();
        folder.put(&format!("etcd-snapshot-a-{}", at - apart), older);
        folder.put(&format!("etcd-snapshot-b-{at}"), newest);
        folder
    };
    let named =
        |folder: &Folder| assert_eq!(folder.revision(&format!("etcd-snapshot-b-{at}"), &[]), 42);
    for (older, newest) in [
        (forked_snapshot(41, 30), plain_snapshot(42)),
        (plain_snapshot(43), plain_snapshot(42)),
        (
            snapshot_of_cluster(41, "one"),
            snapshot_of_cluster(42, "two"),
        ),
    ] {
        let folder = with(&older, &newest, 3600);
        let both = [
            &*format!("etcd-snapshot-a-{}", at - 3600),
            &*format!("etcd-snapshot-b-{at}"),
        ];
        folder.refuses("etcd-snapshot-*", &[], 65, "HistoryMismatch", &both);
        let data = folder.text("data");
        let restored = folder.run("restore", "etcd-snapshot-*", &["--data-dir", &data]);
        is_refused(restored, 65, "HistoryMismatch", &both);
        assert!(!folder.path("data").exists());
        named(&folder);
        // Servers of one cluster save in one second.
        let folder = with(&older, &newest, 60);
        assert_eq!(folder.revision("etcd-snapshot-*", &[]), 42);
    }
    let same = with(
        &snapshot_of_cluster(41, "one"),
        &snapshot_of_cluster(42, "one"),
        3600,
    );
    let got = same.succeeds("get", "etcd-snapshot-*", &["/registry/a"]);
    assert!(
        !got["warnings"].to_string().contains("in common"),
        "{got:#}"
    );
}

#[test]
fn with_an_identity_only_encrypted_files_are_read() {
    let folder = Folder::new();
    let keys = Key::new();
    let at = Utc::now().timestamp();
    let (sealed, plain) = (
        format!("e-{}.db.age", at - 7200),
        format!("e-{}.db.age", at - 3600),
    );
    folder.put(&sealed, &sealed_for(&[&keys], &plain_snapshot(41)));
    folder.put(&plain, &plain_snapshot(42));
    let identity = keys.file().to_str().unwrap().to_owned();
    let key = ["--age-identity", identity.as_str()];
    let allowed = [&key[..], &["--allow-plaintext"]].concat();
    assert_eq!(folder.revision("e-*", &key), 41);
    assert_eq!(folder.revision("e-*", &allowed), 42);
    folder.refuses(&plain, &key, 65, "Untrusted", &["--allow-plaintext"]);
    assert_eq!(folder.revision(&plain, &allowed), 42);
    folder.refuses(
        "e-*",
        &[&["--time", "90 minutes ago"][..]].concat(),
        77,
        "CannotDecrypt",
        &["--age-identity"],
    );
    // The import is judged by its own key.
    let recipient = keys.recipient();
    let recipient = ["--age-recipient", recipient.as_str()];
    let from = ["--from-age-identity", identity.as_str()];
    let (code, imported) = folder.import("e-*", "to", &[&recipient[..], &from].concat());
    assert_eq!(
        (code, counts(&imported)),
        (65, [1, 0, 0, 1]),
        "{imported:#}"
    );
    assert_eq!(imported["reason"], "Untrusted");
    let (code, got) = run(
        "get",
        "--store",
        &folder.text("to"),
        &[&["/registry/a"], &key[..]].concat(),
    );
    assert_eq!((code, &got["revision"]), (0, &json!(41)));
    let (code, imported) = folder.import(
        "e-*",
        "to",
        &[&recipient[..], &from, &["--allow-plaintext"]].concat(),
    );
    assert_eq!((code, counts(&imported)), (0, [1, 1, 0, 0]), "{imported:#}");
}

#[test]
fn a_folder_is_told_what_to_give() {
    let folder = Folder::new();
    let at = Utc::now().timestamp();
    folder.put(
        &format!("k3s/etcd-snapshot-server1-{at}"),
        &plain_snapshot(41),
    );
    folder.put(&format!("k3s/.metadata/etcd-snapshot-server1-{at}"), b"{}");
    folder.put(
        "kops/2026-11-20T14:00:05Z-000001/etcd.backup.gz",
        &Compression::Gzip.pack(&plain_snapshot(41)),
    );
    folder.put("kops/2026-11-20T14:00:05Z-000001/_etcd_backup.meta", b"{}");
    folder.put(
        "tmp/kubeadm-backup-etcd-2026-11-20-14-00-00/etcd/member/snap/db",
        &small_database(4096),
    );
    folder.put("nothing/token", b"secret");
    folder.put("chain/v2/x", b"");
    for (name, word) in [
        ("k3s", "/k3s/etcd-snapshot-server1-*"),
        ("kops", "/kops/*/etcd.backup.gz"),
        ("tmp", "/etcd/member/snap/db"),
        (
            "tmp/kubeadm-backup-etcd-2026-11-20-14-00-00/etcd",
            "Stop that etcd first",
        ),
        ("nothing", "none of its files"),
        ("chain", "--store"),
    ] {
        folder.refuses(name, &[], 66, "NoSnapshots", &[word]);
    }
    let url = format!("file://{}", folder.text("k3s"));
    is_refused(
        run("get", "--snapshot", &url, &["/registry/a"]),
        66,
        "NoSnapshots",
        &["etcd-snapshot-server1-*"],
    );
    is_refused(
        folder.import("k3s", "to", &[]),
        66,
        "NoSnapshots",
        &["--from-snapshots", "/k3s/etcd-snapshot-server1-*"],
    );
    // As a store: `list` shows it, and everything else says both ways.
    for (name, pattern) in [
        ("k3s", "/k3s/etcd-snapshot-server1-*"),
        ("kops", "/kops/*/etcd.backup.gz"),
    ] {
        let store = folder.text(name);
        let (code, list) = run("list", "--store", &store, &[]);
        assert_eq!(
            (code, list["files"].as_array().unwrap().len()),
            (0, 1),
            "{list:#}"
        );
        assert!(list["files"][0]["created"].is_string() && list["files"][0]["readable"].is_null());
        let next = list["next"].as_str().unwrap();
        assert!(next.contains(pattern), "{next}");
        let shown = std::process::Command::new("bash")
            .args(["-c", &format!("printf '%s\\n' {next}")])
            .output()
            .unwrap();
        let words = String::from_utf8(shown.stdout).unwrap();
        let words: Vec<&str> = words.lines().collect();
        assert!(words[3].ends_with(pattern), "{words:?}");
        for (command, args) in [
            ("get", &["/registry/a"][..]),
            ("gc", &["--policy", "limit"]),
            ("verify", &[]),
            ("history", &["/registry/a"]),
            ("compact", &[]),
            ("restore", &["--data-dir", "/nowhere/d"]),
        ] {
            let refused = run(command, "--store", &store, args);
            is_refused(
                refused,
                66,
                "NoSnapshots",
                &["--snapshot", "copy --from-snapshots", pattern],
            );
        }
        let (code, status) = run("status", "--store", &store, &[]);
        assert_eq!((code, &status["reason"]), (66, &json!("NoSnapshots")));
        assert!(
            status["message"]
                .as_str()
                .unwrap()
                .contains("--from-snapshots"),
            "{status:#}"
        );
    }
}

#[test]
fn a_prefix_with_v2_is_a_chain_whatever_is_beside_it() {
    let store = copy_fixture("kubernetes");
    let path = store.path().to_str().unwrap();
    let (_, before) = run("list", "--store", path, &[]);
    fs::write(store.path().join("x.db"), "").unwrap();
    fs::write(
        store.path().join("etcd-snapshot-a-1763600405"),
        plain_snapshot(41),
    )
    .unwrap();
    let (code, after) = run("list", "--store", path, &[]);
    assert_eq!((code, &after["snapshots"]), (0, &before["snapshots"]));
    for (command, args) in [
        ("status", &["--max-age", "100000d"][..]),
        ("gc", &["--policy", "limit"]),
        ("verify", &["--no-record"]),
    ] {
        assert_eq!(run(command, "--store", path, args).0, 0, "{command}");
    }
}

#[test]
fn huge_and_strange_files_are_damaged_and_hang_nothing() {
    let folder = Folder::new();
    for (name, bytes) in [("huge.db", 1 << 42), ("hashed.db", (1 << 42) + 32)] {
        let file = File::create(folder.path(name)).unwrap();
        file.set_len(bytes).unwrap();
    }
    let mut head = small_database(4096);
    head.truncate(8192);
    for (name, bytes) in [
        ("etcd-snapshot-n-1763600405", 1u64 << 42),
        ("etcd-snapshot-n-1763600406", (1 << 42) + 32),
    ] {
        let mut bolt = File::create(folder.path(name)).unwrap();
        bolt.write_all(&head).unwrap();
        bolt.set_len(bytes).unwrap();
    }
    folder.put("empty.db", b"");
    let events = serde_json::to_vec(&put_events(41..=41)).unwrap();
    folder.put(
        "delta-2026-11-20.db.gz",
        &object(&events, Compression::Gzip),
    );
    folder.put("of-sqlite.db", b"SQLite format 3\0");
    folder.put("notes.db", b"these are notes");
    let pipe = folder.path("pipe.db");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    symlink("empty.db", folder.path("link.db")).unwrap();
    let (code, list) = run(
        "list",
        "--store",
        folder.0.path().to_str().unwrap(),
        &["--deep"],
    );
    // Neither the pipe nor the link is a file of the folder.
    assert_eq!(
        (code, list["files"].as_array().unwrap().len()),
        (0, 8),
        "{list:#}"
    );
    for file in list["files"].as_array().unwrap() {
        assert_eq!(file["readable"], false, "{file:#}");
    }
    folder.refuses("pipe.db", &[], 64, "Usage", &["not a regular file"]);
    folder.refuses("of-sqlite.db", &[], 65, "CorruptSnapshot", &["SQLite"]);
    folder.refuses(
        "delta-2026-11-20.db.gz",
        &[],
        65,
        "CorruptSnapshot",
        &["delta snapshot"],
    );
    folder.refuses("notes.db", &[], 65, "CorruptSnapshot", &["it is a text"]);
}

/// A zip archive of 500,000 entries costs no memory.
#[test]
fn an_archive_of_very_many_files_is_refused_without_reading_their_names() {
    let folder = Folder::new();
    let mut archive =
        zip::ZipWriter::new(File::create(folder.path("etcd-snapshot-n-1763600405.zip")).unwrap());
    let options = zip::write::SimpleFileOptions::default();
    for n in 0..500_000 {
        archive.start_file(format!("{n:0>100}"), options).unwrap();
    }
    archive.finish().unwrap();
    let mut c = deltafold();
    c.args(["list", "--deep", "--output", "json", "--store"])
        .arg(folder.0.path());
    let mut child = c.stdout(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak_kib = 0;
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse().ok());
        peak_kib = peak.unwrap_or(peak_kib);
    }
    let json: Value = serde_json::from_reader(child.stdout.unwrap()).unwrap();
    assert_eq!(json["files"][0]["reason"], "CorruptSnapshot", "{json:#}");
    assert!((1..64 << 10).contains(&peak_kib), "{peak_kib} KiB");
}

#[test]
fn files_become_fulls_in_order_once() {
    let folder = Folder::new();
    let at = Utc::now().timestamp();
    let name = |hour: i64| format!("k3s/etcd-snapshot-a-{}", at - hour * 3600);
    for (hour, last) in [(5, 41), (4, 42), (3, 42)] {
        folder.put(&name(hour), &plain_snapshot(last));
    }
    // A dry run opens what it would add.
    fs::create_dir(folder.path("to")).unwrap();
    let (code, dry) = folder.import("k3s/etcd-*", "to", &["--dry-run"]);
    assert_eq!((code, counts(&dry)), (0, [3, 0, 0, 0]));
    assert!(
        dry["objects"][0]["target_path"]
            .as_str()
            .unwrap()
            .starts_with("v2/Full-00000000-00000041-")
    );
    assert!(!folder.path("to/v2").exists());
    // Equal revisions are added: an idle cluster stays fresh.
    let (code, imported) = folder.import("k3s/etcd-*", "to", &[]);
    assert_eq!((code, counts(&imported)), (0, [3, 0, 0, 0]), "{imported:#}");
    let store = folder.text("to");
    let (_, list) = run("list", "--store", &store, &[]);
    let created: Vec<&Value> = list["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| &s["created"])
        .collect();
    let expected =
        [5, 4, 3].map(|hour| json!(DateTime::from_timestamp(at - hour * 3600, 0).unwrap()));
    assert_eq!(created, expected.iter().collect::<Vec<_>>());
    assert_eq!(list["timelines"].as_array().unwrap().len(), 1, "{list:#}");
    // What is there is not opened, and what is older than the newest full is skipped and counted.
    for hour in [5, 4, 3] {
        folder.put(&name(hour), b"overwritten");
    }
    folder.put(
        &format!("k3s/etcd-snapshot-a-{}", at - 4 * 3600 - 1),
        &plain_snapshot(41),
    );
    folder.put(&name(2), &plain_snapshot(44));
    let (code, again) = folder.import("k3s/etcd-*", "to", &[]);
    assert_eq!((code, counts(&again)), (0, [1, 3, 1, 0]), "{again:#}");
    // Of one second the first sound one counts.
    let mut damaged = plain_snapshot(46);
    damaged[6000] ^= 1;
    folder.put(&name(1), &damaged);
    folder.put(&name(1).replace("-a-", "-b-"), &plain_snapshot(45));
    folder.put(&name(1).replace("-a-", "-c-"), &plain_snapshot(45));
    let (code, third) = folder.import("k3s/etcd-*", "to", &[]);
    assert_eq!((code, counts(&third)), (65, [1, 5, 1, 1]), "{third:#}");
    let (code, got) = run("get", "--store", &store, &["/registry/a"]);
    assert_eq!((code, &got["revision"]), (0, &json!(45)));
    let (code, got) = run(
        "get",
        "--store",
        &store,
        &["/registry/a", "--time", "150 minutes ago"],
    );
    assert_eq!((code, &got["revision"]), (0, &json!(42)));
    let (code, status) = run("status", "--store", &store, &[]);
    assert_eq!(
        (code, &status["verdict"]),
        (0, &json!("Healthy")),
        "{status:#}"
    );
    assert_eq!(run("verify", "--store", &store, &["--all-chains"]).0, 0);
    // Files without a time cannot be named.
    folder.put("other/x.db", &plain_snapshot(41));
    is_refused(
        folder.import("other/*.db", "to", &[]),
        64,
        "Usage",
        &["x.db"],
    );
    // A prefix with deltas goes on by itself.
    let chain = copy_fixture("kubernetes");
    let to = chain.path().to_str().unwrap();
    let refused = run(
        "copy",
        "--from-snapshots",
        &folder.text("k3s/etcd-*"),
        &["--to", to],
    );
    is_refused(refused, 64, "Usage", &["deltas"]);
}

#[test]
fn a_day_is_imported_when_it_has_ended() {
    let folder = Folder::new();
    let name = |days: i64| {
        (Utc::now() + TimeDelta::days(days))
            .format("f/etcd-%F.db")
            .to_string()
    };
    folder.put(&name(-1), &plain_snapshot(41));
    folder.put(&name(0), &plain_snapshot(42));
    folder.put(&name(9), &plain_snapshot(43));
    let (code, imported) = folder.import("f/etcd-*", "to", &[]);
    assert_eq!((code, counts(&imported)), (0, [1, 0, 2, 0]), "{imported:#}");
    for object in &imported["objects"].as_array().unwrap()[1..] {
        assert_eq!(object["reason"], "InTheFuture", "{object:#}");
    }
    assert_eq!(folder.revision("f/etcd-*", &[]), 42);
}

#[test]
fn a_set_back_begins_another_history_and_another_cluster_is_refused() {
    let at = Utc::now().timestamp();
    let imported = |files: &[Vec<u8>], args: &[&str]| {
        let folder = Folder::new();
        for (hour, content) in (0..).zip(files) {
            folder.put(&format!("f/e-{}", at + (hour - 9) * 3600), content);
        }
        let result = folder.import("f/e-*", "to", args);
        (folder, result)
    };
    for set_back in [forked_snapshot(43, 30), plain_snapshot(40)] {
        let last = set_back.clone();
        let (folder, (code, json)) = imported(
            &[plain_snapshot(41), plain_snapshot(42), set_back, last],
            &[],
        );
        assert_eq!((code, counts(&json)), (0, [4, 0, 0, 0]), "{json:#}");
        let (_, list) = run("list", "--store", &folder.text("to"), &["--deep"]);
        assert_eq!(list["timelines"].as_array().unwrap().len(), 2, "{list:#}");
        let before =
            (DateTime::from_timestamp(at, 0).unwrap() - TimeDelta::minutes(450)).to_rfc3339();
        let (code, got) = run(
            "get",
            "--store",
            &folder.text("to"),
            &["/registry/a", "--or-newest", "--time", &before],
        );
        assert_eq!((code, &got["revision"]), (0, &json!(42)));
        assert_eq!(
            run("verify", "--store", &folder.text("to"), &["--all-chains"]).0,
            0
        );
    }
    let two = [
        snapshot_of_cluster(41, "one"),
        snapshot_of_cluster(42, "two"),
    ];
    let (folder, refused) = imported(&two, &[]);
    is_refused(refused, 65, "OtherCluster", &["one", "two", "--take-over"]);
    let store = folder.text("to");
    let (code, list) = run("list", "--store", &store, &[]);
    assert_eq!(
        (code, &list["identity"]["kube_system_uid"]),
        (0, &json!("one")),
        "{list:#}"
    );
    assert_eq!(list["latest_revision"], 41);
    // The record tells it even if the newest full cannot be read.
    let full = fs::read_dir(folder.path("to/v2"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    fs::write(full, b"damaged").unwrap();
    is_refused(
        folder.import("f/e-*", "to", &[]),
        65,
        "OtherCluster",
        &["one", "two"],
    );
    let (code, taken) = folder.import("f/e-*", "to", &["--take-over"]);
    assert_eq!((code, counts(&taken)), (0, [1, 1, 0, 0]), "{taken:#}");
    let (_, list) = run("list", "--store", &store, &[]);
    assert_eq!(list["identity"]["kube_system_uid"], "two", "{list:#}");
    assert_eq!(list["timelines"].as_array().unwrap().len(), 2, "{list:#}");
}

/// Writes a plain snapshot file of the real cluster at a revision.
fn write_file(file: &Path, revision: &str) {
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--revision", revision]);
    c.arg("--store").arg(fixtures_dir().join("kubernetes"));
    assert_eq!(run_json(c.arg("--to-snapshot").arg(file)).0, 0);
}

/// From the import on, `history` and `deleted` know the nights between.
#[test]
fn imported_nights_have_a_history() {
    let folder = Folder::new();
    fs::create_dir(folder.path("f")).unwrap();
    for (name, revision) in [("020000", "560"), ("030000", "610"), ("040000", "628")] {
        write_file(
            &folder.path(&format!("f/etcd-2026-11-21-{name}.db")),
            revision,
        );
    }
    let (code, imported) = folder.import("f/etcd-*", "to", &[]);
    assert_eq!((code, counts(&imported)), (0, [3, 0, 0, 0]), "{imported:#}");
    let store = folder.text("to");
    let (_, list) = run("list", "--store", &store, &[]);
    assert!(list["identity"]["kube_system_uid"].is_string(), "{list:#}");
    for args in [&[][..], &["--since", "560"]] {
        let (code, result) = run("deleted", "--store", &store, args);
        assert_eq!(code, 0, "{result:#}");
        let deleted = result["deleted"].as_array().unwrap();
        let found = deleted
            .iter()
            .find(|d| d["object"] == "configmap/shop/cm-3")
            .unwrap();
        assert_eq!(found["revision"], 598, "{args:?}: {found:#}");
        assert_eq!(found["not_after"], "2026-11-21T03:00:00Z", "{found:#}");
    }
    let (code, history) = run("history", "--store", &store, &["configmap/shop/cm-3"]);
    assert_eq!(code, 0, "{history:#}");
    let (code, status) = run("status", "--store", &store, &["--max-age", "100000d"]);
    assert_eq!((code, &status["problems"]), (0, &json!([])), "{status:#}");
    let gone = ["--policy", "limit", "--limit", "1"];
    let (code, gc) = run("gc", "--store", &store, &gone);
    assert_eq!((code, &gc["status"]), (0, &json!("NothingToDo")), "{gc:#}");
    assert!(gc.to_string().contains("NoRecentFull"), "{gc:#}");
}

/// Two files that share no store, as two nights of etcdctl.
#[test]
fn two_files_are_compared() {
    let store = copy_fixture("kubernetes");
    let folder = scratch::folder().unwrap();
    let file = |revision: &str| {
        let file = folder.path().join(format!("{revision}.db"));
        write_file(&file, revision);
        file
    };
    let (old, new) = (file("300"), file("628"));
    let diff = |args: &[&OsStr]| {
        let mut c = deltafold();
        c.args(["diff", "--output", "json"]).args(args);
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
    let all: [&OsStr; 2] = ["--prefix".as_ref(), "".as_ref()];
    let of_flags = [
        "--from-snapshot".as_ref(),
        old.as_ref(),
        "--snapshot".as_ref(),
        new.as_ref(),
    ];
    let of_store = [
        "--from".as_ref(),
        "300".as_ref(),
        "--store".as_ref(),
        store.path().as_ref(),
    ];
    let of_store = diff(&[&all[..], &of_store].concat());
    assert!(of_store.1.len() > 50, "{of_store:?}");
    assert_eq!(diff(&[&all[..], &of_flags].concat()), of_store);
    assert_eq!(
        diff(&[&all[..], &[old.as_ref(), new.as_ref()]].concat()),
        of_store
    );
}

#[test]
fn packed_files_are_read_whatever_their_names_are() {
    let folder = Folder::new();
    folder.put("on-demand-node-1-1763600405.zip", &zip(&plain_snapshot(42)));
    folder.put("gz", &Compression::Gzip.pack(&plain_snapshot(43)));
    assert_eq!(folder.revision("on-demand-node-1-1763600405.zip", &[]), 42);
    assert_eq!(folder.revision("gz", &[]), 43);
}
