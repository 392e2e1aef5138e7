//! `deltafold get -o`: objects as an API server serves them.

use super::super::stream::Stream;
use super::super::text;
use super::{ObjectFormat, Printer};
use crate::base::printable;
use crate::error::{Error, Reason, Result};
use crate::mvcc::KeyValue;
use crate::objects::{NotDecoded, Object, yaml};
use crate::ops::read::Keys;
use crate::prefix::Context;
use serde::Serialize as _;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Map, Value};

impl Printer<'_> {
    /// Prints the objects of the keys as a List. Values that cannot be decoded are logged.
    pub(super) fn print_objects(
        &self,
        ctx: &Context,
        keys: &mut Keys,
        format: ObjectFormat,
        out: &mut Stream,
    ) -> Result<()> {
        let mut is_first = true;
        while keys.advance()? {
            ctx.store.cancel().check()?;
            let kv = keys.current()?;
            let object = match self.object(&kv) {
                Ok(object) => object,
                Err(e) => {
                    tracing::warn!("not in the list: {}", not_decoded(&kv, &e));
                    continue;
                }
            };
            if !self.is_selected(&object) {
                continue;
            }
            let item = match (format, is_first) {
                (ObjectFormat::Yaml, true) => {
                    format!("apiVersion: v1\nitems:\n{}", yaml::from_item(&object))
                }
                (ObjectFormat::Yaml, false) => yaml::from_item(&object),
                (ObjectFormat::Json, true) => format!(
                    "{{\n    \"apiVersion\": \"v1\",\n    \"items\": [\n{}",
                    pretty(&object, LIST_INDENT)?
                ),
                (ObjectFormat::Json, false) => format!(",\n{}", pretty(&object, LIST_INDENT)?),
            };
            out.write(item.as_bytes())?;
            is_first = false;
        }
        let end = match (format, is_first) {
            (ObjectFormat::Yaml, true) => "apiVersion: v1\nitems: []\nkind: List\n",
            (ObjectFormat::Yaml, false) => "kind: List\n",
            (ObjectFormat::Json, true) => {
                "{\n    \"apiVersion\": \"v1\",\n    \"items\": [],\n    \"kind\": \"List\"\n}\n"
            }
            (ObjectFormat::Json, false) => "\n    ],\n    \"kind\": \"List\"\n}\n",
        };
        out.write(end.as_bytes())
    }

    /// Returns the object of a key, as it is printed with `-o`.
    pub(super) fn object(&self, kv: &KeyValue<'_>) -> Result<Map<String, Value>, NotDecoded> {
        let mut object = Object::of_record(kv, &self.keys)?;
        if object.unknown_fields > 0 {
            tracing::warn!("{}: {}", text::key(kv.key), text::unknown_fields(&object));
        }
        if self.args.clean {
            object.clean();
        }
        Ok(object.json)
    }
}

/// The indentation of the objects in a List.
const LIST_INDENT: &str = "        ";

pub(super) fn not_decoded(kv: &KeyValue<'_>, e: &NotDecoded) -> Error {
    let reason = match e {
        NotDecoded::Encrypted { .. } => Reason::CannotDecrypt,
        _ => Reason::NotDecoded,
    };
    reason.error(format!("{}: {e}", text::key(kv.key)))
}

/// Returns an object as JSON on several lines, indented as kubectl does and by `indent`.
pub(super) fn pretty(object: &Map<String, Value>, indent: &str) -> Result<String> {
    let mut json = Vec::new();
    let formatter = PrettyFormatter::with_indent(b"    ");
    let mut serializer = Serializer::with_formatter(&mut json, formatter);
    let failed = |e| Error::internal(format!("an object cannot be written as JSON: {e}"));
    object.serialize(&mut serializer).map_err(failed)?;
    let json = String::from_utf8_lossy(&json);
    let json = json.replace('\n', &format!("\n{indent}"));
    Ok(format!("{indent}{}", printable::json(&json)))
}
