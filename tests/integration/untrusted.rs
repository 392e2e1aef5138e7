//! Attacks on an encrypted prefix by somebody without a key: plain snapshots are never used as input.

use crate::support::etcd::EtcdVersion;
use crate::support::follower::QUICK;
use crate::support::history::{Compression, with_checksum};
use crate::support::keys::{Key, args, plain_bucket, seal_all, sealed_bucket, sealed_for};
use crate::support::made_backups::{BASE, Bucket, LAST, T0, objects_in};
use crate::support::recorded_etcd::with_etcd;
use crate::support::{deltafold, run_json, scratch};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Returns an encrypted base and delta up to 1499, and a plain delta that an attacker has added.
fn forged(key: &Key) -> (Bucket, String) {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, 1499, 6);
    seal_all(bucket.path(), &[key]);
    let forged = bucket.altered_delta(1500, LAST, 9);
    (bucket, forged)
}

/// Asserts that a command is refused. Returns the message.
fn refused(bucket: &Bucket, command: &str, flags: &[&str]) -> String {
    // A failed verification is recorded.
    let snapshots = || {
        let mut objects = bucket.objects();
        objects.retain(|path, _| !path.starts_with("deltafold-verified/"));
        objects
    };
    let before = snapshots();
    let (code, json, stderr) = bucket.run(command, flags);
    let is = (code, json["reason"].as_str());
    assert_eq!(is, (65, Some("Untrusted")), "{command} {flags:?}: {stderr}");
    assert!(snapshots() == before, "{command} wrote something");
    json["message"].as_str().unwrap().to_owned()
}

fn copy(from: &Bucket, to: &Path, flags: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.args(["copy", "--output", "json", "--from"])
        .arg(from.path());
    run_json(c.arg("--to").arg(to).args(flags))
}

fn succeeds(bucket: &Bucket, command: &str, flags: &[&str]) -> Value {
    let (code, json, stderr) = bucket.run(command, flags);
    assert_eq!(code, 0, "{command} {flags:?}: {stderr}");
    json
}

#[test]
fn a_plain_delta_behind_an_encrypted_chain_is_no_input() {
    let key = Key::new();
    let (bucket, forged) = forged(&key);
    let (reads, both) = (key.reads(), key.both());
    let (reads, both) = (args(&reads), args(&both));
    let folder = scratch::folder().unwrap();
    let to = folder.path().join("data").to_str().unwrap().to_owned();
    let commands: [(&str, &[&str]); 9] = [
        ("restore", &["--data-dir", &to]),
        ("restore", &["--data-dir", &to, "--revision", "800"]),
        ("restore", &["--data-dir", &to, "--dry-run"]),
        ("get", &["--prefix", ""]),
        ("history", &["/registry/a"]),
        ("diff", &["--from", "800", "--to", "900"]),
        ("export", &[]),
        ("verify", &["--level", "names"]),
        ("verify", &["--all-chains"]),
    ];
    for (command, flags) in commands {
        let said = refused(&bucket, command, &[flags, &reads].concat());
        assert!(said.contains(&format!("v2/{forged}")), "{command}: {said}");
        assert!(said.contains("--allow-plaintext"), "{command}: {said}");
    }
    let said = refused(&bucket, "compact", &both);
    assert!(said.contains(&forged), "{said}");
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);

    let listed = bucket.list(&reads);
    let marked = |s: &&Value| s["untrusted"] == true;
    let untrusted: Vec<&Value> = listed["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .filter(marked)
        .collect();
    assert_eq!(untrusted.len(), 1);
    assert_eq!(untrusted[0]["name"], forged);
    assert_eq!(listed["latest_revision"], 1499);

    // Who says that the plain one counts gets what it holds.
    for (command, flags) in [
        ("get", &["--prefix", ""][..]),
        ("restore", &["--data-dir", &to]),
    ] {
        let allows = [flags, &reads, &["--allow-plaintext"]].concat();
        assert_eq!(succeeds(&bucket, command, &allows)["revision"], LAST);
    }
    // Nor does an excluded one count.
    let mark = format!("deltafold-excluded/{forged}");
    bucket.put(&mark, b"");
    let got = succeeds(&bucket, "get", &[&["--prefix", ""][..], &reads].concat());
    assert_eq!(got["revision"], 1499);
    fs::remove_file(bucket.path().join(mark)).unwrap();
    // An encrypted snapshot behind it leaves it out.
    let made = bucket.compact(&[&both[..], &["--allow-plaintext"]].concat());
    assert_eq!(made["revision"], LAST);
    let (code, got, stderr) = bucket.run("get", &[&["--prefix", ""][..], &reads].concat());
    assert_eq!((code, &got["revision"]), (0, &json!(LAST)), "{stderr}");
    assert!(stderr.contains(&forged), "{stderr}");
    let verified = succeeds(&bucket, "verify", &reads);
    let note = &verified["findings"][0];
    assert_eq!(
        (&note["reason"], &note["severity"]),
        (&json!("Untrusted"), &json!("note"))
    );
}

#[test]
fn a_plain_full_is_no_input_however_it_is_named() {
    let key = Key::new();
    let (reads, both) = (key.reads(), key.both());
    let (reads, both) = (args(&reads), args(&both));
    let sealed = sealed_bucket(&[&key]).objects();
    let plain = plain_bucket();
    let base = plain.names()[0].clone();
    let full = fs::read(plain.path().join("v2").join(base)).unwrap();
    let names = [
        // Newest by time, with a low and a high revision, in the future, and of one byte.
        (
            format!("Full-00000000-00000746-{}.gz", T0 + 100),
            full.clone(),
        ),
        (
            format!("Full-00000000-00009000-{}.gz", T0 + 100),
            full.clone(),
        ),
        ("Full-00000000-00009000-99999999999.gz".to_owned(), full),
        (
            format!("Full-00000000-00009000-{}", T0 + 100),
            b"x".to_vec(),
        ),
    ];
    for (name, bytes) in names {
        let bucket = Bucket::of(&sealed);
        bucket.put(&format!("v2/{name}"), &bytes);
        for (command, flags) in [
            ("get", [&["--prefix", ""][..], &reads].concat()),
            ("verify", reads.clone()),
            ("compact", both.clone()),
        ] {
            let said = refused(&bucket, command, &flags);
            assert!(said.contains(&name), "{said}");
        }
    }
    // A plain snapshot older than the newest encrypted one changes nothing.
    let bucket = Bucket::of(&sealed);
    let old = format!("v2/Full-00000000-00009000-{}", T0 - 1);
    bucket.put(&old, b"x");
    let got = succeeds(&bucket, "get", &[&["--prefix", ""][..], &reads].concat());
    assert_eq!(got["revision"], LAST);
}

#[test]
fn a_plain_prefix_is_copied_and_not_continued_with_encrypted_snapshots() {
    let key = Key::new();
    let (reads, both, writes) = (key.reads(), key.both(), key.writes());
    let (reads, both, writes) = (args(&reads), args(&both), args(&writes));
    let bucket = plain_bucket();
    let all = [&["--prefix", ""][..], &reads].concat();
    for (command, flags) in [("get", &all), ("compact", &both), ("compact", &writes)] {
        let said = refused(&bucket, command, flags);
        assert!(said.contains("nothing there is encrypted"), "{said}");
        assert!(said.contains("deltafold copy --from"), "{said}");
    }
    let copy = |to: &Path, flags: &[&str]| copy(&bucket, to, flags);
    // Recipients speak for the target, an identity for the source.
    let target = scratch::folder().unwrap();
    let (code, json, stderr) = copy(target.path(), &both);
    assert_eq!(
        (code, &json["reason"]),
        (65, &json!("Untrusted")),
        "{stderr}"
    );
    let (code, json, stderr) = copy(target.path(), &writes);
    assert_eq!((code, &json["copied"]), (0, &json!(3)), "{stderr}");
    let copied = Bucket::of(&objects_in(target.path()));
    assert_eq!(succeeds(&copied, "get", &all)["revision"], LAST);
    // Nor does a copy make a plain target an encrypted one.
    let beside = Bucket::of(&plain_bucket().objects());
    let (code, json, stderr) = copy(beside.path(), &writes);
    assert_eq!(
        (code, &json["reason"]),
        (65, &json!("Untrusted")),
        "{stderr}"
    );
    let (code, _, stderr) = copy(
        beside.path(),
        &[&writes[..], &["--allow-plaintext"]].concat(),
    );
    assert_eq!(code, 0, "{stderr}");
    // With the flag it becomes a mixed prefix, in which the old states need it, too.
    let made = bucket.compact(&[&both[..], &["--allow-plaintext"]].concat());
    assert_eq!(made["revision"], LAST);
    assert_eq!(succeeds(&bucket, "get", &all)["revision"], LAST);
    let past = [&all[..], &["--revision", "800"]].concat();
    let said = refused(&bucket, "get", &past);
    assert!(said.contains("--allow-plaintext"), "{said}");
    let there = succeeds(
        &bucket,
        "get",
        &[&past[..], &["--allow-plaintext"]].concat(),
    );
    let expected = succeeds(
        &plain_bucket(),
        "get",
        &["--prefix", "", "--revision", "800"],
    );
    assert_eq!(there["keys"], expected["keys"]);
}

#[test]
fn a_copy_changes_the_encryption_of_nothing_that_somebody_has_put_there() {
    let (key, other) = (Key::new(), Key::new());
    let (bucket, forged) = forged(&key);
    let (reads, writes) = (key.reads(), other.writes());
    let decrypts = ["--decrypt".to_owned()];
    for changes in [&writes[..], &decrypts] {
        let flags = [&reads[..], changes].concat();
        let target = scratch::folder().unwrap();
        let (code, json, stderr) = copy(&bucket, target.path(), &args(&flags));
        assert_eq!(
            (code, &json["reason"]),
            (65, &json!("Untrusted")),
            "{stderr}"
        );
        assert!(
            json["message"].as_str().unwrap().contains(&forged),
            "{json}"
        );
        assert!(objects_in(target.path()).is_empty());
    }
}

#[test]
fn plain_fulls_make_nothing_go() {
    let key = Key::new();
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, 1499, 6);
    bucket.compact(&[]);
    bucket.delta(1500, LAST, 9);
    let newest = bucket.compact(&[])["snapshot"].as_str().unwrap().to_owned();
    let full = fs::read(bucket.path().join("v2").join(newest)).unwrap();
    seal_all(bucket.path(), &[&key]);
    let clean = Bucket::of(&bucket.objects());
    // Valid in every way except encryption.
    let forged =
        [-5, 8, 30, 40, 50].map(|after| format!("v2/Full-00000000-{LAST:08}-{}.gz", T0 + after));
    for path in &forged {
        bucket.put(path, &full);
    }
    let reads = key.reads();
    let flags = ["--policy", "limit", "--limit", "2", "--apply"];
    let flags = [&flags[..], &["--restorable-window", "0s"]].concat();
    let collect = |of: &Bucket| {
        let before = of.objects();
        let done = succeeds(of, "gc", &[&flags[..], &args(&reads)].concat());
        let left = of.objects();
        let gone = before.into_keys().filter(|p| !left.contains_key(p));
        (gone.collect::<Vec<_>>(), done)
    };
    let (gone, done) = collect(&bucket);
    assert!(!gone.is_empty(), "{done}");
    assert_eq!(gone, collect(&clean).0, "{done}");
    let told: Vec<&Value> = done["damaged_fulls"].as_array().unwrap().iter().collect();
    assert_eq!(told.len(), forged.len(), "{done}");
    assert!(told.iter().all(|d| d["reason"] == "Untrusted"), "{done}");
}

#[test]
fn a_saver_counts_plain_snapshots_as_not_there() {
    let key = Key::new();
    let (both, writes) = (key.both(), key.writes());
    let both = args(&both);
    with_etcd(EtcdVersion::V3_6, |world| {
        // A prefix that was plain until now.
        world.put_many("/a/", 20, 100);
        world.snapshot("full", &[]).succeeded();
        world.put("/b", "1");
        for (kind, flags) in [("delta", &both), ("full", &args(&writes))] {
            let refused = world.snapshot(kind, flags);
            assert_eq!(refused.json["reason"], "Untrusted", "{}", refused.log);
        }
        // With the flag, a delta follows the plain full. Without it, the next one has no full.
        let taken = world.delta(&[&both[..], &["--allow-plaintext"]].concat());
        assert_eq!(taken.json["full_reason"], Value::Null, "{}", taken.json);
        world.put("/b", "2");
        let taken = world.delta(&both);
        assert_eq!(taken.json["full_reason"], "NoFull", "{}", taken.json);
        let store = Path::new(&world.prefix.url).to_owned();
        let forge = |start: i64, last: i64, created: i64| {
            let bytes = Compression::Gzip.pack(&with_checksum(b"[]"));
            let name = format!("v2/Incr-{start:08}-{last:08}-{created}.gz");
            fs::write(store.join(&name), bytes).unwrap();
            name
        };
        // An attacker adds a plain object, and another one with a name in the future.
        world.put("/b", "3");
        world.delta(&both);
        let last = world.prefix.last_saved();
        let newest = world.prefix.names().last().unwrap().created;
        while chrono::Utc::now().timestamp() <= newest {
            std::thread::sleep(Duration::from_millis(50));
        }
        forge(last + 1, last + 100, newest + 1);
        let future = forge(last + 1, last + 100, 99_999_999_999);
        let fulls = world.prefix.fulls().len();
        for n in 0..2 {
            world.put("/b", n.to_string());
            let taken = world.delta(&both);
            assert_eq!(taken.json["full_reason"], Value::Null, "{}", taken.json);
            assert!(taken.log.contains(&future), "{}", taken.log);
        }
        let mut follower = world.follow(&[&QUICK[..], &both].concat());
        let revision = world.put("/c", "1");
        follower.wait_until("a delta", || {
            let names = world.prefix.names();
            names.iter().any(|n| n.is_encrypted && n.last.0 >= revision)
        });
        follower.terminate().succeeded();
        assert_eq!(world.prefix.fulls().len(), fulls);
        // Without the forged ones, the trusted snapshots hold the whole cluster.
        fs::remove_file(store.join(future)).unwrap();
        let mut c = deltafold();
        c.args(["get", "/c", "--output", "result", "--store"])
            .arg(&store);
        let (code, got, stderr) = run_json(c.args(&both));
        assert_eq!(
            (code, &got["revision"]),
            (0, &json!(world.revision())),
            "{stderr}"
        );
    });
}

/// Somebody who can write puts objects there that nobody can open. Each is newer than all others, or leaves a doubt about
/// histories, or has a name of the future.
#[test]
fn a_forged_name_stops_no_saving() {
    let (key, other) = (Key::new(), Key::new());
    let (both, writes) = (key.both(), key.writes());
    let rubbish = [b"x".to_vec(), sealed_for(&[&other], &[7; 1000])];
    with_etcd(EtcdVersion::V3_6, |world| {
        let folder = world.folder().to_owned();
        for (name, flags) in [("plain", Vec::new()), ("encrypted", args(&both))] {
            let store = folder.join(name);
            fs::create_dir(&store).unwrap();
            world.prefix.url = store.to_str().unwrap().to_owned();
            world.put_many("/a/", 20, 100);
            world.snapshot("full", &flags).succeeded();
            world.put("/b", "1");
            world.delta(&flags);
            let last = world.prefix.last_saved();
            let newest = world.prefix.names().last().unwrap().created;
            let forged = [
                format!("Incr-{:08}-{:08}-{}.gz", last + 1, last + 100, newest + 1),
                format!("Full-00000000-{:08}-{}.gz", last + 100, newest + 1),
                format!("Full-00000000-00000003-{}.gz", newest),
                format!("Incr-00000002-{:08}-{}.gz", last, newest),
                format!("Full-00000000-{:08}-{}.gz", last + 100, newest + 86_400),
                format!("Full-00000000-99999999-{}.gz", 99_999_999_999_i64),
            ];
            for forged in &forged {
                for (n, rubbish) in rubbish.iter().enumerate() {
                    let path = store.join(format!("v2/{forged}.age"));
                    fs::write(&path, rubbish).unwrap();
                    let revision = world.put("/b", format!("{n}"));
                    let taken = world.delta(&flags);
                    let (full, began) = (&taken.json["full_reason"], &taken.json["timeline_began"]);
                    let is = (full, began, taken.json["revision"].as_i64());
                    let right = (&Value::Null, &json!(false), Some(revision));
                    assert_eq!(is, right, "{name} {forged}: {}", taken.log);
                    fs::remove_file(path).unwrap();
                }
            }
            // A restore goes around a full of the newest revision.
            let last = world.prefix.last_saved();
            let newest = world.prefix.names().last().unwrap().created;
            let path = store.join(format!("v2/Full-00000000-{last:08}-{}.gz.age", newest + 1));
            fs::write(&path, &rubbish[1]).unwrap();
            let mut c = deltafold();
            c.args(["restore", "--output", "json", "--data-dir"]);
            c.arg(folder.join(format!("{name}.data")))
                .arg("--store")
                .arg(&store);
            let (code, restored, stderr) = run_json(c.args(&flags));
            assert_eq!((code, &restored["revision"]), (0, &json!(last)), "{stderr}");
            assert!(stderr.contains("not opened, and not used"), "{stderr}");
            fs::remove_file(path).unwrap();
            for forged in &forged {
                fs::write(store.join(format!("v2/{forged}.age")), &rubbish[1]).unwrap();
            }
            for _ in 0..2 {
                let revision = world.put("/b", "3");
                let taken = world.snapshot("full", &flags).succeeded();
                let is = (
                    &taken.json["timeline_began"],
                    taken.json["revision"].as_i64(),
                );
                assert_eq!(is, (&json!(false), Some(revision)), "{name}: {}", taken.log);
            }
            if name == "encrypted" {
                // Who can only encrypt takes fulls by names.
                world.put("/b", "4");
                world.snapshot("full", &args(&writes)).succeeded();
            }
        }
    });
}
