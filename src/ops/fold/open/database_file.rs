//! A full's database as a file: in the temporary directory, or a plain snapshot file as it lies.

use super::in_place::InPlace;
use crate::backup::full::FullReader;
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::base::{Cancel, ReadAt};
use crate::error::{Error, Result};
use crate::ops::{Context, free_space};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// A database file: one in the temporary directory, or a plain snapshot where it lies. Reading it ends if the Job is
/// cancelled.
#[derive(Debug)]
pub struct Spool {
    file: SpoolFile,
    cancel: Cancel,
}

#[derive(Debug)]
enum SpoolFile {
    Temp(TempFile),
    InPlace(Arc<InPlace>),
}

impl Spool {
    pub(crate) fn new(file: TempFile, cancel: Cancel) -> Self {
        let file = SpoolFile::Temp(file);
        Spool { file, cancel }
    }

    pub(super) fn in_place(file: Arc<InPlace>, cancel: Cancel) -> Self {
        let file = SpoolFile::InPlace(file);
        Spool { file, cancel }
    }
}

impl ReadAt for Spool {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.cancel.check()?;
        match &self.file {
            SpoolFile::Temp(file) => ReadAt::read_exact_at(file, buf, offset),
            SpoolFile::InPlace(file) => file.read_exact_at(buf, offset),
        }
    }
    fn size(&self) -> io::Result<u64> {
        match &self.file {
            SpoolFile::Temp(file) => file.size(),
            SpoolFile::InPlace(file) => file.size(),
        }
    }
}

impl Context {
    /// Puts a database file behind the Job's switch.
    pub(crate) fn spool(&self, file: TempFile) -> Spool {
        Spool::new(file, self.store.cancel().clone())
    }

    /// Copies a database's pages in use into an unnamed temporary file; up to `tail` bytes may follow them. `each`
    /// gets all that is read. `what` names the database.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `TooLarge`, `NoSpace`; what `read_error` makes of a failure to read; `Io`, `Terminated`.
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
        let mut left = database.promised();
        if let Err(no_space) = free_space::check(&self.temp_dir, left, what) {
            // A few bytes can promise any size: damage is final, and NoSpace is tried again.
            for_each_piece(&mut database, cancel, read_error, |_| Ok(()))?;
            return Err(no_space);
        }
        let mut file = self.temp_file()?;
        for_each_piece(&mut database, cancel, read_error, |piece| {
            each(piece);
            let in_use = left.min(piece.len() as u64);
            left -= in_use;
            file.write_all(&piece[..in_use as usize])
                .map_err(|e| self.write_error(e))
        })?;
        Ok(file)
    }

    pub(super) fn write_error(&self, e: io::Error) -> Error {
        Error::io(format!("write to {}", self.temp_dir.display()), e)
    }
}
