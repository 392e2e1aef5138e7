//! `deltafold list`: its arguments, and its result as a table and a drawing of the timelines.
//!
//! The operation itself is `ops::list`.

use super::kubernetes::table;
use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report, size};
use crate::base::shorten;
use crate::ops::Context;
use crate::ops::list::{ListedSnapshot, Options, Outcome, run};
use crate::ops::report::Report;
use chrono::{DateTime, Utc};
use clap::Args;

/// List the snapshots in a store, what can be restored from them, and their problems
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  List the snapshots by their names, which is fast:
      deltafold list --store s3://backups/etcd-main
  Read every snapshot, and check checksums, revisions and timelines:
      deltafold list --store s3://backups/etcd-main --deep
  Print the newest revision that can be restored:
      deltafold list --store /backups/etcd-main --output json |
          jq '[.restorable[].last_revision] | max'

Problems of snapshots are only listed: the exit code is 0 nevertheless.")]
pub(super) struct ListArgs {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    pub(super) store: StoreArgs,
}

impl ListArgs {
    pub(super) fn run(&self, ctx: &Context, output: Output) -> Ended {
        print_report(output, run(ctx, self.options)?, to_text)
    }
}

fn to_text(o: &Report<Outcome>) -> String {
    let header = [
        "KIND",
        "REVISIONS",
        "CREATED",
        "SIZE",
        "TIMELINE",
        "",
        "NAME",
    ];
    let mut text = Text::new();
    text.block(&table(header, o.snapshots.iter().map(row).collect()));
    text.block("\n");
    text.block(&drawing(&o.snapshots));
    if let Some(identity) = &o.identity {
        let members = match identity.member_names.is_empty() {
            true => String::new(),
            false => {
                let names = shorten::line(&identity.member_names, ", ", "");
                format!(", members {names}")
            }
        };
        text.line(format_args!(
            "backup of cluster {}{members}",
            identity.cluster_id
        ));
    }
    let mut ranges = Vec::new();
    for r in &o.restorable {
        let (first, last) = (r.first_revision, r.last_revision);
        let (from, to) = (time(r.first_time), time(r.last_time));
        let timeline = &r.timeline;
        ranges.push(format!(
            "restorable on {timeline}: revisions {first} to {last}, {from} to {to}"
        ));
    }
    text.items("", &ranges);
    for p in &o.problems {
        text.line(format_args!("{}: {}", p.reason, p.message));
        text.items("    ", &p.snapshots);
    }
    text.end()
}

/// The row of a snapshot in the table.
fn row(s: &ListedSnapshot) -> [String; 7] {
    let revisions = match is_full(s) {
        true => s.last_revision.to_string(),
        false => format!("{}–{}", s.start_revision, s.last_revision),
    };
    let mut flags = Vec::new();
    for (is_set, flag) in [
        (s.in_chain, "chain"),
        (s.excluded, "excluded"),
        (s.untrusted, "untrusted"),
        (s.is_final, "final"),
        (s.encrypted, "encrypted"),
    ] {
        if is_set {
            flags.push(flag);
        }
    }
    [
        s.kind.as_str().to_owned(),
        revisions,
        time(s.created),
        size(s.bytes),
        timeline(s).to_owned(),
        flags.join(","),
        s.path.clone(),
    ]
}

fn time(t: DateTime<Utc>) -> String {
    t.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

fn timeline(s: &ListedSnapshot) -> &str {
    s.timeline.as_deref().unwrap_or("?")
}

fn is_full(s: &ListedSnapshot) -> bool {
    s.start_revision.0 == 0
}

/// The revision at which the drawing of a snapshot begins. A full is drawn as one point, at its only revision.
fn first_revision(s: &ListedSnapshot) -> i64 {
    match is_full(s) {
        true => s.last_revision.0,
        false => s.start_revision.0,
    }
}

/// Width of a drawing in characters, without the names of the timelines.
const WIDTH: usize = 60;

/// A drawing with a line for each timeline, from the lowest to the highest revision: fulls are `●`, deltas
/// `─`, gaps blanks. Excluded and untrusted snapshots are left out.
fn drawing(snapshots: &[ListedSnapshot]) -> String {
    let mut usable: Vec<&ListedSnapshot> = Vec::new();
    for s in snapshots {
        if !s.excluded && !s.untrusted {
            usable.push(s);
        }
    }
    let first = usable.iter().map(|s| first_revision(s)).min();
    let last = usable.iter().map(|s| s.last_revision.0).max();
    let (Some(first), Some(last)) = (first, last) else {
        return String::new();
    };
    let column = |revision: i64| {
        let revisions = i128::from(last - first).max(1);
        (i128::from(revision - first) * (WIDTH as i128 - 1) / revisions) as usize
    };
    // The timelines in the order of their first snapshots.
    let mut lines: Vec<(&str, Vec<char>)> = Vec::new();
    for s in &usable {
        if !lines.iter().any(|(name, _)| *name == timeline(s)) {
            lines.push((timeline(s), vec![' '; WIDTH]));
        }
    }
    // Draw the fulls last, on top of the deltas.
    usable.sort_by_key(|s| is_full(s));
    for s in usable {
        let mark = if is_full(s) { '●' } else { '─' };
        if let Some((_, line)) = lines.iter_mut().find(|(name, _)| *name == timeline(s)) {
            line[column(first_revision(s))..=column(s.last_revision.0)].fill(mark);
        }
    }
    let names = lines.iter().map(|(name, _)| name.chars().count());
    let name_width = names.max().unwrap_or(0);
    let mut drawing = String::new();
    for (name, line) in lines {
        let line: String = line.into_iter().collect();
        drawing += &format!("{name:name_width$}  {}\n", line.trim_end());
    }
    drawing + &ruler(name_width, first, last)
}

/// The line below a drawing, with the first and the last revision.
fn ruler(name_width: usize, first: i64, last: i64) -> String {
    let (first, last) = (first.to_string(), last.to_string());
    let gap = WIDTH.saturating_sub(first.len() + last.len()).max(1);
    format!("{:name_width$}  {first}{}{last}\n\n", "", " ".repeat(gap))
}
