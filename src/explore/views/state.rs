//! What exists at a moment: the tree with its counts, lists, and search.

use super::At;
use crate::base::time::rfc3339;
use crate::error::{Reason, Result};
use crate::explore::index::{Index, Key, Version};
use crate::explore::kinds::KindId;
use crate::mvcc::{KeyValue, Revision};
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

/// Which objects of a state are listed.
#[derive(Debug, Default)]
pub(in crate::explore) struct Filter {
    /// Only those of this namespace; empty for objects without one.
    pub(in crate::explore) namespace: Option<String>,
    /// Only those of this kind.
    pub(in crate::explore) kind: Option<KindId>,
    /// Only keys that are no objects.
    pub(in crate::explore) is_other: bool,
    /// How many of the first are left out.
    pub(in crate::explore) offset: usize,
}

impl Objects {
    pub(in crate::explore) fn of(index: &Index, revision: Revision, filter: &Filter) -> Self {
        let matches = |key: &Key| {
            filter
                .namespace
                .as_ref()
                .is_none_or(|n| n == key.namespace())
                && filter.kind.is_none_or(|kind| key.kind == Some(kind))
                && key.kind.is_none() == filter.is_other
        };
        let state = index.state(revision).filter(|(key, _)| matches(key));
        Self::collect(index, revision, state, filter.offset)
    }

    fn collect<'i>(
        index: &'i Index,
        revision: Revision,
        found: impl Iterator<Item = (&'i Key, &'i Version)>,
        offset: usize,
    ) -> Self {
        let (mut total, mut objects) = (0, Vec::new());
        for (key, version) in found {
            if total >= offset && objects.len() < MAX_LISTED {
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

    /// Searches a state; names at all times. What is not in the state comes later, and Events at the end.
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
            let mut found: Vec<&Key> = (index.keys.iter())
                .filter(|key| is_named(index, key, words))
                .collect();
            let is_event = |key: &Key| index.kind(key).is_some_and(|kind| kind.kind == "Event");
            found.sort_by_cached_key(|key| {
                let is_absent = index.at(key, revision).is_none();
                (is_event(key), is_absent)
            });
            let shown = found.iter().take(MAX_LISTED);
            return Ok(Objects {
                at: At::of(index, revision),
                total: found.len(),
                objects: shown
                    .filter_map(|key| Listed::at(index, key, revision))
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
        Ok(Self::collect(index, revision, found.into_iter(), 0))
    }
}

/// What is searched for.
#[derive(Debug)]
pub(in crate::explore) enum Search {
    /// Words in the kind, the namespace or the name, all of them, in any case.
    Names(Vec<String>),
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
            "names" => Ok(Search::Names(
                lower.split_whitespace().map(str::to_owned).collect(),
            )),
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

/// Whether all words are in the kind or the key.
fn is_named(index: &Index, key: &Key, words: &[String]) -> bool {
    let kind = index.kind(key).map_or("", |kind| &kind.kind).to_lowercase();
    let path = String::from_utf8_lossy(&key.bytes).to_lowercase();
    words
        .iter()
        .all(|word| kind.contains(word) || path.contains(word))
}
