//! Damaged databases with a valid checksum: bbolt pages and records are refused with the right reason, within bounded memory.

use super::corrupted_input::{GZIP, refuses, run, with};
use crate::support::tiny_backup::*;
use deltafold::bolt::page::{Meta, PAGE_HEADER_SIZE, PageHeader};
use deltafold::bolt::{Database, PageId};

/// A bbolt file that is edited by hand.
struct Edit(Vec<u8>);

impl Edit {
    const PAGE: usize = 1024;

    fn new() -> Self {
        Edit(small_database(Self::PAGE))
    }
    /// Returns the first page with these flags.
    fn find(&self, flags: u8) -> usize {
        let mut pages = self.0.chunks_exact(Self::PAGE);
        pages.position(|p| p[8] == flags).expect("such a page")
    }
    /// Returns the only page of the root bucket, the last one.
    fn root(&self) -> usize {
        self.0.len() / Self::PAGE - 1
    }
    fn put(mut self, page: usize, at: usize, bytes: &[u8]) -> Self {
        self.0[page * Self::PAGE + at..][..bytes.len()].copy_from_slice(bytes);
        self
    }
    /// Changes both meta pages and corrects their checksums.
    fn metas(mut self, change: fn(&mut Meta)) -> Self {
        for page in 0..2 {
            let body = &mut self.0[page * Self::PAGE + PAGE_HEADER_SIZE..];
            let mut meta = Meta::decode(body).unwrap();
            change(&mut meta);
            meta.encode(body);
        }
        self
    }
}

#[test]
fn databases_that_are_damaged_in_a_right_frame() {
    let new = Edit::new;
    let (leaf, branch, root) = (new().find(2), new().find(1), new().root());
    // Offsets of elements. The first one follows the header.
    let element = |i: usize| 16 + 16 * i;
    let max = [0xff; 8];
    let word = |n: usize| (n as u64).to_le_bytes();
    let cases: Vec<(&str, Edit, &str)> = vec![
        (
            "a branch that names itself",
            new().put(branch, element(0) + 8, &word(branch)),
            "reaches the key",
        ),
        (
            "a branch that names a page twice",
            new().put(branch, element(1) + 8, &word(leaf)),
            "begins below the key",
        ),
        (
            "a branch that names the root",
            new().put(branch, element(0) + 8, &word(root)),
            "reaches the key",
        ),
        (
            "a child beyond the file",
            new().put(branch, element(0) + 8, &word(1 << 40)),
            "does not exist",
        ),
        (
            "a child beyond all numbers",
            new().put(branch, element(0) + 8, &max),
            "does not exist",
        ),
        (
            "a child that is a meta",
            new().put(branch, element(0) + 8, &word(1)),
            "does not exist",
        ),
        (
            "a child that is the freelist",
            new().put(branch, element(0) + 8, &word(2)),
            "neither a leaf nor a branch page",
        ),
        (
            "a key's wild offset",
            new().put(leaf, element(0) + 4, &max[..4]),
            "outside of the page",
        ),
        (
            "an offset into the elements",
            new().put(leaf, element(0) + 4, &[16, 0]),
            "outside of the page",
        ),
        (
            "a wild key size",
            new().put(leaf, element(0) + 8, &max[..4]),
            "outside of the page",
        ),
        (
            "a wild value size",
            new().put(leaf, element(0) + 12, &max[..4]),
            "outside of the page",
        ),
        (
            "a value that is longer by one",
            new().put(leaf, element(0) + 12, &[255]),
            "overlaps the one before it",
        ),
        (
            "a branch's wild offset",
            new().put(branch, element(0), &max[..4]),
            "outside of the page",
        ),
        (
            "more elements than there are",
            new().put(leaf, 10, &max[..2]),
            "outside of the page",
        ),
        (
            "a branch without elements",
            new().put(branch, 10, &[0, 0]),
            "is empty",
        ),
        (
            "a leaf without elements",
            new().put(leaf, 10, &[0, 0]),
            "is empty",
        ),
        (
            "overflow past the end",
            new().put(leaf, 12, &max[..4]),
            "past the end of the file",
        ),
        (
            "another page's number",
            new().put(leaf, 0, &word(leaf + 1)),
            "says that it is page",
        ),
        (
            "a leaf that says it is a branch",
            new().put(leaf, 8, &[1]),
            "bbolt page",
        ),
        (
            "a leaf that says it is nothing",
            new().put(leaf, 8, &[0]),
            "neither a leaf nor a branch page",
        ),
        (
            "keys out of order",
            new().put(
                leaf,
                16 + 16 * usize::from(new().0[leaf * 1024 + 10]) + 7,
                &[200],
            ),
            "ascending order",
        ),
        (
            "a branch's key above its child's",
            new().put(
                branch,
                16 + 16 * usize::from(new().0[branch * 1024 + 10]),
                &[9],
            ),
            "ascending order",
        ),
        (
            "a bucket's header that is cut",
            new().put(root, element(0) + 12, &[15, 0]),
            "cut short",
        ),
        (
            "a bucket that is none",
            new().put(root, element(3), &[0]),
            "has no bucket",
        ),
        (
            "a root beyond the file",
            new().metas(|m| m.root.0 = 1 << 50),
            "does not exist",
        ),
        (
            "more pages than there are",
            new().metas(|m| m.high_water.0 += 1),
            "cut short",
        ),
        (
            "pages of 512 bytes",
            new().metas(|m| m.page_size = 512),
            "power of two",
        ),
        (
            "pages of 128 KiB",
            new().metas(|m| m.page_size = 128 << 10),
            "power of two",
        ),
        (
            "pages of 3000 bytes",
            new().metas(|m| m.page_size = 3000),
            "power of two",
        ),
        (
            "pages of no bytes",
            new().metas(|m| m.page_size = 0),
            "power of two",
        ),
        (
            "pages twice as large",
            new().metas(|m| m.page_size = 2048),
            "cut short",
        ),
        (
            "pages half as large",
            new().metas(|m| m.page_size = 16384),
            "cut short",
        ),
        (
            "both metas bad",
            new().put(0, 20, &[9]).put(1, 20, &[9]),
            "not a bbolt database",
        ),
        (
            "both checksums bad",
            new().put(0, 72, &[9]).put(1, 72, &[9]),
            "wrong checksum",
        ),
        (
            "a part of a page behind it",
            Edit([&new().0[..], &[0; 100]].concat()),
            "it does not end",
        ),
        (
            "the first page alone",
            Edit(new().0[..1024].to_vec()),
            "cut short",
        ),
    ];
    let path = full_name(GZIP);
    for (what, file, says) in cases {
        let objects = with(&path, object(&file.0, GZIP));
        refuses(what, &objects, "CorruptSnapshot", &[&path, says]);
    }
    // With one valid meta page compaction goes on, and the result is the same.
    let want = run(&small_bucket(1024, GZIP)).1;
    for (meta, at) in [(0, 20), (0, 72), (1, 20), (1, 72)] {
        let file = new().put(meta, at, &[0xaa]);
        let (code, json, stderr) = run(&with(&path, object(&file.0, GZIP)));
        assert_eq!(code, 0, "{stderr}");
        for field in ["hash_kv", "live_keys", "snapshot", "bytes_written"] {
            assert_eq!(json[field], want[field], "{field}");
        }
    }
}

/// A pass loads no more than the size of the file, however its pages overlap.
#[test]
fn pages_that_overlap_cost_no_more_than_the_file() {
    const PAGES: usize = 60;
    let mut file = vec![0; PAGES * 1024];
    let meta = Meta {
        page_size: 1024,
        root: PageId(2),
        sequence: 0,
        freelist: PageId(u64::MAX),
        high_water: PageId(PAGES as u64),
        txid: 1,
    };
    meta.encode(&mut file[PAGE_HEADER_SIZE..]);
    let page = |file: &mut [u8], n: usize, flags: u16, overflow: usize, element: [u64; 2]| {
        let header = PageHeader {
            id: PageId(n as u64),
            flags,
            count: 1,
            overflow: overflow as u32,
        };
        header.encode(&mut file[n * 1024..]);
        for (i, word) in element.iter().enumerate() {
            file[n * 1024 + 16 + 8 * i..][..8].copy_from_slice(&word.to_le_bytes());
        }
    };
    let walk = |file: &[u8]| {
        let db = Database::open(file.to_vec())?;
        let mut c = db.cursor(&db.root());
        while c.next()?.is_some() {}
        Ok::<_, deltafold::Error>(())
    };
    // A chain of branch pages. The leaf's key follows its element.
    for n in 2..PAGES - 1 {
        page(&mut file, n, 1, 0, [16, n as u64 + 1]);
    }
    page(&mut file, PAGES - 1, 2, 0, [16 << 32, 1]);
    assert!(walk(&file).is_ok());
    // Each page extends to the end of the file: together they are half the square of its size.
    for n in 2..PAGES - 1 {
        page(&mut file, n, 1, PAGES - 1 - n, [16, n as u64 + 1]);
    }
    let e = walk(&file).unwrap_err();
    assert!(e.to_string().contains("exceeds the number of pages"), "{e}");
}

/// The leaf of each bucket names itself n times as a bucket. Without one budget for all, a copy would follow
/// n^16 of them.
#[test]
fn buckets_that_share_pages_are_refused() {
    let edit = Edit::new();
    let root = edit.root();
    let mut file = edit.0;
    // Every top-level bucket except `key` and `meta` is the root page again.
    for i in [0, 1, 2, 4, 5] {
        let at = root * 1024 + 16 + 16 * i;
        let pos = u32::from_le_bytes(file[at + 4..at + 8].try_into().unwrap()) as usize;
        let ksize = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap()) as usize;
        let value = at + pos + ksize;
        file[value..value + 8].copy_from_slice(&(root as u64).to_le_bytes());
    }
    let path = full_name(GZIP);
    refuses(
        "shared",
        &with(&path, object(&file, GZIP)),
        "CorruptSnapshot",
        &[&path, "exceeds the number of pages"],
    );
}
