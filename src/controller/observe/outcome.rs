//! How a Job ended, and why: from its conditions, and from what its Pods left behind.
//!
//! A Pod leaves a termination message (docs/exit-codes.md), or nothing where it was killed; anything else that may
//! stand there tells nothing. Pure; the reconcilers and `policy` call it.

use crate::controller::api::{LastRun, RunState};
use crate::controller::jobs::{CONTAINER, CONTAINER_BEFORE};
use crate::controller::times::utc;
use crate::error::Reason;
use crate::telemetry::termination::Message;
use chrono::{DateTime, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use std::borrow::Borrow;

/// A Job may be known to have ended a little sooner than its Pod is.
const PODS_ARE_LATE: TimeDelta = TimeDelta::seconds(5);
/// When to look again for what a Pod that has ended has to say.
pub const PODS_COME: TimeDelta = TimeDelta::seconds(2);
/// Of a message, in characters: a status is no log.
const LONGEST_MESSAGE: usize = 1024;
/// A Job's own reason where its time was up.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// A Job that is gone before its end was seen.
pub const JOB_DELETED: &str = "JobDeleted";

/// What a termination message tells, as far as the controller needs it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Told {
    /// The exit code.
    pub exit_code: Option<i32>,
    /// The reason of docs/exit-codes.md.
    pub reason: Option<String>,
    /// For people.
    pub message: Option<String>,
    /// The newest revision that was dealt with.
    pub revision: Option<i64>,
    /// When the command ended.
    pub finished_at: Option<DateTime<Utc>>,
}

impl Told {
    /// Reads a termination message. `None` where it is none of ours.
    pub fn read(text: &str) -> Option<Told> {
        let message: Message = serde_json::from_str(text).ok()?;
        let text = |t: Option<String>| t.filter(|t| !t.is_empty());
        Some(Told {
            exit_code: Some(i32::from(message.code)),
            revision: message.revision(),
            reason: text(message.reason).map(|r| r.chars().take(64).collect()),
            message: text(message.message).map(|m| cut(&m)),
            finished_at: message.finished_at,
        })
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(LONGEST_MESSAGE) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// How a Pod of a Job is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodOutcome {
    /// Whether its work has ended, one way or another.
    pub ended: bool,
    /// The exit code; `None` of one that never ran.
    pub exit_code: Option<i32>,
    /// The reason of docs/exit-codes.md, or Kubernetes' (`OOMKilled`, `Evicted`, …).
    pub reason: Option<String>,
    /// For people.
    pub message: Option<String>,
    /// The newest revision that it dealt with.
    pub revision: Option<i64>,
    /// When it ended.
    pub finished_at: Option<DateTime<Utc>>,
    /// What it waits for, if it has not begun.
    pub waits: Option<String>,
}

/// The status of the container that does the work; of one before it, if that one has failed.
fn container(pod: &Pod) -> Option<&ContainerStatus> {
    let status = pod.status.as_ref()?;
    let has_failed = |c: &&ContainerStatus| {
        let ended = c.state.as_ref().and_then(|s| s.terminated.as_ref());
        c.name == CONTAINER_BEFORE && ended.is_some_and(|t| t.exit_code != 0)
    };
    let before = status.init_container_statuses.iter().flatten();
    let mut statuses = status.container_statuses.iter().flatten();
    let own = statuses.find(|c| c.name == CONTAINER);
    before.into_iter().find(has_failed).or(own)
}

/// How a Pod is.
pub fn of_pod(pod: &Pod) -> PodOutcome {
    let status = pod.status.as_ref();
    let phase = status.and_then(|s| s.phase.as_deref()).unwrap_or_default();
    let text = |t: Option<&String>| t.filter(|t| !t.is_empty()).map(|t| cut(t));
    let mut outcome = PodOutcome {
        ended: matches!(phase, "Succeeded" | "Failed"),
        // As of one that was evicted.
        reason: text(status.and_then(|s| s.reason.as_ref())),
        message: text(status.and_then(|s| s.message.as_ref())),
        ..PodOutcome::default()
    };
    let conditions = status.and_then(|s| s.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    if outcome.reason.is_none()
        && let Some(disrupted) =
            conditions.find(|c| c.type_ == "DisruptionTarget" && c.status == "True")
    {
        outcome.reason = text(disrupted.reason.as_ref()).or(Some("DisruptionTarget".to_owned()));
        outcome.message = outcome.message.or(text(disrupted.message.as_ref()));
    }
    let Some(state) = container(pod).and_then(|c| c.state.as_ref()) else {
        return outcome;
    };
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        if !matches!(reason, "" | "ContainerCreating" | "PodInitializing") {
            let more = waiting.message.as_deref().unwrap_or_default();
            outcome.waits = Some(cut(format!("{reason}: {more}").trim_end_matches([':', ' '])));
        }
    }
    if let Some(ended) = &state.terminated {
        outcome.ended = true;
        outcome.exit_code = Some(ended.exit_code);
        outcome.finished_at = ended.finished_at.as_ref().map(utc);
        match ended.message.as_deref().and_then(Told::read) {
            Some(told) => {
                outcome.revision = told.revision;
                outcome.finished_at = outcome.finished_at.or(told.finished_at);
                // A message of an earlier run tells nothing of this one.
                if ended.exit_code != 0 && told.exit_code == Some(ended.exit_code) {
                    outcome.reason = outcome.reason.or(told.reason);
                    outcome.message = outcome.message.or(told.message);
                }
            }
            None if ended.exit_code != 0 => {
                // `Error` says no more than the exit code does.
                let named = ended.reason.as_ref().filter(|r| *r != "Error");
                outcome.reason = outcome.reason.or(text(named));
            }
            None => {}
        }
    }
    outcome
}

/// The Pod of a Job that tells how it ended: the one that ended last; else the one that was made last.
pub fn newest<P: Borrow<Pod>>(pods: &[P]) -> Option<PodOutcome> {
    let outcomes = pods.iter().map(|pod| {
        let pod: &Pod = pod.borrow();
        let outcome = of_pod(pod);
        let created = pod.metadata.creation_timestamp.as_ref().map(utc);
        let key = (
            outcome.ended,
            outcome.finished_at.max(created),
            pod.metadata.name.clone(),
        );
        (key, outcome)
    });
    outcomes
        .max_by(|a, b| a.0.cmp(&b.0))
        .map(|(_, outcome)| outcome)
}

/// The Pod of a Job that ended first: by it pre-conditions are told that hold no more later.
pub fn first_ended<P: Borrow<Pod>>(pods: &[P]) -> Option<PodOutcome> {
    let outcomes = pods.iter().map(|pod| of_pod(pod.borrow()));
    let ended = outcomes.filter(|o| o.ended);
    ended.min_by_key(|o| o.finished_at)
}

/// Whether a Job has ended: done, or not to be done any more.
pub fn is_finished(job: &Job) -> bool {
    state(job).0 != RunState::Running
}

/// How a Job is; of a failed one Kubernetes' reason and message.
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

/// The code in Kubernetes' own sentence, where the Pod itself is gone: "… failed with exit code 65 matching …".
fn code_in(message: &str) -> Option<i32> {
    let (_, behind) = message.split_once("exit code ")?;
    let end = behind
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(behind.len());
    behind[..end].parse().ok()
}

/// How a Job is, or how and why it ended.
pub fn last_run<P: Borrow<Pod>>(job: &Job, pods: &[P]) -> LastRun {
    let (state, job_reason, job_message) = state(job);
    let status = job.status.as_ref();
    let created = job.metadata.creation_timestamp.as_ref().map(utc);
    let mut run = LastRun {
        start_time: created,
        state,
        ..LastRun::default()
    };
    let pod = newest(pods);
    match state {
        RunState::Running => {
            run.message = pod
                .and_then(|p| p.waits)
                .map(|w| format!("its Pod waits: {w}"));
        }
        RunState::Succeeded => {
            let done = pod.filter(|p| p.exit_code == Some(0));
            let ended = status.and_then(|s| s.completion_time.as_ref()).map(utc);
            run.completion_time = ended.or(done.as_ref().and_then(|p| p.finished_at));
            run.exit_code = Some(0);
            run.revision = done.and_then(|p| p.revision);
        }
        RunState::Failed => {
            let conditions = status.and_then(|s| s.conditions.as_ref());
            let failed = conditions
                .into_iter()
                .flatten()
                .find(|c| c.type_ == "Failed");
            run.completion_time = failed
                .and_then(|c| c.last_transition_time.as_ref())
                .map(utc);
            let pod = pod.unwrap_or_default();
            let own = |t: Option<&str>| t.filter(|t| !t.is_empty()).map(cut);
            if job_reason == Some(DEADLINE_EXCEEDED) {
                // Its Pod was ended, whatever it says itself.
                run.reason = Some(DEADLINE_EXCEEDED.to_owned());
                run.message = match pod.waits {
                    Some(waits) => Some(format!(
                        "its time was up, and its Pod had not begun: {waits}"
                    )),
                    None => own(job_message),
                };
                return run;
            }
            run.exit_code = pod
                .exit_code
                .or_else(|| code_in(job_message?))
                .filter(|&c| c != 0);
            let by_code = || only_reason(run.exit_code?);
            run.reason = pod.reason.or_else(by_code).or_else(|| own(job_reason));
            run.message = pod.message.or_else(|| own(job_message));
            run.revision = pod.revision;
        }
    }
    run
}

/// Whether all that there may be to know of an ended run is known: a Pod's end can be told later than its Job's. What
/// is still missing after a few seconds does not come.
pub fn is_settled(run: &LastRun, now: DateTime<Utc>) -> bool {
    let knows = match run.state {
        RunState::Running => true,
        RunState::Succeeded => run.revision.is_some(),
        RunState::Failed => {
            run.exit_code.is_some() || run.reason.as_deref() == Some(DEADLINE_EXCEEDED)
        }
    };
    let ended = run.completion_time;
    // Where the other clock is far off, nothing is waited for.
    knows || ended.is_none_or(|ended| (now - ended).abs() >= PODS_ARE_LATE)
}

/// Which of two looks at the same run tells more: its Pods may be gone by the second one.
pub fn knows_more(before: &LastRun, now: &LastRun) -> bool {
    before.state != RunState::Running
        && before.state == now.state
        && (before.exit_code.is_some() || now.exit_code.is_none())
        && (before.revision.is_some() || now.revision.is_none())
}

/// The reason of a code that has but one.
fn only_reason(code: i32) -> Option<String> {
    let mut reasons = Reason::ALL
        .iter()
        .filter(|r| i32::from(r.exit_code()) == code);
    let reason = reasons.next()?;
    reasons.next().is_none().then(|| reason.as_str().to_owned())
}

/// Whether a run failed because something did not answer.
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

/// Whether the same can succeed later without anyone mending anything: by docs/exit-codes.md; and where it was
/// killed, evicted, or its time was up.
pub fn is_worth_retrying(run: &LastRun) -> bool {
    let Some(code) = run.exit_code else {
        return true;
    };
    let reasons = Reason::ALL.iter();
    let mut of_code = reasons.filter(|r| i32::from(r.exit_code()) == code);
    // Who was told to end was not at fault.
    let can_help = |r: &Reason| r.is_retryable() || *r == Reason::Terminated;
    of_code.next().is_none_or(can_help)
}

/// In words, why a run failed.
pub fn why(run: &LastRun) -> String {
    let code = run.exit_code.map(|c| format!("exit code {c}"));
    let said = match (code, &run.reason) {
        (Some(code), Some(reason)) => format!("{code}, {reason}"),
        (Some(code), None) => code,
        (None, Some(reason)) => reason.clone(),
        (None, None) => "for an unknown reason".to_owned(),
    };
    match &run.message {
        Some(message) => format!("{said}: {message}"),
        None => said,
    }
}

#[cfg(test)]
pub(in crate::controller) mod tests {
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

    /// A Job that has this condition.
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

    /// A Pod whose container ended so.
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

    /// A termination message of a failure.
    pub fn failure(code: i32, reason: &str) -> String {
        format!(
            r#"{{"command":"compact","status":"Failed","code":{code},"reason":"{reason}","retry":true,"message":"it is so","seconds":1.5,"finished_at":"2026-09-21T14:13:30Z","result":null}}"#
        )
    }

    #[test]
    fn a_done_job_tells_its_revision() {
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
        // Without its Pod.
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
            assert_eq!(Told::read(&text).unwrap().revision, revision, "{text}");
        }
    }

    #[test]
    fn a_failed_job_tells_why_its_newest_pod_failed() {
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
        assert_eq!(why(&run), "exit code 74, NoSpace: it is so");
        assert_eq!(
            first_ended(&pods).unwrap().reason.as_deref(),
            Some("EtcdUnreachable")
        );
        // The Pod is gone: Kubernetes' own words.
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
    fn a_deadline_counts_for_more_than_what_the_ended_pod_says() {
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
        assert_eq!(run.state, RunState::Running);
        assert!(run.message.unwrap().contains("ImagePullBackOff"));
        assert_eq!(run.completion_time, None);
    }

    #[test]
    fn killed_and_evicted_pods_leave_no_message() {
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
    fn a_container_before_the_other_can_fail() {
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
    fn a_pod_may_be_known_to_have_ended_later_than_its_job_or_be_gone() {
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
        assert!(knows_more(&whole, &late) && !knows_more(&late, &whole));
        assert!(is_settled(&last_run::<Pod>(&job(None), &[]), ended));
        let deadline = job(Some(("Failed", DEADLINE_EXCEEDED, "")));
        assert!(is_settled(&last_run::<Pod>(&deadline, &[]), ended));
    }

    #[test]
    fn anything_may_stand_in_a_message() {
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
            assert!(run.message.unwrap_or_default().chars().count() <= LONGEST_MESSAGE + 1);
        }
        // A message that is of another exit is not this one's.
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
    fn whether_a_retry_can_help_is_told_by_the_table() {
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
