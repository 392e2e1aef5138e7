//! Keys, records and changes as JSON.
//!
//! UTF-8 is printed as text, all other bytes in base64. The fields must not change: the schemas of `get`, `export`,
//! `diff` and `history` in `docs/` describe them.

use super::deleted::Deletion;
use super::diff::KeyDifference;
use super::history::Version;
use crate::mvcc::{KeyValue, Revision};
use crate::objects::changes::FieldChange;
use crate::objects::key::ObjectKey;
use crate::objects::{EncryptionKeys, NotDecoded, Object};
use base64_simd::STANDARD;
use serde::Serialize;
use serde_json::{Map, Value};

/// A key. One of `key` and `key_base64` is present.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("oneOf" = [
    {"properties": {"key": {"type": "string"}, "key_base64": {"type": "null"}}},
    {"properties": {"key": {"type": "null"}, "key_base64": {"type": "string"}}},
])))]
pub struct KeyJson<'a> {
    /// The key, if it is UTF-8; else null.
    pub key: Option<&'a str>,
    /// The key in base64 (standard alphabet, padded), if it is not UTF-8; else null.
    pub key_base64: Option<String>,
    /// The Kubernetes object of the key; null if the key is not one of an API server.
    pub kubernetes: Option<ObjectKey<'a>>,
}

impl<'a> KeyJson<'a> {
    /// Converts a key. The value, if there is one, tells the kind of the Kubernetes object.
    pub fn new(key: &'a [u8], value: Option<&'a [u8]>) -> Self {
        let (text, base64) = text_or_base64(key);
        KeyJson {
            key: text,
            key_base64: base64,
            kubernetes: ObjectKey::from_key(key, value),
        }
    }
}

/// A version of a key. One of `value` and `value_base64` is present.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("oneOf" = [
    {"properties": {"value": {"type": "string"}, "value_base64": {"type": "null"}}},
    {"properties": {"value": {"type": "null"}, "value_base64": {"type": "string"}}},
])))]
pub struct RecordJson<'a> {
    /// The revision in which the key was created.
    pub create_revision: Revision,
    /// The revision of this version.
    pub mod_revision: Revision,
    /// etcd's version of the key: 1 when it is created, and one more with each later put.
    pub version: i64,
    /// The ID of the lease that the key is attached to; 0 if there is none.
    pub lease: i64,
    /// The value, if it is UTF-8; else null.
    pub value: Option<&'a str>,
    /// The value in base64 (standard alphabet, padded), if it is not UTF-8; else null.
    pub value_base64: Option<String>,
    /// The Kubernetes object, as an API server serves it in its stored version; null if the value is none, or
    /// cannot be decoded.
    pub object: Option<Map<String, Value>>,
    /// Why the Kubernetes object is not decoded; null if it is, and if the value is none.
    pub not_decoded: Option<String>,
}

impl<'a> RecordJson<'a> {
    /// Converts a record of etcd. `keys` open what an API server has encrypted.
    pub fn new(kv: &KeyValue<'a>, keys: &EncryptionKeys) -> Self {
        let (value, value_base64) = text_or_base64(kv.value);
        let (object, not_decoded) = match Object::of_record(kv, keys) {
            Ok(object) => (Some(object.json), None),
            Err(NotDecoded::NoObject) => (None, None),
            Err(e) => (None, Some(e.to_string())),
        };
        RecordJson {
            object,
            not_decoded,
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: kv.lease,
            value,
            value_base64,
        }
    }
}

/// A key with its newest version: an element of `keys`, or a line of `export`.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct KeyWithRecord<'a> {
    #[serde(flatten)]
    key: KeyJson<'a>,
    #[serde(flatten)]
    record: RecordJson<'a>,
}

impl<'a> KeyWithRecord<'a> {
    /// Converts a record of etcd. `keys` open what an API server has encrypted.
    pub fn new(kv: &KeyValue<'a>, keys: &EncryptionKeys) -> Self {
        KeyWithRecord {
            key: KeyJson::new(kv.key, Some(kv.value)),
            record: RecordJson::new(kv, keys),
        }
    }
}

/// How a key changed between two states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// The key exists only in the second state.
    Added,
    /// The key was put in between, possibly with the same value.
    Changed,
    /// The key exists only in the first state.
    Deleted,
}

impl ChangeKind {
    /// Returns how the key changed; `None` if the difference has neither an old nor a new record.
    pub fn new(changed: &KeyDifference<'_>) -> Option<Self> {
        match (changed.old, changed.new) {
            (None, Some(_)) => Some(ChangeKind::Added),
            (Some(_), Some(_)) => Some(ChangeKind::Changed),
            (Some(_), None) => Some(ChangeKind::Deleted),
            (None, None) => None,
        }
    }
}

/// A change of a key: an element of `changes`.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct KeyChange<'a> {
    /// `added`: the key exists only at the second point. `changed`: it was put in between, possibly with the
    /// same value. `deleted`: it exists only at the first point.
    pub change: ChangeKind,
    #[serde(flatten)]
    key: KeyJson<'a>,
    /// The version at the first point; null if the key did not exist.
    old: Option<RecordJson<'a>>,
    /// The version at the second point; null if the key did not exist.
    new: Option<RecordJson<'a>>,
    /// When the key was deleted; null unless `change` is `deleted`. If the first point is the later one, no
    /// deletion is known, and its fields are null.
    deletion: Option<Deletion>,
}

impl<'a> KeyChange<'a> {
    /// Converts a difference; `None` if it has neither an old nor a new record.
    pub fn new(changed: &KeyDifference<'a>, keys: &EncryptionKeys) -> Option<Self> {
        let change = ChangeKind::new(changed)?;
        let kv = changed.new.or(changed.old)?;
        Some(KeyChange {
            change,
            key: KeyJson::new(kv.key, Some(kv.value)),
            old: changed.old.map(|kv| RecordJson::new(&kv, keys)),
            new: changed.new.map(|kv| RecordJson::new(&kv, keys)),
            deletion: changed.deletion.clone(),
        })
    }
}

/// A version of a key or its deletion: an element of `versions`.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VersionJson<'a> {
    /// The revision of the change.
    revision: Revision,
    /// When the change was recorded in a delta (RFC 3339); null if only a full snapshot holds the version.
    time: Option<&'a str>,
    /// Whether the change deleted the key. If so, `record` is null.
    deleted: bool,
    /// Whether a snapshot records the change. Of a deletion that none records, `revision` is the one by which it happened.
    recorded: bool,
    /// The version; null for a deletion.
    record: Option<RecordJson<'a>>,
    /// Who wrote the version of an object: the managers whose entries in its managedFields are new.
    managers: Vec<String>,
    /// The fields of an object that differ from the version before, at most a thousand; empty if there is none.
    changes: Vec<FieldChange>,
}

impl<'a> VersionJson<'a> {
    /// Converts a version.
    pub fn new(
        version: &Version<'a>,
        keys: &EncryptionKeys,
        managers: Vec<String>,
        changes: Vec<FieldChange>,
    ) -> Self {
        VersionJson {
            managers,
            changes,
            revision: version.revision,
            time: version.time,
            deleted: version.kv.is_none(),
            recorded: version.is_recorded,
            record: version.kv.map(|kv| RecordJson::new(&kv, keys)),
        }
    }
}

/// Returns the bytes as text if they are UTF-8, otherwise in base64.
pub(in crate::ops) fn text_or_base64(bytes: &[u8]) -> (Option<&str>, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(_) => (None, Some(STANDARD.encode_to_string(bytes))),
    }
}
