//! Reads the objects of a backup that are to be recovered.

use super::plan::Selected;
use crate::error::Result;
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::reference::KindsOf;
use crate::objects::resource::{KeyNames, Resource};
use crate::objects::{Detail, EncryptionKeys, Object};
use crate::ops::read::deleted::DeletedKey;
use crate::ops::read::stream::{KeyChange, RECORD, VersionStream};
use crate::ops::read::{self, Keys, check_size, kinds};
use crate::prefix::open::{BackupLocation, State};
use std::collections::{BTreeSet, HashMap};

/// Returns the objects of a state in a range that match. One that was about to be deleted is taken as it was before; in a
/// namespace that was, others may lack, so that is added to `warnings`.
///
/// # Errors
/// `TooLarge` for more than 256 MiB; as [`State::for_each_live`].
pub fn at(
    backup: &BackupLocation,
    state: &State,
    range: KeyRange,
    is_named: bool,
    keys: &EncryptionKeys,
    matches: &dyn Fn(&KeyValue<'_>) -> bool,
    warnings: &mut Vec<String>,
) -> Result<Vec<Selected>> {
    let ctx = backup.context();
    let mut live = Keys::read(ctx, state, range)?;
    let (mut selected, mut bytes) = (Vec::new(), 0);
    while live.advance()? {
        ctx.store.cancel().check()?;
        let kv = live.current()?;
        if !matches(&kv) {
            continue;
        }
        bytes += kv.value.len();
        check_size(bytes)?;
        selected.push(Selected::of(&kv, is_named, keys));
    }
    let terminating = selected.iter().filter(|one| one.is_terminating());
    let terminating: BTreeSet<Vec<u8>> = terminating.map(|one| one.key.clone()).collect();
    if terminating.is_empty() {
        return Ok(selected);
    }
    let mut before = before_deletion(backup, state, KeyRange::Keys(terminating), keys)?;
    for one in &mut selected {
        let Some((object, since)) = before.remove(&one.key) else {
            continue;
        };
        if object.kind() == "Namespace" {
            warnings.push(format!(
                "the namespace {} was being deleted from revision {since} on, so what was in it may lack: give --revision {}",
                object.metadata_text("name"),
                since.previous()
            ));
        }
        one.object = Ok(object);
    }
    Ok(selected)
}

/// Returns the last versions of objects before they had a deletionTimestamp, and the revisions since which they have it.
fn before_deletion(
    backup: &BackupLocation,
    state: &State,
    range: KeyRange,
    keys: &EncryptionKeys,
) -> Result<HashMap<Vec<u8>, (Object, Revision)>> {
    let timeline = backup.file().is_none().then_some(state.timeline.as_str());
    let mut versions = VersionStream::by_key(backup, timeline, &range, RECORD)?;
    let mut last: HashMap<Vec<u8>, (Object, Revision)> = HashMap::new();
    while let Some(version) = versions.next()? {
        if version.revision > state.revision {
            continue;
        }
        let KeyChange::Put(record) = version.change else {
            last.remove(version.key);
            continue;
        };
        let kv = KeyValue::decode(record)?;
        let object = Object::of_record_with(&kv, keys, Detail::WithoutManagers);
        match (object, last.get_mut(version.key)) {
            (Ok(object), _) if !object.is_terminating() => {
                last.insert(version.key.to_vec(), (object, Revision(0)));
            }
            (_, Some((_, since))) if *since == Revision(0) => *since = version.revision,
            _ => {}
        }
    }
    Ok(last)
}

impl Selected {
    fn of(kv: &KeyValue<'_>, is_named: bool, keys: &EncryptionKeys) -> Self {
        let object = Object::of_record_with(kv, keys, Detail::WithoutManagers);
        Selected {
            key: kv.key.to_vec(),
            object: object.map_err(|e| e.to_string()),
            is_named,
        }
    }

    /// Returns a deleted object as it was before.
    ///
    /// # Errors
    /// `CorruptSnapshot`.
    pub fn of_deleted(deleted: &DeletedKey, is_named: bool, keys: &EncryptionKeys) -> Result<Self> {
        if deleted.record.is_empty() {
            return Ok(Selected {
                key: deleted.key.clone(),
                object: Err("no snapshot holds it as it was before its deletion".to_owned()),
                is_named,
            });
        }
        Ok(Selected::of(
            &KeyValue::decode(&deleted.record)?,
            is_named,
            keys,
        ))
    }

    fn is_terminating(&self) -> bool {
        self.object.as_ref().is_ok_and(Object::is_terminating)
    }
}

/// Returns the names of all objects that were selected: kinds beside Kubernetes' own are looked up if there are any.
///
/// # Errors
/// As [`kinds`].
pub fn names(
    backup: &BackupLocation,
    state: &State,
    selected: &[Selected],
    prefixes: &EtcdPrefixes,
) -> Result<KeyNames> {
    let mut all: Vec<Resource> = Resource::built_in().collect();
    for of in [KindsOf::State, KindsOf::AllTimes] {
        let names = KeyNames::new(all.iter().cloned(), prefixes);
        if selected.iter().all(|one| names.object(&one.key).is_some()) {
            return Ok(names);
        }
        all.extend(kinds(backup, state, of, prefixes)?);
    }
    Ok(KeyNames::new(all, prefixes))
}

/// Returns the UID of the namespace `kube-system`, which each cluster has another one of; `None` if the state lacks it.
///
/// # Errors
/// As [`read::get`].
pub fn cluster_uid(
    backup: &BackupLocation,
    state: &State,
    prefixes: &EtcdPrefixes,
    keys: &EncryptionKeys,
) -> Result<Option<String>> {
    let names = prefixes.namespace_keys("kube-system");
    let mut uid = None;
    read::get(backup.context(), state, &names, |kv| {
        let object = Object::of_record_with(kv, keys, Detail::WithoutManagers);
        uid = object.ok().map(|o| o.metadata_text("uid").to_owned());
        Ok(())
    })?;
    Ok(uid.filter(|uid| !uid.is_empty()))
}
