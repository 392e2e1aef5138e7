//! `deltafold task create`: a task as text, waiting for it, and its exit code.
//!
//! The controller runs the task; this command only talks to the API server.

mod create;

use super::render::{Blocks, Render};
use super::{Ended, Output, print_report};
use crate::base::Cancel;
use crate::controller::api::{EtcdBackupTask, TaskState, TaskType};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::UserClient;
use crate::ops::report::{Report, ReportBuilder};
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use futures::StreamExt;
use kube::ResourceExt;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watch_object};
use serde::Serialize;
use std::pin::pin;
use std::time::Duration;

/// Run a one-off task for a policy in Kubernetes
///
/// A task is an EtcdBackupTask, which the controller runs. The tasks of a policy run one at a time, in the
/// order of their creation. kubectl shows them: kubectl get etcdbackuptasks. If the program is also installed
/// as kubectl-deltafold, it is a kubectl plugin: kubectl deltafold task create.
#[derive(Debug, Args)]
pub(super) struct TaskArgs {
    #[command(subcommand)]
    command: TaskCommand,
}

#[derive(Debug, Subcommand)]
enum TaskCommand {
    Create(Box<create::CreateArgs>),
}

/// A task. The fields are a contract.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct CreatedTask {
    /// The task's namespace.
    namespace: String,
    /// The task's name.
    name: String,
    /// The name of its policy.
    policy: String,
    /// The type of the task.
    #[serde(rename = "type")]
    type_: TaskType,
    /// The state of the task. `Pending` also if the controller has not processed it yet.
    state: TaskState,
    /// When the task was created.
    created: Option<DateTime<Utc>>,
    /// When the task left the state `Pending`; null before.
    initiated_at: Option<DateTime<Utc>>,
    /// When the task ended; null before.
    finished_at: Option<DateTime<Utc>>,
    /// The name of its Job; null if it has none.
    job: Option<String>,
    /// What the task is doing or waiting for. Human-readable: the wording may change.
    operation: Option<String>,
    /// The errors of the task, the newest first.
    errors: Vec<TaskFailure>,
}

/// An error of a task.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct TaskFailure {
    /// A reason from exit-codes.md, a reason of Kubernetes, or the reason for a rejection.
    code: String,
    /// The error as a sentence. Human-readable: the wording may change.
    description: String,
    /// When the controller observed the error.
    observed_at: DateTime<Utc>,
}

impl CreatedTask {
    fn of(task: &EtcdBackupTask) -> Self {
        let status = task.status.clone().unwrap_or_default();
        let mut errors = Vec::new();
        for e in status.last_errors {
            errors.push(TaskFailure {
                code: e.code,
                description: e.description,
                observed_at: e.observed_at,
            });
        }
        CreatedTask {
            namespace: task.namespace().unwrap_or_default(),
            name: task.name_any(),
            policy: task.spec.policy.clone(),
            type_: task.spec.type_,
            state: status.state,
            created: created(task),
            initiated_at: status.initiated_at,
            finished_at: status.finished_at,
            job: status.job_name,
            operation: status.last_operation.map(|o| o.reason),
            errors,
        }
    }
}

impl Render for CreatedTask {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        if o.finished_at.is_none() {
            text.line(&o.name);
            return text;
        }
        text.line(format!("{} {}", o.name, o.state.as_str()));
        text.field("message", o.operation.as_deref().filter(|m| !m.is_empty()));
        for e in &o.errors {
            text.field("error", format!("{} [{}]", e.description, e.code));
        }
        text
    }
}

fn created(task: &EtcdBackupTask) -> Option<DateTime<Utc>> {
    let at = task.metadata.creation_timestamp.as_ref()?;
    DateTime::from_timestamp(at.0.as_second(), 0)
}

/// The failure of a task that has failed or was rejected, with the reason that sets the exit code; otherwise
/// `None`.
fn failure_of(task: &EtcdBackupTask) -> Option<Error> {
    let status = task.status.clone().unwrap_or_default();
    let newest = status.last_errors.first();
    let code = newest.map(|e| e.code.as_str()).unwrap_or_default();
    let known = Reason::ALL.iter().copied().find(|r| r.as_str() == code);
    let (state, reason) = match status.state {
        TaskState::Failed => ("failed", known.unwrap_or(Reason::Terminated)),
        TaskState::Rejected if code == "DuplicateTask" => ("was rejected", Reason::Conflict),
        TaskState::Rejected => ("was rejected", known.unwrap_or(Reason::Configuration)),
        TaskState::Succeeded | TaskState::Pending | TaskState::InProgress => return None,
    };
    let description = newest.map_or("no reason is recorded", |e| e.description.as_str());
    let code = match known {
        None if !code.is_empty() => format!(" ({code})"),
        _ => String::new(),
    };
    let name = task.name_any();
    Some(reason.error(format!("the task {name} {state}{code}: {description}")))
}

/// Whether a task has ended.
fn is_final(task: &EtcdBackupTask) -> bool {
    task.status.as_ref().is_some_and(|s| s.state.is_final())
}

impl TaskArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        match &self.command {
            TaskCommand::Create(args) => args.run(cancel, output),
        }
    }
}

/// Prints a task, and returns its failure.
fn print_task(task: &EtcdBackupTask, clock: ReportBuilder, output: Output) -> Ended {
    print_report(
        output,
        clock.ended(CreatedTask::of(task), true, failure_of(task)),
    )
}

/// Waits until the task has ended, and returns it. A `timeout` of zero is no timeout.
///
/// # Errors
/// `Conflict` if it is deleted before it ends, `PartlyDone` after the timeout.
async fn wait_until_final(
    client: &UserClient,
    name: &str,
    timeout: Duration,
) -> Result<EtcdBackupTask> {
    let task = watch_until_final(client, name);
    if timeout.is_zero() {
        return task.await;
    }
    match tokio::time::timeout(timeout, task).await {
        Ok(task) => task,
        Err(_) => Err(Reason::PartlyDone.error(format!(
            "the task {name} has not ended within {} s; it continues",
            timeout.as_secs_f64()
        ))),
    }
}

async fn watch_until_final(client: &UserClient, name: &str) -> Result<EtcdBackupTask> {
    let mut tasks = pin!(watch_object(client.api::<EtcdBackupTask>(), name).default_backoff());
    while let Some(task) = tasks.next().await {
        match task {
            Ok(Some(task)) if is_final(&task) => return Ok(task),
            Ok(Some(_)) => {}
            Ok(None) => {
                return Err(Reason::Conflict
                    .error(format!("the task {name} was deleted before it had ended")));
            }
            Err(e) => retry_or_fail(client, "watch the task", &e)?,
        }
    }
    Err(Error::internal("a watch has ended"))
}

/// Warns about an error that the watch retries itself. Returns all other errors.
fn retry_or_fail(client: &UserClient, action: &str, e: &watcher::Error) -> Result<()> {
    let failure = match e {
        watcher::Error::InitialListFailed(e)
        | watcher::Error::WatchStartFailed(e)
        | watcher::Error::WatchFailed(e) => client.failure(action, e),
        watcher::Error::WatchError(_) => return Ok(()),
        watcher::Error::NoResourceVersion => {
            Reason::KubernetesUnreachable.error(format!("cannot {action}: {e}"))
        }
    };
    if failure.reason().is_retryable() {
        tracing::warn!("{failure}; retrying");
        Ok(())
    } else {
        Err(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::{EtcdBackupTaskSpec, EtcdBackupTaskStatus, TaskError, TaskType};

    fn task(state: TaskState, code: &str) -> EtcdBackupTask {
        let spec = EtcdBackupTaskSpec {
            policy: "main".to_owned(),
            type_: TaskType::Verify,
            config: None,
            args: Vec::new(),
            start_deadline: None,
            ttl_seconds_after_finished: None,
        };
        let mut task = EtcdBackupTask::new("now", spec);
        let error = TaskError {
            code: code.to_owned(),
            description: "it is so".to_owned(),
            observed_at: DateTime::UNIX_EPOCH,
        };
        task.status = Some(EtcdBackupTaskStatus {
            state,
            last_errors: match code {
                "" => vec![],
                _ => vec![error],
            },
            ..EtcdBackupTaskStatus::default()
        });
        task
    }

    #[test]
    fn the_exit_code_is_that_of_the_work() {
        let reason = |state, code| failure_of(&task(state, code)).map(|e| e.reason());
        assert_eq!(reason(TaskState::Succeeded, ""), None);
        for &r in Reason::ALL {
            assert_eq!(reason(TaskState::Failed, r.as_str()), Some(r));
        }
        for (state, code, expected) in [
            (TaskState::Failed, "DeadlineExceeded", Reason::Terminated),
            (TaskState::Failed, "OOMKilled", Reason::Terminated),
            (TaskState::Failed, "", Reason::Terminated),
            (TaskState::Rejected, "DuplicateTask", Reason::Conflict),
            (TaskState::Rejected, "PolicyNotFound", Reason::Configuration),
            (TaskState::Rejected, "NoQuorum", Reason::NoQuorum),
        ] {
            assert_eq!(reason(state, code), Some(expected), "{code}");
        }
        let said = failure_of(&task(TaskState::Failed, "OOMKilled")).unwrap();
        assert_eq!(
            said.to_string(),
            "the task now failed (OOMKilled): it is so"
        );
    }
}
