//! What changed between two moments, one line a change: the lines of `deltafold log`.

use super::At;
use super::state::Listed;
use crate::error::Result;
use crate::explore::index::{Index, Key, Version};
use crate::explore::kinds::KindId;
use crate::mvcc::{KeyValue, Revision};
use crate::objects::names::NameSearch;
use crate::objects::{Detail, EncryptionKeys, Object};
use crate::ops::read::log::{Happened, Summary};
use serde::Serialize;
use std::cmp::Reverse;

/// The most lines of an answer.
const MAX_LINES: usize = 500;

/// What changed between two moments.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Lines {
    from: At,
    to: At,
    /// The number of all changes that match.
    total: usize,
    /// Whether changes of Events and Leases are left out: they happen all the time.
    has_omitted: bool,
    /// Some of them, newest first.
    lines: Vec<Line>,
}

/// A change.
#[derive(Debug, Serialize)]
struct Line {
    #[serde(flatten)]
    object: Listed,
    #[serde(flatten)]
    summary: Summary,
    /// Whether a snapshot records it. If not, a full that lacks the key tells that it was deleted.
    recorded: bool,
    /// The revision of the version before; null if there is none.
    before: Option<Revision>,
}

/// Which changes are listed.
pub(in crate::explore) struct Filter {
    /// Only those of this namespace; empty for objects without one.
    pub(in crate::explore) namespace: Option<String>,
    /// Only those of this kind.
    pub(in crate::explore) kind: Option<KindId>,
    /// Only these.
    pub(in crate::explore) only: Option<Happened>,
    /// Only those whose keys have these words.
    pub(in crate::explore) words: NameSearch,
    /// How many of the newest are left out.
    pub(in crate::explore) offset: usize,
}

impl Filter {
    /// Whether changes of a key are listed; `None` if they are left out unless they are asked for.
    fn matches(&self, index: &Index, key: &Key) -> Option<bool> {
        let resource = key.kind.and_then(|kind| index.kinds.resource(kind));
        let is_frequent = resource.is_some_and(|resource| resource.changes_all_the_time());
        let namespace = self.namespace.as_deref();
        let is_meant = namespace.is_none_or(|namespace| namespace == key.namespace())
            && self.kind.is_none_or(|kind| key.kind == Some(kind))
            && self.words.rank(resource, &key.bytes).is_some();
        (!is_meant || !is_frequent || self.kind.is_some()).then_some(is_meant)
    }
}

impl Lines {
    /// Lists the changes after a revision, up to another one.
    ///
    /// # Errors
    /// `Io`.
    pub(in crate::explore) fn of(
        index: &Index,
        keys: &EncryptionKeys,
        from: Revision,
        to: Revision,
        filter: &Filter,
    ) -> Result<Self> {
        let mut found: Vec<(Revision, &Key, usize)> = Vec::new();
        let mut has_omitted = false;
        for key in &index.keys {
            let versions = index.versions(key);
            let first = versions.partition_point(|v| v.revision <= from);
            let end = versions.partition_point(|v| v.revision <= to);
            if first >= end {
                continue;
            }
            match filter.matches(index, key) {
                Some(true) => {}
                Some(false) => continue,
                None => {
                    has_omitted = true;
                    continue;
                }
            }
            let is_wanted = |version: &Version| match filter.only {
                None => true,
                Some(Happened::Deleted) => version.is_deletion(),
                Some(Happened::Created) => version.is_creation,
                Some(Happened::Changed) => !version.is_deletion() && !version.is_creation,
            };
            let all = (first..end).filter(|nth| is_wanted(&versions[*nth]));
            found.extend(all.map(|nth| (versions[nth].revision, key, nth)));
        }
        let total = found.len();
        found.sort_by_key(|(revision, ..)| Reverse(*revision));
        let shown = found.into_iter().skip(filter.offset).take(MAX_LINES);
        let lines = shown.map(|(_, key, nth)| Line::of(index, keys, key, nth));
        Ok(Lines {
            from: At::of(index, from),
            to: At::of(index, to),
            total,
            has_omitted,
            lines: lines.collect::<Result<_>>()?,
        })
    }
}

impl Line {
    fn of(index: &Index, keys: &EncryptionKeys, key: &Key, nth: usize) -> Result<Self> {
        let versions = index.versions(key);
        let version = &versions[nth];
        let before = nth.checked_sub(1).and_then(|before| versions.get(before));
        let before = before.filter(|before| !before.is_deletion());
        let decode = |record: &[u8]| -> Result<Option<Object>> {
            let kv = KeyValue::decode(record)?;
            Ok(Object::of_record_with(&kv, keys, Detail::ManagersAlone).ok())
        };
        let old = before.map(|before| index.record(before)).transpose()?;
        let old = old.as_deref().map(decode).transpose()?.flatten();
        let summary = if version.is_deletion() {
            Summary::of_deletion(old.as_ref())
        } else {
            let record = index.record(version)?;
            let object = decode(&record)?;
            Summary::of_put(
                &KeyValue::decode(&record)?,
                object.as_ref(),
                old.as_ref(),
                false,
            )
        };
        Ok(Line {
            object: Listed::of(index, key, version),
            summary,
            recorded: !version.is_inferred,
            before: before.map(|before| before.revision),
        })
    }
}
