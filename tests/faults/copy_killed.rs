//! Copies that are killed at requests or at random moments, then a rerun: nothing is wrong in the target, and the rerun completes
//! the copy.

use super::copy_faults::{STAGING, large, small, wide};
use super::copy_large_plans::gap;
use crate::support::conformance::runtime;
use crate::support::killed::{self, Ended};
use crate::support::made_backups::{Bucket, Objects, objects_in, objects_of};
use crate::support::minio::Minio;
use crate::support::orphan_deltas::{baseless, catalog, without_full};
use crate::support::scratch;
use crate::support::{deltafold, run_json};
use rustix::process::Signal;
use std::cell::RefCell;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Snapshots that are copied by one request, and in parts.
fn small_and_large() -> Objects {
    let mut objects = small();
    for (path, bytes) in large() {
        objects.insert(
            path.replace("-1000", "-2000").replace("-1001", "-2001"),
            bytes,
        );
    }
    objects
}

fn has_bases(left: &[String]) {
    assert_eq!(baseless(&catalog(left)), [""; 0]);
}

fn copy(source: &Path) -> Command {
    let mut c = deltafold();
    c.args(["copy", "--output", "json", "--parallel", "3", "--from"]);
    c.arg(source).arg("--to");
    c
}

/// Looks at what an ended copy left in the target, and copies again.
fn is_completed(
    objects: &Objects,
    ended: &Ended,
    there: impl Fn() -> Objects,
    mut again: Command,
    check: impl Fn(&[String]),
) {
    let what = &ended.what;
    // A file without its name may be left in the folder of temporary objects.
    let there = || {
        let mut named = there();
        named.retain(|path, _| !path.starts_with(STAGING));
        named
    };
    let left = there();
    for (path, bytes) in &left {
        assert!(objects.get(path) == Some(bytes), "{what}: {path}");
    }
    check(&left.keys().cloned().collect::<Vec<_>>());
    let (code, again, stderr) = run_json(&mut again);
    assert_eq!((code, &again["failed"]), (0, &0.into()), "{what}: {stderr}");
    let now = there();
    assert!(now.keys().eq(objects.keys()), "{what}: {:?}", now.keys());
    assert!(now == *objects, "{what}: contents differ");
}

fn killed_in_a_folder(objects: &Objects, rounds: usize, signal: Signal, check: fn(&[String])) {
    let source = Bucket::of(objects);
    let new = || scratch::folder_named("killed-").unwrap();
    let target = RefCell::new(new());
    let command = || {
        let mut c = copy(source.path());
        c.arg(target.borrow().path());
        c
    };
    let started = Instant::now();
    assert_eq!(run_json(&mut command()).0, 0);
    let whole = started.elapsed();
    target.replace(new());
    killed::at_random_moments(
        rounds,
        signal,
        whole,
        command,
        killed::any_moment,
        |ended| {
            let there = || objects_in(target.borrow().path());
            is_completed(objects, ended, there, command(), check);
            target.replace(new());
        },
    );
}

fn killed_at_requests(objects: &Objects, stride: usize, check: fn(&[String])) {
    let source = Bucket::of(objects);
    let rt = runtime();
    let minio = Minio::start();
    let bucket = RefCell::new(String::new());
    let new_bucket = |number: usize| {
        bucket.replace(format!("target-{number}"));
        rt.block_on(minio.create_bucket(&bucket.borrow()));
    };
    let command = |url: &str| {
        let mut c = copy(source.path());
        c.arg(format!("s3://{}", bucket.borrow()));
        c.envs(minio.env()).env("AWS_ENDPOINT_URL", url);
        c
    };
    let mut buckets = 0;
    new_bucket(buckets);
    killed::at_each_request(minio.endpoint(), Signal::KILL, stride, command, |ended| {
        let there = || rt.block_on(objects_of(&minio.store(&bucket.borrow())));
        is_completed(objects, ended, there, command(minio.endpoint()), check);
        buckets += 1;
        new_bucket(buckets);
    });
}

#[test]
fn sigkill_and_a_rerun() {
    killed_in_a_folder(&small_and_large(), 40, Signal::KILL, has_bases);
}

#[test]
fn sigterm_and_a_rerun() {
    killed_in_a_folder(&small_and_large(), 15, Signal::TERM, has_bases);
}

#[test]
fn sigkill_at_requests_and_a_rerun() {
    killed_at_requests(&small_and_large(), 3, has_bases);
}

#[test]
fn sigkill_in_a_large_plan_and_a_rerun() {
    killed_in_a_folder(&wide(), 20, Signal::KILL, |left| {
        assert_eq!(gap(left).0, 0, "a gap in a folder");
        assert_eq!(without_full(&catalog(left)), [""; 0]);
    });
}

#[test]
fn sigkill_at_requests_of_a_large_plan_and_a_rerun() {
    killed_at_requests(&wide(), 17, |left| {
        assert_eq!(without_full(&catalog(left)), [""; 0]);
        let (missing, _) = gap(left);
        assert!(missing < 32, "{missing} are missing before the last");
    });
}
