//! Concurrent compactions, reruns, and other numbers of threads: one valid result, always with the same bytes.

use crate::support::killed;
use crate::support::made_backups::{Bucket, LAST, T0};
use crate::support::{copy_fixture, deltafold, expected, fixture_names, seed, succeed};
use rustix::process::Signal;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

#[test]
fn threads_and_reruns_give_the_same_bytes() {
    for name in fixture_names() {
        for compression in ["same", "none", "gzip", "zstd"] {
            let mut first: Option<(String, Vec<u8>)> = None;
            for threads in ["1", "2", "7"] {
                let store = copy_fixture(&name);
                let mut c = deltafold();
                c.args(["compact", "--output", "json", "--threads", threads]);
                c.args([
                    "--compression",
                    compression,
                    "--keep-history",
                    "all",
                    "--store",
                ]);
                let json = succeed(c.arg(store.path()));
                let snapshot = json["snapshot"].as_str().unwrap().to_owned();
                let bytes = fs::read(store.path().join("v2").join(&snapshot)).unwrap();
                let this = (snapshot, bytes);
                match &first {
                    None => first = Some(this),
                    Some(first) => assert!(*first == this, "{name} {compression} {threads}"),
                }
            }
        }
    }
}

/// The first damage in the chain is reported, even if a later delta was read at the same time.
#[test]
fn threads_give_the_same_error() {
    let b = Bucket::with_base();
    b.delta(747, 1499, 6);
    let mut events = b.events(1500, LAST);
    let at = events
        .iter()
        .position(|e| e["etcdEvent"]["kv"]["version"].as_i64() > Some(1))
        .unwrap();
    let version = &mut events[at]["etcdEvent"]["kv"]["version"];
    *version = (version.as_i64().unwrap() + 1).into();
    let contradicting = b.delta_of(1500, LAST, 9, &events);
    let refused = |threads: &str| {
        let (code, json, stderr) = b.run("compact", &["--threads", threads]);
        assert_eq!(code, 65, "{stderr}");
        let text = |field: &str| json[field].as_str().unwrap().to_owned();
        (text("reason"), text("message"))
    };
    let alone = refused("1");
    assert_eq!(alone.0, "HistoryMismatch");
    assert_eq!(refused("2"), alone);
    // The same with worse damage after it, which another thread of the fold meets first.
    let last = events.len() - 1;
    events[last]["etcdEvent"]["kv"]["key"] = "?".into();
    assert_eq!(b.delta_of(1500, LAST, 9, &events), contradicting);
    for threads in ["1", "2", "7"] {
        assert_eq!(refused(threads), alone, "{threads}");
    }
}

#[test]
fn jobs_at_once_leave_one_valid_result() {
    let b = Bucket::with_base();
    b.delta(747, 1499, 6);
    b.delta(1500, LAST, 9);
    for round in 0..5 {
        let start = |keep: &str| {
            let mut c = deltafold();
            c.args([
                "compact",
                "--output",
                "json",
                "--keep-history",
                keep,
                "--store",
            ]);
            c.arg(b.path())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            c.spawn().unwrap()
        };
        // Four with the same options, and two that make another result of the same input.
        let jobs: Vec<_> = ["latest", "all", "latest", "latest", "all", "latest"]
            .map(start)
            .into_iter()
            .collect();
        for job in jobs {
            let out = job.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "round {round}: {stderr}");
        }
        let fulls: Vec<String> = b
            .names()
            .into_iter()
            .filter(|n| n.contains(&format!("-{LAST:08}-")) && n.starts_with("Full"))
            .collect();
        // At most one of each kind, and none of the second kind if the first was already a base.
        assert!((1..=2).contains(&fulls.len()), "round {round}: {fulls:?}");
        assert_eq!(b.names().len(), 3 + fulls.len());
        let last = b.compact(&[]);
        assert_eq!(last["status"], "NothingToDo");
        for full in fulls {
            assert!(
                full.contains(&(T0 + 10).to_string()) || full.contains(&(T0 + 11).to_string()),
                "{full}"
            );
            fs::remove_file(b.path().join("v2").join(full)).unwrap();
        }
        assert_eq!(
            last["live_keys"],
            expected("etcd35-gzip").compacted_at_last_revision.live_keys
        );
    }
}

/// Killed runs do not disturb those that are alive.
#[test]
fn jobs_at_once_some_of_which_are_killed() {
    let b = Bucket::with_base();
    b.delta(747, LAST, 6);
    b.noise_delta(18);
    let inputs = b.objects();
    let clean = b.compact(&["--compression", "none"]);
    let path = format!("v2/{}", clean["snapshot"].as_str().unwrap());
    let with_result = b.objects();
    let whole = Duration::from_secs_f64(clean["seconds"].as_f64().unwrap());
    let mut rng = fastrand::Rng::with_seed(seed());
    let (mut killed, mut debris) = (0, 0);
    for round in 0..60 {
        // If the machine was busier at the begin, jobs end before their signal.
        if round >= 12 && killed > 2 {
            break;
        }
        fs::remove_file(b.path().join(&path)).unwrap();
        let pace = whole / (1 + round / 12);
        let mut jobs = Vec::new();
        for _ in 0..4 {
            let mut c = deltafold();
            c.args(["compact", "--compression", "none", "--store"]);
            c.arg(b.path()).stdout(Stdio::null()).stderr(Stdio::piped());
            jobs.push(c.spawn().unwrap());
            std::thread::sleep(pace.mul_f64(rng.f64() / 2.0));
        }
        for (job, signal) in jobs.iter().zip([Signal::KILL, Signal::TERM]) {
            killed::send(job, signal);
            std::thread::sleep(pace.mul_f64(rng.f64() / 2.0));
        }
        for (i, job) in jobs.into_iter().enumerate() {
            let out = job.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&out.stderr);
            let was_killed = !out.status.success();
            assert!(!was_killed || i < 2, "round {round}, job {i}: {stderr}");
            killed += usize::from(was_killed);
        }
        let mut left = b.objects();
        left.retain(|path, _| !path.starts_with("deltafold-staging/"));
        debris += b.objects().len() - left.len();
        assert!(left == with_result, "round {round}: {:?}", left.keys());
        assert_eq!(b.compact(&[])["status"], "NothingToDo");
    }
    assert_eq!(with_result.len(), inputs.len() + 1);
    println!(
        "{killed} jobs were killed, {debris} files without names were left at the end of a round"
    );
    assert!(killed > 2, "hardly a job was killed");
}
