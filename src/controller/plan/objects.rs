//! The permanent objects of a policy: CronJobs, the follower's Deployment, Leases and the Jobs'
//! ServiceAccount.
//!
//! Pure: compares the wanted objects with those that exist, and returns what to write. Plans no Jobs. Called
//! by `plan`.

use super::conditions::Problem;
use super::{Action, Options, PlannedEvent};
use crate::base::hash::short_hash;
use crate::controller::api::EtcdBackupPolicy;
use crate::controller::jobs;
use crate::controller::names::APPLIED_HASH;
use crate::controller::observe::{Observed, PackedObject, WATCH_DELAY};
use chrono::{DateTime, Utc};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::CronJob;
use kube::core::ApiResource;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// The desired state of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// The kind of the object.
    pub resource: ApiResource,
    /// The name of the object.
    pub name: String,
    /// The whole object, with the annotation [`APPLIED_HASH`].
    pub object: Value,
    /// The hash of the object without that annotation.
    pub hash: String,
    /// The UID of the policy that owns the object.
    pub owner: String,
    /// The UID of the existing object, if the policy owns it and a watch has reported it.
    pub there: Option<String>,
}

impl Desired {
    fn new<K: Resource<DynamicType = ()> + Serialize>(
        object: &K,
        policy: &EtcdBackupPolicy,
    ) -> Self {
        // Serializing these types cannot fail.
        let mut json = serde_json::to_value(object).unwrap_or_default();
        json["apiVersion"] = K::api_version(&()).into();
        json["kind"] = K::kind(&()).into();
        let hash = short_hash(json.to_string(), 8);
        json["metadata"]["annotations"][APPLIED_HASH] = hash.clone().into();
        Desired {
            resource: ApiResource::erase::<K>(&()),
            name: object.name_any(),
            object: json,
            hash,
            owner: policy.uid().unwrap_or_default(),
            there: None,
        }
    }

    /// Returns the action that applies the object; `None` if the existing one is as it should be.
    fn action(
        mut self,
        observed: &Observed,
        existing: &[Arc<PackedObject>],
        event: PlannedEvent,
        now: DateTime<Utc>,
    ) -> Option<Action> {
        let existing = existing.iter().find(|made| made.key.1 == self.name);
        if self.is_applied(observed, existing.map(|made| &**made), now) {
            return None;
        }
        let own = existing.filter(|made| made.owner.as_ref() == Some(&self.owner));
        self.there = own.and_then(|made| made.uid.clone());
        Some(Action::Apply(Box::new(self), event))
    }

    /// Whether the existing object is as it should be.
    fn is_applied(
        &self,
        observed: &Observed,
        existing: Option<&PackedObject>,
        now: DateTime<Utc>,
    ) -> bool {
        let id = (self.resource.kind.clone(), self.name.clone());
        let written = observed.applied.get(&id);
        let Some(existing) = existing else {
            // The watch may not have reported what was just written.
            return written
                .is_some_and(|w| w.hash == self.hash && (now - w.at).abs() < WATCH_DELAY);
        };
        if existing.hash.as_ref() != Some(&self.hash) {
            // The watch may report an older generation than the one that was written.
            let written = written.filter(|w| w.generation > existing.generation);
            return written.is_some_and(|w| w.hash == self.hash);
        }
        match written.filter(|w| w.uid == existing.uid) {
            // A newer generation than ours means that somebody else has changed the object.
            Some(written) => {
                written.generation.is_none() || existing.generation <= written.generation
            }
            // Written by an earlier controller: somebody may have changed the object since.
            None => existing.contains_all(&self.object),
        }
    }
}

/// Returns the actions that make all objects of a policy as its spec says.
///
/// If the policy has a problem, CronJobs are suspended, the follower has no replica, and nothing is deleted.
pub fn apply_all(
    policy: &EtcdBackupPolicy,
    observed: &Observed,
    options: &Options,
    problem: Option<&Problem>,
    is_backed_up: bool,
    now: DateTime<Utc>,
) -> Vec<Action> {
    let mut effective = policy.clone();
    effective.spec.suspend |= problem.is_some();
    let policy = &effective;
    let mut actions = Vec::new();
    if options.namespaces.is_empty() && !observed.has_account {
        actions.push(Action::MakeAccount);
    }
    // A Lease only has to exist: the Jobs write it.
    let leases = jobs::leases(policy)
        .into_iter()
        .chain(jobs::lock_leases(policy));
    for lease in leases {
        if !observed.leases.contains(&lease.name_any()) {
            actions.push(Action::CreateLease(Box::new(lease)));
        }
    }

    let cron_jobs = jobs::cron_jobs(policy, &options.settings, !is_backed_up);
    let mut cron_job_names = Vec::new();
    for cron_job in &cron_jobs {
        let desired = Desired::new(cron_job, policy);
        cron_job_names.push(desired.name.clone());
        let event = cron_job_event(cron_job);
        actions.extend(desired.action(observed, &observed.cron_jobs, event, now));
    }
    let follower = jobs::follower(policy, &options.settings);
    if let Some(follower) = &follower {
        let desired = Desired::new(follower, policy);
        let event = PlannedEvent {
            warning: false,
            reason: "FollowerApplied".to_owned(),
            action: "Apply",
            text: format!(
                "applied the Deployment {}, which takes delta snapshots continuously",
                desired.name
            ),
        };
        actions.extend(desired.action(observed, &observed.followers, event, now));
    }
    if problem.is_some() {
        return actions;
    }
    for cron_job in &observed.cron_jobs {
        if is_owned_by(cron_job, policy) && !cron_job_names.contains(&cron_job.key.1) {
            actions.push(Action::delete_made::<CronJob>(cron_job));
        }
    }
    if follower.is_none() {
        let surplus = observed.followers.iter().filter(|f| is_owned_by(f, policy));
        actions.extend(surplus.map(|f| Action::delete_made::<Deployment>(f)));
    }
    actions
}

/// Returns the actions that suspend all CronJobs of a policy and stop its follower, and change nothing else.
pub fn stop_all(policy: &EtcdBackupPolicy, observed: &Observed) -> Vec<Action> {
    let mut actions = Vec::new();
    for cron_job in &observed.cron_jobs {
        if is_owned_by(cron_job, policy) && cron_job.is_active {
            let suspend = json!({"spec": {"suspend": true}});
            actions.push(Action::change::<CronJob>(cron_job, suspend));
        }
    }
    for follower in &observed.followers {
        if is_owned_by(follower, policy) && follower.is_active {
            let stop = json!({"spec": {"replicas": 0}});
            actions.push(Action::change::<Deployment>(follower, stop));
        }
    }
    actions
}

fn is_owned_by(made: &PackedObject, policy: &EtcdBackupPolicy) -> bool {
    made.owner.is_some() && made.owner == policy.uid()
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
