//! The memory the process has used, and that it gives back.

/// The most memory that was resident at once, in bytes; `None` where the system does not tell.
///
/// Linux counts it as `VmHWM` in `/proc/self/status`: with the page cache of mapped files, in KiB.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Has buffers of more than 2 MiB go back to the system as soon as they are freed.
///
/// glibc learns from the first such buffer to keep those that come later, as much as 64 MiB for each
/// thread: with long values and many threads that is a multiple of what is in use.
pub fn give_back_long_buffers() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const LONG: libc::c_int = 2 << 20;
        const LEFT_AT_THE_TOP: libc::c_int = 4 << 20;
        // SAFETY: mallopt takes numbers only, and no other thread runs yet.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, LONG);
            libc::mallopt(libc::M_TRIM_THRESHOLD, LEFT_AT_THE_TOP);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn the_peak_is_told_and_plausible() {
        let peak = super::peak_memory_bytes().unwrap();
        assert!(peak > 1 << 20 && peak < 1 << 40, "{peak}");
    }
}
