//! Object stores: opening one by URL, listing a prefix, streaming objects in and out.
//!
//! It knows paths and bytes, nothing of snapshots. `job` calls it.

mod errors;
pub mod exclude;
pub mod fetch;
pub mod open;
pub mod publish;

pub use errors::store_error;
pub use fetch::ObjectReader;
pub use open::open;
pub use publish::{Published, Upload};

use crate::error::{Error, Reason, Result};
use exclude::ExcludeTags;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::runtime::Handle;

/// Set once to end a run early; every loop over data looks at it.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks everything that looks to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Fails once cancelled.
    ///
    /// # Errors
    /// `Terminated`.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            return Err(Error::new(Reason::Terminated, "ended by a signal"));
        }
        Ok(())
    }
}

/// One prefix of one object store.
///
/// Its blocking calls must not be made on an async thread of the runtime.
#[derive(Clone)]
pub struct Store {
    inner: Arc<dyn ObjectStore>,
    prefix: Path,
    url: String,
    tags: ExcludeTags,
    handle: Handle,
    cancel: Cancel,
    bytes_read: Arc<AtomicU64>,
}

impl Store {
    /// A prefix of an open store; `url` is for messages only and must hold no secret.
    pub fn new(
        inner: Arc<dyn ObjectStore>,
        prefix: Path,
        url: String,
        tags: ExcludeTags,
        handle: Handle,
    ) -> Self {
        Store {
            inner,
            prefix,
            url,
            tags,
            handle,
            cancel: Cancel::default(),
            bytes_read: Arc::default(),
        }
    }

    /// Its URL, without secrets.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The switch that ends its transfers.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Bytes read from the store so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// The full path of an object below the prefix.
    fn path(&self, below: &str) -> Path {
        self.prefix
            .parts()
            .chain(Path::from(below).parts())
            .map(|p| p.as_ref().to_owned())
            .collect()
    }

    fn block_on<F: Future>(&self, f: F) -> F::Output {
        self.handle.block_on(f)
    }

    /// All objects in some folders below the prefix: path below the prefix, and size.
    ///
    /// # Errors
    /// `StoreUnreachable`, `PermissionDenied`, `Unauthenticated`, `Configuration`, `NoSnapshots`
    /// where the bucket does not exist.
    pub fn list(&self, folders: &[&str]) -> Result<Vec<(String, u64)>> {
        self.block_on(async {
            let mut objects = Vec::new();
            for folder in folders {
                let mut listing = self.inner.list(Some(&self.path(folder)));
                while let Some(object) = listing
                    .try_next()
                    .await
                    .map_err(|e| store_error(format!("list {}", self.url), e))?
                {
                    self.cancel.check()?;
                    if let Some(below) = object.location.prefix_match(&self.prefix) {
                        let parts: Vec<String> = below.map(|p| p.as_ref().to_owned()).collect();
                        objects.push((parts.join("/"), object.size));
                    }
                }
            }
            Ok(objects)
        })
    }

    /// The names of the objects directly at the prefix, a few at most: for hints.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub fn list_directly(&self) -> Result<Vec<String>> {
        self.block_on(async {
            let listing = self
                .inner
                .list_with_delimiter(Some(&self.prefix))
                .await
                .map_err(|e| store_error(format!("list {}", self.url), e))?;
            let names = listing.objects.into_iter().take(1000);
            Ok(names
                .filter_map(|o| o.location.filename().map(str::to_owned))
                .collect())
        })
    }

    /// For each path whether the object is tagged as excluded; asks many at once. A store that
    /// does not tell counts as "no".
    ///
    /// # Errors
    /// `StoreUnreachable`, `Terminated`.
    pub fn excluded_by_tag(&self, paths: &[String]) -> Result<Vec<bool>> {
        /// Requests under way at once.
        const AT_ONCE: usize = 16;
        if !self.tags.can_tell() {
            return Ok(vec![false; paths.len()]);
        }
        self.block_on(async {
            futures::stream::iter(paths)
                .map(|p| async move {
                    self.cancel.check()?;
                    self.tags.is_excluded(&self.inner, &self.path(p)).await
                })
                .buffered(AT_ONCE)
                .try_collect()
                .await
        })
    }

    /// Whether an object is there, and its size.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub fn size(&self, below: &str) -> Result<Option<u64>> {
        match self.block_on(self.inner.head(&self.path(below))) {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(store_error(format!("look at {}", self.name(below)), e)),
        }
    }

    /// An object's full name for messages.
    pub fn name(&self, below: &str) -> String {
        format!("{}/{below}", self.url.trim_end_matches('/'))
    }
}
