//! An attacker who can write but not delete tries to make `gc` delete: by rubbish, cut copies, and renamed or
//! damaged fulls.

use crate::support::gc_history::{
    GcHistory, HOUR, NEWEST_FULL, NOTHING, decided, reasons, snapshots,
};
use crate::support::keys::{Key, seal_all, sealed_for};
use crate::support::made_backups::{BASE, LAST};
use chrono::{DateTime, Utc};
use deltafold::backup::catalog::mark_of;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Retention policies, among them the controller's default. Each keeps only the newest of the real fulls.
const POLICIES: [&[&str]; 4] = [
    &NEWEST_FULL,
    &[
        "--allow-shrink",
        "--restorable-window",
        "0s",
        "--policy",
        "exponential",
        "--keep-hourly",
        "1",
        "--keep-daily",
        "0",
        "--keep-weekly",
        "0",
    ],
    &NOTHING,
    &[
        "--allow-shrink",
        "--restorable-window",
        "0s",
        "--policy",
        "limit",
        "--limit",
        "1",
        "--delta-retention",
        "2h",
    ],
];

fn gc(p: &GcHistory, args: &[&str], more: &[&str]) -> Value {
    let (code, result, stderr) = p.bucket.run("gc", &[args, more].concat());
    assert_eq!(code, 0, "{args:?}: {stderr}");
    result
}

/// Returns the paths that are reported as worthless.
fn damaged(result: &Value) -> BTreeSet<String> {
    let damaged = result["damaged_fulls"].as_array().unwrap().iter();
    damaged
        .map(|d| {
            assert!(d["message"].as_str().unwrap().len() > 20, "{d}");
            d["path"].as_str().unwrap().to_owned()
        })
        .collect()
}

/// Makes forged objects out of a real backup.
type Forge = dyn Fn(&GcHistory) -> Vec<(String, Vec<u8>)>;

/// Asserts that `gc` removes the same with forged fulls as without them, or less, and reports each one that
/// mattered.
fn harms_nothing(forge: &Forge) {
    for policy in POLICIES {
        let p = GcHistory::new();
        let real = snapshots(&p.bucket.objects());
        let would = decided(&gc(&p, policy, &[]), "Delete");
        assert!(would.len() > 2, "{policy:?}: nothing is at stake");
        let forged = forge(&p);
        for (path, bytes) in &forged {
            p.bucket.put(path, bytes);
        }
        let forged: BTreeSet<String> = forged.into_iter().map(|f| f.0).collect();
        for args in [&[][..], &["--apply"], &["--apply"]] {
            let done = gc(&p, policy, args);
            let gone = &decided(&done, "Delete") - &forged;
            assert!(gone.is_subset(&would), "{policy:?} {args:?}: {gone:?}");
            assert!(damaged(&done).is_subset(&forged), "{done:#}");
            let left = snapshots(&p.bucket.objects());
            let lost = &real - &left;
            assert!(lost.is_subset(&would), "{policy:?} {args:?}: {lost:?}");
            if args.is_empty() || lost.is_empty() {
                assert!(!damaged(&done).is_empty(), "{policy:?}: {done:#}");
                let told = done["warnings"].to_string();
                assert!(told.contains("kept but ignored"), "{told}");
            }
        }
    }
}

fn name(last: i64, created: i64) -> String {
    format!("v2/Full-00000000-{last:08}-{created}.gz")
}

#[test]
fn seven_objects_of_one_byte() {
    harms_nothing(&|p| {
        let rubbish = |n| (name(LAST + n, p.now + n), b"x".to_vec());
        (1..8).map(rubbish).collect()
    });
}

/// Exclusion markers that nobody but the attacker set: what they exclude is kept, and its deltas with it.
#[test]
fn marks_of_exclusion() {
    for spared in [0, 1] {
        let p = GcHistory::new();
        let real = snapshots(&p.bucket.objects());
        let mut fulls: Vec<&String> = real.iter().filter(|p| p.contains("/Full-")).collect();
        fulls.sort_by_key(|f| f.rsplit('-').next().unwrap().to_owned());
        let spared: Vec<&String> = fulls.into_iter().take(spared).collect();
        for path in real.iter().filter(|p| !spared.contains(p)) {
            p.bucket.put(&mark_of(path), b"");
        }
        let marked = snapshots(&p.bucket.objects());
        let done = gc(&p, &NEWEST_FULL, &["--apply"]);
        assert_eq!(decided(&done, "Delete"), BTreeSet::new());
        assert_eq!(snapshots(&p.bucket.objects()), marked);
    }
}

#[test]
fn a_cut_copy_of_a_real_full() {
    harms_nothing(&|p| {
        let objects = p.bucket.objects();
        let real = &objects[&p.full(2100, 1)];
        let half = real[..real.len() / 2].to_vec();
        vec![(name(LAST, p.now + 1), half)]
    });
}

#[test]
fn a_real_full_under_a_higher_revision() {
    harms_nothing(&|p| {
        let objects = p.bucket.objects();
        let real = objects[&p.full(2100, 1)].clone();
        vec![(name(LAST, p.now + 1), real)]
    });
}

#[test]
fn a_flipped_bit_in_a_copy() {
    harms_nothing(&|p| {
        let objects = p.bucket.objects();
        let mut real = objects[&p.full(2100, 1)].clone();
        let middle = real.len() / 2;
        real[middle] ^= 4;
        vec![(name(2100, p.now + 1), real)]
    });
}

/// The newest real full is overwritten, so the chain before it is needed again.
#[test]
fn damage_in_the_newest_full() {
    for policy in POLICIES {
        let p = GcHistory::new();
        let newest = p.full(2100, 1);
        let mut bytes = p.bucket.objects()[&newest].clone();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        p.bucket.put(&newest, &bytes);
        let done = gc(&p, policy, &["--apply"]);
        assert_eq!(damaged(&done), BTreeSet::from([newest.clone()]));
        assert_eq!(reasons(&done)[&newest], "Damaged");
        let left = snapshots(&p.bucket.objects());
        for needed in [
            newest,
            p.full(1499, 7),
            p.delta(1500, 1800, 6),
            p.delta(1801, 2100, 3),
            p.delta(2101, LAST, 0),
        ] {
            assert!(left.contains(&needed), "{policy:?}: {needed}");
        }
        let last = done["restorable_after"][0]["last_revision"].as_i64();
        assert_eq!(last, Some(LAST), "{done:#}");
    }
}

/// A forged full after a pinned one would end its chain.
#[test]
fn rubbish_that_cuts_a_pinned_chain_short() {
    let p = GcHistory::new();
    let pinned = p.full(BASE, 10).replace("v2/", "");
    assert_eq!(p.bucket.run("pin", &[&pinned]).0, 0);
    let rubbish = name(1100, p.now - 9 * HOUR + 1);
    p.bucket.put(&rubbish, b"rubbish");
    let done = gc(&p, &NOTHING, &["--apply"]);
    assert_eq!(damaged(&done), BTreeSet::from([rubbish]));
    assert_eq!(reasons(&done)[&p.delta(1101, 1499, 8)], "Pinned");
}

/// Fulls are read in every run that removes. A note that calls garbage a full that was read is not believed.
#[test]
fn a_forged_note_makes_no_real_snapshot_go() {
    let p = GcHistory::new();
    let rubbish = name(LAST + 1, p.now + 1);
    p.bucket.put(&rubbish, b"x");
    let m = fs::metadata(p.bucket.path().join(&rubbish)).unwrap();
    let modified: DateTime<Utc> = m.modified().unwrap().into();
    let etag = format!("{:x}-{:x}.{:x}", m.ino(), m.ctime(), m.ctime_nsec());
    let forged = json!({"form": 1, "fulls": {&rubbish: {"bytes": 1, "etag": etag, "modified": modified,
        "readAt": modified, "sha256": "00", "bad": null}}});
    p.bucket
        .put("deltafold-verified.json", forged.to_string().as_bytes());
    let real = p.full(2100, 1);
    for _ in 0..2 {
        let done = gc(&p, &NEWEST_FULL, &["--apply"]);
        assert_eq!(
            damaged(&done),
            BTreeSet::from([rubbish.clone()]),
            "{done:#}"
        );
        let left = snapshots(&p.bucket.objects());
        assert!(left.contains(&real) && left.contains(&p.delta(2101, LAST, 0)));
    }
}

/// A run that has no time to read what its removals rest on removes nothing and says so.
#[test]
fn without_time_to_read_nothing_goes() {
    let p = GcHistory::new();
    for n in 1..60 {
        p.bucket.put(&name(LAST + n, p.now + n), b"x");
    }
    let before = snapshots(&p.bucket.objects());
    let limit = POLICIES[0];
    let short = [limit, &["--apply", "--timeout", "1ms"]].concat();
    let (code, result, stderr) = p.bucket.run("gc", &short);
    assert_eq!(
        (code, &result["reason"]),
        (75, &"PartlyDone".into()),
        "{stderr}"
    );
    assert!(result["fulls_not_read"].as_u64() > Some(0), "{result:#}");
    assert_eq!(snapshots(&p.bucket.objects()), before);
    let done = gc(&p, limit, &["--apply"]);
    assert_eq!(
        (&done["fulls_not_read"], damaged(&done).len()),
        (&0.into(), 59)
    );
    let left = snapshots(&p.bucket.objects());
    assert!(left.contains(&p.full(2100, 1)) && left.contains(&p.delta(2101, LAST, 0)));
    assert!(!left.contains(&p.full(BASE, 10)));
}

/// An age file that nobody can open.
fn rubbish_in_age() -> Vec<u8> {
    sealed_for(&[&Key::new()], &[7; 100_000])
}

#[test]
fn rubbish_behind_an_age_header_in_a_plain_prefix() {
    let rubbish = rubbish_in_age();
    harms_nothing(&move |p| {
        let rubbish = |n| {
            (
                format!("{}.age", name(LAST + n, p.now + n)),
                rubbish.clone(),
            )
        };
        (1..8).map(rubbish).collect()
    });
}

#[test]
fn rubbish_among_encrypted_fulls() {
    let p = GcHistory::new();
    let key = Key::new();
    seal_all(p.bucket.path(), &[&key]);
    let identity = key.reads();
    let identity = [identity[0].as_str(), &identity[1]];
    let limit = POLICIES[0];
    let newest = format!("{}.age", p.full(2100, 1));
    assert_eq!(decided(&gc(&p, limit, &identity), "Delete").len(), 6);
    // A full that cannot be opened counts for nothing, so nothing could be removed.
    let (code, json, _) = p.bucket.run("gc", limit);
    assert_eq!((code, &json["reason"]), (77, &"CannotDecrypt".into()));
    let whole = p.bucket.objects()[&newest].clone();
    let cut = whole[..150].to_vec();
    let mut flipped = whole;
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    for bytes in [b"x".to_vec(), cut, flipped, rubbish_in_age()] {
        p.bucket.put(&newest, &bytes);
        let with = gc(&p, limit, &identity);
        assert_eq!(damaged(&with), BTreeSet::from([newest.clone()]));
        let goes = decided(&with, "Delete");
        let needed = format!("{}.age", p.delta(1801, 2100, 3));
        assert!(
            !goes.contains(&newest) && !goes.contains(&needed),
            "{goes:?}"
        );
    }
}

/// A full that exceeds one run's limits is read again by a run with other limits.
#[test]
fn a_low_limit_of_one_run_is_not_remembered_as_damage() {
    let p = GcHistory::new();
    let policy = POLICIES[0];
    let would = decided(&gc(&p, policy, &[]), "Delete");
    let low = ["--apply", "--max-database-bytes", "1KiB"];
    let (_, result, stderr) = p.bucket.run("gc", &[policy, &low].concat());
    assert!(
        result["damaged_fulls"].to_string().contains("TooLarge"),
        "nothing was too large: {stderr}"
    );
    assert_eq!(decided(&gc(&p, policy, &["--apply"]), "Delete"), would);
}
