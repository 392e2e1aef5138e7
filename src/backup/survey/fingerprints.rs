//! Fingerprints of records: their format in the temporary directory, and a reader.
//!
//! A fingerprint takes the same number of bytes whatever the record is.

use super::Survey;
use crate::base::temp::TempFile;
use crate::base::{ReadAt, fixed_record};
use crate::error::{Error, Result};
use crate::mvcc::{KeyValue, RecordKey, Revision};
use sha2::{Digest, Sha256};

/// The size of a stored [`Fingerprint`] in bytes.
const FINGERPRINT_BYTES: usize = fixed_record::BYTES;
/// The number of fingerprints that are read at once.
pub(super) const BLOCK: usize = if cfg!(test) { 4 } else { 512 };

/// Where the fingerprints of a snapshot are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredFingerprints {
    /// The index of the file in [`FingerprintFiles`](super::FingerprintFiles).
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) count: usize,
    /// The revision of the first fingerprint of each block: an index to find a revision.
    pub(super) blocks: Vec<Revision>,
}

/// The fingerprint of one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub(super) main: Revision,
    pub(super) sub: u32,
    pub(super) tombstone: bool,
    /// A hash of the key.
    pub(super) key: u64,
    pub(super) create: i64,
    pub(super) version: i64,
    /// A hash of the whole record.
    pub(super) digest: u64,
}

impl Fingerprint {
    pub(super) fn new(rk: RecordKey, kv: &KeyValue<'_>, record: &[u8]) -> Self {
        Fingerprint {
            main: rk.main,
            sub: rk.sub,
            tombstone: rk.tombstone,
            key: short_hash(kv.key),
            create: kv.create_revision.0,
            version: kv.version,
            digest: short_hash(record),
        }
    }

    pub(super) fn encode(&self) -> [u8; FINGERPRINT_BYTES] {
        fixed_record::encode([
            self.main.0 as u64,
            u64::from(self.sub) | u64::from(self.tombstone) << 32,
            self.key,
            self.create as u64,
            self.version as u64,
            self.digest,
        ])
    }

    pub(super) fn decode(b: &[u8; FINGERPRINT_BYTES]) -> Self {
        let [main, sub, key, create, version, digest] = fixed_record::decode(b);
        Fingerprint {
            main: Revision(main as i64),
            sub: sub as u32,
            tombstone: sub >> 32 != 0,
            key,
            create: create as i64,
            version: version as i64,
            digest,
        }
    }

    pub(super) fn order(&self) -> (Revision, u32) {
        (self.main, self.sub)
    }

    /// Returns whether this can be the next change of its key after `state`.
    pub(super) fn follows(&self, state: &Fingerprint) -> bool {
        let next = (state.create, state.version.wrapping_add(1));
        if state.tombstone {
            self.creates_key()
        } else {
            self.tombstone || (self.create, self.version) == next
        }
    }

    /// Returns whether this change creates its key.
    pub(super) fn creates_key(&self) -> bool {
        !self.tombstone && self.version == 1
    }
}

pub(super) fn short_hash(b: &[u8]) -> u64 {
    let mut w = [0; 8];
    w.copy_from_slice(&Sha256::digest(b)[..8]);
    u64::from_le_bytes(w)
}

/// Reads the fingerprints of a snapshot in their order, a block at a time.
pub(super) struct FingerprintReader<'f> {
    pub(super) file: &'f TempFile,
    pub(super) survey: &'f Survey,
    /// The index of the next fingerprint.
    pub(super) next: usize,
    /// The last revision that is given out.
    pub(super) until: Revision,
    /// The block that is in `buf`.
    pub(super) block: Option<usize>,
    pub(super) buf: Vec<u8>,
}

impl FingerprintReader<'_> {
    /// Reads a block into `buf`.
    pub(super) fn read_block(&mut self, block: usize) -> Result<()> {
        if self.block == Some(block) {
            return Ok(());
        }
        let first = block * BLOCK;
        let n = BLOCK.min(self.survey.stored.count - first);
        self.buf.resize(n * FINGERPRINT_BYTES, 0);
        let offset = self.survey.stored.offset + (first * FINGERPRINT_BYTES) as u64;
        ReadAt::read_exact_at(self.file, &mut self.buf, offset)
            .map_err(|e| Error::io("read fingerprints from the temporary directory", e))?;
        self.block = Some(block);
        Ok(())
    }

    pub(super) fn encoded(&self) -> &[[u8; FINGERPRINT_BYTES]] {
        self.buf.as_chunks().0
    }

    /// The fingerprints of the block that was read.
    pub(super) fn block(
        &self,
    ) -> impl DoubleEndedIterator<Item = Fingerprint> + ExactSizeIterator + '_ {
        self.encoded().iter().map(Fingerprint::decode)
    }

    /// Goes to the first fingerprint at or above `from`.
    pub(super) fn seek(&mut self, from: Revision) -> Result<()> {
        // All blocks before this one are below `from`, and all blocks after it are not.
        let block = self.survey.stored.blocks.partition_point(|&b| b < from);
        let Some(block) = block.checked_sub(1) else {
            self.next = 0;
            return Ok(());
        };
        self.read_block(block)?;
        let below = self
            .encoded()
            .partition_point(|b| Fingerprint::decode(b).main < from);
        self.next = block * BLOCK + below;
        Ok(())
    }

    /// Returns the next fingerprint, up to `until`.
    pub(super) fn next(&mut self) -> Result<Option<Fingerprint>> {
        if self.next == self.survey.stored.count {
            return Ok(None);
        }
        self.read_block(self.next / BLOCK)?;
        let e = Fingerprint::decode(&self.encoded()[self.next % BLOCK]);
        self.next += 1;
        Ok(Some(e).filter(|e| e.main <= self.until))
    }
}
