//! Which Leases of Kubernetes a command renews.

use crate::error::Result;
use crate::kubernetes::{self, Client, SnapshotLeases};
use crate::store::Store;
use crate::store::lock::{self, Lock};
use clap::Args;
use std::time::Duration;

/// The Leases that tell how far the backup is.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(super) struct LeaseArgs {
    /// Have the Leases NAME-full-snap and NAME-delta-snap tell how far the backup is
    ///
    /// As etcd-backup-restore does and etcd-druid reads it. The API is found by KUBECONFIG, or in a Pod by
    /// its service account, which needs get, create and patch on leases. A Lease that cannot be renewed is
    /// a warning.
    #[arg(long, value_name = "NAME", value_parser = parse_prefix)]
    snapshot_lease_prefix: Option<String>,
    /// Where the Leases are [default: the kubeconfig's or the Pod's]
    #[arg(long, value_name = "NAMESPACE")]
    lease_namespace: Option<String>,
}

impl LeaseArgs {
    /// The Leases to renew, if any.
    pub(super) fn snapshot_leases(&self) -> Option<SnapshotLeases> {
        let prefix = self.snapshot_lease_prefix.clone()?;
        Some(SnapshotLeases {
            prefix,
            namespace: self.lease_namespace.clone(),
        })
    }
}

impl LeaseArgs {
    /// Where Leases are, if not where the kubeconfig or the Pod says.
    pub(super) fn namespace(&self) -> Option<&str> {
        self.lease_namespace.as_deref()
    }
}

/// Where the lock is.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(super) struct LockArgs {
    /// Let this Lease be the lock [default: an object in the store]
    #[arg(long, value_name = "NAME", value_parser = parse_prefix)]
    lock_lease: Option<String>,
}

impl LockArgs {
    /// The Lease as the lock, if one is named; else an object in the store.
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

/// The begin of a name that Kubernetes takes.
fn parse_prefix(s: &str) -> Result<String, String> {
    /// Of 253, the longer suffix left out.
    const LONGEST: usize = 242;
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
    let begins_well = s.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    match begins_well && s.len() <= LONGEST && s.chars().all(fits) && !s.ends_with('.') {
        true => Ok(s.to_owned()),
        false => Err(
            "give the begin of a Lease's name: lower-case letters, digits, - and ., such as etcd-main"
                .to_owned(),
        ),
    }
}
