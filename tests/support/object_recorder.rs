//! Watches the objects of a Kubernetes resource and keeps every version that it sees.

use super::kube::Api;
use super::namespace::{TestNamespace, kind_of, label, name};
use futures::StreamExt as _;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::watcher;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Every version of an object that the watch has seen.
pub type Versions = Vec<Value>;

/// Watches the objects of a resource and keeps every version.
#[derive(Debug)]
pub struct Recorder {
    seen: Arc<Mutex<BTreeMap<String, Versions>>>,
    watch: JoinHandle<()>,
}

impl Recorder {
    pub async fn start(api: &Api, namespace: &str, resource: &str) -> Self {
        let (version, kind) = kind_of(resource);
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let gvk = GroupVersionKind::gvk(group, version, kind);
        let resource = ApiResource::from_gvk_with_plural(&gvk, resource);
        let client = api.library().await;
        let objects: kube::Api<DynamicObject> =
            kube::Api::namespaced_with(client, namespace, &resource);
        let seen = Arc::new(Mutex::new(BTreeMap::<String, Versions>::new()));
        let writes = seen.clone();
        let watch = tokio::spawn(async move {
            let mut events = watcher(objects, watcher::Config::default()).boxed();
            while let Some(event) = events.next().await {
                let (object, gone) = match event {
                    Ok(watcher::Event::Apply(o) | watcher::Event::InitApply(o)) => (o, false),
                    Ok(watcher::Event::Delete(o)) => (o, true),
                    Ok(_) => continue,
                    Err(_) => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                };
                let uid = object.metadata.uid.clone().unwrap_or_default();
                let mut object = serde_json::to_value(object).expect("JSON");
                object["gone"] = gone.into();
                let mut seen = writes.lock().expect("nobody panicked");
                seen.entry(uid).or_default().push(object);
            }
        });
        Self { seen, watch }
    }

    /// Returns the last version of every object that ever existed, in order of creation.
    pub fn ever(&self) -> Vec<Value> {
        let seen = self.seen.lock().expect("nobody panicked");
        let mut all: Vec<Value> = seen.values().filter_map(|v| v.last().cloned()).collect();
        all.sort_by_key(|o| {
            let metadata = &o["metadata"];
            let at = metadata["creationTimestamp"].as_str().unwrap_or_default();
            (at.to_owned(), name(o).to_owned())
        });
        all
    }

    /// Returns every version of every object.
    pub fn all_versions(&self) -> Versions {
        let seen = self.seen.lock().expect("nobody panicked");
        seen.values().flatten().cloned().collect()
    }

    /// Returns every version of the objects with this name.
    pub fn versions(&self, of: &str) -> Versions {
        let seen = self.seen.lock().expect("nobody panicked");
        let all = seen.values().filter(|v| v.iter().any(|o| name(o) == of));
        all.flatten().cloned().collect()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

/// Watches the CronJobs and followers of a namespace.
#[derive(Debug)]
pub struct Running {
    pub cron_jobs: Recorder,
    pub deployments: Recorder,
}

impl Running {
    pub async fn watch(space: &TestNamespace) -> Self {
        Self {
            cron_jobs: space.record("cronjobs").await,
            deployments: space.record("deployments").await,
        }
    }

    /// Returns the names of a policy's workloads that were ever suspended or deleted.
    pub fn stopped(&self, policy: &str) -> Vec<String> {
        let is_its = |o: &Value| label(o, "policy") == Some(policy);
        let is_stopped = |o: &Value| {
            o["gone"] == true || o["spec"]["suspend"] == true || o["spec"]["replicas"] == 0
        };
        let all = [&self.cron_jobs, &self.deployments];
        let all = all.into_iter().flat_map(Recorder::all_versions);
        let stopped = all.filter(|o| is_its(o) && is_stopped(o));
        let mut names: Vec<String> = stopped.map(|o| name(&o).to_owned()).collect();
        names.sort();
        names.dedup();
        names
    }
}
