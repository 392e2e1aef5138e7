//! Publishes an object: uploaded in parts, read back and compared, and only then named.
//!
//! What fits into one part is put with one conditional request. What does not goes to a staging
//! object, is read back there, and is copied to its name by the store on condition that the name
//! is free: multipart uploads themselves cannot be conditional. An existing object is never
//! overwritten.

use super::{Store, store_error};
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use object_store::{
    CopyMode, CopyOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload,
};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};
use tokio::task::JoinSet;

/// Where unfinished objects wait, below the store's prefix and beside what is listed.
pub const STAGING: &str = "deltafold-staging";
/// Bytes of a part; S3 wants at least 5 MiB for all but the last.
const PART: usize = 8 << 20;
/// S3 takes 10,000 parts: they grow by 8 MiB after each so many, so that 250 GB fit.
const PARTS_OF_ONE_SIZE: u64 = 2_000;

/// An upload under way.
pub struct Upload {
    store: Store,
    staging: String,
    threads: usize,
    part: Vec<u8>,
    parts: u64,
    multipart: Option<Box<dyn MultipartUpload>>,
    in_flight: JoinSet<object_store::Result<()>>,
    hash: Sha256,
    bytes: u64,
}

/// An upload that is complete and waits for its name.
pub struct Staged {
    store: Store,
    content: Content,
    sha256: [u8; 32],
    bytes: u64,
}

enum Content {
    Small(Bytes),
    /// The path of the staging object.
    Large(String),
}

/// What became of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The object is there now, and was read back.
    Created,
    /// The very same bytes were there already.
    Identical,
    /// Something else has the name.
    Taken,
}

impl Upload {
    /// Starts an upload; `hint` becomes a part of the staging object's name. At most `threads` parts
    /// are under way at once.
    pub fn new(store: &Store, hint: &str, threads: usize) -> Self {
        Upload {
            store: store.clone(),
            // Two Jobs at once must not share a staging object.
            staging: format!("{STAGING}/{hint}.{:016x}", rand_word()),
            threads: threads.max(1),
            part: Vec::new(),
            parts: 0,
            multipart: None,
            in_flight: JoinSet::new(),
            hash: Sha256::new(),
            bytes: 0,
        }
    }

    fn error(&self, e: object_store::Error) -> Error {
        store_error(format!("write {}", self.store.name(&self.staging)), e)
    }

    fn part_size(&self) -> usize {
        PART * (1 + self.parts / PARTS_OF_ONE_SIZE) as usize
    }

    fn send_part(&mut self) -> Result<()> {
        self.store.cancel.check()?;
        if self.multipart.is_none() {
            let path = self.store.path(&self.staging);
            let started = self.store.block_on(self.store.inner.put_multipart(&path))?;
            self.multipart = Some(started.map_err(|e| self.error(e))?);
        }
        while self.in_flight.len() >= self.threads {
            self.wait_for_one()?;
        }
        let part = std::mem::take(&mut self.part);
        if let Some(multipart) = &mut self.multipart {
            let sent = multipart.put_part(PutPayload::from(part));
            self.in_flight.spawn_on(sent, &self.store.handle);
            self.parts += 1;
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<()> {
        match self.store.block_on(self.in_flight.join_next())? {
            None => Ok(()),
            Some(Ok(sent)) => sent.map_err(|e| self.error(e)),
            Some(Err(e)) => Err(Error::internal(format!("an upload's task ended: {e}"))),
        }
    }

    /// Completes the upload. A large object is read back from its staging place.
    ///
    /// # Errors
    /// The store's; `Io` where what is read back differs.
    pub fn finish(mut self) -> Result<Staged> {
        let sha256: [u8; 32] = self.hash.finalize_reset().into();
        let content = if self.multipart.is_none() {
            Content::Small(Bytes::from(std::mem::take(&mut self.part)))
        } else {
            if !self.part.is_empty() {
                self.send_part()?;
            }
            while !self.in_flight.is_empty() {
                self.wait_for_one()?;
            }
            if let Some(mut multipart) = self.multipart.take() {
                let completed = self.store.block_on(multipart.complete())?;
                completed.map_err(|e| self.error(e))?;
            }
            Content::Large(self.staging.clone())
        };
        let staged = Staged {
            store: self.store.clone(),
            content,
            sha256,
            bytes: self.bytes,
        };
        if let Content::Large(staging) = &staged.content {
            staged.read_back(staging)?;
        }
        Ok(staged)
    }
}

/// A word that differs between processes and calls.
fn rand_word() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

impl Write for Upload {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let n = b.len().min(self.part_size() - self.part.len());
        self.part.extend_from_slice(&b[..n]);
        self.hash.update(&b[..n]);
        self.bytes += n as u64;
        if self.part.len() == self.part_size() {
            self.send_part()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Upload {
    /// An upload that was not finished leaves nothing behind, if the store lets it.
    fn drop(&mut self) {
        if let Some(mut multipart) = self.multipart.take() {
            self.in_flight.abort_all();
            if let Err(e) = self.store.clean_up(multipart.abort()) {
                tracing::warn!(staging = %self.staging, "an unfinished upload could not be aborted: {e}");
            }
        }
    }
}

impl Staged {
    /// Bytes of the object.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives the object its name, unless something else has it, and reads it back.
    ///
    /// # Errors
    /// The store's; `Io` where what is read back differs.
    pub fn publish(&self, below: &str) -> Result<Published> {
        let store = &self.store;
        // Some servers take the condition and ignore it: look first.
        if store.exists(below)? {
            return self.compare(below);
        }
        let path = store.path(below);
        let named = match &self.content {
            Content::Small(bytes) => {
                let options = PutOptions::from(PutMode::Create);
                let payload = PutPayload::from(bytes.clone());
                store
                    .block_on(store.inner.put_opts(&path, payload, options))?
                    .map(|_| ())
            }
            Content::Large(staging) => {
                let options = CopyOptions::new().with_mode(CopyMode::Create);
                let from = store.path(staging);
                store.block_on(store.inner.copy_opts(&from, &path, options))?
            }
        };
        match named {
            Ok(()) => {
                self.read_back(below)?;
                Ok(Published::Created)
            }
            // Another Job was faster, or this request took effect and its answer was lost.
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            ) => self.compare(below),
            Err(e) => Err(store_error(format!("write {}", store.name(below)), e)),
        }
    }

    fn compare(&self, below: &str) -> Result<Published> {
        Ok(if self.is_same(below)? {
            Published::Identical
        } else {
            Published::Taken
        })
    }

    fn is_same(&self, below: &str) -> Result<bool> {
        let mut object = self.store.read(below);
        let mut hash = Sha256::new();
        let mut buf = vec![0; 256 << 10];
        let mut bytes = 0u64;
        loop {
            let n = object
                .read(&mut buf)
                .map_err(|e| Error::io(format!("read {}", self.store.name(below)), e))?;
            if n == 0 {
                break;
            }
            hash.update(&buf[..n]);
            bytes += n as u64;
        }
        Ok(bytes == self.bytes && hash.finalize().as_slice() == self.sha256.as_slice())
    }

    fn read_back(&self, below: &str) -> Result<()> {
        if self.is_same(below)? {
            return Ok(());
        }
        Err(Error::new(
            Reason::Io,
            format!(
                "{} was written and reads back differently: the store is at fault; check it before you rely on its snapshots",
                self.store.name(below)
            ),
        ))
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Content::Large(staging) = &self.content {
            let store = &self.store;
            if let Err(e) = store.clean_up(store.inner.delete(&store.path(staging))) {
                tracing::warn!(staging = %staging, "a staging object is left behind: {e}");
            }
        }
    }
}
