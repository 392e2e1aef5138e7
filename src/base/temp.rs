//! Temporary files without names, which vanish with the process.
//!
//! If snapshots are encrypted, the files are encrypted ("sealed") as well, so that no plain text reaches the
//! disk. `ops`, `backup` and `mvcc` spill into such files.

use crate::base::opt::TEMP_DIR;
use crate::base::{ReadAt, random};
use crate::error::{Error, Result};
use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher, StreamCipherSeek};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A directory for temporary files.
#[derive(Debug, Clone)]
pub struct Dir {
    path: PathBuf,
    sealed: bool,
}

/// Makes a `Dir` whose files are not sealed.
impl From<PathBuf> for Dir {
    fn from(path: PathBuf) -> Self {
        Dir::new(path, false)
    }
}

impl Dir {
    /// Files are created in `path`. If `sealed`, they are encrypted with a key that only this process has.
    pub fn new(path: impl Into<PathBuf>, sealed: bool) -> Self {
        Dir {
            path: path.into(),
            sealed,
        }
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates an empty file.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn file(&self) -> Result<TempFile> {
        let file = tempfile::tempfile_in(&self.path).map_err(|e| {
            Error::io(
                format!(
                    "create a file in the temporary directory {} (choose another with {TEMP_DIR})",
                    self.path.display()
                ),
                e,
            )
        })?;
        Ok(TempFile {
            file,
            end: 0,
            position: 0,
            seal: if self.sealed {
                Some(Seal::new()?)
            } else {
                None
            },
        })
    }
}

/// An append-only temporary file that can be read anywhere. Writes always append; they neither use nor move the
/// position that `Read` and `Seek` share.
///
/// No byte is ever overwritten: if two different texts were encrypted with the same part of the key stream,
/// both could be recovered.
#[derive(Debug)]
pub struct TempFile {
    file: File,
    end: u64,
    /// The position of [`Read`] and [`Seek`].
    position: u64,
    seal: Option<Seal>,
}

impl TempFile {
    /// Wraps an existing file, which is not sealed.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn plain(file: File) -> io::Result<Self> {
        let end = file.metadata()?.len();
        Ok(TempFile {
            file,
            end,
            position: 0,
            seal: None,
        })
    }

    /// The size of the file in bytes.
    pub fn len(&self) -> u64 {
        self.end
    }

    /// Whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.end == 0
    }

    /// Reads from `offset` on, and returns the number of bytes: 0 at the end of the file.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let n = self.file.read_at(buf, offset)?;
        if let Some(seal) = &self.seal {
            seal.apply(offset, &mut buf[..n])?;
        }
        Ok(n)
    }

    /// Returns a reader of the whole file, apart from the position of [`Read`].
    pub fn reader(&self) -> impl Read + '_ {
        WholeFile {
            file: self,
            position: 0,
        }
    }
}

struct WholeFile<'a> {
    file: &'a TempFile,
    position: u64,
}

impl Read for WholeFile<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(out, self.position)?;
        self.position += n as u64;
        Ok(n)
    }
}

impl ReadAt for TempFile {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(&self.file, buf, offset)?;
        match &self.seal {
            Some(seal) => seal.apply(offset, buf),
            None => Ok(()),
        }
    }

    fn size(&self) -> io::Result<u64> {
        ReadAt::size(&self.file)
    }
}

impl Write for TempFile {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let n = match &mut self.seal {
            None => self.file.write_at(b, self.end)?,
            Some(seal) => {
                let sealed = seal.seal(self.end, b)?;
                self.file.write_at(sealed, self.end)?
            }
        };
        self.end += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for TempFile {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.read_at(out, self.position)?;
        self.position += n as u64;
        Ok(n)
    }
}

impl Seek for TempFile {
    fn seek(&mut self, target: SeekFrom) -> io::Result<u64> {
        let position = match target {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
            SeekFrom::End(offset) => self.end.checked_add_signed(offset),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// The bytes that are encrypted under one nonce. ChaCha20's 32-bit block counter would allow 2^38 bytes; this
/// uses half of that.
const SEGMENT: u64 = 1 << 37;
/// The maximum number of bytes that one write encrypts.
const PIECE: usize = 64 << 10;

/// The encryption of one file, with a key that exists in memory only.
///
/// It hides the content but does not detect changes: only root or the same user could change the file, and they
/// could change this process as well.
struct Seal {
    key: [u8; 32],
    piece: Vec<u8>,
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seal")
    }
}

impl Seal {
    fn new() -> Result<Self> {
        Ok(Seal {
            key: random::secret_bytes()?,
            piece: Vec::new(),
        })
    }

    /// Encrypts or decrypts the bytes at `offset`: both are the same operation.
    fn apply(&self, mut offset: u64, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (segment, within) = (offset / SEGMENT, offset % SEGMENT);
            let n = (SEGMENT - within).min(bytes.len() as u64) as usize;
            let (in_segment, rest) = bytes.split_at_mut(n);
            let mut nonce = [0; 12];
            nonce[..8].copy_from_slice(&segment.to_le_bytes());
            let mut cipher = ChaCha20::new(&self.key.into(), &nonce.into());
            cipher
                .try_seek(within)
                .and_then(|()| cipher.try_apply_keystream(in_segment))
                .map_err(io::Error::other)?;
            bytes = rest;
            offset += n as u64;
        }
        Ok(())
    }

    /// Encrypts the beginning of `b`, at most [`PIECE`] bytes.
    fn seal(&mut self, offset: u64, b: &[u8]) -> io::Result<&[u8]> {
        let mut piece = std::mem::take(&mut self.piece);
        piece.clear();
        piece.extend_from_slice(&b[..b.len().min(PIECE)]);
        self.apply(offset, &mut piece)?;
        self.piece = piece;
        Ok(&self.piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes on disk.
    fn raw(file: &TempFile) -> Vec<u8> {
        let mut raw = vec![0; file.file.metadata().unwrap().len() as usize];
        FileExt::read_exact_at(&file.file, &mut raw, 0).unwrap();
        raw
    }

    #[test]
    fn a_sealed_file_reads_like_a_plain_one_and_is_encrypted_on_disk() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        let dir = tempfile::tempdir().unwrap();
        let mut plain = Dir::new(dir.path(), false).file().unwrap();
        let mut sealed = Dir::new(dir.path(), true).file().unwrap();
        let mut all = Vec::new();
        for _ in 0..crate::rounds(60, 300) {
            match rng.u8(..4) {
                // Some writes are longer than a piece, and most cross the borders of cipher blocks.
                0 => {
                    let mut b = vec![0; rng.usize(..3 * PIECE / 2)];
                    rng.fill(&mut b);
                    for file in [&mut plain, &mut sealed] {
                        file.write_all(&b).unwrap();
                    }
                    all.extend_from_slice(&b);
                }
                1 => {
                    let at = rng.u64(..=all.len() as u64);
                    for file in [&mut plain, &mut sealed] {
                        file.seek(SeekFrom::Start(at)).unwrap();
                        file.seek(SeekFrom::Current(-(at.min(3) as i64))).unwrap();
                    }
                }
                2 => {
                    let mut b = [vec![0; rng.usize(..200_000)], Vec::new()];
                    b[1] = b[0].clone();
                    let n = plain.read(&mut b[0]).unwrap();
                    assert_eq!(sealed.read(&mut b[1]).unwrap(), n);
                    assert!(b[0] == b[1]);
                }
                _ => {
                    let from = rng.usize(..=all.len());
                    let to = from + rng.usize(..=all.len() - from);
                    for file in [&plain, &sealed] {
                        let mut b = vec![0; to - from];
                        ReadAt::read_exact_at(file, &mut b, from as u64).unwrap();
                        assert!(b == all[from..to]);
                    }
                }
            }
            assert_eq!(
                plain.stream_position().unwrap(),
                sealed.stream_position().unwrap()
            );
        }
        assert_eq!(
            (plain.len(), sealed.len()),
            (all.len() as u64, all.len() as u64)
        );
        assert_eq!(ReadAt::size(&sealed).unwrap(), all.len() as u64);
        assert!(raw(&plain) == all);
        // Bytes on disk equal the written ones only by chance (1 of 256).
        let raw = raw(&sealed);
        let same = raw.iter().zip(&all).filter(|(a, b)| a == b).count();
        assert!(same < all.len() / 100, "{same} of {}", all.len());
        let mut b = [0; 1];
        assert_eq!(sealed.read_at(&mut b, all.len() as u64).unwrap(), 0);
        assert!(ReadAt::read_exact_at(&sealed, &mut b, all.len() as u64).is_err());
        // The files had no names.
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn every_file_has_its_own_key_stream() {
        let dir = Dir::new(std::env::temp_dir(), true);
        let zeros = vec![0; 100_000];
        let streams: Vec<Vec<u8>> = (0..3)
            .map(|_| {
                let mut file = dir.file().unwrap();
                file.write_all(&zeros).unwrap();
                raw(&file)
            })
            .collect();
        for (i, stream) in streams.iter().enumerate() {
            // A key stream repeats neither another file's nor itself.
            assert!(streams[..i].iter().all(|other| other[..64] != stream[..64]));
            let mut blocks: Vec<&[u8]> = stream.chunks_exact(64).collect();
            let all = blocks.len();
            blocks.sort_unstable();
            blocks.dedup();
            assert_eq!(blocks.len(), all);
        }
    }

    #[test]
    fn each_segment_has_its_own_key_stream() {
        let seal = Seal::new().unwrap();
        let stream = |offset: u64, n: usize| {
            let mut zeros = vec![0; n];
            seal.apply(offset, &mut zeros).unwrap();
            zeros
        };
        let across = stream(SEGMENT - 100, 200);
        assert_eq!(across[..100], stream(SEGMENT - 100, 100));
        assert_eq!(across[100..], stream(SEGMENT, 100));
        assert_ne!(across[100..], stream(0, 100));
        assert_ne!(across[100..], stream(2 * SEGMENT, 100));
    }

    #[test]
    fn the_error_for_a_missing_directory_names_it_and_the_flag() {
        let e = Dir::new("/nowhere/at/all", true).file().unwrap_err();
        let message = e.to_string();
        assert!(
            message.contains("/nowhere/at/all") && message.contains("temp-dir"),
            "{message}"
        );
    }
}
