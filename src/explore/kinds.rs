//! The kinds of the objects in a backup, and which object a key is.
//!
//! Kinds are Kubernetes' own, those that a CustomResourceDefinition of the backup defines, and those whose keys look
//! like an API server's.

use crate::objects::Object;
use crate::objects::key::EtcdPrefixes;
use crate::objects::key::ObjectKey;
use crate::objects::resource::{DEFINITIONS, KeyNames, Resource};
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
    /// What `deltafold get` calls it, such as `deployment`; null if `get` does not know it, and takes keys only.
    pub(super) reference: Option<String>,
}

/// All kinds.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    all: Vec<Kind>,
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

/// Whether a key is a CustomResourceDefinition.
pub(super) fn is_definition(key: &[u8], prefixes: &EtcdPrefixes) -> bool {
    let prefix = prefixes.of_key(key);
    let rest = prefix.and_then(|prefix| key.strip_prefix(prefix.as_bytes()));
    let rest = rest.and_then(|rest| rest.strip_prefix(b"/"));
    let rest = rest.and_then(|rest| rest.strip_prefix(DEFINITIONS.as_bytes()));
    rest.is_some_and(|rest| rest.starts_with(b"/"))
}

/// Returns the kind that a CustomResourceDefinition defines; `None` if it cannot be decoded.
pub(super) fn defined(definition: &[u8]) -> Option<Resource> {
    Resource::of_definition(&Object::decode(definition).ok()?)
}

impl Kinds {
    /// Returns which object a key is; `None` if it is none. `names` has the kinds that are known.
    pub(super) fn name(&mut self, names: &KeyNames, key: &[u8]) -> Option<NamedKey> {
        let named = names.object(key).map(|object| {
            let kind = Kind {
                kind: object.resource.kind.to_string(),
                group: object.resource.group.to_string(),
                reference: Some(object.resource.reference()),
            };
            (kind, object.namespace, object.name)
        });
        let named = named.or_else(|| {
            let object = ObjectKey::from_key(key, None)?;
            let kind = Kind {
                kind: object.resource.to_owned(),
                group: object.group.unwrap_or_default().into_owned(),
                reference: None,
            };
            Some((kind, object.namespace, object.name))
        });
        let (kind, namespace, name) = named?;
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
            kind: self.id(kind)?,
            namespace,
            name,
        })
    }

    fn id(&mut self, kind: Kind) -> Option<KindId> {
        if let Some(id) = self.ids.get(&kind) {
            return Some(*id);
        }
        // A hostile backup may have any number of kinds. The keys of those beyond the limit count as plain keys.
        let id = KindId::try_from(self.all.len()).ok()?;
        self.all.push(kind.clone());
        self.ids.insert(kind, id);
        Some(id)
    }

    /// Returns a kind.
    pub(super) fn get(&self, id: KindId) -> Option<&Kind> {
        self.all.get(usize::from(id))
    }

    /// Returns all kinds, in the order of their numbers.
    pub(super) fn all(&self) -> &[Kind] {
        &self.all
    }
}
