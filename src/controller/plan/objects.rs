//! The objects of a policy that are there all the time: CronJobs, the follower, Leases, the Jobs' account.
//!
//! Pure: what is wanted, beside what is there, gives what is to be written. `plan` calls it.

use super::conditions::Problem;
use super::{Action, Note, Options};
use crate::base::hash::short_hash;
use crate::controller::api::EtcdBackupPolicy;
use crate::controller::jobs;
use crate::controller::names::HASH;
use crate::controller::observe::{Observed, PackedObject, WATCH_DELAY};
use chrono::{DateTime, Utc};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::CronJob;
use kube::core::ApiResource;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// An object as it should be.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// What it is.
    pub resource: ApiResource,
    /// Its name.
    pub name: String,
    /// The whole of it, with the annotation [`HASH`].
    pub object: Value,
    /// Of what it is made.
    pub hash: String,
    /// The UID of the policy that it belongs to.
    pub owner: String,
    /// The UID of the one that is there and belongs to that policy, if a watch has told of it.
    pub there: Option<String>,
}

impl Desired {
    fn of<K: Resource<DynamicType = ()> + Serialize>(
        object: &K,
        policy: &EtcdBackupPolicy,
    ) -> Self {
        // Of these types it is always JSON.
        let mut json = serde_json::to_value(object).unwrap_or_default();
        json["apiVersion"] = K::api_version(&()).into();
        json["kind"] = K::kind(&()).into();
        let hash = short_hash(json.to_string(), 8);
        json["metadata"]["annotations"][HASH] = hash.clone().into();
        Desired {
            resource: ApiResource::erase::<K>(&()),
            name: object.name_any(),
            object: json,
            hash,
            owner: policy.uid().unwrap_or_default(),
            there: None,
        }
    }

    /// The action that makes it so, if what is there is not as it should be.
    fn action(
        mut self,
        observed: &Observed,
        made: &[Arc<PackedObject>],
        note: Note,
        now: DateTime<Utc>,
    ) -> Option<Action> {
        let there = made.iter().find(|made| made.key.1 == self.name);
        if self.is_so(observed, there.map(|t| &**t), now) {
            return None;
        }
        let own = there.filter(|t| t.owner.as_ref() == Some(&self.owner));
        self.there = own.and_then(|t| t.uid.clone());
        Some(Action::Apply(Box::new(self), note))
    }

    /// Whether what is there is as it should be.
    fn is_so(&self, observed: &Observed, there: Option<&PackedObject>, now: DateTime<Utc>) -> bool {
        let written = observed
            .applied
            .get(&(self.resource.kind.clone(), self.name.clone()));
        let Some(there) = there else {
            // The watch may not have told of it yet.
            return written
                .is_some_and(|w| w.hash == self.hash && (now - w.at).abs() < WATCH_DELAY);
        };
        if there.hash.as_ref() != Some(&self.hash) {
            let lags = |w: &&super::AppliedObject| w.generation > there.generation;
            return written.filter(lags).is_some_and(|w| w.hash == self.hash);
        }
        match written.filter(|w| w.uid == there.uid) {
            // Somebody else has changed what we wrote where its generation is another one.
            Some(written) => written.generation.is_none() || there.generation <= written.generation,
            // Nobody may have looked meanwhile.
            None => there.contains_all(&self.object),
        }
    }
}

/// What is to be done so that all objects of a policy are as it says. Of one with a problem nothing goes on by
/// schedules, and nothing is deleted.
pub fn of_policy(
    policy: &EtcdBackupPolicy,
    observed: &Observed,
    options: &Options,
    problem: Option<&Problem>,
    is_backed_up: bool,
    now: DateTime<Utc>,
) -> Vec<Action> {
    let mut acted_on = policy.clone();
    acted_on.spec.suspend |= problem.is_some();
    let policy = &acted_on;
    let mut actions = Vec::new();
    if options.namespaces.is_empty() && !observed.has_account {
        actions.push(Action::MakeAccount);
    }
    let leases = jobs::leases(policy)
        .into_iter()
        .chain(jobs::lock_leases(policy));
    let missing = leases.filter(|lease| !observed.leases.contains(&lease.name_any()));
    // Whoever saves snapshots writes it; it only has to be there.
    actions.extend(missing.map(|lease| Action::CreateLease(Box::new(lease))));

    let cron_jobs = jobs::cron_jobs(policy, &options.settings, !is_backed_up);
    let mut wanted = Vec::new();
    for cron_job in &cron_jobs {
        let desired = Desired::of(cron_job, policy);
        wanted.push(desired.name.clone());
        let note = cron_job_note(cron_job);
        actions.extend(desired.action(observed, &observed.cron_jobs, note, now));
    }
    let follower = jobs::follower(policy, &options.settings);
    if let Some(follower) = &follower {
        let desired = Desired::of(follower, policy);
        let note = Note {
            warning: false,
            reason: "FollowerApplied".to_owned(),
            action: "Apply",
            text: format!("Deployment {} follows the etcd", desired.name),
        };
        actions.extend(desired.action(observed, &observed.followers, note, now));
    }
    if problem.is_none() {
        let is_surplus =
            |made: &&Arc<PackedObject>| is_own(policy, made) && !wanted.contains(&made.key.1);
        let surplus = observed.cron_jobs.iter().filter(is_surplus);
        actions.extend(surplus.map(|c| Action::delete_made::<CronJob>(c)));
        if follower.is_none() {
            let surplus = observed.followers.iter().filter(|f| is_own(policy, f));
            actions.extend(surplus.map(|f| Action::delete_made::<Deployment>(f)));
        }
    }
    actions
}

/// What is to be done so that nothing goes on by schedules or as follower; all else of the objects stays as it was
/// when the policy was right.
pub fn stop(policy: &EtcdBackupPolicy, observed: &Observed) -> Vec<Action> {
    let run = |made: &[Arc<PackedObject>]| -> Vec<Arc<PackedObject>> {
        let run = made.iter().filter(|m| is_own(policy, m) && m.is_active);
        run.cloned().collect()
    };
    let cron_jobs = run(&observed.cron_jobs)
        .into_iter()
        .map(|made| Action::change::<CronJob>(&made, json!({"spec": {"suspend": true}})));
    let followers = run(&observed.followers)
        .into_iter()
        .map(|made| Action::change::<Deployment>(&made, json!({"spec": {"replicas": 0}})));
    cron_jobs.chain(followers).collect()
}

fn is_own(policy: &EtcdBackupPolicy, made: &PackedObject) -> bool {
    made.owner.is_some() && made.owner == policy.uid()
}

fn cron_job_note(cron_job: &CronJob) -> Note {
    let suspended = match cron_job.spec.suspend {
        Some(true) => ", suspended",
        _ => "",
    };
    Note {
        warning: false,
        reason: "CronJobApplied".to_owned(),
        action: "Apply",
        text: format!(
            "CronJob {} runs at \"{}\"{suspended}",
            cron_job.name_any(),
            cron_job.spec.schedule
        ),
    }
}
