//! The folder of temporary objects: files of a local folder that are being written, and the objects of checks.
//!
//! A killed process leaves them behind. `gc` removes those that are older than a day.

use super::Store;
use super::errors::{action_at, no_conditions, refusal_in, store_error};
use super::small_objects::delete_one;
use crate::base::random::random_word;
use crate::error::{Error, Result};
use chrono::{TimeDelta, Utc};
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};

/// The folder of temporary objects, below the store's prefix and beside the folders that are listed for
/// snapshots.
pub const STAGING: &str = "deltafold-staging";

/// Returns the path of a temporary object, which no other one has.
pub fn temporary_path(hint: &str) -> String {
    format!("{STAGING}/{hint}.{:016x}", random_word())
}

/// Returns whether a name in [`STAGING`] is that of a temporary object.
pub fn is_temporary(name: &str) -> bool {
    let word = name.rsplit_once('.').map(|(_, word)| word);
    word.is_some_and(|word| word.len() == 16 && word.bytes().all(|b| b.is_ascii_hexdigit()))
}

impl Store {
    /// Tests that a write on condition that an object does not exist is refused if it exists. If the condition
    /// is ignored, the object is overwritten.
    ///
    /// # Errors
    /// Fails with `Configuration` if the object was overwritten, and with the store's errors, such as a refusal of
    /// the condition.
    pub fn refuses_to_replace(&self, below: &str) -> Result<()> {
        let payload = PutPayload::from_static(b"overwritten");
        let path = self.path(below);
        let put = self.inner.put_opts(&path, payload, PutMode::Create.into());
        match self.block_on(put)? {
            Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
            Ok(_) => Err(no_conditions(format!(
                "{} was overwritten, although the request said to write it only if it does not exist",
                self.name(below)
            ))),
            Err(e) => {
                let action = format!("write {} on condition", self.name(below));
                Err(self.block_on(conditional_write_error(self, &action, e))?)
            }
        }
    }

    /// Returns how far the store's clock is ahead of this machine's; negative if it is behind. Writes and
    /// deletes an object to find out. Returns zero if the duration of the request, or times in whole seconds,
    /// can explain the difference, and otherwise the lowest value that is possible: a time that is computed
    /// with it is never later than the store's.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn clock_ahead(&self) -> Result<TimeDelta> {
        let below = temporary_path("clock");
        let path = self.path(&below);
        let failed = |e| store_error(format!("read the clock of {}", self.url), e);
        let before = Utc::now();
        let written = self.block_on(async {
            self.inner.put(&path, PutPayload::from_static(b"?")).await?;
            self.inner.head(&path).await
        });
        let after = Utc::now();
        if let Err(e) = self.clean_up(delete_one(self, &below)) {
            let name = self.name(&below);
            tracing::warn!("a temporary object is left behind: {name}: {e}");
        }
        let modified = written?.map_err(failed)?.last_modified;
        // Some stores have whole seconds.
        let is_behind = modified + TimeDelta::seconds(1) < before;
        Ok(if is_behind || modified > after {
            modified - after
        } else {
            TimeDelta::zero()
        })
    }
}

/// Returns the error of a write on condition. If the store does not say which header it refuses, the same write without
/// the condition, of a temporary object, tells whether it is that.
pub(super) async fn conditional_write_error(
    store: &Store,
    action: &str,
    e: object_store::Error,
) -> Error {
    let Some(refusal) = refusal_in(&e).filter(|refusal| refusal.may_be_condition) else {
        return store_error(action, e);
    };
    let below = temporary_path("unconditional");
    let content = PutPayload::from_static(b"?");
    if store.inner.put(&store.path(&below), content).await.is_err() {
        return store_error(action, e);
    }
    if let Err(e) = delete_one(store, &below).await {
        tracing::debug!("a temporary object is left behind: {below}: {e}");
    }
    refusal.clone().of_condition().error(action_at(action, &e))
}
