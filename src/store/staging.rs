//! The folder of temporary objects: files of a local folder that are being written, and the objects of checks.
//!
//! A killed process leaves them behind. `gc` removes those that are older than a day.

use super::Store;
use crate::base::random::random_word;
use crate::error::Result;
use chrono::{TimeDelta, Utc};
use object_store::{ObjectStoreExt, PutPayload};

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
        let failed = |e| super::store_error(format!("read the clock of {}", self.url), e);
        let before = Utc::now();
        let written = self.block_on(async {
            self.inner.put(&path, PutPayload::from_static(b"?")).await?;
            self.inner.head(&path).await
        });
        let after = Utc::now();
        if let Err(e) = self.clean_up(self.inner.delete(&path)) {
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
