//! What every operation needs: the store, keys, limits, and the ways in which snapshots are opened.

use super::free_space;
use super::open::read_snapshot::SnapshotReader;
use super::open::{DatabaseFile, FilePlace, Payload, PlainSnapshot, plain_snapshot};
use super::set_aside::Marks;
use crate::backup::Snapshot;
use crate::backup::delta::DeltaReader;
use crate::backup::full::FullReader;
use crate::backup::trust::Trust;
use crate::base::limits::Limits;
use crate::base::read_all::for_each_piece;
use crate::base::temp::{self, TempFile};
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Base;
use crate::store::{Keys, Store};
use std::io::{self, Read, Write};
use std::path::PathBuf;

/// What every operation needs.
#[derive(Clone)]
pub struct Context {
    /// The store of the snapshots.
    pub store: Store,
    /// The directory for data that does not fit into memory. Files there have no names and vanish with the
    /// process. If `keys` are given, the files are encrypted.
    pub temp_dir: PathBuf,
    /// The number of threads that read, compress and upload, 1 or more. Results do not depend on it.
    pub threads: usize,
    /// The keys that decrypt snapshots, and the recipients for whom new ones are encrypted.
    pub keys: Keys,
    /// The rules for which snapshots may be inputs.
    pub trust: Trust,
    /// The sizes above which a snapshot is not read.
    pub limits: Limits,
    /// The snapshots that an operation has set aside.
    pub marks: Marks,
}

impl Context {
    /// Returns the temporary directory. Its files are encrypted if keys are given.
    pub fn temp(&self) -> temp::Dir {
        temp::Dir::new(&self.temp_dir, self.keys.are_given())
    }

    /// Returns the same context for another operation at the same time: what one of them sets aside is not the other's.
    pub fn apart(&self) -> Context {
        Context {
            marks: Marks::default(),
            ..self.clone()
        }
    }

    /// Creates an unnamed file in the temporary directory.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn temp_file(&self) -> Result<TempFile> {
        self.temp().file()
    }

    /// Returns a function that puts the full name of a snapshot before the message of an error.
    pub fn at<'a>(&'a self, snapshot: &'a Snapshot) -> impl Fn(Error) -> Error + 'a {
        |e| match e.reason() {
            // The messages of these errors name the object themselves, or no object is at fault.
            Reason::Terminated
            | Reason::SnapshotVanished
            | Reason::StoreUnreachable
            | Reason::PermissionDenied
            | Reason::Unauthenticated
            | Reason::NoSnapshots
            | Reason::NoSpace
            | Reason::Io => e,
            _ => {
                let name = self.store.name(&snapshot.path);
                // The error may have got the name already when the snapshot was opened.
                let e = if e.to_string().starts_with(&format!("{name}: ")) {
                    e
                } else {
                    e.at(&name)
                };
                match e.reason() {
                    Reason::CorruptSnapshot
                    | Reason::NameMismatch
                    | Reason::TooLarge
                    | Reason::CannotDecrypt => e.setting_aside(name),
                    _ => e,
                }
            }
        }
    }

    /// Starts to read the payload of a snapshot.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `CannotDecrypt`. Other errors come while reading.
    pub fn payload(&self, snapshot: &Snapshot) -> Result<Payload> {
        SnapshotReader::new(self, [snapshot]).payload(0)
    }

    /// Starts to read a delta.
    ///
    /// # Errors
    /// As [`payload`](Self::payload).
    pub fn delta(&self, snapshot: &Snapshot) -> Result<DeltaReader<'static, Payload>> {
        SnapshotReader::new(self, [snapshot]).delta(0)
    }

    /// Copies a full to an unnamed temporary file, checks its frame and opens it.
    ///
    /// # Errors
    /// `CorruptSnapshot`; `TooLarge`; `NameMismatch` if the full ends below the revision of its name; errors
    /// of the store; `Io`, `NoSpace`.
    pub fn full(&self, snapshot: &Snapshot) -> Result<(Database<DatabaseFile>, Base)> {
        SnapshotReader::new(self, [snapshot]).full(0)
    }

    /// Opens a plain snapshot file, and checks its hash. The bytes tell how it is packed; only LZW is
    /// recognized by a name that ends with `.Z`. A packed or encrypted file is copied to an unnamed temporary
    /// file.
    ///
    /// # Errors
    /// `NoSnapshots` if there is no such file; `Usage` if the path is not that of a regular file; `CorruptSnapshot`
    /// if the file is damaged, a delta or no snapshot; `Untrusted` if it is not encrypted and must be; `CannotDecrypt`,
    /// `PermissionDenied`, `Io`, `NoSpace`, `Terminated`; errors of the store.
    pub fn plain(&self, place: &FilePlace) -> Result<PlainSnapshot> {
        plain_snapshot::open(self, place)
    }

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
    pub(in crate::prefix) fn copy_database(
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

    pub(in crate::prefix) fn write_error(&self, e: io::Error) -> Error {
        Error::io(format!("write to {}", self.temp_dir.display()), e)
    }
}
