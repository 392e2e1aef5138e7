//! Leases of a policy: the two snapshot Leases, and locks for stores that cannot keep one.
//!
//! They are created empty, and Jobs renew them. `facts::leases` reads the snapshot Leases.

use super::super::api::EtcdBackupPolicy;
use super::{DELTA_LEASE_SUFFIX, FULL_LEASE_SUFFIX, metadata, policy_labels, policy_name};
use crate::store::open::Family;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};

/// Returns the prefix of the names of the snapshot Leases: `snapshot.leasePrefix`, or else the policy's name.
pub fn lease_prefix(policy: &EtcdBackupPolicy) -> &str {
    let snapshot = policy.spec.snapshot.as_ref();
    snapshot
        .and_then(|s| s.lease_prefix.as_deref())
        .unwrap_or_else(|| policy_name(policy))
}

/// Returns the names of the two snapshot Leases: for full snapshots, and for deltas.
pub fn lease_names(policy: &EtcdBackupPolicy) -> (String, String) {
    let prefix = lease_prefix(policy);
    (
        format!("{prefix}{FULL_LEASE_SUFFIX}"),
        format!("{prefix}{DELTA_LEASE_SUFFIX}"),
    )
}

/// Returns the two snapshot Leases, empty. They are created only if they do not exist: those of etcd-druid
/// are used as they are.
pub fn leases(policy: &EtcdBackupPolicy) -> [Lease; 2] {
    let (full, delta) = lease_names(policy);
    [full, delta].map(|name| empty_lease(policy, &name))
}

/// Returns the Leases that serve as locks, empty. There are none if the store keeps locks itself.
pub fn lock_leases(policy: &EtcdBackupPolicy) -> Vec<Lease> {
    let operations: &[&str] = match (needs_lock_leases(policy), &policy.spec.etcd) {
        (false, _) => &[],
        (true, None) => &["gc"],
        (true, Some(_)) => &["follow", "gc", "maintain"],
    };
    let names = operations.iter().map(|op| lock_lease_name(policy, op));
    names.map(|name| empty_lease(policy, &name)).collect()
}

/// Returns whether the store cannot keep a lock.
pub(super) fn needs_lock_leases(policy: &EtcdBackupPolicy) -> bool {
    let store = &policy.spec.store;
    let has_no_conditions =
        store.options.get("conditional_put").map(String::as_str) == Some("disabled");
    has_no_conditions || Family::of(&store.url).is_some_and(|family| !family.keeps_locks())
}

pub(super) fn lock_lease_name(policy: &EtcdBackupPolicy, operation: &str) -> String {
    format!("{}-{operation}-lock", policy_name(policy))
}

fn empty_lease(policy: &EtcdBackupPolicy, name: &str) -> Lease {
    Lease {
        metadata: metadata(policy, name, policy_labels(policy)),
        spec: Some(LeaseSpec::default()),
    }
}
