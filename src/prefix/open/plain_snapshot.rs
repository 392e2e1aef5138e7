//! Opens a plain snapshot file, as etcdctl, k3s, kOps or OpenShift write it, on this machine or in a store.
//!
//! The bytes tell how the file is packed, not its name. The database is copied to the temporary directory if
//! the file is packed, encrypted or in a store. If it is none of these, its hash is checked and it is read in place.

use super::database_file::DatabaseFile;
use super::in_place::{InPlaceFile, TrailingHash};
use crate::backup::Compression;
use crate::backup::codec;
use crate::backup::frame::HASH_SIZE;
use crate::backup::name::ENCRYPTED;
use crate::backup::trust::Trust;
use crate::base::opt::{ALLOW_PLAINTEXT, SNAPSHOT, STORE};
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Base;
use crate::prefix::{Context, free_space};
use crate::store::encryption;
use crate::telemetry::progress::Step;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many bytes of a zip archive are read to find the database in it. The list of its files is held in memory, and
/// may be long.
const LONGEST_ZIP_DIRECTORY: usize = 1 << 20;
/// The most files in a zip archive. RKE1 has two: the snapshot, and the state of the cluster.
const MOST_IN_ZIP: usize = 1000;

/// Where a plain snapshot file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilePlace {
    /// A file of this machine.
    Path(PathBuf),
    /// An object of the context's store, by its path below the prefix.
    Object(String),
}

impl FilePlace {
    /// Returns the path, or the URL, for messages.
    pub fn name(&self, ctx: &Context) -> String {
        match self {
            FilePlace::Path(path) => path.display().to_string(),
            FilePlace::Object(path) => ctx.store.name(path),
        }
    }
}

/// An open plain snapshot file, whose hash was checked.
#[derive(Clone)]
pub struct PlainSnapshot {
    /// The database.
    pub db: Database<DatabaseFile>,
    /// The revisions of the database.
    pub base: Base,
    /// Whether a SHA-256 follows the database. Without one nothing proves that the bytes are intact: see
    /// [`warning`](Self::warning).
    pub has_checksum: bool,
    /// How the file is compressed: none, gzip, zlib, lzw, zstd or zip.
    pub compression: &'static str,
    /// The size of the file in bytes.
    pub file_bytes: u64,
}

impl PlainSnapshot {
    /// Returns a warning if the file has no checksum. `name` is the name of the file.
    pub fn warning(&self, name: &str) -> Option<String> {
        (!self.has_checksum).then(|| {
            format!(
                "{name} has no SHA-256 behind its database, so nothing proves that its bytes are intact: it is a copy of etcd's member/snap/db, not a file of `etcdctl snapshot save`, and lacks what only the WAL held when it was copied"
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

/// The first page of a bbolt file: its number 0, then the flag of a meta page.
const BOLT: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 4, 0];

/// The number of bytes at the beginning of a file that tell what it is.
const HEAD_BYTES: usize = 512;

/// Returns how a file is packed, by its first bytes. Only LZW is recognized by the file name, since its bytes
/// do not tell.
fn packing(head: &[u8], file_name: &str) -> Result<Packing> {
    let unsupported = |what: &str| {
        Err(Error::corrupt(format!(
            "it is packed with {what}, which deltafold does not read: unpack it first"
        )))
    };
    let is_zlib = matches!(head, [0x78, second, ..] if (0x7800 + u32::from(*second)) % 31 == 0);
    Ok(match head {
        h if h.starts_with(BOLT) => Packing::Stream(Compression::None),
        [0x1f, 0x8b, ..] => Packing::Stream(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Packing::Stream(Compression::Zstd),
        h if h.starts_with(b"PK\x03\x04") || h.starts_with(b"PK\x05\x06") => Packing::Zip,
        [0x1f, 0x9d, ..] => return unsupported("compress(1)"),
        h if h.starts_with(b"BZh") => return unsupported("bzip2"),
        h if h.starts_with(b"\xfd7zXZ\0") => return unsupported("xz"),
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

fn is_encrypted(head: &[u8]) -> bool {
    head.starts_with(encryption::MAGIC) || head.starts_with(encryption::ARMORED)
}

/// The most bytes after the pages in use. bbolt extends the file of a member by 16 MiB at a time, or by 1 GiB
/// if it is as long as its memory map. These bytes are not copied.
const MOST_UNUSED: u64 = (1 << 30) + HASH_SIZE as u64;

/// What follows the pages of the database in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// The SHA-256 of the pages, as `etcdctl snapshot save` writes it.
    Checksum,
    /// Nothing: the file is a copy of member/snap/db.
    PagesOnly,
}

/// Returns the layout of a file by the number of its unpacked bytes.
fn layout(bytes: u64, page_size: usize) -> Result<Layout> {
    let rest = bytes % page_size as u64;
    match rest {
        0 => Ok(Layout::PagesOnly),
        r if r == HASH_SIZE as u64 => Ok(Layout::Checksum),
        r => Err(Error::corrupt(format!(
            "it is cut short, or other bytes follow it: its {bytes} bytes are not a multiple of its page size of {page_size} bytes, with or without a SHA-256 ({r} bytes are left over)"
        ))),
    }
}

/// A database that was unpacked to a temporary file.
struct Unpacked {
    file: TempFile,
    bytes: u64,
    trailing_hash: TrailingHash,
}

/// Opens a plain snapshot file, and checks its hash. A link is not followed: it may have taken the place of a file that was
/// listed.
pub(in crate::prefix) fn open(ctx: &Context, place: &FilePlace) -> Result<PlainSnapshot> {
    let name = &place.name(ctx);
    let opener = |bytes| Opener {
        ctx,
        name,
        bytes,
        progress: Step::new("read the snapshot file", Some(bytes)),
    };
    let opened = match place {
        FilePlace::Path(path) => {
            let (file, bytes) = open_file(path)?;
            opener(bytes).open_file(file)
        }
        FilePlace::Object(path) => {
            let object = ctx.store.info(path)?.ok_or_else(|| no_file(name))?;
            opener(object.bytes).unpack(ctx.store.fetch(path, object.bytes))
        }
    };
    opened.map_err(|e| with_name(name, e))
}

/// Opens one plain snapshot file.
struct Opener<'a> {
    ctx: &'a Context,
    /// The path of the file, or the full name of the object.
    name: &'a str,
    bytes: u64,
    progress: Step,
}

impl Opener<'_> {
    /// Opens a file in place if it is neither packed nor encrypted, or unpacks it.
    fn open_file(&self, mut file: File) -> Result<PlainSnapshot> {
        let head = self.head(&mut file)?;
        if !is_encrypted(&head) {
            self.refuse_untrusted(&head)?;
            match packing(&head, self.name)? {
                PLAIN => return self.open_in_place(file, &head),
                Packing::Zip => return self.open_unpacked(self.unzip(file)?, Packing::Zip),
                Packing::Stream(_) => {}
            }
        }
        file.rewind().map_err(|e| self.read_error(e))?;
        self.unpack(file)
    }

    /// Unpacks a snapshot to a temporary file.
    fn unpack(&self, mut whole: impl Read + Send) -> Result<PlainSnapshot> {
        let mut head = self.head(&mut whole)?;
        self.refuse_untrusted(&head)?;
        let whole = Cursor::new(head.clone()).chain(whole);
        let mut whole: Box<dyn Read + Send + '_> = Box::new(self.progress.reader(whole));
        if is_encrypted(&head) {
            let mut opened = self.ctx.keys.decrypt(whole)?;
            head = self.head(&mut opened)?;
            whole = Box::new(Cursor::new(head.clone()).chain(opened));
        }
        let packing = packing(&head, self.name)?;
        let unpacked = match packing {
            Packing::Stream(compression) => {
                let plain = codec::decoder(compression, whole).map_err(|e| self.read_error(e))?;
                self.copy_out(plain)?
            }
            // Reading a zip archive begins at its end, so it must be a file.
            Packing::Zip => self.unzip(self.copy_archive(whole)?)?,
        };
        self.open_unpacked(unpacked, packing)
    }

    fn open_unpacked(&self, unpacked: Unpacked, packing: Packing) -> Result<PlainSnapshot> {
        let Unpacked {
            file,
            bytes,
            trailing_hash,
        } = unpacked;
        let db = Database::open_within(self.ctx.database_file(file), self.ctx.limits)?;
        let layout = layout(bytes, db.page_size())?;
        if layout == Layout::Checksum {
            trailing_hash.check()?;
        }
        Ok(PlainSnapshot {
            base: Base::read(&db)?,
            db,
            has_checksum: layout == Layout::Checksum,
            compression: packing.as_str(),
            file_bytes: self.bytes,
        })
    }

    /// Fails if the file must be encrypted, and is not.
    fn refuse_untrusted(&self, head: &[u8]) -> Result<()> {
        if self.ctx.trust != Trust::OnlyEncrypted || is_encrypted(head) {
            return Ok(());
        }
        Err(Reason::Untrusted.error(format!(
            "{} is not encrypted although an age identity is given, so anybody who can write there may have made it: give {ALLOW_PLAINTEXT} if it is yours",
            self.name
        )))
    }

    /// Reads the first bytes.
    fn head(&self, from: &mut impl Read) -> Result<Vec<u8>> {
        let mut head = Vec::with_capacity(HEAD_BYTES);
        let read = from.take(HEAD_BYTES as u64).read_to_end(&mut head);
        read.map_err(|e| self.read_error(e))?;
        if head.is_empty() {
            Err(Error::corrupt("it is empty: take the snapshot again"))
        } else {
            Ok(head)
        }
    }

    /// Opens a file in place, which is neither packed nor encrypted.
    fn open_in_place(&self, file: File, head: &[u8]) -> Result<PlainSnapshot> {
        refuse_others(head)?;
        self.ctx
            .limits
            .check_database(self.bytes.saturating_sub(MOST_UNUSED))?;
        let file = Arc::new(InPlaceFile::new(file, self.bytes));
        let cancel = self.ctx.store.cancel();
        // Pages have a power of two bytes, and at least 512. The hash is checked before they are read.
        if self.bytes % 512 == HASH_SIZE as u64 {
            file.check(cancel, &self.progress)?;
        }
        let database = DatabaseFile::in_place(file, cancel.clone());
        let db = Database::open_within(database, self.ctx.limits)?;
        let layout = layout(self.bytes, db.page_size())?;
        Ok(PlainSnapshot {
            base: Base::read(&db)?,
            db,
            has_checksum: layout == Layout::Checksum,
            compression: PLAIN.as_str(),
            file_bytes: self.bytes,
        })
    }

    /// Unpacks the only database in a zip archive.
    fn unzip(&self, file: impl Read + Seek) -> Result<Unpacked> {
        let left = Cell::new(LONGEST_ZIP_DIRECTORY);
        let file = LimitedFile { file, left: &left };
        let mut archive = zip::ZipArchive::new(BufReader::new(file)).map_err(zip_error)?;
        if archive.len() > MOST_IN_ZIP {
            return Err(too_many_in_zip());
        }
        left.set(usize::MAX);
        let (mut files, mut databases) = (Vec::new(), Vec::new());
        for i in 0..archive.len() {
            self.ctx.store.cancel().check()?;
            let mut head = [0; BOLT.len()];
            let mut entry = archive.by_index(i).map_err(zip_error)?;
            if entry.is_file() {
                files.push(i);
            }
            if entry.read_exact(&mut head).is_ok() && head == BOLT {
                databases.push(i);
            }
        }
        // Opening the only file says what it is, if it is no database.
        match if databases.is_empty() {
            &files[..]
        } else {
            &databases[..]
        } {
            &[only] => self.copy_out(archive.by_index(only).map_err(zip_error)?),
            _ if databases.is_empty() => {
                Err(Error::corrupt("the zip archive holds no database of etcd"))
            }
            _ => Err(Error::corrupt(
                "the zip archive holds several databases: unpack it and give one of them",
            )),
        }
    }

    /// Copies a decrypted zip archive to a temporary file. It is no larger than the encrypted one.
    fn copy_archive(&self, archive: impl Read) -> Result<TempFile> {
        let mut file = self.ctx.temp_file()?;
        let (ctx, failed) = (self.ctx, |e| self.read_error(e));
        for_each_piece(archive, ctx.store.cancel(), failed, |piece| {
            file.write_all(piece).map_err(|e| ctx.write_error(e))
        })?;
        Ok(file)
    }

    /// Copies a database to an unnamed temporary file, and hashes all bytes but the last 32.
    fn copy_out(&self, plain: impl Read) -> Result<Unpacked> {
        // A file is no smaller when it is unpacked.
        free_space::check(&self.ctx.temp_dir, self.bytes, self.name)?;
        // The LZW decoder misses bytes after its end if it is read in small pieces, so it is buffered.
        let mut plain = BufReader::with_capacity(256 << 10, plain);
        let failed = |e| self.read_error(e);
        refuse_others(plain.fill_buf().map_err(failed)?)?;
        let mut trailing_hash = TrailingHash::default();
        let mut bytes = 0;
        let ctx = self.ctx;
        let file = ctx.copy_database(plain, MOST_UNUSED, self.name, failed, |piece| {
            trailing_hash.update(piece);
            bytes += piece.len() as u64;
        })?;
        Ok(Unpacked {
            file,
            bytes,
            trailing_hash,
        })
    }

    /// Converts an error of reading: one of the disk, or one of a decompressor about the bytes.
    fn read_error(&self, e: io::Error) -> Error {
        let is_of_ours = e.get_ref().is_some_and(|inner| inner.is::<Error>());
        if is_of_ours || e.raw_os_error().is_some() {
            Error::io(format!("read {}", self.name), e)
        } else {
            Error::corrupt(format!("its compression is damaged: {e}"))
        }
    }
}

/// Puts the name of the file before an error about its content, once.
fn with_name(name: &str, e: Error) -> Error {
    match e.reason() {
        Reason::CorruptSnapshot | Reason::TooLarge | Reason::CannotDecrypt
            if !e.to_string().starts_with(&format!("{name}: ")) =>
        {
            e.at(name)
        }
        _ => e,
    }
}

/// Returns the error for a file that does not exist.
fn no_file(name: &str) -> Error {
    Reason::NoSnapshots.error(format!("there is no file {name}: check {SNAPSHOT}"))
}

/// Opens a file once, and returns its size in bytes. Fails if the path is not that of a regular file.
fn open_file(path: &Path) -> Result<(File, u64)> {
    use rustix::fs::OFlags;
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            no_file(&path.display().to_string())
        }
        _ => Error::io(format!("open {}", path.display()), e),
    };
    // Opening a pipe would wait for its writer.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path)
        .map_err(failed)?;
    let kind = file.metadata().map_err(failed)?;
    if kind.is_dir() {
        return Err(Reason::NoSnapshots.error(format!("{} is a folder", path.display())));
    }
    if !kind.is_file() {
        return Err(Reason::Usage.error(format!(
            "{SNAPSHOT} {} is not a regular file: copy its content to one first",
            path.display()
        )));
    }
    Ok((file, kind.len()))
}

/// Fails if the beginning says that it is something else than a database of etcd.
fn refuse_others(head: &[u8]) -> Result<()> {
    // The magic of ustar, behind the header's other fields. The name comes first.
    if head.get(257..262) == Some(b"ustar") {
        let name = head.split(|b| *b == 0).next().unwrap_or_default();
        let name = String::from_utf8_lossy(&name[..name.len().min(100)]);
        return Err(Error::corrupt(format!(
            "it is a tar archive, whose first file is {name}: unpack it with `tar xf`, and give the snapshot in it"
        )));
    }
    if head.starts_with(b"SQLite format 3\0") {
        return Err(Error::corrupt(
            "it is a database of SQLite, in which k3s keeps its state without etcd: there is no snapshot of etcd to read",
        ));
    }
    let is_text = |b: &u8| b.is_ascii_graphic() || b.is_ascii_whitespace();
    match head.iter().find(|b| !b.is_ascii_whitespace()) {
        Some(b'[') => Err(Error::corrupt(format!(
            "it is a delta snapshot, which holds events and no database: give the full snapshot that it follows, or the folder of both with {STORE}"
        ))),
        Some(_) if head.iter().all(is_text) => Err(Error::corrupt(
            "it is a text, and a snapshot is a database of etcd: give the file that `etcdctl snapshot save` or another tool has written",
        )),
        _ => Ok(()),
    }
}

fn too_many_in_zip() -> Error {
    Error::corrupt("the zip archive lists too many files: unpack it and give the snapshot in it")
}

/// A zip archive that fails to be read after `left` bytes.
struct LimitedFile<'a, F> {
    file: F,
    left: &'a Cell<usize>,
}

impl<F: Read> Read for LimitedFile<'_, F> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(out)?;
        let Some(left) = self.left.get().checked_sub(n) else {
            return Err(io::Error::from(too_many_in_zip()));
        };
        self.left.set(left);
        Ok(n)
    }
}

impl<F: Seek> Seek for LimitedFile<'_, F> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

fn zip_error(e: zip::result::ZipError) -> Error {
    use zip::result::ZipError;
    match e {
        ZipError::Io(e) if e.get_ref().is_some_and(|e| e.is::<Error>()) => Error::io("", e),
        ZipError::Io(e) if e.raw_os_error().is_some() => Error::io("read the zip archive", e),
        ZipError::UnsupportedArchive(why) => Error::corrupt(format!(
            "the zip archive cannot be read ({why}): unpack it first"
        )),
        ZipError::CompressionMethodNotSupported(method) => Error::corrupt(format!(
            "the zip archive is compressed with method {method}, and only stored and deflate are supported: unpack it first"
        )),
        e => Error::corrupt(format!("the zip archive is damaged: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packing_is_recognized_by_bytes_and_only_lzw_by_name() {
        let packing_of = |head: &[u8], name: &str| packing(head, name).map(Packing::as_str);
        let bolt = [0u8, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0];
        for name in ["x", "x.gz", "x.zip", "x.Z"] {
            assert_eq!(packing_of(&bolt, name).unwrap(), "none", "{name}");
            assert_eq!(
                packing_of(&[0x1f, 0x8b, 8], name).unwrap(),
                "gzip",
                "{name}"
            );
            assert_eq!(packing_of(&[0x28, 0xb5, 0x2f, 0xfd], name).unwrap(), "zstd");
            assert_eq!(packing_of(b"PK\x03\x04", name).unwrap(), "zip", "{name}");
            for second in [0x01, 0x5e, 0x9c, 0xda] {
                assert_eq!(packing_of(&[0x78, second], name).unwrap(), "zlib", "{name}");
            }
        }
        assert_eq!(packing_of(&[0x78, 0x9d], "x").unwrap(), "none");
        assert_eq!(packing_of(&[0, 1, 0], "Full-1.Z").unwrap(), "lzw");
        assert_eq!(packing_of(&[0, 1, 0], "Full-1.Z.final").unwrap(), "lzw");
        assert_eq!(packing_of(&[0, 1, 0], "Full-1").unwrap(), "none");
        for foreign in [&b"BZh9"[..], b"\xfd7zXZ\0", b"\x1f\x9d\x90"] {
            let e = packing_of(foreign, "x.Z").unwrap_err();
            assert_eq!(e.reason(), Reason::CorruptSnapshot);
            assert!(e.to_string().contains("unpack it first"), "{e}");
        }
    }

    #[test]
    fn the_layout_is_recognized_by_the_length() {
        assert_eq!(layout(8192, 4096).unwrap(), Layout::PagesOnly);
        assert_eq!(layout(8192 + 32, 4096).unwrap(), Layout::Checksum);
        for bytes in [8191, 8193, 8192 + 31, 8192 + 33, 8192 + 64] {
            let e = layout(bytes, 4096).unwrap_err();
            assert_eq!(e.reason(), Reason::CorruptSnapshot, "{bytes}");
        }
    }

    #[test]
    fn a_delta_and_an_archive_are_refused_and_a_database_is_not() {
        assert!(refuse_others(b" \n[{\"etcdEvent\"").is_err());
        assert!(refuse_others(&[0; 512]).is_ok());
        let mut tar = [0; 512];
        tar[..9].copy_from_slice(b"backup.db");
        tar[257..262].copy_from_slice(b"ustar");
        let e = refuse_others(&tar).unwrap_err();
        assert!(e.to_string().contains("backup.db: unpack it"), "{e}");
    }
}
