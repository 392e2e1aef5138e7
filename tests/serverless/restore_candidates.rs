//! Several backups at once: the one with the highest revision is restored, unreadable ones are skipped and
//! named.

use crate::support::made_backups::{
    BASE, Bucket, FIXTURE, LAST, fixture_events, revision as event_revision,
};
use crate::support::member::{assert_whole, flip};
use crate::support::scratch;
use crate::support::{deltafold, expected, run_json, without_servers};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Restores from several stores. Returns the exit code, the JSON and standard error.
fn from(stores: &[&Path], data: &Path, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.args(["restore", "--output", "json"]);
    for store in stores {
        c.arg("--store").arg(store);
    }
    c.arg("--data-dir").arg(data).args(args);
    run_json(without_servers(&mut c))
}

fn hash_at(revision: i64) -> u32 {
    let rows = expected(FIXTURE).hash_kv;
    let row = rows.iter().find(|row| row.revision == revision);
    row.unwrap_or_else(|| panic!("no hash at {revision}")).hash
}

/// Returns status and reason of each candidate, in the order of the flags.
fn told(json: &Value, stores: &[&Path]) -> Vec<(String, String)> {
    let all = json["candidates"].as_array().unwrap();
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    assert_eq!(all.len(), stores.len(), "{json}");
    for (c, store) in all.iter().zip(stores) {
        let named = text(&c["store"]);
        assert!(named.contains(store.to_str().unwrap()), "{named}");
        let is_excluded = c["status"] == "Excluded";
        assert_eq!(c["reason"].is_string(), is_excluded, "{c}");
        assert_eq!(c["message"].is_string(), is_excluded, "{c}");
    }
    all.iter()
        .map(|c| (text(&c["status"]), text(&c["reason"])))
        .collect()
}

const CHOSEN: (&str, &str) = ("Chosen", "");
const NOT_CHOSEN: (&str, &str) = ("NotChosen", "");

/// Restores into a new directory. Asserts the state and the report of each candidate.
#[track_caller]
fn chooses(stores: &[&Path], args: &[&str], revision: i64, wanted: &[(&str, &str)]) -> Value {
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    let (code, dry, stderr) = from(stores, &data, &[args, &["--dry-run"]].concat());
    assert_eq!(code, 0, "{stderr}");
    assert!(!data.exists());
    let (code, json, stderr) = from(stores, &data, args);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(json["restored_revision"], revision, "{json:#}");
    let got = told(&json, stores);
    let got: Vec<_> = got.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    assert_eq!(got, wanted, "{stderr}");
    assert_whole(&data, None, hash_at(revision), &stderr);
    // A dry run reads no delta to its end.
    told(&dry, stores);
    json
}

#[track_caller]
fn refuses(stores: &[&Path], args: &[&str], code: i32, reason: &str) -> String {
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    let (got, json, stderr) = from(stores, &data, args);
    assert_eq!(
        (got, json["reason"].as_str()),
        (code, Some(reason)),
        "{stderr}"
    );
    assert!(!data.exists());
    json["message"].as_str().unwrap().to_owned()
}

/// A backup to revision 1499.
fn short() -> Bucket {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, 1499, 6);
    bucket
}

/// A backup to the end in two deltas, cut where the fixture's hashes are known.
fn long() -> Bucket {
    let bucket = short();
    bucket.delta(1500, LAST, 9);
    bucket
}

/// A backup to the end, cut into other deltas.
fn cut_otherwise() -> Bucket {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, 1100, 7);
    bucket.delta(1101, LAST, 8);
    bucket
}

/// A backup with only a full at the end, folded from another.
fn compacted() -> Bucket {
    let bucket = long();
    bucket.compact(&["--keep-history", "all"]);
    for name in bucket.names() {
        if !name.contains(&format!("Full-00000000-{LAST:08}")) {
            fs::remove_file(bucket.path().join("v2").join(name)).unwrap();
        }
    }
    assert_eq!(bucket.names().len(), 1);
    bucket
}

/// Flips a bit in the middle of the objects with this in their names.
fn damage(bucket: &Bucket, part: &str) {
    let names: Vec<_> = bucket
        .names()
        .into_iter()
        .filter(|n| n.contains(part))
        .collect();
    assert!(!names.is_empty());
    for name in names {
        let path = bucket.path().join("v2").join(name);
        flip(&path, fs::metadata(&path).unwrap().len() / 2);
    }
}

#[test]
fn the_farthest_wins_and_the_first_of_equals() {
    let (short, long, other) = (short(), long(), cut_otherwise());
    let copy = Bucket::of(&long.objects());
    let [short, long, other, copy] = [&short, &long, &other, &copy].map(Bucket::path);
    chooses(
        &[short, long, other],
        &[],
        LAST,
        &[NOT_CHOSEN, CHOSEN, NOT_CHOSEN],
    );
    chooses(
        &[other, short, long],
        &[],
        LAST,
        &[CHOSEN, NOT_CHOSEN, NOT_CHOSEN],
    );
    chooses(&[long, copy], &[], LAST, &[CHOSEN, NOT_CHOSEN]);
    chooses(&[copy, long], &[], LAST, &[CHOSEN, NOT_CHOSEN]);
    chooses(&[short], &[], 1499, &[CHOSEN]);
}

#[test]
fn one_that_holds_only_the_end_wins_over_one_that_ends_before() {
    let (short, compacted) = (short(), compacted());
    let stores = [short.path(), compacted.path()];
    chooses(&stores, &[], LAST, &[NOT_CHOSEN, CHOSEN]);
    let bare = long();
    bare.compact(&["--keep-history", "latest"]);
    for name in bare.names() {
        if !name.contains(&format!("Full-00000000-{LAST:08}")) {
            fs::remove_file(bare.path().join("v2").join(name)).unwrap();
        }
    }
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    let (code, json, stderr) = from(&[short.path(), bare.path()], &data, &[]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(json["restored_revision"], LAST, "{json:#}");
    let fates = told(&json, &[short.path(), bare.path()]);
    assert_eq!(fates[0].0, "NotChosen", "{fates:?}");
    let last = expected(FIXTURE).compacted_at_last_revision;
    assert_whole(&data, None, last.hash, "compacted");
}

#[test]
fn those_that_cannot_be_read_are_passed_over_with_their_reasons() {
    let long = long();
    let nowhere = scratch::folder().unwrap();
    let missing = nowhere.path().join("missing");
    let empty = nowhere.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let closed = PathBuf::from("s3://backups/closed");
    let no_base = Bucket::of(&long.objects());
    let base = no_base
        .names()
        .into_iter()
        .find(|n| n.starts_with("Full-"))
        .unwrap();
    fs::remove_file(no_base.path().join("v2").join(base)).unwrap();
    let damaged = Bucket::of(&long.objects());
    damage(&damaged, "Full-");
    let excluded = |reason| ("Excluded", reason);
    let stores = [
        missing.as_path(),
        &empty,
        damaged.path(),
        no_base.path(),
        long.path(),
    ];
    let mut wanted = [
        "NoSnapshots",
        "NoSnapshots",
        "CorruptSnapshot",
        "NoSnapshots",
    ]
    .map(excluded)
    .to_vec();
    wanted.push(CHOSEN);
    chooses(&stores, &[], LAST, &wanted);
    // A server that does not respond.
    let stores = [closed.as_path(), long.path()];
    let wanted = [excluded("StoreUnreachable"), CHOSEN];
    chooses(&stores, &[], LAST, &wanted);
}

#[test]
fn one_that_fails_only_while_it_is_folded() {
    let short = short();
    for part in ["Incr-00000747", "Incr-00001500"] {
        let damaged = long();
        damage(&damaged, part);
        let wanted = [("Excluded", "CorruptSnapshot"), CHOSEN];
        let stores = [damaged.path(), short.path()];
        let json = chooses(&stores, &[], 1499, &wanted);
        let message = json["candidates"][0]["message"].as_str().unwrap();
        assert!(message.contains(part), "{message}");
        refuses(&[damaged.path()], &[], 65, "CorruptSnapshot");
    }
}

#[test]
fn one_whose_newest_is_damaged() {
    let short = short();
    let damaged = long();
    damaged.compact(&["--keep-history", "all"]);
    damage(&damaged, &format!("Full-00000000-{LAST:08}"));
    let stores = [damaged.path(), short.path()];
    let wanted = [("Excluded", "CorruptSnapshot"), CHOSEN];
    chooses(&stores, &[], 1499, &wanted);
    // An older state needs nothing of the damaged part.
    chooses(
        &stores,
        &["--revision", "1499"],
        1499,
        &[CHOSEN, NOT_CHOSEN],
    );
}

#[test]
fn where_all_fail_each_is_named() {
    let nowhere = scratch::folder().unwrap();
    let (a, b) = (nowhere.path().join("a"), nowhere.path().join("b"));
    let damaged = long();
    damage(&damaged, "Incr-00001500");
    // The reason is what was wrong with the best candidate.
    let message = refuses(&[&a, damaged.path(), &b], &[], 65, "CorruptSnapshot");
    for store in [a.as_path(), damaged.path(), b.as_path()] {
        assert!(message.contains(store.to_str().unwrap()), "{message}");
    }
    let message = refuses(&[&a, &b], &[], 66, "NoSnapshots");
    assert!(message.contains(b.to_str().unwrap()), "{message}");
}

#[test]
fn a_revision_or_a_time_that_only_some_cover() {
    let (short, long) = (short(), long());
    let stores = [short.path(), long.path()];
    let beyond = ("Excluded", "OutOfRange");
    chooses(
        &stores,
        &["--revision", &LAST.to_string()],
        LAST,
        &[beyond, CHOSEN],
    );
    chooses(
        &stores,
        &["--revision", "1499"],
        1499,
        &[CHOSEN, NOT_CHOSEN],
    );
    let message = refuses(&stores, &["--revision", "5000"], 66, "OutOfRange");
    for end in ["1499", "2252"] {
        assert!(message.contains(end), "{message}");
    }
    // For a time, the last event before it counts, wherever it is.
    let late = ["--time", "2030-01-01T00:00:00Z", "--or-newest"];
    chooses(&stores, &late, LAST, &[NOT_CHOSEN, CHOSEN]);
    // Without it, a backup that ends before the time is not chosen.
    let message = refuses(&stores, &late[..2], 66, "OutOfRange");
    assert_eq!(message.matches("--or-newest").count(), 2, "{message}");
    let early = ["--time", "1999-01-01T00:00:00Z"];
    refuses(&stores, &early, 66, "OutOfRange");
    // The exact time of an event that both hold.
    let events = fixture_events();
    let event = events.iter().rfind(|e| event_revision(e) == 1499).unwrap();
    let then = ["--time", event["time"].as_str().unwrap()];
    chooses(&stores, &then, 1499, &[CHOSEN, NOT_CHOSEN]);
}
