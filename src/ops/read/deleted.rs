//! Finds what was deleted between two points of a timeline, also if it was created in between.
//!
//! The changes of the window are read once and sorted by key, and then walked beside both states, which tell what a
//! deletion that no snapshot records took away.

use super::diff::Side;
use super::versions::{FoundVersion, moments, read_between};
use super::{Keys, SORT_BUFFER_BYTES, kinds};
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::opt::SINCE;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::reference::KindsOf;
use crate::objects::resource::{KeyNames, Resource};
use crate::objects::{Detail, EncryptionKeys, Object};
use crate::prefix::open::BackupLocation;
use crate::prefix::open::State;
use crate::prefix::select::{At, StateRequest};
use crate::prefix::set_aside::{Purpose, decide_again};
use crate::prefix::warn;
use chrono::{DateTime, Utc};
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
    /// If `time` is `None`, when the first snapshot after the deletion was taken; `None` if that is unknown, too.
    pub not_after: Option<DateTime<Utc>>,
    /// The newest revision at which it was there and not about to be deleted: a namespace empties while it is; `None` if no
    /// snapshot records the deletion.
    pub before: Option<Revision>,
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
    /// The revision of the first state; 0 if all that the backup holds was read.
    pub from: Revision,
    /// The second state.
    pub to: State,
    /// The kinds of objects: Kubernetes' own, and those that the states define.
    pub resources: Vec<Resource>,
    /// The keys.
    pub keys: Vec<DeletedKey>,
    /// Number of deleted Events that are not among the keys.
    pub events: u64,
    /// Warnings for the report.
    pub warnings: Vec<String>,
}

/// A change of a key in the window, as it is sorted.
#[derive(Debug, Serialize, Deserialize)]
struct WindowChange {
    main: Revision,
    sub: u32,
    /// `None` if only a full holds the change.
    time: Option<String>,
    is_deletion: bool,
    /// Whether the object has a deletionTimestamp.
    is_terminating: bool,
    owner: Option<Owner>,
}

impl Deleted {
    /// Reads the deletions of the keys of a range, which `range` chooses by the kinds of objects, after the state `from`, or
    /// all that the backup holds. `prefixes` are those of the API servers, and `keys` open what they have encrypted. With
    /// `count_events`, Events are only counted.
    ///
    /// # Errors
    /// `TooLarge` if there are more than a million; those of `range`; as [`State::open`] and [`State::for_each_live`].
    pub fn read(
        backup: &BackupLocation,
        from: Option<&StateRequest>,
        to: &StateRequest,
        prefixes: &EtcdPrefixes,
        range: impl Fn(&[Resource]) -> Result<KeyRange>,
        keys: &EncryptionKeys,
        count_events: bool,
    ) -> Result<Self> {
        decide_again([backup.context()], Purpose::Read, || {
            Self::try_read(backup, from, to, prefixes, &range, keys, count_events)
        })
    }

    fn try_read(
        backup: &BackupLocation,
        from: Option<&StateRequest>,
        to_request: &StateRequest,
        prefixes: &EtcdPrefixes,
        range: &dyn Fn(&[Resource]) -> Result<KeyRange>,
        keys: &EncryptionKeys,
        count_events: bool,
    ) -> Result<Self> {
        let ctx = backup.context();
        let (to, scan) = backup.open_with_scan(to_request)?;
        let mut warnings = to.warnings.clone();
        let is_later = |at: At| matches!(at, At::Revision(r) if r > to.revision);
        let is_unknown = |e: &Error| matches!(e.reason(), Reason::OutOfRange | Reason::RevisionGap);
        let from = match from.map(|request| (request, backup.open(request))) {
            None => None,
            Some((_, Ok(from))) => Some(from),
            Some((request, Err(e))) if is_unknown(&e) && !is_later(request.at) => {
                let why = match e.reason() {
                    Reason::RevisionGap => format!("snapshots are missing at {SINCE}"),
                    _ => format!("{SINCE} is before the oldest state of the backup"),
                };
                let cut = format!("{why}: all deletions that the backup holds are shown");
                warn(&mut warnings, cut);
                None
            }
            Some((_, Err(e))) => return Err(e),
        };
        let mut resources: Vec<Resource> = Resource::built_in().collect();
        for state in from.iter().chain([&to]) {
            let custom = kinds(backup, state, KindsOf::State, prefixes)?.into_iter();
            let new: Vec<Resource> = custom.filter(|r| !resources.contains(r)).collect();
            resources.extend(new);
        }
        let range = match range(&resources) {
            // Of a kind that neither state has.
            Err(e) if e.reason() == Reason::KeyNotFound => {
                resources.extend(kinds(backup, &to, KindsOf::AllTimes, prefixes)?);
                range(&resources)?
            }
            range => range?,
        };
        let side = |source| {
            let keys = Keys::read(ctx, source, range.clone())?;
            let mut side = Side { keys, ended: false };
            side.advance()?;
            Ok::<_, Error>(side)
        };
        let sorter = Mutex::new(Sorter::new(ctx.temp(), SORT_BUFFER_BYTES));
        let add = |version: FoundVersion<'_>| add_change(&sorter, &version, keys);
        let after = from.as_ref().map_or(Revision(0), |from| from.revision);
        let moments = match &scan {
            Some(scan) => {
                let between = (after.next(), to.revision);
                read_between(ctx, Some(scan), &to, between, &range, add)?;
                let timeline = scan.timelines.by_id(&to.timeline)?;
                moments(&scan.catalog, timeline)
            }
            None => {
                read_between(ctx, None, &to, (after.next(), to.revision), &range, add)?;
                let taken = backup.file().and_then(|file| file.created);
                taken.map(|at| (to.base.revision, at)).into_iter().collect()
            }
        };
        let mut walk = Walk {
            old: from.as_ref().map(side).transpose()?,
            new: side(&to)?,
            changes: unpoisoned(sorter.into_inner()).finish()?,
            changes_ended: false,
            object_keys: keys,
            base: to.base.revision,
            moments,
        };
        walk.advance_changes()?;
        let (mut deleted, mut events) = (Vec::new(), 0);
        let names = KeyNames::new(Resource::built_in().filter(is_event), prefixes);
        while let Some(key) = walk.next()? {
            ctx.store.cancel().check()?;
            let Some(key) = key else {
                continue;
            };
            // There may be millions of them.
            if count_events && names.object(&key.key).is_some() {
                events += 1;
                continue;
            }
            deleted.push(key);
            if deleted.len() > MAX_DELETED {
                return Err(Reason::TooLarge.error(format!(
                    "more than {MAX_DELETED} keys were deleted: give a shorter time, a kind or a namespace"
                )));
            }
        }
        deleted.sort_by_key(|d| d.revision);
        Ok(Deleted {
            from: after,
            to,
            resources,
            keys: deleted,
            events,
            warnings,
        })
    }
}

/// Both states and the changes in between, each sorted by key.
struct Walk<'k> {
    /// `None` if the walk begins with the first change.
    old: Option<Side>,
    new: Side,
    changes: Sorted,
    changes_ended: bool,
    object_keys: &'k EncryptionKeys,
    /// The revision of the full of the second state: it lacks what was deleted without a record.
    base: Revision,
    /// The last revisions of snapshots, and when these were taken.
    moments: Vec<(Revision, DateTime<Utc>)>,
}

impl Walk<'_> {
    fn advance_changes(&mut self) -> Result<()> {
        self.changes_ended = self.changes_ended || !self.changes.advance()?;
        Ok(())
    }

    /// Moves to the next key that the first state or a change has. Returns the key if it was deleted; the outer `None` is
    /// the end.
    fn next(&mut self) -> Result<Option<Option<DeletedKey>>> {
        let old = self.old.as_ref().filter(|old| !old.ended);
        let old = old.map(|old| old.keys.key());
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
        let is_in_new = has(&self.new);
        let old = self.old.as_mut().filter(|old| has(old));
        // What was deleted after the last change that is recorded, was deleted without a record.
        let last = match changes.last() {
            Some(change) if !change.is_deletion && !is_in_new => None,
            _ => changes.iter().rposition(|change| change.is_deletion),
        };
        let mut deleted = None;
        if last.is_some() || !is_in_new {
            let before = &changes[..last.unwrap_or(changes.len())];
            let last_put = before.iter().rev().find(|change| !change.is_deletion);
            let owner = match (last_put, &old) {
                (Some(put), _) => put.owner.clone(),
                (None, Some(old)) => owner_of(&old.keys.current()?, self.object_keys),
                (None, None) => None,
            };
            let deletion = last.map(|last| &changes[last]);
            let revision = deletion.map(|d| d.main);
            let time = deletion.and_then(|d| d.time.clone());
            let not_after = if time.is_none() {
                first_snapshot_after(&self.moments, revision.unwrap_or(self.base))
            } else {
                None
            };
            let terminating = before.iter().rev().take_while(|c| c.is_terminating).last();
            deleted = Some(DeletedKey {
                before: terminating
                    .map(|c| c.main)
                    .or(revision)
                    .map(Revision::previous),
                not_after,
                revision,
                time,
                owner,
                is_recreated: is_in_new,
                key,
            });
        }
        if let Some(old) = old {
            old.advance()?;
        }
        Ok(Some(deleted))
    }
}

/// Returns when the first snapshot was taken that reaches a revision.
fn first_snapshot_after(
    moments: &[(Revision, DateTime<Utc>)],
    revision: Revision,
) -> Option<DateTime<Utc>> {
    let after = moments.iter().filter(|(last, _)| *last >= revision);
    after.map(|(_, taken)| *taken).min()
}

fn is_event(resource: &Resource) -> bool {
    resource.kind == "Event"
}

/// Adds a change to those that are sorted by key.
fn add_change(
    sorter: &Mutex<Sorter>,
    version: &FoundVersion<'_>,
    keys: &EncryptionKeys,
) -> Result<()> {
    let (main, sub) = version.revision;
    let object = version.kv.and_then(|kv| object_of(kv, keys));
    let change = WindowChange {
        main,
        sub,
        time: version.time.map(|(text, _)| text.to_owned()),
        is_deletion: version.kv.is_none(),
        is_terminating: object.as_ref().is_some_and(|object| {
            let metadata = object.json.get("metadata");
            metadata.is_some_and(|m| m.get("deletionTimestamp").is_some_and(|at| !at.is_null()))
        }),
        owner: object.as_ref().and_then(owner_in),
    };
    lock(sorter).push(version.key, &encode(&change)?)
}

/// Returns the owner of an object: the controller, or the first one.
pub(crate) fn owner_of(kv: &KeyValue<'_>, keys: &EncryptionKeys) -> Option<Owner> {
    owner_in(&object_of(kv, keys)?)
}

fn object_of(kv: &KeyValue<'_>, keys: &EncryptionKeys) -> Option<Object> {
    Object::of_record_with(kv, keys, Detail::WithoutManagers).ok()
}

fn owner_in(object: &Object) -> Option<Owner> {
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
