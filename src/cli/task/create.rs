//! `deltafold task create`: the arguments of each type, and the task that is made of them.

use super::super::kubernetes::{ClusterArgs, parse_time_span, wait_for};
use super::super::{Ended, Output, parse_options, parse_time, print_outcome, yes_or_no};
use super::{TaskOutcome, ended, tell};
use crate::base::Cancel;
use crate::controller::api::{
    CopyBackupsConfig, EtcdBackupPolicy, EtcdBackupTask, EtcdBackupTaskSpec, IfNeeded,
    MaintenanceConfig, OnDemandCompactionConfig, OnDemandSnapshotConfig, RestoreConfig, SecretRef,
    SnapshotType, StoreSpec, StoreVolume, TaskConfig, TaskType, VerifyConfig, VerifyLevel,
    WaitForFinalSnapshot,
};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::Person;
use chrono::{DateTime, Utc};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand, ValueEnum};
use kube::ResourceExt;
use kube::api::{ObjectMeta, PostParams};
use std::time::Duration;

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
    #[arg(long, value_name = "DURATION", value_parser = parse_time_span)]
    ttl: Option<Duration>,
    /// Wait until it has ended, as `deltafold task wait`
    #[arg(long, value_parser = yes_or_no)]
    wait: bool,
    /// With --wait: no longer than this; 0s: as long as it takes
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = parse_time_span)]
    timeout: Duration,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A snapshot of the live etcd
#[derive(Debug, Args)]
struct SnapshotArgs {
    /// The whole database, or what has changed since the last snapshot
    #[arg(long = "type", value_name = "TYPE", default_value = "full")]
    kind: Kind,
    /// Mark it as the last snapshot of a cluster that is given up
    #[arg(long = "final", value_parser = yes_or_no)]
    is_final: bool,
    /// The store was another cluster's backup, whose place this one has taken
    #[arg(long, value_parser = yes_or_no)]
    take_over: bool,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// The whole database
    Full,
    /// The events since the last snapshot
    Delta,
}

/// The deltas become a new full snapshot
#[derive(Debug, Args)]
struct CompactionArgs {
    /// Fold up to this revision [default: the newest]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    revision: Option<i64>,
    /// What is kept of older revisions: latest, all, or a number of them [default: the policy's]
    #[arg(long, value_name = "HISTORY")]
    keep_history: Option<String>,
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
    /// No more than so many backups, the newest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_backups: Option<u32>,
    /// None that are older than so many days
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..))]
    max_backup_age: Option<u32>,
    /// Wait first until the newest full snapshot is marked final
    #[arg(long, value_parser = yes_or_no)]
    wait_for_final: bool,
    /// Copy what is there when it has not come for so long; 0s: wait for ever
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = parse_time_span)]
    wait_timeout: Duration,
    #[command(flatten)]
    common: CommonArgs,
}

/// A member's data directory is restored into a PersistentVolumeClaim
#[derive(Debug, Args)]
struct RestoreArgs {
    /// The PersistentVolumeClaim
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    claim: String,
    /// The data directory's path in it [default: default.etcd]
    #[arg(long, value_name = "PATH")]
    sub_path: Option<String>,
    /// The state at this revision [default: the newest]
    #[arg(long, value_name = "N", conflicts_with = "time", value_parser = clap::value_parser!(i64).range(1..))]
    revision: Option<i64>,
    /// The state after the last event whose time is not after this
    #[arg(long, value_name = "RFC3339", value_parser = parse_time)]
    time: Option<DateTime<Utc>>,
    /// The member's name [default: default]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// All members of the new cluster: NAME=PEER-URL,… [default: this one alone]
    #[arg(long, value_name = "MEMBERS")]
    initial_cluster: Option<String>,
    /// Tells clusters with the same URLs apart
    #[arg(long, value_name = "TOKEN")]
    initial_cluster_token: Option<String>,
    /// This member's peer URLs
    #[arg(long, value_name = "URLS")]
    initial_advertise_peer_urls: Option<String>,
    /// Raise the newest revision by so many, past all that clients have seen
    #[arg(long, value_name = "N", requires = "mark_compacted", value_parser = clap::value_parser!(i64).range(1..))]
    bump_revision: Option<i64>,
    /// Count all below the raised revision as compacted, so that clients list anew
    #[arg(long, requires = "bump_revision", value_parser = yes_or_no)]
    mark_compacted: bool,
    /// Only where the volume holds no sound member, after a look at it
    #[arg(long, value_name = "LOOK")]
    if_needed: Option<Look>,
    /// The user and group that own the restored files [default: 65532]
    #[arg(long, value_name = "UID", value_parser = clap::value_parser!(i64).range(0..=2_147_483_647))]
    run_as_user: Option<i64>,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Look {
    /// Files, headers, WAL
    Sanity,
    /// Every page, and HashKV against the backup
    Full,
}

/// The backup is verified
#[derive(Debug, Args)]
struct VerifyArgs {
    /// How thoroughly [default: the policy's, or checksums]
    #[arg(long, value_name = "LEVEL")]
    level: Option<Level>,
    /// Compare it with the live etcd, too
    #[arg(long, value_parser = yes_or_no)]
    against_cluster: bool,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Level {
    /// Names alone
    Names,
    /// Every byte
    Checksums,
    /// What it folds to
    Fold,
}

/// The live etcd is compacted, defragmented, or both
#[derive(Debug, Args)]
struct MaintenanceArgs {
    /// History to keep: a number of revisions, or a duration
    #[arg(long, value_name = "HISTORY", required_unless_present = "defrag")]
    compact_keep: Option<String>,
    /// Defragment members that waste such a part of their database (0 to 1), or always
    #[arg(long, value_name = "FRACTION")]
    defrag: Option<String>,
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
        let none = TaskConfig::default();
        Ok(match self {
            CreateType::Snapshot(a) => {
                let config = TaskConfig {
                    on_demand_snapshot: Some(OnDemandSnapshotConfig {
                        type_: match a.kind {
                            Kind::Full => SnapshotType::Full,
                            Kind::Delta => SnapshotType::Delta,
                        },
                        final_: a.is_final,
                        take_over: a.take_over,
                    }),
                    ..none
                };
                (
                    &a.common,
                    TaskType::OnDemandSnapshot,
                    "snapshot",
                    Some(config),
                )
            }
            CreateType::Compaction(a) => {
                let wanted = OnDemandCompactionConfig {
                    revision: a.revision,
                    keep_history: a.keep_history.clone(),
                };
                let is_plain = wanted == OnDemandCompactionConfig::default();
                let config = TaskConfig {
                    on_demand_compaction: Some(wanted),
                    ..none
                };
                let config = (!is_plain).then_some(config);
                (&a.common, TaskType::OnDemandCompaction, "compact", config)
            }
            CreateType::Copy(a) => {
                let config = TaskConfig {
                    copy_backups: Some(a.config()?),
                    ..none
                };
                (&a.common, TaskType::CopyBackups, "copy", Some(config))
            }
            CreateType::Restore(a) => {
                let config = TaskConfig {
                    restore: Some(a.config()),
                    ..none
                };
                (&a.common, TaskType::Restore, "restore", Some(config))
            }
            CreateType::Verify(a) => {
                let wanted = VerifyConfig {
                    level: a.level.map(|level| match level {
                        Level::Names => VerifyLevel::Names,
                        Level::Checksums => VerifyLevel::Checksums,
                        Level::Fold => VerifyLevel::Fold,
                    }),
                    against_cluster: a.against_cluster,
                };
                let is_plain = wanted == VerifyConfig::default();
                let config = TaskConfig {
                    verify: Some(wanted),
                    ..none
                };
                let config = (!is_plain).then_some(config);
                (&a.common, TaskType::Verify, "verify", config)
            }
            CreateType::Maintenance(a) => {
                let config = TaskConfig {
                    maintenance: Some(MaintenanceConfig {
                        compact_keep: a.compact_keep.clone(),
                        defrag: a.defrag.clone(),
                    }),
                    ..none
                };
                (&a.common, TaskType::Maintenance, "maintain", Some(config))
            }
        })
    }

    fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let (common, type_, word, config) = self.parts()?;
        let ttl = common.ttl.map(|d| i64::try_from(d.as_secs()));
        let too_long = || Error::new(Reason::Usage, "--ttl is too long");
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

/// A name that was mistyped is told at once. The controller would wait for a policy to come.
async fn check_policy(person: &Person, name: &str) -> Result<()> {
    let policies = person.api::<EtcdBackupPolicy>();
    let found = person.ask("read the policy", policies.get_opt(name)).await;
    match found {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(Error::new(
            Reason::Usage,
            format!(
                "there is no EtcdBackupPolicy {name} in the namespace {}; `deltafold policy status` tells which there are",
                person.namespace()
            ),
        )),
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
            max_backups: self.max_backups.map(i64::from),
            max_backup_age: self.max_backup_age.map(i64::from),
            wait_for_final_snapshot: self.wait_for_final.then(|| WaitForFinalSnapshot {
                enabled: true,
                timeout: (!zero).then(|| format!("{}s", self.wait_timeout.as_secs().max(1))),
            }),
        })
    }
}

impl RestoreArgs {
    fn config(&self) -> RestoreConfig {
        RestoreConfig {
            claim_name: self.claim.clone(),
            sub_path: self.sub_path.clone(),
            revision: self.revision,
            time: self.time,
            name: self.name.clone(),
            initial_cluster: self.initial_cluster.clone(),
            initial_cluster_token: self.initial_cluster_token.clone(),
            initial_advertise_peer_urls: self.initial_advertise_peer_urls.clone(),
            bump_revision: self.bump_revision,
            mark_compacted: self.mark_compacted,
            if_needed: self.if_needed.map(|look| match look {
                Look::Sanity => IfNeeded::Sanity,
                Look::Full => IfNeeded::Full,
            }),
            run_as_user: self.run_as_user,
        }
    }
}
