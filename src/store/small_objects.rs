//! Reads and writes small objects beside the snapshots (exclusion markers, pins), and deletes objects.

use super::errors::{conditional_write_error, no_conditions, store_error};
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

pub(super) fn read_small(store: &Store, below: &str, most: u64) -> Result<Option<Vec<u8>>> {
    let failed = |e| store_error(format!("read {}", store.name(below)), e);
    store.block_on(async {
        let object = get_if_exists(&store.inner, &store.path(below)).await;
        let Some(object) = object.map_err(failed)? else {
            return Ok(None);
        };
        let size = object.meta.size;
        if size > most {
            return Err(Reason::Configuration.error(format!(
                "{} has {size} bytes, and deltafold writes at most {most} there: look at the object and delete it",
                store.name(below),
            )));
        }
        let bytes = bytes_of(object, most).await.map_err(failed)?;
        if bytes.len() as u64 != size {
            return Err(super::fetch::cut_short(
                &store.name(below),
                bytes.len() as u64,
                size,
            ));
        }
        Ok(Some(bytes.to_vec()))
    })?
}

pub(super) fn create_small(store: &Store, below: &str, content: &[u8]) -> Result<Published> {
    let mut upload = Upload::new(store, below, content.len() as u64)?;
    upload
        .write_all(content)
        .map_err(|e| Error::io(format!("write {}", store.name(below)), e))?;
    upload.finish()?.complete()
}

pub(super) fn refuses_to_replace(store: &Store, below: &str) -> Result<()> {
    let payload = PutPayload::from_static(b"overwritten");
    let path = store.path(below);
    let put = store.inner.put_opts(&path, payload, PutMode::Create.into());
    match store.block_on(put)? {
        Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
        Ok(_) => Err(no_conditions(format!(
            "{} was overwritten, although the request said to write it only if it does not exist",
            store.name(below)
        ))),
        Err(e) => {
            let action = format!("write {} on condition", store.name(below));
            Err(store.block_on(conditional_write_error(store, &action, e))?)
        }
    }
}

pub(super) fn replace_small(store: &Store, below: &str, content: &[u8]) -> Result<()> {
    let payload = PutPayload::from(content.to_vec());
    let put = store.block_on(store.inner.put(&store.path(below), payload))?;
    put.map(|_| ())
        .map_err(|e| store_error(format!("write {}", store.name(below)), e))
}

pub(super) fn version(store: &Store, below: &str) -> Result<Option<UpdateVersion>> {
    match store.block_on(store.inner.head(&store.path(below)))? {
        Ok(meta) => Ok(Some(UpdateVersion {
            e_tag: meta.e_tag,
            version: meta.version,
        })),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(store_error(format!("look at {}", store.name(below)), e)),
    }
}

pub(super) fn replace_version(
    store: &Store,
    below: &str,
    version: UpdateVersion,
    content: &[u8],
) -> Result<bool> {
    use object_store::Error as E;
    let payload = PutPayload::from(content.to_vec());
    let path = store.path(below);
    let mode = PutMode::Update(version.clone());
    let put = store.inner.put_opts(&path, payload, mode.into());
    match store.block_on(put)? {
        Ok(_) => Ok(true),
        Err(E::Precondition { .. } | E::NotFound { .. } | E::AlreadyExists { .. }) => Ok(false),
        Err(E::NotImplemented { .. } | E::NotSupported { .. }) => {
            if self::version(store, below)? != Some(version) {
                return Ok(false);
            }
            replace_small(store, below, content).map(|()| true)
        }
        Err(e) => Err(store_error(format!("write {}", store.name(below)), e)),
    }
}

pub(super) fn delete(store: &Store, below: &str) -> Result<()> {
    if let Some(root) = &store.local_root {
        store.cancel.check()?;
        return root.delete(below);
    }
    store.block_on(delete_one(store, below))?
}

pub(super) fn delete_all(
    store: &Store,
    paths: &[String],
    mut each: impl FnMut(&str, Result<()>),
) -> Result<()> {
    if let Some(root) = &store.local_root {
        for path in paths {
            store.cancel.check()?;
            each(path, root.delete(path));
        }
        return Ok(());
    }
    for batch in paths.chunks(BATCH) {
        let deleted = match store.deletes_singly() {
            true => HashSet::new(),
            false => delete_in_bulk(store, batch)?,
        };
        // A bulk request can fail as a whole. So each path that is not known to be deleted gets a request
        // of its own.
        let results: Vec<_> = store.block_on(
            futures::stream::iter(batch)
                .map(|path| delete_unless_in(store, &deleted, path))
                .buffered(PARALLEL_DELETIONS)
                .collect(),
        )?;
        for (path, result) in results {
            each(path, result);
        }
    }
    Ok(())
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
    match deleted.contains(&store.path(path)) {
        true => (path, Ok(())),
        false => (path, delete_one(store, path).await),
    }
}
