//! The kinds of the objects in a backup beside Kubernetes' own: those that its CustomResourceDefinitions define, and those
//! whose keys it has without one, such as OpenShift's and those of aggregated API servers.

use super::versions::{self, Collect, FoundVersion};
use crate::base::{lock, unpoisoned};
use crate::error::Result;
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::Object;
use crate::objects::key::EtcdPrefixes;
use crate::objects::reference::KindsOf;
use crate::objects::resource::{DEFINITIONS, Resource};
use crate::prefix::open::{BackupLocation, State};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The most kinds without a definition: a hostile backup may have a million.
const MAX_UNDEFINED: usize = 10_000;

/// Returns the kinds in a state, or in all that the snapshots of its timeline hold. Definitions that cannot be decoded, and
/// those that were deleted, are logged.
///
/// # Errors
/// As [`State::for_each_live`] and [`versions::read`].
pub fn kinds(
    backup: &BackupLocation,
    state: &State,
    of: KindsOf,
    prefixes: &EtcdPrefixes,
) -> Result<Vec<Resource>> {
    let found = FoundKinds::new(prefixes);
    match of {
        KindsOf::State => {
            let roots = prefixes.iter().map(|p| format!("{p}/").into_bytes());
            state.for_each_live(backup.context(), KeyRange::prefixes(roots), |kv| {
                found.see(kv.key, kv.mod_revision, Some(kv));
                Ok(())
            })?;
        }
        KindsOf::AllTimes => {
            let timeline = backup.file().is_none().then_some(state.timeline.as_str());
            versions::read(backup, timeline, &found)?;
        }
    }
    Ok(found.finish())
}

/// The kinds that were found so far.
pub(crate) struct FoundKinds<'p> {
    prefixes: &'p EtcdPrefixes,
    /// The newest change of each definition, and the newest kind that it defined.
    definitions: Mutex<BTreeMap<Vec<u8>, Definition>>,
    /// Kinds by their paths, and whether they have a namespace.
    undefined: Mutex<BTreeMap<String, bool>>,
}

#[derive(Default)]
struct Definition {
    changed: Revision,
    is_deleted: bool,
    defined: Revision,
    resource: Option<Resource>,
}

impl<'p> FoundKinds<'p> {
    pub(crate) fn new(prefixes: &'p EtcdPrefixes) -> Self {
        FoundKinds {
            prefixes,
            definitions: Mutex::default(),
            undefined: Mutex::default(),
        }
    }

    /// Whether a key is a CustomResourceDefinition.
    pub(crate) fn is_definition(&self, key: &[u8]) -> bool {
        let path = self
            .path(key)
            .and_then(|path| path.strip_prefix(DEFINITIONS));
        path.is_some_and(|name| name.starts_with('/'))
    }

    /// Returns the place of a key below the prefix of its API server; `None` if it is none of theirs.
    fn path<'k>(&self, key: &'k [u8]) -> Option<&'k str> {
        let prefix = self.prefixes.of_key(key)?.len();
        std::str::from_utf8(key.get(prefix + 1..)?).ok()
    }

    /// Sees a version of a key, with its record if it was put. Of what is no definition, one without a record is enough.
    pub(crate) fn see(&self, key: &[u8], revision: Revision, kv: Option<&KeyValue<'_>>) {
        if !self.is_definition(key) {
            if let Some(path) = self.path(key) {
                self.see_path(path);
            }
            return;
        }
        let resource = kv.and_then(|kv| match Object::decode(kv.value) {
            Ok(definition) => Resource::of_definition(&definition),
            Err(e) => {
                tracing::warn!("{}: {e}", key.escape_ascii());
                None
            }
        });
        let mut definitions = lock(&self.definitions);
        let definition = definitions.entry(key.to_vec()).or_default();
        if definition.changed < revision {
            (definition.changed, definition.is_deleted) = (revision, kv.is_none());
        }
        if resource.is_some() && definition.defined < revision {
            (definition.defined, definition.resource) = (revision, resource);
        }
    }

    fn see_path(&self, path: &str) {
        let parts: Vec<&str> = path.split('/').collect();
        let (path, is_namespaced) = match *parts {
            [group, kind, _, _] if group.contains('.') => (format!("{group}/{kind}"), true),
            [group, kind, _] if group.contains('.') => (format!("{group}/{kind}"), false),
            [kind, _, _] => (kind.to_owned(), true),
            [kind, _] => (kind.to_owned(), false),
            _ => return,
        };
        let mut undefined = lock(&self.undefined);
        if undefined.len() < MAX_UNDEFINED {
            undefined.entry(path).or_insert(is_namespaced);
        }
    }

    /// Returns the kinds beside Kubernetes' own.
    pub(crate) fn finish(self) -> Vec<Resource> {
        let mut all = Vec::new();
        for definition in unpoisoned(self.definitions.into_inner()).into_values() {
            if let (Some(resource), true) = (&definition.resource, definition.is_deleted) {
                let (name, revision) = (resource.full_name(), definition.changed);
                tracing::warn!(
                    "the CustomResourceDefinition {name} was deleted at revision {revision}"
                );
            }
            all.extend(definition.resource);
        }
        let undefined = unpoisoned(self.undefined.into_inner());
        let built_in: Vec<Resource> = Resource::built_in().collect();
        for (path, is_namespaced) in undefined {
            if !built_in.iter().chain(&all).any(|r| r.is_at(&path)) {
                all.push(Resource::without_definition(&path, is_namespaced));
            }
        }
        all
    }
}

impl Collect for FoundKinds<'_> {
    fn wants(&self, key: &[u8]) -> bool {
        self.prefixes.of_key(key).is_some()
    }

    fn add(&self, version: FoundVersion<'_>) -> Result<()> {
        self.see(version.key, version.revision.0, version.kv);
        Ok(())
    }
}
