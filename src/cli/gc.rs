//! `deltafold gc`: its arguments, and its result as a table.
//!
//! The operation itself is `ops::gc`.

use super::leases::LockArgs;
use super::metrics::MetricsArgs;
use super::render::{Blocks, Cell, Render, Row};
use super::text;
use super::{Ended, Output, StoreArgs, print_report, size};
use crate::backup::retention::Periods;
use crate::base::Cancel;
use crate::base::duration::{self, parse_above_zero};
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::error::{Reason, Result};
use crate::ops::gc::{
    CleanedBackup, DEFAULT_LIMIT, Decision, Object, Options, PolicyName, RemovalStatus, Rules, run,
};
use crate::ops::report::{Report, Status};
use chrono::TimeDelta;
use clap::Args;
use std::collections::BTreeMap;
use std::time::Duration;

const POLICY_HELP: &str = "\
Retention policy: which fulls to keep

DELTAFOLD_POLICY also sets --policy of `deltafold task`, where it is the name of an EtcdBackupPolicy.";

/// Remove snapshots that the retention policy does not keep
///
/// Without --apply, gc only shows which objects it would remove, and why. It always keeps the newest chain of
/// the newest timeline, pinned chains, what --restorable-window needs, and snapshots for which it is unclear to
/// which timeline they belong. Before gc removes snapshots because a newer full has superseded them, it reads
/// that full completely. What gc deletes does not come back, unless the bucket keeps versions. Objects
/// under object lock stay and are reported.
#[derive(Debug, Args)]
// The controller's policies share this option. Their documentation has no environment variables.
#[command(mut_arg("policy", |a| a.long_help(POLICY_HELP)), after_long_help = "\
Examples:
  Show what would be removed if the newest full of each of the last 24 hours, 7 days and 4 weeks is kept:
      deltafold gc --store s3://backups/etcd-main --policy exponential
  Keep every point of the last 30 days restorable:
      deltafold gc --store s3://backups/etcd-main --policy exponential --restorable-window 30d --apply
  Keep the newest ten fulls with their deltas:
      deltafold gc --store /backups/etcd-main --policy limit --limit 10 --apply
  List the objects to remove with the reasons:
      deltafold gc --store /backups/etcd-main --policy exponential --output json |
          jq -r '.objects[] | select(.decision != \"Keep\") | [.path, .explanation] | @tsv'

Exit codes: 0 on success, 75 if not all objects could be removed, time was too short to remove any, or another gc is running. \
docs/exit-codes.md lists all others.")]
pub(super) struct GcArgs {
    #[command(flatten)]
    rules: Rules,
    #[command(flatten)]
    periods: Periods,
    /// Delete leftovers after this time: unfinished uploads, and deltafold's own notes about snapshots that no
    /// longer exist
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = staging_age)]
    staging_age: TimeDelta,
    /// Read no further full after this time: what rests on the others is removed by the next run
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_above_zero)]
    timeout: Duration,
    /// Remove snapshots even if the newest revision that can be restored becomes lower
    #[arg(long, value_parser = yes_or_no)]
    allow_shrink: bool,
    /// Remove the objects instead of only listing them
    #[arg(long, value_parser = yes_or_no)]
    apply: bool,
    /// Remove although the store can keep no lock: nobody else runs gc or pin there
    #[arg(long, value_parser = yes_or_no)]
    single_writer: bool,
    #[command(flatten)]
    lock: LockArgs,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
}

fn staging_age(s: &str) -> Result<TimeDelta, String> {
    TimeDelta::from_std(duration::parse(s)?).map_err(|e| e.to_string())
}

impl GcArgs {
    fn options(&self) -> Result<Options> {
        let unused = match self.rules.policy {
            PolicyName::Limit if self.periods != Periods::default() => Some(
                "--keep-hourly, --keep-daily, --keep-weekly and --keep-monthly belong to --policy exponential: leave them out",
            ),
            PolicyName::Exponential if self.rules.limit != Some(DEFAULT_LIMIT) => {
                Some("--limit belongs to --policy limit: leave it out")
            }
            _ => None,
        };
        if let Some(message) = unused {
            return Err(Reason::Usage.error(message));
        }
        Ok(Options {
            retention: self.rules.retention(self.periods)?,
            staging_age: self.staging_age,
            apply: self.apply,
            allow_shrink: self.allow_shrink,
            timeout: self.timeout,
            lock_lease: self.lock.name(),
            single_writer: self.single_writer,
        })
    }

    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.metrics.around("gc", cancel, |_| {
            let (ctx, options) = (self.store.context(cancel)?, self.options()?);
            print_report(output, run(&ctx, &options)?)
        })
    }
}

impl Render for CleanedBackup {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        add_counts(o, &mut text);
        add_removed(&o.objects, &mut text);
        text::add_ranges("before", &o.restorable_before, &mut text);
        text::add_ranges("restorable", &o.restorable_after, &mut text);
        let t = &o.totals;
        let (kept, deleted) = (t.kept.objects, t.deleted.objects);
        if o.status == Status::NothingToDo {
            let kept = count(kept, "object");
            text.line(format!("nothing to do: {kept} kept, none to remove"));
            return text;
        }
        let would = if o.dry_run { "would be: " } else { "" };
        let left = match t.left.objects {
            0 => String::new(),
            n => format!(", {n} not removed ({})", size(t.left.bytes)),
        };
        let (deleted_bytes, kept_bytes) = (size(t.deleted.bytes), size(t.kept.bytes));
        text.line(format!(
            "{would}{deleted} deleted ({deleted_bytes}), {kept} kept ({kept_bytes}){left}"
        ));
        if o.dry_run {
            let also = match o.reason() {
                Some(Reason::WouldShrink) => " --allow-shrink",
                _ => "",
            };
            text.line(format!(
                "nothing was changed: give --apply{also} to remove the objects"
            ));
        }
        text
    }
}

/// Adds the objects that are not kept. Long lists are shortened, but separately for each result, so that
/// failures stay visible.
fn add_removed(objects: &[Object], text: &mut Blocks) {
    let mut groups: BTreeMap<(Decision, &str, Option<u8>), Vec<String>> = BTreeMap::new();
    for x in objects.iter().filter(|x| x.decision != Decision::Keep) {
        groups
            .entry((x.decision, x.reason, x.fate.map(|fate| fate as u8)))
            .or_default()
            .push(format!("{}: {}{}", x.path, x.explanation, fate(x)));
    }
    for ((decision, ..), lines) in &groups {
        text.list(word(*decision), lines);
    }
}

/// Adds a table with the number and size of the objects of each decision and reason.
fn add_counts(o: &CleanedBackup, text: &mut Blocks) {
    let mut groups: BTreeMap<(Decision, &str), (u64, u64)> = BTreeMap::new();
    for x in &o.objects {
        let (objects, bytes) = groups.entry((x.decision, x.reason)).or_default();
        *objects += 1;
        *bytes = bytes.saturating_add(x.bytes);
    }
    let row = |((decision, reason), (objects, bytes))| -> Row {
        let cells = [
            word(decision).into(),
            Cell::Count(objects),
            Cell::Bytes(bytes),
            Cell::from(reason),
        ];
        Vec::from(cells).into()
    };
    let header = ["DECISION", "OBJECTS", "SIZE", "REASON"];
    text.table(&header, groups.into_iter().map(row).collect());
}

fn word(decision: Decision) -> &'static str {
    match decision {
        Decision::Keep => "keep",
        Decision::Delete => "delete",
    }
}

/// What happened to an object that was to be removed; empty if it was removed.
fn fate(x: &Object) -> String {
    match x.fate {
        None | Some(RemovalStatus::Done) => String::new(),
        Some(RemovalStatus::Hidden) => ", hidden: the bucket still has a version of it".to_owned(),
        Some(RemovalStatus::Locked) => match x.locked_until {
            Some(t) => format!(", LOCKED until {}", text::local_time(t)),
            None => ", LOCKED until the legal hold is removed".to_owned(),
        },
        Some(RemovalStatus::Failed) => {
            format!(", FAILED: {}", x.error.as_deref().unwrap_or_default())
        }
        Some(RemovalStatus::Waiting) => ", waits for another object".to_owned(),
    }
}
