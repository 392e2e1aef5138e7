//! `deltafold list`: its arguments, and its result as a table and a drawing of the timelines.
//!
//! The operation itself is `ops::list`.

use super::render::{Blocks, Cell, Render, Row};
use super::terminal::Style;
use super::text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::{Cancel, printable, shorten};
use crate::error::Reason;
use crate::ops::list::files::{self, ListedFile, ListedFiles};
use crate::ops::list::{
    ListedBackup, ListedSnapshot, ListedTimeline, Options, RecordedIdentity, run,
};
use crate::ops::report::Report;
use crate::prefix::restorable::Restorable;
use clap::Args;
use std::collections::HashMap;

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
        let rows = lines(&o.snapshots, &o.restorable);
        text.table(&HEADER, rows.iter().map(Line::row).collect());
        text.drawing("\n".to_owned() + &drawing(&o.snapshots, &o.restorable, &o.timelines));
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
    /// Revisions that no snapshot of the timeline has, though a delta follows them.
    Gap(&'a ListedSnapshot, i64, i64),
    /// Contiguous deltas that are not shown: the first, the last, their number and their size.
    Folded(&'a ListedSnapshot, &'a ListedSnapshot, usize, u64),
}

impl Line<'_> {
    fn row(&self) -> Row {
        let (cells, style) = match self {
            Line::Snapshot(s) => (cells(s), is_full(s).then_some(Style::Strong)),
            Line::Gap(s, first, last) => {
                let mut cells = NONE;
                cells[0] = "gap".into();
                cells[1] = range(*first, *last).into();
                cells[4] = timeline(s).into();
                cells[7] = "no snapshot has these".into();
                (cells, Some(Style::Warning))
            }
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

const NONE: [Cell; 8] = [const { Cell::None }; 8];

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

/// The snapshots with the gaps before them. Of a long run of contiguous deltas, only the first ones and the last
/// one are shown.
fn lines<'a>(snapshots: &'a [ListedSnapshot], restorable: &[Restorable]) -> Vec<Line<'a>> {
    let mut gaps = gaps(snapshots, restorable);
    let mut lines = Vec::new();
    let mut rest = snapshots;
    while let Some((first, after)) = rest.split_first() {
        if let Some((from, to)) = gaps.remove(&(timeline(first), first.start_revision.0)) {
            lines.push(Line::Gap(first, from, to));
        }
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

/// The gaps before deltas, by the timeline and the first revision of the delta.
fn gaps<'a>(
    snapshots: &'a [ListedSnapshot],
    restorable: &[Restorable],
) -> HashMap<(&'a str, i64), (i64, i64)> {
    let mut gaps = HashMap::new();
    for (name, segments) in covered(snapshots, restorable) {
        for pair in segments.windows(2) {
            let (first, last) = (pair[0].1 + 1, pair[1].0 - 1);
            gaps.insert((name, pair[1].0), (first, last));
        }
    }
    gaps
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

fn is_usable(s: &ListedSnapshot) -> bool {
    !s.excluded && !s.untrusted
}

/// The first revision that a snapshot covers in the table and the drawing. A full is one point, at its only
/// revision.
fn first_revision(s: &ListedSnapshot) -> i64 {
    if is_full(s) {
        s.last_revision.0
    } else {
        s.start_revision.0
    }
}

/// The ranges of revisions that the usable snapshots of each timeline cover, in ascending order, and no two of
/// them adjoin. What is restorable is no gap: a full may hold more than its name says. The timelines are in the
/// order of their first snapshots.
fn covered<'a>(
    snapshots: &'a [ListedSnapshot],
    restorable: &[Restorable],
) -> Vec<(&'a str, Vec<(i64, i64)>)> {
    let mut timelines: Vec<(&str, Vec<(i64, i64)>)> = Vec::new();
    let mut position: HashMap<&str, usize> = HashMap::new();
    for s in snapshots.iter().filter(|s| is_usable(s)) {
        let i = *position.entry(timeline(s)).or_insert_with(|| {
            timelines.push((timeline(s), Vec::new()));
            timelines.len() - 1
        });
        timelines[i].1.push((first_revision(s), s.last_revision.0));
    }
    for (name, ranges) in &mut timelines {
        ranges.sort_unstable();
        let restorable: Vec<(i64, i64)> = restorable
            .iter()
            .filter(|r| r.timeline == *name)
            .map(|r| (r.first_revision.0, r.last_revision.0))
            .collect();
        let is_restorable =
            |first: i64, last: i64| restorable.iter().any(|r| r.0 <= first && last <= r.1);
        let mut joined: Vec<(i64, i64)> = Vec::new();
        for &(first, last) in ranges.iter() {
            match joined.last_mut() {
                Some(before)
                    if first <= before.1.saturating_add(1)
                        || is_restorable(before.1 + 1, first - 1) =>
                {
                    before.1 = before.1.max(last);
                }
                _ => joined.push((first, last)),
            }
        }
        *ranges = joined;
    }
    timelines
}

/// Width of a drawing in characters, without the names of the timelines.
const WIDTH: usize = 60;
/// The longest name of a timeline beside the drawing, so that a line has at most 80 characters.
const NAME_WIDTH: usize = 18;

/// A drawing with a line for each timeline, from the lowest to the highest revision: fulls are `●`, deltas
/// `─`, gaps blanks, and `╰` is the revision at which a timeline left another one. Excluded and untrusted snapshots are
/// left out.
///
/// A gap has a column at least, however few revisions are missing. If there are more gaps than columns, a column
/// with both revisions and a gap is `┄`.
fn drawing(
    snapshots: &[ListedSnapshot],
    restorable: &[Restorable],
    all: &[ListedTimeline],
) -> String {
    let timelines = covered(snapshots, restorable);
    let ranges = || timelines.iter().flat_map(|(_, ranges)| ranges);
    let first = ranges().map(|r| r.0).min();
    let last = ranges().map(|r| r.1).max();
    let (Some(first), Some(last)) = (first, last) else {
        return String::new();
    };
    let scale = Scale::new(ranges(), first, last);
    let names = timelines.iter().map(|(name, _)| name.chars().count());
    let name_width = names.max().unwrap_or(0).min(NAME_WIDTH);
    let mut drawing = String::new();
    for (name, ranges) in &timelines {
        let mut line = scale.draw(ranges);
        let fulls = snapshots.iter().filter(|s| is_full(s) && is_usable(s));
        for full in fulls.filter(|s| timeline(s) == *name) {
            line[scale.column(full.last_revision.0)] = '●';
        }
        let left = all.iter().find(|t| t.timeline == *name);
        if let Some(at) = left.and_then(|t| t.left_at_revision)
            && (first..=last).contains(&at.0)
            && let Some(blank @ ' ') = line.get_mut(scale.column(at.0))
        {
            *blank = '╰';
        }
        let line: String = line.into_iter().collect();
        let name = shortened(&printable::line(name));
        drawing += &format!("{name:name_width$}  {}\n", line.trim_end());
    }
    drawing + &ruler(name_width, first, last)
}

/// A name of at most [`NAME_WIDTH`] characters.
fn shortened(name: &str) -> String {
    if name.chars().count() > NAME_WIDTH {
        name.chars().take(NAME_WIDTH - 1).chain(['…']).collect()
    } else {
        name.to_owned()
    }
}

/// Which revisions the columns of a drawing stand for.
///
/// The ends of all ranges cut the revisions into pieces, which are covered as a whole or not at all. Each piece
/// has a column, and the other columns are shared by the sizes of the pieces.
struct Scale {
    /// The first revision of each piece, and at the end the revision after the last piece.
    cuts: Vec<i64>,
    /// The first column of each piece; pieces share columns if there are too many of them.
    columns: Vec<usize>,
}

impl Scale {
    fn new<'a>(ranges: impl Iterator<Item = &'a (i64, i64)>, first: i64, last: i64) -> Scale {
        let mut cuts = vec![first, last.saturating_add(1)];
        for (first, last) in ranges {
            cuts.extend([*first, last.saturating_add(1)]);
        }
        cuts.sort_unstable();
        cuts.dedup();
        let pieces = cuts.len() - 1;
        let all = i128::from(cuts[pieces] - first).max(1);
        // The columns beyond the first one of each piece. A revision has one column at most.
        let spare = (all.min(WIDTH as i128) - pieces as i128).max(0);
        let own = |piece: usize| {
            if pieces > WIDTH {
                piece * WIDTH / pieces
            } else {
                piece
            }
        };
        let columns = (0..=pieces).map(|piece| {
            let before = i128::from(cuts[piece] - first);
            own(piece) + (before * spare / all) as usize
        });
        let columns = columns.collect();
        Scale { cuts, columns }
    }

    /// The column of a revision.
    fn column(&self, revision: i64) -> usize {
        let after = self.cuts.partition_point(|cut| *cut <= revision);
        let piece = after.saturating_sub(1).min(self.columns.len() - 2);
        let (begin, end) = (self.cuts[piece], self.cuts[piece + 1]);
        let (from, to) = (self.columns[piece], self.columns[piece + 1]);
        let within = i128::from(revision - begin) * (to - from) as i128;
        let column = from + (within / i128::from(end - begin).max(1)) as usize;
        column.min(WIDTH - 1)
    }

    /// Draws ranges, each of which consists of whole pieces.
    fn draw(&self, ranges: &[(i64, i64)]) -> Vec<char> {
        let (mut covered, mut missing) = ([false; WIDTH], [false; WIDTH]);
        let begins = ranges.first().map_or(i64::MAX, |r| r.0);
        let ends = ranges.last().map_or(i64::MIN, |r| r.1);
        let mut ranges = ranges.iter().peekable();
        for (cut, columns) in self.cuts.windows(2).zip(self.columns.windows(2)) {
            while ranges.next_if(|r| r.1 < cut[0]).is_some() {}
            let is_covered = ranges.peek().is_some_and(|r| r.0 <= cut[0]);
            // Before its first revision and after its last one, a timeline has no gap.
            if !is_covered && (cut[0] < begins || cut[0] > ends) {
                continue;
            }
            let marks = if is_covered {
                &mut covered
            } else {
                &mut missing
            };
            marks[columns[0]..columns[1].max(columns[0] + 1)].fill(true);
        }
        let marks = covered.into_iter().zip(missing);
        let marks = marks.map(|mark| match mark {
            (true, false) => '─',
            (true, true) => '┄',
            (false, _) => ' ',
        });
        marks.collect()
    }
}

/// The line below a drawing, with the first and the last revision.
fn ruler(name_width: usize, first: i64, last: i64) -> String {
    let width = usize::try_from(last.saturating_sub(first).saturating_add(1));
    let width = width.unwrap_or(WIDTH).min(WIDTH);
    let (first, last) = if first == last {
        (first.to_string(), String::new())
    } else {
        (first.to_string(), last.to_string())
    };
    let gap = width.saturating_sub(first.len() + last.len()).max(1);
    let ruler = format!("{:name_width$}  {first}{}{last}", "", " ".repeat(gap));
    format!("{}\n\n", ruler.trim_end())
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

    /// The drawings of the timelines, without their names and the ruler.
    fn drawn(snapshots: &[ListedSnapshot]) -> Vec<String> {
        let drawing = drawing(snapshots, &[], &[]);
        assert!(
            drawing.lines().all(|l| l.chars().count() <= 80),
            "{drawing}"
        );
        let lines = drawing.lines().filter(|l| l.contains(['●', '─', '┄']));
        let line = |l: &str| l.split_once("  ").unwrap().1.to_owned();
        lines.map(line).collect()
    }

    fn main(ranges: &[(i64, i64)]) -> Vec<ListedSnapshot> {
        ranges
            .iter()
            .map(|&(start, last)| snapshot("main", start, last))
            .collect()
    }

    #[test]
    fn contiguous_deltas_are_one_line_whatever_their_sizes() {
        for ranges in [
            &[(0, 275), (276, 445), (446, 505), (506, 604), (605, 628)][..],
            &[(0, 1), (2, 2), (3, 3)],
            &[
                (0, 1),
                (2, 2),
                (3, 4_000_000_000),
                (4_000_000_001, 4_000_000_001),
            ],
            &[(0, 10), (11, 20), (15, 25), (21, 30)],
        ] {
            let line = drawn(&main(ranges)).remove(0);
            assert!(line.starts_with('●'), "{line}");
            assert!(line.chars().skip(1).all(|c| c == '─'), "{ranges:?}: {line}");
            let revisions = ranges[ranges.len() - 1].1 - ranges[0].1 + 1;
            let width = WIDTH.min(revisions as usize);
            assert_eq!(line.chars().count(), width);
        }
        let many: Vec<_> = (0..5000).map(|i| (i * 7 + 1, i * 7 + 7)).collect();
        assert_eq!(drawn(&main(&many)), ["─".repeat(WIDTH)]);
    }

    #[test]
    fn a_gap_of_one_revision_is_a_blank_and_so_is_a_huge_one() {
        let one = drawn(&main(&[(0, 1000), (1001, 500_000), (500_002, 1_000_000)])).remove(0);
        let parts: Vec<&str> = one.split(' ').collect();
        assert_eq!(parts.len(), 2, "{one}");
        assert!(parts.iter().all(|p| p.chars().count() > 20), "{one}");
        let huge = drawn(&main(&[(0, 1), (2, 2), (2_000_000_000, 2_000_000_000)])).remove(0);
        assert!(huge.starts_with('●') && huge.ends_with('─'), "{huge}");
        assert!(huge.contains(&" ".repeat(WIDTH - 8)), "{huge}");
        // The first and the last revision alone.
        assert_eq!(drawn(&main(&[(0, 7)])).remove(0), "●");
    }

    #[test]
    fn more_gaps_than_columns_are_still_seen() {
        let ranges: Vec<_> = (0..1000).map(|i| (i * 3 + 1, i * 3 + 2)).collect();
        let line = drawn(&main(&ranges)).remove(0);
        assert_eq!(line.chars().count(), WIDTH);
        assert!(line.chars().all(|c| c == '┄'), "{line}");
    }

    #[test]
    fn where_a_timeline_left_another_is_drawn() {
        let mut snapshots = main(&[(0, 100), (101, 200)]);
        snapshots.push(snapshot("restored", 0, 180));
        let restored = |at: Option<i64>| ListedTimeline {
            timeline: "restored".to_owned(),
            began: None,
            left_timeline: Some("main".to_owned()),
            left_at_revision: at.map(Revision),
        };
        for (at, expected) in [(Some(150), true), (None, false), (Some(50), false)] {
            let drawing = drawing(&snapshots, &[], &[restored(at)]);
            let line = drawing.lines().find(|l| l.starts_with("restored")).unwrap();
            assert_eq!(line.contains('╰'), expected, "{drawing}");
        }
    }

    #[test]
    fn a_fork_begins_at_its_revision_and_long_names_are_shortened() {
        let mut snapshots = main(&[(0, 100), (101, 200), (201, 300)]);
        snapshots.push(snapshot("a-timeline-with-a-long-name", 201, 250));
        snapshots.push(snapshot("a-timeline-with-a-long-name", 252, 400));
        let drawing = drawing(&snapshots, &[], &[]);
        assert!(drawing.contains("a-timeline-with-a…  "), "{drawing}");
        let lines: Vec<Vec<char>> = drawing.lines().map(|l| l.chars().collect()).collect();
        let at = |line: usize, c: char| lines[line].iter().position(|x| *x == c).unwrap();
        // The fork begins to the right of the full, and has a gap where the other timeline goes on.
        let begin = at(1, '─');
        assert!(begin > at(0, '●') + 5, "{drawing}");
        let gap = begin + lines[1][begin..].iter().position(|c| *c == ' ').unwrap();
        assert_eq!(lines[0][gap], '─', "{drawing}");
        // Excluded snapshots are left out.
        for s in &mut snapshots {
            s.excluded = true;
        }
        assert_eq!(super::drawing(&snapshots, &[], &[]), "");
    }

    fn table(snapshots: &[ListedSnapshot], width: Option<usize>) -> Vec<String> {
        let mut text = Blocks::default();
        let rows = lines(snapshots, &[]);
        text.table(&HEADER, rows.iter().map(Line::row).collect());
        let text = super::super::render::to_text(&text, width);
        let table = super::super::terminal::render(&text, false);
        table.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_gap_has_a_row_of_its_own() {
        let with_gap = main(&[(0, 275), (276, 445), (447, 604), (605, 605)]);
        let rows = table(&with_gap, None);
        assert_eq!(rows.len(), 1 + 4 + 1);
        assert!(rows[0].ends_with("TIMELINE  NAME"), "{rows:?}");
        assert!(rows[3].starts_with("gap   446 "), "{rows:?}");
        assert!(rows[3].ends_with("no snapshot has these"), "{rows:?}");
        // A delta that was uploaded late fills it, and fulls without deltas between them have none.
        let filled = main(&[(0, 275), (276, 445), (447, 604), (446, 446)]);
        assert_eq!(table(&filled, None).len(), 1 + 4);
        let fulls = main(&[(0, 275), (0, 500), (501, 604)]);
        assert_eq!(table(&fulls, None).len(), 1 + 3);
        // The full holds more than its name says.
        let restorable = [Restorable {
            timeline: "main".to_owned(),
            first_revision: Revision(275),
            may_begin_earlier: false,
            last_revision: Revision(605),
            first_time: DateTime::UNIX_EPOCH,
            last_time: DateTime::UNIX_EPOCH,
        }];
        assert!(gaps(&with_gap, &restorable).is_empty());
        assert!(!drawing(&with_gap, &restorable, &[]).contains("─ ─"));
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
        assert_eq!(rows.len(), 1 + 1 + 3 + 1 + 1 + 1 + 1, "{rows:?}");
        assert!(rows[5].contains("41–20000"), "{}", rows[5]);
        assert!(
            rows[5].ends_with("… 1996 more: --output json has all"),
            "{}",
            rows[5]
        );
        assert!(rows[6].contains("20001–20010"), "{}", rows[6]);
        assert!(rows[7].starts_with("gap"), "{}", rows[7]);
    }
}
