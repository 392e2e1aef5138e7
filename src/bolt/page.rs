//! The layout of pages: constants and the few structures every page is made of.
//!
//! It neither reads nor writes files. `reader` and `writer` share it. All integers are little
//! endian, as bbolt writes its structures in the host's order and etcd runs on little-endian hosts.

/// The number of a page; its offset in the file is `PageId × page size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u64);

impl PageId {
    /// The page behind this one.
    pub fn next(self) -> PageId {
        PageId(self.0 + 1)
    }
}

impl std::fmt::Display for PageId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Bytes of a page's header: id 8, flags 2, count 2, overflow 4.
pub const PAGE_HEADER_SIZE: usize = 16;
/// Bytes of one element in a leaf page: flags 4, pos 4, key size 4, value size 4.
pub const LEAF_ELEMENT_SIZE: usize = 16;
/// Bytes of one element in a branch page: pos 4, key size 4, page id 8.
pub const BRANCH_ELEMENT_SIZE: usize = 16;
/// Bytes of a bucket's header: root page id 8, sequence 8.
pub const BUCKET_HEADER_SIZE: usize = 16;

/// `flags` of a branch page.
pub const BRANCH_PAGE_FLAG: u16 = 0x01;
/// `flags` of a leaf page.
pub const LEAF_PAGE_FLAG: u16 = 0x02;
/// `flags` of a meta page.
pub const META_PAGE_FLAG: u16 = 0x04;
/// `flags` of a freelist page.
pub const FREELIST_PAGE_FLAG: u16 = 0x10;
/// `flags` of a leaf element whose value is a bucket.
pub const BUCKET_LEAF_FLAG: u32 = 0x01;

/// The first field of a meta.
pub const MAGIC: u32 = 0xED0C_DAED;
/// The only version of the format.
pub const VERSION: u32 = 2;
/// Bytes of a meta, its checksum included.
pub const META_SIZE: usize = 64;
/// Where a note may stand in the first meta page: behind the meta. bbolt leaves these bytes zero,
/// never reads them, and zeroes them again with its next transaction or copy.
pub const NOTE_AT: usize = PAGE_HEADER_SIZE + META_SIZE;
/// The longest key that bbolt takes.
pub const MAX_KEY_SIZE: u32 = 32768;
/// Page sizes that bbolt can write: the operating system's, a power of two.
pub const PAGE_SIZES: std::ops::RangeInclusive<usize> = 1024..=65536;

/// The head of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageHeader {
    /// The page's own number.
    pub id: PageId,
    /// What kind of page it is.
    pub flags: u16,
    /// Elements in it.
    pub count: u16,
    /// Pages that follow and belong to it.
    pub overflow: u32,
}

impl PageHeader {
    /// Reads a header; `None` if `b` is shorter than one.
    pub fn decode(b: &[u8]) -> Option<Self> {
        Some(PageHeader {
            id: PageId(u64_at(b, 0)?),
            flags: u16_at(b, 8)?,
            count: u16_at(b, 10)?,
            overflow: u32_at(b, 12)?,
        })
    }

    /// Writes the header at the start of `b`, which must have room.
    pub fn encode(&self, b: &mut [u8]) {
        b[0..8].copy_from_slice(&self.id.0.to_le_bytes());
        b[8..10].copy_from_slice(&self.flags.to_le_bytes());
        b[10..12].copy_from_slice(&self.count.to_le_bytes());
        b[12..16].copy_from_slice(&self.overflow.to_le_bytes());
    }
}

/// The body of a meta page: where the tree begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Bytes of a page.
    pub page_size: u32,
    /// The root page of the root bucket.
    pub root: PageId,
    /// The root bucket's sequence.
    pub sequence: u64,
    /// The page of the freelist, or `u64::MAX` where none is stored.
    pub freelist: PageId,
    /// The number of pages in use: all page ids are below it.
    pub high_water: PageId,
    /// The transaction that wrote it; of two valid metas the higher one counts.
    pub txid: u64,
}

impl Meta {
    /// Reads a meta (the bytes after the page header) and checks magic, version, checksum and
    /// page size.
    ///
    /// # Errors
    /// A short reason, in words.
    pub fn decode(b: &[u8]) -> Result<Self, &'static str> {
        let short = "it is cut short";
        if b.len() < META_SIZE {
            return Err(short);
        }
        if u32_at(b, 0).ok_or(short)? != MAGIC {
            return Err("it does not begin with bbolt's magic number");
        }
        if u32_at(b, 4).ok_or(short)? != VERSION {
            return Err("it has an unknown format version");
        }
        if u64_at(b, 56).ok_or(short)? != fnv1a64(&b[..56]) {
            return Err("its checksum is wrong");
        }
        let meta = Meta {
            page_size: u32_at(b, 8).ok_or(short)?,
            root: PageId(u64_at(b, 16).ok_or(short)?),
            sequence: u64_at(b, 24).ok_or(short)?,
            freelist: PageId(u64_at(b, 32).ok_or(short)?),
            high_water: PageId(u64_at(b, 40).ok_or(short)?),
            txid: u64_at(b, 48).ok_or(short)?,
        };
        if !meta.page_size.is_power_of_two() || !PAGE_SIZES.contains(&(meta.page_size as usize)) {
            return Err("its page size is not a power of two from 1 KiB to 64 KiB");
        }
        Ok(meta)
    }

    /// Bytes of all pages in use.
    pub fn bytes(&self) -> u64 {
        self.high_water.0.saturating_mul(u64::from(self.page_size))
    }

    /// Writes the meta with its checksum at the start of `b`, which must have room.
    pub fn encode(&self, b: &mut [u8]) {
        b[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        b[4..8].copy_from_slice(&VERSION.to_le_bytes());
        b[8..12].copy_from_slice(&self.page_size.to_le_bytes());
        b[12..16].copy_from_slice(&[0; 4]);
        b[16..24].copy_from_slice(&self.root.0.to_le_bytes());
        b[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        b[32..40].copy_from_slice(&self.freelist.0.to_le_bytes());
        b[40..48].copy_from_slice(&self.high_water.0.to_le_bytes());
        b[48..56].copy_from_slice(&self.txid.to_le_bytes());
        let sum = fnv1a64(&b[..56]);
        b[56..64].copy_from_slice(&sum.to_le_bytes());
    }
}

/// FNV-1a, 64 bits: bbolt's checksum of a meta.
fn fnv1a64(b: &[u8]) -> u64 {
    b.iter().fold(0xcbf2_9ce4_8422_2325, |h, &x| {
        (h ^ u64::from(x)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

pub(crate) fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(b.get(at..at + 2)?.try_into().ok()?))
}

pub(crate) fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?))
}
