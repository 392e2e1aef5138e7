//! The JSON schemas of results, made from the types that commands print.

use super::print::Failure;
use super::task::CreatedTask;
use super::{deleted, diff, explore, get, history, log, search};
use crate::error::Reason;
use crate::ops::read::diff::Omitted;
use crate::ops::read::json::{KeyChange, KeyWithRecord, VersionJson};
use crate::ops::report::Report;
use crate::ops::{
    apply, compact, copy, gc, list, maintain, recover, restore, snapshot, status, store_check,
    verify,
};
use crate::telemetry::termination::Message;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// If an enum has more names than this, its names are not described one by one. This is meant for the list of
/// reasons, which docs/exit-codes.md describes.
const MAX_DESCRIBED_NAMES: usize = 20;

/// Returns the schemas of a command's results.
type Results = fn(&mut SchemaGenerator) -> Vec<Schema>;

/// The commands that print JSON, by the names of their schemas.
const COMMANDS: [(&str, Results); 23] = [
    ("apply", |g| vec![report::<apply::AppliedState>(g)]),
    ("compact", |g| vec![report::<compact::Compacted>(g)]),
    ("copy", |g| vec![report::<copy::CopiedBackup>(g)]),
    ("deleted", |g| {
        list::<deleted::Head, deleted::DeletedJson>(g, "deleted")
    }),
    ("diff", |g| {
        let mut results = list::<diff::Head, KeyChange>(g, "changes");
        let omitted = Omitted::json_schema(g).to_value();
        add(&mut results[0], "omitted", omitted);
        results
    }),
    ("explore", |g| vec![g.subschema_for::<explore::Page>()]),
    ("export", |g| vec![g.subschema_for::<KeyWithRecord>()]),
    ("follow", |g| vec![report::<snapshot::follow::Followed>(g)]),
    ("gc", |g| vec![report::<gc::CleanedBackup>(g)]),
    ("get", |g| list::<get::Head, KeyWithRecord>(g, "keys")),
    ("history", |g| {
        list::<history::Head, VersionJson>(g, "versions")
    }),
    ("list", |g| {
        vec![
            report::<list::ListedBackup>(g),
            report::<list::files::ListedFiles>(g),
        ]
    }),
    ("log", |g| {
        vec![
            g.subschema_for::<log::ChangeJson>(),
            g.subschema_for::<log::TransactionJson>(),
            g.subschema_for::<log::MarkJson>(),
        ]
    }),
    ("maintain", |g| vec![report::<maintain::Maintained>(g)]),
    ("pin", |g| vec![report::<gc::pin::PinnedChain>(g)]),
    ("recover", |g| vec![report::<recover::RecoveredState>(g)]),
    ("restore", |g| vec![report::<restore::Restored>(g)]),
    ("search", |g| {
        list::<search::Head, search::FoundJson>(g, "found")
    }),
    ("snapshot", |g| vec![report::<snapshot::TakenSnapshots>(g)]),
    ("status", |g| vec![report::<status::BackupState>(g)]),
    ("store-check", |g| {
        vec![report::<store_check::CheckedStore>(g)]
    }),
    ("task", |g| vec![report::<CreatedTask>(g)]),
    ("verify", |g| {
        vec![
            report::<verify::store::VerifiedBackup>(g),
            report::<verify::cluster::ComparedCluster>(g),
            report::<verify::file::VerifiedFile>(g),
        ]
    }),
];
/// The name of the schema of the termination message.
const MESSAGE: &str = "termination-message";

/// docs/reference/schemas.json has the schemas of the types that commands print, one a line. With DELTAFOLD_TEST_WRITE, it
/// is written.
#[test]
fn the_documented_schemas_are_those_of_the_types() {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let mut generator = settings.into_generator();
    let mut all = Map::new();
    for (name, results) in COMMANDS {
        all.insert(name.to_owned(), of(name, results, &mut generator));
    }
    all.insert(MESSAGE.to_owned(), message(&mut generator));
    all.extend(generator.take_definitions(true));
    let mut lines: Vec<String> = Vec::new();
    for (name, mut schema) in all {
        tidy(&mut schema);
        lines.push(format!("{}:{schema}", json!(name)));
    }
    lines.sort();
    let made = format!(
        "{{\"$schema\":\"https://json-schema.org/draft/2020-12/schema\",\"$id\":\"schemas.json\",\"$defs\":{{\n{}\n}}}}\n",
        lines.join(",\n")
    );
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/schemas.json");
    if std::env::var_os("DELTAFOLD_TEST_WRITE").is_some() {
        fs::write(&file, &made).unwrap();
    }
    let documented = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        documented == made,
        "write {} with tests/generate",
        file.display()
    );
}

/// The schema of a command's output: one of `results`, or a failure.
fn of(name: &str, results: Results, generator: &mut SchemaGenerator) -> Value {
    let mut results = results(generator);
    results.push(generator.subschema_for::<Failure>());
    let format = match name {
        "export" | "log" => "each line is a JSON object",
        "history" => "one JSON object for each object that is named",
        _ => "one JSON object",
    };
    let command = match name {
        "follow" => "snapshot follow",
        "snapshot" => "snapshot full|delta|save",
        "store-check" => "store check",
        "task" => "task create",
        other => other,
    };
    let title = format!("`deltafold {command} --output json`: {format}");
    json!({ "title": title, "oneOf": results })
}

/// The schema of the termination message.
fn message(generator: &mut SchemaGenerator) -> Value {
    let mut schema = Message::json_schema(generator).to_value();
    let title =
        "The file that `--termination-log FILE` writes: one JSON object of less than 4096 bytes";
    schema["title"] = title.into();
    schema
}

/// Returns one schema for each exit code: that code, with any of its reasons.
pub(super) fn codes() -> Value {
    let mut reasons: BTreeMap<u8, Vec<&str>> = BTreeMap::new();
    for reason in Reason::ALL {
        let of_code = reasons.entry(reason.exit_code()).or_default();
        of_code.push(reason.as_str());
    }
    let pairs = reasons.iter().map(|(code, reasons)| {
        json!({"properties": {"code": {"const": code}, "reason": {"enum": reasons}}})
    });
    pairs.collect()
}

fn report<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Report<T>>()
}

/// The schemas of what [`Stream`](super::stream::Stream) prints: a head, a list, and a status or a failure.
fn list<H: JsonSchema, I: JsonSchema>(generator: &mut SchemaGenerator, name: &str) -> Vec<Schema> {
    let list = json!({
        "description": format!("The {name}, in order."),
        "type": "array",
        "items": generator.subschema_for::<I>(),
    });
    let mut succeeded = H::json_schema(generator);
    add(&mut succeeded, name, list);
    let mut failed = succeeded.clone();
    let status = "The last field. `Succeeded`: the list is complete.";
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

/// Adds a required field.
fn add(object: &mut Schema, name: &str, schema: Value) {
    object.ensure_object()["properties"][name] = schema;
    if let Some(required) = object.ensure_object()["required"].as_array_mut() {
        required.push(name.into());
    }
}

/// Tidies a schema and all schemas in it.
fn tidy(schema: &mut Value) {
    if let Some(object) = schema.as_object_mut() {
        tidy_object(object);
        object.values_mut().for_each(tidy);
    } else if let Some(list) = schema.as_array_mut() {
        list.iter_mut().for_each(tidy);
    }
}

/// Forbids unknown properties, turns a `oneOf` of named constants into an `enum`, joins the lines of
/// descriptions, adds the maximum of a u32, and removes every format except `date-time`.
fn tidy_object(object: &mut Map<String, Value>) {
    if let Some(names) = object.get("oneOf").and_then(enum_names) {
        object.remove("oneOf");
        if names.len() <= MAX_DESCRIBED_NAMES {
            let description = object.get("description").and_then(Value::as_str);
            let description = describe(description.unwrap_or_default(), &names);
            object.insert("description".to_owned(), description.into());
        }
        let names: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
        object.insert("enum".to_owned(), json!(names));
    }
    if let Some(Value::String(description)) = object.get_mut("description") {
        *description = description.replace('\n', " ");
    }
    if object.get("type").is_some_and(|t| t == "object") && object.contains_key("properties") {
        object.entry("additionalProperties").or_insert(false.into());
    }
    if object.get("format").is_some_and(|f| f == "uint32") {
        object.insert("maximum".to_owned(), u32::MAX.into());
    }
    // Inside `properties`, "format" can be the name of a described field. Its value is then a schema (an
    // object), which must stay.
    let is_kept = |format: &Value| format == "date-time" || format.is_object();
    if object.get("format").is_some_and(|f| !is_kept(f)) {
        object.remove("format");
    }
}

/// The description of an enum with those of its names, each as a sentence.
fn describe(description: &str, names: &[(String, String)]) -> String {
    let mut text = description.trim_end_matches('.').to_owned() + ".";
    for (name, meaning) in names {
        text += &format!(" `{name}`: {}.", meaning.trim_end_matches('.'));
    }
    text
}

/// The names of an enum with their descriptions; `None` if one of the schemas is not a string constant with a
/// description.
fn enum_names(one_of: &Value) -> Option<Vec<(String, String)>> {
    one_of.as_array()?.iter().map(enum_name).collect()
}

fn enum_name(schema: &Value) -> Option<(String, String)> {
    let name = schema.get("const")?.as_str()?.to_owned();
    Some((name, schema.get("description")?.as_str()?.to_owned()))
}
