//! Chains of hundreds of deltas: a point in time reads few of them, text output stays short, and a key's
//! history does not depend on the number of threads.

use crate::support::gc_history::NEWEST_FULL;
use crate::support::made_backups::{BASE, Bucket, T0, revision};
use crate::support::{deltafold, run_json, succeed};
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;
use std::fs;
use std::path::Path;

const DELTAS: i64 = 300;
const REVISIONS: i64 = 5;
const NEWEST: i64 = BASE + DELTAS * REVISIONS;

/// Returns the time of a revision's event: every five minutes there is a delta with five events.
fn seen(revision: i64) -> DateTime<Utc> {
    let base = DateTime::from_timestamp(T0, 0).unwrap();
    base + TimeDelta::minutes(revision - BASE - 1)
}

fn long_chain() -> Bucket {
    let b = Bucket::with_base();
    for n in 0..DELTAS {
        let (start, last) = (BASE + n * REVISIONS + 1, BASE + (n + 1) * REVISIONS);
        let mut events = b.events(start, last);
        for e in &mut events {
            e["time"] = seen(revision(e)).to_rfc3339().into();
        }
        b.delta_of(start, last, (n + 1) * 300, &events);
    }
    b
}

/// Returns the size of the largest object of a kind.
fn largest(b: &Bucket, kind: &str) -> u64 {
    let of_kind = b.names().into_iter().filter(|n| n.starts_with(kind));
    let bytes = of_kind.map(|n| fs::metadata(b.path().join("v2").join(n)).unwrap().len());
    bytes.max().unwrap()
}

/// Returns the text output of a command.
fn printed(args: &[&str], store: &Path) -> String {
    let mut c = deltafold();
    c.args(args).arg(store);
    let output = c.output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_plan_of_a_point_in_time_reads_the_deltas_around_it() {
    let b = long_chain();
    let (full, delta) = (largest(&b, "Full"), largest(&b, "Incr"));
    for at in [BASE + 1, BASE + 700, BASE + 701, NEWEST - 1, NEWEST] {
        let time = (seen(at) + TimeDelta::seconds(30)).to_rfc3339();
        let plan = b.compact(&["--dry-run", "--or-newest", "--time", &time]);
        assert_eq!(plan["revision"], at);
        let read = plan["bytes_read"].as_u64().unwrap();
        assert!(read <= full + 3 * delta, "{read} of {full} and {delta}");
    }
    // Deltas far from the point in time are not read.
    for name in b.names().iter().filter(|n| n.starts_with("Incr")) {
        let start: i64 = name[5..13].parse().unwrap();
        if !(BASE + 690..=BASE + 710).contains(&start) {
            fs::write(b.path().join("v2").join(name), "damaged").unwrap();
        }
    }
    let time = seen(BASE + 701).to_rfc3339();
    let plan = b.compact(&["--dry-run", "--time", &time]);
    assert_eq!(plan["revision"], BASE + 701);
}

#[test]
fn a_duration_of_history_reads_few_deltas_more() {
    let read = |keep: &str| {
        let b = long_chain();
        let result = b.compact(&["--keep-history", keep]);
        let compacted = result["compact_revision"].as_i64().unwrap();
        (compacted, result["bytes_read"].as_u64().unwrap(), b)
    };
    let (_, plain, b) = read("latest");
    let (compacted, bytes, _) = read("100m");
    assert_eq!(compacted, NEWEST - 100);
    assert!(bytes <= plain + 4 * largest(&b, "Incr"), "{bytes} {plain}");
}

#[test]
fn people_are_shown_the_ends_of_a_long_list_and_json_holds_all() {
    let b = long_chain();
    for n in 0..50 {
        b.put(&format!("v2/stranger-{n:02}"), b"not ours");
    }
    let first = format!(
        "Incr-{:08}-{:08}-{}.gz",
        BASE + 1,
        BASE + REVISIONS,
        T0 + 300
    );
    let created = T0 + DELTAS * 300;
    let last = format!(
        "Incr-{:08}-{NEWEST:08}-{created}.gz",
        NEWEST - REVISIONS + 1
    );
    let fold = ["compact", "--dry-run", "--store"];
    let target = b.path().join("new.db");
    let target = target.to_str().unwrap();
    let restore = ["restore", "--dry-run", "--to-snapshot", target, "--store"];
    for args in [&fold[..], &restore] {
        let text = printed(args, b.path());
        assert!(text.contains(&first), "{text}");
        let end = format!("… {last}, 296 more: --output json has all\n");
        assert!(text.contains(&end), "{text}");
        assert!(text.lines().count() < 30, "{text}");
        let mut c = deltafold();
        c.args(args).arg(b.path()).args(["--output", "json"]);
        let json = succeed(&mut c);
        assert_eq!(json["deltas"].as_array().map(Vec::len), Some(300));
        let warning = json["warnings"][0].as_str();
        if let Some(warning) = warning {
            assert!(warning.contains("v2/stranger-49 (46 more: "), "{warning}");
        }
    }
    // `list` shows every snapshot, but shortens the list of foreign objects.
    let text = printed(&["list", "--store"], b.path());
    let end = "… v2/stranger-49, 46 more: --output json has all\n";
    assert!(text.contains(end) && text.contains(&first), "{text}");
    let problems = &b.list(&[])["problems"];
    let strangers = problems.as_array().unwrap().iter().find(|p| {
        let snapshots = p["snapshots"].as_array();
        snapshots.is_some_and(|s| s.len() == 50)
    });
    assert!(strangers.is_some(), "{problems}");

    // A newer full makes all 300 deltas superfluous: the text gives their number instead of a line for each.
    b.compact(&[]);
    let gc = [&["gc"], &NEWEST_FULL[..], &["--store"]].concat();
    let text = printed(&gc, b.path());
    assert!(
        text.contains("delete        300 ") || text.contains(" 300 "),
        "{text}"
    );
    assert!(text.contains("more: --output json has all"), "{text}");
    assert!(text.lines().count() < 60, "{text}");
    let to = tempfile::tempdir().unwrap();
    let from = b.path().to_str().unwrap();
    let copy = ["copy", "--dry-run", "--from", from, "--to"];
    let text = printed(&copy, to.path());
    assert!(text.contains("more: --output json has all"), "{text}");
    assert!(text.lines().count() < 60, "{text}");
}

#[test]
fn a_history_does_not_depend_on_threads() {
    let b = long_chain();
    // A second delta repeats some of the events with other times. The result must not depend on which one a
    // thread reads first.
    let mut events = b.events(BASE + 1, BASE + 40);
    for e in &mut events {
        e["time"] = "2027-01-01T00:00:00Z".into();
    }
    b.delta_of(BASE + 3, BASE + 38, 86_400, &events[2..38]);
    let key = |e: &Value| e["etcdEvent"]["kv"]["key"].as_str().unwrap().to_owned();
    let key_base64 = key(&b.events(BASE + 20, BASE + 20)[0]);
    let changes = b.events(BASE + 1, NEWEST);
    let changes: Vec<i64> = changes
        .iter()
        .filter(|e| key(e) == key_base64)
        .map(revision)
        .collect();
    let key = decoded(&key_base64);
    let history = |threads: &str| {
        let mut c = deltafold();
        c.args(["history", &key, "--threads", threads, "--output", "json"]);
        c.arg("--store").arg(b.path());
        succeed(&mut c)
    };
    let one = history("1");
    let revisions = one["versions"].as_array().unwrap().iter();
    let revisions = revisions.map(|v| v["revision"].as_i64().unwrap());
    let revisions: Vec<i64> = revisions.filter(|&r| r > BASE).collect();
    assert_eq!(revisions, changes);
    for _ in 0..3 {
        assert_eq!(history("8"), one);
    }
    // Of several damaged deltas the first is reported, whatever the number of threads.
    let deltas: Vec<String> = b
        .names()
        .into_iter()
        .filter(|n| n.starts_with("Incr"))
        .collect();
    for name in &deltas[100..200] {
        fs::write(b.path().join("v2").join(name), "damaged").unwrap();
    }
    for threads in ["1", "8"] {
        let mut c = deltafold();
        c.args(["history", &key, "--threads", threads, "--output", "json"]);
        c.arg("--store").arg(b.path());
        let (code, json, _) = run_json(&mut c);
        let message = json["message"].as_str().unwrap();
        assert!(code == 65 && message.contains(&deltas[100]), "{message}");
    }
}

#[test]
fn one_key_is_read_from_the_newest_delta_that_changed_it() {
    let b = long_chain();
    let key = |e: &Value| e["etcdEvent"]["kv"]["key"].as_str().unwrap().to_owned();
    let events = b.events(BASE + 1, NEWEST);
    let run = |args: &[&str], revision: i64| {
        let revision = revision.to_string();
        let (code, json, _) = b.run("get", &[args, &["--revision", &revision]].concat());
        (code, json["keys"].clone())
    };
    let (mut there, mut gone) = (0, 0);
    for at in (BASE..NEWEST).step_by(53) {
        // A key that changed shortly before, and one that changes later.
        for event in [at - BASE, (at - BASE + 400).min(NEWEST - BASE - 1)] {
            let key = decoded(&key(&events[event as usize]));
            let (code, one) = run(&[&key], at);
            let (_, of_prefix) = run(&["--prefix", &key], at);
            let is_it = |k: &&Value| k["key"] == key.as_str();
            let expected = of_prefix.as_array().unwrap().iter().find(is_it);
            assert_eq!(one.get(0), expected, "{key} at {at}");
            assert_eq!(code, if expected.is_some() { 0 } else { 66 });
            *(if code == 0 { &mut there } else { &mut gone }) += 1;
        }
    }
    assert!(there > 10 && gone > 0, "{there} {gone}");
    // Damage in deltas before the key's last change does not matter; damage in the newest delta does.
    let mut newest = events.iter().rev().take(200).map(|e| decoded(&key(e)));
    let newest = newest.find(|key| run(&[key], NEWEST).0 == 0).unwrap();
    let deltas: Vec<String> = b
        .names()
        .into_iter()
        .filter(|n| n.starts_with("Incr"))
        .collect();
    let damage = |name: &String| fs::write(b.path().join("v2").join(name), "damaged").unwrap();
    deltas[..250].iter().for_each(damage);
    assert_eq!(run(&[&newest], NEWEST).0, 0);
    damage(&deltas[299]);
    assert_eq!(run(&[&newest], NEWEST).0, 65);
}

fn decoded(base64: &str) -> String {
    let bytes = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, base64);
    String::from_utf8(bytes.unwrap()).unwrap()
}
