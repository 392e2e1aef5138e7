//! The findings of a verification, and the worst one.
//!
//! This module does not look for anything itself.

use crate::error::{Error, Reason};
use crate::ops::findings::Finding;
use std::collections::BTreeMap;

/// Returns the number of errors.
pub(in crate::ops::verify) fn errors(findings: &[Finding]) -> u64 {
    findings.iter().filter(|f| f.is_error()).count() as u64
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
    pub(in crate::ops::verify) fn add(&mut self, finding: Finding) {
        // Timelines share the snapshots before their fork, so a finding can come up once for each of them.
        let is_same = |f: &Finding| {
            (f.reason, &f.snapshots, &f.message)
                == (finding.reason, &finding.snapshots, &finding.message)
        };
        if self.0.iter().any(is_same) {
            return;
        }
        let (reason, message) = (finding.reason, &finding.message);
        if finding.is_error() {
            tracing::warn!(target: LOG_TARGET, reason, "{message}");
        } else {
            tracing::info!(target: LOG_TARGET, reason, "{message}");
        }
        self.0.push(finding);
    }

    /// Returns all findings, errors first, and the failure of the verification: the error with the lowest
    /// exit code.
    pub(in crate::ops::verify) fn into_result(self) -> (Vec<Finding>, Option<Error>) {
        let mut all = self.0;
        all.sort_by_key(|f| f.severity);
        let errors = errors(&all);
        let rank = |r: Reason| Reason::ALL.iter().position(|a| *a == r);
        let worst = all
            .iter()
            .filter_map(|f| Some((f.failure()?, f)))
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
