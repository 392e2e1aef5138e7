//! Temporary folders of tests: in memory if there is enough of it, otherwise in the temporary directory.
//!
//! Hundreds of short-lived etcds preallocate logs: tens of gigabytes per run. On a disk, waiting for these
//! writes takes longer than everything else. `DELTAFOLD_TEST_SCRATCH` names another folder.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::statvfs;
use tempfile::TempDir;

/// A file system in memory on most Linux machines.
const MEMORY: &str = "/dev/shm";
/// All tiers together have used less than a third of this at once.
const PLENTY: u64 = 12 << 30;
/// The next program removes the folder of a program that has ended.
const PREFIX: &str = "deltafold-tests-";

/// Creates a folder that is removed when dropped.
pub fn folder() -> io::Result<TempDir> {
    folder_named("test-")
}

/// Creates a folder whose name starts with `prefix`. It is removed when dropped.
pub fn folder_named(prefix: &str) -> io::Result<TempDir> {
    TempDir::with_prefix_in(prefix, place())
}

/// Returns the folder of this program, which contains all its scratch folders.
pub fn place() -> PathBuf {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(choose).clone()
}

fn choose() -> PathBuf {
    let root = env::var_os("DELTAFOLD_TEST_SCRATCH").map_or_else(in_memory_or_not, PathBuf::from);
    remove_left_over(&root);
    let own = root.join(format!("{PREFIX}{}", std::process::id()));
    fs::create_dir(&own).unwrap_or_else(|err| panic!("{}: {err}", own.display()));
    own
}

fn in_memory_or_not() -> PathBuf {
    // Benches measure real disks.
    let is_test = cfg!(test);
    let is_roomy = statvfs(MEMORY).is_ok_and(|s| s.f_bavail * s.f_frsize >= PLENTY);
    let has_memory = available_memory().is_some_and(|bytes| bytes >= PLENTY);
    if is_test && is_roomy && has_memory {
        MEMORY.into()
    } else {
        env::temp_dir()
    }
}

/// Returns the bytes that are available without swapping, from `/proc/meminfo`.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

/// Removes the folders of programs that have ended, and of an earlier process with the same pid.
fn remove_left_over(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let of = name.to_str().and_then(|n| n.strip_prefix(PREFIX));
        let own = std::process::id().to_string();
        let is_left_over = |id| id == own || !Path::new("/proc").join(id).exists();
        if of.is_some_and(is_left_over) {
            // Another program may be removing it, too.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
