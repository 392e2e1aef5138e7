//! A plain snapshot file: one that etcdctl, k3s, kOps or OpenShift left, compressed or not.
//!
//! It tells the layout by the bytes, not by the name, and copies the database out if it is packed or
//! encrypted; it takes no deltas and knows no store. The jobs that take `--snapshot FILE` call it.

use super::database_file::Spool;
use super::in_place::{InPlace, Proof, at, check_hash};
use crate::backup::Compression;
use crate::backup::codec;
use crate::backup::frame::HASH_SIZE;
use crate::backup::name::ENCRYPTED;
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Base;
use crate::ops::{Context, free_space};
use crate::store::encryption;
use crate::telemetry::progress::Step;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, Write};
use std::path::Path;
use std::sync::Arc;

/// A plain snapshot file, opened.
pub struct Plain {
    /// The database.
    pub db: Database<Spool>,
    /// What it says of itself.
    pub base: Base,
    /// Whether a SHA-256 stands behind the database. Without one nothing proves the bytes: see
    /// [`warning`](Self::warning).
    pub has_checksum: bool,
    /// Whether it is right.
    pub(super) proof: Proof,
    /// How the file was compressed: none, gzip, zlib, lzw, zstd or zip.
    pub compression: &'static str,
    /// The file's size in bytes, as it lies there.
    pub file_bytes: u64,
}

impl Plain {
    /// What an operator should know of it; `path` is the file's.
    pub fn warning(&self, path: &Path) -> Option<String> {
        (!self.has_checksum).then(|| {
            format!(
                "{} has no SHA-256 behind its database, so nothing proves that its bytes are whole: it is a copy of etcd's member/snap/db and not what `etcdctl snapshot save` writes, and lacks what etcd had only in its WAL when it was copied",
                path.display()
            )
        })
    }
}

/// How a file is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    Stream(Compression),
    Zip,
}

/// Not packed at all.
const PLAIN: Packing = Packing::Stream(Compression::None);

impl Packing {
    fn as_str(self) -> &'static str {
        match self {
            Packing::Stream(c) => c.as_str(),
            Packing::Zip => "zip",
        }
    }
}

/// As many bytes of a file's beginning as [`packing`] looks at.
const HEAD_BYTES: usize = 64;

/// Tells the packing by a file's first bytes; by its name only where the bytes cannot tell (LZW).
fn packing(head: &[u8], file_name: &str) -> Result<Packing> {
    // bbolt's first page: its number 0, then the flag of a meta page.
    const BOLT: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 4, 0];
    let unread = |what: &str| {
        Err(Error::corrupt(format!(
            "it is packed by {what}, which deltafold does not read: unpack it first"
        )))
    };
    let is_zlib = matches!(head, [0x78, second, ..] if (0x7800 + u32::from(*second)) % 31 == 0);
    Ok(match head {
        h if h.starts_with(BOLT) => Packing::Stream(Compression::None),
        [0x1f, 0x8b, ..] => Packing::Stream(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Packing::Stream(Compression::Zstd),
        h if h.starts_with(b"PK\x03\x04") || h.starts_with(b"PK\x05\x06") => Packing::Zip,
        [0x1f, 0x9d, ..] => return unread("compress(1)"),
        h if h.starts_with(b"BZh") => return unread("bzip2"),
        h if h.starts_with(b"\xfd7zXZ\0") => return unread("xz"),
        _ if is_zlib => Packing::Stream(Compression::Zlib),
        _ if is_named_lzw(file_name) => Packing::Stream(Compression::Lzw),
        _ => Packing::Stream(Compression::None),
    })
}

fn is_named_lzw(file_name: &str) -> bool {
    let name = file_name.strip_suffix(ENCRYPTED).unwrap_or(file_name);
    let name = name.strip_suffix(".final").unwrap_or(name);
    name.ends_with(Compression::Lzw.suffix())
}

/// Behind its pages in use, a member's file has room to grow: bbolt makes it longer by 16 MiB at a time, and where
/// it is as long as its memory map, by 1 GiB. That room is not copied.
const MOST_ROOM: u64 = (1 << 30) + HASH_SIZE as u64;

/// What stands in a file behind its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// The SHA-256 of all before it, as `etcdctl snapshot save` leaves it.
    Checksum,
    /// Nothing: a copy of member/snap/db.
    PagesOnly,
}

/// Tells the layout by the length of the unpacked bytes.
fn layout(bytes: u64, page_size: usize) -> Result<Layout> {
    let rest = bytes % page_size as u64;
    match rest {
        0 => Ok(Layout::PagesOnly),
        r if r == HASH_SIZE as u64 => Ok(Layout::Checksum),
        r => Err(Error::corrupt(format!(
            "it is cut short, or something follows it: its {bytes} bytes are neither a multiple of its pages of {page_size} bytes nor that and a SHA-256 ({r} bytes are left over)"
        ))),
    }
}

/// Hashes everything but the last 32 bytes, and keeps those.
#[derive(Default)]
struct Tail {
    hash: Sha256,
    kept: Vec<u8>,
}

impl Tail {
    fn update(&mut self, bytes: &[u8]) {
        // Of what was kept, only as much stays as the new bytes leave room for.
        let stay = HASH_SIZE.saturating_sub(bytes.len());
        let go = self.kept.len().saturating_sub(stay);
        self.hash.update(&self.kept[..go]);
        self.kept.drain(..go);
        let (now, keep) = bytes.split_at(bytes.len().saturating_sub(HASH_SIZE));
        self.hash.update(now);
        self.kept.extend_from_slice(keep);
    }

    /// Checks that the last 32 bytes are the hash of those before them.
    fn check(self) -> Result<()> {
        check_hash(self.hash, &self.kept)
    }
}

/// An unpacked file.
struct Unpacked {
    file: TempFile,
    bytes: u64,
    tail: Tail,
}

impl Context {
    /// Opens a plain snapshot file, and checks it. Its bytes tell how it is packed; LZW alone is told by a name
    /// that ends in `.Z`. One that is packed or encrypted is copied into an unnamed temporary file.
    ///
    /// # Errors
    /// As [`plain_unproven`](Self::plain_unproven).
    pub fn plain(&self, path: &Path) -> Result<Plain> {
        let plain = self.plain_unproven(path)?;
        plain.proof.wait()?;
        Ok(plain)
    }

    /// As [`plain`](Self::plain). If nothing has to be copied, the file may still be hashed when this returns:
    /// nothing counts that was read from it before [`Plain::proof`] is there.
    ///
    /// # Errors
    /// `NoSnapshots` if there is no such file; `Usage` if it is no file; `CorruptSnapshot`
    /// if it is damaged, a delta or no snapshot at all; `CannotDecrypt`; `PermissionDenied`, `Io`,
    /// `NoSpace`, `Terminated`.
    pub(super) fn plain_unproven(&self, path: &Path) -> Result<Plain> {
        let (file, bytes) = open(path)?;
        let opener = Opener {
            ctx: self,
            path,
            bytes,
            step: Step::new(format!("read {}", path.display()), Some(bytes)),
        };
        opener.open(file).map_err(|e| at(path, e))
    }
}

/// Opens one file.
struct Opener<'a> {
    ctx: &'a Context,
    path: &'a Path,
    bytes: u64,
    step: Step,
}

impl Opener<'_> {
    fn open(&self, mut file: File) -> Result<Plain> {
        if self.bytes == 0 {
            return Err(Error::corrupt("it is empty: take the snapshot again"));
        }
        let mut head = self.head(&mut file)?;
        file.rewind().map_err(|e| self.read_error(e))?;
        let is_encrypted =
            head.starts_with(encryption::MAGIC) || head.starts_with(encryption::ARMORED);
        let whole: Box<dyn Read + Send + '_> = match is_encrypted {
            true => {
                let mut opened = self.ctx.keys.decrypt(self.step.reader(&file))?;
                head = self.head(&mut opened)?;
                Box::new(Cursor::new(head.clone()).chain(opened))
            }
            false => Box::new(self.step.reader(&file)),
        };
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let packing = packing(&head, &name)?;
        if packing == PLAIN && !is_encrypted {
            drop(whole);
            return self.in_place(file, &head);
        }
        // Nothing is smaller unpacked.
        free_space::check(&self.ctx.temp_dir, self.bytes, &self.what())?;
        let unpacked = match packing {
            Packing::Stream(compression) => {
                let plain = codec::decoder(compression, whole).map_err(|e| self.read_error(e))?;
                self.copy_out(plain)
            }
            // A zip archive is read from its end.
            Packing::Zip if is_encrypted => self.unzip(self.copy_archive(whole)?),
            Packing::Zip => self.unzip(&file),
        };
        let Unpacked { file, bytes, tail } = unpacked?;
        let db = Database::open_within(self.ctx.spool(file), self.ctx.limits)?;
        let layout = layout(bytes, db.page_size())?;
        if layout == Layout::Checksum {
            tail.check()?;
        }
        Ok(Plain {
            base: Base::read(&db)?,
            db,
            has_checksum: layout == Layout::Checksum,
            proof: Proof::known(),
            compression: packing.as_str(),
            file_bytes: self.bytes,
        })
    }

    /// The first bytes.
    fn head(&self, from: &mut impl Read) -> Result<Vec<u8>> {
        let mut head = Vec::with_capacity(HEAD_BYTES);
        let read = from.take(HEAD_BYTES as u64).read_to_end(&mut head);
        read.map_err(|e| self.read_error(e))?;
        Ok(head)
    }

    fn what(&self) -> String {
        self.path.display().to_string()
    }

    /// Opens a file where it lies, which is neither packed nor encrypted.
    fn in_place(&self, file: File, head: &[u8]) -> Result<Plain> {
        refuse_delta(head)?;
        let file = Arc::new(InPlace::new(file, self.bytes));
        let cancel = self.ctx.store.cancel();
        let spool = Spool::in_place(file.clone(), cancel.clone());
        let db = Database::open_within(spool, self.ctx.limits)?;
        let layout = layout(self.bytes, db.page_size())?;
        let proof = match layout {
            Layout::Checksum => Proof::start(&file, self.path, cancel.clone(), self.step.clone()),
            Layout::PagesOnly => Proof::known(),
        };
        // A damaged file gets the error of damage.
        let base = Base::read(&db).or_else(|e| proof.wait().and(Err(e)))?;
        Ok(Plain {
            db,
            base,
            has_checksum: layout == Layout::Checksum,
            proof,
            compression: PLAIN.as_str(),
            file_bytes: self.bytes,
        })
    }

    /// The one file of a zip archive.
    fn unzip(&self, file: impl Read + Seek) -> Result<Unpacked> {
        let mut archive = zip::ZipArchive::new(BufReader::new(file)).map_err(zip_error)?;
        let mut inside = None;
        for i in 0..archive.len() {
            let entry = archive.by_index_raw(i).map_err(zip_error)?;
            if !entry.is_dir() && inside.replace(i).is_some() {
                return Err(Error::corrupt(
                    "the zip archive holds several files, a snapshot's one: unpack it and give the snapshot among them",
                ));
            }
        }
        let Some(i) = inside else {
            return Err(Error::corrupt("the zip archive holds no file"));
        };
        self.copy_out(archive.by_index(i).map_err(zip_error)?)
    }

    /// Copies a zip archive that was decrypted, which is no longer than what was encrypted.
    fn copy_archive(&self, archive: impl Read) -> Result<TempFile> {
        let mut file = self.ctx.temp_file()?;
        let (ctx, failed) = (self.ctx, |e| self.read_error(e));
        for_each_piece(archive, ctx.store.cancel(), failed, |piece| {
            file.write_all(piece).map_err(|e| ctx.write_error(e))
        })?;
        Ok(file)
    }

    /// Copies a database into an unnamed temporary file, and hashes it with what follows it.
    fn copy_out(&self, plain: impl Read) -> Result<Unpacked> {
        // LZW's decoder, which is asked for little at a time, misses bytes behind its end.
        let mut plain = BufReader::with_capacity(256 << 10, plain);
        let failed = |e| self.read_error(e);
        refuse_delta(plain.fill_buf().map_err(failed)?)?;
        let mut tail = Tail::default();
        let mut bytes = 0;
        let (ctx, what) = (self.ctx, self.what());
        let file = ctx.copy_database(plain, MOST_ROOM, &what, failed, |piece| {
            tail.update(piece);
            bytes += piece.len() as u64;
        })?;
        Ok(Unpacked { file, bytes, tail })
    }

    /// An error while reading: the disk's, or what a decompressor found wrong with the bytes.
    fn read_error(&self, e: io::Error) -> Error {
        let of_ours = e.get_ref().is_some_and(|inner| inner.is::<Error>());
        match of_ours || e.raw_os_error().is_some() {
            true => Error::io(format!("read {}", self.path.display()), e),
            false => Error::corrupt(format!("its compression is damaged: {e}")),
        }
    }
}

/// Opens a file that must be a plain one, and tells its size.
fn open(path: &Path) -> Result<(File, u64)> {
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => Reason::NoSnapshots
            .error(format!(
                "there is no file {}: check --snapshot",
                path.display()
            )),
        _ => Error::io(format!("open {}", path.display()), e),
    };
    // Looked at before it is opened: to open a pipe would wait for its writer.
    let kind = std::fs::metadata(path).map_err(failed)?;
    if !kind.is_file() {
        let what = match kind.is_dir() {
            true => "a folder: give a snapshot file, or a folder of snapshots with --store",
            false => "no plain file: copy its content into one first",
        };
        return Err(Reason::Usage.error(format!("--snapshot {} is {what}", path.display())));
    }
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    Ok((file, bytes))
}

/// A delta is JSON, and only of use together with a full.
fn refuse_delta(head: &[u8]) -> Result<()> {
    match head.iter().find(|b| !b.is_ascii_whitespace()) {
        Some(b'[') => Err(Error::corrupt(
            "it is a delta snapshot: events, no database; give the full snapshot that it follows, or the folder that holds both with --store",
        )),
        _ => Ok(()),
    }
}

fn zip_error(e: zip::result::ZipError) -> Error {
    use zip::result::ZipError;
    match e {
        ZipError::Io(e) if e.raw_os_error().is_some() => Error::io("read the zip archive", e),
        ZipError::UnsupportedArchive(why) => Error::corrupt(format!(
            "the zip archive cannot be read ({why}): unpack it first"
        )),
        ZipError::CompressionMethodNotSupported(method) => Error::corrupt(format!(
            "the zip archive is compressed by method {method}, only stored and deflate are read: unpack it first"
        )),
        e => Error::corrupt(format!("the zip archive is damaged: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packing_is_told_by_bytes_and_only_lzw_by_name() {
        let of = |head: &[u8], name: &str| packing(head, name).map(Packing::as_str);
        let bolt = [0u8, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0];
        for name in ["x", "x.gz", "x.zip", "x.Z"] {
            assert_eq!(of(&bolt, name).unwrap(), "none", "{name}");
            assert_eq!(of(&[0x1f, 0x8b, 8], name).unwrap(), "gzip", "{name}");
            assert_eq!(of(&[0x28, 0xb5, 0x2f, 0xfd], name).unwrap(), "zstd");
            assert_eq!(of(b"PK\x03\x04", name).unwrap(), "zip", "{name}");
            for second in [0x01, 0x5e, 0x9c, 0xda] {
                assert_eq!(of(&[0x78, second], name).unwrap(), "zlib", "{name}");
            }
        }
        assert_eq!(of(&[0x78, 0x9d], "x").unwrap(), "none");
        assert_eq!(of(&[0, 1, 0], "Full-1.Z").unwrap(), "lzw");
        assert_eq!(of(&[0, 1, 0], "Full-1.Z.final").unwrap(), "lzw");
        assert_eq!(of(&[0, 1, 0], "Full-1").unwrap(), "none");
        for foreign in [&b"BZh9"[..], b"\xfd7zXZ\0", b"\x1f\x9d\x90"] {
            let e = of(foreign, "x.Z").unwrap_err();
            assert_eq!(e.reason(), Reason::CorruptSnapshot);
            assert!(e.to_string().contains("unpack it first"), "{e}");
        }
    }

    #[test]
    fn the_layout_is_told_by_the_length() {
        assert_eq!(layout(8192, 4096).unwrap(), Layout::PagesOnly);
        assert_eq!(layout(8192 + 32, 4096).unwrap(), Layout::Checksum);
        for bytes in [8191, 8193, 8192 + 31, 8192 + 33, 8192 + 64] {
            let e = layout(bytes, 4096).unwrap_err();
            assert_eq!(e.reason(), Reason::CorruptSnapshot, "{bytes}");
        }
    }

    #[test]
    fn the_last_32_bytes_are_kept_back_however_they_come() {
        let payload: Vec<u8> = (0..200).collect();
        let mut all = payload.clone();
        all.extend_from_slice(&Sha256::digest(&payload));
        for piece in [1, 7, 31, 32, 33, 64, 200, 500] {
            let mut tail = Tail::default();
            all.chunks(piece).for_each(|c| tail.update(c));
            assert!(tail.check().is_ok(), "{piece}");
            let mut tail = Tail::default();
            all[1..].chunks(piece).for_each(|c| tail.update(c));
            assert!(tail.check().is_err(), "{piece}");
        }
    }

    #[test]
    fn a_delta_is_told_from_a_database() {
        assert!(refuse_delta(b" \n[{\"etcdEvent\"").is_err());
        assert!(refuse_delta(&[0; 16]).is_ok());
    }
}
