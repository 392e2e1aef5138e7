//! `deltafold maintain`: its arguments, and its result as text.
//!
//! The operation itself is `ops::maintain`.

use super::endpoints::EndpointArgs;
use super::metrics::MetricsArgs;
use super::render::Render;
use super::{AccessArgs, Ended, Output, print_report};
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, byte_size};
use crate::ops::maintain::{LockLease, Maintained, Options, Upkeep, run};
use crate::telemetry::metrics::Metrics;
use clap::Args;

/// Defragment the members of a live etcd, and disarm NOSPACE alarms
///
/// maintain defragments the members that waste too much space, one at a time and the leader last. It begins with
/// the next member only when all others are healthy and up to date. With a NOSPACE alarm, it defragments
/// members even if they waste little, and disarms the alarm once there is space again. Two runs never overlap.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show which members would be defragmented because they waste half of their database:
      deltafold maintain --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt \\
          --key client.key --defrag 0.5 --dry-run
  Defragment all members, unless maintain is running on another machine with the same store:
      deltafold maintain --endpoints http://127.0.0.1:2379 --store s3://backups/etcd-main \\
          --defrag always

Compaction frees the space that a defragmentation releases. maintain does not compact: etcd does, with its \
--auto-compaction-mode and --auto-compaction-retention. Kubernetes API servers compact their etcd every 5 minutes. \
A member does not serve requests while it is defragmented, about 10 s per GiB.

Exit codes: 0 on success, 75 if a member is not healthy or another maintain is running. docs/exit-codes.md \
lists all others.")]
pub(super) struct MaintainArgs {
    #[command(flatten)]
    upkeep: Upkeep,
    /// Storage quota of the members (etcd's --quota-backend-bytes) [default: the quota that etcd reports]
    ///
    /// A member whose database is larger than 80 % of the quota is defragmented even if it wastes less than
    /// --defrag says. etcd before 3.6 does not report its quota.
    #[arg(long, value_name = "SIZE", value_parser = byte_size::parse)]
    quota_backend_bytes: Option<u64>,
    /// Only show what would be done
    #[arg(long, value_parser = yes_or_no)]
    dry_run: bool,
    #[command(flatten)]
    live: EndpointArgs,
    /// Keep the lock in this store (URL of the folder that holds v2/), so that runs on several machines never
    /// overlap
    #[arg(long, value_name = "URL", help_heading = "Store")]
    store: Option<String>,
    #[command(flatten)]
    access: AccessArgs,
    /// Lock with this Lease, so that two runs never overlap [default: an object in the store; without --store,
    /// a lock on this machine]
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes")]
    lock_lease: Option<String>,
    /// Namespace of the Lease [default: that of the kubeconfig or the Pod]
    #[arg(
        long,
        requires = "lock_lease",
        value_name = "NAMESPACE",
        help_heading = "Kubernetes"
    )]
    lease_namespace: Option<String>,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl MaintainArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.metrics.around("maintain", cancel, |metrics| {
            self.maintain(cancel, metrics, output)
        })
    }

    fn maintain(&self, cancel: &Cancel, metrics: &Metrics, output: Output) -> Ended {
        let connector = self.live.connector(cancel)?;
        let store = self.store.as_deref();
        let ctx = store
            .map(|url| self.access.context(url, cancel))
            .transpose()?;
        let options = Options {
            upkeep: self.upkeep.clone(),
            quota: self.quota_backend_bytes,
            dry_run: self.dry_run,
            temp_dir: self.access.temp_dir()?,
            lock_lease: self.lock_lease.clone().map(|name| LockLease {
                name,
                namespace: self.lease_namespace.clone(),
            }),
        };
        let report = run(&connector, ctx.as_ref(), &options)?;
        for m in &report.members {
            if let (Some(before), Some(after)) = (m.db_size_before, m.db_size_after) {
                metrics.defragmented(&m.name, before.saturating_sub(after));
            }
        }
        print_report(output, report)
    }
}

impl Render for Maintained {}
