//! Names and owners of Kubernetes objects.
//!
//! Looks only at metadata. Called by all modules of the controller.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};

/// A namespace and a name.
pub type Key = (String, String);

/// The annotation with the hash of an object as this controller applied it. Comparing hashes shows whether
/// the object must be applied again; comparing the objects would not, because the API server fills in
/// defaults.
pub const APPLIED_HASH: &str = "deltafold.io/applied-hash";

/// Returns an object's namespace and name.
pub fn key<K: Resource>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
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
