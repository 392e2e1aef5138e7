//! Which policies a change concerns: one small rule a kind of object.
//!
//! Each is given the object before and after the change, and gives the policies to look at. Nothing is decided here.

use super::Tables;
use super::claims;
use crate::controller::api::{Claimed, EtcdBackupPolicy, EtcdBackupTask};
use crate::controller::jobs;
use crate::controller::names::{Key, key, label};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Resource, ResourceExt};
use std::collections::BTreeSet;

/// Of a Service's EndpointSlices.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// So many policies at most hear of one change at once.
const MOST_CONCERNED: usize = 100;

/// An object before and after a change; `None` if it was or is not there.
#[derive(Debug)]
pub struct Change<'a, T> {
    /// As it was.
    pub before: Option<&'a T>,
    /// As it is.
    pub now: Option<&'a T>,
}

impl<'a, T> Change<'a, T> {
    fn both(&self) -> impl Iterator<Item = &'a T> {
        self.before.into_iter().chain(self.now)
    }
}

/// A policy concerns itself; and those that want the same place, if that or a claim on it has changed.
pub fn of_policy(tables: &Tables, change: &Change<'_, EtcdBackupPolicy>) -> Vec<Key> {
    // A status is written by the controller itself.
    let spec = |policy: &EtcdBackupPolicy| {
        let metadata = &policy.metadata;
        let is_going = metadata.deletion_timestamp.is_some();
        (metadata.uid.clone(), metadata.generation, is_going)
    };
    let has_changed = change.before.map(spec) != change.now.map(spec);
    let this = change.both().take(usize::from(has_changed)).map(key);
    let mut concerned: Vec<Key> = this.collect();
    let place = |policy: &EtcdBackupPolicy| {
        let claims = [Claimed::Store, Claimed::Leases]
            .map(|what| (claims::rivals(policy, what), claims::claim(policy, what)));
        (claims, policy.metadata.deletion_timestamp.is_some())
    };
    if change.before.map(place) == change.now.map(place) {
        return concerned;
    }
    for policy in change.both() {
        let groups = [
            claims::rivals(policy, Claimed::Store),
            claims::rivals(policy, Claimed::Leases),
            claims::everywhere(policy),
        ];
        for group in groups {
            concerned.extend(
                tables
                    .policies
                    .members(&group)
                    .take(MOST_CONCERNED)
                    .cloned(),
            );
            concerned.extend(tables.policies.members(&group).next_back().cloned());
        }
    }
    concerned
}

/// A task concerns its policy.
pub fn of_task(change: &Change<'_, EtcdBackupTask>) -> Vec<Key> {
    let policies = change.both().map(policy_of_task);
    policies.collect()
}

/// The policy of a task, which may not be there.
pub fn policy_of_task(task: &EtcdBackupTask) -> Key {
    (
        task.namespace().unwrap_or_default(),
        task.spec.policy.clone(),
    )
}

/// What was made for a policy concerns it: by its label.
pub fn of_made<K: Resource>(change: &Change<'_, K>) -> Vec<Key> {
    change.both().filter_map(policy_of).collect()
}

/// The policy that an object of ours was made for.
pub fn policy_of<K: Resource>(object: &K) -> Option<Key> {
    let policy = label(object, jobs::LABEL_POLICY)?;
    Some((object.namespace().unwrap_or_default(), policy.to_owned()))
}

/// A Lease concerns the policies whose snapshots it tells of; and whoever it was made for, when it is gone.
pub fn of_lease(tables: &Tables, change: &Change<'_, Lease>) -> Vec<Key> {
    let Some(lease) = change.now.or(change.before) else {
        return Vec::new();
    };
    if change.before.map(told) == change.now.map(told) {
        return Vec::new();
    }
    let mut concerned: Vec<Key> = match change.now {
        None => policy_of(lease).into_iter().collect(),
        Some(_) => Vec::new(),
    };
    if let Some(prefix) = lease_prefix(lease) {
        let group = claims::with_leases(&lease.namespace().unwrap_or_default(), prefix);
        concerned.extend(
            tables
                .policies
                .members(&group)
                .take(MOST_CONCERNED)
                .cloned(),
        );
    }
    concerned
}

/// What comes before the suffix in a snapshot Lease's name.
pub fn lease_prefix(lease: &Lease) -> Option<&str> {
    let name = lease.metadata.name.as_deref()?;
    name.strip_suffix(jobs::FULL_LEASE_SUFFIX)
        .or_else(|| name.strip_suffix(jobs::DELTA_LEASE_SUFFIX))
}

/// What a Lease tells.
type Told<'a> = (
    (Option<&'a str>, Option<String>),
    Option<&'a std::collections::BTreeMap<String, String>>,
);

fn told(lease: &Lease) -> Told<'_> {
    (sign_of_life(lease), lease.metadata.annotations.as_ref())
}

/// The holder and the time of the last renewal. That what has accumulated is told anew is no sign of life.
fn sign_of_life(lease: &Lease) -> (Option<&str>, Option<String>) {
    let spec = lease.spec.as_ref();
    let renewed = spec.and_then(|s| s.renew_time.as_ref());
    (
        spec.and_then(|s| s.holder_identity.as_deref()),
        renewed.map(|t| t.0.to_string()),
    )
}

/// Whether a Lease that was there before was renewed.
pub fn was_renewed(change: &Change<'_, Lease>) -> bool {
    let (Some(before), Some(now)) = (change.before, change.now) else {
        return false;
    };
    sign_of_life(before) != sign_of_life(now)
}

/// The Service of an EndpointSlice.
pub fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let service = label(slice, SERVICE_NAME)?;
    Some((slice.namespace().unwrap_or_default(), service.to_owned()))
}

/// A Service that becomes ready again concerns the policies whose etcd is behind it. One that was ready when it was
/// first seen has not come back. `others` are its other EndpointSlices.
pub fn of_slice(
    tables: &Tables,
    change: &Change<'_, EndpointSlice>,
    others: &BTreeSet<bool>,
) -> Vec<Key> {
    let was_known = change.before.is_some() || !others.is_empty();
    let ready =
        |slice: Option<&EndpointSlice>| slice.is_some_and(is_ready) || others.contains(&true);
    if !was_known || ready(change.before) || !ready(change.now) {
        return Vec::new();
    }
    let service = change.now.and_then(service_of);
    let policies = service.iter().flat_map(|service| {
        let group = claims::behind(service);
        let members = tables.policies.members(&group).take(MOST_CONCERNED);
        members.cloned().collect::<Vec<_>>()
    });
    policies.collect()
}

/// Whether an endpoint is ready; not told counts as ready.
pub fn is_ready(slice: &EndpointSlice) -> bool {
    let endpoints = slice.endpoints.iter().flatten();
    let mut conditions = endpoints.map(|e| e.conditions.as_ref());
    conditions.any(|c| c.and_then(|c| c.ready).unwrap_or(true))
}
