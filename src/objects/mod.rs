//! Kubernetes objects: decodes what an API server stores in etcd.
//!
//! A value is one of: protobuf in an envelope (the built-in kinds; `protobuf`), JSON (custom resources), CBOR
//! (custom resources, by KEP-4222; `cbor`), or ciphertext (encryption at rest). A decoded object is the JSON that an
//! API server serves for the stored version, without defaults and conversions of other versions. Nothing here knows
//! backups.
//!
//! Sources: apimachinery's `runtime.Unknown` (the envelope), `runtime/serializer/cbor`, and apiserver's
//! `storage/value` (encryption).

mod cbor;
pub mod changes;
pub mod columns;
mod encryption;
pub mod json_path;
pub mod key;
pub mod names;
mod protobuf;
pub mod reference;
pub mod resource;
pub mod rules;
pub mod selector;
mod table;
pub mod yaml;

use crate::base::opt::ENCRYPTION_CONFIG;
use crate::base::printable::line;
use crate::mvcc::KeyValue;
pub use encryption::EncryptionKeys;
use serde_json::{Map, Value};
use std::fmt;

/// The first bytes of an object in protobuf.
const PROTOBUF: &[u8] = b"k8s\0";
/// The first bytes of an object in CBOR: the tag 55799, which says that CBOR follows.
const CBOR: &[u8] = &[0xd9, 0xd9, 0xf7];
/// The first bytes of a value that is encrypted at rest. The name of the provider follows.
const ENCRYPTED: &[u8] = b"k8s:enc:";
/// The longest value that is decoded, in bytes. etcd takes requests of up to 1.5 MiB by default.
const MAX_BYTES: usize = 16 << 20;
/// The largest number of fields and elements in an object. Hostile protobuf of 2 bytes can stand for hundreds.
const MAX_NODES: usize = 500_000;
/// The deepest nesting of an object: that of `serde_json`.
const MAX_DEPTH: usize = 128;
/// The annotation in which `kubectl apply` keeps the object as it was applied, values of Secrets included.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The reason why a value is not decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotDecoded {
    /// The value is not an object of Kubernetes: neither protobuf nor JSON nor CBOR with an API version and a
    /// kind.
    NoObject,
    /// The value is encrypted at rest.
    Encrypted {
        /// The provider and its key, such as `aescbc:v1:key1`.
        provider: String,
        /// Whether a key of that name was given, which does not open the value.
        has_key: bool,
    },
    /// The type is not one of Kubernetes' own.
    UnknownKind {
        /// The API version, such as `apps.openshift.io/v1`.
        api_version: String,
        /// The kind.
        kind: String,
    },
    /// It has a field `items` beside its kind, so that kubectl takes it for a list.
    Items,
    /// The value, or its object, is larger or nested deeper than any that an API server stores.
    TooLarge,
    /// The value is not what its first bytes say.
    Damaged(String),
}

impl NotDecoded {
    fn damaged(message: impl Into<String>) -> Self {
        NotDecoded::Damaged(message.into())
    }
}

impl fmt::Display for NotDecoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotDecoded::NoObject => write!(f, "not decoded: not an object of Kubernetes"),
            NotDecoded::Items => write!(
                f,
                "kubectl would apply what is in its field `items`, and not the object"
            ),
            NotDecoded::Encrypted { provider, has_key } => {
                let why = if provider.starts_with("kms:") {
                    "no file opens it, because its key is in a KMS".to_owned()
                } else if *has_key {
                    format!("the key of that name in {ENCRYPTION_CONFIG} does not open it")
                } else {
                    format!("give its key with {ENCRYPTION_CONFIG}")
                };
                write!(f, "encrypted at rest with {}: {why}", line(provider))
            }
            NotDecoded::UnknownKind { api_version, kind } => write!(
                f,
                "not decoded: {} of {} is not one of Kubernetes' own kinds",
                line(kind),
                line(api_version)
            ),
            NotDecoded::TooLarge => write!(f, "not decoded: too large or nested too deep"),
            NotDecoded::Damaged(message) => write!(f, "not decoded: {}", line(message)),
        }
    }
}

/// How much of an object is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// The whole object.
    Whole,
    /// The object with the managers, but what each manages is left as text.
    ManagersAlone,
    /// The object without `metadata.managedFields`, which may be half of its size.
    WithoutManagers,
}

impl Detail {
    /// The whole object if `has_managers` is set.
    pub fn with_managers(has_managers: bool) -> Self {
        if has_managers {
            return Detail::Whole;
        }
        Detail::WithoutManagers
    }
}

/// A decoded object.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// The object as JSON.
    pub json: Map<String, Value>,
    /// Number of fields in the value that are not in the object, because their kind had no such field when this
    /// program was made.
    pub unknown_fields: usize,
}

/// An owner of an object: it is in the same namespace, or in none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The API version.
    pub api_version: String,
    /// The kind, such as `ReplicaSet`.
    pub kind: String,
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: String,
    /// Whether the owner controls the object.
    pub is_controller: bool,
}

impl Owner {
    /// Returns the owner of an element of `ownerReferences`; `None` if it lacks a name.
    fn of(reference: &Value) -> Option<Self> {
        let text = |field: &str| Some(reference.get(field)?.as_str()?.to_owned());
        Some(Owner {
            api_version: text("apiVersion").unwrap_or_default(),
            kind: text("kind")?,
            name: text("name")?,
            uid: text("uid").unwrap_or_default(),
            is_controller: reference.get("controller") == Some(&Value::Bool(true)),
        })
    }
}

impl Object {
    /// Decodes a value of etcd. The object has no resource version.
    ///
    /// # Errors
    /// Fails with the reason why the value cannot be decoded.
    pub fn decode(value: &[u8]) -> Result<Self, NotDecoded> {
        let kv = KeyValue {
            value,
            ..KeyValue::default()
        };
        Object::open(&kv, &EncryptionKeys::default(), Detail::Whole)
    }

    /// Decodes the value of a record, and opens it if it is encrypted at rest.
    fn open(kv: &KeyValue<'_>, keys: &EncryptionKeys, detail: Detail) -> Result<Self, NotDecoded> {
        let Some(encrypted) = kv.value.strip_prefix(ENCRYPTED) else {
            return Object::decode_plain(kv.value, detail);
        };
        match keys.open(kv.key, encrypted) {
            Some(value) => Object::decode_plain(&value, detail),
            None => Err(NotDecoded::Encrypted {
                provider: provider(encrypted),
                has_key: keys.names(encrypted),
            }),
        }
    }

    fn decode_plain(value: &[u8], detail: Detail) -> Result<Self, NotDecoded> {
        if value.len() > MAX_BYTES {
            return Err(NotDecoded::TooLarge);
        }
        if let Some(envelope) = value.strip_prefix(PROTOBUF) {
            return protobuf::decode(envelope, detail);
        }
        let json = if value.starts_with(CBOR) {
            cbor::decode(value)?
        } else if value.starts_with(b"{") {
            // A map takes most of the memory.
            if value.iter().filter(|&&b| b == b'{').count() > MAX_NODES {
                return Err(NotDecoded::TooLarge);
            }
            serde_json::from_slice(value).map_err(|_| NotDecoded::NoObject)?
        } else {
            return Err(NotDecoded::NoObject);
        };
        let Value::Object(json) = json else {
            return Err(NotDecoded::NoObject);
        };
        let mut object = Object::from_json(json);
        if let (Detail::WithoutManagers, Some(metadata)) = (detail, object.metadata()) {
            metadata.remove("managedFields");
        }
        if object.kind().is_empty() || object.api_version().is_empty() {
            return Err(NotDecoded::NoObject);
        }
        Ok(object)
    }

    /// Decodes the value of a record, and opens it if it is encrypted at rest. Gives the object its resource version,
    /// as an API server does: the revision of etcd.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn of_record(kv: &KeyValue<'_>, keys: &EncryptionKeys) -> Result<Self, NotDecoded> {
        Object::of_record_with(kv, keys, Detail::Whole)
    }

    /// Decodes a record as [`of_record`](Self::of_record) does, possibly in part.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn of_record_with(
        kv: &KeyValue<'_>,
        keys: &EncryptionKeys,
        detail: Detail,
    ) -> Result<Self, NotDecoded> {
        let mut object = Object::open(kv, keys, detail)?;
        if let Some(metadata) = object.metadata() {
            let revision = Value::String(kv.mod_revision.to_string());
            metadata.insert("resourceVersion".to_owned(), revision);
        }
        Ok(object)
    }

    /// The kind; empty if the object has none.
    pub fn kind(&self) -> &str {
        self.text("kind")
    }

    /// The API version; empty if the object has none.
    pub fn api_version(&self) -> &str {
        self.text("apiVersion")
    }

    fn text(&self, field: &str) -> &str {
        self.json.get(field).and_then(Value::as_str).unwrap_or("")
    }

    fn metadata(&mut self) -> Option<&mut Map<String, Value>> {
        self.json.get_mut("metadata")?.as_object_mut()
    }

    /// An object that an API server returned.
    pub fn from_json(json: Map<String, Value>) -> Self {
        Object {
            json,
            unknown_fields: 0,
        }
    }

    /// Sets the references to owners.
    pub fn set_owners(&mut self, references: Vec<Value>) {
        if let Some(metadata) = self.metadata() {
            metadata.insert("ownerReferences".to_owned(), references.into());
        }
    }

    /// Returns a field of the metadata that is text; empty if there is none.
    pub fn metadata_text(&self, field: &str) -> &str {
        let metadata = self.json.get("metadata");
        let value = metadata.and_then(|m| m.get(field));
        value.and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns whether the object is about to be deleted: it has a deletionTimestamp.
    pub fn is_terminating(&self) -> bool {
        !self.metadata_text("deletionTimestamp").is_empty()
    }

    /// The group of the API version; empty for the core group.
    pub fn group(&self) -> &str {
        let version = self.api_version();
        version.split_once('/').map_or("", |(group, _)| group)
    }

    /// Returns the references to owners.
    pub fn owner_references(&self) -> &[Value] {
        let metadata = self.json.get("metadata");
        let references = metadata.and_then(|m| m.get("ownerReferences"));
        let references = references.and_then(Value::as_array);
        references.map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the owners; the one that controls the object comes first.
    pub fn owners(&self) -> Vec<Owner> {
        let mut owners: Vec<Owner> = self
            .owner_references()
            .iter()
            .filter_map(Owner::of)
            .collect();
        owners.sort_by_key(|owner| !owner.is_controller);
        owners
    }

    /// Replaces the values of a Secret by their sizes, and hides its annotations: those of kubectl, kapp and other tools
    /// repeat the values.
    pub fn hide_secrets(&mut self) {
        if self.kind() != "Secret" || self.api_version() != "v1" {
            return;
        }
        if let Some(Value::Object(data)) = self.json.get_mut("data") {
            for value in data.values_mut() {
                *value = hidden(value);
            }
        }
        if let Some(metadata) = self.metadata()
            && let Some(Value::Object(annotations)) = metadata.get_mut("annotations")
        {
            for annotation in annotations.values_mut() {
                *annotation = Value::String("<hidden>".to_owned());
            }
        }
    }
}

/// Returns the provider of an encrypted value: type, version and name of the key.
fn provider(encrypted: &[u8]) -> String {
    const MAX_LEN: usize = 128;
    let mut colons = 0;
    let end = encrypted.iter().take(MAX_LEN).position(|&b| {
        colons += usize::from(b == b':');
        colons == 3
    });
    let provider = &encrypted[..end.unwrap_or(encrypted.len().min(MAX_LEN))];
    String::from_utf8_lossy(provider).into_owned()
}

/// Returns what is shown for a value of a Secret, which is base64.
fn hidden(value: &Value) -> Value {
    let base64 = value.as_str().unwrap_or("");
    let padding = base64.bytes().rev().take_while(|&b| b == b'=').count();
    let bytes = (base64.len() / 4 * 3).saturating_sub(padding);
    Value::String(format!("<hidden, {bytes} bytes>"))
}

#[cfg(test)]
mod tests;
