//! Decompression bombs: small objects that unpack to gigabytes. Each command runs with little memory and a
//! limit on file sizes; the kernel kills a command that takes more, and the test fails.

use crate::support::history::{Compression, with_checksum};
use crate::support::made_backups::Bucket;
use crate::support::tiny_backup::*;
use crate::support::{deltafold, restore, run_json, scratch, succeed};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use deltafold::bolt::page::{Meta, PAGE_HEADER_SIZE};
use deltafold::bolt::{PageId, TreeBuilder, write_file};
use deltafold::mvcc::revision::encode_revision;
use deltafold::mvcc::{KeyValue, RecordKey, Revision};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;

/// The limits of a command: private memory, and the longest file that it writes.
#[derive(Clone, Copy)]
struct Confined {
    memory: u64,
    file: u64,
}

impl Confined {
    /// Returns the exit code, the JSON and standard error.
    fn run(self, args: &[&str]) -> (i32, Value, String) {
        let plain = deltafold();
        let mut c = Command::new("sh");
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => c.env(name, value),
                None => c.env_remove(name),
            };
        }
        let limits = "ulimit -c 0; ulimit -d $1; ulimit -f $2; shift 2; exec \"$@\"";
        c.args(["-c", limits, "sh"])
            .arg((self.memory / 1024).to_string())
            .arg((self.file / 512).to_string())
            .arg(plain.get_program())
            .args(args)
            .args(["--output", "json", "--threads", "2"]);
        if args[0] == "get" {
            c.args(["--output", "result"]);
        }
        run_json(&mut c)
    }
}

/// Runs every command that reads a backup. Each fails with this reason, except those in `unhurt`.
#[track_caller]
fn all_refuse(bucket: &Bucket, confined: Confined, flags: &[&str], reason: &str, unhurt: &[&str]) {
    let folder = scratch::folder().unwrap();
    let place = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (data, copy) = (place("data"), place("copy"));
    let store = bucket.path().to_str().unwrap();
    let before = bucket.names();
    for args in [
        &["compact", "--store", store][..],
        &["restore", "--store", store, "--data-dir", &data],
        &["get", "/registry/a", "--store", store],
        &["history", "/registry/a", "--store", store],
        &["export", "--store", store],
        &["verify", "--store", store, "--level", "fold"],
        &["copy", "--from", store, "--to", &copy],
        &["list", "--deep", "--store", store],
    ] {
        let (code, json, stderr) = confined.run(&[args, flags].concat());
        let told = json.to_string() + &stderr;
        let what = format!("{}: {code} {told}", args[0]);
        if unhurt.contains(&args[0]) {
            assert!(code == 0 || code == 65, "{what}");
            continue;
        }
        assert_eq!(code, 65, "{what}");
        assert!(told.contains(reason), "{what}");
        assert!(!Path::new(&data).exists());
    }
    assert_eq!(bucket.names(), before);
}

/// Returns the zstd stream of `bytes` times `byte`, rounded up to 4 MiB: one frame of 4 MiB, repeated.
fn many(byte: u8, bytes: u64) -> Vec<u8> {
    let frame = Compression::Zstd.pack(&vec![byte; 4 << 20]);
    frame.repeat(bytes.div_ceil(4 * MIB) as usize)
}

/// Returns a compressed stream with a valid checksum: `begin`, `times` MiB of one byte, `end`.
fn framed(begin: &[u8], byte: u8, times: u64, end: &[u8]) -> Vec<u8> {
    let middle = vec![byte; MIB as usize];
    let mut hash = Sha256::new();
    hash.update(begin);
    (0..times).for_each(|_| hash.update(&middle));
    hash.update(end);
    let end = [end, &hash.finalize()].concat();
    let packed = Compression::Zstd.pack(&middle).repeat(times as usize);
    [
        Compression::Zstd.pack(begin),
        packed,
        Compression::Zstd.pack(&end),
    ]
    .concat()
}

fn only(path: String, object: Vec<u8>) -> Bucket {
    Bucket::of(&Objects::from([(path, object)]))
}

/// Returns the small base and a delta with these bytes.
fn with_delta(packed: Vec<u8>) -> Bucket {
    Bucket::of(&Objects::from([
        (
            full_name(Compression::Zstd),
            object(&small_database(PAGE), Compression::Zstd),
        ),
        (delta_name(Compression::Zstd), packed),
    ]))
}

/// Returns a database whose only key has a value of `value` zeros, and whose bucket `meta` has `meta` zeros
/// more.
fn database_with(value: usize, meta: usize) -> Vec<u8> {
    let file = write_file(tempfile::tempfile().unwrap(), PAGE, "", |w| {
        let rk = RecordKey {
            main: Revision(SMALL_BASE),
            sub: 0,
            tombstone: false,
        };
        let (mut raw, mut record) = (Vec::new(), Vec::new());
        rk.encode(&mut raw);
        let kv = KeyValue {
            key: b"/registry/a",
            create_revision: Revision(SMALL_BASE),
            mod_revision: Revision(SMALL_BASE),
            version: 1,
            value: &vec![0; value],
            lease: 0,
        };
        kv.encode(&mut record);
        let mut root = TreeBuilder::new(0);
        let mut key = TreeBuilder::new(0);
        key.push(w, &raw, &record)?;
        let key = key.finish(w)?;
        root.push_bucket(w, b"key", &key)?;
        let mut tree = TreeBuilder::new(0);
        if meta > 0 {
            tree.push(w, b"a bomb", &vec![0; meta])?;
        }
        for name in [&b"finishedCompactRev"[..], b"scheduledCompactRev"] {
            tree.push(w, name, &encode_revision(Revision(1), 0))?;
        }
        let tree = tree.finish(w)?;
        root.push_bucket(w, b"meta", &tree)?;
        Ok(root)
    });
    let (mut file, mut bytes) = (file.unwrap(), Vec::new());
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Changes the database size in both bbolt meta pages, and their checksums with it.
fn promise(db: &mut [u8], bytes: u64) {
    for page in [0, PAGE] {
        let at = page + PAGE_HEADER_SIZE;
        let mut meta = Meta::decode(&db[at..]).unwrap();
        meta.high_water = PageId(bytes / PAGE as u64);
        meta.encode(&mut db[at..]);
    }
}

/// Returns the JSON of a put of a new key, split where the base64 of its value belongs.
fn put_around(revision: i64) -> (String, String) {
    let event = json!({"etcdEvent": {"kv": {"key": BASE64.encode(format!("new/{revision}")),
        "create_revision": revision, "mod_revision": revision, "version": 1, "value": "@"}},
        "time": "2026-11-21T02:30:00Z"});
    let text = event.to_string();
    let (before, behind) = text.split_once('@').unwrap();
    (before.to_owned(), behind.to_owned())
}

/// Returns a zip archive with this many empty files.
fn zip_of(files: u64) -> Vec<u8> {
    let (mut archive, mut directory) = (Vec::new(), Vec::new());
    for i in 0..files {
        let (begin, name) = (archive.len() as u32, format!("f{i:07}"));
        archive.extend(b"PK\x03\x04");
        archive.extend([0; 22]);
        archive.extend([8, 0, 0, 0]);
        archive.extend(name.bytes());
        directory.extend(b"PK\x01\x02");
        directory.extend([0; 24]);
        directory.extend([8, 0]);
        directory.extend([0; 12]);
        directory.extend(begin.to_le_bytes());
        directory.extend(name.bytes());
    }
    let (begin, length) = (archive.len() as u64, directory.len() as u64);
    let end = begin + length;
    archive.extend(directory);
    archive.extend(b"PK\x06\x06");
    archive.extend(44_u64.to_le_bytes());
    archive.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for number in [files, files, length, begin] {
        archive.extend(number.to_le_bytes());
    }
    archive.extend(b"PK\x06\x07\0\0\0\0");
    archive.extend(end.to_le_bytes());
    archive.extend([1, 0, 0, 0]);
    archive.extend(b"PK\x05\x06\0\0\0\0");
    archive.extend([0xff; 12]);
    archive.extend([0, 0]);
    archive
}

/// An archive of 151 MiB once cost 593 MB before it was refused.
#[test]
fn a_zip_of_a_million_files_is_not_held() {
    let folder = scratch::folder().unwrap();
    let (file, data) = (folder.path().join("x.zip"), folder.path().join("data"));
    let confined = Confined {
        // The zip reader reserves 138 MiB for the announced files, before it reads their list.
        memory: 218 * MIB,
        file: MIB,
    };
    for (files, said) in [(2, "no database"), (1_000_000, "too many files")] {
        fs::write(&file, zip_of(files)).unwrap();
        let (file, data) = (file.to_str().unwrap(), data.to_str().unwrap());
        let restore = ["restore", "--snapshot", file, "--data-dir", data];
        let (code, json, stderr) = confined.run(&restore);
        assert_eq!(code, 65, "{files} files: {json} {stderr}");
        assert_eq!(json["reason"], "CorruptSnapshot", "{files} files: {json}");
        assert!(json["message"].as_str().unwrap().contains(said), "{json}");
    }
}

/// An object of 80 KiB once filled the temporary directory with 2 GiB before it was refused.
#[test]
fn a_full_that_unpacks_without_end_is_not_stored() {
    let begin = Compression::Zstd.pack(&small_database(PAGE));
    let bomb = [begin, many(0, 2048 * MIB)].concat();
    assert!(bomb.len() < 200 << 10, "{}", bomb.len());
    let bucket = only(full_name(Compression::Zstd), bomb.clone());
    let confined = Confined {
        memory: 80 * MIB,
        file: MIB,
    };
    all_refuse(&bucket, confined, &[], "CorruptSnapshot", &["list"]);
    let (_, json, _) = confined.run(&["compact", "--store", bucket.path().to_str().unwrap()]);
    let said = json["message"].as_str().unwrap();
    assert!(said.contains("meta pages promise"), "{said}");
    // The same as a plain snapshot file.
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("bomb");
    fs::write(&file, bomb).unwrap();
    let (data, file) = (folder.path().join("data"), file.to_str().unwrap());
    let restore = ["restore", "--snapshot", file, "--data-dir"];
    let (code, json, stderr) = confined.run(&[&restore[..], &[data.to_str().unwrap()]].concat());
    assert_eq!(
        (code, &json["reason"]),
        (65, &"CorruptSnapshot".into()),
        "{stderr}"
    );
}

/// The meta pages promise 20 GiB, with valid checksums.
#[test]
fn a_full_of_more_than_is_allowed_is_told_by_its_meta_pages() {
    let mut db = small_database(PAGE);
    promise(&mut db, 20 << 30);
    let bomb = [Compression::Zstd.pack(&db), many(0, 2048 * MIB)].concat();
    let bucket = only(full_name(Compression::Zstd), bomb);
    let confined = Confined {
        memory: 80 * MIB,
        file: MIB,
    };
    all_refuse(&bucket, confined, &[], "TooLarge", &["list"]);
    let store = bucket.path().to_str().unwrap();
    let (_, json, _) = confined.run(&["compact", "--store", store]);
    let said = json["message"].as_str().unwrap();
    assert!(said.contains("21474836480 bytes") && said.contains("--max-database-bytes"));
    // With a higher limit, the command fails for another reason: most of the promised database is missing.
    let (_, json, _) = confined.run(&["compact", "--store", store, "--max-database-bytes", "32Gi"]);
    assert!(
        json["reason"].is_string() && json["reason"] != "TooLarge",
        "{json}"
    );
}

/// The meta pages promise a PiB, which no disk has. The reason must be CorruptSnapshot: NoSpace would be
/// retried forever.
#[test]
fn a_promise_that_no_disk_can_hold_is_damage() {
    let mut db = small_database(PAGE);
    promise(&mut db, 1 << 50);
    let bomb = object(&db, Compression::Gzip);
    let bucket = only(full_name(Compression::Gzip), bomb.clone());
    let confined = Confined {
        memory: 80 * MIB,
        file: MIB,
    };
    let allowed = ["--max-database-bytes", "2048TiB"];
    all_refuse(&bucket, confined, &allowed, "CorruptSnapshot", &["list"]);
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("bomb");
    fs::write(&file, bomb).unwrap();
    let (data, file) = (folder.path().join("data"), file.to_str().unwrap());
    let restore = ["restore", "--snapshot", file, "--data-dir"];
    let args = [&restore[..], &[data.to_str().unwrap()], &allowed].concat();
    let (code, json, stderr) = confined.run(&args);
    assert_eq!(
        (code, &json["reason"]),
        (65, &"CorruptSnapshot".into()),
        "{stderr}"
    );
}

#[test]
fn a_backup_that_is_too_large_is_passed_over_for_another() {
    let small = Bucket::of(&small_bucket(PAGE, Compression::Gzip));
    let large = only(
        full_name(Compression::Zstd),
        object(&database_with(3 << 20, 0), Compression::Zstd),
    );
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    let mut c = deltafold();
    c.args([
        "restore",
        "--output",
        "json",
        "--max-database-bytes",
        "1MiB",
    ]);
    for store in [&large, &small] {
        c.arg("--store").arg(store.path());
    }
    let json = succeed(c.arg("--data-dir").arg(&data));
    assert_eq!(json["candidates"][0]["reason"], "TooLarge", "{json:#}");
    assert_eq!(json["restored_revision"], SMALL_LAST);
}

/// A bbolt record of 128 MiB is refused before it is read into memory. The limit is 16 MiB, and then the
/// default of 64 MiB.
#[test]
fn an_element_without_end_is_not_held() {
    let db = database_with(128 << 20, 0);
    let packed = framed(&db[..PAGE * 4], 0, 0, &db[PAGE * 4..]);
    let bucket = only(full_name(Compression::Zstd), packed);
    let confined = Confined {
        memory: 80 * MIB,
        file: 160 * MIB,
    };
    // Copying a full reads no elements.
    all_refuse(
        &bucket,
        confined,
        &["--max-value-bytes", "16MiB"],
        "TooLarge",
        &["copy", "list"],
    );
    let store = bucket.path().to_str().unwrap();
    let (code, json, stderr) = confined.run(&["compact", "--store", store]);
    assert_eq!(
        (code, &json["reason"]),
        (65, &"TooLarge".into()),
        "{stderr}"
    );
    let said = json["message"].as_str().unwrap();
    assert!(
        said.contains("--max-value-bytes") && said.contains("64 MiB"),
        "{said}"
    );
}

/// A value of 250 MiB in a delta of a few KiB used to take 828 MiB of memory.
#[test]
fn an_event_without_end_is_not_held() {
    let (before, behind) = put_around(SMALL_BASE + 1);
    let begin = format!("[{before}");
    let bomb = framed(begin.as_bytes(), b'A', 333, format!("{behind}]").as_bytes());
    assert!(bomb.len() < 64 << 10, "{}", bomb.len());
    let bucket = with_delta(bomb);
    let confined = Confined {
        memory: 200 * MIB,
        file: MIB,
    };
    all_refuse(&bucket, confined, &[], "TooLarge", &["copy", "list"]);
    // With a space after the brace, the general JSON parser reads the event.
    let begin = begin.replace("{\"etcdEvent", "{ \"etcdEvent");
    let bomb = framed(begin.as_bytes(), b'A', 333, format!("{behind}]").as_bytes());
    all_refuse(
        &with_delta(bomb),
        confined,
        &[],
        "TooLarge",
        &["copy", "list"],
    );
}

/// The longest allowed value is read, with the memory that docs/design/resources.md documents.
#[test]
fn the_longest_value_costs_what_is_documented() {
    const VALUE: u64 = 24;
    let (before, behind) = put_around(SMALL_BASE + 1);
    let begin = format!("[{before}");
    let delta = framed(
        begin.as_bytes(),
        b'A',
        VALUE / 3 * 4,
        format!("{behind}]").as_bytes(),
    );
    let base = database_with((VALUE * MIB) as usize, 0);
    let name = format!("v2/Incr-{0:08}-{0:08}-1795224690.zst", SMALL_BASE + 1);
    let bucket = Bucket::of(&Objects::from([
        (
            full_name(Compression::Zstd),
            object(&base, Compression::Zstd),
        ),
        (name, delta),
    ]));
    let confined = Confined {
        memory: (64 + 16 + 6 * VALUE) * MIB,
        file: 160 * MIB,
    };
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    let (store, data) = (bucket.path().to_str().unwrap(), data.to_str().unwrap());
    for args in [
        &["verify", "--store", store, "--level", "fold"][..],
        &["restore", "--store", store, "--data-dir", data],
        &["get", "/registry/a", "--store", store],
        &["list", "--deep", "--store", store],
        &["compact", "--store", store],
    ] {
        let (code, _, stderr) = confined.run(args);
        assert_eq!(code, 0, "{args:?}: {stderr}");
    }
}

/// Endless white space is a bomb; many small events are none.
#[test]
fn a_delta_without_end_is_not_read_on() {
    let confined = Confined {
        memory: 100 * MIB,
        file: 8 * MIB,
    };
    let allowed = ["--max-database-bytes", "32MiB"];
    let spaces = [Compression::Zstd.pack(b"["), many(b' ', 4096 * MIB)].concat();
    let bucket = with_delta(spaces);
    all_refuse(&bucket, confined, &allowed, "TooLarge", &["list"]);

    let changes = SMALL_BASE + 1..=SMALL_BASE + 10_000;
    let events = serde_json::to_vec(&put_events(changes.clone())).unwrap();
    let bucket = Bucket::of(&Objects::from([
        (
            full_name(Compression::Zstd),
            object(&small_database(PAGE), Compression::Zstd),
        ),
        (
            format!(
                "v2/Incr-{:08}-{:08}-1795224690.zst",
                changes.start(),
                changes.end()
            ),
            object(&events, Compression::Zstd),
        ),
    ]));
    // There is more than one event for each 4 KiB of the allowed size.
    let (code, json, stderr) = bucket.run("compact", &allowed);
    assert_eq!((code, &json["events"]), (0, &10_000.into()), "{stderr}");
}

/// A few long keys fill the memory like many short ones.
#[test]
fn keys_without_end_are_not_held() {
    let key = |n: i64| BASE64.encode([&vec![b'k'; 1 << 20][..], &n.to_be_bytes()].concat());
    let changes = SMALL_BASE + 1..=SMALL_LAST;
    let events: Vec<Value> = changes
        .map(|n| {
            json!({"etcdEvent": {"kv": {"key": key(n), "create_revision": n, "mod_revision": n,
                "version": 1}}, "time": "2026-11-21T02:30:00Z"})
        })
        .collect();
    let events = serde_json::to_vec(&events).unwrap();
    let bucket = with_delta(object(&events, Compression::Zstd));
    let (code, json, stderr) = bucket.run("compact", &["--max-database-bytes", "16MiB"]);
    assert_eq!(
        (code, &json["reason"]),
        (65, &"TooLarge".into()),
        "{stderr}"
    );
    assert!(json["message"].as_str().unwrap().contains("memory"));
    assert_eq!(bucket.run("compact", &[]).0, 0);
}

/// The size of the result is limited, too: it could not be read again.
#[test]
fn a_result_that_is_too_large_is_not_made() {
    let events: Vec<Value> = (SMALL_BASE + 1..=SMALL_LAST)
        .map(|n| {
            let mut event: Value = serde_json::from_str(&{
                let (before, behind) = put_around(n);
                format!("{before}{behind}")
            })
            .unwrap();
            event["etcdEvent"]["kv"]["value"] = BASE64.encode(vec![7; 1 << 20]).into();
            event
        })
        .collect();
    let delta = object(&serde_json::to_vec(&events).unwrap(), Compression::Zstd);
    let bucket = with_delta(delta);
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    // 12 MiB allow the eight values of a MiB, 7 MiB do not allow their sum.
    for (allowed, code) in [("12MiB", 0), ("7MiB", 65)] {
        for keep in ["latest", "all"] {
            let args = ["--keep-history", keep, "--max-database-bytes", allowed];
            let (got, json, stderr) = bucket.run("compact", &[&args[..], &["--dry-run"]].concat());
            assert_eq!(got, 0, "{json} {stderr}");
            let mut c = deltafold();
            c.args(["restore", "--output", "json", "--store"])
                .arg(bucket.path());
            c.arg("--data-dir")
                .arg(data.join(allowed).join(keep))
                .args(args);
            fs::create_dir_all(data.join(allowed)).unwrap();
            let (got, json, stderr) = run_json(&mut c);
            assert_eq!(got, code, "{allowed} {keep}: {json} {stderr}");
            assert!(code == 0 || json["reason"] == "TooLarge", "{json}");
        }
    }
}

/// A bbolt bucket that is read into memory as a whole.
#[test]
fn a_long_bucket_meta_is_not_held() {
    let db = database_with(10, 8 << 20);
    let bucket = only(full_name(Compression::Zstd), object(&db, Compression::Zstd));
    let folder = scratch::folder().unwrap();
    let (code, json, stderr) = restore(bucket.path(), &folder.path().join("data"), &[]);
    assert_eq!(
        (code, &json["reason"]),
        (65, &"CorruptSnapshot".into()),
        "{stderr}"
    );
    assert!(json["message"].as_str().unwrap().contains("meta"), "{json}");
}

/// The window that a zstd frame asks for is memory, whatever the frame contains.
#[test]
fn a_zstd_window_of_128_mib_is_not_opened() {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(27).unwrap();
    std::io::Write::write_all(&mut encoder, &with_checksum(&small_database(PAGE))).unwrap();
    let packed = encoder.finish().unwrap();
    let bucket = only(full_name(Compression::Zstd), packed.clone());
    let said = bucket.refuses(&[], 65, "CorruptSnapshot");
    assert!(said.contains("window is larger than 8 MiB"), "{said}");
    // Plain snapshot files may come from any tool.
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("plain");
    fs::write(&file, packed).unwrap();
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--snapshot"])
        .arg(file);
    c.arg("--data-dir").arg(folder.path().join("data"));
    succeed(&mut c);
}
