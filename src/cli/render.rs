//! Results as text: a result says its blocks, and here they become a terminal's text.
//!
//! Here the texts of results are escaped, so that nothing from a backup controls the terminal, and wrapped at its width.

use super::print::size;
use super::terminal::{self, Style, marked, width_of};
use super::text::local_time;
use crate::base::printable::line;
use crate::base::shorten::{self, IN_JSON};
use crate::base::{duration, shell};
use crate::error::Result;
use crate::mvcc::Revision;
use crate::ops::report::{Report, Status};
use chrono::{DateTime, Utc};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use std::fmt::Display;

/// A result that can be shown to people: field by field as JSON has it, unless it says its blocks itself.
pub(super) trait Render: Serialize + Sized {
    fn blocks(report: &Report<Self>) -> Blocks {
        Blocks::of_json(report)
    }
}

/// A part of a text.
enum Block {
    /// A line that begins with words in a style, and is indented.
    Line(usize, Option<Style>, String, String),
    /// Lines with labels.
    Fields(Vec<(String, Cell)>),
    Table(Vec<String>, Vec<Row>),
    /// A command that can be copied into a shell.
    Command(Vec<String>),
}

/// The value of a field, or of a column in a row.
pub(super) enum Cell {
    None,
    Text(String),
    Bytes(u64),
    Count(u64),
    Time(DateTime<Utc>),
    /// In seconds
    Duration(f64),
    Revision(Revision),
}

impl Cell {
    /// Returns the value on one line, escaped.
    fn text(&self) -> String {
        match self {
            Cell::None => String::new(),
            Cell::Text(text) => line(text).into_owned(),
            Cell::Bytes(bytes) => size(*bytes),
            Cell::Count(n) => n.to_string(),
            Cell::Time(time) => local_time(*time),
            Cell::Duration(seconds) => duration::human(*seconds),
            Cell::Revision(revision) => revision.to_string(),
        }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Cell::Text(text)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Cell::Text(text.to_owned())
    }
}

impl From<&String> for Cell {
    fn from(text: &String) -> Self {
        Cell::Text(text.clone())
    }
}

impl From<DateTime<Utc>> for Cell {
    fn from(time: DateTime<Utc>) -> Self {
        Cell::Time(time)
    }
}

impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Self {
        value.map_or(Cell::None, T::into)
    }
}

/// A row of a table.
pub(super) struct Row {
    pub(super) cells: Vec<Cell>,
    pub(super) style: Option<Style>,
}

impl From<Vec<Cell>> for Row {
    fn from(cells: Vec<Cell>) -> Self {
        Row { cells, style: None }
    }
}

/// The parts of a text, in order.
#[derive(Default)]
pub(super) struct Blocks(Vec<Block>);

impl Blocks {
    pub(super) fn line(&mut self, text: impl Display) {
        self.indented(0, text);
    }

    /// Adds a line that is indented by as many spaces.
    pub(super) fn indented(&mut self, indent: usize, text: impl Display) {
        let text = text.to_string();
        self.0.push(Block::Line(indent, None, String::new(), text));
    }

    /// Adds a line for each item; a long list is shortened.
    pub(super) fn items<T: Display>(&mut self, indent: usize, items: &[T]) {
        for item in shorten::lines(items, IN_JSON) {
            self.indented(indent, item);
        }
    }

    /// Adds a line that begins with a verdict in a style.
    pub(super) fn verdict(&mut self, style: Style, verdict: impl Display, rest: impl Display) {
        let (verdict, rest) = (verdict.to_string(), rest.to_string());
        self.0.push(Block::Line(0, Some(style), verdict, rest));
    }

    /// Adds a line with a label, unless the value is none.
    pub(super) fn field(&mut self, label: &str, value: impl Into<Cell>) {
        let field = match value.into() {
            Cell::None => return,
            value => (label.to_owned(), value),
        };
        match self.0.last_mut() {
            Some(Block::Fields(fields)) => fields.push(field),
            _ => self.0.push(Block::Fields(vec![field])),
        }
    }

    /// Adds a line for each item, the first one with a label; a long list is shortened.
    pub(super) fn list<T: Display>(&mut self, label: &str, items: &[T]) {
        let mut label = label;
        for item in shorten::lines(items, IN_JSON) {
            self.field(std::mem::take(&mut label), item);
        }
    }

    /// Adds a table. Columns that are empty in all rows are left out.
    pub(super) fn table(&mut self, header: &[&str], rows: Vec<Row>) {
        let header = header.iter().map(|&name| name.to_owned()).collect();
        self.0.push(Block::Table(header, rows));
    }

    pub(super) fn command(&mut self, words: &[String]) {
        self.0.push(Block::Command(words.to_vec()));
    }

    /// The fields of a result as JSON has them, without those that are null, empty or false. Tables come last.
    fn of_json<B: Serialize>(report: &Report<B>) -> Self {
        let mut blocks = Blocks::default();
        let (style, verdict) = match report.status {
            Status::Succeeded => (Style::Good, "succeeded"),
            Status::NothingToDo => (Style::Good, "nothing to do"),
            Status::Failed => (Style::Bad, "failed"),
        };
        blocks.verdict(style, verdict, "");
        let json = serde_json::to_string(&report.body).unwrap_or_default();
        let fields: Fields = serde_json::from_str(&json).unwrap_or_default();
        for (name, value) in &fields {
            match value {
                Json::Table(_) => {}
                Json::List(items) => {
                    let items = items.iter().map(|item| item.cell("").text());
                    blocks.list(&words(name), &items.collect::<Vec<_>>());
                }
                value => blocks.field(&words(name), value.cell(name)),
            }
        }
        blocks.field("took", Cell::Duration(report.seconds));
        for (name, value) in &fields {
            if let Json::Table(rows) = value
                && let Some(first) = rows.first()
            {
                blocks.line(format!("{}:", words(name)));
                let header = first.keys().map(|name| words(name).to_uppercase());
                let cell = |row: &Fields, name| row.get(name).map(|value| value.cell(name)).into();
                let cells =
                    |row| -> Vec<Cell> { first.keys().map(|name| cell(row, name)).collect() };
                let rows = rows.iter().map(|row| cells(row).into());
                blocks
                    .0
                    .push(Block::Table(header.collect(), rows.collect()));
            }
        }
        blocks
    }
}

type Fields = IndexMap<String, Json>;

/// The name of a field as words.
fn words(name: &str) -> String {
    name.replace("hash_kv", "HashKV").replace('_', " ")
}

/// A JSON value with the order of its fields.
#[derive(Deserialize)]
#[serde(untagged)]
enum Json {
    None(()),
    Flag(bool),
    Whole(i64),
    Number(f64),
    Text(String),
    Table(Vec<Fields>),
    List(Vec<Json>),
    Object(Fields),
}

impl Json {
    /// Returns the value of a field of this name.
    fn cell(&self, name: &str) -> Cell {
        match self {
            Json::None(()) | Json::Flag(false) => Cell::None,
            Json::Flag(true) => "yes".into(),
            Json::Whole(n) if *n < 0 => "none".into(),
            Json::Whole(n) if name.contains("bytes") || name.starts_with("db_size") => {
                Cell::Bytes(n.unsigned_abs())
            }
            Json::Whole(n) => Cell::Count(n.unsigned_abs()),
            Json::Number(seconds) if name.ends_with("seconds") => Cell::Duration(*seconds),
            Json::Number(n) => n.to_string().into(),
            Json::Text(text) => match DateTime::parse_from_rfc3339(text) {
                Ok(time) => Cell::Time(time.to_utc()),
                Err(_) => text.as_str().into(),
            },
            Json::Table(rows) => Cell::Count(rows.len() as u64),
            Json::List(items) => {
                let items: Vec<String> = items.iter().map(|item| item.cell("").text()).collect();
                shorten::line(&items, ", ", IN_JSON).into()
            }
            Json::Object(fields) => {
                let mut parts = Vec::new();
                for (name, value) in fields {
                    let text = value.cell(name).text();
                    if !text.is_empty() {
                        parts.push(format!("{} {text}", words(name)));
                    }
                }
                parts.join(", ").into()
            }
        }
    }
}

/// Returns the text with the marks of its styles. Lines are wrapped at `width`, in characters; `None`: they are not.
pub(super) fn to_text(blocks: &Blocks, width: Option<usize>) -> String {
    let mut text = String::new();
    for block in &blocks.0 {
        match block {
            Block::Line(indent, style, head, rest) => {
                let head = line(head);
                let head = style.map_or(head.to_string(), |style| marked(style, &head));
                let whole = format!("{:indent$}{head}{}", "", line(rest));
                push(&mut text, &whole, width, indent + 2);
            }
            Block::Fields(fields) => add_fields(&mut text, fields, width),
            Block::Table(header, rows) => add_table(&mut text, header, rows, width),
            Block::Command(words) => add_command(&mut text, words, width),
        }
    }
    text
}

/// Adds a line that is escaped. What is wrapped is indented.
fn push(text: &mut String, whole: &str, width: Option<usize>, indent: usize) {
    match width {
        Some(width) => *text += &terminal::wrap(whole, width, indent),
        None => *text += whole,
    }
    text.push('\n');
}

fn add_fields(text: &mut String, fields: &[(String, Cell)], width: Option<usize>) {
    let labels = fields.iter().map(|(label, _)| width_of(label));
    let widest = labels.max().unwrap_or_default();
    for (label, value) in fields {
        let padding = " ".repeat(widest - width_of(label));
        let label = match label.as_str() {
            "error" | "failed" => marked(Style::Bad, label),
            "warning" | "gap" | "failures" => marked(Style::Warning, label),
            label => line(label).into_owned(),
        };
        let whole = format!("  {label}{padding}  {}", value.text());
        push(text, &whole, width, widest + 4);
    }
}

/// Adds a table whose columns are as wide as their widest cells. If it is too wide, the last columns stand below their
/// rows.
fn add_table(text: &mut String, header: &[String], rows: &[Row], width: Option<usize>) {
    let names = header.iter().map(|name| line(name).into_owned()).collect();
    let cells = rows
        .iter()
        .map(|row| row.cells.iter().map(Cell::text).collect());
    let mut all: Vec<Vec<String>> = std::iter::once(names).chain(cells).collect();
    for nth in (0..header.len()).rev() {
        if all[1..].iter().all(|row| row[nth].is_empty()) {
            all.iter_mut().for_each(|row| drop(row.remove(nth)));
        }
    }
    let mut columns = all[0].len();
    let lines = loop {
        let mut widths = Widths::default();
        all.iter().for_each(|row| widths.add(&row[..columns]));
        let lines = all.iter().map(|row| widths.row(&row[..columns], "  "));
        let lines: Vec<String> = lines.collect();
        if columns <= 1 || width.is_none_or(|width| lines.iter().all(|l| width_of(l) <= width)) {
            break lines;
        }
        columns -= 1;
    };
    let labels = all[0][columns..].iter().map(|name| width_of(name));
    let widest = labels.max().unwrap_or_default();
    let styles = std::iter::once(None).chain(rows.iter().map(|row| row.style));
    for (nth, (whole, style)) in lines.iter().zip(styles).enumerate() {
        *text += &style.map_or(whole.clone(), |style| marked(style, whole));
        text.push('\n');
        let below = all[0].iter().zip(&all[nth]).skip(columns);
        for (name, cell) in below.filter(|(_, cell)| nth > 0 && !cell.is_empty()) {
            push(
                text,
                &format!("      {:widest$}  {cell}", name.to_lowercase()),
                width,
                widest + 8,
            );
        }
    }
}

/// Adds a command, quoted for a shell. A long one continues on the next line, one flag a line.
fn add_command(text: &mut String, words: &[String], width: Option<usize>) {
    let mut parts: Vec<String> = Vec::new();
    for word in words {
        let quoted = shell::word(word).into_owned();
        // A flag begins a part, and its value follows it there.
        match parts.last_mut() {
            Some(part) if !word.starts_with("--") => part.extend([" ", &quoted]),
            _ => parts.push(quoted),
        }
    }
    let whole = format!("  {}", parts.join(" "));
    let is_narrow = width.is_some_and(|width| width_of(&whole) > width);
    let command = if is_narrow {
        format!("  {}", parts.join(" \\\n      "))
    } else {
        whole
    };
    *text += &command;
    text.push('\n');
}

/// The widest cell of a table, in characters: a longer one is cut.
pub(super) const WIDEST_CELL: usize = 1000;

/// The widths of a table's columns, in characters.
#[derive(Default)]
pub(super) struct Widths(Vec<usize>);

impl Widths {
    /// Makes the columns as wide as the cells of a row.
    pub(super) fn add(&mut self, row: &[String]) {
        self.0.resize(self.0.len().max(row.len()), 0);
        for (widest, cell) in self.0.iter_mut().zip(row) {
            let width = cell.chars().take(WIDEST_CELL).count();
            *widest = width.max(*widest);
        }
    }

    /// Returns a row as a line: each cell is padded to the width of its column, and the end of a cell that is too long
    /// is cut.
    pub(super) fn row(&self, row: &[String], between: &str) -> String {
        let mut text = String::new();
        for (nth, cell) in row.iter().enumerate() {
            let width = cell.chars().count();
            if width > WIDEST_CELL {
                text.extend(cell.chars().take(WIDEST_CELL - 1).chain(['…']));
            } else {
                text.push_str(cell);
            }
            let column = self.0.get(nth).copied().unwrap_or_default();
            text.extend(std::iter::repeat_n(' ', column.saturating_sub(width)));
            text.push_str(between);
        }
        text.truncate(text.trim_end().len());
        text
    }
}

/// The rows by which the widths of columns are decided. Later rows are printed one by one.
const ROWS_FOR_WIDTHS: usize = 1000;

/// A table that is printed while it is made.
pub(super) struct GrowingTable {
    /// The rows until the widths are decided, each with the style in which it is printed.
    waiting: Vec<(Vec<String>, Option<Style>)>,
    widths: Option<Widths>,
    /// Where lines are wrapped, in characters; `None`: nowhere.
    pub(super) width: Option<usize>,
}

impl GrowingTable {
    pub(super) fn new<S: Into<String>>(
        header: impl IntoIterator<Item = S>,
        has_header: bool,
    ) -> Self {
        let header: Vec<String> = header.into_iter().map(S::into).collect();
        let header = has_header.then(|| (escaped(&header), None));
        GrowingTable {
            waiting: header.into_iter().collect(),
            widths: None,
            width: None,
        }
    }

    /// Adds a row. `print` gets the lines whose widths are decided.
    pub(super) fn add(
        &mut self,
        row: Vec<String>,
        style: Option<Style>,
        print: &mut impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        self.waiting.push((escaped(&row), style));
        if self.widths.is_some() || self.waiting.len() > ROWS_FOR_WIDTHS {
            self.end(print)?;
        }
        Ok(())
    }

    /// Prints the rows that wait. Decides the widths, unless they are decided.
    pub(super) fn end(&mut self, print: &mut impl FnMut(&str) -> Result<()>) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        let widths = self.widths.get_or_insert_with(|| {
            let mut widths = Widths::default();
            waiting.iter().for_each(|(row, _)| widths.add(row));
            widths
        });
        waiting.iter().try_for_each(|(row, style)| {
            let line = widths.row(row, "   ");
            let line = match self.width {
                Some(width) => terminal::wrap(&line, width, 4),
                None => line,
            };
            let line = style.map_or(line.clone(), |style| terminal::painted(style, &line, true));
            print(&(line + "\n"))
        })
    }
}

/// The cells of a row, on one line each. A definition's author chooses the header, too.
fn escaped(row: &[String]) -> Vec<String> {
    row.iter().map(|cell| line(cell).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_below_their_text_and_columns_stand_below_their_rows() {
        let mut blocks = Blocks::default();
        blocks.verdict(Style::Bad, "failed", ": one of the chains");
        blocks.field("error", "the deltas have a gap [RevisionGap]");
        blocks.field("from", "here");
        let row = ["x".repeat(28).into(), "a\u{fdd1}b".into(), Cell::None];
        blocks.table(&["NAME", "FLAGS", "NOTE"], vec![Vec::from(row).into()]);
        let shown = |width| terminal::render(&to_text(&blocks, width), false);
        let x = "x".repeat(28);
        let expected = format!(
            "failed: one of the chains\n  error  the deltas have a gap\n         [RevisionGap]\n  from   here\nNAME\n{x}\n      flags  a\\u{{fdd1}}b\n"
        );
        assert_eq!(shown(Some(30)), expected);
        let wide = format!("NAME{}  FLAGS\n{x}  a\\u{{fdd1}}b\n", " ".repeat(24));
        assert!(shown(None).ends_with(&wide), "{}", shown(None));
    }

    /// Once, the width of a format string was exceeded, and nothing was printed.
    #[test]
    fn a_tenants_image_name_of_66_000_characters_is_cut() {
        let rows = ["é".repeat(66_000), "b".to_owned()].map(|cell| vec![cell, "x".to_owned()]);
        let mut widths = Widths::default();
        rows.iter().for_each(|row| widths.add(row));
        let shown = rows.map(|row| widths.row(&row, "  "));
        assert_eq!(shown[0].chars().count(), WIDEST_CELL + 3);
        assert!(shown[0].ends_with("é…  x"), "{}", shown[0]);
        assert_eq!(shown[1], format!("b{}  x", " ".repeat(WIDEST_CELL - 1)));
    }

    #[test]
    fn a_command_can_be_copied_into_a_shell() {
        let shown = |words: &[&str], width| {
            let words: Vec<String> = words.iter().map(|&w| w.to_owned()).collect();
            let mut blocks = Blocks::default();
            blocks.command(&words);
            to_text(&blocks, width)
        };
        let words = ["etcd", "--name", "it's", "--data-dir", "/a b/c$d"];
        let one_line = "  etcd --name 'it'\\''s' --data-dir '/a b/c$d'\n";
        assert_eq!(shown(&words, None), one_line);
        let lines = "  etcd \\\n      --name 'it'\\''s' \\\n      --data-dir '/a b/c$d'\n";
        assert_eq!(shown(&words, Some(40)), lines);
        assert_eq!(shown(&["etcd", ""], None), "  etcd ''\n");
    }
}
