//! The results of a copy: counts them, and turns them into an outcome, metrics and one error.

use super::copier::Copier;
use super::failures::conflict;
use super::plan::{CopyReason, Decision, Plan, Planned};
use super::round::CopyResult;
use super::{CopiedBackup, CopiedObject, CopyStatus, MOST_LISTED};
use crate::backup::{Catalog, Kind};
use crate::base::opt::AGE_IDENTITY;
use crate::base::plural;
use crate::error::Error;
use crate::ops::report::Report;
use crate::telemetry::metrics::SnapshotKind;

impl Copier<'_> {
    /// Counts the snapshots that a round copied, or in a dry run would copy.
    pub(super) fn count_copied(
        &mut self,
        source: &Catalog,
        plan: &Plan,
        results: &[Option<CopyResult>],
    ) {
        for (p, result) in plan.objects.iter().zip(results) {
            match result {
                Some(CopyResult::Copied { bytes, is_checked }) => {
                    self.outcome.copied += 1;
                    self.outcome.bytes_written += bytes;
                    self.outcome.unchecked += u64::from(!is_checked);
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

    /// Records the result of every snapshot of the source, and which ones are damaged. Returns the
    /// failures.
    pub(super) fn record_results(
        &mut self,
        source: &Catalog,
        plan: &Plan,
        results: Vec<Option<CopyResult>>,
    ) -> Vec<Error> {
        let mut failures = Vec::new();
        let mut objects = Vec::with_capacity(plan.objects.len());
        for (p, result) in plan.objects.iter().zip(results) {
            let s = &source.snapshots[p.source];
            let (decision, reason, message) = self.describe_result(p, result, &mut failures);
            if let Some(e) = failures.last().filter(|_| decision == CopyStatus::Failed)
                && e.reason().is_bad_data()
            {
                let damage = (s.bytes, e.again());
                self.damaged.insert(s.path.clone(), damage);
            }
            objects.push(CopiedObject {
                path: s.path.clone(),
                target_path: p.path.clone(),
                bytes: s.bytes,
                decision,
                reason,
                message,
            });
        }
        if let Some(metrics) = &self.metrics {
            for e in failures.iter().filter(|e| !e.is_of_excluded()) {
                metrics.failed("copy", e.reason());
            }
        }
        self.set_objects(objects);
        failures
    }

    /// Returns a snapshot's result, the reason and a message. Adds an error to `failures`.
    fn describe_result(
        &self,
        p: &Planned,
        result: Option<CopyResult>,
        failures: &mut Vec<Error>,
    ) -> (CopyStatus, &'static str, String) {
        let as_planned = |status| (status, p.reason.as_str(), p.reason.describe().into_owned());
        let e = match (p.decision, result) {
            (Decision::Keep, _) => return as_planned(CopyStatus::Kept),
            (Decision::Skip, _) => return as_planned(CopyStatus::Skipped),
            (Decision::Conflict, _) => conflict(&self.to.store.name(&p.path)),
            (Decision::Copy, None | Some(CopyResult::Copied { .. })) => {
                return as_planned(CopyStatus::Copied);
            }
            (Decision::Copy, Some(CopyResult::AlreadyThere)) => {
                let message = "another process has copied it during the run".to_owned();
                return (CopyStatus::Kept, CopyReason::AlreadyThere.as_str(), message);
            }
            (Decision::Copy, Some(CopyResult::NoBase)) => {
                let message = "the snapshot that it follows could not be copied".to_owned();
                return (CopyStatus::Skipped, "BaseNotCopied", message);
            }
            (Decision::Copy, Some(CopyResult::NotTried)) => {
                let message = "the run ended before it was copied".to_owned();
                return (CopyStatus::Failed, "NotTried", message);
            }
            (Decision::Copy, Some(CopyResult::Failed(e))) => e,
        };
        let described = (CopyStatus::Failed, e.reason().as_str(), e.to_string());
        failures.push(e);
        described
    }

    /// Sets the outcome's objects and their counts after a round.
    fn set_objects(&mut self, mut objects: Vec<CopiedObject>) {
        let is_follower = self.metrics.is_some();
        if !is_follower {
            // This round found in the target what an earlier one copied, or the source has lost it.
            for o in &mut objects {
                if let Some(copied) = self.copied.remove(&o.path) {
                    *o = copied;
                }
            }
            objects.extend(std::mem::take(&mut self.copied).into_values());
            objects.sort_by_key(|o| o.decision != CopyStatus::Copied);
            let copied = objects.iter().filter(|o| o.decision == CopyStatus::Copied);
            self.copied = copied.map(|o| (o.path.clone(), o.clone())).collect();
        }
        let count = |status| objects.iter().filter(|o| o.decision == status).count() as u64;
        self.outcome.kept = count(CopyStatus::Kept);
        self.outcome.skipped = count(CopyStatus::Skipped);
        self.outcome.failed = count(CopyStatus::Failed);
        if is_follower {
            objects.retain(|o| o.decision == CopyStatus::Failed);
            objects.truncate(MOST_LISTED);
        }
        self.outcome.objects = objects;
    }

    /// Adds the bytes since the last call to the metrics.
    pub(super) fn update_metrics(&mut self) {
        let (read, written) = (self.from.store.bytes_read(), self.outcome.bytes_written);
        if let Some(metrics) = &self.metrics {
            metrics.store_read(read - self.counted_bytes.0);
            metrics.store_written(written - self.counted_bytes.1);
            metrics.to_copy(self.outcome.failed);
        }
        self.counted_bytes = (read, written);
    }

    /// Returns the report of a copy that ended with this failure, if any.
    pub(super) fn report(mut self, failure: Option<Error>) -> Report<CopiedBackup> {
        let o = &mut self.outcome;
        let did_something = o.copied > 0;
        if o.unchecked > 0 {
            self.clock.warnings.push(format!(
                "{} {} copied without a check of their content: give the identity that decrypts them with {AGE_IDENTITY}",
                plural::count(o.unchecked, "encrypted snapshot"),
                plural::either(o.unchecked, "was", "were")
            ));
        }
        o.bytes_read = self.from.store.bytes_read();
        self.clock.ended(self.outcome, did_something, failure)
    }
}
