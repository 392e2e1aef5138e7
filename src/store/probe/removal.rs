//! Removes the objects, uploads and versions that a probe has written.
//!
//! Called by `store::probe`.

use super::{E, Prober};
use crate::error::Result;
use crate::store::Store;
use crate::store::staging::{STAGING, StagingName};
use object_store::ObjectStoreExt;
use std::time::Duration;

/// Time limit for the removal.
const CLEAN_UP: Duration = Duration::from_secs(20);
/// How long the server may still work on a request that was cut off.
const SETTLE: Duration = Duration::from_millis(300);

impl Prober {
    /// Removes everything that was written, with its versions. Returns what could not be removed, and why.
    pub(super) fn clean_up(&mut self) -> Vec<String> {
        let names = std::mem::take(&mut self.names);
        let removed = self
            .store
            .handle
            .clone()
            .block_on(async { tokio::time::timeout(CLEAN_UP, self.remove(&names)).await });
        let left_behind = removed.unwrap_or_else(|_| {
            vec![format!(
                "{STAGING}/check-…: the store did not answer in time; any later run removes what is there after a day"
            )]
        });
        drop(names);
        self.store.remove_staging_folder();
        for leftover in &left_behind {
            tracing::warn!("left behind: {leftover}");
        }
        left_behind
    }

    async fn remove(&mut self, names: &[StagingName]) -> Vec<String> {
        if self.was_cut_off {
            tokio::time::sleep(SETTLE).await;
        }
        if let Some(mut upload) = self.multipart.take() {
            let _ = upload.abort().await;
        }
        let store = &self.store;
        let mut left_behind = Vec::new();
        for name in names {
            let path = store.path(&name.path);
            if self.was_cut_off
                && let Err(e) = abort_uploads(store, &name.path).await
            {
                left_behind.push(format!("an unfinished upload of {}: {e}", name.path));
            }
            match store.inner.delete(&path).await {
                Ok(()) | Err(E::NotFound { .. }) => {}
                Err(e) => left_behind.push(format!("{}: {e}", name.path)),
            }
            // In a versioned bucket, a deletion leaves the old versions and a delete marker.
            if self.is_versioned
                && let Err(e) = remove_versions(store, &name.path).await
            {
                left_behind.push(format!("versions of {}: {e}", name.path));
            }
        }
        left_behind
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        if !self.names.is_empty() {
            self.clean_up();
        }
    }
}

/// Aborts all unfinished uploads of an object; copies are such, too. Lists them by the object's whole name:
/// some servers list no others.
async fn abort_uploads(store: &Store, below: &str) -> Result<()> {
    let prefix = store.path(below).to_string();
    for upload in store.uploads_of(prefix).await? {
        store.give_up(&upload).await?;
    }
    Ok(())
}

async fn remove_versions(store: &Store, below: &str) -> Result<()> {
    let mut versions = Vec::new();
    let prefix = store.path(below).to_string();
    let listing = store.versions_behind(prefix, |version| {
        versions.push(version);
        Ok(())
    });
    listing.await?;
    for version in versions.iter().filter(|v| v.path == below) {
        store
            .delete_version_of(&version.path, &version.version)
            .await?;
    }
    Ok(())
}
