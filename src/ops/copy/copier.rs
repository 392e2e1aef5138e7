//! The copier: waits for a final snapshot, and copies in rounds, each with a new listing of both stores.
//!
//! `plan` decides what a round copies, `round` copies it.

use super::failures::{is_recoverable, summarize};
use super::plan::{CopyReason, Plan, plan};
use super::round::Round;
use super::{
    CopiedBackup, CopiedObject, Listings, MOST_LISTED, Options, checks,
    identity as cluster_identity,
};
use crate::backup::{Catalog, trust};
use crate::base::opt::MAX_BACKUP_AGE;
use crate::base::shorten;
use crate::error::{Error, Reason, Result};
use crate::ops::report::ReportBuilder;
use crate::prefix::Context;
use crate::prefix::scan::{
    TAGS_UNREADABLE, by_names, no_snapshots_error, untrusted_error, untrusted_warning,
};
use crate::telemetry::metrics::Metrics;
use chrono::Utc;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most rounds of a run. Each handles what vanished, or failed and may work now, in the one before.
const MOST_ROUNDS: u64 = 5;
/// The pause before a round after a failure of a store.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a follower remembers which snapshots are damaged: they may have been incomplete.
const MEMORY: Duration = Duration::from_secs(3600);

/// A copy under way.
pub(super) struct Copier<'a> {
    pub(super) from: &'a Context,
    pub(super) to: &'a Context,
    pub(super) options: &'a Options,
    /// Given to a follower only.
    pub(super) metrics: Option<Metrics>,
    pub(super) clock: ReportBuilder,
    pub(super) outcome: CopiedBackup,
    /// What earlier rounds copied, by path in the source.
    pub(super) copied: BTreeMap<String, CopiedObject>,
    /// The damaged snapshots: size and error by path in the source.
    pub(super) damaged: HashMap<String, (u64, Error)>,
    /// When `damaged` was last cleared.
    remembered_since: Instant,
    /// The warnings so far; each is given once.
    warned: HashSet<String>,
    /// Bytes read and written that are already counted in the metrics.
    pub(super) counted_bytes: (u64, u64),
}

impl<'a> Copier<'a> {
    pub(super) fn new(from: &'a Context, to: &'a Context, options: &'a Options) -> Self {
        Copier {
            from,
            to,
            options,
            metrics: None,
            clock: ReportBuilder::start(),
            outcome: CopiedBackup {
                from: from.store.url().to_owned(),
                to: to.store.url().to_owned(),
                dry_run: options.dry_run,
                ..CopiedBackup::default()
            },
            copied: BTreeMap::new(),
            damaged: HashMap::new(),
            remembered_since: Instant::now(),
            warned: HashSet::new(),
            counted_bytes: (0, 0),
        }
    }

    /// Waits until the source's newest full is marked final, or the timeout passes, if the options ask
    /// for it.
    pub(super) fn wait_for_final(&mut self) -> Result<()> {
        let Some(wait) = self.options.wait_for_final else {
            return Ok(());
        };
        let begun = Instant::now();
        let final_path = loop {
            match self.newest_final() {
                Ok(Some(path)) => break Some(path),
                Ok(None) => {}
                Err(e) if e.reason().is_retryable() || e.reason() == Reason::NoSnapshots => {
                    self.log_failure(&e);
                }
                Err(e) => return Err(e),
            }
            let mut pause = self.options.interval;
            if !wait.timeout.is_zero() {
                let left = wait.timeout.saturating_sub(begun.elapsed());
                if left.is_zero() {
                    break None;
                }
                pause = pause.min(left);
            }
            tracing::info!("waiting for a final snapshot");
            self.sleep(pause)?;
        };
        if final_path.is_none() {
            self.warn(format!(
                "no final snapshot came in {} s: copying what the source holds",
                begun.elapsed().as_secs()
            ));
        }
        self.outcome.waited_seconds = Some(begun.elapsed().as_secs_f64());
        self.outcome.final_snapshot = final_path;
        Ok(())
    }

    /// Returns the path of the source's newest usable full, if it is marked final.
    fn newest_final(&self) -> Result<Option<String>> {
        let mut catalog = by_names(&self.from.store)?;
        self.from.trust.mark(&mut catalog);
        let usable: Vec<usize> = catalog.usable().collect();
        for i in usable.into_iter().rev() {
            let snapshot = &catalog.snapshots[i];
            if !snapshot.name.is_full() {
                continue;
            }
            let path = std::slice::from_ref(&snapshot.path);
            if self.from.store.excluded_by_tag(path)? == [false] {
                return Ok(snapshot.name.is_final.then(|| snapshot.path.clone()));
            }
        }
        Ok(None)
    }

    fn sleep(&self, pause: Duration) -> Result<()> {
        let cancel = self.from.store.cancel();
        let pause = async { cancel.or(tokio::time::sleep(pause)).await };
        self.from.store.handle().block_on(pause)
    }

    /// Adds a warning, unless it was given before.
    fn warn(&mut self, message: String) {
        if self.warned.len() < MOST_LISTED && self.warned.insert(message.clone()) {
            self.clock.warn(message);
        }
    }

    fn log_failure(&self, e: &Error) {
        tracing::warn!(reason = e.reason().as_str(), "{e}");
        if let Some(metrics) = &self.metrics {
            metrics.failed("copy", e.reason());
        }
    }

    /// Copies until it is cancelled. Fails with an error that no retry fixes.
    pub(super) fn follow(&mut self) -> Result<()> {
        self.wait_for_final()?;
        loop {
            let copied_before = self.outcome.copied;
            match self.copy() {
                Ok(None) => {
                    if let Some(metrics) = &self.metrics {
                        metrics.in_step();
                    }
                }
                Ok(Some(e)) if self.options.series.is_some() => {
                    // A file that is not encrypted keeps no later one away.
                    if !is_recoverable(&e) && e.reason() != Reason::Untrusted {
                        return Err(e);
                    }
                    self.log_failure(&e);
                }
                Ok(Some(e)) => {
                    let has_nothing =
                        self.outcome.copied == copied_before && self.outcome.kept == 0;
                    if has_nothing && !is_recoverable(&e) {
                        return Err(e);
                    }
                }
                Err(e) if is_recoverable(&e) => self.log_failure(&e),
                Err(e) => return Err(e),
            }
            self.update_metrics();
            self.sleep(self.options.interval)?;
        }
    }

    /// Copies what is in the source now. Returns one error for all failures.
    pub(super) fn copy(&mut self) -> Result<Option<Error>> {
        let options = self.options;
        match &options.series {
            Some(pattern) => self.import(pattern),
            None => self.copy_rounds(),
        }
    }

    /// Copies in rounds until no further listing helps. Returns one error for all failures of the last
    /// round.
    fn copy_rounds(&mut self) -> Result<Option<Error>> {
        for number in 1.. {
            let listings = match self.list() {
                Ok(listings) => listings,
                // The report must tell what earlier rounds copied.
                Err(e) if number > 1 && e.reason() != Reason::Terminated => return Ok(Some(e)),
                Err(e) => return Err(e),
            };
            if number == 1 {
                let (take_over, dry_run) = (self.options.take_over, self.options.dry_run);
                if !take_over {
                    checks::refuse_strangers(self.from, self.to, &listings)?;
                }
                cluster_identity::claim_target(self.from, self.to, take_over, dry_run)?;
            }
            let plan = plan(
                &listings.source,
                &listings.target,
                &self.options.selection,
                Utc::now().timestamp(),
            );
            let encryption = self.options.selection.encryption;
            checks::check_encryption(self.from, self.to, encryption, &listings, &plan)?;
            self.outcome.rounds += 1;
            self.outcome.backups = plan.backups as u64;
            self.outcome.backups_wanted = plan.backups_wanted as u64;
            self.warn_about_plan(&listings.source, &plan);
            let round = Arc::new(Round {
                from: self.from.clone(),
                to: self.to.clone(),
                options: self.options.clone(),
                listings,
                plan,
            });
            let results = if self.options.dry_run {
                round.plan.objects.iter().map(|_| None).collect()
            } else {
                round.run(&self.damaged)?
            };
            let written_before = self.outcome.bytes_written;
            let (source, plan) = (&round.listings.source, &round.plan);
            self.count_copied(source, plan, &results);
            // Cancel only now: snapshots that have their names are counted.
            self.from.store.cancel().check()?;
            let failures = self.record_results(source, plan, results);
            self.update_metrics();
            let has_failed = |reason| failures.iter().any(|e| e.reason() == reason);
            let is_store_away = has_failed(Reason::StoreUnreachable);
            let has_progress = self.outcome.bytes_written > written_before;
            // What a tag excludes shows when it is opened: the next round plans without it.
            let excluded = failures.iter().filter(|e| e.is_of_excluded());
            for e in excluded {
                self.from.marks.add(e);
            }
            let may_help = has_failed(Reason::SnapshotVanished) || is_store_away && has_progress;
            if number >= MOST_ROUNDS || !may_help {
                let is_partly_done = self.outcome.copied + self.outcome.kept > 0;
                return Ok(summarize(failures, is_partly_done));
            }
            if is_store_away {
                self.sleep(PAUSE.min(self.options.interval))?;
            }
            tracing::info!("listing both stores again, since something changed or failed");
        }
        Ok(None)
    }

    /// Lists both stores.
    fn list(&mut self) -> Result<Listings> {
        let mut source = by_names(&self.from.store)?;
        if source.snapshots.is_empty() {
            return Err(no_snapshots_error(self.from, &source, None));
        }
        let target = by_names(&self.to.store)?;
        if self.remembered_since.elapsed() > MEMORY {
            self.damaged.clear();
            self.remembered_since = Instant::now();
        }
        self.from.marks.apply(self.from, &mut source);
        self.leave_out_untrusted(&mut source)?;
        if self.from.store.tags_refused() || self.to.store.tags_refused() {
            self.warn(TAGS_UNREADABLE.to_owned());
        }
        Ok(Listings { source, target })
    }

    /// Fails if the source holds untrusted snapshots. A follower leaves these out instead.
    fn leave_out_untrusted(&mut self, source: &mut Catalog) -> Result<()> {
        self.from.trust.mark(source);
        let untrusted = trust::untrusted(source);
        if !untrusted.refused.is_empty() && self.metrics.is_none() {
            let refused = &untrusted.refused;
            return Err(untrusted_error(
                &self.from.store,
                source,
                &untrusted,
                refused,
            ));
        }
        if let Some(warning) = untrusted_warning(source, untrusted.all()) {
            self.warn(warning);
        }
        source.snapshots.retain(|s| !s.untrusted);
        Ok(())
    }

    /// Adds warnings about what the plan leaves out.
    fn warn_about_plan(&mut self, source: &Catalog, plan: &Plan) {
        if !source.foreign.is_empty() {
            self.warn(format!(
                "objects in the source that are not snapshots are not copied: {}",
                shorten::line(&source.foreign, ", ", shorten::IN_LIST)
            ));
        }
        if plan.backups > 0 && plan.backups_wanted == 0 {
            self.warn(format!(
                "all backups are older than {MAX_BACKUP_AGE}: nothing is copied"
            ));
        }
        let useless: Vec<&str> = plan
            .objects
            .iter()
            .filter(|p| p.reason == CopyReason::NoBase)
            .map(|p| source.snapshots[p.source].path.as_str())
            .collect();
        if !useless.is_empty() {
            self.warn(format!(
                "not copied, since neither the source nor the target has the snapshot before them: {}",
                shorten::line(&useless, ", ", shorten::IN_JSON)
            ));
        }
    }
}
