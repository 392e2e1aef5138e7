//! What changed between two moments.

use super::At;
use super::state::{Listed, MAX_LISTED};
use crate::error::Result;
use crate::explore::index::{Index, Key, Version};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::EncryptionKeys;
use crate::ops::read::deleted::{Owner, owner_of};
use crate::ops::read::versions::known_before;
use serde::Serialize;
use std::collections::BTreeMap;

/// What changed between two moments.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Changes {
    from: At,
    to: At,
    /// The namespaces with changes; that of objects without a namespace is empty.
    namespaces: Vec<NamespaceChanges>,
}

/// What changed in a namespace.
#[derive(Debug, Serialize, Default)]
pub(in crate::explore) struct NamespaceChanges {
    name: String,
    /// Whether the namespace itself is gone.
    is_deleted: bool,
    /// How many objects exist only at the second moment.
    created: usize,
    /// How many objects differ.
    changed: usize,
    /// How many were deleted in between, also of those that were created in between.
    deleted: usize,
    /// How many of the deleted are Events, which expire.
    deleted_events: usize,
    /// The other deleted ones, at most a thousand of all namespaces.
    objects: Vec<DeletedObject>,
}

/// An object that was deleted.
#[derive(Debug, Serialize)]
struct DeletedObject {
    /// With the revision and the time of the deletion.
    #[serde(flatten)]
    object: Listed,
    /// What owned it; null if nothing did.
    owner: Option<Owner>,
    /// The newest revision at which it is known to have been there.
    before: Revision,
    /// Whether it exists again at the second moment.
    is_recreated: bool,
}

impl DeletedObject {
    /// `versions` are those of the key up to the deletion.
    fn of(
        index: &Index,
        keys: &EncryptionKeys,
        key: &Key,
        versions: &[Version],
        deletion: &Version,
        is_recreated: bool,
    ) -> Result<Self> {
        let last = versions.iter().rfind(|v| !v.is_deletion());
        let record = last.map(|version| index.record(version)).transpose()?;
        let kv = record.as_deref().map(KeyValue::decode).transpose()?;
        let before = deletion.revision.previous();
        let put = last.map_or(before, |last| last.revision);
        Ok(DeletedObject {
            object: Listed::of(index, key, deletion),
            owner: kv.and_then(|kv| owner_of(&kv, keys)),
            before: known_before(&index.unknown, before, put),
            is_recreated,
        })
    }
}

impl Changes {
    /// Compares the states at two revisions.
    ///
    /// # Errors
    /// `Io`.
    pub(in crate::explore) fn of(
        index: &Index,
        keys: &EncryptionKeys,
        from: Revision,
        to: Revision,
    ) -> Result<Self> {
        let mut namespaces: BTreeMap<&str, NamespaceChanges> = BTreeMap::new();
        let mut listed = 0;
        for key in &index.keys {
            let (old, new) = (index.at(key, from), index.at(key, to));
            let versions = index.versions(key);
            let first = versions.partition_point(|v| v.revision <= from);
            let until = &versions[..versions.partition_point(|v| v.revision <= to)];
            let within = until.get(first..).unwrap_or_default();
            let deletion = within.iter().rposition(Version::is_deletion);
            if within.is_empty() {
                continue;
            }
            let changes = namespaces.entry(key.namespace()).or_default();
            let kind = index.kind(key);
            let is_kind = |name: &str| kind.is_some_and(|kind| kind.kind == name);
            if let Some(nth) = deletion {
                changes.deleted += 1;
                if is_kind("Event") {
                    changes.deleted_events += 1;
                } else if listed < MAX_LISTED {
                    let (before, deletion) = (&until[..first + nth], &within[nth]);
                    let is_back = new.is_some();
                    let object = DeletedObject::of(index, keys, key, before, deletion, is_back)?;
                    changes.objects.push(object);
                    listed += 1;
                }
            }
            match (old, new) {
                (None, Some(_)) => changes.created += 1,
                (Some(old), Some(new)) if old != new => changes.changed += 1,
                _ => {}
            }
            if is_kind("Namespace") && new.is_none() && deletion.is_some() {
                namespaces.entry(key.name()).or_default().is_deleted = true;
            }
        }
        let namespaces = namespaces
            .into_iter()
            .map(|(name, changes)| NamespaceChanges {
                name: name.to_owned(),
                ..changes
            });
        Ok(Changes {
            from: At::of(index, from),
            to: At::of(index, to),
            namespaces: namespaces.collect(),
        })
    }
}
