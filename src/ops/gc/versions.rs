//! Deletion in buckets that keep versions: locked versions stay, all others are deleted one by one.
//!
//! Knows paths and versions only, and touches no object that is not deltafold's. Called by
//! `ops::gc::apply`.

use super::{Decision, Kind, Object, Options, RemovalResult, RemovalStatus, in_parallel};
use crate::backup::SnapshotName;
use crate::backup::catalog::{EXCLUDE_SUFFIX, PINS, REMOVED, TIMELINES, V1, V2, snapshot_name};
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::ops::verify::record::VERIFIED;
use crate::store::staging::{STAGING, is_abandoned};
use crate::store::{LOCKS, Store};
use crate::store::{ObjectVersion, UnfinishedUpload, Versioning};
use chrono::{DateTime, TimeDelta, Utc};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns whether a path is that of one of deltafold's objects.
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
        Some((LOCKS | VERIFIED, name)) => name.ends_with(".json") && !name.contains('/'),
        _ => false,
    }
}

/// Returns an incomplete upload's path in the outcome.
pub(super) fn upload_path(u: &UnfinishedUpload) -> String {
    format!("{}?uploadId={}", u.path, u.id)
}

/// Decides on an incomplete upload. Returns `None` if it is not deltafold's.
pub(super) fn decide_upload(
    u: &UnfinishedUpload,
    options: &Options,
    now: DateTime<Utc>,
) -> Option<Object> {
    if !is_ours(&u.path) {
        return None;
    }
    let is_old = now - u.begun > options.staging_age;
    let (decision, reason) = match is_old {
        true => (
            Decision::Delete,
            ("Abandoned", "an upload that was not completed"),
        ),
        false => (
            Decision::Keep,
            ("InUse", "an upload that may still be running"),
        ),
    };
    Some(Object::new(
        upload_path(u),
        Kind::Upload,
        0,
        decision,
        reason,
    ))
}

/// Whether the bucket keeps a version of a deleted object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeepsVersions {
    No,
    Yes,
    /// The bucket does not say; each object does.
    Unknown,
}

/// A bucket, with the versions that a normal listing does not show.
pub(super) struct VersionedBucket {
    keeps: KeepsVersions,
    /// The versions of the objects that are deleted now, by path; the current one last.
    to_delete: HashMap<String, Vec<ObjectVersion>>,
    /// The versions of objects that were deleted before, and of overwritten locks and verification records:
    /// by path, the delete marker last.
    old: Vec<ObjectVersion>,
    /// Versions cannot be listed or deleted, so a deletion only hides an object.
    cannot_delete_versions: AtomicBool,
}

/// The current version of an object.
struct Current {
    /// `Some` if it is locked.
    locked: Option<LockedUntil>,
    /// Whether a deletion only hides it.
    stays: bool,
}

/// The time until which a version is locked; `None` for a legal hold, which somebody has to lift.
type LockedUntil = Option<DateTime<Utc>>;

/// Reads the locks of versions.
pub(super) struct LockReader<'a> {
    store: &'a Store,
    /// The earlier of the known clocks: a lock is over only if it is by both.
    now: DateTime<Utc>,
}

impl<'a> LockReader<'a> {
    pub(super) fn new(ctx: &'a Context, now: DateTime<Utc>) -> Self {
        LockReader {
            store: &ctx.store,
            now,
        }
    }

    /// Returns a reader for which no lock is over: the store has just refused a deletion.
    fn ignoring_dates(&self) -> Self {
        LockReader {
            store: self.store,
            now: DateTime::<Utc>::MIN_UTC,
        }
    }

    /// Returns `Some` if a version is locked. `version` is `None` for the current one.
    fn read(&self, path: &str, version: Option<&str>) -> Result<Option<LockedUntil>> {
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

/// Turns the error for an object that is gone into `None`.
fn unless_gone<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(e) if e.reason() == Reason::SnapshotVanished => Ok(None),
        result => result.map(Some),
    }
}

impl VersionedBucket {
    /// Lists the versions of `to_delete`, and those of objects that were deleted long enough before
    /// `now`. Lists nothing if the bucket keeps no versions.
    pub(super) fn list(
        ctx: &Context,
        options: &Options,
        now: DateTime<Utc>,
        to_delete: &HashSet<&str>,
        warnings: &mut Vec<String>,
    ) -> Result<Self> {
        let mut bucket = VersionedBucket {
            keeps: KeepsVersions::No,
            to_delete: HashMap::new(),
            old: Vec::new(),
            cannot_delete_versions: AtomicBool::new(false),
        };
        match ctx.store.versioning()? {
            Versioning::Off => return Ok(bucket),
            Versioning::Unknown(why) => {
                warnings.push(format!(
                    "it is not known whether the bucket keeps versions of deleted objects: {why}"
                ));
                bucket.keeps = KeepsVersions::Unknown;
                return Ok(bucket);
            }
            Versioning::Enabled | Versioning::Suspended => bucket.keeps = KeepsVersions::Yes,
        }
        let retention = &options.retention;
        let purge_after = retention.purge_after.unwrap_or_default();
        let age = purge_after.max(options.staging_age);
        let is_old = |t: DateTime<Utc>| now - t > age;
        // A deleted snapshot may be needed for the restorable window, and may have been deleted by
        // mistake.
        let window = retention.restorable_window.unwrap_or_default();
        let was_deleted_long_ago = |t: DateTime<Utc>| now - t > age.max(window);
        let folders = [V2, V1, TIMELINES, PINS, REMOVED, STAGING, LOCKS, VERIFIED];
        // Some servers list delete markers and versions separately, so these are matched only after the
        // listing.
        let mut deleted: HashSet<String> = HashSet::new();
        let listed = ctx.store.each_version(&folders, |v| {
            if to_delete.contains(v.path.as_str()) {
                bucket.to_delete.entry(v.path.clone()).or_default().push(v);
            } else if is_ours(&v.path) {
                if v.is_latest && v.is_delete_marker && was_deleted_long_ago(v.modified) {
                    deleted.insert(v.path.clone());
                }
                if !v.is_latest || v.is_delete_marker {
                    bucket.old.push(v);
                }
            }
            Ok(())
        });
        match listed {
            Ok(()) => {}
            Err(e) if e.reason() == Reason::Terminated => return Err(e),
            Err(e) => {
                warnings.push(format!(
                    "the bucket keeps versions but does not list them, so deleted objects are only hidden: {e}"
                ));
                bucket.cannot_delete_versions = AtomicBool::new(true);
                // The listing may lack some versions of an object.
                bucket.to_delete.clear();
                deleted.clear();
                bucket.old.clear();
            }
        }
        bucket.old.retain(|v| {
            let is_overwritten = v.path.starts_with(LOCKS) || v.path.starts_with(VERIFIED);
            is_overwritten && !v.is_latest && is_old(v.modified) || deleted.contains(&v.path)
        });
        let age = |v: &ObjectVersion| (v.is_latest, v.modified);
        for versions in bucket.to_delete.values_mut() {
            versions.sort_by_key(age);
        }
        bucket
            .old
            .sort_by(|a, b| a.path.cmp(&b.path).then_with(|| age(a).cmp(&age(b))));
        Ok(bucket)
    }

    pub(super) fn may_keep_versions(&self) -> bool {
        self.keeps != KeepsVersions::No
    }

    /// Returns `Some` if a version of the object is locked, with the latest time.
    pub(super) fn locked(&self, locks: &LockReader, path: &str) -> Result<Option<LockedUntil>> {
        let Some(versions) = self.to_delete.get(path) else {
            return Ok(self.current(locks, path)?.and_then(|c| c.locked));
        };
        let mut locked = None;
        for v in versions.iter().filter(|v| !v.is_delete_marker) {
            if let Some(until) = locks.read(path, Some(&v.version))? {
                locked = locked.max(Some(until));
            }
        }
        Ok(locked)
    }

    /// Reads the current version of an object whose versions were not listed. Returns `None` if the
    /// object is gone.
    fn current(&self, locks: &LockReader, path: &str) -> Result<Option<Current>> {
        let Some(version) = unless_gone(locks.store.current_version(path))? else {
            return Ok(None);
        };
        // An object without a version cannot be locked.
        let stays = self.keeps == KeepsVersions::Yes || version.is_some();
        Ok(Some(Current {
            locked: match stays {
                true => locks.read(path, version.as_deref())?,
                false => None,
            },
            stays,
        }))
    }

    /// Deletes objects. Returns the result of each.
    ///
    /// # Errors
    /// Fails with `Terminated` only.
    pub(super) fn delete(
        &self,
        locks: &LockReader,
        paths: &[String],
    ) -> Result<Vec<RemovalResult>> {
        let store = locks.store;
        if self.keeps == KeepsVersions::No {
            let mut results = Vec::with_capacity(paths.len());
            store.delete_all(paths, |_, result| {
                results.push(result.map(|()| (RemovalStatus::Done, None)))
            })?;
            return Ok(results);
        }
        let results = in_parallel(paths, |path| self.delete_versions(locks, path));
        store.cancel().check()?;
        Ok(results)
    }

    fn delete_versions(&self, locks: &LockReader, path: &str) -> RemovalResult {
        let store = locks.store;
        let Some(versions) = self.to_delete.get(path) else {
            // Deleting a missing object would leave a delete marker.
            let Some(current) = self.current(locks, path)? else {
                return Ok((RemovalStatus::Done, None));
            };
            if let Some(until) = current.locked {
                return Ok((RemovalStatus::Locked, until));
            }
            store.delete(path)?;
            return Ok(match current.stays {
                true => (RemovalStatus::Hidden, None),
                false => (RemovalStatus::Done, None),
            });
        };
        if let Some(until) = self.locked(locks, path)? {
            return Ok((RemovalStatus::Locked, until));
        }
        if !self.cannot_delete_versions.load(Ordering::Relaxed) {
            // The current version goes last, or an older one would become current.
            let mut in_order = versions.iter();
            match in_order.try_for_each(|v| store.delete_version(path, &v.version)) {
                Ok(()) => return Ok((RemovalStatus::Done, None)),
                Err(e) if e.reason() == Reason::PermissionDenied => {
                    // It was locked a moment ago, or still is by the store's clock.
                    if let Some(until) = self.locked(&locks.ignoring_dates(), path)? {
                        return Ok((RemovalStatus::Locked, until));
                    }
                    self.cannot_delete_versions.store(true, Ordering::Relaxed);
                }
                Err(e) => return Err(e),
            }
        }
        store.delete(path)?;
        Ok((RemovalStatus::Hidden, None))
    }

    fn object(v: &ObjectVersion) -> Object {
        let explanation = match v.is_delete_marker {
            true => "the delete marker of an earlier deletion",
            false => {
                "a version of an object that was deleted before, or of an overwritten lock or record"
            }
        };
        let path = format!("{}?versionId={}", v.path, v.version);
        let reason = (super::plan::HIDDEN_VERSION, explanation);
        Object::new(path, Kind::Version, v.bytes, Decision::Delete, reason)
    }

    /// Returns the versions of objects that were deleted before, as objects to delete.
    pub(super) fn old_versions(&self) -> Vec<Object> {
        self.old.iter().map(Self::object).collect()
    }

    /// Deletes the versions of objects that were deleted before: of each object the oldest first and
    /// its delete marker last, so that no version becomes current again.
    ///
    /// # Errors
    /// Fails with `Terminated` only.
    pub(super) fn purge(&self, locks: &LockReader) -> Result<Vec<Object>> {
        let by_object: Vec<&[ObjectVersion]> = self.old.chunk_by(|a, b| a.path == b.path).collect();
        let purged = in_parallel(&by_object, |versions| purge_versions(locks, versions));
        locks.store.cancel().check()?;
        Ok(purged.into_iter().flatten().collect())
    }
}

/// Deletes the versions of one object, in their order.
fn purge_versions(locks: &LockReader, versions: &[ObjectVersion]) -> Vec<Object> {
    let mut has_left = false;
    let mut objects = Vec::new();
    for v in versions {
        // The delete marker stays while a version is left.
        let result = match v.is_latest && has_left {
            true => Ok((RemovalStatus::Waiting, None)),
            false => purge_version(locks, v),
        };
        has_left |= !matches!(result, Ok((RemovalStatus::Done, _)));
        let mut object = VersionedBucket::object(v);
        object.record(result);
        objects.push(object);
    }
    objects
}

/// Deletes a version, unless it is locked.
fn purge_version(locks: &LockReader, v: &ObjectVersion) -> RemovalResult {
    match try_purge_version(locks, v) {
        // Without the permission, nothing has changed.
        Err(e) if e.reason() == Reason::PermissionDenied => Ok((RemovalStatus::Hidden, None)),
        result => result,
    }
}

fn try_purge_version(locks: &LockReader, v: &ObjectVersion) -> RemovalResult {
    if !v.is_delete_marker
        && let Some(until) = locks.read(&v.path, Some(&v.version))?
    {
        return Ok((RemovalStatus::Locked, until));
    }
    locks.store.delete_version(&v.path, &v.version)?;
    Ok((RemovalStatus::Done, None))
}
