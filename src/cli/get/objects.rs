//! `deltafold get -o`: objects as an API server serves them.

use super::super::format::Format;
use super::super::stream::Stream;
use super::super::text;
use super::Printer;
use crate::base::printable;
use crate::error::{Error, Reason, Result};
use crate::mvcc::KeyValue;
use crate::objects::{Detail, NotDecoded, Object, yaml};
use crate::ops::read::Keys;
use crate::prefix::Context;
use serde::Serialize as _;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

impl Printer<'_> {
    /// Prints the objects of the keys as a List, or what is asked for of each. Values that cannot be decoded are logged.
    /// Removes the keys that exist from `missing`. Returns whether an object was printed.
    pub(super) fn print_objects(
        &self,
        ctx: &Context,
        keys: &mut Keys,
        missing: &mut BTreeSet<Vec<u8>>,
        out: &mut Stream,
    ) -> Result<bool> {
        let mut is_first = true;
        let mut not_decoded = None;
        while keys.advance()? {
            ctx.store.cancel().check()?;
            let kv = keys.current()?;
            missing.remove(kv.key);
            let object = match self.object(&kv) {
                Ok(object) => object,
                Err(NotDecoded::Encrypted { .. }) if self.args.labels.selector.is_some() => {
                    self.args.labels.add_sealed();
                    continue;
                }
                Err(e) => {
                    let e = failure(&kv, &e);
                    tracing::warn!("not in the list: {e}");
                    not_decoded.get_or_insert(e);
                    continue;
                }
            };
            if !self.args.labels.match_object(&object) {
                continue;
            }
            let item = match self.format {
                Format::Yaml if is_first => {
                    format!("apiVersion: v1\nitems:\n{}", yaml::from_item(&object))
                }
                Format::Yaml => yaml::from_item(&object),
                Format::Name => name(&object) + "\n",
                _ if is_first => format!(
                    "{{\n    \"apiVersion\": \"v1\",\n    \"items\": [\n{}",
                    pretty(&object, LIST_INDENT)?
                ),
                _ => format!(",\n{}", pretty(&object, LIST_INDENT)?),
            };
            out.write(item.as_bytes())?;
            is_first = false;
        }
        let end = match self.format {
            Format::Yaml if is_first => "apiVersion: v1\nitems: []\nkind: List\n",
            Format::Yaml => "kind: List\n",
            Format::Name => "",
            _ if is_first => {
                "{\n    \"apiVersion\": \"v1\",\n    \"items\": [],\n    \"kind\": \"List\"\n}\n"
            }
            _ => "\n    ],\n    \"kind\": \"List\"\n}\n",
        };
        out.write(end.as_bytes())?;
        self.lacking(not_decoded).map(|()| !is_first)
    }

    /// Fails if a list lacks an object of a kind or a name that was asked for.
    fn lacking(&self, not_decoded: Option<Error>) -> Result<()> {
        match not_decoded {
            Some(e) if !self.args.select.words.is_empty() => {
                Err(e.reason().error(format!("the list is not complete: {e}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the object of a key, as it is printed with `-o`.
    pub(super) fn object(&self, kv: &KeyValue<'_>) -> Result<Map<String, Value>, NotDecoded> {
        let detail = Detail::with_managers(self.args.show_managed_fields);
        let mut object = Object::of_record_with(kv, &self.keys, detail)?;
        if object.unknown_fields > 0 {
            tracing::warn!("{}: {}", text::key(kv.key), text::unknown_fields(&object));
        }
        if self.args.clean {
            object = object.cleaned()?;
        }
        Ok(object.json)
    }
}

/// Returns `KIND/NAME` of an object, with its group, as `kubectl get -o name`.
pub(super) fn name(object: &Map<String, Value>) -> String {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    let kind = text(object.get("kind")).to_lowercase();
    let group = match text(object.get("apiVersion")).split_once('/') {
        Some((group, _)) => format!(".{group}"),
        None => String::new(),
    };
    let name = text(object.get("metadata").and_then(|m| m.get("name")));
    printable::line(&format!("{kind}{group}/{name}")).into_owned()
}

/// The indentation of the objects in a List.
const LIST_INDENT: &str = "        ";

pub(super) fn failure(kv: &KeyValue<'_>, e: &NotDecoded) -> Error {
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
