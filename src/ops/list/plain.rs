//! The operation `list` of plain snapshot files. Called by `cli`.

use crate::error::{Reason, Result};
use crate::mvcc::Revision;
use crate::ops::findings::Finding;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::plain_files::{PlainFile, PlainFiles, PlainPlace, TimeSource, is_fault_of_file};
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Serialize;

/// A plain snapshot file in a listing.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct ListedFile {
    /// The path below the folder; of a single file, its name.
    pub name: String,
    /// When the snapshot was taken, by its name, or else by the time of the file.
    pub created: DateTime<Utc>,
    /// Where `created` is from.
    pub time_source: TimeSource,
    /// The node that took the snapshot, or what else the name has before its time; null if it has nothing there. Those of
    /// several nodes may be of several clusters: `--timeline NODE` chooses.
    pub node: Option<String>,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// The newest revision; null if the file cannot be read or was not.
    pub revision: Option<Revision>,
    /// The compacted revision, or -1 if etcd never compacted; null if the file cannot be read or was not.
    pub compact_revision: Option<Revision>,
    /// How the file is packed: none, gzip, zlib, lzw, zstd or zip. null if the file cannot be read or was not.
    pub compression: Option<&'static str>,
    /// Whether a SHA-256 follows the database, as `etcdctl snapshot save` writes it; null if the file cannot be
    /// read or was not.
    pub has_checksum: Option<bool>,
    /// Whether the file can be opened as an etcd database; null if it was not opened. `list` opens the files of this
    /// machine. It opens the objects of a store with `--deep`. Only `deltafold verify` reads all bytes.
    pub readable: Option<bool>,
    /// The reason why the file cannot be read, see exit-codes.md; null if it can be.
    pub reason: Option<Reason>,
    /// Why the file cannot be read. Human-readable: the text may change. null if it can be.
    pub message: Option<String>,
}

/// The result of `list` for plain snapshots. The fields are a contract: `deltafold schema list`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// The file, folder or URL that was listed.
    pub path: String,
    /// The snapshots, the oldest first.
    pub files: Vec<ListedFile>,
    /// The newest revision of all files; null if none can be read.
    pub latest_revision: Option<Revision>,
    /// The files that are ignored.
    pub problems: Vec<Finding>,
}

/// Lists plain snapshot files that were found. Objects of a store are opened only if `deep` is set.
///
/// # Errors
/// `Io`, `NoSpace`, `Terminated`; errors of the store. A damaged file is part of the result.
pub fn list(ctx: &Context, found: &PlainFiles, deep: bool) -> Result<Report<Outcome>> {
    let clock = ReportBuilder::start();
    let opens = deep || matches!(found.place, PlainPlace::Path(_));
    let mut files = Vec::with_capacity(found.files.len());
    for file in &found.files {
        files.push(listed(ctx, file, opens)?);
    }
    Ok(clock.report(Outcome {
        path: found.place.name(ctx),
        latest_revision: files.iter().filter_map(|f| f.revision).max(),
        files,
        problems: problems(found),
    }))
}

/// Opens a file without reading all of it, unless it is packed.
fn listed(ctx: &Context, file: &PlainFile, opens: bool) -> Result<ListedFile> {
    let mut listed = ListedFile {
        name: file.name.clone(),
        created: file.created,
        time_source: file.time_source,
        node: file.node.clone(),
        bytes: file.bytes,
        revision: None,
        compact_revision: None,
        compression: None,
        has_checksum: None,
        readable: None,
        reason: None,
        message: None,
    };
    if !opens {
        return Ok(listed);
    }
    match ctx.plain_unchecked(&file.place) {
        Ok(plain) => {
            listed.revision = Some(plain.base.revision);
            listed.compact_revision = Some(plain.base.compact_revision);
            listed.compression = Some(plain.compression);
            listed.has_checksum = Some(plain.has_checksum);
            listed.readable = Some(true);
        }
        Err(e) if is_fault_of_file(&e) => {
            listed.readable = Some(false);
            listed.reason = Some(e.reason());
            listed.message = Some(e.to_string());
        }
        Err(e) => return Err(e),
    }
    Ok(listed)
}

/// Returns a remark for each reason for which files are ignored.
pub(in crate::ops) fn problems(files: &PlainFiles) -> Vec<Finding> {
    let mut problems = Vec::new();
    for (why, names) in files.ignored() {
        let mut names = names.clone();
        names.sort();
        let message = format!("{why}: ignored");
        problems.push(Finding::note("ForeignObject", message, names));
    }
    problems
}
