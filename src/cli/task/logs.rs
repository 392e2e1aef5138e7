//! `deltafold task logs`: the logs of a task's containers, in the order in which they started.
//!
//! With --follow, logs are printed while the Pods write them.

use super::{TaskOutcome, is_final, no_task, retry_or_fail, watch_ended};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::cli::kubernetes::{ClusterArgs, wait_for};
use crate::controller::api::EtcdBackupTask;
use crate::controller::jobs::CONTAINER_BEFORE;
use crate::error::{Error, Reason, Result};
use crate::kubernetes::UserClient;
use clap::Args;
use futures::StreamExt;
use futures::io::AsyncReadExt;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use kube::api::{ListParams, LogParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watch_object, watcher};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::pin::pin;

/// The label of a Job's Pods.
const JOB_NAME: &str = "batch.kubernetes.io/job-name";

/// Print the logs of a task's Pods
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Follow the logs of a task until it ends:
      deltafold task logs main-snapshot-x7k2p --follow")]
pub(super) struct LogsArgs {
    /// Name of the task
    name: String,
    /// Keep printing until the task has ended
    ///
    /// DELTAFOLD_FOLLOW also sets --follow of `deltafold copy`.
    #[arg(short, long, value_parser = yes_or_no)]
    follow: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl LogsArgs {
    pub(super) fn run(&self, cancel: &Cancel) -> Result<()> {
        wait_for(cancel, async {
            let client = self.cluster.client(self.follow).await?;
            match self.follow {
                false => self.print_all(&client).await,
                true => self.follow_all(&client).await,
            }
        })
    }

    async fn print_all(&self, client: &UserClient) -> Result<()> {
        let tasks = client.api::<EtcdBackupTask>();
        let task = client
            .ask("read the task", tasks.get_opt(&self.name))
            .await?;
        let task = task.ok_or_else(|| no_task(client, &self.name))?;
        let Some(job) = job_of(&task) else {
            let task = TaskOutcome::of(&task);
            let reason = task.message.map(|m| format!(": {m}")).unwrap_or_default();
            return Err(Reason::Conflict.error(format!(
                "the task {} is {} and has no Job{reason}",
                self.name,
                task.state.as_str()
            )));
        };
        let mut printed = Printed::default();
        print_rest(client, &job, &mut printed).await?;
        match printed.0.is_empty() {
            false => Ok(()),
            true => Err(Reason::Conflict.error(format!(
                "no Pod of the Job {job} has started, or its Pods are already deleted"
            ))),
        }
    }

    /// Prints the logs of Pods as they start, until the task has ended and all logs are printed.
    async fn follow_all(&self, client: &UserClient) -> Result<()> {
        let watched = client.api::<EtcdBackupTask>();
        let mut tasks = pin!(watch_object(watched, &self.name).default_backoff());
        // Pods exist only after the task has a Job.
        let (job, mut has_ended) = loop {
            match tasks.next().await {
                Some(Ok(Some(task))) => match job_of(&task) {
                    Some(job) => break (job, is_final(&task)),
                    None if is_final(&task) => return Ok(()),
                    None => {}
                },
                Some(Ok(None)) => return Err(no_task(client, &self.name)),
                Some(Err(e)) => retry_or_fail(client, "watch the task", &e)?,
                None => return Err(watch_ended()),
            }
        };
        let config = watcher::Config::default().labels(&format!("{JOB_NAME}={job}"));
        let mut events = pin!(watcher(client.api::<Pod>(), config).default_backoff());
        let mut pods = BTreeMap::new();
        let mut printed = Printed::default();
        loop {
            for (pod, container) in started_containers(pods.values()) {
                printed.print(client, &pod, container, true).await?;
            }
            if has_ended {
                // The watch may be late: list the Pods once more.
                return print_rest(client, &job, &mut printed).await;
            }
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(Event::Apply(pod) | Event::InitApply(pod))) => {
                        pods.insert(pod.name_any(), pod);
                    }
                    Some(Ok(Event::Delete(pod))) => {
                        pods.remove(&pod.name_any());
                    }
                    Some(Ok(Event::Init)) => pods.clear(),
                    Some(Ok(Event::InitDone)) => {}
                    Some(Err(e)) => retry_or_fail(client, "watch the Pods", &e)?,
                    None => return Err(watch_ended()),
                },
                task = tasks.next() => match task {
                    // A deleted task has ended, too.
                    Some(Ok(task)) => has_ended = task.as_ref().is_none_or(is_final),
                    Some(Err(e)) => retry_or_fail(client, "watch the task", &e)?,
                    None => return Err(watch_ended()),
                },
            }
        }
    }
}

/// Prints the logs of all containers of the Job that are not printed yet.
async fn print_rest(client: &UserClient, job: &str, printed: &mut Printed) -> Result<()> {
    let params = ListParams::default().labels(&format!("{JOB_NAME}={job}"));
    let pods = client.api::<Pod>();
    let pods = client.ask("list the Pods", pods.list(&params)).await?.items;
    for (pod, container) in started_containers(pods.iter()) {
        printed.print(client, &pod, container, false).await?;
    }
    Ok(())
}

fn job_of(task: &EtcdBackupTask) -> Option<String> {
    task.status.as_ref()?.job_name.clone()
}

/// Returns the containers that have started, each with its Pod, in the order in which they started.
fn started_containers<'p>(pods: impl Iterator<Item = &'p Pod>) -> Vec<(String, String)> {
    let mut pods: Vec<&Pod> = pods.collect();
    pods.sort_by_key(|p| (p.creation_timestamp(), p.name_any()));
    let mut started = Vec::new();
    for pod in pods {
        let Some(status) = &pod.status else { continue };
        let init = status.init_container_statuses.iter().flatten();
        let all = init.chain(status.container_statuses.iter().flatten());
        for container in all.filter(|c| has_started(c)) {
            started.push((pod.name_any(), container.name.clone()));
        }
    }
    started
}

fn has_started(container: &ContainerStatus) -> bool {
    let state = container.state.as_ref();
    state.is_some_and(|s| s.running.is_some() || s.terminated.is_some())
}

/// The containers whose logs are printed, each with its Pod.
#[derive(Default)]
struct Printed(BTreeSet<(String, String)>);

impl Printed {
    /// Prints the log of a container, if it is not printed yet. With `follow`, until the container ends.
    async fn print(
        &mut self,
        client: &UserClient,
        pod: &str,
        container: String,
        follow: bool,
    ) -> Result<()> {
        if !self.0.insert((pod.to_owned(), container.clone())) {
            return Ok(());
        }
        // If there are several containers, name each one on standard error.
        if self.0.len() > 1 || container == CONTAINER_BEFORE {
            tracing::info!(pod, container, "printing the log of another container");
        }
        let params = LogParams {
            container: Some(container.clone()),
            follow,
            ..LogParams::default()
        };
        let what = format!("read the log of {container} in {pod}");
        let pods = client.api::<Pod>();
        let log = client.ask(&what, pods.log_stream(pod, &params)).await?;
        let mut log = pin!(log);
        let mut buffer = vec![0; 1 << 16];
        loop {
            let read = log.read(&mut buffer).await;
            let read = read
                .map_err(|e| Reason::KubernetesUnreachable.error(format!("cannot {what}: {e}")))?;
            if read == 0 {
                return Ok(());
            }
            let mut out = std::io::stdout().lock();
            match out.write_all(&buffer[..read]).and_then(|()| out.flush()) {
                Ok(()) => {}
                // The reader has closed the pipe.
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                Err(e) => return Err(Error::io("write to standard output", e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_printed_in_the_order_in_which_they_ran() {
        let pod = |name: &str, at: &str, before: &str, main: &str| -> Pod {
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": name, "creationTimestamp": at},
                "status": {
                    "initContainerStatuses": [{"name": "first", "image": "", "imageID": "",
                        "ready": true, "restartCount": 0, "state": {before: {"exitCode": 0}}}],
                    "containerStatuses": [{"name": "main", "image": "", "imageID": "",
                        "ready": true, "restartCount": 0, "state": {main: {}}}],
                },
            }))
            .unwrap()
        };
        let pods = [
            pod("b", "2026-11-20T12:00:01Z", "terminated", "waiting"),
            pod("a", "2026-11-20T12:00:00Z", "terminated", "running"),
        ];
        let expected = [("a", "first"), ("a", "main"), ("b", "first")];
        let expected = expected.map(|(p, c)| (p.to_owned(), c.to_owned()));
        assert_eq!(started_containers(pods.iter()), expected);
    }
}
