//! The findings of a verification: errors, notes, and the worst one.
//!
//! This module does not look for anything itself. Called by the other files of `ops::verify::store`, and by
//! `ops::verify::plain`.

use crate::backup::timeline::Timeline;
use crate::error::{Error, Reason};
use crate::ops::list::Problem;
use crate::ops::report::reasons_and;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// Whether a finding makes a verification fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The verification fails.
    Error,
    /// Worth knowing; the verification does not fail.
    Note,
}

/// The reasons of notes. Errors have the reasons of exit-codes.md.
const NOTES: [&str; 14] = [
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
    "TooManyTimelines",
];

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Finding {
    /// `error` makes the verification fail, `note` is worth knowing.
    pub severity: Severity,
    /// A stable name. An error has one of exit-codes.md. A note has one of: `DrillSkipped` (the timeline
    /// cannot be folded to its end), `Excluded` (the snapshot has an exclusion marker), `ForeignObject` (the
    /// object is not named like a snapshot), `ForkedHistory` (there is more than one timeline),
    /// `GapIsCovered` (deltas are missing, but the next full holds their history), `IdentityUnreadable`
    /// (`deltafold-identity.json` does not name the cluster of the backup), `MissingBase` (by names, no full
    /// precedes these deltas), `OverlappingDeltas` (two streams of deltas), `RevisionPastName` (a full holds
    /// more than its name says; harmless), `RevisionsNotCovered` (no deltas lead up to a full), `TagsNotRead`
    /// (the tags of more than 64 snapshots: use --all-tags), `TagsUnreadable` (the store does not say which
    /// snapshots are excluded by a tag), `TimelinesUnverified` (only the contents show whether the history
    /// forked), `TooManyTimelines` (more than 100 histories contradict each other, so these snapshots were not
    /// verified).
    #[schemars(extend("enum" = reasons_and(&NOTES)))]
    pub reason: &'static str,
    /// The ID of the timeline; null if the finding is about none, or about several.
    pub timeline: Option<String>,
    /// The paths of the objects concerned, below the store's prefix; may be empty.
    pub snapshots: Vec<String>,
    /// Human-readable text: it may change.
    pub message: String,
    #[serde(skip)]
    failure: Option<Reason>,
}

impl Finding {
    fn is_same(&self, other: &Finding) -> bool {
        (self.reason, &self.snapshots, &self.message)
            == (other.reason, &other.snapshots, &other.message)
    }
}

/// Returns the number of errors.
pub(in crate::ops::verify) fn errors(findings: &[Finding]) -> u64 {
    let errors = findings.iter().filter(|f| f.severity == Severity::Error);
    errors.count() as u64
}

/// Returns the number of findings of each reason.
pub(in crate::ops::verify) fn by_reason(findings: &[Finding]) -> Vec<(&'static str, u64)> {
    let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
    for finding in findings {
        *counts.entry(finding.reason).or_default() += 1;
    }
    counts.into_iter().collect()
}

/// The target of log lines about findings. `cli` turns it off where the report is seen next to the log.
const LOG_TARGET: &str = "deltafold::finding";

/// All findings so far, without repetitions.
#[derive(Default)]
pub(in crate::ops::verify) struct Findings(Vec<Finding>);

impl Findings {
    fn push(&mut self, finding: Finding) {
        // Timelines share the snapshots before their fork, so a finding can come up once for each of them.
        if self.0.iter().any(|f| f.is_same(&finding)) {
            return;
        }
        let (reason, message) = (finding.reason, &finding.message);
        match finding.severity {
            Severity::Error => tracing::warn!(target: LOG_TARGET, reason, "{message}"),
            Severity::Note => tracing::info!(target: LOG_TARGET, reason, "{message}"),
        }
        self.0.push(finding);
    }

    pub(in crate::ops::verify) fn note(&mut self, timeline: Option<&Timeline>, problem: Problem) {
        self.push(Finding {
            severity: Severity::Note,
            reason: problem.reason,
            timeline: timeline.map(|t| t.id.clone()),
            snapshots: problem.snapshots,
            message: problem.message,
            failure: None,
        });
    }

    pub(in crate::ops::verify) fn error(
        &mut self,
        e: &Error,
        timeline: Option<&Timeline>,
        snapshots: Vec<String>,
    ) {
        self.push(Finding {
            severity: Severity::Error,
            reason: e.reason().as_str(),
            timeline: timeline.map(|t| t.id.clone()),
            snapshots,
            message: e.to_string(),
            failure: Some(e.reason()),
        });
    }

    /// Returns all findings, errors first, and the failure of the verification: the error with the lowest
    /// exit code.
    pub(in crate::ops::verify) fn into_result(self) -> (Vec<Finding>, Option<Error>) {
        let mut all = self.0;
        all.sort_by_key(|f| f.severity == Severity::Note);
        let errors = all.iter().filter(|f| f.severity == Severity::Error).count();
        let rank = |r: Reason| Reason::ALL.iter().position(|a| *a == r);
        let worst = all
            .iter()
            .filter_map(|f| Some((f.failure?, f)))
            .min_by_key(|(r, _)| (r.exit_code(), rank(*r)));
        let failure = worst.map(|(reason, f)| {
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
