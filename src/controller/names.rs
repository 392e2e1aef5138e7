//! Names and owners of Kubernetes objects.
//!
//! Looks only at metadata.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use std::fmt;

/// The namespace and the name of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespacedName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl NamespacedName {
    /// Returns this name in this namespace.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        NamespacedName {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// Returns the namespace and the name of an object.
    pub fn of<K: Resource>(object: &K) -> Self {
        NamespacedName::new(object.namespace().unwrap_or_default(), object.name_any())
    }
}

impl fmt::Display for NamespacedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Returns the value of a label.
pub fn label<'a, K: Resource>(object: &'a K, name: &str) -> Option<&'a str> {
    let labels = object.meta().labels.as_ref()?;
    labels.get(name).map(String::as_str)
}

/// Returns the UID of the object's controller, by its owner references.
pub fn owner<K: Resource>(object: &K) -> Option<&str> {
    let mut owners = object.meta().owner_references.iter().flatten();
    let owner = owners.find(|o: &&OwnerReference| o.controller == Some(true))?;
    Some(&owner.uid)
}

/// Whether `owner_object` controls `object`. UIDs are compared: an earlier object of the same name does not
/// count.
pub fn is_owned<K: Resource, O: Resource>(object: &K, owner_object: &O) -> bool {
    let uid = owner_object.meta().uid.as_deref();
    uid.is_some() && owner(object) == uid
}
