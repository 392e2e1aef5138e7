//! The permanent objects of a policy: CronJobs, the follower's Deployment, Leases and the Jobs'
//! ServiceAccount.
//!
//! Pure: compares the wanted objects with those that exist, and returns what to write. Decides on no Jobs.

use super::{Action, Options, PlannedEvent};
use crate::base::hash::short_hash;
use crate::controller::api::EtcdBackupPolicy;
use crate::controller::cluster::Workload;
use crate::controller::facts::Facts;
use crate::controller::jobs::{self, Postponed};
use crate::error::{Error, Result};
use k8s_openapi::api::batch::v1::CronJob;
use kube::core::ApiResource;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// The annotation with the hash of an object as this controller applied it. It shows that the wanted object has
/// changed even if it only lost a field.
const APPLIED_HASH: &str = "deltafold.io/applied-hash";

/// The desired state of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// The kind of the object.
    pub resource: ApiResource,
    /// The name of the object.
    pub name: String,
    /// The whole object, with the annotation [`APPLIED_HASH`].
    pub object: Value,
    /// The UID of the policy that owns the object.
    pub owner: String,
    /// The UID of the existing object, if the policy owns it and a watch has reported it.
    pub existing: Option<String>,
}

/// Returns the action that makes an object as it should be; `None` if it is so already.
///
/// # Errors
/// `Internal` if the object cannot be written as JSON.
fn apply<K: Resource<DynamicType = ()> + Serialize>(
    object: &K,
    policy: &EtcdBackupPolicy,
    existing: &[Arc<Workload<K>>],
    event: PlannedEvent,
) -> Result<Option<Action>> {
    let name = object.name_any();
    let mut json = serde_json::to_value(object).map_err(|e| {
        let kind = K::kind(&());
        Error::internal(format!("the {kind} {name} cannot be written as JSON: {e}"))
    })?;
    json["apiVersion"] = K::api_version(&()).into();
    json["kind"] = K::kind(&()).into();
    json["metadata"]["annotations"][APPLIED_HASH] = short_hash(json.to_string(), 8).into();
    let own = existing
        .iter()
        .find(|w| is_own(w, policy) && w.name() == name);
    if own.is_some_and(|workload| workload.contains(&json)) {
        return Ok(None);
    }
    let desired = Desired {
        resource: ApiResource::erase::<K>(&()),
        name,
        object: json,
        owner: policy.uid().unwrap_or_default(),
        existing: own.and_then(|workload| workload.uid().map(str::to_owned)),
    };
    Ok(Some(Action::Apply(Box::new(desired), event)))
}

/// Returns the actions that make all objects of a policy as its spec says.
///
/// # Errors
/// `Internal` if an object cannot be built or written as JSON.
pub fn apply_all(
    policy: &EtcdBackupPolicy,
    facts: &Facts,
    options: &Options,
    is_backed_up: bool,
) -> Result<Vec<Action>> {
    let mut actions = Vec::new();
    if options.namespaces.is_empty() && !facts.has_account {
        actions.push(Action::MakeAccount);
    }
    // A Lease only has to exist: the Jobs write it.
    let leases = jobs::leases(policy)
        .into_iter()
        .chain(jobs::lock_leases(policy));
    for lease in leases {
        if !facts.existing_leases.contains(&lease.name_any()) {
            actions.push(Action::CreateLease(Box::new(lease)));
        }
    }
    let postponed = Postponed {
        maintenance: !is_backed_up,
        // What belongs to the older policy must not be removed by the rules of this one.
        retention: facts
            .same_store
            .as_ref()
            .is_some_and(|other| other.is_older),
    };
    let cron_jobs = jobs::cron_jobs(policy, &options.settings, postponed)?;
    for cron_job in &cron_jobs {
        actions.extend(apply(
            cron_job,
            policy,
            &facts.cron_jobs,
            cron_job_event(cron_job),
        )?);
    }
    let wanted = |name: &str| cron_jobs.iter().any(|cron_job| cron_job.name_any() == name);
    for cron_job in &facts.cron_jobs {
        if is_own(cron_job, policy) && !wanted(cron_job.name()) {
            actions.push(Action::delete_workload(cron_job));
        }
    }
    if let Some(follower) = jobs::follower(policy, &options.settings)? {
        let event = PlannedEvent {
            warning: false,
            reason: "FollowerApplied".to_owned(),
            action: "Apply",
            text: format!(
                "applied the Deployment {}, which takes delta snapshots continuously",
                follower.name_any()
            ),
        };
        actions.extend(apply(&follower, policy, &facts.followers, event)?);
    } else {
        let surplus = facts.followers.iter().filter(|f| is_own(f, policy));
        actions.extend(surplus.map(|follower| Action::delete_workload(follower)));
    }
    Ok(actions)
}

/// Returns the actions that suspend all CronJobs of a policy and stop its follower, and change nothing else.
pub fn stop_all(policy: &EtcdBackupPolicy, facts: &Facts) -> Vec<Action> {
    let mut actions = Vec::new();
    for cron_job in &facts.cron_jobs {
        if is_own(cron_job, policy) && cron_job.is_active {
            let suspend = json!({"spec": {"suspend": true}});
            actions.push(Action::change(cron_job, suspend));
        }
    }
    for follower in &facts.followers {
        if is_own(follower, policy) && follower.is_active {
            let stop = json!({"spec": {"replicas": 0}});
            actions.push(Action::change(follower, stop));
        }
    }
    actions
}

fn is_own<K>(workload: &Workload<K>, policy: &EtcdBackupPolicy) -> bool {
    workload.is_owned_by(policy.metadata.uid.as_deref())
}

fn cron_job_event(cron_job: &CronJob) -> PlannedEvent {
    let suspended = match cron_job.spec.suspend {
        Some(true) => " and is suspended",
        _ => "",
    };
    PlannedEvent {
        warning: false,
        reason: "CronJobApplied".to_owned(),
        action: "Apply",
        text: format!(
            "applied the CronJob {}, which has the schedule \"{}\"{suspended}",
            cron_job.name_any(),
            cron_job.spec.schedule
        ),
    }
}
