//! What changed between two moments.

use super::At;
use super::state::{Listed, MAX_LISTED};
use crate::explore::index::Index;
use crate::mvcc::Revision;
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
    objects: Vec<Listed>,
}

impl Changes {
    pub(in crate::explore) fn of(index: &Index, from: Revision, to: Revision) -> Self {
        let mut namespaces: BTreeMap<&str, NamespaceChanges> = BTreeMap::new();
        let mut listed = 0;
        for key in &index.keys {
            let (old, new) = (index.at(key, from), index.at(key, to));
            let versions = index.versions(key);
            let first = versions.partition_point(|v| v.revision <= from);
            let within = &versions[first..];
            let within = &within[..within.partition_point(|v| v.revision <= to)];
            let deletion = within.last().filter(|v| v.is_deletion());
            if within.is_empty() {
                continue;
            }
            let changes = namespaces.entry(key.namespace()).or_default();
            let kind = index.kind(key);
            let is_kind = |name: &str| kind.is_some_and(|kind| kind.kind == name);
            match (old, new, deletion) {
                (_, None, Some(deletion)) => {
                    changes.deleted += 1;
                    if is_kind("Event") {
                        changes.deleted_events += 1;
                    } else if listed < MAX_LISTED {
                        changes.objects.push(Listed::of(index, key, deletion));
                        listed += 1;
                    }
                }
                (None, Some(_), _) => changes.created += 1,
                (Some(old), Some(new), _) if old != new => changes.changed += 1,
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
        Changes {
            from: At::of(index, from),
            to: At::of(index, to),
            namespaces: namespaces.collect(),
        }
    }
}
