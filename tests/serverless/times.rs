//! `--time`: local times and ages, the moment that a backup is known to cover, and what the answer says of both.

use crate::support::made_backups::{BASE, Bucket, LAST, T0};
use crate::support::{copy_fixture, deltafold, run_json, scratch, succeed, without_servers};
use serde_json::Value;
use std::fs;
use std::process::Command;

/// The seconds from the base to the newest snapshot.
const AFTER: i64 = 30;

/// Two deltas; the newest one is named after `AFTER` seconds. Returns also the time in its name.
fn backup() -> (Bucket, i64) {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, AFTER - 10);
    let newest = b.delta(1500, LAST, AFTER);
    let created = newest.rsplit('-').next().unwrap();
    let created = created.split('.').next().unwrap().parse().unwrap();
    (b, created)
}

fn rfc3339(seconds: i64, millis: u32) -> String {
    let time = chrono::DateTime::from_timestamp(seconds, millis * 1_000_000).unwrap();
    time.to_rfc3339()
}

/// Every command that takes a time, with its arguments before the time.
const COMMANDS: [&[&str]; 6] = [
    &["compact", "--dry-run", "--time"],
    &[
        "restore",
        "--dry-run",
        "--data-dir",
        "/nowhere/data",
        "--time",
    ],
    &["get", "--prefix", "", "--time"],
    &["export", "--time"],
    &["diff", "--from", "1000", "--to"],
    &["diff", "--to", "1000", "--from"],
];

fn command(b: &Bucket, args: &[&str], output: &str) -> Command {
    let mut c = deltafold();
    let output = if output == "json" && args[0] == "get" {
        "result"
    } else {
        output
    };
    c.args(args)
        .args(["--output", output, "--store"])
        .arg(b.path());
    c.env_remove("KUBERNETES_SERVICE_HOST");
    without_servers(&mut c);
    c
}

#[test]
fn a_time_after_the_newest_snapshot_is_refused_by_every_command() {
    let (b, created) = backup();
    for base in COMMANDS {
        // The whole second of the name is covered.
        let covered = rfc3339(created, 999);
        let output = command(&b, &[base, &[covered.as_str()][..]].concat(), "text")
            .output()
            .unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        // The restore fails for want of a folder, after it has chosen the state.
        assert!(output.status.success() || base[0] == "restore", "{log}");
        assert!(!log.contains("OutOfRange"), "{base:?}: {log}");
        assert!(
            !log.contains("after the newest snapshot"),
            "{base:?}: {log}"
        );
        let later = rfc3339(created + 1, 0);
        let args = [base, &[&later]].concat();
        let output = command(&b, &args, "json").output().unwrap();
        assert_eq!(output.status.code(), Some(66), "{base:?}");
        let stdout = String::from_utf8(output.stdout).unwrap();
        let failure: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(failure["reason"], "OutOfRange", "{base:?}");
        let message = failure["message"].as_str().unwrap();
        let newest = rfc3339(created, 0).replace("+00:00", "Z");
        for part in ["--or-newest", &newest, "Incr-"] {
            assert!(message.contains(part), "{base:?}: no {part} in {message}");
        }
        // With the flag, the answer comes and says so.
        let output = command(&b, &[&args[..], &["--or-newest"]].concat(), "text")
            .output()
            .unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(
            log.contains("is after the newest snapshot"),
            "{base:?}: {log}"
        );
        assert!(!log.contains("OutOfRange"), "{base:?}: {log}");
    }
}

#[test]
fn the_newest_state_comes_with_a_warning() {
    let (b, created) = backup();
    let later = rfc3339(created + 3600, 0);
    let plan = b.compact(&["--dry-run", "--time", &later, "--or-newest"]);
    assert_eq!(plan["revision"], LAST);
    assert_eq!(plan["warnings"].as_array().unwrap().len(), 1, "{plan}");
    // As a Job of the controller sets it, and as a template may leave it empty.
    for (value, code) in [("true", 0), ("false", 66), ("", 66)] {
        let mut c = command(&b, &["compact", "--dry-run", "--time", &later], "json");
        let (got, json, log) = run_json(c.env("DELTAFOLD_OR_NEWEST", value));
        assert_eq!(got, code, "{value:?}: {json} {log}");
    }
    // The timeline at hand counts, not the newest snapshot of the prefix: another history ends earlier.
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 10);
    b.altered_delta(1400, 1600, 100);
    let between = rfc3339(T0 + 50, 0);
    let plan = b.compact(&["--dry-run", "--time", &between, "--or-newest"]);
    let listed = b.list(&["--deep"]);
    let ranges = listed["restorable"].as_array().unwrap();
    let mut others = ranges
        .iter()
        .map(|r| r["timeline"].as_str().unwrap())
        .filter(|id| *id != plan["timeline"]);
    let older = others.next().expect("another timeline");
    b.compact(&["--dry-run", "--time", &between]);
    let args = ["--dry-run", "--time", &between, "--timeline", older];
    let message = b.refuses(&args, 66, "OutOfRange");
    assert!(message.contains("Incr-00000747-00001499"), "{message}");
}

#[test]
fn a_stale_copy_is_not_chosen_for_a_time_that_another_store_covers() {
    let (whole, created) = backup();
    let stale = Bucket::with_base();
    stale.delta(BASE + 1, 1499, AFTER - 10);
    let folder = scratch::folder().unwrap();
    let at = rfc3339(created, 0);
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--time", &at, "--store"]);
    c.arg(stale.path()).arg("--store").arg(whole.path());
    c.arg("--data-dir").arg(folder.path().join("data"));
    let json = succeed(without_servers(&mut c));
    assert_eq!(json["candidates"][0]["reason"], "OutOfRange", "{json:#}");
    assert_eq!(json["candidates"][1]["status"], "Chosen", "{json:#}");
}

/// The same moment in three notations, and the zone in the answer.
#[test]
fn local_times_are_those_of_the_zone_and_the_answer_states_it() {
    let (b, created) = backup();
    let berlin = chrono_berlin(created);
    let utc = chrono_utc(created).replace(' ', "T") + "Z";
    for (tz, pod, text, stated) in [
        (
            "Europe/Berlin",
            false,
            berlin.clone(),
            format!("{}+01:00", berlin.replace(' ', "T")),
        ),
        ("Europe/Berlin", true, chrono_utc(created), utc.clone()),
        ("", false, chrono_utc(created), utc.clone()),
        (
            "CET-1",
            false,
            berlin.clone(),
            format!("{}+01:00", berlin.replace(' ', "T")),
        ),
    ] {
        let run = |args: &[&str]| {
            let mut c = command(&b, args, "text");
            c.env("TZ", tz);
            if pod {
                c.env("KUBERNETES_SERVICE_HOST", "10.0.0.1");
            }
            let output = c.output().unwrap();
            assert!(output.status.success(), "{args:?}: {output:?}");
            let texts = [output.stdout, output.stderr].map(|t| String::from_utf8(t).unwrap());
            texts.concat()
        };
        for base in COMMANDS.iter().filter(|c| c[0] != "restore") {
            let all = run(&[base, &[text.as_str()][..]].concat());
            // What holds the state alone says it in the log, which is in UTC.
            let stated = if ["get", "export"].contains(&base[0]) {
                &utc
            } else {
                &stated
            };
            assert!(
                all.contains("as of") && all.contains(stated.as_str()),
                "{tz} {base:?}: {all}"
            );
        }
    }
    // What `list` prints is the same moment if it is given back.
    for tz in ["Europe/Berlin", "UTC"] {
        let list = command(&b, &["list"], "text")
            .env("TZ", tz)
            .output()
            .unwrap();
        let list = String::from_utf8(list.stdout).unwrap();
        let row = list.lines().find(|l| l.starts_with("Incr")).unwrap();
        let printed = row.split_whitespace().nth(2).unwrap();
        let at = |time: &str| {
            let mut c = command(&b, &["compact", "--dry-run", "--time", time], "json");
            let (code, plan, log) = run_json(c.env("TZ", "America/New_York"));
            assert_eq!(code, 0, "{time}: {log}");
            plan["revision"].clone()
        };
        assert_eq!(at(printed), at(&rfc3339(T0 + AFTER - 10, 0)), "{row}");
    }
    // Text that is no time, and one that daylight saving makes ambiguous.
    for (text, parts) in [
        ("4/5", ["RFC 3339", "yesterday 14:00"]),
        ("2026-10-25 02:30", ["02:30:00+02:00", "02:30:00+01:00"]),
    ] {
        for base in COMMANDS {
            let mut c = command(&b, &[base, &[text]].concat(), "json");
            let output = c.env("TZ", "Europe/Berlin").output().unwrap();
            assert_eq!(output.status.code(), Some(64), "{base:?}");
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(parts.iter().all(|p| text.contains(p)), "{base:?}: {text}");
        }
    }
}

fn chrono_utc(seconds: i64) -> String {
    let time = chrono::DateTime::from_timestamp(seconds, 0).unwrap();
    time.format("%Y-%m-%d %H:%M:%S").to_string()
}

/// The time in Berlin in winter.
fn chrono_berlin(seconds: i64) -> String {
    chrono_utc(seconds + 3600)
}

/// A hole between deltas that the history of a later full covers: its revisions can be restored, and count as received
/// when that full was taken.
#[test]
fn a_time_in_a_hole_that_a_later_full_covers_is_the_state_before_the_hole() {
    let store = copy_fixture("kubernetes");
    let run = |args: &[&str]| {
        let mut c = deltafold();
        c.args(args).args(["--output", "json", "--store"]);
        c.arg(store.path());
        run_json(without_servers(&mut c))
    };
    let in_hole = ["get", "--prefix", "", "--time", "2026-11-21T02:31:10Z"];
    let hole = store.path().join("v2/Incr-00000446-00000505-1795228279.gz");
    let delta = fs::read(&hole).unwrap();
    fs::remove_file(&hole).unwrap();
    let (code, json, _) = run(&in_hole);
    assert_eq!((code, &json["reason"]), (65, &"RevisionGap".into()));
    let message = json["message"].as_str().unwrap();
    assert!(message.contains("`gc` removes"), "{message}");

    fs::write(&hole, delta).unwrap();
    let (code, full, _) = run(&["compact", "--keep-history", "all"]);
    assert_eq!(code, 0, "{full:#}");
    fs::remove_file(&hole).unwrap();
    for command in ["list", "status", "verify"] {
        let (_, json, _) = run(&[command]);
        let ranges = json["restorable"].as_array().unwrap();
        assert_eq!(ranges.len(), 1, "{command}: {json:#}");
        assert_eq!(ranges[0]["first_revision"], 1, "{command}");
        assert_eq!(ranges[0]["last_revision"], 628, "{command}");
    }
    let (code, json, _) = run(&in_hole);
    assert_eq!((code, &json["revision"]), (0, &445.into()), "{json:#}");
    let warning = json["warnings"][0].as_str().unwrap();
    assert!(warning.contains("446 to 505 have no times"), "{warning}");
    let (code, json, _) = run(&["get", "--prefix", "", "--revision", "470"]);
    assert_eq!((code, &json["revision"]), (0, &470.into()), "{json:#}");
}
