//! `deltafold task create`: the arguments of each task type, and the EtcdBackupTask made from them.
//!
//! The controller runs the task; here it is only created, and with --wait waited for.

use super::super::kubernetes::{ClusterArgs, wait_for};
use super::super::{Ended, Output, parse_options};
use super::{print_task, wait_until_final};
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, Span, TextValue, duration};
use crate::controller::api::{
    CopyBackupsConfig, EtcdBackupPolicy, EtcdBackupTask, EtcdBackupTaskSpec,
    GarbageCollectionConfig, MaintenanceConfig, OnDemandCompactionConfig, OnDemandSnapshotConfig,
    RestoreConfig, SecretRef, StoreSpec, StoreVolume, TaskConfig, TaskType, VerifyConfig,
    WaitForFinalSnapshot,
};
use crate::controller::jobs::LABEL_TASK;
use crate::error::{Reason, Result};
use crate::kubernetes::UserClient;
use crate::ops::copy::plan::CopyLimits;
use crate::ops::report::ReportBuilder;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use kube::ResourceExt;
use kube::api::{ObjectMeta, PostParams};
use std::time::Duration;

/// The shortest time that a task can wait for a final snapshot.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// Maximum length of the policy's name in a task's generated name.
const MAX_NAME_PART: usize = 36;

/// Create a task and print its name
///
/// With --wait, the exit code is 0 if the task succeeded; that of its Job (docs/exit-codes.md) if it failed, or
/// 143 if Kubernetes ended the Job; 75 if it was rejected because the same task is already waiting or running,
/// or after --timeout, and 78 if it was rejected for another reason.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Take a full snapshot before an upgrade, and wait for the result:
      deltafold task create snapshot --policy main --wait
  Restore the state at noon into a PersistentVolumeClaim that no etcd uses:
      deltafold task create restore --policy main --claim data-etcd-0 --time 2026-11-20T12:00:00Z")]
pub(super) struct CreateArgs {
    #[command(subcommand)]
    type_: CreateType,
}

#[derive(Debug, Subcommand)]
enum CreateType {
    #[command(visible_alias = "OnDemandSnapshot")]
    Snapshot(SnapshotArgs),
    #[command(visible_alias = "OnDemandCompaction")]
    Compaction(CompactionArgs),
    #[command(visible_alias = "CopyBackups")]
    Copy(CopyArgs),
    #[command(visible_alias = "Restore")]
    Restore(RestoreArgs),
    #[command(visible_alias = "Verify")]
    Verify(VerifyArgs),
    #[command(visible_alias = "Maintenance")]
    Maintenance(MaintenanceArgs),
    #[command(visible_alias = "GarbageCollection")]
    Gc(GcArgs),
}

/// The arguments of all task types.
#[derive(Debug, Args)]
#[command(next_help_heading = "Task")]
struct CommonArgs {
    /// Name of the EtcdBackupPolicy to run the task for
    ///
    /// DELTAFOLD_POLICY also sets --policy of `deltafold gc`, where it is a retention policy.
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    policy: String,
    /// Name of the task [default: the policy's name, the type and a random suffix]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    task_name: Option<String>,
    /// Further options of the command that the Job runs, such as `-- --mark-compacted --bump-revision 1000000000` of a
    /// restore; docs/controller.md lists them
    #[arg(last = true, value_name = "OPTION")]
    args: Vec<String>,
    /// Fail if no Pod of the task has started after this time [default: 10m]
    #[arg(long, value_name = "DURATION", value_parser = clap::value_parser!(TextValue<Span>))]
    start_deadline: Option<TextValue<Span>>,
    /// Delete the task this long after it has ended [default: 24h]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    ttl: Option<Duration>,
    /// Wait until the task has ended
    #[arg(long, value_parser = yes_or_no)]
    wait: bool,
    /// With --wait: maximum time to wait; 0s: no limit
    #[arg(long, requires = "wait", value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    timeout: Duration,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Take a snapshot of the live etcd
#[derive(Debug, Args)]
struct SnapshotArgs {
    #[command(flatten)]
    config: OnDemandSnapshotConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// Fold the deltas into a new full snapshot
#[derive(Debug, Args)]
struct CompactionArgs {
    #[command(flatten)]
    config: OnDemandCompactionConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// Copy a backup to or from the policy's store
#[derive(Debug, Args)]
struct CopyArgs {
    /// URL of the source [default: the policy's store]
    ///
    /// DELTAFOLD_FROM also sets --from of other commands.
    #[arg(long, value_name = "URL", required_unless_present = "to")]
    from: Option<String>,
    /// Secret of the source
    #[arg(long, value_name = "NAME", requires = "from")]
    from_secret: Option<String>,
    /// Set an option of the source; repeatable
    #[arg(long, value_name = "KEY=VALUE", requires = "from")]
    from_option: Vec<String>,
    /// PersistentVolumeClaim of the source, if its URL is file:///path
    #[arg(long, value_name = "NAME", requires = "from")]
    from_claim: Option<String>,
    /// URL of the target [default: the policy's store]
    ///
    /// DELTAFOLD_TO also sets --to of other commands.
    #[arg(long, value_name = "URL")]
    to: Option<String>,
    /// Secret of the target
    #[arg(long, value_name = "NAME", requires = "to")]
    to_secret: Option<String>,
    /// Set an option of the target; repeatable
    #[arg(long, value_name = "KEY=VALUE", requires = "to")]
    to_option: Vec<String>,
    /// PersistentVolumeClaim of the target, if its URL is file:///path
    #[arg(long, value_name = "NAME", requires = "to")]
    to_claim: Option<String>,
    #[command(flatten)]
    most: CopyLimits,
    /// Wait until the newest full snapshot of the source is marked final, then copy
    #[arg(long, value_parser = yes_or_no)]
    wait_for_final: bool,
    /// With --wait-for-final: copy after this time even without a final snapshot; 0s: wait without limit
    #[arg(long, requires = "wait_for_final", value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    wait_timeout: Duration,
    #[command(flatten)]
    common: CommonArgs,
}

/// Restore the backup into a PersistentVolumeClaim, as the data directory of a member
#[derive(Debug, Args)]
struct RestoreArgs {
    #[command(flatten)]
    config: RestoreConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// Verify the backup
#[derive(Debug, Args)]
struct VerifyArgs {
    #[command(flatten)]
    config: VerifyConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// Defragment the live etcd
#[derive(Debug, Args)]
struct MaintenanceArgs {
    #[command(flatten)]
    config: MaintenanceConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// Remove old snapshots by the policy's retention rules
#[derive(Debug, Args)]
struct GcArgs {
    #[command(flatten)]
    config: GarbageCollectionConfig,
    #[command(flatten)]
    common: CommonArgs,
}

impl CreateArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.type_.run(cancel, output)
    }
}

impl CreateType {
    /// The common arguments, the task type, a short word for it in names, and its configuration.
    fn parts(&self) -> Result<(&CommonArgs, TaskType, &'static str, Option<TaskConfig>)> {
        let mut config = TaskConfig::default();
        let (common, type_, word) = match self {
            CreateType::Snapshot(a) => {
                config.on_demand_snapshot = Some(a.config.clone());
                (&a.common, TaskType::OnDemandSnapshot, "snapshot")
            }
            CreateType::Compaction(a) => {
                config.on_demand_compaction = Some(a.config.clone()).filter(is_given);
                (&a.common, TaskType::OnDemandCompaction, "compact")
            }
            CreateType::Copy(a) => {
                config.copy_backups = Some(a.config()?);
                (&a.common, TaskType::CopyBackups, "copy")
            }
            CreateType::Restore(a) => {
                config.restore = Some(a.config.clone());
                (&a.common, TaskType::Restore, "restore")
            }
            CreateType::Verify(a) => {
                config.verify = Some(a.config.clone()).filter(is_given);
                (&a.common, TaskType::Verify, "verify")
            }
            CreateType::Maintenance(a) => {
                config.maintenance = Some(a.config.clone());
                (&a.common, TaskType::Maintenance, "maintain")
            }
            CreateType::Gc(a) => {
                config.garbage_collection = Some(a.config.clone()).filter(is_given);
                (&a.common, TaskType::GarbageCollection, "gc")
            }
        };
        Ok((common, type_, word, Some(config).filter(is_given)))
    }

    fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let (common, type_, word, config) = self.parts()?;
        let ttl = common.ttl.map(|d| i64::try_from(d.as_secs()));
        let ttl = ttl.transpose();
        let spec = EtcdBackupTaskSpec {
            policy: common.policy.clone(),
            type_,
            config,
            args: common.args.clone(),
            start_deadline: common.start_deadline.clone(),
            ttl_seconds_after_finished: ttl
                .map_err(|_| Reason::Usage.error("--ttl is too long"))?,
        };
        let mut part: String = common.policy.chars().take(MAX_NAME_PART).collect();
        part.truncate(part.trim_end_matches(['-', '.']).len());
        let task = EtcdBackupTask {
            metadata: ObjectMeta {
                name: common.task_name.clone(),
                generate_name: match common.task_name {
                    Some(_) => None,
                    None => Some(format!("{part}-{word}-")),
                },
                ..ObjectMeta::default()
            },
            spec,
            status: None,
        };
        let clock = ReportBuilder::start();
        wait_for(cancel, async {
            let client = common.cluster.client().await?;
            check_policy(&client, &common.policy).await?;
            let tasks = client.api::<EtcdBackupTask>();
            let params = PostParams::default();
            let created = client
                .ask("create the task", tasks.create(&params, &task))
                .await?;
            if common.wait {
                tracing::info!(
                    task = created.name_any(),
                    "created the task; waiting for it"
                );
                let name = created.name_any();
                let task = wait_until_final(&client, &name, common.timeout).await?;
                return print_task(&task, clock, output);
            }
            let (name, namespace) = (created.name_any(), client.namespace());
            tracing::info!("watch it: kubectl get ebt {name} --namespace {namespace} --watch");
            tracing::info!(
                "its logs: kubectl logs --selector {LABEL_TASK}={name} --namespace {namespace} --tail -1"
            );
            print_task(&created, clock, output)
        })
    }
}

fn is_given<T: Default + PartialEq>(config: &T) -> bool {
    *config != T::default()
}

/// Fails if the policy does not exist. The controller would wait for it, but the name is probably mistyped.
async fn check_policy(client: &UserClient, name: &str) -> Result<()> {
    let policies = client.api::<EtcdBackupPolicy>();
    match client.ask("read the policy", policies.get_opt(name)).await {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(Reason::Usage.error(format!(
            "there is no EtcdBackupPolicy {name} in the namespace {}; `kubectl get ebp` lists the policies",
            client.namespace()
        ))),
        // A user who can create tasks may lack the permission to read policies.
        Err(e) if e.reason() == Reason::PermissionDenied => Ok(()),
        Err(e) => Err(e),
    }
}

impl CopyArgs {
    fn config(&self) -> Result<CopyBackupsConfig> {
        let timeout = if self.wait_timeout.is_zero() {
            None
        } else {
            Some(Span(self.wait_timeout.max(MIN_WAIT)).into())
        };
        Ok(CopyBackupsConfig {
            source_store: self.source()?,
            target_store: self.target()?,
            most: self.most.clone(),
            wait_for_final_snapshot: self.wait_for_final.then_some(WaitForFinalSnapshot {
                enabled: true,
                timeout,
            }),
        })
    }

    fn source(&self) -> Result<Option<StoreSpec>> {
        let Some(url) = &self.from else {
            return Ok(None);
        };
        let options = parse_options(&self.from_option, "--from-option")?;
        let (secret, claim) = (&self.from_secret, &self.from_claim);
        Ok(Some(store_spec(url, secret, options, claim)))
    }

    fn target(&self) -> Result<Option<StoreSpec>> {
        let Some(url) = &self.to else {
            return Ok(None);
        };
        let options = parse_options(&self.to_option, "--to-option")?;
        let (secret, claim) = (&self.to_secret, &self.to_claim);
        Ok(Some(store_spec(url, secret, options, claim)))
    }
}

fn store_spec(
    url: &str,
    secret: &Option<String>,
    options: Vec<(String, String)>,
    claim: &Option<String>,
) -> StoreSpec {
    StoreSpec {
        url: url.to_owned(),
        secret_ref: secret.clone().map(|name| SecretRef { name }),
        options: options.into_iter().collect(),
        volume: claim.clone().map(|claim| StoreVolume {
            persistent_volume_claim: Some(claim),
            host_path: None,
        }),
    }
}
