//! `deltafold get KIND`: a table of the objects of a kind.

use super::super::format::Format;
use super::super::render::{GrowingTable, WIDEST_CELL};
use super::super::stream::Stream;
use super::super::text;
use super::Printer;
use crate::error::Result;
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::columns::{Column, age};
use crate::objects::resource::{KeyNames, ObjectName, Resource};
use crate::objects::{Detail, NotDecoded, Object};
use crate::ops::read::deleted::Deletion;
use crate::ops::read::span::Span;
use crate::ops::read::{Keys, check_size};
use crate::prefix::Context;
use crate::prefix::open::State;
use crate::prefix::scan::Scan;
use chrono::{DateTime, Utc};
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::HashMap;

impl Printer<'_> {
    /// Prints a table of the objects of a range, and returns whether it has a row. For a moment in the past, it has a column
    /// with the time at which the object was deleted later.
    pub(super) fn print_table(
        &self,
        ctx: &Context,
        scan: Option<&Scan>,
        source: &State,
        kinds: &[Resource],
        range: KeyRange,
        out: &mut Stream,
    ) -> Result<bool> {
        let prefixes = self.args.select.names.etcd_prefixes();
        let names = KeyNames::new(kinds.to_vec(), &prefixes);
        let point = &self.args.state.point;
        let is_past = point.time.is_some() || point.revision.is_some();
        let deletions = if is_past {
            Some(self.later_deletions(scan, source, &range)?)
        } else {
            None
        };
        let is_wide = *self.format == Format::Wide;
        let columns: Vec<Vec<Column>> = kinds.iter().map(|r| Column::of(r, is_wide)).collect();
        let begin = |kind: usize| {
            let mut header: Vec<String> = Vec::new();
            if kinds[kind].is_namespaced && self.args.select.names.namespace.is_none() {
                header.push("NAMESPACE".to_owned());
            }
            header.push("NAME".to_owned());
            header.extend(columns[kind].iter().map(|c| c.header.clone()));
            header.push("AGE".to_owned());
            if is_past {
                header.push("DELETED".to_owned());
            }
            GrowingTable::new(header, !self.args.no_headers)
        };
        let mut print = |line: &str| out.write(line.as_bytes());
        // The table of a kind. Keys are sorted, so those of a kind stand together.
        let mut table: Option<(usize, GrowingTable)> = None;
        let now = point.time.unwrap_or_else(Utc::now);
        let mut keys = Keys::read(ctx, source, range)?;
        let row = |kv: &KeyValue<'_>| {
            let object = names.object(kv.key)?;
            let kind = kinds.iter().position(|kind| kind == object.resource)?;
            let kind_name = (kinds.len() > 1).then(|| object.resource.name_in_output());
            let (mut row, sorted_by) = self.row(kv, &object, kind_name, &columns[kind], now)?;
            if let Some(deletions) = &deletions {
                row.push(deletions.get(kv.key).map_or_else(String::new, deleted));
            }
            Some((kind, sorted_by, row))
        };
        let mut print_row = |kind: usize, row: Vec<String>| {
            if table.as_ref().is_none_or(|(last, _)| *last != kind) {
                if let Some((_, mut ended)) = table.take() {
                    ended.end(&mut print)?;
                    print("\n")?;
                }
                table = Some((kind, begin(kind)));
            }
            match &mut table {
                Some((_, table)) => table.add(row, None, &mut print),
                None => Ok(()),
            }
        };
        let (mut waiting, mut bytes) = (Vec::new(), 0);
        keys.map(ctx, row, |row| match row {
            Some((kind, sorted_by, row)) if self.args.sort_by.is_some() => {
                bytes += row.iter().map(String::len).sum::<usize>();
                waiting.push((kind, sorted_by, row));
                check_size(bytes)
            }
            Some((kind, _, row)) => print_row(kind, row),
            None => Ok(()),
        })?;
        waiting.sort_by(|a, b| {
            a.0.cmp(&b.0)
                .then_with(|| order(a.1.as_ref(), b.1.as_ref()))
        });
        for (kind, _, row) in waiting {
            print_row(kind, row)?;
        }
        match table {
            Some((_, mut table)) => table.end(&mut print).map(|()| true),
            None => {
                let plurals: Vec<&str> = kinds.iter().map(|kind| kind.plural.as_str()).collect();
                let plurals = plurals.join(", ");
                let none = format!("no {plurals} at revision {}\n", source.revision);
                print(&none).map(|()| false)
            }
        }
    }

    /// Returns the row of an object, without its deletion, and the value that it is sorted by; `None` if its labels are others
    /// than are asked for.
    fn row(
        &self,
        kv: &KeyValue<'_>,
        object: &ObjectName<'_>,
        kind: Option<String>,
        columns: &[Column],
        now: DateTime<Utc>,
    ) -> Option<(Vec<String>, Option<Value>)> {
        let mut sorted_by = None;
        let mut row = Vec::new();
        let shown = |part: &str| text::key(part.as_bytes()).into_owned();
        let namespace = object.namespace.map(shown);
        row.extend(namespace.filter(|_| self.args.select.names.namespace.is_none()));
        let name = shown(object.name);
        row.push(match kind {
            Some(kind) => format!("{kind}/{name}"),
            None => name,
        });
        match Object::of_record_with(kv, &self.keys, Detail::WithoutManagers) {
            Ok(object) => {
                if !self.args.labels.match_object(&object.json) {
                    return None;
                }
                let object = Value::Object(object.json);
                let path = self.args.sort_by.as_ref();
                sorted_by = path.and_then(|path| path.values(&object).first().copied().cloned());
                row.extend(cells(&object, columns, now));
            }
            Err(e) if self.args.labels.selector.is_some() => {
                if matches!(e, NotDecoded::Encrypted { .. }) {
                    self.args.labels.add_sealed();
                }
                return None;
            }
            Err(e) => {
                row.extend(columns.iter().map(|_| String::new()));
                row.push(e.to_string());
            }
        }
        Some((row, sorted_by))
    }

    /// Returns the deletions of keys after a state.
    fn later_deletions(
        &self,
        scan: Option<&Scan>,
        source: &State,
        range: &KeyRange,
    ) -> Result<HashMap<Vec<u8>, Deletion>> {
        let span = Span {
            backup: self.backup,
            scan,
            state: source,
            from: Some(source),
            revisions: (source.revision.next(), Revision(i64::MAX)),
        };
        let mut deleted = span.dates(range, None)?;
        let mut deletions = HashMap::new();
        while let Some(deleted) = deleted.next()? {
            if !deleted.is_recreated {
                deletions.insert(deleted.key, deleted.deletion);
            }
        }
        Ok(deletions)
    }
}

/// Orders values: what is missing first, numbers by their size, all else as text.
fn order(a: Option<&Value>, b: Option<&Value>) -> Ordering {
    let number = |value: Option<&Value>| value.and_then(Value::as_f64);
    let text = |value: Option<&Value>| match value {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => String::new(),
    };
    match (number(a), number(b)) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        _ => text(a).cmp(&text(b)),
    }
}

/// Returns the cells of an object: those of the columns, and its age.
fn cells(object: &Value, columns: &[Column], now: DateTime<Utc>) -> Vec<String> {
    let cell = |column: &Column| {
        let text = column.text(object, now);
        // Rows wait in memory, and each column may show the whole object. The table cuts the last character, too.
        text.chars().take(WIDEST_CELL + 1).collect()
    };
    let created = object.pointer("/metadata/creationTimestamp");
    let created = created
        .and_then(Value::as_str)
        .and_then(|time| age(time, now));
    let all = columns.iter().map(cell);
    all.chain([created.unwrap_or_default()]).collect()
}

/// Returns the table that `get` prints of objects of a kind, without their names. The fuzzer `tables` calls it.
///
/// # Errors
/// Never fails: a string takes every line.
pub fn table(resource: &Resource, objects: &[Value]) -> Result<String> {
    let columns = Column::of(resource, false);
    let mut text = String::new();
    let mut print = |line: &str| {
        text.push_str(line);
        Ok(())
    };
    let mut table = GrowingTable::new(columns.iter().map(|c| c.header.clone()), true);
    for object in objects {
        table.add(cells(object, &columns, Utc::now()), None, &mut print)?;
    }
    table.end(&mut print)?;
    Ok(text)
}

/// When an object was deleted.
fn deleted(deletion: &Deletion) -> String {
    text::deletion_time(deletion).unwrap_or_else(|| match deletion.revision {
        Some(revision) => format!("revision {revision}"),
        None => "yes".to_owned(),
    })
}
