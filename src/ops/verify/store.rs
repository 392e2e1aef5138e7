//! Whether a backup is good: its names, every checksum, what it folds to, and an etcd that starts on it.
//!
//! scan → choose chains → read what the level asks for → fold → restore drill. Everything that is wrong is
//! collected, not only the first. It changes nothing in the store; what is missing it does not mend. `cli` calls it.

use super::drill;
use crate::backup::Kind;
use crate::backup::catalog::Snapshot;
use crate::backup::chain::{self, Chain, Choice, KnownBases, Span};
use crate::backup::timeline::Timeline;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Base, HashKv, KeepHistory, Revision};
use crate::ops::Context;
use crate::ops::fold::Source;
use crate::ops::fold::open::Reading;
use crate::ops::fold::rebuild::read_every_page;
use crate::ops::list::{self, Problem, Recorded};
use crate::ops::parallel::first;
use crate::ops::report::{Clock, Report, reasons_and};
use crate::ops::restorable::Restorable;
use crate::ops::scan::{Depth, Scan, scan_with};
use crate::ops::tags::{self, Ask, without_excluded};
use crate::telemetry::progress::Step;
use chrono::{DateTime, Utc};
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

/// Snapshots that are read at once, at most: each needs buffers of its own.
const AT_ONCE: usize = 4;

/// What tells more than names.
const CHECKSUMS: &str = "--level checksums";

/// How much is looked at. A higher level does what the lower ones do.
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
    /// Check names only: gaps, forks, foreign objects
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
    /// How thoroughly to verify [default: checksums, or the policy's level; with --etcd-binary: fold]
    #[arg(long, value_name = "LEVEL")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<Level>,
}

/// What to verify.
#[derive(Debug, Clone)]
pub struct Options {
    /// How much is looked at.
    pub level: Level,
    /// Every chain of every timeline, and what is in no chain; else the chain that a restore of the newest state
    /// would use.
    pub all_chains: bool,
    /// Read the tags of all snapshots, however many there are.
    pub all_tags: bool,
    /// The timeline's ID; the newest where `None`.
    pub timeline: Option<String>,
    /// Start an etcd on what is restored; only with [`Level::Fold`].
    pub drill: Option<drill::Options>,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// Nothing is wrong with what was looked at.
    Verified,
    /// Something is.
    Failed,
}

/// Whether a finding makes a verification fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It does.
    Error,
    /// It is worth knowing.
    Note,
}

/// Findings that no command fails with.
const NOTES: [&str; 13] = [
    "DrillSkipped",
    "Excluded",
    "ForeignObject",
    "ForkedHistory",
    "GapIsCovered",
    "IdentityUnreadable",
    "MissingBase",
    "OverlappingDeltas",
    "RevisionPastName",
    "RevisionsNotCovered",
    "TagsNotRead",
    "TagsUnreadable",
    "TimelinesUnverified",
];

/// Something that was found.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Finding {
    /// `error` makes the verification fail, `note` is worth knowing.
    pub severity: Severity,
    /// A stable name. Of an error one of exit-codes.md. Of a note: `DrillSkipped` (the timeline cannot be
    /// folded to its end), `Excluded` (marked not to be used), `ForeignObject` (names that are not those of
    /// snapshots), `ForkedHistory` (more than one timeline), `GapIsCovered` (deltas are missing, and the next
    /// full holds their history), `IdentityUnreadable` (`deltafold-identity.json` does not tell whose backup
    /// it is), `MissingBase` (by names, no full leads to these deltas), `OverlappingDeltas` (two streams),
    /// `RevisionPastName` (a full holds more than its name says; harmless), `RevisionsNotCovered` (no deltas
    /// lead up to a full), `TagsNotRead` (the tags of more than 64 snapshots: use --all-tags),
    /// `TagsUnreadable` (the store does not tell which snapshots are excluded by a tag),
    /// `TimelinesUnverified` (only contents tell whether the history forked).
    #[schemars(extend("enum" = reasons_and(&NOTES)))]
    pub reason: &'static str,
    /// The ID of the timeline that it was found on; null if it belongs to none, or to several.
    pub timeline: Option<String>,
    /// The paths, below the store's prefix, of the objects that it is about; may be empty.
    pub snapshots: Vec<String>,
    /// In words, for people: it may change.
    pub message: String,
    #[serde(skip)]
    failure: Option<Reason>,
}

/// A chain that was looked at.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize)]
pub struct ChainOutcome {
    /// The ID of the timeline.
    pub timeline: String,
    /// The path of its full.
    pub base: String,
    /// How many deltas lead on from it.
    pub deltas: usize,
    /// The revision that it leads to.
    pub last_revision: Revision,
    /// etcd's HashKV at `last_revision`, with all the history that the chain has. null if it was not folded.
    pub hash_kv: Option<u32>,
    /// The compacted revision that `hash_kv` depends on; -1 if nothing was compacted. null if it was not
    /// folded.
    pub compact_revision: Option<Revision>,
    /// How many keys are alive at `last_revision`; null if it was not folded.
    pub live_keys: Option<u64>,
    /// How many events of the deltas were folded; null if it was not folded.
    pub events: Option<u64>,
    /// Whether the next full of the timeline holds what this chain folds to. null if that was not compared:
    /// without --all-chains, below the level fold, or if the deltas do not lead there.
    pub equals_next: Option<bool>,
}

/// The newest state that can be restored.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize)]
pub struct Newest {
    /// The timeline's ID.
    pub timeline: String,
    /// From this revision on every one can be restored.
    pub first_revision: Revision,
    /// The newest revision that can be restored.
    pub last_revision: Revision,
    /// When that was: by the last event that was read, or else by a snapshot's name.
    pub last_time: DateTime<Utc>,
    /// The path of the snapshot of the timeline that was made last.
    pub snapshot: String,
    /// When that was, by its name.
    pub snapshot_created: DateTime<Utc>,
    /// How long ago that is, in seconds: for an alert on a backup that is not taken any more. Less than 0
    /// where clocks differ.
    pub snapshot_age_seconds: f64,
}

/// What was found. The fields are a contract: `docs/verify-result.schema.json`.
#[derive(Debug, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// The process's exit code: that of the gravest finding; see exit-codes.md.
    pub code: u8,
    /// The reason of the gravest finding; null if there is none.
    pub reason: Option<Reason>,
    /// The same in words, for people: it may change. null if there is none.
    pub message: Option<String>,
    /// What was looked at.
    pub level: Level,
    /// Whether every chain of every timeline was looked at; else the one that a restore of the newest state
    /// would use.
    pub all_chains: bool,
    /// Whose backup it is; null if nobody has recorded it, or the object is unreadable.
    pub identity: Option<Recorded>,
    /// Snapshots in the prefix.
    pub snapshots: usize,
    /// Of these, those that are marked not to be used.
    pub excluded: usize,
    /// Snapshots that were read.
    pub snapshots_read: usize,
    /// All that was found, errors first.
    pub findings: Vec<Finding>,
    /// The chains that were looked at.
    pub chains: Vec<ChainOutcome>,
    /// What can be restored, by timeline, without what was found to be damaged.
    pub restorable: Vec<Restorable>,
    /// The newest state; null if nothing can be restored, or no timeline is the newest.
    pub newest: Option<Newest>,
    /// The restore drills.
    pub drills: Vec<Report<drill::Outcome>>,
    /// Bytes read from the store.
    pub bytes_read: u64,
}

/// What was read of a snapshot.
#[derive(Debug, Clone, Default)]
struct Read {
    base: Option<Base>,
    hash: Option<HashKv>,
    last_time: Option<DateTime<Utc>>,
}

/// Verifies the backup in the context's store.
///
/// # Errors
/// `NoSnapshots` where there is none at all; `NoSuchTimeline`; `CannotDecrypt`; `SnapshotVanished`; the store's; `Io`,
/// `NoSpace`, `Terminated`. What is wrong with snapshots is no error here.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Outcome>> {
    let clock = Clock::start();
    without_excluded(|| try_run(ctx, options, clock.clone()))
}

fn try_run(ctx: &Context, options: &Options, clock: Clock) -> Result<Report<Outcome>> {
    let mut findings = Findings::default();
    let (identity, problem) = list::recorded(ctx)?;
    problem.into_iter().for_each(|p| findings.note(None, p));
    let depth = match options.level {
        Level::Names => Depth::Names,
        _ => Depth::Doubtful,
    };
    let ask = Ask::newest_or(options.all_tags);
    let scan = scan_with(ctx, depth, ask, |db| read_every_page(db).map(drop))?;
    let mut run = Run {
        ctx,
        options,
        known: scan.contents.known_bases(),
        read: BTreeMap::new(),
        bad: scan.contents.unreadable.keys().copied().collect(),
        scan: &scan,
        findings,
        chains: Vec::new(),
        drills: Vec::new(),
    };
    run.look_at_names();
    let newest = run.newest_timeline()?;
    let mut ends = Vec::new();
    match (options.all_chains, newest) {
        (true, _) => {
            if options.level >= Level::Checksums {
                run.check(scan.catalog.usable().collect())?;
            }
            for timeline in &scan.timelines.all {
                run.look_at_spans(timeline)?;
                ends.push(timeline);
            }
        }
        (false, Some(timeline)) => {
            run.look_at_newest_chain(timeline)?;
            ends.push(timeline);
        }
        (false, None) => {}
    }
    if let Some(drill) = &options.drill {
        for timeline in ends {
            run.drill(timeline, drill)?;
        }
    }
    let restorable = run.restorable();
    let newest = newest.and_then(|t| run.newest(t, &restorable));
    let (findings, failure) = run.findings.judge();
    let outcome = Outcome {
        status: match failure {
            None => Status::Verified,
            Some(_) => Status::Failed,
        },
        code: failure.as_ref().map_or(0, |e| e.reason().exit_code()),
        reason: failure.as_ref().map(Error::reason),
        message: failure.as_ref().map(Error::to_string),
        level: options.level,
        all_chains: options.all_chains,
        identity,
        snapshots: scan.catalog.snapshots.len(),
        excluded: scan.catalog.snapshots.iter().filter(|s| s.excluded).count(),
        snapshots_read: run.read.len()
            + scan.contents.surveys.len()
            + scan.contents.unreadable.len(),
        findings,
        chains: run.chains,
        restorable,
        newest,
        drills: run.drills,
        bytes_read: ctx.store.bytes_read(),
    };
    Ok(clock.ended(outcome, failure))
}

/// What was found so far.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn push(&mut self, finding: Finding) {
        // Timelines share what lies before their fork.
        let same = |f: &Finding| {
            (f.reason, &f.snapshots, &f.message)
                == (finding.reason, &finding.snapshots, &finding.message)
        };
        if !self.0.iter().any(same) {
            let Finding {
                reason, message, ..
            } = &finding;
            match finding.severity {
                Severity::Error => tracing::warn!(reason, "{message}"),
                Severity::Note => tracing::info!(reason, "{message}"),
            }
            self.0.push(finding);
        }
    }

    fn note(&mut self, timeline: Option<&Timeline>, problem: Problem) {
        self.push(Finding {
            severity: Severity::Note,
            reason: problem.reason,
            timeline: timeline.map(|t| t.id.clone()),
            snapshots: problem.snapshots,
            message: problem.message,
            failure: None,
        });
    }

    fn error(&mut self, e: &Error, timeline: Option<&Timeline>, snapshots: Vec<String>) {
        self.push(Finding {
            severity: Severity::Error,
            reason: e.reason().as_str(),
            timeline: timeline.map(|t| t.id.clone()),
            snapshots,
            message: e.to_string(),
            failure: Some(e.reason()),
        });
    }

    /// All of them, errors first, and the failure that they come to.
    fn judge(self) -> (Vec<Finding>, Option<Error>) {
        let mut all = self.0;
        all.sort_by_key(|f| f.severity == Severity::Note);
        let errors = all.iter().filter(|f| f.severity == Severity::Error).count();
        let place = |r: Reason| Reason::ALL.iter().position(|a| *a == r);
        let gravest = all
            .iter()
            .filter_map(|f| Some((f.failure?, f)))
            .min_by_key(|(r, _)| (r.exit_code(), place(*r)));
        let failure = gravest.map(|(reason, f)| {
            let more = match errors {
                0 | 1 => String::new(),
                2 => "; and one more finding".to_owned(),
                n => format!("; and {} more findings", n - 1),
            };
            reason.error(format!("{}{more}", f.message))
        });
        (all, failure)
    }
}

struct Run<'a> {
    ctx: &'a Context,
    options: &'a Options,
    scan: &'a Scan,
    /// What fulls hold, as far as they were read.
    known: KnownBases,
    /// What was read beside what the scan has read.
    read: BTreeMap<usize, Read>,
    /// Snapshots that cannot be used.
    bad: BTreeSet<usize>,
    findings: Findings,
    chains: Vec<ChainOutcome>,
    drills: Vec<Report<drill::Outcome>>,
}

impl<'a> Run<'a> {
    fn snapshot(&self, i: usize) -> &'a Snapshot {
        &self.scan.catalog.snapshots[i]
    }

    fn path(&self, i: usize) -> String {
        self.snapshot(i).path.clone()
    }

    fn paths(&self, which: &[usize]) -> Vec<String> {
        which.iter().map(|&i| self.path(i)).collect()
    }

    /// Notes something about these snapshots.
    fn note(
        &mut self,
        timeline: Option<&Timeline>,
        which: &[usize],
        reason: &'static str,
        message: impl Into<String>,
    ) {
        let problem = Problem::new(reason, message, self.paths(which));
        self.findings.note(timeline, problem);
    }

    /// Notes what is wrong with these snapshots.
    fn error(&mut self, e: &Error, timeline: Option<&Timeline>, which: &[usize]) {
        let paths = self.paths(which);
        self.findings.error(e, timeline, paths);
    }

    /// A timeline without what cannot be used.
    fn good(&self, timeline: &Timeline) -> Timeline {
        let mut good = timeline.clone();
        good.members.retain(|m| !self.bad.contains(&m.snapshot));
        good
    }

    /// What the listing tells, and what the scan has met.
    fn look_at_names(&mut self) {
        let scan = self.scan;
        let reading = (self.options.level == Level::Names).then_some(CHECKSUMS);
        for problem in list::of_names(self.ctx, scan, reading) {
            self.findings.note(None, problem);
        }
        let snapshots = &scan.catalog.snapshots;
        let excluded: Vec<usize> = (0..snapshots.len())
            .filter(|&i| snapshots[i].excluded)
            .collect();
        if !excluded.is_empty() {
            let message = "marked not to be used: not looked at";
            self.note(None, &excluded, "Excluded", message);
        }
        let untrusted = &scan.untrusted;
        if !untrusted.left_out.is_empty() {
            let message = "not encrypted, though keys are given: not used";
            self.note(None, &untrusted.left_out, "Untrusted", message);
        }
        if let Err(e) = scan.refuse_untrusted(self.ctx) {
            self.error(&e, None, &untrusted.refused);
        }
        for (&i, e) in &scan.contents.unreadable {
            self.error(e, None, &[i]);
        }
        let timelines = &scan.timelines.all;
        if let [_, forks @ ..] = timelines.as_slice()
            && !forks.is_empty()
        {
            let at = |t: &Timeline| {
                format!("{} at revision {}", t.id, t.forked_at().unwrap_or_default())
            };
            let at: Vec<String> = forks.iter().map(at).collect();
            let message = format!(
                "the snapshots tell {} histories; forked off: {}",
                timelines.len(),
                at.join(", ")
            );
            self.note(None, &[], "ForkedHistory", message);
        }
        for t in timelines {
            let overlapping = self.overlapping(t);
            if !overlapping.is_empty() {
                let message =
                    "they repeat revisions of other deltas: two streams write here, or did";
                self.note(Some(t), &overlapping, "OverlappingDeltas", message);
            }
        }
        for i in scan.contents.surveys.keys() {
            self.note_past_name(*i);
        }
    }

    /// The deltas that repeat revisions of others.
    fn overlapping(&self, timeline: &Timeline) -> Vec<usize> {
        let mut deltas: Vec<(Revision, Revision, usize)> = timeline
            .members
            .iter()
            .map(|m| (m, &self.snapshot(m.snapshot).name))
            .filter(|(m, n)| !n.is_full() && n.last <= m.until)
            .map(|(m, n)| (n.start, n.last, m.snapshot))
            .collect();
        deltas.sort_unstable();
        let mut reached = Revision(0);
        let mut overlapping = Vec::new();
        for (start, last, i) in deltas {
            if start <= reached {
                overlapping.push(i);
            }
            reached = reached.max(last);
        }
        overlapping
    }

    fn note_past_name(&mut self, i: usize) {
        let holds = self.known.get(&i).map(|base| base.revision);
        if let Some(problem) = list::past_name(self.snapshot(i), holds) {
            self.findings.note(None, problem);
        }
    }

    /// The timeline that was asked for, or the newest.
    fn newest_timeline(&mut self) -> Result<Option<&'a Timeline>> {
        if let Some(id) = &self.options.timeline {
            return self.scan.timelines.by_id(id).map(Some);
        }
        match self.scan.timelines.newest(&self.scan.catalog) {
            Ok(t) => Ok(Some(t)),
            Err(e) => {
                self.error(&e, None, &[]);
                Ok(None)
            }
        }
    }

    /// Reads snapshots that were not read yet.
    fn check(&mut self, which: Vec<usize>) -> Result<()> {
        let is_new = |i: &usize| {
            let contents = &self.scan.contents;
            !self.read.contains_key(i)
                && !contents.surveys.contains_key(i)
                && !contents.unreadable.contains_key(i)
        };
        let which: Vec<usize> = which.into_iter().filter(is_new).collect();
        let unread = which.iter().filter(|_| self.scan.tags_unread > 0);
        let unread = unread.map(|&i| self.scan.catalog.snapshots[i].path.as_str());
        let checked =
            tags::unless_excluded(self.ctx, unread, || check_all(self.ctx, self.scan, &which))?;
        for (i, result) in checked {
            match result {
                Ok(read) => {
                    if let Some(base) = read.base {
                        self.known.insert(i, base);
                        self.note_past_name(i);
                    }
                    self.read.insert(i, read);
                }
                Err(e) => {
                    self.error(&e, None, &[i]);
                    self.bad.insert(i);
                    self.read.insert(i, Read::default());
                }
            }
        }
        Ok(())
    }

    /// The chain that a restore of the newest state would use.
    fn look_at_newest_chain(&mut self, timeline: &Timeline) -> Result<()> {
        let reads = self.options.level >= Level::Checksums;
        let chain = loop {
            match chain::choose(&self.scan.catalog, timeline, None, &self.known) {
                // What the full holds beyond its name may change the choice.
                Ok(Choice::Look(i)) if reads && !self.bad.contains(&i) => {
                    self.check(vec![i])?;
                    if self.bad.contains(&i) {
                        return Ok(());
                    }
                }
                Ok(Choice::Look(i)) => {
                    let e = list::gap_after(self.scan, timeline, i, CHECKSUMS);
                    self.error(&e, Some(timeline), &[i]);
                    return Ok(());
                }
                Ok(Choice::Found(chain)) => {
                    if !reads || self.known.contains_key(&chain.base) {
                        break chain;
                    }
                    self.check(vec![chain.base])?;
                    if self.bad.contains(&chain.base) {
                        break chain;
                    }
                }
                Err(e) => {
                    self.error(&e, Some(timeline), &[]);
                    return Ok(());
                }
            }
        };
        if reads {
            self.check(chain.deltas.iter().map(|l| l.snapshot).collect())?;
        }
        let mut outcome = self.chain_outcome(timeline, &chain);
        if self.options.level >= Level::Fold {
            self.fold(timeline, &chain, &mut outcome)?;
        }
        self.chains.push(outcome);
        Ok(())
    }

    fn chain_outcome(&self, timeline: &Timeline, chain: &Chain) -> ChainOutcome {
        ChainOutcome {
            timeline: timeline.id.clone(),
            base: self.path(chain.base),
            deltas: chain.deltas.len(),
            last_revision: chain.target,
            hash_kv: None,
            compact_revision: None,
            live_keys: None,
            events: None,
            equals_next: None,
        }
    }

    fn is_usable(&self, chain: &Chain) -> bool {
        !chain.snapshots().any(|i| self.bad.contains(&i))
    }

    /// Every chain of a timeline.
    fn look_at_spans(&mut self, timeline: &Timeline) -> Result<()> {
        let catalog = &self.scan.catalog;
        let spans = chain::spans(catalog, timeline, &self.known);
        if spans.is_empty() {
            let e = Reason::NoSnapshots.error(format!(
                "timeline {} has no full snapshot to start from",
                timeline.id
            ));
            self.error(&e, Some(timeline), &[]);
        }
        let lost = chain::without_base(catalog, timeline, &self.known);
        if !lost.is_empty() && !spans.is_empty() {
            let message =
                "no full snapshot leads to these deltas: what they hold cannot be restored";
            match self.options.level {
                // A full may hold the history.
                Level::Names => {
                    let message = format!("{message}, unless the full after them does");
                    self.note(Some(timeline), &lost, "MissingBase", message);
                }
                _ => {
                    let e = Reason::RevisionGap.error(message);
                    self.error(&e, Some(timeline), &lost);
                }
            }
        }
        for span in spans {
            self.look_at_gap(timeline, &span);
            let chain = chain_of(&span, span.reached);
            let mut outcome = self.chain_outcome(timeline, &chain);
            // Timelines share what lies before their fork.
            let known_already = self.chains.iter().any(|c| {
                (&c.base, c.deltas, c.last_revision)
                    == (&outcome.base, outcome.deltas, outcome.last_revision)
            });
            if known_already {
                continue;
            }
            if self.options.level >= Level::Fold
                && let Some(compact) = self.fold(timeline, &chain, &mut outcome)?
            {
                self.compare_with_next(timeline, &span, compact, &mut outcome)?;
            }
            self.chains.push(outcome);
        }
        Ok(())
    }

    /// Tells what is missing behind a chain.
    fn look_at_gap(&mut self, timeline: &Timeline, span: &Span) {
        let next = span.next.map(|(i, _)| i);
        // A full with history closes the gap before it.
        let from_next = next
            .and_then(|i| self.known.get(&i))
            .map(Base::first_revision);
        let around: Vec<usize> = [Some(span.base), next].into_iter().flatten().collect();
        if let Some(first) = span.missing.first().map(|m| m.0) {
            let holes = chain::show_ranges(&span.missing);
            if from_next.is_some_and(|n| n <= first) {
                let message = format!(
                    "deltas are missing (revisions {holes}), and the next full holds their history"
                );
                self.note(Some(timeline), &around, "GapIsCovered", message);
                return;
            }
            let e = Reason::RevisionGap.error(format!(
                "the deltas after {} have a gap: missing are revisions {holes}",
                self.path(span.base)
            ));
            self.error(&e, Some(timeline), &around);
            return;
        }
        let Some((_, holds)) = span.next else { return };
        let first = from_next.unwrap_or(holds);
        if span.reached.next() < first {
            let message = format!(
                "revisions {} are in no snapshot: no deltas lead up to the full after them",
                chain::show_ranges(&[(span.reached.next(), first.previous())])
            );
            self.note(Some(timeline), &around, "RevisionsNotCovered", message);
        }
    }

    /// Folds a chain. Gives the compacted revision of its hash; `None` where it does not fold.
    fn fold(
        &mut self,
        timeline: &Timeline,
        chain: &Chain,
        outcome: &mut ChainOutcome,
    ) -> Result<Option<Revision>> {
        if !self.is_usable(chain) {
            return Ok(None);
        }
        match self.fold_at(timeline, chain, None) {
            Ok((hash, events)) => {
                outcome.hash_kv = Some(hash.hash);
                outcome.compact_revision = Some(hash.compact_revision);
                outcome.live_keys = Some(hash.live_keys);
                outcome.events = Some(events);
                Ok(Some(hash.compact_revision))
            }
            Err(e) if e.reason().is_bad_data() => {
                let message = e.to_string();
                // What does not fit begins its message.
                let at: Vec<usize> = (0..self.scan.catalog.snapshots.len())
                    .filter(|&i| message.starts_with(&self.ctx.store.name(&self.path(i))))
                    .collect();
                let about = match at.is_empty() {
                    true => &[chain.base],
                    false => at.as_slice(),
                };
                self.error(&e, Some(timeline), about);
                self.bad.extend(at);
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// HashKV of a chain at its end, as if compacted there, or with all the history that it has. Gives the events, too.
    fn fold_at(
        &self,
        timeline: &Timeline,
        chain: &Chain,
        compact: Option<Revision>,
    ) -> Result<(HashKv, u64)> {
        let ctx = self.ctx;
        let _step = Step::new(format!("fold {}", self.snapshot(chain.base).name), None);
        let source = Source::of_chain(ctx, self.scan, timeline, chain)?;
        let compact = match compact {
            Some(compact) => compact,
            None => source.compact_revision(ctx, KeepHistory::All)?,
        };
        source.hash(ctx, compact, false)
    }

    /// Whether the next full holds what the chain up to it folds to, with the history that both have.
    fn compare_with_next(
        &mut self,
        timeline: &Timeline,
        span: &Span,
        compact: Revision,
        outcome: &mut ChainOutcome,
    ) -> Result<()> {
        let Some((next, holds)) = span.next.filter(|n| !self.bad.contains(&n.0)) else {
            return Ok(());
        };
        let Some(&base) = self.known.get(&next) else {
            return Ok(());
        };
        // The newest revision that both hold.
        let at = span.reached.min(holds);
        if at < base.first_revision() {
            return Ok(());
        }
        let ours = chain_of(span, at);
        let theirs = Chain {
            base: next,
            deltas: Vec::new(),
            target: at,
        };
        let compact = compact.max(base.compact_revision);
        let hashes = self
            .fold_at(timeline, &ours, Some(compact))
            .and_then(|(ours, _)| {
                let known = self.read.get(&next).and_then(|r| r.hash);
                let is_it = |h: &HashKv| h.compact_revision == compact && at == base.revision;
                Ok(match known.filter(is_it) {
                    Some(theirs) => (ours, theirs),
                    None => (ours, self.fold_at(timeline, &theirs, Some(compact))?.0),
                })
            });
        let (ours, theirs) = match hashes {
            Ok(hashes) => hashes,
            Err(e) if e.reason().is_bad_data() => {
                self.error(&e, Some(timeline), &[span.base, next]);
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let equal = (ours.hash, ours.live_keys) == (theirs.hash, theirs.live_keys);
        outcome.equals_next = Some(equal);
        if !equal {
            let e = Reason::HistoryMismatch.error(format!(
                "at revision {at} {} and its deltas fold to HashKV {} with {} keys, and {} holds HashKV {} with {} keys (both compacted at {compact}): they tell different histories, or one of them was made of damaged data",
                self.path(span.base),
                ours.hash,
                ours.live_keys,
                self.path(next),
                theirs.hash,
                theirs.live_keys
            ));
            self.error(&e, Some(timeline), &[span.base, next]);
        }
        Ok(())
    }

    /// What can be restored without what is bad.
    fn restorable(&self) -> Vec<Restorable> {
        let mut all = Vec::new();
        for t in &self.scan.timelines.all {
            let ranges = chain::restorable(&self.scan.catalog, &self.good(t), &self.known);
            all.extend(Restorable::of(t, ranges));
        }
        all
    }

    fn newest(&self, timeline: &Timeline, restorable: &[Restorable]) -> Option<Newest> {
        let ours = restorable.iter().filter(|r| r.timeline == timeline.id);
        let range = ours.max_by_key(|r| r.last_revision)?;
        let good = self.good(timeline);
        let members = || good.members.iter().map(|m| m.snapshot);
        let newest = members().max_by_key(|&i| (self.snapshot(i).name.created, i))?;
        let reaches = |i: &usize| {
            let name = &self.snapshot(*i).name;
            let holds = self
                .known
                .get(i)
                .map_or(name.last, |b| b.revision.max(name.last));
            name.start <= range.last_revision && holds >= range.last_revision
        };
        let time_of = |i: usize| {
            let survey = self.scan.contents.surveys.get(&i);
            let read = self.read.get(&i).and_then(|r| r.last_time);
            let told = read.or(survey.and_then(|s| s.last_time));
            told.unwrap_or_else(|| self.snapshot(i).name.created_at())
        };
        let created = self.snapshot(newest).name.created_at();
        let age = Utc::now().signed_duration_since(created);
        Some(Newest {
            timeline: timeline.id.clone(),
            first_revision: range.first_revision,
            last_revision: range.last_revision,
            last_time: members()
                .filter(reaches)
                .map(time_of)
                .min()
                .unwrap_or(created),
            snapshot: self.path(newest),
            snapshot_created: created,
            snapshot_age_seconds: age.num_milliseconds() as f64 / 1000.0,
        })
    }

    /// Starts an etcd on the newest state of a timeline, where that can be folded.
    fn drill(&mut self, timeline: &Timeline, options: &drill::Options) -> Result<()> {
        let chains = self.chains.iter().rev();
        let ours = chains.filter(|c| c.timeline == timeline.id);
        let newest = ours.max_by_key(|c| c.last_revision);
        let expected = newest.and_then(|c| {
            Some(drill::Expected {
                revision: c.last_revision,
                hash_kv: c.hash_kv?,
                compact_revision: c.compact_revision?,
            })
        });
        let Some(expected) = expected else {
            let message = format!(
                "no etcd was started on timeline {}: it cannot be folded to its end",
                timeline.id
            );
            self.note(Some(timeline), &[], "DrillSkipped", message);
            return Ok(());
        };
        let mut drill = drill::run(self.ctx, options, &timeline.id, expected)?;
        let failure = drill.failure.take();
        self.drills.push(drill);
        if let Some(e) = failure {
            self.error(&e, Some(timeline), &[]);
        }
        Ok(())
    }
}

fn chain_of(span: &Span, target: Revision) -> Chain {
    Chain {
        base: span.base,
        deltas: span.deltas.clone(),
        target,
    }
}

/// Reads snapshots to their ends, some at once; of fulls one at a time, each of which needs a file of its size. What
/// is wrong with one stands at it.
fn check_all(ctx: &Context, scan: &Scan, which: &[usize]) -> Result<BTreeMap<usize, Result<Read>>> {
    let fulls = Mutex::new(());
    let results = Mutex::new(BTreeMap::new());
    let reading = Reading::new(ctx, which.iter().map(|&i| &scan.catalog.snapshots[i]));
    first(ctx.threads.min(AT_ONCE), which.len(), |nth| {
        let alone = (reading.snapshot(nth).name.is_full()).then(|| lock(&fulls));
        let result = read_whole(ctx, &reading, nth);
        drop(alone);
        match result {
            Err(e) if !e.reason().is_bad_data() => Err(e),
            result => {
                let mut results = lock(&results);
                results.insert(which[nth], result);
                Ok(None::<()>)
            }
        }
    })?;
    Ok(unpoisoned(results.into_inner()))
}

/// Reads a snapshot to its end, and checks all that can be seen in it alone.
fn read_whole(ctx: &Context, reading: &Reading<'_>, nth: usize) -> Result<Read> {
    let snapshot = reading.snapshot(nth);
    let at = ctx.at(snapshot);
    match snapshot.name.kind {
        Kind::Full => {
            let (db, base) = reading.full(nth)?;
            let hash = read_every_page(&db).map_err(at)?;
            Ok(Read {
                base: Some(base),
                hash: Some(hash),
                last_time: None,
            })
        }
        Kind::Incr => {
            let mut delta = reading.delta_in_turn(nth)?;
            let (mut value, mut last_time) = (Vec::new(), None);
            while let Some(e) = delta.next().map_err(&at)? {
                value.clear();
                e.change.append_value(e.main, &mut value).map_err(&at)?;
                // Only who asks for a time needs one.
                if let Ok(time) = e.instant() {
                    last_time = last_time.max(Some(time));
                }
            }
            Ok(Read {
                last_time,
                ..Read::default()
            })
        }
    }
}

impl Outcome {
    /// What metrics tell of it.
    pub fn metrics(&self) -> crate::telemetry::metrics::Verified {
        let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
        for f in &self.findings {
            *counts.entry(f.reason).or_default() += 1;
        }
        let errors = self
            .findings
            .iter()
            .filter(|f| f.severity == Severity::Error);
        let newest = self.newest.as_ref();
        let took: f64 = self.drills.iter().map(|d| d.seconds).sum();
        let drill = (!self.drills.is_empty()).then(|| {
            let succeeded = self.drills.iter().all(|d| d.succeeded);
            (succeeded, Duration::from_secs_f64(took.max(0.0)))
        });
        crate::telemetry::metrics::Verified {
            errors: errors.count() as u64,
            findings: counts.into_iter().collect(),
            snapshots: self.snapshots_read as u64,
            read_bytes: self.bytes_read,
            newest: newest.map(|n| (n.snapshot_created, n.snapshot_age_seconds)),
            drill,
        }
    }
}
