//! Object stores: opens one by its URL, lists a prefix, and reads, publishes and deletes objects.
//!
//! Knows paths and bytes. Does not know what a snapshot is: `backup` does.
//!
//! - `open`: from a URL to a [`Store`]; one file a provider
//! - `fetch`, `read_ahead`, `listing`: reading
//! - `publish`: writing an object so that it appears whole or not at all, and never over another
//! - `staging`: the folder of temporary objects; `uploads`: what killed uploads leave
//! - `small_objects`: markers, notes and pins; deletions
//! - `lock`: mutual exclusion; `object_lock`: S3's; `exclude`: tags; `server_facts`: what responses show
//! - `requests`, `connect`, `bandwidth`: how many requests, over which connections, how fast; `asked`: what a request is
//!   for, `answers`: what its response means
//! - `s3`, `azure`, `gcs`, `swift`, `folder`, `local`: what only one kind of store has

mod answers;
mod asked;
pub mod azure;
pub mod bandwidth;
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
mod proxies;
pub mod publish;
mod read_ahead;
mod requests;
pub mod retrying_client;
pub mod s3;
mod server_facts;
mod small_objects;
pub mod staging;
mod swift;
mod uploads;
mod xml;

pub use bandwidth::Bandwidth;
pub use encryption::{EncryptingWriter, Keys};
pub use errors::store_error;
pub use fetch::{ObjectReader, is_large};
pub use folder::{FileMode, Folder};
pub use lock::LOCKS;
pub use open::open;
pub use publish::{LookFirst, Unnamed, Upload};
pub use read_ahead::{ListedSnapshot, ReadAhead};
pub use requests::{DEFAULT_REQUESTS, MAX_REQUESTS};
pub use uploads::{UnfinishedUpload, Versioning};

use crate::base::Cancel;
use crate::error::{Error, Result};
use chrono::{DateTime, Utc};
use exclude::ExcludeTags;
use futures::{Stream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use s3::S3;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use swift::Swift;
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, Semaphore};

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// The path below the store's prefix, with `/` between folders.
    pub path: String,
    /// Size in the store, in bytes.
    pub bytes: u64,
    /// When it was written, by the store's clock.
    pub modified: DateTime<Utc>,
    /// No request of ours can name the object. Its path may be shown, but not read or deleted.
    pub is_odd: bool,
    /// The ETag, if the listing has it. For a file, its inode and the time of its last change.
    pub etag: Option<String>,
}

/// The result of publishing an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The name was free, and the object has it now.
    Created,
    /// An object with the same bytes had the name already.
    Identical,
    /// Another object has the name. Nothing was published.
    Taken,
}

/// The most objects of a listing that one request returns.
const PAGE: usize = 1000;
/// Time limit for a request that cleans up.
const CLEAN_UP_PATIENCE: Duration = Duration::from_secs(5);

/// One prefix of one object store. Clones share their limits and what they have learnt about the store.
///
/// Most calls block: do not make them on an async thread of the runtime.
#[derive(Clone)]
pub struct Store {
    inner: Arc<dyn ObjectStore>,
    prefix: Path,
    url: String,
    tags: ExcludeTags,
    /// The client for S3's own requests, if the store is S3.
    s3: Option<Arc<S3>>,
    /// Swift's client, if the store is Swift.
    swift: Option<Swift>,
    /// The bucket's object lock, once it has been requested.
    object_lock: Arc<OnceCell<bool>>,
    /// The folder, if the store is a local one. Its calls run on the calling thread.
    local_root: Option<Folder>,
    /// Before which writes the store is asked whether the name is free.
    look_first: LookFirst,
    /// A policy of the bucket may forbid to overwrite objects.
    may_be_immutable: bool,
    /// The store turned out to have no conditions for locks.
    lacks_locks: Arc<AtomicBool>,
    /// A bulk request was refused for good: objects are deleted one by one.
    deletes_singly: Arc<AtomicBool>,
    /// The most requests under way at once.
    requests: usize,
    /// A permit for each range of a large object under way; `None` if large objects are read by one request.
    ranges: Option<Arc<Semaphore>>,
    /// A permit for each byte of an upload under way.
    uploads: Arc<Semaphore>,
    handle: Handle,
    cancel: Cancel,
    bytes_read: Arc<AtomicU64>,
    /// The limits for reading and for writing.
    bandwidth: Option<(Bandwidth, Bandwidth)>,
}

impl Store {
    /// Returns a prefix of an open store. `url` is for messages only and must have no secret in it.
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
            swift: None,
            object_lock: Arc::default(),
            local_root: None,
            look_first: LookFirst::Never,
            may_be_immutable: false,
            lacks_locks: Arc::default(),
            deletes_singly: Arc::default(),
            requests: DEFAULT_REQUESTS,
            ranges: None,
            uploads: Arc::new(Semaphore::new(publish::UPLOAD_BYTES)),
            handle,
            cancel: Cancel::default(),
            bytes_read: Arc::default(),
            bandwidth: None,
        }
    }

    /// Makes this the store of a local folder.
    pub fn with_local_root(mut self, root: impl Into<Folder>) -> Self {
        self.local_root = Some(root.into());
        self
    }

    /// Adds S3's own requests: object retention, uploads, copies by ranges.
    pub fn with_s3(mut self, s3: Arc<S3>) -> Self {
        self.s3 = Some(s3);
        self
    }

    /// Adds Swift's own requests: unfinished uploads.
    fn with_swift(mut self, swift: Swift) -> Self {
        self.swift = Some(swift);
        self
    }

    /// Sets the cancellation that ends transfers and waits.
    pub fn with_cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = cancel;
        self
    }

    /// Sets the most requests under way at once, at least 1.
    pub fn with_requests(mut self, most: usize) -> Self {
        self.requests = most.max(1);
        self
    }

    /// Reads large objects by several ranges at once. The store must tell versions of an object apart.
    pub fn with_ranges(mut self) -> Self {
        self.ranges = Some(Arc::new(Semaphore::new(fetch::RANGES_AHEAD)));
        self
    }

    /// Asks before some writes whether the name is free.
    pub fn with_look_first(mut self, look_first: LookFirst) -> Self {
        self.look_first = look_first;
        self
    }

    /// Says that a policy of the bucket may forbid to overwrite objects. In a bucket of S3 a new version takes the name.
    pub fn with_retention_policies(mut self) -> Self {
        self.may_be_immutable = true;
        self
    }

    /// Limits how fast objects are read and written. The bytes of an upload count when they are buffered; a
    /// full part is sent at once.
    pub fn with_bandwidth(mut self, read: Bandwidth, write: Bandwidth) -> Self {
        self.bandwidth = Some((read, write));
        self
    }

    /// Returns the URL, without secrets.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the cancellation that ends transfers and waits.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Returns whether writes are sent with conditions: the user can say that a server of S3 keeps none.
    pub fn uses_conditions(&self) -> bool {
        self.look_first != LookFirst::Instead
    }

    /// Returns whether a lock may be kept in the store. One that has no conditions for it shows with the first lock.
    pub fn may_have_locks(&self) -> bool {
        !self.lacks_locks.load(Ordering::Relaxed)
    }

    /// Returns whether a bulk request to delete objects was refused for good.
    pub fn deletes_singly(&self) -> bool {
        self.deletes_singly.load(Ordering::Relaxed)
    }

    /// Returns the runtime on which requests run.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns the number of bytes read from the store so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Returns the full path of an object. Nothing is encoded: the path is the name at the store.
    fn path(&self, below: &str) -> Path {
        let full = match self.prefix.as_ref() {
            "" => below.to_owned(),
            prefix => format!("{prefix}/{below}"),
        };
        // Names that are no path are odd and never requested. Encoded, they name no object.
        Path::parse(&full).unwrap_or_else(|_| full.into())
    }

    /// Waits for a request. Fails with `Terminated` if cancelled first.
    fn block_on<F: Future>(&self, f: F) -> Result<F::Output> {
        match self.local_root {
            // Files are read and written on this thread, without the runtime.
            Some(_) => futures::executor::block_on(self.cancel.or(f)),
            None => self.handle.block_on(self.cancel.or(f)),
        }
    }

    /// Returns the most requests that may be under way at once, or `None` for a local folder, which has no
    /// requests.
    pub fn requests(&self) -> Option<usize> {
        self.local_root.is_none().then_some(self.requests)
    }

    /// Waits a few seconds for a request that cleans up, even if the operation is cancelled.
    fn clean_up(&self, f: impl Future<Output = Result<()>>) -> Result<(), String> {
        let limited = async { tokio::time::timeout(CLEAN_UP_PATIENCE, f).await };
        match self.handle.block_on(limited) {
            Ok(result) => result.map_err(|e| e.to_string()),
            Err(_) => Err("the store did not answer in time".to_owned()),
        }
    }

    /// Returns the path and the size of all objects in some folders below the prefix.
    ///
    /// # Errors
    /// Fails with the errors of [`objects`](Self::objects).
    pub fn list(&self, folders: &[&str]) -> Result<Vec<(String, u64)>> {
        let objects = self.objects(folders)?.into_iter();
        Ok(objects.map(|o| (o.path, o.bytes)).collect())
    }

    /// Returns all objects in some folders below the prefix, in the order of their paths. Lists the folders
    /// at the same time. A path that the server lists twice is returned once.
    ///
    /// # Errors
    /// Fails with `StoreUnreachable`, `PermissionDenied`, `Unauthenticated`, `Configuration`, or
    /// `NoSnapshots` if the bucket does not exist.
    pub fn objects(&self, folders: &[&str]) -> Result<Vec<ObjectInfo>> {
        self.list_folders(folders).map(once_each)
    }

    fn list_folders(&self, folders: &[&str]) -> Result<Vec<ObjectInfo>> {
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
        let listing = self.inner.list(Some(&self.path(folder)));
        self.collect(listing, folder).await
    }

    /// Collects what a listing of a folder returns.
    async fn collect(
        &self,
        mut listing: impl Stream<Item = object_store::Result<ObjectMeta>> + Unpin,
        folder: &str,
    ) -> Result<Vec<ObjectInfo>> {
        let failed = |e| store_error(format!("list {}", self.url), e);
        let mut objects = Vec::new();
        while let Some(object) = listing.try_next().await.map_err(failed)? {
            let is_odd = listing::odd_key(&object.location).is_some();
            let below = self.listed_below(&object.location, folder);
            objects.extend(below.map(|path| ObjectInfo {
                path,
                bytes: object.size,
                modified: object.last_modified,
                etag: object.e_tag,
                is_odd,
            }));
        }
        Ok(objects)
    }

    /// Returns a path below the prefix, if it is there.
    fn below(&self, path: &Path) -> Option<String> {
        let parts = path.prefix_match(&self.prefix)?;
        let parts: Vec<String> = parts.map(|p| p.as_ref().to_owned()).collect();
        Some(parts.join("/"))
    }

    /// Returns the path below the prefix of an object in a listing of `folder`, whose key may be odd.
    fn listed_below(&self, location: &Path, folder: &str) -> Option<String> {
        match listing::odd_key(location) {
            Some(key) => self.odd_below(&key, folder),
            None => self.below(location),
        }
    }

    /// Returns the path below the prefix for an odd key, if it is in `folder`.
    fn odd_below(&self, key: &str, folder: &str) -> Option<String> {
        let below = match self.prefix.as_ref() {
            "" => key,
            prefix => key.strip_prefix(prefix)?.strip_prefix('/')?,
        };
        let rest = below.strip_prefix(folder)?;
        let is_in_folder = folder.is_empty() || rest.starts_with('/');
        is_in_folder.then(|| below.to_owned())
    }

    /// Returns the first objects in a folder below the prefix, by one request, and whether these are all. An empty name
    /// means the prefix.
    ///
    /// # Errors
    /// Fails with the errors of [`objects`](Self::objects).
    pub(crate) fn first_page(&self, folder: &str) -> Result<(Vec<ObjectInfo>, bool)> {
        let mut listed = 0;
        let listing = self.inner.list(Some(&self.path(folder))).take(PAGE);
        let listing = listing.inspect(|_| listed += 1);
        let objects = self.block_on(self.collect(listing, folder))??;
        Ok((once_each(objects), listed < PAGE))
    }

    /// Returns the objects whose paths below a folder begin like this. If the store lists in the order of paths, the
    /// listing is read no further than these.
    ///
    /// # Errors
    /// Fails with the errors of [`objects`](Self::objects).
    pub(crate) fn objects_beginning(
        &self,
        folder: &str,
        beginning: &str,
    ) -> Result<Vec<ObjectInfo>> {
        let in_folder = format!("{folder}/{beginning}");
        let in_folder = in_folder.as_str();
        let mut objects = match &self.local_root {
            Some(root) => root.list(folder, folder::DEEPEST)?,
            None => {
                let is_before_end = |object: &ObjectMeta| {
                    let path = self.listed_below(&object.location, folder);
                    let is_before = |path: &str| path < in_folder || path.starts_with(in_folder);
                    let is_before_end = path.as_deref().is_none_or(is_before);
                    futures::future::ready(Ok(is_before_end))
                };
                let listing = self.inner.list(Some(&self.path(folder)));
                let listing = listing.try_take_while(is_before_end);
                self.block_on(self.collect(listing, folder))??
            }
        };
        objects.retain(|object| object.path.starts_with(in_folder));
        Ok(once_each(objects))
    }

    /// Returns the paths of the first objects below the prefix: for hints in messages.
    ///
    /// # Errors
    /// Fails with the errors of [`objects`](Self::objects).
    pub(crate) fn first_paths(&self) -> Result<Vec<String>> {
        let objects = self.first_page("")?.0.into_iter();
        Ok(objects.filter(|o| !o.is_odd).map(|o| o.path).collect())
    }

    /// Returns whether the store has refused to show tags, so that snapshots excluded by a tag are unknown.
    pub fn tags_refused(&self) -> bool {
        self.tags.was_refused()
    }

    /// Returns whether it refused for lack of a permission, so that there may be hidden tags.
    pub fn tags_forbidden(&self) -> bool {
        self.tags.was_denied()
    }

    /// Returns whether an object exists.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn exists(&self, below: &str) -> Result<bool> {
        Ok(self.size_of(below)?.is_some())
    }

    /// Returns the size of an object in bytes; `None` if it does not exist.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub(crate) fn size_of(&self, below: &str) -> Result<Option<u64>> {
        Ok(self.info(below)?.map(|object| object.bytes))
    }

    /// Returns what a listing would say of an object; `None` if it does not exist.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub(crate) fn info(&self, below: &str) -> Result<Option<ObjectInfo>> {
        match self.block_on(self.inner.head(&self.path(below)))? {
            Ok(object) => Ok(Some(ObjectInfo {
                path: below.to_owned(),
                bytes: object.size,
                modified: object.last_modified,
                is_odd: false,
                etag: object.e_tag,
            })),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(store_error(
                format!("read the headers of {}", self.name(below)),
                e,
            )),
        }
    }

    /// Starts to read an object by one request.
    pub fn read(&self, below: &str) -> ObjectReader {
        fetch::fetch(self, below, 0, false)
    }

    /// Starts to read an object of about `bytes` bytes; a large one by several ranges at once.
    pub fn fetch(&self, below: &str, bytes: u64) -> ObjectReader {
        fetch::fetch(self, below, bytes, false)
    }

    /// Starts to read a snapshot, as [`fetch`](Self::fetch) does. Unless it is known to be excluded, reading fails with an
    /// error that sets it aside if a tag excludes it. If the answer does not tell whether there are tags, they are requested.
    pub fn fetch_snapshot(&self, snapshot: &ListedSnapshot) -> ObjectReader {
        let ListedSnapshot {
            path,
            bytes,
            is_excluded,
        } = snapshot;
        fetch::fetch(self, path, *bytes, !is_excluded)
    }

    /// Returns whether the store can be asked for versions.
    pub fn tells_versions(&self) -> bool {
        self.s3.is_some()
    }

    /// Returns whether the store has unfinished uploads, and lists them.
    pub fn lists_uploads(&self) -> bool {
        self.s3.is_some() || self.swift.is_some()
    }

    /// Returns whether requests for tags make sense: the store may have tags, and has not refused to read
    /// them.
    pub fn can_request_tags(&self) -> bool {
        self.tags.can_tell() && !self.tags.was_refused()
    }

    /// Returns the client of S3's own requests.
    fn s3(&self, action: &str) -> Result<&S3> {
        let s3 = self.s3.as_deref();
        s3.ok_or_else(|| Error::internal(format!("cannot {action}: this store is not S3")))
    }

    /// Returns an object's full name, for messages.
    pub fn name(&self, below: &str) -> String {
        format!("{}/{below}", self.url.trim_end_matches('/'))
    }
}

/// Sorts objects by path. Of several with one path, keeps the first that was listed.
fn once_each(mut objects: Vec<ObjectInfo>) -> Vec<ObjectInfo> {
    objects.sort_by(|a, b| a.path.cmp(&b.path));
    objects.dedup_by(|later, first| later.path == first.path);
    objects
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_listed_twice_is_one_object() {
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
