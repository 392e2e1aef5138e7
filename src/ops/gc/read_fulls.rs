//! The check of fulls' contents: anybody who can write to the store can give any object the name of a
//! full.
//!
//! The fulls that a removal rests on are read whole in the run that removes. No note tells what an earlier run
//! has read, since anybody can forge a note. Called by `ops::gc::plan`.

use crate::backup::Snapshot;
use crate::error::{Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::prefix::Context;
use crate::prefix::open::SnapshotReader;
use crate::store::ObjectInfo;
use chrono::{DateTime, Utc};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Why a full is ignored: the name of the reason, and a message.
pub(super) type Damage = (String, String);

/// What is known about the content of a full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FullState {
    /// It is what its name says.
    Good,
    /// It is damaged, or not what its name says.
    Damaged(Damage),
    /// It was not read, for lack of time or space.
    NotRead,
}

/// What distinguishes the versions of a full's object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FullVersion {
    bytes: u64,
    etag: Option<String>,
    modified: DateTime<Utc>,
}

impl From<&ObjectInfo> for FullVersion {
    fn from(o: &ObjectInfo) -> Self {
        FullVersion {
            bytes: o.bytes,
            etag: o.etag.clone(),
            modified: o.modified,
        }
    }
}

/// The results of the fulls that this run has read.
pub(super) struct ReadFulls<'a> {
    ctx: &'a Context,
    /// The version that was read, and the result, by path.
    states: HashMap<String, (FullVersion, FullState)>,
    /// After this time no further full is read.
    until: Instant,
    /// Number of fulls that were read.
    pub(super) count: usize,
    /// Problems that are not faults of a full.
    pub(super) warnings: Vec<String>,
}

impl<'a> ReadFulls<'a> {
    pub(super) fn new(ctx: &'a Context, timeout: Duration) -> Self {
        // A time that is beyond the clock's range is as good as a day.
        let now = Instant::now();
        let day = now + Duration::from_secs(24 * 3600);
        ReadFulls {
            ctx,
            states: HashMap::new(),
            until: now.checked_add(timeout).unwrap_or(day),
            count: 0,
            warnings: Vec::new(),
        }
    }

    /// Returns what is known about a full without reading it; `None` if nothing is.
    pub(super) fn state(&self, path: &str, version: &FullVersion) -> Option<FullState> {
        let (read, state) = self.states.get(path)?;
        (read == version).then(|| state.clone())
    }

    /// Reads fulls one after the other, while there is time.
    ///
    /// # Errors
    /// Fails with the store's errors, `SnapshotVanished`, `Io` or `Terminated`. Damage of a full is a
    /// result, not an error.
    pub(super) fn read(&mut self, fulls: &[(&Snapshot, &FullVersion)]) -> Result<()> {
        for &(snapshot, version) in fulls {
            if Instant::now() >= self.until {
                break;
            }
            let state = self.read_one(snapshot)?;
            let read = (version.clone(), state);
            self.states.insert(snapshot.path.clone(), read);
        }
        Ok(())
    }

    fn read_one(&mut self, snapshot: &Snapshot) -> Result<FullState> {
        self.count += 1;
        let mut result = read_whole(self.ctx, snapshot);
        if result.as_ref().is_err_and(|e| e.reason().is_bad_data()) {
            // A transient fault of the store is no damage of the object.
            result = read_whole(self.ctx, snapshot);
        }
        match result {
            Ok(()) => Ok(FullState::Good),
            Err(e) if e.reason().is_unreadable() => {
                let damage = (e.reason().as_str().to_owned(), e.to_string());
                Ok(FullState::Damaged(damage))
            }
            Err(e) if e.reason() == Reason::NoSpace => {
                let name = self.ctx.store.name(&snapshot.path);
                self.warnings.push(format!(
                    "{name} is not read, for lack of space in --temp-dir, and is ignored: {e}"
                ));
                Ok(FullState::NotRead)
            }
            Err(e) => Err(e),
        }
    }
}

/// Reads a full to its end and checks its SHA-256, every page, and whether it holds the revision of its
/// name.
fn read_whole(ctx: &Context, snapshot: &Snapshot) -> Result<()> {
    let at = ctx.at(snapshot);
    let (db, base) = SnapshotReader::new(ctx, [snapshot]).full(0)?;
    read_every_page(&db).map_err(&at)?;
    if base.first_revision() > snapshot.name.last {
        return Err(at(Reason::NameMismatch.error(format!(
            "its name says revision {}, but it holds revisions from {} on",
            snapshot.name.last,
            base.first_revision()
        ))));
    }
    Ok(())
}
