//! Why the Pod of a Job, or of a follower, has not started, and what to do about it.
//!
//! Kubernetes reports it in four places: the state of the container, the condition PodScheduled, and Warnings (Events)
//! about the Pod and about the Job. Pure; the caller reads the Warnings.

use super::outcome;
use crate::base::opt;
use crate::base::printable;
use crate::controller::times::{created, later};
use chrono::{DateTime, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use std::borrow::Borrow;
use std::collections::BTreeMap;

/// A Pod usually starts within this time. After it, the Warnings about the Pod are read.
const USUAL_START: TimeDelta = TimeDelta::seconds(10);
/// How often the Warnings about a Pod that has not started are read at first; later after each quarter of its age, since
/// the API server walks over all Events of the namespace.
const WARNING_PERIOD: TimeDelta = TimeDelta::seconds(10);

/// What to do about a Pod that cannot start, by words in the reason or the message of Kubernetes.
const REMEDIES: [(&str, &str); 11] = [
    (
        "quota",
        "raise the ResourceQuota of the namespace, or lower jobTemplate.resources",
    ),
    (
        "persistentvolumeclaim",
        "create the PersistentVolumeClaim, or correct its name in the policy or the task",
    ),
    (
        "Insufficient ephemeral-storage",
        "add nodes with more disk, or lower jobTemplate.scratchSize and jobTemplate.resources",
    ),
    ("Insufficient", "add nodes, or lower jobTemplate.resources"),
    (
        "taint",
        "set jobTemplate.tolerations or jobTemplate.nodeSelector, or add nodes",
    ),
    (
        "node selector",
        "correct jobTemplate.nodeSelector, or label a node",
    ),
    (
        "Image",
        "check jobTemplate.image or the controller's {job-image}, and that the nodes may pull it",
    ),
    (
        "hostPath",
        "create the folder on the node, writable by user 65532, or correct volume.hostPath",
    ),
    ("FailedMount", "check the volume and its Secret"),
    (
        "CreateContainerConfigError",
        "check the Secrets and the user of the Pod",
    ),
    (
        "serviceaccount",
        "create the ServiceAccount, or correct jobTemplate.serviceAccountName",
    ),
];

/// Returns a text of Kubernetes with the remedy, if one is known.
fn with_remedy(text: &str) -> String {
    let lower = text.to_lowercase();
    let remedy = REMEDIES
        .iter()
        .find(|(words, _)| lower.contains(&words.to_lowercase()));
    let text = printable::message(text.trim_end_matches(['.', ' ']).to_owned());
    match remedy {
        Some((_, remedy)) => format!("{text}: {}", opt::fill(remedy)),
        None => text,
    }
}

/// Returns why no Pod of a Job has started, if Kubernetes has said so. `warnings` has the newest Warning about the Job
/// and each of its Pods.
pub fn why_not_started<P: Borrow<Pod>>(
    job: &Job,
    pods: &[P],
    warnings: &BTreeMap<String, String>,
) -> Option<String> {
    let Some(newest) = newest_pod(pods) else {
        let warning = warnings.get(&job.name_any())?;
        return Some(format!("the Job has no Pod: {}", with_remedy(warning)));
    };
    if pods.iter().any(|pod| has_started(pod.borrow())) {
        return None;
    }
    why_pod_not_started(newest, warnings)
}

/// Returns why a Pod has not started, if Kubernetes has said so.
pub fn why_pod_not_started(pod: &Pod, warnings: &BTreeMap<String, String>) -> Option<String> {
    if has_started(pod) {
        return None;
    }
    let why = pod_problem(pod).or_else(|| warnings.get(&pod.name_any()).cloned())?;
    Some(format!("the Pod has not started: {}", with_remedy(&why)))
}

fn newest_pod<P: Borrow<Pod>>(pods: &[P]) -> Option<&Pod> {
    let pods = pods.iter().map(Borrow::borrow);
    pods.max_by_key(|pod: &&Pod| pod.creation_timestamp().map(|t| t.0))
}

/// Returns whether a container of deltafold has run in a Pod.
pub fn has_started(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|s| s.container_statuses.as_ref());
    let init = status.and_then(|s| s.init_container_statuses.as_ref());
    let mut states = containers
        .into_iter()
        .chain(init)
        .flatten()
        .filter_map(|c| c.state.as_ref());
    let has_ended = matches!(
        status.and_then(|s| s.phase.as_deref()),
        Some("Succeeded" | "Failed")
    );
    has_ended || states.any(|state| state.running.is_some() || state.terminated.is_some())
}

/// Returns what the status of a Pod says about its start.
fn pod_problem(pod: &Pod) -> Option<String> {
    if let Some(waiting) = outcome::pod_outcome(pod).waiting_reason {
        return Some(waiting);
    }
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let unscheduled = conditions
        .iter()
        .find(|c| c.type_ == "PodScheduled" && c.status == "False")?;
    let reason = unscheduled.reason.as_deref().unwrap_or("Unschedulable");
    let message = unscheduled.message.as_deref().unwrap_or_default();
    Some(format!("{reason}: {message}"))
}

/// An object about which Kubernetes may have written a Warning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Silent {
    /// `Pod` or `Job`.
    pub kind: &'static str,
    /// The name of the object.
    pub name: String,
}

/// Returns the Job, or its newest Pod, that has not started for longer than usual and whose status does not say why;
/// and when to look again.
pub fn silent<P: Borrow<Pod>>(
    job: &Job,
    pods: &[P],
    now: DateTime<Utc>,
) -> (Option<Silent>, Option<DateTime<Utc>>) {
    if outcome::is_finished(job)
        || outcome::is_suspended(job)
        || pods.iter().any(|pod| has_started(pod.borrow()))
    {
        return (None, None);
    }
    match newest_pod(pods) {
        Some(pod) => silent_pod(pod, now),
        None => silent_object("Job", &job.metadata, now),
    }
}

/// Like [`silent`], for a Pod.
pub fn silent_pod(pod: &Pod, now: DateTime<Utc>) -> (Option<Silent>, Option<DateTime<Utc>>) {
    if has_started(pod) || pod_problem(pod).is_some() {
        return (None, None);
    }
    silent_object("Pod", &pod.metadata, now)
}

fn silent_object(
    kind: &'static str,
    metadata: &ObjectMeta,
    now: DateTime<Utc>,
) -> (Option<Silent>, Option<DateTime<Utc>>) {
    let created = created(metadata).unwrap_or(now);
    let overdue = later(created, USUAL_START);
    if now < overdue {
        return (None, Some(overdue));
    }
    let name = metadata.name.clone().unwrap_or_default();
    (
        Some(Silent { kind, name }),
        Some(later(now, WARNING_PERIOD.max((now - created) / 4))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::facts::outcome::tests::{job, time};
    use crate::controller::times::utc;
    use k8s_openapi::api::core::v1::{PodCondition, PodStatus};

    fn pending(conditions: Vec<PodCondition>) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some("pod".to_owned());
        pod.metadata.creation_timestamp = Some(time(0));
        pod.status = Some(PodStatus {
            phase: Some("Pending".to_owned()),
            conditions: Some(conditions),
            ..PodStatus::default()
        });
        pod
    }

    #[test]
    fn what_kubernetes_says_about_a_pod_that_cannot_start_comes_with_a_remedy() {
        let unschedulable = |message: &str| PodCondition {
            type_: "PodScheduled".to_owned(),
            status: "False".to_owned(),
            reason: Some("Unschedulable".to_owned()),
            message: Some(message.to_owned()),
            ..PodCondition::default()
        };
        let none = BTreeMap::new();
        for (message, remedy) in [
            (
                "0/1 nodes are available: persistentvolumeclaim \"c\" not found.",
                "create the Persist",
            ),
            (
                "0/1 nodes are available: 1 Insufficient cpu.",
                "lower jobTemplate.resources",
            ),
            (
                "0/1 nodes are available: 1 node(s) had untolerated taint(s)",
                "tolerations",
            ),
        ] {
            let pod = pending(vec![unschedulable(message)]);
            let why = why_not_started(&job(None), &[pod], &none).unwrap();
            assert!(
                why.starts_with("the Pod has not started: Unschedulable: "),
                "{why}"
            );
            assert!(why.contains(remedy), "{why}");
        }
        // Kubernetes' own Warnings say the rest.
        let now = utc(&time(60));
        let (asked, again) = silent(&job(None), &[pending(Vec::new())], now);
        let asked = asked.unwrap();
        assert_eq!((asked.kind, asked.name.as_str()), ("Pod", "pod"));
        assert_eq!(again, Some(later(now, TimeDelta::seconds(15))));
        assert_eq!(
            silent(&job(None), &[pending(Vec::new())], utc(&time(5))).0,
            None
        );
        let warnings = [(
            "pod".to_owned(),
            "FailedMount: hostPath type check failed".to_owned(),
        )];
        let why = why_not_started(&job(None), &[pending(Vec::new())], &warnings.into()).unwrap();
        assert!(why.contains("create the folder on the node"), "{why}");
        let (asked, _) = silent::<Pod>(&job(None), &[], now);
        assert_eq!(asked.unwrap().kind, "Job");
        let warnings = [(
            String::new(),
            "FailedCreate: pods \"a\" is forbidden: exceeded quota: q".to_owned(),
        )];
        let why = why_not_started::<Pod>(&job(None), &[], &warnings.into()).unwrap();
        assert!(
            why.starts_with("the Job has no Pod: ") && why.contains("ResourceQuota"),
            "{why}"
        );
    }
}
