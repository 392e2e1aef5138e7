//! The types of Kubernetes' API: their fields with numbers, JSON names and types.
//!
//! `types.json.zst` is made from the Go types of `k8s.io/api` by `generate`, for the minor versions 1.20 to 1.36. Called
//! by `objects::protobuf`.

use super::NotDecoded;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

/// The table as it is generated.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Generated {
    kinds: HashMap<String, String>,
    types: BTreeMap<String, Option<Vec<GeneratedField>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct GeneratedField {
    number: u64,
    name: String,
    r#type: String,
    #[serde(default)]
    shape: Shape,
    #[serde(default)]
    pointer: bool,
    #[serde(default)]
    omit: bool,
    kind: Option<String>,
}

/// How often a field may be present.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Shape {
    #[default]
    One,
    List,
    /// A map with strings as keys.
    Map,
}

/// The type of a field, or of the elements of a list or map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Type {
    String,
    Bool,
    /// A signed integer.
    Int,
    Bytes,
    /// `metav1.Time`: whole seconds.
    Time,
    /// `metav1.MicroTime`: microseconds.
    MicroTime,
    /// `resource.Quantity`: a string.
    Quantity,
    /// `intstr.IntOrString`: an integer or a string.
    IntOrString,
    /// `runtime.RawExtension` and `metav1.FieldsV1`: JSON.
    Json,
    /// A named list of strings, such as `certificates.ExtraValue`: a message with the elements as field 1.
    StringList,
    /// A message, by its index in the table.
    Message(usize),
}

/// A field of a message.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) number: u64,
    /// The JSON name; empty if the fields of the message are in the object of its parent.
    pub(super) name: String,
    pub(super) r#type: Type,
    pub(super) shape: Shape,
    /// Whether the field is absent or null unless it is encoded.
    pub(super) is_pointer: bool,
    /// Whether an empty value is left out.
    pub(super) omits_empty: bool,
    /// The API version and the kind that API servers add to the value.
    pub(super) kind: Option<(String, String)>,
}

/// The types of Kubernetes' API.
pub(super) struct Table {
    kinds: HashMap<String, usize>,
    /// The fields of each message, sorted by number.
    messages: Vec<Vec<Field>>,
}

impl Table {
    /// Returns the table. It is unpacked by the first call.
    ///
    /// # Errors
    /// Fails if the table in this program is damaged.
    pub(super) fn get() -> Result<&'static Table, NotDecoded> {
        static TABLE: LazyLock<Result<Table, String>> = LazyLock::new(Table::unpack);
        let table = TABLE.as_ref();
        table.map_err(|e| NotDecoded::Damaged(format!("the table of types is damaged: {e}")))
    }

    fn unpack() -> Result<Table, String> {
        let packed: &[u8] = include_bytes!("types.json.zst");
        let json = zstd::decode_all(packed).map_err(|e| e.to_string())?;
        let generated: Generated = serde_json::from_slice(&json).map_err(|e| e.to_string())?;
        let names = generated.types.keys().enumerate();
        let indexes: HashMap<&str, usize> = names.map(|(i, name)| (name.as_str(), i)).collect();
        let index = |name: &str| {
            let found = indexes.get(name).copied();
            found.ok_or_else(|| format!("there is no type {name}"))
        };
        let field = |f: &GeneratedField| {
            Ok(Field {
                number: f.number,
                name: f.name.clone(),
                r#type: match f.r#type.as_str() {
                    "s" => Type::String,
                    "b" => Type::Bool,
                    "i" => Type::Int,
                    "y" => Type::Bytes,
                    "T" => Type::Time,
                    "M" => Type::MicroTime,
                    "Q" => Type::Quantity,
                    "I" => Type::IntOrString,
                    "J" => Type::Json,
                    "L" => Type::StringList,
                    name => Type::Message(index(name)?),
                },
                shape: f.shape,
                is_pointer: f.pointer,
                omits_empty: f.omit,
                kind: f.kind.as_deref().and_then(split_kind),
            })
        };
        let fields = |fields: &Option<Vec<GeneratedField>>| {
            let fields = fields.iter().flatten();
            fields.map(field).collect::<Result<Vec<_>, String>>()
        };
        let messages: Result<Vec<_>, String> = generated.types.values().map(fields).collect();
        let kinds = generated.kinds.iter();
        let kinds: Result<_, String> = kinds
            .map(|(kind, name)| Ok((kind.clone(), index(name)?)))
            .collect();
        Ok(Table {
            kinds: kinds?,
            messages: messages?,
        })
    }

    /// Returns the message of a kind; `None` if the kind is not in the table.
    pub(super) fn kind(&self, api_version: &str, kind: &str) -> Option<usize> {
        self.kinds.get(&format!("{api_version}/{kind}")).copied()
    }

    /// Returns the fields of a message, sorted by number.
    pub(super) fn fields(&self, message: usize) -> &[Field] {
        &self.messages[message]
    }
}

/// Splits `apps/v1/Deployment` into API version and kind.
fn split_kind(kind: &str) -> Option<(String, String)> {
    let (api_version, kind) = kind.rsplit_once('/')?;
    Some((api_version.to_owned(), kind.to_owned()))
}
