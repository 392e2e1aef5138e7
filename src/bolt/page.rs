//! The layout of bbolt's pages: constants, the page header and the meta.
//!
//! It reads and writes no files; `reader` and `writer` share it. All integers are little endian: bbolt writes
//! them in the byte order of the host, and etcd runs on little-endian hosts.

/// The number of a page; its offset in the file is `PageId × page size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u64);

impl PageId {
    /// Returns the number of the next page.
    pub fn next(self) -> PageId {
        PageId(self.0 + 1)
    }
}

impl std::fmt::Display for PageId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The size of a page header in bytes: id 8, flags 2, count 2, overflow 4.
pub const PAGE_HEADER_SIZE: usize = 16;
/// The size of an element of a leaf page in bytes: flags 4, pos 4, key size 4, value size 4.
pub const LEAF_ELEMENT_SIZE: usize = 16;
/// The size of an element of a branch page in bytes: pos 4, key size 4, page id 8.
pub const BRANCH_ELEMENT_SIZE: usize = 16;
/// The size of a bucket header in bytes: root page id 8, sequence 8.
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
/// The size of a meta in bytes, including its checksum.
pub const META_SIZE: usize = 64;
/// The offset of our note in the first meta page: the first byte after the meta. bbolt never reads the bytes
/// from here on, and overwrites them with zeros in its next transaction or copy.
pub const NOTE_AT: usize = PAGE_HEADER_SIZE + META_SIZE;
/// The longest key that bbolt accepts, in bytes.
pub const MAX_KEY_SIZE: u32 = 32768;
/// The page sizes that bbolt can write, in bytes: that of the operating system, a power of two.
pub const PAGE_SIZES: std::ops::RangeInclusive<usize> = 1024..=65536;

/// The header of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageHeader {
    /// The page's own number.
    pub id: PageId,
    /// The kind of page, such as [`LEAF_PAGE_FLAG`].
    pub flags: u16,
    /// The number of elements.
    pub count: u16,
    /// The number of following pages that belong to this one.
    pub overflow: u32,
}

impl PageHeader {
    /// Decodes a header. Returns `None` if `b` is too short.
    pub fn decode(b: &[u8]) -> Option<Self> {
        Some(PageHeader {
            id: PageId(u64_at(b, 0)?),
            flags: u16_at(b, 8)?,
            count: u16_at(b, 10)?,
            overflow: u32_at(b, 12)?,
        })
    }

    /// Writes the header to the start of `b`, which must have [`PAGE_HEADER_SIZE`] bytes.
    pub fn encode(&self, b: &mut [u8]) {
        b[0..8].copy_from_slice(&self.id.0.to_le_bytes());
        b[8..10].copy_from_slice(&self.flags.to_le_bytes());
        b[10..12].copy_from_slice(&self.count.to_le_bytes());
        b[12..16].copy_from_slice(&self.overflow.to_le_bytes());
    }
}

/// The body of a meta page, which locates the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// The size of a page in bytes.
    pub page_size: u32,
    /// The root page of the root bucket.
    pub root: PageId,
    /// The root bucket's sequence.
    pub sequence: u64,
    /// The page of the freelist, or `u64::MAX` if none is stored.
    pub freelist: PageId,
    /// The number of pages in use; all page ids are below it.
    pub high_water: PageId,
    /// The transaction that wrote the meta. Of two valid metas, the one with the higher number counts.
    pub txid: u64,
}

impl Meta {
    /// Decodes a meta (the bytes after the page header), and checks magic number, version, checksum and page
    /// size.
    ///
    /// # Errors
    /// A phrase whose subject is the meta page.
    pub fn decode(b: &[u8]) -> Result<Self, &'static str> {
        let short = "is truncated";
        if b.len() < META_SIZE {
            return Err(short);
        }
        if u32_at(b, 0).ok_or(short)? != MAGIC {
            return Err("does not begin with bbolt's magic number");
        }
        if u32_at(b, 4).ok_or(short)? != VERSION {
            return Err("has an unknown format version");
        }
        if u64_at(b, 56).ok_or(short)? != fnv1a64(&b[..56]) {
            return Err("has a wrong checksum");
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
            return Err("has a page size that is not a power of two from 1 KiB to 64 KiB");
        }
        Ok(meta)
    }

    /// Returns the size of all pages in use, in bytes.
    pub fn bytes(&self) -> u64 {
        self.high_water.0.saturating_mul(u64::from(self.page_size))
    }

    /// Writes the meta with its checksum to the start of `b`, which must have [`META_SIZE`] bytes.
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

/// Returns the checksum of a meta: FNV-1a with 64 bits.
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
