//! CronJobs and followers as the watches tell them, in a form that ten thousand policies can afford.

use super::filters::Change;
use crate::controller::names::{Key, key, label, owner};
use crate::controller::{jobs, names};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::CronJob;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::Value;
use std::sync::OnceLock;

/// Of the compression: as fast as it goes.
const LEVEL: i32 = 1;

/// What was made for a policy and is there.
#[derive(Debug, Clone, PartialEq)]
pub struct Made {
    /// Its namespace and name.
    pub key: Key,
    /// The policy of its label.
    pub policy: Option<String>,
    /// The UID of its owner.
    pub owner: Option<String>,
    /// Its own.
    pub uid: Option<String>,
    /// How often its spec has changed.
    pub generation: Option<i64>,
    /// Of what it was made, by our annotation.
    pub hash: Option<String>,
    /// Whether it is neither suspended nor without replicas.
    pub runs: bool,
    /// The whole object as JSON, compressed.
    packed: Vec<u8>,
    /// Whether all of what it was made from stands in it, once somebody has asked.
    is_whole: OnceLock<bool>,
}

impl Made {
    /// Keeps a CronJob.
    pub fn cron_job(object: CronJob) -> Made {
        let runs = object.spec.suspend != Some(true);
        Made::new(&object, runs)
    }

    /// Keeps a follower.
    pub fn follower(mut object: Deployment) -> Made {
        object.status = None;
        let runs = object.spec.replicas != Some(0);
        Made::new(&object, runs)
    }

    fn new<K: Resource + Serialize>(object: &K, runs: bool) -> Made {
        // What cannot be read again counts as changed by somebody, and is written anew.
        let json = serde_json::to_vec(object).unwrap_or_default();
        Made {
            key: key(object),
            policy: label(object, jobs::LABEL_POLICY).map(str::to_owned),
            owner: owner(object).map(str::to_owned),
            uid: object.uid(),
            generation: object.meta().generation,
            hash: object.annotations().get(names::APPLIED_HASH).cloned(),
            runs,
            packed: zstd::bulk::compress(&json, LEVEL).unwrap_or_default(),
            is_whole: OnceLock::new(),
        }
    }

    /// It concerns the policy of its label.
    pub(super) fn concerned(change: &Change<'_, Made>) -> Vec<Key> {
        let both = change.before.into_iter().chain(change.now);
        both.filter_map(group).collect()
    }

    /// Whether all that is wanted stands in it. Its hash is that of what is wanted: so one answer is enough.
    pub fn holds(&self, wanted: &Value) -> bool {
        let is_whole = || {
            let json = zstd::stream::decode_all(&self.packed[..]).ok()?;
            let there = serde_json::from_slice(&json).ok()?;
            Some(holds(&there, wanted))
        };
        *self.is_whole.get_or_init(|| is_whole().unwrap_or(false))
    }
}

/// The label's group.
pub(super) fn group(made: &Made) -> Option<Key> {
    Some((made.key.0.clone(), made.policy.clone()?))
}

/// Whether all that is wanted stands in what is there, which may have more: defaults, others' fields.
fn holds(there: &Value, wanted: &Value) -> bool {
    match (there, wanted) {
        (Value::Object(there), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| {
            let nothing = wanted.is_null();
            there.get(key).map_or(nothing, |there| holds(there, wanted))
        }),
        (Value::Array(there), Value::Array(wanted)) => {
            there.len() == wanted.len() && there.iter().zip(wanted).all(|(t, w)| holds(t, w))
        }
        // The API server writes 48Gi for 49152Mi.
        (Value::String(there), Value::String(wanted)) => {
            there == wanted || amount(there).is_some_and(|there| amount(wanted) == Some(there))
        }
        (there, wanted) => there == wanted,
    }
}

/// What a quantity of Kubernetes amounts to; `None` if a text is none.
///
/// Source: Kubernetes' API conventions, "Quantity".
fn amount(text: &str) -> Option<f64> {
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
    fn more_may_be_there_than_is_wanted_but_nothing_else() {
        let wanted = json!({"a": 1, "b": [{"c": 2}], "d": {"e": null}});
        let there = json!({"a": 1, "b": [{"c": 2, "x": 3}], "d": {}, "y": 4});
        assert!(holds(&there, &wanted));
        let canonical = |written: &str, there: &str| holds(&json!(there), &json!(written));
        assert!(canonical("49152Mi", "48Gi") && canonical("0.5", "500m"));
        assert!(canonical("1024Ki", "1Mi") && canonical("2000k", "2M"));
        assert!(!canonical("1Gi", "1G") && !canonical("main", "m") && !canonical("a", "b"));
        for (at, other) in [
            ("/a", json!(2)),
            ("/b", json!([])),
            ("/b/0/c", json!("2")),
            ("/d", json!({"e": 1})),
        ] {
            let mut changed = there.clone();
            *changed.pointer_mut(at).unwrap() = other;
            assert!(!holds(&changed, &wanted), "{at}");
        }
    }
}
