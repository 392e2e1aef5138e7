//! Reads the contents of snapshots for a scan, and keeps what tells histories apart.
//!
//! Fingerprints go to the temporary directory, not into memory.

use crate::backup::chain::KnownBases;
use crate::backup::survey::{Comparison, Continuity, FingerprintFiles, Held, Survey, Surveyor};
use crate::backup::timeline::Evidence;
use crate::backup::{Catalog, Kind};
use crate::base::cancel::Cancel;
use crate::base::parallel::find_first;
use crate::base::{lock, unpoisoned};
use crate::bolt::Database;
use crate::error::{Error, Result};
use crate::mvcc::Revision;
use crate::prefix::Context;
use crate::prefix::open::{DatabaseFile, SnapshotReader};
use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;

/// The results of reading snapshots, by their index in the catalog.
#[derive(Default)]
pub struct Contents {
    fingerprints: Option<FingerprintFiles>,
    /// The surveys of snapshots that were read.
    pub surveys: BTreeMap<usize, Survey>,
    /// The errors of snapshots that could not be read.
    pub unreadable: BTreeMap<usize, Error>,
    /// Only these are compared, so that the timelines do not depend on the depth of the scan.
    doubtful: HashSet<usize>,
    cancel: Cancel,
}

impl Contents {
    /// Returns the revisions of the fulls that were read.
    pub fn known_bases(&self) -> KnownBases {
        let bases = self.surveys.iter();
        bases.filter_map(|(&i, s)| Some((i, s.base?))).collect()
    }

    /// Returns the first revision at which the contents of two snapshots disagree; `None` if there is none,
    /// or if one of them was not read.
    ///
    /// # Errors
    /// `Io`.
    pub fn disagreement(&self, a: usize, b: usize) -> Result<Option<Revision>> {
        Ok(self.compare(a, b)?.conflict)
    }

    fn pair(&self, a: usize, b: usize) -> Option<(&FingerprintFiles, &Survey, &Survey)> {
        let (a, b) = (self.surveys.get(&a)?, self.surveys.get(&b)?);
        Some((self.fingerprints.as_ref()?, a, b))
    }
}

impl Evidence for Contents {
    fn held(&self, snapshot: usize) -> Option<Held> {
        let survey = self.surveys.get(&snapshot)?;
        self.doubtful.contains(&snapshot).then(|| survey.held())
    }

    fn has_content(&self, snapshot: usize) -> bool {
        self.surveys.contains_key(&snapshot)
    }

    fn compare(&self, a: usize, b: usize) -> Result<Comparison> {
        self.cancel.check()?;
        match self.pair(a, b) {
            Some((fingerprints, a, b)) => fingerprints.compare(a, b),
            None => Ok(Comparison::default()),
        }
    }

    fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
        self.cancel.check()?;
        match self.pair(before, after) {
            Some((fingerprints, before, after)) => fingerprints.continuity(before, until, after),
            None => Ok(Continuity::Unknown),
        }
    }

    fn fingerprint(&self, snapshot: usize, revision: Revision) -> Result<String> {
        match (&self.fingerprints, self.surveys.get(&snapshot)) {
            (Some(files), Some(s)) => files.fingerprint(s, revision),
            _ => Err(Error::internal(
                "a timeline forks at a snapshot that was not read",
            )),
        }
    }

    fn last(&self, snapshot: usize) -> Option<Revision> {
        self.surveys.get(&snapshot).map(|s| s.last)
    }

    fn is_unreadable(&self, snapshot: usize) -> bool {
        self.unreadable.contains_key(&snapshot)
    }

    fn was_read(&self, snapshot: usize) -> bool {
        self.surveys.contains_key(&snapshot)
    }
}

/// Reads the snapshots in `to_read`. Calls `check_full` for every full. Errors for which `is_damage` is true are put into
/// [`Contents::unreadable`].
///
/// # Errors
/// All other errors: those of the store; `Io`, `NoSpace`; one that sets a snapshot aside if tags exclude some of them.
pub(crate) fn read_contents(
    ctx: &Context,
    catalog: &Catalog,
    to_read: Vec<usize>,
    doubtful: &[usize],
    is_damage: impl Fn(&Error) -> bool + Sync,
    check_full: impl Fn(&Database<DatabaseFile>) -> Result<()> + Sync,
) -> Result<Contents> {
    let mut contents = Contents {
        doubtful: doubtful.iter().copied().collect(),
        cancel: ctx.store.cancel().clone(),
        ..Contents::default()
    };
    if to_read.is_empty() {
        return Ok(contents);
    }
    let threads = ctx.threads.clamp(1, to_read.len());
    let excluded = Mutex::new(Vec::new());
    let files: Result<_> = (0..threads).map(|_| ctx.temp_file()).collect();
    let mut fingerprints = FingerprintFiles::new(files?);
    {
        let free: Mutex<Vec<Surveyor<'_>>> = Mutex::new(fingerprints.surveyors().collect());
        let (read, one_full) = (Mutex::new(&mut contents), Mutex::new(()));
        let reader = SnapshotReader::new(ctx, to_read.iter().map(|&i| &catalog.snapshots[i]));
        find_first(threads, to_read.len(), |nth| {
            let Some(mut surveyor) = lock(&free).pop() else {
                return Err(Error::internal("more threads survey than there are files"));
            };
            let survey = survey(ctx, &reader, nth, &mut surveyor, &one_full, &check_full);
            lock(&free).push(surveyor);
            let i = to_read[nth];
            match survey {
                Ok(s) => drop(lock(&read).surveys.insert(i, s)),
                Err(e) if is_damage(&e) => drop(lock(&read).unreadable.insert(i, e)),
                Err(e) if e.is_of_excluded() => lock(&excluded).push(e),
                Err(e) => return Err(e),
            }
            Ok(None::<()>)
        })?;
    }
    contents.fingerprints = Some(fingerprints);
    ctx.marks
        .decide_without(unpoisoned(excluded.into_inner()))?;
    Ok(contents)
}

/// Surveys the snapshot at position `nth` of the reader. `one_full` is held while a full is in the temporary
/// directory.
fn survey(
    ctx: &Context,
    reader: &SnapshotReader<'_>,
    nth: usize,
    surveyor: &mut Surveyor<'_>,
    one_full: &Mutex<()>,
    check_full: impl Fn(&Database<DatabaseFile>) -> Result<()>,
) -> Result<Survey> {
    let snapshot = reader.snapshot(nth);
    let at = ctx.at(snapshot);
    match snapshot.name.kind {
        Kind::Full => {
            // The temporary directory may have room for one full only.
            let _one = lock(one_full);
            let db = reader.full(nth)?.0;
            check_full(&db).map_err(&at)?;
            surveyor.full(&db).map_err(at)
        }
        Kind::Incr => surveyor.delta(reader.delta_in_turn(nth)?).map_err(at),
    }
}
