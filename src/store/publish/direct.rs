//! Small objects by one request: put under their names at once, and read back there.
//!
//! An object store shows what one request puts as a whole or not at all. So a small object needs no staging
//! place if the store refuses a name that is taken, and a body that was damaged on its way. Whether it does
//! both is tried once by each process. `publish` calls it.

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

/// The metadata that tells whose request wrote an object.
const UPLOAD: &str = "deltafold-upload";

/// Bytes that wait for their names in memory; what comes beyond that waits in staging. `copy` may have many
/// deltas that wait for their full.
const MOST_HELD: u64 = 16 << 20;
/// What else is in memory for each of them.
const HELD_BESIDE: u64 = 1 << 10;

/// Further ways into the same place.
#[derive(Clone)]
pub struct Direct {
    /// Sends a checksum with each body.
    checked: Arc<dyn ObjectStore>,
    /// The same, and each body is damaged on its way.
    damaging: Arc<dyn ObjectStore>,
    /// Whether small objects can be put at once.
    works: Capability,
    /// Bytes that wait for their names.
    held: Arc<AtomicU64>,
}

impl Direct {
    /// `checked` sends a checksum with each body; `damaging` does so, too, and then damages the body.
    pub fn new(checked: Arc<dyn ObjectStore>, damaging: Arc<dyn ObjectStore>) -> Self {
        Direct {
            checked,
            damaging,
            works: Capability::default(),
            held: Arc::default(),
        }
    }

    /// Room for so many bytes in memory; `None` if there is none now.
    pub(super) fn room(&self, bytes: usize) -> Option<Room> {
        let bytes = (bytes as u64).saturating_add(HELD_BESIDE);
        let add = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= MOST_HELD);
        let held = &self.held;
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
            .ok()?;
        Some(Room {
            held: Arc::clone(held),
            bytes,
        })
    }

    /// Whether a body that does not match its checksum is refused.
    ///
    /// # Errors
    /// The store's, if it gave no answer.
    pub(in crate::store) async fn refuses_damage(&self, path: &Path) -> Result<bool> {
        let Err(e) = self.damaging.put(path, "damaged".into()).await else {
            return Ok(false);
        };
        refusal("write a damaged object", e).map(|_| true)
    }

    /// Puts an object with its checksum.
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

/// Room in memory, given back when this is dropped.
pub(super) struct Room {
    held: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Store {
    /// The way to put small objects at once, if that is safe here. It is tried once, with an object in the
    /// staging folder; what fails is tried again the next time.
    ///
    /// # Errors
    /// `Terminated`.
    pub(super) fn direct(&self) -> Result<Option<&Direct>> {
        // Writers that copy rely on claims if conditions are ignored, which a writer that puts does not make.
        if self.direct.is_none() || self.ignores_conditions()? {
            return Ok(None);
        }
        self.puts_at_once()
    }

    /// As above, by one's own means: a store on which writers rely on claims may do it, too.
    pub(in crate::store) fn puts_at_once(&self) -> Result<Option<&Direct>> {
        let Some(direct) = &self.direct else {
            return Ok(None);
        };
        // Removed when those that wait know.
        let mut probe = None;
        match direct
            .works
            .find_out(|| self.try_direct(direct, &mut probe))
        {
            Ok(works) => Ok(works.then_some(direct)),
            Err(e) if e.reason() == Reason::Terminated => Err(e),
            Err(e) => {
                tracing::debug!("whether small objects can be put at once is not known: {e}");
                Ok(None)
            }
        }
    }

    fn try_direct(&self, direct: &Direct, probe: &mut Option<Claim>) -> Result<bool> {
        let probe = probe.insert(Claim::unwritten(self, StagingName::new("probe")));
        let path = self.path(probe.path());
        if !self.block_on(direct.refuses_damage(&path))?? {
            return Ok(false);
        }
        for is_second in [false, true] {
            match self.block_on(direct.put(&path, "probe".into(), "probe", PutMode::Create))? {
                Ok(()) if is_second => return Ok(false),
                Ok(()) => {}
                // The damaged body was refused and kept, if this is the first.
                Err(e) if is_taken(&e) => return Ok(is_second),
                Err(e) => {
                    let what = format!("try {}", self.name(STAGING));
                    // Credentials may be mended later.
                    return match e {
                        E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                            Err(store_error(what, e))
                        }
                        e => refusal(&what, e).map(|_| false),
                    };
                }
            }
        }
        Ok(false)
    }
}

/// A small object that waits for its name in memory.
pub(super) struct Held {
    store: Store,
    direct: Direct,
    content: Bytes,
    /// Tells what this wrote from what others wrote.
    upload: String,
    _room: Room,
}

/// What has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    /// It holds the same bytes.
    is_same: bool,
    /// This upload wrote it.
    is_ours: bool,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answered {
    Done,
    /// The name is taken.
    Taken,
    /// It failed, or only its answer was lost.
    Failed,
}

/// What a name's object means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Published(Published),
    /// What was written reads back differently.
    Damaged,
    /// The store said that it wrote the object, and another one has the name.
    Overwritten,
    /// The request failed, and did nothing.
    Failed,
}

fn judge(answered: Answered, seen: Seen) -> Verdict {
    match (answered, seen.is_same, seen.is_ours) {
        // Damaged bytes must not keep the name, whatever was answered.
        (_, false, true) => Verdict::Damaged,
        (Answered::Taken, true, false) => Verdict::Published(Published::Identical),
        (Answered::Taken, false, false) => Verdict::Published(Published::Taken),
        (_, true, _) => Verdict::Published(Published::Created),
        (Answered::Done, false, false) => Verdict::Overwritten,
        (Answered::Failed, false, false) => Verdict::Failed,
    }
}

impl Held {
    pub(super) fn new(store: &Store, direct: &Direct, content: Bytes, room: Room) -> Self {
        Held {
            store: store.clone(),
            direct: direct.clone(),
            content,
            upload: format!("{:016x}", random_word()),
            _room: room,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.content.len() as u64
    }

    /// Puts the object under its name, unless another one has it, and reads back what has the name.
    ///
    /// # Errors
    /// The store's; `Io` if what is read back differs; `SnapshotVanished` if it is gone.
    pub(super) fn publish(&self, below: &str) -> Result<Published> {
        let (store, path) = (&self.store, self.store.path(below));
        let name = store.name(below);
        let content = PutPayload::from(self.content.clone());
        let put = store.block_on(
            self.direct
                .put(&path, content, &self.upload, PutMode::Create),
        )?;
        let answered = match &put {
            Ok(()) => Answered::Done,
            Err(e) if is_taken(e) => Answered::Taken,
            Err(_) => Answered::Failed,
        };
        let verdict = match store.block_on(self.look(&path, &name))? {
            Ok(seen) => judge(answered, seen),
            Err(_) if answered == Answered::Failed => Verdict::Failed,
            Err(e) => return Err(e),
        };
        let failed = |what: &str| Err(Reason::Io.error(format!("{name} {what}")));
        match verdict {
            Verdict::Published(published) => Ok(published),
            Verdict::Damaged => {
                // The object has this upload's word, so it is nobody else's. Nobody can have replaced it since:
                // a name is given only if it is free.
                let removed = store.clean_up(store.inner.delete(&path));
                failed(&format!(
                    "was written and reads back differently: the store is at fault; check it before you rely on its snapshots{}",
                    match removed {
                        Ok(()) => String::new(),
                        Err(e) =>
                            format!("; delete that object, since it could not be removed: {e}"),
                    }
                ))
            }
            Verdict::Overwritten => failed(
                "was written and reads back differently: the store is at fault, or somebody else wrote it in the same moment; check it before you rely on its snapshots",
            ),
            Verdict::Failed => Err(match put {
                Err(e) => write_error(&name, e),
                Ok(()) => Error::internal("a write that failed without an error"),
            }),
        }
    }

    /// Reads what has the name.
    async fn look(&self, path: &Path, name: &str) -> Result<Seen> {
        let store = &self.store;
        let failed = |e: E| match e {
            E::NotFound { .. } => Reason::SnapshotVanished.error(format!(
                "{name} was written and is gone: it was deleted meanwhile; run again"
            )),
            e => store_error(format!("read {name}"), e),
        };
        let got = store.inner.get(path).await.map_err(failed)?;
        let size = got.meta.size;
        let upload = got.attributes.get(&Attribute::Metadata(UPLOAD.into()));
        let is_ours = upload.is_some_and(|u| **u == *self.upload);
        // Whatever has another size is not read: it may be large.
        if size != self.bytes() {
            return Ok(Seen {
                is_same: false,
                is_ours,
            });
        }
        let bytes = bytes_of(got, size).await.map_err(failed)?;
        let read = bytes.len() as u64;
        store.bytes_read.fetch_add(read, Ordering::Relaxed);
        if read != size {
            return Err(cut_short(name, read, size));
        }
        Ok(Seen {
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
        let half = (MOST_HELD / 2 - HELD_BESIDE) as usize;
        let first = direct.clone().room(half).unwrap();
        assert!(direct.room(half + 1).is_none());
        assert!(direct.room(usize::MAX).is_none());
        let _second = direct.room(half).unwrap();
        assert!(direct.room(0).is_none());
        drop(first);
        assert!(direct.room(half).is_some());
    }

    #[test]
    fn what_has_the_name_decides_and_then_the_answer() {
        use Answered::{Done, Failed, Taken};
        let created = Verdict::Published(Published::Created);
        for (answered, is_same, is_ours, expected) in [
            (Done, true, true, created),
            // A server that keeps no metadata.
            (Done, true, false, created),
            (Done, false, true, Verdict::Damaged),
            (Done, false, false, Verdict::Overwritten),
            // The answer was lost, and the same request tried again.
            (Taken, true, true, created),
            (Taken, false, true, Verdict::Damaged),
            (Taken, true, false, Verdict::Published(Published::Identical)),
            (Taken, false, false, Verdict::Published(Published::Taken)),
            (Failed, true, true, created),
            (Failed, true, false, created),
            (Failed, false, true, Verdict::Damaged),
            (Failed, false, false, Verdict::Failed),
        ] {
            let seen = Seen { is_same, is_ours };
            assert_eq!(judge(answered, seen), expected, "{answered:?} {seen:?}");
        }
    }
}
