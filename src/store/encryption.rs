//! Client-side encryption: age files for X25519 recipients (<https://age-encryption.org/v1>).
//!
//! Encrypts an object as it would otherwise be stored: compressed, with its checksum inside. Does not read
//! keys from files or flags: `cli` does.

use crate::base::opt::AGE_IDENTITY;
use crate::error::{Error, Reason, Result};
use age::stream::{StreamReader, StreamWriter};
use age::x25519::{Identity, Recipient};
use age::{DecryptError, Decryptor, Encryptor};
use std::fmt;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read, Write};
use std::sync::Arc;

const BUFFER: usize = 256 << 10;
/// The first bytes of every age file.
pub const MAGIC: &[u8] = b"age-encryption.org/v1\n";
/// The first bytes of an age file in its text form (armored).
pub const ARMORED: &[u8] = b"-----BEGIN AGE ENCRYPTED FILE-----";
/// The most bytes of a header; a longer one is damaged. A recipient takes about a hundred.
const MAX_HEADER: u64 = 128 << 10;
/// The most recipients of a new snapshot. Their header is shorter than [`MAX_HEADER`].
pub const MAX_RECIPIENTS: usize = 1000;

/// The identities that decrypt snapshots, and the recipients for whom new ones are encrypted.
#[derive(Clone, Default)]
pub struct Keys {
    identities: Arc<Vec<Identity>>,
    recipients: Arc<Vec<Recipient>>,
}

/// Shows numbers, since identities are secret.
impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (identities, recipients) = (self.identities.len(), self.recipients.len());
        write!(f, "Keys({identities} identities, {recipients} recipients)")
    }
}

impl Keys {
    /// Returns keys. Both lists may be empty.
    pub fn new(identities: Vec<Identity>, recipients: Vec<Recipient>) -> Self {
        Keys {
            identities: Arc::new(identities),
            recipients: Arc::new(recipients),
        }
    }

    /// Returns whether there is any key: then the backup is an encrypted one.
    pub fn are_given(&self) -> bool {
        self.encrypts() || self.decrypts()
    }

    /// Returns whether new snapshots are encrypted: there is a recipient.
    pub fn encrypts(&self) -> bool {
        !self.recipients.is_empty()
    }

    /// Returns whether encrypted snapshots can be read: there is an identity.
    pub fn decrypts(&self) -> bool {
        !self.identities.is_empty()
    }

    /// Decrypts a stream. Reads its header at once.
    ///
    /// # Errors
    /// Fails with `CannotDecrypt` if no identity fits, with `CorruptSnapshot` if the header is damaged, and
    /// with the errors of `inner`. Damage behind the header shows while the stream is read: a
    /// `CorruptSnapshot` in an `io::Error`.
    pub fn decrypt<R: Read>(&self, inner: R) -> Result<DecryptingReader<R>> {
        if !self.decrypts() {
            return Err(Reason::CannotDecrypt.error(if self.encrypts() {
                format!("it is encrypted, and recipients open nothing: give {AGE_IDENTITY}, too")
            } else {
                format!("it is encrypted: give the age identity that opens it with {AGE_IDENTITY}")
            }));
        }
        let failed = |e: DecryptError| {
            match e {
            DecryptError::Io(e) if is_source_error(&e) => Error::io(READING, e),
            DecryptError::NoMatchingKeys | DecryptError::KeyDecryptionFailed => Reason::CannotDecrypt.error(format!("none of the identities given with {AGE_IDENTITY} opens it: it is encrypted for others, or its header is damaged")),
            e => Error::corrupt(format!("its age header is damaged: {e}")),
        }
        };
        let mut inner = BufReader::with_capacity(BUFFER, inner);
        let header = header(&mut inner)?;
        let decryptor =
            Decryptor::new_buffered(Cursor::new(header).chain(inner)).map_err(failed)?;
        if decryptor.is_scrypt() {
            return Err(Reason::CannotDecrypt.error(
                "it is encrypted with a passphrase: only X25519 identities open snapshots",
            ));
        }
        let identities = self.identities.iter().map(|i| i as &dyn age::Identity);
        Ok(DecryptingReader(
            decryptor.decrypt(identities).map_err(failed)?,
        ))
    }

    /// Encrypts a stream, or passes it on if there is no recipient.
    ///
    /// # Errors
    /// Fails with the errors of writing the header to `inner`.
    pub fn encrypt<W: Write>(&self, inner: W) -> Result<EncryptingWriter<W>> {
        if !self.encrypts() {
            return Ok(EncryptingWriter::Plain(inner));
        }
        let recipients = self.recipients.iter().map(|r| r as &dyn age::Recipient);
        let encryptor = Encryptor::with_recipients(recipients)
            .map_err(|e| Error::internal(format!("the recipients cannot be used together: {e}")))?;
        let stream = encryptor
            .wrap_output(inner)
            .map_err(|e| Error::io("write an encrypted snapshot", e))?;
        Ok(EncryptingWriter::Encrypted(stream))
    }
}

const READING: &str = "read an encrypted snapshot";

/// Returns whether an error while reading comes from the source, and is not damage.
fn is_source_error(e: &io::Error) -> bool {
    e.raw_os_error().is_some() || e.get_ref().is_some_and(|inner| inner.is::<Error>())
}

/// Reads a header, up to the end of its last line, which has the MAC.
fn header(inner: &mut impl BufRead) -> Result<Vec<u8>> {
    let mut header = Vec::new();
    loop {
        let from = header.len();
        let left = MAX_HEADER - from as u64;
        let line = inner.take(left).read_until(b'\n', &mut header);
        line.map_err(|e| Error::io(READING, e))?;
        let line = &header[from..];
        let damaged =
            |what: &str| Err(Error::corrupt(format!("its age header is damaged: {what}")));
        if from == 0 && line != MAGIC {
            return if line.starts_with(ARMORED) {
                Err(Error::corrupt(
                    "it is an age file in its text form (armored): remove the armor first",
                ))
            } else {
                damaged("it is not an age file")
            };
        }
        match line.last() {
            Some(b'\n') if line.starts_with(b"---") => return Ok(header),
            Some(b'\n') => {}
            _ if header.len() as u64 == MAX_HEADER => return damaged("it does not end"),
            _ => return damaged("it is cut short"),
        }
    }
}

/// Decrypts a stream while it is read. Each 64 KiB are authenticated before they are returned.
pub struct DecryptingReader<R>(StreamReader<Chain<Cursor<Vec<u8>>, BufReader<R>>>);

impl<R: Read> Read for DecryptingReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out).map_err(|e| {
            if is_source_error(&e) {
                e
            } else {
                Error::corrupt(format!("its encryption is damaged: {e}")).into()
            }
        })
    }
}

/// Encrypts a stream while it is written, or passes it on.
pub enum EncryptingWriter<W: Write> {
    /// Passes the bytes on.
    Plain(W),
    /// Encrypts the bytes.
    Encrypted(StreamWriter<W>),
}

impl<W: Write> EncryptingWriter<W> {
    /// Writes the end of the encryption and returns the inner writer. A file without the end cannot be read.
    ///
    /// # Errors
    /// Fails with the errors of the inner writer.
    pub fn finish(self) -> io::Result<W> {
        match self {
            EncryptingWriter::Plain(inner) => Ok(inner),
            EncryptingWriter::Encrypted(stream) => stream.finish(),
        }
    }
}

impl<W: Write> Write for EncryptingWriter<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        match self {
            EncryptingWriter::Plain(inner) => inner.write(b),
            EncryptingWriter::Encrypted(stream) => stream.write(b),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            EncryptingWriter::Plain(inner) => inner.flush(),
            EncryptingWriter::Encrypted(stream) => stream.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        let identity = Identity::generate();
        let recipient = identity.to_public();
        Keys::new(vec![identity], vec![recipient])
    }

    fn refused(keys: &Keys, source: impl Read) -> Error {
        let opened = keys.decrypt(source);
        opened.map(drop).expect_err("it is not an age file")
    }

    #[test]
    fn an_endless_header_is_damage_and_takes_little_memory() {
        let keys = keys();
        let lines = "-> X25519 some\nbody\n".repeat(100_000);
        for source in [
            Box::new(io::repeat(b'-')) as Box<dyn Read>,
            Box::new(io::repeat(b'\n')),
            Box::new(MAGIC.chain(io::repeat(b'-'))),
            Box::new(MAGIC.chain(lines.as_bytes()).chain(io::repeat(b'x'))),
        ] {
            let mut source = source.take(1 << 40);
            let e = refused(&keys, &mut source);
            assert_eq!(e.reason(), Reason::CorruptSnapshot, "{e}");
            // No more is read than was buffered.
            assert!((1 << 40) - source.limit() < 1 << 20, "{e}");
        }
        let e = refused(&keys, ARMORED);
        assert!(e.to_string().contains("armor"), "{e}");
    }

    #[test]
    fn an_error_of_the_source_keeps_its_reason() {
        struct Failing;
        impl Read for Failing {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(Reason::StoreUnreachable.error("it is away").into())
            }
        }
        let keys = keys();
        assert_eq!(refused(&keys, Failing).reason(), Reason::StoreUnreachable);
        let mut sealed = keys.encrypt(Vec::new()).unwrap();
        sealed.write_all(&[7; 300_000]).unwrap();
        let whole = sealed.finish().unwrap();
        let mut opened = keys.decrypt(whole[..200_000].chain(Failing)).unwrap();
        let e = io::copy(&mut opened, &mut io::sink()).unwrap_err();
        assert_eq!(Error::io("read", e).reason(), Reason::StoreUnreachable);
        let mut opened = keys.decrypt(whole.as_slice()).unwrap();
        assert_eq!(io::copy(&mut opened, &mut io::sink()).unwrap(), 300_000);
    }

    #[test]
    fn keys_are_not_shown() {
        assert_eq!(format!("{:?}", keys()), "Keys(1 identities, 1 recipients)");
    }
}
