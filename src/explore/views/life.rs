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
/// The most versions in which the last change is looked for: the newest.
const MAX_SEARCHED: usize = 10_000;
/// The most versions of Event objects that are read for one object: the newest.
const MAX_EVENTS: usize = 10_000;

/// The life of an object.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Life {
    /// The key, as text.
    key: String,
    /// The number of all versions.
    total: usize,
    /// The newest versions before the one that was asked for, newest first. If the last change was asked for, the newest of all.
    versions: Vec<LifeVersion>,
    /// The newest of all these that changed what a user sets; null unless it was asked for, and if there is none.
    last_change: Option<LastChange>,
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
    /// Whether it changed more than the status and what only an API server or a controller sets.
    is_of_user: bool,
    bytes: usize,
}

/// A change, and the version before it.
#[derive(Debug, Serialize)]
struct LastChange {
    from: Revision,
    #[serde(flatten)]
    version: LifeVersion,
}

/// A version that is no deletion.
struct Written {
    bytes: usize,
    /// The number of writes up to this one.
    writes: i64,
    /// `None` if it is not decoded.
    object: Option<Object>,
    /// The same with only what a user sets.
    clean: Option<Object>,
}

impl Written {
    fn read(index: &Index, version: &Version, show: &Show<'_>) -> Result<Option<Self>> {
        if version.is_deletion() {
            return Ok(None);
        }
        let record = index.record(version)?;
        let kv = KeyValue::decode(&record)?;
        let object = Object::of_record(&kv, show.keys).ok();
        let clean = object.clone().and_then(|object| object.cleaned().ok());
        Ok(Some(Written {
            bytes: kv.value.len(),
            writes: kv.version,
            object,
            clean,
        }))
    }

    /// Returns the part that is asked for.
    fn shown(&self, show: &Show<'_>) -> Option<&Object> {
        let part = if show.is_clean {
            &self.clean
        } else {
            &self.object
        };
        part.as_ref()
    }

    /// Whether a user may have made this of an older version.
    fn is_of_user(&self, old: Option<&Written>) -> bool {
        let old = old.and_then(|old| old.clean.as_ref());
        old.zip(self.clean.as_ref())
            .is_none_or(|(old, new)| old != new)
    }
}

impl LifeVersion {
    /// `new` is `None` for a deletion; `old` is the version before, if there is one and it is no deletion.
    fn of<'w>(
        index: &Index,
        version: &Version,
        new: Option<&'w Written>,
        old: Option<&'w Written>,
        show: &Show<'_>,
    ) -> Self {
        let object = new.and_then(|new| new.object.as_ref());
        let shown = |written: &'w Written| written.shown(show);
        LifeVersion {
            revision: version.revision,
            time: index.time_of(version.revision).map(rfc3339),
            change: match new {
                None if version.is_inferred => "missing",
                None => "deleted",
                Some(new) if old.is_some() || new.writes > 1 => "changed",
                Some(_) => "created",
            },
            managers: object.map_or_else(Vec::new, |object| {
                object.managers_since(old.and_then(|old| old.object.as_ref()))
            }),
            fields: match new.and_then(shown).zip(old.and_then(shown)) {
                Some((new, old)) => fields(new, old, show.has_secrets),
                None => Vec::new(),
            },
            is_of_user: new.is_none_or(|new| new.is_of_user(old)),
            bytes: new.map_or(0, |new| new.bytes),
        }
    }
}

/// An Event about an object.
#[derive(Debug, Serialize)]
struct LifeEvent {
    revision: Revision,
    time: Option<String>,
    text: String,
}

impl Life {
    /// Shows the versions of a key that are older than `before`. With `is_brief`, the last change instead of the Events.
    ///
    /// # Errors
    /// `Io`.
    pub(in crate::explore) fn of(
        index: &Index,
        key: &Key,
        before: Option<Revision>,
        show: &Show<'_>,
        is_brief: bool,
    ) -> Result<Self> {
        let all = index.versions(key);
        let end = before.map_or(all.len(), |before| {
            all.partition_point(|v| v.revision < before)
        });
        let listed = if is_brief { all.len() } else { end };
        let begin = listed.saturating_sub(MAX_LIFE);
        let mut versions = Vec::new();
        let mut old = None;
        // The version before the first one tells what that one changed.
        for (nth, version) in all[..listed]
            .iter()
            .enumerate()
            .skip(begin.saturating_sub(1))
        {
            let new = Written::read(index, version, show)?;
            if nth >= begin {
                let (new, old) = (new.as_ref(), old.as_ref());
                versions.push(LifeVersion::of(index, version, new, old, show));
            }
            old = new;
        }
        versions.reverse();
        let (last_change, events) = if is_brief {
            (LastChange::find(index, &all[..end], show)?, Vec::new())
        } else {
            (None, events(index, key, show.keys)?)
        };
        Ok(Life {
            key: String::from_utf8_lossy(&key.bytes).into_owned(),
            total: all.len(),
            versions,
            last_change,
            events,
        })
    }
}

impl LastChange {
    /// Finds the newest version that changed what a user sets. Creations and deletions are none.
    fn find(index: &Index, versions: &[Version], show: &Show<'_>) -> Result<Option<Self>> {
        let mut newer: Option<(&Version, Written)> = None;
        for version in versions.iter().rev().take(MAX_SEARCHED) {
            let old = Written::read(index, version, show)?;
            if let (Some((newer, new)), Some(old)) = (&newer, &old)
                && new.is_of_user(Some(old))
            {
                return Ok(Some(LastChange {
                    from: version.revision,
                    version: LifeVersion::of(index, newer, Some(new), Some(old), show),
                }));
            }
            newer = old.map(|old| (version, old));
        }
        Ok(None)
    }
}

fn fields(object: &Object, old: &Object, has_secrets: bool) -> Vec<String> {
    let changes = object.changes_since(old);
    let text = changes.iter().map(|change| {
        let is_hidden = !has_secrets && object.is_secret_field(&change.path);
        match change.values(is_hidden) {
            (Some(old), Some(new)) => format!("{}: {old} → {new}", change.path),
            _ => change.text(is_hidden),
        }
    });
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
