//! Threshold Jobs, whose annotations record what they were created for.
//!
//! The annotations are the truth, so that a lost write of the status loses nothing. It does not decide when a
//! Job is created: `decide::compaction` does.

use super::outcome;
use crate::controller::api::{LastCompaction, LastRun, RunState};
use crate::controller::jobs::WorkKind;
use crate::controller::times::created;
use chrono::{DateTime, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use std::collections::BTreeMap;

/// The annotation for the threshold that was crossed.
const TRIGGER: &str = "deltafold.io/trigger";
/// The annotations for the revisions of the two snapshot Leases at the decision.
const FULL_REVISION: &str = "deltafold.io/full-revision";
const DELTA_REVISION: &str = "deltafold.io/delta-revision";
/// The annotation for the number of failed Jobs before this one.
const ATTEMPT: &str = "deltafold.io/attempt";
/// The annotation for the generation of the policy's spec.
const GENERATION: &str = "deltafold.io/generation";
/// The annotation for the reason, a sentence.
const REASON: &str = "deltafold.io/reason";

/// Returns whether a threshold created the Job. The annotation decides, because a threshold's full snapshots
/// have the same label as scheduled ones.
pub fn is_of_threshold(job: &Job) -> bool {
    let annotations = job.metadata.annotations.as_ref();
    annotations.is_some_and(|a| a.contains_key(TRIGGER)) || WorkKind::Compaction.is_of(job)
}

/// Returns whether the Job belongs to a task.
pub fn is_of_task(job: &Job) -> bool {
    WorkKind::Task.is_of(job)
}

/// A threshold Job, as its annotations describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThresholdJob {
    /// The name of the Job.
    pub name: String,
    /// The threshold that was crossed.
    pub trigger: String,
    /// The revision of the newest full at the decision.
    pub full_revision: i64,
    /// The newest revision of the backup at the decision.
    pub delta_revision: i64,
    /// Whether it takes a full snapshot instead of a compaction.
    pub full_snapshot: bool,
    /// The number of failed Jobs before this one.
    pub attempt: i32,
    /// The generation of the policy's spec at the decision.
    pub generation: Option<i64>,
    /// The time of its creation.
    pub created: Option<DateTime<Utc>>,
    /// Whether it has ended.
    pub finished: bool,
}

impl ThresholdJob {
    /// Reads the annotations of a Job. Returns `None` if no threshold created the Job.
    pub fn read(job: &Job) -> Option<ThresholdJob> {
        let annotations = job.metadata.annotations.as_ref()?;
        let number = |key: &str| annotations.get(key)?.parse::<i64>().ok();
        Some(ThresholdJob {
            name: job.name_any(),
            trigger: annotations.get(TRIGGER)?.clone(),
            full_revision: number(FULL_REVISION)?,
            delta_revision: number(DELTA_REVISION)?,
            full_snapshot: WorkKind::FullSnapshot.is_of(job),
            attempt: number(ATTEMPT)
                .and_then(|n| i32::try_from(n).ok())
                .unwrap_or(0),
            generation: number(GENERATION),
            created: created(&job.metadata),
            finished: outcome::is_finished(job),
        })
    }

    /// Returns a sort key that is highest for the newest Job. Creation times have whole seconds; of two Jobs
    /// created in the same second, the running one is newer.
    pub fn age(&self) -> (Option<DateTime<Utc>>, bool, i32, i64, &str) {
        (
            self.created,
            !self.finished,
            self.attempt,
            self.delta_revision,
            &self.name,
        )
    }

    /// Returns the annotations of the Job.
    pub fn annotations(&self, reason: &str) -> BTreeMap<String, String> {
        let generation = self.generation.map(|n| n.to_string());
        let annotations = [
            (TRIGGER, self.trigger.clone()),
            (FULL_REVISION, self.full_revision.to_string()),
            (DELTA_REVISION, self.delta_revision.to_string()),
            (ATTEMPT, self.attempt.to_string()),
            (GENERATION, generation.unwrap_or_default()),
            (REASON, reason.to_owned()),
        ];
        annotations.map(|(k, v)| (k.to_owned(), v)).into()
    }

    /// Returns the status of the Job, which has run like this.
    pub fn ran(&self, run: LastRun) -> LastCompaction {
        LastCompaction {
            job_name: self.name.clone(),
            trigger: self.trigger.clone(),
            full_revision: self.full_revision,
            delta_revision: self.delta_revision,
            full_snapshot: self.full_snapshot,
            generation: self.generation,
            failures: match run.state {
                RunState::Running => self.attempt,
                RunState::Succeeded => 0,
                RunState::Failed => self.attempt.saturating_add(1),
            },
            run,
        }
    }
}

/// The decision to start a threshold Job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThresholdStart {
    /// The Job.
    pub job: ThresholdJob,
    /// The reason, a sentence.
    pub reason: String,
    /// Revisions since the last full.
    pub revisions: i64,
}
