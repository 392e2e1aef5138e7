//! Writes a new bbolt file: full pages in key order, without free pages.
//!
//! A file begins with the meta pages, which contain the number of pages. There are two ways to know that
//! number:
//! - Build the content twice: first by sizes only ([`Writer::measuring`]), then as a stream of bytes
//!   ([`Writer::writing`]) that can be hashed and compressed on the way.
//! - Build the content once and write the metas last ([`Writer::streaming`]), if the output can seek.
//!
//! Entries must come in ascending order of their keys. One leaf page and the pending part of one branch page
//! for each level are held in memory. It does not modify existing files. `mvcc` and `ops` call it.

use super::page::*;
use crate::error::{Error, Result};
use std::fs::File;
use std::io::{BufWriter, Write};

/// A bucket of up to a quarter of a page is stored inline in its parent's page, as bbolt does.
const INLINE_FRACTION: usize = 4;
/// The page of the freelist, after the two meta pages. The list is empty.
const FREELIST: PageId = PageId(2);

/// A bbolt file that is being measured or written, page after page.
pub struct Writer<'w> {
    /// `None` while measuring.
    out: Option<&'w mut (dyn Write + Send)>,
    page_size: usize,
    next: PageId,
    /// A buffer to reuse.
    page: Vec<u8>,
}

/// The meta and the note of a measured or streamed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    meta: Meta,
    note: String,
}

impl Layout {
    /// Returns the size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.meta.high_water.0 * u64::from(self.meta.page_size)
    }

    /// Returns the first pages of the file: the metas and the freelist.
    pub fn head(&self) -> Vec<u8> {
        let page_size = self.meta.page_size as usize;
        let mut pages = vec![0; FREELIST.next().0 as usize * page_size];
        let kinds = [META_PAGE_FLAG, META_PAGE_FLAG, FREELIST_PAGE_FLAG];
        for (i, flags) in kinds.into_iter().enumerate() {
            let page = &mut pages[i * page_size..];
            PageHeader {
                id: PageId(i as u64),
                flags,
                count: 0,
                overflow: 0,
            }
            .encode(page);
            // As in a copy made by bbolt, both metas are valid, and the second is one transaction older.
            if flags == META_PAGE_FLAG {
                let meta = Meta {
                    txid: self.meta.txid - i as u64,
                    ..self.meta
                };
                meta.encode(&mut page[PAGE_HEADER_SIZE..]);
            }
        }
        pages[NOTE_AT..NOTE_AT + self.note.len()].copy_from_slice(self.note.as_bytes());
        pages
    }
}

/// Writes the content that `build` produces into `file`, and returns the file. `build` is called twice: first
/// to measure, then to write. For `note` see [`Writer::layout`].
///
/// # Errors
/// The errors of `build`; `Internal` if the two calls differ; `Io`, `NoSpace`.
pub fn write_file(
    file: File,
    page_size: usize,
    note: &str,
    mut build: impl FnMut(&mut Writer<'_>) -> Result<TreeBuilder>,
) -> Result<File> {
    let mut w = Writer::measuring(page_size)?;
    let root = build(&mut w)?;
    let layout = w.layout(root, note)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut w = Writer::writing(&layout, &mut out)?;
    let root = build(&mut w)?;
    w.finish(root, &layout)?;
    out.into_inner()
        .map_err(|e| Error::io("write the new database", e.into_error()))
}

impl<'w> Writer<'w> {
    /// Starts to measure a file with pages of `page_size` bytes (a power of two from 1 KiB to 64 KiB).
    ///
    /// # Errors
    /// `Internal` for another page size.
    pub fn measuring(page_size: usize) -> Result<Self> {
        if !page_size.is_power_of_two() || !PAGE_SIZES.contains(&page_size) {
            return Err(Error::internal(format!(
                "invalid bbolt page size {page_size}"
            )));
        }
        Ok(Writer {
            out: None,
            page_size,
            next: FREELIST.next(),
            page: Vec::new(),
        })
    }

    /// Starts to write a file that was not measured into `out`, beginning with blank metas. When all is
    /// written, the caller writes [`Layout::head`] over the beginning.
    ///
    /// # Errors
    /// As [`measuring`](Self::measuring) and [`writing`](Self::writing).
    pub fn streaming(page_size: usize, out: &'w mut (dyn Write + Send)) -> Result<Self> {
        let mut w = Writer {
            out: Some(out),
            ..Writer::measuring(page_size)?
        };
        w.write(&vec![0; FREELIST.next().0 as usize * page_size])?;
        Ok(w)
    }

    /// Whether the writer only measures, so that [`TreeBuilder::push_len`] is enough.
    pub fn is_measuring(&self) -> bool {
        self.out.is_none()
    }

    /// Ends the measuring or the streaming. `note` is stored in the unused end of the first meta page, from
    /// which only [`Database::note`] reads it. It must fit there, and must not contain a zero byte.
    ///
    /// [`Database::note`]: super::Database::note
    ///
    /// # Errors
    /// `Internal` if the note is not valid; `Io`, `NoSpace`.
    pub fn layout(mut self, root: TreeBuilder, note: &str) -> Result<Layout> {
        if note.len() >= self.page_size - NOTE_AT || note.contains('\0') {
            return Err(Error::internal("the note does not fit into a bbolt page"));
        }
        let (root, sequence) = root.finish_as_pages(&mut self)?;
        Ok(Layout {
            meta: Meta {
                page_size: self.page_size as u32,
                root,
                sequence,
                freelist: FREELIST,
                high_water: self.next,
                txid: 1,
            },
            note: note.to_owned(),
        })
    }

    /// Starts to write a measured file, beginning with its metas.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, or another error of `out`.
    pub fn writing(layout: &Layout, out: &'w mut (dyn Write + Send)) -> Result<Self> {
        let mut w = Writer {
            out: Some(out),
            ..Writer::measuring(layout.meta.page_size as usize)?
        };
        w.write(&layout.head())?;
        Ok(w)
    }

    /// Ends the writing of a measured file.
    ///
    /// # Errors
    /// `Internal` if the written pages differ from the measured ones; `Io`, `NoSpace`.
    pub fn finish(mut self, root: TreeBuilder, layout: &Layout) -> Result<()> {
        let (root, sequence) = root.finish_as_pages(&mut self)?;
        let meta = &layout.meta;
        if (root, sequence, self.next) != (meta.root, meta.sequence, meta.high_water) {
            return Err(Error::internal(
                "the written database differs from its measured layout",
            ));
        }
        Ok(())
    }

    /// Returns the size of all pages so far, in bytes.
    pub fn bytes(&self) -> u64 {
        self.next.0 * self.page_size as u64
    }

    fn allocate(&mut self, pages: u64) -> PageId {
        let id = self.next;
        self.next.0 += pages;
        id
    }

    fn write(&mut self, b: &[u8]) -> Result<()> {
        match &mut self.out {
            Some(out) => out
                .write_all(b)
                .map_err(|e| Error::io("write the new database", e)),
            None => Ok(()),
        }
    }
}

/// The value of a finished bucket, to be stored in its parent: see [`TreeBuilder::push_bucket`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketValue(Vec<u8>);

/// Builds the tree of one bucket from entries in ascending order.
#[derive(Debug, Default)]
pub struct TreeBuilder {
    sequence: u64,
    leaf: PageBuffer,
    /// A bucket with nested buckets must not be stored inline.
    has_buckets: bool,
    last_key: Vec<u8>,
    /// The pending children of each branch level (first key and page), lowest level first.
    levels: Vec<Vec<(Vec<u8>, PageId)>>,
}

/// The content of one page: its elements, and the bytes they point to.
#[derive(Debug, Default)]
struct PageBuffer {
    /// For each element: flags (leaf page) or child page (branch page), key size, value size.
    elements: Vec<(u64, u32, u32)>,
    /// Keys and values; empty while measuring.
    data: Vec<u8>,
    /// The size of all keys and values.
    data_len: usize,
    first_key: Vec<u8>,
}

impl PageBuffer {
    fn size(&self) -> usize {
        PAGE_HEADER_SIZE + self.elements.len() * LEAF_ELEMENT_SIZE + self.data_len
    }

    /// Adds an element. `value` is `None` while measuring; `len` is its size.
    fn push(&mut self, tag: u64, key: &[u8], len: usize, value: Option<&[u8]>) -> Result<()> {
        let size = |n: usize| {
            u32::try_from(n)
                .map_err(|_| Error::corrupt("a key or value is longer than bbolt can hold (4 GiB)"))
        };
        if self.elements.is_empty() {
            self.first_key.clear();
            self.first_key.extend_from_slice(key);
        }
        self.elements.push((tag, size(key.len())?, size(len)?));
        self.data_len += key.len() + len;
        if let Some(value) = value {
            self.data.extend_from_slice(key);
            self.data.extend_from_slice(value);
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.elements.clear();
        self.data.clear();
        self.data_len = 0;
    }

    /// Replaces the content of `page` by the page header and the elements. `data` has to follow them.
    fn encode_head(&self, id: PageId, flags: u16, overflow: u32, page: &mut Vec<u8>) -> Result<()> {
        page.clear();
        page.resize(PAGE_HEADER_SIZE, 0);
        PageHeader {
            id,
            flags,
            count: u16::try_from(self.elements.len())
                .map_err(|_| Error::internal("too many elements for a bbolt page"))?,
            overflow,
        }
        .encode(page);
        // `pos` is the distance from the element to its key.
        let mut pos = (self.elements.len() * LEAF_ELEMENT_SIZE) as u64;
        for &(tag, ksize, vsize) in &self.elements {
            let pos_field = u32::try_from(pos)
                .map_err(|_| Error::internal("a bbolt page has more than 4 GiB"))?;
            let fields = match flags {
                LEAF_PAGE_FLAG => [tag as u32, pos_field, ksize, vsize],
                _ => [pos_field, ksize, tag as u32, (tag >> 32) as u32],
            };
            page.extend_from_slice(fields.map(u32::to_le_bytes).as_flattened());
            pos = pos + u64::from(ksize) + u64::from(vsize) - LEAF_ELEMENT_SIZE as u64;
        }
        Ok(())
    }

    /// Writes the page, with overflow pages if it is larger than one page.
    fn write(&self, w: &mut Writer<'_>, flags: u16) -> Result<PageId> {
        let pages = self.size().div_ceil(w.page_size).max(1);
        let overflow = u32::try_from(pages - 1)
            .map_err(|_| Error::corrupt("a value is longer than bbolt can hold"))?;
        let id = w.allocate(pages as u64);
        if w.is_measuring() {
            return Ok(id);
        }
        let mut page = std::mem::take(&mut w.page);
        self.encode_head(id, flags, overflow, &mut page)?;
        let padding = pages * w.page_size - self.size();
        // A long value is written from `data` instead of being copied into the page.
        if pages > 1 {
            w.write(&page)?;
            w.write(&self.data)?;
            page.clear();
        } else {
            page.extend_from_slice(&self.data);
        }
        page.resize(page.len() + padding, 0);
        w.write(&page)?;
        w.page = page;
        Ok(id)
    }
}

impl TreeBuilder {
    /// Creates a builder of a bucket with this sequence.
    pub fn new(sequence: u64) -> Self {
        TreeBuilder {
            sequence,
            ..TreeBuilder::default()
        }
    }

    /// Adds an entry. `key` must be higher than all keys before.
    ///
    /// # Errors
    /// `Internal` if the key is out of order; `CorruptSnapshot` if the value is longer than bbolt allows;
    /// `Io`, `NoSpace`.
    pub fn push(&mut self, w: &mut Writer<'_>, key: &[u8], value: &[u8]) -> Result<()> {
        self.push_flagged(w, 0, key, value.len(), Some(value))
    }

    /// Adds an entry while measuring, for which the size of the value is enough.
    ///
    /// # Errors
    /// `Internal` if the key is out of order, or if `w` does not measure.
    pub fn push_len(&mut self, w: &mut Writer<'_>, key: &[u8], len: usize) -> Result<()> {
        self.push_flagged(w, 0, key, len, None)
    }

    /// Adds a finished bucket with this name.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_bucket(
        &mut self,
        w: &mut Writer<'_>,
        name: &[u8],
        bucket: &BucketValue,
    ) -> Result<()> {
        self.has_buckets = true;
        self.push_flagged(w, BUCKET_LEAF_FLAG, name, bucket.0.len(), Some(&bucket.0))
    }

    fn push_flagged(
        &mut self,
        w: &mut Writer<'_>,
        flags: u32,
        key: &[u8],
        len: usize,
        value: Option<&[u8]>,
    ) -> Result<()> {
        if value.is_none() && !w.is_measuring() {
            return Err(Error::internal("a bbolt entry was written without a value"));
        }
        let empty = self.levels.is_empty() && self.leaf.elements.is_empty();
        if !empty && key <= self.last_key.as_slice() {
            return Err(Error::internal("bbolt entries were written out of order"));
        }
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        let size_with_entry = self.leaf.size() + LEAF_ELEMENT_SIZE + key.len() + len;
        if !self.leaf.elements.is_empty() && size_with_entry > w.page_size {
            self.flush_leaf(w)?;
        }
        let value = value.filter(|_| !w.is_measuring());
        self.leaf.push(u64::from(flags), key, len, value)
    }

    fn flush_leaf(&mut self, w: &mut Writer<'_>) -> Result<()> {
        let id = self.leaf.write(w, LEAF_PAGE_FLAG)?;
        let key = std::mem::take(&mut self.leaf.first_key);
        self.leaf.clear();
        self.push_child(w, 0, key, id)
    }

    /// Adds a child page to a branch level, and writes a branch page when there are two more children than
    /// fit. The two held back ensure that the last branch page of a level never has a single child: bbolt
    /// expects at least two.
    fn push_child(
        &mut self,
        w: &mut Writer<'_>,
        level: usize,
        key: Vec<u8>,
        id: PageId,
    ) -> Result<()> {
        if self.levels.len() == level {
            self.levels.push(Vec::new());
        }
        let pending = &mut self.levels[level];
        pending.push((key, id));
        let fit = Self::fitting(pending, w.page_size);
        if pending.len() >= fit + 2 {
            let rest = pending.split_off(fit);
            let full = std::mem::replace(pending, rest);
            let (key, id) = Self::write_branch(w, full)?;
            self.push_child(w, level + 1, key, id)?;
        }
        Ok(())
    }

    /// Returns how many of the first `children` fit into one page; at least two.
    fn fitting(children: &[(Vec<u8>, PageId)], page_size: usize) -> usize {
        let mut size = PAGE_HEADER_SIZE;
        let fits = |(key, _): &&(Vec<u8>, PageId)| {
            size += BRANCH_ELEMENT_SIZE + key.len();
            size <= page_size
        };
        children.iter().take_while(fits).count().max(2)
    }

    /// Writes a branch page, and returns its first key and its number.
    fn write_branch(
        w: &mut Writer<'_>,
        children: Vec<(Vec<u8>, PageId)>,
    ) -> Result<(Vec<u8>, PageId)> {
        let mut page = PageBuffer::default();
        for (key, id) in &children {
            page.push(id.0, key, 0, (!w.is_measuring()).then_some(&[]))?;
        }
        let id = page.write(w, BRANCH_PAGE_FLAG)?;
        Ok((page.first_key, id))
    }

    /// Ends the bucket and returns its value for the parent. A small bucket is stored inline in that value.
    ///
    /// # Errors
    /// `Io`, `NoSpace`.
    pub fn finish(self, w: &mut Writer<'_>) -> Result<BucketValue> {
        let inline = self.levels.is_empty()
            && !self.has_buckets
            && self.leaf.size() <= w.page_size / INLINE_FRACTION;
        let sequence = self.sequence;
        let mut body = Vec::new();
        let root = if inline {
            self.leaf
                .encode_head(PageId(0), LEAF_PAGE_FLAG, 0, &mut body)?;
            body.extend_from_slice(&self.leaf.data);
            // While measuring there is no data, but its size counts.
            body.resize(self.leaf.size(), 0);
            PageId(0)
        } else {
            self.finish_as_pages(w)?.0
        };
        let header = [root.0.to_le_bytes(), sequence.to_le_bytes()];
        Ok(BucketValue([header.as_flattened(), &body].concat()))
    }

    /// Ends the bucket on its own pages, and returns its root page and sequence.
    fn finish_as_pages(mut self, w: &mut Writer<'_>) -> Result<(PageId, u64)> {
        if self.levels.is_empty() {
            return Ok((self.leaf.write(w, LEAF_PAGE_FLAG)?, self.sequence));
        }
        if !self.leaf.elements.is_empty() {
            self.flush_leaf(w)?;
        }
        let mut level = 0;
        loop {
            let mut pending = std::mem::take(&mut self.levels[level]);
            let top = level + 1 == self.levels.len();
            if top && pending.len() == 1 {
                return Ok((pending[0].1, self.sequence));
            }
            let fit = Self::fitting(&pending, w.page_size);
            let rest = match pending.len() {
                n if n > fit => pending.split_off(n / 2),
                _ => Vec::new(),
            };
            for children in [pending, rest] {
                if !children.is_empty() {
                    let (key, id) = Self::write_branch(w, children)?;
                    self.push_child(w, level + 1, key, id)?;
                }
            }
            level += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::reader::Database;
    use super::*;

    fn build(page_size: usize, entries: &[(Vec<u8>, Vec<u8>)]) -> File {
        write_file(tempfile::tempfile().unwrap(), page_size, "a note", |w| {
            let mut tree = TreeBuilder::new(7);
            for (k, v) in entries {
                if w.is_measuring() {
                    tree.push_len(w, k, v.len())?
                } else {
                    tree.push(w, k, v)?
                }
            }
            let mut root = TreeBuilder::new(0);
            let value = tree.finish(w)?;
            root.push_bucket(w, b"b", &value)?;
            Ok(root)
        })
        .unwrap()
    }

    #[test]
    fn the_reader_returns_all_entries_at_every_page_size_and_count() {
        for page_size in [1024, 4096, 65536] {
            for n in [0usize, 1, 2, 3, 40, 41, 100, 2_000, 20_000] {
                let entries: Vec<_> = (0..n)
                    .map(|i| {
                        let len = if i % 97 == 5 { 3 * page_size } else { i % 50 };
                        (format!("{i:017}").into_bytes(), vec![i as u8; len])
                    })
                    .collect();
                let db = Database::open(build(page_size, &entries)).unwrap();
                assert_eq!(db.note().unwrap(), "a note");
                let bucket = db.bucket(b"b").unwrap().unwrap();
                assert_eq!(bucket.sequence, 7);
                let mut c = db.cursor(&bucket);
                for (k, v) in &entries {
                    let e = c.next().unwrap().unwrap();
                    assert_eq!((e.key, e.value), (k.as_slice(), v.as_slice()));
                }
                assert!(c.next().unwrap().is_none());
                for i in (0..n).step_by(37) {
                    let mut c = db.cursor(&bucket);
                    c.seek(&entries[i].0).unwrap();
                    assert_eq!(c.next().unwrap().unwrap().key, entries[i].0);
                    let mut c = db.cursor(&bucket);
                    let mut between = entries[i].0.clone();
                    between.push(b'!');
                    c.seek(&between).unwrap();
                    let expected = entries.get(i + 1).map(|e| e.0.as_slice());
                    assert_eq!(c.next().unwrap().map(|e| e.key), expected);
                }
            }
        }
    }

    #[test]
    fn entries_out_of_order_are_refused() {
        let mut w = Writer::measuring(4096).unwrap();
        let mut tree = TreeBuilder::new(0);
        tree.push(&mut w, b"b", b"").unwrap();
        assert!(tree.push(&mut w, b"b", b"").is_err());
        assert!(tree.push(&mut w, b"a", b"").is_err());
    }
}
