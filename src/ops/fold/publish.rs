//! Publish: a new snapshot goes compressed and encrypted into the store, and into a file to be verified; then it gets
//! its name.
//!
//! What is written it does not know. `compact` and `snapshot` call it.

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

/// Names that are tried when a name is taken: as many seconds after the first.
const NAMES_TRIED: i64 = 3600;

/// Where a new database goes: into a file to be verified, and on its way into the store or to its target.
pub(crate) struct Both<W> {
    file: Option<BufWriter<TempFile>>,
    stream: W,
    step: Option<Step>,
}

impl<W> Both<W> {
    pub(crate) fn new(file: Option<TempFile>, stream: W, step: Option<Step>) -> Self {
        let file = file.map(|file| BufWriter::with_capacity(256 << 10, file));
        Both { file, stream, step }
    }

    /// The file, written to its end, and the stream.
    pub(crate) fn into_parts(self) -> io::Result<(Option<TempFile>, W)> {
        let file = self.file.map(BufWriter::into_inner).transpose();
        Ok((file.map_err(IntoInnerError::into_error)?, self.stream))
    }
}

impl<W: Write> Write for Both<W> {
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
        if let Some(step) = &self.step {
            step.add(b.len() as u64);
        }
        Ok(b.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// The SHA-256 of what an encrypted object holds.
type Sum = [u8; 32];

/// Refuses to write plain text beside what is encrypted already: somebody who encrypts a backup wants all
/// of it to be so.
///
/// # Errors
/// `Configuration` where `existing` is encrypted and there is nobody to encrypt a new snapshot for.
pub(crate) fn refuse_plain(ctx: &Context, existing: Option<&SnapshotName>) -> Result<()> {
    match existing {
        Some(name) if name.is_encrypted && !ctx.keys.encrypts() => Err(Reason::Configuration.error(format!(
            "{name} is encrypted, and the new snapshot would not be: say with --age-recipient or --age-recipients-file for whom to encrypt it"
        ))),
        _ => Ok(()),
    }
}

/// The way into the store: compressed, then encrypted where there is somebody to encrypt it for, then
/// uploaded. What is encrypted is summed up before: of the same content no two encrypted objects are the same.
pub(crate) struct Packer(Encoder<Summed<EncryptingWriter<Upload>>>);

/// Sums up what is written, if it is asked to.
pub(crate) struct Summed<W> {
    pub(crate) inner: W,
    pub(crate) sum: Option<Sha256>,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(b)?;
        if let Some(sum) = &mut self.sum {
            sum.update(&b[..n]);
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl Packer {
    /// Begins an upload; `hint` becomes a part of the staging object's name.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn new(ctx: &Context, hint: &str, encoding: Encoding) -> Result<Self> {
        Self::of(ctx, Upload::new(&ctx.store, hint, ctx.threads), encoding)
    }

    /// Begins the upload of what will get that name, unless it is taken.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn named(ctx: &Context, name: &SnapshotName, encoding: Encoding) -> Result<Self> {
        let upload = Upload::new(&ctx.store, &name.to_string(), ctx.threads);
        Self::of(ctx, upload.likely_named(format!("{V2}/{name}")), encoding)
    }

    fn of(ctx: &Context, upload: Upload, encoding: Encoding) -> Result<Self> {
        let summed = Summed {
            inner: ctx.keys.encrypt(upload)?,
            sum: ctx.keys.encrypts().then(Sha256::new),
        };
        let packed = codec::encoder(encoding, ctx.threads, summed);
        Ok(Packer(packed.map_err(unwritten)?))
    }

    /// Completes the upload, and reads it back.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn finish(self) -> Result<Packed> {
        let Summed { inner, sum } = self.0.finish().map_err(unwritten)?;
        let staged = inner.finish().map_err(unwritten)?.finish()?;
        let content = sum.map(|sum| sum.finalize().into());
        Ok(Packed { staged, content })
    }
}

impl Write for Packer {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        self.0.write(b)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn unwritten(e: io::Error) -> Error {
    Error::io("write the new snapshot", e)
}

/// What is uploaded and waits for its name.
pub(crate) struct Packed {
    staged: Staged,
    /// Of what is encrypted.
    content: Option<Sum>,
}

impl Packed {
    /// Size in the store.
    pub(crate) fn bytes(&self) -> u64 {
        self.staged.bytes()
    }

    /// Whether the object of that name holds the same, encrypted at another time. What cannot be opened or is
    /// damaged does not.
    fn is_in(&self, ctx: &Context, below: &str) -> Result<bool> {
        let Some(content) = self.content.filter(|_| ctx.keys.decrypts()) else {
            return Ok(false);
        };
        match sum_of(ctx, below) {
            Ok(sum) => Ok(sum == content),
            Err(e) if e.reason().is_bad_data() || e.reason() == Reason::CannotDecrypt => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// The sum of what an encrypted object holds.
fn sum_of(ctx: &Context, below: &str) -> Result<Sum> {
    let opened = ctx.keys.decrypt(ctx.store.read(below))?;
    let unread = |e| Error::io(format!("read {}", ctx.store.name(below)), e);
    let mut sum = Sha256::new();
    for_each_piece(opened, ctx.store.cancel(), unread, |piece| {
        sum.update(piece);
        Ok(())
    })?;
    Ok(sum.finalize().into())
}

/// Gives an object the first free name from `name` on. Returns its size, or 0 where it was there already:
/// the same bytes, or the same content encrypted.
///
/// # Errors
/// `TargetExists` where all names that are tried are taken; the store's.
pub(crate) fn give_name(ctx: &Context, packed: &Packed, name: &mut SnapshotName) -> Result<u64> {
    let first = name.created;
    while name.created < first + NAMES_TRIED {
        let below = format!("{V2}/{name}");
        match packed.staged.publish(&below)? {
            Published::Created => return Ok(packed.bytes()),
            Published::Identical => return Ok(0),
            Published::Taken if packed.is_in(ctx, &below)? => return Ok(0),
            Published::Taken => name.created += 1,
        }
    }
    name.created = first;
    Err(Reason::TargetExists.error(format!(
        "{} and the {NAMES_TRIED} names after it are taken by other snapshots",
        ctx.store.name(&format!("{V2}/{name}"))
    )))
}
