//! `deltafold list`: its arguments, a table and a picture.

use super::{Output, StoreArgs, print_outcome, size};
use crate::base::flag::yes_or_no;
use crate::error::Result;
use crate::job::Context;
use crate::job::list::{Listed, Options, Outcome, Restorable, run};
use crate::shorten::{self, IN_JSON};
use crate::shown;
use clap::Args;
use std::fmt::Write;

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
    /// Read the contents too, not only the names
    #[arg(long, value_parser = yes_or_no)]
    deep: bool,
    /// Read the tags of all snapshots, to show each that is excluded: a request each
    #[arg(long, value_parser = yes_or_no)]
    all_tags: bool,
}

impl ListArgs {
    pub(super) fn run(&self, ctx: &Context, output: Output) -> Result<()> {
        let options = Options {
            deep: self.deep,
            all_tags: self.all_tags,
        };
        let outcome = run(ctx, options)?;
        print_outcome(output, &outcome, in_words)
    }
}

fn in_words(o: &Outcome) -> String {
    let header = [
        "KIND",
        "REVISIONS",
        "CREATED",
        "SIZE",
        "TIMELINE",
        "",
        "NAME",
    ]
    .map(String::from);
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
            s.kind.to_owned(),
            revisions,
            s.created.format("%Y-%m-%d %H:%M:%SZ").to_string(),
            size(s.bytes),
            s.timeline.clone().unwrap_or_else(|| "?".to_owned()),
            marks.join(","),
            s.path.clone(),
        ]
    });
    let table: Vec<[String; 7]> = std::iter::once(header).chain(rows).collect();
    let mut widths = [0; 7];
    for row in &table {
        for (w, cell) in widths.iter_mut().zip(row) {
            *w = (*w).max(cell.chars().count());
        }
    }
    let mut s = String::new();
    for row in &table {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(c, w)| format!("{c:w$}"))
            .collect();
        // Writing to a String cannot fail.
        let _ = writeln!(s, "{}", cells.join("  ").trim_end());
    }
    s.push('\n');
    s.push_str(&picture(&o.snapshots));
    if let Some(identity) = &o.identity {
        let names = match identity.member_names.is_empty() {
            true => String::new(),
            false => format!(
                ", members {}",
                shorten::line(&identity.member_names, ", ", "")
            ),
        };
        let _ = writeln!(s, "backup of cluster {}{names}", identity.cluster_id);
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
    for range in shorten::lines(&ranges, IN_JSON) {
        let _ = writeln!(s, "{range}");
    }
    for p in &o.problems {
        let _ = writeln!(s, "{}: {}", p.reason, shown::line(&p.message));
        for path in shorten::lines(&p.snapshots, IN_JSON) {
            let _ = writeln!(s, "    {path}");
        }
    }
    s
}

/// Each timeline as a line over the revisions: fulls as `●`, deltas as `─`, holes as blanks.
fn picture(snapshots: &[Listed]) -> String {
    const WIDTH: i64 = 60;
    let used: Vec<&Listed> = snapshots
        .iter()
        .filter(|s| !s.excluded && !s.untrusted)
        .collect();
    let first_of = |s: &Listed| {
        if s.start_revision.0 == 0 {
            s.last_revision.0
        } else {
            s.start_revision.0
        }
    };
    let (Some(first), Some(last)) = (
        used.iter().map(|s| first_of(s)).min(),
        used.iter().map(|s| s.last_revision.0).max(),
    ) else {
        return String::new();
    };
    let column = |r: i64| {
        let of = i128::from(last - first).max(1);
        (i128::from(r - first) * i128::from(WIDTH - 1) / of) as usize
    };
    let mut timelines: Vec<&str> = Vec::new();
    for s in &used {
        let t = s.timeline.as_deref().unwrap_or("?");
        if !timelines.contains(&t) {
            timelines.push(t);
        }
    }
    let name_width = timelines
        .iter()
        .map(|t| t.chars().count())
        .max()
        .unwrap_or(0);
    let mut out = String::new();
    for t in timelines {
        let mut line = vec![' '; WIDTH as usize];
        let on = || {
            used.iter()
                .filter(|s| s.timeline.as_deref().unwrap_or("?") == t)
        };
        for s in on().filter(|s| s.start_revision.0 > 0) {
            line[column(s.start_revision.0)..=column(s.last_revision.0)].fill('─');
        }
        for s in on().filter(|s| s.start_revision.0 == 0) {
            line[column(s.last_revision.0)] = '●';
        }
        let line: String = line.into_iter().collect();
        let _ = writeln!(out, "{t:name_width$}  {}", line.trim_end());
    }
    let (left, right) = (first.to_string(), last.to_string());
    let gap = (WIDTH as usize)
        .saturating_sub(left.len() + right.len())
        .max(1);
    let _ = writeln!(
        out,
        "{:name_width$}  {left}{}{right}\n",
        "",
        " ".repeat(gap)
    );
    out
}
