//! One snapshot on its way from store to store: streamed, checked, uploaded and read back; it waits
//! for its name then.
//!
//! Where its bytes stay as they are, another thread opens a copy of them and checks the SHA-256 inside,
//! so that a damaged snapshot is never copied silently.

use super::plan::{Encryption, Form};
use crate::backup::codec;
use crate::backup::frame::{FrameReader, FrameWriter};
use crate::backup::full::FullReader;
use crate::backup::{Snapshot, SnapshotName};
use crate::base::Cancel;
use crate::base::limits::Limits;
use crate::bolt::{METAS_END, newest_meta};
use crate::error::{Error, Reason, Result};
use crate::ops::Context;
use crate::store::{EncryptingWriter, Staged, Upload};
use crate::telemetry::progress::Step;
use std::io::{self, Read, Write};
use std::sync::mpsc;

/// Bytes of a piece that goes to the store and to the check.
const PIECE: usize = 256 << 10;
/// One of fewer bytes is checked before it goes to the store, and not beside it.
pub(super) const SMALL: u64 = 1 << 20;
/// Pieces that wait to be checked.
const PIECES_AHEAD: usize = 8;
/// For each snapshot under way so many parts are in memory, and one more is being filled.
const PARTS_IN_FLIGHT: usize = 2;

/// A snapshot that is in the target, without its name.
pub(super) struct Transferred {
    pub(super) staged: Staged,
    /// Whether its content was checked; where no identity opens it, that cannot be.
    pub(super) checked: bool,
}

/// Brings a snapshot to the target. `name` is what it will be called there; `threads` compress it where
/// that is to be done.
///
/// # Errors
/// `CorruptSnapshot` for the source's; `CannotDecrypt`; `SnapshotVanished`; those of both stores.
pub(super) fn transfer(
    from: &Context,
    to: &Context,
    form: &Form,
    snapshot: &Snapshot,
    name: &SnapshotName,
    threads: usize,
) -> Result<Transferred> {
    let upload = Upload::new(&to.store, &name.to_string(), PARTS_IN_FLIGHT + 1);
    let at = from.at(snapshot);
    if name.compression != snapshot.name.compression {
        let staged = recompress(from, to, form, snapshot, upload, threads).map_err(at)?;
        return Ok(Transferred {
            staged,
            checked: true,
        });
    }
    let step = Step::new(format!("copy {}", snapshot.name), Some(snapshot.bytes));
    let object = step.reader(from.store.fetch(&snapshot.path, snapshot.bytes));
    let opens = snapshot.name.is_encrypted && form.encryption != Encryption::Keep;
    let sealed = seal(to, form, upload)?;
    let passed = match opens {
        true => {
            let opened = from.keys.decrypt(object).map_err(&at)?;
            let plain = SnapshotName {
                is_encrypted: false,
                ..snapshot.name.clone()
            };
            pass(from, opened, &plain, snapshot.bytes, sealed)
        }
        false => pass(from, object, &snapshot.name, snapshot.bytes, sealed),
    };
    let (sealed, checked) = passed.map_err(at)?;
    let staged = sealed.finish().map_err(failed)?.finish()?;
    Ok(Transferred { staged, checked })
}

fn failed(e: io::Error) -> Error {
    Error::io("copy a snapshot", e)
}

/// Encrypts what is uploaded, if that is wanted.
fn seal(to: &Context, form: &Form, upload: Upload) -> Result<EncryptingWriter<Upload>> {
    match form.encryption {
        Encryption::Encrypt => to.keys.encrypt(upload),
        Encryption::Keep | Encryption::Decrypt => Ok(EncryptingWriter::Plain(upload)),
    }
}

/// Compresses the payload anew.
fn recompress(
    from: &Context,
    to: &Context,
    form: &Form,
    snapshot: &Snapshot,
    upload: Upload,
    threads: usize,
) -> Result<Staged> {
    let Some(encoding) = form.encoding else {
        return Err(Error::internal("a compression that nobody asked for"));
    };
    let mut payload = content(from.payload(snapshot)?, &snapshot.name, &from.limits)?;
    let sealed = seal(to, form, upload)?;
    let packed = codec::encoder(encoding, threads, sealed).map_err(failed)?;
    let mut frame = FrameWriter::new(packed);
    let mut piece = vec![0; PIECE];
    loop {
        let n = payload.read(&mut piece).map_err(failed)?;
        if n == 0 {
            break;
        }
        frame.write_all(&piece[..n]).map_err(failed)?;
    }
    let packed = frame.finish().and_then(|packed| packed.finish());
    let uploaded = packed.and_then(EncryptingWriter::finish).map_err(failed)?;
    uploaded.finish()
}

/// Passes about so many bytes on as they are, if a check finds them good.
fn pass<W: Write>(
    from: &Context,
    mut bytes: impl Read,
    name: &SnapshotName,
    about: u64,
    mut to: W,
) -> Result<(W, bool)> {
    // Room for one byte more: the end is seen without growing.
    let mut small = Vec::with_capacity(about.min(SMALL) as usize + 1);
    let begin = bytes.by_ref().take(SMALL);
    { begin }.read_to_end(&mut small).map_err(failed)?;
    if (small.len() as u64) < SMALL {
        let checked = check(from, name, small.as_slice())?;
        to.write_all(&small).map_err(failed)?;
        return Ok((to, checked));
    }
    pass_on(from, io::Cursor::new(small).chain(bytes), name, to)
}

/// Passes bytes on as they are, while they are checked beside it.
fn pass_on<W: Write>(
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
        let mut passed = Ok(());
        let mut whole = false;
        loop {
            let mut piece = Vec::with_capacity(PIECE);
            let read = bytes.by_ref().take(PIECE as u64).read_to_end(&mut piece);
            if let Err(e) = read.and_then(|_| to.write_all(&piece)) {
                passed = Err(failed(e));
                break;
            }
            // An empty piece marks the end. Whoever no longer listens has found damage.
            let at_end = piece.is_empty();
            let taken = send.send(piece).is_ok();
            if at_end || !taken {
                whole = at_end && taken;
                break;
            }
        }
        drop(send);
        let checked = checking
            .join()
            .unwrap_or_else(|_| Err(Error::internal("the check of a snapshot panicked")));
        passed?;
        let checked = checked?;
        match whole {
            true => Ok((to, checked)),
            false => Err(Error::internal("a check that ended before the snapshot")),
        }
    })
}

/// Opens a stored snapshot, and checks the SHA-256 of what is in it. Gives whether that could be done.
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
    io::copy(&mut pieces, &mut io::sink()).map_err(failed)?;
    Ok(false)
}

fn check_plain(from: &Context, name: &SnapshotName, stored: impl Read + Send) -> Result<()> {
    let plain = codec::decoder_of(name.compression, stored, u64::MAX).map_err(failed)?;
    let payload = FrameReader::new(plain).within(from.limits);
    let mut payload = content(payload, name, &from.limits)?;
    let mut piece = vec![0; PIECE];
    while payload.read(&mut piece).map_err(failed)? > 0 {}
    Ok(())
}

/// What a snapshot holds; that of a full is held to its meta pages. Whether there are any is not for a copy to judge.
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
    { begin }.read_to_end(&mut head).map_err(failed)?;
    let has_metas = newest_meta(&head).is_ok();
    let whole = io::Cursor::new(head).chain(payload);
    Ok(match has_metas {
        true => Box::new(FullReader::open(whole, limits, 0).map_err(failed)?),
        false => Box::new(whole),
    })
}

/// The pieces that were passed on, as a stream.
struct Pieces {
    from: mpsc::Receiver<Vec<u8>>,
    current: Vec<u8>,
    at: usize,
    ended: bool,
    cancel: Cancel,
}

impl Pieces {
    fn new(from: mpsc::Receiver<Vec<u8>>, cancel: Cancel) -> Self {
        Pieces {
            from,
            current: Vec::new(),
            at: 0,
            ended: false,
            cancel,
        }
    }
}

impl Read for Pieces {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.current.len() && !self.ended {
            self.cancel.check()?;
            // Without an end the transfer has failed, and says why itself.
            let piece = self.from.recv();
            self.current = piece.map_err(|_| io::Error::other("the transfer ended early"))?;
            self.at = 0;
            self.ended = self.current.is_empty();
        }
        let n = out.len().min(self.current.len() - self.at);
        out[..n].copy_from_slice(&self.current[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}
