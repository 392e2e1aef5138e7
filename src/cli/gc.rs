//! `deltafold gc`: its arguments, and its outcome as a table.

use super::metrics::MetricsArgs;
use super::show::Text;
use super::{Ended, Output, StoreArgs, print_report, size};
use crate::base::Cancel;
use crate::bucket::retention::{self, Periods, Policy};
use crate::error::Result;
use crate::job::gc::{Decision, Fate, Object, Options, Outcome, Status, run};
use crate::job::report::Report;
use crate::job::restorable::Restorable;
use crate::mvcc::history::parse_duration;
use chrono::TimeDelta;
use clap::{Args, ValueEnum};
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
    /// Which fulls are kept
    #[arg(long, value_name = "POLICY")]
    policy: PolicyName,
    /// With the policy "limit": so many of the newest fulls, with their deltas
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// With "exponential": the newest full of each of so many hours (UTC), this one included
    #[arg(long, value_name = "N", default_value_t = 24)]
    keep_hourly: u32,
    /// Of so many days
    #[arg(long, value_name = "N", default_value_t = 7)]
    keep_daily: u32,
    /// Of so many weeks, from Monday on
    #[arg(long, value_name = "N", default_value_t = 4)]
    keep_weekly: u32,
    /// Of so many months
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_monthly: u32,
    /// Keep deltas that a newer full has superseded for so long, while a full that is kept leads to them
    /// [default: with "exponential" they go at once, with "limit" they stay with their fulls]
    #[arg(long, value_name = "DURATION", value_parser = parse_time)]
    delta_retention: Option<TimeDelta>,
    /// All that can be restored of so long a time before now stays restorable
    #[arg(long, value_name = "DURATION", value_parser = parse_time)]
    restorable_window: Option<TimeDelta>,
    /// First only exclude what goes, so that `deltafold undelete` brings it back, and delete it when it was
    /// excluded for so long; 0s: delete at once
    #[arg(long, value_name = "DURATION", default_value = "7d", value_parser = parse_time)]
    purge_after: TimeDelta,
    /// Delete uploads that nobody completed, and notes on snapshots that are not there, when so old
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = parse_time)]
    staging_age: TimeDelta,
    /// Remove even if the newest revision that can be restored would fall
    #[arg(long, value_parser = super::yes_or_no)]
    allow_shrink: bool,
    /// Do it; without this nothing is changed
    #[arg(long, value_parser = super::yes_or_no)]
    apply: bool,
    #[command(flatten)]
    metrics: MetricsArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyName {
    /// The newest full of each of the last hours, days, weeks and months
    Exponential,
    /// The newest fulls
    Limit,
}

fn parse_time(s: &str) -> Result<TimeDelta, String> {
    let time = parse_duration(s).and_then(|d| TimeDelta::from_std(d).ok());
    time.ok_or_else(|| "give a duration such as 90s, 30m, 1h30m or 7d".to_owned())
}

impl GcArgs {
    fn options(&self) -> Options {
        Options {
            retention: retention::Options {
                policy: match self.policy {
                    PolicyName::Limit => Policy::Limit(self.limit),
                    PolicyName::Exponential => Policy::Exponential(Periods {
                        hourly: self.keep_hourly,
                        daily: self.keep_daily,
                        weekly: self.keep_weekly,
                        monthly: self.keep_monthly,
                    }),
                },
                delta_retention: self.delta_retention,
                restorable_window: self.restorable_window,
                purge_after: Some(self.purge_after).filter(|age| !age.is_zero()),
            },
            staging_age: self.staging_age,
            apply: self.apply,
            allow_shrink: self.allow_shrink,
            look_again: Options::LOOK_AGAIN,
        }
    }

    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.metrics.around("gc", cancel, |_| {
            let ctx = self.store.context(cancel)?;
            let report = run(&ctx, &self.options())?;
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
        None | Some(Fate::Done) => String::new(),
        Some(Fate::Hidden) => ", hidden: the bucket keeps a version".to_owned(),
        Some(Fate::Locked) => match x.locked_until {
            Some(t) => format!(", LOCKED until {}", t.format("%Y-%m-%dT%H:%M:%SZ")),
            None => ", LOCKED until somebody lifts it".to_owned(),
        },
        Some(Fate::Failed) => format!(", FAILED: {}", x.error.as_deref().unwrap_or_default()),
        Some(Fate::Waiting) => ", waits for another".to_owned(),
        Some(Fate::Changed) => ", kept: it was changed meanwhile".to_owned(),
    }
}
