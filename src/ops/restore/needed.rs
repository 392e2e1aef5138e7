//! Whether a restore is needed: what is in a data directory, and what follows from it.
//!
//! Looking reads files and changes nothing; deciding is a pure function of what was found. `restore`
//! calls it.

use super::candidates::Candidate;
use crate::base::limits::Limits;
use crate::base::temp::TempFile;
use crate::base::{Cancel, ReadAt};
use crate::bolt::Database;
use crate::datadir::install::Place;
use crate::datadir::{snap, wal};
use crate::error::{Error, Reason, Result};
use crate::mvcc::history::META_BUCKET;
use crate::mvcc::{Base, Fold, FoldOptions, KeyRange, Revision};
use crate::ops::fold::open::Spool;
use crate::ops::fold::rebuild::read_every_page;
use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::path::PathBuf;

/// In `meta`: the raft index up to which entries were applied (8 bytes, big endian).
const CONSISTENT_INDEX: &[u8] = b"consistent_index";

/// How thoroughly an existing member is checked.
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

/// What is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Action {
    /// The member is restored.
    #[default]
    Restore,
    /// The member that is there stays.
    Keep,
}

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

/// What was decided, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Decision {
    /// `Restore`: the state is written. `Keep`: the member that is there stays.
    pub action: Action,
    /// `Asked`: without --if-needed. `MemberMissing`: there is no file of a member. `DatabaseMissing`,
    /// `WalMissing`: that part of it is not there. `DatabaseDamaged`, `WalDamaged`: it cannot be read, or the
    /// two do not belong together. `SnapshotFileMissing`: the WAL begins behind a .snap that is not there, or
    /// a .snap's database is not there. `HashMismatch`: at a revision that both hold, its HashKV is not the
    /// backup's. `BehindBackup`: the cluster's only member, with all that its WAL holds it does not reach the
    /// backup's end. `MemberSound`: none of these.
    #[schemars(extend("enum" = REASONS))]
    pub reason: &'static str,
    /// The same in words. For people: it may change.
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

/// What is wrong with a member by itself: the reason, and the same in words.
type Fault = (&'static str, String);

const DATABASE_DAMAGED: &str = "DatabaseDamaged";
const WAL_DAMAGED: &str = "WalDamaged";
const SNAPSHOT_FILE_MISSING: &str = "SnapshotFileMissing";

/// A member that is in order by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sound {
    db: PathBuf,
    base: Base,
    /// The most revisions that the WAL holds beyond the database.
    in_wal: u64,
}

/// What was found in a data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// It was not looked: the restore was asked for.
    Asked,
    /// No member.
    Nothing,
    /// A member that etcd could not start from.
    Faulty(Vec<Fault>),
    /// One that it could.
    Sound(Sound),
}

/// How a sound member and a backup compare at a revision that both hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compared {
    Same(Revision),
    /// The same keys and values; other leases.
    SameButLeases(Revision),
    /// HashKV of the member and of the backup.
    Different(Revision, u32, u32),
    /// The member was compacted past all that the backup holds.
    Apart,
}

impl Found {
    /// What follows from the data directory alone.
    pub(super) fn decide(&self) -> Decision {
        match self {
            Found::Asked => Decision::restore("Asked", "a restore was asked for"),
            Found::Nothing => {
                Decision::restore("MemberMissing", "there is no member in the data directory")
            }
            Found::Faulty(faults) => {
                let messages: Vec<&str> = faults.iter().map(|f| f.1.as_str()).collect();
                let reason = faults.first().map_or(DATABASE_DAMAGED, |f| f.0);
                Decision::restore(reason, messages.join("; "))
            }
            Found::Sound(s) => {
                let in_wal = match s.in_wal {
                    0 => String::new(),
                    n => format!(", its WAL holds up to {n} more"),
                };
                Decision::keep(format!(
                    "the member is in order: its database is at revision {}{in_wal}",
                    s.base.revision
                ))
            }
        }
    }

    /// What follows with a backup beside it. `alone`: no other member can have what this one lacks.
    ///
    /// # Errors
    /// What reading the backup gives; `Io`, `Terminated`.
    pub(super) fn compare(
        &self,
        candidate: &Candidate<'_>,
        alone: bool,
        cancel: &Cancel,
    ) -> Result<Decision> {
        let (Found::Sound(sound), Ok(opened)) = (self, &candidate.opened) else {
            return Ok(self.decide());
        };
        let backup = opened.source.target;
        let at = sound.base.revision.min(backup);
        if (alone && is_behind(sound, backup)) || at < sound.base.first_revision() {
            return Ok(against(sound, backup, Compared::Apart, alone));
        }
        let source = candidate.source_at(at)?;
        // The history above this is in both.
        let own_compact = sound.base.compact_revision;
        let compact = own_compact.max(source.base.compact_revision);
        let mut different = Compared::Apart;
        for detach_leases in [false, true] {
            let theirs = candidate.hash(&source, compact, detach_leases)?.hash;
            let options = FoldOptions {
                target: at,
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
                    return Ok(Found::Faulty(vec![fault]).decide());
                }
                Err(e) => return Err(e),
            };
            let same = match detach_leases {
                false => Compared::Same(at),
                true => Compared::SameButLeases(at),
            };
            if ours == theirs {
                return Ok(against(sound, backup, same, alone));
            }
            // What differs with leases is told. Without them it may be the same: a restore with
            // `--leases drop` has left it so, which is no damage.
            if !detach_leases {
                different = Compared::Different(at, ours, theirs);
            }
        }
        Ok(against(sound, backup, different, alone))
    }
}

/// Whether even with all that its WAL holds a member does not reach the backup.
fn is_behind(sound: &Sound, backup: Revision) -> bool {
    let in_wal = i64::try_from(sound.in_wal).unwrap_or(i64::MAX);
    sound.base.revision.0.saturating_add(in_wal) < backup.0
}

/// What follows for a sound member from a backup that leads to revision `backup`.
fn against(sound: &Sound, backup: Revision, compared: Compared, alone: bool) -> Decision {
    let own = sound.base.revision;
    let behind = is_behind(sound, backup);
    if behind && alone {
        return Decision::restore(
            "BehindBackup",
            format!(
                "the member ends at revision {own}, with at most {} more in its WAL, and the backup leads to {backup}",
                sound.in_wal
            ),
        );
    }
    match compared {
        Compared::Different(at, ours, theirs) => Decision::restore(
            "HashMismatch",
            format!(
                "at revision {at} the member's HashKV is {ours} and the backup's {theirs}: its database is damaged, or of another history"
            ),
        ),
        // One of several that was away for a while. Their log goes on where its own ends; a restored
        // member's would not.
        _ if behind => Decision::keep(format!(
            "the member is in order; it ends at revision {own}, before the backup's {backup}, and the other members bring it what it lacks"
        )),
        Compared::Same(at) => Decision::keep(format!(
            "the member is in order, is at revision {own}, and agrees with the backup at {at}"
        )),
        Compared::SameButLeases(at) => Decision::keep(format!(
            "the member is in order, is at revision {own}, and agrees with the backup at {at} but for leases"
        )),
        Compared::Apart => Decision::keep(format!(
            "the member is in order and at revision {own}; it was compacted at {}, past the backup's end at {backup}, and cannot be compared with it",
            sound.base.compact_revision
        )),
    }
}

/// Looks at a member. `is_there` says whether there is any file of one.
///
/// # Errors
/// `PermissionDenied` or `Io` where a file is there and cannot be read; `Terminated`. Damage is no error.
pub(super) fn look(place: &Place, is_there: bool, depth: Depth, cancel: &Cancel) -> Result<Found> {
    if !is_there {
        return Ok(Found::Nothing);
    }
    let mut faults = Vec::new();
    let log = look_at_wal(place)?;
    let mut path = place.db();
    let mut opened = look_into(&path, depth, cancel)?;
    // A leader's snapshot whose database was not put in place yet: etcd does that when it starts.
    if let (Ok(log), Some(Ok((_, applied)))) = (&log, &opened)
        && *applied < log.snapshot_file
    {
        path = log.sent_database(place);
        opened = look_into(&path, depth, cancel)?;
        if opened.is_none() {
            let message = format!(
                "the database is older than the newest .snap file, and {} is not there",
                path.display()
            );
            faults.push((SNAPSHOT_FILE_MISSING, message));
        }
    } else if opened.is_none() {
        let message = "there is no database in the member";
        faults.push(("DatabaseMissing", message.to_owned()));
    }
    let mut sound = None;
    match opened {
        Some(Ok(found)) => sound = Some(found),
        Some(Err(message)) => faults.push((DATABASE_DAMAGED, message)),
        None => {}
    }
    let mut in_wal = 0;
    match (log, &sound) {
        (Err(fault), _) => faults.push(fault),
        (Ok(log), Some((_, applied))) => match log.revisions_beyond(place, *applied) {
            Ok(most) => in_wal = most,
            Err(e) if e.reason().is_bad_data() => faults.push((WAL_DAMAGED, e.to_string())),
            Err(e) => return Err(e),
        },
        (Ok(_), None) => {}
    }
    Ok(match sound {
        Some((base, _)) if faults.is_empty() => Found::Sound(Sound {
            db: path,
            base,
            in_wal,
        }),
        _ => Found::Faulty(faults),
    })
}

/// What a database file says of itself, and its consistent index, or what is wrong with it; `None` where
/// there is none.
fn look_into(
    path: &PathBuf,
    depth: Depth,
    cancel: &Cancel,
) -> Result<Option<Result<(Base, u64), String>>> {
    let Some(db) = open(path, cancel)? else {
        return Ok(None);
    };
    match look_at_database(&db, depth) {
        Ok(found) => Ok(Some(Ok(found))),
        Err(e) if e.reason().is_bad_data() => Ok(Some(Err(format!("{}: {e}", path.display())))),
        Err(e) => Err(e),
    }
}

/// The database file; `None` where there is none.
fn open(path: &PathBuf, cancel: &Cancel) -> Result<Option<Spool>> {
    use io::ErrorKind::{NotADirectory, NotFound};
    match File::open(path).and_then(TempFile::plain) {
        Ok(file) => Ok(Some(Spool::new(file, cancel.clone()))),
        // Not there, or its folder is none.
        Err(e) if matches!(e.kind(), NotFound | NotADirectory) => Ok(None),
        Err(e) => Err(Error::io(format!("open {}", path.display()), e)),
    }
}

/// What a database says of itself, and its consistent index.
fn look_at_database(file: &Spool, depth: Depth) -> Result<(Base, u64)> {
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
            return index.map_err(|_| Error::corrupt("its consistent index is no number"));
        }
    }
    Ok(0)
}

/// A WAL that can be read, and what stands beside it.
struct Log {
    wal: wal::Summary,
    /// The raft index of the `.snap` file that etcd would start from, or 0.
    snapshot_file: u64,
}

/// Reads the WAL and looks for its `.snap` file.
fn look_at_wal(place: &Place) -> Result<Result<Log, Fault>> {
    if wal::segment_paths(&place.wal())?.is_empty() {
        let message = "there is no WAL (if it has a directory of its own, give --wal-dir)";
        return Ok(Err(("WalMissing", message.to_owned())));
    }
    let log = match wal::read(&place.wal()) {
        Ok(log) => log,
        Err(e) if e.reason().is_bad_data() => return Ok(Err((WAL_DAMAGED, e.to_string()))),
        Err(e) => return Err(e),
    };
    let snap_dir = place.member().join("snap");
    let snapshot_file = match snap_dir.is_dir() {
        true => snap::newest(&snap_dir, &log)?.map_or(0, |m| m.index),
        false => 0,
    };
    // What a missing snapshot leaves out must be in the log.
    if snapshot_file == 0 && log.snapshot_index() > 0 && log.first_index > 1 {
        let message = format!(
            "the WAL begins at entry {} and no .snap file that it knows is there",
            log.first_index
        );
        return Ok(Err((SNAPSHOT_FILE_MISSING, message)));
    }
    // Who votes stands in a snapshot, or in entries that are committed: without them etcd never serves.
    if log.hard_state.commit == 0 && log.snapshot_index() == 0 {
        let message = format!(
            "{}: nothing in the log is committed and no snapshot is, so no member votes and etcd would never serve",
            place.wal().display()
        );
        return Ok(Err((WAL_DAMAGED, message)));
    }
    Ok(Ok(Log {
        wal: log,
        snapshot_file,
    }))
}

impl Log {
    /// Where the database is that came with the `.snap` file, if a leader has sent it.
    fn sent_database(&self, place: &Place) -> PathBuf {
        let name = format!("{:016x}.snap.db", self.snapshot_file);
        place.member().join("snap").join(name)
    }

    /// The most revisions that the WAL holds beyond a database that has applied so many entries.
    fn revisions_beyond(&self, place: &Place, applied: u64) -> Result<u64> {
        let end = self.wal.last_index.max(self.wal.snapshot_index());
        if applied > end {
            return Err(Reason::CorruptDataDir.error(format!(
                "the database has applied raft entry {applied} and the WAL in {} ends at {end}: it is not this database's",
                place.wal().display()
            )));
        }
        wal::revisions_at_most(&place.wal(), applied)
    }
}

/// HashKV of a member's database.
fn hash(sound: &Sound, options: FoldOptions, cancel: &Cancel) -> Result<u32> {
    let Some(file) = open(&sound.db, cancel)? else {
        return Err(Reason::SnapshotVanished.error(format!("{} is gone", sound.db.display())));
    };
    let db = Database::open(file)?;
    Ok(Fold::new(options, &db)?.finish(&db, |_| Ok(()))?.hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound(revision: i64, compact: i64, in_wal: u64) -> Sound {
        Sound {
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
    fn a_member_stays_unless_something_is_wrong_with_it() {
        let decided = |f: Found| {
            let d = f.decide();
            (d.action, d.reason)
        };
        assert_eq!(decided(Found::Nothing), (Action::Restore, "MemberMissing"));
        assert_eq!(decided(Found::Asked), (Action::Restore, "Asked"));
        let faults = vec![("WalMissing", "no WAL".to_owned()), ("X", "y".to_owned())];
        let d = Found::Faulty(faults).decide();
        assert_eq!((d.action, d.reason), (Action::Restore, "WalMissing"));
        assert_eq!(d.message, "no WAL; y");
        assert_eq!(
            decided(Found::Sound(sound(9, 1, 3))),
            (Action::Keep, "MemberSound")
        );
    }

    #[test]
    fn the_wal_counts_since_the_database_lags_behind_it() {
        let same = Compared::Same(Revision(90));
        let reason = |s: &Sound, backup, c| against(s, Revision(backup), c, true).reason;
        assert_eq!(reason(&sound(90, 1, 10), 100, same), "MemberSound");
        assert_eq!(reason(&sound(90, 1, 9), 100, same), "BehindBackup");
        assert_eq!(reason(&sound(100, 1, 0), 100, same), "MemberSound");
        assert_eq!(reason(&sound(200, 1, u64::MAX), 100, same), "MemberSound");
    }

    #[test]
    fn one_of_several_that_lags_stays() {
        for compared in [
            Compared::Same(Revision(90)),
            Compared::SameButLeases(Revision(90)),
            Compared::Apart,
        ] {
            let d = against(&sound(90, 1, 0), Revision(100), compared, false);
            assert_eq!((d.action, d.reason), (Action::Keep, "MemberSound"));
            assert!(
                d.message.contains("before the backup's 100"),
                "{}",
                d.message
            );
        }
        let other = Compared::Different(Revision(90), 1, 2);
        let d = against(&sound(90, 1, 0), Revision(100), other, false);
        assert_eq!(d.reason, "HashMismatch");
    }

    #[test]
    fn a_member_that_disagrees_is_replaced_and_one_that_cannot_be_compared_stays() {
        let s = sound(90, 50, 0);
        let d = against(
            &s,
            Revision(80),
            Compared::Different(Revision(80), 1, 2),
            true,
        );
        assert_eq!((d.action, d.reason), (Action::Restore, "HashMismatch"));
        let d = against(&s, Revision(40), Compared::Apart, true);
        assert_eq!((d.action, d.reason), (Action::Keep, "MemberSound"));
        assert!(d.message.contains("compacted at 50"), "{}", d.message);
    }
}
