//! Decodes the protobuf of Kubernetes' own kinds, by the table of their types.
//!
//! The result is what Go's `encoding/json` makes of the decoded struct, since API servers serve that.

use super::table::{Field, Shape, Table, Type};
use super::{Detail, MAX_DEPTH, MAX_NODES, NotDecoded, Object};
use crate::base::protobuf::{Value as Wire, take_field, take_varint};
use base64_simd::STANDARD;
use chrono::{DateTime, SecondsFormat};
use serde_json::{Map, Value};

/// The message without fields.
const EMPTY: Wire<'_> = Wire::Bytes(b"");

/// Decodes a `runtime.Unknown`: the API version and the kind (field 1) and the object (field 2).
///
/// # Errors
/// Fails with the reason why it cannot be decoded.
pub(super) fn decode(envelope: &[u8], detail: Detail) -> Result<Object, NotDecoded> {
    let (mut type_meta, mut raw) = (&b""[..], &b""[..]);
    for_each_field(envelope, |number, value| {
        match (number, value) {
            (1, Wire::Bytes(bytes)) => type_meta = bytes,
            (2, Wire::Bytes(bytes)) => raw = bytes,
            _ => {}
        }
        Ok(())
    })?;
    let (mut api_version, mut kind) = (String::new(), String::new());
    for_each_field(type_meta, |number, value| {
        match number {
            1 => api_version = text(value)?,
            2 => kind = text(value)?,
            _ => {}
        }
        Ok(())
    })?;
    let table = Table::get()?;
    let Some(message) = table.kind(&api_version, &kind) else {
        return Err(NotDecoded::UnknownKind { api_version, kind });
    };
    let mut decoder = Decoder {
        table,
        detail,
        nodes_left: MAX_NODES,
        unknown_fields: 0,
    };
    let mut json = decoder.message(raw, message, 0)?;
    add_type(&mut json, &api_version, &kind);
    Ok(Object {
        json,
        unknown_fields: decoder.unknown_fields,
    })
}

fn add_type(json: &mut Map<String, Value>, api_version: &str, kind: &str) {
    json.insert("apiVersion".to_owned(), api_version.into());
    json.insert("kind".to_owned(), kind.into());
}

struct Decoder<'t> {
    table: &'t Table,
    detail: Detail,
    /// Fields and elements that the object may still have.
    nodes_left: usize,
    unknown_fields: usize,
}

impl Decoder<'_> {
    /// Decodes a message. Fields that are not encoded have the values that Go gives them.
    fn message(
        &mut self,
        bytes: &[u8],
        message: usize,
        depth: usize,
    ) -> Result<Map<String, Value>, NotDecoded> {
        if depth > MAX_DEPTH {
            return Err(NotDecoded::TooLarge);
        }
        let fields = self.table.fields(message);
        let skips_managers = self.detail == Detail::WithoutManagers;
        let is_skipped = |field: &Field| skips_managers && field.name == "managedFields";
        let mut values: Vec<Option<Value>> = vec![None; fields.len()];
        for_each_field(bytes, |number, wire| {
            match fields.binary_search_by_key(&number, |f| f.number) {
                Ok(nth) if is_skipped(&fields[nth]) => Ok(()),
                Ok(nth) => self.add(&mut values[nth], &fields[nth], wire, depth),
                Err(_) => {
                    self.unknown_fields += 1;
                    Ok(())
                }
            }
        })?;
        let mut object = Map::new();
        for (field, value) in fields.iter().zip(values) {
            self.count_node()?;
            let is_encoded = value.is_some();
            let is_nullable = field.is_pointer || field.shape != Shape::One;
            let value = match value {
                Some(value) => value,
                None if is_nullable || field.r#type == Type::Bytes => Value::Null,
                None => self.value(field, field.r#type.zero(), depth)?,
            };
            let is_empty = if field.is_pointer {
                !is_encoded
            } else {
                is_empty(&value)
            };
            if field.omits_empty && is_empty {
                continue;
            }
            match value {
                Value::Object(inline) if field.name.is_empty() => object.extend(inline),
                value => drop(object.insert(field.name.clone(), value)),
            }
        }
        Ok(object)
    }

    /// Adds an encoded field to the value of the field.
    fn add(
        &mut self,
        value: &mut Option<Value>,
        field: &Field,
        wire: Wire<'_>,
        depth: usize,
    ) -> Result<(), NotDecoded> {
        match field.shape {
            Shape::One => *value = Some(self.value(field, wire, depth)?),
            Shape::List => {
                let list = value.get_or_insert_with(|| Value::Array(Vec::new()));
                let Value::Array(list) = list else {
                    return Ok(());
                };
                match (field.r#type, wire) {
                    // Packed numbers.
                    (Type::Int | Type::Bool, Wire::Bytes(mut numbers)) => {
                        while !numbers.is_empty() {
                            let number = take_varint(&mut numbers).ok_or_else(damaged)?;
                            list.push(self.value(field, Wire::Varint(number), depth)?);
                        }
                    }
                    _ => list.push(self.value(field, wire, depth)?),
                }
            }
            Shape::Map => {
                let map = value.get_or_insert_with(|| Value::Object(Map::new()));
                let (mut key, mut element) = (String::new(), field.r#type.zero());
                for_each_field(bytes(wire)?, |number, wire| {
                    match number {
                        1 => key = text(wire)?,
                        2 => element = wire,
                        _ => {}
                    }
                    Ok(())
                })?;
                let element = self.value(field, element, depth)?;
                if let Value::Object(map) = map {
                    map.insert(key, element);
                }
            }
        }
        Ok(())
    }

    /// Decodes a field, or an element of a list or map.
    fn value(&mut self, field: &Field, wire: Wire<'_>, depth: usize) -> Result<Value, NotDecoded> {
        self.count_node()?;
        Ok(match field.r#type {
            Type::String => text(wire)?.into(),
            Type::Bool => (number(wire)? != 0).into(),
            Type::Int => number(wire)?.into(),
            Type::Bytes => STANDARD.encode_to_string(bytes(wire)?).into(),
            Type::Time => time(bytes(wire)?, SecondsFormat::Secs)?,
            Type::MicroTime => time(bytes(wire)?, SecondsFormat::Micros)?,
            Type::Quantity => quantity(bytes(wire)?)?,
            Type::IntOrString => int_or_string(bytes(wire)?)?,
            Type::Json if self.detail == Detail::ManagersAlone && field.name == "fieldsV1" => {
                String::from_utf8_lossy(bytes(wire)?).into()
            }
            Type::Json => json(bytes(wire)?)?,
            Type::StringList => string_list(bytes(wire)?)?,
            Type::Message(message) => {
                let mut object = self.message(bytes(wire)?, message, depth + 1)?;
                if let Some((api_version, kind)) = &field.kind {
                    add_type(&mut object, api_version, kind);
                }
                Value::Object(object)
            }
        })
    }

    fn count_node(&mut self) -> Result<(), NotDecoded> {
        self.nodes_left = self.nodes_left.checked_sub(1).ok_or(NotDecoded::TooLarge)?;
        Ok(())
    }
}

impl Type {
    /// The encoding of Go's zero value.
    fn zero(self) -> Wire<'static> {
        match self {
            Type::Bool | Type::Int => Wire::Varint(0),
            _ => EMPTY,
        }
    }
}

/// Whether Go's `encoding/json` leaves out a value, which is not a pointer, that is declared with `omitempty`.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(b) => !b,
        Value::Number(n) => n.as_i64() == Some(0),
        Value::String(s) => s.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// A `metav1.Time` or `MicroTime`: seconds (field 1) and nanoseconds (field 2). Without fields it is null.
fn time(message: &[u8], precision: SecondsFormat) -> Result<Value, NotDecoded> {
    if message.is_empty() {
        return Ok(Value::Null);
    }
    let (mut seconds, mut nanoseconds) = (0, 0);
    for_each_field(message, |field, wire| {
        match field {
            1 => seconds = number(wire)?,
            2 => nanoseconds = number(wire)?,
            _ => {}
        }
        Ok(())
    })?;
    let nanoseconds = u32::try_from(nanoseconds).map_err(|_| damaged())?;
    let time = DateTime::from_timestamp(seconds, nanoseconds).ok_or_else(damaged)?;
    Ok(time.to_rfc3339_opts(precision, true).into())
}

/// A `resource.Quantity`: its text (field 1), which API servers write in its canonical form.
fn quantity(message: &[u8]) -> Result<Value, NotDecoded> {
    let mut quantity = String::new();
    for_each_field(message, |field, wire| {
        if field == 1 {
            quantity = text(wire)?;
        }
        Ok(())
    })?;
    if quantity.is_empty() {
        quantity.push('0');
    }
    Ok(quantity.into())
}

/// An `intstr.IntOrString`: which of both it is (field 1), the integer (field 2) and the string (field 3).
fn int_or_string(message: &[u8]) -> Result<Value, NotDecoded> {
    let (mut is_string, mut integer, mut string) = (false, 0, String::new());
    for_each_field(message, |field, wire| {
        match field {
            1 => is_string = number(wire)? != 0,
            2 => integer = number(wire)?,
            3 => string = text(wire)?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(if is_string {
        string.into()
    } else {
        integer.into()
    })
}

/// A `runtime.RawExtension` or `metav1.FieldsV1`: JSON (field 1); null without it.
fn json(message: &[u8]) -> Result<Value, NotDecoded> {
    let mut json = Value::Null;
    for_each_field(message, |field, wire| {
        if field == 1 {
            let text = bytes(wire)?;
            json = serde_json::from_slice(text)
                .map_err(|e| NotDecoded::damaged(format!("a field is not JSON: {e}")))?;
        }
        Ok(())
    })?;
    Ok(json)
}

/// A named list of strings: its elements (field 1); null without them.
fn string_list(message: &[u8]) -> Result<Value, NotDecoded> {
    let mut list = Vec::new();
    for_each_field(message, |field, wire| {
        if field == 1 {
            list.push(Value::String(text(wire)?));
        }
        Ok(())
    })?;
    Ok(if list.is_empty() {
        Value::Null
    } else {
        Value::Array(list)
    })
}

/// Calls `each` with the number and the value of every field.
fn for_each_field<'a>(
    mut message: &'a [u8],
    mut each: impl FnMut(u64, Wire<'a>) -> Result<(), NotDecoded>,
) -> Result<(), NotDecoded> {
    while !message.is_empty() {
        match take_field(&mut message) {
            None | Some((0, _)) => return Err(damaged()),
            Some((number, value)) => each(number, value)?,
        }
    }
    Ok(())
}

fn bytes(wire: Wire<'_>) -> Result<&[u8], NotDecoded> {
    match wire {
        Wire::Bytes(bytes) => Ok(bytes),
        _ => Err(damaged()),
    }
}

/// Go strings may hold any bytes. As in `encoding/json`, what is not UTF-8 becomes U+FFFD.
fn text(wire: Wire<'_>) -> Result<String, NotDecoded> {
    Ok(String::from_utf8_lossy(bytes(wire)?).into_owned())
}

fn number(wire: Wire<'_>) -> Result<i64, NotDecoded> {
    match wire {
        // Negative numbers are encoded as 64-bit two's complement.
        Wire::Varint(number) => Ok(number.cast_signed()),
        _ => Err(damaged()),
    }
}

fn damaged() -> NotDecoded {
    NotDecoded::damaged("the protobuf is damaged")
}
