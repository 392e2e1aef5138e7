//! Publish: writes a new snapshot compressed and encrypted to the store, and gives it its name.
//!
//! The snapshot is also written to a file, so that it can be verified before it gets its name. If the name depends on
//! the content, the packed snapshot waits in a file, too: an upload is bound to its name. The content is plain bytes
//! here.

use crate::backup::SnapshotName;
use crate::backup::catalog::V2;
use crate::backup::codec::{self, Encoder, Encoding};
use crate::base::opt::{AGE_IDENTITY, AGE_RECIPIENT, AGE_RECIPIENTS_FILE, TEMP_DIR};
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::error::{Error, Reason, Result};
use crate::prefix::Context;
use crate::store::{EncryptingWriter, Published, Unnamed, Upload};
use crate::telemetry::progress::Step;
use sha2::{Digest, Sha256};
use std::io::{self, BufWriter, IntoInnerError, Write};

/// The number of names that are tried: if a name is taken, that of one second later is next.
pub(crate) const NAMES_TRIED: i64 = 60;

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
                    format!("write the new database to the temporary directory (choose another with {TEMP_DIR})"),
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

/// Refuses to write plain snapshots if an identity is given: then the backup is an encrypted one. The flags decide and
/// not what is at the store, since anybody who can write there can put an encrypted snapshot there.
///
/// # Errors
/// `Configuration` if an identity is given and no recipient.
pub(crate) fn refuse_plaintext(ctx: &Context) -> Result<()> {
    if ctx.keys.decrypts() && !ctx.keys.encrypts() {
        return Err(Reason::Configuration.error(
            format!("{AGE_IDENTITY} is given and no recipient, so the new snapshot would not be encrypted: give a recipient with {AGE_RECIPIENT} or {AGE_RECIPIENTS_FILE}"),
        ));
    }
    Ok(())
}

/// Compresses a snapshot, and encrypts it if recipients are given. An encrypted snapshot is hashed before its
/// encryption, since two encrypted objects of the same content differ.
pub(crate) struct Packer<W: Write>(Encoder<HashingWriter<EncryptingWriter<W>>>);

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

impl<W: Write> Packer<W> {
    /// Begins to pack a snapshot into `out`.
    ///
    /// # Errors
    /// Errors of `out`.
    pub(crate) fn new(ctx: &Context, encoding: Encoding, out: W) -> Result<Self> {
        let hashing = HashingWriter {
            inner: ctx.keys.encrypt(out)?,
            hash: ctx.keys.encrypts().then(Sha256::new),
        };
        let encoder = codec::encoder(encoding, ctx.threads, hashing);
        Ok(Packer(encoder.map_err(write_error)?))
    }

    /// Writes the end. Returns `out`, and the hash of the content if the snapshot is encrypted.
    fn finish(self) -> Result<(W, Option<ContentHash>)> {
        let HashingWriter { inner, hash } = self.0.finish().map_err(write_error)?;
        let out = inner.finish().map_err(write_error)?;
        Ok((out, hash.map(|hash| hash.finalize().into())))
    }
}

impl Packer<Upload> {
    /// Begins to write a snapshot to the store under this name. It will have about `expected` bytes at most.
    ///
    /// # Errors
    /// Errors of the store.
    pub(crate) fn to_store(
        ctx: &Context,
        name: &SnapshotName,
        encoding: Encoding,
        expected: u64,
    ) -> Result<Self> {
        let upload = Upload::new(&ctx.store, &path_of(name), expected)?;
        Packer::new(ctx, encoding, upload)
    }

    /// Completes the snapshot, which has no name yet.
    ///
    /// # Errors
    /// Errors of the store.
    pub(crate) fn uploaded(self) -> Result<UnnamedSnapshot> {
        let (upload, content) = self.finish()?;
        Ok(UnnamedSnapshot {
            object: upload.finish()?,
            content,
        })
    }
}

impl Packer<BufWriter<TempFile>> {
    /// Begins to pack a snapshot into a temporary file, if its name is not known yet.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub(crate) fn to_file(ctx: &Context, encoding: Encoding) -> Result<Self> {
        let file = BufWriter::with_capacity(256 << 10, ctx.temp_file()?);
        Packer::new(ctx, encoding, file)
    }

    /// Completes the file.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub(crate) fn packed(self) -> Result<PackedSnapshot> {
        let (file, content) = self.finish()?;
        let file = file.into_inner().map_err(|e| write_error(e.into_error()))?;
        Ok(PackedSnapshot { file, content })
    }
}

impl<W: Write> Write for Packer<W> {
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

fn path_of(name: &SnapshotName) -> String {
    format!("{V2}/{name}")
}

/// A snapshot whose bytes are at the store, without its name.
pub(crate) struct UnnamedSnapshot {
    object: Unnamed,
    /// The hash of the content if the snapshot is encrypted.
    content: Option<ContentHash>,
}

impl UnnamedSnapshot {
    /// Gives the snapshot its name. Returns its size in bytes, or 0 if an object with the same bytes or the same
    /// encrypted content has the name already; `None` if another object has it.
    ///
    /// # Errors
    /// Errors of the store.
    pub(crate) fn complete(self, ctx: &Context, name: &SnapshotName) -> Result<Option<u64>> {
        let bytes = self.object.bytes();
        Ok(match self.object.complete()? {
            Published::Created => Some(bytes),
            Published::Identical => Some(0),
            Published::Taken if has_content(ctx, name, self.content)? => Some(0),
            Published::Taken => None,
        })
    }
}

/// A snapshot in a temporary file, as the store will have it.
pub(crate) struct PackedSnapshot {
    file: TempFile,
    content: Option<ContentHash>,
}

impl PackedSnapshot {
    /// Returns the size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.file.len()
    }

    /// Writes the bytes of the snapshot.
    ///
    /// # Errors
    /// Errors of `out`; `Io`, `Terminated`.
    pub(crate) fn write_to(&self, ctx: &Context, out: &mut impl Write) -> Result<()> {
        let read_error = |e| Error::io("read the temporary directory", e);
        for_each_piece(
            self.file.reader(),
            ctx.store.cancel(),
            read_error,
            |piece| out.write_all(piece).map_err(write_error),
        )
    }

    /// Writes the snapshot to the store under the first free one of `tried` names, which have the times from that of
    /// `name` on, and updates `name`. Returns whether it is new: an object with the same bytes or the same encrypted
    /// content may have the name already.
    ///
    /// # Errors
    /// `TargetExists` if all names that are tried are taken; errors of the store, `Io`.
    pub(crate) fn publish(
        &self,
        ctx: &Context,
        name: &mut SnapshotName,
        tried: i64,
    ) -> Result<bool> {
        let first = name.created;
        while name.created < first + tried {
            let mut object = Upload::new(&ctx.store, &path_of(name), self.bytes())?;
            self.write_to(ctx, &mut object)?;
            let content = self.content;
            let object = object.finish()?;
            let unnamed = UnnamedSnapshot { object, content };
            match unnamed.complete(ctx, name)? {
                Some(bytes) => return Ok(bytes > 0),
                None => name.created += 1,
            }
        }
        name.created = first;
        Err(names_are_taken(ctx, name, tried))
    }
}

/// Returns the error that `tried` names from `first` on are taken.
pub(crate) fn names_are_taken(ctx: &Context, first: &SnapshotName, tried: i64) -> Error {
    Reason::TargetExists.error(format!(
        "{} and the names of the {} seconds after it are taken by other snapshots: check whether several clusters write to this prefix",
        ctx.store.name(&path_of(first)),
        tried - 1
    ))
}

/// Returns whether the object of this name has the same content, encrypted separately. An object that cannot be
/// decrypted or is damaged does not.
fn has_content(ctx: &Context, name: &SnapshotName, content: Option<ContentHash>) -> Result<bool> {
    let Some(content) = content.filter(|_| ctx.keys.decrypts()) else {
        return Ok(false);
    };
    match content_hash(ctx, &path_of(name)) {
        Ok(hash) => Ok(hash == content),
        Err(e) if e.reason().is_unreadable() => Ok(false),
        Err(e) => Err(e),
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
