//! Validates what commands print against the JSON schemas in `docs/`.

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::Value;

/// A compiled schema. Formats such as `date-time` are checked, too.
pub struct Schema {
    name: String,
    schemas: Schemas,
    index: SchemaIndex,
}

impl Schema {
    /// Returns the schema of a command's output.
    pub fn of(command: &str) -> Self {
        Self::named(&format!("{command}-result"))
    }

    /// Returns `docs/NAME.schema.json`, which must itself be a valid schema.
    pub fn named(name: &str) -> Self {
        Self::compiled(name, Self::json(name))
    }

    /// Reads `docs/NAME.schema.json`.
    pub fn json(name: &str) -> Value {
        let name = format!("docs/{name}.schema.json");
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(&name);
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{name}: {e}"));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    fn compiled(name: &str, json: Value) -> Self {
        let name = format!("{name}.schema.json");
        let location = format!("https://deltafold.invalid/{name}");
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.enable_format_assertions();
        let added = compiler.add_resource(&location, json);
        added.unwrap_or_else(|e| panic!("docs/{name}: {e}"));
        let index = compiler.compile(&location, &mut schemas);
        let index = index.unwrap_or_else(|e| panic!("docs/{name}: {e:#}"));
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
            panic!("not as docs/{} has it: {error:#}\n{value:#}", self.name);
        }
    }
}
