//! Reads and writes small objects beside the snapshots (exclusion markers, pins), and deletes objects.

use super::errors::store_error;
use super::requests::collect;
use super::{Published, Store, Upload};
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetResult, ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion};
use std::collections::HashSet;
use std::future::ready;
use std::io::Write;
use std::sync::atomic::Ordering;

/// The number of paths in one batch. A batch's paths and results are held in memory.
const BATCH: usize = 1000;
/// Single deletions under way at once.
const PARALLEL_DELETIONS: usize = 16;

/// Requests an object. Returns `None` if it does not exist.
pub(super) async fn get_if_exists(
    store: &dyn ObjectStore,
    path: &Path,
) -> object_store::Result<Option<GetResult>> {
    match store.get(path).await {
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        response => response.map(Some),
    }
}

/// Reads the bytes of an object. Fails if the server sends more than `most`, whatever size it announced.
pub(super) async fn bytes_of(object: GetResult, most: u64) -> object_store::Result<Bytes> {
    // If a local file is truncated while it is read, object_store returns empty pieces forever: stop at the
    // first one.
    let pieces = object
        .into_stream()
        .try_take_while(|piece| ready(Ok(!piece.is_empty())));
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    match collect(pieces, most).await? {
        Some(whole) => Ok(whole.into()),
        None => Err(object_store::Error::Generic {
            store: "a server",
            source: format!("more than {most} bytes came").into(),
        }),
    }
}

impl Store {
    /// Reads a small object. Returns `None` if it does not exist.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `Configuration` if the object has more than `most` bytes: then
    /// deltafold did not write it.
    pub fn read_small(&self, below: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let failed = |e| store_error(format!("read {}", self.name(below)), e);
        self.block_on(async {
            let object = get_if_exists(&self.inner, &self.path(below)).await;
            let Some(object) = object.map_err(failed)? else {
                return Ok(None);
            };
            let size = object.meta.size;
            if size > most {
                return Err(Reason::Configuration.error(format!(
                    "{} has {size} bytes, and deltafold writes at most {most} there: look at the object and delete it",
                    self.name(below),
                )));
            }
            let bytes = bytes_of(object, most).await.map_err(failed)?;
            if bytes.len() as u64 != size {
                return Err(super::fetch::cut_short(
                    &self.name(below),
                    bytes.len() as u64,
                    size,
                ));
            }
            Ok(Some(bytes.to_vec()))
        })?
    }

    /// Creates a small object, if no object has its name.
    ///
    /// # Errors
    /// Fails with the errors of [`Upload::finish`] and [`Unnamed::complete`].
    pub fn create_small(&self, below: &str, content: &[u8]) -> Result<Published> {
        let mut upload = Upload::new(self, below, content.len() as u64)?;
        upload
            .write_all(content)
            .map_err(|e| Error::io(format!("write {}", self.name(below)), e))?;
        upload.finish()?.complete()
    }

    /// Writes a small object, and replaces the one with its name.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn replace_small(&self, below: &str, content: &[u8]) -> Result<()> {
        let payload = PutPayload::from(content.to_vec());
        let put = self.block_on(self.inner.put(&self.path(below), payload))?;
        put.map(|_| ())
            .map_err(|e| store_error(format!("write {}", self.name(below)), e))
    }

    /// Returns the version of an object, for [`replace_version`](Self::replace_version); `None` if it does not exist.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn version(&self, below: &str) -> Result<Option<UpdateVersion>> {
        match self.block_on(self.inner.head(&self.path(below)))? {
            Ok(meta) => Ok(Some(UpdateVersion {
                e_tag: meta.e_tag,
                version: meta.version,
            })),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(store_error(format!("look at {}", self.name(below)), e)),
        }
    }

    /// Replaces an object of this version with a small one. Returns false if it has another version. Where the store has no
    /// condition for that, the version is read just before.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn replace_version(
        &self,
        below: &str,
        version: UpdateVersion,
        content: &[u8],
    ) -> Result<bool> {
        use object_store::Error as E;
        let payload = PutPayload::from(content.to_vec());
        let path = self.path(below);
        let mode = PutMode::Update(version.clone());
        let put = self.inner.put_opts(&path, payload, mode.into());
        match self.block_on(put)? {
            Ok(_) => Ok(true),
            Err(E::Precondition { .. } | E::NotFound { .. } | E::AlreadyExists { .. }) => Ok(false),
            Err(E::NotImplemented { .. } | E::NotSupported { .. }) => {
                if self.version(below)? != Some(version) {
                    return Ok(false);
                }
                self.replace_small(below, content).map(|()| true)
            }
            Err(e) => Err(store_error(format!("write {}", self.name(below)), e)),
        }
    }

    /// Deletes an object. Succeeds if it does not exist.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn delete(&self, below: &str) -> Result<()> {
        if let Some(root) = &self.local_root {
            self.cancel.check()?;
            return root.delete(below);
        }
        self.block_on(delete_one(self, below))?
    }

    /// Deletes objects, many with one request, and calls `each` with each path and result, in the order of
    /// `paths`.
    ///
    /// # Errors
    /// Fails only with `Terminated`. Errors of single deletions go to `each`.
    pub fn delete_all(
        &self,
        paths: &[String],
        mut each: impl FnMut(&str, Result<()>),
    ) -> Result<()> {
        if let Some(root) = &self.local_root {
            for path in paths {
                self.cancel.check()?;
                each(path, root.delete(path));
            }
            return Ok(());
        }
        for batch in paths.chunks(BATCH) {
            let deleted = if self.deletes_singly() {
                HashSet::new()
            } else {
                delete_in_bulk(self, batch)?
            };
            // A bulk request can fail as a whole. So each path that is not known to be deleted gets a request
            // of its own.
            let results: Vec<_> = self.block_on(
                futures::stream::iter(batch)
                    .map(|path| delete_unless_in(self, &deleted, path))
                    .buffered(PARALLEL_DELETIONS)
                    .collect(),
            )?;
            for (path, result) in results {
                each(path, result);
            }
        }
        Ok(())
    }
}

/// Returns the paths that a bulk request has deleted. After a refusal for good, no further one is made.
fn delete_in_bulk(store: &Store, batch: &[String]) -> Result<HashSet<Path>> {
    let locations: Vec<_> = batch.iter().map(|p| Ok(store.path(p))).collect();
    let deleting = store
        .inner
        .delete_stream(futures::stream::iter(locations).boxed());
    let results: Vec<_> = store.block_on(deleting.collect())?;
    let (mut deleted, mut is_refused) = (HashSet::new(), false);
    for result in results {
        match result {
            Ok(path) => drop(deleted.insert(path)),
            Err(e) => {
                is_refused |= store_error("delete objects", e).reason() == Reason::Configuration;
            }
        }
    }
    if is_refused && deleted.is_empty() && store.s3.is_some() {
        tracing::info!("the store refuses bulk deletions, so objects are deleted one by one");
        store.deletes_singly.store(true, Ordering::Relaxed);
    }
    Ok(deleted)
}

/// Deletes one object by a request that names it alone.
pub(super) async fn delete_one(store: &Store, below: &str) -> Result<()> {
    let name = store.name(below);
    if let Some(s3) = &store.s3 {
        let action = format!("delete {name}");
        let response = s3.delete(&action, &store.path(below), &[]).await?;
        return response.removed(&action);
    }
    match store.inner.delete(&store.path(below)).await {
        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
        Err(e) => Err(store_error(format!("delete {name}"), e)),
    }
}

async fn delete_unless_in<'p>(
    store: &Store,
    deleted: &HashSet<Path>,
    path: &'p str,
) -> (&'p str, Result<()>) {
    if deleted.contains(&store.path(path)) {
        (path, Ok(()))
    } else {
        (path, delete_one(store, path).await)
    }
}
