//! Two Jobs at once, a rerun, other numbers of threads: one valid result, always the same bytes.

mod support;

use std::fs;
use std::process::Stdio;
use support::buckets::{Bucket, LAST, T0};
use support::{copy_fixture, deltafold, expected, fixture_names, run_json};

#[test]
fn threads_and_reruns_give_the_same_bytes() {
    for name in fixture_names() {
        for compression in ["same", "none", "gzip", "zlib", "lzw", "zstd"] {
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
                let (code, json, stderr) = run_json(c.arg(store.path()));
                assert_eq!(code, 0, "{stderr}");
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
        // Four alike, and two that make something else of the same input.
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
        // One of each kind at most (none of the second where the first was already a base).
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
