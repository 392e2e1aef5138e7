//! The transfer of one snapshot between stores: streamed, checked and uploaded. It has no name in the target then;
//! `round` gives it one.
//!
//! If its bytes are copied unchanged, another thread decodes them and checks the SHA-256 inside, so
//! that a damaged snapshot is never copied silently. Called by `ops::copy::round`.

use super::plan::{Encryption, Form, Planned};
use crate::backup::codec;
use crate::backup::frame::{FrameReader, FrameWriter};
use crate::backup::full::FullReader;
use crate::backup::{Snapshot, SnapshotName};
use crate::base::Cancel;
use crate::base::limits::Limits;
use crate::bolt::{METAS_END, newest_meta};
use crate::error::{Error, Reason, Result};
use crate::ops::Context;
use crate::store::{EncryptingWriter, Unnamed, Upload};
use crate::telemetry::progress::Step;
use std::io::{self, Read, Write};
use std::sync::mpsc;

/// The size of the pieces that go to the store and to the check, in bytes.
const PIECE: usize = 256 << 10;
/// Smaller snapshots are checked before the upload, and not at the same time.
pub(super) const SMALL: u64 = 1 << 20;
/// The most pieces that wait for the check.
const PIECES_AHEAD: usize = 8;

/// A snapshot that is in the target without its name.
pub(super) struct Transferred {
    pub(super) object: Unnamed,
    /// Whether its content was checked, which is impossible without an identity that decrypts it.
    pub(super) is_checked: bool,
}

/// Copies a snapshot to the target without its name. If its compression changes, `threads` threads compress it.
///
/// # Errors
/// Fails with `CorruptSnapshot` if the source's snapshot is damaged, `CannotDecrypt`,
/// `SnapshotVanished`, or an error of either store.
pub(super) fn transfer(
    from: &Context,
    to: &Context,
    form: &Form,
    snapshot: &Snapshot,
    planned: &Planned,
    threads: usize,
) -> Result<Transferred> {
    let upload = Upload::new(&to.store, &planned.path)?;
    let at = from.at(snapshot);
    if planned.name.compression != snapshot.name.compression {
        let object = recompress(from, to, form, snapshot, upload, threads).map_err(at)?;
        return Ok(Transferred {
            object,
            is_checked: true,
        });
    }
    let step = Step::new(
        format!("copy {}", snapshot.name.label()),
        Some(snapshot.bytes),
    );
    let object = step.reader(from.store.fetch(&snapshot.path, snapshot.bytes));
    let decrypts = snapshot.name.is_encrypted && form.encryption != Encryption::Keep;
    let sealed = seal(to, form, upload)?;
    let copied = match decrypts {
        true => {
            let decrypted = from.keys.decrypt(object).map_err(&at)?;
            let plain = SnapshotName {
                is_encrypted: false,
                ..snapshot.name.clone()
            };
            copy_checked(from, decrypted, &plain, snapshot.bytes, sealed)
        }
        false => copy_checked(from, object, &snapshot.name, snapshot.bytes, sealed),
    };
    let (sealed, is_checked) = copied.map_err(at)?;
    let object = sealed.finish().map_err(copy_error)?.finish()?;
    Ok(Transferred { object, is_checked })
}

fn copy_error(e: io::Error) -> Error {
    Error::io("copy a snapshot", e)
}

/// Encrypts the upload, if the form asks for it.
fn seal(to: &Context, form: &Form, upload: Upload) -> Result<EncryptingWriter<Upload>> {
    match form.encryption {
        Encryption::Encrypt => to.keys.encrypt(upload),
        Encryption::Keep | Encryption::Decrypt => Ok(EncryptingWriter::Plain(upload)),
    }
}

/// Decompresses a snapshot, and uploads it with another compression.
fn recompress(
    from: &Context,
    to: &Context,
    form: &Form,
    snapshot: &Snapshot,
    upload: Upload,
    threads: usize,
) -> Result<Unnamed> {
    let Some(encoding) = form.encoding else {
        return Err(Error::internal(
            "a snapshot changes its compression, but none was requested",
        ));
    };
    let mut payload = content(from.payload(snapshot)?, &snapshot.name, &from.limits)?;
    let sealed = seal(to, form, upload)?;
    let packed = codec::encoder(encoding, threads, sealed).map_err(copy_error)?;
    let mut frame = FrameWriter::new(packed);
    let mut piece = vec![0; PIECE];
    loop {
        let n = payload.read(&mut piece).map_err(copy_error)?;
        if n == 0 {
            break;
        }
        frame.write_all(&piece[..n]).map_err(copy_error)?;
    }
    let packed = frame.finish().and_then(|packed| packed.finish());
    let uploaded = packed
        .and_then(EncryptingWriter::finish)
        .map_err(copy_error)?;
    uploaded.finish()
}

/// Copies about `expected_bytes` bytes unchanged, and checks them. Returns whether they could be
/// checked.
fn copy_checked<W: Write>(
    from: &Context,
    mut bytes: impl Read,
    name: &SnapshotName,
    expected_bytes: u64,
    mut to: W,
) -> Result<(W, bool)> {
    // One byte more, so that reading the end does not grow the buffer.
    let mut head = Vec::with_capacity(expected_bytes.min(SMALL) as usize + 1);
    let begin = bytes.by_ref().take(SMALL);
    { begin }.read_to_end(&mut head).map_err(copy_error)?;
    if (head.len() as u64) < SMALL {
        let is_checked = check(from, name, head.as_slice())?;
        to.write_all(&head).map_err(copy_error)?;
        return Ok((to, is_checked));
    }
    copy_while_checking(from, io::Cursor::new(head).chain(bytes), name, to)
}

/// Copies bytes unchanged, while another thread checks them.
fn copy_while_checking<W: Write>(
    from: &Context,
    mut bytes: impl Read,
    name: &SnapshotName,
    mut to: W,
) -> Result<(W, bool)> {
    let cancel = from.store.cancel();
    std::thread::scope(|scope| {
        let (send, receive) = mpsc::sync_channel::<Vec<u8>>(PIECES_AHEAD);
        let check = || check(from, name, Pieces::new(receive, cancel.clone()));
        let checking = std::thread::Builder::new()
            .spawn_scoped(scope, check)
            .map_err(|e| Error::io("start a thread (give fewer with --parallel)", e))?;
        let sent = send_pieces(&mut bytes, &mut to, &send);
        drop(send);
        let checked = checking
            .join()
            .unwrap_or_else(|_| Err(Error::internal("the check of a snapshot panicked")));
        let is_complete = sent?;
        let is_checked = checked?;
        match is_complete {
            true => Ok((to, is_checked)),
            false => Err(Error::internal("the check ended before the snapshot did")),
        }
    })
}

/// Writes bytes to the target, and sends them to the check. Returns whether the check received all of them.
fn send_pieces(
    bytes: &mut impl Read,
    to: &mut impl Write,
    send: &mpsc::SyncSender<Vec<u8>>,
) -> Result<bool> {
    loop {
        let mut piece = Vec::with_capacity(PIECE);
        let read = bytes.by_ref().take(PIECE as u64).read_to_end(&mut piece);
        read.and_then(|_| to.write_all(&piece))
            .map_err(copy_error)?;
        // An empty piece marks the end. If the check has stopped receiving, it found damage.
        let is_end = piece.is_empty();
        let is_received = send.send(piece).is_ok();
        if is_end || !is_received {
            return Ok(is_end && is_received);
        }
    }
}

/// Decodes a stored snapshot and checks the SHA-256 inside. Returns false if it is encrypted and no
/// identity decrypts it.
fn check(from: &Context, name: &SnapshotName, mut pieces: impl Read + Send) -> Result<bool> {
    let keys = &from.keys;
    if !name.is_encrypted {
        return check_plain(from, name, pieces).map(|()| true);
    }
    if keys.decrypts() {
        match keys.decrypt(&mut pieces) {
            Ok(opened) => return check_plain(from, name, opened).map(|()| true),
            Err(e) if e.reason() != Reason::CannotDecrypt => return Err(e),
            Err(_) => {}
        }
    }
    io::copy(&mut pieces, &mut io::sink()).map_err(copy_error)?;
    Ok(false)
}

/// Checks the SHA-256 inside a snapshot that is not encrypted.
fn check_plain(from: &Context, name: &SnapshotName, stored: impl Read + Send) -> Result<()> {
    let plain = codec::decoder_of(name.compression, stored, u64::MAX).map_err(copy_error)?;
    let payload = FrameReader::new(plain).within(from.limits);
    let mut payload = content(payload, name, &from.limits)?;
    let mut piece = vec![0; PIECE];
    while payload.read(&mut piece).map_err(copy_error)? > 0 {}
    Ok(())
}

/// Returns a reader of a snapshot's content. That of a full is checked against its meta pages, if it
/// has any; without them it is copied as it is.
fn content<'a>(
    mut payload: impl Read + 'a,
    name: &SnapshotName,
    limits: &Limits,
) -> Result<Box<dyn Read + 'a>> {
    if !name.is_full() {
        return Ok(Box::new(payload));
    }
    let mut head = Vec::new();
    let begin = payload.by_ref().take(METAS_END as u64);
    { begin }.read_to_end(&mut head).map_err(copy_error)?;
    let has_metas = newest_meta(&head).is_ok();
    let whole = io::Cursor::new(head).chain(payload);
    Ok(match has_metas {
        true => Box::new(FullReader::open(whole, limits, 0).map_err(copy_error)?),
        false => Box::new(whole),
    })
}

/// The pieces of a transfer, as a stream.
struct Pieces {
    receiver: mpsc::Receiver<Vec<u8>>,
    current: Vec<u8>,
    /// The bytes of the current piece that were read.
    position: usize,
    is_at_end: bool,
    cancel: Cancel,
}

impl Pieces {
    fn new(receiver: mpsc::Receiver<Vec<u8>>, cancel: Cancel) -> Self {
        Pieces {
            receiver,
            current: Vec::new(),
            position: 0,
            is_at_end: false,
            cancel,
        }
    }
}

impl Read for Pieces {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.position == self.current.len() && !self.is_at_end {
            self.cancel.check()?;
            // The transfer failed before the end, and reports why itself.
            let piece = self.receiver.recv();
            self.current = piece.map_err(|_| io::Error::other("the transfer ended early"))?;
            self.position = 0;
            self.is_at_end = self.current.is_empty();
        }
        let n = out.len().min(self.current.len() - self.position);
        out[..n].copy_from_slice(&self.current[self.position..self.position + n]);
        self.position += n;
        Ok(n)
    }
}
