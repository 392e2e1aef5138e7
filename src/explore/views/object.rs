//! One object at a moment.

use super::At;
use super::state::Listed;
use crate::base::hash::hex;
use crate::base::time::rfc3339;
use crate::error::Result;
use crate::explore::index::{Index, Key};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::{Detail, EncryptionKeys, Object, yaml};
use crate::ops::read::versions::known_before;
use serde::Serialize;

/// The longest text that is compared or shown, in bytes.
const MAX_TEXT: usize = 4 << 20;

/// How objects are shown.
pub(in crate::explore) struct Show<'k> {
    /// What opens objects that an API server has encrypted.
    pub(in crate::explore) keys: &'k EncryptionKeys,
    /// Whether values of Secrets are shown.
    pub(in crate::explore) has_secrets: bool,
    /// Whether what only an API server sets is left out.
    pub(in crate::explore) is_clean: bool,
    /// Whether `metadata.managedFields` is shown.
    pub(in crate::explore) has_managers: bool,
}

/// An object at a moment.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Shown {
    #[serde(flatten)]
    at: At,
    /// The object; null if it does not exist at that moment.
    object: Option<Listed>,
    /// If it was deleted before that moment: when, and the newest revision at which it is known to have been there.
    gone: Option<Gone>,
    /// The key, as text.
    key: String,
    /// The name by which `deltafold get` finds it: a reference, or the key.
    reference: String,
    /// The object as YAML; other text unchanged; other bytes in hexadecimal. Empty if it does not exist.
    pub(super) text: String,
    /// Whether only the beginning of a very long text is here.
    pub(super) is_cut: bool,
    /// Why an object is not decoded.
    not_decoded: Option<String>,
    /// Whether it is a Secret.
    pub(in crate::explore) is_secret: bool,
    /// etcd's record: the revision of its creation, the number of its changes, and its lease.
    record: Option<RecordFacts>,
}

/// The deletion of an object.
#[derive(Debug, Serialize)]
struct Gone {
    revision: Revision,
    time: Option<String>,
    before: Revision,
}

impl Gone {
    /// Finds the last deletion of a key up to a revision at which it is not there.
    fn of(index: &Index, key: &Key, revision: Revision) -> Option<Self> {
        let versions = index.versions(key);
        let later = versions.partition_point(|v| v.revision <= revision);
        let (deletion, versions) = versions[..later].split_last()?;
        let put = versions.last().map(|put| put.revision)?;
        Some(Gone {
            revision: deletion.revision,
            time: index.time_of(deletion.revision).map(rfc3339),
            before: known_before(&index.unknown, deletion.revision.previous(), put),
        })
    }
}

/// What etcd records with a value.
#[derive(Debug, Serialize)]
struct RecordFacts {
    create_revision: Revision,
    version: i64,
    lease: i64,
    bytes: usize,
}

impl Shown {
    /// Shows a key at a revision.
    ///
    /// # Errors
    /// `Io`.
    pub(in crate::explore) fn of(
        index: &Index,
        key: &Key,
        revision: Revision,
        show: &Show<'_>,
    ) -> Result<Self> {
        let text_of_key = String::from_utf8_lossy(&key.bytes).into_owned();
        let mut shown = Shown {
            at: At::of(index, revision),
            object: None,
            gone: None,
            reference: reference(index, key).unwrap_or_else(|| text_of_key.clone()),
            key: text_of_key,
            text: String::new(),
            is_cut: false,
            not_decoded: None,
            is_secret: false,
            record: None,
        };
        let Some(version) = index.at(key, revision) else {
            shown.gone = Gone::of(index, key, revision);
            return Ok(shown);
        };
        let record = index.record(version)?;
        let kv = KeyValue::decode(&record)?;
        shown.object = Some(Listed::of(index, key, version));
        shown.record = Some(RecordFacts {
            create_revision: kv.create_revision,
            version: kv.version,
            lease: kv.lease,
            bytes: kv.value.len(),
        });
        let detail = if show.has_managers {
            Detail::Whole
        } else {
            Detail::WithoutManagers
        };
        let mut object = Object::of_record_with(&kv, show.keys, detail);
        if show.is_clean {
            object = object.and_then(Object::cleaned);
        }
        match object {
            Ok(mut object) => {
                shown.is_secret = object.kind() == "Secret" && object.api_version() == "v1";
                if !show.has_secrets {
                    object.hide_secrets();
                }
                shown.text = yaml::from_object(&object.json);
            }
            Err(e) => {
                shown.not_decoded = key.kind.map(|_| e.to_string());
                shown.text = plain_text(kv.value);
            }
        }
        Ok(shown)
    }

    /// Cuts a very long text: a browser takes long to show it.
    pub(in crate::explore) fn cut(mut self) -> Self {
        self.is_cut = self.text.len() > MAX_TEXT;
        if self.is_cut {
            let end = (0..=MAX_TEXT).rfind(|at| self.text.is_char_boundary(*at));
            self.text.truncate(end.unwrap_or_default());
        }
        self
    }

    /// Why the object is not shown as YAML.
    pub(in crate::explore) fn not_decoded(&self) -> Option<&str> {
        self.not_decoded.as_deref()
    }

    /// Takes the text.
    pub(in crate::explore) fn into_text(self) -> String {
        self.text
    }

    /// A name for the file of a download.
    pub(in crate::explore) fn file_name(&self) -> String {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let name = self.reference.trim_matches('/').replace('/', "-");
        let name: String = name.chars().filter(|c| is_plain(*c)).collect();
        format!("{name}-{}.yaml", self.at.revision)
    }
}

/// Returns the name by which `deltafold get` finds an object.
fn reference(index: &Index, key: &Key) -> Option<String> {
    let kind = &index.kind(key)?.reference;
    Some(match key.namespace() {
        "" => format!("{kind}/{}", key.name()),
        namespace => format!("{kind}/{namespace}/{}", key.name()),
    })
}

/// Returns text unchanged, and other bytes in hexadecimal.
fn plain_text(value: &[u8]) -> String {
    match std::str::from_utf8(value) {
        Ok(text) => text.to_owned(),
        Err(_) => value
            .chunks(16)
            .map(|line| {
                let bytes: Vec<String> = line.iter().map(|b| hex(&[*b])).collect();
                bytes.join(" ") + "\n"
            })
            .collect(),
    }
}
