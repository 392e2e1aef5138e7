//! The watches of the API server: each event goes into a table, and the policies that it affects are queued.
//!
//! Nothing is decided or written here. A watch that ends starts again by itself, from where it was or with a
//! new list. Called by the loop in `controller`.

use super::filters::{self, Change};
use super::table::Table;
use super::{ClusterState, PackedObject, Tables};
use crate::base::lock;
use crate::controller::api::{EtcdBackupPolicy, EtcdBackupTask};
use crate::controller::jobs;
use crate::controller::names::{Key, key, label};
use crate::error::{Error, Result};
use chrono::Utc;
use futures::future::{BoxFuture, join_all};
use futures::stream::StreamExt;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::core::NamespaceResourceScope;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Semaphore;

/// An annotation in which kubectl keeps a copy of the whole object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// The prefix of deltafold's annotations.
const ANNOTATION_PREFIX: &str = "deltafold.io/";
/// The number of watched kinds.
const KINDS: usize = 8;

/// Runs the watches on these namespaces, or on all namespaces if there are none. Calls `ready` once every
/// list has arrived, because a decision on half of the objects could be wrong. A named namespace that cannot
/// be listed delays only its own policies.
///
/// # Errors
/// `Internal` if the watches end, which they should never do.
pub async fn watch_all(
    cluster: &ClusterState,
    client: &kube::Client,
    namespaces: &[String],
    ready: impl FnOnce(),
) -> Result<()> {
    let named: BTreeSet<&str> = namespaces.iter().map(String::as_str).collect();
    let scopes: Vec<Option<&str>> = match named.is_empty() {
        true => vec![None],
        false => named.iter().map(|namespace| Some(*namespace)).collect(),
    };
    lock(&cluster.unlisted).extend(named.iter().map(|namespace| (*namespace).to_owned()));
    let first_lists = Semaphore::new(0);
    let listed_kinds: Vec<AtomicUsize> = scopes.iter().map(|_| AtomicUsize::new(0)).collect();
    let mut watches = Vec::new();
    for (scope, listed_kinds) in scopes.into_iter().zip(&listed_kinds) {
        let scope_watch = ScopeWatch {
            cluster,
            client,
            scope,
            listed_kinds,
            first_lists: &first_lists,
        };
        watches.extend(scope_watch.all_kinds());
    }
    let count = u32::try_from(watches.len()).unwrap_or(u32::MAX);
    let call_ready = async {
        // The semaphore is never closed, so this cannot fail.
        let _ = first_lists.acquire_many(count).await;
        ready();
    };
    tokio::join!(join_all(watches), call_ready);
    Err(Error::internal("the watches have ended"))
}

/// How the objects of a kind are stored, and which policies they affect.
struct WatchedKind<K, T> {
    /// Returns the part of an object that is stored; `None` if the controller does not need the object.
    keep: fn(K) -> Option<T>,
    table: fn(&mut Tables) -> &mut Table<T>,
    affected: fn(&mut Tables, &Key, &Change<'_, T>) -> Vec<Key>,
    /// Whether an affected policy may retry, because something that its Jobs need has come back.
    is_recovery: bool,
}

/// The watches on one namespace, or on all.
#[derive(Clone, Copy)]
struct ScopeWatch<'a> {
    cluster: &'a ClusterState,
    client: &'a kube::Client,
    /// The namespace; `None` for all.
    scope: Option<&'a str>,
    /// The number of kinds of this scope that have been listed.
    listed_kinds: &'a AtomicUsize,
    /// Gets a permit from each watch after its first list. In a named namespace, a failed list counts, too.
    first_lists: &'a Semaphore,
}

impl<'a> ScopeWatch<'a> {
    fn all_kinds(self) -> [BoxFuture<'a, ()>; KINDS] {
        let own_label = format!("{}={}", jobs::LABEL_MANAGED_BY, jobs::NAME);
        let own = || watcher::Config::default().labels(&own_label);
        let any = watcher::Config::default;
        let policies = WatchedKind {
            keep: kept_policy,
            table: |t| &mut t.policies,
            affected: |tables, _, change| filters::affected_by_policy(tables, change),
            is_recovery: false,
        };
        let tasks = WatchedKind {
            keep: |task: EtcdBackupTask| Some(task),
            table: |t| &mut t.tasks,
            affected: |_, _, change| filters::affected_by_task(change),
            is_recovery: false,
        };
        let jobs = WatchedKind {
            keep: |job: Job| Some(job),
            table: |t| &mut t.jobs,
            affected: |_, _, change| filters::affected_by_created(change),
            is_recovery: false,
        };
        let cron_jobs = WatchedKind {
            keep: |cron_job: CronJob| Some(PackedObject::cron_job(cron_job)),
            table: |t| &mut t.cron_jobs,
            affected: |_, _, change| PackedObject::affected(change),
            is_recovery: false,
        };
        let followers = WatchedKind {
            keep: |follower: Deployment| Some(PackedObject::follower(follower)),
            table: |t| &mut t.followers,
            affected: |_, _, change| PackedObject::affected(change),
            is_recovery: false,
        };
        let pods = WatchedKind {
            keep: kept_pod,
            table: |t| &mut t.pods,
            affected: |_, _, change| filters::affected_by_created(change),
            is_recovery: false,
        };
        let leases = WatchedKind {
            keep: kept_lease,
            table: |t| &mut t.leases,
            affected: lease_changed,
            is_recovery: false,
        };
        let slices = WatchedKind {
            keep: kept_slice,
            table: |t| &mut t.slices,
            affected: slice_changed,
            is_recovery: true,
        };
        [
            Box::pin(self.run(any(), policies)),
            Box::pin(self.run(any(), tasks)),
            Box::pin(self.run(own(), jobs)),
            Box::pin(self.run(own(), cron_jobs)),
            Box::pin(self.run(own(), followers)),
            Box::pin(self.run(own(), pods)),
            Box::pin(self.run(any(), leases)),
            Box::pin(self.run(any(), slices)),
        ]
    }

    /// Keeps the table of a kind up to date, and queues the affected policies after each change.
    async fn run<K, T>(self, config: watcher::Config, kind: WatchedKind<K, T>)
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K: Clone + Debug + DeserializeOwned + Send + 'static,
        K::DynamicType: Default,
    {
        let api: Api<K> = match self.scope {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let kind_name = K::kind(&K::DynamicType::default()).into_owned();
        let events = watcher(api, config).default_backoff();
        let mut events = std::pin::pin!(events);
        let mut list: BTreeMap<Key, Arc<T>> = BTreeMap::new();
        let (mut is_failing, mut has_listed, mut has_permit) = (false, false, false);
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => list.clear(),
                Ok(Event::InitApply(object)) => list.extend(kind.kept(object)),
                Ok(Event::InitDone) => {
                    self.replace(&kind, std::mem::take(&mut list));
                    if !std::mem::replace(&mut has_listed, true) {
                        self.kind_listed();
                    }
                    if !std::mem::replace(&mut has_permit, true) {
                        self.first_lists.add_permits(1);
                    }
                }
                Ok(Event::Apply(object)) => {
                    if let Some((key, object)) = kind.kept(object) {
                        self.change(&kind, key, Some(object));
                    }
                }
                Ok(Event::Delete(object)) => self.change(&kind, key(&object), None),
                Err(e) => {
                    if self.scope.is_some() && !std::mem::replace(&mut has_permit, true) {
                        self.first_lists.add_permits(1);
                    }
                    log_failure(&kind_name, &e, is_failing);
                    is_failing = true;
                    continue;
                }
            }
            is_failing = false;
        }
    }

    /// Counts a listed kind of the scope. With the last one, the policies of the scope are queued.
    fn kind_listed(self) {
        let count = self.listed_kinds.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(namespace) = self.scope.filter(|_| count == KINDS) {
            lock(&self.cluster.unlisted).remove(namespace);
            self.queue_all();
        }
    }

    fn queue_all(self) {
        for policy in self.cluster.policy_keys() {
            if self.scope.is_none_or(|scope| policy.0 == scope) {
                self.cluster.work.add(policy);
            }
        }
    }

    fn change<K, T>(self, kind: &WatchedKind<K, T>, name: Key, object: Option<Arc<T>>) {
        let mut tables = lock(&self.cluster.tables);
        let table = (kind.table)(&mut tables);
        let before = match &object {
            Some(object) => table.insert(name.clone(), object.clone()),
            None => table.remove(&name),
        };
        let change = Change {
            before: before.as_deref(),
            now: object.as_deref(),
        };
        let affected = (kind.affected)(&mut tables, &name, &change);
        drop(tables);
        for policy in affected {
            if kind.is_recovery {
                self.cluster.recovered(&policy, Utc::now());
            }
            self.cluster.work.add(policy);
        }
    }

    /// Replaces the objects of the scope by a new list, and queues all its policies.
    fn replace<K, T>(self, kind: &WatchedKind<K, T>, list: BTreeMap<Key, Arc<T>>) {
        let mut gone = (kind.table)(&mut lock(&self.cluster.tables)).missing_from(&list);
        gone.retain(|name| self.scope.is_none_or(|scope| name.0 == scope));
        for name in gone {
            self.change(kind, name, None);
        }
        for (name, object) in list {
            self.change(kind, name, Some(object));
        }
        self.queue_all();
    }
}

/// Logs the failure of a watch. Only the first one in a row is a warning.
fn log_failure(kind: &str, error: &watcher::Error, is_failing: bool) {
    match is_failing {
        false => tracing::warn!(kind, "the watch failed and is started again: {error}"),
        true => tracing::debug!(kind, "the watch failed and is started again: {error}"),
    }
}

impl<K: Resource, T> WatchedKind<K, T> {
    fn kept(&self, mut object: K) -> Option<(Key, Arc<T>)> {
        object.meta_mut().managed_fields = None;
        let key = key(&object);
        Some((key, Arc::new((self.keep)(object)?)))
    }
}

fn kept_policy(mut policy: EtcdBackupPolicy) -> Option<EtcdBackupPolicy> {
    policy.annotations_mut().remove(LAST_APPLIED);
    Some(policy)
}

/// Keeps a Pod without its spec.
fn kept_pod(mut pod: Pod) -> Option<Pod> {
    pod.spec = None;
    Some(pod)
}

/// Keeps snapshot Leases, and deltafold's lock Leases, which the controller creates again if they are
/// deleted.
fn kept_lease(mut lease: Lease) -> Option<Lease> {
    let is_own = label(&lease, jobs::LABEL_MANAGED_BY) == Some(jobs::NAME);
    if !is_own && super::lease_prefix(&lease).is_none() {
        return None;
    }
    lease
        .labels_mut()
        .retain(|key, _| key == jobs::LABEL_POLICY);
    lease
        .annotations_mut()
        .retain(|key, _| key.starts_with(ANNOTATION_PREFIX));
    lease.metadata.owner_references = None;
    Some(lease)
}

/// Keeps only the conditions of the endpoints.
fn kept_slice(mut slice: EndpointSlice) -> Option<EndpointSlice> {
    for endpoint in slice.endpoints.iter_mut().flatten() {
        let conditions = endpoint.conditions.take();
        *endpoint = Default::default();
        endpoint.conditions = conditions;
    }
    Some(slice)
}

/// Records when a Lease was renewed, and returns the policies that it affects.
fn lease_changed(tables: &mut Tables, name: &Key, change: &Change<'_, Lease>) -> Vec<Key> {
    if change.now.is_none() {
        tables.renewed.remove(name);
    } else if filters::was_renewed(change) {
        tables.renewed.insert(name.clone(), Utc::now());
    }
    filters::affected_by_lease(tables, change)
}

fn slice_changed(tables: &mut Tables, name: &Key, change: &Change<'_, EndpointSlice>) -> Vec<Key> {
    let slice = change.now.or(change.before);
    let service = slice.and_then(filters::service_of);
    let slices = service.map_or_else(Vec::new, |s| tables.slices.in_group(&s));
    let others = slices.iter().filter(|slice| key(&***slice) != *name);
    let others: Vec<bool> = others.map(|slice| filters::is_ready(slice)).collect();
    filters::affected_by_slice(tables, change, &others)
}
