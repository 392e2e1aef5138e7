//! The segment files of a write-ahead log, and their names.

use crate::error::{Error, Result};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Returns the name of the segment with this sequence number, whose first entry has this index.
pub(super) fn segment_name(seq: u64, index: u64) -> String {
    format!("{seq:016x}-{index:016x}.wal")
}

/// Returns the sequence number of a segment, or `None` if the name is not that of a segment.
pub(super) fn parse_segment_name(name: &str) -> Option<u64> {
    let (seq, index) = name.strip_suffix(".wal")?.split_once('-')?;
    let hex = |s: &str| {
        let digits = s.len() == 16 && s.bytes().all(|c| c.is_ascii_hexdigit());
        digits.then(|| u64::from_str_radix(s, 16).ok()).flatten()
    };
    hex(index)?;
    hex(seq)
}

/// Returns the paths of the segments in `dir`, oldest first. A missing folder has none.
///
/// # Errors
/// `Io`, `PermissionDenied`.
pub fn segment_paths(dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(segments(dir)?.into_iter().map(|s| s.1).collect())
}

/// Returns the sequence numbers and paths of the segments in `dir`, oldest first.
pub(super) fn segments(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let failed = |e| Error::io(format!("list {}", dir.display()), e);
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(e) => return Err(failed(e)),
    };
    let mut segments = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if let Some(seq) = entry.file_name().to_str().and_then(parse_segment_name) {
            segments.push((seq, entry.path()));
        }
    }
    segments.sort();
    Ok(segments)
}
