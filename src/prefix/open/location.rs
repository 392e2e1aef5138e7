//! The location of a backup: a prefix of a store, or a plain snapshot file.
//!
//! It opens the location with `state`.

use super::state::State;
use crate::error::Result;
use crate::prefix::Context;
use crate::prefix::scan::{Depth, Scan, scan};
use crate::prefix::select::StateRequest;
use crate::prefix::snapshot_files::OpenFile;

/// The location of a backup.
#[derive(Clone)]
pub enum BackupLocation {
    /// A prefix of a store.
    Prefix(Context),
    /// A plain snapshot file.
    File(Context, Box<OpenFile>),
}

impl BackupLocation {
    /// Returns the URL or the path, for messages.
    pub fn name(&self) -> String {
        match self {
            BackupLocation::Prefix(ctx) => ctx.store.url().to_owned(),
            BackupLocation::File(_, file) => file.name.clone(),
        }
    }

    /// Returns the context to read the backup with.
    pub fn context(&self) -> &Context {
        match self {
            BackupLocation::Prefix(ctx) | BackupLocation::File(ctx, _) => ctx,
        }
    }

    /// Returns the plain snapshot file; `None` for a prefix.
    pub fn file(&self) -> Option<&OpenFile> {
        match self {
            BackupLocation::Prefix(_) => None,
            BackupLocation::File(_, file) => Some(file),
        }
    }

    /// Opens the full of the requested state.
    ///
    /// # Errors
    /// As [`State::open`] and [`State::of_file`].
    pub fn open(&self, request: &StateRequest) -> Result<State> {
        Ok(self.open_with_scan(request)?.0)
    }

    /// Opens as [`open`](Self::open) does, and returns the scan of a prefix, too.
    pub(crate) fn open_with_scan(&self, request: &StateRequest) -> Result<(State, Option<Scan>)> {
        match self {
            BackupLocation::File(_, file) => Ok((State::of_file(file, request)?, None)),
            BackupLocation::Prefix(ctx) => {
                let scan = scan(ctx, Depth::Doubtful)?;
                Ok((State::open(ctx, &scan, request)?, Some(scan)))
            }
        }
    }
}
