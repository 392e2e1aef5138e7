//! Verifies a plain snapshot file: the SHA-256 behind the database, every page, HashKV, its age, and a restore drill.
//!
//! Nothing is compared with a live etcd, and no record is written.

use super::Verdict;
use super::drill;
use super::store::Level;
use crate::base::duration;
use crate::base::opt::MAX_AGE;
use crate::error::{Error, Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::Revision;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::open::BackupLocation;
use crate::prefix::select::StateRequest;
use crate::prefix::snapshot_files::OpenFile;
use crate::telemetry::metrics::VerificationFigures;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::time::Duration;

/// The options of a verification of a plain snapshot file.
#[derive(Debug, Clone)]
pub struct Options {
    /// How thoroughly the file is verified: `Names` checks the SHA-256, the other levels read every page, too.
    pub level: Level,
    /// If set, an older file fails. Its name must tell its time.
    pub max_age: Option<Duration>,
    /// If set, a restore drill is run.
    pub drill: Option<drill::Options>,
}

/// The result of `verify --snapshot`. The fields are a contract.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VerifiedFile {
    /// Whether the file is good.
    pub verdict: Verdict,
    /// How thoroughly the file was verified.
    pub level: Level,
    /// The path or the URL of the file.
    pub path: String,
    /// When the snapshot was taken, by its name; null if the name tells no time.
    pub created: Option<DateTime<Utc>>,
    /// The age of the snapshot in seconds; null if its time is not known.
    pub age_seconds: Option<f64>,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// The newest revision.
    pub revision: Revision,
    /// The compacted revision that `hash_kv` depends on; -1 if nothing was compacted.
    pub compact_revision: Revision,
    /// etcd's HashKV at `revision`; null at the level names.
    pub hash_kv: Option<u32>,
    /// Number of live keys at `revision`; null at the level names.
    pub live_keys: Option<u64>,
    /// Whether a SHA-256 follows the database; without one, nothing proves that the bytes are intact.
    pub has_checksum: bool,
    /// The restore drill; null if there was none.
    pub drill: Option<Report<drill::Drilled>>,
}

/// Verifies a plain snapshot file.
///
/// # Errors
/// `CorruptSnapshot`; `Usage` if an age is asked for and the name tells no time; `Io`, `NoSpace`, `Terminated`; those of
/// a drill. A file that is too old (`Stale`) and a drill that failed are part of the report.
pub fn run(
    backup: &BackupLocation,
    file: &OpenFile,
    options: &Options,
) -> Result<Report<VerifiedFile>> {
    let mut clock = ReportBuilder::start();
    let (ctx, snapshot) = (backup.context(), &file.snapshot);
    let age = file
        .created
        .map(|created| (Utc::now() - created).max(chrono::TimeDelta::zero()));
    if options.max_age.is_some() && age.is_none() {
        return Err(Reason::Usage.error(format!(
            "the name of {} tells no time, so its age is not known: leave out {MAX_AGE}",
            file.name
        )));
    }
    clock.warnings.extend(file.warnings.iter().cloned());
    let at = |e: Error| e.at(&file.name);
    let hash = match options.level {
        Level::Names => None,
        Level::Checksums | Level::Fold => Some(read_every_page(&snapshot.db).map_err(at)?),
    };
    if options.level == Level::Fold {
        let state = backup.open(&StateRequest::default())?;
        let folded = state.hash(ctx, snapshot.base.compact_revision, false);
        folded.map_err(at)?;
    }
    let mut failure = None;
    let mut drilled = None;
    if let Some(drill) = &options.drill {
        let report = drill::run(backup, drill, None, snapshot.base.revision)?;
        failure = report.failure.as_ref().map(Error::again);
        drilled = Some(report);
    }
    if let (Some(age), Some(most)) = (age.and_then(|age| age.to_std().ok()), options.max_age)
        && age > most
    {
        let stale = Reason::Stale.error(format!(
            "{} is {} old (at most {}): check what takes the snapshots",
            file.name,
            duration::age(age.as_secs_f64()),
            duration::whole(most)
        ));
        failure.get_or_insert(stale);
    }
    let outcome = VerifiedFile {
        verdict: Verdict::of(failure.as_ref()),
        level: options.level,
        path: file.name.clone(),
        created: file.created,
        age_seconds: age.map(|age| age.num_milliseconds() as f64 / 1000.0),
        bytes: snapshot.file_bytes,
        revision: snapshot.base.revision,
        compact_revision: snapshot.base.compact_revision,
        hash_kv: hash.map(|hash| hash.hash),
        live_keys: hash.map(|hash| hash.live_keys),
        has_checksum: snapshot.has_checksum,
        drill: drilled,
    };
    Ok(clock.ended(outcome, true, failure))
}

impl Report<VerifiedFile> {
    /// Returns the outcome as metrics.
    pub fn metrics(&self) -> VerificationFigures {
        let reason = self.reason().map(|reason| (reason.as_str(), 1));
        let drill = self.drill.as_ref();
        VerificationFigures {
            findings: reason.into_iter().collect(),
            errors: u64::from(reason.is_some()),
            snapshots: 1,
            read_bytes: self.bytes,
            newest: self.created.zip(self.age_seconds),
            drill: drill.map(|d| (d.succeeded, Duration::from_secs_f64(d.seconds.max(0.0)))),
        }
    }
}
