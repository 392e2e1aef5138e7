//! Validates what commands print against the schemas in docs/reference/schemas/.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Mutex;

use super::manifests::{path, read};
use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::Value;

/// The folder of the schemas. A unit test of the library writes and compares them.
const FOLDER: &str = "docs/reference/schemas";

/// Returns the names of all schemas.
pub fn names() -> Vec<String> {
    let files = std::fs::read_dir(path(FOLDER)).expect("the folder of the schemas");
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names
        .map(|name| name.strip_suffix(".json").unwrap().to_owned())
        .collect()
}

/// A compiled schema. Formats such as `date-time` are checked, too.
pub struct Schema {
    name: String,
    schemas: Schemas,
    index: SchemaIndex,
}

impl Schema {
    /// Returns the schema of this name, which must itself be a valid schema.
    pub fn of(name: &str) -> Self {
        Self::compiled(name, Self::json(name))
    }

    pub fn json(name: &str) -> Value {
        let text = read(&format!("{FOLDER}/{name}.json"));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    fn compiled(name: &str, json: Value) -> Self {
        let name = format!("{name}.schema.json");
        let location = format!("https://deltafold.invalid/{name}");
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.enable_format_assertions();
        let added = compiler.add_resource(&location, json);
        added.unwrap_or_else(|e| panic!("{name}: {e}"));
        let index = compiler.compile(&location, &mut schemas);
        let index = index.unwrap_or_else(|e| panic!("{name}: {e:#}"));
        Self {
            name,
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
