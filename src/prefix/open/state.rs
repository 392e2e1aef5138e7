//! A state of a backup: the selected full, opened, and the deltas that lead from it to a revision.
//!
//! Nothing is folded here: `fold` does.

use super::database_file::DatabaseFile;
use crate::backup::chain::{self, Chain, Choice, KnownBases, Link};
use crate::backup::timeline::{self, Timeline};
use crate::backup::{Snapshot, SnapshotName};
use crate::base::opt::{REVISION, STORE, TIMELINE};
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Base, Revision, lease};
use crate::prefix::by_time::{refuse_uncovered, revision_at};
use crate::prefix::scan::Scan;
use crate::prefix::select::{self, At, DeltaSlice, StateRequest, choose_timeline, timeline_of};
use crate::prefix::snapshot_files::OpenFile;
use crate::prefix::{Context, free_space};
use crate::store::{ListedSnapshot, ReadAhead, is_large};
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// The database of a full, and its revisions.
type OpenFull = (Database<DatabaseFile>, Base);

/// A state that can be folded: an opened full, and the deltas that lead from it to a revision.
pub struct State {
    /// The full's database.
    pub db: Database<DatabaseFile>,
    /// The revisions of the full.
    pub base: Base,
    /// The revision that the deltas lead to.
    pub revision: Revision,
    /// The revision that was asked for, if a state before it was opened; otherwise `revision`.
    pub(crate) asked: Revision,
    /// The ID of the timeline.
    pub timeline: String,
    /// The wall behind which the timeline begins, in seconds since 1970; `None` if there is none.
    pub(crate) wall: Option<i64>,
    /// Warnings for the report.
    pub warnings: Vec<String>,
    /// The name of the full, or the path of the plain snapshot file.
    name: String,
    /// The full; `None` for a plain snapshot file.
    full: Option<Snapshot>,
    slices: Vec<DeltaSlice>,
    /// The deltas, if their transfers began with that of the full.
    pub(crate) begun: Mutex<Option<ReadAhead>>,
}

impl State {
    /// Returns how long the leases live that the full recorded.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`.
    pub fn leases(&self) -> Result<HashMap<i64, Duration>> {
        lease::times_to_live(&self.db, |_| true)
    }

    /// Selects the full and the deltas of the requested state, and opens the full.
    ///
    /// # Errors
    /// `NoSnapshots`, `NoSuchTimeline`, `OutOfRange`, `RevisionGap`, `InterleavedTimelines`; errors of a
    /// damaged full; errors of the store; `Io`, `NoSpace`, `Terminated`. `OutOfRange` also if a requested time
    /// is after the newest snapshot, unless [`StateRequest::or_newest`].
    pub fn open(ctx: &Context, scan: &Scan, request: &StateRequest) -> Result<State> {
        Opening::new(ctx, scan).open(request)
    }

    /// Opens as [`open`](Self::open) does, for a caller that will read the deltas: their transfers begin with
    /// that of the full.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_to_fold(ctx: &Context, scan: &Scan, request: &StateRequest) -> Result<State> {
        let mut opening = Opening::new(ctx, scan);
        opening.begins_deltas = true;
        opening.open(request)
    }

    /// Opens as [`open`](Self::open) does, with the newest full that holds the whole history above `history`.
    ///
    /// # Errors
    /// As [`open`](Self::open); `OutOfRange` also if every full was compacted past `history`.
    pub fn open_with_history(
        ctx: &Context,
        scan: &Scan,
        request: &StateRequest,
        history: Revision,
    ) -> Result<State> {
        let mut opening = Opening::new(ctx, scan);
        opening.history = history;
        opening.open(request)
    }

    /// Opens a chain that was chosen already. The content of its full must be known, since it may change the
    /// choice.
    ///
    /// # Errors
    /// Errors of a damaged full; errors of the store; `Io`, `NoSpace`, `Terminated`.
    pub(crate) fn of_chain(
        ctx: &Context,
        scan: &Scan,
        timeline: &Timeline,
        chain: &Chain,
    ) -> Result<State> {
        let opened = ctx.full(&scan.catalog.snapshots[chain.base])?;
        Ok(Self::from_parts(scan, timeline, chain, opened))
    }

    fn from_parts(scan: &Scan, timeline: &Timeline, chain: &Chain, opened: OpenFull) -> State {
        let full = &scan.catalog.snapshots[chain.base];
        let wall = timeline.wall.as_ref().map(|wall| wall.second);
        let timeline = timeline.id.clone();
        let name = full.name.to_string();
        State {
            wall,
            full: Some(full.clone()),
            slices: select::delta_slices(&scan.catalog, chain, &opened.1),
            ..Self::of_full(opened, chain.target, timeline, name)
        }
    }

    /// A state without deltas.
    fn of_full((db, base): OpenFull, revision: Revision, timeline: String, name: String) -> State {
        State {
            db,
            base,
            revision,
            asked: revision,
            timeline,
            wall: None,
            warnings: Vec::new(),
            name,
            full: None,
            slices: Vec::new(),
            begun: Mutex::default(),
        }
    }

    /// The state of a plain snapshot file at its newest revision, or at another one that it still holds.
    ///
    /// # Errors
    /// `Usage` if the request has a timeline, which a plain snapshot does not record, or a time, unless the file was chosen
    /// by it; `OutOfRange`.
    pub fn of_file(file: &OpenFile, request: &StateRequest) -> Result<State> {
        if request.timeline.is_some() {
            return Err(Reason::Usage.error(format!(
                "a plain snapshot file has no timelines: leave out {TIMELINE}"
            )));
        }
        let name = file.name.clone();
        let base = file.snapshot.base;
        let target = match request.at {
            At::Newest => base.revision,
            At::Revision(r) if r >= base.first_revision() && r <= base.revision => r,
            At::Revision(r) => {
                return Err(Reason::OutOfRange.error(format!(
                    "{name} does not cover revision {r}: choose a {REVISION} from {}",
                    chain::show_ranges(&[(base.first_revision(), base.revision)])
                )));
            }
            At::Time(time) if file.until == Some(time) => base.revision,
            At::Time(_) => {
                return Err(Reason::Usage.error(
                    format!("a plain snapshot file has no times: use {REVISION}, a pattern with * that names the files of other times, or {STORE} with deltas"),
                ));
            }
        };
        let opened = (file.snapshot.db.clone(), base);
        Ok(State {
            warnings: file.warnings.clone(),
            ..Self::of_full(opened, target, timeline::MAIN.to_owned(), name)
        })
    }

    /// Returns the name of the full, for messages.
    pub fn base_name(&self) -> String {
        self.name.clone()
    }

    /// Returns the ID of the timeline; `None` for a plain snapshot file.
    pub fn timeline_id(&self) -> Option<&str> {
        self.base_snapshot().map(|_| self.timeline.as_str())
    }

    /// Returns the full; `None` for a plain snapshot file.
    pub fn base_snapshot(&self) -> Option<&Snapshot> {
        self.full.as_ref()
    }

    /// Returns the deltas in order.
    pub fn deltas(&self) -> impl DoubleEndedIterator<Item = &Snapshot> + ExactSizeIterator {
        self.slices.iter().map(|s| &s.snapshot)
    }

    /// Returns the deltas in order, each with the revisions that are used.
    pub(crate) fn delta_slices(&self) -> &[DeltaSlice] {
        &self.slices
    }

    /// Returns all snapshots of the source: the deltas, then the full.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &Snapshot> {
        self.deltas().chain(self.base_snapshot())
    }

    /// Returns the name of the newest snapshot of the source.
    pub fn newest_name(&self) -> Option<&SnapshotName> {
        let newest = self.deltas().next_back();
        newest.or(self.base_snapshot()).map(|s| &s.name)
    }

    /// Returns a function that puts the name of the full before the message of an error.
    pub fn at_base<'a>(&'a self, ctx: &'a Context) -> impl Fn(Error) -> Error + 'a {
        |e| match &self.full {
            Some(full) => ctx.at(full)(e),
            None if e.reason().is_bad_data() => e.at(&self.name),
            None => e,
        }
    }

    /// Returns whether the full alone is the requested state.
    pub fn is_folded(&self) -> bool {
        self.slices.is_empty() && self.base.revision == self.revision
    }

    /// Returns the most bytes that a fold needs in the temporary directory beside the full.
    pub fn temp_bytes(&self) -> u64 {
        let base = self.db.meta().high_water.0 * self.db.page_size() as u64;
        free_space::estimate(base, self.deltas())
    }
}

/// Returns whether an error says that no snapshots lead to a revision.
fn leads_nowhere(e: &Error) -> bool {
    matches!(
        e.reason(),
        Reason::OutOfRange | Reason::RevisionGap | Reason::NoSnapshots
    )
}

/// Opens a state of a store.
struct Opening<'a> {
    ctx: &'a Context,
    scan: &'a Scan,
    /// The full must hold the whole history above this revision.
    history: Revision,
    /// Whether the transfers of deltas begin with that of the full.
    begins_deltas: bool,
}

impl<'a> Opening<'a> {
    fn new(ctx: &'a Context, scan: &'a Scan) -> Self {
        Opening {
            ctx,
            scan,
            history: Revision(i64::MAX),
            begins_deltas: false,
        }
    }

    fn open(self, request: &StateRequest) -> Result<State> {
        self.try_open(request)
            .map_err(|e| self.scan.explain_untrusted(self.ctx, e))
    }

    fn try_open(&self, request: &StateRequest) -> Result<State> {
        let (ctx, scan) = (self.ctx, self.scan);
        let without_full = scan.timelines.without_full(&scan.catalog);
        if let (Some(id), Some(wall)) = (&request.timeline, without_full.first()) {
            let across = scan.across_walls_without_full(ctx)?;
            let mut source = Opening {
                scan: &across,
                ..*self
            }
            .open_in_scan(request)?;
            let message = format!(
                "timeline {id} is read across {}, which says that another history begins",
                wall.path
            );
            ctx.marks.warn(&mut source.warnings, message);
            return Ok(source);
        }
        let opened = self.open_in_scan(request);
        let (Err(e), At::Revision(revision)) = (&opened, request.at) else {
            return opened;
        };
        if !leads_nowhere(e) {
            return opened;
        }
        let timeline = timeline_of(ctx, scan, request)?;
        if timeline.wall.is_some() && !scan.knows_paths() {
            // The timeline that it left has the older revisions.
            let whole = scan.with_paths(ctx)?;
            return Opening {
                scan: &whole,
                ..*self
            }
            .try_open(request);
        }
        let others = select::timelines_with(scan, revision, timeline);
        match others.first() {
            None => opened,
            Some(other) => Err(e.reason().error(format!(
                "{e}; another history has this revision: {TIMELINE} {other}"
            ))),
        }
    }

    fn open_in_scan(&self, request: &StateRequest) -> Result<State> {
        let (ctx, scan) = (self.ctx, self.scan);
        let (timeline, mut warnings) = choose_timeline(ctx, scan, request)?;
        let target = match request.at {
            At::Newest => None,
            At::Revision(r) => Some(r),
            At::Time(time) => {
                // What no key opens may be what covers the time.
                let explain =
                    |e: Error| match scan.sealed_in(timeline).filter(|_| leads_nowhere(&e)) {
                        Some(sealed) => sealed.again(),
                        None => e,
                    };
                if !request.or_newest {
                    refuse_uncovered(ctx, scan, timeline, time).map_err(explain)?;
                }
                let found = revision_at(ctx, scan, timeline, time, request.or_before);
                let (revision, more) = found.map_err(explain)?;
                warnings.extend(more);
                Some(revision)
            }
        };
        let (chain, opened, begun) =
            self.open_known_chain(timeline, target, request.or_before, &mut warnings)?;
        tracing::info!(
            base = %scan.catalog.snapshots[chain.base].name,
            base_revision = opened.1.revision.0,
            deltas = chain.deltas.len(),
            revision = chain.target.0,
            timeline = timeline.id,
            "chose what to fold"
        );
        if target.is_none()
            && let Some(message) = select::newer_excluded_warning(&scan.catalog, &chain)
        {
            ctx.marks.warn(&mut warnings, message);
        }
        Ok(State {
            warnings,
            asked: target.unwrap_or(chain.target),
            begun: Mutex::new(begun),
            ..State::from_parts(scan, timeline, &chain, opened)
        })
    }

    /// Chooses and opens the chain. If snapshots of the timeline are damaged, another chain must lead to the same revision. With
    /// `or_before`, the newest known state before a damaged or missing snapshot is opened if nothing leads around it. So is one
    /// before damage if a reader asks for the newest.
    fn open_known_chain(
        &self,
        timeline: &Timeline,
        target: Option<Revision>,
        or_before: bool,
        warnings: &mut Vec<String>,
    ) -> Result<(Chain, OpenFull, Option<ReadAhead>)> {
        let (ctx, scan) = (self.ctx, self.scan);
        let damage = scan.damage_in(timeline);
        let stops = damage.is_some() && target.is_none() && ctx.marks.stops_before();
        let whole = scan.timelines.by_id(&timeline.id)?;
        let newest = whole
            .last(&scan.catalog, &scan.contents)
            .unwrap_or_default();
        let goal = target.unwrap_or(newest);
        let (lower, gap) = match self.open_chain(timeline, target) {
            Ok(opened) if damage.is_none() || opened.0.target >= goal => return Ok(opened),
            Ok(opened) => (Some(opened), None),
            Err(e) if damage.is_some() && leads_nowhere(&e) => (None, None),
            Err(e) if or_before && e.reason() == Reason::RevisionGap => (None, Some(e)),
            Err(e) => return Err(e),
        };
        let known = scan.contents.known_bases();
        let ranges = chain::restorable(&scan.catalog, timeline, &known).into_iter();
        let before = ranges.filter(|r| r.0 <= goal).map(|r| r.1.min(goal)).max();
        if let (Some(before), true) = (before, or_before || stops) {
            let why = match &gap {
                Some(gap) => gap.to_string(),
                None => "nothing leads around the damage".to_owned(),
            };
            let message =
                format!("the backup is read up to revision {before} instead of {goal}: {why}");
            ctx.marks.warn(warnings, message);
            return match lower.filter(|(chain, ..)| chain.target == before) {
                Some(opened) => Ok(opened),
                None => self.open_chain(timeline, Some(before)),
            };
        }
        Err(match (damage, gap) {
            (None, Some(gap)) => gap,
            (None, None) => Error::internal("a chain without a reason"),
            (Some(damage), _) => {
                let nearest = before.map(|before| format!(": the newest revision before it that can be restored is {before}, give {REVISION} {before}"));
                damage.reworded(format!(
                    "{damage}; no other snapshots lead to revision {goal}{}",
                    nearest.unwrap_or_default()
                ))
            }
        })
    }

    /// Chooses the chain, and opens fulls on whose content the choice depends.
    fn open_chain(
        &self,
        timeline: &Timeline,
        target: Option<Revision>,
    ) -> Result<(Chain, OpenFull, Option<ReadAhead>)> {
        let scan = self.scan;
        let mut known: KnownBases = scan.contents.known_bases();
        let (mut open, mut begun) = (None, None);
        loop {
            let choice = select::choose_chain(scan, timeline, target, self.history, &known)?;
            let full = select::full_of(&choice);
            let opened = match open.take() {
                Some((i, opened)) if i == full => opened,
                _ => {
                    if let Choice::Chosen(chain) = &choice {
                        begun = self.begin_deltas(chain);
                    }
                    self.ctx.full(&scan.catalog.snapshots[full])?
                }
            };
            match choice {
                Choice::Chosen(chain) if known.contains_key(&full) => {
                    // The content of the full may have changed the deltas.
                    let begun = begun.filter(|(deltas, _)| *deltas == chain.deltas);
                    return Ok((chain, opened, begun.map(|(_, ahead)| ahead)));
                }
                // The content of the full may go beyond its name and change the choice.
                _ => {
                    known.insert(full, opened.1);
                    open = Some((full, opened));
                }
            }
        }
    }

    /// Begins to read the deltas, unless the full is large: a large full uses all connections.
    fn begin_deltas(&self, chain: &Chain) -> Option<(Vec<Link>, ReadAhead)> {
        let snapshot = |i: usize| &self.scan.catalog.snapshots[i];
        let begins = self.begins_deltas && !is_large(snapshot(chain.base).bytes);
        let deltas = chain.deltas.iter().map(|link| snapshot(link.snapshot));
        let objects = deltas.map(ListedSnapshot::from);
        begins.then(|| {
            let ahead = ReadAhead::begun(&self.ctx.store, objects);
            (chain.deltas.clone(), ahead)
        })
    }
}
