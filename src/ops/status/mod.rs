//! The operation `status`: whether a backup is healthy, by the names of its snapshots and by its verification
//! records.
//!
//! It collects facts, `decide` decides. No snapshot of a store is read; of plain snapshot files, only the newest.
//! Nothing is written.

mod decide;

pub use decide::{Options, Verdict};

use crate::backup::catalog::Wall;
use crate::backup::chain::{self, Choice};
use crate::backup::timeline::{NamesOnly, Timeline};
use crate::backup::{Catalog, Snapshot};
use crate::base::opt::VERIFIED_WITHIN;
use crate::base::shell;
use crate::base::time::utc;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::findings::{self, Finding};
use crate::ops::list::{self, RecordedIdentity};
use crate::ops::live_follower::{DeadFollower, FoundFollower, LiveFollower};
use crate::ops::report::{Report, ReportBuilder};
use crate::ops::verify::record::{self, RecordLevel, RecordResult, VerificationRecord};
use crate::prefix::Context;
use crate::prefix::restorable::{Bases, Restorable};
use crate::prefix::scan::{Depth, Scan, scan};
use crate::prefix::set_aside::{Purpose, decide_again, refuse_excluded_end};
use crate::prefix::timeline_records::{self, Leaves};
use chrono::{DateTime, TimeDelta, Utc};
use decide::{Facts, PossibleGap, age, decide, is_future};
use serde::Serialize;

/// The command that closes a possible gap.
const VERIFY: &str = "`deltafold verify`";
/// The number of records of timelines that are read, the newest first.
const MOST_WALLS: usize = 4;
/// The time over which growth is averaged.
const GROWTH_DAYS: i64 = 7;

/// The result of `status`. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BackupState {
    /// The verdict.
    pub verdict: Verdict,
    /// The URL of the store, or the path of the plain snapshot files.
    pub location: String,
    /// All that is wrong, the worst first.
    pub findings: Vec<Finding>,
    /// The cluster of the backup; null if it is not recorded, or if the object is unreadable.
    pub identity: Option<RecordedIdentity>,
    /// The ID of the newest timeline by names alone; null if no timeline is the newest, and of plain snapshot
    /// files.
    pub timeline: Option<String>,
    /// The newest snapshot that is not from the future; null if there is none.
    pub newest: Option<NewestSnapshot>,
    /// The follower that works on the prefix; null if none has renewed its lock in the last minute, if its lock
    /// is a Lease, and of plain snapshot files.
    pub follower: Option<LiveFollower>,
    /// The number of snapshots that are later than now. They do not count as the newest.
    pub from_the_future: usize,
    /// The age in seconds above which the newest snapshot is too old.
    pub max_age_seconds: f64,
    /// The newest revision that a snapshot has in its name, or that the newest plain snapshot file holds; null
    /// if none is known.
    pub latest_revision: Option<Revision>,
    /// The revisions that can be restored on the newest timeline, by names. More than one range means gaps.
    /// Of plain snapshot files, the newest alone.
    pub restorable: Vec<Restorable>,
    /// The last verification of each level, the newest first. Whoever can write to the store can forge them.
    pub verifications: Vec<Verification>,
    /// The size of the backup.
    pub size: Size,
    /// The bytes of the snapshots of the last 7 days that are still there, per day. null if there are none.
    pub bytes_per_day: Option<u64>,
    /// Remarks.
    pub problems: Vec<Finding>,
    /// A command to run next; null if there is nothing to do.
    pub next: Option<String>,
}

/// The newest snapshot.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NewestSnapshot {
    /// The path of the snapshot, below the store's prefix or the folder.
    pub path: String,
    /// When it was taken, by its name, or of a plain snapshot file by the time of the file.
    pub created: DateTime<Utc>,
    /// Its age in seconds; zero if its clock is a little ahead.
    pub age_seconds: f64,
    /// Its newest revision, by its name or by its content; null if a plain snapshot file cannot be read.
    pub revision: Option<Revision>,
}

/// The last verification of a level.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Verification {
    /// What was verified.
    pub level: RecordLevel,
    /// The result.
    pub result: RecordResult,
    /// The name of the reason of the failure; null if it did not fail.
    pub reason: Option<String>,
    /// When the verification ended.
    pub time: DateTime<Utc>,
    /// How long ago that was, in seconds. Negative if clocks differ.
    pub age_seconds: f64,
    /// The ID of the timeline that was verified; null if no timeline was the newest.
    pub timeline: Option<String>,
    /// The newest revision that was verified; null if nothing could be restored.
    pub revision: Option<Revision>,
    /// How far the newest revision is beyond `revision`; null if one of the two is not known.
    pub revisions_behind: Option<i64>,
    /// The HashKV at `revision`; null if it was not computed.
    pub hash_kv: Option<u32>,
    /// The compacted revision that `hash_kv` depends on, or -1 if nothing was compacted; null if it was not
    /// computed.
    pub compact_revision: Option<Revision>,
    /// Whether all chains of all timelines were verified; otherwise only the newest chain.
    pub all_chains: bool,
    /// Whether the restore drill succeeded; null if there was none.
    pub drill_succeeded: Option<bool>,
    /// The version of deltafold that verified.
    pub program_version: String,
}

/// The size of a backup.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Size {
    /// The size of all snapshots, in bytes.
    pub bytes: u64,
    /// The number of fulls.
    pub fulls: u64,
    /// The number of deltas.
    pub deltas: u64,
    /// The number of excluded snapshots among them.
    pub excluded: u64,
}

/// Tells whether the backup in the context's store is healthy. What is wrong with it is not an error of this
/// function, but part of the report.
///
/// # Errors
/// Fails with the store's errors.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<BackupState>> {
    let clock = ReportBuilder::start();
    let now = Utc::now();
    let mut facts = Collected {
        has_records: true,
        ..Collected::default()
    };
    let scan = decide_again([ctx], Purpose::Verify, || {
        let scan = scan(ctx, Depth::Names)?;
        refuse_excluded_end(ctx, &scan.catalog, &scan.timelines, &scan.contents)?;
        Ok(scan)
    });
    match scan {
        Ok(scan) => {
            facts.read_notes(ctx)?;
            facts.add_scan(ctx, &scan, now)?;
        }
        Err(e) if e.reason() == Reason::NoSnapshots => facts.set_empty(&e),
        Err(e) => return Err(e),
    }
    let newest = facts.newest.as_ref().map(|n| n.created);
    match FoundFollower::find(&ctx.store, newest) {
        Some(FoundFollower::Live(follower)) => facts.follower = Some(follower),
        Some(FoundFollower::Dead(follower)) => facts.dead_follower = Some(follower),
        None => {}
    }
    Ok(facts.conclude(ctx.store.url(), options, now, clock))
}

/// Reports a store that cannot be opened because it is not there. `e` is the error of opening it.
pub fn of_nothing(location: &str, e: &Error, options: &Options) -> Report<BackupState> {
    let mut facts = Collected {
        has_records: true,
        ..Collected::default()
    };
    facts.set_empty(e);
    facts.conclude(location, options, Utc::now(), ReportBuilder::start())
}

/// What was collected of a backup.
#[derive(Default)]
struct Collected {
    identity: Option<RecordedIdentity>,
    timeline: Option<String>,
    newest: Option<NewestSnapshot>,
    follower: Option<LiveFollower>,
    dead_follower: Option<DeadFollower>,
    from_the_future: usize,
    latest_revision: Option<Revision>,
    restorable: Vec<Restorable>,
    records: Vec<VerificationRecord>,
    has_records: bool,
    size: Size,
    bytes_per_day: Option<u64>,
    problems: Vec<Finding>,
    empty: Option<Finding>,
    damage: Vec<Finding>,
    possible_gap: Option<PossibleGap>,
    set_backs: Vec<(DateTime<Utc>, Finding)>,
    has_deltas: bool,
}

impl Collected {
    fn set_empty(&mut self, e: &Error) {
        self.empty = Some(Finding::from(e));
    }

    /// Reads whose backup it is, and the records.
    fn read_notes(&mut self, ctx: &Context) -> Result<()> {
        let (identity, problem) = list::recorded_identity(ctx)?;
        self.identity = identity;
        self.problems.extend(problem);
        for level in RecordLevel::ALL {
            match record::read(&ctx.store, level)? {
                Ok(record) => self.records.extend(record),
                Err(message) => {
                    let path = vec![level.path()];
                    let problem = Finding::note("RecordUnreadable", message, path);
                    self.problems.push(problem);
                }
            }
        }
        Ok(())
    }

    fn add_scan(&mut self, ctx: &Context, scan: &Scan, now: DateTime<Utc>) -> Result<()> {
        let catalog = &scan.catalog;
        self.size = size_of(catalog);
        let written = |s: &Snapshot| (s.name.created_at(), s.bytes);
        self.bytes_per_day = bytes_per_day(catalog.snapshots.iter().map(written), now);
        let found = findings::of_scan(ctx, scan, Some(list::DEEP)).into_iter();
        let (damage, problems): (Vec<_>, Vec<_>) = found.partition(Finding::is_error);
        self.damage.extend(damage);
        self.problems.extend(problems);
        self.add_walls(ctx, scan)?;
        let members: Vec<usize> = match scan.timelines.newest(catalog) {
            Ok(timeline) => {
                self.add_timeline(ctx, scan, timeline)?;
                timeline.members.iter().map(|m| m.snapshot).collect()
            }
            // Without a usable snapshot there is no timeline either.
            Err(_) if catalog.usable().next().is_none() => {
                let message = format!(
                    "all {} snapshots of {} are excluded or not trusted",
                    catalog.snapshots.len(),
                    ctx.store.url()
                );
                self.empty = Some(Finding::error(Reason::NoSnapshots, message));
                return Ok(());
            }
            Err(e) => {
                self.damage.push(Finding::from(&e));
                self.latest_revision = catalog.latest_revision();
                catalog.usable().collect()
            }
        };
        let snapshots = || members.iter().map(|&i| &catalog.snapshots[i]);
        self.has_deltas = snapshots().any(|s| !s.name.is_full());
        let created = |s: &&Snapshot| s.name.created_at();
        let is_past = |s: &&Snapshot| !is_future(created(s), now);
        self.from_the_future = snapshots().filter(|s| !is_past(s)).count();
        let newest = snapshots().filter(is_past).max_by_key(created);
        self.newest = newest.map(|s| NewestSnapshot {
            path: s.path.clone(),
            created: s.name.created_at(),
            age_seconds: age(s.name.created_at(), now).as_secs_f64(),
            revision: Some(s.name.last),
        });
        Ok(())
    }

    /// Adds a set-back for each of the newest records of timelines, if the history that was left ends above that point.
    fn add_walls(&mut self, ctx: &Context, scan: &Scan) -> Result<()> {
        let catalog = &scan.catalog;
        let timelines = &scan.timelines;
        let mut walls: Vec<&Wall> = timelines
            .all
            .iter()
            .filter_map(|t| t.wall.as_ref())
            .collect();
        walls.dedup();
        for wall in walls.into_iter().rev().take(MOST_WALLS) {
            let before = wall.second - 1;
            let old = match timelines.newest_at(catalog, before) {
                Ok(old) if old.wall.as_ref() != Some(wall) => old,
                _ => continue,
            };
            let Some(last) = old.last(catalog, &NamesOnly) else {
                continue;
            };
            let left_at = match timeline_records::read(&ctx.store, wall)? {
                Ok(record) if record.is_unproven() => {
                    self.problems.push(not_proven(wall.at(), &wall.path));
                    continue;
                }
                Ok(record) if !record.means_set_back() => continue,
                Ok(record) => match record.leaves {
                    Leaves::At { history, revision } if history == old.id => Some(revision),
                    _ => None,
                },
                Err(why) => {
                    let message = format!("a record of a timeline cannot be read: {why}");
                    let path = vec![wall.path.clone()];
                    self.problems
                        .push(Finding::note("TimelineRecordUnreadable", message, path));
                    None
                }
            };
            if left_at.is_some_and(|left_at| last <= left_at) {
                continue;
            }
            let began = wall.at();
            let left = match left_at {
                Some(revision) => format!("left at revision {revision}"),
                None => "left at an unknown revision".to_owned(),
            };
            let message = format!(
                "the cluster was set back before {}: timeline {} ends at revision {last}, and was {left}. If nobody did that on purpose, this restores its end: deltafold restore --store {} --timeline {} --revision {last} --data-dir DIR",
                utc(began),
                old.id,
                shell::word(ctx.store.url()),
                old.id,
            );
            self.set_backs
                .push((began, Finding::error(Reason::SetBack, message)));
        }
        Ok(())
    }

    /// Adds what the names of a timeline show, and the fulls on which its ranges begin.
    fn add_timeline(&mut self, ctx: &Context, scan: &Scan, timeline: &Timeline) -> Result<()> {
        let catalog = &scan.catalog;
        let bases = Bases::new(scan.contents.known_bases()).read(ctx, catalog, [timeline])?;
        self.damage
            .extend(bases.damaged.values().map(Finding::from));
        self.timeline = Some(timeline.id.clone());
        self.latest_revision = timeline.last(catalog, &NamesOnly);
        let newest_first = timeline.members.iter().rev().map(|m| m.snapshot);
        let deltas = newest_first.take_while(|&i| !catalog.snapshots[i].name.is_full());
        let overlapping = findings::overlapping(catalog, timeline, deltas);
        self.problems.extend(overlapping);
        if let Some(full) = behind_a_hole(catalog, timeline) {
            let note = not_proven(full.name.created_at(), &full.path);
            self.problems.push(note);
        }
        self.restorable = bases.restorable(catalog, &scan.contents, timeline);
        match chain::choose(catalog, timeline, None, &bases.known) {
            Ok(Choice::Chosen(_)) => {}
            Ok(Choice::ReadFirst(full)) => {
                let e = findings::gap_after(scan, timeline, full, VERIFY);
                let from = catalog.snapshots[full].name.last;
                let last = self.latest_revision.unwrap_or(from);
                let missing = chain::missing(catalog, timeline, from, last);
                self.possible_gap = Some(PossibleGap {
                    until: missing.last().map_or(last, |range| range.1),
                    message: e.to_string(),
                });
            }
            Err(e) if e.reason() == Reason::NoSnapshots => self.set_empty(&e),
            Err(e) => self.damage.push(Finding::from(&e)),
        }
        Ok(())
    }

    fn conclude(
        self,
        location: &str,
        options: &Options,
        now: DateTime<Utc>,
        mut clock: ReportBuilder,
    ) -> Report<BackupState> {
        let facts = Facts {
            empty: self.empty,
            damage: self.damage,
            possible_gap: self.possible_gap,
            set_backs: self.set_backs,
            dead_follower: self.dead_follower,
            newest: self.newest.as_ref().map(|n| n.created),
            has_deltas: self.has_deltas,
            records: &self.records,
            has_records: self.has_records,
        };
        let judgement = decide(&facts, options, now);
        if self.from_the_future > 0 {
            clock.warn(format!(
                "{} snapshots are from the future, so clocks differ: they do not count as the newest",
                self.from_the_future
            ));
        }
        if options.verified_within.is_some() && !self.has_records {
            clock.warn(format!("{VERIFIED_WITHIN} has no effect: verifications of plain snapshot files are not recorded"));
        }
        let latest = self.latest_revision;
        let mut verifications: Vec<Verification> = Vec::new();
        for r in &self.records {
            verifications.push(verification(r, latest, now));
        }
        verifications.sort_by_key(|v| std::cmp::Reverse(v.time));
        let with_remedy = |finding: Finding| {
            if self.has_records {
                finding.with_remedy_in_store(location)
            } else {
                finding.with_remedy_of_files(location)
            }
        };
        let findings: Vec<Finding> = judgement.findings.into_iter().map(with_remedy).collect();
        let problems = self.problems.into_iter().map(with_remedy).collect();
        // A backup that was never read should be.
        let read: Option<&[&str]> = match self.has_records {
            true if self
                .records
                .iter()
                .any(|r| r.level >= RecordLevel::Checksums) =>
            {
                None
            }
            true => Some(&["--level", "fold", "--store"]),
            false => Some(&["--snapshot"]),
        };
        let read = read.map(|flags| {
            let words = [&["deltafold", "verify"], flags, &[location]].concat();
            shell::command(words)
        });
        let next = match findings.first() {
            Some(worst) => worst.remedy.clone(),
            None => read,
        };
        let failure = findings.first();
        let failure = failure.and_then(|f| Some(f.failure()?.error(f.message.as_str())));
        let outcome = BackupState {
            verdict: judgement.verdict,
            location: location.to_owned(),
            findings,
            identity: self.identity,
            timeline: self.timeline,
            newest: self.newest,
            follower: self.follower,
            from_the_future: self.from_the_future,
            max_age_seconds: judgement.max_age.as_secs_f64(),
            latest_revision: latest,
            restorable: self.restorable,
            verifications,
            size: self.size,
            bytes_per_day: self.bytes_per_day,
            problems,
            next,
        };
        clock.ended(outcome, true, failure)
    }
}

fn size_of(catalog: &Catalog) -> Size {
    let mut size = Size::default();
    for s in &catalog.snapshots {
        size.bytes += s.bytes;
        if s.name.is_full() {
            size.fulls += 1
        } else {
            size.deltas += 1
        }
        size.excluded += u64::from(s.excluded);
    }
    size
}

/// Returns the bytes of the snapshots of the last days, per day. A backup that is younger is averaged over its
/// own age, of a day at least.
fn bytes_per_day(
    snapshots: impl Iterator<Item = (DateTime<Utc>, u64)>,
    now: DateTime<Utc>,
) -> Option<u64> {
    let since = now - TimeDelta::days(GROWTH_DAYS);
    let (mut bytes, mut count) = (0u64, 0);
    let mut oldest = now;
    for (created, size) in snapshots.filter(|(created, _)| !is_future(*created, now)) {
        oldest = oldest.min(created);
        if created > since {
            bytes = bytes.saturating_add(size);
            count += 1;
        }
    }
    let days = (now - oldest.max(since)).num_seconds() as f64 / 86_400.0;
    (count > 0).then(|| (bytes as f64 / days.max(1.0)) as u64)
}

fn verification(
    r: &VerificationRecord,
    latest: Option<Revision>,
    now: DateTime<Utc>,
) -> Verification {
    let behind = latest.zip(r.revision);
    Verification {
        level: r.level,
        result: r.result,
        reason: r.reason.clone(),
        time: r.time,
        age_seconds: (now - r.time).num_seconds() as f64,
        timeline: r.timeline.clone(),
        revision: r.revision,
        revisions_behind: behind.map(|(latest, r)| latest.0.saturating_sub(r.0).max(0)),
        hash_kv: r.hash_kv,
        compact_revision: r.compact_revision,
        all_chains: r.all_chains,
        drill_succeeded: r.drill_succeeded,
        program_version: r.program_version.clone(),
    }
}

/// Returns the newest full of a timeline if deltas are before it, and nothing that was saved earlier reaches its revision.
fn behind_a_hole<'a>(catalog: &'a Catalog, timeline: &Timeline) -> Option<&'a Snapshot> {
    let members = || {
        let members = timeline.members.iter();
        members.map(|m| (&catalog.snapshots[m.snapshot], m.until))
    };
    let fulls = members().filter(|(s, _)| s.name.is_full());
    let (full, _) = fulls.max_by_key(|(s, _)| (s.name.created, s.name.last))?;
    let earlier = || members().filter(|(s, _)| s.name.created < full.name.created);
    let reached = earlier().map(|(s, until)| s.name.last.min(until)).max()?;
    let has_deltas = earlier().any(|(s, _)| !s.name.is_full());
    let is_behind = has_deltas
        && reached < full.name.last
        && !chain::missing(catalog, timeline, reached, full.name.last).is_empty();
    is_behind.then_some(full)
}

/// The note that nothing proves the history of a full or of what is behind a record.
fn not_proven(began: DateTime<Utc>, path: &str) -> Finding {
    let cure = timeline_records::CURE;
    let message = format!(
        "it is not proven that the cluster went on with the history that was saved before {}: nothing of what was saved last could be compared. {cure}",
        utc(began)
    );
    Finding::note("HistoryNotProven", message, vec![path.to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_averaged_over_seven_days_or_the_age_of_the_backup() {
        let now = DateTime::from_timestamp(1_800_000_000, 0).unwrap();
        let per_day = |sizes: &[(i64, u64)]| {
            let at = |&(hours, bytes): &(i64, u64)| (now - TimeDelta::hours(hours), bytes);
            bytes_per_day(sizes.iter().map(at), now)
        };
        assert_eq!(per_day(&[]), None);
        assert_eq!(per_day(&[(1, 100)]), Some(100));
        assert_eq!(per_day(&[(48, 100), (1, 100)]), Some(100));
        assert_eq!(per_day(&[(10 * 24, 9_999), (24, 700)]), Some(100));
        assert_eq!(per_day(&[(10 * 24, 9_999)]), None);
        assert_eq!(per_day(&[(1, 100), (-1, 9_999)]), Some(100));
    }
}
