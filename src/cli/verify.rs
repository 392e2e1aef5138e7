//! `deltafold verify`: its arguments, and its results as text.
//!
//! The operations themselves are `ops::verify::store` (the backup alone), `ops::verify::cluster` (the backup
//! and a live etcd) and `ops::verify::file` (a plain snapshot file).

use super::endpoints::EndpointArgs;
use super::metrics::MetricsArgs;
use super::render::{Blocks, Render};
use super::terminal::{self, Style};
use super::text;
use super::{BackupArgs, Ended, Output, print_report, size};
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::base::{Cancel, duration};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::findings::Severity;
use crate::ops::report::{Report, Status};
use crate::ops::verify::cluster::{ComparedCluster, Options, run};
use crate::ops::verify::drill::{self, Drilled};
use crate::ops::verify::file::{self, VerifiedFile};
use crate::ops::verify::store::{self, Level, VerifiedBackup};
use crate::prefix::Context;
use crate::prefix::open::BackupLocation;
use crate::prefix::snapshot_files::OpenFile;
use crate::telemetry::metrics::{Metrics, RestorableWindow};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Verify that a backup can be restored, or with --endpoints that it equals a live etcd
///
/// Without --endpoints, verify checks the backup itself, as deep as --level says, and reports all problems.
/// With --etcd-binary, it also runs a restore drill: it restores the backup and starts a real etcd with it.
///
/// With --endpoints, verify folds the backup up to its newest revision and compares its HashKV with that of
/// every member of the cluster at the same revision. To compute it, each member reads all its keys once.
///
/// With --snapshot, verify reads a plain snapshot file, or with a pattern the newest one: the SHA-256 behind the database,
/// every page, and HashKV. With --max-age it also checks that a snapshot is still taken.
///
/// verify writes the level, the time, the newest revision and the result to deltafold-verified/ in the store,
/// for `deltafold status`, unless --no-record or --snapshot is given. If the store refuses that, it is a warning.
/// Nothing else is written to the store, and nothing to the live etcd.
#[derive(Debug, Args)]
#[command(
    mut_arg("level", |a| a.conflicts_with("endpoints")),
    mut_arg("snapshot", |a| a.conflicts_with_all(["endpoints", "all_chains", "timeline"])),
    after_long_help = "\
Examples:
  Check that the newest state can be restored, by reading every byte of it:
      deltafold verify --store s3://backups/etcd-main
  Check all chains with a restore drill, and write metrics for an alert:
      deltafold verify --store s3://backups/etcd-main --all-chains --etcd-binary /usr/local/bin/etcd \\
          --metrics-file /var/lib/node_exporter/deltafold-verify.prom --output json
  Compare the backup with the live cluster:
      deltafold verify --store s3://backups/etcd-main --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key
  Compare them at a given revision, as JSON:
      deltafold verify --store /backups/etcd-main --endpoints http://127.0.0.1:2379 \\
          --revision 41000 --output json
  Check each night that k3s has taken a snapshot, and that an etcd starts with it:
      deltafold verify --snapshot '/var/lib/rancher/k3s/server/db/snapshots/etcd-snapshot-*' --max-age 26h \\
          --etcd-binary /usr/local/bin/etcd

Exit codes: 0 if there is no problem; 65 if snapshots are damaged or missing, if the restore drill failed, or if a \
member differs from the backup; 66 if the store has no snapshots to restore, or no revision that the backup and etcd \
both still have; 75 if --max-age is exceeded. docs/exit-codes.md lists all others."
)]
pub(super) struct VerifyArgs {
    #[command(flatten)]
    depth: store::Thoroughness,
    /// Verify all chains of all timelines, and the snapshots outside of them
    ///
    /// Without it, verify checks only the chain that a restore of the newest state would use, and the snapshots
    /// that it must read to find this chain.
    #[arg(long, conflicts_with = "endpoints", value_parser = yes_or_no)]
    all_chains: bool,
    /// Run a restore drill: start this etcd with the restored data, compare it, and write a key
    ///
    /// etcd has its data in --temp-dir, and listens on a socket there that no other user can open; afterwards it is
    /// stopped and its data deleted. With --all-chains, there is a restore drill for each timeline. If
    /// authentication is enabled in the backup, give --user and --password of a user with the role root.
    #[arg(long, value_name = "PATH", conflicts_with = "endpoints")]
    etcd_binary: Option<PathBuf>,
    /// With --etcd-binary: time for etcd to become healthy
    #[arg(long, requires = "etcd_binary", value_name = "DURATION", default_value = "5m", value_parser = duration::parse_above_zero)]
    drill_timeout: Duration,
    /// With --endpoints: compare at this revision [default: the newest revision of the backup]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    revision: Option<i64>,
    /// ID of the timeline to verify, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    /// With --snapshot: fail with Stale (75) if the snapshot is older than this, by its name
    #[arg(long, value_name = "DURATION", requires = "snapshot", value_parser = duration::parse_above_zero)]
    max_age: Option<Duration>,
    /// Do not record this verification in the store
    #[arg(long, value_parser = yes_or_no)]
    no_record: bool,
    #[command(flatten)]
    backup: BackupArgs,
    #[command(flatten)]
    live: EndpointArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl VerifyArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.metrics.around("verify", cancel, |metrics| {
            let backup = self.backup.backup(cancel)?;
            match &backup {
                BackupLocation::File(_, file) => self.verify_file(&backup, file, metrics, output),
                BackupLocation::Prefix(ctx) if self.live.is_given() => {
                    self.compare(ctx, cancel, metrics, output)
                }
                BackupLocation::Prefix(ctx) => self.verify(ctx, metrics, output),
            }
        })
    }

    /// Verifies a plain snapshot file.
    fn verify_file(
        &self,
        backup: &BackupLocation,
        opened: &OpenFile,
        metrics: &Metrics,
        output: Output,
    ) -> Ended {
        if self.revision.is_some() {
            return Err(Reason::Usage.error(
                "--revision (or its environment variable) needs --endpoints: leave it out for a plain snapshot file",
            ));
        }
        let options = file::Options {
            level: self.level()?,
            max_age: self.max_age,
            drill: self.drill()?,
        };
        let mut report = file::run(backup, opened, &options)?;
        if self.live.is_given() {
            // The variable may be set for other commands.
            let warning = "a plain snapshot file is not compared with the live etcd of --endpoints";
            report.warnings.push(warning.to_owned());
        }
        metrics.verified(&report.metrics());
        print_report(output, report)
    }

    /// The restore drill that is asked for.
    fn drill(&self) -> Result<Option<drill::Options>> {
        let Some(etcd) = &self.etcd_binary else {
            return Ok(None);
        };
        drill::check_program(etcd)?;
        Ok(Some(drill::Options {
            // etcd is started in another folder.
            etcd: std::path::absolute(etcd).map_err(|e| Error::io("find the current folder", e))?,
            health_timeout: self.drill_timeout,
            client: self.live.options()?,
        }))
    }

    /// Compares the backup with a live cluster.
    fn compare(&self, ctx: &Context, cancel: &Cancel, metrics: &Metrics, output: Output) -> Ended {
        let connector = self.live.connector(cancel)?;
        let options = Options {
            timeline: self.timeline.clone(),
            revision: self.revision.map(Revision),
            record: !self.no_record,
        };
        let result = run(ctx, &connector, &options);
        metrics.store_read(ctx.store.bytes_read());
        print_report(output, result?)
    }

    fn level(&self) -> Result<store::Level> {
        match (self.depth.level, &self.etcd_binary) {
            (Some(level), Some(_)) if level < Level::Fold => Err(Reason::Usage.error("--etcd-binary needs the folded state to compare etcd with: give --level fold, or omit --level")),
            (Some(level), _) => Ok(level),
            (None, Some(_)) => Ok(Level::Fold),
            (None, None) => Ok(Level::default()),
        }
    }

    /// Verifies the backup itself.
    fn verify(&self, ctx: &Context, metrics: &Metrics, output: Output) -> Ended {
        if self.revision.is_some() {
            return Err(Reason::Usage.error(
                "--revision needs --endpoints: without a live etcd, verify checks the newest state",
            ));
        }
        let level = self.level()?;
        let options = store::Options {
            level,
            all_chains: self.all_chains,
            timeline: self.timeline.clone(),
            drill: self.drill()?,
            record: !self.no_record,
        };
        let result = store::run(ctx, &options);
        metrics.store_read(ctx.store.bytes_read());
        let report = result?;
        metrics.verified(&report.metrics());
        if let Some(newest) = &report.newest {
            metrics.restorable(&RestorableWindow {
                first_revision: newest.first_revision.0,
                last_revision: newest.last_revision.0,
                first_time: None,
                last_time: Some(newest.last_time),
            });
        }
        let errors = report
            .findings
            .iter()
            .filter(|f| f.severity == Severity::Error);
        let errors = count(errors.count(), "error");
        let failure = print_report(output, report)?;
        // The report above the message has the errors already.
        Ok(if output == Output::Text && terminal::is_shared() {
            failure.map(|e| e.reason().error(format!("{errors}: see above")))
        } else {
            failure
        })
    }
}

/// Adds whether the backup is good, and how it was verified.
fn add_verdict(status: Status, what: &str, text: &mut Blocks) {
    let (style, verdict) = match status {
        Status::Failed => (Style::Bad, "failed"),
        _ => (Style::Good, "verified"),
    };
    text.verdict(style, verdict, format!(": {what}"));
}

impl Render for VerifiedBackup {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        let level = match o.level {
            Level::Names => "by names",
            Level::Checksums => "by checksums",
            Level::Fold => "by checksums and a fold",
        };
        let chains = if o.all_chains {
            "all chains"
        } else {
            "the newest chain"
        };
        add_verdict(o.status, &format!("{chains}, {level}"), &mut text);
        text::add_findings(&o.findings, &mut text);
        let mut lines = Vec::new();
        for c in &o.chains {
            let hash = hash_text(c.hash_kv, c.live_keys).map(|hash| format!(": {hash}"));
            lines.push(format!(
                "{} with {}, to revision {} on {}{}",
                c.base,
                count(c.deltas, "delta"),
                c.last_revision,
                c.timeline,
                hash.unwrap_or_default()
            ));
        }
        text.list("chain", &lines);
        for d in &o.drills {
            text.field("drill", drill_text(d));
        }
        if let Some(n) = &o.newest {
            let (first, last, timeline) = (n.first_revision, n.last_revision, &n.timeline);
            let until = text::local_time(n.last_time);
            let range = format!("revisions {first} to {last} on {timeline}, up to {until}");
            text.field("restorable", range);
            let age = duration::age(n.snapshot_age_seconds);
            text.field("newest", format!("{}, {age} old", n.snapshot));
        }
        let (read, all, bytes) = (o.snapshots_read, o.snapshots, size(o.bytes_read));
        let (all, took) = (count(all, "snapshot"), duration::human(o.seconds));
        text.field("read", format!("{read} of {all}, {bytes}, in {took}"));
        text.field("recorded", o.recorded.as_deref());
        text
    }
}

impl Render for VerifiedFile {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        let how = match o.level {
            Level::Names => "by its SHA-256",
            Level::Checksums => "every byte",
            Level::Fold => "every byte, and by a fold",
        };
        add_verdict(o.status, &format!("{}, {how}", o.path), &mut text);
        let hash = hash_text(o.hash_kv, o.live_keys).map(|hash| format!(", {hash}"));
        text.field(
            "holds",
            format!("revision {}{}", o.revision, hash.unwrap_or_default()),
        );
        text.field("taken", o.created);
        text.field("age", o.age_seconds.map(duration::age));
        text.field("drill", o.drill.as_ref().map(drill_text));
        text
    }
}

/// The HashKV of a state and its live keys; `None` if they were not computed.
fn hash_text(hash_kv: Option<u32>, live_keys: Option<u64>) -> Option<String> {
    let (hash, keys) = (hash_kv?, count(live_keys?, "live key"));
    Some(format!("HashKV {hash}, {keys}"))
}

fn drill_text(d: &Report<Drilled>) -> String {
    let result = if d.succeeded {
        "equals the backup, and accepts a write"
    } else {
        "failed"
    };
    let version = d.etcd_version.as_deref().unwrap_or("(version unknown)");
    let (revision, timeline) = (d.revision, &d.timeline);
    let took = duration::human(d.seconds);
    format!("etcd {version} at revision {revision} of {timeline}: {result} ({took})")
}

impl Render for ComparedCluster {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        let equal = ": the backup and the cluster have the same data at revision";
        text.verdict(Style::Good, "equal", format!("{equal} {}", o.revision));
        let compacted = text::compacted(o.compact_revision);
        let keys = count(o.live_keys, "live key");
        text.field("HashKV", format!("{}, {compacted}, {keys}", o.hash_kv));
        text.field("from", &o.base);
        text.list("", &o.deltas);
        for m in &o.members {
            let at = m.endpoint.as_deref().unwrap_or("no endpoint");
            let result = m.equal.map_or("not compared", |_| "equal");
            text.field("member", format!("{} at {at}: {result}", m.name));
        }
        let (events, took) = (count(o.events, "event"), duration::human(o.seconds));
        text.field(
            "folded",
            format!("{events} in {took}, on timeline {}", o.timeline),
        );
        text.field("recorded", o.recorded.as_deref());
        text
    }
}
