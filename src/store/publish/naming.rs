//! The first steps of giving an upload its name, beside reading it back: whether the name is free, and a copy of
//! the staging object that nobody sees before it is completed.
//!
//! Nothing is named here. `publish` calls it, and decides.

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::s3::{Copied, Prepared};
use object_store::path::Path;
use tokio::sync::oneshot;

/// These steps, under way. Dropping this undoes them.
pub(super) struct Ahead {
    store: Store,
    below: String,
    work: Option<oneshot::Receiver<Found>>,
}

struct Found {
    exists: Result<bool>,
    copy: Option<Prepared>,
}

/// What was found at a name.
pub(super) struct Looked {
    /// Something has the name.
    pub(super) exists: bool,
    /// A copy for it, if the store copies step by step.
    pub(super) copy: Option<Waiting>,
}

/// A copy that waits for its name. Dropping this removes it.
pub(super) struct Waiting {
    store: Store,
    to: Path,
    copy: Option<Prepared>,
}

impl Ahead {
    /// Begins with the staging object `from`, which has so many bytes. `None` in a local folder, where nothing waits.
    pub(super) fn begin(store: &Store, from: &str, below: String, bytes: u64) -> Option<Self> {
        if store.local_root.is_some() {
            return None;
        }
        let (from, to) = (store.path(from), store.path(&below));
        let (of_work, name) = (store.clone(), below.clone());
        let (tell, work) = oneshot::channel();
        let thread = std::thread::Builder::new().spawn(move || {
            let store = &of_work;
            let copy = async {
                // Where writers make claims, a copy begins later.
                let copying = store.copying().filter(|_| !store.is_known_to_ignore())?;
                let copy = copying.prepare((&from, &to), bytes).await;
                // It is tried again, and fails again where it matters.
                copy.inspect_err(|e| tracing::debug!("{e}")).ok()
            };
            let found = async { futures::join!(store.is_there(&name), copy) };
            let (exists, copy) = store.handle.block_on(found);
            let _ = tell.send(Found { exists, copy });
        });
        thread.ok()?;
        Some(Ahead {
            store: store.clone(),
            below,
            work: Some(work),
        })
    }

    /// The name.
    pub(super) fn below(&self) -> &str {
        &self.below
    }

    /// Waits for what was found.
    ///
    /// # Errors
    /// The store's; `Terminated`.
    pub(super) fn end(mut self) -> Result<Looked> {
        let found = match &mut self.work {
            Some(work) => self.store.block_on(work)?,
            None => return Err(Error::internal("a naming that was ended twice")),
        };
        self.work = None;
        let found = found.map_err(|e| Error::internal(format!("a naming's task ended: {e}")))?;
        let copy = found.copy.map(|copy| Waiting {
            store: self.store.clone(),
            to: self.store.path(&self.below),
            copy: Some(copy),
        });
        let exists = found.exists?;
        Ok(Looked { exists, copy })
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else {
            return;
        };
        let (store, to) = (&self.store, self.store.path(&self.below));
        let undone = store.clean_up(async {
            if let (
                Ok(Found {
                    copy: Some(copy), ..
                }),
                Some(copying),
            ) = (work.await, store.copying())
            {
                copying.give_up(&to, copy).await;
            }
            Ok(())
        });
        if let Err(e) = undone {
            tracing::warn!("an unfinished upload of {to} may be left behind: {e}");
        }
    }
}

impl Waiting {
    /// Gives the copy its name, on condition that it is free.
    ///
    /// # Errors
    /// The store's; `Terminated`.
    pub(super) fn complete(mut self) -> Result<Result<Copied>> {
        match (self.copy.take(), self.store.copying()) {
            (Some(copy), Some(copying)) => {
                self.store.block_on(copying.complete(&self.to, copy, true))
            }
            _ => Err(Error::internal("a copy that was completed twice")),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let (Some(copy), Some(copying)) = (self.copy.take(), self.store.copying()) {
            let given_up = self.store.clean_up(async {
                copying.give_up(&self.to, copy).await;
                Ok(())
            });
            if let Err(e) = given_up {
                tracing::warn!("an unfinished upload of {} is left behind: {e}", self.to);
            }
        }
    }
}
