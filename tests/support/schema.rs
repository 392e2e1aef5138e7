//! Validates what commands print against the schemas that `deltafold schema` prints.

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::Value;

/// A compiled schema. Formats such as `date-time` are checked, too.
pub struct Schema {
    name: String,
    schemas: Schemas,
    index: SchemaIndex,
}

impl Schema {
    /// Returns the schema that `deltafold schema NAME` prints, which must itself be a valid schema.
    pub fn of(name: &str) -> Self {
        Self::compiled(name, Self::json(name))
    }

    pub fn json(name: &str) -> Value {
        let mut schemas = deltafold::cli::schemas().into_iter();
        let schema = schemas.find(|(of, _)| *of == name);
        schema.unwrap_or_else(|| panic!("no schema {name}")).1
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
