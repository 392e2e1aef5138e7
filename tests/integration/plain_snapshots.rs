//! Plain snapshot files, in every form that etcdctl, k3s, kOps and OpenShift produce.

use crate::support::etcd::{Etcd, EtcdVersion};
use crate::support::history::{Compression, with_checksum};
use crate::support::scratch;
use crate::support::tiny_backup::{SMALL_BASE, small_database, small_events};
use deltafold::Reason;
use deltafold::mvcc::Revision;
use deltafold::prefix::Context;
use deltafold::prefix::open::{FilePlace, PlainSnapshot};
use deltafold::store::Store;
use deltafold::store::exclude::ExcludeTags;
use object_store::memory::InMemory;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use zip::CompressionMethod;
use zip::write::{SimpleFileOptions, ZipWriter};

struct Here {
    _runtime: tokio::runtime::Runtime,
    ctx: Context,
    dir: TempDir,
}

impl Here {
    fn new() -> Self {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let dir = scratch::folder().unwrap();
        let memory = Arc::new(InMemory::new());
        let store = Store::new(
            memory,
            Default::default(),
            "memory:".to_owned(),
            ExcludeTags::none(),
            runtime.handle().clone(),
        );
        Here {
            ctx: Context {
                store,
                temp_dir: dir.path().to_owned(),
                threads: 1,
                keys: Default::default(),
                trust: Default::default(),
                limits: Default::default(),
                marks: Default::default(),
            },
            _runtime: runtime,
            dir,
        }
    }

    fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn open(&self, name: &str, bytes: &[u8]) -> deltafold::Result<PlainSnapshot> {
        self.ctx.plain(&FilePlace::Path(self.put(name, bytes)))
    }

    /// Asserts that damaged bytes are refused with a message that names the file.
    fn refuses(&self, name: &str, bytes: &[u8], says: &str) {
        let e = match self.open(name, bytes) {
            Ok(_) => panic!("{name} was opened; expected: {says}"),
            Err(e) => e,
        };
        assert_eq!(e.reason(), Reason::CorruptSnapshot, "{name}: {e}");
        let text = e.to_string();
        assert!(text.contains(name) && text.contains(says), "{text}");
    }
}

fn zipped(files: &[(&str, &[u8])], method: CompressionMethod) -> Vec<u8> {
    let mut zip = ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(method);
    for (name, bytes) in files {
        match name.strip_suffix('/') {
            Some(folder) => zip.add_directory(folder, options).unwrap(),
            None => {
                zip.start_file(*name, options).unwrap();
                zip.write_all(bytes).unwrap();
            }
        }
    }
    zip.finish().unwrap().into_inner()
}

/// Returns every form of a database: file name, bytes, compression.
fn shapes(db: &[u8]) -> Vec<(String, Vec<u8>, &'static str)> {
    let mut shapes: Vec<_> = [
        ("snapshot.db", Compression::None, "none"),
        // kOps' name. A name matters only if it ends in .Z.
        ("etcd.backup.gz", Compression::Gzip, "gzip"),
        ("gzip-under-another-name.db", Compression::Gzip, "gzip"),
        ("etcd.zlib", Compression::Zlib, "zlib"),
        (
            "Full-00000000-00000040-1795224681.Z",
            Compression::Lzw,
            "lzw",
        ),
        (
            "Full-00000000-00000040-1795224681.zst.final",
            Compression::Zstd,
            "zstd",
        ),
    ]
    .into_iter()
    .map(|(name, packed, said)| (name.to_owned(), packed.pack(db), said))
    .collect();
    for method in [CompressionMethod::Deflated, CompressionMethod::Stored] {
        // k3s names the file in the archive like the archive.
        let zip = zipped(&[("on-demand-node-1795224681", db)], method);
        shapes.push((format!("{method:?}.zip"), zip, "zip"));
    }
    let in_folder = [("backup/", &[][..]), ("backup/etcd.db", db)];
    let zip = zipped(&in_folder, CompressionMethod::Deflated);
    shapes.push(("folder.zip".to_owned(), zip, "zip"));
    // RKE1 puts the state of the cluster beside it.
    let with_state = [("backup/c-1", db), ("etc/kubernetes/c-1.rkestate", b"{}")];
    let zip = zipped(&with_state, CompressionMethod::Deflated);
    shapes.push(("rke1.zip".to_owned(), zip, "zip"));
    shapes
}

#[test]
fn every_shape_opens_with_and_without_a_checksum() {
    let here = Here::new();
    for page_size in [1024, 4096, 65536] {
        let db = small_database(page_size);
        let framed = with_checksum(&db);
        for (payload, has_checksum) in [(&db, false), (&framed, true)] {
            for (name, bytes, compression) in shapes(payload) {
                let plain = here
                    .open(&name, &bytes)
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(plain.base.revision, Revision(SMALL_BASE), "{name}");
                assert_eq!(plain.has_checksum, has_checksum, "{name}");
                assert_eq!(plain.compression, compression, "{name}");
                assert_eq!(plain.file_bytes, bytes.len() as u64, "{name}");
                let warning = plain.warning(&name);
                assert_eq!(warning.is_some(), !has_checksum, "{name}");
                assert_eq!(
                    deltafold::mvcc::hash_kv(&plain.db, None).unwrap().live_keys,
                    3
                );
            }
        }
    }
}

#[test]
fn what_is_cut_or_flipped_is_refused() {
    let here = Here::new();
    let db = with_checksum(&small_database(1024));
    for (name, bytes, compression) in shapes(&db) {
        for cut in (1..bytes.len()).step_by(bytes.len() / 40) {
            // Cut between pages and checksum, it is a copied member/snap/db.
            if name.ends_with(".db") && cut == db.len() - 32 {
                continue;
            }
            here.refuses(&name, &bytes[..cut], "");
        }
        if name.ends_with(".zip") {
            // A zip has names and times without a checksum, and may end with a comment.
            continue;
        }
        for at in (0..bytes.len()).step_by(bytes.len() / 97) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x10;
            // Some bits of compressed data mean nothing; then the database is complete, as its hash shows.
            match here.open(&name, &flipped) {
                Ok(plain) => assert!(plain.has_checksum && compression != "none", "{name} {at}"),
                Err(e) => assert_eq!(e.reason(), Reason::CorruptSnapshot, "{name} {at}: {e}"),
            }
        }
        let mut tail = bytes.clone();
        tail.extend_from_slice(b"tail");
        here.refuses(&name, &tail, "");
    }
    let zip = zipped(&[("a.db", &db)], CompressionMethod::Stored);
    for at in (60..db.len()).step_by(501) {
        let mut flipped = zip.clone();
        flipped[at] ^= 1;
        here.refuses("flipped.zip", &flipped, "");
    }
}

#[test]
fn other_files_are_refused_with_what_to_do() {
    let here = Here::new();
    let db = with_checksum(&small_database(1024));
    here.refuses("empty.db", b"", "it is empty");
    here.refuses("notes.txt", b"these are my notes", "it is a text");
    here.refuses("state.db", b"SQLite format 3\0\x10\0", "SQLite");
    here.refuses("zeros.db", &[0; 8192], "not a bbolt database");
    here.refuses("bz.db", b"BZh91AY&SY", "unpack it first");
    let two = zipped(&[("a", &db), ("b", &db)], CompressionMethod::Stored);
    here.refuses("two.zip", &two, "holds several databases");
    let none = zipped(&[("a/", &[])], CompressionMethod::Stored);
    here.refuses("none.zip", &none, "holds no database");
    here.refuses(
        "bare.zip",
        &zipped(&[], CompressionMethod::Stored),
        "holds no database",
    );
    let events = serde_json::to_vec(&small_events()).unwrap();
    let delta = with_checksum(&events);
    for (name, bytes, _) in shapes(&delta) {
        if name == "rke1.zip" {
            here.refuses(&name, &bytes, "no database of etcd");
            continue;
        }
        here.refuses(&name, &bytes, "it is a delta snapshot");
    }
    let open = |path: PathBuf| here.ctx.plain(&FilePlace::Path(path)).err().unwrap();
    let e = open(here.dir.path().join("missing.db"));
    assert_eq!(e.reason(), Reason::NoSnapshots, "{e}");
    let e = open(here.dir.path().to_owned());
    assert_eq!(e.reason(), Reason::NoSnapshots, "{e}");
    // Opening a pipe does not wait for a writer.
    let e = open("/dev/null".into());
    assert_eq!(e.reason(), Reason::Usage, "{e}");
}

#[test]
fn a_signal_ends_the_copying() {
    let here = Here::new();
    let path = here.put("a.db", &with_checksum(&small_database(1024)));
    here.ctx.store.cancel().cancel();
    let e = here.ctx.plain(&FilePlace::Path(path)).err().unwrap();
    assert_eq!(e.reason(), Reason::Terminated);
}

/// A file that unpacks to more than fits ends with the disk's limit; one that unpacks to something large that
/// is no database is refused.
#[test]
fn a_small_file_of_much_content_is_no_harm() {
    let here = Here::new();
    let zeros = vec![0; 64 << 20];
    let zip = zipped(&[("zeros", &zeros)], CompressionMethod::Deflated);
    assert!(zip.len() < 1 << 20);
    here.refuses("bomb.zip", &zip, "not a bbolt database");
    here.refuses(
        "bomb.gz",
        &Compression::Gzip.pack(&zeros),
        "not a bbolt database",
    );
}

async fn of_a_real_etcd(version: EtcdVersion) {
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(version, &folder.path().join("data"));
    let mut client = etcd.client().await;
    for i in 0..500 {
        client
            .put(format!("/k/{}", i % 50), format!("value {i}"), None)
            .await
            .unwrap();
    }
    let revision = etcd.revision().await;
    let expected = etcd.hash_kv(revision).await;
    let snapshot = etcd.snapshot().await;
    let db = etcd.data_dir().join("member/snap/db");
    etcd.stop();
    let db = std::fs::read(db).unwrap();
    tokio::task::spawn_blocking(move || {
        let here = Here::new();
        for (payload, has_checksum) in [(&snapshot, true), (&db, false)] {
            for (name, bytes, _) in shapes(payload) {
                let plain = here
                    .open(&name, &bytes)
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(plain.has_checksum, has_checksum, "{name}");
                assert_eq!(plain.base.revision, Revision(revision), "{name}");
                let hash = deltafold::mvcc::hash_kv(&plain.db, None).unwrap();
                assert_eq!((hash.hash, hash.live_keys), (expected.hash, 50), "{name}");
            }
        }
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn of_etcd_3_5() {
    of_a_real_etcd(EtcdVersion::V3_5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_etcd_3_6() {
    of_a_real_etcd(EtcdVersion::V3_6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_etcd_3_7() {
    of_a_real_etcd(EtcdVersion::V3_7).await;
}
