//! The operation `copy`: copies backups from one store to another, once or continuously.
//!
//! `copier` lists both stores, `plan` decides, `round` carries out, `transfer` moves the bytes, `results` reports.
//! `import` makes fulls of plain snapshot files. Nothing in the target is ever deleted or overwritten. A delta gets its
//! name there only after its full, and after the delta that it follows, except that a large plan in an object store
//! names some deltas concurrently.

mod checks;
mod copier;
mod failures;
mod identity;
mod import;
mod notes;
pub mod plan;
mod results;
mod round;
mod transfer;

use self::copier::Copier;
use self::plan::Selection;
use crate::backup::Catalog;
use crate::error::{Reason, Result};
use crate::ops::report::Report;
use crate::prefix::Context;
use crate::prefix::snapshot_files::Pattern;
use crate::telemetry::metrics::Metrics;
use serde::Serialize;
use std::time::Duration;

/// The most warnings in an outcome, and the most failures in that of a follower.
const MOST_LISTED: usize = 100;

/// The options of `copy`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Which snapshots are copied, and in which form.
    pub selection: Selection,
    /// If set, the source is the folder of this series of plain snapshot files, which become fulls.
    pub series: Option<Pattern>,
    /// The most snapshots of at least 1 MiB that are copied at the same time; 1 or more. Each takes
    /// about 32 MiB of memory. Smaller snapshots are limited by the stores' requests only.
    pub parallel: usize,
    /// If set, first wait until the source's newest full is marked final.
    pub wait_for_final: Option<WaitForFinal>,
    /// The time between two listings of the source, while waiting or following.
    pub interval: Duration,
    /// Accept a target that is the backup of another cluster, and make it the backup of the source's
    /// cluster.
    pub take_over: bool,
    /// Only report what would be copied.
    pub dry_run: bool,
}

/// How long to wait for a final snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitForFinal {
    /// After this time, copy what the source holds; zero waits for ever.
    pub timeout: Duration,
}

/// The result of a copy. The fields are a contract.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CopiedBackup {
    /// The source's URL.
    pub from: String,
    /// The target's URL.
    pub to: String,
    /// Whether this was a dry run.
    pub dry_run: bool,
    /// Backups in the source: usable full snapshots, each with its deltas.
    pub backups: u64,
    /// Backups within the limits --max-backups and --max-backup-age.
    pub backups_wanted: u64,
    /// Snapshots that were copied (in a dry run: would be). For a follower: since its start.
    pub copied: u64,
    /// Snapshots that the target already had. For a follower: at the last listing.
    pub kept: u64,
    /// Snapshots that are not selected, or would be useless in the target. For a follower: at the last
    /// listing.
    pub skipped: u64,
    /// Snapshots that could not be copied. For a follower: at the last listing.
    pub failed: u64,
    /// Encrypted snapshots that were copied without a check of their content, since no key was given.
    pub unchecked: u64,
    /// Every snapshot of the source. A follower lists only those that failed at the last listing, at
    /// most 100.
    pub objects: Vec<CopiedObject>,
    /// The path of the final snapshot that was waited for; null if there was no wait, or none came in
    /// time.
    pub final_snapshot: Option<String>,
    /// How long the command waited for a final snapshot, in seconds; null if it did not wait.
    pub waited_seconds: Option<f64>,
    /// How often the stores were listed and compared.
    pub rounds: u64,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Bytes of snapshots written to the target.
    pub bytes_written: u64,
}

/// A snapshot of the source, and the result of copying it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CopiedObject {
    /// The path in the source, below the prefix.
    pub path: String,
    /// The path in the target. The suffixes of the name differ if compression or encryption does.
    pub target_path: String,
    /// The size in the source, in bytes.
    pub bytes: u64,
    /// The result. `Copied`: it was copied (in a dry run: would be). `Kept`: the target already had it.
    /// `Skipped`: it is not selected, or would be useless in the target. `Failed`: it could not be
    /// copied.
    pub decision: CopyStatus,
    /// The reason. Copied: `Wanted`. Kept: `AlreadyThere`, or `ThereInOtherForm` if the target has it with another
    /// compression or encryption. Skipped: `Excluded`, `BeyondMaxBackups`, `TooOld` (of a file, if the target has a newer
    /// full), `InTheFuture` (of a file), `NoBase` if neither store has
    /// what it follows, `BaseNotCopied` if that could not be copied, `SameAsAnother`. Failed: a reason
    /// from exit-codes.md, or `NotTried` if the run ended before.
    pub reason: &'static str,
    /// The reason as human-readable text; it may change.
    pub message: String,
}

/// The result of copying a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum CopyStatus {
    /// It was copied (in a dry run: would be).
    Copied,
    /// The target already had it.
    Kept,
    /// It is not selected, or would be useless in the target.
    Skipped,
    /// It could not be copied.
    Failed,
}

/// Copies once.
///
/// # Errors
/// Fails before the first copy with `NoSnapshots`, `OtherCluster`, `Usage`, `CannotDecrypt` or an error
/// of a store, and at any time with `Terminated`. Other failures are in the report.
pub fn run(from: &Context, to: &Context, options: &Options) -> Result<Report<CopiedBackup>> {
    let mut copier = Copier::new(from, to, options);
    copier.wait_for_final()?;
    let failure = copier.copy()?;
    Ok(copier.report(failure))
}

/// Copies continuously until it is cancelled. Failures that a retry may fix are logged and counted, and
/// copied again at the next listing.
///
/// # Errors
/// Fails with an error that no retry fixes, if because of it nothing at all could be copied.
pub fn follow(
    from: &Context,
    to: &Context,
    options: &Options,
    metrics: &Metrics,
) -> Result<Report<CopiedBackup>> {
    let mut copier = Copier::new(from, to, options);
    copier.metrics = Some(metrics.clone());
    match copier.follow() {
        Err(e) if e.reason() != Reason::Terminated => Err(e),
        _ => Ok(copier.report(None)),
    }
}

/// The listings of both stores.
struct Listings {
    source: Catalog,
    target: Catalog,
}
