//! Whether the temporary directory has room.

use crate::error::{Error, Reason, Result};
use std::path::Path;

/// Bytes that are free for this user; `None` where the system does not tell.
pub(super) fn free_bytes(dir: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Fails where `bytes` for `what` will certainly not fit.
///
/// # Errors
/// `NoSpace`.
pub(super) fn check(dir: &Path, bytes: u64, what: &str) -> Result<()> {
    match free_bytes(dir) {
        Some(free) if free < bytes => Err(Error::new(
            Reason::NoSpace,
            format!(
                "{what} needs {bytes} bytes in the temporary directory {}, {free} are free: make room, or choose another with --temp-dir",
                dir.display()
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_fit_is_refused_before_it_is_tried() {
        let dir = tempfile::tempdir().unwrap();
        let free = free_bytes(dir.path()).unwrap();
        assert!(free > 0);
        check(dir.path(), 1, "a byte").unwrap();
        let e = check(dir.path(), u64::MAX, "all there is").unwrap_err();
        assert_eq!(e.reason(), Reason::NoSpace);
        assert!(e.to_string().contains("--temp-dir"), "{e}");
    }
}
