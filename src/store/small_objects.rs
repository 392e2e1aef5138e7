//! Small objects beside the snapshots, and the deletion of objects.

use super::errors::{io_cause, store_error};
use super::folder::FOLDER_TRIES;
use super::requests::collect;
use super::staging::StagingName;
use super::{Published, Store, Upload};
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetResult, ObjectStore, ObjectStoreExt, PutPayload};
use std::collections::HashSet;
use std::future::ready;
use std::io::{ErrorKind, Write};

/// Deletions asked for at once, and held in memory.
const BATCH: usize = 1000;
/// Single requests under way at once.
const AT_ONCE: usize = 16;

fn is_missing(e: &object_store::Error) -> bool {
    matches!(e, object_store::Error::NotFound { .. }) || io_cause(e) == Some(ErrorKind::NotFound)
}

/// How a deletion went: what is not there is deleted.
fn gone(name: &str, deleted: object_store::Result<()>) -> Result<()> {
    match deleted {
        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
        Err(e) => Err(store_error(format!("delete {name}"), e)),
    }
}

/// The object, if it is there.
pub(super) async fn get_if_there(
    store: &dyn ObjectStore,
    path: &Path,
) -> object_store::Result<Option<GetResult>> {
    match store.get(path).await {
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        got => got.map(Some),
    }
}

/// The bytes of an object, if they are no more than `most`. A server may send more than it said.
pub(super) async fn bytes_of(got: GetResult, most: u64) -> object_store::Result<Bytes> {
    // Of a local file that is cut short meanwhile object_store reads nothing, for ever.
    let pieces = got.into_stream();
    let pieces = pieces.try_take_while(|piece| ready(Ok(!piece.is_empty())));
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
    /// Reads a small object; `None` where it is not there.
    ///
    /// # Errors
    /// The store's; `Configuration` where it has more than `most` bytes: it is none of ours.
    pub fn read_small(&self, below: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let failed = |e| store_error(format!("read {}", self.name(below)), e);
        self.block_on(async {
            let got = get_if_there(&self.inner, &self.path(below)).await;
            let Some(got) = got.map_err(failed)? else {
                return Ok(None);
            };
            if got.meta.size > most {
                return Err(Reason::Configuration.error(format!(
                    "{} has {} bytes, more than {most}: deltafold did not write it; look at it and delete it",
                    self.name(below),
                    got.meta.size
                )));
            }
            let size = got.meta.size;
            let bytes = bytes_of(got, most).await.map_err(failed)?;
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

    /// Writes a small object as a snapshot is written: read back, and named only where the name is
    /// free.
    ///
    /// # Errors
    /// Those of [`Upload::finish`] and [`Staged::publish`](super::Staged::publish).
    pub fn create_small(&self, below: &str, content: &[u8]) -> Result<Published> {
        let hint = below.rsplit('/').next().unwrap_or(below);
        let mut upload = Upload::new(self, hint, 1);
        upload
            .write_all(content)
            .map_err(|e| Error::io(format!("write {}", self.name(below)), e))?;
        upload.finish()?.publish(below)
    }

    /// Writes a small object over what has its name.
    ///
    /// # Errors
    /// The store's.
    pub fn replace_small(&self, below: &str, content: &[u8]) -> Result<()> {
        let failed = |e| store_error(format!("write {}", self.name(below)), e);
        let payload = PutPayload::from(content.to_vec());
        if self.local_root.is_none() {
            let put = self.block_on(self.inner.put(&self.path(below), payload))?;
            return put.map(|_| ()).map_err(failed);
        }
        // Written in place it would leave a file `<name>#<number>` beside it where it is killed.
        let hint = below.rsplit('/').next().unwrap_or(below);
        let name = StagingName::new(hint);
        let at = self.path(&name.path);
        let mut tries = FOLDER_TRIES;
        let written = loop {
            match self.block_on(self.inner.put(&at, payload.clone()))? {
                // Another run removes the empty folder while this one makes it.
                Err(e) if is_missing(&e) && tries > 0 => tries -= 1,
                written => break written,
            }
        };
        let named = match written {
            Ok(_) => self.block_on(self.inner.rename(&at, &self.path(below)))?,
            Err(e) => Err(e),
        };
        if named.is_err()
            && let Err(e) = self.clean_up(self.inner.delete(&at))
        {
            tracing::warn!(staging = %name.path, "a staging object is left behind: {e}");
        }
        // The folder stays: others write to it at this moment.
        named.map_err(failed)
    }

    /// Deletes an object; one that is not there is deleted.
    ///
    /// # Errors
    /// The store's.
    pub fn delete(&self, below: &str) -> Result<()> {
        if let Some(root) = &self.local_root {
            self.cancel.check()?;
            return root.delete(below);
        }
        let deleted = self.block_on(self.inner.delete(&self.path(below)))?;
        gone(&self.name(below), deleted)
    }

    /// Deletes objects, many at once, and tells of each how it went, in the order given.
    ///
    /// # Errors
    /// `Terminated`.
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
            let locations: Vec<_> = batch.iter().map(|p| Ok(self.path(p))).collect();
            let deleted: HashSet<_> = self.block_on(
                self.inner
                    .delete_stream(futures::stream::iter(locations).boxed())
                    .filter_map(async |d| d.ok())
                    .collect(),
            )?;
            // One failure may stand for a whole request: what it was about is asked for one by one.
            let results: Vec<_> = self.block_on(
                futures::stream::iter(batch)
                    .map(async |path| {
                        let location = self.path(path);
                        let again = match deleted.contains(&location) {
                            true => Ok(()),
                            false => self.inner.delete(&location).await,
                        };
                        (path, gone(&self.name(path), again))
                    })
                    .buffered(AT_ONCE)
                    .collect(),
            )?;
            for (path, result) in results {
                each(path, result);
            }
        }
        Ok(())
    }
}
