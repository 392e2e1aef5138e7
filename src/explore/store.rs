//! The backup as a whole: what `list` and `status` tell of a store.

use crate::error::Result;
use crate::ops::report::Report;
use crate::ops::{list, status};
use crate::prefix::open::BackupLocation;
use serde::Serialize;

/// What the store holds.
#[derive(Debug, Serialize)]
pub(super) struct Overview {
    /// As `deltafold list --output json`.
    listed: list::ListedBackup,
    /// As `deltafold status --output json`.
    status: Report<status::BackupState>,
}

/// Returns what `list` and `status` tell.
///
/// # Errors
/// Errors of the store; `NoSnapshots`.
pub(super) fn overview(backup: &BackupLocation) -> Result<Overview> {
    let ctx = &backup.context().apart();
    let options = list::Options { deep: false };
    let limits = status::Options::default();
    Ok(Overview {
        listed: list::run(ctx, options)?.body,
        status: status::run(ctx, &limits)?,
    })
}
