//! Measures the memory of the process, and configures the allocator.

/// Returns the peak resident memory in bytes, or `None` if the system does not report it.
///
/// It is `VmHWM` in Linux' `/proc/self/status`, which includes the page cache of mapped files.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Makes glibc return buffers above 2 MiB to the system as soon as they are freed.
///
/// By default, glibc keeps such buffers after the first one was freed, up to 64 MiB for each thread. With
/// large values and many threads, that is a multiple of the memory in use.
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

/// Makes glibc return free pages to the system, also those between buffers in use. Takes milliseconds.
pub fn give_back_free_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim takes a number only.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn the_peak_is_plausible() {
        let peak = super::peak_memory_bytes().unwrap();
        assert!(peak > 1 << 20 && peak < 1 << 40, "{peak}");
    }
}
