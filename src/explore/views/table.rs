//! The objects of a kind at a moment, with the columns of `deltafold get`.

use super::At;
use super::state::{Listed, MAX_LISTED};
use crate::error::Result;
use crate::explore::index::{Index, Key, Version};
use crate::explore::kinds::KindId;
use crate::mvcc::{KeyValue, Revision};
use crate::objects::columns::Column;
use crate::objects::{Detail, EncryptionKeys, Object};
use chrono::Utc;
use serde::Serialize;
use serde_json::Value;

/// The longest cell, in characters.
const WIDEST_CELL: usize = 200;

/// The objects of a kind.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Table {
    #[serde(flatten)]
    at: At,
    /// The number of all that match.
    total: usize,
    /// The headers of the cells.
    columns: Vec<String>,
    /// Some of them.
    objects: Vec<Row>,
}

/// An object with its cells.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    object: Listed,
    /// The cells; empty if the object cannot be decoded.
    cells: Vec<String>,
}

/// Which objects are listed, and in which order.
#[derive(Debug, Default)]
pub(in crate::explore) struct Filter {
    /// Only those of this namespace; empty for objects without one.
    pub(in crate::explore) namespace: Option<String>,
    /// Only those of this kind.
    pub(in crate::explore) kind: Option<KindId>,
    /// Only keys that are no objects.
    pub(in crate::explore) is_other: bool,
    /// How many of the first are left out.
    pub(in crate::explore) offset: usize,
    /// Only those with this word, in lower case, in their names.
    pub(in crate::explore) word: String,
    /// The column by which they are sorted; `CHANGED` for their last change, and their names otherwise.
    pub(in crate::explore) sort: String,
    /// Whether they are sorted the other way round.
    pub(in crate::explore) is_descending: bool,
}

impl Filter {
    fn matches(&self, key: &Key) -> bool {
        let namespace = self.namespace.as_deref();
        namespace.is_none_or(|n| n == key.namespace())
            && self.kind.is_none_or(|kind| key.kind == Some(kind))
            && key.kind.is_none() == self.is_other
            && (self.word.is_empty() || {
                String::from_utf8_lossy(&key.bytes)
                    .to_lowercase()
                    .contains(&self.word)
            })
    }
}

impl Table {
    /// Lists objects at a revision.
    ///
    /// # Errors
    /// `Io`.
    pub(in crate::explore) fn of(
        index: &Index,
        keys: &EncryptionKeys,
        revision: Revision,
        filter: &Filter,
    ) -> Result<Self> {
        let state = index.state(revision).filter(|(key, _)| filter.matches(key));
        let mut found: Vec<(&Key, &Version)> = state.collect();
        let resource = filter.kind.and_then(|kind| index.kinds.resource(kind));
        let columns = resource.map(|resource| Column::of(resource, false));
        let columns = columns.unwrap_or_default();
        let now = index.time_of(revision).unwrap_or_else(Utc::now);
        let cells = |version: &Version, columns: &[Column]| -> Result<Vec<String>> {
            if columns.is_empty() {
                return Ok(Vec::new());
            }
            let record = index.record(version)?;
            let kv = KeyValue::decode(&record)?;
            let object = Object::of_record_with(&kv, keys, Detail::WithoutManagers);
            Ok(match object {
                Ok(object) => {
                    let object = Value::Object(object.json);
                    let cut = |text: String| text.chars().take(WIDEST_CELL).collect();
                    let texts = columns.iter().map(|column| column.text(&object, now));
                    texts.map(cut).collect()
                }
                Err(_) => Vec::new(),
            })
        };
        let sorted_by = columns
            .iter()
            .position(|column| column.header == filter.sort);
        if let Some(nth) = sorted_by {
            let mut sorted = Vec::new();
            for (key, version) in found {
                let cell = cells(version, &columns[nth..=nth])?.pop();
                sorted.push((cell.unwrap_or_default(), key, version));
            }
            sorted.sort_by(|a, b| a.0.cmp(&b.0));
            found = sorted
                .into_iter()
                .map(|(_, key, version)| (key, version))
                .collect();
        } else if filter.sort == "CHANGED" {
            found.sort_by_key(|(_, version)| version.revision);
        }
        if filter.is_descending {
            found.reverse();
        }
        let shown = found.iter().skip(filter.offset).take(MAX_LISTED);
        let rows = shown.map(|(key, version)| {
            Ok(Row {
                object: Listed::of(index, key, version),
                cells: cells(version, &columns)?,
            })
        });
        Ok(Table {
            at: At::of(index, revision),
            total: found.len(),
            objects: rows.collect::<Result<_>>()?,
            columns: columns.into_iter().map(|column| column.header).collect(),
        })
    }
}
