//! `deltafold controller`: its arguments.

use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::controller::jobs::{Allowed, Settings};
use crate::controller::{ControllerMetrics, Options, plan, run};
use crate::error::Result;
use crate::kubernetes::Client;
use crate::store::lock::identity;
use crate::telemetry::endpoint::{BindAddress, serve_text};
use clap::Args;
use tokio::runtime::Handle;

/// Make Jobs of backup policies and tasks, in Kubernetes
///
/// Watches EtcdBackupPolicies, EtcdBackupTasks and snapshot Leases, and keeps CronJobs and Jobs of them. It
/// reads no snapshot and talks to no etcd: the Jobs do. Several replicas elect a leader.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  In a cluster, with all that belongs to it:
      deltafold manifests install | kubectl apply -f -
  On a developer's machine, by KUBECONFIG, for one namespace:
      deltafold controller --namespace default --leader-elect false --job-image deltafold:dev

The exit code is 0 where it was stopped, 75 where another replica has taken over: start it again.")]
pub(super) struct ControllerArgs {
    /// A namespace that is looked after; may be given again [default: all]
    #[arg(long, value_name = "NAMESPACE", value_delimiter = ',', value_parser = clap::builder::NonEmptyStringValueParser::new())]
    namespace: Vec<String>,
    /// The image of the Jobs, where a policy names none
    #[arg(long, value_name = "IMAGE", default_value = concat!("deltafold:", env!("CARGO_PKG_VERSION")))]
    job_image: String,
    /// Policies that are looked at at once, with their tasks: this, --compaction-workers and --task-workers together
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u16).range(1..=100))]
    policy_workers: u16,
    /// As many policies more at once; 0 turns compaction by threshold off
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u16).range(0..=100))]
    compaction_workers: u16,
    /// As many policies more at once; 0 turns tasks off
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u16).range(0..=100))]
    task_workers: u16,
    /// Jobs of thresholds and tasks at once, over all policies; restores have a tenth more, at least one; 0 for no limit
    #[arg(long, value_name = "N", default_value = "20")]
    max_jobs: u32,
    /// As many of one namespace; 0 for half of them, as long as there are policies of other namespaces
    #[arg(long, value_name = "N", default_value = "0")]
    max_jobs_per_namespace: u32,
    /// Whether several replicas elect a leader, by a Lease
    #[arg(long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set, value_parser = yes_or_no)]
    leader_elect: bool,
    /// The leader's Lease
    #[arg(long, value_name = "NAME", default_value = "deltafold-controller")]
    leader_lease: String,
    /// The namespace of the leader's Lease [default: the Pod's, or the kubeconfig's]
    #[arg(long, value_name = "NAMESPACE")]
    lease_namespace: Option<String>,
    /// Serve /metrics (Prometheus), /healthz and /readyz here: 127.0.0.1:8080, or :8080 for all addresses
    #[arg(long, value_name = "ADDRESS")]
    metrics_bind_address: Option<BindAddress>,
    /// Refuse what is not allowed also if it ran before; without it such policies go on until their spec changes
    #[arg(long, value_parser = yes_or_no)]
    enforce_existing: bool,
    #[command(flatten)]
    allowed: Allowed,
}

impl ControllerArgs {
    pub(super) fn run(&self, cancel: &Cancel) -> Result<()> {
        let handle = Handle::current();
        let metrics = ControllerMetrics::new();
        let address = self.metrics_bind_address.as_ref();
        let server = address
            .map(|address| serve_text(address, metrics.exposition(), &handle, cancel))
            .transpose()?;
        let client =
            Client::connect_to_watch(self.lease_namespace.as_deref(), handle, cancel.clone())?;
        let leader_lease = self
            .leader_elect
            .then(|| (client.namespace().to_owned(), self.leader_lease.clone()));
        let workers = [
            self.policy_workers,
            self.compaction_workers,
            self.task_workers,
        ];
        let options = Options {
            plan: plan::Options {
                settings: Settings::new(self.job_image.clone()),
                namespaces: self.namespace.clone(),
                allowed: self.allowed.clone(),
                enforce_existing: self.enforce_existing,
                compactions: self.compaction_workers > 0,
                tasks: self.task_workers > 0,
            },
            leader_lease,
            identity: identity(),
            workers: workers.into_iter().map(usize::from).sum(),
            max_jobs: self.max_jobs,
            max_jobs_per_namespace: self.max_jobs_per_namespace,
        };
        run(&client, options, &metrics, server.as_ref(), cancel)
    }
}
