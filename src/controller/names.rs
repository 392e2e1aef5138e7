//! How objects are named, and whose they are. All rooms of the controller use it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};

/// A namespace and a name.
pub type Key = (String, String);

/// What an object was made from: whether it is as it should be is told without comparing what the API server has
/// filled in.
pub const HASH: &str = "deltafold.io/applied-hash";

/// An object's namespace and name.
pub fn key<K: Resource>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// A label of an object.
pub fn label<'a, K: Resource>(object: &'a K, name: &str) -> Option<&'a str> {
    let labels = object.meta().labels.as_ref()?;
    labels.get(name).map(String::as_str)
}

/// The UID of the object that an object belongs to.
pub fn owner<K: Resource>(object: &K) -> Option<&str> {
    let owners = object.meta().owner_references.iter().flatten();
    let mut owners = owners.filter(|o: &&OwnerReference| o.controller == Some(true));
    owners.next().map(|o| o.uid.as_str())
}

/// Whether an object belongs to another one, not to one of the same name that is gone.
pub fn is_owned<K: Resource, O: Resource>(object: &K, by: &O) -> bool {
    let uid = by.meta().uid.as_deref();
    uid.is_some() && owner(object) == uid
}
