//! The Jobs of thresholds: what each was made for stands on it, so that a lost status write loses nothing.

use super::outcome;
use crate::controller::api::{EtcdBackupPolicy, LastCompaction, LastRun, RunState};
use crate::controller::jobs::{self, Work};
use crate::controller::names::label;
use crate::controller::times::utc;
use chrono::{DateTime, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use std::collections::BTreeMap;

/// On a threshold's Job: what crossed.
const TRIGGER: &str = "deltafold.io/trigger";
/// On the Job: the status of the Leases that it was made for.
const FULL_REVISION: &str = "deltafold.io/full-revision";
const DELTA_REVISION: &str = "deltafold.io/delta-revision";
/// On the Job: how many have failed before it.
const ATTEMPT: &str = "deltafold.io/attempt";
/// On the Job: why it was made.
const REASON: &str = "deltafold.io/reason";

/// Whether a Job was made by a threshold: the full snapshots among them are labelled as those of schedules are.
pub fn is_of_threshold(job: &Job) -> bool {
    let annotations = job.metadata.annotations.as_ref();
    annotations.is_some_and(|a| a.contains_key(TRIGGER))
        || label(job, jobs::LABEL_WORK) == Some(Work::Compaction.as_str())
}

/// Whether a Job was made for a task.
pub fn is_of_task(job: &Job) -> bool {
    label(job, jobs::LABEL_WORK) == Some(Work::Task.as_str())
}

/// A threshold's Job, by what stands on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The Job's name.
    pub name: String,
    /// What crossed.
    pub trigger: String,
    /// The revision of the newest full then.
    pub full_revision: i64,
    /// The newest revision of all then.
    pub delta_revision: i64,
    /// Whether it is a full snapshot in place of a compaction.
    pub full_snapshot: bool,
    /// How many have failed before it.
    pub attempt: i32,
    /// When it was created.
    pub created: Option<DateTime<Utc>>,
    /// Whether it has ended.
    pub finished: bool,
}

impl Started {
    /// Reads it off a Job; `None` if that is none of a threshold's.
    pub fn read(job: &Job) -> Option<Started> {
        let annotations = job.metadata.annotations.as_ref()?;
        let number = |key: &str| annotations.get(key)?.parse::<i64>().ok();
        Some(Started {
            name: job.name_any(),
            trigger: annotations.get(TRIGGER)?.clone(),
            full_revision: number(FULL_REVISION)?,
            delta_revision: number(DELTA_REVISION)?,
            full_snapshot: label(job, jobs::LABEL_WORK) == Some(Work::FullSnapshot.as_str()),
            attempt: number(ATTEMPT)
                .and_then(|n| i32::try_from(n).ok())
                .unwrap_or(0),
            created: job.metadata.creation_timestamp.as_ref().map(utc),
            finished: outcome::is_finished(job),
        })
    }

    /// Of two that were made in one second, the one that runs is the later one.
    pub fn age(&self) -> (Option<DateTime<Utc>>, bool, i32, i64, &str) {
        (
            self.created,
            !self.finished,
            self.attempt,
            self.delta_revision,
            &self.name,
        )
    }

    /// What stands on the Job.
    pub fn annotations(&self, reason: &str) -> BTreeMap<String, String> {
        let annotations = [
            (TRIGGER, self.trigger.clone()),
            (FULL_REVISION, self.full_revision.to_string()),
            (DELTA_REVISION, self.delta_revision.to_string()),
            (ATTEMPT, self.attempt.to_string()),
            (REASON, reason.to_owned()),
        ];
        annotations.map(|(k, v)| (k.to_owned(), v)).into()
    }

    /// As the status has it.
    pub fn ran(&self, run: LastRun) -> LastCompaction {
        LastCompaction {
            job_name: self.name.clone(),
            trigger: self.trigger.clone(),
            full_revision: self.full_revision,
            delta_revision: self.delta_revision,
            full_snapshot: self.full_snapshot,
            failures: match run.state {
                RunState::Running => self.attempt,
                RunState::Succeeded => 0,
                RunState::Failed => self.attempt.saturating_add(1),
            },
            run,
        }
    }
}

/// What was decided to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// Whose: another policy may have the same name later.
    pub policy_uid: Option<String>,
    /// The Job.
    pub job: Started,
    /// Why.
    pub reason: String,
    /// Revisions since the last full.
    pub events: i64,
}

impl Start {
    /// Whether a policy still wants it: it may be another one of the same name, or have changed.
    pub fn is_wanted_by(&self, policy: &EtcdBackupPolicy) -> bool {
        let spec = &policy.spec;
        let is_possible = spec.etcd.is_some() || !self.job.full_snapshot;
        let is_its = self.policy_uid == policy.metadata.uid;
        is_its && is_possible && spec.compaction.enabled && !spec.suspend
    }
}
