//! The location of a backup: a prefix of a store, or plain snapshot files.
//!
//! It opens the location with `state`.

use super::state::State;
use crate::error::{Error, Reason, Result};
use crate::prefix::Context;
use crate::prefix::plain_files::{PlainFiles, PlainPlace};
use crate::prefix::scan::{Depth, Scan, scan};
use crate::prefix::select::StateRequest;

/// The layout of a prefix.
pub(crate) enum Layout<T> {
    /// Fulls and deltas in v2/ or v1/.
    Chain(T),
    /// Plain snapshots.
    Plain(PlainFiles),
}

/// The location of a backup.
pub enum BackupLocation {
    /// A prefix of a store.
    Store(Context),
    /// A plain snapshot file, or several.
    File(Context, PlainPlace),
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
            BackupLocation::File(ctx, place) => place.name(ctx),
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
    /// As [`State::open`]; `Usage` if plain snapshots cannot have what is requested.
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
            BackupLocation::File(_, place) => {
                Ok((State::open_file_unchecked(ctx, place, request)?, None))
            }
            _ => match Self::layout(ctx, scan(ctx, Depth::Doubtful))? {
                Layout::Chain(scan) => Ok((State::open(ctx, &scan, request)?, Some(scan))),
                Layout::Plain(found) => Ok((State::open_one_of(ctx, found, request)?, None)),
            },
        }
    }

    /// Returns how a prefix is laid out, by the result of looking for chains: plain snapshots are looked for only if there
    /// is none.
    ///
    /// # Errors
    /// The error of the result.
    pub(crate) fn layout<T>(ctx: &Context, chains: Result<T>) -> Result<Layout<T>> {
        match chains {
            Err(e) if e.reason() == Reason::NoSnapshots => {
                match PlainFiles::find(ctx, &PlainPlace::of_prefix(ctx)) {
                    Ok(found) if !found.has_names_of_chains() => Ok(Layout::Plain(found)),
                    // The error of the chains has the better hints, such as the folder above.
                    _ => Err(e),
                }
            }
            chains => chains.map(Layout::Chain),
        }
    }
}
