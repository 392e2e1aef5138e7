//! `deltafold list`: its arguments, and its result as a table.
//!
//! The operation itself is `ops::list`.

use super::render::{Blocks, Cell, Render, Row};
use super::terminal::Style;
use super::text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::{Cancel, shorten};
use crate::error::Reason;
use crate::ops::list::files::{self, ListedFile, ListedFiles};
use crate::ops::list::{ListedBackup, ListedSnapshot, Options, RecordedIdentity, run};
use crate::ops::report::Report;
use clap::Args;

/// List the snapshots in a store, what can be restored from them, and their problems
///
/// Of a folder of plain snapshot files, list shows the names, times and sizes, and the command that reads the newest. With
/// --deep it reads them: revision, keys, and whether each is sound.
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
  List the snapshots that k3s takes:
      deltafold list --store /var/lib/rancher/k3s/server/db/snapshots

Problems of snapshots are only listed: the exit code is 0 nevertheless.")]
pub(super) struct ListArgs {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    store: StoreArgs,
}

impl ListArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let ctx = self.store.context(cancel)?;
        match run(&ctx, self.options) {
            Err(e) if e.reason() == Reason::NoSnapshots => {
                match files::list(&ctx, self.options.deep)? {
                    Some(report) => print_report(output, report),
                    None => Err(e),
                }
            }
            report => print_report(output, report?),
        }
    }
}

impl Render for ListedFiles {
    fn blocks(o: &Report<Self>) -> Blocks {
        let row = |f: &ListedFile| -> Row {
            let sound = match (&f.reason, f.readable, f.has_checksum) {
                (Some(reason), ..) => format!("no ({reason})"),
                (None, None, _) => String::new(),
                (None, _, Some(false)) => "yes, no checksum".to_owned(),
                (None, ..) => "yes".to_owned(),
            };
            let cells: [Cell; 7] = [
                f.created.into(),
                Cell::Bytes(f.bytes),
                f.revision.map_or(Cell::None, Cell::Revision),
                f.live_keys.map_or(Cell::None, Cell::Count),
                f.compression.into(),
                sound.into(),
                f.name.as_str().into(),
            ];
            Vec::from(cells).into()
        };
        let mut text = Blocks::default();
        let header = [
            "CREATED", "SIZE", "REVISION", "KEYS", "PACKED", "SOUND", "NAME",
        ];
        text.table(&header, o.files.iter().map(row).collect());
        text.line("these are plain snapshot files; the newest of a series is read with a pattern, such as:");
        text.indented(2, &o.next);
        text
    }
}

impl Render for ListedBackup {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        let rows = lines(&o.snapshots);
        text.table(&HEADER, rows.iter().map(Line::row).collect());
        text.field("cluster", o.identity.as_ref().map(RecordedIdentity::text));
        for t in &o.timelines {
            if let (Some(left), Some(at)) = (&t.left_timeline, t.left_at_revision) {
                let began = t
                    .began
                    .map(|at| format!(" before {}", text::local_time(at)));
                let began = began.unwrap_or_default();
                text.field(
                    "history",
                    format!("{} left {left} at revision {at}{began}", t.timeline),
                );
            }
        }
        text::add_ranges("restorable", &o.restorable, &mut text);
        text::add_findings(&o.problems, &mut text);
        text
    }
}

const HEADER: [&str; 8] = [
    "KIND",
    "REVISIONS",
    "CREATED",
    "SIZE",
    "TIMELINE",
    "FLAGS",
    "LOCKED UNTIL",
    "NAME",
];

/// A line of the table.
enum Line<'a> {
    Snapshot(&'a ListedSnapshot),
    /// Contiguous deltas that are not shown: the first, the last, their number and their size.
    Folded(&'a ListedSnapshot, &'a ListedSnapshot, usize, u64),
}

impl Line<'_> {
    fn row(&self) -> Row {
        let (cells, style) = match self {
            Line::Snapshot(s) => (cells(s), is_full(s).then_some(Style::Strong)),
            Line::Folded(first, last, deltas, bytes) => {
                let mut cells = cells(first);
                cells[0] = format!("… {deltas}").into();
                cells[1] = range(first.start_revision.0, last.last_revision.0).into();
                cells[3] = Cell::Bytes(*bytes);
                cells[7] = format!("… {deltas} more: --output json has all").into();
                (cells, Some(Style::Remark))
            }
        };
        Row {
            cells: cells.into(),
            style,
        }
    }
}

/// The cells of a snapshot.
fn cells(s: &ListedSnapshot) -> [Cell; 8] {
    let first = if is_full(s) {
        s.last_revision.0
    } else {
        s.start_revision.0
    };
    [
        s.kind.as_str().into(),
        range(first, s.last_revision.0).into(),
        s.created.into(),
        Cell::Bytes(s.bytes),
        timeline(s).into(),
        flags(s).into(),
        s.locked_until.into(),
        s.path.as_str().into(),
    ]
}

/// The snapshots. Of a long run of contiguous deltas, only the first ones and the last one are shown.
fn lines(snapshots: &[ListedSnapshot]) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    let mut rest = snapshots;
    while let Some((first, after)) = rest.split_first() {
        let run = 1 + rest
            .windows(2)
            .take_while(|w| continues(&w[0], &w[1]))
            .count();
        if run > shorten::WHOLE {
            lines.extend(rest[..shorten::FIRST].iter().map(Line::Snapshot));
            let folded = &rest[shorten::FIRST..run - 1];
            let bytes = folded.iter().map(|s| s.bytes).sum();
            let (begin, end) = (&folded[0], &folded[folded.len() - 1]);
            lines.push(Line::Folded(begin, end, folded.len(), bytes));
            lines.push(Line::Snapshot(&rest[run - 1]));
            rest = &rest[run..];
        } else {
            lines.push(Line::Snapshot(first));
            rest = after;
        }
    }
    lines
}

/// Whether two deltas are contiguous and differ in nothing else that the table shows.
fn continues(a: &ListedSnapshot, b: &ListedSnapshot) -> bool {
    !is_full(a)
        && !is_full(b)
        && a.last_revision.0 + 1 == b.start_revision.0
        && timeline(a) == timeline(b)
        && flags(a) == flags(b)
}

fn range(first: i64, last: i64) -> String {
    if first == last {
        first.to_string()
    } else {
        format!("{first}–{last}")
    }
}

fn flags(s: &ListedSnapshot) -> String {
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
    flags.join(",")
}

fn timeline(s: &ListedSnapshot) -> &str {
    s.timeline.as_deref().unwrap_or("?")
}

fn is_full(s: &ListedSnapshot) -> bool {
    s.start_revision.0 == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::{Compression, Kind};
    use crate::mvcc::Revision;
    use chrono::DateTime;

    fn snapshot(timeline: &str, start: i64, last: i64) -> ListedSnapshot {
        let kind = if start == 0 { Kind::Full } else { Kind::Incr };
        let name = format!("{}-{start:08}-{last:08}-1795228239.gz", kind.as_str());
        ListedSnapshot {
            path: format!("v2/{name}"),
            name,
            kind,
            start_revision: Revision(start),
            last_revision: Revision(last),
            created: DateTime::UNIX_EPOCH,
            bytes: 1000,
            compression: Compression::Gzip,
            is_final: false,
            encrypted: false,
            excluded: false,
            untrusted: false,
            timeline: Some(timeline.to_owned()),
            in_chain: false,
            locked_until: None,
        }
    }

    fn main(ranges: &[(i64, i64)]) -> Vec<ListedSnapshot> {
        ranges
            .iter()
            .map(|&(start, last)| snapshot("main", start, last))
            .collect()
    }

    fn table(snapshots: &[ListedSnapshot], width: Option<usize>) -> Vec<String> {
        let mut text = Blocks::default();
        let rows = lines(snapshots);
        text.table(&HEADER, rows.iter().map(Line::row).collect());
        let text = super::super::render::to_text(&text, width);
        let table = super::super::terminal::render(&text, false);
        table.lines().map(str::to_owned).collect()
    }

    #[test]
    fn in_a_narrow_table_the_names_stand_below() {
        let mut snapshots = main(&[(0, 275), (276, 445)]);
        for s in &mut snapshots {
            s.in_chain = true;
        }
        let wide = table(&snapshots, Some(200));
        assert!(wide[0].starts_with("KIND  REVISIONS"), "{wide:?}");
        assert!(wide[1].ends_with(&snapshots[0].path), "{wide:?}");
        let narrow = table(&snapshots, Some(80));
        assert!(narrow[0].starts_with("KIND  REVISIONS"), "{narrow:?}");
        assert!(narrow[0].contains("TIMELINE"), "{narrow:?}");
        assert_eq!(narrow[2], format!("      name  {}", snapshots[0].path));
        assert!(narrow.iter().all(|l| l.chars().count() <= 80), "{narrow:?}");
    }

    #[test]
    fn a_long_run_of_deltas_is_folded_up_to_its_end() {
        let mut ranges: Vec<_> = (1..=2000).map(|i| (i * 10 + 1, i * 10 + 10)).collect();
        ranges.insert(0, (0, 10));
        ranges.push((30_000, 30_001));
        let rows = table(&main(&ranges), None);
        assert_eq!(rows.len(), 1 + 1 + 3 + 1 + 1 + 1, "{rows:?}");
        assert!(rows[5].contains("41–20000"), "{}", rows[5]);
        assert!(
            rows[5].ends_with("… 1996 more: --output json has all"),
            "{}",
            rows[5]
        );
        assert!(rows[6].contains("20001–20010"), "{}", rows[6]);
        assert!(rows[7].contains("30000–30001"), "{}", rows[7]);
    }
}
