//! Runs commands on a disk without free space: a small disk, or a limit on the size of files.

use super::made_backups::{Objects, objects_in};
use super::run_json;
use super::scratch;
use serde_json::Value;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Mounts a disk of a given size in KiB over a folder, runs a command, and copies out what is on the disk at
/// the end.
const ON_A_SMALL_DISK: &str = r#"
folder=$1 kib=$2 kept=$3; shift 3
mkdir "$kept/before" "$kept/after" && cp -r "$folder/." "$kept/before" || exit 99
mount -t tmpfs -o size="$kib"k tmpfs "$folder" && cp -r "$kept/before/." "$folder" || exit 99
"$@"; code=$?
cp -r "$folder/." "$kept/after" || exit 99
exit $code
"#;

/// Runs a command with a folder that has only this much space. Returns the exit code, the JSON, standard error,
/// and what the folder holds at the end.
pub fn on_a_small_disk(
    folder: &Path,
    kib: u64,
    command: &Command,
) -> (i32, Value, String, Objects) {
    let kept = scratch::folder_named("small-disk-").expect("a folder");
    let size = kib.to_string();
    let args = [folder.as_os_str(), size.as_ref(), kept.path().as_os_str()];
    let mut c = in_a_mount_namespace(ON_A_SMALL_DISK, &args, command);
    let (code, json, stderr) = run_json(&mut c);
    assert_was_mounted(&json, &stderr);
    (code, json, stderr, objects_in(&kept.path().join("after")))
}

/// Fails if a script of `in_a_mount_namespace` did not reach its command.
pub fn assert_was_mounted(json: &Value, stderr: &str) {
    assert!(
        !json.is_null(),
        "nothing can be mounted: allow user namespaces on this machine, or run the tests as root: {stderr}"
    );
}

/// Returns a command that runs a shell script in a mount namespace, with these arguments and those of
/// `command`.
pub fn in_a_mount_namespace(script: &str, args: &[&OsStr], command: &Command) -> Command {
    let program = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
    ];
    wrapped(&program, args, command)
}

/// Runs a command that can write no file larger than `bytes`. Returns the exit code, the JSON and standard
/// error.
pub fn with_small_files(bytes: u64, command: &Command) -> (i32, Value, String) {
    let limit = r#"ulimit -f "$1" && shift && exec "$@""#;
    let blocks = (bytes / 512).to_string();
    run_json(&mut wrapped(
        &["sh", "-c", limit, "sh"],
        &[blocks.as_ref()],
        command,
    ))
}

/// Returns a command that runs `command` below `program`, with the environment of `command`.
pub fn wrapped(program: &[&str], args: &[&OsStr], command: &Command) -> Command {
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
