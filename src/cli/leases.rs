//! The flags of Kubernetes Leases: the snapshot Leases, and the Lease that serves as a lock.
//!
//! `snapshot` and `compact` use them.

use crate::error::Result;
use crate::kubernetes::{self, Client, SnapshotLeases};
use crate::store::Store;
use crate::store::lock::{self, Lock};
use clap::Args;
use std::time::Duration;

/// The Leases that record the newest snapshots.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(super) struct LeaseArgs {
    /// Record the newest snapshots in the Leases NAME-full-snap and NAME-delta-snap
    ///
    /// etcd-backup-restore writes these Leases, too, and etcd-druid reads them. The API server is that of
    /// KUBECONFIG, or in a Pod that of its ServiceAccount, which needs get, create and patch on leases. If a
    /// Lease cannot be renewed, the command only warns.
    #[arg(long, value_name = "NAME", value_parser = parse_prefix)]
    snapshot_lease_prefix: Option<String>,
    /// Namespace of the Leases [default: that of the kubeconfig or the Pod]
    #[arg(long, requires = "snapshot_lease_prefix", value_name = "NAMESPACE")]
    lease_namespace: Option<String>,
}

impl LeaseArgs {
    /// The Leases to renew, if --snapshot-lease-prefix is given.
    pub(super) fn snapshot_leases(&self) -> Option<SnapshotLeases> {
        let prefix = self.snapshot_lease_prefix.clone()?;
        Some(SnapshotLeases {
            prefix,
            namespace: self.lease_namespace.clone(),
        })
    }

    /// The namespace of the Leases, if it is not that of the kubeconfig or the Pod.
    pub(super) fn namespace(&self) -> Option<&str> {
        self.lease_namespace.as_deref()
    }
}

/// The lock that lets one of several processes work.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(super) struct LockArgs {
    /// Lock with this Lease, so that only one process works at a time [default: an object in the store]
    #[arg(long, value_name = "NAME", value_parser = parse_prefix)]
    lock_lease: Option<String>,
}

impl LockArgs {
    /// The name of the Lease.
    pub(super) fn name(&self) -> Option<String> {
        self.lock_lease.clone()
    }

    /// The lock: a Lease if --lock-lease is given, otherwise the object `name` in the store.
    pub(super) fn lock(
        &self,
        store: &Store,
        name: &str,
        namespace: Option<&str>,
        duration: Duration,
    ) -> Result<Lock> {
        let identity = lock::identity();
        let Some(lease) = &self.lock_lease else {
            return Lock::new(store, name, &identity, duration);
        };
        let client = Client::connect(namespace, store.handle().clone(), store.cancel().clone())?;
        Ok(kubernetes::lease::lock(&client, lease, &identity, duration))
    }
}

/// Parses the name or prefix of a Lease.
fn parse_prefix(s: &str) -> Result<String, String> {
    /// Kubernetes allows 253 characters; `-delta-snap` takes 11 of them.
    const MAX_LENGTH: usize = 242;
    let is_alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_allowed = |c: char| is_alphanumeric(c) || c == '-' || c == '.';
    let is_valid = s.starts_with(is_alphanumeric)
        && s.len() <= MAX_LENGTH
        && s.chars().all(is_allowed)
        && !s.ends_with('.');
    if is_valid {
        Ok(s.to_owned())
    } else {
        Err(
            "a Lease's name has lower-case letters, digits, - and . only, such as etcd-main"
                .to_owned(),
        )
    }
}
