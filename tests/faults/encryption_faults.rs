//! Encrypted backups under damage, kills and concurrent runs, without plain text anywhere meanwhile.

use crate::support::deltafold;
use crate::support::history::{Compression, with_checksum};
use crate::support::keys::{
    Key, args, holds_mark, marks, object, seal_all, sealed_bucket, sealed_for,
};
use crate::support::killed;
use crate::support::made_backups::{BASE, Bucket, LAST, objects_in};
use crate::support::scratch;
use crate::support::tiny_backup::*;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use deltafold::Reason;
use memchr::memmem;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

fn compact(bucket: &Bucket, flags: &[&str]) -> Command {
    let mut c = deltafold();
    c.args(["compact", "--output", "json", "--store"])
        .arg(bucket.path());
    c.args(flags);
    c
}

fn start(bucket: &Bucket, flags: &[&str]) -> Child {
    let mut c = compact(bucket, flags);
    c.stdout(Stdio::null()).stderr(Stdio::piped());
    c.spawn().unwrap()
}

/// No two encrypted objects have the same bytes, and yet there is only one result.
#[test]
fn jobs_at_once_and_reruns_leave_one_result() {
    let key = Key::new();
    let bucket = sealed_bucket(&[&key]);
    let flags = key.both();
    let flags = args(&flags);
    for _ in 0..4 {
        let before = bucket.names();
        let jobs: Vec<Child> = (0..3).map(|_| start(&bucket, &flags)).collect();
        for job in jobs {
            let out = job.wait_with_output().unwrap();
            assert!(
                out.status.success(),
                "{}",
                String::from_utf8_lossy(&out.stderr)
            );
        }
        let mut made = bucket.names();
        made.retain(|n| !before.contains(n));
        assert_eq!(made.len(), 1, "{made:?}");
        assert_eq!(bucket.compact(&flags)["status"], "NothingToDo");
        // A rerun that folds the same again recognises it by its content.
        bucket.put(&format!("deltafold-excluded/{}", made[0]), b"");
        let again = bucket.compact(&flags);
        assert_eq!(again["snapshot"], *made[0]);
        assert_eq!(again["bytes_written"], 0, "{again}");
        fs::remove_file(bucket.path().join("v2").join(&made[0])).unwrap();
        fs::remove_file(
            bucket
                .path()
                .join(format!("deltafold-excluded/{}", made[0])),
        )
        .unwrap();
        assert_eq!(bucket.names(), before);
    }
    // Other content under that name stays.
    let made = bucket.compact(&flags);
    let name = made["snapshot"].as_str().unwrap().to_owned();
    let other = sealed_for(&[&key], b"something else");
    bucket.put(&format!("v2/{name}"), &other);
    bucket.put(&format!("deltafold-excluded/{name}"), b"");
    let next = bucket.compact(&flags);
    assert_ne!(next["snapshot"], *name);
    assert!(object(&bucket, &name) == other);
}

/// Returns a store whose delta has so many large values that they do not fit into memory.
fn marked_bucket() -> Bucket {
    let mut rng = fastrand::Rng::with_seed(7);
    let bucket = Bucket::with_base();
    let mark = String::from_utf8(marks()[0].clone()).unwrap();
    let events: Vec<Value> = (1..=100)
        .map(|i| {
            let mut value = vec![0; 400_000];
            rng.fill(&mut value);
            for at in (0..value.len() - 1000).step_by(5000) {
                value[at..at + mark.len()].copy_from_slice(mark.as_bytes());
            }
            let revision = BASE + i;
            json!({"etcdEvent": {"kv": {
                "key": BASE64.encode(format!("/{mark}/{i}")), "create_revision": revision,
                "mod_revision": revision, "version": 1, "value": BASE64.encode(value),
            }}, "time": "2026-11-21T00:00:00Z"})
        })
        .collect();
    // These keys are new in the history of the fixture's base.
    bucket.delta_of(BASE + 1, BASE + 100, 12, &events);
    bucket
}

/// Runs a command to its end and meanwhile searches all unnamed files that it has open. Returns their largest
/// total size, whether the secrets were found in them, and the log.
fn watched(command: &mut std::process::Command, marks: &[Vec<u8>]) -> (u64, bool, Vec<u8>) {
    let log = tempfile::NamedTempFile::new().unwrap();
    command.stdout(Stdio::null()).stderr(log.reopen().unwrap());
    let mut job = command.spawn().unwrap();
    let folder = format!("/proc/{}/fd", job.id());
    let (mut most, mut found) = (0, false);
    while job.try_wait().unwrap().is_none() {
        let mut now = 0;
        for fd in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let to = fs::read_link(fd.path()).unwrap_or_default();
            let is_unnamed = to.to_string_lossy().ends_with(" (deleted)");
            let Ok(mut file) = fs::File::open(fd.path()).and_then(|f| match is_unnamed {
                true => Ok(f),
                false => Err(std::io::ErrorKind::NotFound.into()),
            }) else {
                continue;
            };
            let mut bytes = Vec::new();
            if file.read_to_end(&mut bytes).is_ok() {
                now += bytes.len() as u64;
                found |= holds_mark(&bytes, marks);
            }
        }
        most = most.max(now);
    }
    let log_text = fs::read(log.path()).unwrap();
    assert!(
        job.wait().unwrap().success(),
        "{}",
        String::from_utf8_lossy(&log_text)
    );
    (most, found, log_text)
}

#[test]
fn no_plain_text_is_left_anywhere() {
    let key = Key::new();
    let marks = marks();
    for is_sealed in [false, true] {
        let bucket = marked_bucket();
        let mut flags = Vec::new();
        if is_sealed {
            seal_all(bucket.path(), &[&key]);
            flags = key.both();
        }
        let temp = scratch::folder().unwrap();
        // The restore uses the change log, the external sort, and the survey of a deep list.
        let commands: [&[&str]; 4] = [
            &["compact", "--compression", "none", "--output", "json"],
            &["list", "--deep", "--output", "json"],
            &["get", "--prefix", "/"],
            &["export", "--revision", "800"],
        ];
        for command in commands {
            let mut c = deltafold();
            c.args(command).arg("--store").arg(bucket.path());
            c.arg("--temp-dir").arg(temp.path()).args([
                "--log-level",
                "trace",
                "--log-format",
                "json",
            ]);
            let (most, found, log) = watched(c.args(&flags), &marks);
            // The search must find what is there, or finding nothing means nothing.
            if command[0] == "compact" {
                assert!(
                    most > 30 << 20,
                    "only {most} bytes were seen in temporary files"
                );
                assert_eq!(found, !is_sealed, "{command:?}, encrypted: {is_sealed}");
            }
            assert!(!(is_sealed && found), "{command:?}");
            assert!(!log.is_empty() || command[0] != "compact");
            assert!(!holds_mark(&log, &marks), "{command:?}: in its log");
            if is_sealed {
                let secret = key.secret();
                assert!(
                    memmem::find(&log, secret.as_bytes()).is_none(),
                    "{command:?}"
                );
            }
        }
        let objects = objects_in(bucket.path());
        let with_mark = objects
            .values()
            .filter(|bytes| holds_mark(bytes, &marks))
            .count();
        // The result is not compressed.
        assert_eq!(with_mark, usize::from(!is_sealed), "{:?}", objects.keys());
        assert_eq!(temp.path().read_dir().unwrap().count(), 0);
    }
}

#[test]
fn what_was_killed_midway_is_done_by_the_next_run() {
    let key = Key::new();
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, LAST, 6);
    bucket.noise_delta(18);
    let expected = bucket.compact(&["--compression", "none"]);
    let plain = object(&bucket, expected["snapshot"].as_str().unwrap());
    fs::remove_file(
        bucket
            .path()
            .join("v2")
            .join(expected["snapshot"].as_str().unwrap()),
    )
    .unwrap();
    seal_all(bucket.path(), &[&key]);
    let inputs = bucket.objects();
    let flags = key.both();
    let flags = [&["--compression", "none"], &args(&flags)[..]].concat();
    let started = Instant::now();
    let made = bucket.compact(&flags);
    let whole = started.elapsed();
    let result = made["snapshot"].as_str().unwrap().to_owned();
    let path = bucket.path().join("v2").join(&result);
    fs::remove_file(&path).unwrap();
    let command = || compact(&bucket, &flags);
    let moment = killed::any_moment;
    killed::at_random_moments(5, Signal::KILL, whole, command, moment, |ended| {
        let what = &ended.what;
        let again = bucket.compact(&flags);
        assert_eq!(again["hash_kv"], made["hash_kv"], "{what}");
        let mut after = bucket.objects();
        after.retain(|path, _| !path.starts_with("deltafold-staging/"));
        let bytes = after.remove(&format!("v2/{result}")).expect("the result");
        assert!(after == inputs, "{what}: {:?}", after.keys());
        assert!(key.opens(&bytes).unwrap() == plain, "{what}");
        fs::remove_file(&path).unwrap();
    });
}

/// Returns the bytes of an age header that wrap the file's key: damage there cannot be distinguished from a
/// wrong key.
fn wrapped_key(sealed: &[u8]) -> std::ops::Range<usize> {
    let from = memmem::find(sealed, b"-> X25519 ").unwrap();
    let to = memmem::find(sealed, b"\n--- ").unwrap();
    from..to
}

#[test]
fn damage_at_every_byte_is_told() {
    let key = Key::new();
    let runner = InProcess::new();
    let good: Objects = small_bucket(1024, Compression::Gzip)
        .into_iter()
        .map(|(path, bytes)| {
            let mut sealed = Vec::new();
            let mut out = key.keys().encrypt(&mut sealed).unwrap();
            out.write_all(&bytes).unwrap();
            out.finish().unwrap();
            (format!("{path}.age"), sealed)
        })
        .collect();
    let (outcome, _) = runner.compact_with(&good, key.keys());
    assert_eq!(outcome.unwrap().revision.0, SMALL_LAST);
    let mut told: BTreeMap<&str, u32> = BTreeMap::new();
    for (path, bytes) in &good {
        let wrapped = wrapped_key(bytes);
        let mut refused = |bad: Vec<u8>, what: &str, may_be_key: bool| {
            let mut objects = good.clone();
            objects.insert(path.clone(), bad);
            let (outcome, after) = runner.compact_with(&objects, key.keys());
            let e = outcome.expect_err(what);
            assert!(after == objects, "{what}: something was written");
            assert!(e.to_string().contains(path.as_str()), "{what}: {e}");
            let is_key = may_be_key && e.reason() == Reason::CannotDecrypt;
            assert!(
                is_key || e.reason() == Reason::CorruptSnapshot,
                "{what}: {e} [{}]",
                e.reason()
            );
            *told.entry(e.reason().as_str()).or_default() += 1;
        };
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << (at % 8);
            refused(
                bad,
                &format!("{path}, byte {at} flipped"),
                wrapped.contains(&at),
            );
            refused(bytes[..at].to_vec(), &format!("{path}, cut to {at}"), false);
        }
        let longer = [&bytes[..], b"\n"].concat();
        refused(longer, "something follows", false);
        refused([&bytes[..], &bytes[..]].concat(), "twice", false);
        // Even with a valid checksum inside, it is not accepted as anything else.
        refused(with_checksum(b"[]"), "not encrypted", false);
    }
    println!("{told:?}");
    assert!(
        told["CannotDecrypt"] > 50 && told["CorruptSnapshot"] > 1000,
        "{told:?}"
    );
}
