//! The memory the process has used.

/// The most memory that was resident at once, in bytes; `None` where the system does not tell.
///
/// Linux counts it as `VmHWM` in `/proc/self/status`: with the page cache of mapped files, in KiB.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn the_peak_is_told_and_plausible() {
        let peak = super::peak_memory_bytes().unwrap();
        assert!(peak > 1 << 20 && peak < 1 << 40, "{peak}");
    }
}
