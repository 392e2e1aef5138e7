//! No space in the temporary directory, in a local store or in the target of a copy: an error, nothing
//! half-written, and a rerun with space succeeds.

use crate::support::disk::{on_a_small_disk, with_small_files};
use crate::support::made_backups::{BASE, Bucket, LAST, Objects, objects_in};
use crate::support::orphan_deltas::{baseless, catalog};
use crate::support::scratch;
use crate::support::{deltafold, succeed};
use std::fs;
use std::path::Path;
use std::process::Command;

fn command(bucket: &Path, temp: &Path) -> Command {
    let mut c = deltafold();
    c.args(["compact", "--compression", "none", "--output", "json"]);
    c.arg("--store").arg(bucket).arg("--temp-dir").arg(temp);
    c
}

/// Returns a store whose result has at least 9 MiB, and that result's path and size.
fn bucket() -> (Bucket, String, u64) {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, LAST, 6);
    bucket.noise_delta(18);
    let done = bucket.compact(&["--compression", "none"]);
    let path = format!("v2/{}", done["snapshot"].as_str().unwrap());
    let file = bucket.path().join(&path);
    let size = fs::metadata(&file).unwrap().len();
    fs::remove_file(file).unwrap();
    (bucket, path, size)
}

/// Asserts that the same run succeeds with enough space and adds only its result.
fn succeeds(bucket: &Bucket, inputs: &Objects, path: &str) {
    let temp = scratch::folder().unwrap();
    succeed(&mut command(bucket.path(), temp.path()));
    let mut left = bucket.objects();
    assert!(left.remove(path).is_some(), "{:?}", left.keys());
    assert!(left == *inputs, "{:?}", left.keys());
}

#[test]
fn no_room_in_the_temporary_directory() {
    let (bucket, path, size) = bucket();
    let inputs = bucket.objects();
    let temp = scratch::folder().unwrap();
    for part in [1, 8, 15] {
        let job = command(bucket.path(), temp.path());
        let (code, json, stderr) = with_small_files(size * part / 16, &job);
        assert_eq!((code, &json["reason"]), (74, &"Io".into()), "{stderr}");
        let kib = size / 1024 * part / 16;
        let (code, json, stderr, left) = on_a_small_disk(temp.path(), kib, &job);
        assert_eq!((code, &json["reason"]), (74, &"NoSpace".into()), "{stderr}");
        assert!(left.is_empty(), "{:?}", left.keys());
        assert!(bucket.objects() == inputs, "{:?}", bucket.objects().keys());
    }
    succeeds(&bucket, &inputs, &path);
}

#[test]
fn no_room_in_the_store() {
    let (bucket, path, size) = bucket();
    let inputs = bucket.objects();
    let temp = scratch::folder().unwrap();
    let job = command(bucket.path(), temp.path());
    // A part of the trailing SHA-256 does not fit.
    let (code, json, stderr) = with_small_files(size - 1, &job);
    assert_eq!((code, &json["reason"]), (74, &"Io".into()), "{stderr}");
    assert!(bucket.objects() == inputs, "{:?}", bucket.objects().keys());
    let taken: usize = inputs.values().map(Vec::len).sum();
    // No space at all, for a half, for the first part.
    for room in [64 << 10, size / 2, (8 << 20) + (512 << 10)] {
        let kib = (taken as u64 + room) / 1024;
        let (code, json, stderr, left) = on_a_small_disk(bucket.path(), kib, &job);
        assert_eq!((code, &json["reason"]), (74, &"NoSpace".into()), "{stderr}");
        assert!(left == inputs, "{:?}", left.keys());
    }
    succeeds(&bucket, &inputs, &path);
}

fn copy_command(from: &Path, to: &Path) -> Command {
    let mut c = deltafold();
    c.args(["copy", "--output", "json", "--from"]).arg(from);
    c.arg("--to").arg(to);
    c
}

#[test]
fn no_room_in_the_target_of_a_copy() {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, LAST, 6);
    bucket.noise_delta(18);
    let source = bucket.objects();
    let size: usize = source.values().map(Vec::len).sum();
    let target = scratch::folder().unwrap();
    let mut job = copy_command(bucket.path(), target.path());
    let (code, json, stderr) = with_small_files(5 << 20, &job);
    assert_eq!((code, &json["failed"]), (75, &1.into()), "{stderr}");
    let left = objects_in(target.path());
    assert_eq!(left.len(), source.len() - 1, "{:?}", left.keys());
    let empty = scratch::folder().unwrap();
    let job_to_empty = copy_command(bucket.path(), empty.path());
    for room in [64 << 10, size / 2] {
        let kib = room as u64 / 1024;
        let (code, json, stderr, left) = on_a_small_disk(empty.path(), kib, &job_to_empty);
        let reason = json["reason"].as_str().unwrap();
        assert!(["NoSpace", "PartlyDone"].contains(&reason), "{stderr}");
        assert!([74, 75].contains(&code), "{stderr}");
        assert_eq!(baseless(&catalog(left.keys())), [""; 0]);
        assert!(
            left.iter().all(|(p, b)| source[p] == *b),
            "{:?}",
            left.keys()
        );
    }
    succeed(&mut job);
    assert!(objects_in(target.path()) == source);
}
