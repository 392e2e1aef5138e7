//! A plain snapshot that is written: a file of this machine, or an object of a store. It gets its name last, and nothing
//! is overwritten.
//!
//! Used by `ops::restore` and `ops::snapshot`. Knows nothing of the content.

use crate::backup::name::ENCRYPTED;
use crate::base::Cancel;
use crate::base::opt::AGE_RECIPIENT;
use crate::base::read_all::for_each_piece;
use crate::datadir::install::sync_directory;
use crate::error::{Error, Reason, Result};
use crate::store::{Published, Store, Upload};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Where a plain snapshot is written.
#[derive(Clone)]
pub enum PlainTarget {
    /// A file of this machine.
    File(PathBuf),
    /// An object directly at the prefix of a store.
    Object(Box<Store>, String),
}

impl PlainTarget {
    /// Returns the path or the URL, for messages and results.
    pub fn name(&self) -> String {
        match self {
            PlainTarget::File(path) => path.display().to_string(),
            PlainTarget::Object(store, name) => store.name(name),
        }
    }

    /// Checks that nothing has the name, that its folder exists, and that it agrees with the encryption.
    ///
    /// # Errors
    /// `TargetExists`, `Usage`, `Configuration`; errors of the store.
    pub(super) fn check(&self, encrypts: bool) -> Result<()> {
        let (name, is_taken) = (
            self.name(),
            match self {
                PlainTarget::File(path) => path.symlink_metadata().is_ok(),
                PlainTarget::Object(store, name) => store.exists(name)?,
            },
        );
        if is_taken {
            return Err(name_taken(&name));
        }
        if let PlainTarget::File(path) = self
            && !folder_of(path).is_dir()
        {
            let folder = folder_of(path).display();
            return Err(
                Reason::Usage.error(format!("the folder {folder} of {name} does not exist"))
            );
        }
        let (reason, problem) = match (name.ends_with(ENCRYPTED), encrypts) {
            (true, false) => (
                Reason::Configuration,
                format!(
                    "a name that ends in {ENCRYPTED} is that of an encrypted snapshot: give {AGE_RECIPIENT}, or another name"
                ),
            ),
            (false, true) => (
                Reason::Usage,
                format!(
                    "age recipients are given, so the name must end in {ENCRYPTED}: add it, or give no recipients for a plain snapshot"
                ),
            ),
            _ => return Ok(()),
        };
        Err(reason.error(format!("{name}: {problem}")))
    }

    /// Returns the directory in which the file is written: that of the file, or the temporary one.
    pub(super) fn directory<'a>(&'a self, temp_dir: &'a Path) -> &'a Path {
        match self {
            PlainTarget::File(path) => folder_of(path),
            PlainTarget::Object(..) => temp_dir,
        }
    }

    /// Gives a file that was written its name, or uploads it.
    ///
    /// # Errors
    /// `TargetExists` if the name was taken meanwhile; `Io`; errors of the store.
    pub(super) fn publish(&self, file: Unnamed, cancel: &Cancel) -> Result<()> {
        match self {
            PlainTarget::File(path) => {
                file.name(path)?;
                sync_directory(folder_of(path))
            }
            PlainTarget::Object(store, name) => {
                let failed = |e| Error::io("upload the snapshot", e);
                let file = file.reader()?;
                let bytes = file.metadata().map_err(failed)?.len();
                let mut upload = Upload::new(store, name, bytes)?;
                for_each_piece(file, cancel, failed, |piece| {
                    upload.write_all(piece).map_err(failed)
                })?;
                match upload.finish()?.complete()? {
                    Published::Created | Published::Identical => Ok(()),
                    Published::Taken => Err(name_taken(&self.name())),
                }
            }
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A file without a name, in the directory of its later name. It is gone if the process dies.
pub(super) struct Unnamed {
    pub(super) file: File,
    /// The file's temporary path, on a file system without unnamed files.
    hidden: Option<tempfile::TempPath>,
}

impl Unnamed {
    pub(super) fn new(dir: &Path) -> Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        if let Ok(fd) = rustix::fs::openat(CWD, dir, flags, Mode::RUSR | Mode::WUSR) {
            let file = File::from(fd);
            return Ok(Unnamed { file, hidden: None });
        }
        let file = tempfile::Builder::new()
            .prefix(".deltafold-")
            .tempfile_in(dir)
            .map_err(|e| Error::io(format!("create a file in {}", dir.display()), e))?;
        let (file, hidden) = file.into_parts();
        let hidden = Some(hidden);
        Ok(Unnamed { file, hidden })
    }

    /// Returns the file, to be read from its beginning.
    pub(super) fn reader(&self) -> Result<File> {
        let mut file = self.file.try_clone().map_err(read_back_error)?;
        file.rewind().map_err(read_back_error)?;
        Ok(file)
    }

    /// Fails with `Io` unless the file has the SHA-256 of the bytes that were written to it.
    pub(super) fn check_sum(&self, written: Sha256, cancel: &Cancel) -> Result<()> {
        let mut sum = Sha256::new();
        for_each_piece(self.reader()?, cancel, read_back_error, |piece| {
            sum.update(piece);
            Ok(())
        })?;
        if sum.finalize() == written.finalize() {
            Ok(())
        } else {
            Err(Reason::Io
                .error("the snapshot reads back differently from what was written: check the disk"))
        }
    }

    /// Gives the file its name. Fails with `TargetExists` if the name is taken.
    fn name(self, path: &Path) -> Result<()> {
        let named = match self.hidden {
            Some(hidden) => hidden.persist_noclobber(path).map_err(|e| e.error),
            None => {
                let fd_path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                rustix::fs::linkat(CWD, fd_path, CWD, path, AtFlags::SYMLINK_FOLLOW)
                    .map_err(io::Error::from)
            }
        };
        named.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => name_taken(&path.display().to_string()),
            _ => Error::io(format!("give {} its name", path.display()), e),
        })
    }
}

pub(super) fn read_back_error(e: io::Error) -> Error {
    Error::io("read the snapshot back", e)
}

/// Returns the error for a name that is taken.
fn name_taken(name: &str) -> Error {
    Reason::TargetExists.error(format!(
        "{name} already exists, and deltafold never overwrites a snapshot: choose another name"
    ))
}
