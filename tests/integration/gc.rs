//! `gc`, mostly on folders: what must stay restorable is restored as before, removed snapshots can be brought
//! back, and foreign objects are not touched.

use crate::support::gc_history::{
    GcHistory, HOUR, NEWEST_FULL, NOTHING, decided, reasons, snapshots, window_alone,
};
use crate::support::made_backups::{BASE, Bucket, FIXTURE, LAST, T0, objects_of};
use crate::support::s3::Kind;
use crate::support::scratch;
use crate::support::versitygw::Versitygw;
use crate::support::{copy_fixture, deltafold, fixture_names, fixtures_dir, run_json};
use object_store::ObjectStoreExt;
use object_store::path::Path as ObjectPath;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};
use tokio::runtime::Runtime;

/// Returns all keys at a revision.
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

fn keep_nothing<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&NOTHING[..], more].concat()
}

#[test]
fn points_within_the_window_are_restored_as_before() {
    let p = GcHistory::new();
    let b = &p.bucket;
    let points = [1800, 1801, 1950, 2100, 2101, 2200, LAST];
    let before: Vec<Value> = points.map(|r| state(b.path(), r)).to_vec();
    let objects = b.objects();
    let args = window_alone("5h");
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

    // Without a window only the newest chain must stay.
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
    let p = GcHistory::new();
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
    // The newest state is restored as before, the others are not restorable.
    assert!(b.run("get", &["--prefix", "", "--revision", "800"]).0 != 0);
    let again = gc(b, &args);
    assert_eq!(again["status"], "NothingToDo");
    assert_eq!(reasons(&again)[&p.full(BASE, 10)], "Removed");

    // A full and the deltas after it.
    let name = p.full(BASE, 10).replace("v2/", "");
    let (code, back, stderr) = b.run("undelete", &[&name]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(back["snapshots"].as_array().unwrap().len(), 3, "{back}");
    assert!(state(b.path(), 800) == states[0] && state(b.path(), 1499) == states[1]);
    // A pin keeps it from being removed again.
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

    // It is purged with its notes when the time has come.
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
    let ours = |n: &&String| {
        let stays = ["v2/", "deltafold-locks/", "deltafold-verified.json"];
        !stays.iter().any(|s| n.starts_with(s))
    };
    assert_eq!(names.iter().filter(ours).count(), 0, "{names:?}");
    let (code, _, stderr) = b.run("undelete", &[name.as_str()]);
    assert!(code == 66 && stderr.contains("purged"), "{stderr}");
}

#[test]
fn a_note_of_an_earlier_removal_does_not_shorten_the_time_to_bring_it_back() {
    let p = GcHistory::new();
    let b = &p.bucket;
    // Somebody removed the marker and left the note.
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
    let p = GcHistory::new();
    let b = &p.bucket;
    // The newest full is bad, so what it has superseded is needed again.
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
    let p = GcHistory::new();
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
    // One history in both layouts: fulls of two days ago and of today.
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
    let p = GcHistory::new();
    let b = &p.bucket;
    let ours = [
        "deltafold-timelines/Full-00000000-00000001-1700000000.gz",
        "deltafold-pins/Full-00000000-00000001-1700000000.gz",
        "deltafold-removed/Incr-00000001-00000002-1700000000",
        "v2/Full-00000000-00000001-1700000000.gz.exclude",
        "deltafold-staging/Full-00000000-00000009-100.gz.0000000000000abc.17.99.0000000000000003",
        // A file that object_store leaves when it is killed.
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
    let p = GcHistory::new();
    let b = &p.bucket;
    // Damaged, and one of those that would tell the histories apart.
    let t = p.now - 5 * HOUR;
    let damaged = format!("v2/Incr-00000900-00001000-{t}.gz");
    b.put(&damaged, b"damaged");
    let result = gc(b, &keep_nothing(&["--apply"]));
    assert_eq!(reasons(&result)[&damaged], "Unreadable");
    assert_eq!(result["warnings"].as_array().unwrap().len(), 1, "{result}");
    let left = snapshots(&b.objects());
    assert!(left.contains(&damaged));
    assert!(left.contains(&p.delta(BASE + 1, 1100, 9)), "{left:?}");
    // Two writers: both chains are complete.
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
    let p = GcHistory::new();
    let b = &p.bucket;
    // A restore to 1900, an hour ago: the histories differ from 1901 on.
    let mut other = Bucket::with_base();
    other.events = crate::support::made_backups::fixture_events();
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
    assert!(snapshots(&b.objects()).len() < snapshots(&first).len());
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
        let at_once = ["--purge-after", "0s"];
        let limit = [&["gc", "--apply"], &NEWEST_FULL[..], &at_once].concat();
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
    let empty = scratch::folder().unwrap();
    let mut c = deltafold();
    c.args(["gc", "--policy", "limit", "--output", "json", "--store"])
        .arg(empty.path());
    let (code, result, _) = run_json(&mut c);
    assert_eq!((code, result["reason"].as_str()), (66, Some("NoSnapshots")));
}

/// versitygw lists deletion markers separately from versions: a marker that is deleted alone would bring back
/// what it hides.
#[test]
fn what_others_deleted_does_not_come_back_where_marks_are_listed_apart() {
    let rt = Runtime::new().unwrap();
    let past = GcHistory::new();
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
            .args(["--store", "s3://marks", "--purge-after", "0s"])
            .args(["--restorable-window", "0s"])
            .args(args)
            .envs(s3.env());
        let (code, result, stderr) = run_json(&mut c);
        assert_eq!(code, 0, "{stderr}");
        result
    };
    // Too young to be removed.
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
    // On a slow machine the objects of the first run are old enough, too.
    let versions = versions
        .iter()
        .filter_map(|p| p.split_once("?versionId="))
        .filter(|(path, _)| is_deleted(path));
    assert_eq!(versions.count(), 4);
    // The delta after them has no base; the rest is as it was.
    assert_eq!(snapshots(&rt.block_on(objects_of(&*raw))).len(), 5);
}

/// A pin keeps a chain, including deltas of it that were removed before.
#[test]
fn a_pinned_chain_keeps_what_was_removed_of_it() {
    let past = GcHistory::new();
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
            .contains("3 of the chain's 3")
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
