//! Histories that fork: a restore to an older revision, or two clusters on one prefix.

use crate::support::expected;
use crate::support::gc_history::NEWEST_FULL;
use crate::support::made_backups::{BASE, Bucket, LAST, T0, alter, revision};
use serde_json::Value;
use std::collections::BTreeSet;

/// Returns the hash of the fixture's own history, compacted at its end.
fn own_hash() -> u64 {
    expected(crate::support::made_backups::FIXTURE)
        .compacted_at_last_revision
        .hash
        .into()
}

/// Returns the old branch A: two deltas, 6 and 9 seconds after the base.
fn with_old_branch() -> Bucket {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.delta(1500, LAST, 9);
    b
}

/// Returns a prefix with a restore to 1599, followed by two deltas of another history.
fn with_fork() -> Bucket {
    let b = with_old_branch();
    b.altered_delta(1600, 1900, 100);
    b.altered_delta(1901, 2100, 110);
    b
}

/// Returns the new branch without the tail of the old one.
fn new_branch_alone() -> Bucket {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1599, 6);
    b.altered_delta(1600, 1900, 100);
    b.altered_delta(1901, 2100, 110);
    b
}

fn ids(list: &Value) -> Vec<&str> {
    let mut ids: Vec<&str> = list["restorable"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["timeline"].as_str().unwrap())
        .collect();
    ids.dedup();
    ids
}

#[test]
fn the_branch_written_wholly_after_the_other_is_taken() {
    let alone = new_branch_alone().compact(&[]);
    let b = with_fork();
    let result = b.compact(&[]);
    assert_eq!(result["revision"], 2100);
    for field in ["hash_kv", "live_keys", "snapshot", "compact_revision"] {
        assert_eq!(result[field], alone[field], "{field}");
    }
    assert_eq!(result["deltas"].as_array().unwrap().len(), 4);
    let warning = result["warnings"][0].as_str().unwrap();
    assert!(warning.contains("from revision 1600 on"), "{warning}");
    assert!(
        result["timeline"].as_str().unwrap().starts_with("r1600-"),
        "{result}"
    );

    // The result is on the same timeline, and nothing is newer.
    let again = b.compact(&[]);
    assert_eq!(again["status"], "NothingToDo");
    assert_eq!(again["timeline"], result["timeline"]);
    assert_eq!(again["snapshot"], result["snapshot"]);
    assert_eq!(again["hash_kv"], result["hash_kv"]);
}

#[test]
fn every_timeline_can_be_chosen_and_its_id_is_stable() {
    let b = with_fork();
    let list = b.list(&["--deep"]);
    let first = ids(&list)
        .into_iter()
        .map(str::to_owned)
        .collect::<Vec<_>>();
    assert_eq!(first.len(), 2);
    assert_eq!(first[0], "main");
    assert_eq!(list["latest_revision"], 2100);
    assert_eq!(list["restorable"][0]["last_revision"], LAST);
    assert_eq!(list["restorable"][1]["last_revision"], 2100);

    let main = b.compact(&["--timeline", "main"]);
    assert_eq!(main["hash_kv"], own_hash());
    assert_eq!(main["revision"], LAST);
    let newer = b.compact(&["--timeline", &first[1]]);
    assert_eq!(newer["revision"], 2100);
    let message = b.refuses(&["--timeline", "r1-00000000"], 66, "NoSuchTimeline");
    assert!(
        message.contains("main") && message.contains(&first[1]),
        "{message}"
    );

    // More snapshots on either branch do not change an ID.
    b.altered_delta(2101, 2200, 120);
    assert_eq!(ids(&b.list(&["--deep"])), first);
    let result = b.compact(&[]);
    assert_eq!(
        (result["timeline"].as_str(), result["revision"].as_i64()),
        (Some(first[1].as_str()), Some(2200))
    );
}

#[test]
fn points_in_time_are_those_of_the_newest_branch() {
    let b = with_fork();
    let alone = new_branch_alone();
    for at in ["1400", "1599", "1600", "1700", "1950"] {
        let keep = ["--revision", at, "--keep-history", "all"];
        let (got, want) = (b.compact(&keep), alone.compact(&keep));
        assert_eq!(
            (&got["hash_kv"], &got["revision"]),
            (&want["hash_kv"], &want["revision"]),
            "{at}"
        );
    }
    b.refuses(&["--revision", "2101"], 66, "OutOfRange");
}

#[test]
fn a_new_branch_may_begin_with_a_full() {
    // The first snapshot of a cluster that was restored to 1600 and went on to 1700.
    let made = Bucket::with_base();
    made.delta(BASE + 1, 1600, 6);
    made.altered_delta(1601, 1700, 20);
    let full = made.compact(&[]);
    let name = full["snapshot"].as_str().unwrap();
    let bytes = std::fs::read(made.path().join("v2").join(name)).unwrap();
    made.altered_delta(1701, 1800, 30);
    let want = made.compact(&[]);

    let b = with_old_branch();
    b.put(&format!("v2/{name}"), &bytes);
    b.altered_delta(1701, 1800, 30);
    let got = b.compact(&[]);
    assert_eq!(
        (&got["base"], &got["revision"]),
        (&full["snapshot"], &want["revision"])
    );
    assert_eq!(got["hash_kv"], want["hash_kv"]);
    assert_eq!(b.compact(&["--timeline", "main"])["hash_kv"], own_hash());
}

#[test]
fn two_clusters_on_one_prefix_are_refused() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.altered_delta(BASE + 1, 1400, 7);
    b.delta(1500, 1800, 9);
    b.altered_delta(1401, 1700, 10);
    let message = b.refuses(&[], 65, "InterleavedTimelines");
    assert!(
        message.contains("from revision 747 on") && message.contains("--timeline"),
        "{message}"
    );
    let list = b.list(&["--deep"]);
    assert_eq!(list["problems"][0]["reason"], "InterleavedTimelines");
    assert_eq!(ids(&list).len(), 2);
    let ids: Vec<String> = ids(&list).into_iter().map(str::to_owned).collect();
    assert_eq!(b.compact(&["--timeline", &ids[0]])["revision"], 1800);
    assert_eq!(b.compact(&["--timeline", &ids[1]])["revision"], 1700);
}

#[test]
fn the_same_boundaries_do_not_hide_two_clusters() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.altered_delta(BASE + 1, 1499, 7);
    b.delta(1500, 1800, 9);
    b.altered_delta(1500, 1800, 10);
    b.refuses(&[], 65, "InterleavedTimelines");
}

#[test]
fn a_delta_of_another_history_is_found_out_by_its_versions() {
    // The names grow without a doubt; only the events' versions show the fork.
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    let mut events = b.events(1500, LAST);
    let changed = events
        .iter_mut()
        .find(|e| e["etcdEvent"]["kv"]["version"].as_i64() > Some(2))
        .unwrap();
    let kv = &mut changed["etcdEvent"]["kv"];
    kv["version"] = (kv["version"].as_i64().unwrap() - 1).into();
    b.delta_of(1500, LAST, 9, &events);
    let message = b.refuses(&[], 65, "HistoryMismatch");
    assert!(message.contains("Incr-00001500"), "{message}");
}

#[test]
fn streams_of_two_snapshotters_that_agree_are_one_history() {
    let b = Bucket::with_base();
    // One stream ends early, the other has a hole: only together they cover everything.
    b.delta(BASE + 1, 1000, 5);
    b.delta(900, 1300, 6);
    b.delta(1100, 1200, 7);
    b.delta(1250, 1800, 8);
    b.delta(1250, 1800, 9);
    b.delta(1700, LAST, 10);
    let result = b.compact(&[]);
    assert_eq!(result["hash_kv"], own_hash());
    assert_eq!(result["timeline"], "main");
    assert_eq!(result["events"].as_u64().unwrap(), b.events.len() as u64);
    assert_eq!(result["warnings"].as_array().unwrap().len(), 0, "{result}");
    assert_eq!(result["deltas"].as_array().unwrap().len(), 4);
    let list = b.list(&["--deep"]);
    assert_eq!(list["problems"].as_array().unwrap().len(), 0, "{list}");
}

#[test]
fn a_compacted_full_made_late_is_no_second_history() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    let full = b.compact(&[]);
    let name = full["snapshot"].as_str().unwrap();
    // etcd-backup-restore names it when it is done: later than deltas that were written meanwhile.
    let late = format!(
        "v2/Full-00000000-00001499-{}.gz",
        crate::support::made_backups::T0 + 15
    );
    std::fs::rename(b.path().join("v2").join(name), b.path().join(late)).unwrap();
    b.delta(1500, 1800, 9);
    b.delta(1801, LAST, 20);
    let result = b.compact(&[]);
    assert_eq!(result["hash_kv"], own_hash());
    assert_eq!(
        (
            &result["timeline"],
            result["deltas"].as_array().unwrap().len()
        ),
        (&"main".into(), 2)
    );
}

#[test]
fn two_restores_in_a_row() {
    let b = with_fork();
    let third = alter(b.events(1500, 1700), b"a third history");
    b.delta_of(1500, 1700, 200, &third);
    let alone = Bucket::with_base();
    alone.delta(BASE + 1, 1499, 6);
    alone.delta_of(1500, 1700, 200, &third);
    let (got, want) = (b.compact(&[]), alone.compact(&[]));
    assert_eq!(
        (&got["hash_kv"], &got["snapshot"]),
        (&want["hash_kv"], &want["snapshot"])
    );
    assert_eq!(ids(&b.list(&["--deep"])).len(), 3);
    assert_eq!(revision(third.last().unwrap()), 1700);
}

#[test]
fn a_second_restore_may_lie_past_the_end_of_the_first_branch() {
    let third = |b: &Bucket| alter(alter(b.events(1551, 1650), b"another history"), b" and on");
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.altered_delta(1201, 1600, 100);
    b.delta_of(1551, 1650, 200, &third(&b));
    let alone = Bucket::with_base();
    alone.delta(BASE + 1, 1200, 6);
    alone.altered_delta(1201, 1550, 100);
    alone.delta_of(1551, 1650, 200, &third(&alone));
    let (got, want) = (b.compact(&[]), alone.compact(&[]));
    assert_eq!(got["revision"], 1650);
    assert_eq!(got["hash_kv"], want["hash_kv"]);
    assert!(got["timeline"].as_str().unwrap().starts_with("r1551-"));
}

#[test]
fn a_late_full_of_the_old_branch_is_no_base_of_the_new_one() {
    // A short new branch. The late full does not contradict it: its records of those revisions have been
    // overwritten since.
    let json = |revision: i64, version: i64, value: &str| {
        serde_json::json!({"etcdEvent": {"kv": {
            "key": "aG90", "create_revision": BASE + 1, "mod_revision": revision,
            "version": version, "value": value,
        }}, "time": "2026-11-21T00:00:00Z"})
    };
    let events = |first: i64, last: i64, value: &str| -> Vec<Value> {
        (first..=last).map(|r| json(r, r - BASE, value)).collect()
    };
    let b = Bucket::with_base();
    b.delta_of(BASE + 1, 1499, 6, &events(BASE + 1, 1499, "YQ=="));
    let made = b.compact(&[]);
    let v2 = b.path().join("v2");
    let late = format!(
        "Full-00000000-00001499-{}.gz",
        crate::support::made_backups::T0 + 150
    );
    std::fs::rename(v2.join(made["snapshot"].as_str().unwrap()), v2.join(late)).unwrap();
    b.delta_of(1201, 1230, 100, &events(1201, 1230, "Yg=="));
    b.delta_of(1231, 1300, 200, &events(1231, 1300, "Yg=="));
    let result = b.compact(&[]);
    assert_eq!(
        (result["status"].as_str(), result["revision"].as_i64()),
        (Some("Succeeded"), Some(1300))
    );
    assert!(
        result["timeline"].as_str().unwrap().starts_with("r1201-"),
        "{result}"
    );
    assert_eq!(b.compact(&["--timeline", "main"])["revision"], 1499);
}

/// Whoever can write may forge a history with each small delta. At most 100 are told apart, so time and memory
/// grow only in proportion.
/// Empty records before, between and behind the snapshots: more than the limit of timelines.
#[test]
fn forged_records_hide_no_usable_full() {
    let b = with_old_branch();
    for n in 0..202 {
        let name = format!("Full-00000000-00000009-{}.gz", T0 - 100 + n);
        b.put(&format!("deltafold-timelines/{name}"), b"");
    }
    let data = b.path().join("new");
    let restore = ["--dry-run", "--data-dir", data.to_str().unwrap()];
    // The deltas are behind records without a full.
    let restored = b.succeeds("restore", &restore);
    assert_eq!(restored["revision"], BASE, "{restored:#}");
    assert!(
        restored["warnings"]
            .to_string()
            .contains("no full snapshot of it was saved"),
        "{restored:#}"
    );
}

#[test]
fn a_writer_of_contradicting_deltas_stops_no_restore_and_makes_gc_remove_nothing() {
    let b = with_old_branch();
    for i in 0..150 {
        let forged = alter(b.events(1499, 1501), format!("forged {i}").as_bytes());
        b.delta_of(1499, 1501, 20 + i, &forged);
    }
    let names = b.names();
    let list = b.succeeds("list", &["--deep"]);
    let snapshots = list["snapshots"].as_array().unwrap().iter();
    let ids: BTreeSet<&str> = snapshots.filter_map(|s| s["timeline"].as_str()).collect();
    assert_eq!(ids.len(), 100);
    let problems = list["problems"].as_array().unwrap();
    let problem = problems.iter().find(|p| p["reason"] == "TooManyTimelines");
    let left_out = problem.unwrap()["snapshots"].as_array().unwrap();
    // The main timeline and the newest forged ones are told apart.
    assert_eq!(left_out.len(), 150 - 99);
    let newest = format!("v2/Incr-00001499-00001501-{}.gz", T0 + 20 + 51);
    assert!(left_out.iter().all(|path| path.as_str() < Some(&newest)));

    let all = [&["--apply"], &NEWEST_FULL[..]].concat();
    let (code, result, stderr) = b.run("gc", &all);
    assert_eq!(code, 0, "{result:#} {stderr}");
    assert_eq!(b.names(), names);
    let restored = b.compact(&["--timeline", "main"]);
    assert_eq!(restored["hash_kv"], own_hash());
}
