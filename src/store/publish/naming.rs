//! Prepares the naming of a staged object while it is read back: checks whether the name is free, and copies
//! the staging object to an upload that nobody sees before it is completed.
//!
//! Gives no name. Called by `publish`, which decides.

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::s3::{CopyOutcome, UnnamedCopy};
use object_store::path::Path;
use tokio::sync::oneshot;

/// A preparation under way. Dropping this undoes it.
pub(super) struct NamingPreparation {
    store: Store,
    below: String,
    result: Option<oneshot::Receiver<PreparationResult>>,
}

struct PreparationResult {
    exists: Result<bool>,
    copy: Option<UnnamedCopy>,
}

/// The result of a check of a name.
pub(super) struct NameCheck {
    /// An object has the name.
    pub(super) exists: bool,
    /// A copy for the name, if the store copies by ranges.
    pub(super) copy: Option<PreparedCopy>,
}

/// A copy that waits for its name. Dropping this removes it.
pub(super) struct PreparedCopy {
    store: Store,
    to: Path,
    copy: Option<UnnamedCopy>,
}

impl NamingPreparation {
    /// Begins to prepare the name `below` for the staging object `from` of `bytes` bytes. Returns `None` in a
    /// local folder, where nothing waits, and if the system has no thread left.
    pub(super) fn begin(store: &Store, from: &str, below: String, bytes: u64) -> Option<Self> {
        if store.local_root.is_some() {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        let (of_thread, from, name) = (store.clone(), from.to_owned(), below.clone());
        let thread = std::thread::Builder::new().spawn(move || {
            let _ = sender.send(prepare(&of_thread, &from, &name, bytes));
        });
        thread.ok()?;
        Some(NamingPreparation {
            store: store.clone(),
            below,
            result: Some(receiver),
        })
    }

    /// Returns the name that is prepared.
    pub(super) fn below(&self) -> &str {
        &self.below
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `Terminated`.
    pub(super) fn end(mut self) -> Result<NameCheck> {
        let result = match &mut self.result {
            Some(receiver) => self.store.block_on(receiver)?,
            None => return Err(Error::internal("the preparation of a name ended twice")),
        };
        self.result = None;
        let result = result
            .map_err(|e| Error::internal(format!("the preparation of a name panicked: {e}")))?;
        let copy = result.copy.map(|copy| PreparedCopy {
            store: self.store.clone(),
            to: self.store.path(&self.below),
            copy: Some(copy),
        });
        let exists = result.exists?;
        Ok(NameCheck { exists, copy })
    }
}

/// Does the work of a preparation, on a thread of its own.
fn prepare(store: &Store, from: &str, below: &str, bytes: u64) -> PreparationResult {
    let (from, to) = (store.path(from), store.path(below));
    let copy = async {
        // If writers claim names, a copy must begin after the claim.
        let copier = store.copier().filter(|_| !store.is_known_to_ignore())?;
        let copy = copier.prepare((&from, &to), bytes).await;
        // The naming copies again then, and reports the error.
        copy.inspect_err(|e| tracing::debug!("{e}")).ok()
    };
    let both = async { futures::join!(store.is_there(below), copy) };
    let (exists, copy) = store.handle.block_on(both);
    PreparationResult { exists, copy }
}

impl Drop for NamingPreparation {
    fn drop(&mut self) {
        let Some(receiver) = self.result.take() else {
            return;
        };
        let (store, to) = (&self.store, self.store.path(&self.below));
        let undone = store.clean_up(async {
            let copy = receiver.await.ok().and_then(|result| result.copy);
            if let (Some(copy), Some(copier)) = (copy, store.copier()) {
                copier.discard(&to, copy).await;
            }
            Ok(())
        });
        if let Err(e) = undone {
            tracing::warn!("an unfinished upload of {to} may be left behind: {e}");
        }
    }
}

impl PreparedCopy {
    /// Gives the copy its name, on condition that the name is free.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `Terminated`.
    pub(super) fn complete(mut self) -> Result<Result<CopyOutcome>> {
        match (self.copy.take(), self.store.copier()) {
            (Some(copy), Some(copier)) => {
                self.store.block_on(copier.complete(&self.to, copy, true))
            }
            _ => Err(Error::internal("a copy was completed twice")),
        }
    }
}

impl Drop for PreparedCopy {
    fn drop(&mut self) {
        if let (Some(copy), Some(copier)) = (self.copy.take(), self.store.copier()) {
            let discarded = self.store.clean_up(async {
                copier.discard(&self.to, copy).await;
                Ok(())
            });
            if let Err(e) = discarded {
                tracing::warn!("an unfinished upload of {} is left behind: {e}", self.to);
            }
        }
    }
}
