//! The life of a task: it waits, its Job runs, it ends, and some time later it is deleted.
//!
//! Pure: computes a task's progress, status and Events. `task_queue` decides which task may start.

use super::compaction::up_to_revision;
use super::task_queue::{QUEUED, TaskRefusal, failed_precondition};
use super::{Action, PlannedEvent, TOO_MANY_JOBS};
use crate::base::printable;
use crate::controller::api::{
    DEFAULT_TTL_SECONDS, EtcdBackupPolicy, EtcdBackupTask, EtcdBackupTaskStatus, LastOperation,
    LastRun, RunState, TaskError, TaskState, TaskType,
};
use crate::controller::facts::threshold_jobs::{is_of_task, is_of_threshold};
use crate::controller::facts::{Facts, Refusal, outcome, start};
use crate::controller::jobs;
use crate::controller::names::{is_owned, label};
use crate::controller::times::{created, later, sooner, time_delta, utc};
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use std::borrow::Borrow;
use std::time::Duration;

/// The most errors that a status keeps.
const MAX_ERRORS: usize = 5;
/// A Pod that should have ended this long ago is on a node that is gone: do not wait for it.
const POD_LOST: TimeDelta = TimeDelta::minutes(1);
/// When to retry a Job that the API server refused, for example because of a quota.
const REFUSED_RETRY: TimeDelta = TimeDelta::minutes(1);
/// A task whose Pod has not started after this time fails, unless the task says otherwise.
const DEFAULT_START_DEADLINE: Duration = Duration::from_secs(600);

/// The operation of a task's status before its Job exists.
const ADMISSION: &str = "Admission";
/// The operation of a task's status with its Job.
const JOB: &str = "Job";

/// How far a task has come.
#[derive(Debug, Clone, PartialEq)]
pub enum TaskProgress {
    /// The task waits.
    Waiting {
        /// One word, for programs.
        reason: &'static str,
        /// A sentence, for users.
        message: String,
    },
    /// The Job of the task exists and has not ended.
    Running {
        /// The Job so far.
        run: LastRun,
        /// The errors of its Pods.
        errors: Vec<TaskError>,
    },
    /// The Job of the task has ended.
    Ended {
        /// The result of the Job.
        run: LastRun,
        /// The errors of its Pods.
        errors: Vec<TaskError>,
    },
    /// The task ends without a result of a Job.
    Refused {
        /// Why.
        refusal: TaskRefusal,
        /// `Rejected`, or `Failed` if the task had begun.
        state: TaskState,
    },
}

/// The progress of a task, and when it changes if nothing else happens.
pub type TimedProgress = (TaskProgress, Option<DateTime<Utc>>);

impl TaskProgress {
    /// The task had begun and cannot be completed.
    pub fn failed(refusal: TaskRefusal) -> TaskProgress {
        TaskProgress::Refused {
            refusal,
            state: TaskState::Failed,
        }
    }

    /// The task is not begun.
    pub fn rejected(refusal: TaskRefusal) -> TaskProgress {
        TaskProgress::Refused {
            refusal,
            state: TaskState::Rejected,
        }
    }
}

/// Returns the Job of a task, if it exists.
pub fn job<'f>(facts: &'f Facts, task: &EtcdBackupTask) -> Option<&'f Job> {
    let job = facts.job(&jobs::task_job_name(task))?;
    is_owned(&**job, task).then_some(job)
}

/// Returns the progress of a task that has begun and whose Job is gone.
pub fn without_job(task: &EtcdBackupTask, policy: Option<&EtcdBackupPolicy>) -> TaskProgress {
    TaskProgress::failed(match policy {
        None => policy_deleted(task),
        Some(_) => TaskRefusal {
            code: outcome::JOB_DELETED,
            message: "the Job was deleted before the controller saw its end".to_owned(),
        },
    })
}

/// Returns the progress of a task whose Job was refused.
pub fn refused(refusal: &Refusal, now: DateTime<Utc>) -> TimedProgress {
    let (reason, message) = (refusal.reason, refusal.message.clone());
    if refusal.is_final {
        let code = reason;
        return (TaskProgress::rejected(TaskRefusal { code, message }), None);
    }
    // A slot that comes free wakes the policy.
    let retries = reason != TOO_MANY_JOBS;
    let again_at = retries.then(|| later(now, REFUSED_RETRY));
    (TaskProgress::Waiting { reason, message }, again_at)
}

fn policy_deleted(task: &EtcdBackupTask) -> TaskRefusal {
    TaskRefusal {
        code: "PolicyDeleted",
        message: format!("the policy {} was deleted", task.spec.policy),
    }
}

/// Returns the progress of a task whose Job exists.
pub fn progress(
    task: &EtcdBackupTask,
    old: &EtcdBackupTaskStatus,
    policy: Option<&EtcdBackupPolicy>,
    job: &Job,
    facts: &Facts,
    now: DateTime<Utc>,
) -> TimedProgress {
    let pods = facts.pods_of(job);
    let run = facts.run(job);
    let has_ended = run.state != RunState::Running;
    if !has_ended && policy.is_none() {
        return (TaskProgress::failed(policy_deleted(task)), None);
    }
    if run.state != RunState::Succeeded
        && let Some(first) = outcome::first_ended(&pods)
        && let Some(refusal) = failed_precondition(task.spec.type_, &first)
    {
        return (TaskProgress::rejected(refusal), None);
    }
    if has_ended && outcome::is_settled(&run, now) {
        let errors = if run.state == RunState::Succeeded {
            Vec::new()
        } else {
            errors(&old.last_errors, &pods)
        };
        return (TaskProgress::Ended { run, errors }, None);
    }
    let errors = errors(&old.last_errors, &pods);
    // The Job has ended, but its Pods may report more.
    let settles_at = has_ended.then(|| outcome::settles_at(now));
    let starts_by = start_deadline(task, job, &pods, now);
    if !has_ended && starts_by.is_some_and(|at| at <= now) {
        let why = run
            .message
            .unwrap_or_else(|| "no Pod of the Job has started".to_owned());
        let refusal = TaskRefusal {
            code: "PodNotStarted",
            message: format!("{why}; the task was given up at its startDeadline"),
        };
        return (TaskProgress::failed(refusal), None);
    }
    (
        TaskProgress::Running { run, errors },
        sooner(settles_at, starts_by),
    )
}

/// Returns when a Job is given up because none of its Pods has started; `None` if one has.
fn start_deadline(
    task: &EtcdBackupTask,
    job: &Job,
    pods: &[&Pod],
    now: DateTime<Utc>,
) -> Option<DateTime<Utc>> {
    if outcome::is_suspended(job) || pods.iter().any(|pod| start::has_started(pod)) {
        return None;
    }
    let created = created(&job.metadata);
    let deadline = task.spec.start_deadline.as_ref().and_then(|d| d.value());
    let deadline = deadline.map_or(DEFAULT_START_DEADLINE, |span| span.0);
    Some(later(created.unwrap_or(now).min(now), time_delta(deadline)))
}

/// Returns the errors of a Job's Pods and those known before, newest first.
fn errors<P: Borrow<Pod>>(known: &[TaskError], pods: &[P]) -> Vec<TaskError> {
    let mut errors: Vec<TaskError> = pods
        .iter()
        .filter_map(|pod| pod_error(pod.borrow()))
        .collect();
    errors.extend(known.iter().cloned());
    errors.sort_by(|a, b| (b.observed_at, &a.code).cmp(&(a.observed_at, &b.code)));
    errors.dedup_by(|a, b| a.code == b.code && a.observed_at == b.observed_at);
    errors.truncate(MAX_ERRORS);
    errors
}

/// Returns the error that a Pod ended with.
fn pod_error(pod: &Pod) -> Option<TaskError> {
    let outcome = outcome::pod_outcome(pod);
    if !outcome.ended || outcome.exit_code == Some(0) {
        return None;
    }
    let exit_code = outcome.exit_code;
    let code = outcome
        .reason
        .or_else(|| outcome::reason_of_code(exit_code?))?;
    let description = outcome.message.unwrap_or_else(|| match exit_code {
        Some(code) => format!("the Pod ended with exit code {code}"),
        None => "the Pod ended without an exit code".to_owned(),
    });
    Some(TaskError {
        code,
        description,
        observed_at: outcome.finished_at?,
    })
}

/// Returns a Job or Pod that must end before a task may start, and when to check again even if no watch
/// reports a change.
///
/// These are the Jobs and Pods of other tasks of the policy; for a compaction also the Jobs of thresholds.
pub fn blocker(
    task: &EtcdBackupTask,
    facts: &Facts,
    now: DateTime<Utc>,
) -> Option<(String, Option<DateTime<Utc>>)> {
    let own = jobs::task_job_name(task);
    let compacts = task.spec.type_ == TaskType::OnDemandCompaction;
    for job in &facts.jobs {
        let blocks = is_of_task(job) || compacts && is_of_threshold(job);
        if blocks && job.name_any() != own && !outcome::is_finished(job) {
            return Some((format!("the Job {}", job.name_any()), None));
        }
    }
    // If a task is deleted, its Job is gone at once, but its Pods only when they have ended.
    for pod in &facts.pods {
        let is_of_task = label(&**pod, jobs::LABEL_TASK).is_some();
        let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        if !is_of_task || matches!(phase, Some("Succeeded" | "Failed")) {
            continue;
        }
        let delete_by = pod.metadata.deletion_timestamp.as_ref().map(utc);
        let lost_at = delete_by.map(|delete_by| later(delete_by, POD_LOST));
        let blocks = match lost_at {
            Some(lost_at) => now < lost_at,
            // If the Job of the Pod exists, it has ended: see above.
            None => !facts.jobs.iter().any(|job| is_owned(&**pod, &**job)),
        };
        if blocks {
            return Some((format!("the Pod {}", pod.name_any()), lost_at));
        }
    }
    None
}

/// Returns the status of a task with this progress.
pub fn status(
    task: &EtcdBackupTask,
    old: &EtcdBackupTaskStatus,
    progress: &TaskProgress,
    job_name: &str,
    now: DateTime<Utc>,
) -> EtcdBackupTaskStatus {
    let now = now.trunc_subsecs(0);
    let mut new = old.clone();
    new.observed_generation = task.metadata.generation;
    let (operation, operation_state, reason) = match progress {
        TaskProgress::Waiting { reason, message } => {
            new.state = TaskState::Pending;
            (ADMISSION, "Pending", format!("{reason}: {message}"))
        }
        TaskProgress::Running { run, errors } => {
            new.state = TaskState::InProgress;
            new.last_errors = errors.clone();
            let reason = match &run.message {
                Some(message) => format!("the Job {job_name} is running: {message}"),
                None => format!("the Job {job_name} is running"),
            };
            (JOB, "InProgress", reason)
        }
        TaskProgress::Ended { run, errors } => {
            new.last_errors = errors.clone();
            let ended = run.completion_time.unwrap_or(now);
            new.finished_at = Some(ended);
            if run.state == RunState::Succeeded {
                new.state = TaskState::Succeeded;
                let up_to = up_to_revision(run);
                let reason = format!("the Job {job_name} succeeded{up_to}");
                (JOB, "Completed", reason)
            } else {
                new.state = TaskState::Failed;
                add_final_error(&mut new.last_errors, run, ended);
                (JOB, "Failed", outcome::failure_text(run))
            }
        }
        TaskProgress::Refused { refusal, state } => {
            new.state = *state;
            new.finished_at = Some(now);
            let error = TaskError {
                code: refusal.code.to_owned(),
                description: printable::message(refusal.message.clone()),
                observed_at: now,
            };
            new.last_errors.insert(0, error);
            new.last_errors.truncate(MAX_ERRORS);
            let had_job = old.state != TaskState::Pending || old.job_name.is_some();
            let operation = if had_job { JOB } else { ADMISSION };
            let reason = format!("{}: {}", refusal.code, refusal.message);
            (operation, "Failed", reason)
        }
    };
    if new.state != TaskState::Pending {
        new.initiated_at = new.initiated_at.or(Some(now));
    }
    if matches!(
        progress,
        TaskProgress::Running { .. } | TaskProgress::Ended { .. }
    ) {
        new.job_name = Some(job_name.to_owned());
    }
    let old_operation = old.last_operation.as_ref();
    let unchanged = old_operation.filter(|o| o.name == operation && o.state == operation_state);
    new.last_operation = Some(LastOperation {
        name: operation.to_owned(),
        state: operation_state.to_owned(),
        last_transition_time: unchanged.map_or(now, |o| o.last_transition_time),
        reason: printable::message(reason),
    });
    new
}

/// Puts the error of a failed Job in front of those of its Pods, unless the newest of them has the same code.
fn add_final_error(errors: &mut Vec<TaskError>, run: &LastRun, ended: DateTime<Utc>) {
    let code = run.reason.clone().unwrap_or_else(|| "Failed".to_owned());
    let newest = errors.first();
    if newest.is_some_and(|e| e.code == code) {
        return;
    }
    let error = TaskError {
        code,
        description: run
            .message
            .clone()
            .unwrap_or_else(|| outcome::failure_text(run)),
        // Never before the errors of the Pods.
        observed_at: newest.map_or(ended, |e| ended.max(e.observed_at)),
    };
    errors.insert(0, error);
    errors.truncate(MAX_ERRORS);
}

/// Returns the actions for a task that has ended, and when it expires: an unfinished Job is deleted at once,
/// and the task itself when its time to live is over.
pub fn clean_up(
    task: &EtcdBackupTask,
    job: Option<&Job>,
    now: DateTime<Utc>,
) -> (Vec<Action>, Option<DateTime<Utc>>) {
    let status = task.status.clone().unwrap_or_default();
    let unfinished = job.filter(|job| !outcome::is_finished(job));
    let mut actions: Vec<Action> = unfinished.map(Action::delete).into_iter().collect();
    let expires_at = expires_at(task, &status);
    if expires_at > now {
        return (actions, Some(expires_at));
    }
    actions.push(Action::delete(task));
    (actions, None)
}

fn expires_at(task: &EtcdBackupTask, status: &EtcdBackupTaskStatus) -> DateTime<Utc> {
    let created = created(&task.metadata);
    let ended = status.finished_at.or(status.initiated_at).or(created);
    let ttl_seconds = task
        .spec
        .ttl_seconds_after_finished
        .unwrap_or(DEFAULT_TTL_SECONDS);
    let ttl = TimeDelta::try_seconds(ttl_seconds.max(0)).unwrap_or(TimeDelta::MAX);
    later(ended.unwrap_or_default(), ttl)
}

/// Returns the Event about a changed status, if it deserves one.
pub fn event(
    task: &EtcdBackupTask,
    old: &EtcdBackupTaskStatus,
    new: &EtcdBackupTaskStatus,
    progress: &TaskProgress,
) -> Option<PlannedEvent> {
    let (warning, reason, text) = match progress {
        TaskProgress::Waiting { reason, message } => {
            if waiting_reason(old) == waiting_reason(new) {
                return None;
            }
            let is_warning = ![QUEUED, TOO_MANY_JOBS].contains(reason);
            (is_warning, *reason, message.clone())
        }
        // The creation of the Job has an Event of its own.
        TaskProgress::Running { .. } => return None,
        TaskProgress::Ended { .. } | TaskProgress::Refused { .. } => {
            let operation = new.last_operation.as_ref();
            let text = operation.map(|o| o.reason.clone()).unwrap_or_default();
            match new.state {
                TaskState::Succeeded => (false, "TaskSucceeded", text),
                TaskState::Rejected => (true, "TaskRejected", text),
                _ => (true, "TaskFailed", text),
            }
        }
    };
    Some(PlannedEvent {
        warning,
        reason: reason.to_owned(),
        action: task.spec.type_.as_str(),
        text,
    })
}

/// Returns why a task waits, by its status: `Queued` of `Queued: the task a is running`.
fn waiting_reason(status: &EtcdBackupTaskStatus) -> Option<&str> {
    let operation = status.last_operation.as_ref()?;
    if operation.name != ADMISSION {
        return None;
    }
    let (reason, _) = operation.reason.split_once(':')?;
    Some(reason)
}

/// Returns how long the Job of a task took; `None` if it has not ended.
pub fn duration(progress: &TaskProgress) -> Option<Duration> {
    match progress {
        TaskProgress::Ended { run, .. } => run.duration(),
        _ => None,
    }
}

/// Returns the result of a restore that has ended, for the status of the policy.
pub fn restoration<'p>(task: &EtcdBackupTask, progress: &'p TaskProgress) -> Option<&'p LastRun> {
    match (task.spec.type_, progress) {
        (TaskType::Restore, TaskProgress::Ended { run, .. }) => Some(run),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::EtcdBackupPolicySpec;
    use crate::controller::facts::leases::tests::at;
    use crate::controller::facts::outcome::tests::{failure, job, pod};
    use std::sync::Arc;
    use strum::VariantArray;

    fn task(type_: TaskType) -> EtcdBackupTask {
        let mut task = Arc::unwrap_or_clone(crate::controller::decide::tests::task("t", type_));
        task.metadata.generation = Some(1);
        task.metadata.uid = Some("12345678-9abc".to_owned());
        task
    }

    fn policy() -> EtcdBackupPolicy {
        EtcdBackupPolicy::new("p", EtcdBackupPolicySpec::default())
    }

    /// Returns a Job and facts with its Pods.
    fn with_pods(mut job: Job, pods: &[Pod]) -> (Job, Facts) {
        job.metadata.uid = Some("job".to_owned());
        let mut facts = Facts::default();
        for pod in pods {
            let mut pod = pod.clone();
            pod.metadata.owner_references = Some(vec![jobs::owner(&job)]);
            facts.pods.push(std::sync::Arc::new(pod));
        }
        (job, facts)
    }

    fn progress_of(
        task: &EtcdBackupTask,
        old: &EtcdBackupTaskStatus,
        policy: Option<&EtcdBackupPolicy>,
        job: Job,
        pods: &[Pod],
        seconds: i64,
    ) -> TimedProgress {
        let (job, facts) = with_pods(job, pods);
        progress(task, old, policy, &job, &facts, at(seconds))
    }

    fn waiting() -> TaskProgress {
        TaskProgress::Waiting {
            reason: "Queued",
            message: "the task a is running".to_owned(),
        }
    }

    fn running() -> TaskProgress {
        TaskProgress::Running {
            run: LastRun::default(),
            errors: Vec::new(),
        }
    }

    /// The next status of a task.
    fn after(
        progress: &TaskProgress,
        old: &EtcdBackupTaskStatus,
        seconds: i64,
    ) -> EtcdBackupTaskStatus {
        status(
            &task(TaskType::Verify),
            old,
            progress,
            "t-12345678",
            at(seconds),
        )
    }

    #[test]
    fn a_task_waits_runs_and_ends() {
        let none = EtcdBackupTaskStatus::default();
        let waits = after(&waiting(), &none, 1);
        assert_eq!(waits.state, TaskState::Pending);
        assert_eq!(
            (waits.initiated_at, waits.observed_generation),
            (None, Some(1))
        );
        let operation = waits.last_operation.clone().unwrap();
        assert_eq!(operation.reason, "Queued: the task a is running");
        // The status stays the same while the task waits.
        let still = after(&waiting(), &waits, 9);
        assert_eq!(still, waits);
        let started = after(&running(), &waits, 10);
        assert_eq!(started.state, TaskState::InProgress);
        assert_eq!(started.initiated_at, Some(at(10)));
        assert_eq!(started.job_name.as_deref(), Some("t-12345678"));
        assert_eq!(
            started
                .last_operation
                .as_ref()
                .unwrap()
                .last_transition_time,
            at(10)
        );
        let runs = after(&running(), &started, 20);
        assert_eq!(
            runs.last_operation.as_ref().unwrap().last_transition_time,
            at(10)
        );
        let again = after(&running(), &runs, 30);
        assert_eq!(again, runs);
        let done = LastRun {
            state: RunState::Succeeded,
            completion_time: Some(at(40)),
            revision: Some(7),
            ..LastRun::default()
        };
        let ended = TaskProgress::Ended {
            run: done,
            errors: Vec::new(),
        };
        let done = after(&ended, &runs, 50);
        assert_eq!(
            (done.state, done.finished_at),
            (TaskState::Succeeded, Some(at(40)))
        );
        assert!(done.last_operation.unwrap().reason.contains("revision 7"));
        let refusal = TaskRefusal {
            code: "DuplicateTask",
            message: "the task a is the same".to_owned(),
        };
        let rejected = after(&TaskProgress::rejected(refusal), &waits, 5);
        assert_eq!(
            (rejected.state, rejected.finished_at),
            (TaskState::Rejected, Some(at(5)))
        );
        assert_eq!(rejected.initiated_at, Some(at(5)));
        assert_eq!(rejected.last_errors[0].code, "DuplicateTask");
        assert_eq!(rejected.job_name, None);
    }

    #[test]
    fn a_failed_task_reports_the_errors_of_all_its_pods() {
        let pods = [
            pod("a", 20, 69, &failure(69, "StoreUnreachable")),
            pod("b", 40, 74, &failure(74, "NoSpace")),
        ];
        let failed = || job(Some(("Failed", "BackoffLimitExceeded", "too often")));
        let old = EtcdBackupTaskStatus::default();
        let (t, p) = (task(TaskType::Verify), policy());
        let (progressed, again_at) = progress_of(&t, &old, Some(&p), failed(), &pods, 50);
        assert_eq!(again_at, None);
        let failed_with = after(&progressed, &old, 50);
        assert_eq!(failed_with.state, TaskState::Failed);
        let codes: Vec<&str> = failed_with
            .last_errors
            .iter()
            .map(|e| e.code.as_str())
            .collect();
        assert_eq!(codes, ["NoSpace", "StoreUnreachable"]);
        assert_eq!(failed_with.last_errors[0].observed_at, at(40));
        // While the Job runs, each error is reported once, too.
        let (progressed, _) = progress_of(&t, &old, Some(&p), job(None), &pods[..1], 25);
        let runs = after(&progressed, &old, 25);
        assert_eq!(
            (runs.state, runs.last_errors.len()),
            (TaskState::InProgress, 1)
        );
        let (progressed, _) = progress_of(&t, &runs, Some(&p), job(None), &pods[..1], 30);
        assert_eq!(after(&progressed, &runs, 30), runs);
        // An exceeded deadline comes first.
        let late = job(Some(("Failed", "DeadlineExceeded", "")));
        let (progressed, _) = progress_of(&t, &runs, Some(&p), late, &pods[..1], 60);
        let late = after(&progressed, &runs, 60);
        let codes: Vec<&str> = late.last_errors.iter().map(|e| e.code.as_str()).collect();
        assert_eq!(codes, ["DeadlineExceeded", "StoreUnreachable"]);
        // The Job is known to have ended, but its Pods are not yet.
        let (progressed, again_at) = progress_of(&t, &old, Some(&p), failed(), &[], 50);
        assert!(
            matches!(progressed, TaskProgress::Running { .. }) && again_at == Some(at(52)),
            "{progressed:?}"
        );
        let (progressed, _) = progress_of(&t, &old, Some(&p), failed(), &[], 55);
        let codes = after(&progressed, &old, 55).last_errors;
        assert_eq!(codes[0].code, "BackoffLimitExceeded");
    }

    #[test]
    fn a_task_ends_without_quorum_or_policy() {
        let pods = [
            pod("a", 20, 69, &failure(69, "NoQuorum")),
            pod("b", 40, 69, &failure(69, "EtcdUnreachable")),
        ];
        let old = EtcdBackupTaskStatus::default();
        let p = policy();
        for &type_ in TaskType::VARIANTS {
            let needs = matches!(type_, TaskType::OnDemandSnapshot | TaskType::Maintenance);
            for condition in [None, Some(("Failed", "BackoffLimitExceeded", ""))] {
                let (progressed, _) =
                    progress_of(&task(type_), &old, Some(&p), job(condition), &pods, 60);
                let state = after(&progressed, &old, 60).state;
                assert_eq!(state == TaskState::Rejected, needs, "{type_:?}");
            }
        }
        // The policy was deleted: a running task fails, one that has succeeded stays so.
        let t = task(TaskType::Verify);
        let (progressed, _) = progress_of(&t, &old, None, job(None), &[], 60);
        let gone = after(&progressed, &old, 60);
        assert_eq!(gone.state, TaskState::Failed);
        assert_eq!(gone.last_errors[0].code, "PolicyDeleted");
        let done = job(Some(("Complete", "", "")));
        let (progressed, _) = progress_of(&t, &old, None, done, &[], 600);
        assert_eq!(after(&progressed, &old, 600).state, TaskState::Succeeded);
    }

    #[test]
    fn a_task_whose_pod_never_starts_is_given_up() {
        let old = EtcdBackupTaskStatus::default();
        let (mut t, p) = (task(TaskType::Verify), policy());
        let (waits, again_at) = progress_of(&t, &old, Some(&p), job(None), &[], 599);
        assert!(matches!(waits, TaskProgress::Running { .. }), "{waits:?}");
        assert_eq!(again_at, Some(at(600)));
        let (given_up, _) = progress_of(&t, &old, Some(&p), job(None), &[], 600);
        let status = after(&given_up, &old, 600);
        assert_eq!(
            (status.state, status.last_errors[0].code.as_str()),
            (TaskState::Failed, "PodNotStarted")
        );
        t.spec.start_deadline = Some(crate::base::TextValue::of("1h"));
        let (waits, again_at) = progress_of(&t, &old, Some(&p), job(None), &[], 600);
        assert!(matches!(waits, TaskProgress::Running { .. }) && again_at == Some(at(3600)));
        let started = pod("a", 20, 69, &failure(69, "StoreUnreachable"));
        let (_, again_at) = progress_of(&t, &old, Some(&p), job(None), &[started], 5000);
        assert_eq!(again_at, None);
    }

    #[test]
    fn a_task_that_succeeded_keeps_no_error() {
        let (t, p) = (task(TaskType::Verify), policy());
        let old = EtcdBackupTaskStatus {
            last_errors: vec![TaskError {
                code: "StoreUnreachable".to_owned(),
                description: String::new(),
                observed_at: at(1),
            }],
            ..EtcdBackupTaskStatus::default()
        };
        let done = job(Some(("Complete", "", "")));
        let (ended, _) = progress_of(&t, &old, Some(&p), done, &[], 600);
        assert_eq!(after(&ended, &old, 600).last_errors, []);
    }

    #[test]
    fn a_status_keeps_only_the_newest_errors() {
        let known: Vec<TaskError> = (0..9)
            .map(|i| TaskError {
                code: "NoSpace".to_owned(),
                description: String::new(),
                observed_at: at(i),
            })
            .collect();
        let kept = errors(&known, &[pod("a", 50, 65, &failure(65, "CorruptSnapshot"))]);
        assert_eq!(kept.len(), MAX_ERRORS);
        assert_eq!(kept[0].code, "CorruptSnapshot");
        assert_eq!(kept[1].observed_at, at(8));
    }

    #[test]
    fn a_task_expires_after_its_time_to_live() {
        let mut t = task(TaskType::Verify);
        let mut status = EtcdBackupTaskStatus {
            finished_at: Some(at(100)),
            ..EtcdBackupTaskStatus::default()
        };
        assert_eq!(expires_at(&t, &status), at(100 + 86_400));
        t.spec.ttl_seconds_after_finished = Some(0);
        assert_eq!(expires_at(&t, &status), at(100));
        t.spec.ttl_seconds_after_finished = Some(i64::MAX);
        assert!(expires_at(&t, &status) > at(1_000_000_000));
        t.spec.ttl_seconds_after_finished = Some(5);
        status.finished_at = None;
        assert_eq!(expires_at(&t, &status), at(5));
    }
}
