//! The lock: a chain's objects cannot be deleted before a time has come.
//!
//! Which objects, and what each gets, are pure functions of the catalog and of what is locked already. A
//! lock is only ever extended. It says nothing of what is kept without one: that is `gc`'s.

use super::Context;
use super::parallel::each;
use super::report::{FailureFields, Report, ReportBuilder};
use super::scan::{Depth, Scan, TAGS_UNREADABLE, scan_with_tags};
use super::tags::TagScope;
use crate::backup::catalog::TIMELINES;
use crate::backup::chain::{self, Choice, KnownBases};
use crate::backup::timeline::{Timeline, TimelineMember};
use crate::backup::{Catalog, Kind, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::store::{Mode, ObjectLock, Retention, Store};
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Serialize;

/// Objects asked for at once.
const AT_ONCE: usize = 8;
/// S3 locks for no more.
const MOST_YEARS: i64 = 100;

/// What to lock.
#[derive(Debug, Clone)]
pub struct Options {
    /// Until when.
    pub until: DateTime<Utc>,
    /// From whom.
    pub mode: Mode,
    /// The full of the chain; the newest chain of the newest timeline where it is `None`.
    pub chain: Option<String>,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// All is locked.
    Succeeded,
    /// All was locked already.
    NothingToDo,
    /// Some or all of it is not.
    Failed,
}

/// What came of it. The fields are a contract: `docs/lock-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Why, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// The name of the chain's full.
    pub chain: String,
    /// The ID of its timeline.
    pub timeline: String,
    /// The mode that was asked for.
    pub mode: Mode,
    /// Until when, as it was asked for.
    pub until: DateTime<Utc>,
    /// The full, its deltas in order, and the notes that tell their timeline.
    pub objects: Vec<Object>,
    /// How many were locked, or locked for longer; in a dry run would be.
    pub locked: usize,
    /// How many were locked already, for as long.
    pub kept: usize,
    /// How many could not be locked.
    pub failed: usize,
    /// Whether only a plan was made.
    pub dry_run: bool,
}

/// An object of the chain.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Object {
    /// Its path below the store's prefix.
    pub path: String,
    /// The version that is locked: the one that was current. null if the store tells none, or if it could not
    /// be looked at.
    pub version: Option<String>,
    /// How it was locked before; null if it was not.
    pub before: Option<Locked>,
    /// How it is locked now; in a dry run how it would be. null if it is not.
    pub after: Option<Locked>,
    /// `Lock`: it is locked, or locked for longer. `Keep`: it was locked as long already. null if it failed.
    pub decision: Option<Decision>,
    /// Why, or why it failed. For people: it may change.
    pub reason: String,
    /// Whether it is as it shall be; false if it failed, and in a dry run where something would be done.
    pub done: bool,
}

/// A retention, as it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Locked {
    /// Who may still delete it: whoever has a special right (`governance`), or nobody (`compliance`).
    pub mode: Mode,
    /// Until when.
    pub until: DateTime<Utc>,
}

impl From<Retention> for Locked {
    fn from(r: Retention) -> Self {
        Locked {
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
    /// It is left as it is.
    Keep,
}

/// What an object shall have, and why; an error where that cannot be.
///
/// # Errors
/// `Usage` where it is locked from all and only a lock from most is asked for, for longer: S3 has one
/// lock for a version.
pub fn decide(has: Option<Retention>, asked: Retention) -> Result<(Option<Retention>, String)> {
    let Some(has) = has else {
        return Ok((Some(asked), "it is not locked".to_owned()));
    };
    if asked.is_covered_by(&has) {
        return Ok((None, format!("it is locked already, in {has}")));
    }
    match (has.mode, asked.mode) {
        (Mode::Compliance, Mode::Governance) => Err(Reason::Usage.error(format!(
            "it is locked in {has}, and only in that mode can it be locked for longer: use --mode compliance, or --until a time that is not after it"
        ))),
        (Mode::Governance, Mode::Compliance) if has.until > asked.until => Ok((
            Some(Retention {
                until: has.until,
                ..asked
            }),
            format!("it is locked in {has}: the mode changes, the later date stays"),
        )),
        _ => Ok((Some(asked), format!("it is locked in {has}"))),
    }
}

/// The objects that a restore of a chain needs: the full, all deltas after it that may lead on, up to the
/// next full of the timeline where `up_to_next`, and the notes that tell the timeline.
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
    // A delta that begins behind it leads on from the next full.
    let end = fulls
        .iter()
        .filter(|&&i| up_to_next && order(i) > order(base))
        .map(|&i| name(i).last)
        .min();
    let leads_on = |m: &&TimelineMember| {
        let n = name(m.snapshot);
        !n.is_full()
            && n.last.min(m.until) > name(base).last
            && end.is_none_or(|end| n.start <= end)
    };
    let deltas = timeline.members.iter().filter(leads_on);
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

struct Chosen {
    base: SnapshotName,
    timeline: String,
    objects: Vec<String>,
    warnings: Vec<String>,
}

fn choose(scan: &Scan, wanted: Option<&str>) -> Result<Chosen> {
    let (catalog, timelines) = (&scan.catalog, &scan.timelines);
    let known: KnownBases = scan.contents.known_bases();
    let mut warnings = Vec::new();
    let (timeline, base) = match wanted {
        None => {
            let timeline = timelines.newest(catalog)?;
            let base = match chain::choose(catalog, timeline, None, &known)? {
                Choice::Chosen(chain) => chain.base,
                Choice::ReadFirst(base) => {
                    warnings.push(format!(
                        "by names, revisions are missing after {}: `deltafold list --deep` tells whether it holds them",
                        catalog.snapshots[base].path
                    ));
                    base
                }
            };
            (timeline, base)
        }
        Some(wanted) => {
            let base = full_called(catalog, wanted)?;
            let is_member = |t: &&Timeline| t.member(base).is_some();
            // Of several, the last to fork is the newest.
            let timeline = timelines.all.iter().rev().find(is_member).ok_or_else(|| {
                Reason::NoSnapshots.error(format!("--chain {wanted}: that full is on no timeline; it is excluded or damaged: see `deltafold list --deep`"))
            })?;
            (timeline, base)
        }
    };
    Ok(Chosen {
        base: catalog.snapshots[base].name.clone(),
        timeline: timeline.id.clone(),
        objects: objects_of(catalog, timeline, base, wanted.is_some()),
        warnings,
    })
}

fn full_called(catalog: &Catalog, wanted: &str) -> Result<usize> {
    let is_it = |&i: &usize| {
        let s = &catalog.snapshots[i];
        s.path == wanted || s.name.to_string() == wanted
    };
    let found = (0..catalog.snapshots.len()).find(is_it).ok_or_else(|| {
        Reason::NoSnapshots.error(format!(
            "--chain {wanted}: there is no such snapshot; `deltafold list` shows all"
        ))
    })?;
    match catalog.snapshots[found].name.kind {
        Kind::Full => Ok(found),
        Kind::Incr => Err(Reason::Usage.error(format!(
            "--chain {wanted}: that is a delta; a chain is named by its full"
        ))),
    }
}

/// Locks a chain.
///
/// # Errors
/// `Usage` for a time that has passed or is too far, or a chain that there is not; `Configuration` where
/// the bucket has no lock enabled; those of choosing a chain, as for `compact`; the store's. Then nothing was
/// locked.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Outcome>> {
    let mut clock = ReportBuilder::start();
    let now = Utc::now();
    check_time(now, options.until)?;
    must_lock(&ctx.store)?;
    let scan = scan_with_tags(ctx, Depth::Doubtful, TagScope::All)?;
    let Chosen {
        base,
        timeline,
        objects,
        warnings,
    } = choose(&scan, options.chain.as_deref())?;
    clock.warnings.extend(warnings);
    if ctx.store.hides_tags() {
        clock.warnings.push(TAGS_UNREADABLE.to_owned());
    }
    clock.warnings.extend(scan.untrusted_warning());
    let asked = Retention {
        mode: options.mode,
        until: options.until,
    };
    let looked: Vec<Result<Looked>> = each(AT_ONCE, &objects, |path| look(&ctx.store, path));
    ctx.store.cancel().check()?;
    // Decided for all before anything is done: what cannot be must not end it midway.
    let mut plans = Vec::new();
    for (path, looked) in objects.iter().zip(looked) {
        plans.push((
            path.clone(),
            match looked {
                Err(e) => Err(e),
                Ok(l) => {
                    let decided = decide(l.has, asked).map_err(|e| e.at(ctx.store.name(path)))?;
                    Ok((l, decided))
                }
            },
        ));
    }
    let results = each(AT_ONCE, &plans, |(path, plan)| match plan {
        Ok((looked, (Some(retention), _))) if !options.dry_run => {
            let version = looked.version.as_deref();
            ctx.store.retain(path, version, retention)
        }
        _ => Ok(()),
    });
    ctx.store.cancel().check()?;

    let mut errors = Vec::new();
    let mut shown = Vec::new();
    for ((path, plan), result) in plans.into_iter().zip(results) {
        shown.push(match (plan, result) {
            (Err(e), _) => {
                let object = Object::failed(path, None, &e);
                errors.push(e);
                object
            }
            (Ok((looked, _)), Err(e)) => {
                let object = Object::failed(path, Some(looked), &e);
                errors.push(e);
                object
            }
            (Ok((looked, (retention, reason))), Ok(())) => Object {
                path,
                version: looked.version,
                before: looked.has.map(Locked::from),
                after: retention.or(looked.has).map(Locked::from),
                done: retention.is_none() || !options.dry_run,
                decision: Some(match retention {
                    Some(_) => Decision::Lock,
                    None => Decision::Keep,
                }),
                reason,
            },
        });
    }
    let count = |d| shown.iter().filter(|o| o.decision == Some(d)).count();
    let (locked, kept) = (count(Decision::Lock), count(Decision::Keep));
    let error = summed_up(errors, shown.len());
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
        failed: shown.len() - locked - kept,
        objects: shown,
        locked,
        kept,
        dry_run: options.dry_run,
    };
    Ok(clock.report_with(outcome, error))
}

impl Object {
    fn failed(path: String, looked: Option<Looked>, e: &Error) -> Self {
        let before = looked.as_ref().and_then(|l| l.has).map(Locked::from);
        Object {
            path,
            version: looked.and_then(|l| l.version),
            before,
            after: before,
            decision: None,
            reason: e.to_string(),
            done: false,
        }
    }
}

struct Looked {
    version: Option<String>,
    has: Option<Retention>,
}

fn look(store: &Store, path: &str) -> Result<Looked> {
    let version = store.current_version(path)?;
    let has = store.retention(path, version.as_deref())?;
    Ok(Looked { version, has })
}

fn check_time(now: DateTime<Utc>, until: DateTime<Utc>) -> Result<()> {
    let usage = |why: &str| {
        Err(Reason::Usage.error(format!(
            "a lock until {} is none: {why}",
            until.to_rfc3339()
        )))
    };
    if until <= now {
        return usage("that time has passed; give one that is to come, or --for");
    }
    if until - now > chrono::TimeDelta::days(MOST_YEARS * 365) {
        return usage("that is more than 100 years away, which S3 does not take");
    }
    Ok(())
}

/// # Errors
/// `Configuration` where a lock would be believed in that is none.
fn must_lock(store: &Store) -> Result<()> {
    let url = store.url();
    let message = match store.object_lock()? {
        ObjectLock::Enabled { .. } => return Ok(()),
        ObjectLock::Disabled => format!(
            "the bucket of {url} has no object lock enabled: enable it (`aws s3api put-object-lock-configuration`; the bucket must keep versions), or make a bucket with it (`aws s3api create-bucket --object-lock-enabled-for-bucket`) and copy the backup there"
        ),
        ObjectLock::Unsupported(why) => format!(
            "{url} cannot lock objects ({why}): copy the backup to a bucket of S3 that has an object lock enabled"
        ),
    };
    Err(Reason::Configuration.error(message))
}

/// Where nothing at all could be done, the first failure tells more than that.
fn summed_up(errors: Vec<Error>, all: usize) -> Option<Error> {
    let failed = errors.len();
    let first = errors.into_iter().next()?;
    if failed == all {
        return Some(first);
    }
    Some(Reason::PartlyDone.error(format!(
        "{failed} of {all} objects could not be locked; run again to go on; the first: {first}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::ListedObject;
    use crate::backup::timeline::{NamesOnly, Timelines};

    fn retention(mode: Mode, hour: u32) -> Retention {
        Retention {
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
                    // What was protected stays so, and what was asked for is.
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
    fn times_that_cannot_be_are_refused() {
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
        let full = |name: &str| full_called(&catalog, name).unwrap();
        let note = paths[6];
        let newest = objects_of(
            &catalog,
            timeline,
            full("Full-00000000-00000030-130.gz"),
            false,
        );
        assert_eq!(newest, [paths[3], paths[4], paths[5], note]);
        // Another full's ends with the next one; either of two that overlap may be wanted.
        let older = objects_of(&catalog, timeline, full(paths[0]), true);
        assert_eq!(older, [paths[0], paths[1], paths[2], note]);
        assert_eq!(
            full_called(&catalog, paths[1]).unwrap_err().reason(),
            Reason::Usage
        );
        assert_eq!(
            full_called(&catalog, "Full-1").unwrap_err().reason(),
            Reason::NoSnapshots
        );
    }

    #[test]
    fn a_failure_of_all_is_told_as_what_it_is() {
        let e = |r: Reason| r.error("no");
        assert!(summed_up(Vec::new(), 3).is_none());
        let all = vec![e(Reason::PermissionDenied), e(Reason::PermissionDenied)];
        assert_eq!(
            summed_up(all, 2).unwrap().reason(),
            Reason::PermissionDenied
        );
        let some = vec![e(Reason::StoreUnreachable)];
        assert_eq!(summed_up(some, 2).unwrap().reason(), Reason::PartlyDone);
    }
}
