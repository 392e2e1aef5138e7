//! The decision whether a restore is needed: what a data directory holds, and what follows from it.
//!
//! Inspecting reads files and changes nothing; deciding is a pure function of what was found.

use super::candidates::Candidate;
use crate::base::limits::Limits;
use crate::base::opt::WAL_DIR;
use crate::base::temp::TempFile;
use crate::base::{Cancel, ReadAt};
use crate::bolt::Database;
use crate::datadir::install::InstallTarget;
use crate::datadir::{open_file, snap, wal};
use crate::error::{Error, Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::history::META_BUCKET;
use crate::mvcc::{Base, Fold, FoldOptions, KeyRange, Revision};
use crate::prefix::open::DatabaseFile;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// The key in the bucket `meta` that holds the raft index of the last applied entry (8 bytes, big
/// endian).
const CONSISTENT_INDEX: &[u8] = b"consistent_index";

/// How thoroughly an existing member is checked before a restore: the restore runs only if the member is
/// missing, damaged or lacks data of the backup.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Depth {
    /// Check the file list, the database's header and the WAL
    Sanity,
    /// Also read every page, and compare HashKV with the backup
    Full,
}

/// What a restore does with the data directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Action {
    /// The member is restored.
    #[default]
    Restore,
    /// The existing member is kept.
    Keep,
}

#[cfg(test)]
const REASONS: [&str; 10] = [
    "Asked",
    "MemberMissing",
    "DatabaseMissing",
    "DatabaseDamaged",
    "WalMissing",
    "WalDamaged",
    "SnapshotFileMissing",
    "HashMismatch",
    "BehindBackup",
    "MemberSound",
];

/// The decision whether to restore, with its reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Decision {
    /// `Restore`: the state is written. `Keep`: the existing member is kept.
    pub action: Action,
    /// `Asked`: --if-needed was not given. `MemberMissing`: the data directory holds no file of a
    /// member. `DatabaseMissing`, `WalMissing`: the member has no database, or no WAL.
    /// `DatabaseDamaged`, `WalDamaged`: the file cannot be read, or the two do not belong together.
    /// `SnapshotFileMissing`: the WAL begins after a .snap file that is missing, or the database of a
    /// .snap file is missing. `HashMismatch`: at a revision that both hold, the member's HashKV differs
    /// from the backup's. `BehindBackup`: this is the cluster's only member, and even with all of its
    /// WAL it does not reach the backup's end. `MemberSound`: none of these.
    #[cfg_attr(test, schemars(extend("enum" = REASONS)))]
    pub reason: &'static str,
    /// The reason as human-readable text; it may change.
    pub message: String,
}

impl Decision {
    fn restore(reason: &'static str, message: impl Into<String>) -> Self {
        Decision {
            action: Action::Restore,
            reason,
            message: message.into(),
        }
    }

    fn keep(message: String) -> Self {
        Decision {
            action: Action::Keep,
            reason: "MemberSound",
            message,
        }
    }
}

/// A fault of a member: the reason, and a message.
type Fault = (&'static str, String);

const DATABASE_DAMAGED: &str = "DatabaseDamaged";
const WAL_DAMAGED: &str = "WalDamaged";
const SNAPSHOT_FILE_MISSING: &str = "SnapshotFileMissing";

/// A member that etcd can start from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SoundMember {
    db: PathBuf,
    base: Base,
    /// An upper limit of the revisions that the WAL holds beyond the database.
    in_wal: u64,
}

/// What an inspection of a data directory found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Inspection {
    /// No inspection: a restore was requested.
    NotInspected,
    /// The directory holds no member.
    NoMember,
    /// etcd cannot start from the member.
    Faulty(Vec<Fault>),
    /// etcd can start from the member.
    Sound(SoundMember),
}

/// How a sound member compares with a backup at a revision that both hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Same(Revision),
    /// The same keys and values, but other leases.
    SameButLeases(Revision),
    /// The revision, the member's HashKV and the backup's.
    Different(Revision, u32, u32),
    /// Nothing to compare: the member is compacted beyond the backup's end.
    Impossible,
}

impl Inspection {
    /// Decides by the data directory alone.
    pub(super) fn decide(&self) -> Decision {
        match self {
            Inspection::NotInspected => Decision::restore("Asked", "a restore was requested"),
            Inspection::NoMember => {
                Decision::restore("MemberMissing", "the data directory holds no member")
            }
            Inspection::Faulty(faults) => {
                let messages: Vec<&str> = faults.iter().map(|f| f.1.as_str()).collect();
                let reason = faults.first().map_or(DATABASE_DAMAGED, |f| f.0);
                Decision::restore(reason, messages.join("; "))
            }
            Inspection::Sound(s) => {
                let in_wal = match s.in_wal {
                    0 => String::new(),
                    n => format!(", its WAL holds up to {n} more revisions"),
                };
                Decision::keep(format!(
                    "the member is sound: its database is at revision {}{in_wal}",
                    s.base.revision
                ))
            }
        }
    }

    /// Decides by the data directory and a backup. `is_only_member`: no other member can have what this
    /// one lacks.
    ///
    /// # Errors
    /// Fails if the backup cannot be read, and with `Io` or `Terminated`.
    pub(super) fn compare(
        &self,
        candidate: &Candidate<'_>,
        is_only_member: bool,
        cancel: &Cancel,
    ) -> Result<Decision> {
        let (Inspection::Sound(sound), Ok(opened)) = (self, &candidate.opened) else {
            return Ok(self.decide());
        };
        let backup = opened.source.revision;
        let common = sound.base.revision.min(backup);
        if (is_only_member && is_behind(sound, backup)) || common < sound.base.first_revision() {
            return Ok(decide_by(
                sound,
                backup,
                Comparison::Impossible,
                is_only_member,
            ));
        }
        let source = candidate.source_at(common)?;
        // Both hold the whole history after this revision.
        let own_compact = sound.base.compact_revision;
        let compact = own_compact.max(source.base.compact_revision);
        let mut different = Comparison::Impossible;
        for detach_leases in [false, true] {
            let theirs = candidate.hash(&source, compact, detach_leases)?.hash;
            let options = FoldOptions {
                target: common,
                compact,
                keys: KeyRange::All,
                detach_leases,
                base: sound.base,
                temp_dir: opened.ctx.temp(),
                buffer_bytes: 0,
                limits: Limits::NONE,
            };
            let ours = match hash(sound, options, cancel) {
                Ok(hash) => hash,
                Err(e) if e.reason().is_bad_data() => {
                    let fault = (DATABASE_DAMAGED, format!("{}: {e}", sound.db.display()));
                    return Ok(Inspection::Faulty(vec![fault]).decide());
                }
                Err(e) => return Err(e),
            };
            let same = if detach_leases {
                Comparison::SameButLeases(common)
            } else {
                Comparison::Same(common)
            };
            if ours == theirs {
                return Ok(decide_by(sound, backup, same, is_only_member));
            }
            // Report the difference with leases. Without them the data may agree: a restore with
            // `--leases drop` leaves it so, which is no damage.
            if !detach_leases {
                different = Comparison::Different(common, ours, theirs);
            }
        }
        Ok(decide_by(sound, backup, different, is_only_member))
    }
}

/// Returns whether a member ends before the backup even with all of its WAL.
fn is_behind(sound: &SoundMember, backup: Revision) -> bool {
    let in_wal = i64::try_from(sound.in_wal).unwrap_or(i64::MAX);
    sound.base.revision.0.saturating_add(in_wal) < backup.0
}

/// Decides about a sound member by a comparison with a backup that leads to revision `backup`.
fn decide_by(
    sound: &SoundMember,
    backup: Revision,
    compared: Comparison,
    is_only_member: bool,
) -> Decision {
    let own = sound.base.revision;
    let behind = is_behind(sound, backup);
    if behind && is_only_member {
        return Decision::restore(
            "BehindBackup",
            format!(
                "the member ends at revision {own}, with at most {} more in its WAL, but the backup leads to {backup}",
                sound.in_wal
            ),
        );
    }
    match compared {
        Comparison::Different(at, ours, theirs) => Decision::restore(
            "HashMismatch",
            format!(
                "at revision {at} the member's HashKV is {ours} and the backup's {theirs}: its database is damaged, or holds another history"
            ),
        ),
        // This member was stopped for a while. The log of the other members continues where its own
        // ends; the log of a restored member would not.
        _ if behind => Decision::keep(format!(
            "the member is sound; it ends at revision {own}, before the backup's {backup}, and the other members will send it what it lacks"
        )),
        Comparison::Same(at) => Decision::keep(format!(
            "the member is sound, at revision {own}, and agrees with the backup at {at}"
        )),
        Comparison::SameButLeases(at) => Decision::keep(format!(
            "the member is sound, at revision {own}, and agrees with the backup at {at} except for leases"
        )),
        Comparison::Impossible => Decision::keep(format!(
            "the member is sound and at revision {own}; it was compacted at {}, beyond the backup's end at {backup}, so the two cannot be compared",
            sound.base.compact_revision
        )),
    }
}

/// Inspects a member. `has_member`: the data directory holds any file of one.
///
/// # Errors
/// Fails with `PermissionDenied` or `Io` if a file cannot be read, and with `Terminated`. Damage is a
/// finding, not an error.
pub(super) fn inspect(
    place: &InstallTarget,
    has_member: bool,
    depth: Depth,
    cancel: &Cancel,
) -> Result<Inspection> {
    if !has_member {
        return Ok(Inspection::NoMember);
    }
    let mut faults = Vec::new();
    let log = read_wal(place)?;
    let mut path = place.db();
    let mut opened = inspect_database(&path, depth, cancel)?;
    // etcd received a snapshot from the leader and has not moved its database into place: it does so
    // when it starts.
    if let (Ok(log), Some(Ok((_, applied)))) = (&log, &opened)
        && *applied < log.snapshot_file
    {
        path = log.sent_database(place);
        opened = inspect_database(&path, depth, cancel)?;
        if opened.is_none() {
            let message = format!(
                "the database is older than the newest .snap file, whose database {} is missing",
                path.display()
            );
            faults.push((SNAPSHOT_FILE_MISSING, message));
        }
    } else if opened.is_none() {
        let message = "the member has no database";
        faults.push(("DatabaseMissing", message.to_owned()));
    }
    let mut database = None;
    match opened {
        Some(Ok(readable)) => database = Some(readable),
        Some(Err(message)) => faults.push((DATABASE_DAMAGED, message)),
        None => {}
    }
    let mut in_wal = 0;
    match (log, &database) {
        (Err(fault), _) => faults.push(fault),
        (Ok(log), Some((_, applied))) => match log.revisions_beyond(place, *applied) {
            Ok(limit) => in_wal = limit,
            Err(e) if e.reason().is_bad_data() => faults.push((WAL_DAMAGED, e.to_string())),
            Err(e) => return Err(e),
        },
        (Ok(_), None) => {}
    }
    Ok(match database {
        Some((base, _)) if faults.is_empty() => Inspection::Sound(SoundMember {
            db: path,
            base,
            in_wal,
        }),
        _ => Inspection::Faulty(faults),
    })
}

/// Returns what a database says of itself and its consistent index, or a message if it is damaged;
/// `None` if there is no file.
fn inspect_database(
    path: &Path,
    depth: Depth,
    cancel: &Cancel,
) -> Result<Option<Result<(Base, u64), String>>> {
    let Some(db) = open(path, cancel)? else {
        return Ok(None);
    };
    match read_database(&db, depth) {
        Ok(found) => Ok(Some(Ok(found))),
        Err(e) if e.reason().is_bad_data() => Ok(Some(Err(format!("{}: {e}", path.display())))),
        Err(e) => Err(e),
    }
}

/// Opens a database file; `None` if there is none.
fn open(path: &Path, cancel: &Cancel) -> Result<Option<DatabaseFile>> {
    use io::ErrorKind::{NotADirectory, NotFound};
    match open_file(path).and_then(TempFile::plain) {
        Ok(file) => Ok(Some(DatabaseFile::new(file, cancel.clone()))),
        // The file is missing, or its folder is not a folder.
        Err(e) if matches!(e.kind(), NotFound | NotADirectory) => Ok(None),
        Err(e) => Err(Error::io(format!("open {}", path.display()), e)),
    }
}

/// Returns what a database says of itself, and its consistent index.
fn read_database(file: &DatabaseFile, depth: Depth) -> Result<(Base, u64)> {
    let db = Database::open(file)?;
    let base = Base::read(&db)?;
    let index = consistent_index(&db)?;
    if depth == Depth::Full {
        read_every_page(&db)?;
    }
    Ok((base, index))
}

fn consistent_index<R: ReadAt>(db: &Database<R>) -> Result<u64> {
    let Some(meta) = db.bucket(META_BUCKET)? else {
        return Ok(0);
    };
    let mut c = db.cursor(&meta);
    while let Some(e) = c.next()? {
        if e.key == CONSISTENT_INDEX {
            let index = e.value.try_into().map(u64::from_be_bytes);
            return index.map_err(|_| Error::corrupt("its consistent index is not 8 bytes long"));
        }
    }
    Ok(0)
}

/// A WAL that can be read, and the `.snap` file beside it.
struct LogFiles {
    wal: wal::Summary,
    /// The raft index of the `.snap` file that etcd would start from, or 0.
    snapshot_file: u64,
}

/// Reads the WAL and looks for its `.snap` file. The inner error is a fault of the member.
fn read_wal(place: &InstallTarget) -> Result<Result<LogFiles, Fault>> {
    if wal::segment_paths(&place.wal())?.is_empty() {
        let message =
            format!("the member has no WAL (if it has a directory of its own, give {WAL_DIR})");
        return Ok(Err(("WalMissing", message.to_owned())));
    }
    let log = match wal::read(&place.wal()) {
        Ok(log) => log,
        Err(e) if e.reason().is_bad_data() => return Ok(Err((WAL_DAMAGED, e.to_string()))),
        Err(e) => return Err(e),
    };
    let snap_dir = place.member().join("snap");
    let snapshot_file = if snap_dir.is_dir() {
        snap::newest(&snap_dir, &log)?.map_or(0, |m| m.index)
    } else {
        0
    };
    // Without a snapshot, the WAL must begin at the first entry.
    if snapshot_file == 0 && log.snapshot_index() > 0 && log.first_index > 1 {
        let message = format!(
            "the WAL begins at entry {}, and the .snap file with the entries before it is missing",
            log.first_index
        );
        return Ok(Err((SNAPSHOT_FILE_MISSING, message)));
    }
    // The voters are recorded in a snapshot or in committed entries: without either, etcd never serves.
    if log.hard_state.commit == 0 && log.snapshot_index() == 0 {
        let message = format!(
            "{}: the log has no committed entry and no snapshot, so no member votes and etcd would never serve",
            place.wal().display()
        );
        return Ok(Err((WAL_DAMAGED, message)));
    }
    Ok(Ok(LogFiles {
        wal: log,
        snapshot_file,
    }))
}

impl LogFiles {
    /// Returns the path of the database that the leader sent with the `.snap` file.
    fn sent_database(&self, place: &InstallTarget) -> PathBuf {
        let name = format!("{:016x}.snap.db", self.snapshot_file);
        place.member().join("snap").join(name)
    }

    /// Returns an upper limit of the revisions that the WAL holds beyond a database with this
    /// consistent index. Fails with `CorruptDataDir` if the database is ahead of the WAL.
    fn revisions_beyond(&self, place: &InstallTarget, applied: u64) -> Result<u64> {
        let end = self.wal.last_index.max(self.wal.snapshot_index());
        if applied > end {
            return Err(Reason::CorruptDataDir.error(format!(
                "the database has applied raft entry {applied}, but the WAL in {} ends at {end}: the WAL belongs to another database",
                place.wal().display()
            )));
        }
        wal::revisions_at_most(&place.wal(), applied)
    }
}

/// Returns the HashKV of a member's database.
fn hash(sound: &SoundMember, options: FoldOptions, cancel: &Cancel) -> Result<u32> {
    let Some(file) = open(&sound.db, cancel)? else {
        return Err(Reason::SnapshotVanished.error(format!(
            "{} was deleted during the comparison: run again",
            sound.db.display()
        )));
    };
    let db = Database::open(file)?;
    Ok(Fold::new(options, &db)?.finish(&db, |_| Ok(()))?.hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound(revision: i64, compact: i64, in_wal: u64) -> SoundMember {
        SoundMember {
            db: PathBuf::new(),
            base: Base {
                revision: Revision(revision),
                compact_revision: Revision(compact),
                compaction_finished: true,
                metadata_revision: Revision(revision),
            },
            in_wal,
        }
    }

    #[test]
    fn a_sound_member_is_kept_and_any_other_restored() {
        let decided = |f: Inspection| {
            let d = f.decide();
            (d.action, d.reason)
        };
        assert_eq!(
            decided(Inspection::NoMember),
            (Action::Restore, "MemberMissing")
        );
        assert_eq!(
            decided(Inspection::NotInspected),
            (Action::Restore, "Asked")
        );
        let faults = vec![("WalMissing", "no WAL".to_owned()), ("X", "y".to_owned())];
        let d = Inspection::Faulty(faults).decide();
        assert_eq!((d.action, d.reason), (Action::Restore, "WalMissing"));
        assert_eq!(d.message, "no WAL; y");
        assert_eq!(
            decided(Inspection::Sound(sound(9, 1, 3))),
            (Action::Keep, "MemberSound")
        );
    }

    #[test]
    fn the_wal_counts_toward_a_members_end() {
        let same = Comparison::Same(Revision(90));
        let reason = |s: &SoundMember, backup, c| decide_by(s, Revision(backup), c, true).reason;
        assert_eq!(reason(&sound(90, 1, 10), 100, same), "MemberSound");
        assert_eq!(reason(&sound(90, 1, 9), 100, same), "BehindBackup");
        assert_eq!(reason(&sound(100, 1, 0), 100, same), "MemberSound");
        assert_eq!(reason(&sound(200, 1, u64::MAX), 100, same), "MemberSound");
    }

    #[test]
    fn a_lagging_member_of_several_is_kept() {
        for compared in [
            Comparison::Same(Revision(90)),
            Comparison::SameButLeases(Revision(90)),
            Comparison::Impossible,
        ] {
            let d = decide_by(&sound(90, 1, 0), Revision(100), compared, false);
            assert_eq!((d.action, d.reason), (Action::Keep, "MemberSound"));
            assert!(
                d.message.contains("before the backup's 100"),
                "{}",
                d.message
            );
        }
        let other = Comparison::Different(Revision(90), 1, 2);
        let d = decide_by(&sound(90, 1, 0), Revision(100), other, false);
        assert_eq!(d.reason, "HashMismatch");
    }

    #[test]
    fn a_different_member_is_replaced_and_an_incomparable_one_is_kept() {
        let s = sound(90, 50, 0);
        let d = decide_by(
            &s,
            Revision(80),
            Comparison::Different(Revision(80), 1, 2),
            true,
        );
        assert_eq!((d.action, d.reason), (Action::Restore, "HashMismatch"));
        let d = decide_by(&s, Revision(40), Comparison::Impossible, true);
        assert_eq!((d.action, d.reason), (Action::Keep, "MemberSound"));
        assert!(d.message.contains("compacted at 50"), "{}", d.message);
    }
}
