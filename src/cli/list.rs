//! `deltafold list`: its arguments, a table and a picture.

use super::kubernetes::table;
use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report, size};
use crate::base::shorten;
use crate::ops::Context;
use crate::ops::list::{ListedSnapshot, Options, Outcome, Restorable, run};
use crate::ops::report::Report;
use clap::Args;

/// List the snapshots of a store, what can be restored from them, and what is wrong with them
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  By names alone, which is quick:
      deltafold list --store s3://backups/etcd-main
  Reading every snapshot: checksums, true revisions, timelines:
      deltafold list --store s3://backups/etcd-main --deep
  The newest revision that can be restored:
      deltafold list --store /backups/etcd-main --output json | jq '[.restorable[].last_revision] | max'

It ends with 0 whatever is wrong with the snapshots: that stands under problems.")]
pub(super) struct ListArgs {
    #[command(flatten)]
    pub(super) store: StoreArgs,
    #[command(flatten)]
    options: Options,
}

impl ListArgs {
    pub(super) fn run(&self, ctx: &Context, output: Output) -> Ended {
        print_report(output, run(ctx, self.options)?, in_words)
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let header = [
        "KIND",
        "REVISIONS",
        "CREATED",
        "SIZE",
        "TIMELINE",
        "",
        "NAME",
    ];
    let rows = o.snapshots.iter().map(|s| {
        let revisions = match s.start_revision.0 {
            0 => s.last_revision.to_string(),
            start => format!("{start}–{}", s.last_revision),
        };
        let marks = [
            (s.in_chain, "chain"),
            (s.excluded, "excluded"),
            (s.untrusted, "untrusted"),
            (s.is_final, "final"),
            (s.encrypted, "encrypted"),
        ];
        let marks: Vec<&str> = marks.iter().filter(|m| m.0).map(|m| m.1).collect();
        [
            s.kind.as_str().to_owned(),
            revisions,
            s.created.format("%Y-%m-%d %H:%M:%SZ").to_string(),
            size(s.bytes),
            s.timeline.clone().unwrap_or_else(|| "?".to_owned()),
            marks.join(","),
            s.path.clone(),
        ]
    });
    let mut text = Text::new();
    text.block(&table(header, rows.collect()));
    text.block("\n");
    text.block(&picture(&o.snapshots));
    if let Some(identity) = &o.identity {
        let names = match identity.member_names.is_empty() {
            true => String::new(),
            false => {
                let names = shorten::line(&identity.member_names, ", ", "");
                format!(", members {names}")
            }
        };
        text.line(format_args!(
            "backup of cluster {}{names}",
            identity.cluster_id
        ));
    }
    let restorable = |r: &Restorable| {
        format!(
            "restorable on {}: revisions {} to {}, {} to {}",
            r.timeline,
            r.first_revision,
            r.last_revision,
            r.first_time.format("%Y-%m-%d %H:%M:%SZ"),
            r.last_time.format("%Y-%m-%d %H:%M:%SZ")
        )
    };
    let ranges: Vec<String> = o.restorable.iter().map(restorable).collect();
    text.items("", &ranges);
    for p in &o.problems {
        text.line(format_args!("{}: {}", p.reason, p.message));
        text.items("    ", &p.snapshots);
    }
    text.end()
}

/// Each timeline as a line over the revisions: fulls as `●`, deltas as `─`, holes as blanks.
fn picture(snapshots: &[ListedSnapshot]) -> String {
    const WIDTH: i64 = 60;
    let counts = |s: &&ListedSnapshot| !s.excluded && !s.untrusted;
    let used: Vec<&ListedSnapshot> = snapshots.iter().filter(counts).collect();
    let first_of = |s: &&ListedSnapshot| match s.start_revision.0 {
        0 => s.last_revision.0,
        start => start,
    };
    let (Some(first), Some(last)) = (
        used.iter().map(first_of).min(),
        used.iter().map(|s| s.last_revision.0).max(),
    ) else {
        return String::new();
    };
    let column = |r: i64| {
        let of = i128::from(last - first).max(1);
        (i128::from(r - first) * i128::from(WIDTH - 1) / of) as usize
    };
    let timeline = |s: &ListedSnapshot| s.timeline.clone().unwrap_or_else(|| "?".to_owned());
    // In the order in which they come.
    let mut lines: Vec<(String, Vec<char>)> = Vec::new();
    let (deltas, fulls): (Vec<&ListedSnapshot>, Vec<&ListedSnapshot>) =
        used.iter().copied().partition(|s| s.start_revision.0 > 0);
    for s in &used {
        let t = timeline(s);
        if !lines.iter().any(|l| l.0 == t) {
            lines.push((t, vec![' '; WIDTH as usize]));
        }
    }
    for s in deltas.iter().chain(&fulls) {
        let (from, mark) = match s.start_revision.0 {
            0 => (s.last_revision.0, '●'),
            start => (start, '─'),
        };
        let t = timeline(s);
        if let Some((_, line)) = lines.iter_mut().find(|l| l.0 == t) {
            line[column(from)..=column(s.last_revision.0)].fill(mark);
        }
    }
    let width = lines.iter().map(|l| l.0.chars().count()).max().unwrap_or(0);
    let (left, right) = (first.to_string(), last.to_string());
    let gap = (WIDTH as usize)
        .saturating_sub(left.len() + right.len())
        .max(1);
    let mut out = String::new();
    for (t, line) in lines {
        let line: String = line.into_iter().collect();
        out += &format!("{t:width$}  {}\n", line.trim_end());
    }
    out + &format!("{:width$}  {left}{}{right}\n\n", "", " ".repeat(gap))
}
