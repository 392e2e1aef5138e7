//! Two moments of an object, side by side.

use super::object::Shown;
use serde::Serialize;
use similar::{DiffOp, TextDiff};
use std::ops::Range;
use std::time::Duration;

/// A comparison that takes longer becomes coarse.
const DIFF_TIME: Duration = Duration::from_millis(500);

/// Two moments of an object, side by side.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Comparison {
    /// The first moment, without its text.
    from: Shown,
    /// The second moment, without its text.
    to: Shown,
    /// The lines.
    rows: Vec<Row>,
    /// Whether the texts were too long, and are cut.
    is_cut: bool,
}

/// A line of each side.
#[derive(Debug, Serialize)]
struct Row {
    /// `same`, `removed`, `added` or `changed`.
    change: &'static str,
    left: Option<String>,
    right: Option<String>,
}

impl Comparison {
    pub(in crate::explore) fn of(mut from: Shown, mut to: Shown) -> Self {
        let is_cut = from.is_cut || to.is_cut;
        let (old, new) = (std::mem::take(&mut from.text), std::mem::take(&mut to.text));
        let (old_lines, new_lines): (Vec<&str>, Vec<&str>) =
            (old.lines().collect(), new.lines().collect());
        let diff = TextDiff::configure()
            .timeout(DIFF_TIME)
            .diff_slices(&old_lines, &new_lines);
        let mut rows = Vec::new();
        for op in diff.ops() {
            let change = match op {
                DiffOp::Equal { .. } => "same",
                DiffOp::Delete { .. } => "removed",
                DiffOp::Insert { .. } => "added",
                DiffOp::Replace { .. } => "changed",
            };
            let (old, new) = (op.old_range(), op.new_range());
            for line in 0..old.len().max(new.len()) {
                let text = |lines: &[&str], range: &Range<usize>| {
                    let at = range.start + line;
                    (at < range.end).then(|| lines[at].to_owned())
                };
                rows.push(Row {
                    change,
                    left: text(&old_lines, &old),
                    right: text(&new_lines, &new),
                });
            }
        }
        Comparison {
            from,
            to,
            rows,
            is_cut,
        }
    }
}
