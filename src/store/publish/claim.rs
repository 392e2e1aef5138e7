//! Claims on names, for servers that ignore the condition of a write: writers keep out of each other's way.
//!
//! Before a writer names an object, it writes a claim to the name and lists all claims. It goes on only if it
//! sees no other claim, and keeps its own until the name is given. Of two writers that want one name at once,
//! at least one sees the other's claim or finds the name taken. Called by `publish`.

use crate::base::hash::short_hash;
use crate::base::random::random_word;
use crate::error::{Reason, Result};
use crate::store::Store;
use crate::store::capability::Capability;
use crate::store::errors::{is_taken, store_error};
use crate::store::s3::{CopyOutcome, RangeCopier};
use crate::store::staging::{STAGING, StagingName, is_left_behind};
use chrono::Utc;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{CopyMode, CopyOptions, Error as E, ObjectStore, ObjectStoreExt, PutPayload};
use std::time::Duration;

/// The content of a claim.
const CONTENT: &[u8] = b"claim";
/// Attempts to claim a name. After them, the name counts as taken.
const ATTEMPTS: u64 = 20;
/// The longest pause between two attempts, in milliseconds. Pauses are random.
const LONGEST_PAUSE_MS: u64 = 500;

/// A small object in the staging folder, which is deleted when this is dropped.
pub(super) struct Claim {
    store: Store,
    name: StagingName,
}

impl Claim {
    /// Claims the name `below`: waits until no other process claims it. Returns `None` if others do for too
    /// long.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `Terminated`.
    pub(super) fn take(store: &Store, below: &str) -> Result<Option<Claim>> {
        for _ in 0..ATTEMPTS {
            let claim = Claim::write(store, &hint(below))?;
            if !claim.has_rivals(below)? {
                return Ok(Some(claim));
            }
            drop(claim);
            let pause = Duration::from_millis(random_word() % LONGEST_PAUSE_MS);
            store.block_on(async { tokio::time::sleep(pause).await })?;
            if store.exists(below)? {
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Returns a claim that is not written yet. If an object of its name exists, dropping the claim deletes
    /// it.
    pub(super) fn unwritten(store: &Store, name: StagingName) -> Claim {
        Claim {
            store: store.clone(),
            name,
        }
    }

    /// Returns the claim's path below the store's prefix.
    pub(super) fn path(&self) -> &str {
        &self.name.path
    }

    fn write(store: &Store, hint: &str) -> Result<Claim> {
        let claim = Claim::unwritten(store, StagingName::new(hint));
        let path = store.path(&claim.name.path);
        let put = store.inner.put(&path, PutPayload::from_static(CONTENT));
        store
            .block_on(put)?
            .map_err(|e| store_error(format!("write {}", store.name(&claim.name.path)), e))?;
        Ok(claim)
    }

    /// Returns whether another live process claims the name.
    fn has_rivals(&self, below: &str) -> Result<bool> {
        let store = &self.store;
        let hint = format!("{}.", hint(below));
        store.block_on(async {
            let failed = |e| store_error(format!("list {}", store.name(STAGING)), e);
            let mut listing = store.inner.list(Some(&store.path(STAGING)));
            while let Some(object) = listing.try_next().await.map_err(failed)? {
                let name = object.location.filename().unwrap_or_default();
                if name.starts_with(&hint)
                    && !self.name.path.ends_with(name)
                    && !is_left_behind(name, object.last_modified, Utc::now())
                {
                    return Ok(true);
                }
            }
            Ok(false)
        })?
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let path = self.store.path(&self.name.path);
        if let Err(e) = self.store.clean_up(self.store.inner.delete(&path)) {
            tracing::warn!(claim = %self.name.path, "a claim is left behind: {e}");
        }
    }
}

/// Returns the beginning of the names of all claims to a name.
fn hint(below: &str) -> String {
    format!("claim-{}", short_hash(below, 8))
}

impl Store {
    /// Returns whether the store ignores the condition that a copy's name is free. The first call tests it
    /// with two staging objects. If the test fails, conditions count as ignored.
    ///
    /// # Errors
    /// Fails with `Terminated`.
    pub(in crate::store) fn ignores_conditions(&self) -> Result<bool> {
        let Some(capability) = &self.ignores_conditions else {
            return Ok(false);
        };
        // Declared here, so that they are deleted after the waiting callers know the result.
        let mut probes = Vec::new();
        match capability.find_out(|| self.test_and_warn(&mut probes)) {
            Err(e) if e.reason() != Reason::Terminated => {
                tracing::debug!("it is unknown whether the store obeys conditions of writes: {e}");
                Ok(true)
            }
            result => result,
        }
    }

    fn test_and_warn(&self, probes: &mut Vec<Claim>) -> Result<bool> {
        let ignores = self.test_conditions(probes)?;
        if ignores {
            tracing::warn!(
                store = self.url,
                "this store accepts the conditions of writes and ignores them: writers claim names instead; locks in this store do not hold, use --lock-lease"
            );
        }
        Ok(ignores)
    }

    /// Returns whether the store is known to ignore conditions.
    pub(super) fn is_known_to_ignore(&self) -> bool {
        let capability = self.ignores_conditions.as_ref();
        capability.and_then(Capability::known) == Some(true)
    }

    /// Copies one object to one name twice. The second copy must be refused.
    fn test_conditions(&self, probes: &mut Vec<Claim>) -> Result<bool> {
        let from = Claim::write(self, "probe")?;
        let to = Claim::unwritten(self, StagingName::new("probe"));
        let (a, b) = (self.path(&from.name.path), self.path(&to.name.path));
        probes.extend([from, to]);
        if let Some(copier) = self.copier() {
            return self.block_on(self.test_two_copies(&copier, &a, &b))?;
        }
        for is_second in [false, true] {
            let options = CopyOptions::new().with_mode(CopyMode::Create);
            match self.block_on(self.inner.copy_opts(&a, &b, options))? {
                Ok(()) if is_second => return Ok(true),
                Ok(()) => {}
                // If the first copy is refused, its response was lost and its retry refused.
                Err(e) if is_taken(&e) => return Ok(false),
                Err(E::NotSupported { .. } | E::NotImplemented { .. }) => return Ok(true),
                Err(e) => {
                    let action = format!("test conditional copies in {}", self.name(STAGING));
                    return Err(store_error(action, e));
                }
            }
        }
        Ok(false)
    }

    /// The same test with copies by ranges: prepares two at the same time, and completes one after the other.
    async fn test_two_copies(&self, copier: &RangeCopier<'_>, a: &Path, b: &Path) -> Result<bool> {
        let prepare = || copier.prepare((a, b), CONTENT.len() as u64);
        let (first, second) = futures::join!(prepare(), prepare());
        let first = match first {
            Ok(first) => copier.complete(b, first, true).await,
            Err(e) => Err(e),
        };
        match (first, second) {
            (Ok(CopyOutcome::Done), Ok(second)) => {
                let second = copier.complete(b, second, true).await?;
                Ok(second == CopyOutcome::Done)
            }
            (first, Ok(second)) => {
                copier.discard(b, second).await;
                // If the first copy is refused, its response was lost and its retry refused.
                first.map(|_| false)
            }
            (first, Err(e)) => first.and(Err(e)),
        }
    }
}
