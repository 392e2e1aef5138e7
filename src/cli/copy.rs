//! `deltafold copy`: its arguments, and its result as text.
//!
//! The operation itself is `ops::copy`.

use super::bandwidth::BandwidthArgs;
use super::encryption::{PlaintextArg, decrypting};
use super::metrics::MetricsArgs;
use super::render::{Blocks, Render};
use super::store_access::NthStore;
use super::{AccessArgs, Ended, Output, parse_options, print_report, size};
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::base::{Cancel, duration};
use crate::error::{Error, Reason, Result};
use crate::ops::copy::plan::{CopyLimits, Encryption, Selection};
use crate::ops::copy::{
    CopiedBackup, CopiedObject, CopyStatus, Options, WaitForFinal, follow, run,
};
use crate::ops::report::{Report, Status};
use crate::prefix::Context;
use crate::prefix::snapshot_files::{Pattern, folder_error};
use crate::store;
use crate::telemetry::metrics::Metrics;
use clap::{ArgGroup, Args};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Copy backups from one store to another, once or continuously
///
/// A backup is a full snapshot with the deltas after it. Snapshots keep their place (layout v1 or v2). They
/// keep their name and bytes, too, unless --age-recipient or --decrypt is given. Each snapshot
/// is checked against the SHA-256 inside it, and completely uploaded, before it gets its name. A delta appears
/// in the target only after the snapshots before it. Nothing in the target is overwritten or deleted. A new run
/// copies what is missing.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("repeats").args(["wait_for_final", "follow"]).multiple(true)), after_long_help = "\
Examples:
  Copy all backups to another bucket:
      deltafold copy --from s3://backups/etcd-main --to s3://elsewhere/etcd-main \\
          --to-option endpoint=https://minio.elsewhere:9000
  Wait up to an hour for the final snapshot of the old cluster, then copy the newest two backups:
      deltafold copy --from s3://backups/etcd-main --to gs://new/etcd-main --max-backups 2 \\
          --wait-for-final --wait-timeout 1h
  Keep a second store in step:
      deltafold copy --from s3://backups/etcd-main --to /mnt/nfs/etcd-main --follow --interval 1m
  Make fulls of the files that k3s takes, and again after each of them:
      deltafold copy --from-snapshots 's3://k3s/etcd-snapshot-server1-*' --to s3://backups/k3s --follow
  Encrypt the copy with another key:
      deltafold copy --from s3://backups/etcd-main --to s3://backups/etcd-main-rekeyed \\
          --age-identity old.key --age-recipient age1…

Exit codes: 0 if the target has all requested snapshots, 65 if a snapshot of the source is damaged, 73 if \
the target has a different object with the same name, 75 if some snapshots could not be copied (run it \
again). docs/exit-codes.md lists all others.")]
pub(super) struct CopyArgs {
    /// URL of the source, the folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, swift://…,
    /// file:///dir or a path
    ///
    /// DELTAFOLD_FROM also sets --from of other commands.
    #[arg(
        long,
        value_name = "URL",
        help_heading = "Store",
        required_unless_present = "from_snapshots"
    )]
    from: Option<String>,
    /// Import plain snapshot files instead, as fulls: 's3://b/k3s/etcd-snapshot-server1-*'
    ///
    /// The * stands for the time in the names; kOps' files are '…/*/etcd.backup.gz'. Each file becomes a full that is named
    /// by the revision in it and the second of its name, the oldest first. What the target has is not read again, and what
    /// is older than its newest full is skipped: run it after each snapshot, or with --follow. The target must have no deltas.
    #[arg(
        long,
        value_name = "PATTERN",
        help_heading = "Store",
        conflicts_with_all = ["from", "max_backups", "max_backup_age", "wait_for_final", "include_excluded", "decrypt"]
    )]
    from_snapshots: Option<String>,
    /// With --from-snapshots: decrypt the files with the age identities in this file; repeatable
    #[arg(
        long,
        hide_env_values = true,
        value_name = "FILE",
        value_delimiter = ',',
        requires = "from_snapshots",
        help_heading = "Encryption"
    )]
    from_age_identity: Vec<PathBuf>,
    /// URL of the target; a local folder is created if its parent folder exists
    ///
    /// DELTAFOLD_TO also sets --to of other commands.
    #[arg(long, value_name = "URL", help_heading = "Store")]
    to: String,
    /// Set an option of the source, overriding --store-option; repeatable
    #[arg(
        long,
        value_name = "KEY=VALUE",
        hide_env_values = true,
        help_heading = "Store"
    )]
    from_option: Vec<String>,
    /// Set an option of the target, overriding --store-option; repeatable
    #[arg(
        long,
        value_name = "KEY=VALUE",
        hide_env_values = true,
        help_heading = "Store"
    )]
    to_option: Vec<String>,
    #[command(flatten)]
    most: CopyLimits,
    /// Wait until the newest full snapshot of the source is marked final, then copy
    #[arg(long, value_parser = yes_or_no)]
    wait_for_final: bool,
    /// With --wait-for-final: copy after this time even without a final snapshot; 0s: wait without limit
    #[arg(long, requires = "wait_for_final", value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    wait_timeout: Duration,
    /// Keep copying new snapshots until the command is stopped
    #[arg(long, value_parser = yes_or_no, conflicts_with = "dry_run")]
    follow: bool,
    /// With --wait-for-final or --follow: list the source this often
    #[arg(long, requires = "repeats", value_name = "DURATION", default_value = "60s", value_parser = duration::parse_above_zero)]
    interval: Duration,
    /// Copy excluded snapshots, too, with their exclusion markers
    #[arg(long, value_parser = yes_or_no)]
    include_excluded: bool,
    /// Copy even if the target is the backup of another cluster, and record the source's cluster there
    #[arg(long, value_parser = yes_or_no)]
    take_over: bool,
    /// Only show what would be copied
    #[arg(long, value_parser = yes_or_no)]
    dry_run: bool,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    plaintext: PlaintextArg,
    /// Copy this many snapshots of 1 MiB and more at a time, each with about 32 MiB of memory [default: the
    /// number of threads]
    ///
    /// Smaller snapshots: as many as --requests. Between local folders eight, or N if N is 1 or more than 8.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Resources")]
    parallel: Option<u16>,
    /// Decrypt encrypted snapshots: the copies are not encrypted
    #[arg(
        long,
        value_parser = yes_or_no,
        conflicts_with_all = ["age_recipient", "age_recipients_file"],
        help_heading = "Encryption"
    )]
    decrypt: bool,
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
        let pattern = self.pattern(cancel)?;
        let (from, to) = self.stores(pattern.as_ref(), cancel)?;
        let ended = run(&from, &to, &self.options(&to, pattern));
        metrics.store_read(from.store.bytes_read());
        let report = ended?;
        metrics.store_written(report.bytes_written);
        print_report(output, report)
    }

    /// The pattern of the files to import.
    fn pattern(&self, cancel: &Cancel) -> Result<Option<Pattern>> {
        let Some(text) = &self.from_snapshots else {
            return Ok(None);
        };
        if let Some(pattern) = Pattern::parse(text)? {
            return Ok(Some(pattern));
        }
        let folder = self
            .access
            .folder_context(text, "--from-snapshots", cancel)?;
        let nothing = || Reason::NoSnapshots.error(format!("{text} holds no files"));
        Err(folder_error(&folder, "--from-snapshots")?.unwrap_or_else(nothing))
    }

    fn follow(&self, cancel: &Cancel, output: Output) -> Ended {
        let metrics = Metrics::new();
        // Dropping it writes the file a last time.
        let _file = self.metrics.keep_file(&metrics)?;
        let server = self.metrics.serve(&metrics, cancel)?;
        let pattern = self.pattern(cancel)?;
        let (from, to) = self.stores(pattern.as_ref(), cancel)?;
        if let Some(server) = &server {
            server.set_ready(true);
        }
        let report = follow(&from, &to, &self.options(&to, pattern), &metrics)?;
        print_report(output, report)
    }

    fn stores(&self, pattern: Option<&Pattern>, cancel: &Cancel) -> Result<(Context, Context)> {
        let source = match (pattern, &self.from) {
            (Some(pattern), _) => &pattern.folder,
            (None, Some(from)) => from,
            (None, None) => return Err(Reason::Usage.error("give --from or --from-snapshots")),
        };
        let from_options = parse_options(&self.from_option, "--from-option")?;
        let to_options = parse_options(&self.to_option, "--to-option")?;
        store::open::refuse_layout(&self.to, "--to")?;
        if normalized(source) == normalized(&self.to) && from_options == to_options {
            return Err(Reason::Usage
                .error("--from and --to are the same: give two stores, or two prefixes of one"));
        }
        let (source_of, target_of) = (NthStore { nth: 0, of: 2 }, NthStore { nth: 1, of: 2 });
        let open = |nth: NthStore, url: &str, own: &[(String, String)], flag: &str| {
            self.access.context_with(nth, cancel, |options, handle| {
                let all: Vec<_> = options.iter().chain(own).cloned().collect();
                store::open(url, &all, handle).map_err(|e| with_flag(&e, flag))
            })
        };
        let mut from = open(source_of, source, &from_options, "--from")?;
        if pattern.is_some() {
            from.keys = decrypting(&self.from_age_identity, "--from-age-identity")?;
        }
        // Recipients speak for the target alone.
        from.trust = self.plaintext.trust(from.keys.decrypts());
        if !self.dry_run {
            let options = [self.access.options(target_of)?, to_options.clone()].concat();
            store::open::make_folder(&self.to, "--to", &options)?;
        }
        let mut to = open(target_of, &self.to, &to_options, "--to")?;
        to.trust = self.plaintext.trust(to.keys.encrypts());
        // The source is read, the target is written. Each direction has its own limit.
        from.store = self.bandwidth.limited(from.store);
        to.store = self.bandwidth.limited(to.store);
        Ok((from, to))
    }

    fn options(&self, to: &Context, series: Option<Pattern>) -> Options {
        let encryption = match (to.keys.encrypts(), self.decrypt) {
            (true, _) => Encryption::Encrypt,
            (false, true) => Encryption::Decrypt,
            (false, false) => Encryption::Keep,
        };
        Options {
            selection: Selection {
                max_backups: self.most.max_backups.and_then(to_u32),
                max_backup_age_days: self.most.max_backup_age.and_then(to_u32),
                excluded: self.include_excluded,
                encryption,
            },
            series,
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

fn to_u32(n: i64) -> Option<u32> {
    u32::try_from(n).ok()
}

/// An error of opening a store that names `flag` (--from or --to) instead of --store.
fn with_flag(e: &Error, flag: &str) -> Error {
    let message = e
        .to_string()
        .replace("--store-option", &format!("{flag}-option"))
        .replace("--store ", &format!("{flag} "));
    e.reason().error(match message.strip_suffix("--store") {
        Some(start) => format!("{start}{flag}"),
        None => message,
    })
}

/// A normalized URL: two spellings of the same place give the same text.
fn normalized(url: &str) -> String {
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

impl Render for CopiedBackup {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        let (to, copied) = (&o.to, count(o.copied, "snapshot"));
        text.line(match o.status {
            Status::NothingToDo if o.failed == 0 && o.kept == 0 => {
                format!(
                    "copied nothing to {to}: the source has no requested snapshot that can be used"
                )
            }
            Status::NothingToDo if o.failed == 0 => {
                format!("nothing to do: {to} has all requested snapshots")
            }
            _ if o.dry_run => format!("would copy {copied} to {to}"),
            _ => format!("copied {copied} ({}) to {to}", size(o.bytes_written)),
        });
        text.field(
            "backups",
            format!("{} of {} requested", o.backups_wanted, o.backups),
        );
        let others = format!(
            "{} existed, {} skipped, {} failed",
            o.kept, o.skipped, o.failed
        );
        text.field("others", others);
        text.field("final", o.final_snapshot.as_deref());
        for (label, decision) in [
            ("copy", CopyStatus::Copied),
            ("skip", CopyStatus::Skipped),
            ("failed", CopyStatus::Failed),
        ] {
            let objects = o
                .objects
                .iter()
                .filter(|object| object.decision == decision);
            let shown = objects.filter(|object| o.dry_run || is_always_shown(object));
            let lines = shown.map(|object| format!("{}: {}", object.path, object.message));
            text.list(label, &lines.collect::<Vec<_>>());
        }
        text.field("took", duration::human(o.seconds));
        text
    }
}

/// Whether an object is listed even if it is not a dry run.
fn is_always_shown(object: &CopiedObject) -> bool {
    object.decision == CopyStatus::Failed || object.reason == "BaseNotCopied"
}
