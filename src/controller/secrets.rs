//! Secrets that are used carry a finalizer: deleted by mistake, they stay until nothing needs them.
//!
//! It looks at names alone, never into a Secret. Run for each Secret that changes, and for those of a policy
//! that changes.

use super::api::{EtcdBackupPolicy, EtcdBackupTask};
use super::jobs::{self, FINALIZER};
use super::{Context, Failure};
use k8s_openapi::api::core::v1::Secret;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The Secrets that a policy refers to.
pub(super) fn names_of(policy: &EtcdBackupPolicy) -> BTreeSet<String> {
    let referenced = jobs::secrets_of(policy).into_iter();
    referenced.map(|r| r.name).collect()
}

/// The Secrets that a task refers to.
pub(super) fn names_of_task(task: &EtcdBackupTask) -> BTreeSet<String> {
    let referenced = jobs::secrets_of_task(task).into_iter();
    referenced.map(|r| r.name).collect()
}

/// Whether a Secret carries the finalizer.
pub(super) fn is_held(secret: &PartialObjectMeta<Secret>) -> bool {
    secret.finalizers().iter().any(|f| f == FINALIZER)
}

pub(super) async fn reconcile(
    secret: Arc<PartialObjectMeta<Secret>>,
    ctx: Arc<Context>,
) -> Result<Action, Failure> {
    let namespace = secret.namespace().unwrap_or_default();
    let name = secret.name_any();
    let has = is_held(&secret);
    let is_going = secret.meta().deletion_timestamp.is_some();
    let is_used = is_used(&ctx, &namespace, &name);
    let wanted: Vec<&str> = match (is_used, has) {
        // Of one that is being deleted no finalizer may be added.
        (true, false) if !is_going => secret
            .finalizers()
            .iter()
            .map(String::as_str)
            .chain([FINALIZER])
            .collect(),
        (false, true) => secret
            .finalizers()
            .iter()
            .map(String::as_str)
            .filter(|f| *f != FINALIZER)
            .collect(),
        _ => return Ok(Action::await_change()),
    };
    // Whoever changed it meanwhile is not undone: the version makes that a conflict.
    let metadata = json!({
        "finalizers": wanted,
        "resourceVersion": secret.resource_version(),
    });
    let written = ctx
        .patch_metadata::<Secret>(&namespace, &name, metadata)
        .await;
    match written {
        Err(Failure::Api {
            code: Some(404), ..
        }) => {}
        other => other?,
    }
    tracing::info!(namespace, name, is_used, "wrote the finalizer of a Secret");
    Ok(Action::await_change())
}

fn is_used(ctx: &Context, namespace: &str, name: &str) -> bool {
    let policies = ctx.caches.policies.state();
    let by_policy = policies.iter().any(|policy| {
        policy.namespace().as_deref() == Some(namespace)
            && policy.metadata.deletion_timestamp.is_none()
            && names_of(policy).contains(name)
    });
    let is_under_way =
        |task: &EtcdBackupTask| !task.status.clone().unwrap_or_default().state.is_final();
    by_policy
        || ctx.caches.tasks.state().iter().any(|task| {
            task.namespace().as_deref() == Some(namespace)
                && task.metadata.deletion_timestamp.is_none()
                && is_under_way(task)
                && names_of_task(task).contains(name)
        })
}
