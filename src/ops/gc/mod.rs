//! Collecting garbage: what a policy does not keep is removed, and what removal leaves is cleaned up.
//!
//! look → decide (`backup::retention`) → look again before each batch → remove, the newest delta of each
//! chain first and its full last. `undelete` and `pin` stand beside it: they answer to the same notes.

mod apply;
mod options;
pub mod pin;
mod plan;
pub mod undelete;
mod verified_fulls;
mod versions;

use crate::backup::catalog::REMOVED;
use crate::backup::retention::{self, RetentionReason, restorable};
use crate::backup::{self, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::parallel::each;
use crate::ops::report::{FailureFields, Report, ReportBuilder};
use crate::ops::restorable::Restorable;
use crate::ops::scan::TAGS_UNREADABLE;
use crate::store::Store;
use crate::store::lock::{self, Lock, LockGuard, Wait};
use apply::Applied;
use chrono::{DateTime, TimeDelta, Utc};
pub use options::{PolicyName, Rules};
use plan::{Eyes, Look};
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::HashSet;
use std::time::Duration;

/// A run that is dead for so long blocks no other.
const LOCK_DURATION: Duration = Duration::from_secs(15);
/// The lock of all that removes and brings back.
const LOCK: &str = "gc";
/// What `gc` warns of without a lock: nothing depends on it.
const SECOND_RUN: &str = "nothing keeps a second run away, which is safe and of no use";
/// Clocks that differ by more are worth a warning.
const SKEW: TimeDelta = TimeDelta::minutes(5);
/// Requests under way at once, of those that are made one by one.
const AT_ONCE: usize = 16;
/// A note is short.
const LONGEST_NOTE: u64 = 64 << 10;
/// Damaged fulls that are warned of one by one.
const MOST_WARNINGS: usize = 10;

/// What to do.
#[derive(Debug, Clone)]
pub struct Options {
    /// What to keep.
    pub retention: retention::Options,
    /// What nobody completed, and notes on nothing, go when they are so old.
    pub staging_age: TimeDelta,
    /// Remove; otherwise only say what would be.
    pub apply: bool,
    /// Remove even if the newest revision that can be restored falls.
    pub allow_shrink: bool,
    /// A look at the store that is older is taken anew before anything more is removed. Zero: before
    /// every batch.
    pub look_again: Duration,
}

impl Options {
    /// The usual [`look_again`](Self::look_again).
    pub const LOOK_AGAIN: Duration = Duration::from_secs(10);
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// Something was done (or would be, in a dry run).
    Succeeded,
    /// Nothing had to be.
    NothingToDo,
    /// Not all could be done: the rest tells what was.
    Failed,
}

/// What is decided on an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, JsonSchema, Serialize)]
pub enum Decision {
    /// It stays.
    Keep,
    /// It is excluded, and can be brought back until it is purged.
    Remove,
    /// It is deleted.
    Delete,
}

/// What became of the decision to remove an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Fate {
    /// It was done.
    Done,
    /// It was deleted, and the bucket keeps a version of it.
    Hidden,
    /// It is locked.
    Locked,
    /// It could not be done.
    Failed,
    /// What comes before it in its chain could not be removed.
    Waiting,
    /// Somebody changed what was decided on, and a new look keeps it.
    Changed,
}

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Kind {
    /// A full.
    Full,
    /// A delta.
    Incr,
    /// A note of deltafold on a snapshot.
    Note,
    /// An object that excludes a snapshot.
    Mark,
    /// What an upload left.
    Staging,
    /// A multipart upload that was not completed.
    Upload,
    /// A version behind a deletion, or the mark of it.
    Version,
}

impl From<backup::Kind> for Kind {
    fn from(kind: backup::Kind) -> Self {
        match kind {
            backup::Kind::Full => Kind::Full,
            backup::Kind::Incr => Kind::Incr,
        }
    }
}

/// What is decided on an object, and what became of it.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Object {
    /// Below the store's prefix; of an unfinished upload and a version with its ID behind it.
    pub path: String,
    /// What it is.
    pub kind: Kind,
    /// Size in the store.
    pub bytes: u64,
    /// `Keep`: it stays. `Remove`: it is excluded, and can be brought back by `deltafold undelete`. `Delete`:
    /// it is deleted.
    pub decision: Decision,
    /// Why it is decided so: the reasons are in README.md.
    #[schemars(extend("enum" = plan::reasons()))]
    pub reason: &'static str,
    /// RetentionReason, in words.
    pub explanation: Cow<'static, str>,
    /// What became of a decision to remove or delete; null if it stays, and in a dry run (but for `Locked`).
    /// `Hidden`: deleted, but the bucket keeps a version. `Waiting`: what comes before it in its chain could
    /// not be removed. `Changed`: a new look keeps it.
    pub fate: Option<Fate>,
    /// Of what is locked: until when; null if somebody has to lift it.
    pub locked_until: Option<DateTime<Utc>>,
    /// Of what failed: why.
    pub error: Option<String>,
}

impl Object {
    /// What is decided on it, before anything is done; `told` is the reason, and the same in words.
    fn new(
        path: String,
        kind: Kind,
        bytes: u64,
        decision: Decision,
        told: (&'static str, impl Into<Cow<'static, str>>),
    ) -> Self {
        Object {
            path,
            kind,
            bytes,
            decision,
            reason: told.0,
            explanation: told.1.into(),
            fate: None,
            locked_until: None,
            error: None,
        }
    }

    /// Notes what became of it.
    fn ended(&mut self, fated: Fated) {
        match fated {
            Ok((fate, until)) => {
                self.fate = Some(fate);
                self.locked_until = until;
            }
            Err(e) => {
                self.fate = Some(Fate::Failed);
                self.error = Some(e.to_string());
            }
        }
    }
}

/// What became of an object; until when it is locked, if that is known.
type Fated = Result<(Fate, Option<DateTime<Utc>>)>;

/// A sum over objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Total {
    /// How many.
    pub objects: u64,
    /// Their sizes in the store.
    pub bytes: u64,
}

impl Total {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        // A store may say any size.
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// Sums over all objects, by what was decided.
#[derive(Debug, Clone, Copy, Default, JsonSchema, Serialize)]
pub struct Totals {
    /// Those that stay.
    pub kept: Total,
    /// Those that are excluded, and can be brought back.
    pub removed: Total,
    /// Those that are deleted.
    pub deleted: Total,
    /// Those that could not be removed: locked, failed, or waiting for such a one.
    pub left: Total,
}

/// A full that counts for nothing, since what it holds is not what its name says.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct DamagedFull {
    /// Below the store's prefix.
    pub path: String,
    /// One of exit-codes.md.
    pub reason: String,
    /// The same in words.
    pub message: String,
}

/// What was done. The fields are a contract: `docs/gc-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// RetentionReason, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// Whether only a plan was made: without `--apply`.
    pub dry_run: bool,
    /// The time that ages were counted from: the earlier of this clock and the store's, so far as that is
    /// known.
    pub now: DateTime<Utc>,
    /// Every object that is ours: snapshots in order of creation, then what is beside them.
    pub objects: Vec<Object>,
    /// Sums over the objects; in a dry run, of what would be.
    pub totals: Totals,
    /// Bytes that the store has back, or would have.
    pub freed_bytes: u64,
    /// Bytes of what is deleted and that the bucket keeps as versions: not freed.
    pub hidden_bytes: u64,
    /// Objects in v2/ and v1/ that are none of ours, and left alone.
    pub foreign_objects: u64,
    /// What could be restored before, by names.
    pub restorable_before: Vec<Restorable>,
    /// What can be restored now, or could be, by names.
    pub restorable_after: Vec<Restorable>,
    /// Fulls that this run has read. Each is read once, when a decision first rests on it.
    pub fulls_read: usize,
    /// Fulls that stay and count for nothing until a later run reads them.
    pub fulls_not_read: usize,
    /// Fulls that stay and count for nothing: what they hold is not what their names say. Only those on which
    /// a decision rested, or that are in doubt, are known.
    pub damaged_fulls: Vec<DamagedFull>,
}

/// Collects garbage.
///
/// # Errors
/// Where nothing was done: `NoSnapshots` where there is none; the store's; `LockHeld`; `Io`, `NoSpace`. In the
/// report also `WouldShrink`: the plan would make the newest restorable revision fall, and nothing was removed.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Outcome>> {
    let mut clock = ReportBuilder::start();
    let warnings = &mut clock.warnings;
    let mut eyes = Eyes::new(ctx, options);
    let held = match options.apply {
        true => take_lock(&ctx.store, SECOND_RUN, warnings)?,
        false => None,
    };
    if options.apply {
        let ahead = ctx.store.clock_ahead()?;
        eyes.set_skew(ahead);
        warnings.extend(skew_warning(ahead));
    }
    let now = eyes.now();
    let look = eyes.look()?;
    if !options.apply
        && let Some(newest) = look.newest_modified
        && newest - now > SKEW
    {
        warnings.extend(skew_warning(newest - now));
    }
    warnings.extend(look.doubts.iter().cloned());
    if ctx.store.hides_tags() {
        warnings.push(TAGS_UNREADABLE.to_owned());
    }
    if look.tags_unread > 0 {
        warnings.push(format!(
            "the tags of {} snapshots that stay were not read, since each is a request: one may be excluded; --apply reads them before it removes anything",
            look.tags_unread
        ));
    }
    let future = look.catalog.usable().filter(|&i| {
        let created = look.catalog.snapshots[i].name.created;
        created > now.timestamp()
    });
    match future.count() {
        0 => {}
        n => warnings.push(format!(
            "{n} snapshots are of a time that is not yet, by their names: a clock is wrong, here or where they were taken"
        )),
    }
    if options.apply {
        eyes.verified.save(look.fulls());
    }
    warnings.append(&mut eyes.verified.warnings);
    warnings.extend(damage_warnings(&look));
    let before = ranges(&look, &|_| true);
    let mut applied = apply::begin(ctx, options, &look, now);
    let shrinks = || would_shrink(&look).or_else(|| would_purge_the_newest(&look));
    let mut error = (!options.allow_shrink).then(shrinks).flatten();
    match options.apply {
        true if error.is_some() => apply::refuse(&mut applied),
        true => {
            if let Err(e) =
                apply::apply(ctx, options, &mut eyes, &look, held.as_ref(), &mut applied)
            {
                error = Some(e);
            }
        }
        false => apply::tell_locked(ctx, options, now, &mut applied)?,
    }
    release(held);
    tracing::debug!(tags_asked = eyes.tags_asked, "asked for tags");
    warnings.append(&mut applied.warnings);
    let mut outcome = told(&look, options, now, applied, before);
    outcome.fulls_read = eyes.verified.read;
    // A signal, or a store that is away, is what it is; else it is about single objects.
    let error = error.or_else(|| partly_done(&outcome));
    if error.is_some() {
        outcome.status = Status::Failed;
    }
    outcome.error = FailureFields::from(&error);
    Ok(clock.report_with(outcome, error))
}

fn partly_done(o: &Outcome) -> Option<Error> {
    let count = |fate| o.objects.iter().filter(|x| x.fate == Some(fate)).count();
    let (failed, waiting) = (count(Fate::Failed), count(Fate::Waiting));
    let failed_one = o.objects.iter().find(|x| x.fate == Some(Fate::Failed))?;
    Some(Reason::PartlyDone.error(format!(
        "{failed} objects could not be removed and {waiting} wait for them, the rest is done: {}; run again",
        failed_one.error.as_deref().unwrap_or("no reason is known")
    )))
}

/// What can be restored of each timeline with the snapshots that `has` says are there.
fn ranges(look: &Look, has: &dyn Fn(usize) -> bool) -> Vec<Restorable> {
    let of = |t| Restorable::of(t, restorable(&look.catalog, t, has));
    look.timelines.all.iter().flat_map(of).collect()
}

fn told(
    look: &Look,
    options: &Options,
    now: DateTime<Utc>,
    applied: Applied,
    before: Vec<Restorable>,
) -> Outcome {
    let gone: HashSet<usize> = (0..look.catalog.snapshots.len())
        .filter(|&i| match options.apply {
            true => matches!(applied.objects[i].fate, Some(Fate::Done | Fate::Hidden)),
            false => !look.why[i].keeps() && applied.objects[i].fate != Some(Fate::Locked),
        })
        .collect();
    let after = ranges(look, &|i| !gone.contains(&i));
    let mut totals = Totals::default();
    let (mut freed, mut hidden) = (0u64, 0u64);
    for o in &applied.objects {
        let total = match (o.decision, o.fate) {
            (Decision::Keep, _) | (_, Some(Fate::Changed)) => &mut totals.kept,
            (_, Some(Fate::Failed | Fate::Waiting | Fate::Locked)) => &mut totals.left,
            (Decision::Remove, _) => &mut totals.removed,
            (Decision::Delete, fate) => {
                match fate {
                    Some(Fate::Hidden) => hidden = hidden.saturating_add(o.bytes),
                    _ => freed = freed.saturating_add(o.bytes),
                }
                &mut totals.deleted
            }
        };
        total.add(o.bytes);
    }
    let nothing = applied.objects.iter().all(|o| o.decision == Decision::Keep);
    Outcome {
        status: match nothing {
            true => Status::NothingToDo,
            false => Status::Succeeded,
        },
        error: FailureFields::default(),
        dry_run: !options.apply,
        now,
        objects: applied.objects,
        totals,
        freed_bytes: freed,
        hidden_bytes: hidden,
        foreign_objects: look.catalog.foreign.len() as u64,
        restorable_before: before,
        restorable_after: after,
        fulls_read: 0,
        fulls_not_read: look.not_read,
        damaged_fulls: look.damaged.clone(),
    }
}

/// Refuses a plan that makes the newest restorable revision of the newest timeline fall.
fn would_shrink(look: &Look) -> Option<Error> {
    let counts = |i: usize| !look.is_damaged.contains(&i);
    let stays = |i: usize| look.why[i].keeps();
    let shrink = retention::newest_lost(&look.catalog, &look.timelines, &counts, &stays)?;
    let show = |(revision, made): (Revision, DateTime<Utc>)| {
        format!("{revision} ({})", made.format("%Y-%m-%dT%H:%M:%SZ"))
    };
    let after = match shrink.after {
        Some(after) => format!("the newest would be {}", show(after)),
        None => "nothing could be restored any more".to_owned(),
    };
    Some(Reason::WouldShrink.error(format!(
        "on timeline {} revisions up to {} can be restored, and {after}: nothing was removed; find out which snapshots are to go and why, or give --allow-shrink",
        shrink.timeline,
        show(shrink.before)
    )))
}

/// Refuses to purge fulls that are newer than all that is left: `gc` itself removes none such, but whoever can write can
/// exclude a snapshot and note that it was removed.
fn would_purge_the_newest(look: &Look) -> Option<Error> {
    let snapshots = &look.catalog.snapshots;
    let is_full = |&i: &usize| snapshots[i].name.is_full();
    let left = look.catalog.usable().filter(is_full);
    let left = left.filter(|&i| look.why[i].keeps() && !look.is_damaged.contains(&i));
    let newest = left.map(|i| snapshots[i].name.created).max();
    let purged = (0..snapshots.len()).filter(is_full);
    let mut purged = purged.filter(|&i| look.why[i] == RetentionReason::RemovedLongAgo);
    let newer = purged.find(|&i| newest.is_none_or(|n| snapshots[i].name.created > n))?;
    Some(Reason::WouldShrink.error(format!(
        "{} is marked as removed, and no full that is left is newer: nothing was removed; bring it back by `deltafold undelete` if somebody else has marked it, or give --allow-shrink",
        snapshots[newer].path
    )))
}

/// What is to be said of fulls that count for nothing.
fn damage_warnings(look: &Look) -> Vec<String> {
    let told = look.damaged.iter().take(MOST_WARNINGS);
    let told = told.map(|d| format!("it stays and counts for nothing: {}", d.message));
    let mut warnings: Vec<String> = told.collect();
    if let Some(more @ 1..) = look.damaged.len().checked_sub(MOST_WARNINGS) {
        warnings.push(format!(
            "{more} more fulls stay and count for nothing: damaged_fulls in the JSON result names them"
        ));
    }
    if look.not_read > 0 {
        warnings.push(format!(
            "{} fulls were not read, since one run reads few: they stay and count for nothing until a later run reads them",
            look.not_read
        ));
    }
    warnings
}

/// Keeps other runs away, as far as the store can; warns that `without` a lock if it cannot.
fn take_lock(
    store: &Store,
    without: &str,
    warnings: &mut Vec<String>,
) -> Result<Option<LockGuard>> {
    let mut lock = Lock::new(store, LOCK, &lock::identity(), LOCK_DURATION)?;
    match lock.acquire(Wait::UntilSeenDead) {
        Ok(held) => Ok(Some(held)),
        // It does not write on a condition.
        Err(e) if e.reason() == Reason::Configuration => {
            warnings.push(format!("{without}: {e}"));
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

fn release(held: Option<LockGuard>) {
    if let Some(Err(e)) = held.map(LockGuard::release) {
        tracing::warn!("the lock could not be given back, others wait until it expires: {e}");
    }
}

fn skew_warning(ahead: TimeDelta) -> Option<String> {
    let minutes = ahead.num_minutes().abs();
    let way = match ahead > TimeDelta::zero() {
        true => "ahead of",
        false => "behind",
    };
    (ahead.abs() > SKEW).then(|| {
        format!("the store's clock is {minutes} min {way} this one: ages are counted from the earlier of the two")
    })
}

/// Does something with each, several at once; the results in order.
fn in_parallel<T: Sync, R: Send>(items: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    each(AT_ONCE, items, f)
}

/// The text of a note.
fn as_json(note: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(note).map_err(|e| Error::internal(format!("a note that is no JSON: {e}")))
}

/// Where the note on a removed snapshot is.
fn removal_note(name: &SnapshotName) -> String {
    format!("{REMOVED}/{name}")
}
