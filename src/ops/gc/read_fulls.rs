//! The check of fulls' contents: anybody who can write to the store can give any object the name of a
//! full.
//!
//! The fulls that a removal rests on are read whole in the run that removes. No note tells what an earlier run has
//! read, since anybody can forge a note.

use crate::backup::Snapshot;
use crate::backup::catalog::{EXCLUDED, PINS, SNAPSHOTS};
use crate::backup::timeline::Evidence;
use crate::base::opt::TEMP_DIR;
use crate::error::{Error, Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::prefix::Context;
use crate::prefix::open::SnapshotReader;
use crate::prefix::scan::Contents;
use crate::store::ObjectInfo;
use chrono::{DateTime, Utc};
use std::collections::{HashMap, HashSet};
use std::time::Instant;

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

/// What removals rest on: fulls that this run has read whole, as they were then, and the marks and pins that it has seen.
/// Only the check of fulls makes it.
#[derive(Debug, Default)]
pub(super) struct Rests {
    fulls: HashMap<String, FullVersion>,
    notes: HashSet<String>,
}

impl Rests {
    /// Fails if a full is gone that this run has not removed (`removed`, by path) or has changed, or if a mark or a pin came:
    /// then the plan no longer holds.
    ///
    /// # Errors
    /// `Conflict`; errors of the store.
    pub(super) fn check(&self, ctx: &Context, removed: &HashSet<String>) -> Result<()> {
        let mut fulls: HashMap<&str, &FullVersion> = self
            .fulls
            .iter()
            .map(|(path, v)| (path.as_str(), v))
            .collect();
        for o in ctx.store.objects(&SNAPSHOTS)? {
            let read = fulls.remove(o.path.as_str());
            if read.is_some_and(|read| *read != FullVersion::from(&o)) {
                return Err(conflict(ctx, &o.path));
            }
        }
        if let Some(path) = fulls.keys().find(|path| !removed.contains(**path)) {
            return Err(conflict(ctx, path));
        }
        let mut notes = ctx.store.objects(&[EXCLUDED, PINS])?.into_iter();
        match notes.find(|o| !self.notes.contains(&o.path)) {
            None => Ok(()),
            Some(o) => Err(conflict(ctx, &o.path)),
        }
    }
}

fn conflict(ctx: &Context, path: &str) -> Error {
    Reason::Conflict.error(format!(
        "{} has changed since this run decided what goes: what is left stays; run again",
        ctx.store.name(path)
    ))
}

/// The fulls that this run has read.
pub(super) struct ReadFulls<'a> {
    ctx: &'a Context,
    /// Those that are what their names say, as indexes in the catalog.
    good: HashSet<usize>,
    /// After this time no further full is read.
    until: Instant,
    /// Number of fulls that were read.
    pub(super) count: usize,
    /// Problems that are not faults of a full.
    pub(super) warnings: Vec<String>,
}

impl<'a> ReadFulls<'a> {
    pub(super) fn new(ctx: &'a Context, until: Instant) -> Self {
        ReadFulls {
            ctx,
            good: HashSet::new(),
            until,
            count: 0,
            warnings: Vec::new(),
        }
    }

    /// Returns whether there is time to read a further full.
    pub(super) fn has_time(&self) -> bool {
        Instant::now() < self.until
    }

    /// Returns whether a full was read and is what its name says.
    pub(super) fn has_read(&self, i: usize) -> bool {
        self.good.contains(&i)
    }

    /// Reads a full whole.
    ///
    /// # Errors
    /// One that sets the full aside if it is not what its name says, if a tag excludes it, or if there is no space to read
    /// it; errors of the store, `SnapshotVanished`, `Io`, `Terminated`.
    pub(super) fn read(&mut self, i: usize, snapshot: &Snapshot) -> Result<()> {
        self.count += 1;
        let mut result = read_whole(self.ctx, snapshot);
        if result.as_ref().is_err_and(|e| e.reason().is_bad_data()) {
            // A transient fault of the store is no damage of the object.
            result = read_whole(self.ctx, snapshot);
        }
        let name = self.ctx.store.name(&snapshot.path);
        match result {
            Err(e) if e.reason() == Reason::NoSpace => {
                self.warnings.push(format!(
                    "{name} is not read, for lack of space in {TEMP_DIR}, and is ignored: {e}"
                ));
                Err(e.setting_aside(name))
            }
            Err(e) if e.reason().is_unreadable() => Err(e.setting_aside(name)),
            result => {
                result?;
                self.good.insert(i);
                Ok(())
            }
        }
    }

    /// Returns what removals rest on that rest on these fulls: indexes, paths and versions. `contents` has what was read of
    /// snapshots in doubt, `notes` the paths of the marks and pins.
    ///
    /// # Errors
    /// `Internal` if one of them was not read.
    pub(super) fn rests(
        &self,
        contents: &Contents,
        fulls: Vec<(usize, String, FullVersion)>,
        notes: impl Iterator<Item = String>,
    ) -> Result<Rests> {
        let is_read = |i| self.has_read(i) || contents.was_read(i);
        if !fulls.iter().all(|full| is_read(full.0)) {
            return Err(Error::internal(
                "a removal rests on a full that was not read",
            ));
        }
        let fulls = fulls.into_iter().map(|(_, path, version)| (path, version));
        Ok(Rests {
            fulls: fulls.collect(),
            notes: notes.collect(),
        })
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
