//! The JSON schemas in `docs/`, which everything that a command prints is held against.

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::Value;

/// A schema, ready to validate. Formats such as `date-time` are checked, too.
pub struct Schema {
    name: String,
    schemas: Schemas,
    index: SchemaIndex,
}

impl Schema {
    /// The schema of what a command prints.
    pub fn of(command: &str) -> Self {
        Self::named(&format!("{command}-result"))
    }

    /// `docs/NAME.schema.json`, which must itself be a valid schema.
    pub fn named(name: &str) -> Self {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
        let name = format!("{name}.schema.json");
        let text = std::fs::read_to_string(folder.join(&name));
        let text = text.unwrap_or_else(|e| panic!("docs/{name}: {e}"));
        let json = serde_json::from_str(&text).unwrap_or_else(|e| panic!("docs/{name}: {e}"));
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

    /// Panics if the value is not as documented.
    #[track_caller]
    pub fn check(&self, value: &Value) {
        if let Err(error) = self.schemas.validate(value, self.index) {
            panic!("not as docs/{} has it: {error:#}\n{value:#}", self.name);
        }
    }
}
