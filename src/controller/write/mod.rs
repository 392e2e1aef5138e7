//! The only module that writes to the API server: actions of a decision, statuses and Events.
//!
//! It decides nothing. An object of the same name that belongs to somebody else is left as it is, and the
//! action counts as refused. It writes only while this replica is the leader.

mod events;

pub use events::Events;

use super::decide::{Action, Desired};
use super::facts::Refusal;
use super::facts::start::Silent;
use super::jobs;
use super::names::{NamespacedName, label, owner};
use crate::base::causes::causes;
use crate::error::Error;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Event;
use kube::api::{
    DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy,
};
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

/// Why a write failed. The controller retries with new facts.
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
    /// An object of this name is being deleted.
    #[error("{0} is being deleted")]
    BeingDeleted(String),
    /// Nothing was written, because another replica may be the leader by now.
    #[error("this replica is not the leader any more")]
    NotLeading,
    /// Nothing could be decided.
    #[error(transparent)]
    Internal(#[from] Error),
}

impl Failure {
    fn code(&self) -> Option<u16> {
        match self {
            Failure::Api { code, .. } => *code,
            _ => None,
        }
    }

    /// Returns whether another client wrote to the object at the same time, or before the cache showed it.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// Returns whether the failure is a normal event: a conflict, or a namespace that is being deleted.
    pub fn is_expected(&self) -> bool {
        match self {
            Failure::Api { .. } => self.is_conflict() || self.is_of_terminating_namespace(),
            Failure::BeingDeleted(_) => true,
            Failure::NameTaken(_) | Failure::NotLeading | Failure::Internal(_) => false,
        }
    }

    fn is_of_terminating_namespace(&self) -> bool {
        matches!(self, Failure::Api { cause, .. } if cause.contains("because it is being terminated"))
    }

    /// Returns whether the request certainly had no effect. Without a response, or with that of a server that gave up, it
    /// may have had one.
    pub fn had_no_effect(&self) -> bool {
        match self {
            Failure::Api { code, .. } => code.is_some_and(|code| code < 500),
            _ => true,
        }
    }

    /// Returns the refusal to report to the user, if the API server refused the object for its fields, a
    /// quota, a webhook or missing permissions, or if its name is taken.
    pub fn refusal(&self, action: &Action) -> Option<Refusal> {
        let reason = match (self, action) {
            // Its objects go with it: nothing is to be reported there.
            _ if self.is_of_terminating_namespace() => return None,
            (Failure::NameTaken(_), _) => "NameTaken",
            (Failure::BeingDeleted(_), Action::CreateJob { .. }) => "JobRefused",
            (Failure::Api { code, .. }, _) if !matches!(code, Some(400 | 403 | 422)) => {
                return None;
            }
            (Failure::Api { .. }, Action::CreateJob { .. }) => "JobRefused",
            (Failure::Api { .. }, _) => "ApplyRefused",
            _ => return None,
        };
        Some(Refusal {
            reason,
            message: self.to_string(),
            is_final: self.code() == Some(422),
        })
    }
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

    /// Carries out an action for a policy, except the creation of a Job. Returns whether it may have changed something.
    ///
    /// # Errors
    /// `Api` if the request fails, `NameTaken` if the object belongs to somebody else, `NotLeading` if this replica is not
    /// the leader any more.
    pub async fn act(&self, action: &Action, policy: &NamespacedName) -> Result<bool, Failure> {
        let request = action.description();
        let namespace = &policy.namespace;
        match action {
            Action::MakeAccount => self.make_account(namespace).await?,
            Action::CreateLease(lease) => {
                // A Lease that exists is used as it is: etcd-druid may have created it.
                self.create(&**lease).await?;
            }
            Action::CreateJob { job, .. } => return Ok(self.create_job(job).await?.1),
            Action::Apply(desired, _) => self.apply(desired, namespace).await?,
            Action::Change(resource, name, part) => {
                let api = self.dynamic_api(resource, namespace);
                let (params, patch) = (patch_params(), Patch::Merge(part));
                match self.write(&request, api.patch(name, &params, &patch)).await {
                    // An object that is gone needs no change.
                    Err(e) if e.code() == Some(404) => {}
                    patched => _ = patched?,
                }
            }
            Action::Delete(resource, name, uid) => {
                let api = self.dynamic_api(resource, namespace);
                self.delete(&request, &api, name, uid.clone()).await?;
            }
        }
        Ok(true)
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
    async fn create<K>(&self, object: &K) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K: Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let name = NamespacedName::of(object);
        let api = self.api::<K>(&name.namespace);
        let params = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        let request = format!("create {} {name}", kind::<K>());
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

    /// Returns the object of this name; `None` if there is none.
    ///
    /// # Errors
    /// `Api` if the request fails.
    pub async fn get<K>(&self, name: &NamespacedName) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let api = self.api::<K>(&name.namespace);
        let request = format!("read {} {name}", kind::<K>());
        with_timeout(&request, api.get_opt(&name.name)).await
    }

    /// Returns the newest Warning of Kubernetes about an object: its reason and message.
    ///
    /// # Errors
    /// `Api` if the request fails.
    pub async fn newest_warning(
        &self,
        namespace: &str,
        about: &Silent,
    ) -> Result<Option<String>, Failure> {
        let (kind, name) = (about.kind, &about.name);
        let fields = format!("involvedObject.kind={kind},involvedObject.name={name},type=Warning");
        let params = ListParams::default().fields(&fields).limit(50);
        let api = self.api::<Event>(namespace);
        let request = format!("list the Events of {kind} {namespace}/{name}");
        let events = match with_timeout(&request, api.list(&params)).await {
            // A controller without this right reports the other causes all the same.
            Err(failure) if failure.code() == Some(403) => return Ok(None),
            events => events?,
        };
        let newest = events.items.into_iter().max_by_key(|event| {
            let last = event.last_timestamp.as_ref().map(|t| t.0);
            last.max(event.event_time.as_ref().map(|t| t.0))
        });
        Ok(newest.map(|event| {
            let (reason, message) = (event.reason, event.message);
            format!(
                "{}: {}",
                reason.unwrap_or_default(),
                message.unwrap_or_default()
            )
        }))
    }

    /// Creates the Jobs' ServiceAccount of a namespace and its RoleBinding, if they do not exist.
    async fn make_account(&self, namespace: &str) -> Result<(), Failure> {
        let (account, binding) = jobs::account(namespace);
        self.get_or_create(&account).await?;
        let existing = self.get_or_create(&binding).await?;
        if existing.is_some_and(|existing| existing.role_ref != binding.role_ref) {
            let name = NamespacedName::of(&binding);
            return Err(name_taken("RoleBinding", &name));
        }
        Ok(())
    }

    /// Returns the object of this name, or creates it. Fails with `NameTaken` if the existing one is not
    /// deltafold's. Returns `None` if another client creates it at the same time.
    async fn get_or_create<K>(&self, object: &K) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K: Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let name = NamespacedName::of(object);
        match self.get::<K>(&name).await? {
            Some(object) if label(&object, jobs::LABEL_NAME) == Some(jobs::NAME) => {
                Ok(Some(object))
            }
            Some(_) => Err(name_taken(&kind::<K>(), &name)),
            None => self.create(object).await,
        }
    }

    /// Creates a Job. Returns the Job, and whether it is new: a Job of this name with the same owner is not an error,
    /// because an earlier request may have created it without a response.
    ///
    /// # Errors
    /// `Api` if the request fails, `NameTaken` if a Job of this name belongs to somebody else, `BeingDeleted` if it is being
    /// deleted, `NotLeading` if this replica is not the leader any more.
    pub async fn create_job(&self, job: &Job) -> Result<(Job, bool), Failure> {
        if let Some(created) = self.create(job).await? {
            return Ok((created, true));
        }
        let name = NamespacedName::of(job);
        match self.get::<Job>(&name).await? {
            Some(existing) if owner(&existing) != owner(job) => Err(name_taken("Job", &name)),
            Some(existing) if existing.metadata.deletion_timestamp.is_none() => {
                Ok((existing, false))
            }
            _ => Err(Failure::BeingDeleted(format!("Job {name}"))),
        }
    }

    /// Applies an object by server-side apply.
    async fn apply(&self, desired: &Desired, namespace: &str) -> Result<(), Failure> {
        let kind = &desired.resource.kind;
        let name = NamespacedName::new(namespace, &desired.name);
        let api = self.dynamic_api(&desired.resource, namespace);
        let mut uid = desired.existing.clone();
        if uid.is_none() {
            // An object that no watch has reported may belong to somebody else.
            let read = format!("read {kind} {name}");
            if let Some(existing) = with_timeout(&read, api.get_opt(&name.name)).await? {
                if owner(&existing) != Some(desired.owner.as_str()) {
                    return Err(name_taken(kind, &name));
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
        let request = format!("apply {kind} {name}");
        self.write(&request, api.patch(&name.name, &params, &patch))
            .await?;
        Ok(())
    }

    /// Deletes an object; Kubernetes deletes what it owns afterwards. It is not a failure if the object is
    /// gone, or if another object has its name.
    async fn delete(
        &self,
        request: &str,
        api: &Api<DynamicObject>,
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
        match self.write(request, api.delete(name, &params)).await {
            Err(e) if matches!(e.code(), Some(404 | 409)) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Writes the changed fields of an object's status, as a merge patch. The API server refuses it if the object is not
    /// the version that the status was decided for.
    ///
    /// # Errors
    /// `Api` if the request fails, `NotLeading` if this replica is not the leader any more, `Internal` if a status
    /// cannot be written as JSON.
    pub async fn write_status<K, S>(
        &self,
        object: &K,
        old: &Option<S>,
        new: &S,
    ) -> Result<(), Failure>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + DeserializeOwned + Debug,
        S: Serialize,
    {
        let name = NamespacedName::of(object);
        let patch = json!({
            "metadata": {"uid": object.uid(), "resourceVersion": object.resource_version()},
            "status": status_patch(old, new)?,
        });
        let request = format!("write the status of {} {name}", K::kind(&()));
        let api = self.api::<K>(&name.namespace);
        let (params, patch) = (patch_params(), Patch::Merge(&patch));
        self.write(&request, api.patch_status(&name.name, &params, &patch))
            .await?;
        Ok(())
    }
}

fn kind<K: Resource>() -> String
where
    K::DynamicType: Default,
{
    K::kind(&K::DynamicType::default()).into_owned()
}

fn patch_params() -> PatchParams {
    PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

/// Returns the merge patch of a status.
///
/// # Errors
/// `Internal` if a status cannot be written as JSON: an empty one in its place would delete what is recorded.
fn status_patch<S: Serialize>(old: &Option<S>, new: &S) -> Result<Value, Error> {
    let failed = |e| Error::internal(format!("a status cannot be written as JSON: {e}"));
    let old = serde_json::to_value(old).map_err(failed)?;
    let new = serde_json::to_value(new).map_err(failed)?;
    Ok(merge_patch(&old, new))
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
        Err(_) => (
            format!("no response within {} s", API_TIMEOUT.as_secs()),
            None,
        ),
    };
    Err(Failure::Api {
        request: request.to_owned(),
        cause,
        code,
    })
}

fn name_taken(kind: &str, name: &NamespacedName) -> Failure {
    Failure::NameTaken(format!(
        "{kind} {name} exists and belongs to somebody else: delete it, or give the policy or task another name"
    ))
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

    #[test]
    fn a_status_that_cannot_be_written_as_json_is_no_empty_one() {
        struct Unwritable;
        impl Serialize for Unwritable {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(serde::ser::Error::custom("no JSON"))
            }
        }
        let e = status_patch(&None, &Unwritable).unwrap_err();
        assert!(e.to_string().contains("no JSON"), "{e}");
        let e = status_patch(&Some(Unwritable), &Unwritable).unwrap_err();
        assert!(e.to_string().contains("no JSON"), "{e}");
    }
}
