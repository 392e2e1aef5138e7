//! `deltafold task create|list|wait|logs`: what they tell of tasks, and how it ended by exit code.

mod create;
mod logs;

use super::kubernetes::{ClusterArgs, age, table, wait_for};
use super::text::Text;
use super::{Ended, Output, print_outcome};
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, duration};
use crate::controller::api::{EtcdBackupTask, TaskState, TaskType};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::UserClient;
use chrono::{DateTime, Utc};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use futures::StreamExt;
use kube::ResourceExt;
use kube::api::ListParams;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watch_object};
use schemars::JsonSchema;
use serde::Serialize;
use std::pin::pin;
use std::time::Duration;

/// Have something done once, for a policy, by the controller in Kubernetes
///
/// A task is an EtcdBackupTask. Those of a policy run one at a time, first in, first out. Linked as
/// kubectl-deltafold this program is a plugin: kubectl deltafold task list.
#[derive(Debug, Args)]
pub(super) struct TaskArgs {
    #[command(subcommand)]
    command: TaskCommand,
}

#[derive(Debug, Subcommand)]
enum TaskCommand {
    Create(Box<create::CreateArgs>),
    List(ListArgs),
    Wait(WaitArgs),
    Logs(logs::LogsArgs),
}

/// The tasks of a namespace, the oldest first
#[derive(Debug, Args)]
struct ListArgs {
    /// Only those of this policy
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    policy: Option<String>,
    /// Of all namespaces
    #[arg(short = 'A', long, value_parser = yes_or_no)]
    all_namespaces: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Wait until a task has ended
///
/// The exit code is 0 where it succeeded. Where it failed, it is that of the work (docs/exit-codes.md), or 143
/// where Kubernetes ended it; of a rejected task it is 75 where the same is waiting or running already, and else
/// 78. It is 75, too, where the time is up.
#[derive(Debug, Args)]
struct WaitArgs {
    /// The task
    name: String,
    /// No longer than this; 0s: as long as it takes
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    timeout: Duration,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A task as it is printed. The fields are a contract.
#[derive(Debug, JsonSchema, Serialize)]
pub(super) struct TaskOutcome {
    /// Where it is.
    namespace: String,
    /// Its name.
    name: String,
    /// The policy that it is for.
    policy: String,
    /// What is to be done.
    #[serde(rename = "type")]
    type_: TaskType,
    /// How it is. `Pending`, too, if no controller has looked at it yet.
    state: TaskState,
    /// When it was created.
    created: Option<DateTime<Utc>>,
    /// When it was no longer Pending.
    initiated_at: Option<DateTime<Utc>>,
    /// When it ended.
    finished_at: Option<DateTime<Utc>>,
    /// The name of its Job.
    job: Option<String>,
    /// What it waits for, or is at; for people.
    message: Option<String>,
    /// What went wrong, the newest first.
    errors: Vec<TaskFailure>,
}

#[derive(Debug, JsonSchema, Serialize)]
struct TaskFailure {
    /// A reason of exit-codes.md, Kubernetes' own, or why it was rejected.
    code: String,
    /// A sentence for people.
    description: String,
    /// When it was seen.
    observed_at: DateTime<Utc>,
}

#[derive(Debug, JsonSchema, Serialize)]
pub(super) struct TasksOutcome {
    /// The tasks, the oldest first.
    tasks: Vec<TaskOutcome>,
}

impl TaskOutcome {
    fn of(task: &EtcdBackupTask) -> Self {
        let status = task.status.clone().unwrap_or_default();
        let errors = status.last_errors.into_iter().map(|e| TaskFailure {
            code: e.code,
            description: e.description,
            observed_at: e.observed_at,
        });
        TaskOutcome {
            namespace: task.namespace().unwrap_or_default(),
            name: task.name_any(),
            policy: task.spec.policy.clone(),
            type_: task.spec.type_,
            state: status.state,
            created: created(task),
            initiated_at: status.initiated_at,
            finished_at: status.finished_at,
            job: status.job_name,
            message: status.last_operation.map(|o| o.reason),
            errors: errors.collect(),
        }
    }

    fn in_words(&self) -> String {
        let mut text = Text::new();
        text.line(format_args!("{} {}", self.name, self.state.as_str()));
        if let Some(message) = self.message.as_ref().filter(|m| !m.is_empty()) {
            text.line(format_args!("  {message}"));
        }
        let error = |e: &TaskFailure| format!("{} [{}]", e.description, e.code);
        text.each("error", self.errors.iter().map(error));
        text.end()
    }
}

fn created(task: &EtcdBackupTask) -> Option<DateTime<Utc>> {
    let at = task.metadata.creation_timestamp.as_ref()?;
    DateTime::from_timestamp(at.0.as_second(), 0)
}

/// How a task that has ended is told by exit code; `None` where it succeeded.
fn failure_of(task: &EtcdBackupTask) -> Option<Error> {
    let status = task.status.clone().unwrap_or_default();
    let newest = status.last_errors.first();
    let code = newest.map(|e| e.code.as_str()).unwrap_or_default();
    let own = Reason::ALL.iter().copied().find(|r| r.as_str() == code);
    let (what, reason) = match status.state {
        TaskState::Failed => ("failed", own.unwrap_or(Reason::Terminated)),
        TaskState::Rejected if code == "DuplicateTask" => ("was rejected", Reason::Conflict),
        TaskState::Rejected => ("was rejected", own.unwrap_or(Reason::Configuration)),
        TaskState::Succeeded | TaskState::Pending | TaskState::InProgress => return None,
    };
    let said = newest.map_or("no reason is told".to_owned(), |e| e.description.clone());
    let code = match own {
        None if !code.is_empty() => format!(" ({code})"),
        _ => String::new(),
    };
    let name = task.name_any();
    Some(reason.error(format!("the task {name} {what}{code}: {said}")))
}

impl TaskArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        match &self.command {
            TaskCommand::Create(args) => args.run(cancel, output),
            TaskCommand::List(args) => args.run(cancel, output),
            TaskCommand::Wait(args) => args.run(cancel, output),
            TaskCommand::Logs(args) => args.run(cancel).map(|()| None),
        }
    }
}

fn tell(task: &EtcdBackupTask, output: Output) -> Ended {
    print_outcome(output, &TaskOutcome::of(task), TaskOutcome::in_words)?;
    Ok(failure_of(task))
}

impl ListArgs {
    fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let mut tasks = wait_for(cancel, async {
            let person = self.cluster.person(false).await?;
            let api = match self.all_namespaces {
                true => person.all::<EtcdBackupTask>(),
                false => person.api(),
            };
            let params = ListParams::default();
            person.ask("list the tasks", api.list(&params)).await
        })?
        .items;
        tasks.retain(|t| self.policy.as_ref().is_none_or(|p| t.spec.policy == *p));
        tasks.sort_by_key(|t| (created(t), t.namespace(), t.name_any()));
        let tasks: Vec<TaskOutcome> = tasks.iter().map(TaskOutcome::of).collect();
        let outcome = TasksOutcome { tasks };
        print_outcome(output, &outcome, |o| o.in_words(self.all_namespaces))
    }
}

impl TasksOutcome {
    fn in_words(&self, with_namespace: bool) -> String {
        if self.tasks.is_empty() {
            return "no tasks\n".to_owned();
        }
        let now = Utc::now();
        let rows = self.tasks.iter().map(|t| {
            let name = match with_namespace {
                true => format!("{}/{}", t.namespace, t.name),
                false => t.name.clone(),
            };
            let error = t.errors.first().map(|e| e.code.clone());
            [
                name,
                t.policy.clone(),
                t.type_.as_str().to_owned(),
                t.state.as_str().to_owned(),
                error.unwrap_or_default(),
                t.created.map_or(String::new(), |at| age(at, now)),
            ]
        });
        let header = ["NAME", "POLICY", "TYPE", "STATE", "ERROR", "AGE"];
        table(header, rows.collect())
    }
}

impl WaitArgs {
    fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let task = wait_for(cancel, async {
            let person = self.cluster.person(false).await?;
            ended(&person, &self.name, self.timeout).await
        })?;
        tell(&task, output)
    }
}

fn no_more() -> Error {
    Error::internal("a watch has ended")
}

fn no_task(person: &UserClient, name: &str) -> Error {
    let namespace = person.namespace();
    Reason::Usage.error(format!(
        "there is no EtcdBackupTask {name} in the namespace {namespace}"
    ))
}

/// The task when it has ended.
async fn ended(person: &UserClient, name: &str, timeout: Duration) -> Result<EtcdBackupTask> {
    let waiting = async {
        let mut states = pin!(watch_object(person.api::<EtcdBackupTask>(), name).default_backoff());
        let mut last: Option<EtcdBackupTask> = None;
        while let Some(state) = states.next().await {
            match state {
                Ok(Some(task)) if task.status.as_ref().is_some_and(|s| s.state.is_final()) => {
                    return Ok(task);
                }
                Ok(Some(task)) => last = Some(task),
                Ok(None) if last.is_none() => return Err(no_task(person, name)),
                Ok(None) => {
                    return Err(Reason::Conflict
                        .error(format!("the task {name} was deleted before it had ended")));
                }
                Err(e) => lasting(person, "watch the task", &e)?,
            }
        }
        Err(no_more())
    };
    if timeout.is_zero() {
        return waiting.await;
    }
    let in_time = tokio::time::timeout(timeout, waiting).await;
    in_time.unwrap_or_else(|_| {
        Err(Reason::PartlyDone.error(format!(
            "the task {name} has not ended within {} s; it goes on",
            timeout.as_secs_f64()
        )))
    })
}

/// A watch tries again by itself. What that does not mend is a failure.
fn lasting(person: &UserClient, what: &str, e: &watcher::Error) -> Result<()> {
    let failure = match e {
        watcher::Error::InitialListFailed(e)
        | watcher::Error::WatchStartFailed(e)
        | watcher::Error::WatchFailed(e) => person.failure(what, e),
        watcher::Error::WatchError(_) => return Ok(()),
        watcher::Error::NoResourceVersion => {
            Reason::KubernetesUnreachable.error(format!("cannot {what}: {e}"))
        }
    };
    match failure.reason().is_retryable() {
        true => {
            tracing::warn!("{failure}; trying again");
            Ok(())
        }
        false => Err(failure),
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
