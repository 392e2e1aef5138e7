//! From what is known of a policy to what is to be done: pure, with the time given.
//!
//! First [`decide`] tells which Jobs are wanted; the limits answer whose turn it is; then [`Decided::plan`] gives the
//! actions, the statuses, what people are told, and when to look again. A status tells what is there, never what is
//! intended: as long as there are actions, they are done first, and all is observed again.

pub mod compaction;
pub mod conditions;
pub mod job_limits;
mod objects;
mod policy;
mod task;
mod task_queue;
#[cfg(test)]
mod tests;
pub mod threshold;

pub use objects::Desired;
pub use policy::snapshot_ages;

use super::api::{
    EtcdBackupPolicy, EtcdBackupPolicyStatus, EtcdBackupTask, EtcdBackupTaskStatus, LastCompaction,
    TaskState, TaskType,
};
use super::jobs::{self, Allowed, Settings};
use super::names::{Key, key, label};
use super::observe::threshold_jobs::{ThresholdStart, is_of_task, is_of_threshold};
use super::observe::{
    AppliedObject, AttemptedAction, Observed, PackedObject, WATCH_DELAY, outcome,
};
use super::times::{later, sooner, utc};
use chrono::{DateTime, Utc};
use conditions::{Judgement, Problem};
use job_limits::{Answer, Asker, Seen, Wanted};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use kube::core::ApiResource;
use kube::{Resource, ResourceExt};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use task::{Step, Timed};
use task_queue::{QUEUED, Surroundings, Verdict};

/// What plans depend on beside what is observed.
#[derive(Debug, Clone)]
pub struct Options {
    /// Of the Jobs.
    pub settings: Settings,
    /// The namespaces that are looked after; empty for all.
    pub namespaces: Vec<String>,
    /// What policies and tasks may ask for.
    pub allowed: Allowed,
    /// Whether what was carried out before, and is not allowed, is refused.
    pub enforce_existing: bool,
    /// Whether thresholds are looked at.
    pub compactions: bool,
    /// Whether tasks are.
    pub tasks: bool,
}

/// Something that people are told of an object: an Event, and a line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Whether it is a warning.
    pub warning: bool,
    /// A word for machines.
    pub reason: String,
    /// What the controller was at, a word.
    pub action: &'static str,
    /// For people.
    pub text: String,
}

/// Something to be written. Each may be done twice.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// The Jobs' service account of the namespace, and what binds it to their rights.
    MakeAccount,
    /// An empty Lease, if it is not there.
    CreateLease(Box<Lease>),
    /// A Job of a threshold or a task.
    CreateJob {
        /// The Job.
        job: Box<Job>,
        /// What it is made for, of a threshold.
        start: Option<ThresholdStart>,
        /// What is told then.
        note: Note,
    },
    /// An object is to be as it should be; what is told if it was not.
    Apply(Box<Desired>, Note),
    /// A part of an object is to be another one.
    Change(ApiResource, String, Value),
    /// An object of this UID is to go.
    Delete(ApiResource, String, Option<String>),
}

impl Action {
    /// In words; two actions of one policy have different ones.
    pub fn what(&self) -> String {
        match self {
            Action::MakeAccount => format!("make the ServiceAccount {}", jobs::JOBS_ACCOUNT),
            Action::CreateLease(lease) => format!("create Lease {}", lease.name_any()),
            Action::CreateJob { job, .. } => creates(&job.name_any()),
            Action::Apply(desired, _) => {
                format!("apply {} {}", desired.resource.kind, desired.name)
            }
            Action::Change(resource, name, _) => format!("change {} {name}", resource.kind),
            Action::Delete(resource, name, _) => format!("delete {} {name}", resource.kind),
        }
    }

    fn delete<K: Resource<DynamicType = ()>>(object: &K) -> Action {
        Action::Delete(
            ApiResource::erase::<K>(&()),
            object.name_any(),
            object.uid(),
        )
    }

    fn delete_made<K: Resource<DynamicType = ()>>(made: &PackedObject) -> Action {
        let resource = ApiResource::erase::<K>(&());
        Action::Delete(resource, made.key.1.clone(), made.uid.clone())
    }

    fn change<K: Resource<DynamicType = ()>>(made: &PackedObject, mut part: Value) -> Action {
        // Not of another one by that name.
        part["metadata"]["uid"] = made.uid.clone().into();
        Action::Change(ApiResource::erase::<K>(&()), made.key.1.clone(), part)
    }
}

fn creates(job: &str) -> String {
    format!("create Job {job}")
}

/// The status of a policy that is to be written.
#[derive(Debug)]
pub struct PolicyStatus {
    /// Of this policy.
    pub policy: Arc<EtcdBackupPolicy>,
    /// The status.
    pub status: EtcdBackupPolicyStatus,
    /// What is told then.
    pub notes: Vec<Note>,
    /// A compaction that has ended: whether it succeeded, and how long it took.
    pub compaction_ended: Option<(bool, Duration)>,
}

/// The status of a task that is to be written.
#[derive(Debug)]
pub struct TaskStatus {
    /// Of this task.
    pub task: Arc<EtcdBackupTask>,
    /// The status.
    pub status: EtcdBackupTaskStatus,
    /// What is told then.
    pub note: Option<Note>,
    /// How long it took, if it ends with that.
    pub took: Option<Duration>,
}

/// What is to be done for a policy.
#[derive(Debug, Default)]
pub struct Plan {
    /// What is to be written before any status.
    pub actions: Vec<Action>,
    /// The policy's status, if it is another one.
    pub policy: Option<PolicyStatus>,
    /// The statuses of tasks that are others.
    pub tasks: Vec<TaskStatus>,
    /// What is told of the policy apart from its status.
    pub notes: Vec<Note>,
    /// When time alone makes another plan of it.
    pub look_again: Option<DateTime<Utc>>,
}

/// What was decided on what is known: all but whose turn it is.
pub struct Decided<'o> {
    observed: &'o Observed,
    options: &'o Options,
    now: DateTime<Utc>,
    problem: Option<Problem>,
    health: Option<policy::Health>,
    compaction: compaction::Look,
    start: Result<ThresholdStart, compaction::Idle>,
    steps: Vec<(&'o Arc<EtcdBackupTask>, Next)>,
}

/// What is next for a task.
enum Next {
    /// It is so, or waits so.
    Is(Timed),
    /// It is its turn within the policy.
    Job,
    /// It has ended before.
    Over,
    /// Nothing can be told yet; look again then.
    Unknown(DateTime<Utc>),
}

/// Decides on what is known of a policy and its tasks.
pub fn decide<'o>(observed: &'o Observed, options: &'o Options, now: DateTime<Utc>) -> Decided<'o> {
    let policy = observed.policy.as_deref();
    let problem = policy.and_then(|p| policy::impediment(p, observed, options));
    let health = policy.map(|p| policy::Health::of(p, observed, now));
    let (compaction, start) = match options.compactions {
        true => {
            let look = compaction::Look::at(observed, now);
            let start = look.start(observed, now);
            (look, start)
        }
        false => (
            compaction::Look::default(),
            Err(("compactions are turned off".to_owned(), None)),
        ),
    };
    let mut decided = Decided {
        observed,
        options,
        now,
        problem,
        health,
        compaction,
        start,
        steps: Vec::new(),
    };
    if options.tasks {
        decided.steps = decided.steps_of_tasks();
    }
    decided
}

/// The Jobs of a policy that count for the limits.
pub fn counted(observed: &Observed) -> Vec<Seen> {
    let counts = |job: &&Arc<Job>| is_of_threshold(job) || is_of_task(job);
    let counted = observed.jobs.iter().filter(counts);
    let restore = TaskType::Restore.as_str();
    // One that somebody has suspended has no Pods, and no end.
    let is_suspended = |job: &Job| job.spec.as_ref().is_some_and(|s| s.suspend == Some(true));
    let counted = counted.map(|job| Seen {
        job: key(&**job),
        finished: outcome::is_finished(job) || is_suspended(job),
        is_restore: label(&**job, jobs::LABEL_TASK_TYPE) == Some(restore),
        created: job.metadata.creation_timestamp.as_ref().map(utc),
    });
    counted.collect()
}

impl<'o> Decided<'o> {
    fn tried(&self, what: &str) -> Option<&'o AttemptedAction> {
        self.observed.attempted.iter().find(|t| t.action == what)
    }

    fn policy(&self) -> Option<&'o EtcdBackupPolicy> {
        self.observed.policy.as_deref()
    }

    /// The Jobs that are to be created, if it is their turn.
    pub fn wanted(&self) -> Vec<Wanted> {
        let may_start = self.problem.is_none();
        let start = self.start.as_ref().ok().filter(|_| may_start);
        let start = start.map(|start| compaction::wanted(self.observed, start));
        let jobs = self
            .steps
            .iter()
            .filter(|(_, next)| matches!(next, Next::Job));
        let tasks = jobs.map(|(task, _)| Wanted {
            asker: Asker::Task {
                task: key(&***task),
                policy: self.observed.key.clone(),
            },
            job: (self.observed.key.0.clone(), jobs::task_job_name(task)),
            is_restore: task.spec.type_ == TaskType::Restore,
        });
        let mut wanted: Vec<Wanted> = start.into_iter().chain(tasks).collect();
        wanted.retain(|w| self.tried(&creates(&w.job.1)).is_none());
        wanted
    }

    fn steps_of_tasks(&self) -> Vec<(&'o Arc<EtcdBackupTask>, Next)> {
        let not_ready = self.health.as_ref().filter(|h| !h.is_backed_up());
        let not_ready = not_ready.map(|h| h.backup_ready.message.as_str());
        let surroundings = Surroundings {
            policy: self.policy(),
            backup_not_ready: not_ready,
            not_allowed: &|task| self.options.allowed.task_problems(task),
        };
        let verdicts = task_queue::judge(&self.observed.tasks, &surroundings, self.now);
        let tasks = self.observed.tasks.iter();
        let open = tasks.filter(|t| t.metadata.deletion_timestamp.is_none());
        open.map(|task| (task, self.next(task, verdicts.get(&task.name_any()))))
            .collect()
    }

    fn next(&self, task: &EtcdBackupTask, verdict: Option<&Verdict>) -> Next {
        let (observed, now) = (self.observed, self.now);
        let old = task.status.clone().unwrap_or_default();
        if old.state.is_final() {
            return Next::Over;
        }
        if let Some(job) = task::job(observed, task) {
            // It is there, even if the write that told so was lost.
            let pods = observed.pods_of(job);
            return Next::Is(task::progress(task, &old, self.policy(), job, &pods, now));
        }
        if old.state != TaskState::Pending {
            return match compaction::is_young(old.initiated_at, now) {
                true => Next::Unknown(later(now, WATCH_DELAY)),
                false => Next::Is((task::without_job(task, self.policy()), None)),
            };
        }
        let waits =
            |reason, message: String, again| Next::Is((Step::Waits(reason, message), again));
        match verdict {
            // All that are Pending are judged.
            None => Next::Unknown(later(now, WATCH_DELAY)),
            Some(Verdict::Reject(refusal)) => Next::Is((Step::rejected(refusal.clone()), None)),
            Some(Verdict::Wait {
                reason,
                message,
                look_again,
            }) => waits(reason, message.clone(), *look_again),
            Some(Verdict::Go) => {
                if let Some(problem) = &self.problem {
                    let message = format!("the policy is not ready: {}", problem.message);
                    return waits("PolicyNotReady", message, None);
                }
                // One that was postponed may come back while one behind it runs.
                if let Some((other, again)) = task::running(task, observed, now) {
                    return waits(QUEUED, format!("{other} has not ended"), again);
                }
                let compacts = task.spec.type_ == TaskType::OnDemandCompaction;
                if let Some(start) = self.start.as_ref().ok().filter(|_| compacts) {
                    let message = format!("{} is about to start", start.job.name);
                    return waits(QUEUED, message, Some(later(now, WATCH_DELAY)));
                }
                Next::Job
            }
        }
    }

    /// The plan, with the answers of the limits by Job.
    pub fn plan(mut self, turns: &BTreeMap<Key, Answer>) -> Plan {
        let mut plan = Plan {
            look_again: self.observed.look_again,
            ..Plan::default()
        };
        let healthy = self.plan_compaction(turns, &mut plan);
        let steps = self.plan_tasks(turns, &mut plan);
        self.plan_policy(healthy, &steps, &mut plan);
        for (task, step) in &steps {
            plan.tasks.extend(self.task_status(task, step));
        }
        plan.actions
            .retain(|action| self.tried(&action.what()).is_none());
        plan
    }

    fn answer<'t>(&self, turns: &'t BTreeMap<Key, Answer>, job: &str) -> Option<&'t Answer> {
        turns.get(&(self.observed.key.0.clone(), job.to_owned()))
    }

    /// Plans the Job of a threshold; gives how compactions are.
    fn plan_compaction(
        &mut self,
        turns: &BTreeMap<Key, Answer>,
        plan: &mut Plan,
    ) -> Option<Judgement> {
        let policy = self.policy().filter(|_| self.options.compactions)?;
        let (namespace, name) = &self.observed.key;
        plan.look_again = sooner(plan.look_again, self.compaction.look_again);
        match &self.start {
            Err((reason, again)) => {
                tracing::debug!(namespace, policy = name, "no compaction: {reason}");
                plan.look_again = sooner(plan.look_again, *again);
            }
            Ok(start) => {
                let why = match (&self.problem, self.answer(turns, &start.job.name)) {
                    (Some(problem), _) => Some(problem.message.clone()),
                    (None, Some(Answer::Wait { reason, freeze })) => {
                        plan.notes.extend(freeze.as_ref().map(freeze_note));
                        Some(reason.clone())
                    }
                    (None, None) => None,
                    (None, Some(Answer::Granted)) => {
                        let settings = &self.options.settings;
                        let action = compaction::creation(policy, start.clone(), settings);
                        plan.actions.push(action);
                        None
                    }
                };
                if let Some(why) = why {
                    tracing::debug!(namespace, policy = name, "{}; but {why}", start.reason);
                }
            }
        }
        let job = self
            .start
            .as_ref()
            .ok()
            .map(|start| creates(&start.job.name));
        let tried = job.and_then(|job| self.tried(&job));
        let healthy = match tried.and_then(|tried| tried.refusal.as_ref()) {
            Some(refusal) => conditions::job_refused(&refusal.message),
            None => conditions::compaction_healthy(
                policy,
                &self.observed.facts,
                self.compaction.last.as_ref(),
                &policy::seen(self.observed),
                self.now,
            ),
        };
        plan.look_again = sooner(plan.look_again, healthy.stale_at);
        Some(healthy)
    }

    /// Plans the Jobs of tasks, and what goes; gives how each task is.
    fn plan_tasks(
        &mut self,
        turns: &BTreeMap<Key, Answer>,
        plan: &mut Plan,
    ) -> Vec<(Arc<EtcdBackupTask>, Step)> {
        let mut steps = Vec::new();
        for (task, next) in std::mem::take(&mut self.steps) {
            let (step, again) = match next {
                Next::Is((step, again)) => (Some(step), again),
                Next::Unknown(again) => (None, Some(again)),
                Next::Over => {
                    let job = task::job(self.observed, task);
                    let (actions, again) = task::ended(task, job, self.now);
                    plan.actions.extend(actions);
                    (None, again)
                }
                Next::Job => self.plan_job(task, turns, plan),
            };
            plan.look_again = sooner(plan.look_again, again);
            steps.extend(step.map(|step| (task.clone(), step)));
        }
        steps
    }

    fn plan_job(
        &self,
        task: &EtcdBackupTask,
        turns: &BTreeMap<Key, Answer>,
        plan: &mut Plan,
    ) -> (Option<Step>, Option<DateTime<Utc>>) {
        let name = jobs::task_job_name(task);
        if let Some(tried) = self.tried(&creates(&name)) {
            let refused = task::refused(tried, self.now);
            return refused.map_or((None, None), |(step, again)| (Some(step), again));
        }
        match (self.answer(turns, &name), self.policy()) {
            (Some(Answer::Granted), Some(policy)) => {
                plan.actions.push(Action::CreateJob {
                    job: Box::new(jobs::task_job(policy, task, &self.options.settings)),
                    start: None,
                    note: Note {
                        warning: false,
                        reason: "TaskStarted".to_owned(),
                        action: task.spec.type_.as_str(),
                        text: format!("the Job {name} was created"),
                    },
                });
                (None, None)
            }
            (Some(Answer::Wait { reason, freeze }), _) => {
                plan.notes.extend(freeze.as_ref().map(freeze_note));
                (Some(Step::Waits("TooManyJobs", reason.clone())), None)
            }
            _ => (None, None),
        }
    }

    /// Plans the objects of the policy, and its status.
    fn plan_policy(
        &mut self,
        healthy: Option<Judgement>,
        steps: &[(Arc<EtcdBackupTask>, Step)],
        plan: &mut Plan,
    ) {
        let (Some(health), Some(policy)) = (self.health.take(), self.observed.policy.clone())
        else {
            return;
        };
        let (observed, options, now) = (self.observed, self.options, self.now);
        plan.actions.extend(match &self.problem {
            Some(problem) if policy::leaves_all_as_it_is(problem) => {
                let is_stopped = policy.spec.suspend
                    || options.enforce_existing && problem.reason == policy::NOT_ALLOWED;
                match is_stopped {
                    true => objects::stop(&policy, observed),
                    false => Vec::new(),
                }
            }
            problem => objects::of_policy(
                &policy,
                observed,
                options,
                problem.as_ref(),
                health.is_backed_up(),
                now,
            ),
        });
        let mut tried = observed.attempted.iter();
        // Of Jobs that are refused, and of tasks that do not go, others tell.
        let is_of_policy = |t: &&AttemptedAction| {
            !t.action.starts_with(&creates("")) && !t.action.starts_with("delete ")
        };
        let refusal = tried.find(|t| is_of_policy(t) && t.refusal.is_some());
        let refusal = refusal.and_then(|t| t.refusal.as_ref()).map(|r| Problem {
            reason: r.reason.to_owned(),
            message: r.message.clone(),
        });
        let problem = self.problem.as_ref().or(refusal.as_ref());
        let restorations = steps
            .iter()
            .filter_map(|(task, step)| task::restoration(task, step));
        let findings = policy::Findings {
            health,
            problem,
            compaction: healthy.as_ref().map(|h| (self.compaction.last.clone(), h)),
            restorations: restorations.collect(),
        };
        let (status, stale_at) = policy::status(&policy, observed, options, findings, now);
        plan.look_again = sooner(plan.look_again, stale_at);
        let old = policy.status.clone().unwrap_or_default();
        if old == status {
            return;
        }
        let mut notes = policy::notes(&old.conditions, &status.conditions);
        let end = compaction::end(
            old.last_compaction.as_ref(),
            status.last_compaction.as_ref(),
        );
        let compaction_ended = end.as_ref().and(status.last_compaction.as_ref()).map(took);
        notes.extend(end);
        plan.policy = Some(PolicyStatus {
            policy,
            status,
            notes,
            compaction_ended,
        });
    }

    fn task_status(&self, task: &Arc<EtcdBackupTask>, step: &Step) -> Option<TaskStatus> {
        let old = task.status.clone().unwrap_or_default();
        let name = jobs::task_job_name(task);
        let status = task::status(task, &old, step, &name, self.now);
        (status != old).then(|| TaskStatus {
            note: task::note(task, &old, &status, step),
            took: task::took(step),
            task: task.clone(),
            status,
        })
    }
}

/// Whether a compaction succeeded, and how long it took.
fn took(last: &LastCompaction) -> (bool, Duration) {
    let took = last.run.completion_time.zip(last.run.start_time);
    let took = took.and_then(|(end, start)| (end - start).to_std().ok());
    let succeeded = last.run.state == super::api::RunState::Succeeded;
    (succeeded, took.unwrap_or_default())
}

fn freeze_note(freeze: &job_limits::Freeze) -> Note {
    Note {
        warning: true,
        reason: "TooManyJobs".to_owned(),
        action: "Freeze",
        text: format!(
            "{} Jobs of thresholds and tasks run, and no more than {} may: none is started until there are {} or fewer",
            freeze.active, freeze.cap, freeze.until
        ),
    }
}
