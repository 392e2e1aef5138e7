//! Reads a bbolt file in key order. It holds one page for each level of the tree; of a page above 1 MiB, it
//! holds the keys and one value.
//!
//! Nothing in the file is trusted: every page number, count and offset and the order of all keys is checked.
//! One walk never loads more pages than the file has, so its time and memory stay within the size of the
//! file. It does not write, and does not read the freelist. `mvcc` and `ops` call it.

use super::page::*;
use super::read_ahead::ReadAhead;
use super::tree_page::{BucketEntry, TreePage, check_size, element_layout, element_outside};
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The maximum depth of a tree. Real trees are much lower: every page but the root holds at least two
/// children.
const MAX_DEPTH: usize = 64;
/// The maximum size of all branch pages above a leaf. A branch page of bbolt holds at most four keys of up to
/// 32 KiB, or fits into one page.
const MAX_PATH: usize = 4 << 20;
/// Of a larger page only the keys are held. bbolt writes such pages for up to four long values.
const LONG_PAGE: usize = 1 << 20;
/// The largest buffer that is reused for the next page, in pages.
const MOST_SPARE: usize = 4;

/// The number of bytes at the beginning of a file that [`newest_meta`] may read.
pub const METAS_END: usize = *PAGE_SIZES.end() + PAGE_HEADER_SIZE + META_SIZE;

/// Returns the newest valid meta of a file, or of its first [`METAS_END`] bytes.
///
/// # Errors
/// `CorruptSnapshot` if no meta is valid; `Io`.
pub fn newest_meta(src: &impl ReadAt) -> Result<Meta> {
    let size = size_of_file(src)?;
    let first = read_meta(src, size, 0)?;
    let second = match &first {
        Ok(meta) => read_meta(src, size, meta.page_size as usize)?,
        Err(_) => find_second_meta(src, size)?,
    };
    match (first, second) {
        (Ok(a), Ok(b)) if b.page_size == a.page_size && b.txid > a.txid => Ok(b),
        (Ok(a), _) => Ok(a),
        (Err(_), Ok(b)) => Ok(b),
        (Err(a), Err(b)) => Err(Error::corrupt(format!(
            "not a bbolt database: the first meta page {a}, and the second {b}"
        ))),
    }
}

/// Reads the meta page at `offset` of a file of `size` bytes. The inner error is a phrase whose subject is
/// the page.
fn read_meta(src: &impl ReadAt, size: u64, offset: usize) -> Result<Result<Meta, &'static str>> {
    let mut b = [0u8; PAGE_HEADER_SIZE + META_SIZE];
    if (offset + b.len()) as u64 > size {
        return Ok(Err("is beyond the end of the file"));
    }
    src.read_exact_at(&mut b, offset as u64)
        .map_err(|e| Error::io("read the database's meta page", e))?;
    Ok(Meta::decode(&b[PAGE_HEADER_SIZE..]))
}

/// Looks for the second meta page at every possible page size, because the first meta is damaged. Returns the
/// first valid one, otherwise the finding at the largest page size.
fn find_second_meta(src: &impl ReadAt, size: u64) -> Result<Result<Meta, &'static str>> {
    let mut finding = "was not found";
    let mut page_size = *PAGE_SIZES.start();
    while page_size <= *PAGE_SIZES.end() {
        match read_meta(src, size, page_size)? {
            Ok(meta) if meta.page_size as usize == page_size => return Ok(Ok(meta)),
            Ok(_) => finding = "is at the wrong place",
            Err(phrase) => finding = phrase,
        }
        page_size *= 2;
    }
    Ok(Err(finding))
}

fn size_of_file(src: &impl ReadAt) -> Result<u64> {
    src.size()
        .map_err(|e| Error::io("read the database file", e))
}

/// An open bbolt file.
#[derive(Debug, Clone)]
pub struct Database<R> {
    src: R,
    meta: Meta,
    limits: Limits,
}

/// The root of a bucket's tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    root: Root,
    /// bbolt's auto-increment counter of the bucket; etcd does not use it.
    pub sequence: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Root {
    Page(PageId),
    /// The only page of a small bucket, which is stored in a value of the parent's leaf.
    Inline(Vec<u8>),
}

impl<R: ReadAt> Database<R> {
    /// Opens the file at its newest valid meta. As in bbolt, one of the two metas may be damaged.
    ///
    /// # Errors
    /// `CorruptSnapshot` if no meta is valid, or the file is shorter than the meta says; `Io`.
    pub fn open(src: R) -> Result<Self> {
        Self::open_within(src, Limits::NONE)
    }

    /// Opens a file from an untrusted source, within limits; otherwise like [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open), and `TooLarge` if the database exceeds `limits`. Later calls fail with
    /// `TooLarge` if an element exceeds them.
    pub fn open_within(src: R, limits: Limits) -> Result<Self> {
        let meta = newest_meta(&src)?;
        limits.check_database(meta.bytes())?;
        let size = size_of_file(&src)?;
        let pages = size / u64::from(meta.page_size);
        if meta.high_water.0 > pages {
            return Err(Error::corrupt(format!(
                "the bbolt database is cut short: {} pages of {} bytes are in use, the file has {pages}",
                meta.high_water, meta.page_size
            )));
        }
        Ok(Database { src, meta, limits })
    }

    /// Returns the underlying file.
    pub fn into_inner(self) -> R {
        self.src
    }

    /// Returns the meta in use.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Returns the note after the first meta that [`Writer::layout`](super::Writer::layout) describes, or an
    /// empty text if there is none.
    ///
    /// # Errors
    /// `Io`.
    pub fn note(&self) -> Result<String> {
        let mut b = vec![0; self.page_size() - NOTE_AT];
        self.src
            .read_exact_at(&mut b, NOTE_AT as u64)
            .map_err(|e| Error::io("read the database's meta page", e))?;
        let end = b.iter().position(|&x| x == 0).unwrap_or(b.len());
        b.truncate(end);
        Ok(String::from_utf8(b).unwrap_or_default())
    }

    /// Returns the limits of the database.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the size of a page in bytes.
    pub fn page_size(&self) -> usize {
        self.meta.page_size as usize
    }

    /// Returns the root bucket, which contains all others.
    pub fn root(&self) -> Bucket {
        Bucket {
            root: Root::Page(self.meta.root),
            sequence: self.meta.sequence,
        }
    }

    /// Returns the top-level bucket with this name, or `None` if there is none.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`.
    pub fn bucket(&self, name: &[u8]) -> Result<Option<Bucket>> {
        let mut c = self.cursor(&self.root());
        while let Some(e) = c.next()? {
            if e.key == name && e.is_bucket() {
                return Bucket::decode(e.value).map(Some);
            }
        }
        Ok(None)
    }

    /// Returns the bucket's last key, or `None` if the bucket is empty.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`.
    pub fn last_key(&self, bucket: &Bucket) -> Result<Option<Vec<u8>>> {
        let mut c = self.cursor(bucket);
        c.push_root()?;
        while let Some(level) = c.stack.last() {
            let page = &level.page;
            let Some(last) = page.count.checked_sub(1) else {
                return Ok(None);
            };
            if page.leaf {
                return Ok(Some(page.key(last).to_vec()));
            }
            c.descend(last)?;
        }
        Ok(None)
    }

    /// Returns a cursor before the bucket's first entry.
    pub fn cursor(&self, bucket: &Bucket) -> Cursor<'_, R> {
        self.cursor_within(bucket, &self.page_budget())
    }

    /// Returns the budget of one pass over any number of buckets: as many pages as the file has.
    pub fn page_budget(&self) -> PageBudget {
        PageBudget(Arc::new(AtomicU64::new(self.meta.high_water.0)))
    }

    /// Returns a cursor that shares `budget` with other cursors.
    ///
    /// A pass over nested buckets needs a shared budget: in a malicious file many buckets can point to the
    /// same pages, so that each walk stays within the file but all of them together take endless time.
    pub fn cursor_within(&self, bucket: &Bucket, budget: &PageBudget) -> Cursor<'_, R> {
        Cursor {
            db: self,
            budget: budget.clone(),
            stack: Vec::new(),
            root: Some(bucket.root.clone()),
            spare: Vec::new(),
            read_ahead: ReadAhead::new(self.meta.bytes()),
            value: Vec::new(),
        }
    }

    /// Reads and checks a page, including its overflow pages.
    fn load(
        &self,
        id: PageId,
        budget: &PageBudget,
        read_ahead: &mut ReadAhead,
        mut buf: Vec<u8>,
    ) -> Result<TreePage> {
        let size = self.page_size();
        if id.0 < 2 || id.0 >= self.meta.high_water.0 {
            return Err(id.corrupt(format!(
                "does not exist (the file has {} pages)",
                self.meta.high_water
            )));
        }
        let offset = id.0 * size as u64;
        buf.resize(size, 0);
        let io = |e| id.unreadable(e);
        read_ahead.read(&self.src, &mut buf, offset).map_err(io)?;
        let header = PageHeader::decode(&buf).ok_or_else(|| id.corrupt("has no header"))?;
        if header.id != id {
            return Err(id.corrupt(format!("says that it is page {} in its header", header.id)));
        }
        let pages = u64::from(header.overflow) + 1;
        if id.0 + pages > self.meta.high_water.0 {
            return Err(id.corrupt(format!("is {pages} pages long, past the end of the file")));
        }
        budget.take(id, pages)?;
        let bytes = size as u64 * pages;
        if bytes > LONG_PAGE as u64 {
            return self.load_long(buf, id, header, bytes);
        }
        if header.overflow > 0 {
            buf.resize(size * pages as usize, 0);
            read_ahead
                .read(&self.src, &mut buf[size..], offset + size as u64)
                .map_err(io)?;
        }
        TreePage::check(buf, id, header, &self.limits)
    }

    /// Reads the elements and keys of a long page without their values. `buf` is a buffer to reuse.
    ///
    /// The keys are appended to the elements, and each element is rewritten to point to its key and to have
    /// an empty value. So the result has the layout of an ordinary page.
    fn load_long(
        &self,
        mut buf: Vec<u8>,
        id: PageId,
        header: PageHeader,
        bytes: u64,
    ) -> Result<TreePage> {
        let offset = id.0 * self.page_size() as u64;
        let io = |e| id.unreadable(e);
        let keys_too_long = || id.corrupt("has longer keys than bbolt writes into one page");
        if header.flags != LEAF_PAGE_FLAG {
            return Err(keys_too_long());
        }
        let count = usize::from(header.count);
        let elements = PAGE_HEADER_SIZE + count * LEAF_ELEMENT_SIZE;
        if elements as u64 > bytes {
            return Err(element_outside(id, 0));
        }
        buf.resize(elements, 0);
        self.src.read_exact_at(&mut buf, offset).map_err(io)?;
        let mut values = Vec::with_capacity(count);
        let mut free = elements as u64;
        for i in 0..count {
            let at = PAGE_HEADER_SIZE + i * LEAF_ELEMENT_SIZE;
            let layout = element_layout(&buf, true, at);
            let (pos, ksize, vsize) = layout.ok_or_else(|| element_outside(id, i))?;
            let key_at = at as u64 + u64::from(pos);
            let value_at = key_at + u64::from(ksize);
            if key_at < free || value_at + u64::from(vsize) > bytes {
                return Err(element_outside(id, i));
            }
            check_size(id, i, ksize, vsize, &self.limits)?;
            free = value_at + u64::from(vsize);
            values.push((offset + value_at, vsize as usize));
            let key_in_buf = buf.len();
            if key_in_buf + ksize as usize > elements + LONG_PAGE {
                return Err(keys_too_long());
            }
            buf.resize(key_in_buf + ksize as usize, 0);
            self.src
                .read_exact_at(&mut buf[key_in_buf..], offset + key_at)
                .map_err(io)?;
            // The element's `pos` and value size.
            buf[at + 4..at + 8].copy_from_slice(&((key_in_buf - at) as u32).to_le_bytes());
            buf[at + 12..at + 16].fill(0);
        }
        let mut page = TreePage::check(buf, id, header, &self.limits)?;
        page.values = Some(values);
        Ok(page)
    }
}

/// The number of pages that a pass may still load; see [`Database::page_budget`]. Clones share the number.
#[derive(Debug, Clone)]
pub struct PageBudget(Arc<AtomicU64>);

impl PageBudget {
    fn take(&self, id: PageId, pages: u64) -> Result<()> {
        let subtract = |left: u64| left.checked_sub(pages);
        let result = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, subtract);
        result.map(drop).map_err(|_| {
            id.corrupt(
                "exceeds the number of pages in the file: pages of its tree overlap or repeat",
            )
        })
    }
}

impl Bucket {
    /// Decodes a bucket from the value of its entry in the parent bucket.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the value is too short, or an inline bucket is longer than a page.
    pub fn decode(value: &[u8]) -> Result<Self> {
        let bad = || Error::corrupt("a bbolt bucket's header is cut short");
        let root = u64_at(value, 0).ok_or_else(bad)?;
        let sequence = u64_at(value, 8).ok_or_else(bad)?;
        let root = if root == 0 {
            if value.len() > *PAGE_SIZES.end() {
                return Err(Error::corrupt(format!(
                    "an inline bbolt bucket has {} bytes, more than the largest page",
                    value.len()
                )));
            }
            Root::Inline(value[BUCKET_HEADER_SIZE..].to_vec())
        } else {
            Root::Page(PageId(root))
        };
        Ok(Bucket { root, sequence })
    }
}

/// Iterates over a bucket's entries in the order of their keys.
pub struct Cursor<'d, R> {
    db: &'d Database<R>,
    budget: PageBudget,
    /// The pages from the root to the current leaf.
    stack: Vec<Level>,
    /// The root, until it is loaded.
    root: Option<Root>,
    /// Buffers to reuse.
    spare: Vec<Vec<u8>>,
    read_ahead: ReadAhead,
    /// The current value, if its page is a long one.
    value: Vec<u8>,
}

/// A page on the path to the current entry.
struct Level {
    page: TreePage,
    /// The index of the element to visit next.
    next: usize,
    /// The upper bound (exclusive) of the page's keys; `None` at the right edge of the tree.
    end: Option<Vec<u8>>,
}

impl<R: ReadAt> Cursor<'_, R> {
    /// Pushes child `i` of the lowest page, which is a branch page, onto the stack.
    ///
    /// Keys ascend within a page, and the keys of a child must lie between the child's key in the branch page
    /// and the next key there. So keys ascend over the whole tree, and no page can be visited twice.
    fn descend(&mut self, i: usize) -> Result<()> {
        let depth = self.stack.len();
        let Some(Level {
            page: parent, end, ..
        }) = self.stack.last()
        else {
            return Ok(());
        };
        let id = parent.child(i);
        if depth >= MAX_DEPTH {
            return Err(Error::corrupt(format!(
                "the bbolt tree is deeper than {MAX_DEPTH} pages at page {id}: it has a loop"
            )));
        }
        let path: usize = self.stack.iter().map(|level| level.page.buf.len()).sum();
        if path > MAX_PATH {
            return Err(Error::corrupt(format!(
                "the branch pages above bbolt page {id} have {path} bytes, more than bbolt writes"
            )));
        }
        let end = if i + 1 < parent.count {
            Some(parent.key(i + 1).to_vec())
        } else {
            end.clone()
        };
        let spare = self.spare.pop().unwrap_or_default();
        let page = self
            .db
            .load(id, &self.budget, &mut self.read_ahead, spare)?;
        // Only the root page of an empty bucket may be empty.
        let Some(last) = page.count.checked_sub(1) else {
            return Err(Error::corrupt(format!("bbolt leaf page {id} is empty")));
        };
        if page.key(0) < parent.key(i) {
            return Err(id.corrupt(format!(
                "begins below the key that its parent, page {}, has for it",
                parent.id
            )));
        }
        if end.as_deref().is_some_and(|end| page.key(last) >= end) {
            return Err(id.corrupt("reaches the key that its parent has for the next page"));
        }
        self.stack.push(Level { page, next: 0, end });
        Ok(())
    }

    /// Loads the root page onto the stack, unless that was done before.
    fn push_root(&mut self) -> Result<()> {
        let page = match self.root.take() {
            Some(Root::Page(id)) => {
                self.db
                    .load(id, &self.budget, &mut self.read_ahead, Vec::new())?
            }
            Some(Root::Inline(bytes)) => {
                // The page id in the header of an inline page is meaningless; bbolt writes 0.
                let header = PageHeader::decode(&bytes)
                    .ok_or_else(|| Error::corrupt("an inline bbolt bucket is cut short"))?;
                if header.flags != LEAF_PAGE_FLAG {
                    return Err(Error::corrupt("an inline bbolt bucket is not a leaf page"));
                }
                TreePage::check(bytes, PageId(0), header, &self.db.limits)?
            }
            None => return Ok(()),
        };
        self.stack.push(Level {
            page,
            next: 0,
            end: None,
        });
        Ok(())
    }

    /// Moves to the first entry whose key is `key` or higher; [`next`](Self::next) then returns it. Only a
    /// fresh cursor can seek.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `TooLarge`, `Io`; `Internal` if the cursor was used before.
    pub fn seek(&mut self, key: &[u8]) -> Result<()> {
        if self.root.is_none() {
            return Err(Error::internal("seek on a used bbolt cursor"));
        }
        self.push_root()?;
        while let Some(Level { page, next, .. }) = self.stack.last_mut() {
            // Binary search for the number of elements below `key`; in a branch page, at or below it.
            let (mut lo, mut hi) = (0, page.count);
            while lo < hi {
                let mid = (lo + hi) / 2;
                let below = if page.leaf {
                    page.key(mid) < key
                } else {
                    page.key(mid) <= key
                };
                if below { lo = mid + 1 } else { hi = mid }
            }
            if page.leaf {
                *next = lo;
                return Ok(());
            }
            let i = lo.saturating_sub(1);
            *next = i + 1;
            self.descend(i)?;
        }
        Ok(())
    }

    /// Returns the next entry, or `None` after the last.
    ///
    /// # Errors
    /// `CorruptSnapshot` if a page is damaged or the keys are not in ascending order; `TooLarge`; `Io`.
    #[allow(clippy::should_implement_trait)] // An `Iterator` cannot lend from itself.
    pub fn next(&mut self) -> Result<Option<BucketEntry<'_>>> {
        if self.root.is_some() {
            self.push_root()?;
        }
        loop {
            let Some(Level { page, next, .. }) = self.stack.last_mut() else {
                return Ok(None);
            };
            if *next >= page.count {
                // Long buffers are not kept: each level of the tree could hold one.
                if let Some(level) = self.stack.pop()
                    && level.page.buf.capacity() <= MOST_SPARE * self.db.page_size()
                {
                    self.spare.push(level.page.buf);
                }
                // Free the memory of a long value.
                self.value = Vec::new();
                continue;
            }
            let i = *next;
            *next += 1;
            if page.leaf {
                break;
            }
            self.descend(i)?;
        }
        let Some(Level { page, next, .. }) = self.stack.last() else {
            return Ok(None);
        };
        let entry = page.entry(*next - 1);
        let Some(values) = &page.values else {
            return Ok(Some(entry));
        };
        let (at, len) = values[*next - 1];
        self.value.clear();
        self.value.reserve_exact(len);
        self.value.resize(len, 0);
        self.db
            .src
            .read_exact_at(&mut self.value, at)
            .map_err(|e| page.id.unreadable(e))?;
        let value = self.value.as_slice();
        Ok(Some(BucketEntry { value, ..entry }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Reason;

    const PAGE: usize = 1024;

    /// Returns a file whose root bucket is one leaf page with these elements, as bbolt writes it.
    fn leaf_of(elements: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
        let mut page = vec![0; PAGE_HEADER_SIZE + elements.len() * LEAF_ELEMENT_SIZE];
        for (i, (key, value)) in elements.iter().enumerate() {
            let at = PAGE_HEADER_SIZE + i * LEAF_ELEMENT_SIZE;
            let sizes = [page.len() - at, key.len(), value.len()];
            for (n, size) in sizes.into_iter().enumerate() {
                page[at + 4 + n * 4..][..4].copy_from_slice(&(size as u32).to_le_bytes());
            }
            page.extend_from_slice(key);
            page.extend_from_slice(value);
        }
        let pages = page.len().div_ceil(PAGE);
        page.resize(pages * PAGE, 0);
        PageHeader {
            id: PageId(3),
            flags: LEAF_PAGE_FLAG,
            count: elements.len() as u16,
            overflow: pages as u32 - 1,
        }
        .encode(&mut page);
        let mut file = vec![0; 3 * PAGE];
        let meta = Meta {
            page_size: PAGE as u32,
            root: PageId(3),
            sequence: 0,
            freelist: PageId(2),
            high_water: PageId(3 + pages as u64),
            txid: 1,
        };
        meta.encode(&mut file[PAGE_HEADER_SIZE..]);
        file.extend(page);
        file
    }

    #[test]
    fn a_cursor_holds_one_value_of_a_long_page() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for _ in 0..crate::rounds(10, 50) {
            let elements: Vec<(Vec<u8>, Vec<u8>)> = (0..rng.u8(1..=5))
                .map(|i| {
                    let mut value = vec![0; rng.usize(..1_500_000)];
                    rng.fill(&mut value);
                    ([&[i][..], &vec![b'k'; rng.usize(..300)]].concat(), value)
                })
                .collect();
            let db = Database::open_within(leaf_of(&elements), Limits::default()).unwrap();
            let mut c = db.cursor(&db.root());
            let from = rng.usize(..elements.len());
            if from > 0 {
                c.seek(&elements[from].0).unwrap();
            }
            for (key, value) in &elements[from..] {
                let e = c.next().unwrap().unwrap();
                assert!(e.key == key && e.value == value && e.flags == 0);
                let long = db.size_of_root() > LONG_PAGE;
                assert_eq!(c.stack[0].page.values.is_some(), long);
                assert!(!long || c.stack[0].page.buf.len() < 4096);
            }
            assert_eq!(c.next().unwrap(), None);
            assert_eq!(c.value.capacity(), 0);
            assert!(c.spare.iter().all(|b| b.capacity() <= MOST_SPARE * PAGE));
            assert_eq!(
                db.last_key(&db.root()).unwrap().as_ref(),
                elements.last().map(|(key, _)| key)
            );
        }
    }

    impl Database<Vec<u8>> {
        fn size_of_root(&self) -> usize {
            self.src.len() - 3 * PAGE
        }
    }

    #[test]
    fn elements_beyond_the_limits_are_refused() {
        let limits = Limits {
            value_bytes: 1 << 20,
            ..Limits::default()
        };
        // The limit of an element allows 64 KiB beside the key and the value.
        for (bytes, reason) in [
            (1 << 20, None),
            (3 << 19, Some(Reason::TooLarge)),
            (8 << 20, Some(Reason::TooLarge)),
        ] {
            let elements = [(vec![1], vec![7; 10]), (vec![2], vec![7; bytes])];
            let db = Database::open_within(leaf_of(&elements), limits).unwrap();
            let read = db.cursor(&db.root()).next().map(|_| ());
            assert_eq!(read.err().map(|e| e.reason()), reason, "{bytes}");
        }
        // bbolt never writes a key of 40,000 bytes, so it is corrupt under any limits.
        for value in [10, 2 << 20] {
            let elements = [(vec![1; 40_000], vec![7; value])];
            let db = Database::open(leaf_of(&elements)).unwrap();
            let e = db.cursor(&db.root()).next().map(|_| ()).unwrap_err();
            assert_eq!(e.reason(), Reason::CorruptSnapshot);
        }
        let inline = vec![0; 100_000];
        assert!(Bucket::decode(&inline).is_err() && Bucket::decode(&inline[..1000]).is_ok());
    }
}
