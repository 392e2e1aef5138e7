//! `deltafold verify`: its arguments, and its outcomes in words.

use super::endpoints::EndpointArgs;
use super::metrics::MetricsArgs;
use super::text::{self, Text};
use super::{Ended, Output, StoreArgs, print_report, size};
use crate::base::flag_values::yes_or_no;
use crate::base::shorten::{self, IN_JSON};
use crate::base::{Cancel, duration};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::report::Report;
use crate::ops::verify::cluster::{Options, Outcome, run};
use crate::ops::verify::{drill, store};
use crate::telemetry::metrics::{Metrics, RestorableWindow};
use clap::Args;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Prove that a backup is good; or, with --endpoints, that it holds what a live etcd holds
///
/// Without --endpoints the backup itself is looked at, by --level: its names; every byte of what a restore
/// of the newest state would use; what that folds to. With --etcd-binary a real etcd is started on what is
/// restored. Everything that is wrong is told, not only the first.
///
/// With --endpoints the backup is folded up to its newest revision, and its HashKV compared with that of
/// every member of the cluster at the same revision; every member reads its keyspace once.
///
/// Nothing is written to the store, nor to etcd.
#[derive(Debug, Args)]
#[command(mut_arg("level", |a| a.conflicts_with("endpoints").help_heading("Backup")), after_long_help = "\
Examples:
  Can the newest state be restored? Every byte that it takes is read:
      deltafold verify --store s3://backups/etcd-main
  Everything that the prefix holds, folded, with a restore drill, for an alert:
      deltafold verify --store s3://backups/etcd-main --all-chains --etcd-binary /usr/local/bin/etcd \\
          --metrics-file /var/lib/node_exporter/deltafold-verify.prom --output json
  Is the backup what the cluster holds?
      deltafold verify --store s3://backups/etcd-main --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key
  At a revision of your choice, as JSON:
      deltafold verify --store /backups/etcd-main --endpoints http://127.0.0.1:2379 \\
          --revision 41000 --output json

The exit code is 0 where nothing is wrong. It is 65 where snapshots are damaged or missing, where the
restore drill failed, or where a member holds something else than the backup; 66 where there is nothing to
restore from, or no revision that both sides still have; all others are in docs/exit-codes.md.")]
pub(super) struct VerifyArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    depth: store::Thoroughness,
    /// Look at every chain of every timeline, and at what is in none
    ///
    /// Without it, at the chain that a restore of the newest state would use, and at what is needed to tell
    /// which that is.
    #[arg(long, conflicts_with = "endpoints", help_heading = "Backup", value_parser = yes_or_no)]
    all_chains: bool,
    /// Read the tags of all snapshots, to leave out each that is excluded: a request each
    ///
    /// Without it, of more than 64 snapshots only those that are read, and the newest.
    #[arg(long, conflicts_with = "endpoints", help_heading = "Backup", value_parser = yes_or_no)]
    all_tags: bool,
    /// Start this etcd on what is restored: it must hold what was folded, and take a write
    ///
    /// It listens on a free port of 127.0.0.1 for as long as that takes, without TLS, and its data is in
    /// --temp-dir. Both are gone afterwards. With --all-chains there is a drill for each timeline. Where the
    /// backup has authentication enabled, --user and --password are those of a user with the role root.
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with = "endpoints",
        help_heading = "Backup"
    )]
    etcd_binary: Option<PathBuf>,
    /// How long that etcd may take until it is healthy
    #[arg(long, value_name = "DURATION", default_value = "5m", help_heading = "Backup", value_parser = duration::parse_above_zero)]
    drill_timeout: Duration,
    #[command(flatten)]
    live: EndpointArgs,
    /// Compare at this revision [default: the newest that the backup holds]; with --endpoints
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    revision: Option<i64>,
    /// Take this timeline, by its ID in `deltafold list --deep` [default: the newest]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl VerifyArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.metrics
            .around("verify", cancel, |metrics| match self.live.is_given() {
                true => self.compare(cancel, metrics, output),
                false => self.verify(cancel, metrics, output),
            })
    }

    /// The backup with a live cluster.
    fn compare(&self, cancel: &Cancel, metrics: &Metrics, output: Output) -> Ended {
        let way = self.live.connector(cancel)?;
        let ctx = self.store.context(cancel)?;
        let options = Options {
            timeline: self.timeline.clone(),
            revision: self.revision.map(Revision),
        };
        let ended = run(&ctx, &way, &options);
        metrics.store_read(ctx.store.bytes_read());
        let report = ended?;
        print_report(output, report, in_words)
    }

    fn level(&self) -> Result<store::Level> {
        use store::Level;
        match (self.depth.level, &self.etcd_binary) {
            (Some(level), Some(_)) if level < Level::Fold => Err(Reason::Usage.error("--etcd-binary compares what etcd holds with what was folded: give --level fold, or leave --level out")),
            (Some(level), _) => Ok(level),
            (None, Some(_)) => Ok(Level::Fold),
            (None, None) => Ok(Level::default()),
        }
    }

    /// The backup by itself.
    fn verify(&self, cancel: &Cancel, metrics: &Metrics, output: Output) -> Ended {
        if self.revision.is_some() {
            return Err(Reason::Usage.error("--revision is for a comparison with --endpoints: without it the newest state is looked at"));
        }
        let level = self.level()?;
        let drill = match &self.etcd_binary {
            None => None,
            Some(etcd) => {
                drill::check_program(etcd)?;
                Some(drill::Options {
                    // Relative to here, and not to where it is started.
                    etcd: std::path::absolute(etcd)
                        .map_err(|e| Error::io("find the current folder", e))?,
                    health_timeout: self.drill_timeout,
                    client: self.live.options()?,
                })
            }
        };
        let ctx = self.store.context(cancel)?;
        let options = store::Options {
            level,
            all_chains: self.all_chains,
            all_tags: self.all_tags,
            timeline: self.timeline.clone(),
            drill,
        };
        let ended = store::run(&ctx, &options);
        metrics.store_read(ctx.store.bytes_read());
        let report = ended?;
        metrics.verified(&report.metrics());
        if let Some(newest) = &report.newest {
            metrics.restorable(&RestorableWindow {
                first_revision: newest.first_revision.0,
                last_revision: newest.last_revision.0,
                first_time: None,
                last_time: Some(newest.last_time),
            });
        }
        print_report(output, report, found_in_words)
    }
}

fn found_in_words(o: &Report<store::Outcome>) -> String {
    use store::{Level, Severity, Status};
    let mut text = Text::new();
    let what = match o.level {
        Level::Names => "by names",
        Level::Checksums => "by checksums",
        Level::Fold => "by checksums and a fold",
    };
    let of = match o.all_chains {
        true => "all chains",
        false => "the newest chain",
    };
    let status = match o.status {
        Status::Verified => "verified",
        Status::Failed => "failed",
    };
    text.line(format_args!("{status}: {of}, {what}"));
    let mut told: BTreeMap<&str, usize> = BTreeMap::new();
    for f in &o.findings {
        let of_its_kind = told.entry(f.reason).or_default();
        *of_its_kind += 1;
        if *of_its_kind > shorten::WHOLE {
            continue;
        }
        let severity = match f.severity {
            Severity::Error => "error",
            Severity::Note => "note",
        };
        text.field(severity, format_args!("{} [{}]", f.message, f.reason));
        text.list("", &f.snapshots);
    }
    for (reason, n) in told.into_iter().filter(|t| t.1 > shorten::WHOLE) {
        let more = shorten::more(n - shorten::WHOLE, IN_JSON);
        text.line(format_args!("  [{reason}]: {more}"));
    }
    let chain = |c: &store::ChainOutcome| {
        let hash = c.hash_kv.zip(c.live_keys);
        let hash = hash.map(|(hash, keys)| format!(": HashKV {hash}, {keys} live keys"));
        format!(
            "{} with {} deltas, to revision {} on {}{}",
            c.base,
            c.deltas,
            c.last_revision,
            c.timeline,
            hash.unwrap_or_default()
        )
    };
    let chains: Vec<String> = o.chains.iter().map(chain).collect();
    text.list("chain", &chains);
    for d in &o.drills {
        let said = match d.succeeded {
            true => "holds what was folded, and takes a write",
            false => "failed",
        };
        let version = d.etcd_version.as_deref().unwrap_or("of a version unknown");
        let (at, timeline) = (d.revision, &d.timeline);
        let drill = format!("etcd {version} at revision {at} of {timeline}: {said}");
        text.field("drill", format_args!("{drill} ({:.1} s)", d.seconds));
    }
    if let Some(n) = &o.newest {
        text.line(format_args!(
            "  restorable on {}: revisions {} to {}, up to {}",
            n.timeline,
            n.first_revision,
            n.last_revision,
            n.last_time.format("%Y-%m-%d %H:%M:%SZ")
        ));
        let age = n.snapshot_age_seconds;
        text.field("newest", format_args!("{}, {age:.0} s old", n.snapshot));
    }
    let (read, all, bytes) = (o.snapshots_read, o.snapshots, size(o.bytes_read));
    let read = format!("{read} of {all} snapshots, {bytes}, in {:.2} s", o.seconds);
    text.field("read", read);
    text.end()
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    text.line(format_args!(
        "equal: at revision {} the backup holds what the cluster holds",
        o.revision
    ));
    let compacted = text::compacted(o.compact_revision);
    let hash = format!("{}, {compacted}, {} live keys", o.hash_kv, o.live_keys);
    text.field("HashKV", hash);
    text.from(&o.base, &o.deltas);
    for m in &o.members {
        let at = m.endpoint.as_deref().unwrap_or("no endpoint");
        let said = match m.equal {
            Some(_) => "equal",
            None => "not compared",
        };
        text.field("member", format_args!("{} at {at}: {said}", m.name));
    }
    text.each("warning", &o.warnings);
    let (events, seconds) = (o.events, o.seconds);
    let folded = format!(
        "{events} events in {seconds:.2} s, on timeline {}",
        o.timeline
    );
    text.field("folded", folded);
    text.end()
}
