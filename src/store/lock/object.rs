//! The record of a lock in a store: an object, or a file in a local folder.
//!
//! An object is written on condition of its ETag or generation. A local folder has no such condition: there a
//! `flock` on a file beside the record makes reading, comparing and renaming one step.

use crate::base::none_if_missing;
use crate::base::opt::LOCK_LEASE;
use crate::error::{Error, Reason, Result};
use crate::store::Store;
use crate::store::errors::{no_conditions, store_error};
use crate::store::folder::Folder;
use crate::store::lock::{ConditionalWrite, Lock, LockRecord, LockStore, RecordVersion};
use crate::store::small_objects::{bytes_of, get_if_exists};
use crate::store::staging::conditional_write_error;
use async_trait::async_trait;
use object_store::path::Path;
use object_store::{ObjectStore, PutMode, PutPayload, PutResult};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The folder of the locks, below the store's prefix and beside the folders that are listed for snapshots.
pub const LOCKS: &str = "deltafold-locks";
/// The most bytes of a record. A longer object is not one of ours.
const LONGEST_RECORD: u64 = 64 << 10;

/// Returns the path of a lock's record below the store's prefix: `deltafold-locks/<name>.json`.
pub fn lock_path(name: &str) -> String {
    format!("{LOCKS}/{name}.json")
}

impl Lock {
    /// Returns the lock `name` of a store, whose record is the object [`lock_path`]. See [`on`](Self::on) for
    /// `duration`.
    ///
    /// # Errors
    /// Fails with `Internal` if the name has other characters than letters, digits, `-` and `_`.
    pub fn new(store: &Store, name: &str, identity: &str, duration: Duration) -> Result<Self> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if name.is_empty() || !name.chars().all(is_plain) {
            return Err(Error::internal(format!(
                "invalid name of a lock: \"{name}\""
            )));
        }
        let below = lock_path(name);
        let full = store.name(&below);
        let record_store: Arc<dyn LockStore> = match &store.local_root {
            Some(root) => Arc::new(FileRecord {
                root: root.clone(),
                lacks_locks: Arc::clone(&store.lacks_locks),
                name: name.to_owned(),
                full,
            }),
            None => Arc::new(ObjectRecord {
                store: store.clone(),
                path: store.path(&below),
                full,
            }),
        };
        let (handle, cancel) = (store.handle.clone(), store.cancel.clone());
        Ok(Self::on(record_store, identity, duration, handle, cancel))
    }
}

fn parse(text: &[u8]) -> LockRecord {
    serde_json::from_slice(text)
        .unwrap_or_else(|_| LockRecord::unknown(&String::from_utf8_lossy(text)))
}

fn to_text(record: &LockRecord) -> Result<Vec<u8>> {
    serde_json::to_vec(record)
        .map_err(|e| Error::internal(format!("cannot write a lock's record as JSON: {e}")))
}

/// A record that is an object.
struct ObjectRecord {
    store: Store,
    path: Path,
    /// The object's full name, for messages.
    full: String,
}

impl ObjectRecord {
    /// Writes the record. Where a policy may forbid to overwrite it, a new record is written twice: a lock that cannot
    /// be renewed would fail only when others wait for it.
    async fn put(&self, record: &LockRecord, mode: PutMode) -> Result<ConditionalWrite> {
        let is_create = matches!(mode, PutMode::Create);
        match self.put_once(record, mode).await? {
            Some(written) if is_create && self.store.may_be_immutable => {
                let version = RecordVersion {
                    e_tag: written.e_tag,
                    version: written.version,
                };
                let again = self.put_once(record, PutMode::Update(version)).await?;
                Ok(again.map_or(ConditionalWrite::Refused, |_| ConditionalWrite::Done))
            }
            Some(_) => Ok(ConditionalWrite::Done),
            None => Ok(ConditionalWrite::Refused),
        }
    }

    /// Returns `None` if the condition does not hold.
    async fn put_once(&self, record: &LockRecord, mode: PutMode) -> Result<Option<PutResult>> {
        use object_store::Error as E;
        let is_create = matches!(mode, PutMode::Create);
        if let PutMode::Update(version) = &mode
            && version.e_tag.is_none()
            && version.version.is_none()
        {
            return Err(no_conditions(format!(
                "cannot keep the lock {} (the store sends no ETag)",
                self.full
            )));
        }
        let payload = PutPayload::from(to_text(record)?);
        let written = self.store.inner.put_opts(&self.path, payload, mode.into());
        match written.await {
            Ok(written) => Ok(Some(written)),
            Err(E::AlreadyExists { .. } | E::Precondition { .. }) => Ok(None),
            // The record was deleted meanwhile.
            Err(E::NotFound { .. }) if !is_create => Ok(None),
            Err(E::NotImplemented { .. } | E::NotSupported { .. }) => {
                self.store.lacks_locks.store(true, Ordering::Relaxed);
                Err(Reason::Configuration.error(format!(
                    "cannot keep the lock {}: without conditional writes nothing in a store is a lock: use {LOCK_LEASE} in Kubernetes",
                    self.full
                )))
            }
            Err(e) => {
                let action = format!("write the lock {}", self.full);
                let e = conditional_write_error(&self.store, &action, e).await;
                Err(match e.reason() {
                    Reason::ObjectLocked => Reason::ObjectLocked.error(format!(
                        "{e}: a lock must be overwritten, so it cannot live in an immutable bucket: use {LOCK_LEASE}, or keep the backup in a bucket without a retention policy"
                    )),
                    _ => e,
                })
            }
        }
    }
}

#[async_trait]
impl LockStore for ObjectRecord {
    fn name(&self) -> String {
        self.full.clone()
    }

    async fn read(&self) -> Result<Option<(LockRecord, RecordVersion)>> {
        let failed = |e| store_error(format!("read the lock {}", self.full), e);
        let object = get_if_exists(&self.store.inner, &self.path).await;
        let Some(object) = object.map_err(failed)? else {
            return Ok(None);
        };
        let version = RecordVersion {
            e_tag: object.meta.e_tag.clone(),
            version: object.meta.version.clone(),
        };
        if object.meta.size > LONGEST_RECORD {
            let text = format!("{} bytes, {version:?}", object.meta.size);
            return Ok(Some((LockRecord::unknown(&text), version)));
        }
        let text = bytes_of(object, LONGEST_RECORD).await.map_err(failed)?;
        Ok(Some((parse(&text), version)))
    }

    async fn create(&self, record: &LockRecord) -> Result<ConditionalWrite> {
        self.put(record, PutMode::Create).await
    }

    async fn update(
        &self,
        record: &LockRecord,
        version: &RecordVersion,
    ) -> Result<ConditionalWrite> {
        self.put(record, PutMode::Update(version.clone())).await
    }

    fn unanswered(&self) -> Reason {
        Reason::StoreUnreachable
    }
}

/// A record that is a file in a local folder.
struct FileRecord {
    root: Folder,
    /// Set if the file system is no place for locks.
    lacks_locks: Arc<AtomicBool>,
    name: String,
    /// The file's full name, for messages.
    full: String,
}

impl FileRecord {
    fn file(&self, suffix: &str) -> String {
        format!("{LOCKS}/{}.{suffix}", self.name)
    }

    /// Returns a function that turns an I/O error into ours; `action` is a verb.
    fn failed(&self, action: &str) -> impl Fn(io::Error) -> Error {
        let context = format!("{action} the lock {}", self.full);
        move |e| Error::io(&context, e)
    }

    fn read_text(&self) -> Result<Option<Vec<u8>>> {
        let failed = self.failed("read");
        let file = self.root.read(&self.file("json"));
        let Some((file, _)) = none_if_missing(file).map_err(&failed)? else {
            return Ok(None);
        };
        // A longer file is not one of ours. Its beginning is enough to tell versions of it apart.
        let mut text = Vec::new();
        file.take(LONGEST_RECORD)
            .read_to_end(&mut text)
            .map_err(failed)?;
        Ok(Some(text))
    }

    /// Opens the file for `flock`, and creates it if it is missing.
    fn flock_file(&self) -> io::Result<File> {
        let path = self.file("flock");
        match self.root.write(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => self.root.make(LOCKS)?,
            opened => return opened,
        }
        match self.root.create(&path) {
            // Another process was faster.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => self.root.write(&path),
            created => created,
        }
    }

    /// Waits until this process holds the `flock`. Dropping the file gives it back, as does the end of the
    /// process.
    async fn lock_exclusively(&self) -> Result<File> {
        const PAUSE: Duration = Duration::from_millis(5);
        let file = self.flock_file().map_err(self.failed("open"))?;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(e) => return Err(self.failed("flock")(e.into())),
            }
        }
    }

    /// Writes the record if the current one is as expected.
    async fn replace(
        &self,
        record: &LockRecord,
        expected: Option<&[u8]>,
    ) -> Result<ConditionalWrite> {
        let _exclusive = self.lock_exclusively().await?;
        if self.read_text()?.as_deref() != expected {
            return Ok(ConditionalWrite::Refused);
        }
        self.write(record).map_err(self.failed("write"))?;
        Ok(ConditionalWrite::Done)
    }

    /// Replaces the file, under the `flock`.
    fn write(&self, record: &LockRecord) -> io::Result<()> {
        let new = self.file("json.new");
        // Remove the file that a killed process left behind: another user may own it.
        none_if_missing(self.root.remove(&new))?;
        let mut file = self.root.create(&new)?;
        file.write_all(&to_text(record)?)?;
        file.sync_all()?;
        self.root.rename(&new, &self.file("json"))?;
        self.root.sync(LOCKS)
    }
}

#[async_trait]
impl LockStore for FileRecord {
    fn name(&self) -> String {
        self.full.clone()
    }

    async fn read(&self) -> Result<Option<(LockRecord, RecordVersion)>> {
        let Some(text) = self.read_text()? else {
            return Ok(None);
        };
        let version = RecordVersion {
            e_tag: Some(String::from_utf8_lossy(&text).into_owned()),
            version: None,
        };
        Ok(Some((parse(&text), version)))
    }

    async fn create(&self, record: &LockRecord) -> Result<ConditionalWrite> {
        if !self.root.keeps_names().map_err(self.failed("write"))? {
            self.lacks_locks.store(true, Ordering::Relaxed);
            return Err(Reason::Configuration.error(format!(
                "cannot keep the lock {}: the file system has neither hard links nor RENAME_NOREPLACE, as a mounted bucket, so nothing in it is a lock: use {LOCK_LEASE} in Kubernetes, or the bucket itself as the store (s3://, gs://, az://)",
                self.full
            )));
        }
        self.replace(record, None).await
    }

    async fn update(
        &self,
        record: &LockRecord,
        version: &RecordVersion,
    ) -> Result<ConditionalWrite> {
        let expected = version.e_tag.as_deref().unwrap_or_default().as_bytes();
        self.replace(record, Some(expected)).await
    }

    fn unanswered(&self) -> Reason {
        Reason::Io
    }
}
