//! The history in a full snapshot ([`Base`]), and the history that a fold keeps ([`KeepHistory`]).
//!
//! It only reads; `fold` drops the history that is not kept.

use crate::base::text_value::Notation;
use crate::base::{ReadAt, duration};
use crate::bolt::{Bucket, Database};
use crate::error::{Error, Reason, Result};
use crate::mvcc::revision::{RecordKey, Revision, decode_revision};
use std::str::FromStr;
use std::time::Duration;

/// The bucket with the records of all changes.
pub const KEY_BUCKET: &[u8] = b"key";
/// The bucket with etcd's own state.
pub const META_BUCKET: &[u8] = b"meta";
/// The key in `meta` of the revision up to which a compaction was scheduled (17 bytes).
pub const SCHEDULED_COMPACT: &[u8] = b"scheduledCompactRev";
/// The key in `meta` of the revision up to which a compaction was finished (17 bytes).
pub const FINISHED_COMPACT: &[u8] = b"finishedCompactRev";

/// The revisions of a full snapshot, read from its database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Base {
    /// The newest revision. As in etcd, it is at least the compacted revision, and 1 in an empty store.
    pub revision: Revision,
    /// The compacted revision, or −1 if etcd never compacted. The state at earlier revisions is unknown.
    pub compact_revision: Revision,
    /// False if etcd was stopped between scheduling and finishing a compaction. Records at or below the
    /// compacted revision may then still exist which etcd would remove when it starts.
    pub compaction_finished: bool,
    /// The revision that users, roles, members, alarms and leases are from. It equals `revision`, except in a
    /// folded snapshot, which takes them from its base and records that revision in its note.
    pub metadata_revision: Revision,
}

/// The beginning of a folded snapshot's note; a revision follows.
const METADATA_NOTE: &str = "deltafold/1 metadata_revision=";

/// Returns the note of a folded snapshot for [`Base::metadata_revision`].
pub fn metadata_note(metadata_revision: Revision) -> String {
    format!("{METADATA_NOTE}{metadata_revision}")
}

impl Base {
    /// Reads the `meta` bucket, the last key of the `key` bucket, and the note.
    ///
    /// # Errors
    /// `CorruptSnapshot` if a bucket is missing or damaged; `Io`.
    pub fn read<R: ReadAt>(db: &Database<R>) -> Result<Base> {
        let key = key_bucket(db)?;
        let meta = db.bucket(META_BUCKET)?.ok_or_else(|| {
            Error::corrupt("the database has no bucket \"meta\": it is not from etcd")
        })?;
        let (mut scheduled, mut finished) = (Revision::NONE, Revision::NONE);
        let mut c = db.cursor(&meta);
        while let Some(e) = c.next()? {
            let compacted = match e.key {
                SCHEDULED_COMPACT => &mut scheduled,
                FINISHED_COMPACT => &mut finished,
                _ => continue,
            };
            *compacted = decode_revision(e.value)
                .ok_or_else(|| Error::corrupt("a compacted revision in \"meta\" is invalid"))?
                .0;
        }
        let last = match db.last_key(&key)? {
            Some(k) => RecordKey::decode(&k)?.main,
            None => Revision(1),
        };
        let compact_revision = scheduled.max(finished);
        let revision = last.max(compact_revision);
        let note = db.note()?;
        let noted_revision = note
            .strip_prefix(METADATA_NOTE)
            .and_then(|n| n.parse().ok());
        Ok(Base {
            metadata_revision: noted_revision.map_or(revision, Revision),
            revision,
            compact_revision,
            compaction_finished: scheduled <= finished,
        })
    }

    /// Returns the oldest revision at which the state of all keys is known.
    pub fn first_revision(&self) -> Revision {
        self.compact_revision.max(Revision(1))
    }
}

/// Returns the `key` bucket.
///
/// # Errors
/// `CorruptSnapshot` if there is none; `Io`.
pub fn key_bucket<R: ReadAt>(db: &Database<R>) -> Result<Bucket> {
    db.bucket(KEY_BUCKET)?
        .ok_or_else(|| Error::corrupt("the database has no bucket \"key\": it is not from etcd"))
}

/// The history that a folded snapshot keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KeepHistory {
    /// Only the newest state, as after a compaction at the last revision.
    Latest,
    /// The history of the base and every event.
    #[default]
    All,
    /// The last N revisions, as after a compaction at N revisions before the last one.
    Revisions(u64),
    /// The revisions that are younger than this, counted back from the time of the last event.
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

/// Fields of policies and tasks take no duration.
impl Notation for KeepHistory {
    const PATTERN: &'static str = "^(latest|all|[0-9]+)$";
}

impl KeepHistory {
    /// Returns the revision to compact at in a fold from `base` to `target`: never below the base's own
    /// compacted revision, since history that the base lost cannot come back. `cutoff` is the newest revision
    /// that is too old for [`KeepHistory::Age`], if there is one.
    pub fn compact_revision(
        self,
        base: &Base,
        target: Revision,
        cutoff: Option<Revision>,
    ) -> Revision {
        let requested = match self {
            KeepHistory::Latest => target,
            KeepHistory::All => Revision::NONE,
            KeepHistory::Revisions(n) => Revision(
                target
                    .0
                    .saturating_sub(i64::try_from(n).unwrap_or(i64::MAX)),
            ),
            KeepHistory::Age(_) => cutoff.unwrap_or(Revision::NONE),
        };
        // Revisions below 1 hold nothing, so a compaction there is none.
        if requested.0 < 1 {
            base.compact_revision.max(Revision::NONE)
        } else {
            requested.max(base.compact_revision)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_notations_are_parsed() {
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
    fn the_compacted_revision_is_never_below_that_of_the_base() {
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
