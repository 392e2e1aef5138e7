//! The database of a full as a file: in the temporary directory, or a plain snapshot file in place.
//!
//! The content is checked by `bolt`, not here.

use super::in_place::InPlaceFile;
use crate::base::temp::TempFile;
use crate::base::{Cancel, ReadAt};
use std::io;
use std::sync::Arc;

/// A database file: one in the temporary directory, or a plain snapshot file in place. Reading it fails with
/// `Terminated` after the operation was cancelled.
#[derive(Debug, Clone)]
pub struct DatabaseFile {
    file: Inner,
    cancel: Cancel,
}

#[derive(Debug, Clone)]
enum Inner {
    Temp(Arc<TempFile>),
    InPlace(Arc<InPlaceFile>),
}

impl DatabaseFile {
    pub(crate) fn new(file: TempFile, cancel: Cancel) -> Self {
        let file = Inner::Temp(Arc::new(file));
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
            Inner::Temp(file) => file.read_exact_at(buf, offset),
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
