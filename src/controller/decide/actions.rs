//! The writes that a decision may contain.
//!
//! Data only: `write` executes them.

use super::{Desired, PlannedEvent};
use crate::controller::cluster::Workload;
use crate::controller::jobs;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use kube::core::ApiResource;
use kube::{Resource, ResourceExt};
use serde_json::Value;

/// An object to write. Every action may be repeated without harm.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Create the ServiceAccount of the Jobs and its RoleBinding in the policy's namespace.
    MakeAccount,
    /// Create an empty Lease, if it does not exist.
    CreateLease(Box<Lease>),
    /// Create a Job.
    CreateJob {
        /// The Job.
        job: Box<Job>,
        /// The revisions since the last full, if a threshold starts the Job.
        revisions: Option<i64>,
        /// The Event to publish when the Job is created.
        event: PlannedEvent,
    },
    /// Apply an object, and publish this Event.
    Apply(Box<Desired>, PlannedEvent),
    /// Patch the object of this kind and name.
    Change(ApiResource, String, Value),
    /// Delete the object of this kind, name and UID.
    Delete(ApiResource, String, Option<String>),
}

impl Action {
    /// Describes the action. The actions of a decision have different descriptions.
    pub fn description(&self) -> String {
        match self {
            Action::MakeAccount => format!("make the ServiceAccount {}", jobs::JOBS_ACCOUNT),
            Action::CreateLease(lease) => format!("create Lease {}", lease.name_any()),
            Action::CreateJob { job, .. } => create_job_description(&job.name_any()),
            Action::Apply(desired, _) => {
                format!("apply {} {}", desired.resource.kind, desired.name)
            }
            Action::Change(resource, name, _) => format!("change {} {name}", resource.kind),
            Action::Delete(resource, name, _) => format!("delete {} {name}", resource.kind),
        }
    }

    pub(super) fn delete<K: Resource<DynamicType = ()>>(object: &K) -> Action {
        Action::Delete(
            ApiResource::erase::<K>(&()),
            object.name_any(),
            object.uid(),
        )
    }

    pub(super) fn delete_workload<K: Resource<DynamicType = ()>>(workload: &Workload<K>) -> Action {
        let resource = ApiResource::erase::<K>(&());
        let uid = workload.uid().map(str::to_owned);
        Action::Delete(resource, workload.name().to_owned(), uid)
    }

    pub(super) fn change<K: Resource<DynamicType = ()>>(
        workload: &Workload<K>,
        mut patch: Value,
    ) -> Action {
        // With the UID the API server refuses to change another object of the same name.
        patch["metadata"]["uid"] = workload.uid().into();
        Action::Change(
            ApiResource::erase::<K>(&()),
            workload.name().to_owned(),
            patch,
        )
    }
}

/// Describes the creation of a Job.
pub(super) fn create_job_description(job: &str) -> String {
    format!("create Job {job}")
}

/// Whether the description is that of an action for the policy's own objects: not the creation of a Job, and
/// no deletion.
pub(super) fn is_for_policy_objects(description: &str) -> bool {
    !description.starts_with("create Job ") && !description.starts_with("delete ")
}
