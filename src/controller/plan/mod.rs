//! Computes what to write for a policy and its tasks from an observation of both.
//!
//! Pure: no I/O, and the time is an argument. Called by the reconciliation in `controller`, in three steps:
//! 1. [`decide`] computes everything that does not depend on other policies.
//! 2. The job limiter answers the [slot requests](Decisions::slot_requests) for the Jobs that are due.
//! 3. [`Decisions::plan`] returns the actions, the statuses, the Events and the time of the requeue.
//!
//! A status tells what exists, never what is intended. So the controller does all actions of a plan first,
//! observes again, and writes the statuses of a plan without actions.

mod actions;
pub mod compaction;
pub mod conditions;
mod freshness;
pub mod job_limits;
mod objects;
mod policy;
mod task;
mod task_queue;
#[cfg(test)]
mod tests;
pub mod threshold;

pub use actions::Action;
pub use objects::Desired;
pub use policy::snapshot_ages;

use super::api::{
    EtcdBackupPolicy, EtcdBackupPolicyStatus, EtcdBackupTask, EtcdBackupTaskStatus, LastCompaction,
    RunState, TaskState, TaskType,
};
use super::jobs::{self, Allowed, Settings};
use super::names::{Key, key, label};
use super::observe::threshold_jobs::{ThresholdStart, is_of_task, is_of_threshold};
use super::observe::{AttemptedAction, Observed, Refusal, WATCH_DELAY, outcome};
use super::times::{later, sooner, utc};
use actions::{create_job_description, is_for_policy_objects};
use chrono::{DateTime, Utc};
use compaction::CompactionActivity;
use conditions::{Assessment, Problem};
use job_limits::{CountedJob, Freeze, Requester, SlotDecision, SlotRequest};
use kube::ResourceExt;
use policy::{BackupHealth, PolicyFindings};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use task::{TOO_MANY_JOBS, TaskProgress, TimedProgress};
use task_queue::{Admission, AdmissionContext, QUEUED};
use threshold::NotDue;

/// The settings that plans depend on.
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
pub struct Plan {
    /// What to write before any status.
    pub actions: Vec<Action>,
    /// The policy's status, if it has changed.
    pub policy: Option<PolicyStatus>,
    /// The statuses of tasks that have changed.
    pub tasks: Vec<TaskStatus>,
    /// The Events about the policy that do not depend on its status.
    pub events: Vec<PlannedEvent>,
    /// When to plan again even if nothing has changed.
    pub requeue_at: Option<DateTime<Utc>>,
}

impl Plan {
    /// Brings the requeue forward to this time.
    fn requeue_by(&mut self, at: Option<DateTime<Utc>>) {
        self.requeue_at = sooner(self.requeue_at, at);
    }
}

/// The result of [`decide`]: a plan that still lacks the job slots.
pub struct Decisions<'o> {
    observed: &'o Observed,
    options: &'o Options,
    now: DateTime<Utc>,
    /// Why the policy is not carried out.
    problem: Option<Problem>,
    /// `None` if the policy does not exist.
    health: Option<BackupHealth>,
    compaction: CompactionActivity,
    /// The Job that a threshold starts, or why none is due.
    threshold_job: Result<ThresholdStart, NotDue>,
    task_steps: Vec<(&'o Arc<EtcdBackupTask>, TaskStep)>,
}

/// The next step of a task.
enum TaskStep {
    /// Write this progress into its status.
    Report(TimedProgress),
    /// Create its Job, if there is a job slot.
    CreateJob,
    /// Clean up: the task has ended.
    CleanUp,
    /// Do nothing before this time: the watches have not reported enough yet.
    WaitUntil(DateTime<Utc>),
}

/// Decides everything about a policy and its tasks that does not depend on other policies.
pub fn decide<'o>(
    observed: &'o Observed,
    options: &'o Options,
    now: DateTime<Utc>,
) -> Decisions<'o> {
    let policy = observed.policy.as_deref();
    let problem = policy.and_then(|p| policy::impediment(p, observed, options));
    let health = policy.map(|p| BackupHealth::assess(p, observed, now));
    let (compaction, threshold_job) = if options.compactions {
        let activity = CompactionActivity::new(observed, now);
        let next_job = activity.next_job(observed, now);
        (activity, next_job)
    } else {
        (
            CompactionActivity::default(),
            Err(NotDue::until_a_change("compactions are turned off")),
        )
    };
    let mut decisions = Decisions {
        observed,
        options,
        now,
        problem,
        health,
        compaction,
        threshold_job,
        task_steps: Vec::new(),
    };
    if options.tasks {
        decisions.task_steps = decisions.decide_tasks();
    }
    decisions
}

/// Returns the Jobs of a policy that count for the limits.
pub fn limited_jobs(observed: &Observed) -> Vec<CountedJob> {
    let mut counted = Vec::new();
    for job in &observed.jobs {
        if !is_of_threshold(job) && !is_of_task(job) {
            continue;
        }
        // A Job that a user has suspended has no Pods, and may never end.
        let is_suspended = job.spec.as_ref().is_some_and(|s| s.suspend == Some(true));
        let task_type = label(&**job, jobs::LABEL_TASK_TYPE);
        counted.push(CountedJob {
            job: key(&**job),
            finished: outcome::is_finished(job) || is_suspended,
            is_restore: task_type == Some(TaskType::Restore.as_str()),
            created: job.metadata.creation_timestamp.as_ref().map(utc),
        });
    }
    counted
}

impl<'o> Decisions<'o> {
    fn policy(&self) -> Option<&'o EtcdBackupPolicy> {
        self.observed.policy.as_deref()
    }

    /// Returns the earlier attempt at an action in this reconciliation.
    fn attempt(&self, description: &str) -> Option<&'o AttemptedAction> {
        let mut attempted = self.observed.attempted.iter();
        attempted.find(|t| t.action == description)
    }

    /// Returns the requests for the Jobs that are due and were not tried to create in this reconciliation.
    pub fn slot_requests(&self) -> Vec<SlotRequest> {
        let mut requests = Vec::new();
        if self.problem.is_none()
            && let Ok(start) = &self.threshold_job
        {
            requests.push(compaction::slot_request(self.observed, start));
        }
        for (task, step) in &self.task_steps {
            if !matches!(step, TaskStep::CreateJob) {
                continue;
            }
            requests.push(SlotRequest {
                requester: Requester::Task {
                    task: key(&***task),
                    policy: self.observed.key.clone(),
                },
                job: (self.observed.key.0.clone(), jobs::task_job_name(task)),
                is_restore: task.spec.type_ == TaskType::Restore,
            });
        }
        requests.retain(|r| self.attempt(&create_job_description(&r.job.1)).is_none());
        requests
    }

    /// Decides on the next step of each task that is not being deleted.
    fn decide_tasks(&self) -> Vec<(&'o Arc<EtcdBackupTask>, TaskStep)> {
        let health = self.health.as_ref().filter(|h| !h.is_backed_up());
        let context = AdmissionContext {
            policy: self.policy(),
            backup_not_ready: health.map(|h| h.backup_ready.message.as_str()),
            not_allowed: &|task| self.options.allowed.task_problems(task),
        };
        let mut admissions = task_queue::admit(&self.observed.tasks, &context, self.now);
        let mut steps = Vec::new();
        for task in &self.observed.tasks {
            if task.metadata.deletion_timestamp.is_none() {
                let admission = admissions.remove(&task.name_any());
                steps.push((task, self.decide_task(task, admission)));
            }
        }
        steps
    }

    fn decide_task(&self, task: &EtcdBackupTask, admission: Option<Admission>) -> TaskStep {
        let (observed, now) = (self.observed, self.now);
        let old = task.status.clone().unwrap_or_default();
        if old.state.is_final() {
            return TaskStep::CleanUp;
        }
        if let Some(job) = task::job(observed, task) {
            // The Job counts even if the status does not mention it: that write may have failed.
            let pods = observed.pods_of(job);
            let progress = task::progress(task, &old, self.policy(), job, &pods, now);
            return TaskStep::Report(progress);
        }
        if old.state != TaskState::Pending {
            if compaction::is_recent(old.initiated_at, now) {
                return TaskStep::WaitUntil(later(now, WATCH_DELAY));
            }
            return TaskStep::Report((task::without_job(task, self.policy()), None));
        }
        match admission {
            // Cannot happen: every Pending task is decided on.
            None => TaskStep::WaitUntil(later(now, WATCH_DELAY)),
            Some(Admission::Reject(refusal)) => {
                TaskStep::Report((TaskProgress::rejected(refusal), None))
            }
            Some(Admission::Wait {
                reason,
                message,
                requeue_at,
            }) => TaskStep::Report((TaskProgress::Waiting { reason, message }, requeue_at)),
            Some(Admission::Start) => match self.wait_before_start(task) {
                Some(waiting) => TaskStep::Report(waiting),
                None => TaskStep::CreateJob,
            },
        }
    }

    /// Returns why the next task of the policy must wait for something other than a task.
    fn wait_before_start(&self, task: &EtcdBackupTask) -> Option<TimedProgress> {
        let waiting = |reason, message| TaskProgress::Waiting { reason, message };
        if let Some(problem) = &self.problem {
            let message = format!("the policy is not Ready: {}", problem.message);
            return Some((waiting("PolicyNotReady", message), None));
        }
        // Another task may have started while this one was postponed.
        if let Some((blocker, requeue_at)) = task::blocker(task, self.observed, self.now) {
            let message = format!("{blocker} has not ended");
            return Some((waiting(QUEUED, message), requeue_at));
        }
        if task.spec.type_ == TaskType::OnDemandCompaction
            && let Ok(start) = &self.threshold_job
        {
            let message = format!("the Job {} is about to start", start.job.name);
            let requeue_at = Some(later(self.now, WATCH_DELAY));
            return Some((waiting(QUEUED, message), requeue_at));
        }
        None
    }

    /// Returns the plan with the limiter's decision for each requested Job.
    pub fn plan(mut self, slots: &BTreeMap<Key, SlotDecision>) -> Plan {
        let mut plan = Plan {
            requeue_at: self.observed.requeue_at,
            ..Plan::default()
        };
        let compaction_healthy = self.plan_threshold_job(slots, &mut plan);
        let task_progress = self.plan_tasks(slots, &mut plan);
        self.plan_policy(compaction_healthy, &task_progress, &mut plan);
        for (task, progress) in &task_progress {
            plan.tasks.extend(self.task_status(task, progress));
        }
        plan.actions
            .retain(|action| self.attempt(&action.description()).is_none());
        plan
    }

    fn slot<'s>(
        &self,
        slots: &'s BTreeMap<Key, SlotDecision>,
        job: &str,
    ) -> Option<&'s SlotDecision> {
        slots.get(&(self.observed.key.0.clone(), job.to_owned()))
    }

    /// Plans the Job of a threshold. Returns the condition CompactionHealthy; `None` if no compactions are
    /// started.
    fn plan_threshold_job(
        &self,
        slots: &BTreeMap<Key, SlotDecision>,
        plan: &mut Plan,
    ) -> Option<Assessment> {
        let policy = self.policy().filter(|_| self.options.compactions)?;
        let (namespace, name) = &self.observed.key;
        plan.requeue_by(self.compaction.requeue_at);
        let mut refusal = None;
        match &self.threshold_job {
            Err(not_due) => {
                let reason = &not_due.reason;
                tracing::debug!(namespace, policy = name, "no compaction: {reason}");
                plan.requeue_by(not_due.requeue_at);
            }
            Ok(start) => {
                let reason_to_wait = self.create_threshold_job(policy, start, slots, plan);
                if let Some(why) = reason_to_wait {
                    tracing::debug!(namespace, policy = name, "{}; but {why}", start.reason);
                }
                let attempt = self.attempt(&create_job_description(&start.job.name));
                refusal = attempt.and_then(|attempt| attempt.refusal.as_ref());
            }
        }
        let healthy = match refusal {
            Some(refusal) => conditions::job_refused(&refusal.message),
            None => conditions::compaction_healthy(
                policy,
                &self.observed.facts,
                self.compaction.last.as_ref(),
                &policy::renewal_times(self.observed),
                self.now,
            ),
        };
        plan.requeue_by(healthy.stale_at);
        Some(healthy)
    }

    /// Plans a Job that is due, or returns why it has to wait.
    fn create_threshold_job(
        &self,
        policy: &EtcdBackupPolicy,
        start: &ThresholdStart,
        slots: &BTreeMap<Key, SlotDecision>,
        plan: &mut Plan,
    ) -> Option<String> {
        if let Some(problem) = &self.problem {
            return Some(problem.message.clone());
        }
        match self.slot(slots, &start.job.name)? {
            SlotDecision::Wait { reason, freeze } => {
                plan.events.extend(freeze.as_ref().map(freeze_event));
                Some(reason.clone())
            }
            SlotDecision::Granted => {
                let settings = &self.options.settings;
                let action = compaction::create_job(policy, start.clone(), settings);
                plan.actions.push(action);
                None
            }
        }
    }

    /// Plans the Jobs of tasks, and the cleanup of those that have ended. Returns the progress of the others.
    fn plan_tasks(
        &mut self,
        slots: &BTreeMap<Key, SlotDecision>,
        plan: &mut Plan,
    ) -> Vec<(Arc<EtcdBackupTask>, TaskProgress)> {
        let mut all_progress = Vec::new();
        for (task, step) in std::mem::take(&mut self.task_steps) {
            let progress = match step {
                TaskStep::Report(progress) => Some(progress),
                TaskStep::CreateJob => self.plan_task_job(task, slots, plan),
                TaskStep::WaitUntil(at) => {
                    plan.requeue_by(Some(at));
                    None
                }
                TaskStep::CleanUp => {
                    let job = task::job(self.observed, task);
                    let (actions, expires_at) = task::clean_up(task, job, self.now);
                    plan.actions.extend(actions);
                    plan.requeue_by(expires_at);
                    None
                }
            };
            if let Some((progress, requeue_at)) = progress {
                plan.requeue_by(requeue_at);
                all_progress.push((task.clone(), progress));
            }
        }
        all_progress
    }

    /// Plans the Job of a task, or returns why it has to wait.
    fn plan_task_job(
        &self,
        task: &EtcdBackupTask,
        slots: &BTreeMap<Key, SlotDecision>,
        plan: &mut Plan,
    ) -> Option<TimedProgress> {
        let name = jobs::task_job_name(task);
        if let Some(attempt) = self.attempt(&create_job_description(&name)) {
            return task::refused(attempt, self.now);
        }
        match self.slot(slots, &name)? {
            SlotDecision::Granted => {
                let job = jobs::task_job(self.policy()?, task, &self.options.settings);
                plan.actions.push(Action::CreateJob {
                    job: Box::new(job),
                    start: None,
                    event: PlannedEvent {
                        warning: false,
                        reason: "TaskStarted".to_owned(),
                        action: task.spec.type_.as_str(),
                        text: format!("created the Job {name}"),
                    },
                });
                None
            }
            SlotDecision::Wait { reason, freeze } => {
                plan.events.extend(freeze.as_ref().map(freeze_event));
                let waiting = TaskProgress::Waiting {
                    reason: TOO_MANY_JOBS,
                    message: reason.clone(),
                };
                Some((waiting, None))
            }
        }
    }

    /// Plans the objects of the policy, and its status.
    fn plan_policy(
        &mut self,
        compaction_healthy: Option<Assessment>,
        task_progress: &[(Arc<EtcdBackupTask>, TaskProgress)],
        plan: &mut Plan,
    ) {
        let (Some(health), Some(policy)) = (self.health.take(), self.observed.policy.clone())
        else {
            return;
        };
        let objects = self.plan_objects(&policy, health.is_backed_up());
        plan.actions.extend(objects);

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
        let (status, stale_at) = policy::status(&policy, self.observed, findings, self.now);
        plan.requeue_by(stale_at);
        plan.policy = changed_status(policy, status);
    }

    /// Plans the CronJobs, the follower and the Leases of the policy.
    fn plan_objects(&self, policy: &EtcdBackupPolicy, is_backed_up: bool) -> Vec<Action> {
        let (observed, options) = (self.observed, self.options);
        let problem = self.problem.as_ref();
        let Some(problem) = problem.filter(|p| policy::keeps_objects(p)) else {
            return objects::apply_all(policy, observed, options, problem, is_backed_up, self.now);
        };
        if policy.spec.suspend || problem.reason == policy::NOT_ALLOWED {
            objects::stop_all(policy, observed)
        } else {
            Vec::new()
        }
    }

    /// Returns the first refusal of an object of the policy in this reconciliation. Refused Jobs are reported
    /// elsewhere: by CompactionHealthy and by the statuses of tasks.
    fn apply_refusal(&self) -> Option<&'o Refusal> {
        let mut attempted = self.observed.attempted.iter();
        attempted.find_map(|t| {
            let refusal = t.refusal.as_ref()?;
            is_for_policy_objects(&t.action).then_some(refusal)
        })
    }

    /// Returns the status of a task, if it has changed.
    fn task_status(
        &self,
        task: &Arc<EtcdBackupTask>,
        progress: &TaskProgress,
    ) -> Option<TaskStatus> {
        let old = task.status.clone().unwrap_or_default();
        let job_name = jobs::task_job_name(task);
        let status = task::status(task, &old, progress, &job_name, self.now);
        if status == old {
            return None;
        }
        Some(TaskStatus {
            event: task::event(task, &old, &status, progress),
            duration: task::duration(progress),
            task: task.clone(),
            status,
        })
    }
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
    Some(PolicyStatus {
        policy,
        status,
        events,
        compaction_ended,
    })
}

/// Returns whether a compaction succeeded, and how long it took.
fn compaction_result(last: &LastCompaction) -> (bool, Duration) {
    let times = last.run.completion_time.zip(last.run.start_time);
    let duration = times.and_then(|(end, start)| (end - start).to_std().ok());
    let succeeded = last.run.state == RunState::Succeeded;
    (succeeded, duration.unwrap_or_default())
}

fn freeze_event(freeze: &Freeze) -> PlannedEvent {
    PlannedEvent {
        warning: true,
        reason: TOO_MANY_JOBS.to_owned(),
        action: "Freeze",
        text: format!(
            "{} Jobs of thresholds and tasks are running, but --max-jobs allows {}: new ones start when {} left",
            freeze.active,
            freeze.cap,
            job_limits::or_fewer(freeze.until)
        ),
    }
}
