//! Object stores: opening one by URL, listing a prefix, streaming objects in and out.
//!
//! It knows paths and bytes, nothing of snapshots. `ops` calls it.

pub mod azure;
pub mod bandwidth;
mod capability;

mod connect;

pub mod encryption;
mod errors;
pub mod exclude;
pub mod fetch;
pub mod folder;
pub mod gcs;
mod listing;
mod local;
pub mod lock;
pub mod object_lock;
pub mod open;
pub mod probe;
pub mod publish;
mod read_ahead;
mod requests;
pub mod retrying_client;
pub mod s3;
mod small_objects;
pub mod staging;
mod swift;
mod tag_counts;
mod xml;

pub use bandwidth::Bandwidth;
pub use capability::BackgroundTask;
pub use encryption::{Keys, Sealed};
pub use errors::store_error;
pub use fetch::{ObjectReader, is_large};
pub use folder::{FileMode, Folder};
pub use lock::LOCKS;
pub use object_lock::{Mode, ObjectLock, Retention};
pub use open::open;
pub use publish::{Staged, Upload};
pub use read_ahead::{Begun, ReadAhead};
pub use requests::{DEFAULT_REQUESTS, MOST_REQUESTS};
pub use s3::{ObjectVersion, UnfinishedUpload, Versioning};

use crate::base::Cancel;
use crate::error::{Reason, Result};
use capability::Capability;
use chrono::{DateTime, Utc};
use exclude::ExcludeTags;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use publish::direct::Direct;
use read_ahead::BegunTransfers;
use s3::S3;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, Semaphore};

/// An object as a listing tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Below the store's prefix, with `/` between folders.
    pub path: String,
    /// Size in the store.
    pub bytes: u64,
    /// When it was written, by the store's clock.
    pub modified: DateTime<Utc>,
    /// No request of ours can name it: its path must be shown, and never asked for or deleted.
    pub is_odd: bool,
    /// Its ETag, if the listing tells it; of a file its inode and the time of its last change.
    pub etag: Option<String>,
}

/// What became of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The object was not there before, and is there now.
    Created,
    /// The very same bytes were there already.
    Identical,
    /// Something else has the name.
    Taken,
}

/// How long a request that cleans up may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// One prefix of one object store.
///
/// Its blocking calls must not be made on an async thread of the runtime.
#[derive(Clone)]
pub struct Store {
    inner: Arc<dyn ObjectStore>,
    prefix: Path,
    url: String,
    tags: ExcludeTags,
    /// Where it is S3: for what the object_store crate has no call.
    s3: Option<Arc<S3>>,
    /// What was learnt of the bucket's object lock.
    object_lock: Arc<OnceCell<ObjectLock>>,
    /// Of a local folder: what is asked of it there and then, without a runtime.
    local_root: Option<Folder>,
    /// The most bytes that it copies.
    largest_copy: Option<u64>,
    /// The most bytes that it copies at once; more are copied by ranges.
    largest_range: Option<u64>,
    /// Of a server that may take conditions and ignore them: whether it does.
    ignores_conditions: Option<Capability>,
    /// Requests under way at once.
    requests: usize,
    /// Room for ranges of large objects, if they come by ranges.
    ranges: Option<Arc<Semaphore>>,
    /// Transfers that were begun before they were asked for.
    begun: BegunTransfers,
    /// Room for bytes that are uploaded.
    uploads: Arc<Semaphore>,
    /// Where small objects may be put at once.
    direct: Option<Direct>,
    /// How many keep the staging folder of a local folder, though it is empty.
    staging_kept: Arc<AtomicUsize>,
    handle: Handle,
    cancel: Cancel,
    bytes_read: Arc<AtomicU64>,
    /// Of what is read, and of what is written.
    bandwidth: Option<(Bandwidth, Bandwidth)>,
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
            s3: None,
            object_lock: Arc::default(),
            local_root: None,
            largest_copy: None,
            largest_range: None,
            ignores_conditions: None,
            requests: DEFAULT_REQUESTS,
            ranges: None,
            begun: BegunTransfers::default(),
            uploads: Arc::new(Semaphore::new(publish::UPLOAD_BYTES)),
            direct: None,
            staging_kept: Arc::default(),
            handle,
            cancel: Cancel::default(),
            bytes_read: Arc::default(),
            bandwidth: None,
        }
    }

    /// The same store, which is kept in a local folder.
    pub fn with_local_root(mut self, root: impl Into<Folder>) -> Self {
        self.local_root = Some(root.into());
        self
    }

    /// The same store, with S3's requests for versions, retention and uploads.
    pub fn with_s3(mut self, s3: Arc<S3>) -> Self {
        self.s3 = Some(s3);
        self
    }

    /// The same store, with a switch that others share.
    pub fn with_cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = cancel;
        self
    }

    /// The same store, asked for so many things at once, 1 or more.
    pub fn with_requests(mut self, most: usize) -> Self {
        self.requests = most.max(1);
        self
    }

    /// The same store, that tells versions of objects apart when it is asked for ranges: large objects come by several at
    /// once.
    pub fn with_ranges(mut self) -> Self {
        self.ranges = Some(Arc::new(Semaphore::new(fetch::RANGES_AHEAD)));
        self
    }

    /// The same store, that copies no more than so many bytes.
    pub fn with_largest_copy(mut self, bytes: u64) -> Self {
        self.largest_copy = Some(bytes);
        self
    }

    /// The same store, of a server that may take the conditions of writes and ignore them: before the
    /// first object gets its name this is tried, and where it is so, writers look out for each other.
    pub fn with_doubted_conditions(mut self) -> Self {
        self.ignores_conditions = Some(Capability::default());
        self
    }

    /// The same store, in which small objects are put at once if it proves to be safe.
    pub fn with_direct(mut self, direct: Direct) -> Self {
        self.direct = Some(direct);
        self
    }

    /// The same store, S3, that copies more than so many bytes by ranges.
    pub fn with_largest_range(mut self, bytes: u64) -> Self {
        self.largest_range = Some(bytes);
        self
    }

    /// The same store, with objects read and written no faster than that.
    ///
    /// An upload is counted as its parts are filled; a part that is full leaves at once.
    pub fn with_bandwidth(mut self, read: Bandwidth, write: Bandwidth) -> Self {
        self.bandwidth = Some((read, write));
        self
    }

    /// Its URL, without secrets.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The switch that ends its transfers.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Where its requests run.
    pub fn handle(&self) -> &Handle {
        &self.handle
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

    /// Waits for a request, unless cancelled first.
    fn block_on<F: Future>(&self, f: F) -> Result<F::Output> {
        match self.local_root {
            // Without the runtime it is done on this very thread.
            Some(_) => futures::executor::block_on(self.cancel.or(f)),
            None => self.handle.block_on(self.cancel.or(f)),
        }
    }

    /// The most requests that may be under way at once; of a local folder there are none.
    pub fn requests(&self) -> Option<usize> {
        self.local_root.is_none().then_some(self.requests)
    }

    /// Waits for a request that cleans up, cancelled or not, for a few seconds.
    fn clean_up<T>(&self, f: impl Future<Output = object_store::Result<T>>) -> Result<(), String> {
        let done = self
            .handle
            .block_on(async { tokio::time::timeout(PATIENCE, f).await });
        match done {
            Ok(Ok(_) | Err(object_store::Error::NotFound { .. })) => Ok(()),
            Ok(Err(e)) => Err(store_error("clean up", e).to_string()),
            Err(_) => Err("the store did not answer in time".to_owned()),
        }
    }

    /// All objects in some folders below the prefix: path below the prefix, and size.
    ///
    /// # Errors
    /// As [`objects`](Self::objects).
    pub fn list(&self, folders: &[&str]) -> Result<Vec<(String, u64)>> {
        let objects = self.objects(folders)?.into_iter();
        Ok(objects.map(|o| (o.path, o.bytes)).collect())
    }

    /// All objects in some folders below the prefix, which are listed side by side, in the order of their paths. A path
    /// that a server lists twice counts once.
    ///
    /// # Errors
    /// `StoreUnreachable`, `PermissionDenied`, `Unauthenticated`, `Configuration`, `NoSnapshots`
    /// where the bucket does not exist.
    pub fn objects(&self, folders: &[&str]) -> Result<Vec<ObjectInfo>> {
        self.listed(folders).map(once_each)
    }

    fn listed(&self, folders: &[&str]) -> Result<Vec<ObjectInfo>> {
        if let Some(root) = &self.local_root {
            let mut objects = Vec::new();
            for folder in folders {
                objects.extend(root.list(folder, folder::DEEPEST)?);
            }
            return Ok(objects);
        }
        self.block_on(async {
            let listings = futures::stream::iter(folders)
                .map(|folder| self.list_folder(folder))
                .buffered(folders.len().max(1));
            let listings: Vec<Vec<ObjectInfo>> = listings.try_collect().await?;
            Ok(listings.into_iter().flatten().collect())
        })?
    }

    async fn list_folder(&self, folder: &str) -> Result<Vec<ObjectInfo>> {
        let failed = |e| store_error(format!("list {}", self.url), e);
        let mut objects = Vec::new();
        let mut listing = self.inner.list(Some(&self.path(folder)));
        while let Some(object) = listing.try_next().await.map_err(failed)? {
            let odd = listing::odd_key(&object.location);
            let below = match &odd {
                Some(key) => self.odd_below(key, folder),
                None => object.location.prefix_match(&self.prefix).map(|below| {
                    let parts: Vec<String> = below.map(|p| p.as_ref().to_owned()).collect();
                    parts.join("/")
                }),
            };
            objects.extend(below.map(|path| ObjectInfo {
                path,
                bytes: object.size,
                modified: object.last_modified,
                etag: object.e_tag,
                is_odd: odd.is_some(),
            }));
            if objects.len() > listing::LARGEST_LISTING {
                return Err(Reason::StoreUnreachable.error(format!(
                    "cannot list {}: {}",
                    self.url,
                    listing::ENDLESS
                )));
            }
        }
        Ok(objects)
    }

    /// Below the prefix, the key of an object that no path names, if it is in a folder there.
    fn odd_below(&self, key: &str, folder: &str) -> Option<String> {
        let below = match self.prefix.as_ref() {
            "" => key,
            prefix => key.strip_prefix(prefix)?.strip_prefix('/')?,
        };
        let rest = below.strip_prefix(folder)?;
        rest.starts_with('/').then(|| below.to_owned())
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
                .filter(|o| listing::odd_key(&o.location).is_none())
                .filter_map(|o| o.location.filename().map(str::to_owned))
                .collect())
        })?
    }

    /// Whether the store refused to tell tags, so that snapshots excluded by one are not known.
    pub fn hides_tags(&self) -> bool {
        self.tags.was_refused()
    }

    /// Whether it refused for lack of a right: there may be tags that nobody here sees.
    pub fn denies_tags(&self) -> bool {
        self.tags.was_denied()
    }

    /// Whether an object is there.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub fn exists(&self, below: &str) -> Result<bool> {
        self.block_on(self.is_there(below))?
    }

    async fn is_there(&self, below: &str) -> Result<bool> {
        match self.inner.head(&self.path(below)).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(store_error(format!("look at {}", self.name(below)), e)),
        }
    }

    /// An object's full name for messages.
    pub fn name(&self, below: &str) -> String {
        format!("{}/{below}", self.url.trim_end_matches('/'))
    }
}

/// In the order of their paths; of several with one path the first that was listed.
fn once_each(mut objects: Vec<ObjectInfo>) -> Vec<ObjectInfo> {
    objects.sort_by(|a, b| a.path.cmp(&b.path));
    objects.dedup_by(|later, first| later.path == first.path);
    objects
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lists_a_path_twice_has_one_object() {
        let object = |path: &str, bytes| ObjectInfo {
            path: path.to_owned(),
            bytes,
            modified: DateTime::default(),
            is_odd: false,
            etag: None,
        };
        let listed = [("v2/b", 1), ("v2/a", 2), ("v2/b", 3), ("v2/a", 4)];
        let objects = once_each(listed.map(|(path, bytes)| object(path, bytes)).to_vec());
        assert_eq!(objects, [object("v2/a", 2), object("v2/b", 1)]);
    }
}
