//! `deltafold controller`: its arguments.
//!
//! The controller itself is `controller::run`.

use super::parse::check;
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::controller::jobs::{Allowed, Settings};
use crate::controller::{ControllerMetrics, Options, decide, run};
use crate::error::Result;
use crate::kubernetes::Client;
use crate::store::lock::identity;
use crate::telemetry::endpoint::{BindAddress, serve_text};
use clap::Args;
use tokio::runtime::Handle;

/// Run the Kubernetes controller of backup policies and tasks
///
/// Watches EtcdBackupPolicies, EtcdBackupTasks and snapshot Leases, and creates the CronJobs and Jobs for
/// them. The Jobs read snapshots and connect to etcd; the controller does neither. Several replicas elect a
/// leader. jobs/install.yaml and the Helm chart install it with its resource definitions and rights.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Run it on your own machine with KUBECONFIG, for one namespace:
      deltafold controller --namespace default --leader-elect false --job-image deltafold:dev

Exit codes: 0 if it was stopped, 75 if another replica became the leader (start it again). \
docs/exit-codes.md lists all others.")]
pub(super) struct ControllerArgs {
    /// Watch this namespace only; repeatable [default: all]
    ///
    /// DELTAFOLD_NAMESPACE also sets --namespace of other commands.
    #[arg(long, value_name = "NAMESPACE", value_delimiter = ',', value_parser = clap::builder::NonEmptyStringValueParser::new())]
    namespace: Vec<String>,
    /// Image of Jobs whose policy does not set one
    #[arg(long, value_name = "IMAGE", default_value = concat!("deltafold:", env!("CARGO_PKG_VERSION")))]
    job_image: String,
    /// Number of policies, each with its tasks, to reconcile at the same time
    ///
    /// The numbers of --compaction-workers and --task-workers are added to it.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u16).range(1..=100))]
    policy_workers: u16,
    /// Number added to --policy-workers; 0 disables compactions by threshold
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u16).range(0..=100))]
    compaction_workers: u16,
    /// Number added to --policy-workers; 0 disables tasks
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u16).range(0..=100))]
    task_workers: u16,
    /// Maximum number of concurrent Jobs for thresholds and tasks, over all policies; 0 for no limit
    ///
    /// Restores do not wait, and do not count.
    #[arg(long, value_name = "N", default_value = "20")]
    max_jobs: u32,
    /// Maximum number of these Jobs per namespace; 0 for half of --max-jobs
    ///
    /// With 0, there is no limit per namespace if all policies are in one namespace.
    #[arg(long, value_name = "N", default_value = "0")]
    max_jobs_per_namespace: u32,
    /// Elect a leader among the replicas with a Lease
    #[arg(long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set, value_parser = yes_or_no)]
    leader_elect: bool,
    /// Name of the leader's Lease
    #[arg(long, value_name = "NAME", default_value = "deltafold-controller")]
    leader_lease: String,
    /// Namespace of the leader's Lease [default: that of the Pod or the kubeconfig]
    #[arg(long, value_name = "NAMESPACE")]
    lease_namespace: Option<String>,
    /// Serve /metrics (Prometheus), /healthz and /readyz on this address, such as 127.0.0.1:8080, or :8080
    /// for all interfaces
    #[arg(long, value_name = "ADDRESS")]
    metrics_bind_address: Option<BindAddress>,
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
            decide: decide::Options {
                settings: Settings {
                    check_command: check,
                    ..Settings::new(self.job_image.clone())
                },
                namespaces: self.namespace.clone(),
                allowed: self.allowed.clone(),
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
