//! Copies backups from one store to another: once, or for as long as it lives.
//!
//! `plan` decides, `round` carries out, `transfer` moves the bytes. Nothing in the target is ever deleted or
//! overwritten, and no delta is named there before its full, nor, but for large plans in object stores, before what it
//! follows.

mod identity;
mod notes;
pub mod plan;
mod round;
mod transfer;

use self::plan::{Decision, Encryption, Plan, Planned, Wanted, Why, plan};
use self::round::{Done, Round};
use crate::backup::catalog::{V1, V2};
use crate::backup::trust;
use crate::backup::{Catalog, Kind, Snapshot, SnapshotName};
use crate::base::shorten;
use crate::error::{Error, Reason, Result};
use crate::ops::Context;
use crate::ops::report::{FailureFields, Report, ReportBuilder};
use crate::ops::scan::{TAGS_UNREADABLE, by_names, untrusted_error, untrusted_warning};
use crate::telemetry::metrics::{Metrics, SnapshotKind};
use chrono::Utc;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

/// Listings of a run: each settles what vanished, or failed and may be mended, since the one before.
const MOST_ROUNDS: u64 = 5;
/// Before a store that failed is asked again.
const PAUSE: Duration = Duration::from_secs(1);
/// What a follower remembers is looked at anew so often: whether a snapshot of the target is excluded, by its tags,
/// and what was found to be damaged, for it may have been on its way.
const MEMORY: Duration = Duration::from_secs(3600);
/// Warnings that the outcome of a follower has at most, and failures.
const LISTED: usize = 100;

/// What to copy, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// Which snapshots, and what becomes of their bytes.
    pub wanted: Wanted,
    /// Snapshots of 1 MiB and more under way at once; 1 or more. Each holds about 32 MiB. Of smaller ones as many as the
    /// stores take requests.
    pub parallel: usize,
    /// Wait first until the source's newest full is marked final.
    pub wait_for_final: Option<WaitForFinal>,
    /// How often the source is listed, while it is waited for or followed.
    pub interval: Duration,
    /// The target may be the backup of another cluster; from now on it is the source's.
    pub take_over: bool,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// How long a final snapshot is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitForFinal {
    /// What is there is copied then; zero waits for ever.
    pub timeout: Duration,
}

/// How it ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// Something was copied (or would be, in a dry run).
    Succeeded,
    /// The target had all that is wanted.
    #[default]
    NothingToDo,
    /// Some of it could not be copied.
    Failed,
}

/// What was done. The fields are a contract: `docs/copy-result.schema.json`.
#[derive(Debug, Clone, Default, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Why, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// The source's URL.
    pub from: String,
    /// The target's URL.
    pub to: String,
    /// Whether only a plan was made.
    pub dry_run: bool,
    /// Full snapshots in the source that may be used: each with its deltas is a backup.
    pub backups: u64,
    /// Those that the limits let through.
    pub backups_wanted: u64,
    /// Snapshots copied (in a dry run: to be copied). Of a follower: since it began.
    pub copied: u64,
    /// Snapshots that the target had already. Of a follower: at the last listing.
    pub kept: u64,
    /// Snapshots that are not wanted, or would be of no use. Of a follower: at the last listing.
    pub skipped: u64,
    /// Snapshots that could not be copied. Of a follower: at the last listing.
    pub failed: u64,
    /// Encrypted snapshots that were copied as they are and not checked inside, for want of a key.
    pub unchecked: u64,
    /// Each snapshot of the source. A follower tells only those that failed at the last listing, 100 at most.
    pub objects: Vec<ObjectOutcome>,
    /// The path of the final snapshot that was waited for; null if none was, or none came in time.
    pub final_snapshot: Option<String>,
    /// How long it was waited for; null if it was not.
    pub waited_seconds: Option<f64>,
    /// How often the stores were listed and compared.
    pub rounds: u64,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Bytes of the snapshots written to the target.
    pub bytes_written: u64,
}

/// What became of a snapshot of the source.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct ObjectOutcome {
    /// Its path in the source, below the prefix.
    pub path: String,
    /// Its path in the target. The name's suffixes differ if it is compressed or encrypted otherwise.
    pub target_path: String,
    /// Its size in the source.
    pub bytes: u64,
    /// What became of it. `Copied`: it is copied (in a dry run: would be). `Kept`: the target had it.
    /// `Skipped`: it is not wanted, or would be of no use. `Failed`: it could not be copied.
    pub decision: Fate,
    /// Why. Copied: `Wanted`, or `NeededByNewer` if a delta that is wanted needs it. Kept: `AlreadyThere`, or
    /// `ThereInOtherForm` if the target has it compressed or encrypted otherwise. Skipped: `Excluded`,
    /// `BeyondMaxBackups`, `TooOld`, `NoBase` where what it follows is in neither store, `BaseNotCopied` if
    /// that could not be copied, `SameAsAnother`. Failed: a reason of exit-codes.md, or `NotTried` if the run
    /// ended before.
    pub reason: &'static str,
    /// Why, for people: it may change.
    pub message: String,
}

/// See [`ObjectOutcome`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Fate {
    /// It is copied, or would be.
    Copied,
    /// The target had it.
    Kept,
    /// It is not wanted, or would be of no use.
    Skipped,
    /// It could not be copied.
    Failed,
}

/// Copies once.
///
/// # Errors
/// What kept it from beginning: `NoSnapshots`, `OtherCluster`, `Usage`, `CannotDecrypt`, the stores';
/// `Terminated`.
pub fn run(from: &Context, to: &Context, options: &Options) -> Result<Report<Outcome>> {
    let mut copier = Copier::new(from, to, options);
    copier.wait_for_final()?;
    let failure = copier.rounds(true)?;
    Ok(copier.report(failure))
}

/// Copies again and again until it is cancelled. What fails and may be mended is logged, counted and tried
/// again.
///
/// # Errors
/// What no retry mends, where nothing at all could be copied because of it.
pub fn follow(
    from: &Context,
    to: &Context,
    options: &Options,
    metrics: &Metrics,
) -> Result<Report<Outcome>> {
    let mut copier = Copier::new(from, to, options);
    copier.metrics = Some(metrics.clone());
    match copier.follow() {
        Err(e) if e.reason() != Reason::Terminated => Err(e),
        _ => Ok(copier.report(None)),
    }
}

struct Copier<'a> {
    from: &'a Context,
    to: &'a Context,
    options: &'a Options,
    metrics: Option<Metrics>,
    clock: ReportBuilder,
    outcome: Outcome,
    /// What earlier rounds have copied, by path in the source.
    copied: BTreeMap<String, ObjectOutcome>,
    /// What was found to be damaged: size and failure by path in the source.
    damaged: HashMap<String, (u64, Error)>,
    /// What the tags of the target's snapshots say.
    tags: HashMap<String, bool>,
    remembers_since: Instant,
    warned: HashSet<String>,
    /// Bytes read and written that metrics know.
    measured: (u64, u64),
}

/// Both stores, as they are listed.
struct Listings {
    source: Catalog,
    target: Catalog,
}

impl<'a> Copier<'a> {
    fn new(from: &'a Context, to: &'a Context, options: &'a Options) -> Self {
        Copier {
            from,
            to,
            options,
            metrics: None,
            clock: ReportBuilder::start(),
            outcome: Outcome {
                from: from.store.url().to_owned(),
                to: to.store.url().to_owned(),
                dry_run: options.dry_run,
                ..Outcome::default()
            },
            copied: BTreeMap::new(),
            damaged: HashMap::new(),
            tags: HashMap::new(),
            remembers_since: Instant::now(),
            warned: HashSet::new(),
            measured: (0, 0),
        }
    }

    /// Waits until the source's newest full is marked final, or long enough.
    fn wait_for_final(&mut self) -> Result<()> {
        let Some(wait) = self.options.wait_for_final else {
            return Ok(());
        };
        let since = Instant::now();
        let found = loop {
            match self.newest_final() {
                Ok(Some(name)) => break Some(name),
                Ok(None) => {}
                Err(e) if e.reason().is_retryable() || e.reason() == Reason::NoSnapshots => {
                    self.failed(&e);
                }
                Err(e) => return Err(e),
            }
            let mut pause = self.options.interval;
            if !wait.timeout.is_zero() {
                let left = wait.timeout.saturating_sub(since.elapsed());
                if left.is_zero() {
                    break None;
                }
                pause = pause.min(left);
            }
            tracing::info!("waiting for a final snapshot");
            self.sleep(pause)?;
        };
        if found.is_none() {
            self.warn(format!(
                "no final snapshot came in {} s: what is there is copied",
                since.elapsed().as_secs()
            ));
        }
        self.outcome.waited_seconds = Some(since.elapsed().as_secs_f64());
        self.outcome.final_snapshot = found;
        Ok(())
    }

    /// The source's newest full that may be used, if it is marked final.
    fn newest_final(&self) -> Result<Option<String>> {
        let mut catalog = by_names(self.from)?;
        self.mark_untrusted(&mut catalog);
        let usable: Vec<usize> = catalog.usable().collect();
        let fulls = usable.into_iter().rev().map(|i| &catalog.snapshots[i]);
        for s in fulls.filter(|s| s.name.is_full()) {
            let path = std::slice::from_ref(&s.path);
            if self.from.store.excluded_by_tag(path)? == [false] {
                return Ok(s.name.is_final.then(|| s.path.clone()));
            }
        }
        Ok(None)
    }

    fn sleep(&self, pause: Duration) -> Result<()> {
        let cancel = self.from.store.cancel();
        let pause = async { cancel.or(tokio::time::sleep(pause)).await };
        self.from.store.handle().block_on(pause)
    }

    fn warn(&mut self, message: String) {
        if self.warned.len() < LISTED && self.warned.insert(message.clone()) {
            self.clock.warn(message);
        }
    }

    fn failed(&self, e: &Error) {
        tracing::warn!(reason = e.reason().as_str(), "{e}");
        if let Some(metrics) = &self.metrics {
            metrics.failed("copy", e.reason());
        }
    }

    fn follow(&mut self) -> Result<()> {
        self.wait_for_final()?;
        loop {
            let before = self.outcome.copied;
            match self.rounds(self.outcome.rounds == 0) {
                Ok(None) => {
                    if let Some(metrics) = &self.metrics {
                        metrics.in_step();
                    }
                }
                Ok(Some(e)) => {
                    let nothing = self.outcome.copied == before && self.outcome.kept == 0;
                    if nothing && !may_mend(&e) {
                        return Err(e);
                    }
                }
                Err(e) if may_mend(&e) => self.failed(&e),
                Err(e) => return Err(e),
            }
            self.measure();
            self.sleep(self.options.interval)?;
        }
    }

    /// Lists and copies until nothing is left that another listing may settle. Gives what failed.
    fn rounds(&mut self, first: bool) -> Result<Option<Error>> {
        if first && !self.options.dry_run {
            self.to.store.clean_staging(Utc::now());
        }
        for round in 1.. {
            let listings = match self.look() {
                Ok(listings) => listings,
                // What was copied before is told.
                Err(e) if round > 1 && e.reason() != Reason::Terminated => return Ok(Some(e)),
                Err(e) => return Err(e),
            };
            if round == 1 {
                self.refuse_strangers(&listings)?;
                let (take_over, dry_run) = (self.options.take_over, self.options.dry_run);
                identity::carry(self.from, self.to, take_over, dry_run)?;
            }
            let plan = plan(
                &listings.source,
                &listings.target,
                &self.options.wanted,
                Utc::now().timestamp(),
            );
            self.check_form(&listings, &plan)?;
            self.outcome.rounds += 1;
            self.outcome.backups = plan.backups as u64;
            self.outcome.backups_wanted = plan.backups_wanted as u64;
            self.warn_of(&listings.source, &plan);
            let mut done = BTreeMap::new();
            if !self.options.dry_run {
                done = Round {
                    from: self.from,
                    to: self.to,
                    options: self.options,
                    source: &listings.source,
                    plan: &plan,
                    target: &listings.target,
                    damaged: &self.damaged,
                }
                .run()?;
            }
            let copied = self.outcome.bytes_written;
            self.count(&listings.source, &plan, &done);
            // What has its name counts, though a signal ended the round.
            self.from.store.cancel().check()?;
            let failures = self.record(&listings.source, &plan, done);
            self.measure();
            let any = |reason| failures.iter().any(|e| e.reason() == reason);
            let vanished = any(Reason::SnapshotVanished);
            let away = any(Reason::StoreUnreachable);
            let progress = self.outcome.bytes_written > copied;
            if round >= MOST_ROUNDS || !(vanished || away && progress) {
                return Ok(worst(failures, self.outcome.copied + self.outcome.kept > 0));
            }
            if away {
                self.sleep(PAUSE.min(self.options.interval))?;
            }
            tracing::info!("looking again: something changed or failed meanwhile");
        }
        Ok(None)
    }

    /// Two backups in one place can be restored by nobody. Where identities do not tell, snapshots of one time of
    /// which none is in both stores do.
    fn refuse_strangers(&self, Listings { source, target }: &Listings) -> Result<()> {
        if self.options.take_over
            || both_recorded(self.from, self.to)?
            || !are_strangers(source, target)
        {
            return Ok(());
        }
        Err(Reason::OtherCluster.error(format!(
            "{} holds other snapshots of the same time as {}, and they have none in common: it looks like the backup of another cluster; check --from and --to, or say --take-over if both are one's",
            self.to.store.url(),
            self.from.store.url()
        )))
    }

    /// Lists both stores.
    fn look(&mut self) -> Result<Listings> {
        let mut source = by_names(self.from)?;
        if source.snapshots.is_empty() {
            return Err(Reason::NoSnapshots.error(format!(
                "{} holds no snapshots (looked for {V2}/ and {V1}/ below it): check --from",
                self.from.store.url()
            )));
        }
        let mut target = by_names(self.to)?;
        if self.remembers_since.elapsed() > MEMORY {
            self.tags.clear();
            self.damaged.clear();
            self.remembers_since = Instant::now();
        }
        let paths = target.snapshots.iter().map(|s| s.path.clone());
        let unknown: Vec<String> = paths.filter(|p| !self.tags.contains_key(p)).collect();
        let told = self.to.store.excluded_by_tag(&unknown)?;
        self.tags.extend(unknown.into_iter().zip(told));
        for s in &mut target.snapshots {
            s.excluded |= self.tags.get(&s.path).copied().unwrap_or_default();
        }
        // What the target has is not copied again, excluded or not.
        let there = identities(&target);
        let is_new =
            |s: &&mut Snapshot| !s.excluded && !there.contains(&plan::identity(&s.path, &s.name));
        let new: Vec<&mut Snapshot> = source.snapshots.iter_mut().filter(is_new).collect();
        let paths: Vec<String> = new.iter().map(|s| s.path.clone()).collect();
        let told = self.from.store.excluded_by_tag(&paths)?;
        for (s, excluded) in new.into_iter().zip(told) {
            s.excluded |= excluded;
        }
        self.leave_out_untrusted(&mut source)?;
        if self.from.store.hides_tags() || self.to.store.hides_tags() {
            self.warn(TAGS_UNREADABLE.to_owned());
        }
        Ok(Listings { source, target })
    }

    /// Where the source is encrypted, its plain snapshots may be anybody's. If they are encrypted on the way, or the others
    /// are decrypted, they look like the others.
    fn mark_untrusted(&self, source: &mut Catalog) {
        let changes = self.options.wanted.form.encryption != Encryption::Keep;
        if changes && source.snapshots.iter().any(|s| s.name.is_encrypted) {
            self.from.trust.mark(source);
        }
    }

    /// A follower goes on without what may be anybody's.
    fn leave_out_untrusted(&mut self, source: &mut Catalog) -> Result<()> {
        self.mark_untrusted(source);
        let trust = &self.from.trust;
        let untrusted = trust::untrusted(source, trust);
        if !untrusted.refused.is_empty() && self.metrics.is_none() {
            let which = &untrusted.refused;
            return Err(untrusted_error(&self.from.store, source, &untrusted, which));
        }
        if let Some(warning) = untrusted_warning(source, &untrusted) {
            self.warn(warning);
        }
        source.snapshots.retain(|s| !s.untrusted);
        Ok(())
    }

    /// Whether what is wanted can be made of what is encrypted.
    fn check_form(&self, Listings { source, target }: &Listings, plan: &Plan) -> Result<()> {
        let form = &self.options.wanted.form;
        if form.encryption == Encryption::Keep
            && let Some((there, new)) = plain_behind_encrypted(source, target, plan)
        {
            return Err(Reason::Configuration.error(format!(
                "{} is encrypted and the source's is not, and {new} would come beside it as plain text: say with --age-recipient or --age-recipients-file for whom to encrypt it, or ask for plain text with --decrypt",
                self.to.store.name(&there)
            )));
        }
        for p in plan.objects.iter().filter(|p| p.decision == Decision::Copy) {
            let s = &source.snapshots[p.source];
            if !s.name.is_encrypted || form.is_verbatim(&s.name) {
                continue;
            }
            let name = self.from.store.name(&s.path);
            if form.encryption == Encryption::Keep {
                return Err(Reason::Usage.error(format!(
                    "{name} is encrypted, and to compress it anew it has to be opened: name who shall read it with --age-recipient, or ask for plain text with --decrypt"
                )));
            }
            if !self.from.keys.decrypts() {
                return Err(Reason::CannotDecrypt.error(format!(
                    "{name} is encrypted: give the age identity that opens it with --age-identity"
                )));
            }
        }
        Ok(())
    }

    fn warn_of(&mut self, source: &Catalog, plan: &Plan) {
        if !source.foreign.is_empty() {
            self.warn(format!(
                "left alone, for their names are not those of snapshots: {}",
                shorten::line(&source.foreign, ", ", shorten::IN_LIST)
            ));
        }
        if plan.backups > 0 && plan.backups_wanted == 0 {
            self.warn("all backups are older than is wanted: nothing is copied".to_owned());
        }
        let useless = plan.objects.iter().filter(|p| p.why == Why::NoBase);
        let useless: Vec<&str> = useless
            .map(|p| source.snapshots[p.source].path.as_str())
            .collect();
        if !useless.is_empty() {
            self.warn(format!(
                "not copied, for what they follow is neither in the source nor in the target: {}",
                shorten::line(&useless, ", ", shorten::IN_JSON)
            ));
        }
        let form = &self.options.wanted.form;
        if let Some(e) = form.encoding
            && !e.compression.is_read_by_others()
        {
            self.warn(format!(
                "{} is deltafold's own addition to the format: etcd-backup-restore cannot read these snapshots",
                e.compression
            ));
        }
    }

    /// Counts what was copied.
    fn count(&mut self, source: &Catalog, plan: &Plan, done: &BTreeMap<usize, Done>) {
        for (i, p) in plan.objects.iter().enumerate() {
            match done.get(&i) {
                Some(Done::Copied(bytes, checked)) => {
                    self.outcome.copied += 1;
                    self.outcome.bytes_written += bytes;
                    self.outcome.unchecked += u64::from(!checked);
                    if let Some(metrics) = &self.metrics {
                        metrics.copied(match source.snapshots[p.source].name.kind {
                            Kind::Full => SnapshotKind::Full,
                            Kind::Incr => SnapshotKind::Delta,
                        });
                    }
                }
                None if p.decision == Decision::Copy => self.outcome.copied += 1,
                _ => {}
            }
        }
    }

    /// Notes what became of all of the source, and gives what failed.
    fn record(
        &mut self,
        source: &Catalog,
        plan: &Plan,
        mut done: BTreeMap<usize, Done>,
    ) -> Vec<Error> {
        let mut failures = Vec::new();
        let mut told = Vec::with_capacity(plan.objects.len());
        for (i, p) in plan.objects.iter().enumerate() {
            let s = &source.snapshots[p.source];
            let (decision, reason, message) = self.fate(p, done.remove(&i), &mut failures);
            if let Some(e) = failures.last().filter(|_| decision == Fate::Failed)
                && e.reason().is_bad_data()
            {
                let again = e.again();
                self.damaged.insert(s.path.clone(), (s.bytes, again));
            }
            told.push(ObjectOutcome {
                path: s.path.clone(),
                target_path: p.path.clone(),
                bytes: s.bytes,
                decision,
                reason,
                message,
            });
        }
        if let Some(metrics) = &self.metrics {
            for e in &failures {
                metrics.failed("copy", e.reason());
            }
        }
        self.tell(told);
        failures
    }

    /// What became of one: a word, and a sentence.
    fn fate(
        &self,
        p: &Planned,
        done: Option<Done>,
        failures: &mut Vec<Error>,
    ) -> (Fate, &'static str, String) {
        let as_planned = |fate| (fate, p.why.as_str(), p.why.in_words().to_owned());
        let e = match (p.decision, done) {
            (Decision::Keep, _) => return as_planned(Fate::Kept),
            (Decision::Skip, _) => return as_planned(Fate::Skipped),
            (Decision::Conflict, _) => conflict(&self.to.store.name(&p.path)),
            (Decision::Copy, None | Some(Done::Copied(..))) => return as_planned(Fate::Copied),
            (Decision::Copy, Some(Done::There)) => {
                let message = "somebody else has put it there meanwhile".to_owned();
                return (Fate::Kept, Why::AlreadyThere.as_str(), message);
            }
            (Decision::Copy, Some(Done::NoBase)) => {
                let message = "what it follows could not be copied".to_owned();
                return (Fate::Skipped, "BaseNotCopied", message);
            }
            (Decision::Copy, Some(Done::NotTried)) => {
                let message = "the run ended before it was its turn".to_owned();
                return (Fate::Failed, "NotTried", message);
            }
            (Decision::Copy, Some(Done::Failed(e))) => e,
        };
        let told = (Fate::Failed, e.reason().as_str(), e.to_string());
        failures.push(e);
        told
    }

    /// Notes the state of all objects after a round.
    fn tell(&mut self, mut told: Vec<ObjectOutcome>) {
        let follows = self.metrics.is_some();
        if !follows {
            // What an earlier round copied this one has found there, or the source has no more.
            for o in &mut told {
                if let Some(copied) = self.copied.remove(&o.path) {
                    *o = copied;
                }
            }
            told.extend(std::mem::take(&mut self.copied).into_values());
            told.sort_by_key(|o| o.decision != Fate::Copied);
            let copied = told.iter().filter(|o| o.decision == Fate::Copied);
            self.copied = copied.map(|o| (o.path.clone(), o.clone())).collect();
        }
        let count = |fate| told.iter().filter(|o| o.decision == fate).count() as u64;
        self.outcome.kept = count(Fate::Kept);
        self.outcome.skipped = count(Fate::Skipped);
        self.outcome.failed = count(Fate::Failed);
        if follows {
            told.retain(|o| o.decision == Fate::Failed);
            told.truncate(LISTED);
        }
        self.outcome.objects = told;
    }

    fn measure(&mut self) {
        let (read, written) = (self.from.store.bytes_read(), self.outcome.bytes_written);
        if let Some(metrics) = &self.metrics {
            metrics.store_read(read - self.measured.0);
            metrics.store_written(written - self.measured.1);
            metrics.to_copy(self.outcome.failed);
        }
        self.measured = (read, written);
    }

    fn report(mut self, failure: Option<Error>) -> Report<Outcome> {
        let o = &mut self.outcome;
        if o.copied > 0 {
            o.status = Status::Succeeded;
        }
        if failure.is_some() {
            o.status = Status::Failed;
        }
        o.error = FailureFields::from(&failure);
        if o.unchecked > 0 {
            self.clock.warnings.push(format!(
                "{} encrypted snapshots were copied as they are and not checked inside: give the identity that opens them with --age-identity",
                o.unchecked
            ));
        }
        o.bytes_read = self.from.store.bytes_read();
        self.clock.report_with(self.outcome, failure)
    }
}

fn conflict(name: &str) -> Error {
    Reason::TargetExists.error(format!(
        "{name} is another object than the source's: look at both, and delete the wrong one"
    ))
}

/// Whether both stores tell whose backup they are.
fn both_recorded(from: &Context, to: &Context) -> Result<bool> {
    use crate::ops::identity::read;
    Ok(read(&from.store)?.is_some() && read(&to.store)?.is_some())
}

/// What is in a store, whatever its form.
fn identities(catalog: &Catalog) -> HashSet<String> {
    let all = catalog.snapshots.iter();
    all.map(|s| plan::identity(&s.path, &s.name)).collect()
}

/// Whether the stores have no snapshot in common, although the target's go on after the source's began.
fn are_strangers(source: &Catalog, target: &Catalog) -> bool {
    let oldest = source.snapshots.iter().map(|s| s.name.created).min();
    let newest = target.snapshots.iter().map(|s| s.name.created).max();
    match (oldest, newest) {
        (Some(oldest), Some(newest)) if newest >= oldest => {
            identities(source).is_disjoint(&identities(target))
        }
        _ => false,
    }
}

/// A snapshot of the target that was encrypted on its way there, and one that would now come as plain text: somebody
/// who encrypts copies wants all of them to be so.
fn plain_behind_encrypted(
    source: &Catalog,
    target: &Catalog,
    plan: &Plan,
) -> Option<(String, SnapshotName)> {
    let is_plain_copy = |p: &&Planned| p.decision == Decision::Copy && !p.name.is_encrypted;
    let new = plan.objects.iter().find(is_plain_copy)?;
    let encrypted = target.snapshots.iter().filter(|t| t.name.is_encrypted);
    let encrypted: HashMap<String, &str> = encrypted
        .map(|t| (plan::identity(&t.path, &t.name), t.path.as_str()))
        .collect();
    let there = plan.objects.iter().find_map(|p| {
        let s = &source.snapshots[p.source];
        let sealed = p.why == Why::ThereInOtherForm && !s.name.is_encrypted;
        sealed.then(|| encrypted.get(&plan::identity(&s.path, &s.name)))?
    })?;
    Some(((*there).to_owned(), new.name.clone()))
}

/// Whether a follower goes on after such a failure.
fn may_mend(e: &Error) -> bool {
    let of_the_data = e.reason().is_bad_data() || e.reason() == Reason::TargetExists;
    e.reason().is_retryable() || of_the_data || e.reason() == Reason::NoSnapshots
}

/// What stands for all that failed: what needs a hand first.
fn worst(failures: Vec<Error>, partly: bool) -> Option<Error> {
    let count = failures.len();
    let rank = |e: &Error| match e.reason() {
        r if r.is_bad_data() => 0,
        Reason::TargetExists => 1,
        r if !r.is_retryable() => 2,
        _ => 3,
    };
    let first = failures.into_iter().min_by_key(rank)?;
    let reason = match first.reason() {
        r if r.is_retryable() && partly => Reason::PartlyDone,
        r => r,
    };
    let message = match count {
        1 => first.to_string(),
        n => format!("{first}; {} more snapshots could not be copied", n - 1),
    };
    Some(reason.error(message))
}
