//! The operation `lock`: protects a chain's objects with S3's object lock, so that they cannot be
//! deleted before a given time.
//!
//! Which objects are locked, and how, are pure functions of the catalog and of the existing locks. A
//! lock is only ever extended. Without a lock, the retention policy of `gc` decides what is kept.
//! Called by `cli::object_lock`.

use super::Context;
use super::parallel::each;
use super::report::{FailureFields, Report, ReportBuilder};
use super::scan::{Depth, Scan, TAGS_UNREADABLE, scan_with_tags};
use super::tags::TagScope;
use crate::backup::catalog::TIMELINES;
use crate::backup::chain::{self, Choice, KnownBases};
use crate::backup::timeline::{Timeline, TimelineMember};
use crate::backup::{Catalog, Kind, SnapshotName};
use crate::base::plural::count;
use crate::error::{Error, Reason, Result};
use crate::store::{Mode, ObjectLock, ObjectRetention, Store};
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Serialize;

/// Objects that are handled concurrently.
const AT_ONCE: usize = 8;
/// The longest object retention that S3 accepts, in years.
const MOST_YEARS: i64 = 100;

/// The options of `lock`.
#[derive(Debug, Clone)]
pub struct Options {
    /// The time until which the objects are locked.
    pub until: DateTime<Utc>,
    /// Who may still delete the objects.
    pub mode: Mode,
    /// The name or path of the chain's full; `None` for the newest chain of the newest timeline.
    pub chain: Option<String>,
    /// Only report what would be locked.
    pub dry_run: bool,
}

/// The status of a lock operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// All objects are locked (or would be, in a dry run).
    Succeeded,
    /// All objects were already locked as requested.
    NothingToDo,
    /// Some or all objects could not be locked.
    Failed,
}

/// The result of a lock operation. The fields are a contract: `docs/lock-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// Whether anything was locked.
    pub status: Status,
    /// The error, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// The name of the chain's full.
    pub chain: String,
    /// The ID of the chain's timeline.
    pub timeline: String,
    /// The requested mode.
    pub mode: Mode,
    /// The requested time.
    pub until: DateTime<Utc>,
    /// The full, its deltas in order, and the notes that define their timeline.
    pub objects: Vec<Object>,
    /// How many objects were locked, or locked for longer (in a dry run: would be).
    pub locked: usize,
    /// How many objects were already locked as requested.
    pub kept: usize,
    /// How many objects could not be locked.
    pub failed: usize,
    /// Whether this was a dry run.
    pub dry_run: bool,
}

/// An object of the chain.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Object {
    /// The path below the store's prefix.
    pub path: String,
    /// The version that is locked: the current one. null if the store has no versions, or the object
    /// could not be read.
    pub version: Option<String>,
    /// The object retention before; null if there was none.
    pub before: Option<ReportedRetention>,
    /// The object retention after the run (in a dry run: as it would be); null if there is none.
    pub after: Option<ReportedRetention>,
    /// `Lock`: it is locked, or locked for longer. `Keep`: it was already locked as requested. null if
    /// it failed.
    pub decision: Option<Decision>,
    /// The reason, or the error, as human-readable text; it may change.
    pub reason: String,
    /// Whether the object is now locked as requested. False if locking failed, or if a dry run found that it
    /// would have to be locked.
    pub done: bool,
}

/// An object retention as it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[schemars(rename = "Locked")]
pub struct ReportedRetention {
    /// Who may still delete it: users with a special permission (`governance`), or nobody
    /// (`compliance`).
    pub mode: Mode,
    /// The time until which it is locked.
    pub until: DateTime<Utc>,
}

impl From<ObjectRetention> for ReportedRetention {
    fn from(r: ObjectRetention) -> Self {
        ReportedRetention {
            mode: r.mode,
            until: r.until,
        }
    }
}

/// What is done with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Decision {
    /// It is locked, or locked for longer.
    Lock,
    /// It is not changed.
    Keep,
}

/// Decides on an object. Returns the retention to set, or `None` to keep the current one, and the
/// reason.
///
/// # Errors
/// Fails with `Usage` if the object is locked in compliance mode and a longer lock in governance mode
/// is requested: S3 has only one lock for each version.
pub fn decide(
    current: Option<ObjectRetention>,
    requested: ObjectRetention,
) -> Result<(Option<ObjectRetention>, String)> {
    let Some(current) = current else {
        return Ok((Some(requested), "it is not locked".to_owned()));
    };
    if requested.is_covered_by(&current) {
        return Ok((None, format!("it is already locked, in {current}")));
    }
    match (current.mode, requested.mode) {
        (Mode::Compliance, Mode::Governance) => Err(Reason::Usage.error(format!(
            "it is locked in {current}. S3 keeps compliance mode, so a longer lock must be in that mode, too: give --mode compliance, or an --until that is not later"
        ))),
        (Mode::Governance, Mode::Compliance) if current.until > requested.until => Ok((
            Some(ObjectRetention {
                until: current.until,
                ..requested
            }),
            format!("it is locked in {current}: the mode changes, and the later time stays"),
        )),
        _ => Ok((Some(requested), format!("it is locked in {current}"))),
    }
}

/// Returns the paths of the objects that a restore of a chain needs: the full, all deltas after it that
/// may be part of the chain, and the notes that define the timeline. With `up_to_next`, the chain ends
/// at the next full of the timeline.
pub fn objects_of(
    catalog: &Catalog,
    timeline: &Timeline,
    base: usize,
    up_to_next: bool,
) -> Vec<String> {
    let name = |i: usize| &catalog.snapshots[i].name;
    let path = |i: usize| catalog.snapshots[i].path.clone();
    let order = |i: usize| (name(i).last, name(i).created, i);
    let fulls = chain::bases(catalog, timeline);
    // The chain ends at the next full: a delta that begins after it belongs to that full's chain.
    let end = fulls
        .iter()
        .filter(|&&i| up_to_next && order(i) > order(base))
        .map(|&i| name(i).last)
        .min();
    let is_in_chain = |m: &&TimelineMember| {
        let n = name(m.snapshot);
        !n.is_full()
            && n.last.min(m.until) > name(base).last
            && end.is_none_or(|end| n.start <= end)
    };
    let deltas = timeline.members.iter().filter(is_in_chain);
    let mut deltas: Vec<usize> = deltas.map(|m| m.snapshot).collect();
    deltas.sort_by_key(|&i| (name(i).start, order(i)));
    let members = timeline.members.iter().map(|m| m.snapshot);
    let notes = members
        .filter(|&i| catalog.snapshots[i].begins_timeline)
        .map(|i| format!("{TIMELINES}/{}", name(i)));
    let mut all = vec![path(base)];
    all.extend(deltas.into_iter().map(path));
    all.extend(notes);
    all
}

/// The chain to lock.
struct ChosenChain {
    base: SnapshotName,
    timeline: String,
    objects: Vec<String>,
    warnings: Vec<String>,
}

/// Chooses the chain whose full has this name or path, or the newest one.
fn choose_chain(scan: &Scan, full: Option<&str>) -> Result<ChosenChain> {
    let (catalog, timelines) = (&scan.catalog, &scan.timelines);
    let known: KnownBases = scan.contents.known_bases();
    let mut warnings = Vec::new();
    let (timeline, base) = match full {
        None => {
            let timeline = timelines.newest(catalog)?;
            let base = match chain::choose(catalog, timeline, None, &known)? {
                Choice::Chosen(chain) => chain.base,
                Choice::ReadFirst(base) => {
                    warnings.push(format!(
                        "judging by names, revisions are missing after the full {}: `deltafold list --deep` shows whether that full holds them",
                        catalog.snapshots[base].path
                    ));
                    base
                }
            };
            (timeline, base)
        }
        Some(full) => {
            let base = find_full(catalog, full)?;
            let is_member = |t: &&Timeline| t.member(base).is_some();
            // If it is on several timelines, take the last to fork: it is the newest.
            let timeline = timelines.all.iter().rev().find(is_member).ok_or_else(|| {
                Reason::NoSnapshots.error(format!("--chain {full} has no chain, because it is excluded or damaged (see `deltafold list --deep`)"))
            })?;
            (timeline, base)
        }
    };
    Ok(ChosenChain {
        base: catalog.snapshots[base].name.clone(),
        timeline: timeline.id.clone(),
        objects: objects_of(catalog, timeline, base, full.is_some()),
        warnings,
    })
}

/// Returns the index of the full with this name or path.
fn find_full(catalog: &Catalog, full: &str) -> Result<usize> {
    let is_named = |&i: &usize| {
        let s = &catalog.snapshots[i];
        s.path == full || s.name.to_string() == full
    };
    let found = (0..catalog.snapshots.len()).find(is_named).ok_or_else(|| {
        Reason::NoSnapshots.error(format!(
            "--chain {full}: there is no such snapshot: see `deltafold list`"
        ))
    })?;
    match catalog.snapshots[found].name.kind {
        Kind::Full => Ok(found),
        Kind::Incr => Err(Reason::Usage.error(format!(
            "--chain {full}: that is a delta: give the full of its chain"
        ))),
    }
}

/// Locks a chain.
///
/// # Errors
/// Fails without having locked anything: with `Usage` if the time is in the past or too far away, or
/// `chain` names a delta; `NoSnapshots` if the named full does not exist or is on no timeline; `Configuration`
/// if the bucket has no object lock; the errors of choosing a chain, as in `compact`; or an error of the store.
/// Later failures are in the report.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Outcome>> {
    let mut clock = ReportBuilder::start();
    let now = Utc::now();
    check_time(now, options.until)?;
    require_object_lock(&ctx.store)?;
    let scan = scan_with_tags(ctx, Depth::Doubtful, TagScope::All)?;
    let ChosenChain {
        base,
        timeline,
        objects,
        warnings,
    } = choose_chain(&scan, options.chain.as_deref())?;
    clock.warnings.extend(warnings);
    if ctx.store.hides_tags() {
        clock.warnings.push(TAGS_UNREADABLE.to_owned());
    }
    clock.warnings.extend(scan.untrusted_warning());
    let requested = ObjectRetention {
        mode: options.mode,
        until: options.until,
    };
    let locks: Vec<Result<CurrentLock>> =
        each(AT_ONCE, &objects, |path| read_lock(&ctx.store, path));
    ctx.store.cancel().check()?;
    // Decide on all objects first: one that cannot be locked as requested does not stop the others.
    let mut plans = Vec::new();
    for (path, lock) in objects.into_iter().zip(locks) {
        let plan = lock.and_then(|lock| {
            let decided = decide(lock.retention, requested);
            let (retention, reason) = decided.map_err(|e| e.at(ctx.store.name(&path)))?;
            Ok(LockPlan {
                lock,
                retention,
                reason,
            })
        });
        plans.push((path, plan));
    }
    let results = each(AT_ONCE, &plans, |(path, plan)| match plan {
        Ok(LockPlan {
            lock,
            retention: Some(retention),
            ..
        }) if !options.dry_run => ctx.store.retain(path, lock.version.as_deref(), retention),
        _ => Ok(()),
    });
    ctx.store.cancel().check()?;

    let mut errors = Vec::new();
    let mut reported = Vec::new();
    for ((path, plan), result) in plans.into_iter().zip(results) {
        reported.push(match (plan, result) {
            (Err(e), _) => {
                let object = Object::failed(path, None, &e);
                errors.push(e);
                object
            }
            (Ok(plan), Err(e)) => {
                let object = Object::failed(path, Some(plan.lock), &e);
                errors.push(e);
                object
            }
            (Ok(plan), Ok(())) => plan.into_object(path, options.dry_run),
        });
    }
    let count = |d| reported.iter().filter(|o| o.decision == Some(d)).count();
    let (locked, kept) = (count(Decision::Lock), count(Decision::Keep));
    let error = summarize(errors, reported.len());
    let outcome = Outcome {
        status: match (&error, locked) {
            (Some(_), _) => Status::Failed,
            (None, 0) => Status::NothingToDo,
            (None, _) => Status::Succeeded,
        },
        error: FailureFields::from(&error),
        chain: base.to_string(),
        timeline,
        mode: options.mode,
        until: options.until,
        failed: reported.len() - locked - kept,
        objects: reported,
        locked,
        kept,
        dry_run: options.dry_run,
    };
    Ok(clock.report_with(outcome, error))
}

/// What is done with an object, decided before anything is locked.
struct LockPlan {
    lock: CurrentLock,
    /// The retention to set; `None` keeps the current one.
    retention: Option<ObjectRetention>,
    reason: String,
}

impl LockPlan {
    /// Returns the object for the report, after the plan was carried out or a dry run was made.
    fn into_object(self, path: String, dry_run: bool) -> Object {
        let (lock, retention) = (self.lock, self.retention);
        Object {
            path,
            version: lock.version,
            before: lock.retention.map(ReportedRetention::from),
            after: retention.or(lock.retention).map(ReportedRetention::from),
            done: retention.is_none() || !dry_run,
            decision: Some(match retention {
                Some(_) => Decision::Lock,
                None => Decision::Keep,
            }),
            reason: self.reason,
        }
    }
}

impl Object {
    fn failed(path: String, lock: Option<CurrentLock>, e: &Error) -> Self {
        let retention = lock.as_ref().and_then(|l| l.retention);
        let before = retention.map(ReportedRetention::from);
        Object {
            path,
            version: lock.and_then(|l| l.version),
            before,
            after: before,
            decision: None,
            reason: e.to_string(),
            done: false,
        }
    }
}

/// An object's current version, and its retention.
struct CurrentLock {
    version: Option<String>,
    retention: Option<ObjectRetention>,
}

fn read_lock(store: &Store, path: &str) -> Result<CurrentLock> {
    let version = store.current_version(path)?;
    let retention = store.retention(path, version.as_deref())?;
    Ok(CurrentLock { version, retention })
}

/// Fails with `Usage` unless objects can be locked until this time.
fn check_time(now: DateTime<Utc>, until: DateTime<Utc>) -> Result<()> {
    let usage = |problem: &str| {
        Err(Reason::Usage.error(format!(
            "cannot lock until {}: {problem}",
            until.to_rfc3339()
        )))
    };
    if until <= now {
        return usage("that time has passed: give a later one, or --for");
    }
    if until - now > chrono::TimeDelta::days(MOST_YEARS * 365) {
        return usage("that is more than 100 years away, which S3 does not accept");
    }
    Ok(())
}

/// Fails with `Configuration` if the bucket does not enforce object locks.
fn require_object_lock(store: &Store) -> Result<()> {
    let url = store.url();
    let message = match store.object_lock()? {
        ObjectLock::Enabled { .. } => return Ok(()),
        ObjectLock::Disabled => format!(
            "the bucket of {url} has object lock disabled: enable it (`aws s3api put-object-lock-configuration`; the bucket must keep versions), or create a bucket with it (`aws s3api create-bucket --object-lock-enabled-for-bucket`) and copy the backup there"
        ),
        ObjectLock::Unsupported(why) => format!(
            "{url} cannot lock objects ({why}): copy the backup to an S3 bucket with object lock enabled"
        ),
    };
    Err(Reason::Configuration.error(message))
}

/// Returns one error for all failures. If every object failed, the first error says more than a
/// summary.
fn summarize(errors: Vec<Error>, all: usize) -> Option<Error> {
    let failed = errors.len();
    let first = errors.into_iter().next()?;
    if failed == all {
        return Some(first);
    }
    Some(Reason::PartlyDone.error(format!(
        "{failed} of {} could not be locked: run again to continue. The first error: {first}",
        count(all, "object")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::ListedObject;
    use crate::backup::timeline::{NamesOnly, Timelines};

    fn retention(mode: Mode, hour: u32) -> ObjectRetention {
        ObjectRetention {
            mode,
            until: format!("2027-01-01T{hour:02}:00:00Z").parse().unwrap(),
        }
    }

    #[test]
    fn a_lock_is_only_ever_extended() {
        use Mode::{Compliance, Governance};
        let modes = [Governance, Compliance];
        for has in modes
            .iter()
            .flat_map(|&m| (1..4).map(move |h| retention(m, h)))
        {
            for asked in modes
                .iter()
                .flat_map(|&m| (1..4).map(move |h| retention(m, h)))
            {
                match decide(Some(has), asked) {
                    // The new lock covers both the old one and the requested one.
                    Ok((Some(new), why)) => {
                        assert!(has.is_covered_by(&new), "{has} {asked} {new}: {why}");
                        assert!(asked.is_covered_by(&new), "{has} {asked} {new}: {why}");
                        assert_ne!(new, has);
                    }
                    Ok((None, why)) => assert!(asked.is_covered_by(&has), "{has} {asked}: {why}"),
                    Err(e) => {
                        assert_eq!((has.mode, asked.mode), (Compliance, Governance), "{e}");
                        assert!(asked.until > has.until);
                        assert_eq!(e.reason(), Reason::Usage);
                    }
                }
            }
            let (new, _) = decide(None, has).unwrap();
            assert_eq!(new, Some(has));
        }
    }

    #[test]
    fn times_in_the_past_or_too_far_away_are_refused() {
        let now = "2026-11-21T00:00:00Z".parse().unwrap();
        let check = |t: &str| check_time(now, t.parse().unwrap()).map_err(|e| e.reason());
        assert_eq!(check("2026-11-21T00:00:01Z"), Ok(()));
        assert_eq!(check("2100-01-01T00:00:00Z"), Ok(()));
        assert_eq!(check("2026-11-21T00:00:00Z"), Err(Reason::Usage));
        assert_eq!(check("2206-11-21T00:00:00Z"), Err(Reason::Usage));
    }

    #[test]
    fn a_chain_is_its_full_all_its_deltas_and_its_notes() {
        let paths = [
            "v2/Full-00000000-00000010-100.gz",
            "v2/Incr-00000011-00000020-110.gz",
            "v2/Incr-00000015-00000030-120.gz",
            "v2/Full-00000000-00000030-130.gz",
            "v2/Incr-00000031-00000040-140.gz",
            "v2/Incr-00000041-00000050-150.gz",
            "deltafold-timelines/Full-00000000-00000010-100.gz",
            "deltafold-pins/Full-00000000-00000010-100.gz",
        ];
        let listing = paths.iter().map(|p| ListedObject {
            path: (*p).to_owned(),
            bytes: 1,
        });
        let catalog = Catalog::from_listing(listing.collect());
        let timelines = Timelines::build(&catalog, &NamesOnly).unwrap();
        let timeline = timelines.newest(&catalog).unwrap();
        let full = |name: &str| find_full(&catalog, name).unwrap();
        let note = paths[6];
        let newest = objects_of(
            &catalog,
            timeline,
            full("Full-00000000-00000030-130.gz"),
            false,
        );
        assert_eq!(newest, [paths[3], paths[4], paths[5], note]);
        // An older full's chain ends at the next full; of two overlapping deltas, a restore may need
        // either.
        let older = objects_of(&catalog, timeline, full(paths[0]), true);
        assert_eq!(older, [paths[0], paths[1], paths[2], note]);
        assert_eq!(
            find_full(&catalog, paths[1]).unwrap_err().reason(),
            Reason::Usage
        );
        assert_eq!(
            find_full(&catalog, "Full-1").unwrap_err().reason(),
            Reason::NoSnapshots
        );
    }

    #[test]
    fn a_failure_of_all_objects_keeps_its_reason() {
        let e = |r: Reason| r.error("no");
        assert!(summarize(Vec::new(), 3).is_none());
        let all = vec![e(Reason::PermissionDenied), e(Reason::PermissionDenied)];
        assert_eq!(
            summarize(all, 2).unwrap().reason(),
            Reason::PermissionDenied
        );
        let some = vec![e(Reason::StoreUnreachable)];
        assert_eq!(summarize(some, 2).unwrap().reason(), Reason::PartlyDone);
    }
}
