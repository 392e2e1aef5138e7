//! Values of resources and flags, as they were written.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt::Display;
use std::str::FromStr;

/// A value that people write as a text.
pub trait Notation: FromStr<Err: Display> + Copy {
    /// What the texts look like in a resource.
    const PATTERN: &'static str;
}

/// A value and its text. If the text of a resource is no value, that is a problem of the resource, which can be
/// read all the same; a flag with such a text is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written<T> {
    text: String,
    value: Option<T>,
}

impl<T: Notation> Written<T> {
    fn new(text: String) -> Self {
        let value = text.parse().ok();
        Written { text, value }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The value, if it is one.
    pub fn value(&self) -> Option<T> {
        self.value
    }

    /// The value.
    ///
    /// # Errors
    /// Why it is none.
    pub fn check(&self) -> Result<T, String> {
        let parsed = self.text.parse::<T>();
        parsed.map_err(|e| format!("\"{}\": {e}", self.text))
    }
}

impl<T: Notation> From<&str> for Written<T> {
    fn from(text: &str) -> Self {
        Written::new(text.to_owned())
    }
}

impl<T: Notation + Display> From<T> for Written<T> {
    fn from(value: T) -> Self {
        Written {
            text: value.to_string(),
            value: Some(value),
        }
    }
}

impl<T: Notation> FromStr for Written<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value: T = text.parse().map_err(|e: T::Err| e.to_string())?;
        Ok(Written {
            text: text.to_owned(),
            value: Some(value),
        })
    }
}

impl<T> Serialize for Written<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de, T: Notation> Deserialize<'de> for Written<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Written::new)
    }
}

impl<T: Notation> JsonSchema for Written<T> {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        T::PATTERN.into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": T::PATTERN})
    }
}
