//! Decides what to write for a policy and its tasks.
//!
//! Pure: no I/O, and the time is an argument. [`decide`] returns the actions, the statuses, the Events and when to decide
//! again.
//!
//! A status tells what exists, never what is intended. So the controller does all actions of a decision first, decides
//! again, and writes the statuses of a decision without actions. What was refused meanwhile is part of the facts.

mod actions;
pub mod compaction;
pub mod conditions;
mod freshness;
mod objects;
mod policy;
mod runs;
mod task;
mod task_queue;
#[cfg(test)]
mod tests;
pub mod threshold;

pub use actions::Action;
pub use objects::Desired;
pub use policy::snapshot_ages;
pub use runs::FailedRun;

use super::api::{
    EtcdBackupPolicy, EtcdBackupPolicyStatus, EtcdBackupTask, EtcdBackupTaskStatus, LastCompaction,
    RunState, TaskState, TaskType,
};
use super::facts::threshold_jobs::ThresholdStart;
use super::facts::{Facts, Refusal};
use super::jobs::{self, Allowed, Settings};
use super::times::{later, sooner};
use crate::error::Result;
use actions::{create_job_description, is_for_policy_objects};
use chrono::{DateTime, TimeDelta, Utc};
use compaction::CompactionActivity;
use conditions::{Assessment, Problem};
use kube::ResourceExt;
use policy::{BackupHealth, PolicyFindings};
use std::sync::Arc;
use std::time::Duration;
use task::{TaskProgress, TimedProgress};
use task_queue::{Admission, AdmissionContext, QUEUED};
use threshold::NotDue;

/// The reason of a Job that waits for another one to end, because of the limits.
pub const TOO_MANY_JOBS: &str = "TooManyJobs";
/// A watch is expected to report a write within this time.
const WATCH_DELAY: TimeDelta = TimeDelta::seconds(10);

/// The settings that decisions depend on.
#[derive(Debug, Clone)]
pub struct Options {
    /// The settings of all Jobs.
    pub settings: Settings,
    /// The namespaces that the controller watches; empty for all.
    pub namespaces: Vec<String>,
    /// What policies and tasks may ask for.
    pub allowed: Allowed,
    /// Whether thresholds start compactions.
    pub compactions: bool,
    /// Whether tasks are carried out.
    pub tasks: bool,
}

/// An Event to publish about a policy or a task. It is logged, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedEvent {
    /// Whether the Event is a Warning; else it is Normal.
    pub warning: bool,
    /// The reason of the Event: one word, for programs.
    pub reason: String,
    /// The action of the Event: one word for what the controller does.
    pub action: &'static str,
    /// The note of the Event: a sentence, for users.
    pub text: String,
}

/// A policy's status to write.
#[derive(Debug)]
pub struct PolicyStatus {
    /// The policy.
    pub policy: Arc<EtcdBackupPolicy>,
    /// The new status.
    pub status: EtcdBackupPolicyStatus,
    /// The Events to publish when the status is written.
    pub events: Vec<PlannedEvent>,
    /// Whether a compaction succeeded and how long it took, if the status is the first that has its end.
    pub compaction_ended: Option<(bool, Duration)>,
    /// The failed Jobs that the status is the first to have.
    pub failures: Vec<FailedRun>,
}

/// A task's status to write.
#[derive(Debug)]
pub struct TaskStatus {
    /// The task.
    pub task: Arc<EtcdBackupTask>,
    /// The new status.
    pub status: EtcdBackupTaskStatus,
    /// The Event to publish when the status is written.
    pub event: Option<PlannedEvent>,
    /// How long the task's Job took, if it has ended.
    pub duration: Option<Duration>,
}

/// Everything to do for a policy and its tasks.
#[derive(Debug, Default)]
pub struct Decision {
    /// What to write before any status.
    pub actions: Vec<Action>,
    /// The policy's status, if it has changed.
    pub policy: Option<PolicyStatus>,
    /// The statuses of tasks that have changed.
    pub tasks: Vec<TaskStatus>,
    /// Whether a Job waits for a slot.
    pub waits_for_slot: bool,
    /// When to decide again even if nothing has changed.
    pub again_at: Option<DateTime<Utc>>,
}

impl Decision {
    /// Brings the next decision forward to this time.
    fn again_by(&mut self, at: Option<DateTime<Utc>>) {
        self.again_at = sooner(self.again_at, at);
    }
}

/// Decides what to write for a policy and its tasks.
///
/// # Errors
/// `Internal` if an object cannot be built or written as JSON.
pub fn decide(facts: &Facts, options: &Options, now: DateTime<Utc>) -> Result<Decision> {
    let policy = facts.policy.as_deref();
    let compaction = CompactionActivity::new(facts, now);
    let threshold_job = if options.compactions {
        compaction.next_job(facts, now)
    } else {
        Err(NotDue::until_a_change("compactions are turned off"))
    };
    let decider = Decider {
        facts,
        options,
        now,
        problem: policy.and_then(|p| policy::impediment(p, options)),
        health: policy.map(|p| BackupHealth::assess(p, facts, now)),
        compaction,
        threshold_job,
    };
    let mut decision = Decision::default();
    let compaction_healthy = decider.decide_compaction(&mut decision)?;
    let mut task_progress = Vec::new();
    if options.tasks {
        task_progress = decider.decide_tasks(&mut decision)?;
    }
    decider.decide_policy(compaction_healthy, &task_progress, &mut decision)?;
    for (task, progress) in &task_progress {
        decision.tasks.extend(task_status(task, progress, now));
    }
    decision
        .actions
        .retain(|action| facts.attempt(&action.description()).is_none());
    Ok(decision)
}

/// What the parts of a decision have in common.
struct Decider<'f> {
    facts: &'f Facts,
    options: &'f Options,
    now: DateTime<Utc>,
    /// Why the policy is not carried out.
    problem: Option<Problem>,
    /// `None` if the policy does not exist.
    health: Option<BackupHealth>,
    compaction: CompactionActivity,
    /// The Job that a threshold starts, or why none is due.
    threshold_job: Result<ThresholdStart, NotDue>,
}

impl<'f> Decider<'f> {
    fn policy(&self) -> Option<&'f EtcdBackupPolicy> {
        self.facts.policy.as_deref()
    }

    /// Returns why the Job of this name was refused in this reconciliation.
    fn job_refusal(&self, name: &str) -> Option<&'f Refusal> {
        self.facts
            .attempt(&create_job_description(name))?
            .refusal
            .as_ref()
    }

    /// Decides on the Job of a threshold. Returns the condition CompactionHealthy; `None` if no compactions are
    /// started.
    fn decide_compaction(&self, decision: &mut Decision) -> Result<Option<Assessment>> {
        let Some(policy) = self.policy().filter(|_| self.options.compactions) else {
            return Ok(None);
        };
        decision.again_by(self.compaction.again_at);
        let mut refusal = None;
        match &self.threshold_job {
            Err(not_due) => {
                let (namespace, name) = (&self.facts.key.namespace, &self.facts.key.name);
                tracing::debug!(
                    namespace,
                    policy = name,
                    "no compaction: {}",
                    not_due.reason
                );
                decision.again_by(not_due.again_at);
            }
            Ok(start) if self.problem.is_none() => {
                let action = compaction::create_job(policy, start.clone(), &self.options.settings)?;
                decision.actions.push(action);
                refusal = self.job_refusal(&start.job.name);
            }
            Ok(_) => {}
        }
        decision.waits_for_slot |= refusal.is_some_and(|r| r.reason == TOO_MANY_JOBS);
        let mut healthy = conditions::compaction_healthy(
            policy,
            &self.facts.leases,
            self.compaction.last.as_ref(),
            self.now,
        );
        if let Some(refusal) = refusal {
            healthy = conditions::compaction_refused(refusal);
        }
        decision.again_by(healthy.stale_at);
        Ok(Some(healthy))
    }

    /// Decides on all tasks that are not being deleted. Returns the progress of those that have not ended.
    fn decide_tasks(
        &self,
        decision: &mut Decision,
    ) -> Result<Vec<(&'f Arc<EtcdBackupTask>, TaskProgress)>> {
        let health = self.health.as_ref().filter(|h| !h.is_backed_up());
        let context = AdmissionContext {
            policy: self.policy(),
            backup_not_ready: health.map(|h| h.backup_ready.message.as_str()),
            options: self.options,
        };
        let mut admissions = task_queue::admit(&self.facts.tasks, &context, self.now)?;
        let mut all_progress = Vec::new();
        for task in &self.facts.tasks {
            if task.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let admission = admissions.remove(&task.name_any());
            if let Some((progress, again_at)) = self.decide_task(task, admission, decision)? {
                decision.again_by(again_at);
                all_progress.push((task, progress));
            }
        }
        Ok(all_progress)
    }

    fn decide_task(
        &self,
        task: &EtcdBackupTask,
        admission: Option<Admission>,
        decision: &mut Decision,
    ) -> Result<Option<TimedProgress>> {
        let (facts, now) = (self.facts, self.now);
        let old = task.status.clone().unwrap_or_default();
        let job = task::job(facts, task);
        if old.state.is_final() {
            let (actions, expires_at) = task::clean_up(task, job, now);
            decision.actions.extend(actions);
            decision.again_by(expires_at);
            return Ok(None);
        }
        if let Some(job) = job {
            // The Job counts even if the status does not mention it: that write may have failed.
            let progress = task::progress(task, &old, self.policy(), job, facts, now);
            return Ok(Some(progress));
        }
        if old.state != TaskState::Pending {
            if compaction::is_recent(old.initiated_at, now) {
                // The watch may not have reported the Job.
                decision.again_by(Some(later(now, WATCH_DELAY)));
                return Ok(None);
            }
            return Ok(Some((task::without_job(task, self.policy()), None)));
        }
        let progress = match admission {
            None => return Ok(None),
            Some(Admission::Reject(refusal)) => (TaskProgress::rejected(refusal), None),
            Some(Admission::Wait {
                reason,
                message,
                again_at,
            }) => (TaskProgress::Waiting { reason, message }, again_at),
            Some(Admission::Start) => match self.wait_before_start(task) {
                Some(waiting) => waiting,
                None => return self.start_task(task, decision),
            },
        };
        Ok(Some(progress))
    }

    /// Returns why the next task of the policy must wait for something other than a task.
    fn wait_before_start(&self, task: &EtcdBackupTask) -> Option<TimedProgress> {
        let waiting = |reason, message| TaskProgress::Waiting { reason, message };
        if let Some(problem) = &self.problem {
            let message = format!("the policy is not Ready: {}", problem.message);
            return Some((waiting("PolicyNotReady", message), None));
        }
        // Another task may have started while this one was postponed.
        if let Some((blocker, again_at)) = task::blocker(task, self.facts, self.now) {
            let message = format!("{blocker} has not ended");
            return Some((waiting(QUEUED, message), again_at));
        }
        if task.spec.type_ == TaskType::OnDemandCompaction
            && let Ok(start) = &self.threshold_job
        {
            let message = format!("the Job {} is about to start", start.job.name);
            let again_at = Some(later(self.now, WATCH_DELAY));
            return Some((waiting(QUEUED, message), again_at));
        }
        None
    }

    /// Decides to create the Job of a task. Returns the progress if the Job was refused.
    fn start_task(
        &self,
        task: &EtcdBackupTask,
        decision: &mut Decision,
    ) -> Result<Option<TimedProgress>> {
        let Some(policy) = self.policy() else {
            return Ok(None);
        };
        let job = jobs::task_job(policy, task, &self.options.settings)?;
        let name = job.name_any();
        decision.actions.push(Action::CreateJob {
            job: Box::new(job),
            revisions: None,
            event: PlannedEvent {
                warning: false,
                reason: "TaskStarted".to_owned(),
                action: task.spec.type_.as_str(),
                text: format!("created the Job {name}"),
            },
        });
        let refusal = self.job_refusal(&name);
        decision.waits_for_slot |= refusal.is_some_and(|r| r.reason == TOO_MANY_JOBS);
        Ok(refusal.map(|refusal| task::refused(refusal, self.now)))
    }

    /// Decides on the objects of the policy, and on its status.
    fn decide_policy(
        &self,
        compaction_healthy: Option<Assessment>,
        task_progress: &[(&Arc<EtcdBackupTask>, TaskProgress)],
        decision: &mut Decision,
    ) -> Result<()> {
        let (Some(health), Some(policy)) = (&self.health, &self.facts.policy) else {
            return Ok(());
        };
        let actions = self.objects(policy, health.is_backed_up())?;
        decision.actions.extend(actions);
        let apply_problem = self.apply_refusal().map(|refusal| Problem {
            reason: refusal.reason.to_owned(),
            message: refusal.message.clone(),
        });
        let restorations = task_progress
            .iter()
            .filter_map(|(task, progress)| task::restoration(task, progress))
            .collect();
        let findings = PolicyFindings {
            health,
            problem: self.problem.as_ref().or(apply_problem.as_ref()),
            compaction: compaction_healthy
                .as_ref()
                .map(|healthy| (self.compaction.last.clone(), healthy)),
            restorations,
        };
        let (status, stale_at) = policy::status(policy, self.facts, findings, self.now);
        decision.again_by(stale_at);
        decision.policy = changed_status(policy.clone(), status);
        Ok(())
    }

    /// Decides on the CronJobs, the follower and the Leases of the policy.
    fn objects(&self, policy: &EtcdBackupPolicy, is_backed_up: bool) -> Result<Vec<Action>> {
        match &self.problem {
            None => objects::apply_all(policy, self.facts, self.options, is_backed_up),
            Some(problem) if policy.spec.suspend || problem.reason == policy::NOT_ALLOWED => {
                Ok(objects::stop_all(policy, self.facts))
            }
            // The objects of the last good spec stay as they are, so that a typing error does not end the backups.
            Some(_) => Ok(Vec::new()),
        }
    }

    /// Returns the first refusal of an object of the policy in this reconciliation. Refused Jobs are reported elsewhere:
    /// by CompactionHealthy and by the statuses of tasks.
    fn apply_refusal(&self) -> Option<&'f Refusal> {
        let mut attempts = self.facts.attempts.iter();
        attempts.find_map(|attempt| {
            let refusal = attempt.refusal.as_ref()?;
            is_for_policy_objects(&attempt.action).then_some(refusal)
        })
    }
}

/// Returns the status of a task, if it has changed.
fn task_status(
    task: &Arc<EtcdBackupTask>,
    progress: &TaskProgress,
    now: DateTime<Utc>,
) -> Option<TaskStatus> {
    let old = task.status.clone().unwrap_or_default();
    let job_name = jobs::task_job_name(task);
    let status = task::status(task, &old, progress, &job_name, now);
    if task.status.as_ref() == Some(&status) {
        return None;
    }
    Some(TaskStatus {
        event: task::event(task, &old, &status, progress),
        duration: task::duration(progress),
        task: task.clone(),
        status,
    })
}

/// Returns the policy's status with its Events, if it has changed.
fn changed_status(
    policy: Arc<EtcdBackupPolicy>,
    status: EtcdBackupPolicyStatus,
) -> Option<PolicyStatus> {
    let old = policy.status.clone().unwrap_or_default();
    if old == status {
        return None;
    }
    let mut events = policy::condition_events(&old.conditions, &status.conditions);
    let last = status.last_compaction.as_ref();
    let end_event = compaction::end_event(old.last_compaction.as_ref(), last);
    let compaction_ended = last.filter(|_| end_event.is_some()).map(compaction_result);
    events.extend(end_event);
    let failures = runs::new_failures(&old, &status);
    events.extend(failures.iter().map(FailedRun::event));
    Some(PolicyStatus {
        policy,
        status,
        events,
        compaction_ended,
        failures,
    })
}

/// Returns whether a compaction succeeded, and how long it took.
fn compaction_result(last: &LastCompaction) -> (bool, Duration) {
    let succeeded = last.run.state == RunState::Succeeded;
    (succeeded, last.run.duration().unwrap_or_default())
}
