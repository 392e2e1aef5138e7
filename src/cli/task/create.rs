//! `deltafold task create`: the arguments of each type, and the task that is made of them.

use super::super::kubernetes::{ClusterArgs, wait_for};
use super::super::{Ended, Output, parse_options, print_outcome};
use super::{TaskOutcome, ended, tell};
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, Span, duration};
use crate::controller::api::{
    CopyBackupsConfig, EtcdBackupPolicy, EtcdBackupTask, EtcdBackupTaskSpec, MaintenanceConfig,
    OnDemandCompactionConfig, OnDemandSnapshotConfig, RestoreConfig, SecretRef, StoreSpec,
    StoreVolume, TaskConfig, TaskType, VerifyConfig, WaitForFinalSnapshot,
};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::UserClient;
use crate::ops::copy::plan::CopyLimits;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use kube::ResourceExt;
use kube::api::{ObjectMeta, PostParams};
use std::time::Duration;

/// The shortest time that a task waits for a final snapshot.
const SECOND: Duration = Duration::from_secs(1);
/// Of a name that the API server completes: so long may the policy's part be.
const NAME_PART: usize = 36;

/// Create a task; its name is printed
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  A full snapshot before an upgrade; the exit code is that of the work:
      deltafold task create snapshot --policy main --wait
  The state of noon, into a claim that no etcd uses:
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
}

/// What tasks of all types take.
#[derive(Debug, Args)]
struct CommonArgs {
    /// The policy whose etcd and store it is about
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    policy: String,
    /// The task's name [default: the policy's and the type, with something random]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    task_name: Option<String>,
    /// It is deleted so long after it has ended [default: a day]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    ttl: Option<Duration>,
    /// Wait until it has ended, as `deltafold task wait`
    #[arg(long, value_parser = yes_or_no)]
    wait: bool,
    /// With --wait: no longer than this; 0s: as long as it takes
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    timeout: Duration,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A snapshot of the live etcd
#[derive(Debug, Args)]
struct SnapshotArgs {
    #[command(flatten)]
    config: OnDemandSnapshotConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// The deltas become a new full snapshot
#[derive(Debug, Args)]
struct CompactionArgs {
    #[command(flatten)]
    config: OnDemandCompactionConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// The backup is copied from one store to another; one of them may be the policy's
#[derive(Debug, Args)]
struct CopyArgs {
    /// Where from [default: the policy's store]
    #[arg(long, value_name = "URL", required_unless_present = "to")]
    from: Option<String>,
    /// The Secret of the store that is copied from
    #[arg(long, value_name = "NAME", requires = "from")]
    from_secret: Option<String>,
    /// A setting of the store that is copied from; may be given again
    #[arg(long, value_name = "KEY=VALUE", requires = "from")]
    from_option: Vec<String>,
    /// The claim with the store that is copied from, where it is file:///path
    #[arg(long, value_name = "NAME", requires = "from")]
    from_claim: Option<String>,
    /// Where to [default: the policy's store]
    #[arg(long, value_name = "URL")]
    to: Option<String>,
    /// The Secret of the store that is copied to
    #[arg(long, value_name = "NAME", requires = "to")]
    to_secret: Option<String>,
    /// A setting of the store that is copied to; may be given again
    #[arg(long, value_name = "KEY=VALUE", requires = "to")]
    to_option: Vec<String>,
    /// The claim with the store that is copied to, where it is file:///path
    #[arg(long, value_name = "NAME", requires = "to")]
    to_claim: Option<String>,
    #[command(flatten)]
    most: CopyLimits,
    /// Wait first until the newest full snapshot is marked final
    #[arg(long, value_parser = yes_or_no)]
    wait_for_final: bool,
    /// Copy what is there when it has not come for so long; 0s: wait for ever
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    wait_timeout: Duration,
    #[command(flatten)]
    common: CommonArgs,
}

/// A member's data directory is restored into a PersistentVolumeClaim
#[derive(Debug, Args)]
struct RestoreArgs {
    #[command(flatten)]
    config: RestoreConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// The backup is verified
#[derive(Debug, Args)]
struct VerifyArgs {
    #[command(flatten)]
    config: VerifyConfig,
    #[command(flatten)]
    common: CommonArgs,
}

/// The live etcd is compacted, defragmented, or both
#[derive(Debug, Args)]
struct MaintenanceArgs {
    #[command(flatten)]
    config: MaintenanceConfig,
    #[command(flatten)]
    common: CommonArgs,
}

impl CreateArgs {
    /// Gives the failure whose outcome is printed already, if it is one.
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.type_.run(cancel, output)
    }
}

impl CreateType {
    /// What all of them have; the type, a short word for it, and its configuration.
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
        };
        Ok((common, type_, word, Some(config).filter(is_given)))
    }

    fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let (common, type_, word, config) = self.parts()?;
        let ttl = common.ttl.map(|d| i64::try_from(d.as_secs()));
        let too_long = || Reason::Usage.error("--ttl is too long");
        let spec = EtcdBackupTaskSpec {
            policy: common.policy.clone(),
            type_,
            config,
            ttl_seconds_after_finished: ttl.transpose().map_err(|_| too_long())?,
        };
        let mut part: String = common.policy.chars().take(NAME_PART).collect();
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
        wait_for(cancel, async {
            let person = common.cluster.person(false).await?;
            check_policy(&person, &common.policy).await?;
            let tasks = person.api::<EtcdBackupTask>();
            let params = PostParams::default();
            let created = person
                .ask("create the task", tasks.create(&params, &task))
                .await?;
            if common.wait {
                tracing::info!(
                    task = created.name_any(),
                    "created the task; waiting for it"
                );
                let ended = ended(&person, &created.name_any(), common.timeout).await?;
                return tell(&ended, output);
            }
            print_outcome(output, &TaskOutcome::of(&created), |o| {
                format!("{}\n", o.name)
            })
        })
    }
}

fn is_given<T: Default + PartialEq>(config: &T) -> bool {
    *config != T::default()
}

/// A name that was mistyped is told at once. The controller would wait for a policy to come.
async fn check_policy(person: &UserClient, name: &str) -> Result<()> {
    let policies = person.api::<EtcdBackupPolicy>();
    let found = person.ask("read the policy", policies.get_opt(name)).await;
    match found {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(Reason::Usage.error(format!(
            "there is no EtcdBackupPolicy {name} in the namespace {}; `deltafold policy status` tells which there are",
            person.namespace()
        ))),
        // Who may create tasks need not be allowed to read policies.
        Err(e) if e.reason() == Reason::PermissionDenied => Ok(()),
        Err(e) => Err(e),
    }
}

impl CopyArgs {
    fn config(&self) -> Result<CopyBackupsConfig> {
        let store = |url: &Option<String>,
                     secret: &Option<String>,
                     options: &[String],
                     claim: &Option<String>,
                     flag: &str| {
            let Some(url) = url else { return Ok(None) };
            let options = parse_options(options, flag)?;
            Ok::<_, Error>(Some(StoreSpec {
                url: url.clone(),
                secret_ref: secret.clone().map(|name| SecretRef { name }),
                options: options.into_iter().collect(),
                volume: claim.clone().map(|claim| StoreVolume {
                    persistent_volume_claim: Some(claim),
                    host_path: None,
                }),
            }))
        };
        let zero = self.wait_timeout.is_zero();
        Ok(CopyBackupsConfig {
            source_store: store(
                &self.from,
                &self.from_secret,
                &self.from_option,
                &self.from_claim,
                "--from-option",
            )?,
            target_store: store(
                &self.to,
                &self.to_secret,
                &self.to_option,
                &self.to_claim,
                "--to-option",
            )?,
            most: self.most.clone(),
            wait_for_final_snapshot: self.wait_for_final.then(|| WaitForFinalSnapshot {
                enabled: true,
                timeout: (!zero).then(|| Span(self.wait_timeout.max(SECOND)).into()),
            }),
        })
    }
}
