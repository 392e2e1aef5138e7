//! What a table shows of an object, beside its name and age.

use super::json_path::JsonPath;
use super::resource::Resource;
use crate::base::duration;
use chrono::{DateTime, Utc};
use serde_json::Value;

/// A column: its header, and its cell of an object.
pub struct Column {
    /// The header, in capitals.
    pub header: String,
    cell: Cell,
}

/// Returns the cell of an object of a common kind.
type BuiltInCell = fn(&Value) -> String;

enum Cell {
    BuiltIn(BuiltInCell),
    /// A path, if it is valid, and whether the value is a time.
    Path(Option<JsonPath>, bool),
}

/// The value of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CellValue {
    /// A text, which may be empty.
    Text(String),
    /// A time (RFC 3339), which is shown as an age.
    Time(String),
}

impl Column {
    /// Returns the columns of a kind: a few of common kinds, and the printer columns of custom resources. A wide table has
    /// more.
    pub fn of(resource: &Resource, is_wide: bool) -> Vec<Column> {
        if !resource.columns.is_empty() {
            let columns = resource.columns.iter();
            // Every table has the age anyway.
            let columns = columns.filter(|c| c.json_path != ".metadata.creationTimestamp");
            let columns = columns.filter(|c| is_wide || !c.is_wide);
            return columns
                .map(|c| Column {
                    header: c.name.to_uppercase(),
                    cell: Cell::Path(JsonPath::parse(&c.json_path).ok(), c.is_date),
                })
                .collect();
        }
        let built_in: &[(&str, BuiltInCell)] = match &*resource.full_name() {
            "pods" if is_wide => &[
                ("READY", ready_containers),
                ("STATUS", phase),
                ("IP", |o| text(o, "/status/podIP")),
                ("NODE", |o| text(o, "/spec/nodeName")),
                ("IMAGES", |o| containers_images(o, "/spec/containers")),
            ],
            "pods" => &[
                ("READY", ready_containers),
                ("STATUS", phase),
                ("NODE", |o| text(o, "/spec/nodeName")),
            ],
            "events" | "events.events.k8s.io" => &[
                ("TYPE", |o| text(o, "/type")),
                ("REASON", |o| text(o, "/reason")),
                ("OBJECT", involved),
                ("MESSAGE", |o| either(o, "/message", "/note")),
            ],
            "deployments.apps" | "statefulsets.apps" | "replicasets.apps" => &[
                ("READY", |o| {
                    ratio(o, "/status/readyReplicas", "/spec/replicas")
                }),
                ("IMAGES", images),
            ],
            "daemonsets.apps" => &[
                ("READY", |o| {
                    ratio(o, "/status/numberReady", "/status/desiredNumberScheduled")
                }),
                ("IMAGES", images),
            ],
            "jobs.batch" => &[("COMPLETIONS", |o| {
                ratio(o, "/status/succeeded", "/spec/completions")
            })],
            "cronjobs.batch" => &[("SCHEDULE", |o| text(o, "/spec/schedule"))],
            "services" => &[
                ("TYPE", |o| text(o, "/spec/type")),
                ("CLUSTER-IP", |o| text(o, "/spec/clusterIP")),
                ("PORTS", ports),
            ],
            "configmaps" => &[("DATA", data)],
            "secrets" => &[("TYPE", |o| text(o, "/type")), ("DATA", data)],
            "nodes" => &[
                ("STATUS", node_status),
                ("VERSION", |o| text(o, "/status/nodeInfo/kubeletVersion")),
            ],
            "namespaces" => &[("STATUS", phase)],
            "persistentvolumeclaims" => &[
                ("STATUS", phase),
                ("VOLUME", |o| text(o, "/spec/volumeName")),
                ("CAPACITY", |o| text(o, "/status/capacity/storage")),
            ],
            _ => &[],
        };
        let columns = built_in.iter();
        columns
            .map(|&(header, cell)| Column {
                header: header.to_owned(),
                cell: Cell::BuiltIn(cell),
            })
            .collect()
    }

    /// Returns the cell of an object as text, with the age at a moment of what is a time.
    pub fn text(&self, object: &Value, now: DateTime<Utc>) -> String {
        match self.value(object) {
            CellValue::Text(text) => text,
            CellValue::Time(time) => age(&time, now).unwrap_or(time),
        }
    }

    /// Returns the cell of an object.
    pub fn value(&self, object: &Value) -> CellValue {
        match &self.cell {
            Cell::BuiltIn(cell) => CellValue::Text(cell(object)),
            Cell::Path(path, is_date) => {
                // An invalid path, or one without a value, gives an empty cell, as in kubectl.
                let found = path.as_ref().map(|path| path.values(object));
                let texts: Vec<String> = found.into_iter().flatten().map(shown).collect();
                let text = texts.join(",");
                if *is_date && !text.is_empty() {
                    CellValue::Time(text)
                } else {
                    CellValue::Text(text)
                }
            }
        }
    }
}

/// Returns how old a time (RFC 3339) is at a moment; `None` if it is none.
pub fn age(time: &str, now: DateTime<Utc>) -> Option<String> {
    let time = DateTime::parse_from_rfc3339(time).ok()?;
    Some(duration::age((now - time.to_utc()).as_seconds_f64()))
}

/// A value in a cell.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn text(object: &Value, pointer: &str) -> String {
    object.pointer(pointer).map(shown).unwrap_or_default()
}

fn number(object: &Value, pointer: &str) -> i64 {
    let value = object.pointer(pointer).and_then(Value::as_i64);
    value.unwrap_or(0)
}

fn list<'v>(object: &'v Value, pointer: &str) -> impl Iterator<Item = &'v Value> {
    let list = object.pointer(pointer).and_then(Value::as_array);
    list.into_iter().flatten()
}

fn ratio(object: &Value, part: &str, whole: &str) -> String {
    format!("{}/{}", number(object, part), number(object, whole))
}

fn phase(object: &Value) -> String {
    text(object, "/status/phase")
}

fn ready_containers(pod: &Value) -> String {
    let is_ready = |status: &&Value| status["ready"] == true;
    let ready = list(pod, "/status/containerStatuses").filter(is_ready);
    let all = list(pod, "/spec/containers");
    format!("{}/{}", ready.count(), all.count())
}

fn images(workload: &Value) -> String {
    containers_images(workload, "/spec/template/spec/containers")
}

fn containers_images(object: &Value, containers: &str) -> String {
    let containers = list(object, containers);
    let images: Vec<String> = containers.map(|c| text(c, "/image")).collect();
    images.join(",")
}

/// Returns the object that an Event is about, as `KIND/NAME`.
fn involved(event: &Value) -> String {
    let kind = either(event, "/involvedObject/kind", "/regarding/kind");
    let name = either(event, "/involvedObject/name", "/regarding/name");
    format!("{}/{name}", kind.to_lowercase())
}

fn either(object: &Value, first: &str, second: &str) -> String {
    let found = object.pointer(first).or_else(|| object.pointer(second));
    found.map(shown).unwrap_or_default()
}

fn ports(service: &Value) -> String {
    let port = |p: &Value| format!("{}/{}", number(p, "/port"), text(p, "/protocol"));
    let ports: Vec<String> = list(service, "/spec/ports").map(port).collect();
    ports.join(",")
}

fn data(object: &Value) -> String {
    let entries = |field| object.pointer(field).and_then(Value::as_object);
    let count = |field| entries(field).map_or(0, |map| map.len());
    (count("/data") + count("/binaryData")).to_string()
}

fn node_status(node: &Value) -> String {
    let ready = list(node, "/status/conditions").find(|c| c["type"] == "Ready");
    match ready.map(|c| &c["status"]) {
        Some(status) if status == "True" => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Object;
    use super::*;
    use serde_json::json;

    #[test]
    fn custom_resources_have_the_columns_of_their_definition() {
        let column = |name: &str, kind: &str, path: &str, priority: i64| json!({"name": name, "type": kind, "jsonPath": path, "priority": priority});
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1beta1", "kind": "CustomResourceDefinition",
            "spec": {
                "group": "example.com", "names": {"kind": "Widget", "plural": "widgets"}, "scope": "Namespaced",
                "versions": [{"name": "old", "storage": false}, {"name": "v1", "storage": true, "additionalPrinterColumns": [
                    column("Size", "integer", ".spec.size", 0),
                    column("Ready", "string", ".status.conditions[?(@.type==\"Ready\")].status", 0),
                    column("Wide", "string", ".spec.wide", 1),
                    column("Since", "date", ".status.since", 0),
                    column("Age", "date", ".metadata.creationTimestamp", 0),
                    column("Broken", "string", ".spec[", 0),
                ]}],
            },
        });
        let definition = Object::decode(&serde_json::to_vec(&definition).unwrap()).unwrap();
        let resource = Resource::of_definition(&definition).unwrap();
        let columns = Column::of(&resource, false);
        let headers: Vec<&str> = columns.iter().map(|c| c.header.as_str()).collect();
        assert_eq!(headers, ["SIZE", "READY", "SINCE", "BROKEN"]);
        let widget = json!({
            "spec": {"size": 3},
            "status": {
                "conditions": [{"type": "Other", "status": "False"}, {"type": "Ready", "status": "True"}],
                "since": "2026-01-02T03:04:05Z",
            },
        });
        let cells: Vec<CellValue> = columns.iter().map(|c| c.value(&widget)).collect();
        let text = |t: &str| CellValue::Text(t.to_owned());
        let since = CellValue::Time("2026-01-02T03:04:05Z".to_owned());
        assert_eq!(cells, [text("3"), text("True"), since, text("")]);
    }

    #[test]
    fn an_attackers_definition_has_no_more_than_32_columns() {
        let column = json!({"name": "X", "type": "string", "jsonPath": "."});
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "spec": {
                "group": "example.com", "names": {"kind": "Widget", "plural": "widgets"},
                "additionalPrinterColumns": vec![column; 20_000],
            },
        });
        let definition = Object::decode(&serde_json::to_vec(&definition).unwrap()).unwrap();
        let resource = Resource::of_definition(&definition).unwrap();
        assert_eq!(Column::of(&resource, false).len(), 32);
    }

    /// Once, such a column of an object of 1.5 MB took 9.8 GB: each value was found again from each one above it.
    #[test]
    fn an_attackers_column_that_descends_again_and_again_gives_an_empty_cell() {
        let column = Column {
            header: "X".to_owned(),
            cell: Cell::Path(JsonPath::parse("..*..*..*..*").ok(), false),
        };
        let mut object = json!(vec![1; 100_000]);
        for _ in 0..100 {
            object = json!({"a": object});
        }
        assert_eq!(column.value(&object), CellValue::Text(String::new()));
    }
}
