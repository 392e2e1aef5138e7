//! The only room that writes: actions, statuses and Events, to the API server.
//!
//! It decides nothing. Nothing is taken over from anybody else: what is there and does not belong to the policy is
//! left, and the refusal is told. A write is refused if this replica leads no more. The loop in `controller` calls
//! it with a plan.

mod events;

pub use events::Events;

use super::api::{EtcdBackupPolicy, EtcdBackupPolicyStatus, EtcdBackupTask, EtcdBackupTaskStatus};
use super::jobs;
use super::names::{Key, key, label, owner};
use super::observe::threshold_jobs::Start;
use super::observe::{Applied, Observed, Refusal, Tried, World};
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

/// The owner of what is written.
const MANAGER: &str = "deltafold-policy";
/// For one answer of the API.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why something was not written. It is tried again, with fresh state.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The API refused, or did not answer.
    #[error("cannot {what}: {said}")]
    Api {
        /// What was asked.
        what: String,
        /// What it said.
        said: String,
        /// The HTTP status, if there was an answer.
        code: Option<u16>,
    },
    /// It is there already, and somebody else's.
    #[error("{0}")]
    Taken(String),
    /// Another replica may lead by now: nothing was written.
    #[error("this replica leads no more")]
    NotLeading,
}

impl Failure {
    fn code(&self) -> Option<u16> {
        match self {
            Failure::Api { code, .. } => *code,
            _ => None,
        }
    }

    /// Somebody else wrote meanwhile.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// Whether the API server has surely not done it.
    fn is_answered(&self) -> bool {
        self.code().is_some() || matches!(self, Failure::NotLeading | Failure::Taken(_))
    }

    /// What is to be told of it: not taken as it is, by its fields, a quota, a webhook or a right.
    fn refusal(&self, reason: &'static str) -> Option<Refusal> {
        let message = self.to_string();
        match self {
            Failure::Taken(_) => Some(Refusal {
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

/// What became of an attempt.
#[derive(Debug)]
pub struct Done {
    /// For the next look.
    pub tried: Tried,
    /// The Event that tells of it.
    pub note: Option<PlannedEvent>,
    /// Why it was not done.
    pub failure: Option<Failure>,
    /// A Job that the API server has surely not made.
    pub not_made: Option<Key>,
}

/// The API server, as long as this replica leads.
pub struct Writer {
    client: kube::Client,
    leads: Option<Box<dyn Fn() -> bool + Send + Sync>>,
}

impl Writer {
    /// Writes with this client, as long as `leads` says so.
    pub fn new(client: kube::Client, leads: Option<Box<dyn Fn() -> bool + Send + Sync>>) -> Self {
        Writer { client, leads }
    }

    /// Whether writes are allowed.
    pub fn leads(&self) -> bool {
        self.leads.as_ref().is_none_or(|leads| leads())
    }

    fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn of(&self, resource: &ApiResource, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, resource)
    }

    /// Does one thing that was planned.
    pub async fn act(&self, action: &Action, observed: &Observed, world: &World) -> Done {
        let what = action.description();
        let mut done = Done {
            tried: Tried {
                what: what.clone(),
                refusal: None,
            },
            note: None,
            failure: None,
            not_made: None,
        };
        let namespace = &observed.key.0;
        let mut reason = "ApplyRefused";
        let result = match action {
            Action::MakeAccount => self.make_account(namespace, world).await.map(|()| None),
            // One that is there stays as it is: etcd-druid's are used.
            Action::CreateLease(lease) => self.create(&**lease, namespace).await.map(|_| None),
            Action::CreateJob { job, start, event } => {
                reason = "JobRefused";
                let made = self.create_job(job, start.as_ref(), observed, world).await;
                if made.as_ref().is_err_and(Failure::is_answered) {
                    done.not_made = Some(key(&**job));
                }
                made.map(|is_new| is_new.then(|| event.clone()))
            }
            Action::Apply(desired, note) => {
                let applied = self.apply(desired, observed, world).await;
                applied.map(|()| Some(note.clone()))
            }
            Action::Change(resource, name, part) => {
                let params = PatchParams {
                    field_manager: Some(MANAGER.to_owned()),
                    ..PatchParams::default()
                };
                let api = self.of(resource, namespace);
                let patch = Patch::Merge(part);
                match self.write(&what, api.patch(name, &params, &patch)).await {
                    // What is gone needs no change.
                    Err(e) if e.code() == Some(404) => Ok(None),
                    written => written.map(|_| None),
                }
            }
            Action::Delete(resource, name, uid) => self
                .delete(&what, resource, namespace, name, uid.clone())
                .await
                .map(|()| None),
        };
        match result {
            Ok(note) => done.note = note,
            Err(failure) => {
                done.tried.refusal = failure.refusal(reason);
                done.failure = Some(failure);
            }
        }
        done
    }

    /// Asks for something that is written, and does not wait for an answer without end.
    async fn write<T>(
        &self,
        what: &str,
        asked: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Failure> {
        if !self.leads() {
            return Err(Failure::NotLeading);
        }
        let written = answered(what, asked).await?;
        tracing::info!("did {what}");
        Ok(written)
    }

    /// Creates an object and gives it; `None` if there is one of that name already.
    async fn create<K>(&self, object: &K, namespace: &str) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K: Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let api = self.api::<K>(namespace);
        let params = PostParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PostParams::default()
        };
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let what = format!("create {kind} {namespace}/{}", object.name_any());
        let failure = match self.write(&what, api.create(&params, object)).await {
            Ok(made) => return Ok(Some(made)),
            Err(failure) => failure,
        };
        match &failure {
            Failure::Api { said, .. }
                if failure.is_conflict() && said.contains("already exists") =>
            {
                Ok(None)
            }
            _ => Err(failure),
        }
    }

    async fn get<K>(&self, name: &str, namespace: &str) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let api = self.api::<K>(namespace);
        answered(
            &format!("read {kind} {namespace}/{name}"),
            api.get_opt(name),
        )
        .await
    }

    /// The service account of a namespace's Jobs, and what binds it to their rights.
    async fn make_account(&self, namespace: &str, world: &World) -> Result<(), Failure> {
        let (account, binding) = jobs::account(namespace);
        self.make_ours(&account, namespace).await?;
        let bound = self.make_ours(&binding, namespace).await?;
        // As that of a policy of 0.1 with the name `jobs`, until the cleanup.
        if bound.is_some_and(|there| there.role_ref != binding.role_ref) {
            return Err(taken("RoleBinding", namespace, jobs::ACCOUNT));
        }
        world.has_account(namespace);
        Ok(())
    }

    /// Creates an object that belongs to no policy; gives the one that is there and ours.
    async fn make_ours<K>(&self, object: &K, namespace: &str) -> Result<Option<K>, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K: Clone + Serialize + DeserializeOwned + Debug,
        K::DynamicType: Default,
    {
        let name = object.name_any();
        match self.get::<K>(&name, namespace).await? {
            Some(there) if label(&there, jobs::LABEL_NAME) == Some(jobs::NAME) => Ok(Some(there)),
            Some(_) => {
                let kind = K::kind(&K::DynamicType::default()).into_owned();
                Err(taken(&kind, namespace, &name))
            }
            None => self.create(object, namespace).await,
        }
    }

    /// Creates a Job; says whether it is new.
    async fn create_job(
        &self,
        job: &Job,
        start: Option<&Start>,
        observed: &Observed,
        world: &World,
    ) -> Result<bool, Failure> {
        let this = &observed.key;
        if start.is_some() {
            world.unanswered(this, start.cloned());
        }
        let made = match self.create(job, &this.0).await {
            // It is there already: the write that told of it was lost; or it is somebody else's.
            Ok(None) => match self.get::<Job>(&job.name_any(), &this.0).await {
                Ok(Some(there)) if owner(&there) == owner(job) => Ok(Some((there, false))),
                Ok(Some(_)) => Err(taken("Job", &this.0, &job.name_any())),
                Ok(None) => Ok(None),
                Err(failure) => Err(failure),
            },
            Ok(Some(made)) => Ok(Some((made, true))),
            Err(failure) => Err(failure),
        };
        let is_answered = made.as_ref().map_or_else(Failure::is_answered, |_| true);
        if start.is_some() && is_answered {
            world.unanswered(this, None);
        }
        let Some((made, is_new)) = made? else {
            return Ok(false);
        };
        world.made(this, made, Utc::now());
        if start.is_some() {
            world.forget_recovery(this);
        }
        Ok(is_new)
    }

    /// Has an object be as it should be, by server-side apply.
    async fn apply(
        &self,
        desired: &Desired,
        observed: &Observed,
        world: &World,
    ) -> Result<(), Failure> {
        let namespace = &observed.key.0;
        let kind = &desired.resource.kind;
        let name = &desired.name;
        let what = format!("apply {kind} {namespace}/{name}");
        let api = self.of(&desired.resource, namespace);
        let mut uid = desired.there.clone();
        if uid.is_none() {
            // One that no watch has told of may be somebody else's.
            let read = format!("read {kind} {namespace}/{name}");
            if let Some(there) = answered(&read, api.get_opt(name)).await? {
                if owner(&there) != Some(desired.owner.as_str()) {
                    return Err(taken(kind, namespace, name));
                }
                uid = there.uid();
            }
        }
        let mut object = desired.object.clone();
        let mut params = PatchParams::apply(MANAGER);
        params.force = uid.is_some();
        if let Some(uid) = uid {
            // Not of another one by that name.
            object["metadata"]["uid"] = uid.into();
        }
        let patch = Patch::Apply(&object);
        let written = self.write(&what, api.patch(name, &params, &patch)).await?;
        let applied = Applied {
            hash: desired.hash.clone(),
            uid: written.uid(),
            generation: written.metadata.generation,
            at: Utc::now(),
        };
        world.applied(&observed.key, (kind.clone(), name.clone()), applied);
        Ok(())
    }

    /// Deletes an object, what it owns after it. That it is gone, or another one by that name, is no failure.
    async fn delete(
        &self,
        what: &str,
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
        let api = self.of(resource, namespace);
        match self.write(what, api.delete(name, &params)).await {
            Err(e) if matches!(e.code(), Some(404 | 409)) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Writes what is another one in an object's status: all of it is ours. By a merge, because versions before this one
    /// had several owners of its parts, and what one of those owns as well would stay.
    async fn write_status<K>(&self, object: &K, old: Value, new: Value) -> Result<K, Failure>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + DeserializeOwned + Debug,
    {
        let (namespace, name) = key(object);
        let what = format!("write the status of {} {namespace}/{name}", K::kind(&()));
        let patch = json!({
            // One that was deleted and made again is another one.
            "metadata": {"uid": object.uid()},
            "status": changes(&old, new),
        });
        let params = PatchParams {
            field_manager: Some(MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let api = self.api::<K>(&namespace);
        let patch = Patch::Merge(&patch);
        self.write(&what, api.patch_status(&name, &params, &patch))
            .await
    }

    /// Writes the status of a policy.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub async fn write_policy_status(
        &self,
        policy: &EtcdBackupPolicy,
        status: &EtcdBackupPolicyStatus,
        world: &World,
    ) -> Result<(), Failure> {
        let old = json_of(&policy.status);
        let written = self.write_status(policy, old, json_of(status)).await?;
        world.wrote_status(&written, status);
        Ok(())
    }

    /// Writes the status of a task.
    ///
    /// # Errors
    /// `Api`, `NotLeading`.
    pub async fn write_task_status(
        &self,
        task: &EtcdBackupTask,
        status: &EtcdBackupTaskStatus,
        world: &World,
    ) -> Result<(), Failure> {
        let old = json_of(&task.status);
        let written = self.write_status(task, old, json_of(status)).await?;
        world.wrote_task(&written, status);
        Ok(())
    }
}

/// The merge patch (RFC 7386) that makes `new` of `old`.
fn changes(old: &Value, new: Value) -> Value {
    let (old, mut new) = match (old, new) {
        (Value::Object(old), Value::Object(new)) => (old, new),
        (_, new) => return new,
    };
    for (field, before) in old {
        match new.remove(field) {
            None => new.insert(field.clone(), Value::Null),
            Some(now) if now == *before => None,
            Some(now) => new.insert(field.clone(), changes(before, now)),
        };
    }
    Value::Object(new)
}

/// What the API server answers, which is not waited for without end.
async fn answered<T>(
    what: &str,
    asked: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Failure> {
    let failure = |said: String, code| Failure::Api {
        what: what.to_owned(),
        said,
        code,
    };
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(kube::Error::Api(status))) => {
            Err(failure(status.message.clone(), Some(status.code)))
        }
        Ok(Err(e)) => Err(failure(causes(&e), None)),
        Err(_) => {
            let said = format!("no answer within {} s", PATIENCE.as_secs());
            Err(failure(said, None))
        }
    }
}

fn taken(kind: &str, namespace: &str, name: &str) -> Failure {
    Failure::Taken(format!(
        "{kind} {namespace}/{name} is there and is somebody else's: delete it, or give the policy or task another name"
    ))
}

/// A status is always JSON.
fn json_of<S: Serialize>(status: &S) -> Value {
    serde_json::to_value(status).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_takes_away_what_is_no_more() {
        let old = json!({"a": 1, "b": {"c": 2, "d": 3}, "e": [1, 2], "f": "x"});
        let new = json!({"a": 1, "b": {"c": 4}, "e": [2], "g": {"h": 5}});
        let patch = json!({"b": {"c": 4, "d": null}, "e": [2], "f": null, "g": {"h": 5}});
        assert_eq!(changes(&old, new.clone()), patch);
        assert_eq!(changes(&Value::Null, new.clone()), new);
        assert_eq!(changes(&new, new.clone()), json!({}));
    }
}
