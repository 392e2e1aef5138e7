//! Which Leases of Kubernetes a command renews.

use crate::kubernetes::SnapshotLeases;
use clap::Args;

/// The Leases that tell how far the backup is.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(super) struct LeaseArgs {
    /// Have the Leases NAME-full-snap and NAME-delta-snap tell how far the backup is
    ///
    /// As etcd-backup-restore does and etcd-druid reads it. The API is found by KUBECONFIG, or in a Pod by
    /// its service account, which needs get, create and patch on leases. A Lease that cannot be renewed is
    /// a warning.
    #[arg(long, env = "DELTAFOLD_SNAPSHOT_LEASE_PREFIX", value_name = "NAME", value_parser = parse_prefix)]
    snapshot_lease_prefix: Option<String>,
    /// Where the Leases are [default: the kubeconfig's or the Pod's]
    #[arg(long, env = "DELTAFOLD_LEASE_NAMESPACE", value_name = "NAMESPACE")]
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
