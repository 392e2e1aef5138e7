//! `deltafold verify` without a cluster: each level finds what it must and reads no more than it needs,
//! everything wrong is reported, and a restore drill starts a real etcd that leaves nothing behind.

use crate::support::etcd::EtcdVersion;
use crate::support::history::{Compression, with_checksum};
use crate::support::made_backups::{BASE, Bucket, FIXTURE, LAST, T0, alter};
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, expected, fixture_names, run_json, seed, tools};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

const LEVELS: [&str; 3] = ["names", "checksums", "fold"];

pub fn command(store: &Path, args: &[&str]) -> Command {
    let mut c = deltafold();
    c.args(["verify", "--output", "json", "--store"]);
    c.arg(store).args(args);
    c
}

/// Returns the exit code and the JSON.
#[track_caller]
pub fn verify(store: &Path, args: &[&str]) -> (i32, Value) {
    let (code, json, stderr) = run_json(&mut command(store, args));
    println!("{stderr}");
    assert_eq!(
        json["code"].as_i64().unwrap_or(0),
        i64::from(code),
        "{json:#}"
    );
    (code, json)
}

/// Returns reason and snapshots of the errors, or of the notes.
fn found(json: &Value, severity: &str) -> Vec<(String, Vec<String>)> {
    let findings = json["findings"].as_array().expect("findings").iter();
    findings
        .filter(|f| f["severity"] == severity)
        .map(|f| {
            let paths = f["snapshots"].as_array().expect("paths").iter();
            let paths = paths.map(|p| p.as_str().expect("a path").to_owned());
            (
                f["reason"].as_str().expect("a reason").to_owned(),
                paths.collect(),
            )
        })
        .collect()
}

fn reasons(json: &Value, severity: &str) -> Vec<String> {
    found(json, severity).into_iter().map(|f| f.0).collect()
}

#[track_caller]
fn verified(store: &Path, args: &[&str]) -> Value {
    let (code, json) = verify(store, args);
    assert_eq!(
        (code, &json["verdict"]),
        (0, &"Verified".into()),
        "{json:#}"
    );
    assert_eq!(reasons(&json, "error"), [""; 0]);
    json
}

/// Asserts that verification fails with these errors.
#[track_caller]
fn fails(store: &Path, args: &[&str], code: i32, reason: &str) -> Value {
    let (got, json) = verify(store, args);
    assert_eq!(
        (got, &json["reason"]),
        (code, &reason.into()),
        "{args:?} {json:#}"
    );
    json
}

fn bytes_of(store: &Path, names: &[String]) -> u64 {
    let sizes = names
        .iter()
        .map(|n| fs::metadata(store.join("v2").join(n)).unwrap().len());
    sizes.sum()
}

pub fn two_deltas() -> Bucket {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.delta(1500, LAST, 9);
    b
}

/// Writes a full of another store's newest state, `after` seconds later than the base.
fn full_of(source: &Bucket, into: &Bucket, at: i64, after: i64, keep: &str) -> String {
    let made = source.compact(&["--revision", &at.to_string(), "--keep-history", keep]);
    let made = made["snapshot"].as_str().unwrap().to_owned();
    let bytes = fs::read(source.path().join("v2").join(made)).unwrap();
    let name = format!("Full-00000000-{at:08}-{}.gz", T0 + after);
    into.put(&format!("v2/{name}"), &bytes);
    name
}

/// Returns two chains in sequence: a full, deltas, a full of the same state, a delta.
fn two_chains() -> (Bucket, Vec<String>) {
    let b = Bucket::with_base();
    let mut names = b.names();
    names.push(b.delta(BASE + 1, 1400, 6));
    names.push(b.delta(1401, 1800, 7));
    names.push(full_of(&two_deltas(), &b, 1800, 8, "all"));
    names.push(b.delta(1801, LAST, 9));
    (b, names)
}

#[test]
fn good_backups_are_verified_at_each_level() {
    for name in fixture_names() {
        let store = copy_fixture(&name);
        let e = expected(&name);
        for all in [false, true] {
            for level in LEVELS {
                let mut args = vec!["--level", level];
                args.extend(all.then_some("--all-chains"));
                let json = verified(store.path(), &args);
                let newest = &json["newest"];
                assert_eq!(newest["last_revision"], e.last_revision, "{name} {level}");
                assert!(newest["snapshot_age_seconds"].as_f64().is_some());
                match level {
                    "names" => assert_eq!(json["bytes_read"], 0, "{name}"),
                    _ => assert!(json["bytes_read"].as_u64().unwrap() > 0),
                }
                let chain = json["chains"].as_array().unwrap().last().unwrap().clone();
                assert_eq!(chain["last_revision"], e.last_revision);
                if level == "fold" {
                    let told = e.hash_kv.iter().find(|h| {
                        h.revision == e.last_revision
                            && chain["compact_revision"] == h.compact_revision
                    });
                    if let Some(told) = told {
                        assert_eq!(chain["hash_kv"], told.hash, "{name}");
                        assert_eq!(chain["live_keys"], told.live_keys, "{name}");
                    }
                } else {
                    assert_eq!(chain["hash_kv"], Value::Null);
                }
            }
        }
        // The default level.
        assert_eq!(verified(store.path(), &[])["level"], "checksums");
    }
}

#[test]
fn the_fold_is_what_etcd_had() {
    let row = |at: i64| {
        let e = expected(FIXTURE);
        e.hash_kv.into_iter().find(|h| h.revision == at)
    };
    let b = two_deltas();
    let json = verified(b.path(), &["--level", "fold"]);
    let told = row(LAST).unwrap();
    let chain = &json["chains"][0];
    assert_eq!(
        (&chain["hash_kv"], &chain["compact_revision"]),
        (&told.hash.into(), &told.compact_revision.into())
    );
}

/// Without --all-chains it reads only what a restore of the newest state needs; with it, everything once.
#[test]
fn no_level_reads_what_it_need_not() {
    let (b, names) = two_chains();
    let read = |args: &[&str]| verified(b.path(), args)["bytes_read"].as_u64().unwrap();
    assert_eq!(read(&["--level", "names"]), 0);
    assert_eq!(read(&["--level", "names", "--all-chains"]), 0);
    let chain = bytes_of(b.path(), &names[3..]);
    assert_eq!(read(&[]), chain);
    let all = bytes_of(b.path(), &names);
    assert_eq!(read(&["--all-chains"]), all);
    // What is folded is read a second time.
    assert_eq!(read(&["--level", "fold"]), 2 * chain);
    let json = verified(b.path(), &["--level", "fold", "--all-chains"]);
    assert_eq!(json["snapshots_read"], names.len());
    let equal: Vec<&Value> = json["chains"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| &c["equals_next"])
        .collect();
    assert_eq!(equal, [&Value::Bool(true), &Value::Null], "{json:#}");
}

#[test]
fn a_flipped_bit_in_any_snapshot_is_found_and_named() {
    let mut rng = fastrand::Rng::with_seed(seed());
    let (_, names) = two_chains();
    for (n, name) in names.iter().enumerate() {
        let (b, _) = two_chains();
        let path = format!("v2/{name}");
        let mut bytes = fs::read(b.path().join(&path)).unwrap();
        // After gzip's header, whose time and system fields are ignored.
        let at = rng.usize(20..bytes.len());
        bytes[at] ^= 1 << rng.u8(..8);
        b.put(&path, &bytes);
        let what = format!("{name} at {at}");
        // Names do not show it.
        verified(b.path(), &["--level", "names", "--all-chains"]);
        for level in ["checksums", "fold"] {
            let json = fails(
                b.path(),
                &["--level", level, "--all-chains"],
                65,
                "CorruptSnapshot",
            );
            let wanted = vec![("CorruptSnapshot".to_owned(), vec![path.clone()])];
            assert_eq!(found(&json, "error"), wanted, "{what}");
            // What can still be restored.
            let newest = json["newest"]["last_revision"].as_i64().unwrap();
            let reaches = match n {
                // The second full is lost; deltas lead past it.
                3 => LAST,
                4 => 1800,
                _ => LAST,
            };
            assert_eq!(newest, reaches, "{what}: {json:#}");
            let in_chain = n >= 3;
            let (code, _) = verify(b.path(), &["--level", level]);
            assert_eq!(code, if in_chain { 65 } else { 0 }, "{what}");
        }
    }
}

#[test]
fn all_that_is_wrong_is_told() {
    let (b, names) = two_chains();
    for name in [&names[1], &names[3], &names[4]] {
        b.put(&format!("v2/{name}"), b"damaged");
    }
    b.put("v2/notes.txt", b"hello");
    let json = fails(
        b.path(),
        &["--all-chains", "--level", "fold"],
        65,
        "CorruptSnapshot",
    );
    let errors: BTreeSet<String> = found(&json, "error")
        .into_iter()
        .flat_map(|f| f.1)
        .collect();
    let wanted = [1, 3, 4].map(|n: usize| format!("v2/{}", names[n]));
    assert_eq!(errors, BTreeSet::from(wanted), "{json:#}");
    assert!(
        json["message"]
            .as_str()
            .unwrap()
            .contains("2 more findings")
    );
    assert_eq!(reasons(&json, "note"), ["ForeignObject"]);
    assert_eq!(json["newest"]["last_revision"], BASE);
}

#[test]
fn a_missing_delta_is_a_gap() {
    let (b, names) = two_chains();
    fs::remove_file(b.path().join("v2").join(&names[1])).unwrap();
    // Not in the newest chain; the next full's history covers it only if that full is read.
    verified(b.path(), &["--level", "names"]);
    fails(
        b.path(),
        &["--level", "names", "--all-chains"],
        65,
        "RevisionGap",
    );
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.delta(1601, LAST, 9);
    for level in LEVELS {
        for args in [&["--level", level][..], &["--level", level, "--all-chains"]] {
            let json = fails(b.path(), args, 65, "RevisionGap");
            assert!(
                json["message"].as_str().unwrap().contains("1500 to 1600"),
                "{json:#}"
            );
            assert_eq!(json["newest"]["last_revision"], 1499);
        }
    }
}

/// A full with the whole history closes the gap before it.
#[test]
fn a_gap_that_the_next_full_covers_is_a_note() {
    let (b, names) = two_chains();
    fs::remove_file(b.path().join("v2").join(&names[1])).unwrap();
    let json = verified(b.path(), &["--all-chains"]);
    assert_eq!(reasons(&json, "note"), ["GapIsCovered"], "{json:#}");
    // A full without history does not.
    let b = Bucket::with_base();
    b.delta(1401, 1800, 7);
    full_of(&two_deltas(), &b, 1800, 8, "latest");
    verified(b.path(), &[]);
    fails(b.path(), &["--all-chains"], 65, "RevisionGap");
}

#[test]
fn a_missing_base_is_told() {
    let b = two_deltas();
    fs::remove_file(b.path().join(format!("v2/Full-00000000-{BASE:08}-{T0}.gz"))).unwrap();
    for level in LEVELS {
        let json = fails(b.path(), &["--level", level], 66, "NoSnapshots");
        assert_eq!(json["newest"], Value::Null);
        fails(
            b.path(),
            &["--level", level, "--all-chains"],
            66,
            "NoSnapshots",
        );
    }
    // In the older chain: the newest state can be restored, older states cannot.
    let b = Bucket::with_base();
    let base = b.names().remove(0);
    let lost = b.delta(BASE + 1, 1800, 7);
    full_of(&two_deltas(), &b, 1800, 8, "latest");
    fs::remove_file(b.path().join("v2").join(base)).unwrap();
    verified(b.path(), &[]);
    let json = verified(b.path(), &["--level", "names", "--all-chains"]);
    assert_eq!(reasons(&json, "note"), ["MissingBase"]);
    let json = fails(b.path(), &["--all-chains"], 65, "RevisionGap");
    assert_eq!(found(&json, "error")[0].1, [format!("v2/{lost}")]);
    // An empty prefix is a failure without an outcome.
    let empty = scratch::folder().unwrap();
    assert_eq!(verify(empty.path(), &[]).0, 66);
}

#[test]
fn a_snapshot_that_is_not_what_its_name_says() {
    for (from, to) in [
        (
            format!("Incr-00001500-{LAST:08}-{}.gz", T0 + 9),
            format!("Incr-00001500-{:08}-{}.gz", LAST + 5, T0 + 9),
        ),
        (
            format!("Full-00000000-{BASE:08}-{T0}.gz"),
            format!("Full-00000000-{:08}-{T0}.gz", BASE + 5),
        ),
    ] {
        let b = two_deltas();
        fs::rename(
            b.path().join("v2").join(from),
            b.path().join("v2").join(&to),
        )
        .unwrap();
        verified(b.path(), &["--level", "names"]);
        let json = fails(b.path(), &[], 65, "NameMismatch");
        assert_eq!(found(&json, "error")[0].1, [format!("v2/{to}")]);
        fails(
            b.path(),
            &["--all-chains", "--level", "fold"],
            65,
            "NameMismatch",
        );
    }
    // Compressed in another way than its name says.
    let b = two_deltas();
    let name = format!("Full-00000000-{BASE:08}-{T0}");
    fs::rename(
        b.path().join(format!("v2/{name}.gz")),
        b.path().join(format!("v2/{name}.zst")),
    )
    .unwrap();
    fails(b.path(), &[], 65, "CorruptSnapshot");
}

#[test]
fn a_delta_with_a_right_checksum_and_no_events() {
    let b = Bucket::with_base();
    let name = format!("v2/Incr-{:08}-{LAST:08}-{}.gz", BASE + 1, T0 + 6);
    for content in [&b"[]"[..], b"[", b"{}", b"null"] {
        b.put(&name, &Compression::Gzip.pack(&with_checksum(content)));
        let (code, json) = verify(b.path(), &[]);
        assert_eq!(code, 65, "{json:#}");
        assert_eq!(found(&json, "error")[0].1, std::slice::from_ref(&name));
    }
}

#[test]
fn forked_timelines_are_all_looked_at() {
    let b = two_deltas();
    b.altered_delta(1600, 1700, 12);
    let json = verified(b.path(), &["--level", "names"]);
    assert_eq!(
        reasons(&json, "note"),
        ["TimelinesUnverified", "OverlappingDeltas"]
    );
    let json = verified(b.path(), &["--level", "fold"]);
    assert_eq!(reasons(&json, "note"), ["ForkedHistory"]);
    assert_eq!(json["newest"]["last_revision"], 1700);
    let forked = json["newest"]["timeline"].as_str().unwrap().to_owned();
    assert!(forked.starts_with("r1600-"), "{forked}");
    let main = verified(b.path(), &["--level", "fold", "--timeline", "main"]);
    assert_eq!(main["chains"][0]["last_revision"], LAST);
    let json = verified(b.path(), &["--level", "fold", "--all-chains"]);
    let chains = json["chains"].as_array().unwrap();
    let ends: Vec<(&str, i64)> = chains
        .iter()
        .map(|c| {
            (
                c["timeline"].as_str().unwrap(),
                c["last_revision"].as_i64().unwrap(),
            )
        })
        .collect();
    assert_eq!(ends, [("main", LAST), (forked.as_str(), 1700)]);
    assert_ne!(chains[0]["hash_kv"], chains[1]["hash_kv"]);
    assert_eq!(verify(b.path(), &["--timeline", "r9-00000000"]).0, 66);
    // Damage on a branch that nobody restores matters only with --all-chains.
    let old = format!("Incr-00001500-{LAST:08}-{}.gz", T0 + 9);
    b.put(&format!("v2/{old}"), b"damaged");
    // It is needed to tell the histories apart.
    let json = fails(b.path(), &[], 65, "CorruptSnapshot");
    assert_eq!(found(&json, "error")[0].1, [format!("v2/{old}")]);
}

#[test]
fn two_clusters_at_once_are_told() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1000, 6);
    b.altered_delta(BASE + 1, 1000, 7);
    b.delta(1001, 1200, 8);
    b.altered_delta(1001, 1200, 9);
    for all in [&[][..], &["--all-chains"]] {
        let json = fails(b.path(), all, 65, "InterleavedTimelines");
        assert_eq!(json["newest"], Value::Null);
    }
}

#[test]
fn overlapping_streams_are_no_damage() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    let second = b.delta(1200, 1600, 7);
    b.delta(1500, LAST, 9);
    for level in LEVELS {
        let json = verified(b.path(), &["--level", level, "--all-chains"]);
        let notes = found(&json, "note");
        let overlap = notes.iter().find(|n| n.0 == "OverlappingDeltas").unwrap();
        assert!(overlap.1.contains(&format!("v2/{second}")), "{notes:?}");
    }
}

#[test]
fn what_is_excluded_is_not_looked_at() {
    let b = two_deltas();
    let bad = format!("Full-00000000-00001499-{}.gz", T0 + 7);
    b.put(&format!("v2/{bad}"), b"damaged");
    fails(b.path(), &["--all-chains"], 65, "CorruptSnapshot");
    b.put(&format!("deltafold-excluded/{bad}"), b"");
    for level in LEVELS {
        let json = verified(b.path(), &["--all-chains", "--level", level]);
        assert_eq!(
            found(&json, "note"),
            [("Excluded".to_owned(), vec![format!("v2/{bad}")])]
        );
        assert_eq!(json["excluded"], 1);
    }
}

/// A full whose name continues the chain but whose content has another history: only folding shows it.
#[test]
fn a_full_of_another_history_is_found_by_its_hash() {
    let source = Bucket::with_base();
    let altered = alter(source.events(BASE + 1, 1800), b"x");
    source.delta_of(BASE + 1, 1800, 6, &altered);
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1800, 6);
    let wrong = full_of(&source, &b, 1800, 8, "latest");
    b.delta(1801, LAST, 9);
    for level in ["names", "checksums"] {
        verified(b.path(), &["--level", level, "--all-chains"]);
    }
    let json = fails(
        b.path(),
        &["--level", "fold", "--all-chains"],
        65,
        "HistoryDiffers",
    );
    let told = found(&json, "error")
        .into_iter()
        .any(|f| f.1.contains(&format!("v2/{wrong}")));
    assert!(told, "{json:#}");
    assert_eq!(json["chains"][0]["equals_next"], false, "{json:#}");
}

/// A delta that does not continue the one before: the version of a key does not follow.
#[test]
fn a_delta_that_does_not_follow_is_found_by_the_fold() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    let mut events = b.events(1500, LAST);
    let at = events
        .iter()
        .position(|e| e["etcdEvent"]["kv"]["version"].as_i64() > Some(1))
        .unwrap();
    let version = &mut events[at]["etcdEvent"]["kv"]["version"];
    *version = (version.as_i64().unwrap() + 1).into();
    let name = b.delta_of(1500, LAST, 9, &events);
    verified(b.path(), &["--all-chains"]);
    for args in [
        &["--level", "fold"][..],
        &["--level", "fold", "--all-chains"],
    ] {
        let json = fails(b.path(), args, 65, "HistoryMismatch");
        assert_eq!(
            found(&json, "error")[0].1,
            [format!("v2/{name}")],
            "{json:#}"
        );
        assert_eq!(json["newest"]["last_revision"], 1499);
    }
}

#[test]
fn without_the_key_nothing_is_called_damaged() {
    use age::secrecy::ExposeSecret as _;
    let key = age::x25519::Identity::generate();
    let b = two_deltas();
    let recipient = key.to_public().to_string();
    let made = b.compact(&["--age-recipient", &recipient, "--allow-plaintext"]);
    assert!(made["snapshot"].as_str().unwrap().ends_with(".age"));
    for level in ["checksums", "fold"] {
        let (code, json) = verify(b.path(), &["--level", level]);
        assert_eq!((code, &json["reason"]), (77, &"CannotDecrypt".into()));
    }
    verified(b.path(), &["--level", "names"]);
    let file = scratch::folder().unwrap();
    let file = file.path().join("key");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, key.to_string().expose_secret()).unwrap();
    let json = verified(
        b.path(),
        &[
            "--level",
            "fold",
            "--all-chains",
            "--age-identity",
            file.to_str().unwrap(),
            // Plain snapshots were folded.
            "--allow-plaintext",
        ],
    );
    assert_eq!(json["chains"][0]["equals_next"], true, "{json:#}");
}

#[test]
fn memory_does_not_grow_with_the_backup() {
    let peak = |keys: i64| {
        let b = two_deltas();
        b.noise_delta(keys);
        let json = verified(
            b.path(),
            &["--all-chains", "--level", "fold", "--threads", "2"],
        );
        json["peak_memory_bytes"].as_u64().unwrap()
    };
    let (small, large) = (peak(10), peak(300));
    assert!(large < small + (24 << 20), "{small} and {large} bytes");
}

#[test]
fn flags_that_do_not_go_together() {
    let b = two_deltas();
    let etcd = tools::etcd(EtcdVersion::V3_6);
    let etcd = etcd.to_str().unwrap();
    for args in [
        &["--level", "names", "--etcd-binary", etcd][..],
        &["--level", "checksums", "--etcd-binary", etcd],
        &["--revision", "1000"],
        &["--level", "all"],
        &["--level", "fold", "--endpoints", "http://127.0.0.1:1"],
        &["--all-chains", "--endpoints", "http://127.0.0.1:1"],
        &["--etcd-binary", "/no/such/etcd"],
        &["--etcd-binary", "/tmp"],
        &["--etcd-binary", "/etc/passwd"],
        &["--drill-timeout", "0s"],
    ] {
        let (code, json) = verify(b.path(), args);
        assert_eq!((code, &json["reason"]), (64, &"Usage".into()), "{args:?}");
    }
    // A flag wins over the variable of the other.
    let mut c = command(b.path(), &["--level", "names"]);
    let (code, json, _) = run_json(c.env("DELTAFOLD_ENDPOINTS", "http://127.0.0.1:1"));
    assert_eq!((code, &json["verdict"]), (0, &"Verified".into()));
}

#[test]
fn the_metrics_file_tells_of_success_and_failure() {
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("verify.prom");
    let with = |store: &Path| verify(store, &["--metrics-file", file.to_str().unwrap()]).0;
    let value = |name: &str| -> Option<f64> {
        let text = fs::read_to_string(&file).unwrap();
        let line = text
            .lines()
            .find(|l| l.strip_prefix(name).is_some_and(|r| r.starts_with(' ')))?;
        line.rsplit(' ').next()?.parse().ok()
    };
    let b = two_deltas();
    assert_eq!(with(b.path()), 0);
    assert_eq!(value("deltafold_verify_errors"), Some(0.0));
    assert_eq!(
        value("deltafold_restorable_last_revision"),
        Some(LAST as f64)
    );
    assert_eq!(value("deltafold_verify_snapshots"), Some(3.0));
    let made = value("deltafold_verify_newest_snapshot_timestamp_seconds");
    assert_eq!(made, Some((T0 + 9) as f64));
    assert_eq!(value("deltafold_job_succeeded{job=\"verify\"}"), Some(1.0));
    // Another user can read it.
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o444, 0o444, "{mode:o}");
    b.put(
        &format!("v2/Incr-00001500-{LAST:08}-{}.gz", T0 + 9),
        b"damaged",
    );
    assert_eq!(with(b.path()), 65);
    assert_eq!(value("deltafold_verify_errors"), Some(1.0));
    assert_eq!(
        value("deltafold_verify_findings{reason=\"CorruptSnapshot\"}"),
        Some(1.0)
    );
    assert_eq!(value("deltafold_restorable_last_revision"), Some(1499.0));
    assert_eq!(value("deltafold_job_succeeded{job=\"verify\"}"), Some(0.0));
    // A run without an outcome, too.
    assert_eq!(with(folder.path()), 66);
    assert_eq!(value("deltafold_verify_errors"), None);
    assert_eq!(value("deltafold_job_succeeded{job=\"verify\"}"), Some(0.0));
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        1,
        "nothing is left beside it"
    );
    let (code, json) = verify(b.path(), &["--metrics-file", "/no/such/folder/x.prom"]);
    assert_eq!((code, &json["reason"]), (78, &"Configuration".into()));
}

// Restore drills.
