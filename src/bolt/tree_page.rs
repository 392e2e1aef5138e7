//! A page of a B+tree in memory: its elements are checked when it is created, then accessed by index.
//!
//! It reads no file; [`super::reader`] loads pages and is the only caller.

use super::page::*;
use crate::base::limits::Limits;
use crate::error::{Error, Result};
use std::io;

impl PageId {
    /// Returns the `CorruptSnapshot` error "bbolt page N `finding`".
    pub(super) fn corrupt(self, finding: impl std::fmt::Display) -> Error {
        Error::corrupt(format!("bbolt page {self} {finding}"))
    }

    /// Returns the error for a failed read of the page.
    pub(super) fn unreadable(self, e: io::Error) -> Error {
        Error::io(format!("read bbolt page {self}"), e)
    }
}

/// Returns the error for an element that is not within its page.
pub(super) fn element_outside(id: PageId, i: usize) -> Error {
    Error::corrupt(format!(
        "element {i} of bbolt page {id} lies outside of the page, or overlaps the one before it"
    ))
}

/// Fails if the key is longer than bbolt allows (`CorruptSnapshot`), or the element larger than `limits`
/// allow (`TooLarge`).
pub(super) fn check_size(
    id: PageId,
    i: usize,
    ksize: u32,
    vsize: u32,
    limits: &Limits,
) -> Result<()> {
    if ksize > MAX_KEY_SIZE {
        return Err(Error::corrupt(format!(
            "element {i} of bbolt page {id} has a key of {ksize} bytes, but bbolt allows at most {MAX_KEY_SIZE}"
        )));
    }
    let bytes = u64::from(ksize) + u64::from(vsize);
    if bytes > limits.element_bytes() {
        Err(limits.value_too_large(format!("element {i} of bbolt page {id} has {bytes} bytes")))
    } else {
        Ok(())
    }
}

/// Decodes the element at `at`: the distance from there to its key, the size of the key, and the size of the
/// value.
pub(super) fn element_layout(buf: &[u8], leaf: bool, at: usize) -> Option<(u32, u32, u32)> {
    let field = |n: usize| u32_at(buf, at + n);
    if leaf {
        Some((field(4)?, field(8)?, field(12)?))
    } else {
        Some((field(0)?, field(4)?, 0))
    }
}

/// A leaf or branch page whose elements lie within it and have ascending keys.
#[derive(Debug)]
pub(super) struct TreePage {
    pub(super) buf: Vec<u8>,
    pub(super) id: PageId,
    pub(super) leaf: bool,
    pub(super) count: usize,
    /// Of a long page, whose values are not in `buf`: the offset in the file and the size of each value.
    pub(super) values: Option<Vec<(u64, usize)>>,
}

impl TreePage {
    /// Checks every element of a page that `buf` holds completely.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `TooLarge`.
    pub(super) fn check(
        buf: Vec<u8>,
        id: PageId,
        header: PageHeader,
        limits: &Limits,
    ) -> Result<Self> {
        let leaf = match header.flags {
            LEAF_PAGE_FLAG => true,
            BRANCH_PAGE_FLAG => false,
            other => {
                return Err(id.corrupt(format!(
                    "is neither a leaf nor a branch page (flags {other:#06x})"
                )));
            }
        };
        let count = usize::from(header.count);
        if !leaf && count == 0 {
            return Err(Error::corrupt(format!("bbolt branch page {id} is empty")));
        }
        // Leaf and branch elements have the same size. Keys and values follow the last element.
        let mut free = (PAGE_HEADER_SIZE + count * LEAF_ELEMENT_SIZE) as u64;
        let mut last_key: Option<&[u8]> = None;
        for i in 0..count {
            let at = PAGE_HEADER_SIZE + i * LEAF_ELEMENT_SIZE;
            // bbolt writes keys and values without overlaps. If overlaps were allowed, a small page could
            // yield many times its size.
            let layout = element_layout(&buf, leaf, at);
            let (pos, ksize, vsize) = layout.ok_or_else(|| element_outside(id, i))?;
            let start = at as u64 + u64::from(pos);
            let end = start + u64::from(ksize) + u64::from(vsize);
            if start < free || end > buf.len() as u64 {
                return Err(element_outside(id, i));
            }
            check_size(id, i, ksize, vsize, limits)?;
            free = end;
            let key = &buf[start as usize..][..ksize as usize];
            if last_key.is_some_and(|last| key <= last) {
                return Err(Error::corrupt(format!(
                    "the keys of bbolt page {id} are not in ascending order"
                )));
            }
            last_key = Some(key);
        }
        Ok(TreePage {
            buf,
            id,
            leaf,
            count,
            values: None,
        })
    }

    // The methods below rely on the offsets that `check` has checked.

    /// Returns the key of element `i`.
    pub(super) fn key(&self, i: usize) -> &[u8] {
        self.entry(i).key
    }

    /// Returns element `i`; its value is empty if the page is a long one.
    pub(super) fn entry(&self, i: usize) -> BucketEntry<'_> {
        let at = PAGE_HEADER_SIZE + i * LEAF_ELEMENT_SIZE;
        let (pos, ksize, vsize) = element_layout(&self.buf, self.leaf, at).unwrap_or_default();
        let rest = &self.buf[at + pos as usize..];
        let (key, rest) = rest.split_at(ksize as usize);
        BucketEntry {
            flags: u32_at(&self.buf, at).unwrap_or(0),
            key,
            value: &rest[..vsize as usize],
        }
    }

    /// Returns the page that element `i` of a branch page names.
    pub(super) fn child(&self, i: usize) -> PageId {
        let at = PAGE_HEADER_SIZE + i * BRANCH_ELEMENT_SIZE;
        PageId(u64_at(&self.buf, at + 8).unwrap_or(0))
    }
}

/// A key and its value in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketEntry<'a> {
    /// [`BUCKET_LEAF_FLAG`] or 0.
    pub flags: u32,
    /// The key.
    pub key: &'a [u8],
    /// The value; of a nested bucket, its header.
    pub value: &'a [u8],
}

impl BucketEntry<'_> {
    /// Whether the value is a nested bucket.
    pub fn is_bucket(&self) -> bool {
        self.flags & BUCKET_LEAF_FLAG != 0
    }
}
