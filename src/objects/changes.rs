//! What changed between two versions of an object, field by field, and who changed it.

use super::Object;
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;

/// The largest number of changes of one version. A hostile version could have hundreds of thousands.
const MAX_CHANGES: usize = 1000;
/// Up to this number, entries of managedFields are compared one by one.
const FEW_MANAGERS: usize = 100;
/// The longest value that is shown in text, in characters.
const MAX_SHOWN: usize = 50;
/// Fields that every change of an object changes.
const IGNORED: [&str; 3] = [
    "metadata.generation",
    "metadata.managedFields",
    "metadata.resourceVersion",
];

/// A change of a field.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FieldChange {
    /// The field, such as `spec.template.spec.containers[web].image`. An element of a list is named by its `name`,
    /// `type` or `key`, or by its index.
    pub path: String,
    /// The value before; null if the field was added.
    pub old: Option<Value>,
    /// The value after; null if the field was removed.
    pub new: Option<Value>,
}

impl FieldChange {
    /// Returns the change as text. The values are hidden if `is_hidden` is set.
    pub fn text(&self, is_hidden: bool) -> String {
        let path = &self.path;
        match self.values(is_hidden) {
            (None, Some(new)) => format!("+ {path}: {new}"),
            (Some(old), None) => format!("- {path}: {old}"),
            (Some(old), Some(new)) => format!("~ {path}: {old} -> {new}"),
            (None, None) => path.clone(),
        }
    }

    /// Returns the value before and the one after, as short text. They are hidden if `is_hidden` is set.
    pub fn values(&self, is_hidden: bool) -> (Option<String>, Option<String>) {
        let shown = |value: &Value| {
            if is_hidden {
                "(hidden)".to_owned()
            } else {
                shorten(value)
            }
        };
        (self.old.as_ref().map(shown), self.new.as_ref().map(shown))
    }
}

fn shorten(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

impl Object {
    /// Returns the fields that differ from an earlier version of the object, at most a thousand.
    pub fn changes_since(&self, old: &Object) -> Vec<FieldChange> {
        let mut changes = Vec::new();
        compare_maps(&mut String::new(), &old.json, &self.json, &mut changes);
        changes
    }

    /// Returns who wrote this version: the managers whose entries differ from those of the version before.
    pub fn managers_since(&self, old: Option<&Object>) -> Vec<String> {
        // Entries keep their order, so most are found at once. A hostile version has 60,000.
        let before: Vec<&Value> = old.into_iter().flat_map(managed_fields).collect();
        let few = before.len() <= FEW_MANAGERS;
        let texts = before
            .iter()
            .filter(|_| !few)
            .map(|entry| entry.to_string());
        let texts: HashSet<String> = texts.collect();
        let is_new = |entry: &&Value| {
            if few {
                !before.contains(entry)
            } else {
                !texts.contains(&entry.to_string())
            }
        };
        let changed = managed_fields(self).filter(is_new);
        let names: BTreeSet<String> = changed.filter_map(manager).collect();
        names.into_iter().collect()
    }

    /// Whether the values of a field are those of a Secret, which text hides.
    pub fn is_secret_field(&self, path: &str) -> bool {
        let is_secret = self.kind() == "Secret" && self.api_version() == "v1";
        let is_below = |field: &str| {
            path.strip_prefix(field)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        is_secret && (is_below("data") || is_below("metadata.annotations"))
    }
}

fn managed_fields(object: &Object) -> impl Iterator<Item = &Value> {
    let metadata = object.json.get("metadata");
    let entries = metadata.and_then(|m| m.get("managedFields"));
    entries.and_then(Value::as_array).into_iter().flatten()
}

/// The name of a manager, with the subresource that it wrote.
fn manager(entry: &Value) -> Option<String> {
    let name = entry.get("manager")?.as_str()?;
    Some(match entry.get("subresource").and_then(Value::as_str) {
        Some(subresource) => format!("{name} ({subresource})"),
        None => name.to_owned(),
    })
}

/// Adds the differences of two values at a path, which is as before afterwards.
fn compare(
    path: &mut String,
    old: Option<&Value>,
    new: Option<&Value>,
    changes: &mut Vec<FieldChange>,
) {
    if old == new || changes.len() == MAX_CHANGES || IGNORED.contains(&path.as_str()) {
        return;
    }
    match (old, new) {
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            compare_maps(path, old, new, changes);
        }
        (Some(Value::Array(old)), Some(Value::Array(new))) => {
            compare_lists(path, old, new, changes);
        }
        _ => changes.push(FieldChange {
            path: path.clone(),
            old: old.cloned(),
            new: new.cloned(),
        }),
    }
}

fn compare_maps(
    path: &mut String,
    old: &Map<String, Value>,
    new: &Map<String, Value>,
    changes: &mut Vec<FieldChange>,
) {
    let end = path.len();
    let added = new.keys().filter(|key| !old.contains_key(*key));
    for key in old.keys().chain(added) {
        if end > 0 {
            path.push('.');
        }
        path.push_str(key);
        compare(path, old.get(key), new.get(key), changes);
        path.truncate(end);
    }
}

/// Compares lists: element by element by their names, if all have one, otherwise by index.
fn compare_lists(path: &mut String, old: &[Value], new: &[Value], changes: &mut Vec<FieldChange>) {
    let (old, new) = match (by_name(old), by_name(new)) {
        (Some(old), Some(new)) => (old, new),
        _ => (by_index(old), by_index(new)),
    };
    let end = path.len();
    let added = new.keys().filter(|key| !old.contains_key(*key));
    for key in old.keys().chain(added) {
        path.extend(["[", key, "]"]);
        compare(path, old.get(key).copied(), new.get(key).copied(), changes);
        path.truncate(end);
    }
}

/// The elements of a list by their names, if each has one of its own.
fn by_name(list: &[Value]) -> Option<BTreeMap<Cow<'_, str>, &Value>> {
    let named = list.iter().map(|v| Some((name_of(v)?.into(), v)));
    let named: Option<BTreeMap<_, _>> = named.collect();
    named.filter(|named| named.len() == list.len())
}

fn by_index(list: &[Value]) -> BTreeMap<Cow<'_, str>, &Value> {
    let indexed = list.iter().enumerate();
    indexed.map(|(i, v)| (i.to_string().into(), v)).collect()
}

/// The name of an element, by the keys of Kubernetes' lists.
fn name_of(element: &Value) -> Option<&str> {
    ["name", "type", "key"]
        .iter()
        .find_map(|field| element.get(field)?.as_str())
}

/// What an Event object says of another object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct EventNote {
    /// `Normal` or `Warning`.
    pub r#type: String,
    /// The reason, such as `ScalingReplicaSet`.
    pub reason: String,
    /// The message.
    pub message: String,
    /// How often it happened.
    pub count: i64,
}

impl EventNote {
    /// Reads an Event object; `None` if it is about another object than the one of this kind and name.
    pub fn about(event: &Object, kind: &str, name: &str) -> Option<Self> {
        let involved = event.json.get("involvedObject")?;
        if involved.get("kind")?.as_str()? != kind || involved.get("name")?.as_str()? != name {
            return None;
        }
        let text = |field: &str| {
            let value = event.json.get(field).and_then(Value::as_str);
            value.unwrap_or_default().to_owned()
        };
        let series = event.json.get("series").and_then(|s| s.get("count"));
        let count = series.or(event.json.get("count"));
        Some(EventNote {
            r#type: text("type"),
            reason: text("reason"),
            message: text("message"),
            count: count.and_then(Value::as_i64).unwrap_or(1),
        })
    }
}

impl fmt::Display for EventNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.r#type, self.reason, self.message)?;
        if self.count > 1 {
            write!(f, " ({} times)", self.count)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::LAST_APPLIED;
    use super::*;
    use serde_json::json;

    fn object(json: Value) -> Object {
        Object::decode(&serde_json::to_vec(&json).unwrap()).unwrap()
    }

    #[test]
    fn changes_are_named_field_by_field_with_their_managers() {
        let version = |replicas: i64, image: &str, labels: Value, managed: Value| {
            object(json!({
                "apiVersion": "apps/v1", "kind": "Deployment",
                "metadata": {"generation": replicas, "labels": labels, "managedFields": managed, "resourceVersion": image},
                "spec": {"containers": [{"name": "web", "image": image}, {"name": "b"}], "replicas": replicas, "args": ["a"]},
            }))
        };
        let entry = |manager: &str, time: &str| json!({"manager": manager, "operation": "Update", "time": time});
        let old = version(
            1,
            "a:1",
            json!({"x": "1"}),
            json!([entry("kubectl", "1"), entry("other", "1")]),
        );
        let mut status = entry("kube-controller-manager", "2");
        status["subresource"] = "status".into();
        let managed = json!([entry("kubectl", "2"), entry("other", "1"), status]);
        let new = version(2, "a:2", json!({"y": "1"}), managed);
        let changes = new.changes_since(&old);
        let texts: Vec<String> = changes.iter().map(|c| c.text(false)).collect();
        assert_eq!(
            texts,
            [
                "- metadata.labels.x: \"1\"",
                "+ metadata.labels.y: \"1\"",
                "~ spec.containers[web].image: \"a:1\" -> \"a:2\"",
                "~ spec.replicas: 1 -> 2",
            ]
        );
        assert_eq!(
            new.managers_since(Some(&old)),
            ["kube-controller-manager (status)", "kubectl"]
        );
        assert_eq!(old.managers_since(None), ["kubectl", "other"]);
    }

    /// Each entry was once compared with each one of the version before.
    #[test]
    fn a_writers_60_000_managed_fields_take_no_minute() {
        let with = |time: i64| {
            let entry = |i: usize| json!({"manager": format!("m{i}"), "time": time, "fieldsV1": {"f:a": {}}});
            let fields: Vec<Value> = (0..60_000).map(entry).collect();
            object(json!({"apiVersion": "v1", "kind": "A", "metadata": {"managedFields": fields}}))
        };
        assert_eq!(with(2).managers_since(Some(&with(1))).len(), 60_000);
    }

    #[test]
    fn values_of_secrets_are_hidden_and_changes_are_bounded() {
        let secret = |value: &str| {
            let data = json!({"a": value});
            let annotations = json!({LAST_APPLIED: value, "other": value});
            object(json!({
                "apiVersion": "v1", "kind": "Secret", "data": data, "metadata": {"annotations": annotations},
            }))
        };
        let (old, new) = (secret("b2xk"), secret("bmV3"));
        let changes = new.changes_since(&old);
        let texts = changes.iter().map(|c| c.text(new.is_secret_field(&c.path)));
        assert_eq!(
            texts.collect::<Vec<_>>(),
            [
                "~ data.a: (hidden) -> (hidden)",
                "~ metadata.annotations.kubectl.kubernetes.io/last-applied-configuration: (hidden) -> (hidden)",
                "~ metadata.annotations.other: (hidden) -> (hidden)",
            ]
        );
        // Annotations that come or go as a whole.
        let mut without = secret("bmV3");
        without.metadata().unwrap().remove("annotations");
        for changes in [without.changes_since(&new), new.changes_since(&without)] {
            let shown = changes[0].text(new.is_secret_field(&changes[0].path));
            assert!(shown.contains("(hidden)"), "{shown}");
        }
        let large = |value: i64| {
            let list: Vec<i64> = vec![value; 100_000];
            object(json!({"apiVersion": "v1", "kind": "A", "list": list}))
        };
        assert_eq!(large(2).changes_since(&large(1)).len(), MAX_CHANGES);
    }
}
