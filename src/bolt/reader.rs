//! Reads a bbolt file page by page, in order, holding one page per level of the tree, and pages that lie
//! one behind the other with one read. Of a page of more than a megabyte it holds one value.
//!
//! It trusts nothing in the file: every page number, count, offset and the order of all keys is
//! checked, so loops and wild offsets end in an error. A walk never loads more pages than the file
//! has, so neither its time nor its memory outgrows the file. It does not write, and it does not
//! look at the freelist. `mvcc` and `ops` call it.

use super::page::*;
use crate::base::ReadAt;
use crate::base::limits::Limits;
use crate::error::{Error, Result};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Deeper trees than this do not exist: 4 KiB pages hold at least two children each.
const MAX_DEPTH: usize = 64;
/// Branch pages on the way to a leaf have no more bytes: bbolt has four keys of up to 32 KiB in one, or fills a page.
const MAX_PATH: usize = 4 << 20;
/// Of a longer page only the keys are held. bbolt makes such pages for up to four long values.
const LONG_PAGE: usize = 1 << 20;
/// Pages of the longest buffer that is kept for the next page.
const MOST_SPARE: usize = 4;

/// As much of a file's beginning as [`newest_meta`] may look at.
pub const METAS_END: usize = *PAGE_SIZES.end() + PAGE_HEADER_SIZE + META_SIZE;

/// The newest valid meta of a file, or of its first [`METAS_END`] bytes.
///
/// # Errors
/// `CorruptSnapshot` if no meta is valid; `Io`.
pub fn newest_meta(src: &impl ReadAt) -> Result<Meta> {
    let size = size_of_file(src)?;
    let read_meta = |offset: u64| -> Result<Result<Meta, &'static str>> {
        let mut b = [0u8; PAGE_HEADER_SIZE + META_SIZE];
        if offset + b.len() as u64 > size {
            return Ok(Err("it is beyond the end of the file"));
        }
        src.read_exact_at(&mut b, offset)
            .map_err(|e| Error::io("read the database's meta page", e))?;
        Ok(Meta::decode(&b[PAGE_HEADER_SIZE..]))
    };
    let first = read_meta(0)?;
    let second = match &first {
        Ok(m) => read_meta(u64::from(m.page_size))?,
        // The first meta cannot tell the page size: look where the second may be.
        Err(_) => {
            let mut found = Err("it was found at no page size");
            let mut at = *PAGE_SIZES.start();
            while found.is_err() && at <= *PAGE_SIZES.end() {
                found = read_meta(at as u64)?.and_then(|m| match m.page_size as usize == at {
                    true => Ok(m),
                    false => Err("it is at the wrong place"),
                });
                at *= 2;
            }
            found
        }
    };
    match (first, second) {
        (Ok(a), Ok(b)) if b.page_size == a.page_size && b.txid > a.txid => Ok(b),
        (Ok(a), _) => Ok(a),
        (Err(_), Ok(b)) => Ok(b),
        (Err(a), Err(b)) => Err(Error::corrupt(format!(
            "not a bbolt database: of the first meta page, {a}; of the second, {b}"
        ))),
    }
}

fn size_of_file(src: &impl ReadAt) -> Result<u64> {
    src.size()
        .map_err(|e| Error::io("read the database file", e))
}

/// An open bbolt file.
#[derive(Debug)]
pub struct Database<R> {
    src: R,
    meta: Meta,
    limits: Limits,
}

/// Where a bucket's tree begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    root: Root,
    /// bbolt's auto-increment counter of the bucket; etcd does not use it.
    pub sequence: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Root {
    Page(PageId),
    /// A small bucket lives in its parent's leaf: a page of its own in the value.
    Inline(Vec<u8>),
}

impl<R: ReadAt> Database<R> {
    /// Opens the file at its newest valid meta; one bad meta of the two is survived, as bbolt does.
    ///
    /// # Errors
    /// `CorruptSnapshot` where no meta is valid or the file is shorter than the meta says; `Io`.
    pub fn open(src: R) -> Result<Self> {
        Self::open_within(src, Limits::NONE)
    }

    /// As [`open`](Self::open), of a database that may be anybody's.
    ///
    /// # Errors
    /// As [`open`](Self::open); `TooLarge`, later on too, if it or an element of it is larger than is allowed.
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

    /// Gives back what it stands on.
    pub fn into_inner(self) -> R {
        self.src
    }

    /// The meta that counts.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// The note behind the first meta, as [`Writer::finish`](super::Writer::finish) wrote it; empty
    /// where there is none.
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

    /// How much it may hold.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Bytes of a page.
    pub fn page_size(&self) -> usize {
        self.meta.page_size as usize
    }

    /// The bucket that holds all others.
    pub fn root(&self) -> Bucket {
        Bucket {
            root: Root::Page(self.meta.root),
            sequence: self.meta.sequence,
        }
    }

    /// A top-level bucket by name.
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

    /// The bucket's last key, or `None` where it is empty.
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

    /// A cursor before the bucket's first entry.
    pub fn cursor(&self, bucket: &Bucket) -> Cursor<'_, R> {
        self.cursor_within(bucket, &self.page_budget())
    }

    /// What one pass over any number of buckets may load: as many pages as the file has.
    pub fn page_budget(&self) -> PageBudget {
        PageBudget(Arc::new(AtomicU64::new(self.meta.high_water.0)))
    }

    /// A cursor that shares `budget` with others. A pass over buckets within buckets needs it:
    /// where two of them name the same pages, each alone stays within the file, and all of them
    /// together take time without end.
    pub fn cursor_within(&self, bucket: &Bucket, budget: &PageBudget) -> Cursor<'_, R> {
        Cursor {
            db: self,
            budget: budget.clone(),
            stack: Vec::new(),
            root: Some(bucket.root.clone()),
            spare: Vec::new(),
            window: Window::new(self.meta.bytes()),
            value: Vec::new(),
        }
    }

    /// Reads and checks a page with what follows it.
    fn load(
        &self,
        id: PageId,
        budget: &PageBudget,
        window: &mut Window,
        mut buf: Vec<u8>,
    ) -> Result<Page> {
        let size = self.page_size();
        if id.0 < 2 || id.0 >= self.meta.high_water.0 {
            return Err(id.bad(format!(
                "does not exist (the file has {} pages)",
                self.meta.high_water
            )));
        }
        let offset = id.0 * size as u64;
        buf.resize(size, 0);
        let io = |e| id.unread(e);
        window.read(&self.src, &mut buf, offset).map_err(io)?;
        let header = PageHeader::decode(&buf).ok_or_else(|| id.bad("has no header"))?;
        if header.id != id {
            return Err(id.bad(format!("says that it is page {}", header.id)));
        }
        let pages = u64::from(header.overflow) + 1;
        if id.0 + pages > self.meta.high_water.0 {
            return Err(id.bad(format!(
                "goes on for {pages} pages, past the end of the file"
            )));
        }
        budget.take(id, pages)?;
        let bytes = size as u64 * pages;
        if bytes > LONG_PAGE as u64 {
            return self.load_long(buf, id, header, bytes);
        }
        if header.overflow > 0 {
            buf.resize(size * pages as usize, 0);
            window
                .read(&self.src, &mut buf[size..], offset + size as u64)
                .map_err(io)?;
        }
        Page::check(buf, id, header, &self.limits)
    }

    /// Reads the elements of a long page, and their keys; `buf` is how it begins. The page that it makes has no values.
    fn load_long(
        &self,
        mut buf: Vec<u8>,
        id: PageId,
        header: PageHeader,
        bytes: u64,
    ) -> Result<Page> {
        let offset = id.0 * self.page_size() as u64;
        let io = |e| id.unread(e);
        let longer = || {
            Error::corrupt(format!(
                "the keys of bbolt page {id} are longer than bbolt makes them"
            ))
        };
        if header.flags != LEAF_PAGE_FLAG {
            return Err(longer());
        }
        let count = usize::from(header.count);
        let elements = PAGE_HEADER_SIZE + count * LEAF_ELEMENT_SIZE;
        if elements as u64 > bytes {
            return Err(outside(id, 0));
        }
        buf.resize(elements, 0);
        self.src.read_exact_at(&mut buf, offset).map_err(io)?;
        let mut values = Vec::with_capacity(count);
        let mut free = elements as u64;
        for i in 0..count {
            let at = PAGE_HEADER_SIZE + i * LEAF_ELEMENT_SIZE;
            let span = element(&buf, true, at);
            let (pos, ksize, vsize) = span.ok_or_else(|| outside(id, i))?;
            let key_at = at as u64 + u64::from(pos);
            let value_at = key_at + u64::from(ksize);
            if key_at < free || value_at + u64::from(vsize) > bytes {
                return Err(outside(id, i));
            }
            check_size(id, i, ksize, vsize, &self.limits)?;
            free = value_at + u64::from(vsize);
            values.push((offset + value_at, vsize as usize));
            // The key goes behind those before it.
            let key = buf.len();
            if key + ksize as usize > elements + LONG_PAGE {
                return Err(longer());
            }
            buf.resize(key + ksize as usize, 0);
            self.src
                .read_exact_at(&mut buf[key..], offset + key_at)
                .map_err(io)?;
            buf[at + 4..at + 8].copy_from_slice(&((key - at) as u32).to_le_bytes());
            buf[at + 12..at + 16].fill(0);
        }
        let mut page = Page::check(buf, id, header, &self.limits)?;
        page.values = Some(values);
        Ok(page)
    }
}

impl PageId {
    fn bad(self, what: impl std::fmt::Display) -> Error {
        Error::corrupt(format!("bbolt page {self} {what}"))
    }

    fn unread(self, e: io::Error) -> Error {
        Error::io(format!("read bbolt page {self}"), e)
    }
}

fn outside(id: PageId, i: usize) -> Error {
    Error::corrupt(format!(
        "element {i} of bbolt page {id} lies outside of the page, or over the one before it"
    ))
}

/// Checks that an element is not longer than bbolt makes it, or than is allowed.
fn check_size(id: PageId, i: usize, ksize: u32, vsize: u32, limits: &Limits) -> Result<()> {
    if ksize > MAX_KEY_SIZE {
        return Err(Error::corrupt(format!(
            "element {i} of bbolt page {id} has a key of {ksize} bytes, and bbolt takes none of more than {MAX_KEY_SIZE}"
        )));
    }
    let bytes = u64::from(ksize) + u64::from(vsize);
    match bytes > limits.element_bytes() {
        true => {
            Err(limits.value_too_large(format!("element {i} of bbolt page {id} has {bytes} bytes")))
        }
        false => Ok(()),
    }
}

/// Bytes that one read fetches at most when pages lie one behind the other.
const MAX_WINDOW: usize = 256 << 10;

/// A part of the file that was read ahead of a cursor.
///
/// A read that begins at the end of the last one fetches more than it was asked for: twice what the cursor
/// took of the part before. So about twice the bytes that are wanted are read at most, in whatever order the
/// pages lie; and a page elsewhere, as a branch is between leaves, does not end the run.
#[derive(Debug, Default)]
struct Window {
    buf: Vec<u8>,
    /// Where `buf` begins.
    at: u64,
    /// Bytes of `buf` that the cursor took.
    taken: usize,
    /// The end of the last read past `buf`.
    last_end: u64,
    /// Nothing is read ahead past this.
    limit: u64,
}

impl Window {
    fn new(limit: u64) -> Self {
        Window {
            limit,
            ..Window::default()
        }
    }

    /// Fills `out` from `offset`.
    fn read(&mut self, src: &impl ReadAt, out: &mut [u8], offset: u64) -> io::Result<()> {
        let end = self.at + self.buf.len() as u64;
        if (self.at..end).contains(&offset) {
            let here = &self.buf[(offset - self.at) as usize..];
            let (now, later) = out.split_at_mut(out.len().min(here.len()));
            now.copy_from_slice(&here[..now.len()]);
            self.taken += now.len();
            return match later.is_empty() {
                true => Ok(()),
                false => self.read_on(src, later, end),
            };
        }
        self.read_on(src, out, offset)
    }

    /// Fills `out` from `offset`, which `buf` does not hold.
    fn read_on(&mut self, src: &impl ReadAt, out: &mut [u8], offset: u64) -> io::Result<()> {
        let run = if !self.buf.is_empty() && offset == self.at + self.buf.len() as u64 {
            self.taken.max(out.len())
        } else if offset == self.last_end {
            out.len()
        } else {
            0
        };
        let ahead = self.limit.saturating_sub(offset);
        let ahead = ahead.min(run.saturating_mul(2).min(MAX_WINDOW) as u64) as usize;
        if ahead > out.len() {
            if self.buf.capacity() < ahead {
                self.buf.clear();
                self.buf.reserve_exact(ahead);
            }
            self.buf.resize(ahead, 0);
            self.at = offset;
            self.taken = out.len();
            if src.read_exact_at(&mut self.buf, offset).is_ok() {
                out.copy_from_slice(&self.buf[..out.len()]);
                return Ok(());
            }
            // A page that nobody asked for may be what cannot be read.
            self.buf.clear();
        }
        src.read_exact_at(out, offset)?;
        self.last_end = offset + out.len() as u64;
        Ok(())
    }
}

/// How many pages a pass may still load; see [`Database::page_budget`].
#[derive(Debug, Clone)]
pub struct PageBudget(Arc<AtomicU64>);

impl PageBudget {
    fn take(&self, id: PageId, pages: u64) -> Result<()> {
        let take = |left: u64| left.checked_sub(pages);
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken
            .map(drop)
            .map_err(|_| id.bad("is one too many: pages of its tree overlap, or stand in it twice"))
    }
}

impl Bucket {
    /// Reads a bucket from the value of its entry.
    ///
    /// # Errors
    /// `CorruptSnapshot` where the value is too short.
    pub fn decode(value: &[u8]) -> Result<Self> {
        let bad = || Error::corrupt("a bbolt bucket's header is cut short");
        let root = u64_at(value, 0).ok_or_else(bad)?;
        let sequence = u64_at(value, 8).ok_or_else(bad)?;
        let root = if root == 0 {
            if value.len() > *PAGE_SIZES.end() {
                return Err(Error::corrupt(format!(
                    "an inline bbolt bucket has {} bytes, more than any page",
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

/// Where the key of the element at `at` is, seen from there, and the sizes of its key and value.
fn element(buf: &[u8], leaf: bool, at: usize) -> Option<(u32, u32, u32)> {
    let field = |n: usize| u32_at(buf, at + n);
    match leaf {
        true => Some((field(4)?, field(8)?, field(12)?)),
        false => Some((field(0)?, field(4)?, 0)),
    }
}

/// A page whose elements have been checked to lie within it.
#[derive(Debug)]
struct Page {
    buf: Vec<u8>,
    id: PageId,
    leaf: bool,
    count: usize,
    /// Where the values of a long page are in the file, and how long.
    values: Option<Vec<(u64, usize)>>,
}

impl Page {
    fn check(buf: Vec<u8>, id: PageId, header: PageHeader, limits: &Limits) -> Result<Self> {
        let leaf = match header.flags {
            LEAF_PAGE_FLAG => true,
            BRANCH_PAGE_FLAG => false,
            other => {
                return Err(id.bad(format!("is no tree page (flags {other:#06x})")));
            }
        };
        let count = usize::from(header.count);
        if !leaf && count == 0 {
            return Err(Error::corrupt(format!("bbolt branch page {id} is empty")));
        }
        // Leaf and branch elements have the same size; keys and values come after all of them.
        let mut free = (PAGE_HEADER_SIZE + count * LEAF_ELEMENT_SIZE) as u64;
        let mut last_key: Option<&[u8]> = None;
        for i in 0..count {
            let at = PAGE_HEADER_SIZE + i * LEAF_ELEMENT_SIZE;
            // bbolt lays them out one after the other. Were they allowed to overlap, a page of some
            // elements could hold many times its size.
            let span = element(&buf, leaf, at);
            let (pos, ksize, vsize) = span.ok_or_else(|| outside(id, i))?;
            let from = at as u64 + u64::from(pos);
            let end = from + u64::from(ksize) + u64::from(vsize);
            if from < free || end > buf.len() as u64 {
                return Err(outside(id, i));
            }
            check_size(id, i, ksize, vsize, limits)?;
            free = end;
            let key = &buf[from as usize..][..ksize as usize];
            if last_key.is_some_and(|last| key <= last) {
                return Err(Error::corrupt(format!(
                    "the keys of bbolt page {id} are not in ascending order"
                )));
            }
            last_key = Some(key);
        }
        Ok(Page {
            buf,
            id,
            leaf,
            count,
            values: None,
        })
    }

    // The offsets below were checked by `check`.
    fn key(&self, i: usize) -> &[u8] {
        self.entry(i).key
    }

    fn entry(&self, i: usize) -> Entry<'_> {
        let at = PAGE_HEADER_SIZE + i * LEAF_ELEMENT_SIZE;
        let (pos, ksize, vsize) = element(&self.buf, self.leaf, at).unwrap_or_default();
        let rest = &self.buf[at + pos as usize..];
        let (key, rest) = rest.split_at(ksize as usize);
        Entry {
            flags: u32_at(&self.buf, at).unwrap_or(0),
            key,
            value: &rest[..vsize as usize],
        }
    }

    fn child(&self, i: usize) -> PageId {
        let at = PAGE_HEADER_SIZE + i * BRANCH_ELEMENT_SIZE;
        PageId(u64_at(&self.buf, at + 8).unwrap_or(0))
    }
}

/// One entry of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// [`BUCKET_LEAF_FLAG`] or 0.
    pub flags: u32,
    /// The key.
    pub key: &'a [u8],
    /// The value, or a bucket's header.
    pub value: &'a [u8],
}

impl Entry<'_> {
    /// Whether the value is a bucket.
    pub fn is_bucket(&self) -> bool {
        self.flags & BUCKET_LEAF_FLAG != 0
    }
}

/// Walks a bucket's entries in the order of their keys.
pub struct Cursor<'d, R> {
    db: &'d Database<R>,
    budget: PageBudget,
    /// From the root to the current leaf.
    stack: Vec<Level>,
    root: Option<Root>,
    spare: Vec<Vec<u8>>,
    window: Window,
    /// The current value, if its page is a long one.
    value: Vec<u8>,
}

/// A page on the way to the current entry.
struct Level {
    page: Page,
    /// The element to visit next.
    next: usize,
    /// All keys of the page are below this one; `None` at the right edge of the tree.
    end: Option<Vec<u8>>,
}

impl<R: ReadAt> Cursor<'_, R> {
    /// Puts the `i`th child of the lowest page, a branch, onto the stack.
    ///
    /// Keys ascend within a page, and a child's lie between the key that its branch names for it and
    /// the next one. So they ascend over the whole tree, and no page can be visited twice.
    fn descend(&mut self, i: usize) -> Result<()> {
        let depth = self.stack.len();
        let Some(Level {
            page: above, end, ..
        }) = self.stack.last()
        else {
            return Ok(());
        };
        let id = above.child(i);
        if depth >= MAX_DEPTH {
            return Err(Error::corrupt(format!(
                "the bbolt tree is deeper than {MAX_DEPTH} pages at page {id}: it loops"
            )));
        }
        let path: usize = self.stack.iter().map(|level| level.page.buf.len()).sum();
        if path > MAX_PATH {
            return Err(Error::corrupt(format!(
                "the branch pages above bbolt page {id} have {path} bytes, more than bbolt makes them"
            )));
        }
        let end = match i + 1 < above.count {
            true => Some(above.key(i + 1).to_vec()),
            false => end.clone(),
        };
        let spare = self.spare.pop().unwrap_or_default();
        let page = self.db.load(id, &self.budget, &mut self.window, spare)?;
        // Only the root of an empty bucket has nothing in it.
        let Some(last) = page.count.checked_sub(1) else {
            return Err(Error::corrupt(format!("bbolt leaf page {id} is empty")));
        };
        if page.key(0) < above.key(i) {
            return Err(id.bad(format!(
                "begins below the key that page {} names for it",
                above.id
            )));
        }
        if end.as_deref().is_some_and(|end| page.key(last) >= end) {
            return Err(id.bad("reaches the key that is named for the page behind it".to_string()));
        }
        self.stack.push(Level { page, next: 0, end });
        Ok(())
    }

    fn push_root(&mut self) -> Result<()> {
        let page = match self.root.take() {
            Some(Root::Page(id)) => self
                .db
                .load(id, &self.budget, &mut self.window, Vec::new())?,
            Some(Root::Inline(bytes)) => {
                // The id of an inline page is written as 0 and means nothing.
                let header = PageHeader::decode(&bytes)
                    .ok_or_else(|| Error::corrupt("an inline bbolt bucket is cut short"))?;
                if header.flags != LEAF_PAGE_FLAG {
                    return Err(Error::corrupt("an inline bbolt bucket is no leaf page"));
                }
                Page::check(bytes, PageId(0), header, &self.db.limits)?
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

    /// Moves to the first entry whose key is not below `key`; the next call of
    /// [`next`](Self::next) returns it. Only a fresh cursor can seek.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`; `Internal` on a used cursor.
    pub fn seek(&mut self, key: &[u8]) -> Result<()> {
        if self.root.is_none() {
            return Err(Error::internal("seek on a used bbolt cursor"));
        }
        self.push_root()?;
        while let Some(Level { page, next, .. }) = self.stack.last_mut() {
            // The number of elements at or below `key`, by binary search.
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

    /// The next entry, or `None` after the last.
    ///
    /// # Errors
    /// `CorruptSnapshot` where a page is damaged or the keys are not in ascending order; `Io`.
    #[allow(clippy::should_implement_trait)] // it lends: an Iterator cannot
    pub fn next(&mut self) -> Result<Option<Entry<'_>>> {
        if self.root.is_some() {
            self.push_root()?;
        }
        loop {
            let Some(Level { page, next, .. }) = self.stack.last_mut() else {
                return Ok(None);
            };
            if *next >= page.count {
                // A long buffer would keep its memory, one for each level.
                if let Some(level) = self.stack.pop()
                    && level.page.buf.capacity() <= MOST_SPARE * self.db.page_size()
                {
                    self.spare.push(level.page.buf);
                }
                // One long value must not keep its memory.
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
            .map_err(|e| page.id.unread(e))?;
        let value = self.value.as_slice();
        Ok(Some(Entry { value, ..entry }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Reason;
    use std::cell::Cell;

    /// Counts what is read, and fails at one offset.
    struct Counting {
        bytes: Vec<u8>,
        bad: Option<u64>,
        reads: Cell<u64>,
        read: Cell<usize>,
    }

    impl ReadAt for Counting {
        fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            self.reads.set(self.reads.get() + 1);
            self.read.set(self.read.get() + buf.len());
            let here = offset..offset + buf.len() as u64;
            if self.bad.is_some_and(|bad| here.contains(&bad)) {
                return Err(io::ErrorKind::Other.into());
            }
            self.bytes.read_exact_at(buf, offset)
        }
        fn size(&self) -> io::Result<u64> {
            self.bytes.size()
        }
    }

    const PAGE: usize = 1024;

    fn file(pages: usize) -> Counting {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let mut bytes = vec![0; pages * PAGE];
        rng.fill(&mut bytes);
        Counting {
            bytes,
            bad: None,
            reads: Cell::new(0),
            read: Cell::new(0),
        }
    }

    /// Reads pages, and compares each with the file. Gives the bytes that were asked for.
    fn walk(src: &Counting, order: impl IntoIterator<Item = (usize, usize)>) -> usize {
        let mut window = Window::new(src.bytes.len() as u64);
        let mut wanted = 0;
        for (page, pages) in order {
            let mut out = vec![0; pages * PAGE];
            let at = page * PAGE;
            window.read(src, &mut out, at as u64).unwrap();
            assert!(out == src.bytes[at..at + out.len()], "page {page}");
            assert!(window.buf.capacity() <= MAX_WINDOW);
            wanted += out.len();
        }
        wanted
    }

    #[test]
    fn pages_in_any_order_are_read_as_they_lie_and_few_others() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for _ in 0..crate::rounds(30, 300) {
            let src = file(1500);
            let mut order = Vec::new();
            while order.len() < 2000 {
                let (from, step) = (rng.usize(..1400), rng.usize(1..5));
                let size = rng.usize(1..4);
                let run = (from..1500 - size).step_by(step * size);
                order.extend(run.take(rng.usize(1..300)).map(|page| (page, size)));
            }
            let wanted = walk(&src, order);
            assert!(src.read.get() <= 3 * wanted, "{}", src.read.get());
        }
        // The worst case: each run ends where a window begins, of which nothing is wanted.
        let src = file(1 << 14);
        let (mut page, mut order) = (0, Vec::new());
        while page < 1 << 13 {
            order.extend((page..page + 40).map(|page| (page, 1)));
            page += 256;
        }
        let wanted = walk(&src, order);
        assert!(src.read.get() <= 3 * wanted, "{}", src.read.get());
    }

    #[test]
    fn pages_one_behind_the_other_need_few_reads() {
        let src = file(20_000);
        // A branch stands before or behind its leaves.
        let leaves = (0..10_000).flat_map(|i| {
            let branch = (i % 100 == 0).then_some((19_000 - i / 100 * 7, 1));
            branch.into_iter().chain([(i, 1)])
        });
        let wanted = walk(&src, leaves);
        assert!(src.reads.get() < 170, "{} reads", src.reads.get());
        assert!(src.read.get() < wanted + MAX_WINDOW);
    }

    #[test]
    fn a_page_that_cannot_be_read_fails_only_those_that_want_it() {
        let mut src = file(300);
        src.bad = Some(200 * PAGE as u64);
        walk(&src, (0..200).chain(201..300).map(|page| (page, 1)));
        let mut window = Window::new(src.bytes.len() as u64);
        let mut out = vec![0; PAGE];
        for page in 0..300 {
            let read = window.read(&src, &mut out, (page * PAGE) as u64);
            assert_eq!(read.is_ok(), page != 200, "page {page}");
        }
    }

    /// A file whose root is one leaf of these elements, laid out as bbolt does it.
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
    fn of_a_long_page_one_value_is_held() {
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
    fn an_element_that_is_too_long_is_not_read() {
        let limits = Limits {
            value_bytes: 1 << 20,
            ..Limits::default()
        };
        // There is room for what stands around a value.
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
        // A key of that length is none of bbolt's, whatever is allowed.
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
