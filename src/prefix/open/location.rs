//! The location of a backup: a prefix of a store, or plain snapshot files.
//!
//! It opens the location with `state`.

use super::state::State;
use crate::backup::catalog::SNAPSHOTS;
use crate::error::{Error, Reason, Result};
use crate::prefix::plain_files::{PlainFiles, PlainPlace, is_of_one_snapshot, tells_plain_layout};
use crate::prefix::scan::{Depth, Scan, both_layouts_error, scan};
use crate::prefix::select::StateRequest;
use crate::prefix::{Context, PrefixLayout};
use crate::store::open::local_folder;
use std::path::Path;

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
            _ => match Self::layout(ctx, || scan(ctx, Depth::Doubtful))? {
                Layout::Chain(scan) => Ok((State::open(ctx, &scan, request)?, Some(scan))),
                Layout::Plain(found) => Ok((State::open_one_of(ctx, found, request)?, None)),
            },
        }
    }

    /// Returns how a prefix is laid out. `read_chains` reads it as a prefix of chains. If there is no chain, plain snapshots
    /// are looked for. A folder of this machine is always looked at, since that costs no request.
    ///
    /// # Errors
    /// The error of `read_chains`; `Usage` if a folder has both, and the context does not say which is meant.
    pub(crate) fn layout<T>(
        ctx: &Context,
        read_chains: impl FnOnce() -> Result<T>,
    ) -> Result<Layout<T>> {
        let find = || PlainFiles::find(ctx, &PlainPlace::of_prefix(ctx));
        match ctx.layout {
            Some(PrefixLayout::Chain) => return read_chains().map(Layout::Chain),
            Some(PrefixLayout::Plain) => return find().map(Layout::Plain),
            None => refuse_both(ctx)?,
        }
        match read_chains() {
            Err(e) if e.reason() == Reason::NoSnapshots => match find() {
                Ok(found) if !found.has_names_of_chains() => Ok(Layout::Plain(found)),
                // The error of the chains has the better hints, such as the folder above.
                _ => Err(e),
            },
            chains => chains.map(Layout::Chain),
        }
    }
}

/// Fails if a folder of this machine holds chains and plain snapshots.
fn refuse_both(ctx: &Context) -> Result<()> {
    let Some(root) = local_folder(ctx.store.url()) else {
        return Ok(());
    };
    let names_in = |dir: &Path| {
        let entries = dir.read_dir().into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
    };
    let has_chains = SNAPSHOTS
        .iter()
        .any(|folder| names_in(&root.join(folder)).next().is_some());
    let is_plain = |name: &String| {
        let mut below = names_in(&root.join(name)).map(|file| format!("{name}/{file}"));
        tells_plain_layout(name)
            || is_of_one_snapshot(name) && below.any(|path| tells_plain_layout(&path))
    };
    let plain = has_chains.then(|| names_in(&root).find(is_plain)).flatten();
    match plain {
        Some(plain) => Err(both_layouts_error(ctx, &plain)),
        None => Ok(()),
    }
}
