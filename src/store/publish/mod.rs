//! Publishes objects: an object appears under its name whole or not at all, and never over another object.
//!
//! An object is uploaded to the staging folder, read back there and compared, and then copied to its name by
//! the store, on condition that the name is free. A multipart upload itself cannot have this condition.
//! - `direct`: a small object is written to its name by one request, if the store proves that this is safe
//! - `claim`: for servers that ignore conditions, or have none
//! - `naming`: prepares the copy while the object is read back
//! - In a local folder (`local`) the object is one file, which is renamed
//!
//! Called by `ops` for snapshots, and by `small_objects`.

mod claim;
pub mod direct;
mod naming;

use super::errors::{io_cause, is_taken, store_error, write_error};
use super::fetch::acquire_permit;
use super::folder::{FOLDER_ATTEMPTS, RenameOutcome};
use super::local;
use super::s3::CopyOutcome;
use super::staging::StagingName;
use super::{CLEAN_UP_PATIENCE, Published, Store};
use crate::base::lock;
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use claim::Claim;
use crc_fast::{CrcAlgorithm, Digest};
use direct::HeldObject;
use naming::{NameCheck, NamingPreparation};
use object_store::{
    CopyMode, CopyOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload,
};
use std::io::{self, ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, JoinHandle, JoinSet};

/// Size of the first parts in bytes. S3 requires at least 5 MiB for all parts but the last.
const PART: usize = 5 << 20;
/// After this many parts, parts grow by 5 MiB. S3 accepts 10,000 parts, so 275 GB fit.
const PARTS_OF_ONE_SIZE: u64 = 1_000;
/// The first write below this size reserves no memory for a whole part: it may be all.
const LITTLE: usize = 64 << 10;
/// The largest object that is written by one request, in bytes.
const SMALL: usize = 8 << 20;

/// The most parts under way to a local folder, whatever the number of threads.
const MOST_IN_FLIGHT: usize = 15;
/// The most bytes of parts under way, of all uploads to a store together. Beside these, each upload may have
/// one part.
pub(super) const UPLOAD_BYTES: usize = 45 << 20;

/// An upload under way. Write the object's bytes to it, then call [`finish`](Self::finish).
pub struct Upload {
    most_in_flight: usize,
    part: Vec<u8>,
    parts: u64,
    // Declared before the staging object: the parts' tasks are dropped before the upload is aborted.
    in_flight: JoinSet<object_store::Result<()>>,
    /// A permit for one part. A part that is larger than all shared permits would wait for ever without it.
    own_permit: Arc<Semaphore>,
    staging: Staging,
    /// The name that the object will probably get.
    likely_name: Option<String>,
    sum: Digest,
    bytes: u64,
}

/// An object that is complete, was read back, and waits for its name.
pub struct Staged(StagedAs);

enum StagedAs {
    StagingObject(Box<StagingObject>),
    HeldInMemory(Box<HeldObject>),
}

/// An object in the staging folder.
struct StagingObject {
    // Declared before the staging object, which it copies.
    preparation: Mutex<Option<NamingPreparation>>,
    staging: Staging,
    sum: u64,
    bytes: u64,
}

/// A staging object or an upload of it. Dropping this removes what there is.
struct Staging {
    store: Store,
    name: StagingName,
    multipart: Option<Box<dyn MultipartUpload>>,
    /// The start of the multipart upload, in the background.
    begun: Option<JoinHandle<object_store::Result<Box<dyn MultipartUpload>>>>,
    /// The staging object may exist.
    may_exist: AtomicBool,
}

/// Returns a checksum against damage. It need not resist forgery: a snapshot has its own SHA-256.
fn new_sum() -> Digest {
    Digest::new(CrcAlgorithm::Crc64Nvme)
}

impl Upload {
    /// Starts an upload. `hint` becomes a part of the staging object's name. To a local folder, at most
    /// `threads` parts are under way at once, and at least one beside the one that is being filled.
    pub fn new(store: &Store, hint: &str, threads: usize) -> Self {
        Upload {
            // One more part is being filled.
            most_in_flight: threads.saturating_sub(1).clamp(1, MOST_IN_FLIGHT),
            part: Vec::new(),
            parts: 0,
            in_flight: JoinSet::new(),
            own_permit: Arc::new(Semaphore::new(1)),
            staging: Staging {
                store: store.clone(),
                name: StagingName::new(hint),
                multipart: None,
                begun: None,
                may_exist: AtomicBool::new(false),
            },
            likely_name: None,
            sum: new_sum(),
            bytes: 0,
        }
    }

    /// Sets the name that the object will probably get. The naming is prepared while the object is read back.
    pub fn likely_named(mut self, below: String) -> Self {
        self.likely_name = Some(below);
        self
    }

    fn part_size(&self) -> usize {
        PART * (1 + self.parts / PARTS_OF_ONE_SIZE) as usize
    }

    /// Returns how many bytes are buffered before some are sent.
    fn buffer_size(&self) -> usize {
        match (self.parts, &self.staging.begun) {
            (0, None) => SMALL,
            // Buffer more until the multipart upload has begun.
            (0, Some(_)) => SMALL + PART,
            _ => self.part_size(),
        }
    }

    /// Waits until one more part of `bytes` bytes may be under way. Returns its permit; a local folder needs
    /// none.
    fn wait_to_send(&mut self, bytes: usize) -> Result<Option<OwnedSemaphorePermit>> {
        let store = &self.staging.store;
        if store.local_root.is_some() {
            while self.in_flight.len() >= self.most_in_flight {
                self.wait_for_one()?;
            }
            return Ok(None);
        }
        let bytes = bytes.try_into().unwrap_or(u32::MAX);
        let permit = store.block_on(acquire_permit(&self.own_permit, &store.uploads, bytes))??;
        while let Some(sent) = self.in_flight.try_join_next() {
            self.check_sent(sent)?;
        }
        Ok(Some(permit))
    }

    /// Sends one part, and does not wait for its end.
    fn send_part(&mut self) -> Result<()> {
        self.staging.store.cancel.check()?;
        if self.staging.multipart.is_none() {
            self.staging.begin()?;
        }
        // Some servers require that all parts but the last have one size.
        let size = self.part.len().min(self.part_size());
        let permit = self.wait_to_send(size)?;
        let rest = self.part.split_off(size);
        let part = std::mem::replace(&mut self.part, rest);
        if let Some(multipart) = &mut self.staging.multipart {
            let sent = multipart.put_part(PutPayload::from(part));
            self.parts += 1;
            let sent = async move {
                let _permit = permit;
                sent.await
            };
            self.in_flight.spawn_on(sent, &self.staging.store.handle);
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<()> {
        match self.staging.store.block_on(self.in_flight.join_next())? {
            None => Ok(()),
            Some(sent) => self.check_sent(sent),
        }
    }

    /// Returns the error of a part's task, if it failed.
    fn check_sent(&self, sent: Result<object_store::Result<()>, JoinError>) -> Result<()> {
        match sent {
            Ok(sent) => sent.map_err(|e| self.staging.error(e)),
            Err(e) => Err(Error::internal(format!("an upload's task ended: {e}"))),
        }
    }

    /// Completes the upload and reads the staging object back. A small object is kept in memory instead if it
    /// can be written to its name by one request.
    ///
    /// # Errors
    /// Fails with the store's errors, with `Io` if the object reads back differently, and with
    /// `SnapshotVanished` if the staging object is gone.
    pub fn finish(mut self) -> Result<Staged> {
        let store = &self.staging.store;
        let is_small = self.parts == 0 && self.staging.begun.is_none();
        if is_small
            && let Some(direct) = store.direct()?
            && let Some(reservation) = direct.reserve(self.part.len())
        {
            // Copy, since the part's buffer is larger than its content.
            let content = Bytes::copy_from_slice(&self.part);
            let held = HeldObject::new(store, direct, content, reservation);
            return Ok(Staged(StagedAs::HeldInMemory(Box::new(held))));
        }
        while !self.part.is_empty() && !is_small {
            self.send_part()?;
        }
        while !self.in_flight.is_empty() {
            self.wait_for_one()?;
        }
        let Upload {
            part,
            mut staging,
            likely_name,
            sum,
            bytes,
            ..
        } = self;
        let written = staging.complete(part)?;
        let preparation = match &written {
            Ok(()) => likely_name.and_then(|below| {
                NamingPreparation::begin(&staging.store, &staging.name.path, below, bytes)
            }),
            Err(_) => None,
        };
        let staged = StagingObject {
            preparation: Mutex::new(preparation),
            staging,
            sum: sum.finalize(),
            bytes,
        };
        let staging = &staged.staging;
        let is_same = staged.is_same(&staging.name.path);
        match (written, is_same) {
            // If the object is there after an error, only the response was lost.
            (_, Ok(true)) => Ok(Staged(StagedAs::StagingObject(Box::new(staged)))),
            (_, Err(e)) if e.reason() == Reason::Terminated => Err(e),
            (Err(e), _) => Err(staging.error(e)),
            (Ok(()), Err(e)) => Err(e),
            (Ok(()), Ok(false)) => Err(Reason::Io.error(format!(
                    "{} reads back differently from what was written: the store is at fault; check it before you rely on its snapshots",
                    staging.full_name()
                ),
            )),
        }
    }
}

impl Write for Upload {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let n = b.len().min(self.buffer_size() - self.part.len());
        let store = &self.staging.store;
        if let Some((_, write)) = &store.bandwidth {
            write.take(n as u64, &store.cancel)?;
        }
        // Reserve memory once, since growing copies; unused memory costs nothing. The first bytes may be all:
        // if they are few, reserve only what they need.
        if self.part.capacity() < self.buffer_size() && self.part.len() + n > self.part.capacity() {
            let more = match self.bytes {
                0 if n < LITTLE => n,
                _ => self.buffer_size() - self.part.len(),
            };
            self.part.reserve_exact(more);
        }
        self.part.extend_from_slice(&b[..n]);
        self.sum.update(&b[..n]);
        self.bytes += n as u64;
        if let Some(most) = self.staging.store.largest_copy
            && self.bytes > most
        {
            return Err(Reason::Configuration.error(format!(
                    "the new snapshot has more than {} GiB, and this store cannot copy larger objects: make it smaller with --compression zstd or a smaller --keep-history, or write it to a local folder",
                    most >> 30
                ),
            )
            .into());
        }
        if self.parts == 0 && self.part.len() == SMALL && self.staging.begin_in_background() {
            return Ok(n);
        }
        let begun = self.staging.begun.as_ref();
        if begun.is_some_and(JoinHandle::is_finished) || self.part.len() == self.buffer_size() {
            self.send_part()?;
            while self.part.len() >= self.part_size() {
                self.send_part()?;
            }
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Staging {
    fn full_name(&self) -> String {
        self.store.name(&self.name.path)
    }

    fn error(&self, e: object_store::Error) -> Error {
        write_error(&self.full_name(), e)
    }

    /// Begins the multipart upload in the background. Returns false in a local folder, where nothing waits.
    fn begin_in_background(&mut self) -> bool {
        let store = &self.store;
        if store.local_root.is_some() || self.begun.is_some() {
            return false;
        }
        let (inner, path) = (Arc::clone(&store.inner), store.path(&self.name.path));
        let begun = async move { inner.put_multipart(&path).await };
        self.begun = Some(store.handle.spawn(begun));
        true
    }

    fn begin(&mut self) -> Result<()> {
        if let Some(begun) = &mut self.begun {
            let ended = self.store.block_on(begun)?;
            self.begun = None;
            let begun =
                ended.map_err(|e| Error::internal(format!("an upload's task ended: {e}")))?;
            self.multipart = Some(begun.map_err(|e| self.error(e))?);
            return Ok(());
        }
        let path = self.store.path(&self.name.path);
        for tried in 1.. {
            match self.store.block_on(self.store.inner.put_multipart(&path))? {
                Ok(multipart) => {
                    self.multipart = Some(multipart);
                    break;
                }
                // Another process has removed the empty staging folder meanwhile.
                Err(e) if io_cause(&e) == Some(ErrorKind::NotFound) && tried < FOLDER_ATTEMPTS => {}
                Err(e) => return Err(self.error(e)),
            }
        }
        Ok(())
    }

    /// Completes the multipart upload; without one, writes the whole object by one request.
    fn complete(&mut self, rest: Vec<u8>) -> Result<object_store::Result<()>> {
        *self.may_exist.get_mut() = true;
        let Some(multipart) = &mut self.multipart else {
            if let Some(root) = &self.store.local_root {
                self.store.cancel.check()?;
                let written = local::write(root, &self.name.path, &rest);
                return Ok(written.map_err(local::unnamed_error));
            }
            let path = self.store.path(&self.name.path);
            let put = self.store.inner.put(&path, PutPayload::from(rest));
            return Ok(self.store.block_on(put)?.map(|_| ()));
        };
        let completed = self.store.block_on(multipart.complete())?;
        if completed.is_ok() {
            self.multipart = None;
        }
        Ok(completed.map(|_| ()))
    }
}

impl Drop for Staging {
    /// Removes the upload and the staging object, if the store lets us.
    fn drop(&mut self) {
        let store = &self.store;
        if let Some(begun) = self.begun.take() {
            let ended = store.clean_up(async {
                if let Ok(begun) = begun.await {
                    self.multipart = Some(begun?);
                }
                Ok(())
            });
            if let Err(e) = ended {
                tracing::debug!("an upload had not begun: {e}");
            }
        }
        if let Some(mut multipart) = self.multipart.take()
            && let Err(e) = store.clean_up(multipart.abort())
        {
            tracing::warn!(staging = %self.name.path, "cannot abort an unfinished upload: {e}");
        }
        if *self.may_exist.get_mut()
            && let Err(e) = store.clean_up(store.inner.delete(&store.path(&self.name.path)))
        {
            tracing::warn!(staging = %self.name.path, "a staging object is left behind: {e}");
        }
        store.remove_staging_folder();
    }
}

impl Staged {
    /// Returns the object's size in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            StagedAs::StagingObject(staged) => staged.bytes,
            StagedAs::HeldInMemory(held) => held.bytes(),
        }
    }

    /// Gives the object its name, unless another object has it.
    ///
    /// If two processes publish the same object at once, both may return `Created`. On a store that has no
    /// conditional copies or ignores the condition, writers claim names (`claim`).
    ///
    /// # Errors
    /// Fails with the store's errors, with `Io` if the named object has another size or reads back
    /// differently, and with `SnapshotVanished` if the staging object or the named object is gone.
    pub fn publish(&self, below: &str) -> Result<Published> {
        let published = self.name(below)?;
        if let StagedAs::StagingObject(staged) = &self.0 {
            staged.staging.store.sync_names([below])?;
        }
        Ok(published)
    }

    /// Gives the object its name like [`publish`](Self::publish), but the name may not survive a power loss
    /// before [`sync_names`](Store::sync_names) is called.
    ///
    /// # Errors
    /// Fails with the errors of [`publish`](Self::publish).
    pub fn name(&self, below: &str) -> Result<Published> {
        match &self.0 {
            StagedAs::StagingObject(staged) => staged.name(below),
            StagedAs::HeldInMemory(held) => held.publish(below),
        }
    }
}

impl StagingObject {
    fn name(&self, below: &str) -> Result<Published> {
        let store = &self.staging.store;
        // Rename only if the path is the same in the crate's spelling.
        if let Some(root) = &store.local_root
            && store.path(below).as_ref() == below
        {
            store.cancel.check()?;
            let renamed = root.rename_if_free(&self.staging.name.path, below);
            let failed = |e| write_error(&store.name(below), local::unnamed_error(e));
            match renamed.map_err(failed)? {
                RenameOutcome::Done => {
                    self.staging.may_exist.store(false, Ordering::Relaxed);
                    return Ok(Published::Created);
                }
                RenameOutcome::Taken => return self.compare(below, Published::Identical),
                RenameOutcome::NotPossible => {}
            }
        }
        let ignores_conditions = store.ignores_conditions()?;
        // The condition alone is not enough: some servers accept it and ignore it.
        let NameCheck { exists, copy } = self.check_name(below)?;
        if exists {
            return self.compare(below, Published::Identical);
        }
        if ignores_conditions {
            return self.publish_claimed(below);
        }
        use object_store::Error as E;
        let copied = match copy {
            Some(copy) => as_copy_result(below, copy.complete()?),
            None => self.copy_to(below, CopyMode::Create)?,
        };
        match copied {
            Ok(()) => {
                self.check_size(below)?;
                Ok(Published::Created)
            }
            Err(E::NotSupported { .. } | E::NotImplemented { .. }) => self.publish_claimed(below),
            // Another process was faster, or this request took effect and its response was lost.
            Err(e) if is_taken(&e) => self.compare(below, Published::Created),
            Err(e) => self.check_failed_copy(below, e),
        }
    }

    /// Checks whether the name is free, or takes the result that was prepared during the reading back.
    fn check_name(&self, below: &str) -> Result<NameCheck> {
        let store = &self.staging.store;
        let prepared = lock(&self.preparation).take();
        let preparation = match prepared {
            Some(preparation) if preparation.below() == below => Some(preparation),
            // None was prepared, or one for another name.
            _ => NamingPreparation::begin(
                store,
                &self.staging.name.path,
                below.to_owned(),
                self.bytes,
            ),
        };
        match preparation {
            Some(preparation) => preparation.end(),
            None => Ok(NameCheck {
                exists: store.exists(below)?,
                copy: None,
            }),
        }
    }

    /// Compares this object with the one that has the name. Returns `if_same` if they are equal, else
    /// `Taken`.
    fn compare(&self, below: &str, if_same: Published) -> Result<Published> {
        Ok(match self.is_same(below)? {
            true => if_same,
            false => Published::Taken,
        })
    }

    /// Decides after a copy failed with `e`: the copy may have been made all the same.
    fn check_failed_copy(&self, below: &str, e: object_store::Error) -> Result<Published> {
        match self.is_same(below) {
            Ok(true) => Ok(Published::Created),
            Err(e) if e.reason() == Reason::Terminated => Err(e),
            _ => Err(write_error(&self.staging.store.name(below), e)),
        }
    }

    /// Gives the object its name on a store without conditional copies: under a claim, and only if the name
    /// is free. Then reads the named object and compares it.
    fn publish_claimed(&self, below: &str) -> Result<Published> {
        let store = &self.staging.store;
        let claim = Claim::take(store, below)?;
        if store.exists(below)? {
            return self.compare(below, Published::Identical);
        }
        if claim.is_none() {
            return Ok(Published::Taken);
        }
        use object_store::Error as E;
        let copied = match self.copy_to(below, CopyMode::Overwrite)? {
            Err(E::NotSupported { .. } | E::NotImplemented { .. }) => self.write_again(below)?,
            copied => copied,
        };
        match copied {
            // A process that makes no claims may have written the object at the same time.
            Ok(()) => self.compare(below, Published::Created),
            Err(e) => self.check_failed_copy(below, e),
        }
    }

    /// Lets the store copy the staging object to the name.
    fn copy_to(&self, below: &str, mode: CopyMode) -> Result<object_store::Result<()>> {
        let store = &self.staging.store;
        let (from, to) = (store.path(&self.staging.name.path), store.path(below));
        let copier = store.copier().filter(|c| self.bytes > c.most());
        let Some(copier) = copier else {
            let options = CopyOptions::new().with_mode(mode);
            return store.block_on(store.inner.copy_opts(&from, &to, options));
        };
        let if_free = matches!(mode, CopyMode::Create);
        let copied = store.block_on(async {
            let unnamed = copier.prepare((&from, &to), self.bytes).await?;
            copier.complete(&to, unnamed, if_free).await
        })?;
        Ok(as_copy_result(below, copied))
    }

    /// Reads the staging object and writes it to the name, for a store that cannot copy.
    fn write_again(&self, below: &str) -> Result<object_store::Result<()>> {
        let store = &self.staging.store;
        let mut object = store.read(&self.staging.name.path);
        let path = store.path(below);
        let mut multipart = match store.block_on(store.inner.put_multipart(&path))? {
            Ok(multipart) => multipart,
            Err(e) => return Ok(Err(e)),
        };
        let mut write = || loop {
            let mut part = Vec::new();
            Read::by_ref(&mut object)
                .take(PART as u64)
                .read_to_end(&mut part)
                .map_err(|e| Error::io(format!("read {}", self.staging.full_name()), e))?;
            if part.is_empty() {
                return store.block_on(multipart.complete());
            }
            if let Err(e) = store.block_on(multipart.put_part(PutPayload::from(part)))? {
                return Ok(Err(e));
            }
        };
        let written = write();
        if !matches!(written, Ok(Ok(_)))
            && let Err(e) = store.clean_up(multipart.abort())
        {
            tracing::warn!("cannot abort an unfinished upload: {e}");
        }
        Ok(written?.map(|_| ()))
    }

    /// Checks the size of the named object. The store has copied the bytes that were read back, so the size
    /// is enough.
    fn check_size(&self, below: &str) -> Result<()> {
        let store = &self.staging.store;
        let name = store.name(below);
        let (path, staging) = (store.path(below), store.path(&self.staging.name.path));
        // Delete the staging object at the same time: it is not needed any more.
        let removal = async {
            let delete = store.inner.delete(&staging);
            let removed = tokio::time::timeout(CLEAN_UP_PATIENCE, delete).await;
            if matches!(removed, Ok(Ok(()))) {
                self.staging.may_exist.store(false, Ordering::Relaxed);
            }
        };
        let head = store.inner.head(&path);
        let meta = match store.local_root {
            Some(_) => store.block_on(head)?,
            None => {
                // A cancellation ends the check, but not the deletion.
                let both = async { futures::join!(store.cancel.or(head), removal).0 };
                store.handle.block_on(both)?
            }
        };
        match meta {
            Ok(object) if object.size == self.bytes => Ok(()),
            Ok(object) => Err(Reason::Io.error(format!(
                    "{name} has {} bytes, and {} were written: the store is at fault, or another process wrote the object at the same time; check it before you rely on its snapshots",
                    object.size, self.bytes
                ),
            )),
            Err(object_store::Error::NotFound { .. }) => Err(Reason::SnapshotVanished.error(format!("{name} was written and is gone: it was deleted meanwhile; run again"),
            )),
            Err(e) => Err(store_error(format!("read the headers of {name}"), e)),
        }
    }

    /// Reads an object, and returns whether it has the uploaded bytes.
    fn is_same(&self, below: &str) -> Result<bool> {
        let store = &self.staging.store;
        let mut object = store.fetch(below, self.bytes);
        let mut sum = new_sum();
        let mut buf = vec![0; (self.bytes as usize).clamp(1, 256 << 10)];
        let mut bytes = 0u64;
        loop {
            let n = object
                .read(&mut buf)
                .map_err(|e| Error::io(format!("read {}", store.name(below)), e))?;
            if n == 0 {
                break;
            }
            sum.update(&buf[..n]);
            bytes += n as u64;
        }
        Ok(bytes == self.bytes && sum.finalize() == self.sum)
    }
}

/// Returns the result of a copy by ranges as one of the object_store crate.
fn as_copy_result(below: &str, copied: Result<CopyOutcome>) -> object_store::Result<()> {
    use object_store::Error as E;
    let path = below.to_owned();
    match copied {
        Ok(CopyOutcome::Done) => Ok(()),
        Ok(CopyOutcome::Taken) => Err(E::AlreadyExists {
            path,
            source: "the name is taken".into(),
        }),
        Err(e) if e.reason() == Reason::SnapshotVanished => Err(E::NotFound {
            path,
            source: Box::new(e),
        }),
        Err(e) => Err(E::Generic {
            store: "S3",
            source: Box::new(e),
        }),
    }
}
