//! Backups as they are found: gaps, fulls beyond their names, excluded and foreign objects, the old layout,
//! final snapshots, mixed compressions; and points in time and history on them.

use crate::support::made_backups::{BASE, Bucket, FIXTURE, LAST, T0, revision};
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, expected, fixture_names, run_json, succeed};
use chrono::{DateTime, Utc};
use serde_json::Value;
use std::fs;

fn own_hash() -> u64 {
    expected(FIXTURE).compacted_at_last_revision.hash.into()
}

fn two_deltas() -> Bucket {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.delta(1500, LAST, 9);
    b
}

/// Writes a full of the fixture's history at revision `holds`, under a name that says `says`.
fn full_named(b: &Bucket, holds: i64, says: i64, after: i64, keep: &str) -> String {
    let source = two_deltas();
    let at = holds.to_string();
    let made = source.compact(&["--revision", &at, "--keep-history", keep]);
    let made = source
        .path()
        .join("v2")
        .join(made["snapshot"].as_str().unwrap());
    let name = format!("Full-00000000-{says:08}-{}.gz", T0 + after);
    b.put(&format!("v2/{name}"), &fs::read(made).unwrap());
    name
}

fn reasons(list: &Value) -> Vec<&str> {
    let problems = list["problems"].as_array().unwrap();
    problems
        .iter()
        .map(|p| p["reason"].as_str().unwrap())
        .collect()
}

#[test]
fn a_gap_is_named_and_stops_the_fold() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.delta(1601, LAST, 9);
    let message = b.refuses(&[], 65, "RevisionGap");
    assert!(message.contains("1500 to 1600"), "{message}");
    assert_eq!(reasons(&b.list(&[])), ["RevisionGap"]);
    // The part before the gap can be folded, and a later full needs none of the deltas.
    assert_eq!(b.compact(&["--revision", "1499"])["revision"], 1499);
    full_named(&b, 1700, 1700, 8, "latest");
    assert_eq!(b.compact(&[])["hash_kv"], own_hash());
}

#[test]
fn a_full_may_hold_more_than_its_name_says() {
    for (says, deltas) in [
        // Beyond its name; beyond the end of the first delta; a gap in names that it covers.
        (1400, &[(1401, 1490), (1491, LAST)][..]),
        (1400, &[(1401, 1450), (1451, 1460), (1461, LAST)]),
        (1400, &[(1440, LAST)]),
        (1400, &[(1450, LAST)]),
    ] {
        let b = Bucket::with_base();
        let full = full_named(&b, 1450, says, 5, "latest");
        for (i, &(start, last)) in deltas.iter().enumerate() {
            b.delta(start, last, 6 + i as i64);
        }
        let result = b.compact(&[]);
        assert_eq!(
            (&result["hash_kv"], &result["base"]),
            (&own_hash().into(), &full.into()),
            "{deltas:?}"
        );
        let events = b.events.iter().filter(|e| revision(e) > 1450).count();
        assert_eq!(result["events"], events, "{deltas:?}");
    }
    // It covers a gap after the first delta, and everything that is named.
    let b = Bucket::with_base();
    let full = full_named(&b, 1600, 1300, 5, "all");
    b.delta(1301, 1400, 6);
    b.delta(1601, LAST, 7);
    let result = b.compact(&["--dry-run"]);
    assert_eq!(
        (&result["base"], &result["revision"]),
        (&full.clone().into(), &LAST.into())
    );
    assert_eq!(b.compact(&[])["hash_kv"], own_hash());
    let b = Bucket::with_base();
    full_named(&b, 1600, 1300, 5, "all");
    assert_eq!(b.compact(&["--revision", "1500"])["revision"], 1500);
    // Nothing is newer than what it really holds: there is nothing to do.
    let b = Bucket::with_base();
    full_named(&b, 1450, 1400, 5, "latest");
    b.delta(1401, 1430, 6);
    let result = b.compact(&[]);
    assert_eq!(
        (result["status"].as_str(), result["revision"].as_i64()),
        (Some("NothingToDo"), Some(1450))
    );
    assert_eq!(b.list(&["--deep"])["latest_revision"], 1450);
    // A full must never hold less than its name says.
    let b = Bucket::with_base();
    full_named(&b, 1450, 1460, 5, "latest");
    b.refuses(&[], 65, "NameMismatch");
}

#[test]
fn a_full_with_history_serves_revisions_before_its_end() {
    let b = Bucket::with_base();
    fs::remove_file(b.path().join(format!("v2/Full-00000000-{BASE:08}-{T0}.gz"))).unwrap();
    full_named(&b, 1800, 1800, 5, "all");
    for row in expected(FIXTURE)
        .hash_kv
        .iter()
        .filter(|r| r.revision < 1800)
    {
        let at = row.revision.to_string();
        let result = b.compact(&["--revision", &at, "--keep-history", "all"]);
        assert_eq!(result["status"], "Succeeded");
        assert_eq!(result["hash_kv"], row.hash, "{at}");
        assert_eq!(result["live_keys"], row.live_keys, "{at}");
    }
    let message = b.refuses(&["--revision", "300"], 66, "OutOfRange");
    assert!(message.contains("346 to 1800"), "{message}");
    b.refuses(&["--revision", "1801"], 66, "OutOfRange");
}

#[test]
fn excluded_snapshots_are_counted_and_not_used() {
    let b = two_deltas();
    let bad = format!("Full-00000000-00001499-{}.gz", T0 + 7);
    b.put(&format!("v2/{bad}"), b"damaged");
    b.put(&format!("deltafold-excluded/{bad}"), b"");
    let list = b.list(&[]);
    assert_eq!(list["snapshots"].as_array().unwrap().len(), 4);
    let listed = list["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .find(|s| s["name"] == bad)
        .unwrap();
    assert_eq!(
        (&listed["excluded"], &listed["in_chain"]),
        (&true.into(), &false.into())
    );
    assert_eq!(b.compact(&[])["hash_kv"], own_hash());
    // The same with a file URL.
    let mut c = deltafold();
    c.args([
        "compact",
        "--output",
        "json",
        "--store",
        &format!("file://{}", b.path().display()),
    ]);
    assert_eq!(run_json(&mut c).1["status"], "NothingToDo");
    // Without the marker it is in the way.
    fs::remove_file(b.path().join(format!("deltafold-excluded/{bad}"))).unwrap();
    assert_eq!(b.compact(&["--timeline", "main"])["status"], "NothingToDo");
    let b = Bucket::with_base();
    b.put(&format!("v2/{bad}"), b"damaged");
    b.refuses(&[], 65, "CorruptSnapshot");
}

#[test]
fn foreign_objects_are_named_and_left_alone() {
    let b = two_deltas();
    b.put("v2/notes.txt", b"hello");
    b.put("v2/Full-00000000-00009999-1.gz.part", b"half");
    b.put("v2/tab\there", b"any name");
    b.put("v2/Incr-00000747-00001499-9223372036854775807", b"no time");
    b.put("elsewhere/Full-00000000-00009999-1", b"not ours");
    let result = b.compact(&[]);
    assert_eq!(result["hash_kv"], own_hash());
    let warning = result["warnings"][0].as_str().unwrap();
    assert!(warning.contains("v2/notes.txt"), "{warning}");
    assert_eq!(reasons(&b.list(&[])), ["ForeignObject"]);
    assert!(b.path().join("v2/notes.txt").exists());
}

#[test]
fn the_old_layout_is_read_and_the_new_one_written() {
    let b = two_deltas();
    let old = b.path().join(format!("v1/Backup-{T0}"));
    fs::create_dir_all(old.parent().unwrap()).unwrap();
    fs::rename(b.path().join("v2"), &old).unwrap();
    let result = b.compact(&[]);
    assert_eq!(result["hash_kv"], own_hash());
    assert_eq!(b.names(), [result["snapshot"].as_str().unwrap()]);
    // Both layouts at once: an object in both is the same snapshot twice.
    let b = two_deltas();
    for name in b.names() {
        b.put(
            &format!("v1/Backup-{T0}/{name}"),
            &fs::read(b.path().join("v2").join(&name)).unwrap(),
        );
    }
    let result = b.compact(&[]);
    assert_eq!(
        (
            &result["hash_kv"],
            result["deltas"].as_array().unwrap().len()
        ),
        (&own_hash().into(), 2)
    );
}

#[test]
fn a_final_chain_stays_final_and_compression_stays_the_same() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    let last = b.delta(1500, LAST, 9);
    fs::rename(
        b.path().join("v2").join(&last),
        b.path().join("v2").join(format!("{last}.final")),
    )
    .unwrap();
    let result = b.compact(&[]);
    let name = format!("Full-00000000-{LAST:08}-{}.gz.final", T0 + 10);
    assert_eq!(result["snapshot"], name);
    assert_eq!(b.compact(&[])["status"], "NothingToDo");

    for (method, suffix) in [
        ("none", ""),
        ("gzip", ".gz"),
        ("zlib", ".gz"),
        ("lzw", ".gz"),
        ("zstd:9", ".zst"),
    ] {
        let b = two_deltas();
        let result = b.compact(&["--compression", method]);
        assert_eq!(
            result["snapshot"],
            format!("Full-00000000-{LAST:08}-{}{suffix}", T0 + 10)
        );
        let warned = result["warnings"].as_array().unwrap().len();
        assert_eq!(warned, usize::from(suffix == ".zst"), "{result}");
        // The result is a base like any other.
        let again = b.compact(&[]);
        assert_eq!(
            (again["status"].as_str(), again["hash_kv"].as_u64()),
            (Some("NothingToDo"), Some(own_hash()))
        );
    }
}

#[test]
fn a_name_that_is_taken_leads_to_the_next_free_second() {
    let b = two_deltas();
    let first = b.compact(&[]);
    let bytes = fs::read(
        b.path()
            .join("v2")
            .join(first["snapshot"].as_str().unwrap()),
    )
    .unwrap();
    let b = two_deltas();
    let name = |after: i64| format!("Full-00000000-{LAST:08}-{}.gz", T0 + after);
    // First another snapshot has the name, excluded so that it is no base; then the same one.
    for after in [10, 11] {
        b.put(&format!("v2/{}", name(after)), b"another's");
        b.put(&format!("deltafold-excluded/{}", name(after)), b"");
    }
    b.put(&format!("v2/{}", name(12)), &bytes);
    b.put(&format!("deltafold-excluded/{}", name(12)), b"");
    let names = b.names();
    assert_eq!(b.compact(&[])["snapshot"], name(12));
    assert_eq!(b.names(), names, "nothing was written");
    assert_eq!(
        fs::read(b.path().join("v2").join(name(10))).unwrap(),
        b"another's"
    );
}

#[test]
fn history_is_kept_as_asked() {
    for (keep, compacted) in [
        ("latest", LAST),
        ("0", LAST),
        ("1", LAST - 1),
        ("1000", LAST - 1000),
        ("1600", LAST - 1600),
        ("5000", 346),
        ("all", 346),
        ("3650d", 346),
        ("0s", LAST),
    ] {
        let result = two_deltas().compact(&["--keep-history", keep]);
        assert_eq!(result["compact_revision"], compacted, "{keep}");
        assert_eq!(
            result["live_keys"],
            expected(FIXTURE).compacted_at_last_revision.live_keys
        );
    }
    // With a revision, the last N revisions are counted from there.
    let result = two_deltas().compact(&["--keep-history", "100", "--revision", "1400"]);
    assert_eq!(
        (
            result["compact_revision"].as_i64(),
            result["revision"].as_i64()
        ),
        (Some(1300), Some(1400))
    );
}

/// Returns the revision of every event with the latest time so far.
fn times(b: &Bucket) -> Vec<(i64, DateTime<Utc>)> {
    let mut now = DateTime::<Utc>::MIN_UTC;
    b.events
        .iter()
        .map(|e| {
            now = now.max(e["time"].as_str().unwrap().parse().unwrap());
            (revision(e), now)
        })
        .collect()
}

#[test]
fn a_point_in_time_is_the_last_event_not_after_it() {
    let b = two_deltas();
    let times = times(&b);
    for i in [0, 10, times.len() / 3, times.len() / 2, times.len() - 1] {
        let time = times[i].1;
        let want = times.iter().rfind(|t| t.1 <= time).unwrap().0;
        for (shift, want) in [
            (0, want),
            (-1, times.iter().rfind(|t| t.1 < time).map_or(BASE, |t| t.0)),
        ] {
            let b = two_deltas();
            let at = (time + chrono::TimeDelta::nanoseconds(shift)).to_rfc3339();
            let result = b.compact(&["--time", &at, "--or-newest", "--dry-run"]);
            assert_eq!(result["revision"], want, "event {i}, {at}");
            assert_eq!(result["dry_run"], true);
        }
    }
    // Long after the last event, and before any.
    assert_eq!(
        b.compact(&["--time", "2100-01-01T00:00:00Z", "--or-newest", "--dry-run"])["revision"],
        LAST
    );
    let message = b.refuses(&["--time", "2001-01-01T00:00:00+02:00"], 66, "OutOfRange");
    assert!(message.contains("2000-12-31T22:00:00"), "{message}");
    // The state is the one at that revision.
    let (at, by_time) = (times[500].0, times[500].1.to_rfc3339());
    let same = times.iter().rfind(|t| t.1 <= times[500].1).unwrap().0;
    assert!(same >= at);
    let by_time = two_deltas().compact(&["--time", &by_time, "--or-newest"]);
    let by_revision = two_deltas().compact(&["--revision", &same.to_string()]);
    assert_eq!(by_time["hash_kv"], by_revision["hash_kv"]);
}

#[test]
fn clocks_that_run_backward_count_as_standing_still() {
    let b = Bucket::with_base();
    let mut events = b.events(BASE + 1, LAST);
    let noon: DateTime<Utc> = "2030-01-01T12:00:00Z".parse().unwrap();
    for e in &mut events {
        let r = revision(e);
        // In the middle, the clock is an hour behind for a while.
        let back = if (1200..1400).contains(&r) { 3600 } else { 0 };
        e["time"] = (noon + chrono::TimeDelta::seconds(r - 1000 - back))
            .to_rfc3339()
            .into();
    }
    b.delta_of(BASE + 1, LAST, 9, &events);
    let at = |s: &str| {
        // The events are later than the names of their deltas.
        b.compact(&["--time", s, "--or-newest", "--dry-run"])["revision"]
            .as_i64()
            .unwrap()
    };
    assert_eq!(at("2030-01-01T12:00:00Z"), 1000);
    assert_eq!(at("2030-01-01T12:03:18Z"), 1198);
    assert_eq!(at("2030-01-01T12:03:19Z"), 1399);
    assert_eq!(at("2030-01-01T12:06:40Z"), 1400);
    // A duration counts back on the same clock.
    let kept = |d: &str| {
        let (code, json, stderr) =
            b.run("compact", &["--keep-history", d, "--compression", "none"]);
        assert_eq!(code, 0, "{stderr}");
        fs::remove_file(b.path().join("v2").join(json["snapshot"].as_str().unwrap())).unwrap();
        json["compact_revision"].as_i64().unwrap()
    };
    let seconds_back = |to: i64| format!("{}s", LAST - to);
    assert_eq!(kept(&seconds_back(1500)), 1500);
    assert_eq!(kept(&seconds_back(1300)), 1399);
    assert_eq!(kept(&seconds_back(1400)), 1400);
    assert_eq!(kept(&seconds_back(1199)), 1399);
    assert_eq!(kept(&seconds_back(1198)), 1198);
    // Fulls made later, with times of another clock, change nothing.
    b.compact(&["--revision", "1300"]);
    assert_eq!(at("2030-01-01T12:03:18Z"), 1198);
    assert_eq!(at("2030-01-01T12:06:40Z"), 1400);
}

#[test]
fn nothing_newer_is_success_and_nothing_at_all_is_not() {
    let b = Bucket::with_base();
    let result = b.compact(&[]);
    let row = expected(FIXTURE).hash_kv[0];
    assert_eq!(result["status"], "NothingToDo");
    assert_eq!(
        (&result["hash_kv"], &result["live_keys"]),
        (&row.hash.into(), &row.live_keys.into())
    );
    assert_eq!(b.names().len(), 1);

    let empty = scratch::folder().unwrap();
    let run = |store: &std::path::Path| {
        let mut c = deltafold();
        c.args(["compact", "--output", "json", "--store"])
            .arg(store);
        let (code, json, _) = run_json(&mut c);
        (
            code,
            json["message"].as_str().unwrap_or_default().to_owned(),
        )
    };
    assert_eq!(run(empty.path()).0, 66);
    assert_eq!(run(&empty.path().join("missing")).0, 66);
    let (code, message) = run(&b.path().join("v2"));
    assert!(
        code == 66 && message.contains("the folder above it"),
        "{message}"
    );
    let only_deltas = Bucket::with_base();
    only_deltas.delta(BASE + 1, 1499, 6);
    fs::remove_file(
        only_deltas
            .path()
            .join(format!("v2/Full-00000000-{BASE:08}-{T0}.gz")),
    )
    .unwrap();
    only_deltas.refuses(&[], 66, "NoSnapshots");
}

#[test]
fn the_list_tells_what_is_there() {
    for name in fixture_names() {
        let store = copy_fixture(&name);
        for args in [&[][..], &["--deep"]] {
            let mut c = deltafold();
            c.args(["list", "--output", "json", "--store"])
                .arg(store.path())
                .args(args);
            let list = succeed(&mut c);
            let e = expected(&name);
            assert_eq!(list["latest_revision"], e.last_revision, "{name}");
            assert_eq!(
                list["problems"].as_array().unwrap().len(),
                0,
                "{name}: {list}"
            );
            let snapshots = list["snapshots"].as_array().unwrap();
            assert!(
                snapshots
                    .iter()
                    .all(|s| s["in_chain"] == true && s["timeline"] == "main")
            );
            assert!(snapshots.iter().all(|s| s["compression"] == e.compression));
            let range = &list["restorable"][0];
            let compacted = e.hash_kv[0].compact_revision.max(1);
            assert_eq!(range["first_revision"], compacted, "{name}");
            assert_eq!(range["may_begin_earlier"], false, "{name}");
            assert_eq!(range["last_revision"], e.last_revision, "{name}");
        }
    }
}

#[test]
fn a_dry_run_writes_nothing() {
    let b = two_deltas();
    let before = b.names();
    let plan = b.compact(&["--dry-run"]);
    assert_eq!(b.names(), before);
    assert_eq!(
        (plan["dry_run"].as_bool(), plan["status"].as_str()),
        (Some(true), Some("Succeeded"))
    );
    let done = b.compact(&[]);
    for field in ["base", "deltas", "revision", "timeline", "compression"] {
        assert_eq!(plan[field], done[field], "{field}");
    }
    assert_eq!(b.compact(&["--dry-run"])["status"], "NothingToDo");
}

#[test]
fn what_deltas_do_not_hold_is_as_of_the_first_base() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    let first = b.compact(&["--compression", "lzw"]);
    assert_eq!(first["metadata_revision"], BASE);
    assert_eq!(b.compact(&[])["metadata_revision"], BASE);
    b.delta(1500, LAST, 9);
    let second = b.compact(&[]);
    assert_eq!(second["base"], first["snapshot"]);
    assert_eq!(second["metadata_revision"], BASE);
}

#[test]
fn logs_that_nobody_takes_do_no_harm() {
    let b = two_deltas();
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut c = deltafold();
    c.args([
        "compact",
        "--output",
        "json",
        "--log-level",
        "trace",
        "--store",
    ])
    .arg(b.path());
    let out = c.stderr(full).output().unwrap();
    assert!(out.status.success(), "{:?}", out.status);
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["hash_kv"], own_hash());
    // The exit code and JSON of an error arrive, too.
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut c = deltafold();
    c.args(["compact", "--output", "json", "--store"])
        .arg(b.path().join("missing"));
    let out = c.stderr(full).output().unwrap();
    assert_eq!(out.status.code(), Some(66));
    assert!(String::from_utf8_lossy(&out.stdout).contains("NoSnapshots"));
}

#[test]
fn a_chain_that_damage_stops_is_none() {
    let b = two_deltas();
    let last = b
        .names()
        .into_iter()
        .find(|n| n.starts_with("Incr-00001500"))
        .unwrap();
    b.put(&format!("v2/{last}"), b"damaged");
    let list = b.list(&["--deep"]);
    assert_eq!(reasons(&list), ["CorruptSnapshot"]);
    let in_chain = |s: &Value| s["in_chain"] == true;
    assert!(
        !list["snapshots"].as_array().unwrap().iter().any(in_chain),
        "{list}"
    );
    b.refuses(&[], 65, "CorruptSnapshot");
    // If the newest snapshot is excluded, the report says so.
    b.put(&format!("deltafold-excluded/{last}"), b"");
    let result = b.compact(&[]);
    assert_eq!(result["revision"], 1499);
    assert!(
        result["warnings"][0].as_str().unwrap().contains(&last),
        "{result}"
    );
}
