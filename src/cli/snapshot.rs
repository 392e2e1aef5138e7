//! `deltafold snapshot full|delta|follow`: their arguments, and their outcomes in words.

use super::endpoints::EndpointArgs;
use super::{MeansArgs, Output, print, print_json, size};
use crate::bucket::codec::CompressionChoice;
use crate::error::Result;
use crate::job::Context;
use crate::job::snapshot::{DeltaOptions, Outcome, Status, Taking, delta, full};
use crate::mvcc::history::parse_duration;
use crate::store::{self, Cancel};
use clap::{Args, Subcommand};
use std::fmt::Write;
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
    Full(FullArgs),
    Delta(DeltaArgs),
}

/// What all three take.
#[derive(Debug, Args)]
struct CommonArgs {
    #[command(flatten)]
    live: EndpointArgs,
    /// The folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, file:///dir or a path
    #[arg(
        long,
        env = "DELTAFOLD_STORE",
        value_name = "URL",
        help_heading = "Store"
    )]
    store: String,
    /// same (as the newest snapshot, gzip for the first), none, gzip, zlib, lzw, zstd or zstd:LEVEL
    #[arg(
        long,
        env = "DELTAFOLD_COMPRESSION",
        value_name = "METHOD",
        default_value = "same",
        help_heading = "Store"
    )]
    compression: CompressionChoice,
    #[command(flatten)]
    means: MeansArgs,
}

impl CommonArgs {
    /// What is needed to take snapshots; nothing is sent to etcd yet.
    fn open(&self, cancel: &Cancel) -> Result<(Context, Taking)> {
        let way = self.live.connector(cancel)?;
        store::open::make_folder(&self.store)?;
        let ctx = self.means.context(&self.store, cancel)?;
        let taking = Taking {
            way,
            compression: self.compression,
        };
        Ok((ctx, taking))
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
    #[arg(long = "final", env = "DELTAFOLD_FINAL", value_parser = clap::builder::FalseyValueParser::new())]
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
    /// The most bytes of events in one delta; a transaction is never split
    #[arg(
        long,
        env = "DELTAFOLD_MAX_DELTA_BYTES",
        value_name = "SIZE",
        default_value = "67108864"
    )]
    max_delta_bytes: u64,
    /// Take a full, too, where the newest is older than this; 0s: never
    #[arg(long, env = "DELTAFOLD_MAX_FULL_AGE", value_name = "DURATION", default_value = "24h", value_parser = parse_age)]
    max_full_age: Duration,
}

impl SnapshotArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Result<()> {
        let outcome = match &self.command {
            SnapshotCommand::Full(args) => {
                let (ctx, taking) = args.common.open(cancel)?;
                full(&ctx, &taking, args.is_final)?
            }
            SnapshotCommand::Delta(args) => {
                let (ctx, taking) = args.common.open(cancel)?;
                let options = DeltaOptions {
                    max_bytes: args.max_delta_bytes,
                    max_full_age: args.max_full_age,
                };
                delta(&ctx, &taking, options)?
            }
        };
        match output {
            Output::Json => print_json(&outcome),
            Output::Text => print(&in_words(&outcome)),
        }
    }
}

fn parse_age(s: &str) -> Result<Duration, String> {
    parse_duration(s).ok_or_else(|| "give a duration such as 90s, 24h or 7d".to_owned())
}

fn in_words(o: &Outcome) -> String {
    let mut s = String::new();
    // Writing to a String cannot fail.
    if o.status == Status::NothingToDo {
        let _ = writeln!(s, "nothing to do: revision {} is saved already", o.revision);
    }
    for w in &o.snapshots {
        let _ = match w.events {
            None => writeln!(s, "saved {}", w.name),
            Some(events) => writeln!(s, "saved {} ({events} events)", w.name),
        };
        if let Some(hash) = w.hash_kv {
            let _ = writeln!(
                s,
                "  holds     revisions {} to {}, {} keys alive, HashKV {hash}",
                w.compact_revision.map_or(1, |c| c.0.max(1)),
                w.last_revision,
                w.live_keys.unwrap_or(0)
            );
        }
        let _ = writeln!(
            s,
            "  size      {} of {}",
            size(w.bytes),
            size(w.uncompressed_bytes)
        );
    }
    if let Some(endpoint) = &o.endpoint {
        let agree = o.members.iter().filter(|m| m.agrees == Some(true)).count();
        let _ = writeln!(
            s,
            "  taken     from {endpoint}; {agree} of {} members hold the same",
            o.members.len()
        );
    }
    if let Some(why) = &o.message {
        let _ = writeln!(s, "  full      {why}");
    }
    if o.timeline_began {
        let _ = writeln!(s, "  history   a new timeline begins");
    }
    if let Some(hole) = &o.hole {
        let _ = writeln!(
            s,
            "  hole      revisions {} to {} cannot be restored: etcd had compacted them",
            hole.first_revision, hole.last_revision
        );
    }
    let _ = writeln!(s, "  took      {:.1} s", o.seconds);
    for warning in &o.warnings {
        let _ = writeln!(s, "  warning   {warning}");
    }
    s
}
