//! Whether a restore is needed: what is in a data directory, and what follows from it.
//!
//! Looking reads files and changes nothing; deciding is a pure function of what was found. `restore`
//! calls it.

use super::candidates::{Candidate, Opened};
use crate::bolt::{Database, ReadAt};
use crate::datadir::place::Place;
use crate::datadir::{snap, wal};
use crate::error::{Error, Reason, Result};
use crate::job::Spool;
use crate::job::rebuild::read_every_page;
use crate::mvcc::history::META_BUCKET;
use crate::mvcc::{Base, Fold, FoldOptions, KeyRange, Revision};
use crate::store::Cancel;
use serde::Serialize;
use std::fs::File;
use std::io;
use std::path::PathBuf;

/// In `meta`: the raft index up to which entries were applied (8 bytes, big endian).
const CONSISTENT_INDEX: &[u8] = b"consistent_index";

/// How closely to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// The files are there, the database's header is right, the WAL and `.snap` can be read and fit
    /// together.
    Sanity,
    /// And every page of the database can be read, and it agrees with the backup and is not behind it.
    Full,
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Action {
    /// The member is restored.
    Restore,
    /// The member that is there stays.
    Keep,
}

/// What was decided, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// What is done.
    pub action: Action,
    /// CamelCase, stable.
    pub reason: &'static str,
    /// In words.
    pub message: String,
}

/// What is wrong with a member by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fault {
    NoDatabase,
    Database(String),
    NoWal,
    Wal(String),
    Snapshot(String),
}

impl Fault {
    fn reason(&self) -> &'static str {
        match self {
            Fault::NoDatabase => "DatabaseMissing",
            Fault::Database(_) => "DatabaseDamaged",
            Fault::NoWal => "WalMissing",
            Fault::Wal(_) => "WalDamaged",
            Fault::Snapshot(_) => "SnapshotFileMissing",
        }
    }

    fn message(&self) -> String {
        match self {
            Fault::NoDatabase => "there is no database in the member".to_owned(),
            Fault::NoWal => "there is no WAL".to_owned(),
            Fault::Database(m) | Fault::Wal(m) | Fault::Snapshot(m) => m.clone(),
        }
    }
}

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
    Faulty(Vec<(&'static str, String)>),
    /// One that it could.
    Sound(Sound),
}

/// How a sound member and a backup compare at a revision that both hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compared {
    Same(Revision),
    /// HashKV of the member and of the backup.
    Different(Revision, u32, u32),
    /// The member was compacted past all that the backup holds.
    Apart,
}

impl Found {
    pub(super) fn asked() -> Self {
        Found::Asked
    }

    /// What follows from the data directory alone.
    pub(super) fn decide(&self) -> Decision {
        let (action, reason, message) = match self {
            Found::Asked => (
                Action::Restore,
                "Asked",
                "a restore was asked for".to_owned(),
            ),
            Found::Nothing => (
                Action::Restore,
                "MemberMissing",
                "there is no member in the data directory".to_owned(),
            ),
            Found::Faulty(faults) => {
                let messages: Vec<&str> = faults.iter().map(|f| f.1.as_str()).collect();
                let reason = faults.first().map_or("DatabaseDamaged", |f| f.0);
                (Action::Restore, reason, messages.join("; "))
            }
            Found::Sound(s) => (
                Action::Keep,
                "MemberSound",
                format!(
                    "the member is in order: its database is at revision {}{}",
                    s.base.revision,
                    match s.in_wal {
                        0 => String::new(),
                        n => format!(", its WAL holds up to {n} more"),
                    }
                ),
            ),
        };
        Decision {
            action,
            reason,
            message,
        }
    }

    /// What follows with a backup beside it.
    ///
    /// # Errors
    /// What reading the backup gives; `Io`, `Terminated`.
    pub(super) fn compare(&self, candidate: &Candidate<'_>, cancel: &Cancel) -> Result<Decision> {
        let (Found::Sound(sound), Ok(opened)) = (self, &candidate.opened) else {
            return Ok(self.decide());
        };
        let backup = opened.source.target;
        if is_behind(sound, backup) {
            return Ok(against(sound, backup, Compared::Apart));
        }
        let at = sound.base.revision.min(backup);
        let compared = if at < sound.base.first_revision() {
            Compared::Apart
        } else {
            let source = candidate.source_at(at)?;
            // The history above this is in both.
            let compact = sound
                .base
                .compact_revision
                .max(source.base.compact_revision);
            let theirs = candidate.hash(&source, compact)?;
            let ours = match hash_at(opened, sound, at, compact, cancel) {
                Ok(hash) => hash,
                Err(e) if e.reason().is_bad_data() => {
                    let fault = Fault::Database(format!("{}: {e}", sound.db.display()));
                    return Ok(Found::Faulty(vec![(fault.reason(), fault.message())]).decide());
                }
                Err(e) => return Err(e),
            };
            match ours == theirs.hash {
                true => Compared::Same(at),
                false => Compared::Different(at, ours, theirs.hash),
            }
        };
        Ok(against(sound, backup, compared))
    }
}

/// Whether even with all that its WAL holds a member does not reach the backup.
fn is_behind(sound: &Sound, backup: Revision) -> bool {
    let in_wal = i64::try_from(sound.in_wal).unwrap_or(i64::MAX);
    sound.base.revision.0.saturating_add(in_wal) < backup.0
}

/// What follows for a sound member from a backup that leads to revision `backup`.
fn against(sound: &Sound, backup: Revision, compared: Compared) -> Decision {
    let own = sound.base.revision;
    if is_behind(sound, backup) {
        return Decision {
            action: Action::Restore,
            reason: "BehindBackup",
            message: format!(
                "the member ends at revision {own}, with at most {} more in its WAL, and the backup leads to {backup}",
                sound.in_wal
            ),
        };
    }
    let (action, reason, message) = match compared {
        Compared::Same(at) => (
            Action::Keep,
            "MemberSound",
            format!(
                "the member is in order, is at revision {own}, and agrees with the backup at {at}"
            ),
        ),
        Compared::Different(at, ours, theirs) => (
            Action::Restore,
            "HashMismatch",
            format!(
                "at revision {at} the member's HashKV is {ours} and the backup's {theirs}: its database is damaged, or of another history"
            ),
        ),
        Compared::Apart => (
            Action::Keep,
            "MemberSound",
            format!(
                "the member is in order and at revision {own}; it was compacted at {}, past the backup's end at {backup}, and cannot be compared with it",
                sound.base.compact_revision
            ),
        ),
    };
    Decision {
        action,
        reason,
        message,
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
    let path = place.db();
    let mut opened = None;
    match open(&path, cancel)? {
        None => faults.push(Fault::NoDatabase),
        Some(db) => match look_at_database(&db, depth) {
            Ok(found) => opened = Some(found),
            Err(e) if e.reason().is_bad_data() => {
                faults.push(Fault::Database(format!("{}: {e}", path.display())));
            }
            Err(e) => return Err(e),
        },
    }
    let mut in_wal = 0;
    if wal::segment_paths(&place.wal())?.is_empty() {
        faults.push(Fault::NoWal);
    } else {
        match look_at_wal(place, opened.as_ref().map(|o| o.1)) {
            Ok(Ok(most)) => in_wal = most,
            Ok(Err(message)) => faults.push(Fault::Snapshot(message)),
            Err(e) if e.reason().is_bad_data() => faults.push(Fault::Wal(e.to_string())),
            Err(e) => return Err(e),
        }
    }
    Ok(match opened {
        Some((base, _)) if faults.is_empty() => Found::Sound(Sound {
            db: path,
            base,
            in_wal,
        }),
        _ => Found::Faulty(faults.iter().map(|f| (f.reason(), f.message())).collect()),
    })
}

/// The database file; `None` where there is none.
fn open(path: &PathBuf, cancel: &Cancel) -> Result<Option<Spool>> {
    use io::ErrorKind::{NotADirectory, NotFound};
    match File::open(path) {
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

/// The most revisions that the WAL holds beyond the database, or what is missing beside it.
fn look_at_wal(place: &Place, applied: Option<u64>) -> Result<Result<u64, String>> {
    let log = wal::read(&place.wal())?;
    let snap_dir = place.member().join("snap");
    let from_snapshot = match snap_dir.is_dir() {
        true => snap::newest(&snap_dir, &log)?.map_or(0, |m| m.index),
        false => 0,
    };
    // What a missing snapshot leaves out must be in the log.
    if from_snapshot == 0 && log.snapshot_index() > 0 && log.first_index > 1 {
        return Ok(Err(format!(
            "the WAL begins at entry {} and no .snap file that it knows is there",
            log.first_index
        )));
    }
    // Who votes stands in a snapshot, or in entries that are committed: without them etcd never serves.
    if log.hard_state.commit == 0 && log.snapshot_index() == 0 {
        return Err(Error::new(
            Reason::CorruptDataDir,
            format!(
                "{}: nothing in the log is committed and no snapshot is, so no member votes and etcd would never serve",
                place.wal().display()
            ),
        ));
    }
    let Some(applied) = applied else {
        return Ok(Ok(0));
    };
    let end = log.last_index.max(log.snapshot_index());
    if applied > end {
        return Err(Error::new(
            Reason::CorruptDataDir,
            format!(
                "the database has applied raft entry {applied} and the WAL in {} ends at {end}: it is not this database's",
                place.wal().display()
            ),
        ));
    }
    wal::revisions_at_most(&place.wal(), applied).map(Ok)
}

/// HashKV of a member's database at a revision, compacted at another.
fn hash_at(
    opened: &Opened<'_>,
    sound: &Sound,
    at: Revision,
    compact: Revision,
    cancel: &Cancel,
) -> Result<u32> {
    let Some(file) = open(&sound.db, cancel)? else {
        return Err(Error::new(
            Reason::SnapshotVanished,
            format!("{} is gone", sound.db.display()),
        ));
    };
    let db = Database::open(file)?;
    let options = FoldOptions {
        target: at,
        compact,
        keys: KeyRange::All,
        detach_leases: false,
        base: sound.base,
        temp_dir: opened.ctx.temp_dir.clone(),
        buffer_bytes: 0,
    };
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
        let reason = |s: &Sound, backup, c| against(s, Revision(backup), c).reason;
        assert_eq!(reason(&sound(90, 1, 10), 100, same), "MemberSound");
        assert_eq!(reason(&sound(90, 1, 9), 100, same), "BehindBackup");
        assert_eq!(reason(&sound(100, 1, 0), 100, same), "MemberSound");
        assert_eq!(reason(&sound(200, 1, u64::MAX), 100, same), "MemberSound");
    }

    #[test]
    fn a_member_that_disagrees_is_replaced_and_one_that_cannot_be_compared_stays() {
        let s = sound(90, 50, 0);
        let d = against(&s, Revision(80), Compared::Different(Revision(80), 1, 2));
        assert_eq!((d.action, d.reason), (Action::Restore, "HashMismatch"));
        let d = against(&s, Revision(40), Compared::Apart);
        assert_eq!((d.action, d.reason), (Action::Keep, "MemberSound"));
        assert!(d.message.contains("compacted at 50"), "{}", d.message);
    }
}
