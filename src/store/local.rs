//! Small objects in a local folder: written, synced, and renamed to where they belong, by as few calls as that takes.
//!
//! What lasts is the content, by the file's own sync, and the name, by that of its folder. That the staging folder is
//! not synced loses nothing: what a crash leaves there, or takes from there, had no name yet. One sync of a folder
//! makes all names last that were given in it before. `publish` calls it.

use super::Store;
use super::staging::{STAGING, STAGING_TRIES};
use crate::error::{Error, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

/// What became of a name.
pub(super) enum Renamed {
    Done,
    /// Something has the name.
    Taken,
    /// The file system has no such call, or the folder is not there yet.
    NotSo,
}

/// Writes a new staging file.
pub(super) fn write(root: &Path, below: &str, content: &[u8]) -> std::io::Result<()> {
    let path = root.join(below);
    let mut tried = 0;
    let mut file = loop {
        tried += 1;
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            // Another run removes the empty folder while this one makes it.
            Err(e) if e.kind() == ErrorKind::NotFound && tried < STAGING_TRIES => {
                match fs::create_dir(root.join(STAGING)) {
                    Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e),
                    _ => {}
                }
            }
            opened => break opened?,
        }
    };
    file.write_all(content)?;
    file.sync_all()
}

/// Renames a staging file, if its new name is free.
pub(super) fn rename(root: &Path, from: &str, to: &str) -> std::io::Result<Renamed> {
    let (from, to) = (root.join(from), root.join(to));
    match renameat_with(CWD, &from, CWD, &to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(Renamed::Done),
        Err(Errno::EXIST) => Ok(Renamed::Taken),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP | Errno::NOENT) => Ok(Renamed::NotSo),
        Err(e) => Err(e.into()),
    }
}

impl Store {
    /// Makes names last that [`Staged::name`](super::Staged::name) gave: one sync for each folder. Only a local folder needs it.
    ///
    /// # Errors
    /// `Io`.
    pub fn sync_names<'p>(&self, paths: impl IntoIterator<Item = &'p str>) -> Result<()> {
        let Some(root) = &self.local_root else {
            return Ok(());
        };
        let folder = |path: &'p str| path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let folders: BTreeSet<&str> = paths.into_iter().map(folder).collect();
        for folder in folders {
            let synced = File::open(root.join(folder)).and_then(|f| f.sync_all());
            synced.map_err(|e| Error::io(format!("sync {}", self.name(folder)), e))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_given_once_and_what_has_it_stays() {
        let root = tempfile::tempdir().unwrap();
        let (root, a, b) = (root.path(), "deltafold-staging/a", "deltafold-staging/b");
        let read = |below: &str| fs::read(root.join(below)).unwrap();
        // The staging folder is made when it is needed.
        write(root, a, b"one").unwrap();
        write(root, b, b"two").unwrap();
        let again = write(root, a, b"three").unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AlreadyExists);
        assert_eq!(read(a), b"one");

        // The folder is not there yet.
        assert!(matches!(
            rename(root, a, "v2/full").unwrap(),
            Renamed::NotSo
        ));
        fs::create_dir(root.join("v2")).unwrap();
        assert!(matches!(rename(root, a, "v2/full").unwrap(), Renamed::Done));
        assert!(matches!(
            rename(root, b, "v2/full").unwrap(),
            Renamed::Taken
        ));
        assert_eq!((read("v2/full"), read(b)), (b"one".into(), b"two".into()));
        assert!(!root.join(a).exists());
    }
}
