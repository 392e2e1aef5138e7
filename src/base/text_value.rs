//! Values that keep the text they were parsed from.
//!
//! Flags of `cli` and fields of the resources of `controller` share these types.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt::Display;
use std::str::FromStr;

/// A value with a text notation, such as a duration.
pub trait Notation: FromStr<Err: Display> + Copy {
    /// The regular expression of the notation in a resource, for its schema.
    const PATTERN: &'static str;
}

/// A text and the value parsed from it.
///
/// A flag with an invalid text is refused. A resource with an invalid text can still be read: the text is
/// kept without a value, and reported as a problem of the resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextValue<T> {
    text: String,
    value: Option<T>,
}

impl<T: Notation> TextValue<T> {
    /// Keeps a text of a resource, valid or not. It is not `From<&str>`, because clap would then accept every
    /// flag.
    pub fn of(text: impl Into<String>) -> Self {
        let text = text.into();
        let value = text.parse().ok();
        TextValue { text, value }
    }

    /// Returns the text as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the value, or `None` if the text is invalid.
    pub fn value(&self) -> Option<T> {
        self.value
    }

    /// Returns the value.
    ///
    /// # Errors
    /// A message with the text and what is wrong with it.
    pub fn check(&self) -> Result<T, String> {
        let parsed = self.text.parse::<T>();
        parsed.map_err(|e| format!("\"{}\": {e}", self.text))
    }
}

impl<T: Notation + Display> From<T> for TextValue<T> {
    fn from(value: T) -> Self {
        TextValue {
            text: value.to_string(),
            value: Some(value),
        }
    }
}

impl<T: Notation> FromStr for TextValue<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value: T = text.parse().map_err(|e: T::Err| e.to_string())?;
        Ok(TextValue {
            text: text.to_owned(),
            value: Some(value),
        })
    }
}

impl<T> Serialize for TextValue<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de, T: Notation> Deserialize<'de> for TextValue<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(TextValue::of)
    }
}

impl<T: Notation> JsonSchema for TextValue<T> {
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

#[cfg(test)]
mod tests {
    use super::super::Span;
    use super::*;

    #[test]
    fn an_invalid_text_is_refused_as_a_flag_and_kept_in_a_resource() {
        let parser = clap::value_parser!(TextValue<Span>);
        let command = clap::Command::new("x").arg(clap::Arg::new("d").value_parser(parser));
        assert!(command.clone().try_get_matches_from(["x", "soon"]).is_err());
        assert!(command.try_get_matches_from(["x", "2w"]).is_ok());
        let read: TextValue<Span> = serde_json::from_str("\"soon\"").unwrap();
        assert!(read.value().is_none() && read.check().unwrap_err().contains("soon"));
        assert_eq!(serde_json::to_string(&read).unwrap(), "\"soon\"");
    }
}
