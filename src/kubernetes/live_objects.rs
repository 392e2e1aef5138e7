//! Objects of any kind of a live cluster: read by name, and written by server-side apply.

use super::{REQUEST_TIMEOUT, UserClient, failure, status, status_text, timed_out};
use crate::base::Cancel;
use crate::error::{Error, Result};
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use kube::core::GroupVersionKind;
use kube::discovery::Scope;
use kube::discovery::pinned_kind;
use kube::error::DiscoveryError;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use tokio::runtime::Handle;

/// The name of this program in `managedFields`.
const FIELD_MANAGER: &str = "deltafold";

/// The name of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectId {
    /// The API version.
    pub api_version: String,
    /// The kind.
    pub kind: String,
    /// The namespace; `None` if the kind has none.
    pub namespace: Option<String>,
    /// The name.
    pub name: String,
}

impl ObjectId {
    /// The group of the API version; empty for the core group.
    pub fn group(&self) -> &str {
        let version = self.api_version.split_once('/');
        version.map_or("", |(group, _)| group)
    }
}

/// What an API server answered.
#[derive(Debug)]
pub enum Answer<T> {
    /// It did what was asked.
    Done(T),
    /// There is no such object.
    Missing,
    /// It does not serve the kind.
    NotServed,
    /// It refuses, in its own words: rights, quotas, webhooks, and what is wrong with the object.
    Refused(String),
}

impl<T> Answer<T> {
    /// Turns what was done into something else.
    pub fn map<U>(self, turn: impl FnOnce(T) -> U) -> Answer<U> {
        match self {
            Answer::Done(done) => Answer::Done(turn(done)),
            Answer::Missing => Answer::Missing,
            Answer::NotServed => Answer::NotServed,
            Answer::Refused(why) => Answer::Refused(why),
        }
    }

    /// Goes on with what was done.
    fn and_then<U>(self, next: impl FnOnce(T) -> Result<Answer<U>>) -> Result<Answer<U>> {
        match self {
            Answer::Done(done) => next(done),
            Answer::Missing => Ok(Answer::Missing),
            Answer::NotServed => Ok(Answer::NotServed),
            Answer::Refused(why) => Ok(Answer::Refused(why)),
        }
    }
}

fn to_json(object: DynamicObject) -> Result<Answer<Map<String, Value>>> {
    match serde_json::to_value(object) {
        Ok(Value::Object(json)) => Ok(Answer::Done(json)),
        _ => Err(Error::internal(
            "an object of the API server is not one as JSON",
        )),
    }
}

/// The objects of a cluster. Its calls block, so they must not run on the threads of the runtime.
pub struct LiveObjects {
    client: UserClient,
    handle: Handle,
    cancel: Cancel,
    /// The kinds that are served.
    kinds: HashMap<(String, String), (ApiResource, Scope)>,
}

impl LiveObjects {
    /// Sends nothing yet.
    pub fn new(client: UserClient, handle: Handle, cancel: Cancel) -> Self {
        LiveObjects {
            client,
            handle,
            cancel,
            kinds: HashMap::new(),
        }
    }

    /// Returns the URL of the API server.
    pub fn server(&self) -> &str {
        self.client.server()
    }

    /// Reads an object, as JSON.
    ///
    /// # Errors
    /// `KubernetesUnreachable`, `Unauthenticated`, `Configuration`, `Terminated`.
    pub fn get(&mut self, id: &ObjectId) -> Result<Answer<Map<String, Value>>> {
        self.api(id)?
            .and_then(|api| self.ask("read", id, api.get(&id.name)))?
            .and_then(to_json)
    }

    /// Applies an object, and returns it as the server has it afterwards, or, with `is_dry_run`, would have it. Fields of other
    /// managers that it has are taken over.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn apply(
        &mut self,
        id: &ObjectId,
        object: &Map<String, Value>,
        is_dry_run: bool,
    ) -> Result<Answer<Map<String, Value>>> {
        let params = PatchParams {
            dry_run: is_dry_run,
            force: true,
            field_manager: Some(FIELD_MANAGER.to_owned()),
            field_validation: None,
        };
        self.patch(id, &params, &Patch::Apply(object))
    }

    /// Changes the fields of a merge patch.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn merge(&mut self, id: &ObjectId, patch: &Value) -> Result<Answer<Map<String, Value>>> {
        self.patch(id, &PatchParams::default(), &Patch::Merge(patch))
    }

    fn patch<P: Serialize + std::fmt::Debug>(
        &mut self,
        id: &ObjectId,
        params: &PatchParams,
        patch: &Patch<P>,
    ) -> Result<Answer<Map<String, Value>>> {
        self.api(id)?
            .and_then(|api| self.ask("apply", id, api.patch(&id.name, params, patch)))?
            .and_then(to_json)
    }

    /// Returns the API of an object's kind.
    fn api(&mut self, id: &ObjectId) -> Result<Answer<Api<DynamicObject>>> {
        let name = (id.api_version.clone(), id.kind.clone());
        let client = self.client.inner();
        if !self.kinds.contains_key(&name) {
            let version = id.api_version.as_str();
            let (group, version) = version.split_once('/').unwrap_or(("", version));
            let kind = GroupVersionKind::gvk(group, version, &id.kind);
            match self.ask("look up", id, pinned_kind(&client, &kind))? {
                Answer::Done((resource, can)) => {
                    self.kinds.insert(name.clone(), (resource, can.scope));
                }
                Answer::Refused(why) => return Ok(Answer::Refused(why)),
                Answer::Missing | Answer::NotServed => {}
            }
        }
        Ok(match (self.kinds.get(&name), &id.namespace) {
            (None, _) => Answer::NotServed,
            (Some((resource, Scope::Namespaced)), Some(namespace)) => {
                Answer::Done(Api::namespaced_with(client, namespace, resource))
            }
            (Some((resource, _)), _) => Answer::Done(Api::all_with(client, resource)),
        })
    }

    fn ask<T>(
        &self,
        operation: &str,
        id: &ObjectId,
        response: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<Answer<T>> {
        let is_read = operation == "read";
        let operation = format!("{operation} {} {} at {}", id.kind, id.name, self.server());
        let with_timeout = async { tokio::time::timeout(REQUEST_TIMEOUT, response).await };
        let e = match self.handle.block_on(self.cancel.or(with_timeout))? {
            Ok(Ok(done)) => return Ok(Answer::Done(done)),
            Ok(Err(e)) => e,
            Err(_) => return Err(timed_out(&operation)),
        };
        if matches!(&e, kube::Error::Discovery(DiscoveryError::MissingKind(_))) {
            return Ok(Answer::NotServed);
        }
        Ok(match status(&e) {
            // The server has no time, or does not know the user: the next object would fare the same.
            Some(s) if [401, 408, 429, 503, 504].contains(&s.code) => {
                return Err(failure(&operation, &e));
            }
            // A write into a namespace that does not exist is answered so, too, with the namespace as the detail.
            Some(s) if s.code == 404 && (is_read || s.details.is_none()) => Answer::Missing,
            Some(s) => Answer::Refused(status_text(s)),
            None => return Err(failure(&operation, &e)),
        })
    }
}
