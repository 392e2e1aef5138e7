//! No room in the temporary directory or in a local store: 74, nothing half-written, and a rerun
//! with room succeeds.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use support::buckets::{BASE, Bucket, LAST, Objects};
use support::disk::{on_a_small_disk, with_small_files};
use support::{deltafold, run_json};
use tempfile::TempDir;

fn command(bucket: &Path, temp: &Path) -> Command {
    let mut c = deltafold();
    c.args(["compact", "--compression", "none", "--output", "json"]);
    c.arg("--store").arg(bucket).arg("--temp-dir").arg(temp);
    c
}

/// A bucket whose result has 9 MiB or more, and that result: path and size.
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

/// With room for it, the same run succeeds and leaves its result alone.
fn succeeds(bucket: &Bucket, inputs: &Objects, path: &str) {
    let temp = TempDir::new().unwrap();
    let (code, _, stderr) = run_json(&mut command(bucket.path(), temp.path()));
    assert_eq!(code, 0, "{stderr}");
    let mut left = bucket.objects();
    assert!(left.remove(path).is_some(), "{:?}", left.keys());
    assert!(left == *inputs, "{:?}", left.keys());
}

#[test]
fn no_room_in_the_temporary_directory() {
    let (bucket, path, size) = bucket();
    let inputs = bucket.objects();
    let temp = TempDir::new().unwrap();
    for part in [1, 8, 15] {
        let job = command(bucket.path(), temp.path());
        let (code, json, stderr) = with_small_files(size * part / 16, &job);
        assert_eq!((code, &json["reason"]), (74, &"Io".into()), "{stderr}");
        if let Some(ended) = on_a_small_disk(temp.path(), size / 1024 * part / 16, &job) {
            let (code, json, stderr, left) = ended;
            assert_eq!((code, &json["reason"]), (74, &"NoSpace".into()), "{stderr}");
            assert!(left.is_empty(), "{:?}", left.keys());
        }
        assert!(bucket.objects() == inputs, "{:?}", bucket.objects().keys());
    }
    succeeds(&bucket, &inputs, &path);
}

#[test]
fn no_room_in_the_store() {
    let (bucket, path, size) = bucket();
    let inputs = bucket.objects();
    let temp = TempDir::new().unwrap();
    let job = command(bucket.path(), temp.path());
    // Less than the SHA-256 behind the database is missing.
    let (code, json, stderr) = with_small_files(size - 1, &job);
    assert_eq!((code, &json["reason"]), (74, &"Io".into()), "{stderr}");
    assert!(bucket.objects() == inputs, "{:?}", bucket.objects().keys());
    let taken: usize = inputs.values().map(Vec::len).sum();
    // No room at all, for a half, for the first part.
    for room in [64 << 10, size / 2, (8 << 20) + (512 << 10)] {
        let kib = (taken as u64 + room) / 1024;
        if let Some((code, json, stderr, left)) = on_a_small_disk(bucket.path(), kib, &job) {
            assert_eq!((code, &json["reason"]), (74, &"NoSpace".into()), "{stderr}");
            assert!(left == inputs, "{:?}", left.keys());
        }
    }
    succeeds(&bucket, &inputs, &path);
}
