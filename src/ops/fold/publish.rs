//! Publish: writes a new snapshot compressed and encrypted to the store, and gives it its name.
//!
//! The snapshot is also written to a file, so that it can be verified before it gets its name. The content is
//! plain bytes here. Called by `compact` and `snapshot`; `restore` uses the writer to a file and a target.

use crate::backup::SnapshotName;
use crate::backup::catalog::V2;
use crate::backup::codec::{self, Encoder, Encoding};
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::error::{Error, Reason, Result};
use crate::ops::Context;
use crate::store::{EncryptingWriter, Published, Staged, Upload};
use crate::telemetry::progress::Step;
use sha2::{Digest, Sha256};
use std::io::{self, BufWriter, IntoInnerError, Write};

/// The number of names that are tried: if a name is taken, that of one second later is next.
const NAMES_TRIED: i64 = 3600;

/// Writes a new database to two places: a file to verify it, and a stream to the store or to the target of a
/// restore.
pub(crate) struct TeeWriter<W> {
    file: Option<BufWriter<TempFile>>,
    stream: W,
    progress: Option<Step>,
}

impl<W> TeeWriter<W> {
    pub(crate) fn new(file: Option<TempFile>, stream: W, progress: Option<Step>) -> Self {
        let file = file.map(|file| BufWriter::with_capacity(256 << 10, file));
        TeeWriter {
            file,
            stream,
            progress,
        }
    }

    /// Flushes the file, and returns the file and the stream.
    pub(crate) fn into_parts(self) -> io::Result<(Option<TempFile>, W)> {
        let file = self.file.map(BufWriter::into_inner).transpose();
        Ok((file.map_err(IntoInnerError::into_error)?, self.stream))
    }
}

impl<W: Write> Write for TeeWriter<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        if let Some(file) = &mut self.file {
            file.write_all(b).map_err(|e| {
                Error::io(
                    "write the new database to the temporary directory (choose another with --temp-dir)",
                    e,
                )
            })?;
        }
        self.stream.write_all(b)?;
        if let Some(progress) = &self.progress {
            progress.add(b.len() as u64);
        }
        Ok(b.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// The SHA-256 of the content of an encrypted object.
type ContentHash = [u8; 32];

/// Refuses to write a plain snapshot if the existing one is encrypted: a backup that is encrypted should be
/// so as a whole.
///
/// # Errors
/// `Configuration` if `existing` is encrypted and no recipient is given.
pub(crate) fn refuse_plaintext(ctx: &Context, existing: Option<&SnapshotName>) -> Result<()> {
    match existing {
        Some(name) if name.is_encrypted && !ctx.keys.encrypts() => Err(Reason::Configuration.error(format!(
            "{name} is encrypted, and the new snapshot would not be: give a recipient with --age-recipient or --age-recipients-file"
        ))),
        _ => Ok(()),
    }
}

/// Uploads a snapshot: compresses it, encrypts it if recipients are given, and writes it to a staging object.
/// An encrypted snapshot is hashed before its encryption, since two encrypted objects of the same content
/// differ.
pub(crate) struct SnapshotUpload(Encoder<HashingWriter<EncryptingWriter<Upload>>>);

/// A writer that hashes its bytes if `hash` is set.
pub(crate) struct HashingWriter<W> {
    pub(crate) inner: W,
    pub(crate) hash: Option<Sha256>,
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(b)?;
        if let Some(hash) = &mut self.hash {
            hash.update(&b[..n]);
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl SnapshotUpload {
    /// Begins an upload. `hint` becomes a part of the name of the staging object.
    ///
    /// # Errors
    /// Errors of the store.
    pub(crate) fn new(ctx: &Context, hint: &str, encoding: Encoding) -> Result<Self> {
        Self::of(ctx, Upload::new(&ctx.store, hint, ctx.threads), encoding)
    }

    /// Begins the upload of a snapshot that will get this name, unless the name is taken.
    ///
    /// # Errors
    /// Errors of the store.
    pub(crate) fn named(ctx: &Context, name: &SnapshotName, encoding: Encoding) -> Result<Self> {
        let upload = Upload::new(&ctx.store, &name.to_string(), ctx.threads);
        Self::of(ctx, upload.likely_named(format!("{V2}/{name}")), encoding)
    }

    fn of(ctx: &Context, upload: Upload, encoding: Encoding) -> Result<Self> {
        let hashing = HashingWriter {
            inner: ctx.keys.encrypt(upload)?,
            hash: ctx.keys.encrypts().then(Sha256::new),
        };
        let encoder = codec::encoder(encoding, ctx.threads, hashing);
        Ok(SnapshotUpload(encoder.map_err(write_error)?))
    }

    /// Completes the upload, and reads the staging object back.
    ///
    /// # Errors
    /// Errors of the store.
    pub(crate) fn finish(self) -> Result<StagedSnapshot> {
        let HashingWriter { inner, hash } = self.0.finish().map_err(write_error)?;
        let staged = inner.finish().map_err(write_error)?.finish()?;
        let content = hash.map(|hash| hash.finalize().into());
        Ok(StagedSnapshot { staged, content })
    }
}

impl Write for SnapshotUpload {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        self.0.write(b)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn write_error(e: io::Error) -> Error {
    Error::io("write the new snapshot", e)
}

/// An uploaded snapshot that does not have its name yet.
pub(crate) struct StagedSnapshot {
    staged: Staged,
    /// The hash of the content if the snapshot is encrypted.
    content: Option<ContentHash>,
}

impl StagedSnapshot {
    /// Returns the size in the store, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.staged.bytes()
    }

    /// Returns whether the object `below` the prefix has the same content, encrypted separately. An object
    /// that cannot be decrypted or is damaged does not.
    fn has_content_of(&self, ctx: &Context, below: &str) -> Result<bool> {
        let Some(content) = self.content.filter(|_| ctx.keys.decrypts()) else {
            return Ok(false);
        };
        match content_hash(ctx, below) {
            Ok(hash) => Ok(hash == content),
            Err(e) if e.reason().is_bad_data() || e.reason() == Reason::CannotDecrypt => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// Returns the hash of the content of an encrypted object.
fn content_hash(ctx: &Context, below: &str) -> Result<ContentHash> {
    let opened = ctx.keys.decrypt(ctx.store.read(below))?;
    let read_error = |e| Error::io(format!("read {}", ctx.store.name(below)), e);
    let mut hash = Sha256::new();
    for_each_piece(opened, ctx.store.cancel(), read_error, |piece| {
        hash.update(piece);
        Ok(())
    })?;
    Ok(hash.finalize().into())
}

/// Gives a staged snapshot the first free name from `name` on, and updates `name`. Returns the size in bytes,
/// or 0 if an object with the same bytes or the same encrypted content exists already.
///
/// # Errors
/// `TargetExists` if all names that are tried are taken; errors of the store.
pub(crate) fn give_name(
    ctx: &Context,
    staged: &StagedSnapshot,
    name: &mut SnapshotName,
) -> Result<u64> {
    let first = name.created;
    while name.created < first + NAMES_TRIED {
        let below = format!("{V2}/{name}");
        match staged.staged.publish(&below)? {
            Published::Created => return Ok(staged.bytes()),
            Published::Identical => return Ok(0),
            Published::Taken if staged.has_content_of(ctx, &below)? => return Ok(0),
            Published::Taken => name.created += 1,
        }
    }
    name.created = first;
    Err(Reason::TargetExists.error(format!(
        "{} and the {NAMES_TRIED} names after it are taken by other snapshots: check whether several clusters write to this prefix",
        ctx.store.name(&format!("{V2}/{name}"))
    )))
}
