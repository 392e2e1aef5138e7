//! `deltafold status`: the verdict and its exit code, by names and records alone.

use deltafold::backup::catalog::mark_of;
use std::fs;
use std::path::Path;

use crate::support::{copy_dir, copy_fixture, deltafold, fixtures_dir, run_json, scratch};
use chrono::Utc;
use serde_json::Value;
use tempfile::TempDir;

/// Renames the snapshots of a store so that the newest was taken this many seconds ago.
fn age_to(store: &Path, seconds: i64) {
    let v2 = store.join("v2");
    let names = fs::read_dir(&v2).unwrap().map(|e| e.unwrap().file_name());
    let names: Vec<String> = names.map(|n| n.into_string().unwrap()).collect();
    let created = |name: &str| -> i64 {
        let last = name.rsplit('-').next().unwrap();
        last.split('.').next().unwrap().parse().unwrap()
    };
    let newest = names.iter().map(|n| created(n)).max().unwrap();
    let shift = Utc::now().timestamp() - seconds - newest;
    for name in &names {
        let old = created(name);
        let new = name.replace(&old.to_string(), &(old + shift).to_string());
        fs::rename(v2.join(name), v2.join(new)).unwrap();
    }
}

/// Removes the lock of a follower that was killed.
fn forget_follower(store: &Path) {
    let _ = fs::remove_dir_all(store.join("deltafold-locks"));
}

/// A copy of a fixture whose newest snapshot was just taken.
fn fresh(name: &str) -> TempDir {
    let store = copy_fixture(name);
    age_to(store.path(), 10);
    store
}

/// Returns the exit code and the JSON.
fn status(store: &Path, args: &[&str]) -> (i32, Value) {
    let mut c = deltafold();
    c.args(["status", "--output", "json", "--store"]).arg(store);
    let (code, json, stderr) = run_json(c.args(args));
    assert_eq!(json["code"], code, "{json:#} {stderr}");
    (code, json)
}

/// Asserts the exit code and the reasons of all findings, in order.
#[track_caller]
fn is(store: &Path, args: &[&str], verdict: &str, reasons: &[&str]) -> Value {
    let (code, json) = status(store, args);
    let expected = match verdict {
        "Healthy" => 0,
        "Damaged" => 65,
        "Empty" => 66,
        _ => 75,
    };
    assert_eq!(code, expected, "{json:#}");
    assert_eq!(json["verdict"], verdict, "{json:#}");
    let findings = json["findings"].as_array().unwrap().iter();
    let found: Vec<&str> = findings.map(|f| f["reason"].as_str().unwrap()).collect();
    assert_eq!(found, reasons, "{json:#}");
    assert_eq!(json["reason"].as_str(), reasons.first().copied());
    json
}

fn verify(store: &Path, args: &[&str]) -> i32 {
    let mut c = deltafold();
    c.args(["verify", "--output", "json", "--store"]).arg(store);
    run_json(c.args(args)).0
}

#[test]
fn age_decides_between_healthy_and_stale() {
    let store = fresh("kubernetes");
    let healthy = is(store.path(), &[], "Healthy", &[]);
    assert_eq!(healthy["latest_revision"], 628);
    assert_eq!(healthy["max_age_seconds"], 900.0);
    assert_eq!(healthy["size"]["fulls"], 1);
    assert_eq!(healthy["size"]["deltas"], 5);
    assert_eq!(healthy["restorable"].as_array().unwrap().len(), 1);
    assert_eq!(healthy["bytes_per_day"], healthy["size"]["bytes"]);
    assert!(
        healthy["next"]
            .as_str()
            .unwrap()
            .contains("deltafold verify")
    );

    age_to(store.path(), 1000);
    let stale = is(store.path(), &[], "Stale", &["Stale"]);
    assert!(stale["next"].as_str().unwrap().contains("snapshot full"));
    is(store.path(), &["--max-age", "17m"], "Healthy", &[]);

    // Without deltas, a daily full is enough.
    for entry in fs::read_dir(store.path().join("v2")).unwrap() {
        let path = entry.unwrap().path();
        if path.to_str().unwrap().contains("Incr") {
            fs::remove_file(path).unwrap();
        }
    }
    let fulls = is(store.path(), &[], "Healthy", &[]);
    assert_eq!(fulls["max_age_seconds"], 90_000.0);
    is(store.path(), &["--max-age", "1m"], "Stale", &["Stale"]);
}

#[test]
fn a_snapshot_from_the_future_does_not_hide_that_the_others_are_old() {
    let store = fresh("kubernetes");
    age_to(store.path(), 100_000);
    let in_a_year = Utc::now().timestamp() + 31_536_000;
    let newest = store
        .path()
        .join(format!("v2/Full-00000000-00000275-{in_a_year}.gz"));
    let full = fixtures_dir().join("kubernetes/v2/Full-00000000-00000275-1795228239.gz");
    fs::copy(&full, &newest).unwrap();
    let json = is(store.path(), &[], "Stale", &["Stale"]);
    assert_eq!(json["from_the_future"], 1);
    assert!(json["warnings"][0].as_str().unwrap().contains("clocks"));
    assert!(json["newest"]["age_seconds"].as_f64().unwrap() > 99_000.0);

    // If all are, the clock of this machine may be wrong.
    age_to(store.path(), -100_000);
    fs::remove_dir_all(store.path().join("v2")).unwrap();
    fs::create_dir(store.path().join("v2")).unwrap();
    fs::copy(&full, &newest).unwrap();
    let json = is(store.path(), &[], "Stale", &["Stale"]);
    assert_eq!(json["newest"], Value::Null);
}

#[test]
fn verifications_are_shown_and_fail_only_if_asked_for() {
    let store = fresh("kubernetes");
    let within = ["--verified-within", "1h"];
    is(store.path(), &within, "Stale", &["NotVerified"]);
    // Names alone prove nothing.
    assert_eq!(verify(store.path(), &["--level", "names"]), 0);
    is(store.path(), &within, "Stale", &["NotVerified"]);
    assert_eq!(verify(store.path(), &["--level", "fold"]), 0);
    let json = is(store.path(), &within, "Healthy", &[]);
    assert_eq!(json["next"], Value::Null);
    let fold = &json["verifications"].as_array().unwrap().iter();
    let fold = fold.clone().find(|v| v["level"] == "fold").unwrap();
    assert_eq!(fold["result"], "Verified");
    assert_eq!(fold["revision"], 628);
    assert_eq!(fold["revisions_behind"], 0);
    assert!(fold["hash_kv"].is_u64(), "{fold}");
}

#[test]
fn gaps_and_failed_verifications_are_damage_until_a_verification_succeeds() {
    let store = fresh("kubernetes");
    let v2 = store.path().join("v2");
    let mut names: Vec<_> = fs::read_dir(&v2)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    names.sort();
    let middle = names
        .iter()
        .find(|p| p.to_str().unwrap().contains("-00000505-"));
    let (middle, away) = (middle.unwrap(), store.path().join("away"));
    fs::rename(middle, &away).unwrap();
    let json = is(store.path(), &[], "Damaged", &["RevisionGap"]);
    assert!(
        json["message"].as_str().unwrap().contains("446"),
        "{json:#}"
    );

    // The failure is recorded. When the delta is back, it counts until a verification succeeds.
    assert_eq!(verify(store.path(), &["--level", "checksums"]), 65);
    is(
        store.path(),
        &[],
        "Damaged",
        &["RevisionGap", "RevisionGap"],
    );
    fs::rename(&away, middle).unwrap();
    let json = is(
        store.path(),
        &["--max-age", "1ms"],
        "Damaged",
        &["RevisionGap", "Stale"],
    );
    assert!(
        json["next"]
            .as_str()
            .unwrap()
            .contains("verify --all-chains")
    );
    assert_eq!(verify(store.path(), &["--level", "names"]), 0);
    is(store.path(), &[], "Damaged", &["RevisionGap"]);
    // Times are recorded in seconds.
    let recorded = store.path().join("deltafold-verified/checksums.json");
    let record = fs::read_to_string(&recorded).unwrap();
    let year = Utc::now().format("\"time\": \"%Y-").to_string();
    fs::write(&recorded, record.replace(&year, "\"time\": \"2020-")).unwrap();
    assert_eq!(verify(store.path(), &["--level", "fold"]), 0);
    is(store.path(), &[], "Healthy", &[]);
}

/// Their chains are restored, so the backup is healthy.
#[test]
fn two_snapshotters_of_the_same_revisions_are_noted() {
    let store = fresh("kubernetes");
    let overlap = |store: &Path| {
        let json = is(store, &[], "Healthy", &[]);
        let problems = json["problems"].as_array().unwrap().clone();
        problems
            .into_iter()
            .find(|p| p["reason"] == "OverlappingDeltas")
    };
    assert_eq!(overlap(store.path()), None);
    let v2 = store.path().join("v2");
    let names = fs::read_dir(&v2).unwrap().map(|e| e.unwrap().file_name());
    let mut names = names.map(|n| n.into_string().unwrap());
    let delta = names
        .find(|n| n.starts_with("Incr-00000276-00000445"))
        .unwrap();
    let other = delta.replace("-00000445-", "-00000440-");
    fs::copy(v2.join(&delta), v2.join(other)).unwrap();
    let found = overlap(store.path()).unwrap();
    let message = found["message"].as_str().unwrap();
    assert!(
        message.contains("276 to 440, the other 276 to 445"),
        "{message}"
    );
    assert_eq!(found["snapshots"].as_array().unwrap().len(), 2);
}

/// A record that was not renewed for a minute is of a dead follower. It is found, unless another snapshotter has
/// replaced it.
#[test]
fn a_follower_is_named_while_it_renews_its_lock() {
    let store = fresh("kubernetes");
    fs::create_dir(store.path().join("deltafold-locks")).unwrap();
    let write = |holder: &str, seconds: i64| {
        let renewed = Utc::now() - chrono::TimeDelta::seconds(seconds);
        let record = serde_json::json!({
            "holderIdentity": holder, "acquireTime": "2026-01-01T00:00:00Z", "renewTime": renewed,
            "leaseDurationSeconds": 15, "token": "t",
        });
        let path = store.path().join("deltafold-locks/follow.json");
        fs::write(path, record.to_string()).unwrap();
    };
    let follower = |holder: &str, seconds: i64| {
        write(holder, seconds);
        is(store.path(), &[], "Healthy", &[])["follower"].clone()
    };
    let live = follower("pod-0.1\u{1b}[2J", 5);
    assert_eq!(live["holder"], "pod-0.1\\u{1b}[2J");
    assert!(live["saved_nothing_since"].is_string(), "{live}");
    // Somebody else has saved since.
    assert_eq!(follower("pod-0.1", 100_000), Value::Null);
    assert_eq!(follower("", 5), Value::Null);
    age_to(store.path(), 120);
    write("pod-0.1", 100);
    let dead = is(store.path(), &["--max-age", "9d"], "Stale", &["Stale"]);
    assert_eq!(dead["follower"], Value::Null);
    let message = dead["message"].as_str().unwrap();
    assert!(
        message.contains("pod-0.1 has not renewed its lock for 1m"),
        "{message}"
    );
    fs::write(store.path().join("deltafold-locks/follow.json"), "rubbish").unwrap();
    assert_eq!(
        is(store.path(), &[], "Healthy", &[])["follower"],
        Value::Null
    );
}

#[test]
fn nothing_there_is_empty() {
    let folder = scratch::folder().unwrap();
    let missing = folder.path().join("missing");
    is(&missing, &[], "Empty", &["NoSnapshots"]);
    is(
        folder.path(),
        &["--verified-within", "1h"],
        "Empty",
        &["NoSnapshots"],
    );
    // Deltas alone cannot be restored.
    let store = fresh("kubernetes");
    for entry in fs::read_dir(store.path().join("v2")).unwrap() {
        let path = entry.unwrap().path();
        if path.to_str().unwrap().contains("Full") {
            let mark = store.path().join(mark_of(path.to_str().unwrap()));
            fs::create_dir_all(mark.parent().unwrap()).unwrap();
            fs::write(mark, "").unwrap();
        }
    }
    let json = is(store.path(), &[], "Empty", &["NoSnapshots"]);
    assert_eq!(json["size"]["excluded"], 1);
}

#[test]
fn the_verdict_is_the_first_word() {
    let store = fresh("kubernetes");
    let text = |args: &[&str]| {
        let mut c = deltafold();
        let out = c.args(["status", "--store"]).arg(store.path()).args(args);
        String::from_utf8(out.output().unwrap().stdout).unwrap()
    };
    let healthy = text(&[]);
    assert!(healthy.starts_with("healthy: "), "{healthy}");
    for word in ["newest", "restorable", "verified", "never", "size", "next"] {
        assert!(healthy.contains(word), "{word}: {healthy}");
    }
    let stale = text(&["--max-age", "1s", "--verified-within", "1s"]);
    assert!(
        stale.starts_with("stale: the newest snapshot is "),
        "{stale}"
    );
    assert!(stale.contains("[NotVerified]"), "{stale}");
    fs::remove_dir_all(store.path().join("v2")).unwrap();
    let empty = text(&[]);
    assert!(empty.starts_with("empty: "), "{empty}");
}

/// Other layouts and encrypted prefixes need no key: names are read.
#[test]
fn every_layout_has_a_status() {
    for name in ["plain", "encrypted", "v1"] {
        let store = scratch::folder().unwrap();
        let prefix = fixtures_dir().join("prefix").join(name);
        copy_dir(&prefix, store.path());
        forget_follower(store.path());
        let long = ["--max-age", "36500d"];
        let (code, json) = status(store.path(), &long);
        assert_eq!(code, 0, "{name}: {json:#}");
        assert!(
            json["size"]["deltas"].as_u64() > Some(0),
            "{name}: {json:#}"
        );
    }
}

/// Flips a bit in the middle of a snapshot.
fn damage(snapshot: &Path) {
    let mut bytes = fs::read(snapshot).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(snapshot, bytes).unwrap();
}

/// A verification is of one store's bytes: the source of a copy, which an attacker may own, does not speak for
/// the target.
#[test]
fn the_source_of_a_copy_cannot_call_a_damaged_target_healthy() {
    let (source, target) = (fresh("kubernetes"), scratch::folder().unwrap());
    let copy = || {
        let mut c = deltafold();
        c.args(["copy", "--output", "json", "--from"]);
        let (code, json, stderr) = run_json(c.arg(source.path()).arg("--to").arg(target.path()));
        assert_eq!(code, 0, "{json:#} {stderr}");
    };
    copy();
    let files = fs::read_dir(target.path().join("v2")).unwrap();
    let mut files = files.map(|e| e.unwrap().path());
    damage(
        &files
            .find(|p| p.to_str().unwrap().contains("Incr-00000276"))
            .unwrap(),
    );
    assert_eq!(verify(target.path(), &[]), 65);
    // Later by the clock, or dated so.
    assert_eq!(verify(source.path(), &[]), 0);
    let record = source.path().join("deltafold-verified/checksums.json");
    let text = fs::read_to_string(&record).unwrap();
    fs::write(record, text.replace("\"time\": \"20", "\"time\": \"29")).unwrap();
    copy();
    is(target.path(), &[], "Damaged", &["CorruptSnapshot"]);
}

#[test]
fn the_source_of_a_copy_cannot_call_a_good_target_damaged() {
    let (source, target) = (fresh("kubernetes"), scratch::folder().unwrap());
    fs::create_dir(source.path().join("deltafold-verified")).unwrap();
    let forged = r#"{"formatVersion": 1, "level": "fold", "time": "2999-11-20T12:00:00Z", "result": "Failed",
        "reason": "DrillFailed", "drillSucceeded": false}"#;
    fs::write(source.path().join("deltafold-verified/fold.json"), forged).unwrap();
    let mut c = deltafold();
    c.args(["copy", "--output", "json", "--from"]);
    assert_eq!(
        run_json(c.arg(source.path()).arg("--to").arg(target.path())).0,
        0
    );
    assert_eq!(verify(target.path(), &["--level", "fold"]), 0);
    is(target.path(), &[], "Healthy", &[]);
}

/// Whoever can write may add a good timeline, but the state that a restore gives is that of the newest one.
#[test]
fn a_good_timeline_does_not_hide_that_the_newest_is_damaged() {
    let store = scratch::folder().unwrap();
    copy_dir(&fixtures_dir().join("prefix/plain"), store.path());
    forget_follower(store.path());
    damage(&store.path().join("v2/Incr-00000056-00000065-1795431115.gz"));
    let long = ["--max-age", "36500d"];
    assert_eq!(verify(store.path(), &[]), 65);
    is(store.path(), &long, "Damaged", &["CorruptSnapshot"]);
    assert_eq!(verify(store.path(), &["--timeline", "main"]), 0);
    is(store.path(), &long, "Damaged", &["CorruptSnapshot"]);
}
