//! Client-side encryption: age files for X25519 recipients (<https://age-encryption.org/v1>).
//!
//! What is encrypted is the object as it would be stored otherwise: compressed, with its checksum
//! inside. `ops` calls it.

use crate::error::{Error, Reason, Result};
use age::stream::{StreamReader, StreamWriter};
use age::x25519::{Identity, Recipient};
use age::{DecryptError, Decryptor, Encryptor};
use std::fmt;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read, Write};
use std::sync::Arc;

const BUFFER: usize = 256 << 10;
/// What every age file begins with.
pub const MAGIC: &[u8] = b"age-encryption.org/v1\n";
/// What an age file begins with that was made text for mails.
pub const ARMORED: &[u8] = b"-----BEGIN AGE ENCRYPTED FILE-----";
/// Bytes of a header; what is longer is damaged. Each recipient takes about a hundred.
const MAX_HEADER: u64 = 128 << 10;
/// Whom new snapshots can be encrypted for at once, so that headers stay as short.
pub const MAX_RECIPIENTS: usize = 1000;

/// The identities that open snapshots, and the recipients that new ones are encrypted for.
#[derive(Clone, Default)]
pub struct Keys {
    identities: Arc<Vec<Identity>>,
    recipients: Arc<Vec<Recipient>>,
}

/// Identities are secrets.
impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (opens, seals) = (self.identities.len(), self.recipients.len());
        write!(f, "Keys({opens} identities, {seals} recipients)")
    }
}

impl Keys {
    /// Those keys.
    pub fn new(identities: Vec<Identity>, recipients: Vec<Recipient>) -> Self {
        Keys {
            identities: Arc::new(identities),
            recipients: Arc::new(recipients),
        }
    }

    /// Whether new snapshots are encrypted.
    pub fn encrypts(&self) -> bool {
        !self.recipients.is_empty()
    }

    /// Whether there is an identity to open snapshots with.
    pub fn decrypts(&self) -> bool {
        !self.identities.is_empty()
    }

    /// Opens an encrypted stream; reads its header.
    ///
    /// # Errors
    /// `CannotDecrypt` where no identity fits; `CorruptSnapshot`, also behind `std::io::Error` while
    /// reading; those of `inner`.
    pub fn decrypt<R: Read>(&self, inner: R) -> Result<Opened<R>> {
        if !self.decrypts() {
            return Err(Reason::CannotDecrypt.error(
                "it is encrypted: give the age identity that opens it with --age-identity",
            ));
        }
        let failed = |e: DecryptError| {
            match e {
            DecryptError::Io(e) if is_of_source(&e) => Error::io(READING, e),
            DecryptError::NoMatchingKeys | DecryptError::KeyDecryptionFailed => Reason::CannotDecrypt.error("none of the identities given with --age-identity opens it: it is encrypted for others, or its header is damaged"),
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
        Ok(Opened(decryptor.decrypt(identities).map_err(failed)?))
    }

    /// Encrypts what is written, if there is anybody to encrypt it for.
    ///
    /// # Errors
    /// Those of writing the header to `inner`.
    pub fn encrypt<W: Write>(&self, inner: W) -> Result<Sealed<W>> {
        if !self.encrypts() {
            return Ok(Sealed::Plain(inner));
        }
        let recipients = self.recipients.iter().map(|r| r as &dyn age::Recipient);
        let encryptor = Encryptor::with_recipients(recipients)
            .map_err(|e| Error::internal(format!("recipients that do not go together: {e}")))?;
        let stream = encryptor
            .wrap_output(inner)
            .map_err(|e| Error::io("write an encrypted snapshot", e))?;
        Ok(Sealed::Encrypted(stream))
    }
}

const READING: &str = "read an encrypted snapshot";

/// Whether an error while reading is that of what is read, and no damage in it.
fn is_of_source(e: &io::Error) -> bool {
    e.raw_os_error().is_some() || e.get_ref().is_some_and(|inner| inner.is::<Error>())
}

/// Reads up to the end of the last line of a header: the one of its MAC.
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
            return match line.starts_with(ARMORED) {
                true => Err(Error::corrupt(
                    "it is an age file in its form for mails (armored): take the armor off first",
                )),
                false => damaged("it is no age file"),
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

/// Checks what can be checked of an age file of so many bytes without an identity: that its header is one for X25519
/// recipients, and that there is room for a snapshot behind it. It reads no more than the header.
///
/// # Errors
/// `CorruptSnapshot`; those of `inner`.
pub fn check_header(inner: impl Read, bytes: u64) -> Result<()> {
    /// The nonce, a tag, and fewer bytes than any snapshot has.
    const LEAST: u64 = 16 + 16 + 64;
    let mut inner = BufReader::with_capacity(BUFFER.min(MAX_HEADER as usize), inner);
    let header = header(&mut inner)?;
    if bytes < header.len() as u64 + LEAST {
        return Err(Error::corrupt(format!(
            "it is cut short: it has {bytes} bytes, {} of them its age header",
            header.len()
        )));
    }
    match Decryptor::new_buffered(Cursor::new(header).chain(inner)) {
        Ok(decryptor) if decryptor.is_scrypt() => Err(Error::corrupt(
            "it is encrypted with a passphrase: snapshots are for X25519 recipients",
        )),
        Ok(_) => Ok(()),
        Err(DecryptError::Io(e)) if is_of_source(&e) => Err(Error::io(READING, e)),
        Err(e) => Err(Error::corrupt(format!("its age header is damaged: {e}"))),
    }
}

/// A stream that is decrypted as it is read; every 64 KiB are authenticated before they are given.
pub struct Opened<R>(StreamReader<Chain<Cursor<Vec<u8>>, BufReader<R>>>);

impl<R: Read> Read for Opened<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out).map_err(|e| match is_of_source(&e) {
            true => e,
            false => Error::corrupt(format!("its encryption is damaged: {e}")).into(),
        })
    }
}

/// A stream that is encrypted as it is written, or passes as it is.
pub enum Sealed<W: Write> {
    /// As it is.
    Plain(W),
    /// Encrypted.
    Encrypted(StreamWriter<W>),
}

impl<W: Write> Sealed<W> {
    /// Writes the end, and gives the writer below. Without it what was written cannot be read.
    ///
    /// # Errors
    /// Those of `inner`.
    pub fn finish(self) -> io::Result<W> {
        match self {
            Sealed::Plain(inner) => Ok(inner),
            Sealed::Encrypted(stream) => stream.finish(),
        }
    }
}

impl<W: Write> Write for Sealed<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        match self {
            Sealed::Plain(inner) => inner.write(b),
            Sealed::Encrypted(stream) => stream.write(b),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Sealed::Plain(inner) => inner.flush(),
            Sealed::Encrypted(stream) => stream.flush(),
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
        opened.map(drop).expect_err("it is no age file")
    }

    #[test]
    fn a_header_without_an_end_is_damage_and_takes_no_memory() {
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
            // No more than was buffered.
            assert!((1 << 40) - source.limit() < 1 << 20, "{e}");
        }
        let e = refused(&keys, ARMORED);
        assert!(e.to_string().contains("armor"), "{e}");
    }

    #[test]
    fn what_fails_below_keeps_its_reason() {
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
