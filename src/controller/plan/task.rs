//! Tasks: each becomes one Job when its turn has come, and tells how that ended.
//!
//! Pure. Whose turn it is and what is refused, `queue` decides. A task that has ended is deleted some time later.
//! `plan` calls it.

use super::task_queue::{Refusal, rejected_by};
use super::{Action, Note};
use crate::controller::api::{
    DEFAULT_TTL_SECONDS, EtcdBackupPolicy, EtcdBackupTask, EtcdBackupTaskStatus, LastOperation,
    LastRun, RunState, TaskError, TaskState, TaskType,
};
use crate::controller::jobs;
use crate::controller::names::{is_owned, label};
use crate::controller::observe::outcome::{self, POD_STATUS_DELAY};
use crate::controller::observe::threshold_jobs::{is_of_task, is_of_threshold};
use crate::controller::observe::{AttemptedAction, Observed};
use crate::controller::times::{later, utc};
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use std::borrow::Borrow;
use std::time::Duration;

/// So many errors are kept.
const MOST_ERRORS: usize = 5;
/// A Pod that should have ended so long ago is on a node that is gone.
const POD_LOST: TimeDelta = TimeDelta::minutes(1);
/// When to try again what Kubernetes does not take: a quota, say, may be another one by then.
const REFUSED_AGAIN: TimeDelta = TimeDelta::minutes(1);

/// The operations of a task's status.
const ADMISSION: &str = "Admission";
const JOB: &str = "Job";

/// What was found out about a task.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// It waits: a word for machines, a sentence for people.
    Waits(&'static str, String),
    /// Its Job is there, and has not ended.
    Runs(LastRun, Vec<TaskError>),
    /// Its Job has ended.
    Ended(LastRun, Vec<TaskError>),
    /// It is not tried, or no longer.
    Refused(Refusal, TaskState),
}

/// With when time alone makes another one of it.
pub type Timed = (Step, Option<DateTime<Utc>>);

impl Step {
    /// Its Job did not do it.
    pub fn failed(refusal: Refusal) -> Step {
        Step::Refused(refusal, TaskState::Failed)
    }

    /// It was not tried.
    pub fn rejected(refusal: Refusal) -> Step {
        Step::Refused(refusal, TaskState::Rejected)
    }
}

/// The Job of a task, if it is there.
pub fn job<'o>(observed: &'o Observed, task: &EtcdBackupTask) -> Option<&'o Job> {
    let job = observed.job(&jobs::task_job_name(task))?;
    is_owned(&**job, task).then_some(job)
}

/// A task whose Job is gone.
pub fn without_job(task: &EtcdBackupTask, policy: Option<&EtcdBackupPolicy>) -> Step {
    Step::failed(match policy {
        None => policy_deleted(task),
        Some(_) => Refusal {
            code: outcome::JOB_DELETED,
            message: "the Job was deleted before its end was seen".to_owned(),
        },
    })
}

/// A task whose Job was not taken.
pub fn refused(tried: &AttemptedAction, now: DateTime<Utc>) -> Option<Timed> {
    let refusal = tried.refusal.as_ref()?;
    let message = refusal.message.clone();
    Some(match refusal.is_final {
        true => {
            let code = refusal.reason;
            (Step::rejected(Refusal { code, message }), None)
        }
        false => {
            let again = later(now, REFUSED_AGAIN);
            (Step::Waits(refusal.reason, message), Some(again))
        }
    })
}

fn policy_deleted(task: &EtcdBackupTask) -> Refusal {
    Refusal {
        code: "PolicyDeleted",
        message: format!("the policy {} was deleted", task.spec.policy),
    }
}

/// A task whose Job is there.
pub fn progress<P: Borrow<Pod>>(
    task: &EtcdBackupTask,
    old: &EtcdBackupTaskStatus,
    policy: Option<&EtcdBackupPolicy>,
    job: &Job,
    pods: &[P],
    now: DateTime<Utc>,
) -> Timed {
    let run = outcome::last_run(job, pods);
    let is_over = run.state != RunState::Running;
    if !is_over && policy.is_none() {
        return (Step::failed(policy_deleted(task)), None);
    }
    let refused = outcome::first_ended(pods)
        .and_then(|first| rejected_by(task.spec.type_, &first))
        .filter(|_| run.state != RunState::Succeeded);
    if let Some(refusal) = refused {
        return (Step::rejected(refusal), None);
    }
    let errors = errors(&old.last_errors, pods);
    if is_over && outcome::is_settled(&run, now) {
        return (Step::Ended(run, errors), None);
    }
    let look_again = is_over.then(|| later(now, POD_STATUS_DELAY));
    (Step::Runs(run, errors), look_again)
}

/// What the Pods of a Job failed with, and what was known before, the newest first.
fn errors<P: Borrow<Pod>>(known: &[TaskError], pods: &[P]) -> Vec<TaskError> {
    let failed = pods.iter().map(|p| outcome::pod_outcome(p.borrow()));
    let failed = failed.filter(|o| o.ended && o.exit_code != Some(0));
    let failed = failed.filter_map(|o| {
        let code = o
            .reason
            .or_else(|| o.exit_code.map(|c| format!("ExitCode{c}")))?;
        let description = o.message.unwrap_or_else(|| match o.exit_code {
            Some(code) => format!("the Pod ended with exit code {code}"),
            None => "the Pod was ended".to_owned(),
        });
        Some(TaskError {
            code,
            description,
            observed_at: o.finished_at?,
        })
    });
    let mut all: Vec<TaskError> = failed.collect();
    all.extend(known.iter().cloned());
    sorted(all)
}

fn sorted(mut errors: Vec<TaskError>) -> Vec<TaskError> {
    errors.sort_by(|a, b| (b.observed_at, &a.code).cmp(&(a.observed_at, &b.code)));
    errors.dedup_by(|a, b| a.code == b.code && a.observed_at == b.observed_at);
    errors.truncate(MOST_ERRORS);
    errors
}

/// A Job or Pod that must end first: of another task of the same policy, and before a compaction that of a threshold.
/// With it, when to look again where no change of it will tell.
pub fn running(
    task: &EtcdBackupTask,
    observed: &Observed,
    now: DateTime<Utc>,
) -> Option<(String, Option<DateTime<Utc>>)> {
    let own = jobs::task_job_name(task);
    let compacts = task.spec.type_ == TaskType::OnDemandCompaction;
    let mut others = observed.jobs.iter().filter(|job| {
        (is_of_task(job) || compacts && is_of_threshold(job))
            && job.name_any() != own
            && !outcome::is_finished(job)
    });
    if let Some(job) = others.next() {
        return Some((job.name_any(), None));
    }
    // Of a task that was deleted the Job goes at once, its Pods when they have ended.
    let of_tasks = |pod: &&Pod| label(*pod, jobs::LABEL_TASK).is_some();
    for pod in observed.pods.iter().map(|p| &**p).filter(of_tasks) {
        let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            continue;
        }
        // What a lost node does not confirm is not waited for without end.
        let due = pod.metadata.deletion_timestamp.as_ref().map(utc);
        let given_up = due.map(|due| later(due, POD_LOST));
        let is_waited_for = match given_up {
            Some(given_up) => now < given_up,
            // Its Job, if it is there, has ended.
            None => !observed.jobs.iter().any(|job| is_owned(pod, &**job)),
        };
        if is_waited_for {
            return Some((pod.name_any(), given_up));
        }
    }
    None
}

/// The status of a task after a step.
pub fn status(
    task: &EtcdBackupTask,
    old: &EtcdBackupTaskStatus,
    step: &Step,
    job_name: &str,
    now: DateTime<Utc>,
) -> EtcdBackupTaskStatus {
    let now = now.trunc_subsecs(0);
    let mut new = old.clone();
    new.observed_generation = task.metadata.generation;
    let (operation, state, reason) = match step {
        Step::Waits(word, message) => {
            new.state = TaskState::Pending;
            (ADMISSION, "Pending", format!("{word}: {message}"))
        }
        Step::Runs(run, errors) => {
            new.state = TaskState::InProgress;
            new.last_errors = errors.clone();
            let more = run.message.as_ref().map(|m| format!(": {m}"));
            (
                JOB,
                "InProgress",
                format!("the Job {job_name} runs{}", more.unwrap_or_default()),
            )
        }
        Step::Ended(run, errors) => {
            new.last_errors = errors.clone();
            let ended = run.completion_time.unwrap_or(now);
            new.finished_at = Some(ended);
            if run.state == RunState::Succeeded {
                new.state = TaskState::Succeeded;
                let to = run.revision.map(|r| format!(" up to revision {r}"));
                (
                    JOB,
                    "Completed",
                    format!("it is done{}", to.unwrap_or_default()),
                )
            } else {
                new.state = TaskState::Failed;
                let code = run.reason.clone().unwrap_or_else(|| "Failed".to_owned());
                if new.last_errors.first().is_none_or(|e| e.code != code) {
                    let description = run
                        .message
                        .clone()
                        .unwrap_or_else(|| outcome::failure_text(run));
                    let error = TaskError {
                        code,
                        description,
                        // It is what all ended with.
                        observed_at: new
                            .last_errors
                            .first()
                            .map_or(ended, |e| ended.max(e.observed_at)),
                    };
                    new.last_errors.insert(0, error);
                    new.last_errors.truncate(MOST_ERRORS);
                }
                (JOB, "Failed", outcome::failure_text(run))
            }
        }
        Step::Refused(refusal, state) => {
            new.state = *state;
            new.finished_at = Some(now);
            let error = TaskError {
                code: refusal.code.to_owned(),
                description: refusal.message.clone(),
                observed_at: now,
            };
            new.last_errors.insert(0, error);
            new.last_errors.truncate(MOST_ERRORS);
            let operation = match old.state {
                TaskState::Pending if old.job_name.is_none() => ADMISSION,
                _ => JOB,
            };
            (
                operation,
                "Failed",
                format!("{}: {}", refusal.code, refusal.message),
            )
        }
    };
    if new.state != TaskState::Pending {
        new.initiated_at = new.initiated_at.or(Some(now));
    }
    if matches!(step, Step::Runs(..) | Step::Ended(..)) {
        new.job_name = Some(job_name.to_owned());
    }
    let since = old.last_operation.as_ref();
    let since = since.filter(|o| o.name == operation && o.state == state);
    new.last_operation = Some(LastOperation {
        name: operation.to_owned(),
        state: state.to_owned(),
        last_transition_time: since.map_or(now, |o| o.last_transition_time),
        reason,
    });
    new
}

/// What is done about a task that has ended: its Job has nothing to do any more, and it goes itself when its time has
/// come, or is looked at again then.
pub fn ended(
    task: &EtcdBackupTask,
    job: Option<&Job>,
    now: DateTime<Utc>,
) -> (Vec<Action>, Option<DateTime<Utc>>) {
    let status = task.status.clone().unwrap_or_default();
    let unfinished = job.filter(|job| !outcome::is_finished(job));
    let mut actions: Vec<Action> = unfinished.map(Action::delete).into_iter().collect();
    let expires = expires_at(task, &status);
    if expires > now {
        return (actions, Some(expires));
    }
    actions.push(Action::delete(task));
    (actions, None)
}

fn expires_at(task: &EtcdBackupTask, status: &EtcdBackupTaskStatus) -> DateTime<Utc> {
    let created = task.metadata.creation_timestamp.as_ref().map(utc);
    let ended = status.finished_at.or(status.initiated_at).or(created);
    let ttl = task
        .spec
        .ttl_seconds_after_finished
        .unwrap_or(DEFAULT_TTL_SECONDS);
    let ttl = TimeDelta::try_seconds(ttl.max(0)).unwrap_or(TimeDelta::MAX);
    later(ended.unwrap_or_default(), ttl)
}

/// What is told of a step, once it is in the status.
pub fn note(
    task: &EtcdBackupTask,
    old: &EtcdBackupTaskStatus,
    new: &EtcdBackupTaskStatus,
    step: &Step,
) -> Option<Note> {
    let operation = new.last_operation.as_ref();
    let said = operation.map(|o| o.reason.clone()).unwrap_or_default();
    // As `Queued` in `Queued: …`.
    let word = |status: &EtcdBackupTaskStatus| {
        let operation = status.last_operation.as_ref();
        let operation = operation.filter(|o| o.name == ADMISSION);
        operation.and_then(|o| Some(o.reason.split_once(':')?.0.to_owned()))
    };
    let (warning, reason, text) = match step {
        Step::Waits(reason, message) if word(old) != word(new) => (
            !matches!(*reason, "Queued" | "TooManyJobs"),
            *reason,
            message.clone(),
        ),
        // The start of its Job is told when that is created.
        Step::Waits(..) | Step::Runs(..) => return None,
        Step::Ended(..) | Step::Refused(..) => match new.state {
            TaskState::Succeeded => (false, "TaskSucceeded", said),
            TaskState::Rejected => (true, "TaskRejected", said),
            _ => (true, "TaskFailed", said),
        },
    };
    Some(Note {
        warning,
        reason: reason.to_owned(),
        action: task.spec.type_.as_str(),
        text,
    })
}

/// How long a task took that has ended; `None` if it had no Job.
pub fn took(step: &Step) -> Option<Duration> {
    let Step::Ended(run, _) = step else {
        return None;
    };
    let (end, start) = run.completion_time.zip(run.start_time)?;
    (end - start).to_std().ok()
}

/// What the policy tells of a restoration that has ended.
pub fn restoration<'s>(task: &EtcdBackupTask, step: &'s Step) -> Option<&'s LastRun> {
    match (task.spec.type_, step) {
        (TaskType::Restore, Step::Ended(run, _)) => Some(run),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::{EtcdBackupPolicySpec, EtcdBackupTaskSpec};
    use crate::controller::observe::leases::tests::at;
    use crate::controller::observe::outcome::tests::{failure, job, pod, time};
    use strum::VariantArray;

    fn task(type_: TaskType) -> EtcdBackupTask {
        let mut task = EtcdBackupTask::new(
            "t",
            EtcdBackupTaskSpec {
                policy: "p".to_owned(),
                type_,
                config: None,
                ttl_seconds_after_finished: None,
            },
        );
        task.metadata.generation = Some(1);
        task.metadata.uid = Some("12345678-9abc".to_owned());
        task.metadata.creation_timestamp = Some(time(0));
        task
    }

    fn policy() -> EtcdBackupPolicy {
        EtcdBackupPolicy::new("p", EtcdBackupPolicySpec::default())
    }

    fn ran(step: &Step, old: &EtcdBackupTaskStatus, seconds: i64) -> EtcdBackupTaskStatus {
        status(
            &task(TaskType::Verify),
            old,
            step,
            "t-12345678",
            at(seconds),
        )
    }

    #[test]
    fn a_task_waits_runs_and_ends() {
        let none = EtcdBackupTaskStatus::default();
        let waits = ran(
            &Step::Waits("Queued", "the task a runs".to_owned()),
            &none,
            1,
        );
        assert_eq!(waits.state, TaskState::Pending);
        assert_eq!(
            (waits.initiated_at, waits.observed_generation),
            (None, Some(1))
        );
        let operation = waits.last_operation.clone().unwrap();
        assert_eq!(operation.reason, "Queued: the task a runs");
        // The same later is the same.
        let still = ran(
            &Step::Waits("Queued", "the task a runs".to_owned()),
            &waits,
            9,
        );
        assert_eq!(still, waits);
        let started = ran(&Step::Runs(LastRun::default(), Vec::new()), &waits, 10);
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
        let runs = ran(&Step::Runs(LastRun::default(), Vec::new()), &started, 20);
        assert_eq!(
            runs.last_operation.as_ref().unwrap().last_transition_time,
            at(10)
        );
        let again = ran(&Step::Runs(LastRun::default(), Vec::new()), &runs, 30);
        assert_eq!(again, runs);
        let done = LastRun {
            state: RunState::Succeeded,
            completion_time: Some(at(40)),
            revision: Some(7),
            ..LastRun::default()
        };
        let done = ran(&Step::Ended(done, Vec::new()), &runs, 50);
        assert_eq!(
            (done.state, done.finished_at),
            (TaskState::Succeeded, Some(at(40)))
        );
        assert!(done.last_operation.unwrap().reason.contains("revision 7"));
        let refusal = Refusal {
            code: "DuplicateTask",
            message: "the task a is the same".to_owned(),
        };
        let rejected = ran(&Step::rejected(refusal), &waits, 5);
        assert_eq!(
            (rejected.state, rejected.finished_at),
            (TaskState::Rejected, Some(at(5)))
        );
        assert_eq!(rejected.initiated_at, Some(at(5)));
        assert_eq!(rejected.last_errors[0].code, "DuplicateTask");
        assert_eq!(rejected.job_name, None);
    }

    #[test]
    fn a_failed_task_tells_all_that_its_pods_failed_with() {
        let pods = [
            pod("a", 20, 69, &failure(69, "StoreUnreachable")),
            pod("b", 40, 74, &failure(74, "NoSpace")),
        ];
        let failed = job(Some(("Failed", "BackoffLimitExceeded", "too often")));
        let old = EtcdBackupTaskStatus::default();
        let (t, p) = (task(TaskType::Verify), policy());
        let (step, again) = progress(&t, &old, Some(&p), &failed, &pods, at(50));
        assert_eq!(again, None);
        let failed_with = ran(&step, &old, 50);
        assert_eq!(failed_with.state, TaskState::Failed);
        let codes: Vec<&str> = failed_with
            .last_errors
            .iter()
            .map(|e| e.code.as_str())
            .collect();
        assert_eq!(codes, ["NoSpace", "StoreUnreachable"]);
        assert_eq!(failed_with.last_errors[0].observed_at, at(40));
        // While it runs they are told, too, and once.
        let (step, _) = progress(&t, &old, Some(&p), &job(None), &pods[..1], at(25));
        let runs = ran(&step, &old, 25);
        assert_eq!(
            (runs.state, runs.last_errors.len()),
            (TaskState::InProgress, 1)
        );
        let (step, _) = progress(&t, &runs, Some(&p), &job(None), &pods[..1], at(30));
        assert_eq!(ran(&step, &runs, 30), runs);
        // Its time was up: that comes first.
        let late = job(Some(("Failed", "DeadlineExceeded", "")));
        let (step, _) = progress(&t, &runs, Some(&p), &late, &pods[..1], at(60));
        let late = ran(&step, &runs, 60);
        let codes: Vec<&str> = late.last_errors.iter().map(|e| e.code.as_str()).collect();
        assert_eq!(codes, ["DeadlineExceeded", "StoreUnreachable"]);
        // The Job is known to have ended, its Pods are not yet.
        let (step, again) = progress::<Pod>(&t, &old, Some(&p), &failed, &[], at(50));
        assert!(
            matches!(step, Step::Runs(..)) && again == Some(at(52)),
            "{step:?}"
        );
        let (step, _) = progress::<Pod>(&t, &old, Some(&p), &failed, &[], at(55));
        let codes = ran(&step, &old, 55).last_errors;
        assert_eq!(codes[0].code, "BackoffLimitExceeded");
    }

    #[test]
    fn without_quorum_or_policy_it_is_ended() {
        let pods = [
            pod("a", 20, 69, &failure(69, "NoQuorum")),
            pod("b", 40, 69, &failure(69, "EtcdUnreachable")),
        ];
        let old = EtcdBackupTaskStatus::default();
        let p = policy();
        for &type_ in TaskType::VARIANTS {
            let needs = matches!(type_, TaskType::OnDemandSnapshot | TaskType::Maintenance);
            for condition in [None, Some(("Failed", "BackoffLimitExceeded", ""))] {
                let (step, _) =
                    progress(&task(type_), &old, Some(&p), &job(condition), &pods, at(60));
                let state = ran(&step, &old, 60).state;
                assert_eq!(state == TaskState::Rejected, needs, "{type_:?}");
            }
        }
        // The policy is gone: what runs is ended, what is done is done.
        let t = task(TaskType::Verify);
        let (step, _) = progress::<Pod>(&t, &old, None, &job(None), &[], at(60));
        let gone = ran(&step, &old, 60);
        assert_eq!(gone.state, TaskState::Failed);
        assert_eq!(gone.last_errors[0].code, "PolicyDeleted");
        let done = job(Some(("Complete", "", "")));
        let (step, _) = progress::<Pod>(&t, &old, None, &done, &[], at(600));
        assert_eq!(ran(&step, &old, 600).state, TaskState::Succeeded);
    }

    #[test]
    fn no_more_than_a_few_errors_are_kept() {
        let known: Vec<TaskError> = (0..9)
            .map(|i| TaskError {
                code: "NoSpace".to_owned(),
                description: String::new(),
                observed_at: at(i),
            })
            .collect();
        let kept = errors(&known, &[pod("a", 50, 65, &failure(65, "CorruptSnapshot"))]);
        assert_eq!(kept.len(), MOST_ERRORS);
        assert_eq!(kept[0].code, "CorruptSnapshot");
        assert_eq!(kept[1].observed_at, at(8));
    }

    #[test]
    fn a_task_is_deleted_when_its_time_has_come() {
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
