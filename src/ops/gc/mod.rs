//! The operation `gc`: removes the snapshots that the retention policy does not keep, and cleans up
//! what uploads and removals leave.
//!
//! Steps: list the backup, decide (`backup::retention`), and before each batch look whether what the decision rests on
//! is unchanged; then delete, of each chain the newest deltas first and the full last. `pin` is here too, since it uses
//! the same lock.

mod apply;
mod deletion;
mod options;
pub mod pin;
mod plan;
mod read_fulls;
mod side_objects;

use crate::backup;
use crate::backup::catalog::{Catalog, SNAPSHOTS};
use crate::backup::retention::{self, RetentionReason};
use crate::base::opt::{ALLOW_SHRINK, RESTORABLE_WINDOW, SINGLE_WRITER, TIMEOUT};
use crate::base::parallel::each;
use crate::base::{duration, plural};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::{self, Client};
use crate::mvcc::Revision;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::contents::Contents;
use crate::prefix::restorable::{Bases, Restorable};
use crate::prefix::scan::{TAGS_UNREADABLE, no_snapshots_error};
use crate::store::Store;
use crate::store::lock::{self, Lock, LockGuard, Wait};
use apply::Applied;
use chrono::{DateTime, TimeDelta, Utc};
pub use options::{DEFAULT_LIMIT, PolicyName, Rules};
use plan::Plan;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::HashSet;
use std::time::Duration;

/// How long the lock of a dead run keeps others out.
const LOCK_DURATION: Duration = Duration::from_secs(15);
/// The name of the lock that `gc` and `pin` share.
const LOCK: &str = "gc";
/// A clock difference that is worth a warning.
const SKEW: TimeDelta = TimeDelta::minutes(5);
/// Concurrent requests, of those that are made one per object.
const AT_ONCE: usize = 16;
/// The largest note that is read, in bytes.
const LONGEST_NOTE: u64 = 64 << 10;
/// Damaged fulls that get a warning each.
const MOST_WARNINGS: usize = 10;

/// The options of `gc`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Which snapshots are kept.
    pub retention: retention::Options,
    /// Incomplete uploads, and notes without a snapshot, are deleted if they are older than this.
    pub staging_age: TimeDelta,
    /// Remove objects; otherwise only report what would be removed.
    pub apply: bool,
    /// Delete even if the newest restorable revision becomes older.
    pub allow_shrink: bool,
    /// No further full is read after this time. What rests on the others is removed by a later run.
    pub timeout: Duration,
    /// The Lease that is the lock; `None` for an object in the store.
    pub lock_lease: Option<String>,
    /// Go on without a lock if the store has none: nobody else removes or pins there.
    pub single_writer: bool,
}

/// What `gc` does with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Decision {
    /// It is kept.
    Keep,
    /// It is deleted.
    Delete,
}

impl Decision {
    fn from_keeps(keeps: bool) -> Self {
        if keeps { Self::Keep } else { Self::Delete }
    }
}

/// The result of deleting an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum RemovalStatus {
    /// It is deleted.
    Done,
    /// It is deleted, but the bucket keeps a version of it.
    Hidden,
    /// It is locked, and was not deleted.
    Locked,
    /// Deleting it failed.
    Failed,
    /// A snapshot that must go before it in its chain could not be deleted.
    Waiting,
}

/// The kind of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Kind {
    /// A full snapshot.
    Full,
    /// A delta snapshot.
    Incr,
    /// deltafold's own note about a snapshot.
    Note,
    /// An exclusion mark.
    Mark,
    /// A temporary object in `deltafold-staging/`.
    Staging,
    /// An incomplete multipart upload.
    Upload,
}

impl From<backup::Kind> for Kind {
    fn from(kind: backup::Kind) -> Self {
        match kind {
            backup::Kind::Full => Kind::Full,
            backup::Kind::Incr => Kind::Incr,
        }
    }
}

/// An object of the backup, with the decision and its result.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Object {
    /// The path below the store's prefix; for an incomplete upload, its ID follows.
    pub path: String,
    /// The kind of the object.
    pub kind: Kind,
    /// Size in the store, in bytes.
    pub bytes: u64,
    /// `Keep`: it is kept. `Delete`: it is deleted.
    pub decision: Decision,
    /// The reason for the decision: docs/guides/gc.md lists all.
    #[cfg_attr(test, schemars(extend("enum" = plan::reasons())))]
    pub reason: &'static str,
    /// The reason as human-readable text.
    pub explanation: Cow<'static, str>,
    /// The result of deleting it; null if it is kept, and in a dry run (except for `Locked`). `Hidden`:
    /// deleted, but the bucket keeps a version. `Waiting`: the run ended before, or a snapshot that must go before it
    /// in its chain could not be deleted.
    pub fate: Option<RemovalStatus>,
    /// The time until which it is locked, if `fate` is `Locked`; null for a legal hold, which somebody
    /// has to lift.
    pub locked_until: Option<DateTime<Utc>>,
    /// The error, if `fate` is `Failed`.
    pub error: Option<String>,
}

impl Object {
    /// Returns an object before anything is done to it. `reason` is the name of the reason and a text.
    fn new(
        path: String,
        kind: Kind,
        bytes: u64,
        decision: Decision,
        reason: (&'static str, impl Into<Cow<'static, str>>),
    ) -> Self {
        Object {
            path,
            kind,
            bytes,
            decision,
            reason: reason.0,
            explanation: reason.1.into(),
            fate: None,
            locked_until: None,
            error: None,
        }
    }

    /// Returns whether it was deleted.
    fn is_gone(&self) -> bool {
        matches!(self.fate, Some(RemovalStatus::Done | RemovalStatus::Hidden))
    }

    /// Records the result of deleting it.
    fn record(&mut self, result: RemovalResult) {
        match result {
            Ok((fate, until)) => {
                self.fate = Some(fate);
                self.locked_until = until;
            }
            Err(e) => {
                self.fate = Some(RemovalStatus::Failed);
                self.error = Some(e.to_string());
            }
        }
    }
}

/// The result of deleting an object; for a locked one with the time until which it is
/// locked, if that is known.
type RemovalResult = Result<(RemovalStatus, Option<DateTime<Utc>>)>;

/// A number of objects, and the sum of their sizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Total {
    /// Number of objects.
    pub objects: u64,
    /// Sum of their sizes in the store, in bytes.
    pub bytes: u64,
}

impl Total {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        // Sizes come from the store and may be false.
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// The objects' totals by decision and result.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Totals {
    /// Objects that are kept.
    pub kept: Total,
    /// Objects that are deleted.
    pub deleted: Total,
    /// Objects that could not be deleted: locked, failed, or waiting for such an object.
    pub left: Total,
}

/// A full that is ignored, since its content is not what its name says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DamagedFull {
    /// The path below the store's prefix.
    pub path: String,
    /// A reason from exit-codes.md.
    pub reason: String,
    /// The reason as human-readable text.
    pub message: String,
}

/// The result of `gc`. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CleanedBackup {
    /// Whether this was a dry run, without `--apply`.
    pub dry_run: bool,
    /// The time from which ages are counted: this machine's clock or the store's, whichever is earlier,
    /// if the store's is known.
    pub now: DateTime<Utc>,
    /// Every object of the backup: the snapshots in order of creation, then notes, exclusion marks
    /// and temporary objects.
    pub objects: Vec<Object>,
    /// Totals of the objects; in a dry run, as they would be.
    pub totals: Totals,
    /// Bytes that are freed in the store, or would be.
    pub freed_bytes: u64,
    /// Bytes of deleted objects that the bucket keeps as older versions: these are not freed.
    pub hidden_bytes: u64,
    /// Objects in v2/ and v1/ that are not deltafold's; they are left alone.
    pub foreign_objects: u64,
    /// Revisions that could be restored before, by the names of the snapshots.
    pub restorable_before: Vec<Restorable>,
    /// Revisions that can be restored after the run (in a dry run: could be), by the names of the
    /// snapshots.
    pub restorable_after: Vec<Restorable>,
    /// Fulls that this run read, since a removal rests on them.
    pub fulls_read: usize,
    /// Fulls that are kept and ignored, since this run had no time or space to read them.
    pub fulls_not_read: usize,
    /// Fulls that are kept and ignored, since their content is not what their names say. Only fulls on
    /// which a decision depends, or whose timeline is in doubt, are checked.
    pub damaged_fulls: Vec<DamagedFull>,
}

/// Removes what the retention policy does not keep, from a prefix. In a dry run only reports it.
///
/// # Errors
/// Fails without having changed anything: with `NoSnapshots` if the backup is empty, `LockHeld`, `Io`,
/// `NoSpace`, or an error of the store. Later failures are in the report; there, `WouldShrink` means
/// that the newest restorable revision would become older, and nothing was removed.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<CleanedBackup>> {
    let mut clock = ReportBuilder::start();
    let warnings = &mut clock.warnings;
    // A prefix without chains gets no lock.
    if options.apply && has_no_chains(&ctx.store)? {
        return Err(no_snapshots_error(ctx, &Catalog::default(), None));
    }
    let lock = if options.apply {
        take_gc_lock(ctx, options, warnings)?
    } else {
        None
    };
    let mut now = Utc::now();
    if options.apply {
        let ahead = ctx.store.clock_ahead()?;
        // The earlier of the two clocks counts.
        let earlier = now.checked_add_signed(ahead.min(TimeDelta::zero()));
        now = earlier.unwrap_or(now);
        warnings.extend(skew_warning(ahead));
    }
    let plan = plan::plan(ctx, options, now)?;
    add_plan_warnings(ctx, options, &plan, now, warnings);
    warnings.extend(plan.warnings.iter().cloned());
    warnings.extend(damage_warnings(&plan.damaged, plan.not_read));
    let before = restorable_ranges(&plan, &|_| true);
    let mut applied = apply::decided_objects(ctx, options, &plan, now);
    let refusal = || would_shrink(&plan);
    let mut error = (!options.allow_shrink).then(refusal).flatten();
    match options.apply {
        true if error.is_some() => apply::mark_waiting(&mut applied),
        true => {
            error = apply::apply(ctx, now, &plan, lock.as_ref(), &mut applied).err();
        }
        false => apply::mark_locked(ctx, now, &mut applied)?,
    }
    release(lock);
    warnings.append(&mut applied.warnings);
    let outcome = outcome(&plan, options, now, applied, before);
    // An error that ended the run comes before those of single objects.
    let error = error.or_else(|| partly_done(&outcome));
    let error = error.or_else(|| out_of_time(&outcome, options));
    let mut objects = outcome.objects.iter();
    let did_something = objects.any(|o| o.decision != Decision::Keep);
    Ok(clock.ended(outcome, did_something, error))
}

/// Adds warnings about clocks, doubts and tags.
fn add_plan_warnings(
    ctx: &Context,
    options: &Options,
    plan: &Plan,
    now: DateTime<Utc>,
    warnings: &mut Vec<String>,
) {
    // A dry run may not write to the store, so it has only the objects' times to compare its clock with.
    if !options.apply
        && let Some(newest) = plan.newest_modified
        && newest - now > SKEW
    {
        warnings.extend(skew_warning(newest - now));
    }
    warnings.extend(plan.doubts.iter().cloned());
    if ctx.store.tags_refused() {
        warnings.push(TAGS_UNREADABLE.to_owned());
    }
    if plan.why.contains(&RetentionReason::NoRecentFull) {
        warnings.push(format!("the newest full that can be used is older than {RESTORABLE_WINDOW}: nothing is removed until there is a newer one"));
    }
    let is_future = |&i: &usize| plan.catalog.snapshots[i].name.created > now.timestamp();
    match plan.catalog.usable().filter(is_future).count() {
        0 => {}
        n => warnings.push(format!(
            "{} {} a time in the future in the name: check the clock of this machine and of the one that takes snapshots",
            plural::count(n, "snapshot"),
            plural::either(n, "has", "have")
        )),
    }
}

/// Returns the error of a run that could not remove some objects.
fn partly_done(o: &CleanedBackup) -> Option<Error> {
    let count = |fate| o.objects.iter().filter(|x| x.fate == Some(fate)).count();
    let (failed, waiting) = (count(RemovalStatus::Failed), count(RemovalStatus::Waiting));
    let failed_one = o
        .objects
        .iter()
        .find(|x| x.fate == Some(RemovalStatus::Failed))?;
    Some(Reason::PartlyDone.error(format!(
        "{} could not be removed and {waiting} wait for them, all others are done: {}; run again",
        plural::count(failed, "object"),
        failed_one.error.as_deref().unwrap_or("no reason is known")
    )))
}

/// Returns the error of a run that removed no snapshot for lack of time to read fulls.
fn out_of_time(o: &CleanedBackup, options: &Options) -> Option<Error> {
    let is_removed = |x: &Object| {
        let is_snapshot = matches!(x.kind, Kind::Full | Kind::Incr);
        is_snapshot && x.is_gone()
    };
    if !options.apply || o.fulls_not_read == 0 || o.objects.iter().any(is_removed) {
        return None;
    }
    Some(Reason::PartlyDone.error(format!(
        "no snapshot was removed: {} on which removals rest could not be read in the {} of {TIMEOUT}; give more time",
        plural::count(o.fulls_not_read, "full"),
        duration::whole(options.timeout)
    )))
}

/// Returns what can be restored with the snapshots for which `has` is true. No full is read for it.
fn restorable_ranges(plan: &Plan, has: &dyn Fn(usize) -> bool) -> Vec<Restorable> {
    let mut all = Vec::new();
    for timeline in &plan.timelines.all {
        let left = timeline.part(has);
        all.extend(Bases::default().restorable(&plan.catalog, &Contents::default(), &left));
    }
    all
}

/// Returns the outcome of a run whose objects are all decided, and in which `before` was restorable.
fn outcome(
    plan: &Plan,
    options: &Options,
    now: DateTime<Utc>,
    applied: Applied,
    before: Vec<Restorable>,
) -> CleanedBackup {
    let gone: HashSet<usize> = (0..plan.catalog.snapshots.len())
        .filter(|&i| {
            if options.apply {
                applied.objects[i].is_gone()
            } else {
                !plan.why[i].keeps() && applied.objects[i].fate != Some(RemovalStatus::Locked)
            }
        })
        .collect();
    CleanedBackup {
        foreign_objects: plan.catalog.foreign.len() as u64,
        restorable_before: before,
        restorable_after: restorable_ranges(plan, &|i| !gone.contains(&i)),
        fulls_read: plan.fulls_read,
        fulls_not_read: plan.not_read,
        damaged_fulls: plan.damaged.clone(),
        ..CleanedBackup::of(applied.objects, options, now)
    }
}

impl CleanedBackup {
    /// Returns the outcome of a run whose objects are all decided. Nothing is known of what can be restored.
    fn of(objects: Vec<Object>, options: &Options, now: DateTime<Utc>) -> Self {
        let mut totals = Totals::default();
        let (mut freed, mut hidden) = (0u64, 0u64);
        for o in &objects {
            let total = match (o.decision, o.fate) {
                (Decision::Keep, _) => &mut totals.kept,
                (
                    _,
                    Some(RemovalStatus::Failed | RemovalStatus::Waiting | RemovalStatus::Locked),
                ) => &mut totals.left,
                (Decision::Delete, fate) => {
                    match fate {
                        Some(RemovalStatus::Hidden) => hidden = hidden.saturating_add(o.bytes),
                        _ => freed = freed.saturating_add(o.bytes),
                    }
                    &mut totals.deleted
                }
            };
            total.add(o.bytes);
        }
        CleanedBackup {
            dry_run: !options.apply,
            now,
            objects,
            totals,
            freed_bytes: freed,
            hidden_bytes: hidden,
            foreign_objects: 0,
            restorable_before: Vec::new(),
            restorable_after: Vec::new(),
            fulls_read: 0,
            fulls_not_read: 0,
            damaged_fulls: Vec::new(),
        }
    }
}

/// Returns an error if the plan makes the newest restorable revision of the newest timeline older.
fn would_shrink(plan: &Plan) -> Option<Error> {
    let stays = |i: usize| plan.why[i].keeps();
    let shrink = retention::newest_lost(&plan.catalog, &plan.timelines, &stays)?;
    let describe = |(revision, created): (Revision, DateTime<Utc>)| {
        format!("{revision} ({})", created.format("%Y-%m-%dT%H:%M:%SZ"))
    };
    let after = match shrink.after {
        Some(after) => format!("the newest would be {}", describe(after)),
        None => "nothing could be restored any more".to_owned(),
    };
    Some(Reason::WouldShrink.error(format!(
        "on timeline {} revisions up to {} can be restored, and {after}: nothing was removed. Find out which snapshots would go and why, or give {ALLOW_SHRINK}",
        shrink.timeline,
        describe(shrink.before)
    )))
}

/// Returns the warnings about fulls that are ignored.
fn damage_warnings(damaged: &[DamagedFull], not_read: usize) -> Vec<String> {
    let mut warnings = Vec::new();
    for damaged in damaged.iter().take(MOST_WARNINGS) {
        warnings.push(format!("a full is kept but ignored: {}", damaged.message));
    }
    if let Some(more @ 1..) = damaged.len().checked_sub(MOST_WARNINGS) {
        warnings.push(format!(
            "{} kept but ignored: damaged_fulls in the JSON result lists all",
            plural::count(more, "more full")
        ));
    }
    if not_read > 0 {
        warnings.push(format!(
            "{} {} not read, for lack of time or space: kept but ignored until a later run reads them",
            plural::count(not_read, "full"),
            plural::either(not_read, "was", "were")
        ));
    }
    warnings
}

/// Whether the folders of chains are empty.
fn has_no_chains(store: &Store) -> Result<bool> {
    if store.requests().is_none() {
        return Ok(store.list(&SNAPSHOTS)?.is_empty());
    }
    for folder in SNAPSHOTS {
        if !store.first_page(folder)?.0.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Takes the lock of a run that removes: without one it must be declared that nobody else removes or pins.
fn take_gc_lock(
    ctx: &Context,
    options: &Options,
    warnings: &mut Vec<String>,
) -> Result<Option<LockGuard>> {
    let store = &ctx.store;
    let lock = match &options.lock_lease {
        None => lock_of(store)?,
        Some(lease) => {
            let client = Client::connect(None, store.handle().clone(), store.cancel().clone())?;
            kubernetes::lease::lock(&client, lease, &lock::identity(), LOCK_DURATION)
        }
    };
    match take_lock(store, lock)? {
        Ok(guard) => Ok(Some(guard)),
        Err(why) if options.single_writer => {
            warnings.push(format!("no lock keeps another gc or pin away: {why}"));
            Ok(None)
        }
        Err(why) => Err(why.reworded(format!(
            "{why}; or declare with {SINGLE_WRITER} that no other gc or pin runs there"
        ))),
    }
}

/// Returns the lock in a store that `gc` and `pin` share.
fn lock_of(store: &Store) -> Result<Lock> {
    Lock::new(store, LOCK, &lock::identity(), LOCK_DURATION)
}

/// Takes the lock that keeps other runs away. The inner error says why the store can keep none.
fn take_lock(store: &Store, mut lock: Lock) -> Result<Result<LockGuard, Error>> {
    match lock.acquire(Wait::UntilSeenDead) {
        Ok(guard) => Ok(Ok(guard)),
        // Its objects cannot be overwritten, or have no conditions.
        Err(e)
            if e.reason() == Reason::ObjectLocked
                || (e.reason() == Reason::Configuration && !store.may_have_locks()) =>
        {
            Ok(Err(e))
        }
        Err(e) => Err(e),
    }
}

fn release(lock: Option<LockGuard>) {
    if let Some(Err(e)) = lock.map(LockGuard::release) {
        tracing::warn!("the lock could not be released, so other runs wait until it expires: {e}");
    }
}

fn skew_warning(ahead: TimeDelta) -> Option<String> {
    if ahead.abs() <= SKEW {
        return None;
    }
    let minutes = ahead.num_minutes().abs();
    let direction = if ahead > TimeDelta::zero() {
        "ahead of"
    } else {
        "behind"
    };
    Some(format!(
        "the store's clock is {minutes} min {direction} this one: ages are counted from the earlier of the two"
    ))
}

/// Calls `f` with each item, several at once. Returns the results in order.
fn in_parallel<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    each(AT_ONCE, items, f)
}

/// Returns a note as JSON.
fn as_json(note: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(note)
        .map_err(|e| Error::internal(format!("a note cannot be written as JSON: {e}")))
}
