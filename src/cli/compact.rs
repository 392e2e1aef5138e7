//! `deltafold compact`: its arguments, and its result as text.
//!
//! The operation itself is `ops::compact`.

use super::encryption::PlaintextArg;
use super::leases::LeaseArgs;
use super::metrics::MetricsArgs;
use super::render::Render;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::Cancel;
use crate::error::Result;
use crate::ops::compact::{Compacted, Options, run};
use crate::ops::report::{Report, Status};
use crate::telemetry::metrics::{CompactionFigures, Metrics, SavedSnapshot, SnapshotKind};
use chrono::Utc;
use clap::Args;
use std::time::{Duration, Instant};

/// Fold the newest full snapshot and the deltas after it into a new full snapshot
///
/// Nothing is deleted. The new snapshot is written to --temp-dir and uploaded at the same time. It gets its name,
/// after the exact revision that it holds, only when it is verified: every page is checked, and its HashKV compared
/// with that of the fold. The same input and options give the same bytes and the same name, so it is safe to run it
/// again.
#[derive(Debug, Args)]
// `keep_history` is shared with the controller's policies, where it has no default: so the default is set here.
#[command(mut_arg("keep_history", |a| a.default_value("latest")), after_long_help = "\
Examples:
  Fold all deltas:
      deltafold compact --store s3://backups/etcd-main
  Show what would be folded, as JSON:
      deltafold compact --store s3://backups/etcd-main --dry-run --output json
  Fold up to a point in time, and keep the history of the last hour:
      deltafold compact --store /backups/etcd-main --time 2026-11-20T12:00:00Z --keep-history 1h
  Use your own S3 server:
      deltafold compact --store s3://backups/etcd-main --store-option endpoint=http://minio:9000

The exit code is 0 on success. docs/exit-codes.md lists all others.")]
pub(super) struct CompactArgs {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    plaintext: PlaintextArg,
    #[command(flatten)]
    leases: LeaseArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl CompactArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.metrics.around("compact", cancel, |metrics| {
            self.compact(cancel, metrics, output)
        })
    }

    fn compact(&self, cancel: &Cancel, metrics: &Metrics, output: Output) -> Ended {
        let mut ctx = self.store.context(cancel)?;
        ctx.trust = self.plaintext.trust(ctx.keys.are_given());
        let options = Options {
            leases: self.leases.snapshot_leases(),
            ..self.options.clone()
        };
        let started = Instant::now();
        let result = run(&ctx, &options);
        metrics.store_read(ctx.store.bytes_read());
        if !options.dry_run {
            record(metrics, &result, started.elapsed());
        }
        print_report(output, result?)
    }
}

/// Records the metrics of a compaction.
fn record(metrics: &Metrics, result: &Result<Report<Compacted>>, took: Duration) {
    let Ok(o) = result else {
        metrics.snapshot_took(SnapshotKind::Full, took, false);
        return;
    };
    metrics.compacted(&CompactionFigures {
        deltas: o.deltas.len() as u64,
        events: o.events.unwrap_or_default(),
        read_bytes: o.bytes_read,
        written_bytes: o.bytes_written,
    });
    if o.status == Status::Succeeded {
        metrics.snapshot_took(SnapshotKind::Full, took, true);
    }
    if o.bytes_written > 0 {
        metrics.store_written(o.bytes_written);
        metrics.snapshot_saved(&SavedSnapshot {
            kind: SnapshotKind::Full,
            at: Utc::now(),
            revision: o.revision.0,
            stored_bytes: o.bytes_written,
            uncompressed_bytes: None,
        });
    }
}

impl Render for Compacted {}
