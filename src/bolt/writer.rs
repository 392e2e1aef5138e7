//! Lays a bbolt file out afresh: full pages, in key order, nothing free in between.
//!
//! A file begins with the meta pages, which say where the tree ends: so its content is laid out
//! twice, first by sizes only ([`Writer::measuring`]), then as a stream of bytes
//! ([`Writer::writing`]) that can be hashed and compressed while it comes about; or once, where the
//! metas can be written last ([`Writer::streaming`]). Entries must come
//! in ascending order of their keys. One leaf page and one branch page per level are held in memory.
//! It does not modify existing files. `mvcc` and `ops` call it.

use super::page::*;
use crate::error::{Error, Result};
use std::fs::File;
use std::io::{BufWriter, Write};

/// bbolt keeps a bucket inside its parent's page up to this fraction of a page.
const INLINE_FRACTION: usize = 4;
/// Where the freelist is: behind the metas. Nothing is free.
const FREELIST: PageId = PageId(2);

/// A bbolt file that is being measured or written, page after page.
pub struct Writer<'w> {
    /// `None` while measuring.
    out: Option<&'w mut (dyn Write + Send)>,
    page_size: usize,
    next: PageId,
    page: Vec<u8>,
}

/// Where everything of a file will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    meta: Meta,
    note: String,
}

impl Layout {
    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.meta.high_water.0 * u64::from(self.meta.page_size)
    }

    /// The file's first pages: the metas and the freelist.
    pub fn head(&self) -> Vec<u8> {
        let page_size = self.meta.page_size as usize;
        let mut pages = vec![0; FREELIST.next().0 as usize * page_size];
        let heads = [META_PAGE_FLAG, META_PAGE_FLAG, FREELIST_PAGE_FLAG];
        for (i, flags) in heads.into_iter().enumerate() {
            let page = &mut pages[i * page_size..];
            PageHeader {
                id: PageId(i as u64),
                flags,
                count: 0,
                overflow: 0,
            }
            .encode(page);
            // As bbolt's own copy does: both valid, the second one transaction older.
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

/// Lays `build`'s content out, twice, into `file`; gives the file back. `note` is as in
/// [`Writer::layout`].
///
/// # Errors
/// What `build` returns; `Internal` where it does not do the same twice; `Io`, `NoSpace`.
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
    /// Starts to measure a file with pages of `page_size` bytes (a power of two from 1 KiB to
    /// 64 KiB).
    ///
    /// # Errors
    /// `Internal` for another size.
    pub fn measuring(page_size: usize) -> Result<Self> {
        if !page_size.is_power_of_two() || !PAGE_SIZES.contains(&page_size) {
            return Err(Error::internal(format!("bbolt page size {page_size}")));
        }
        Ok(Writer {
            out: None,
            page_size,
            next: FREELIST.next(),
            page: Vec::new(),
        })
    }

    /// Starts to write a file that was not measured, into `out`, which stands at the file's beginning.
    /// [`Layout::head`] goes there in the end.
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

    /// Whether sizes are enough: see [`TreeBuilder::push_len`].
    pub fn is_measuring(&self) -> bool {
        self.out.is_none()
    }

    /// Ends the measuring, or the streaming. `note` goes into the unused end of the first meta page, where only
    /// [`Database::note`] looks; it must fit there and hold no zero byte.
    ///
    /// [`Database::note`]: super::Database::note
    ///
    /// # Errors
    /// `Internal` for a note that does not fit.
    pub fn layout(mut self, root: TreeBuilder, note: &str) -> Result<Layout> {
        if note.len() >= self.page_size - NOTE_AT || note.contains('\0') {
            return Err(Error::internal(
                "a note that does not fit into a bbolt page",
            ));
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

    /// Starts to write a file that was measured, with its metas.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, or what else `out` returns.
    pub fn writing(layout: &Layout, out: &'w mut (dyn Write + Send)) -> Result<Self> {
        let mut w = Writer {
            out: Some(out),
            ..Writer::measuring(layout.meta.page_size as usize)?
        };
        w.write(&layout.head())?;
        Ok(w)
    }

    /// Ends the writing.
    ///
    /// # Errors
    /// `Internal` where something else was written than was measured; `Io`, `NoSpace`.
    pub fn finish(mut self, root: TreeBuilder, layout: &Layout) -> Result<()> {
        let (root, sequence) = root.finish_as_pages(&mut self)?;
        let meta = &layout.meta;
        if (root, sequence, self.next) != (meta.root, meta.sequence, meta.high_water) {
            return Err(Error::internal(
                "a database came out otherwise than it was measured",
            ));
        }
        Ok(())
    }

    /// Bytes of all pages up to now.
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

/// The finished value of a bucket's entry in its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketValue(Vec<u8>);

/// Builds one bucket's tree from entries in ascending order.
#[derive(Debug, Default)]
pub struct TreeBuilder {
    sequence: u64,
    leaf: PageBuffer,
    /// Only a bucket without buckets in it may live inside its parent.
    has_buckets: bool,
    last_key: Vec<u8>,
    /// The branch levels above the leaves, lowest first.
    levels: Vec<Vec<(Vec<u8>, PageId)>>,
}

/// The elements of one page and the bytes they point to.
#[derive(Debug, Default)]
struct PageBuffer {
    /// flags (leaf) or child (branch), key size, value size.
    elements: Vec<(u64, u32, u32)>,
    /// Keys and values; empty while measuring.
    data: Vec<u8>,
    /// Bytes of keys and values.
    data_len: usize,
    first_key: Vec<u8>,
}

impl PageBuffer {
    fn size(&self) -> usize {
        PAGE_HEADER_SIZE + self.elements.len() * LEAF_ELEMENT_SIZE + self.data_len
    }

    /// `value` is `None` where only sizes are wanted.
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

    /// Puts the page's header and elements into `page`; `data` follows them.
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
        // `pos` counts from the element itself to its key.
        let mut pos = (self.elements.len() * LEAF_ELEMENT_SIZE) as u64;
        for &(tag, ksize, vsize) in &self.elements {
            let p = u32::try_from(pos)
                .map_err(|_| Error::internal("a bbolt page of more than 4 GiB"))?;
            let fields = match flags {
                LEAF_PAGE_FLAG => [tag as u32, p, ksize, vsize],
                _ => [p, ksize, tag as u32, (tag >> 32) as u32],
            };
            page.extend_from_slice(fields.map(u32::to_le_bytes).as_flattened());
            pos = pos + u64::from(ksize) + u64::from(vsize) - LEAF_ELEMENT_SIZE as u64;
        }
        Ok(())
    }

    /// Writes the page, with overflow pages where it is larger than one.
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
        // A long value is not copied once more.
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
    /// An empty bucket with the given sequence.
    pub fn new(sequence: u64) -> Self {
        TreeBuilder {
            sequence,
            ..TreeBuilder::default()
        }
    }

    /// Adds an entry; `key` must be above all before it.
    ///
    /// # Errors
    /// `Internal` for a key out of order; `Io`, `NoSpace`.
    pub fn push(&mut self, w: &mut Writer<'_>, key: &[u8], value: &[u8]) -> Result<()> {
        self.push_flagged(w, 0, key, value.len(), Some(value))
    }

    /// Adds an entry of which only the length of the value is known: enough while measuring.
    ///
    /// # Errors
    /// `Internal` for a key out of order, or when writing.
    pub fn push_len(&mut self, w: &mut Writer<'_>, key: &[u8], len: usize) -> Result<()> {
        self.push_flagged(w, 0, key, len, None)
    }

    /// Adds a finished bucket under `name`.
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
        let with = self.leaf.size() + LEAF_ELEMENT_SIZE + key.len() + len;
        if !self.leaf.elements.is_empty() && with > w.page_size {
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

    /// Puts a child into a branch level. Two more children than fit are held back, so that the last
    /// branch page of a level never has a single child (bbolt wants two keys in a page).
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

    /// How many of the first `children` fit into one page; at least two.
    fn fitting(children: &[(Vec<u8>, PageId)], page_size: usize) -> usize {
        let mut size = PAGE_HEADER_SIZE;
        let fits = |(key, _): &&(Vec<u8>, PageId)| {
            size += BRANCH_ELEMENT_SIZE + key.len();
            size <= page_size
        };
        children.iter().take_while(fits).count().max(2)
    }

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

    /// Ends the bucket: its value for the parent's entry.
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
            // What was not there to be encoded still counts.
            body.resize(self.leaf.size(), 0);
            PageId(0)
        } else {
            self.finish_as_pages(w)?.0
        };
        let header = [root.0.to_le_bytes(), sequence.to_le_bytes()];
        Ok(BucketValue([header.as_flattened(), &body].concat()))
    }

    /// Ends the bucket on pages of its own: its root page and sequence.
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
                match w.is_measuring() {
                    true => tree.push_len(w, k, v.len())?,
                    false => tree.push(w, k, v)?,
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
    fn what_is_written_is_read_back_at_every_size() {
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
