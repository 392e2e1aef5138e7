//! Deletion of objects. A locked object stays: in a bucket with versioning a deletion is not refused, it only
//! hides the object behind a delete marker, so its retention is read first.
//!
//! Knows paths only.

use super::{RemovalResult, RemovalStatus, in_parallel};
use crate::error::{Reason, Result};
use crate::prefix::Context;
use crate::store::{Store, Versioning};
use chrono::{DateTime, Utc};

/// The time until which an object is locked; `None` for a legal hold, which somebody has to lift.
type LockedUntil = Option<DateTime<Utc>>;

/// Deletes objects of one bucket.
pub(super) struct Deleter<'a> {
    store: &'a Store,
    /// The earlier of the known clocks: a lock is over only if it is by both.
    now: DateTime<Utc>,
    /// Whether the bucket may keep a version of a deleted object. Only such buckets have locks.
    pub(super) may_keep_versions: bool,
}

impl<'a> Deleter<'a> {
    /// Asks the store whether it keeps versions.
    ///
    /// # Errors
    /// Fails with the errors of [`Store::versioning`].
    pub(super) fn new(
        ctx: &'a Context,
        now: DateTime<Utc>,
        warnings: &mut Vec<String>,
    ) -> Result<Self> {
        let versioning = ctx.store.versioning()?;
        if let Versioning::Unknown(why) = &versioning {
            warnings.push(format!(
                "it is not known whether the bucket keeps versions of deleted objects: {why}"
            ));
        }
        Ok(Deleter {
            store: &ctx.store,
            now,
            may_keep_versions: versioning != Versioning::Off,
        })
    }

    /// Returns `Some` if the object is locked.
    pub(super) fn locked(&self, path: &str) -> Result<Option<LockedUntil>> {
        let Some(until) = unless_gone(self.store.retained_until(path))? else {
            return Ok(None);
        };
        if until.is_some_and(|until| until > self.now) {
            return Ok(Some(until));
        }
        let held = unless_gone(self.store.legal_hold(path))?;
        Ok(held.unwrap_or(false).then_some(None))
    }

    /// Deletes objects. Returns the result of each.
    ///
    /// # Errors
    /// Fails with `Terminated` only.
    pub(super) fn delete(&self, paths: &[String]) -> Result<Vec<RemovalResult>> {
        if self.may_keep_versions {
            let results = in_parallel(paths, |path| self.delete_unless_locked(path));
            self.store.cancel().check()?;
            return Ok(results);
        }
        let mut results = Vec::with_capacity(paths.len());
        self.store.delete_all(paths, |_, result| {
            results.push(unless_kept(result.map(|()| (RemovalStatus::Done, None))))
        })?;
        Ok(results)
    }

    fn delete_unless_locked(&self, path: &str) -> RemovalResult {
        // Deleting a missing object would leave a delete marker.
        let Some(version) = unless_gone(self.store.current_version(path))? else {
            return Ok((RemovalStatus::Done, None));
        };
        if let Some(until) = self.locked(path)? {
            return Ok((RemovalStatus::Locked, until));
        }
        let status = match version {
            Some(_) => RemovalStatus::Hidden,
            None => RemovalStatus::Done,
        };
        unless_kept(self.store.delete(path).map(|()| (status, None)))
    }
}

/// Turns the refusal of a store that keeps an object by a policy, and does not say until when, into `Locked`.
fn unless_kept(result: RemovalResult) -> RemovalResult {
    match result {
        Err(e) if e.reason() == Reason::ObjectLocked => Ok((RemovalStatus::Locked, None)),
        result => result,
    }
}

/// Turns the error for an object that is gone into `None`.
fn unless_gone<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(e) if e.reason() == Reason::SnapshotVanished => Ok(None),
        result => result.map(Some),
    }
}
