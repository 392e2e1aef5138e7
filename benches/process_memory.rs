//! Reads the memory of a running process from `/proc`, on Linux.

use std::fs;

/// Returns the anonymous memory of a process in bytes: without mapped files and their page cache. Returns 0
/// if the process has ended.
pub fn anonymous(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    field(&status.unwrap_or_default(), "RssAnon:")
}

/// Returns a field of `/proc/PID/status` in bytes, or 0 if it is missing.
pub fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|l| l.strip_prefix(name));
    let kib = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
