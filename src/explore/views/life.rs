//! The life of an object: its versions, who wrote them, and the Events about it.

use super::object::Show;
use crate::base::time::rfc3339;
use crate::error::Result;
use crate::explore::index::{Index, Key, Version};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::changes::EventNote;
use crate::objects::{Detail, EncryptionKeys, Object};
use serde::Serialize;
use std::cmp::Reverse;

/// The most versions of an answer.
const MAX_LIFE: usize = 200;
/// The most versions of Event objects that are read for one object: the newest.
const MAX_EVENTS: usize = 10_000;

/// The life of an object.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Life {
    /// The key, as text.
    key: String,
    /// The number of all versions.
    total: usize,
    /// The newest versions before the one that was asked for, newest first.
    versions: Vec<LifeVersion>,
    /// What Event objects say of the object, newest first.
    events: Vec<LifeEvent>,
}

/// A version in a life.
#[derive(Debug, Serialize)]
struct LifeVersion {
    revision: Revision,
    time: Option<String>,
    /// `created`, `changed`, `deleted`; `missing` if a deletion is not recorded, but was before this revision.
    change: &'static str,
    /// Who wrote it: the managers whose entries changed.
    managers: Vec<String>,
    /// The fields that changed.
    fields: Vec<String>,
    bytes: usize,
}

/// An Event about an object.
#[derive(Debug, Serialize)]
struct LifeEvent {
    revision: Revision,
    time: Option<String>,
    text: String,
}

impl Life {
    /// Shows the versions of a key that are older than `before`. Without `show`, only when there were some, without fields,
    /// managers and Events.
    ///
    /// # Errors
    /// `Io`.
    pub(in crate::explore) fn of(
        index: &Index,
        key: &Key,
        before: Option<Revision>,
        show: Option<&Show<'_>>,
    ) -> Result<Self> {
        let all = index.versions(key);
        let end = before.map_or(all.len(), |before| {
            all.partition_point(|v| v.revision < before)
        });
        let begin = end.saturating_sub(MAX_LIFE);
        let mut versions = Vec::new();
        let (mut old, mut existed) = (None, false);
        // The version before the first one tells what that one changed.
        for (nth, version) in all[..end].iter().enumerate().skip(begin.saturating_sub(1)) {
            let record = index.record(version)?;
            let kv = (!version.is_deletion())
                .then(|| KeyValue::decode(&record))
                .transpose()?;
            let object = kv.zip(show);
            let object = object.and_then(|(kv, show)| Object::of_record(&kv, show.keys).ok());
            let exists = kv.is_some();
            if nth >= begin {
                versions.push(LifeVersion {
                    revision: version.revision,
                    time: index.time_of(version.revision).map(rfc3339),
                    change: match kv {
                        None if version.is_inferred => "missing",
                        None => "deleted",
                        Some(kv) if existed || kv.version > 1 => "changed",
                        Some(_) => "created",
                    },
                    managers: object
                        .as_ref()
                        .map_or_else(Vec::new, |o| o.managers_since(old.as_ref())),
                    fields: match (&object, &old, show) {
                        (Some(object), Some(old), Some(show)) => {
                            fields(object, old, show.has_secrets)
                        }
                        _ => Vec::new(),
                    },
                    bytes: kv.map_or(0, |kv| kv.value.len()),
                });
            }
            (old, existed) = (object, exists);
        }
        versions.reverse();
        Ok(Life {
            key: String::from_utf8_lossy(&key.bytes).into_owned(),
            total: all.len(),
            versions,
            events: match show {
                Some(show) => events(index, key, show.keys)?,
                None => Vec::new(),
            },
        })
    }
}

fn fields(object: &Object, old: &Object, has_secrets: bool) -> Vec<String> {
    let changes = object.changes_since(old);
    let text = changes
        .iter()
        .map(|change| change.text(!has_secrets && object.is_secret_field(&change.path)));
    text.collect()
}

/// Returns what Event objects say of an object, newest first.
fn events(index: &Index, key: &Key, keys: &EncryptionKeys) -> Result<Vec<LifeEvent>> {
    let Some(kind) = index.kind(key) else {
        return Ok(Vec::new());
    };
    // The Events of objects without a namespace are in this one.
    let namespace = match key.namespace() {
        "" => "default",
        namespace => namespace,
    };
    let is_event = |key: &&Key| {
        key.namespace() == namespace && index.kind(key).is_some_and(|kind| kind.kind == "Event")
    };
    let mut events = Vec::new();
    let versions = index.keys.iter().filter(is_event);
    let versions = versions.flat_map(|key| index.versions(key));
    for version in newest(versions, MAX_EVENTS) {
        let record = index.record(version)?;
        let kv = KeyValue::decode(&record)?;
        let event = Object::of_record_with(&kv, keys, Detail::WithoutManagers).ok();
        let note = event.and_then(|event| EventNote::about(&event, &kind.kind, key.name()));
        events.extend(note.map(|note| LifeEvent {
            revision: version.revision,
            time: index.time_of(version.revision).map(rfc3339),
            text: note.to_string(),
        }));
    }
    Ok(events)
}

/// Returns the newest versions that are no deletions, newest first.
fn newest<'v>(versions: impl Iterator<Item = &'v Version>, limit: usize) -> Vec<&'v Version> {
    let mut versions: Vec<_> = versions.filter(|v| !v.is_deletion()).collect();
    versions.sort_by_key(|version| Reverse(version.revision));
    versions.truncate(limit);
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_events_are_read_in_whatever_order_their_keys_are() {
        let versions = [3, 9, 1, 7, 5].map(Version::of_revision);
        let newest = newest(versions.iter(), 3);
        let revisions: Vec<i64> = newest.iter().map(|v| v.revision.0).collect();
        assert_eq!(revisions, [9, 7, 5]);
    }
}
