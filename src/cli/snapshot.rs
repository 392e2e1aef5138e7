//! `deltafold snapshot full|delta|follow|save`: their arguments, and their results as text.
//!
//! The operations themselves are in `ops::snapshot`.

use super::bandwidth::BandwidthArgs;
use super::encryption::PlaintextArg;
use super::endpoints::EndpointArgs;
use super::leases::{LeaseArgs, LockArgs};
use super::metrics::MetricsArgs;
use super::render::Render;
use super::signals::end_signals;
use super::store_access::NthStore;
use super::{AccessArgs, Ended, Output, print_report};
use crate::backup::codec::CompressionChoice;
use crate::backup::trust::Trust;
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, duration};
use crate::error::{Reason, Result};
use crate::ops::report::Report;
use crate::ops::schedule::Schedule;
use crate::ops::snapshot::follow::{self, FollowOptions, Followed, follow};
use crate::ops::snapshot::{
    DeltaOptions, MetricsReporter, SnapshotSettings, TakenSnapshots, delta, full, save,
};
use crate::prefix::Context;
use crate::store;
use crate::telemetry::metrics::Metrics;
use clap::builder::Resettable;
use clap::{ArgGroup, Args, Subcommand};
use std::path::PathBuf;
use std::time::Duration;
use tokio::signal::unix::Signal;

/// Back up a live etcd: take full and delta snapshots
///
/// Full snapshots come from etcd's Maintenance API, which adds a SHA-256; deltas come from a watch. Nothing
/// is written to etcd. A snapshot gets its name only when it is completely uploaded.
#[derive(Debug, Args)]
pub(super) struct SnapshotArgs {
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    Full(Box<FullArgs>),
    Delta(Box<DeltaArgs>),
    Follow(Box<FollowArgs>),
    Save(Box<SaveArgs>),
}

/// The arguments of all three commands.
#[derive(Debug, Args)]
struct CommonArgs {
    #[command(flatten)]
    live: EndpointArgs,
    /// URL of the folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, swift://…,
    /// file:///dir or a path
    #[arg(long, value_name = "URL", help_heading = "Store")]
    store: String,
    /// Compression of the snapshots: same (as the newest snapshot, or gzip for the first), none, gzip, zstd or
    /// zstd:LEVEL; gzip is written for zlib and lzw
    #[arg(
        long,
        value_name = "METHOD",
        default_value = "same",
        help_heading = "Store"
    )]
    compression: CompressionChoice,
    /// Continue the backup of another cluster that this cluster has replaced
    ///
    /// The first snapshot records the cluster's ID in the store; snapshots of other clusters are refused. A
    /// cluster that was restored with other peer URLs or another token has a new ID: --take-over records it.
    /// If the ID is the same, the flag has no effect.
    #[arg(long, help_heading = "Store", value_parser = yes_or_no)]
    take_over: bool,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    plaintext: PlaintextArg,
    #[command(flatten)]
    bandwidth: BandwidthArgs,
    #[command(flatten)]
    leases: LeaseArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl CommonArgs {
    /// Opens the store, and prepares the connection to etcd without using it.
    fn open(&self, cancel: &Cancel) -> Result<(Context, SnapshotSettings)> {
        let connector = self.live.connector(cancel)?;
        store::open::refuse_layout(&self.store, "--store")?;
        store::open::make_folder(
            &self.store,
            "--store",
            &self.access.options(NthStore::ONLY)?,
        )?;
        let mut ctx = self.access.context(&self.store, cancel)?;
        ctx.store = self.bandwidth.limited(ctx.store);
        ctx.trust = if ctx.keys.are_given() {
            self.plaintext.trust(true)
        } else {
            Trust::OnlyPlain
        };
        let settings = SnapshotSettings {
            connector,
            compression: self.compression,
            bandwidth: self.bandwidth.limit(),
            leases: self.leases.snapshot_leases(),
            take_over: self.take_over,
        };
        Ok((ctx, settings))
    }
}

/// Take a full snapshot
///
/// First, the HashKV of all members is compared at one revision. A member that differs from the majority is
/// reported and not used. The snapshot comes from a raft follower if there is one; if that fails, from the
/// next member. It is named after the exact revision that it holds. In a prefix with deltas, the changes since the
/// last one are saved as a delta first, so that every revision stays restorable.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Take a full snapshot of a cluster of three members:
      deltafold snapshot full --store s3://backups/etcd-main --cacert ca.crt --cert client.crt \\
          --key client.key --endpoints https://10.0.0.1:2379,https://10.0.0.2:2379,https://10.0.0.3:2379

The exit code is 0 on success. docs/exit-codes.md lists all others.")]
struct FullArgs {
    /// Mark the snapshot as final: the last one of a cluster that is shut down
    #[arg(long = "final", value_parser = yes_or_no)]
    is_final: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// Take a delta snapshot of the changes since the last snapshot
///
/// Reads the changes since the last saved revision. If nothing has changed, nothing is written.
///
/// A full snapshot is taken instead, and the result says why, if the store is empty, if the newest full is
/// older than --max-full-age, if etcd has compacted the changes, or if etcd's history differs from the saved
/// one or ends before it. Different histories are never joined.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Save the changes, for example from a CronJob every five minutes:
      deltafold snapshot delta --store s3://backups/etcd-main --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key

The exit code is 0 on success. docs/exit-codes.md lists all others.")]
struct DeltaArgs {
    #[command(flatten)]
    options: DeltaOptions,
    #[command(flatten)]
    common: CommonArgs,
}

/// Take delta snapshots continuously, and full snapshots by a schedule
///
/// Runs until it is stopped, as a Deployment with one replica or as a sidecar. It survives the loss of members,
/// leader changes, compactions, and outages of the store: during an outage, events wait in memory, then in the
/// temporary directory, and then in etcd. If etcd compacts them before they are saved, a full snapshot is
/// taken. SIGTERM saves a last delta. If several followers use one prefix, a lock lets only one of them work at
/// a time.
#[derive(Debug, Args)]
// The namespace is that of either Lease.
#[command(
    group(ArgGroup::new("any_lease").args(["snapshot_lease_prefix", "lock_lease"]).multiple(true)),
    mut_arg("lease_namespace", |a| a.requires(Resettable::Reset).requires("any_lease")),
    after_long_help = "\
Examples:
  Take a delta every five minutes, and a full every night at 3:00 in Berlin:
      deltafold snapshot follow --store s3://backups/etcd-main --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key \\
          --full-schedule '0 3 * * *' --time-zone Europe/Berlin

The exit code is 0 if the follower was stopped and everything is saved. docs/exit-codes.md lists all others."
)]
struct FollowArgs {
    #[command(flatten)]
    options: FollowOptions,
    /// Take fulls by this cron schedule; a missed one is taken later
    #[arg(long, value_name = "CRON", default_value = "0 0 * * *")]
    full_schedule: String,
    /// Time zone of --full-schedule, by its IANA name
    #[arg(long, value_name = "ZONE", default_value = "UTC")]
    time_zone: String,
    /// Time to save the last snapshot after SIGTERM
    #[arg(long, value_name = "DURATION", default_value = "25s", value_parser = duration::parse)]
    shutdown_timeout: Duration,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    lock: LockArgs,
}

/// Save a plain snapshot file of a live etcd, as `etcdctl snapshot save` does
///
/// First, the HashKV of all members is compared, and a member that differs from the majority is not used. The file ends
/// with its SHA-256, is checked, and gets its name last. No file is overwritten.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Save a snapshot that `deltafold restore --snapshot` and `etcdutl snapshot restore` take:
      deltafold snapshot save backup.db --endpoints https://10.0.0.1:2379 --cacert ca.crt \\
          --cert client.crt --key client.key
  Save it in a bucket:
      deltafold snapshot save s3://backups/by-hand/before-upgrade.db --endpoints http://127.0.0.1:2379

The exit code is 0 on success. docs/exit-codes.md lists all others.")]
struct SaveArgs {
    /// The new file, by its path or URL. With --age-recipient it is encrypted, and its name must end in `.age`
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    live: EndpointArgs,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    bandwidth: BandwidthArgs,
}

impl SaveArgs {
    fn save(&self, cancel: &Cancel) -> Result<Report<TakenSnapshots>> {
        let settings = SnapshotSettings {
            connector: self.live.connector(cancel)?,
            compression: CompressionChoice::default(),
            bandwidth: self.bandwidth.limit(),
            leases: None,
            take_over: false,
        };
        let target = self
            .access
            .plain_target(NthStore::ONLY, &self.file, cancel)?;
        save(
            &self.access.context_without_store(cancel)?,
            &settings,
            &target,
        )
    }
}

/// The lock of a dead follower expires after this time.
const LOCK_DURATION: Duration = Duration::from_secs(15);

impl FollowArgs {
    fn follow(&self, cancel: &Cancel, stop: &Cancel) -> Result<Report<follow::Followed>> {
        let options = FollowOptions {
            full_schedule: Some(Schedule::parse(&self.full_schedule, &self.time_zone)?),
            ..self.options.clone()
        };
        let (ctx, settings) = self.common.open(cancel)?;
        let namespace = self.common.leases.namespace();
        let mut lock = self
            .lock
            .lock(&ctx.store, follow::LOCK, namespace, LOCK_DURATION)?;
        let metrics = Metrics::new();
        // Dropping it writes the file a last time.
        let _file = self.common.metrics.keep_file(&metrics)?;
        let server = self.common.metrics.serve(&metrics, cancel)?;
        if let Some(server) = &server {
            server.set_ready(true);
        }
        let reporter = MetricsReporter::new(metrics);
        follow(&ctx, &settings, &options, &mut lock, &reporter, stop)
    }

    /// Follows until a signal arrives. The first signal stops it in order; the second one, or
    /// --shutdown-timeout, cancels it.
    fn with_signals(&self) -> Result<Report<follow::Followed>> {
        let signals = end_signals()?;
        let (cancel, stop) = (Cancel::default(), Cancel::default());
        tokio::spawn(stop_then_cancel(
            signals,
            stop.clone(),
            cancel.clone(),
            self.shutdown_timeout,
        ));
        self.follow(&cancel, &stop).map_err(|e| match e.reason() {
            Reason::Terminated if stop.is_cancelled() => Reason::Terminated.error(format!(
                "{e}; changes that are not saved are still in etcd, and the next run saves them"
            )),
            _ => e,
        })
    }
}

async fn stop_then_cancel(
    (mut term, mut int): (Signal, Signal),
    stop: Cancel,
    cancel: Cancel,
    timeout: Duration,
) {
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    stop.cancel();
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
        () = tokio::time::sleep(timeout) => {}
    }
    cancel.cancel();
}

impl SnapshotArgs {
    /// Whether the command handles signals itself.
    pub(super) fn is_follow(&self) -> bool {
        matches!(self.command, SnapshotCommand::Follow(_))
    }

    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        match &self.command {
            SnapshotCommand::Full(args) => {
                args.common
                    .metrics
                    .around("snapshot-full", cancel, |metrics| {
                        let (ctx, taking) = args.common.open(cancel)?;
                        let tell = MetricsReporter::new(metrics.clone());
                        let report = full(&ctx, &taking, args.is_final, &tell)?;
                        print_report(output, report)
                    })
            }
            SnapshotCommand::Delta(args) => {
                args.common
                    .metrics
                    .around("snapshot-delta", cancel, |metrics| {
                        let (ctx, taking) = args.common.open(cancel)?;
                        let tell = MetricsReporter::new(metrics.clone());
                        let report = delta(&ctx, &taking, args.options, &tell)?;
                        print_report(output, report)
                    })
            }
            SnapshotCommand::Save(args) => print_report(output, args.save(cancel)?),
            SnapshotCommand::Follow(args) => print_report(output, args.with_signals()?),
        }
    }
}

impl Render for TakenSnapshots {}

impl Render for Followed {}
