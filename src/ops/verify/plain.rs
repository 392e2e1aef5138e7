//! Verifies plain snapshot files: the SHA-256 behind the database, every page, and HashKV.
//!
//! Nothing is compared with a live etcd, and no record is written. Called by `cli::verify`.

use super::store::findings::{self, Findings};
use super::store::{Level, Status};
use crate::error::{Error, Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::{Fold, FoldOptions, KeyRange, Revision};
use crate::ops::findings::Finding;
use crate::ops::list;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::open::PlainSnapshot;
use crate::prefix::plain_files::{PlainFile, PlainFiles, is_fault_of_file};
use crate::telemetry::metrics::VerificationFigures;
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Serialize;

/// The options of a verification of plain files.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How thoroughly the files are verified: `Names` only opens them, the other levels read all of them.
    pub level: Level,
    /// Verify all files of a folder; otherwise only the newest.
    pub all: bool,
}

/// A file that was verified.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize)]
pub struct VerifiedFile {
    /// The path below the folder; of a single file, its name.
    pub name: String,
    /// When the snapshot was taken, by its name, or else by the time of the file.
    pub created: DateTime<Utc>,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// Whether no error was found.
    pub verified: bool,
    /// The newest revision; null if the file cannot be read.
    pub revision: Option<Revision>,
    /// etcd's HashKV at `revision`; null at the level names, or if the file cannot be read.
    pub hash_kv: Option<u32>,
    /// The compacted revision that `hash_kv` depends on; -1 if nothing was compacted. null if the file cannot
    /// be read.
    pub compact_revision: Option<Revision>,
    /// Number of live keys at `revision`; null at the level names, or if the file cannot be read.
    pub live_keys: Option<u64>,
    /// Whether a SHA-256 follows the database; without one, nothing proves that the bytes are intact. null if
    /// the file cannot be read.
    pub has_checksum: Option<bool>,
}

/// The result of `verify --snapshot`. The fields are a contract: `deltafold schema verify`.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "PlainOutcome")]
pub struct Outcome {
    /// Whether the files are good.
    pub status: Status,
    /// The process's exit code: that of the worst error, see exit-codes.md.
    pub code: u8,
    /// The reason of the worst error; null if there is none.
    pub reason: Option<Reason>,
    /// The worst error. Human-readable: the text may change. null if there is none.
    pub message: Option<String>,
    /// How thoroughly the files were verified.
    pub level: Level,
    /// The file or folder.
    pub path: String,
    /// Number of snapshots there.
    pub snapshots: usize,
    /// The files that were verified, the oldest first.
    pub files: Vec<VerifiedFile>,
    /// All findings, errors first.
    pub findings: Vec<Finding>,
    /// Bytes of the files that were read.
    pub bytes_read: u64,
}

/// Verifies plain snapshot files. Damage is not an error of this function, but part of the report.
///
/// # Errors
/// `NoSnapshots`, `Usage`, `CannotDecrypt`, `PermissionDenied`, `Io`, `NoSpace`, `Terminated`.
pub fn run(ctx: &Context, found: &PlainFiles, options: Options) -> Result<Report<Outcome>> {
    let mut clock = ReportBuilder::start();
    let mut findings = Findings::default();
    for problem in list::plain::problems(found) {
        findings.add(problem);
    }
    let first = match options.all {
        true => 0,
        false => found.files.len() - 1,
    };
    let mut files = Vec::new();
    for file in &found.files[first..] {
        let mut verified = VerifiedFile {
            name: file.name.clone(),
            created: file.created,
            bytes: file.bytes,
            verified: false,
            revision: None,
            hash_kv: None,
            compact_revision: None,
            live_keys: None,
            has_checksum: None,
        };
        match verify(ctx, file, options.level, &mut verified) {
            Ok(plain) => {
                verified.verified = true;
                if let Some(warning) = plain.warning(&file.place.name(ctx)) {
                    clock.warn(warning);
                }
            }
            // Whoever takes the snapshots may delete old ones meanwhile.
            Err(e) if e.reason() == Reason::NoSnapshots && found.files.len() > 1 => {
                let names = vec![file.name.clone()];
                findings.add(Finding::note("ForeignObject", e.to_string(), names));
                continue;
            }
            Err(e) if is_fault_of_file(&e) && (e.reason().is_bad_data() || options.all) => {
                findings.add(Finding::from(&e).about(vec![file.name.clone()]));
            }
            Err(e) => return Err(e),
        }
        files.push(verified);
    }
    let (findings, failure) = findings.into_result();
    let outcome = Outcome {
        status: match failure {
            None => Status::Verified,
            Some(_) => Status::Failed,
        },
        code: failure.as_ref().map_or(0, |e| e.reason().exit_code()),
        reason: failure.as_ref().map(Error::reason),
        message: failure.as_ref().map(Error::to_string),
        level: options.level,
        path: found.place.name(ctx),
        snapshots: found.files.len(),
        bytes_read: files.iter().map(|f| f.bytes).sum(),
        files,
        findings,
    };
    Ok(clock.report_with(outcome, failure))
}

/// Verifies one file, and adds what it holds to `verified`.
fn verify(
    ctx: &Context,
    file: &PlainFile,
    level: Level,
    verified: &mut VerifiedFile,
) -> Result<PlainSnapshot> {
    let plain = match level {
        Level::Names => ctx.plain_unchecked(&file.place)?,
        Level::Checksums | Level::Fold => ctx.plain(&file.place)?,
    };
    verified.revision = Some(plain.base.revision);
    verified.compact_revision = Some(plain.base.compact_revision);
    verified.has_checksum = Some(plain.has_checksum);
    let at = |e: Error| e.at(file.place.name(ctx));
    if level >= Level::Checksums {
        let hash = read_every_page(&plain.db).map_err(at)?;
        verified.hash_kv = Some(hash.hash);
        verified.live_keys = Some(hash.live_keys);
    }
    if level == Level::Fold {
        let options = FoldOptions {
            target: plain.base.revision,
            compact: plain.base.compact_revision,
            keys: KeyRange::All,
            detach_leases: false,
            base: plain.base,
            temp_dir: ctx.temp(),
            buffer_bytes: 0,
            limits: ctx.limits,
        };
        let fold = Fold::new(options, &plain.db).map_err(at)?;
        let folded = fold.finish(&plain.db, |_| ctx.store.cancel().check());
        folded.map_err(at)?;
    }
    Ok(plain)
}

impl Outcome {
    /// Returns the outcome as metrics.
    pub fn metrics(&self) -> VerificationFigures {
        let newest = self.files.iter().rev().find(|f| f.verified);
        let age = |t: DateTime<Utc>| (Utc::now() - t).num_milliseconds() as f64 / 1000.0;
        VerificationFigures {
            findings: findings::by_reason(&self.findings),
            errors: findings::errors(&self.findings),
            snapshots: self.files.len() as u64,
            read_bytes: self.bytes_read,
            newest: newest.map(|f| (f.created, age(f.created))),
            drill: None,
        }
    }
}
