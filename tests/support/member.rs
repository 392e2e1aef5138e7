//! Data directories: which files they hold, and whether a member is complete.

use deltafold::bolt::Database;
use deltafold::datadir::{snap, wal};
use deltafold::mvcc;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// The content of a file: its length, and its bytes up to the last one that is not zero. WAL segments of etcd
/// are 64 MB long and mostly zeros.
#[derive(Clone, PartialEq, Eq)]
pub struct Content {
    length: u64,
    bytes: Vec<u8>,
}

/// Files by their paths below a folder.
pub type Files = BTreeMap<String, Content>;

fn walk(root: &Path, each: &mut dyn FnMut(String, &Path)) {
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.expect("an entry").path();
            let below = path.strip_prefix(root).expect("a path below");
            each(below.to_str().expect("a plain name").to_owned(), &path);
            if path.is_dir() {
                folders.push(path);
            }
        }
    }
}

fn content(path: &Path) -> Content {
    const CHUNK: u64 = 1 << 20;
    let file = File::open(path).expect("a file");
    let length = file.metadata().expect("its length").len();
    // Read backwards: most of the file may be zeros.
    let mut chunk = vec![0; CHUNK as usize];
    let zeros = chunk.clone();
    let mut end = length;
    while end > 0 {
        let from = (end - 1) / CHUNK * CHUNK;
        let chunk = &mut chunk[..(end - from) as usize];
        file.read_exact_at(chunk, from).expect("its bytes");
        if *chunk != zeros[..chunk.len()] {
            let last = chunk
                .iter()
                .rposition(|&b| b != 0)
                .expect("one that is not zero");
            end = from + last as u64 + 1;
            break;
        }
        end = from;
    }
    let mut bytes = vec![0; end as usize];
    file.read_exact_at(&mut bytes, 0).expect("its bytes");
    Content { length, bytes }
}

/// Returns every file below a folder, or nothing if the folder does not exist.
pub fn files(root: &Path) -> Files {
    let mut all = Files::new();
    if root.exists() {
        walk(root, &mut |name, path| {
            if !path.is_dir() {
                all.insert(name, content(path));
            }
        });
    }
    all
}

/// Writes files. Trailing zeros become holes.
pub fn write_files(root: &Path, files: &Files) {
    fs::create_dir_all(root).expect("create a folder");
    for (name, content) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("create a folder");
        fs::write(&path, &content.bytes).expect("write a file");
        let file = File::options().write(true).open(&path).expect("open it");
        file.set_len(content.length).expect("lengthen it");
    }
}

/// Mode, length, time of modification, inode.
pub type Stamp = (u32, u64, i64, i64, u64);

/// Returns the stamps of a folder and everything below it, to see whether anything was touched.
pub fn stamps(root: &Path) -> BTreeMap<String, Stamp> {
    let mut all = BTreeMap::new();
    let stamp = |path: &Path| {
        let m = fs::symlink_metadata(path).expect("what is there");
        (m.mode(), m.len(), m.mtime(), m.mtime_nsec(), m.ino())
    };
    if root.exists() {
        // Reading a folder changes none of these values.
        all.insert(String::new(), stamp(root));
        walk(root, &mut |name, path| {
            all.insert(name, stamp(path));
        });
    }
    all
}

/// Returns paths that exist only while a restore runs or after it was killed.
pub fn debris(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    if root.exists() {
        walk(root, &mut |name, _| {
            let last = name.rsplit('/').next().expect("a name");
            if last.starts_with(".deltafold") {
                found.push(name);
            }
        });
    }
    found
}

/// Returns the HashKV of a member's database, read from the file.
pub fn hash_of(data_dir: &Path) -> deltafold::Result<u32> {
    let file = File::open(data_dir.join("member/snap/db"))
        .map_err(|e| deltafold::Error::io("open the database", e))?;
    Ok(mvcc::hash_kv(&Database::open(file)?, None)?.hash)
}

/// Asserts that a restored member is complete: its database has this HashKV, and its WAL and `.snap` are
/// readable and belong to the same cluster. `wal_dir`: the WAL's directory if it is not inside the member.
#[track_caller]
pub fn assert_whole(data_dir: &Path, wal_dir: Option<&Path>, hash: u32, what: &str) {
    assert_eq!(
        hash_of(data_dir).unwrap_or_else(|e| panic!("{what}: {e}")),
        hash,
        "{what}"
    );
    let own = data_dir.join("member/wal");
    let log = wal::read(wal_dir.unwrap_or(&own)).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!((log.first_index, log.torn.clone()), (1, None), "{what}");
    let newest = snap::newest(&data_dir.join("member/snap"), &log);
    let newest = newest.unwrap_or_else(|e| panic!("{what}: {e}"));
    let newest = newest.unwrap_or_else(|| panic!("{what}: no .snap"));
    assert_eq!(newest.index, log.last_index, "{what}");
}

/// Returns the only segment of a WAL.
pub fn segment(wal_dir: &Path) -> PathBuf {
    let paths = wal::segment_paths(wal_dir).expect("a WAL");
    assert_eq!(paths.len(), 1, "{paths:?}");
    paths.into_iter().next().expect("a segment")
}

/// Flips a bit.
pub fn flip(path: &Path, at: u64) {
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("open a file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], at).expect("change it");
}

/// Cuts a file.
pub fn cut(path: &Path, length: u64) {
    let file = File::options().write(true).open(path).expect("open a file");
    file.set_len(length).expect("cut it");
}
