//! The part of each object that the caches keep, and the policies that a change affects.
//!
//! Objects are cut on the way in, because anybody may write large ones, and there may be ten thousand policies. A
//! cut is a pure function of the object, the one before it, and the time. Decides nothing.

use super::Tables;
use super::table::{Group, Table};
use super::workload::{Workload, policy_of_label};
use crate::base::printable;
use crate::controller::api::{EtcdBackupPolicy, EtcdBackupTask};
use crate::controller::facts::outcome;
use crate::controller::jobs;
use crate::controller::names::{NamespacedName, label};
use chrono::{DateTime, Utc};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::{CronJob, Job, JobSpec, JobStatus};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
use kube::{Resource, ResourceExt};
use std::collections::BTreeMap;

/// The prefix of deltafold's labels and annotations.
const OWN_PREFIX: &str = "deltafold.io/";
/// The label of an EndpointSlice for the name of its Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The longest kept value of a label or an annotation, in bytes.
const MAX_VALUE: usize = 1024;
/// The most kept labels, and the most kept annotations, of an object.
const MAX_VALUES: usize = 32;
/// The longest kept text of a status, in bytes: Kubernetes limits a termination message to it.
const MAX_TEXT: usize = 4096;
/// The most policies that one change affects beyond the object's own, so that one tenant cannot keep all
/// workers busy.
const MAX_AFFECTED: usize = 100;

/// The part of an object that a cache keeps.
pub trait Kept: Sized + Send + Sync + 'static {
    /// The kind of the object.
    type Object: Resource<Scope = NamespaceResourceScope>;

    /// Whether only objects with deltafold's label are watched.
    const IS_OWN: bool;

    /// Returns the table of the kind.
    fn table(tables: &mut Tables) -> &mut Table<Self>;

    /// Returns what is kept of an object; `None` if the controller does not need it. `before` is what was kept of
    /// it so far.
    fn keep(object: Self::Object, before: Option<&Self>, now: DateTime<Utc>) -> Option<Self>;

    /// Returns the groups of the object.
    fn groups(&self) -> Vec<Group>;

    /// Returns the policies that a change affects. `None` means that the object did not exist before, or does not
    /// exist now.
    fn affected(tables: &Tables, before: Option<&Self>, now: Option<&Self>) -> Vec<NamespacedName> {
        let both = before.into_iter().chain(now);
        policies_of(tables, both.flat_map(Self::groups))
    }
}

/// Returns the policies of these groups.
fn policies_of(tables: &Tables, groups: impl Iterator<Item = Group>) -> Vec<NamespacedName> {
    let mut policies = Vec::new();
    for group in groups {
        match group {
            Group::Policy(policy) => policies.push(policy),
            Group::Unfinished => {}
            group => policies.extend(tables.policies.members(&group).take(MAX_AFFECTED).cloned()),
        }
    }
    policies
}

/// Returns the parts of an object's metadata that the controller uses.
fn cut_metadata(metadata: &ObjectMeta) -> ObjectMeta {
    let owners = metadata.owner_references.iter().flatten();
    let owner = owners.filter(|o| o.controller == Some(true)).take(1);
    let own_values = |values: &Option<BTreeMap<String, String>>| {
        let values = values.iter().flatten();
        let own = values.filter(|(key, value)| {
            let is_own = key.starts_with(OWN_PREFIX)
                || *key == SERVICE_NAME
                || *key == jobs::LABEL_MANAGED_BY;
            is_own && value.len() <= MAX_VALUE
        });
        let own = own.take(MAX_VALUES);
        Some(own.map(|(k, v)| (k.clone(), v.clone())).collect())
    };
    ObjectMeta {
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        uid: metadata.uid.clone(),
        resource_version: metadata.resource_version.clone(),
        generation: metadata.generation,
        creation_timestamp: metadata.creation_timestamp.clone(),
        deletion_timestamp: metadata.deletion_timestamp.clone(),
        owner_references: Some(owner.cloned().collect()),
        labels: own_values(&metadata.labels),
        annotations: own_values(&metadata.annotations),
        ..ObjectMeta::default()
    }
}

fn cut(text: &mut Option<String>) {
    if let Some(text) = text.as_mut().filter(|t| t.len() > MAX_TEXT) {
        *text = printable::message(std::mem::take(text));
    }
}

impl Kept for EtcdBackupPolicy {
    type Object = EtcdBackupPolicy;
    const IS_OWN: bool = false;

    fn table(tables: &mut Tables) -> &mut Table<Self> {
        &mut tables.policies
    }

    fn keep(mut policy: Self, _: Option<&Self>, _: DateTime<Utc>) -> Option<Self> {
        policy.metadata = cut_metadata(&policy.metadata);
        Some(policy)
    }

    fn groups(&self) -> Vec<Group> {
        let namespace = self.namespace().unwrap_or_default();
        let mut groups: Vec<Group> = services(self).into_iter().map(Group::Service).collect();
        let location = jobs::store_location(&self.spec.store);
        groups.push(Group::Store(NamespacedName::new(&namespace, location)));
        let prefix = jobs::lease_prefix(self);
        groups.push(Group::Leases(NamespacedName::new(namespace, prefix)));
        groups
    }

    /// A policy affects itself if its spec has changed, and then also those with the same store or Leases. The
    /// status does not count, because the controller itself writes it.
    fn affected(tables: &Tables, before: Option<&Self>, now: Option<&Self>) -> Vec<NamespacedName> {
        let version = |policy: &EtcdBackupPolicy| {
            let metadata = &policy.metadata;
            let is_deleting = metadata.deletion_timestamp.is_some();
            (metadata.uid.clone(), metadata.generation, is_deleting)
        };
        if before.map(version) == now.map(version) {
            return Vec::new();
        }
        let both = || before.into_iter().chain(now);
        let shared = both().flat_map(Self::groups);
        let shared = shared.filter(|group| !matches!(group, Group::Service(_)));
        let mut affected = policies_of(tables, shared);
        affected.extend(both().map(NamespacedName::of));
        affected
    }
}

/// Returns the Services of a policy's endpoints.
fn services(policy: &EtcdBackupPolicy) -> Vec<NamespacedName> {
    let own_namespace = policy.namespace().unwrap_or_default();
    let endpoints = policy.spec.etcd.iter().flat_map(|etcd| &etcd.endpoints);
    let services = endpoints.filter_map(|endpoint| service(endpoint, &own_namespace));
    services.collect()
}

/// Returns the Service of an endpoint; `None` if its host is an IP address or a name outside of the cluster.
fn service(endpoint: &str, own_namespace: &str) -> Option<NamespacedName> {
    let host = endpoint.split("://").last()?.split(['/', ':']).next()?;
    if host.is_empty() || host.parse::<std::net::IpAddr>().is_ok() {
        return None;
    }
    let parts: Vec<&str> = host.split('.').collect();
    let (namespace, service) = match parts.iter().position(|p| *p == "svc") {
        // SERVICE.NAMESPACE.svc, or POD.SERVICE.NAMESPACE.svc if the Service is headless.
        Some(at) if at >= 2 => (parts[at - 1], parts[at - 2]),
        Some(_) => return None,
        None => match parts.as_slice() {
            [service] => (own_namespace, *service),
            [service, namespace] => (*namespace, *service),
            _ => return None,
        },
    };
    Some(NamespacedName::new(namespace, service))
}

impl Kept for EtcdBackupTask {
    type Object = EtcdBackupTask;
    const IS_OWN: bool = false;

    fn table(tables: &mut Tables) -> &mut Table<Self> {
        &mut tables.tasks
    }

    fn keep(mut task: Self, _: Option<&Self>, _: DateTime<Utc>) -> Option<Self> {
        task.metadata = cut_metadata(&task.metadata);
        Some(task)
    }

    fn groups(&self) -> Vec<Group> {
        let namespace = self.namespace().unwrap_or_default();
        let policy = NamespacedName::new(namespace, &self.spec.policy);
        vec![Group::Policy(policy)]
    }
}

impl Kept for Job {
    type Object = Job;
    const IS_OWN: bool = true;

    fn table(tables: &mut Tables) -> &mut Table<Self> {
        &mut tables.jobs
    }

    fn keep(job: Self, _: Option<&Self>, _: DateTime<Utc>) -> Option<Self> {
        let status = job.status.unwrap_or_default();
        let mut conditions = status.conditions.unwrap_or_default();
        for condition in &mut conditions {
            cut(&mut condition.message);
        }
        let spec = job.spec.unwrap_or_default();
        Some(Job {
            metadata: cut_metadata(&job.metadata),
            spec: Some(JobSpec {
                suspend: spec.suspend,
                ..JobSpec::default()
            }),
            status: Some(JobStatus {
                conditions: Some(conditions),
                completion_time: status.completion_time,
                ..JobStatus::default()
            }),
        })
    }

    fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = policy_of_label(self)
            .map(Group::Policy)
            .into_iter()
            .collect();
        if !outcome::is_finished(self) {
            groups.push(Group::Unfinished);
        }
        groups
    }
}

impl Kept for Pod {
    type Object = Pod;
    const IS_OWN: bool = true;

    fn table(tables: &mut Tables) -> &mut Table<Self> {
        &mut tables.pods
    }

    fn keep(pod: Self, _: Option<&Self>, _: DateTime<Utc>) -> Option<Self> {
        let mut status = pod.status.unwrap_or_default();
        cut(&mut status.reason);
        cut(&mut status.message);
        for condition in status.conditions.iter_mut().flatten() {
            cut(&mut condition.message);
        }
        Some(Pod {
            metadata: cut_metadata(&pod.metadata),
            spec: None,
            status: Some(PodStatus {
                phase: status.phase,
                reason: status.reason,
                message: status.message,
                conditions: status.conditions,
                container_statuses: cut_containers(status.container_statuses),
                init_container_statuses: cut_containers(status.init_container_statuses),
                ..PodStatus::default()
            }),
        })
    }

    fn groups(&self) -> Vec<Group> {
        policy_of_label(self)
            .map(Group::Policy)
            .into_iter()
            .collect()
    }
}

/// Returns the states of deltafold's own containers.
fn cut_containers(statuses: Option<Vec<ContainerStatus>>) -> Option<Vec<ContainerStatus>> {
    let mut kept = Vec::new();
    for status in statuses.into_iter().flatten() {
        if !outcome::is_own_container(&status.name) {
            continue;
        }
        let mut state = status.state;
        if let Some(state) = &mut state {
            if let Some(waiting) = &mut state.waiting {
                cut(&mut waiting.message);
            }
            if let Some(terminated) = &mut state.terminated {
                cut(&mut terminated.message);
            }
        }
        kept.push(ContainerStatus {
            name: status.name,
            state,
            ready: status.ready,
            restart_count: status.restart_count,
            ..ContainerStatus::default()
        });
    }
    Some(kept)
}

impl Kept for Workload<CronJob> {
    type Object = CronJob;
    const IS_OWN: bool = true;

    fn table(tables: &mut Tables) -> &mut Table<Self> {
        &mut tables.cron_jobs
    }

    fn keep(object: CronJob, before: Option<&Self>, _: DateTime<Utc>) -> Option<Self> {
        let is_active = object.spec.suspend != Some(true);
        Workload::new(&object, before, is_active)
    }

    fn groups(&self) -> Vec<Group> {
        self.policy().map(Group::Policy).into_iter().collect()
    }
}

impl Kept for Workload<Deployment> {
    type Object = Deployment;
    const IS_OWN: bool = true;

    fn table(tables: &mut Tables) -> &mut Table<Self> {
        &mut tables.followers
    }

    fn keep(object: Deployment, before: Option<&Self>, _: DateTime<Utc>) -> Option<Self> {
        let is_active = object.spec.replicas != Some(0);
        Workload::new(&object, before, is_active)
    }

    fn groups(&self) -> Vec<Group> {
        self.policy().map(Group::Policy).into_iter().collect()
    }
}

/// A snapshot Lease, or one of deltafold's lock Leases, which the controller creates again if they are deleted.
#[derive(Debug)]
pub struct KeptLease {
    /// The Lease.
    pub lease: Lease,
    /// When the watch reported its last renewal. The time in the Lease may come from a wrong clock.
    pub renewal_seen: Option<DateTime<Utc>>,
}

impl Kept for KeptLease {
    type Object = Lease;
    const IS_OWN: bool = false;

    fn table(tables: &mut Tables) -> &mut Table<Self> {
        &mut tables.leases
    }

    fn keep(lease: Lease, before: Option<&Self>, now: DateTime<Utc>) -> Option<Self> {
        let is_own = label(&lease, jobs::LABEL_MANAGED_BY) == Some(jobs::NAME);
        if !is_own && snapshot_lease_prefix(&lease).is_none() {
            return None;
        }
        let spec = lease.spec.unwrap_or_default();
        let lease = Lease {
            metadata: cut_metadata(&lease.metadata),
            spec: Some(LeaseSpec {
                holder_identity: spec.holder_identity.filter(|h| h.len() <= MAX_VALUE),
                renew_time: spec.renew_time,
                ..LeaseSpec::default()
            }),
        };
        let renewal_seen = before.and_then(|before| {
            if before.lease.spec == lease.spec {
                before.renewal_seen
            } else {
                Some(now)
            }
        });
        Some(KeptLease {
            lease,
            renewal_seen,
        })
    }

    fn groups(&self) -> Vec<Group> {
        let Some(prefix) = snapshot_lease_prefix(&self.lease) else {
            return Vec::new();
        };
        let namespace = self.lease.namespace().unwrap_or_default();
        vec![Group::Leases(NamespacedName::new(namespace, prefix))]
    }

    /// A Lease without news affects no policy: Leases are renewed all the time. One that is deleted also affects
    /// the policy of its label.
    fn affected(tables: &Tables, before: Option<&Self>, now: Option<&Self>) -> Vec<NamespacedName> {
        let Some(kept) = now.or(before) else {
            return Vec::new();
        };
        let contents = |kept: &KeptLease| {
            (
                kept.lease.spec.clone(),
                kept.lease.metadata.annotations.clone(),
            )
        };
        if before.map(contents) == now.map(contents) {
            return Vec::new();
        }
        let mut affected = policies_of(tables, kept.groups().into_iter());
        if now.is_none() {
            affected.extend(policy_of_label(&kept.lease));
        }
        affected
    }
}

/// Returns the prefix of a snapshot Lease's name; `None` for any other Lease.
fn snapshot_lease_prefix(lease: &Lease) -> Option<&str> {
    let name = lease.metadata.name.as_deref()?;
    name.strip_suffix(jobs::FULL_LEASE_SUFFIX)
        .or_else(|| name.strip_suffix(jobs::DELTA_LEASE_SUFFIX))
}

/// Whether an EndpointSlice of a Service is ready.
#[derive(Debug)]
pub struct KeptSlice {
    service: NamespacedName,
    /// Whether an endpoint of the slice is ready.
    is_ready: bool,
    /// When the watch saw the slice become ready again. A slice that it sees for the first time has not come back.
    pub recovered_at: Option<DateTime<Utc>>,
}

impl Kept for KeptSlice {
    type Object = EndpointSlice;
    const IS_OWN: bool = false;

    fn table(tables: &mut Tables) -> &mut Table<Self> {
        &mut tables.slices
    }

    fn keep(slice: EndpointSlice, before: Option<&Self>, now: DateTime<Utc>) -> Option<Self> {
        let service = label(&slice, SERVICE_NAME)?;
        let service = NamespacedName::new(slice.namespace().unwrap_or_default(), service);
        // An endpoint without the condition counts as ready.
        let is_ready = slice.endpoints.iter().flatten().any(|endpoint| {
            let conditions = endpoint.conditions.as_ref();
            conditions.and_then(|c| c.ready).unwrap_or(true)
        });
        let has_recovered = is_ready && before.is_some_and(|before| !before.is_ready);
        let earlier = before.and_then(|before| before.recovered_at);
        Some(KeptSlice {
            service,
            is_ready,
            recovered_at: has_recovered.then_some(now).or(earlier),
        })
    }

    fn groups(&self) -> Vec<Group> {
        vec![Group::Service(self.service.clone())]
    }

    /// A Service that becomes ready again affects the policies whose etcd is behind it.
    fn affected(tables: &Tables, before: Option<&Self>, now: Option<&Self>) -> Vec<NamespacedName> {
        let recovered_at = |slice: Option<&Self>| slice.and_then(|slice| slice.recovered_at);
        match now {
            Some(slice) if recovered_at(now) != recovered_at(before) => {
                policies_of(tables, slice.groups().into_iter())
            }
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_names_its_service() {
        let parsed = |endpoint: &str| service(endpoint, "own");
        let named = |namespace: &str, name: &str| Some(NamespacedName::new(namespace, name));
        assert_eq!(parsed("https://etcd:2379"), named("own", "etcd"));
        assert_eq!(parsed("https://etcd.kube:2379"), named("kube", "etcd"));
        assert_eq!(parsed("http://etcd.kube.svc:2379"), named("kube", "etcd"));
        assert_eq!(
            parsed("https://etcd-0.etcd-peer.kube.svc.cluster.local:2379"),
            named("kube", "etcd-peer")
        );
        for none in [
            "http://127.0.0.1:2379",
            "https://svc",
            "https://a.b.example.com:2379",
            "",
        ] {
            assert_eq!(parsed(none), None, "{none}");
        }
    }

    #[test]
    fn a_large_object_is_cut() {
        let mut lease = Lease::default();
        lease.metadata.name = Some("p-full-snap".to_owned());
        let large = "x".repeat(1 << 20);
        let annotations = [
            ("deltafold.io/a", large.as_str()),
            ("other", "b"),
            ("deltafold.io/c", "d"),
        ];
        let annotations = annotations.map(|(k, v)| (k.to_owned(), v.to_owned()));
        lease.metadata.annotations = Some(annotations.into());
        let kept = KeptLease::keep(lease, None, Utc::now()).unwrap();
        let annotations = kept.lease.metadata.annotations.unwrap();
        assert_eq!(
            annotations.into_keys().collect::<Vec<_>>(),
            ["deltafold.io/c"]
        );

        let mut pod = Pod::default();
        let mut status = PodStatus {
            message: Some(large.clone()),
            ..PodStatus::default()
        };
        status.container_statuses = Some(vec![ContainerStatus {
            name: "sidecar".to_owned(),
            ..ContainerStatus::default()
        }]);
        pod.status = Some(status);
        let status = Pod::keep(pod, None, Utc::now()).unwrap().status.unwrap();
        assert!(status.message.unwrap().len() <= MAX_TEXT);
        assert_eq!(status.container_statuses.unwrap(), []);
    }
}
