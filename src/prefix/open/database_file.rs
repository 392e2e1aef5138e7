//! The database of a full as a file: in the temporary directory, or a plain snapshot file in place.
//!
//! The content is checked by `bolt`, not here. Called by `read_snapshot`, `plain_snapshot` and
//! `ops::restore`.

use super::in_place::InPlaceFile;
use crate::backup::full::FullReader;
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::base::{Cancel, ReadAt};
use crate::error::{Error, Result};
use crate::prefix::{Context, free_space};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// A database file: one in the temporary directory, or a plain snapshot file in place. Reading it fails with
/// `Terminated` after the operation was cancelled.
#[derive(Debug)]
pub struct DatabaseFile {
    file: Inner,
    cancel: Cancel,
}

#[derive(Debug)]
enum Inner {
    Temp(TempFile),
    InPlace(Arc<InPlaceFile>),
}

impl DatabaseFile {
    pub(crate) fn new(file: TempFile, cancel: Cancel) -> Self {
        let file = Inner::Temp(file);
        DatabaseFile { file, cancel }
    }

    pub(super) fn in_place(file: Arc<InPlaceFile>, cancel: Cancel) -> Self {
        let file = Inner::InPlace(file);
        DatabaseFile { file, cancel }
    }
}

impl ReadAt for DatabaseFile {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.cancel.check()?;
        match &self.file {
            Inner::Temp(file) => ReadAt::read_exact_at(file, buf, offset),
            Inner::InPlace(file) => file.read_exact_at(buf, offset),
        }
    }
    fn size(&self) -> io::Result<u64> {
        match &self.file {
            Inner::Temp(file) => file.size(),
            Inner::InPlace(file) => file.size(),
        }
    }
}

impl Context {
    /// Makes a temporary file a database file that this operation can cancel.
    pub(crate) fn database_file(&self, file: TempFile) -> DatabaseFile {
        DatabaseFile::new(file, self.store.cancel().clone())
    }

    /// Copies the pages in use of a database to an unnamed temporary file. Up to `tail` bytes may follow
    /// them. `each` gets all bytes that are read. `what` names the database in messages.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `TooLarge`, `NoSpace`; read errors, as `read_error` converts them; `Io`,
    /// `Terminated`.
    pub(super) fn copy_database(
        &self,
        from: impl Read,
        tail: u64,
        what: &str,
        read_error: impl Fn(io::Error) -> Error,
        mut each: impl FnMut(&[u8]),
    ) -> Result<TempFile> {
        let cancel = self.store.cancel();
        let mut database = FullReader::open(from, &self.limits, tail).map_err(&read_error)?;
        let mut remaining = database.promised();
        if let Err(no_space) = free_space::check(&self.temp_dir, remaining, what) {
            // A damaged database can promise any size. Damage is final and NoSpace is retried, so look for
            // damage first.
            for_each_piece(&mut database, cancel, read_error, |_| Ok(()))?;
            return Err(no_space);
        }
        let mut file = self.temp_file()?;
        for_each_piece(&mut database, cancel, read_error, |piece| {
            each(piece);
            let in_use = remaining.min(piece.len() as u64);
            remaining -= in_use;
            file.write_all(&piece[..in_use as usize])
                .map_err(|e| self.write_error(e))
        })?;
        Ok(file)
    }

    pub(super) fn write_error(&self, e: io::Error) -> Error {
        Error::io(format!("write to {}", self.temp_dir.display()), e)
    }
}
