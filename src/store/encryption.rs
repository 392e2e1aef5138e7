//! Client-side encryption: age files for X25519 recipients (<https://age-encryption.org/v1>).
//!
//! What is encrypted is the object as it would be stored otherwise: compressed, with its checksum
//! inside. `job` calls it.

use crate::error::{Error, Reason, Result};
use age::stream::{StreamReader, StreamWriter};
use age::x25519::{Identity, Recipient};
use age::{DecryptError, Decryptor, Encryptor};
use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::sync::Arc;

const BUFFER: usize = 256 << 10;

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
            return Err(Error::new(
                Reason::CannotDecrypt,
                "it is encrypted: give the age identity that opens it with --age-identity",
            ));
        }
        let failed = |e: DecryptError| match e {
            DecryptError::Io(e) if e.kind() != io::ErrorKind::UnexpectedEof => {
                Error::io("read an encrypted snapshot", e)
            }
            DecryptError::NoMatchingKeys | DecryptError::KeyDecryptionFailed => Error::new(
                Reason::CannotDecrypt,
                "it is encrypted for others: none of the identities given with --age-identity opens it",
            ),
            DecryptError::ExcessiveWork { .. } => Error::new(
                Reason::CannotDecrypt,
                "it is encrypted with a passphrase: only X25519 identities open snapshots",
            ),
            e => Error::corrupt(format!("its age header is damaged: {e}")),
        };
        let inner = BufReader::with_capacity(BUFFER, inner);
        let decryptor = Decryptor::new_buffered(inner).map_err(failed)?;
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

/// A stream that is decrypted as it is read; every 64 KiB are authenticated before they are given.
pub struct Opened<R>(StreamReader<BufReader<R>>);

impl<R: Read> Read for Opened<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out).map_err(|e| {
            let of_source =
                e.raw_os_error().is_some() || e.get_ref().is_some_and(|i| i.is::<Error>());
            match of_source {
                true => e,
                false => Error::corrupt(format!("its encryption is damaged: {e}")).into(),
            }
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
