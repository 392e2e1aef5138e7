//! Free space in the temporary directory, and how much of it a fold needs.
//!
//! Nothing is reserved here.

use crate::backup::Compression;
use crate::base::opt::TEMP_DIR;
use crate::error::{Reason, Result};
use std::path::Path;

/// Returns the free bytes in the file system of `dir` for this user; `None` if the system does not report it.
pub(crate) fn free_bytes(dir: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir).ok()?;
    // A tmpfs without a limit reports no blocks.
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Checks that `bytes` bytes for `what` fit into a directory.
///
/// # Errors
/// `NoSpace` if the free space is known and too small.
pub(crate) fn check(dir: &Path, bytes: u64, what: &str) -> Result<()> {
    match free_bytes(dir) {
        Some(free) if free < bytes => Err(Reason::NoSpace.error(format!(
            "{what} needs {bytes} bytes in the temporary directory {}, {free} are free: make room, or choose another with {TEMP_DIR}",
            dir.display()
        ))),
        _ => Ok(()),
    }
}

/// Estimates how many bytes a fold needs at most in the temporary directory, without the base's own database:
/// the new database (the base plus all values of the deltas), and the changes waiting to be written to it (all
/// values once more).
///
/// A compressed delta is assumed to have at least a third of the size of its JSON. The JSON counts as base64
/// only, which is 4/3 of the size of the values.
pub(crate) fn estimate<'a>(
    base_bytes: u64,
    deltas: impl Iterator<Item = &'a crate::backup::Snapshot>,
) -> u64 {
    let values = deltas.map(|d| match d.name.compression {
        Compression::None => d.bytes / 4 * 3,
        _ => d.bytes.saturating_mul(9) / 4,
    });
    let values = values.fold(0u64, u64::saturating_add);
    base_bytes.saturating_add(values.saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_covers_base_and_deltas() {
        let delta = |name: &str, bytes| crate::backup::Snapshot {
            name: name.parse().unwrap(),
            path: String::new(),
            bytes,
            excluded: false,
            untrusted: false,
            begins_timeline: false,
            pinned: false,
        };
        let deltas = [
            delta("Incr-00000002-00000009-1", 400),
            delta("Incr-00000010-00000011-2.gz", 40),
        ];
        assert_eq!(estimate(1000, deltas[..0].iter()), 1000);
        assert_eq!(estimate(1000, deltas.iter()), 1000 + 2 * (300 + 90));
        let huge = [delta("Incr-00000002-00000009-1.gz", u64::MAX)];
        assert!(estimate(1000, huge.iter()) > u64::MAX / 4);
    }

    #[test]
    fn too_many_bytes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let free = free_bytes(dir.path()).unwrap();
        assert!(free > 0);
        check(dir.path(), 1, "a byte").unwrap();
        let e = check(dir.path(), u64::MAX, "everything").unwrap_err();
        assert_eq!(e.reason(), Reason::NoSpace);
        assert!(e.to_string().contains("temp-dir"), "{e}");
    }
}
