//! Deleting in buckets that keep versions: what is locked stays, the rest is deleted by version.
//!
//! It knows paths and versions only, and touches no name that is not ours. `apply` calls it.

use super::{Decision, Fate, Fated, Kind, Object, Options, in_parallel};
use crate::backup::SnapshotName;
use crate::backup::catalog::{EXCLUDE_SUFFIX, PINS, REMOVED, TIMELINES, V1, V2, snapshot_name};
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::store::staging::{STAGING, is_abandoned};
use crate::store::{LOCKS, Store};
use crate::store::{ObjectVersion, UnfinishedUpload, Versioning};
use chrono::{DateTime, TimeDelta, Utc};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether an object of this path is one of ours.
fn is_ours(path: &str) -> bool {
    let plain = path.strip_suffix(EXCLUDE_SUFFIX).unwrap_or(path);
    if snapshot_name(plain).is_some() {
        return true;
    }
    match path.split_once('/') {
        Some((TIMELINES | PINS | REMOVED, name)) => name.parse::<SnapshotName>().is_ok(),
        Some((STAGING, name)) => {
            let now = DateTime::UNIX_EPOCH;
            is_abandoned(name, now, now, TimeDelta::zero()).is_some()
        }
        Some((LOCKS, name)) => name.ends_with(".json") && !name.contains('/'),
        _ => false,
    }
}

/// An unfinished upload's path in the outcome.
pub(super) fn upload_path(u: &UnfinishedUpload) -> String {
    format!("{}?uploadId={}", u.path, u.id)
}

/// What is decided on an unfinished upload; `None` where it is none of ours.
pub(super) fn upload(
    u: &UnfinishedUpload,
    options: &Options,
    now: DateTime<Utc>,
) -> Option<Object> {
    if !is_ours(&u.path) {
        return None;
    }
    let is_old = now - u.begun > options.staging_age;
    let (decision, told) = match is_old {
        true => (
            Decision::Delete,
            ("Abandoned", "an upload that was not completed"),
        ),
        false => (Decision::Keep, ("InUse", "an upload that may go on")),
    };
    Some(Object::new(upload_path(u), Kind::Upload, 0, decision, told))
}

/// Whether what is deleted stays as a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeps {
    No,
    Yes,
    /// The store does not tell: each object does.
    Unknown,
}

/// What the bucket keeps beside what a listing shows.
pub(super) struct Hidden {
    keeps: Keeps,
    /// Of what goes now; the one that is seen is the last.
    of: HashMap<String, Vec<ObjectVersion>>,
    /// Behind earlier deletions and overwritten locks: by path, its mark last.
    old: Vec<ObjectVersion>,
    /// Versions cannot be deleted: a plain deletion hides.
    no_right: AtomicBool,
}

/// What is seen of an object.
struct Current {
    /// `Some` where it is locked.
    locked: Option<Until>,
    /// Whether a deletion only hides it.
    stays: bool,
}

/// Until when a version is locked; `None` where somebody has to lift it.
type Until = Option<DateTime<Utc>>;

/// Asks for locks.
pub(super) struct Lockings<'a> {
    store: &'a Store,
    /// The earlier of the clocks that are known: no lock is over before it is so by both.
    now: DateTime<Utc>,
}

impl<'a> Lockings<'a> {
    pub(super) fn new(ctx: &'a Context, now: DateTime<Utc>) -> Self {
        Lockings {
            store: &ctx.store,
            now,
        }
    }

    /// The same, that takes each lock for one that holds whatever its date: the store said so.
    fn of_any_date(&self) -> Self {
        Lockings {
            store: self.store,
            now: DateTime::<Utc>::MIN_UTC,
        }
    }

    /// `Some` where a version is locked, the current one if none is told.
    fn of(&self, path: &str, version: Option<&str>) -> Result<Option<Until>> {
        let Some(retention) = unless_gone(self.store.retention(path, version))? else {
            return Ok(None);
        };
        if let Some(r) = retention.filter(|r| r.until > self.now) {
            return Ok(Some(Some(r.until)));
        }
        let held = unless_gone(self.store.legal_hold(path, version))?;
        Ok(held.unwrap_or(false).then_some(None))
    }
}

/// What the store tells of an object; `None` if that is gone.
fn unless_gone<T>(told: Result<T>) -> Result<Option<T>> {
    match told {
        Err(e) if e.reason() == Reason::SnapshotVanished => Ok(None),
        told => told.map(Some),
    }
}

impl Hidden {
    /// Lists versions, where there are any: those of `goes`, and those behind earlier deletions that are
    /// old enough at `now`.
    pub(super) fn list(
        ctx: &Context,
        options: &Options,
        now: DateTime<Utc>,
        goes: &HashSet<&str>,
        warnings: &mut Vec<String>,
    ) -> Result<Self> {
        let mut hidden = Hidden {
            keeps: Keeps::No,
            of: HashMap::new(),
            old: Vec::new(),
            no_right: AtomicBool::new(false),
        };
        match ctx.store.versioning()? {
            Versioning::Off => return Ok(hidden),
            Versioning::Unknown(why) => {
                warnings.push(format!(
                    "whether the bucket keeps versions of what is deleted is not known: {why}"
                ));
                hidden.keeps = Keeps::Unknown;
                return Ok(hidden);
            }
            Versioning::Enabled | Versioning::Suspended => hidden.keeps = Keeps::Yes,
        }
        let retention = &options.retention;
        let purge_after = retention.purge_after.unwrap_or_default();
        let age = purge_after.max(options.staging_age);
        let is_old = |t: DateTime<Utc>| now - t > age;
        // It may be part of what was to stay restorable, and deleted by mistake.
        let window = retention.restorable_window.unwrap_or_default();
        let was_deleted_long_ago = |t: DateTime<Utc>| now - t > age.max(window);
        let folders = [V2, V1, TIMELINES, PINS, REMOVED, STAGING, LOCKS];
        // Some servers list the marks of deletions apart from the versions.
        let mut deleted: HashSet<String> = HashSet::new();
        let listed = ctx.store.each_version(&folders, |v| {
            if goes.contains(v.path.as_str()) {
                hidden.of.entry(v.path.clone()).or_default().push(v);
            } else if is_ours(&v.path) {
                if v.is_latest && v.is_delete_marker && was_deleted_long_ago(v.modified) {
                    deleted.insert(v.path.clone());
                }
                if !v.is_latest || v.is_delete_marker {
                    hidden.old.push(v);
                }
            }
            Ok(())
        });
        match listed {
            Ok(()) => {}
            Err(e) if e.reason() == Reason::Terminated => return Err(e),
            Err(e) => {
                warnings.push(format!(
                    "the bucket keeps versions and does not list them, so what is deleted is only hidden: {e}"
                ));
                hidden.no_right = AtomicBool::new(true);
                // Of what was listed by then the rest may be missing.
                hidden.of.clear();
                deleted.clear();
                hidden.old.clear();
            }
        }
        hidden.old.retain(|v| {
            let is_old_lock = v.path.starts_with(LOCKS) && !v.is_latest && is_old(v.modified);
            is_old_lock || deleted.contains(&v.path)
        });
        let age = |v: &ObjectVersion| (v.is_latest, v.modified);
        for versions in hidden.of.values_mut() {
            versions.sort_by_key(age);
        }
        hidden
            .old
            .sort_by(|a, b| a.path.cmp(&b.path).then_with(|| age(a).cmp(&age(b))));
        Ok(hidden)
    }

    pub(super) fn may_keep_versions(&self) -> bool {
        self.keeps != Keeps::No
    }

    /// Whether a version of it is locked, and until when.
    pub(super) fn locked(&self, lockings: &Lockings, path: &str) -> Result<Option<Until>> {
        let Some(versions) = self.of.get(path) else {
            return Ok(self.current(lockings, path)?.and_then(|c| c.locked));
        };
        let mut locked = None;
        for v in versions.iter().filter(|v| !v.is_delete_marker) {
            if let Some(until) = lockings.of(path, Some(&v.version))? {
                locked = locked.max(Some(until));
            }
        }
        Ok(locked)
    }

    /// Of an object whose versions are not known: what is seen of it; `None` where it is gone.
    fn current(&self, lockings: &Lockings, path: &str) -> Result<Option<Current>> {
        let Some(version) = unless_gone(lockings.store.current_version(path))? else {
            return Ok(None);
        };
        // What has no version cannot be locked.
        let stays = self.keeps == Keeps::Yes || version.is_some();
        Ok(Some(Current {
            locked: match stays {
                true => lockings.of(path, version.as_deref())?,
                false => None,
            },
            stays,
        }))
    }

    /// Deletes objects, and says of each what became of it.
    ///
    /// # Errors
    /// `Terminated`.
    pub(super) fn delete(&self, lockings: &Lockings, paths: &[String]) -> Result<Vec<Fated>> {
        let store = lockings.store;
        if self.keeps == Keeps::No {
            let mut fates = Vec::with_capacity(paths.len());
            store.delete_all(paths, |_, result| {
                fates.push(result.map(|()| (Fate::Done, None)))
            })?;
            return Ok(fates);
        }
        let fates = in_parallel(paths, |path| self.delete_versions(lockings, path));
        store.cancel().check()?;
        Ok(fates)
    }

    fn delete_versions(&self, lockings: &Lockings, path: &str) -> Fated {
        let store = lockings.store;
        let Some(versions) = self.of.get(path) else {
            // A deletion of nothing would leave a mark.
            let Some(current) = self.current(lockings, path)? else {
                return Ok((Fate::Done, None));
            };
            if let Some(until) = current.locked {
                return Ok((Fate::Locked, until));
            }
            store.delete(path)?;
            return Ok(match current.stays {
                true => (Fate::Hidden, None),
                false => (Fate::Done, None),
            });
        };
        if let Some(until) = self.locked(lockings, path)? {
            return Ok((Fate::Locked, until));
        }
        if !self.no_right.load(Ordering::Relaxed) {
            // The one that is seen goes last: no older one must come to light.
            let mut in_order = versions.iter();
            match in_order.try_for_each(|v| store.delete_version(path, &v.version)) {
                Ok(()) => return Ok((Fate::Done, None)),
                Err(e) if e.reason() == Reason::PermissionDenied => {
                    // It was locked a moment ago, or is so by the store's own clock.
                    if let Some(until) = self.locked(&lockings.of_any_date(), path)? {
                        return Ok((Fate::Locked, until));
                    }
                    self.no_right.store(true, Ordering::Relaxed);
                }
                Err(e) => return Err(e),
            }
        }
        store.delete(path)?;
        Ok((Fate::Hidden, None))
    }

    fn object(v: &ObjectVersion) -> Object {
        let explanation = match v.is_delete_marker {
            true => "the mark of an earlier deletion",
            false => "a version behind an earlier deletion, or an overwritten lock",
        };
        let path = format!("{}?versionId={}", v.path, v.version);
        let told = (super::plan::HIDDEN_VERSION, explanation);
        Object::new(path, Kind::Version, v.bytes, Decision::Delete, told)
    }

    /// What earlier deletions have hidden.
    pub(super) fn objects(&self) -> Vec<Object> {
        self.old.iter().map(Self::object).collect()
    }

    /// Purges what earlier deletions have hidden: of each object the oldest version first and its mark
    /// last, so that nothing comes to light again.
    ///
    /// # Errors
    /// `Terminated`.
    pub(super) fn purge(&self, lockings: &Lockings) -> Result<Vec<Object>> {
        let of: Vec<&[ObjectVersion]> = self.old.chunk_by(|a, b| a.path == b.path).collect();
        let purged = in_parallel(&of, |versions| purge_versions(lockings, versions));
        lockings.store.cancel().check()?;
        Ok(purged.into_iter().flatten().collect())
    }
}

/// Purges the versions of one object, in their order.
fn purge_versions(lockings: &Lockings, versions: &[ObjectVersion]) -> Vec<Object> {
    let mut left = false;
    let purged = versions.iter().map(|v| {
        // While something is behind it, the mark stays.
        let waits = v.is_latest && left;
        let fated = match waits {
            true => Ok((Fate::Waiting, None)),
            false => purge_version(lockings, v),
        };
        left |= !matches!(fated, Ok((Fate::Done, _)));
        let mut object = Hidden::object(v);
        object.ended(fated);
        object
    });
    purged.collect()
}

fn purge_version(lockings: &Lockings, v: &ObjectVersion) -> Fated {
    let purge = || -> Fated {
        if !v.is_delete_marker
            && let Some(until) = lockings.of(&v.path, Some(&v.version))?
        {
            return Ok((Fate::Locked, until));
        }
        lockings.store.delete_version(&v.path, &v.version)?;
        Ok((Fate::Done, None))
    };
    match purge() {
        // Without the right to it, it is as it was.
        Err(e) if e.reason() == Reason::PermissionDenied => Ok((Fate::Hidden, None)),
        fated => fated,
    }
}
