//! Names on servers that take the condition of a write and ignore it: writers look out for each other.
//!
//! Whoever is about to name an object first writes a claim to the name and lists the claims. Only one
//! that sees no other's goes on; its claim stays until the name is given. Of two that want one name in
//! the same moment at least one sees the other's claim, or finds the name taken. `publish` calls it.

use crate::base::hash::short_hash;
use crate::base::random::random_word;
use crate::error::{Reason, Result};
use crate::store::Store;
use crate::store::capability::Capability;
use crate::store::errors::{is_taken, store_error};
use crate::store::s3::{Copied, Copying};
use crate::store::staging::{STAGING, StagingName, is_left_behind};
use chrono::Utc;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{CopyMode, CopyOptions, Error as E, ObjectStore, ObjectStoreExt, PutPayload};
use std::time::Duration;

/// What a claim holds.
const PROBE: &[u8] = b"claim";
/// A name that others claim is tried so often; then it counts as taken.
const TRIES: u64 = 20;
/// Pauses between tries are random, up to this.
const LONGEST_PAUSE_MS: u64 = 500;

/// A small object in the staging folder, gone when this is dropped.
pub(super) struct Claim {
    store: Store,
    name: StagingName,
}

impl Claim {
    /// Waits until nobody else claims the name `below`. None where others do for too long.
    ///
    /// # Errors
    /// The store's; `Terminated`.
    pub(super) fn take(store: &Store, below: &str) -> Result<Option<Claim>> {
        for _ in 0..TRIES {
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

    /// A claim that is not written yet: for an object that is deleted when this is dropped.
    pub(super) fn unwritten(store: &Store, name: StagingName) -> Claim {
        Claim {
            store: store.clone(),
            name,
        }
    }

    /// Below the store's prefix.
    pub(super) fn path(&self) -> &str {
        &self.name.path
    }

    fn write(store: &Store, hint: &str) -> Result<Claim> {
        let claim = Claim::unwritten(store, StagingName::new(hint));
        let path = store.path(&claim.name.path);
        let put = store.inner.put(&path, PutPayload::from_static(PROBE));
        store
            .block_on(put)?
            .map_err(|e| store_error(format!("write {}", store.name(&claim.name.path)), e))?;
        Ok(claim)
    }

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

/// What all claims to a name begin with.
fn hint(below: &str) -> String {
    format!("claim-{}", short_hash(below, 8))
}

impl Store {
    /// Whether copies on condition that a name is free overwrite what has the name. It is tried once,
    /// on two staging objects; where trying fails, it may be so.
    ///
    /// # Errors
    /// `Terminated`.
    pub(in crate::store) fn ignores_conditions(&self) -> Result<bool> {
        let Some(tried) = &self.ignores_conditions else {
            return Ok(false);
        };
        // Removed when those that wait know.
        let mut probes = Vec::new();
        let found = tried.find_out(|| {
            let ignores = self.try_conditions(&mut probes)?;
            if ignores {
                tracing::warn!(
                    store = self.url,
                    "this store takes the condition of a write and ignores it: writers look out for each other; locks in it do not hold, use --lock-lease"
                );
            }
            Ok(ignores)
        });
        match found {
            Err(e) if e.reason() != Reason::Terminated => {
                tracing::debug!("whether conditions of writes are heeded cannot be told: {e}");
                Ok(true)
            }
            found => found,
        }
    }

    /// Whether it is known that they do.
    pub(super) fn is_known_to_ignore(&self) -> bool {
        let tried = self.ignores_conditions.as_ref();
        tried.and_then(Capability::known) == Some(true)
    }

    fn try_conditions(&self, probes: &mut Vec<Claim>) -> Result<bool> {
        let from = Claim::write(self, "probe")?;
        let to = Claim::unwritten(self, StagingName::new("probe"));
        let (a, b) = (self.path(&from.name.path), self.path(&to.name.path));
        probes.extend([from, to]);
        if let Some(copying) = self.copying() {
            return self.block_on(self.try_two_copies(&copying, &a, &b))?;
        }
        for is_second in [false, true] {
            let options = CopyOptions::new().with_mode(CopyMode::Create);
            match self.block_on(self.inner.copy_opts(&a, &b, options))? {
                Ok(()) if is_second => return Ok(true),
                Ok(()) => {}
                // Refused at once: an answer was lost, and the same tried again.
                Err(e) if is_taken(&e) => return Ok(false),
                Err(E::NotSupported { .. } | E::NotImplemented { .. }) => return Ok(true),
                Err(e) => return Err(store_error(format!("try {}", self.name(STAGING)), e)),
            }
        }
        Ok(false)
    }

    /// As above, by copies of which only the last step is made one after the other.
    async fn try_two_copies(&self, copying: &Copying<'_>, a: &Path, b: &Path) -> Result<bool> {
        let prepare = || copying.prepare((a, b), PROBE.len() as u64);
        let (first, second) = futures::join!(prepare(), prepare());
        let first = match first {
            Ok(first) => copying.complete(b, first, true).await,
            Err(e) => Err(e),
        };
        match (first, second) {
            (Ok(Copied::Done), Ok(second)) => {
                let second = copying.complete(b, second, true).await?;
                Ok(second == Copied::Done)
            }
            (first, Ok(second)) => {
                copying.give_up(b, second).await;
                // Refused at once: an answer was lost, and the same tried again.
                first.map(|_| false)
            }
            (first, Err(e)) => first.and(Err(e)),
        }
    }
}
