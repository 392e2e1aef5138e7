//! The watches: what changed is put into a table, and the policies that it concerns are looked at.
//!
//! Nothing is decided and nothing written here. A watch that ends begins again by itself, from where it was
//! or with a new list.

use super::filters::{self, Change};
use super::table::Table;
use super::{Made, Tables, World};
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

/// kubectl keeps the whole object in it once more.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// What our annotations begin with.
const OURS: &str = "deltafold.io/";

/// How objects of a kind are kept.
struct Kind<K, T> {
    /// What is kept of one; nothing of those that are no concern of ours.
    keep: fn(K) -> Option<T>,
    table: fn(&mut Tables) -> &mut Table<T>,
    concerned: fn(&mut Tables, &Key, &Change<'_, T>) -> Vec<Key>,
    /// Whether such a change tells that something has come back.
    is_recovery: bool,
}

/// Runs all watches on these namespaces, or on all if none is named; they do not end. `ready` is called once
/// everything has been listed: decisions on half of it would be wrong ones. A named namespace in which something cannot
/// be listed holds up itself alone.
///
/// # Errors
/// `Internal`: they have ended all the same.
pub async fn watch_all(
    world: &World,
    client: &kube::Client,
    namespaces: &[String],
    ready: impl FnOnce(),
) -> Result<()> {
    let named: BTreeSet<&str> = namespaces.iter().map(String::as_str).collect();
    let scopes: Vec<Option<&str>> = match named.is_empty() {
        true => vec![None],
        false => named.iter().map(|namespace| Some(*namespace)).collect(),
    };
    lock(&world.unlisted).extend(named.iter().map(|namespace| (*namespace).to_owned()));
    let tried = Semaphore::new(0);
    let listed: Vec<AtomicUsize> = scopes.iter().map(|_| AtomicUsize::new(0)).collect();
    let watches: Vec<BoxFuture<'_, ()>> = scopes
        .into_iter()
        .zip(&listed)
        .flat_map(|(scope, listed)| {
            of_namespace(Watch {
                world,
                client,
                scope,
                listed,
                tried: &tried,
            })
        })
        .collect();
    let count = u32::try_from(watches.len()).unwrap_or(u32::MAX);
    let all_tried = async {
        // It is never closed.
        let _ = tried.acquire_many(count).await;
        ready();
    };
    tokio::join!(join_all(watches), all_tried);
    Err(Error::internal("the watches have ended"))
}

/// So many kinds are watched.
const KINDS: usize = 8;

fn of_namespace(of: Watch<'_>) -> [BoxFuture<'_, ()>; KINDS] {
    let ours = format!("{}={}", jobs::LABEL_MANAGED_BY, jobs::NAME);
    let ours = || watcher::Config::default().labels(&ours);
    let any = watcher::Config::default;
    [
        Box::pin(of.run(
            any(),
            Kind {
                keep: |mut policy: EtcdBackupPolicy| {
                    policy.annotations_mut().remove(LAST_APPLIED);
                    Some(policy)
                },
                table: |t| &mut t.policies,
                concerned: |tables, _, change| filters::of_policy(tables, change),
                is_recovery: false,
            },
        )),
        Box::pin(of.run(
            any(),
            Kind {
                keep: |task: EtcdBackupTask| Some(task),
                table: |t| &mut t.tasks,
                concerned: |_, _, change| filters::of_task(change),
                is_recovery: false,
            },
        )),
        Box::pin(of.run(
            ours(),
            Kind {
                keep: |job: Job| Some(job),
                table: |t| &mut t.jobs,
                concerned: |_, _, change| filters::of_made(change),
                is_recovery: false,
            },
        )),
        Box::pin(of.run(
            ours(),
            Kind {
                keep: |cron_job: CronJob| Some(Made::cron_job(cron_job)),
                table: |t| &mut t.cron_jobs,
                concerned: |_, _, change| Made::concerned(change),
                is_recovery: false,
            },
        )),
        Box::pin(of.run(
            ours(),
            Kind {
                keep: |follower: Deployment| Some(Made::follower(follower)),
                table: |t| &mut t.followers,
                concerned: |_, _, change| Made::concerned(change),
                is_recovery: false,
            },
        )),
        Box::pin(of.run(
            ours(),
            Kind {
                keep: |mut pod: Pod| {
                    pod.spec = None;
                    Some(pod)
                },
                table: |t| &mut t.pods,
                concerned: |_, _, change| filters::of_made(change),
                is_recovery: false,
            },
        )),
        Box::pin(of.run(
            any(),
            Kind {
                keep: kept_lease,
                table: |t| &mut t.leases,
                concerned: |tables, key, change| {
                    match (change.now, filters::was_renewed(change)) {
                        (None, _) => drop(tables.renewed.remove(key)),
                        (_, true) => drop(tables.renewed.insert(key.clone(), Utc::now())),
                        (_, false) => {}
                    }
                    filters::of_lease(tables, change)
                },
                is_recovery: false,
            },
        )),
        Box::pin(of.run(
            any(),
            Kind {
                keep: kept_slice,
                table: |t| &mut t.slices,
                concerned: |tables, this, change| {
                    let slice = change.now.or(change.before);
                    let service = slice.and_then(filters::service_of);
                    let all = service.map_or_else(Vec::new, |s| tables.slices.of(&s));
                    let others = all.iter().filter(|slice| key(&***slice) != *this);
                    let others = others.map(|slice| filters::is_ready(slice)).collect();
                    filters::of_slice(tables, change, &others)
                },
                is_recovery: true,
            },
        )),
    ]
}

/// Snapshot Leases, and locks of ours, which are missed once they are gone.
fn kept_lease(mut lease: Lease) -> Option<Lease> {
    let is_ours = label(&lease, jobs::LABEL_MANAGED_BY) == Some(jobs::NAME);
    if !is_ours && super::lease_prefix(&lease).is_none() {
        return None;
    }
    lease
        .labels_mut()
        .retain(|key, _| key == jobs::LABEL_POLICY);
    lease
        .annotations_mut()
        .retain(|key, _| key.starts_with(OURS));
    lease.metadata.owner_references = None;
    Some(lease)
}

/// Of a Service's endpoints, whether they are ready.
fn kept_slice(mut slice: EndpointSlice) -> Option<EndpointSlice> {
    for endpoint in slice.endpoints.iter_mut().flatten() {
        let conditions = endpoint.conditions.take();
        *endpoint = Default::default();
        endpoint.conditions = conditions;
    }
    Some(slice)
}

/// A watch on a namespace, or on all.
#[derive(Clone, Copy)]
struct Watch<'a> {
    world: &'a World,
    client: &'a kube::Client,
    scope: Option<&'a str>,
    /// How many kinds of the scope have been listed.
    listed: &'a AtomicUsize,
    /// A permit for each watch that has listed, or that cannot in a named namespace.
    tried: &'a Semaphore,
}

impl Watch<'_> {
    /// Keeps a table up to date, and has those looked at whom a change concerns once it is in there.
    async fn run<K, T>(self, config: watcher::Config, kind: Kind<K, T>)
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K: Clone + Debug + DeserializeOwned + Send + 'static,
        K::DynamicType: Default,
    {
        let api: Api<K> = match self.scope {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let name = K::kind(&K::DynamicType::default()).into_owned();
        let events = watcher(api, config).default_backoff();
        let mut events = std::pin::pin!(events);
        let mut list: BTreeMap<Key, Arc<T>> = BTreeMap::new();
        let (mut failing, mut has_listed, mut has_tried) = (false, false, false);
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => list.clear(),
                Ok(Event::InitApply(object)) => list.extend(kind.kept(object)),
                Ok(Event::InitDone) => {
                    self.replace(&kind, std::mem::take(&mut list));
                    if !std::mem::replace(&mut has_listed, true) {
                        self.has_listed();
                    }
                    if !std::mem::replace(&mut has_tried, true) {
                        self.tried.add_permits(1);
                    }
                }
                Ok(Event::Apply(object)) => {
                    if let Some((key, object)) = kind.kept(object) {
                        self.change(&kind, key, Some(object));
                    }
                }
                Ok(Event::Delete(object)) => self.change(&kind, key(&object), None),
                Err(e) => {
                    if self.scope.is_some() && !std::mem::replace(&mut has_tried, true) {
                        self.tried.add_permits(1);
                    }
                    // A watch that comes to its end is nothing; one that cannot begin is.
                    match failing {
                        false => tracing::warn!(kind = name, "watching failed, trying again: {e}"),
                        true => tracing::debug!(kind = name, "watching failed, trying again: {e}"),
                    }
                    failing = true;
                    continue;
                }
            }
            failing = false;
        }
    }

    /// One more kind of the scope is known. With the last one its policies are looked at.
    fn has_listed(self) {
        let listed = self.listed.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(namespace) = self.scope.filter(|_| listed == KINDS) {
            lock(&self.world.unlisted).remove(namespace);
            self.all_look_again();
        }
    }

    fn all_look_again(self) {
        for policy in self.world.all() {
            if self.scope.is_none_or(|scope| policy.0 == scope) {
                self.world.work.add(policy);
            }
        }
    }

    fn change<K, T>(self, kind: &Kind<K, T>, this: Key, object: Option<Arc<T>>) {
        let mut tables = lock(&self.world.tables);
        let table = (kind.table)(&mut tables);
        let before = match &object {
            Some(object) => table.put(this.clone(), object.clone()),
            None => table.remove(&this),
        };
        let change = Change {
            before: before.as_deref(),
            now: object.as_deref(),
        };
        let concerned = (kind.concerned)(&mut tables, &this, &change);
        drop(tables);
        for policy in concerned {
            if kind.is_recovery {
                let now = Utc::now();
                self.world
                    .remember(&policy, |memory| memory.recovered_at = Some(now));
            }
            self.world.work.add(policy);
        }
    }

    /// A new list may lack what was there before: all look again.
    fn replace<K, T>(self, kind: &Kind<K, T>, list: BTreeMap<Key, Arc<T>>) {
        let mut gone = (kind.table)(&mut lock(&self.world.tables)).others(&list);
        gone.retain(|key| self.scope.is_none_or(|scope| key.0 == scope));
        let gone = gone.into_iter().map(|key| (key, None));
        let there = list.into_iter().map(|(key, object)| (key, Some(object)));
        for (key, object) in gone.chain(there) {
            self.change(kind, key, object);
        }
        self.all_look_again();
    }
}

impl<K: Resource, T> Kind<K, T> {
    fn kept(&self, mut object: K) -> Option<(Key, Arc<T>)> {
        object.meta_mut().managed_fields = None;
        let key = key(&object);
        Some((key, Arc::new((self.keep)(object)?)))
    }
}
