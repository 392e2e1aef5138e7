//! Keys and records as JSON.
//!
//! What is text stands as text, all else in base64. `cli` prints it; the fields are a contract, in
//! `docs/get-result.schema.json` and its like.

use super::diff::Changed;
use super::history::Version;
use super::kubernetes::Object;
use crate::mvcc::{KeyValue, Revision};
use base64_simd::STANDARD;
use schemars::JsonSchema;
use serde::Serialize;

/// A key. One of `key` and `key_base64` is there.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(extend("oneOf" = [
    {"properties": {"key": {"type": "string"}, "key_base64": {"type": "null"}}},
    {"properties": {"key": {"type": "null"}, "key_base64": {"type": "string"}}},
]))]
pub struct Name<'a> {
    /// The key, if it is UTF-8; else null.
    pub key: Option<&'a str>,
    /// The key in base64 (standard alphabet, padded), if it is not UTF-8; else null.
    pub key_base64: Option<String>,
    /// What the key is to Kubernetes; null if it is no key of an API server.
    pub kubernetes: Option<Object<'a>>,
}

impl<'a> Name<'a> {
    /// Of a key and, to tell the kind, a value.
    pub fn of(key: &'a [u8], value: Option<&'a [u8]>) -> Self {
        let (text, base64) = text_or_base64(key);
        Name {
            key: text,
            key_base64: base64,
            kubernetes: Object::of(key, value),
        }
    }
}

/// A version of a key. One of `value` and `value_base64` is there.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(extend("oneOf" = [
    {"properties": {"value": {"type": "string"}, "value_base64": {"type": "null"}}},
    {"properties": {"value": {"type": "null"}, "value_base64": {"type": "string"}}},
]))]
pub struct Record<'a> {
    /// The revision in which the key came into being.
    pub create_revision: Revision,
    /// The revision of this version.
    pub mod_revision: Revision,
    /// 1 at creation, one more with each change.
    pub version: i64,
    /// The ID of the lease that the key is attached to; 0 if there is none.
    pub lease: i64,
    /// The value, if it is UTF-8; else null.
    pub value: Option<&'a str>,
    /// The value in base64 (standard alphabet, padded), if it is not UTF-8; else null.
    pub value_base64: Option<String>,
}

impl<'a> Record<'a> {
    /// Of a record as etcd has it.
    pub fn of(kv: &KeyValue<'a>) -> Self {
        let (value, value_base64) = text_or_base64(kv.value);
        Record {
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: kv.lease,
            value,
            value_base64,
        }
    }
}

/// A key with its newest version: an element of `keys`, a line of `export`.
#[derive(Debug, JsonSchema, Serialize)]
pub struct Entry<'a> {
    #[serde(flatten)]
    name: Name<'a>,
    #[serde(flatten)]
    record: Record<'a>,
}

impl<'a> Entry<'a> {
    /// Of a record as etcd has it.
    pub fn of(kv: &KeyValue<'a>) -> Self {
        Entry {
            name: Name::of(kv.key, Some(kv.value)),
            record: Record::of(kv),
        }
    }
}

/// What became of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// It is only in the second state.
    Added,
    /// It was put in between, perhaps with the same value.
    Changed,
    /// It is only in the first state.
    Deleted,
}

impl Kind {
    /// Of a key that differs; `None` where it is on neither side.
    pub fn of(changed: &Changed<'_>) -> Option<Self> {
        match (changed.old, changed.new) {
            (None, Some(_)) => Some(Kind::Added),
            (Some(_), Some(_)) => Some(Kind::Changed),
            (Some(_), None) => Some(Kind::Deleted),
            (None, None) => None,
        }
    }
}

/// An element of `changes`.
#[derive(Debug, JsonSchema, Serialize)]
pub struct Change<'a> {
    /// `added`: only at the second point. `changed`: put in between, perhaps with the same value. `deleted`:
    /// only at the first point.
    pub change: Kind,
    #[serde(flatten)]
    name: Name<'a>,
    /// At the first point; null if the key was not there.
    old: Option<Record<'a>>,
    /// At the second point; null if the key was not there.
    new: Option<Record<'a>>,
}

impl<'a> Change<'a> {
    /// Of a key that differs; `None` where it is on neither side.
    pub fn of(changed: &Changed<'a>) -> Option<Self> {
        let change = Kind::of(changed)?;
        let kv = changed.new.or(changed.old)?;
        Some(Change {
            change,
            name: Name::of(kv.key, Some(kv.value)),
            old: changed.old.as_ref().map(Record::of),
            new: changed.new.as_ref().map(Record::of),
        })
    }
}

/// An element of `versions`.
#[derive(Debug, JsonSchema, Serialize)]
pub struct Recorded<'a> {
    /// The revision of the change.
    revision: Revision,
    /// When the snapshotter saw the change (RFC 3339); null if only a full snapshot holds it.
    time: Option<&'a str>,
    /// Whether the change deleted the key: then `record` is null.
    deleted: bool,
    /// The version; null of a deletion.
    record: Option<Record<'a>>,
}

impl<'a> Recorded<'a> {
    /// Of a version that was found.
    pub fn of(version: &Version<'a>) -> Self {
        Recorded {
            revision: version.revision,
            time: version.time,
            deleted: version.kv.is_none(),
            record: version.kv.as_ref().map(Record::of),
        }
    }
}

/// Text where the bytes are UTF-8, else base64.
pub(in crate::ops) fn text_or_base64(bytes: &[u8]) -> (Option<&str>, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(_) => (None, Some(STANDARD.encode_to_string(bytes))),
    }
}
