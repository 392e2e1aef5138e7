//! Decides what is recovered of the objects that were selected, and in which order. Pure.

use super::Outcome;
use crate::kubernetes::live_objects::ObjectId;
use crate::objects::Object;
use crate::objects::resource::{KeyNames, ObjectName};
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// An object of the backup that was selected.
#[derive(Debug)]
pub struct Selected {
    /// Its key.
    pub key: Vec<u8>,
    /// The object, or why it cannot be read.
    pub object: Result<Object, String>,
    /// Whether it was named itself, and not its kind or its namespace.
    pub is_named: bool,
}

/// What is to be done.
#[derive(Debug, Default)]
pub struct Plan {
    /// The objects that are recovered, in their order.
    pub recovered: Vec<Planned>,
    /// Those that are not.
    pub left: Vec<Left>,
}

/// An object that is recovered.
#[derive(Debug)]
pub struct Planned {
    /// The name by which `get` finds it.
    pub name: String,
    /// The name for the API server.
    pub id: ObjectId,
    /// What goes to the API server, without owners.
    pub object: Object,
    /// The references to its owners, as they were.
    pub owners: Vec<Value>,
    /// The fields that the rules took out.
    pub without: Vec<String>,
    /// The UID that it had.
    uid: String,
}

/// An object that is not recovered.
#[derive(Debug, PartialEq, Eq)]
pub struct Left {
    /// The name by which `get` finds it, or its key.
    pub name: String,
    /// `LeftOut` or `Refused`.
    pub outcome: Outcome,
    /// Why.
    pub reason: String,
}

/// Decides. `names` are those of all kinds that the backup has.
pub fn plan(selected: Vec<Selected>, names: &KeyNames, keep_finalizers: bool) -> Plan {
    let mut plan = Plan::default();
    // The UIDs of objects that are left out: what they own is made anew with them.
    let mut left_uids = HashSet::new();
    let mut kept: Vec<(String, Selected, Object)> = Vec::new();
    for mut one in selected {
        let known = names.object(&one.key);
        let name = known.map_or_else(|| one.key.escape_ascii().to_string(), |o| o.to_string());
        let object = match (
            known,
            std::mem::replace(&mut one.object, Err(String::new())),
        ) {
            (None, _) => {
                let reason = "it is no object of a known kind".to_owned();
                plan.leave(name, Outcome::LeftOut, reason);
                continue;
            }
            (Some(_), Err(reason)) => {
                plan.leave(name, Outcome::Refused, reason);
                continue;
            }
            (Some(key), Ok(object)) if !is_of_key(&object, &key) => {
                let reason = "its key and its content name different objects".to_owned();
                plan.leave(name, Outcome::Refused, reason);
                continue;
            }
            (Some(_), Ok(object)) => object,
        };
        let mut reason = object.never_recovered().map(str::to_owned);
        if !one.is_named {
            reason = reason.or_else(|| object.recovered_if_named());
        }
        match reason {
            Some(reason) => {
                left_uids.insert(object.metadata_text("uid").to_owned());
                plan.leave(name, Outcome::LeftOut, reason);
            }
            None => kept.push((name, one, object)),
        }
    }
    loop {
        let before = kept.len();
        let mut still = Vec::with_capacity(before);
        for (name, one, object) in kept {
            let owner = object.owners().into_iter().next();
            let is_left = |uid: &String| !uid.is_empty() && left_uids.contains(uid);
            match owner.filter(|owner| !one.is_named && is_left(&owner.uid)) {
                Some(owner) => {
                    left_uids.insert(object.metadata_text("uid").to_owned());
                    let reason = format!("it belongs to a {} that is left out", owner.kind);
                    plan.leave(name, Outcome::LeftOut, reason);
                }
                None => still.push((name, one, object)),
            }
        }
        kept = still;
        if kept.len() == before {
            break;
        }
    }
    let kept = kept.into_iter();
    let planned = kept.map(|(name, _, object)| Planned::new(name, object, keep_finalizers));
    plan.recovered = in_order(planned.collect());
    plan
}

impl Plan {
    fn leave(&mut self, name: String, outcome: Outcome, reason: String) {
        self.left.push(Left {
            name,
            outcome,
            reason,
        });
    }
}

impl Planned {
    fn new(name: String, object: Object, keep_finalizers: bool) -> Self {
        let owners = object.owner_references().to_vec();
        let uid = object.metadata_text("uid").to_owned();
        let (object, without) = object.recoverable(keep_finalizers);
        let namespace = object.metadata_text("namespace");
        Planned {
            name,
            id: ObjectId {
                api_version: object.api_version().to_owned(),
                kind: object.kind().to_owned(),
                namespace: (!namespace.is_empty()).then(|| namespace.to_owned()),
                name: object.metadata_text("name").to_owned(),
            },
            object,
            owners,
            without,
            uid,
        }
    }
}

/// Whether an object is the one that its key names: else, an entry of one namespace could bring an object into another one.
fn is_of_key(object: &Object, key: &ObjectName<'_>) -> bool {
    let group = object.group();
    // Without a definition, only the plural is known.
    let has_kind = key.resource.kind == object.kind()
        || key.resource.kind == key.resource.plural && key.resource.is_custom;
    // Kinds that were in the group `extensions` once may still be stored so.
    let is_old = group == "extensions" && !key.resource.is_custom;
    has_kind
        && (key.resource.group == group || is_old)
        && object.metadata_text("name") == key.name
        && object.metadata_text("namespace") == key.namespace.unwrap_or_default()
}

/// Sorts objects: namespaces and definitions come first, owners before what they own, and then kind by kind.
fn in_order(all: Vec<Planned>) -> Vec<Planned> {
    let by_uid: HashMap<String, usize> = all
        .iter()
        .enumerate()
        .map(|(nth, planned)| (planned.uid.clone(), nth))
        .collect();
    let owner_of = |nth: usize| {
        let uids = all[nth]
            .owners
            .iter()
            .filter_map(|owner| owner["uid"].as_str());
        uids.filter_map(|uid| by_uid.get(uid)).copied().next()
    };
    // Owners that own each other are of a hostile backup.
    const DEEPEST: usize = 32;
    let depth = |nth: usize| {
        std::iter::successors(Some(nth), |&nth| owner_of(nth))
            .take(DEEPEST)
            .count()
    };
    let depths: Vec<usize> = (0..all.len()).map(depth).collect();
    let mut all: Vec<(usize, Planned)> = depths.into_iter().zip(all).collect();
    all.sort_by_cached_key(|(depth, planned)| {
        let order = planned.object.order();
        let is_ground = planned.object.is_ground_for_others();
        (
            !is_ground,
            if is_ground { 0 } else { *depth },
            order,
            planned.name.clone(),
        )
    });
    all.into_iter().map(|(_, planned)| planned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::key::EtcdPrefixes;
    use crate::objects::resource::Resource;
    use serde_json::json;

    /// An object in the namespace a: `owner` is the kind and the name of its controller. UIDs are names.
    fn selected(
        path: &str,
        version: &str,
        kind: &str,
        name: &str,
        owner: Option<(&str, &str)>,
    ) -> Selected {
        let owners = owner.map(
            |(kind, name)| json!([{"kind": kind, "name": name, "uid": name, "controller": true}]),
        );
        let json = json!({
            "apiVersion": version, "kind": kind,
            "metadata": {"name": name, "namespace": "a", "uid": name, "ownerReferences": owners},
        });
        Selected {
            key: format!("/registry/{path}/a/{name}").into_bytes(),
            object: Ok(Object::from_json(json.as_object().unwrap().clone())),
            is_named: false,
        }
    }

    fn planned(all: Vec<Selected>) -> (Vec<String>, Vec<(String, String)>) {
        let custom = Resource::without_definition("example.com/widgets", true);
        let names = KeyNames::new(
            Resource::built_in().chain([custom]),
            &EtcdPrefixes::new(None),
        );
        let plan = plan(all, &names, false);
        let recovered = plan.recovered.into_iter().map(|one| one.name).collect();
        (
            recovered,
            plan.left
                .into_iter()
                .map(|left| (left.name, left.reason))
                .collect(),
        )
    }

    #[test]
    fn owners_come_first_and_what_belongs_to_what_is_left_out_is_left_out() {
        let (recovered, left) = planned(vec![
            selected(
                "configmaps",
                "v1",
                "ConfigMap",
                "grandchild",
                Some(("Secret", "child")),
            ),
            selected("secrets", "v1", "Secret", "child", Some(("Widget", "w"))),
            selected("example.com/widgets", "example.com/v1", "Widget", "w", None),
            selected("deployments", "apps/v1", "Deployment", "d", None),
            selected(
                "replicasets",
                "apps/v1",
                "ReplicaSet",
                "r",
                Some(("Deployment", "d")),
            ),
            selected("pods", "v1", "Pod", "p", Some(("ReplicaSet", "r"))),
            selected(
                "persistentvolumeclaims",
                "v1",
                "PersistentVolumeClaim",
                "scratch",
                Some(("Pod", "p")),
            ),
            selected(
                "configmaps",
                "v1",
                "ConfigMap",
                "one",
                Some(("ConfigMap", "two")),
            ),
            selected(
                "configmaps",
                "v1",
                "ConfigMap",
                "two",
                Some(("ConfigMap", "one")),
            ),
        ]);
        let expected = [
            "widgets.example.com/a/w",
            "deployment/a/d",
            "secret/a/child",
            "configmap/a/grandchild",
            "configmap/a/one",
            "configmap/a/two",
        ];
        assert_eq!(recovered, expected);
        let left: Vec<_> = left
            .iter()
            .map(|(name, why)| format!("{name}: {why}"))
            .collect();
        let expected = [
            "replicaset/a/r: its Deployment makes it anew",
            "pod/a/p: its ReplicaSet makes it anew",
            "persistentvolumeclaim/a/scratch: it belongs to a Pod that is left out",
        ];
        assert_eq!(left, expected);
    }

    #[test]
    fn objects_without_uids_do_not_belong_together() {
        let mut lease = selected("leases", "coordination.k8s.io/v1", "Lease", "l", None);
        let mut owned = selected("configmaps", "v1", "ConfigMap", "c", Some(("Widget", "w")));
        for one in [&mut lease, &mut owned] {
            let metadata = &mut one.object.as_mut().unwrap().json["metadata"];
            metadata["uid"] = "".into();
            metadata["ownerReferences"] = json!([{"kind": "Widget", "name": "w", "uid": ""}]);
        }
        assert_eq!(planned(vec![lease, owned]).0, ["configmap/a/c"]);
    }

    #[test]
    fn an_object_under_the_key_of_another_one_is_refused() {
        for (path, version, kind) in [
            ("configmaps", "rbac.authorization.k8s.io/v1", "RoleBinding"),
            ("example.com/widgets", "v1", "Secret"),
            ("services/specs", "v1", "Endpoints"),
        ] {
            let (recovered, left) = planned(vec![selected(path, version, kind, "x", None)]);
            assert_eq!((recovered.len(), left.len()), (0, 1), "{kind}");
            assert!(left[0].1.contains("different objects"), "{left:?}");
        }
        let mut elsewhere = selected("configmaps", "v1", "ConfigMap", "x", None);
        elsewhere.key = b"/registry/configmaps/b/x".to_vec();
        assert_eq!(planned(vec![elsewhere]).0.len(), 0);
        let mut unknown = selected("configmaps", "v1", "ConfigMap", "x", None);
        unknown.key = b"/registry/ranges/x".to_vec();
        assert_eq!(
            planned(vec![unknown]).1[0].1,
            "it is no object of a known kind"
        );
    }
}
