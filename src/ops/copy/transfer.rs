//! The transfer of one snapshot between stores: streamed, checked and uploaded. It has no name in the target then;
//! `round` gives it one.
//!
//! If its bytes are copied unchanged, they are also decoded, and the SHA-256 inside is checked, so that a damaged
//! snapshot is never copied silently.

use super::plan::{Encryption, Planned};
use crate::backup::codec;
use crate::backup::frame::FrameReader;
use crate::backup::full::FullReader;
use crate::backup::{Snapshot, SnapshotName};
use crate::base::Tee;
use crate::base::limits::Limits;
use crate::base::read_all::for_each_piece;
use crate::bolt::{METAS_END, newest_meta};
use crate::error::{Error, Reason, Result};
use crate::prefix::Context;
use crate::store::{EncryptingWriter, Unnamed, Upload};
use crate::telemetry::progress::Step;
use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};

/// A snapshot that is in the target without its name.
pub(super) struct Transferred {
    pub(super) object: Unnamed,
    /// Whether its content was checked, which is impossible without an identity that decrypts it.
    pub(super) is_checked: bool,
}

/// Copies a snapshot to the target without its name.
///
/// # Errors
/// Fails with `CorruptSnapshot` if the source's snapshot is damaged, `CannotDecrypt`,
/// `SnapshotVanished`, or an error of either store.
pub(super) fn transfer(
    from: &Context,
    to: &Context,
    encryption: Encryption,
    snapshot: &Snapshot,
    planned: &Planned,
) -> Result<Transferred> {
    let upload = Upload::new(&to.store, &planned.path, snapshot.bytes)?;
    let at = from.at(snapshot);
    let step = Step::new(
        format!("copy {}", snapshot.name.label()),
        Some(snapshot.bytes),
    );
    let object = step.reader(from.store.fetch_snapshot(&snapshot.into()));
    let decrypts = snapshot.name.is_encrypted && encryption != Encryption::Keep;
    let sealed = seal(to, encryption, upload)?;
    let copied = if decrypts {
        let decrypted = from.keys.decrypt(object).map_err(&at)?;
        let plain = SnapshotName {
            is_encrypted: false,
            ..snapshot.name.clone()
        };
        copy_checked(from, decrypted, &plain, snapshot.bytes, sealed)
    } else {
        copy_checked(from, object, &snapshot.name, snapshot.bytes, sealed)
    };
    let (sealed, is_checked) = copied.map_err(at)?;
    let object = sealed.finish().map_err(copy_error)?.finish()?;
    Ok(Transferred { object, is_checked })
}

/// Returns whether the object that has a snapshot's name in the target has the same content, perhaps encrypted
/// separately. A snapshot that is encrypted again counts as the same if no identity decrypts it: as in a plan,
/// its name decides.
///
/// # Errors
/// Fails with `SnapshotVanished`, or an error of either store.
pub(super) fn has_same_content(
    from: &Context,
    to: &Context,
    encryption: Encryption,
    snapshot: &Snapshot,
    planned: &Planned,
) -> Result<bool> {
    let in_target = Snapshot {
        name: planned.name.clone(),
        path: planned.path.clone(),
        // Whether it counts does not matter.
        excluded: true,
        bytes: to.store.size_of(&planned.path)?.unwrap_or_default(),
        ..snapshot.clone()
    };
    match content_hash(to, &in_target) {
        Ok(hash) => Ok(hash == content_hash(from, snapshot)?),
        Err(e) if e.reason() == Reason::CannotDecrypt => {
            Ok(!encryption.is_verbatim(&snapshot.name))
        }
        Err(e) if e.reason().is_bad_data() => Ok(false),
        Err(e) => Err(e),
    }
}

/// Returns the SHA-256 of a snapshot's content.
fn content_hash(ctx: &Context, snapshot: &Snapshot) -> Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let payload = ctx.payload(snapshot)?;
    let read_error = |e| Error::io("compare two snapshots", e);
    for_each_piece(payload, ctx.store.cancel(), read_error, |piece| {
        hash.update(piece);
        Ok(())
    })?;
    Ok(hash.finalize().into())
}

fn copy_error(e: io::Error) -> Error {
    Error::io("copy a snapshot", e)
}

/// Encrypts the upload, if that is requested.
fn seal(to: &Context, encryption: Encryption, upload: Upload) -> Result<EncryptingWriter<Upload>> {
    match encryption {
        Encryption::Encrypt => to.keys.encrypt(upload),
        Encryption::Keep | Encryption::Decrypt => Ok(EncryptingWriter::Plain(upload)),
    }
}

/// Copies a stream of about `bytes` bytes unchanged, and checks it on the way. Returns whether it could be checked.
fn copy_checked<W: Write + Send>(
    from: &Context,
    stored: impl Read + Send,
    name: &SnapshotName,
    bytes: u64,
    to: W,
) -> Result<(W, bool)> {
    let mut tee = Tee { from: stored, to };
    let is_checked = check(from, name, bytes, &mut tee)?;
    // What the check has not read.
    io::copy(&mut tee, &mut io::sink()).map_err(copy_error)?;
    Ok((tee.to, is_checked))
}

/// Decodes a stored snapshot and checks the SHA-256 inside. Returns false if it is encrypted and no
/// identity decrypts it.
fn check(
    from: &Context,
    name: &SnapshotName,
    bytes: u64,
    stored: impl Read + Send,
) -> Result<bool> {
    let keys = &from.keys;
    if !name.is_encrypted {
        return check_plain(from, name, bytes, stored).map(|()| true);
    }
    if keys.decrypts() {
        match keys.decrypt(stored) {
            Ok(opened) => return check_plain(from, name, bytes, opened).map(|()| true),
            Err(e) if e.reason() != Reason::CannotDecrypt => return Err(e),
            Err(_) => {}
        }
    }
    Ok(false)
}

/// Checks the SHA-256 inside a snapshot that is not encrypted.
fn check_plain(
    from: &Context,
    name: &SnapshotName,
    bytes: u64,
    stored: impl Read + Send,
) -> Result<()> {
    let plain = codec::decoder_of(name.compression, stored, bytes).map_err(copy_error)?;
    let payload = FrameReader::new(plain).within(from.limits);
    let payload = content(payload, name, &from.limits)?;
    for_each_piece(payload, from.store.cancel(), copy_error, |_| Ok(()))
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
    Ok(if has_metas {
        Box::new(FullReader::open(whole, limits, 0).map_err(copy_error)?)
    } else {
        Box::new(whole)
    })
}
