//! How much history a snapshot holds, and how much a folded one shall keep.
//!
//! `Base` reads what a full snapshot says of itself; `KeepHistory` is the user's wish. Neither
//! changes anything.

use crate::base::text_value::Notation;
use crate::base::{ReadAt, duration};
use crate::bolt::{Bucket, Database};
use crate::error::{Error, Reason, Result};
use crate::mvcc::revision::{RecordKey, Revision, decode_revision};
use std::str::FromStr;
use std::time::Duration;

/// The bucket of all records.
pub const KEY_BUCKET: &[u8] = b"key";
/// The bucket of the store's own state.
pub const META_BUCKET: &[u8] = b"meta";
/// In `meta`: the revision up to which compaction was asked for (17 bytes).
pub const SCHEDULED_COMPACT: &[u8] = b"scheduledCompactRev";
/// In `meta`: the revision up to which compaction was done (17 bytes).
pub const FINISHED_COMPACT: &[u8] = b"finishedCompactRev";

/// What a full snapshot says of its own revisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Base {
    /// The newest revision it holds. As in etcd, a compacted revision without any later record
    /// counts too, and an empty store is at 1.
    pub revision: Revision,
    /// The compacted revision (−1 if never): states before it cannot be told.
    pub compact_revision: Revision,
    /// False where etcd was killed between scheduling and finishing a compaction: records at or
    /// below the compacted revision may still be there that etcd would remove at its start.
    pub compaction_finished: bool,
    /// Users, roles, members, alarms and leases are as of this revision. Of a full from a running
    /// etcd that is `revision`; one that was folded says so in its note.
    pub metadata_revision: Revision,
}

/// What a folded snapshot's note begins with; a revision follows.
const METADATA_NOTE: &str = "deltafold/1 metadata_revision=";

/// The note of a snapshot whose other buckets are as of `metadata_revision`.
pub fn metadata_note(metadata_revision: Revision) -> String {
    format!("{METADATA_NOTE}{metadata_revision}")
}

impl Base {
    /// Reads the `meta` bucket and the end of the `key` bucket.
    ///
    /// # Errors
    /// `CorruptSnapshot` where a bucket is missing or damaged; `Io`.
    pub fn read<R: ReadAt>(db: &Database<R>) -> Result<Base> {
        let key = key_bucket(db)?;
        let meta = db.bucket(META_BUCKET)?.ok_or_else(|| {
            Error::corrupt("the snapshot has no bucket \"meta\": it is not etcd's")
        })?;
        let (mut scheduled, mut finished) = (Revision::NONE, Revision::NONE);
        let mut c = db.cursor(&meta);
        while let Some(e) = c.next()? {
            let slot = match e.key {
                SCHEDULED_COMPACT => &mut scheduled,
                FINISHED_COMPACT => &mut finished,
                _ => continue,
            };
            *slot = decode_revision(e.value)
                .ok_or_else(|| Error::corrupt("a compacted revision in \"meta\" is no revision"))?
                .0;
        }
        let last = match db.last_key(&key)? {
            Some(k) => RecordKey::decode(&k)?.main,
            None => Revision(1),
        };
        let compact_revision = scheduled.max(finished);
        let revision = last.max(compact_revision);
        let noted = db.note()?;
        let noted = noted
            .strip_prefix(METADATA_NOTE)
            .and_then(|n| n.parse().ok());
        Ok(Base {
            metadata_revision: noted.map_or(revision, Revision),
            revision,
            compact_revision,
            compaction_finished: scheduled <= finished,
        })
    }

    /// The oldest revision at which the snapshot can tell the state of all keys.
    pub fn first_revision(&self) -> Revision {
        self.compact_revision.max(Revision(1))
    }
}

/// The `key` bucket.
///
/// # Errors
/// `CorruptSnapshot` where there is none; `Io`.
pub fn key_bucket<R: ReadAt>(db: &Database<R>) -> Result<Bucket> {
    db.bucket(KEY_BUCKET)?
        .ok_or_else(|| Error::corrupt("the snapshot has no bucket \"key\": it is not etcd's"))
}

/// How much history a folded snapshot keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KeepHistory {
    /// What etcd's compaction at the last revision keeps.
    Latest,
    /// The base's history and every event.
    #[default]
    All,
    /// The last N revisions: compacted at last − N.
    Revisions(u64),
    /// The revisions whose events are younger than this, counted back from the last event's time.
    Age(Duration),
}

impl FromStr for KeepHistory {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "latest" => return Ok(KeepHistory::Latest),
            "all" => return Ok(KeepHistory::All),
            _ => {}
        }
        if let Ok(n) = s.parse() {
            return Ok(KeepHistory::Revisions(n));
        }
        duration::parse(s).map(KeepHistory::Age).map_err(|_| {
            Reason::Usage.error(
                "use latest, all, a number of revisions (1000) or a duration (90s, 30m, 1h30m, 7d)",
            )
        })
    }
}

/// A policy's and a task's takes no duration.
impl Notation for KeepHistory {
    const PATTERN: &'static str = "^(latest|all|[0-9]+)$";
}

impl KeepHistory {
    /// The revision to compact at, for a fold from `base` to `target`. `cutoff` is the newest
    /// revision that is too old for [`KeepHistory::Age`], if any is. History that the base no
    /// longer has cannot come back.
    pub fn compact_revision(
        self,
        base: &Base,
        target: Revision,
        cutoff: Option<Revision>,
    ) -> Revision {
        let wish = match self {
            KeepHistory::Latest => target,
            KeepHistory::All => Revision::NONE,
            KeepHistory::Revisions(n) => Revision(
                target
                    .0
                    .saturating_sub(i64::try_from(n).unwrap_or(i64::MAX)),
            ),
            KeepHistory::Age(_) => cutoff.unwrap_or(Revision::NONE),
        };
        // Revisions below 1 hold nothing: compacting there is not compacting.
        let wish = if wish.0 < 1 { Revision::NONE } else { wish };
        wish.max(base.compact_revision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_to_keep_is_read_as_documented() {
        let parse = |s: &str| s.parse::<KeepHistory>();
        assert_eq!(parse("latest").unwrap(), KeepHistory::Latest);
        assert_eq!(parse("all").unwrap(), KeepHistory::All);
        assert_eq!(parse("0").unwrap(), KeepHistory::Revisions(0));
        assert_eq!(
            parse("1h30m").unwrap(),
            KeepHistory::Age(Duration::from_secs(5400))
        );
        assert_eq!(
            parse("2d500ms").unwrap(),
            KeepHistory::Age(Duration::from_millis(2 * 86_400_000 + 500))
        );
        for bad in ["", "h", "1y", "-1", "1h2", "99999999999999999999d"] {
            assert_eq!(parse(bad).unwrap_err().reason(), Reason::Usage, "{bad}");
        }
    }

    #[test]
    fn a_wish_for_history_never_exceeds_the_base() {
        let base = Base {
            revision: Revision(100),
            compact_revision: Revision(40),
            compaction_finished: true,
            metadata_revision: Revision(100),
        };
        let at = |k: KeepHistory, cutoff| k.compact_revision(&base, Revision(200), cutoff).0;
        assert_eq!(at(KeepHistory::Latest, None), 200);
        assert_eq!(at(KeepHistory::All, None), 40);
        assert_eq!(at(KeepHistory::Revisions(0), None), 200);
        assert_eq!(at(KeepHistory::Revisions(10), None), 190);
        assert_eq!(at(KeepHistory::Revisions(u64::MAX), None), 40);
        assert_eq!(
            at(KeepHistory::Age(Duration::ZERO), Some(Revision(150))),
            150
        );
        assert_eq!(at(KeepHistory::Age(Duration::MAX), None), 40);
        let fresh = Base {
            compact_revision: Revision::NONE,
            ..base
        };
        let all = KeepHistory::Revisions(500).compact_revision(&fresh, Revision(200), None);
        assert_eq!(all, Revision::NONE);
    }
}
