//! Finds what was deleted between two points of a timeline, also if it was created in between.
//!
//! The changes of the window are read once and sorted by key, and then walked beside both states, which tell what a
//! deletion that no snapshot records took away.

use super::diff::Side;
use super::versions::read_between;
use super::{Keys, SORT_BUFFER_BYTES, custom_resources};
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::resource::Resource;
use crate::objects::{Detail, EncryptionKeys, Object};
use crate::prefix::Context;
use crate::prefix::damage::up_to_damage;
use crate::prefix::open::BackupLocation;
use crate::prefix::open::State;
use crate::prefix::scan::Scan;
use crate::prefix::select::StateRequest;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Mutex;

/// The largest number of deletions that are held in memory.
const MAX_DELETED: usize = 1_000_000;

/// A key that was deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeletedKey {
    /// The key.
    pub key: Vec<u8>,
    /// The revision of the last deletion; `None` if no snapshot records it.
    pub revision: Option<Revision>,
    /// When the deletion was recorded in a delta (RFC 3339); `None` if no delta records it.
    pub time: Option<String>,
    /// The owner of the object, if it had one.
    pub owner: Option<Owner>,
    /// Whether the key exists again at the second point.
    pub is_recreated: bool,
}

/// The owner of an object.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Owner {
    /// The kind, such as `ReplicaSet`.
    pub kind: String,
    /// The name.
    pub name: String,
}

/// The deletions of a window, in the order of their revisions; those without one come first.
pub struct Deleted {
    /// The first state.
    pub from: State,
    /// The second state.
    pub to: State,
    /// The kinds of objects: Kubernetes' own, and those that the first state defines.
    pub resources: Vec<Resource>,
    /// The keys.
    pub keys: Vec<DeletedKey>,
}

/// A change of a key in the window, as it is sorted.
#[derive(Debug, Serialize, Deserialize)]
struct WindowChange {
    main: Revision,
    sub: u32,
    /// `None` if only a full holds the change.
    time: Option<String>,
    is_deletion: bool,
    owner: Option<Owner>,
}

impl Deleted {
    /// Reads the deletions of the keys of a range, which `range` chooses by the kinds of objects. `prefixes` are those of the
    /// API servers, and `keys` open what they have encrypted.
    ///
    /// # Errors
    /// `TooLarge` if there are more than a million; those of `range`; as [`State::open`] and [`State::for_each_live`].
    pub fn read(
        backup: &BackupLocation,
        [from, to]: [&StateRequest; 2],
        prefixes: &EtcdPrefixes,
        range: impl Fn(&[Resource]) -> Result<KeyRange>,
        keys: &EncryptionKeys,
    ) -> Result<Self> {
        up_to_damage([backup.context()?], || {
            Self::try_read(backup, [from, to], prefixes, &range, keys)
        })
    }

    fn try_read(
        backup: &BackupLocation,
        [from, to]: [&StateRequest; 2],
        prefixes: &EtcdPrefixes,
        range: &dyn Fn(&[Resource]) -> Result<KeyRange>,
        keys: &EncryptionKeys,
    ) -> Result<Self> {
        let ctx = backup.context()?;
        let (from, _) = backup.open_with_scan(from)?;
        let mut resources: Vec<Resource> = Resource::built_in().collect();
        resources.extend(custom_resources(ctx, &from, prefixes)?);
        let range = range(&resources)?;
        let (to, scan) = backup.open_with_scan(to)?;
        let side = |source| {
            let keys = Keys::read(ctx, source, range.clone())?;
            let mut side = Side { keys, ended: false };
            side.advance()?;
            Ok::<_, Error>(side)
        };
        let mut walk = Walk {
            old: side(&from)?,
            new: side(&to)?,
            changes: window_changes(ctx, scan.as_ref(), &from, &to, &range, keys)?,
            changes_ended: false,
            object_keys: keys,
        };
        walk.advance_changes()?;
        let mut deleted = Vec::new();
        while let Some(key) = walk.next()? {
            ctx.store.cancel().check()?;
            deleted.extend(key);
            if deleted.len() > MAX_DELETED {
                return Err(Reason::TooLarge.error(format!(
                    "more than {MAX_DELETED} keys were deleted: give a shorter time, a kind or a namespace"
                )));
            }
        }
        deleted.sort_by_key(|d| d.revision);
        Ok(Deleted {
            from,
            to,
            resources,
            keys: deleted,
        })
    }
}

/// Both states and the changes in between, each sorted by key.
struct Walk<'k> {
    old: Side,
    new: Side,
    changes: Sorted,
    changes_ended: bool,
    object_keys: &'k EncryptionKeys,
}

impl Walk<'_> {
    fn advance_changes(&mut self) -> Result<()> {
        self.changes_ended = self.changes_ended || !self.changes.advance()?;
        Ok(())
    }

    /// Moves to the next key that the first state or a change has. Returns the key if it was deleted; the outer `None` is
    /// the end.
    fn next(&mut self) -> Result<Option<Option<DeletedKey>>> {
        let old = (!self.old.ended).then(|| self.old.keys.key());
        let changed = (!self.changes_ended).then(|| self.changes.current().0);
        let Some(key) = old.into_iter().chain(changed).min().map(<[u8]>::to_vec) else {
            return Ok(None);
        };
        let mut changes: Vec<WindowChange> = Vec::new();
        while !self.changes_ended && self.changes.current().0 == key {
            changes.push(decode(self.changes.current().1)?);
            self.advance_changes()?;
        }
        // A full and a delta may hold the same change, and the delta has its time.
        changes.sort_by_key(|change| (change.main, change.sub, change.time.is_some()));
        while !self.new.ended && self.new.keys.key() < key.as_slice() {
            self.new.advance()?;
        }
        let has = |side: &Side| !side.ended && side.keys.key() == key;
        let (is_in_old, is_in_new) = (has(&self.old), has(&self.new));
        let last = changes.iter().rposition(|change| change.is_deletion);
        let mut deleted = None;
        if last.is_some() || (is_in_old && !is_in_new) {
            let before = &changes[..last.unwrap_or(0)];
            let last_put = before.iter().rev().find(|change| !change.is_deletion);
            let owner = match last_put {
                Some(put) => put.owner.clone(),
                None if is_in_old => owner_of(&self.old.keys.current()?, self.object_keys),
                None => None,
            };
            let deletion = last.map(|last| &changes[last]);
            deleted = Some(DeletedKey {
                revision: deletion.map(|d| d.main),
                time: deletion.and_then(|d| d.time.clone()),
                owner,
                is_recreated: is_in_new,
                key,
            });
        }
        if is_in_old {
            self.old.advance()?;
        }
        Ok(Some(deleted))
    }
}

/// Reads the changes between two states, sorted by key.
fn window_changes(
    ctx: &Context,
    scan: Option<&Scan>,
    from: &State,
    to: &State,
    range: &KeyRange,
    keys: &EncryptionKeys,
) -> Result<Sorted> {
    let sorter = Mutex::new(Sorter::new(ctx.temp(), SORT_BUFFER_BYTES));
    let between = (from.revision.next(), to.revision);
    read_between(ctx, scan, to, between, range, |version| {
        let (main, sub) = version.revision;
        let change = WindowChange {
            main,
            sub,
            time: version.time.map(|(text, _)| text.to_owned()),
            is_deletion: version.kv.is_none(),
            owner: version.kv.and_then(|kv| owner_of(kv, keys)),
        };
        lock(&sorter).push(version.key, &encode(&change)?)
    })?;
    unpoisoned(sorter.into_inner()).finish()
}

/// Returns the owner of an object: the controller, or the first one.
pub(crate) fn owner_of(kv: &KeyValue<'_>, keys: &EncryptionKeys) -> Option<Owner> {
    let object = Object::of_record_with(kv, keys, Detail::WithoutManagers).ok()?;
    let owners = object.json.get("metadata")?.get("ownerReferences")?;
    let owners = owners.as_array()?;
    let controller = owners.iter().find(|owner| owner["controller"] == true);
    let owner = controller.or(owners.first())?;
    Some(Owner {
        kind: owner.get("kind")?.as_str()?.to_owned(),
        name: owner.get("name")?.as_str()?.to_owned(),
    })
}

fn encode(change: &WindowChange) -> Result<Vec<u8>> {
    serde_json::to_vec(change)
        .map_err(|e| Error::internal(format!("a change cannot be written as JSON: {e}")))
}

fn decode(change: &[u8]) -> Result<WindowChange> {
    serde_json::from_slice(change).map_err(|e| {
        Error::internal(format!(
            "a change in the temporary directory cannot be read back: {e}"
        ))
    })
}
