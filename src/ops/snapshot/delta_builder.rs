//! Builds a delta: collects transactions in a temporary file, then compresses, uploads and names it.
//!
//! The compressed file stays until the store has the delta, so a failing store loses no event. This module does not
//! read from etcd.

use super::NewSnapshot;
use super::next::{NewestSnapshot, name_time};
use crate::backup::catalog::Wall;
use crate::backup::codec::Encoding;
use crate::backup::events::{EventRef, EventsWriter, encode_event};
use crate::backup::frame::FrameWriter;
use crate::backup::{Kind, SnapshotName};
use crate::base::opt;
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::base::{ReadAt as _, fixed_record};
use crate::error::{Error, Result};
use crate::etcd::feed::{Fingerprint, KeyChange, Position, Transaction};
use crate::fold::publish::{NAMES_TRIED, PackedSnapshot, Packer};
use crate::mvcc::{Change, KeyValue, Revision};
use crate::prefix::Context;
use chrono::{DateTime, Utc};
use std::cell::OnceCell;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// A transaction in the format of a delta.
pub(super) struct EncodedTransaction {
    /// The position of a watch after this transaction.
    position: Position,
    /// When the transaction arrived from etcd.
    arrived: Instant,
    /// The number of events.
    events: u64,
    /// The events, with commas between them.
    pub(super) text: Vec<u8>,
}

/// The size of the record before a transaction's text in a file: six numbers and a hash.
const HEADER_BYTES: usize = fixed_record::BYTES + 32;

impl EncodedTransaction {
    /// Encodes a transaction. `position` is the one after it; `time` is recorded as the time of its events.
    pub(super) fn new(transaction: &Transaction, position: Position, time: DateTime<Utc>) -> Self {
        let mut encoded = EncodedTransaction {
            position,
            arrived: Instant::now(),
            events: transaction.changes.len() as u64,
            text: Vec::with_capacity(transaction.bytes() * 4 / 3 + 128),
        };
        for change in &transaction.changes {
            let event = EventRef {
                main: encoded.revision(),
                change: to_change(change),
            };
            if !encoded.text.is_empty() {
                encoded.text.push(b',');
            }
            encode_event(&mut encoded.text, &event, time);
        }
        encoded
    }

    /// Appends the transaction to a file. The time of arrival is recorded relative to `epoch`.
    ///
    /// # Errors
    /// Errors of the file.
    pub(super) fn write(&self, file: &mut TempFile, epoch: Instant) -> io::Result<()> {
        let fingerprint = self.position.fingerprint;
        let arrived = self.arrived.saturating_duration_since(epoch);
        let numbers = fixed_record::encode([
            self.position.revision as u64,
            fingerprint.changes as u64,
            fingerprint.bytes as u64,
            arrived.as_nanos() as u64,
            self.events,
            self.text.len() as u64,
        ]);
        file.write_all(&[&numbers[..], &fingerprint.hash, &self.text].concat())
    }

    /// Reads a transaction that [`write`](Self::write) has written at `offset`.
    ///
    /// # Errors
    /// Errors of the file.
    pub(super) fn read(file: &TempFile, offset: u64, epoch: Instant) -> io::Result<Self> {
        let (mut numbers, mut hash) = ([0; fixed_record::BYTES], [0; 32]);
        file.read_exact_at(&mut numbers, offset)?;
        file.read_exact_at(&mut hash, offset + numbers.len() as u64)?;
        let [revision, changes, bytes, arrived, events, len] = fixed_record::decode(&numbers);
        let mut text = vec![0; len as usize];
        file.read_exact_at(&mut text, offset + HEADER_BYTES as u64)?;
        let fingerprint = Fingerprint {
            changes: changes as usize,
            bytes: bytes as usize,
            hash,
        };
        Ok(EncodedTransaction {
            position: Position {
                revision: revision as i64,
                fingerprint,
            },
            arrived: epoch + Duration::from_nanos(arrived),
            events,
            text,
        })
    }

    pub(super) fn revision(&self) -> Revision {
        Revision(self.position.revision)
    }

    /// Returns the position of a watch after this transaction.
    pub(super) fn position(&self) -> Position {
        self.position
    }

    /// Returns the size in a delta in bytes, including a separator after each event.
    pub(super) fn bytes(&self) -> u64 {
        self.text.len() as u64 + 1
    }

    /// Returns the size in a file in bytes.
    pub(super) fn file_bytes(&self) -> u64 {
        (HEADER_BYTES + self.text.len()) as u64
    }
}

fn to_change(change: &KeyChange) -> Change<'_> {
    if change.delete {
        Change::Delete { key: &change.key }
    } else {
        Change::Put(KeyValue {
            key: &change.key,
            create_revision: Revision(change.create_revision),
            mod_revision: Revision(change.mod_revision),
            version: change.version,
            value: &change.value,
            lease: change.lease,
        })
    }
}

/// The delta under construction: events that are not saved yet.
pub(super) struct PendingDelta {
    events: EventsWriter<TempFile>,
    /// Size of the payload, in bytes.
    bytes: u64,
    /// The first and the last revision; `None` if the delta is empty.
    revisions: Option<(Revision, Revision)>,
    /// When the first event arrived.
    first_arrived: Option<Instant>,
}

impl PendingDelta {
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn new(ctx: &Context) -> Result<Self> {
        Ok(PendingDelta {
            events: EventsWriter::new(ctx.temp_file()?),
            bytes: 0,
            revisions: None,
            first_arrived: None,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.revisions.is_none()
    }

    /// Returns the last revision; `None` if the delta is empty.
    pub(super) fn last(&self) -> Option<Revision> {
        self.revisions.map(|r| r.1)
    }

    pub(super) fn events(&self) -> u64 {
        self.events.events()
    }

    /// Returns the size of the payload in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns when the first event arrived; `None` if the delta is empty.
    pub(super) fn first_arrived(&self) -> Option<Instant> {
        self.first_arrived
    }

    /// Adds a transaction.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn push(&mut self, transaction: &EncodedTransaction) -> Result<()> {
        self.events
            .push_encoded(&transaction.text, transaction.events)
            .map_err(|e| Error::io(opt::fill(WRITE_EVENTS), e))?;
        self.bytes += transaction.bytes();
        let revision = transaction.revision();
        let first = self.revisions.map_or(revision, |r| r.0);
        self.revisions = Some((first, revision));
        self.first_arrived.get_or_insert(transaction.arrived);
        Ok(())
    }

    /// Ends this delta and begins an empty one. Returns `None` if this delta is empty. Can be retried after an error
    /// to make the file of the empty one.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn seal(&mut self, ctx: &Context) -> Result<Option<SealedDelta>> {
        let Some((first, last)) = self.revisions else {
            return Ok(None);
        };
        let done = std::mem::replace(self, PendingDelta::new(ctx)?);
        let events = done.events.events();
        let file = done
            .events
            .finish()
            .map_err(|e| Error::io(opt::fill(WRITE_EVENTS), e))?;
        Ok(Some(SealedDelta {
            file,
            first,
            last,
            events,
        }))
    }
}

pub(super) const WRITE_EVENTS: &str =
    "write events to the temporary directory (choose another with {temp-dir})";
pub(super) const READ_EVENTS: &str = "read events from the temporary directory";

/// A complete delta that is not compressed yet.
pub(super) struct SealedDelta {
    file: TempFile,
    first: Revision,
    last: Revision,
    events: u64,
}

impl SealedDelta {
    /// Compresses and encrypts the delta into a temporary file. Can be retried after an error.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `Terminated`.
    pub(super) fn pack(&self, ctx: &Context, encoding: Encoding) -> Result<PackedDelta> {
        let write_error = |e| Error::io("write the new delta", e);
        let mut frame = FrameWriter::new(Packer::to_file(ctx, encoding)?);
        let read_error = |e| Error::io(READ_EVENTS, e);
        for_each_piece(
            self.file.reader(),
            ctx.store.cancel(),
            read_error,
            |piece| frame.write_all(piece).map_err(write_error),
        )?;
        Ok(PackedDelta {
            packed: frame.finish().map_err(write_error)?.packed()?,
            uncompressed_bytes: self.file.len(),
            events: self.events,
            name: SnapshotName {
                kind: Kind::Incr,
                start: self.first,
                last: self.last,
                created: 0,
                compression: encoding.compression,
                is_final: false,
                is_encrypted: ctx.keys.encrypts(),
            },
            created: OnceCell::new(),
        })
    }
}

/// A delta that only has to be uploaded.
pub(super) struct PackedDelta {
    packed: PackedSnapshot,
    /// The size of the events, in bytes.
    uncompressed_bytes: u64,
    events: u64,
    /// The name, but for its time.
    name: SnapshotName,
    /// The time in the name, fixed by the first attempt to save. A retry uses the same name and so finds an
    /// object that a seemingly failed attempt has written.
    created: OnceCell<i64>,
}

/// A delta that is saved.
pub(super) struct SavedDelta {
    pub(super) snapshot: NewSnapshot,
    /// Whether the intended name was free. If not, someone else has written to the store.
    pub(super) was_name_free: bool,
}

impl PackedDelta {
    /// Uploads, verifies and names the delta, with a time before `wall`. Can be retried after an error.
    ///
    /// # Errors
    /// Fails with the store's errors and `Terminated`.
    pub(super) fn save(
        &self,
        ctx: &Context,
        newest: Option<NewestSnapshot>,
        wall: Option<&Wall>,
    ) -> Result<SavedDelta> {
        let created = self
            .created
            .get_or_init(|| name_time(Kind::Incr, newest, Utc::now()));
        let (created, tried) = Wall::names_before(wall, *created, NAMES_TRIED);
        let mut name = SnapshotName {
            created,
            ..self.name.clone()
        };
        let packed = &self.packed;
        packed.publish(ctx, &mut name, tried)?;
        tracing::info!(
            snapshot = %name,
            events = self.events,
            bytes = packed.bytes(),
            "saved a delta"
        );
        Ok(SavedDelta {
            was_name_free: name.created == created,
            snapshot: NewSnapshot {
                bytes: packed.bytes(),
                uncompressed_bytes: self.uncompressed_bytes,
                events: self.events,
                hash_kv: None,
                compact_revision: None,
                live_keys: None,
                name,
            },
        })
    }
}
