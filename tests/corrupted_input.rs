//! Damaged snapshots: refused with the right code, or of no consequence; never a panic, never a
//! wrong result.

mod support;

use deltafold::bolt::Database;
use deltafold::bucket::SnapshotName;
use deltafold::bucket::delta::DeltaReader;
use deltafold::mvcc::hash_kv;
use std::fs;
use std::io::Read;
use support::buckets::{BASE, Bucket, LAST};
use support::history::{Compression, with_checksum};
use support::{copy_fixture, deltafold, expected, fixtures_dir, run_json};

fn seed() -> u64 {
    let given = std::env::var("DELTAFOLD_TEST_SEED").ok();
    let seed = given.map_or_else(|| fastrand::u64(..1 << 48), |s| s.parse().expect("a seed"));
    println!("seed {seed} (DELTAFOLD_TEST_SEED={seed} runs it again)");
    seed
}

/// The kubernetes fixture's base, unpacked, without its hash.
fn small_database() -> Vec<u8> {
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
            for i in 0..30 {
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
        with_checksum(&small_database()[..8192]),
    ] {
        let b = Bucket::with_base();
        b.put("v2/Full-00000000-00000800-1795224690", &content);
        b.refuses(&[], 65, "CorruptSnapshot");
    }
}

#[test]
fn a_database_with_one_bad_meta_is_read_by_the_other() {
    let good = small_database();
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

#[test]
fn a_damaged_database_never_panics_the_reader() {
    let mut rng = fastrand::Rng::with_seed(seed());
    let good = small_database();
    let page = Database::open(good.clone()).unwrap().page_size();
    let pages = good.len() / page;
    for _ in 0..3000 {
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
    for _ in 0..20_000 {
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
