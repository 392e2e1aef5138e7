//! Where a backup is: a prefix of a store, or a plain snapshot file.

use super::source::Source;
use crate::error::{Error, Result};
use crate::ops::Context;
use crate::ops::fold::select::Request;
use crate::ops::scan::{Depth, Scan, scan};
use std::path::PathBuf;

/// Where a backup is.
pub enum Backup {
    /// A prefix of a store.
    Store(Context),
    /// A plain snapshot file.
    File(Context, PathBuf),
    /// A store that could not be opened.
    Closed {
        /// Its URL.
        name: String,
        /// Why.
        error: Error,
    },
}

impl Backup {
    /// Where it is, for people.
    pub fn name(&self) -> String {
        match self {
            Backup::Store(ctx) => ctx.store.url().to_owned(),
            Backup::File(_, path) => path.display().to_string(),
            Backup::Closed { name, .. } => name.clone(),
        }
    }

    /// What it is read with.
    ///
    /// # Errors
    /// Why it could not be opened.
    pub fn context(&self) -> Result<&Context> {
        match self {
            Backup::Store(ctx) | Backup::File(ctx, _) => Ok(ctx),
            Backup::Closed { error, .. } => Err(error.again()),
        }
    }

    /// Opens what leads to the state that is asked for.
    ///
    /// # Errors
    /// As [`Source::open`] and [`Source::open_file`].
    pub fn open(&self, request: &Request) -> Result<(&Context, Source)> {
        let (source, _) = self.open_unproven(request)?;
        source.prove()?;
        Ok((self.context()?, source))
    }

    /// Opens it with its scan; a plain snapshot file may still be hashed: see [`Source::prove`].
    pub(crate) fn open_unproven(&self, request: &Request) -> Result<(Source, Option<Scan>)> {
        let ctx = self.context()?;
        match self {
            Backup::File(_, path) => Ok((Source::open_file_unproven(ctx, path, request)?, None)),
            _ => {
                let scan = scan(ctx, Depth::Doubtful)?;
                Ok((Source::open(ctx, &scan, request)?, Some(scan)))
            }
        }
    }
}
