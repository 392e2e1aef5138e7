//! `deltafold task logs`: which containers have begun, and their logs as they come.

use super::{TaskOutcome, lasting, no_more, no_task};
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

/// The logs of the Pods of a task
#[derive(Debug, Args)]
pub(super) struct LogsArgs {
    /// The task
    name: String,
    /// Go on until the task has ended
    #[arg(short, long, value_parser = yes_or_no)]
    follow: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl LogsArgs {
    pub(super) fn run(&self, cancel: &Cancel) -> Result<()> {
        wait_for(cancel, async {
            let person = self.cluster.person(self.follow).await?;
            match self.follow {
                false => self.print_all(&person).await,
                true => self.follow_all(&person).await,
            }
        })
    }

    async fn print_all(&self, person: &UserClient) -> Result<()> {
        let tasks = person.api::<EtcdBackupTask>();
        let task = person
            .ask("read the task", tasks.get_opt(&self.name))
            .await?;
        let task = task.ok_or_else(|| no_task(person, &self.name))?;
        let Some(job) = job_of(&task) else {
            let state = TaskOutcome::of(&task);
            let why = state.message.map(|m| format!(": {m}")).unwrap_or_default();
            return Err(Reason::Conflict.error(format!(
                "the task {} is {} and has no Job{why}",
                self.name,
                state.state.as_str()
            )));
        };
        let mut printed = Printed::default();
        self.print_rest(person, &job, &mut printed).await?;
        match printed.0.is_empty() {
            false => Ok(()),
            true => Err(Reason::Conflict.error(format!(
                "no Pod of the Job {job} has begun, or they are gone already"
            ))),
        }
    }

    /// Prints what is there and was not printed yet.
    async fn print_rest(
        &self,
        person: &UserClient,
        job: &str,
        printed: &mut Printed,
    ) -> Result<()> {
        let params = ListParams::default().labels(&format!("{JOB_NAME}={job}"));
        let pods = person.api::<Pod>();
        let pods = person.ask("list the Pods", pods.list(&params)).await?.items;
        for (pod, container) in begun(pods.iter()) {
            printed.print(person, &pod, container, false).await?;
        }
        Ok(())
    }

    /// Prints as Pods come, until the task has ended and all is printed.
    async fn follow_all(&self, person: &UserClient) -> Result<()> {
        let watched = person.api::<EtcdBackupTask>();
        let mut states = pin!(watch_object(watched, &self.name).default_backoff());
        let is_done = |t: &EtcdBackupTask| t.status.as_ref().is_some_and(|s| s.state.is_final());
        // Until it has a Job there are no Pods of it.
        let (job, mut done) = loop {
            match states.next().await {
                Some(Ok(Some(task))) => match job_of(&task) {
                    Some(job) => break (job, is_done(&task)),
                    None if is_done(&task) => return Ok(()),
                    None => {}
                },
                Some(Ok(None)) => return Err(no_task(person, &self.name)),
                Some(Err(e)) => lasting(person, "watch the task", &e)?,
                None => return Err(no_more()),
            }
        };
        let config = watcher::Config::default().labels(&format!("{JOB_NAME}={job}"));
        let mut changes = pin!(watcher(person.api::<Pod>(), config).default_backoff());
        let mut pods = BTreeMap::new();
        let mut printed = Printed::default();
        loop {
            for (pod, container) in begun(pods.values()) {
                printed.print(person, &pod, container, true).await?;
            }
            if done {
                // What the watch has not told yet is there by now.
                return self.print_rest(person, &job, &mut printed).await;
            }
            tokio::select! {
                change = changes.next() => match change {
                    Some(Ok(Event::Apply(pod) | Event::InitApply(pod))) => {
                        pods.insert(pod.name_any(), pod);
                    }
                    Some(Ok(Event::Delete(pod))) => {
                        pods.remove(&pod.name_any());
                    }
                    Some(Ok(Event::Init)) => pods.clear(),
                    Some(Ok(Event::InitDone)) => {}
                    Some(Err(e)) => lasting(person, "watch the Pods", &e)?,
                    None => return Err(no_more()),
                },
                state = states.next() => match state {
                    // One that was deleted is done, too.
                    Some(Ok(state)) => done = state.as_ref().is_none_or(is_done),
                    Some(Err(e)) => lasting(person, "watch the task", &e)?,
                    None => return Err(no_more()),
                },
            }
        }
    }
}

fn job_of(task: &EtcdBackupTask) -> Option<String> {
    task.status.as_ref()?.job_name.clone()
}

/// The containers that have begun, by Pod, in the order in which they ran.
fn begun<'p>(pods: impl Iterator<Item = &'p Pod>) -> Vec<(String, String)> {
    let mut pods: Vec<&Pod> = pods.collect();
    pods.sort_by_key(|p| (p.creation_timestamp(), p.name_any()));
    let has_begun = |c: &&ContainerStatus| {
        let state = c.state.as_ref();
        state.is_some_and(|s| s.running.is_some() || s.terminated.is_some())
    };
    let mut found = Vec::new();
    for pod in pods {
        let Some(status) = &pod.status else { continue };
        let first = status.init_container_statuses.iter().flatten();
        let all = first.chain(status.container_statuses.iter().flatten());
        let names = all
            .filter(has_begun)
            .map(|c| (pod.name_any(), c.name.clone()));
        found.extend(names);
    }
    found
}

/// What is on standard output already.
#[derive(Default)]
struct Printed(BTreeSet<(String, String)>);

impl Printed {
    /// Prints a container's log, to its end if it is followed.
    async fn print(
        &mut self,
        person: &UserClient,
        pod: &str,
        container: String,
        follow: bool,
    ) -> Result<()> {
        if !self.0.insert((pod.to_owned(), container.clone())) {
            return Ok(());
        }
        // Of several each is named, beside what is printed.
        if self.0.len() > 1 || container == CONTAINER_BEFORE {
            tracing::info!(pod, container, "the log of another container begins");
        }
        let params = LogParams {
            container: Some(container.clone()),
            follow,
            ..LogParams::default()
        };
        let what = format!("read the log of {container} in {pod}");
        let pods = person.api::<Pod>();
        let log = person.ask(&what, pods.log_stream(pod, &params)).await?;
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
                // Whoever reads may have seen enough.
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
        assert_eq!(begun(pods.iter()), expected);
    }
}
