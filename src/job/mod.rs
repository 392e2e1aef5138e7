//! One file for each thing a Job does: options → run → outcome.
//!
//! Here stands the I/O around the decisions of `bucket` and `mvcc`. `cli` calls it; a program that
//! uses deltafold as a library can as well. Everything blocks: call it outside of async code.

mod ahead;
pub mod apply;
pub mod compact;
pub mod copy;
pub mod drill;
mod first;
pub mod gc;
pub mod identity;
mod in_place;
pub mod leases;
pub mod list;
pub mod maintain;
mod moment;
pub mod options;
pub mod plain;
mod publish;
pub mod read;
mod reading;
mod rebuild;
mod replay;
pub mod restorable;
pub mod restore;
pub mod retain;
pub mod scan;
pub mod schedule;
pub mod snapshot;
mod sorter;
pub mod source;
mod space;
pub mod store_check;
pub mod tags;
pub mod verify;
pub mod verify_store;

use crate::base::Cancel;
use crate::base::ReadAt;
use crate::bolt::Database;
use crate::bucket::delta::DeltaReader;
use crate::bucket::frame::FrameReader;
use crate::bucket::full::FullReader;
use crate::bucket::trust::Trust;
use crate::bucket::{Compression, Snapshot, codec};
use crate::error::{Error, Reason, Result};
use crate::job::ahead::Ahead;
use crate::job::in_place::InPlace;
use crate::job::reading::Reading;
use crate::limits::Limits;
use crate::mvcc::Base;
use crate::store::{Keys, Store};
use crate::telemetry::progress::Step;
use crate::temp::{self, TempFile};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// What every Job needs.
#[derive(Clone)]
pub struct Context {
    /// Where the snapshots are.
    pub store: Store,
    /// For what does not fit into memory; files there have no names and vanish with the process. Where `keys`
    /// are given they are sealed.
    pub temp_dir: PathBuf,
    /// Threads that read, compress and upload; 1 or more. Results do not depend on it.
    pub threads: usize,
    /// What opens encrypted snapshots, and for whom new ones are encrypted.
    pub keys: Keys,
    /// Which snapshots may be inputs.
    pub trust: Trust,
    /// The largest snapshot that is read.
    pub limits: Limits,
}

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
    fn new(file: TempFile, cancel: Cancel) -> Self {
        let file = SpoolFile::Temp(file);
        Spool { file, cancel }
    }
}

impl ReadAt for Spool {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.cancel.check()?;
        match &self.file {
            SpoolFile::Temp(file) => ReadAt::read_exact_at(file, buf, offset),
            SpoolFile::InPlace(file) => file.read_exact_at(buf, offset),
        }
    }
    fn size(&self) -> std::io::Result<u64> {
        match &self.file {
            SpoolFile::Temp(file) => file.size(),
            SpoolFile::InPlace(file) => file.size(),
        }
    }
}

/// A snapshot's uncompressed payload.
pub type Payload = FrameReader<Box<dyn Read + Send>>;

impl Context {
    /// Starts to read a snapshot's payload.
    ///
    /// # Errors
    /// `CorruptSnapshot`; the rest comes while reading.
    pub fn payload(&self, snapshot: &Snapshot) -> Result<Payload> {
        Reading::new(self, [snapshot]).payload(0)
    }

    /// The payload of a snapshot whose transfer has begun.
    fn payload_from(
        &self,
        object: impl Read + Send + 'static,
        snapshot: &Snapshot,
        step: &Step,
    ) -> Result<Payload> {
        /// A thread of its own is not worth while for less.
        const WORTH_A_THREAD: u64 = 256 << 10;
        let opened: Box<dyn Read + Send> = match snapshot.name.is_encrypted {
            true => Box::new(
                self.keys
                    .decrypt(step.reader(object))
                    .map_err(self.at(snapshot))?,
            ),
            false => Box::new(step.reader(object)),
        };
        let plain = codec::decoder_of(snapshot.name.compression, opened, snapshot.bytes)
            .map_err(|e| self.at(snapshot)(Error::io("read", e)))?;
        // What is not compressed comes as fast as it can be hashed.
        let is_plain =
            snapshot.name.compression == Compression::None && !snapshot.name.is_encrypted;
        let ahead = self.threads > 1 && !is_plain && snapshot.bytes >= WORTH_A_THREAD;
        let plain = match ahead {
            true => Box::new(Ahead::new(plain)?),
            false => plain,
        };
        Ok(FrameReader::new(plain).within(self.limits))
    }

    /// Starts to read a delta.
    ///
    /// # Errors
    /// As [`payload`](Self::payload).
    pub fn delta(&self, snapshot: &Snapshot) -> Result<DeltaReader<'static, Payload>> {
        Reading::new(self, [snapshot]).delta(0)
    }

    /// Fetches a full into an unnamed temporary file, checks it and opens it.
    ///
    /// # Errors
    /// `CorruptSnapshot`; `TooLarge`; `NameMismatch` where it holds less than its name promises; the store's;
    /// `Io`, `NoSpace`.
    pub fn full(&self, snapshot: &Snapshot) -> Result<(Database<Spool>, Base)> {
        self.full_from(snapshot, || self.payload(snapshot))
    }

    fn full_from(
        &self,
        snapshot: &Snapshot,
        payload: impl FnOnce() -> Result<Payload>,
    ) -> Result<(Database<Spool>, Base)> {
        let at = self.at(snapshot);
        // Nothing is smaller decompressed.
        space::check(&self.temp_dir, snapshot.bytes, &snapshot.path)?;
        let mut database =
            FullReader::open(payload()?, &self.limits, 0).map_err(|e| at(Error::io("read", e)))?;
        if let Err(no_space) = space::check(&self.temp_dir, database.promised(), &snapshot.path) {
            // A few bytes can promise any size: damage is final, and NoSpace is tried again.
            std::io::copy(&mut database, &mut std::io::sink())
                .map_err(|e| at(Error::io("read", e)))?;
            return Err(no_space);
        }
        let mut file = self.temp_file()?;
        let mut buf = vec![0; 256 << 10];
        loop {
            let n = database
                .read(&mut buf)
                .map_err(|e| at(Error::io("read", e)))?;
            if n == 0 {
                break;
            }
            file.write_all(&buf[..n])
                .map_err(|e| Error::io(format!("write to {}", self.temp_dir.display()), e))?;
        }
        let db = Database::open_within(self.spool(file), self.limits).map_err(&at)?;
        let base = Base::read(&db).map_err(&at)?;
        if base.revision < snapshot.name.last {
            return Err(at(Error::new(
                Reason::NameMismatch,
                format!(
                    "its name promises revision {}, it ends at {}",
                    snapshot.name.last, base.revision
                ),
            )));
        }
        Ok((db, base))
    }

    /// Puts a database file behind the Job's switch.
    fn spool(&self, file: TempFile) -> Spool {
        Spool::new(file, self.store.cancel().clone())
    }

    /// The temporary directory, and whether its files are sealed.
    pub fn temp(&self) -> temp::Dir {
        temp::Dir::new(&self.temp_dir, self.keys.encrypts() || self.keys.decrypts())
    }

    /// An unnamed file in the temporary directory.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn temp_file(&self) -> Result<TempFile> {
        self.temp().file()
    }

    /// Puts the snapshot's full name before an error's message.
    pub fn at<'a>(&'a self, snapshot: &'a Snapshot) -> impl Fn(Error) -> Error + 'a {
        |e| match e.reason() {
            // These name the place themselves, or have none.
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
                // What opens it and what reads on may both say so.
                match e.to_string().starts_with(&format!("{name}: ")) {
                    true => e,
                    false => e.at(name),
                }
            }
        }
    }
}
