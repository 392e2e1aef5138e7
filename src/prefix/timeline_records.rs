//! The records of timelines: that a full begins another history than that of the snapshots before it.
//!
//! A record is a wall: see [`Wall`]. It is written before its full gets a name, so that no reader sees the full
//! without it. Its name is all that a restore needs; what is in it explains.

use crate::backup::SnapshotName;
use crate::backup::catalog::{Catalog, TIMELINES, Wall};
use crate::error::{Error, Result};
use crate::mvcc::Revision;
use crate::prefix::scan::list_folders;
use crate::store::{Published, Store};
use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

/// The version of the format.
const VERSION: u32 = 1;
/// What to do if nothing proves a history, as the end of a message.
pub(crate) const CURE: &str = "A delta period that is shorter than etcd's compaction interval proves it, and so does a follower";
/// The largest record that is read, in bytes.
const MOST_BYTES: u64 = 4096;

/// The content of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineRecord {
    version: u32,
    /// Where the history left the one that was saved before.
    pub leaves: Leaves,
    /// Why the full was taken: the reason in the result of `snapshot`.
    pub cause: String,
    /// When the record was written: RFC 3339.
    pub written: String,
}

/// Where a history left another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Leaves {
    /// It shares the revisions up to this one with the timeline `history`.
    At {
        /// The timeline's ID.
        history: String,
        /// The last revision that both have.
        revision: Revision,
    },
    /// That is not known.
    Unknown(UnknownPoint),
}

/// The word for what is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownPoint {
    /// `unknown`
    Unknown,
}

impl Leaves {
    /// The point is not known.
    pub const UNKNOWN: Leaves = Leaves::Unknown(UnknownPoint::Unknown);
}

impl TimelineRecord {
    /// A record that is written now.
    pub(crate) fn new(leaves: Leaves, cause: &str, now: DateTime<Utc>) -> Self {
        TimelineRecord {
            version: VERSION,
            leaves,
            cause: cause.to_owned(),
            written: now.to_rfc3339_opts(SecondsFormat::Secs, true),
        }
    }

    /// Returns whether the cause says that the cluster was set back, and not only that nothing could be compared. `NoFull`
    /// repeats a record whose snapshotter was killed.
    pub(crate) fn means_set_back(&self) -> bool {
        ["HistoryMismatch", "ClusterBehind", "NoFull"].contains(&self.cause.as_str())
    }

    /// Returns whether the cause says that nothing could be compared, although all snapshots can be read.
    pub(crate) fn is_unproven(&self) -> bool {
        self.cause == "Unproven"
    }

    /// Returns when the record was written; `None` if it does not say so.
    pub(crate) fn written_at(&self) -> Option<DateTime<Utc>> {
        let written = DateTime::parse_from_rfc3339(&self.written).ok()?;
        Some(written.to_utc())
    }

    /// Writes the record of a full. Returns false if another record has its name.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub(crate) fn write(&self, store: &Store, full: &SnapshotName) -> Result<bool> {
        let mut bytes = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::internal(format!("a record cannot be written as JSON: {e}")))?;
        bytes.push(b'\n');
        let published = store.create_small(&format!("{TIMELINES}/{full}"), &bytes)?;
        Ok(published != Published::Taken)
    }
}

/// Reads a record. The inner error says why it cannot be read: then all is unknown but its name.
///
/// # Errors
/// Fails with the store's errors.
pub(crate) fn read(store: &Store, wall: &Wall) -> Result<Result<TimelineRecord, String>> {
    let content = match store.read_small(&wall.path, MOST_BYTES) {
        Ok(Some(content)) => content,
        Ok(None) => return Ok(Err("it is gone".to_owned())),
        Err(e) if e.reason().is_bad_data() || e.reason() == crate::error::Reason::Configuration => {
            return Ok(Err(e.to_string()));
        }
        Err(e) => return Err(e),
    };
    let record: Result<TimelineRecord, _> = serde_json::from_slice(&content);
    Ok(match record {
        Ok(record) if record.version == VERSION => Ok(record),
        Ok(record) => Err(format!("its version is {}", record.version)),
        Err(e) => Err(e.to_string()),
    })
}

/// Lists the records.
///
/// # Errors
/// Fails with the store's errors.
pub(crate) fn list(store: &Store) -> Result<Vec<Wall>> {
    let mut catalog = Catalog::default();
    catalog.add_notes(&list_folders(store, &[TIMELINES])?);
    Ok(catalog.walls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_json_of_known_names() {
        let now = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        let left = Leaves::At {
            history: "main".to_owned(),
            revision: Revision(94),
        };
        let record = TimelineRecord::new(left, "HistoryMismatch", now);
        let json = serde_json::to_value(&record).unwrap();
        let expected = serde_json::json!({
            "version": 1,
            "leaves": {"history": "main", "revision": 94},
            "cause": "HistoryMismatch",
            "written": "2023-11-14T22:13:20Z",
        });
        assert_eq!(json, expected);
        assert_eq!(
            serde_json::from_value::<TimelineRecord>(json).unwrap(),
            record
        );
        let unknown = TimelineRecord::new(Leaves::UNKNOWN, "ClusterBehind", now);
        let json = serde_json::to_value(&unknown).unwrap();
        assert_eq!(json["leaves"], "unknown");
        assert_eq!(
            serde_json::from_value::<TimelineRecord>(json).unwrap(),
            unknown
        );
    }
}
