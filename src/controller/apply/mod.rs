//! The only module that writes to the API server: actions of a plan, statuses and Events.
//!
//! It decides nothing. An object of the same name that belongs to somebody else is left as it is, and the
//! action counts as refused. It writes only while this replica is the leader. Called by the loop in
//! `controller` with a plan.

mod events;

pub use events::Events;

use super::api::{EtcdBackupPolicy, EtcdBackupPolicyStatus, EtcdBackupTask, EtcdBackupTaskStatus};
use super::jobs;
use super::names::{Key, key, label, owner};
use super::observe::threshold_jobs::ThresholdStart;
use super::observe::{AppliedObject, AttemptedAction, ClusterState, Observed, Refusal};
use super::plan::{Action, Desired, PlannedEvent};
use crate::base::causes::causes;
use chrono::Utc;
use k8s_openapi::api::batch::v1::Job;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy};
use kube::core::{ApiResource, DynamicObject, NamespaceResourceScope};
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;
use std::time::Duration;

/// The field manager of all writes.
const FIELD_MANAGER: &str = "deltafold-policy";
/// The timeout of a request.
const API_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a write failed. The controller retries with a new observation.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The API server refused the request or did not respond.
    #[error("cannot {request}: {cause}")]
    Api {
        /// The request, as in "cannot {request}".
        request: String,
        /// The message of the API server, or the error of the connection.
        cause: String,
        /// The HTTP status of the response, if there was one.
        code: Option<u16>,
    },
    /// An object of this name exists and belongs to somebody else.
    #[error("{0}")]
    NameTaken(String),
    /// Nothing was written, because another replica may be the leader by now.
    #[error("this replica is not the leader any more")]
    NotLeading,
}

impl Failure {
    fn code(&self) -> Option<u16> {
        match self {
            Failure::Api { code, .. } => *code,
            _ => None,
        }
    }

    /// Returns whether another client wrote to the object at the same time.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// Returns whether the request certainly had no effect. Without a response it may have had one.
    fn is_refused(&self) -> bool {
        self.code().is_some() || matches!(self, Failure::NotLeading | Failure::NameTaken(_))
    }

    /// Returns the refusal to report to the user, if the API server refused the object for its fields, a
    /// quota, a webhook or missing permissions, or if its name is taken.
    fn refusal(&self, reason: &'static str) -> Option<Refusal> {
        let message = self.to_string();
        match self {
            Failure::NameTaken(_) => Some(Refusal {
                reason: "NameTaken",
                message,
                is_final: false,
            }),
            _ => matches!(self.code(), Some(400 | 403 | 422)).then(|| Refusal {
                reason,
                message,
                is_final: self.code() == Some(422),
            }),
        }
    }
}

/// The result of an action.
#[derive(Debug)]
pub struct ActionResult {
    /// The action and its refusal, for the next observation.
    pub attempt: AttemptedAction,
    /// The Event to publish, if the action changed something.
    pub event: Option<PlannedEvent>,
    /// Why the action failed.
    pub failure: Option<Failure>,
    /// The Job of the action, if the API server certainly did not create it.
    pub uncreated_job: Option<Key>,
}

/// A client that writes only while this replica is the leader.
pub struct Writer {
    client: kube::Client,
    is_leader: Option<Box<dyn Fn() -> bool + Send + Sync>>,
}

impl Writer {
    /// Returns a writer that writes while `is_leader` returns true; always, if it is `None`.
    pub fn new(
        client: kube::Client,
        is_leader: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    ) -> Self {
        Writer { client, is_leader }
    }

    /// Returns whether this replica is the leader, and may write.
    pub fn leads(&self) -> bool {
        self.is_leader.as_ref().is_none_or(|is_leader| is_leader())
    }

    fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn dynamic_api(&self, resource: &ApiResource, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, resource)
    }

    /// Carries out an action of a plan, and records it in `cluster`.
    pub async fn act(
        &self,
        action: &Action,
        observed: &Observed,
        cluster: &ClusterState,
    ) -> ActionResult {
        let mut result = ActionResult {
            attempt: AttemptedAction {
                action: action.description(),
                refusal: None,
            },
            event: None,
            failure: None,
            uncreated_job: None,
        };
        match self.carry_out(action, observed, cluster).await {
            Ok(event) => result.event = event,
            Err(failure) => {
                let mut reason = "ApplyRefused";
                if let Action::CreateJob { job, .. } = action {
                    reason = "JobRefused";
                    result.uncreated_job = failure.is_refused().then(|| key(&**job));
                }
                result.attempt.refusal = failure.refusal(reason);
                result.failure = Some(failure);
            }
        }
        result
    }

    /// Carries out an action; returns the Event to publish.
    async fn carry_out(
        &self,
        action: &Action,
        observed: &Observed,
        cluster: &ClusterState,
    ) -> Result<Option<PlannedEvent>, Failure> {
        let request = action.description();
        let namespace = &observed.key.0;
        match action {
            Action::MakeAccount => {
                self.make_account(namespace, cluster).await?;
                Ok(None)
            }
            Action::CreateLease(lease) => {
                // A Lease that exists is used as it is: etcd-druid may have created it.
                self.create(&**lease, namespace).await?;
                Ok(None)
            }
            Action::CreateJob { job, start, event } => {
                let is_new = self.create_job(job, start.as_ref(), observed, cluster);
                Ok(is_new.await?.then(|| event.clone()))
            }
            Action::Apply(desired, event) => {
                self.apply(desired, observed, cluster).await?;
                Ok(Some(event.clone()))
            }
            Action::Change(resource, name, part) => {
                let api = self.dynamic_api(resource, namespace);
                let (params, patch) = (patch_params(), Patch::Merge(part));
                match self.write(&request, api.patch(name, &params, &patch)).await {
                    // An object that is gone needs no change.
                    Err(e) if e.code() == Some(404) => Ok(None),
                    patched => patched.map(|_| None),
                }
            }
            Action::Delete(resource, name, uid) => {
                self.delete(&request, resource, namespace, name, uid.clone())
                    .await?;
                Ok(None)
            }
        }
    }

    /// Sends a request that writes, if this replica is the leader.
    async fn write<T>(
        &self,
        request: &str,
        response: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Failure> {
        if !self.leads() {
            return Err(Failure::NotLeading);
        }
        let written = with_timeout(request, response).await?;
        tracing::info!("done: {request}");
        Ok(written)
    }

    /// Creates an object and returns it, or `None` if one of that name exists.
    async fn create<K>(&self, object: &K, namespace: &str) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K: Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let api = self.api::<K>(namespace);
        let params = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let request = format!("create {kind} {namespace}/{}", object.name_any());
        match self.write(&request, api.create(&params, object)).await {
            Ok(created) => Ok(Some(created)),
            Err(Failure::Api { cause, code, .. })
                if code == Some(409) && cause.contains("already exists") =>
            {
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    async fn get<K>(&self, name: &str, namespace: &str) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let api = self.api::<K>(namespace);
        let request = format!("read {kind} {namespace}/{name}");
        with_timeout(&request, api.get_opt(name)).await
    }

    /// Creates the Jobs' ServiceAccount of a namespace and its RoleBinding, if they do not exist.
    async fn make_account(&self, namespace: &str, cluster: &ClusterState) -> Result<(), Failure> {
        let (account, binding) = jobs::account(namespace);
        self.get_or_create(&account, namespace).await?;
        let existing = self.get_or_create(&binding, namespace).await?;
        if existing.is_some_and(|existing| existing.role_ref != binding.role_ref) {
            return Err(name_taken("RoleBinding", namespace, jobs::JOBS_ACCOUNT));
        }
        cluster.has_account(namespace);
        Ok(())
    }

    /// Returns the object of this name, or creates it. Fails with `NameTaken` if the existing one is not
    /// deltafold's. Returns `None` if another client creates it at the same time.
    async fn get_or_create<K>(&self, object: &K, namespace: &str) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K: Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let name = object.name_any();
        match self.get::<K>(&name, namespace).await? {
            Some(object) if label(&object, jobs::LABEL_NAME) == Some(jobs::NAME) => {
                Ok(Some(object))
            }
            Some(_) => {
                let kind = K::kind(&K::DynamicType::default()).into_owned();
                Err(name_taken(&kind, namespace, &name))
            }
            None => self.create(object, namespace).await,
        }
    }

    /// Creates a Job; returns whether it is new. A Job of this name with the same owner is not an error: an
    /// earlier request may have created it without a response.
    async fn create_job(
        &self,
        job: &Job,
        start: Option<&ThresholdStart>,
        observed: &Observed,
        cluster: &ClusterState,
    ) -> Result<bool, Failure> {
        let policy = &observed.key;
        if start.is_some() {
            cluster.set_unconfirmed_start(policy, start.cloned());
        }
        let created = self.create_or_get_job(job, &policy.0).await;
        let is_answered = created.as_ref().map_or_else(Failure::is_refused, |_| true);
        if start.is_some() && is_answered {
            cluster.set_unconfirmed_start(policy, None);
        }
        let Some((created, is_new)) = created? else {
            return Ok(false);
        };
        cluster.job_created(policy, created, Utc::now());
        if start.is_some() {
            cluster.forget_recovery(policy);
        }
        Ok(is_new)
    }

    /// Returns the Job and whether it is new; `None` if it existed and was deleted meanwhile.
    async fn create_or_get_job(
        &self,
        job: &Job,
        namespace: &str,
    ) -> Result<Option<(Job, bool)>, Failure> {
        if let Some(created) = self.create(job, namespace).await? {
            return Ok(Some((created, true)));
        }
        let name = job.name_any();
        match self.get::<Job>(&name, namespace).await? {
            Some(existing) if owner(&existing) == owner(job) => Ok(Some((existing, false))),
            Some(_) => Err(name_taken("Job", namespace, &name)),
            None => Ok(None),
        }
    }

    /// Applies an object by server-side apply.
    async fn apply(
        &self,
        desired: &Desired,
        observed: &Observed,
        cluster: &ClusterState,
    ) -> Result<(), Failure> {
        let namespace = &observed.key.0;
        let kind = &desired.resource.kind;
        let name = &desired.name;
        let request = format!("apply {kind} {namespace}/{name}");
        let api = self.dynamic_api(&desired.resource, namespace);
        let mut uid = desired.there.clone();
        if uid.is_none() {
            // An object that no watch has reported may belong to somebody else.
            let read = format!("read {kind} {namespace}/{name}");
            if let Some(existing) = with_timeout(&read, api.get_opt(name)).await? {
                if owner(&existing) != Some(desired.owner.as_str()) {
                    return Err(name_taken(kind, namespace, name));
                }
                uid = existing.uid();
            }
        }
        let mut object = desired.object.clone();
        let mut params = PatchParams::apply(FIELD_MANAGER);
        params.force = uid.is_some();
        if let Some(uid) = uid {
            // With the UID, the API server refuses to change another object of the same name.
            object["metadata"]["uid"] = uid.into();
        }
        let patch = Patch::Apply(&object);
        let written = self
            .write(&request, api.patch(name, &params, &patch))
            .await?;
        let applied = AppliedObject {
            hash: desired.hash.clone(),
            uid: written.uid(),
            generation: written.metadata.generation,
            at: Utc::now(),
        };
        cluster.object_applied(&observed.key, (kind.clone(), name.clone()), applied);
        Ok(())
    }

    /// Deletes an object; Kubernetes deletes what it owns afterwards. It is not a failure if the object is
    /// gone, or if another object has its name.
    async fn delete(
        &self,
        request: &str,
        resource: &ApiResource,
        namespace: &str,
        name: &str,
        uid: Option<String>,
    ) -> Result<(), Failure> {
        let params = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Background),
            preconditions: Some(Preconditions {
                uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        let api = self.dynamic_api(resource, namespace);
        match self.write(request, api.delete(name, &params)).await {
            Err(e) if matches!(e.code(), Some(404 | 409)) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Writes the changed fields of an object's status, as a merge patch.
    async fn write_status<K>(&self, object: &K, old: Value, new: Value) -> Result<K, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + DeserializeOwned + Debug,
    {
        let (namespace, name) = key(object);
        let kind = K::kind(&());
        let request = format!("write the status of {kind} {namespace}/{name}");
        let patch = json!({
            // With the UID, the API server refuses to change another object of the same name.
            "metadata": {"uid": object.uid()},
            "status": merge_patch(&old, new),
        });
        let api = self.api::<K>(&namespace);
        let (params, patch) = (patch_params(), Patch::Merge(&patch));
        self.write(&request, api.patch_status(&name, &params, &patch))
            .await
    }

    /// Writes the status of a policy.
    ///
    /// # Errors
    /// `Api` if the request fails, `NotLeading` if this replica is not the leader any more.
    pub async fn write_policy_status(
        &self,
        policy: &EtcdBackupPolicy,
        status: &EtcdBackupPolicyStatus,
        cluster: &ClusterState,
    ) -> Result<(), Failure> {
        let old = to_json(&policy.status);
        let written = self.write_status(policy, old, to_json(status)).await?;
        cluster.policy_status_written(&written, status);
        Ok(())
    }

    /// Writes the status of a task.
    ///
    /// # Errors
    /// `Api` if the request fails, `NotLeading` if this replica is not the leader any more.
    pub async fn write_task_status(
        &self,
        task: &EtcdBackupTask,
        status: &EtcdBackupTaskStatus,
        cluster: &ClusterState,
    ) -> Result<(), Failure> {
        let old = to_json(&task.status);
        let written = self.write_status(task, old, to_json(status)).await?;
        cluster.task_status_written(&written, status);
        Ok(())
    }
}

fn patch_params() -> PatchParams {
    PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

/// Returns the merge patch (RFC 7386) that turns `old` into `new`.
fn merge_patch(old: &Value, new: Value) -> Value {
    let (old, mut new) = match (old, new) {
        (Value::Object(old), Value::Object(new)) => (old, new),
        (_, new) => return new,
    };
    for (field, before) in old {
        match new.remove(field) {
            None => new.insert(field.clone(), Value::Null),
            Some(now) if now == *before => None,
            Some(now) => new.insert(field.clone(), merge_patch(before, now)),
        };
    }
    Value::Object(new)
}

/// Returns the response of the API server, or a failure if there is none in time.
async fn with_timeout<T>(
    request: &str,
    response: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Failure> {
    let (cause, code) = match tokio::time::timeout(API_TIMEOUT, response).await {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(kube::Error::Api(status))) => (status.message.clone(), Some(status.code)),
        Ok(Err(e)) => (causes(&e), None),
        Err(_) => (timeout_text(), None),
    };
    Err(Failure::Api {
        request: request.to_owned(),
        cause,
        code,
    })
}

fn timeout_text() -> String {
    format!("no response within {} s", API_TIMEOUT.as_secs())
}

fn name_taken(kind: &str, namespace: &str, name: &str) -> Failure {
    Failure::NameTaken(format!(
        "{kind} {namespace}/{name} exists and belongs to somebody else: delete it, or give the policy or task another name"
    ))
}

/// Returns a status as JSON. The conversion cannot fail.
fn to_json<S: Serialize>(status: &S) -> Value {
    serde_json::to_value(status).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_merge_patch_deletes_missing_fields() {
        let old = json!({"a": 1, "b": {"c": 2, "d": 3}, "e": [1, 2], "f": "x"});
        let new = json!({"a": 1, "b": {"c": 4}, "e": [2], "g": {"h": 5}});
        let patch = json!({"b": {"c": 4, "d": null}, "e": [2], "f": null, "g": {"h": 5}});
        assert_eq!(merge_patch(&old, new.clone()), patch);
        assert_eq!(merge_patch(&Value::Null, new.clone()), new);
        assert_eq!(merge_patch(&new, new.clone()), json!({}));
    }
}
