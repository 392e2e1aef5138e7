//! Verifies a backup by itself: names, checksums, the fold of its chains, and a restore drill.
//!
//! The steps: scan the store; choose the chains; read what the level asks for; fold; drill. All problems are reported,
//! not only the first. Nothing is repaired, and only the verification's record is written to the store.

mod chains;
mod contents;
pub(super) mod findings;

pub use chains::VerifiedChain;

use super::Verdict;
use super::drill;
use super::record::{self, RecordLevel, VerificationRecord};
use crate::backup::catalog::Snapshot;
use crate::backup::chain::KnownBases;
use crate::backup::timeline::Timeline;
use crate::base::opt::{LEVEL, TIMELINE};
use crate::error::{Error, Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::Revision;
use crate::ops::findings::{Finding, of_scan, overlapping, past_name};
use crate::ops::list::{self, RecordedIdentity};
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::open::BackupLocation;
use crate::prefix::restorable::{Bases, Restorable};
use crate::prefix::scan::{Depth, Scan, scan_with};
use crate::prefix::set_aside::{Purpose, decide_again};
use crate::telemetry::metrics::VerificationFigures;
use chrono::{DateTime, Utc};
use clap::{Args, ValueEnum};
use contents::SnapshotContents;
use findings::Findings;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The option that messages recommend if names alone cannot decide.
fn deeper() -> String {
    format!("{LEVEL} checksums")
}

/// How thoroughly a backup is verified. Each level includes the ones before it.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    ValueEnum,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Check names only: gaps, forks, objects that are not deltafold's
    Names,
    /// Also read every byte: SHA-256, compression, pages, JSON, and whether the content matches the name
    #[default]
    Checksums,
    /// Also fold the deltas, and compute HashKV
    Fold,
}

/// How thoroughly a backup is verified.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Thoroughness {
    /// How thoroughly to verify [default: checksums; with --etcd-binary: fold; in a Job of the controller: the
    /// policy's level]
    #[arg(long, value_name = "LEVEL")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<Level>,
}

/// The options of a verification.
#[derive(Debug, Clone)]
pub struct Options {
    /// How thoroughly the backup is verified.
    pub level: Level,
    /// Verify every chain of every timeline, and the snapshots outside of chains; otherwise only the chain
    /// that a restore of the newest state would use.
    pub all_chains: bool,
    /// The timeline's ID; `None` for the newest.
    pub timeline: Option<String>,
    /// Start an etcd on the restored state; only with [`Level::Fold`].
    pub drill: Option<drill::Options>,
    /// Record the result in the store.
    pub record: bool,
}

/// The newest state that can be restored.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NewestState {
    /// The timeline's ID.
    pub timeline: String,
    /// The first revision of the range that can be restored.
    pub first_revision: Revision,
    /// The newest revision that can be restored.
    pub last_revision: Revision,
    /// The time of the newest revision: that of the last event that was read, or else that of a snapshot's
    /// name.
    pub last_time: DateTime<Utc>,
    /// The path of the newest snapshot of the timeline.
    pub snapshot: String,
    /// When the newest snapshot was taken, by its name.
    pub snapshot_created: DateTime<Utc>,
    /// The age of the newest snapshot in seconds, for an alert on a backup that has stopped. Negative if
    /// clocks differ.
    pub snapshot_age_seconds: f64,
}

/// The result of a verification. The fields are a contract.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VerifiedBackup {
    /// Whether the backup is good.
    pub verdict: Verdict,
    /// How thoroughly the backup was verified.
    pub level: Level,
    /// Whether every chain of every timeline was verified; otherwise only the one that a restore of the
    /// newest state would use.
    pub all_chains: bool,
    /// The cluster of the backup; null if it is not recorded, or if the object is unreadable.
    pub identity: Option<RecordedIdentity>,
    /// Number of snapshots below the prefix.
    pub snapshots: usize,
    /// Number of excluded snapshots among them.
    pub excluded: usize,
    /// Number of snapshots that were read.
    pub snapshots_read: usize,
    /// All findings, errors first.
    pub findings: Vec<Finding>,
    /// The chains that were verified.
    pub chains: Vec<VerifiedChain>,
    /// The ranges that can be restored, by timeline, without damaged snapshots.
    pub restorable: Vec<Restorable>,
    /// The newest state that can be restored; null if there is none, or if no timeline is the newest.
    pub newest: Option<NewestState>,
    /// The restore drills.
    pub drills: Vec<Report<drill::Drilled>>,
    /// Bytes read from the store.
    pub bytes_read: u64,
    /// The path of the object that records this verification for `deltafold status`, below the store's
    /// prefix; null if it was not written.
    pub recorded: Option<String>,
}

/// Verifies the backup in the context's store. Damage is not an error of this function, but part of the
/// report.
///
/// # Errors
/// Fails with `NoSnapshots` if the store holds none; with `NoSuchTimeline`, `CannotDecrypt`,
/// `SnapshotVanished`; with the store's errors; with `Io`, `NoSpace`, `Terminated`.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<VerifiedBackup>> {
    let mut clock = ReportBuilder::start();
    let (mut outcome, failure) = decide_again([ctx], Purpose::Verify, || verify(ctx, options))?;
    if options.record && options.timeline.is_some() {
        clock.warn(record::not_recorded(TIMELINE));
    } else if options.record {
        outcome.recorded = record::save(
            &ctx.store,
            &outcome.to_record(failure.as_ref().map(Error::reason)),
            &mut clock,
        );
    }
    Ok(clock.ended(outcome, true, failure))
}

fn verify(ctx: &Context, options: &Options) -> Result<(VerifiedBackup, Option<Error>)> {
    let mut findings = Findings::default();
    let (identity, problem) = list::recorded_identity(ctx)?;
    if let Some(problem) = problem {
        findings.add(problem);
    }
    let depth = match options.level {
        Level::Names => Depth::Names,
        _ => Depth::Doubtful,
    };
    let scan = scan_with(ctx, depth, |db| read_every_page(db).map(drop))?;
    let mut verification = Verification {
        ctx,
        options,
        known_bases: scan.contents.known_bases(),
        contents: BTreeMap::new(),
        unusable: scan.contents.unreadable.keys().copied().collect(),
        scan: &scan,
        findings,
        chains: Vec::new(),
        drills: Vec::new(),
    };
    verification.report_scan();
    let newest = verification.newest_timeline()?;
    let mut timelines = Vec::new();
    if options.all_chains {
        if options.level >= Level::Checksums {
            verification.check_contents(scan.catalog.usable().collect())?;
        }
        for timeline in &scan.timelines.all {
            verification.verify_all_chains(timeline)?;
            timelines.push(timeline);
        }
    } else if let Some(timeline) = newest {
        verification.verify_newest_chain(timeline)?;
        timelines.push(timeline);
    }
    if let Some(drill) = &options.drill {
        for timeline in timelines {
            verification.drill(timeline, drill)?;
        }
    }
    let restorable = verification.restorable()?;
    let newest = newest.and_then(|t| verification.newest_state(t, &restorable));
    let (findings, failure) = verification.findings.into_result();
    let with_remedy = |finding: Finding| {
        if options.all_chains {
            // The command for more has just run.
            finding
        } else {
            finding.with_remedy_in_store(ctx.store.url())
        }
    };
    let findings = findings.into_iter().map(with_remedy).collect();
    let outcome = VerifiedBackup {
        verdict: Verdict::of(failure.as_ref()),
        level: options.level,
        all_chains: options.all_chains,
        identity,
        snapshots: scan.catalog.snapshots.len(),
        excluded: scan.catalog.snapshots.iter().filter(|s| s.excluded).count(),
        snapshots_read: verification.contents.len()
            + scan.contents.surveys.len()
            + scan.contents.unreadable.len(),
        findings,
        chains: verification.chains,
        restorable,
        newest,
        drills: verification.drills,
        bytes_read: ctx.store.bytes_read(),
        recorded: None,
    };
    Ok((outcome, failure))
}

/// A verification in progress. Snapshots are indexes in the scan's catalog.
struct Verification<'a> {
    ctx: &'a Context,
    options: &'a Options,
    scan: &'a Scan,
    /// What fulls hold, as far as they were read.
    known_bases: KnownBases,
    /// What was read in addition to the scan.
    contents: BTreeMap<usize, SnapshotContents>,
    /// Snapshots that are damaged or do not fit their chain.
    unusable: BTreeSet<usize>,
    findings: Findings,
    chains: Vec<VerifiedChain>,
    drills: Vec<Report<drill::Drilled>>,
}

impl<'a> Verification<'a> {
    fn snapshot(&self, i: usize) -> &'a Snapshot {
        &self.scan.catalog.snapshots[i]
    }

    fn path(&self, i: usize) -> String {
        self.snapshot(i).path.clone()
    }

    fn paths(&self, snapshots: &[usize]) -> Vec<String> {
        snapshots.iter().map(|&i| self.path(i)).collect()
    }

    /// Adds a note about these snapshots.
    fn note(
        &mut self,
        timeline: Option<&Timeline>,
        snapshots: &[usize],
        reason: &'static str,
        message: impl Into<String>,
    ) {
        let finding = Finding::note(reason, message, self.paths(snapshots));
        self.findings.add(finding.on(timeline));
    }

    /// Adds an error about these snapshots.
    fn error(&mut self, e: &Error, timeline: Option<&Timeline>, snapshots: &[usize]) {
        let finding = Finding::from(e).about(self.paths(snapshots));
        self.findings.add(finding.on(timeline));
    }

    /// Returns the timeline without its unusable snapshots.
    fn usable_part(&self, timeline: &Timeline) -> Timeline {
        timeline.part(|i| !self.unusable.contains(&i))
    }

    /// Reports what the names show, and the problems that the scan has met.
    fn report_scan(&mut self) {
        let scan = self.scan;
        let advice = (self.options.level == Level::Names).then(deeper);
        for finding in of_scan(self.ctx, scan, advice.as_deref()) {
            self.findings.add(finding);
        }
        let snapshots = &scan.catalog.snapshots;
        let excluded: Vec<usize> = (0..snapshots.len())
            .filter(|&i| snapshots[i].excluded)
            .collect();
        if !excluded.is_empty() {
            let message = "excluded by a marker: not verified";
            self.note(None, &excluded, "Excluded", message);
        }
        let untrusted = &scan.untrusted;
        if !untrusted.left_out.is_empty() {
            let message = "not encrypted, though keys are given: not used";
            self.note(None, &untrusted.left_out, "Untrusted", message);
        }
        self.report_forks();
        for timeline in &scan.timelines.all {
            let members = timeline.members.iter();
            let whole = members.filter(|m| self.snapshot(m.snapshot).name.last <= m.until);
            let which = whole.map(|m| m.snapshot);
            if let Some(finding) = overlapping(&scan.catalog, timeline, which) {
                self.findings.add(finding);
            }
        }
    }

    /// Notes the timelines that forked off.
    fn report_forks(&mut self) {
        let timelines = &self.scan.timelines.all;
        if timelines.len() < 2 {
            return;
        }
        let mut forks = Vec::new();
        for fork in &timelines[1..] {
            let revision = fork.forked_at().unwrap_or_default();
            forks.push(format!("{} at revision {revision}", fork.id));
        }
        let message = format!(
            "the snapshots hold {} timelines; forked off: {}",
            timelines.len(),
            forks.join(", ")
        );
        self.note(None, &[], "ForkedHistory", message);
    }

    /// Notes a full that holds more than its name says.
    fn note_past_name(&mut self, i: usize) {
        let holds = self.known_bases.get(&i).map(|base| base.revision);
        if let Some(finding) = past_name(self.snapshot(i), holds) {
            self.findings.add(finding);
        }
    }

    /// Returns the timeline of the options, or the newest; `None` if no timeline is the newest.
    fn newest_timeline(&mut self) -> Result<Option<&'a Timeline>> {
        if let Some(id) = &self.options.timeline {
            return self.scan.timelines.by_id(id).map(Some);
        }
        match self.scan.timelines.newest(&self.scan.catalog) {
            Ok(timeline) => Ok(Some(timeline)),
            Err(e) => {
                self.error(&e, None, &[]);
                Ok(None)
            }
        }
    }

    /// Returns the ranges that can be restored without the unusable snapshots.
    fn restorable(&self) -> Result<Vec<Restorable>> {
        let scan = self.scan;
        let all = scan.timelines.all.iter();
        let usable: Vec<Timeline> = all.map(|t| self.usable_part(t)).collect();
        let mut bases = Bases::new(self.known_bases.clone());
        // The level names promises to read no snapshot.
        if self.options.level != Level::Names {
            bases = bases.read(self.ctx, &scan.catalog, &usable)?;
        }
        let ranges = |t| bases.restorable(&scan.catalog, &scan.contents, t);
        Ok(usable.iter().flat_map(ranges).collect())
    }

    /// Returns the newest state of a timeline.
    fn newest_state(&self, timeline: &Timeline, restorable: &[Restorable]) -> Option<NewestState> {
        let ranges = restorable.iter().filter(|r| r.timeline == timeline.id);
        let range = ranges.max_by_key(|r| r.last_revision)?;
        let usable = self.usable_part(timeline);
        let snapshots: Vec<usize> = usable.members.iter().map(|m| m.snapshot).collect();
        let newest = *snapshots
            .iter()
            .max_by_key(|&&i| (self.snapshot(i).name.created, i))?;
        let created = self.snapshot(newest).name.created_at();
        let age = Utc::now().signed_duration_since(created);
        let last_time = snapshots
            .iter()
            .filter(|&&i| self.holds(i, range.last_revision))
            .map(|&i| self.last_time(i))
            .min();
        Some(NewestState {
            timeline: timeline.id.clone(),
            first_revision: range.first_revision,
            last_revision: range.last_revision,
            last_time: last_time.unwrap_or(created),
            snapshot: self.path(newest),
            snapshot_created: created,
            snapshot_age_seconds: age.num_milliseconds() as f64 / 1000.0,
        })
    }

    /// Whether a snapshot holds a revision.
    fn holds(&self, i: usize, revision: Revision) -> bool {
        let name = &self.snapshot(i).name;
        let base = self.known_bases.get(&i);
        let last = base.map_or(name.last, |b| b.revision.max(name.last));
        name.start <= revision && last >= revision
    }

    /// Returns the time of a snapshot's last event, or that of its name.
    fn last_time(&self, i: usize) -> DateTime<Utc> {
        let read = self.contents.get(&i).and_then(|c| c.last_time);
        let survey = self.scan.contents.surveys.get(&i);
        read.or(survey.and_then(|s| s.last_time))
            .unwrap_or_else(|| self.snapshot(i).name.created_at())
    }

    /// Starts an etcd on the newest state of a timeline, if that state was folded.
    fn drill(&mut self, timeline: &Timeline, options: &drill::Options) -> Result<()> {
        let Some(revision) = self.newest_folded(timeline) else {
            let message = format!(
                "no etcd was started on timeline {}: the timeline cannot be folded to its end",
                timeline.id
            );
            self.note(Some(timeline), &[], "DrillSkipped", message);
            return Ok(());
        };
        let backup = BackupLocation::Prefix(self.ctx.clone());
        let drill = drill::run(&backup, options, Some(&timeline.id), revision)?;
        let failure = drill.failure.as_ref().map(Error::again);
        self.drills.push(drill);
        if let Some(e) = failure {
            self.error(&e, Some(timeline), &[]);
        }
        Ok(())
    }

    /// Returns the last revision of a timeline's newest chain; `None` if that chain was not folded.
    fn newest_folded(&self, timeline: &Timeline) -> Option<Revision> {
        let chains = self.chains.iter().filter(|c| c.timeline == timeline.id);
        // Of several chains with the same end, the last one has the newest full, which a restore takes.
        let newest = chains.max_by_key(|c| c.last_revision)?;
        newest.hash_kv.map(|_| newest.last_revision)
    }
}

impl VerifiedBackup {
    /// Returns the record of this verification, which ends now.
    fn to_record(&self, failure: Option<Reason>) -> VerificationRecord {
        let newest = self.newest.as_ref();
        let is_newest = |c: &&VerifiedChain| {
            newest.is_some_and(|n| (&n.timeline, n.last_revision) == (&c.timeline, c.last_revision))
        };
        let chain = self.chains.iter().rev().find(is_newest);
        let record = VerificationRecord {
            timeline: newest.map(|n| n.timeline.clone()),
            revision: newest.map(|n| n.last_revision),
            hash_kv: chain.and_then(|c| c.hash_kv),
            compact_revision: chain.and_then(|c| c.compact_revision),
            all_chains: self.all_chains,
            drill_succeeded: if self.drills.is_empty() {
                None
            } else {
                Some(self.drills.iter().all(|d| d.succeeded))
            },
            ..VerificationRecord::new(match self.level {
                Level::Names => RecordLevel::Names,
                Level::Checksums => RecordLevel::Checksums,
                Level::Fold => RecordLevel::Fold,
            })
        };
        match failure {
            None => record,
            Some(reason) => record.failed(reason),
        }
    }

    /// Returns the outcome as metrics.
    pub fn metrics(&self) -> VerificationFigures {
        let newest = self.newest.as_ref();
        let drill_seconds: f64 = self.drills.iter().map(|d| d.seconds).sum();
        let drill = (!self.drills.is_empty()).then(|| {
            let succeeded = self.drills.iter().all(|d| d.succeeded);
            (succeeded, Duration::from_secs_f64(drill_seconds.max(0.0)))
        });
        VerificationFigures {
            errors: findings::errors(&self.findings),
            findings: findings::by_reason(&self.findings),
            snapshots: self.snapshots_read as u64,
            read_bytes: self.bytes_read,
            newest: newest.map(|n| (n.snapshot_created, n.snapshot_age_seconds)),
            drill,
        }
    }
}
