//! `deltafold gc`: its arguments, and its outcome as a table.

use super::metrics::MetricsArgs;
use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report, size};
use crate::backup::retention::Periods;
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, duration};
use crate::error::Result;
use crate::ops::gc::{Decision, Object, Options, Outcome, RemovalStatus, Rules, Status, run};
use crate::ops::report::Report;
use crate::ops::restorable::Restorable;
use chrono::TimeDelta;
use clap::Args;
use std::collections::BTreeMap;

/// Remove the snapshots that a policy does not keep, and what removal leaves behind
///
/// Without --apply it only says what would go, and why. The newest chain of the newest timeline is always
/// kept, and whatever --restorable-window, pins and doubts about histories need. A full makes others go only
/// after it was read whole, once. In a bucket that keeps versions what is locked stays and is reported, the
/// rest is deleted by version.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  What would go? Kept are the newest full of each of the last 24 hours, 7 days and 4 weeks:
      deltafold gc --store s3://backups/etcd-main --policy exponential
  Each point of the last three days stays restorable, and what goes can be brought back for two weeks:
      deltafold gc --store s3://backups/etcd-main --policy exponential \\
          --restorable-window 3d --purge-after 14d --apply
  The newest ten fulls with their deltas:
      deltafold gc --store /backups/etcd-main --policy limit --limit 10 --apply
  What goes, and why?
      deltafold gc --store /backups/etcd-main --policy exponential --output json |
          jq -r '.objects[] | select(.decision != \"Keep\") | [.path, .explanation] | @tsv'

The exit code is 0, or tells the kind of failure: docs/exit-codes.md. 75 means that not all could be
removed, or that another run is at work.")]
pub(super) struct GcArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    rules: Rules,
    #[command(flatten)]
    periods: Periods,
    /// Delete uploads that nobody completed, and notes on snapshots that are not there, when so old
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = staging_age)]
    staging_age: TimeDelta,
    /// Remove even if the newest revision that can be restored would fall
    #[arg(long, value_parser = yes_or_no)]
    allow_shrink: bool,
    /// Do it; without this nothing is changed
    #[arg(long, value_parser = yes_or_no)]
    apply: bool,
    #[command(flatten)]
    metrics: MetricsArgs,
}

fn staging_age(s: &str) -> Result<TimeDelta, String> {
    TimeDelta::from_std(duration::parse(s)?).map_err(|e| e.to_string())
}

impl GcArgs {
    fn options(&self) -> Result<Options> {
        Ok(Options {
            retention: self.rules.retention(self.periods)?,
            staging_age: self.staging_age,
            apply: self.apply,
            allow_shrink: self.allow_shrink,
            look_again: Options::LOOK_AGAIN,
        })
    }

    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.metrics.around("gc", cancel, |_| {
            let ctx = self.store.context(cancel)?;
            let report = run(&ctx, &self.options()?)?;
            print_report(output, report, in_words)
        })
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    count(o, &mut text);
    text.block("\n");
    // Each fate stands by itself: what failed must not vanish among the others.
    let mut goes: BTreeMap<(Decision, &str, Option<u8>), Vec<String>> = BTreeMap::new();
    for x in o.objects.iter().filter(|x| x.decision != Decision::Keep) {
        goes.entry((x.decision, x.reason, x.fate.map(|fate| fate as u8)))
            .or_default()
            .push(format!("{}: {}{}", x.path, x.explanation, fate(x)));
    }
    for ((decision, ..), objects) in &goes {
        text.items(&format!("{} ", word(*decision)), objects);
    }
    for (when, ranges) in [
        ("was restorable", &o.restorable_before),
        ("restorable", &o.restorable_after),
    ] {
        let range = |r: &Restorable| {
            let (first, last) = (r.first_revision, r.last_revision);
            format!("{when} on {}: revisions {first} to {last}", r.timeline)
        };
        let ranges: Vec<String> = ranges.iter().map(range).collect();
        text.items("", &ranges);
    }
    for warning in &o.warnings {
        text.line(format_args!("warning: {warning}"));
    }
    let t = &o.totals;
    let left = match t.left.objects {
        0 => String::new(),
        n => format!(", {n} left ({})", size(t.left.bytes)),
    };
    text.line(match o.status {
        Status::NothingToDo => format!("nothing to do: all {} objects stay", t.kept.objects),
        _ => format!(
            "{}{} deleted ({}), {} removed and recoverable ({}), {} kept ({}){left}",
            if o.dry_run { "would be: " } else { "" },
            t.deleted.objects,
            size(t.deleted.bytes),
            t.removed.objects,
            size(t.removed.bytes),
            t.kept.objects,
            size(t.kept.bytes),
        ),
    });
    if o.dry_run && o.status != Status::NothingToDo {
        text.line("nothing was changed: --apply does it");
    }
    text.end()
}

/// How many objects stay or go, for each reason.
fn count(o: &Outcome, text: &mut Text) {
    let mut groups: BTreeMap<(Decision, &str), (u64, u64)> = BTreeMap::new();
    for x in &o.objects {
        let group = groups.entry((x.decision, x.reason)).or_default();
        group.0 += 1;
        group.1 = group.1.saturating_add(x.bytes);
    }
    let mut row = |decision: &str, objects: &str, size: &str, reason: &str| {
        text.line(format_args!(
            "{decision:8} {objects:>8} {size:>12}  {reason}"
        ));
    };
    row("DECISION", "OBJECTS", "SIZE", "REASON");
    for ((decision, reason), (objects, bytes)) in groups {
        row(word(decision), &objects.to_string(), &size(bytes), reason);
    }
}

fn word(decision: Decision) -> &'static str {
    match decision {
        Decision::Keep => "keep",
        Decision::Remove => "remove",
        Decision::Delete => "delete",
    }
}

/// What became of an object that shall go, unless it is just that.
fn fate(x: &Object) -> String {
    match x.fate {
        None | Some(RemovalStatus::Done) => String::new(),
        Some(RemovalStatus::Hidden) => ", hidden: the bucket keeps a version".to_owned(),
        Some(RemovalStatus::Locked) => match x.locked_until {
            Some(t) => format!(", LOCKED until {}", t.format("%Y-%m-%dT%H:%M:%SZ")),
            None => ", LOCKED until somebody lifts it".to_owned(),
        },
        Some(RemovalStatus::Failed) => {
            format!(", FAILED: {}", x.error.as_deref().unwrap_or_default())
        }
        Some(RemovalStatus::Waiting) => ", waits for another".to_owned(),
        Some(RemovalStatus::Changed) => ", kept: it was changed meanwhile".to_owned(),
    }
}
