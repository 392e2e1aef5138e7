//! Where a lock's record is kept in a store: an object, or a file in a local folder.
//!
//! Objects are written on condition of their ETag or generation. A local folder knows no such
//! condition: there a flock on a file beside it makes reading, comparing and renaming one step.

use crate::base::none_if_missing;
use crate::error::{Error, Reason, Result};
use crate::store::Store;
use crate::store::errors::store_error;
use crate::store::folder::{FOLDER_TRIES, Folder};
use crate::store::lock::{Lock, LockStore, Record, Version, Written};
use crate::store::small_objects::{bytes_of, get_if_there};
use async_trait::async_trait;
use object_store::path::Path;
use object_store::{ObjectStore, PutMode, PutPayload};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::Duration;

/// Where the locks of a store are, below its prefix and beside what is listed.
pub const LOCKS: &str = "deltafold-locks";
/// A lock's record is short.
const LONGEST_RECORD: u64 = 64 << 10;

impl Lock {
    /// The lock `name` of a store: an object in `deltafold-locks/`. `duration` as [`on`](Self::on) takes it.
    ///
    /// # Errors
    /// `Internal` where the name is none for a file.
    pub fn new(store: &Store, name: &str, identity: &str, duration: Duration) -> Result<Self> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if name.is_empty() || !name.chars().all(is_plain) {
            return Err(Error::internal(format!("a lock with the name \"{name}\"")));
        }
        let below = format!("{LOCKS}/{name}.json");
        let full = store.name(&below);
        let kept: Arc<dyn LockStore> = match &store.local_root {
            Some(root) => Arc::new(FileLock {
                root: root.clone(),
                name: name.to_owned(),
                full,
            }),
            None => Arc::new(ObjectLock {
                inner: store.inner.clone(),
                path: store.path(&below),
                full,
            }),
        };
        let (handle, cancel) = (store.handle.clone(), store.cancel.clone());
        Ok(Self::on(kept, identity, duration, handle, cancel))
    }
}

fn parse(text: &[u8]) -> Record {
    serde_json::from_slice(text).unwrap_or_else(|_| Record::unknown(&String::from_utf8_lossy(text)))
}

fn to_text(record: &Record) -> Result<Vec<u8>> {
    serde_json::to_vec(record)
        .map_err(|e| Error::internal(format!("a lock's record that is no JSON: {e}")))
}

struct ObjectLock {
    inner: Arc<dyn ObjectStore>,
    path: Path,
    full: String,
}

impl ObjectLock {
    async fn put(&self, record: &Record, mode: PutMode) -> Result<Written> {
        use object_store::Error as E;
        let is_create = matches!(mode, PutMode::Create);
        let payload = PutPayload::from(to_text(record)?);
        match self.inner.put_opts(&self.path, payload, mode.into()).await {
            Ok(_) => Ok(Written::Done),
            Err(E::AlreadyExists { .. } | E::Precondition { .. }) => Ok(Written::Refused),
            // Somebody deleted it.
            Err(E::NotFound { .. }) if !is_create => Ok(Written::Refused),
            Err(e @ (E::NotImplemented { .. } | E::NotSupported { .. })) => Err(Reason::Configuration.error(format!(
                "this store cannot keep the lock {}, it does not write on a condition: {e}; use --lock-lease in Kubernetes",
                self.full
            ))),
            Err(e) => Err(store_error(format!("write the lock {}", self.full), e)),
        }
    }
}

#[async_trait]
impl LockStore for ObjectLock {
    fn name(&self) -> String {
        self.full.clone()
    }

    async fn read(&self) -> Result<Option<(Record, Version)>> {
        let failed = |e| store_error(format!("read the lock {}", self.full), e);
        let got = get_if_there(&self.inner, &self.path).await;
        let Some(got) = got.map_err(failed)? else {
            return Ok(None);
        };
        let version = Version {
            e_tag: got.meta.e_tag.clone(),
            version: got.meta.version.clone(),
        };
        if got.meta.size > LONGEST_RECORD {
            let text = format!("{} bytes, {version:?}", got.meta.size);
            return Ok(Some((Record::unknown(&text), version)));
        }
        let text = bytes_of(got, LONGEST_RECORD).await.map_err(failed)?;
        Ok(Some((parse(&text), version)))
    }

    async fn create(&self, record: &Record) -> Result<Written> {
        self.put(record, PutMode::Create).await
    }

    async fn update(&self, record: &Record, version: &Version) -> Result<Written> {
        self.put(record, PutMode::Update(version.clone())).await
    }

    fn unanswered(&self) -> Reason {
        Reason::StoreUnreachable
    }
}

struct FileLock {
    root: Folder,
    name: String,
    full: String,
}

impl FileLock {
    fn file(&self, suffix: &str) -> String {
        format!("{LOCKS}/{}.{suffix}", self.name)
    }

    fn failed(&self, what: &str) -> impl Fn(io::Error) -> Error {
        let what = format!("{what} the lock {}", self.full);
        move |e| Error::io(&what, e)
    }

    fn read_text(&self) -> Result<Option<Vec<u8>>> {
        let failed = self.failed("read");
        let file = self.root.read(&self.file("json"));
        let Some((file, _)) = none_if_missing(file).map_err(&failed)? else {
            return Ok(None);
        };
        // What is longer is none of ours, and what it begins with tells it apart.
        let mut text = Vec::new();
        file.take(LONGEST_RECORD)
            .read_to_end(&mut text)
            .map_err(failed)?;
        Ok(Some(text))
    }

    /// The file that is locked; whoever comes first makes it.
    fn flock_file(&self) -> io::Result<File> {
        let path = self.file("flock");
        for _ in 0..FOLDER_TRIES {
            let opened = match self.root.write(&path) {
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    self.root.make(LOCKS)?;
                    self.root.create(&path)
                }
                opened => opened,
            };
            match opened {
                Err(e) if matches!(e.kind(), ErrorKind::AlreadyExists | ErrorKind::NotFound) => {}
                opened => return opened,
            }
        }
        self.root.write(&path)
    }

    /// Waits until no other process reads and writes. What it gives is let go by being dropped, and by
    /// the system where a process ends.
    async fn alone(&self) -> Result<File> {
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

    /// Writes the record if what is there is as expected.
    async fn replace(&self, record: &Record, expected: Option<&[u8]>) -> Result<Written> {
        let _alone = self.alone().await?;
        if self.read_text()?.as_deref() != expected {
            return Ok(Written::Refused);
        }
        let new = self.file("json.new");
        let write = || {
            // Nobody else writes it now; one that is left behind may be of another user.
            none_if_missing(self.root.remove(&new))?;
            let mut file = self.root.create(&new)?;
            file.write_all(&to_text(record)?)?;
            file.sync_all()?;
            self.root.rename(&new, &self.file("json"))?;
            self.root.sync(LOCKS)
        };
        write().map_err(self.failed("write"))?;
        Ok(Written::Done)
    }
}

#[async_trait]
impl LockStore for FileLock {
    fn name(&self) -> String {
        self.full.clone()
    }

    async fn read(&self) -> Result<Option<(Record, Version)>> {
        Ok(self.read_text()?.map(|text| {
            let version = Version {
                e_tag: Some(String::from_utf8_lossy(&text).into_owned()),
                version: None,
            };
            (parse(&text), version)
        }))
    }

    async fn create(&self, record: &Record) -> Result<Written> {
        self.replace(record, None).await
    }

    async fn update(&self, record: &Record, version: &Version) -> Result<Written> {
        let expected = version.e_tag.as_deref().unwrap_or_default().as_bytes();
        self.replace(record, Some(expected)).await
    }

    fn unanswered(&self) -> Reason {
        Reason::Io
    }
}
