//! The operation `list` of a folder of plain snapshot files.

use crate::backup::file_name::{is_other_file, is_snapshot_file, newest_pattern, pattern_of};
use crate::base::shell;
use crate::error::{Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::Revision;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::snapshot_files::{self, SnapshotFile};
use chrono::{DateTime, Utc};
use serde::Serialize;

/// A plain snapshot file in a listing.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ListedFile {
    /// The path below the folder.
    pub name: String,
    /// When the snapshot was taken, by its name: of a date its last second. null if the name tells no time.
    pub created: Option<DateTime<Utc>>,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// The newest revision; null if the file cannot be read or was not.
    pub revision: Option<Revision>,
    /// The compacted revision, or -1 if etcd never compacted; null if the file cannot be read or was not.
    pub compact_revision: Option<Revision>,
    /// The number of live keys; null if the file cannot be read or was not.
    pub live_keys: Option<u64>,
    /// How the file is packed: none, gzip, zlib, lzw, zstd or zip. null if the file cannot be read or was not.
    pub compression: Option<&'static str>,
    /// Whether a SHA-256 follows the database, as `etcdctl snapshot save` writes it; null if the file cannot be
    /// read or was not.
    pub has_checksum: Option<bool>,
    /// Whether the file is sound: `--deep` reads every byte. null if it was not read.
    pub readable: Option<bool>,
    /// The reason why the file cannot be read, see exit-codes.md; null if it can be.
    pub reason: Option<Reason>,
    /// Why the file cannot be read. Human-readable: the text may change. null if it can be.
    pub message: Option<String>,
}

/// The result of `list` for a folder of plain snapshot files. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ListedFiles {
    /// The folder or URL that was listed.
    pub path: String,
    /// The snapshots, the oldest first.
    pub files: Vec<ListedFile>,
    /// The newest revision of all files; null if none was read.
    pub latest_revision: Option<Revision>,
    /// The command that reads the newest file of the series. Human-readable: the text may change.
    pub next: String,
}

/// Lists the plain snapshot files in the folder that is the context's store; `None` if there are none. With `deep`, they are
/// read: a damaged one is part of the result.
///
/// # Errors
/// `Io`, `NoSpace`, `Terminated`; errors of the store.
pub fn list(ctx: &Context, deep: bool) -> Result<Option<Report<ListedFiles>>> {
    let clock = ReportBuilder::start();
    let mut found = snapshot_files::list(ctx)?;
    let Some(pattern) = newest_pattern(found.iter().map(|file| file.name.as_str())) else {
        return Ok(None);
    };
    // Of the series, a file may have another name than snapshots usually have.
    found.retain(|file| {
        let is_of_series = file.time.is_some() && pattern_of(&file.name) == pattern;
        is_snapshot_file(&file.name) || is_of_series && !is_other_file(&file.name)
    });
    let mut files = Vec::with_capacity(found.len());
    for file in &found {
        files.push(listed(ctx, file, deep)?);
    }
    let folder = ctx.store.url().trim_end_matches('/');
    let pattern = format!("{folder}/{pattern}");
    let command = ["deltafold", "verify", "--snapshot", &pattern];
    Ok(Some(clock.report(ListedFiles {
        path: ctx.store.url().to_owned(),
        latest_revision: files.iter().filter_map(|f| f.revision).max(),
        files,
        next: shell::command(command),
    })))
}

fn listed(ctx: &Context, file: &SnapshotFile, deep: bool) -> Result<ListedFile> {
    let mut listed = ListedFile {
        name: file.name.clone(),
        created: file.time.as_ref().map(|time| time.at),
        bytes: file.bytes,
        revision: None,
        compact_revision: None,
        live_keys: None,
        compression: None,
        has_checksum: None,
        readable: None,
        reason: None,
        message: None,
    };
    if !deep {
        return Ok(listed);
    }
    let read = ctx.plain(&file.place).and_then(|snapshot| {
        let hash = read_every_page(&snapshot.db).map_err(|e| e.at(file.place.name(ctx)))?;
        Ok((snapshot, hash.live_keys))
    });
    listed.readable = Some(read.is_ok());
    match read {
        Ok((snapshot, live_keys)) => {
            listed.revision = Some(snapshot.base.revision);
            listed.compact_revision = Some(snapshot.base.compact_revision);
            listed.live_keys = Some(live_keys);
            listed.compression = Some(snapshot.compression);
            listed.has_checksum = Some(snapshot.has_checksum);
        }
        Err(e) if e.reason().is_of_one_object() || e.reason() == Reason::Usage => {
            listed.reason = Some(e.reason());
            listed.message = Some(e.to_string());
        }
        Err(e) => return Err(e),
    }
    Ok(listed)
}
