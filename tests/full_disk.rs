//! No room in the temporary directory or in a local store: 74, nothing half-written, and a rerun
//! with room succeeds.

mod support;

use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;
use support::buckets::{BASE, Bucket, LAST, Objects, objects_in};
use support::{deltafold, run_json};
use tempfile::TempDir;

/// Runs a command with a disk of so many KiB in the place of a folder, and copies out what is on
/// it at the end.
const ON_A_SMALL_DISK: &str = r#"
folder=$1 kib=$2 kept=$3; shift 3
mkdir "$kept/before" "$kept/after" && cp -r "$folder/." "$kept/before" || exit 99
mount -t tmpfs -o size="$kib"k tmpfs "$folder" && cp -r "$kept/before/." "$folder" || exit 99
"$@"; code=$?
cp -r "$folder/." "$kept/after" || exit 99
exit $code
"#;

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

/// Runs a command where a folder has no more room than this: exit code, JSON, standard error, and
/// what the folder holds then. `None` where the machine lets nobody but root mount.
fn on_a_small_disk(
    folder: &Path,
    kib: u64,
    command: &Command,
) -> Option<(i32, Value, String, Objects)> {
    let kept = TempDir::with_prefix("small-disk-").unwrap();
    let mut c = wrapped(
        &[
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            ON_A_SMALL_DISK,
            "sh",
        ],
        &[
            folder.as_os_str(),
            kib.to_string().as_ref(),
            kept.path().as_os_str(),
        ],
        command,
    );
    let (code, json, stderr) = run_json(&mut c);
    if json.is_null() {
        println!("this machine mounts no small disk: {stderr}");
        return None;
    }
    Some((code, json, stderr, objects_in(&kept.path().join("after"))))
}

/// Runs a command that can write no file of more than this: exit code, JSON, standard error.
fn with_small_files(bytes: u64, command: &Command) -> (i32, Value, String) {
    let limit = r#"ulimit -f "$1" && shift && exec "$@""#;
    let blocks = (bytes / 512).to_string();
    run_json(&mut wrapped(
        &["sh", "-c", limit, "sh"],
        &[blocks.as_ref()],
        command,
    ))
}

/// A command that runs another one, with the other's environment.
fn wrapped(program: &[&str], args: &[&OsStr], command: &Command) -> Command {
    let mut c = Command::new(program[0]);
    c.args(&program[1..]).args(args);
    c.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => c.env(name, value),
            None => c.env_remove(name),
        };
    }
    c
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
