//! The controller's view of the cluster: one cache for each kind of object, which the watches keep up to date.
//!
//! If a watch ends, it is started again from its last version, or with a new list. Each event replaces the [kept
//! part](kept::Kept) of its object, and requests a reconciliation of the affected policies.
//! Nothing is decided or written here.

mod kept;
mod table;
mod workload;

pub use kept::{KeptLease, KeptSlice};
pub use table::Group;
pub use workload::Workload;

use super::api::{EtcdBackupPolicy, EtcdBackupTask};
use super::jobs;
use super::names::NamespacedName;
use crate::base::lock;
use crate::error::Error;
use chrono::Utc;
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::future::{BoxFuture, join_all};
use futures::stream::StreamExt;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::Pod;
use kept::Kept;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::scheduler::ScheduleRequest;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};
use table::Table;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The objects of a page of a list. Each may have 1.5 MiB before it is cut.
const PAGE_SIZE: u32 = 100;
/// The number of watched kinds.
const KINDS: usize = 8;

/// The caches.
#[derive(Debug)]
pub struct Tables {
    /// The policies.
    pub policies: Table<EtcdBackupPolicy>,
    /// The tasks.
    pub tasks: Table<EtcdBackupTask>,
    /// The Jobs.
    pub jobs: Table<Job>,
    /// The CronJobs.
    pub cron_jobs: Table<Workload<CronJob>>,
    /// The followers.
    pub followers: Table<Workload<Deployment>>,
    /// The Pods.
    pub pods: Table<Pod>,
    /// The snapshot Leases and the lock Leases.
    pub leases: Table<KeptLease>,
    /// The EndpointSlices.
    pub slices: Table<KeptSlice>,
}

impl Default for Tables {
    fn default() -> Self {
        Tables {
            policies: Table::new(Kept::groups),
            tasks: Table::new(Kept::groups),
            jobs: Table::new(Kept::groups),
            cron_jobs: Table::new(Kept::groups),
            followers: Table::new(Kept::groups),
            pods: Table::new(Kept::groups),
            leases: Table::new(Kept::groups),
            slices: Table::new(Kept::groups),
        }
    }
}

/// A named namespace, or all of them, and how far its first lists are.
#[derive(Debug)]
struct Scope {
    namespace: Option<String>,
    /// The number of kinds that have not been listed. A kind whose watch fails afterwards counts as listed: a watch that
    /// is started again reports nothing until an object changes, so a namespace without changes would wait forever. An
    /// old cache does no harm: a Job has the same name again, and writes name the UID or the version of their object.
    unlisted: usize,
    /// The number of these kinds whose list has failed. In a named namespace, they delay only the policies there.
    failed: usize,
}

/// The caches, and the requests for reconciliations that their changes cause.
#[derive(Debug)]
pub struct Cluster {
    tables: Mutex<Tables>,
    scopes: Mutex<Vec<Scope>>,
    requests: UnboundedSender<ScheduleRequest<NamespacedName>>,
    listed: Notify,
}

/// The stream of requests for reconciliations.
pub type Requests = UnboundedReceiver<ScheduleRequest<NamespacedName>>;

impl Cluster {
    /// Returns empty caches of these namespaces, or of all if there are none; and the requests.
    pub fn new(namespaces: &[String]) -> (Self, Requests) {
        let named: BTreeSet<&String> = namespaces.iter().collect();
        let mut names: Vec<Option<String>> = named.into_iter().cloned().map(Some).collect();
        if names.is_empty() {
            names.push(None);
        }
        let scopes = names.into_iter().map(|namespace| Scope {
            namespace,
            unlisted: KINDS,
            failed: 0,
        });
        let (requests, received) = unbounded();
        let cluster = Cluster {
            tables: Mutex::default(),
            scopes: Mutex::new(scopes.collect()),
            requests,
            listed: Notify::new(),
        };
        (cluster, received)
    }

    /// Returns the caches.
    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        lock(&self.tables)
    }

    /// Requests a reconciliation of a policy.
    pub fn request(&self, policy: NamespacedName, at: Instant) {
        let request = ScheduleRequest {
            message: policy,
            run_at: at,
        };
        // It fails only when the controller has ended.
        let _ = self.requests.unbounded_send(request);
    }

    /// Returns whether the first lists have arrived, or have failed in a named namespace. A decision on half of the
    /// objects could be wrong.
    pub fn is_listed(&self) -> bool {
        let scopes = lock(&self.scopes);
        scopes
            .iter()
            .all(|s| s.unlisted == 0 || (s.unlisted == s.failed && s.namespace.is_some()))
    }

    /// Waits until [`is_listed`](Self::is_listed).
    pub async fn listed(&self) {
        self.listed.notified().await;
    }

    /// Returns whether the policies of a namespace may be reconciled.
    pub fn is_namespace_listed(&self, namespace: &str) -> bool {
        let scopes = lock(&self.scopes);
        let mut own = scopes
            .iter()
            .filter(|s| s.namespace.as_deref().is_none_or(|n| n == namespace));
        own.all(|s| s.unlisted == 0)
    }

    /// Runs all watches. Returns only if they end, which they should never do.
    pub async fn watch(&self, client: &kube::Client) -> Error {
        let count = lock(&self.scopes).len();
        let watches = (0..count).flat_map(|scope| {
            let watch = Watch {
                cluster: self,
                client,
                scope,
            };
            watch.all_kinds()
        });
        join_all(watches).await;
        Error::internal("the watches have ended")
    }

    /// Requests a reconciliation of all policies that exist or that a task names.
    fn request_all(&self) {
        let tables = self.tables();
        let policies = tables.policies.all().map(|(name, _)| name.clone());
        let of_tasks = tables.tasks.all().map(|(name, task)| NamespacedName {
            namespace: name.namespace.clone(),
            name: task.spec.policy.clone(),
        });
        let all: BTreeSet<NamespacedName> = policies.chain(of_tasks).collect();
        drop(tables);
        for policy in all {
            self.request(policy, Instant::now());
        }
    }
}

/// The watches on one scope.
#[derive(Clone, Copy)]
struct Watch<'a> {
    cluster: &'a Cluster,
    client: &'a kube::Client,
    scope: usize,
}

impl<'a> Watch<'a> {
    fn all_kinds(self) -> [BoxFuture<'a, ()>; KINDS] {
        [
            Box::pin(self.run::<EtcdBackupPolicy>()),
            Box::pin(self.run::<EtcdBackupTask>()),
            Box::pin(self.run::<Job>()),
            Box::pin(self.run::<Workload<CronJob>>()),
            Box::pin(self.run::<Workload<Deployment>>()),
            Box::pin(self.run::<Pod>()),
            Box::pin(self.run::<KeptLease>()),
            Box::pin(self.run::<KeptSlice>()),
        ]
    }

    fn namespace(self) -> Option<String> {
        lock(&self.cluster.scopes)[self.scope].namespace.clone()
    }

    /// Keeps the cache of a kind up to date.
    async fn run<T: Kept>(self)
    where
        T::Object: Clone + Debug + DeserializeOwned + Send,
        <T::Object as Resource>::DynamicType: Default + Clone,
    {
        // One object that cannot be read stops no other.
        type Guarded<T> = DeserializeGuard<<T as Kept>::Object>;
        let namespace = self.namespace();
        let api: Api<Guarded<T>> = match &namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let mut config = watcher::Config::default().page_size(PAGE_SIZE);
        if T::IS_OWN {
            config = config.labels(&format!("{}={}", jobs::LABEL_MANAGED_BY, jobs::NAME));
        }
        let kind = <T::Object as Resource>::kind(&Default::default()).into_owned();
        let mut events = std::pin::pin!(watcher(api, config).default_backoff());
        let mut list: BTreeMap<NamespacedName, Option<Arc<T>>> = BTreeMap::new();
        let (mut is_failing, mut has_listed, mut has_failed) = (false, false, false);
        while let Some(event) = events.next().await {
            let is_failure = event.is_err();
            match event {
                Ok(Event::Init) => list.clear(),
                Ok(Event::InitApply(object)) => {
                    let name = NamespacedName::of(&object);
                    list.insert(name.clone(), self.keep::<T>(&name, object));
                }
                Ok(Event::InitDone) => {
                    self.replace(&namespace, std::mem::take(&mut list));
                    if !std::mem::replace(&mut has_listed, true) {
                        self.update_scope(|scope| {
                            scope.unlisted -= 1;
                            scope.failed -= usize::from(has_failed);
                        });
                    }
                }
                Ok(Event::Apply(object)) => {
                    let name = NamespacedName::of(&object);
                    let kept = self.keep::<T>(&name, object);
                    self.change(name, kept);
                }
                Ok(Event::Delete(object)) => self.change::<T>(NamespacedName::of(&object), None),
                Err(e) => {
                    if !has_listed && !std::mem::replace(&mut has_failed, true) {
                        self.update_scope(|scope| scope.failed += 1);
                    }
                    log_failure(&kind, &e, is_failing);
                }
            }
            is_failing = is_failure;
        }
    }

    /// Changes the state of the scope. If its policies, or all, may be reconciled from now on, requests that.
    fn update_scope(self, update: impl FnOnce(&mut Scope)) {
        let state = |cluster: &Cluster| {
            let listed = lock(&cluster.scopes)
                .iter()
                .filter(|s| s.unlisted == 0)
                .count();
            (cluster.is_listed(), listed)
        };
        let before = state(self.cluster);
        update(&mut lock(&self.cluster.scopes)[self.scope]);
        let now = state(self.cluster);
        if now != before {
            self.cluster.request_all();
        }
        if now.0 {
            self.cluster.listed.notify_one();
        }
    }

    /// Returns the kept part of an object. If the object cannot be read, the earlier part stays.
    fn keep<T: Kept>(
        self,
        name: &NamespacedName,
        object: DeserializeGuard<T::Object>,
    ) -> Option<Arc<T>> {
        let before = T::table(&mut self.cluster.tables()).get(name).cloned();
        match object.0 {
            Ok(object) => T::keep(object, before.as_deref(), Utc::now()).map(Arc::new),
            Err(e) => {
                tracing::warn!(
                    "an object that cannot be read is ignored: {name}: {}",
                    e.error
                );
                before
            }
        }
    }

    fn change<T: Kept>(self, name: NamespacedName, object: Option<Arc<T>>) {
        let mut tables = self.cluster.tables();
        let table = T::table(&mut tables);
        let before = table.get(&name).cloned();
        match &object {
            Some(object) => table.insert(name, object.clone()),
            None => table.remove(&name),
        }
        let affected = T::affected(&tables, before.as_deref(), object.as_deref());
        drop(tables);
        for policy in affected {
            self.cluster.request(policy, Instant::now());
        }
    }

    /// Replaces the objects of the scope by a new list.
    fn replace<T: Kept>(
        self,
        namespace: &Option<String>,
        list: BTreeMap<NamespacedName, Option<Arc<T>>>,
    ) {
        let mut gone: Vec<NamespacedName> = Vec::new();
        for (name, _) in T::table(&mut self.cluster.tables()).all() {
            let is_in_scope = namespace.as_ref().is_none_or(|n| *n == name.namespace);
            if is_in_scope && !list.contains_key(name) {
                gone.push(name.clone());
            }
        }
        for name in gone {
            self.change::<T>(name, None);
        }
        for (name, object) in list {
            self.change(name, object);
        }
    }
}

/// Logs the failure of a watch. Only the first one in a row is a warning.
fn log_failure(kind: &str, error: &watcher::Error, is_failing: bool) {
    if is_failing {
        tracing::debug!(kind, "the watch failed and is started again: {error}");
    } else {
        tracing::warn!(kind, "the watch failed and is started again: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use kube::client::Body;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn the_failure_of_a_watch_is_none_of_a_list() {
        // The status of the list of Jobs in the namespace b; 0 while it has no response.
        let jobs = &*Box::leak(Box::new(AtomicU16::new(0)));
        let failed_watches = &*Box::leak(Box::new(AtomicUsize::new(0)));
        let answer = move |request: Request<Body>| async move {
            let uri = request.uri();
            let is_watch = uri.query().is_some_and(|query| query.contains("watch="));
            let is_of_jobs = uri.path().ends_with("/namespaces/b/jobs");
            let mut status = 200;
            if is_watch {
                failed_watches.fetch_add(1, Ordering::Relaxed);
                status = 500;
            } else if is_of_jobs {
                while jobs.load(Ordering::Relaxed) == 0 {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                status = jobs.load(Ordering::Relaxed);
            }
            let list = r#"{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":"1"},"items":[]}"#;
            let response = Response::builder().status(status);
            Ok::<_, Infallible>(response.body(Body::from(list.as_bytes().to_vec())).unwrap())
        };
        let client = kube::Client::new(tower::service_fn(answer), "default");
        let (cluster, _requests) = Cluster::new(&["a".to_owned(), "b".to_owned()]);
        let is_listed = || {
            let of = |namespace| cluster.is_namespace_listed(namespace);
            (cluster.is_listed(), of("a"), of("b"))
        };
        let pause = || tokio::time::sleep(Duration::from_secs(60));
        let check = async {
            pause().await;
            // Every watch has failed again and again, and one list has no response.
            assert!(failed_watches.load(Ordering::Relaxed) > 2 * 2 * KINDS);
            assert_eq!(is_listed(), (false, true, false));
            jobs.store(403, Ordering::Relaxed);
            pause().await;
            assert_eq!(is_listed(), (true, true, false));
            jobs.store(200, Ordering::Relaxed);
            pause().await;
            assert_eq!(is_listed(), (true, true, true));
        };
        tokio::select! {
            e = cluster.watch(&client) => panic!("{e}"),
            () = check => {}
        }
    }
}
