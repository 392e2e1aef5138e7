//! Hundreds of deltas: a point in time reads few of them, and what is printed for people stays short.

use crate::support::buckets::{BASE, Bucket, T0, revision};
use crate::support::{deltafold, run_json};
use chrono::{DateTime, TimeDelta, Utc};
use std::fs;
use std::path::Path;

const DELTAS: i64 = 300;
const REVISIONS: i64 = 5;
const NEWEST: i64 = BASE + DELTAS * REVISIONS;

/// When the event of a revision was seen: a delta of five is taken every five minutes.
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

/// Bytes of the largest object of a kind.
fn largest(b: &Bucket, kind: &str) -> u64 {
    let of_kind = b.names().into_iter().filter(|n| n.starts_with(kind));
    let bytes = of_kind.map(|n| fs::metadata(b.path().join("v2").join(n)).unwrap().len());
    bytes.max().unwrap()
}

/// What a command prints for people.
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
        let plan = b.compact(&["--dry-run", "--time", &time]);
        assert_eq!(plan["revision"], at);
        let read = plan["bytes_read"].as_u64().unwrap();
        assert!(read <= full + 3 * delta, "{read} of {full} and {delta}");
    }
    // Nobody asks what is far from it.
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
        let (code, json, stderr) = run_json(&mut c);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(json["deltas"].as_array().map(Vec::len), Some(300));
        let warning = json["warnings"][0].as_str();
        if let Some(warning) = warning {
            assert!(warning.contains("v2/stranger-49 (46 more: "), "{warning}");
        }
    }
    // `list` shows every snapshot, and the strangers by the ends.
    let text = printed(&["list", "--store"], b.path());
    let end = "… v2/stranger-49, 46 more: --output json has all\n";
    assert!(text.contains(end) && text.contains(&first), "{text}");
    let problems = &b.list(&[])["problems"];
    let strangers = problems.as_array().unwrap().iter().find(|p| {
        let snapshots = p["snapshots"].as_array();
        snapshots.is_some_and(|s| s.len() == 50)
    });
    assert!(strangers.is_some(), "{problems}");

    // A newer full makes all deltas go: their number and bytes are told for each reason.
    b.compact(&[]);
    let gc = ["gc", "--policy", "limit", "--limit", "1", "--store"];
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
