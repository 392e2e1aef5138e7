//! The folder of temporary objects: files of a local folder that are being written, and the objects of checks.
//!
//! A killed process leaves them behind. `gc` removes those that are older than a day.

use super::Store;
use super::small_objects::delete_one;
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

pub(super) fn clock_ahead(store: &Store) -> Result<TimeDelta> {
    let below = temporary_path("clock");
    let path = store.path(&below);
    let failed = |e| super::store_error(format!("read the clock of {}", store.url), e);
    let before = Utc::now();
    let written = store.block_on(async {
        store
            .inner
            .put(&path, PutPayload::from_static(b"?"))
            .await?;
        store.inner.head(&path).await
    });
    let after = Utc::now();
    if let Err(e) = store.clean_up(delete_one(store, &below)) {
        let name = store.name(&below);
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
