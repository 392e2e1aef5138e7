//! Results of Jobs: whether a Job has ended, and why it failed, from its conditions and its Pods.
//!
//! A Pod leaves a termination message (docs/exit-codes.md), or none if it was killed. Any other text there is ignored.
//! Pure functions that decide nothing.

use crate::base::printable;
use crate::controller::api::{LastRun, RunState};
use crate::controller::jobs::{CONTAINER, CONTAINER_BEFORE, COPY_CONTAINERS};
use crate::controller::times::{created, later, utc};
use crate::error::Reason;
use crate::telemetry::termination::Message;
use chrono::{DateTime, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{
    ContainerStateTerminated, ContainerStateWaiting, ContainerStatus, Pod,
};
use std::borrow::Borrow;

/// How long after the end of a Job the status of its Pods may still be missing.
const POD_STATUS_TIMEOUT: TimeDelta = TimeDelta::seconds(5);
/// How long to wait for the status of a Pod before looking again.
const POD_STATUS_DELAY: TimeDelta = TimeDelta::seconds(2);
/// The longest kept name of a snapshot, in characters.
const MAX_NAME: usize = 253;
/// Kubernetes' reason for a Job that exceeded its deadline.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// The reason for a Job that was deleted before the controller saw its end.
pub const JOB_DELETED: &str = "JobDeleted";

/// Returns a text, shortened, or `None` if it is empty.
fn not_empty(text: Option<&str>) -> Option<String> {
    text.filter(|t| !t.is_empty())
        .map(|t| printable::message(t.to_owned()))
}

/// Returns a reason of deltafold's, or `Other`. Each reason makes a series of metrics, and a Pod can write any text into
/// its termination message.
fn known_reason(reason: &str) -> &'static str {
    let mut all = Reason::ALL.iter().map(|known| known.as_str());
    all.find(|known| *known == reason).unwrap_or("Other")
}

/// The state of a Job's Pod, or its result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodOutcome {
    /// Whether the command has ended.
    pub ended: bool,
    /// The exit code; `None` if the command never ran.
    pub exit_code: Option<i32>,
    /// The reason, one of docs/exit-codes.md or Kubernetes' (`OOMKilled`, `Evicted`, …).
    pub reason: Option<String>,
    /// The error message.
    pub message: Option<String>,
    /// The newest revision that the command processed.
    pub revision: Option<i64>,
    /// The name of the newest snapshot that the command saved.
    pub snapshot: Option<String>,
    /// When the command ended.
    pub finished_at: Option<DateTime<Utc>>,
    /// Why the Pod has not started, if Kubernetes reports a reason.
    pub waiting_reason: Option<String>,
}

/// Returns whether a container of this name is deltafold's.
pub fn is_own_container(name: &str) -> bool {
    name == CONTAINER || name == CONTAINER_BEFORE || COPY_CONTAINERS.contains(&name)
}

/// Returns the status of the main container, or of an init container that has failed or cannot start.
fn relevant_container(pod: &Pod) -> Option<&ContainerStatus> {
    let status = pod.status.as_ref()?;
    let has_failed = |c: &&ContainerStatus| {
        let Some(state) = c.state.as_ref().filter(|_| is_own_container(&c.name)) else {
            return false;
        };
        let terminated = state.terminated.as_ref();
        let waits = state.waiting.as_ref().and_then(waiting_reason).is_some();
        waits || terminated.is_some_and(|t| t.exit_code != 0)
    };
    let mut init_statuses = status.init_container_statuses.iter().flatten();
    let mut statuses = status.container_statuses.iter().flatten();
    init_statuses
        .find(has_failed)
        .or_else(|| statuses.find(|c| c.name == CONTAINER))
}

/// Returns the state of a Pod, or its result.
pub fn pod_outcome(pod: &Pod) -> PodOutcome {
    let status = pod.status.as_ref();
    let phase = status.and_then(|s| s.phase.as_deref()).unwrap_or_default();
    let mut outcome = PodOutcome {
        ended: matches!(phase, "Succeeded" | "Failed"),
        // An evicted Pod has these.
        reason: not_empty(status.and_then(|s| s.reason.as_deref())),
        message: not_empty(status.and_then(|s| s.message.as_deref())),
        ..PodOutcome::default()
    };
    let conditions = status.and_then(|s| s.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    let disrupted = conditions.find(|c| c.type_ == "DisruptionTarget" && c.status == "True");
    if outcome.reason.is_none()
        && let Some(disrupted) = disrupted
    {
        let reason = not_empty(disrupted.reason.as_deref());
        outcome.reason = reason.or(Some("DisruptionTarget".to_owned()));
        outcome.message = outcome
            .message
            .or_else(|| not_empty(disrupted.message.as_deref()));
    }
    if let Some(state) = relevant_container(pod).and_then(|c| c.state.as_ref()) {
        outcome.waiting_reason = state.waiting.as_ref().and_then(waiting_reason);
        if let Some(terminated) = &state.terminated {
            outcome.add_termination(terminated);
        }
    }
    outcome
}

/// Returns why a container waits, unless it is about to start.
fn waiting_reason(waiting: &ContainerStateWaiting) -> Option<String> {
    let reason = waiting.reason.as_deref().unwrap_or_default();
    if matches!(reason, "" | "ContainerCreating" | "PodInitializing") {
        return None;
    }
    let message = waiting.message.as_deref().unwrap_or_default();
    let text = format!("{reason}: {message}");
    Some(printable::message(
        text.trim_end_matches([':', ' ']).to_owned(),
    ))
}

impl PodOutcome {
    fn add_termination(&mut self, terminated: &ContainerStateTerminated) {
        let has_failed = terminated.exit_code != 0;
        self.ended = true;
        self.exit_code = Some(terminated.exit_code);
        self.finished_at = terminated.finished_at.as_ref().map(utc);
        let text = terminated.message.as_deref().unwrap_or_default();
        let Ok(message) = serde_json::from_str::<Message>(text) else {
            // deltafold did not write it. The reason `Error` says no more than the exit code does.
            let reason = terminated.reason.as_deref().filter(|r| *r != "Error");
            if has_failed && self.reason.is_none() {
                self.reason = not_empty(reason);
            }
            return;
        };
        self.revision = message.revision();
        let snapshot = message.snapshot();
        self.snapshot = snapshot.map(|name| name.chars().take(MAX_NAME).collect());
        self.finished_at = self.finished_at.or(message.finished_at);
        // A message with another exit code was left by an earlier process.
        if has_failed && i32::from(message.code) == terminated.exit_code {
            let reason = message.reason.filter(|reason| !reason.is_empty());
            let reason = reason.map(|reason| known_reason(&reason).to_owned());
            self.reason = self.reason.take().or(reason);
            let text = not_empty(message.message.as_deref());
            self.message = self.message.take().or(text);
        }
    }
}

/// Returns the outcome of the Pod that decides a Job's result: the last one that ended, or else the newest
/// one.
pub fn newest<P: Borrow<Pod>>(pods: &[P]) -> Option<PodOutcome> {
    let outcomes = pods.iter().map(|pod| {
        let pod: &Pod = pod.borrow();
        (pod, pod_outcome(pod))
    });
    let age = |(pod, outcome): &(&Pod, PodOutcome)| {
        let created = created(&pod.metadata);
        let changed = outcome.finished_at.max(created);
        (outcome.ended, changed, pod.metadata.name.clone())
    };
    let newest = outcomes.max_by_key(age)?;
    Some(newest.1)
}

/// Returns the outcome of the Pod that ended first. It tells whether the Job's preconditions held: they may
/// no longer hold for later Pods.
pub fn first_ended<P: Borrow<Pod>>(pods: &[P]) -> Option<PodOutcome> {
    let outcomes = pods.iter().map(|pod| pod_outcome(pod.borrow()));
    let ended = outcomes.filter(|o| o.ended);
    ended.min_by_key(|o| o.finished_at)
}

/// Returns whether a user has suspended a Job, so that it has no Pods.
pub fn is_suspended(job: &Job) -> bool {
    job.spec.as_ref().is_some_and(|s| s.suspend == Some(true))
}

/// Returns the reason of a failure from its exit code, if nothing else is known; `None` for success.
pub fn reason_of_code(code: i32) -> Option<String> {
    (code != 0).then(|| format!("ExitCode{code}"))
}

/// Returns whether a Job has succeeded or failed.
pub fn is_finished(job: &Job) -> bool {
    state(job).0 != RunState::Running
}

/// Returns the state of a Job; if it has failed, also Kubernetes' reason and message.
fn state(job: &Job) -> (RunState, Option<&str>, Option<&str>) {
    let conditions = job.status.as_ref().and_then(|s| s.conditions.as_ref());
    let conditions = conditions.into_iter().flatten();
    for condition in conditions.filter(|c| c.status == "True") {
        match condition.type_.as_str() {
            "Complete" => return (RunState::Succeeded, None, None),
            "Failed" => {
                let (reason, message) = (condition.reason.as_deref(), condition.message.as_deref());
                return (RunState::Failed, reason, message);
            }
            _ => {}
        }
    }
    (RunState::Running, None, None)
}

/// Returns the exit code in Kubernetes' message "… failed with exit code 65 matching …", which remains after
/// the Pod is gone.
fn exit_code_in(message: &str) -> Option<i32> {
    let (_, after) = message.split_once("exit code ")?;
    let end = after
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(after.len());
    after[..end].parse().ok()
}

/// Returns the state of a Job, or its result.
pub fn last_run<P: Borrow<Pod>>(job: &Job, pods: &[P]) -> LastRun {
    let (state, job_reason, job_message) = state(job);
    let pod = newest(pods);
    let run = LastRun {
        start_time: created(&job.metadata),
        state,
        ..LastRun::default()
    };
    match state {
        RunState::Running => run,
        RunState::Succeeded => succeeded(run, job, pod),
        RunState::Failed => failed(run, job, pod.unwrap_or_default(), job_reason, job_message),
    }
}

fn succeeded(run: LastRun, job: &Job, pod: Option<PodOutcome>) -> LastRun {
    let pod = pod.filter(|p| p.exit_code == Some(0));
    let completion_time = job.status.as_ref().and_then(|s| s.completion_time.as_ref());
    LastRun {
        completion_time: completion_time
            .map(utc)
            .or_else(|| pod.as_ref()?.finished_at),
        exit_code: Some(0),
        revision: pod.as_ref().and_then(|p| p.revision),
        snapshot: pod.and_then(|p| p.snapshot),
        ..run
    }
}

fn failed(
    mut run: LastRun,
    job: &Job,
    pod: PodOutcome,
    job_reason: Option<&str>,
    job_message: Option<&str>,
) -> LastRun {
    let conditions = job.status.as_ref().and_then(|s| s.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    let condition = conditions.find(|c| c.type_ == "Failed");
    let failed_at = condition.and_then(|c| c.last_transition_time.as_ref());
    run.completion_time = failed_at.map(utc);
    if job_reason == Some(DEADLINE_EXCEEDED) {
        // Kubernetes ended the Pod, so its own result does not count.
        run.reason = Some(DEADLINE_EXCEEDED.to_owned());
        run.message = match pod.waiting_reason {
            Some(reason) => Some(format!(
                "the Job reached its deadline before the Pod started: {reason}"
            )),
            None => not_empty(job_message),
        };
        return run;
    }
    let exit_code = pod.exit_code.or_else(|| exit_code_in(job_message?));
    run.exit_code = exit_code.filter(|&c| c != 0);
    let reason_of_code = || only_reason(run.exit_code?);
    let reason = pod.reason.or_else(reason_of_code);
    run.reason = reason.or_else(|| not_empty(job_reason));
    run.message = pod.message.or_else(|| not_empty(job_message));
    run.revision = pod.revision;
    run
}

/// Returns whether the result of a run is complete. The status of a Pod can arrive a few seconds after that
/// of its Job; what is missing after that does not arrive any more.
pub fn is_settled(run: &LastRun, now: DateTime<Utc>) -> bool {
    let is_complete = match run.state {
        RunState::Running => true,
        RunState::Succeeded => run.revision.is_some(),
        RunState::Failed => {
            run.exit_code.is_some() || run.reason.as_deref() == Some(DEADLINE_EXCEEDED)
        }
    };
    // A time far in the future, from a wrong clock, must not delay the result.
    let is_over = |ended: DateTime<Utc>| (now - ended).abs() >= POD_STATUS_TIMEOUT;
    is_complete || run.completion_time.is_none_or(is_over)
}

/// Returns when to look again for the rest of a result that is not complete.
pub fn settles_at(now: DateTime<Utc>) -> DateTime<Utc> {
    later(now, POD_STATUS_DELAY)
}

/// Returns whether an earlier observation of a run is at least as complete as the current one. The Pods may
/// be gone by now.
pub fn is_more_complete(before: &LastRun, now: &LastRun) -> bool {
    before.state != RunState::Running
        && before.state == now.state
        && (before.exit_code.is_some() || now.exit_code.is_none())
        && (before.revision.is_some() || now.revision.is_none())
}

/// Returns the reason of an exit code, if it has exactly one.
fn only_reason(code: i32) -> Option<String> {
    let mut reasons = reasons_of(code);
    let reason = reasons.next()?;
    reasons.next().is_none().then(|| reason.as_str().to_owned())
}

fn reasons_of(code: i32) -> impl Iterator<Item = &'static Reason> {
    let has_code = move |r: &&Reason| i32::from(r.exit_code()) == code;
    Reason::ALL.iter().filter(has_code)
}

/// Returns whether a run failed because the store, the etcd or the Kubernetes API did not respond.
pub fn is_unreachable(run: &LastRun) -> bool {
    const UNREACHABLE: [Reason; 4] = [
        Reason::StoreUnreachable,
        Reason::EtcdUnreachable,
        Reason::NoQuorum,
        Reason::KubernetesUnreachable,
    ];
    run.state == RunState::Failed
        && UNREACHABLE.iter().any(|reason| {
            run.exit_code == Some(i32::from(reason.exit_code()))
                || run.reason.as_deref() == Some(reason.as_str())
        })
}

/// Returns whether the same command can succeed later without a correction: by the table of
/// docs/exit-codes.md, and after a kill, an eviction, or an exceeded deadline.
pub fn is_worth_retrying(run: &LastRun) -> bool {
    let Some(code) = run.exit_code else {
        return true;
    };
    match reasons_of(code).next() {
        Some(reason) => reason.is_retryable() || *reason == Reason::Terminated,
        None => true,
    }
}

/// Returns a sentence on why a run failed.
pub fn failure_text(run: &LastRun) -> String {
    let code = run.exit_code.map(|c| format!("exit code {c}"));
    let cause = match (code, &run.reason) {
        (Some(code), Some(reason)) => format!("{code}, {reason}"),
        (Some(code), None) => code,
        (None, Some(reason)) => reason.clone(),
        (None, None) => "for an unknown reason".to_owned(),
    };
    match &run.message {
        Some(message) => format!("{cause}: {message}"),
        None => cause,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use k8s_openapi::api::batch::v1::{JobCondition, JobStatus};
    use k8s_openapi::api::core::v1::{
        ContainerState, ContainerStateTerminated, ContainerStateWaiting, PodStatus,
    };
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    pub fn time(seconds: i64) -> Time {
        Time(Timestamp::from_second(1_790_000_000 + seconds).unwrap())
    }

    fn at(seconds: i64) -> Option<DateTime<Utc>> {
        Some(utc(&time(seconds)))
    }

    /// Returns a Job with this condition: type, reason and message.
    pub fn job(condition: Option<(&str, &str, &str)>) -> Job {
        let condition = condition.map(|(type_, reason, message)| JobCondition {
            type_: type_.to_owned(),
            status: "True".to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_transition_time: Some(time(50)),
            ..JobCondition::default()
        });
        let mut job = Job {
            status: Some(JobStatus {
                conditions: condition.map(|c| vec![c]),
                ..JobStatus::default()
            }),
            ..Job::default()
        };
        job.metadata.creation_timestamp = Some(time(0));
        job
    }

    /// Returns a Pod whose main container ended at this second, with this exit code and termination message.
    pub fn pod(name: &str, ended: i64, code: i32, message: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some(name.to_owned());
        pod.metadata.creation_timestamp = Some(time(1));
        let terminated = ContainerStateTerminated {
            exit_code: code,
            finished_at: Some(time(ended)),
            message: Some(message.to_owned()),
            reason: Some(if code == 0 { "Completed" } else { "Error" }.to_owned()),
            ..ContainerStateTerminated::default()
        };
        with_state(
            pod,
            ContainerState {
                terminated: Some(terminated),
                ..ContainerState::default()
            },
        )
    }

    fn with_state(mut pod: Pod, state: ContainerState) -> Pod {
        pod.status = Some(PodStatus {
            phase: Some("Failed".to_owned()),
            container_statuses: Some(vec![
                ContainerStatus {
                    name: "sidecar".to_owned(),
                    ..ContainerStatus::default()
                },
                ContainerStatus {
                    name: CONTAINER.to_owned(),
                    state: Some(state),
                    ..ContainerStatus::default()
                },
            ]),
            ..PodStatus::default()
        });
        pod
    }

    /// Returns the termination message of a failure.
    pub fn failure(code: i32, reason: &str) -> String {
        format!(
            r#"{{"command":"compact","status":"Failed","code":{code},"reason":"{reason}","retry":true,"message":"it is so","seconds":1.5,"finished_at":"2026-09-21T14:13:30Z","result":null}}"#
        )
    }

    #[test]
    fn a_succeeded_job_has_the_revision_of_its_last_pod() {
        let done = r#"{"command":"compact","status":"Succeeded","code":0,"reason":null,"retry":null,"message":null,"seconds":2,"finished_at":"2026-09-21T14:13:30Z","result":{"status":"Compacted","revision":1499,"base":"Full-1"}}"#;
        let mut j = job(Some(("Complete", "", "")));
        j.status.as_mut().unwrap().completion_time = Some(time(40));
        let run = last_run(
            &j,
            &[
                pod("a", 20, 69, &failure(69, "StoreUnreachable")),
                pod("b", 30, 0, done),
            ],
        );
        assert_eq!(run.state, RunState::Succeeded);
        assert_eq!((run.revision, run.exit_code), (Some(1499), Some(0)));
        assert_eq!((run.start_time, run.completion_time), (at(0), at(40)));
        assert_eq!((&run.reason, &run.message), (&None, &None));
        // The Pod is gone.
        let run = last_run::<Pod>(&j, &[]);
        assert_eq!((run.state, run.revision), (RunState::Succeeded, None));
        for (result, revision) in [
            (r#"{"newest":{"last_revision":7}}"#, Some(7)),
            (r#"{"compact":{"revision":9},"members":[]}"#, Some(9)),
            (r#"{"revision":"12"}"#, Some(12)),
            (r#"{"revision":-1}"#, None),
            (r#"{"revision":{"count":3}}"#, None),
            ("null", None),
        ] {
            let text = format!(r#"{{"status":"Verified","code":0,"result":{result}}}"#);
            assert_eq!(
                pod_outcome(&pod("a", 1, 0, &text)).revision,
                revision,
                "{text}"
            );
        }
    }

    #[test]
    fn a_failed_job_has_the_reason_of_its_last_pod() {
        let failed = job(Some((
            "Failed",
            "BackoffLimitExceeded",
            "Job has reached the specified backoff limit",
        )));
        let pods = [
            pod("b", 30, 69, &failure(69, "StoreUnreachable")),
            pod("a", 40, 74, &failure(74, "NoSpace")),
            pod("c", 10, 69, &failure(69, "EtcdUnreachable")),
        ];
        let run = last_run(&failed, &pods);
        assert_eq!(run.state, RunState::Failed);
        assert_eq!(
            (run.exit_code, run.reason.as_deref()),
            (Some(74), Some("NoSpace"))
        );
        assert_eq!(run.message.as_deref(), Some("it is so"));
        assert_eq!(run.completion_time, at(50));
        assert_eq!(failure_text(&run), "exit code 74, NoSpace: it is so");
        assert_eq!(
            first_ended(&pods).unwrap().reason.as_deref(),
            Some("EtcdUnreachable")
        );
        // The Pod is gone: the exit code is in Kubernetes' message.
        let by_policy = job(Some((
            "Failed",
            "PodFailurePolicy",
            "Container deltafold for pod a/b failed with exit code 76 matching FailJob rule at index 0",
        )));
        let run = last_run::<Pod>(&by_policy, &[]);
        assert_eq!(
            (run.exit_code, run.reason.as_deref()),
            (Some(76), Some("CertificateExpired"))
        );
        assert!(!is_worth_retrying(&run));
        let run = last_run::<Pod>(&failed, &[]);
        assert_eq!(
            (run.exit_code, run.reason.as_deref()),
            (None, Some("BackoffLimitExceeded"))
        );
        assert!(is_worth_retrying(&run));
    }

    #[test]
    fn an_exceeded_deadline_overrides_the_result_of_the_pod() {
        let late = job(Some((
            "Failed",
            "DeadlineExceeded",
            "Job was active longer than specified deadline",
        )));
        let run = last_run(&late, &[pod("a", 40, 143, &failure(143, "Terminated"))]);
        assert_eq!(
            (run.exit_code, run.reason.as_deref()),
            (None, Some(DEADLINE_EXCEEDED))
        );
        assert!(is_worth_retrying(&run));
        let waiting = ContainerState {
            waiting: Some(ContainerStateWaiting {
                reason: Some("ImagePullBackOff".to_owned()),
                message: Some("Back-off pulling image".to_owned()),
            }),
            ..ContainerState::default()
        };
        let mut never = with_state(Pod::default(), waiting);
        let run = last_run(&late, &[never.clone()]);
        assert!(run.message.unwrap().contains("ImagePullBackOff: Back-off"));
        never.status.as_mut().unwrap().phase = Some("Pending".to_owned());
        let run = last_run(&job(None), &[never]);
        assert_eq!((run.state, run.completion_time), (RunState::Running, None));
    }

    #[test]
    fn killed_and_evicted_pods_have_the_reason_of_kubernetes() {
        let failed = job(Some(("Failed", "BackoffLimitExceeded", "")));
        let mut killed = pod("a", 40, 137, "");
        let state = killed
            .status
            .as_mut()
            .unwrap()
            .container_statuses
            .as_mut()
            .unwrap()[1]
            .state
            .as_mut();
        state.unwrap().terminated.as_mut().unwrap().reason = Some("OOMKilled".to_owned());
        let run = last_run(&failed, &[killed]);
        assert_eq!(
            (run.exit_code, run.reason.as_deref()),
            (Some(137), Some("OOMKilled"))
        );
        assert!(is_worth_retrying(&run) && !is_unreachable(&run));
        let evicted = Pod {
            status: Some(PodStatus {
                phase: Some("Failed".to_owned()),
                reason: Some("Evicted".to_owned()),
                message: Some("The node was low on resource: memory.".to_owned()),
                ..PodStatus::default()
            }),
            ..Pod::default()
        };
        let run = last_run(&failed, &[evicted]);
        assert_eq!(
            (run.exit_code, run.reason.as_deref()),
            (None, Some("Evicted"))
        );
    }

    #[test]
    fn a_failed_init_container_decides_the_result() {
        let mut p = pod("a", 40, 0, "");
        let status = p.status.as_mut().unwrap();
        let mut before = status.container_statuses.as_ref().unwrap()[1].clone();
        before.name = CONTAINER_BEFORE.to_owned();
        let ended = before.state.as_mut().unwrap().terminated.as_mut().unwrap();
        ended.exit_code = 65;
        ended.message = Some(failure(65, "CorruptSnapshot"));
        status.init_container_statuses = Some(vec![before]);
        status.container_statuses.as_mut().unwrap()[1].state = None;
        let failed = job(Some(("Failed", "PodFailurePolicy", "")));
        let run = last_run(&failed, &[p]);
        assert_eq!(
            (run.exit_code, run.reason.as_deref()),
            (Some(65), Some("CorruptSnapshot"))
        );
    }

    #[test]
    fn a_result_is_settled_when_the_pods_status_has_arrived_or_is_overdue() {
        let failed = job(Some(("Failed", "BackoffLimitExceeded", "")));
        let late = last_run::<Pod>(&failed, &[]);
        let ended = late.completion_time.unwrap();
        assert!(!is_settled(&late, ended + TimeDelta::seconds(4)));
        assert!(is_settled(&late, ended + TimeDelta::seconds(5)));
        assert!(is_settled(&late, ended - TimeDelta::hours(1)));
        let whole = last_run(
            &failed,
            &[pod("a", 40, 69, &failure(69, "StoreUnreachable"))],
        );
        assert!(is_settled(&whole, ended));
        assert!(is_more_complete(&whole, &late) && !is_more_complete(&late, &whole));
        assert!(is_settled(&last_run::<Pod>(&job(None), &[]), ended));
        let deadline = job(Some(("Failed", DEADLINE_EXCEEDED, "")));
        assert!(is_settled(&last_run::<Pod>(&deadline, &[]), ended));
    }

    #[test]
    fn any_termination_message_is_tolerated() {
        let failed = job(Some(("Failed", "BackoffLimitExceeded", "")));
        let long = format!(
            r#"{{"status":"Failed","code":65,"message":"{}"}}"#,
            "ä".repeat(4000)
        );
        for text in [
            "",
            "null",
            "[]",
            "42",
            "\"text\"",
            "{}",
            r#"{"status":1,"code":"x"}"#,
            r#"{"status":"Failed","code":99999999999}"#,
            r#"{"status":"Failed","code":65,"reason":{},"message":[],"result":[1],"finished_at":7}"#,
            "thread 'main' panicked at src/main.rs",
            "{\"status\":\"Failed\",\"code\":65,\"reason\":\"Corr",
            "\u{0}\u{fffd}",
            &long,
        ] {
            let run = last_run(&failed, &[pod("a", 40, 65, text)]);
            assert_eq!(
                (run.state, run.exit_code),
                (RunState::Failed, Some(65)),
                "{text}"
            );
            assert!(run.message.unwrap_or_default().len() <= 1024);
        }
        // Pods with random reasons make no series of metrics each.
        for (reason, shown) in [
            ("NoSpace", "NoSpace"),
            ("x7f3", "Other"),
            ("nospace", "Other"),
        ] {
            let run = last_run(&failed, &[pod("a", 40, 65, &failure(65, reason))]);
            assert_eq!(run.reason.as_deref(), Some(shown));
        }
        // The message of another exit code is ignored.
        let run = last_run(
            &failed,
            &[pod("a", 40, 137, &failure(69, "StoreUnreachable"))],
        );
        assert_eq!(
            (run.exit_code, run.reason.as_deref()),
            (Some(137), Some("BackoffLimitExceeded"))
        );
    }

    #[test]
    fn retries_follow_the_table_of_reasons() {
        for &reason in Reason::ALL {
            let run = LastRun {
                state: RunState::Failed,
                exit_code: Some(i32::from(reason.exit_code())),
                ..LastRun::default()
            };
            let can_help = reason.is_retryable() || reason == Reason::Terminated;
            assert_eq!(is_worth_retrying(&run), can_help, "{reason:?}");
            assert_eq!(is_unreachable(&run), reason.exit_code() == 69, "{reason:?}");
        }
    }
}
