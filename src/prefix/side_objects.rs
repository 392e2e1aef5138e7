//! The names of what lies beside the snapshots of a prefix: notes, pins, exclusion marks, locks, records of
//! verifications, temporary objects.

use crate::backup::SnapshotName;
use crate::backup::catalog::{NOTES, snapshot_name};
use crate::store::LOCKS;
use crate::store::staging::{STAGING, is_temporary};

/// The folder of the records of verifications, below the prefix. No layout of snapshots lists it.
pub const VERIFIED: &str = "deltafold-verified";

/// Returns whether a path is that of one of deltafold's objects.
pub(crate) fn is_ours(path: &str) -> bool {
    if snapshot_name(path).is_some() {
        return true;
    }
    match path.split_once('/') {
        Some((STAGING, name)) => is_temporary(name),
        Some((LOCKS | VERIFIED, name)) => name.ends_with(".json") && !name.contains('/'),
        Some((folder, name)) => NOTES.contains(&folder) && name.parse::<SnapshotName>().is_ok(),
        None => false,
    }
}
