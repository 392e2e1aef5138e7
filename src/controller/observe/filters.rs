//! Event filters: which policies a change of an object affects, one function for each kind of object.
//!
//! Each gets the object before and after the change, and returns the policies to reconcile. They decide
//! nothing about these. Called by `watch`.

use super::Tables;
use super::claims;
use crate::controller::api::{Claim, Claimed, EtcdBackupPolicy, EtcdBackupTask};
use crate::controller::jobs;
use crate::controller::names::{Key, key, label};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Resource, ResourceExt};
use std::collections::BTreeMap;

/// The label of an EndpointSlice for the name of its Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The most policies that one change affects beyond the object's own, so that one tenant cannot keep all
/// workers busy.
const MAX_AFFECTED: usize = 100;

/// An object before and after a change; `None` if it did not exist then.
#[derive(Debug)]
pub struct Change<'a, T> {
    /// The object before.
    pub before: Option<&'a T>,
    /// The object now.
    pub now: Option<&'a T>,
}

impl<'a, T> Change<'a, T> {
    pub(super) fn both(&self) -> impl Iterator<Item = &'a T> {
        self.before.into_iter().chain(self.now)
    }
}

/// A policy affects itself if its spec has changed; and the policies with the same store or Leases, if these
/// or a claim on them have changed.
pub fn affected_by_policy(tables: &Tables, change: &Change<'_, EtcdBackupPolicy>) -> Vec<Key> {
    // Without the status, which the controller itself writes.
    let spec_version = |policy: &EtcdBackupPolicy| {
        let metadata = &policy.metadata;
        let is_deleting = metadata.deletion_timestamp.is_some();
        (metadata.uid.clone(), metadata.generation, is_deleting)
    };
    let has_changed = change.before.map(spec_version) != change.now.map(spec_version);
    let mut affected: Vec<Key> = match has_changed {
        true => change.both().take(1).map(key).collect(),
        false => Vec::new(),
    };
    if change.before.map(claim_state) == change.now.map(claim_state) {
        return affected;
    }
    for policy in change.both() {
        for group in [
            claims::contenders(policy, Claimed::Store),
            claims::contenders(policy, Claimed::Leases),
            claims::same_location(policy),
        ] {
            affected.extend(first_members(tables, &group));
            affected.extend(tables.policies.members(&group).next_back().cloned());
        }
    }
    affected
}

/// The two claimed values of a policy, each with its claim; and whether the policy is being deleted.
type ClaimState = ([(Key, Option<Claim>); 2], bool);

fn claim_state(policy: &EtcdBackupPolicy) -> ClaimState {
    let with_claim = |what| {
        (
            claims::contenders(policy, what),
            claims::claim(policy, what),
        )
    };
    let is_deleting = policy.metadata.deletion_timestamp.is_some();
    (
        [Claimed::Store, Claimed::Leases].map(with_claim),
        is_deleting,
    )
}

fn first_members(tables: &Tables, group: &Key) -> impl Iterator<Item = Key> {
    let members = tables.policies.members(group).take(MAX_AFFECTED);
    members.cloned()
}

/// A task affects its policy.
pub fn affected_by_task(change: &Change<'_, EtcdBackupTask>) -> Vec<Key> {
    change.both().map(policy_of_task).collect()
}

/// Returns the policy that a task names. It may not exist.
pub fn policy_of_task(task: &EtcdBackupTask) -> Key {
    (
        task.namespace().unwrap_or_default(),
        task.spec.policy.clone(),
    )
}

/// An object that was created for a policy affects the policy of its label.
pub fn affected_by_created<K: Resource>(change: &Change<'_, K>) -> Vec<Key> {
    change.both().filter_map(policy_of).collect()
}

/// Returns the policy of an object's label.
pub fn policy_of<K: Resource>(object: &K) -> Option<Key> {
    let policy = label(object, jobs::LABEL_POLICY)?;
    Some((object.namespace().unwrap_or_default(), policy.to_owned()))
}

/// A snapshot Lease affects the policies that use it. A Lease that is deleted also affects the policy of its
/// label.
pub fn affected_by_lease(tables: &Tables, change: &Change<'_, Lease>) -> Vec<Key> {
    let Some(lease) = change.now.or(change.before) else {
        return Vec::new();
    };
    if change.before.map(contents) == change.now.map(contents) {
        return Vec::new();
    }
    let mut affected: Vec<Key> = match change.now {
        None => policy_of(lease).into_iter().collect(),
        Some(_) => Vec::new(),
    };
    if let Some(prefix) = lease_prefix(lease) {
        let group = claims::lease_users(&lease.namespace().unwrap_or_default(), prefix);
        affected.extend(first_members(tables, &group));
    }
    affected
}

/// Returns the prefix of a snapshot Lease's name; `None` for any other Lease.
pub fn lease_prefix(lease: &Lease) -> Option<&str> {
    let name = lease.metadata.name.as_deref()?;
    name.strip_suffix(jobs::FULL_LEASE_SUFFIX)
        .or_else(|| name.strip_suffix(jobs::DELTA_LEASE_SUFFIX))
}

/// The holder of a Lease and the time of its last renewal.
type Renewal<'a> = (Option<&'a str>, Option<String>);

/// Returns the parts of a Lease that the controller reads.
fn contents(lease: &Lease) -> (Renewal<'_>, Option<&BTreeMap<String, String>>) {
    (renewal(lease), lease.metadata.annotations.as_ref())
}

/// Returns the holder and the time of the last renewal. Changed annotations alone are not a renewal.
fn renewal(lease: &Lease) -> Renewal<'_> {
    let spec = lease.spec.as_ref();
    let holder = spec.and_then(|s| s.holder_identity.as_deref());
    let renew_time = spec.and_then(|s| s.renew_time.as_ref());
    (holder, renew_time.map(|t| t.0.to_string()))
}

/// Returns whether a change is the renewal of a Lease that existed before.
pub fn was_renewed(change: &Change<'_, Lease>) -> bool {
    let (Some(before), Some(now)) = (change.before, change.now) else {
        return false;
    };
    renewal(before) != renewal(now)
}

/// Returns the Service of an EndpointSlice.
pub fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let service = label(slice, SERVICE_NAME)?;
    Some((slice.namespace().unwrap_or_default(), service.to_owned()))
}

/// A Service that becomes ready again affects the policies whose etcd is behind it. `others` says of each
/// other EndpointSlice of the Service whether it is ready. A Service that the watch sees for the first time
/// has not come back.
pub fn affected_by_slice(
    tables: &Tables,
    change: &Change<'_, EndpointSlice>,
    others: &[bool],
) -> Vec<Key> {
    let was_known = change.before.is_some() || !others.is_empty();
    let is_service_ready =
        |slice: Option<&EndpointSlice>| slice.is_some_and(is_ready) || others.contains(&true);
    if !was_known || is_service_ready(change.before) || !is_service_ready(change.now) {
        return Vec::new();
    }
    match change.now.and_then(service_of) {
        Some(service) => first_members(tables, &claims::behind_service(&service)).collect(),
        None => Vec::new(),
    }
}

/// Returns whether an endpoint of the slice is ready. An endpoint without the condition counts as ready.
pub fn is_ready(slice: &EndpointSlice) -> bool {
    let endpoints = slice.endpoints.iter().flatten();
    let mut conditions = endpoints.map(|e| e.conditions.as_ref());
    conditions.any(|c| c.and_then(|c| c.ready).unwrap_or(true))
}
