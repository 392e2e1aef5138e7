//! `maintain`: defragments the members of a cluster, and disarms the NOSPACE alarm.
//!
//! The steps: observe the cluster; defragment one member at a time, the leader last, while all members are healthy;
//! disarm the alarm if there is space. Two runs on one cluster never overlap.

mod alarms;
mod defragmentation;
mod lock;
#[cfg(test)]
mod tests;

pub use alarms::no_space_remains;
pub use defragmentation::{
    Decision, Defrag, DefragPlan, MaintainedMember, plan_defragmentation, unfit_members,
};

use crate::base::TextValue;
use crate::base::opt::DEFRAG;
use crate::error::{Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::connect::{AttemptError as RequestFailed, Connector};
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use clap::Args;
use lock::MaintenanceLock;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// The time between two observations of a cluster that is waited for.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// What keeps the databases of an etcd small.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Upkeep {
    /// Defragment members that waste at least this fraction of their database (0 to 1), or `always`
    #[arg(long, value_name = "FRACTION")]
    pub defrag: TextValue<Defrag>,
}

/// The options of `maintain`.
#[derive(Debug, Clone)]
pub struct Options {
    /// When a member is defragmented.
    pub upkeep: Upkeep,
    /// The quota of the members' databases in bytes. Required for servers before 3.6, which do not report it.
    pub quota: Option<u64>,
    /// Only report what would be done.
    pub dry_run: bool,
    /// The directory of the lock file, if there is neither a store nor a Lease.
    pub temp_dir: PathBuf,
    /// The Lease in Kubernetes that is the lock.
    pub lock_lease: Option<LockLease>,
}

/// A Lease in Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockLease {
    /// The Lease's name.
    pub name: String,
    /// The Lease's namespace; `None` for that of the kubeconfig or of the Pod.
    pub namespace: Option<String>,
}

/// The result of `maintain`. The fields are a contract.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Maintained {
    /// Whether this was a dry run.
    pub dry_run: bool,
    /// The members in the order of defragmentation, the leader last. Empty if the operation failed before
    /// the defragmentation was planned.
    pub members: Vec<MaintainedMember>,
    /// The names of the members whose NOSPACE alarm was disarmed.
    pub alarms_cleared: Vec<String>,
}

impl Maintained {
    /// Whether anything was done, or would be done in a dry run.
    fn did_something(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|m| m.decision == Decision::Defragment) || !self.alarms_cleared.is_empty()
    }
}

/// Maintains a cluster. If a store is given, it keeps the lock.
///
/// # Errors
/// If nothing was done, fails with `Usage` if the limit of the waste is invalid; with `LockHeld` if another
/// run is at work; with the errors of etcd connections and of the store. A later failure is in the report.
pub fn run(
    connector: &Connector,
    store: Option<&Context>,
    options: &Options,
) -> Result<Report<Maintained>> {
    let defrag = options.upkeep.defrag.check();
    let defrag = defrag.map_err(|e| Reason::Usage.error(format!("{DEFRAG} {e}")))?;
    let clock = ReportBuilder::start();
    let cluster = Cluster::observe(connector)?;
    let lock = if options.dry_run {
        MaintenanceLock::NotNeeded
    } else {
        MaintenanceLock::acquire(connector, store, options, &cluster)?
    };
    let mut maintenance = Maintenance {
        connector,
        options,
        defrag,
        lock,
        shrunk: Vec::new(),
        clock,
        outcome: Maintained {
            dry_run: options.dry_run,
            ..Maintained::default()
        },
    };
    let error = maintenance.run(cluster).err();
    let did_something = maintenance.outcome.did_something();
    Ok(maintenance
        .clock
        .ended(maintenance.outcome, did_something, error))
}

/// One run of `maintain`.
struct Maintenance<'a> {
    connector: &'a Connector,
    options: &'a Options,
    defrag: Defrag,
    lock: MaintenanceLock,
    /// The IDs of the members whose databases became smaller.
    shrunk: Vec<u64>,
    clock: ReportBuilder,
    outcome: Maintained,
}

impl Maintenance<'_> {
    fn run(&mut self, cluster: Cluster) -> Result<()> {
        let cluster = self.defragment(cluster)?;
        self.disarm(&cluster)
    }
}

/// Waits for [`POLL_INTERVAL`].
///
/// # Errors
/// Fails with `Terminated` if the operation is cancelled.
fn pause(connector: &Connector) -> Result<()> {
    let pause = async { tokio::time::sleep(POLL_INTERVAL).await };
    connector.wait(pause).map_err(RequestFailed::into_error)
}
