//! What exists at a moment: the tree with its counts, lists, and search.

use super::At;
use crate::base::time::rfc3339;
use crate::error::{Reason, Result};
use crate::explore::index::{Index, Key, Version};
use crate::explore::kinds::KindId;
use crate::mvcc::{KeyValue, Revision};
use crate::objects::names::NameSearch;
use crate::objects::resource::labels;
use crate::objects::selector::Selector;
use crate::objects::{Detail, EncryptionKeys, NotDecoded, Object, yaml};
use base64_simd::URL_SAFE_NO_PAD;
use serde::Serialize;
use std::collections::BTreeMap;

/// The most objects, and the most namespaces, of an answer.
pub(in crate::explore) const MAX_LISTED: usize = 1000;

/// The tree of a state.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct State {
    #[serde(flatten)]
    at: At,
    /// The first namespaces, in the order of their names. That of objects without a namespace is empty.
    namespaces: Vec<NamespaceCounts>,
    /// The number of further namespaces.
    more_namespaces: usize,
    /// The number of keys that are no objects of Kubernetes.
    other_keys: usize,
}

/// What a namespace has.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct NamespaceCounts {
    name: String,
    count: usize,
    /// The number of objects by the number of their kind.
    kinds: BTreeMap<KindId, usize>,
}

impl State {
    pub(in crate::explore) fn of(index: &Index, revision: Revision) -> Self {
        let mut namespaces: BTreeMap<&str, BTreeMap<KindId, usize>> = BTreeMap::new();
        let mut other_keys = 0;
        for (key, _) in index.state(revision) {
            match key.kind {
                Some(kind) => {
                    let kinds = namespaces.entry(key.namespace()).or_default();
                    *kinds.entry(kind).or_default() += 1;
                }
                None => other_keys += 1,
            }
        }
        State {
            at: At::of(index, revision),
            more_namespaces: namespaces.len().saturating_sub(MAX_LISTED),
            namespaces: namespaces
                .into_iter()
                .take(MAX_LISTED)
                .map(|(name, kinds)| NamespaceCounts {
                    name: name.to_owned(),
                    count: kinds.values().sum(),
                    kinds,
                })
                .collect(),
            other_keys,
        }
    }
}

/// An object in a list.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Listed {
    /// What names the key in requests: its bytes in base64, for URLs.
    id: String,
    /// The kind's number; null if it is no object.
    kind: Option<KindId>,
    /// The namespace; empty if it has none.
    namespace: String,
    /// The name, or the key if it is no object.
    name: String,
    /// The revision of its newest change, or of its deletion.
    revision: Revision,
    /// Its time; null if that is not known.
    time: Option<String>,
    /// Why it is not in the state that was asked for: `deleted`, `missing` if the deletion is not recorded, or `created`
    /// if it was created later. Null if it is there.
    absence: Option<&'static str>,
}

impl Listed {
    pub(super) fn of(index: &Index, key: &Key, version: &Version) -> Self {
        let name = match key.kind {
            Some(_) => key.name().to_owned(),
            None => String::from_utf8_lossy(&key.bytes).into_owned(),
        };
        Listed {
            id: URL_SAFE_NO_PAD.encode_to_string(&key.bytes),
            kind: key.kind,
            namespace: key.namespace().to_owned(),
            name,
            revision: version.revision,
            time: index.time_of(version.revision).map(rfc3339),
            absence: None,
        }
    }

    /// Shows an object as it is at a revision, or says why it is not there.
    fn at(index: &Index, key: &Key, revision: Revision) -> Option<Self> {
        if let Some(version) = index.at(key, revision) {
            return Some(Self::of(index, key, version));
        }
        let versions = index.versions(key);
        let later = versions.partition_point(|v| v.revision <= revision);
        let deletion = later.checked_sub(1).and_then(|at| versions.get(at));
        let version = deletion.or(versions.get(later))?;
        Some(Listed {
            absence: Some(match deletion {
                Some(deletion) if deletion.is_inferred => "missing",
                Some(_) => "deleted",
                None => "created",
            }),
            ..Self::of(index, key, version)
        })
    }
}

/// A part of a state.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Objects {
    #[serde(flatten)]
    at: At,
    /// The number of all that match.
    total: usize,
    /// Some of them.
    objects: Vec<Listed>,
}

impl Objects {
    fn collect<'i>(
        index: &'i Index,
        revision: Revision,
        found: impl Iterator<Item = (&'i Key, &'i Version)>,
    ) -> Self {
        let (mut total, mut objects) = (0, Vec::new());
        for (key, version) in found {
            if objects.len() < MAX_LISTED {
                objects.push(Listed::of(index, key, version));
            }
            total += 1;
        }
        Objects {
            at: At::of(index, revision),
            total,
            objects,
        }
    }

    /// Searches a state; names at all times. Exact names come first, what is not in the state later, and Events at the end.
    ///
    /// # Errors
    /// `Usage` if the labels are invalid; `Io`.
    pub(in crate::explore) fn search(
        index: &Index,
        keys: &EncryptionKeys,
        revision: Revision,
        search: &Search,
    ) -> Result<Self> {
        if let Search::Names(words) = search {
            let rank = |key: &Key| {
                let kind = key.kind.and_then(|kind| index.kinds.resource(kind));
                words.rank(kind, &key.bytes)
            };
            let found = index.keys.iter().filter_map(|key| Some((rank(key)?, key)));
            let mut found: Vec<(u8, &Key)> = found.collect();
            found.sort_by_cached_key(|(rank, key)| (*rank, index.at(key, revision).is_none()));
            let shown = found.iter().take(MAX_LISTED);
            return Ok(Objects {
                at: At::of(index, revision),
                total: found.len(),
                objects: shown
                    .filter_map(|(_, key)| Listed::at(index, key, revision))
                    .collect(),
            });
        }
        let mut found = Vec::new();
        for (key, version) in index.state(revision) {
            let record = index.record(version)?;
            if search.matches(&KeyValue::decode(&record)?, keys) {
                found.push((key, version));
            }
        }
        Ok(Self::collect(index, revision, found.into_iter()))
    }
}

/// What is searched for.
#[derive(Debug)]
pub(in crate::explore) enum Search {
    /// Words in names, at all times.
    Names(NameSearch),
    /// Labels.
    Labels(Selector),
    /// A text in the object, in any case. Values of Secrets are left out.
    Content(String),
}

impl Search {
    /// Parses a search: `within` is `names`, `labels` or `content`.
    ///
    /// # Errors
    /// `Usage`.
    pub(in crate::explore) fn parse(text: &str, within: &str) -> Result<Self> {
        let lower = text.to_lowercase();
        match within {
            "names" => Ok(Search::Names(NameSearch::parse(text))),
            "labels" => match text.parse() {
                Ok(selector) => Ok(Search::Labels(selector)),
                Err(e) => Err(Reason::Usage.error(e.to_string())),
            },
            "content" => Ok(Search::Content(lower)),
            _ => Err(Reason::Usage.error("search in names, labels or content")),
        }
    }

    fn matches(&self, kv: &KeyValue<'_>, keys: &EncryptionKeys) -> bool {
        let object = Object::of_record_with(kv, keys, Detail::WithoutManagers);
        match (self, object) {
            (Search::Names(_), _) | (Search::Labels(_), Err(_)) => false,
            (Search::Labels(selector), Ok(object)) => selector.matches(labels(&object.json)),
            (Search::Content(part), Ok(mut object)) => {
                object.hide_secrets();
                yaml::from_object(&object.json)
                    .to_lowercase()
                    .contains(part)
            }
            (Search::Content(part), Err(e)) => {
                let is_readable = !matches!(e, NotDecoded::Encrypted { .. });
                is_readable
                    && String::from_utf8_lossy(kv.value)
                        .to_lowercase()
                        .contains(part)
            }
        }
    }
}
