//! Validates what commands print against the schemas in docs/reference/schemas.json.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{LazyLock, Mutex};

use super::manifests::read;
use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::Value;

/// Returns docs/reference/schemas.json, which a unit test of the library writes and compares.
pub fn all() -> &'static Value {
    static ALL: LazyLock<Value> =
        LazyLock::new(|| serde_json::from_str(&read("docs/reference/schemas.json")).expect("JSON"));
    &ALL
}

/// Returns the names of the commands' schemas, and that of the termination message.
pub fn names() -> Vec<String> {
    let names = all()["$defs"].as_object().expect("schemas").keys();
    names
        .filter(|name| name.starts_with(char::is_lowercase))
        .cloned()
        .collect()
}

/// A compiled schema. Formats such as `date-time` are checked, too.
pub struct Schema {
    name: String,
    schemas: Schemas,
    index: SchemaIndex,
}

impl Schema {
    /// Returns the schema of this name.
    pub fn of(name: &str) -> Self {
        let location = "https://deltafold.invalid/schemas.json";
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.enable_format_assertions();
        let added = compiler.add_resource(location, all().clone());
        added.unwrap_or_else(|e| panic!("{name}: {e}"));
        let index = compiler.compile(&format!("{location}#/$defs/{name}"), &mut schemas);
        let index = index.unwrap_or_else(|e| panic!("{name}: {e:#}"));
        Self {
            name: name.to_owned(),
            schemas,
            index,
        }
    }

    pub fn is_valid(&self, value: &Value) -> bool {
        self.schemas.validate(value, self.index).is_ok()
    }

    /// Panics if the value does not match the schema.
    #[track_caller]
    pub fn check(&self, value: &Value) {
        if let Err(error) = self.schemas.validate(value, self.index) {
            panic!("not as {} has it: {error:#}\n{value:#}", self.name);
        }
    }
}

/// Returns the name of the schema for what a run of the program prints.
fn name_for(command: &Command) -> Option<String> {
    let program = std::path::Path::new(command.get_program());
    let args: Vec<&str> = command.get_args().filter_map(|a| a.to_str()).collect();
    if program.file_name()? != "deltafold" {
        return None;
    }
    match args.first()? {
        &"snapshot" if args.get(1) == Some(&"follow") => Some("follow".to_owned()),
        &"store" => Some("store-check".to_owned()),
        name => names().into_iter().find(|n| n == name),
    }
}

/// Panics if a result of the program does not match its schema.
#[track_caller]
pub fn check_result(command: &Command, result: &Value) {
    static COMPILED: Mutex<BTreeMap<String, Schema>> = Mutex::new(BTreeMap::new());
    let Some(name) = name_for(command).filter(|_| !result.is_null()) else {
        return;
    };
    let error = {
        let mut compiled = COMPILED.lock().expect("nobody panicked");
        let schema = compiled.entry(name.clone());
        let schema = schema.or_insert_with(|| Schema::of(&name));
        let valid = schema.schemas.validate(result, schema.index);
        valid.err().map(|error| format!("{error:#}"))
    };
    if let Some(error) = error {
        panic!("{command:?} printed what its schema does not have: {error}\n{result:#}");
    }
}
