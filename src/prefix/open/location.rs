//! The location of a backup: a prefix of a store, or a plain snapshot file.
//!
//! It opens the location with `state`.

use super::state::State;
use crate::error::{Error, Result};
use crate::prefix::Context;
use crate::prefix::scan::{Depth, Scan, scan};
use crate::prefix::select::StateRequest;
use std::path::PathBuf;

/// The location of a backup.
pub enum BackupLocation {
    /// A prefix of a store.
    Store(Context),
    /// A plain snapshot file.
    File(Context, PathBuf),
    /// A store that could not be opened.
    Closed {
        /// The URL of the store.
        name: String,
        /// The error of opening the store.
        error: Error,
    },
}

impl BackupLocation {
    /// Returns the URL or the path, for messages.
    pub fn name(&self) -> String {
        match self {
            BackupLocation::Store(ctx) => ctx.store.url().to_owned(),
            BackupLocation::File(_, path) => path.display().to_string(),
            BackupLocation::Closed { name, .. } => name.clone(),
        }
    }

    /// Returns the context to read the backup with.
    ///
    /// # Errors
    /// The error of opening the store.
    pub fn context(&self) -> Result<&Context> {
        match self {
            BackupLocation::Store(ctx) | BackupLocation::File(ctx, _) => Ok(ctx),
            BackupLocation::Closed { error, .. } => Err(error.again()),
        }
    }

    /// Opens the full of the requested state.
    ///
    /// # Errors
    /// As [`State::open`] and [`State::open_file`].
    pub fn open(&self, request: &StateRequest) -> Result<(&Context, State)> {
        let (source, _) = self.open_with_scan(request)?;
        Ok((self.context()?, source))
    }

    /// Opens as [`open`](Self::open) does, and returns the scan of a store, too.
    pub(crate) fn open_with_scan(&self, request: &StateRequest) -> Result<(State, Option<Scan>)> {
        let (source, scan) = self.open_unchecked(request)?;
        source.wait_for_hash()?;
        Ok((source, scan))
    }

    /// Opens the full of the requested state and returns the scan, too. The hash of a plain snapshot file may
    /// not be checked yet: see [`State::wait_for_hash`].
    pub(crate) fn open_unchecked(&self, request: &StateRequest) -> Result<(State, Option<Scan>)> {
        let ctx = self.context()?;
        match self {
            BackupLocation::File(_, path) => {
                Ok((State::open_file_unchecked(ctx, path, request)?, None))
            }
            _ => {
                let scan = scan(ctx, Depth::Doubtful)?;
                Ok((State::open(ctx, &scan, request)?, Some(scan)))
            }
        }
    }
}
