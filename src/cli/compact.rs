//! `deltafold compact`: its arguments, and its outcome in words.

use super::leases::LeaseArgs;
use super::{Output, StateArgs, StoreArgs, print, print_json, size};
use crate::bucket::codec::CompressionChoice;
use crate::error::Result;
use crate::job::Context;
use crate::job::compact::{Options, Outcome, Status, run};
use crate::mvcc::{KeepHistory, Revision};
use clap::Args;
use std::fmt::Write;

/// Fold the newest full snapshot and the deltas after it into a new full snapshot
///
/// It deletes nothing. The new snapshot is built in --temp-dir, verified (every page, etcd's
/// HashKV), uploaded, read back, and named for the exact revision it holds. The same input and
/// options give the same bytes and the same name, so a rerun is harmless.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Fold all that is there:
      deltafold compact --store s3://backups/etcd-main
  See what it would fold, as JSON:
      deltafold compact --store s3://backups/etcd-main --dry-run --output json
  Up to a point in time, with the last hour's history:
      deltafold compact --store /backups/etcd-main --time 2026-11-20T12:00:00Z --keep-history 1h
  A server of your own:
      deltafold compact --store s3://backups/etcd-main --store-option endpoint=http://minio:9000

The exit code is 0, or tells the kind of failure: docs/exit-codes.md.")]
pub(super) struct CompactArgs {
    #[command(flatten)]
    pub(super) store: StoreArgs,
    #[command(flatten)]
    state: StateArgs,
    /// How much history to keep: latest, all, a number of revisions, or a duration (90s, 1h30m, 7d)
    #[arg(
        long,
        env = "DELTAFOLD_KEEP_HISTORY",
        value_name = "HISTORY",
        default_value = "latest"
    )]
    keep_history: KeepHistory,
    /// same (as the newest snapshot), none, gzip, zlib, lzw, zstd or zstd:LEVEL
    #[arg(
        long,
        env = "DELTAFOLD_COMPRESSION",
        value_name = "METHOD",
        default_value = "same"
    )]
    compression: CompressionChoice,
    /// Only say what would be done
    #[arg(long, env = "DELTAFOLD_DRY_RUN", value_parser = clap::builder::FalseyValueParser::new())]
    dry_run: bool,
    #[command(flatten)]
    leases: LeaseArgs,
}

impl CompactArgs {
    pub(super) fn run(&self, ctx: &Context, output: Output) -> Result<()> {
        let options = Options {
            request: self.state.request(),
            keep_history: self.keep_history,
            compression: self.compression,
            dry_run: self.dry_run,
            leases: self.leases.snapshot_leases(),
        };
        let outcome = run(ctx, &options)?;
        match output {
            Output::Json => print_json(&outcome),
            Output::Text => print(&in_words(&outcome)),
        }
    }
}

fn in_words(o: &Outcome) -> String {
    let mut s = String::new();
    // Writing to a String cannot fail.
    let _ = match (o.status, &o.snapshot) {
        (Status::NothingToDo, _) => writeln!(
            s,
            "nothing to do: {} holds revision {} already",
            o.base, o.revision
        ),
        (Status::Succeeded, Some(name)) if o.bytes_written == 0 => {
            writeln!(s, "the very same {name} was there already")
        }
        (Status::Succeeded, Some(name)) => writeln!(s, "wrote {name} ({})", size(o.bytes_written)),
        (Status::Succeeded, None) => writeln!(s, "would fold up to revision {}", o.revision),
    };
    if o.status == Status::Succeeded {
        let _ = writeln!(s, "  from      {}", o.base);
        for d in &o.deltas {
            let _ = writeln!(s, "            {d}");
        }
    }
    let _ = writeln!(s, "  revision  {} on timeline {}", o.revision, o.timeline);
    if let (Some(hash), Some(live), Some(compact)) = (o.hash_kv, o.live_keys, o.compact_revision) {
        let compacted = match compact {
            Revision::NONE => "never compacted".to_owned(),
            at => format!("compacted at {at}"),
        };
        let _ = writeln!(
            s,
            "  holds     {live} live keys, {compacted}, HashKV {hash}"
        );
    }
    let _ = writeln!(
        s,
        "  users, roles, members, alarms and leases are as of revision {}",
        o.metadata_revision
    );
    if let Some(events) = o.events.filter(|&n| n > 0) {
        let _ = writeln!(
            s,
            "  folded    {events} events, {} read, in {:.2} s",
            size(o.bytes_read),
            o.seconds
        );
    }
    s
}
