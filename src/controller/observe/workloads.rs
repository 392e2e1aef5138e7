//! CronJobs and followers in the watch caches, compressed so that ten thousand policies fit into memory.
//!
//! It compares an object with the desired one, and does not decide what to do about a difference. Called by
//! `watch` and by `plan::objects`.

use super::filters::Change;
use crate::controller::names::{Key, key, label, owner};
use crate::controller::{jobs, names};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::CronJob;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::Value;
use std::sync::OnceLock;

/// The zstd level: the fastest one.
const LEVEL: i32 = 1;

/// A CronJob or a follower in the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedObject {
    /// Its namespace and name.
    pub key: Key,
    /// The name of the policy, from the label.
    pub policy: Option<String>,
    /// The UID of the owner.
    pub owner: Option<String>,
    /// The UID of the object.
    pub uid: Option<String>,
    /// The generation, which Kubernetes increments whenever the spec changes.
    pub generation: Option<i64>,
    /// The hash of the object that was applied, from the annotation [`names::APPLIED_HASH`].
    pub hash: Option<String>,
    /// Whether it is a CronJob that is not suspended, or a follower with a replica.
    pub is_active: bool,
    /// The object as JSON, compressed.
    packed: Vec<u8>,
    /// The result of [`contains_all`](Self::contains_all), after its first call.
    contains_all: OnceLock<bool>,
}

impl PackedObject {
    /// Packs a CronJob.
    pub fn cron_job(object: CronJob) -> PackedObject {
        let is_active = object.spec.suspend != Some(true);
        PackedObject::new(&object, is_active)
    }

    /// Packs a follower.
    pub fn follower(mut object: Deployment) -> PackedObject {
        object.status = None;
        let is_active = object.spec.replicas != Some(0);
        PackedObject::new(&object, is_active)
    }

    fn new<K: Resource + Serialize>(object: &K, is_active: bool) -> PackedObject {
        // An object that cannot be packed counts as changed by somebody else, and is applied again.
        let json = serde_json::to_vec(object).unwrap_or_default();
        PackedObject {
            key: key(object),
            policy: label(object, jobs::LABEL_POLICY).map(str::to_owned),
            owner: owner(object).map(str::to_owned),
            uid: object.uid(),
            generation: object.meta().generation,
            hash: object.annotations().get(names::APPLIED_HASH).cloned(),
            is_active,
            packed: zstd::bulk::compress(&json, LEVEL).unwrap_or_default(),
            contains_all: OnceLock::new(),
        }
    }

    /// Returns the policies that a change affects: those of the labels before and after it.
    pub(super) fn affected(change: &Change<'_, PackedObject>) -> Vec<Key> {
        change.both().filter_map(policy_of).collect()
    }

    /// Returns whether the object contains every field of the desired one. It may be called only if `hash` is
    /// the hash of `desired`: the first result is kept.
    pub fn contains_all(&self, desired: &Value) -> bool {
        let unpacked = || -> Option<Value> {
            let json = zstd::stream::decode_all(&self.packed[..]).ok()?;
            serde_json::from_slice(&json).ok()
        };
        *self
            .contains_all
            .get_or_init(|| unpacked().is_some_and(|actual| contains_all(&actual, desired)))
    }
}

/// Returns the policy of the object's label.
pub(super) fn policy_of(object: &PackedObject) -> Option<Key> {
    Some((object.key.0.clone(), object.policy.clone()?))
}

/// Returns whether every desired field is in the actual object, which may have more: defaults, and fields of
/// other owners.
fn contains_all(actual: &Value, desired: &Value) -> bool {
    match (actual, desired) {
        (Value::Object(actual), Value::Object(desired)) => {
            desired.iter().all(|(key, desired)| match actual.get(key) {
                Some(actual) => contains_all(actual, desired),
                None => desired.is_null(),
            })
        }
        (Value::Array(actual), Value::Array(desired)) => {
            let mut pairs = actual.iter().zip(desired);
            actual.len() == desired.len() && pairs.all(|(a, d)| contains_all(a, d))
        }
        // The API server may write a quantity in another unit: 48Gi for 49152Mi.
        (Value::String(actual), Value::String(desired)) => {
            actual == desired || quantity(actual).is_some_and(|n| quantity(desired) == Some(n))
        }
        (actual, desired) => actual == desired,
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
        let desired = json!({"a": 1, "b": [{"c": 2}], "d": {"e": null}});
        let actual = json!({"a": 1, "b": [{"c": 2, "x": 3}], "d": {}, "y": 4});
        assert!(contains_all(&actual, &desired));
        let is_same = |desired: &str, actual: &str| contains_all(&json!(actual), &json!(desired));
        assert!(is_same("49152Mi", "48Gi") && is_same("0.5", "500m"));
        assert!(is_same("1024Ki", "1Mi") && is_same("2000k", "2M"));
        assert!(!is_same("1Gi", "1G") && !is_same("main", "m") && !is_same("a", "b"));
        for (path, value) in [
            ("/a", json!(2)),
            ("/b", json!([])),
            ("/b/0/c", json!("2")),
            ("/d", json!({"e": 1})),
        ] {
            let mut changed = actual.clone();
            *changed.pointer_mut(path).unwrap() = value;
            assert!(!contains_all(&changed, &desired), "{path}");
        }
    }
}
