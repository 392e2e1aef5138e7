//! Publishes a small object by one request: writes it to its name, and reads it back there.
//!
//! An object store shows an object that one request writes whole or not at all. So a small object needs no
//! staging object if the store refuses a taken name and refuses a body that was damaged in transit. Each
//! process tests both once. Called by `publish`.

use super::claim::Claim;
use crate::base::random::random_word;
use crate::error::{Error, Reason, Result};
use crate::store::capability::Capability;
use crate::store::errors::{is_taken, refusal, store_error, write_error};
use crate::store::fetch::cut_short;
use crate::store::small_objects::bytes_of;
use crate::store::staging::{STAGING, StagingName};
use crate::store::{Published, Store};
use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error as E, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The metadata of an object that names the upload that wrote it.
const UPLOAD: &str = "deltafold-upload";

/// The most bytes of objects that wait for their names in memory; further objects go to staging. `copy` may
/// have many deltas that wait for their full.
const MOST_HELD: u64 = 16 << 20;
/// The estimated overhead of each such object, in bytes.
const HELD_OVERHEAD: u64 = 1 << 10;

/// Further clients of the same store, for conditional writes with checksums.
#[derive(Clone)]
pub struct Direct {
    /// Sends a checksum with each body.
    checked: Arc<dyn ObjectStore>,
    /// Sends a checksum with each body, and damages the body in transit.
    damaging: Arc<dyn ObjectStore>,
    /// Whether conditional writes with checksums are safe here.
    works: Capability,
    /// The bytes of objects that wait for their names.
    held: Arc<AtomicU64>,
}

impl Direct {
    /// `checked` sends a checksum with each body. `damaging` does so, too, and then damages the body.
    pub fn new(checked: Arc<dyn ObjectStore>, damaging: Arc<dyn ObjectStore>) -> Self {
        Direct {
            checked,
            damaging,
            works: Capability::default(),
            held: Arc::default(),
        }
    }

    /// Reserves memory for an object. Returns `None` if there is not enough now.
    pub(super) fn reserve(&self, bytes: usize) -> Option<MemoryReservation> {
        let bytes = (bytes as u64).saturating_add(HELD_OVERHEAD);
        let add = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= MOST_HELD);
        let held = &self.held;
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
            .ok()?;
        Some(MemoryReservation {
            held: Arc::clone(held),
            bytes,
        })
    }

    /// Returns whether the store refuses a body that does not match its checksum.
    ///
    /// # Errors
    /// Fails with the store's errors if there was no response.
    pub(in crate::store) async fn refuses_damage(&self, path: &Path) -> Result<bool> {
        let Err(e) = self.damaging.put(path, "damaged".into()).await else {
            return Ok(false);
        };
        refusal("write a damaged object", e).map(|_| true)
    }

    /// Writes an object with its checksum.
    pub(in crate::store) async fn put(
        &self,
        path: &Path,
        content: PutPayload,
        upload: &str,
        mode: PutMode,
    ) -> object_store::Result<()> {
        let mut attributes = Attributes::new();
        attributes.insert(Attribute::Metadata(UPLOAD.into()), upload.to_owned().into());
        let options = PutOptions {
            mode,
            attributes,
            ..PutOptions::default()
        };
        self.checked.put_opts(path, content, options).await?;
        Ok(())
    }
}

/// Memory that is reserved until this is dropped.
pub(super) struct MemoryReservation {
    held: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Store {
    /// Returns the clients for conditional writes, if they are safe here. The first call tests it with an
    /// object in the staging folder; a test that fails is repeated by the next call.
    ///
    /// # Errors
    /// Fails with `Terminated`.
    pub(super) fn direct(&self) -> Result<Option<&Direct>> {
        // If conditions are ignored, writers claim names, and a single write makes no claim.
        if self.direct.is_none() || self.ignores_conditions()? {
            return Ok(None);
        }
        self.puts_at_once()
    }

    /// Does the same without the test whether conditions of copies are ignored.
    pub(in crate::store) fn puts_at_once(&self) -> Result<Option<&Direct>> {
        let Some(direct) = &self.direct else {
            return Ok(None);
        };
        // Declared here, so that it is deleted after the waiting callers know the result.
        let mut probe = None;
        match direct
            .works
            .find_out(|| self.test_direct(direct, &mut probe))
        {
            Ok(works) => Ok(works.then_some(direct)),
            Err(e) if e.reason() == Reason::Terminated => Err(e),
            Err(e) => {
                tracing::debug!("it is unknown whether single conditional writes are safe: {e}");
                Ok(None)
            }
        }
    }

    fn test_direct(&self, direct: &Direct, probe: &mut Option<Claim>) -> Result<bool> {
        let probe = probe.insert(Claim::unwritten(self, StagingName::new("probe")));
        let path = self.path(probe.path());
        if !self.block_on(direct.refuses_damage(&path))?? {
            return Ok(false);
        }
        for is_second in [false, true] {
            match self.block_on(direct.put(&path, "probe".into(), "probe", PutMode::Create))? {
                Ok(()) if is_second => return Ok(false),
                Ok(()) => {}
                // If the first write is refused, the store has kept the damaged body.
                Err(e) if is_taken(&e) => return Ok(is_second),
                Err(e) => {
                    let action = format!("test conditional writes in {}", self.name(STAGING));
                    // Credentials may be corrected later.
                    return match e {
                        E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                            Err(store_error(action, e))
                        }
                        e => refusal(&action, e).map(|_| false),
                    };
                }
            }
        }
        Ok(false)
    }
}

/// A small object that waits for its name in memory.
pub(super) struct HeldObject {
    store: Store,
    direct: Direct,
    content: Bytes,
    /// An ID that tells objects of this upload from others.
    upload: String,
    _reservation: MemoryReservation,
}

/// What a read of the name shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NamedObject {
    /// The object has the same bytes.
    is_same: bool,
    /// This upload wrote the object.
    is_ours: bool,
}

/// The response to a conditional write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteResponse {
    Done,
    /// The name is taken.
    Taken,
    /// An error. The write may have taken effect all the same.
    Failed,
}

/// The result of a conditional write, after the name was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteResult {
    Published(Published),
    /// Our object reads back differently.
    Damaged,
    /// The store confirmed the write, and another object has the name.
    Overwritten,
    /// The write failed and had no effect.
    Failed,
}

fn judge(response: WriteResponse, named: NamedObject) -> WriteResult {
    match (response, named.is_same, named.is_ours) {
        // Damaged bytes must not keep the name, whatever the response was.
        (_, false, true) => WriteResult::Damaged,
        (WriteResponse::Taken, true, false) => WriteResult::Published(Published::Identical),
        (WriteResponse::Taken, false, false) => WriteResult::Published(Published::Taken),
        (_, true, _) => WriteResult::Published(Published::Created),
        (WriteResponse::Done, false, false) => WriteResult::Overwritten,
        (WriteResponse::Failed, false, false) => WriteResult::Failed,
    }
}

impl HeldObject {
    pub(super) fn new(
        store: &Store,
        direct: &Direct,
        content: Bytes,
        reservation: MemoryReservation,
    ) -> Self {
        HeldObject {
            store: store.clone(),
            direct: direct.clone(),
            content,
            upload: format!("{:016x}", random_word()),
            _reservation: reservation,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.content.len() as u64
    }

    /// Writes the object to its name, unless the name is taken, and reads the name back.
    ///
    /// # Errors
    /// Fails with the store's errors, with `Io` if the object reads back differently, and with
    /// `SnapshotVanished` if it is gone.
    pub(super) fn publish(&self, below: &str) -> Result<Published> {
        let (store, path) = (&self.store, self.store.path(below));
        let name = store.name(below);
        let content = PutPayload::from(self.content.clone());
        let put = store.block_on(
            self.direct
                .put(&path, content, &self.upload, PutMode::Create),
        )?;
        let response = match &put {
            Ok(()) => WriteResponse::Done,
            Err(e) if is_taken(e) => WriteResponse::Taken,
            Err(_) => WriteResponse::Failed,
        };
        let result = match store.block_on(self.read_named(&path, &name))? {
            Ok(named) => judge(response, named),
            Err(_) if response == WriteResponse::Failed => WriteResult::Failed,
            Err(e) => return Err(e),
        };
        let failed = |problem: &str| Err(Reason::Io.error(format!("{name} {problem}")));
        match result {
            WriteResult::Published(published) => Ok(published),
            WriteResult::Damaged => {
                // The object names this upload, so it is ours. Nobody can have replaced it since: names are
                // given only if they are free.
                let removed = store.clean_up(store.inner.delete(&path));
                failed(&format!(
                    "reads back differently from what was written: the store is at fault; check it before you rely on its snapshots{}",
                    match removed {
                        Ok(()) => String::new(),
                        Err(e) =>
                            format!("; delete that object, since it could not be removed: {e}"),
                    }
                ))
            }
            WriteResult::Overwritten => failed(
                "reads back differently from what was written: the store is at fault, or another process wrote the object at the same time; check it before you rely on its snapshots",
            ),
            WriteResult::Failed => Err(match put {
                Err(e) => write_error(&name, e),
                Ok(()) => Error::internal("a write failed without an error"),
            }),
        }
    }

    /// Reads the object that has the name.
    async fn read_named(&self, path: &Path, name: &str) -> Result<NamedObject> {
        let store = &self.store;
        let failed = |e: E| match e {
            E::NotFound { .. } => Reason::SnapshotVanished.error(format!(
                "{name} was written and is gone: it was deleted meanwhile; run again"
            )),
            e => store_error(format!("read {name}"), e),
        };
        let object = store.inner.get(path).await.map_err(failed)?;
        let size = object.meta.size;
        let upload = object.attributes.get(&Attribute::Metadata(UPLOAD.into()));
        let is_ours = upload.is_some_and(|u| **u == *self.upload);
        // Do not read an object of another size: it may be large.
        if size != self.bytes() {
            return Ok(NamedObject {
                is_same: false,
                is_ours,
            });
        }
        let bytes = bytes_of(object, size).await.map_err(failed)?;
        let read = bytes.len() as u64;
        store.bytes_read.fetch_add(read, Ordering::Relaxed);
        if read != size {
            return Err(cut_short(name, read, size));
        }
        Ok(NamedObject {
            is_same: bytes == self.content,
            is_ours,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded() {
        let store: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
        let direct = Direct::new(Arc::clone(&store), store);
        let half = (MOST_HELD / 2 - HELD_OVERHEAD) as usize;
        let first = direct.clone().reserve(half).unwrap();
        assert!(direct.reserve(half + 1).is_none());
        assert!(direct.reserve(usize::MAX).is_none());
        let _second = direct.reserve(half).unwrap();
        assert!(direct.reserve(0).is_none());
        drop(first);
        assert!(direct.reserve(half).is_some());
    }

    #[test]
    fn the_named_object_decides_and_then_the_response() {
        use WriteResponse::{Done, Failed, Taken};
        let created = WriteResult::Published(Published::Created);
        for (response, is_same, is_ours, expected) in [
            (Done, true, true, created),
            // The server keeps no metadata.
            (Done, true, false, created),
            (Done, false, true, WriteResult::Damaged),
            (Done, false, false, WriteResult::Overwritten),
            // The first response was lost, and the retry was refused.
            (Taken, true, true, created),
            (Taken, false, true, WriteResult::Damaged),
            (
                Taken,
                true,
                false,
                WriteResult::Published(Published::Identical),
            ),
            (
                Taken,
                false,
                false,
                WriteResult::Published(Published::Taken),
            ),
            (Failed, true, true, created),
            (Failed, true, false, created),
            (Failed, false, true, WriteResult::Damaged),
            (Failed, false, false, WriteResult::Failed),
        ] {
            let named = NamedObject { is_same, is_ours };
            assert_eq!(judge(response, named), expected, "{response:?} {named:?}");
        }
    }
}
