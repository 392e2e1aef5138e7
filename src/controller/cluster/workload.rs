//! CronJobs and followers in the caches: hashes of their fields instead of the fields.
//!
//! It compares an object with the desired one, and does not decide what to do about a difference.

use crate::controller::jobs;
use crate::controller::names::{NamespacedName, label, owner};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::marker::PhantomData;

/// The most hashes of an object. One that has more counts as changed by somebody else, and is applied again.
const MAX_FIELDS: usize = 4096;

/// Returns the policy of an object's label.
pub(super) fn policy_of_label<K: Resource>(object: &K) -> Option<NamespacedName> {
    let policy = label(object, jobs::LABEL_POLICY)?;
    Some(NamespacedName::new(
        object.namespace().unwrap_or_default(),
        policy,
    ))
}

/// A CronJob or a follower in the cluster.
#[derive(Debug, Clone)]
pub struct Workload<K> {
    name: String,
    uid: Option<String>,
    /// Whether it is a CronJob that is not suspended, or a follower with a replica.
    pub is_active: bool,
    /// The hash of each field, in order.
    fields: Box<[u64]>,
    /// The policy of the label.
    policy: Option<NamespacedName>,
    /// The UID of the owner.
    owner: Option<String>,
    kind: PhantomData<fn() -> K>,
}

impl<K: Resource + Serialize + Clone> Workload<K> {
    /// Returns what is kept of an object. If it cannot be written as JSON, the earlier part stays.
    pub fn new(object: &K, before: Option<&Self>, is_active: bool) -> Option<Self> {
        let json = match serde_json::to_value(object) {
            Ok(json) => json,
            Err(e) => {
                let name = object.name_any();
                tracing::warn!("an object that cannot be written as JSON is ignored: {name}: {e}");
                return before.cloned();
            }
        };
        let mut fields: Vec<u64> = fields(&json).into_iter().collect();
        if fields.len() > MAX_FIELDS {
            fields.clear();
        }
        Some(Workload {
            name: object.name_any(),
            uid: object.uid(),
            is_active,
            fields: fields.into_boxed_slice(),
            policy: policy_of_label(object),
            owner: owner(object).map(str::to_owned),
            kind: PhantomData,
        })
    }
}

impl<K> Workload<K> {
    /// Returns the name of the object.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the UID of the object.
    pub fn uid(&self) -> Option<&str> {
        self.uid.as_deref()
    }

    /// Returns whether an object with this UID owns it.
    pub fn is_owned_by(&self, uid: Option<&str>) -> bool {
        uid.is_some() && self.owner.as_deref() == uid
    }

    /// Returns the policy of the label.
    pub fn policy(&self) -> Option<NamespacedName> {
        self.policy.clone()
    }

    /// Returns whether the object contains every field of the desired one. It may have more: defaults, and fields
    /// of other owners.
    pub fn contains(&self, desired: &Value) -> bool {
        let mut desired = fields(desired).into_iter();
        desired.all(|field| self.fields.binary_search(&field).is_ok())
    }
}

/// Returns the hash of each field that a person may have edited: labels, annotations and the spec.
fn fields(object: &Value) -> BTreeSet<u64> {
    let mut hashes = BTreeSet::new();
    for path in ["/metadata/labels", "/metadata/annotations", "/spec"] {
        if let Some(value) = object.pointer(path) {
            add_fields(path, value, &mut hashes);
        }
    }
    hashes
}

fn add_fields(path: &str, value: &Value, hashes: &mut BTreeSet<u64>) {
    let mut add = |kind: &str, text: &str| {
        let mut hasher = DefaultHasher::new();
        (path, kind, text).hash(&mut hasher);
        hashes.insert(hasher.finish());
    };
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            add("object", "");
            for (key, value) in fields {
                add_fields(&format!("{path}/{key}"), value, hashes);
            }
        }
        Value::Array(items) => {
            add("items", &items.len().to_string());
            for (i, item) in items.iter().enumerate() {
                add_fields(&format!("{path}/{i}"), item, hashes);
            }
        }
        // The API server may write a quantity in another unit: 48Gi for 49152Mi.
        Value::String(text) => match quantity(text) {
            Some(number) => add("quantity", &number.to_string()),
            None => add("text", text),
        },
        other => add("other", &other.to_string()),
    }
}

/// Returns the value of a Kubernetes quantity, or `None` if the text is not one.
///
/// Source: Kubernetes' API conventions, "Quantity".
fn quantity(text: &str) -> Option<f64> {
    let end = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let exponent = |unit: &str| {
        "kMGTPE"
            .find(unit)
            .map(|i| i32::try_from(i).unwrap_or(0) + 1)
    };
    let factor = match unit {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "Ki" => 1024.0,
        _ => match unit.strip_suffix('i') {
            Some(unit) => 1024_f64.powi(exponent(unit)?),
            None => 1000_f64.powi(exponent(unit)?),
        },
    };
    Some(number.parse::<f64>().ok()? * factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_object_may_have_more_fields_but_no_other_values_than_desired() {
        let contains = |actual: &Value, desired: &Value| {
            let actual = fields(&json!({"spec": actual}));
            fields(&json!({"spec": desired})).is_subset(&actual)
        };
        let desired = json!({"a": 1, "b": [{"c": 2}], "d": {"e": null}});
        let actual = json!({"a": 1, "b": [{"c": 2, "x": 3}], "d": {}, "y": 4});
        assert!(contains(&actual, &desired));
        let is_same = |desired: &str, actual: &str| contains(&json!(actual), &json!(desired));
        assert!(is_same("49152Mi", "48Gi") && is_same("0.5", "500m"));
        assert!(is_same("1024Ki", "1Mi") && is_same("2000k", "2M"));
        assert!(!is_same("1Gi", "1G") && !is_same("main", "m") && !is_same("a", "b"));
        for (path, value) in [
            ("/a", json!(2)),
            ("/b", json!([])),
            ("/b/0/c", json!("2")),
            ("/b", json!([{"c": 2}, {"c": 3}])),
            ("/d", json!("e")),
        ] {
            let mut changed = actual.clone();
            *changed.pointer_mut(path).unwrap() = value;
            assert!(!contains(&changed, &desired), "{path}");
        }
    }
}
