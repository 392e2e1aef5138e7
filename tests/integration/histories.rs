//! An operator sets an etcd back, which makes revisions repeat with other content. The newest restore is the history that
//! is live, record by record, and every revision that is promised is one that an etcd had.

use crate::support::etcd::{EtcdVersion, Signal};
use crate::support::follower::{QUICK, snapshot};
use crate::support::gc_history::NEWEST_FULL;
use crate::support::held_connection::HoldingProxy;
use crate::support::recorded_etcd::{RecordedEtcd, with_etcd};
use crate::support::restorable::{Checked, Prefix};
use crate::support::truth::Truth;
use crate::support::{copy_dir, deltafold, run_json};
use chrono::Utc;
use deltafold::backup::SnapshotName;
use etcd_client::TxnOp;
use serde_json::{Value, json};
use std::fs;
use std::thread::sleep;
use std::time::Duration;

/// Runs a command on the prefix.
fn run(world: &RecordedEtcd, args: &[&str]) -> (i32, Value, String) {
    let mut command = deltafold();
    command
        .args(args)
        .args(["--store", &world.prefix.url, "--output", "json"]);
    run_json(&mut command)
}

/// Asserts that the newest state is that of the live etcd, and that all that is promised was there once.
#[track_caller]
fn check(world: &RecordedEtcd, left: &[&Truth]) -> Checked {
    let revision = world.revision();
    world.truth.wait_for(revision);
    let truths: Vec<&Truth> = [&world.truth]
        .into_iter()
        .chain(left.iter().copied())
        .collect();
    let checked = world.prefix.check_every_restorable(&truths, world.seed, 40);
    let data = world.folder().join("newest");
    let (code, json, log) = run(
        world,
        &["restore", "--dry-run", "--data-dir", data.to_str().unwrap()],
    );
    assert_eq!(
        (code, &json["revision"]),
        (0, &json!(revision)),
        "{json:#}\n{log}"
    );
    let newest = &checked.timelines[json["timeline"].as_str().unwrap()];
    assert_eq!(newest.newest.get(&0), Some(&revision), "{checked:?}");
    let (code, verified, log) = run(world, &["verify", "--level", "fold", "--no-record"]);
    assert_eq!(code, 0, "{verified:#}\n{log}");
    checked
}

/// Saves, then compacts the store; the newest state stays the same.
fn check_and_compact(world: &RecordedEtcd, left: &[&Truth]) {
    check(world, left);
    let (code, json, log) = run(world, &["compact"]);
    assert_eq!(code, 0, "{json:#}\n{log}");
    check(world, left);
}

fn why(ended: &crate::support::follower::Ended) -> &str {
    ended.json["full_reason"].as_str().unwrap_or_default()
}

/// A delta begins with a change that the old history has at the same revision, too: it follows its full.
#[test]
fn a_delta_follows_its_full_though_its_first_change_is_in_the_old_history() {
    for partial in [false, true] {
        with_etcd(EtcdVersion::V3_6, |world| {
            let release = |world: &RecordedEtcd, who: &str| match partial {
                false => _ = world.delete("/lock"),
                true => {
                    let state = format!("{who} released");
                    let ops = vec![
                        TxnOp::delete("/lock", None),
                        TxnOp::put("/state", state, None),
                    ];
                    world.txn(ops);
                }
            };
            world.put_many("/base/", 6, 10);
            world.delta(&[]);
            let early = world.checkpoint();
            world.put_many("/old/", 28, 10);
            world.delta(&[]);
            world.put("/lock", "A holds");
            release(world, "A");
            world.put_many("/old/more/", 22, 10);
            world.delta(&[]);
            let lock = early.revision + 29;
            let old = world.set_back_to(&early, None);
            world.put_many("/new/", 28, 10);
            assert_eq!(world.put("/lock", "B holds"), lock);
            let ended = world.delta(&[]);
            assert_eq!(why(&ended), "ClusterBehind", "{}", ended.json);
            release(world, "B");
            world.put_many("/new/after/", 8, 10);
            world.delta(&[]);
            let checked = check(world, &[&old]);
            assert_eq!(checked.timelines.len(), 2, "{checked:?}");
            check_and_compact(world, &[&old]);
        });
    }
}

/// etcd passes the last saved revision again, and both histories made the same change there.
#[test]
fn the_same_change_at_the_last_saved_revision_proves_nothing() {
    for (follows, deletes) in [(false, true), (false, false), (true, true), (true, false)] {
        with_etcd(EtcdVersion::V3_6, |world| {
            let last = |world: &RecordedEtcd, who: &str| match deletes {
                true => {
                    world.put("/lock", who);
                    world.delete("/lock")
                }
                false => world.put("/heartbeat", "ok"),
            };
            world.put("/heartbeat", "ok");
            world.put_many("/base/", 10, 10);
            world.delta(&[]);
            let early = world.checkpoint();
            let mut follower = follows.then(|| world.follow(&QUICK));
            world.put("/only-in-old", "A");
            let saved = last(world, "A");
            match &mut follower {
                Some(follower) => {
                    follower.wait_saved(&world.prefix, saved);
                    follower.signal(Signal::STOP);
                }
                None => drop(world.delta(&[])),
            }
            let old = world.set_back_to(&early, None);
            world.put("/only-in-new", "B");
            assert_eq!(last(world, "B"), saved);
            world.put("/after", "C");
            match follower {
                Some(mut follower) => {
                    follower.signal(Signal::CONT);
                    follower.wait_log(&["a new timeline begins"]);
                    follower.terminate().succeeded();
                }
                None => {
                    let ended = world.delta(&[]);
                    assert_eq!(why(&ended), "HistoryMismatch", "{}", ended.json);
                }
            }
            check_and_compact(world, &[&old]);
        });
    }
}

/// Back too far, then forward to a later point of the first history: that is another history, and no two clusters.
#[test]
fn two_restores_in_a_row() {
    for (compacts, kind, to) in [
        (true, "delta", 130),
        (true, "full", 130),
        (false, "delta", 110),
        (false, "full", 110),
    ] {
        with_etcd(EtcdVersion::V3_6, |world| {
            let put_to = |world: &RecordedEtcd, who: &str, revision: i64| {
                while world.revision() < revision {
                    world.put(format!("/k/{}", world.revision() % 20), who);
                }
            };
            put_to(world, "A", 50);
            world.snapshot("full", &[]).succeeded();
            put_to(world, "A", 100);
            world.delta(&[]);
            if compacts {
                world.compact(95);
            }
            put_to(world, "A", 120);
            world.snapshot("full", &[]).succeeded();
            put_to(world, "A", 130);
            world.snapshot(kind, &[]).succeeded();
            let a = world.restored_to(50, None, None);
            put_to(world, "B", 60);
            world.snapshot(kind, &[]).succeeded();
            let b = world.restored_to(to, Some("main"), Some(&a));
            put_to(world, "C", to + 5);
            let ended = world.snapshot(kind, &[]).succeeded();
            // Of B nothing is left in C's etcd: its full is behind a hole.
            assert_eq!(ended.json["timeline_began"], !compacts, "{}", ended.json);
            assert_eq!(ended.json["proven"], false, "{}", ended.json);
            let checked = check(world, &[&a, &b]);
            let timelines = if compacts { 2 } else { 3 };
            assert_eq!(checked.timelines.len(), timelines, "{checked:?}");
            for _ in 0..3 {
                put_to(world, "C", world.revision() + 3);
                let ended = world.snapshot(kind, &[]).succeeded();
                assert_eq!(ended.json["timeline_began"], false, "{}", ended.json);
            }
            check_and_compact(world, &[&a, &b]);
            // The older revisions are those of the history that was left.
            let data = world.folder().join("path");
            // Across a hole nobody looks for another history, but the message names it.
            let timeline: &[&str] = if compacts {
                &["--timeline", "main"]
            } else {
                &[]
            };
            let restore = [
                "restore",
                "--data-dir",
                data.to_str().unwrap(),
                "--revision",
                "80",
            ];
            let (code, json, log) = run(world, &[&restore[..], timeline].concat());
            assert_eq!(code, 0, "{json:#}\n{log}");
            let get = ["get", "--revision", "80", "/k/3"];
            let (_, keys, _) = run(world, &[&get[..], timeline].concat());
            assert!(
                keys.to_string().contains("QQ==") || keys.to_string().contains("\"A\""),
                "{keys:#}"
            );
        });
    }
}

/// etcd starts empty with the same ID: status does not call that healthy, and says how to get back what was lost.
#[test]
fn a_wiped_etcd_is_a_finding_until_a_day_has_passed() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/registry/secrets/", 40, 10);
        let saved = world.revision();
        world.delta(&[]);
        let (code, json, _) = run(world, &["status"]);
        assert_eq!((code, &json["verdict"]), (0, &json!("Healthy")), "{json:#}");
        let old = world.wiped();
        let ended = world.delta(&[]);
        assert_eq!(why(&ended), "ClusterBehind", "{}", ended.json);
        let (code, json, _) = run(world, &["status"]);
        assert_eq!(
            (code, &json["verdict"], &json["reason"]),
            (75, &json!("SetBack"), &json!("SetBack")),
            "{json:#}"
        );
        let message = json["message"].as_str().unwrap();
        assert!(
            message.contains(&format!("--timeline main --revision {saved}")),
            "{message}"
        );
        let (code, json, _) = run(world, &["status", "--set-back-age", "0s"]);
        assert_eq!((code, &json["verdict"]), (0, &json!("Healthy")), "{json:#}");
        check(world, &[&old]);
        // What the message says works.
        let words: Vec<&str> = message
            .split_once("deltafold ")
            .unwrap()
            .1
            .split(' ')
            .collect();
        let data = world.folder().join("back");
        let mut restore = deltafold();
        restore.args(words.iter().map(|w| {
            if *w == "DIR" {
                data.to_str().unwrap()
            } else {
                w
            }
        }));
        let (code, json, log) = run_json(restore.args(["--output", "json"]));
        assert_eq!(
            (code, &json["revision"], &json["live_keys"]),
            (0, &json!(saved), &json!(40)),
            "{json:#}\n{log}"
        );
    });
}

/// Of two stores, the one with the live history is restored, though a copy of the history that was left ends higher.
#[test]
fn the_live_history_is_restored_before_a_copy_of_the_old_one() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let back = world.put_many("/k/", 20, 10);
        world.snapshot("full", &[]).succeeded();
        let old_end = world.put_many("/a/", 100, 10);
        world.delta(&[]);
        let copy = world.folder().join("copy");
        let mut copying = deltafold();
        copying.args([
            "copy",
            "--output",
            "json",
            "--from",
            &world.prefix.url,
            "--to",
        ]);
        let (code, json, log) = run_json(copying.arg(&copy));
        assert_eq!(code, 0, "{json:#}\n{log}");
        world.restored_to(back, None, None);
        let new_end = world.put_many("/b/", 20, 10);
        assert!(new_end < old_end);
        world.delta(&[]);
        let data = world.folder().join("restored");
        let (copy, data) = (copy.to_str().unwrap(), data.to_str().unwrap());
        let args = ["restore", "--dry-run", "--data-dir", data, "--store", copy];
        let (code, json, log) = run(world, &args);
        assert_eq!(
            (code, &json["revision"]),
            (0, &json!(new_end)),
            "{json:#}\n{log}"
        );
        let left = &json["candidates"][0];
        assert_eq!(
            (&left["status"], &left["reason"]),
            (&json!("Excluded"), &json!("HistoryMismatch")),
            "{left:#}"
        );
        // If the old history is named, it is restored.
        let revision = old_end.to_string();
        let old = [&args[..], &["--timeline", "main", "--revision", &revision]].concat();
        let (code, json, log) = run(world, &old);
        assert_eq!(
            (code, &json["revision"]),
            (0, &json!(old_end)),
            "{json:#}\n{log}"
        );
    });
}

/// A follower that began at an empty etcd has seen no change of the revision that it began at.
#[test]
fn a_follower_from_the_first_revision_on_compares_what_it_holds() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let args = ["--delta-period", "1h", "--full-schedule", "0 0 29 2 *"];
        let mut follower = world.follow(&args);
        follower.wait_log(&["watching"]);
        world.put("/k/1", "A");
        world.put("/k/2", "A");
        sleep(Duration::from_millis(500));
        follower.signal(Signal::STOP);
        let old = world.wiped();
        world.put_many("/k/", 10, 10);
        follower.signal(Signal::CONT);
        follower.wait_log(&["it has another history"]);
        follower.terminate();
        let checked = check(world, &[&old]);
        assert_eq!(checked.timelines.len(), 2, "{checked:?}");
    });
}

/// A time is a time of the world: what the cluster had then, though it was set back later.
#[test]
fn a_time_before_the_restore_is_answered_by_the_history_that_was_live() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put("a", "1");
        world.delta(&[]);
        let early = world.checkpoint();
        world.put("a", "2");
        world.delta(&[]);
        sleep(Duration::from_millis(2100));
        let noon = chrono::Utc::now();
        sleep(Duration::from_millis(1100));
        world.put("a", "noon");
        world.delta(&[]);
        let gap = chrono::Utc::now() + chrono::TimeDelta::milliseconds(1100);
        sleep(Duration::from_millis(4000));
        let old = world.set_back_to(&early, None);
        world.put("b", "new");
        world.delta(&[]);
        check(world, &[&old]);
        // The new history has its own times, also at revisions that the old one has, too.
        let (_, json, _) = run(world, &["list", "--deep"]);
        for range in json["restorable"].as_array().unwrap() {
            let last: chrono::DateTime<Utc> = range["last_time"].as_str().unwrap().parse().unwrap();
            assert_eq!(last > gap, range["timeline"] != "main", "{json:#}");
        }
        let time = |t: chrono::DateTime<chrono::Utc>| t.to_rfc3339();
        let (code, json, log) = run(world, &["get", "a", "--time", &time(noon)]);
        assert_eq!(code, 0, "{json:#}\n{log}");
        assert!(
            json.to_string().contains("\"2\"") || json.to_string().contains("Mg=="),
            "{json:#}"
        );
        let (code, json, _) = run(world, &["get", "a", "--time", &time(gap)]);
        assert_eq!(
            (code, &json["reason"]),
            (66, &json!("OutOfRange")),
            "{json:#}"
        );
        let message = json["message"].as_str().unwrap();
        assert!(
            message.contains("main") && message.contains("no history covers"),
            "{message}"
        );
        let data = world.folder().join("gap");
        let args = [
            "restore",
            "--dry-run",
            "--or-newest",
            "--data-dir",
            data.to_str().unwrap(),
            "--time",
        ];
        let (code, json, log) = run(world, &[&args[..], &[&time(gap)]].concat());
        assert_eq!(
            (code, &json["timeline"], &json["revision"]),
            (0, &json!("main"), &json!(4)),
            "{json:#}\n{log}"
        );
    });
}

/// A snapshotter that was killed between the record and its full leaves a record without a full. The next run takes a
/// full, and nothing is hidden meanwhile.
#[test]
fn a_record_without_its_full_hides_nothing() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 10);
        world.delta(&[]);
        world.put_many("/b/", 5, 10);
        world.delta(&[]);
        check(world, &[]);
        let records = world.folder().join("store/deltafold-timelines");
        fs::create_dir_all(&records).unwrap();
        let second = chrono::Utc::now().timestamp() + 5;
        let orphan = format!("Full-00000000-00000004-{second}.gz");
        fs::write(records.join(&orphan), "not a record\n").unwrap();
        check(world, &[]);
        world.put_many("/c/", 5, 10);
        let ended = world.delta(&[]);
        assert_eq!(why(&ended), "NoFull", "{}", ended.json);
        assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
        check(world, &[]);
        // A delta behind a forged record is not used, unless the user asks for the history before it.
        world.put_many("/d/", 5, 10);
        world.delta(&[]);
        let delta = world.prefix.deltas().last().unwrap().clone();
        let forged = format!("Full-00000000-00000009-{}.gz", delta.created);
        fs::write(records.join(forged), "{}").unwrap();
        let data = world.folder().join("new");
        let restore = ["restore", "--dry-run", "--data-dir", data.to_str().unwrap()];
        let (code, json, log) = run(world, &restore);
        assert_eq!(
            (code, &json["revision"]),
            (0, &json!(delta.start.0 - 1)),
            "{json:#}\n{log}"
        );
        assert!(
            json["warnings"]
                .to_string()
                .contains("no full snapshot of it was saved"),
            "{json:#}"
        );
        let timeline = json["timeline"].as_str().unwrap().to_owned();
        let (code, json, log) = run(world, &[&restore[..], &["--timeline", &timeline]].concat());
        assert_eq!(
            (code, &json["revision"]),
            (0, &json!(delta.last.0)),
            "{json:#}\n{log}"
        );
        // The next run heals it.
        let ended = world.delta(&[]);
        assert_eq!(why(&ended), "NoFull", "{}", ended.json);
        check(world, &[]);
    });
}

/// A follower that held events of the old history while another snapshotter began the new one saves them before the
/// wall.
#[test]
fn a_late_follower_writes_before_the_wall() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 10);
        let early = world.checkpoint();
        let mut follower = world.follow(&["--delta-period", "1h", "--full-schedule", "0 0 29 2 *"]);
        world.put_many("/saved/", 20, 10);
        world.delta(&[]);
        let held = world.put_many("/held/", 10, 10);
        follower.wait_log(&["watching"]);
        sleep(Duration::from_secs(2));
        follower.signal(Signal::STOP);
        let old = world.set_back_to(&early, None);
        world.put_many("/new/", 3, 10);
        let live = Utc::now().to_rfc3339();
        sleep(Duration::from_secs(3));
        // A single run does not wait for the lock of a follower.
        let ended = world.delta(&[]);
        assert_eq!(why(&ended), "ClusterBehind", "{}", ended.json);
        let wall = world.prefix.fulls().last().unwrap().created;
        world.put_many("/new/", 40, 10);
        follower.signal(Signal::CONT);
        follower.wait_until("the held events", || {
            let deltas = world.prefix.deltas();
            deltas.iter().any(|d| d.last.0 == held && d.created < wall)
        });
        world.delta(&[]);
        follower.terminate();
        let checked = check(world, &[&old]);
        assert_eq!(checked.newest_of(1), held, "{checked:?}");
        // The late name covers no moment at which the new history was live.
        let (code, json, _) = run(world, &["get", "/held/00000", "--time", &live]);
        assert_eq!(
            (code, &json["reason"]),
            (66, &json!("OutOfRange")),
            "{json:#}"
        );
        let message = json["message"].as_str().unwrap();
        assert!(message.contains("its last change"), "{message}");
    });
}

/// The clock was ahead for one delta, so the record of the next history has a late name. What it says of when it was
/// written counts.
#[test]
fn a_time_after_a_clock_was_ahead_is_answered_by_the_history_that_was_live() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put("a", "first");
        world.delta(&[]);
        let early = world.checkpoint();
        world.put("a", "old");
        world.delta(&[]);
        let ahead = world.prefix.deltas().pop().unwrap();
        let later = SnapshotName {
            created: ahead.created + 600,
            ..ahead.clone()
        };
        let v2 = world.folder().join("store/v2");
        fs::rename(v2.join(ahead.to_string()), v2.join(later.to_string())).unwrap();
        world.set_back_to(&early, None);
        world.put("a", "new");
        let ended = world.delta(&[]);
        assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
        sleep(Duration::from_millis(1100));
        world.put("a", "live");
        world.delta(&[]);
        sleep(Duration::from_millis(1100));
        let live = Utc::now().to_rfc3339();
        sleep(Duration::from_millis(1100));
        world.put("a", "newest");
        world.delta(&[]);
        let (code, json, log) = run(world, &["get", "a", "--time", &live]);
        assert_eq!(code, 0, "{json:#}\n{log}");
        assert!(json.to_string().contains("\"live\""), "{json:#}");
    });
}

/// A run of `snapshot delta` gives all changes since the last one its own time.
#[test]
fn a_time_between_two_runs_says_of_when_the_state_is() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put("a", "1");
        world.delta(&[]);
        sleep(Duration::from_secs(2));
        world.put("a", "2");
        world.put("a", "3");
        sleep(Duration::from_secs(2));
        let between = Utc::now().to_rfc3339();
        sleep(Duration::from_secs(4));
        world.delta(&[]);
        let (code, json, log) = run(world, &["get", "a", "--time", &between]);
        assert_eq!(code, 0, "{json:#}\n{log}");
        assert!(json.to_string().contains("\"1\""), "{json:#}");
        assert!(
            json["warnings"]
                .to_string()
                .contains("were received together"),
            "{json:#}"
        );
        let (_, json, _) = run(world, &["get", "a"]);
        assert!(!json.to_string().contains("received together"), "{json:#}");
    });
}

/// gc removes the history that was left, and the record stays with its full: a late follower finds it.
#[test]
fn a_late_follower_finds_the_record_after_gc() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 10);
        let early = world.checkpoint();
        world.put_many("/a/", 10, 10);
        world.delta(&[]);
        let mut follower = world.follow(&["--delta-period", "4s", "--full-schedule", "0 0 29 2 *"]);
        follower.wait_log(&["watching"]);
        let last = world.put_many("/held/", 10, 10);
        // So that the watch has received them.
        sleep(Duration::from_secs(1));
        follower.signal(Signal::STOP);
        assert!(world.prefix.last_saved() < last);
        let old = world.set_back_to(&early, None);
        while world.revision() < last - 10 {
            world.put("/new", "B");
        }
        let ended = world.delta(&[]);
        assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
        // gc keeps what has a time in the future.
        let gc = [&["gc", "--apply"], &NEWEST_FULL[..]].concat();
        while world.prefix.names().len() > 1 {
            let (code, json, log) = run(world, &gc);
            assert_eq!(code, 0, "{json:#}\n{log}");
            sleep(Duration::from_millis(300));
        }
        follower.signal(Signal::CONT);
        let prefix = world.prefix.clone();
        follower.wait_until("the held events", || !prefix.deltas().is_empty());
        check(world, &[&old]);
        follower.terminate();
        check(world, &[&old]);
    });
}

/// A record that was left in an emptied prefix does not name the first full.
#[test]
fn an_old_record_in_an_emptied_prefix() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let records = world.folder().join("store/deltafold-timelines");
        fs::create_dir_all(&records).unwrap();
        fs::write(records.join("Full-00000000-00000009-1700000000.gz"), "{}").unwrap();
        world.put_many("/a/", 5, 10);
        let began = Utc::now().timestamp();
        let ended = world.snapshot("full", &[]).succeeded();
        assert!(world.prefix.fulls()[0].created >= began, "{}", ended.json);
        let (code, json, _) = run(world, &["status"]);
        assert_eq!(
            (code, json["verdict"].as_str()),
            (0, Some("Healthy")),
            "{json:#}"
        );
    });
}

/// Only a compacted full is left, and what was deleted at its end is not in it: the keys that did not change prove that
/// the history goes on, or that it does not.
#[test]
fn a_compacted_full_that_ends_with_a_deletion() {
    for is_set_back in [false, true] {
        with_etcd(EtcdVersion::V3_6, |world| {
            world.put_many("/kept/", 5, 10);
            world.delta(&[]);
            let early = world.checkpoint();
            world.put_many("/old/", 5, 10);
            world.put("/lock", "A");
            let saved = world.delete("/lock");
            world.delta(&[]);
            let (code, json, log) = run(world, &["compact"]);
            assert_eq!(code, 0, "{json:#}\n{log}");
            let gc = [&["gc", "--apply"], &NEWEST_FULL[..]].concat();
            // gc keeps what has a time in the future.
            while world.prefix.names().len() > 1 {
                let (code, json, log) = run(world, &gc);
                assert_eq!(code, 0, "{json:#}\n{log}");
                sleep(Duration::from_millis(300));
            }
            let mut left = Vec::new();
            if is_set_back {
                left.push(world.set_back_to(&early, None));
                world.put_many("/new/", 5, 10);
                world.put("/lock", "B");
                assert_eq!(world.delete("/lock"), saved);
            }
            world.put_many("/after/", 5, 10);
            let ended = world.delta(&[]);
            assert_eq!(why(&ended), "Unverifiable", "{}", ended.json);
            assert_eq!(ended.json["proven"], false, "{}", ended.json);
            // What the compacted full has is compared.
            assert_eq!(ended.json["timeline_began"], is_set_back, "{}", ended.json);
            let (_, json, _) = run(world, &["status"]);
            let expected = if is_set_back { "SetBack" } else { "Healthy" };
            assert_eq!(json["verdict"], expected, "{json:#}");
            world.put_many("/after/", 9, 10);
            let ended = world.delta(&[]);
            assert_eq!(why(&ended), "", "{}", ended.json);
            check(world, &left.iter().collect::<Vec<_>>());
        });
    }
}

/// Where etcd compacts what was saved last, too little is left to prove anything: B is never spliced to A.
#[test]
fn too_few_equal_changes_prove_nothing() {
    // Whether A's etcd is compacted at its end, how far B's is below it, whether the last change is a deletion, and whether
    // a follower saves B.
    for (a_is_compacted, b_compacts_below, deletes, follows) in [
        (true, None, true, false),
        (true, None, false, true),
        (false, Some(1), true, true),
        (false, Some(1), false, false),
        (false, Some(0), true, false),
        (false, Some(0), false, true),
    ] {
        with_etcd(EtcdVersion::V3_6, |world| {
            let last = |world: &RecordedEtcd, who: &str| {
                world.put(format!("/only-in-{who}"), who);
                match deletes {
                    true => world.delete("/lock"),
                    false => world.put("/lock", "same"),
                }
            };
            world.put("/lock", "held");
            world.put_many("/old/", 5, 10);
            if !a_is_compacted {
                world.snapshot("full", &[]).succeeded();
            }
            world.put("/x", "same");
            let early = world.checkpoint();
            let saved = last(world, "A");
            if a_is_compacted {
                world.compact(saved);
            }
            world.delta(&[]);
            let left = world.set_back_to(&early, None);
            assert_eq!(last(world, "B"), saved);
            world.put("/v", "B");
            let revision = world.put("/v", "B2");
            if let Some(below) = b_compacts_below {
                world.compact(saved - below);
            }
            match follows {
                true => {
                    let mut follower = world.follow(&QUICK);
                    follower.wait_saved(&world.prefix, revision);
                    let ended = follower.terminate().succeeded();
                    assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
                }
                false => {
                    let ended = world.delta(&[]);
                    assert_eq!(ended.json["proven"], false, "{}", ended.json);
                    assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
                }
            }
            let (_, json, _) = run(world, &["status"]);
            assert_eq!(json["verdict"], "SetBack", "{json:#}");
            check_and_compact(world, &[&left]);
        });
    }
}

/// A's last changes are deletions, B makes them later, and compacts: an old key that both have proves nothing, and nothing
/// contradicts. B's full is behind a hole.
#[test]
fn an_old_key_proves_nothing() {
    for kind in ["delta", "full"] {
        with_etcd(EtcdVersion::V3_6, |world| {
            world.put_many("/lock/", 3, 10);
            world.snapshot("full", &[]).succeeded();
            world.put("/x", "unchanged");
            let early = world.checkpoint();
            let saved = world.delete("/lock/");
            world.delta(&[]);
            let left = world.set_back_to(&early, None);
            world.put("/b-only", "B");
            world.delete("/b-only");
            for n in 0..12 {
                world.put("/work", n.to_string());
            }
            let compacted = world.delete("/lock/");
            world.put("/work", "end");
            world.compact(compacted);
            let ended = world.snapshot(kind, &[]).succeeded();
            assert_eq!(ended.json["proven"], false, "{}", ended.json);
            assert_eq!(ended.json["timeline_began"], false, "{}", ended.json);
            assert_eq!(
                ended.json["hole"],
                json!({"first_revision": saved + 1, "last_revision": compacted - 1})
            );
            let (code, json, _) = run(world, &["status"]);
            assert_eq!((code, &json["verdict"]), (0, &json!("Healthy")), "{json:#}");
            let notes = json["problems"].to_string();
            assert!(notes.contains("HistoryNotProven"), "{json:#}");
            check(world, &[&left]);
        });
    }
}

/// etcd stands at the last saved revision, which it has compacted: nothing is saved, until it changes. A full that is asked
/// for has a record.
#[test]
fn an_idle_etcd_that_is_compacted_at_its_end() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 10);
        world.compact(world.revision());
        // A follower proves what no later watch could: it watches while it takes the full.
        let mut follower = world.follow(&QUICK);
        follower.wait_until("a full", || !world.prefix.fulls().is_empty());
        let revision = world.put_many("/a/", 2, 10);
        follower.wait_saved(&world.prefix, revision);
        let ended = follower.terminate().succeeded();
        assert_eq!(
            (&ended.json["fulls"], &ended.json["failures"]),
            (&json!(1), &json!(0))
        );
        let compacted = world.revision();
        world.compact(compacted);
        let ended = world.delta(&[]);
        assert_eq!(ended.json["status"], "NothingToDo", "{}", ended.json);
        assert_eq!(ended.json["proven"], false, "{}", ended.json);
        let before = world.prefix.names();
        let mut follower = world.follow(&QUICK);
        follower.wait_log(&["nothing is saved until it changes"]);
        sleep(Duration::from_secs(3));
        assert_eq!(world.prefix.names(), before);
        let revision = world.put("/b", "1");
        follower.wait_saved(&world.prefix, revision);
        let revision = world.put("/b", "2");
        follower.wait_saved(&world.prefix, revision);
        let ended = follower.terminate().succeeded();
        assert_eq!(ended.json["timeline_began"], false, "{}", ended.json);
        let checked = check(world, &[]);
        assert_eq!(checked.timelines.len(), 1, "{checked:?}");
        world.compact(world.revision());
        let ended = world.snapshot("full", &[]).succeeded();
        assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
        let record = world.prefix.fulls().last().unwrap().to_string();
        let record = world
            .folder()
            .join("store/deltafold-timelines")
            .join(record);
        let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
        assert_eq!(record["cause"], "Unproven");
        let (code, json, _) = run(world, &["status"]);
        assert_eq!((code, &json["verdict"]), (0, &json!("Healthy")), "{json:#}");
        assert!(
            json["problems"].to_string().contains("HistoryNotProven"),
            "{json:#}"
        );
        check(world, &[]);
    });
}

/// etcd is set back after `snapshot delta` has compared histories, and before its full begins. `snapshot full` compares the
/// full with the hash of the members.
#[test]
fn a_full_is_compared_itself() {
    let args = ["--command-timeout", "60s", "--max-full-age", "1s"];
    for again in [0, 3, 10] {
        with_etcd(EtcdVersion::V3_6, |world| {
            world.put_many("/a/", 5, 10);
            world.snapshot("full", &[]).succeeded();
            let early = world.checkpoint();
            world.put_many("/b/", 7, 10);
            world.delta(&[]);
            world.put_many("/b/", 3, 10);
            sleep(Duration::from_secs(1));
            let proxy = HoldingProxy::start(world.etcd.endpoint());
            let through = [proxy.endpoint.clone()];
            // The full takes the last three connections: the state of the cluster, the hashes and the stream.
            let copy = world.folder().join("copy");
            copy_dir(&world.folder().join("store"), &copy);
            let copy = Prefix::local(&copy);
            snapshot("delta", &copy, &through, &args).succeeded();
            proxy.hold(proxy.count() - 2);
            let prefix = world.prefix.clone();
            let running = std::thread::spawn(move || snapshot("delta", &prefix, &through, &args));
            proxy.wait();
            let left = world.set_back_to(&early, None);
            for n in 0..again {
                world.put(format!("/c/{n}"), "B");
            }
            proxy.go_on();
            let ended = running.join().unwrap().succeeded();
            assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
            assert_eq!(ended.json["proven"], false, "{}", ended.json);
            check(world, &[&left]);
        });
    }
}
