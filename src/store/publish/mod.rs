//! Publishes an object: uploaded to a staging place, read back there and compared, and only then
//! named. A small one is put under its name at once if that is safe (`direct`); in a local folder it is one file, which
//! is renamed (`local`).
//!
//! The store itself copies the staging object to its name, on condition that the name is free:
//! multipart uploads themselves cannot be conditional, and what was read back is what is named. An
//! existing object is never overwritten.

mod claim;
pub mod direct;
mod naming;

use super::errors::{io_cause, is_taken, store_error, write_error};
use super::fetch::wait_for_room;
use super::folder::{FOLDER_TRIES, Renamed};
use super::local;
use super::s3::Copied;
use super::staging::StagingName;
use super::{PATIENCE, Published, Store};
use crate::base::lock;
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use claim::Claim;
use crc_fast::{CrcAlgorithm, Digest};
use direct::Held;
use naming::{Ahead, Looked};
use object_store::{
    CopyMode, CopyOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload,
};
use std::io::{self, ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, JoinHandle, JoinSet};

/// Bytes of a part; S3 wants at least 5 MiB for all but the last.
const PART: usize = 5 << 20;
/// S3 takes 10,000 parts: they grow by 5 MiB after each so many, so that 275 GB fit.
const PARTS_OF_ONE_SIZE: u64 = 1_000;
/// For fewer bytes no room for a part is set aside.
const LITTLE: usize = 64 << 10;
/// What has no more bytes is written by one request.
const SMALL: usize = 8 << 20;

/// Parts under way at once to a local folder, whatever the number of threads.
const MOST_IN_FLIGHT: usize = 15;
/// Bytes of parts under way, beside one part of each upload: of all uploads to a store together.
pub(super) const UPLOAD_BYTES: usize = 45 << 20;

/// An upload under way.
pub struct Upload {
    most_in_flight: usize,
    part: Vec<u8>,
    parts: u64,
    // Before the staging object: parts under way end before the upload is given up.
    in_flight: JoinSet<object_store::Result<()>>,
    /// Room for one part: otherwise a part that is larger than what all share would wait for ever.
    own_room: Arc<Semaphore>,
    staging: Staging,
    /// The name that it will get, unless that is taken.
    likely: Option<String>,
    sum: Digest,
    bytes: u64,
}

/// An upload that is complete and waits for its name.
pub struct Staged(Waiting);

enum Waiting {
    InStaging(Box<InStaging>),
    InMemory(Box<Held>),
}

struct InStaging {
    // Before the staging object, which it copies.
    ahead: Mutex<Option<Ahead>>,
    staging: Staging,
    sum: u64,
    bytes: u64,
}

/// A staging object, or what there is of it: dropping it removes that.
struct Staging {
    store: Store,
    name: StagingName,
    multipart: Option<Box<dyn MultipartUpload>>,
    /// The upload that is being begun.
    begun: Option<JoinHandle<object_store::Result<Box<dyn MultipartUpload>>>>,
    /// It may be there.
    may_exist: AtomicBool,
}

/// A check against damage, not against forgery: what is uploaded holds its own SHA-256.
fn new_sum() -> Digest {
    Digest::new(CrcAlgorithm::Crc64Nvme)
}

impl Upload {
    /// Starts an upload; `hint` becomes a part of the staging object's name. On the way to a local folder are at most
    /// `threads` parts at once, and two with one thread.
    pub fn new(store: &Store, hint: &str, threads: usize) -> Self {
        Upload {
            // One more is being filled.
            most_in_flight: threads.saturating_sub(1).clamp(1, MOST_IN_FLIGHT),
            part: Vec::new(),
            parts: 0,
            in_flight: JoinSet::new(),
            own_room: Arc::new(Semaphore::new(1)),
            staging: Staging {
                store: store.clone(),
                name: StagingName::new(hint),
                multipart: None,
                begun: None,
                may_exist: AtomicBool::new(false),
            },
            likely: None,
            sum: new_sum(),
            bytes: 0,
        }
    }

    /// The same, for an object that will likely be named `below`: the naming is prepared while it is read back.
    pub fn likely_named(mut self, below: String) -> Self {
        self.likely = Some(below);
        self
    }

    fn part_size(&self) -> usize {
        PART * (1 + self.parts / PARTS_OF_ONE_SIZE) as usize
    }

    /// Bytes that are collected before some are sent.
    fn room(&self) -> usize {
        match (self.parts, &self.staging.begun) {
            (0, None) => SMALL,
            // What comes until the upload has begun.
            (0, Some(_)) => SMALL + PART,
            _ => self.part_size(),
        }
    }

    /// Waits until one more part, of so many bytes, may be under way. Gives its room, if it is counted in bytes.
    fn may_send(&mut self, bytes: usize) -> Result<Option<OwnedSemaphorePermit>> {
        let store = &self.staging.store;
        if store.local_root.is_some() {
            while self.in_flight.len() >= self.most_in_flight {
                self.wait_for_one()?;
            }
            return Ok(None);
        }
        let bytes = bytes.try_into().unwrap_or(u32::MAX);
        let room = store.block_on(wait_for_room(&self.own_room, &store.uploads, bytes))??;
        while let Some(sent) = self.in_flight.try_join_next() {
            self.sent(sent)?;
        }
        Ok(Some(room))
    }

    /// Sends a part, without waiting for its end.
    fn send_part(&mut self) -> Result<()> {
        self.staging.store.cancel.check()?;
        if self.staging.multipart.is_none() {
            self.staging.begin()?;
        }
        // All parts but the last have one size: some servers want it so.
        let size = self.part.len().min(self.part_size());
        let room = self.may_send(size)?;
        let rest = self.part.split_off(size);
        let part = std::mem::replace(&mut self.part, rest);
        if let Some(multipart) = &mut self.staging.multipart {
            let sent = multipart.put_part(PutPayload::from(part));
            self.parts += 1;
            let sent = async move {
                let _room = room;
                sent.await
            };
            self.in_flight.spawn_on(sent, &self.staging.store.handle);
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<()> {
        match self.staging.store.block_on(self.in_flight.join_next())? {
            None => Ok(()),
            Some(sent) => self.sent(sent),
        }
    }

    /// How a part's task ended.
    fn sent(&self, sent: Result<object_store::Result<()>, JoinError>) -> Result<()> {
        match sent {
            Ok(sent) => sent.map_err(|e| self.staging.error(e)),
            Err(e) => Err(Error::internal(format!("an upload's task ended: {e}"))),
        }
    }

    /// Completes the upload and reads it back from its staging place; or keeps it in memory, if it is small
    /// and can be put under its name at once.
    ///
    /// # Errors
    /// The store's; `Io` where what is read back differs; `SnapshotVanished` where it is gone.
    pub fn finish(mut self) -> Result<Staged> {
        let store = &self.staging.store;
        let is_small = self.parts == 0 && self.staging.begun.is_none();
        if is_small
            && let Some(direct) = store.direct()?
            && let Some(room) = direct.room(self.part.len())
        {
            // A part has room for more.
            let content = Bytes::copy_from_slice(&self.part);
            let held = Held::new(store, direct, content, room);
            return Ok(Staged(Waiting::InMemory(Box::new(held))));
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
            likely,
            sum,
            bytes,
            ..
        } = self;
        let written = staging.complete(part)?;
        let ahead = match &written {
            Ok(()) => likely
                .and_then(|below| Ahead::begin(&staging.store, &staging.name.path, below, bytes)),
            Err(_) => None,
        };
        let staged = InStaging {
            ahead: Mutex::new(ahead),
            staging,
            sum: sum.finalize(),
            bytes,
        };
        let staging = &staged.staging;
        let same = staged.is_same(&staging.name.path);
        match (written, same) {
            // Where it is there after an error, only the answer was lost.
            (_, Ok(true)) => Ok(Staged(Waiting::InStaging(Box::new(staged)))),
            (_, Err(e)) if e.reason() == Reason::Terminated => Err(e),
            (Err(e), _) => Err(staging.error(e)),
            (Ok(()), Err(e)) => Err(e),
            (Ok(()), Ok(false)) => Err(Reason::Io.error(format!(
                    "{} was written and reads back differently: the store is at fault; check it before you rely on its snapshots",
                    staging.full_name()
                ),
            )),
        }
    }
}

impl Write for Upload {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let n = b.len().min(self.room() - self.part.len());
        let store = &self.staging.store;
        if let Some((_, write)) = &store.bandwidth {
            write.take(n as u64, &store.cancel)?;
        }
        // All at once: growing would copy. What is not used costs no memory. What comes first may be all, and is little.
        if self.part.capacity() < self.room() && self.part.len() + n > self.part.capacity() {
            let room = match self.bytes {
                0 if n < LITTLE => n,
                _ => self.room() - self.part.len(),
            };
            self.part.reserve_exact(room);
        }
        self.part.extend_from_slice(&b[..n]);
        self.sum.update(&b[..n]);
        self.bytes += n as u64;
        if let Some(most) = self.staging.store.largest_copy
            && self.bytes > most
        {
            return Err(Reason::Configuration.error(format!(
                    "the new snapshot has more than {} GiB, and this store copies no more at once: make it smaller by --compression zstd or less --keep-history, or write it to a local folder",
                    most >> 30
                ),
            )
            .into());
        }
        if self.parts == 0 && self.part.len() == SMALL && self.staging.begin_beside() {
            return Ok(n);
        }
        let begun = self.staging.begun.as_ref();
        if begun.is_some_and(JoinHandle::is_finished) || self.part.len() == self.room() {
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

    /// Begins the upload beside what is written meanwhile. False in a local folder, where nothing waits.
    fn begin_beside(&mut self) -> bool {
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
                // Another run removes the empty folder while this one makes it.
                Err(e) if io_cause(&e) == Some(ErrorKind::NotFound) && tried < FOLDER_TRIES => {}
                Err(e) => return Err(self.error(e)),
            }
        }
        Ok(())
    }

    /// Writes what is in no part yet, all at once, or puts the parts together.
    fn complete(&mut self, all: Vec<u8>) -> Result<object_store::Result<()>> {
        *self.may_exist.get_mut() = true;
        let Some(multipart) = &mut self.multipart else {
            if let Some(root) = &self.store.local_root {
                self.store.cancel.check()?;
                let written = local::write(root, &self.name.path, &all);
                return Ok(written.map_err(local::unnamed_error));
            }
            let path = self.store.path(&self.name.path);
            let put = self.store.inner.put(&path, PutPayload::from(all));
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
    /// Nothing is left behind, if the store lets it.
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
            tracing::warn!(staging = %self.name.path, "an unfinished upload could not be aborted: {e}");
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
    /// Bytes of the object.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Waiting::InStaging(staged) => staged.bytes,
            Waiting::InMemory(held) => held.bytes(),
        }
    }

    /// Gives the object its name, unless something else has it.
    ///
    /// Where two runs give the same object its name in the same moment, both have created it. On a
    /// store that cannot copy on a condition, or ignores it, writers look out for each other (`claim`).
    ///
    /// # Errors
    /// The store's; `Io` where the named object has another size, or reads back differently;
    /// `SnapshotVanished` where the staging object or the named one is gone.
    pub fn publish(&self, below: &str) -> Result<Published> {
        let published = self.name(below)?;
        if let Waiting::InStaging(staged) = &self.0 {
            staged.staging.store.sync_names([below])?;
        }
        Ok(published)
    }

    /// As [`publish`](Self::publish), and the name may not outlast a loss of power before
    /// [`sync_names`](Store::sync_names).
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub fn name(&self, below: &str) -> Result<Published> {
        match &self.0 {
            Waiting::InStaging(staged) => staged.name(below),
            Waiting::InMemory(held) => held.publish(below),
        }
    }
}

impl InStaging {
    fn name(&self, below: &str) -> Result<Published> {
        let store = &self.staging.store;
        // A name that object_store writes in another way is not taken apart here.
        if let Some(root) = &store.local_root
            && store.path(below).as_ref() == below
        {
            store.cancel.check()?;
            let renamed = root.rename_if_free(&self.staging.name.path, below);
            let failed = |e| write_error(&store.name(below), local::unnamed_error(e));
            match renamed.map_err(failed)? {
                Renamed::Done => {
                    self.staging.may_exist.store(false, Ordering::Relaxed);
                    return Ok(Published::Created);
                }
                Renamed::Taken => return self.compare(below, Published::Identical),
                Renamed::NotSo => {}
            }
        }
        let ignores_conditions = store.ignores_conditions()?;
        // Some servers take the condition and ignore it: look first.
        let Looked { exists, copy } = self.look_ahead(below)?;
        if exists {
            return self.compare(below, Published::Identical);
        }
        if ignores_conditions {
            return self.publish_claimed(below);
        }
        use object_store::Error as E;
        let copied = match copy {
            Some(copy) => as_copy(below, copy.complete()?),
            None => self.copy_to(below, CopyMode::Create)?,
        };
        match copied {
            Ok(()) => {
                self.check_size(below)?;
                Ok(Published::Created)
            }
            Err(E::NotSupported { .. } | E::NotImplemented { .. }) => self.publish_claimed(below),
            // Another run was faster, or this request took effect and its answer was lost.
            Err(e) if is_taken(&e) => self.compare(below, Published::Created),
            Err(e) => self.answer_lost(below, e),
        }
    }

    /// Looks what has the name, unless that was begun when this was read back.
    fn look_ahead(&self, below: &str) -> Result<Looked> {
        let store = &self.staging.store;
        let begun = lock(&self.ahead).take();
        let begun = match begun {
            Some(ahead) if ahead.below() == below => Some(ahead),
            // Another name.
            _ => Ahead::begin(store, &self.staging.name.path, below.to_owned(), self.bytes),
        };
        match begun {
            Some(ahead) => ahead.end(),
            None => Ok(Looked {
                exists: store.exists(below)?,
                copy: None,
            }),
        }
    }

    /// What has the name, against this: `if_same`, if it holds the same bytes.
    fn compare(&self, below: &str, if_same: Published) -> Result<Published> {
        Ok(match self.is_same(below)? {
            true => if_same,
            false => Published::Taken,
        })
    }

    /// A copy that was answered with an error may have been made all the same.
    fn answer_lost(&self, below: &str, e: object_store::Error) -> Result<Published> {
        match self.is_same(below) {
            Ok(true) => Ok(Published::Created),
            Err(e) if e.reason() == Reason::Terminated => Err(e),
            _ => Err(write_error(&self.staging.store.name(below), e)),
        }
    }

    /// Gives the object its name where no condition helps: while nobody else claims it, and only if it
    /// is free. What has the name then is read and compared.
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
            // Somebody who makes no claims may have written it in the same moment.
            Ok(()) => self.compare(below, Published::Created),
            Err(e) => self.answer_lost(below, e),
        }
    }

    /// Has the store copy the staging object.
    fn copy_to(&self, below: &str, mode: CopyMode) -> Result<object_store::Result<()>> {
        let store = &self.staging.store;
        let (from, to) = (store.path(&self.staging.name.path), store.path(below));
        let copying = store.copying().filter(|c| self.bytes > c.most());
        let Some(copying) = copying else {
            let options = CopyOptions::new().with_mode(mode);
            return store.block_on(store.inner.copy_opts(&from, &to, options));
        };
        let if_free = matches!(mode, CopyMode::Create);
        let copied = store.block_on(async {
            let prepared = copying.prepare((&from, &to), self.bytes).await?;
            copying.complete(&to, prepared, if_free).await
        })?;
        Ok(as_copy(below, copied))
    }

    /// For a store that cannot copy: reads the staging object, and writes it once more.
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
            tracing::warn!("an unfinished upload could not be aborted: {e}");
        }
        Ok(written?.map(|_| ()))
    }

    /// The store has copied what was read back; that it did so whole is all there is to see.
    fn check_size(&self, below: &str) -> Result<()> {
        let store = &self.staging.store;
        let name = store.name(below);
        let (path, staging) = (store.path(below), store.path(&self.staging.name.path));
        // The staging object is of no more use, and its removal need not wait.
        let removal = async {
            let removed = tokio::time::timeout(PATIENCE, store.inner.delete(&staging)).await;
            if matches!(removed, Ok(Ok(()))) {
                self.staging.may_exist.store(false, Ordering::Relaxed);
            }
        };
        let look = store.inner.head(&path);
        let seen = match store.local_root {
            Some(_) => store.block_on(look)?,
            // Who cancels the run then does not cancel what only tidies up.
            None => {
                let both = async { futures::join!(store.cancel.or(look), removal).0 };
                store.handle.block_on(both)?
            }
        };
        match seen {
            Ok(object) if object.size == self.bytes => Ok(()),
            Ok(object) => Err(Reason::Io.error(format!(
                    "{name} was written with {} bytes and has {}: the store is at fault, or somebody else wrote it in the same moment; check it before you rely on its snapshots",
                    self.bytes, object.size
                ),
            )),
            Err(object_store::Error::NotFound { .. }) => Err(Reason::SnapshotVanished.error(format!("{name} was written and is gone: it was deleted meanwhile; run again"),
            )),
            Err(e) => Err(store_error(format!("look at {name}"), e)),
        }
    }

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

/// What became of a copy, as the object_store crate says it.
fn as_copy(below: &str, copied: Result<Copied>) -> object_store::Result<()> {
    use object_store::Error as E;
    let path = below.to_owned();
    match copied {
        Ok(Copied::Done) => Ok(()),
        Ok(Copied::Taken) => Err(E::AlreadyExists {
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
