//! `gc` on folders: what must stay restorable is restored as before, and foreign objects are not touched.

use crate::support::gc_history::{
    GcHistory, HOUR, NEWEST_FULL, NOTHING, decided, reasons, snapshots, window_alone,
};
use crate::support::made_backups::{BASE, Bucket, FIXTURE, LAST, T0};
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, fixture_names, fixtures_dir, run_json};
use deltafold::backup::catalog::mark_of;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Returns all keys at a revision.
fn state(store: &Path, revision: i64) -> Value {
    let mut c = deltafold();
    c.args(["get", "--prefix", "", "--output", "result", "--store"]);
    c.arg(store).args(["--revision", &revision.to_string()]);
    let (code, result, stderr) = run_json(&mut c);
    assert_eq!(code, 0, "{revision}: {stderr}");
    result["keys"].clone()
}

fn gc(b: &Bucket, args: &[&str]) -> Value {
    b.succeeds("gc", args)
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

/// What is deleted does not come back, and while a backup has stopped only ages change. The next full lifts that.
#[test]
fn nothing_goes_while_the_newest_full_is_older_than_the_window() {
    let p = GcHistory::new();
    let b = &p.bucket;
    let before = b.objects();
    let policy = ["--policy", "limit", "--limit", "1"];
    let within = |window| [&policy[..], &["--restorable-window", window, "--apply"]].concat();
    // The newest full is an hour old, and a damaged newer one is none.
    b.put(&p.full(2200, 0), b"no snapshot");
    let kept = gc(b, &within("30m"));
    assert_eq!(kept["status"], "NothingToDo", "{kept:#}");
    let warnings = kept["warnings"].to_string();
    assert!(
        warnings.contains("older than --restorable-window"),
        "{kept:#}"
    );
    let told = reasons(&kept);
    assert!(told.values().any(|why| *why == "NoRecentFull"), "{told:?}");
    assert!(snapshots(&before).is_subset(&snapshots(&b.objects())));
    fs::remove_file(b.path().join(p.full(2200, 0))).unwrap();
    let gone = gc(b, &within("2h"));
    assert_eq!(gone["status"], "Succeeded", "{gone:#}");
}

#[test]
fn what_others_excluded_is_no_base_and_goes_with_the_policy() {
    let p = GcHistory::new();
    let b = &p.bucket;
    // The newest full is bad, so what it has superseded is needed again.
    let bad = p.full(2100, 1);
    b.put(&mark_of(&bad), b"");
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
        "deltafold-excluded/Full-00000000-00000001-1700000000.gz",
        "deltafold-staging/Full-00000000-00000009-100.gz.0000000000000003",
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
    for path in &ours[..3] {
        assert_eq!(young[*path], "Young");
    }
    for path in &ours[3..] {
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
        let limit = [&["gc", "--apply"], &NEWEST_FULL[..]].concat();
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

/// If a chain is pinned, its excluded deltas stay, too.
#[test]
fn a_pinned_chain_keeps_what_is_excluded_of_it() {
    let past = GcHistory::new();
    let b = &past.bucket;
    let name = past.full(1499, 7);
    let deltas = [past.delta(1500, 1800, 6), past.delta(1801, 2100, 3)];
    for delta in &deltas {
        b.put(&mark_of(delta), b"");
    }
    let pinned = b.succeeds("pin", &[name.as_str()]);
    let chain = pinned["chain"].as_array().unwrap();
    assert_eq!(chain.len(), 3, "{pinned:#}");
    let warning = pinned["warnings"][0].as_str().unwrap();
    assert!(warning.contains("2 of the chain's 3"), "{warning}");
    gc(b, &keep_nothing(&["--apply"]));
    let left = snapshots(&b.objects());
    for path in deltas.iter().chain([&name]) {
        assert!(left.contains(path), "{path}: {left:?}");
    }
    // `list` shows revisions at any width.
    assert_eq!(b.succeeds("pin", &["1499"])["status"], "NothingToDo");
    assert_eq!(b.run("pin", &["1500"]).0, 66);
    assert_eq!(b.run("pin", &["1499", "--unpin"]).0, 0);
    gc(b, &keep_nothing(&["--apply"]));
    let left = snapshots(&b.objects());
    assert!(deltas.iter().all(|d| !left.contains(d)), "{left:?}");
}
