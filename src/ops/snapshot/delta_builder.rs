//! A delta in the making: transactions as they come, in a file of the temporary directory, until they are
//! packed, uploaded and named. It stays until the store has it, so that a store that fails loses nothing.

use super::Written;
use super::next::{Newest, name_time};
use crate::backup::codec::Encoding;
use crate::backup::events::{EventRef, EventsWriter, encode_event};
use crate::backup::frame::FrameWriter;
use crate::backup::{Kind, SnapshotName};
use crate::base::temp::TempFile;
use crate::error::{Error, Result};
use crate::etcd::feed::{KeyChange, Position, Transaction};
use crate::mvcc::{Change, KeyValue, Revision};
use crate::ops::Context;
use crate::ops::fold::publish::{SnapshotUpload, give_name};
use chrono::{DateTime, Utc};
use std::cell::OnceCell;
use std::io::Write;
use std::time::Instant;

/// A transaction as a delta has it.
pub(super) struct Encoded {
    position: Position,
    /// When it came.
    since: Instant,
    json: Vec<u8>,
    /// Where each event ends in `json`.
    ends: Vec<usize>,
}

impl Encoded {
    /// `position` is the one behind the transaction.
    pub(super) fn new(transaction: &Transaction, position: Position, seen: DateTime<Utc>) -> Self {
        let mut encoded = Encoded {
            position,
            since: Instant::now(),
            json: Vec::with_capacity(transaction.bytes() * 4 / 3 + 128),
            ends: Vec::with_capacity(transaction.changes.len()),
        };
        for c in &transaction.changes {
            let event = EventRef {
                main: encoded.revision(),
                change: change(c),
            };
            encode_event(&mut encoded.json, &event, seen);
            encoded.ends.push(encoded.json.len());
        }
        encoded
    }

    pub(super) fn revision(&self) -> Revision {
        Revision(self.position.revision)
    }

    /// Behind it.
    pub(super) fn position(&self) -> Position {
        self.position
    }

    /// Bytes in a delta, with what separates events.
    pub(super) fn bytes(&self) -> u64 {
        (self.text_len() + self.ends.len()) as u64
    }

    /// Its events.
    pub(super) fn text(&self) -> &[u8] {
        &self.json
    }

    /// Bytes of its events, whether they are here or not.
    pub(super) fn text_len(&self) -> usize {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Bytes of memory beside the text and this.
    pub(super) fn overhead(&self) -> usize {
        self.ends.len() * size_of::<usize>()
    }

    /// Its text waits elsewhere.
    pub(super) fn forget_text(&mut self) {
        self.json = Vec::new();
        self.ends.shrink_to_fit();
    }

    /// The text that was forgotten.
    pub(super) fn put_text(&mut self, text: Vec<u8>) {
        self.json = text;
    }
}

fn change(c: &KeyChange) -> Change<'_> {
    match c.delete {
        true => Change::Delete { key: &c.key },
        false => Change::Put(KeyValue {
            key: &c.key,
            create_revision: Revision(c.create_revision),
            mod_revision: Revision(c.mod_revision),
            version: c.version,
            value: &c.value,
            lease: c.lease,
        }),
    }
}

/// Events that are not saved yet.
pub(super) struct Pending {
    events: EventsWriter<TempFile>,
    /// Bytes of its payload.
    bytes: u64,
    revisions: Option<(Revision, Revision)>,
    /// When its first event came.
    since: Option<Instant>,
}

impl Pending {
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn new(ctx: &Context) -> Result<Self> {
        Ok(Pending {
            events: EventsWriter::new(ctx.temp_file()?),
            bytes: 0,
            revisions: None,
            since: None,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.revisions.is_none()
    }

    /// The last revision in it.
    pub(super) fn last(&self) -> Option<Revision> {
        self.revisions.map(|r| r.1)
    }

    pub(super) fn events(&self) -> u64 {
        self.events.events()
    }

    /// Bytes of its payload.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// When its first event came.
    pub(super) fn since(&self) -> Option<Instant> {
        self.since
    }

    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn push(&mut self, t: &Encoded) -> Result<()> {
        let mut from = 0;
        for &end in &t.ends {
            self.events
                .push_encoded(&t.json[from..end])
                .map_err(|e| Error::io(WRITING, e))?;
            from = end;
        }
        self.bytes += t.bytes();
        let first = self.revisions.map_or(t.revision(), |r| r.0);
        self.revisions = Some((first, t.revision()));
        self.since.get_or_insert(t.since);
        Ok(())
    }

    /// Ends it, and begins the next one; `None` where it is empty.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(super) fn seal(&mut self, ctx: &Context) -> Result<Option<Sealed>> {
        let Some((first, last)) = self.revisions else {
            return Ok(None);
        };
        let done = std::mem::replace(self, Pending::new(ctx)?);
        let events = done.events.events();
        let file = done.events.finish().map_err(|e| Error::io(WRITING, e))?;
        Ok(Some(Sealed {
            file,
            first,
            last,
            events,
            created: OnceCell::new(),
        }))
    }
}

const WRITING: &str = "write events to the temporary directory (choose another with --temp-dir)";

/// A delta that has all its events.
pub(super) struct Sealed {
    file: TempFile,
    pub(super) first: Revision,
    pub(super) last: Revision,
    pub(super) events: u64,
    /// The time in its name, since it was tried first: what a failed try wrote after all is found again.
    created: OnceCell<i64>,
}

/// A delta that is saved.
pub(super) struct Saved {
    pub(super) written: Written,
    /// Nobody else had its name.
    pub(super) was_free: bool,
}

impl Sealed {
    /// Packs, uploads, verifies and names it. It can be tried again after an error.
    ///
    /// # Errors
    /// The store's; `Io`, `Terminated`.
    pub(super) fn save(
        &self,
        ctx: &Context,
        encoding: Encoding,
        newest: Option<Newest>,
    ) -> Result<Saved> {
        let created = self
            .created
            .get_or_init(|| name_time(Kind::Incr, newest, Utc::now()));
        let mut name = SnapshotName {
            kind: Kind::Incr,
            start: self.first,
            last: self.last,
            created: *created,
            compression: encoding.compression,
            is_final: false,
            is_encrypted: ctx.keys.encrypts(),
        };
        let failed = |e| Error::io("write the new delta", e);
        let mut frame = FrameWriter::new(SnapshotUpload::new(ctx, "Incr", encoding)?);
        let mut buf = vec![0; 256 << 10];
        let mut at = 0;
        loop {
            ctx.store.cancel().check()?;
            let n = self
                .file
                .read_at(&mut buf, at)
                .map_err(|e| Error::io("read events from the temporary directory", e))?;
            if n == 0 {
                break;
            }
            frame.write_all(&buf[..n]).map_err(failed)?;
            at += n as u64;
        }
        let packed = frame.finish().map_err(failed)?.finish()?;
        give_name(ctx, &packed, &mut name)?;
        tracing::info!(
            snapshot = %name,
            events = self.events,
            bytes = packed.bytes(),
            "saved a delta"
        );
        Ok(Saved {
            was_free: name.created == *created,
            written: Written {
                bytes: packed.bytes(),
                uncompressed_bytes: at,
                events: self.events,
                hash_kv: None,
                compact_revision: None,
                live_keys: None,
                name,
            },
        })
    }
}
