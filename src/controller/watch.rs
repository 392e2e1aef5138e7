//! The watches: what changed is put into a cache, and those whom it concerns are queued.
//!
//! Nothing is decided and nothing written here. A watch that ends begins again by itself, from where it was
//! or with a new list.

use super::api::{EtcdBackupPolicy, EtcdBackupTask};
use super::context::{Context, Writers, label};
use super::{jobs, secrets, turns};
use crate::error::{Error, Result};
use futures::stream::{Stream, StreamExt};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::core::{NamespaceResourceScope, PartialObjectMeta};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::{self, Event, watcher};
use kube::runtime::{WatchStreamExt, reflector};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;

/// Of a Service's EndpointSlices.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// Runs all watches; they do not end.
pub(super) async fn all(ctx: &Arc<Context>, writers: Writers) -> Result<()> {
    let ours =
        || watcher::Config::default().labels(&format!("{}={}", jobs::LABEL_MANAGED_BY, jobs::NAME));
    let any = watcher::Config::default;
    let policies = run(
        ctx,
        watcher(api::<EtcdBackupPolicy>(ctx), any()),
        writers.policies,
        |ctx, policy: &EtcdBackupPolicy, _| {
            let this = ObjectRef::from_obj(policy);
            ctx.look_at_policy(this.clone());
            ctx.look_at_thresholds(this);
            // It may have been waited for; and another one may have its store's prefix now.
            for other in ctx.caches.policies.state() {
                // It may have been somewhere else before.
                if super::policy::in_one_place(&other, policy) || super::policy::gives_way(&other) {
                    ctx.look_at_policy(ObjectRef::from_obj(&*other));
                }
            }
            let namespace = policy.namespace().unwrap_or_default();
            for task in ctx.caches.tasks_of(&namespace, &policy.name_any()) {
                ctx.look_at_task(ObjectRef::from_obj(&*task));
            }
            for name in secrets::names_of(policy) {
                ctx.look_at_secret(ObjectRef::new(&name).within(&namespace));
            }
            // Another one may have been used before.
            let held = ctx.caches.secrets.state_filter(|secret| {
                secret.namespace().as_deref() == Some(&*namespace) && secrets::is_held(secret)
            });
            for secret in held {
                ctx.look_at_secret(ObjectRef::from_obj(&*secret));
            }
        },
    );
    let tasks = run(
        ctx,
        watcher(api::<EtcdBackupTask>(ctx), any()),
        writers.tasks,
        |ctx, task: &EtcdBackupTask, _| {
            ctx.look_at_task(ObjectRef::from_obj(task));
            let namespace = task.namespace().unwrap_or_default();
            // Those behind it move up.
            for other in ctx.caches.tasks_of(&namespace, &task.spec.policy) {
                ctx.look_at_task(ObjectRef::from_obj(&*other));
            }
            for name in secrets::names_of_task(task) {
                ctx.look_at_secret(ObjectRef::new(&name).within(&namespace));
            }
        },
    );
    let jobs = run(
        ctx,
        watcher(api::<Job>(ctx), ours()),
        writers.jobs,
        |ctx, job: &Job, _| {
            turns::call_next(ctx);
            of_policy(ctx, job);
            // A compaction may wait for this one.
            if turns::is_of_threshold(job) {
                look_at_tasks(ctx, job);
            }
        },
    );
    let cron_jobs = run(
        ctx,
        watcher(api::<CronJob>(ctx), ours()),
        writers.cron_jobs,
        |ctx, cron_job: &CronJob, _| {
            if let Some(policy) = policy_of(cron_job) {
                ctx.look_at_policy(policy);
            }
        },
    );
    let deployments = run(
        ctx,
        watcher(api::<Deployment>(ctx), ours()),
        writers.deployments,
        |ctx, deployment: &Deployment, _| {
            if let Some(policy) = policy_of(deployment) {
                ctx.look_at_policy(policy);
            }
        },
    );
    let pods = watcher(api::<Pod>(ctx), ours()).modify(|pod| pod.spec = None);
    let pods = run(ctx, pods, writers.pods, |ctx, pod: &Pod, _| {
        of_policy(ctx, pod);
        // The next task waits for it, even where its own one is gone.
        if label(pod, jobs::LABEL_TASK).is_some() {
            look_at_tasks(ctx, pod);
        }
    });
    let leases = watcher(api::<Lease>(ctx), any()).filter(|event| {
        let concerns = match event {
            Ok(Event::Apply(lease) | Event::InitApply(lease)) => lease_prefix(lease).is_some(),
            // Locks, too, are missed once they are gone.
            _ => true,
        };
        std::future::ready(concerns)
    });
    let leases = run(
        ctx,
        leases,
        writers.leases,
        |ctx, lease: &Lease, is_gone| {
            if is_gone {
                let (namespace, name) = (lease.namespace().unwrap_or_default(), lease.name_any());
                ctx.forget_lease(&namespace, &name);
                ctx.forget_created("Lease", &namespace, &name);
                if let Some(policy) = policy_of(lease) {
                    ctx.look_at_policy(policy);
                }
            } else if !ctx.saw_lease(lease) {
                return;
            }
            for policy in policies_of_lease(ctx, lease) {
                ctx.look_at_policy(policy.clone());
                ctx.look_at_thresholds(policy);
            }
        },
    );
    let secrets = run(
        ctx,
        watcher(api::<PartialObjectMeta<Secret>>(ctx), any()),
        writers.secrets,
        |ctx, secret: &PartialObjectMeta<Secret>, _| {
            ctx.look_at_secret(ObjectRef::from_obj(secret));
            let namespace = secret.namespace().unwrap_or_default();
            let name = secret.name_any();
            for policy in ctx.caches.policies.state() {
                if policy.namespace().as_deref() == Some(&namespace)
                    && secrets::names_of(&policy).contains(&name)
                {
                    let policy = ObjectRef::from_obj(&*policy);
                    ctx.look_at_policy(policy.clone());
                    ctx.look_at_thresholds(policy.clone());
                    for task in ctx.caches.tasks_of(&namespace, &policy.name) {
                        ctx.look_at_task(ObjectRef::from_obj(&*task));
                    }
                }
            }
            for task in ctx.caches.tasks.state() {
                if task.namespace().as_deref() == Some(&namespace)
                    && secrets::names_of_task(&task).contains(&name)
                {
                    ctx.look_at_task(ObjectRef::from_obj(&*task));
                }
            }
        },
    );
    let slices = watcher(api::<EndpointSlice>(ctx), any());
    let mut slices_of: BTreeMap<_, BTreeMap<String, bool>> = BTreeMap::new();
    let slices = run(
        ctx,
        slices,
        writers.slices,
        move |ctx, slice: &EndpointSlice, is_gone| {
            let Some(service) = label(slice, SERVICE_NAME) else {
                return;
            };
            let service = (slice.namespace().unwrap_or_default(), service.to_owned());
            let slices = slices_of.entry(service.clone()).or_default();
            let is_known = !slices.is_empty();
            let was_ready = slices.values().any(|ready| *ready);
            match is_gone {
                true => slices.remove(&slice.name_any()),
                false => slices.insert(slice.name_any(), is_ready(slice)),
            };
            // One that was ready when it was first seen has not come back.
            let is_ready = slices.values().any(|ready| *ready);
            if !is_known || was_ready || !is_ready {
                return;
            }
            for policy in ctx.caches.policies.state() {
                if !services(&policy).contains(&service) {
                    continue;
                }
                let policy = ObjectRef::from_obj(&*policy);
                ctx.note_recovery(&policy);
                ctx.look_at_thresholds(policy);
            }
        },
    );
    tokio::join!(
        policies,
        tasks,
        jobs,
        cron_jobs,
        deployments,
        pods,
        leases,
        secrets,
        slices
    );
    Err(Error::internal("the watches have ended"))
}

/// Of the namespace that is looked after, or of all.
fn api<K>(ctx: &Context) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope>,
    K::DynamicType: Default,
{
    match ctx.options.namespaces.first() {
        Some(namespace) => Api::namespaced(ctx.client(), namespace),
        None => Api::all(ctx.client()),
    }
}

/// Keeps a cache up to date, and tells of each change once it is in there, and whether the object is gone.
async fn run<K>(
    ctx: &Arc<Context>,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
    writer: Writer<K>,
    mut changed: impl FnMut(&Context, &K, bool),
) where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Default + Debug + Eq + Hash + Clone + Unpin + Send + Sync,
{
    let kind = K::kind(&K::DynamicType::default()).into_owned();
    let cache = writer.as_reader();
    let events = events
        .default_backoff()
        .modify(|object| object.managed_fields_mut().clear());
    let mut events = std::pin::pin!(reflector::reflector(writer, events));
    let mut failing = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(object)) => changed(ctx, &object, false),
            Ok(Event::Delete(object)) => changed(ctx, &object, true),
            // A new list may lack what was there before: all look again.
            Ok(Event::InitDone) => {
                for object in cache.state() {
                    changed(ctx, &object, false);
                }
                for policy in ctx.caches.policies.state() {
                    let policy = ObjectRef::from_obj(&*policy);
                    ctx.look_at_policy(policy.clone());
                    ctx.look_at_thresholds(policy);
                }
                for task in ctx.caches.tasks.state() {
                    ctx.look_at_task(ObjectRef::from_obj(&*task));
                }
            }
            Ok(Event::Init | Event::InitApply(_)) => {}
            Err(e) => {
                // A watch that comes to its end is nothing; one that cannot begin is.
                match failing {
                    false => tracing::warn!(kind, "watching failed, trying again: {e}"),
                    true => tracing::debug!(kind, "watching failed, trying again: {e}"),
                }
                failing = true;
                continue;
            }
        }
        failing = false;
    }
}

/// The policy that an object of ours belongs to.
fn policy_of<K>(object: &K) -> Option<ObjectRef<EtcdBackupPolicy>>
where
    K: Resource,
{
    let policy = label(object, jobs::LABEL_POLICY)?;
    Some(ObjectRef::new(policy).within(object.meta().namespace.as_deref().unwrap_or_default()))
}

/// A Job or a Pod of ours has changed.
fn of_policy<K: Resource>(ctx: &Context, object: &K) {
    if let Some(policy) = policy_of(object) {
        ctx.look_at_policy(policy.clone());
        ctx.look_at_thresholds(policy);
    }
    if let Some(task) = label(object, jobs::LABEL_TASK) {
        let namespace = object.meta().namespace.as_deref().unwrap_or_default();
        ctx.look_at_task(ObjectRef::new(task).within(namespace));
    }
}

/// Has all tasks of an object's policy looked at.
fn look_at_tasks<K: Resource>(ctx: &Context, object: &K) {
    if let Some(policy) = policy_of(object) {
        let namespace = policy.namespace.unwrap_or_default();
        for task in ctx.caches.tasks_of(&namespace, &policy.name) {
            ctx.look_at_task(ObjectRef::from_obj(&*task));
        }
    }
}

/// What comes before the suffix in a snapshot Lease's name.
fn lease_prefix(lease: &Lease) -> Option<&str> {
    let name = lease.metadata.name.as_deref()?;
    name.strip_suffix(jobs::FULL_LEASE_SUFFIX)
        .or_else(|| name.strip_suffix(jobs::DELTA_LEASE_SUFFIX))
}

fn policies_of_lease(ctx: &Context, lease: &Lease) -> Vec<ObjectRef<EtcdBackupPolicy>> {
    let namespace = lease.namespace();
    let Some(prefix) = lease_prefix(lease) else {
        return Vec::new();
    };
    let of_it = |policy: &EtcdBackupPolicy| {
        policy.namespace() == namespace && jobs::lease_prefix(policy) == prefix
    };
    let policies = ctx.caches.policies.state_filter(of_it);
    policies.iter().map(|p| ObjectRef::from_obj(&**p)).collect()
}

fn is_ready(slice: &EndpointSlice) -> bool {
    let mut conditions = slice
        .endpoints
        .iter()
        .flatten()
        .map(|e| e.conditions.as_ref());
    // Not told counts as ready.
    conditions.any(|c| c.and_then(|c| c.ready).unwrap_or(true))
}

/// The Services that a policy's endpoints name, by namespace and name.
fn services(policy: &EtcdBackupPolicy) -> BTreeSet<(String, String)> {
    let own = policy.namespace().unwrap_or_default();
    let endpoints = policy.spec.etcd.iter().flat_map(|etcd| &etcd.endpoints);
    endpoints
        .filter_map(|endpoint| service(endpoint, &own))
        .collect()
}

fn service(endpoint: &str, own_namespace: &str) -> Option<(String, String)> {
    let host = endpoint.split("://").last()?.split(['/', ':']).next()?;
    if host.is_empty() || host.parse::<std::net::IpAddr>().is_ok() {
        return None;
    }
    let parts: Vec<&str> = host.split('.').collect();
    let found = match parts.iter().position(|p| *p == "svc") {
        // SERVICE.NAMESPACE.svc, or POD.SERVICE.NAMESPACE.svc of a headless one.
        Some(at) if at >= 2 => (parts[at - 1], parts[at - 2]),
        Some(_) => return None,
        None => match parts.as_slice() {
            [service] => (own_namespace, *service),
            [service, namespace] => (*namespace, *service),
            _ => return None,
        },
    };
    Some((found.0.to_owned(), found.1.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_names_its_service() {
        let found = |endpoint: &str| service(endpoint, "own");
        let named = |namespace: &str, name: &str| Some((namespace.to_owned(), name.to_owned()));
        assert_eq!(found("https://etcd:2379"), named("own", "etcd"));
        assert_eq!(found("https://etcd.kube:2379"), named("kube", "etcd"));
        assert_eq!(found("http://etcd.kube.svc:2379"), named("kube", "etcd"));
        assert_eq!(
            found("https://etcd-0.etcd-peer.kube.svc.cluster.local:2379"),
            named("kube", "etcd-peer")
        );
        for none in [
            "http://127.0.0.1:2379",
            "https://svc",
            "https://a.b.example.com:2379",
            "",
        ] {
            assert_eq!(found(none), None, "{none}");
        }
    }
}
