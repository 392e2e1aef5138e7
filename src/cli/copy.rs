//! `deltafold copy`: its arguments, and its outcome in words.

use super::bandwidth::BandwidthArgs;
use super::metrics::MetricsArgs;
use super::text::Text;
use super::{Ended, MeansArgs, Output, parse_options, print_report, size};
use crate::backup::codec::CompressionChoice;
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, duration};
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::ops::copy::plan::{CopyLimits, Encryption, Form, Selection};
use crate::ops::copy::{
    CopyStatus, ObjectOutcome, Options, Outcome, Status, WaitForFinal, follow, run,
};
use crate::ops::report::Report;
use crate::store;
use crate::telemetry::metrics::Metrics;
use clap::Args;
use std::path::Path;
use std::time::Duration;

/// Copy backups from one store to another, once or for as long as it runs
///
/// A backup is a full snapshot with the deltas after it. Both layouts keep their places, and snapshots keep
/// their names and bytes unless --compression or --age-recipient is given. Each is streamed, checked by the
/// SHA-256 inside it, uploaded, read back, and only then named; a delta is named after what it follows.
/// Nothing in the target is overwritten or deleted. Started again, it copies what is missing.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  All backups to another bucket:
      deltafold copy --from s3://backups/etcd-main --to s3://elsewhere/etcd-main \\
          --to-option endpoint=https://minio.elsewhere:9000
  The newest two, once the last snapshot of the old cluster is there, or after an hour:
      deltafold copy --from s3://backups/etcd-main --to gs://new/etcd-main --max-backups 2 \\
          --wait-for-final --wait-timeout 1h
  Keep a second store in step:
      deltafold copy --from s3://backups/etcd-main --to /mnt/nfs/etcd-main --follow --interval 1m
  With other keys from now on:
      deltafold copy --from s3://backups/etcd-main --to s3://backups/etcd-main-rekeyed \\
          --age-identity old.key --age-recipient age1…

The exit code is 0 where the target has all that is wanted, 65 where a snapshot of the source is damaged,
73 where the target has another object under a name, 75 where some of it failed for now; all others are in
docs/exit-codes.md.")]
pub(super) struct CopyArgs {
    /// Copy from here, the folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, file:///dir or a path
    #[arg(long, value_name = "URL", help_heading = "Store")]
    from: String,
    /// Copy to here; a local folder is made where the one above it is there
    #[arg(long, value_name = "URL", help_heading = "Store")]
    to: String,
    /// A setting of the store that is copied from, over those of --store-option; may be given again
    #[arg(
        long,
        value_name = "KEY=VALUE",
        hide_env_values = true,
        help_heading = "Store"
    )]
    from_option: Vec<String>,
    /// A setting of the store that is copied to, over those of --store-option; may be given again
    #[arg(
        long,
        value_name = "KEY=VALUE",
        hide_env_values = true,
        help_heading = "Store"
    )]
    to_option: Vec<String>,
    #[command(flatten)]
    most: CopyLimits,
    /// Wait first until the source's newest full snapshot is marked final
    #[arg(long, value_parser = yes_or_no)]
    wait_for_final: bool,
    /// Copy what is there when it has not come for so long; 0s: wait for ever
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    wait_timeout: Duration,
    /// Go on copying what comes, until it is stopped
    #[arg(long, value_parser = yes_or_no, conflicts_with = "dry_run")]
    follow: bool,
    /// How often the source is listed, while it is waited for or followed
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse_above_zero)]
    interval: Duration,
    /// same (byte for byte), none, gzip, zlib, lzw, zstd or zstd:LEVEL
    #[arg(long, value_name = "METHOD", default_value = "same")]
    compression: CompressionChoice,
    /// Write encrypted snapshots as plain text
    #[arg(
        long,
        value_parser = yes_or_no,
        conflicts_with_all = ["age_recipient", "age_recipients_file"],
        help_heading = "Encryption"
    )]
    decrypt: bool,
    /// Copy excluded snapshots, too, with their marks
    #[arg(long, value_parser = yes_or_no)]
    include_excluded: bool,
    /// Copy although the target is the backup of another cluster; from now on it is the source's
    #[arg(long, value_parser = yes_or_no)]
    take_over: bool,
    /// Only say what would be done
    #[arg(long, value_parser = yes_or_no)]
    dry_run: bool,
    /// Snapshots of 1 MiB and more under way at once; each holds about 32 MiB [default: as many as threads]
    ///
    /// Of smaller ones as many as --requests, between folders eight, unless this is one, or more than eight.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Means")]
    parallel: Option<u16>,
    #[command(flatten)]
    means: MeansArgs,
    #[command(flatten)]
    bandwidth: BandwidthArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl CopyArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        if self.follow {
            return self.follow(cancel, output);
        }
        self.metrics
            .around("copy", cancel, |metrics| self.copy(cancel, metrics, output))
    }

    fn copy(&self, cancel: &Cancel, metrics: &Metrics, output: Output) -> Ended {
        let (from, to) = self.stores(cancel)?;
        let ended = run(&from, &to, &self.options(&to));
        metrics.store_read(from.store.bytes_read());
        let report = ended?;
        metrics.store_written(report.bytes_written);
        print_report(output, report, in_words)
    }

    fn follow(&self, cancel: &Cancel, output: Output) -> Ended {
        let metrics = Metrics::new();
        // Written a last time when all has ended.
        let _file = self.metrics.keep_file(&metrics)?;
        let server = self.metrics.serve(&metrics, cancel)?;
        let (from, to) = self.stores(cancel)?;
        if let Some(server) = &server {
            server.set_ready(true);
        }
        let report = follow(&from, &to, &self.options(&to), &metrics)?;
        print_report(output, report, in_words)
    }

    fn stores(&self, cancel: &Cancel) -> Result<(Context, Context)> {
        let from_options = parse_options(&self.from_option, "--from-option")?;
        let to_options = parse_options(&self.to_option, "--to-option")?;
        store::open::refuse_layout(&self.to, "--to")?;
        if place(&self.from) == place(&self.to) && from_options == to_options {
            return Err(Reason::Usage
                .error("--from and --to are the same: give two stores, or two prefixes of one"));
        }
        let open = |nth: usize, url: &str, own: &[(String, String)], flag: &str| {
            self.means.context_with(nth, cancel, |options, handle| {
                let all: Vec<_> = options.iter().chain(own).cloned().collect();
                let opened = store::open(url, &all, handle);
                // The messages are of one store, and here are two.
                opened.map_err(|e| {
                    let said = e
                        .to_string()
                        .replace("--store-option", &format!("{flag}-option"));
                    let said = said.replace("--store ", &format!("{flag} "));
                    let at_end = said.strip_suffix("--store");
                    let said = at_end.map(|s| format!("{s}{flag}")).unwrap_or(said);
                    e.reason().error(said)
                })
            })
        };
        let mut from = open(1, &self.from, &from_options, "--from")?;
        if !self.dry_run {
            let options = [self.means.options(2)?, to_options.clone()].concat();
            store::open::make_folder(&self.to, &options)?;
        }
        let mut to = open(2, &self.to, &to_options, "--to")?;
        // One limit for each direction: that of the source is read, that of the target written, and read back.
        from.store = self.bandwidth.limited(from.store);
        to.store = self.bandwidth.limited(to.store);
        Ok((from, to))
    }

    fn options(&self, to: &Context) -> Options {
        let encryption = match (to.keys.encrypts(), self.decrypt) {
            (true, _) => Encryption::Encrypt,
            (false, true) => Encryption::Decrypt,
            (false, false) => Encryption::Keep,
        };
        let number = |n: Option<i64>| n.and_then(|n| u32::try_from(n).ok());
        Options {
            selection: Selection {
                max_backups: number(self.most.max_backups),
                max_backup_age_days: number(self.most.max_backup_age),
                excluded: self.include_excluded,
                form: Form {
                    encoding: match self.compression {
                        CompressionChoice::Same => None,
                        CompressionChoice::Chosen(encoding) => Some(encoding),
                    },
                    encryption,
                },
            },
            parallel: self.parallel.map_or(to.threads, usize::from),
            wait_for_final: self.wait_for_final.then_some(WaitForFinal {
                timeout: self.wait_timeout,
            }),
            interval: self.interval,
            take_over: self.take_over,
            dry_run: self.dry_run,
        }
    }
}

/// A URL in a form in which the same place looks the same.
fn place(url: &str) -> String {
    let url = url.trim_end_matches('/');
    let local = url.strip_prefix("file://").unwrap_or(url);
    if !local.contains("://")
        && let Ok(path) = Path::new(local).canonicalize()
    {
        return path.display().to_string();
    }
    match url.split_once("://") {
        Some(("s3a", rest)) => format!("s3://{rest}"),
        _ => url.to_owned(),
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    let (to, copied) = (&o.to, o.copied);
    text.line(match o.status {
        Status::NothingToDo if o.failed == 0 && o.kept == 0 => {
            format!("copied nothing to {to}: nothing of what is there is wanted and can be used")
        }
        Status::NothingToDo if o.failed == 0 => {
            format!("nothing to do: {to} has all that is wanted")
        }
        _ if o.dry_run => format!("would copy {copied} snapshots to {to}"),
        _ => format!(
            "copied {copied} snapshots ({}) to {to}",
            size(o.bytes_written)
        ),
    });
    let wanted = o.backups_wanted;
    text.field(
        "backups",
        format_args!("{wanted} of {} are wanted", o.backups),
    );
    let (kept, skipped, failed) = (o.kept, o.skipped, o.failed);
    let others = format!("{kept} were there, {skipped} left out, {failed} failed");
    text.field("others", others);
    text.maybe("final", o.final_snapshot.as_ref());
    for (what, decision) in [
        ("copy", CopyStatus::Copied),
        ("leave out", CopyStatus::Skipped),
        ("failed", CopyStatus::Failed),
    ] {
        let is_told = |x: &&ObjectOutcome| {
            let always = decision == CopyStatus::Failed || x.reason == "BaseNotCopied";
            x.decision == decision && (always || o.dry_run)
        };
        let told = o.objects.iter().filter(is_told);
        let told: Vec<String> = told.map(|x| format!("{}: {}", x.path, x.message)).collect();
        text.list(what, &told);
    }
    text.each("warning", &o.warnings);
    text.field("took", format_args!("{:.2} s", o.seconds));
    text.end()
}
