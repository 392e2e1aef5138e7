//! Damaged snapshots: refused with the right code, or of no consequence; never a panic, never a
//! wrong result. Each kind of damage by the program itself; tests/faults/every_byte.rs goes on from there.

use crate::support::history::{Compression, with_checksum};
use crate::support::made_backups::{BASE, Bucket, LAST};
use crate::support::scratch;
use crate::support::tiny_backup::*;
use crate::support::{copy_fixture, deltafold, expected, fixtures_dir, rounds, run_json, seed};
use deltafold::backup::SnapshotName;
use deltafold::backup::delta::DeltaReader;
use deltafold::bolt::page::{Meta, PAGE_HEADER_SIZE, PageHeader};
use deltafold::bolt::{Database, PageId};
use deltafold::mvcc::hash_kv;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

/// The kubernetes fixture's base, unpacked, without its hash.
fn kubernetes_database() -> Vec<u8> {
    let path = fixtures_dir().join("kubernetes/v2/Full-00000000-00000275-1795228239.gz");
    let mut db = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(path).unwrap())
        .read_to_end(&mut db)
        .unwrap();
    db.truncate(db.len() - 32);
    db
}

#[test]
fn damage_anywhere_is_refused_or_of_no_consequence() {
    let mut rng = fastrand::Rng::with_seed(seed());
    let want = expected("kubernetes").compacted_at_last_revision.hash;
    for compression in Compression::ALL {
        let store = copy_fixture("kubernetes");
        let v2 = store.path().join("v2");
        // The fixture in this compression.
        for entry in fs::read_dir(&v2)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect::<Vec<_>>()
        {
            let mut plain = Vec::new();
            flate2::read::GzDecoder::new(fs::File::open(&entry).unwrap())
                .read_to_end(&mut plain)
                .unwrap();
            fs::remove_file(&entry).unwrap();
            let name = entry.file_stem().unwrap().to_str().unwrap();
            fs::write(
                v2.join(format!("{name}{}", compression.suffix())),
                compression.pack(&plain),
            )
            .unwrap();
        }
        let mut names: Vec<_> = fs::read_dir(&v2)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        names.sort();
        for which in [0, 4] {
            let path = v2.join(&names[which]);
            let good = fs::read(&path).unwrap();
            for i in 0..9 {
                let at = rng.usize(..good.len());
                let mut bad = good.clone();
                match i % 3 {
                    0 => bad[at] ^= 1 << rng.u8(..8),
                    1 => bad.truncate(at),
                    _ => bad.insert(at, rng.u8(..)),
                }
                fs::write(&path, &bad).unwrap();
                let mut c = deltafold();
                let (code, json, stderr) = run_json(
                    c.args([
                        "compact",
                        "--output",
                        "json",
                        "--compression",
                        "none",
                        "--store",
                    ])
                    .arg(store.path()),
                );
                let what = format!(
                    "{compression:?} {:?}, case {i} at {at}: {stderr}",
                    names[which]
                );
                if code == 0 {
                    assert_eq!(json["hash_kv"], want, "{what}");
                    fs::remove_file(v2.join(json["snapshot"].as_str().unwrap())).unwrap();
                } else {
                    assert_eq!(
                        (code, json["reason"].as_str()),
                        (65, Some("CorruptSnapshot")),
                        "{what}"
                    );
                    assert!(stderr.contains(names[which].to_str().unwrap()), "{what}");
                }
                assert_eq!(fs::read_dir(&v2).unwrap().count(), names.len(), "{what}");
            }
            fs::write(&path, &good).unwrap();
        }
    }
}

#[test]
fn whole_but_senseless_snapshots_have_their_reasons() {
    let name = format!("v2/Incr-{:08}-{LAST:08}-1795224690", BASE + 1);
    for (content, reason) in [
        (Vec::new(), "CorruptSnapshot"),
        (with_checksum(b""), "CorruptSnapshot"),
        (with_checksum(b"[]"), "NameMismatch"),
        (with_checksum(b"null"), "CorruptSnapshot"),
        (with_checksum(b"[{\"etcdEvent\":{}}]"), "CorruptSnapshot"),
        (b"[]".to_vec(), "CorruptSnapshot"),
        (vec![b'['; 100_000], "CorruptSnapshot"),
        (with_checksum(&vec![b'{'; 100_000]), "CorruptSnapshot"),
    ] {
        let b = Bucket::with_base();
        b.put(&name, &content);
        b.refuses(&[], 65, reason);
    }
    for content in [
        with_checksum(b""),
        with_checksum(&[0; 8192]),
        with_checksum(&kubernetes_database()[..8192]),
    ] {
        let b = Bucket::with_base();
        b.put("v2/Full-00000000-00000800-1795224690", &content);
        b.refuses(&[], 65, "CorruptSnapshot");
    }
}

#[test]
fn a_database_with_one_bad_meta_is_read_by_the_other() {
    let good = kubernetes_database();
    let want = hash_kv(&Database::open(good.clone()).unwrap(), None).unwrap();
    let page = Database::open(good.clone()).unwrap().page_size();
    for at in [20, page + 20] {
        let mut one = good.clone();
        one[at] ^= 1;
        let db = Database::open(one.clone()).unwrap();
        // The older meta may be a transaction behind; here both see the same keys or the pages of
        // the older are still whole.
        assert!(hash_kv(&db, None).is_ok());
        one[page + 20] ^= 0xff;
        one[20] ^= 0xff;
        assert!(Database::open(one).is_err());
    }
    assert_eq!(want.hash, expected("kubernetes").hash_kv[0].hash);
}

/// The file is hashed while it is restored: a wrong hash counts before anything has a name, and is what is told
/// whatever else is wrong because of it.
#[test]
fn a_plain_file_with_a_wrong_hash_is_restored_nowhere() {
    let mut rng = fastrand::Rng::with_seed(seed());
    let good = with_checksum(&kubernetes_database());
    let page = Database::open(good.clone()).unwrap().page_size();
    let dir = scratch::folder().unwrap();
    let file = dir.path().join("a.db");
    let (data, copy) = (dir.path().join("data"), dir.path().join("copy.db"));
    let restore = |extra: &[&str]| {
        let mut c = deltafold();
        c.args(["restore", "--output", "json", "--snapshot"]);
        run_json(c.arg(&file).args(extra))
    };
    let into_data = ["--data-dir", data.to_str().unwrap()];
    let dry_run = [&into_data[..], &["--dry-run"]].concat();
    let if_needed = [&into_data[..], &["--if-needed", "full"]].concat();
    for _ in 0..rounds(5, 40) {
        let mut bad = good.clone();
        bad[rng.usize(2 * page..good.len())] ^= 1 << rng.u8(..8);
        fs::write(&file, bad).unwrap();
        for extra in [
            &into_data[..],
            &dry_run,
            &if_needed,
            &["--to-snapshot", copy.to_str().unwrap()],
        ] {
            let (code, failed, stderr) = restore(extra);
            assert_eq!(code, 65, "{extra:?}: {stderr}");
            assert!(failed.to_string().contains("SHA-256"), "{failed}");
            assert!(failed.to_string().contains("a.db"), "{failed}");
            assert!(!copy.exists() && !data.join("member").exists());
            let left = fs::read_dir(dir.path()).unwrap().count();
            assert!(left <= 2, "{extra:?} left {left} files");
        }
    }
    fs::write(&file, good).unwrap();
    let (code, _, stderr) = restore(&into_data);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn a_damaged_database_never_panics_the_reader() {
    let mut rng = fastrand::Rng::with_seed(seed());
    let good = kubernetes_database();
    let page = Database::open(good.clone()).unwrap().page_size();
    let pages = good.len() / page;
    for _ in 0..rounds(100, 1000) {
        let mut bad = good.clone();
        for _ in 0..rng.usize(1..4) {
            // Mostly where structure is: page headers and elements.
            let within = if rng.bool() { 64 } else { page };
            let at = rng.usize(..pages) * page + rng.usize(..within);
            match rng.u8(..3) {
                0 => bad[at] = rng.u8(..),
                1 => bad[at] ^= 1 << rng.u8(..8),
                _ => {
                    let (from, to) = (rng.usize(..pages) * page, rng.usize(2..pages) * page);
                    bad.copy_within(from..from + page, to);
                }
            }
        }
        // Damage in a value is the checksum's to find; here only that it ends, one way or another.
        if let Ok(db) = Database::open(bad) {
            let _ = hash_kv(&db, None);
        }
    }
}

#[test]
fn a_damaged_delta_never_panics_the_parser() {
    let mut rng = fastrand::Rng::with_seed(seed());
    let b = Bucket::with_base();
    let good = serde_json::to_vec(&b.events(BASE + 1, BASE + 30)).unwrap();
    let name: SnapshotName = format!("Incr-{:08}-{:08}-1", BASE + 1, BASE + 30)
        .parse()
        .unwrap();
    let read = |json: &[u8]| {
        let mut delta = DeltaReader::new(json, &name);
        while delta.next()?.is_some() {}
        Ok::<_, deltafold::Error>(delta.events())
    };
    assert!(read(&good).unwrap() >= 30);
    for _ in 0..rounds(500, 5000) {
        let mut bad = good.clone();
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(..bad.len());
            match rng.u8(..4) {
                0 => bad[at] = rng.u8(..),
                1 => bad[at] = *rng.choice(b"{}[]\",:\\0nt ").unwrap(),
                2 => bad.truncate(at + 1),
                _ => bad.insert(at, *rng.choice(b"{}[]\",:\\0nt ").unwrap()),
            }
        }
        if let Err(e) = read(&bad) {
            assert_eq!(e.reason().exit_code(), 65, "{e}");
        }
    }
}

#[test]
fn a_damaged_end_is_not_passed_over_where_streams_overlap() {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.delta(1400, 1800, 7);
    let last = b.delta(1700, LAST, 8);
    b.put(&format!("v2/{last}"), b"damaged");
    for args in [&[][..], &["--revision", "1800"]] {
        let message = b.refuses(args, 65, "CorruptSnapshot");
        assert!(
            message.contains(&last) && message.contains("--timeline"),
            "{message}"
        );
    }
    let result = b.compact(&["--timeline", "main"]);
    assert_eq!(result["revision"], 1800);
    assert!(
        result["warnings"][0].as_str().unwrap().contains(&last),
        "{result}"
    );
}

/// All files below a folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            found.extend(files(&entry));
        } else {
            found.insert(entry.to_str().unwrap().to_owned(), fs::read(entry).unwrap());
        }
    }
    found
}

/// Runs the program on a bucket of these objects: what it answers, and that it changed nothing but
/// what it says.
fn run(objects: &Objects) -> (i32, Value, String) {
    let store = scratch::folder().unwrap();
    for (path, bytes) in objects {
        let path = store.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let before = files(store.path());
    let mut c = deltafold();
    c.args(["compact", "--output", "json", "--store"]);
    let (code, json, stderr) = run_json(c.arg(store.path()));
    let mut after = files(store.path());
    if let Some(made) = json["snapshot"].as_str() {
        after.retain(|path, _| !path.ends_with(made));
    }
    assert!(before == after, "the bucket is not what it was: {stderr}");
    (code, json, stderr)
}

/// The program refuses a bucket with this reason; the message holds `says`.
fn refuses(what: &str, objects: &Objects, reason: &str, says: &[&str]) {
    let (code, json, stderr) = run(objects);
    let message = json["message"].as_str().unwrap_or_default();
    assert_eq!(
        (code, json["reason"].as_str()),
        (65, Some(reason)),
        "{what}: {stderr}"
    );
    assert!(
        stderr.contains(message) && stderr.contains(&format!("[{reason}]")),
        "{what}: {stderr}"
    );
    for says in says {
        assert!(message.contains(says), "{what}: {message}");
    }
}

const GZIP: Compression = Compression::Gzip;

/// The small bucket with another object at a path.
fn with(path: &str, bytes: Vec<u8>) -> Objects {
    let mut objects = small_bucket(1024, GZIP);
    objects.insert(path.to_owned(), bytes);
    objects
}

#[test]
fn objects_that_are_damaged_or_not_what_their_name_says() {
    let good = small_bucket(1024, GZIP);
    assert_eq!(run(&good).0, 0);
    let (full, delta) = (full_name(GZIP), delta_name(GZIP));
    for path in [&full, &delta] {
        let other = if *path == full { &delta } else { &full };
        let whole = &good[path];
        let mut wrong_hash = with_checksum(b"[]");
        wrong_hash[20] ^= 1;
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 4;
        let corrupt: [(&str, Vec<u8>); 8] = [
            ("truncated", whole[..whole.len() / 2].to_vec()),
            (
                "the last byte is missing",
                whole[..whole.len() - 1].to_vec(),
            ),
            ("more behind it", [whole, &b"more"[..]].concat()),
            ("a flipped bit", flipped),
            ("a wrong hash", GZIP.pack(&wrong_hash)),
            ("an empty object", Vec::new()),
            ("an empty payload", object(b"", GZIP)),
            ("the other kind's content", good[other].clone()),
        ];
        for (what, bytes) in corrupt {
            refuses(what, &with(path, bytes), "CorruptSnapshot", &[path]);
        }
        for compression in Compression::ALL {
            // Under a suffix of another compression.
            let renamed = path.replace(".gz", compression.suffix());
            let mut objects = good.clone();
            let bytes = objects.remove(path).unwrap();
            objects.insert(renamed.clone(), bytes);
            if compression != GZIP {
                refuses("a wrong suffix", &objects, "CorruptSnapshot", &[&renamed]);
            }
        }
    }
    // Names that promise other revisions than there are.
    for (start, last, reason) in [
        (40, 48, "NameMismatch"),
        (42, 48, "NameMismatch"),
        (41, 47, "NameMismatch"),
        (41, 49, "NameMismatch"),
        (43, 50, "RevisionGap"),
    ] {
        let mut objects = good.clone();
        let bytes = objects.remove(&delta).unwrap();
        let name = format!("v2/Incr-{start:08}-{last:08}-1795224690.gz");
        objects.insert(name.clone(), bytes);
        let says = match (start, reason) {
            (42, _) => {
                // The gap that the name makes is closed by another one.
                let one = serde_json::to_vec(&small_events()[..1]).unwrap();
                objects.insert(
                    "v2/Incr-00000041-00000041-1795224689.gz".to_owned(),
                    object(&one, GZIP),
                );
                name.as_str()
            }
            (43, _) => "missing are 41 to 42",
            _ => name.as_str(),
        };
        refuses(&name, &objects, reason, &[says]);
    }
    let mut objects = good.clone();
    let bytes = objects.remove(&full).unwrap();
    let above = "v2/Full-00000000-00000041-1795224681.gz";
    objects.insert(above.to_owned(), bytes.clone());
    refuses(above, &objects, "NameMismatch", &[above, "it ends at 40"]);
    // A full may hold more than its name says.
    objects.remove(above);
    objects.insert("v2/Full-00000000-00000039-1795224681.gz".to_owned(), bytes);
    assert_eq!(run(&objects).1["hash_kv"], run(&good).1["hash_kv"]);
}

#[test]
fn deltas_that_are_no_array_of_events_in_order() {
    let events = small_events();
    let json = |events: &[Value]| serde_json::to_vec(events).unwrap();
    let all = json(&events);
    let text = String::from_utf8(all.clone()).unwrap();
    let one = text[1..].split_once(",{\"etcdEvent").unwrap().0;
    let edited = |i: usize, path: &str, value: Value| {
        let mut events = events.clone();
        *events[i]
            .pointer_mut(path)
            .unwrap_or_else(|| panic!("{path}")) = value;
        json(&events)
    };
    let moved =
        |order: &[usize]| json(&order.iter().map(|&i| events[i].clone()).collect::<Vec<_>>());
    let kv = "/etcdEvent/kv";
    let mut typed = events.clone();
    typed[2]["etcdEvent"]["type"] = json!(2);
    let mut named = events.clone();
    named[2]["etcdEvent"]["type"] = json!("DELETE");

    let corrupt: Vec<(&str, Vec<u8>)> = vec![
        ("words", b"hello".to_vec()),
        ("null", b"null".to_vec()),
        ("an object", b"{}".to_vec()),
        ("zeros", vec![0; 300]),
        ("a byte order mark", [&b"\xef\xbb\xbf"[..], &all].concat()),
        (
            "UTF-16",
            text.encode_utf16().flat_map(u16::to_le_bytes).collect(),
        ),
        ("elements that are no objects", b"[1,2]".to_vec()),
        ("null elements", b"[null]".to_vec()),
        ("an array within", [b"[", &all[..], b"]"].concat()),
        ("empty objects", b"[{},{}]".to_vec()),
        (
            "an event without key and value",
            b"[{\"etcdEvent\":{}}]".to_vec(),
        ),
        ("a missing bracket", all[..all.len() - 1].to_vec()),
        ("a missing brace", all[..all.len() - 2].to_vec()),
        ("half an event", all[..all.len() / 2].to_vec()),
        (
            "a comma at the end",
            [&all[..all.len() - 1], b",]"].concat(),
        ),
        ("two commas", text.replacen("},{", "},,{", 1).into_bytes()),
        ("no comma", text.replacen("},{", "} {", 1).into_bytes()),
        ("two arrays", [&all[..], &all[..]].concat()),
        ("bytes behind it", [&all[..], b"x"].concat()),
        (
            "one event a line",
            text[1..text.len() - 1].replace("},{", "}\n{").into_bytes(),
        ),
        ("brackets without end", vec![b'['; 10_000]),
        (
            "objects without end",
            [&b"["[..], &b"{\"a\":".repeat(10_000)].concat(),
        ),
        (
            "a string without end",
            [&b"[{\"a\":\""[..], &vec![b'a'; 600_000]].concat(),
        ),
        (
            "a string that is no UTF-8",
            text.replacen("etcdEvent", "etcd\u{fffd}", 1).into_bytes(),
        ),
        (
            "a control character",
            text.replacen("2026", "\n2026", 1).into_bytes(),
        ),
        (
            "a field twice",
            text.replacen("\"kv\":", "\"kv\":{},\"kv\":", 1)
                .into_bytes(),
        ),
        (
            "a key that is a number",
            edited(2, &format!("{kv}/key"), json!(7)),
        ),
        (
            "a key that is no base64",
            edited(2, &format!("{kv}/key"), json!("a_b-")),
        ),
        (
            "base64 without padding",
            edited(2, &format!("{kv}/key"), json!("YQ")),
        ),
        ("an empty key", edited(2, &format!("{kv}/key"), json!(""))),
        (
            "a value that is null",
            edited(2, &format!("{kv}/value"), json!(null)),
        ),
        (
            "a value that is no base64",
            edited(2, &format!("{kv}/value"), json!("%%%%")),
        ),
        (
            "a revision that is text",
            edited(2, &format!("{kv}/mod_revision"), json!("43")),
        ),
        (
            "half a revision",
            edited(2, &format!("{kv}/mod_revision"), json!(43.5)),
        ),
        (
            "a revision beyond 64 bits",
            edited(2, &format!("{kv}/mod_revision"), json!(u64::MAX)),
        ),
        (
            "a revision below",
            edited(2, &format!("{kv}/mod_revision"), json!(-43)),
        ),
        (
            "no create_revision",
            edited(2, &format!("{kv}/create_revision"), json!(0)),
        ),
        (
            "created later",
            edited(2, &format!("{kv}/create_revision"), json!(44)),
        ),
        (
            "a negative version",
            edited(2, &format!("{kv}/version"), json!(-1)),
        ),
        ("an unknown type", json(&typed)),
        ("a type in words", json(&named)),
        ("an event again later", moved(&[0, 1, 0, 2, 3, 4, 5, 6, 7])),
        (
            "all events again",
            moved(&[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]),
        ),
    ];
    let mismatch: Vec<(&str, Vec<u8>)> = vec![
        ("an empty array", b"[]".to_vec()),
        ("one event of eight", format!("[{one}]").into_bytes()),
        ("two events change places", moved(&[0, 2, 1, 3, 4, 5, 6, 7])),
        ("an event is missing", moved(&[0, 1, 2, 4, 5, 6, 7])),
        ("the first is missing", moved(&[1, 2, 3, 4, 5, 6, 7])),
        ("the last is missing", moved(&[0, 1, 2, 3, 4, 5, 6])),
        ("they begin at the end", moved(&[7, 6, 5, 4, 3, 2, 1, 0])),
    ];
    let history: Vec<(&str, Vec<u8>)> = vec![
        ("an event twice", moved(&[0, 1, 1, 2, 3, 4, 5, 6, 7])),
        ("a deletion twice", moved(&[0, 1, 2, 3, 4, 5, 6, 7, 7])),
        (
            "a version that is left out",
            edited(2, &format!("{kv}/version"), json!(40)),
        ),
    ];
    let path = delta_name(GZIP);
    for (reason, cases) in [
        ("CorruptSnapshot", corrupt),
        ("NameMismatch", mismatch),
        ("HistoryMismatch", history),
    ] {
        for (what, payload) in cases {
            // What only shows at the end names both sides: the delta is not known there.
            let says: &[&str] = if what.starts_with("a version") {
                &["revision"]
            } else {
                &[&path]
            };
            refuses(what, &with(&path, object(&payload, GZIP)), reason, says);
        }
    }
}

/// A bbolt file that is edited by hand.
struct Edit(Vec<u8>);

impl Edit {
    const PAGE: usize = 1024;

    fn new() -> Self {
        Edit(small_database(Self::PAGE))
    }
    /// The first page with these flags.
    fn find(&self, flags: u8) -> usize {
        let mut pages = self.0.chunks_exact(Self::PAGE);
        pages.position(|p| p[8] == flags).expect("such a page")
    }
    /// The root bucket's only page: the last one.
    fn root(&self) -> usize {
        self.0.len() / Self::PAGE - 1
    }
    fn put(mut self, page: usize, at: usize, bytes: &[u8]) -> Self {
        self.0[page * Self::PAGE + at..][..bytes.len()].copy_from_slice(bytes);
        self
    }
    /// Changes both metas and sums them up again.
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
    // Offsets of elements: the first one stands behind the header.
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
    // With one meta of the two it goes on, and the result is the very same.
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

/// What one pass loads is bounded by the file, however its pages overlap.
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
    // A chain of branches; the leaf's key lies behind its element.
    for n in 2..PAGES - 1 {
        page(&mut file, n, 1, 0, [16, n as u64 + 1]);
    }
    page(&mut file, PAGES - 1, 2, 0, [16 << 32, 1]);
    assert!(walk(&file).is_ok());
    // Each goes on to the end of the file: together they are half its square.
    for n in 2..PAGES - 1 {
        page(&mut file, n, 1, PAGES - 1 - n, [16, n as u64 + 1]);
    }
    let e = walk(&file).unwrap_err();
    assert!(e.to_string().contains("exceeds the number of pages"), "{e}");
}

/// The leaf of each bucket names itself n times as a bucket: without one budget for all, a copy
/// would follow n^16 of them.
#[test]
fn buckets_that_share_pages_are_refused() {
    let edit = Edit::new();
    let root = edit.root();
    let mut file = edit.0;
    // Every top-level bucket but `key` and `meta` is the root page again.
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
