//! Writes objects: an object has its name whole or not at all, and never in place of another one.
//!
//! An object goes to the store while it is made, and nobody sees it: a small one waits in memory, a large one is a
//! multipart upload, in a local folder it is a temporary file. [`Unnamed::complete`] gives the name, on condition that
//! it is free. After any error it looks at the name before it tries again: the response may have been lost.
//!
//! docs/design/store.md has the hazards, and what a server promises.

use super::errors::{is_taken, no_conditions, store_error, write_error};
use super::fetch::acquire_permit;
use super::local::TemporaryFile;
use super::staging::conditional_write_error;
use super::{Published, Store};
use crate::base::read_all::for_each_piece;
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutPayload, PutResult};
use sha2::{Digest, Sha256};
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// The smallest part in bytes. S3 requires at least 5 MiB for all parts but the last.
const PART: u64 = 5 << 20;
/// The most parts of an upload. S3 accepts no more.
const MOST_PARTS: u64 = 10_000;
/// The largest object that is written by one request, in bytes.
const SMALL: usize = 8 << 20;
/// The first write below this size reserves no memory for a whole part: it may be all.
const LITTLE: usize = 64 << 10;
/// The most bytes of parts under way, of all uploads to a store together. Beside these, each upload may have
/// one part.
pub(super) const UPLOAD_BYTES: usize = 45 << 20;
/// How often a write is tried if the store cannot be reached and the object is not there.
const ATTEMPTS: u32 = 3;
/// The pause before another attempt.
const PAUSE: Duration = Duration::from_secs(1);

/// Before which writes a store is asked whether the name is free, beside the condition of the write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LookFirst {
    /// Before none: the store obeys conditions.
    #[default]
    Never,
    /// Before large objects: completing an upload knows no condition.
    Large,
    /// Before all, unless the server is known to obey conditions.
    Always,
    /// Before all, and no write has a condition: the user says that nobody else writes.
    Instead,
}

/// An object that is being written. Write its bytes, then call [`finish`](Self::finish). Dropping it removes what was
/// sent.
pub struct Upload {
    store: Store,
    below: String,
    content: Content,
    /// The size of the parts of a large object, in bytes.
    part_size: usize,
    hash: Sha256,
    bytes: u64,
}

/// Where the bytes are.
enum Content {
    Memory(Vec<u8>),
    Parts(Box<Parts>),
    File(TemporaryFile),
}

/// An object whose bytes are complete, without its name. Dropping it removes the bytes.
pub struct Unnamed {
    store: Store,
    below: String,
    content: Complete,
    hash: [u8; 32],
    bytes: u64,
}

enum Complete {
    Memory(Bytes),
    Parts(Box<Multipart>),
    File(TemporaryFile),
}

impl Upload {
    /// Starts to write the object `below` the store's prefix, which will have about `expected` bytes at most.
    ///
    /// # Errors
    /// Fails with `Io`, `PermissionDenied` or `NoSpace` in a local folder.
    pub fn new(store: &Store, below: &str, expected: u64) -> Result<Self> {
        let content = match &store.local_root {
            Some(folder) => Content::File(TemporaryFile::create(folder)?),
            None => Content::Memory(Vec::new()),
        };
        Ok(Upload {
            store: store.clone(),
            below: below.to_owned(),
            content,
            part_size: part_size(expected),
            hash: Sha256::new(),
            bytes: 0,
        })
    }

    /// Completes the bytes: all are at the store, or in memory if the object is small.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `Terminated`.
    pub fn finish(self) -> Result<Unnamed> {
        let content = match self.content {
            Content::Memory(bytes) => Complete::Memory(bytes.into()),
            Content::Parts(parts) => {
                Complete::Parts(Box::new(parts.finish(&self.store, &self.below)?))
            }
            Content::File(file) => {
                self.store.cancel.check()?;
                Complete::File(file.synced()?)
            }
        };
        Ok(Unnamed {
            store: self.store,
            below: self.below,
            content,
            hash: self.hash.finalize().into(),
            bytes: self.bytes,
        })
    }
}

impl Write for Upload {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let store = &self.store;
        if let Content::Memory(bytes) = &mut self.content
            && bytes.len() + b.len() > SMALL
        {
            let (bytes, size) = (std::mem::take(bytes), self.part_size);
            let parts = Parts::begin(store, &self.below, bytes, size)?;
            self.content = Content::Parts(Box::new(parts));
        }
        let n = match &mut self.content {
            Content::Memory(bytes) => {
                if bytes.is_empty() && b.len() >= LITTLE {
                    bytes.reserve_exact(SMALL);
                }
                bytes.extend_from_slice(b);
                b.len()
            }
            Content::Parts(parts) => parts.write(store, &self.below, b)?,
            Content::File(file) => file.write(b)?,
        };
        if let Some((_, write)) = &store.bandwidth {
            write.take(n as u64, &store.cancel)?;
        }
        self.hash.update(&b[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A multipart upload. Dropping it aborts the upload.
struct Multipart {
    store: Store,
    upload: Option<Box<dyn MultipartUpload>>,
}

impl Drop for Multipart {
    fn drop(&mut self) {
        if let Some(mut upload) = self.upload.take()
            && let Err(e) = self.store.clean_up(abort(&mut *upload))
        {
            tracing::warn!("cannot abort an unfinished upload, gc does it after a day: {e}");
        }
    }
}

async fn abort(upload: &mut dyn MultipartUpload) -> Result<()> {
    match upload.abort().await {
        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
        Err(e) => Err(store_error("abort an upload", e)),
    }
}

/// The parts of a multipart upload.
struct Parts {
    // Declared before the upload: the parts' tasks are dropped before it is aborted.
    in_flight: JoinSet<object_store::Result<()>>,
    upload: Multipart,
    part: Vec<u8>,
    /// The size of all parts but the last, in bytes. Some stores complete no upload with parts of several sizes.
    size: usize,
    /// A permit for one part. A part that is larger than all shared permits would wait for ever without it.
    own_permit: Arc<Semaphore>,
}

impl Parts {
    fn begin(store: &Store, below: &str, bytes: Vec<u8>, size: usize) -> Result<Parts> {
        let path = store.path(below);
        let upload = store.block_on(store.inner.put_multipart(&path))?;
        let upload = upload.map_err(|e| write_error(&store.name(below), e))?;
        Ok(Parts {
            in_flight: JoinSet::new(),
            upload: Multipart {
                store: store.clone(),
                upload: Some(upload),
            },
            part: bytes,
            size,
            own_permit: Arc::new(Semaphore::new(1)),
        })
    }

    fn write(&mut self, store: &Store, below: &str, b: &[u8]) -> Result<usize> {
        let size = self.size;
        while self.part.len() >= size {
            self.send(store, below)?;
        }
        let n = b.len().min(size - self.part.len());
        if self.part.capacity() < size {
            self.part.reserve_exact(size - self.part.len());
        }
        self.part.extend_from_slice(&b[..n]);
        Ok(n)
    }

    /// Sends one part, and does not wait for its end.
    fn send(&mut self, store: &Store, below: &str) -> Result<()> {
        let size = self.part.len().min(self.size);
        let permits = u32::try_from(size).unwrap_or(u32::MAX);
        let permit = acquire_permit(&self.own_permit, &store.uploads, permits);
        let permit = store.block_on(permit)??;
        while let Some(sent) = self.in_flight.try_join_next() {
            check_sent(store, below, sent)?;
        }
        let rest = self.part.split_off(size);
        let part = std::mem::replace(&mut self.part, rest);
        let Some(upload) = &mut self.upload.upload else {
            return Err(Error::internal("a part of an upload that has ended"));
        };
        let sent = upload.put_part(PutPayload::from(part));
        let task = async move {
            let _permit = permit;
            sent.await
        };
        self.in_flight.spawn_on(task, &store.handle);
        Ok(())
    }

    fn finish(mut self, store: &Store, below: &str) -> Result<Multipart> {
        while !self.part.is_empty() {
            self.send(store, below)?;
        }
        while let Some(sent) = store.block_on(self.in_flight.join_next())? {
            check_sent(store, below, sent)?;
        }
        Ok(self.upload)
    }
}

/// Returns the size of the parts of an upload, in bytes, so that an object of the expected size has few enough.
/// Encryption and what cannot be compressed make an object a little larger.
fn part_size(expected: u64) -> usize {
    const MIB: u64 = 1 << 20;
    let least = (expected + expected / 64).div_ceil(MOST_PARTS);
    usize::try_from(least.next_multiple_of(MIB).max(PART)).unwrap_or(usize::MAX)
}

/// Returns the error of a part's task, if it failed.
fn check_sent(
    store: &Store,
    below: &str,
    sent: Result<object_store::Result<()>, tokio::task::JoinError>,
) -> Result<()> {
    match sent {
        Ok(sent) => sent.map_err(|e| write_error(&store.name(below), e)),
        Err(e) => Err(Error::internal(format!("an upload's task ended: {e}"))),
    }
}

impl Unnamed {
    /// Returns the object's size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives the object its name, unless another object has it.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `Terminated`.
    pub fn complete(mut self) -> Result<Published> {
        if let Complete::File(file) = &mut self.content {
            let failed = |e| Error::io(format!("write {}", self.store.name(&self.below)), e);
            let is_named = file.name_if_free(&self.below).map_err(failed)?;
            return if is_named {
                Ok(Published::Created)
            } else {
                Ok(self.compare()?.unwrap_or(Published::Taken))
            };
        }
        let looks_first = match self.store.look_first {
            LookFirst::Never => false,
            LookFirst::Large => matches!(self.content, Complete::Parts(_)),
            LookFirst::Always => !self.store.tags.keeps_conditions(),
            LookFirst::Instead => true,
        };
        if looks_first && let Some(compared) = self.compare()? {
            return Ok(compared);
        }
        let mut first = None;
        for attempt in 1.. {
            let e = match self.write_if_free()? {
                Ok(_) => return Ok(Published::Created),
                Err(e) => e,
            };
            let is_taken = is_taken(&e);
            match self.compare()? {
                // The write took effect, and its response was lost.
                Some(Published::Identical) if !is_taken => return Ok(Published::Created),
                Some(compared) => return Ok(compared),
                None => {}
            }
            let name = self.store.name(&self.below);
            let e = match e {
                _ if is_taken => no_conditions(format!(
                    "cannot write {name}: the store says that an object has this name, and there is none"
                )),
                object_store::Error::NotFound { .. } => write_error(&name, e),
                e => {
                    let action = format!("write {name}");
                    let error = conditional_write_error(&self.store, &action, e);
                    self.store.block_on(error)?
                }
            };
            let may_help = is_taken || e.reason() == Reason::StoreUnreachable;
            // Later refusals, such as that of a lost upload, are results of the first one.
            let e = first.take().unwrap_or(e);
            if attempt == ATTEMPTS || !may_help {
                return Err(e);
            }
            first = Some(e);
            let pause = async { tokio::time::sleep(PAUSE).await };
            self.store.block_on(pause)?;
        }
        Err(Error::internal("no attempt to write an object"))
    }

    /// Sends the request that gives the name.
    fn write_if_free(&mut self) -> Result<object_store::Result<PutResult>> {
        let store = &self.store;
        match &mut self.content {
            Complete::Memory(bytes) => {
                let payload = PutPayload::from(bytes.clone());
                let path = store.path(&self.below);
                let mode = match store.look_first {
                    LookFirst::Instead => PutMode::Overwrite,
                    _ => PutMode::Create,
                };
                store.block_on(store.inner.put_opts(&path, payload, mode.into()))
            }
            Complete::Parts(multipart) => {
                let Some(upload) = &mut multipart.upload else {
                    return Err(Error::internal("an upload was completed twice"));
                };
                let completed = store.block_on(upload.complete())?;
                if completed.is_ok() {
                    multipart.upload = None;
                }
                Ok(completed)
            }
            Complete::File(_) => Err(Error::internal("a file is not sent to a store")),
        }
    }

    /// Compares this object with the one that has the name; `None` if none has it.
    fn compare(&self) -> Result<Option<Published>> {
        let store = &self.store;
        match store.size_of(&self.below)? {
            None => return Ok(None),
            Some(bytes) if bytes != self.bytes => return Ok(Some(Published::Taken)),
            Some(_) => {}
        }
        let object = store.fetch(&self.below, self.bytes);
        let read_error = |e| Error::io(format!("read {}", store.name(&self.below)), e);
        let mut hash = Sha256::new();
        for_each_piece(object, &store.cancel, read_error, |piece| {
            hash.update(piece);
            Ok(())
        })?;
        let hash: [u8; 32] = hash.finalize().into();
        Ok(Some(if hash == self.hash {
            Published::Identical
        } else {
            Published::Taken
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_of_an_upload_have_one_size_that_fits_ten_thousand_parts() {
        const GIB: u64 = 1 << 30;
        for (expected, mib) in [(0, 5), (48 * GIB, 5), (50 * GIB, 6), (500 * GIB, 52)] {
            let size = part_size(expected);
            assert_eq!(size, mib << 20, "{expected}");
            assert!(expected.div_ceil(size as u64) < MOST_PARTS);
        }
    }
}
