//! `deltafold snapshot full|delta|follow`: their arguments, and their outcomes in words.

use super::bandwidth::BandwidthArgs;
use super::endpoints::EndpointArgs;
use super::leases::{LeaseArgs, LockArgs};
use super::metrics::MetricsArgs;
use super::text::Text;
use super::{Ended, MeansArgs, Output, print_report, size};
use crate::backup::codec::CompressionChoice;
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, duration};
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::ops::report::Report;
use crate::ops::schedule::Schedule;
use crate::ops::snapshot::follow::{self, FollowOptions, follow};
use crate::ops::snapshot::{
    DeltaOptions, Hole, MetricsReporter, Outcome, SnapshotSettings, Status, delta, full,
};
use crate::store;
use crate::telemetry::metrics::Metrics;
use clap::{Args, Subcommand};
use std::time::Duration;

/// Save a live etcd into the store: whole, or what has changed since the last snapshot
///
/// Nothing is written to etcd. What is read is etcd's own: its Maintenance snapshot, which carries a
/// SHA-256, and its watch. Every snapshot is uploaded, read back, and only then named.
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
}

/// What all three take.
#[derive(Debug, Args)]
struct CommonArgs {
    #[command(flatten)]
    live: EndpointArgs,
    /// The folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, file:///dir or a path
    #[arg(long, value_name = "URL", help_heading = "Store")]
    store: String,
    /// same (as the newest snapshot, gzip for the first), none, gzip, zlib, lzw, zstd or zstd:LEVEL
    #[arg(
        long,
        value_name = "METHOD",
        default_value = "same",
        help_heading = "Store"
    )]
    compression: CompressionChoice,
    #[command(flatten)]
    means: MeansArgs,
    #[command(flatten)]
    bandwidth: BandwidthArgs,
    /// The prefix was another cluster's backup, and this cluster has taken its place: record it as this one's
    ///
    /// The first snapshot records the cluster's ID in the prefix, and any other cluster is refused. A cluster
    /// that was restored with other peer URLs or another token has another ID. Where the ID is the same, this
    /// does nothing.
    #[arg(long, help_heading = "Store", value_parser = yes_or_no)]
    take_over: bool,
    #[command(flatten)]
    leases: LeaseArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl CommonArgs {
    /// What is needed to take snapshots; nothing is sent to etcd yet.
    fn open(&self, cancel: &Cancel) -> Result<(Context, SnapshotSettings)> {
        let connector = self.live.connector(cancel)?;
        store::open::refuse_layout(&self.store, "--store")?;
        store::open::make_folder(&self.store, &self.means.options(1)?)?;
        let mut ctx = self.means.context(&self.store, cancel)?;
        ctx.store = self.bandwidth.limited(ctx.store);
        // With recipients encryption begins by a full; without, what is written is as plain as what is there.
        ctx.trust.unless_all_plain = !ctx.keys.encrypts();
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

/// Save all of it, from a member that holds what most members hold
///
/// First all members tell their HashKV at one revision: one that differs is named, and nothing is taken
/// from it. A follower is taken from where there is one, and the next member where it fails. The snapshot
/// is named for the exact revision that it holds.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  A full snapshot of a cluster of three:
      deltafold snapshot full --store s3://backups/etcd-main --cacert ca.crt --cert client.crt \\
          --key client.key --endpoints https://10.0.0.1:2379,https://10.0.0.2:2379,https://10.0.0.3:2379

The exit code is 0, or tells the kind of failure: docs/exit-codes.md.")]
struct FullArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Mark it as the last snapshot of a cluster that is given up
    #[arg(long = "final", value_parser = yes_or_no)]
    is_final: bool,
}

/// Save what has changed since the last snapshot, then end
///
/// It watches from the last saved revision on, and what the cluster holds there must be what the store
/// holds: two histories are never spliced. Where that is not so, where the cluster has compacted it away,
/// or is behind the store, a full snapshot is taken instead, and the outcome says why. So it is where the
/// store is empty, and where the newest full is older than --max-full-age. Where nothing has changed,
/// nothing is written.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  As a CronJob, every five minutes:
      deltafold snapshot delta --store s3://backups/etcd-main --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key

The exit code is 0, or tells the kind of failure: docs/exit-codes.md.")]
struct DeltaArgs {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    options: DeltaOptions,
}

/// Save deltas as changes come, and fulls by a schedule, until it is stopped
///
/// For a Deployment of one replica, or a sidecar. It goes on through the loss of members, changes of the
/// leader, compactions, and a store that is away: events wait in memory and in
/// the temporary directory, then etcd keeps them, and if it has them no more a full is taken. SIGTERM saves a last delta. Of several followers on one prefix
/// one is at work, and the others wait for its lock, which is an object in the store, or a Lease.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  A delta every five minutes, a full every night in Berlin:
      deltafold snapshot follow --store s3://backups/etcd-main --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key \\
          --full-schedule '0 3 * * *' --time-zone Europe/Berlin

The exit code is 0 where it was stopped and all was saved, or tells the kind of failure:
docs/exit-codes.md.")]
struct FollowArgs {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    options: FollowOptions,
    /// When fulls are taken, as a CronJob's schedule; one that was missed is caught up with
    #[arg(long, value_name = "CRON", default_value = "0 0 * * *")]
    full_schedule: String,
    /// The time zone of --full-schedule, as in the IANA database
    #[arg(long, value_name = "ZONE", default_value = "UTC")]
    time_zone: String,
    /// How long saving may take after SIGTERM
    #[arg(long, value_name = "DURATION", default_value = "25s", value_parser = duration::parse)]
    shutdown_timeout: Duration,
    #[command(flatten)]
    lock: LockArgs,
}

/// A follower that is dead for so long blocks no other.
const LOCK_DURATION: Duration = Duration::from_secs(15);

impl FollowArgs {
    fn follow(&self, cancel: &Cancel, stop: &Cancel) -> Result<Report<follow::Outcome>> {
        let options = FollowOptions {
            full_schedule: Some(Schedule::parse(&self.full_schedule, &self.time_zone)?),
            ..self.options.clone()
        };
        let (ctx, settings) = self.common.open(cancel)?;
        let namespace = self.common.leases.namespace();
        let mut lock = self
            .lock
            .lock(&ctx.store, "follow", namespace, LOCK_DURATION)?;
        let metrics = Metrics::new();
        // Written a last time when all has ended.
        let _file = self.common.metrics.keep_file(&metrics)?;
        let server = self.common.metrics.serve(&metrics, cancel)?;
        if let Some(server) = &server {
            server.set_ready(true);
        }
        let reporter = MetricsReporter::new(metrics);
        follow(&ctx, &settings, &options, &mut lock, &reporter, stop)
    }

    /// The first signal stops it; the second, or the end of its time, ends it.
    fn with_signals(&self) -> Result<Report<follow::Outcome>> {
        let (mut term, mut int) = super::end_signals()?;
        let (cancel, stop) = (Cancel::default(), Cancel::default());
        let (hard, soft, patience) = (cancel.clone(), stop.clone(), self.shutdown_timeout);
        tokio::spawn(async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
            soft.cancel();
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
                () = tokio::time::sleep(patience) => {}
            }
            hard.cancel();
        });
        self.follow(&cancel, &stop).map_err(|e| match e.reason() {
            Reason::Terminated if stop.is_cancelled() => Reason::Terminated.error(format!(
                "{e}; what was not saved is in etcd still, and the next run saves it"
            )),
            _ => e,
        })
    }
}

impl SnapshotArgs {
    /// Whether it sees to signals itself.
    pub(super) fn is_follow(&self) -> bool {
        matches!(self.command, SnapshotCommand::Follow(_))
    }

    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        match &self.command {
            SnapshotCommand::Full(args) => {
                args.common
                    .metrics
                    .around("snapshot-full", cancel, |metrics| {
                        let (ctx, settings) = args.common.open(cancel)?;
                        let reporter = MetricsReporter::new(metrics.clone());
                        let report = full(&ctx, &settings, args.is_final, &reporter)?;
                        print_report(output, report, in_words)
                    })
            }
            SnapshotCommand::Delta(args) => {
                args.common
                    .metrics
                    .around("snapshot-delta", cancel, |metrics| {
                        let (ctx, settings) = args.common.open(cancel)?;
                        let reporter = MetricsReporter::new(metrics.clone());
                        let report = delta(&ctx, &settings, args.options, &reporter)?;
                        print_report(output, report, in_words)
                    })
            }
            SnapshotCommand::Follow(args) => {
                let report = args.with_signals()?;
                print_report(output, report, followed)
            }
        }
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    if o.status == Status::NothingToDo {
        text.line(format_args!(
            "nothing to do: revision {} is saved already",
            o.revision
        ));
    }
    for w in &o.snapshots {
        match w.events {
            None => text.line(format_args!("saved {}", w.name)),
            Some(events) => text.line(format_args!("saved {} ({events} events)", w.name)),
        }
        if let Some(hash) = w.hash_kv {
            let first = w.compact_revision.map_or(1, |c| c.0.max(1));
            let (last, keys) = (w.last_revision, w.live_keys.unwrap_or(0));
            let holds = format!("revisions {first} to {last}, {keys} keys alive, HashKV {hash}");
            text.field("holds", holds);
        }
        let (bytes, payload) = (size(w.bytes), size(w.uncompressed_bytes));
        text.field("size", format_args!("{bytes} of {payload}"));
    }
    if let Some(endpoint) = &o.endpoint {
        let agree = o.members.iter().filter(|m| m.agrees == Some(true)).count();
        let all = o.members.len();
        let taken = format!("from {endpoint}; {agree} of {all} members hold the same");
        text.field("taken", taken);
    }
    text.maybe("full", o.message.as_ref());
    if o.timeline_began {
        text.field("history", "a new timeline begins");
    }
    text.each("hole", o.hole.iter().map(hole));
    text.field("took", format_args!("{:.1} s", o.seconds));
    text.each("warning", &o.warnings);
    text.end()
}

fn hole(hole: &Hole) -> String {
    format!(
        "revisions {} to {} cannot be restored: etcd had compacted them",
        hole.first_revision, hole.last_revision
    )
}

fn followed(o: &Report<follow::Outcome>) -> String {
    let mut text = Text::new();
    text.line(format_args!(
        "saved {} fulls and {} deltas ({} events, {})",
        o.fulls,
        o.deltas,
        o.events,
        size(o.bytes_written)
    ));
    text.maybe("revision", o.revision.map(|r| format!("{r} is saved")));
    text.each("hole", o.holes.iter().map(hole));
    if o.failures > 0 {
        text.field(
            "failures",
            format_args!("{} that were waited out", o.failures),
        );
    }
    text.each("warning", &o.warnings);
    text.end()
}
