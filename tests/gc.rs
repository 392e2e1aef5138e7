//! Collecting garbage in folders and on real servers: what must be restorable is restored as before, what goes
//! can be brought back, what is locked stays, and nothing that is not ours is touched.

mod support;

use chrono::{TimeDelta, Utc};
use deltafold::store::{Mode, Retention};
use object_store::ObjectStoreExt;
use object_store::path::Path as ObjectPath;
use object_store::signer::Method;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};
use support::buckets::{BASE, Bucket, FIXTURE, LAST, Objects, T0, objects_of};
use support::denying::denying;
use support::minio::Minio;
use support::s3::Kind;
use support::versitygw::Versitygw;
use support::{copy_fixture, deltafold, fixture_names, fixtures_dir, run_json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

fn now() -> i64 {
    Utc::now().timestamp()
}

const HOUR: i64 = 3600;

/// Ten hours of the fixture's history: (name, hours ago).
struct Past {
    bucket: Bucket,
    now: i64,
}

impl Past {
    /// Fulls at 746 (10 h), 1499 (7 h), 2100 (1 h), deltas between them, and one to 2252 (now).
    fn new() -> Self {
        let made = Bucket::with_base();
        made.delta(BASE + 1, 1100, 1);
        made.delta(1101, 1499, 2);
        made.delta(1500, 1800, 3);
        made.delta(1801, 2100, 4);
        made.delta(2101, LAST, 5);
        let full = |to: i64| {
            let folded = Bucket::of(&made.objects());
            let to = to.to_string();
            let done = folded.compact(&["--revision", &to, "--compression", "gzip"]);
            let name = done["snapshot"].as_str().unwrap();
            fs::read(folded.path().join("v2").join(name)).unwrap()
        };
        // Something can still be written after it.
        let now = now() - 60;
        let old = made.objects();
        let bytes = |start: i64| {
            let prefix = format!("v2/Incr-{start:08}-");
            old.iter()
                .find(|o| o.0.starts_with(&prefix))
                .unwrap()
                .1
                .clone()
        };
        let base = old.iter().find(|o| o.0.contains("Full")).unwrap().1;
        let mut objects = Objects::new();
        for (last, ago, content) in [
            (BASE, 10, base.clone()),
            (1499, 7, full(1499)),
            (2100, 1, full(2100)),
        ] {
            let name = format!("v2/Full-00000000-{last:08}-{}.gz", now - ago * HOUR);
            objects.insert(name, content);
        }
        for (start, last, ago) in [
            (BASE + 1, 1100, 9),
            (1101, 1499, 8),
            (1500, 1800, 6),
            (1801, 2100, 3),
            (2101, LAST, 0),
        ] {
            let created = now - ago * HOUR;
            let name = format!("v2/Incr-{start:08}-{last:08}-{created}.gz");
            objects.insert(name, bytes(start));
        }
        Past {
            bucket: Bucket::of(&objects),
            now,
        }
    }

    fn full(&self, last: i64, ago: i64) -> String {
        format!("v2/Full-00000000-{last:08}-{}.gz", self.now - ago * HOUR)
    }

    fn delta(&self, start: i64, last: i64, ago: i64) -> String {
        format!("v2/Incr-{start:08}-{last:08}-{}.gz", self.now - ago * HOUR)
    }
}

/// All keys at a revision.
fn state(store: &Path, revision: i64) -> Value {
    let mut c = deltafold();
    c.args(["get", "--prefix", "", "--output", "json", "--store"]);
    c.arg(store).args(["--revision", &revision.to_string()]);
    let (code, result, stderr) = run_json(&mut c);
    assert_eq!(code, 0, "{revision}: {stderr}");
    result["keys"].clone()
}

fn gc(b: &Bucket, args: &[&str]) -> Value {
    let (code, result, stderr) = b.run("gc", args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    result
}

/// Reasons by path.
fn reasons(result: &Value) -> BTreeMap<String, String> {
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    let objects = result["objects"].as_array().unwrap().iter();
    objects
        .map(|o| (text(&o["path"]), text(&o["reason"])))
        .collect()
}

fn decided(result: &Value, decision: &str) -> BTreeSet<String> {
    let objects = result["objects"].as_array().unwrap().iter();
    objects
        .filter(|o| o["decision"] == decision)
        .map(|o| o["path"].as_str().unwrap().to_owned())
        .collect()
}

/// What of a listing are snapshots.
fn snapshots(objects: &Objects) -> BTreeSet<String> {
    let is = |p: &&String| p.starts_with("v2/") || p.starts_with("v1/");
    objects.keys().filter(is).cloned().collect()
}

const NOTHING: [&str; 8] = [
    "--policy",
    "exponential",
    "--keep-hourly",
    "0",
    "--keep-daily",
    "0",
    "--keep-weekly",
    "0",
];

fn keep_nothing<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&NOTHING[..], more].concat()
}

#[test]
fn points_within_the_window_are_restored_as_before() {
    let p = Past::new();
    let b = &p.bucket;
    let points = [1800, 1801, 1950, 2100, 2101, 2200, LAST];
    let before: Vec<Value> = points.map(|r| state(b.path(), r)).to_vec();
    let objects = b.objects();
    let args = keep_nothing(&["--restorable-window", "5h"]);
    let dry = gc(b, &args);
    assert_eq!(b.objects(), objects, "a dry run");
    assert_eq!(
        (&dry["dry_run"], &dry["status"]),
        (&true.into(), &"Succeeded".into())
    );
    let gone = [
        p.full(BASE, 10),
        p.delta(BASE + 1, 1100, 9),
        p.delta(1101, 1499, 8),
    ];
    assert_eq!(decided(&dry, "Delete"), BTreeSet::from(gone.clone()));
    let told = reasons(&dry);
    for (path, reason) in [
        (p.full(BASE, 10), "BeyondPolicy"),
        (p.delta(BASE + 1, 1100, 9), "Superseded"),
        (p.full(1499, 7), "RestorableWindow"),
        (p.delta(1500, 1800, 6), "RestorableWindow"),
        (p.delta(1801, 2100, 3), "RestorableWindow"),
        (p.full(2100, 1), "NewestChain"),
        (p.delta(2101, LAST, 0), "NewestChain"),
    ] {
        assert_eq!(told[&path], reason, "{path}");
    }
    let done = gc(b, &[&args[..], &["--apply"]].concat());
    assert_eq!(decided(&done, "Delete"), BTreeSet::from(gone.clone()));
    let freed: usize = gone.iter().map(|p| objects[p].len()).sum();
    assert_eq!(done["freed_bytes"], freed);
    let left = snapshots(&b.objects());
    assert_eq!(left.len(), 5);
    assert!(gone.iter().all(|g| !left.contains(g)));
    let after: Vec<Value> = points.map(|r| state(b.path(), r)).to_vec();
    assert!(before == after, "a state within the window changed");
    assert_eq!(done["restorable_after"][0]["first_revision"], 1499);
    assert_eq!(done["restorable_before"][0]["first_revision"], BASE);
    assert_eq!(
        gc(b, &[&args[..], &["--apply"]].concat())["status"],
        "NothingToDo"
    );

    // Without a window only the newest chain is sacred.
    gc(b, &keep_nothing(&["--apply"]));
    let left = snapshots(&b.objects());
    assert_eq!(
        left,
        BTreeSet::from([p.full(2100, 1), p.delta(2101, LAST, 0)])
    );
    assert!(state(b.path(), LAST) == before[6]);
}

#[test]
fn what_goes_can_be_brought_back_until_it_is_purged() {
    let p = Past::new();
    let b = &p.bucket;
    let before = b.objects();
    let states: Vec<Value> = [800, 1499, 1700].map(|r| state(b.path(), r)).to_vec();
    let args = keep_nothing(&["--purge-after", "1d", "--apply"]);
    let done = gc(b, &args);
    let removed = decided(&done, "Remove");
    assert_eq!((removed.len(), done["freed_bytes"].as_u64()), (6, Some(0)));
    let objects = b.objects();
    for path in &removed {
        assert_eq!(objects[path], before[path]);
        assert!(objects.contains_key(&format!("{path}.exclude")), "{path}");
        let note = path.replace("v2/", "deltafold-removed/");
        let note: Value = serde_json::from_slice(&objects[&note]).unwrap();
        assert!(note["removedAt"].is_string() && note["reason"].is_string());
    }
    // The newest is served as before, the others are not restorable.
    assert!(b.run("get", &["--prefix", "", "--revision", "800"]).0 != 0);
    let again = gc(b, &args);
    assert_eq!(again["status"], "NothingToDo");
    assert_eq!(reasons(&again)[&p.full(BASE, 10)], "Removed");

    // A full with what stands on it.
    let name = p.full(BASE, 10).replace("v2/", "");
    let (code, back, stderr) = b.run("undelete", &[&name]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(back["snapshots"].as_array().unwrap().len(), 3, "{back}");
    assert!(state(b.path(), 800) == states[0] && state(b.path(), 1499) == states[1]);
    // A pin keeps it from going again.
    assert_eq!(b.run("pin", &[&name, "--reason", "a test"]).0, 0);
    let pinned = gc(b, &args);
    assert_eq!(decided(&pinned, "Remove"), BTreeSet::new());
    assert_eq!(reasons(&pinned)[&p.delta(1101, 1499, 8)], "Pinned");
    assert_eq!(b.run("pin", &[&name, "--unpin"]).0, 0);
    assert_eq!(decided(&gc(b, &args), "Remove").len(), 3);
    let (code, back, _) = b.run("undelete", &["--all"]);
    assert_eq!((code, back["snapshots"].as_array().unwrap().len()), (0, 6));
    let objects = b.objects();
    assert_eq!(snapshots(&objects), snapshots(&before));
    assert!(before.iter().all(|(path, bytes)| objects[path] == *bytes));
    assert!(!objects.keys().any(|k| k.contains("deltafold-removed")));

    // Purged when its time has come, with its notes.
    gc(b, &args);
    let at_once = keep_nothing(&["--purge-after", "0s", "--apply"]);
    let purged = gc(b, &at_once);
    assert_eq!(reasons(&purged)[&p.full(BASE, 10)], "RemovedLongAgo");
    let left = snapshots(&b.objects());
    assert_eq!(
        left,
        BTreeSet::from([p.full(2100, 1), p.delta(2101, LAST, 0)])
    );
    let names: Vec<String> = b.objects().into_keys().collect();
    let ours = |n: &&String| !n.starts_with("v2/") && !n.starts_with("deltafold-locks/");
    assert_eq!(names.iter().filter(ours).count(), 0, "{names:?}");
    let (code, _, stderr) = b.run("undelete", &[name.as_str()]);
    assert!(code == 66 && stderr.contains("purged"), "{stderr}");
}

#[test]
fn a_note_of_an_earlier_removal_does_not_shorten_the_time_to_bring_it_back() {
    let p = Past::new();
    let b = &p.bucket;
    // Somebody took the mark away and left the note.
    let path = p.full(BASE, 10);
    let note = path.replace("v2/", "deltafold-removed/");
    b.put(
        &note,
        br#"{"removedAt":"2020-01-01T00:00:00Z","reason":"BeyondPolicy"}"#,
    );
    let old = SystemTime::now() - Duration::from_secs(3 * 86_400);
    let file = fs::File::options()
        .write(true)
        .open(b.path().join(&note))
        .unwrap();
    file.set_modified(old).unwrap();
    let args = keep_nothing(&["--purge-after", "1d", "--staging-age", "9d", "--apply"]);
    assert!(decided(&gc(b, &args), "Remove").contains(&path));
    let again = gc(b, &args);
    assert_eq!(reasons(&again)[&path], "Removed");
    assert!(b.objects().contains_key(&path));
}

#[test]
fn what_others_excluded_is_no_base_and_goes_with_the_policy() {
    let p = Past::new();
    let b = &p.bucket;
    // The newest full is bad: what it has superseded is needed again.
    let bad = p.full(2100, 1);
    b.put(&format!("{bad}.exclude"), b"");
    let told = reasons(&gc(b, &keep_nothing(&[])));
    assert_eq!(told[&p.full(1499, 7)], "NewestChain");
    assert_eq!(told[&p.delta(1801, 2100, 3)], "NewestChain");
    assert_eq!(told[&bad], "ExcludedBeyondPolicy");
    let usual = reasons(&gc(b, &["--policy", "exponential"]));
    assert_eq!(usual[&bad], "Excluded");
}

#[test]
fn an_old_layout_is_kept_and_goes_by_folders() {
    let p = Past::new();
    let b = &p.bucket;
    let folder = fixtures_dir().join(FIXTURE).join("v2");
    let mut old = BTreeMap::new();
    for (days, shift) in [(90, 0), (2, 1)] {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if name.contains("-00001500-") {
                continue;
            }
            let seconds: i64 = name
                .split('-')
                .nth(3)
                .unwrap()
                .trim_end_matches(".gz")
                .parse()
                .unwrap();
            let created = p.now - days * 86_400 + (seconds - T0);
            let name = name.replace(&seconds.to_string(), &created.to_string());
            let backup = p.now - days * 86_400 + shift;
            let at = format!("v1/Backup-{backup}/{name}");
            b.put(&at, &fs::read(&path).unwrap());
            old.entry(days).or_insert_with(Vec::new).push(at);
        }
    }
    let told = reasons(&gc(b, &["--policy", "exponential", "--apply"]));
    let left = snapshots(&b.objects());
    // One history in both layouts: the fulls of two days ago and of today.
    for path in &old[&2] {
        assert!(left.contains(path), "{path} {}", told[path]);
    }
    for path in &old[&90] {
        assert!(!left.contains(path), "{path} {}", told[path]);
    }
    assert_eq!(
        told[old[&2].iter().find(|p| p.contains("Incr")).unwrap()],
        "V1Backup"
    );
}

#[test]
fn what_is_left_behind_goes_and_what_is_not_ours_stays() {
    let p = Past::new();
    let b = &p.bucket;
    let ours = [
        "deltafold-timelines/Full-00000000-00000001-1700000000.gz",
        "deltafold-pins/Full-00000000-00000001-1700000000.gz",
        "deltafold-removed/Incr-00000001-00000002-1700000000",
        "v2/Full-00000000-00000001-1700000000.gz.exclude",
        "deltafold-staging/Full-00000000-00000009-100.gz.0000000000000abc.17.99.0000000000000003",
        // As object_store leaves it where it is killed.
        "deltafold-staging/Full-00000000-00000009-100.gz.0000000000000abc.17.99.0000000000000004#1",
    ];
    let foreign = [
        "v2/notes.txt",
        "v2/notes.txt.exclude",
        "v2/sub/Full-00000000-00000001-1700000000.gz",
        "v1/Full-00000000-00000001-1700000000.gz",
        "deltafold-pins/notes.txt",
        "deltafold-staging/notes.txt",
        "deltafold-other/thing",
        "README.md",
        "v3/Full-00000000-00000001-1700000000.gz",
    ];
    for path in ours.iter().chain(&foreign) {
        b.put(path, b"x");
    }
    let young = reasons(&gc(b, &["--policy", "exponential", "--apply"]));
    for path in &ours[..4] {
        assert_eq!(young[*path], "Young");
    }
    for path in &ours[4..] {
        assert_eq!(young[*path], "InUse");
    }
    for path in ours.iter().chain(&foreign) {
        let file = fs::File::options()
            .write(true)
            .open(b.path().join(path))
            .unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(86_400 + 60))
            .unwrap();
    }
    let done = gc(b, &["--policy", "exponential", "--apply"]);
    let objects = b.objects();
    for path in ours {
        assert!(!objects.contains_key(path), "{path}");
    }
    let told = reasons(&done);
    for path in foreign {
        assert!(objects.contains_key(path), "{path}");
        assert!(!told.contains_key(path), "{path}");
    }
    assert_eq!(done["foreign_objects"], 4, "{:?}", done["foreign_objects"]);
}

#[test]
fn histories_in_doubt_are_kept() {
    let p = Past::new();
    let b = &p.bucket;
    // Damaged, and of those that would tell the histories apart.
    let t = p.now - 5 * HOUR;
    let damaged = format!("v2/Incr-00000900-00001000-{t}.gz");
    b.put(&damaged, b"damaged");
    let result = gc(b, &keep_nothing(&["--apply"]));
    assert_eq!(reasons(&result)[&damaged], "Unreadable");
    assert_eq!(result["warnings"].as_array().unwrap().len(), 1, "{result}");
    let left = snapshots(&b.objects());
    assert!(left.contains(&damaged));
    assert!(left.contains(&p.delta(BASE + 1, 1100, 9)), "{left:?}");
    // Two writers: both chains are whole.
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.altered_delta(BASE + 1, 1400, 7);
    b.delta(1500, 1800, 9);
    b.altered_delta(1401, 1700, 10);
    let before = b.objects();
    let result = gc(&b, &keep_nothing(&["--apply"]));
    assert_eq!(result["status"], "NothingToDo");
    assert_eq!(snapshots(&b.objects()), snapshots(&before));
}

#[test]
fn an_older_history_is_collected_and_the_newest_is_not() {
    let p = Past::new();
    let b = &p.bucket;
    // A restore to 1900, an hour ago: the histories differ from 1901 on.
    let mut other = Bucket::with_base();
    other.events = support::buckets::fixture_events();
    let name = other.altered_delta(1901, 2000, 1);
    let bytes = fs::read(other.path().join("v2").join(&name)).unwrap();
    let newest = format!("v2/Incr-00001901-00002000-{}.gz", p.now + 30);
    let first = b.objects();
    b.put(&newest, &bytes);
    let state_before = b.run("get", &["--prefix", ""]);
    assert_eq!(state_before.0, 0, "{}", state_before.2);
    let result = gc(b, &keep_nothing(&["--apply"]));
    let told = reasons(&result);
    assert_eq!(told[&newest], "NewestChain");
    assert_eq!(told[&p.full(1499, 7)], "NewestChain");
    assert_eq!(told[&p.full(BASE, 10)], "BeyondPolicy");
    let state_after = b.run("get", &["--prefix", ""]);
    assert_eq!(state_after.1["keys"], state_before.1["keys"]);
    assert!(b.objects().len() < first.len());
}

#[test]
fn each_fixture_is_kept_whole_and_collected_after_a_compaction() {
    for name in fixture_names() {
        let store = copy_fixture(&name);
        let run = |args: &[&str]| {
            let mut c = deltafold();
            c.args(args)
                .args(["--output", "json", "--store"])
                .arg(store.path());
            let (code, result, stderr) = run_json(&mut c);
            assert_eq!(code, 0, "{name}: {stderr}");
            result
        };
        let limit = ["gc", "--policy", "limit", "--limit", "1", "--apply"];
        assert_eq!(run(&limit)["status"], "NothingToDo", "{name}");
        let done = run(&["compact"]);
        let keys = run(&["get", "--prefix", ""])["keys"].clone();
        assert_eq!(run(&limit)["status"], "Succeeded", "{name}");
        let left: Vec<_> = fs::read_dir(store.path().join("v2")).unwrap().collect();
        assert_eq!(left.len(), 1, "{name}");
        assert!(
            store
                .path()
                .join("v2")
                .join(done["snapshot"].as_str().unwrap())
                .exists()
        );
        assert!(run(&["get", "--prefix", ""])["keys"] == keys, "{name}");
    }
}

#[test]
fn nothing_to_collect_is_said() {
    let empty = TempDir::new().unwrap();
    let mut c = deltafold();
    c.args(["gc", "--policy", "limit", "--output", "json", "--store"])
        .arg(empty.path());
    let (code, result, _) = run_json(&mut c);
    assert_eq!((code, result["reason"].as_str()), (66, Some("NoSnapshots")));
}

/// A server, and the past on it.
struct Server {
    rt: Runtime,
    minio: Minio,
    past: Past,
}

impl Server {
    fn start() -> Self {
        Server {
            rt: Runtime::new().unwrap(),
            minio: Minio::start(),
            past: Past::new(),
        }
    }

    fn fill(&self, bucket: &str, kind: Kind) {
        self.rt
            .block_on(self.minio.s3().create_bucket(bucket, kind));
        let store = self.minio.store(bucket);
        for (path, bytes) in self.past.bucket.objects() {
            let path = ObjectPath::from(format!("p/{path}"));
            self.rt.block_on(store.put(&path, bytes.into())).unwrap();
        }
    }

    fn command(&self, bucket: &str, args: &[&str]) -> (i32, Value, String) {
        let mut c: Command = deltafold();
        c.args(args)
            .args(["--output", "json", "--store", &format!("s3://{bucket}/p")])
            .envs(self.minio.env());
        run_json(&mut c)
    }

    fn gc(&self, bucket: &str, args: &[&str]) -> Value {
        let args = [&["gc"], &NOTHING[..], args].concat();
        let (code, result, stderr) = self.command(bucket, &args);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        result
    }

    fn objects(&self, bucket: &str) -> Objects {
        let all = self.rt.block_on(objects_of(&*self.minio.store(bucket)));
        let below =
            |(path, bytes): (String, Vec<u8>)| Some((path.strip_prefix("p/")?.to_owned(), bytes));
        all.into_iter().filter_map(below).collect()
    }

    /// All versions and marks, by path.
    fn versions(&self, bucket: &str) -> Vec<deltafold::store::ObjectVersion> {
        let s3 = self.minio.s3();
        let store = s3.open(&format!("s3://{bucket}/p"), self.rt.handle());
        store
            .versions(&["v2", "deltafold-removed", "deltafold-locks"])
            .unwrap()
    }
}

#[test]
fn on_a_server_tags_exclude_and_versions_are_purged() {
    let server = Server::start();
    let p = &server.past;
    let newest = BTreeSet::from([p.full(2100, 1), p.delta(2101, LAST, 0)]);

    // Plain: by tag, back, and at once.
    server.fill("plain", Kind::Plain);
    let removed = decided(
        &server.gc("plain", &["--purge-after", "1d", "--apply"]),
        "Remove",
    );
    assert_eq!(removed.len(), 6);
    for path in &removed {
        let tags = server
            .rt
            .block_on(server.minio.tags("plain", &format!("p/{path}")));
        assert_eq!(
            tags,
            [("x-etcd-snapshot-exclude".to_owned(), "true".to_owned())]
        );
    }
    assert!(
        !server
            .objects("plain")
            .keys()
            .any(|k| k.ends_with(".exclude"))
    );
    let again = server.gc("plain", &["--purge-after", "1d"]);
    assert_eq!(reasons(&again)[&p.full(1499, 7)], "Removed");
    let (code, back, stderr) = server.command("plain", &["undelete", "--all"]);
    assert_eq!(
        (code, back["snapshots"].as_array().unwrap().len()),
        (0, 6),
        "{stderr}"
    );
    let tags = server.rt.block_on(
        server
            .minio
            .tags("plain", &format!("p/{}", p.full(1499, 7))),
    );
    assert!(tags.is_empty(), "{tags:?}");
    // The other tool's tag on the newest full: what it has superseded is needed.
    let bad = format!("p/{}", p.full(2100, 1));
    let set = server
        .minio
        .set_tag("plain", &bad, "x-etcd-snapshot-exclude", "true");
    server.rt.block_on(set);
    let told = reasons(&server.gc("plain", &[]));
    assert_eq!(told[&p.delta(1801, 2100, 3)], "NewestChain");
    server
        .rt
        .block_on(server.minio.set_tag("plain", &bad, "other", "tag"));
    server.gc("plain", &["--apply"]);
    assert_eq!(snapshots(&server.objects("plain")), newest);

    // With versions: what an earlier plain deletion hid is purged, too, when old enough.
    server.fill("versions", Kind::Versioned);
    let hidden = p.delta(BASE + 1, 1100, 9);
    let path = ObjectPath::from(format!("p/{hidden}"));
    server
        .rt
        .block_on(server.minio.store("versions").delete(&path))
        .unwrap();
    let done = server.gc("versions", &["--apply"]);
    assert_eq!(done["hidden_bytes"], 0);
    let versions = server.versions("versions");
    let of = |path: &str| versions.iter().filter(|v| v.path == path).count();
    assert_eq!(of(&p.full(BASE, 10)), 0, "{versions:?}");
    assert_eq!(of(&hidden), 2, "it was deleted a moment ago");
    std::thread::sleep(Duration::from_millis(1100));
    let done = server.gc("versions", &["--apply", "--staging-age", "1s"]);
    assert_eq!(
        decided(&done, "Delete")
            .iter()
            .filter(|p| p.starts_with(&hidden))
            .count(),
        2
    );
    let versions = server.versions("versions");
    let of_v2: BTreeSet<_> = versions
        .iter()
        .filter(|v| v.path.starts_with("v2/"))
        .collect::<Vec<_>>()
        .iter()
        .map(|v| v.path.clone())
        .collect();
    assert_eq!(of_v2, newest);
}

/// versitygw lists the marks of deletions apart from the versions: a mark that goes alone would bring back
/// what it hides.
#[test]
fn what_others_deleted_does_not_come_back_where_marks_are_listed_apart() {
    let rt = Runtime::new().unwrap();
    let past = Past::new();
    let versitygw = Versitygw::start();
    let s3 = versitygw.s3();
    rt.block_on(s3.create_bucket("marks", Kind::Versioned));
    let raw = s3.store("marks");
    for (path, bytes) in past.bucket.objects() {
        rt.block_on(raw.put(&ObjectPath::from(path), bytes.into()))
            .unwrap();
    }
    let deleted = [past.full(BASE, 10), past.delta(BASE + 1, 1100, 9)];
    for path in &deleted {
        rt.block_on(raw.delete(&ObjectPath::from(path.as_str())))
            .unwrap();
    }
    // Times of versions are whole seconds, and so is the store's clock.
    std::thread::sleep(Duration::from_millis(2500));
    let gc = |args: &[&str]| {
        let mut c: Command = deltafold();
        c.args(["gc", "--policy", "limit", "--output", "json", "--apply"])
            .args(["--store", "s3://marks"])
            .args(args)
            .envs(s3.env());
        let (code, result, stderr) = run_json(&mut c);
        assert_eq!(code, 0, "{stderr}");
        result
    };
    // Too young to go.
    gc(&[]);
    let store = s3.open("s3://marks", rt.handle());
    let is_deleted = |path: &str| deleted.iter().any(|d| d == path);
    let left = |store: &deltafold::store::Store| {
        let all = store.versions(&["v2"]).unwrap();
        all.iter().filter(|v| is_deleted(&v.path)).count()
    };
    assert_eq!(left(&store), 4);
    let done = gc(&["--staging-age", "1s"]);
    for path in &deleted {
        assert!(!store.exists(path).unwrap(), "{path} came back: {done:#}");
    }
    assert_eq!(left(&store), 0, "{done:#}");
    let versions = decided(&done, "Delete");
    // On a slow machine what the first run left of its own is old enough, too.
    let versions = versions
        .iter()
        .filter_map(|p| p.split_once("?versionId="))
        .filter(|(path, _)| is_deleted(path));
    assert_eq!(versions.count(), 4);
    // The delta behind them has no base; the rest is as it was.
    assert_eq!(snapshots(&rt.block_on(objects_of(&*raw))).len(), 5);
}

#[test]
fn what_is_locked_is_reported_and_left() {
    let server = Server::start();
    let p = &server.past;
    server.fill("locked", Kind::Locked);
    let store = server.minio.s3().open("s3://locked/p", server.rt.handle());
    let until = Utc::now() + TimeDelta::days(2);
    let locked = p.full(1499, 7);
    let retention = Retention {
        mode: Mode::Governance,
        until,
    };
    store.retain(&locked, None, &retention).unwrap();
    // The delta behind it: locked by a hold that somebody has to lift.
    let held = p.delta(1101, 1499, 8);
    let place = format!("p/{held}");
    let hold = |state: &str| {
        use base64::Engine as _;
        use md5::Digest as _;
        let body = format!("<LegalHold><Status>{state}</Status></LegalHold>");
        let sum = md5::Md5::digest(body.as_bytes());
        let sum = base64::engine::general_purpose::STANDARD.encode(sum);
        server.rt.block_on(server.minio.s3().must(
            Method::PUT,
            ("locked", &place),
            &[("legal-hold", "")],
            &[("content-md5", &sum)],
            &body,
        ));
    };
    hold("ON");
    let fate = |result: &Value, path: &str| {
        let objects = result["objects"].as_array().unwrap();
        let o = objects.iter().find(|o| o["path"] == path).unwrap();
        (
            o["fate"].as_str().unwrap_or("-").to_owned(),
            o["locked_until"].clone(),
        )
    };
    let dry = server.gc("locked", &[]);
    let (what, when) = fate(&dry, &locked);
    let when: chrono::DateTime<Utc> = when.as_str().unwrap().parse().unwrap();
    assert_eq!(what, "Locked");
    assert!(
        (when - until).abs() <= TimeDelta::seconds(1),
        "{when} {until}"
    );
    let done = server.gc("locked", &["--apply"]);
    assert_eq!(fate(&done, &locked).0, "Locked");
    assert_eq!(fate(&done, &held), ("Locked".to_owned(), Value::Null));
    // What comes before a locked one in its chain waits: nobody shall take the rest for whole.
    assert_eq!(fate(&done, &p.delta(BASE + 1, 1100, 9)).0, "Waiting");
    assert_eq!(fate(&done, &p.full(BASE, 10)).0, "Waiting");
    assert_eq!(fate(&done, &p.delta(1801, 2100, 3)).0, "Done");
    assert_eq!(done["totals"]["left"]["objects"], 4);
    let left = snapshots(&server.objects("locked"));
    let expected = [
        p.full(BASE, 10),
        p.delta(BASE + 1, 1100, 9),
        held.clone(),
        locked.clone(),
        p.full(2100, 1),
        p.delta(2101, LAST, 0),
    ];
    assert_eq!(left, BTreeSet::from(expected));
    // When the hold is lifted, its chain goes.
    hold("OFF");
    let done = server.gc("locked", &["--apply"]);
    assert_eq!(fate(&done, &held).0, "Done");
    assert_eq!(snapshots(&server.objects("locked")).len(), 3);
}

/// Who may not list versions, or not ask for them, must not hide what is locked behind a mark.
#[test]
fn what_is_locked_is_left_where_versions_cannot_be_looked_at() {
    let server = Server::start();
    let p = &server.past;
    let locked = p.full(1499, 7);
    let retention = Retention {
        mode: Mode::Compliance,
        until: Utc::now() + TimeDelta::days(2),
    };
    type Denied = fn(&str) -> bool;
    let cases: [(&str, Denied); 2] = [
        ("unlisted", |line| line.contains("versions=")),
        ("unknown", |line| {
            line.contains("versions=") || line.contains("versioning=")
        }),
    ];
    for (bucket, denied) in cases {
        server.fill(bucket, Kind::Locked);
        let url = format!("s3://{bucket}/p");
        let store = server.minio.s3().open(&url, server.rt.handle());
        store.retain(&locked, None, &retention).unwrap();
        let role = denying(server.minio.endpoint(), denied);
        for apply in [&[][..], &["--apply"]] {
            let mut c: Command = deltafold();
            c.args(
                [
                    &["gc", "--output", "json", "--store", &url],
                    &NOTHING[..],
                    apply,
                ]
                .concat(),
            )
            .envs(role.env());
            let (code, result, stderr) = run_json(&mut c);
            assert_eq!(code, 0, "{bucket} {apply:?}: {stderr}");
            let objects = result["objects"].as_array().unwrap();
            let fate = |path: &str| {
                let o = objects.iter().find(|o| o["path"] == path).unwrap();
                o["fate"].as_str().unwrap_or("-").to_owned()
            };
            assert_eq!(fate(&locked), "Locked", "{bucket} {apply:?}: {result:#}");
            if !apply.is_empty() {
                // It is there as a version, whatever may be known of it.
                assert_eq!(fate(&p.delta(1801, 2100, 3)), "Hidden", "{bucket}");
                assert_eq!(result["totals"]["deleted"]["bytes"], result["hidden_bytes"]);
            }
        }
        let left = snapshots(&server.objects(bucket));
        assert!(left.contains(&locked), "{bucket}: {left:?}");
        assert!(
            !left.contains(&p.delta(1801, 2100, 3)),
            "{bucket}: {left:?}"
        );
    }
}

/// A pin says that a chain stays: also those of its deltas that were removed before.
#[test]
fn a_pinned_chain_keeps_what_was_removed_of_it() {
    let past = Past::new();
    let b = &past.bucket;
    gc(b, &keep_nothing(&["--purge-after", "1d", "--apply"]));
    let name = past.full(1499, 7);
    let (code, pinned, stderr) = b.run("pin", &[name.as_str()]);
    assert_eq!(code, 0, "{stderr}");
    let chain = pinned["chain"].as_array().unwrap();
    assert_eq!(chain.len(), 3, "{pinned:#}");
    assert!(
        pinned["warnings"][0]
            .as_str()
            .unwrap()
            .contains("3 of these 3")
    );
    // It would be purged at once.
    gc(b, &keep_nothing(&["--apply"]));
    let left = snapshots(&b.objects());
    for path in [
        &name,
        &past.delta(1500, 1800, 6),
        &past.delta(1801, 2100, 3),
    ] {
        assert!(left.contains(path), "{path}: {left:?}");
    }
    let (code, _, stderr) = b.run("undelete", &[name.as_str()]);
    assert_eq!(code, 0, "{stderr}");
    gc(b, &keep_nothing(&["--apply"]));
    state(b.path(), 1800);
    assert!(!snapshots(&b.objects()).contains(&past.full(BASE, 10)));
}

/// A chain that is locked is meant to be used: it is not excluded either.
#[test]
fn what_is_locked_is_not_excluded() {
    let server = Server::start();
    let p = &server.past;
    server.fill("locked", Kind::Locked);
    let store = server.minio.s3().open("s3://locked/p", server.rt.handle());
    let locked = p.full(1499, 7);
    let retention = Retention {
        mode: Mode::Governance,
        until: Utc::now() + TimeDelta::days(2),
    };
    store.retain(&locked, None, &retention).unwrap();
    for apply in [
        &["--purge-after", "1d"][..],
        &["--purge-after", "1d", "--apply"],
    ] {
        let told = server.gc("locked", apply);
        let objects = told["objects"].as_array().unwrap();
        let o = objects.iter().find(|o| o["path"] == *locked).unwrap();
        assert_eq!(
            (&o["decision"], &o["fate"]),
            (&"Remove".into(), &"Locked".into())
        );
    }
    let tags = |path: &str| {
        let key = format!("p/{path}");
        server.rt.block_on(server.minio.tags("locked", &key)).len()
    };
    assert_eq!(tags(&locked), 0);
    assert_eq!(tags(&p.delta(1801, 2100, 3)), 1);
}

/// What somebody excluded for being broken must not make the rest look superfluous.
#[test]
fn nothing_is_removed_where_tags_must_not_be_read() {
    let server = Server::start();
    let p = &server.past;
    server.fill("tags", Kind::Plain);
    let bad = format!("p/{}", p.full(2100, 1));
    let set = server
        .minio
        .set_tag("tags", &bad, "x-etcd-snapshot-exclude", "true");
    server.rt.block_on(set);
    let before = snapshots(&server.objects("tags"));
    let role = denying(server.minio.endpoint(), |line| line.contains("tagging="));
    let run = |args: &[&str]| {
        let mut c: Command = deltafold();
        c.args(
            [
                &["gc", "--output", "json", "--store", "s3://tags/p"],
                &NOTHING[..],
                args,
            ]
            .concat(),
        )
        .envs(role.env());
        run_json(&mut c)
    };
    let (code, told, stderr) = run(&[]);
    assert_eq!(code, 0, "{stderr}");
    let warnings = told["warnings"].to_string();
    assert!(warnings.contains("s3:GetObjectTagging"), "{warnings}");
    let (code, told, stderr) = run(&["--apply"]);
    assert_eq!(
        (code, &told["reason"]),
        (77, &"PermissionDenied".into()),
        "{stderr}"
    );
    assert_eq!(snapshots(&server.objects("tags")), before);
}
