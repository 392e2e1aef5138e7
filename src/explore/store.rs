//! The backup as a whole: what `list` and `status` tell of a store, and what `gc` would remove.

use crate::backup::retention::Periods;
use crate::error::{Reason, Result};
use crate::ops::gc::{self, PolicyName, Rules};
use crate::ops::report::Report;
use crate::ops::{list, status};
use crate::prefix::open::BackupLocation;
use chrono::TimeDelta;
use clap::ValueEnum;
use serde::Serialize;
use std::time::Duration;

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

/// Returns what `gc` would remove with this policy and otherwise with its defaults. Changes nothing.
///
/// # Errors
/// `Usage` if the policy is none, or of a plain snapshot file; errors of the store.
pub(super) fn removals(backup: &BackupLocation, policy: &str) -> Result<gc::CleanedBackup> {
    if matches!(backup, BackupLocation::File(..)) {
        return Err(Reason::Usage.error("gc removes nothing from a plain snapshot file"));
    }
    let policy = PolicyName::from_str(policy, false)
        .map_err(|_| Reason::Usage.error("the policy is exponential or limit"))?;
    let rules = Rules {
        policy,
        ..Rules::default()
    };
    let options = gc::Options {
        retention: rules.retention(Periods::default())?,
        staging_age: TimeDelta::days(1),
        apply: false,
        allow_shrink: true,
        timeout: Duration::from_secs(60),
        lock_lease: None,
        single_writer: false,
    };
    Ok(gc::run(&backup.context().apart(), &options)?.body)
}
