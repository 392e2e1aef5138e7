//! The kinds of the objects in a backup, and which object a key is.
//!
//! Kinds are those of `get`: Kubernetes' own, those that a CustomResourceDefinition of the backup defines, and those whose
//! keys look like an API server's.

use crate::objects::resource::{KeyNames, Resource};
use serde::Serialize;
use std::collections::HashMap;
use std::ops::Range;

/// The place of a kind in [`Kinds`].
pub(super) type KindId = u16;

/// A kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Kind {
    /// The kind, such as `Deployment`; the resource if no definition names it.
    pub(super) kind: String,
    /// The API group; empty for the core group, and if it is unknown.
    pub(super) group: String,
    /// What `deltafold get` calls it, such as `deployment`.
    pub(super) reference: String,
}

/// All kinds.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    all: Vec<Kind>,
    resources: Vec<Resource>,
    ids: HashMap<Kind, KindId>,
}

/// The parts of an object's key.
pub(super) struct NamedKey {
    pub(super) kind: KindId,
    /// Where the namespace is in the key; empty if there is none.
    pub(super) namespace: Range<u32>,
    /// Where the name is in the key.
    pub(super) name: Range<u32>,
}

impl Kinds {
    /// Returns which object a key is; `None` if it is none. `names` has the kinds that are known.
    pub(super) fn name(&mut self, names: &KeyNames, key: &[u8]) -> Option<NamedKey> {
        let object = names.object(key)?;
        let (namespace, name) = (object.namespace, object.name);
        let kind = Kind {
            kind: object.resource.kind.to_string(),
            group: object.resource.group.to_string(),
            reference: object.resource.reference(),
        };
        let size = |part: &str| u32::try_from(part.len()).ok();
        let end = u32::try_from(key.len()).ok()?;
        let name = end.checked_sub(size(name)?)?..end;
        let namespace = match namespace {
            Some(namespace) => {
                let end = name.start.checked_sub(1)?;
                end.checked_sub(size(namespace)?)?..end
            }
            None => 0..0,
        };
        Some(NamedKey {
            kind: self.id(kind, object.resource)?,
            namespace,
            name,
        })
    }

    fn id(&mut self, kind: Kind, resource: &Resource) -> Option<KindId> {
        if let Some(id) = self.ids.get(&kind) {
            return Some(*id);
        }
        // A hostile backup may have any number of kinds. The keys of those beyond the limit count as plain keys.
        let id = KindId::try_from(self.all.len()).ok()?;
        self.all.push(kind.clone());
        self.resources.push(resource.clone());
        self.ids.insert(kind, id);
        Some(id)
    }

    /// Returns a kind.
    pub(super) fn get(&self, id: KindId) -> Option<&Kind> {
        self.all.get(usize::from(id))
    }

    /// Returns what is known of a kind.
    pub(super) fn resource(&self, id: KindId) -> Option<&Resource> {
        self.resources.get(usize::from(id))
    }

    /// Returns all kinds, in the order of their numbers.
    pub(super) fn all(&self) -> &[Kind] {
        &self.all
    }
}
