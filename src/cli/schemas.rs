//! The JSON schemas of `docs/`, made from the types that are printed.
//!
//! A test compares them with the files.

use super::task::{TaskOutcome, TasksOutcome};
use super::{Failure, diff, get, history, policy};
use crate::controller::cleanup;
use crate::error::Reason;
use crate::ops::read::json::{KeyChange, KeyWithRecord, VersionJson};
use crate::ops::report::Report;
use crate::ops::{
    apply, compact, copy, gc, list, maintain, object_lock, restore, snapshot, store_check, verify,
};
use crate::telemetry::termination::Message;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Of more names the description does not tell each: those of failures stand in exit-codes.md.
const MOST_TOLD: usize = 20;

/// The schemas, by their names: `docs/NAME.schema.json`.
pub fn schemas() -> Vec<(String, Value)> {
    vec![
        of("apply", |g| vec![report::<apply::Outcome>(g)]),
        of("cleanup", |g| vec![g.subschema_for::<cleanup::Outcome>()]),
        of("compact", |g| vec![report::<compact::Outcome>(g)]),
        of("copy", |g| vec![report::<copy::Outcome>(g)]),
        of("diff", |g| list::<diff::Head, KeyChange>(g, "changes")),
        of("export", |g| vec![g.subschema_for::<KeyWithRecord>()]),
        of("follow", |g| vec![report::<snapshot::follow::Outcome>(g)]),
        of("gc", |g| vec![report::<gc::Outcome>(g)]),
        of("get", |g| list::<get::Head, KeyWithRecord>(g, "keys")),
        of("history", |g| {
            list::<history::Head, VersionJson>(g, "versions")
        }),
        of("list", |g| vec![report::<list::Outcome>(g)]),
        of("lock", |g| vec![report::<object_lock::Outcome>(g)]),
        of("maintain", |g| vec![report::<maintain::Outcome>(g)]),
        of("pin", |g| vec![report::<gc::pin::Outcome>(g)]),
        of("policy", |g| {
            vec![g.subschema_for::<policy::PoliciesOutcome>()]
        }),
        of("restore", |g| vec![report::<restore::Outcome>(g)]),
        of("snapshot", |g| vec![report::<snapshot::Outcome>(g)]),
        of("store-check", |g| vec![report::<store_check::Outcome>(g)]),
        of("task", |g| {
            vec![
                g.subschema_for::<TaskOutcome>(),
                g.subschema_for::<TasksOutcome>(),
            ]
        }),
        message(),
        of("undelete", |g| vec![report::<gc::undelete::Outcome>(g)]),
        of("verify", |g| {
            vec![
                report::<verify::store::Outcome>(g),
                report::<verify::cluster::Outcome>(g),
            ]
        }),
    ]
}

/// The schema of what a command prints: one of these, or a failure.
fn of(command: &str, results: impl FnOnce(&mut SchemaGenerator) -> Vec<Schema>) -> (String, Value) {
    let name = format!("{command}-result");
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let mut generator = settings.into_generator();
    let mut results = results(&mut generator);
    results.push(generator.subschema_for::<Failure>());
    let said = match command {
        "export" => "Each line is a JSON object",
        _ => "One JSON object on standard output",
    };
    let shown = match command {
        "follow" => "snapshot follow",
        "snapshot" => "snapshot full|delta",
        "store-check" => "store check",
        other => other,
    };
    let title = format!("What `deltafold {shown} --output json` prints");
    let schema = json!({ "oneOf": results, "$defs": generator.take_definitions(true) });
    document(&name, &title, said, schema)
}

fn message() -> (String, Value) {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let schema = settings.into_generator().into_root_schema_for::<Message>();
    let title = "What `--termination-log FILE` leaves in the file";
    let said = "One JSON object of less than 4096 bytes";
    document("termination-message", title, said, schema.to_value())
}

fn document(name: &str, title: &str, said: &str, mut schema: Value) -> (String, Value) {
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["$id"] = format!("{name}.schema.json").into();
    schema["title"] = title.into();
    let said = format!(
        "{said}, as this version of deltafold prints it. A later version may add fields; these keep their names and meanings."
    );
    schema["description"] = said.into();
    tidy(&mut schema);
    (name.to_owned(), schema)
}

fn report<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Report<T>>()
}

/// What [`Stream`](super::stream::Stream) prints: a head, a list and a status. It may fail on the way.
fn list<H: JsonSchema, I: JsonSchema>(generator: &mut SchemaGenerator, name: &str) -> Vec<Schema> {
    let list = json!({
        "description": format!("The {name}, in order."),
        "type": "array",
        "items": generator.subschema_for::<I>(),
    });
    let mut succeeded = H::json_schema(generator);
    add(&mut succeeded, name, list);
    let mut failed = succeeded.clone();
    let status = "The last field: `Succeeded`, so all is there.";
    let status = json!({"description": status, "type": "string", "enum": ["Succeeded"]});
    add(&mut succeeded, "status", status);
    let failure = Failure::json_schema(generator);
    for (field, schema) in failure
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        add(&mut failed, field, schema.clone());
    }
    failed.insert("oneOf".to_owned(), codes());
    vec![succeeded, failed]
}

/// Adds a field that is always there.
fn add(object: &mut Schema, name: &str, schema: Value) {
    object.ensure_object()["properties"][name] = schema;
    if let Some(required) = object.ensure_object()["required"].as_array_mut() {
        required.push(name.into());
    }
}

/// Which reasons go with which exit code.
pub(super) fn codes() -> Value {
    let mut reasons: BTreeMap<u8, Vec<&str>> = BTreeMap::new();
    for reason in Reason::ALL {
        let of_code = reasons.entry(reason.exit_code()).or_default();
        of_code.push(reason.as_str());
    }
    let of_code = reasons.iter().map(|(code, reasons)| {
        json!({"properties": {"code": {"const": code}, "reason": {"enum": reasons}}})
    });
    of_code.collect()
}

/// Closes objects, tells a choice of names as a list, and drops what tells no reader anything.
fn tidy(schema: &mut Value) {
    if let Some(object) = schema.as_object_mut() {
        if let Some(names) = object.get("oneOf").and_then(choice) {
            object.remove("oneOf");
            if names.len() <= MOST_TOLD {
                let said = object.get("description").and_then(Value::as_str);
                let said = said.unwrap_or_default().trim_end_matches('.');
                let each = names.iter().map(|(name, said)| format!("`{name}`: {said}"));
                let said = format!("{said}. {}", each.collect::<Vec<_>>().join(" "));
                object.insert("description".to_owned(), said.into());
            }
            let names: Vec<&str> = names.iter().map(|n| n.0.as_str()).collect();
            object.insert("enum".to_owned(), json!(names));
        }
        if let Some(said) = object.get_mut("description").filter(|s| s.is_string()) {
            *said = said.as_str().unwrap_or_default().replace('\n', " ").into();
        }
        if object.get("type").is_some_and(|t| t == "object") && object.contains_key("properties") {
            object.entry("additionalProperties").or_insert(false.into());
        }
        if object.get("format").is_some_and(|f| f == "uint32") {
            object.insert("maximum".to_owned(), u32::MAX.into());
        }
        let is_checked = |format: &Value| format == "date-time" || format.is_object();
        if object.get("format").is_some_and(|f| !is_checked(f)) {
            object.remove("format");
        }
        object.values_mut().for_each(tidy);
    } else if let Some(list) = schema.as_array_mut() {
        list.iter_mut().for_each(tidy);
    }
}

/// The names of an enum with their descriptions; `None` if it is something else.
fn choice(one_of: &Value) -> Option<Vec<(String, String)>> {
    let named = |v: &Value| {
        let name = v.get("const")?.as_str()?.to_owned();
        Some((name, v.get("description")?.as_str()?.to_owned()))
    };
    one_of.as_array()?.iter().map(named).collect()
}
