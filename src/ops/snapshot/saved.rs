//! What a snapshotter knows of a store: the end of its newest timeline, the last saved changes, and what others have
//! written since.
//!
//! Writes nothing but the exclusion of a snapshot that is on the wrong side of another history.

use super::full::UnpublishedFull;
use super::next::{self, BackupState, FullCause, NewestSnapshot, nothing_saved};
use crate::backup::catalog::{EXCLUDED, ListedObject, V1, V2, Wall};
use crate::backup::trust::Trust;
use crate::backup::{Catalog, Snapshot, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::etcd::feed::{Known, Likeness};
use crate::mvcc::Revision;
use crate::prefix::Context;
use crate::prefix::last_saved::{self, Comparison, LastSaved};
use crate::prefix::newcomers::{KnownNames, Newcomers, came_from, withdraw};
use crate::prefix::scan::{self, Depth, Scan, has_plain_snapshots};
use crate::prefix::set_aside::{self, Purpose, decide_again, refuse_excluded_end};
use crate::prefix::timeline_records;
use chrono::Utc;
use std::time::{Duration, Instant};

/// How old the names may be for what is reported. Listing the store for each delta would cost more than the delta.
const MAX_AGE_OF_NAMES: Duration = Duration::from_secs(10 * 60);

/// What is saved.
pub(super) struct Saved<'a> {
    ctx: &'a Context,
    /// What the store held when it was scanned; `None` if it was empty, `Err` if a full is needed whatever the cluster
    /// holds.
    pub(super) backup: Option<Result<BackupState, FullCause>>,
    /// The newest snapshot, from which the next name follows.
    pub(super) newest: Option<NewestSnapshot>,
    /// The last saved revision.
    pub(super) last: Option<Revision>,
    /// The newest full of the timeline.
    pub(super) full: Option<SnapshotName>,
    /// When the timeline began, in seconds since 1970; `None` if no other timeline precedes it.
    pub(super) timeline_start: Option<i64>,
    /// What the store held at its end, or why a full is needed; `None` if it was not read.
    contents: Option<Result<LastSaved, FullCause>>,
    /// The names that this session knows.
    pub(super) seen: KnownNames,
    /// The last listing for reports, and what this session has saved since; no snapshot depends on it.
    listing: Vec<ListedObject>,
    /// When that listing was made; `None` if one is due.
    listed: Option<Instant>,
    /// What was found wrong.
    pub(super) warnings: Vec<String>,
}

impl<'a> Saved<'a> {
    /// Scans the store in order to save into it.
    ///
    /// # Errors
    /// Fails as [`look`](Self::look).
    pub(super) fn open(ctx: &'a Context) -> Result<Self> {
        decide_again([ctx], Purpose::Save, || {
            let mut saved = Self::scan(ctx)?;
            saved.read_end()?;
            Ok(saved)
        })
    }

    /// Scans the store without the intention to save.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `NoSnapshots` if the store holds plain snapshots, or those of a chain
    /// directly instead of in v2/: then its URL is wrong.
    pub(super) fn look(ctx: &'a Context) -> Result<Self> {
        decide_again([ctx], Purpose::Save, || Self::scan(ctx))
    }

    fn scan(ctx: &'a Context) -> Result<Self> {
        let mut saved = Saved {
            ctx,
            backup: None,
            newest: None,
            last: None,
            full: None,
            timeline_start: None,
            contents: None,
            seen: KnownNames::default(),
            listing: Vec::new(),
            listed: None,
            warnings: Vec::new(),
        };
        let scan = match scan::scan(ctx, Depth::Doubtful) {
            Ok(scan) => scan,
            Err(e) if e.reason() == Reason::NoSnapshots => {
                let paths = ctx.store.first_paths()?;
                let is_elsewhere = paths
                    .iter()
                    .any(|p| !p.contains('/') && p.parse::<SnapshotName>().is_ok());
                if is_elsewhere || has_plain_snapshots(&paths) {
                    return Err(e);
                }
                for record in timeline_records::list(&ctx.store)? {
                    saved.seen.add(record.path);
                }
                return Ok(saved);
            }
            Err(e) => return Err(e),
        };
        if ctx.trust == Trust::OnlyEncrypted && ctx.keys.encrypts() && scan.untrusted.all_plain {
            scan.refuse_untrusted(ctx)?;
        }
        // What leaves a doubt and cannot be opened counts for nothing.
        let unreadable = scan.contents.unreadable.values();
        let unreadable = unreadable.filter(|e| e.set_aside().is_some());
        ctx.marks
            .decide_without(unreadable.map(Error::again).collect())?;
        refuse_excluded_end(ctx, &scan.catalog, &scan.timelines, &scan.contents)?;
        saved.begin_at(&scan);
        saved
            .warnings
            .extend(scan.damaged.values().filter_map(set_aside::warning));
        if let Some(warning) = scan.untrusted_warning() {
            saved.warn(warning);
        }
        Ok(saved)
    }

    fn warn(&mut self, message: String) {
        tracing::warn!("{message}");
        self.warnings.push(message);
    }

    /// Reads what the store holds at its end.
    fn read_end(&mut self) -> Result<()> {
        let Some(Ok(backup)) = &self.backup else {
            return Ok(());
        };
        let read = || last_saved::read(self.ctx, &backup.end());
        // A transient fault of the store is no damage of the object.
        let last_saved = match read() {
            Err(e) if e.reason().is_bad_data() => read(),
            last_saved => last_saved,
        };
        match last_saved {
            Ok(last_saved) => self.contents = Some(Ok(last_saved)),
            // Nothing could be opened: fulls go by names, and deltas fail.
            Err(e) if e.reason() == Reason::CannotDecrypt && !self.ctx.keys.decrypts() => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Begins at what a scan has found.
    fn begin_at(&mut self, scan: &Scan) {
        let now = Utc::now();
        self.newest = NewestSnapshot::read(&scan.catalog, now);
        self.seen = KnownNames::of(&scan.catalog);
        (self.full, self.timeline_start) = (None, None);
        let backup = BackupState::read(scan, now);
        match &backup {
            Ok(backup) => {
                self.last = Some(backup.last);
                self.full = backup.full.as_ref().map(|full| full.name.clone());
                let timeline = scan.timelines.newest(&scan.catalog);
                self.timeline_start = timeline.ok().and_then(|t| t.began(&scan.catalog));
            }
            // The store has snapshots, but no delta can continue them.
            Err(_) => self.last = scan.catalog.latest_revision(),
        }
        self.backup = Some(backup);
    }

    /// Returns why a full has to be taken before any delta, for a cluster at revision `current`.
    pub(super) fn full_needed(&self, current: i64) -> Option<FullCause> {
        match &self.backup {
            None => Some(nothing_saved()),
            Some(Err(cause)) => Some(cause.clone()),
            Some(Ok(backup)) => next::full_needed(backup, current),
        }
    }

    /// Returns what the store holds at its end, or why a full is needed.
    fn contents(&mut self) -> Result<Result<&LastSaved, FullCause>> {
        let contents = match (self.contents.take(), &self.backup) {
            (Some(contents), _) => contents,
            (None, Some(Ok(backup))) => match last_saved::read(self.ctx, &backup.end()) {
                Err(e) if e.reason().is_bad_data() => Err(FullCause::from_bad_data(&e)),
                contents => Ok(contents?),
            },
            (None, Some(Err(cause))) => Err(cause.clone()),
            (None, None) => Err(nothing_saved()),
        };
        let contents = self.contents.insert(contents);
        Ok(contents.as_ref().map_err(FullCause::clone))
    }

    /// Returns the last saved transactions, after which deltas continue, or why a full is needed.
    pub(super) fn known(&mut self) -> Result<Result<Known, FullCause>> {
        Ok(self.contents()?.map(|contents| contents.known.clone()))
    }

    /// Compares a new full with what was saved last.
    pub(super) fn compare(&mut self, new_full: &UnpublishedFull) -> Result<Comparison> {
        let last = self.last.unwrap_or_default();
        let UnpublishedFull {
            db, base, known, ..
        } = new_full;
        match self.contents() {
            Ok(Ok(contents)) => contents.compare(db, base, known, last),
            Ok(Err(cause)) => Ok(Comparison::Unknown(format!(
                "what was saved last cannot be compared: {}",
                cause.message
            ))),
            // Who can only encrypt takes fulls alone: a warning says that their history was not compared.
            Err(e) if e.reason() == Reason::CannotDecrypt => Ok(Comparison::Same),
            Err(e) => Err(e),
        }
    }

    /// Returns the last revision that is the same in the last saved changes and in those of a full, if it is known.
    pub(super) fn last_common(&mut self, full: &UnpublishedFull) -> Result<Option<Revision>> {
        let common = match self.contents() {
            Ok(Ok(contents)) => contents.known.same_up_to(&full.known),
            Ok(Err(_)) => None,
            Err(e) if e.reason() == Reason::CannotDecrypt => None,
            Err(e) => return Err(e),
        };
        Ok(common.map(Revision))
    }

    /// Knows a snapshot of this size in bytes that was saved just now.
    pub(super) fn add(&mut self, name: &SnapshotName, bytes: u64) {
        let path = path_of(name);
        self.seen.add(path.clone());
        self.listing.push(ListedObject { path, bytes });
        self.newest = Some(NewestSnapshot::from(name));
        self.last = Some(name.last);
        if name.is_full() {
            self.full = Some(name.clone());
        }
    }

    /// Marks the snapshots that count for nothing.
    pub(super) fn mark_untrusted(&self, catalog: &mut Catalog) {
        self.ctx.trust.mark(catalog);
        self.ctx.marks.apply(self.ctx, catalog);
    }

    /// Returns the names for reports, and whether they were listed just now.
    pub(super) fn names(&mut self) -> Result<(Catalog, bool)> {
        let is_fresh = self
            .listed
            .is_none_or(|at| at.elapsed() >= MAX_AGE_OF_NAMES);
        if is_fresh {
            self.listing = scan::list_folders(&self.ctx.store, &[V2, V1, EXCLUDED])?;
            self.listed = Some(Instant::now());
        }
        let mut catalog = Catalog::from_listing(self.listing.clone());
        self.mark_untrusted(&mut catalog);
        Ok((catalog, is_fresh))
    }

    /// Makes the next [`names`](Self::names) list the store, after a sign that others write there.
    pub(super) fn forget_names(&mut self) {
        self.listed = None;
    }

    /// Lists the names in the store.
    pub(super) fn names_now(&self) -> Result<Catalog> {
        let mut catalog = scan::by_names(&self.ctx.store)?;
        self.mark_untrusted(&mut catalog);
        Ok(catalog)
    }

    /// Returns the oldest record of a timeline that this session does not know and that is later than all that it knows:
    /// what it names belongs before it.
    pub(super) fn newer_wall(&self) -> Result<Option<Wall>> {
        let mut records = self.seen.new_records(&self.ctx.store)?.into_iter();
        let newest = self.newest.map_or(i64::MIN, |newest| newest.created);
        let now = Utc::now();
        Ok(records.find(|wall| wall.second > newest && next::is_plausible(wall, now)))
    }

    /// Lists the records and the fulls again after a snapshot got its name, and excludes the snapshot if it is behind a
    /// record or a full of another history. `known` are the last transactions of the history that was saved. Returns a
    /// record that is later than the snapshot.
    ///
    /// # Errors
    /// `Conflict` if the snapshot was excluded; the errors of the store.
    pub(super) fn look_again(&mut self, own: &SnapshotName, known: &Known) -> Result<Option<Wall>> {
        let path = path_of(own);
        self.seen.add(path.clone());
        let Newcomers { records, fulls } = self.seen.look(&self.ctx.store)?;
        if let Some(record) = records.iter().find(|record| record.second <= own.created) {
            let why = format!("{} was written", record.path);
            return Err(withdraw(self.ctx, &path, &why));
        }
        let record = records.into_iter().next();
        for full in fulls {
            // What is behind the record is separated from this snapshot.
            let is_separate = |record: &Wall| record.second <= full.name.created;
            if record.as_ref().is_some_and(is_separate) {
                continue;
            }
            if !self.is_of_this_history(&full, known)? {
                let why = format!("{} of another history was saved", full.path);
                return Err(withdraw(self.ctx, &path, &why));
            }
            self.seen.add(full.path);
        }
        Ok(record)
    }

    /// Excludes a full that nothing proves if somebody has saved later changes of what was saved last meanwhile.
    ///
    /// # Errors
    /// `Conflict` if the full was excluded; the errors of the store.
    pub(super) fn look_for_deltas(&self, own: &SnapshotName, last: Revision) -> Result<()> {
        let catalog = self.names_now()?;
        let mut usable = catalog.usable().map(|i| &catalog.snapshots[i]);
        let is_late =
            |s: &&Snapshot| !s.name.is_full() && s.name.last > last && !self.seen.has(&s.path);
        match usable.find(is_late) {
            None => Ok(()),
            Some(delta) => {
                let why = format!("{} was saved", delta.path);
                Err(withdraw(self.ctx, &path_of(own), &why))
            }
        }
    }

    /// Returns whether a full that somebody else has saved is proven to be of the history that this session saves.
    fn is_of_this_history(&self, full: &Snapshot, known: &Known) -> Result<bool> {
        let name = &full.name;
        let start = self.timeline_start;
        if start.is_some_and(|start| name.created < start) {
            return Ok(true);
        }
        let newest = self.newest.map_or(i64::MIN, |newest| newest.created);
        if Some(name.last) <= self.last && came_from(name, newest) {
            return Ok(true);
        }
        let theirs = self
            .ctx
            .full(full)
            .and_then(|(db, base)| last_saved::known_of_full(&db, &base, name.last));
        match theirs {
            Ok(theirs) => Ok(known.compare(&theirs) == Likeness::Same),
            // No state rests on what cannot be opened.
            Err(e) if e.reason().is_unreadable() => Ok(true),
            Err(e) => Err(e),
        }
    }
}

fn path_of(name: &SnapshotName) -> String {
    format!("{V2}/{name}")
}
