//! Small objects beside the snapshots, and the deletion of objects.

use super::errors::store_error;
use super::{Published, Store, Upload};
use crate::error::{Error, Reason, Result};
use futures::StreamExt;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use std::collections::HashSet;
use std::io::Write;

/// Deletions asked for at once, and held in memory.
const BATCH: usize = 1000;
/// Single requests under way at once.
const AT_ONCE: usize = 16;

impl Store {
    /// Reads a small object; `None` where it is not there.
    ///
    /// # Errors
    /// The store's; `Configuration` where it has more than `most` bytes: it is none of ours.
    pub fn read_small(&self, below: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let failed = |e| store_error(format!("read {}", self.name(below)), e);
        self.block_on(async {
            let got = match self.inner.get(&self.path(below)).await {
                Ok(got) => got,
                Err(object_store::Error::NotFound { .. }) => return Ok(None),
                Err(e) => return Err(failed(e)),
            };
            if got.meta.size > most {
                return Err(Error::new(
                    Reason::Configuration,
                    format!(
                        "{} has {} bytes, more than {most}: deltafold did not write it; look at it and delete it",
                        self.name(below),
                        got.meta.size
                    ),
                ));
            }
            let size = got.meta.size;
            let bytes = got.bytes().await.map_err(failed)?;
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
        let payload = PutPayload::from(content.to_vec());
        self.block_on(self.inner.put(&self.path(below), payload))?
            .map_err(|e| store_error(format!("write {}", self.name(below)), e))?;
        Ok(())
    }

    /// Deletes an object; one that is not there is deleted.
    ///
    /// # Errors
    /// The store's.
    pub fn delete(&self, below: &str) -> Result<()> {
        match self.block_on(self.inner.delete(&self.path(below)))? {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(store_error(format!("delete {}", self.name(below)), e)),
        }
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
                        if deleted.contains(&location) {
                            return (path, Ok(()));
                        }
                        let result = match self.inner.delete(&location).await {
                            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                            Err(e) => Err(store_error(format!("delete {}", self.name(path)), e)),
                        };
                        (path, result)
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
